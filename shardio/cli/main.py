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
from typing import TYPE_CHECKING, Any, NoReturn

from .._version import __version__
from ..errors import (
    BusyError,
    DamageError,
    DependencyError,
    OptionError,
    ShardioError,
    StorageError,
    printable,
    there_are,
)
from ..names import from_file_name, key_text

if TYPE_CHECKING:
    import argparse

    from ..dataset.reader import Reader
    from ..dataset.sequence import ShardSequence
    from ..formats.manifest import Manifest
    from ..packing.packed import Packed
    from ..tuning.bench import Bench
    from ..tuning.tune import Tuning

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
    options = _parsed(sys.argv[1:] if arguments is None else arguments)
    if options is None:
        return USAGE
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


def _parsed(arguments: Sequence[str]) -> argparse.Namespace | None:
    """Read the command line; None: it names no command, so all are shown. Exits for a wrong one."""
    parser = _parser()
    named = next((one for one in arguments if not one.startswith("-")), None)
    if not arguments:
        parser.print_help(sys.stderr)
        return None
    known = _commands(parser)
    if named is not None and named not in known:
        parser.error(f"no command is called {printable(named)!r}; {there_are(known, named, 20)}")
    options, rest = parser.parse_known_args(arguments)
    if rest:
        options.parser.error(_unknown(rest[0], options.parser))
    return options


def _unknown(given: str, parser: argparse.ArgumentParser) -> str:
    """Say what is wrong with an argument that a command does not take."""
    name = given.partition("=")[0]
    if not name.startswith("-"):
        return f"{printable(given)!r} is one more than it takes"
    known = parser._option_string_actions
    if name in known:  # the parser of all commands does not know it
        return f"{name} goes behind the command"
    guess = there_are(known, name).rpartition(": ")[2]
    advice = f"; {guess}" if guess.endswith("?") else ""
    if name == "--split" and not advice:  # as in Python
        advice = "; a split is the dataset in a folder of its own: OUT/train"
    return f"no option is called {printable(name)}{advice}"


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
    from ..order.subset import conditions
    from ..packing.options import ImageOptions, PlanOptions, SourceOptions
    from ..packing.pack import pack

    read = SourceOptions(
        kind=options.source_kind,
        root=options.root,
        fields=_named(options.fields),
        where=conditions(options.where) if options.where else None,
        classes=options.classes,
    )
    images = ImageOptions(
        encode=options.encode,
        quality=options.quality,
        jpeg_tiles=options.jpeg_tiles,
        keep_original=options.keep_original,
        max_pixels=options.max_pixels,
    )
    plan = PlanOptions(
        shuffle=options.shuffle,
        seed=options.seed,
        max_records=options.max_records,
        part=options.part,
        restart=options.restart,
    )
    with _progress("packing", options) as progress:
        done = pack(
            options.source,
            options.out,
            format=options.format,
            shard_size=options.shard_size,
            resize=options.resize,
            splits=options.splits,
            read=read,
            images=images,
            plan=plan,
            jobs=options.jobs,
            overwrite=options.overwrite,
            on_error=options.on_error,
            dry_run=options.dry_run,
            progress=progress,
            announce=None if options.quiet else _announce,
        )
    return _show_packed(done, options)


def _announce(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _commit(options: argparse.Namespace) -> int:
    from ..packing.pack import commit

    with _progress("checking", options) as progress:
        done = commit(
            options.out, jobs=options.jobs, overwrite=options.overwrite, progress=progress
        )
    return _show_packed(done, options)


def _index(options: argparse.Namespace) -> int:
    from ..packing.index import index

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
        print(done)
    return DONE


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
    from ..packing.unpack import unpack

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
        print(done)
    return DONE


def _export(options: argparse.Namespace) -> int:
    from ..packing.export import export

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
        print(done)
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
    from ..formats import manifest
    from ..storage.location import locate

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

    from ..dataset.reader import Reader
    from ..formats import manifest
    from ..order.subset import class_index
    from ..storage.location import locate

    storage = locate(options.out)
    made = manifest.load(storage)
    shards: range | list[int] = range(made.shards)
    if options.shard is not None:
        if not 0 <= options.shard < made.shards:
            raise OptionError(f"--shard {options.shard}: there are shards 0 to {made.shards - 1}")
        shards = [options.shard]
    label = None
    if options.class_name is not None:
        label = class_index(made.classes, options.class_name)
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
    from ..dataset import sequence as sequences

    if options.output is not None:
        from ..storage.local import check_target

        check_target(options.output)
    sequence = sequences.stored(options.out, root=options.root)
    index = _index_of(sequence, options.record, options.key)
    sample = sequence[index]
    fields = dict(sequence.manifest.schema.fields)
    name = options.field
    if name is None:
        name = next((n for n, kind in fields.items() if kind in ("image", "bytes")), "__key__")
    if name not in fields:
        raise OptionError(f"--field {printable(name)}: no such field; {there_are(fields, name)}")
    value = sample[name]
    if value is None and not options.json:
        raise OptionError(f"record {index} has no {printable(name)}: it is null")
    if options.json:
        content = {"base64": _base64(value)} if isinstance(value, bytes) else {"value": value}
        _print_json({"index": index, "key": key_text(sample["__key__"]), "field": name} | content)
        return DONE
    if options.output is not None:
        from ..storage.local import write_file

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
    from ..packing.verify import verify

    with _progress("verifying", options) as progress:
        found = verify(
            options.out,
            root=options.root,
            decode=options.decode,
            max_pixels=options.max_pixels,
            sha256=options.sha256,
            jobs=options.jobs,
            progress=progress,
        )
    if options.json:
        damages = [vars(one) for one in found.damages]
        _print_json(vars(found) | {"damages": damages})
    else:
        text = found.damages if options.quiet else [found]
        print(*text, sep="\n", end="\n" if text else "")
    return DAMAGED if found.damages else DONE


def _explain(options: argparse.Namespace) -> int:
    from ..tuning.advice import advice_text
    from ..tuning.explain import explain

    found = explain(
        options.out,
        root=options.root,
        num_workers=options.workers,
        world_size=options.world_size,
        local_world_size=options.local_world_size,
        batch_size=options.batch_size,
        shuffle_buffer=options.shuffle_buffer,
        tail=options.tail,
        spans=options.canonical_workers,
        unit=options.unit,
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
        from ..tuning import plot as plotting

        plotting.check(options.plot)


def _answer(found: Tuning | Bench, options: argparse.Namespace) -> int:
    """Says what was found, and draws it."""
    if options.json:
        _print_json(found.as_dict())
    else:
        print(found.call if options.quiet else found)
    if options.plot is not None:  # last: a file that cannot be written costs no answer
        from ..tuning import plot as plotting

        plotting.save(found, options.plot)
    return DONE


def _tune(options: argparse.Namespace) -> int:
    from ..tuning.tune import tune

    _check_plot(options)
    with _progress("simulating", options, unit=" orders", scale=1, delay_s=2) as progress:
        found = tune(
            options.out,
            root=options.root,
            batch_size=options.batch_size,
            num_workers=options.workers,
            world_size=options.world_size,
            memory=options.memory,
            units=options.units,
            progress=progress,
        )
    return _answer(found, options)


def _bench(options: argparse.Namespace) -> int:
    from ..tuning.bench import bench

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


def _demo(options: argparse.Namespace) -> int:
    from ..tuning import plot as plotting
    from .demo import demo

    refused = ""
    picture = options.plot or "shardio-demo.png"
    try:
        plotting.check(picture)
    except DependencyError as error:
        if options.plot is not None:
            raise
        refused = str(error)
    quiet = options.json or options.quiet
    found = demo(
        options.folder,
        out=options.out,
        batch_size=options.batch_size,
        workers=options.workers,
        size=options.size,
        seconds=options.seconds,
        say=None if quiet else lambda text: print(f"{text}\n", flush=True),
    )
    if not refused:
        from . import poster

        try:
            poster.save(found, picture)
        except StorageError as error:
            if options.plot is not None:
                raise
            refused = f"{error}; --plot FILE draws the picture elsewhere"
    if options.json:
        _print_json(found.as_dict() | {"picture": None if refused else picture})
    elif not options.quiet:
        print(refused or f"The picture of it: {printable(picture, 4096)}")
        print(found.next_steps(options.out))
    return DONE


def _gc(options: argparse.Namespace) -> int:
    from ..packing.gc import gc

    done = gc(options.out, keep_s=options.keep, dry_run=options.dry_run)
    if options.json:
        _print_json(vars(done))
        return DONE
    if not options.quiet:
        print(done)
    return DONE


# --- what is shown --------------------------------------------------------------------------------


def _show_packed(done: Sequence[Packed], options: argparse.Namespace) -> int:
    dry = getattr(options, "dry_run", False)
    skips = getattr(options, "on_error", "skip") == "skip"
    if options.json:
        datasets = [
            vars(one) | {"rejected": [{"key": key, "reason": why} for key, why in one.rejected]}
            for one in done
        ]
        _print_json({"dry_run": dry, "datasets": datasets})
    elif not options.quiet:
        for one in done:
            print(one)
    rejected = any(one.rejected for one in done)
    return FAILED if rejected and dry and not skips else SKIPPED if rejected else DONE


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
    from ..packing.plan import shown_option
    from ..units import show_count, show_size

    over = (
        f" ({made.size / made.blob_bytes - 1:+.2%} over what was packed)" if made.blob_bytes else ""
    )
    records = made.shard_records
    each = ""
    if made.shards:
        least, most = int(records.min()), int(records.max())
        span = "" if least == most else f"{least:,} to "
        each = f" of {span}{show_count(most, 'record')}"
    classes = "none" if made.classes is None else f"{len(made.classes):,}: {_some(made.classes)}"
    packed = ", ".join(
        f"{name} {value if isinstance(value, str) else shown_option(name, value)}"
        for name, value in made.options.items()
        if value is not None and name not in ("jpeg_tiles", "keep_original", "tiles", "absent")
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

    from .. import machine

    facts: dict[str, Any] = {
        "shardio": __version__,
        "installed": _installed(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": machine.processors(),
    }
    for package in ("torch", "numpy", "lmdb", "msgpack", "xxhash"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts[package] = metadata.version(package)
    from ..images import decode as image

    try:
        facts["images"] = " ".join(f"{name} {value}" for name, value in image.pil_info().items())
    except DependencyError as error:
        facts["images"] = str(error)
    from .. import native

    facts["core"] = native.described()
    if options.json:
        _print_json(facts)
    else:
        for name, value in facts.items():
            print(f"{name:<10}{value}")
    return DONE


def _installed() -> str:
    """Name the distribution that shardio is installed as, and another one that owns the package."""
    from importlib import metadata

    found = {}
    for name in ("shardio-torch", "shardio"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = f"{name} {metadata.version(name)}"
    ours = found.get(
        "shardio-torch", f"not by pip; imported from {os.path.dirname(os.path.dirname(__file__))}"
    )
    if "shardio" not in found:
        return ours
    return (
        f"{ours}; {found['shardio']} is another project's, or older than the name shardio-torch, "
        "and has files in the same folder: pip uninstall both, then install shardio-torch again"
    )


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
    from ..units import show_count

    if (record is None) == (key is None):
        raise OptionError("cat: give either the index of a record, or --key KEY")
    if key is not None:
        try:
            return sequence.find(key)
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
    if not -len(sequence) <= index < len(sequence):
        raise OptionError(
            f"record {index}: there {'is' if len(sequence) == 1 else 'are'} "
            f"{show_count(len(sequence), 'record')}, counted from 0"
        )
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

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            """Say what is wrong, and how the command is called, without its twenty options."""
            places = (one for one in self._actions if not one.option_strings)
            taken = [f"[{one.metavar}]" if one.nargs == "?" else str(one.metavar) for one in places]
            named = (one for one in self._actions if one.option_strings and one.required)
            taken += [f"{one.option_strings[0]} {one.metavar}" for one in named]
            usage = f"usage: {' '.join([self.prog, *taken])} [options]"
            self.exit(USAGE, f"{self.prog}: {message}\n{usage}; `{self.prog} --help` lists them\n")

    parser = Parser(
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
        one.set_defaults(run=run, parser=one)
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
    pack.add_argument("--max-records", type=_whole, metavar="N", help="records a shard, at most")
    pack.add_argument(
        "--shuffle",
        action=argparse.BooleanOptionalAction,
        help="pack in a shuffled order (default, but of Parquet), or in the order of the source",
    )
    pack.add_argument(
        "--seed", type=_whole, default=0, metavar="N", help="of that shuffle (default 0)"
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
    pack.add_argument("--jobs", type=_whole, metavar="N", help="processes (default: one a core)")
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
        "--resize", type=_whole, metavar="N", help="shrink images to N pixels on their short side"
    )
    pack.add_argument(
        "--quality", type=_whole, metavar="Q", help="of JPEGs that --resize writes (default 90)"
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
    pack.add_argument(
        "--max-pixels",
        type=_whole,
        metavar="N",
        help="the largest image to decode, for --resize, --encode raw and --jpeg-tiles",
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
    commit.add_argument("--jobs", type=_whole, metavar="N", help="processes (default: one a core)")
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
    index.add_argument("--jobs", type=_whole, metavar="N", help="processes (default: one a core)")
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
    ls.add_argument("--shard", type=_whole, metavar="N", help="only of this shard")
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
    verify.add_argument(
        "--max-pixels", type=_whole, metavar="N", help="with --decode: the limit of an image"
    )
    verify.add_argument("--sha256", action="store_true", help="also compare whole files")
    verify.add_argument("--jobs", type=_whole, metavar="N", help="processes (default: one a core)")

    explain = command("explain", _explain, "say what training with these options will be like")
    explain.add_argument("out", metavar="OUT")
    explain.add_argument("--batch-size", type=_whole, metavar="N", help="of each rank")
    explain.add_argument("--workers", type=_whole, default=0, metavar="N", help="of each rank")
    explain.add_argument(
        "--world-size", type=_whole, default=1, metavar="N", help="ranks (default 1)"
    )
    explain.add_argument(
        "--local-world-size", type=_whole, metavar="N", help="ranks on a machine (default: all)"
    )
    explain.add_argument(
        "--shuffle-buffer",
        type=_buffer,
        metavar="BUFFER",
        help="records, or bytes such as 512MiB, or all (default: all of up to 256 MiB or 20,000 "
        "records, else 10000)",
    )
    explain.add_argument("--unit", type=_whole, metavar="N", help="(default: about 32)")
    explain.add_argument("--tail", metavar="TAIL", help="pad (default), drop or exact")
    explain.add_argument(
        "--canonical-workers", type=_whole, metavar="N", help="spans of the order (default 64)"
    )

    tune = command("tune", _tune, "say which shuffle buffer to set, by simulating the order")
    tune.add_argument("out", metavar="OUT")
    tune.add_argument(
        "--batch-size", type=_whole, default=256, metavar="N", help="of each rank (default 256)"
    )
    tune.add_argument("--workers", type=_whole, default=0, metavar="N", help="of each rank")
    tune.add_argument("--world-size", type=_whole, default=1, metavar="N", help="ranks (default 1)")
    tune.add_argument(
        "--memory", metavar="SIZE", help="that the buffer's records may take (default 2GiB)"
    )
    tune.add_argument("--units", action="store_true", help="try, and draw, other units too")
    tune.add_argument(
        "--plot", metavar="FILE", help="a picture too: .png, .svg or .html; replaces FILE"
    )

    bench = command("bench", _bench, "measure what this machine can do with a dataset")
    bench.add_argument("out", metavar="OUT")
    bench.add_argument(
        "--batch-size", type=_whole, default=256, metavar="N", help="records a batch (default 256)"
    )
    bench.add_argument(
        "--size",
        type=_whole,
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
        "--seconds", type=_real, metavar="S", help="of measuring a row (default 6; quick 2)"
    )
    bench.add_argument("--quick", action="store_true", help="fewer rows, in less than 30 seconds")
    bench.add_argument(
        "--plot", metavar="FILE", help="a picture too: .png, .svg or .html; replaces FILE"
    )

    demo = command("demo", _demo, "show in a minute what shards gain over a folder of images")
    demo.add_argument(
        "folder",
        metavar="FOLDER",
        nargs="?",
        help="images, which are only read (default: some that are made)",
    )
    demo.add_argument("--out", metavar="DIR", help="pack all of them, and keep the shards here")
    demo.add_argument(
        "--batch-size", type=int, default=64, metavar="N", help="images a batch (default 64)"
    )
    demo.add_argument(
        "--workers", type=int, metavar="N", help="of each loader (default: one a core, at most 8)"
    )
    demo.add_argument("--size", type=int, metavar="N", help="pixels of the crop (default 224)")
    demo.add_argument(
        "--seconds", type=float, default=6.0, metavar="S", help="of a pass, at most (default 6)"
    )
    demo.add_argument(
        "--plot", metavar="FILE", help="the picture (default shardio-demo.png); replaces FILE"
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


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of the commands, by name."""
    assert parser._subparsers is not None
    found: Any = parser._subparsers._group_actions[0].choices
    return dict(found)


def _whole(text: str) -> int:
    from argparse import ArgumentTypeError

    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r}: expected a whole number") from None


def _real(text: str) -> float:
    from argparse import ArgumentTypeError

    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r}: expected a number") from None


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
