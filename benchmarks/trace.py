"""What a GPU did, and when: the trace that torch.profiler exports, as intervals of time.

A trace is JSON in Chrome's format. Complete events ("ph": "X") have a category, and `ts` and `dur`
in microseconds. Those of the GPU ("kernel", "gpu_memcpy", "gpu_memset") name their stream in
`args`; copies are called "Memcpy HtoD (Pinned -> Device)". What the program marked by
`record_function` is a "user_annotation" of its thread; "gpu_user_annotation" repeats it.

The stream that steps run on is the one whose kernels took longest. What others ran is the loader's:
casts, and decoding.

Source: output_json.cpp and CuptiActivity.cpp of Kineto; torch/profiler/profiler.py.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NEXT = "next()"  # the mark of the trainer's time for a batch
STEP, COPY, LOADER = "step", "copy to the GPU", "cast, decode"
LANES = (STEP, COPY, LOADER, NEXT)

Intervals = NDArray[np.float64]  # (n, 2): begin and end of each, in us; sorted, and apart
_ON_A_STREAM = ("kernel", "gpu_memset")


@dataclass(frozen=True)
class Trace:
    """Hold the intervals of a trace.

    kernels  of each stream; copies between places on the device are among them
    copies   from the host to the device
    marks    of each name that `record_function` was given
    """

    kernels: dict[int, Intervals]
    copies: Intervals
    marks: dict[str, Intervals]

    @property
    def window(self) -> tuple[float, float]:
        """Return the time from the first batch that was asked for to the last."""
        asked = self.marks[NEXT][:, 0]
        return float(asked[0]), float(asked[-1])

    def lanes(self, window: tuple[float, float]) -> dict[str, Intervals]:
        """Return what the step, the copies, the loader's kernels and the trainer did meanwhile."""
        inside = {stream: clip(found, window) for stream, found in self.kernels.items()}
        step = max(inside, key=lambda stream: seconds(inside[stream]), default=None)
        others = [found for stream, found in inside.items() if stream != step]
        return {
            STEP: union([]) if step is None else inside[step],
            COPY: clip(self.copies, window),
            LOADER: union(others),
            NEXT: clip(self.marks[NEXT], window),
        }


def read(path: str | Path) -> Trace:
    """Read a trace, of torch's `export_chrome_trace`, which compresses if the name ends so."""
    opened = gzip.open if str(path).endswith(".gz") else open
    with opened(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    kernels: dict[int, list[Any]] = {}
    copies, marks = [], dict[str, list[Any]]()
    for event in events:
        if event.get("ph") != "X":
            continue
        kind, begin = event.get("cat"), float(event["ts"])
        interval = (begin, begin + float(event["dur"]))
        if kind == "gpu_memcpy" and "HtoD" in event["name"]:
            copies.append(interval)
        elif kind in _ON_A_STREAM or (kind == "gpu_memcpy" and "DtoD" in event["name"]):
            kernels.setdefault(int(event["args"]["stream"]), []).append(interval)
        elif kind == "user_annotation":
            marks.setdefault(event["name"], []).append(interval)
    return Trace(
        {stream: union([found]) for stream, found in kernels.items()},
        union([copies]),
        {name: np.array(sorted(found)) for name, found in marks.items()},
    )


# --- intervals ------------------------------------------------------------------------------------


def union(parts: Iterable[Any], gap: float = 0.0) -> Intervals:
    """Join intervals that touch, or that are at most `gap` apart."""
    found = np.concatenate([np.empty((0, 2)), *(np.reshape(part, (-1, 2)) for part in parts)])
    found = found[np.argsort(found[:, 0], kind="stable")]
    if not len(found):
        return found
    ends = np.maximum.accumulate(found[:, 1])
    first = np.concatenate([[True], found[1:, 0] > ends[:-1] + gap])
    last = np.concatenate([first[1:], [True]])
    return np.column_stack([found[first, 0], ends[last]])


def clip(intervals: Intervals, window: tuple[float, float]) -> Intervals:
    """Return the part of intervals that lies within the window."""
    found = np.clip(intervals, *window)
    return found[found[:, 0] < found[:, 1]]


def seconds(intervals: Intervals) -> float:
    """Return how long intervals are together, in seconds."""
    return float((intervals[:, 1] - intervals[:, 0]).sum()) / 1e6


def both(one: Intervals, other: Intervals) -> Intervals:
    """Return when one and the other went on."""
    parts = [clip(other, (begin, end)) for begin, end in one]
    return union(parts)


# --- what is said of a trace ----------------------------------------------------------------------


def summary(trace: Trace) -> dict[str, float | None]:
    """Sum up a trace, from the first batch that was asked for to the last.

    gpu_idle  share of the time in which no kernel ran
    overlap   share of the time of copies in which a kernel of the step ran
    Both are None where there was nothing of it: on a CPU.
    """
    window = trace.window
    lanes = trace.lanes(window)
    steps = len(trace.marks[NEXT]) - 1
    whole, copies = (window[1] - window[0]) / 1e6, seconds(lanes[COPY])
    busy = seconds(union([lanes[STEP], lanes[LOADER]]))
    overlap = seconds(both(lanes[COPY], lanes[STEP]))
    return {
        "gpu_idle": 1 - busy / whole if busy else None,
        "overlap": overlap / copies if copies else None,
        "copy_ms": copies / steps * 1e3,
        "loader_ms": seconds(lanes[LOADER]) / steps * 1e3,
        "step_ms": whole / steps * 1e3,
    }


def picture(trace: Trace, steps: int) -> dict[str, Any]:
    """Return what tools/draw_trace.py draws of the last steps: times in ms, from the first one on.

    Gaps that could not be seen are closed.
    """
    asked = trace.marks[NEXT][-steps - 1 :, 0]
    window = float(asked[0]), float(asked[-1])
    gap = (window[1] - window[0]) / 1000
    return {
        "ms": (window[1] - window[0]) / 1e3,
        "asked": np.round((asked - window[0]) / 1e3, 4).tolist(),
        "lanes": {
            name: {
                "share": seconds(found) * 1e6 / (window[1] - window[0]),
                "intervals": np.round((union([found], gap) - window[0]) / 1e3, 4).tolist(),
            }
            for name, found in trace.lanes(window).items()
        },
    }


def record(ask: Callable[[], Any], step: Callable[[Any], None], steps: int, device: str) -> Trace:
    """Train so many steps under torch.profiler, behind some in which it warms up."""
    from torch import profiler

    kinds = [profiler.ProfilerActivity.CPU]
    if device == "cuda":
        kinds.append(profiler.ProfilerActivity.CUDA)
    warm_up = 3
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*clears events at the end of each cycle")
        path = f"{folder}/trace.json"
        with profiler.profile(
            activities=kinds,
            schedule=profiler.schedule(wait=0, warmup=warm_up, active=steps + 1, repeat=1),
            on_trace_ready=lambda made: made.export_chrome_trace(path),
        ) as running:
            for _ in range(warm_up + steps + 1):
                with profiler.record_function(NEXT):
                    batch = ask()
                step(batch)
                running.step()
        return read(path)
