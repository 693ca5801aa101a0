"""Descriptors that go from process to process, and memory that has no name."""

import errno
import multiprocessing
import os
import socket
from pathlib import Path

import pytest

from shardio.storage import descriptors


def test_an_open_file_passes_through_a_connection(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"bytes")
    here, there = multiprocessing.Pipe()
    with open(tmp_path / "one", "rb") as file, descriptors.as_socket(there) as one:
        descriptors.send(one, file.fileno())
    with descriptors.as_socket(here) as one:
        fd = descriptors.receive_from(one)
    assert os.pread(fd, 9, 0) == b"bytes" and not os.get_inheritable(fd)
    os.close(fd)
    here.close()
    there.close()


def test_the_end_of_the_sender_is_an_end_of_file() -> None:
    here, there = multiprocessing.Pipe()
    there.close()
    with pytest.raises(EOFError), descriptors.as_socket(here) as one:
        descriptors.receive_from(one)
    here.close()


def test_data_comes_with_the_descriptor_beside_it_or_without() -> None:
    here, there = multiprocessing.Pipe()
    with descriptors.as_socket(there) as one, descriptors.as_socket(here) as other:
        descriptors.send(one, one.fileno(), b"first")
        one.sendall(b"again")
        data, fd = descriptors.receive_with(other, 5)
        assert data == b"first" and not os.get_inheritable(fd)
        assert descriptors.receive_with(other, 5) == (b"again", -1)
    os.close(fd)
    here.close()
    there.close()


def test_a_message_without_its_descriptor_is_too_many_open_files() -> None:
    here, there = multiprocessing.Pipe()
    with descriptors.as_socket(there) as one:
        one.sendall(b".")
    with pytest.raises(OSError) as caught, descriptors.as_socket(here) as one:
        descriptors.receive_from(one)
    assert caught.value.errno == errno.EMFILE
    here.close()
    there.close()


def test_a_default_timeout_is_not_the_sockets() -> None:
    here, there = multiprocessing.Pipe()
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0.01)
    try:
        with descriptors.as_socket(here) as one:
            assert one.gettimeout() is None
    finally:
        socket.setdefaulttimeout(before)
        here.close()
        there.close()


@pytest.mark.parametrize("size", [4096, 5 << 20])
def test_what_is_written_to_one_mapping_is_read_from_another(size: int) -> None:
    fd = descriptors.anonymous_memory()
    os.ftruncate(fd, size)
    first, second = (descriptors.map_memory(fd, size, aside=aside) for aside in (False, True))
    os.close(fd)
    first[size - 1] = 7
    assert second[size - 1] == 7 and not second[0]


@pytest.mark.parametrize("size", [4096, 5 << 20])
def test_private_memory_is_empty_and_writable(size: int) -> None:
    memory = descriptors.map_memory(-1, size)
    assert memory[:] == bytes(size)
    memory[0] = 1
