"""Requests for many objects of a store, several at a time."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from ..errors import StorageError
from ..storage import ranges
from ..storage.client import Reply, Request, RequestError
from ..storage.local import LocalDirectory
from ..storage.location import Target

LOOKS = 32  # objects that are looked at, at once

Item = TypeVar("Item")


def looked(look: Future[Reply]) -> Reply | None:
    """Return what a look at an object found; None: there is no object. Raises StorageError."""
    try:
        return look.result()
    except StorageError as error:
        if isinstance(error.__cause__, RequestError) and error.__cause__.kind == "missing":
            return None
        raise


def each(
    requests: Iterable[tuple[Item, Request]], most: int
) -> Iterator[tuple[Item, Future[Reply]]]:
    """Send requests, `most` at a time, and yield each with its answer as it comes."""
    running: dict[Future[Reply], Item] = {}
    waiting = iter(requests)
    while True:
        for item, request in waiting:
            running[ranges.send(request)] = item
            if len(running) >= most:
                break
        if not running:
            return
        done, _ = concurrent.futures.wait(running, return_when="FIRST_COMPLETED")
        for future in done:
            yield running.pop(future), future


def missing_in(place: Target, names: Iterable[str]) -> list[str]:
    """Return those of some files that are not in a place, in order. Raises StorageError."""
    if isinstance(place, LocalDirectory):
        return [name for name in names if not place.exists(name)]
    looks = ((name, Request(place.store, name, what="head")) for name in names)
    return sorted(name for name, look in each(looks, LOOKS) if looked(look) is None)
