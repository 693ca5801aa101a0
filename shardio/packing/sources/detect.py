"""Detecting which kind of source lies at a path: by names and first bytes, or an error asks."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import replace

from ...errors import DamageError, OptionError, SourceError, printable
from ...formats import FOREIGN, claims
from ...formats.manifest import MANIFEST, SPLITS, load
from ...images.filetype import image_type
from ...names import key_text
from ...storage.location import locate
from ...storage.lock import JOURNAL
from ...storage.remote import RemoteLocation
from ...units import show_count
from .archived import find_archives, find_in_folder, split_path
from .archives.folder import ArchiveFolder
from .arrays import is_array_file, refuse_file
from .arrays import lies_there as lies_in_arrays
from .base import SourceFolder, SourceRequest
from .coco import is_coco, refuse_folder
from .files import are_splits, first_names, folder_of, not_images
from .grouped import lies_there as lies_grouped
from .listing import is_listing
from .plain_file import plain_file
from .store_folder import folder_in_store
from .trees import lies_there as lies_in_trees

_UNREAD = re.compile(rb"(?i)\.(7z|rar|z\d\d|zip\.\d+|7z\.\d+)\Z")


def detect(request: SourceRequest) -> SourceRequest:
    """Return a request with its kind, by what lies there. Raises OptionError, SourceError."""
    if (archived := find_archives(request)) is not None:
        return _folder(archived)
    kind = _kind(request)
    return _folder(request) if kind == "imagefolder" else replace(request, kind=kind)


def detect_by_url(request: SourceRequest) -> SourceRequest:
    """Return a request for an object store with its kind. Raises OptionError, SourceError."""
    if (archived := find_archives(request)) is not None:
        return archived if request.kind else _folder(archived)
    kind, location = request.kind, request.location
    if kind is None and (location.exists(MANIFEST) or location.exists(SPLITS)):
        kind = "dataset"
    if kind == "dataset":
        return replace(request, kind=kind)
    if kind in ("listing", "coco"):
        raise OptionError(
            f"{request.shown}: --from {kind}: copy that file, and give the URL of its images as "
            "--root"
        )
    assert isinstance(location, RemoteLocation)
    above, name = location.above()
    claimed = next(iter(claims([name])), None) if kind is None else kind
    if claimed in FOREIGN and claimed != "imagefolder" and (kind is not None or above.exists(name)):
        return replace(request, kind=claimed)
    folder = folder_in_store(request)
    found = replace(request, files=folder)
    try:
        folders, files, *_ = folder.top()
    except OptionError as error:  # it cannot be listed
        if kind is not None:
            raise
        raise OptionError(f"{error}. For a dataset, there is no {MANIFEST}") from None
    if (archived := find_in_folder(found, folder)) is not None:
        return archived if kind else _folder(archived)
    if kind is not None:
        return found
    if not folders and not files:
        if name in (MANIFEST, SPLITS) or name.endswith(".shard"):
            load(location)  # names the folder
        what = "no object is below this URL. Check the bucket and the path"
        if name and above.exists(name):
            what = (
                "it is an object, no folder. Expected the URL of a folder, or of a file of another "
                "format, such as a .tar; copy a listing, and give the URL of its images as --root"
            )
        raise SourceError(f"{request.shown}: {what}")
    return _folder(found)


def _kind(request: SourceRequest) -> str:
    path = request.path
    if os.path.isdir(path):
        if os.path.lexists(os.path.join(path, SPLITS.encode())):
            return "dataset"
        if os.path.lexists(os.path.join(path, MANIFEST.encode())):
            try:
                dataset = load(locate(os.fsdecode(path)))
            except DamageError as error:
                raise DamageError(
                    f"{error}\nIf it is none of shardio's, --from imagefolder, or --from files, "
                    "packs what lies beside it"
                ) from None
            # In place it is the folder itself; --root says that only its index lies here.
            own = dataset.format == "imagefolder" and request.root is None
            return "imagefolder" if own else "dataset"
        return "imagefolder"  # or what `_folder` finds
    there = os.path.lexists(path)
    if not there and split_path(path) is None:
        raise SourceError(f"{request.shown}: there is no such file or directory")
    with contextlib.nullcontext(path) if there else plain_file(path, request) as file:
        if is_coco(file):
            return "coco"
        if is_listing(file):
            return "listing"
        if is_array_file(file):
            return "arrays"
    claimed = next(iter(claims([key_text(os.path.basename(path))])), None)
    if claimed is None:
        refuse_file(request)
        if _UNREAD.search(path):
            raise SourceError(
                f"{request.shown}: an archive that is not read; .tar, .zip and compressed tars "
                "are. Unpack it, or make one of these of it"
            )
        _refuse_part(path, request.shown)
        raise SourceError(
            f"{request.shown}: expected a folder of images, a listing, or a file of another "
            "format, and this file is none; --from says what it is"
        )
    return claimed


def _folder(request: SourceRequest) -> SourceRequest:
    """Detect what a folder without a manifest is, by the names at its top."""
    folder = folder_of(request)
    if request.files is None and os.path.lexists(os.path.join(request.path, os.fsencode(JOURNAL))):
        load(locate(os.fsdecode(request.path)))  # says that its packing is not finished
    folders, files, *_ = folder.top()
    others = not_images(files)
    refuse_folder(request, [*others, *folders])
    if lies_in_trees(request, folders):
        return replace(request, kind="trees")
    foreign = _foreign_folder(request)
    if foreign is not None and isinstance(folder, ArchiveFolder):
        raise SourceError(
            f"{request.shown}: files of {foreign} lie in it; unpack it, and pack the folder of "
            "these files"
        )
    if foreign is not None:
        return replace(request, kind=foreign)
    if lies_in_arrays(request, folders, files):
        return replace(request, kind="arrays")
    splits = are_splits(folders, request.splits)
    if lies_grouped(folder, files, others, folders if splits else ()):
        return replace(request, kind="files")
    names = tuple(key_text(name) for name in sorted(folders)) if splits else ("",)
    return replace(request, kind="imagefolder", detected_splits=names)


def _foreign_folder(request: SourceRequest) -> str | None:
    """Return the format of the files in a folder, or in folders within it; None where none is.

    Looks at few names, since there may be millions; at all for images, if a format was found.
    Raises OptionError where several formats do, or where images lie there too: they would be left
    out without a word.
    """
    top = folder_of(request)
    names = [os.path.basename(name) for name in first_names(top)]
    names = [name for name in names if not name.startswith(b".")]
    others = not_images(names)
    claimed = claims(map(key_text, others))
    images = len(names) - len(others)
    if claimed and not images:
        images = _images_below(top)
    if len(claimed) + bool(claimed and images) > 1:
        found = [f"{len(some):,} of {name}" for name, some in claimed.items()]
        kinds = [*claimed]
        if images:
            found.append(show_count(images, "image"))
            kinds.append("imagefolder")
        raise OptionError(
            f"{request.shown}: holds files of several formats: {', '.join(found)}; choose --from "
            f"{' or '.join(kinds)}"
        )
    return next(iter(claimed), None)


def _images_below(folder: SourceFolder) -> int:
    """Count the images in the first folder that has some, of a folder and all below it."""
    folders: Sequence[bytes] = ()
    with contextlib.suppress(SourceError):  # one that cannot be listed: its problem, later
        folders, files, *_ = folder.top()
        names = [name for name in files if not name.startswith(b".")]
        if images := len(names) - len(not_images(names)):
            return images
    found = (_images_below(folder.below(name)) for name in folders if not name.startswith(b"."))
    return next(filter(None, found), 0)


def _refuse_part(path: bytes, shown: str) -> None:
    """Raise SourceError for one file of those that a folder is packed by: an image, or a shard."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        kind = image_type(file.read(32))
        here = printable(os.path.dirname(path) or b".")
        if kind is not None:
            raise SourceError(f"{shown}: one image ({kind}); give the folder that it is in, {here}")
        if os.path.lexists(os.path.join(os.path.dirname(path), os.fsencode(MANIFEST))):
            raise SourceError(f"{shown}: a file of a dataset; give its directory, {here}")
