"""Holds memory until only so many bytes are available: python -m benchmarks.memory_pressure BYTES

Grows and shrinks with what the others use. Locked, so that it is not swapped out instead; the first
to be killed when memory runs out; ends with its parent.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from pathlib import Path

PIECE = 32 << 20


def main(available: int) -> None:
    Path("/proc/self/oom_score_adj").write_text("1000")
    parent = os.getppid()
    libc = ctypes.CDLL(None)
    held: list[mmap.mmap] = []
    ready = False
    while os.getppid() == parent:
        left = memory_available()
        if left > available + PIECE:
            piece = mmap.mmap(-1, PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            start = ctypes.addressof(ctypes.c_char.from_buffer(piece))
            libc.mlock(ctypes.c_void_p(start), ctypes.c_size_t(PIECE))  # may be refused: no matter
            for at in range(0, PIECE, mmap.PAGESIZE):
                piece[at] = 1
            held.append(piece)
            continue
        if not ready:
            print("ready", flush=True)
            ready = True
        if left < available - PIECE and held:
            held.pop().close()
            continue
        time.sleep(0.02)


def memory_available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) << 10


if __name__ == "__main__":
    main(int(sys.argv[1]))
