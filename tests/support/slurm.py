"""A SLURM of one machine for the tests: munged, slurmctld and slurmd of Debian, on loopback.

    with slurm.cluster() as variables:
        subprocess.run(["sbatch", ...], env=variables)

All three run in the foreground as children of the test, and are stopped by their process ids.
"""

import contextlib
import getpass
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import LIMIT_S, servers
from support.trees import environment

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={home}/munge
SlurmctldPort={control}
SlurmdPort={port}
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


@contextlib.contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """Run a cluster of this machine alone; yields the environment in which its commands find it."""
    if any(servers.find_program(name) is None for name in PROGRAMS):
        pytest.skip("NOT TESTED HERE: no SLURM: tools/setup-cluster installs it")
    with contextlib.ExitStack() as stack:
        # A short path: sockets have no more than 107 bytes.
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
        home.chmod(0o755)  # munged's clients may be others
        homes = {name: home / name for name in ("munged", "slurmctld", "slurmd", "state", "spool")}
        for one in homes.values():
            one.mkdir()
        control, port = servers.free_port(), servers.free_port()
        facts = {"host": socket.gethostname().partition(".")[0], "user": getpass.getuser()}
        text = CONFIGURATION.format(
            **facts, home=home, control=control, port=port, cpus=os.cpu_count()
        )
        (home / "slurm.conf").write_text(text)
        key = home / "key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        stack.enter_context(_munged(home, homes["munged"], key))
        variables = {"SLURM_CONF": str(home / "slurm.conf")}
        for name, options, listens in (("slurmctld", ["-c"], control), ("slurmd", [], port)):
            line = [servers.find_program(name) or name, "-D", *options]
            stack.enter_context(servers.running(line, listens, homes[name], variables))
        yield environment(**variables)


@contextlib.contextmanager
def _munged(home: Path, folder: Path, key: Path) -> Iterator[None]:
    """Run munged, by which the others know each other, until it has ended."""
    paths = {"key-file": key, "socket": home / "munge", "pid-file": home / "munged.pid"}
    paths |= {"log-file": home / "munged.log", "seed-file": home / "seed"}
    options = [f"--{name}={path}" for name, path in paths.items()]
    line = [servers.find_program("munged") or "munged", "--foreground", "--force", *options]
    with servers.started(line, folder) as process:
        until = time.monotonic() + LIMIT_S
        while not (home / "munge").exists():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"munged does not listen: {(folder / 'log').read_text()}")
            time.sleep(0.01)
        yield
