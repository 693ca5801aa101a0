"""What every source of packing provides: a Listing, made before anything is packed, and how the
records it lists are read.

A listing says all that the plan needs: keys, sizes, fields, classes. Reading is left to its Source,
which each worker process opens for itself. Whatever is neither listed nor ignored for a stated
reason is in `problems`, or is found to be one when it is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ...errors import OptionError, SourceChangedError, SourceError, printable
from ...formats.sample import MAX_BODY, MAX_HEAD, MAX_KEY, Sample
from ...names import KEY
from ...order.subset import select_where
from ..process_pool import Progress

Ints = np.ndarray[Any, np.dtype[np.int64]]
Problem = tuple[bytes, str]  # key, reason
Read = Callable[[int], Sample]

MAX_FILE = MAX_BODY - MAX_HEAD  # bytes of a file that a record holds in any case
_SHOWN = 20  # files that one message lists


class Rejected(Exception):
    """Why one record cannot be packed, in words; the others can."""


class Source(Protocol):
    """Where the records of a listing are read. Forked workers inherit it."""

    def open(self) -> AbstractContextManager[Read]:
        """A function that reads the record at a place of the listing that made this source.

        It gives a dict of `__key__` and all fields; raises Rejected, and SourceChangedError when
        what is there is not what was listed.
        """


@dataclass(frozen=True)
class Wanted:
    """What is asked of a source."""

    path: bytes  # as given
    kind: str | None = None  # of source; None: to be told
    splits: bool | None = None
    fields: Mapping[str, str] = field(default_factory=dict)  # our names of fields, and theirs
    where: Mapping[str, Any] | None = None
    root: str | None = None  # the folder that paths in a listing refer to
    # Names of its splits, where its kind was told by looking at its top, and nobody gave it.
    looked: tuple[str, ...] | None = None
    jobs: int | None = None
    progress: Progress | None = None

    @property
    def shown(self) -> str:
        return printable(self.path)


@dataclass(frozen=True)
class Listing:
    """The records of one dataset, in the order they are packed without a shuffle.

    Columns have one entry a record. Of files that are records, a key is the path below `root`.
    """

    root: bytes  # absolute
    keys: list[bytes]
    sizes: Ints  # bytes that are to be read
    mtimes: Ints  # nanoseconds; 0 where nothing has such a time
    source: Source
    fields: tuple[tuple[str, str], ...]  # name and kind, without the key
    classes: tuple[str, ...] | None  # names of the values of `label`
    absent: tuple[str, ...] = ()  # classes that have no folder here
    problems: list[Problem] = field(default_factory=list)
    ignored: int = 0  # hidden files and the like
    notes: list[str] = field(default_factory=list)  # packed, but worth knowing
    options: Mapping[str, Any] = field(default_factory=dict)  # recorded with those of the packing
    places: Ints | None = None  # of these records for `source`; None: 0, 1, 2, ...
    shuffled: bool = True  # when nothing is said: where reading in another order costs too much, no

    def take(self, numbers: Ints) -> Listing:
        """Some of the records, by their places here."""
        return dataclasses.replace(
            self,
            keys=[self.keys[i] for i in numbers.tolist()],
            sizes=self.sizes[numbers],
            mtimes=self.mtimes[numbers],
            places=numbers if self.places is None else self.places[numbers],
        )


def select(
    where: Mapping[str, Any],
    column: Callable[[str], Any],
    count: int,
    classes: Sequence[str] | None,
    shown: str,
) -> Ints:
    """The places, ascending, of records that meet all conditions. Raises OptionError, SourceError.

    column: (count,) values of a field, masked where None; raises OptionError when there is none.
    """
    if not count:
        raise SourceError(f"{shown}: there is nothing in it that could be selected")
    return select_where(where, column, np.array([0, count]), classes).numbers


def read_file(folder: int, path: bytes, size: int, mtime_ns: int) -> bytes:
    """The bytes of a listed file. Raises Rejected, SourceChangedError.

    `folder`: a descriptor of the folder that `path` is relative to; size and mtime were listed.
    O_NONBLOCK: if the file was replaced by a FIFO since the plan was made, opening must not wait.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        raise SourceChangedError(_changed(path, "it is gone")) from None
    except OSError as error:
        raise Rejected(f"cannot be opened: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if status.st_size != size or mtime(status) != mtime_ns:
            raise SourceChangedError(_changed(path, "its size or time of change is another"))
        data = os.read(descriptor, size + 1)
        while len(data) < size and (more := os.read(descriptor, size - len(data))):
            data += more
        if mtime(os.fstat(descriptor)) != mtime_ns:
            raise SourceChangedError(_changed(path, "it was written to while it was read"))
    except OSError as error:
        raise Rejected(f"cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)
    if len(data) != size:
        raise SourceChangedError(
            _changed(path, f"{len(data):,} bytes were read, expected {size:,}")
        )
    return data


def mtime(status: os.stat_result) -> int:
    """Nanoseconds, as 64 bits with a sign hold them: ext4 knows years up to 2446."""
    return (status.st_mtime_ns + (1 << 63)) % (1 << 64) - (1 << 63)


@contextlib.contextmanager
def opened_folder(root: bytes) -> Iterator[int]:
    """A descriptor of a folder."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        os.close(folder)


def renumber(listing: Listing, classes: Sequence[str]) -> Listing:
    """The same records with another dataset's classes.

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
    if "label" not in dict(listing.fields) and not hasattr(listing.source, "renumbered"):
        raise OptionError("--classes: the classes here are not those of a field `label`")
    present = set(listing.classes) - set(listing.absent)
    return dataclasses.replace(
        listing,
        classes=tuple(classes),
        absent=tuple(name for name in classes if name not in present),
        source=_renumbered(listing.source, [number[name] for name in listing.classes]),
    )


def _renumbered(source: Source, numbers: list[int]) -> Source:
    """A source with other labels; some have theirs elsewhere than in the field `label`."""
    own: Callable[[list[int]], Source] | None = getattr(source, "renumbered", None)
    return _Renumbered(source, numbers) if own is None else own(numbers)


class _Renumbered:
    """A source whose labels are other numbers."""

    def __init__(self, source: Source, numbers: list[int]) -> None:
        self._source, self._numbers = source, numbers

    @contextlib.contextmanager
    def open(self) -> Iterator[Read]:
        with self._source.open() as read:

            def renumbered(place: int) -> Sample:
                sample = read(place)
                label = sample["label"]
                if label is not None and label >= 0:  # below 0 it says that there is none
                    if label >= len(self._numbers):
                        raise Rejected(f"its label, {label}, is none of {len(self._numbers):,}")
                    sample["label"] = self._numbers[label]
                return sample

            yield renumbered


def check_key(key: bytes) -> str | None:
    """Why a key cannot be one; None when it can."""
    if 1 <= len(key) <= MAX_KEY:
        return None
    return f"its {KEY} is {len(key):,} bytes long; 1 to {MAX_KEY:,} are allowed"


def check_some(listing: Listing, shown: str, what: str = "images") -> None:
    """Raises SourceError when nothing is listed."""
    if not listing.keys:
        found = f"\n{listed(listing.problems)}" if listing.problems else ""
        raise SourceError(f"{shown}: there are no {what} in it{found}")


def listed(entries: Sequence[Problem]) -> str:
    """Keys and reasons, one a line, for a message."""
    lines = [f"  {printable(key)}: {reason}" for key, reason in entries[:_SHOWN]]
    if len(entries) > _SHOWN:
        lines.append(f"  ... and {len(entries) - _SHOWN:,} more")
    return "\n".join(lines)


def _changed(path: bytes, what: str) -> str:
    return (
        f"{printable(path)}: changed since the packing was planned: {what}. Run it again with "
        "--restart to plan anew"
    )
