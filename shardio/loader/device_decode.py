"""Decoders of JPEGs on a GPU, and PIL for what these cannot decode.

How it works. A decoder takes the files of a batch at once, and gives the pixels of each, on the
device; None of one that it cannot decode. Each is a library of others. The first that is installed,
and that decodes a small JPEG on this device, is taken:

    nvimgcodec    of NVIDIA: refuses one image by itself, and leaves the rest of the batch
    torchcodec    of PyTorch: one bad image fails the batch, so that this is halved to find it
    torchvision   the same, by older code, which its maker calls deprecated from 0.29 on

All three use nvJPEG, and so the JPEG engine of the GPU, if it has one. `pil` decodes on the CPU.

Source: python/decoder.cpp and extensions/nvjpeg of nvImageCodec 0.9; DecodeJpegCuda.cpp of
torchcodec 0.17; decode_jpegs_cuda.cpp of torchvision.
"""

from __future__ import annotations

import base64
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from ..dataset.encoded import EncodedImages
from ..errors import DependencyError, OptionError, printable
from ..images import decode

_cuda: Any = torch.cuda  # it has no types

# 64 x 64 pixels of grey, a baseline JPEG with 4:2:0. Libraries may import without what they need.
_SMALL_JPEG = zlib.decompress(
    base64.b64decode(
        "eNr7f+P/AwYBLzdPNwZGRgYGRiBk+H+bwZnhP6UAaAgjxYYcYBDkYHBgcGBmVGJgEmRkFmT8f4RBBORIVAASFcAq"
        "yohVVBBT9BYDDzMj0BJmQQZ7Blzg/00AIvGW9Q=="
    )
)


Numbers = NDArray[np.int64]


class DecodedImages(NamedTuple):
    """Hold decoded pictures: (height, width, 3) uint8 RGB each, dense, on the device.

    addresses  (n,) where each begins; of one that was refused, any number
    refused    (n,) which of them the decoder did not decode
    memory     what holds the pixels
    """

    addresses: Numbers
    refused: NDArray[np.bool_]
    memory: object


class Decoder(ABC):
    """Decode JPEGs on one device.

    Work on the current stream must be done when it is called: it may write to memory that was let
    go there, and the engine of a GPU does not wait for a stream (on an H100, as torchcodec has it).
    What it returns may be used on that stream, and nowhere else.
    """

    name: str

    @abstractmethod
    def __init__(self, device: torch.device) -> None:
        """Import what is needed. Raises ImportError, and whatever the library does."""

    @abstractmethod
    def decode(self, files: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the pixels of each file, or None, in order.

        files: (bytes,) uint8, on the CPU. They may be read until the current stream gets here.
        pixels: (3, height, width) uint8 RGB on the device, as stored: EXIF does not turn them.
        """

    def decode_at_once(
        self, files: EncodedImages, rows: Numbers, sizes: Numbers
    ) -> DecodedImages | None:
        """Decode the files of these rows as `decode` does, with few steps for each of them.

        A thread that makes many keeps the training loop waiting for Python's lock. sizes: (n, 2)
        height and width of each. None: this decoder cannot.
        """
        return None


class NvImgCodec(Decoder):
    """Decode by nvImageCodec."""

    name = "nvimgcodec"

    def __init__(self, device: torch.device) -> None:
        from nvidia import nvimgcodec

        self._library: Any = nvimgcodec
        kinds = nvimgcodec.BackendKind
        # Not CPU_ONLY: what no GPU takes is for PIL, which decodes it as decode="pil" does.
        backends = [
            nvimgcodec.Backend(kind)
            for kind in (kinds.HW_GPU_ONLY, kinds.GPU_ONLY, kinds.HYBRID_CPU_GPU)
        ]
        # Fancy upsampling of chroma is what libjpeg does, and so PIL.
        # On an H100, 1, 2, 4 and 16 threads decode 6,655, 8,278, 9,753 and 6,799 photographs/s.
        self._decoder = nvimgcodec.Decoder(
            device_id=device.index,
            max_num_cpu_threads=4,
            backends=backends,
            options=":fancy_upsampling=1",
        )
        self._as_stored = nvimgcodec.DecodeParams(
            apply_exif_orientation=False, color_spec=nvimgcodec.ColorSpec.SRGB
        )
        self._images: list[Any] = []

    def decode(self, files: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Decode files: see Decoder."""
        return [
            None if image is None else from_dlpack(image).permute(2, 0, 1)
            for image in self._decoded([file.numpy() for file in files])
        ]

    def decode_at_once(
        self, files: EncodedImages, rows: Numbers, sizes: Numbers
    ) -> DecodedImages | None:
        """Decode files: see Decoder."""
        data, offsets = files.buffer.numpy(), files.offsets.tolist()
        return decoded_images(
            self._decoded([data[offsets[row] : offsets[row + 1]] for row in rows.tolist()]), sizes
        )

    def _decoded(self, files: Sequence[NDArray[np.uint8]]) -> list[Any]:
        streams = list(map(self._parsed, files))
        stream = _cuda.current_stream().cuda_stream
        # Their memory is not torch's, which would know that the stream still reads it. So they are
        # kept until the next call, when all work on the stream is done.
        self._images = []
        if opened := [one for one in streams if one is not None]:
            self._images = self._decoder.decode(opened, params=self._as_stored, cuda_stream=stream)
        decoded = iter(self._images)
        return [None if one is None else next(decoded) for one in streams]

    def _parsed(self, file: NDArray[np.uint8]) -> Any:
        """Return a file as the library reads it; None where its header is none, which raises."""
        try:
            return self._library.CodeStream(file)
        except Exception:  # of this file alone: PIL then says what is wrong, and of which record
            return None


def decoded_images(images: Sequence[Any], sizes: Numbers) -> DecodedImages:
    """Return where images lie that have `__cuda_array_interface__`; None is one that was refused.

    One that is not (height, width, 3), of the sizes, and dense is refused, too.
    """
    addresses, refused = np.zeros(len(images), np.int64), np.ones(len(images), bool)
    for at, (image, (height, width)) in enumerate(zip(images, sizes.tolist(), strict=True)):
        # A tenth of the time of from_dlpack.
        held = None if image is None else image.__cuda_array_interface__
        dense = None, (3 * width, 3, 1)
        if held and held["shape"] == (height, width, 3) and held.get("strides") in dense:
            addresses[at], refused[at] = held["data"][0], False
    return DecodedImages(addresses, refused, images)


class TorchCodec(Decoder):
    """Decode by torchcodec."""

    name = "torchcodec"

    def __init__(self, device: torch.device) -> None:
        from torchcodec.decoders import decode_jpeg

        self._device = device
        self._decode: Any = decode_jpeg

    def decode(self, files: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Decode files: see Decoder."""
        files = [without_exif(file) for file in files]  # it would turn them
        return by_halves(lambda some: self._decode(some, device=self._device), files)


class TorchVision(Decoder):
    """Decode by torchvision."""

    name = "torchvision"

    def __init__(self, device: torch.device) -> None:
        from torchvision.io import ImageReadMode, decode_jpeg

        self._device = device
        self._rgb = ImageReadMode.RGB
        self._decode: Any = decode_jpeg

    def decode(self, files: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Decode files: see Decoder."""
        return by_halves(
            lambda some: self._decode(some, mode=self._rgb, device=self._device), list(files)
        )


def decode_by_pil(file: torch.Tensor, max_pixels: int | None = None) -> torch.Tensor:
    """Decode one file on the CPU, as decode="pil" does: see Decoder. Raises DecodeError."""
    pixels = decode.pixels(file.numpy().data, upright=False, max_pixels=max_pixels)
    return torch.from_numpy(pixels).permute(2, 0, 1)


PIL = "pil"
NAMES = ("auto", NvImgCodec.name, TorchCodec.name, TorchVision.name, PIL)  # best first


def check_name(name: Any, device: torch.device) -> str:
    """Return the option `decoder`. Raises OptionError."""
    if name not in NAMES:
        known = ", ".join(f'"{one}"' for one in NAMES)
        raise OptionError(f"decoder is {printable(repr(name))}: expected one of {known}")
    if device.type != "cuda" and name not in ("auto", PIL):
        raise OptionError(
            f'decoder is "{name}", which decodes on an NVIDIA GPU, but device is "{device}": give '
            'device="cuda", or leave decoder out'
        )
    return str(name)


def find_decoder(name: str, device: torch.device) -> Decoder | None:
    """Return the decoder of this name, or for "auto" the first that works on this device.

    None: PIL is to decode. device: with its index. Raises DependencyError, which says what to
    install.
    """
    if name == PIL or device.type != "cuda":
        return None
    small = torch.frombuffer(bytearray(_SMALL_JPEG), dtype=torch.uint8)
    failed = []
    for kind in (NvImgCodec, TorchCodec, TorchVision):
        if name not in ("auto", kind.name):
            continue
        try:
            decoder = kind(device)
            if decoder.decode([small])[0] is not None:
                return decoder
            failed.append(f"{kind.name}: it does not decode a small JPEG; is nvJPEG installed?")
        except Exception as error:  # of a library that is there but cannot run, any
            failed.append(f"{kind.name}: {printable(str(error).partition(chr(10))[0])}")
    cuda = (torch.version.cuda or "13").partition(".")[0]
    raise DependencyError(
        f'decode="cuda" found no decoder of JPEGs for {device} ({"; ".join(failed)}). Install one: '
        f'pip install "nvidia-nvimgcodec-cu{cuda}[nvjpeg]", or give decoder="pil", which decodes '
        "on the CPU"
    )


def by_halves(
    decode_all: Callable[[list[torch.Tensor]], list[torch.Tensor]], files: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Decode by a function that fails for all where it cannot decode one. None: that one."""
    try:
        return list(decode_all(files))
    except _cuda.OutOfMemoryError:
        raise
    except RuntimeError:
        if len(files) == 1:
            return [None]
    middle = len(files) // 2
    return by_halves(decode_all, files[:middle]) + by_halves(decode_all, files[middle:])


def without_exif(file: torch.Tensor) -> torch.Tensor:
    """Return a JPEG without EXIF: itself, or a copy with its APP1 segments renamed to APP15."""
    data = memoryview(file.numpy().data)
    found, at = [], 2
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != 0xDA:
        if data[at + 1] == 0xE1:
            found.append(at + 1)
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    if found:
        file = file.clone()
        file[found] = 0xEF
    return file
