"""COCO: one JSON file that lists images, and what was annotated in them; one record an image.

    {"images": [{"id": 9, "file_name": "9.jpg", "width": 640, "height": 480}, ...],
     "annotations": [{"id": 1, "image_id": 9, "category_id": 18, "bbox": [...], ...}, ...],
     "categories": [{"id": 18, "name": "dog"}, ...]}

    field         value
    key           file_name
    image         the file
    image_id      int
    width, height int, as listed; None where they are not
    annotations   json: the annotations of the image, in the file's order, as they are but for
                  image_id; each that has a category_id also has `label`, an index into the classes,
                  which are the names of the categories in the order of their ids

The file is read once. Of it stay, packed, the annotations of each image. Source of the layout:
https://cocodataset.org/#format-data
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...errors import OptionError, SourceError, printable
from ...formats.sample import MAX_HEAD, Sample, pack
from ...names import key_bytes, key_text
from .archived import file_path, root_in_archive, root_of, some_folders, split_path
from .base import (
    Ints,
    Listing,
    Listings,
    Plain,
    Problem,
    Renumbered,
    Source,
    SourceFolder,
    SourceRequest,
    check_key,
    listed,
    renamed,
)
from .field_names import our_names
from .files import MISSING, DiskFolder, first_sign, folder_of, unicode_duplicates
from .listing import Files, Rows, look_at, rows_of
from .plain_file import plain_file
from .tables import Column, number_column, packed_column

_NUMBERS = ("image_id", "width", "height")
_FIELDS = {"image": "image", **dict.fromkeys(_NUMBERS, "int"), "annotations": "json"}
_NAMES = re.compile(rb"(instances|person_keypoints|captions)_.*\.json|.*\.coco\.json", re.DOTALL)
# What comes before the name of the images' folder, in names of these files.
_BEFORE = re.compile(r"\A(instances|person_keypoints|captions|stuff|panoptic|image_info)_")

_FIRST = 100  # images that the folder is looked for by: some may be missing


@dataclass(frozen=True)
class Entries:
    """The entries of a file about its images, in bytewise order of their keys."""

    first: list[bytes]  # paths of the images that come first in the file
    keys: list[bytes]
    paths: Column  # as file_name has them
    columns: Mapping[str, Column]  # a column for each of _FIELDS but the image
    classes: tuple[str, ...] | None

    def column(self, name: str) -> Any:
        """Return the values of all images. Raises OptionError where there is none to select by."""
        if name not in _NUMBERS:
            raise OptionError(
                f"where: {printable(name)}: images of COCO are selected by {', '.join(_NUMBERS)}"
            )
        return self.columns[name].array()

    def digest(self, places: Ints) -> str:
        """Return 32 hex digits of all of these records that lies in no file of theirs."""
        seal = hashlib.sha256()
        for name in _NUMBERS:
            column = self.columns[name]
            seal.update(column.values[places].astype("<i8").tobytes())
            seal.update(column.mask[places].tobytes())
        annotations = self.columns["annotations"]
        seal.update(annotations.sizes()[places].astype("<i8").tobytes())
        for packed in annotations.raw(places):
            seal.update(packed)
        return seal.hexdigest()[:32]


class Images(Rows):
    """The images of a file."""

    def __init__(
        self,
        fields: Mapping[str, Column],
        rows: Ints,
        keys: list[bytes],
        files: Files,
        about: Plain,
    ) -> None:
        """about: the name of the field of annotations, and paths that the folder is found by."""
        super().__init__(fields, rows, keys, files)
        self._about = about

    def renumbered(self, numbers: Sequence[int], fields: Collection[str]) -> Source:
        """Return the same images, with other labels in their annotations."""
        return Renumbered(self, numbers)

    def labelled(self, sample: Sample) -> Iterable[dict[str, Any]]:
        """Return the annotations that have a label."""
        return (one for one in sample[self._about["annotations"]] if "label" in one)

    def describe(self) -> Plain:
        """Return what is not of single images."""
        return self._about


def list_records(request: SourceRequest) -> Listings:
    """List the images of a file. Raises SourceError, OptionError."""
    names = our_names(request.fields, _FIELDS)
    if os.path.isdir(request.path):
        refuse_folder(request, os.listdir(request.path))
        raise OptionError(f"{request.shown}: expected a JSON file of COCO's, but it is a folder")
    entries = _parse(_load(request), request.shown)
    root, notes = _root(request, entries.first)
    places = np.arange(len(entries.keys))
    if request.where is not None:
        column, count = entries.column, len(entries.keys)
        places = request.select(column, count, None).astype(np.int64)
    places, sizes, mtimes, unfit = look_at(
        root, places.tolist(), entries.paths.data, partial(_too_many, entries)
    )
    problems = [(entries.keys[place], why) for place, why in unfit]
    keys = [entries.keys[place] for place in places.tolist()]
    files = Files(root, entries.paths, sizes, mtimes, names["image"])
    columns = {names[theirs]: column for theirs, column in entries.columns.items()}
    about = {"annotations": names["annotations"], "first": entries.first, "image": names["image"]}
    listing = Listing(
        root=root.path,
        keys=keys,
        sizes=sizes,
        mtimes=mtimes,
        source=Images(columns, places, keys, files, about),
        fields=tuple((names[name], kind) for name, kind in _FIELDS.items()),
        classes=entries.classes,
        problems=sorted(problems),
        notes=[*notes, *unicode_duplicates(entries.keys)],
        options={
            "values": entries.digest(places),
            **renamed({ours: theirs for theirs, ours in names.items()}),
        },
    )
    if problems and all(why == MISSING for _, why in problems) and not listing.keys:
        raise SourceError(
            f"{request.shown}: none of its images is there, such as {printable(problems[0][0])}, "
            f"in {printable(root.path)}{some_folders(root)}; --root says where they are"
        )
    listing.check_some(request.shown)
    return {"": listing}


def reopen(request: SourceRequest, split: str, described: Plain, piece: Plain) -> Images:
    """Open a piece of a file of COCO."""
    root = _root(request, described["first"])[0]
    fields, rows, keys, files = rows_of(piece, root, described["image"])
    assert files is not None
    return Images(fields, rows, keys, files, described)


def is_coco(path: bytes) -> bool:
    """Tell whether a file may be one: JSON that holds an object. `list_records` refuses others.

    No other source is such a file, and parsing it twice would take twice the time.
    """
    return path.lower().endswith(b".json") and os.path.isfile(path) and first_sign(path) == b"{"


def refuse_folder(request: SourceRequest, names: Sequence[bytes]) -> None:
    """Raise OptionError, naming the files to give, where a folder holds such files.

    names: what lies in it.
    """
    there = [name for name in names if _NAMES.fullmatch(name)]
    if b"annotations" in names:
        with contextlib.suppress(SourceError):
            _, inner, *_ = folder_of(request).below(b"annotations").top()
            there += [b"annotations/" + name for name in inner if _NAMES.fullmatch(name)]
    if there:
        files = "\n".join(f"  {file_path(request, name)}" for name in sorted(there)[:20])
        raise OptionError(
            f"{request.shown}: it holds annotations of COCO; give the file that is to be packed, "
            "each into a directory of its own (--from imagefolder packs the folder as images):\n"
            f"{files}"
        )


# --- the file -------------------------------------------------------------------------------------


class _Faults:
    """The faults of the entries of a file: one error lists all of them."""

    def __init__(self, shown: str) -> None:
        self._shown = shown
        self._found: list[Problem] = []

    def add(self, what: str, place: int, entry: Any, why: str) -> None:
        """Note why an entry, an object of the list `what`, is wrong."""
        name = f"{what}[{place}]"
        if isinstance(entry, dict) and "id" in entry:
            name += f", id {entry['id']!r}"
        self._found.append((name.encode("utf-8", "backslashreplace"), why))

    def refuse(self) -> None:
        """Raise SourceError for all that was noted."""
        if self._found:
            raise SourceError(
                f"{self._shown}: {len(self._found):,} of its entries are not as COCO has them, so "
                f"nothing is packed; mend the file:\n{listed(self._found)}"
            )


def _load(request: SourceRequest) -> dict[str, Any]:
    """Return the object in a file, with lists of images, annotations and categories."""
    collects = gc.isenabled()
    gc.disable()  # nothing that JSON makes is garbage, and looking for it takes as long as parsing
    try:
        with plain_file(request.path, request) as path, open(path, encoding="utf-8-sig") as file:
            described = json.loads(file.read())
    except OSError as error:
        raise SourceError(f"{request.shown}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise SourceError(f"{request.shown}: expected JSON: {printable(why)}") from None
    finally:
        if collects:
            gc.enable()
    if not isinstance(described, dict) or not isinstance(described.get("images"), list):
        found = f"a {type(described).__name__}"
        if isinstance(described, dict):
            found = f"one with {', '.join(map(printable, list(described)[:10])) or 'nothing'}"
        raise SourceError(
            f"{request.shown}: expected a file of COCO's, an object with a list `images`; found "
            f"{found}"
        )
    for name in ("annotations", "categories"):  # files of test images have none
        if not isinstance(described.setdefault(name, []), list):
            raise SourceError(f"{request.shown}: expected a list `{name}`")
    if not described["images"]:
        raise SourceError(f"{request.shown}: its list of images is empty")
    return described


def _parse(described: dict[str, Any], shown: str) -> Entries:
    faults = _Faults(shown)
    images, annotations = described["images"], described["annotations"]
    classes, labels = _categories(described["categories"], faults)
    places: dict[bytes, int] = {}  # by key
    ids: dict[int, int] = {}
    paths = []
    for place, one in enumerate(images):
        path = _path(one, place, faults)
        paths.append(path)
        key = _key(path)
        if path and places.setdefault(key, place) != place:
            why = f"its file_name, {printable(path)}, is that of images[{places[key]}] too"
            faults.add("images", place, one, why)
        _once(ids, "images", place, one, faults)
    numbers: dict[str, list[int | None]] = {"image_id": list(ids)}
    for name in ("width", "height"):
        numbers[name] = [_pixels(one, name, place, faults) for place, one in enumerate(images)]
    theirs = _images_of(annotations, ids, labels, faults)
    faults.refuse()
    keys = sorted(places)
    in_order = np.array([places[key] for key in keys], np.int64)
    columns = {name: number_column(values).take(in_order) for name, values in numbers.items()}
    columns["annotations"] = _pack(annotations, labels, theirs, in_order, faults)
    faults.refuse()
    return Entries(
        first=paths[:_FIRST],
        keys=keys,
        paths=packed_column("bytes", [paths[place] for place in in_order.tolist()]),
        columns=columns,
        classes=classes,
    )


def _categories(
    categories: list[Any], faults: _Faults
) -> tuple[tuple[str, ...] | None, dict[int, int]]:
    """Return names of the classes, in the order of ids, and the label of each id."""
    ids: dict[int, int] = {}
    names: dict[str, int] = {}
    for place, one in enumerate(categories):
        _once(ids, "categories", place, one, faults)
        name = one.get("name") if isinstance(one, dict) else None
        if not isinstance(name, str) or not name:
            faults.add("categories", place, one, "it has no name")
        elif names.setdefault(name, place) != place:
            why = f"its name, {printable(name)}, is that of categories[{names[name]}] too"
            faults.add("categories", place, one, why)
    faults.refuse()
    in_order = sorted(ids)
    classes = tuple(categories[ids[one]]["name"] for one in in_order)
    return classes or None, {one: label for label, one in enumerate(in_order)}


def _once(ids: dict[int, int], what: str, place: int, entry: Any, faults: _Faults) -> None:
    """Note the id of an entry, which no other may have."""
    number = entry.get("id") if isinstance(entry, dict) else None
    if type(number) is not int or not -(1 << 63) <= number < 1 << 63:
        faults.add(what, place, entry, "expected an id that is an integer of 64 bits")
    elif ids.setdefault(number, place) != place:
        faults.add(what, place, entry, f"its id is that of {what}[{ids[number]}] too")


def _path(entry: Any, place: int, faults: _Faults) -> bytes:
    """Return the file_name of an image; empty when there is none."""
    name = entry.get("file_name") if isinstance(entry, dict) else None
    path = b""
    if isinstance(name, str):
        with contextlib.suppress(UnicodeEncodeError):  # half of a pair of surrogates
            path = key_bytes(name)
    why = check_key(_key(path))
    if b"\0" in path or why is not None:
        found = "none" if name is None else printable(repr(name))
        faults.add("images", place, entry, f"expected a file_name, found {found}")
        return b""
    return path


def _key(path: bytes) -> bytes:
    """Return a path as `unpack` can write it: without what leads out of a folder."""
    if path[:1] not in b"/." and b"/." not in path and b"//" not in path:
        return path
    return b"/".join(part for part in path.split(b"/") if part not in (b"", b".", b".."))


def _pixels(entry: Any, name: str, place: int, faults: _Faults) -> int | None:
    value = entry.get(name) if isinstance(entry, dict) else None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None or (type(value) is int and -(1 << 63) <= value < 1 << 63):
        return value
    faults.add("images", place, entry, f"expected a whole number as {name}, found {value!r:.40}")
    return None


def _images_of(
    annotations: list[Any], ids: Mapping[int, int], labels: Mapping[int, int], faults: _Faults
) -> Ints:
    """Return (annotations,) the place of the image of each."""
    found = np.full(len(annotations), -1, np.int64)
    own: dict[int, int] = {}
    for place, one in enumerate(annotations):
        if not isinstance(one, dict):
            faults.add("annotations", place, one, "expected an object")
            continue
        if "id" in one:
            _once(own, "annotations", place, one, faults)
        image = one.get("image_id")
        if type(image) is not int or image not in ids:
            faults.add("annotations", place, one, f"no image has its image_id, {image!r:.40}")
            continue
        found[place] = ids[image]
        if "category_id" in one:
            category = one["category_id"]
            if type(category) is not int or category not in labels:
                why = f"no category has its category_id, {category!r:.40}"
                faults.add("annotations", place, one, why)
            elif one.get("label", labels[category]) != labels[category]:
                why = f"it has a `label` of its own, {one['label']!r:.40}, which ours would replace"
                faults.add("annotations", place, one, why)
    return found


def _pack(
    annotations: list[Any], labels: Mapping[int, int], theirs: Ints, images: Ints, faults: _Faults
) -> Column:
    """Pack the annotations of these images."""
    by_image = np.argsort(theirs, kind="stable")
    sorted_ = theirs[by_image]
    starts = np.searchsorted(sorted_, images).tolist()
    stops = np.searchsorted(sorted_, images, side="right").tolist()
    packed: list[bytes] = []
    for start, stop in zip(starts, stops, strict=True):
        places = by_image[start:stop].tolist()
        try:
            packed.append(pack([_annotation(annotations[place], labels) for place in places]))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            at = places[0]
            faults.add("annotations", at, annotations[at], f"or one after it: {error}")
    return packed_column("json", packed)


def _annotation(entry: dict[str, Any], labels: Mapping[int, int]) -> dict[str, Any]:
    kept = {name: value for name, value in entry.items() if name != "image_id"}
    if "category_id" in kept:
        kept["label"] = labels[kept["category_id"]]
    return kept


# --- the images -----------------------------------------------------------------------------------


def _root(request: SourceRequest, first: Sequence[bytes]) -> tuple[SourceFolder, list[str]]:
    """Find the folder of the images; return it, and a note that says which was found."""
    if request.root is not None:
        folder = root_of(request)
        if isinstance(folder, DiskFolder) and not folder.is_there():
            raise OptionError(f"--root {printable(folder.path)}: expected a folder")
        return folder, []
    above, name = os.path.split(request.path)
    places = [above]
    if (through := split_path(request.path)) is not None:  # the images lie there, or beside it
        places.append(os.path.join(os.path.dirname(through[0]), b"annotations"))
    tried = _usual(key_text(name))
    for here, place in itertools.product(places, tried):
        root = os.path.normpath(os.path.join(here, key_bytes(place)))
        for folder in _folders(root, request):
            if any(seen.why is None for seen in folder.look(first)):
                shown = printable(root if isinstance(folder, DiskFolder) else folder.path, 4096)
                return folder, [f"images are those in {shown}; --root says otherwise"]
    raise OptionError(
        f"{request.shown}: its first image, {printable(first[0])}, is in none of the usual "
        f"folders, seen from that of the file: {', '.join(map(printable, tried))}. --root DIR "
        "says where the images are"
    )


def _folders(root: bytes, request: SourceRequest) -> Iterator[SourceFolder]:
    """Yield the folders that may be meant by a path: there, in an archive, or an archive itself."""
    if os.path.isdir(root):
        yield DiskFolder(root)
        return
    for path in (root, root + b".zip", root + b".tar"):
        archive = root_in_archive(path, request)
        if archive is not None:
            yield archive.below(os.path.basename(root))
            yield archive


def _usual(name: str) -> list[str]:
    """Return the places to look for images of a file of this name, from its folder."""
    stem = name.removesuffix(".json").removesuffix(".coco")
    split = _BEFORE.sub("", stem)
    splits = list(dict.fromkeys((split, split.rpartition("_")[2], split.rstrip("0123456789"))))
    splits = [one for one in splits if one.strip("._-")]
    return [
        *(f"../{one}" for one in splits),
        *(f"../images/{one}" for one in splits),
        ".",
        *(f"../{one}/images" for one in splits),
        *(f"{above}{one}" for one in splits for above in ("", "images/")),
        *("images", "../images", ".."),
    ]


def _too_many(entries: Entries, place: int, file_size: int) -> str | None:
    """Return why the annotations of an image do not fit a record; None when they do."""
    size = len(entries.columns["annotations"].data(place))
    if size < MAX_HEAD >> 1:  # keys are shorter than the other half
        return None
    numbers = [entries.columns[name].get(place) for name in _NUMBERS]
    size += len(pack([entries.keys[place], file_size, *numbers]))  # the rest of the head
    if size <= MAX_HEAD:
        return None
    return f"its annotations take {size:,} bytes, and a record has room for {MAX_HEAD:,}"
