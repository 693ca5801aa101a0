"""The plan of a packing: which file goes into which shard, before a byte is read.

A plan is a pure function of the listing and the options, so that every process, and every machine
of a job array, makes the same one. While the packing is unfinished the plan lies beside the shards
as the journal `.shardio-plan`; packers lock byte k of it for shard k (lock.py).

    journal   "shardio-plan 0\\n" | header: one line of JSON | sizes i64[n] | mtimes i64[n]
              | key lengths u32[n] | keys | SHA-256 of all before
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import DamageError, OptionError, printable
from ..formats.base import MAX_RECORDS
from ..formats.record import VERSION
from ..names import KEY, key_bytes, key_text
from ..order import rng
from ..storage.lock import PLAN_MAGIC
from ..units import check_int, check_size, exact_size
from .sources.base import Ints, Listing

SHARD_SIZE = 256 << 20  # bytes: full sequential bandwidth, and small enough to cache and assign
MIN_SHARDS = 16  # that the default aims at,
MIN_SHARD_SIZE = 1 << 20  # but not with shards below this: opening costs more than a MiB's reading

# Shards that lay in OUT when a packing was begun: name to time of change. They are of another
# packing, which may have had other content under the same id; all others are of this one. (Being
# younger than the journal would say less: clocks of two machines differ, and ticks are coarse.)
Before = dict[str, int]


@dataclass(frozen=True)
class Plan:
    """Records in the order they are packed, and where shards begin.

    Shard k is [bounds[k]:bounds[k+1]]. `header`: {"fields", "classes", "options", "problems",
    "ignored", "notes"}; the first three, with keys and sizes, make the dataset's id. `places` are
    the records' for the listing's source; a journal does not hold them.
    """

    header: dict[str, Any]
    keys: list[bytes]
    sizes: Ints
    mtimes: Ints
    bounds: Ints
    before: Before = field(default_factory=dict)
    places: Ints | None = None

    @property
    def shards(self) -> int:
        return len(self.bounds) - 1

    @property
    def dataset_id(self) -> bytes:
        """16 bytes: never of time, host or path."""
        named = {name: self.header[name] for name in ("fields", "classes", "options")}
        seal = hashlib.sha256(PLAN_MAGIC + b"%d\n" % VERSION + _line(named))
        seal.update(self.sizes.astype("<i8").tobytes())
        seal.update(b"\0".join(self.keys))
        return seal.digest()[:16]

    @property
    def problems(self) -> list[tuple[bytes, str]]:
        """Files that cannot be packed by what the listing says of them: key, reason."""
        return [(key_bytes(key), why) for key, why in self.header["problems"]]

    def dump(self) -> bytes:
        body = b"".join(
            (
                PLAN_MAGIC,
                _line(self.header | {"bounds": self.bounds.tolist(), "before": self.before}),
                self.sizes.astype("<i8").tobytes(),
                self.mtimes.astype("<i8").tobytes(),
                np.array([len(key) for key in self.keys], "<u4").tobytes(),
                *self.keys,
            )
        )
        return body + hashlib.sha256(body).digest()

    def same(self, other: Plan) -> bool:
        """Whether a packing begun under one can go on under the other."""
        return (
            self.dataset_id == other.dataset_id
            and np.array_equal(self.mtimes, other.mtimes)
            and np.array_equal(self.bounds, other.bounds)
        )


def options(
    *,
    source: str = "imagefolder",
    shard_size: int | str | None,
    max_records: int | None,
    shuffle: bool | None,
    seed: int,
    extra: dict[str, Any],
) -> dict[str, Any]:
    """What is recorded of how a dataset was packed. shard_size, shuffle None: the source decides.

    Raises OptionError.
    """
    seed = check_int("seed", seed, 0, (1 << 64) - 1)
    shuffle = None if shuffle is None else bool(shuffle)
    return {
        "source": source,
        "shuffle": shuffle,
        "seed": seed if shuffle is not False else None,
        "shard_size": None if shard_size is None else check_size("shard_size", shard_size),
        "max_records": (
            None if max_records is None else check_int("max_records", max_records, 1, MAX_RECORDS)
        ),
    } | extra


def part(given: tuple[int, int] | str | None) -> tuple[int, int] | None:
    """(i, n) or "i/n", i from 1 to n, as the former. Raises OptionError."""
    if given is None:
        return None
    try:
        first, last = map(int, given.split("/")) if isinstance(given, str) else given
        i, n = check_int("part", first, -(1 << 62)), check_int("part", last, -(1 << 62))
    except (TypeError, ValueError):
        raise OptionError(
            f"part is {printable(repr(given))}; expected I/N, like 1/4, or (1, 4)"
        ) from None
    if not 1 <= i <= n:
        raise OptionError(
            f"part {i}/{n}: parts count from 1, so from 1/{max(n, 1)} to {max(n, 1)}/{max(n, 1)}"
        )
    return i, n


def share(shards: int, part: tuple[int, int] | None) -> tuple[int, int]:
    """The shards [start, stop) that a part builds."""
    if part is None:
        return 0, shards
    i, n = part
    return shards * (i - 1) // n, shards * i // n


def make(listing: Listing, wanted: dict[str, Any], each: int | None = None) -> Plan:
    """Order the records and cut them into shards by their bytes, as the options say.

    each: bytes of every record as it will be packed, where that is known; default: those it has
    """
    shuffle, seed, shard_size = (wanted[name] for name in ("shuffle", "seed", "shard_size"))
    notes = list(listing.notes)
    if shuffle is None:
        shuffle = listing.shuffled
        if not shuffle:
            notes.append(
                "packed in stored order, since the source is read slowly in any other; --shuffle "
                "shuffles it nevertheless"
            )
    count = len(listing.keys)
    packed = rng.permutation(count, rng.key(rng.PACK, seed)) if shuffle else np.arange(count)
    listed = listing.sizes[packed]
    bytes_packed = listed if each is None else np.full(count, each, np.int64)
    if shard_size is None:
        fair = -(-int(bytes_packed.sum()) // MIN_SHARDS)
        shard_size = max(min(SHARD_SIZE, fair), MIN_SHARD_SIZE)
    wanted = wanted | {
        "shuffle": shuffle,
        "seed": seed if shuffle else None,
        "shard_size": shard_size,
        **listing.options,
    }
    if listing.absent:  # `unpack` makes no folders of these
        known = listing.classes or ()
        absent = set(listing.absent)
        wanted["absent"] = [i for i, name in enumerate(known) if name in absent]
    return Plan(
        header={
            "fields": [list(pair) for pair in ((KEY, "key"), *listing.fields)],
            "classes": None if listing.classes is None else list(listing.classes),
            "options": wanted,
            "problems": [[key_text(key), reason] for key, reason in listing.problems],
            "ignored": listing.ignored,
            "notes": notes,
        },
        keys=[listing.keys[i] for i in packed.tolist()],
        sizes=listed,
        mtimes=listing.mtimes[packed],
        bounds=cut(bytes_packed, shard_size, wanted["max_records"]),
        places=packed if listing.places is None else listing.places[packed],
    )


def cut(each: Ints, shard_size: int, max_records: int | None) -> Ints:
    """Bounds of the fullest shards, in order, of at most `shard_size` bytes, or one larger file."""
    ends = np.cumsum(each)
    bounds = [0]
    while bounds[-1] < len(each):
        start = bounds[-1]
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + shard_size, "right"))
        stop = max(stop, start + 1)
        bounds.append(min(stop, start + max_records) if max_records else stop)
    return np.array(bounds, np.int64)


def parse(data: bytes, where: str) -> Plan:
    """The bytes of a journal to its plan. Raises DamageError."""
    try:
        if data[-32:] != hashlib.sha256(memoryview(data)[:-32]).digest():
            raise ValueError("its checksum is wrong")
        if not data.startswith(PLAN_MAGIC):
            raise ValueError("it is of another version")
        at = data.index(b"\n", len(PLAN_MAGIC)) + 1
        header = json.loads(data[len(PLAN_MAGIC) : at])
        bounds = np.array(header.pop("bounds"), np.int64)
        before = header.pop("before")
        count = int(bounds[-1])
        listed, mtimes = np.frombuffer(data, "<i8", 2 * count, at).reshape(2, count)
        at += 16 * count
        ends = np.frombuffer(data, "<u4", count, at).cumsum(dtype=np.int64) + at + 4 * count
        starts = [at + 4 * count, *ends.tolist()]
        keys = [data[a:b] for a, b in zip(starts, ends.tolist(), strict=False)]
        return Plan(header, keys, listed, mtimes, bounds, before)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DamageError(
            f"{where}: the plan of an unfinished packing cannot be read: {error}. "
            "`shardio pack --restart` drops it"
        ) from None


def changed(
    before: dict[str, Any], after: dict[str, Any], by_default: Sequence[str] = ()
) -> list[str]:
    """Say which options differ, a line each; not of what follows from another one that does.

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
        lines.append(
            f"{name}: was {was}, now {now}" + (", the default" if name in by_default else "")
        )
    return lines


def shown_option(name: str, value: Any) -> str:
    """The value of an option, as it is given."""
    if value is None:
        return "not given"
    if name == "shard_size" and isinstance(value, int):
        return exact_size(value)
    if name == "where" and isinstance(value, dict):
        return printable(" and ".join(field + _condition(one) for field, one in value.items()))
    return printable(repr(value))


def _condition(wanted: Any) -> str:
    """What a field is to be: =cat,dog or >=256."""
    if isinstance(wanted, str):
        return wanted if wanted.startswith(("=", "!", "<", ">")) else f" by {wanted}"
    return "=" + ",".join("null" if one is None else str(one) for one in wanted)


def difference(old: Plan, new: Plan) -> str:
    """What changed between two plans, in words, for the user who must decide."""
    before, after = old.header["options"], new.header["options"]
    lines = [f"  option {line}" for line in changed(before, after)]
    if old.header["classes"] != new.header["classes"]:
        lines.append("  the classes differ")
    was = dict(
        zip(old.keys, zip(old.sizes.tolist(), old.mtimes.tolist(), strict=True), strict=True)
    )
    now = dict(
        zip(new.keys, zip(new.sizes.tolist(), new.mtimes.tolist(), strict=True), strict=True)
    )
    for what, keys in (
        ("is new", now.keys() - was.keys()),
        ("is gone", was.keys() - now.keys()),
        ("was changed", {key for key in was.keys() & now.keys() if was[key] != now[key]}),
    ):
        lines += [f"  {printable(key)} {what}" for key in sorted(keys)[:5]]
        if len(keys) > 5:
            lines.append(f"  ... {len(keys) - 5:,} more: {what}")
    return "\n".join(lines)


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii") + b"\n"
