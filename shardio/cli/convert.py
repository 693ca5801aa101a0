"""`index`, `unpack`, `export`, `copy`, `repair`: from files of others, back to them, elsewhere."""

from __future__ import annotations

import time
from typing import Any

from .command import (
    FIELDS,
    JOBS,
    OUT,
    OVERWRITE,
    READ_FROM,
    RESUME_HINT,
    SHARED,
    STORE,
    TARGET,
    Command,
    calls,
    option,
    read_fields,
)
from .exit_codes import DONE, SKIPPED
from .output import Output, facts_of


def _index(output: Output, *, fields: str | None = None, **call: Any) -> int:
    from ..packing.index import index

    with output.progress("listing", "indexing", "committing") as progress:
        named = read_fields(fields)
        done = index(**call, fields=named, progress=progress, announce=output.announce)
    output.show(done, facts=facts_of(done))
    return SKIPPED if done.rejected else DONE


def _unpack(output: Output, **call: Any) -> int:
    from ..packing.unpack import unpack

    began = time.monotonic()
    with output.progress("unpacking") as progress:
        done = unpack(**call, progress=progress)
    output.took("unpacked", done.files, "file", done.bytes, began)
    return output.show(done)


def _export(output: Output, *, fields: str | None = None, **call: Any) -> int:
    from ..packing.export import export

    if fields is not None:  # NAME alone: it is called so there, too, as far as possible
        named = read_fields(fields, alone=True)
        call["fields"] = {name: theirs or None for name, theirs in named.items()}
    began = time.monotonic()
    with output.progress("looking", "exporting", "finishing", unit=" records") as progress:
        done = export(**call, progress=progress, announce=output.announce)
    output.took("exported", done.records, "record", done.bytes, began)
    return output.show(done)


def _repair(output: Output, **call: Any) -> int:
    from ..packing.repair import repair

    with output.progress("looking", "repairing", "committing") as progress:
        done = repair(**call, progress=progress)
    output.show(done)
    return SKIPPED if done.lost else DONE


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
    *SHARED,
    OVERWRITE,
    option("--checksum"),
    option("--gone", choices=("drop",)),
    option("--forget"),
    option("--on-error", choices=("raise", "skip")),
    option("--dry-run"),
    *STORE,
    examples=(
        "shardio index tars",
        "shardio index tars --fields image=jpg,label=cls",
        "shardio index tars --checksum",
        "shardio index s3://bucket/tars --out index",
    ),
    resume_hint=lambda options: RESUME_HINT if options.get("part") else "",
    forks=True,
)

UNPACK = Command(
    "unpack",
    "write the packed files back into a folder",
    _unpack,
    "packing.unpack:unpack",
    OUT,
    option("directory", "DIR", "where the files go"),
    OVERWRITE,
    *READ_FROM,
    examples=("shardio unpack packed photos-again",),
    resume_hint=lambda options: "" if options.get("overwrite") else RESUME_HINT,
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
    *SHARED,
    OVERWRITE,
    *READ_FROM,
    examples=(
        "shardio export packed tars --format webdataset",
        "shardio export packed records --format tfrecord --fields image,label",
    ),
)

COPY = Command(
    "copy",
    "copy a dataset between disks and object stores, checked and resumable",
    calls("packing.copy:copy", "listing", "copying", "committing", announces=True),
    "packing.copy:copy storage.options:Storage",
    option("source", "SRC", "the packed or indexed directory, or its URL"),
    option("target", "DST"),
    OVERWRITE,
    option("--recheck"),
    JOBS,
    *SHARED,
    *READ_FROM,
    TARGET,
    examples=(
        "shardio copy packed /nvme/packed",
        "shardio copy packed s3://bucket/packed --jobs 8",
    ),
    resume_hint=lambda options: RESUME_HINT,
)

REPAIR = Command(
    "repair",
    "write what is whole of a damaged dataset into a new one",
    _repair,
    "packing.repair:repair storage.options:Storage",
    option("path", "OUT", "the damaged directory, or its URL"),
    option("new", "NEW"),
    option("--from", "COPY", dest="copy"),
    JOBS,
    *STORE,
    examples=(
        "shardio repair packed mended",
        "shardio repair packed mended --from s3://bucket/packed",
    ),
    resume_hint=lambda options: "NEW is no dataset yet; run the same command again, it begins anew",
    forks=True,
)
