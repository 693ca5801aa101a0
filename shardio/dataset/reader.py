"""Open shards, and the rows that are read from them."""

from __future__ import annotations

import errno
import os
import resource
import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

from .. import notebook
from ..errors import DamageError, OptionError, StorageError, printable
from ..formats import check_format, expect_shard, open_shard
from ..formats.base import Column, Shard, ShardInfo
from ..formats.foreign.row_groups import cache_bytes
from ..formats.index import key_hash
from ..formats.manifest import Manifest, choose_split
from ..formats.overlay import most_files
from ..formats.record import erased_in
from ..formats.sample import Sample, Schema
from ..formats.version import NONE, load_excluded, load_version
from ..order.rng import Int64s
from ..order.subset import Remaining
from ..storage.base import Location, path_in
from ..storage.local import memory_available
from ..storage.location import locate
from ..storage.options import Storage
from ..units import show_count, show_size

# Open shards of a reader. Each costs its index, 2 to 24 bytes a record, and a descriptor, of which
# the user's program and torch's tensors need some too: a process may have 1,024 on most Linux
# systems, 256 on macOS, and a reader takes a quarter at most. Opening one again costs 0.15 ms.
OPEN_SHARDS = 256
_AHEAD = 32  # shards whose indexes are asked for before the one that is looked at
_CLASSES = 8  # whose names a notebook shows


class ShardRows(NamedTuple):
    """The rows of a batch that are of one shard."""

    shard: Shard
    records: Int64s  # (n,) their numbers in the shard, ascending
    rows: Int64s  # (n,) which rows of the batch they are
    held: list[bytes | None] | None  # of each what was held; None: nothing


# A record that is to be read: its number in the dataset, its shard, its number there, and its bytes
# where they were held. A plain tuple: a named one takes 0.2 us to make.
Row = tuple[int, Shard, int, bytes | None]


def key_hashes(keys: Iterable[bytes]) -> Column:
    """Return the hashes of keys by which `records_with_keys` finds them."""
    return np.unique(np.array([*map(key_hash, keys)], np.uint32))


def records_with_keys(
    shard: Shard, keys: Collection[bytes], hashes: Column, hidden: Int64s
) -> Iterator[tuple[int, bytes]]:
    """Yield the records of a shard that have one of these keys, but for hidden ones.

    hashes: of the keys. Raises DamageError.
    """
    records = np.flatnonzero(np.isin(shard.key_hashes, hashes))
    for record in np.setdiff1d(records, hidden).tolist():
        if (key := shard.key(record)) in keys:
            yield record, key


def read(row: Row) -> Sample:
    """Read the sample of a row and check it. Several threads may read, in any order.

    Raises DamageError.
    """
    _, shard, record, held = row
    return shard.read(record) if held is None else shard.decode(record, held)


class Reader:
    """Open a dataset's shards, each when first needed, by the process that needs it.

    Descriptors are not inherited: a forked child starts without them, and a pickle holds none.
    Threads may share a reader, and so may iterators: each asks for shards with the advice that its
    own reads need (`scattered`), and a shard is open once for each advice in use. Advice changes
    how fast bytes come, never which. Raises DamageError, StorageError, VersionError.

    root      where the shards are, if not beside the manifest
    verify    check what a format checks only once, when a shard is opened; see its page
    limit     shards that are open at once; default: as many as the process can spare
    excluded  the numbers of the records that were dropped; default: as the manifest says. A shard
              of which all were dropped opens, whatever it looks like
    wanted    as `want` has it
    tolerant  a shard that is damaged opens, and raises when it is read
    """

    def __init__(
        self,
        storage: Location,
        manifest: Manifest,
        *,
        root: Location | None = None,
        verify: bool = True,
        limit: int | None = None,
        excluded: Int64s | None = None,
        wanted: frozenset[str] | None = None,
        tolerant: bool = False,
    ) -> None:
        self.tolerant = tolerant
        self.index = storage  # of the manifest and the indexes
        self.storage = storage if root is None else root
        self.manifest = manifest
        self.mean_bytes = manifest.mean_bytes  # of storage per record, index included
        each = 1 + sum(map(most_files, manifest.overlays))
        self.limit = max(1, spare_descriptors() // each) if limit is None else limit
        # (shards + 1,) the number of the first record of each shard; last, of all records, those
        # that were dropped included: a record keeps its number.
        self.starts = np.zeros(manifest.shards + 1, np.int64)
        np.cumsum(manifest.shard_records, out=self.starts[1:])
        if excluded is None:
            excluded = load_excluded(storage, manifest)
        self.remaining = Remaining(excluded, self.starts) if len(excluded) else None
        self._opening = replace(manifest.opening(storage, root, verify=verify), wanted=wanted)
        self._most = 0  # bytes of open shards that are in memory; 0: to be found out
        check_format(manifest)
        self.forget()
        _READERS.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        more = {"root": self.storage, "verify": self._opening.verify, "limit": self.limit}
        more["excluded"] = self.dropped
        more["wanted"], more["tolerant"] = self._opening.wanted, self.tolerant
        return partial(Reader, **more), (self.index, self.manifest)  # type: ignore[arg-type]

    def of_version(self, manifest: Manifest) -> Reader:
        """Return a reader of another version of the dataset. Raises DamageError."""
        root, verify = self.storage, self._opening.verify
        own = {"root": root, "verify": verify, "limit": self.limit, "tolerant": self.tolerant}
        return Reader(self.index, manifest, **own, wanted=self._opening.wanted)  # type: ignore[arg-type]

    def want(self, fields: Iterable[str] | None) -> None:
        """Note which fields samples need at least: values beside the shards of others stay unread.

        None: all. Numbers and booleans are always there.
        """
        wanted = None if fields is None else frozenset(fields)
        self._opening = replace(self._opening, wanted=wanted)
        self.forget()

    @property
    def records(self) -> int:
        """Return the number of records, without those that were dropped."""
        return self.stored_records if self.remaining is None else len(self.remaining)

    @property
    def stored_records(self) -> int:
        """Return the number of records in all shards, those that were dropped included."""
        return int(self.starts[-1])

    @property
    def dropped(self) -> Int64s:
        """Return the numbers of the records that were dropped, ascending."""
        return NONE if self.remaining is None else self.remaining.excluded

    def dropped_in(self, shard: int) -> Int64s:
        """Return the records of a shard that were dropped, by their numbers in it, ascending."""
        bounds = self.starts[shard : shard + 2]
        return self.dropped[slice(*np.searchsorted(self.dropped, bounds))] - int(bounds[0])

    def with_keys(
        self, keys: Collection[bytes], *, dropped: bool = False
    ) -> Iterator[tuple[int, int, bytes]]:
        """Yield the records that have one of these keys: shard, number there, and key.

        dropped: also those that were dropped, but not erased. Only keys of whose hash one of `keys`
        is are read. Raises DamageError.
        """
        hashes = key_hashes(keys)
        for place in range(self.manifest.shards):
            self.will_open(range(place + 1, min(place + 1 + _AHEAD, self.manifest.shards)))
            shard = self.shard(place)
            hidden = erased_in(shard) if dropped else self.dropped_in(place)
            for record, key in records_with_keys(shard, keys, hashes, hidden):
                yield place, record, key

    @property
    def counts(self) -> Int64s:
        """Return the number of records in each shard, without those that were dropped."""
        return np.diff(self.starts) if self.remaining is None else self.remaining.counts

    def shard(self, number: int, scattered: bool = False) -> Shard:
        """Give a shard, opened. It stays usable while it is referenced, in the cache or not.

        scattered: its records will be read in no order; the system is not to read ahead.
        """
        place = ~number if scattered else number
        try:
            self._opened.move_to_end(place)
            return self._opened[place]
        except KeyError:
            return self._miss(number, place)

    def will_open(self, numbers: Iterable[int]) -> None:
        """Announce that these shards will be needed soon: the ends of several come at once."""
        if self.storage.remote:
            for number in numbers:
                if number not in self._opened and ~number not in self._opened:
                    expect_shard(self.manifest.format, self._opening, self.manifest.shard(number))

    def begin_pass(self) -> object:
        """Note that an iterator begins to announce what it will read. Returns its token."""
        token = object()
        self._passes.add(token)
        return token

    def end_pass(self, token: object) -> None:
        """Let go of what was announced and not read, when the last iterator has ended.

        Else what a pass that was left early had asked for would be held, and count as in flight.
        """
        self._passes.discard(token)
        if self.storage.remote and not self._passes:
            self.storage.let_go()

    def locate(self, number: int) -> tuple[int, int]:
        """Turn the number of a record in the dataset into its shard, and its number there."""
        shard = int(np.searchsorted(self.starts, number, side="right")) - 1
        return shard, number - int(self.starts[shard])

    def key_of(self, number: int) -> bytes:
        """Return the key of a record, by its number in the dataset. Raises DamageError.

        "?" of one whose key cannot be read, where shards that are damaged open.
        """
        shard, record = self.locate(number)
        try:
            return self.shard(shard).key(record)
        except DamageError:
            if not self.tolerant:
                raise
            return b"?"

    def number(self, place: int) -> int:
        """Return the number of a record, by its place among those that were not dropped."""
        remaining = self.remaining
        return place if remaining is None else int(remaining.at(np.array([place]))[0])

    def place(self, number: int) -> int | None:
        """Return the place of a record among those that were not dropped; None: it was."""
        return number if self.remaining is None else self.remaining.find(number)

    def forget(self) -> None:
        """Let go of all open shards. A descriptor closes with the last user of its shard."""
        self._opened: OrderedDict[int, Shard] = OrderedDict()  # by number; ~number: scattered
        self._passes: set[object] = set()  # iterators under way
        self._lock = threading.Lock()

    def _miss(self, number: int, place: int) -> Shard:
        with self._lock:
            known = self._opened.get(place)
            if known is None:
                info = self.manifest.shard(number)
                known = self._opened_shard(info, number)
                if place < 0:
                    known.scattered()
                opened = self._opened
                opened[place] = known
                while len(opened) > self.limit or (len(opened) > 1 and self._too_large(known)):
                    opened.popitem(last=False)
            return known

    def _opened_shard(self, info: ShardInfo, number: int) -> Shard:
        try:
            try:
                return self._open(info)
            except FileNotFoundError:
                missing = self.manifest.missing(info, self.index, self.storage)
                raise DamageError(missing) from None
        except DamageError as error:
            if info.records and len(self.dropped_in(number)) == info.records:
                return cast(Shard, DroppedShard(info, error, self.manifest.schema))
            if not self.tolerant:
                raise
            info = replace(info, name=path_in(self.storage, info.name))  # as those that open
            return cast(Shard, UnopenedShard(info, error))

    def _too_large(self, newest: Shard) -> bool:
        """Say whether open shards that are in memory as a whole take more than they may."""
        if not newest.memory:
            return False
        if not self._most:
            self._most = cache_bytes(memory_available())
        return sum(one.memory for one in self._opened.values()) > self._most

    def _open(self, info: ShardInfo) -> Shard:
        try:
            return open_shard(self.manifest.format, self._opening, info)
        except StorageError as error:
            if getattr(error.__cause__, "errno", None) not in (errno.EMFILE, errno.ENFILE):
                raise
        # Others have taken the descriptors that were left: give back those of all readers, once.
        for reader in list(_READERS):
            reader._opened = OrderedDict()
        return open_shard(self.manifest.format, self._opening, info)


def open_reader(
    path: str | os.PathLike[str],
    split: str | None,
    options: Storage,
    version: str | None = None,
    *,
    tolerant: bool = False,
) -> Reader:
    """Open the dataset at a path, or the one of that split within it; a version of it, or as it is.

    tolerant: as of Reader.

    Raises NotPackedError, DamageError, VersionError, OptionError.
    """
    return open_index(choose_split(locate(path, options), split), options, version, tolerant)


def open_index(
    index: Location, options: Storage, version: str | None = None, tolerant: bool = False
) -> Reader:
    """Open the dataset whose manifest lies in a location. Raises as `open_reader` does."""
    root = None if options.root is None else locate(options.root, options)
    if root is not None and not root.exists(""):
        raise OptionError(f"root is {printable(root.url, 4096)}: there is no such directory")
    one, verify = load_version(index, version), options.verify_open
    return Reader(index, one, root=root, verify=verify, tolerant=tolerant)


class UnopenedShard:
    """Stand for a shard that cannot be opened, so that each of its records is skipped."""

    memory = 0

    def __init__(self, info: ShardInfo, error: DamageError) -> None:
        self.name, self.records, self._text = info.name, info.records, str(error)
        self.sizes = np.broadcast_to(np.int64(0), info.records)

    def hold(self, start: int, stop: int) -> list[bytes | None]:
        """Return that nothing is held of these records."""
        return [None] * (stop - start)

    def will_need(self, start: int, stop: int, *, keep: bool = False) -> None:
        """Do nothing: there is nothing to announce."""

    def scattered(self) -> None:
        """Do nothing: there is nothing to read."""

    def close(self) -> None:
        """Do nothing: nothing is open."""

    @property
    def error(self) -> DamageError:
        """Return why it cannot be opened, anew: one that is raised often would grow."""
        return DamageError(self._text)

    def __getattr__(self, name: str) -> Any:
        raise self.error


class DroppedShard(UnopenedShard):
    """Stand for a shard that cannot be opened, and of which nobody needs a record: all are dropped.

    Its index is one of records that were erased.
    """

    def __init__(self, info: ShardInfo, error: DamageError, schema: Schema) -> None:
        super().__init__(info, error)
        self.erased = np.arange(info.records)
        self.key_hashes = np.zeros(info.records, "<u4")
        kinds = (one for one in schema.fields if one[1] in _NOTHING)
        self.columns = {name: np.zeros(info.records, _NOTHING[kind]) for name, kind in kinds}


# The smallest type of numpy for values of each kind: joined to others, it changes theirs least.
_NOTHING = {"int": "|u1", "float": "<f4", "bool": "|b1"}


class ManifestInfo:
    """Give what the manifest says, under the names that torchvision's datasets have for it."""

    reader: Reader  # of the dataset's shards, those outside of a selection included

    @property
    def manifest(self) -> Manifest:
        """Return the dataset's manifest."""
        return self.reader.manifest

    @property
    def classes(self) -> list[str] | None:
        """Return the names of the labels, by label; None when there are none."""
        classes = self.manifest.classes
        return None if classes is None else list(classes)

    @property
    def class_to_idx(self) -> dict[str, int] | None:
        """Return the label of each class; None when there are none."""
        classes = self.manifest.classes
        return None if classes is None else {name: label for label, name in enumerate(classes)}

    def _repr_html_(self) -> str:
        return notebook.facts(repr(self), self._facts())

    def _facts(self) -> Iterator[tuple[str, str]]:
        """Iterate over what a notebook shows: names, and what is said of them."""
        manifest = self.manifest
        shards = show_count(manifest.shards, "shard")
        yield (
            "records",
            f"{show_count(manifest.records, 'record')}, {show_size(manifest.size)}, {shards}",
        )
        if manifest.classes is not None:
            more = ", ..." if len(manifest.classes) > _CLASSES else ""
            names = ", ".join(manifest.classes[:_CLASSES])
            yield "classes", f"{len(manifest.classes):,}: {names}{more}"
        yield "fields", ", ".join(f"{name} ({kind})" for name, kind in manifest.schema.fields)
        yield "format", f"{manifest.format}, version {manifest.version}"


def spare_descriptors() -> int:
    """Return OPEN_SHARDS, or a quarter of the descriptors that this process may have, if less."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_SHARDS if soft == resource.RLIM_INFINITY else max(1, min(OPEN_SHARDS, soft // 4))


# Descriptors and locks are not to be inherited: what is open when a process forks is forgotten in
# the child. A check of the pid at each use would cost 0.2 us each.
_READERS: weakref.WeakSet[Reader] = weakref.WeakSet()


def _forget() -> None:
    for reader in list(_READERS):
        reader.forget()


os.register_at_fork(after_in_child=_forget)
