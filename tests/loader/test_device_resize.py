"""The resize on the device: Pillow's, bit for bit, for pictures of any size at once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import PIL
import pytest
import torch
from PIL import Image
from support import pillow_resize
from support.device_crops import Picture
from support.gpu import DEVICES
from torch.utils._python_dispatch import TorchDispatchMode

from shardio.images.decode import TURNS, UPRIGHT, pil_info
from shardio.loader.device_resize import resample

FILTERS = ("bilinear", "bicubic", "lanczos", "box", "hamming")
SHAPE = (13, 22)


def made(
    pictures: list[Picture],
    name: str,
    shape: tuple[int, int] = SHAPE,
    device: str = "cpu",
    **options: Any,
) -> np.ndarray:
    out = torch.full((len(pictures), *shape, 3), 7, dtype=torch.uint8, device=device)
    places = torch.tensor([one.place for one in pictures], dtype=torch.float64)
    tensors = [one.tensor(number).to(device) for number, one in enumerate(pictures)]
    resample(tensors, places, name, out, **options)
    return out.cpu().numpy()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FILTERS)
def test_every_crop_is_pillow_s_bit_for_bit(name: str, device: str) -> None:
    pictures = [Picture(seed) for seed in range(48)]
    for one, got in zip(pictures, made(pictures, name, device=device), strict=True):
        np.testing.assert_array_equal(got, one.expected(SHAPE, name), str(one.place))


@pytest.mark.parametrize("name", FILTERS)
def test_the_reference_is_the_pillow_that_is_installed(name: str) -> None:
    """Bit for bit: rows first before Pillow 13, later the columns of tall pictures."""
    simd, late = pil_info()["name"] != "pillow", int(PIL.__version__.partition(".")[0]) >= 13
    far = 0
    for one in [Picture(seed) for seed in range(120)]:
        turn = TURNS.get(one.orientation, UPRIGHT)
        size = SHAPE if turn.swap else SHAPE[::-1]
        image = Image.fromarray(one.pixels)
        theirs = np.asarray(image.resize(size, getattr(Image.Resampling, name.upper()), one.box))
        before, since = (
            pillow_resize.resized(one.pixels, size, one.box, name, late=each).astype(int)
            for each in (False, True)
        )
        # pillow-simd rounds both passes to fewer bits: one level each.
        apart = int(np.abs((since if late else before) - theirs).max())
        assert apart <= (2 if simd else 0), str(one.place)
        far = max(far, int(np.abs(before - since).max()))
    # docs/device.md: bicubic and lanczos leave 0 to 255 at hard edges, which is cut in between.
    assert far == {"bicubic": 28, "lanczos": 50}.get(name, 1)


@pytest.mark.parametrize(
    ("whole", "size", "first"),
    [
        ((90, 90), (30, 30), False),
        ((90, 151), (30, 30), True),  # lower by 121, narrower by 60
        ((90, 150), (30, 30), False),
        ((20, 40), (30, 39), True),  # wider
        ((20, 30), (30, 30), False),
    ],
)
def test_the_pass_that_comes_first_is_that_of_pillow(
    whole: tuple[int, int], size: tuple[int, int], first: bool
) -> None:
    """From the size of the picture and of the result: edges show which of the two it was."""
    assert pillow_resize.columns_first(whole, size) == first
    pixels = np.random.default_rng(1).integers(0, 2, (*whole[::-1], 3), dtype=np.uint8) * 255
    box = (0.5, 0.5, whole[0] - 0.5, whole[1] - 0.5)
    before, since = (
        pillow_resize.resized(pixels, size, box, "lanczos", late=late) for late in (False, True)
    )
    assert np.array_equal(before, since) != first
    if pil_info()["name"] == "pillow":
        late = int(PIL.__version__.partition(".")[0]) >= 13
        theirs = Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS, box)
        np.testing.assert_array_equal(np.asarray(theirs), since if late else before)


def test_a_cut_in_its_place_gives_what_the_whole_gives() -> None:
    whole = Picture(7, 200)
    whole.pixels = np.random.default_rng(1).integers(0, 256, (150, 170, 3), dtype=np.uint8)
    cuts = []
    for name in FILTERS:
        for box in ((60.25, 40.5, 110.75, 99.125), (60, 41, 82, 54)):
            one, part = Picture(7), Picture(7)
            for crop, x, y, pixels in (
                (one, 0, 0, whole.pixels),
                (part, 40, 24, whole.pixels[24:128, 40:144]),
            ):
                crop.pixels, crop.box = pixels, box
                crop.place[:10] = [*box, 170, 150, x, y, pixels.shape[1], pixels.shape[0]]
            cuts.append((name, one, part))
    for name, one, part in cuts:
        np.testing.assert_array_equal(made([part], name), made([one], name), name)


def test_what_is_resampled_together_does_not_change_the_pixels() -> None:
    pictures = [Picture(seed, 60) for seed in range(20)]
    at_once = made(pictures, "lanczos")
    np.testing.assert_array_equal(made(pictures, "lanczos", most_bytes=1), at_once)
    np.testing.assert_array_equal(made(pictures, "lanczos", most_bytes=200_000), at_once)
    np.testing.assert_array_equal(made(pictures[::-1], "lanczos"), at_once[::-1])


def test_rows_without_a_picture_stay() -> None:
    pictures = [Picture(seed) for seed in range(4)]
    out = torch.full((4, *SHAPE, 3), 7, dtype=torch.uint8)
    places = torch.tensor([one.place for one in pictures], dtype=torch.float64)
    resample([None, pictures[1].tensor(), None, None], places, "box", out)
    np.testing.assert_array_equal(out[1].numpy(), pictures[1].expected(SHAPE, "box"))
    assert bool((out[[0, 2, 3]] == 7).all())
    resample([None] * 4, places, "box", out)


def test_a_file_that_is_smaller_than_what_its_crop_reads_reads_nothing_else() -> None:
    """An index beyond the bytes would end all work on a GPU, and not only this batch."""
    one = Picture(7)
    one.place[:10] = [0.0, 0.0, 80.0, 80.0, 80, 80, 30, 30, one.pixels.shape[1], 1]
    one.pixels = one.pixels[:1]
    assert made([one], "lanczos").shape == (1, *SHAPE, 3)


class Operations(TorchDispatchMode):
    """Count the operations of torch, each of which is about one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operations(pictures: list[Picture]) -> Counter[str]:
    places = torch.tensor([one.place for one in pictures], dtype=torch.float64)
    out = torch.empty((len(pictures), *SHAPE, 3), dtype=torch.uint8)
    tensors = [one.tensor() for one in pictures]
    with Operations() as counted:
        resample(tensors, places, "bilinear", out)
    return counted.seen


def test_the_kernels_are_as_many_for_few_pictures_as_for_many() -> None:
    few = operations([Picture(7), Picture(8)])  # one as it lies, one on its side
    many = operations([Picture(7 + number % 2) for number in range(60)])
    views = {"as_strided"}  # one for each picture, no kernel
    assert {name: count for name, count in many.items() if name not in views} == {
        name: count for name, count in few.items() if name not in views
    }
    assert sum(few.values()) > 40  # the mode sees what is done


def test_pictures_of_many_sizes_take_fewer_kernels_than_one_by_one() -> None:
    sizes = [Picture(8 * number + 7, 150 + 5 * number) for number in range(48)]
    apart = sum(sum(operations([one]).values()) for one in sizes)
    assert sum(operations(sizes).values()) < apart / 3


def test_the_host_never_asks_the_device() -> None:
    """Each of these waits for all work on the device."""
    asks = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero"}
    assert not asks & set(operations([Picture(seed) for seed in range(8)]))


class Divisions(TorchDispatchMode):
    """Divide by a number of the host as CUDA does: multiply by its reciprocal, which is rounded."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "div":
            divisor = args[1]
            if not isinstance(divisor, torch.Tensor) or divisor.dim() == 0:
                return args[0] * (1.0 / float(divisor))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["box", "lanczos"])
def test_no_division_is_done_as_cuda_does_it_by_a_number(name: str) -> None:
    """For 28 of 100 sizes of a box the scale would be another, and pixels at its edges with it."""
    pictures = [Picture(seed) for seed in range(48)]
    with Divisions():
        assert float(torch.tensor(49.0).double() / 49) != 1.0  # the mode sees it
        found = made(pictures, name)
    for one, got in zip(pictures, found, strict=True):
        np.testing.assert_array_equal(got, one.expected(SHAPE, name), str(one.place))
