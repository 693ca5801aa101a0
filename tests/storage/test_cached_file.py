"""A shard's file in the cache: what is there, who downloads, and bytes that are wrong."""

import fcntl
import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import LIMIT_S
from support.caching import (
    DATASET,
    RANGE,
    cache_at,
    child,
    content,
    fill,
    is_right,
    open_shard,
    the_file,
)

from shardio.errors import OptionError
from shardio.storage import cached_file
from shardio.storage.cache import clear
from shardio.storage.cache_layout import Layout, unpack
from shardio.storage.cached_file import CacheFull


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


# --- ranges -------------------------------------------------------------------------------------


def test_a_range_is_stored_at_its_offsets_in_the_shard(folder: Path) -> None:
    file = open_shard(cache_at(folder))
    assert file.layout.ranges == 11
    assert not file.has(0, 1)
    for number in (3, 10):  # the last one is short
        assert fill(file, number)
        assert file.has(number, number + 1) and is_right(file, number)
        assert file.claim(number) is None
    assert not file.has(3, 5) and not file.has(9, 11)
    assert file.missing(3 * RANGE, 2 * RANGE) == [4]
    assert file.missing(3 * RANGE + 5, RANGE - 5) == []
    flags = fcntl.fcntl(file.descriptor, fcntl.F_GETFL)
    assert flags & os.O_ACCMODE == os.O_RDONLY
    file.close()
    file.close()
    assert file.descriptor == -1 and not file.has(3, 4)
    again = open_shard(pickle.loads(pickle.dumps(cache_at(folder))))
    assert again.has(3, 4) and is_right(again, 3) and is_right(again, 10)
    assert the_file(folder).stat().st_blocks * 512 < 2 * RANGE + 16384  # sparse


def test_a_shard_without_bytes_has_no_range(folder: Path) -> None:
    file = open_shard(cache_at(folder), size=0)
    assert file.layout.ranges == 0 and file.missing(0, 0) == []
    with pytest.raises(OptionError, match="range 0: there are 0"):
        file.claim(0)


def test_a_claim_that_is_abandoned_leaves_nothing(folder: Path) -> None:
    file = open_shard(cache_at(folder))
    with pytest.raises(ZeroDivisionError), file.claim(1) or pytest.fail():
        raise ZeroDivisionError
    assert not file.has(1, 2)
    claim = file.claim(1)
    assert claim is not None
    del claim  # as of a future that was cancelled
    assert fill(file, 1)
    with pytest.raises(AssertionError, match="5 bytes"), file.claim(2) or pytest.fail() as claim:
        claim.store(b"short")
    assert not file.has(2, 3) and fill(file, 2)


# --- who downloads ------------------------------------------------------------------------------


def test_one_of_many_threads_and_files_gets_the_claim(folder: Path) -> None:
    first, second = open_shard(cache_at(folder)), open_shard(cache_at(folder))
    claim = first.claim(0)
    assert claim is not None
    assert first.claim(0, timeout_s=0) is None and second.claim(0, timeout_s=0) is None
    assert not second.has(0, 1)
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(one.claim, 0) for one in (first, second)]
        claim.store(content(0, 0, RANGE))
        assert [one.result(LIMIT_S) for one in waiting] == [None, None]
    assert second.has(0, 1) and is_right(second, 0)


HOLD = """
    file = open_shard(cache_at(path))
    claim = file.claim(0)
    print("claimed", flush=True)
    word = sys.stdin.readline().strip()
    if word == "store":
        claim.store(content(0, 0, RANGE))
    elif word == "fork":
        if os.fork() == 0:
            assert file.claim(0, timeout_s=0) is None  # it is the parent's
            try:
                claim.store(content(0, 0, RANGE))
            except CacheFull as error:
                assert "before a fork" in str(error)
            print("forked", os.getpid(), flush=True)
            sys.stdin.readline()
            os._exit(0)
        os.wait()
"""


def test_who_waits_finds_what_another_process_stored(folder: Path) -> None:
    holder = child(HOLD, folder)
    assert holder.stdout and holder.stdout.readline() == "claimed\n"
    file = open_shard(cache_at(folder))
    assert file.claim(0, timeout_s=0) is None and not file.has(0, 1)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(file.claim, 0)
        holder.communicate("store\n", timeout=LIMIT_S)
        assert waiting.result(LIMIT_S) is None
    assert file.has(0, 1) and is_right(file, 0)


def test_who_waits_takes_over_from_a_killed_process(folder: Path) -> None:
    holder = child(HOLD, folder)
    assert holder.stdout and holder.stdout.readline() == "claimed\n"
    file = open_shard(cache_at(folder))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(fill, file, 0)
        holder.kill()
        assert waiting.result(LIMIT_S)
    holder.communicate()
    assert is_right(file, 0)


def test_a_forked_child_does_not_keep_the_claim_of_a_killed_parent(folder: Path) -> None:
    holder = child(HOLD, folder)
    assert holder.stdout and holder.stdin and holder.stdout.readline() == "claimed\n"
    holder.stdin.write("fork\n")
    holder.stdin.flush()
    word, pid = holder.stdout.readline().split()
    assert word == "forked"
    holder.kill()
    file = open_shard(cache_at(folder))
    claim = file.claim(0, timeout_s=LIMIT_S)
    os.kill(int(pid), 0)  # the child still lives
    assert claim is not None
    holder.communicate()


EVERY = """
    from concurrent.futures import ThreadPoolExecutor
    import random
    log = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND)
    cache = cache_at(path)
    def want(seed):
        rng = random.Random(seed)
        files = [open_shard(cache, shard) for shard in range(2)]
        wanted = [(file, n) for file in files for n in range(11)]
        rng.shuffle(wanted)
        for file, n in wanted:
            if fill(file, n):
                os.write(log, b"%d %d\\n" % (file.layout.shard, n))
            assert file.has(n, n + 1) and is_right(file, n)
    print("ready", flush=True)
    sys.stdin.readline()
    with ThreadPoolExecutor() as pool:
        list(pool.map(want, [int(sys.argv[3]) * 2, int(sys.argv[3]) * 2 + 1]))
"""


def test_processes_that_want_the_same_ranges_download_each_once(
    folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.touch()
    children = [child(EVERY, folder, log, str(n)) for n in range(4)]
    for one in children:
        assert one.stdout and one.stdout.readline() == "ready\n"
    for one in children:
        assert one.stdin
        one.stdin.write("\n")
        one.stdin.flush()
    for one in children:
        one.communicate(timeout=LIMIT_S)
        assert one.returncode == 0
    downloads = log.read_text().splitlines()
    assert sorted(downloads) == sorted(f"{shard} {n}" for shard in range(2) for n in range(11))


# --- bytes that are wrong -----------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_after_a_restart_ranges_are_compared_once_and_wrong_ones_dropped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = open_shard(cache_at(folder))
    for number in range(3):
        fill(file, number)
    file.close()
    flip(the_file(folder), RANGE + 5)
    monkeypatch.setattr(cached_file, "boot", lambda: 7)  # the machine started again
    compared: list[int] = []
    checksum = cached_file.checksum
    monkeypatch.setattr(
        cached_file, "checksum", lambda data: compared.append(len(data)) or checksum(data)
    )
    for looks in (3, 3):  # the second file trusts what the first one found
        file = open_shard(cache_at(folder))
        assert [file.has(n, n + 1) for n in range(4)] == [True, False, True, False]
        assert len(compared) == looks
    assert fill(file, 1) and is_right(file, 1)
    again = open_shard(cache_at(folder))
    assert again.has(0, 3)


def test_a_range_with_damaged_records_is_never_used_again(folder: Path) -> None:
    first, second = open_shard(cache_at(folder)), open_shard(cache_at(folder))
    for file in (first, second):
        fill(file, 0)
        assert file.has(0, 1)
    flip(the_file(folder), 5)
    first.distrust(0)
    assert not first.has(0, 1) and not open_shard(cache_at(folder)).has(0, 1)
    second.distrust(0)
    assert not second.has(0, 1)
    assert fill(first, 0) and is_right(first, 0)
    assert second.claim(0) is None and is_right(second, 0)


def test_a_header_is_believed_only_as_a_whole() -> None:
    layout = Layout(b"k" * 32, DATASET, 12, 10 * RANGE + 1, RANGE)
    header = layout.pack()
    assert unpack(header, layout.file_size) == layout
    assert unpack(header, layout.file_size + 1) is None
    assert unpack(header[:-1], layout.file_size) is None
    for at in range(len(header)):
        damaged = bytearray(header)
        damaged[at] ^= 1
        assert unpack(bytes(damaged), layout.file_size) is None
    for size, range_bytes in [(1 << 63, RANGE), (1 << 60, 4096), (1 << 40, 0)]:  # checksums right
        absurd = Layout(b"k" * 32, DATASET, 0, size, range_bytes)
        assert unpack(absurd.pack(), 1 << 62) is None


# --- what is removed meanwhile ------------------------------------------------------------------


def test_readers_go_on_when_the_cache_is_cleared(folder: Path) -> None:
    cache = cache_at(folder)
    reader = open_shard(cache)
    fill(reader, 2)
    claim = reader.claim(3)
    assert claim is not None and not reader.is_removed()
    files, size = clear(folder)
    assert files == 1 and size >= RANGE and not any(folder.iterdir())
    assert reader.has(2, 3) and is_right(reader, 2) and reader.is_removed()
    with pytest.raises(CacheFull, match="was removed"):
        claim.store(content(0, claim.start, claim.length))
    with pytest.raises(CacheFull):
        reader.claim(4)
    reader.distrust(2)
    assert not reader.has(2, 3)
    again = open_shard(cache)
    assert not again.has(2, 3) and fill(again, 2) and is_right(again, 2)
    with pytest.raises(CacheFull, match="another one is there"):
        reader.claim(5)  # not stored under the new file's locks


def test_a_directory_that_vanishes_is_no_error_of_the_reader(folder: Path) -> None:
    cache = cache_at(folder)
    reader = open_shard(cache)
    fill(reader, 0)
    claim = reader.claim(1)
    assert claim is not None
    shutil.rmtree(folder)
    assert reader.has(0, 1) and is_right(reader, 0)
    with pytest.raises(CacheFull, match="No such file"):
        claim.store(content(0, claim.start, claim.length))
    late = open_shard(cache, 1)
    assert late.descriptor == -1 and not late.has(0, 1)
    with pytest.raises(CacheFull, match="No such file"):
        late.claim(0)
    late.close()
