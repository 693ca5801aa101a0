"""NVIDIA DALI on the CPU: the image folder, read and decoded by its own pipeline, two threads.

Settings of its ResNet-50 example (DALI, docs/examples/use_cases/pytorch/resnet50): `readers.file`
with random_shuffle, `decoders.image_random_crop` on the CPU, which decodes no more than the crop
needs, `resize` with INTERP_TRIANGULAR, a mirror by `coin_flip`; prefetch_queue_depth by default.
Area and ratio of the crop are those of all others here. Its decoder's own default is plain chroma
upsampling (`jpeg_fancy_upsampling=False`). A batch is a view of the pipeline's output.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .base import AREA, RATIO


def images(path: str, *, size: int, batch: int, workers: int) -> Iterator[Any]:
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=batch, num_threads=workers, device_id=None, prefetch_queue_depth=2)
    def stream() -> Any:
        files, labels = fn.readers.file(file_root=path, random_shuffle=True, name="Reader")
        if size == 32:
            return fn.decoders.image(files, device="cpu", output_type=types.RGB), labels
        found = fn.decoders.image_random_crop(
            files, device="cpu", output_type=types.RGB, random_area=list(AREA),
            random_aspect_ratio=list(RATIO),
        )  # fmt: skip
        small = fn.resize(
            *(found,), resize_x=size, resize_y=size, interp_type=types.INTERP_TRIANGULAR,
        )  # fmt: skip
        return fn.flip(small, horizontal=fn.random.coin_flip()), labels

    pipeline = stream()
    pipeline.build()
    while True:
        pixels, labels = pipeline.run()
        yield pixels.as_array(), labels.as_array()
