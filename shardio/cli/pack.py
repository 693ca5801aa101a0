"""`pack`, `commit` and `gc`: how a packed directory comes to be, and stays clean."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shlex
import sys
from argparse import BooleanOptionalAction
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ShardioError, printable
from .command import (
    EXECUTOR,
    FIELDS,
    JOBS,
    OVERWRITE,
    PART_OF_A_PACKING,
    PARTS,
    RESUME_HINT,
    ROOT,
    STORE,
    TARGET,
    WORK_DIR,
    Command,
    calls,
    option,
    read_fields,
)
from .exit_codes import DONE, FAILED, SKIPPED
from .output import Output, facts_of, paint

if TYPE_CHECKING:
    from ..packing.packed import Packed


def _pack(output: Output, **call: Any) -> int:
    from ..packing.pack import pack

    _, commit = _together(call)
    _group(call)
    with output.progress("listing", "packing", "committing") as progress:
        done = pack(**call, progress=progress, announce=output.announce)
    dry, built = call.get("dry_run", False), call["plan"].part is not None
    advice = None
    if built and not dry and not all(one.already for one in done):
        advice = f"next: {commit}, when all parts are built"
    return _show(output, done, call.get("on_error") == "skip", dry, advice)


def _plan(output: Output, **call: Any) -> int:
    from ..packing.pack import plan

    more, commit = _together(call)
    if not more and call["storage"].options is not None:  # in no plan, and maybe nobody's to read
        more = " --store-option ..."
    _group(call)
    with output.progress("listing", "reading", "planning") as progress:
        done = plan(**call, progress=progress, announce=output.announce)
    if all(one.already for one in done):
        return _show(output, done)
    root = call["read"].root
    words = [call["source"], call["out"], *(["--root", root] if root is not None else [])]
    pack = " ".join(map(_quoted, words)) + more
    advice = f"next: shardio pack {pack} --part I/N for I from 1 to N, then {commit}"
    return _show(output, done, advice=advice)


def _together(call: Mapping[str, Any]) -> tuple[str, str]:
    """Return the options that all parts need to build for a store, and the line that commits."""
    more, given = "", call["to"].options if "to" in call else call["storage"].options
    if "work_dir" in call:
        more = f" --work-dir {_quoted(call['work_dir'])}{' --store-option ...' if given else ''}"
    return more, f"shardio commit {_quoted(call['out'])}{more}"


def _quoted(path: str | os.PathLike[str]) -> str:
    """Return a path as it is typed into a shell."""
    return shlex.quote(printable(os.fspath(path)))


def _group(call: dict[str, Any], *groups: str) -> None:
    """Read conditions and names of fields, and put options into groups.

    groups: of those that `pack` takes; default: all
    """
    from ..order.subset import conditions
    from ..packing.options import GROUPS

    where = call.pop("where", None)
    call |= {"fields": read_fields(call.pop("fields", None))}
    call["where"] = conditions(where) if where else None
    if (files := call.pop("split_files", None)) is not None:
        call["split_files"] = read_fields(files, option="--split-files")
    for group in groups or GROUPS:
        kind = GROUPS[group]
        named = [one.name for one in dataclasses.fields(kind)]
        call[group] = kind(**{name: call.pop(name) for name in named if name in call})


def _commit(output: Output, **call: Any) -> int:
    from ..packing.commit import commit

    with output.progress("looking", "checking", "committing") as progress:
        done = commit(**call, progress=progress, announce=output.announce)
    return _show(output, done)


def _show(
    output: Output,
    done: Sequence[Packed],
    skips: bool = True,
    dry: bool = False,
    advice: str | None = None,
) -> int:
    """Show what was packed, and return the exit code."""
    lines = [*map(str, done), *([paint(advice, "hint", sys.stdout)] if advice else [])]
    output.show("\n".join(lines), facts={"dry_run": dry, "datasets": [*map(facts_of, done)]})
    if not any(one.rejected for one in done):
        return DONE
    return FAILED if dry and not skips else SKIPPED


def _append(output: Output, **call: Any) -> int:
    from ..packing.append import append

    return _grow(output, append, call, "appending")


def _update(output: Output, **call: Any) -> int:
    from ..packing.update import update

    return _grow(output, update, call, "updating")


def _grow(output: Output, grow: Callable[..., Any], call: dict[str, Any], stage: str) -> int:
    """Append to a dataset, or update it, and show what was done. Returns the exit code."""
    more, commit = _together(call)
    advice = f"next: {commit}, when all parts are built"
    if call.get("plan"):
        line = " ".join(map(_quoted, [call["source"], call["out"]])) + more
        command = f"shardio {grow.__name__} {line}"
        advice = f"next: {command} --part I/N for I from 1 to N, then {commit}"
    if call.get("dry_run") or not (call.get("plan") or "part" in call):
        advice = ""
    _group(call, "read")  # all else is as the dataset was packed
    with output.progress("listing", stage, "committing") as progress:
        done = grow(**call, progress=progress, announce=output.announce)
    lines = [str(done), *([paint(advice, "hint", sys.stdout)] if advice else [])]
    output.show("\n".join(lines), facts=facts_of(done))
    return SKIPPED if done.rejected else DONE


def _pack_resume_hint(options: Mapping[str, Any]) -> str:
    """Say how to go on, and where an object store's part of the work lies on this machine."""
    from ..packing.output_dir import working_directory
    from ..storage.location import locate
    from ..storage.remote import RemoteLocation

    if options.get("dry_run"):
        return ""
    advice = RESUME_HINT
    if options.get("restart"):
        advice = advice.replace("again", "again, without --restart,")
    with contextlib.suppress(ShardioError):
        place = locate(options["out"])
        if isinstance(place, RemoteLocation):
            folder = working_directory(place, options.get("work_dir"))
            if os.path.isdir(folder):
                advice += f"; until then, unfinished work lies in {printable(folder, 4096)}"
    return advice


_DESCRIBED = (
    "packing.pack:pack packing.options:SourceOptions packing.options:ImageOptions "
    "packing.options:PlanOptions"
)
_SOURCE = option(
    "source", "SRC", "a folder of images, a listing, a dataset, or the URL of one of these"
)
_READ = (  # options that say how a source is read
    option(
        "--from",
        "KIND",
        "what SRC is, where that cannot be told: imagefolder, files, trees, listing, coco, "
        "arrays, dataset, or a format that `index` reads",
        dest="kind",
    ),
    ROOT,
    FIELDS,
    option(
        "--where",
        "COND",
        "only records with label=cat,dog, or width>=256; several: all must hold",
        action="append",
    ),
    option("--label", "REGEX"),
    option("--table", "FILE[:COLUMNS]", dest="tables", action="append"),
    option(
        "--split-files",
        "NAME=FILE,...",
        "the splits, and files that list the images of each: train=train.txt,val=val.txt",
    ),
    option("--split-by", "COLUMN"),
    option("--boxes", "DIR"),
    option("--first-label", "N"),
    option("--layout", "NAME=BYTES,..."),
    option("--ignore", action=BooleanOptionalAction),
)
_ON_ERROR = option(
    "--on-error",
    text="files that cannot be packed: fail and list them (default), or leave them out",
    choices=("raise", "skip"),
)
_CHECK_IMAGES = option(
    "--check-images",
    text="decode every image: one that cannot be decoded, such as a truncated one, is not packed",
)
_PLANNED = (  # options that a plan follows from
    option("--shard-size", "SIZE"),
    option("--max-records", "N"),
    option("--shuffle", action=BooleanOptionalAction),
    option("--seed", "N", "of that shuffle (default 0)"),
    *_READ,
    option("--splits", action=BooleanOptionalAction),
    option("--classes", "OTHER"),
    option("--resize", "N"),
    option("--quality", "Q"),
    option("--encode", "raw"),
    option("--jpeg-tiles"),
    option("--keep-original"),
    _CHECK_IMAGES,
    option(
        "--max-pixels",
        "N",
        "the largest image to decode, for --resize, --encode raw, --jpeg-tiles and --check-images",
    ),
    OVERWRITE,
    option("--restart"),
    option("--format", "FORMAT"),
    *STORE,
)

PACK = Command(
    "pack",
    "pack a folder of images, or another source, into shards",
    _pack,
    _DESCRIBED,
    _SOURCE,
    option("out", "OUT", "the directory, or URL, that becomes the dataset"),
    *_PLANNED,
    JOBS,
    *EXECUTOR,
    PART_OF_A_PACKING,
    *PARTS[1:],
    _ON_ERROR,
    option("--dry-run", text="say what would be done and touch nothing"),
    WORK_DIR,
    TARGET,
    examples=(
        "shardio pack photos packed",
        "shardio pack photos packed --jpeg-tiles --on-error skip",
        "shardio pack list.csv packed --root photos --where label=cat",
        "shardio pack s3://bucket/photos packed --store-option region=eu-west-1",
    ),
    resume_hint=_pack_resume_hint,
    forks=True,
)

PLAN = Command(
    "plan",
    "list a source once, for all parts of a packing",
    _plan,
    _DESCRIBED,
    _SOURCE,
    option("out", "OUT", "the directory, or URL, that becomes the dataset"),
    *_PLANNED,
    WORK_DIR,
    TARGET,
    examples=(
        "shardio plan photos packed --shard-size 64MB",
        "shardio pack photos packed --part 1/8  # and so on; then shardio commit packed",
    ),
    forks=True,
)

COMMIT = Command(
    "commit",
    "commit what the parts of a packing built",
    _commit,
    "packing.commit:commit packing.pack:pack",
    option("out", "OUT", "the directory, or URL, that the parts packed into"),
    option("--parts", "N", "how many parts there are: what is missing is told by part, too"),
    option(
        "--wait",
        text="wait until all parts have built their shards, as long as it takes",
        dest="wait_s",
        action="store_const",
        const=math.inf,
    ),
    option(
        "--quick",
        text="read no shard whole that has not changed since its part wrote it; then let `shardio "
        "verify` read them, by parts also",
    ),
    *STORE,
    option("--work-dir", "DIR", "if OUT is a URL: the directory that the parts were given"),
    JOBS,
    OVERWRITE,
    examples=("shardio commit packed", "shardio commit packed --wait --parts 8"),
    resume_hint=lambda options: RESUME_HINT,
    forks=True,
)

_GROWS = (  # options of `append` and `update`
    _SOURCE,
    option("out", "OUT", "the packed directory, or its URL"),
    *_READ,
    *STORE,
    TARGET,
    WORK_DIR,
    JOBS,
    _CHECK_IMAGES,
    _ON_ERROR,
    option("--restart"),
    *EXECUTOR,
    PART_OF_A_PACKING,
    *PARTS[1:],
    option("--plan", text="only list the source, and leave the plan in OUT, for all parts"),
)

APPEND = Command(
    "append",
    "add what is new in a source to a packed dataset",
    _append,
    "packing.append:append packing.options:SourceOptions",
    *_GROWS,
    option(
        "--on-duplicate",
        text="of a key that is there: nothing is appended (default), the record that is there "
        "stays, or the new one takes its place",
        choices=("error", "skip", "replace"),
    ),
    option("--dry-run", text="say what would be done and touch nothing"),
    examples=(
        "shardio append new-photos packed",
        "shardio append photos packed --on-duplicate skip",
        "shardio append new-photos packed --part 1/8  # then shardio commit packed",
    ),
    resume_hint=lambda options: "" if options.get("dry_run") else RESUME_HINT,
    forks=True,
)

UPDATE = Command(
    "update",
    "make a packed dataset what its whole source is now",
    _update,
    "packing.update:update packing.append:append packing.options:SourceOptions",
    *_GROWS,
    option("--checksum"),
    option("--assume-unchanged"),
    option(
        "--gone",
        text="records that the source has not any more: drop (default, but not of more than half "
        "of all) or keep",
        choices=("drop", "keep"),
    ),
    option("--dry-run", text="say what is new, changed and gone, and change nothing"),
    examples=(
        "shardio update photos packed --dry-run",
        "shardio update photos packed",
        "shardio update photos packed --part 1/8  # then shardio commit packed",
    ),
    resume_hint=lambda options: "" if options.get("dry_run") else RESUME_HINT,
    forks=True,
)

GC = Command(
    "gc",
    "remove files that no manifest names",
    calls("packing.gc:gc"),
    "packing.gc:gc",
    option("path", "OUT", "the packed directory, or its URL"),
    option(
        "--keep",
        "AGE",
        "a file goes only when it, and the manifest that does not name it, are older: 90m, 24h, "
        "7d; default: a day",
        dest="keep_s",
    ),
    option("--keep-versions", "N"),
    option("--dry-run"),
    *STORE,
    examples=("shardio gc packed --dry-run", "shardio gc packed --keep-versions 10"),
)
