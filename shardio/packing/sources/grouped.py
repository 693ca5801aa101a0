"""Files that differ only in their endings: `a.jpg a.txt a.json` of one folder are one record.

A key is a file's path below the folder, up to the first dot of the file's name; behind that, in
lower case, is the field, as webdataset names the members of its tars, whose decoders are used too
(formats/foreign/webdataset.py): `cat/7.seg.png` is the field `seg.png` of `cat/7`. Which kind a
field is, its ending says. Nothing is opened while the folder is listed.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ...errors import OptionError, SourceError, printable
from ...formats.foreign.webdataset import field_of
from ...formats.sample import MAX_FIELDS, Sample
from ...images.filetype import ALL_ENDINGS
from ...names import KEY
from ...order import rng
from .base import (
    Ints,
    Listing,
    Listings,
    Plain,
    ReadFile,
    Rejected,
    SourceFolder,
    SourceRequest,
    Walked,
    renamed,
    some_of,
)
from .field_names import nameable, our_names
from .files import (
    MAX_FILE,
    FileSource,
    check_image,
    folder_of,
    folder_of_split,
    not_images,
    note_top,
    split_folders,
    unicode_duplicates,
)

Decode = Callable[[bytes], Any]

# What the last part of an ending says of a field; all else is bytes.
_KINDS = {
    **dict.fromkeys(ALL_ENDINGS, "image"),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), "int"),
    **dict.fromkeys(("txt", "text", "transcript", "caption"), "str"),
    **dict.fromkeys(("json", "jsn"), "json"),
    "npy": "array",
}
_IMAGE = "image"  # the field of all plain endings of images, where no record has two of them


class Members(FileSource):
    """The records of a listing, each of several files."""

    def __init__(self, root: SourceFolder, files: Columns, names: Sequence[str]) -> None:
        """names: of the fields, one an ending."""
        super().__init__(root)
        self._records, self._names = files, names
        self._none: Sample = dict.fromkeys(names)
        self._decoders = [decoder(ending) for ending in files.endings]

    def describe(self) -> Plain:
        """Return the endings, and the fields that they are."""
        return super().describe() | {"endings": self._records.endings, "names": self._names}

    def piece(self, places: Ints) -> Plain:
        """Return the files of each record."""
        files = self._records
        starts, counts = files.starts[places], np.diff(files.starts)[places]
        ends = np.cumsum(counts)
        at = np.arange(counts.sum()) + np.repeat(starts - (ends - counts), counts)
        return {
            "keys": [files.keys[place] for place in places.tolist()],
            "starts": np.append(0, ends),
            "which": files.which[at],
            "sizes": files.sizes[at],
            "mtimes": files.mtimes[at],
        }

    def _files(self, place: int) -> Iterator[tuple[bytes, int, int]]:
        files = self._records
        for at in range(int(files.starts[place]), int(files.starts[place + 1])):
            yield files.path(place, at), int(files.sizes[at]), int(files.mtimes[at])

    def _read(self, read: ReadFile, place: int) -> Sample:
        sample = {KEY: self._records.keys[place], **self._none}
        for at, file in enumerate(self._files(place), int(self._records.starts[place])):
            which = int(self._records.which[at])
            sample[self._names[which]] = read_field(read, *file, self._decoders[which])
        return sample


@dataclass
class Columns:
    """The files of records. Columns have an entry a file, those of one record adjacent.

    `keys`: of records; files [starts[i]:starts[i + 1]] are those of record i.
    `which`: the place of a file's ending in `endings`, as they are written.
    """

    keys: list[bytes]
    endings: list[bytes]
    starts: Ints
    which: Any
    sizes: Ints
    mtimes: Ints

    def path(self, place: int, at: int) -> bytes:
        """Return the path of a file, by its record's place and its own."""
        return self.keys[place] + b"." + self.endings[int(self.which[at])]


class Files(Columns):
    """The files below one folder; `keys` are in bytewise order, `fields` one an ending."""

    def __init__(self, found: Walked) -> None:
        paths, sizes, mtimes, problems, *_ = found
        places: dict[bytes, int] = {}  # of records, as they come
        ids: dict[bytes, int] = {}  # of endings, as they come
        record, which = np.empty(len(paths), np.int64), np.empty(len(paths), np.int32)
        for i, path in enumerate(paths):
            key, ending = _split(path)
            record[i] = places.setdefault(key, len(places))
            which[i] = ids.setdefault(ending, len(ids))
        keys, rank = _ordered(places)
        endings, by_ending = _ordered(ids)
        record, which = rank[record], by_ending[which].astype(np.int32)
        packed = np.lexsort((which, record))
        starts = np.searchsorted(record[packed], np.arange(len(keys) + 1))
        starts = starts.astype(np.int64, copy=False)
        super().__init__(keys, endings, starts, which[packed], sizes[packed], mtimes[packed])
        self.fields = [_field(ending)[0] for ending in self.endings]
        self.problems = problems
        self._check()

    def count(self, fields: Collection[str]) -> Ints:
        """Return (records,) how many files of each record are one of these fields."""
        fitting = np.array([field in fields for field in self.fields], np.int64)
        return self._sum(fitting[self.which])

    def totals(self) -> Ints:
        """Return (records,) the bytes of all files of each record."""
        return self._sum(self.sizes)

    def changes(self) -> Ints:
        """Return (records,) numbers that change when the time or the size of a file does."""
        words = self.mtimes.view(np.uint64)
        for other in (self.sizes, self.which.astype(np.int64)):
            words = rng.splitmix64(words + np.uint64(rng.GAMMA)) ^ other.view(np.uint64)
        return self._sum(rng.splitmix64(words).view(np.int64))  # modulo 2**64

    def digest(self) -> str:
        """Return 32 hex digits of which files each record has."""
        seal = hashlib.sha256(b"\0".join(self.endings))
        seal.update(self.which.astype("<i4").tobytes())
        seal.update(self.starts.astype("<i8").tobytes())
        return seal.hexdigest()[:32]

    def _sum(self, column: Ints) -> Ints:
        if not self.keys:  # which reduceat refuses
            return column[:0]
        sums: Ints = np.add.reduceat(column, self.starts[:-1])
        return sums

    def _check(self) -> None:
        """Leave out what cannot be packed: it goes to `problems`.

        A record of which one file cannot be packed is left out as a whole.
        """
        record = np.repeat(np.arange(len(self.keys)), np.diff(self.starts))
        bad = {key for key, ending in map(_split, dict(self.problems)) if ending}

        def reject(at: int, why: str) -> None:
            key, ending = self.keys[record[at]], self.endings[self.which[at]]
            self.problems.append((key + b"." + ending if ending else key, why))
            if ending:
                bad.add(key)

        whys = [_field(ending)[1] for ending in self.endings]
        kinds = [_KINDS.get(_last(ending)) for ending in self.endings]
        good = np.array([why is None for why in whys], np.bool_)[self.which]
        for at in np.flatnonzero(~good).tolist():
            reject(at, whys[self.which[at]] or "")
        full = np.array([kind not in ("str", None) for kind in kinds], np.bool_)[self.which]
        for at in np.flatnonzero(good & full & (self.sizes == 0)).tolist():
            reject(at, "is empty")
        numbers = {name: i for i, name in enumerate(dict.fromkeys(self.fields))}
        field = np.array([numbers[name] for name in self.fields], np.int64)[self.which]
        files = np.flatnonzero(good)
        files = files[np.lexsort((field[files], record[files]))]  # stable: by ending within those
        one, two = files[:-1], files[1:]
        alike = (record[one] == record[two]) & (field[one] == field[two])
        for first, at in zip(one[alike].tolist(), two[alike].tolist(), strict=True):
            other = printable(self.endings[self.which[first]])
            reject(at, f"is the field {self.fields[self.which[at]]!r}, as is the file .{other}")
        for place in np.flatnonzero(self.totals() > MAX_FILE).tolist():
            self.problems.append(
                (self.keys[place], f"has over {MAX_FILE:,} bytes in all its files")
            )
            bad.add(self.keys[place])
        if bad:
            good &= ~np.array([key in bad for key in self.keys], np.bool_)[record]
        if not good.all():
            self._keep(good, record)

    def _keep(self, good: Any, record: Ints) -> None:
        """Forget the other files, and records and endings that have none then."""
        places, starts = np.unique(record[good], return_index=True)
        ids, which = np.unique(self.which[good], return_inverse=True)
        self.keys = [self.keys[i] for i in places.tolist()]
        self.starts = np.append(starts, int(good.sum()))
        self.endings = [self.endings[i] for i in ids.tolist()]
        self.fields = [self.fields[i] for i in ids.tolist()]
        self.which = which.astype(np.int32).reshape(-1)
        self.sizes, self.mtimes = self.sizes[good], self.mtimes[good]


def list_records(request: SourceRequest) -> Listings:
    """List files that are grouped by name, by split. Raises SourceError, OptionError."""
    request.refuse_where_and_root("files grouped by name")
    folder = folder_of(request)
    shown = printable(request.path) if request.files is None else request.shown
    inside = folder.top()
    roots = split_folders(folder, shown, inside, request.splits)
    walks, found = {}, {}
    for name, root in roots.items():
        walked = root.walk(empty=True)
        found[name] = Files(walked)
        walks[name] = walked
    plain = _merge(list(found.values()), request)
    named = _named({name for files in found.values() for name in files.fields}, request)
    listings = {}
    for name, files in found.items():
        listing = listings[name] = _listing(roots[name], files, named, plain, walks[name])
        listing.check_some(request.show(name), "files")
    if list(listings) != [""]:
        note_top(listings, folder, inside)
    return listings


def reopen(request: SourceRequest, split: str, described: Plain, piece: Plain) -> Members:
    """Open a piece of files that are grouped by name."""
    columns = Columns(endings=described["endings"], **piece)
    return Members(folder_of_split(request, split), columns, described["names"])


def lies_there(
    folder: SourceFolder, files: Sequence[bytes], others: Sequence[bytes], splits: Sequence[bytes]
) -> bool:
    """Tell whether images have files of the same name beside them, and lie in no class folders.

    files: names of what lies in the folder and is no folder; others: those that are not plainly of
    images. splits: of folders in it, each of which is looked at in place of it.
    """
    if not splits:
        return _are_beside(files, others)
    for name in splits:
        with contextlib.suppress(SourceError):  # whoever lists it says so
            _, there, *_ = folder.below(name).top()
            if _are_beside(there, not_images(there)):
                return True
    return False


def check_told(found: Mapping[str, Listing], shown: str) -> None:
    """Raise OptionError where class folders might as well hold records of several files."""
    images = beside = 0
    example = b""
    for listing in found.values():
        if listing.classes is None:  # without class folders, `lies_there` could tell
            continue
        known = {_split(key)[0]: key for key in not_images(listing.keys) if _is_beside(key)}
        if not known:  # nearly always
            images += len(listing.keys)
            continue
        for key in listing.keys:
            if kind_of(key) == "image":
                images += 1
                if (other := known.get(_split(key)[0])) is not None:
                    beside += 1
                    example = example or key + b" and " + other
    if beside and 2 * beside >= images:
        raise OptionError(
            f"{shown}: {beside:,} of {images:,} images in its class folders have files beside them "
            f"that differ only in their endings, such as {printable(example)}. So it cannot be "
            "told what a record is; say which:\n"
            "  --from imagefolder  one image, labelled by its folder; other files are problems\n"
            "  --from files        all files of one name; labels come from .cls files only"
        )


# --- names ----------------------------------------------------------------------------------------


def _split(path: bytes) -> tuple[bytes, bytes]:
    """Return key and ending of a file; the ending is empty where there is none."""
    dot = path.find(b".", path.rfind(b"/") + 1)
    return (path, b"") if dot < 0 else (path[:dot], path[dot + 1 :])


def _last(ending: bytes) -> str:
    """Return the last part of an ending, in lower case."""
    return ending.rpartition(b".")[2].decode("latin-1").lower()


def kind_of(path: bytes) -> str | None:
    """Return the kind of field that a file is by its last ending; None where that says none."""
    return _KINDS.get(_last(path)) if b"." in path else None


def _is_beside(path: bytes) -> bool:
    """Tell whether a file is of a kind that is known, and no image."""
    return kind_of(path) not in (None, "image")


def _are_beside(names: Sequence[bytes], others: Sequence[bytes]) -> bool:
    """Tell whether an image and another known file of these differ only in their endings."""
    known = {_split(name)[0]: name for name in others if name[:1] != b"." and _is_beside(name)}
    if not known:
        return False
    return any(kind_of(name) == "image" and _split(name)[0] in known for name in names)


@lru_cache(maxsize=4096)
def _field(ending: bytes) -> tuple[str, str | None]:
    """Return the field of an ending, and why it cannot be one."""
    if not ending:
        return "", "has no ending, so it is no field of a record"
    try:
        field = field_of(ending)[0]
    except ValueError as error:
        return "", str(error)
    if not nameable(field):
        return field, "its ending cannot be the name of a field"
    return field, None


def decoder(ending: bytes) -> Decode:
    """Return what makes a field's value of a file's bytes; it raises ValueError, Rejected."""
    kind = _KINDS.get(_last(ending))
    if kind == "image":
        return check_image
    if kind == "array":
        return _array
    decode = None if kind is None else field_of(b"txt" if kind == "str" else ending)[1]
    return bytes if decode is None else decode


def _array(data: bytes) -> Any:
    decode = field_of(b"npy")[1]
    assert decode is not None
    value = decode(data)
    if not isinstance(value, np.ndarray):
        raise Rejected("its array is of objects, or of parts with names; expected plain numbers")
    return value


def read_field(read: ReadFile, path: bytes, size: int, mtime: int, decode: Decode) -> Any:
    """Return the value of a field that is a file. Raises Rejected, SourceChangedError."""
    try:
        return decode(read(path, size, mtime))
    except (Rejected, ValueError) as error:
        why = str(error)
        if isinstance(error, UnicodeDecodeError):
            why = f"byte {error.start}: expected UTF-8, found {error.object[error.start]:#04x}"
        raise Rejected(f"{printable(path)}: {why}") from None


# --- listing --------------------------------------------------------------------------------------


def _ordered(places: Mapping[bytes, int]) -> tuple[list[bytes], Ints]:
    """Return names in bytewise order, and the place that each has there, by the place it had."""
    names = list(places)
    by_name = sorted(range(len(names)), key=names.__getitem__)
    rank = np.empty(len(names), np.int64)
    rank[by_name] = np.arange(len(names))
    return [names[i] for i in by_name], rank


def _merge(found: Sequence[Files], request: SourceRequest) -> set[str]:
    """Call all plain endings of images one field, where that loses none; these endings, or none."""
    plain = {name for files in found for name in files.fields if name in ALL_ENDINGS}
    if (
        plain & set(request.fields.values())
        or any(_IMAGE in files.fields for files in found)
        or any(bool((files.count(plain) > 1).any()) for files in found)
    ):
        return set()
    for files in found:
        files.fields = [_IMAGE if name in plain else name for name in files.fields]
    return plain


def _named(theirs: set[str], request: SourceRequest) -> dict[str, str]:
    """Return our name of each field. Raises OptionError, SourceError."""
    if len(theirs) >= MAX_FIELDS:
        raise SourceError(
            f"{request.shown}: its files have {len(theirs):,} different endings, and a record has "
            f"at most {MAX_FIELDS - 1:,} fields. Endings begin at the first dot of a name: "
            f"{some_of(sorted(theirs))}"
        )
    asked = dict(request.fields)
    if "cls" in theirs - set(asked.values()) and "label" not in theirs | asked.keys():
        asked["label"] = "cls"
    return our_names(asked, sorted(theirs))


def _listing(
    root: SourceFolder, files: Files, named: Mapping[str, str], plain: set[str], walked: Walked
) -> Listing:
    """plain: the endings that are the field `image` together."""
    theirs = {named[source]: source for source in sorted(set(files.fields))}
    first = [name for name in ("image", "label") if name in theirs]
    theirs = {name: theirs[name] for name in dict.fromkeys((*first, *theirs))}
    kinds = dict(zip(files.fields, map(_KINDS.get, map(_last, files.endings)), strict=True))
    fields = tuple((name, kinds[source] or "bytes") for name, source in theirs.items())
    if plain:
        here = "/".join(sorted({_field(ending)[0] for ending in files.endings} & plain))
        theirs = {name: here if s == _IMAGE else s for name, s in theirs.items()}
    return Listing(
        root=root.path,
        keys=files.keys,
        sizes=files.totals(),
        mtimes=files.changes(),
        source=Members(root, files, [named[field] for field in files.fields]),
        fields=fields,
        classes=None,
        problems=sorted(files.problems),
        ignored=walked.ignored,
        notes=[*walked.notes, *_notes(files, plain), *unicode_duplicates(files.keys)],
        options={"members": files.digest(), **renamed(theirs)},
    )


def _notes(files: Files, plain: set[str]) -> Iterator[str]:
    images = {_IMAGE} if plain else set(files.fields) & ALL_ENDINGS
    counts = files.count(images)
    if (counts > 1).any():
        yield (
            f"some records have several of {some_of(sorted(images))}, so that each keeps its name; "
            f"--fields image={min(images)} calls one of them image"
        )
    without = np.flatnonzero(counts == 0)
    if images and len(without):
        yield (
            f"{len(without):,} of {len(files.keys):,} records have no image, such as "
            f"{printable(files.keys[without[0]])}"
        )
