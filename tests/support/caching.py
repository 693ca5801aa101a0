"""Shards for the cache's tests: their bytes by arithmetic, and what a process does with a cache."""

import hashlib
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

from shardio.storage.cache import CacheDirectory
from shardio.storage.cached_file import CachedFile
from support import LIMIT_S

ROOT = Path(__file__).resolve().parent.parent.parent
RANGE = 64 << 10
DATASET = b"0123456789abcdef"


def content(shard: int, start: int, length: int) -> bytes:
    """Return bytes of a shard: each differs by its shard and place."""
    begin, blocks = start // 32, (start + length) // 32 + 1
    made = b"".join(hashlib.blake2s(b"%d %d" % (shard, n)).digest() for n in range(begin, blocks))
    return made[start - 32 * begin :][:length]


def key_of(shard: int) -> str:
    return hashlib.sha256(b"%d" % shard).hexdigest()


def cache_at(path: Path, ranges: int = 1000) -> CacheDirectory:
    """Return a cache whose limit is so many ranges, and some room for maps."""
    return CacheDirectory(path, ranges * (RANGE + 1024), range_bytes=RANGE)


def open_shard(cache: CacheDirectory, shard: int = 0, size: int = 10 * RANGE + 77) -> CachedFile:
    return cache.open(key_of(shard), size, DATASET, shard)


def fill(file: CachedFile, number: int) -> bool:
    """Let a range be there; True if this call "downloaded" it."""
    claim = file.claim(number)
    if claim is None:
        return False
    with claim:
        claim.store(content(file.layout.shard, claim.start, claim.length))
    return True


def is_right(file: CachedFile, number: int) -> bool:
    start, length = file.layout.byte_range(number)
    return os.pread(file.descriptor, length, start) == content(file.layout.shard, start, length)


def on_disk(folder: Path) -> int:
    """Return the bytes that the files of a cache take."""
    return sum(one.lstat().st_blocks * 512 for one in folder.glob("shardio-*-*.cache"))


def the_file(folder: Path) -> Path:
    """Return the one file of a shard that a cache has."""
    [found] = folder.glob("shardio-*-*.cache")
    return found


def arguments(code: str, *more: str | Path) -> list[str]:
    """Return the command of a child process with these names at hand, and `path`: more[0]."""
    begin = """
        import os, sys, time
        from pathlib import Path
        from shardio.storage.cached_file import CacheFull
        from support.caching import *
        path = Path(sys.argv[1])
    """
    program = textwrap.dedent(begin) + textwrap.dedent(code)
    return [sys.executable, "-W", "error", "-c", program, *map(os.fspath, more)]


def child(code: str, *more: str | Path, **options: object) -> "subprocess.Popen[str]":
    """Start a child process; its stdin and stdout are pipes."""
    return subprocess.Popen(
        arguments(code, *more),
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def environment() -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return os.environ | {"PYTHONPATH": paths}


ANY = """
    import random
    rng = random.Random(int(sys.argv[2]))
    cache = cache_at(path, ranges=40)
    files, full = {}, 0
    for step in range(int(sys.argv[3])):
        shard = rng.randrange(8)
        file = files.get(shard) or files.setdefault(shard, open_shard(cache, shard))
        n, what = rng.randrange(11), rng.random()
        try:
            if what < 0.06:
                files.pop(shard).close()
            elif what < 0.08:
                file.distrust(n)
            elif what < 0.10:
                claim = file.claim(n)
                if claim is not None:
                    claim.abandon()
            elif what < 0.11 and sys.argv[2] == "0":
                from shardio.storage.cache import clear
                clear(path)
            elif what < 0.2:
                fill(file, n)
        except CacheFull:
            full += 1
            files.pop(shard).close()
            continue
        if file.has(n, n + 1):
            assert is_right(file, n), (step, shard, n)
"""


def any_steps(folder: Path, seed: int, steps: int, processes: int = 4) -> None:
    """Run processes on a cache, kill some of them at a time by chance, and look at the end."""
    rng = random.Random(seed)
    children = [child(ANY, folder, str(seed * 4 + n), str(steps)) for n in range(processes)]
    for one in children[2:4]:
        try:
            one.wait(timeout=rng.uniform(0.2, 1.0))
        except subprocess.TimeoutExpired:
            one.kill()
    for number, one in enumerate(children):
        one.communicate(timeout=LIMIT_S)
        assert one.returncode == 0 or (number in (2, 3) and one.returncode == -9)
    cache = cache_at(folder, ranges=40)
    assert on_disk(folder) <= cache.limit_bytes + processes * RANGE
    for shard in range(8):
        file = open_shard(cache, shard)
        for number in range(11):
            assert not file.has(number, number + 1) or is_right(file, number)
            claim = file.claim(number, timeout_s=0)
            assert claim is not None or file.has(number, number + 1)
            del claim
        file.close()
