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
    strides = np.array([one.strides for one in flat])
    planned = plan(places.numpy()[rows], strides, (height, width), interpolation)
    planned[:, Column.ROW] = rows
    planned[:, Column.BYTES] = [len(one.pixels) for one in flat]
    chunks = list(_chunks(planned, (height, width), most_bytes))
    order = np.concatenate([chunk for chunk, _ in chunks])
    for chunk, _ in chunks:  # each begins its own row of bytes
        sizes = planned[chunk, Column.BYTES]
        planned[chunk, Column.OFFSET] = np.cumsum(sizes) - sizes
    table = torch.from_numpy(planned[order])
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


# How orientations 0 to 8 turn: rows become columns, columns are mirrored, rows are.
_TURNS = np.array(
    [
        (turn.swap, turn.mirror_x, turn.mirror_y)
        for turn in (TURNS.get(i, UPRIGHT) for i in range(9))
    ]
)


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


class Column:
    """Number the values that the device is told of each picture, for both axes alike.

    An axis has eight: where the box begins, how long it is; the size of the whole, where the
    file begins in it, the size of the file; the step to the next pixel; whether to go backwards;
    and the first pixel of the whole that is read.
    """

    LOW, LENGTH, WHOLE, BEGIN, SIZE, STEP, BACK, FIRST = range(8)
    X, Y = 0, 8  # where the columns of an axis begin
    ROW, OFFSET, BYTES, CHANNEL, SWAP, TAPS_X, TAPS_Y, ROWS = range(16, 24)
    COUNT = 24


def plan(
    places: np.ndarray, strides: np.ndarray, shape: tuple[int, int], interpolation: str
) -> np.ndarray:
    """Return the values of Column for each picture, but for ROW, OFFSET and BYTES.

    strides: (n, 3), of channel, row and column.
    """
    plan = np.zeros((len(places), Column.COUNT))
    flip = places[:, Place.FLIP] != 0
    swap, mirror_x, mirror_y = _TURNS[places[:, Place.ORIENTATION].astype(int)].T
    # A turned result is summed up as it is stored. Mirroring the upright one mirrors its columns,
    # which are rows as stored where the picture lies on its side.
    back_x, back_y = mirror_x ^ (flip & ~swap), mirror_y ^ (flip & swap)
    for axis, low, high, whole, begin, size, back, along in (
        (Column.X, Place.LEFT, Place.RIGHT, Place.WHOLE_WIDTH, Place.X, Place.WIDTH, back_x, 1),
        (Column.Y, Place.TOP, Place.BOTTOM, Place.WHOLE_HEIGHT, Place.Y, Place.HEIGHT, back_y, 0),
    ):
        ends = places[:, [low, high]].astype(np.float32)  # Pillow takes a box as floats
        plan[:, axis + Column.LOW] = ends[:, 0]
        plan[:, axis + Column.LENGTH] = ends[:, 1] - ends[:, 0]
        plan[:, axis + Column.WHOLE] = places[:, whole]
        plan[:, axis + Column.BEGIN] = places[:, begin]
        plan[:, axis + Column.SIZE] = places[:, size]
        plan[:, axis + Column.STEP] = strides[:, 1 + along]
        plan[:, axis + Column.BACK] = back
        count = np.where(swap, shape[1 - along], shape[along])
        first, last, taps = _extent(plan[:, axis : axis + 8], count, interpolation)
        plan[:, axis + Column.FIRST] = first
        plan[:, Column.TAPS_X if along else Column.TAPS_Y] = taps
        if not along:
            plan[:, Column.ROWS] = last - first
    plan[:, Column.CHANNEL] = strides[:, 0]
    plan[:, Column.SWAP] = swap
    return plan


def _extent(
    axis: np.ndarray, count: np.ndarray, interpolation: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the first pixel that is read along an axis, the one after the last, and the taps."""
    scale = axis[:, Column.LENGTH] / count
    reach = _FILTERS[interpolation][1] * np.maximum(scale, 1.0)
    low = axis[:, Column.LOW]
    first = np.maximum(np.trunc(low + 0.5 * scale - reach + 0.5), 0)
    last = low + (count - 0.5) * scale + reach + 0.5
    last = np.minimum(np.trunc(last), axis[:, Column.WHOLE])
    # One more than the filter covers, since the place of its ends is rounded.
    taps = np.minimum(np.ceil(2 * reach) + 1, axis[:, Column.WHOLE])
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
    plan: np.ndarray, shape: tuple[int, int], most_bytes: int
) -> Iterator[tuple[np.ndarray, _Sizes]]:
    """Yield which pictures are resampled together, and what that needs."""
    # Pictures that are resampled together take as much as the largest of them: so that is twice as
    # much as the smallest, at most. 256 random crops of photographs are then six chunks, with a
    # third more sums than they need; as one chunk they would take eight times as many.
    work = np.log2(plan[:, Column.ROWS] * plan[:, Column.TAPS_X]).astype(int)
    kind = 2 * work + (plan[:, Column.SWAP] != 0)
    order = np.argsort(kind, kind="stable")
    for alike in np.split(order, np.flatnonzero(np.diff(kind[order])) + 1):
        yield from _fitting(plan, alike, shape, most_bytes)


def _fitting(
    plan: np.ndarray, chunk: np.ndarray, shape: tuple[int, int], most_bytes: int
) -> Iterator[tuple[np.ndarray, _Sizes]]:
    """Yield pictures as they are, or halves of them where they take too much memory together."""
    sizes = _sizes(plan[chunk], shape)
    if len(chunk) == 1 or _bytes(plan[chunk], sizes) <= most_bytes:
        yield chunk, sizes
    else:
        for half in np.array_split(chunk, 2):
            yield from _fitting(plan, half, shape, most_bytes)


def _sizes(plan: np.ndarray, shape: tuple[int, int]) -> _Sizes:
    """Return the sizes for pictures that are resampled together."""
    rows, taps_x, taps_y = (
        int(plan[:, column].max()) for column in (Column.ROWS, Column.TAPS_X, Column.TAPS_Y)
    )
    swap = bool(plan[0, Column.SWAP])
    height, width = shape[::-1] if swap else shape
    slack = taps_x * int(plan[:, Column.X + Column.STEP].max())
    return _Sizes(width, height, rows, taps_x, taps_y, swap, slack)


def _bytes(plan: np.ndarray, sizes: _Sizes) -> int:
    """Return about how many bytes it takes to resample pictures together."""
    # Of each value of a result: a sum, an index and a pixel; of each weight five numbers.
    pixels = 3 * sizes.width * (10 * sizes.rows + 7 * sizes.height)
    weights = 40 * (sizes.width * sizes.taps_x + sizes.height * sizes.taps_y)
    return len(plan) * (pixels + weights) + int(plan[:, Column.BYTES].sum())


# --- the sums, on the device ----------------------------------------------------------------------


def _resample(
    pixels: torch.Tensor, plan: torch.Tensor, sizes: _Sizes, interpolation: str, out: torch.Tensor
) -> None:
    """Resample the pictures of one chunk. plan: their values of Column, on the device."""
    count, width, height, rows = len(plan), sizes.width, sizes.height, sizes.rows
    x, y = (plan[:, axis : axis + 8, None] for axis in (Column.X, Column.Y))
    weights, first = _weights(x, width, sizes.taps_x, interpolation)
    # Indices of 4 bytes: half of what a kernel would move, unless a picture has 700 million pixels.
    whole = torch.int32 if len(pixels) < 2**31 else torch.int64
    row = torch.arange(rows, device=out.device) + y[:, Column.FIRST] - y[:, Column.BEGIN]
    row = row.clamp_min(0).minimum(y[:, Column.SIZE] - 1) * y[:, Column.STEP]
    channel = torch.arange(3, device=out.device) * plan[:, Column.CHANNEL, None]
    begin = (row[:, :, None] + channel[:, None, :] + plan[:, Column.OFFSET, None, None]).to(whole)
    # A cut holds all that its crop reads. But an index beyond would end all work on the device.
    first = (first - x[:, Column.BEGIN]).clamp_min(0).minimum(x[:, Column.SIZE] - 1)
    index = begin[..., None] + (first * x[:, Column.STEP]).to(whole)[:, None, None, :]
    step = x[:, Column.STEP].to(whole)[:, None, None, :]
    sums = torch.full((count, rows, 3, width), _HALF, dtype=torch.int32, device=out.device)
    for weight in weights:
        sums.addcmul_(
            pixels.index_select(0, index.view(-1)).view(sums.shape), weight[:, None, None]
        )
        index += step
    del index
    lines = _rounded(sums).view(count * rows, 3 * width)
    weights, first = _weights(y, height, sizes.taps_y, interpolation)
    index = (first - y[:, Column.FIRST]).clamp_min_(0).to(torch.int32)
    line = torch.arange(count, dtype=torch.int32, device=out.device)[:, None] * rows
    sums = torch.full((count * height, 3 * width), _HALF, dtype=torch.int32, device=out.device)
    for tap, weight in enumerate(weights):
        some = ((index + tap).clamp_max(rows - 1) + line).view(-1)
        sums.addcmul_(lines.index_select(0, some), weight.view(-1, 1))
    crops = _rounded(sums).view(count, height, 3, width)
    crops = crops.permute((0, 3, 1, 2) if sizes.swap else (0, 1, 3, 2))
    out.index_copy_(0, plan[:, Column.ROW].long(), crops)


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
    at = torch.where(axis[:, Column.BACK] != 0, count - 1 - at, at)
    # By a tensor: CUDA divides by a number by multiplying with its reciprocal, which is rounded.
    scale = axis[:, Column.LENGTH] / axis.new_full((1,), count)
    wider = scale.clamp_min(1.0)
    reach = wider * support
    centre = (at + 0.5) * scale + axis[:, Column.LOW]
    first = (centre - reach + 0.5).trunc_().clamp_min_(0)
    end = (centre + reach + 0.5).trunc_().minimum(axis[:, Column.WHOLE])
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
    return torch.where((x >= -3) & (x < 3), _sinc(x) * _sinc(x / x.new_full((1,), 3.0)), 0.0)


# Each with how far it reaches from its centre, in pixels.
_FILTERS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float]] = {
    "box": (_box, 0.5),
    "bilinear": (_bilinear, 1.0),
    "hamming": (_hamming, 1.0),
    "bicubic": (_bicubic, 2.0),
    "lanczos": (_lanczos, 3.0),
}
