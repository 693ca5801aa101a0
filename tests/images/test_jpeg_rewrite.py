"""JPEGs rewritten as tiles: the same pixels, all metadata in place, and what is refused, and why.

All runs with each tool that is here: the compiled core, and jpegtran.
"""

from __future__ import annotations

import functools
import io
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.device_crops import scene
from support.images import IMAGENET, encoded
from support.jpegs import CORE, KINDS, made, needs_programs, patched, run, segment, shown

from shardio import native
from shardio.errors import DependencyError
from shardio.images import jpeg_rewrite, jpeg_tiles
from shardio.images.jpeg_rewrite import Unfit, interval_for, rewrite
from shardio.images.jpeg_tiles import Tiles, tiles

pytestmark = needs_programs


@pytest.fixture(params=["core", "jpegtran"])
def tool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "core" and (CORE is None or not hasattr(CORE, "rewrite")):
        pytest.skip("shardio's compiled core is not built: rewriting by it is NOT tested")
    if request.param == "jpegtran":
        monkeypatch.setattr(native, "core", None)
    yield request.param


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.sampled_from([(203, 97), (129, 130), (300, 61), (161, 140)]),
    st.booleans(),
)
def test_a_rewritten_file_has_the_same_pixels(kind: str, size, progressive: bool) -> None:
    data = made(kind, *size, progressive)
    results = []
    for core in {CORE, None}:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "core", core)
            results.append(rewrite(data))
    assert all(result == results[0] for result in results)  # both tools write the same bytes
    result = results[0]
    assert isinstance(result, bytes)
    assert np.array_equal(shown(result), shown(data))
    found = tiles(result)
    assert found is not None and found.columns * found.rows >= 4
    assert rewrite(result) == Unfit("tiles already")


def segments(data: bytes) -> list[bytes]:
    """Its APPn and COM segments."""
    at, found = 2, []
    while data[at : at + 2] != b"\xff\xd9":
        marker = data[at + 1]
        if data[at] != 0xFF or marker in (0, 0xFF) or 0xD0 <= marker <= 0xD7:
            at += 1  # within a scan
            continue
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if 0xE0 <= marker <= 0xEF or marker == 0xFE:
            found.append(data[at:end])
        at = end
    return found


def test_all_that_is_not_the_picture_is_kept_in_its_place(tool: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    plain = encoded(scene(203, 97), "JPEG", exif=exif)
    thumbnail = b"JFIF\0\1\2\1\0\x48\0\x48\2\1" + b"\7" * 6
    own = [
        segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0<x/>"),
        segment(0xFE, b"before JFIF"),
        segment(0xE0, thumbnail),  # libjpeg would drop it, and write JFIF first
        segment(0xE0, b"JFXX\0\x13"),
        segment(0xE2, b"ICC_PROFILE\0\1\2" + b"i" * 60_000),
        segment(0xE2, b"ICC_PROFILE\0\2\2" + b"j" * 60_000),
        segment(0xFE, b""),
        segment(0xED, b"Photoshop 3.0\0"),
    ]
    head = jpeg_tiles.read_segments(plain)
    assert head is not None
    exif_at = next(s for s in head if s.marker == 0xE1)
    data = b"".join([b"\xff\xd8", *own, plain[exif_at.at :], b"a movie"])
    result = rewrite(data)
    assert isinstance(result, bytes)
    assert segments(result) == segments(data) == [*own, *segments(plain)[1:]]
    assert result.endswith(b"\xff\xd9a movie")
    assert Image.open(io.BytesIO(result)).getexif()[0x0112] == 6
    assert np.array_equal(shown(result), shown(data))


def test_comments_between_scans_are_kept(tool: str) -> None:
    data = made("4:2:0", 203, 97, progressive=True)
    assert data.count(b"\xff\xda") > 3
    at = data.rindex(b"\xff\xc4")
    result = rewrite(patched(data, at, segment(0xFE, b"late"), 0))
    assert isinstance(result, bytes)
    assert segments(result)[-1] == segment(0xFE, b"late")
    assert np.array_equal(shown(result), shown(data))


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize(
    "late",
    [
        segment(0xEE, b"Adobe\0\x64" + bytes(5)),  # in front it would say RGB
        segment(0xE0, b"JFIF\0\1\2" + bytes(7)),
        segment(0xE1, b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6" + bytes(6)),
    ],
    ids=["colours", "jfif", "orientation"],
)
def test_what_no_decoder_heeds_does_not_come_to_be_heeded(
    tool: str, late: bytes, progressive: bool
) -> None:
    plain = patched(made("4:2:0", 203, 97, progressive=progressive), 2, b"", 18)
    assert segments(plain) == [] and isinstance(rewrite(plain), bytes)
    at = plain.rindex(b"\xff\xc4" if progressive else b"\xff\xd9")
    assert rewrite(patched(plain, at, late, 0)) == Unfit("metadata behind the first scan")
    early = rewrite(patched(plain, 2, late, 0))
    assert isinstance(early, bytes) and segments(early) == [late]


def test_no_jfif_header_is_invented(tool: str) -> None:
    plain = made("4:2:0", 203, 97)
    data = patched(plain, 2, b"", 18)  # as some cameras write it: neither JFIF nor EXIF
    assert segments(data) == []
    result = rewrite(data)
    assert isinstance(result, bytes) and segments(result) == []
    assert np.array_equal(shown(result), shown(data))


def test_rgb_stays_rgb(tool: str) -> None:
    data = encoded(scene(203, 97), "JPEG", keep_rgb=True, subsampling=0)
    result = rewrite(data)
    assert isinstance(result, bytes)
    assert segments(result) == segments(data)
    assert np.array_equal(shown(result), shown(data))


def unfinished(data: bytes, scans: int) -> bytes:
    """A progressive file without its last scans."""
    at = -1
    for _ in range(scans):
        at = data.rindex(b"\xff\xda", 0, at)
    return data[:at] + b"\xff\xd9"


UNFIT = {
    "a PNG": "not a JPEG",
    "nothing": "not a JPEG",
    "CMYK": "CMYK",
    "12 bits": "not 8 bits",
    "arithmetic": "arithmetic coding",
    "lossless": "lossless or hierarchical",
    "several": "several pictures",
    "small": "too small",
    "narrow": "too small",
    "few tiles": "too small",
    "huge": "too large",
    "large for its bytes": "damaged",
    "cut": "damaged",
    "cut, with an end": "damaged",
    "no end": "damaged",
    "progressive, cut": "damaged",
    "progressive, unfinished": "damaged",
    "progressive, only its start": "damaged",
    "no frame": "damaged",
    "frame too short": "damaged",
    "wrong codes": "damaged",
}


@functools.cache
def unfit_files() -> dict[str, bytes]:
    size = (203, 97)
    plain, progressive = made("4:2:0", *size), made("4:2:0", *size, progressive=True)
    sof, half = plain.index(b"\xff\xc0"), plain[: len(plain) // 2]
    return {
        "a PNG": encoded(scene(*size), "PNG"),
        "nothing": b"",
        "CMYK": encoded(scene(*size).convert("CMYK"), "JPEG"),
        "12 bits": patched(plain, sof + 4, b"\x0c"),
        "arithmetic": run("cjpeg", "-arithmetic", data=encoded(scene(*size), "PPM")),
        "lossless": patched(plain, sof, b"\xff\xc3"),
        "several": encoded(scene(*size), "MPO", save_all=True, append_images=[scene(*size)]),
        "small": made("4:4:4", 127, 128),
        "narrow": made("4:2:0", 15, 2000),
        "few tiles": made("4:1:0", 992, 48),
        "huge": patched(plain, sof + 5, b"\xff\xff\xff\xff"),
        "large for its bytes": patched(plain, sof + 5, b"\x20\0\x1f\0"),
        "cut": half,
        "cut, with an end": half + b"\xff\xd9",
        "no end": plain[:-2],
        "progressive, cut": progressive[:-500],
        "progressive, unfinished": unfinished(progressive, 1),
        "progressive, only its start": unfinished(progressive, 8),
        "no frame": patched(plain, sof, b"\xff\xe9"),
        "frame too short": patched(plain, sof + 2, b"\0\x0e" + plain[sof + 4 : sof + 16], 17),
        "wrong codes": patched(plain, len(plain) - 900, b"\xfe" * 300),
    }


@pytest.mark.parametrize("name", UNFIT)
def test_what_cannot_be_rewritten_says_why(name: str, tool: str) -> None:
    found = rewrite(unfit_files()[name])
    assert isinstance(found, Unfit) and found.reason == UNFIT[name]
    if name == "large for its bytes":  # seen before memory is taken for all these pixels
        assert "too few bytes for 7936 x 8192" in found.detail


def test_unfinished_progressive_files_would_look_different() -> None:
    """Why they are left: decoders smooth what was not sent, and take the rewritten file as sent."""
    data = unfinished(made("4:2:0", 203, 97, progressive=True), 8)
    rewritten = run("jpegtran", data=data)
    assert not np.array_equal(shown(rewritten), shown(data))


def test_the_limit_of_pixels_is_checked_before_memory_is_taken(tool: str) -> None:
    data = made("4:2:0", 203, 97)
    assert isinstance(rewrite(data, max_pixels=203 * 97), bytes)
    found = rewrite(data, max_pixels=203 * 97 - 1)
    assert isinstance(found, Unfit) and found.reason == "too large" and "203 x 97" in found.detail


def test_many_scans_are_refused_before_work(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = made("4:2:0", 203, 97, progressive=True)
    monkeypatch.setattr(jpeg_rewrite, "_MAX_SCANS", data.count(b"\xff\xda") - 1)
    found = rewrite(data)
    assert isinstance(found, Unfit) and "scans" in found.detail


@pytest.mark.parametrize(
    ("mcus", "interval"),
    [(63, 7), (32, 8), (47, 47), (42, 7), (38, 19), (60, 6), (50, 10), (24, 8), (3, 3), (12, 6)],
)
def test_the_interval_is_the_divisor_nearest_to_8(mcus: int, interval: int) -> None:
    assert interval_for(mcus) == interval


def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A jpegtran of our own, and no core."""
    path = tmp_path / "jpegtran"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(native, "core", None)


def test_a_rewrite_that_changes_coefficients_is_refused(tmp_path, monkeypatch) -> None:
    data = made("4:2:0", 203, 97)
    other = tmp_path / "other.jpg"
    image = shown(data)
    image[40:48, 40:48] ^= 8
    other.write_bytes(
        run(
            "cjpeg",
            "-quality",
            "85",
            "-restart",
            "13B",
            data=encoded(Image.fromarray(image), "PPM"),
        )
    )
    real = shutil.which("jpegtran")
    script = f'case "$*" in *restart*) cat >/dev/null; cat {other};; *) exec {real} "$@";; esac'
    program(tmp_path, monkeypatch, script)
    assert rewrite(data) == Unfit("damaged", "the rewritten picture would differ")


def test_what_jpegtran_complains_of_is_damage(tmp_path, monkeypatch) -> None:
    real = shutil.which("jpegtran")
    program(tmp_path, monkeypatch, f'echo "Corrupt\033 data" >&2; exec {real} "$@"')
    found = rewrite(made("4:2:0", 203, 97))
    assert found == Unfit("damaged", "Corrupt\\x1b data")  # and nothing that steers a terminal
    program(tmp_path, monkeypatch, "exit 3")
    assert rewrite(made("4:2:0", 203, 97)) == Unfit("damaged", "jpegtran: 3")


def test_a_jpegtran_that_writes_progressive_files_is_none_for_this(tmp_path, monkeypatch) -> None:
    program(tmp_path, monkeypatch, f'exec {shutil.which("jpegtran")} -progressive "$@"')
    with pytest.raises(DependencyError, match="another kind of JPEG"):
        rewrite(made("4:2:0", 203, 97))


def test_a_jpegtran_that_takes_too_long_is_ended(tmp_path, monkeypatch) -> None:
    program(tmp_path, monkeypatch, "exec tail -f /dev/null")
    monkeypatch.setattr(jpeg_rewrite, "_TIME_LIMIT_S", 0.05)
    found = rewrite(made("4:2:0", 203, 97))
    assert isinstance(found, Unfit) and "more than 0.05 s" in found.detail


def test_without_core_and_jpegtran_the_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(native, "core", None)
    monkeypatch.setenv("PATH", "/nowhere")
    data = made("4:2:0", 203, 97)
    for call in (jpeg_rewrite.rewriter, lambda: rewrite(data)):
        with pytest.raises(DependencyError, match="libjpeg-turbo-progs"):
            call()


def test_photographs_keep_their_pixels_and_cuts_show_them(tool: str) -> None:
    files = sorted(IMAGENET.glob("*/*"))[::60]
    if not files:
        pytest.skip(f"{IMAGENET} is not here: real photographs are NOT tested")
    for number, file in enumerate(files):
        data = file.read_bytes()
        result = rewrite(data)
        assert isinstance(result, bytes)
        assert segments(result) == segments(data)
        whole = shown(data)
        assert np.array_equal(shown(result), whole)
        found = tiles(result)
        assert isinstance(found, Tiles)
        draw = random.Random(number)
        left, top = draw.randrange(found.width), draw.randrange(found.height)
        right, bottom = draw.randint(left + 1, found.width), draw.randint(top + 1, found.height)
        cut = found.cut((left, top, right, bottom))
        x, y = left - cut.left, top - cut.top
        assert np.array_equal(
            shown(cut.data)[y : y + bottom - top, x : x + right - left],
            whole[top:bottom, left:right],
        )
