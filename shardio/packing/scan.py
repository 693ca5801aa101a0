"""Shards of other formats, scanned: where their records are, and what their fields are.

What `index` writes beside the data, and what packing them reads through, is made here. Each shard
is walked through, in parallel: the place and checksum of every record, its key, its small numbers.
What kind a field is follows from all its values, over all shards.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..errors import OptionError, SourceError, printable
from ..formats import FOREIGN, manifest
from ..formats.base import ShardInfo
from ..formats.foreign.base import Values, dump, key_of, only, sidecar_name
from ..formats.foreign.imagefolder import ImageRun, NoImageError, describe, described_keys
from ..formats.index import checksum, key_hash
from ..formats.sample import MAX_FIELDS, MAX_KEY, Schema
from ..images.filetype import image_type
from ..names import KEY, key_bytes
from ..storage import local
from ..storage.base import Location
from ..storage.local import LocalDirectory
from ..units import show_count
from . import output_dir
from .process_pool import Executor, Progress, Report, run
from .sources.base import Listing, Problem, listed
from .sources.field_names import IMAGES, LABELS, check_known_fields, nameable

_CHECK_BYTES = 4 << 20  # between two looks at whether to stop
_SNIFFED = 16  # values of a field, in each shard, that are looked at for being images
_SCALARS = frozenset(("int", "float", "bool"))


@dataclass
class FieldValues:
    """The values that one field had."""

    types: set[str] = field(default_factory=set)
    images: bool = True  # of bytes: all that were looked at are images
    looked: int = 0


@dataclass(frozen=True)
class Found:
    """The files that are to be indexed: each is a shard."""

    root: str  # as messages name it
    format: str
    place: Location  # where they lie
    names: list[str]  # of the shards
    sizes: list[int]  # bytes of each
    marks: list[str]  # of each: another one where the file changed; "": nobody knows
    extras: list[bytes] = field(default_factory=list)  # that they are opened with; []: nothing
    dataset_id: bytes = b""  # where another than the names and sizes decide it
    classes: tuple[str, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    ignored: int = 0
    notes: list[str] = field(default_factory=list)
    problems: Sequence[Problem] = ()  # files that cannot be indexed, seen so far
    listing: Listing | None = None  # of a folder of images: all files


class Runs:
    """Runs of images of a folder, as `Found` has them."""

    def __init__(self, listing: Listing) -> None:
        self._listing = listing
        classes = enumerate(listing.classes or ())
        self._label = {key_bytes(name): label for label, name in classes}
        self.names, self.marks = list[str](), list[str]()
        self.sizes, self.extras = list[int](), list[bytes]()

    def add(self, name: str, places: Sequence[int]) -> None:
        """Add a run of these images, by their places in the listing."""
        keys, numbers = [self._listing.keys[place] for place in places], np.array(places, np.int64)
        labels = [self._label[key[: key.index(b"/")]] for key in keys] if self._label else None
        sizes, times = self._listing.sizes[numbers], self._listing.mtimes[numbers]
        self.names.append(name)
        self.sizes.append(int(sizes.sum()))
        self.marks.append(hashlib.sha256(times.tobytes()).hexdigest())
        self.extras.append(describe(keys, sizes, labels))


@dataclass(frozen=True)
class Scanned:
    """One shard, as a scan found it."""

    info: ShardInfo | None = None  # None: nothing, because of `problems`
    seen: Mapping[str, FieldValues] = field(default_factory=dict)
    blobs: int = 0
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # names, by field
    row_group: tuple[int, int] = (0, 0)  # rows and bytes of the largest
    index: bytes = b""  # if it was not written
    problems: Sequence[Problem] = ()
    extra: bytes = b""  # that it is opened with, where files of it were left out


def dataset_id_of(found: Found, fields: Mapping[str, str]) -> bytes:
    """Return the 16 bytes of the id: of names and sizes, never of time, host or path."""
    if found.dataset_id and not fields:
        return found.dataset_id
    shards = list(zip(found.names, found.sizes, strict=True))
    described = {"format": found.format, "fields": dict(fields), "shards": shards}
    if found.dataset_id:
        described["id"] = found.dataset_id.hex()
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).digest()[:16]


def scan_all(
    found: Found,
    folder: str | None,
    dataset_id: bytes,
    jobs: int,
    progress: Progress | None,
    shards: range | None = None,
    known: Mapping[int, Scanned] | None = None,
    note: Callable[[Scanned], None] | None = None,
    executor: Executor | None = None,
    skip: bool = False,
) -> list[Scanned]:
    """Scan every shard, or those of a part; its index is written into a folder, or kept.

    known: what needs no scan. note: called with each of the others as it is found. skip: files of a
    folder of images that cannot be indexed are left out, of what was found, too

    Raises SourceError, which lists all files that cannot be indexed, and StorageError for an index
    that the executor wrote, and that is not here.
    """
    plain = replace(found, listing=None)
    scan = functools.partial(scan_shard, plain, folder, dataset_id, skip=skip)
    numbers, known = range(len(found.names)) if shards is None else shards, known or {}
    left = [number for number in numbers if number not in known]
    report = Report(progress, sum(found.sizes[number] for number in left))
    found_now = run(scan, left, jobs=jobs, report=report, seen=note, executor=executor)
    fresh = dict(zip(left, found_now, strict=True))
    scanned = [known.get(number) or fresh[number] for number in numbers]
    problems = problems_of(found, scanned)
    if problems and not (skip and any(one.info and one.info.records for one in scanned)):
        way = "" if skip or found.listing is None else ", leave them out by --on-error skip"
        raise SourceError(
            f"{printable(found.root)}: {show_count(len(problems), 'file')} cannot be indexed, so "
            f"nothing was. Move them away{way}, or mend them (texts and the like beside images: "
            "`shardio pack --from files`):\n"
            f"{listed(sorted(problems))}"
        )
    if problems and found.listing is not None:
        times = dict(zip(found.listing.keys, found.listing.mtimes.tolist(), strict=True))
        for one in scanned:
            if one.extra and one.info is not None:
                number = one.info.number
                found.extras[number], found.sizes[number] = one.extra, one.info.size
                kept = np.array([times[key] for key in described_keys(one.extra)], np.int64)
                found.marks[number] = hashlib.sha256(kept.tobytes()).hexdigest()
    if executor is not None and folder is not None:
        infos = filter(None, (one.info for one in scanned))
        names = (sidecar_name(info.number, info.index_checksum) for info in infos)
        output_dir.refuse_unseen(LocalDirectory(folder), names)
    return scanned


def problems_of(found: Found, scanned: Sequence[Scanned]) -> list[Problem]:
    """Return which files cannot be indexed."""
    return [*found.problems, *(one for shard in scanned for one in shard.problems)]


def manifest_of(
    found: Found,
    scanned: Sequence[Scanned],
    fields: Mapping[str, str],
    dataset_id: bytes,
    known: Scanned | None = None,
) -> tuple[manifest.Manifest, list[str]]:
    """Return the manifest of scanned shards, and the fields left out for their names.

    known: of those among them that an earlier index scanned, what it says of all of them
    """
    seen: dict[str, FieldValues] = defaultdict(FieldValues)
    told = [*scanned, known or Scanned()]
    for shard in told:
        for name, one in shard.seen.items():
            seen[name].types |= one.types
            seen[name].images &= one.images
    kinds = {name: _kind(one) for name, one in seen.items() if one.types}
    left_out = [name for name in kinds if not nameable(name) and name not in fields.values()]
    for name in left_out:
        del kinds[name]
    sources = _mapping(kinds, fields)
    renamed = {name: source for name, source in sources.items() if name != source}
    classes = found.classes
    if classes is None and kinds.get(sources.get("label", "")) == "int":
        names = [*found.names, "the files that were indexed before"]
        classes = _class_names(found.root, zip(names, told, strict=True), sources["label"])
    options = {**found.options, "fields": renamed}
    rows, size = max((shard.row_group for shard in told), key=lambda one: one[1])
    if rows:
        options["row_group"] = {"rows": rows, "bytes": size}
    result = manifest.make(
        [shard.info for shard in scanned if shard.info is not None],
        dataset_id=dataset_id,
        format=found.format,
        schema=Schema([(KEY, "key"), *((name, kinds[its]) for name, its in sources.items())]),
        classes=classes,
        options=options,
        blob_bytes=sum(shard.blobs for shard in told),
        names=tuple(found.names),
    )
    return result, left_out


def _class_names(
    root: str, scanned: Iterable[tuple[str, Scanned]], label: str
) -> tuple[str, ...] | None:
    """Return the names of the classes that the files have for a field. Raises SourceError."""
    named: dict[tuple[str, ...], str] = {}  # the first file that has these classes
    for name, shard in scanned:
        if (classes := shard.classes.get(label)) is not None:
            named.setdefault(classes, name)
    if len(named) > 1:
        shown = "; ".join(
            f"{printable(name)} has {len(classes):,}: {', '.join(map(printable, classes[:10]))}"
            for classes, name in list(named.items())[:2]
        )
        raise SourceError(
            f"{printable(root)}: its files have other classes for {printable(label)!r}, so "
            f"the same number would mean two things: {shown}. Index them apart, by --files"
        )
    return next(iter(named), None)


def scan_shard(
    found: Found,
    folder: str | None,
    dataset_id: bytes,
    number: int,
    add: Callable[[int], None],
    skip: bool = False,
) -> Scanned:
    """Index one shard, and learn what its file says of itself: few formats say more.

    folder: where the index is written; None: nowhere. skip: as of `scan_all`
    """
    name = found.names[number]
    extra = found.extras[number] if found.extras else b""
    file = FOREIGN[found.format].file(found.place, name, extra, sweep=True)
    with contextlib.closing(file):
        places, checksums, hashes = array("Q"), array("Q"), array("I")  # of one: offset, length
        scalars: dict[str, list[Any]] = defaultdict(list)
        seen: dict[str, FieldValues] = defaultdict(FieldValues)
        passed = blobs = 0
        for record, (offset, length, data, values) in enumerate(file.walk()):
            key = values.pop(KEY, None)
            if type(key) is not bytes or not 0 < len(key) <= MAX_KEY:
                try:
                    key = key_of({KEY: key}, name, record)
                except ValueError as error:
                    raise file.undecodable(record, offset, error) from None
            places.append(offset)
            places.append(length)
            checksums.append(checksum(data))
            hashes.append(key_hash(key))
            blobs += _observe(values, file.lists, record, seen, scalars)
            if len(seen) > MAX_FIELDS:  # each may have a column, as long as there are records
                raise SourceError(
                    f"{file.name}: record {record} at byte {offset}: with it the records have over "
                    f"{MAX_FIELDS:,} fields, the last {printable(next(reversed(seen)))}; a dataset "
                    f"has at most {MAX_FIELDS:,}. Put values with names of their own into one field"
                )
            if offset + length - passed >= _CHECK_BYTES:
                add(offset + length - passed)
                passed = offset + length
        records = len(hashes)
        columns = {
            name: values + [None] * (records - len(values))
            for name, values in scalars.items()
            if seen[name].types <= {"int", "float"} or seen[name].types == {"bool"}
        }
        try:
            described = file.extra()
        except NoImageError as error:
            if not skip:
                return Scanned(problems=error.problems)
            extras = [*found.extras]
            extras[number] = ImageRun(found.place, name, extra).without(dict(error.problems))
            less = replace(found, extras=extras)
            again = scan_shard(less, folder, dataset_id, number, lambda count: None, skip=True)
            problems = [*error.problems, *again.problems]
            return replace(again, problems=problems, extra=again.extra or extras[number])
        body = dump(number, dataset_id, places, checksums, hashes, columns, described)
        sealed = int.from_bytes(body[-8:], "little")
        if folder is not None:
            local.write_file(folder, sidecar_name(number, sealed), body)
            body = b""
        digest = file.sha256()
        add(max(0, file.size - passed))
        info = ShardInfo(name, number, records, file.size, digest, sealed)
        return Scanned(info, seen, blobs, file.classes(), file.largest_group(), body)


def _observe(
    values: Values,
    lists: bool,
    record: int,
    seen: dict[str, FieldValues],
    scalars: dict[str, list[Any]],
) -> int:
    """Note what the values of a record are; return the bytes of its blobs."""
    blobs = 0
    for name, value in values.items():
        if value is None:
            continue
        if lists and type(value) is not bytes:
            value = only(value)
        kind = type(value).__name__
        one = seen[name]
        one.types.add(kind)
        if kind == "bytes":
            blobs += len(value)
            if one.looked < _SNIFFED:
                one.looked += 1
                one.images = one.images and image_type(value[:32]) is not None
        elif kind in _SCALARS:
            column = scalars[name]
            if len(column) < record:
                column += [None] * (record - len(column))
            column.append(value)
    return blobs


def _kind(seen: FieldValues) -> str:
    """Return the kind of a field, by the types of all its values."""
    if seen.types == {"bytes"}:
        return "image" if seen.images else "bytes"
    for kind, fitting in (
        ("bool", {"bool"}),
        ("int", {"int"}),
        ("float", {"int", "float"}),
        ("str", {"str"}),
        ("array", {"ndarray", "int", "float"}),  # of lists: some of one element
    ):
        if seen.types <= fitting:
            return kind
    return "json"


def _mapping(kinds: Mapping[str, str], fields: Mapping[str, str]) -> dict[str, str]:
    """Return our name of each field, and theirs: image, label, then the others by name.

    Raises OptionError.
    """
    check_known_fields(fields, kinds)
    sources = dict(fields)
    used = set(fields.values())
    for name, known, fitting in (
        ("image", IMAGES, ("image", "bytes")),
        ("label", LABELS, ("int", "float")),
    ):
        if name in sources:
            continue
        found = [one for one in known if one not in used and kinds.get(one) in fitting]
        if name == "image":
            found.sort(key=lambda one: kinds[one] != "image")
        if found:
            sources[name] = found[0]
            used.add(found[0])
    for source in kinds:
        if source not in used:
            if source in sources:
                raise OptionError(
                    f"two fields would be called {printable(source)!r}; name them by --fields"
                )
            sources[source] = source
    first = ("image", "label")
    order = [*(name for name in first if name in sources), *sorted(sources.keys() - {*first})]
    return {name: sources[name] for name in order}
