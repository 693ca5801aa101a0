"""Sources that lie in archives: SRC is one, or a folder of some, or a path through one.

Tars may be WebDataset's instead, and read as such: by groups of files that differ only in their
endings, `a.jpg a.cls`. What can be both, an error asks.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ...errors import DamageError, OptionError, SourceError, StorageError, printable
from ...formats import claims
from ...formats.foreign.webdataset import INTS, split_name
from ...names import key_bytes, key_text
from ...storage.base import Location
from ...storage.location import locate
from ...storage.remote import RemoteLocation
from ...units import show_count
from .archives.extent import Extent, extent_in, extent_of
from .archives.folder import ArchiveFolder, open_archive, open_folder_of_archives
from .archives.tree import is_plain_tar, look_into
from .arrays import inflating_of, names_images
from .base import SourceFolder, SourceRequest
from .files import (
    DiskFolder,
    first_names,
    folder_of,
    ignores_nothing,
    is_archive,
    is_ignored,
    not_images,
    without_suffix,
)
from .store_folder import StoreFolder
from .store_reader import StoredObject, look_at
from .trees import are_asked

_Archive = bytes | StoredObject
FOLDERS = ("imagefolder", "files", "trees", "arrays")  # kinds whose files are found by walking
_MEMBERS = 10_000  # members of a tar that are looked at; all, where none is an image
_MEMBERS_FAR = 250  # of a tar in a store; then `_MEMBERS`: what lies between them is read, too
_SHOWN = 10  # names in a message
_DIGITS = re.compile(rb"(\d+)\Z")


def find_archives(request: SourceRequest) -> SourceRequest | None:
    """Return the request with the folder that archives are; None where none is to be packed so.

    Raises OptionError, SourceError.
    """
    if request.kind is not None and request.kind not in FOLDERS:
        return None
    path, location = request.path.rstrip(b"/") or b"/", request.location
    if not location.remote and os.path.isdir(path):
        return find_in_folder(request, folder_of(request))
    through = _through(path, location)
    if through is None:
        return None
    archive, inner = through
    if not inner and _may_be_grouped(request) and _is_grouped([archive], extent_of, request):
        return None
    whole, inner = open_archive(archive, inflating_of(request), inner, ignore=request.ignore)
    if not inner:
        return replace(request, files=whole if request.splits else whole.unwrapped())
    folder = whole.below(inner)
    (seen,) = whole.look([inner])
    if seen.why is None:  # of labels: whoever reads it knows its kind
        return None
    if not folder.is_there():
        raise SourceError(
            f"{request.shown}: there is no folder {printable(inner)}/ in "
            f"{printable(os.path.basename(whole.path))}{some_folders(whole)}"
        )
    return replace(request, files=folder)


def root_of(request: SourceRequest) -> SourceFolder:
    """Return the folder that the paths in a listing refer to. Raises OptionError."""
    if request.root is None:
        root = os.path.dirname(os.path.abspath(request.path))
    else:
        root = os.fsencode(request.root)
    if (found := root_in_archive(root, request)) is not None:
        return found
    location = locate(os.fsdecode(root), request.storage)
    return StoreFolder(location) if isinstance(location, RemoteLocation) else DiskFolder(root)


def root_in_archive(root: bytes, request: SourceRequest) -> ArchiveFolder | None:
    """Return the folder of a root that is an archive, or lies in one, or holds archives alone.

    None where it is another.
    """
    if os.path.isdir(root):
        folder = DiskFolder(root)
        try:
            folders, files, *_ = folder.top()
        except SourceError:
            return None  # its reader says so
        names = [name for name in files if not folder.ignores(name)]
        if folders or not names or not all(map(is_archive, names)):
            return None
        return open_folder_of_archives(folder, inflating_of(request))
    through = _through(root, locate(os.fsdecode(root), request.storage))
    if through is None:
        return None
    whole, inner = open_archive(through[0], inflating_of(request), through[1])
    return whole.below(inner)


def _through(path: bytes, location: Location) -> tuple[_Archive, bytes] | None:
    """Return the archive that a path is, or leads through, and the path in it; None where none."""
    if isinstance(location, RemoteLocation):
        return _split_url(location)
    return None if os.path.isdir(path) else split_path(path)


def split_path(path: bytes) -> tuple[bytes, bytes] | None:
    """Return what `_through` does, of a path of this machine."""
    inner: list[bytes] = []
    path = path.rstrip(b"/")
    while path and not os.path.lexists(path):
        path, _, name = path.rpartition(b"/")
        path = path.rstrip(b"/")
        inner.insert(0, name)
    return (path, b"/".join(inner)) if os.path.isfile(path) and is_archive(path) else None


def _split_url(location: RemoteLocation) -> tuple[StoredObject, bytes] | None:
    """Return what `_through` does, of a URL: the first object on the way by such a name."""
    ways: list[tuple[RemoteLocation, str, str]] = []
    inner: list[str] = []
    while True:
        location, name = location.above()
        if not name:
            break
        if is_archive(key_bytes(name)):
            ways.insert(0, (location, name, "/".join(inner)))
        inner.insert(0, name)
    for above, name, below in ways:
        with contextlib.suppress(FileNotFoundError):
            return look_at(above, name), key_bytes(below)
    if ways and location.store.scheme in ("http", "https"):
        where = ways[0][0].store.show(ways[0][1])
        raise SourceError(f"{where}: the server has no such file. Check the URL")
    return None


def find_in_folder(request: SourceRequest, folder: SourceFolder) -> SourceRequest | None:
    """Return the request with the folder that the archives in a folder are; None without such."""
    if not isinstance(folder, (DiskFolder, StoreFolder)) or request.kind in ("files", "arrays"):
        return None  # a zip may be one of several files of a record
    names = [name for name in first_names(folder) if not folder.ignores(os.path.basename(name))]
    archives = sorted(filter(is_archive, names))
    if not archives or len(not_images(names)) < len(names):
        return None  # those beside images are problems
    if claims(map(key_text, names)).keys() - {"webdataset"}:
        return None  # which format is meant, is asked
    if _may_be_grouped(request) and _is_grouped(archives, partial(extent_in, folder), request):
        return None
    found = open_folder_of_archives(folder, inflating_of(request))
    return replace(request, files=found if request.splits else found.unwrapped())


def _may_be_grouped(request: SourceRequest) -> bool:
    """Tell whether nothing was said of what tars hold: `--fields NAME=FOLDER/` says folders."""
    return request.kind is None and not are_asked(request)


def _is_grouped(
    archives: Sequence[Any], extent: Callable[[Any], Extent], request: SourceRequest
) -> bool:
    """Tell whether tars are WebDataset's, by the first members of the first one.

    extent: makes one of an archive. Raises OptionError where they might be both.
    """
    paths = [key_bytes(one.name) if isinstance(one, StoredObject) else one for one in archives]
    tars = all(map(is_plain_tar, paths))
    members = _first_members(extent(archives[0]), request) if tars else set()
    if not members:
        return False
    images = {key for key, ending in members if not not_images([b"." + ending])}
    several = Counter(key for key, _ in members)
    grouped = {key for key in images if several[key] > 1}
    if not images:
        return not any(names_images(key + b"." + ending) for key, ending in members)
    in_folders = len({key.partition(b"/")[0] for key in images if b"/" in key})
    if not grouped:
        if not in_folders and len(paths) > 1 and _are_numbered(paths):
            raise OptionError(
                f"{request.shown}: its tars hold images without folders, and are numbered, such as "
                f"{printable(paths[0])}. So it cannot be told what they are; say which:\n"
                "  --from imagefolder  each tar is a class, of its name\n"
                "  --from webdataset   shards of one dataset, without labels"
            )
        return False
    numbered = any(ending.decode("latin-1").lower() in INTS for _, ending in members)
    half = 2 * len(grouped) >= len(images)
    if half and in_folders > 1 and not numbered:
        raise OptionError(
            f"{request.shown}: images in its folders have files beside them that differ only in "
            f"their endings, such as those of {printable(min(grouped))}. So it cannot be told what "
            "a record is; say which:\n"
            "  --from imagefolder  one image, labelled by its folder; other files are problems\n"
            "  --from webdataset   all files of one name; labels come from .cls files only"
        )
    return half


def _first_members(extent: Extent, request: SourceRequest) -> set[tuple[bytes, bytes]]:
    """Return keys and endings of the first members of a tar; none if archives are among them."""
    far = isinstance(extent.location, StoredObject)
    most = (_MEMBERS_FAR, _MEMBERS) if far else (_MEMBERS, None)

    def are_enough(paths: list[bytes]) -> bool:
        """Tell whether no images would come later; nor other folders, which would be classes."""
        others = len(not_images(paths))
        folders = {path.partition(b"/")[0] for path in paths if b"/" in path}
        return others < len(paths) and not (far and others and len(folders) == 1)

    try:
        paths = look_into(extent, most, are_enough)
    except (DamageError, SourceError, StorageError):
        return set()  # whoever reads it as a folder says so
    ignores = is_ignored if request.ignore else ignores_nothing
    seen = [path for path in paths if not any(map(ignores, path.split(b"/")))]
    if any(map(is_archive, seen)):
        return set()
    return {pair for path in seen if (pair := split_name(path)) is not None}


def _are_numbered(paths: Sequence[bytes]) -> bool:
    """Tell whether names end in numbers that follow one another, as those of shards do."""
    names = [without_suffix(os.path.basename(path)) for path in paths]
    found = [_DIGITS.search(name) for name in names]
    if not all(found):
        return False
    numbers = sorted(int(one[1]) for one in found if one is not None)
    return numbers == list(range(numbers[0], numbers[0] + len(numbers))) and numbers[0] < 2


def file_path(request: SourceRequest, path: bytes) -> str:
    """Return the path of a file of the folder that is packed, as it is given to `pack`."""
    folder = request.files
    if isinstance(folder, ArchiveFolder):
        return f"{folder.archive_of(path)}/{printable(path)}"
    return printable(os.path.join(request.path, path), 4096)


def some_folders(folder: SourceFolder) -> str:
    """Say what lies at the top of an archive, its folders first; nothing of other folders."""
    if not isinstance(folder, ArchiveFolder):
        return ""
    folders, files, *_ = folder.top()
    names = sorted(name + b"/" for name in folders) or sorted(files)
    what = show_count(len(names), "folder" if folders else "file")
    more = ", ..." if len(names) > _SHOWN else ""
    return f"; at its top {what}: {', '.join(map(printable, names[:_SHOWN]))}{more}"
