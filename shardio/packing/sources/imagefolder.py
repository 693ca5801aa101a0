"""A folder of images: class folders, or images, or one such folder for each split.

A key is a file's path relative to the folder that is packed, as the bytes the file system gave.
Nothing is opened here: names, sizes and times come from one walk with `os.scandir`.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
import re
import stat
import unicodedata
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from ...errors import OptionError, SourceChangedError, SourceError, printable
from ...formats.sample import Sample
from ...images.filetype import ALL_ENDINGS, image_type
from ...names import KEY, key_bytes, key_text
from ...units import show_count
from .base import (
    MAX_FILE,
    Ints,
    Listing,
    Problem,
    Read,
    Rejected,
    Wanted,
    check_some,
    listed,
    mtime,
    opened_folder,
    read_file,
    select,
)

SPLITS = frozenset((b"train", b"val", b"valid", b"validation", b"test"))
_TAILS = {f".{name}"[-4:].encode() for ending in ALL_ENDINGS for name in (ending, ending.upper())}
_tail = operator.itemgetter(slice(-4, None))
_DOT = ord(".")
_IGNORED = frozenset((b"Thumbs.db", b"desktop.ini"))  # left by file managers; so are hidden files
_OWN = re.compile(rb"manifest\.json|\d{5,}-[0-9a-f]{8}\.index")  # of `shardio index`, on top
_SHOWN = 20  # names that are noted

Above = tuple[tuple[int, int], ...]  # devices and inodes of a folder and those it lies in


class Folder:
    """The files of a listing, each one record."""

    def __init__(
        self, root: bytes, keys: list[bytes], sizes: Ints, mtimes: Ints, labels: Ints | None
    ) -> None:
        self._root, self._keys, self._labels = root, keys, labels
        self._sizes, self._mtimes = sizes, mtimes

    @contextlib.contextmanager
    def open(self) -> Iterator[Read]:
        with opened_folder(self._root) as folder:

            def read(place: int) -> Sample:
                key = self._keys[place]
                data = read_file(folder, key, int(self._sizes[place]), int(self._mtimes[place]))
                if image_type(data) is None:
                    raise Rejected(no_image(data) + self._hint(place))
                sample: Sample = {KEY: key, "image": data}
                if self._labels is not None:
                    sample["label"] = int(self._labels[place])
                return sample

            yield read

    def _hint(self, place: int) -> str:
        """Where a file is called as the one before or behind it, but for the ending: what to do."""
        key = self._keys[place]
        start = key[: key.find(b".", key.rfind(b"/") + 1) + 1]
        beside = (*self._keys[max(place - 1, 0) : place], *self._keys[place + 1 : place + 2])
        if not start or not any(one.startswith(start) for one in beside):
            return ""
        return "; --from files packs files that differ only in their endings as one record"


def no_image(data: bytes) -> str:
    """What is wrong with a file that is none."""
    return f"is not an image: it begins with '{printable(data[:12])}'"


def find(wanted: Wanted) -> dict[str, Listing]:
    """The datasets in a folder of images, by split. Raises SourceError, OptionError."""
    if wanted.fields:
        raise OptionError(
            "--fields: a folder of images has no fields but `image` and `label`, which are called "
            "so already"
        )
    if wanted.root is not None:
        raise OptionError(
            "--root: for listings, COCO files and indexes; the images of a folder lie in it"
        )
    found = image_folder(wanted.path, wanted.splits)
    if wanted.where is None:
        return found
    return {name: _chosen(listing, wanted) for name, listing in found.items()}


def image_folder(source: bytes, splits: bool | None = None) -> dict[str, Listing]:
    """The datasets in a folder of images, by split; the one split is "" when there are none.

    Top folders are classes, and files in folders within them belong to them too; without folders
    there are no classes. When all top folders have names of splits (or `splits` says so), each is
    a folder of images by itself, with the classes of all of them together.
    Raises SourceError.
    """
    root = os.path.abspath(source)
    shown = printable(source)
    folders, files, loops = top(root)
    if not are_splits(folders, splits):
        listing = _listing(root, folders, files)
        check_some(listing, shown)
        alike = sorted(name for name in folders if name in SPLITS)
        if splits is None and len(alike) > 1:
            other = min(name for name in folders if name not in SPLITS)
            listing.notes.append(
                f"{', '.join(map(printable, alike))} are called like splits, but "
                f"{printable(other)} is not, so all are classes; --splits or --no-splits decides"
            )
        return {"": listing}
    if not folders:
        raise SourceError(f"{shown}: there are no folders in it that could be splits")
    check_loose([*files, *loops], root)  # no split's walk would meet the links
    tops = {name: top(os.path.join(root, name)) for name in sorted(folders)}
    classes = sorted({folder for inner, _, _ in tops.values() for folder in inner})
    found = {}
    for name, (inner, loose, _) in tops.items():
        listing = _listing(os.path.join(root, name), inner, loose, classes)
        check_some(listing, f"{shown}/{printable(name)}")
        found[key_text(name)] = listing
    return found


def others(names: Sequence[bytes]) -> list[bytes]:
    """Those of some names, or paths, that are not plainly names of images: nearly always none."""
    odd = set(map(_tail, names)) - _TAILS  # 0.05 us a name
    return [name for name in names if name[-4:] in odd] if odd else []


def split_names(source: bytes, splits: bool | None = None) -> list[str]:
    """The keys that `image_folder` will have, without listing more than the top folder.

    Raises SourceError.
    """
    folders, _, _ = top(os.path.abspath(source))
    return [key_text(n) for n in sorted(folders)] if are_splits(folders, splits) else [""]


def are_splits(folders: list[bytes], splits: bool | None) -> bool:
    return bool(folders) and all(name in SPLITS for name in folders) if splits is None else splits


def top(root: bytes) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """Names of what lies directly in a folder: folders, all else, and links to a folder above.

    Hidden folders are left out. The links are no classes: one more would shift all labels behind
    it. A folder that cannot be listed is one: its label must not depend on permissions.
    """
    folders, files, loops = [], [], []
    if not os.path.isdir(root):
        what = "it is a file" if os.path.exists(root) else "there is no such directory"
        raise SourceError(f"{printable(root)}: expected a folder of images, but {what}")
    try:
        above = _above(root)
        with os.scandir(root) as entries:
            for entry in entries:
                try:
                    is_folder = entry.is_dir()
                except OSError:  # a link into itself
                    is_folder = False
                if not is_folder:
                    files.append(entry.name)
                elif entry.name.startswith(b"."):
                    continue
                elif entry.is_symlink() and _identity(entry.stat()) in above:
                    loops.append(entry.name)
                else:
                    folders.append(entry.name)
    except OSError as error:
        raise SourceError(f"{printable(root)}: cannot be listed: {error.strerror}") from None
    return folders, files, loops


def _above(root: bytes) -> Above:
    """A folder and all it lies in."""
    found, here = [], os.path.realpath(root)
    while True:
        with contextlib.suppress(OSError):  # one that this user may not look at
            found.append(_identity(os.stat(here)))
        if here == os.path.dirname(here):
            return tuple(found)
        here = os.path.dirname(here)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _listing(
    root: bytes, folders: list[bytes], files: list[bytes], classes: Iterable[bytes] | None = None
) -> Listing:
    if folders:
        check_loose(files, root)
    walk = Walk(root)
    walk.run()
    keys, sizes, mtimes = walk.sorted()
    names = sorted(folders) if classes is None else list(classes)
    present = set(folders)
    labels = _labels(keys, names) if folders else None
    return Listing(
        root=root,
        keys=keys,
        sizes=sizes,
        mtimes=mtimes,
        source=Folder(root, keys, sizes, mtimes, labels),
        fields=(("image", "image"), ("label", "int")) if folders else (("image", "image"),),
        classes=tuple(map(key_text, names)) if folders else None,
        absent=tuple(key_text(n) for n in names if n not in present) if folders else (),
        problems=sorted(walk.problems),
        ignored=walk.ignored,
        notes=twins([*keys, *folders]),
    )


def _labels(keys: list[bytes], classes: list[bytes]) -> Ints:
    """(keys,) the numbers of the top folders that files lie in. Keys are in bytewise order.

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


def _chosen(listing: Listing, wanted: Wanted) -> Listing:
    """The files of some classes, and the problems in their folders."""
    assert wanted.where is not None
    classes = listing.classes

    def column(name: str) -> Ints:
        if name != "label" or classes is None:
            known = "only `label`" if classes is not None else "nothing: there are no class folders"
            raise OptionError(f"where: {printable(name)}: a folder of images can select by {known}")
        return _labels(listing.keys, list(map(key_bytes, classes)))

    numbers = select(wanted.where, column, len(listing.keys), classes, wanted.shown)
    kept = listing.take(numbers)
    folders = {key[: key.index(b"/")] for key in kept.keys}
    problems = [one for one in listing.problems if one[0].partition(b"/")[0] in folders]
    return replace(kept, problems=problems)


class Walk:
    """Every file below a folder. Links are followed, unless they lead into themselves.

    empty: files without a byte are files like others, and no problems.
    """

    def __init__(self, root: bytes, *, empty: bool = False) -> None:
        self.root = root
        self._least = 0 if empty else 1
        self.keys: list[bytes] = []
        self.sizes = array("q")  # 8 bytes a file, where a list of ints takes 40
        self.mtimes = array("q")
        self.problems: list[Problem] = []
        self.ignored = 0

    def sorted(self) -> tuple[list[bytes], Ints, Ints]:
        """Keys in bytewise order, sizes, times of change."""
        order = sorted(range(len(self.keys)), key=self.keys.__getitem__)
        keys = [self.keys[i] for i in order]
        return keys, np.array(self.sizes, np.int64)[order], np.array(self.mtimes, np.int64)[order]

    def run(self) -> None:
        # a folder to list: its prefix in keys, and the device and inode of all folders above it
        stack: list[tuple[bytes, Above]] = [(b"", _above(self.root))]
        while stack:
            prefix, above = stack.pop()
            try:
                with os.scandir(os.path.join(self.root, prefix)) as entries:
                    for entry in entries:
                        self._visit(entry, prefix, above, stack)
            except OSError as error:
                self.problems.append((prefix, f"cannot be listed: {error.strerror}"))

    def _visit(
        self,
        entry: os.DirEntry[bytes],
        prefix: bytes,
        above: Above,
        stack: list[tuple[bytes, Above]],
    ) -> None:
        name = entry.name
        key = prefix + name
        if name[0] == _DOT or name in _IGNORED:
            self.ignored += 1
            return
        if not prefix and _is_own(name):
            return
        try:
            status = entry.stat()  # of what a link leads to
        except FileNotFoundError:
            self.problems.append((key, "is a link to nothing"))
            return
        except OSError as error:
            self.problems.append((key, f"cannot be followed: {error.strerror}"))
            return
        mode, size = status.st_mode, status.st_size
        if stat.S_ISREG(mode) and self._least <= size <= MAX_FILE:
            self.keys.append(key)
            self.sizes.append(size)
            self.mtimes.append(mtime(status))
        elif stat.S_ISDIR(mode):
            here = _identity(status)
            if here in above:
                self.problems.append((key, "is a link to a folder that contains it"))
            else:
                stack.append((key + b"/", (*above, here)))
        elif (why := unfit(status)) is not None:
            self.problems.append((key, why))


def _is_own(name: bytes) -> bool:
    """Whether a file on top is one of `shardio index`."""
    return name[-4:] in (b"json", b"ndex") and _OWN.fullmatch(name) is not None  # 0.1 us, not 0.3


def unfit(status: os.stat_result) -> str | None:
    """Why this can be no file of a record; None when it can."""
    mode, size = status.st_mode, status.st_size
    if not stat.S_ISREG(mode):
        return f"is a {_special(mode)}, not a file; it was not opened"
    if size == 0:
        return "is empty"
    return None if size <= MAX_FILE else f"is {size:,} bytes; the limit is {MAX_FILE:,}"


def _special(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "folder"
    for test, name in (
        (stat.S_ISFIFO, "FIFO"),
        (stat.S_ISSOCK, "socket"),
        (stat.S_ISBLK, "device"),
    ):
        if test(mode):
            return name
    return "device"


def check_loose(files: list[bytes], root: bytes) -> None:
    ours = (n for n in files if not n.startswith(b".") and n not in _IGNORED)
    loose = sorted(name for name in ours if not _is_own(name))
    if loose:
        raise SourceError(
            f"{printable(root)}: {show_count(len(loose), 'file')} beside class folders; move them "
            f"into one, or away:\n{listed([(name, 'in no class folder') for name in loose])}"
        )


def twins(names: Iterable[bytes]) -> list[str]:
    """Names that look the same, since they differ only by Unicode normalisation."""
    seen: dict[str, bytes] = {}
    twins = []
    for name in itertools.filterfalse(bytes.isascii, names):
        try:
            text = unicodedata.normalize("NFC", name.decode())
        except UnicodeDecodeError:
            continue
        if seen.setdefault(text, name) != name:
            twins.append(name)
    notes = [
        f"{printable(name)}: two names differ only by Unicode normalisation; both were kept"
        for name in twins[:_SHOWN]
    ]
    if len(twins) > _SHOWN:
        notes.append(f"... and {len(twins) - _SHOWN:,} more such pairs of names")
    return notes
