"""SPDL: the image folder, read and decoded by FFmpeg in threads of the trainer's process.

Settings of its guide (facebookresearch.github.io/spdl, Getting Started: Parallelism, and "Building
High-Performance DataLoaders"): paths from a shuffling source, a stage that decodes and crops with
the GIL released, `aggregate` into batches, a stage that makes a batch one buffer. The crop is drawn
from the header's size and done by FFmpeg's filters (crop, scale, hflip), bilinear.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from ..data import listing
from .base import epochs, random_box


def images(path: str, *, size: int, batch: int, workers: int) -> Iterator[Any]:
    import numpy as np
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    files = listing(path)

    def shuffled() -> Iterator[tuple[str, int]]:
        return iter(random.sample(files, len(files)))

    def decode(file: tuple[str, int]) -> Any:
        with open(file[0], "rb") as opened:
            packets = spdl.io.demux_image(opened.read())
        steps = "" if size == 32 else _crop(packets.width, packets.height, size)
        pixels = f"{steps}format=pix_fmts=rgb24"
        return spdl.io.decode_packets(packets, filter_desc=pixels), file[1]

    def assemble(items: list[Any]) -> Any:
        frames, labels = zip(*items, strict=True)
        return spdl.io.to_numpy(spdl.io.convert_frames(list(frames))), np.array(labels)

    def epoch() -> Iterator[Any]:
        pipeline = (
            PipelineBuilder()
            .add_source(shuffled())
            .pipe(decode, concurrency=workers)
            .aggregate(batch)
            .pipe(assemble)
            .add_sink(3)
            .build(num_threads=workers, max_failures=0)
        )
        with pipeline.auto_stop():
            yield from pipeline

    class Epochs:
        def __iter__(self) -> Iterator[Any]:
            return epoch()

    return epochs(Epochs())


def _crop(width: int, height: int, size: int) -> str:
    left, top, wide, high = random_box(width, height)
    flip = "hflip," if random.random() < 0.5 else ""
    return f"crop={wide}:{high}:{left}:{top}:exact=1,scale={size}:{size}:flags=bilinear,{flip}"
