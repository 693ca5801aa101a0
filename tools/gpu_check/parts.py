"""The parts of a check: what each runs, its limit, and what its result says."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import write_json

from . import limited
from .environment import ROOT, WORK, commit

VERSION = 1  # of the results; more keys may come without another version
NOT_RUN, REHEARSED = "not run", "rehearsed"
PASSED, FELL_SHORT, FAILED, OVER = "passed", "fell short", "failed", "over its limit"
LEAST_S = 15.0  # a part is not begun with less time than this
MARGIN_S = 10.0  # of a part's time: to start Python, to end processes, and to store the result
NO_GPU = re.compile(r"\bneeds? .*\bGPU\b")  # in the reason of a skipped test


class Options(NamedTuple):
    """Hold what all parts are given.

    data: the folder of the archives of photographs; None: the benchmarks' own. out: the folder of
    the results. rehearse: on the CPU, with tiny data. quick: on the GPU, but short. within: the
    seconds in which a part has to end by itself.
    """

    data: Path | None
    out: Path
    rehearse: bool
    quick: bool
    within: float = 0.0


class Part(NamedTuple):
    """Hold one part.

    weight: its share of a call's time, by about what it took on an H100, in seconds. Those that
    cannot stop by themselves, or that say little when they do, have more: what they leave is for
    the parts behind them.
    command: makes its command line; the program writes the file that it is given.
    judge: makes status, reason and result of that file.
    """

    about: str
    limit_s: float
    weight: float
    command: Callable[[Options, Path], list[str]]
    judge: Callable[[Path, bool], tuple[str, str, Any]]


# --- what they run --------------------------------------------------------------------------------


def _probe(options: Options, out: Path) -> list[str]:
    words = [sys.executable, "-m", "tools.gpu_check.probe", "--out", str(out)]
    return words + ["--rehearse"] * options.rehearse + ["--within", f"{options.within:.0f}"]


def _tests(options: Options, out: Path) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5"]
    # Warnings are errors in our tests, but those about the future are about the machine's torch.
    command += ["-W", "default::DeprecationWarning", "-W", "default::FutureWarning"]
    files = [str(path.relative_to(ROOT)) for path in device_tests(ROOT / "tests")]
    return [*command, f"--junitxml={out}", *files]


def device_tests(folder: Path) -> list[Path]:
    """Return the files of tests that need a GPU: some of their tests are skipped without one."""
    needs = re.compile(r"not torch\.cuda\.is_available\(\)|^from support\.gpu import", re.M)
    every = sorted(folder.glob("*/test_*.py"))  # and not those of an environment that is in there
    return [
        one for one in every if one.match("loader/test_device*") or needs.search(one.read_text())
    ]


def _benchmark(*words: str, gpu: bool = True) -> Callable[[Options, Path], list[str]]:
    """Return the command of a benchmark. gpu: whether it uses one, and so can be rehearsed."""

    def command(options: Options, out: Path) -> list[str]:
        scratch = ("--scratch", os.path.relpath(WORK / "scratch", ROOT))
        line = [sys.executable, "-m", "benchmarks", *words, "--out", str(out), *scratch]
        line += ["--data", str(options.data)] if options.data else []
        line += ["--within", f"{options.within:.0f}"]
        if options.rehearse and gpu:
            return [*line, "--device", "cpu"]
        return line + ["--quick"] * (options.quick or options.rehearse)

    return command


# --- what came of it ------------------------------------------------------------------------------


def _judge_probe(out: Path, rehearse: bool) -> tuple[str, str, Any]:
    found = json.loads(out.read_text())
    failed = found["failed"]
    return FAILED if failed else PASSED, "; ".join(failed), found


def _judge_tests(out: Path, rehearse: bool) -> tuple[str, str, Any]:
    cases = ElementTree.parse(out).getroot().iter("testcase")
    found: dict[str, list[Any]] = {"passed": [], "failed": [], "skipped": []}
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        bad = [*case.findall("failure"), *case.findall("error")]
        skipped = case.find("skipped")
        if bad:
            found["failed"].append([name, (bad[0].get("message") or "")[:300]])
        elif skipped is not None:
            found["skipped"].append([name, skipped.get("message") or ""])
        else:
            found["passed"].append(name)
    for_gpu = [one for one in found["skipped"] if NO_GPU.search(one[1])]
    counts = {name: len(tests) for name, tests in found.items()}
    result = {"counts": counts, "failed": found["failed"], "skipped": found["skipped"]}
    said = ", ".join(f"{count} {name}" for name, count in counts.items())
    if found["failed"]:
        return FAILED, said, result
    if for_gpu and not rehearse:
        return FAILED, f"{said}; {len(for_gpu)} skipped as if there was no GPU", result
    return (PASSED if found["passed"] else FAILED), said, result


def _judge_benchmark(out: Path, rehearse: bool) -> tuple[str, str, Any]:
    found = json.loads(out.read_text())
    verdicts = [one["met"] for one in found["targets"]]
    said = f"{verdicts.count(True)} of {len(verdicts)} targets met"
    if None in verdicts:
        said += f", {verdicts.count(None)} not measured"
    return FELL_SHORT if False in verdicts else PASSED, said, found


PARTS = {
    "probe": Part(
        *("the machine, the decoders, and which JPEGs its hardware takes", 240, 95),
        *(_probe, _judge_probe),
    ),
    "tests": Part("the tests that need a GPU", 400, 95, _tests, _judge_tests),
    "transfers": Part(
        "copies to the GPU, while it computes",
        500,
        90,
        _benchmark("gpu", "--only", "transfers"),
        _judge_benchmark,
    ),
    "decode": Part("decoding on the GPU", 500, 120, _benchmark("gpu_decode"), _judge_benchmark),
    "train": Part(
        "training ResNets: does the GPU wait for data?",
        530,
        190,
        _benchmark("gpu", "--only", "training"),
        _judge_benchmark,
    ),
    "cores": Part(
        "loading with 1 to 16 workers", 530, 140, _benchmark("cores", gpu=False), _judge_benchmark
    ),
}


# --- running them ---------------------------------------------------------------------------------


def run(
    name: str, part: Part, options: Options, env: dict[str, str], log: Path, left_s: float
) -> dict[str, Any]:
    """Run a part, and return its result, which is stored as results/NAME.json.

    left_s: the time that it may take. A part without time is not begun.
    """
    results = options.out / "results"
    results.mkdir(parents=True, exist_ok=True)
    limit = min(part.limit_s, left_s)
    options = options._replace(within=max(0.0, limit - MARGIN_S))
    made = WORK / f"{name}.out"
    made.unlink(missing_ok=True)
    command = part.command(options, Path(os.path.relpath(made, ROOT)))  # paths of no machine
    found: dict[str, Any] = {
        "gpu_check": VERSION,
        "part": name,
        "about": part.about,
        "rehearsal": options.rehearse,
        "quick": options.quick,
        "limit_s": limit,
        "command": [word.replace(sys.executable, "python") for word in command],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
    }
    if limit < LEAST_S:
        found |= {"status": NOT_RUN, "seconds": 0, "result": None}
        found["why"] = "the time of this call (--within) was over: run it in another call"
        return store(results / f"{name}.json", found)
    begun = {"status": NOT_RUN, "why": "the call was ended while it ran", "seconds": 0}
    store(results / f"{name}.json", {**found, **begun, "result": None})
    # The plugins of a machine's own pytest are not ours: some warn, and warnings are errors.
    env = env | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ended = limited.run(command, limit, log, env=env, cwd=ROOT)
    found |= {"seconds": round(ended.seconds, 1), "exit_code": ended.code, "tail": ended.tail}
    found |= outcome(part, ended, made, options.rehearse)
    shutil.rmtree(WORK / "scratch", ignore_errors=True)  # of a benchmark that was ended
    return store(results / f"{name}.json", found)


def outcome(part: Part, ended: limited.Ended, made: Path, rehearse: bool) -> dict[str, Any]:
    """Judge how a part ended, and by what it wrote, if anything."""
    try:
        status, why, result = part.judge(made, rehearse)
    except (OSError, ValueError, KeyError, ElementTree.ParseError) as error:
        status, why, result = FAILED, f"its result cannot be read: {error}", None
    if ended.code is None:
        status, why = OVER, ended.why
    elif result is None and ended.why:
        lines = [line for line in ended.tail.splitlines() if line.strip()]
        why = f"{ended.why}: {lines[-1][:300]}" if lines else ended.why
    elif ended.why and status == PASSED:
        status, why = FAILED, ended.why
    elif rehearse and status in (PASSED, FELL_SHORT):
        status = REHEARSED
    return {"status": status, "why": why, "result": result}


def store(path: Path, found: dict[str, Any]) -> dict[str, Any]:
    write_json(path, found)
    return found
