"""kill -9 and failing devices at each system call of a cache that changes anything.

Whatever happens, the next process finds only ranges that are right, waits for nobody, and stores
the others.
"""

import random
import re
import shutil
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from support.caching import arguments, cache_at, fill, is_right, open_shard
from support.crashing import STRACE, traced
from support.trees import compile_package

pytestmark = pytest.mark.skipif(STRACE is None, reason="strace is not installed: no crash tests")
CALLS = "mkdir,openat,pwrite64,pread64,fcntl,flock,fsync,unlink,utimensat,close"
RANGES = 11  # of a shard

# Two ranges, one that is damaged, and a shard for which the first is evicted.
WORK = """
    cache = cache_at(path, ranges=12)
    file = open_shard(cache)
    for number in (0, 10, 4):
        fill(file, number)
    file.distrust(4)
    fill(file, 4)
    file.close()
    second = open_shard(cache, 1)
    for number in range(11):
        fill(second, number)
    second.close()
    print("done")
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    code, path = arguments(WORK, folder)[-2:]
    return traced([path], "-e", f"trace={CALLS}", *options, program=["-c", code])


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, int]]:
    """The calls that touch the cache: name, and which of its kind in the whole process."""
    compile_package()
    base = tmp_path_factory.mktemp("rehearsal")
    done = run(base / "cache", "-y", "-o", str(base / "log"))
    assert done.stdout == "done\n", done.stderr
    assert not list((base / "cache").glob("*-00000-*")), "the first shard was not evicted"
    counted: Counter[str] = Counter()
    found = []
    for line in (base / "log").read_text().splitlines():
        call = re.match(r"\d+\s+(\w+)\(", line)
        if call:
            counted[call[1]] += 1
            if str(base / "cache") in line:
                found.append((call[1], counted[call[1]]))
    kinds = {name for name, _ in found}
    assert kinds == set(CALLS.split(",")), kinds
    return found


def check(folder: Path) -> None:
    """Only what is right is there, nobody holds it, and the rest can be stored."""
    for shard in (0, 1):
        cache = cache_at(folder, RANGES + 1)  # the second shard evicts the first
        file = open_shard(cache, shard)
        for number in range(RANGES):
            if file.has(number, number + 1):
                assert is_right(file, number)
            else:
                claim = file.claim(number, timeout_s=0)
                assert claim is not None, "a dead process holds it"
                claim.abandon()
                assert fill(file, number)
                assert is_right(file, number)
        file.close()
    size = sum(one.stat().st_blocks * 512 for one in folder.glob("shardio-*-*.cache"))
    assert size <= cache.limit_bytes


def killed(folder: Path, call: str, which: int) -> None:
    done = run(folder, "-o", "/dev/null", "-e", f"inject={call}:signal=SIGKILL:when={which}")
    assert done.returncode == -signal.SIGKILL, (call, which, done.stderr)
    check(folder)


def test_a_process_that_is_killed_leaves_only_what_is_right(
    steps: list[tuple[str, int]], tmp_path: Path
) -> None:
    rng = random.Random(17)
    # One of each kind; and of the writes, which come in pairs with the sum, the first four.
    chosen = {name: [one for one in steps if one[0] == name] for name in CALLS.split(",")}
    sample = [rng.choice(ones) for ones in chosen.values()] + chosen["pwrite64"][1:5]
    for number, (call, which) in enumerate(sample):
        killed(tmp_path / str(number), call, which)


@pytest.mark.slow
def test_a_process_that_is_killed_anywhere_leaves_only_what_is_right(
    steps: list[tuple[str, int]], tmp_path: Path
) -> None:
    for number, (call, which) in enumerate(steps):
        killed(tmp_path / str(number), call, which)


FAILURES = [
    *(("pwrite64", "ENOSPC"), ("pwrite64", "EDQUOT"), ("pwrite64", "EIO"), ("openat", "EMFILE")),
    *(("fcntl", "ENOLCK"), ("flock", "ENOLCK"), ("fsync", "EIO"), ("unlink", "EPERM")),
    *(("utimensat", "EPERM"), ("openat", "ESTALE"), ("pread64", "EIO")),
]


@pytest.mark.parametrize(("call", "error"), FAILURES)
def test_a_system_that_refuses_is_a_full_cache_and_no_crash(
    steps: list[tuple[str, int]], tmp_path: Path, call: str, error: str
) -> None:
    [*ones] = [which for name, which in steps if name == call]
    folder = tmp_path / "cache"
    for first in {ones[0], ones[len(ones) // 2]}:
        done = run(folder, "-o", "/dev/null", "-e", f"inject={call}:error={error}:when={first}+")
        if done.returncode:  # the caller is told by one error, and goes on without the cache
            last = done.stderr.splitlines()[-1]
            assert last.startswith("shardio.storage.cached_file.CacheFull: "), done.stderr
        check(folder)
        shutil.rmtree(folder)
