"""Shards on their way into an object store, while others are still being built.

How it works. A packing into a store works in a directory of this machine, as one into a directory
does: its journal, lock and drafts are there. Each shard that is finished there is uploaded, and
compared with its SHA-256 on the way. Then a note (built.py) takes its place, and the file is
removed, so that the directory holds a few shards at a time. The manifest is put when all shards
are there: nobody finds half a dataset. Nothing in the store is listed, and nothing of others is
removed.

Run again after an interruption, a shard with a note is looked at in the store: it counts if its
size is right, and the SHA-256 that was noted with it. Without a note, a shard is built again; it is
uploaded if the store does not have it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
from concurrent.futures import Future
from functools import partial

from ..formats.base import ShardInfo
from ..storage import local, ranges
from ..storage.client import Reply, Request
from ..storage.remote import RemoteLocation
from ..storage.transfers import settle
from ..storage.upload import Upload
from .built import Built, note_sent, read_sent
from .journal import is_note
from .objects import LOOKS, each, looked

AT_ONCE = 4  # uploads at once, each of 4 parts: 200 MB of memory
_LOOK_S = 0.2  # between two looks at whether to stop


class Uploads(contextlib.AbstractContextManager["Uploads"]):
    """The uploads of one packing. Leaving it ends those that are under way."""

    def __init__(self, target: RemoteLocation, directory: str, dataset_id: bytes) -> None:
        self._target, self._directory, self._id = target, directory, dataset_id
        self._running: dict[Future[Reply], Built] = {}

    def __exit__(self, *error: object) -> None:
        for future in self._running:
            future.cancel()

    def sent(self, first: int) -> dict[int, Built]:
        """Return the shards that an interrupted packing uploaded, by number, counted from `first`.

        Raises StorageError where the store cannot be asked.
        """
        names = filter(is_note, sorted(os.listdir(self._directory)))
        noted = (read_sent(self._directory, name, self._id) for name in names)
        looks = ((one, self._look(one)) for one in noted if one is not None)
        found = (one for one, look in each(looks, LOOKS) if _is_there(one, look))
        return {_info(one).number - first: one for one in found}

    def add(self, one: Built) -> None:
        """Upload a shard of the directory. Waits while enough uploads are under way.

        One that another machine uploaded is noted. Raises StorageError, DamageError.
        """
        if one.info is None or one.uploaded:
            if one.info is not None and not one.reused:
                note_sent(self._directory, self._id, one)
            return
        self._take(0)
        while len(self._running) >= AT_ONCE:
            self._take(_LOOK_S)
        self._running[self._send(one)] = one

    def finish(self) -> None:
        """Wait until all is uploaded. Raises StorageError, DamageError."""
        while self._running:
            self._take(_LOOK_S)

    def _send(self, one: Built) -> Future[Reply]:
        """Upload a shard, if the store does not have it. It raises nothing: the Future does."""
        sent: Future[Reply] = Future()
        info = _info(one)
        path = os.path.join(self._directory, info.name)
        upload = Upload(path, info.size, info.sha256, path)

        # By the thread that brings the answer: this one may build the next shard for an hour.
        def go_on(look: Future[Reply]) -> None:
            try:
                if _is_there(one, look):
                    settle(sent, look.result())
                elif not sent.cancelled():
                    put = ranges.send(self._target.put_request(info.name, upload))
                    sent.add_done_callback(lambda _: put.cancel())
                    put.add_done_callback(partial(_hand_on, sent))
            except BaseException as error:
                settle(sent, error)

        ranges.send(self._look(one)).add_done_callback(go_on)
        return sent

    def _take(self, wait_s: float) -> None:
        """Take note of what is uploaded; wait so long for the first. Raises as `finish`."""
        done, _ = concurrent.futures.wait(self._running, wait_s, "FIRST_COMPLETED")
        for future in done:
            one = self._running.pop(future)
            future.result()
            note_sent(self._directory, self._id, one)
            local.remove(os.path.join(self._directory, _info(one).name))

    def _look(self, one: Built) -> Request:
        return Request(self._target.store, _info(one).name, what="noted")


def _info(one: Built) -> ShardInfo:
    assert one.info is not None
    return one.info


def _hand_on(sent: Future[Reply], put: Future[Reply]) -> None:
    try:
        settle(sent, put.result())
    except BaseException as error:
        settle(sent, error)


def _is_there(one: Built, look: Future[Reply]) -> bool:
    info, found = _info(one), looked(look)
    return found is not None and (found.size, found.tag) == (info.size, info.sha256.hex())
