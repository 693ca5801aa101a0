"""Decode by nvJPEG, called by ctypes: the one way to ask the hardware engine and nothing else.

Source: nvjpeg.h of CUDA 13.3 (the wheel nvidia-nvjpeg), whose names and numbers are used here, and
NVIDIA's sample nvJPEG-Decoder-Backend-Batched.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

import torch

HARDWARE, GPU_HYBRID = 3, 2  # nvjpegBackend_t
OUTPUT_RGB = 3  # nvjpegOutputFormat_t: three planes
STATUS = (
    *("SUCCESS", "NOT_INITIALIZED", "INVALID_PARAMETER", "BAD_JPEG", "JPEG_NOT_SUPPORTED"),
    *("ALLOCATOR_FAILURE", "EXECUTION_FAILED", "ARCH_MISMATCH", "INTERNAL_ERROR"),
    *("IMPLEMENTATION_NOT_SUPPORTED", "INCOMPLETE_BITSTREAM"),
)
PLACES = (
    *("nvidia/cu13/lib/libnvjpeg.so*", "nvidia/nvjpeg/lib/libnvjpeg.so*"),
    *("torchvision.libs/libnvjpeg*", "torchcodec.libs/libnvjpeg*"),
)
CUDA = ("/usr/local/cuda*/lib64/libnvjpeg.so*", "/usr/local/cuda*/targets/*/lib/libnvjpeg.so*")


class NvJpegError(Exception):
    """A function of nvJPEG that did not succeed."""


class Image(Structure):
    """nvjpegImage_t: where each plane goes, and the bytes from one of its rows to the next."""

    _fields_ = (("channel", c_void_p * 4), ("pitch", c_size_t * 4))


SIGNATURES: dict[str, tuple[Any, ...]] = {
    "nvjpegGetProperty": (c_int, POINTER(c_int)),
    "nvjpegCreateEx": (c_int, c_void_p, c_void_p, c_uint, POINTER(c_void_p)),
    "nvjpegGetHardwareDecoderInfo": (c_void_p, POINTER(c_uint), POINTER(c_uint)),
    "nvjpegJpegStateCreate": (c_void_p, POINTER(c_void_p)),
    "nvjpegJpegStreamCreate": (c_void_p, POINTER(c_void_p)),
    "nvjpegJpegStreamParse": (c_void_p, c_char_p, c_size_t, c_int, c_int, c_void_p),
    "nvjpegJpegStreamGetFrameDimensions": (c_void_p, POINTER(c_uint), POINTER(c_uint)),
    "nvjpegDecodeBatchedSupported": (c_void_p, c_void_p, POINTER(c_int)),
    "nvjpegDecodeBatchedInitialize": (c_void_p, c_void_p, c_int, c_int, c_int),
    "nvjpegDecodeBatched": (
        c_void_p, c_void_p, POINTER(c_char_p), POINTER(c_size_t), POINTER(Image), c_void_p,
    ),
}  # fmt: skip


def libraries() -> list[Path]:
    """Return every libnvjpeg of this Python and of the system, without links to others."""
    found = [
        path for folder in sys.path for place in PLACES for path in sorted(Path(folder).glob(place))
    ]
    found += [path for place in CUDA for path in sorted(Path("/").glob(place[1:]))]
    return list(dict.fromkeys(path.resolve() for path in found if path.is_file()))


class NvJpeg:
    """A library, and a decoder of one backend of it."""

    def __init__(self, path: Path, backend: int, device: str) -> None:
        """Load the library, and make the decoder. Raises NvJpegError, and OSError."""
        self._library, self._device = ctypes.CDLL(str(path)), torch.device(device)
        for name, arguments in SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, c_int
        self._handle, self._state, self._stream = c_void_p(), c_void_p(), c_void_p()
        self._call("nvjpegCreateEx", backend, None, None, 0, byref(self._handle))
        self._call("nvjpegJpegStateCreate", self._handle, byref(self._state))
        self._call("nvjpegJpegStreamCreate", self._handle, byref(self._stream))

    def about(self) -> str:
        """Return the version, and the number of hardware engines."""
        numbers = []
        for kind in range(3):  # libraryPropertyType: major, minor, patch
            number = c_int()
            self._call("nvjpegGetProperty", kind, byref(number))
            numbers.append(str(number.value))
        engines, cores = c_uint(), c_uint()
        self._call("nvjpegGetHardwareDecoderInfo", self._handle, byref(engines), byref(cores))
        return (
            f"nvJPEG {'.'.join(numbers)}, hardware engines: {engines.value}, "
            f"cores of each: {cores.value}"
        )

    def parse(self, data: bytes) -> tuple[int, int]:
        """Read a JPEG up to its pixels. Returns width and height."""
        width, height = c_uint(), c_uint()
        self._call("nvjpegJpegStreamParse", self._handle, data, len(data), 0, 0, self._stream)
        self._call("nvjpegJpegStreamGetFrameDimensions", self._stream, byref(width), byref(height))
        return width.value, height.value

    def supports(self, data: bytes) -> bool:
        """Ask whether the decoder takes a JPEG."""
        self.parse(data)
        unfit = c_int(-1)
        self._call("nvjpegDecodeBatchedSupported", self._handle, self._stream, byref(unfit))
        return unfit.value == 0  # 0 is yes

    def decode(self, files: Sequence[bytes]) -> list[torch.Tensor]:
        """Decode a batch: (3, H, W) uint8 each, on the device. Waits for it."""
        sizes = [self.parse(data) for data in files]
        count = len(files)
        planes = [
            torch.zeros((3, height, width), dtype=torch.uint8, device=self._device)
            for width, height in sizes
        ]
        images = (Image * count)()
        for image, made in zip(images, planes, strict=True):
            for i in range(3):
                image.channel[i] = made[i].data_ptr()
                image.pitch[i] = made.stride(1)
        data = (c_char_p * count)(*files)
        lengths = (c_size_t * count)(*map(len, files))
        cuda = self._device.type == "cuda"
        stream = torch.cuda.current_stream().cuda_stream if cuda else None
        handle, state = self._handle, self._state
        self._call("nvjpegDecodeBatchedInitialize", handle, state, count, 1, OUTPUT_RGB)
        self._call("nvjpegDecodeBatched", handle, state, data, lengths, images, stream)
        if cuda:
            torch.cuda.current_stream().synchronize()  # the files may go now
        return planes

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            said = STATUS[status] if 0 < status < len(STATUS) else "unknown"
            raise NvJpegError(f"{name}: {said} ({status})")
