"""A dataset whose samples have an image, masks, boxes and a label; and the loaders that read it."""

import io
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader

import shardio
from shardio import CenterCrop, ShardLoader
from support import small_datasets

COUNT = 10
SIZE = (24, 16)  # width, height: of small_datasets.jpeg


def ids(number: int) -> np.ndarray[Any, Any]:
    """(H, W) uint8: a mask of its own, of ids that no conversion to colours keeps."""
    y, x = np.mgrid[0 : SIZE[1], 0 : SIZE[0]]
    mask: np.ndarray[Any, Any] = ((x + number) // 4 + 7 * (y // 4)).astype(np.uint8)
    return mask


def mask(number: int) -> bytes:
    image = Image.frombytes("P", SIZE, ids(number).tobytes())
    image.putpalette([v * k % 256 for v in range(256) for k in (3, 5, 7)])
    return png(image)


def depth(number: int) -> bytes:
    return png(Image.fromarray(ids(number).astype(np.uint16) * 1000))


def png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


FIELDS = (
    *(("__key__", "key"), ("image", "image"), ("mask", "image"), ("depth", "image")),
    *(("label", "int"), ("boxes", "json")),
)


def sample(number: int) -> dict[str, Any]:
    return {
        "__key__": b"k/%02d" % number,
        "image": small_datasets.jpeg(number),
        "mask": mask(number),
        "depth": depth(number),
        "label": number,
        "boxes": [{"bbox": [j, j, 4, 4], "label": j} for j in range(number % 4)],
    }


LOADERS: dict[str, Callable[[Any], Any]] = {
    "here": lambda data: data,
    "pickled": lambda data: pickle.loads(pickle.dumps(data)),  # as for a spawned worker
    "a worker": lambda data: DataLoader(data, batch_size=None, num_workers=1),
    "ShardLoader": lambda data: ShardLoader(data, num_workers=2, threads=2),
    "ShardLoader here": lambda data: ShardLoader(data, num_workers=0),
}
# Torch waits 5 s for a worker in which an exception was raised: these send it as a worker does.
FAILING = LOADERS | {"a worker": lambda data: sent(data)}


def sent(data: Any) -> Any:
    try:
        return list(data)
    except Exception:
        ExceptionWrapper(where="in DataLoader worker process 0").reraise()


def boxes_of(item: Any) -> Any:
    return item | {
        "boxes": np.array([one["bbox"] for one in item["boxes"]], np.float32).reshape(-1, 4)
    }


RAGGED: Any = {"batch_size": COUNT, "shuffle": False, "order": shardio.Order(unit=1)}
BUILT_IN: Any = {"fields": ("image", "label"), "transform": CenterCrop(8)}


def check_planes(image: Any) -> None:
    assert type(image) is torch.Tensor and image.dtype == torch.uint8 and image.shape == (3, 8, 8)


def shown(error: BaseException) -> str:
    """All that a trainer's terminal shows of it."""
    return "".join(traceback.format_exception(error))
