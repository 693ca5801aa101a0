"""One repeat of one way to read, in a process of its own: rate, CPU time, memory, first batch.

How it works. `Host` is a process that has imported torch and nothing else, and forks another for
each request, so that none finds another's memory or caches, and none imports torch anew (2 s). It
leads a session of its own: Ctrl-C does not reach it, one signal ends all of it, and it ends by
itself when whoever asks is gone. Requests and answers are lines of JSON.

A repeat begins to count once each worker has given a batch (and warm, after some time), and ends
where all workers have given equally many since, because batches come in bursts. Each batch is
touched, a byte in each page, as its copy to a GPU would; a training step there is none.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .. import errors, machine
from ..dataset import sequence
from ..errors import OptionError, StorageError, printable
from ..order.options import SHUFFLE_BUFFER
from ..storage.local import memory_available
from ..storage.options import Storage

if TYPE_CHECKING:
    import torch

    from ..dataset.shard_dataset import ShardDataset

WARM_S: Final = 0.5  # before a warm repeat counts: pages, allocators and caches of its processes
SMALL: Final = 64  # pixels: images below it keep their size, as CIFAR's do; 224 would be enlarging
CROP: Final = 224
_LOOK_S: Final = 0.25  # between two looks at the memory of a repeat's processes
_FILLED: Final = 4096  # records that are handed out when the windows of all spans are filled
_LEAST: Final = 4  # batches that a cold pass must have left to count without its start


class FailedError(errors.ShardioError):
    """A repeat did not come to its end. Another way to read may."""


# What is wrong with the dataset, whatever way it is read.
_OF_ALL = (errors.DamageError, errors.DecodeError, errors.VersionError, OptionError)


class Host:
    """A process that has imported torch, and forks another for each request, one at a time.

    It leads a session of its own, so that Ctrl-C does not reach it, and one signal ends all of it.
    It ends by itself when this process does.
    """

    def __init__(self, storage: Storage | None = None) -> None:
        """storage: goes with each request; its options may be secret, and go through a pipe."""
        self._storage = written(storage or Storage())
        self._process: subprocess.Popen[bytes] | None = None
        self._running = contextlib.ExitStack()  # the process, and what is to go with it

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the answer, with pss_bytes and memory_left while it was made.

        Raises FailedError, whose text says why; DamageError and the like are raised as they are.
        """
        process = self._started()
        assert process.stdin and process.stdout
        until = time.monotonic() + timeout_s
        pss, left, line = 0, [memory_available()], b""
        try:
            request = request | {"storage": self._storage}
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            pause = _LOOK_S
            while not line.endswith(b"\n"):
                if not select.select([process.stdout], [], [], pause)[0]:
                    looked = time.monotonic()
                    if looked > until:
                        raise self._failed(f"no answer within {timeout_s:.0f} s; it was ended")
                    pss = max(pss, _pss(process.pid))
                    left.append(memory_available())
                    pause = max(_LOOK_S, 10 * (time.monotonic() - looked))  # a tenth at most
                    continue
                piece = os.read(process.stdout.fileno(), 1 << 16)
                if not piece:
                    raise self._failed("its process was killed (out of memory?)")
                line += piece
        except BrokenPipeError:
            raise self._failed("its process ended") from None
        answer: dict[str, Any] = json.loads(line)
        if sys.platform != "linux":
            self._end()
        if "error" in answer:
            kind = getattr(errors, answer["kind"], None)
            if kind in _OF_ALL:
                raise kind(answer["error"])
            raise FailedError(answer["error"])
        return answer | {"pss_bytes": pss or None, "memory_left": min(left)}

    def _failed(self, what: str) -> FailedError:
        """End the process, and return an error with the last line that the process wrote."""
        self._errors.seek(0)
        said = self._errors.read()[-2000:].decode("utf-8", "replace").strip()
        what += f": {printable(said.splitlines()[-1], 300)}" if said else ""
        self._end()
        return FailedError(what)

    def _started(self) -> subprocess.Popen[bytes]:
        """Return the process; the first call starts it."""
        if self._process is not None:
            return self._process
        launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        env = {name: value for name, value in os.environ.items() if name not in launcher}
        # Ctrl-C comes before or after: a process that nobody knows of would go on for a while.
        with _uninterrupted():
            # For the sockets of torch's workers, which are killed and cannot remove them.
            folder = self._running.enter_context(
                tempfile.TemporaryDirectory(prefix="shardio", ignore_cleanup_errors=True)
            )
            self._errors = self._running.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
            # The same modules as here, wherever they are from; none of the current folder.
            code = (
                f"import sys; sys.path[:] = {sys.path!r}\n"
                f"from shardio.tuning.bench_process import serve; serve({folder!r})"
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=env | {"TMPDIR": folder},
                start_new_session=True,
            )
            self._running.callback(_kill, self._process)
        return self._process

    def _end(self) -> None:
        """End the process, and what goes with it."""
        self._process = None
        self._running.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its session, which is its own while nobody has waited for the process."""
    gone = contextlib.suppress(ProcessLookupError)
    with contextlib.suppress(BrokenPipeError), process, gone:  # it is waited for, its pipes closed
        os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Put Ctrl-C off until the end. Only the main thread gets one.

    A mask would not do: the system gives the signal to any thread (numpy has some), and Python
    raises KeyboardInterrupt in the main thread all the same.
    """
    held = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(held):
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, held)
        if came:
            signal.raise_signal(signal.SIGINT)


def _pss(host: int) -> int:
    """Return the memory of a row's processes, with what they share with the host."""
    tree = machine.family(host)
    private = machine.private_bytes(host)
    each = [machine.pss_bytes([pid]) for pid in tree]
    known = [one for one in each if one is not None]
    if len(tree) == 1 or len(known) < len(each):  # one ended just now: the rest would be too little
        return 0
    return sum(known) - private


def serve(folder: str) -> None:
    """Answer requests, each a line of JSON, until there are no more. Removes the folder then."""
    import torch.utils.data  # noqa: F401 - for all that it forks

    from ..loader import shard_loader as loader  # noqa: F401

    answers = os.dup(1)
    os.dup2(2, 1)  # what others print is no answer
    while line := sys.stdin.readline():
        request = json.loads(line)
        # macOS: what is forked may not use the system's frameworks; `ask` ends the host instead.
        answer = _forked(request, folder) if sys.platform == "linux" else _answer(request)
        os.write(answers, answer + b"\n")
    shutil.rmtree(folder, ignore_errors=True)


def _forked(request: dict[str, Any], folder: str) -> bytes:
    """Answer in a process of its own. Ends the whole session when nobody waits for the answer."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.close(ours)
        code = 1
        with contextlib.suppress(BaseException):
            os.write(theirs, _answer(request) + b"\n")
            code = 0
        os._exit(code)
    os.close(theirs)
    answer = b""
    while not answer.endswith(b"\n"):
        # A worker of torch's that it had just forked when it was killed holds the pipe for ever.
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        ready = select.select([ours, sys.stdin], [], [], 0 if ended else _LOOK_S)[0]
        if sys.stdin in ready:  # its end: the one that asked is gone
            for pid in machine.family(os.getpid())[1:]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)
            os.killpg(0, signal.SIGKILL)
        piece = os.read(ours, 1 << 16) if ours in ready else b""
        if (ours in ready or ended) and not piece:
            break
        answer += piece
    os.close(ours)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not answer:
        said = "it was killed (out of memory?)" if status < 0 else f"it ended with code {status}"
        return _error(StorageError(said))
    return answer.strip()


def _answer(request: dict[str, Any]) -> bytes:
    """Do what a request asks, and return the answer, or the error, as JSON."""
    try:
        module, _, function = request["do"].rpartition(".")
        found = getattr(import_module(module), function)(request)
        return json.dumps(found).encode()
    except Exception as error:
        return _error(error)


def _error(error: Exception) -> bytes:
    """Return the kind and the text of an error as JSON."""
    kind, text = type(error).__name__, str(error)
    if "\nOriginal Traceback" in text:  # DataLoader tells all that its worker did: keep the end
        text = text.rpartition(f"{kind}: ")[2].strip()
    text = "\n".join(printable(line, 4096) for line in text.splitlines()) or kind
    return json.dumps({"error": text, "kind": kind}).encode()


def probe(request: dict[str, Any]) -> dict[str, Any]:
    """Return the size that images are to be cropped to, by the first ones."""
    fields, storage = request["fields"][:1], _storage(request)
    found = sequence.open(request["path"], fields=fields, storage=storage)
    sides = [image.size for (image,) in found[:8] if image is not None]
    small = sides and max(max(side) for side in sides) < SMALL
    return {"size": min(min(side) for side in sides) if small else CROP}


def written(storage: Storage) -> str:
    """Write options of storage as text, for the process that has to read them."""
    return base64.b64encode(pickle.dumps(storage)).decode()


def _storage(request: dict[str, Any]) -> Storage:
    """Return the options that a Host sends with each request."""
    found: Storage = pickle.loads(base64.b64decode(request["storage"]))
    return found


def _dataset(request: dict[str, Any]) -> ShardDataset:
    """Open the dataset as a row of a bench reads it."""
    from ..dataset.shard_dataset import ShardDataset
    from ..images.transforms import RandomResizedCrop
    from ..native import PerformanceWarning

    warnings.simplefilter("ignore", PerformanceWarning)  # what it costs is measured here
    decodes, raw = request["decodes"], request["raw"]
    records = request["measured_records"]
    reads_all = records == request["records"]
    dataset = ShardDataset(
        request["path"],
        batch_size=request["batch_size"],
        fields=request["fields"],
        decode=("numpy" if raw else "pil") if decodes else None,
        transform=RandomResizedCrop(request["size"], flip=True) if decodes and not raw else None,
        # A buffer that holds all of a part would read it in another way than the whole is read.
        shuffle_buffer=None if reads_all else min(SHUFFLE_BUFFER, records // 4),
        storage=_storage(request),
    )
    return dataset if reads_all else dataset.select(range(records))


@contextlib.contextmanager
def loading(
    dataset: ShardDataset, loader: str, workers: int, threads: int | None = None, **own: Any
) -> Iterator[Any]:
    """Give a loader of a dataset: "DataLoader", with options of its `own`, or "ShardLoader"."""
    from torch.utils.data import DataLoader

    from ..loader.shard_loader import ShardLoader

    if loader == "DataLoader":
        own = {"batch_size": None, "persistent_workers": workers > 0} | own
        yield DataLoader(dataset, num_workers=workers, **own)
    else:
        with ShardLoader(dataset, num_workers=workers, threads=threads) as started:
            yield started


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Run one repeat of a row, in this process."""
    dataset = _dataset(request)
    cold, seconds, limit = request["cold"], request["seconds"], request["limit_s"]
    builders = max(1, request["workers"]) * request["threads"]
    settled = 0.0 if cold else min(WARM_S, seconds / 2)
    # By URL the first batches wait for the windows of all spans, and are no measure of the rest.
    filled = min(_FILLED, request["records"] // 2) if request.get("remote") else 0
    warnings.simplefilter("ignore")  # of torch: more workers than cores, which is the question
    way = request["loader"], request["workers"], request["threads"]
    with loading(dataset, *way) as loader:
        first = start = _figures()
        times = [(time.perf_counter(), 0)]  # after each batch, and images so far
        begun = 0  # batches that do not count
        for images, ends in passes(loader, dataset):
            now = time.perf_counter()
            times.append((now, images))
            done = len(times) - 1 - begun
            if not begun:
                late = now - times[0][0] >= limit / 3
                if done >= builders and now - times[0][0] >= settled and (images >= filled or late):
                    start, begun = _figures(), done
                    times[-1] = (time.perf_counter(), images)
            elif now - times[begun][0] >= seconds and done % builders == 0:
                break
            if (ends and cold) or now - times[0][0] >= limit:
                break
        # A cold pass may be short: then all of it counts, with the start of its workers.
        if len(times) - 1 - begun < (_LEAST if cold else 1):
            start, begun = first, 0
        end = _figures()
    counted = times[begun:]
    (since, before), (until, images) = counted[0], counted[-1]
    wall = until - since
    trainer, cpu, busy, read = end - start
    if cold:  # all reads count: most are made, or announced, before the first batch is there
        read, since = (end - first)[-1], times[0][0]
    figures = {
        "cpu_ms": 1000 * cpu / (images - before),
        "cores_busy": cpu / wall,
        "others_busy": np.maximum(0.0, busy - cpu) / wall,
        "trainer_ms": 1000 * trainer / (len(counted) - 1),
        "trainer_busy": trainer / wall,
        "storage_mb_per_s": read / (until - since) / 1e6,
        "first_batch_s": times[1][0] - times[0][0],
    }
    return {
        "figures": {name: float(one) for name, one in figures.items() if not np.isnan(one)},
        "rates": _rates(counted, builders, request["parts"]),
        "pass_batches": len(dataset),
        "starting": counted[0][1] < filled,
    }


def _figures() -> np.ndarray[Any, np.dtype[np.float64]]:
    """Look at this process and all that it started. NaN: it is not told here.

    CPU seconds of this thread, of these processes, and of all on this machine; bytes that these
    processes had read from storage.
    """
    tree = machine.family(os.getpid())
    cpu_s, read = machine.cpu_seconds(tree), machine.read_bytes(tree)
    return np.array([time.thread_time(), cpu_s, machine.busy_seconds(), read], np.float64)


def passes(loader: Any, dataset: ShardDataset, first: int = 0) -> Iterator[tuple[int, bool]]:
    """Yield after each batch of all epochs: images so far, and True if an epoch ends with it.

    first: the epoch to begin with.
    """
    images = 0
    for epoch in count(first):
        dataset.set_epoch(epoch)
        for number, batch in enumerate(loader, 1):
            images += _touch(batch)
            yield images, number == len(loader)


def _rates(times: Sequence[tuple[float, int]], builders: int, parts: int) -> list[float]:
    """Return images/s of about equal parts of the time, each of equally many batches of every
    builder.
    """
    batches = len(times) - 1
    step = batches // parts // builders * builders
    if not step or parts == 1:
        parts, step = 1, batches
    edges = pairwise(times[: parts * step + 1 : step])
    return [(images - before) / (at - since) for (since, before), (at, images) in edges]


def _touch(batch: Any) -> int:
    """Read a byte of each page of a batch, as its copy to a GPU reads all. Return its rows."""
    import torch

    values = list(batch.values()) if isinstance(batch, dict) else batch
    if not isinstance(values, (list, tuple)):
        values = [values]
    for value in values:
        if isinstance(value, torch.Tensor) and value.numel():
            in_memory_order(value).reshape(-1).view(torch.uint8)[::4096].sum().item()
    return len(values[0])


def in_memory_order(batch: torch.Tensor) -> torch.Tensor:
    """Order dimensions by their strides: a batch is one piece of memory, channels last or not."""
    return batch.permute(sorted(range(batch.dim()), key=batch.stride, reverse=True))
