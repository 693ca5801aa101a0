"""What can be packed: today a folder of images; each source becomes a Listing, sorted by key.

A key is a file's path relative to the folder that is packed, as the bytes the file system gave.
Nothing is opened here: names, sizes and times come from one walk with `os.scandir`. Whatever is
neither packed nor ignored for a stated reason is in `problems`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
import unicodedata
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .errors import OptionError, SourceChangedError, SourceError, printable
from .sample import MAX_BODY, MAX_HEAD

SPLITS = frozenset((b"train", b"val", b"valid", b"validation", b"test"))
_DOT = ord(".")
_IGNORED = frozenset((b"Thumbs.db", b"desktop.ini"))  # left by file managers; so are hidden files
_SHOWN = 20  # files that one message lists
_MAX_FILE = MAX_BODY - MAX_HEAD  # bytes of a file that a record holds in any case

Above = tuple[tuple[int, int], ...]  # devices and inodes of a folder and those it lies in

# First bytes of the image files that the decoders read; 12 bytes are enough to tell.
_SIGNATURES = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
    (b"II+\x00", "TIFF"),
    (b"MM\x00+", "TIFF"),
    (b"\x00\x00\x00\x0cjP  ", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"\x00\x00\x00\x0cJXL ", "JPEG XL"),
    (b"\xff\x0a", "JPEG XL"),
    *((b"P%d" % kind, "PNM") for kind in range(1, 8)),
)
_FTYP_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"mif1", b"msf1")


@dataclass(frozen=True)
class Listing:
    """The files of one dataset, sorted by key, bytewise; columns have one entry a file."""

    root: bytes  # absolute; a file is root/key
    keys: list[bytes]
    sizes: np.ndarray[tuple[int], np.dtype[np.int64]]  # bytes
    mtimes: np.ndarray[tuple[int], np.dtype[np.int64]]  # nanoseconds
    classes: tuple[str, ...] | None  # folder names in bytewise order, as os.fsdecode gives them
    absent: tuple[str, ...] = ()  # classes that have no folder here
    problems: list[tuple[bytes, str]] = field(default_factory=list)  # key, reason
    ignored: int = 0  # hidden files and the like
    notes: list[str] = field(default_factory=list)  # packed, but worth knowing


def image_folder(source: bytes, splits: bool | None = None) -> dict[str, Listing]:
    """The datasets in a folder of images, by split; the one split is "" when there are none.

    Top folders are classes, and files in folders within them belong to them too; without folders
    there are no classes. When all top folders have names of splits (or `splits` says so), each is
    a folder of images by itself, with the classes of all of them together.
    Raises SourceError.
    """
    root = os.path.abspath(source)
    shown = printable(source)
    folders, files, loops = _top(root)
    if not _are_splits(folders, splits):
        listing = _listing(root, folders, files)
        _check_some(listing, shown)
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
    _check_loose([*files, *loops], root)  # no split's walk would meet the links
    tops = {name: _top(os.path.join(root, name)) for name in sorted(folders)}
    classes = sorted({folder for inner, _, _ in tops.values() for folder in inner})
    found = {}
    for name, (inner, loose, _) in tops.items():
        listing = _listing(os.path.join(root, name), inner, loose, classes)
        _check_some(listing, f"{shown}/{printable(name)}")
        found[os.fsdecode(name)] = listing
    return found


def split_names(source: bytes, splits: bool | None = None) -> list[str]:
    """The keys that `image_folder` will have, without listing more than the top folder.

    Raises SourceError.
    """
    folders, _, _ = _top(os.path.abspath(source))
    return [os.fsdecode(n) for n in sorted(folders)] if _are_splits(folders, splits) else [""]


def image_type(start: bytes) -> str | None:
    """The kind of image a file is by its first 12 bytes or more; None when it is none."""
    for signature, kind in _SIGNATURES:
        if start.startswith(signature):
            return kind
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "WEBP"
    if start[4:8] == b"ftyp" and start[8:12] in _FTYP_BRANDS:
        return "AVIF or HEIF"
    return None


def read(folder: int, key: bytes, size: int, mtime_ns: int) -> tuple[bytes, str]:
    """The bytes of a listed file, or why it cannot be packed. Raises SourceChangedError.

    `folder`: a descriptor of the listing's root; size and mtime are those of the listing.
    O_NONBLOCK: if the file was replaced by a FIFO since the plan was made, opening must not wait.
    """
    try:
        descriptor = os.open(key, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        raise SourceChangedError(_changed(key, "it is gone")) from None
    except OSError as error:
        return b"", f"cannot be opened: {error.strerror}"
    try:
        status = os.fstat(descriptor)
        if status.st_size != size or _mtime(status) != mtime_ns:
            raise SourceChangedError(_changed(key, "its size or time of change is another"))
        data = os.read(descriptor, size + 1)
        while len(data) < size and (more := os.read(descriptor, size - len(data))):
            data += more
        if _mtime(os.fstat(descriptor)) != mtime_ns:
            raise SourceChangedError(_changed(key, "it was written to while it was read"))
    except OSError as error:
        return b"", f"cannot be read: {error.strerror}"
    finally:
        os.close(descriptor)
    if len(data) != size:
        raise SourceChangedError(_changed(key, f"{len(data):,} bytes were read, expected {size:,}"))
    if image_type(data) is None:
        return b"", f"is not an image: it begins with {printable(data[:12])!r}"
    return data, ""


def renumber(listing: Listing, classes: Sequence[str]) -> Listing:
    """The same files with another dataset's classes.

    Raises OptionError when a class is missing there.
    """
    if listing.classes is None:
        raise OptionError(
            "--classes: the source has no class folders, so nothing could be numbered"
        )
    known = set(classes)
    missing = [printable(name) for name in listing.classes if name not in known]
    if missing:
        raise OptionError(
            f"--classes: {len(missing)} of the source's classes are not among the other's "
            f"{len(known)}: {', '.join(missing[:_SHOWN])}"
        )
    present = set(listing.classes) - set(listing.absent)
    absent = tuple(name for name in classes if name not in present)
    return dataclasses.replace(listing, classes=tuple(classes), absent=absent)


def listed(entries: Sequence[tuple[bytes, str]]) -> str:
    """Keys and reasons, one a line, for a message."""
    lines = [f"  {printable(key)}: {reason}" for key, reason in entries[:_SHOWN]]
    if len(entries) > _SHOWN:
        lines.append(f"  ... and {len(entries) - _SHOWN:,} more")
    return "\n".join(lines)


def _changed(key: bytes, what: str) -> str:
    return (
        f"{printable(key)}: changed since the packing was planned: {what}. Run it again with "
        "--restart to plan anew"
    )


def _are_splits(folders: list[bytes], splits: bool | None) -> bool:
    return bool(folders) and all(name in SPLITS for name in folders) if splits is None else splits


def _top(root: bytes) -> tuple[list[bytes], list[bytes], list[bytes]]:
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
        _check_loose(files, root)
    walk = _Walk(root)
    walk.run()
    order = sorted(range(len(walk.keys)), key=walk.keys.__getitem__)
    keys = [walk.keys[i] for i in order]
    names = sorted(folders) if classes is None else list(classes)
    present = set(folders)
    return Listing(
        root=root,
        keys=keys,
        sizes=np.array(walk.sizes, np.int64)[order],
        mtimes=np.array(walk.mtimes, np.int64)[order],
        classes=tuple(map(os.fsdecode, names)) if folders else None,
        absent=tuple(os.fsdecode(n) for n in names if n not in present) if folders else (),
        problems=sorted(walk.problems),
        ignored=walk.ignored,
        notes=_twins([*keys, *folders]),
    )


class _Walk:
    """Every file below a folder. Links are followed, unless they lead into themselves."""

    def __init__(self, root: bytes) -> None:
        self.root = root
        self.keys: list[bytes] = []
        self.sizes = array("q")  # 8 bytes a file, where a list of ints takes 40
        self.mtimes = array("q")
        self.problems: list[tuple[bytes, str]] = []
        self.ignored = 0

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
        try:
            status = entry.stat()  # of what a link leads to
        except FileNotFoundError:
            self.problems.append((key, "is a link to nothing"))
            return
        except OSError as error:
            self.problems.append((key, f"cannot be followed: {error.strerror}"))
            return
        mode, size = status.st_mode, status.st_size
        if stat.S_ISREG(mode) and 0 < size <= _MAX_FILE:
            self.keys.append(key)
            self.sizes.append(size)
            self.mtimes.append(_mtime(status))
        elif stat.S_ISDIR(mode):
            here = _identity(status)
            if here in above:
                self.problems.append((key, "is a link to a folder that contains it"))
            else:
                stack.append((key + b"/", (*above, here)))
        elif not stat.S_ISREG(mode):
            self.problems.append((key, f"is a {_special(mode)}, not a file; it was not opened"))
        elif size == 0:
            self.problems.append((key, "is empty"))
        else:
            self.problems.append((key, f"is {size:,} bytes; the limit is {_MAX_FILE:,}"))


def _mtime(status: os.stat_result) -> int:
    """Nanoseconds, as 64 bits with a sign hold them: ext4 knows years up to 2446."""
    return (status.st_mtime_ns + (1 << 63)) % (1 << 64) - (1 << 63)


def _special(mode: int) -> str:
    for test, name in (
        (stat.S_ISFIFO, "FIFO"),
        (stat.S_ISSOCK, "socket"),
        (stat.S_ISBLK, "device"),
    ):
        if test(mode):
            return name
    return "device"


def _check_loose(files: list[bytes], root: bytes) -> None:
    loose = sorted(n for n in files if not n.startswith(b".") and n not in _IGNORED)
    if loose:
        raise SourceError(
            f"{printable(root)}: {len(loose):,} files lie beside the class folders; move them into "
            f"one, or away:\n{listed([(name, 'in no class folder') for name in loose])}"
        )


def _check_some(listing: Listing, shown: str) -> None:
    if not listing.keys:
        found = f"\n{listed(listing.problems)}" if listing.problems else ""
        raise SourceError(f"{shown}: there are no images in it{found}")


def _twins(names: Iterable[bytes]) -> list[str]:
    """Names that look the same, since they differ only by Unicode normalisation."""
    seen: dict[str, bytes] = {}
    twins = []
    for name in names:
        if name.isascii():
            continue
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
