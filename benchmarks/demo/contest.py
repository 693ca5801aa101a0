"""The ways to read that a demo compares, each in a process of its own (`bench_process.Host`).

    folder       what one writes without a library, with torchvision: a map-style dataset that opens
                 a file by PIL, decodes all of it, crops, resizes and mirrors; DataLoader shuffles
    dataloader   shards, ShardDataset in the same DataLoader
    shardloader  shards, ShardLoader: what shardio recommends

All read the same images, with crops by the same rule, in batches of the same size and type, by as
many processes. Functions take a request and give an answer, both plain JSON.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import signal
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from PIL import Image, ImageOps

from shardio import RandomResizedCrop, ShardDataset, ShardLoader, StorageError
from shardio.dataset import sequence
from shardio.errors import printable
from shardio.images.transforms import crop_box
from shardio.names import file_name
from shardio.tuning.bench import files_of, why_not_cold
from shardio.tuning.bench_process import in_memory_order, loading, passes

from .. import throttle

if TYPE_CHECKING:
    from torch import Tensor

WARM: Final = 1 / 6  # of the seconds, at least, for warm passes: one over 10 MB takes 0.2 s
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of the crops: those of RandomResizedCrop, all three


class Folder:
    """A map-style dataset of files: (3, size, size) uint8 and label, as with torchvision.

    torchvision's ImageFolder, RandomResizedCrop, RandomHorizontalFlip and PILToTensor call the same
    functions of PIL in this order. It is not imported: few who try shardio have all of it.
    """

    def __init__(self, files: list[tuple[str, int]], size: int) -> None:
        self.files, self.size = files, size

    def __len__(self) -> int:
        return len(self.files)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: DataLoader shuffles each pass anew."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        with open(path, "rb") as file:
            image = Image.open(file).convert("RGB")
        left, top, wide, high, flip = crop_box(
            image.width, image.height, random.getrandbits(64), AREA, RATIO
        )
        image = image.crop((left, top, left + wide, top + high))
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR)
        if flip:
            image = ImageOps.mirror(image)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous(), label


def files(out: str, source: str, records: int) -> list[tuple[str, int]]:
    """Return the files of the first records as packed, with their labels (0 where none are)."""
    packed = sequence.open(out)
    paths = [os.path.join(source, file_name(key)) for key in packed[:records].keys()]  # noqa: SIM118
    labels = [0] * len(paths)
    if "label" in packed.manifest.schema.names:
        labels = packed.columns("label")[:records].tolist()
    return list(zip(paths, labels, strict=True))


def read(request: dict[str, Any]) -> dict[str, Any]:
    """Read images for a while: warm, the second pass; cold, the first, from dropped pages.

    With `members`, in that control group. Raises StorageError where pages cannot be dropped.
    """
    way, cold, seconds = request["way"], request["cold"], request["seconds"]
    out, records = request["out"], request["records"]
    listed = files(out, request["source"], records)
    dataset: Any = Folder(listed, request["size"]) if way == "folder" else _dataset(request)
    own = {"batch_size": request["batch_size"], "shuffle": True} if way == "folder" else {}
    name = "ShardLoader" if way == "shardloader" else "DataLoader"
    with loading(dataset, name, request["workers"], **own) as loader:
        if cold:
            shards = files_of(sequence.open(out), out, records)
            refused = why_not_cold([path for path, _ in listed] if way == "folder" else shards)
            if refused:
                raise StorageError(refused)
        if request.get("members"):
            throttle.join(request["members"])
        found: dict[str, Any] = _timed(passes(loader, dataset), seconds)
        if not cold:
            found = _timed(passes(loader, dataset, first=1), seconds, seconds * WARM)
    return found


def train(request: dict[str, Any]) -> dict[str, Any]:
    """Read an epoch by ShardLoader, noting each batch and the state after it in the file `log`.

    With `dies_after`, this process is killed once it got so many batches.
    """
    dataset, workers = _dataset(request), request["workers"]
    with ShardLoader(dataset, num_workers=workers) as loader, open(request["log"], "w") as log:
        if request["state"] is not None:
            loader.load_state_dict(request["state"])
        for noted, batch in enumerate(loader, 1):
            note = {"batch": _digest(batch), "state": loader.state_dict()}
            print(json.dumps(note), file=log, flush=True)
            if noted == request.get("dies_after"):
                os.kill(os.getpid(), signal.SIGKILL)
    return {}


def flip_file(request: dict[str, Any]) -> dict[str, Any]:
    """Open an image file with one bit flipped, in the middle, by PIL. Nothing is written.

    raised: what it raises, if it does; changed: pixels that are others; pixels: all of them.
    """
    with open(request["path"], "rb") as file:
        data = bytearray(file.read())
    before = _pixels(bytes(data))
    data[len(data) // 2] ^= 1 << 4
    found: dict[str, Any] = {"raised": None, "changed": None, "pixels": before[..., 0].size}
    try:
        after = _pixels(bytes(data))
    except Exception as error:
        return found | {"raised": printable(str(error)) or type(error).__name__}
    if before.shape != after.shape:
        return found | {"changed": found["pixels"]}
    return found | {"changed": int((before != after).any(axis=2).sum())}


def _pixels(data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Decode an image by PIL: (H, W, 3) uint8."""
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def _dataset(request: dict[str, Any]) -> ShardDataset:
    """Open the shards, with the crops and about the order of an image folder."""
    dataset = ShardDataset(
        request["out"],
        batch_size=request["batch_size"],
        fields=tuple(request["fields"]),
        transform=RandomResizedCrop(request["size"], scale=AREA, ratio=RATIO, flip=True),
        # As a part of the images, since it is one of larger data: a buffer of all reads at random.
        shuffle_buffer=max(request["batch_size"], request["records"] // 4),
    )
    only = request.get("only") or range(request["records"])
    return dataset if len(only) == dataset.manifest.records else dataset.select(only)


def _timed(
    batches: Iterable[tuple[int, bool]], seconds: float, least: float = 0.0
) -> dict[str, Any]:
    """Time batches, from asking for them to the end of a pass, or until the time is up.

    least: passes are whole, and read until so much time is over.
    """
    start = time.perf_counter()
    for images, ends in batches:  # noqa: B007
        elapsed = time.perf_counter() - start
        if elapsed > seconds or (ends and elapsed >= least):
            break
    return {"images": images, "images_per_s": images / elapsed}


def _digest(batch: Any) -> str:
    """Return a hash of all bytes of a batch, and of their order."""
    found = hashlib.blake2b(digest_size=16)
    for value in batch:
        found.update(in_memory_order(value).contiguous().numpy().tobytes())
    return found.hexdigest()
