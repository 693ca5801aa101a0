"""Every bit of small datasets of our own formats, in an order that is no order, each once."""

from collections import Counter
from collections.abc import Mapping
from math import gcd
from pathlib import Path

from support import growing
from support.conformance import same

import shardio
from shardio import ShardioError
from shardio.packing.verify import verify
from shardio.packing.versions import log
from trust.damage import OWN, Subject
from trust.section import Section, told


class Bits(Section):
    """Flips one bit of a dataset that has every kind of file, and reads all of it."""

    name = "bits"
    promise = "P1"

    def prepare(self) -> None:
        self.subjects = []
        for format in OWN:
            out = growing.grown(self.folder / format, format, each=2, size=40)
            subject = Subject(format, out, format)
            subject.learn()
            self.subjects.append(subject)
        self.files = [(one, path) for one in self.subjects for path in one.files]
        self.starts = [0]
        for _, path in self.files:
            self.starts.append(self.starts[-1] + 8 * path.stat().st_size)
        self.step = int(self.starts[-1] * 0.618) | 1  # no two cases of a round are the same bit
        while gcd(self.step, self.starts[-1]) > 1:
            self.step += 2
        self.done_of: Counter[str] = Counter()

    def case(self, number: int) -> str:
        bit = (number * self.step + self.seed) % self.starts[-1]
        at = next(i for i in range(len(self.files)) if bit < self.starts[i + 1])
        subject, path = self.files[at]
        byte, which = divmod(bit - self.starts[at], 8)
        data = path.read_bytes()
        changed = bytearray(data)
        changed[byte] ^= 1 << which
        path.write_bytes(changed)
        try:
            with told(f"{path.name}, byte {byte}, bit {which}"):
                self._read(subject, path)
        finally:
            path.write_bytes(data)
        self.done_of[path.name] += 1
        return f"{subject.name}: {subject.kinds[path]}"

    def _read(self, subject: Subject, path: Path) -> None:
        kind, errors = subject.kinds[path], 0
        try:
            samples = list(shardio.open(subject.folder, decode=None))
            assert same(samples, list(subject.right.values())), "wrong content"
        except ShardioError:
            errors += 1
        assert errors or kind not in ("manifest", "exclusion"), "undetected"
        assert not errors or kind in ("shard", "manifest", "exclusion", "overlay"), "it is not read"
        try:
            log(subject.folder)
            for one in subject.versions:
                found = list(shardio.open(subject.folder, decode=None, version=one))
                assert same(found, subject.of_version[one]), "wrong content of a version"
        except ShardioError:
            errors += 1
        if not errors:  # what no reader uses, `verify` sees, or nobody needs it
            errors += bool(verify(subject.folder, sha256=True, jobs=1).damages)
        assert errors or kind == "sources" or kind.startswith("older"), "undetected"

    def figures(self) -> dict[str, float]:
        return {"bits": self.starts[-1]}

    @classmethod
    def done(cls, kinds: Mapping[str, int], figures: Mapping[str, float]) -> str:
        bits, cases = figures.get("bits", 0), sum(kinds.values())
        part = "every one" if cases >= bits > 0 else f"{100 * cases / max(bits, 1):.1f} %"
        return f"bits flipped: {part} of the {bits:,.0f} of {len(OWN)} datasets, {len(kinds)} kinds"
