"""A program in a fork of a process that has imported torch is as one that Python starts."""

import multiprocessing
import os
import subprocess
import sys
from multiprocessing import spawn
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


def test_descriptors_have_their_numbers_and_no_other_holder() -> None:
    ours, theirs = os.pipe()
    os.set_inheritable(theirs, True)
    code = f"import os; os.write({theirs}, b'here'); os.close({theirs}); os.read(0, 1)"
    line = warm_python.command("-c", code, kind="shardio")
    process = subprocess.Popen(line, stdin=subprocess.PIPE, pass_fds=[theirs])
    os.close(theirs)
    with open(ours, "rb") as file:
        assert file.read() == b"here"  # to its end, while the program goes on
    process.communicate(b"1")
    assert process.returncode == 0


def test_a_closed_stream_is_closed() -> None:
    code = "import os, sys; os.fstat(1); print(sys.stdin is None)"
    line = warm_python.command("-c", code, kind="shardio")
    done = subprocess.run(["sh", "-c", '"$@" <&-', "sh", *line], capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"True\n"), done.stderr


def test_multiprocessing_starts_forks_where_it_is_told_to() -> None:
    code = "import sys; sys.exit(3 if 'shardio.storage.client' in sys.modules else 4)"
    codes = []
    for kind in ("shardio", "torch"):
        with warm_python.starts(kind):
            process = multiprocessing.get_context("spawn").Process(target=exec, args=(code,))
            process.start()
            process.join(LIMIT_S)
            codes.append(process.exitcode)
    assert codes == [3, 4]
    assert os.path.samefile(os.fsdecode(spawn.get_executable()), sys.executable)
