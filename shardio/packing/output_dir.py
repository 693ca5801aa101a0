"""The place that a packing goes to: what is refused there, who owns it, the file of the splits.

A directory, or the folder of an object store, holds one dataset or the splits of one. A dataset
that is there stays, if it is the one that is asked for. Another one is replaced only on request.
Options that rule a packing out are refused before the source is listed, which may take minutes.

Who writes into a directory owns it, by the lock on its journal: `own` makes the journal, or goes on
under one that is there, or removes it where nobody can. What goes into an object store is worked on
in a directory of this machine, which is owned so; the store itself has no locks.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from ..errors import BusyError, DamageError, ExistsError, OptionError, StorageError, printable
from ..formats import manifest
from ..images.filetype import ALL_ENDINGS
from ..storage import local, lock
from ..storage.base import Location
from ..storage.client import Request
from ..storage.local import LocalDirectory
from ..storage.location import Target
from ..storage.lock import JOURNAL
from ..storage.remote import RemoteLocation
from ..units import show_count
from . import journal, objects, plan
from .built import Built
from .journal import ReadBytes
from .options import PackOptions
from .plan import Plan

_SOME = 5  # images, from which on they are a dataset's: one may be the picture of --plot
_LOOKED = 10_000  # files and folders of an output directory that are looked at: 10 ms


def working_directory(place: RemoteLocation, given: str | None, work: str = "pack") -> str:
    """Return the directory of this machine where a packing into an object store works.

    given: by the user; default: one in the user's cache, of a name that the URL gives. work: what
    is done there; one kind does not meet another.
    """
    if given is not None:
        return given
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    name = f"{work}-{hashlib.sha256(place.url.encode(errors='surrogatepass')).hexdigest()[:16]}"
    return os.path.join(os.path.expanduser(caches), "shardio", name)


def check_shared(place: Target, given: object) -> None:
    """Raise OptionError where parts would build for a store, and were given no directory."""
    if place.remote and given is None:
        raise OptionError(
            f"{printable(place.url, 4096)}: parts that build for a store have a directory "
            "together, which all of them see, for the plan and for notes of what is uploaded: give "
            "the same one to all, and to `shardio commit`: --work-dir DIR"
        )


def check_working_directory(directory: str, source: Location, names: Sequence[str]) -> None:
    """Raise OptionError, ExistsError, StorageError where a packing into a store cannot work.

    Its shards have names of their content, and are removed when they are uploaded: a dataset that
    is there may have them, too.
    """
    shown = printable(directory, 4096)
    try:
        local.check_directory(directory)
        if os.path.isdir(directory) and not os.access(directory, os.W_OK | os.X_OK):
            raise StorageError(f"{shown}: no permission to write into it")
    except StorageError as error:
        raise StorageError(f"{error}. Choose the working directory with --work-dir") from error
    if lies_in(directory, source):
        raise OptionError(
            f"{shown}: the working directory lies in the folder to be packed; choose one outside "
            "of it with --work-dir"
        )
    if "" not in names and os.path.lexists(os.path.join(directory, JOURNAL)):
        raise ExistsError(
            f"{shown}: an unfinished packing of one dataset is in this working directory, and "
            "splits are to be packed; finish that one, or choose another directory with --work-dir"
        )
    for folder in {directory, *(manifest.split_folder(directory, name) for name in names)}:
        if not os.path.isdir(folder):
            continue
        found = set(os.listdir(folder))
        others = {manifest.MANIFEST, manifest.SPLITS} & found
        if JOURNAL not in found:
            others |= {name for name in found if journal.shard_number(name) is not None}
        for name in sorted(others):
            raise OptionError(
                f"{printable(os.path.join(folder, name), 4096)}: a dataset lies in the working "
                "directory; choose an empty one with --work-dir"
            )


def remove_working_directory(directory: str, names: Sequence[str]) -> None:
    """Remove the working directory of a packing, and of its splits, if nothing is left in it."""
    for name in (*filter(None, names), ""):
        with contextlib.suppress(OSError):
            os.rmdir(manifest.split_folder(directory, name))


def lies_in(directory: str, source: Location | None) -> bool:
    """Return whether a directory lies in the folder to be packed, or is it."""
    if not isinstance(source, LocalDirectory) or not os.path.isdir(source.root):
        return False
    folder, target = os.path.realpath(source.root), os.path.realpath(directory)
    return f"{target}/".startswith(f"{folder.rstrip('/')}/")


def check(place: Target, source: Location | None = None, names: Sequence[str] = ("",)) -> None:
    """Raise OptionError, ExistsError where splits of these names cannot be packed into OUT.

    source: that lies outside of OUT. names: [""] for a dataset without splits.
    """
    check_place(place, source)
    check_names(place, names)


def check_names(place: Target, names: Sequence[str]) -> None:
    """Raise ExistsError where splits of these names cannot be packed into OUT."""
    out = printable(place.url, 4096)
    if "" in names and place.exists(manifest.SPLITS):
        raise ExistsError(f"{out}: splits are packed here; choose another directory")
    if "" not in names and (place.exists(manifest.MANIFEST) or place.exists(JOURNAL)):
        raise ExistsError(
            f"{out}: one dataset is packed here, and splits are to be; choose another directory"
        )


def check_place(place: Target, source: Location | None) -> None:
    """Raise OptionError, ExistsError where nothing of this source can be packed into OUT."""
    out = printable(place.url, 4096)
    inside = False
    if isinstance(place, LocalDirectory):
        if os.path.lexists(place.root) and not os.path.isdir(place.root):
            raise OptionError(f"{out}: expected a directory, or nothing yet; this is a file")
        local.check_directory(place.root)
        inside = lies_in(place.root, source)
    elif isinstance(source, RemoteLocation):
        inside = f"{place.url.rstrip('/')}/".startswith(f"{source.url.rstrip('/')}/")
    if inside:
        raise OptionError(
            f"{out}: OUT lies in the folder to be packed; choose a directory outside of it"
        )
    refuse_images(place)


def has_dataset(place: Target) -> bool:
    """Return whether a dataset, or splits, are in a place, or were begun there."""
    return any(map(place.exists, (manifest.MANIFEST, manifest.SPLITS, JOURNAL)))


def refuse_images(place: Target) -> None:
    """Raise ExistsError for a directory of images: a dataset's files would lie among them.

    Not where a dataset is, or was begun: that is told otherwise, or gone on with.
    """
    if not isinstance(place, LocalDirectory) or has_dataset(place):
        return
    files = islice(_files_below(place.root), _LOOKED)
    images = (path for path in files if path.rpartition(".")[2].lower() in ALL_ENDINGS)
    found = list(islice(images, _SOME))
    if len(found) == _SOME:
        raise ExistsError(
            f"{printable(place.url, 4096)}: images are here, such as "
            f"{printable(os.path.relpath(found[0], place.root), 4096)}, and the files of a dataset "
            "would lie among them; choose an empty directory, or a new one"
        )


def _files_below(folder: str) -> Iterator[str]:
    """Yield the files below a folder, as they come, but hidden ones; "" for each folder."""
    folders = [folder]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for one in entries:
                if one.name.startswith("."):
                    continue
                is_folder = one.is_dir(follow_symlinks=False)
                if is_folder:
                    folders.append(one.path)
                yield "" if is_folder else one.path


def refuse_other(place: Target, wanted: PackOptions) -> None:
    """Raise ExistsError when the dataset in a place is another by its options alone."""
    there = manifest.load_if_packed(place)
    if there is None:
        return
    asked = {"encode": None, "jpeg_tiles": None, "keep_original": None} | wanted.record()
    # The source decides on the rest: `absent`, and what was not asked for.
    known = {name: there.options.get(name) for name in asked}
    if "format" in asked:
        known["format"] = there.format
    undecided = ["shard_size", "shuffle"] + ["keep_original"] * (wanted.source == "dataset")
    known |= {name: None for name in undecided if asked[name] is None}
    if asked["shuffle"] is None and known["seed"] is None:
        known["seed"] = asked["seed"]
    if known != asked:
        raise ExistsError(_another(place, there, plan.changed(known, asked)))


def is_packed(place: Target, planned: Plan, sized: bool) -> bool:
    """Return whether just the dataset of a plan is committed here, with all its shards.

    Raises ExistsError when another one is. sized: the size of shards was asked for, and is not a
    default. Files are looked at, not read.
    """
    there = manifest.load_if_packed(place)
    if there is None:
        return False
    if there.dataset_id == planned.dataset_id:
        return _has_shards(place, there)
    known = {"format": "record"} | {k: v for k, v in there.options.items() if k != "tiles"}
    options = {"format": "record"} | planned.options.record()
    if not sized:  # it follows from the records, and is no difference of its own where they differ
        resized = PackOptions.of(planned.options.record() | {"shard_size": known.get("shard_size")})
        sizes = np.concatenate([rows.sizes for rows in planned.all_rows()])
        if replace(planned, options=resized).with_dataset_id(sizes).dataset_id != there.dataset_id:
            options["shard_size"] = known.get("shard_size")
    by_default = () if sized else ("shard_size",)
    raise ExistsError(_another(place, there, plan.changed(known, options, by_default)))


def _has_shards(place: Target, there: manifest.Manifest) -> bool:
    """Return whether all shards of a manifest are in a place, by their names and sizes."""
    infos = map(there.shard, range(there.shards))
    if isinstance(place, LocalDirectory):
        with contextlib.suppress(OSError):
            return all(os.stat(place.path(info.name)).st_size == info.size for info in infos)
        return False
    looks = ((info, Request(place.store, info.name, what="head")) for info in infos)
    found = [(info, objects.looked(look)) for info, look in objects.each(looks, objects.LOOKS)]
    return all(reply is not None and reply.size == info.size for info, reply in found)


def is_of(place: Target, planned: Plan, sent: Iterable[Built]) -> bool:
    """Return whether the dataset of a plan is in a place, of no shards but those that were sent."""
    there = manifest.load_if_packed(place)
    if there is None or there.dataset_id != planned.dataset_id:
        return False
    names = {one.info.name for one in sent if one.info is not None}
    return all(there.shard(number).name in names for number in range(there.shards))


def refuse_unseen(place: Target, names: Iterable[str]) -> None:
    """Raise StorageError where files that other machines wrote are not in a directory."""
    for name in names if isinstance(place, LocalDirectory) else ():
        if not place.exists(name):
            raise StorageError(
                f"{printable(os.path.join(place.url, name), 4096)}: a node of the cluster wrote "
                "it, but it is not here: expected a directory that this machine and all nodes "
                "share, under one path. Nothing was committed"
            )


def _another(place: Target, there: manifest.Manifest, changed: Sequence[str]) -> str:
    differ = "".join(f"\n  option {line}" for line in changed)
    return (
        f"{printable(place.url, 4096)}: another dataset is packed here "
        f"({show_count(there.records, 'record')}, id {there.dataset_id.hex()}):"
        + (differ or "\n  records, their sizes, fields or classes of the source are others")
        + ("\nGive the options that it has, choose" if changed else "\nChoose")
        + " another directory, or replace it with --overwrite"
    )


# --- its owner ------------------------------------------------------------------------------------


class Owner(contextlib.AbstractContextManager["Owner"]):
    """A directory that this process writes into: by the lock on its journal, until it is released.

    A context manager. `joined`: the journal was there before. ours: the last bytes of one that we
    made.
    """

    def __init__(self, directory: str, held: lock.Lock, ours: bytes | None) -> None:
        self.directory, self._held = directory, held
        self.joined = ours is None
        self._seal = ours

    def __exit__(self, *error: object) -> None:
        self.release()

    @property
    def is_locked(self) -> bool:
        """Return False where the file system has no locks."""
        return self._held.held is not None

    def journal(self) -> bytes:
        """Read the head of the journal; opening its file would end the lock."""
        return self._held.head()

    def read(self, start: int, length: int) -> bytes:
        """Read bytes of the whole journal."""
        return self._held.read(start, length)

    def clean(self, *, keep: bool = False) -> None:
        """Remove what only unfinished work needs, the journal last, and release the directory.

        keep: its head stays, for parts that start again
        """
        head = self._held.head()
        if keep:
            local.write_file(self.directory, journal.PLANNED, head)
        journal.clean(self.directory, head)
        self.release()

    @contextlib.contextmanager
    def for_one_call(self) -> Iterator[None]:
        """Remove the journal alone at the end, and release the directory."""
        with self:
            try:
                yield
            finally:
                local.remove(os.path.join(self.directory, JOURNAL))
                local.sync_directory(self.directory)

    def release_to_winner(self, packed: bool) -> None:
        """Release the directory, where another packer was first, and remove our journal from it.

        packed: what we were to build is committed. Else, of what other parts built under our
        journal, nothing is removed.
        """
        self.release()
        clean_up(self.directory, self._seal, packed)

    def release(self) -> None:
        """Give the directory back, with what lies there."""
        self._held.release()


def own(
    directory: str,
    new_journal: Callable[[], Iterable[bytes]],
    can_resume: Callable[[bytes, ReadBytes], bool],
    shards: range | None = None,
) -> Owner:
    """Become the owner of a directory, or of some shards in it. Raises BusyError, StorageError.

    new_journal  makes the bytes of a journal, where there is none
    can_resume   is asked about a journal that lies there, when nobody works under it. It gets the
                 head of the journal, and a function that reads the rest. True: we go on under this
                 journal. False: the journal and its unfinished work are removed. It raises an error
                 where neither is allowed
    """
    bounds = (0, None) if shards is None else (shards.start, shards.stop)
    ours: bytes | None = None
    while True:
        try:
            held = lock.take(directory, *bounds)
        except FileNotFoundError:
            ours = lock.begin(directory, new_journal)
            continue
        try:
            data = held.head()
            is_ours = data[-lock.SEAL :] == ours
            if is_ours or can_resume(data, held.read):
                return Owner(directory, held, ours if is_ours else None)
        except BaseException:
            held.release()
            raise
        held.release()
        with contextlib.suppress(FileNotFoundError), lock.hold_all(directory) as whole:
            if whole.head() == data:  # nobody was quicker
                journal.clean(directory, data)


def own_unplanned(
    directory: str,
    dataset_id: bytes,
    *,
    resumes: bool = False,
    shards: range | None = None,
    advice: str = "",
) -> Owner:
    """Become the owner of a directory for other work than a packing, or of some shards in it.

    What such work left there is removed, unless it was on the same dataset, and `resumes`: then it
    is gone on with. Raises BusyError, StorageError, ExistsError for an unfinished packing, with
    advice.
    """

    def can_resume(data: bytes, _: ReadBytes) -> bool:
        if journal.is_resumable(directory, data):  # its lock is free, so its owner is dead
            raise ExistsError(
                f"{printable(directory)}: an unfinished packing is here; finish it, or choose "
                f"another directory{advice}"
            )
        with contextlib.suppress(DamageError):
            return resumes and journal.identity(data)[0] == dataset_id
        return False

    def new_journal() -> list[bytes]:
        return [journal.of_writer(dataset_id, journal.shards_in(directory))]

    return own(directory, new_journal, can_resume, shards)


def own_unfinished(directory: str) -> Owner:
    """Become the owner of an unfinished packing. Raises FileNotFoundError where there is none."""
    return Owner(directory, lock.take(directory), None)


def clean_up(
    directory: str, seal: bytes | None = None, packed: bool = True, *, stored: bytes | None = None
) -> None:
    """Remove a journal that nobody needs any more: of what is committed, or ours, by its seal.

    packed: what was to be built under ours is committed. Else it stays where parts joined it.
    stored: the id of the dataset that is committed in the object store that is packed into.
    """
    with (
        contextlib.suppress(FileNotFoundError, BusyError, StorageError),
        own_unfinished(directory) as owner,
    ):
        data = owner.journal()
        ours = data[-lock.SEAL :] == seal and (packed or not journal.has_work(directory, data))
        if stored is not None:
            with contextlib.suppress(DamageError):
                ours = ours or journal.identity(data)[0] == stored
        if ours or journal.is_committed(directory, data):
            owner.clean()


# --- splits ---------------------------------------------------------------------------------------


def begun_splits(out: str, within: str = "") -> list[str]:
    """Return the splits of a packing that was begun in OUT; none where it has no splits.

    within: the folder in each dataset where it is packed
    """
    if os.path.lexists(os.path.join(out, within, JOURNAL)):
        return []
    return manifest.planned_splits(out, within)


def building_folder(out: str, split: str, within: str) -> str:
    """Return where the parts build a split. within: the folder in it, or ""."""
    folder = manifest.split_folder(out, split)
    return os.path.join(folder, within) if within else folder


def has_splits(place: Target, names: Sequence[str]) -> bool:
    """Return whether shardio.json is there, and right."""
    try:
        return place.read(manifest.SPLITS, manifest.MAX_SPLITS) == _splits_file(place, names)
    except (FileNotFoundError, DamageError):
        return False


def commit_splits(place: Target, names: Sequence[str]) -> None:
    """Write shardio.json, after all that it names."""
    if not has_splits(place, names):
        if isinstance(place, LocalDirectory):
            out = place.root
            for name in os.listdir(out):  # of a packer that was killed right here
                if name.endswith(f"-{manifest.SPLITS}.tmp") and journal.is_ours(out, name):
                    local.remove(os.path.join(out, name))
        place.write(manifest.SPLITS, _splits_file(place, names))


def _splits_file(place: Target, names: Sequence[str]) -> bytes:
    found = [manifest.load(place.below(name)).classes for name in names]
    classes = next((classes for classes in found if classes is not None), None)
    return manifest.dump_splits(names, classes)
