"""A Ray cluster of this machine for the tests: nodes with little memory, on loopback.

    with ray_cluster.running() as cluster:
        shardio("verify", out, "--executor", "ray", "--address", cluster.address)

Each node is `ray start --block` as a child of the test. It is stopped by its process id, and has to
take all with it that it started.
"""

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from support import LIMIT_S, programs, servers

_OBJECTS = 80 << 20  # bytes of a node's object store; Ray takes 75 MiB at least
_MEMORY = 1 << 30  # bytes that Ray thinks a node has


class Cluster(NamedTuple):
    """A cluster, which is there as long as its first node."""

    address: str
    folder: str  # of all that Ray writes

    def at_work(self) -> list[int]:
        """Return the processes that are at a task; their titles say so. Needs /proc."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
                title = (process / "cmdline").read_bytes()
                if title.startswith(b"ray::") and not title.startswith(b"ray::IDLE"):
                    log = os.readlink(process / "fd" / "1")
                    found += [int(process.name)] * log.startswith(self.folder)
        return found

    @contextlib.contextmanager
    def node(self, cpus: int, *options: str) -> Iterator[programs.Program]:
        """Run a node more; a test may end it by `programs.kill_marked`."""
        program = programs.Program(
            *("-m", "ray.scripts.scripts", "start", "--block", "--node-ip-address=127.0.0.1"),
            *(f"--num-cpus={cpus}", f"--object-store-memory={_OBJECTS}", f"--memory={_MEMORY}"),
            *(options or (f"--address={self.address}",)),
            limit_s=6 * LIMIT_S,  # for all that a module does with it
        )
        try:
            if not program.read_until("This command will now block"):
                raise RuntimeError("a node of Ray did not begin")
            yield program
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(program.pid, signal.SIGTERM)
            done = program.finish()
            print(done)  # pytest shows it where the test fails
        assert not done.left and not done.timed_out, done


@contextlib.contextmanager
def running(cpus: int = 2) -> Iterator[Cluster]:
    """Run a cluster of one node, in which programs that are started meanwhile find what it says."""
    if find_spec("ray") is None:
        pytest.skip("NOT TESTED HERE: the package ray is not there: tools/setup")
    # A short path: sockets have no more than 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder, _settings(folder):
        port = servers.free_port()
        cluster = Cluster(f"127.0.0.1:{port}", folder)
        head = ("--head", f"--port={port}", f"--temp-dir={folder}", "--include-dashboard=false")
        with cluster.node(cpus, *head):
            yield cluster


@contextlib.contextmanager
def _settings(folder: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else it writes a token into the user's home
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TMPDIR", folder)
        patch.delenv("RAY_ADDRESS", raising=False)
        yield
