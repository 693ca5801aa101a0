"""The views of a dataset and its splits, each opened when it is first asked for."""

from __future__ import annotations

import os
import threading

from ..errors import OptionError, printable, there_are
from ..formats.manifest import datasets_in
from ..storage.location import locate
from ..storage.options import Storage
from .view import View, open_view


class Views:
    """Hold what is open of a directory or URL: one dataset, or splits in folders of their own."""

    def __init__(
        self, path: str | os.PathLike[str], split: str | None, storage: Storage | None
    ) -> None:
        """Open the split of this name; None: the one dataset, or "train", or the first split.

        Raises as `open_view` does.
        """
        self._path, self._storage = path, storage
        there = datasets_in(locate(path, storage or Storage()))
        self.splits = tuple(sorted(name for name in there if name))
        self._open: dict[str | None, View] = {}
        self._lock = threading.Lock()
        if split is None and self.splits:
            split = "train" if "train" in self.splits else self.splits[0]
        self.first = split
        self.of(split)

    def of(self, split: str | None) -> View:
        """Return the view of a split; None: of the first one. Raises OptionError, ShardioError."""
        name = self.first if split is None else split
        with self._lock:
            if name not in self._open:
                if self._open and name not in self.splits:
                    raise OptionError(
                        f"split {printable(name or '')!r}: {there_are(self.splits, name or '')}"
                    )
                self._open[name] = open_view(self._path, split=name, storage=self._storage)
            return self._open[name]

    def close(self) -> None:
        """Close all that is open."""
        with self._lock:
            for view in self._open.values():
                view.close()
            self._open.clear()
