"""Files and folders that are packed: how they are found, and how one is read.

Nothing is opened to find them: names, sizes and times come from one walk with `os.scandir`. What is
read must be what was listed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
import re
import stat
import unicodedata
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from ...errors import SourceChangedError, SourceError, printable
from ...formats.sample import MAX_BODY, MAX_HEAD, Sample
from ...images.filetype import ALL_ENDINGS, image_type
from ...names import key_bytes, key_text
from ...units import show_count
from .base import (
    FileState,
    FolderNames,
    Listing,
    Plain,
    Problem,
    Read,
    ReadFile,
    Rejected,
    Source,
    SourceFolder,
    SourceRequest,
    Walked,
    bytewise,
    listed,
)

SPLITS = frozenset((b"train", b"val", b"valid", b"validation", b"test"))
MAX_FILE = MAX_BODY - MAX_HEAD  # bytes of a file that a record holds in any case
_TAILS = {f".{name}"[-4:].encode() for ending in ALL_ENDINGS for name in (ending, ending.upper())}
_tail = operator.itemgetter(slice(-4, None))
_DOT = ord(".")
# What systems leave, in lower case; so are hidden files. First of file managers, then the folders
# of thumbnails, bins and snapshots of NAS, and what Windows, Linux, macOS and Python leave.
_OF_MANAGERS = frozenset((b"thumbs.db", b"desktop.ini"))
_OF_SYSTEMS = frozenset(
    (b"@eadir", b"#recycle", b"@recycle", b"@recently-snapshot", b"$recycle.bin",
     b"system volume information", b"lost+found", b"__macosx", b"__pycache__")
)  # fmt: skip
_LEFT = _OF_MANAGERS | _OF_SYSTEMS
_FIRST = frozenset(b"".join(name[:1] + name[:1].upper() for name in _LEFT))
# What `shardio index` writes, and the commands that change what it indexed.
_OWN = re.compile(
    rb"manifest(-[0-9a-f]{16})?\.json|\d{5,}-[0-9a-f]{8}\.index|"
    rb"(excluded|sources)-[0-9a-f]{8}\.bin|overlay-\d{5,}-[0-9a-f]{8}\.shard"
)
_MANIFEST = b"manifest.json"
_BESIDE_IT = frozenset((b"tags.json", b"rejected.jsonl"))  # ours beside a manifest alone
_ENDS = (b"json", b"ndex", b".bin", b"hard")
_SHOWN = 20  # names that are noted
_LOOKED = 3  # folders that are looked into to tell what a folder is
Above = tuple[tuple[int, int], ...]  # devices and inodes of a folder and those it lies in


class FileSource(Source):
    """A source whose records lie in files below one folder, which is open while they are read."""

    def __init__(self, root: SourceFolder) -> None:
        self._root = root

    @contextlib.contextmanager
    def open(self) -> Iterator[Read]:
        """Open the folder, and give the function that reads a record."""
        with self._root.opened() as read:
            yield functools.partial(self._read, read)

    def describe(self) -> Plain:
        """Say whether the folder is one in archives, which are then listed to open it again."""
        return {"archives": True} if self._root.in_archives else {}

    def will_need(self, place: int) -> None:
        """Announce the files of a record."""
        for path, size, _ in self._files(place):
            self._root.will_need(path, size)

    def _read(self, read: ReadFile, place: int) -> Sample:
        raise NotImplementedError

    def _files(self, place: int) -> Iterable[tuple[bytes, int, int]]:
        """Return path, bytes and time of change of each file of a record, as listed."""
        raise NotImplementedError


def is_ignored(name: bytes) -> bool:
    """Return True for a hidden file or folder, and for what systems leave."""
    return name[0] == _DOT or (name[0] in _FIRST and name.lower() in _LEFT)


def is_of_system(name: bytes) -> bool:
    """Return True for a folder that a NAS or a system leaves, and that is named where it is."""
    return name.lower() in _OF_SYSTEMS


def ignores_nothing(name: bytes) -> bool:
    """Return False, of `--no-ignore`."""
    return False


def note_ignored(names: Iterable[bytes]) -> list[str]:
    """Return a note on those of the ignored files and folders that systems left; by their names."""
    counts = Counter(printable(name) for name in names if is_of_system(name))
    if not counts:
        return []
    shown = ", ".join(f"{n:,} x {name}" if n > 1 else name for name, n in sorted(counts.items()))
    return [f"ignored, with all that is in them: {shown}; `shardio pack --no-ignore` packs them"]


class DiskFolder:
    """A folder of this machine. ignores: by its name, that a file or folder is none of the data."""

    in_archives = False

    def __init__(self, path: bytes, ignores: Callable[[bytes], bool] = is_ignored) -> None:
        self.path, self.ignores = os.path.abspath(path), ignores

    def top(self) -> FolderNames:
        """Return the names in it. Raises SourceError.

        Ignored folders are no classes, nor are the links to a folder above: one more would shift
        all labels behind it. A folder that cannot be listed is one: its label must not depend on
        permissions.
        """
        root, found = self.path, FolderNames([], [], [], [])
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
                        found.files.append(entry.name)
                    elif self.ignores(entry.name):
                        found.ignored.append(entry.name)
                    elif entry.is_symlink() and identity(entry.stat()) in above:
                        found.loops.append(entry.name)
                    else:
                        found.folders.append(entry.name)
        except OSError as error:
            raise SourceError(f"{printable(root)}: cannot be listed: {error.strerror}") from None
        return found

    def below(self, path: bytes) -> DiskFolder:
        """Return a folder in it."""
        return DiskFolder(os.path.join(self.path, path), self.ignores)

    def is_there(self) -> bool:
        """Return True if it is a folder."""
        return os.path.isdir(self.path)

    def walk(self, *, empty: bool = False) -> Walked:
        """Find every file below it."""
        return Walk(self.path, self.ignores, empty=empty).run()

    def look(self, paths: Iterable[bytes]) -> Iterator[FileState]:
        """Yield what each path leads to. Raises OSError."""
        with opened_folder(self.path) as folder:
            before, seen = b"", FileState(0, 0, MISSING)
            for path in paths:
                if path != before:  # rows of one file are neighbours
                    before, seen = path, _look(folder, path)
                yield seen

    @contextlib.contextmanager
    def opened(self) -> Iterator[ReadFile]:
        """Open the folder, and give the function that reads a file of it. Raises SourceError."""
        with contextlib.ExitStack() as stack:
            try:
                folder = stack.enter_context(opened_folder(self.path))
            except OSError as error:
                why = f"{printable(self.path)}: cannot be opened: {error.strerror}"
                raise SourceError(why) from None
            yield functools.partial(read_file, folder)

    def will_need(self, path: bytes, size: int) -> None:
        """Do nothing: each file is read at once."""


def folder_of(request: SourceRequest) -> SourceFolder:
    """Return the folder that is to be packed."""
    if request.files is not None:
        return request.files
    return DiskFolder(request.path, is_ignored if request.ignore else ignores_nothing)


def folder_of_split(request: SourceRequest, split: str) -> SourceFolder:
    """Return the folder of a split that is to be packed; of "" the whole."""
    return folder_of(request).below(key_bytes(split)) if split else folder_of(request)


_ARCHIVES = re.compile(rb"(?i)\.(tar|zip|tar\.(gz|bz2|xz|zst|zstd)|tgz|tbz2?|txz|tzst)\Z")
BESIDE = (
    "it is an archive, and images lie beside it. If they were unpacked from it, move one of both "
    "away; or give the archive alone to `shardio pack`"
)


def is_archive(name: bytes) -> bool:
    """Return True if a file is an archive that can be packed as a folder, by its name."""
    return _ARCHIVES.search(name) is not None


def without_suffix(name: bytes) -> bytes:
    """Return the name of an archive without its suffix."""
    return _ARCHIVES.sub(b"", name)


def no_image(data: bytes) -> str:
    """Return why a file is no image."""
    return f"is not an image: it begins with '{printable(data[:12])}'"


def check_image(data: bytes) -> bytes:
    """Return the bytes of an image. Raises Rejected for those of another file."""
    if image_type(data) is None:
        raise Rejected(no_image(data))
    return data


def read_file(folder: int, path: bytes, size: int, mtime_ns: int) -> bytes:
    """Return the bytes of a listed file. Raises Rejected, SourceChangedError.

    `folder`: a descriptor of the folder that `path` is relative to; size and mtime were listed.
    O_NONBLOCK: if the file was replaced by a FIFO since the plan was made, opening must not wait.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        raise changed(path, "it is gone") from None
    except OSError as error:
        raise Rejected(f"cannot be opened: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if status.st_size != size or mtime(status) != mtime_ns:
            raise changed(path, "its size or time of change is another")
        data = os.read(descriptor, size + 1)
        while len(data) < size and (more := os.read(descriptor, size - len(data))):
            data += more
        if mtime(os.fstat(descriptor)) != mtime_ns:
            raise changed(path, "it was written to while it was read")
    except OSError as error:
        raise Rejected(f"cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)
    if len(data) != size:
        raise changed(path, f"{len(data):,} bytes were read, expected {size:,}")
    return data


def mtime(status: os.stat_result) -> int:
    """Return the time of change in ns, as int64 holds it: ext4 knows years up to 2446."""
    return (status.st_mtime_ns + (1 << 63)) % (1 << 64) - (1 << 63)


@contextlib.contextmanager
def opened_folder(root: bytes) -> Iterator[int]:
    """Give a descriptor of a folder, as long as it is needed."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        os.close(folder)


def changed(path: bytes, what: str) -> SourceChangedError:
    """Return the error for a file that is not the one that was listed."""
    return SourceChangedError(
        f"{printable(path)}: changed since the packing was planned: {what}. Run it again with "
        "--restart to plan anew"
    )


def not_images(names: Sequence[bytes]) -> list[bytes]:
    """Return the names, or paths, that are not plainly names of images: nearly always none."""
    odd = set(map(_tail, names)) - _TAILS  # 0.05 us a name
    return [name for name in names if name[-4:] in odd] if odd else []


def are_splits(folders: Sequence[bytes], splits: bool | None) -> bool:
    """Tell whether folders at the top are splits: by their names, unless `splits` says so."""
    return bool(folders) and all(name in SPLITS for name in folders) if splits is None else splits


def split_folders(
    source: SourceFolder,
    shown: str,
    inside: FolderNames,
    splits: bool | None,
    advise: Callable[[Collection[bytes]], str] = lambda folders: "",
) -> dict[str, SourceFolder]:
    """Return the folder of each split; of "" the source itself, where there are none.

    inside: what lies at the top of the source. advise: what to do where files lie beside splits,
    by the folders in one. Raises SourceError, also for such files.
    """
    folders, files, loops, _ = inside
    if not are_splits(folders, splits):
        return {"": source}
    if not folders:
        raise SourceError(f"{shown}: there are no folders in it that could be splits")
    first = source.below(min(folders)).top().folders
    check_loose([*files, *loops], source, advise(first))  # no split's walk would meet the links
    return {key_text(name): source.below(name) for name in sorted(folders)}


def first_names(folder: SourceFolder) -> list[bytes]:
    """Return the paths of files in a folder, and in the first few within it: there may be millions.

    Raises SourceError for the folder itself.
    """
    folders, names, *_ = folder.top()
    for inner in sorted(folders)[:_LOOKED]:
        with contextlib.suppress(SourceError):  # one that cannot be listed: its problem, later
            names += [inner + b"/" + name for name in folder.below(inner).top().files]
    return names


def note_top(found: dict[str, Listing], folder: SourceFolder, inside: FolderNames) -> None:
    """Count and name what is ignored in a folder that no walk meets.

    found: the listings, of which the first takes it; inside: what lies in the folder.
    """
    ignored = [*inside.ignored, *filter(folder.ignores, inside.files)]
    name, first = next(iter(found.items()))
    notes = [*note_ignored(inside.ignored), *first.notes]
    found[name] = replace(first, ignored=first.ignored + len(ignored), notes=notes)


def _above(root: bytes) -> Above:
    """Return the identities of a folder and all it lies in."""
    found, here = [], os.path.realpath(root)
    while True:
        with contextlib.suppress(OSError):  # one that this user may not look at
            found.append(identity(os.stat(here)))
        if here == os.path.dirname(here):
            return tuple(found)
        here = os.path.dirname(here)


def identity(status: os.stat_result) -> tuple[int, int]:
    """Return what tells a file or folder from all others: its device and inode."""
    return status.st_dev, status.st_ino


class Walk:
    """Every file below a folder. Links are followed, unless they lead into themselves.

    empty: files without a byte are files like others, and no problems.
    """

    def __init__(
        self, root: bytes, ignores: Callable[[bytes], bool] = is_ignored, *, empty: bool = False
    ) -> None:
        self.root, self._ignores = root, ignores
        self._least = 0 if empty else 1
        self.keys: list[bytes] = []
        self.sizes = array("q")  # 8 bytes a file, where a list of ints takes 40
        self.mtimes = array("q")
        self.problems: list[Problem] = []
        self.ignored = 0
        self.of_systems: list[bytes] = []  # names: few, while hidden files may be many

    def run(self) -> Walked:
        """Visit every file and folder."""
        # a folder to list: its prefix in keys, and the device and inode of all folders above it
        stack: list[tuple[bytes, Above]] = [(b"", _above(self.root))]
        while stack:
            prefix, above = stack.pop()
            files, folders = len(self.keys), len(stack)
            try:
                with os.scandir(os.path.join(self.root, prefix)) as entries:
                    for entry in entries:
                        self._visit(entry, prefix, above, stack)
            except OSError as error:
                self.problems.append((prefix, f"cannot be listed: {error.strerror}"))
            self._sort(files)
            stack[folders:] = sorted(stack[folders:], reverse=True)
        self._sort(0)  # nothing is left to do, but where files lie beside folders
        sizes, mtimes = np.array(self.sizes, np.int64), np.array(self.mtimes, np.int64)
        notes = note_ignored(self.of_systems)
        return Walked(self.keys, sizes, mtimes, self.problems, self.ignored, notes)

    def _sort(self, first: int) -> None:
        """Sort the files from one on by their keys."""
        keys, sizes, mtimes = self.keys[first:], self.sizes[first:], self.mtimes[first:]
        order = bytewise(keys)
        if isinstance(order, range):
            return
        self.keys[first:] = [keys[i] for i in order]
        self.sizes[first:] = array("q", (sizes[i] for i in order))
        self.mtimes[first:] = array("q", (mtimes[i] for i in order))

    def _visit(
        self,
        entry: os.DirEntry[bytes],
        prefix: bytes,
        above: Above,
        stack: list[tuple[bytes, Above]],
    ) -> None:
        name = entry.name
        key = prefix + name
        if self._ignores(name):
            self.ignored += 1
            if is_of_system(name):
                self.of_systems.append(name)
            return
        if not prefix and (is_own(name) or (name in _BESIDE_IT and _is_indexed(entry))):
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
            here = identity(status)
            if here in above:
                self.problems.append((key, LOOP))
            else:
                stack.append((key + b"/", (*above, here)))
        elif (why := unfit(status)) is not None:
            self.problems.append((key, why))


def _is_indexed(entry: os.DirEntry[bytes]) -> bool:
    """Return whether a manifest lies beside a file."""
    return os.path.lexists(os.path.join(os.path.dirname(entry.path), _MANIFEST))


def is_own(name: bytes) -> bool:
    """Tell whether a file on top is one of `shardio index`."""
    return name[-4:] in _ENDS and _OWN.fullmatch(name) is not None  # 0.1 us, not 0.3


MISSING = "there is no such file"
LOOP = "is a link to a folder that contains it"


def unfit(status: os.stat_result) -> str | None:
    """Return why this can be no file of a record; None when it can."""
    mode, size = status.st_mode, status.st_size
    if not stat.S_ISREG(mode):
        return f"is a {_special(mode)}, not a file; it was not opened"
    return unfit_size(size)


def unfit_size(size: int) -> str | None:
    """Return why a file of so many bytes can be none of a record; None when it can."""
    if size == 0:
        return "is empty"
    return None if size <= MAX_FILE else f"is {size:,} bytes; the limit is {MAX_FILE:,}"


def _look(folder: int, path: bytes) -> FileState:
    """Return what a path leads to. folder: a descriptor of the folder it is relative to."""
    try:
        status = os.stat(path, dir_fd=folder)
        return FileState(status.st_size, mtime(status), unfit(status))
    except FileNotFoundError:
        why = MISSING
        with contextlib.suppress(OSError):
            os.stat(path, dir_fd=folder, follow_symlinks=False)
            why = "is a link to nothing"
    except OSError as error:
        why = f"cannot be followed: {error.strerror}"
    except ValueError:
        why = "its path has a byte of 0"
    return FileState(0, 0, why)


def first_sign(path: bytes) -> bytes:
    """Return the first byte of a text file that is no space. Raises SourceError."""
    try:
        with open(path, "rb") as file:
            return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    except OSError as error:
        raise SourceError(f"{printable(path)}: cannot be read: {error.strerror}") from None


def _special(mode: int) -> str:
    kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "device")


def check_loose(files: list[bytes], folder: SourceFolder, advice: str = "") -> None:
    """Raise SourceError, with advice, for files beside class folders, but for hidden ones."""
    own = _BESIDE_IT if _MANIFEST in files else frozenset[bytes]()
    loose = sorted(
        name for name in files if not (folder.ignores(name) or is_own(name) or name in own)
    )
    if loose:
        whys = [(name, BESIDE if is_archive(name) else "in no class folder") for name in loose]
        way = "move them into one, or away"
        if not isinstance(folder, DiskFolder):
            first, *others = sorted(folder.top().folders)
            inner = printable(os.path.join(folder.path, first))
            way = f"give the folder of the classes as SRC, such as {inner}"
            if others:
                way = "--label '^([^/]+)/' --on-error skip packs the folders, and leaves these out"
        raise SourceError(
            f"{printable(folder.path)}: {show_count(len(loose), 'file')} beside class folders; "
            f"{way}:\n"
            f"{listed(whys)}" + (f"\n{advice}" if advice else "")
        )


def unicode_duplicates(names: Iterable[bytes]) -> list[str]:
    """Return notes on names that look the same, since they differ only by Unicode normalisation."""
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
