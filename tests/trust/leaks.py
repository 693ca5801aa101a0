"""Epochs of readers and both loaders: descriptors, threads and memory stay as they are."""

import gc
import resource
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from support import LIMIT_S, small_datasets
from support.leftovers import children, descriptors, settle
from torch.utils.data import DataLoader

import shardio
from shardio import ShardDataset, ShardLoader
from trust.section import Section, told

EPOCHS = 12
GROWTH = 8 << 20  # bytes that malloc may keep


def resident() -> int:
    """Return the bytes that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Leaks(Section):
    """Reads many epochs, some of which it leaves early."""

    name = "leaks"
    promise = "P3"
    goal = 50

    def prepare(self) -> None:
        counts = [20, 0, 7, 30]
        self.data = small_datasets.make(self.folder / "data", counts, image=small_datasets.jpeg)
        self.epochs = 0
        self.ways: dict[str, Callable[[], Iterator[Any]]] = {
            "open": self._open,
            "ShardDataset": lambda: self._dataset(None),
            "DataLoader": lambda: self._dataset(2),
            "ShardLoader, processes": lambda: self._loader(2),
            "ShardLoader, threads": lambda: self._loader(0),
        }
        for way in self.ways.values():  # what the first use of each leaves for good
            for epoch in way():
                list(epoch)
        self.before = self._held()

    def _stream(self) -> ShardDataset:
        return ShardDataset(self.data, batch_size=4, fields=("image", "label"))

    def _open(self) -> Iterator[Any]:
        for _ in range(EPOCHS):
            yield shardio.open(self.data)

    def _dataset(self, workers: int | None) -> Iterator[Any]:
        data = self._stream()
        loader = DataLoader(data, batch_size=None, num_workers=workers or 0)
        for epoch in range(EPOCHS if workers is None else 3):
            data.set_epoch(epoch)
            yield loader

    def _loader(self, workers: int) -> Iterator[Any]:
        with ShardLoader(self._stream(), num_workers=workers, threads=2) as loader:
            for epoch in range(EPOCHS):
                loader.set_epoch(epoch)
                yield loader

    def _held(self) -> tuple[list[str], set[int], int, int]:
        settle()
        for thread in threading.enumerate():
            if thread.name.startswith("shardio") and thread.name != "shardio-cache":
                thread.join(LIMIT_S)
        gc.collect()
        return descriptors(), children(), resident(), threading.active_count()

    def case(self, number: int) -> str:
        draw = self.draw(number)
        name = [*self.ways][number % len(self.ways)]
        for epoch in self.ways[name]():
            left = draw.choice((None, None, 1, 3))
            for step, _ in enumerate(epoch):
                if step == left:
                    break
            self.epochs += 1
            self.sums["epochs"] += 1
        del epoch, _
        opened, living, memory, threads = self._held()
        with told(name):
            assert len(opened) <= len(self.before[0]), f"open: {opened}, before: {self.before[0]}"
            assert living <= self.before[1], f"processes: {living - self.before[1]}"
            assert threads <= self.before[3], threading.enumerate()
            grown = memory - self.before[2]
            assert grown < GROWTH, f"{grown:,} bytes more after {self.epochs} epochs"
        self.grown = grown
        return name

    def most(self) -> dict[str, float]:
        return {"bytes more": getattr(self, "grown", 0)}

    @classmethod
    def done(cls, kinds: Mapping[str, int], figures: Mapping[str, float]) -> str:
        return (
            f"{figures.get('epochs', 0):,.0f} epochs in one process, in {len(kinds)} ways; "
            f"{figures.get('bytes more', 0) / 2**20:.1f} MiB more at the end"
        )
