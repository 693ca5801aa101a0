"""The compiled core's lossless rewrite, beside what jpegtran makes of the same bytes."""

import io
import re
import struct

import numpy as np
import pytest
from PIL import Image
from support.core_jpegs import (
    SAMPLINGS,
    by_pil,
    core,
    cropped,
    decoded,
    needs_cjpeg,
    run,
    tile_jpeg,
    written,
)
from support.jpegs import segment

from shardio import native

pytestmark = pytest.mark.skipif(core is None, reason=f"no compiled core: {native.missing}")


@needs_cjpeg
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("-progressive",),
        ("-optimize", "-restart", "1"),
        ("-quality", "1"),  # tables of quantisation have 16 bits
        ("-rgb",),  # all components have the same Huffman tables
        ("-rgb", "-progressive"),
    ],
    ids=" ".join,
)
def test_rewrite_is_what_jpegtran_makes(sampling, options):
    for width, height in ((161, 83), (16, 16), (1, 1), (64, 200)):
        data = written(width, height, sampling, *options)
        assert b"\xff\xc1" in data or "-quality" not in options
        for interval in (0, 1, 3, 8):
            tran = ["-optimize", "-copy", "all", "-restart", f"{interval}B"]
            assert core.rewrite(data, interval) == run("jpegtran", *tran, data=data)


def by_hand(ac, *blocks, tail=b""):
    """A grey JPEG, 8 pixels high, that is coded as no program does it.

    ac: AC symbols that have codes. blocks: of each its symbols, DC first, and the bits behind each.
    tail: what stands before EOI.
    """
    dc, coded = bytes(range(12)), ""
    for block in blocks:
        for symbols, (symbol, bits) in zip([dc, *[ac] * len(block)], block, strict=False):
            coded += f"{symbols.index(symbol):08b}{bits}"  # all codes have 8 bits
    coded += "1" * (-len(coded) % 8)
    scan = int(coded, 2).to_bytes(len(coded) // 8, "big").replace(b"\xff", b"\xff\0")
    tables = [bytes(7) + bytes([len(s)]) + bytes(8) + s for s in (dc, ac)]
    return b"".join(
        [
            b"\xff\xd8" + segment(0xDB, b"\0" + bytes(range(1, 65))),
            segment(0xC0, b"\x08\0\x08\0" + bytes([8 * len(blocks)]) + b"\1\1\x11\0"),
            segment(0xC4, b"\0" + tables[0] + b"\x10" + tables[1]),
            segment(0xDA, b"\1\1\0\0\x3f\0") + scan + tail + b"\xff\xd9",
        ]
    )


AC = b"\x00\xf0\x01\x11\x22\x31\x3a\x10\xe1"
DC = (3, "101")
ODD = {
    "no AC": [(0, "")],
    "zeros before the end": [(0xF0, ""), (0x01, "1"), (0xF0, ""), (0xF0, ""), (0, "")],
    "zeros, then a value": [(0xF0, ""), (0xF0, ""), (0x22, "01"), (0, "")],
    "the last one": [(0xF0, ""), (0xF0, ""), (0xF0, ""), (0xE1, "0")],
    "the last one is 0": [(0xF0, ""), (0xF0, ""), (0xF0, ""), (0, "")],
    "zeros beyond the end": [(0x01, "1"), *[(0xF0, "")] * 4],
    "another end": [(0x22, "10"), (0x10, "")],
    "large": [(0x3A, "1111111111"), (0x3A, "0000000000"), (0, "")],
    "all": [(0x01, "1")] * 63,
    "too many": [(0x31, "1")] * 16,
}


@needs_cjpeg
@pytest.mark.parametrize("name", ODD)
def test_what_is_coded_in_odd_ways_is_rewritten_as_jpegtran_does(name):
    data = by_hand(AC, [DC, *ODD[name]])
    made = core.rewrite(data, 1)
    if name == "too many":
        assert "damaged" in made
        return
    assert (decoded(made) == decoded(data)).all()
    bare = run("jpegtran", "-optimize", "-copy", "none", "-restart", "1B", data=data)
    assert bare.startswith(b"\xff\xd8\xff\xe0\0\x10JFIF")
    assert made == bare[:2] + bare[20:]  # what it makes up
    # Codes for values that 8 bits cannot have: nothing uses them, but libjpeg is asked.
    wide = by_hand(AC + b"\x0b", [DC, *ODD[name]])
    assert core.rewrite(wide, 1) == made
    for tail in (b"\xff", b"\xff\xd0", segment(0xFE, b"late"), segment(0xDB, b"\1" + bytes(64))):
        assert core.rewrite(by_hand(AC, [DC, *ODD[name]], tail=tail), 1) == made


def test_what_8_bits_cannot_hold_is_damage():
    said = re.compile(r"damaged: DCT coefficient .*out of range")  # 3.0 has more words than 2.1
    assert said.fullmatch(core.rewrite(by_hand(AC + b"\x0b", [DC, (0x0B, "1" * 11), (0, "")]), 1))
    data = by_hand(AC, *[[(11, "1" * 11), (0, "")]] * 2)
    assert isinstance(core.rewrite(data, 0), bytes)  # 2047, and 2047 more
    assert said.fullmatch(core.rewrite(data, 1))


def test_two_scans_or_codes_of_ones_are_damage():
    data = by_hand(AC, [DC, (0, "")])
    tables, scan = data.index(b"\xff\xc4"), data.index(b"\xff\xda")
    assert "damaged" in core.rewrite(data[:-2] + data[scan:], 1)
    two = bytes([2]) + bytes(15) + b"\0\1"  # the codes 0 and 1, but 1 is not to be used
    ones = segment(0xC4, b"\0" + two + b"\x10" + two)
    bare = data[:tables] + ones + data[scan : scan + 10] + b"\x3f\xff\xd9"
    assert "Huffman table" in core.rewrite(bare, 1)


@needs_cjpeg
@pytest.mark.parametrize("interval", [1, 3])
def test_fill_bytes_before_markers_are_no_damage(interval):
    """Any marker may have some: T.81, B.1.1.2."""
    plain = written(100, 50, "2x2", "-restart", f"{interval}B")
    scan = plain.index(b"\xff\xda")
    coded, marks = re.subn(rb"\xff(?=[\xd0-\xd9])", b"\xff" * 3, plain[scan:])
    data = plain[:scan] + coded
    assert marks >= 9
    assert core.rewrite(data, 7) == core.rewrite(plain, 7)
    out = np.empty((50, 100, 3), np.uint8)
    assert cropped(data, (0, 0, 100, 50), out) and (out == decoded(plain)).all()


@needs_cjpeg
def test_a_scan_of_all_may_stand_between_others(tmp_path):
    """libjpeg reads it, and so must what reads a scan of all components in its place."""
    (tmp_path / "scans").write_text("0;\n1;\n2;\n")
    whole = written(70, 45, "2x2")
    apart = written(70, 45, "2x2", "-scans", str(tmp_path / "scans"))
    scans = [i for i in range(len(apart)) if apart[i : i + 2] == b"\xff\xda"]
    assert len(scans) == 3 and apart[: scans[0]] == whole[: scans[0]]
    data = apart[: scans[1]] + whole[scans[0] : -2] + apart[scans[1] :]
    assert core.rewrite(data, 5) == run("jpegtran", "-optimize", "-restart", "5B", data=data)
    out = np.empty((1, 45, 70, 3), np.uint8)
    assert core.decode_many([data], out) == 1
    assert (out[0] == decoded(data)).all() and (out[0] == decoded(whole)).all()


@needs_cjpeg
def test_blocks_beyond_the_rim_are_written_empty():
    whole = written(32, 32, "2x2")
    size = whole.index(b"\xff\xc0") + 5
    for height, width in ((32, 24), (24, 32), (17, 17)):
        data = whole[:size] + struct.pack(">HH", height, width) + whole[size + 4 :]
        tran = ["-optimize", "-copy", "all", "-restart", "1B"]
        assert core.rewrite(data, 1) == run("jpegtran", *tran, data=data)


def test_rewrite_keeps_pixels_and_metadata():
    exif = Image.Exif()
    exif[0x010E] = "a" * 3000
    data = by_pil(99, 70, exif=exif, icc_profile=bytes(range(256)) * 300, comment=b"hi", dpi=(7, 9))
    made = tile_jpeg(data, 7)
    old, new = (Image.open(io.BytesIO(d)) for d in (data, made))
    assert np.array_equal(old, new)
    for image in (old, new):
        image.info.pop("progressive", None)
    assert old.info == new.info
    assert made.count(b"\xff\xdd") == 1


def test_rewrite_says_why_not():
    data = by_pil(64, 64)
    at = data.index(b"\xff\xc0")
    cmyk = io.BytesIO()
    Image.new("CMYK", (64, 64)).save(cmyk, "JPEG")

    def patched(offset, value):
        return data[: at + offset] + value + data[at + offset + len(value) :]

    for bad, words in (
        (b"", "no JPEG"),
        (b"\x89PNG", "no JPEG"),
        (cmyk.getvalue(), "CMYK"),
        (patched(4, b"\x0c"), "8 bits"),
        (patched(1, b"\xc9"), "arithmetic"),
        (patched(1, b"\xc3"), "lossless"),
        (patched(5, b"\xff\xff\xff\xff"), "max_pixels"),
        (patched(5, b"\x3f\xff\x3f\xff"), "fewer bytes"),
        (data[:-2], "damaged"),
        (data[: len(data) // 2], "damaged"),
        (b"\xff\xd8\xff\xe2\0\x06MPF\0" + data[2:], "several"),
    ):
        said = core.rewrite(bad, 4)
        assert isinstance(said, str)
        assert words in said
    assert isinstance(core.rewrite(data, 4, 64 * 64), bytes)
    assert "max_pixels" in core.rewrite(data, 4, 64 * 64 - 1)


@needs_cjpeg
def test_progressive_without_its_last_scans_is_not_rewritten():
    data = written(64, 64, "2x2", "-progressive")
    scans = [i for i in range(len(data) - 1) if data[i : i + 2] == b"\xff\xda"]
    assert len(scans) > 5
    starts = [data.rindex(b"\xff\xc4", 0, s) for s in scans[1:]]
    for start in starts:
        said = core.rewrite(data[:start] + b"\xff\xd9", 4)
        assert isinstance(said, str)


@needs_cjpeg
def test_hundreds_of_scans_are_refused(tmp_path):
    """Valid, but each is a pass over all coefficients."""
    (tmp_path / "scans").write_text("0: 0-0, 0, 0;\n0: 1-1, 0, 3;\n0: 1-1, 3, 2;\n")
    flat = b"P5\n8 8\n255\n" + bytes([99]) * 64
    three = run("cjpeg", "-grayscale", "-scans", str(tmp_path / "scans"), data=flat)
    marks = [i for i in range(len(three)) if three[i : i + 2] in (b"\xff\xc4", b"\xff\xda")]
    assert [three[i + 1] for i in marks] == [0xC4, 0xDA] * 3
    scans = three[marks[2] : marks[4]], three[marks[4] : -2]
    many = three[: marks[2]]
    for k in range(1, 64):
        for bits in (0x03, 0x32, 0x21, 0x10):
            scan = scans[bits > 3]
            at = scan.index(b"\xff\xda") + 7
            many += scan[:at] + bytes([k, k, bits]) + scan[at + 3 :]
    many += b"\xff\xd9"
    out = np.empty((1, 8, 8, 3), np.uint8)
    assert (decoded(many) == 99).all()
    assert core.rewrite(many, 2) == "damaged: more than 200 scans"
    assert not cropped(many, (0, 0, 8, 8), out[0])
    assert core.decode_many([many], out) == 0
