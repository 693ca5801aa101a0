"""The views of a dataset and its splits, each opened when it is first asked for."""

from __future__ import annotations

import os
import threading

from ..errors import OptionError, printable, there_are
from ..storage.options import Storage
from .view import View, open_view


class Views:
    """Hold what is open of a directory or URL: one dataset, or splits in folders of their own."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        split: str | None = None,
        storage: Storage | None = None,
    ) -> None:
        """Open the view that comes first. Options as `open_view` has them; raises as it does."""
        self._path, self._storage = path, storage
        self._first = open_view(path, split=split, storage=storage)
        self.splits = self._first.summary().splits
        self._open = {self._first.summary().split: self._first}
        self._lock = threading.Lock()

    def of(self, split: str | None = None) -> View:
        """Return the view of a split; None: the first. Raises OptionError, and as `open_view`."""
        if split is None:
            return self._first
        with self._lock:
            if split not in self._open:
                if split not in self.splits:
                    there = there_are(self.splits, split)
                    raise OptionError(f"split {printable(split)!r}: {there}")
                self._open[split] = open_view(self._path, split=split, storage=self._storage)
            return self._open[split]

    def close(self) -> None:
        """Close all that is open."""
        with self._lock:
            for view in self._open.values():
                view.close()
            self._open.clear()
