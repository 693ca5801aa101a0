"""What every source of packing provides: a Listing, made before anything is packed, and how the
records it lists are read.

A listing has all that the plan needs: keys, sizes, fields, classes. Its Source reads the records;
each worker process opens the Source for itself. What cannot be packed is in `problems`, or is
rejected when it is read. What is ignored is counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...errors import OptionError, SourceError, printable
from ...formats.sample import MAX_KEY, Sample
from ...names import KEY
from ...order.subset import select_where
from ...storage.base import Location
from ...storage.location import locate
from ...storage.options import Storage
from ..options import Joins
from ..process_pool import Progress

Ints = np.ndarray[Any, np.dtype[np.int64]]
Problem = tuple[bytes, str]  # key, reason
Read = Callable[[int], Sample]
ReadFile = Callable[[bytes, int, int], bytes]  # path, bytes and time of change as listed
# Numbers, text, bytes, numpy arrays, lists and dicts of these: what formats/sample.py can write.
Plain = dict[str, Any]

_SHOWN = 20  # files that one message lists


class Rejected(Exception):
    """One record cannot be packed, for the reason in words that this is; the others can."""


class FolderNames(NamedTuple):
    """The names in a folder."""

    folders: list[bytes]
    files: list[bytes]  # and all else
    loops: list[bytes]  # links to a folder above
    ignored: list[bytes]  # folders that are none of the data


class Walked(NamedTuple):
    """Every file below a folder, in bytewise order of their paths in it, the keys."""

    keys: list[bytes]
    sizes: Ints  # bytes
    mtimes: Ints  # times of change in ns, or other numbers that change with the content
    problems: list[Problem]  # what can be no file of a record
    ignored: int  # hidden files, and the like
    notes: list[str]  # which of these are of systems


class FileState(NamedTuple):
    """Describe a file that a listing names."""

    size: int
    mtime: int  # as in Walked
    why: str | None  # it can be no file of a record; None: it can


class SourceFolder(Protocol):
    """A folder whose files are packed, of this machine or of a store. Forked workers inherit it.

    Paths in it are bytes. Nothing is opened before it is read.
    """

    path: bytes  # absolute, or a URL without secrets: for messages
    ignores: Callable[[bytes], bool]  # whether a name is of no data
    in_archives: bool  # its files are members of archives

    def top(self) -> FolderNames:
        """Return the names in it. Raises SourceError, StorageError."""

    def below(self, path: bytes) -> SourceFolder:
        """Return a folder in it."""

    def is_there(self) -> bool:
        """Return True if it is a folder."""

    def walk(self, *, empty: bool = False) -> Walked:
        """Find every file below it. empty: one without a byte is a file like others, no problem."""

    def look(self, paths: Iterable[bytes]) -> Iterator[FileState]:
        """Yield what each path leads to. Raises OSError where the folder cannot be opened."""

    def opened(self) -> AbstractContextManager[ReadFile]:
        """Open the folder, and give the function that reads a file of it.

        It raises Rejected, SourceChangedError.
        """

    def will_need(self, path: bytes, size: int) -> None:
        """Announce that a file will be read soon, where each read is a round trip."""


class Source:
    """Where the records of a listing are read. Forked workers inherit it.

    as_stored: images are as they are to be in shards; nothing is done to them.
    """

    as_stored = False

    def open(self) -> AbstractContextManager[Read]:
        """Open the function that reads the record at a place of the listing that made this source.

        It gives a dict of `__key__` and all fields; raises Rejected, and SourceChangedError when
        what is there is not what was listed.
        """
        raise NotImplementedError

    def will_need(self, place: int) -> None:
        """Announce that the record at a place will be read soon: a hint, which may do nothing."""

    def describe(self) -> Plain:
        """Return what the source is as a whole, for `reopen`: no roots, no URLs, no secrets."""
        return {}

    def piece(self, places: Ints) -> Plain:
        """Return all that reading the records at these places needs, for `reopen`."""
        raise NotImplementedError

    def keys(self, places: Ints) -> Sequence[bytes] | None:
        """Return the keys of records, where the listing calls these otherwise; None: it does not.

        Raises DamageError, StorageError.
        """
        return None

    def renumbered(self, numbers: Sequence[int], fields: Collection[str]) -> Source:
        """Return this source with other numbers of its classes: class i becomes numbers[i].

        Raises OptionError where the classes are not those of `label`, one of the fields.
        """
        if "label" not in fields:
            raise OptionError("--classes: the classes here are not those of a field `label`")
        return Renumbered(self, numbers)

    def labelled(self, sample: Sample) -> Iterable[dict[str, Any]]:
        """Return the parts of a record whose `label` is the number of a class."""
        return [sample]


@dataclass(frozen=True)
class SourceRequest:
    """A source, and all that is asked of it."""

    path: bytes  # as given
    kind: str | None = None  # kind of source; None: to be detected
    splits: bool | None = None
    fields: Mapping[str, str] = field(default_factory=dict)  # our names of fields, and theirs
    where: Mapping[str, Any] | None = None
    root: str | None = None  # the folder that paths in a listing refer to
    label: str | None = None  # a regular expression that finds the class in the path of an image
    joins: Joins = field(default_factory=Joins)
    layout: str | None = None  # fields of a record in files of arrays, and their sizes
    ignore: bool = True  # leave out hidden files, and folders of systems
    # Names of its splits, where its kind was told by looking at its top, and nobody gave it.
    detected_splits: tuple[str, ...] | None = None
    jobs: int | None = None
    progress: Progress | None = None
    storage: Storage = field(default_factory=Storage)  # how an object store is reached
    files: SourceFolder | None = None  # its folder in a store or in archives, listed once
    # Where archives that are compressed as a whole are unpacked; None: nowhere. Who is told of it.
    work_dir: str | None = None
    tell: Callable[[str], None] | None = None

    @property
    def location(self) -> Location:
        """Return the place of the source, or of its index."""
        return locate(os.fsdecode(self.path), self.storage)

    def show(self, split: str = "") -> str:
        """Return the name of the source, or of one of its splits, in messages."""
        return f"{self.shown}/{printable(split)}" if split else self.shown

    @property
    def shown(self) -> str:
        """The name of the source in messages."""
        return self.location.url if self.location.remote else printable(self.path)

    def select(
        self, column: Callable[[str], Any], count: int, classes: Sequence[str] | None
    ) -> Ints:
        """Return the places, ascending, of records that meet all conditions.

        column: (count,) values of a field, masked where None; raises OptionError when there is
        none. Raises OptionError, SourceError.
        """
        assert self.where is not None
        if not count:
            raise SourceError(f"{self.shown}: there is nothing in it that could be selected")
        return select_where(self.where, column, np.array([0, count]), classes).numbers

    def refuse_where_and_root(self, kind: str) -> None:
        """Raise OptionError for options that a source of whole files does not take."""
        if self.where is not None:
            raise OptionError(
                "--where: files are not opened while they are listed, so there is nothing to "
                "select by. Pack all of them; ShardDataset(where=...) selects when reading"
            )
        self.refuse_root(kind)

    def refuse_splits(self) -> None:
        """Raise OptionError for what is said of splits, where a source has none."""
        if self.splits is not None:
            raise OptionError("--splits and --no-splits are for folders of images")

    def refuse_root(self, kind: str) -> None:
        """Raise OptionError for a root, where paths cannot refer to one."""
        if self.root is not None:
            raise OptionError(
                f"--root: for listings, COCO files and indexes; {kind} lie in the source itself"
            )


@dataclass(frozen=True)
class Listing:
    """The records of one dataset, in the order they are packed without a shuffle.

    Columns have one entry a record. Of files that are records, a key is the path below `root`.
    """

    root: bytes  # absolute
    keys: list[bytes]
    sizes: Ints  # bytes that are to be read
    mtimes: Ints  # ns, or other numbers that change with the content; 0 where nothing has such
    source: Source
    fields: tuple[tuple[str, str], ...]  # name and kind, without the key
    classes: tuple[str, ...] | None  # names of the values of `label`
    absent: tuple[str, ...] = ()  # classes that have no folder here
    problems: list[Problem] = field(default_factory=list)
    ignored: int = 0  # hidden files and the like
    notes: list[str] = field(default_factory=list)  # packed, but worth knowing
    options: Mapping[str, Any] = field(default_factory=dict)  # recorded with those of the packing
    places: Ints | None = None  # numbers of the records in `source`; None: 0, 1, 2, ...
    shuffled: bool = True  # by default; False where reading in another order costs too much

    @property
    def own_places(self) -> Ints:
        """Return the place of each record for `source`."""
        return np.arange(len(self.keys)) if self.places is None else self.places

    def check_some(self, shown: str, what: str = "images") -> None:
        """Raise SourceError when nothing is listed. shown: the name of the source."""
        if not self.keys:
            found = "".join(f"\n{note}" for note in self.notes)
            found += f"\n{listed(self.problems)}" if self.problems else ""
            raise SourceError(f"{shown}: there are no {what} in it{found}")

    def take(self, numbers: Ints) -> Listing:
        """Return some of the records, by their places here."""
        return dataclasses.replace(
            self,
            keys=[self.keys[i] for i in numbers.tolist()],
            sizes=self.sizes[numbers],
            mtimes=self.mtimes[numbers],
            places=numbers if self.places is None else self.places[numbers],
        )


Listings = dict[str, Listing]  # by split; of "" where there are no splits


def renumber(listing: Listing, classes: Sequence[str]) -> Listing:
    """Return the same records with another dataset's classes.

    Raises OptionError when a class is missing there.
    """
    if listing.classes is None:
        raise OptionError("--classes: the source has no classes, so nothing could be numbered")
    number = {name: i for i, name in enumerate(classes)}
    missing = [printable(name) for name in listing.classes if name not in number]
    if missing:
        raise OptionError(
            f"--classes: {len(missing)} of the source's classes are not among the other's "
            f"{len(number)}: {', '.join(missing[:_SHOWN])}"
        )
    present = set(listing.classes) - set(listing.absent)
    return dataclasses.replace(
        listing,
        classes=tuple(classes),
        absent=tuple(name for name in classes if name not in present),
        source=listing.source.renumbered(
            [number[name] for name in listing.classes], dict(listing.fields)
        ),
    )


class Renumbered(Source):
    """A source whose labels are other numbers."""

    def __init__(self, source: Source, numbers: Sequence[int]) -> None:
        self._source, self._numbers = source, numbers

    @contextlib.contextmanager
    def open(self) -> Iterator[Read]:
        with self._source.open() as read:

            def renumbered(place: int) -> Sample:
                sample = read(place)
                for part in self._source.labelled(sample):
                    label = part["label"]
                    if label is not None and label >= 0:  # below 0 it says that there is none
                        if label >= len(self._numbers):
                            raise Rejected(f"its label, {label}, is none of {len(self._numbers):,}")
                        part["label"] = self._numbers[label]
                return sample

            yield renumbered

    def will_need(self, place: int) -> None:
        """Announce a record to the source."""
        self._source.will_need(place)

    def describe(self) -> Plain:
        """Describe the source, and the numbers."""
        return self._source.describe() | {"numbers": list(self._numbers)}

    def piece(self, places: Ints) -> Plain:
        """Return a piece of the source."""
        return self._source.piece(places)

    def keys(self, places: Ints) -> Sequence[bytes] | None:
        """Return the keys that the source gives."""
        return self._source.keys(places)

    def renumbered(self, numbers: Sequence[int], fields: Collection[str]) -> Source:
        """Return the source renumbered once, by both."""
        return Renumbered(self._source, [numbers[i] for i in self._numbers])


def bytewise(keys: Sequence[bytes]) -> Sequence[int]:
    """Return the places of keys in bytewise order; without 40 bytes a key where they are in it."""
    if all(map(operator.le, keys, itertools.islice(keys, 1, None))):
        return range(len(keys))
    return sorted(range(len(keys)), key=keys.__getitem__)


def renamed(theirs: Mapping[str, str]) -> dict[str, Any]:
    """Return the option that records which fields the source calls otherwise, if it does."""
    others = {name: source for name, source in theirs.items() if name != source}
    return {"fields": others} if others else {}


def some_of(names: Iterable[bytes | str]) -> str:
    """Return names for a message: the first 20 of them."""
    first = [printable(name) for name in itertools.islice(names, _SHOWN + 1)]
    return ", ".join(first[:_SHOWN]) + (", ..." if len(first) > _SHOWN else "")


def check_key(key: bytes) -> str | None:
    """Return why a key cannot be one; None when it can."""
    if 1 <= len(key) <= MAX_KEY:
        return None
    return f"its {KEY} is {len(key):,} bytes long; 1 to {MAX_KEY:,} are allowed"


def listed(entries: Sequence[Problem]) -> str:
    """Return keys and reasons, one a line, for a message."""
    lines = [f"  {printable(key)}: {reason}" for key, reason in entries[:_SHOWN]]
    if len(entries) > _SHOWN:
        lines.append(f"  ... and {len(entries) - _SHOWN:,} more")
    return "\n".join(lines)
