"""A program in a fork of a process that has imported torch is as one that Python starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import LIMIT_S, programs, warm_python

ENDS = {
    "print(1)": 0,
    "import sys; sys.exit(7)": 7,
    "import sys; sys.exit('no')": 1,
    "raise ValueError('no')": 1,
    "import os; os.kill(os.getpid(), 9)": -9,
}


@pytest.mark.parametrize("code", ENDS)
def test_it_ends_as_the_program_does(code: str) -> None:
    done = [
        subprocess.run([*line, "-c", code], capture_output=True, text=True)
        for line in (warm_python.command(), [sys.executable])
    ]
    assert [one.returncode for one in done] == [ENDS[code]] * 2
    assert done[0].stdout == done[1].stdout
    assert done[0].stderr.split("\n")[-2:] == done[1].stderr.split("\n")[-2:]


SEEN = """
import os, sys
print(sys.argv, sys.path[:2], os.getcwd(), os.environ["A"], __name__)
print(sys.stdin.read(), globals().get("__file__"), "shardio" in sys.modules)
"""


@pytest.mark.parametrize("how", ["file", "-c", "-m"])
def test_it_has_the_arguments_folder_environment_and_streams(how: str, tmp_path: Path) -> None:
    (tmp_path / "seen.py").write_text(SEEN)
    what = {"file": [str(tmp_path / "seen.py")], "-c": ["-c", SEEN], "-m": ["-m", "seen"]}[how]
    env = {**os.environ, "PYTHONPATH": "/first", "A": "b"}
    said = [
        subprocess.run(
            [*line, *what, "x", "-y"], cwd=tmp_path, env=env, input=b"given", capture_output=True
        )
        for line in (warm_python.command(), [sys.executable])
    ]
    assert said[0].stdout and said[0].stdout == said[1].stdout
    assert not said[0].stderr + said[1].stderr


def test_an_option_makes_warnings_errors() -> None:
    line = warm_python.command("-W", "error", "-c", "import warnings; warnings.warn('told')")
    assert b"UserWarning: told" in subprocess.run(line, capture_output=True).stderr


@pytest.mark.parametrize("end", ["kill", "interrupt"])
def test_what_it_started_is_found_and_ends_with_it(end: str) -> None:
    code = "import os, signal; os.fork(); print('forked', flush=True); signal.pause()"
    program = programs.Program("-c", code, limit_s=LIMIT_S, warm=True)
    assert program.read_until("forked\nforked") or program.finish()
    getattr(program, end)()
    done = program.finish()
    assert done.code == {"kill": -9, "interrupt": -2}[end], done
    assert not done.left and not done.timed_out
