"""Parallel folders, images/ and masks/: files of one path, but for the ending, are a record.

    images/x/a.jpg  masks/x/a.png  ->  {"__key__": b"x/a.jpg", "image": ..., "mask": ...}

Each folder, here called a tree, is one field. A key is the path of the image in its tree; what else
belongs to it has the same path up to the last dot. A file without its partners is a problem. Trees
lie side by side, in each folder of a split (train/images, train/masks), or have these in them
(images/train, masks/train). Nothing is opened while they are listed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np

from ...errors import OptionError, SourceError, printable
from ...formats.sample import Sample
from ...names import KEY, key_bytes, key_text
from ...order import rng
from .base import (
    Ints,
    Listing,
    Listings,
    Plain,
    Problem,
    ReadFile,
    SourceFolder,
    SourceRequest,
    some_of,
)
from .files import (
    MAX_FILE,
    SPLITS,
    FileSource,
    are_splits,
    check_loose,
    folder_of,
    note_top,
    twins,
)
from .grouped import decoder, kind_of, read_field

# What folders of pictures and of their masks are called, in lower case; jpegimages and
# segmentationclass: Pascal VOC, annotations: ADE20K.
_IMAGES = frozenset((b"images", b"image", b"imgs", b"img", b"jpegimages"))
_MASKS = frozenset((b"masks", b"mask", b"annotations", b"labels", b"segmentationclass"))
_SPLITS = SPLITS | {b"training", b"testing"}  # as ADE20K has them
# An ending of each kind, by which its files are decoded.
_ENDINGS = {"image": b"png", "array": b"npy", "int": b"cls", "str": b"txt", "json": b"json"}
_DEEP = 8  # folders in folders that are looked into for an image


@dataclass(frozen=True)
class Tree:
    """The files of one field. Paths, sizes and times of change have an entry a record."""

    name: str
    folder: bytes  # relative to the source
    kind: str
    paths: list[bytes]  # relative to `folder`
    sizes: Ints
    mtimes: Ints


class Trees(FileSource):
    """The records of a listing, each of a file in every tree."""

    def __init__(self, root: SourceFolder, trees: Sequence[Tree]) -> None:
        """trees: the first has the keys."""
        super().__init__(root)
        self._keys, self._trees = trees[0].paths, trees
        self._decoders = [decoder(_ENDINGS.get(tree.kind, b"")) for tree in trees]

    def describe(self) -> Plain:
        """Return name, folder and kind of each tree."""
        return {"trees": [[tree.name, tree.folder, tree.kind] for tree in self._trees]}

    def piece(self, places: Ints) -> Plain:
        """Return the files of each tree."""
        taken = (_taken(tree, places.tolist()) for tree in self._trees)
        return {"files": [[tree.paths, tree.sizes, tree.mtimes] for tree in taken]}

    def _files(self, place: int) -> Iterator[tuple[bytes, int]]:
        for tree in self._trees:
            yield tree.folder + b"/" + tree.paths[place], int(tree.sizes[place])

    def _read(self, read: ReadFile, place: int) -> Sample:
        sample: Sample = {KEY: self._keys[place]}
        for tree, decode in zip(self._trees, self._decoders, strict=True):
            path = tree.folder + b"/" + tree.paths[place]
            size, mtime = int(tree.sizes[place]), int(tree.mtimes[place])
            sample[tree.name] = read_field(read, path, size, mtime, decode)
        return sample


def lies_there(request: SourceRequest, folders: Sequence[bytes]) -> bool:
    """Tell whether a source is one of trees: `--fields NAME=FOLDER/`, or folders called so.

    folders: the names of those at its top. Raises OptionError where it may be one.
    """
    if request.fields:
        return any(folder.endswith("/") for folder in request.fields.values())
    root = folder_of(request)
    return any(_pair(root, place, request.shown) for place in _places(folders, request.splits))


def list_records(request: SourceRequest) -> Listings:
    """List parallel trees, by split. Raises SourceError, OptionError."""
    request.refuse_where_and_root("folders side by side")
    splits, beside = _layout(request)
    fields = max(splits.values(), key=len)
    found = {}
    for split, folders in splits.items():
        listing = found[split] = _listing(folder_of(request), folders)
        listing.check_some(request.show(split), "files")
        listing.notes.extend(
            f"there is no folder of {printable(name)} for this split, so no such field"
            for name in sorted(fields.keys() - folders.keys())
        )
    if beside:
        first = next(iter(found.values()))
        first.notes.append(f"left out, being in none of these folders: {some_of(beside)}")
    root = folder_of(request)
    walked = [path for folders in splits.values() for path in folders.values()]
    for above in sorted({path.rpartition(b"/")[0] for path in walked} | {b""}, reverse=True):
        folder = root.below(above) if above else root
        note_top(found, folder, folder.top())
    return found


def split_names(request: SourceRequest) -> list[str]:
    """Return the splits that `list_records` will have. Raises SourceError, OptionError."""
    return list(_layout(request)[0])


def reopen(request: SourceRequest, split: str, described: Plain, piece: Plain) -> Trees:
    """Open a piece of parallel trees."""
    pairs = zip(described["trees"], piece["files"], strict=True)
    return Trees(folder_of(request), [Tree(*about, *files) for about, files in pairs])


# --- where the trees are --------------------------------------------------------------------------


def _layout(request: SourceRequest) -> tuple[dict[str, dict[str, bytes]], list[bytes]]:
    """Return the folder of each field of each split, the key's first; names at the top in none."""
    root = folder_of(request)
    folders, files, *_ = root.top()
    trees = _asked(request) if request.fields else _recognised(root, folders, request)
    if all(root.below(folder).is_there() for folder in trees.values()):
        splits = _splits_within(root, trees, request.splits)
        used = {folder.partition(b"/")[0] for folder in trees.values()}
    elif are_splits(folders, request.splits):  # train/images, train/masks
        splits = {
            key_text(split): {
                name: path
                for name, folder in trees.items()
                if root.below(path := split + b"/" + folder).is_there()
            }
            for split in sorted(folders)
        }
        used = set(folders)
    else:
        missing = [one for one in trees.values() if not root.below(one).is_there()]
        raise SourceError(
            f"{request.shown}: there is no folder {some_of(missing)} in it; there are "
            f"{some_of(sorted(folders)) or 'none'}"
        )
    main = next(iter(trees))
    for called_so, has in splits.items():
        if main not in has:
            raise SourceError(
                f"{request.shown}: {printable(called_so)} has no folder {printable(trees[main])}/, "
                "whose files the others belong to"
            )
    beside = [n for n in (*folders, *files) if n not in used and not root.ignores(n)]
    return splits, sorted(beside)


def _splits_within(
    root: SourceFolder, trees: dict[str, bytes], splits: bool | None
) -> dict[str, dict[str, bytes]]:
    """Return the folders of each split where splits lie in the trees (images/train, masks/train).

    Of "" the trees themselves, where there are none. Raises SourceError for files beside splits.
    """
    inner = {name: root.below(folder).top() for name, folder in trees.items()}
    called = sorted({split for inside in inner.values() for split in inside.folders})
    loose = any(not root.ignores(name) for inside in inner.values() for name in inside.files)
    by_name = not loose and set(called) <= _SPLITS
    if not called or not (by_name if splits is None else splits):
        return {"": trees}
    for name, inside in inner.items():
        check_loose([*inside.files, *inside.loops], root.below(trees[name]))
    return {
        key_text(split): {
            name: folder + b"/" + split
            for name, folder in trees.items()
            if split in inner[name].folders
        }
        for split in called
    }


def _asked(request: SourceRequest) -> dict[str, bytes]:
    """Return the folder of each field as the user gave them, the one that has the keys first."""
    odd = [name for name, folder in request.fields.items() if not folder.endswith("/")]
    if odd:
        raise OptionError(
            f"--fields {printable(odd[0])}={printable(request.fields[odd[0]])}: others are "
            "folders, with a slash at their end; so must be all, or none"
        )
    trees = {}
    for name in sorted(request.fields, key=lambda name: (name != "image", name)):
        folder = os.path.normpath(key_bytes(request.fields[name]))
        if folder.startswith((b"/", b"..")) or folder == b".":
            raise OptionError(
                f"--fields {printable(name)}={printable(request.fields[name])}: expected a folder "
                f"within {request.shown}, such as images/"
            )
        trees[name] = folder
    for one, two in permutations(trees.values(), 2):
        if (one + b"/").startswith(two + b"/"):
            raise OptionError(f"--fields: {printable(one)}/ is, or lies in, {printable(two)}/")
    return trees


def _recognised(
    root: SourceFolder, folders: Sequence[bytes], request: SourceRequest
) -> dict[str, bytes]:
    pairs = [
        pair
        for place in _places(folders, request.splits)
        if (pair := _pair(root, place, request.shown)) is not None
    ]
    if not pairs:
        raise OptionError(
            f"{request.shown}: there are no folders images/ and masks/ in it; --fields "
            "image=FOLDER/,mask=FOLDER/ says which they are"
        )
    if any(pair != pairs[0] for pair in pairs):
        raise OptionError(
            f"{request.shown}: its splits call their folders differently: "
            + "; ".join(some_of([*pair.values()]) for pair in pairs)
        )
    return pairs[0]


def _places(folders: Sequence[bytes], splits: bool | None) -> list[bytes]:
    """Return the folders, below the source, in which trees may lie side by side."""
    if are_splits([*folders], splits) and not any(name.lower() in _IMAGES for name in folders):
        return sorted(folders)
    return [b"."]


def _pair(root: SourceFolder, place: bytes, shown: str) -> dict[str, bytes] | None:
    """Return the folders of images and masks; None where no such folders lie there.

    Raises OptionError where other folders lie beside them: all of them may be classes.
    """
    here = root.below(place)
    try:
        folders, _, *_ = here.top()
    except SourceError:  # whoever lists it says so
        return None
    images = [name for name in folders if name.lower() in _IMAGES]
    masks = [name for name in folders if name.lower() in _MASKS]
    if not images or not masks:  # nearly always
        return None
    images, masks = (
        [name for name in some if _has_image(here.below(name))] for some in (images, masks)
    )
    if not images or not masks:
        return None
    if len(folders) > 2:
        raise OptionError(
            f"{shown}: it cannot be told whether its folders ({some_of(sorted(folders))}) are "
            "classes, or images and their masks. Say which:\n"
            f"  --fields image={printable(images[0])}/,mask={printable(masks[0])}/  an image and "
            "its mask are a record, and other folders are left out\n"
            "  --from imagefolder  one image, labelled by its folder"
        )
    return {"image": images[0], "mask": masks[0]}


def _has_image(folder: SourceFolder) -> bool:
    """Tell whether the first files that are met are images, by their names."""
    for _ in range(_DEEP):
        try:
            folders, files, *_ = folder.top()
        except SourceError:
            return False
        files = [name for name in files if not folder.ignores(name)]
        if files or not folders:
            return any(kind_of(name) == "image" for name in files)
        folder = folder.below(min(folders))
    return False


# --- listing --------------------------------------------------------------------------------------


def _listing(root: SourceFolder, folders: Mapping[str, bytes]) -> Listing:
    """List trees. folders: of each field, the one with the keys first."""
    problems: list[Problem] = []
    bad: set[bytes] = set()  # stems of records that cannot be packed
    trees, stems, ignored, notes = [], [], 0, []
    for name, folder in folders.items():
        keys, sizes, mtimes, unfit, hidden, names = root.below(folder).walk(empty=True)
        ignored += hidden
        notes += [f"{printable(folder)}/: {note}" for note in names]
        tree = Tree(name, folder, _kind(keys), keys, sizes, mtimes)
        for path, why in unfit:
            bad.add(stem_of(path))
            problems.append((folder + b"/" + path, why))
        places = _places_of(tree, problems, bad)
        trees.append(tree)
        stems.append(places)
    for tree, places in zip(trees, stems, strict=True):
        for other, there in zip(trees, stems, strict=True):
            why = f"has no partner in {printable(other.folder)}/: there is no file "
            problems += (
                (
                    tree.folder + b"/" + tree.paths[places[stem]],
                    f"{why}{printable(other.folder + b'/' + stem)}.*",
                )
                for stem in places.keys() - there.keys() - bad
            )
    common = set(stems[0]).intersection(*stems) - bad
    kept = [stem for stem in stems[0] if stem in common]
    taken = [
        _taken(tree, [there[stem] for stem in kept])
        for tree, there in zip(trees, stems, strict=True)
    ]
    sizes = sum((tree.sizes for tree in taken), np.zeros(len(kept), np.int64))
    for place in np.flatnonzero(sizes > MAX_FILE).tolist():
        problems.append((taken[0].paths[place], f"has over {MAX_FILE:,} bytes in all its files"))
    if len(small := np.flatnonzero(sizes <= MAX_FILE)) < len(kept):
        taken, sizes = [_taken(tree, small.tolist()) for tree in taken], sizes[small]
    keys = taken[0].paths
    fields = tuple((tree.name, tree.kind) for tree in taken)
    return Listing(
        root=root.path,
        keys=keys,
        sizes=sizes,
        mtimes=_changes(taken),
        source=Trees(root, taken),
        fields=fields,
        classes=None,
        problems=sorted(problems),
        ignored=ignored,
        notes=[*notes, *twins(keys)],
        options={
            "members": _digest(taken),
            "fields": {tree.name: key_text(tree.folder) + "/" for tree in taken},
            "endings": {
                tree.name: "/".join(
                    sorted({key_text(path[len(stem_of(path)) :]) for path in tree.paths})
                )
                for tree in taken[1:]
            },
        },
    )


def _places_of(tree: Tree, problems: list[Problem], bad: set[bytes]) -> dict[bytes, int]:
    """Return the place of each path but for its ending. What cannot be packed is a problem."""
    places: dict[bytes, int] = {}
    for place, path in enumerate(tree.paths):
        stem = stem_of(path)
        first = places.setdefault(stem, place)
        if first != place:
            bad.add(stem)
            other = printable(tree.paths[first])
            problems.append((tree.folder + b"/" + path, f"differs from {other} in its ending only"))
        elif tree.sizes[place] == 0 and tree.kind not in ("str", "bytes"):
            bad.add(stem)
            problems.append((tree.folder + b"/" + path, "is empty"))
    return places


def _taken(tree: Tree, places: list[int]) -> Tree:
    paths = [tree.paths[place] for place in places]
    return replace(tree, paths=paths, sizes=tree.sizes[places], mtimes=tree.mtimes[places])


def stem_of(path: bytes) -> bytes:
    """Return a path up to the last dot of its name; all of it where there is none."""
    dot = path.rfind(b".", path.rfind(b"/") + 2)
    return path if dot < 0 else path[:dot]


def _kind(paths: Sequence[bytes]) -> str:
    """Return the kind of a tree: images, if any file is called so; others are found later."""
    kinds = {kind_of(path) for path in paths}
    if "image" in kinds:
        return "image"
    only = kinds.pop() if len(kinds) == 1 else None
    return only or "bytes"


def _changes(trees: Sequence[Tree]) -> Ints:
    """Return (records,) numbers that change when the time or the size of a file does."""
    words = np.zeros(len(trees[0].paths), np.uint64)
    for tree in trees:
        for column in (tree.mtimes, tree.sizes):
            words = rng.splitmix64((words ^ column.view(np.uint64)) + np.uint64(rng.GAMMA))
    return words.view(np.int64)


def _digest(trees: Sequence[Tree]) -> str:
    """Return 32 hex digits of which files each record has."""
    seal = hashlib.sha256()
    for tree in trees:
        seal.update(tree.folder + b"\0\0" + b"\0".join(tree.paths) + b"\0\0")
    return seal.hexdigest()[:32]
