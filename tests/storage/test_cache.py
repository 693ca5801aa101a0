"""The cache of one node: the limit, what is never touched, disks and users."""

import fcntl
import itertools
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support import LIMIT_S
from support.caching import (
    DATASET,
    RANGE,
    any_steps,
    arguments,
    cache_at,
    child,
    environment,
    fill,
    is_right,
    key_of,
    on_disk,
    open_shard,
    the_file,
)
from support.mounts import read_only, run_mounted

from shardio.errors import NotPackedError, OptionError, StorageError
from shardio.storage import cached_file
from shardio.storage.cache import CacheDirectory, clear, entries
from shardio.storage.cache_layout import Layout
from shardio.storage.cached_file import CacheFull

is_root = os.geteuid() == 0
needs_root = pytest.mark.skipif(not is_root, reason="NOT TESTED HERE: needs root")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_shards_of_one_content_in_two_datasets_do_not_meet(folder: Path) -> None:
    cache = cache_at(folder)
    files = [cache.open(key_of(0), RANGE, bytes([n]) * 16, n) for n in range(2)]
    fill(files[0], 0)
    assert files[0].has(0, 1) and not files[1].has(0, 1)


def test_another_range_size_begins_anew(folder: Path) -> None:
    with_old = open_shard(cache_at(folder))
    fill(with_old, 0)
    larger = CacheDirectory(folder, "1GiB", range_bytes=2 * RANGE)
    with pytest.raises(CacheFull, match="in use"):  # not taken from whom reads it
        open_shard(larger).claim(0)
    with_old.close()
    file = open_shard(larger)
    assert not file.has(0, 1) and fill(file, 0) and is_right(file, 0)


# --- the limit ----------------------------------------------------------------------------------


def test_the_least_recently_used_shard_goes_first(folder: Path) -> None:
    cache = cache_at(folder, ranges=25)  # two shards of 11
    for shard in (0, 1):
        file = open_shard(cache, shard)
        for number in range(11):
            fill(file, number)
        file.close()
        path = folder / file.layout.name
        os.utime(path, (1000 + shard, 1000 + shard))
    used = open_shard(cache, 0)
    assert os.fstat(used.descriptor).st_mtime > 2000  # also if this process is killed now
    os.utime(folder / used.layout.name, (500, 500))
    used.close()
    file = open_shard(cache, 2)
    for number in range(11):
        fill(file, number)
        assert on_disk(folder) <= cache.limit_bytes
    assert [one.shard for one in entries(folder)] == [0, 2]
    assert all(is_right(open_shard(cache, shard), 4) for shard in (0, 2))


def test_what_is_in_use_stays_and_the_rest_is_not_kept(folder: Path) -> None:
    cache = cache_at(folder, ranges=15)
    reader = open_shard(cache, 0)
    for number in range(11):
        fill(reader, number)
    other = open_shard(cache, 1)
    with pytest.raises(CacheFull, match="all files are in use"):
        for number in range(11):
            fill(other, number)
    assert on_disk(folder) <= cache.limit_bytes
    stored = [n for n in range(11) if other.has(n, n + 1)]
    assert stored and all(is_right(other, n) for n in stored)
    assert reader.has(0, 11)
    with pytest.MonkeyPatch.context() as patched:  # nor are the files looked at again at once
        patched.setattr(os, "scandir", pytest.fail)
        with pytest.raises(CacheFull, match="all files are in use"):
            fill(other, 10)
    reader.close()
    later = open_shard(cache_at(folder, ranges=15), 1)
    assert fill(later, 10)
    assert [one.shard for one in entries(folder)] == [1]


SMALL = """
    import random
    log, rng = [0, 0], random.Random(int(sys.argv[2]))
    cache = cache_at(path, ranges=20)
    for _ in range(30):
        with_shard = rng.randrange(4)
        file = open_shard(cache, with_shard)
        for n in rng.sample(range(11), 4):
            try:
                fill(file, n)
            except CacheFull:
                log[1] += 1
                continue
            assert file.has(n, n + 1) and is_right(file, n)
            log[0] += 1
        file.close()
    print(*log)
"""


def test_processes_that_together_need_more_than_the_limit_go_on(folder: Path) -> None:
    children = [child(SMALL, folder, str(n)) for n in range(2)]
    for one in children:
        out, _ = one.communicate(timeout=LIMIT_S)
        assert one.returncode == 0
        assert int(out.split()[0]) > 0
    assert on_disk(folder) <= cache_at(folder, ranges=20).limit_bytes + 2 * RANGE


def test_a_sum_that_is_wrong_is_corrected_by_a_look_at_the_files(folder: Path) -> None:
    cache, usage = cache_at(folder, ranges=15), folder / "shardio-usage.cache"
    file = open_shard(cache)
    for number in range(5):
        fill(file, number)
    for wrong in (b"", b"shardio-usage 0\n" + bytes(16)):
        usage.write_bytes(wrong)
        file.distrust(0)
        assert fill(file, 0)
        assert len(usage.read_bytes()) == 32
    total = int.from_bytes(usage.read_bytes()[16:24], "little")
    assert on_disk(folder) <= total <= on_disk(folder) + 4 * RANGE
    usage.unlink()
    assert fill(file, 6) and usage.exists()
    usage.write_bytes(b"somebody's own words, and not 32")
    assert fill(file, 7)
    assert usage.read_bytes() == b"somebody's own words, and not 32"


def test_a_limit_below_two_ranges_is_refused(folder: Path) -> None:
    with pytest.raises(OptionError, match="expected more than two ranges"):
        CacheDirectory(folder, 2 * RANGE, range_bytes=RANGE)
    with pytest.raises(OptionError, match="multiple of 4096"):
        CacheDirectory(folder, "1GiB", range_bytes=RANGE + 1)
    assert not folder.exists()


# --- what is not the cache's --------------------------------------------------------------------


def test_a_local_dataset_given_as_source_and_as_cache_stays_whole(
    packed: Callable[..., Path], tmp_path: Path
) -> None:
    """MosaicML's streaming, #988: the only copy of a dataset, its own cache, was deleted."""
    dataset = packed([10, 7])
    before = {one.name: one.read_bytes() for one in dataset.iterdir()}
    with pytest.raises(OptionError, match="a cache needs another one"):
        cache_at(dataset)
    clear(dataset)
    assert {one.name: one.read_bytes() for one in dataset.iterdir()} == before
    foreign = tmp_path / "mds"  # of another format: nothing says that it is a dataset
    foreign.mkdir()
    (foreign / "below").mkdir()
    for name in ("index.json", "shard.00000.mds", "00000-c6da37c1.shard", "below/x.cache"):
        (foreign / name).write_bytes(name.encode() * 1000)
    cache = cache_at(foreign, ranges=12)
    for shard in range(4):
        file = open_shard(cache, shard)
        for number in range(11):
            fill(file, number)
        file.close()
    assert len(entries(foreign)) == 1  # three were evicted
    assert clear(foreign)[0] == 1
    names = ["00000-c6da37c1.shard", "below", "index.json", "shard.00000.mds"]
    assert sorted(one.name for one in foreign.iterdir()) == names
    assert (foreign / "below" / "x.cache").read_bytes() == b"below/x.cache" * 1000
    assert (foreign / "shard.00000.mds").read_bytes() == b"shard.00000.mds" * 1000


HOSTILE: dict[str, Callable[[Path, Path], object]] = {
    "fifo": lambda path, _: os.mkfifo(path),
    "folder": lambda path, _: path.mkdir(),
    "link": lambda path, ours: path.symlink_to(ours),
    "dangling link": lambda path, ours: path.symlink_to(ours.parent / "nowhere"),
    "words": lambda path, _: path.write_bytes(b"somebody's own words" * 100),
    "another shard's": lambda path, ours: shutil.copy(ours, path),
    "cut short": lambda path, ours: path.write_bytes(ours.read_bytes()[:-1]),
    "no map": lambda path, ours: path.write_bytes(ours.read_bytes()[: 10 * RANGE + 77]),
    "absurd": lambda path, ours: (path.touch(), os.truncate(path, 1 << 43)),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_lies_under_its_name_is_neither_followed_nor_removed(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    outside = tmp_path / "outside"
    cache = cache_at(folder, ranges=25)
    theirs = open_shard(cache_at(outside), 5)  # a file of a cache, that is right elsewhere
    fill(theirs, 0)
    ours = the_file(outside)
    before = ours.read_bytes()
    named = folder / Layout(bytes.fromhex(key_of(0)), DATASET, 0, 10 * RANGE + 77, RANGE).name
    HOSTILE[kind](named, ours)
    was = named.lstat()
    file = open_shard(cache)
    assert not file.has(0, 11)
    with pytest.raises(CacheFull, match=r"cannot keep"):
        file.claim(0)
    file.distrust(0)
    for shard in range(1, 4):  # the limit is reached, and files are evicted
        other = open_shard(cache, shard)
        for number in range(11):
            fill(other, number)
        other.close()
    left = [one.shard for one in entries(folder)]
    assert left in ([3], [2, 3])
    assert clear(folder)[0] == len(left)
    now = named.lstat()
    assert (now.st_ino, now.st_size, now.st_mtime_ns) == (was.st_ino, was.st_size, was.st_mtime_ns)
    assert ours.read_bytes() == before and ours.stat().st_nlink == 1
    assert list((tmp_path / "outside").iterdir()) != []
    assert not (tmp_path / "outside" / "nowhere").exists()


def test_an_empty_file_of_a_killed_process_is_taken_over(folder: Path) -> None:
    cache = cache_at(folder)
    name = Layout(bytes.fromhex(key_of(0)), DATASET, 0, 10 * RANGE + 77, RANGE).name
    (folder / name).touch(0o600)
    file = open_shard(cache)
    assert fill(file, 0) and is_right(file, 0)


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told = r"file/deep/cache: the cache cannot be created: .*/file: .*Choose another directory"
    with pytest.raises(StorageError, match=told):
        cache_at(tmp_path / "file" / "deep" / "cache")
    with pytest.raises(StorageError, match="found a file"):
        cache_at(tmp_path / "file")
    with pytest.raises(OptionError, match="expected a directory"):
        CacheDirectory("s3://bucket/cache", "1GiB")
    with pytest.raises(NotPackedError, match="no such directory"):
        clear(tmp_path / "nowhere")


@needs_root
def test_files_that_cannot_be_removed_are_named(folder: Path) -> None:
    for shard in range(13):
        open_shard(cache_at(folder), shard).close()
    names = sorted(one.name for one in folder.glob("shardio-*-*.cache"))
    for name in names[1:]:
        os.chown(folder / name, 12345, 65534)
    with pytest.raises(StorageError, match=r"1 file, .*, removed, but not these 12:\n") as told:
        clear(folder)
    assert str(told.value).count(": the file belongs to user 12345\n") == 10
    assert "  ... and 2 more\n" in str(told.value)
    assert sorted(one.name for one in folder.glob("shardio-*-*.cache")) == names[1:]


def test_nothing_can_be_removed_of_a_read_only_mount(folder: Path) -> None:
    code = """
        from shardio.cli.main import main
        assert main(["cache", "clear", str(path)]) == 1
    """
    before = filled(folder)
    told = in_mount(code, folder, read_only(folder))
    assert "0 files, 0 B, removed, but not these 1:\n" in told, told
    assert f"{the_file(folder)}: Read-only file system\n" in told
    assert state(folder) == before


def test_a_file_that_is_evicted_while_it_is_opened_is_begun_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(open_shard(cache_at(folder)), 0)
    lock, removed = cached_file.lock, []

    def late(descriptor: int, kind: int, start: int, length: int) -> bool:
        if kind == cached_file.SHARED and not removed:
            removed.append(the_file(folder))
            removed[0].unlink()
        return lock(descriptor, kind, start, length)

    monkeypatch.setattr("shardio.storage.cache.lock", late)
    file = open_shard(cache_at(folder))
    assert removed and not file.is_removed() and not file.has(0, 1)
    assert fill(file, 0)


def test_a_stopped_holder_of_the_lock_is_waited_for_in_vain_but_not_for_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_at(folder)
    file = open_shard(cache)
    holder = os.open(folder, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with monkeypatch.context() as patched:
        ticks = itertools.count()
        patched.setattr(time, "monotonic", lambda: float(next(ticks)))
        with pytest.raises(CacheFull, match="is it stopped"):
            fill(file, 0)
        late = open_shard(cache, 1)
        with pytest.raises(CacheFull, match="is it stopped"):
            late.claim(0)
    os.close(holder)
    assert fill(file, 0) and fill(open_shard(cache, 1), 0)


def in_mount(code: str, folder: Path, mount: str) -> str:
    """Run a child in which a directory is mounted otherwise; return what it says on stderr."""
    return run_mounted(mount, arguments(code, folder), environment())


def test_a_full_disk_is_told_and_what_is_there_stays_right(folder: Path) -> None:
    code = """
        cache = cache_at(path)
        file = open_shard(cache, size=100 * RANGE)
        stored = 0
        try:
            for n in range(100):
                fill(file, n)
                stored += 1
        except CacheFull as error:
            assert "No space left on device" in str(error), error
        assert 5 < stored < 20, stored
        assert not file.has(stored, stored + 1)
        assert all(file.has(n, n + 1) and is_right(file, n) for n in range(stored))
        assert file.claim(stored, timeout_s=0) is not None  # not held for ever
        again = open_shard(cache, size=100 * RANGE)
        assert again.missing(0, 100 * RANGE) == list(range(stored, 100))
        try:
            while True:
                os.write(os.open(path / "ballast", os.O_WRONLY | os.O_CREAT | os.O_APPEND), b"x")
        except OSError:
            pass
        late = open_shard(cache, 1)
        try:
            late.claim(0)
            assert not late.descriptor
        except CacheFull as error:
            assert "No space" in str(error), error
    """
    folder.mkdir()
    in_mount(code, folder, f"mount -t tmpfs -o size=1m tmpfs {folder}")


READ_ONLY = """
    cache = cache_at(path)
    file = open_shard(cache)
    assert file.has(0, 2) and is_right(file, 0)
    claim = file.claim(2)
    with claim:
        claim.store(content(0, claim.start, claim.length))
    assert not file.has(2, 3)
    file.distrust(1)
    assert not file.has(1, 2) and file.claim(1) is not None
    absent = open_shard(cache, 1)
    assert absent.descriptor == -1 and not absent.has(0, 1)
    with absent.claim(0) as claim:
        claim.store(content(1, claim.start, claim.length))
    assert not absent.has(0, 1)
"""


def filled(folder: Path) -> dict[str, tuple[bytes, int]]:
    file = open_shard(cache_at(folder))
    fill(file, 0)
    fill(file, 1)
    file.close()
    return state(folder)


def state(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {one.name: (one.read_bytes(), one.stat().st_mtime_ns) for one in folder.iterdir()}


def test_a_read_only_mount_is_read(folder: Path) -> None:
    before = filled(folder)
    in_mount(READ_ONLY, folder, read_only(folder))
    assert state(folder) == before


@needs_root
def test_a_directory_without_the_right_to_write_is_read(folder: Path) -> None:
    before = filled(folder)
    folder.chmod(0o755)
    for one in folder.iterdir():
        one.chmod(0o644)
    parents = [p for p in folder.parents if p.stat().st_uid == 0 and not p.stat().st_mode & 1]
    modes = [one.stat().st_mode for one in parents]
    try:
        for one in parents:
            one.chmod(0o755)
        done = child("    os.setuid(65534)\n" + READ_ONLY, folder)
        done.communicate(timeout=LIMIT_S)
    finally:
        for one, mode in zip(parents, modes, strict=True):
            one.chmod(stat.S_IMODE(mode))
    assert done.returncode == 0
    assert state(folder) == before


@needs_root
@pytest.mark.parametrize("owner", [0, 12345])
def test_a_read_only_cache_whose_files_this_user_does_not_trust_is_warned_of(
    folder: Path, owner: int
) -> None:
    code = """
        import warnings
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            cache_at(path)
        sys.stderr.write(str(len(told)))
    """
    filled(folder)
    for one in folder.iterdir():
        os.chown(one, owner, 0)
    said = in_mount(code, folder, read_only(folder))
    assert said == ("1" if owner else "0")


# --- users --------------------------------------------------------------------------------------


def test_new_directories_and_files_are_the_user_s_alone(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        fill(open_shard(cache_at(tmp_path / "new" / "cache")), 0)
        given = tmp_path / "given"
        given.mkdir(0o755)
        fill(open_shard(cache_at(given)), 0)
        shared = tmp_path / "shared"
        shared.mkdir()
        shared.chmod(0o2770)
        fill(open_shard(cache_at(shared)), 0)
    finally:
        os.umask(old)
    modes = [
        {stat.S_IMODE(one.stat().st_mode) for one in folder.iterdir()} | {folder.stat().st_mode}
        for folder in (tmp_path / "new" / "cache", given, shared)
    ]
    assert modes == [{0o600, 0o40700}, {0o600, 0o40755}, {0o660, 0o42770}]


@needs_root
def test_files_of_another_user_are_used_in_a_shared_directory_only(folder: Path) -> None:
    fill(open_shard(cache_at(folder)), 0)
    one = the_file(folder)
    os.chown(one, 12345, 65534)
    one.chmod(0o660)
    for mode, expected in ((0o755, False), (0o777, False), (0o770, True)):
        folder.chmod(mode)
        file = open_shard(cache_at(folder))
        assert file.has(0, 1) is expected, oct(mode)
        file.close()


# --- chance -------------------------------------------------------------------------------------


def test_four_processes_do_anything(folder: Path) -> None:
    any_steps(folder, 0, 150)


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(1, 13))
def test_four_processes_do_anything_for_long(folder: Path, seed: int) -> None:
    any_steps(folder, seed, 3000)
