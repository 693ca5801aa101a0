"""Small files that were written nowhere, as a Location: indexes that are used once."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import DamageError
from .base import File, KnownFile, Location, Seal


class MemoryLocation(Location):
    """Files by name. They are read whole; `open` has nothing to open."""

    def __init__(self, url: str, files: Mapping[str, bytes]) -> None:
        self.url = url  # for messages
        self._files = files

    def open(self, name: str, known: KnownFile | None = None) -> File:
        """Raise FileNotFoundError: there is nothing to open."""
        raise FileNotFoundError(name)

    def read(self, name: str, limit: int, *, seal: Seal = None) -> bytes:
        """Read a file. Raises FileNotFoundError, DamageError above `limit`."""
        try:
            data = self._files[name]
        except KeyError:
            raise FileNotFoundError(name) from None
        if len(data) > limit:
            raise DamageError(f"{self.url}: {name}: {len(data):,} bytes; the limit is {limit:,}")
        return data

    def below(self, name: str) -> MemoryLocation:
        """Return the folder of this name: the files whose names begin with it."""
        inside = {path: data for path, data in self._files.items() if path.startswith(f"{name}/")}
        files = {path[len(name) + 1 :]: data for path, data in inside.items()}
        return MemoryLocation(f"{self.url}/{name}", files)

    def exists(self, name: str) -> bool:
        """Return True if a file or folder of this name is there."""
        return name in self._files
