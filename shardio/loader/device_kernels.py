"""Kernels of Triton: crop, resize, turn, mirror, normalise and cast in one, or the last two alone.

How it works. Each picture is read where its decoder put it: a table holds its address, its strides
and its place. A first kernel writes the weights of all rows and columns, a second one sums up the
pixels and writes the finished batch, in its dtype and strides.

    table --> weights, int32 --+
    pictures ------------------+--> columns, rounded to uint8 --> rows --> * scale + bias --> out

The arithmetic is that of `device_resize` and `normalize`, bit for bit. So products and sums must
not be fused: a fused one rounds once, not twice.

Triton comes with torch for CUDA on Linux. It compiles a kernel when it is first used, and needs a C
compiler for what starts it. With TRITON_INTERPRET=1 the kernels run on the CPU, for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import torch
import triton
import triton.language as tl

from .device_resize import Column, plan

# Without types: the functions below are not Python, they are read by Triton.
_kernel = cast(Callable[[Callable[..., Any]], Any], triton.jit)

_BITS = tl.constexpr(22)  # of a weight: Pillow's PRECISION_BITS
_HALF = tl.constexpr(1 << 21)
_PI = tl.constexpr(3.141592653589793)
# Pillow's two numbers of the Hamming window are floats of 32 bits.
_HAMMING_LOW = tl.constexpr(float(np.float32(0.54)))
_HAMMING_HIGH = tl.constexpr(float(np.float32(0.46)))

# What a row of the table has after Column, as int64: the picture's address, and where the weights
# of its columns and rows begin.
_ADDRESS, _WEIGHTS, _COUNT = Column.COUNT, Column.COUNT + 1, Column.COUNT + 3
_LOW, _LENGTH, _WHOLE, _BEGIN, _SIZE, _STEP, _BACK = map(tl.constexpr, range(7))  # of Column
_X, _Y = tl.constexpr(Column.X), tl.constexpr(Column.Y)
_ROW, _CHANNEL = tl.constexpr(Column.ROW), tl.constexpr(Column.CHANNEL)
_SWAP, _TAPS = tl.constexpr(Column.SWAP), tl.constexpr(Column.TAPS_X)
_AT_ADDRESS, _AT_WEIGHTS = tl.constexpr(_ADDRESS), tl.constexpr(_WEIGHTS)
_PITCH = tl.constexpr(_COUNT)  # from a row of the table to the next
_BLOCK = 256  # values that a program makes
_LAUNCHED = 65_535  # pictures of a launch: what CUDA takes in its second dimension
_REACH = {"box": 0.5, "bilinear": 1.0, "hamming": 1.0, "bicubic": 2.0, "lanczos": 3.0}

# A product and a sum are rounded each by itself, as the CPU does it.
EXACT = {"enable_fp_fusion": False}


# --- what the loader calls ------------------------------------------------------------------------


def try_out(device: torch.device) -> None:
    """Compile a kernel, and run it. Raises whatever Triton does."""
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
        raise RuntimeError(f"Triton {triton.__version__} is older than 3.6")
    # Triton launches on the current device, whatever its tensors lie on.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        one = torch.ones((1, 1, 1, 1), device=device)
        normalize(one.to(torch.uint8), one.view(1), one.view(1), out := torch.zeros_like(one))
        found = out.item()
    if found != 2:
        raise RuntimeError("it computes something else")


def resample(
    pictures: Sequence[torch.Tensor | None],
    places: torch.Tensor,
    interpolation: str,
    out: torch.Tensor,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """Write the crop of each picture to its row of `out`: pixels, or pixels * scale + bias.

    pictures, places, interpolation: see device_resize.resample.
    out, scale, bias: see `crop`.
    """
    rows = np.array([row for row, one in enumerate(pictures) if one is not None], dtype=np.int64)
    some = [one for one in pictures if one is not None]
    addresses = np.array([one.data_ptr() for one in some], dtype=np.int64)
    strides = np.array([one.stride() for one in some], dtype=np.int64).reshape(-1, 3)
    crop(addresses, strides, rows, places.numpy(), interpolation, out, scale, bias)


def crop(
    addresses: np.ndarray,
    strides: np.ndarray,
    rows: np.ndarray,
    places: np.ndarray,
    interpolation: str,
    out: torch.Tensor,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """Write the crops of pictures, which lie on the device, to their rows of `out`.

    addresses, strides: of each picture: of its memory, and in bytes of channel, row and column.
    rows: of `out`, and of `places`, for each picture.
    out: (B, 3, H, W) of any dtype and strides.
    scale, bias: three values of float32 each, on the device of `out`.
    """
    if len(rows) > _LAUNCHED:
        for at in range(0, len(rows), _LAUNCHED):
            part = slice(at, at + _LAUNCHED)
            some = addresses[part], strides[part], rows[part]
            crop(*some, places, interpolation, out, scale, bias)
        return
    if not len(rows):
        return
    height, width = out.shape[2:]
    planned = plan(places[rows], strides, (height, width), interpolation)
    planned[:, Column.ROW] = rows
    table = np.empty((len(rows), _COUNT))
    table[:, : Column.COUNT] = planned
    swap = planned[:, Column.SWAP] != 0
    sizes = np.stack(  # of the weights, columns and rows in turn
        [
            planned[:, Column.TAPS_X] * np.where(swap, height, width),
            planned[:, Column.TAPS_Y] * np.where(swap, width, height),
        ],
        axis=1,
    ).astype(np.int64)
    whole = table.view(np.int64)
    whole[:, _ADDRESS] = addresses
    whole[:, _WEIGHTS:] = (np.cumsum(sizes) - sizes.ravel()).reshape(-1, 2)
    there = _sent(table, out.device)
    numbers, most = there.view(torch.int64), max(height, width)
    weights = torch.empty(int(sizes.sum()), dtype=torch.int32, device=out.device)
    firsts = torch.empty((len(rows), 2, most), dtype=torch.int32, device=out.device)
    weigh_pixels[(_programs(most), len(rows), 2)](
        there,
        numbers,
        weights,
        firsts,
        height,
        width,
        interpolation,
        _REACH[interpolation],
        _BLOCK,
        **EXACT,
    )
    crop_blocks[(_programs(height * width), len(rows))](
        there,
        numbers,
        weights,
        firsts,
        out,
        out if scale is None else scale,
        out if bias is None else bias,
        height,
        width,
        *out.stride(),
        scale is not None,
        _BLOCK,
        **EXACT,
    )


def _sent(table: np.ndarray, device: torch.device) -> torch.Tensor:
    there = torch.from_numpy(table)
    return there.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else there


def normalize(
    pixels: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, out: torch.Tensor
) -> None:
    """Write pixels * scale + bias, rounded after each, and cast to the dtype of `out`.

    pixels: (B, C, H, W) uint8, contiguous or channels_last.
    scale, bias: C values of float32 each.
    out: like pixels, of any floating-point dtype; in either of both memory formats.
    """
    _, channels, height, width = out.shape
    if not out.numel():
        return
    normalize_blocks[(_programs(out.numel(), 4 * _BLOCK),)](
        pixels,
        scale,
        bias,
        out,
        out.numel(),
        channels,
        height * width,
        _is_last(pixels),
        _is_last(out),
        out.numel() >= 2**31,
        4 * _BLOCK,
        **EXACT,
    )


def _programs(values: int, block: int = _BLOCK) -> int:
    return -(-values // block)


def _is_last(images: torch.Tensor) -> bool:
    return not images.is_contiguous()


# --- the kernels ----------------------------------------------------------------------------------


@_kernel
def _sinc(x):  # type: ignore[no-untyped-def]
    inner = tl.where(x == 0.0, 1.0, x * _PI)
    return tl.where(x == 0.0, 1.0, tl.sin(inner) / inner)


@_kernel
def _filter(x, FILTER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the weight at a distance from the centre, of float64, by Pillow's formula."""
    size = tl.abs(x)
    if FILTER == "box":
        return tl.where((x > -0.5) & (x <= 0.5), 1.0, 0.0).to(tl.float64)
    elif FILTER == "bilinear":
        return tl.maximum(1.0 - size, 0.0)
    elif FILTER == "hamming":
        inner = tl.where(size == 0.0, 1.0, size * _PI)
        curve = tl.sin(inner) / inner * (tl.cos(inner) * _HAMMING_HIGH + _HAMMING_LOW)
        return tl.where(size == 0.0, 1.0, tl.where(size >= 1.0, 0.0, curve))
    elif FILTER == "bicubic":
        near = (size * 1.5 - 2.5) * size * size + 1.0
        far = (((size - 5.0) * size + 8.0) * size - 4.0) * -0.5
        return tl.where(size < 1.0, near, tl.where(size < 2.0, far, 0.0))
    else:  # lanczos
        return tl.where((x >= -3.0) & (x < 3.0), _sinc(x) * _sinc(x / 3.0), 0.0)


@_kernel
def weigh_pixels(  # type: ignore[no-untyped-def]
    table,
    numbers,
    weights,
    firsts,
    height,
    width,
    FILTER: tl.constexpr,
    REACH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the weights along one axis of a picture: Pillow's precompute_coeffs.

    Programs: blocks of results, pictures, axes. Weights lie tap by tap.
    """
    picture, axis = tl.program_id(1), tl.program_id(2)
    row = table + picture * _PITCH
    along = row + axis * _Y
    low, length = tl.load(along + _LOW), tl.load(along + _LENGTH)
    end_of_all, back = tl.load(along + _WHOLE), tl.load(along + _BACK)
    taps = tl.load(row + _TAPS + axis).to(tl.int32)
    turned = (tl.load(row + _SWAP) != 0.0) == (axis == 0)  # does this axis have `height` results?
    count = tl.where(turned, height, width)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    place = tl.where(back != 0.0, count - 1 - at, at).to(tl.float64)
    scale = length / count.to(tl.float64)
    wider = tl.maximum(scale, 1.0)
    narrower = 1.0 / wider
    reach = wider * REACH
    centre = (place + 0.5) * scale + low
    first = tl.maximum((centre - reach + 0.5).to(tl.int64), 0).to(tl.float64)
    end = tl.minimum((centre + reach + 0.5).to(tl.int64).to(tl.float64), end_of_all)
    total = centre * 0.0
    for tap in range(taps):
        weight = _filter((first + tap - centre + 0.5) * narrower, FILTER)
        total += tl.where(first + tap < end, weight, 0.0)
    total = tl.where(total != 0.0, total, 1.0)
    to = weights + tl.load(numbers + picture * _PITCH + _AT_WEIGHTS + axis) + at
    for tap in range(taps):
        weight = _filter((first + tap - centre + 0.5) * narrower, FILTER)
        weight = tl.where(first + tap < end, weight, 0.0)
        weight = weight / total * 4194304.0
        weight += tl.where(weight < 0.0, -0.5, 0.5)
        tl.store(to + tap * count, weight.to(tl.int32), mask=inside)
    most = tl.maximum(height, width)
    tl.store(firsts + (picture * 2 + axis) * most + at, first.to(tl.int32), mask=inside)


@_kernel
def _rounded(sums):  # type: ignore[no-untyped-def]
    return tl.minimum(tl.maximum(sums >> _BITS, 0), 255)


@_kernel
def crop_blocks(  # type: ignore[no-untyped-def]
    table,
    numbers,
    weights,
    firsts,
    out,
    scale,
    bias,
    height,
    width,
    image_step,
    channel_step,
    row_step,
    column_step,
    NORMALIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a block of the results of one picture. Programs: blocks, pictures."""
    picture = tl.program_id(1)
    row = table + picture * _PITCH
    swap = tl.load(row + _SWAP) != 0.0
    wide, high = tl.where(swap, height, width), tl.where(swap, width, height)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < height * width
    x, y = at % wide, at // wide
    x_begin, x_last = tl.load(row + _BEGIN).to(tl.int32), tl.load(row + _SIZE).to(tl.int32) - 1
    x_step, x_taps = tl.load(row + _STEP).to(tl.int64), tl.load(row + _TAPS).to(tl.int32)
    down = row + _Y
    y_begin, y_last = tl.load(down + _BEGIN).to(tl.int32), tl.load(down + _SIZE).to(tl.int32) - 1
    y_step, y_taps = tl.load(down + _STEP).to(tl.int64), tl.load(row + _TAPS + 1).to(tl.int32)
    colour = tl.load(row + _CHANNEL).to(tl.int64)
    whole = numbers + picture * _PITCH
    pixels = tl.load(whole + _AT_ADDRESS).to(tl.pointer_type(tl.uint8))
    x_weights = weights + tl.load(whole + _AT_WEIGHTS) + x
    y_weights = weights + tl.load(whole + _AT_WEIGHTS + 1) + y
    first = firsts + picture * 2 * tl.maximum(height, width)
    x_first = tl.load(first + x, mask=inside, other=0) - x_begin
    y_first = tl.load(first + tl.maximum(height, width) + y, mask=inside, other=0) - y_begin
    red = tl.full([BLOCK], _HALF, tl.int32)
    green, blue = red, red
    for line in range(y_taps):
        # A cut holds all that its crop reads. But an index beyond would end all work on the device.
        begin = tl.minimum(tl.maximum(y_first + line, 0), y_last) * y_step
        one = tl.full([BLOCK], _HALF, tl.int32)
        two, three = one, one
        for tap in range(x_taps):
            step = tl.minimum(tl.maximum(x_first + tap, 0), x_last) * x_step
            weight = tl.load(x_weights + tap * wide, mask=inside, other=0)
            pixel = pixels + begin + step
            one += tl.load(pixel, mask=inside, other=0).to(tl.int32) * weight
            two += tl.load(pixel + colour, mask=inside, other=0).to(tl.int32) * weight
            three += tl.load(pixel + 2 * colour, mask=inside, other=0).to(tl.int32) * weight
        weight = tl.load(y_weights + line * high, mask=inside, other=0)
        red += _rounded(one) * weight
        green += _rounded(two) * weight
        blue += _rounded(three) * weight
    image = tl.load(row + _ROW).to(tl.int64) * image_step
    to = out + image + tl.where(swap, x, y) * row_step + tl.where(swap, y, x) * column_step
    _write(to, _rounded(red), scale, bias, inside, NORMALIZE)
    _write(to + channel_step, _rounded(green), scale + 1, bias + 1, inside, NORMALIZE)
    _write(to + 2 * channel_step, _rounded(blue), scale + 2, bias + 2, inside, NORMALIZE)


@_kernel
def _write(to, pixels, scale, bias, inside, NORMALIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    if NORMALIZE:
        values = pixels.to(tl.float32) * tl.load(scale) + tl.load(bias)
        tl.store(to, _cast(values, to.dtype.element_ty), mask=inside)
    else:
        tl.store(to, pixels.to(to.dtype.element_ty), mask=inside)


@_kernel
def _cast(values, TO: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cast float32, rounded to the nearest, ties to even.

    To bfloat16 by hand: Triton's interpreter cuts off.
    """
    if tl.bfloat16 == TO:
        bits = values.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        values = bits.to(tl.float32, bitcast=True)
    return values.to(TO)


@_kernel
def normalize_blocks(  # type: ignore[no-untyped-def]
    pixels,
    scale,
    bias,
    out,
    count,
    channels,
    area,
    LAST_IN: tl.constexpr,
    LAST_OUT: tl.constexpr,
    LARGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a block of values, in the order of the memory of `out`."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if LARGE:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    if LAST_OUT:
        channel = at % channels
        place = at // channels % area
    else:
        channel = at // area % channels
        place = at % area
    if LAST_IN == LAST_OUT:
        source = at
    else:
        image = at // (channels * area) * (channels * area)
        source = image + channel * area + place
        if LAST_IN:
            source = image + place * channels + channel
    values = tl.load(pixels + source, mask=inside, other=0).to(tl.float32)
    values = values * tl.load(scale + channel, mask=inside, other=0.0)
    values = values + tl.load(bias + channel, mask=inside, other=0.0)
    tl.store(out + at, _cast(values, out.dtype.element_ty), mask=inside)
