"""Files of this machine: exact reads, whole writes, and what is mounted where."""

import errno
import io
import os
import shutil
import socket
from pathlib import Path
from typing import IO, Any

import pytest
from support.caching import child

from shardio.errors import DamageError, ExistsError, StorageError
from shardio.storage import local
from shardio.storage.local import Draft, LocalDirectory, open_file, token, write_file
from shardio.storage.location import locate
from shardio.storage.lock import Lock

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
    monkeypatch.setattr(local, "_MOST_READ", 7)
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


# --- writing ------------------------------------------------------------------------------------


def test_a_written_file_is_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    write_file(str(tmp_path), "x", b"one")
    assert (tmp_path / "x").read_bytes() == b"one"
    write_file(str(tmp_path), "x", b"two")
    assert (tmp_path / "x").read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("links", [True, False])
def test_a_taken_name_is_kept_when_replace_is_false(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr(local.os, "link", refused)
    write_file(str(tmp_path), "x", b"one", replace=False)
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("x", "dangling"):
        with pytest.raises(ExistsError, match=f"{name} is there already"):
            write_file(str(tmp_path), name, b"two", replace=False)
    assert (tmp_path / "x").read_bytes() == b"one"
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


def test_free_bytes_are_those_of_the_file_system(tmp_path: Path) -> None:
    assert 0 < local.free_bytes(str(tmp_path)) <= shutil.disk_usage(tmp_path).total
    with pytest.raises(StorageError, match=r"none: cannot look at: No such file"):
        local.free_bytes(str(tmp_path / "none"))


@pytest.mark.parametrize("links", [True, False])
def test_a_file_is_shared_with_another_directory(
    tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", refused)
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x").write_bytes(b"new")
    local.share(str(tmp_path / "a/x"), str(tmp_path))
    assert (tmp_path / "x").read_bytes() == b"new"
    assert (tmp_path / "a/x").exists() == links
    (tmp_path / "a/x").unlink(missing_ok=True)
    (tmp_path / "a/x").write_bytes(b"newer")
    local.share(str(tmp_path / "a/x"), str(tmp_path))  # over one of its name
    assert (tmp_path / "x").read_bytes() == b"newer"


def test_a_file_that_is_shared_already_stays(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x").write_bytes(b"new")
    for _ in range(2):
        local.share(str(tmp_path / "a/x"), str(tmp_path))
        assert (tmp_path / "a/x").samefile(tmp_path / "x")
