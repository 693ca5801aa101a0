"""The journal of an unfinished packing: its bytes, and which files of a directory it vouches for.

What lies in OUT while a packing is unfinished, and is gone once it is committed:

    .shardio-plan               the journal: a plan, or a Writer's line; packers lock it (lock.py)
    .shardio-TOKEN-NAME.tmp     files being written
    .shardio-rejected-*.jsonl   what was left out, by shard, with on_error="skip"
    .shardio-sent-*.json        notes of shards that are in an object store (built.py)
    .shardio-scan-*.json        notes of files of others that a part of an index scanned
    .shardio-built-*.json       notes of shards that parts built here

and what stays, where the plan was made ahead, until another dataset is committed there:

    .shardio-planned            the journal's head: a part that starts again knows that it is done

    journal   "shardio-plan 1\\n" | one line of JSON: what makes the id, but for the records
              | pieces, one a shard: msgpack of its keys, sizes, times, and its piece of the source
              | a piece of what cannot be packed, and of an update one of what else it found
              | header: msgpack of all else | footer (lock.py)
         or   "shardio-writer 0\\n" | one line of JSON: of what cannot be resumed

What is called a journal below is its head, all but the pieces. The header has a checksum of each
piece, so that one is read without the others, and by a process that has no others.

shardio removes a file only when its name and its first bytes say that shardio wrote it, and only
what no manifest names.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import hashlib
import itertools
import json
import os
import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..dataset.reader import Reader
from ..errors import (
    DamageError,
    ExistsError,
    NotPackedError,
    ShardioError,
    StorageError,
    VersionError,
    printable,
)
from ..formats import begins_packed, manifest
from ..formats.sample import Schema, pack_columns, unpack_columns
from ..formats.version import MAGICS
from ..names import key_bytes, key_text
from ..storage import local
from ..storage.local import LocalDirectory
from ..storage.location import Target, locate
from ..storage.lock import FOOTER, JOURNAL, PLAN_MAGIC, SEAL, WRITER_MAGIC
from ..units import show_count
from .options import PackOptions
from .plan import Before, Differences, Plan, Rows, json_line
from .shard_writer import open_own
from .sources.base import Ints, Listing, Plain, Problem, Read, Source

ReadBytes = Callable[[int, int], bytes]  # start, length
Files = Mapping[bytes, tuple[int, int]]  # sizes and times in ns of files, by key
OwnList = tuple[list[Problem], Files]  # of what was left out
Reopen = Callable[[str, str, Plain, Plain], Source]  # kind of source, split, described, piece

WORK = ".shardio-append"  # in a dataset: the directory where shards for it are built
REJECTED = "rejected.jsonl"
# Size and time of a file in it: a list without them is a user's, where a record has its key.
UNKNOWN = (0, 0)
PLANNED = ".shardio-planned"
_DROPS = "The command that left it, with --restart, drops it"
_SHOWN = 10  # files that are named
_MOST = 1 << 30  # bytes of a file that is read whole
NOTE_SENT, NOTE_BUILT = ".shardio-sent-{}.json", ".shardio-built-{}.json"  # see built.py
SCAN_NOTE = ".shardio-scan-{}.json"
_KINDS: dict[str, Any] = {
    "dataset_id": bytes,
    "changes": bytes,
    "before": dict,
    "notes": list,
    "ignored": int,
    "problems": int,
    "ahead": dict | None,
    "first": int,
    "on_duplicate": str,
    "over": str,
    "command": str,
    "base": bytes,
}
# What plans of earlier builds do not say.
_EARLIER: dict[str, Any] = {"first": 0, "on_duplicate": "", "over": "", "base": b""}
_COMMANDS = ("pack", "append", "update", "compact")  # of which there are plans
# What is raised by reading values that are not those that were written.
_UNFIT = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)
_SHARD = re.compile(r"([0-9]{5,})-[0-9a-f]{8}(\..+)")  # number, start of its content's hash, ending


# --- its bytes ------------------------------------------------------------------------------------


def dump(plan: Plan) -> Iterator[bytes]:
    """Write the journal of a plan: beginning, a piece for each shard, those of the rest, end."""
    start = PLAN_MAGIC + json_line(plan.identity)
    yield start
    ends, checksums = [len(start)], []
    shards = (_plain(rows, ahead=plan.ahead is not None) for rows in plan.all_rows())
    rest: list[Any] = [list(plan.problems)]
    if plan.differences is not None:
        rest.append(plan.differences()._asdict())
    for values in itertools.chain(shards, rest):
        piece = pack_columns(values)
        ends.append(ends[-1] + len(piece))
        checksums.append(_checksum(piece))
        yield piece
    names = ["ignored", "notes", "shard_bytes", "dataset_id", "changes", "before", "ahead", "first"]
    names += ["on_duplicate", "over", "command", "base", "bounds"]
    header: Plain = {name: getattr(plan, name) for name in names}
    header |= {"problems": len(plan.problems), "ends": np.array(ends), "checksums": checksums}
    end = pack_columns(header)
    places = FOOTER.pack(len(start), ends[-1], b"")[:-SEAL]
    yield end + places + hashlib.sha256(start + end + places).digest()


def _plain(rows: Rows, ahead: bool) -> Plain:
    """Return rows as plain values. ahead: with their piece of the source, so that it is read by it.

    What is in both is kept once.
    """
    plain: Plain = {"keys": rows.keys, "sizes": rows.sizes, "mtimes": rows.mtimes}
    if ahead and rows.source is not None:
        piece = rows.source.piece(np.array(rows.places, np.int64))
        shared = [name for name in plain if name in piece and _equal(plain[name], piece[name])]
        own = {name: value for name, value in piece.items() if name not in shared}
        plain["source"] = {"own": own, "shared": shared}
    return plain


def _equal(one: Any, other: Any) -> bool:
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else bool(one == other)


def _checksum(piece: bytes) -> bytes:
    return hashlib.blake2b(piece, digest_size=8).digest()


@dataclass(frozen=True)
class _Pieces:
    """The records of shards, of the pieces of a journal."""

    shown: str
    read: ReadBytes
    bounds: Ints  # of the shards, in records
    ends: Sequence[int]
    checksums: Sequence[bytes]
    reopen: Callable[[Plain], Source] | None  # the source, by a piece of it

    def load(self, number: int) -> Any:
        """Read a piece: of a shard, or one of those behind these. Raises ValueError."""
        piece = self.read(self.ends[number], self.ends[number + 1] - self.ends[number])
        if _checksum(piece) != self.checksums[number]:
            raise ValueError("its checksum is wrong")
        return unpack_columns(piece)

    def __call__(self, shard: int) -> Rows:
        try:
            found = self.load(shard)
            about = found.get("source")
            if about is not None:
                about = about["own"] | {name: found[name] for name in about["shared"]}
            keys, sizes, mtimes = columns = found["keys"], found["sizes"], found["mtimes"]
            records = int(self.bounds[shard + 1] - self.bounds[shard])
            if any(len(one) != records for one in columns) or set(map(type, keys)) - {bytes}:
                raise ValueError(f"it is not of {records:,} records")
            if {sizes.dtype.kind, mtimes.dtype.kind} - {"i"} or (about is None and self.reopen):
                raise ValueError("it has not what reads its records")
            source = None if about is None or self.reopen is None else self.reopen(about)
        except _UNFIT as error:
            raise unreadable(self.shown, shard, error) from None
        guarded = None if source is None else Guarded(source, self.shown, shard)
        return Rows(keys, sizes, mtimes, range(len(keys)), guarded)


def unreadable(shown: str, shard: int, error: Exception) -> DamageError:
    """Return the error for the piece of a shard that holds what nobody wrote."""
    return DamageError(f"{shown}: the plan of shard {shard} cannot be read: {error}. {_DROPS}")


class Guarded(Source):
    """The source of a piece that lay in a file: values that do not fit are an error of the plan."""

    def __init__(self, source: Source, shown: str, shard: int) -> None:
        self._source, self._shown, self._shard = source, shown, shard

    @contextlib.contextmanager
    def open(self) -> Iterator[Read]:
        """Open the source."""
        with contextlib.ExitStack() as stack:
            read = self._try(stack.enter_context, self._source.open())
            yield functools.partial(self._try, read)

    def will_need(self, place: int) -> None:
        """Announce a record to the source."""
        self._try(self._source.will_need, place)

    def describe(self) -> Plain:
        """Return what the source describes."""
        return self._source.describe()

    def piece(self, places: Ints) -> Plain:
        """Return the source's piece."""
        found: Plain = self._try(self._source.piece, places)
        return found

    def _try(self, function: Callable[[Any], Any], given: Any) -> Any:
        try:
            return function(given)
        except ShardioError:
            raise
        except _UNFIT as error:
            raise unreadable(self._shown, self._shard, error) from error


class _Problems(Sequence[Problem]):
    """The problems in a journal, which may be millions: read when one is asked for."""

    def __init__(self, count: int, pieces: _Pieces) -> None:
        self._count, self._pieces = count, pieces

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._loaded[index]

    @functools.cached_property
    def _loaded(self) -> list[Problem]:
        pieces = self._pieces
        try:
            found = [(key, why) for key, why in pieces.load(len(pieces.bounds) - 1)]
            if {(type(key), type(why)) for key, why in found} - {(bytes, str)}:
                raise ValueError("it is not of keys and reasons")
            return found
        except (TypeError, ValueError) as error:
            raise DamageError(
                f"{pieces.shown}: the list of what cannot be packed cannot be read: {error}. "
                f"{_DROPS}"
            ) from None


def _differences(pieces: _Pieces) -> Differences:
    """Read what an update found besides what is to be packed. Raises DamageError."""
    try:
        found = Differences(**pieces.load(len(pieces.bounds)))
        *columns, must_commit = found
        if {(type(one), one.dtype.str, one.ndim) for one in columns} != {(np.ndarray, "<i8", 1)}:
            raise ValueError("it is not of numbers")
        if type(must_commit) is not bool or len({*map(len, columns[1:])}) != 1:
            raise ValueError("its columns do not fit each other")
        return found
    except _UNFIT as error:
        raise DamageError(
            f"{pieces.shown}: what an update found cannot be read: {error}. {_DROPS}"
        ) from None


def _no_pieces(start: int, length: int) -> bytes:
    raise AssertionError("the pieces of this plan are not asked for")


def parse(
    data: bytes, directory: str, read: ReadBytes = _no_pieces, reopen: Reopen | None = None
) -> Plan:
    """Read the plan in a journal. Raises DamageError, NotPackedError where it has none.

    read    reads bytes of the whole journal, at a place: those of a piece
    reopen  opens the source of a plan that was made ahead, where records are to be read
    """
    if data.startswith(WRITER_MAGIC):
        raise NotPackedError(
            f"{printable(directory)}: not packed: a Writer ended here before its stream did: write "
            "it again; or `shardio copy` or `shardio index` did not finish: run it again, of parts "
            "at last without --part"
        )
    shown = os.path.join(directory, JOURNAL)
    try:
        if not data.startswith(PLAN_MAGIC):
            raise ValueError("it is of another version")
        if data[-SEAL:] != hashlib.sha256(memoryview(data)[:-SEAL]).digest():
            raise ValueError("its checksum is wrong")
        at, _, _ = FOOTER.unpack(data[-FOOTER.size :])
        header = _EARLIER | json.loads(data[len(PLAN_MAGIC) : at])
        header |= unpack_columns(data[at : -FOOTER.size])
        header.setdefault("command", "append" if header["on_duplicate"] else "pack")
        header["fields"] = Schema(header["fields"]).fields
        header["classes"] = None if header["classes"] is None else tuple(header["classes"])
        header["options"] = PackOptions.of(header["options"])
        _check(header)
        ends, checksums = header.pop("ends").tolist(), header.pop("checksums")
        open_piece = None
        if reopen is not None and header["ahead"] is not None:
            options, described = header["options"], header["ahead"]["source"]
            open_piece = functools.partial(reopen, options.source, options.split, described)
        pieces = _Pieces(shown, read, header["bounds"], ends, checksums, open_piece)
        header["problems"] = _Problems(header["problems"], pieces)
        if header["command"] == "update":
            header["differences"] = functools.partial(_differences, pieces)
        plan = Plan(**header, rows=pieces)
        if json_line(plan.identity) != data[len(PLAN_MAGIC) : at]:
            raise ValueError("its options are not as they are written")
        return plan
    except (*_UNFIT, RecursionError, struct.error) as error:
        raise DamageError(
            f"{shown}: the plan of an unfinished packing cannot be read: {error}. {_DROPS}"
        ) from None


def _check(header: Plain) -> None:
    """Raise ValueError, or another of _UNFIT, where a header is not what `dump` writes."""
    bounds, shard_bytes, ends = (header[name] for name in ("bounds", "shard_bytes", "ends"))
    if any(one.dtype != np.int64 or one.ndim != 1 for one in (bounds, shard_bytes, ends)):
        raise ValueError("its numbers are of another type")
    more = header["command"] == "update"  # a piece
    lengths = (len(shard_bytes) + 1, len(ends) - 1 - more, len(header["checksums"]) - more)
    if lengths != (len(bounds), len(bounds), len(bounds)):
        raise ValueError("it says different numbers of shards")
    if (
        not 0 <= header["problems"] < 1 << 62
        or not 0 <= header["first"] <= manifest.MAX_SHARDS
        or bounds[0] != 0
        or np.any(np.diff(bounds) < 1)
        or np.any(np.diff(ends) < 1)
    ):
        raise ValueError("its shards do not follow each other")
    options = header["options"]
    manifest.check_options(options.record())
    names = (options.source, options.split, *options.splits, *(header["classes"] or ()))
    if {*map(type, names)} - {str} or options.format not in manifest.SUFFIXES:
        raise ValueError("its options or classes are of another type")
    if header["command"] not in _COMMANDS:
        raise ValueError(f"its command is {printable(repr(header['command']))}")
    for name, kind in _KINDS.items():
        if not isinstance(header[name], kind):
            raise ValueError(f"{name} is of another type")
    if len(header["dataset_id"]) != 16:
        raise ValueError("its dataset id is none")
    ahead = header["ahead"]
    kinds = {"source": dict, "root": bool, "fields": dict}
    if ahead is not None and {name: type(one) for name, one in ahead.items()} != kinds:
        raise ValueError("what it says of the source is of another type")


def of_writer(dataset_id: bytes, before: Before) -> bytes:
    """Write a new journal of what cannot be resumed, unlike any other."""
    value = {"id": dataset_id.hex(), "before": before, "token": local.token()}
    return WRITER_MAGIC + json.dumps(value).encode()


def identity(journal: bytes) -> tuple[bytes, Before]:
    """Return the id of a journal's dataset, and the shards not its own. Raises DamageError."""
    if not journal.startswith(WRITER_MAGIC):
        plan = parse(journal, "")
        return plan.dataset_id, plan.before
    try:
        value = json.loads(journal[len(WRITER_MAGIC) :])
        return bytes.fromhex(value["id"]), dict(value["before"])
    except (KeyError, TypeError, ValueError):
        raise DamageError(f"{JOURNAL}: a Writer's journal cannot be read") from None


# --- what it says of the directory ----------------------------------------------------------------


def is_resumable(directory: str, journal: bytes) -> bool:
    """Return whether a packing may go on: it is no Writer's, and is not committed."""
    return not journal.startswith(WRITER_MAGIC) and not is_committed(directory, journal)


def grown_from(directory: str) -> str | None:
    """Return the dataset for which shards are built in a directory; None: it is a packing's own."""
    folder, name = os.path.split(directory)
    return folder if name == WORK else None


def planner(plan: Plan) -> str:
    """Return the command that made a plan ahead, or would make it."""
    return "shardio plan" if plan.command == "pack" else f"shardio {plan.command} --plan"


def is_committed(directory: str, journal: bytes) -> bool:
    """Return whether the dataset of a journal is committed, though nobody has cleaned up."""
    if grown_from(directory) is not None:
        return _is_appended(directory, journal)
    try:
        dataset_id, before = identity(journal)
        same = manifest.load(locate(directory)).dataset_id == dataset_id
        return same and named_shards(directory) <= new_shards(directory, before)
    except (NotPackedError, DamageError, VersionError):
        return False


def _is_appended(directory: str, journal: bytes) -> bool:
    """Return whether a dataset has all shards that were built for it in a directory.

    A plan without any tells nothing: whether what it says is done, its dataset does (grow.py).
    """
    try:
        plan, there = parse(journal, directory), manifest.load(locate(grown_from(directory) or ""))
    except (NotPackedError, DamageError, VersionError):
        return False
    numbers = range(plan.first, plan.first + plan.shards)
    if not numbers or there.dataset_id != plan.dataset_id or there.shards < numbers.stop:
        return False
    return new_shards(directory, plan.before) <= {there.shard(number).name for number in numbers}


def has_work(directory: str, journal: bytes) -> bool:
    """Return whether an unfinished packing has what going on with it would keep.

    That is a shard, or a plan that was made ahead.
    """
    if not journal.startswith(WRITER_MAGIC) and parse(journal, directory).ahead is not None:
        return True
    dataset_id, before = identity(journal)
    if any(map(is_note, os.listdir(directory))):
        return True
    # Not by time alone: another packer may have committed since the journal was made.
    return any(shard_id(directory, name) == dataset_id for name in new_shards(directory, before))


def clean(directory: str, journal: bytes) -> None:
    """Remove what only an unfinished packing needs; the journal last, since it explains the rest.

    Shards go that carry its dataset's id, were not there before it, and are named by no manifest; a
    damaged journal removes none. `journal` was read through its lock: opening the file again would
    end the lock.
    """
    with contextlib.suppress(DamageError, VersionError):
        dataset_id, before = identity(journal)
        for name in sorted(new_shards(directory, before) - named_shards(directory)):
            if shard_id(directory, name) == dataset_id:
                local.remove(os.path.join(directory, name))
    for name in os.listdir(directory):
        if is_own_note(directory, name) or is_rejected_part(directory, name):
            local.remove(os.path.join(directory, name))
    remove_temporaries(directory)
    if kept_plan(directory) is None:
        local.remove(os.path.join(directory, PLANNED))
    local.remove(os.path.join(directory, JOURNAL))
    local.sync_directory(directory)


def kept_plan(directory: str) -> Plan | None:
    """Return the plan, without records, that the dataset of a directory was packed under.

    None where it was not made ahead, or another dataset has taken its place.
    """
    with contextlib.suppress(FileNotFoundError, DamageError, NotPackedError, StorageError):
        plan = parse(LocalDirectory(directory).read(PLANNED, _MOST), directory)
        committed = manifest.load_if_packed(locate(directory))
        if committed is not None and committed.dataset_id == plan.dataset_id:
            return replace(plan, problems=[])  # `rejected.jsonl` has them
    return None


# --- shards ---------------------------------------------------------------------------------------


def shard_number(name: str) -> int | None:
    """Return the number in a shard's file name; None when it is no shard's name."""
    match = _SHARD.fullmatch(name)
    return int(match[1]) if match and match[2] in manifest.SUFFIXES.values() else None


def shards_in(directory: str) -> Before:
    """Return all files with names of shards, and their times of change in ns."""
    found = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            if shard_number(entry.name) is not None:
                with contextlib.suppress(FileNotFoundError):  # a restart has just removed it
                    found[entry.name] = entry.stat(follow_symlinks=False).st_mtime_ns
    return found


def new_shards(directory: str, before: Before) -> set[str]:
    """Return the files with names of shards that were not there, or were others, before."""
    return {name for name, born in shards_in(directory).items() if before.get(name) != born}


def named_shards(directory: str) -> set[str]:
    """Return the names of the shards that a manifest names here, if one is. Raises DamageError."""
    committed = manifest.load_if_packed(locate(directory))
    if committed is None:
        return set()
    return {committed.shard(number).name for number in range(committed.shards)}


def shard_id(directory: str, name: str) -> bytes | None:
    """Return the dataset id in a shard's header; None when the file is not one of our shards."""
    try:
        with contextlib.closing(locate(directory).open(name)) as file:
            return open_own(file, name).dataset_id
    except (OSError, StorageError, DamageError, VersionError):
        return None


# --- temporary files ------------------------------------------------------------------------------


def is_ours(directory: str, name: str) -> bool:
    """Return whether a file is a temporary one of shardio, by its name and its first bytes."""
    if not local.is_temporary(name):
        return False
    # A packer that is killed between link and unlink leaves the journal under two names. Opening
    # the second would end the lock on the first.
    with contextlib.suppress(OSError):
        if os.path.samefile(os.path.join(directory, name), os.path.join(directory, JOURNAL)):
            return True
    if (start := first_bytes(directory, name, 64)) is None:
        return False
    # Journals, lists of rejected keys, manifests, and what these name.
    ours = (PLAN_MAGIC, WRITER_MAGIC, b'{"', b"{\n", *MAGICS.values())
    begins = any(start.startswith(magic) or magic.startswith(start) for magic in ours)
    return begins or begins_packed(start)


def first_bytes(directory: str, name: str, count: int) -> bytes | None:
    """Read the first bytes of a file, or all of a shorter one; None where it cannot be read."""
    try:
        with contextlib.closing(locate(directory).open(name)) as file:
            return file.read(0, min(file.size, count))
    except (OSError, StorageError, DamageError):
        return None


def remove_temporaries(directory: str, token: str | None = None) -> None:
    """Remove temporary files of one process, or of all, which the caller knows to have ended."""
    for name in os.listdir(directory):
        if is_ours(directory, name) and (token is None or f"-{token}-" in name):
            local.remove(os.path.join(directory, name))


def is_note(name: str) -> bool:
    """Return whether a file is named as the note of a shard that is in an object store."""
    return fnmatch.fnmatchcase(name, NOTE_SENT.format("*"))


def sent_numbers(directory: str) -> set[int]:
    """Return the numbers of the shards of which there are such notes."""
    found = (re.fullmatch(NOTE_SENT.format(r"(\d+)"), name) for name in os.listdir(directory))
    return {int(one[1]) for one in found if one is not None}


def is_own_note(directory: str, name: str, *kinds: str) -> bool:
    """Return whether a file is a note of a shard, by its name and its first bytes.

    kinds: the names of such notes; default: of all that there are
    """
    named = (kind.format("*") for kind in kinds or (NOTE_SENT, NOTE_BUILT, SCAN_NOTE))
    return any(fnmatch.fnmatchcase(name, one) for one in named) and (
        first_bytes(directory, name, 1) == b"{"
    )


# --- what was left out ----------------------------------------------------------------------------


def write_rejected(
    place: Target,
    problems: Sequence[Problem],
    part: str | None = None,
    files: Files | None = None,
) -> None:
    """Write the list of what a dataset leaves out, for its user.

    part: a shard, by its name, or the scan: what this one left out, until the commit. files: those
    that are not to be tried again while they stay so
    """
    name = REJECTED if part is None else part_list(part)
    place.write(name, _dump_rejected(problems, files or {}))


def files_in(plan: Plan, keys: Collection[bytes]) -> dict[bytes, tuple[int, int]]:
    """Return the sizes and times that a plan has of the files of these keys."""
    found = dict[bytes, tuple[int, int]]()
    for rows in plan.all_rows():
        about = zip(rows.sizes.tolist(), rows.mtimes.tolist(), strict=True)
        found |= {key: of for key, of in zip(rows.keys, about, strict=True) if key in keys}
    return found


def remove_rejected(place: Target) -> None:
    """Remove the list of rejected keys, if packing wrote it."""
    if own_rejected(place) is not None:
        place.remove(REJECTED)


def refuse_rejected(place: Target, empty: bool) -> None:
    """Raise ExistsError where a list of rejected keys would replace a file that is none.

    empty: nothing is packed there that a list could be of.
    """
    if not place.exists(REJECTED):
        return
    if empty:
        raise ExistsError(
            f"{printable(place.url)}: {REJECTED} lies here, and nothing is packed here that it "
            "could be of; move it away, or choose another directory"
        )
    if own_rejected(place) is None:
        raise ExistsError(
            f"{printable(place.url.rstrip('/'))}/{REJECTED}: no packing wrote it, and the list of "
            "what is left out would replace it; move it away, or choose another directory"
        )


def own_rejected(place: Target) -> list[Problem] | None:
    """Return what a list that packing wrote says; None where none is there, or another's file.

    Packing's own are known by each byte, and by keys that the dataset there does not have, or of
    files with a size and time: a user's list of records to leave out, in the same words, is of keys
    that it has.
    """
    found = own_list(place)
    return None if found is None else found[0]


def without_rejected(place: Target, listing: Listing) -> tuple[Listing, set[bytes]]:
    """Return a listing without what was left out before, and is as it was; and the keys of that."""
    listed, files = own_list(place) or ([], {})
    known = dict(listed)
    about = zip(listing.sizes.tolist(), listing.mtimes.tolist(), strict=True)
    pairs = enumerate(zip(listing.keys, about, strict=True))
    left = [at for at, (key, of) in pairs if not of[1] or files.get(key) != of]
    problems = [(key, why) for key, why in listing.problems if known.get(key) != why]
    rest = replace(listing.take(np.array(left, np.int64)), problems=problems)
    before = {*listing.keys, *dict(listing.problems)} - {*rest.keys, *dict(problems)}
    return rest, before


def left_out_lines(
    rejected: Sequence[tuple[str, str]], before: int, committed: bool = True
) -> list[str]:
    """Say which files were left out, and how many were so before."""
    lines = []
    if rejected:
        lines.append(f"{show_count(len(rejected), 'file')} left out:")
        lines += [f"  {printable(key)}: {why}" for key, why in rejected[:_SHOWN]]
        lines += [f"  ... and {len(rejected) - _SHOWN:,} more"] * (len(rejected) > _SHOWN)
        lists = "lists them" if committed else "is to list them, once this is committed"
        lines.append(f"{REJECTED} {lists}; a record that is there stays")
    if before:
        files = show_count(before, "file")
        lines.append(f"{files} left out before, and not changed; in {REJECTED}")
    return lines


def own_list(place: Target) -> OwnList | None:
    """Return what `own_rejected` does, and of the files in it what is known."""
    if isinstance(place, LocalDirectory):
        path = place.path(REJECTED)
        if not os.path.isfile(path) or os.path.islink(path):
            return None
    try:
        data = place.read(REJECTED, _MOST)
        found, files = _parse_rejected(data, f"{place.url}/{REJECTED}")
    except (FileNotFoundError, DamageError, StorageError):
        return None
    if not found or _dump_rejected(found, files) != data:
        return None
    bare = [key for key, _ in found if key not in files]
    return None if _holds_one(place, bare) else (found, files)


def _holds_one(place: Target, keys: Sequence[bytes]) -> bool:
    """Return whether the dataset in a place, if one is there, has one of these keys."""
    with contextlib.suppress(NotPackedError, DamageError, StorageError, VersionError, OSError):
        return any(Reader(place, manifest.load(place)).with_keys({*keys}))
    return False


def is_rejected_part(directory: str, name: str) -> bool:
    """Return whether a file is the list of what one part left out."""
    if not fnmatch.fnmatchcase(name, part_list("*")):
        return False
    try:
        return load_rejected(LocalDirectory(directory), name) is not None
    except (DamageError, StorageError):
        return False


def part_list(part: str) -> str:
    """Return the name of the list of what one part left out: a shard, by its name, or the scan."""
    return f".shardio-rejected-{part.partition('.')[0]}.jsonl"


def _dump_rejected(problems: Sequence[Problem], files: Files) -> bytes:
    lines = []
    for key, why in problems:
        more = dict(zip(("size", "time"), files.get(key, ()), strict=False))
        lines.append(json.dumps({"key": key_text(key), "reason": why, **more}))
    return "".join(f"{line}\n" for line in lines).encode()


def load_rejected(place: Target, name: str) -> list[Problem] | None:
    """Read a list of rejected keys; None when there is none. Raises DamageError."""
    try:
        return _parse_rejected(place.read(name, _MOST), f"{place.url}/{name}")[0]
    except FileNotFoundError:
        return None


def _parse_rejected(data: bytes, where: str) -> OwnList:
    try:
        entries = [*map(json.loads, data.splitlines())]
        files = {
            key_bytes(entry["key"]): (int(entry["size"]), int(entry["time"]))
            for entry in entries
            if "size" in entry
        }
        return [(key_bytes(entry["key"]), entry["reason"]) for entry in entries], files
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        raise DamageError(f"{printable(where)}: not a list of rejected keys") from None
