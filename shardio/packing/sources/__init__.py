"""What can be packed. A kind of source is one file beside this one, and one row here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...errors import (
    DamageError,
    NotPackedError,
    OptionError,
    SourceError,
    VersionError,
    printable,
    there_are,
)
from ...formats import FOREIGN, claims
from ...formats.manifest import MANIFEST, SPLITS, load
from ...images.filetype import image_type
from ...names import key_text
from ...storage.location import locate
from ...storage.lock import JOURNAL
from ...units import show_count
from . import coco, grouped, imagefolder, trees
from .base import Listing, Rejected, Source, Wanted, listed, renumber
from .imagefolder import image_folder

__all__ = [
    "KINDS",
    "Listing",
    "Rejected",
    "Source",
    "Wanted",
    "find",
    "image_folder",
    "listed",
    "names",
    "renumber",
    "tell",
]


_LOOKED = 3  # folders that are looked into for files of another format


@dataclass(frozen=True)
class Kind:
    """One kind of source."""

    find: Callable[[Wanted], dict[str, Listing]]  # its datasets by split; "" where there are none
    names: Callable[[Wanted], list[str]]  # the keys that `find` will have, quickly


def _only(wanted: Wanted) -> list[str]:
    """For sources without splits. Raises OptionError."""
    if wanted.splits is not None:
        raise OptionError("--splits and --no-splits are for folders of images")
    return [""]


def _dataset(wanted: Wanted) -> dict[str, Listing]:
    from . import dataset

    return dataset.find(wanted)


def _dataset_names(wanted: Wanted) -> list[str]:
    from . import dataset

    return dataset.names(wanted)


def _folder(wanted: Wanted) -> Wanted:
    """What a folder without a manifest is, by the names at its top."""
    if os.path.lexists(os.path.join(wanted.path, os.fsencode(JOURNAL))):
        load(locate(os.fsdecode(wanted.path)))  # says that its packing is not finished
    folders, files, _ = imagefolder.top(os.path.abspath(wanted.path))
    others = imagefolder.others(files)
    coco.refuse_folder(wanted.path, wanted.shown, [*others, *folders])
    if trees.lies_there(wanted, folders):
        return replace(wanted, kind="trees")
    foreign = _foreign_folder(wanted, folders, files)
    if foreign is not None:
        return replace(wanted, kind=foreign)
    splits = imagefolder.are_splits(folders, wanted.splits)
    if grouped.lies_there(wanted.path, files, others, folders if splits else ()):
        return replace(wanted, kind="files")
    names = tuple(key_text(name) for name in sorted(folders)) if splits else ("",)
    return replace(wanted, kind="imagefolder", looked=names)


def _images(wanted: Wanted) -> dict[str, Listing]:
    found = imagefolder.find(wanted)
    if wanted.looked is not None:
        grouped.check_told(found, wanted.shown)
    own, numbered = found.get(""), _numbered(wanted.path)
    if own is None or own.classes is None or numbered is None or numbered == own.classes:
        return found
    if set(own.classes) <= set(numbered):
        own.notes.append("classes are numbered as in the index that lies there")
        return {"": renumber(own, numbered)}
    return found


def _numbered(path: bytes) -> tuple[str, ...] | None:
    """The classes in the index of a folder of images, if one lies there: they have its labels."""
    with contextlib.suppress(NotPackedError, DamageError, VersionError):
        made = load(locate(os.fsdecode(path)))
        return made.classes if made.format == "imagefolder" else None
    return None


def _image_names(wanted: Wanted) -> list[str]:
    if wanted.looked is not None:
        return list(wanted.looked)
    return imagefolder.split_names(wanted.path, wanted.splits)


def _listing(wanted: Wanted) -> dict[str, Listing]:
    from . import listing

    return listing.find(wanted)


def _foreign(wanted: Wanted) -> dict[str, Listing]:
    from . import dataset

    return dataset.find_foreign(wanted)


# What reads other datasets is imported when it is needed: most packings read none.
KINDS = {
    "imagefolder": Kind(_images, _image_names),
    "files": Kind(grouped.find, grouped.names),
    "trees": Kind(trees.find, trees.names),
    "coco": Kind(coco.find, _only),
    "dataset": Kind(_dataset, _dataset_names),
    "listing": Kind(_listing, _only),
    **{name: Kind(_foreign, _only) for name in FOREIGN if name != "imagefolder"},
}


def tell(wanted: Wanted) -> Wanted:
    """The same, with its kind, by `kind` or by what lies there. Raises OptionError, SourceError."""
    if wanted.kind is not None:
        if wanted.kind not in KINDS:
            raise OptionError(
                f"--from {printable(wanted.kind)}: no such kind of source; "
                f"{there_are(KINDS, wanted.kind, len(KINDS))}"
            )
        return wanted
    kind = _kind(wanted)
    return _folder(wanted) if kind == "imagefolder" else replace(wanted, kind=kind)


def _refuse_part(path: bytes, shown: str) -> None:
    """Raise SourceError for one file of those that a folder is packed by: an image, or a shard."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        kind = image_type(file.read(32))
        here = printable(os.path.dirname(path) or b".")
        if kind is not None:
            raise SourceError(f"{shown}: one image ({kind}); give the folder that it is in, {here}")
        if os.path.lexists(os.path.join(os.path.dirname(path), os.fsencode(MANIFEST))):
            raise SourceError(f"{shown}: a file of a dataset; give its directory, {here}")


def names(wanted: Wanted) -> list[str]:
    """The keys that `find` will have, without listing the source. Raises SourceError."""
    assert wanted.kind is not None
    return KINDS[wanted.kind].names(wanted)


def find(wanted: Wanted) -> dict[str, Listing]:
    """The datasets of a source by split. Raises SourceError, OptionError."""
    assert wanted.kind is not None
    return KINDS[wanted.kind].find(wanted)


def _kind(wanted: Wanted) -> str:
    path = wanted.path
    if os.path.isdir(path):
        if os.path.lexists(os.path.join(path, SPLITS.encode())):
            return "dataset"
        if os.path.lexists(os.path.join(path, MANIFEST.encode())):
            try:
                made = load(locate(os.fsdecode(path)))
            except DamageError as error:
                raise DamageError(
                    f"{error}\nIf it is none of shardio's, --from imagefolder, or --from files, "
                    "packs what lies beside it"
                ) from None
            # In place it is the folder itself; --root says that only its index lies here.
            own = made.format == "imagefolder" and wanted.root is None
            return "imagefolder" if own else "dataset"
        return "imagefolder"  # or what `_folder` finds
    if not os.path.lexists(path):
        raise SourceError(f"{wanted.shown}: there is no such file or directory")
    if coco.is_coco(path):
        return "coco"
    from . import listing

    if listing.is_listing(path):
        return "listing"
    claimed = next(iter(claims([key_text(os.path.basename(path))])), None)
    if claimed is None:
        _refuse_part(path, wanted.shown)
        raise SourceError(
            f"{wanted.shown}: expected a folder of images, a listing, or a file of another format, "
            "and this file is none; --from says what it is"
        )
    return claimed


def _foreign_folder(wanted: Wanted, folders: Sequence[bytes], files: Sequence[bytes]) -> str | None:
    """The format of the files in a folder, or in folders within it; None where none claims them.

    Looks at few names, since there may be millions. Raises OptionError where several formats do, or
    where images lie there too: they would be left out without a word.
    """
    names = list(files)
    for folder in sorted(folders)[:_LOOKED]:
        with contextlib.suppress(SourceError):  # one that cannot be listed: its problem, later
            names += imagefolder.top(os.path.join(os.path.abspath(wanted.path), folder))[1]
    names = [name for name in names if not name.startswith(b".")]
    others = imagefolder.others(names)
    claimed = claims(map(key_text, others))
    images = len(names) - len(others)
    if len(claimed) + bool(claimed and images) > 1:
        found = [f"{len(some):,} of {name}" for name, some in claimed.items()]
        kinds = [*claimed]
        if images:
            found.append(show_count(images, "image"))
            kinds.append("imagefolder")
        raise OptionError(
            f"{wanted.shown}: holds files of several formats: {', '.join(found)}; choose --from "
            f"{' or '.join(kinds)}"
        )
    return next(iter(claimed), None)
