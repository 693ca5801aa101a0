"""Where a dataset lies that is changed: a directory, or the folder of an object store.

How a commit happens differs, and only here. Whoever changes a directory owns it, so that nobody
else writes there meanwhile, and renames. A store has no locks: `replace` puts a file only in place
of the content that was read before, and the one of two writers that comes later is told. What is
written before, under names of its content, is nobody's until then, and `gc` finds it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..errors import BusyError, OptionError, StorageError, printable
from ..formats import manifest
from ..formats.base import ShardInfo
from ..formats.overlay import has_overlay_name
from ..storage import local
from ..storage.base import Location, path_in
from ..storage.client import ABSENT, RequestError
from ..storage.local import LocalDirectory
from ..storage.location import Target, locate
from ..storage.lock import JOURNAL
from ..storage.options import Storage
from ..storage.remote import RemoteLocation
from ..storage.stores import READ_ONLY
from ..units import check_group
from . import journal, output_dir
from .built import Built
from .journal import WORK
from .objects import missing_in
from .uploads import Uploads

# A mark that no object has; a generation 0 would be one that is not there.
_NO_MARK = '{"e_tag": "\\"00000000000000000000000000000000\\"", "version": "1"}'


class Stored(NamedTuple):
    """Hold a small file as it was read, for `replace`."""

    data: bytes
    mark: str = ""  # by which a store tells its content from another


class Workspace:
    """A directory of this machine where files of a dataset are built, under their names.

    This one is the dataset's own: what is built is where it is to be.
    """

    def __init__(self, folder: str, owner: output_dir.Owner | None = None) -> None:
        self.folder, self._owner = folder, owner

    def take(self, info: ShardInfo) -> None:
        """Bring a file that was built to the dataset, until `finish` at the latest."""

    def finish(self) -> None:
        """Wait until all that was taken is in the place. Raises StorageError, DamageError."""

    def close(self) -> None:
        """Remove what was built and is of no version, and let others in. Raises StorageError."""
        if self._owner is not None:
            with self._owner:
                self._owner.clean()


class _Uploading(Workspace):
    """A directory whose files go into a store, several at a time, and are then removed."""

    def __init__(self, folder: str, target: RemoteLocation, owner: output_dir.Owner) -> None:
        super().__init__(folder, owner)
        self._target, self._names = target, list[str]()
        self._uploads = Uploads(target, folder, bytes(16))

    def take(self, info: ShardInfo) -> None:
        """Send a file, if the store does not have it, as one that was interrupted sent it.

        Waits while enough are under way. Raises StorageError, DamageError.
        """
        self._names.append(info.name)
        self._uploads.add(Built(info))

    def finish(self) -> None:
        self._uploads.finish()
        _refuse_gone(self._target, self._names)

    def close(self) -> None:
        """End what is under way, and remove what was built here; what was sent stays."""
        try:
            self._uploads.__exit__()
            self.empty()
        finally:
            super().close()
            output_dir.remove_working_directory(self.folder, [""])

    def empty(self) -> None:
        """Remove what was built here, also by one that was killed."""
        for name in os.listdir(self.folder):
            if journal.shard_number(name) is not None or has_overlay_name(name):
                local.remove(os.path.join(self.folder, name))


class Place:
    """A directory, or a folder of a store, with a dataset or the splits of one: the base class."""

    location: Target

    def __init__(self, location: Target) -> None:
        self.location = location

    @property
    def url(self) -> str:
        """Return its path or URL, as it was given, without secrets."""
        return self.location.url

    def datasets(self) -> dict[str, Place]:
        """Return the datasets in it by split; itself as "" where it is one. Raises as load."""
        return {
            name: self.below(name) if name else self for name in manifest.datasets_in(self.location)
        }

    def below(self, name: str) -> Place:
        """Return the folder of this name in it."""
        return place_at(self.location.below(name))

    def owned(self) -> contextlib.AbstractContextManager[None]:
        """Keep others from changing it, if that can be done.

        Raises BusyError, NotPackedError, ExistsError where an unfinished packing is here, and
        OptionError for a store in which two writers could not be told apart.
        """
        raise NotImplementedError

    def prepare(self) -> None:
        """Remove what a change left that was killed; raise as `owned` before long work begins."""
        raise NotImplementedError

    def stored(self, name: str) -> Stored:
        """Read a small file that will be replaced. Raises FileNotFoundError, StorageError."""
        raise NotImplementedError

    def replace(self, name: str, old: Stored | None, data: bytes, kept: str = "") -> None:
        """Write a file in place of what was read; None: of none.

        kept: the name that it gets when another has taken its place. Raises BusyError where there
        is something else now, StorageError.
        """
        raise NotImplementedError

    @contextlib.contextmanager
    def workspace(self) -> Iterator[Workspace]:
        """Give a directory where shards, and files beside them, are built, in a place of ours.

        When the work ends, all that it took is in the place. Raises StorageError, BusyError.
        """
        space = self._workspace()
        try:
            yield space
            space.finish()
        finally:
            space.close()

    def _workspace(self) -> Workspace:
        raise NotImplementedError

    def begin(self, dataset_id: bytes) -> Workspace:
        """Own a place, where there may be nothing yet, as far as it can be, to build shards of it.

        `Workspace.close` gives it back. Raises as `owned`, StorageError.
        """
        raise NotImplementedError

    def builds_in(self, given: str | None) -> str:
        """Return the directory of this machine where a packing builds what will be added.

        given: by the user, for a store
        """
        raise NotImplementedError

    def packing(self, directory: str, source: Location) -> Target:
        """Return where a packing is to put the shards that it builds in that directory.

        Raises OptionError, ExistsError, StorageError where it cannot work there.
        """
        raise NotImplementedError

    def add(self, directory: str, names: Sequence[str]) -> None:
        """Have shards that a packing built there stand beside the others. Raises StorageError."""
        raise NotImplementedError

    def changed_meanwhile(self) -> BusyError:
        """Return the error of a writer that came too late."""
        return BusyError(
            f"{printable(self.url, 4096)}: something else changed this dataset meanwhile. Nothing "
            "was committed: run it again"
        )


class _Directory(Place):
    """A directory of this machine, or a mounted one."""

    location: LocalDirectory

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        manifest.load(self.location)  # explains what is here, if it is nothing
        with output_dir.own_unplanned(self.url, secrets.token_bytes(16)) as owner:
            try:
                yield
            finally:
                owner.clean()  # also of what was left by others that were killed

    def prepare(self) -> None:
        if self.location.exists(JOURNAL):
            with self.owned():
                pass

    def stored(self, name: str) -> Stored:
        return Stored(self.location.read(name, manifest.MAX_MANIFEST))

    def replace(self, name: str, old: Stored | None, data: bytes, kept: str = "") -> None:
        self.location.write(name, data)

    def _workspace(self) -> Workspace:
        return Workspace(self.url)

    def begin(self, dataset_id: bytes) -> Workspace:
        local.make_directory(self.url)
        return Workspace(self.url, output_dir.own_unplanned(self.url, dataset_id))

    def builds_in(self, given: str | None) -> str:
        if given is not None:
            raise OptionError("work_dir: only where OUT is a URL; shards are built in OUT itself")
        return os.path.join(self.url, WORK)

    def packing(self, directory: str, source: Location) -> Target:
        return LocalDirectory(directory)

    def add(self, directory: str, names: Sequence[str]) -> None:
        output_dir.refuse_unseen(LocalDirectory(directory), names)
        for name in names:
            local.share(os.path.join(directory, name), self.url)
        local.sync_directory(self.url)


class _Folder(Place):
    """A folder of an object store."""

    location: RemoteLocation

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        self.prepare()
        yield

    def stored(self, name: str) -> Stored:
        return Stored(*self.location.read_marked(name, manifest.MAX_MANIFEST))

    def replace(self, name: str, old: Stored | None, data: bytes, kept: str = "") -> None:
        if self.location.replace(name, data, ABSENT if old is None else old.mark):
            return
        # An answer that was lost: it was sent again, and then it had been written already.
        with contextlib.suppress(FileNotFoundError):
            if self.location.read(name, manifest.MAX_MANIFEST) == data:
                return
        if not kept or not self.location.exists(kept):
            raise self.changed_meanwhile()

    def _workspace(self) -> Workspace:
        folder = output_dir.working_directory(self.location, None, "change")
        local.make_directory(folder)
        owner = output_dir.own_unplanned(folder, secrets.token_bytes(16))
        space = _Uploading(folder, self.location, owner)
        try:
            space.empty()
        except BaseException:
            owner.release()
            raise
        return space

    def begin(self, dataset_id: bytes) -> Workspace:
        self.prepare()
        return self._workspace()

    def builds_in(self, given: str | None) -> str:
        return output_dir.working_directory(self.location, given, "append")

    def packing(self, directory: str, source: Location) -> Target:
        output_dir.check_working_directory(directory, source, [""])
        return self.location  # it uploads them

    def add(self, directory: str, names: Sequence[str]) -> None:
        _refuse_gone(self.location, names)

    def prepare(self) -> None:
        """Raise OptionError where the store writes an object although it is not the one meant.

        That is tried with one that is not there, so that nothing is to be cleaned up.
        """
        name = f".shardio-{local.token()}-probe.tmp"
        why = ""
        try:
            if not self.location.replace(name, b"", _NO_MARK):
                return
            self.location.remove(name)
        except StorageError as error:
            cause = error.__cause__
            if not isinstance(cause, RequestError) or cause.kind != "other":
                raise
            why = f" {error}"
        raise OptionError(
            f"{printable(self.url, 4096)}: this store does not replace a file only if nobody "
            f"else has done so: of two changes at once one could be lost.{why} Change the dataset "
            "in a directory, and `shardio copy` it"
        )


def _refuse_gone(location: RemoteLocation, names: Sequence[str]) -> None:
    if gone := missing_in(location, names):
        raise StorageError(
            f"{path_in(location, gone[0])}: it was uploaded, and is not there any more: "
            "did `gc` run here meanwhile? Nothing was committed: run it again"
        )


def find_place(path: str | bytes | os.PathLike[Any], storage: Storage | None = None) -> Place:
    """Return the place behind a path or URL. Nothing is read yet.

    Raises OptionError where nothing can be written.
    """
    given = check_group("storage", storage, Storage)
    # What is there now; where files of others are is nothing to this one.
    found = locate(path, replace(given, root=None, cache=None, cache_bytes=None))
    if isinstance(found, RemoteLocation) and found.store.scheme in READ_ONLY:
        raise OptionError(
            f"{found.url}: expected a directory, or s3://, gs:// or az:// here; "
            f"{found.store.scheme}:// is read only"
        )
    return place_at(found)


def data_root(storage: Storage | None) -> Location | None:
    """Return where files of others are whose index lies elsewhere; None: beside it."""
    if storage is None or storage.root is None:
        return None
    return locate(storage.root, storage)


def place_at(location: Target) -> Place:
    """Return a location, read without a cache, as a place."""
    if isinstance(location, LocalDirectory):
        return _Directory(location)
    return _Folder(location)
