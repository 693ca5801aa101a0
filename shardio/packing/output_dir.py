"""The directory that a packing goes to: what is refused there, who owns it, the file of the splits.

A directory holds one dataset or the splits of one. A dataset that is there is left as it is when it
is just the one asked for; another one is never replaced unasked. What the options alone tell is
refused before the source is listed, which may take minutes.

Who writes into a directory owns it, by the lock on its journal: `own` makes the journal, or goes on
under one that is there, or removes it where nobody can.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ..errors import BusyError, DamageError, ExistsError, OptionError, StorageError, printable
from ..formats import manifest
from ..storage import local, lock
from ..storage.location import locate
from ..storage.lock import JOURNAL
from ..units import show_count
from . import journal, plan
from .options import PackOptions
from .plan import Plan


def check(out: str, source: bytes = b"", names: Sequence[str] = ("",)) -> None:
    """Raise OptionError, ExistsError where splits of these names cannot be packed into OUT.

    source: that lies outside of OUT. names: [""] for a dataset without splits.
    """
    if os.path.lexists(out) and not os.path.isdir(out):
        raise OptionError(f"{printable(out)}: expected a directory, or nothing yet; this is a file")
    local.check_directory(out)
    if os.path.isdir(source):
        folder, target = os.path.realpath(os.fsdecode(source)), os.path.realpath(out)
        if f"{target}/".startswith(f"{folder.rstrip('/')}/"):
            raise OptionError(
                f"{printable(out)}: OUT lies in the folder to be packed; choose a directory "
                "outside of it"
            )
    storage = locate(out)
    if "" in names and storage.exists(manifest.SPLITS):
        raise ExistsError(f"{printable(out)}: splits are packed here; choose another directory")
    if "" not in names and (storage.exists(manifest.MANIFEST) or storage.exists(JOURNAL)):
        raise ExistsError(
            f"{printable(out)}: one dataset is packed here, and splits are to be; choose another "
            "directory"
        )


def refuse_other(directory: str, wanted: PackOptions) -> None:
    """Raise ExistsError when the dataset in a directory is another by its options alone."""
    there = manifest.load_if_packed(locate(directory))
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
        raise ExistsError(_another(directory, there, plan.changed(known, asked)))


def is_packed(directory: str, planned: Plan, sized: bool) -> bool:
    """Return whether just the dataset of a plan is committed here, with all its shards.

    Raises ExistsError when another one is. sized: the size of shards was asked for, and is not a
    default. Files are looked at, not read.
    """
    there = manifest.load_if_packed(locate(directory))
    if there is None:
        return False
    if there.dataset_id == planned.dataset_id:
        infos = map(there.shard, range(there.shards))
        with contextlib.suppress(OSError):
            return all(os.stat(os.path.join(directory, o.name)).st_size == o.size for o in infos)
        return False
    known = {"format": "record"} | {k: v for k, v in there.options.items() if k != "tiles"}
    options = {"format": "record"} | planned.options.record()
    if not sized:  # it follows from the records, and is no difference of its own where they differ
        resized = PackOptions.of(planned.options.record() | {"shard_size": known.get("shard_size")})
        if replace(planned, options=resized).dataset_id != there.dataset_id:
            options["shard_size"] = known.get("shard_size")
    by_default = () if sized else ("shard_size",)
    raise ExistsError(_another(directory, there, plan.changed(known, options, by_default)))


def _another(directory: str, there: manifest.Manifest, changed: Sequence[str]) -> str:
    differ = "".join(f"\n  option {line}" for line in changed)
    return (
        f"{printable(directory)}: another dataset is packed here "
        f"({show_count(there.records, 'record')}, id {there.dataset_id.hex()}):"
        + (differ or "\n  records, their sizes, fields or classes of the source are others")
        + ("\nGive the options that it has, choose" if changed else "\nChoose")
        + " another directory, or replace it with --overwrite"
    )


# --- its owner ------------------------------------------------------------------------------------


class Owner(contextlib.AbstractContextManager["Owner"]):
    """A directory that this process writes into: by the lock on its journal, until it is released.

    A context manager. `joined`: the journal was there before.
    """

    def __init__(self, directory: str, held: lock.Lock, ours: bytes | None) -> None:
        self.directory, self._held = directory, held
        self.joined = ours is None
        self._seal = None if ours is None else ours[-32:]  # a journal may be large

    def __exit__(self, *error: object) -> None:
        self.release()

    @property
    def is_locked(self) -> bool:
        """Return False where the file system has no locks."""
        return self._held.held is not None

    def journal(self) -> bytes:
        """Read the journal; opening its file would end the lock."""
        return self._held.read()

    def clean(self) -> None:
        """Remove what only unfinished work needs, the journal last, and release the directory."""
        journal.clean(self.directory, self._held.read())
        self.release()

    @contextlib.contextmanager
    def briefly(self) -> Iterator[None]:
        """Remove the journal alone at the end, and release the directory."""
        with self:
            try:
                yield
            finally:
                local.remove(os.path.join(self.directory, JOURNAL))
                local.sync_directory(self.directory)

    def give_up(self, packed: bool) -> None:
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
    fresh: Callable[[], bytes],
    joins: Callable[[bytes], bool],
    shards: range | None = None,
) -> Owner:
    """Become the owner of a directory, or of some shards in it. Raises BusyError, StorageError.

    fresh  the bytes of a new journal, for where none is
    joins  of a journal that is there, and nobody works under: whether we do, or remove it with all
           that it stands for; it raises where neither may be
    """
    bounds = (0, None) if shards is None else (shards.start, shards.stop)
    ours: bytes | None = None
    while True:
        try:
            held = lock.take(directory, *bounds)
        except FileNotFoundError:
            data = fresh()
            ours = data if lock.begin(directory, data) else None
            continue
        try:
            data = held.read()
            if data == ours or joins(data):
                return Owner(directory, held, ours if data == ours else None)
        except BaseException:
            held.release()
            raise
        held.release()
        with contextlib.suppress(FileNotFoundError), lock.whole(directory) as whole:
            if whole.read() == data:  # nobody was quicker
                journal.clean(directory, data)


def own_afresh(directory: str, dataset_id: bytes, advice: str = "") -> Owner:
    """Become the owner of a directory for work that cannot be resumed, as a Writer's.

    What such work left there is removed. Raises BusyError, StorageError, ExistsError for an
    unfinished packing, with advice.
    """

    def joins(data: bytes) -> bool:
        if journal.is_resumable(directory, data):  # its lock is free, so its owner is dead
            raise ExistsError(
                f"{printable(directory)}: an unfinished packing is here; finish it, or choose "
                f"another directory{advice}"
            )
        return False

    return own(
        directory, lambda: journal.of_writer(dataset_id, journal.shards_in(directory)), joins
    )


def own_again(directory: str) -> Owner:
    """Become the owner of an unfinished packing. Raises FileNotFoundError where there is none."""
    return Owner(directory, lock.take(directory), None)


def clean_up(directory: str, seal: bytes | None = None, packed: bool = True) -> None:
    """Remove a journal that nobody needs any more: of what is committed, or ours, by its seal.

    packed: what was to be built under ours is committed. Else it stays where parts joined it.
    """
    with (
        contextlib.suppress(FileNotFoundError, BusyError, StorageError),
        own_again(directory) as owner,
    ):
        data = owner.journal()
        ours = data[-32:] == seal and (packed or not journal.has_work(directory, data))
        if ours or journal.is_committed(directory, data):
            owner.clean()


# --- splits ---------------------------------------------------------------------------------------


def has_splits(out: str, names: Sequence[str]) -> bool:
    """Return whether shardio.json is there, and right."""
    try:
        return locate(out).read(manifest.SPLITS, manifest.MAX_SPLITS) == _splits_file(out, names)
    except (FileNotFoundError, DamageError):
        return False


def commit_splits(out: str, names: Sequence[str]) -> None:
    """Write shardio.json, after all that it names."""
    if not has_splits(out, names):
        for name in os.listdir(out):  # of a packer that was killed right here
            if name.endswith(f"-{manifest.SPLITS}.tmp") and journal.is_ours(out, name):
                local.remove(os.path.join(out, name))
        local.write_file(out, manifest.SPLITS, _splits_file(out, names))


def _splits_file(out: str, names: Sequence[str]) -> bytes:
    found = [manifest.load(locate(manifest.split_folder(out, name))).classes for name in names]
    classes = next((classes for classes in found if classes is not None), None)
    return manifest.dump_splits(names, classes)
