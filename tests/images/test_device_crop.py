"""shardio/images/device_crop.py: what workers plan is what `Transform.by_pil` makes, and why not.

The oracle is Pillow: support/device_crops.py decodes and resizes each planned crop by it.
"""

from __future__ import annotations

import io
import pickle
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.device_crops import encoded, finish, scene

from shardio import CenterCrop, RandomResizedCrop, native
from shardio.errors import DecodeError
from shardio.images.decode import decode_errors, ppm
from shardio.images.device_crop import DeviceCrop, Place, Reason, plan_crop
from shardio.images.transforms import Transform

TILED = 444, 300  # width and height of tile JPEGs: of 28 or 56 MCUs a row, in tiles of four


def by_pil(transform: Transform, image: bytes, draw: int) -> NDArray[np.uint8]:
    out = np.empty((*transform.shape, 3), np.uint8)
    with decode_errors(image):
        transform.by_pil(image, draw, out)
    return out


def check(transform: Transform, image: bytes, draw: int) -> DeviceCrop:
    """Check that the planned crop is a JPEG, and becomes what by_pil makes; return it."""
    crop = plan_crop(transform, image, draw, 7)
    assert crop.place[Place.REASON] == Reason.NONE and crop.place[Place.NUMBER] == 7
    assert np.array_equal(finish(crop), by_pil(transform, image, draw))
    assert pickle.loads(pickle.dumps(crop)) == crop
    return crop


TRANSFORMS: list[Transform] = [
    RandomResizedCrop((40, 56), flip=True),
    RandomResizedCrop(33, interpolation="bicubic", scale=(0.02, 0.2)),
    RandomResizedCrop((96, 20), interpolation="lanczos", flip=True),
    RandomResizedCrop(31, interpolation="hamming", upright=False, flip=True),
    CenterCrop(48, 60),
    CenterCrop((30, 44), interpolation="box"),
    CenterCrop((130, 170)),  # larger than some pictures
]


@pytest.fixture(params=["core", "python"])
def with_core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "core" and native.core is None:
        pytest.skip(f"core: {native.described()}")
    if request.param == "python":
        monkeypatch.setattr(native, "core", None)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda one: f"{one.interpolation}{one.size}")
def test_a_planned_crop_is_what_by_pil_makes(
    transform: Transform, orientation: int, with_core: None
) -> None:
    for draw in range(3):
        whole = encoded(orientation=orientation)
        crop = check(transform, whole, draw * 2**61 + 5)
        assert crop.data == whole  # not cut
        assert (crop.place[Place.X], crop.place[Place.Y]) == (0, 0)
        tiled = encoded(*TILED, orientation=orientation, tiled=True)
        check(transform, tiled, draw * 2**61 + 5)


@given(st.data(), st.integers(0, 2**64 - 1))
@settings(max_examples=60)
def test_cuts_hold_what_the_resize_reads(data: st.DataObject, draw: int) -> None:
    size = data.draw(st.sampled_from([TILED, (250, 600), (700, 330)]))
    options = {"mode": data.draw(st.sampled_from(["RGB", "L"]))}
    if options["mode"] == "RGB":
        options["subsampling"] = data.draw(st.sampled_from(["4:4:4", "4:2:2", "4:2:0"]))
    image = encoded(*size, tiled=True, orientation=data.draw(st.integers(1, 8)), **options)  # type: ignore[arg-type]
    filters = st.sampled_from(["bilinear", "bicubic", "lanczos", "box", "hamming"])
    transform = RandomResizedCrop(
        data.draw(st.tuples(st.integers(8, 64), st.integers(8, 64))),
        scale=(0.01, 0.3),
        flip=True,
        interpolation=data.draw(filters),
    )
    check(transform, image, draw)


def test_of_a_tile_jpeg_only_the_tiles_under_the_box_are_handed_on() -> None:
    image = encoded(*TILED, tiled=True)
    crop = check(CenterCrop(100), image, 0)
    assert len(crop.data) < len(image) / 3
    # Tiles of 64 x 16 pixels; the box is 172..272, 100..200, and chroma needs a pixel around it.
    assert crop.place[Place.X : Place.ORIENTATION] == (128, 96, 192, 112)


@pytest.mark.parametrize(
    "options", [{"mode": "L"}, {"subsampling": 0}, {"subsampling": 1}], ids=str
)
def test_grey_and_other_samplings_are_for_the_device(options: dict[str, object]) -> None:
    for transform in TRANSFORMS:
        check(transform, encoded(**options), 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("told, orientation", [(6, 6), (0, 1), (9, 1)])
def test_an_orientation_may_stand_in_xmp_or_be_nonsense(
    told: int, orientation: int, with_core: None
) -> None:
    body = b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="%d"/>' % told
    xmp = b"\xff\xe1" + (len(body) + 2).to_bytes(2, "big") + body
    for image in (encoded(), encoded(*TILED, tiled=True)):
        crop = check(TRANSFORMS[0], image[:2] + xmp + image[2:], 3)
        assert crop.place[Place.ORIENTATION] == orientation


def test_what_lies_behind_the_picture_is_left_alone() -> None:
    transform = TRANSFORMS[0]
    assert check(transform, encoded() + b"\xff\xd8 a movie", 3).data.endswith(b"movie")
    several, images = io.BytesIO(), [scene(150, 100), scene(40, 30)]
    images[0].save(several, "MPO", save_all=True, append_images=images[1:])
    check(transform, several.getvalue(), 3)
    check(transform, encoded(*TILED, tiled=True) + b"\xff\xd8 a movie", 3)


def test_any_buffer_is_taken() -> None:
    image = encoded()
    expected = plan_crop(TRANSFORMS[0], image, 1, 0)
    for data in (bytearray(image), memoryview(image)):
        assert plan_crop(TRANSFORMS[0], data, 1, 0) == expected


# --- what the device cannot decode ----------------------------------------------------------------


def cjpeg(*options: str) -> bytes:
    """Encode by libjpeg's own program, which has options that PIL lacks."""
    if shutil.which("cjpeg") is None:
        pytest.skip("cjpeg is not here (libjpeg-turbo-progs): its JPEGs are NOT tested")
    out = subprocess.run(["cjpeg", *options], input=encoded(kind="PPM"), capture_output=True)
    assert out.returncode == 0, out.stderr
    return out.stdout


def test_rare_samplings() -> None:
    check(TRANSFORMS[0], cjpeg("-sample", "1x2"), 3)
    for sample in ("4x1", "4x2", "2x2,1x2,2x1", "1x2,1x2,1x2"):
        finished(cjpeg("-sample", sample), Reason.SAMPLING)
    finished(cjpeg("-grayscale", "-sample", "2x2"), Reason.SAMPLING)


def test_other_processes(tmp_path: Path) -> None:
    finished(encoded(progressive=True), Reason.PROCESS)
    finished(cjpeg("-arithmetic"), Reason.PROCESS)
    finished(cjpeg("-quality", "5"), Reason.PROCESS)  # tables of 16 bits: extended sequential
    (tmp_path / "scans").write_text("0: 0 63 0 0; 1: 0 63 0 0; 2: 0 63 0 0;")
    finished(cjpeg("-scans", str(tmp_path / "scans")), Reason.SCANS)


def test_other_colours() -> None:
    finished(encoded(mode="CMYK"), Reason.COLOURS)
    finished(cjpeg("-rgb"), Reason.COLOURS)
    finished(encoded(keep_rgb=True), Reason.COLOURS)


def test_other_formats() -> None:
    for kind in ("PNG", "WEBP", "GIF", "BMP"):
        finished(encoded(kind=kind), Reason.NOT_JPEG)
    finished(ppm(np.asarray(scene(150, 100))), Reason.NOT_JPEG)
    crop = plan_crop(TRANSFORMS[0], scene(150, 100), 3, 1)
    assert crop.place[Place.REASON] == Reason.NOT_JPEG


def test_a_header_that_only_pil_reads() -> None:
    image = encoded()
    at = image.index(b"\xff\xdb")
    finished(image[:at] + b"\0\0\0" + image[at:], Reason.HEADER)


def finished(image: bytes, reason: Reason) -> None:
    """Check that a crop is finished for this reason, as the transform does it."""
    for transform in TRANSFORMS:
        crop = plan_crop(transform, image, 3, 7)
        assert crop.place[Place.REASON] == reason, (
            Reason(int(crop.place[Place.REASON])),
            transform,
        )
        assert np.array_equal(finish(crop), transform(image, 3))


# --- errors ---------------------------------------------------------------------------------------


def test_errors_of_the_header_are_those_of_the_transform() -> None:
    small = RandomResizedCrop(8, max_pixels=14_999)
    for image in (
        encoded(),  # 15,000 pixels
        encoded(progressive=True),
        encoded(kind="PNG"),
        b"no image",
        encoded()[:100],
        encoded(progressive=True)[:-500],
        b"\xff\xd8\xff\xd9",
    ):
        with pytest.raises(DecodeError) as expected:
            small(image, 1)
        with pytest.raises(DecodeError) as raised:
            plan_crop(small, image, 1, 0)
        assert str(raised.value) == str(expected.value)


def test_a_file_that_is_cut_is_told_by_the_worker() -> None:
    """An engine of a GPU would decode what is there, and say nothing."""
    for tiled in (False, True):
        image = encoded(*TILED, tiled=tiled)
        for length in (len(image) - 1, len(image) - 900):
            with pytest.raises(DecodeError, match="truncated"):
                plan_crop(TRANSFORMS[0], image[:length], 1, 0)


def test_damage_in_the_midst_is_for_the_decoder() -> None:
    image = bytearray(encoded())
    image[-400:-300] = bytes(100)
    crop = plan_crop(TRANSFORMS[0], bytes(image), 1, 0)
    assert crop.place[Place.REASON] == Reason.NONE and crop.data == image
