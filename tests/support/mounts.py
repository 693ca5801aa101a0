"""Programs for which a directory is mounted otherwise: read-only, or as a small disk."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from support import LIMIT_S


def read_only(folder: Path) -> str:
    """Return the commands that mount a directory over itself, read-only."""
    return f"mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}"


def run_mounted(
    mount: str, command: Sequence[str], environment: dict[str, str] | None = None
) -> str:
    """Run a program behind a mount of its own; return what it says on stderr.

    Skips where nothing can be mounted.
    """
    unshare = shutil.which("unshare")
    if unshare is None or os.geteuid() != 0:
        pytest.skip("NOT TESTED HERE: nothing can be mounted")
    done = subprocess.run(
        [unshare, "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode and "mount" in done.stderr and "Traceback" not in done.stderr:
        pytest.skip(f"NOT TESTED HERE: {done.stderr}")
    assert done.returncode == 0, done.stderr
    return done.stderr
