"""Change a dataset: `drop`, `annotate`, `compact`; versions: `log`, `diff`, `tag`, `restore`."""

from __future__ import annotations

import sys
from typing import Any

from ..errors import OptionError, StorageError, printable
from .command import (
    JOBS,
    OUT,
    RESUME_HINT,
    ROOT,
    STORE,
    WORK_DIR,
    Command,
    calls,
    commit_hint,
    option,
    read_fields,
)
from .output import Output


def _drop(output: Output, *, keys: str | None = None, **call: Any) -> int:
    from ..packing.drop import drop

    if keys is not None:
        call["keys"] = lines_of("--keys", keys)
    stage = "verifying" if call.get("damaged") else "erasing"
    with output.progress("looking", stage, "committing") as progress:
        done = drop(**call, progress=progress)
    return output.show(done)


def _annotate(output: Output, *, fields: str | None = None, **call: Any) -> int:
    from ..packing.annotate import annotate

    if fields is not None:
        call["fields"] = read_fields(fields, alone=True)
    return output.show(annotate(**call))


def lines_of(option: str, name: str) -> list[bytes]:
    """Return the lines of a file, or of stdin. Raises OptionError, StorageError."""
    try:
        if name == "-":
            data = sys.stdin.buffer.read()
        else:
            with open(name, "rb") as file:
                data = file.read()
    except OSError as error:
        raise StorageError(f"{option} {printable(name)}: {error.strerror}") from None
    found = [line for line in data.replace(b"\r\n", b"\n").split(b"\n") if line]
    if not found:
        raise OptionError(f"{option} {printable(name)}: no key is in it; expected one a line")
    return found


DROP = Command(
    "drop",
    "hide records from every reader, as a new version",
    _drop,
    "packing.drop:drop storage.options:Storage",
    OUT,
    option("--keys", "FILE", "keys of the records, one a line; -: from stdin"),
    option("--where", "COND", "conditions on the index: label=cat, score<0.5", action="append"),
    option(
        "--damaged",
        text="all records that `shardio verify --decode` finds damaged",
    ),
    option("--missing", choices=("error", "ignore")),
    option("--erase"),
    option("--restart"),
    option("--dry-run"),
    option("--max-pixels", "N"),
    JOBS,
    ROOT,
    *STORE,
    examples=(
        "shardio drop packed --keys opted-out.txt",
        "shardio drop packed --keys opted-out.txt --erase",
        "shardio drop packed --where label=cat --dry-run",
        "shardio drop packed --damaged",
    ),
    resume_hint=commit_hint,
    forks=True,
)

ANNOTATE = Command(
    "annotate",
    "add fields to records, or correct values, as a new version",
    _annotate,
    "packing.annotate:annotate storage.options:Storage",
    OUT,
    option("table", "TABLE", "a .csv, .tsv, .jsonl, .parquet or .npy with the values", nargs="?"),
    option(
        "--fields",
        "NAME=THEIRS,...",
        "the fields to write, and the columns they come from, where these are called otherwise: "
        "label,caption=text writes label, and caption from the column text; default: all columns. "
        "An array needs the name of one field",
    ),
    option("--key", "COLUMN"),
    option("--missing", choices=("error", "none")),
    option("--unknown", choices=("error", "ignore")),
    option(
        "--remove",
        "NAME",
        "instead of a table: a field whose annotated values are taken away (several: once each). "
        "One that was added is gone then; one that was packed has its packed values again",
        action="append",
    ),
    option("--dry-run"),
    ROOT,
    *STORE,
    examples=(
        "shardio annotate packed captions.csv --fields caption=text",
        "shardio annotate packed clip.npy --fields clip",
        "shardio annotate packed --remove captoin",
    ),
    resume_hint=commit_hint,
)

COMPACT = Command(
    "compact",
    "merge small shards, and leave out what was dropped, as a new version",
    calls("packing.compact:compact", "listing", "compacting", "committing"),
    "packing.compact:compact storage.options:Storage",
    OUT,
    option("--shard-size", "SIZE"),
    *STORE,
    WORK_DIR,
    JOBS,
    option("--restart"),
    option("--dry-run"),
    examples=("shardio compact packed --dry-run", "shardio compact packed"),
    resume_hint=lambda options: "" if options.get("dry_run") else RESUME_HINT,
    forks=True,
)

LOG = Command(
    "log",
    "list the versions of a dataset",
    calls("packing.versions:log"),
    "packing.versions:log",
    OUT,
    *STORE,
    examples=("shardio log packed", "shardio log packed --json"),
)

DIFF = Command(
    "diff",
    "compare two versions: keys added, dropped, changed",
    calls("packing.versions:diff"),
    "packing.versions:diff",
    OUT,
    option("old", "A"),
    option("new", "B", nargs="?"),
    option("--root", "DIR", "where files of others are, if their index is elsewhere"),
    *STORE,
    examples=("shardio diff packed v1", "shardio diff packed v1 v1 --json"),
)

TAG = Command(
    "tag",
    "name a version, so that gc keeps it",
    calls("packing.versions:tag"),
    "packing.versions:tag",
    OUT,
    option("name", "TAG"),
    option("--version", "ID"),
    option("--remove"),
    option("--force"),
    *STORE,
    examples=(
        "shardio tag packed v2",
        "shardio tag packed paper --version v1",
        "shardio tag packed newest --force",
    ),
)

RESTORE = Command(
    "restore",
    "make a dataset again what an older version was",
    calls("packing.versions:restore"),
    "packing.versions:restore storage.options:Storage",
    OUT,
    option("version", "VERSION"),
    ROOT,
    *STORE,
    examples=("shardio restore packed v1",),
    resume_hint=commit_hint,
)
