"""What is beside datasets, damaged: an unfinished packing's files, entries of a cache.

A packing whose journal, notes or finished shards are damaged goes on to the right bytes, or says
what is wrong, and `--restart` makes the right bytes. A cache whose files are damaged gives the
right records: what is wrong is downloaded again.
"""

import contextlib
import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path

from support import servers
from support.packing import grouped
from support.small_datasets import jpeg, make
from support.trees import content, images, plant

import shardio
from shardio import ShardioError, Storage
from shardio.packing.append import append
from shardio.packing.commit import commit
from shardio.storage import ranges
from trust.damage import IN_PLACE
from trust.section import Section, told, words


class Unfinished(Section):
    """Damages one file, and goes on, or reads."""

    name = "unfinished"
    promise = "P1"

    def prepare(self) -> None:
        os.environ["SOURCE_DATE_EPOCH"] = "1750000000"
        self.ends = contextlib.ExitStack()
        self.source = plant(self.folder / "src", images(2, 6, 200))
        self.more = plant(self.folder / "more", images(3, 6, 200))
        plant(self.source, {"class0/no.jpg": b"no image"})
        self.wanted = {}
        for name in ("pack", "append"):
            whole = self.begun(name, self.folder / f"{name}-whole")
            self.go_on(name, whole)
            self.wanted[name] = content(whole)
            self.begun(name, self.folder / f"{name}-begun")
        www = self.folder / "www"
        self.data = make(www / "data", [12, 9], image=jpeg)
        self.right = list(shardio.open(self.data, decode=None))
        self.web = (
            self.ends.enter_context(servers.nginx(www)) if servers.find_program("nginx") else None
        )
        if self.web:
            assert self.read(self.folder / "filled") == self.right

    def begun(self, name: str, out: Path) -> Path:
        """Leave a packing, or an appending, of which one part of two is built."""
        options = {"jobs": 1, "max_records": 2, "on_error": "skip", "part": (1, 2)}
        if name == "pack":
            shardio.pack(self.source, out, **grouped(options))
        else:
            shardio.pack(self.source, out, **grouped(options | {"part": None}))
            append(self.more, out, jobs=1, on_duplicate="skip", part="1/2")
        return out

    def go_on(self, name: str, out: Path, restart: bool = False) -> None:
        """Do the other part, and commit."""
        options = {"jobs": 1, "max_records": 2, "on_error": "skip", "restart": restart}
        if name == "pack":
            shardio.pack(self.source, out, **grouped(options))
        elif restart:
            append(self.more, out, jobs=1, on_duplicate="skip", restart=True)
        else:
            append(self.more, out, jobs=1, on_duplicate="skip", part="2/2")
            commit(out, jobs=1)

    def read(self, cache: Path) -> list[object]:
        assert self.web is not None
        storage = Storage(cache=cache, cache_bytes="64MiB")
        try:
            return list(shardio.open(f"{self.web.url}/data", decode=None, storage=storage))
        finally:
            ranges.close()

    def case(self, number: int) -> str:
        kinds = ("pack", "append", "cache") if self.web else ("pack", "append")
        return (
            self._cached(number) if kinds[number % len(kinds)] == "cache" else self._begun(number)
        )

    def _begun(self, number: int) -> str:
        draw, name = self.draw(number), ("pack", "append")[number % 3 % 2]
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(self.folder / f"{name}-begun", out)
        old = {path for path in (self.folder / "pack-begun").rglob("*") if name == "append"}
        files = sorted(path for path in out.rglob("*") if path.is_file() and path not in old)
        hidden = [path for path in files if path.name.startswith(".shardio-")]
        path = draw.choice(hidden or files) if draw.random() < 0.6 else draw.choice(files)
        if path.name == "manifest.json":  # damage.py has it
            return "nothing changed"
        what = self._damage(path, draw)
        kind = path.name.split("-")[1].split(".")[0] if path in hidden else path.suffix
        with told(f"{name}: {path.name} {what}"):
            try:
                self.go_on(name, out)
                done = True
            except ShardioError as error:
                assert str(out) in str(error), f"it says not where: {error}"
                done = False
            if not done and path.suffix not in (".shard", ".bin"):
                with contextlib.suppress(ShardioError):
                    self.go_on(name, out, restart=True)
                    done = True
            if done:
                self._is_whole(name, out, path)
        return f"{name}: {kind}: {what}"

    def _is_whole(self, name: str, out: Path, path: Path) -> None:
        """Compare with a run that nobody disturbed: all bytes, or that damage is told."""
        found = content(out)
        if found == self.wanted[name]:
            return
        assert not shardio.verify(out, sha256=True, jobs=1).damages or path.suffix == ".shard"
        with contextlib.suppress(ShardioError):
            keys = shardio.open(out, decode=None).keys()
            samples = {one["__key__"]: one["image"] for one in shardio.open(out, decode=None)}
            assert len(keys) == len(samples)
            for key, image in samples.items():
                files = (folder / key for folder in (self.source, self.more))
                assert image in [one.read_bytes() for one in files if one.exists()], key

    def _cached(self, number: int) -> str:
        draw, cache = self.draw(number), self.folder / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        shutil.copytree(self.folder / "filled", cache)
        files = sorted(path for path in cache.rglob("*") if path.is_file())
        path = draw.choice(files)
        what = self._damage(path, draw)
        with told(f"cache: {path.name} {what}"):
            assert self.read(cache) == self.right, "wrong content"
            assert self.read(cache) == self.right, "wrong content, the second time"
        kind = "shard" if "usage" not in path.name and path.suffix == ".cache" else path.name
        return f"cache: {kind.split('-')[-1]}: {what}"

    @staticmethod
    def _damage(path: Path, draw: random.Random) -> str:
        what = draw.choice([*IN_PLACE, "missing"])
        data = bytearray(path.read_bytes())
        if what == "missing" or not data:
            path.unlink()
            return "missing"
        IN_PLACE[what](data, draw)
        path.write_bytes(data)
        return what

    def close(self) -> None:
        if hasattr(self, "ends"):
            self.ends.close()

    @classmethod
    def done(cls, kinds: Mapping[str, int], figures: Mapping[str, float]) -> str:
        rows = [one.split(": ") for one in kinds if one.count(": ") == 2]
        cached = sum(count for one, count in kinds.items() if one.startswith("cache: "))
        return (
            f"{len(words(row[1] for row in rows))} kinds of files of unfinished packings and "
            f"appends, damaged, and gone on with; {cached:,} damaged caches"
        )
