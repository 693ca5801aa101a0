"""The benchmarks read traces of torch.profiler: hand-made ones with known answers, a real one."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.trees import ROOT

from benchmarks import trace


def event(cat: str, name: str, begin: float, end: float, stream: int = 7) -> dict[str, Any]:
    """An event as Kineto writes it."""
    args = {"stream": stream, "device": 0} if "gpu" in cat or cat == "kernel" else {}
    times = {"ts": begin, "dur": end - begin}
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "args": args} | times


def asked(*begins: float) -> list[dict[str, Any]]:
    """The marks of a trainer that takes 2 us for each batch."""
    return [event("user_annotation", trace.NEXT, at, at + 2, stream=1) for at in begins]


def read(path: Path, events: list[dict[str, Any]]) -> trace.Trace:
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return trace.read(path)


def two_steps(tmp_path: Path) -> trace.Trace:
    """200 us: kernels of the step for 150, two copies of 40, of which 50 lie under them."""
    return read(
        tmp_path / "trace.json",
        [
            {"ph": "M", "name": "process_name", "ts": 0, "pid": 0, "args": {"name": "python"}},
            *asked(1000, 1100, 1200),
            event("kernel", "before", 900, 1010),  # 10 are within
            event("kernel", "conv", 1010, 1080),
            event("kernel", "conv", 1040, 1060),  # at the same time, on the same stream
            event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 1120, 1150),
            event("kernel", "conv", 1150, 1190),
            event("kernel", "after", 1210, 1300),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1050, 1090, stream=20),
            event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 1170, 1210, stream=20),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 1090, 1120, stream=7),
            event("kernel", "cast", 1090, 1100, stream=20),
            event("gpu_user_annotation", trace.NEXT, 1000, 1200),
            event("cpu_op", "aten::conv2d", 1000, 1200, stream=1),
        ],
    )


def test_busy_time_idle_time_and_overlap_are_those_of_the_window(tmp_path: Path) -> None:
    found = trace.summary(two_steps(tmp_path))
    # Busy: 1000-1080, 1090-1100, 1120-1190. Copies within: 1050-1090 and 1170-1200, 70 in all.
    assert found["gpu_idle"] == pytest.approx(1 - 160 / 200)
    assert found["overlap"] == pytest.approx((30 + 20) / 70)
    assert found["copy_ms"] == pytest.approx(0.035)
    assert found["loader_ms"] == pytest.approx(0.005)
    assert found["step_ms"] == pytest.approx(0.1)


def test_a_copy_beside_the_step_overlaps_and_one_between_steps_does_not(tmp_path: Path) -> None:
    step = [event("kernel", "conv", at, at + 80) for at in (0, 100)]
    for begin, wanted in ((10, 1.0), (80, 0.0), (70, 0.5)):
        copy = event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", begin, begin + 20, stream=9)
        found = read(tmp_path / "trace.json", [*asked(0, 100, 200), *step, copy])
        assert trace.summary(found)["overlap"] == pytest.approx(wanted), begin


def test_unions_differ_from_sums() -> None:
    found = trace.union([[(5, 9), (0, 3)], [(2, 4), (9, 10)]])
    assert found.tolist() == [[0, 4], [5, 10]]
    assert trace.union([found], gap=1).tolist() == [[0, 10]]
    assert trace.union([]).shape == (0, 2)
    rng = np.random.default_rng(0)
    for _ in range(50):
        begins = rng.integers(0, 90, (2, 20))
        one, other = (np.stack([at, at + rng.integers(1, 9, 20)], 1) for at in begins)
        covered = [np.zeros(100, bool), np.zeros(100, bool)]
        for which, some in zip(covered, (one, other), strict=True):
            for begin, end in some:
                which[begin:end] = True
        one, other = trace.union([one]), trace.union([other])
        assert trace.seconds(one) * 1e6 == pytest.approx(covered[0].sum())
        assert trace.seconds(trace.both(one, other)) * 1e6 == pytest.approx(
            (covered[0] & covered[1]).sum()
        )


def test_a_compressed_trace_is_read(tmp_path: Path) -> None:
    two_steps(tmp_path)
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress((tmp_path / "trace.json").read_bytes()))
    assert trace.summary(trace.read(packed)) == trace.summary(two_steps(tmp_path))


def test_the_picture_has_a_bar_for_each_interval(tmp_path: Path) -> None:
    made = trace.picture(two_steps(tmp_path), 2)
    assert made["ms"] == 0.2 and made["asked"] == [0, 0.1, 0.2]
    assert made["lanes"][trace.STEP]["share"] == pytest.approx(0.75)
    assert made["lanes"][trace.COPY]["intervals"] == [[0.05, 0.09], [0.17, 0.2]]
    (tmp_path / "result.json").write_text(json.dumps({"raw": {"lanes": {"a < b": made}}}))
    drawn = subprocess.run(
        [sys.executable, ROOT / "tools" / "draw_trace.py", tmp_path / "result.json"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    bars = [
        float(one.get("width", ""))
        for one in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}rect")
        if one.get("fill") != "white"
    ]
    wanted = [e - b for lane in made["lanes"].values() for b, e in lane["intervals"]]
    whole = max(bars) / max(wanted)
    assert bars == pytest.approx([max(1.2, length * whole) for length in wanted], abs=0.01)


def test_a_trace_of_a_cpu_has_the_steps_that_were_asked_for() -> None:
    taken: list[int] = []
    weights = torch.ones(8, 8)

    def step(batch: torch.Tensor) -> None:
        weights @ batch

    def ask() -> torch.Tensor:
        taken.append(1)
        return torch.ones(8, 8)

    found = trace.record(ask, step, 4, "cpu")
    assert len(taken) == 8 and len(found.marks[trace.NEXT]) == 5
    said = trace.summary(found)
    assert said["gpu_idle"] is None and said["overlap"] is None and said["copy_ms"] == 0
    assert trace.picture(found, 3)["lanes"][trace.NEXT]["share"] > 0
