"""Images of a batch, cast and normalised where they lie: on the CPU, or on a device.

A uint8 tensor (B, C, H, W) is one of images:

    out = x * scale + bias     in float32, then cast;   scale = 1 / (255 std), bias = -mean / std

The same formula makes the same numbers on all devices. On CUDA one kernel of torch makes them,
where it rounds as the formula does, which is tried out, or two; or one of Triton
(`device_kernels`), which also changes the strides.
"""

from __future__ import annotations

import copy
import functools
import math
import numbers
import os
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch

from ..dataset.encoded_crops import EncodedCrops
from ..errors import DependencyError, OptionError, printable

_cuda: Any = torch.cuda  # it has no types

KERNELS = ("auto", "torch", "triton")
_RUN_BY_A_GPU = (None, torch.uint8, torch.float32, torch.bfloat16, torch.float16)  # as dtype


def normalize(
    images: torch.Tensor,
    mean: float | Sequence[float],
    std: float | Sequence[float],
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Normalise uint8 images on their own device, a CPU or a GPU: (pixels / 255 - mean) / std.

    images      (B, C, H, W) or (C, H, W) uint8: a batch of a DataLoader. They do not change
    mean, std   for each channel, or one number for all, for pixels from 0 to 1
    dtype       of the result; default float32

    The numbers, and the strides, are those that ShardLoader(device=, mean=, std=) gives. Raises
    OptionError.
    """
    if not isinstance(images, torch.Tensor) or images.dtype != torch.uint8:
        found = f"a {type(images).__name__}"
        if isinstance(images, torch.Tensor):
            found = str(images.dtype).removeprefix("torch.")
        raise OptionError(
            f"normalize: images are {found}, expected a uint8 tensor, "
            "(B, 3, H, W) or (3, H, W), of pixels from 0 to 255"
        )
    how = _images(_hashable(mean), _hashable(std), dtype)
    channels = how.channels
    if images.dim() not in (3, 4) or channels not in (None, images.shape[-3]):
        count = channels or "C"
        raise OptionError(
            f"normalize: images are {tuple(images.shape)}, expected (B, {count}, H, W) or "
            f"({count}, H, W): channels stand before height and width, and mean and std "
            "have one value for each channel, or one for all"
        )
    return how.normalized(images) if images.dim() == 4 else how.normalized(images[None])[0]


def _hashable(given: Any) -> Any:
    """Return mean or std in a form that can be looked up."""
    if isinstance(given, torch.Tensor | np.ndarray):
        given = given.tolist()
    return tuple(given) if isinstance(given, list) else given


class Images:
    """Change the images of a batch, wherever it lies: strides, normalisation, dtype."""

    def __init__(
        self,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        dtype: torch.dtype | None = None,
        channels_last: bool | None = None,
        fused: bool = False,
    ) -> None:
        """Take the options as `prefetch` describes them, and whether Triton's kernels are taken.

        Raises OptionError.
        """
        means, stds = _numbers("mean", mean), _numbers("std", std)
        if _several(mean) and _several(std) and len(means) != len(stds):
            raise OptionError(
                f"mean has {len(means)} values and std {len(stds)}: expected one for each channel, "
                "of both"
            )
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise OptionError(
                f"dtype is {printable(repr(dtype))}: expected a torch.dtype, like torch.bfloat16"
            )
        self.normalises = bool(means or stds)
        if self.normalises and dtype is not None and not dtype.is_floating_point:
            raise OptionError(
                f"dtype is {dtype}, but mean and std make floats: expected a floating-point dtype, "
                "like torch.bfloat16, or neither mean nor std"
            )
        if 0 in stds:
            raise OptionError("std is 0 for a channel: nothing can be divided by it")
        self.dtype = torch.float32 if self.normalises and dtype is None else dtype
        formats = {None: None, True: torch.channels_last, False: torch.contiguous_format}
        self._format = formats[channels_last]
        # The number of channels that mean and std are for; None: of any, since they are numbers.
        several = _several(mean) or _several(std)
        self.channels = max(len(means), len(stds)) if several else None
        # In float64, and rounded once: both are what float32 can hold of them.
        m, s = (
            torch.tensor(values, dtype=torch.float64, device="cpu")
            for values in (means or [0.0], stds or [1.0])
        )
        self._scale, self._bias = (1 / (255 * s)).float(), (-m / s).float()
        self.fused = fused
        self._on: dict[tuple[torch.device, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._in_one: dict[tuple[torch.device, int, bool], bool] = {}

    def finish(self, batch: Any) -> Any:
        """Return the batch with its images changed, each on the device that it lies on."""
        if self.dtype is None and self._format is None:
            return batch
        parts = leaves(batch)
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        changed = iter(self.finish_all(tensors))
        return walk(batch, lambda _: next(changed))

    def finish_all(
        self, tensors: list[torch.Tensor], finished: Sequence[torch.Tensor] = ()
    ) -> list[torch.Tensor]:
        """Return the tensors of a batch as `finish` changes them.

        finished: images among them that are as the options say.
        """
        if self.dtype is None and self._format is None:
            return tensors
        found, others = 0, []
        # Of a number for all channels, nothing is known of how many there are: images have three.
        channels = self.channels or 3

        def one(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal found
            if finished and any([tensor is one for one in finished]):
                found += 1
                return tensor
            if tensor.dtype == torch.uint8 and tensor.dim() == 4 and tensor.shape[1] == channels:
                found += 1
                return self.normalized(tensor)
            if tensor.dim() >= 3:
                others.append(tensor)
            return tensor

        changed = [one(tensor) for tensor in tensors]
        if not found:
            raise self._no_images(others)
        return changed

    def normalized(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return images, (B, C, H, W) uint8, as the options say. C: as `channels` says."""
        if self.fused and self.normalises and _dense(pixels):
            from . import device_kernels

            out = self.empty(pixels)
            device_kernels.normalize(pixels, *self.factors(pixels), out)
            return out
        if self._format is not None:
            pixels = pixels.contiguous(memory_format=self._format)
        if not self.normalises:
            return pixels if self.dtype is None else pixels.to(self.dtype)
        scale, bias = (factor.view(1, -1, 1, 1) for factor in self.factors(pixels))
        if pixels.is_cuda:
            return self._on_cuda(pixels, scale, bias, self.dtype or torch.float32)
        # Casting first is one kernel more, and on a CPU half the time of a product of two dtypes.
        floats = pixels.to(torch.float32).mul_(scale).add_(bias)
        return floats if self.dtype is None else floats.to(self.dtype)

    def empty(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return a tensor for the images that these pixels become."""
        how = torch.preserve_format if self._format is None else self._format
        return torch.empty_like(pixels, dtype=self.dtype, memory_format=how)

    def factors(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scale and bias of each channel, float32, where the pixels are."""
        key = pixels.device, pixels.shape[1]
        if key not in self._on:
            self._on[key] = (
                self._scale.expand(key[1]).contiguous().to(key[0]),
                self._bias.expand(key[1]).contiguous().to(key[0]),
            )
        return self._on[key]

    def _on_cuda(
        self, pixels: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return pixels * scale + bias by one kernel, where that makes the numbers of two."""
        key = pixels.device, pixels.shape[1], pixels.is_contiguous()
        if key not in self._in_one and not _cuda.is_current_stream_capturing():
            self._in_one[key] = rounds_twice(pixels, scale, bias, dtype)
        kernels = in_one_kernel if self._in_one.get(key) else in_two_kernels
        return kernels(pixels, scale, bias, dtype)

    def _no_images(self, others: Sequence[torch.Tensor]) -> OptionError:
        seen = ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in others)
        colours = [t.shape[1] for t in others if t.dtype == torch.uint8 and t.dim() == 4]
        if self.normalises and colours and colours[0] in (1, 3, 4):
            return OptionError(
                f"mean and std are for {self.channels or 3} channels, but the images of this batch "
                f"have {colours[0]}: {seen}; give one value for each channel"
            )
        return OptionError(
            "mean, std, dtype and channels_last are for images, but this batch has none: expected "
            f"uint8 (B, {self.channels or 3}, H, W), found {seen or 'no tensor of pixels'}; leave "
            "them out, or let the loader yield such images (ShardDataset: "
            "transform=RandomResizedCrop(224), or another that makes uint8 of one size)"
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_on": {}, "_in_one": {}}


def in_two_kernels(
    pixels: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return pixels * scale + bias, rounded as by four kernels, with one temporary in float32.

    The kernel of the product casts what it reads, that of the sum what it writes.
    """
    product = torch.mul(pixels, scale)
    if dtype not in (torch.float16, torch.bfloat16):
        return product.add_(bias).to(dtype)
    return torch.add(product, bias, out=torch.empty_like(product, dtype=dtype))


def in_one_kernel(
    pixels: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return pixels * scale + bias by addcmul.

    Since some version of torch its kernel rounds the product of its tensors, and then fuses the
    product with `value` and the sum (ATen/native/cuda/DeviceAddCmulCdiv.cuh). Half of the doubled
    product is exact, so that what is rounded is what two kernels round. With value 1 it fuses
    the product of the tensors itself, and older ones always do: `rounds_twice` tells.
    """
    out = torch.empty_like(pixels, dtype=dtype)
    return torch.addcmul(bias, pixels, 2 * scale, value=0.5, out=out)


def rounds_twice(
    pixels: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype
) -> bool:
    """Return True if one kernel makes the numbers of two, of each value that a pixel can have.

    Waits for the device. pixels: those whose strides and device are tried.
    """
    every = torch.arange(256, dtype=torch.uint8, device=pixels.device).view(1, 1, 16, 16)
    every = every.expand(2, pixels.shape[1], 16, 16)
    last = not pixels.is_contiguous()
    every = every.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    try:
        in_one = in_one_kernel(every, scale, bias, dtype)
    except RuntimeError:  # an older torch, which wants tensors of one dtype
        return False
    return torch.equal(in_one, in_two_kernels(every, scale, bias, dtype))


def check_kernels(name: Any, device: torch.device) -> str:
    """Return the option `kernels`. Raises OptionError."""
    if name not in KERNELS:
        raise OptionError(
            f'kernels is {printable(repr(name))}: expected "auto", "torch" or "triton"'
        )
    if name == "triton" and device.type == "cuda" and _interpreted():
        raise OptionError(
            'kernels is "triton", and TRITON_INTERPRET=1, whose interpreter cannot read the memory '
            "of a GPU: unset one of them"
        )
    if name == "triton" and device.type != "cuda" and not _interpreted():
        raise OptionError(
            f'kernels is "triton", which runs on a GPU, but device is "{device}": give '
            'device="cuda", or leave kernels out'
        )
    return str(name)


def takes_triton(name: str, device: torch.device, dtype: torch.dtype | None = None) -> bool:
    """Return True if the kernels are to be those of Triton, which are tried out for "auto".

    dtype: of the images; for one that no GPU has run, "auto" takes torch's. Waits for the device.
    Raises DependencyError for "triton" where they do not run.
    """
    if name == "torch":
        return False
    if name == "auto" and (device.type != "cuda" or _interpreted() or dtype not in _RUN_BY_A_GPU):
        return False
    try:
        from .device_kernels import try_out

        try_out(device)
    except Exception as error:  # of Triton and of the C compiler that it calls, any
        if name == "auto":
            return False
        said = printable(str(error).strip().partition("\n")[0])
        raise DependencyError(
            f'kernels="triton" cannot run on {device}: {said}. It takes Triton 3.6 or newer, which '
            "comes with torch for CUDA on Linux (pip install triton), and to compile what starts a "
            "kernel a C compiler and Python's headers (Debian, Ubuntu: apt-get install gcc "
            "python3-dev), and a folder to write to (TRITON_CACHE_DIR). Or leave kernels out"
        ) from error
    return True


def _interpreted() -> bool:
    """Return True if Triton's interpreter runs its kernels, on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _dense(images: torch.Tensor) -> bool:
    return images.is_contiguous() or images.is_contiguous(memory_format=torch.channels_last)


_images = functools.lru_cache(maxsize=32)(Images)  # of the options that normalize was given


def walk(
    batch: Any,
    function: Callable[[torch.Tensor], torch.Tensor],
    of_crops: Callable[[EncodedCrops], Any] = lambda crops: crops,
) -> Any:
    """Return the batch with function(tensor) for each tensor in its tuples, lists and dicts.

    They may be nested to any depth. Of encoded crops, of_crops(crops) takes the place. Everything
    else is passed on as it is, objects of other classes that hold tensors among it.
    """
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, EncodedCrops):
        return of_crops(batch)
    if isinstance(batch, tuple):
        items = [walk(item, function, of_crops) for item in batch]
        if hasattr(batch, "_fields"):
            return type(batch)(*items)
        return tuple(items) if type(batch) is tuple else type(batch)(items)
    if isinstance(batch, list):
        return [walk(item, function, of_crops) for item in batch]
    if type(batch) is dict:
        return {name: walk(item, function, of_crops) for name, item in batch.items()}
    if isinstance(batch, MutableMapping):  # defaultdict, BatchEncoding: what else they hold stays
        twin = copy.copy(batch)
        for name, item in batch.items():
            twin[name] = walk(item, function, of_crops)
        return twin
    return batch


def leaves(batch: Any) -> list[torch.Tensor | EncodedCrops]:
    """Return the tensors and encoded crops of a batch, in the order of `walk`."""
    found: list[torch.Tensor | EncodedCrops] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    walk(batch, note, found.append)
    return found


def _several(given: Any) -> bool:
    return given is not None and not isinstance(given, numbers.Real)


def _numbers(name: str, given: float | Sequence[float] | None) -> list[float]:
    """Return the values of mean or std, from 0 to 1. Raises OptionError."""
    if given is None:
        return []
    try:
        values = [float(value) for value in (given if isinstance(given, Iterable) else [given])]
    except (TypeError, ValueError):
        values = []
    if not values or not all(map(math.isfinite, values)):
        raise OptionError(
            f"{name} is {printable(repr(given))}: expected a number for each channel, like "
            "(0.485, 0.456, 0.406), or one for all"
        )
    if max(values) > 1 or min(values) < 0:
        raise OptionError(
            f"{name} is {printable(repr(given))}: expected values from 0 to 1, for pixels from 0 "
            "to 1; divide values for pixels from 0 to 255 by 255"
        )
    return values
