"""Processes on one dataset at once: two commands that write, readers while one writes, one cache.

P2: of two writers each is done whole, one after the other, or it is told; no reader sees half.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

from support import growing
from support.caching import any_steps
from support.packing import grouped
from support.trees import images, noise, plant

import shardio
from shardio import ShardioError, Writer
from shardio.packing.annotate import annotate
from shardio.packing.append import append
from shardio.packing.compact import compact
from shardio.packing.drop import drop
from shardio.packing.gc import gc
from shardio.packing.update import update
from shardio.packing.verify import verify
from shardio.packing.versions import log, restore, tag
from trust.section import Section, told, words

TOLD = 3  # the exit code of a process that got an error of shardio
READERS = 3
PACKED = {"jobs": 1, "max_records": 4, "overwrite": True}
EACH = 50  # races of each pair of commands


def write_on(out: Path) -> None:
    with Writer(out, append=True) as writer:
        writer.write({"__key__": "one more", "image": noise("one more", 99), "label": 1})


class Races(Section):
    """Starts two processes at one moment, or readers and a writer."""

    name = "races"
    promise = "P2"

    def prepare(self) -> None:
        os.environ["SOURCE_DATE_EPOCH"] = "1750000000"
        self.out = growing.grown(self.folder / "one", each=2)
        self.keys = shardio.open(self.out, decode=None).keys()
        self.new = plant(self.folder / "new", images(5, 2, 150))
        self.states: dict[tuple[str, ...], str | None] = {}
        keys = self.keys
        self.commands: dict[str, Callable[[Path], Any]] = {
            "append": lambda out: append(self.new, out, jobs=1, on_duplicate="skip"),
            "update": lambda out: update(self.new, out, jobs=1, gone="keep"),
            "Writer": write_on,
            "drop": lambda out: drop(out, keys=keys[:2]),
            "erase": lambda out: drop(out, keys=keys[2:4], erase=True),
            "annotate": lambda out: annotate(out, {keys[5]: {"caption": "raced"}}),
            "annotate again": lambda out: annotate(out, {keys[6]: {"label": 1}}),
            "tag": lambda out: tag(out, "raced"),
            "restore": lambda out: restore(out, "packed"),
            "compact": lambda out: compact(out, jobs=1),
            "gc": lambda out: gc(out),
            "pack": lambda out: shardio.pack(self.new, out, **grouped(PACKED)),
        }
        self.pairs = [*combinations_with_replacement(self.commands, 2)]
        self.goal = EACH * (len(self.pairs) + 2)

    def state(self, out: Path) -> str:
        """Return what users see of a dataset."""
        data = hashlib.sha256()
        for sample in sorted(shardio.open(out, decode=None), key=lambda one: str(one["__key__"])):
            for name in sorted(sample):
                if sample[name] is not None:
                    data.update(repr((name, sample[name])).encode())
        return data.hexdigest()

    def after(self, *names: str) -> str | None:
        """Return the state after commands, one after the other; None where the last is told."""
        if names not in self.states:
            out = self.copy("serial")
            try:
                for name in names:
                    self.commands[name](out)
                self.states[names] = self.state(out)
            except ShardioError:
                self.states[names] = None
        return self.states[names]

    def copy(self, name: str) -> Path:
        out = self.folder / name
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(self.out, out)
        return out

    def case(self, number: int) -> str:
        draw = self.draw(number)
        again, at = divmod(number, len(self.pairs) + 2)
        if at == len(self.pairs) and again % 4 == 0:
            cache = self.folder / "cache"
            shutil.rmtree(cache, ignore_errors=True)
            any_steps(cache, number, 150, 16)
            return "16 processes on one cache"
        if at >= len(self.pairs):
            return self._readers(draw.sample([*self.commands], 6))
        one, other = draw.sample(self.pairs[at], 2)
        with told(f"{one} beside {other}"):
            self._race(one, other, draw.choice((0.0, 0.0, 0.002, 0.01)))
        return " beside ".join(sorted((one, other)))

    def _race(self, one: str, other: str, later: float) -> None:
        """Start both, the second so many seconds later."""
        out, names = self.copy("raced"), (one, other)
        before = len(log(out).versions)
        begin = os.pipe()
        pids = []
        for at, name in enumerate(names):
            pids.append(self._fork(partial(self.commands[name], out), begin, later * at, f"{at}"))
        for end in begin:
            os.close(end)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        said = [(self.folder / f"said-{at}").read_text() for at in range(2)]
        assert {*codes} <= {0, TOLD}, f"{codes}: {said}"
        done = [name for name, code in zip(names, codes, strict=True) if code == 0]
        assert done, f"both were told: {said}"
        assert all(str(out) in text for text, code in zip(said, codes, strict=True) if code), said
        orders = [done] if len(done) == 1 else [[one, other], [other, one]]
        legal = {self.after(*order) for order in orders}
        assert verify(out, sha256=True, jobs=1).damages == []
        assert self.state(out) in legal, f"{done} were done, and it is something else: {said}"
        commits = len(log(out).versions) - before
        assert "pack" in done or 0 <= commits <= len(done), f"{commits} commits by {done}"

    def _fork(self, do: Callable[[], Any], begin: tuple[int, int], later: float, name: str) -> int:
        pid = os.fork()
        if pid:
            return pid
        code, text = 1, ""
        try:
            os.close(begin[1])
            os.read(begin[0], 1)  # nothing, when all are there
            time.sleep(later)
            do()
            code = 0
        except ShardioError as error:
            code, text = TOLD, str(error)
        except BaseException as error:
            text = repr(error)
        finally:
            (self.folder / f"said-{name}").write_text(text)
            os._exit(code)

    def _readers(self, names: list[str]) -> str:
        """Open and read, again and again, while commands commit one after the other."""
        out, stop = self.copy("read"), self.folder / "stop"
        stop.unlink(missing_ok=True)
        begin = os.pipe()
        pids = [
            self._fork(partial(self._read, out, stop, number), begin, 0.0, f"{number}")
            for number in range(READERS)
        ]
        for end in begin:
            os.close(end)
        legal, refused = {self.state(out)}, []
        for name in [*names, "gc"]:
            try:
                self.commands[name](out)
            except ShardioError as error:  # such as keys that were dropped before
                refused.append(f"{name}: {error}")
            legal.add(self.state(out))
        stop.touch()
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        said = [(self.folder / f"said-{number}").read_text() for number in range(READERS)]
        with told(f"readers while {', '.join(names)}: {said}"):
            assert codes == [0] * READERS, codes
            for number in range(READERS):
                seen = json.loads((self.folder / f"seen-{number}").read_text())
                assert {*seen} <= legal, "a reader saw what no commit left"
                self.sums["opens"] += sum(seen.values())
        return "readers while one writes"

    def _read(self, out: Path, stop: Path, number: int) -> None:
        seen: dict[str, int] = {}
        last = False
        while not last:
            last = stop.exists()
            one = self.state(out)
            seen[one] = seen.get(one, 0) + 1
        (self.folder / f"seen-{number}").write_text(json.dumps(seen))

    @classmethod
    def done(cls, kinds: Mapping[str, int], figures: Mapping[str, float]) -> str:
        pairs = {one: count for one, count in kinds.items() if " beside " in one}
        names = words(name for one in pairs for name in one.split(" beside "))
        return (
            f"{sum(pairs.values()):,} races of {len(pairs)} pairs of {len(names)} commands, "
            f"{min(pairs.values(), default=0)} at least of each; "
            f"{figures.get('opens', 0):,.0f} opens while others commit; "
            f"{kinds.get('16 processes on one cache', 0)} caches with 16 processes"
        )
