"""Parallel folders, images/ and masks/: files of one path, but for the ending, are a record.

    images/x/a.jpg  masks/x/a.png  ->  {"__key__": b"x/a.jpg", "image": ..., "mask": ...}

Each folder, here called a tree, is one field. A key is the path of the image in its tree; what else
belongs to it has the same path up to the ending. An ending begins at the last dot, or is what comes
after the star of a pattern, masks/*_mask.png; then a tree is only the files of its folder that end
so, and two trees may share one. A file without its partners is a problem. Trees lie side by side,
in each folder of a split (train/images, train/masks), or have these in them (images/train,
masks/train). Nothing is opened while they are listed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import NamedTuple

import numpy as np

from ...errors import OptionError, SourceError, printable
from ...formats.sample import Sample
from ...names import KEY, key_bytes, key_text
from ...order import rng
from ...units import show_count
from .base import (
    Ints,
    Listing,
    Listings,
    Plain,
    Problem,
    ReadFile,
    SourceFolder,
    SourceRequest,
    Walked,
    some_of,
)
from .field_names import is_folder
from .files import (
    LOOP,
    MAX_FILE,
    SPLITS,
    FileSource,
    are_splits,
    check_loose,
    folder_of,
    note_top,
    unicode_duplicates,
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


class Pattern(NamedTuple):
    """Say which files are a field: those in a folder, and below it, whose names end so."""

    folder: bytes  # relative to the source, with a slash; b"" is the source itself
    ending: bytes = b""  # b"": any, from the last dot on

    @property
    def text(self) -> str:
        """Return it as `--fields` has it: images/, or images/*_rgb.png."""
        return key_text(self.folder + (b"*" + self.ending if self.ending else b""))

    def stem(self, path: bytes) -> bytes:
        """Return the path of one of its files up to the ending."""
        if self.ending:
            return path.removesuffix(self.ending)
        dot = path.rfind(b".", path.rfind(b"/") + 2)
        return path if dot < 0 else path[:dot]


def pattern_of(text: str) -> Pattern:
    """Return the pattern whose text this is."""
    folder, slash, name = key_bytes(text).rpartition(b"/")
    return Pattern(folder + slash, name[1:])


@dataclass(frozen=True)
class FieldFiles:
    """The files of one field. Paths, sizes and times of change have an entry a record."""

    name: str
    pattern: Pattern
    kind: str
    paths: list[bytes]  # relative to the folder
    sizes: Ints
    mtimes: Ints


class Trees(FileSource):
    """The records of a listing, each of a file in every tree."""

    def __init__(self, root: SourceFolder, trees: Sequence[FieldFiles]) -> None:
        """trees: the first has the keys."""
        super().__init__(root)
        self._keys, self._trees = trees[0].paths, trees
        self._decoders = [decoder(_ENDINGS.get(tree.kind, b"")) for tree in trees]

    def describe(self) -> Plain:
        """Return name, pattern and kind of each tree."""
        trees = [[tree.name, tree.pattern.text, tree.kind] for tree in self._trees]
        return super().describe() | {"trees": trees}

    def piece(self, places: Ints) -> Plain:
        """Return the files of each tree."""
        taken = (_taken(tree, places.tolist()) for tree in self._trees)
        return {"files": [[tree.paths, tree.sizes, tree.mtimes] for tree in taken]}

    def _files(self, place: int) -> Iterator[tuple[bytes, int, int]]:
        for tree in self._trees:
            path = tree.pattern.folder + tree.paths[place]
            yield path, int(tree.sizes[place]), int(tree.mtimes[place])

    def _read(self, read: ReadFile, place: int) -> Sample:
        sample: Sample = {KEY: self._keys[place]}
        files = zip(self._trees, self._decoders, self._files(place), strict=True)
        for tree, decode, file in files:
            sample[tree.name] = read_field(read, *file, decode)
        return sample


def lies_there(request: SourceRequest, folders: Sequence[bytes]) -> bool:
    """Tell whether a source is one of trees: `--fields NAME=FOLDER/`, or folders called so.

    folders: the names of those at its top. Raises OptionError where it may be one.
    """
    if request.fields:
        return are_asked(request)
    root = folder_of(request)
    return any(_pair(root, place, request.shown) for place in _places(folders, request.splits))


def are_asked(request: SourceRequest) -> bool:
    """Tell whether `--fields` names folders or patterns."""
    return any(map(is_folder, request.fields.values()))


def list_records(request: SourceRequest) -> Listings:
    """List parallel trees, by split. Raises SourceError, OptionError."""
    request.refuse_where_and_root("folders side by side")
    splits, beside = _layout(request)
    root = folder_of(request)
    found = {split: _listing(root, fields) for split, fields in splits.items()}
    fields = {name: one.text for has in splits.values() for name, one in has.items()}
    there = {name for listing in found.values() for name, _ in listing.fields}
    if gone := sorted(fields.keys() - there):
        notes = "".join(f"\n{note}" for listing in found.values() for note in listing.notes)
        texts = some_of(fields[name] for name in gone)
        raise SourceError(f"{request.shown}: there is no file {texts} in it{notes}")
    for split, listing in found.items():
        listing.check_some(request.show(split), "files")
        for name in sorted(fields.keys() - dict(listing.fields).keys()):
            own = splits[split].get(name)  # that no file is of, or none
            what = f"folder of {name}" if own is None else f"file {own.text}"
            listing.notes.append(f"there is no {printable(what)} for this split, so no such field")
    if beside:
        first = next(iter(found.values()))
        first.notes.append(f"left out, being in none of these folders: {some_of(beside)}")
    walked = {one.folder.rstrip(b"/") for has in splits.values() for one in has.values()}
    above = {path.rpartition(b"/")[0] for path in walked} | {b""}
    for path in sorted(above - walked, reverse=True):
        folder = root.below(path) if path else root
        note_top(found, folder, folder.top())
    return found


def split_names(request: SourceRequest) -> list[str]:
    """Return the splits that `list_records` will have. Raises SourceError, OptionError."""
    return list(_layout(request)[0])


def reopen(request: SourceRequest, split: str, described: Plain, piece: Plain) -> Trees:
    """Open a piece of parallel trees."""
    pairs = zip(described["trees"], piece["files"], strict=True)
    trees = [FieldFiles(name, pattern_of(text), kind, *one) for (name, text, kind), one in pairs]
    return Trees(folder_of(request), trees)


# --- where the trees are --------------------------------------------------------------------------


def _layout(request: SourceRequest) -> tuple[dict[str, dict[str, Pattern]], list[bytes]]:
    """Return the pattern of each field of each split, the key's first; names that are in none."""
    root = folder_of(request)
    folders, files, *_ = root.top()
    fields = _asked(request) if request.fields else _recognised(root, folders, request)
    missing = {n: one for n, one in fields.items() if not root.below(one.folder).is_there()}
    beside: set[bytes] = set()
    splits: dict[str, dict[str, Pattern]] = {}
    if not missing:
        splits, beside = _splits_within(root, fields, request.splits)
    elif are_splits(folders, request.splits):  # train/images, train/masks
        splits = {
            key_text(split): {
                name: one._replace(folder=path)
                for name, one in fields.items()
                if root.below(path := split + b"/" + one.folder).is_there()
            }
            for split in sorted(folders)
        }
    for has in splits.values():
        missing = {name: one for name, one in missing.items() if name not in has}
    if missing:
        raise SourceError(
            f"{request.shown}: there is no folder "
            f"{some_of(one.folder.rstrip(b'/') for one in missing.values())} in it; there are "
            f"{some_of(sorted(folders)) or 'none'}"
        )
    main = next(iter(fields))
    for called_so, has in splits.items():
        if main not in has:
            raise SourceError(
                f"{request.shown}: {printable(called_so)} has no folder "
                f"{printable(fields[main].folder)}, whose files the others belong to"
            )
    used = {one.folder.partition(b"/")[0] for has in splits.values() for one in has.values()}
    if b"" not in used:
        beside.update(n for n in (*folders, *files) if n not in used and not root.ignores(n))
    return splits, sorted(beside)


def _splits_within(
    root: SourceFolder, fields: dict[str, Pattern], splits: bool | None
) -> tuple[dict[str, dict[str, Pattern]], set[bytes]]:
    """Return the patterns of each split where splits lie in the trees (images/train, masks/train).

    Of "" the trees themselves, where there are none. With them go files beside the splits that are
    of no tree; for others it raises SourceError.
    """
    inner = {name: root.below(one.folder).top() for name, one in fields.items()}
    seen = {
        name: [file for file in inside.files if not root.ignores(file)]
        for name, inside in inner.items()
    }
    loose = {
        name: [file for file in seen[name] if file.endswith(one.ending)]
        for name, one in fields.items()
    }
    called = sorted({split for inside in inner.values() for split in inside.folders})
    by_name = not any(loose.values()) and set(called) <= _SPLITS
    if not called or not (by_name if splits is None else splits):
        return {"": fields}, set()
    for name, one in fields.items():
        check_loose([*loose[name], *inner[name].loops], root.below(one.folder))
    return {
        key_text(split): {
            name: one._replace(folder=one.folder + split + b"/")
            for name, one in fields.items()
            if split in inner[name].folders
        }
        for split in called
    }, {one.folder + file for name, one in fields.items() for file in seen[name]}


def _asked(request: SourceRequest) -> dict[str, Pattern]:
    """Return the pattern of each field as the user gave them, the one that has the keys first."""
    fields = {}
    for name in sorted(request.fields, key=lambda name: (name != "image", name)):
        text = request.fields[name]
        asked = f"--fields {printable(name)}={printable(text)}"
        end = text.rpartition("/")[2]
        if "*" not in text and end:
            raise OptionError(
                f"{asked}: others are folders, with a slash at their end, or patterns, with a "
                "star; so must be all, or none"
            )
        if end and (text.count("*") > 1 or not end.startswith("*") or end == "*"):
            raise OptionError(
                f"{asked}: expected one star, then the end of the names, such as "
                "images/*_rgb.png, or *_rgb.png"
            )
        folder = os.path.normpath(key_bytes(text.removesuffix(end)))
        if folder.startswith((b"/", b"..")) or (folder == b"." and not end):
            raise OptionError(f"{asked}: expected a folder within {request.shown}, such as images/")
        fields[name] = Pattern(b"" if folder == b"." else folder + b"/", key_bytes(end[1:]))
    for one, two in permutations(fields.values(), 2):
        differ = one.ending != two.ending and one.ending and two.ending
        if one.folder.startswith(two.folder) and not (differ and one.folder == two.folder):
            raise OptionError(
                f"--fields: {printable(one.text)} is, or lies in, {printable(two.text)}; expected "
                "folders side by side, or other ends of names in one folder: *.jpg and *_mask.png"
            )
    return fields


def _recognised(
    root: SourceFolder, folders: Sequence[bytes], request: SourceRequest
) -> dict[str, Pattern]:
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
            + "; ".join(some_of(one.text for one in pair.values()) for pair in pairs)
        )
    return pairs[0]


def _places(folders: Sequence[bytes], splits: bool | None) -> list[bytes]:
    """Return the folders, below the source, in which trees may lie side by side."""
    if are_splits([*folders], splits) and not any(name.lower() in _IMAGES for name in folders):
        return sorted(folders)
    return [b"."]


def _pair(root: SourceFolder, place: bytes, shown: str) -> dict[str, Pattern] | None:
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
    return {"image": Pattern(images[0] + b"/"), "mask": Pattern(masks[0] + b"/")}


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


def _listing(root: SourceFolder, fields: Mapping[str, Pattern]) -> Listing:
    """List trees. fields: the one with the keys first."""
    problems: list[Problem] = []
    bad: set[bytes] = set()  # stems of records that cannot be packed
    others: list[bytes] = []  # files of no field
    named: dict[str, FieldFiles] = {}
    ignored, notes = 0, []
    for folder in dict.fromkeys(one.folder for one in fields.values()):
        here = {name: one for name, one in fields.items() if one.folder == folder}
        walked = root.below(folder).walk(empty=True)
        ignored += walked.ignored
        notes += [f"{printable(folder)}: {note}" if folder else note for note in walked.notes]
        named |= _trees(walked, here, others, problems, bad)
    main = next(iter(fields))
    trees = [named[n] for n, one in fields.items() if n == main or named[n].paths or not one.ending]
    stems = [_places_of(tree, problems, bad) for tree in trees]
    problems += _without_partner(trees, stems, bad)
    if others:
        files = show_count(len(others), "file")
        notes.append(f"left out, being of no field: {files}, such as {printable(min(others))}")
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
    return Listing(
        root=root.path,
        keys=keys,
        sizes=sizes,
        mtimes=_changes(taken),
        source=Trees(root, taken),
        fields=tuple((tree.name, tree.kind) for tree in taken),
        classes=None,
        problems=sorted(problems),
        ignored=ignored,
        notes=[*notes, *unicode_duplicates(keys)],
        options={
            "members": _digest(taken),
            "fields": {tree.name: tree.pattern.text for tree in taken},
            "endings": {
                tree.name: "/".join(
                    sorted({key_text(path[len(tree.pattern.stem(path)) :]) for path in tree.paths})
                )
                for tree in taken[1:]
            },
        },
    )


def _trees(
    walked: Walked,
    fields: Mapping[str, Pattern],
    others: list[bytes],
    problems: list[Problem],
    bad: set[bytes],
) -> dict[str, FieldFiles]:
    """Return the trees of one folder: each file is of the field with the longest ending it has.

    What is of none goes to `others`; what cannot be packed to `problems`, and its stem to `bad`.
    """
    patterns = sorted(fields.values(), key=lambda one: len(one.ending), reverse=True)

    def of(path: bytes) -> Pattern | None:
        return next((one for one in patterns if path.endswith(one.ending)), None)

    folder = patterns[0].folder
    places: dict[Pattern | None, list[int]] = {one: [] for one in (*patterns, None)}
    for place, path in enumerate(walked.keys):
        places[of(path)].append(place)
    others += (folder + walked.keys[place] for place in places[None])
    for path, why in walked.problems:
        pattern = of(path)
        if pattern is not None:
            bad.add(pattern.stem(path))
        elif why != LOOP and path[-1:] not in (b"", b"/"):  # no folder, in which some may be
            others.append(folder + path)
            continue
        problems.append((folder + path, why))
    trees = {}
    for name, one in fields.items():
        tree = FieldFiles(name, one, "", walked.keys, walked.sizes, walked.mtimes)
        tree = _taken(tree, places[one])
        trees[name] = replace(tree, kind=_kind(tree.paths))
    return trees


def _places_of(tree: FieldFiles, problems: list[Problem], bad: set[bytes]) -> dict[bytes, int]:
    """Return the place of each path but for its ending. What cannot be packed is a problem."""
    places: dict[bytes, int] = {}
    for place, path in enumerate(tree.paths):
        stem = tree.pattern.stem(path)
        first = places.setdefault(stem, place)
        if first != place:
            bad.add(stem)
            other = printable(tree.paths[first])
            problems.append(
                (tree.pattern.folder + path, f"differs from {other} in its ending only")
            )
        elif tree.sizes[place] == 0 and tree.kind not in ("str", "bytes"):
            bad.add(stem)
            problems.append((tree.pattern.folder + path, "is empty"))
    return places


def _without_partner(
    trees: Sequence[FieldFiles], stems: Sequence[Mapping[bytes, int]], bad: set[bytes]
) -> Iterator[Problem]:
    """Yield the files that lack one in another tree. stems: places in each tree, by stem."""
    for tree, places in zip(trees, stems, strict=True):
        for other, there in zip(trees, stems, strict=True):
            folder, ending = other.pattern
            why = f"has no partner in {printable(other.pattern.text)}: there is no file "
            for stem in places.keys() - there.keys() - bad:
                lacks = printable(folder + stem + (ending or b".*"))
                yield tree.pattern.folder + tree.paths[places[stem]], why + lacks


def _taken(tree: FieldFiles, places: list[int]) -> FieldFiles:
    paths = [tree.paths[place] for place in places]
    return replace(tree, paths=paths, sizes=tree.sizes[places], mtimes=tree.mtimes[places])


def _kind(paths: Sequence[bytes]) -> str:
    """Return the kind of a tree: images, if any file is called so; others are found later."""
    kinds = {kind_of(path) for path in paths}
    if "image" in kinds:
        return "image"
    only = kinds.pop() if len(kinds) == 1 else None
    return only or "bytes"


def _changes(trees: Sequence[FieldFiles]) -> Ints:
    """Return (records,) numbers that change when the time or the size of a file does."""
    words = np.zeros(len(trees[0].paths), np.uint64)
    for tree in trees:
        for column in (tree.mtimes, tree.sizes):
            words = rng.splitmix64((words ^ column.view(np.uint64)) + np.uint64(rng.GAMMA))
    return words.view(np.int64)


def _digest(trees: Sequence[FieldFiles]) -> str:
    """Return 32 hex digits of which files each record has."""
    seal = hashlib.sha256()
    for tree in trees:
        folder = tree.pattern.folder.rstrip(b"/")
        seal.update(folder + b"\0\0" + b"\0".join(tree.paths) + b"\0\0")
    return seal.hexdigest()[:32]
