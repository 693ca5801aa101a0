"""tools/gpu-check: what it collects, how its parts end, what the page says; a rehearsal."""

from __future__ import annotations

import io
import json
import math
import os
import re
import select
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import LIMIT_S, gpu

from benchmarks.data import CIFAR, PHOTOS, Data
from benchmarks.harness import Deadline, EntryProcess
from shardio.images import jpeg_tiles
from tools.gpu_check import (
    __main__,
    collect,
    engines,
    environment,
    kinds,
    limited,
    nvjpeg,
    page,
    parts,
    probe,
)

ROOT = Path(__file__).resolve().parent.parent.parent
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


# --- the command ----------------------------------------------------------------------------------


@needs_cpu
def test_without_a_gpu_one_line_says_what_it_needs(tmp_path: Path) -> None:
    done = gpu_check("--out", tmp_path)
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
def test_a_rehearsal_runs_the_device_tests_and_writes_a_page(tmp_path: Path) -> None:
    done = gpu_check("tests", "--rehearse", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "REHEARSAL" in done.stdout
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    assert found["rehearsal"] and found["parts"]["tests"]["status"] == "rehearsed"
    counts = found["parts"]["tests"]["result"]["counts"]
    assert counts["passed"] > 40 and counts["skipped"] > 10 and not counts["failed"]
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


# --- the probe ------------------------------------------------------------------------------------

STUB = r"""
#include <stddef.h>
#include <string.h>
#include <stdlib.h>
/* As nvjpeg.h has them; "decodes" to the width, the height and the last byte but two of a file. */
typedef struct { unsigned char *channel[4]; size_t pitch[4]; } Image;
static unsigned width, height; static int batch;
int nvjpegGetProperty(int kind, int *value) { *value = kind + 7; return 0; }
int nvjpegCreateEx(int backend, void *a, void *b, unsigned flags, void **handle) {
    if (backend != 3) return 7;
    *handle = (void *)11; return a || b || flags; }
int nvjpegGetHardwareDecoderInfo(void *h, unsigned *engines, unsigned *cores) {
    *engines = 1; *cores = 2; return h != (void *)11; }
int nvjpegJpegStateCreate(void *h, void **state) { *state = (void *)12; return h != (void *)11; }
int nvjpegJpegStreamCreate(void *h, void **stream) { *stream = (void *)13; return h != (void *)11; }
int nvjpegJpegStreamParse(void *h, const unsigned char *data, size_t size, int a, int b, void *s) {
    if (h != (void *)11 || s != (void *)13 || a || b) return 2;
    for (size_t i = 2; i + 9 < size;) {
        if (data[i + 1] == 0xc2) abort();                       /* progressive */
        if (data[i + 1] == 0xc0) {
            height = data[i + 5] << 8 | data[i + 6]; width = data[i + 7] << 8 | data[i + 8];
            return 0; }
        i += 2 + (data[i + 2] << 8 | data[i + 3]); }
    return 3; }
int nvjpegJpegStreamGetFrameDimensions(void *s, unsigned *w, unsigned *h) {
    *w = width; *h = height; return s != (void *)13; }
int nvjpegDecodeBatchedSupported(void *h, void *s, int *unfit) { *unfit = width > 1000; return 0; }
int nvjpegDecodeBatchedInitialize(void *h, void *state, int count, int threads, int format) {
    batch = count; return state != (void *)12 || threads != 1 || format != 3; }
int nvjpegDecodeBatched(void *h, void *state, const unsigned char *const *data,
                        const size_t *sizes, Image *images, void *stream) {
    for (int i = 0; i < batch; i++) {
        if (nvjpegJpegStreamParse(h, data[i], sizes[i], 0, 0, (void *)13)) return 3;
        if (width > 1000) return 4;
        for (int c = 0; c < 3; c++) for (unsigned y = 0; y < height; y++)
            memset(images[i].channel[c] + y * images[i].pitch[c], data[i][sizes[i] - 3], width); }
    return 0; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libnvjpeg of a few lines, by the signatures of nvjpeg.h."""
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("NOT TESTED HERE: there is no C compiler")
    folder = tmp_path_factory.mktemp("nvjpeg") / "nvidia" / "nvjpeg" / "lib"
    folder.mkdir(parents=True)
    (folder / "stub.c").write_text(STUB)
    made = folder / "libnvjpeg.so.99"
    subprocess.run([compiler, "-shared", "-fPIC", folder / "stub.c", "-o", made], check=True)
    return made


def test_nvjpeg_is_called_as_its_header_says(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(library.parents[3]), *sys.path])
    assert library in nvjpeg.libraries()
    decoder = nvjpeg.NvJpeg(library, nvjpeg.HARDWARE, "cpu")
    assert decoder.about() == "nvJPEG 7.8.9, hardware engines: 1, cores of each: 2"
    small, large = (kinds.encode(kinds.picture(64, 48)), kinds.encode(kinds.picture(1008, 64)))
    assert decoder.parse(small) == (64, 48)
    assert decoder.supports(small) and not decoder.supports(large)
    first, second = decoder.decode([small, small])
    assert first.shape == (3, 48, 64) and torch.equal(first, second)
    assert (first == small[-3]).all() and small[-3]
    with pytest.raises(nvjpeg.NvJpegError, match=r"DecodeBatched: JPEG_NOT_SUPPORTED \(4\)"):
        decoder.decode([small, large])
    with pytest.raises(nvjpeg.NvJpegError, match=r"Parse: BAD_JPEG \(3\)"):
        decoder.parse(b"\xff\xd8")
    with pytest.raises(nvjpeg.NvJpegError, match="ARCH_MISMATCH"):
        nvjpeg.NvJpeg(library, nvjpeg.GPU_HYBRID, "cpu")


def test_a_decoder_that_crashes_ends_neither_the_others_nor_the_probe(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(library.parents[3]), str(ROOT)]))
    made = {"a": {}, "progressive": {"progressive": True}, "b": {"subsampling": "4:4:4"}}
    for name, how in made.items():
        jpeg = kinds.encode(kinds.picture(64, 48), **how)
        (tmp_path / f"{name}.jpg").write_bytes(jpeg)
    files = [tmp_path / f"{name}.jpg" for name in made]
    words = ["-m", "tools.gpu_check.engines", "nvJPEG hardware", "cpu"]
    about, found = probe.ask_engine(
        "nvJPEG hardware", files, lambda some: probe.ask([*words, *some], 60, tmp_path), lambda: 1
    )
    assert "hardware engines: 1" in about
    assert [one["kind"] for one in found] == ["a", "progressive", "b"]
    assert "signal 6 (SIGABRT)" in found[1]["why"]
    for one in (found[0], found[2]):  # decoded, to other pixels
        assert one["says"] is True and one["why"] == "its pixels are of another picture"


def test_after_a_crash_the_kinds_that_are_left_are_asked_for() -> None:
    asked: list[list[str]] = []

    def answer(words: list[str]) -> tuple[list[dict[str, Any]], str]:
        asked.append([Path(word).stem for word in words])
        about = {"about": "a decoder"}
        if len(asked) == 1:  # killed at the second kind
            return [about, {"kind": "a", "decodes": True}], "ended by signal 11 (SIGSEGV)"
        if len(asked) == 2:  # the GPU took no more calls after the third kind, which was told
            return [about, {"kind": "c", "decodes": False}], "exit code 3"
        return [about, {"kind": "d", "decodes": True}], ""

    files = [Path(f"{name}.jpg") for name in "abcd"]
    about, found = probe.ask_engine("x", files, answer, lambda: 1)
    assert asked == [["a", "b", "c", "d"], ["c", "d"], ["d"]] and about == "a decoder"
    assert [(one["kind"], one["decodes"]) for one in found] == [
        *(("a", True), ("b", False), ("c", False), ("d", True)),
    ]
    assert "SIGSEGV" in found[1]["why"]
    _, late = probe.ask_engine("x", files, answer, lambda: 0)
    assert {one["why"] for one in late} == {"no time was left"}
    missing = probe.ask_engine("x", files, lambda some: ([{"missing": "no wheel"}], ""), lambda: 1)
    assert missing == ("not here: no wheel", [])
    broken = probe.ask_engine("x", files, lambda some: ([], "exit code 1"), lambda: 1)
    assert broken == ("it does not start: exit code 1", [])


def test_each_kind_of_jpeg_is_what_its_name_says() -> None:
    made = kinds.kinds()
    samplings = {"4:4:4": (1, 1), "4:2:2": (2, 1), "4:2:0": (2, 2), "4:4:0": (1, 2)}
    for name, first in {**samplings, "4:1:1": (4, 1), "grey": (1, 1)}.items():
        with Image.open(io.BytesIO(made[name])) as image:
            image.load()
            assert image.layer[0][1:3] == first, name
    assert {Image.open(io.BytesIO(made[name])).mode for name in ("CMYK", "grey")} == {"CMYK", "L"}
    for name, data in made.items():
        segments = jpeg_tiles.read_segments(data)
        markers = {one.marker for one in segments or ()}
        assert (jpeg_tiles.DRI in markers) == name.startswith("restart marker"), name
        assert (0xC2 in markers) == (name == "progressive"), name
    part = made["restart markers, cut of a tile JPEG"]
    assert len(part) < len(made["restart markers, tile JPEG"])
    assert kinds.expected(part).shape[0] < kinds.HEIGHT


def test_pixels_are_compared_with_those_of_pil() -> None:
    data = kinds.encode(kinds.picture(64, 48))
    right = torch.from_numpy(kinds.expected(data).copy())

    def decode(pixels: torch.Tensor) -> dict[str, Any]:
        return engines.look(engines.Engine("", lambda files: [pixels]), "x", data, "cpu")

    assert decode(right) == {"kind": "x", "says": None, "decodes": True, "largest": 0, "mean": 0.0}
    planes = (right.permute(2, 0, 1).to(torch.int16) - 1).clamp(0).to(torch.uint8)
    assert decode(planes)["largest"] == 1 and decode(planes)["decodes"]
    assert "another picture" in decode(255 - right)["why"]
    assert "its shape is" in decode(right[1:])["why"]


# --- collect, and the environment -----------------------------------------------------------------


def archive(path: Path, count: int) -> None:
    with tarfile.open(path, "w:xz" if path.suffix == ".xz" else "w") as tar:
        for i in range(count):
            content = np.random.default_rng(i).bytes(3_000)
            member = tarfile.TarInfo(f"./class{i % 4}/{i:03d}.jpg")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def test_a_part_of_the_images_is_taken_that_the_benchmarks_read(tmp_path: Path) -> None:
    carried = tmp_path / "carried"
    carried.mkdir()
    for name, count in ((PHOTOS, 100), (CIFAR, 200)):
        archive(tmp_path / name, count)
        row = collect.thin(tmp_path / name, carried / name, 100_000, 25)
        assert row.size == (carried / name).stat().st_size <= 100_000
        assert row.about == f"25 images of {count}"
    data = Data(carried, tmp_path / "scratch", quick=False, rivals=False)
    assert len(list(data.photos(60).rglob("*.jpg"))) == 75
    files = {
        path.relative_to(tmp_path / "scratch" / "cifar") for path in data.cifar().rglob("*.jpg")
    }
    assert len(files) == 25 and Path("class0/000.jpg") in files
    row = collect.thin(tmp_path / PHOTOS, carried / PHOTOS, 50_000, None)
    assert 40_000 < row.size <= 50_000
    assert "no image fits" in collect.thin(tmp_path / PHOTOS, carried / PHOTOS, 10, None).about
    assert "NOT THERE" in collect.thin(tmp_path / "no.tar", carried / "no.tar", 10, None).about
    assert sorted(path.name for path in carried.iterdir()) == [CIFAR]


def test_what_is_for_others_is_left_out_of_a_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "nvidia_nvimgcodec_cu13-1-py3-none-any.whl"
    folder, about = "nvidia/nvimgcodec", "nvidia_nvimgcodec_cu13-1.dist-info"
    kept = [
        f"{folder}/__init__.py",
        f"{folder}/impl.cpython-312-x86_64-linux-gnu.so",
        f"{folder}/libnvimgcodec.so.0",
        f"{folder}/extensions/libnvjpeg_ext.so.0",
        f"{folder}/extensions/libjpeg_turbo_ext.so.0",
    ]
    gone = [
        f"{folder}/impl.cpython-313-x86_64-linux-gnu.so",
        f"{folder}/impl.cpython-312t-x86_64-linux-gnu.so",
        f"{folder}/extensions/libnvjpeg2k_ext.so.0",
        f"{folder}/extensions/libopencv_ext.so.0",
    ]
    with zipfile.ZipFile(wheel, "w") as made:
        for name in kept + gone:
            made.writestr(name, name * 100)
        record = "".join(f"{name},sha256=x,1\n" for name in kept + gone)
        made.writestr(f"{about}/RECORD", record + f"{about}/RECORD,,\n")
    collect.slim(wheel, "3.12")
    with zipfile.ZipFile(wheel) as found:
        assert sorted(found.namelist()) == sorted([*kept, f"{about}/RECORD"])
        listed = [line.split(",")[0] for line in found.read(f"{about}/RECORD").decode().split()]
    assert listed == [*kept, f"{about}/RECORD"]


def test_the_table_names_what_went_in_and_its_size() -> None:
    rows = [collect.Row("lmdb", 2**20, "3.0.0"), collect.Row("photos", 2**19, "7 images")]
    assert collect.table(rows, 2**21).splitlines() == [
        "lmdb         1.00 MiB  3.0.0",
        "photos       0.50 MiB  7 images",
        "together     1.50 MiB  limit 2.0 MiB",
    ]


def test_torch_is_not_collected_but_all_else_that_is_needed() -> None:
    wanted = collect.wanted("13", ["torchcodec"])
    text = (ROOT / "pyproject.toml").read_text().partition("dependencies = [")[2].partition("]")[0]
    needed = set(re.findall(r'^    "([a-z0-9]+)', text, re.M))
    assert needed - set(wanted) == {"torch", "numpy"}
    assert {"pillow", "pytest", "hypothesis", "nvidia-nvimgcodec-cu13", "nvidia-nvjpeg"} <= set(
        wanted
    )
    assert "torchcodec" not in wanted
    assert "nvidia-nvjpeg-cu12" in collect.wanted("12", [])


@pytest.mark.parametrize(
    "listing",
    [
        "Package  Version\n-------- -------\nPillow   12.3.0\npip      25.1\nMarkup_Safe 3.0\n",
        "pillow==12.3.0\ntorch==2.11.0+cu130\nmarkup.safe @ file:///wheels/x.whl\n",
    ],
    ids=["pip list", "pip freeze"],
)
def test_what_the_machine_has_is_left_out(listing: str, tmp_path: Path) -> None:
    file = tmp_path / "listing"
    file.write_text(listing)
    found = collect.present(file)
    assert {"pillow", "markup-safe"} <= found.keys() and "package" not in found
    assert found["pillow"] == "12.3.0" and found.get("torch", "2.11.0+cu130") == "2.11.0+cu130"
    assert "pillow" in collect.wanted("13", [])


@pytest.mark.parametrize(
    ("torch", "asked", "said"),
    [
        ("", "torchcodec>=0.16", ""),
        ("2.11.0+cu130", "torchcodec>=0.16", ""),
        ("2.13", "torchcodec>=0.16", ""),
        ("3.0.1", "torchcodec>=0.16", ""),
        ("2.10.0", "", "torchcodec 0.10, which fits torch 2.10, has no decode_jpeg"),
        ("2.9.1", "", "torchcodec 0.9, which fits torch 2.9, has no decode_jpeg"),
        ("2.3.1", "", "no torchcodec fits torch 2.3"),
    ],
)
def test_torchcodec_is_of_the_release_that_fits_torch(torch: str, asked: str, said: str) -> None:
    assert collect.torchcodec_for(torch) == (asked, said)


@pytest.mark.parametrize(
    ("words", "torchcodec", "said"),
    [
        (["--torch", "2.11.0"], ["torchcodec>=0.16"], ""),
        (["--torch", "2.10.0"], [], "left out: torchcodec 0.10, which fits torch 2.10, has no"),
        (["--without-present", "listing"], [], "left out: torchcodec 0.9, which fits torch 2.9,"),
        (["--without-present", "listing", "--torch", "2.12"], ["torchcodec>=0.16"], ""),
        (["--torch", "2.10", "--without", "torchcodec"], [], ""),
    ],
)
def test_a_torchcodec_that_decodes_no_jpeg_is_left_out_and_named(
    words: list[str], torchcodec: list[str], said: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    asked: list[str] = []

    def wheels(folder: Path, names: list[str], python: str) -> list[collect.Row]:
        asked.extend(names)
        return []

    monkeypatch.chdir(tmp_path)
    (tmp_path / "listing").write_text("pip 25.1\ntorch 2.9.1+cu130\ntqdm 4.70\n")
    monkeypatch.setattr(collect, "collect_wheels", wheels)
    monkeypatch.setattr(collect, "collect_libraries", lambda folder: collect.Row("x", 0, ""))
    assert collect.main(["out", "--data", str(tmp_path), *words]) == 0
    assert [name for name in asked if "torchcodec" in name] == torchcodec
    assert "" not in asked and ("tqdm" in asked) is ("listing" not in words)
    printed = capsys.readouterr().out
    assert said in printed and ("left out" in printed) is bool(said)
    assert printed.strip() in (tmp_path / "out" / "collected.txt").read_text()


@pytest.mark.parametrize("text", [None, "numpy 2.5\n", b"\xff\xfe"])
def test_what_is_no_listing_is_refused(text: str | bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "listing"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(collect.CollectError, match="--without-present"):
        collect.present(file)


def wheel(folder: Path, name: str, version: str) -> None:
    """Make a wheel that holds one module, whose `version` is this one."""
    about = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"version = {version!r}\n",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{file},,\n" for file in (*files, f"{about}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as made:
        for file, content in files.items():
            made.writestr(file, content)


def test_only_what_is_missing_is_installed_beside_what_is_there(tmp_path: Path) -> None:
    carried, site, log = tmp_path / "wheels", tmp_path / "site", tmp_path / "log"
    carried.mkdir()
    wheel(carried, "shardio_gpu_check_test", "1.0")
    wheel(carried, "tqdm", "0.0.1")
    done = environment.install(carried, site, log)
    assert done["shardio-gpu-check-test"] == "1.0 installed"
    assert done["tqdm"].endswith("is here already")
    assert not (site / "tqdm.py").exists()
    code = "import shardio_gpu_check_test as it; print(it.version)"
    env = environment.variables(site)
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert found.stdout == "1.0\n", found.stderr
    before = (site / "shardio_gpu_check_test.py").stat().st_mtime_ns
    assert environment.install(carried, site, log) == done  # nothing to do
    assert (site / "shardio_gpu_check_test.py").stat().st_mtime_ns == before
    (carried / "shardio_gpu_check_test-1.0-py3-none-any.whl").write_bytes(b"no wheel")
    shutil.rmtree(site)
    done = environment.install(carried, site, log)
    assert done["shardio-gpu-check-test"].startswith("NOT installed, pip: ")
    assert not site.exists()


def test_the_least_versions_are_those_of_pyproject() -> None:
    least = environment.least_versions((ROOT / "pyproject.toml").read_text())
    assert least["torch"] == "2.3" and least["pytest"] == "8" and least["setuptools"] == "77"


def test_without_a_compiler_it_goes_on_without_the_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(environment, "CORE", "raise SystemExit(1)")
    found = environment.build_core(None, environment.variables(tmp_path), tmp_path / "log")
    assert found == {
        "there": False,
        "what": "not built: there is no C compiler (cc, gcc, clang) here",
    }


def test_a_program_s_output_goes_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    command = [sys.executable, "-c", "import sys; print('a'); print('b', file=sys.stderr)"]
    ended = limited.run(command, 60, log)
    assert (ended.code, ended.why, sorted(ended.tail.split())) == (0, "", ["a", "b"])
    assert log.read_text().startswith("before\n")
    apart = limited.run(command, 60, log, stdout=tmp_path / "out")
    assert (apart.tail, (tmp_path / "out").read_text()) == ("b\n", "a\n")
