"""A training one of whose workers fails; what came of it is a line of JSON.

    worker_program.py DATA SCRATCH {"loader": ..., "method": ..., ...}

In a process of its own: what a loader leaves behind is seen by whoever started it.
"""

import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.loading import labels, picture, pictures
from support.worker_programs import DIED
from torch.utils.data import DataLoader

from shardio import ShardLoader, WorkerError

TIMEOUT_S = 8  # of loaders, where a worker is to hang


@dataclass
class Fails:
    """Decodes; the n-th time that it meets a record its process fails."""

    target: int
    how: str
    turn: int
    scratch: str

    def __call__(self, data: bytes) -> Any:
        if int(data[:6]) == self.target:
            seen = os.open(os.path.join(self.scratch, "seen"), os.O_CREAT | os.O_WRONLY, 0o600)
            os.lseek(seen, 0, os.SEEK_END)
            os.write(seen, b".")
            if os.fstat(seen).st_size == self.turn:
                fail(self.how, self.scratch)
            os.close(seen)
        return picture(data)


def fail(how: str, scratch: str) -> None:
    Path(scratch, "at").write_text(f"{time.monotonic()}")
    if how == "exception":
        raise ValueError("not liked")
    if how == "_exit(0)":
        os._exit(0)
    if how == "hang":
        while True:
            signal.pause()
    os.kill(os.getpid(), getattr(signal, how))
    threading.Event().wait()  # another thread may get it: this one does not go on meanwhile


def loader_of(given: dict[str, Any], dataset: Any) -> Any:
    timeout = TIMEOUT_S if given["how"] == "hang" else 0
    if given["loader"] == "ShardLoader":
        return ShardLoader(
            dataset,
            num_workers=given["workers"],
            threads=given["threads"],
            multiprocessing_context=given["method"],
            timeout=timeout,
        )
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=given["workers"],
        multiprocessing_context=given["method"],
        persistent_workers=given["persistent"],
        timeout=timeout,
    )


def pids(loader: Any) -> list[int]:
    if isinstance(loader, ShardLoader):
        return [*loader.explain().pids]
    return [worker.pid for worker in loader._iterator._workers]


def main(folder: str, scratch: str, options: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.filterwarnings("ignore")
    given, expected = json.loads(options), []
    for epoch in (0, 1):
        dataset = pictures(Path(folder))
        dataset.set_epoch(epoch)
        expected.append(labels(dataset))
    epoch, between = given["epoch"], given["moment"] == "between epochs"
    steps = expected[epoch]
    step = {"first": 0, "middle": len(steps) // 2, "last": len(steps) - 1}.get(given["moment"], 0)
    target = -1 if between else steps[step][given["row"] % len(steps[step])]
    decode = Fails(target, given["how"], epoch + 1, scratch)
    dataset = pictures(Path(folder), decode=decode)
    loader, got, caught = loader_of(given, dataset), [], None
    try:
        for at in range(epoch + 1):
            (loader if isinstance(loader, ShardLoader) else dataset).set_epoch(at)
            if at == epoch == 1 and between:
                Path(scratch, "at").write_text(f"{time.monotonic()}")
                os.kill(pids(loader)[0], getattr(signal, given["how"]))
            got = []
            for batch in loader:
                got += labels([batch])
    except (ValueError, WorkerError, *DIED) as error:
        caught = error
    while given["loader"] == "DataLoader":
        try:  # torch raises again, wherever this process is when it learns of the death
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            break
        except DIED:
            pass
    at = Path(scratch, "at")
    if given["how"] == "hang" and not at.exists():  # the machine was so busy that none came there
        assert caught is not None
        print(json.dumps({"seconds": 0.0}), flush=True)
        return
    took = time.monotonic() - float(at.read_text())
    took -= TIMEOUT_S if given["how"] == "hang" else 0
    assert caught is not None, "no error came"
    assert got == steps[: len(got)] and len(got) < len(steps) + between, "batches are wrong"
    text = "".join(traceback.format_exception(caught))
    if given["how"] == "exception":
        assert isinstance(caught, ValueError), text
    if not between and (given["loader"] == "ShardLoader" or given["how"] == "exception"):
        assert f"k/{target:06}.jpg" in text, f"it does not name record {target}: {text}"
    caught = None
    if isinstance(loader, ShardLoader):  # it goes on with new processes
        loader.set_epoch(0)
        assert labels(loader) == expected[0], "the next pass is wrong"
        loader.close()
    print(json.dumps({"seconds": took}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
