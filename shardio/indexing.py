"""Datasets of other formats, read where they are: one pass over them, and an index is made.

    index("imagenet-wds/")                  manifest.json and one index a shard, beside the data
    index("imagenet-wds/", out="idx/")      or elsewhere; then opened with root="imagenet-wds/"

How it works. Each shard is scanned by its format's layout, in parallel: the place and checksum of
every record, its key, its small numbers. What kind a field is follows from all its values, over all
shards. Nothing is copied, and no file of the data is touched. Until the manifest is in place,
nothing was indexed.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import __version__, manifest, parallel
from .errors import DamageError, ExistsError, OptionError, SourceError, printable
from .formats import FOREIGN, FOREIGN_FILES
from .formats.base import MAX_RECORDS, ShardInfo
from .formats.columns import checksum, key_hash
from .formats.foreign import MAX_RECORD, Values, dump, only, own_key, sidecar_name
from .sample import KEY, MAX_KEY, MAX_NAME, Schema
from .sources import image_type
from .storage import local, local_path, locate

_CHECK_BYTES = 4 << 20  # between two looks at whether to stop
_SNIFFED = 16  # values of a field, in each shard, that are looked at for being images

# Names that the field `image`, and `label`, have in common datasets; the first that is there wins.
IMAGES = (
    *("image", "jpg", "jpeg", "png", "webp", "image/encoded", "img", "x", "data", "image.jpg"),
    *("image.png", "pil", "picture", "content", "bytes", "tif", "tiff", "bmp", "gif", "ppm", "jp2"),
)
LABELS = (
    *("label", "cls", "class", "image/class/label", "target", "y", "labels", "class_id"),
    *("category_id", "fine_label", "label.cls"),
)


@dataclass
class Indexed:
    """What one call of `index` found."""

    out: str
    root: str
    format: str
    shards: int = 0
    records: int = 0
    bytes: int = 0
    fields: dict[str, str] = field(default_factory=dict)  # name and kind
    sources: dict[str, str] = field(default_factory=dict)  # of fields that have another name
    left_out: list[str] = field(default_factory=list)  # whose names no field can have
    seconds: float = 0.0


@dataclass
class Seen:
    """The values that one field had."""

    types: set[str] = field(default_factory=set)
    images: bool = True  # of bytes: all that were looked at are images
    looked: int = 0

    def merge(self, other: Seen) -> None:
        self.types |= other.types
        self.images &= other.images


@dataclass(frozen=True)
class _Task:
    format: str
    root: str
    name: str
    number: int
    out: str
    token: str
    dataset_id: bytes


def index(
    directory: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    format: str | None = None,
    fields: Mapping[str, str] | None = None,
    jobs: int | None = None,
    overwrite: bool = False,
    progress: parallel.Progress | None = None,
) -> Indexed:
    """Make a dataset of files that another tool wrote, where they are.

    out        where manifest and index go; default: beside the data
    format     default: told from the names of the files
    fields     our names of fields, and theirs: {"image": "jpg"}; others keep their own, and the
               field `image`, and `label`, are found in common datasets by themselves
    jobs       processes; default: one a core
    overwrite  replace the manifest that is there

    Raises OptionError, SourceError, DamageError, StorageError, ExistsError.
    """
    began = time.perf_counter()
    root = local_path(directory)
    folder = root if out is None else local_path(out)
    wanted = dict(fields or {})
    chosen, names = _shards(root, format)
    jobs = parallel.processes(jobs)
    local.make_directory(folder)
    storage = locate(folder)
    if storage.exists(manifest.MANIFEST) and not overwrite:
        raise ExistsError(
            f"{printable(folder)}: holds a {manifest.MANIFEST} already; --overwrite replaces it"
        )
    sizes = [os.path.getsize(os.path.join(root, name)) for name in names]
    plan = {"format": chosen, "fields": wanted, "shards": list(zip(names, sizes, strict=True))}
    dataset_id = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).digest()[:16]
    token = local.token()
    tasks = [
        _Task(chosen, root, name, number, folder, token, dataset_id)
        for number, name in enumerate(names)
    ]
    report = parallel.Report(progress, sum(sizes))
    infos: list[ShardInfo] = []
    seen: dict[str, Seen] = {}
    blobs = 0
    for info, found, size in parallel.run(_scan, tasks, jobs=min(jobs, len(tasks)), report=report):
        infos.append(info)
        blobs += size
        for name, one in found.items():
            seen.setdefault(name, Seen()).merge(one)
    kinds = {name: _kind(one) for name, one in seen.items() if one.types}
    left_out = [name for name in kinds if not _nameable(name) and name not in wanted.values()]
    for name in left_out:
        del kinds[name]
    sources = _mapping(kinds, wanted)
    listed = [(name, kinds[source]) for name, source in sources.items()]
    schema = Schema([(KEY, "key"), *listed])
    made = manifest.make(
        infos,
        dataset_id=dataset_id,
        format=chosen,
        schema=schema,
        classes=None,
        options={"fields": {name: source for name, source in sources.items() if name != source}},
        library=__version__,
        blob_bytes=blobs,
        names=tuple(names),
    )
    local.write_file(folder, manifest.MANIFEST, made.dump(), replace=overwrite)
    return Indexed(
        out=folder,
        root=root,
        format=chosen,
        shards=len(infos),
        records=made.records,
        bytes=made.size,
        fields=dict(schema.fields),
        sources={name: source for name, source in sources.items() if name != source},
        left_out=left_out,
        seconds=time.perf_counter() - began,
    )


def detect(names: Iterable[str]) -> dict[str, list[str]]:
    """The files that each format claims by their names."""
    claimed: dict[str, list[str]] = {}
    for name in names:
        for format, pattern in FOREIGN_FILES.items():
            if pattern.search(name):
                claimed.setdefault(format, []).append(name)
                break
    return claimed


def _shards(root: str, format: str | None) -> tuple[str, list[str]]:
    """The format, and the names of its files below a folder, sorted."""
    if format is not None and format not in FOREIGN:
        raise OptionError(
            f"--format {printable(format)}: formats that are read in place are {', '.join(FOREIGN)}"
        )
    shown = printable(root)
    if not os.path.isdir(root):
        raise SourceError(f"{shown}: expected a directory")
    files = sorted(_files(root), key=os.fsencode)
    claimed = detect(files)
    if format is not None:
        names = claimed.get(format, [])
        if not names:
            raise SourceError(f"{shown}: no file in it has a name of {format}")
        return format, names
    if not claimed:
        known = ", ".join(FOREIGN)
        raise SourceError(
            f"{shown}: no file in it looks like one of {known}; `shardio pack` packs folders of "
            "images"
        )
    if len(claimed) > 1:
        found = ", ".join(f"{len(names):,} of {name}" for name, names in claimed.items())
        raise SourceError(f"{shown}: holds files of several formats: {found}; choose by --format")
    return next(iter(claimed.items()))


def _files(root: str) -> Iterable[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if not name.startswith("."):
                yield os.path.relpath(os.path.join(folder, name), root).replace(os.sep, "/")


def _scan(task: _Task, add: Callable[[int], None]) -> tuple[ShardInfo, dict[str, Seen], int]:
    """Scan one shard and write its index. What the manifest says of it, and what its fields are."""
    layout = FOREIGN[task.format]
    storage = locate(task.root)
    file = layout.open(storage, task.name, b"")
    try:
        ranges: list[tuple[int, int]] = []
        checksums: list[int] = []
        hashes: list[int] = []
        scalars: dict[str, list[Any]] = {}
        seen: dict[str, Seen] = {}
        passed = blobs = 0
        for record, (offset, length) in enumerate(layout.scan(file)):
            if length > MAX_RECORD or record >= MAX_RECORDS:
                raise DamageError(
                    f"{file.name}: record {record} at byte {offset}: {length:,} bytes; a record "
                    f"has at most {MAX_RECORD:,}, and a shard {MAX_RECORDS:,} of them"
                )
            data = file.read(offset, length)
            try:
                values = layout.values(data, record, file)
                key = values.pop(KEY, None)
                if key is None:
                    key = own_key(task.name, record)
                if not 0 < len(key) <= MAX_KEY:
                    raise ValueError(f"a key of {len(key):,} bytes; expected 1 to {MAX_KEY:,}")
            except ValueError as error:
                raise DamageError(
                    f"{file.name}: record {record} at byte {offset}: {error}"
                ) from None
            ranges.append((offset, length))
            checksums.append(checksum(data))
            hashes.append(key_hash(key))
            blobs += _observe(values, layout.lists, record, seen, scalars)
            if offset + length - passed >= _CHECK_BYTES:
                add(offset + length - passed)
                passed = offset + length
        records = len(ranges)
        columns = {
            name: values + [None] * (records - len(values))
            for name, values in scalars.items()
            if seen[name].types <= {"int", "float"} or seen[name].types == {"bool"}
        }
        body = dump(
            task.number, task.dataset_id, ranges, checksums, hashes, columns, layout.extra(file)
        )
        sealed = int.from_bytes(body[-8:], "little")
        local.write_file(task.out, sidecar_name(task.number, sealed), body)
        digest = file.sha256()
        add(max(0, file.size - passed))
        info = ShardInfo(task.name, task.number, records, file.size, digest, sealed)
        return info, seen, blobs
    finally:
        file.close()


def _observe(
    values: Values,
    lists: bool,
    record: int,
    seen: dict[str, Seen],
    scalars: dict[str, list[Any]],
) -> int:
    """Note what the values of a record are; the bytes of its blobs."""
    blobs = 0
    for name, value in values.items():
        if value is None:
            continue
        if lists:
            value = only(value)
        kind = type(value).__name__
        one = seen.get(name)
        if one is None:
            one = seen[name] = Seen()
        one.types.add(kind)
        if kind == "bytes":
            blobs += len(value)
            if one.looked < _SNIFFED:
                one.looked += 1
                one.images = one.images and image_type(value[:32]) is not None
        elif kind in ("int", "float", "bool"):
            column = scalars.get(name)
            if column is None:
                column = scalars[name] = []
            if len(column) < record:
                column += [None] * (record - len(column))
            column.append(value)
    return blobs


def _kind(seen: Seen) -> str:
    """The kind of a field, by the types of all its values."""
    types = seen.types
    if types == {"bytes"}:
        return "image" if seen.images else "bytes"
    for kind, fitting in (
        ("bool", {"bool"}),
        ("int", {"int"}),
        ("float", {"int", "float"}),
        ("str", {"str"}),
        ("array", {"ndarray"}),
    ):
        if types <= fitting:
            return kind
    if types <= {"ndarray", "int", "float"}:  # of lists: some of one element
        return "array"
    return "json"


def _mapping(kinds: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    """Our name of each field, and theirs. Raises OptionError."""
    for name, source in wanted.items():
        if source not in kinds:
            raise OptionError(
                f"--fields {printable(name)}={printable(source)}: no field is called "
                f"{printable(source)!r}; there are {', '.join(map(printable, kinds))}"
            )
    sources = dict(wanted)
    used = set(wanted.values())
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
    return {name: sources[name] for name in sorted(sources, key=_place)}


def _nameable(name: str) -> bool:
    return 1 <= len(name.encode("utf-8", "replace")) <= MAX_NAME and name.isprintable()


def _place(name: str) -> tuple[int, str]:
    """image, label, then the others by name."""
    order = ("image", "label")
    return (order.index(name) if name in order else len(order), name)
