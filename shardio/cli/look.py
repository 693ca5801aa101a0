"""`info`, `ls`, `cat` and `verify`: what is in a packed directory, and whether it is as packed."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .._version import __version__, installed
from ..errors import DependencyError, OptionError, printable, there_are
from ..names import key_text
from .command import JOBS, OUT, READ_FROM, SHARED, STORE, Command, option
from .exit_codes import DAMAGED, DONE, FAILED
from .output import Output, as_base64, as_json, paint
from .versions import lines_of

if TYPE_CHECKING:
    from ..dataset.reader import Reader
    from ..dataset.sequence import ShardSequence
    from ..formats.manifest import Manifest
    from ..storage.options import Storage


# --- info -----------------------------------------------------------------------------------------


def _info(output: Output, *, path: str | None = None, env: bool = False, storage: Storage) -> int:
    if env:
        facts = _environment()
        text = "\n".join(f"{name:<10}{value}" for name, value in facts.items())
        return output.show(text, facts, text)
    if path is None:
        raise OptionError("info: give a packed directory, or --env")
    from ..formats import manifest
    from ..storage.location import locate

    datasets = manifest.datasets_in(locate(path, storage))
    found = {name: manifest.load(folder) for name, folder in datasets.items()}
    facts = {name: _facts(one) for name, one in found.items()}
    texts = {name: _facts_text(one) for name, one in found.items()}
    text = "\n\n".join(f"{name}\n{text}" if name else text for name, text in texts.items())
    return output.show(text, facts.get("", {"splits": facts}), text)


def _facts(manifest: Manifest) -> dict[str, Any]:
    """Return what a manifest says, as JSON shows it."""
    return {
        "records": manifest.records,
        "bytes": manifest.size,
        "payload_bytes": manifest.blob_bytes,
        "shards": manifest.shards,
        "classes": manifest.classes,
        "fields": dict(manifest.schema.fields),
        "format": manifest.format,
        "format_version": manifest.version,
        "dataset_id": manifest.dataset_id.hex(),
        "version_id": manifest.version_id,
        "dropped": manifest.stored_records - manifest.records,
        "annotated": {one.field: one.size for one in manifest.overlays},
        "library": manifest.library,
        "options": manifest.options,
    }


def _facts_text(manifest: Manifest) -> str:
    """Write what a manifest says, a line for each fact."""
    from ..packing.plan import shown_option
    from ..units import show_count, show_size

    size, payload, options = manifest.size, manifest.blob_bytes, manifest.options
    over = f" ({size / payload - 1:+.2%} over what was packed)" if payload else ""
    each = ""
    if manifest.shards:
        records = manifest.shard_records
        least, most = int(records.min()), int(records.max())
        span = "" if least == most else f"{least:,} to "
        each = f" of {span}{show_count(most, 'record')}"
    classes = "none"
    if manifest.classes is not None:
        shown = ", ".join(printable(name) for name in manifest.classes[:8])
        more = ", ..." if len(manifest.classes) > 8 else ""
        classes = f"{len(manifest.classes):,}: {shown}{more}"
    packed = ", ".join(
        f"{name} {value if isinstance(value, str) else shown_option(name, value)}"
        for name, value in options.items()
        if value is not None and name not in ("jpeg_tiles", "keep_original", "tiles", "absent")
    )
    dropped = manifest.stored_records - manifest.records
    rows = {
        "records": f"{manifest.records:,}{f', and {dropped:,} dropped' if dropped else ''}",
        "bytes": f"{show_size(size)}{over}",
        "shards": f"{manifest.shards:,}{each}",
        "classes": classes,
        "fields": ", ".join(f"{printable(name)} ({kind})" for name, kind in manifest.schema.fields),
        "format": f"{manifest.format}, version {manifest.version}",
        "packed": f"by shardio {printable(manifest.library)}: {printable(packed)}",
        "id": manifest.dataset_id.hex(),
    }
    if manifest.overlays:
        sizes = (f"{printable(one.field)} ({show_size(one.size)})" for one in manifest.overlays)
        rows["beside"] = f"annotated: {', '.join(sizes)}"
    if manifest.commit is not None:
        rows["version"] = f"{manifest.version_id}, by {printable(manifest.commit.command)}"
    if isinstance(tiles := options.get("tiles"), int):
        rows["tiles"] = f"{tiles:,} of {manifest.records:,} images are JPEG tiles"
    if options.get("keep_original"):
        rows["original"] = "the files' own bytes, where `image` has others; `unpack` gives these"
    return "\n".join(f"{name:<8}  {value}" for name, value in rows.items())


def _environment() -> dict[str, Any]:
    """Return the versions of all that matters, by name."""
    import platform

    from .. import machine, native
    from ..images import decode

    facts: dict[str, Any] = {
        "shardio": __version__,
        "installed": _installed(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": machine.processors(),
    }
    facts |= installed("torch", "numpy", "lmdb", "msgpack", "xxhash")
    try:
        facts["images"] = " ".join(f"{name} {value}" for name, value in decode.pil_info().items())
    except DependencyError as error:
        facts["images"] = str(error)
    return facts | {"core": native.described()}


def _installed() -> str:
    """Name the distribution that shardio is installed as, and another one that owns the package."""
    found = installed("shardio-torch", "shardio")
    ours = f"not by pip; imported from {os.path.dirname(os.path.dirname(__file__))}"
    if "shardio-torch" in found:
        ours = f"shardio-torch {found['shardio-torch']}"
    if "shardio" not in found:
        return ours
    return (
        f"{ours}; shardio {found['shardio']} is another project's, or older than the name "
        "shardio-torch, and has files in the same folder: pip uninstall both, then install "
        "shardio-torch again"
    )


# --- ls -------------------------------------------------------------------------------------------


def _ls(
    output: Output,
    *,
    path: str,
    shard: int | None = None,
    class_name: str | None = None,
    storage: Storage,
) -> int:
    from ..dataset.reader import open_index
    from ..order.subset import class_index
    from ..storage.location import locate

    reader = open_index(locate(path, storage), storage)
    dataset = reader.manifest
    shards = range(dataset.shards)
    if shard is not None:
        if shard not in shards:
            raise OptionError(f"--shard {shard}: there are shards 0 to {dataset.shards - 1}")
        shards = range(shard, shard + 1)
    label = None
    if class_name is not None:
        label = class_index(dataset.classes, class_name)
        if "label" not in dict(dataset.schema.fields):
            raise OptionError("--class: the classes here are not those of a field `label`")
    rows = _rows(reader, shards, label)
    if output.json:
        sys.stdout.write('{"records": [')
        separator = "\n"
        for row in rows:
            sys.stdout.write(separator + json.dumps(row))
            separator = ",\n"
        sys.stdout.write("\n]}\n")
        return DONE
    for row in rows:
        named = f"  {printable(row['class'])}" if "class" in row else ""
        key = printable(row["key"], 4096)
        place = f"{row['shard']:>5}:{row['record']:<7}"
        print(f"{row['index']:>9}  {place}  {row['bytes']:>10}  {key}{named}")
    return DONE


def _rows(reader: Reader, shards: Sequence[int], label: int | None) -> Iterator[dict[str, Any]]:
    """Yield what is shown of each record; label: only of this class."""
    dataset = reader.manifest
    firsts = [0, *dataset.shard_records.cumsum().tolist()]
    for number in shards:
        reader.will_open(shards[number - shards[0] + 1 :][:16])
        shard = reader.shard(number)
        column = shard.columns.get("label")
        labels = None if column is None else column.tolist()  # None where masked
        # Most are passed over then, and each is read alone: the key of a dropped one may be gone.
        one_by_one = label is not None or reader.remaining is not None
        keys = iter(()) if one_by_one else shard.keys(0, shard.records)
        for record in range(shard.records):
            index = reader.place(firsts[number] + record)
            if index is None:
                continue
            if label is not None and (labels is None or labels[record] != label):
                continue
            row: dict[str, Any] = {
                "index": index,
                "shard": number,
                "record": record,
                "offset": shard.offset(record),
                "bytes": int(shard.sizes[record]),
                "key": key_text(shard.key(record) if one_by_one else next(keys)),
            }
            if labels is not None:
                own = row["label"] = labels[record]
                if dataset.classes and own is not None and 0 <= own < len(dataset.classes):
                    row["class"] = dataset.classes[int(own)]
            yield row


# --- cat ------------------------------------------------------------------------------------------


def _cat(
    output: Output,
    *,
    path: str,
    record: str | None = None,
    key: str | None = None,
    field: str | None = None,
    file: str | None = None,
    overwrite: bool = False,
    storage: Storage,
) -> int:
    from ..dataset import sequence
    from ..storage.local import check_target, write_file

    if file is not None:
        check_target(file)
    records = sequence.stored(path, storage=storage)
    index = _index_of(records, record, key)
    sample = records[index]
    fields = dict(records.manifest.schema.fields)
    if field is None:
        field = next((n for n, kind in fields.items() if kind in ("image", "bytes")), "__key__")
    if field not in fields:
        raise OptionError(f"--field {printable(field)}: no such field; {there_are(fields, field)}")
    value = sample[field]
    facts = {"index": index, "key": key_text(sample["__key__"]), "field": field}
    if output.json and file is None:
        shown = {"base64": as_base64(value)} if isinstance(value, bytes) else {"value": value}
        return output.show("", facts | shown)
    if value is None:
        raise OptionError(f"record {index} has no {printable(field)}: it is null")
    content = _as_bytes(value)
    if file is not None:
        folder, name = os.path.split(os.path.abspath(file))
        write_file(folder, name, content, replace=overwrite)
        if output.json:
            output.show("", facts | {"file": file, "bytes": len(content)})
        return DONE
    is_text = not isinstance(value, bytes) or field == "__key__"
    if not sys.stdout.isatty():
        sys.stdout.flush()
        sys.stdout.buffer.write(content + b"\n" * is_text)
    elif is_text:
        print(_on_terminal(content))
    else:
        raise OptionError(
            f"{field} is {len(value):,} bytes, not text; write it with --output FILE, or into a "
            "pipe"
        )
    return DONE


def _index_of(records: ShardSequence, record: str | None, key: str | None) -> int:
    """Return the index of the record that is asked for. Raises OptionError."""
    from ..units import show_count

    if (record is None) == (key is None):
        raise OptionError("cat: give either the index of a record, or --key KEY")
    if key is not None:
        try:
            return records.find(key)
        except KeyError:
            raise OptionError(
                f"no record has the key {printable(key)}; `shardio ls` lists all keys"
            ) from None
    try:
        index = int(record or "")
    except ValueError:
        raise OptionError(
            f"{printable(record or '')!r} is no index of a record; a key is given by --key"
        ) from None
    if not -len(records) <= index < len(records):
        raise OptionError(
            f"record {index}: there {'is' if len(records) == 1 else 'are'} "
            f"{show_count(len(records), 'record')}, counted from 0"
        )
    return index


def _on_terminal(text: bytes) -> str:
    """Escape what could change a terminal; lines and tabs stay."""
    return "".join(
        part.decode() if part in (b"\n", b"\t") else printable(part, len(part) * 10)
        for part in re.split(rb"([\n\t])", text)
    )


def _as_bytes(value: Any) -> bytes:
    """Return the value of a field as the bytes to write."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")  # JSON of others may hold halves of pairs
    return as_json(value).encode()


# --- verify ---------------------------------------------------------------------------------------


def _verify(output: Output, *, dropped: str | None = None, **call: Any) -> int:
    from ..packing.verify import verify

    if dropped is not None:
        call["dropped"] = lines_of("--dropped", dropped)
    began = time.monotonic()
    with output.progress("verifying") as progress:
        found = verify(**call, progress=progress, announce=output.announce)
    output.took("checked", found.records, "record", found.bytes, began)
    told = "\n".join([*map(str, found.damages), *found.unread])
    style = "bad" if told else "good"
    output.show(
        paint(str(found), style, sys.stdout), facts=found, brief=paint(told, style, sys.stdout)
    )
    if found.damages:
        if found.sought is None and output.is_watched:
            hint = (
                "`shardio repair OUT NEW` saves the rest; --from COPY takes it from a copy; "
                "`shardio drop OUT --damaged` hides what is damaged"
            )
            output.announce(paint(hint, "hint", sys.stderr))
        return DAMAGED
    return FAILED if found.unread else DONE


INFO = Command(
    "info",
    "show what a packed directory holds",
    _info,
    "",
    option("path", "OUT", "the packed directory, or its URL", nargs="?"),
    option("--env", text="versions, and which PIL decodes images"),
    *STORE,
    examples=("shardio info packed", "shardio info packed --json", "shardio info --env"),
)

LS = Command(
    "ls",
    "list records: index, shard:record, bytes, key, class",
    _ls,
    "packing.verify:verify",
    OUT,
    option("--shard", "N", "only of this shard"),
    option("--class", "NAME", "only of this class", dest="class_name"),
    *READ_FROM,
    examples=("shardio ls packed --class cat", "shardio ls s3://bucket/packed --shard 0"),
)

CAT = Command(
    "cat",
    "write one field of one record to stdout or a file",
    _cat,
    "packing.verify:verify",
    OUT,
    option("record", "INDEX", "as `shardio ls` numbers it", nargs="?"),
    option("--key", "KEY", "find the record by its key instead"),
    option("--field", "NAME", "default: the image"),
    option("--output", "FILE", "a file instead of stdout", dest="file"),
    option("--overwrite", text="replace FILE if it exists"),
    *READ_FROM,
    examples=(
        "shardio cat packed 0 --output first.jpg",
        "shardio cat packed --key cat/1.jpg --field label",
    ),
)

VERIFY = Command(
    "verify",
    "check that every byte is what was packed",
    _verify,
    "packing.verify:verify",
    OUT,
    option("--decode"),
    option("--max-pixels", "N"),
    option("--sha256"),
    option("--dropped", "KEYS", "file of keys, one a line: look for what is left of these records"),
    JOBS,
    *SHARED,
    *READ_FROM,
    examples=(
        "shardio verify packed",
        "shardio verify packed --decode --jobs 4",
        "shardio verify packed --dropped erased.txt",
    ),
    forks=True,
)
