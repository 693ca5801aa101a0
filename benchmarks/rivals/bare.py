"""No loader at all: a loop on each core that reads a file, decodes, crops and resizes it.

What a decoder allows: nothing is handed over, checked or shuffled beyond a random file each time.

fast      libjpeg-turbo with its fast DCT and fast chroma upsampling (simplejpeg), which change
          pixels; resized by OpenCV, INTER_AREA
accurate  PIL's decoder, the crop resampled by PIL, antialiased: what all do that decode by PIL
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ..data import listing
from .base import crop, decoded, random_box

CREDIT = 2  # batches a process may be ahead, so that it sleeps when nobody asks


def images(path: str, *, size: int, batch: int, workers: int, fast: bool = True) -> Iterator[Any]:
    """Views of memory that is shared with each process, and overwritten two batches later."""
    import mmap

    import numpy as np

    files = listing(path)
    shape = (CREDIT + 1, batch, size, size, 3)
    tubes = []
    for worker in range(workers):
        memory = mmap.mmap(-1, int(np.prod(shape)))
        out = np.frombuffer(memory, np.uint8).reshape(shape)
        labels = mmap.mmap(-1, shape[0] * batch * 8)
        classes = np.frombuffer(labels, np.int64).reshape(shape[:2])
        (asked, ask), (done, tell) = os.pipe(), os.pipe()
        if os.fork() == 0:
            try:
                for _, end, other, _, _ in tubes:  # else a sibling would never see its parent end
                    os.close(end)
                    os.close(other)
                os.close(ask)
                os.close(done)
                mine = files[worker::workers]
                _work(_fast(size) if fast else _accurate(size), mine, out, classes, asked, tell)
            finally:
                os._exit(0)
        os.close(asked)
        os.close(tell)
        os.write(ask, b"." * CREDIT)
        tubes.append((worker, ask, done, out, classes))
    turn = 0
    while True:
        for _, ask, done, out, classes in tubes:
            if not os.read(done, 1):
                raise RuntimeError("a process of the bare loop has ended")
            os.write(ask, b".")
            yield out[turn % len(out)], classes[turn % len(out)]
        turn += 1


def accurate(path: str, **options: Any) -> Iterator[Any]:
    return images(path, fast=False, **options)


def _work(
    one: Callable[[str, Any], None], files: Any, out: Any, labels: Any, asked: int, tell: int
) -> None:
    turn = 0
    order: list[Any] = []
    while os.read(asked, 1):
        for row in range(out.shape[1]):
            if not order:
                order = random.sample(files, len(files))
            path, labels[turn % len(out), row] = order.pop()
            one(path, out[turn % len(out), row])
        os.write(tell, b".")
        turn += 1


def _fast(size: int) -> Callable[[str, Any], None]:
    import cv2
    import simplejpeg

    cv2.setNumThreads(0)
    decode = partial(simplejpeg.decode_jpeg, fastdct=True, fastupsample=True)

    def one(path: str, row: Any) -> None:
        with open(path, "rb") as file:
            pixels = decode(file.read())
        if size == 32:
            row[...] = pixels
            return
        left, top, wide, high = random_box(pixels.shape[1], pixels.shape[0])
        part = pixels[top : top + high, left : left + wide]
        small = cv2.resize(part, (size, size), interpolation=cv2.INTER_AREA)
        row[...] = small[:, ::-1] if random.random() < 0.5 else small

    return one


def _accurate(size: int) -> Callable[[str, Any], None]:
    transform = crop(size)

    def one(path: str, row: Any) -> None:
        with open(path, "rb") as file:
            row[...] = decoded(file, transform)

    return one
