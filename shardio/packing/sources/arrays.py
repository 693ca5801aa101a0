"""Arrays that are datasets: entry i of each is record i, and its number is the key.

    mnist.npz: x_train (60000, 28, 28), y_train (60000,)  ->  train: {"image": ..., "label": 5}

A name says of which split an array is, and which field. Pixels are read by range, and packed as
`--encode raw` packs them; numbers are read while listing, into columns. What such files hold of a
record is in no size and no time of change: it is hashed, of images that of some.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from ...errors import OptionError, ShardioError, SourceError, printable, there_are
from ...formats.sample import Sample
from ...images.decode import ppm
from ...names import KEY, key_bytes, key_text
from ..options import read_layout
from .archives.extent import check_same
from .archives.inflate import Inflating
from .array_files import Array, arrays_in, names_array, split_of, stored_in
from .base import (
    Ints,
    Listing,
    Listings,
    Plain,
    Read,
    Source,
    SourceFolder,
    SourceRequest,
    renamed,
    some_of,
)
from .field_names import LABELS, check_known_fields, known, nameable
from .files import DiskFolder, changed, folder_of, not_images
from .tables import Column, packed_column, seal_columns

_IMAGES = ("image", "images", "img", "imgs", "x", "data", "pixels")
_LABELS = (*LABELS, "targets")
_KINDS = {"b": "bool", "i": "int", "u": "int", "f": "float"}  # by numpy's kinds
_RECORDS = re.compile(rb"(?i)\.(bin|dat)(\.gz)?\Z")
_CLASSES = re.compile(rb"(?i)(name|class|label|meta)[^/]*\.txt\Z")
_HASHED = 64  # images
_DEEP = 8  # folders, each alone in the one before
_LOOKED = 3  # files that are looked at for what is not read

Found = dict[str, dict[str, list[Array]]]  # by split and name; of records there is one for a file


@dataclass(frozen=True)
class Ranged:
    """A field whose values are read by range, from one array or from several in turn."""

    name: str
    order: str  # axes of an image: hw, hwc, chw; "": an array
    arrays: list[Array]  # as they are read
    identities: list[list[Any]]  # their names, and those of what they are stored in

    @cached_property
    def _ends(self) -> list[int]:
        return [*accumulate(one.count for one in self.arrays)]

    def read(self, files: Sequence[Any], row: int) -> Any:
        """Return the value of a row. files: those of the arrays, open."""
        at = bisect_right(self._ends, row)
        one = self.arrays[at]
        row -= self._ends[at] - one.count
        place = one.stored.extent.start + one.start + row * one.stride
        value = np.frombuffer(files[at].read(place, one.entry_bytes), one.dtype).reshape(one.shape)
        if not self.order:
            return value
        if self.order == "hw":
            value = value[:, :, None]
        elif self.order == "chw":
            value = value.transpose(1, 2, 0)
        return ppm(value if value.shape[2] == 3 else value.repeat(3, axis=2))


class Arrays(Source):
    """The records of a listing. Columns have an entry a record, which is a row of the arrays."""

    def __init__(
        self,
        ranged: Sequence[Ranged],
        columns: Mapping[str, Column],
        rows: Ints,
        layout: str | None,
    ) -> None:
        self._ranged, self._columns, self._rows = ranged, columns, rows
        self._layout = layout

    def describe(self) -> Plain:
        """Return which arrays are read, and of which files."""
        ranged = [[one.name, one.order, one.identities] for one in self._ranged]
        return {"ranged": ranged, "layout": self._layout}

    def piece(self, places: Ints) -> Plain:
        """Return the numbers of rows, and the values of columns."""
        columns = {name: column.piece(places) for name, column in self._columns.items()}
        return {"rows": self._rows[places], "columns": columns}

    def values(self, name: str) -> Any:
        """Return the values of a field that is a column. Raises OptionError where it is none."""
        if name not in self._columns:
            raise OptionError(
                f"where: {printable(name)!r}: arrays are selected by those of one number a record; "
                f"{there_are(self._columns, name)}"
            )
        return self._columns[name].array()

    @contextlib.contextmanager
    def open(self) -> Iterator[Read]:
        """Open the files; they must be as they were listed, also at the end."""
        with contextlib.ExitStack() as stack:
            files = [[_opened(one, stack) for one in field.arrays] for field in self._ranged]

            def read(place: int) -> Sample:
                row = int(self._rows[place])
                sample: Sample = {KEY: b"%08d" % row}
                for field, of_field in zip(self._ranged, files, strict=True):
                    sample[field.name] = field.read(of_field, row)
                for name, column in self._columns.items():
                    sample[name] = column.get(place)
                return sample

            yield read
            for field, of_field in zip(self._ranged, files, strict=True):
                for one, file in zip(field.arrays, of_field, strict=True):
                    check_same(file, one.stored.extent, key_bytes(one.stored.path))


def _opened(array: Array, stack: contextlib.ExitStack) -> Any:
    extent = array.stored.extent
    try:
        file = stack.enter_context(contextlib.closing(extent.location.open(extent.name)))
    except FileNotFoundError:
        raise changed(key_bytes(array.stored.path), "it is gone") from None
    check_same(file, extent, key_bytes(array.stored.path))
    file.scattered()
    return file


# --- where arrays lie -----------------------------------------------------------------------------


def lies_there(request: SourceRequest, folders: Sequence[bytes], files: Sequence[bytes]) -> bool:
    """Tell whether the files of a folder are arrays, one of them of images by its name.

    Raises SourceError for files that hold arrays in a form that is not read, where all are such.
    """
    if len(not_images(files)) < len(files):  # nearly always, or folders
        return False
    folder, names, beside = _unwrapped(folder_of(request))
    if beside or len(not_images(names)) < len(names):
        return False
    if any(names_images(name) or name.lower().endswith(b".npz") for name in names):
        return True
    if not any(map(names_array, names)):
        _refuse(folder, names, request)
    return False


def names_images(path: bytes) -> bool:
    """Tell whether a file is an array of images, by its name."""
    plain = key_text(path).lower()
    name = split_of(re.sub(r"\.npy(\.gz)?\Z", "", plain))[1] or "image"
    return names_array(path) and ("idx3" in plain or known(_IMAGES, [name]) is not None)


def is_array_file(path: bytes) -> bool:
    """Tell whether a file is an array of numpy, or an .npz, by its name; or an idx file."""
    return os.path.isfile(path) and names_array(os.path.basename(path))


def _unwrapped(folder: SourceFolder) -> tuple[SourceFolder, list[bytes], list[bytes]]:
    """Return a folder, or the one that it alone holds; the paths of files in it or in splits.

    Last, the folders whose files are none of these. Raises SourceError, StorageError.
    """
    for _ in range(_DEEP):
        folders, files, *_ = folder.top()
        names = sorted(name for name in files if not folder.ignores(name))
        if names or len(folders) != 1 or split_of(key_text(folders[0]))[0]:
            break
        folder = folder.below(folders[0])
    whole = {split_of(key_text(name)) for name in folders}
    if any(map(names_array, names)) or not all(split and not rest for split, rest in whole):
        return folder, names, sorted(folders)
    beside = []
    for name in sorted(folders):
        inner = folder.below(name)
        within, files, *_ = inner.top()
        names += [name + b"/" + one for one in sorted(files) if not inner.ignores(one)]
        beside += [name + b"/" + one for one in sorted(within)]
    return folder, names, beside


def _files(request: SourceRequest) -> tuple[SourceFolder, list[bytes], list[bytes]]:
    """Return the folder, and the paths of files of arrays in it, and of all else."""
    if request.files is None and not os.path.isdir(request.path):
        if not os.path.isfile(request.path):
            raise SourceError(f"{request.shown}: there is no such file or directory")
        folder, name = os.path.split(os.path.abspath(request.path))
        return DiskFolder(folder), [name], []
    there, names, beside = _unwrapped(folder_of(request))
    wanted = names_array if request.layout is None else _RECORDS.search
    paths = [name for name in names if wanted(name)]
    if not paths:
        _refuse(there, names, request)
        expected = ".npy, .npz or idx files" if request.layout is None else ".bin or .dat files"
        raise SourceError(
            f"{request.shown}: expected {expected}; there are {some_of(names + beside) or 'none'}"
        )
    taken = {*paths}
    paths = [name for name in paths if name.removesuffix(b".gz") not in taken - {name}]
    others = [name for name in names if name not in taken]
    return there, sorted(paths, key=_by_number), others + beside


def _by_number(path: bytes) -> list[Any]:
    """Return what to sort names by, so that a number of them counts as one: batch_2, batch_10."""
    return [int(part) if part.isdigit() else part for part in re.split(rb"(\d+)", path)]


def _find(request: SourceRequest) -> tuple[Found, SourceFolder, list[bytes]]:
    """Return all arrays of a source, by split and name; the folder, and its other files."""
    if request.location.remote:
        raise SourceError(f"{request.shown}: arrays in an object store are not read; copy them")
    folder, paths, others = _files(request)
    layout = None if request.layout is None else read_layout(request.layout)
    found: Found = {}
    for path in paths:
        stored = stored_in(folder, path, inflating_of(request))
        for array in arrays_in(stored, len(paths) == 1, layout):
            found.setdefault(array.split, {}).setdefault(array.name, []).append(array)
    for one in found.values():
        for twice in (arrays for arrays in one.values() if len(arrays) > 1 and layout is None):
            raise SourceError(
                f"{request.shown}: two arrays are called {printable(str(twice[0]))}: in "
                f"{printable(twice[0].stored.path)} and in {printable(twice[1].stored.path)}; move "
                "one away"
            )
    if layout is not None and "" in found and len(found) > 1:
        if "train" in found:
            odd = next(iter(found[""].values()))[0].stored.path
            raise SourceError(
                f"{request.shown}: the name of {printable(odd)} says no split, and others do"
            )
        found["train"] = found.pop("")
    return found, folder, others


def inflating_of(request: SourceRequest) -> Inflating:
    """Return where what is compressed is inflated."""
    return Inflating(request.work_dir, request.progress, request.tell)


def is_unpacked(request: SourceRequest) -> bool:
    """Return whether arrays are compressed, so that packing inflates them into a file of its own.

    Raises SourceError, DamageError, StorageError.
    """
    found = _find(request)[0]
    return any(array.stored.packed is not None for array in _every(found))


def _every(found: Found) -> Iterator[Array]:
    return (array for one in found.values() for arrays in one.values() for array in arrays)


# --- which field an array is ----------------------------------------------------------------------


def split_names(request: SourceRequest) -> list[str]:
    """Return the splits that `list_records` will have. Raises SourceError, OptionError."""
    found = _find(request)[0]
    return [split for split, _ in _with_images(found, request)]


def _with_images(found: Found, request: SourceRequest) -> list[tuple[str, str]]:
    """Return the splits that have images, and the name of the array of these.

    Raises SourceError, OptionError.
    """
    if request.splits is not None:
        raise OptionError("--splits and --no-splits: the names of arrays say of which split it is")
    request.refuse_root("arrays")
    if odd := [name for name in request.fields if name == KEY or not nameable(name)]:
        raise OptionError(
            f"--fields {printable(odd[0])}: no field of arrays can be called so; keys are the "
            "numbers of records"
        )
    check_known_fields(
        request.fields, dict.fromkeys(name for one in found.values() for name in one)
    )
    images = {split: _image_of(one, request) for split, one in sorted(found.items())}
    if len([*_every(found)]) == 1:  # if it holds none, listing it says why
        images = {split: name for split, one in found.items() for name in one}
    chosen = [(split, name) for split, name in images.items() if name is not None]
    if not chosen:
        raise SourceError(
            f"{request.shown}: none of its arrays is known to be of images; --fields "
            f"image=NAME,label=NAME says which. There: {some_of(map(str, _every(found)))}"
        )
    return chosen


def _image_of(arrays: Mapping[str, Sequence[Array]], request: SourceRequest) -> str | None:
    """Return the name of the array of images of one split."""
    if (asked := request.fields.get("image")) is not None:
        return asked if asked in arrays else None
    free = [name for name in arrays if name not in request.fields.values()]
    if (name := known(_IMAGES, free)) is not None:
        return name
    fitting = [name for name in free if not isinstance(_order(arrays[name][0]), SourceError)]
    if len(fitting) > 1:
        raise OptionError(
            f"{request.shown}: several arrays may be the images: {some_of(fitting)}; --fields "
            "image=NAME,label=NAME says which"
        )
    return fitting[0] if fitting else None


def _order(array: Array) -> str | SourceError:
    """Return the axes of an image in an array; or why it holds none."""
    why = array.why
    shape = array.shape
    first, last = (len(shape) == 3 and shape[at] in (1, 3) for at in (0, -1))
    if why is None and array.dtype != np.uint8:
        why = "expected pixels of uint8, 0 to 255; convert them and save them anew"
    if why is None and first and last:
        why = "which axis has the channels cannot be told; save it as (N, H, W, 3)"
    if why is None and len(shape) != 2 and not (first or last):
        why = "expected the shape (N, H, W), (N, H, W, 3) or (N, 3, H, W); reshape it, and save it"
    if why is not None:
        return SourceError(f"{array.stored.extent.shown}: {array}: {why}")
    return "hw" if len(shape) == 2 else "hwc" if last else "chw"


def _count(arrays: Sequence[Array]) -> int:
    return sum(one.count for one in arrays)


def _fields_of(
    arrays: Mapping[str, Sequence[Array]], image: str, request: SourceRequest, notes: list[str]
) -> dict[str, str]:
    """Return the arrays of one split by our names of their fields. Raises SourceError."""
    asked = request.fields
    count = _count(arrays[image])
    rest = [name for name in arrays if name != image and name not in asked.values()]
    label = asked.get("label") or known(_LABELS, rest)
    if label is None:
        ends = [name for name in rest if re.split(r"[-_./ ]", name)[-1].casefold() in _LABELS]
        label = ends[0] if len(ends) == 1 else None
    theirs = {"image": image}
    if label is not None and label in arrays:
        theirs["label"] = label
    theirs |= {name: source for name, source in asked.items() if source in arrays}
    for source in theirs.values():
        if (array := arrays[source][0]).why is not None:
            raise SourceError(f"{array.stored.extent.shown}: {array}: {array.why}")
        if (length := _count(arrays[source])) != count:
            raise SourceError(
                f"{request.shown}: {arrays[image][0]} has {count:,} entries, and {array} has "
                f"{length:,}; expected one for each record"
            )
    left_out = []
    for name in (name for name in rest if name not in theirs.values()):
        array = arrays[name][0]
        fits = array.why is None and _count(arrays[name]) == count and nameable(name)
        if fits and name not in (KEY, *theirs):
            theirs[name] = name
        else:
            left_out.append(f"{array} ({array.why})" if array.why else str(array))
    if left_out:
        notes.append(f"left out, being no field of {count:,} records: {', '.join(left_out[:10])}")
    return theirs


# --- listing --------------------------------------------------------------------------------------


def list_records(request: SourceRequest) -> Listings:
    """List the records of arrays, by split. Raises SourceError, OptionError, DamageError."""
    found, folder, others = _find(request)
    chosen = _with_images(found, request)
    listings = {split: _listing(found[split], image, request) for split, image in chosen}
    for split, listing in listings.items():
        listing.check_some(request.show(split), "records")
    named, classes = _class_names(found, folder, others, listings)
    first = next(iter(listings.values()))
    if unused := [path for path in others if key_text(path) != named]:
        first.notes.append(f"left out, being no arrays: {some_of(unused)}")
    if beside := [split for split in found if split not in listings]:
        arrays = [str(one[0]) for split in beside for one in found[split].values()]
        first.notes.append(f"left out, having no images: {', '.join(arrays[:10])}")
    every = {name for one in listings.values() for name, _ in one.fields}
    for split, listing in listings.items():
        if missing := sorted(every - dict(listing.fields).keys()):
            listing.notes.append(f"there is no {some_of(missing)} for this split, so no such field")
        listing = listings[split] = replace(listing, classes=classes)
        source = listing.source
        if request.where is not None and isinstance(source, Arrays):
            numbers = request.select(source.values, len(listing.keys), classes)
            listings[split] = listing.take(numbers)
    return listings


def _listing(arrays: Mapping[str, list[Array]], image: str, request: SourceRequest) -> Listing:
    """List the records of one split."""
    notes: list[str] = []
    theirs = _fields_of(arrays, image, request, notes)
    count = _count(arrays[image])
    ranged: list[Ranged] = []
    columns: dict[str, Column] = {}
    fields = []
    for name, source in theirs.items():
        first = arrays[source][0]
        order = _order(first) if name == "image" else ""
        if isinstance(order, SourceError):
            raise order
        alone = all(size == 1 for size in first.shape)
        kind = _KINDS.get(first.dtype.kind, "str" if first.dtype.kind in "SU" else None)
        if not order and alone and kind is not None:
            columns[name] = _column(arrays[source], kind)
        else:
            read = [one.unpacked(inflating_of(request)) for one in arrays[source]]
            whose = [[source, *one.stored.identity] for one in arrays[source]]
            ranged.append(Ranged(name, order, read, whose))
            kind = "image" if order else "array"
        fields.append((name, kind or ""))
    source_of_all = Arrays(ranged, columns, np.arange(count), request.layout)
    used = [one.stored.identity for source in theirs.values() for one in arrays[source]]
    stamp = hashlib.blake2b(repr(used).encode(), digest_size=8).digest()
    each = sum(one.arrays[0].entry_bytes for one in ranged)
    return Listing(
        root=os.path.abspath(request.path),
        keys=[b"%08d" % row for row in range(count)],
        sizes=np.full(count, each, np.int64),
        mtimes=np.full(count, int.from_bytes(stamp, "little", signed=True), np.int64),
        source=source_of_all,
        fields=tuple(fields),
        classes=None,
        notes=notes,
        options={"values": _digest(source_of_all, columns, count), **renamed(theirs)},
    )


def _column(arrays: Sequence[Array], kind: str) -> Column:
    """Read an array of one value a record. Raises DamageError, SourceError."""
    values = np.concatenate([one.load().reshape(-1) for one in arrays])
    if kind != "str":
        return Column(kind, values.astype(values.dtype.newbyteorder("=")))
    try:
        texts = [one if isinstance(one, bytes) else one.encode() for one in values.tolist()]
        b"".join(texts).decode()
    except ValueError:
        shown = arrays[0].stored.extent.shown
        raise SourceError(f"{shown}: {arrays[0]}: its text is no Unicode, or not UTF-8") from None
    return packed_column(kind, texts)


def _digest(source: Arrays, columns: Mapping[str, Column], count: int) -> str:
    """Return 32 hex digits of all values of columns, and of what some records have beside them."""
    seal = hashlib.sha256()
    seal_columns(seal, columns, np.arange(count))
    with source.open() as read:
        for row in sorted({i * count // _HASHED for i in range(_HASHED)} if count else ()):
            for name, value in read(row).items():
                if name not in columns and name != KEY:
                    seal.update(value if isinstance(value, bytes) else value.tobytes())
    return seal.hexdigest()[:32]


def _class_names(
    found: Found, folder: SourceFolder, others: Iterable[bytes], listings: Listings
) -> tuple[str, tuple[str, ...] | None]:
    """Return the one text beside the arrays that has a name for each label, and these names."""
    labels = [
        one.source.values("label")
        for one in listings.values()
        if dict(one.fields).get("label") == "int" and isinstance(one.source, Arrays)
    ]
    if not labels or min(int(one.min()) for one in labels) < 0:
        return "", None
    count = max(int(one.max()) for one in labels) + 1
    named: dict[str, list[str]] = {}
    for path in filter(_CLASSES.search, others):
        with contextlib.suppress(UnicodeDecodeError):
            text = stored_in(folder, path, Inflating()).begin().decode("utf-8-sig")
            named[key_text(path)] = text.rstrip().splitlines()
    fields = {name for one in listings.values() for name, _ in one.fields}
    for array in _every(found):
        texts = array.dtype.kind == "U" and not array.shape and array.count == count
        if texts and array.name not in fields:
            with contextlib.suppress(ValueError):
                named[array.name] = array.load().tolist()
    stripped = {name: tuple(map(str.strip, lines)) for name, lines in named.items()}
    fitting = {
        name: lines
        for name, lines in stripped.items()
        if len(lines) == len(set(lines)) == count and all(lines)
    }
    if len(fitting) != 1:
        return "", None
    [(name, classes)] = fitting.items()
    for listing in listings.values():
        listing.notes.append(f"names of the classes are the {count:,} in {printable(name)}")
    return name, classes


def reopen(request: SourceRequest, split: str, described: Plain, piece: Plain) -> Arrays:
    """Open some records of arrays. Raises SourceChangedError where a file is another."""
    found, *_ = _find(replace(request, layout=described["layout"]))
    there = {(array.name, array.stored.path): array for array in _every(found)}
    ranged = []
    for name, order, identities in described["ranged"]:
        read = []
        for source, *identity in identities:
            array = there.get((source, identity[0]))
            if array is None or array.stored.identity != identity:
                why = "it is gone" if array is None else "its size or time of change is another"
                raise changed(key_bytes(identity[0]), why)
            read.append(
                replace(array, stored=replace(array.stored, checksum=None)).unpacked(
                    inflating_of(request)
                )
            )
        ranged.append(Ranged(name, order, read, identities))
    columns = {name: Column(*column) for name, column in piece["columns"].items()}
    return Arrays(ranged, columns, piece["rows"], described["layout"])


# --- what is not read -----------------------------------------------------------------------------

_PICKLE = (
    "a pickle of Python: to read one runs the code that is in it, so shardio does not. If you "
    "trust where it comes from, write its arrays into an .npz, and pack that (the binary version "
    "of CIFAR needs none of this: --layout label=1,image=3x32x32):\n"
    "  import numpy, pickle; d = pickle.load(open({name!r}, 'rb'), encoding='latin1')\n"
    "  numpy.savez({out!r}, images=d['data'].reshape(-1, 3, 32, 32), labels=d['labels'])"
)
_MATLAB = (
    "a file of MATLAB, whose format shardio does not read. scipy does: write its arrays into an "
    ".npz, images as (N, H, W, 3), and pack that:\n"
    "  import numpy, scipy.io; d = scipy.io.loadmat({name!r})\n"
    "  numpy.savez({out!r}, images=d['X'].transpose(3, 0, 1, 2), labels=d['y'])"
)
_HDF5 = (
    "an HDF5 file (MATLAB's since v7.3 are such, too), which shardio does not read. h5py does: "
    "write its arrays into an .npz, images as (N, H, W, 3), and pack that:\n"
    "  import numpy, h5py; d = h5py.File({name!r})\n"
    "  numpy.savez({out!r}, images=d['images'][:], labels=d['labels'][:])"
)


def refuse_file(request: SourceRequest) -> None:
    """Raise SourceError for a file of arrays that is not read, and for records without a layout."""
    folder, name = os.path.split(os.path.abspath(request.path))
    _refuse(DiskFolder(folder), [name], request)


def _way_out(path: bytes, start: bytes) -> str | None:
    """Return what a file is, and what makes an .npz of it, if it holds arrays that are not read.

    start: its first bytes
    """
    name = key_text(path).lower()
    if start.startswith((b"\x89HDF\r\n", b"MATLAB 7.3")) or name.endswith((".h5", ".hdf5")):
        text = _HDF5
    elif start.startswith(b"MATLAB 5.0") or name.endswith(".mat"):
        text = _MATLAB
    elif re.match(rb"\x80[\x02-\x05]", start) or name.endswith((".pkl", ".pickle")):
        text = _PICKLE
    else:
        return None
    out = os.path.splitext(os.path.basename(key_text(path)))[0] + ".npz"
    return text.format(name=key_text(path), out=out)


def _refuse(folder: SourceFolder, names: Sequence[bytes], request: SourceRequest) -> None:
    """Raise SourceError for files of arrays that are not read, and for records without a layout."""
    plain = [name for name in names if b"." not in os.path.basename(name)][:_LOOKED]
    suffixed = [name for name in names if re.search(rb"(?i)\.(pkl|pickle|mat|h5|hdf5)\Z", name)]
    for path in (*suffixed[:_LOOKED], *plain):
        start = b""
        with contextlib.suppress(ShardioError):
            start = stored_in(folder, path, Inflating()).begin()
        here = os.path.join(folder.path, path) if isinstance(folder, DiskFolder) else path
        if (why := _way_out(here, start)) is not None:
            raise SourceError(f"{printable(here)}: {why}")
    if request.layout is None and (records := [*filter(_RECORDS.search, names)]):
        raise SourceError(
            f"{request.shown}: {printable(records[0])} may be of records of one size, and nothing "
            "in it says which; --layout does, such as label=1,image=3x32x32 of CIFAR-10, or "
            "coarse=1,label=1,image=3x32x32 of CIFAR-100"
        )
