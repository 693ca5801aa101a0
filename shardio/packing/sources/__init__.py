"""What can be packed. A kind of source is one file beside this one, and one row of KINDS here.

base           what every source provides: a request, a listing, records that are read
detect         which kind of source lies at a path
files          files and folders of this machine: how they are found and read
listed_folder  folders whose files are all known: in archives, or in a store
store_folder   folders of an object store; store_reader reads its objects
archived       sources that lie in archives; archives/ reads these as folders
imagefolder    a folder of images, with class folders or without
grouped        files that differ only in their endings are one record
trees          folders side by side, such as images/ and masks/, are fields of one record
listing        a table whose rows name files, or are records; tables reads its columns
coco           COCO's file of images and annotations
arrays         arrays whose entries are records; array_files reads their files
dataset        a dataset that can be read, to be packed anew
joined         tables and lists beside images; image_names matches their rows with images
annotated      files of boxes beside images; boxes reads their texts
plain_file     one file of labels, which may lie in an archive, or in a store
field_names    names that fields can have, and those of `image` and `label`
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ...errors import OptionError, printable, there_are
from ...formats import FOREIGN
from ...names import key_text
from ..options import Joins
from . import arrays, coco, files, grouped, imagefolder, joined, listing, trees
from .archived import FOLDERS, find_archives
from .base import Listings, Plain, Source, SourceRequest
from .detect import detect, detect_by_url
from .store_folder import folder_in_store


@dataclass(frozen=True)
class Kind:
    """One kind of source.

    list_records  returns the listing of each split
    split_names   returns the names of these splits, and lists no records
    reopen        opens the records of one piece of a split; None: they are only read all at once
    """

    list_records: Callable[[SourceRequest], Listings]
    split_names: Callable[[SourceRequest], list[str]]
    reopen: Callable[[SourceRequest, str, Plain, Plain], Source] | None


def _only(request: SourceRequest) -> list[str]:
    """Refuse splits, for a source that has none. Raises OptionError."""
    request.refuse_splits()
    return [""]


def _folder_names(request: SourceRequest) -> list[str]:
    if request.detected_splits is not None:
        return list(request.detected_splits)
    folders = files.folder_of(request).top().folders
    splits = files.are_splits(folders, request.splits)
    return [key_text(name) for name in sorted(folders)] if splits else [""]


def _late(name: str) -> Any:
    """Return a function of `dataset`, which is imported when it is first called: few need it."""

    def call(*given: Any) -> Any:
        from . import dataset

        return getattr(dataset, name)(*given)

    return call


KINDS = {
    "imagefolder": Kind(imagefolder.list_records, _folder_names, imagefolder.reopen),
    "files": Kind(grouped.list_records, _folder_names, grouped.reopen),
    "trees": Kind(trees.list_records, trees.split_names, trees.reopen),
    "coco": Kind(coco.list_records, _only, coco.reopen),
    "arrays": Kind(arrays.list_records, arrays.split_names, arrays.reopen),
    "dataset": Kind(_late("list_records"), _late("split_names"), _late("reopen")),
    "listing": Kind(listing.list_records, _only, listing.reopen),
    **dict.fromkeys(
        [name for name in FOREIGN if name != "imagefolder"],
        Kind(_late("list_foreign"), _late("foreign_names"), None),
    ),
}


def check_kind(request: SourceRequest) -> None:
    """Raise OptionError for a kind that is none."""
    if request.kind is not None and request.kind not in KINDS:
        raise OptionError(
            f"--from {printable(request.kind)}: no such kind of source; "
            f"{there_are(KINDS, request.kind, len(KINDS))}"
        )


def detect_kind(request: SourceRequest) -> SourceRequest:
    """Return a request with its kind, as asked for or by what lies there.

    Raises OptionError, SourceError.
    """
    return joined.find_splits(_with_kind(request))


def _with_kind(request: SourceRequest) -> SourceRequest:
    check_kind(request)
    if request.label is not None and "label" not in request.fields:
        if request.kind not in (None, "imagefolder"):
            raise OptionError(
                f"--label: for a folder of images, not for a source of kind {request.kind}"
            )
        request = replace(request, kind="imagefolder")
    if request.layout is not None:
        if request.kind not in (None, "arrays"):
            raise OptionError(f"--layout: for arrays, not for a source of kind {request.kind}")
        request = replace(request, kind="arrays")
    if request.location.remote:
        return detect_by_url(request)
    if request.kind is None:
        return detect(request)
    return find_archives(request) or request


def split_names(request: SourceRequest) -> list[str]:
    """Return the splits of a source, or [""], without listing it. Raises SourceError."""
    assert request.kind is not None
    inner = joined.inner_request(request)
    return joined.split_names(request, KINDS[request.kind].split_names(inner))


def list_records(request: SourceRequest) -> Listings:
    """List the records of a source, by split. Raises SourceError, OptionError."""
    assert request.kind is not None
    if not request.ignore and request.kind not in FOLDERS:
        raise OptionError(
            f"--no-ignore: for folders that are packed as they are; of a source of kind "
            f"{request.kind} nothing is ignored: leave it out"
        )
    found = KINDS[request.kind].list_records(joined.inner_request(request))
    return joined.join(found, request)


def check_pieces(request: SourceRequest) -> None:
    """Raise OptionError for a source that can only be read as a whole."""
    assert request.kind is not None
    if KINDS[request.kind].reopen is None:
        raise OptionError(
            f"{request.shown}: files of {request.kind} without an index can only be read as a "
            "whole; make one by `shardio index`, and give that"
        )


def reopen(request: SourceRequest, kind: str, split: str, described: Plain, piece: Plain) -> Source:
    """Open the records of one piece of a source, whose places are then 0, 1, 2, ...

    request: has the roots and URLs. kind, described, piece: of the source that was listed. Raises
    SourceChangedError, and what opening a source raises.
    """
    open_piece = KINDS[kind].reopen
    assert open_piece is not None  # by check_pieces
    request = replace(request, kind=kind, joins=Joins())
    if kind in FOLDERS and request.location.remote and not described.get("archives"):
        plain = replace(request, files=folder_in_store(request))  # nothing is listed
    else:
        plain = detect_kind(request)
    if "joined" in piece:
        source: Source = joined.reopen(described, piece, functools.partial(open_piece, plain))
    else:
        source = open_piece(plain, split, described, piece)
    numbers = described.get("numbers")
    return source if numbers is None else source.renumbered(numbers, ("label",))
