"""Every bit, and every length, of a small dataset of each format and of what lies beside one.

Each once, in an order that is no order: so the counts say which part was done.
"""

import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path

from support import growing
from support.every_format import FORMATS, Made, of_size
from support.trees import images, noise

from trust.damage import READ, ROADS, Reading, Subject, check
from trust.section import Section, scattered, told
from trust.unfinished import Unfinished

PAGED = ("lmdb", "lmdb-foreign", "webdataset")  # most of their bytes are padding
# One case in so many takes one more road than those by number and in order, and asks `verify`.
EACH_ROAD, EACH_VERIFY = 12, 50


class Small(Unfinished):
    """Unfinished packings of two shards, and a cache of one."""

    first, second, counts = images(1, 2, 50), images(2, 2, 50), (2,)


class Bits(Section):
    """Flips one bit of a small dataset of each format, or cuts a file, and reads all of it."""

    name = "bits"
    promise = "P1"

    def prepare(self) -> None:
        os.environ["SOURCE_DATE_EPOCH"] = "1750000000"
        self.scratch = self.folder / "scratch"
        self.scratch.mkdir()
        self.small = Small(self.folder / "small", self.seed)
        self.small.folder.mkdir()
        self.small.prepare()
        self.subjects = [*self._subjects()]
        for one in self.subjects:
            one.learn()
        self.files = [(one, path) for one in self.subjects for path in one.files]
        for name, files in self.small.beside().items():
            self.files += [(name, path) for path in files]
        sizes = [path.stat().st_size for _, path in self.files]
        self.ends = [*accumulate(9 * size for size in sizes)]  # eight bits, and a length
        self.goal = self.ends[-1]

    def _subjects(self) -> Iterator[Subject]:
        for name, row in FORMATS.items():
            folder = self.folder / name.replace(", ", "-")
            folder.mkdir()
            counts = (3,) if name in PAGED else (3, 2)
            with of_size(counts, lambda number: noise(f"{number}", 40 + number)):
                Made(name, folder)
            yield Subject(name, folder, row.reads or name, row.kept)
        out = growing.grown(self.folder / "grown", each=1, size=40)
        yield Subject("changed record", out, "record")

    def case(self, number: int) -> str:
        place = scattered(number, self.goal, self.seed)
        at = bisect_right(self.ends, place)
        subject, path = self.files[at]
        before = path.read_bytes()
        bit = place - (self.ends[at] - 9 * len(before))
        if bit < 8 * len(before):
            what = "bit"
            changed = bytearray(before)
            changed[bit // 8] ^= 1 << bit % 8
        else:
            what = "length"
            changed = bytearray(before[: bit - 8 * len(before)])
        with told(f"{path.name}: {what} {bit if what == 'bit' else len(changed)}"):
            if isinstance(subject, str):
                name = f"{subject}: {self.small.kind(path)}"
                self.small.changed(subject, path, changed)
            else:
                name = f"{subject.name}: {subject.kinds[path]}"
                path.write_bytes(changed)
                try:
                    self._read(subject, path, before, number)
                finally:
                    path.write_bytes(before)
        return f"{name}: {what}"

    def _read(self, subject: Subject, path: Path, before: bytes, number: int) -> None:
        kind = subject.kinds[path]
        reading = Reading(subject, self.scratch, self.draw(number))
        reading.by_number(in_order=True)
        if kind not in READ:
            reading.versions()
            assert reading.errors or kind != "tags" or reading.verified(), "undetected"
        if number % EACH_ROAD == 0:
            getattr(reading, ROADS[number // EACH_ROAD % len(ROADS)])()
        check(subject, reading, [path], {path: before}, always=number % EACH_VERIFY == 0)

    def most(self) -> dict[str, float]:
        found: Counter[str] = Counter()
        for subject, path in self.files:
            name = subject if isinstance(subject, str) else subject.name
            found[f"bits of {name}"] += 8 * path.stat().st_size
        return dict(found)

    def close(self) -> None:
        if hasattr(self, "small"):
            self.small.close()

    @classmethod
    def done(cls, kinds: Mapping[str, int], figures: Mapping[str, float]) -> str:
        bits = {name.removeprefix("bits of "): int(count) for name, count in figures.items()}
        flipped: Counter[str] = Counter()
        for kind, count in kinds.items():
            if kind.endswith(": bit"):
                flipped[kind.split(": ")[0]] += count
        cut = sum(count for kind, count in kinds.items() if kind.endswith(": length"))
        whole = sum(flipped[name] >= count for name, count in bits.items())
        return (
            f"{flipped.total():,} of {sum(bits.values()):,} bits flipped, {cut:,} of "
            f"{sum(bits.values()) // 8:,} lengths cut; every bit of {whole} of {len(bits)} "
            "datasets and files beside them"
        )
