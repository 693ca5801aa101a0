"""The command line. Each command imports what it needs when it runs, and none imports torch.

This module itself imports next to nothing: until `main` runs, Ctrl-C ends in a traceback.
Results go to stdout (one JSON object with --json), progress and messages to stderr.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from . import __version__
from .errors import BusyError, DamageError, DependencyError, OptionError, ShardioError, printable
from .names import from_file_name, key_text

if TYPE_CHECKING:
    import argparse

    from .benching import Bench
    from .fetch import Reader
    from .manifest import Manifest
    from .packing import Packed
    from .sequence import ShardSequence
    from .tuning import Tuning
    from .verifying import Damage

# Options that are stored names, not paths: what they are does not follow the locale.
_STORED = ("fields", "where", "class_name", "key", "field", "files")

DONE, FAILED, USAGE, DAMAGED, SKIPPED, BUSY, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130

_EXIT_CODES = """\
exit codes:
  0 done   1 failed   2 wrong usage   3 damage was found   4 done, but files were left out
  5 another packer works there   130 interrupted
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    try:
        return _main(arguments)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)


def _main(arguments: Sequence[str] | None) -> int:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller: >&-
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):  # what the terminal cannot show is escaped
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    options = _parser().parse_args(arguments)
    for name in _STORED:  # Python read them by the locale, as it does the paths
        if (given := getattr(options, name, None)) is not None:
            several = isinstance(given, list)
            stored = [*map(from_file_name, given)] if several else from_file_name(given)
            setattr(options, name, stored)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `shardio ls | head`: nobody reads on
        _drop_output()
        return DONE
    except BusyError as error:
        return _fail(str(error), BUSY)
    except DamageError as error:
        return _fail(str(error), DAMAGED)
    except OptionError as error:
        return _fail(str(error), USAGE)
    except ShardioError as error:
        return _fail(str(error), FAILED)
    except MemoryError:
        return _fail("out of memory", FAILED)
    except OSError as error:
        _drop_output()  # a full disk behind stdout would be an error once more, at the end
        return _fail(_describe(error), FAILED)


def _fail(message: str, code: int) -> int:
    with contextlib.suppress(OSError):
        print(f"shardio: {message}", file=sys.stderr)
    return code


def _describe(error: OSError) -> str:
    where = "" if error.filename is None else f"{printable(os.fsencode(error.filename), 4096)}: "
    return f"{where}{error.strerror or error}"


def _drop_output() -> None:
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# --- commands -------------------------------------------------------------------------------------


def _pack(options: argparse.Namespace) -> int:
    from .packing import pack
    from .selection import conditions

    with _progress("packing", options) as progress:
        done = pack(
            options.source,
            options.out,
            format=options.format,
            shard_size=options.shard_size,
            max_records=options.max_records,
            shuffle=options.shuffle,
            seed=options.seed,
            from_=options.source_kind,
            root=options.root,
            fields=_named(options.fields),
            where=conditions(options.where) if options.where else None,
            jobs=options.jobs,
            part=options.part,
            splits=options.splits,
            classes=options.classes,
            resize=options.resize,
            quality=options.quality,
            encode=options.encode,
            jpeg_tiles=options.jpeg_tiles,
            keep_original=options.keep_original,
            overwrite=options.overwrite,
            restart=options.restart,
            on_error=options.on_error,
            dry_run=options.dry_run,
            progress=progress,
            announce=None if options.quiet else _announce,
        )
    return _show_packed(done, options)


def _announce(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _commit(options: argparse.Namespace) -> int:
    from .packing import commit

    with _progress("checking", options) as progress:
        done = commit(
            options.out, jobs=options.jobs, overwrite=options.overwrite, progress=progress
        )
    return _show_packed(done, options)


def _index(options: argparse.Namespace) -> int:
    from .indexing import index
    from .sizes import show_count, show_size

    with _progress("indexing", options) as progress:
        done = index(
            options.directory,
            out=options.out,
            format=options.format,
            files=options.files,
            fields=_named(options.fields),
            classes=options.classes,
            jobs=options.jobs,
            overwrite=options.overwrite,
            progress=progress,
        )
    if options.json:
        _print_json(vars(done))
    elif not options.quiet:
        rate = done.bytes / max(done.seconds, 1e-9) / 1e6
        print(
            f"{printable(done.root)}: {done.format}: {show_count(done.records, 'record')} in "
            f"{show_count(done.shards, 'shard')}, {show_size(done.bytes)}, in "
            f"{done.seconds:.1f} s, {rate:,.0f} MB/s"
        )
        named = "" if done.classes is None else f"; {show_count(done.classes, 'class', 'classes')}"
        print(f"{_fields_text(done.fields, done.sources)}{named}")
        if done.format == "imagefolder":
            print("a folder of images: they stay as they are, in the order `shardio pack` gives")
        if done.ignored:
            print(f"{done.ignored:,} hidden files were ignored")
        for note in done.notes[:10]:
            print(note)
        for name in done.left_out:
            print(f"left out: {printable(name)!r} cannot be a field's name; give one by --fields")
        if os.path.abspath(done.out) != os.path.abspath(done.root):
            print(f"open it by {printable(done.out)} with root={printable(done.root)!r}")
    return DONE


def _fields_text(fields: dict[str, str], theirs: dict[str, str]) -> str:
    """Fields by name, their kinds, and their names in the source where those are others."""
    return "fields: " + ", ".join(
        f"{printable(name)} ({kind})"
        + (f" from {printable(theirs[name])}" if name in theirs else "")
        for name, kind in fields.items()
        if kind != "key"
    )


def _named(text: str | None) -> dict[str, str]:
    """image=jpg,label=cls"""
    pairs = [pair.partition("=") for pair in (text or "").split(",") if pair]
    for name, equals, source in pairs:
        if not (name and equals and source):
            raise OptionError(f"--fields {printable(text or '')}: expected NAME=THEIRS,NAME=THEIRS")
    return _once(((name, source) for name, _, source in pairs), text or "")


def _once(pairs: Iterable[tuple[str, str]], text: str) -> dict[str, str]:
    """As a dict. Raises OptionError for a name that comes twice."""
    found: dict[str, str] = {}
    for name, theirs in pairs:
        if name in found:
            raise OptionError(f"--fields {printable(text)}: {printable(name)} is there twice")
        found[name] = theirs
    return found


def _unpack(options: argparse.Namespace) -> int:
    from .sizes import show_count, show_size
    from .unpacking import unpack

    with _progress("unpacking", options) as progress:
        done = unpack(
            options.out,
            options.directory,
            root=options.root,
            overwrite=options.overwrite,
            progress=progress,
        )
    if options.json:
        _print_json(vars(done))
    elif not options.quiet:
        files = show_count(done.files, "file")
        print(f"{files}, {show_size(done.bytes)}, in {printable(options.directory)}")
        if done.without:
            print(f"{done.without:,} records hold no file")
        if done.tiles:
            print(
                f"{done.tiles:,} files are JPEG tiles, as packing made them without loss: the same "
                "pixels in other bytes"
            )
        if done.resized or done.raw:
            how = " and ".join(["resized"] * done.resized + ["made raw pixels"] * done.raw)
            print(f"images were {how} when they were packed: these are not the files themselves")
    return DONE


def _export(options: argparse.Namespace) -> int:
    from .exporting import export
    from .sizes import show_count, show_size

    fields = None
    if options.fields is not None:  # NAME alone: it is called so there, too, as far as possible
        named = _once(_pairs(options.fields), options.fields)
        fields = {name: theirs or None for name, theirs in named.items()}
    with _progress("exporting", options, unit=" records", scale=1) as progress:
        done = export(
            options.out,
            options.directory,
            format=options.format,
            fields=fields,
            shard_size=options.shard_size,
            keys=options.keys,
            root=options.root,
            overwrite=options.overwrite,
            progress=progress,
        )
    if options.json:
        _print_json(vars(done))
    elif not options.quiet:
        print(
            f"{printable(done.out)}: {done.format}: {show_count(done.records, 'record')} in "
            f"{show_count(done.files, 'file')}, {show_size(done.bytes)}"
        )
        called = (f"{printable(name)} as {printable(its)}" for name, its in done.fields.items())
        print(f"fields: {', '.join(called)}")
        for note in done.notes:
            print(printable(note, 4096))
        if done.without:
            print(f"{done.without:,} records hold nothing that could be written")
        if done.removed:
            print(f"{done.removed:,} files of an older export were removed")
    return DONE


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """image=jpg,caption: the second has no other name"""
    for pair in text.split(","):
        name, equals, theirs = pair.partition("=")
        if not name or (equals and not theirs):
            raise OptionError(f"--fields {printable(text)}: expected NAME,NAME=THEIRS,...")
        yield name, theirs


def _info(options: argparse.Namespace) -> int:
    if options.env:
        return _show_environment(options)
    if options.out is None:
        raise OptionError("info: give a packed directory, or --env")
    from . import manifest
    from .storage import locate

    folders = manifest.datasets(options.out)
    made = {name: manifest.load(locate(folder)) for name, folder in folders.items()}
    if options.json:
        facts = {name: _facts(one) for name, one in made.items()}
        _print_json(facts.get("", {"splits": facts}))
    else:
        texts = {name: _facts_text(one) for name, one in made.items()}
        print("\n\n".join(f"{name}\n{text}" if name else text for name, text in texts.items()))
    return DONE


def _ls(options: argparse.Namespace) -> int:
    import json

    from . import manifest
    from .fetch import Reader
    from .storage import locate

    storage = locate(options.out)
    made = manifest.load(storage)
    shards: range | list[int] = range(made.shards)
    if options.shard is not None:
        if not 0 <= options.shard < made.shards:
            raise OptionError(f"--shard {options.shard}: there are shards 0 to {made.shards - 1}")
        shards = [options.shard]
    label = None
    if options.class_name is not None:
        label = manifest.class_index(made.classes, options.class_name)
        if "label" not in dict(made.schema.fields):
            raise OptionError("--class: the classes here are not those of a field `label`")
    root = None if options.root is None else locate(options.root)
    rows = _rows(Reader(storage, made, root=root), shards, label)
    if options.json:
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
    made = reader.manifest
    firsts = [0, *made.shard_records.cumsum().tolist()]
    for number in shards:
        shard = reader.shard(number)
        column = shard.columns.get("label")
        labels = None if column is None else column.tolist()  # None where masked
        for record in range(shard.records):
            if label is not None and (labels is None or labels[record] != label):
                continue
            row: dict[str, Any] = {
                "index": firsts[number] + record,
                "shard": number,
                "record": record,
                "offset": shard.offset(record),
                "bytes": int(shard.sizes[record]),
                "key": key_text(shard.key(record)),
            }
            if labels is not None:
                number_of = row["label"] = labels[record]
                if made.classes and number_of is not None and 0 <= number_of < len(made.classes):
                    row["class"] = made.classes[int(number_of)]
            yield row


def _cat(options: argparse.Namespace) -> int:
    from . import sequence as sequences

    sequence = sequences.stored(options.out, root=options.root)
    index = _index_of(sequence, options.record, options.key)
    sample = sequence[index]
    fields = dict(sequence.manifest.schema.fields)
    name = options.field
    if name is None:
        name = next((n for n, kind in fields.items() if kind in ("image", "bytes")), "__key__")
    if name not in fields:
        raise OptionError(f"--field {printable(name)}: the fields are {', '.join(fields)}")
    value = sample[name]
    if value is None and not options.json:
        raise OptionError(f"record {index} has no {printable(name)}: it is null")
    if options.json:
        content = {"base64": _base64(value)} if isinstance(value, bytes) else {"value": value}
        _print_json({"index": index, "key": key_text(sample["__key__"]), "field": name} | content)
        return DONE
    if options.output is not None:
        from .storage.local import write_file

        folder, file = os.path.split(os.path.abspath(options.output))
        write_file(folder, file, _as_bytes(value), replace=options.overwrite)
        return DONE
    if isinstance(value, bytes) and fields[name] in ("image", "bytes") and sys.stdout.isatty():
        raise OptionError(
            f"{name} is {len(value):,} bytes, not text; write it with --output FILE, or into a pipe"
        )
    sys.stdout.flush()
    sys.stdout.buffer.write(_as_bytes(value))
    if not isinstance(value, bytes) or name == "__key__":
        sys.stdout.buffer.write(b"\n")
    return DONE


def _verify(options: argparse.Namespace) -> int:
    from .sizes import show_count, show_size
    from .verifying import verify

    with _progress("verifying", options) as progress:
        found = verify(
            options.out,
            root=options.root,
            decode=options.decode,
            sha256=options.sha256,
            jobs=options.jobs,
            progress=progress,
        )
    if options.json:
        damages = [vars(one) for one in found.damages]
        _print_json(vars(found) | {"damages": damages})
    else:
        for one in found.damages:
            place = ""
            if one.record is not None:
                key = "unknown" if one.key is None else printable(one.key)
                place = f"record {one.record} at byte {one.offset}, key {key}: "
            print(f"{one.shard}: {place}{_what(one)}")
        if not options.quiet:
            what = f"{show_count(found.records, 'record')} in {show_count(found.shards, 'shard')}"
            verdict = f"{len(found.damages):,} damaged" if found.damages else "all as packed"
            print(f"{what}, {show_size(found.bytes)}: {verdict}")
    return DAMAGED if found.damages else DONE


def _what(damage: Damage) -> str:
    """What is damaged, without the place, which the line says already."""
    if damage.record is None:
        return damage.what.removeprefix(f"{damage.shard}: ")
    line = damage.what.splitlines()[0]
    return line.split("): ", 1)[-1] if line.startswith(damage.shard) else line


def _explain(options: argparse.Namespace) -> int:
    from . import manifest
    from .explaining import advice_text, explain
    from .fetch import Reader
    from .options import Given
    from .storage import locate

    storage = locate(options.out)
    root = None if options.root is None else locate(options.root)
    reader = Reader(storage, manifest.load(storage), root=root)
    chosen = Given(
        batch_size=options.batch_size,
        shuffle_buffer=options.shuffle_buffer,
        tail=options.tail,
        canonical_workers=options.canonical_workers,
        unit=options.unit,
    )
    found = explain(
        reader.manifest,
        chosen.resolve(reader.mean_bytes),
        num_workers=options.workers,
        world_size=options.world_size,
        local_world_size=options.local_world_size,
        is_network=reader.storage.is_network(),
        files_limit=reader.limit,
        labels=lambda number: reader.shard(number).columns.get("label"),
    )
    if options.json:
        _print_json(found.as_dict())
    elif not options.quiet:
        print(found)
    elif found.warnings:
        print(advice_text(found.warnings))
    return DONE


def _check_plot(options: argparse.Namespace) -> None:
    """Raises now for a picture that could not be drawn when all is measured."""
    if options.plot is not None:
        from . import plotting

        plotting.check(options.plot)


def _answer(found: Tuning | Bench, options: argparse.Namespace) -> int:
    """Says what was found, and draws it."""
    if options.json:
        _print_json(found.as_dict())
    else:
        print(found.call if options.quiet else found.text())
    if options.plot is not None:  # last: a file that cannot be written costs no answer
        from . import plotting

        plotting.save(found, options.plot)
    return DONE


def _tune(options: argparse.Namespace) -> int:
    from .tuning import tune_path

    _check_plot(options)
    with _progress("simulating", options, unit=" orders", scale=1, delay_s=2) as progress:
        found = tune_path(
            options.out,
            root=options.root,
            batch_size=options.batch_size,
            num_workers=options.workers,
            world_size=options.world_size,
            memory=options.memory,
            progress=progress,
        )
    return _answer(found, options)


def _bench(options: argparse.Namespace) -> int:
    from .benching import bench

    _check_plot(options)
    with _progress("measuring", options, unit=" repeats", scale=1) as progress:
        found = bench(
            options.out,
            root=options.root,
            batch_size=options.batch_size,
            size=options.size,
            workers=options.workers,
            threads=options.threads,
            loader=options.loader,
            seconds=options.seconds,
            quick=options.quick,
            progress=progress,
        )
    return _answer(found, options)


def _gc(options: argparse.Namespace) -> int:
    from .cleaning import gc
    from .sizes import show_count, show_size

    done = gc(options.out, keep_s=options.keep, dry_run=options.dry_run)
    if options.json:
        _print_json(vars(done))
        return DONE
    if not options.quiet:
        for path in done.removed:
            print(printable(path, 4096))
        verb = "would be removed" if options.dry_run else "removed"
        young = f"; {len(done.kept)} younger than --keep stay" if done.kept else ""
        files = show_count(len(done.removed), "file")
        print(f"{files}, {show_size(done.bytes)}, {verb}{young}")
    return DONE


# --- what is shown --------------------------------------------------------------------------------


def _show_packed(done: Sequence[Packed], options: argparse.Namespace) -> int:
    from .journal import REJECTED
    from .sizes import show_count, show_size

    dry = getattr(options, "dry_run", False)
    skips = getattr(options, "on_error", "skip") == "skip"
    if options.json:
        datasets = [
            vars(one) | {"rejected": [{"key": key, "reason": why} for key, why in one.rejected]}
            for one in done
        ]
        _print_json({"dry_run": dry, "datasets": datasets})
    for one in done:
        if options.json or options.quiet:
            continue
        where = printable(one.out)
        labels = (
            "no classes" if one.classes is None else show_count(one.classes, "class", "classes")
        )
        unit = "file" if one.source == "imagefolder" else "record"
        what = f"{show_count(one.records, unit)}, {labels}, {show_size(one.source_bytes)}"
        if dry and not one.already:
            there = f"; {one.kept:,} of these are there, to be checked" if one.kept else ""
            print(f"{where}: would pack {what} into {show_count(one.shards, 'shard')}{there}")
        elif one.already:
            print(
                f"{where}: already packed: {what}, with the same keys, sizes and options (contents "
                "are not compared; --overwrite packs again)"
            )
        else:
            rate = one.source_bytes / max(one.seconds, 1e-9) / 1e6
            resumed = one.kept and hasattr(options, "source")  # `commit` only checks
            kept = f", {one.kept:,} kept from before" if resumed else ""
            shards = show_count(one.built + one.kept, "shard")
            print(f"{where}: {what} -> {shards}{kept}", end="")
            size = f", {show_size(one.bytes)}" if one.committed else " (not committed)"
            print(f"{size}, in {one.seconds:.1f} s, {rate:,.0f} MB/s")
        if one.source != "imagefolder":
            print(f"{where}: {one.source}: {_fields_text(one.fields, one.theirs)}")
        if one.full_size:
            print(
                f"{where}: {one.full_size:,} images kept their size: animations, several pages or "
                "pictures in a file, and formats that are not written"
            )
        if one.tiles is not None and not dry:
            print(f"{where}: {_tiles_text(one)}")
        if one.enlarged:
            print(f"{where}: {one.enlarged:,} images were smaller, and were enlarged")
        if one.ignored:
            print(f"{where}: {one.ignored:,} hidden files were ignored")
        if one.rejected:
            fate = f"left out; see {REJECTED}"
            if dry:
                fate = "would be left out" if skips else "cannot be packed, so nothing would be"
            print(f"{where}: {show_count(len(one.rejected), 'file')} {fate}:")
            for key, why in one.rejected[:10]:
                print(f"  {printable(key)}: {why}")
            if len(one.rejected) > 10:
                print(f"  ... and {len(one.rejected) - 10:,} more")
        for note in one.notes[:10]:
            print(f"{where}: {note}")
        if one.unlocked:
            print(f"{where}: this file system has no locks; do not pack here twice at once")
    rejected = any(one.rejected for one in done)
    return FAILED if rejected and dry and not skips else SKIPPED if rejected else DONE


def _tiles_text(one: Packed) -> str:
    """How many images are tiles, what this call did for it, and why others are none."""
    from .sizes import show_size

    text = f"{one.tiles:,} of {one.records:,} images are JPEG tiles"
    if one.tiled:
        text += (
            f": {one.tiled:,} rewritten, {show_size(one.tiled_from)} -> "
            f"{show_size(one.tiled_to)} ({one.tiled_to / one.tiled_from - 1:+.1%})"
        )
    if one.untiled:
        reasons = sorted(one.untiled.items(), key=lambda found: (-found[1], found[0]))
        text += "; left as they were: " + ", ".join(f"{count:,} {why}" for why, count in reasons)
    return text


def _facts(made: Manifest) -> dict[str, Any]:
    return {
        "records": made.records,
        "bytes": made.size,
        "payload_bytes": made.blob_bytes,
        "shards": made.shards,
        "classes": None if made.classes is None else list(made.classes),
        "fields": dict(made.schema.fields),
        "format": made.format,
        "format_version": made.version,
        "dataset_id": made.dataset_id.hex(),
        "library": made.library,
        "options": made.options,
    }


def _facts_text(made: Manifest) -> str:
    from .sizes import show_size

    over = (
        f" ({made.size / made.blob_bytes - 1:+.2%} over what was packed)" if made.blob_bytes else ""
    )
    records = made.shard_records
    each = f" of {int(records.min()):,} to {int(records.max()):,} records" if made.shards else ""
    classes = "none" if made.classes is None else f"{len(made.classes):,}: {_some(made.classes)}"
    packed = ", ".join(
        f"{name} {value}"
        for name, value in made.options.items()
        if value is not None and name not in ("jpeg_tiles", "keep_original", "tiles")
    )
    rows = {
        "records": f"{made.records:,}",
        "bytes": f"{show_size(made.size)}{over}",
        "shards": f"{made.shards:,}{each}",
        "classes": classes,
        "fields": ", ".join(f"{printable(name)} ({kind})" for name, kind in made.schema.fields),
        "format": f"{made.format}, version {made.version}",
        "packed": f"by shardio {printable(made.library)}: {printable(packed)}",
        "id": made.dataset_id.hex(),
    }
    if isinstance(tiles := made.options.get("tiles"), int):
        rows["tiles"] = f"{tiles:,} of {made.records:,} images are JPEG tiles"
    if made.options.get("keep_original"):
        rows["original"] = "the files' own bytes, where `image` has others; `unpack` gives these"
    return "\n".join(f"{name:<8}  {value}" for name, value in rows.items())


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(printable(name) for name in names[:8])
    return shown + (", ..." if len(names) > 8 else "")


def _show_environment(options: argparse.Namespace) -> int:
    import platform
    from importlib import metadata

    from . import machine

    facts: dict[str, Any] = {
        "shardio": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": machine.processors(),
    }
    for package in ("torch", "numpy", "lmdb", "msgpack", "xxhash"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts[package] = metadata.version(package)
    from . import image

    try:
        facts["images"] = " ".join(f"{name} {value}" for name, value in image.engine().items())
    except DependencyError as error:
        facts["images"] = str(error)
    from . import engine

    facts["core"] = "built" if engine.core is not None else f"not built: {engine.missing}"
    if options.json:
        _print_json(facts)
    else:
        for name, value in facts.items():
            print(f"{name:<10}{value}")
    return DONE


def _print_json(value: Any) -> None:
    import json

    print(json.dumps(value, default=_plain))


def _plain(value: Any) -> Any:
    """What JSON has no name for: bytes, arrays, and what is in arrays: complex numbers, times."""
    if isinstance(value, bytes):
        return {"base64": _base64(value)}
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _base64(value: bytes) -> str:
    import base64

    return base64.b64encode(value).decode("ascii")


def _as_bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")  # JSON of others may hold halves of pairs
    import json

    return json.dumps(value, default=_plain).encode()


def _index_of(sequence: ShardSequence, record: str | None, key: str | None) -> int:
    if (record is None) == (key is None):
        raise OptionError("cat: give either the index of a record, or --key KEY")
    if key is not None:
        try:
            return sequence.find(key)
        except KeyError:
            raise OptionError(f"no record has the key {printable(key)}") from None
    try:
        index = int(record or "")
    except ValueError:
        raise OptionError(
            f"{printable(record or '')!r} is no index; keys are given as --key"
        ) from None
    if not -len(sequence) <= index < len(sequence):
        raise OptionError(f"record {index}: there are {len(sequence):,} records, from 0")
    return index


@contextlib.contextmanager
def _progress(
    what: str,
    options: argparse.Namespace,
    *,
    unit: str = "B",
    scale: int = 1024,
    delay_s: float = 0,
) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr, when a person looks at it, and when it takes longer than `delay_s`."""
    if options.quiet or options.json or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # else it starts a thread, and we fork
    with tqdm(
        desc=what,
        unit=unit,
        unit_scale=scale > 1,
        unit_divisor=scale,
        leave=False,
        delay=delay_s,
    ) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


# --- the parser -----------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    import argparse

    parser = argparse.ArgumentParser(
        prog="shardio",
        allow_abbrev=False,  # what is short for one option today is not when there are two
        description="Pack folders of images into shards, and look at what is in them.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"shardio {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(
        name: str, run: Callable[[argparse.Namespace], int], text: str
    ) -> argparse.ArgumentParser:
        one = commands.add_parser(
            name,
            allow_abbrev=False,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=_EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        one.set_defaults(run=run)
        one.add_argument("--json", action="store_true", help="one JSON object on stdout")
        one.add_argument("--quiet", action="store_true", help="no progress and no summary")
        return one

    pack = command("pack", _pack, "pack a folder of images, or another source, into shards")
    pack.add_argument(
        "source",
        metavar="SRC",
        help="a folder of images; or a listing, COCO file, or dataset (docs/sources.md)",
    )
    pack.add_argument("out", metavar="OUT", help="the directory that becomes the dataset")
    pack.add_argument(
        "--shard-size",
        metavar="SIZE",
        help="source bytes a shard, like 64MB or 1GiB (default 256MiB; less for small folders)",
    )
    pack.add_argument("--max-records", type=int, metavar="N", help="records a shard, at most")
    pack.add_argument(
        "--shuffle",
        action=argparse.BooleanOptionalAction,
        help="pack in a shuffled order (default, but of Parquet), or in the order of the source",
    )
    pack.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of that shuffle (default 0)"
    )
    pack.add_argument(
        "--from",
        dest="source_kind",
        metavar="KIND",
        help="what SRC is, where that cannot be told: imagefolder, dataset, ...",
    )
    pack.add_argument(
        "--root", metavar="DIR", help="where the files of a listing are, or the data of an index"
    )
    pack.add_argument(
        "--fields", metavar="NAME=THEIRS,...", help="names of fields: image=jpg,label=cls"
    )
    pack.add_argument(
        "--where",
        action="append",
        metavar="COND",
        help="only records with label=cat,dog, or width>=256; several: all must hold",
    )
    pack.add_argument("--jobs", type=int, metavar="N", help="processes (default: one a core)")
    pack.add_argument(
        "--part",
        metavar="I/N",
        help="build only part I of N, from 1/N to N/N; then `shardio commit OUT`",
    )
    pack.add_argument(
        "--splits",
        action=argparse.BooleanOptionalAction,
        help="whether top folders are splits (default: if all are called train, val, test ...)",
    )
    pack.add_argument(
        "--classes", metavar="OTHER", help="number classes as in this packed directory"
    )
    pack.add_argument(
        "--resize", type=int, metavar="N", help="shrink images to N pixels on their short side"
    )
    pack.add_argument(
        "--quality", type=int, default=90, metavar="Q", help="of resized JPEGs (default 90)"
    )
    pack.add_argument(
        "--encode",
        metavar="raw",
        help="pack pixels, which need no decoding: images of one size, or squares by --resize",
    )
    pack.add_argument(
        "--jpeg-tiles",
        action="store_true",
        help="rewrite JPEGs, without loss, so that crops decode only their part of them",
    )
    pack.add_argument(
        "--keep-original",
        action="store_true",
        help="with --jpeg-tiles: pack the files' own bytes, too, for `unpack`",
    )
    pack.add_argument("--overwrite", action="store_true", help="replace another dataset in OUT")
    pack.add_argument("--restart", action="store_true", help="drop an unfinished packing in OUT")
    pack.add_argument(
        "--on-error",
        choices=("raise", "skip"),
        default="raise",
        help="files that cannot be packed: fail and list them (default), or leave them out",
    )
    pack.add_argument("--format", default="record", help="of the shards: record (default) or lmdb")
    pack.add_argument(
        "--dry-run", action="store_true", help="say what would be done and touch nothing"
    )

    commit = command("commit", _commit, "commit what the parts of a packing built")
    commit.add_argument("out", metavar="OUT")
    commit.add_argument("--jobs", type=int, metavar="N", help="processes (default: one a core)")
    commit.add_argument("--overwrite", action="store_true", help="replace another dataset in OUT")

    index = command("index", _index, "make a dataset of files of another format, in place")
    index.add_argument("directory", metavar="DIR", help="the folder of the files, or one file")
    index.add_argument(
        "--out", metavar="IDX", help="where manifest and index go (default: beside the data)"
    )
    index.add_argument("--format", help="of the files (default: told from their names)")
    index.add_argument(
        "--files", metavar="PATTERN", help="only those whose names fit, such as 'train-*'"
    )
    index.add_argument(
        "--fields", metavar="NAME=THEIRS,...", help="names of fields: image=jpg,label=cls"
    )
    index.add_argument(
        "--classes", metavar="OTHER", help="number the classes of a folder of images as there"
    )
    index.add_argument("--jobs", type=int, metavar="N", help="processes (default: one a core)")
    index.add_argument("--overwrite", action="store_true", help="replace a manifest that is there")

    unpack = command("unpack", _unpack, "write the packed files back into a folder")
    unpack.add_argument("out", metavar="OUT", help="the packed directory")
    unpack.add_argument("directory", metavar="DIR", help="where the files go")
    unpack.add_argument("--overwrite", action="store_true", help="replace files that exist")

    export = command("export", _export, "write a packed dataset in another format")
    export.add_argument("out", metavar="OUT", help="the packed directory")
    export.add_argument("directory", metavar="DIR", help="where the files go; empty, or not there")
    export.add_argument(
        "--format",
        required=True,
        metavar="FORMAT",
        help="webdataset, tfrecord, recordio, mds, lmdb-caffe or imagefolder (required)",
    )
    export.add_argument(
        "--fields", metavar="NAME=THEIRS,...", help="only these, and their names there: label=cls"
    )
    export.add_argument("--shard-size", metavar="SIZE", help="of a file, at most: 64MB or 1GiB")
    export.add_argument(
        "--keys",
        choices=("own", "number"),
        default="own",
        help="name records by their keys (default), or by their numbers",
    )
    export.add_argument("--overwrite", action="store_true", help="replace an older export in DIR")

    info = command("info", _info, "show what a packed directory holds")
    info.add_argument("out", metavar="OUT", nargs="?")
    info.add_argument("--env", action="store_true", help="versions, and which PIL decodes images")

    ls = command("ls", _ls, "list records: index, shard:record, bytes, key, class")
    ls.add_argument("out", metavar="OUT")
    ls.add_argument("--shard", type=int, metavar="N", help="only of this shard")
    ls.add_argument("--class", dest="class_name", metavar="NAME", help="only of this class")

    cat = command("cat", _cat, "write one field of one record to stdout or a file")
    cat.add_argument("out", metavar="OUT")
    cat.add_argument("record", metavar="INDEX", nargs="?", help="as `shardio ls` numbers it")
    cat.add_argument("--key", metavar="KEY", help="find the record by its key instead")
    cat.add_argument("--field", metavar="NAME", help="default: the image")
    cat.add_argument("--output", metavar="FILE", help="a file instead of stdout")
    cat.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")

    verify = command("verify", _verify, "check that every byte is what was packed")
    verify.add_argument("out", metavar="OUT")
    verify.add_argument("--decode", action="store_true", help="also decode every image")
    verify.add_argument("--sha256", action="store_true", help="also compare whole files")
    verify.add_argument("--jobs", type=int, metavar="N", help="processes (default: one a core)")

    explain = command("explain", _explain, "say what training with these options will be like")
    explain.add_argument("out", metavar="OUT")
    explain.add_argument("--batch-size", type=int, metavar="N", help="of each rank")
    explain.add_argument("--workers", type=int, default=0, metavar="N", help="of each rank")
    explain.add_argument("--world-size", type=int, default=1, metavar="N", help="ranks (default 1)")
    explain.add_argument(
        "--local-world-size", type=int, metavar="N", help="ranks on a machine (default: all)"
    )
    explain.add_argument(
        "--shuffle-buffer",
        type=_buffer,
        metavar="BUFFER",
        help="records, or bytes such as 512MiB, or all (default 10000)",
    )
    explain.add_argument("--unit", type=int, metavar="N", help="(default: about 32)")
    explain.add_argument("--tail", metavar="TAIL", help="pad (default), drop or exact")
    explain.add_argument(
        "--canonical-workers", type=int, metavar="N", help="spans of the order (default 64)"
    )

    tune = command("tune", _tune, "recommend a shuffle buffer, by simulating the order")
    tune.add_argument("out", metavar="OUT")
    tune.add_argument(
        "--batch-size", type=int, default=256, metavar="N", help="of each rank (default 256)"
    )
    tune.add_argument("--workers", type=int, default=0, metavar="N", help="of each rank")
    tune.add_argument("--world-size", type=int, default=1, metavar="N", help="ranks (default 1)")
    tune.add_argument(
        "--memory", metavar="SIZE", help="leave out buffers that need more, like 2GiB"
    )
    tune.add_argument(
        "--plot", metavar="FILE", help="a picture too: .png, .svg or .html; replaces FILE"
    )

    bench = command("bench", _bench, "measure what this machine can do with a dataset")
    bench.add_argument("out", metavar="OUT")
    bench.add_argument(
        "--batch-size", type=int, default=256, metavar="N", help="records a batch (default 256)"
    )
    bench.add_argument(
        "--size",
        type=int,
        metavar="N",
        help="pixels of the crop (default 224; of smaller images than 64, their own size)",
    )
    bench.add_argument(
        "--workers",
        type=_numbers,
        metavar="N,N,...",
        help="processes to try (default: 0, 1, half the cores, all cores)",
    )
    bench.add_argument(
        "--threads",
        type=_numbers,
        metavar="N,N,...",
        help="of each process of ShardLoader (default: as many as make the cores full)",
    )
    bench.add_argument(
        "--loader",
        choices=("both", "dataloader", "shardloader"),
        default="both",
        help="which to measure (default: both)",
    )
    bench.add_argument(
        "--seconds", type=float, metavar="S", help="of measuring a row (default 6; quick 2)"
    )
    bench.add_argument("--quick", action="store_true", help="fewer rows, in less than 30 seconds")
    bench.add_argument(
        "--plot", metavar="FILE", help="a picture too: .png, .svg or .html; replaces FILE"
    )

    for one in (unpack, export, ls, cat, verify, explain, tune, bench):
        one.add_argument(
            "--root",
            metavar="DIR",
            help="where the data is, if `shardio index` put its index elsewhere",
        )

    gc = command("gc", _gc, "remove files that no manifest names")
    gc.add_argument("out", metavar="OUT")
    gc.add_argument(
        "--keep",
        type=_seconds,
        default=24 * 3600.0,
        metavar="AGE",
        help="keep what was replaced less than this ago: 90m, 24h (default), 7d",
    )
    gc.add_argument("--dry-run", action="store_true", help="show what would be removed")
    return parser


def _buffer(text: str) -> int | str:
    """A shuffle_buffer, as ShardDataset takes it."""
    return int(text) if text.strip().isdigit() else text


def _numbers(text: str) -> list[int]:
    from argparse import ArgumentTypeError

    try:
        return [int(one) for one in text.split(",")]
    except ValueError:
        raise ArgumentTypeError(f"{text!r}: expected numbers, like 1,2,4") from None


def _seconds(text: str) -> float:
    from argparse import ArgumentTypeError

    factors = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    number, factor = (text[:-1], factors[text[-1]]) if text[-1:] in factors else (text, 1)
    try:
        seconds = float(number) * factor
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ArgumentTypeError(f"{text!r}: expected an age, like 90m, 24h or 7d")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
