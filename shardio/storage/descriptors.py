"""Memory without a name, and passing its descriptor, or that of an open file, to another process.

How it works. A descriptor goes through a Unix socket beside one byte of data (SCM_RIGHTS): the
system makes a copy of it in the process that receives. Memory with a descriptor but no name (a
memfd) leaves nothing behind, needs no /dev/shm, and is handed to a process that was spawned as well
as to a forked one.

Source: unix(7), memfd_create(2), mmap(2).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import socket
import tempfile
from multiprocessing.connection import Connection

_PAGE = 4096
# Private memory from this size on lies in huge pages, where the kernel has them: a copy of 38 MB
# takes 2.5 ms instead of 3.
_HUGE = 4 << 20
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # Linux: all pages at once, not by a fault each


def as_socket(connection: Connection) -> socket.socket:
    """Return the connection as a socket, which can carry descriptors and be shut down.

    Rejected: multiprocessing's send_handle. On macOS it waits for an acknowledgement, which the
    thread that listens would read. None is needed: the sender keeps its own descriptor.
    """
    one = socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)
    one.setblocking(True)  # whatever socket.setdefaulttimeout says: it holds for the connection too
    return one


def send(to: socket.socket, fd: int, data: bytes = b".") -> None:
    """Send an open descriptor beside data. The sender keeps its own. Raises OSError."""
    socket.send_fds(to, [data], [fd])


def receive_from(one: socket.socket) -> int:
    """Receive a descriptor that `send` sent, not inheritable; the caller closes it.

    Raises EOFError when the other end is closed; OSError, EMFILE when this process has no room for
    another one: it is gone then, but what follows can be read.
    """
    fd = receive_with(one, 1)[1]
    if fd < 0:  # the system leaves out what there is no room for
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return fd


def receive_with(one: socket.socket, size: int) -> tuple[bytes, int]:
    """Receive data of this size, and the descriptor beside it; -1: there is none, or no room.

    Raises EOFError when the other end is closed.
    """
    data, fds, _, _ = socket.recv_fds(one, size, 1)
    if not data:
        raise EOFError
    if not fds:
        return data, -1
    os.set_inheritable(fds[0], False)
    return data, fds[0]


def anonymous_memory() -> int:
    """Return a descriptor of memory without a name, of 0 bytes: `os.ftruncate` sets its size."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("shardio", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    file, path = tempfile.mkstemp(prefix="shardio-")  # macOS: a file that is unlinked at once
    os.unlink(path)
    return file


def map_memory(fd: int, size: int, *, aside: bool = False) -> mmap.mmap:
    """Map so many bytes of a descriptor, shared; with fd -1 new memory of this process alone.

    aside: other threads are to go on meanwhile. mmap keeps Python's lock, some ms where it finds
    the pages of 38 MB; numpy, which reads one byte of each instead, does not.
    """
    if fd >= 0:
        memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | (0 if aside else _POPULATE))
        if aside:
            import numpy as np  # which a helper, that must start fast, has no need of

            np.frombuffer(memory, np.uint8)[::_PAGE].max()
        return memory
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if size < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size, flags=private | _POPULATE)
    memory = mmap.mmap(-1, size, flags=private)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    import numpy as np  # which a helper, that must start fast, has no need of

    np.frombuffer(memory, np.uint8)[::_PAGE] = 0  # all pages now
    return memory
