"""Where the records of a shard lie: 2 bytes a record, where two int64 would take 16."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from .base import Column

LINE = 64  # numbers of a line; the core knows it, too
_HEAD = struct.Struct("=4q")  # count of numbers, step, bytes of a high part, numbers of a record
_DECODED = 4096  # numbers that are unpacked at once, since those behind them are mostly next


class Places:
    """Where the records of a shard begin and end in its file.

    These numbers grow nearly evenly. So of each 64 a line is kept: where it begins, and the step,
    which all lines have in common. A number is kept as its distance from its line: 2 bytes; more,
    for all, where one needs more. Where records of 0.9 KB lie side by side, each takes 2.13 bytes,
    and 3.13 if there are some of up to 16 MB among them.

    data: all of it, as the core takes it, in the machine's own order of bytes: the head; int64
    beginnings of the lines; the low 16 bits of each distance; what is above these.
    """

    def __init__(self, bounds: Column, *, gaps: bool = False) -> None:
        """bounds: (n + 1,) int64, where records begin, and the last one ends.

        gaps: (2 n + 2,), where each record begins and ends, and what lies behind the last.
        """
        count, first, last = len(bounds), int(bounds[0]), int(bounds[-1])
        self._each, self._count = 1 + gaps, count
        self.records = count // self._each - 1
        lines, self._step = -(-count // LINE), (last - first) // max(1, count - 1)
        rows = np.empty((lines, LINE), np.int64)
        flat = rows.reshape(-1)
        flat[:count] = bounds
        flat[count:] = np.arange(1, len(flat) - count + 1) * self._step + last
        self._ramp = np.arange(LINE) * self._step
        rows -= self._ramp
        begins = rows.min(1)
        rows -= begins[:, None]
        low, most = rows.astype(np.uint16), int(rows.max()) >> 16
        wide = np.uint8 if most < 256 else np.uint64
        high = (rows >> 16).astype(wide) if most else np.empty(0, np.uint8)
        head = _HEAD.pack(count, self._step, high.itemsize if most else 0, self._each)
        self.data = data = b"".join((head, begins.data, low.data, high.data))
        cuts = _HEAD.size, _HEAD.size + begins.nbytes, _HEAD.size + begins.nbytes + low.nbytes
        self._begins = np.frombuffer(data, np.int64, lines, cuts[0])[:, None]
        self._low = np.frombuffer(data, np.uint16, low.size, cuts[1]).reshape(-1, LINE)
        self._high = np.frombuffer(data, high.dtype, high.size, cuts[2]).reshape(-1, LINE)
        view = memoryview(data)  # whose numbers are ints, in half the time of numpy's
        self._begin_of = view[cuts[0] : cuts[1]].cast("q")
        self._low_of = view[cuts[1] : cuts[2]].cast("H")
        self._high_of = None
        if most:
            self._high_of = view[cuts[2] :].cast("B" if most < 256 else "Q")
        self._decoded = 0, np.empty(0, np.int64)  # from which number on, and these

    def start(self, record: int) -> int:
        """Return the byte at which a record begins; of the one behind the last, where that ends."""
        at = record * self._each
        start = self._begin_of[at >> 6] + self._step * (at & 63) + self._low_of[at]
        return start if self._high_of is None else start + (self._high_of[at] << 16)

    def bounds(self, record: int) -> tuple[int, int]:
        """Return the bytes at which a record begins and ends. Raises IndexError."""
        if not 0 <= record < self.records:
            raise IndexError(f"there is no record {record:,} in a shard of {self.records:,}")
        at = record * self._each
        end = at + 1
        begins, low, step = self._begin_of, self._low_of, self._step
        start = begins[at >> 6] + step * (at & 63) + low[at]
        stop = begins[end >> 6] + step * (end & 63) + low[end]
        if self._high_of is None:
            return start, stop
        return start + (self._high_of[at] << 16), stop + (self._high_of[end] << 16)

    def between(self, start: int, stop: int) -> tuple[Column, Column]:
        """Return where each of the records [start, stop) begins and ends: (n,) int64 each."""
        if self._each == 1:
            found = self._numbers(start, stop + 1)
            return found[:-1], found[1:]
        found = self._numbers(2 * start, 2 * stop)
        return found[::2], found[1::2]

    def sizes_of(self, records: Column) -> Column:
        """Return the bytes of these records: (len(records),) int64."""
        at = records * self._each
        return self._take(at + 1) - self._take(at)

    def _numbers(self, start: int, stop: int) -> Column:
        """Return numbers [start, stop), not to be written to."""
        first, decoded = self._decoded  # taken once: another thread may put others there
        if not first <= start <= stop <= first + len(decoded):
            line = start // LINE
            lines = slice(line, -(-max(stop, min(start + _DECODED, self._count)) // LINE))
            found = self._low[lines].astype(np.int64)
            found += self._begins[lines]
            found += self._ramp
            if self._high_of is not None:
                found += self._high[lines].astype(np.int64) << 16
            first, decoded = self._decoded = line * LINE, found.reshape(-1)
        return decoded[start - first : stop - first]

    def _take(self, at: Column) -> Column:
        lines, places = np.divmod(at, LINE)
        found: Column = self._begins[lines, 0] + self._low[lines, places] + self._ramp[places]
        if self._high_of is not None:
            found += self._high[lines, places].astype(np.int64) << 16
        return found


class PackedSizes:
    """The bytes of each record of a shard; see formats.base.Sizes."""

    def __init__(self, places: Places) -> None:
        self._places = places

    def __getitem__(self, chosen: Any) -> Any:
        """Return the bytes of one record; of a slice of them, or an array of numbers, int64."""
        if isinstance(chosen, slice):
            start, stop, step = chosen.indices(self._places.records)
            begins, ends = self._places.between(start, max(start, stop))
            return (ends - begins)[::step]
        if isinstance(chosen, np.ndarray):
            return self._places.sizes_of(chosen)
        begin, end = self._places.bounds(range(self._places.records)[chosen])
        return end - begin
