"""tools/trust: some cases of each section, what it prints, and that it finds what is broken."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import power
from support.crashing import SCENES, STRACE, Stage
from support.trees import environment
from trust import __main__
from trust.crash import Warm
from trust.sections import SECTIONS, section

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="NOT TESTED HERE: needs Linux")
CASES = {
    "damage": 15,
    "bits": 40,
    "unfinished": 6,
    "crash": 8,
    "moments": 1,
    "power": 3,
    "stores": 1,
    "workers": 2,
    "races": 3,
    "leaks": 2,
    "reading": 1,
}


@needs_linux
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SECTIONS)
def test_some_cases_of_each_section(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here, where torch is imported already."""
    if name in ("crash", "power") and STRACE is None:
        pytest.skip("NOT TESTED HERE: strace is not installed")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1750000000")
    one, before = section(name)(tmp_path, 1), dict(os.environ)
    try:
        one.prepare()
        kinds = Counter(one.case(number) for number in range(CASES[name]))
    finally:
        one.close()
        os.environ.clear()
        os.environ.update(before)
    assert kinds.total() == CASES[name] and one.done(kinds, {**one.sums, **one.most()})


BROKEN = """
import os
from trust.section import Section

class Broken(Section):
    name, promise = "broken", "P9"

    def case(self, number):
        if number == 1:
            raise ValueError("number one")
        if number == 2:
            os.kill(os.getpid(), 9)
        return "well"
"""
ONLY = """
from trust import sections

sections.SECTIONS.clear()
sections.SECTIONS["broken"] = ("broken", "Broken", 1.0)
"""


@pytest.fixture
def broken(tmp_path: Path) -> dict[str, str]:
    """The environment of a run whose only section has a case that fails, and one that dies."""
    (tmp_path / "sitecustomize.py").write_text(ONLY)
    (tmp_path / "broken.py").write_text(BROKEN)
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    return environment(PYTHONPATH=path)


@needs_linux
def test_what_fails_is_told_with_the_command_that_repeats_it(
    broken: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    line = [sys.executable, "-m", "trust", "--cases", "4", "--seed", "5", "--json", str(out)]
    done = subprocess.run(line, capture_output=True, text=True, env=broken)
    assert done.returncode == 1, done
    assert "tools/trust --seed 5 --case broken:1\n" in done.stdout
    assert "ValueError: number one" in done.stdout
    assert "tools/trust --seed 5 --case broken:2\n" in done.stdout
    assert done.stdout.splitlines()[1].split("|")[-2:] == ["     4 ", "        2"]
    found = json.loads(out.read_text())
    row = found["sections"]["broken"]
    assert (found["seed"], row["cases"], row["kinds"]) == (5, 4, {"failed": 2, "well": 2})
    assert [one["case"] for one in row["failures"]] == [1, 2]
    line = [sys.executable, "-m", "trust", "--seed", "5", "--case", "broken:2"]
    assert subprocess.run(line, capture_output=True, env=broken).returncode == 1


@needs_linux
def test_ctrl_c_prints_what_was_done(broken: dict[str, str]) -> None:
    line = [sys.executable, "-m", "trust", "--minutes", "99", "--seed", "5"]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(line, env=broken, start_new_session=True, **options) as process:
        assert process.stderr is not None
        while "turn" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate()
    assert said.startswith("section") and "\nbroken" in said
    assert process.returncode in (0, 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "nothing"], "there is no section 'nothing'; there are damage"),
        (["--case", "damage:3"], "needs the --seed"),
        (["--case", "damage", "--seed", "1"], "SECTION:NUMBER"),
    ],
)
def test_what_is_asked_wrongly_is_told(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        __main__.parse(words)
    assert said in capsys.readouterr().err


@needs_linux
@pytest.mark.skipif(STRACE is None, reason="NOT TESTED HERE: strace is not installed")
def test_the_calls_that_can_fail_are_those_that_strace_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1750000000")
    stage = Warm(tmp_path / "small")
    try:
        for name in ("lmdb", "unpack"):
            found = Counter(call for call, _ in stage.rehearse(name))
            out = stage.out(SCENES[name])
            seen = Counter(call for call, _ in Stage.changes(stage, SCENES[name], out))
            # What is said to stdout may begin with the path.
            assert seen - found <= Counter(write=1) and not found - seen
    finally:
        stage.commands.close()


# --- the recorder of power cuts -------------------------------------------------------------------

LOG = """\
9 mkdir("/r/d", 0777) = 0
9 openat(AT_FDCWD</>, "/r/d/a", O_RDWR|O_CREAT, 0666) = 3</r/d/a>
9 write(3</r/d/a>, "12", 2) = 2
9 write(3</r/d/a>, "34", 2 <unfinished ...>
8 write(1</dev/null>, "9", 1) = 1
9 <... write resumed>) = 2
9 pwrite64(3</r/d/a>, "9", 1, 0) = 1
9 fsync(3</r/d/a>) = 0
9 rename("/r/d/a", "/r/d/b") = 0
9 openat(AT_FDCWD</>, "/r/d", O_RDONLY) = 4</r/d>
9 fsync(4</r/d>) = 0
9 unlink("/r/old") = 0
"""


def recorded() -> power.Recording:
    def hexed(found: re.Match[str]) -> str:
        text = "".join(f"\\x{ord(one):02x}" for one in found[2])
        return f"{found[1]}{text}{found[3]}"

    log = re.sub(r"([\"<])(?!unfinished)([^\"<>.][^\"<>]*)([\">])", hexed, LOG)
    return power.Recording(log, Path("/r"), {".": None, "old": b"x"})


def test_the_recorder_ends_where_the_command_did() -> None:
    assert recorded().after == {".": None, "d": None, "d/b": b"9234"}


def test_a_state_keeps_what_was_synced_and_may_lose_the_rest() -> None:
    found = recorded()
    ends = {str(found.state(len(found.ops), random.Random(seed))) for seed in range(200)}
    assert str({"d": None, "d/b": b"9234", "old": b"x"}) in ends
    assert str({"d": None, "d/b": b"9234"}) in ends
    # The folder was made, and the one above it never synced: it may be gone, with all in it.
    assert ends <= {
        str(one)
        for one in (
            {"d": None, "d/b": b"9234", "old": b"x"},
            {"d": None, "d/b": b"9234"},
            {"old": b"x"},
            {},
        )
    }
    cut = {str(found.state(4, random.Random(seed)).get("d/a")) for seed in range(300)}
    assert {"None", "b'1234'", "b''", "b'\\x00\\x0034'", "b'12'"} <= cut
