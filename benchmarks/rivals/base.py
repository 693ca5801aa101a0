"""What an adapter is: how one rival stores the images of a folder, and how it reads them again.

An adapter is a module of this package, with those of these functions that its rival has:

    write(folder, out)                            stores the folder's images below the path `out`
    images(path, *, size, batch, workers)         epochs without end of decoded, shuffled batches
    records(path)                                 one pass in stored order: an image's bytes each
    stream(url, files, cache, *, batch, workers)  one shuffled epoch of images' bytes, by URL

`folder` holds class folders, as an ImageFolder has them; `path` is what `write` made, or the folder
where there is no `write`. A batch is (images, labels): uint8 RGB in either order of axes, in what
the rival hands out (torch, numpy or tf). size 224: RandomResizedCrop(224) and a mirror by chance;
32: the whole image. All settings are the rival's own advice, and the docstring says from where.

For `stream`, what `write` made (or `write_parquet`) lies at `url`, whose server gives objects and
ranges as S3 does, and asks for no credentials; `files` are the names there, `cache` is a directory
that is not there yet. A batch is ([bytes, ...], labels).

Each runs in an environment of its own (benchmarks/setup_rivals), so it imports its rival in its
functions only, and of shardio just the crop, so that all that decode by PIL resize alike.
"""

from __future__ import annotations

import io
import math
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardio.machine import family

from ..harness import ROOT, EntryProcess

ENVIRONMENTS = ROOT / "benchmarks" / ".venvs"
AHEAD = 2  # batches a worker, as torch's own default
LIMIT_S, CLOSING_S = 900.0, 60.0  # FFCV's writer can wait for ever
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of the random crop: RandomResizedCrop's

Transform = Callable[..., Any] | None


class Guarded(EntryProcess):
    """An entry that is killed, with its processes, when it takes too long to answer or end."""

    def round(self, **asked: Any) -> dict[str, Any]:
        with self._limit(LIMIT_S):
            return super().round(**asked)

    def close(self) -> None:
        with self._limit(CLOSING_S):
            super().close()

    @contextmanager
    def _limit(self, seconds: float) -> Iterator[None]:
        timer = threading.Timer(seconds, self._kill)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _kill(self) -> None:
        for process in family(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


@dataclass(frozen=True)
class Rival:
    """A row of the comparison."""

    title: str
    module: str  # of this package
    package: str  # whose release is told
    environment: str = ""  # of setup_rivals; its own by default
    writes: str = ""  # the module that writes what this one reads; its own by default
    raw: bool = True  # it hands out an image's bytes
    extra: str = ""  # what it needs beside its environment: a program

    @property
    def stores(self) -> str:
        """The name without its loader: that of the rows where nothing is loaded."""
        return self.title.partition(" + ")[0].partition(",")[0]

    @property
    def python(self) -> Path:
        return ENVIRONMENTS / (self.environment or self.module) / "bin" / "python"

    def missing(self) -> str:
        """Why this one cannot take part; empty when it can."""
        if self.extra and not shutil.which(self.extra):
            return f"there is no program {self.extra}"
        if self.python.exists():
            return ""
        name = self.environment or self.module
        reason = ENVIRONMENTS / f"{name}.failed"  # written by setup_rivals
        if reason.exists():
            return f"it does not install here: {reason.read_text().strip()}"
        return f"`benchmarks/setup_rivals {name}` was not run"

    def process(self, function: str, scratch: Path, **options: Any) -> Guarded:
        """A process of this rival's environment, with TMPDIR and HOME of its own."""
        home = scratch / f"{self.module}-home"
        home.mkdir(exist_ok=True)
        return Guarded(function, python=self.python, home=str(home), **options)


def crop(size: int) -> Callable[..., Any]:
    """shardio's own transform for a size, which takes PIL images as well as bytes."""
    from shardio import CenterCrop, RandomResizedCrop

    return CenterCrop(32) if size == 32 else RandomResizedCrop(size, flip=True)


def shards(path: str, size: int, batch: int) -> Any:
    """shardio's own dataset, for the rows of the comparison that are not of a rival."""
    from shardio import ShardDataset

    how: dict[str, Any] = {"decode": "numpy"} if size == 32 else {"transform": crop(size)}
    return ShardDataset(path, batch_size=batch, fields=("image", "label"), **how)


def decoded(file: Any, transform: Callable[..., Any]) -> Any:
    """An open file or bytes through shardio's own crop, so that all decode and resize alike."""
    from PIL import Image

    source = io.BytesIO(file) if isinstance(file, bytes) else file
    return transform(Image.open(source), draw=random.getrandbits(64))


class Opened:
    """Map-style, of images by their numbers in a file that each process opens for itself."""

    def __init__(self, path: str, labels: list[int], transform: Transform = None) -> None:
        self.path, self.labels, self.transform = path, labels, transform
        self._image: Callable[[int], Any] | None = None

    def _open(self) -> Callable[[int], Any]:
        """What gives the bytes of an image."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        if self._image is None:
            self._image = self._open()
        image = self._image(index)
        if self.transform is None:
            return image, self.labels[index]
        return decoded(image, self.transform), self.labels[index]

    def read(self) -> Iterator[Any]:
        """Every image in stored order."""
        return map(self._open(), range(len(self)))


def random_box(width: int, height: int) -> tuple[int, int, int, int]:
    """Left, top, width and height: torchvision's RandomResizedCrop.get_params."""
    for _ in range(10):
        area = width * height * random.uniform(*AREA)
        ratio = math.exp(random.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            return random.randint(0, width - wide), random.randint(0, height - high), wide, high
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side


def collated(items: list[Any]) -> Any:
    """(image, label) pairs as a batch, by shardio's function: a copy of each image, and no more."""
    from shardio import collate

    return collate(items)


def listed(items: list[Any]) -> Any:
    """(bytes, label) pairs as a batch, as torch's own collate function leaves them."""
    import torch

    return [bytes(image) for image, _ in items], torch.tensor([label for _, label in items])


def as_bucket(url: str, options: dict[str, str]) -> str:
    """The s3:// URL of a folder at http://host:port/folder, for clients that take no other.

    options: gets the variables of the environment that lead to that server, with keys that nobody
    looks at.
    """
    server, _, folder = url.rpartition("/")
    keys = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing"}
    options |= {"S3_ENDPOINT_URL": server, "AWS_DEFAULT_REGION": "us-east-1", **keys}
    return f"s3://{folder}"


def data_loader(dataset: Any, *, batch: int, workers: int, **more: Any) -> Any:
    """torch's DataLoader over (image, label) pairs, as its tutorial says; workers stay."""
    from torch.utils.data import DataLoader

    return DataLoader(
        *(dataset,), batch_size=batch, num_workers=workers, collate_fn=collated,
        prefetch_factor=AHEAD if workers else None, persistent_workers=workers > 0, **more,
    )  # fmt: skip


def epochs(loader: Any, set_epoch: Callable[[int], Any] | None = None) -> Iterator[Any]:
    """The loader's batches, epoch after epoch without end."""
    epoch = 0
    while True:
        if set_epoch is not None:
            set_epoch(epoch)
        epoch += 1
        yield from loader
