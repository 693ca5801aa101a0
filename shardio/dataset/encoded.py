"""Encoded images of a batch in one buffer: what `decode=None` gives, and decoders take.

    for images, labels in loader:                 # images: EncodedImages
        decode_jpeg(list(images), device="cuda")  # 1-d uint8 tensors, views of images.buffer
        images.tolist()                           # bytes objects

How it works. The files lie one behind the other in one tensor, so that a batch crosses processes as
one tensor in shared memory, whatever the number of its images, and nothing is pickled. Offsets say
where each image begins; the last one is the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, overload

import torch

Empty = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]

# Bytes below which DataLoader's workers send a batch through their pipe: 60 KB and labels take 0.68
# ms so, 0.90 as shared memory, 0.86 as a list of bytes; 250 KB take 0.96, 0.94 and 1.03.
PICKLED = 128 << 10


# No collections.abc.Sequence: torch would pin, and frameworks move, one as a list of its items. And
# no method `to`: Lightning and Accelerate would take the bytes to the GPU, and decoders that run
# there want them on the CPU.
class EncodedImages:
    """Hold the files of a batch's images in one buffer: a sequence of 1-d uint8 tensors.

    buffer   (bytes,) uint8: the files, one after the other, without gaps
    offsets  (n + 1,) int64, on the CPU: image i is buffer[offsets[i] : offsets[i + 1]]

    Each image is a view, which keeps the buffer of the batch: clone() an image that you keep.
    Equal to another, or to a list of bytes, if the bytes are the same.
    """

    __slots__ = ("__weakref__", "buffer", "offsets")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, buffer: torch.Tensor, offsets: torch.Tensor) -> None:
        """Take a buffer and its offsets as they are; they are not compared."""
        self.buffer = buffer
        self.offsets = offsets

    @classmethod
    def join(cls, images: Sequence[Any], empty: Empty | None = None) -> EncodedImages:
        """Copy images, each of them bytes or a 1-d uint8 tensor, into one buffer.

        empty: gives the memory of the buffer, by shape and dtype; None: torch does.
        """
        offsets = torch.tensor([0, *accumulate(map(len, images))], dtype=torch.int64)
        ends = offsets.tolist()
        size = (ends[-1],)
        buffer = torch.empty(size, dtype=torch.uint8) if empty is None else empty(size, torch.uint8)
        to = buffer.numpy().data
        for image, (start, end) in zip(images, pairwise(ends), strict=True):
            to[start:end] = image.numpy().data if isinstance(image, torch.Tensor) else image
        return cls(buffer, offsets)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> EncodedImages: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | EncodedImages:
        """Return an image, as a view; of a slice the images, copied if its step is not 1."""
        if not isinstance(index, slice):
            at = range(len(self))[index]
            start, end = self.offsets[at : at + 2].tolist()
            return self.buffer[start:end]
        start, stop, step = index.indices(len(self))
        if step != 1:
            images = list(self)[index]
            sizes = torch.tensor([0, *map(len, images)], dtype=torch.int64)
            buffer = torch.cat(images) if images else self.buffer[:0].clone()
            return EncodedImages(buffer, sizes.cumsum(0))
        offsets = self.offsets[start : max(start, stop) + 1]
        begin, end = offsets[[0, -1]].tolist()
        return EncodedImages(self.buffer[begin:end], offsets - begin)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield the images, as views of the buffer."""
        sizes = self.offsets.diff().tolist()
        return iter(torch.split(self.buffer, sizes) if sizes else ())

    def tolist(self) -> list[bytes]:
        """Return the images as bytes objects: copies."""
        data, ends = self.buffer.cpu().numpy().data, self.offsets.tolist()
        return [bytes(data[start:end]) for start, end in pairwise(ends)]

    def pin_memory(self) -> EncodedImages:
        """Return these images in page-locked memory, as `DataLoader(pin_memory=True)` asks it."""
        return EncodedImages(self.buffer.pin_memory(), self.offsets)

    def __eq__(self, other: object) -> bool:
        """Return whether these are the same files, byte for byte, in the same order."""
        if isinstance(other, EncodedImages):
            return torch.equal(self.offsets, other.offsets) and torch.equal(
                self.buffer, other.buffer
            )
        return self.tolist() == other if isinstance(other, list) else NotImplemented

    def __reduce__(self) -> tuple[Any, ...]:
        # As bytes: between DataLoader's processes each tensor takes a descriptor.
        small = self.buffer.nbytes < PICKLED and self.buffer.device.type == "cpu"
        buffer = self.buffer.numpy().tobytes() if small else self.buffer
        return from_parts, (buffer, self.offsets.numpy().tobytes())

    def __repr__(self) -> str:
        return f"<{len(self)} encoded images, {len(self.buffer):,} bytes>"


def from_parts(buffer: torch.Tensor | bytes, offsets: bytes) -> EncodedImages:
    """Make the images of a buffer, and of their offsets, which were pickled."""
    if isinstance(buffer, bytes):
        buffer = torch.frombuffer(bytearray(buffer), dtype=torch.uint8) if buffer else _NOTHING[:]
    return EncodedImages(buffer, torch.frombuffer(bytearray(offsets), dtype=torch.int64))


_NOTHING = torch.empty(0, dtype=torch.uint8)
