"""Go on past records that cannot be read: fill their rows, count them, and list them.

How it works. Where making the item of a row fails, the item of the next good record of its shard
takes the row, so that no other row moves: order, resuming and equal ranks are as without it. Which
record that is depends on the dataset alone. Every process that makes items notes what it skipped
in one file without a name, which the training loop's process has made; that one reads the list, and
all of them count by it how much the pass may still skip.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import secrets
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from typing import Any, NamedTuple

from ..errors import (
    DamageError,
    DecodeError,
    OptionError,
    ShardioError,
    SkipError,
    StorageError,
    printable,
)
from ..names import key_text
from ..stack import users_level
from ..storage.descriptors import anonymous_memory
from ..units import check_int, refuse_unknown, show_count

IN_A_ROW = 100  # that end a pass, whatever is allowed
_TEXT = 500  # characters that are kept of an error


@refuse_unknown
@dataclass(frozen=True)
class Skip:
    """Choose how much may be skipped: `ShardDataset(..., on_error=shardio.Skip(most=100))`.

    most  records that a rank may skip in a pass: a number (int), or a share of its records (float)
    log   a file that gets a line of JSON for each record that is skipped; default: none

    Raises OptionError.
    """

    _: KW_ONLY
    most: int | float = 0.01
    log: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        """Check the options. Raises OptionError."""
        if not isinstance(self.most, float):
            check_int("most", self.most, 0)
        elif not 0 <= self.most <= 1:
            raise OptionError(f"most is {self.most!r}: expected a number, or a share from 0.0 to 1")
        if self.log is not None and not isinstance(self.log, (str, os.PathLike)):
            raise OptionError(f"log is {printable(repr(self.log))}: expected the path of a file")


class Skipped(NamedTuple):
    """Tell of one record that was skipped; as str, a line."""

    epoch: int
    number: int  # of the record in the dataset
    key: str  # "": it cannot be read
    shard: str  # its file
    record: int  # its number there
    error: str  # its type and text

    def __str__(self) -> str:
        place = f"record {self.record:,} of {self.shard}"
        return printable(f"{self.key or 'no key'} ({place}): {self.error}", 4096)


def choose_skips(on_error: str | Skip) -> Skips | None:
    """Return what skips records as an option says; None: nothing does. Raises OptionError."""
    if isinstance(on_error, Skip):
        return Skips(on_error)
    if on_error not in ("raise", "skip"):
        raise OptionError(
            f"on_error is {printable(repr(on_error))}: expected 'raise', 'skip' or "
            "shardio.Skip(...)"
        )
    return Skips(Skip()) if on_error == "skip" else None


def may_skip(error: BaseException) -> bool:
    """Return True for damage, what cannot be decoded, and what a user's function raises."""
    if isinstance(error, ShardioError):
        return isinstance(error, (DamageError, DecodeError))
    return isinstance(error, Exception) and not isinstance(error, MemoryError)


class Skips:
    """Note what is skipped of a dataset, in all processes that make items for one loop."""

    def __init__(self, choice: Skip) -> None:
        self.choice = choice
        self.pass_id = ""  # of the pass that begins now in this process: the same in all workers
        self._owner, self._file, self._name = 0, _NO_FILE, b""
        self.adopt()

    def __getstate__(self) -> dict[str, Any]:
        # A process that is started while this one lives has the file by this path.
        path = f"/proc/{os.getpid()}/fd/{self._file}" if self._file >= 0 else ""
        state = {"choice": self.choice, "owner": self._owner, "pass_id": self.pass_id}
        return state | {"path": path, "name": self._name}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.choice, self._owner, self.pass_id = state["choice"], state["owner"], state["pass_id"]
        self._file, self._name = _NO_FILE, state["name"]
        path = state["path"]
        with contextlib.suppress(OSError):  # it may be long ago, and that of another process now
            if "memfd:" in os.readlink(path) and _begins(path, self._name):
                self._keep(os.open(path, os.O_RDWR | os.O_APPEND))

    def __deepcopy__(self, memo: Any) -> Skips:
        return Skips(self.choice)

    def adopt(self) -> None:
        """Make a list for this process and those that it will start, unless it has one.

        Ranks that were started from one process would otherwise share theirs.
        """
        if self._owner != os.getpid():
            self._owner = os.getpid()
            self._begin()

    def _begin(self) -> None:
        """Begin a list: a file without a name, to whose end all processes write."""
        file = anonymous_memory()
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
        self._name = b'{"list": "%s"}\n' % secrets.token_hex(16).encode()
        os.write(file, self._name)
        self._keep(file)

    def _keep(self, file: int) -> None:
        self._file = file
        weakref.finalize(self, os.close, file).atexit = False

    def read(self, start: int = 0) -> bytes:
        """Return the whole lines of the list, from a byte of it on."""
        if self._file < 0:
            return b""
        data = os.pread(self._file, os.fstat(self._file).st_size - start, start)
        return data[: data.rfind(b"\n") + 1]

    def note(self, **values: Any) -> None:
        """Note something, in one write, so that those of several processes do not mix."""
        if self._file < 0:
            self._begin()
        os.write(self._file, json.dumps(values).encode() + b"\n")

    def skipped(self) -> list[Skipped]:
        """List what was skipped until now."""
        notes = map(json.loads, self.read().splitlines()[1:])
        return [Skipped(*note["skipped"]) for note in notes]

    def log(self, skipped: Skipped) -> None:
        """Write a line to the user's file, if there is one. Raises StorageError."""
        if self.choice.log is not None:
            line = json.dumps({**skipped._asdict(), "rank": _rank()})
            try:
                with open(self.choice.log, "ab", buffering=0) as file:
                    file.write(line.encode() + b"\n")
            except OSError as error:
                shown = printable(os.fspath(self.choice.log), 4096)
                raise StorageError(f"on_error, log={shown}: {error.strerror}") from error


class SkippedInfo:
    """Give the list of what a dataset has skipped."""

    skips: tuple[Skips, ...] = ()

    def adopt_skips(self) -> None:
        """Note from now on what this process skips, and those that it starts."""
        for skips in self.skips:
            skips.adopt()

    def name_pass(self, pass_id: str) -> None:
        """Name the pass that begins now in this process, as in all that make batches of it."""
        for skips in self.skips:
            skips.pass_id = pass_id

    @property
    def skipped(self) -> list[Skipped]:
        """List the records that on_error="skip" has skipped, in this run, those of workers too."""
        return [one for skips in dict.fromkeys(self.skips) for one in skips.skipped()]


class SkippingPass:
    """Make the items of one consumer's pass, and fill rows of records that cannot be read.

    rows       rows of the pass, on one rank
    following  iterates over the records that may fill the row of one, as rows
    own        nobody else makes items of the pass: it counts by itself
    """

    def __init__(
        self,
        skips: Skips,
        epoch: int,
        rows: int,
        following: Callable[[Any], Iterator[Any]] = lambda row: iter(()),
        *,
        own: bool = False,
    ) -> None:
        self._skips, self._epoch, self._following = skips, epoch, following
        most = skips.choice.most
        self._most = math.ceil(most * rows) if isinstance(most, float) else most
        self._rows, self._own, self._in_a_row = rows, 0, 0
        self._lock = threading.Lock()
        self._read = self._noted = 0  # bytes of the list, and lines of this pass in these
        self._id = secrets.token_hex(8) if own else skips.pass_id

    def of(self, batches: Iterable[Any], *, fills: bool = True) -> Iterator[Any]:
        """Iterate over the batches of the pass, and say at its end how many were skipped.

        fills: whether other records take their place; else these are items, and the rows are left
        out.
        """
        yield from batches
        self.tell(fills=fills)

    def tell(self, *, fills: bool = True) -> None:
        """Say how many were skipped, at the end of the pass."""
        if self._own:
            instead = f" in epoch {self._epoch}, and other records in their place" if fills else ""
            warnings.warn(
                f"{show_count(self._own, 'record')} skipped{instead}: dataset.skipped lists them",
                stacklevel=users_level(),
            )

    def make(self, make: Callable[[Any, Any], Any], row: Any, work: Any) -> Any:
        """Make the item of a row; where that fails, of the next record of which it does not."""
        work.filled = False
        try:
            item = make(row, work)
        except Exception as error:
            if not may_skip(error):
                raise
            self.skip(row, work.key if work.number == row[0] else b"", error)
            item = self._fill(row, work, make, error)
            work.filled = True
        else:
            self.count_good()
        return item

    def count_good(self) -> None:
        """Note that an item could be made."""
        self._in_a_row = 0

    def _fill(self, row: Any, work: Any, make: Callable[[Any, Any], Any], error: Exception) -> Any:
        tried = 0
        for other in islice(self._following(row), IN_A_ROW):
            tried += 1
            try:
                return make(other, work)
            except Exception as again:
                if not may_skip(again):
                    raise
        raise SkipError(
            f"{_text(error)}: on_error='skip' fills its row with another record, and the "
            f"{show_count(tried, 'record')} that follow fail, too. If it is no damage, look at map "
            "and transform; if it is, `shardio verify --decode` lists all of it"
        ) from error

    def skip(self, row: Any, key: bytes, error: Exception) -> None:
        """Note a record that is skipped. Raises SkipError where it is one too many.

        key: b"" where it is not known
        """
        number, shard, record, _ = row
        if not key:
            with contextlib.suppress(ShardioError):
                key = shard.key(record)
        one = Skipped(self._epoch, number, key_text(key), shard.name, record, _text(error))
        with self._lock:
            self._own += 1
            self._in_a_row += 1
            if self._in_a_row >= IN_A_ROW:
                raise SkipError(f"{one}: {IN_A_ROW} records in a row were skipped") from error
        self._skips.note(of=self._id, skipped=one)
        self._skips.log(one)
        if (count := self._count()) > self._most:
            raise SkipError(
                f"{one}: {show_count(count, 'record')} skipped of {self._rows:,} in epoch "
                f"{self._epoch}, and on_error allows {self._most:,}: mend the dataset (`shardio "
                "repair`, or `shardio drop --damaged`), or give on_error=shardio.Skip(most=...)"
            ) from error

    def _count(self) -> int:
        """Count what all consumers have skipped in this pass."""
        with self._lock:
            data = self._skips.read(self._read)
            self._read += len(data)
            self._noted += data.count(json.dumps({"of": self._id})[1:-1].encode())
            return self._noted


_NO_FILE = -1


def _begins(path: str, data: bytes) -> bool:
    """Return whether a file begins with these bytes."""
    with open(path, "rb") as file:
        return file.read(len(data)) == data


def _text(error: BaseException) -> str:
    first, *_ = str(error).splitlines() or [""]
    text = f"{type(error).__name__}: {first}"
    return text if len(text) <= _TEXT else text[: _TEXT - 3] + "..."


def _rank() -> int:
    given = os.environ.get("RANK", "0")
    return int(given) if given.isdigit() else 0
