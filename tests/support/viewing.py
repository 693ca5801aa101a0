"""`shardio view` as users have it: the command, started as a program."""

import json
import signal
import subprocess
import sys
from pathlib import Path

from support import LIMIT_S
from support.trees import environment


class Viewer:
    """A running `shardio view`."""

    def __init__(self, *arguments: str | Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shardio", "view", *map(str, arguments), "--json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(self.process.communicate(timeout=LIMIT_S)[1])
        self.url: str = json.loads(line)["url"]
        self.port: int = json.loads(line)["port"]

    @property
    def base(self) -> str:
        """The address without the token, and without "/" at its end."""
        return self.url.partition("/?")[0]

    def stop(self) -> tuple[int, str]:
        """Ctrl-C: its exit code, and all that it said."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            said = "".join(self.process.communicate(timeout=LIMIT_S))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise
        return self.process.returncode, said
