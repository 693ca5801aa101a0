"""Raw pixels, as --encode raw stores them: decoded and cropped as by PIL."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.raw_pixels import encoded, scene

from shardio import CenterCrop, RandomResizedCrop
from shardio.errors import DecodeError, OptionError
from shardio.images import decode as image
from shardio.images import transforms


def outcome(read: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        found = np.asarray(read(data))
    except DecodeError:
        return "no image"
    return found.shape, found.tobytes()


@st.composite
def ppm_files(draw: st.DrawFn) -> bytes:
    """P6 files, most of them nearly right."""
    width, height = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    blank = st.sampled_from([b" ", b"\n", b"\t", b"\r", b"  ", b"\n# a comment\n", b"", b"\x0b"])
    number = st.sampled_from([b"%d", b"0%d", b"+%d", b" %d", b"%d.", b"\xb2%d"])
    maxval = draw(
        st.sampled_from([b"255", b"255", b"255", b"254", b"65535", b"0", b"256", b"0255"])
    )
    usual = draw(st.booleans())
    parts = [
        b"P6",
        b"\n" if usual else draw(blank),
        (b"%d" if usual else draw(number)) % width,
        b" " if usual else draw(blank),
        (b"%d" if usual else draw(number)) % height,
        b"\n" if usual else draw(blank),
        maxval,
        b"\n" if usual else draw(blank),
    ]
    size = max(0, 3 * width * height + draw(st.sampled_from([0, 0, 0, -1, 1, 7])))
    return b"".join(parts) + draw(st.binary(min_size=size, max_size=size))


@given(ppm_files())
def test_pixels_are_taken_as_pil_reads_them(data: bytes) -> None:
    readers: list[Callable[[bytes], Any]] = [image.pixels, image.decode, CenterCrop(2)]
    fast = [outcome(read, data) for read in readers]
    with pytest.MonkeyPatch.context() as patch:
        for module in (image, transforms):
            patch.setattr(module, "raw_pixels", lambda data, max_pixels: None)
        assert fast == [outcome(read, data) for read in readers]


@pytest.mark.parametrize(
    "header",
    [b"P6\n99999999 99999999\n255\n", b"P6\n%d 1\n255\n" % 10**60, b"P6\n-1 -1\n255\n", b"P6\n"],
)
def test_hostile_headers_are_decode_errors(header: bytes) -> None:
    for read in (image.pixels, image.decode, CenterCrop(2), RandomResizedCrop(2)):
        with pytest.raises(DecodeError):
            read(header + b"\0" * 30)


def test_the_limit_of_pixels_holds_for_raw_ones() -> None:
    data = image.ppm(scene(0))
    assert image.pixels(data, max_pixels=48).shape == (6, 8, 3)
    with pytest.raises(DecodeError, match=r"8 x 6 = 48 pixels"):
        image.pixels(data, max_pixels=47)
    with pytest.raises(DecodeError, match=r"8 x 6 = 48 pixels"):
        CenterCrop(2, max_pixels=47)(data)


def test_arrays_are_the_callers_own() -> None:
    data = bytearray(image.ppm(scene(0)))
    for given_bytes in (bytes(data), data, memoryview(data), encoded(scene(0))):
        array = image.pixels(given_bytes)
        assert np.array_equal(array, scene(0)) and array.dtype == np.uint8
        assert array.flags.owndata and array.flags.writeable and array.flags.c_contiguous


TRANSFORMS = [
    CenterCrop(4),
    CenterCrop((3, 7)),
    CenterCrop(9, 11),
    RandomResizedCrop(5, flip=True),
    RandomResizedCrop((6, 8), scale=(1, 1), ratio=(8 / 6, 8 / 6), flip=True),  # all, or mirrored
    RandomResizedCrop(3, flip=True, interpolation="lanczos", fast=True),
]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_raw_pixels_are_those_of_the_image(transform: Any) -> None:
    for draw in range(30):
        array = scene(draw)
        found = transform(image.ppm(array), draw)
        assert np.array_equal(found, transform(Image.fromarray(array), draw))
        assert found.flags.owndata and found.flags.writeable and found.flags.c_contiguous


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_write_where_they_are_told(transform: Any) -> None:
    wide = np.zeros((*transform.size, 4), np.uint8)
    for data in (image.ppm(scene(7)), encoded(scene(7)), encoded(scene(8), "JPEG")):
        out = wide[:, :, :3]
        assert transform(data, 7, out=out) is out
        assert np.array_equal(out, transform(data, 7))
    assert not wide[:, :, 3].any()


def test_what_cannot_be_written_to_is_refused() -> None:
    readonly = np.zeros((4, 4, 3), np.uint8)
    readonly.setflags(write=False)
    for out in (
        np.zeros((4, 5, 3), np.uint8),
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 3), np.float32),
        readonly,
        [0],
    ):
        with pytest.raises(OptionError, match=r"uint8 of shape \(4, 4, 3\)"):
            CenterCrop(4)(image.ppm(scene(0)), out=out)  # type: ignore[arg-type]
    kept = np.full((4, 4, 3), 7, np.uint8)
    with pytest.raises(DecodeError):
        CenterCrop(4)(b"no image", out=kept)
    assert (kept == 7).all()
