"""Training by URL, while a tenth of all requests fails: each record comes once, byte for byte.

A case is an epoch: by all ranks of one to three, by DataLoader, ShardLoader or no loader, with a
cache on disk or without; often it stops in the middle, and goes on from its state.
"""

import contextlib
import shutil
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from support.faults import Rule
from support.url_datasets import served, write_images
from torch.utils.data import DataLoader

from shardio import Order, ShardDataset, ShardLoader, Storage
from shardio.storage import ranges
from trust.section import Section, told

RECORDS, BATCH = 240, 8  # which one to three ranks share without a rest
# Of these a read gets over.
OFTEN = (
    *("reset", "timeout", "5xx", "503", "429", "wrong_range", "shifted", "short", "stall", "slow"),
    *("reset_midway", "shifted_silently", "garbage"),
)
PART = 0.1  # of the requests


def image(number: int) -> bytes:
    """Make bytes that name the record, of a size of their own."""
    draw = np.random.default_rng(number)
    return b"\xff\xd8\xff" + number.to_bytes(4, "big") + draw.bytes(int(draw.integers(100, 20_000)))


class Reading(Section):
    """Reads epochs by URL through a proxy that fails."""

    name = "reading"
    promise = "P1, P3"
    goal = 40

    def prepare(self) -> None:
        self._ended = contextlib.ExitStack()
        www = self.folder / "www"
        write_images(www / "data", RECORDS, image, 200_000)
        self._proxy = self._ended.enter_context(served(www))
        self._images = [image(number) for number in range(RECORDS)]

    def case(self, number: int) -> str:
        draw = self.draw(number)
        kind = draw.choice(("DataLoader", "ShardLoader", "no loader"))
        world, split = draw.randint(1, 3), draw.random() < 0.5
        cache = self.folder / "cache" if draw.random() < 0.3 else None
        each = PART / len(OFTEN)
        rules = [Rule(one, path=r"\.shard", fraction=each, seed=number) for one in OFTEN]
        self._proxy.reset()
        self._proxy.rules(*rules)
        shown = f"{kind}, {world} ranks{', resumed' if split else ''}{', cache' if cache else ''}"
        seen = Counter[int]()
        with told(shown):
            for rank in range(world):
                options: dict[str, Any] = {"rank": rank, "world_size": world}
                if split:
                    stop = draw.randint(1, RECORDS // BATCH // world - 1)
                    dataset = self._dataset(number, cache, options)
                    seen.update(self._read(dataset, kind, stop))
                    state = dataset.state_dict(steps=stop)
                    dataset = self._dataset(number, cache, options)
                    dataset.load_state_dict(state)
                    seen.update(self._read(dataset, kind))
                else:
                    seen.update(self._read(self._dataset(number, cache, options), kind))
            assert seen == Counter(range(RECORDS)), "not each record once"
        figures = self._proxy.figures()
        self.sums["requests"] += figures.requests
        self.sums["faults"] += sum(figures.faults.values())
        ranges.close()
        if cache is not None and draw.random() < 0.5:
            shutil.rmtree(cache)
        return f"{kind}{', resumed' if split else ''}"

    def _dataset(self, epoch: int, cache: Path | None, options: dict[str, Any]) -> ShardDataset:
        kept: dict[str, Any] = {} if cache is None else {"cache": cache, "cache_bytes": "1GiB"}
        dataset = ShardDataset(
            f"{self._proxy.url}/data",
            batch_size=BATCH,
            decode=None,
            fields=("image",),
            shuffle_buffer=30,
            order=Order(spans=4),
            storage=Storage(timeout_s=20.0, **kept),
            **options,
        )
        dataset.set_epoch(epoch)
        return dataset

    def _read(self, dataset: ShardDataset, kind: str, steps: int | None = None) -> list[int]:
        """Read so many batches, and check what comes. Returns the numbers of the records."""
        with contextlib.ExitStack() as ended:
            loader: Any = dataset
            if kind == "DataLoader":
                loader = DataLoader(dataset, batch_size=None, num_workers=2)
            elif kind == "ShardLoader":
                loader = ended.enter_context(ShardLoader(dataset, num_workers=2))
            found = []
            batches = iter(loader)
            for (images,) in islice(batches, steps):
                for one in images:
                    data = bytes(one)
                    number = int.from_bytes(data[3:7], "big")
                    assert data == self._images[number], f"record {number} has other bytes"
                    found.append(number)
            del batches
        return found

    def close(self) -> None:
        self._ended.close()

    @classmethod
    def done(cls, kinds: Mapping[str, int], figures: Mapping[str, float]) -> str:
        epochs = sum(count for one, count in kinds.items() if one != "failed")
        return (
            f"{epochs:,} epochs of {RECORDS} records, {figures.get('requests', 0):,.0f} requests, "
            f"{figures.get('faults', 0):,.0f} of them failed"
        )
