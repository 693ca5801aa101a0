"""Shards on their way into an object store, while others are still being built.

How it works. A packing into a store works in a directory of this machine, as one into a directory
does: its journal, lock and drafts are there. Each shard that is finished there is uploaded, and
compared with its SHA-256 on the way. Then a note takes its place, and the file is removed, so that
the directory holds a few shards at a time. The manifest is put when all shards are there: nobody
finds half a dataset. Nothing in the store is listed, and nothing of others is removed.

A note is one line of JSON, and the SHA-256 of that line:

    .shardio-sent-00000.json    what the manifest will say of the shard, and what was left out of it

Run again after an interruption, a shard with a note is looked at in the store: it counts if its
size is right, and the SHA-256 that was noted with it. Without a note, a shard is built again; it is
uploaded if the store does not have it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
from concurrent.futures import Future
from functools import partial
from typing import Any

from ..errors import DamageError, StorageError
from ..formats.base import ShardInfo
from ..names import key_bytes, key_text
from ..storage import local, ranges
from ..storage.client import Reply, Request
from ..storage.local import LocalDirectory
from ..storage.remote import RemoteLocation
from ..storage.transfers import settle
from ..storage.upload import Upload
from .build_shard import Built
from .journal import NOTE, is_note
from .objects import LOOKS, each, looked
from .reencode import Reencoded

AT_ONCE = 4  # uploads at once, each of 4 parts: 200 MB of memory
_MOST_NOTE = 1 << 30  # bytes
_LOOK_S = 0.2  # between two looks at whether to stop


class Uploads(contextlib.AbstractContextManager["Uploads"]):
    """The uploads of one packing. Leaving it ends those that are under way."""

    def __init__(self, target: RemoteLocation, directory: str, dataset_id: bytes) -> None:
        self._target, self._directory, self._id = target, directory, dataset_id
        self._running: dict[Future[Reply], Built] = {}

    def __exit__(self, *error: object) -> None:
        for future in self._running:
            future.cancel()

    def sent(self) -> dict[int, Built]:
        """Return the shards that an interrupted packing uploaded, by number.

        Raises StorageError where the store cannot be asked.
        """
        noted = map(self._noted, filter(is_note, sorted(os.listdir(self._directory))))
        looks = ((one, self._look(one)) for one in noted if one is not None)
        return {_info(one).number: one for one, look in each(looks, LOOKS) if _is_there(one, look)}

    def add(self, one: Built) -> None:
        """Upload a shard of the directory. Waits while enough uploads are under way.

        One that another machine uploaded is noted. Raises StorageError, DamageError.
        """
        if one.info is None or one.uploaded:
            if one.info is not None and not one.kept:
                self._note(one)
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
            self._note(one)
            local.remove(os.path.join(self._directory, _info(one).name))

    def _look(self, one: Built) -> Request:
        return Request(self._target.store, _info(one).name, what="noted")

    # --- notes ------------------------------------------------------------------------------------

    def _note(self, one: Built) -> None:
        info = _info(one)
        value = {
            "dataset": self._id.hex(),
            "shard": dataclasses.asdict(info) | {"sha256": info.sha256.hex()},
            "blob_bytes": one.blob_bytes,
            "tiles": one.reencoded.tiles,
            "problems": [[key_text(key), why] for key, why in one.problems],
        }
        line = json.dumps(value).encode() + b"\n"
        seal = hashlib.sha256(line).hexdigest().encode()
        local.write_file(self._directory, NOTE.format(f"{info.number:05d}"), line + seal)

    def _noted(self, name: str) -> Built | None:
        """Return what a note says; None where it is damaged, or of another dataset."""
        try:
            data = LocalDirectory(self._directory).read(name, _MOST_NOTE)
            line, seal = data[:-64], data[-64:]
            value: Any = json.loads(line)
            if hashlib.sha256(line).hexdigest().encode() != seal:
                return None
            if value["dataset"] != self._id.hex():
                return None
            shard = value["shard"] | {"sha256": bytes.fromhex(value["shard"]["sha256"])}
            problems = [(key_bytes(key), why) for key, why in value["problems"]]
            reencoded = Reencoded(tiles=value["tiles"])
        except (OSError, DamageError, StorageError, LookupError, TypeError, ValueError):
            return None
        return Built(ShardInfo(**shard), value["blob_bytes"], True, reencoded, problems, True)


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
