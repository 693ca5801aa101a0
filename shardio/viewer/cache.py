"""The cache of a view: values within a limit of bytes, and the thread that makes what takes long.

Columns of the index, filters, sorted orders and epochs are made once, by one thread: a page waits
for them for a moment, and then says how far they are. So no request of a browser blocks for long,
however large the dataset is, and two requests never make the same thing twice.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

T = TypeVar("T")


class PendingError(Exception):
    """Say that an answer is being made: `part` of 1 is done. Ask again."""

    def __init__(self, part: float | None) -> None:
        """part: None where nobody knows it."""
        what = "Preparing this order" if part is None else f"Reading the index: {part:.0%}"
        super().__init__(what)
        self.part = part or 0.0


class BackgroundCache:
    """Keep values by key, those used last, within a limit; make what takes long in one thread.

    Safe for threads.
    """

    def __init__(self, limit: int) -> None:
        """Keep up to `limit` bytes, and always the newest value. Starts no thread yet."""
        self._limit = limit
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self.bytes = 0  # that are kept
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shardio-view")
        self._running: dict[Hashable, Future[Any]] = {}
        self._closed = False
        self._part: float | None = None  # of the walk over the index that is done

    def get(self, key: Hashable) -> Any:
        """Return a value, or None."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: Hashable, value: T, size: int) -> T:
        """Keep a value of so many bytes, and return it."""
        with self._lock:
            self.bytes += size - self._values.pop(key, (None, 0))[1]
            self._values[key] = value, size
            while self.bytes > self._limit and len(self._values) > 1:
                self.bytes -= self._values.popitem(last=False)[1][1]
        return value

    def make(self, key: Hashable, function: Callable[[], T], wait_s: float | None) -> T:
        """Return what is kept by this key, or what the function returns, which may `put` it.

        The functions run in one thread, one after another; the same key asks for the same thing.
        Raises what the function raises, and PendingError if that takes longer than wait_s seconds.
        """
        if (found := self.get(key)) is not None:
            return found  # type: ignore[no-any-return]
        with self._lock:
            future = self._running.get(key)
            if future is None:
                for old in [one for one, begun in self._running.items() if begun.done()]:
                    del self._running[old]  # nobody came back for it; what it made is kept
                future = self._running[key] = self._pool.submit(function)
        if not wait([future], wait_s).done:
            raise PendingError(self._part)
        with self._lock:
            self._running.pop(key, None)
        return future.result()  # type: ignore[no-any-return]

    def tell(self, done: int, total: int) -> None:
        """Note how far a walk over the index is; end it here if the view was closed."""
        if self._closed:
            raise RuntimeError("the view was closed")
        self._part = done / total if done < total else None

    def close(self) -> None:
        """End what runs at its next `tell`, start nothing more, and let go of everything."""
        self._closed = True
        self._pool.shutdown(cancel_futures=True)
        with self._lock:
            self._values.clear()
            self.bytes = 0
