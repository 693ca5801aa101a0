"""Locks between processes: who holds what, and when it goes."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.caching import child

from shardio.errors import StorageError
from shardio.storage import local
from shardio.storage.local import write_file
from shardio.storage.lock import Lock

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
