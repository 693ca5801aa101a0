"""A storage of one file, for what opens files by name."""

from types import SimpleNamespace
from typing import Any

from shardio.storage.base import File


class OneFile:
    """A Location that opens one file, whatever name is asked for."""

    url = "here"

    def __init__(self, file: Any = None) -> None:
        self._file = file or SimpleNamespace(name="nothing", size=0, read=None)

    def open(self, name: str, known: Any = None) -> File:
        file: File = self._file
        return file

    def sweep(self, name: str) -> File:
        return self.open(name)

    def read(self, name: str, limit: int, **_: Any) -> bytes:
        raise FileNotFoundError(name)

    def exists(self, name: str) -> bool:
        return False

    def is_network(self) -> bool:
        return False
