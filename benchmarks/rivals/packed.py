"""The floor: all files one behind another, no names, no checks. And plain tar."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from ..data import Files


def write_packed(files: Files, out: Path) -> list[tuple[int, int]]:
    """All bytes one behind another; (start, stop) of each."""
    pairs, at = [], 0
    with open(out, "wb") as target:
        for path, _ in files:
            data = Path(path).read_bytes()
            target.write(data)
            pairs.append((at, at + len(data)))
            at += len(data)
        os.fsync(target.fileno())
    return pairs


def write_tar(folder: str | Path, out: str | Path) -> None:
    """The folder by `tar cf`."""
    subprocess.run(["tar", "cf", str(out), "-C", str(folder), "."], check=True)
