"""A folder of images: class folders, or images, or one such folder for each split.

A key is a file's path relative to the folder that is packed, as the bytes the file system gave.
Nothing is opened here: names, sizes and times come from one walk.
"""

from __future__ import annotations

import contextlib
import os
import re
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from ...errors import (
    DamageError,
    NotPackedError,
    OptionError,
    SourceChangedError,
    VersionError,
    printable,
)
from ...formats.manifest import load
from ...formats.sample import Sample
from ...images.filetype import image_type
from ...names import KEY, key_bytes, key_text
from ...storage.location import locate
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
    renumber,
)
from .files import (
    BESIDE,
    SPLITS,
    FileSource,
    check_loose,
    folder_of,
    folder_of_split,
    is_archive,
    no_image,
    note_top,
    split_folders,
    unicode_duplicates,
)
from .grouped import check_told

_YOLO = "--fields image=images/ --boxes SRC packs YOLO's images and boxes; SRC is this folder"


class Folder(FileSource):
    """The files of a listing, each one record."""

    def __init__(
        self,
        root: SourceFolder,
        keys: list[bytes],
        sizes: Ints,
        mtimes: Ints,
        labels: Ints | None,
        beside: Any = None,
    ) -> None:
        """beside: what `_beside` finds; None: it looks when one is asked for."""
        super().__init__(root)
        self._keys, self._sizes, self._mtimes, self.labels = keys, sizes, mtimes, labels
        if beside is not None:
            self._beside = beside

    def piece(self, places: Ints) -> Plain:
        """Return the files' names, sizes, times and labels."""
        numbers = places.tolist()
        return {
            "keys": [self._keys[place] for place in numbers],
            "sizes": self._sizes[places],
            "mtimes": self._mtimes[places],
            "labels": None if self.labels is None else self.labels[places],
            "beside": self._beside[places],
        }

    def _files(self, place: int) -> list[tuple[bytes, int, int]]:
        return [(self._keys[place], int(self._sizes[place]), int(self._mtimes[place]))]

    def _read(self, read: ReadFile, place: int) -> Sample:
        [(key, size, mtime)] = self._files(place)
        data = read(key, size, mtime)
        if image_type(data) is None:
            raise Rejected(no_image(data) + self._hint(place))
        sample: Sample = {KEY: key, "image": data}
        if self.labels is not None:
            sample["label"] = int(self.labels[place])
        return sample

    def _hint(self, place: int) -> str:
        """Return what to do where a file is of YOLO's labels, or differs only in its ending."""
        key = self._keys[place]
        if key.startswith(b"labels/") and key.endswith(b".txt"):
            return f"; {_YOLO}"
        if is_archive(key):
            return f"; {BESIDE}"
        if not self._beside[place]:
            return ""
        return "; --from files packs files that differ only in their endings as one record"

    @cached_property
    def _beside(self) -> Any:
        """Find the files that differ from one beside them only in their endings."""
        found = np.zeros(len(self._keys), np.bool_)
        before = other = b""
        for place, key in enumerate(self._keys):
            start = key[: key.find(b".", key.rfind(b"/") + 1) + 1]
            if start and before.startswith(start):
                found[place] = True
            if other and key.startswith(other):
                found[place - 1] = True
            before, other = key, start
        return found


def list_records(request: SourceRequest) -> Listings:
    """List a folder of images, by split, as asked for. Raises SourceError, OptionError."""
    if request.fields:
        raise OptionError(
            "--fields: a folder of images has no fields but `image` and `label`, which are called "
            "so already"
        )
    request.refuse_root("the images of a folder")
    found = image_folder(request)
    if request.where is not None:
        found = {name: _chosen(listing, request) for name, listing in found.items()}
    if request.detected_splits is not None:
        check_told(found, request.shown)
    own = found.get("")
    numbered = _numbered(request.path) if request.files is None else None
    if own is None or own.classes is None or numbered is None or numbered == own.classes:
        return found
    if set(own.classes) <= set(numbered):
        own.notes.append("classes are numbered as in the index that lies there")
        return {"": renumber(own, numbered)}
    return found


def reopen(request: SourceRequest, split: str, described: Plain, piece: Plain) -> Folder:
    """Open a piece of a folder of images."""
    return Folder(folder_of_split(request, split), **piece)


def _numbered(path: bytes) -> tuple[str, ...] | None:
    """Return the classes in the index of a folder of images, if one lies there: its labels hold."""
    with contextlib.suppress(NotPackedError, DamageError, VersionError):
        dataset = load(locate(os.fsdecode(path)))
        return dataset.classes if dataset.format == "imagefolder" else None
    return None


def image_folder(request: SourceRequest) -> Listings:
    """List a folder of images, by split; the one split is "" when there are none.

    Top folders are classes, and files in folders within them belong to them too; without folders
    there are no classes. When all top folders have names of splits (or `splits` says so), each is
    a folder of images by itself, with the classes of all of them together.

    Where --label finds the class of an image in its path, folders are no classes. Raises
    SourceError.
    """
    folder, label, splits = folder_of(request), request.label, request.splits
    inside = folder.top()
    folders = split_folders(folder, request.shown, inside, splits, _advise)
    tops = {name: folders[name].top() if name else inside for name in folders}
    if label is not None:
        found = _labelled(folders, re.compile(label))
        classes = []
    else:
        classes = sorted({inner for one in tops.values() for inner in one.folders})
        found = {
            name: _listing(folders[name], one.folders, one.files, classes)
            for name, one in tops.items()
        }
    for name in found:
        found[name].check_some(request.show(name))
    if list(found) != [""]:
        note_top(found, folder, inside)
    if folder.in_archives and len(classes) == 1 and label is None:
        found[next(iter(found))].notes.append(
            "its only folder is the one class; if that is none, give its path, "
            + printable(folder.below(classes[0]).path, 4096)
        )
    alike = [name for name in classes if name in SPLITS]
    if splits is None and list(found) == [""] and len(alike) > 1:
        other = next(name for name in classes if name not in SPLITS)
        found[""].notes.append(
            f"{', '.join(map(printable, alike))} are called like splits, but {printable(other)} "
            "is not, so all are classes; --splits or --no-splits decides"
        )
    return found


def _listing(
    root: SourceFolder, folders: list[bytes], files: list[bytes], names: list[bytes]
) -> Listing:
    """List one folder of images. names: of all classes, sorted."""
    if folders:
        check_loose(files, root, _advise(folders))
    walked = root.walk()
    walked.notes.extend(unicode_duplicates([*walked.keys, *folders]))
    if not folders:
        return _as_listing(root, walked, None, None, ())
    return _as_listing(root, walked, _labels(walked.keys, names), names, folders)


def _as_listing(
    root: SourceFolder,
    walked: Walked,
    labels: Ints | None,
    classes: Sequence[bytes] | None,
    present: Collection[bytes],
) -> Listing:
    """Return the listing of the files that were found. present: the classes that are there."""
    there = set(present)
    return Listing(
        root=root.path,
        keys=walked.keys,
        sizes=walked.sizes,
        mtimes=walked.mtimes,
        source=Folder(root, walked.keys, walked.sizes, walked.mtimes, labels),
        fields=(("image", "image"),) if classes is None else (("image", "image"), ("label", "int")),
        classes=None if classes is None else tuple(map(key_text, classes)),
        absent=tuple(key_text(name) for name in classes or () if name not in there),
        problems=sorted(walked.problems),
        ignored=walked.ignored,
        notes=walked.notes,
    )


def _labelled(folders: Mapping[str, SourceFolder], pattern: re.Pattern[str]) -> Listings:
    """List folders of images whose classes a pattern finds in the paths."""
    walks = {name: folder.walk() for name, folder in folders.items()}
    named: dict[str, list[bytes | None]] = {}
    for name, walked in walks.items():
        matches = (pattern.search(key_text(key)) for key in walked.keys)
        named[name] = [key_bytes(one[1]) if one and one[1] else None for one in matches]
    classes = sorted({one for some in named.values() for one in some if one is not None})
    number = {one: i for i, one in enumerate(classes)}
    found = {}
    for name, walked in walks.items():
        kept = [i for i, one in enumerate(named[name]) if one is not None]
        missed = [key for key, one in zip(walked.keys, named[name], strict=True) if one is None]
        labels = np.array([number[named[name][i] or b""] for i in kept], np.int64)
        keys = [walked.keys[i] for i in kept]
        why = f"--label {printable(pattern.pattern)} finds no class in its path"
        labelled = walked._replace(
            keys=keys,
            sizes=walked.sizes[kept],
            mtimes=walked.mtimes[kept],
            problems=[*walked.problems, *((key, why) for key in missed)],
            notes=[*walked.notes, *unicode_duplicates([*keys, *classes])],
        )
        present = [classes[i] for i in set(labels.tolist())]
        found[name] = _as_listing(folders[name], labelled, labels, classes, present)
    return found


def _advise(folders: Collection[bytes]) -> str:
    """Return what packs folders of these names, where they are YOLO's."""
    return _YOLO if {b"images", b"labels"} <= {*folders} else ""


def _labels(keys: list[bytes], classes: list[bytes]) -> Ints:
    """Return (keys,) the numbers of the top folders that files lie in. Keys are in bytewise order.

    Raises SourceChangedError for a file in none: its folder came when the others were known.
    """
    found = np.full(len(keys), -1, np.int64)
    for number, name in enumerate(classes):
        start = bisect_left(keys, name + b"/")
        found[start : bisect_left(keys, name + b"0", start)] = number  # 0 comes next to the slash
    if len(odd := np.flatnonzero(found < 0)):
        raise SourceChangedError(
            f"{printable(keys[odd[0]])}: its folder came while the others were listed; run it again"
        )
    return found


def _chosen(listing: Listing, request: SourceRequest) -> Listing:
    """Return the files of some classes, and the problems in their folders."""
    assert request.where is not None
    classes = listing.classes

    def column(name: str) -> Ints:
        if name != "label" or classes is None:
            known = "only `label`" if classes is not None else "nothing: there are no class folders"
            raise OptionError(f"where: {printable(name)}: a folder of images can select by {known}")
        source = listing.source
        assert isinstance(source, Folder) and source.labels is not None
        return source.labels

    numbers = request.select(column, len(listing.keys), classes)
    kept = listing.take(numbers)
    if request.label is not None:
        return kept
    folders = {key[: key.index(b"/")] for key in kept.keys}
    problems = [one for one in listing.problems if one[0].partition(b"/")[0] in folders]
    return replace(kept, problems=problems)
