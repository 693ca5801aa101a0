"""The manifest: the index of a dataset's shards, and the commit of its packing.

`manifest.json` is JSON that is read line by line: one header field a line, then one shard a line,
then the SHA-256 of all bytes before its own line (`head -n -2 manifest.json | sha256sum`). Until it
is renamed into place nothing was packed. 100,000 shards stay small: columns, not objects.
`shardio.json`, in the folder above the datasets of several splits, is written the same way.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import math
import os
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from .._version import __version__
from ..errors import (
    BusyError,
    DamageError,
    NotPackedError,
    OptionError,
    ShardioError,
    StorageError,
    VersionError,
    printable,
    there_are,
)
from ..names import KEY, are_names, file_name, from_file_name, is_name, key_bytes
from ..storage import lock
from ..storage.base import SEAL_BYTES, Location, path_in
from ..storage.local import LocalDirectory
from ..storage.location import locate
from .base import MAX_RECORDS, Column, Opening, Overlay, ShardInfo
from .sample import KINDS, MAX_DEPTH, Schema, check_schema

MANIFEST = "manifest.json"
SPLITS = "shardio.json"
VERSION = 1  # the newest that is read; a dataset that was only packed is of version 0
GROWN = 1  # of a dataset that a commit changed after it was packed
MAX_MANIFEST = 1 << 30  # bytes; 100,000 shards take 14 MB
MAX_SPLITS = 64 << 20  # bytes of shardio.json: names of classes
MAX_SHARDS = 10_000_000
MAX_OVERLAYS = 64  # files of one field and shard; sizes fall by a factor from each to the next
MAX_BYTES = (1 << 63) - 1  # of all shards

SUFFIXES = {"record": ".shard", "lmdb": ".lmdb"}  # of the formats that shardio packs

_START = b'{\n"format": "shardio"'  # how a manifest begins
_SHARDS = b'"shards": [\n'
_NAMED = re.compile(r"((overlay-)?[0-9]{5,8}-[0-9a-f]{8}\.(shard|lmdb)|sources-[0-9a-f]{8}\.bin)\Z")
_DIGEST = re.compile(rb'"sha256": "([0-9a-f]{64})"\n\}\n\Z')
_VERSION = re.compile(
    rb'\{\n"format": "shardio(?:-splits|-tags)?",\n'
    rb'"version": (\d{1,9}),\n"library": "([^"]{1,100})"'
)
_GROWN_MEMBERS = {"excluded", "overlays", "sources", "commit", "erased"}  # not of version 0
_PLAN_HEADER = 64 << 20  # bytes of a plan that are read to see what it plans
_LINES = 1_000  # shard lines that are parsed at a time


class Sidecar(NamedTuple):
    """What a manifest says of a file beside it."""

    name: str  # of its content
    entries: int
    sha256: bytes


class Successor(NamedTuple):
    """What a manifest says of the file that took the place of one that must go."""

    size: int  # 0: none took its place
    sha256: bytes
    index_checksum: int
    # Bytes of the blobs that only the older one has; of a file of values, how many; of a shard that
    # nothing followed, how many records of it were erased.
    gone: int


@dataclass(frozen=True)
class Commit:
    """What made a version of the one before."""

    parent: str | None  # id of the version before; None: it is not known
    time: str  # in UTC, such as "2026-11-28T09:30:00Z"
    command: str  # of shardio, such as "drop"
    changes: Mapping[str, int]  # how many records it added, dropped, brought back


@dataclass(frozen=True)
class Manifest:
    """A dataset as its packing left it. Columns have one entry a shard, in the order of numbers."""

    dataset_id: bytes  # 16 bytes
    format: str  # of the shards: "record"
    schema: Schema  # of samples: what the shards store, then fields that were added
    classes: tuple[str, ...] | None  # names by label (names.py); None: no labels
    options: dict[str, Any]  # how it was packed
    library: str  # version of shardio that packed it
    blob_bytes: int  # payload: bytes of all blobs
    shard_records: Column  # (shards,) int64
    shard_sizes: Column  # (shards,) int64
    shard_sha256: Column  # (shards, 32) uint8
    shard_index: Column  # (shards,) uint64: checksums of their indexes
    names: tuple[str, ...] | None = None  # of foreign shards; ours are named by their content
    version: int = 0  # of the format it was written in
    excluded: Sidecar | None = None  # the list of the records that were dropped
    overlays: tuple[Overlay, ...] = ()  # fields that were added or corrected, in this order
    commit: Commit | None = None  # that made this version; None: it was packed so
    sources: Sidecar | None = None  # sizes and times of the files that were packed
    erased: Mapping[str, Successor] = field(default_factory=dict)  # by names of files that must go
    where: str = field(default=MANIFEST, compare=False)  # for messages
    digest: str = field(default="", compare=False)  # SHA-256 of the file, where it was read

    @property
    def shards(self) -> int:
        """Return the number of shards."""
        return len(self.shard_records)

    @property
    def records(self) -> int:
        """Return the number of records, without those that were dropped."""
        return self.stored_records - (self.excluded.entries if self.excluded else 0)

    @property
    def stored_records(self) -> int:
        """Return the number of records in all shards, those that were dropped included."""
        return int(self.shard_records.sum())

    @property
    def version_id(self) -> str:
        """Return the id of the version, 16 hex digits: the start of the SHA-256 at its end."""
        return (self.digest or _sealed(self.dump()))[:16]

    @property
    def size(self) -> int:
        """Return the bytes of all shards."""
        return int(self.shard_sizes.sum())

    def shard(self, number: int) -> ShardInfo:
        """Return the entry of a shard."""
        digest = self.shard_sha256[number].tobytes()
        return ShardInfo(
            shard_name(number, digest, self.format) if self.names is None else self.names[number],
            number,
            int(self.shard_records[number]),
            int(self.shard_sizes[number]),
            digest,
            int(self.shard_index[number]),
        )

    @property
    def stored_schema(self) -> Schema:
        """Return the schema of what the shards store, without fields that were added."""
        added = {one.field for one in self.overlays if one.added}
        if not added:
            return self.schema
        return Schema([pair for pair in self.schema.fields if pair[0] not in added])

    @property
    def mean_bytes(self) -> float:
        """Return the bytes of storage per record, index included; at least 1."""
        return max(1.0, self.size / max(1, self.stored_records))

    def opening(
        self, index: Location, root: Location | None = None, *, verify: bool = True
    ) -> Opening:
        """Return how shards are opened: the manifest is in `index`, they in `root` or there."""
        shards = index if root is None else root
        classes = None if self.classes is None else len(self.classes)
        return Opening(
            *(shards, index, self.dataset_id, self.stored_schema, self.options, verify, classes),
            self.overlays,
        )

    def missing(self, info: ShardInfo, index: Location, data: Location) -> str:
        """Say of a shard that it is not there, and what to do: `index` has the manifest."""
        advice = (
            "If the data lies elsewhere (`shardio index --out`), say where: --root DIR or URL, in "
            "Python storage=shardio.Storage(root=...); else restore it, or index anew"
        )
        if self.format in SUFFIXES and data is index:
            advice = (
                "Restore it from a copy, or pack again; `shardio repair` saves the other shards"
            )
        what = f"the manifest names this shard, of {info.records:,} records, but it is not there"
        return f"{path_in(data, info.name)}: {what}. {advice}"

    def dump(self) -> bytes:
        """Return the canonical bytes of manifest.json."""
        head: dict[str, Any] = {
            "format": "shardio",
            "version": self.version,
            "library": self.library,
            "dataset_id": self.dataset_id.hex(),
            "shard_format": self.format,
            "fields": [list(pair) for pair in self.stored_schema.fields],
            "classes": None if self.classes is None else list(self.classes),
            "options": self.options,
            "records": self.stored_records,
            "bytes": self.size,
            "blob_bytes": self.blob_bytes,
        }
        if self.version:
            for name in ("excluded", "sources"):
                side: Sidecar | None = getattr(self, name)
                head[name] = side and [side.name, side.entries, side.sha256.hex()]
            head["overlays"] = [
                [one.field, one.kind, [*map(_overlay_row, chain(*one.files.values()))]]
                for one in self.overlays
            ] or None
            head["commit"] = self.commit and [*astuple(self.commit)]
        if self.erased:
            head["erased"] = [
                [old, new.size, new.sha256.hex(), f"{new.index_checksum:016x}", new.gone]
                for old, new in sorted(self.erased.items())
            ]
        rows = ",\n".join(
            _json([s.name, s.records, s.size, s.sha256.hex(), f"{s.index_checksum:016x}"])
            for s in map(self.shard, range(self.shards))
        )
        return dump_sealed(head, _SHARDS.decode() + rows + ("\n" if rows else "") + "],\n")


def make(shards: Sequence[ShardInfo], library: str = __version__, **values: Any) -> Manifest:
    """Build a manifest of these shards, in the order of their numbers."""
    return Manifest(library=library, **_columns(shards), **values)


def extended(
    one: Manifest, shards: Sequence[ShardInfo], blob_bytes: int, classes: tuple[str, ...] | None
) -> Manifest:
    """Build a manifest with these shards behind those of another one.

    blob_bytes: of the new shards; classes: of all
    """
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(one, name), column])
        for name, column in _columns(shards).items()
    }
    blobs = one.blob_bytes + blob_bytes
    return replace(one, **joined, blob_bytes=blobs, classes=classes, digest="")


def with_shards(one: Manifest, shards: Sequence[ShardInfo]) -> Manifest:
    """Build a manifest with these shards instead of those of another one."""
    return replace(one, **_columns(shards))


def _columns(shards: Sequence[ShardInfo]) -> dict[str, Any]:
    digests = b"".join(shard.sha256 for shard in shards)
    return {
        "shard_records": np.array([shard.records for shard in shards], np.int64),
        "shard_sizes": np.array([shard.size for shard in shards], np.int64),
        "shard_sha256": np.frombuffer(digests, np.uint8).reshape(-1, 32),
        "shard_index": np.array([shard.index_checksum for shard in shards], np.uint64),
    }


def shard_name(number: int, sha256: bytes, format: str = "record") -> str:
    """Return the name of a shard: its number and the start of its content's hash."""
    return f"{number:05d}-{sha256[:4].hex()}{SUFFIXES[format]}"


def overlay_name(number: int, sha256: bytes) -> str:
    """Return the name of the file of a field's values: its shard, the start of its own hash."""
    return f"overlay-{number:05d}-{sha256[:4].hex()}.shard"


def load(storage: Location) -> Manifest:
    """Read and check a dataset's manifest.

    Raises NotPackedError (naming the splits, when it is their parent), DamageError, VersionError.
    """
    _refuse_file(storage)
    if (found := load_if_packed(storage)) is None:
        raise NotPackedError(_missing(storage))
    return found


def load_if_packed(storage: Location) -> Manifest | None:
    """Read a dataset's manifest as `load` does; return None where no dataset is."""
    where = f"{storage.url.rstrip('/')}/{MANIFEST}"
    try:
        return parse(storage.read(MANIFEST, MAX_MANIFEST, seal=_DIGEST), where)
    except FileNotFoundError:
        return None


def parse(data: bytes, where: str) -> Manifest:
    """Read the bytes of manifest.json. Raises DamageError, VersionError."""
    where = printable(where, 4096)
    _check_digest(data, where)
    try:
        return _parse(data, where)
    except (LookupError, TypeError, ValueError, RecursionError, OverflowError) as error:
        raise DamageError(f"{where}: not a manifest: {type(error).__name__}: {error}") from None


def load_splits(storage: Location) -> list[str] | None:
    """Return the names of the splits packed under a folder; None if it holds none.

    Raises NotPackedError for a file, DamageError, VersionError.
    """
    _refuse_file(storage)
    try:
        data = storage.read(SPLITS, MAX_SPLITS, seal=_DIGEST)
    except FileNotFoundError:
        return None
    where = path_in(storage, SPLITS)
    if are_names(splits := parse_sealed(data, where, "shardio-splits").get("splits")):
        return splits
    raise DamageError(f"{where}: not a list of splits")


def dump_splits(
    splits: Sequence[str], classes: Sequence[str] | None, library: str = __version__
) -> bytes:
    """Return the bytes of shardio.json. library: version of shardio that packs."""
    return dump_sealed(
        {
            "format": "shardio-splits",
            "version": 0,
            "library": library,
            "splits": list(splits),
            "classes": None if classes is None else list(classes),
        }
    )


def datasets_in(storage: Location) -> dict[str, Location]:
    """Return the datasets of a location by split; {"": storage} for one alone. Raises as load."""
    splits = load_splits(storage)
    return {name: storage.below(name) for name in splits} if splits else {"": storage}


def datasets(root: str) -> dict[str, str]:
    """Return the folders of the datasets under a packed one, by split; {"": root} for one alone.

    Raises DamageError, VersionError.
    """
    return {name: split_folder(root, name) for name in datasets_in(locate(root))}


def split_folder(root: str, name: str) -> str:
    """Return the folder of a split; the folder above for the one dataset without splits, ""."""
    return os.path.join(root, file_name(name)) if name else root


def choose_split(storage: Location, split: str | None) -> Location:
    """Find the folder of one dataset: `storage` itself, or the split of this name in it.

    Splits are what was packed together (shardio.json names them), or any datasets in folders of
    `storage`, as `shardio index` leaves them. None: `storage`, of which `load` says what lies
    there. Raises NotPackedError, and OptionError where it has no such split, listing those it has.
    """
    if split is None:
        return storage
    if not isinstance(split, str):
        raise OptionError(f"split is {printable(repr(split))}: expected the name of a split")
    splits = _splits_in(storage)
    if split in splits:
        return storage.below(split)
    shown, named = printable(storage.url), printable(repr(split))
    if splits:
        raise OptionError(f"{shown}: no split is called {named}; {there_are(splits, split)}")
    load(storage)  # explains what is here, if it is nothing
    raise OptionError(f"{shown}: holds one dataset and no splits; leave split={named} out")


def planned_splits(root: str, within: str = "") -> list[str]:
    """Return the splits of an unfinished packing under a folder, by what lies in one of them.

    within: the folder in each split where it is packed; default: the split's own
    """
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(root)):
            with contextlib.suppress(ShardioError, OSError, LookupError, TypeError, ValueError):
                options = _options(os.path.join(root, name, within))
                if options["split"] == from_file_name(name) and are_names(options["splits"]):
                    return options["splits"]
    return []


def _options(folder: str) -> dict[str, Any]:
    """Return the options of an unfinished packing, or of the dataset, in a folder."""
    try:
        start = lock.read(folder, 0, _PLAN_HEADER)
    except FileNotFoundError:
        # Not `load`, which would look below this folder, too, for what to say of it.
        return parse(locate(folder).read(MANIFEST, MAX_MANIFEST), folder).options
    line = start.removeprefix(lock.PLAN_MAGIC).partition(b"\n")[0]
    options: dict[str, Any] = json.loads(line)["options"]
    return options


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _refuse_file(storage: Location) -> None:
    if isinstance(storage, LocalDirectory) and os.path.isfile(storage.root):
        shown, folder = printable(storage.url), os.path.dirname(storage.root)
        if os.path.lexists(os.path.join(folder, MANIFEST)):
            above = printable(os.path.dirname(storage.url.rstrip("/")) or os.curdir)
            raise NotPackedError(f"{shown}: it is a file of a dataset; give its directory, {above}")
        raise NotPackedError(
            f"{shown}: it is a file, not a packed directory; if it can be packed, `shardio pack "
            f"{shown} OUT` makes one in OUT"
        )


def _missing(storage: Location) -> str:
    shown = printable(storage.url)
    if splits := load_splits(storage):
        return _several(shown, splits)
    if storage.exists(lock.JOURNAL):
        return f"{shown}: not packed: {_unfinished(storage.url)}"
    planned = planned_splits(storage.url) if isinstance(storage, LocalDirectory) else []
    if planned:
        return (
            f"{shown}: not packed: a packing of splits ({', '.join(map(printable, planned))}) was "
            "begun here and is not finished; run the same `shardio pack` again to resume it, or "
            f"`shardio commit {shown}` when all its parts are built"
        )
    if splits := _splits_in(storage):
        return _several(shown, splits)
    if not storage.exists(""):
        above = os.path.dirname(storage.root) if isinstance(storage, LocalDirectory) else ""
        beside = (load_splits(locate(above)) if above else None) or []
        name = os.path.basename(storage.url.rstrip("/"))
        more = f"; of the splits beside it {there_are(beside, name)}" if beside else ""
        return f"{shown}: not packed: there is no such directory{more}"
    if storage.remote:
        above, _, name = shown.rpartition("/")
        if name in (MANIFEST, SPLITS) or name.endswith(".shard"):
            return f"{shown}: it is a file of a dataset; give the URL of its folder, {above}"
        return (
            f"{shown}: not packed: it holds no {MANIFEST}. Expected the URL of the folder that "
            "holds it; `shardio pack IMAGES URL` makes one in a store, and `shardio copy` brings "
            "one there"
        )
    return (
        f"{shown}: not packed: it holds no {MANIFEST}. `shardio pack IMAGES OUT` makes one in OUT; "
        f"`shardio index {shown}` makes one here, if images or shards of others lie here"
    )


def _splits_in(storage: Location) -> list[str]:
    """List the datasets in the folders of a folder. Raises as `load_splits`."""
    splits = load_splits(storage)
    if splits is None and isinstance(storage, LocalDirectory):
        with contextlib.suppress(OSError):
            found = [name for name in sorted(os.listdir(storage.root)) if _is_in(storage, name)]
            splits = [from_file_name(name) for name in found]
    return splits or []


def _is_in(storage: Location, folder: str) -> bool:
    """Return True if a folder of this one holds a dataset, by how its manifest begins."""
    try:
        file = storage.open(f"{folder}/{MANIFEST}")
    except (OSError, ShardioError):
        return False
    with contextlib.closing(file):
        return file.read(0, min(file.size, len(_START))) == _START


def _several(shown: str, splits: Sequence[str]) -> str:
    """Say which datasets lie in the folders of a folder, and how one of them is chosen."""
    first = "train" if "train" in splits else printable(splits[0])
    one = f'{shown.rstrip("/")}/{first}, or in Python split="{first}"'
    if len(splits) == 1:
        return f"{shown}: not packed itself, but its folder {first} is. Open {one}"
    listed = ", ".join(map(printable, splits[:10])) + (", ..." if len(splits) > 10 else "")
    return f"{shown}: holds several datasets, its splits: {listed}. Open one, such as {one}"


def _unfinished(folder: str) -> str:
    """Say what the journal in a folder is of."""
    try:
        writer = lock.read(folder, 0, len(lock.WRITER_MAGIC)) == lock.WRITER_MAGIC
    except BusyError:
        return "this process is packing here, and is not finished"
    except (OSError, StorageError, DamageError):
        writer = False
    if writer:
        return (
            "a Writer, or `shardio index` or `shardio copy`, did not finish here, or is still at "
            "work; do it again, of parts at last without --part"
        )
    return (
        "a packing was begun here and is not finished; run the same `shardio pack` again to resume "
        f"it, or `shardio commit {printable(folder)}` where parts of it were all built"
    )


def parse_sealed(data: bytes, where: str, kind: str | None = None) -> dict[str, Any]:
    """Read a file that `dump_sealed` wrote. Raises DamageError, VersionError.

    kind: its `format`; None: any.
    """
    _check_digest(data, where)
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(data)
        if isinstance(found, dict) and (
            kind is None or (found.get("format") == kind and type(found.get("version")) is int)
        ):
            return found
    raise DamageError(f"{where}: it is damaged, or was edited by hand")


def dump_sealed(head: Mapping[str, Any], more: str = "") -> bytes:
    """Return a file of these header fields, a line each, and more; its SHA-256 is the last one."""
    lines = "".join(f"{_json(name)}: {_json(value)},\n" for name, value in head.items())
    body = f"{{\n{lines}{more}".encode("ascii")
    return body + f'"sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def is_dump_of(data: bytes, one: Manifest) -> bool:
    """Return whether these are the bytes of manifest.json that a manifest was read from."""
    found = _DIGEST.search(data, max(0, len(data) - SEAL_BYTES))
    return found is not None and found[1].decode() == one.digest


def _sealed(data: bytes) -> str:
    """Return the SHA-256 that a file states of itself."""
    found = _DIGEST.search(data, max(0, len(data) - SEAL_BYTES))
    assert found is not None
    return found[1].decode()


def _check_digest(data: bytes, where: str) -> None:
    """Compare the SHA-256 of a file with the one it states. Raises DamageError, VersionError."""
    digest = _DIGEST.search(data, max(0, len(data) - 128))
    if digest is None:
        _check_version(data, where)
        raise DamageError(
            f"{where}: it does not end as a manifest does; it was cut short or edited"
        )
    found = hashlib.sha256(memoryview(data)[: digest.start()]).hexdigest()
    if found != digest[1].decode():
        raise DamageError(
            f"{where}: its SHA-256 is {found}, but it says {digest[1].decode()}. It was damaged, "
            "or edited by hand: restore it, or pack again; `shardio repair` may make another"
        )
    _check_version(data, where)


def _check_version(data: bytes, where: str) -> None:
    """Read the version before all else: a newer format may look different everywhere else."""
    match = _VERSION.match(data)
    if match and int(match[1]) > VERSION:
        raise VersionError(
            f"{where}: manifest version {int(match[1])}; needs shardio >= {printable(match[2])}, "
            f"this one reads up to version {VERSION}"
        )


def _parse(data: bytes, where: str) -> Manifest:
    start = data.index(_SHARDS)
    end = data.rindex(b"],\n")
    if not _DIGEST.match(data, end + 3):
        raise ValueError("something stands behind its shards")
    head = json.loads(data[:start] + b'"shards": []}')
    _check_head(head)
    rows = data[start + len(_SHARDS) : end]
    count = rows.count(b"\n")
    if count > MAX_SHARDS:
        raise ValueError(f"{count:,} shards; the limit is {MAX_SHARDS:,}")
    packed, names, erased = head["shard_format"] in SUFFIXES, [], _erased(head.get("erased", []))
    records, sizes, indexes, digests = array("q"), array("q"), array("Q"), bytearray()
    lines = io.BytesIO(rows)
    while some := b"".join(itertools.islice(lines, _LINES)):
        for name, shard_records, size, sha256, index in json.loads(
            b"[" + some.rstrip(b",\n") + b"]"
        ):
            digest, number = _unhex(sha256, 32), len(records)
            if not packed:
                names.append(_safe(name))
            elif name != shard_name(number, digest, head["shard_format"]):
                raise ValueError(f"shard {number} has the name {printable(str(name))!r}")
            if name in erased:
                raise ValueError(f"shard {number} is one whose file must go")
            records.append(_count(shard_records, MAX_RECORDS))
            sizes.append(_count(size, MAX_BYTES))
            indexes.append(int.from_bytes(_unhex(index, 8), "big"))
            digests += digest
    totals = _count(head["records"], MAX_BYTES), _count(head["bytes"], MAX_BYTES)
    if len(records) != count or totals != (sum(records), sum(sizes)):
        raise ValueError("its totals are not those of its shards")
    classes, schema = head["classes"], check_schema(head["fields"], where)
    overlays = _overlays(head.get("overlays"), schema, records)
    added = [[one.field, one.kind] for one in overlays if one.added]
    return Manifest(
        dataset_id=_unhex(head["dataset_id"], 16),
        format=head["shard_format"],
        schema=check_schema([*head["fields"], *added], where) if added else schema,
        classes=None if classes is None else tuple(classes),
        options=head["options"],
        library=head["library"],
        blob_bytes=_count(head["blob_bytes"], MAX_BYTES),
        shard_records=np.frombuffer(records, np.int64),
        shard_sizes=np.frombuffer(sizes, np.int64),
        shard_sha256=np.frombuffer(bytes(digests), np.uint8).reshape(-1, 32),
        shard_index=np.frombuffer(indexes, np.uint64),
        names=None if packed else tuple(names),
        version=head["version"],
        excluded=_sidecar(head, "excluded", sum(records)),
        sources=_sidecar(head, "sources", max(sum(records), len(records))),
        overlays=overlays,
        commit=_commit(head.get("commit")),
        erased=erased,
        where=where,
        digest=_sealed(data),
    )


def _check_head(head: Mapping[str, Any]) -> None:
    """Raise ValueError for a head that no packing and no commit writes."""
    if (
        head["format"] != "shardio"
        or type(head["version"]) is not int
        or not 0 <= head["version"] <= VERSION
    ):
        raise ValueError("its format is not shardio, or its version not where it belongs")
    if head["version"] == 0 and _GROWN_MEMBERS & head.keys():
        raise ValueError("it has members that version 0 has not")
    classes = head["classes"]
    if classes is not None and (type(classes) is not list or set(map(type, classes)) - {str}):
        raise ValueError("its classes are not a list of names")
    if classes is not None and len(set(classes)) < len(classes):
        raise ValueError("two of its classes have one name")
    check_options(head["options"])
    if type(head["shard_format"]) is not str or type(head["library"]) is not str:
        raise ValueError("its shard format or library is not a name")


def _sidecar(head: Mapping[str, Any], member: str, records: int) -> Sidecar | None:
    """Read what a manifest says of a file of a kind beside it. Raises ValueError, TypeError."""
    if head.get(member) is None:
        return None
    name, count, digest = head[member]
    sha256 = _unhex(digest, 32)
    if name != sidecar_name(member, sha256) or not _count(count, records):
        raise ValueError(f"what it says of {member} records fits no such file")
    return Sidecar(name, count, sha256)


def sidecar_name(member: str, sha256: bytes) -> str:
    """Return the name of a file that this member of a manifest names, by its content."""
    return f"{member}-{sha256[:4].hex()}.bin"


def _overlays(value: Any, schema: Schema, records: Sequence[int]) -> tuple[Overlay, ...]:
    """Read what a manifest says of fields beside the shards. Raises ValueError, TypeError."""
    found, stored = list[Overlay](), dict(schema.fields)
    for field_name, kind, rows in value or ():
        if (
            type(field_name) is not str
            or kind not in KINDS
            or kind in ("key", "image")
            or stored.get(field_name, kind) != kind
            or field_name in (KEY, *(one.field for one in found))
        ):
            raise ValueError("its annotated fields are not such")
        files: dict[int, tuple[ShardInfo, ...]] = {}
        for number, name, count, size, sha256, index in rows:
            digest, before = _unhex(sha256, 32), next(reversed(files), 0)
            if (
                not before <= _count(number, len(records) - 1)
                or name != overlay_name(number, digest)
                or not _count(count, records[number])
            ):
                raise ValueError(f"the files of its field {printable(field_name)!r} are not such")
            checksum = int.from_bytes(_unhex(index, 8), "big")
            places = number, count, _count(size, MAX_BYTES), digest, checksum
            files[number] = (*files.get(number, ()), ShardInfo(name, *places))
            if len(files[number]) > MAX_OVERLAYS:
                raise ValueError(f"a shard has more than {MAX_OVERLAYS} files of one field")
        found.append(Overlay(field_name, kind, field_name not in stored, files))
    return tuple(found)


def _overlay_row(one: ShardInfo) -> list[Any]:
    checksum = f"{one.index_checksum:016x}"
    return [one.number, one.name, one.records, one.size, one.sha256.hex(), checksum]


def _commit(value: Any) -> Commit | None:
    """Read what a manifest says of its commit. Raises ValueError, TypeError."""
    if value is None:
        return None
    parent, time, command, changes = value
    if (
        not (parent is None or (type(parent) is str and len(_unhex(parent, 8)) == 8))
        or type(time) is not str
        or type(command) is not str
        or type(changes) is not dict
    ):
        raise ValueError("what it says of its commit is of another type")
    return Commit(parent, time, command, {str(k): _count(v, MAX_BYTES) for k, v in changes.items()})


def _erased(rows: Any) -> dict[str, Successor]:
    """Read which files a manifest says must go, and what followed them. Raises ValueError."""
    if type(rows) is not list:
        raise ValueError("its list of files that must go is none")
    found = {}
    for old, size, sha256, index, gone in rows:
        if type(old) is not str or not _NAMED.match(old):
            raise ValueError(f"{printable(repr(old))} is no name of a shard")
        checksum = int.from_bytes(_unhex(index, 8), "big")
        values = _count(size, MAX_BYTES), _unhex(sha256, 32), checksum, _count(gone, MAX_BYTES)
        found[old] = Successor(*values)
    return found


def check_options(options: Any) -> None:
    """Raise ValueError for options that no packing gives, and that readers would trip over."""
    if type(options) is not dict:
        raise ValueError("its options are not an object")
    for name, kind, part in (
        ("fields", dict, str),
        ("absent", list, int),
        ("row_group", dict, int),
    ):
        if name not in options:
            continue
        given = options[name]
        parts = given.values() if type(given) is dict else given
        if type(given) is not kind or any(type(one) is not part for one in parts):
            raise ValueError(f"its option {name} is not what packing or indexing makes it")
    for text in itertools.chain.from_iterable(options.get("fields", {}).items()):
        key_bytes(text)  # half of a surrogate pair is a UnicodeEncodeError, a ValueError
    if not {"rows", "bytes"} <= options.get("row_group", {"rows": 0, "bytes": 0}).keys():
        raise ValueError("its option row_group lacks rows or bytes")
    _check_plain(options, MAX_DEPTH)


def _check_plain(value: Any, depth: int) -> None:
    """Raise ValueError for what JSON has no name for, and for what is nested deeper than this."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"its options hold {value}, which is no number in JSON")
    if isinstance(value, (list, dict)):
        if not depth:
            raise ValueError(f"its options are nested more than {MAX_DEPTH} deep")
        for part in value.values() if isinstance(value, dict) else value:
            _check_plain(part, depth - 1)


def _safe(name: Any) -> str:
    """Return the name of a foreign shard, if it is a path below its folder. Raises ValueError."""
    if type(name) is not str or not all(map(is_name, name.split("/"))):
        raise ValueError(f"{printable(repr(name))} is no path of a shard below the folder")
    return name


def _count(value: Any, limit: int) -> int:
    if type(value) is not int or not 0 <= value <= limit:
        raise ValueError(f"{printable(repr(value))} is no count of 0 to {limit:,}")
    return value


def _unhex(text: Any, size: int) -> bytes:
    """Read lower-case hex of exactly `size` bytes. Raises ValueError."""
    value = bytes.fromhex(text)
    if len(value) != size or value.hex() != text:
        raise ValueError(f"{printable(text)!r} is not {2 * size} hex digits")
    return value


def classes_of(other: Location) -> tuple[str, ...]:
    """Return the names of the classes of another dataset, or of splits. Raises OptionError."""
    try:
        there = load(next(iter(datasets_in(other).values())))
    except NotPackedError as error:
        raise NotPackedError(f"--classes: expected a dataset. {error}") from None
    if there.classes is None:
        raise OptionError(f"--classes {printable(other.url)}: that dataset has no classes")
    return there.classes
