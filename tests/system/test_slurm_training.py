"""The training of docs/order.md below srun: it ends in mid-epoch, and the job goes on."""

import subprocess
import sys
import time
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S, programs, servers, slurm, small_datasets
from support.pages import blocks, replaced

COUNTS = [13, 20, 3, 12]
N, TASKS, BATCH, STEPS, EPOCHS = sum(COUNTS), 2, 3, 8, 2
EVERY, KILLED = 3, 5  # a checkpoint each 3 steps; task 1 ends in step 5 of the second epoch
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"}
# What the test adds: a line for each step that is trained, and the end of a task, or of its node.
ENDS = {
    "a killed task": "os.kill(os.getpid(), 9)",
    "a requeued job": "os.execvp('sh', ['sh', '-c', 'scontrol requeue $SLURM_JOB_ID; sleep 600'])",
}
LOG = f"""
        rank, run = torch.distributed.get_rank(), int(os.environ["RUN"])
        with open(f"{{run}}-{{epoch}}-{{rank}}", "a") as log:
            print(*labels.tolist(), file=log)
        if (run, epoch, step) == (1, 1, {KILLED}):
            torch.distributed.barrier()
            if rank == 1:
                END
"""


def read(folder: Path, run: int, epoch: int) -> list[list[int]]:
    """Return the labels of each step, of all ranks."""
    logs = [folder / f"{run}-{epoch}-{rank}" for rank in range(TASKS)]
    each = [[list(map(int, line.split())) for line in log.read_text().splitlines()] for log in logs]
    return [sorted(chain(*rows)) for rows in zip(*each, strict=True)]


def submit(cluster: dict[str, str], script: Path, restarts: int) -> str:
    """Submit a job, and wait for its end after so many restarts. Returns its last state.

    SLURM waits for two minutes before it runs a job again that was requeued; here for two seconds.
    Within the second of the requeue slurmd refuses it: "Job credential revoked".
    """
    run = partial(
        subprocess.run,
        env=cluster | {"OMP_NUM_THREADS": "1"},
        cwd=script.parent,
        timeout=LIMIT_S,
        check=True,
        capture_output=True,
        text=True,
    )
    job = run(["sbatch", "--parsable", script]).stdout.strip()
    until, told = time.monotonic() + LIMIT_S, False
    while time.monotonic() < until:
        time.sleep(0.2)
        line = run(["scontrol", "show", "job", "--oneliner", job]).stdout
        shown = dict(word.split("=", 1) for word in line.split() if "=" in word)
        state, again = shown["JobState"], int(shown["Restarts"]) >= restarts
        waits = state == "PENDING" and shown["Reason"] == "BeginTime"
        if waits and again and not told:
            run(["scontrol", "update", f"JobId={job}", "StartTime=now+2"])
            told = True
        if state in ENDED and again:
            return state
    raise TimeoutError(line)


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_an_end_in_mid_epoch_costs_the_steps_since_the_last_checkpoint(
    end: str, tmp_path: Path
) -> None:
    def sample(i: int) -> dict[str, Any]:
        return {"__key__": b"%d" % i, "image": small_datasets.jpeg(i), "label": i}

    small_datasets.make(tmp_path / "www" / "train", COUNTS, sample=sample, classes=None)
    (job,), (program,) = (blocks("order.md", "SLURM", kind) for kind in ("bash", "python"))
    with slurm.cluster() as cluster, servers.nginx(tmp_path / "www") as web:
        program = replaced(
            program,
            ('"nccl"', '"gloo"'),
            ('torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n', ""),
            (".cuda()", ""),
            ("Model()", "torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 48))"),
            ("s3://bucket/train", f"{web.url}/train"),
            ("/shared/run/", f"{tmp_path}/"),
            ("batch_size=32", f"batch_size={BATCH}"),
            ("Crop(224", "Crop(8"),
            ("num_workers=8", "num_workers=1"),
            ("EPOCHS, EVERY = 90, 1000", f"EPOCHS, EVERY = {EPOCHS}, {EVERY}"),
            ("        loss = ", LOG.lstrip("\n").replace("END", ENDS[end]) + "        loss = "),
        )
        (tmp_path / "train.py").write_text(program)
        one_machine = ("--nodes=2 --ntasks-per-node=8", f"--ntasks={TASKS} --overcommit")
        python = ("python train.py", f"{sys.executable} train.py")
        number = "$((attempt + ${SLURM_RESTART_COUNT:-0}))"
        run = ("    srun ", f"    export RUN={number}\n    srun --overcommit ")
        free = ("MASTER_PORT=29500", f"MASTER_PORT={servers.free_port()}")
        said = ("--requeue", f"--requeue --output={tmp_path}/said")
        (tmp_path / "train.sh").write_text(replaced(job, one_machine, python, run, free, said))
        state = submit(cluster, tmp_path / "train.sh", restarts=end == "a requeued job")
        text = (tmp_path / "said").read_text()
        assert state == "COMPLETED", text
        assert len({one.path for one in web.requests()}) == 1 + len(COUNTS)
    assert ("task 1: Killed" if end == "a killed task" else "DUE TO JOB REQUEUE") in text
    first, second, rest = read(tmp_path, 1, 0), read(tmp_path, 1, 1), read(tmp_path, 2, 1)
    assert not list(tmp_path.glob("2-0-*")) and not list(tmp_path.glob("3-*"))
    assert [len(first), len(second), len(rest)] == [STEPS, KILLED, STEPS - EVERY]
    assert sorted(chain(*first)) == list(range(N))
    assert sorted(chain(*second[:EVERY], *rest)) == list(range(N))
    assert second[EVERY:] == rest[: KILLED - EVERY]  # the same global batches, computed again
    assert first[:KILLED] != second


WARNED = """
import os, warnings
from shardio.dataset.ranks import machines_of, resolve_ranks
warnings.simplefilter("always")
for given in ((0, 1), None, None):
    print(resolve_ranks(given))
print(machines_of(6), machines_of(4))
"""


def test_tasks_whose_ranks_nobody_says_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "2")
    for tasks in (6, 1):
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", str(tasks))
        said = programs.run("-c", WARNED, limit_s=LIMIT_S, warm=True).output
        assert said.count("(0, 1)\n") == 3
        assert said.count("one of 6 tasks of srun. Each of them reads all the data") == (tasks == 6)
        expected = "(2, 3) (1, 4)" if tasks == 6 else "(1, 6) (1, 4)"
        assert said.endswith(f"{expected}\n")
