"""A listing: a table whose rows name files, or are records by themselves.

    path,label,split                      image: the file; label: 0 is `cat`; split: "train"
    a/1.jpg,cat,train

With a column of paths, a record is a file and the other columns of its row; its key is the path.
Without one a record is a row, and its key is what an `id` says, or the number of the row, from 0.
What of a row goes into a record is hashed into the options of the packing, since no size or time
of change would tell that it is another one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np

from ...errors import OptionError, SourceError, printable, there_are
from ...formats.sample import Sample
from ...names import KEY
from .archived import root_of, some_folders
from .base import (
    Ints,
    Listing,
    Listings,
    Plain,
    Problem,
    Read,
    ReadFile,
    Source,
    SourceFolder,
    SourceRequest,
    bytewise,
    check_key,
    renamed,
    some_of,
)
from .field_names import LABELS, PATHS, check_known_fields, known, known_label, nameable
from .files import MISSING, check_image, first_sign, unicode_duplicates
from .plain_file import plain_file
from .tables import Column, Table, ending, holds_bytes, packed_column, pieces, seal_columns
from .tables import read as read_table

_KEYS = (KEY, "key", "id", "uid")  # columns that keys are taken from; the first two hold no more
_URL = re.compile(rb"\A([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)")


class Rows(Source):
    """The records of a listing. Fields are columns of all rows, of which `rows` are records."""

    def __init__(
        self, fields: Mapping[str, Column], rows: Ints, keys: list[bytes], files: Files | None
    ) -> None:
        self._fields, self._rows, self._keys, self._files = dict(fields), rows, keys, files

    @contextlib.contextmanager
    def open(self) -> Iterator[Read]:
        columns = [(name, column.get) for name, column in self._fields.items()]
        files = self._files
        with contextlib.nullcontext() if files is None else files.root.opened() as read_file:

            def read(place: int) -> Sample:
                row = int(self._rows[place])
                sample: Sample = {KEY: self._keys[place]}
                if files is not None and read_file is not None:
                    sample[files.field] = files.read(read_file, place, row)
                for name, get in columns:
                    sample[name] = get(row)
                return sample

            yield read

    def piece(self, places: Ints) -> Plain:
        """Return the rows, and what is known of the files that they name."""
        rows, files = self._rows[places], self._files
        named = {} if files is None else {"files": files.piece(places, rows)}
        return named | {
            "keys": [self._keys[place] for place in places.tolist()],
            "fields": {name: column.piece(rows) for name, column in self._fields.items()},
        }

    def column(self, name: str, places: Ints) -> Column | None:
        """Return the values of a column; None where there is no such."""
        return self._fields[name].take(self._rows[places]) if name in self._fields else None

    def will_need(self, place: int) -> None:
        """Announce the file of a row."""
        if self._files is not None:
            self._files.will_need(place, int(self._rows[place]))


@dataclass(frozen=True)
class Files:
    """The files that rows name."""

    root: SourceFolder  # the folder that paths are relative to
    paths: Column  # a path for each row
    sizes: Ints  # bytes of each record
    mtimes: Ints
    field: str = "image"

    def piece(self, places: Ints, rows: Ints) -> list[Any]:
        """Return what is known of some of the files."""
        return [self.paths.piece(rows), self.sizes[places], self.mtimes[places]]

    def will_need(self, place: int, row: int) -> None:
        """Announce the file of a row."""
        self.root.will_need(self.paths.data(row), int(self.sizes[place]))

    def read(self, read_file: ReadFile, place: int, row: int) -> bytes:
        """Return the image of a row. Raises Rejected, SourceChangedError."""
        size, mtime = int(self.sizes[place]), int(self.mtimes[place])
        return check_image(read_file(self.paths.data(row), size, mtime))


@dataclass
class _Chosen:
    """The columns of a table by what they are taken for."""

    paths: str | None
    theirs: dict[str, str] = field(default_factory=dict)  # columns of fields but the image
    fields: dict[str, Column] = field(default_factory=dict)  # the same, as columns
    classes: tuple[str, ...] | None = None  # names of the numbers that `label` became
    keys: list[bytes] | None = None  # a key for each row; None: paths, or numbers
    notes: list[str] = field(default_factory=list)


def is_listing(path: bytes) -> bool:
    """Tell whether a file is one, by its name; Parquet with binary data is a dataset instead.

    Raises SourceError for a compressed listing; DamageError, DependencyError.
    """
    found = ending(path)
    if found is None or not os.path.isfile(path):
        return False
    if found == ".json":
        return first_sign(path) == b"["
    return found not in (".parquet", ".pq") or not holds_bytes(path)


def list_records(request: SourceRequest) -> Listings:
    """List the records of a listing. Raises SourceError, OptionError, DamageError."""
    with plain_file(request.path, request) as file:
        table = read_table(file)
    if not table.rows:
        raise SourceError(f"{request.shown}: there are no rows in it")
    chosen = _choose(table, request)
    label = chosen.fields.get("label")
    if label is not None and label.kind == "str" and _has_some(label):
        chosen.fields["label"], chosen.classes = number_classes(label)
    rows = np.arange(table.rows)
    if request.where is not None:
        rows = _selected(table, chosen, request)
    if chosen.paths is None:
        listing = _of_rows(rows, chosen, request)
    else:
        listing = _of_files(table.columns[chosen.paths], rows, chosen, request)
    if request.where is None or "split" not in request.where:
        listing.notes.extend(_splits(table, rows))
    return {"": listing}


def reopen(request: SourceRequest, split: str, described: Plain, piece: Plain) -> Rows:
    """Open a piece of a listing."""
    return Rows(*rows_of(piece, root_of(request) if "files" in piece else None))


def rows_of(
    piece: Plain, root: SourceFolder | None, field: str = "image"
) -> tuple[dict[str, Column], Ints, list[bytes], Files | None]:
    """Return what `Rows` takes. root: of the files that rows name, which are this field."""
    columns = {name: Column(*column) for name, column in piece["fields"].items()}
    files = None
    if root is not None:
        paths, sizes, mtimes = piece["files"]
        files = Files(root, Column(*paths), sizes, mtimes, field)
    return columns, np.arange(len(piece["keys"])), piece["keys"], files


# --- what columns are -----------------------------------------------------------------------------


def _choose(table: Table, request: SourceRequest) -> _Chosen:
    """Decide what the columns are, by their names. Raises OptionError, SourceError."""
    columns, asked = table.columns, request.fields
    _check_asked(columns, request)
    free = {name: column for name, column in columns.items() if name not in asked.values()}
    chosen = _Chosen(_choose_paths(columns, free, request))
    key = _choose_key(table, chosen, request) if chosen.paths is None else None
    labels = [name for name, column in free.items() if column.kind in ("int", "float", "str")]
    labels = [name for name in labels if name != chosen.paths]
    label = asked.get("label") or known_label(LABELS, labels, columns)
    left_out = []
    for theirs in columns:
        ours = [n for n, source in asked.items() if source == theirs and n not in ("image", KEY)]
        if not ours and theirs not in (chosen.paths, key, *asked.values()):
            ours = ["label" if theirs == label else theirs]
        left_out += [theirs for name in ours if not _add_field(chosen, name, theirs)]
    if left_out:
        chosen.notes.append(
            "columns whose names no field can have were left out: "
            + some_of([f"'{printable(name, 40)}'" for name in left_out])
        )
    if "label" in chosen.theirs:  # the first after the image
        chosen.theirs = {"label": chosen.theirs["label"]} | chosen.theirs
    chosen.fields = {name: columns[theirs] for name, theirs in chosen.theirs.items()}
    return chosen


def _choose_paths(
    columns: Mapping[str, Column], free: Mapping[str, Column], request: SourceRequest
) -> str | None:
    """Return the column of paths, if there is one. Raises OptionError.

    free: the columns that no option names.
    """
    paths = request.fields.get("image") or known(
        PATHS, [name for name, column in free.items() if column.kind == "str" and _has_some(column)]
    )
    if paths is None and request.root is not None:
        raise OptionError(
            f"--root: {request.shown} has no column of paths, of a name such as path or "
            f"filename; name it by --fields image=NAME. There are {some_of(columns)}"
        )
    if paths is not None and KEY in request.fields:
        raise OptionError(
            f"--fields {KEY}={printable(request.fields[KEY])}: records that are files, by column "
            f"{printable(paths)!r}, have their paths as keys"
        )
    return paths


def _add_field(chosen: _Chosen, name: str, theirs: str) -> bool:
    """Make a column a field; return False if no field can have the name. Raises OptionError."""
    if name == KEY or not nameable(name):
        return False
    if name in chosen.theirs or (name == "image" and chosen.paths is not None):
        raise OptionError(
            f"two fields would be called {name!r}: columns {printable(theirs)!r} and "
            f"{printable(chosen.theirs.get(name, chosen.paths or ''))!r}; name both of them by "
            "--fields"
        )
    chosen.theirs[name] = theirs
    return True


def _check_asked(columns: Mapping[str, Column], request: SourceRequest) -> None:
    """Raise OptionError for `--fields` that name no column, or no field."""
    check_known_fields(request.fields, columns)
    for name, theirs in request.fields.items():
        option = f"--fields {printable(name)}={printable(theirs)}"
        if not nameable(name):
            raise OptionError(f"{option}: no field can be called so")
        if name == "image" and columns[theirs].kind != "str":
            raise OptionError(
                f"{option}: expected a column of paths, and its values are of kind "
                f"{columns[theirs].kind}"
            )


def _choose_key(table: Table, chosen: _Chosen, request: SourceRequest) -> str | None:
    """Take keys from a column, if one has them; return it, if it is nothing but keys."""
    asked = request.fields.get(KEY)
    there = [asked] if asked is not None else [name for name in _KEYS if name in table.columns]
    for name in there:
        keys, why = _keys_of(table.columns[name])
        if keys is not None:
            chosen.keys = keys
            if name not in _KEYS[:2]:
                chosen.notes.append(f"keys are the values of {printable(name)!r}")
            return name if asked is not None or name in _KEYS[:2] else None
        if asked is not None:
            raise SourceError(
                f"{request.shown}: column {printable(name)!r} cannot be the keys: {why}"
            )
        chosen.notes.append(
            f"keys are the numbers of rows, and not the values of {printable(name)!r}: {why}"
        )
    return None


def _keys_of(column: Column) -> tuple[list[bytes] | None, str]:
    """Return the values of a column as keys; or why they are none."""
    if column.kind not in ("int", "str", "bytes"):
        return None, f"they are of kind {column.kind}"
    keys = []
    for row, value in enumerate(column.raw(np.arange(len(column)))):
        if value is None:
            return None, f"row {row} has none"
        key = b"%d" % value if column.ends is None else bytes(value)
        if (wrong := check_key(key)) is not None:
            return None, f"row {row}: {wrong}"
        keys.append(key)
    for one, other in pairwise(bytewise(keys)):
        if keys[one] == keys[other]:
            return None, f"rows {one} and {other} both have {printable(keys[one])!r}"
    return keys, ""


def number_classes(column: Column) -> tuple[Column, tuple[str, ...]]:
    """Make text numbers of classes; return their names, too, in bytewise order."""
    rows = np.arange(len(column))
    seen: dict[bytes, int] = {}
    texts = column.raw(rows)
    found = (-1 if t is None else seen.setdefault(bytes(t), len(seen)) for t in texts)
    codes = np.fromiter(found, np.int64, len(column))
    names = sorted(seen)
    number = np.zeros(len(names) + 1, np.int64)  # at -1: what None is
    number[[seen[name] for name in names]] = np.arange(len(names))
    return Column("int", number[codes], None, codes < 0), tuple(name.decode() for name in names)


def _selected(table: Table, chosen: _Chosen, request: SourceRequest) -> Ints:
    """Return the rows that are asked for, by the columns as fields or by their own names."""
    assert request.where is not None
    there = {**table.columns, **chosen.fields}

    def column(name: str) -> Any:
        found = there.get(name)
        if found is None:
            raise OptionError(
                f"where: no column is called {printable(name)!r}; {there_are(there, name)}"
            )
        if found.kind not in ("int", "float", "bool", "str"):
            raise OptionError(
                f"where: {printable(name)!r} is of kind {found.kind}; rows are selected by "
                "numbers, booleans and text"
            )
        return found.array()

    return request.select(column, table.rows, chosen.classes)


def _splits(table: Table, rows: Ints) -> list[str]:
    """Return a note, where records of several splits are packed as one dataset."""
    column = table.columns.get("split")
    if column is None or column.kind != "str":
        return []
    found = sorted({value for value in column.decoded(rows) if value is not None})
    if len(found) < 2:
        return []
    return [
        f"column 'split' has {some_of(found)}, packed as one dataset; --where split={found[0]} "
        "selects"
    ]


# --- records --------------------------------------------------------------------------------------


def _of_rows(rows: Ints, chosen: _Chosen, request: SourceRequest) -> Listing:
    """List each row as a record."""
    if chosen.keys is None:
        keys = [b"%08d" % row for piece in pieces(rows) for row in piece.tolist()]
    else:
        keys = chosen.keys
        if len(rows) < len(keys):
            keys = [keys[row] for row in rows.tolist()]
        order = bytewise(keys)
        keys, rows = [keys[i] for i in order], rows[order]
    sizes = np.zeros(len(rows), np.int64)
    for column in chosen.fields.values():
        size = column.sizes()
        sizes += size if column.ends is None else size[rows]
    return _listing(rows, keys, None, sizes, chosen, request)


def _of_files(paths: Column, rows: Ints, chosen: _Chosen, request: SourceRequest) -> Listing:
    """List each file that a row names as a record."""
    root = root_of(request)
    keys, kept, problems, paths = _named(paths, rows, request)
    order = bytewise(keys)
    try:
        good, sizes, mtimes, unfit = look_at(
            root, order, lambda i: paths.data(kept[i]), lambda i, size: check_key(keys[i])
        )
    except OSError as error:
        raise OptionError(
            f"{printable(root.path)}: paths are relative to this folder, and it cannot be opened: "
            f"{error.strerror}; --root names another"
        ) from None
    problems += [(keys[i] or paths.data(kept[i]), why) for i, why in unfit]
    if keys and sum(why == MISSING for _, why in unfit) == len(keys):
        raise SourceError(_nothing_there(problems, root, chosen, request))
    found = [keys[i] for i in good.tolist()]
    kept_rows = np.array(kept, np.int64)[good]
    numbered = _unique(found)
    if numbered:
        chosen.notes.append(
            f"{numbered:,} rows have a key that a row before has, such as files that are named "
            "twice; theirs end in #2, #3, ..."
        )
        again = sorted(range(len(found)), key=found.__getitem__)
        found, kept_rows = [found[i] for i in again], kept_rows[again]
        sizes, mtimes = sizes[again], mtimes[again]
    chosen.notes.extend(unicode_duplicates(found))
    files = Files(root, paths, sizes, mtimes)
    listing = _listing(kept_rows, found, files, sizes, chosen, request, problems)
    listing.check_some(request.shown)
    return listing


def look_at(
    root: SourceFolder,
    numbers: Sequence[int],
    path: Callable[[int], bytes],
    refuse: Callable[[int, int], str | None],
) -> tuple[Ints, Ints, Ints, list[tuple[int, str]]]:
    """Return the numbers of files that can be packed, their sizes and times; and of the others.

    refuse: says by number and size of a file that is there why it cannot be packed. Raises OSError.
    """
    good, sizes, mtimes = array("q"), array("q"), array("q")
    unfit = []
    seen = root.look(map(path, numbers))
    for number, (size, mtime, why) in zip(numbers, seen, strict=True):
        if (why := why or refuse(number, size)) is None:
            good.append(number)
            sizes.append(size)
            mtimes.append(mtime)
        else:
            unfit.append((number, why))
    found, sized, timed = (np.array(column, np.int64) for column in (good, sizes, mtimes))
    return found, sized, timed, unfit


def _named(
    paths: Column, rows: Ints, request: SourceRequest
) -> tuple[list[bytes], array[int], list[Problem], Column]:
    """Return keys, and their rows; the rows without a path; and the paths as they are opened."""
    keys: list[bytes] = []
    kept = array("q")
    problems: list[Problem] = []
    others: dict[int, bytes] = {}  # paths of rows that have URLs
    for row, text in zip(rows.tolist(), paths.raw(rows), strict=True):
        if not text:
            problems.append((b"row %d" % row, "no path"))
            continue
        try:
            path, key = _resolved(bytes(text))
        except ValueError as error:
            raise SourceError(f"{request.shown}: row {row}: {error}") from None
        keys.append(key)
        kept.append(row)
        if path != text:
            others[row] = path
    if others:
        values = enumerate(paths.raw(np.arange(len(paths))))
        paths = packed_column("bytes", [others.get(row, text) for row, text in values])
    return keys, kept, problems, paths


def _listing(
    rows: Ints,
    keys: list[bytes],
    files: Files | None,
    sizes: Ints,
    chosen: _Chosen,
    request: SourceRequest,
    problems: Sequence[Problem] = (),
) -> Listing:
    fields, theirs = chosen.fields, chosen.theirs
    kinds = {name: column.kind for name, column in fields.items()}
    root, mtimes = os.path.dirname(os.path.abspath(request.path)), np.zeros(len(rows), np.int64)
    if files is not None:
        root, mtimes = files.root.path, files.mtimes
        kinds, theirs = {"image": "image"} | kinds, {"image": chosen.paths or ""} | theirs
    seal = hashlib.sha256()
    seal_columns(seal, fields, rows)
    return Listing(
        root=root,
        keys=keys,
        sizes=sizes,
        mtimes=mtimes,
        source=Rows(fields, rows, keys, files),
        fields=tuple(kinds.items()),
        classes=chosen.classes,
        problems=sorted(problems),
        notes=chosen.notes,
        options={"values": seal.hexdigest()[:32], **renamed(theirs)},
    )


def _resolved(text: bytes) -> tuple[bytes, bytes]:
    """Return a path as it is opened, and as a key. Raises ValueError for URLs of other places."""
    if text[0] not in b"./" and b"/." not in text and b"//" not in text and text[-1:] != b"/":
        return text, text  # most are so, and this takes a tenth of what follows
    url = _URL.match(text)
    if url is not None:
        if url[1].lower() != b"file" or url[2] not in (b"", b"localhost"):
            raise ValueError(
                f"{printable(text)}: expected a path, and this is a URL. Give paths relative to "
                "the URL of their folder, and that as --root, or download the files"
            )
        text = unquote_to_bytes(text[url.end() :])
    parts = os.path.normpath(text).split(b"/") if text else []
    return text, b"/".join(part for part in parts if part not in (b"", b".", b".."))


def _unique(keys: list[bytes]) -> int:
    """Number keys, in bytewise order, that are there again; return how many these are."""
    taken = set(keys)
    again = len(keys) - len(taken)
    before, times = b"", 1
    for i, key in enumerate(keys):
        if key != before:
            before, times = key, 1
            continue
        while key in taken:
            times += 1
            key = b"%s#%d" % (before, times)
        taken.add(key)
        keys[i] = key
    return again


def _nothing_there(
    problems: list[Problem], root: SourceFolder, chosen: _Chosen, request: SourceRequest
) -> str:
    first = next(key for key, why in problems if why == MISSING)
    column = chosen.paths or ""
    other = ""
    if "image" not in request.fields:
        other = (
            f". If column {printable(column)!r} names no images, --fields "
            f"{printable(column)}={printable(column)} makes a field of it, as of others"
        )
    return (
        f"{request.shown}: none of the files in column {printable(column)!r} is there, such as "
        f"{printable(first)}, in {printable(root.path)}{some_folders(root)}; --root says where "
        f"they are{other}"
    )


def _has_some(column: Column) -> bool:
    return column.missing is None or not column.missing.all()
