"""Encoded crops to pixels on a device: decoded, cropped, resized, turned and mirrored there.

How it works. The JPEGs of a batch go to a decoder (`device_decode`), some hundred at a time, and
what it gives is resized into the rows of the batch (`device_resize`), and normalised with it where
the kernels are of Triton (`device_kernels`). What it refuses, PIL decodes here. Crops that a worker
has finished are copied. All are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..dataset.encoded_crops import EncodedCrops
from ..errors import DecodeError
from ..images.device_crop import Place, Reason
from .device_decode import PIL, Decoder, decode_by_pil
from .device_resize import resample
from .device_skips import Undecoded
from .normalize import Images
from .stats import DecodeCounts

_cuda: Any = torch.cuda  # it has no types

Rows = NDArray[np.int64]
Picture = torch.Tensor | None  # None: there is none

# Bytes of pictures that are decoded at a time: 1,900 photographs of 500 x 375, 29 of 12 megapixels,
# of which a batch of 256 would take 9 GB.
MOST_BYTES = 1 << 30


class Cropper:
    """Make pixels of encoded crops, on one device. One thread at a time may use it."""

    def __init__(
        self,
        device: torch.device,
        find: Callable[[torch.device], Decoder | None],
        counts: DecodeCounts,
        images: Images,
    ) -> None:
        """Take a device, how its decoder is found (None: PIL decodes), what counts, and the images.

        It is found when there is something to decode: it takes memory of the device.
        """
        self.device = device
        self.counts = counts
        self._images = images
        self._find: Callable[[torch.device], Decoder | None] | None = find
        self._decoder: Decoder | None = None

    def make(
        self,
        crops: EncodedCrops,
        undecoded: list[Undecoded] | None = None,
        *,
        most_bytes: int = MOST_BYTES,
    ) -> torch.Tensor:
        """Return the crops as (B, 3, H, W) uint8 with channels_last strides; where the kernels are
        of Triton, as the images are to be.

        undecoded: gets the rows that cannot be decoded, whose pixels are any; None: they raise.
        most_bytes: of decoded pictures that are held at a time, unless one is larger.

        On a GPU the work goes to the current stream, and the host waits for its decoder. The bytes
        of the crops are needed until the stream gets here. Raises DecodeError, which names the
        record, and DependencyError.
        """
        height, width = crops.shape
        shape = len(crops), height, width, 3
        out = torch.empty(shape, dtype=torch.uint8, device=self.device).permute(0, 3, 1, 2)
        if self.finishes:
            out = self._images.empty(out)
        places = crops.places.numpy()
        finished = np.flatnonzero(places[:, Place.REASON])
        if len(finished):
            files = list(crops.files)
            pixels = torch.stack([files[row] for row in finished]).view(-1, height, width, 3)
            pixels = pixels.to(self.device).permute(0, 3, 1, 2)
            if self.finishes:
                self._resample(_at(finished, pixels, len(crops)), crops, out)
            else:
                out[torch.from_numpy(finished).to(self.device)] = pixels
        self.counts.add_finished([Reason(int(one)) for one in places[finished, Place.REASON]])
        for rows in _groups(places, most_bytes):
            self._settle()
            left = self._decode_at_once(crops, rows, out)
            if len(left):
                decoded = self._decoded(crops, left, left is not rows, undecoded)
                pictures = _at(left, decoded, len(crops))
                self._resample(pictures, crops, out)
        return out

    @property
    def finishes(self) -> bool:
        """Return True if `make` normalises and casts too: kernels of Triton do."""
        return self._images.fused and self._images.channels in (None, 3)

    def _decode_at_once(self, crops: EncodedCrops, rows: Rows, out: torch.Tensor) -> Rows:
        """Make the crops of these rows with few steps for each, if the decoder and Triton can.

        Return the rows that are left.
        """
        decoder = self._found()
        if decoder is None or not self.finishes:
            return rows
        places = crops.places.numpy()
        sizes = places[rows][:, [Place.HEIGHT, Place.WIDTH]].astype(np.int64)
        drawn = decoder.decode_at_once(crops.files, rows, sizes)
        if drawn is None:
            return rows
        from . import device_kernels

        there = np.flatnonzero(~drawn.refused)
        steps = np.ones((len(there), 3), dtype=np.int64)  # of channel, row and column
        steps[:, 1], steps[:, 2] = 3 * sizes[there, 1], 3
        device_kernels.crop(
            *(drawn.addresses[there], steps, rows[there], places, crops.interpolation, out),
            *self._factors(out),
        )
        self.counts.by_decoder += len(there)
        return rows[drawn.refused]

    def _settle(self) -> None:
        """Wait until the stream is done, as decoders of a GPU want it."""
        if self._found() is not None and self.device.type == "cuda":
            settled = _cuda.Event(blocking=True)  # who waits for it sleeps
            settled.record()
            settled.synchronize()

    def _resample(
        self, pictures: Sequence[Picture], crops: EncodedCrops, out: torch.Tensor
    ) -> None:
        if self.finishes:
            from . import device_kernels

            factors = self._factors(out)
            device_kernels.resample(pictures, crops.places, crops.interpolation, out, *factors)
        else:
            resample(pictures, crops.places, crops.interpolation, out.permute(0, 2, 3, 1))

    def _factors(self, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._images.factors(out) if self._images.normalises else ()

    def _found(self) -> Decoder | None:
        if self._find is not None:
            self._decoder, self._find = self._find(self.device), None
            self.counts.decoder = PIL if self._decoder is None else self._decoder.name
        return self._decoder

    def _decoded(
        self, crops: EncodedCrops, rows: Rows, drawn: bool, undecoded: list[Undecoded] | None
    ) -> list[Picture]:
        """Return the pictures of these rows, (3, height, width) uint8 on the device.

        drawn: the decoder has refused them already. undecoded: gets those that are None.
        """
        decoder, files = self._found(), list(crops.files)
        decoded: list[Picture] = [None] * len(rows)
        if decoder is not None and not drawn:
            decoded = decoder.decode([files[row] for row in rows])
        places = crops.places.numpy()
        pictures: list[Picture] = []
        for row, picture in zip(rows, decoded, strict=True):
            place = places[row]
            size = 3, int(place[Place.HEIGHT]), int(place[Place.WIDTH])
            if picture is None or tuple(picture.shape) != size or picture.dtype != torch.uint8:
                number = int(place[Place.NUMBER])
                try:
                    picture = self._by_pil(files[row], size, number)
                except DecodeError as error:
                    if undecoded is None:
                        raise
                    picture = None
                    undecoded.append(Undecoded(int(row), number, error))
            else:
                self.counts.by_decoder += 1
            pictures.append(picture)
        return pictures

    def _by_pil(self, file: torch.Tensor, size: tuple[int, int, int], number: int) -> torch.Tensor:
        """Decode a file here. Raises DecodeError, which names the record."""
        _, height, width = size
        try:
            picture = decode_by_pil(file, height * width)
            if tuple(picture.shape) != size:
                raise DecodeError(
                    f"its header says {width} x {height} pixels, but PIL decodes "
                    f"{picture.shape[2]} x {picture.shape[1]}"
                )
        except DecodeError as error:
            raise DecodeError(f"record {number:,} of the dataset: {error}") from None
        self.counts.by_trainer += 1
        return picture.to(self.device)


def _at(rows: Rows, pictures: Iterable[Picture], count: int) -> list[Picture]:
    """Return the pictures at their rows, None elsewhere."""
    found: list[Picture] = [None] * count
    for row, picture in zip(rows, pictures, strict=True):
        found[row] = picture
    return found


def _groups(places: NDArray[np.float64], most_bytes: int) -> Iterator[Rows]:
    """Yield the rows whose JPEGs are decoded together."""
    rows = np.flatnonzero(places[:, Place.REASON] == 0)
    sizes = (places[rows, Place.WIDTH] * places[rows, Place.HEIGHT] * 3).tolist()
    begin, held = 0, 0.0
    for at, size in enumerate(sizes):
        if at > begin and held + size > most_bytes:
            yield rows[begin:at]
            begin, held = at, 0.0
        held += size
    if begin < len(rows):
        yield rows[begin:]
