"""The names of all commands, and the type of the fixture that runs one in the test's process."""

import subprocess
from collections.abc import Callable

from shardio.cli.parser import COMMANDS

NAMES = [command.name for command in COMMANDS]
Run = Callable[..., subprocess.CompletedProcess[str]]
