"""Reads that are held to a limit, and counted, by the kernel's own control groups."""

import glob
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import LIMIT_S
from support.trees import environment

from benchmarks.throttle import Controller, Group, controller, disk
from shardio import StorageError, machine


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    """A file on a disk that can be limited, none of it in memory."""
    try:
        with Group(tmp_path):
            pass
    except StorageError as error:
        pytest.skip(f"NOT TESTED HERE: {error}")
    path = tmp_path / "file"
    path.write_bytes(os.urandom(4096) * 400)
    if machine.evict([str(path)]) != 0:
        pytest.skip("NOT TESTED HERE: pages of this file system cannot be dropped")
    return path


def groups() -> list[str]:
    return glob.glob(f"{controller().folder}/shardio-{os.getpid()}-*")


READS = """
import os, sys, time
from benchmarks.throttle import join
join(sys.argv[1])
file = os.open(sys.argv[2], os.O_RDONLY)
os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
start = time.monotonic()
for i in range(200):
    os.pread(file, 1, i * 8192)
print(time.monotonic() - start)
"""


def test_reads_are_counted_and_held(cold: Path) -> None:
    with Group(cold, reads_per_s=250) as group:
        assert len(groups()) == 1
        done = subprocess.run(
            [sys.executable, "-c", READS, group.members, str(cold)],
            capture_output=True, text=True, env=environment(), check=True,
        )  # fmt: skip
        assert 200 <= group.reads() <= 260  # and what Python's own start read, if it was cold
    assert groups() == []
    assert float(done.stdout) > 0.4  # 200 at 250 a second; the first slice is given at once


def test_the_group_goes_when_what_runs_in_it_fails(cold: Path) -> None:
    with pytest.raises(ZeroDivisionError), Group(cold):
        raise ZeroDivisionError
    assert groups() == []


def test_who_stays_in_it_is_sent_back(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.throttle._LEAVE_S", 0.05)
    with subprocess.Popen(["sleep", "inf"]) as process:
        with Group(cold) as group:
            Path(group.members).write_text(str(process.pid))
        assert groups() == [] and process.poll() is None
        process.kill()


def test_ctrl_c_leaves_no_group(cold: Path) -> None:
    # Short sleeps: an interrupt just before one is seen after it.
    code = (
        "import sys, time\nfrom benchmarks.throttle import Group\n"
        "with Group(sys.argv[1]) as group:\n"
        "    print(group.members, flush=True)\n    while True: time.sleep(0.1)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(cold)], env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdout
        members = process.stdout.readline().strip()
        assert Path(members).exists()
        process.send_signal(signal.SIGINT)
        process.wait(LIMIT_S)
    assert not Path(members).exists()


def test_what_lies_on_no_disk_is_refused_in_words() -> None:
    with pytest.raises(StorageError, match=r"/proc cannot be held to a limit: it lies on no disk"):
        Group("/proc").__enter__()


def test_partitions_are_limited_as_their_disk(tmp_path: Path) -> None:
    try:
        found = disk(str(tmp_path))
    except StorageError as error:
        pytest.skip(f"NOT TESTED HERE: {error}")
    block = Path("/sys/dev/block") / found
    assert block.exists() and not (block / "partition").exists()


def test_both_versions_of_control_groups_are_spoken() -> None:
    """The texts are those of the kernel's documentation."""
    one, two = Controller(1, "/x"), Controller(2, "/x")
    assert one.limit("8:0", 500) == ("blkio.throttle.read_iops_device", "8:0 500")
    assert two.limit("8:0", 500) == ("io.max", "8:0 riops=500")
    counts = "8:16 Read 7\n8:0 Read 3005\n8:0 Write 1\n8:0 Total 3006\nTotal 3013\n"
    assert one.count("8:0", counts) == 3005
    stat = (
        "8:16 rbytes=1 wbytes=0 rios=7 wios=0 dbytes=0 dios=0\n"
        "8:0 rbytes=90430464 wbytes=299008000 rios=8950 wios=1252 dbytes=50331648 dios=3021\n"
    )
    assert two.count("8:0", stat) == 8950
    assert one.count("8:32", counts) == two.count("8:32", stat) == 0
