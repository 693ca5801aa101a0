"""`index`, `unpack`, `export` and `copy`: from the files of others, back to them, and elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from .command import (
    EXECUTOR,
    FIELDS,
    GOES_ON,
    JOBS,
    OUT,
    OVERWRITE,
    PARTS,
    ROOT,
    STORE,
    TARGET,
    Command,
    option,
    read_fields,
    take_storage,
    take_target,
)
from .output import Output


def _index(output: Output, *, fields: str | None = None, **call: Any) -> int:
    from ..packing.index import index

    storage = take_storage(call, root=False)
    with output.progress("listing", "indexing", "committing") as progress:
        done = index(
            **call,
            fields=read_fields(fields),
            storage=storage,
            progress=progress,
            announce=output.announce,
        )
    return output.show(done)


def _unpack(output: Output, **call: Any) -> int:
    from ..packing.unpack import unpack

    storage = take_storage(call)
    began = time.monotonic()
    with output.progress("unpacking") as progress:
        done = unpack(**call, storage=storage, progress=progress)
    output.took("unpacked", done.files, "file", done.bytes, began)
    return output.show(done)


def _export(output: Output, *, fields: str | None = None, **call: Any) -> int:
    from ..packing.export import export

    storage = take_storage(call)
    if fields is not None:  # NAME alone: it is called so there, too, as far as possible
        named = read_fields(fields, alone=True)
        call["fields"] = {name: theirs or None for name, theirs in named.items()}
    began = time.monotonic()
    with output.progress("looking", "exporting", "finishing", unit=" records") as progress:
        done = export(**call, storage=storage, progress=progress, announce=output.announce)
    output.took("exported", done.records, "record", done.bytes, began)
    return output.show(done)


def _copy(output: Output, **call: Any) -> int:
    from ..packing.copy import copy

    to, storage = take_target(call), take_storage(call)
    with output.progress("listing", "copying", "committing") as progress:
        done = copy(**call, storage=storage, to=to, progress=progress, announce=output.announce)
    return output.show(done)


def _unpack_goes_on(options: Mapping[str, Any]) -> str:
    return "" if options.get("overwrite") else GOES_ON


INDEX = Command(
    "index",
    "make a dataset of files of another format, in place",
    _index,
    "packing.index:index",
    option("directory", "DIR"),
    option("--out", "IDX"),
    option("--format", "FORMAT"),
    option("--files", "PATTERN"),
    FIELDS,
    option("--classes", "OTHER"),
    JOBS,
    *EXECUTOR,
    *PARTS,
    OVERWRITE,
    *STORE,
    examples=(
        "shardio index tars",
        "shardio index tars --fields image=jpg,label=cls",
        "shardio index s3://bucket/tars --out index",
    ),
    goes_on=lambda options: GOES_ON if options.get("part") else "",
)

UNPACK = Command(
    "unpack",
    "write the packed files back into a folder",
    _unpack,
    "packing.unpack:unpack",
    OUT,
    option("directory", "DIR", "where the files go"),
    OVERWRITE,
    ROOT,
    *STORE,
    examples=("shardio unpack packed photos-again",),
    forks=False,
    goes_on=_unpack_goes_on,
)

EXPORT = Command(
    "export",
    "write a packed dataset in another format",
    _export,
    "packing.export:export",
    OUT,
    option("directory", "DIR", "where the files go; empty, or not there"),
    option("--format", "FORMAT", required=True),
    option("--fields", "NAME=THEIRS,...", "only these, and their names there: label=cls"),
    option("--shard-size", "SIZE"),
    option("--keys", choices=("own", "number")),
    *EXECUTOR,
    *PARTS,
    OVERWRITE,
    ROOT,
    *STORE,
    examples=(
        "shardio export packed tars --format webdataset",
        "shardio export packed records --format tfrecord --fields image,label",
    ),
    forks=False,
)

COPY = Command(
    "copy",
    "copy a dataset between disks and object stores, checked and resumable",
    _copy,
    "packing.copy:copy storage.options:Storage",
    option("source", "SRC", "the packed or indexed directory, or its URL"),
    option("target", "DST"),
    OVERWRITE,
    option("--recheck"),
    option("--jobs", "N"),
    *EXECUTOR,
    *PARTS,
    ROOT,
    *STORE,
    TARGET,
    examples=(
        "shardio copy packed /nvme/packed",
        "shardio copy packed s3://bucket/packed --jobs 8",
    ),
    forks=False,
    goes_on=lambda options: GOES_ON,
)
