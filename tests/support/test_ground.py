"""The end of a run of the suite fails where something was left, or a user's file is gone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import LIMIT_S
from support.trees import ROOT, environment

LEFT = {
    "a process": ("process", "subprocess.Popen(['sleep', '600'], start_new_session=True)"),
    "a file": ("left-here in the temporary", "open(tempfile.gettempdir() + '/left-here', 'w')"),
    "a segment": ("shared memory /dev/shm/left-", "open(f'/dev/shm/left-{os.getpid()}', 'w')"),
    "the user's file": ("has deleted the user's files", "shutil.rmtree(os.environ['DATA'])"),
}
TEST = """
import gc, os, shutil, subprocess, tempfile, warnings

def test_it():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        {does}
        gc.collect()
"""


def suite(
    folder: Path, does: str, *options: str, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Run a suite of one test with the conftest of this one, in a temporary directory."""
    tests, machine = folder / "tests", folder / "m"
    tests.mkdir()
    (machine / "data").mkdir(parents=True)
    (tests / "conftest.py").symlink_to(ROOT / "tests" / "conftest.py")
    (tests / "test_it.py").write_text(TEST.format(does=does))
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
    line += ["--rootdir", str(folder), "--basetemp", str(folder / "base"), *options, str(tests)]
    env = environment(
        TMPDIR=str(machine),
        HOME=str(folder),
        DATA=str(machine / "data"),
        PYTEST_ADDOPTS="",
        **variables,
    )
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there is no /proc")
@pytest.mark.parametrize("what", LEFT)
def test_the_end_fails_where_a_test_leaves(tmp_path: Path, what: str) -> None:
    said, does = LEFT[what]
    before = set(os.listdir("/dev/shm"))
    try:
        done = suite(tmp_path, does, SUITE_GRACE_S="1")
    finally:
        for name in set(os.listdir("/dev/shm")) - before:
            if name.startswith("left-"):
                os.unlink(f"/dev/shm/{name}")
    assert done.returncode == 1 and "1 passed" in done.stdout, done.stdout + done.stderr
    assert said in done.stdout.split("did not clean up")[1]


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "two processes"])
def test_a_test_that_leaves_nothing_passes_and_nothing_stays(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    done = suite(tmp_path, "tempfile.mkdtemp(dir=os.environ['DATA'])", *options)
    assert done.returncode == 0 and "did not clean up" not in done.stdout, done.stdout + done.stderr
    (mine,) = (tmp_path / "m" / "data").iterdir()  # what was put there stays; canaries do not
    assert [one.name for one in (tmp_path / "m").iterdir()] == ["data"]
    assert not list(tmp_path.glob("shardio-tests-canary-*")) and mine.is_dir()
