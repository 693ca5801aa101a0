"""Crop, resize, turn and mirror the pictures of a batch where they lie: Pillow's resize, on a GPU.

How it works. The pictures of a batch differ in size, and the number of kernels is not to grow with
the number of pictures. So they are joined to one row of bytes, and each pixel of the result is
summed up of those, tap by tap of the filter: all first taps of all pictures, then all second ones.
First the columns, then the rows, as Pillow has it.

    pictures --join--> bytes --columns--> (n, rows, 3, W) uint8 --rows--> (n, H, 3, W) --> out

The arithmetic is Pillow's: weights in float64, rounded to 22 bits; sums of integers; uint8 between
columns and rows. A result that is turned or mirrored is summed up in another order, which costs
nothing; where rows become columns, only writing it is another.

Nothing here waits for the device. All sizes follow from `places`, which the host knows, and which
the device is told in one copy.

Source: Pillow, src/libImaging/Resample.c, before 13.0. From then on Pillow takes rows first where
that is less work, and may be one level away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..images.decode import TURNS, UPRIGHT
from ..images.device_crop import Place

_BITS = 22  # of a weight: Pillow's PRECISION_BITS
_HALF = 1 << (_BITS - 1)

# Bytes of memory that resampling takes at a time, besides its result, but for a larger picture.
# 256 photographs of ImageNet take three times that.
MOST_BYTES = 512 << 20


def resample(
    pictures: Sequence[torch.Tensor | None],
    places: torch.Tensor,
    interpolation: str,
    out: torch.Tensor,
    *,
    most_bytes: int = MOST_BYTES,
) -> None:
    """Write the crop of each picture to its row of `out`.

    pictures: (3, height, width) uint8, of any strides, on the device of `out`; None: `out` keeps
        what it has there.
    places: one row for each picture, on the CPU: see Place.
    interpolation: bilinear, bicubic, lanczos, box or hamming.
    out: (B, H, W, 3) uint8.
    most_bytes: of memory that is used at a time.
    """
    height, width = out.shape[1:3]
    rows = [row for row, picture in enumerate(pictures) if picture is not None]
    if not rows:
        return
    flat = [_flat(pictures[row]) for row in rows]
    plan = _plan(places.numpy()[rows], flat, (height, width), interpolation)
    plan[:, _Column.ROW] = rows
    chunks = list(_chunks(plan, (height, width), interpolation, most_bytes))
    order = np.concatenate([chunk for chunk, _ in chunks])
    for chunk, _ in chunks:  # each begins its own row of bytes
        sizes = plan[chunk, _Column.BYTES]
        plan[chunk, _Column.OFFSET] = np.cumsum(sizes) - sizes
    table = torch.from_numpy(plan[order])
    if out.is_cuda:
        table = table.pin_memory()
    table = table.to(out.device, non_blocking=True)
    at = 0
    for chunk, sizes in chunks:
        pixels = torch.cat(
            [*(flat[i].pixels for i in chunk), flat[0].pixels.new_zeros(sizes.slack)]
        )
        _resample(pixels, table[at : at + len(chunk)], sizes, interpolation, out)
        at += len(chunk)


# --- the plan, on the host ------------------------------------------------------------------------


class _Flat(NamedTuple):
    """Hold a picture as the bytes of its memory, and the steps to its next row, column, channel."""

    pixels: torch.Tensor
    strides: tuple[int, int, int]  # of channel, row, column


def _flat(picture: torch.Tensor | None) -> _Flat:
    """Return a picture as bytes: as it lies, where it has no gaps."""
    assert picture is not None
    lies = sorted(zip(picture.stride(), picture.shape, strict=True))
    dense = all(
        step == math.prod(size for _, size in lies[:at]) for at, (step, _) in enumerate(lies)
    )
    if not dense:
        picture = picture.contiguous()
    channel, row, column = picture.stride()
    return _Flat(picture.as_strided((picture.numel(),), (1,)), (channel, row, column))


class _Column:
    """Number the values that the device is told of each picture, for both axes alike.

    An axis has eight: where the box begins, how long it is; the size of the whole, where the
    file begins in it, the size of the file; the step to the next pixel; whether to go backwards;
    and the first pixel of the whole that is read.
    """

    LOW, LENGTH, WHOLE, BEGIN, SIZE, STEP, BACK, FIRST = range(8)
    X, Y = 0, 8  # where the columns of an axis begin
    ROW, OFFSET, BYTES, CHANNEL, SWAP, TAPS_X, TAPS_Y, ROWS = range(16, 24)
    COUNT = 24


def _plan(
    places: np.ndarray, flat: Sequence[_Flat], shape: tuple[int, int], interpolation: str
) -> np.ndarray:
    """Return the values of _Column for each picture."""
    plan = np.zeros((len(places), _Column.COUNT))
    turns = [TURNS.get(int(orientation), UPRIGHT) for orientation in places[:, Place.ORIENTATION]]
    flip = places[:, Place.FLIP] != 0
    swap = np.array([turn.swap for turn in turns])
    # A turned result is summed up as it is stored. Mirroring the upright one mirrors its columns,
    # which are rows as stored where the picture lies on its side.
    back_x = np.array([turn.mirror_x for turn in turns]) ^ (flip & ~swap)
    back_y = np.array([turn.mirror_y for turn in turns]) ^ (flip & swap)
    for axis, low, high, whole, begin, size, back, along in (
        (_Column.X, Place.LEFT, Place.RIGHT, Place.WHOLE_WIDTH, Place.X, Place.WIDTH, back_x, 1),
        (_Column.Y, Place.TOP, Place.BOTTOM, Place.WHOLE_HEIGHT, Place.Y, Place.HEIGHT, back_y, 0),
    ):
        ends = places[:, [low, high]].astype(np.float32)  # Pillow takes a box as floats
        plan[:, axis + _Column.LOW] = ends[:, 0]
        plan[:, axis + _Column.LENGTH] = ends[:, 1] - ends[:, 0]
        plan[:, axis + _Column.WHOLE] = places[:, whole]
        plan[:, axis + _Column.BEGIN] = places[:, begin]
        plan[:, axis + _Column.SIZE] = places[:, size]
        plan[:, axis + _Column.STEP] = [one.strides[2 - (axis == _Column.Y)] for one in flat]
        plan[:, axis + _Column.BACK] = back
        count = np.where(swap, shape[1 - along], shape[along])
        first, last, taps = _extent(plan[:, axis : axis + 8], count, interpolation)
        plan[:, axis + _Column.FIRST] = first
        plan[:, _Column.TAPS_X if along else _Column.TAPS_Y] = taps
        if not along:
            plan[:, _Column.ROWS] = last - first
    plan[:, _Column.BYTES] = [len(one.pixels) for one in flat]
    plan[:, _Column.CHANNEL] = [one.strides[0] for one in flat]
    plan[:, _Column.SWAP] = swap
    return plan


def _extent(
    axis: np.ndarray, count: np.ndarray, interpolation: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the first pixel that is read along an axis, the one after the last, and the taps."""
    scale = axis[:, _Column.LENGTH] / count
    reach = _FILTERS[interpolation][1] * np.maximum(scale, 1.0)
    low = axis[:, _Column.LOW]
    first = np.maximum(np.trunc(low + 0.5 * scale - reach + 0.5), 0)
    last = low + (count - 0.5) * scale + reach + 0.5
    last = np.minimum(np.trunc(last), axis[:, _Column.WHOLE])
    taps = np.minimum(np.ceil(reach) * 2 + 1, axis[:, _Column.WHOLE])
    return first, np.maximum(last, first + 1), taps


class _Sizes(NamedTuple):
    """Say how large what is computed for one chunk is: for its largest picture."""

    width: int  # of the results, before rows become columns
    height: int
    rows: int
    taps_x: int
    taps_y: int
    swap: bool
    slack: int  # bytes after the last picture, which taps of weight 0 may read


def _chunks(
    plan: np.ndarray, shape: tuple[int, int], interpolation: str, most_bytes: int
) -> Iterator[tuple[np.ndarray, _Sizes]]:
    """Yield which pictures are resampled together, and what that needs.

    All of a chunk take as much as its largest, so that pictures of alike sizes come together.
    """
    alike = plan[:, _Column.ROWS] * plan[:, _Column.TAPS_X]
    order = np.lexsort((alike, plan[:, _Column.SWAP]))
    start = 0
    for stop in range(1, len(order) + 1):
        if stop < len(order):
            longer = order[start : stop + 1]
            one_kind = plan[order[stop], _Column.SWAP] == plan[order[start], _Column.SWAP]
            if one_kind and _bytes(plan[longer], _sizes(plan[longer], shape)) <= most_bytes:
                continue
        chunk = order[start:stop]
        yield chunk, _sizes(plan[chunk], shape)
        start = stop


def _sizes(plan: np.ndarray, shape: tuple[int, int]) -> _Sizes:
    """Return the sizes for pictures that are resampled together."""
    rows, taps_x, taps_y = (
        int(plan[:, column].max()) for column in (_Column.ROWS, _Column.TAPS_X, _Column.TAPS_Y)
    )
    swap = bool(plan[0, _Column.SWAP])
    height, width = shape[::-1] if swap else shape
    slack = taps_x * int(plan[:, _Column.X + _Column.STEP].max())
    return _Sizes(width, height, rows, taps_x, taps_y, swap, slack)


def _bytes(plan: np.ndarray, sizes: _Sizes) -> int:
    """Return about how many bytes it takes to resample pictures together."""
    # Of each value of a result: a sum, an index and a pixel; of each weight five numbers.
    pixels = 3 * sizes.width * (10 * sizes.rows + 7 * sizes.height)
    weights = 40 * (sizes.width * sizes.taps_x + sizes.height * sizes.taps_y)
    return len(plan) * (pixels + weights) + int(plan[:, _Column.BYTES].sum())


# --- the sums, on the device ----------------------------------------------------------------------


def _resample(
    pixels: torch.Tensor, plan: torch.Tensor, sizes: _Sizes, interpolation: str, out: torch.Tensor
) -> None:
    """Resample the pictures of one chunk. plan: their values of _Column, on the device."""
    count, width, height, rows = len(plan), sizes.width, sizes.height, sizes.rows
    x, y = (plan[:, axis : axis + 8, None] for axis in (_Column.X, _Column.Y))
    weights, first = _weights(x, width, sizes.taps_x, interpolation)
    # Indices of 4 bytes: half of what a kernel would move, unless a picture has 700 million pixels.
    whole = torch.int32 if len(pixels) < 2**31 else torch.int64
    row = torch.arange(rows, device=out.device) + y[:, _Column.FIRST] - y[:, _Column.BEGIN]
    row = row.clamp_min(0).minimum(y[:, _Column.SIZE] - 1) * y[:, _Column.STEP]
    channel = torch.arange(3, device=out.device) * plan[:, _Column.CHANNEL, None]
    begin = (row[:, :, None] + channel[:, None, :] + plan[:, _Column.OFFSET, None, None]).to(whole)
    # A cut holds all that its crop reads. But an index beyond would end all work on the device.
    first = (first - x[:, _Column.BEGIN]).clamp_min(0).minimum(x[:, _Column.SIZE] - 1)
    index = begin[..., None] + (first * x[:, _Column.STEP]).to(whole)[:, None, None, :]
    step = x[:, _Column.STEP].to(whole)[:, None, None, :]
    sums = torch.full((count, rows, 3, width), _HALF, dtype=torch.int32, device=out.device)
    for weight in weights:
        sums.addcmul_(
            pixels.index_select(0, index.view(-1)).view(sums.shape), weight[:, None, None]
        )
        index += step
    del index
    lines = _rounded(sums).view(count * rows, 3 * width)
    weights, first = _weights(y, height, sizes.taps_y, interpolation)
    index = (first - y[:, _Column.FIRST]).to(torch.int32)
    line = torch.arange(count, dtype=torch.int32, device=out.device)[:, None] * rows
    sums = torch.full((count * height, 3 * width), _HALF, dtype=torch.int32, device=out.device)
    for tap, weight in enumerate(weights):
        some = ((index + tap).clamp_max(rows - 1) + line).view(-1)
        sums.addcmul_(lines.index_select(0, some), weight.view(-1, 1))
    crops = _rounded(sums).view(count, height, 3, width)
    crops = crops.permute((0, 3, 1, 2) if sizes.swap else (0, 1, 3, 2))
    out.index_copy_(0, plan[:, _Column.ROW].long(), crops)


def _rounded(sums: torch.Tensor) -> torch.Tensor:
    """Return the pixels of sums. Changes the sums."""
    return sums.bitwise_right_shift_(_BITS).clamp_(0, 255).to(torch.uint8)


def _weights(
    axis: torch.Tensor, count: int, taps: int, interpolation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights along an axis, (taps, n, count) int32, and the pixels that they begin at.

    axis: (n, 8, 1). Pixels are counted in the whole picture, (n, count) float64.

    This is Pillow's precompute_coeffs, with its order of operations, each rounded by itself.
    """
    function, support = _FILTERS[interpolation]
    at = torch.arange(count, dtype=torch.float64, device=axis.device)
    at = torch.where(axis[:, _Column.BACK] != 0, count - 1 - at, at)
    scale = axis[:, _Column.LENGTH] / count
    wider = scale.clamp_min(1.0)
    reach = wider * support
    centre = (at + 0.5) * scale + axis[:, _Column.LOW]
    first = (centre - reach + 0.5).trunc_().clamp_min_(0)
    end = (centre + reach + 0.5).trunc_().minimum(axis[:, _Column.WHOLE])
    tap = torch.arange(taps, dtype=torch.float64, device=axis.device)[:, None, None]
    weights = function((tap + first - centre + 0.5) * (1.0 / wider))
    weights.masked_fill_(tap >= end - first, 0.0)
    total = weights[0].clone()
    for weight in weights[1:]:  # and not sum(), which adds in another order than Pillow
        total += weight
    weights = torch.where(total != 0, weights / total, weights).mul_(1 << _BITS)
    return weights.add_(torch.where(weights < 0, -0.5, 0.5)).to(torch.int32), first


def _box(x: torch.Tensor) -> torch.Tensor:
    return ((x > -0.5) & (x <= 0.5)).double()


def _bilinear(x: torch.Tensor) -> torch.Tensor:
    return (1.0 - x.abs()).clamp_min_(0.0)


def _hamming(x: torch.Tensor) -> torch.Tensor:
    x = x.abs()
    inner = x * math.pi
    # Pillow's two numbers are floats of 32 bits.
    low, high = float(np.float32(0.54)), float(np.float32(0.46))
    curve = inner.sin() / inner * (inner.cos() * high + low)
    return torch.where(x == 0, 1.0, torch.where(x >= 1, 0.0, curve))


def _bicubic(x: torch.Tensor) -> torch.Tensor:
    x = x.abs()
    near = (x * 1.5 - 2.5) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def _sinc(x: torch.Tensor) -> torch.Tensor:
    inner = x * math.pi
    return torch.where(x == 0, 1.0, inner.sin() / inner)


def _lanczos(x: torch.Tensor) -> torch.Tensor:
    return torch.where((x >= -3) & (x < 3), _sinc(x) * _sinc(x / 3), 0.0)


# Each with how far it reaches from its centre, in pixels.
_FILTERS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float]] = {
    "box": (_box, 0.5),
    "bilinear": (_bilinear, 1.0),
    "hamming": (_hamming, 1.0),
    "bicubic": (_bicubic, 2.0),
    "lanczos": (_lanczos, 3.0),
}
