"""What is beside datasets, damaged: an unfinished packing's files, entries of a cache.

A packing whose journal, notes or finished shards are damaged goes on to the right bytes, or says
what is wrong, and `--restart` makes the right bytes. A cache whose files are damaged gives the
right records: what is wrong is downloaded again.
"""

import contextlib
import os
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
    goal = 2000

    first, second, counts = images(2, 6, 200), images(3, 6, 200), (12, 9)

    def prepare(self) -> None:
        os.environ["SOURCE_DATE_EPOCH"] = "1750000000"
        self.ends = contextlib.ExitStack()
        self.source = plant(self.folder / "src", self.first)
        self.more = plant(self.folder / "more", self.second)
        plant(self.source, {"class0/no.jpg": b"no image"})
        self.wanted, self.number = {}, 0
        for name in ("pack", "append"):
            whole = self.begun(name, self.folder / f"{name}-whole")
            self.go_on(name, whole)
            self.wanted[name] = content(whole)
            self.begun(name, self.folder / f"{name}-begun")
        www = self.folder / "www"
        self.data = make(www / "data", self.counts, image=jpeg)
        self.right = list(shardio.open(self.data, decode=None))
        self.web = (
            self.ends.enter_context(servers.nginx(www)) if servers.find_program("nginx") else None
        )
        if self.web:
            assert self.read(self.folder / "filled") == self.right

    def beside(self) -> dict[str, list[Path]]:
        """Return the files that are damaged, by what they are of."""
        found = {}
        for name in ("pack", "append", *(["cache"] if self.web else [])):
            folder = self.folder / ("filled" if name == "cache" else f"{name}-begun")
            old = self.folder / "append-old" if name == "append" else None
            found[name] = [
                path
                for path in sorted(folder.rglob("*"))
                if path.is_file() and not (old and (old / path.relative_to(folder)).exists())
            ]
        return found

    def begun(self, name: str, out: Path) -> Path:
        """Leave a packing, or an appending, of which one part of two is built."""
        options = {"jobs": 1, "max_records": 2, "on_error": "skip", "part": (1, 2)}
        if name == "pack":
            shardio.pack(self.source, out, **grouped(options))
        else:
            shardio.pack(self.source, out, **grouped(options | {"part": None}))
            shutil.copytree(out, self.folder / "append-old", dirs_exist_ok=True)
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
        return list(shardio.open(f"{self.web.url}/data", decode=None, storage=storage))

    def case(self, number: int) -> str:
        draw, all_files = self.draw(number), self.beside()
        name = [*all_files][number % len(all_files)]
        files = all_files[name]
        hidden = [path for path in files if path.name.startswith(".shardio-")]
        path = draw.choice(hidden or files) if draw.random() < 0.6 else draw.choice(files)
        what = draw.choice([*IN_PLACE, "missing"])
        data = bytearray(path.read_bytes())
        if what == "missing" or not data:
            what = "missing"
        else:
            IN_PLACE[what](data, draw)
        with told(f"{name}: {path.name} {what}"):
            self.changed(name, path, None if what == "missing" else data)
        return f"{name}: {self.kind(path)}: {what}"

    @staticmethod
    def kind(path: Path) -> str:
        """Say what a file is."""
        if path.name.startswith(".shardio-"):
            return path.name.split("-")[1].split(".")[0]
        if path.suffix == ".cache":
            return "usage of the cache" if "usage" in path.name else "cache entry"
        return "finished shard" if path.suffix == ".shard" else path.suffix

    def changed(self, name: str, path: Path, data: bytearray | None) -> None:
        """Go on, or read, where one of the files has other bytes; None: is missing."""
        begun = self.folder / ("filled" if name == "cache" else f"{name}-begun")
        self.number += 1  # what this process has open is of another cache
        out = self.folder / f"out-{self.number}"
        shutil.copytree(begun, out)
        there = out / path.relative_to(begun)
        there.unlink() if data is None else there.write_bytes(data)
        if name == "cache":
            assert self.read(out) == self.right, "wrong content"
            assert self.read(out) == self.right, "wrong content, the second time"
            if self.number % 200 == 0:
                ranges.close()
        else:
            self._gone_on(name, path, out)
        shutil.rmtree(out)

    def _gone_on(self, name: str, path: Path, out: Path) -> None:
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

    def close(self) -> None:
        ranges.close()
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
