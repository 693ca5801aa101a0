"""What tables and lists that lie beside files say of them: columns, joined to the records of SRC.

    --table FILE[:COLUMNS]  rows about images, which name them; or rows about values of another
                            table, by a column of the same name
    --split-files, --split-by  lists of images, or a column, that say to which split they belong

An image is named by its path, with or without its folders and its ending. Whichever way of naming
most rows fit is that of the table. What of a row goes into a record is hashed into the options of
the packing, since no size or time of change would tell that it is another one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...errors import OptionError, SourceError, printable, there_are
from ...formats.sample import Sample
from ...names import KEY, key_bytes, key_text
from ...order.subset import mark_where
from ...units import show_count
from ..options import Joins
from .annotated import Annotations, in_pixels, read_annotations
from .base import (
    Ints,
    Listing,
    Listings,
    Plain,
    Read,
    Renumbered,
    Source,
    SourceRequest,
    renamed,
    some_of,
)
from .field_names import LABELS, check_known_fields, is_folder, known_label, nameable
from .image_names import ImageNames, image_name, texts
from .listing import Rows, number_classes
from .plain_file import plain_file
from .tables import Column, Table, ending, packed_column, read, read_plain, seal_columns

_FIRST = {"image": 0, "label": 1}  # order of the fields of a record
_MOST_SPLITS = 20
_NUMBERED = re.compile(r"(.*)#([01]?)", re.DOTALL)  # a column of numbers of lines
_RANGE = re.compile(r"(.+)\.\.(.+)", re.DOTALL)  # columns from one to another


class Joined(Source):
    """The records of a listing, with columns of values beside."""

    def __init__(
        self,
        source: Source,
        places: Ints,
        split: str,
        columns: Mapping[str, Column],
        *,
        normalised: bool = False,
        boxed: bool = False,
    ) -> None:
        """places: of the records in `source`. split: the folder of `source` there.

        normalised: boxes are parts of the image's size; boxed: their labels are of the classes
        """
        self._source, self._places, self._split = source, places, split
        self._columns, self._normalised, self._boxed = dict(columns), normalised, boxed

    @contextlib.contextmanager
    def open(self) -> Iterator[Read]:
        columns = [(name, column.get) for name, column in self._columns.items()]
        with self._source.open() as read_record:

            def read_joined(place: int) -> Sample:
                sample = read_record(int(self._places[place]))
                for name, get in columns:
                    sample[name] = get(place)
                if self._normalised:
                    in_pixels(sample)
                return sample

            yield read_joined

    def will_need(self, place: int) -> None:
        """Announce the record that a row belongs to."""
        self._source.will_need(int(self._places[place]))

    def describe(self) -> Plain:
        """Describe the records, and where they lie."""
        about = {"split": self._split, "normalised": self._normalised, "boxed": self._boxed}
        return {"joined": self._source.describe(), **about}

    def piece(self, places: Ints) -> Plain:
        """Return some records, and what is known of them."""
        return {
            "joined": self._source.piece(self._places[places]),
            "columns": {name: column.piece(places) for name, column in self._columns.items()},
            "count": len(places),
        }

    def renumbered(self, numbers: Sequence[int], fields: Collection[str]) -> Source:
        """Return the same records, with other labels, also of their boxes. Raises OptionError."""
        return Renumbered(self, numbers) if self._boxed else super().renumbered(numbers, fields)

    def labelled(self, sample: Sample) -> Iterable[dict[str, Any]]:
        """Return the record, and its boxes, as far as they have a label of the classes."""
        parts = [sample, *(sample["annotations"] if self._boxed else ())]
        return (one for one in parts if "label" in one)


def reopen(described: Plain, piece: Plain, opener: Callable[[str, Plain, Plain], Source]) -> Joined:
    """Open a piece of joined records. opener: opens a piece of those that lie in the source."""
    split, boxed = described["split"], described["boxed"]
    source = opener(split, described["joined"], piece["joined"])
    columns = {name: Column(*column) for name, column in piece["columns"].items()}
    places, normalised = np.arange(piece["count"]), described["normalised"]
    return Joined(source, places, split, columns, normalised=normalised, boxed=boxed)


def inner_request(request: SourceRequest) -> SourceRequest:
    """Return the request for the records alone, to which columns are then joined."""
    joins, fields = request.joins, request.fields
    if joins.tables:
        fields = {name: theirs for name, theirs in fields.items() if is_folder(theirs)}
    where = None if joins.tables else request.where
    label = None if "label" in request.fields and joins.tables else request.label
    return replace(request, joins=Joins(), fields=fields, where=where, label=label)


def split_names(request: SourceRequest, inside: list[str]) -> list[str]:
    """Return the splits that records are put into. inside: those of folders. Raises OptionError."""
    joins, option = request.joins, "--split-by" if request.joins.split_by else "--split-files"
    if joins.split_by is None and not joins.split_files:
        return inside
    if inside != [""]:
        raise OptionError(
            f"{option}: {request.shown} has splits already, its folders {some_of(inside)}; give "
            "the path of one of them, or leave the option out"
        )
    names = sorted(joins.splits or joins.split_files)
    if odd := [name for name in names if name in ("", ".", "..") or {"/", "\0"} & {*name}]:
        raise OptionError(
            f"{option}: a split is a folder of OUT, and cannot be called {printable(odd[0])!r}; "
            "NAME=... gives it another name"
        )
    return names


def join(found: Listings, request: SourceRequest) -> Listings:
    """Return listings with all columns that are asked for, by split. Raises as listing does."""
    joins = request.joins
    if joins == Joins():
        return found
    if joins.first_label and not joins.tables:
        raise OptionError("--first-label: is for labels of --table, and none is given")
    images, columns = ImageNames(found, request), None
    if joins.tables or joins.boxes is not None:
        columns = _Columns(images, request)
        starts = images.starts()
        found = {name: columns.joined(name, one, starts[name]) for name, one in found.items()}
    if joins.split_by is None and not joins.split_files:
        return found
    whole = found[""]
    if joins.split_by is not None:
        return _by_column(whole, _column_of(whole, joins.split_by, columns), request)
    return _by_files(images, whole, request)


# --- tables ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TableFile:
    """A table as it was given."""

    shown: str
    table: Table
    by_order: bool  # row i is of image i, in the order of their paths


def _read(given: str, request: SourceRequest) -> _TableFile:
    """Read `FILE` or `FILE:COLUMNS`. Raises SourceError, OptionError."""
    path, colon, listed = given.rpartition(":")
    if not colon or "/" in listed or os.path.lexists(given):
        path, listed = given, ""
    called = [name for name in listed.split(",") if name]
    numbered = {name: match for name in called if (match := _NUMBERED.fullmatch(name))}
    names = [name for name in called if name not in numbered]
    plain = [match[1] or name for name, match in numbered.items()] + names
    if len(set(plain)) < len(plain):
        raise OptionError(f"--table {printable(given)}: expected a name of its own for each column")
    with plain_file(os.fsencode(path), request) as file:
        plainly = called or ending(file) is None
        table = read_plain(file, names, gaps=not numbered) if plainly else read(file)
    columns = dict(table.columns)
    for match in numbered.values():
        if match[1]:
            columns[match[1]] = Column("int", np.arange(table.rows) + int(match[2] or 1))
    by_order = any(not match[1] for match in numbered.values())
    return _TableFile(printable(path), Table(columns, table.rows), by_order)


class _Columns:
    """The columns of all tables, each with a value, or None, for every image."""

    def __init__(self, images: ImageNames, request: SourceRequest) -> None:
        self._images, self._request = images, request
        self.columns: dict[str, Column] = {}  # by their names in tables
        self._unfit: dict[int, str] = {}  # images that cannot be packed, and why
        self.notes: list[str] = []
        self._names: list[str] = []  # of columns that name images
        waiting = self._add_by_name([_read(given, request) for given in request.joins.tables])
        while waiting:
            done = [one for one in waiting if self._add_by_column(one)]
            if not done:
                raise _refusal(waiting[0], images.paths)
            waiting = [one for one in waiting if one not in done]
        self.classes: tuple[str, ...] | None = None
        self._boxes = None if request.joins.boxes is None else self._annotate()
        self.theirs = self._choose()
        chosen = {name: one for name, one in self.theirs.items() if one in self.columns}
        self.fields = {name: self.columns[theirs] for name, theirs in chosen.items()}
        if "label" in self.theirs:
            self.fields = {"label": self._label(self.theirs["label"])} | {
                name: one for name, one in self.fields.items() if name != "label"
            }
        if "label" in self.fields or (request.joins.tables and request.kind == "imagefolder"):
            self.notes.append(_label_note(self, self.fields.get("label"), request))

    @property
    def classed(self) -> int:
        """The most classes that folders, or --label, make."""
        return max(len(one.classes or ()) for one in self._images.listings.values())

    def lacks(self, column: Column) -> int:
        """Return how many images are packed without a value of a column."""
        mask = column.mask
        mask[[*self._unfit]] = False
        return int(mask.sum())

    def column(self, name: str) -> Column:
        """Return a column, by its own name or as a field. Raises OptionError."""
        there = self.columns | self.fields
        if name not in there:
            raise OptionError(f"no column is called {printable(name)!r}; {there_are(there, name)}")
        return there[name]

    def joined(self, split: str, listing: Listing, start: int) -> Listing:
        """Return the listing of a split with the columns, without images that have no row.

        start: the number of its first image.
        """
        count = len(listing.keys)
        here = np.arange(start, start + count)
        fields = {name: column.take(here) for name, column in self.fields.items()}
        unfit = {i - start: why for i, why in self._unfit.items() if start <= i < start + count}
        problems = [*listing.problems, *((listing.keys[i], why) for i, why in unfit.items())]
        good = np.ones(count, np.bool_)
        good[[*unfit]] = False
        if self._request.where is not None:
            good &= self._selected(listing, here)
        kept = np.flatnonzero(good)
        classes, absent = listing.classes, listing.absent
        if "label" in fields:
            classes = self.classes
            there = {*fields["label"].raw(kept)}
            absent = tuple(one for i, one in enumerate(classes or ()) if i not in there)
        elif self._boxes is not None:
            classes = classes or self._boxes.classes
        boxed = self._boxes is not None and classes is not None and self._boxes.classes == classes
        about = {"normalised": self._boxes is not None and self._boxes.normalised, "boxed": boxed}
        kinds = dict(listing.fields) | {name: column.kind for name, column in fields.items()}
        result = replace(
            listing,
            source=Joined(listing.source, listing.own_places, split, fields, **about),
            places=None,
            fields=tuple(sorted(kinds.items(), key=lambda one: _FIRST.get(one[0], 2))),
            classes=classes,
            absent=absent,
            problems=sorted(problems),
            notes=[*listing.notes, *(() if start else self.notes)],
            options={**listing.options, **self._sealed(fields, kept, listing)},
        ).take(kept)
        result.check_some(self._request.show(split))
        return result

    def _selected(self, listing: Listing, here: Ints) -> Any:
        """Return (images of the split,) bool: which are asked for."""
        where, classes = self._request.where or {}, self.classes or listing.classes

        def column(name: str) -> Any:
            own = getattr(listing.source, "labels", None) if name == "label" else None
            if own is not None and "label" not in self.fields:
                return own[listing.own_places]
            column = self.column(name)
            if column.kind == "json":
                raise OptionError(f"where: {name!r} is of kind json, and nothing to select by")
            return column.take(here).array()

        return mark_where(where, column, len(here), classes)

    def _sealed(self, fields: Mapping[str, Column], kept: Ints, listing: Listing) -> dict[str, Any]:
        """Return the options that record what is in no file of the records."""
        seal = hashlib.sha256()
        seal_columns(seal, fields, kept)
        found = renamed(self.theirs)
        if "fields" in listing.options:
            found["fields"] = {**listing.options["fields"], **found.get("fields", {})}
        return {**found, "values": seal.hexdigest()[:32]}

    def _annotate(self) -> Annotations:
        """Take boxes as columns. Raises OptionError, SourceError."""
        classes = next(iter(self._images.listings.values())).classes
        found = read_annotations(self._images, self._request, classes)
        if twice := self.columns.keys() & found.columns.keys():
            raise OptionError(
                f"--boxes: a column of a table is called {min(twice)!r}, too; FILE:COLUMNS gives "
                "the columns of a file other names"
            )
        self.columns |= found.columns
        self._unfit = found.unfit | self._unfit
        self.notes += found.notes
        return found

    def _refuse_images(self, unfit: Any, why: str) -> None:
        """Note why images cannot be packed. unfit: (images,) bool."""
        for image in np.flatnonzero(unfit).tolist():
            self._unfit.setdefault(image, why)

    # what tables are about

    def _add_by_name(self, given: Sequence[_TableFile]) -> list[_TableFile]:
        """Add the columns of tables whose rows name images; return the other tables."""
        waiting, found = [], []
        for one in given:
            if one.by_order:
                self._add_by_order(one)
            elif (named := self._images.naming(one.table.columns, one.shown)) is None:
                waiting.append(one)
            else:
                found.append((one, *named))
        others = [{*one.table.columns} - {column} for one, column, _ in found]
        about = [any(column in names for names in others) for _, column, _ in found]
        for (one, column, way), is_about in zip(found, about, strict=True):
            if is_about and not all(about):  # numbers of classes, perhaps, and not of images
                waiting.append(one)
                continue
            shown, columns = one.shown, one.table.columns
            images = self._images.places(way)[0]
            if any(image_name(key_bytes(name), way[0], way[2]) in images for name in columns):
                raise SourceError(
                    f"{shown}: its first line names an image, so it has no names of columns; give "
                    "them as in FILE:image,label"
                )
            rows, lost = self._images.find(texts(columns[column]), way, shown)
            example = next(filter(None, texts(columns[column])), b"")
            self._names.append(column)
            self.notes.append(
                f"{shown}: column {printable(column)!r} names {int((rows >= 0).sum()):,} of "
                f"{show_count(len(rows), 'image')}, {self._images.show(way, example)}"
            )
            if lost:
                rest = f"{show_count(len(lost), 'row')} of no image, as {printable(lost[0][1])}"
                self.notes.append(f"{shown}: {rest}")
            self._refuse_images(rows < 0, f"{shown} has no row for it")
            self._add(one, rows, column)
        return waiting

    def _add_by_order(self, one: _TableFile) -> None:
        """Add the columns of a table whose row i is of image i."""
        count = len(self._images.paths)
        if one.table.rows != count or len(self._images.listings) > 1:
            raise SourceError(
                f"{one.shown}: {one.table.rows:,} rows for {show_count(count, 'image')}"
                f"{' of several splits' if len(self._images.listings) > 1 else ''}; row i is "
                "that of image i in the order of paths, so expected were as many, of one folder"
            )
        first, last = (printable(self._images.paths[i]) for i in (0, -1))
        self.notes.append(f"{one.shown}: rows in the order of paths, from {first} to {last}")
        self._add(one, np.arange(count), None)

    def _add_by_column(self, one: _TableFile) -> bool:
        """Add the columns of a table that has one by the name of another's."""
        for name in one.table.columns:
            if name not in self.columns:
                continue
            row_of: dict[Any, int] = {}
            for row, value in enumerate(texts(one.table.columns[name])):
                if value is not None and row_of.setdefault(value, row) != row:
                    raise SourceError(
                        f"{one.shown}: rows {row_of[value] + 1} and {row + 1} both have "
                        f"{printable(value)} as {printable(name)!r}; expected one row for each"
                    )
            values = texts(self.columns[name])
            rows = np.array([-1 if v is None else row_of.get(v, -1) for v in values], np.int64)
            self._refuse_images(rows < 0, f"{one.shown} has no row for its {printable(name)!r}")
            self.notes.append(f"{one.shown}: joined by column {printable(name)!r}")
            self._add(one, rows, name)
            return True
        return False

    def _add(self, one: _TableFile, rows: Ints, link: str | None) -> None:
        """Add all columns but the one that rows were found by. rows: (images,) of the table."""
        for name, column in one.table.columns.items():
            if name == link:
                continue
            if name in self.columns:
                raise SourceError(
                    f"{one.shown}: column {printable(name)!r} is one of a table before, too; "
                    "FILE:COLUMNS gives the columns of a file other names"
                )
            self.columns[name] = column.take(rows)

    # what columns become

    def _choose(self) -> dict[str, str]:
        """Return the columns that become fields, by the names of these. Raises OptionError."""
        asked = {n: theirs for n, theirs in self._request.fields.items() if not is_folder(theirs)}
        images = asked.pop("image", None)
        if images is not None and images not in self._names:
            raise OptionError(
                f"--fields image={printable(images)}: no column called so names images; those that "
                f"do are {some_of(self._names)}"
            )
        parts = {theirs: _range(theirs, [*self.columns]) for theirs in asked.values()}
        check_known_fields({n: one for n, one in asked.items() if not parts[one]}, self.columns)
        used = {*asked.values()}.union(*parts.values())
        free = [name for name in self.columns if name not in used]
        if self._request.joins.split_by == "label" in free:  # which would be taken for the label
            free.remove("label")
        if "label" not in asked and (label := self._known_label(free)) is not None:
            asked["label"] = label
            free.remove(label)
        odd = [name for name in asked if not nameable(name)]
        if odd:
            raise OptionError(f"--fields {printable(odd[0])}: no column can be called so")
        taken = {n for one in self._images.listings.values() for n, _ in one.fields}
        if not _has_label(self._images):
            taken -= {"label"}
        taken |= {*asked, "image", KEY}
        left_out = [name for name in free if not nameable(name) or name in taken]
        if left_out:
            self.notes.append(f"columns that can be no fields were left out: {some_of(left_out)}")
        return asked | {name: name for name in free if name not in left_out}

    def _known_label(self, free: Sequence[str]) -> str | None:
        """Return the column that is the label by its name; None where none is."""
        classed = self.classed > 1
        free = [name for name in free if name != self._request.joins.split_by]
        if _has_label(self._images):
            return None
        if not classed and free in (["column2"], ["column1"]):
            return free[0]
        typed = [name for name in free if self.columns[name].kind in ("int", "str")]
        return known_label(LABELS[:1] if classed else LABELS, typed, self.columns)

    def _label(self, theirs: str) -> Column:
        """Return the label of each image, and keep the names of its classes. Raises OptionError."""
        hot, request = _range(theirs, [*self.columns]), self._request
        if hot:
            numbers = np.stack([_number(self.columns[name], name) for name in hot], 1)
            single = ((numbers == 0) | (numbers == 1)).all(1) & (numbers.sum(1) == 1)
            self._refuse_images(~single, f"has no single 1 in the columns {printable(theirs)}")
            self.classes = tuple(hot)
            return Column("int", numbers.argmax(1).astype(np.int64), None, ~single)
        column = self.columns[theirs]
        if request.joins.first_label and column.kind != "int":
            raise OptionError(
                f"--first-label: expected integers in column {printable(theirs)!r}, which is the "
                f"label; found {column.kind}"
            )
        if column.kind == "str" and request.label is not None and "label" in request.fields:
            pattern = re.compile(request.label)
            matches = (pattern.search(key_text(text or b"")) for text in texts(column))
            found = [key_bytes(one[1]) if one and one[1] else None for one in matches]
            column = packed_column("str", found)
            why = f"--label {printable(request.label)} finds no class in its {printable(theirs)!r}"
            self._refuse_images(column.mask, why)
        if column.kind == "str":
            column, self.classes = number_classes(column)
        elif request.joins.first_label:
            first = request.joins.first_label
            least = column.values[~column.mask].min(initial=first)
            if least < first:
                raise OptionError(
                    f"--first-label {first}: expected integers from {first} on in column "
                    f"{printable(theirs)!r}, found {least}"
                )
            column = Column("int", column.values - first, None, column.mask)
        return column


def _range(theirs: str, names: list[str]) -> list[str]:
    """Return the columns that `A..B` stands for; none where it is no such range."""
    ends = _RANGE.fullmatch(theirs)
    if ends is None or theirs in names or not {ends[1], ends[2]} <= {*names}:
        return []
    return names[names.index(ends[1]) : names.index(ends[2]) + 1]


def _refusal(one: _TableFile, paths: Sequence[bytes]) -> SourceError:
    """Return the error for a table that says nothing of the images."""
    columns = (
        f"{printable(name)} ({', '.join(map(printable, filter(None, texts(column, 2))))})"
        for name, column in one.table.columns.items()
        if column.kind in ("int", "str")
    )
    count = len(paths)
    order = ""
    if one.table.rows == count:
        order = (
            f"\nIt has {count:,} rows, as many as there are images: if row i is that of image "
            "i in the order of paths, say so by a column #, as in FILE:#,label"
        )
    return SourceError(
        f"{one.shown}: no column of it names images, such as "
        f"{printable(paths[0])}, and none is called as one of another table. It "
        f"has {', '.join(columns) or 'no columns of text or integers'}. FILE:COLUMNS gives the "
        f"columns names{order}"
    )


def _number(column: Column, name: str) -> Any:
    """Return (images,) the numbers of a column. Raises OptionError for another one."""
    if column.ends is not None:
        raise OptionError(
            f"--fields label: expected a 1 or 0 for each class; column {printable(name)!r} is "
            f"of kind {column.kind}"
        )
    return np.where(column.mask, -1, column.values)


def _has_label(images: ImageNames) -> bool:
    """Tell whether records have a label that is no folder: of --label, or of their own."""
    folders = images.request.kind == "imagefolder" and images.request.label is None
    return not folders and any("label" in dict(one.fields) for one in images.listings.values())


def _label_note(found: _Columns, label: Column | None, request: SourceRequest) -> str:
    """Say what the label is, since nobody sees it in the images. label: the column, if it is one.

    Raises OptionError.
    """
    if label is None:
        if request.joins.first_label:
            raise OptionError("--first-label: is for labels of a table, and no column is one")
        what = "by --label" if request.label is not None else "the class folder"
        what = what if found.classed else "none"
        return f"label: {what}; --fields label=COLUMN makes a column the label"
    there = label.values[~label.mask] if label.ends is None else np.zeros(0)
    what = f"kind {label.kind}"
    if found.classes is not None:
        what = show_count(len(found.classes), "class", "classes")
    elif len(there):
        what += f", from {there.min()} to {there.max()}"
    lacks = found.lacks(label)
    without = f"; {show_count(lacks, 'image')} without one" if lacks else ""
    return f"label: column {printable(found.theirs['label'])!r}, {what}{without}"


# --- splits ---------------------------------------------------------------------------------------


def _by_files(images: ImageNames, listing: Listing, request: SourceRequest) -> Listings:
    """Return the listing of each split that a list of its images makes. Raises SourceError."""
    if not isinstance(listing.source, Joined):  # whose split would be taken for a folder
        source = Joined(listing.source, listing.own_places, "", {})
        listing = replace(listing, source=source, places=None)
    place_of = {key: place for place, key in enumerate(listing.keys)}
    found: Listings = {}
    listed = np.zeros(len(images.paths), np.int64)
    for split, path in sorted(request.joins.split_files.items()):
        with plain_file(os.fsencode(path), request) as file:
            table = read_plain(file)
        named = images.naming(table.columns, printable(path))
        if named is None:
            first = [text or b"" for text in texts(next(iter(table.columns.values())), 3)]
            raise SourceError(
                f"{printable(path)}: names no images, such as {printable(images.paths[0])}; found "
                f"{some_of(first)}"
            )
        way = named[1]
        rows, lost = images.find(texts(table.columns[named[0]]), way, printable(path))
        listed += rows >= 0
        chosen = [images.paths[i] for i in np.flatnonzero(rows >= 0).tolist()]
        kept = [place_of[key] for key in chosen if key in place_of]
        unfit = {image_name(key, *way[:2]): (key, why) for key, why in listing.problems}
        why = f"is in {printable(path)}, and there is no such image"
        problems = [unfit.get(image_name(name, way[0], way[2]), (name, why)) for _, name in lost]
        one = listing.take(np.array(kept, np.int64))
        found[split] = replace(one, problems=problems, notes=[] if found else [*listing.notes])
        found[split].check_some(request.show(split))
    for count, what in (
        (int((listed == 0).sum()), "in none of the lists of --split-files, and left out"),
        (int((listed > 1).sum()), "in several of them, and packed in each"),
    ):
        if count:
            next(iter(found.values())).notes.append(f"{show_count(count, 'image')} {what}")
    return found


def _by_column(listing: Listing, column: Column, request: SourceRequest) -> Listings:
    """Return the listing of each split that values of a column make. Raises SourceError."""
    joins = request.joins
    values = list(texts(column))
    found: Listings = {}

    def wanted(value: str) -> bytes:
        return key_bytes(value.capitalize() if column.kind == "bool" else value)

    for split, value in sorted(joins.splits.items()):
        kept = [place for place, one in enumerate(values) if one == wanted(value)]
        one = listing.take(np.array(kept, np.int64))
        first = not found
        found[split] = replace(
            one,
            problems=listing.problems if first else [],
            ignored=listing.ignored if first else 0,
            notes=[*listing.notes] if first else [],
        )
        found[split].check_some(request.show(split))
    others = len(values) - sum(len(one.keys) for one in found.values())
    if others:
        next(iter(found.values())).notes.append(
            f"left out: {show_count(others, 'record')} with other values of "
            f"{printable(joins.split_by or '')!r}"
        )
    return found


def find_splits(request: SourceRequest) -> SourceRequest:
    """Return the request with the splits that the values of its column make, if none are given."""
    joins = request.joins
    if joins.split_by is None or joins.splits:
        return request
    for given in joins.tables:
        column = _read(given, request).table.columns.get(joins.split_by)
        if column is not None:
            break
    else:
        there: Mapping[str, Column] = {}
        if request.kind == "listing":
            with plain_file(request.path, request) as file:
                there = read(file).columns
        if joins.split_by not in there:
            raise OptionError(
                f"--split-by {printable(joins.split_by)}: no column of a table is called so"
            )
        column = there[joins.split_by]
    values = sorted({key_text(text) for text in texts(column) if text is not None})
    if len(values) > _MOST_SPLITS:
        raise OptionError(
            f"--split-by {printable(joins.split_by)}: has {len(values):,} values; at most "
            f"{_MOST_SPLITS} splits are made so"
        )
    return replace(request, joins=replace(joins, splits={value: value for value in values}))


def _column_of(listing: Listing, name: str, columns: _Columns | None) -> Column:
    """Return the values of a column of a table, or of a listing. Raises OptionError."""
    places, source = listing.own_places, listing.source
    if columns is not None and (column := columns.columns.get(name)) is not None:
        return column.take(places)
    found = source.column(name, places) if isinstance(source, Rows) else None
    if found is None:
        raise OptionError(
            f"--split-by {printable(name)}: no field is called so; there are "
            f"{some_of(name for name, _ in listing.fields)}"
        )
    return found
