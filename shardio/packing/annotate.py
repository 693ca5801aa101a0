"""Add fields to the records of a dataset, or correct some, without touching its shards.

Values are written to files beside the manifest (formats/overlay.py): one for each field and shard
that has some, named by its content. A field that is annotated again gets new files, of the values
before and the new ones; so a call costs what was annotated of these shards, and a look at the index
of each shard, and not the dataset.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..dataset.decode import Decoder
from ..dataset.reader import Reader
from ..dataset.sequence import ShardSequence
from ..errors import OptionError, printable, there_are
from ..formats import manifest
from ..formats.base import Opening, Overlay, ShardInfo
from ..formats.manifest import Manifest
from ..formats.overlay import newest_of
from ..formats.sample import Schema
from ..names import key_text
from ..storage import local
from ..storage.options import Storage
from ..units import Summary, check_bool, check_choice, show_count
from .given_values import Get, GivenValues, read_values
from .place import Place, Workspace, data_root, find_place
from .values_file import values_of, write_values
from .versions import changing_all, commit, keys_text, version_lines

_SHOWN = 10  # keys that are named
# A file of values before is written anew with the new ones if it has at most so many times as many.
# So a field has few files in a shard, and correcting few values of many costs few.
_LARGER = 4
_LOOKED = 1000  # arrays that keep their values, with which others are compared
_ALIKE = 0.8  # of names of fields, by difflib: caption and captoin are


@dataclass(repr=False)
class Annotated(Summary):
    """The result of one call of `annotate`; as str, a summary."""

    out: str
    fields: dict[str, str] = field(default_factory=dict)  # kinds by name
    records: int = 0  # that were annotated
    missing: int = 0  # records of a field that is new that have no value: None
    similar: dict[str, str] = field(default_factory=dict)  # new fields, and what may be meant
    removed: list[str] = field(default_factory=list)  # fields whose values were taken away
    unknown: list[str] = field(default_factory=list)  # keys that no record has
    versions: dict[str, str] = field(default_factory=dict)  # the new ones, by split
    dry_run: bool = False

    def __str__(self) -> str:
        would, shown = "would be " if self.dry_run else "", printable(self.out, 4096)
        if self.removed:
            named = ", ".join(map(printable, self.removed))
            lines = [f"{shown}: what was annotated of {named} {would or 'is '}taken away"]
            return "\n".join(lines + version_lines(self.versions))
        named = ", ".join(f"{printable(name)} ({kind})" for name, kind in self.fields.items())
        records = show_count(self.records, "record")
        lines = [f"{shown}: {records} {would}annotated: {named}"]
        for name, meant in self.similar.items():
            lines.append(
                f"{printable(name)!r} is a new field: did you mean {printable(meant)!r}? `shardio "
                f"annotate {shown} --remove {printable(name)}` takes it away"
            )
        if self.missing:
            lines.append(f"{show_count(self.missing, 'record')} without a value: None")
        if self.unknown:
            lines.append(f"no record has {keys_text(self.unknown)}")
        lines += version_lines(self.versions)
        if not self.versions and not self.dry_run:
            lines.append("all was so before; the version stays")
        return "\n".join(lines)


Places = dict[int, dict[int, int]]  # by shard: rows of what is given, by records there


@dataclass
class _Work:
    """One dataset, and what is to be annotated of it."""

    split: str
    place: Place
    before: Manifest
    reader: Reader
    places: Places


def annotate(
    path: str | os.PathLike[str],
    table: Any = None,
    *,
    fields: Mapping[str, str] | Iterable[str] | None = None,
    key: str | None = None,
    missing: str = "error",
    unknown: str = "error",
    remove: Iterable[str] | None = None,
    dry_run: bool = False,
    storage: Storage | None = None,
) -> Annotated:
    """Add fields to a dataset, or to all its splits, or correct values of those that it has.

    path     the directory of the dataset, or its URL
    table    a .csv, .tsv, .jsonl or .parquet, a column of which has the keys; or an .npy, whose
             entry i is of record i in the order of `shardio ls`; in Python also an array, a dict
             of values or of dicts by key, or pairs of a key and a dict
    fields   which to take, and by which name: caption=text, label; default: all columns. An array
             needs one name
    key      the column that has the keys; default: __key__, key, path, file_name or the like
    missing  records without a row, of a field that is new, and cells of a table that are empty:
             "error", or "none": they get None. Of a field that there is, records without a row
             keep what they have
    unknown  keys that no record has: "error", or "ignore": they are listed
    remove   instead of a table: fields whose annotated values are taken away. A field that was
             added is gone then; one that was packed has the values again that were packed
    dry_run  say what would be annotated, and change nothing
    storage  a shardio.Storage: how an object store is reached; its `root`: where files of others
             are, when `shardio index --out` put their index elsewhere

    Images stay as they are: the values lie beside them, and a field that is annotated again keeps
    the values that are not given anew. A label may be given by the names of its classes. Raises
    OptionError, SourceError, SampleError, BusyError, NotPackedError, DamageError.
    """
    check_bool(dry_run=dry_run)
    check_choice("missing", missing, "error", "none")
    check_choice("unknown", unknown, "error", "ignore")
    top, data = find_place(path, storage), data_root(storage)
    if remove is not None:
        if (table, fields, key) != (None, None, None):
            raise OptionError("annotate: give a table, or fields to remove (--remove), not both")
        return _remove(top, [remove] if isinstance(remove, str) else [*remove], dry_run)
    if table is None:
        raise OptionError("annotate: give a table of values, or the fields to remove (--remove)")
    shown, datasets = printable(top.url, 4096), top.datasets()
    for place in datasets.values():
        manifest.load(place.location)  # explains what is there, if it is nothing
    given, done = read_values(table, fields, key), Annotated(top.url, dry_run=dry_run)
    if given.empty and missing == "error":
        raise OptionError(
            f"{given.shown}: {given.empty}. Nothing was annotated. Fill it in, or leave the row "
            "out; or --missing none, by which it is None"
        )
    with contextlib.ExitStack() as owners:
        work, seen = list[_Work](), set[bytes]()
        if given.keys is None and len(datasets) > 1:
            raise OptionError(
                f"{given.shown}: it has no keys, and {shown} has splits "
                f"{', '.join(map(printable, datasets))}; give the path of one of them"
            )
        for split, place, before in changing_all(datasets, owners, dry_run):
            reader = Reader(place.location, before, root=data)
            places = _in_order(reader, given) if given.keys is None else _by_key(reader, given)
            if given.keys is not None:
                seen |= {given.keys[row] for rows in places.values() for row in rows.values()}
            work.append(_Work(split, place, before, reader, places))
            done.records += sum(map(len, places.values()))
        done.unknown = [key_text(one) for one in sorted({*(given.keys or ())} - seen)]
        if done.unknown and unknown == "error":
            raise OptionError(
                f"{shown}: no record has {keys_text(done.unknown)}. Nothing was annotated. Correct "
                "them, or leave them out with --unknown ignore"
            )
        for one in work:
            done.fields |= _kinds(one.before, given)
            done.missing += _refuse_missing(one, given, missing)
            done.similar |= _similar(one.before, given)
        _refuse_other_shapes(work, given)
        for one, after in [] if dry_run else _written(work, given):
            if after is not None:
                count = {"annotated": sum(map(len, one.places.values()))}
                new = commit(one.place, one.before, after, "annotate", count, {})
                done.versions[one.split] = new.version_id
    return done


def _remove(top: Place, names: list[str], dry_run: bool) -> Annotated:
    """Take the annotated values of fields away. Raises OptionError where there are none."""
    done = Annotated(top.url, dry_run=dry_run, removed=names)
    with contextlib.ExitStack() as owners:
        work = [*changing_all(top.datasets(), owners, dry_run)]
        annotated = {beside.field for *_, before in work for beside in before.overlays}
        packed = {name for *_, before in work for name in before.stored_schema.names}
        for name in names or [""]:
            if name not in annotated:
                why = there_are(sorted(annotated), name)
                if name in packed:
                    why = "it was packed so, and stays: readers leave it out by fields="
                raise OptionError(
                    f"{printable(top.url, 4096)}: nothing was annotated of the field "
                    f"{printable(name)!r}; {why}"
                )
        for split, place, before in work:
            kept = tuple(one for one in before.overlays if one.field not in names)
            gone = {one.field for one in before.overlays if one.added} - {o.field for o in kept}
            fields = [(name, kind) for name, kind in before.schema.fields if name not in gone]
            if count := len(before.overlays) - len(kept):
                after = replace(before, schema=Schema(fields), overlays=kept)
                changes = {"field removed" if count == 1 else "fields removed": count}
                if not dry_run:
                    new = commit(place, before, after, "annotate", changes, {})
                    done.versions[split] = new.version_id
    return done


# --- which record a row is of ---------------------------------------------------------------------


def _by_key(reader: Reader, given: GivenValues) -> Places:
    """Return by shard which record has which row: all records with a key of one."""
    row_of = {key: row for row, key in enumerate(given.keys or ())}
    places = Places()
    for shard, record, key in reader.with_keys(row_of):
        places.setdefault(shard, {})[record] = row_of[key]
    return places


def _in_order(reader: Reader, given: GivenValues) -> Places:
    """Return by shard which record has which row: row i is of record i. Raises OptionError."""
    if given.rows != reader.records:
        raise OptionError(
            f"{given.shown}: {show_count(given.rows, 'row')} for "
            f"{show_count(reader.records, 'record')}; expected as many, in the order of `shardio "
            "ls`. A table with keys may have fewer"
        )
    numbers = np.setdiff1d(np.arange(reader.stored_records), reader.dropped)
    bounds = np.searchsorted(numbers, reader.starts).tolist()
    places = {}
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if start < stop:
            records = (numbers[start:stop] - reader.starts[number]).tolist()
            places[number] = dict(zip(records, range(start, stop), strict=True))
    return places


def _refuse_missing(one: _Work, given: GivenValues, missing: str) -> int:
    """Return how many records lack a value of a field that is new. Raises OptionError."""
    new = [name for name in given.fields if name not in one.before.schema.names]
    lack = one.reader.records - sum(map(len, one.places.values()))
    if not new or not lack:
        return 0
    if missing == "error":
        some, reader, meant = list[str](), one.reader, _similar(one.before, given).get(new[0], "")
        asked = f" (did you mean {printable(meant)!r}?)" if meant else ""
        for number in range(one.before.shards):
            start, stop = reader.starts[number : number + 2].tolist()
            there = [start + record for record in one.places.get(number, {})]
            free = np.setdiff1d(np.arange(start, stop), np.union1d(there, reader.dropped))
            for record in free[: _SHOWN - len(some)].tolist():
                some.append(key_text(reader.shard(number).key(record - start)))
            if len(some) == _SHOWN:
                break
        raise OptionError(
            f"{given.shown}: {show_count(lack, 'record')} without a row, such as "
            f"{', '.join(map(printable, some))}, and {printable(new[0])!r} is a new field{asked}. "
            "Nothing was annotated. Give rows for all records, or --missing none, by which these "
            "get None"
        )
    return lack


# --- what their fields are ------------------------------------------------------------------------


def _similar(before: Manifest, given: GivenValues) -> dict[str, str]:
    """Return the fields that are new, of which others have nearly the name, and those others."""
    names = before.schema.names
    close = {
        name: difflib.get_close_matches(name, names, 1, cutoff=_ALIKE)
        for name in given.fields
        if name not in names
    }
    return {name: found[0] for name, found in close.items() if found}


def _kinds(before: Manifest, given: GivenValues) -> dict[str, str]:
    """Return the kind of each field that is given. Raises OptionError where it is another one."""
    there = dict(before.schema.fields)
    kinds = {}
    for name, (kind, _) in given.fields.items():
        own = there.get(name)
        if own == "image":
            raise OptionError(
                f"{given.shown}: field {printable(name)!r} is of images, which stay as they are: "
                "pack the dataset anew to have others"
            )
        fits = (
            *(kind is None, own is None, kind == own, own == "json"),
            (kind, own) == ("int", "float"),
            name == "label" and (kind, own) == ("str", "int") and before.classes is not None,
        )
        if not any(fits):
            raise OptionError(
                f"{given.shown}: field {printable(name)!r} is of kind {own}, and the values given "
                f"are of kind {kind}. Correct them, or give the field another name"
            )
        kinds[name] = own or kind or "str"
    return kinds


def _refuse_other_shapes(work: list[_Work], given: GivenValues) -> None:
    """Raise OptionError for arrays unlike all others of their field, which keep their values.

    Where those are unlike each other, any may be.
    """
    for name, (kind, get) in given.fields.items():
        rows = sorted({row for one in work for of in one.places.values() for row in of.values()})
        if kind != "array" or not rows:
            continue
        kept = (_form(value) for value in itertools.islice(_kept(work, name), _LOOKED))
        if not (expected := next(kept, "")):
            continue
        forms = ((row, _form(get(row))) for row in (rows if given.keys is not None else rows[:1]))
        odd = next((pair for pair in forms if pair[1] not in ("", expected)), None)
        if odd is not None and all(form == expected for form in kept):
            raise OptionError(
                f"{given.shown}: {printable(_named(given, odd[0]))}: field {printable(name)!r}: "
                f"expected {expected}, as the records that keep theirs; found {odd[1]}. Nothing "
                "was annotated. Give all records a value, or the field another name"
            )


def _kept(work: list[_Work], name: str) -> Iterator[Any]:
    """Yield the arrays of a field of the records that keep them."""
    for one in work:
        if name not in one.before.schema.names:
            continue
        decoder = Decoder(one.before.schema, fields=(name,), decode=None, transform=None)
        records = ShardSequence(one.reader, decoder, range(one.reader.records))
        for number in range(one.before.shards):
            start, stop = one.reader.starts[number : number + 2].tolist()
            there = [start + record for record in one.places.get(number, {})]
            for record in np.setdiff1d(np.arange(start, stop), there).tolist():
                row = one.reader.place(record)
                if row is not None and (value := records[row][0]) is not None:
                    yield value


def _form(value: Any) -> str:
    """Return what all arrays of a field are alike in; "" of None.

    Of embeddings that is all of it. Of the things in an image, such as their boxes and the numbers
    of their classes, there may be any number.
    """
    if value is None:
        return ""
    shape = [*map(str, value.shape)]
    if len(shape) > 1 or (value.dtype.kind in "iu" and value.dtype.itemsize > 1):
        shape[0] = "n"
    return f"{value.dtype} of shape ({', '.join(shape)})"


def _value_of(before: Manifest, given: GivenValues, name: str) -> Get:
    """Return what gives the value of a row, as the field takes it."""
    kind, get = given.fields[name]
    own = dict(before.schema.fields).get(name)
    classes = before.classes
    if name != "label" or own != "int" or classes is None:
        return get
    numbers = {one: number for number, one in enumerate(classes)}

    def label(row: int) -> int | None:
        value = get(row)
        number = numbers.get(value, -1) if kind == "str" else value
        if value is not None and not 0 <= number < len(numbers):
            of = printable(_named(given, row))
            raise OptionError(
                f"{given.shown}: {of}: the label is {printable(repr(value))}, which is none of the "
                f"{show_count(len(numbers), 'class', 'classes')}; {there_are(numbers, str(value))}."
                " Classes are those that the dataset was packed with: to have others, add a field "
                "of another name, or pack anew"
            )
        if kind == "int" and numbers.get(str(value), value) != value:  # of MNIST, perhaps
            raise OptionError(
                f"{given.shown}: {printable(_named(given, row))}: the label is {value}, but label "
                f"{value} is called {printable(classes[value])!r} here, and class "
                f"{printable(str(value))!r} has the label {numbers[str(value)]}. Give the names of "
                "classes, as text: in JSON lines, or in Python"
            )
        return None if value is None else int(number)

    return label


# --- what is written ------------------------------------------------------------------------------


def _written(work: list[_Work], given: GivenValues) -> list[tuple[_Work, Manifest | None]]:
    """Write the files of values of all splits; return what is to be committed.

    None: all was so before. Where one value cannot be written, no file stays.
    """
    with contextlib.ExitStack() as spaces:
        built = [_Built(spaces.enter_context(one.place.workspace())) for one in work]
        try:
            done = [
                (one, _with_values(one, given, into)) for one, into in zip(work, built, strict=True)
            ]
        except BaseException:
            for into in built:
                for path in into.fresh:
                    local.remove(path)
            raise
        for into in built:  # now that all values are known to be right
            for info in into.infos:
                into.space.take(info)
    return done


@dataclass
class _Built:
    """The files of values of one dataset that were written."""

    space: Workspace
    infos: list[ShardInfo] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)  # paths of those that were not there


def _with_values(one: _Work, given: GivenValues, into: _Built) -> Manifest | None:
    """Write the files of values; return the manifest that names them."""
    before, opening = one.before, one.before.opening(one.place.location)
    overlays = {beside.field: beside for beside in before.overlays}
    stored = dict(before.stored_schema.fields)
    for name, kind in _kinds(before, given).items():
        get = _value_of(before, given, name)
        old = overlays.get(name, Overlay(name, kind, name not in stored, {}))
        files = dict(old.files)
        for number in one.places:
            files[number] = _write(one, given, old, opening, number, get, into)
        overlays[name] = replace(old, files=dict(sorted(files.items())))
    if tuple(overlays.values()) == before.overlays:
        return None
    added = [(n, o.kind) for n, o in overlays.items() if n not in before.schema.names]
    schema = Schema([*before.schema.fields, *added])
    return replace(before, schema=schema, overlays=tuple(overlays.values()))


def _write(
    one: _Work,
    given: GivenValues,
    old: Overlay,
    opening: Opening,
    number: int,
    get: Get,
    into: _Built,
) -> tuple[ShardInfo, ...]:
    """Write the new values of a field for one shard, and files before that are not much larger.

    Returns the files that the shard has then.
    """
    rows = one.places[number]
    kept = list(old.files.get(number, ()))
    taken, count = list[ShardInfo](), len(rows)
    while kept and kept[-1].records <= _LARGER * count:
        taken.insert(0, kept.pop())
        count += taken[0].records
    new = ((record, get(rows[record])) for record in sorted(rows))
    records = int(one.before.shard_records[number])
    with values_of(opening, old.field, number, records, taken) as before:
        values = newest_of([*before, new])
        place = into.space.folder, one.before.dataset_id
        info = write_values(
            *place, old, number, values, into.fresh, lambda row: _named(given, rows[row])
        )
    into.infos.append(info)
    return (*kept, info)


def _named(given: GivenValues, row: int) -> bytes:
    """Return what messages call the record of a row."""
    return b"row %d" % (row + 1) if given.keys is None else given.keys[row]
