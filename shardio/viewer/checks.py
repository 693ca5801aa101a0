"""Find damaged records part by part, remember those that were met, list what packing left out."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator

from ..dataset.reader import Reader
from ..errors import DecodeError, ShardioError, printable
from ..formats.record import whole_runs
from ..images import decode
from .results import Checked, Damaged, Rejected

_REMEMBERED = 10_000  # damaged records, at most
_CHUNK = 64  # records that are checked between two looks at the clock
_LISTED = 10_000  # files that packing left out which are returned
_REJECTED = "rejected.jsonl"  # which pack writes with on_error="skip"
_MAX_REJECTED = 256 << 20  # bytes of it


class Checks:
    """Check records of a dataset, and remember the damaged ones that anybody met."""

    def __init__(self, reader: Reader, max_pixels: int | None) -> None:
        """Remember none yet."""
        self._reader, self._max_pixels = reader, max_pixels
        self._met: dict[int, Damaged] = {}
        self._lock = threading.Lock()

    def met(self, number: int, key: str | None, shard: str, message: str) -> Damaged:
        """Remember a record that cannot be read or shown."""
        with self._lock:
            known = self._met.get(number)
            if key is None and known is not None:
                key = known.key
            found = Damaged(number, key, shard, message)
            if known is not None or len(self._met) < _REMEMBERED:
                self._met[number] = found
        return found

    def damaged(self) -> tuple[Damaged, ...]:
        """Return the records that were met, by number."""
        with self._lock:
            return tuple(self._met[number] for number in sorted(self._met))

    def check(self, start: int, budget_s: float, pixels: bool) -> Checked:
        """Read records from a number on for so many seconds; pixels: also decode their images."""
        end, total = time.monotonic() + budget_s, self._reader.stored_records
        at, damaged = min(max(0, start), total), list[Damaged]()
        while at < total:
            shard, record = self._reader.locate(at)
            left = int(self._reader.starts[shard + 1]) - at
            stop = record + min(left, _CHUNK)
            damaged += self._differing(shard, record, stop, pixels)
            at += stop - record
            if time.monotonic() > end:
                break
        own = (one for one in damaged if self._reader.place(one.number) is not None)
        return Checked(start, at if at < total else None, total, tuple(own))

    def _differing(self, at: int, start: int, stop: int, pixels: bool) -> Iterator[Damaged]:
        """Yield the damaged ones of records [start, stop) of a shard."""
        name = printable(self._reader.manifest.shard(at).name)
        first = int(self._reader.starts[at])
        try:
            shard = self._reader.shard(at)
        except ShardioError as error:
            for record in range(start, stop):
                yield self.met(first + record, None, name, str(error))
            return
        runs = [*whole_runs(shard, start, stop)]
        if not pixels:
            try:
                for run in runs:
                    for _ in shard.scan(*run):
                        pass
                return
            except ShardioError:
                pass  # one by one: which are they?
        images = self._reader.manifest.schema.images if pixels else ()
        for record in itertools.chain.from_iterable(itertools.starmap(range, runs)):
            try:
                sample = shard.read(record)
                for field in images:
                    if sample[field] is not None:
                        decode.stored(sample[field], max_pixels=self._max_pixels)
            except ShardioError as error:
                key = None
                if isinstance(error, DecodeError):
                    key = printable(sample["__key__"])
                yield self.met(first + record, key, name, str(error))

    def rejected(self) -> tuple[Rejected, ...] | None:
        """Return what packing left out, the first 10,000; None where no list of it is there."""
        try:
            data = self._reader.index.read(_REJECTED, _MAX_REJECTED)
            entries = [json.loads(line) for line in data.splitlines()[:_LISTED]]
            return tuple(
                Rejected(printable(entry["key"], 4096), printable(str(entry["reason"]), 4096))
                for entry in entries
            )
        except (FileNotFoundError, ShardioError, ValueError, TypeError, KeyError, RecursionError):
            return None
