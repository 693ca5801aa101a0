"""Datasets of other formats, read where they are: one pass over them, and an index is made.

    index("imagenet-wds/")                  manifest.json and one index a shard, beside the data
    index("imagenet-wds/", out="idx/")      or elsewhere; then opened with
                                            storage=shardio.Storage(root="imagenet-wds/")

Nothing is copied, and no file of the data is touched. Until the manifest is in place, nothing was
indexed: an index that fails takes back what it wrote. Meanwhile the folder is locked, as by a
packer (lock.py). What is in a shard, scan.py knows. The parts of a job array note what they found
(scan_notes.py), for a last call that makes the manifest of it. Where an index is there already,
what became of the files is a new version (reindex.py).

A folder of images is indexed by the very plan that packing would make of it: its runs of files are
the shards, so that the order of records, and of every epoch, is that of the packed one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import shlex
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from ..errors import (
    BusyError,
    ExistsError,
    NotPackedError,
    OptionError,
    ShardioError,
    SourceError,
    StorageError,
    printable,
)
from ..formats import FOREIGN, check_foreign, claims, manifest
from ..formats.foreign.arrow import splits_in
from ..formats.foreign.base import MAGIC, has_sidecar_name, sidecar_name
from ..images.filetype import ALL_ENDINGS
from ..names import file_name, from_file_name, key_bytes, key_text
from ..storage import local
from ..storage.base import Location
from ..storage.listing import ObjectEntry
from ..storage.local import LocalDirectory
from ..storage.location import local_path, locate
from ..storage.memory import MemoryLocation
from ..storage.options import Storage
from ..storage.remote import RemoteLocation
from ..units import Summary, check_bool, check_choice, check_group, show_count, show_size
from . import journal, output_dir, scan_notes
from .options import PackOptions
from .parts import Announce, PartOptions, show_closing
from .plan import make_plan
from .process_pool import Executor, Progress, check_executor, processes
from .reindex import How, commit_again, compare
from .scan import Found, Runs, dataset_id_of, manifest_of, problems_of, scan_all
from .sources.base import Listing, Problem, SourceRequest, renumber
from .sources.field_names import fields_text
from .sources.files import DiskFolder, identity, is_ignored
from .sources.imagefolder import image_folder
from .sources.trees import lies_there
from .versions import changing, files_of, is_overlay

# Words in names that say which split a file is of, as Hugging Face's own rules have them.
_SPLIT = re.compile(
    r"(?i)(?<![a-z])(train(?:ing)?|val(?:id(?:ation)?)?|dev|test(?:ing)?|eval(?:uation)?)(?![a-z])"
)
_SHOWN = 10  # names of files that are told


@dataclass(repr=False)
class Indexed(Summary):
    """The result of one call of `index`; as str, a summary of lines."""

    out: str
    root: str
    format: str
    shards: int = 0
    records: int = 0
    bytes: int = 0
    fields: dict[str, str] = field(default_factory=dict)  # name and kind
    sources: dict[str, str] = field(default_factory=dict)  # of fields that have another name
    classes: int | None = None  # that have names
    left_out: list[str] = field(default_factory=list)  # whose names no field can have
    ignored: int = 0  # hidden files and the like, beside images
    notes: list[str] = field(default_factory=list)  # worth knowing
    seconds: float = 0.0
    part: tuple[int, int] | None = None  # which part was scanned, and of how many; None: all
    # Of an index that was there, files by their names; of a folder of images these are the images.
    unchanged: int | None = None  # files that are as they were; None: there was no index
    new: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    compared: int = 0  # files, or runs of images, whose contents were read
    dropped: int = 0  # records of new and changed files that were dropped before, and stay so
    lost: int = 0  # annotated records that are not there any more
    repaired: int = 0  # indexes of files, or runs, as they were that were missing or damaged
    version: str = ""  # the new one; "": it stays
    dry_run: bool = False
    rejected: list[tuple[str, str]] = field(default_factory=list)  # images left out: key, reason
    rejected_before: int = 0  # files that were left out before, and are as they were

    def __str__(self) -> str:
        rate = self.bytes / max(self.seconds, 1e-9) / 1e6
        named = "" if self.classes is None else f"; {show_count(self.classes, 'class', 'classes')}"
        lines = [
            f"{printable(self.root)}: {self.format}: {show_count(self.records, 'record')} in "
            f"{show_count(self.shards, 'shard')}, {show_size(self.bytes)}, in "
            f"{self.seconds:.1f} s, {rate:,.0f} MB/s"
        ]
        if self.part is not None:
            return "\n".join([*lines, show_closing(self.part, "indexed")])
        left_out = journal.left_out_lines(self.rejected, self.rejected_before)
        if self.unchanged is not None:
            return "\n".join([*self._again(), *left_out])
        lines += left_out
        lines.append(fields_text(self.fields, self.sources) + named)
        if self.format == "imagefolder":
            lines.append(
                "a folder of images: they stay as they are, in the order `shardio pack` gives"
            )
        if self.ignored:
            shown = show_count(self.ignored, "file or folder", "files and folders")
            lines.append(f"ignored: {shown}")
        lines += self.notes[:10]
        for name in self.left_out:
            lines.append(
                f"left out: {printable(name)!r} cannot be a field's name; give one by --fields"
            )
        if os.path.abspath(self.out) != os.path.abspath(self.root):
            shown = printable(self.root)
            root = f"storage=shardio.Storage(root={shown!r}), in commands --root {shown}"
            lines.append(f"open it by {printable(self.out)} with {root}")
        return "\n".join(lines)

    def _again(self) -> Iterator[str]:
        """Yield lines on what became of the files of an index."""
        what, took = "image" if self.format == "imagefolder" else "file", ""
        if not self.dry_run:
            took = f", in {self.seconds:.1f} s"
        yield (
            f"{printable(self.root)}: {self.format}: {show_count(len(self.new), f'new {what}')}, "
            f"{len(self.changed):,} changed, {len(self.gone):,} gone, {self.unchanged:,} as they "
            f"were{took}"
        )
        for word in ("new", "changed", "gone"):
            names: list[str] = getattr(self, word)
            yield from (f"{word}: {printable(name, 4096)}" for name in names[:_SHOWN])
            if len(names) > _SHOWN:
                yield f"{word}: ... ({len(names):,})"
        if self.compared:
            unit = "run of images" if self.format == "imagefolder" else "file"
            units = "runs of images" if self.format == "imagefolder" else "files"
            yield f"the contents of {show_count(self.compared, unit, units)} were compared"
        if self.dropped:
            records = show_count(self.dropped, "record")
            yield f"{records} of new or changed files had been dropped, and stay so"
        if self.lost:
            yield f"{show_count(self.lost, 'annotated record')} not found any more"
        if self.repaired:
            indexes = show_count(self.repaired, "index", "indexes")
            yield f"{indexes} had been missing or damaged, and written anew"
        if self.version:
            yield f"{show_count(self.records, 'record')} now"
            yield f"version {self.version}"
        else:
            yield (
                "nothing was changed, since this is a dry run"
                if self.dry_run
                else ("all is as it was; the version stays")
            )


def index(
    directory: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    format: str | None = None,
    files: str | None = None,
    fields: Mapping[str, str] | None = None,
    classes: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    overwrite: bool = False,
    checksum: bool = False,
    gone: str | None = None,
    forget: bool = False,
    on_error: str = "raise",
    dry_run: bool = False,
    storage: Storage | None = None,
    executor: Executor | None = None,
    part: tuple[int, int] | str | None = None,
    parts: int | None = None,
    stagger_s: float = 0.0,
    progress: Progress | None = None,
    announce: Announce | None = None,
) -> Indexed:
    """Make a dataset of files that another tool wrote, or of a folder of images, in place.

    directory  the folder, or a single file in it; or its URL, with `out`
    out        where manifest and index go; default: beside the data
    format     default: detected by the names of the files; "imagefolder" if there are only images
    files      only files that fit this pattern, such as "train-*": by their names or, with a slash,
               by the end of their paths
    fields     names of fields here and there: {"image": "jpg"}; others keep their names; `image`
               and `label` of common datasets are detected
    classes    another dataset: number the classes of a folder of images as it does
    jobs       processes; default: one for each core
    overwrite  make another dataset in the place of the index that is there: nothing of it is
               dropped or annotated
    checksum   of an index that is there: compare the contents of all files, also of those whose
               size and time are as its last commit noted them
    gone       "drop": its records go with files that are gone, also if these are more than half
    forget     records that were dropped or annotated in files that changed, and cannot be found
               again, are taken for new ones; else this is an error
    on_error   of a folder of images: "raise": one SourceError lists all files that are no images,
               and nothing is indexed; "skip": they are left out, and rejected.jsonl beside the
               index lists them
    dry_run    say what is new, changed and gone, and change nothing
    storage    a shardio.Storage: how an object store is reached
    executor   a shardio.RayExecutor: a cluster that does it; the folder of the index is shared
    part       (i, n) or "i/n", i from 1 to n: scan only this part of the shards, and make no
               manifest; when all are scanned, call it again without it. "auto": the part that
               SLURM, torchrun or Kubernetes gives this process
    parts      the number of parts, if part is "auto": Kubernetes does not say it
    stagger_s  wait first, for a random time up to so many seconds
    progress   called now and then with bytes done and bytes in all
    announce   called with lines to show before the work begins: which part this is

    Where the files have an index, what became of them is a new version of it: files that are new
    or changed are indexed, and records that were dropped or annotated stay so: of files that are
    unchanged by their places, of others by their keys. Raises OptionError, SourceError,
    DamageError, StorageError, ExistsError, BusyError.
    """
    check_bool(overwrite=overwrite, checksum=checksum, forget=forget, dry_run=dry_run)
    check_choice("gone", gone, None, "drop")
    check_executor(executor)
    storage = check_group("storage", storage, Storage)
    chosen = PartOptions(part=part, parts=parts, stagger_s=stagger_s).begun(announce)
    began = time.perf_counter()
    wanted = dict(fields or {})
    target = None if out is None else local_path(out)
    numbering = None if classes is None else locate(classes, storage)
    place = locate(directory, storage)
    if target is None and place.remote:
        raise OptionError(
            f"{place.url}: an index is not written into an object store; --out DIR names a "
            "directory for it"
        )
    found = _find(directory, place, format, files, numbering, target)
    skip = _skips(on_error, found, part, target or found.root)
    folder = target or found.root
    jobs = processes(jobs)
    if out is None and not os.access(folder or os.curdir, os.W_OK):
        raise StorageError(
            f"{printable(folder)}: no permission to write the index beside the data; --out DIR "
            "puts it elsewhere"
        )
    if os.path.realpath(folder) != os.path.realpath(found.root):
        output_dir.refuse_images(LocalDirectory(folder))
    done = Indexed(folder, found.root, found.format, part=chosen.chosen, dry_run=dry_run)
    done.ignored, done.notes = found.ignored, found.notes
    numbered = numbering is not None
    how = How(wanted, numbered, checksum, gone, forget, jobs, executor, progress, skip)
    if (before := _indexed(folder, overwrite, done.part)) is not None:
        _index_again(done, found, before, how)
    else:
        shards = None if done.part is None else chosen.shards_of(len(found.names))
        _index_first(done, found, how, shards, overwrite)
    done.seconds = time.perf_counter() - began
    return done


def _skips(on_error: str, found: Found, part: object, folder: str) -> bool:
    """Return whether files that cannot be indexed are left out.

    Raises OptionError, ExistsError where a user's list of them is in the folder of the index.
    """
    check_choice("on_error", on_error, "raise", "skip")
    if on_error == "skip" and found.listing is None:
        raise OptionError(
            f"{printable(found.root)}: --on-error skip goes with a folder of images; a file of "
            f"{found.format} is read as a whole: mend it, or move it away"
        )
    if on_error == "skip" and part is not None:
        raise OptionError("part: a part leaves nothing out; give --on-error skip to the last call")
    if on_error == "skip":
        journal.refuse_rejected(LocalDirectory(folder), empty=False)
    return on_error == "skip"


def _index_first(
    done: Indexed, found: Found, how: How, shards: range | None, overwrite: bool
) -> None:
    """Scan all files, or a part of them, and write the manifest. Raises as `index` does.

    shards: of the part; None: all
    """
    folder = done.out
    if done.dry_run:
        raise OptionError(
            f"{printable(folder)}: no index is here yet, so there is nothing to compare: leave "
            "--dry-run out"
        )
    local.make_directory(folder)
    dataset_id = dataset_id_of(found, how.fields)
    with _working(folder, dataset_id, shards):
        if _indexed(folder, overwrite, done.part) is not None:  # made a moment ago
            raise BusyError(f"{printable(folder)}: another index was made here just now: try again")
        numbers = range(len(found.names)) if shards is None else shards
        noted = ((one, scan_notes.load(folder, found, dataset_id, one)) for one in numbers)
        known = {number: note for number, note in noted if note is not None}
        save = functools.partial(scan_notes.save, folder, found, dataset_id)
        note = None if shards is None else save
        of_call = how.jobs, how.progress, numbers, known, note, how.executor, how.skip
        scanned = scan_all(found, folder, dataset_id, *of_call)
        infos = [one.info for one in scanned if one.info is not None]
        done.shards, done.records = len(infos), sum(info.records for info in infos)
        done.bytes = sum(info.size for info in infos)
        if shards is None:
            journal.remove_rejected(LocalDirectory(folder))  # of the index that is replaced
            _write_manifest(done, manifest_of(found, scanned, how.fields, dataset_id), overwrite)
            _list_left_out(done, found, found, None, problems_of(found, scanned))


def _index_again(done: Indexed, found: Found, before: manifest.Manifest, how: How) -> None:
    """Make what became of the files a new version of their index. Raises as `index` does."""
    with contextlib.ExitStack() as owned:
        if not done.dry_run:
            before = owned.enter_context(changing(done.out))
            owned.enter_context(_taking_back(done.out))
        there, place = found, LocalDirectory(done.out)
        listed = journal.own_list(place)
        if how.skip and found.listing is not None and not how.checksum:
            listing, known_bad = journal.without_rejected(place, found.listing)
            done.rejected_before = len(known_bad)
            found = replace(found, listing=listing, problems=listing.problems)
        again = compare(found, before, locate(done.out), how)
        if how.gone is None and 2 * len(again.gone) > again.unchanged + len(again.gone) + len(
            again.changed
        ):
            raise OptionError(
                f"{printable(done.out)}: {len(again.gone):,} files of its index, such as "
                f"{printable(again.gone[0])}, are not in {printable(found.root)}: expected all "
                "files, new ones included. If they are to go, say so: --gone drop. Nothing was "
                "changed; --overwrite makes another dataset in its place"
            )
        after, done.left_out = before, []
        if not done.dry_run and (found.problems or not again.is_same):
            list_left_out = functools.partial(_list_left_out, done, there, found, listed)
            after, done.left_out = commit_again(again, done.out, how, list_left_out)
            done.version = "" if after is before else after.version_id
        elif not done.dry_run:
            _list_left_out(done, there, found, listed, [])
    done.new, done.changed, done.gone = again.new, again.changed, again.gone
    done.unchanged, done.compared = again.unchanged, again.compared
    done.dropped, done.lost, done.repaired = again.dropped, again.lost, again.repaired
    _fill_in(done, after)


def _list_left_out(
    done: Indexed,
    found: Found,
    tried: Found,
    before: journal.OwnList | None,
    problems: Sequence[Problem],
) -> None:
    """Write the list of what an index of a folder of images leaves out, if it is another one.

    found: all files. tried: those that were not left out before, as they are. before: what the
    list said, which the index does not have
    """
    done.rejected = [(key_text(key), why) for key, why in sorted(problems)]
    if found.listing is None or tried.listing is None:
        return
    there, place = found.listing, LocalDirectory(done.out)
    again = {*tried.listing.keys, *(key for key, _ in tried.listing.problems)}
    still = {*there.keys, *(key for key, _ in there.problems)} - again
    old, noted = before or ([], {})
    left = {key: why for key, why in old if key in still} | dict(problems)
    about = zip(there.sizes.tolist(), there.mtimes.tolist(), strict=True)
    files = dict.fromkeys(left, journal.UNKNOWN)
    files |= {key: of for key, of in zip(there.keys, about, strict=True) if key in left}
    if left and (sorted(left.items()), files) != (old, noted):
        journal.write_rejected(place, sorted(left.items()), files=files)
    elif before is not None and not left:
        place.remove(journal.REJECTED)


def _fill_in(done: Indexed, one: manifest.Manifest) -> None:
    """Fill in what the manifest says."""
    done.shards, done.records, done.bytes = one.shards, one.records, one.size
    done.sources, done.fields = one.options.get("fields", {}), dict(one.schema.fields)
    done.classes = None if one.classes is None else len(one.classes)


def _write_manifest(
    done: Indexed, described: tuple[manifest.Manifest, list[str]], overwrite: bool
) -> None:
    """Put the manifest into place, and fill in what it says."""
    index_manifest, done.left_out = described
    local.write_file(done.out, manifest.MANIFEST, index_manifest.dump(), replace=overwrite)
    scan_notes.remove(done.out)
    _fill_in(done, index_manifest)
    if done.format == "webdataset" and {*done.fields.values()} <= {"key", "image"}:
        done.notes.append(
            "images only, and no labels: if folders in the tars, or the tars, are classes, "
            "`shardio pack` makes labels of them"
        )


def in_memory(
    path: str,
    *,
    storage: Storage,
    format: str,
    fields: Mapping[str, str],
    jobs: int | None = None,
    progress: Progress | None = None,
) -> tuple[manifest.Manifest, Location, Location, list[str]]:
    """Index files as `index` does, but write nothing: for reading a dataset once.

    Returns the manifest, where the index is, where the data is, and the fields that were left out
    for their names. Raises as `index` does.
    """
    found = _find(path, locate(path, storage), format, None, None, None)
    dataset_id = dataset_id_of(found, fields)
    scanned = scan_all(found, None, dataset_id, processes(jobs), progress)
    index_manifest, left_out = manifest_of(found, scanned, fields, dataset_id)
    indexes = {
        sidecar_name(shard.info.number, shard.info.index_checksum): shard.index
        for shard in scanned
        if shard.info is not None
    }
    return index_manifest, MemoryLocation(found.root, indexes), found.place, left_out


def is_sidecar(folder: str, name: str) -> bool:
    """Return whether a file is the index of a shard, by its name and its first bytes.

    Or one that is being written, or was when its process died.
    """
    named = has_sidecar_name(name) or local.is_temporary(name)
    return named and journal.first_bytes(folder, name, len(MAGIC)) == MAGIC


# --- what is there --------------------------------------------------------------------------------


def _find(
    path: str | os.PathLike[str],
    place: Location,
    format: str | None,
    files: str | None,
    classes: Location | None,
    out: str | None,
) -> Found:
    """Find out what a folder holds, or a file is. Raises SourceError, OptionError, ExistsError."""
    if format is not None:
        check_foreign(format)
    objects: dict[str, ObjectEntry] = {}  # of a store
    if isinstance(place, RemoteLocation):
        if classes is not None:
            raise _no_classes()
        root = place.url
        folder, name = place.above()
        one = format or next(iter(claims([name])), None)
        listable = place.store.scheme not in ("http", "https") or one is None
        if listable:
            objects = _objects(place)
        if not listable or (not objects and name and folder.exists(name)):
            return _one_object(folder, name, one, files)
        names = sorted(objects, key=key_bytes)
    else:
        root = local_path(path)
        if os.path.isfile(root):
            _refuse_packed(locate(os.path.dirname(root) or os.curdir), [os.path.basename(root)])
            return _one_file(root, format, files, classes)
        names = sorted(_files(root), key=key_bytes)
    names = _matching(printable(root), names, files)
    claimed = claims(names)
    _refuse_packed(place, [*itertools.chain(*claimed.values())])
    images = any(name.rpartition(".")[2].lower() in ALL_ENDINGS for name in names)
    if format == "imagefolder" or (format is None and images and not claimed):
        return _images(place, root, format, files, classes, out)
    if classes is not None:
        raise _no_classes()
    format, names = _of_one_format(place, printable(root), names, claimed, format)
    if place.remote:
        _refuse_lmdb(root, format)
    if files is None:
        _refuse_splits(root, names, out, splits_in(place))
    if not place.remote:
        return Found(root, format, place, names, *_looked_at(root, names))
    found = [objects[name] for name in names]
    return Found(
        root, format, place, names, [one.size for one in found], [one.tag for one in found]
    )


def _objects(place: RemoteLocation) -> dict[str, ObjectEntry]:
    """Return the objects of a folder in a store by their paths, but hidden ones."""
    hidden = re.compile(r"(^|/)\.")
    return {one.path: one for one in place.objects() if not hidden.search(one.path)}


def _one_object(place: RemoteLocation, name: str, format: str | None, files: str | None) -> Found:
    """Take one object as the only file of its folder. Raises OptionError, SourceError."""
    shown = place.store.show(name)
    if files is not None:
        raise OptionError(f"--files: only of a folder; {shown} is a file")
    if format is None or format == "imagefolder":
        raise SourceError(_unknown_name(shown))
    _refuse_lmdb(shown, format)
    try:
        with contextlib.closing(place.open(name)) as file:
            return Found(place.url, format, place, [name], [file.size], [""])
    except FileNotFoundError:
        raise SourceError(f"{shown}: there is nothing; expected a file, or a folder") from None


def _refuse_lmdb(shown: str, format: str) -> None:
    """Raise OptionError for a format whose files are read in any order."""
    if format == "lmdb-foreign":
        raise OptionError(
            f"{shown}: LMDB is not indexed in an object store, since its pages lie in any order. "
            "Copy the file to a directory, and index it there; `--root URL` then reads it where "
            "it is"
        )


def _no_classes() -> OptionError:
    return OptionError("--classes: only the classes of a folder of images are numbered here")


def _of_one_format(
    place: Location,
    shown: str,
    names: Sequence[str],
    claimed: Mapping[str, list[str]],
    format: str | None,
) -> tuple[str, list[str]]:
    """Return the format that is meant, and the names of its files. Raises SourceError."""
    if format is None:
        if not claimed:
            raise SourceError(f"{shown}: {_nothing_in(place, names)}")
        if len(claimed) > 1:
            found = ", ".join(f"{len(some):,} of {name}" for name, some in claimed.items())
            raise SourceError(
                f"{shown}: holds files of several formats: {found}; choose by --format"
            )
        format = next(iter(claimed))
    if not claimed.get(format):
        raise SourceError(f"{shown}: no file in it has a name of {format}")
    return format, claimed[format]


def _refuse_trees(root: str) -> None:
    """Raise OptionError for folders of images and masks, which would be two classes."""
    path = os.fsencode(root)
    if lies_there(SourceRequest(path), DiskFolder(path).top().folders):
        raise OptionError(
            f"{printable(root)}: its folders are images and their masks, and an index takes one "
            f"file as a record. `shardio pack {_quoted(root)} OUT` makes records of both; with "
            "--format imagefolder the folders are classes"
        )


def _refuse_packed(storage: Location, names: Iterable[str]) -> None:
    """Raise ExistsError where nothing but shards, or splits, that shardio packed are named."""
    packed: set[str] | None = None
    with contextlib.suppress(ShardioError):  # a damaged one may be anything
        if splits := manifest.load_splits(storage):
            packed = {name for name in names if name.partition("/")[0] in splits}
        elif (there := manifest.load(storage)).format in manifest.SUFFIXES:
            packed = {there.shard(number).name for number in range(there.shards)}
    if packed is not None and packed.issuperset(names):
        raise ExistsError(
            f"{printable(storage.url)}: is packed already, and needs no index: open it as it is. "
            "`shardio export` writes it in other formats"
        )


def _nothing_in(place: Location, names: Sequence[str]) -> str:
    """Say why there is nothing to be indexed in a folder."""
    with contextlib.suppress(ShardioError):
        there = manifest.load(place)
        return (
            f"holds the index of {show_count(there.records, 'record')} of {there.format}, and no "
            "data. Give the folder that the data is in, and this one as --out"
        )
    if not names:
        return f"holds no files; expected some of {', '.join(FOREIGN)}"
    some = ", ".join(printable(name) for name in names[:3])
    return (
        f"holds {show_count(len(names), 'file')}, such as {some}, of which none has a name of "
        f"{', '.join(FOREIGN)}; --format says what they are"
    )


def _one_file(root: str, format: str | None, files: str | None, classes: Location | None) -> Found:
    """Take one file as the only one of its folder. Raises OptionError, SourceError."""
    shown = printable(root)
    folder, name = os.path.split(root)
    name = from_file_name(name)
    if files is not None or classes is not None:
        which = "--files" if files is not None else "--classes"
        raise OptionError(f"{which}: only of a folder; {shown} is a file")
    format = format or next(iter(claims([name])), None)
    if format is None or format == "imagefolder":
        raise SourceError(
            f"{_unknown_name(shown)}. Archives, listings and COCO files are packed: `shardio pack "
            f"{_quoted(root)} OUT`"
        )
    folder = folder or os.curdir
    return Found(folder, format, locate(folder), [name], *_looked_at(folder, [name]))


def _looked_at(root: str, names: Sequence[str]) -> tuple[list[int], list[str]]:
    """Return the sizes of files, and what tells that one of them was changed."""
    found = [os.stat(os.path.join(root, file_name(name))) for name in names]
    return [one.st_size for one in found], [str(one.st_mtime_ns) for one in found]


def _unknown_name(shown: str) -> str:
    formats = ", ".join(name for name in FOREIGN if name != "imagefolder")
    return f"{shown}: its name is of none of {formats}; --format says what it is"


def _files(root: str) -> Iterable[str]:
    """Give the paths below a folder, but ignored ones; links are followed.

    Raises SourceError where there is no folder, StorageError.
    """
    if not os.path.isdir(root):
        what = "this is neither" if os.path.lexists(root) else "there is nothing"
        raise SourceError(f"{printable(root)}: expected a directory, or a file, and {what}")
    above = {root: frozenset((identity(os.stat(root)),))}  # of a folder and all it lies in
    for folder, folders, files in os.walk(root, onerror=_unlisted, followlinks=True):
        here, inner = above.pop(folder), []
        for name in folders:
            if is_ignored(os.fsencode(name)):
                continue
            path = os.path.join(folder, name)
            if (one := identity(os.stat(path))) not in here:  # a link to a folder above is passed
                above[path] = here | {one}
                inner.append(name)
        folders[:] = inner
        for name in files:
            if not is_ignored(os.fsencode(name)):
                path = os.path.relpath(os.path.join(folder, name), root)
                yield from_file_name(path.replace(os.sep, "/"))


def _unlisted(error: OSError) -> None:
    """Raise StorageError: records in a folder that cannot be listed would be lost unseen."""
    raise StorageError(
        f"{printable(os.fsencode(error.filename), 4096)}: cannot be listed: {error.strerror}"
    )


def _matching(shown: str, names: list[str], files: str | None) -> list[str]:
    """Return the names that a pattern, if there is one, fits. Raises OptionError, SourceError."""
    if files is None:
        return names
    if not files:
        raise OptionError("--files: an empty pattern; expected one such as 'train-*'")
    found = [name for name in names if PurePosixPath(name).match(files)]
    if not found:
        raise SourceError(
            f"{shown}: --files {printable(files)} fits none of its "
            f"{show_count(len(names), 'file')}, such as "
            f"{', '.join(map(printable, names[:3])) or 'none'}"
        )
    return found


def _refuse_splits(
    root: str, names: Sequence[str], out: str | None, folders: Collection[str]
) -> None:
    """Raise SourceError where files of several splits lie together: one dataset would mix them.

    folders: whose names are those of splits, whatever they are.
    """
    splits: dict[str, list[str]] = {}
    for name in names:
        for part in reversed(name.split("/")):
            word = _SPLIT.search(part)
            if part in folders or word:
                split = word[0] if word and part not in folders else part
                splits.setdefault(split, []).append(name)
                break
    if len(splits) < 2:
        return
    counts = ", ".join(f"{len(some):,} of {printable(split)}" for split, some in splits.items())
    tops = {split: {name.partition("/")[0] for name in some} for split, some in splits.items()}
    alone = sum(map(len, tops.values())) == len(splits) == len(set().union(*tops.values()))
    commands = []
    for split, some in splits.items():
        target = None if out is None else os.path.join(out, split)
        if alone and all("/" in name for name in names):  # each in a folder of its own
            line = f"  shardio index {_quoted(os.path.join(root, *map(file_name, tops[split])))}"
        else:
            pattern = _quoted(_pattern(split, some, names))
            line = f"  shardio index {_quoted(root)} --files {pattern}"
            target = target or f"{root.rstrip('/')}-{split}"
        commands.append(f"{line} --out {_quoted(target)}" if target else line)
    raise SourceError(
        f"{printable(root)}: holds files of several splits, {counts}, which would be mixed. Index "
        "each by itself (--files '*' takes all of them as one):\n" + "\n".join(commands)
    )


def _pattern(split: str, some: Sequence[str], names: Sequence[str]) -> str:
    """Return a pattern that fits just these names."""
    tries = [f"{split}-*", f"{split}*", f"*{split}*", f"{split}/*", f"*{split}*/*"]
    fitting = (
        one for one in tries if [n for n in names if PurePosixPath(n).match(one)] == list(some)
    )
    return next(fitting, f"*{split}*")


def _quoted(text: str) -> str:
    return printable(shlex.quote(text), 4096)


# --- folders of images ----------------------------------------------------------------------------


def _images(
    place: Location,
    root: str,
    format: str | None,
    files: str | None,
    classes: Location | None,
    out: str | None,
) -> Found:
    """List a folder of images in the order that packing gives them, and in such shards."""
    if place.remote:
        raise OptionError(
            f"{root}: a folder of images; in an object store it is not indexed, since each image "
            f"would be a request in each epoch. `shardio pack {_quoted(root)} OUT` packs it"
        )
    if files is not None:
        raise OptionError(
            f"--files {printable(files)}: a folder of images is indexed as a whole; give the "
            "folder that is wanted, alone"
        )
    if format is None:
        _refuse_trees(root)
    beside = out is None or os.path.realpath(out) == os.path.realpath(root)
    if out is not None and not beside and output_dir.lies_in(out, place):
        raise OptionError(
            f"{printable(out)}: --out lies in the folder of images, where it would be a class; "
            "choose a directory outside of it"
        )
    listings = image_folder(SourceRequest(os.fsencode(root)))
    if list(listings) != [""]:
        raise SourceError(_each_split(root, listings, out))
    listing = listings[""]
    if classes is not None:
        listing = renumber(listing, manifest.classes_of(classes))
    # As `pack` without options has them, so that the order is the same.
    plan = make_plan(listing, PackOptions(format="imagefolder", shuffle=True))
    runs, places = Runs(listing), {key: place for place, key in enumerate(listing.keys)}
    for shard in range(plan.shards):
        runs.add(f"files-{shard:05d}", [places[key] for key in plan.rows(shard).keys])
    own = runs.names, runs.sizes, runs.marks, runs.extras, plan.dataset_id, listing.classes
    told = listing.ignored, list(listing.notes), listing.problems, listing
    return Found(root, "imagefolder", locate(root), *own, plan.options.record(), *told)


def _each_split(root: str, listings: Mapping[str, Listing], out: str | None) -> str:
    """Say what to do with a folder of splits, each with folders of classes."""
    first = min(listings, key=lambda name: len(listings[name].absent))
    lines = []
    for name in [first, *(name for name in listings if name != first)]:
        line = f"  shardio index {_quoted(manifest.split_folder(root, name))}"
        if out is not None:
            line += f" --out {_quoted(os.path.join(out, name))}"
        if name != first and listings[name].absent:  # else its labels would be others
            line += f" --classes {_quoted(os.path.join(out or root, first))}"
        lines.append(line)
    return (
        f"{printable(root)}: its folders {', '.join(map(printable, listings))} are splits; index "
        "each by itself:\n" + "\n".join(lines)
    )


# --- the folder that is written -------------------------------------------------------------------


def _indexed(
    folder: str, overwrite: bool, part: tuple[int, int] | None
) -> manifest.Manifest | None:
    """Return the index that is in a folder, which is to be gone on from. Raises ExistsError."""
    storage = locate(folder)
    if not storage.exists(manifest.MANIFEST):
        return None
    there = None
    with contextlib.suppress(ShardioError):  # a damaged one may be replaced
        there = manifest.load(storage)
    if there is not None and there.names is None:  # its .lmdb shards would be read as of others
        raise ExistsError(
            f"{printable(folder)}: a packed dataset, which needs no index; one in its place would "
            "replace its manifest, and with it keys, fields and classes"
        )
    if not overwrite and (there is None or part is not None):
        alone = "" if there is None else ", and without --part its files are indexed again"
        raise ExistsError(
            f"{printable(folder)}: holds a {manifest.MANIFEST} already; --overwrite replaces it"
            f"{alone}"
        )
    return None if overwrite else there


@contextlib.contextmanager
def _working(folder: str, dataset_id: bytes, shards: range | None) -> Iterator[None]:
    """Own a folder, or the shards of a part in it.

    After an error, what was written is taken back, but for what parts have finished.
    """
    owner = output_dir.own_unplanned(
        folder, dataset_id, resumes=True, shards=shards, advice=" by --out"
    )
    if shards is not None:
        with owner:
            yield
        return
    with owner.for_one_call(), _taking_back(folder):
        yield


@contextlib.contextmanager
def _taking_back(folder: str) -> Iterator[None]:
    """Remove after an error what was written meanwhile: indexes, and files of values.

    But what a manifest names stays: an error may come when it is in place already.
    """
    for name in os.listdir(folder):
        if local.is_temporary(name) and is_sidecar(folder, name):  # of a part that was killed
            local.remove(os.path.join(folder, name))
    journal.remove_temporaries(folder)
    before = set(os.listdir(folder))
    try:
        yield
    except BaseException:
        with contextlib.suppress(NotPackedError):
            before |= files_of(manifest.load(locate(folder)))
        for name in sorted(set(os.listdir(folder)) - before):
            if is_sidecar(folder, name) or is_overlay(folder, name):
                local.remove(os.path.join(folder, name))
        raise
