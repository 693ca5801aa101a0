"""A packed directory, and commands that run in this process."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.commands import Run
from support.trees import images, plant, shardio

from shardio.cli.main import main


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process: for what is not about the process."""

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        capfd.readouterr()
        try:
            code: Any = main([os.fspath(one) for one in arguments])
        except SystemExit as end:  # of argparse
            code = end.code
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    return run


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant(tmp_path_factory.mktemp("source") / "src", images())


@pytest.fixture(scope="session")
def out(source: Path) -> Path:
    shardio("pack", source, source.parent / "out", "--max-records", "10", "--jobs", "1")
    return source.parent / "out"
