"""Encoded images of a batch that the device crops: what `decode="cuda"` gives, and loaders finish.

    for images, labels in ShardLoader(train, device="cuda"):   # images: (B, 3, H, W) uint8
    for crops, labels in DataLoader(train, batch_size=None):   # crops: EncodedCrops

How it works. The files lie in one buffer, as EncodedImages has them, so a batch crosses processes
as one tensor. A second tensor says of each file which box of it is resized, and how.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch

from ..images.device_crop import DeviceCrop, Place, Reason
from .encoded import Empty, EncodedImages


# No method `to`, as EncodedImages has none: frameworks would move the bytes.
class EncodedCrops:
    """Hold the files of a batch's images, and how each becomes a crop on the device.

    files          EncodedImages: JPEGs, whole or cut. Of a crop that a worker has made already:
                   its pixels, H * W * 3 bytes, RGB
    places         (B, 14) float64, on the CPU. Its columns are numbered by `Place`
    shape          (H, W) of each result
    interpolation  of the resize, as PIL names it: bilinear, bicubic, lanczos, box or hamming

    ShardLoader(device=) and shardio.prefetch turn it into (B, 3, H, W) uint8 on the device.
    """

    __slots__ = ("__weakref__", "files", "interpolation", "places", "shape")
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self, files: EncodedImages, places: torch.Tensor, shape: tuple[int, int], interpolation: str
    ) -> None:
        """Take the files and their places as they are; they are not compared."""
        self.files = files
        self.places = places
        self.shape = shape
        self.interpolation = interpolation

    @classmethod
    def join(cls, crops: Sequence[DeviceCrop], empty: Empty | None = None) -> EncodedCrops:
        """Copy crops, one or more and all of one shape and interpolation, into one buffer.

        empty: gives the memory of the buffer, by shape and dtype; None: torch does.
        """
        files = EncodedImages.join([crop.data for crop in crops], empty)
        places = torch.tensor([crop.place for crop in crops], dtype=torch.float64)
        return cls(files, places, crops[0].shape, crops[0].interpolation)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.files)

    @overload
    def __getitem__(self, index: int) -> DeviceCrop: ...
    @overload
    def __getitem__(self, index: slice) -> EncodedCrops: ...
    def __getitem__(self, index: int | slice) -> DeviceCrop | EncodedCrops:
        """Return one crop, with a copy of its bytes; of a slice the crops, views if its step is 1.

        The files of a slice are those of EncodedImages.
        """
        if not isinstance(index, slice):
            data = self.files[index].cpu().numpy().tobytes()
            return DeviceCrop(
                data, tuple(self.places[index].tolist()), self.shape, self.interpolation
            )
        # torch has no slices with a negative step.
        places = self.places[list(range(*index.indices(len(self))))]
        return EncodedCrops(self.files[index], places, self.shape, self.interpolation)

    def column(self, place: Place) -> list[float]:
        """Return one value of every image, such as those of Place.NUMBER."""
        values: list[float] = self.places[:, place].tolist()
        return values

    def pin_memory(self) -> EncodedCrops:
        """Return these crops in page-locked memory, as `DataLoader(pin_memory=True)` asks it."""
        return EncodedCrops(
            self.files.pin_memory(), self.places.pin_memory(), self.shape, self.interpolation
        )

    def __eq__(self, other: object) -> bool:
        """Return whether these are the same files, byte for byte, for the same crops."""
        if not isinstance(other, EncodedCrops):
            return NotImplemented
        same = (self.shape, self.interpolation) == (other.shape, other.interpolation)
        return same and self.files == other.files and torch.equal(self.places, other.places)

    def __reduce__(self) -> tuple[Any, ...]:
        # Places as bytes: between DataLoader's processes each tensor takes a descriptor.
        places = self.places.numpy().tobytes()
        return crops_from_parts, (self.files, places, self.shape, self.interpolation)

    def __repr__(self) -> str:
        height, width = self.shape
        finished = sum(reason != Reason.NONE for reason in self.column(Place.REASON))
        return (
            f"<{len(self)} encoded crops, {height} x {width}, {len(self.files.buffer):,} bytes, "
            f"{finished} finished by the CPU>"
        )


def crops_from_parts(
    files: EncodedImages, places: bytes, shape: tuple[int, int], interpolation: str
) -> EncodedCrops:
    """Make the crops of files, and of their places, which were pickled."""
    values = torch.frombuffer(bytearray(places), dtype=torch.float64) if places else torch.empty(0)
    return EncodedCrops(files, values.double().view(-1, len(Place)), shape, interpolation)
