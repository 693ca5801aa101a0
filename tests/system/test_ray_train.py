"""The training of docs/order.md on Ray: a worker is killed in mid-epoch, and Ray goes on."""

import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from support import LIMIT_S, programs, servers
from support.frameworks import BECOME, COUNTS, PYTHON, needs_them, numbered
from support.pages import blocks, replaced

N, WORKERS, BATCH, STEPS, EPOCHS = sum(COUNTS), 2, 6, 9, 2  # 97 records, and 11 repeats
EVERY, KILLED = 3, 5  # a checkpoint each 3 steps; worker 1 dies in step 5 of the second epoch
# What the test adds: a line for each step that is trained, and the death of a worker.
LOG = f"""
            rank = torch.distributed.get_rank()
            run = 1 + Path(FOLDER, "died").exists()
            with Path(FOLDER, f"{{run}}-{{epoch}}-{{rank}}").open("a") as log:
                print(*labels.tolist(), file=log)
            if (run, epoch, step) == (1, 1, {KILLED}):
                ray.train.get_all_reported_checkpoints()  # waits until Ray has taken them up
                torch.distributed.barrier()
                if rank == 1:
                    Path(FOLDER, "died").touch()
                    os.kill(os.getpid(), 9)
"""
START = f"""
ray.init(
    **{{"num_cpus": {WORKERS}, "include_dashboard": False, "_memory": 1 << 30}},
    **{{"object_store_memory": 80 << 20, "_temp_dir": FOLDER + "/ray"}},
)
TorchTrainer("""


def read(folder: Path, run: int, epoch: int) -> list[list[int]]:
    """Return the labels of each step, of all ranks."""
    logs = [folder / f"{run}-{epoch}-{rank}" for rank in range(WORKERS)]
    each = [[list(map(int, line.split())) for line in log.read_text().splitlines()] for log in logs]
    return [[*chain(*rows)] for rows in zip(*each, strict=True)]


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder below which Ray's sockets have less than 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        yield Path(folder)


@needs_them
@pytest.mark.frameworks
@pytest.mark.slow
def test_ray_goes_on_with_the_epoch_after_a_worker_was_killed(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # else it writes a token into the user's home
    folder = short_path
    numbered(folder / "www" / "train")
    (program,) = blocks("order.md", "Ray Train", "python")
    with servers.nginx(folder / "www") as web:
        program = replaced(
            program,
            ("import tempfile", f"import os\nimport tempfile\n\nFOLDER = {str(folder)!r}"),
            ("Model()", "torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 97))"),
            ("s3://bucket/train", f"{web.url}/train"),
            ("s3://bucket/runs", f"{folder}/runs"),
            ("batch_size=32", f"batch_size={BATCH}"),
            ("Crop(224", "Crop(8"),
            ("num_workers=8", "num_workers=1"),
            ("num_workers=16, use_gpu=True", f"num_workers={WORKERS}"),
            ("EPOCHS, EVERY = 90, 1000", f"EPOCHS, EVERY = {EPOCHS}, {EVERY}"),
            ("            loss = ", LOG.lstrip("\n") + "            loss = "),
            ("TorchTrainer(", START),
        )
        (folder / "train.py").write_text(program)
        done = programs.run("-c", BECOME, PYTHON, folder / "train.py", limit_s=LIMIT_S)
        assert not done.timed_out and done.code == 0 and not done.left, str(done)
        assert len({one.path for one in web.requests()}) > len(COUNTS) - 1
    first, second, rest = read(folder, 1, 0), read(folder, 1, 1), read(folder, 2, 1)
    assert not list(folder.glob("2-0-*"))
    assert [len(first), len(second), len(rest)] == [STEPS, KILLED, STEPS - EVERY]
    for epoch in (first, second[:EVERY] + rest):
        assert set(chain(*epoch)) == set(range(N)) and len([*chain(*epoch)]) == STEPS * 12
        assert sorted([*chain(*epoch)][:N]) == [*range(N)]  # and then the repeats
    assert second[EVERY:] == rest[: KILLED - EVERY]  # the same global batches, computed again
