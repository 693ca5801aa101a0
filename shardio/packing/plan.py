"""The plan of a packing: which file goes into which shard, before a byte is read.

A plan is a pure function of the listing and the options, so that every process, and every machine
of a job array, makes the same one; or it is made once, by `shardio plan`. While the packing is
unfinished the plan lies beside the shards as the journal `.shardio-plan` (journal.py); packers lock
byte k of it for shard k (lock.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ..errors import printable
from ..formats.record import VERSION
from ..names import KEY
from ..order import rng
from ..units import exact_size
from .options import PackOptions
from .sources.base import Ints, Listing, Plain, Problem, Source, SourceRequest

SHARD_SIZE = 256 << 20  # bytes: full sequential bandwidth, and small enough to cache and assign
MIN_SHARDS = 16  # that the default aims at,
_SEALED = b"shardio-plan 0\n"  # begins what ids are made of; no journal's version since the first
MIN_SHARD_SIZE = 1 << 20  # but not with shards below this: opening costs more than a MiB's reading

# Shards that lay in OUT when a packing was begun: name to time of change. They are of another
# packing, which may have had other content under the same id; all others are of this one. (Being
# younger than the journal would say less: clocks of two machines differ, and ticks are coarse.)
Before = dict[str, int]


class Rows(NamedTuple):
    """The records of one shard, in order. Columns have one entry a record."""

    keys: list[bytes]
    sizes: Ints
    mtimes: Ints
    places: Sequence[int]  # of the records, for the source
    source: Source | None  # None: they cannot be read here


class Differences(NamedTuple):
    """What an update finds besides what is to be packed, by the numbers of records."""

    gone: Ints  # of those that the source has not, and that are to go
    noted: Ints  # of those that stay, and of whose files size and time are to be noted
    sizes: Ints
    times: Ints
    must_commit: bool  # whatever becomes of records


@dataclass(frozen=True)
class Plan:
    """Records in the order they are packed, and where shards begin.

    Shard k is [bounds[k]:bounds[k+1]]. fields, classes, options, keys and sizes make the dataset's
    id.
    """

    fields: tuple[tuple[str, str], ...]  # name and kind, the key first
    classes: tuple[str, ...] | None
    options: PackOptions
    problems: Sequence[Problem]  # files that cannot be packed by what the listing says of them
    ignored: int
    notes: list[str]
    bounds: Ints
    shard_bytes: Ints  # (shards,) of the source
    dataset_id: bytes
    changes: bytes  # SHA-256 of all times of change
    rows: Callable[[int], Rows]  # of a shard
    before: Before = field(default_factory=dict)
    # Made before the shards are: what the source is as a whole, and what else was asked for.
    ahead: Plain | None = None
    first: int = 0  # number of its first shard: of those that are added to a dataset, behind others
    on_duplicate: str = ""  # of keys that this dataset has: as of `append`; "": there is none
    over: str = ""  # the id of the version of this dataset for which it was made
    command: str = "pack"  # of shardio, that commits its shards
    base: bytes = b""  # of an update: by which the shards that it compared are known
    differences: Callable[[], Differences] | None = None  # of an update

    @property
    def shards(self) -> int:
        """Return how many shards it has."""
        return len(self.bounds) - 1

    @property
    def records(self) -> int:
        """Return how many records it has."""
        return int(self.bounds[-1])

    def records_of(self, shard: int) -> int:
        """Return how many records a shard has."""
        return int(self.bounds[shard + 1] - self.bounds[shard])

    @property
    def identity(self) -> dict[str, Any]:
        """Return what makes the dataset's id, with keys and sizes, as plain values."""
        return {"fields": self.fields, "classes": self.classes, "options": self.options.record()}

    def with_dataset_id(self, sizes: Ints) -> Plan:
        """Return the plan with the id of its dataset, 16 bytes: never of time, host or path.

        sizes: of all records
        """
        seal = hashlib.sha256(_SEALED + b"%d\n" % VERSION + json_line(self.identity))
        seal.update(sizes.astype("<i8").tobytes())
        for number, rows in enumerate(self.all_rows()):
            seal.update(b"\0" * (number > 0) + b"\0".join(rows.keys))
        return replace(self, dataset_id=seal.digest()[:16])

    def added_to(
        self, dataset_id: bytes, first: int, command: str, on_duplicate: str, over: str
    ) -> Plan:
        """Return the plan for a dataset that is there, whose shards are followed by these.

        What makes an id is among what must not change while the shards are built.
        """
        changes = hashlib.sha256(self.changes + self.dataset_id + b"%d" % first).digest()
        there = replace(self, dataset_id=dataset_id, first=first, on_duplicate=on_duplicate)
        return replace(there, changes=changes, command=command, over=over)

    def updating(self, base: bytes, found: Differences) -> Plan:
        """Return the plan with what else becomes of the dataset, known by its shards."""
        changes = hashlib.sha256(self.changes + base + found.gone.astype("<i8").tobytes()).digest()
        return replace(self, changes=changes, base=base, differences=lambda: found)

    def all_rows(self) -> Iterable[Rows]:
        """Give the records of all shards, one shard after the other."""
        return map(self.rows, range(self.shards))

    def same(self, other: Plan) -> bool:
        """Return whether a packing begun under one can go on under the other."""
        return (
            (self.dataset_id, self.first) == (other.dataset_id, other.first)
            and (self.changes, self.on_duplicate) == (other.changes, other.on_duplicate)
            and self.command == other.command
            and np.array_equal(self.bounds, other.bounds)
        )


@dataclass(frozen=True)
class _Listed:
    """The records of shards, of a listing."""

    listing: Listing
    packed: Ints  # places in it, in the order of the shards
    bounds: Ints

    def __call__(self, shard: int) -> Rows:
        one, numbers = self.listing, self.packed[self.bounds[shard] : self.bounds[shard + 1]]
        places = numbers if one.places is None else one.places[numbers]
        keys = [one.keys[i] for i in numbers.tolist()]
        return Rows(keys, one.sizes[numbers], one.mtimes[numbers], places.tolist(), one.source)


def make_plan(listing: Listing, options: PackOptions, each: int | None = None) -> Plan:
    """Order the records and cut them into shards by their bytes, as the options say.

    each: bytes of every record as it will be packed, where that is known; default: those it has
    """
    shuffle, shard_size, notes = options.shuffle, options.shard_size, list(listing.notes)
    if shuffle is None:
        shuffle = listing.shuffled
        if not shuffle:
            notes.append(
                "packed in stored order, since the source is read slowly in any other; --shuffle "
                "shuffles it nevertheless"
            )
    seed, count = options.seed or 0, len(listing.keys)
    packed = rng.permutation(count, rng.key(rng.PACK, seed)) if shuffle else np.arange(count)
    listed = listing.sizes[packed]
    bytes_packed = listed if each is None else np.full(count, each, np.int64)
    if shard_size is None:
        shard_size = usual_shard_size(int(bytes_packed.sum()))
    decided: dict[str, Any] = {"shuffle": shuffle, "shard_size": shard_size}
    decided["seed"] = seed if shuffle else None
    if absent := set(listing.absent):  # `unpack` makes no folders of these
        decided["absent"] = [i for i, name in enumerate(listing.classes or ()) if name in absent]
    bounds = cut(bytes_packed, shard_size, options.max_records)
    plan = Plan(
        fields=((KEY, "key"), *listing.fields),
        classes=listing.classes,
        options=PackOptions.of(options.record() | decided | dict(listing.options)),
        problems=list(listing.problems),
        ignored=listing.ignored,
        notes=notes,
        bounds=bounds,
        shard_bytes=np.add.reduceat(listed, bounds[:-1]) if count else listed,
        dataset_id=b"",
        changes=hashlib.sha256(listing.mtimes[packed].astype("<i8").tobytes()).digest(),
        rows=_Listed(listing, packed, bounds),
    )
    return plan.with_dataset_id(listed)


def usual_shard_size(size: int) -> int:
    """Return the bytes of a shard, where nobody asked for another size, of a dataset of so many."""
    return max(min(SHARD_SIZE, -(-size // MIN_SHARDS)), MIN_SHARD_SIZE)


def prepare(plan: Plan, source: Source, request: SourceRequest) -> Plan:
    """Return the plan with what its journal needs so that the source is read by it, in pieces."""
    asked = {"root": request.root is not None, "fields": dict(request.fields)}
    return replace(plan, ahead={"source": source.describe(), **asked})


def cut(each: Ints, shard_size: int, max_records: int | None) -> Ints:
    """Return the bounds of the fullest shards, in order.

    each: bytes of every record. A shard has at most `shard_size` of them, or one larger record.
    """
    ends = np.cumsum(each)
    bounds = [0]
    while bounds[-1] < len(each):
        start = bounds[-1]
        before = int(ends[start - 1]) if start else 0
        stop = max(int(np.searchsorted(ends, before + shard_size, "right")), start + 1)
        bounds.append(min(stop, start + max_records) if max_records else stop)
    return np.array(bounds, np.int64)


def changed(
    before: Mapping[str, Any], after: Mapping[str, Any], by_default: Sequence[str] = ()
) -> list[str]:
    """Say which recorded options differ, a line each; not what follows from another that does.

    by_default: those of `after` that nobody gave.
    """
    names = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    if "resize" in names and None in (before.get("resize"), after.get("resize")):
        names.discard("quality")
    if "shuffle" in names:
        names.discard("seed")
    lines = []
    for name in sorted(names):
        was, now = (shown_option(name, one.get(name)) for one in (before, after))
        default = ", the default" if name in by_default else ""
        lines.append(f"{name}: was {was}, now {now}{default}")
    return lines


def shown_option(name: str, value: Any) -> str:
    """Show the value of an option as it is given."""
    if value is None:
        return "not given"
    if name == "shard_size" and isinstance(value, int):
        return exact_size(value)
    if name == "where" and isinstance(value, dict):
        return printable(" and ".join(field + _condition(one) for field, one in value.items()))
    return printable(repr(value))


def _condition(wanted: Any) -> str:
    """Show what a field is to be: =cat,dog or >=256."""
    if isinstance(wanted, str):
        return wanted if wanted.startswith(("=", "!", "<", ">")) else f" by {wanted}"
    return "=" + ",".join("null" if one is None else str(one) for one in wanted)


def difference(old: Plan, new: Plan) -> str:
    """Say what changed between two plans, for the user who must decide."""
    before, after = (
        one.options.record() | {"on_duplicate": one.on_duplicate or None} for one in (old, new)
    )
    lines = [f"  option {line}" for line in changed(before, after)]
    if old.command != new.command:
        lines.append(f"  it was begun by `shardio {old.command}`")
    if old.classes != new.classes:
        lines.append("  the classes differ")
    was, now = (
        {
            key: about
            for rows in one.all_rows()
            for key, *about in zip(
                rows.keys, rows.sizes.tolist(), rows.mtimes.tolist(), strict=True
            )
        }
        for one in (old, new)
    )
    for what, keys in (
        ("is new", now.keys() - was.keys()),
        ("is gone", was.keys() - now.keys()),
        ("was changed", {key for key in was.keys() & now.keys() if was[key] != now[key]}),
    ):
        lines += [f"  {printable(key)} {what}" for key in sorted(keys)[:5]]
        if len(keys) > 5:
            lines.append(f"  ... {len(keys) - 5:,} more: {what}")
    if not lines and old.base and new.base:
        lines.append("  other records are to go: --gone, or the dataset, was changed")
    return "\n".join(lines)


def json_line(value: Mapping[str, Any]) -> bytes:
    """Write a line of JSON, the same for equal values."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii") + b"\n"
