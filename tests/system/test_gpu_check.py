"""tools/gpu-check: what it collects, how its parts end, what the page says; a rehearsal."""

from __future__ import annotations

import json
import math
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import LIMIT_S, gpu, warm_python
from support.trees import ROOT

from benchmarks.harness import Deadline, EntryProcess
from tools.gpu_check import __main__, environment, limited, page, parts, probe

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NOT TESTED HERE: it needs Linux")
needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def gpu_check(*words: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command by this Python, as a user whose python3 has torch."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        [ROOT / "tools" / "gpu-check", *map(str, words)],
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": path} | environ,
    )


def warm_path(folder: Path) -> str:
    """Return a PATH whose python3 is a fork of a process that has torch: see warm_python."""
    (folder / "bin").mkdir()
    (folder / "bin" / "python3").symlink_to(warm_python.executable(folder / "bin"))
    return os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])


# --- the command ----------------------------------------------------------------------------------


@needs_cpu
def test_without_a_gpu_one_line_says_what_it_needs(tmp_path: Path) -> None:
    done = gpu_check("--out", tmp_path, PATH=warm_path(tmp_path))
    assert done.returncode == 1 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert "needs an NVIDIA GPU" in line and "--rehearse" in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "there is no part 'nothing'; there are probe, tests"),
        (["probe", "--wheels", "nowhere"], "nowhere has no folder wheels"),
        (["collect", "x", "--limit", "40"], "expected a size like 40MiB"),
        (["collect", "x", "--python", "3"], "expected a version like 3.12"),
        (["collect", "x", "--without", "torch"], "--without torch: there are lmdb"),
        (["collect", "x", "--torch", "newest"], "expected a version like 2.11.0"),
    ],
)
def test_what_is_asked_wrongly_is_told(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert __main__.main(words) == 1
    assert said in capsys.readouterr().err


@needs_cpu
@pytest.mark.parametrize(
    ("chosen", "passed", "skipped"),
    [("-k test_device_streams", 5, 10), pytest.param("", 40, 10, marks=pytest.mark.slow)],
    ids=["one file", "all"],  # the suite has run them all, so one file is enough
)
def test_a_rehearsal_runs_the_device_tests_and_writes_a_page(
    tmp_path: Path, chosen: str, passed: int, skipped: int
) -> None:
    environ = {"PYTEST_ADDOPTS": chosen, "PATH": warm_path(tmp_path)}
    done = gpu_check("tests", "--rehearse", "--out", tmp_path, **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "REHEARSAL" in done.stdout
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    assert found["rehearsal"] and found["parts"]["tests"]["status"] == "rehearsed"
    counts = found["parts"]["tests"]["result"]["counts"]
    assert counts["passed"] > passed and counts["skipped"] > skipped and not counts["failed"]
    assert found["parts"]["train"]["status"] == "not run"
    text = (tmp_path / "gpu-check.md").read_text()
    assert "**REHEARSAL" in text and "NOT TESTED HERE: copies to CUDA" in text


@pytest.mark.slow
@needs_cpu
def test_a_rehearsal_of_the_probe_answers_what_a_cpu_can(tmp_path: Path) -> None:
    done = gpu_check("probe", "--rehearse", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu-check.json").read_text())["parts"]["probe"]["result"]
    assert found["facts"]["torch"] == torch.__version__ and found["facts"]["gpu"] == "none"
    assert set(found["about"]) == set(probe.ENGINES) and all(found["about"].values())
    assert len(found["formulas"]) == 5 and found["formulas"][0]["unequal_float32"] == 0
    text = (tmp_path / "gpu-check.md").read_text()
    assert "Does the JPEG hardware take restart markers? Not asked: this is a rehearsal." in text


# --- parts ----------------------------------------------------------------------------------------


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> parts.Options:
    (tmp_path / "work").mkdir()
    monkeypatch.setattr(parts, "WORK", tmp_path / "work")
    monkeypatch.setattr(parts, "LEAST_S", 0.1)
    return parts.Options(None, tmp_path / "out", rehearse=False, quick=False)


def part(code: str, limit_s: float = LIMIT_S, judge: Any = None) -> parts.Part:
    """A part whose program is this code; it is given the file to write."""

    def command(options: parts.Options, out: Path) -> list[str]:
        return [sys.executable, "-c", code, str(out)]

    def passed(out: Path, rehearse: bool) -> tuple[str, str, Any]:
        return parts.PASSED, "well", json.loads(out.read_text())

    return parts.Part("a test", limit_s, 1, command, judge or passed)


WRITES = "import sys; open(sys.argv[1], 'w').write('[1]')\n"


def run(one: parts.Part, options: parts.Options, left_s: float = 1e9) -> dict[str, Any]:
    options.out.mkdir(exist_ok=True)
    log = options.out / "gpu-check.log"
    return parts.run("probe", one, options, dict(os.environ), log, left_s)


def test_what_a_part_wrote_is_its_result(options: parts.Options) -> None:
    found = run(part(WRITES), options)
    assert (found["status"], found["result"], found["exit_code"]) == ("passed", [1], 0)
    assert json.loads((options.out / "results" / "probe.json").read_text()) == found
    rehearsed = run(part(WRITES), options._replace(rehearse=True))
    assert rehearsed["status"] == "rehearsed" and rehearsed["rehearsal"]


def test_a_part_that_fails_says_why(options: parts.Options) -> None:
    found = run(part("raise SystemExit('there is no such thing')"), options)
    assert found["status"] == "failed" and found["why"] == "exit code 1: there is no such thing"
    assert run(part(WRITES + "raise SystemExit(3)"), options)["status"] == "failed"
    silent = run(part("pass"), options)
    assert silent["status"] == "failed" and "its result cannot be read" in silent["why"]
    killed = run(part("import os; os.kill(os.getpid(), 11)"), options)
    assert "signal 11 (SIGSEGV)" in killed["why"]


def test_a_part_over_its_limit_is_ended_with_all_that_it_started(
    options: parts.Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Begun(subprocess.Popen[bytes]):
        """Its limit begins when it has started its child."""

        def wait(self, timeout: float | None = None) -> int:
            while timeout == 0.5 and not (pid.exists() and pid.read_text()):
                assert self.poll() is None
            return super().wait(timeout)

    pid = tmp_path / "pid"
    monkeypatch.setattr(subprocess, "Popen", Begun)
    # A child in a session of its own, whose parent has gone when the part is ended.
    code = f"""
import subprocess, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
open({str(pid)!r}, "w").write(str(child.pid))
while True:
    time.sleep(0.1)  # an interrupt just before a sleep is seen after it
"""
    found = run(part(code, limit_s=0.5), options)
    assert found["status"] == "over its limit" and found["exit_code"] is None
    assert "it ran past its limit" in found["why"]
    assert "KeyboardInterrupt" in found["tail"]  # where it was
    stat = Path(f"/proc/{pid.read_text()}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@needs_cpu
def test_who_ends_the_call_ends_its_part(tmp_path: Path) -> None:
    code = f"""
import os, sys
from pathlib import Path
from tools.gpu_check import __main__, environment, parts
environment.WORK = parts.WORK = Path({str(tmp_path)!r})
line = "import os, sys, time; print(os.getpid(), flush=True)\\nwhile True: time.sleep(0.1)"
command = lambda options, out: [sys.executable, "-c", line]
parts.PARTS["probe"] = parts.PARTS["probe"]._replace(command=command)
environment.prepare = lambda carried, log: (dict(os.environ), {{"core": {{"what": ""}}}})
__main__.main(["probe", "--rehearse", "--out", {str(tmp_path)!r}])
"""
    started = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    log, result = tmp_path / "gpu-check.log", tmp_path / "results" / "probe.json"
    assert started.stdout
    while not (log.exists() and log.read_text().strip()):
        assert started.poll() is None
    handle = os.pidfd_open(int(log.read_text()))
    started.terminate()
    assert started.wait(LIMIT_S) and started.stdout.read()
    started.stdout.close()
    assert select.select([handle], [], [], LIMIT_S)[0]  # it has ended
    os.close(handle)
    assert json.loads(result.read_text())["why"] == "the call was ended while it ran"


@needs_cpu
def test_a_program_does_not_outlive_a_call_that_is_ended_while_it_starts(tmp_path: Path) -> None:
    code = f"""
import os, signal, subprocess, sys
from pathlib import Path
from tools.gpu_check import limited
class Popen(subprocess.Popen):
    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        print(self.pid, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
subprocess.Popen = Popen
signal.signal(signal.SIGTERM, signal.default_int_handler)
line = [sys.executable, "-c", "import time; time.sleep({LIMIT_S})"]
limited.run(line, {LIMIT_S}, Path({str(tmp_path / "log")!r}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert "KeyboardInterrupt" in done.stderr
    assert not Path(f"/proc/{int(done.stdout)}").exists()


def test_a_part_without_time_is_not_begun(options: parts.Options) -> None:
    found = run(part("raise SystemExit('begun')"), options, left_s=0)
    assert found["status"] == "not run" and "--within" in found["why"]


def test_a_part_is_told_its_time(tmp_path: Path) -> None:
    every = parts.Options(None, tmp_path, rehearse=False, quick=False)
    for name in ("probe", "transfers", "decode", "train", "cores"):
        command = parts.PARTS[name].command
        assert command(every._replace(within=81.6), tmp_path)[-2:] == ["--within", "82"]
    assert "--within" not in parts.PARTS["tests"].command(every, tmp_path)


@pytest.mark.parametrize(("left_s", "told"), [(100.0, 90.0), (math.inf, 990.0), (2.0, 0.0)])
def test_a_part_has_to_end_by_itself_before_it_is_ended(
    options: parts.Options, monkeypatch: pytest.MonkeyPatch, left_s: float, told: float
) -> None:
    given: list[float] = []

    def command(options: parts.Options, out: Path) -> list[str]:
        given.append(options.within)
        return [sys.executable, "-c", WRITES, str(out)]

    assert run(part("", 1000)._replace(command=command), options, left_s)["status"] == "passed"
    assert given == [told]


@needs_cpu
def test_each_part_gets_its_share_and_what_others_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, given = 0.0, {}
    takes = {"probe": 10.0, "tests": 200.0, "transfers": 5.0, "train": 5.0}

    def part(name: str, *rest: Any) -> dict[str, Any]:
        nonlocal now
        given[name] = rest[-1]
        now += takes[name]
        return {"status": "passed", "seconds": 1, "why": ""}

    def prepare(*rest: Any) -> tuple[dict[str, str], dict[str, Any]]:
        nonlocal now
        now += 35
        return {}, {"core": {"what": ""}}

    monkeypatch.setattr(__main__, "Deadline", lambda within: Deadline(within, lambda: now))
    monkeypatch.setattr(__main__, "ENDING_S", 15)
    monkeypatch.setattr(environment, "WORK", tmp_path)
    monkeypatch.setattr(page, "write", lambda out: None)
    monkeypatch.setattr(environment, "prepare", prepare)
    monkeypatch.setattr(parts, "run", part)
    weights = {"probe": 1, "tests": 1, "transfers": 2, "train": 4}
    for name, weight in weights.items():
        monkeypatch.setitem(parts.PARTS, name, parts.PARTS[name]._replace(weight=weight))
    words = [*takes, "--rehearse", "--within", "450", "--out", str(tmp_path)]
    assert __main__.main(words) == 0
    # 450 - 15 to end - 35 to set up = 400 of 8 shares; 390 of 7; 190 of 6; the rest.
    wanted = {"probe": 50, "tests": 390 / 7, "transfers": 190 / 3, "train": 185}
    assert given == pytest.approx(wanted)
    assert __main__.main(["probe", "--rehearse", "--out", str(tmp_path)]) == 0
    assert given["probe"] == math.inf


def test_two_calls_of_380_seconds_have_time_for_every_part() -> None:
    """Even if each takes all of its share: by what they took, or their first rows, on an H100."""
    took = {"probe": 70, "tests": 65, "transfers": 60, "decode": 85, "train": 150, "cores": 100}
    now = [0.0]
    for names in (["probe", "tests", "transfers", "decode"], ["train", "cores"]):
        deadline = Deadline(380 - __main__.ENDING_S - 25, lambda: now[0])  # 25: to set up
        for name, its in deadline.shares({name: parts.PARTS[name].weight for name in names}):
            assert its.left() - parts.MARGIN_S >= took[name], name
            now[0] += its.left()


KEPT = """
import sys
from pathlib import Path
from benchmarks.harness import Deadline, Result, interleave
out = Path(sys.argv[1])
result = Result("cores", ["python"], True, False, Deadline(1e6), (out, out.parent))

def report(measured):
    result.table("rows", measured, {"x": "x"})
    result.left_out("rows", [name for name in "abc" if name not in measured])
    result.target("c", None, 1.0)

def third():
    print("at the third", flush=True)
    sys.stdin.read()

ways = {"a": lambda: {"x": 1}, "b": lambda: {"x": 2}, "c": third}
interleave(ways, 1, result.deadline, lambda measured: result.keep(lambda: report(measured)))
"""


def test_what_a_benchmark_had_measured_is_kept_when_it_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "cores.out"
    started = subprocess.Popen(
        [sys.executable, "-c", KEPT, out], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert started.stdin and started.stdout
    assert started.stdout.readline() == b"at the third\n"
    started.kill()
    started.communicate()
    assert [path.name for path in tmp_path.iterdir()] == ["cores.out"]
    ended = limited.Ended(None, 99.0, "")
    found = parts.outcome(parts.PARTS["cores"], ended, out, False)
    assert found["status"] == "over its limit" and "it ran past its limit" in found["why"]
    assert [row["name"] for row in found["result"]["tables"][0]["rows"]] == ["a", "b"]
    text = "\n".join(page._part("cores", stored("cores", **found)))
    assert "| a | 1 |" in text and "the time was over before c had a round" in text
    assert "not measured" in text


def test_tests_that_are_interrupted_tell_what_ran(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import os, signal\ndef test_a(): pass\n"
        "def test_b(): os.kill(os.getpid(), signal.SIGINT)\ndef test_c(): pass\n"
    )
    out = tmp_path / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={out}"]
    subprocess.run([*command, "test_it.py"], cwd=tmp_path, capture_output=True)
    found = parts.outcome(parts.PARTS["tests"], limited.Ended(None, 9.0, ""), out, False)
    assert found["status"] == "over its limit"
    assert 1 <= found["result"]["counts"]["passed"] <= 2  # and the one that it was at


def test_tests_that_are_skipped_for_lack_of_a_gpu_have_not_passed(tmp_path: Path) -> None:
    out = tmp_path / "junit.xml"
    skipped = '<testcase classname="a" name="c"><skipped message="needs a GPU"/></testcase>'
    case = '<testcase classname="a" name="b"/>'
    out.write_text(f"<testsuites><testsuite>{case}{skipped}</testsuite></testsuites>")
    judge = parts.PARTS["tests"].judge
    status, why, _ = judge(out, False)
    assert status == "failed" and "1 skipped as if there was no GPU" in why
    assert judge(out, True)[0] == "passed"
    other = skipped.replace("needs a GPU", "there is a GPU")
    out.write_text(f"<testsuites><testsuite>{case}{other}</testsuite></testsuites>")
    assert judge(out, False)[:2] == ("passed", "1 passed, 0 failed, 1 skipped")
    lacking = gpu.gpu.mark.kwargs["reason"]  # as our tests say it
    out.write_text(out.read_text().replace("there is a GPU", lacking))
    assert judge(out, False)[0] == "failed"
    out.write_text(f"<testsuites><testsuite>{case}</testsuite></testsuites>")
    assert judge(out, False)[:2] == ("passed", "1 passed, 0 failed, 0 skipped")
    bad = '<testcase classname="a" name="d"><failure message="x != y"/></testcase>'
    out.write_text(f"<testsuites><testsuite>{case}{bad}</testsuite></testsuites>")
    assert judge(out, True)[0] == "failed"


def test_a_benchmark_that_misses_a_target_fell_short(tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    judge = parts.PARTS["transfers"].judge
    out.write_text(
        json.dumps({"targets": [{"what": "a", "met": True}, {"what": "b", "met": None}]})
    )
    assert judge(out, False)[:2] == ("passed", "1 of 2 targets met, 1 not measured")
    out.write_text(json.dumps({"targets": [{"what": "a", "met": False}]}))
    assert judge(out, False)[:2] == ("fell short", "0 of 1 targets met")


def test_the_processes_of_a_benchmark_find_what_was_installed_for_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    shutil.copy(ROOT / "benchmarks" / "entry_process.py", tmp_path / "benchmarks")
    look = (
        "import gpu_check_extra\ndef prepare():\n    return lambda: {'is': gpu_check_extra.value}\n"
    )
    (tmp_path / "benchmarks" / "look.py").write_text(look)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "gpu_check_extra.py").write_text("value = 7\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    with EntryProcess("look:prepare", python_path=tmp_path) as process:
        process.ready()
        assert process.round() == {"is": 7}


def test_the_device_tests_are_found() -> None:
    found = {path.relative_to(ROOT).as_posix() for path in parts.device_tests(ROOT / "tests")}
    assert {"tests/loader/test_device.py", "tests/loader/test_device_loaders.py"} <= found
    # The first is skipped where there is a GPU; the second is this one.
    assert not {"tests/system/test_benchmarks.py", "tests/system/test_gpu_check.py"} & found


# --- the page -------------------------------------------------------------------------------------


def stored(name: str, **facts: Any) -> dict[str, Any]:
    return {
        **{"gpu_check": 1, "part": name, "status": "passed", "why": "", "seconds": 3, "limit_s": 9},
        **{"rehearsal": False, "commit": "abc", "command": ["python"], "tail": "", "time": "now"},
        **{"result": None, **facts},
    }


def test_results_of_two_calls_are_merged(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    parts.store(results / "train.json", stored("train", status="over its limit", why="ended | x"))
    page.write(tmp_path)
    counts = {"passed": 2, "failed": 0, "skipped": 0}
    result = {"counts": counts, "failed": [], "skipped": []}
    parts.store(results / "tests.json", stored("tests", result=result, commit="def"))
    page.write(tmp_path)
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    assert list(found["parts"]) == list(parts.PARTS) and not found["rehearsal"]
    statuses = {name: one["status"] for name, one in found["parts"].items()}
    assert statuses["train"] == "over its limit" and statuses["tests"] == "passed"
    assert statuses["cores"] == "not run"
    text = (tmp_path / "gpu-check.md").read_text()
    assert "**over its limit** | ended \\| x |" in text and "2 passed" in text
    assert "of different commits: abc, def" in text and "REHEARSAL" not in text
    parts.store(results / "cores.json", stored("cores", rehearsal=True))
    page.write(tmp_path)
    text = (tmp_path / "gpu-check.md").read_text()
    assert "Some parts are a rehearsal" in text and "## cores (REHEARSAL)" in text


def test_the_page_answers_whether_the_hardware_takes_restart_markers() -> None:
    def said(*decodes: bool) -> str:
        looked = [
            {"engine": "nvJPEG hardware", "kind": f"restart {i}", "decodes": one}
            for i, one in enumerate(decodes)
        ]
        found = {"device": "cuda", "facts": {}, "about": {}, "engines": looked, "formulas": []}
        return "\n".join(page.probe(found))

    assert "nvJPEG hardware: **yes** (2 of 2 kinds)" in said(True, True)
    assert "**in part** (1 of 2 kinds)" in said(True, False)
    assert "**no** (0 of 1 kinds)" in said(False)
    assert "no decoder of the hardware started here" in said()
