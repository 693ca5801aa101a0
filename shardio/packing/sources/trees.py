"""Parallel folders, images/ and masks/: files of one path, but for the ending, are a record.

    images/x/a.jpg  masks/x/a.png  ->  {"__key__": b"x/a.jpg", "image": ..., "mask": ...}

Each folder, here called a tree, is one field. A key is the path of the image in its tree; what else
belongs to it has the same path up to the last dot. A file without its partners is a problem. Trees
lie side by side, in each folder of a split (train/images, train/masks), or have these in them
(images/train, masks/train). Nothing is opened while they are listed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import OptionError, SourceError, printable
from ...formats.sample import Sample, Schema
from ...names import KEY, key_bytes, key_text
from ...order import rng
from .base import (
    MAX_FILE,
    Ints,
    Listing,
    Problem,
    Read,
    Rejected,
    Wanted,
    check_some,
    opened_folder,
    read_file,
)
from .grouped import decoder, kind_of, reason
from .imagefolder import SPLITS, Walk, are_splits, check_loose, top, twins

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


class Trees:
    """The records of a listing, each of a file in every tree."""

    def __init__(self, root: bytes, keys: list[bytes], trees: Sequence[Tree]) -> None:
        self._root, self._keys, self._trees = root, keys, trees
        self._decoders = [decoder(_ENDINGS.get(tree.kind, b"")) for tree in trees]

    @contextlib.contextmanager
    def open(self) -> Iterator[Read]:
        with opened_folder(self._root) as folder:

            def read(place: int) -> Sample:
                sample: Sample = {KEY: self._keys[place]}
                for tree, decode in zip(self._trees, self._decoders, strict=True):
                    path = tree.folder + b"/" + tree.paths[place]
                    size, mtime = int(tree.sizes[place]), int(tree.mtimes[place])
                    try:
                        sample[tree.name] = decode(read_file(folder, path, size, mtime))
                    except (Rejected, ValueError, RecursionError) as error:
                        raise Rejected(f"{printable(path)}: {reason(error)}") from None
                return sample

            yield read


@dataclass(frozen=True)
class _Layout:
    """Where the trees are."""

    splits: dict[str, dict[str, bytes]]  # of each split, the folder of each field; the key's first
    beside: list[bytes]  # names at the top that are in no tree


def lies_there(wanted: Wanted, folders: Sequence[bytes]) -> bool:
    """Tell whether a source is one of trees: `--fields NAME=FOLDER/`, or folders called so.

    folders: the names of those at its top. Raises OptionError where it may be one.
    """
    if wanted.fields:
        return any(folder.endswith("/") for folder in wanted.fields.values())
    root = os.path.abspath(wanted.path)
    return any(_pair(root, place, wanted.shown) for place in _places(folders, wanted.splits))


def find(wanted: Wanted) -> dict[str, Listing]:
    """The datasets of parallel trees, by split. Raises SourceError, OptionError."""
    if wanted.where is not None:
        raise OptionError(
            "--where: files are not opened while they are listed, so there is nothing to select "
            "by. Pack all of them; ShardDataset(where=...) selects when reading"
        )
    if wanted.root is not None:
        raise OptionError("--root: not for folders side by side, which lie in the source itself")
    layout = _layout(wanted)
    fields = max(layout.splits.values(), key=len)
    found = {}
    for split, folders in layout.splits.items():
        listing = found[split] = _listing(os.path.abspath(wanted.path), folders)
        check_some(listing, f"{wanted.shown}/{split}" if split else wanted.shown, "files")
        listing.notes.extend(
            f"there is no folder of {printable(name)} for this split, so no such field"
            for name in sorted(fields.keys() - folders.keys())
        )
    if layout.beside:
        first = next(iter(found.values()))
        first.notes.append(f"left out, being in none of these folders: {_some(layout.beside)}")
    return found


def names(wanted: Wanted) -> list[str]:
    """The keys that `find` will have. Raises SourceError, OptionError."""
    return list(_layout(wanted).splits)


# --- where the trees are --------------------------------------------------------------------------


def _layout(wanted: Wanted) -> _Layout:
    root = os.path.abspath(wanted.path)
    folders, files, _ = top(root)
    trees = _asked(wanted) if wanted.fields else _recognised(root, folders, wanted)
    in_top = all(os.path.isdir(os.path.join(root, folder)) for folder in trees.values())
    splits: dict[str, dict[str, bytes]] = {}
    if in_top:  # images/train, masks/train, or without splits
        inner = {name: top(os.path.join(root, folder)) for name, folder in trees.items()}
        called = sorted({split for inside, _, _ in inner.values() for split in inside})
        loose = any(not _hidden(name) for _, found, _ in inner.values() for name in found)
        if _are_splits(called, loose, wanted.splits):
            for name, (_, found, loops) in inner.items():
                check_loose([*found, *loops], os.path.join(root, trees[name]))
            splits = {
                key_text(split): {
                    name: folder + b"/" + split
                    for name, folder in trees.items()
                    if split in inner[name][0]
                }
                for split in called
            }
        else:
            splits = {"": trees}
        used = {folder.partition(b"/")[0] for folder in trees.values()}
    elif are_splits(folders, wanted.splits):  # train/images, train/masks
        used = set(folders)
        for split in sorted(folders):
            there = {name: split + b"/" + folder for name, folder in trees.items()}
            splits[key_text(split)] = {
                name: path
                for name, path in there.items()
                if os.path.isdir(os.path.join(root, path))
            }
    else:
        missing = [one for one in trees.values() if not os.path.isdir(os.path.join(root, one))]
        raise SourceError(
            f"{wanted.shown}: there is no folder {_some(missing)} in it; there are "
            f"{_some(sorted(folders)) or 'none'}"
        )
    main = next(iter(trees))
    for called_so, has in splits.items():
        if main not in has:
            raise SourceError(
                f"{wanted.shown}: {printable(called_so)} has no folder {printable(trees[main])}/, "
                "whose files the others belong to"
            )
    beside = [n for n in (*folders, *files) if n not in used and not _hidden(n)]
    return _Layout(splits, sorted(beside))


def _asked(wanted: Wanted) -> dict[str, bytes]:
    """The folder of each field as the user gave them, the one that has the keys first."""
    odd = [name for name, folder in wanted.fields.items() if not folder.endswith("/")]
    if odd:
        raise OptionError(
            f"--fields {printable(odd[0])}={printable(wanted.fields[odd[0]])}: others are folders, "
            "with a slash at their end; so must be all, or none"
        )
    trees = {}
    for name in sorted(wanted.fields, key=lambda name: (name != "image", name)):
        folder = os.path.normpath(key_bytes(wanted.fields[name]))
        if folder.startswith((b"/", b"..")) or folder == b".":
            raise OptionError(
                f"--fields {printable(name)}={printable(wanted.fields[name])}: expected a folder "
                f"within {wanted.shown}, such as images/"
            )
        trees[name] = folder
    inside = [
        (one, two)
        for one in trees.values()
        for two in trees.values()
        if one is not two and (one + b"/").startswith(two + b"/")
    ]
    if inside:
        one, two = inside[0]
        raise OptionError(f"--fields: {printable(one)}/ is, or lies in, {printable(two)}/")
    return trees


def _recognised(root: bytes, folders: Sequence[bytes], wanted: Wanted) -> dict[str, bytes]:
    pairs = [
        pair
        for place in _places(folders, wanted.splits)
        if (pair := _pair(root, place, wanted.shown)) is not None
    ]
    if not pairs:
        raise OptionError(
            f"{wanted.shown}: there are no folders images/ and masks/ in it; --fields "
            "image=FOLDER/,mask=FOLDER/ says which they are"
        )
    if any(pair != pairs[0] for pair in pairs):
        raise OptionError(
            f"{wanted.shown}: its splits call their folders differently: "
            + "; ".join(_some([*pair.values()]) for pair in pairs)
        )
    return pairs[0]


def _places(folders: Sequence[bytes], splits: bool | None) -> list[bytes]:
    """The folders, relative to the source, in which trees may lie side by side."""
    if are_splits([*folders], splits) and not any(name.lower() in _IMAGES for name in folders):
        return sorted(folders)
    return [b"."]


def _pair(root: bytes, place: bytes, shown: str) -> dict[str, bytes] | None:
    """The folders of images and masks; None where it is not these that lie there.

    Raises OptionError where other folders lie beside them: all of them may be classes.
    """
    here = os.path.join(root, place)
    try:
        folders, _, _ = top(here)
    except SourceError:  # whoever lists it says so
        return None
    images = [name for name in folders if name.lower() in _IMAGES]
    masks = [name for name in folders if name.lower() in _MASKS]
    if not images or not masks:  # nearly always
        return None
    images, masks = (
        [name for name in some if _has_image(os.path.join(here, name))] for some in (images, masks)
    )
    if not images or not masks:
        return None
    if len(folders) > 2:
        raise OptionError(
            f"{shown}: it cannot be told whether its folders ({_some(sorted(folders))}) are "
            "classes, or images and their masks. Say which:\n"
            f"  --fields image={printable(images[0])}/,mask={printable(masks[0])}/  an image and "
            "its mask are a record, and other folders are left out\n"
            "  --from imagefolder  one image, labelled by its folder"
        )
    return {"image": images[0], "mask": masks[0]}


def _has_image(folder: bytes) -> bool:
    """Whether the first files that are met are images, by their names."""
    for _ in range(_DEEP):
        try:
            folders, files, _ = top(folder)
        except SourceError:
            return False
        files = [name for name in files if not _hidden(name)]
        if files or not folders:
            return any(kind_of(name) == "image" for name in files)
        folder = os.path.join(folder, min(folders))
    return False


def _are_splits(folders: list[bytes], loose: bool, splits: bool | None) -> bool:
    """Whether the folders in trees are splits; loose: whether files lie beside them."""
    if splits is not None:
        return splits and bool(folders)
    return bool(folders) and not loose and all(name in _SPLITS for name in folders)


# --- listing --------------------------------------------------------------------------------------


def _listing(root: bytes, folders: Mapping[str, bytes]) -> Listing:
    """folders: of each field, the one with the keys first."""
    problems: list[Problem] = []
    bad: set[bytes] = set()  # stems of records that cannot be packed
    trees, stems, ignored = [], [], 0
    for name, folder in folders.items():
        walk = Walk(os.path.join(root, folder), empty=True)
        walk.run()
        ignored += walk.ignored
        tree = Tree(name, folder, _kind(walk.keys), *walk.sorted())
        for path, why in walk.problems:
            bad.add(_stem(path))
            problems.append((folder + b"/" + path, why))
        places = _places_of(tree, problems, bad)
        trees.append(tree)
        stems.append(places)
    for tree, places in zip(trees, stems, strict=True):
        for stem, place in places.items():
            for other, there in zip(trees, stems, strict=True):
                if stem not in there and stem not in bad:
                    what = other.folder + b"/" + stem
                    why = f"has no partner in {printable(other.folder)}/: there is no file "
                    problems.append(
                        (tree.folder + b"/" + tree.paths[place], f"{why}{printable(what)}.*")
                    )
    kept = [
        stem for stem in stems[0] if stem not in bad and all(stem in there for there in stems[1:])
    ]
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
    Schema(((KEY, "key"), *fields))  # a name by the user that cannot be one is refused now
    return Listing(
        root=root,
        keys=keys,
        sizes=sizes,
        mtimes=_changes(taken),
        source=Trees(root, keys, taken),
        fields=fields,
        classes=None,
        problems=sorted(problems),
        ignored=ignored,
        notes=twins(keys),
        options={
            "members": _digest(taken),
            "fields": {tree.name: key_text(tree.folder) + "/" for tree in taken},
            "endings": {
                tree.name: "/".join(
                    sorted({key_text(path[len(_stem(path)) :]) for path in tree.paths})
                )
                for tree in taken[1:]
            },
        },
    )


def _places_of(tree: Tree, problems: list[Problem], bad: set[bytes]) -> dict[bytes, int]:
    """The place in a tree of each path but for its ending. What cannot be packed is a problem."""
    places: dict[bytes, int] = {}
    for place, path in enumerate(tree.paths):
        stem = _stem(path)
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
    return Tree(tree.name, tree.folder, tree.kind, paths, tree.sizes[places], tree.mtimes[places])


def _stem(path: bytes) -> bytes:
    """A path up to the last dot of its name; all of it where there is none."""
    dot = path.rfind(b".", path.rfind(b"/") + 2)
    return path if dot < 0 else path[:dot]


def _ending(path: bytes) -> bytes:
    return path[len(_stem(path)) :]


def _kind(paths: Sequence[bytes]) -> str:
    """What a tree holds: images, if any file is called like one; what is none is found later."""
    kinds = {kind_of(path) for path in paths}
    if "image" in kinds:
        return "image"
    only = kinds.pop() if len(kinds) == 1 else None
    return only or "bytes"


def _changes(trees: Sequence[Tree]) -> Ints:
    """(records,) what changes when the time of change, or the size, of a file does."""
    words = np.zeros(len(trees[0].paths), np.uint64)
    for tree in trees:
        for column in (tree.mtimes, tree.sizes):
            words = rng.splitmix64((words ^ column.view(np.uint64)) + np.uint64(rng.GAMMA))
    return words.view(np.int64)


def _digest(trees: Sequence[Tree]) -> str:
    """32 hex digits: which files each record has."""
    seal = hashlib.sha256()
    for tree in trees:
        seal.update(tree.folder + b"\0\0" + b"\0".join(tree.paths) + b"\0\0")
    return seal.hexdigest()[:32]


def _hidden(name: bytes) -> bool:
    return name.startswith(b".")


def _some(names: Sequence[bytes]) -> str:
    some = [printable(name) for name in names[:20]]
    return ", ".join(some) + (", ..." if len(names) > 20 else "")
