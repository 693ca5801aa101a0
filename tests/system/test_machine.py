"""What the machine says of its processes, its memory and its cores."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardio import machine

LINUX = sys.platform == "linux"


@pytest.mark.skipif(not LINUX, reason="there is no /proc")
def test_a_tree_of_processes_is_measured() -> None:
    before = machine.cpu_seconds([os.getpid()])
    code = "sum(range(10**7)); print('done', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout and child.stdin
        child.stdout.readline()
        tree = machine.family(os.getpid())
        assert child.pid in tree and tree[0] == os.getpid()
        spent = machine.cpu_seconds([child.pid])
        assert spent is not None and spent > 0
        both, alone = machine.pss_bytes(tree), machine.pss_bytes([os.getpid()])
        assert both is not None and alone is not None and both > alone
        assert 0 < machine.private_bytes(child.pid) <= (machine.pss_bytes([child.pid]) or 0)
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.wait()
    after = machine.cpu_seconds([os.getpid()])  # of the child, too, which was waited for
    assert before is not None and after is not None and after >= before + spent
    assert machine.cpu_seconds([child.pid]) is None and machine.pss_bytes([child.pid]) is None
    assert machine.family(1 << 30) == [1 << 30]


def test_pages_are_dropped_or_said_to_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    (tmp_path / "empty").touch()
    stayed = machine.evict([str(path), str(tmp_path / "empty")])
    path.read_bytes()
    with open(path, "rb") as file:
        pages, of = machine._resident(file.fileno())
    assert pages == of == (1 << 20) // os.sysconf("SC_PAGE_SIZE")
    if stayed is not None:
        assert stayed == 1.0 or stayed <= machine.STAYED  # a RAM disk, or a device
        assert machine._cached([str(path)]) == 1.0
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    assert machine.evict([str(path)]) is None


def test_a_share_of_the_machine_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "processors", lambda: 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert machine.cores() <= 1
    # What other programs do with other cores is nothing that slows this one.
    assert machine.load() is None and machine.busy_seconds() is None
