"""Bytes at rest: exact reads, whole writes, locks between processes, and what is mounted where."""

import errno
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from shardio.errors import DamageError, ExistsError, OptionError, StorageError
from shardio.storage import local
from shardio.storage.local import Draft, LocalDirectory, open_file, token, write_file
from shardio.storage.location import locate
from shardio.storage.lock import Lock

ROOT = Path(__file__).resolve().parent.parent.parent


def child(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


# --- reading ------------------------------------------------------------------------------------


def test_reads_are_exact_ranges(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(range(100)))
    file = locate(tmp_path).open("x")
    assert file.size == 100
    assert file.read(10, 5) == bytes(range(10, 15))
    assert file.read(0, 100) == bytes(range(100))
    assert file.read(100, 0) == b""
    file.will_need(0, 100)
    file.close()
    file.close()


@pytest.mark.parametrize(("start", "length"), [(0, 101), (99, 2), (100, 1), (5000, 1)])
def test_a_short_file_is_damage_that_says_where_it_ends(
    tmp_path: Path, start: int, length: int
) -> None:
    (tmp_path / "x").write_bytes(bytes(100))
    file = locate(tmp_path).open("x")
    with pytest.raises(DamageError, match=r"x: ends at byte \d+, expected .* cut short"):
        file.read(start, length)
    file.close()


def test_a_read_that_comes_in_pieces_is_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(bytes(range(100)))
    pread = os.pread
    monkeypatch.setattr(local.os, "pread", lambda fd, n, at: pread(fd, min(n, 7), at))
    file = locate(tmp_path).open("x")
    assert file.read(3, 90) == bytes(range(3, 93))
    with pytest.raises(DamageError, match="ends at byte 100"):
        file.read(50, 60)
    file.close()


def test_no_single_call_asks_for_more_than_every_system_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(bytes(range(100)))
    monkeypatch.setattr(local, "_MOST", 7)
    asked: list[int] = []
    pread = os.pread
    monkeypatch.setattr(local.os, "pread", lambda fd, n, at: asked.append(n) or pread(fd, n, at))
    file = locate(tmp_path).open("x")
    assert file.read(3, 90) == bytes(range(3, 93))
    assert file.read(5, 7) == bytes(range(5, 12))
    file.close()
    lock = Lock(str(tmp_path / "x"))
    assert lock.read(0, 200) == bytes(range(100))
    lock.release()
    assert max(asked) == 7


def test_an_error_of_the_device_is_a_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(bytes(100))

    def failing(*_: Any) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(local.os, "pread", failing)
    file = locate(tmp_path).open("x")
    with pytest.raises(StorageError, match="x: cannot read 7 bytes at byte 3: Input/output error"):
        file.read(3, 7)
    file.close()


def test_a_hint_that_is_refused_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(bytes(100))

    def failing(*_: Any) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(local.os, "posix_fadvise", failing)
    file = locate(tmp_path).open("x")
    file.will_need(0, 100)
    file.close()


def test_a_small_file_above_its_limit_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DamageError, match="more than 1,000 can be right"):
        locate(tmp_path).read("x", 1000)


def test_what_is_no_file_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    storage = locate(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "plain").touch()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        for name in ("folder", "fifo", "socket", "loop", "plain/below"):
            with pytest.raises(StorageError, match=name):
                storage.open(name)
    with pytest.raises(FileNotFoundError):
        storage.open("missing")
    with pytest.raises(FileNotFoundError):
        storage.read("missing", 10)


def test_names_in_messages_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "a\x1b[31m\udcff").mkdir()
    with pytest.raises(StorageError) as caught:
        locate(tmp_path).open("a\x1b[31m\udcff")
    assert r"a\x1b[31m\xff: expected a file" in str(caught.value)


def test_descriptors_are_not_inherited_and_not_leaked(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    before = len(os.listdir("/proc/self/fd"))
    file = open_file(str(tmp_path / "x"), "x")
    assert not os.get_inheritable(file.descriptor)
    del file
    for name in ("", "missing"):
        with pytest.raises((StorageError, FileNotFoundError)):
            open_file(str(tmp_path / name), name)
    write_file(str(tmp_path), "y", b"y")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_storage_pickles_to_the_same_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(b"1")
    monkeypatch.chdir(tmp_path)
    storage = pickle.loads(pickle.dumps(locate(".")))
    monkeypatch.chdir("/")
    assert storage.read("x", 10) == b"1"


def test_urls_and_paths_name_the_same_directory(tmp_path: Path) -> None:
    odd = tmp_path / "a b\udcff%41"
    odd.mkdir()
    (odd / "x").write_bytes(b"1")
    quoted = f"{tmp_path}/a%20b%FF%2541"
    for url in (str(odd), os.fsencode(odd), odd, f"file://{quoted}", f"file://localhost{quoted}"):
        assert locate(url).read("x", 1) == b"1"
    assert locate("a/b://c").url == "a/b://c"  # a path, if an odd one


@pytest.mark.parametrize("url", ["ftp://host/x", "://x", "s3\x1b://x"])
def test_a_scheme_that_is_not_known_is_said(url: str) -> None:
    with pytest.raises(OptionError, match="is not known") as caught:
        locate(url)
    assert str(caught.value).isprintable()


def test_a_file_url_of_two_slashes_does_not_lead_elsewhere() -> None:
    with pytest.raises(OptionError, match="three slashes"):
        locate("file://data/train")


# --- writing ------------------------------------------------------------------------------------


def test_a_written_file_is_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    write_file(str(tmp_path), "x", b"one")
    assert (tmp_path / "x").read_bytes() == b"one"
    write_file(str(tmp_path), "x", b"two")
    assert (tmp_path / "x").read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["x"]


def test_a_taken_name_is_kept_when_replace_is_false(tmp_path: Path) -> None:
    write_file(str(tmp_path), "x", b"one", replace=False)
    with pytest.raises(ExistsError, match="x is there already"):
        write_file(str(tmp_path), "x", b"two", replace=False)
    assert (tmp_path / "x").read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("links", [True, False])
def test_replace_false_works_without_hard_links_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr(local.os, "link", refused)
    write_file(str(tmp_path), "x", b"one", replace=False)
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("x", "dangling"):
        with pytest.raises(ExistsError):
            write_file(str(tmp_path), name, b"two", replace=False)
    assert sorted(os.listdir(tmp_path)) == ["dangling", "x"]


def test_one_of_many_writers_wins(tmp_path: Path) -> None:
    code = """
        import sys
        from shardio.errors import ExistsError
        from shardio.storage.local import write_file
        print(flush=True); sys.stdin.readline()
        try:
            write_file(sys.argv[1], "x", sys.argv[2].encode() * 1000, replace=False)
            print("won")
        except ExistsError:
            print("lost")
    """
    writers = [child(code, str(tmp_path), str(i)) for i in range(4)]
    for writer in writers:
        assert writer.stdout
        writer.stdout.readline()
    outcomes = [""] * 4
    for writer in writers:
        assert writer.stdin
        writer.stdin.write("\n")
        writer.stdin.flush()
    for i, writer in enumerate(writers):
        outcomes[i] = writer.communicate()[0].strip()
    assert sorted(outcomes) == ["lost", "lost", "lost", "won"]
    assert (tmp_path / "x").read_text() == str(outcomes.index("won")) * 1000
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "link"])
def test_a_failing_call_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    (tmp_path / "old").write_bytes(b"old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(local.os, call, full)
    with pytest.raises(StorageError, match="No space left on device"):
        write_file(str(tmp_path), "new" if call == "link" else "old", b"x", replace=call != "link")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["old"]
    assert (tmp_path / "old").read_bytes() == b"old"


def test_a_limit_on_file_size_leaves_nothing_behind(tmp_path: Path) -> None:
    code = """
        import resource, sys
        from shardio.errors import StorageError
        from shardio.storage.local import write_file
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        write_file(sys.argv[1], "small", bytes(1000))
        try:
            write_file(sys.argv[1], "large", bytes(1001))
        except StorageError as error:
            print(error)
    """
    found = child(code, str(tmp_path)).communicate()[0]
    assert "cannot write: File too large" in found
    assert os.listdir(tmp_path) == ["small"]


@pytest.mark.parametrize("supported", [True, False])
def test_files_are_flushed_to_the_device_where_fsync_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supported: bool
) -> None:
    calls: list[str] = []

    def fcntl(descriptor: int, command: int) -> None:  # as on macOS
        assert command == 51
        calls.append("full")
        if not supported:
            raise OSError(errno.ENOTSUP, "not here")

    monkeypatch.setattr(local.fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(local.fcntl, "fcntl", fcntl)
    monkeypatch.setattr(local.os, "fsync", lambda descriptor: calls.append("fsync"))
    write_file(str(tmp_path), "x", b"1")
    assert calls == (["full"] * 2 if supported else ["full", "fsync"] * 2)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(local.os, "write", lambda fd, data: write(fd, bytes(data)[:7]))
    data = bytes(range(100))
    write_file(str(tmp_path), "x", data)
    assert (tmp_path / "x").read_bytes() == data


def test_an_interrupted_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(local.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_file(str(tmp_path), "x", b"x")
    assert os.listdir(tmp_path) == []


def test_a_draft_hashes_what_it_writes(tmp_path: Path) -> None:
    import hashlib

    draft = Draft(str(tmp_path), "x", token())
    for piece in (b"one", bytearray(b"two"), b""):
        draft.write(piece)
    assert draft.digest() == hashlib.sha256(b"onetwo").digest()
    assert draft.size == 6
    [name] = os.listdir(tmp_path)
    assert local.is_temporary(name)
    assert not local.is_temporary("x")
    assert not local.is_temporary(f"{name}x")
    draft.discard()
    draft.discard()
    assert os.listdir(tmp_path) == []


def test_a_directory_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot create"):
        write_file(str(tmp_path / "missing"), "x", b"x")
    (tmp_path / "x").mkdir()
    with pytest.raises(StorageError):
        write_file(str(tmp_path), "x", b"x")
    assert os.listdir(tmp_path) == ["x"]


def test_directories_are_made_with_their_parents(tmp_path: Path) -> None:
    local.make_directory(str(tmp_path / "a" / "b"))
    local.make_directory(str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    for name in ("file", "file/below"):
        with pytest.raises(StorageError, match="expected a directory, found a file"):
            local.make_directory(str(tmp_path / name))


def test_removing_what_is_gone_is_fine(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    local.remove(str(tmp_path / "x"))
    local.remove(str(tmp_path / "x"))
    with pytest.raises(StorageError, match="cannot remove"):
        local.remove(str(tmp_path))


# --- locks --------------------------------------------------------------------------------------

HOLDER = """
    import sys
    from shardio.storage.lock import Lock
    start, stop = int(sys.argv[2]), None if sys.argv[3] == "-" else int(sys.argv[3])
    try:
        lock = Lock(sys.argv[1], start, stop)
        print("held" if lock.held else "unsupported", flush=True)
        sys.stdin.readline()
    except BlockingIOError:
        print("busy", flush=True)
"""


@contextmanager
def holder(path: Path, start: int, stop: int | None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = child(HOLDER, str(path), str(start), "-" if stop is None else str(stop))
    assert process.stdout
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "journal").write_bytes(b"plan")
    return tmp_path / "journal"


def test_a_range_is_held_by_one_process_and_others_are_free(path: Path) -> None:
    with holder(path, 10, 20) as (_, said):
        assert said == "held"
        for start, stop in ((10, 20), (0, 11), (19, 30), (0, None), (15, 16)):
            with pytest.raises(BlockingIOError):
                Lock(str(path), start, stop)
        for start, stop in ((0, 10), (20, None), (15, 15)):
            lock = Lock(str(path), start, stop)
            assert lock.held is True
            lock.release()
            lock.release()


def test_a_lock_without_end_covers_all_that_follows(path: Path) -> None:
    lock = Lock(str(path), 5)
    for start, stop, expected in ((0, 5, "held"), (5, 6, "busy"), (10**12, None, "busy")):
        with holder(path, start, stop) as (_, said):
            assert said == expected
    assert lock.read(0, 9) == b"plan"
    with holder(path, 5, None) as (_, said):
        assert said == "busy"  # reading through the lock did not drop it
    lock.release()
    with holder(path, 5, None) as (_, said):
        assert said == "held"


def test_a_lock_goes_with_its_process_however_it_dies(path: Path) -> None:
    with holder(path, 0, None) as (process, said):
        assert said == "held"
        process.send_signal(signal.SIGKILL)
        process.wait()
        Lock(str(path)).release()
    assert os.listdir(path.parent) == ["journal"]


def test_a_file_that_was_replaced_or_removed_cannot_be_locked(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lockf = local.fcntl.lockf

    def replacing(*arguments: Any) -> None:
        lockf(*arguments)
        write_file(str(path.parent), path.name, b"another")

    monkeypatch.setattr(local.fcntl, "lockf", replacing)
    with pytest.raises(FileNotFoundError):
        Lock(str(path))
    monkeypatch.setattr(local.fcntl, "lockf", lambda *_: path.unlink())
    with pytest.raises(FileNotFoundError):
        Lock(str(path))
    monkeypatch.undo()
    with pytest.raises(FileNotFoundError):
        Lock(str(path))


def test_a_lock_that_cannot_be_opened_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be opened to lock it"):
        Lock(str(tmp_path))


def test_a_file_system_without_locks_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(local.fcntl, "lockf", unsupported)
    lock = Lock(str(path))
    assert lock.held is None
    assert lock.read(0, 9) == b"plan"
    lock.release()


# --- what is mounted ----------------------------------------------------------------------------

MOUNTS = rb"""/dev/sda1 / ext4 rw,relatime 0 0
tmpfs /tmp tmpfs rw 0 0
server:/export /mnt/my\040data nfs4 rw,vers=4.2 0 0
/dev/sdb1 /mnt/my\040data/local xfs rw 0 0
user@host: /mnt/tab\011and\134slash fuse.sshfs rw 0 0
/dev/sdc1 /mnt/over ext4 rw 0 0
host:/x /mnt/over lustre rw 0 0
"""


@pytest.mark.parametrize(
    ("place", "kind", "network"),
    [
        ("/home/x", "ext4", False),
        ("/tmp", "tmpfs", False),
        ("/mnt/my data", "nfs4", True),
        ("/mnt/my data/train", "nfs4", True),
        ("/mnt/my database", "ext4", False),
        ("/mnt/my data/local/x", "xfs", False),
        ("/mnt/tab\tand\\slash/x", "sshfs", True),
        ("/mnt/over/x", "lustre", True),
    ],
)
def test_network_file_systems_are_told_by_their_mount(
    monkeypatch: pytest.MonkeyPatch, place: str, kind: str, network: bool
) -> None:
    def mounts(name: str, mode: str) -> IO[bytes]:
        assert (name, mode) == ("/proc/self/mounts", "rb")
        return io.BytesIO(MOUNTS)

    monkeypatch.setattr(local, "open", mounts, raising=False)
    assert local._file_system(place) == kind
    assert LocalDirectory(place).is_network() is network


def test_where_mounts_cannot_be_read_nothing_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> IO[bytes]:
        raise FileNotFoundError

    monkeypatch.setattr(local, "open", missing, raising=False)
    assert local._file_system("/x") == ""
    assert LocalDirectory("/x").is_network() is False


def test_this_machine_s_mounts_are_understood(tmp_path: Path) -> None:
    assert local._file_system(str(tmp_path)) != ""
