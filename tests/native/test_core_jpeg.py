"""The compiled core's work on many JPEGs at once, on damaged ones, and by several threads."""

import io
import random
import struct
import subprocess
import sys
import tempfile
import threading

import numpy as np
import pytest
from PIL import Image
from support.core_jpegs import (
    FILTERS,
    LIMIT,
    by_pil,
    core,
    cropped,
    decoded,
    encoded_grey,
    picture,
    tile_jpeg,
)
from support.jpegs import segment

from shardio import native

pytestmark = pytest.mark.skipif(core is None, reason=f"no compiled core: {native.missing}")


# Many small ones ------------------------------------------------------------------------------


def test_many_are_pils_pixels():
    images = [by_pil(32, 24, quality=q, subsampling=q % 3) for q in range(40, 95)]
    images[7:9] = [encoded_grey(32, 24), by_pil(32, 24, progressive=True)]
    images[20:22] = [by_pil(32, 24, optimize=True), by_pil(32, 24, restart_marker_blocks=1)]
    out = np.zeros((len(images) + 1, 24, 32, 3), np.uint8)
    views = [memoryview(d) if i % 2 else bytearray(d) for i, d in enumerate(images)]
    assert core.decode_many(views, out) == len(images)
    for data, row in zip(images, out, strict=False):
        assert (row == decoded(data)).all()
    assert not out[-1].any()
    assert core.decode_many([], out) == 0


def test_many_stop_at_the_first_that_is_not_plain():
    good = by_pil(32, 24)
    png = io.BytesIO()
    Image.fromarray(picture(32, 24)).save(png, "PNG")
    for bad in (
        by_pil(24, 32), by_pil(32, 25), png.getvalue(), b"", good[:-2], good[:400],
        good[:-9] + b"\xff\xd9", by_pil(31, 24),
    ):  # fmt: skip
        for place in (0, 1, 5):
            blobs = [good] * place + [bad, good]
            out = np.zeros((len(blobs), 24, 32, 3), np.uint8)
            assert core.decode_many(blobs, out) == place
            assert not out[place + 1 :].any()
            assert (out[:place] == decoded(good)).all()


def test_no_image_finds_the_tables_of_the_one_before():
    first = by_pil(32, 24, quality=30)
    second = by_pil(32, 24, quality=95)
    for marker in (b"\xff\xdb", b"\xff\xc4"):
        bare = second
        while marker in bare:
            at = bare.index(marker)
            bare = bare[:at] + bare[at + 2 + int.from_bytes(bare[at + 2 : at + 4], "big") :]
        out = np.zeros((2, 24, 32, 3), np.uint8)
        done = core.decode_many([first, bare], out)
        if done == 2:  # libjpeg-turbo has tables of its own for images of motion JPEG
            assert marker == b"\xff\xc4"
            alone = np.zeros((1, 24, 32, 3), np.uint8)
            assert core.decode_many([bare], alone) == 1
            assert (alone[0] == out[1]).all()


def test_one_table_of_quantisation_is_not_taken_for_two():
    """Precision 2 is 16 bits to libjpeg: 128 bytes of table 0, not 64 and then table 1."""
    double = bytearray(by_pil(32, 24))
    first, second = (double.index(b"\xff\xdb\0\x43" + bytes([k])) for k in (0, 1))
    table = b"\x20" + bytes(64) + b"\1" + bytes(63) + b"\0" + b"\x08" * 64
    del double[second : second + 69]
    double[first : first + 69] = b"\xff\xdb" + struct.pack(">H", len(table) + 2) + table
    out = np.zeros((2, 24, 32, 3), np.uint8)
    assert core.decode_many([double], out) == 0
    assert core.decode_many([by_pil(32, 24), double], out) == 1


def test_many_wrong_arguments_raise():
    good = by_pil(32, 24)
    out = np.empty((2, 24, 32, 3), np.uint8)
    frozen = out.copy()
    frozen.flags.writeable = False
    for wrong in (out[:, ::-1], frozen, out[0], out[..., :2].copy(), out[:1], out.astype("i2")):
        with pytest.raises((ValueError, BufferError)):
            core.decode_many([good, good], wrong)
    for blobs in ([good, None], [good, "text"], 5, [good, np.zeros((4, 4), np.uint8)[:, ::2]]):
        with pytest.raises((TypeError, ValueError, BufferError)):
            core.decode_many(blobs, out)


def crops(blobs, boxes, flips, out, interpolation="bilinear"):
    boxes, flips = np.array(boxes, np.float32).reshape(-1, 4), np.array(flips, bool)
    return list(core.crop_many(blobs, boxes, flips, out, interpolation, LIMIT))


def test_many_crops_are_those_of_one_by_one():
    """Whatever came before: libjpeg keeps tables, and some images lack theirs, or fail."""
    kinds = [
        by_pil(97, 61), by_pil(97, 61, quality=20, optimize=True), by_pil(64, 80, progressive=True),
        encoded_grey(97, 61), tile_jpeg(by_pil(97, 61), 7), by_pil(50, 50, subsampling=0),
        tile_jpeg(encoded_grey(97, 61), 13), by_pil(97, 61, restart_marker_blocks=1),
        by_pil(97, 61)[:-40] + b"\xff\xd9", by_pil(64, 80)[:300], b"", b"no image",
    ]  # fmt: skip
    kinds.append(kinds[0].replace(b"\xff\xdb", b"\xff\xed"))  # a JPEG without its tables
    draw, made = random.Random(7), set()
    for interpolation in FILTERS:
        blobs = [draw.choice(kinds) for _ in range(60)]
        boxes = []
        for data in blobs:
            width, height = (core.header(data) or (9, 9))[:2]
            left, top = draw.uniform(0, width - 2), draw.uniform(0, height - 2)
            boxes.append((left, top, draw.uniform(left + 1, width), draw.uniform(top + 1, height)))
        flips = [draw.random() < 0.5 for _ in blobs]
        out = np.full((61, 20, 17, 3), 7, np.uint8)
        done = crops(blobs, boxes, flips, out, interpolation)
        for data, box, flip, row, one in zip(blobs, boxes, flips, out, done, strict=False):
            alone = np.full((20, 17, 3), 7, np.uint8)
            assert cropped(data, box, alone[:, ::-1] if flip else alone, interpolation) == one
            assert (row == alone).all()
            made.add((kinds.index(data), one))
        assert (out[60] == 7).all()
    assert {(i, 1) for i in range(8)} | {(i, 0) for i in range(9, 13)} <= made
    assert crops([], [], [], out) == []


def test_wrong_arguments_of_many_crops_raise():
    good, box = by_pil(32, 24), (0, 0, 32, 24)
    out = np.full((2, 8, 9, 3), 7, np.uint8)
    frozen = out.copy()
    frozen.flags.writeable = False
    for wrong in (out[:, ::-1], frozen, out[0], out[..., :2].copy(), out[:1], out.astype("i2")):
        with pytest.raises((ValueError, BufferError)):
            crops([good] * 2, [box] * 2, [0] * 2, wrong)
    for blobs, boxes, flips in (([good] * 2, [box], [0] * 2), ([good], [box], [0] * 2),
                                ([good, None], [box] * 2, [0] * 2), (5, [box], [0])):  # fmt: skip
        with pytest.raises((TypeError, ValueError)):
            crops(blobs, boxes, flips, out)
    with pytest.raises(ValueError, match="no interpolation"):
        crops([good], [box], [0], out, "nearest")
    beyond = [(0, 0, 33, 24), (-1, 0, 9, 9), (5, 5, 5, 9), (0, 0, float("nan"), 9)]
    for wrong_box in beyond:
        assert crops([good, good], [wrong_box, box], [0, 1], out)[:2] == [0, 1]
        assert (out[0] == 7).all() and not (out[1] == 7).all()
    with pytest.raises(TypeError):
        core.headers([good, None])


def test_headers_are_those_of_one_by_one():
    blobs = [by_pil(97, 61), encoded_grey(31, 8), b"", b"no image", by_pil(5, 6)[:30]]
    blobs.append(
        by_pil(9, 7, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0")
    )
    found = np.frombuffer(core.headers(blobs), np.uint32).reshape(-1, 3).tolist()
    assert found == [list(core.header(data) or (0, 0, 0)) for data in blobs]
    assert found[0] == [97, 61, 1] and found[2] == [0, 0, 0] and found[-1][2] == 6


# Damage ---------------------------------------------------------------------------------------


def damaged(data, draw):
    """Flipped, cut, doubled or moved bytes; most often where the headers are."""
    data = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(len(data) if draw.random() < 0.5 else min(len(data), 700))
        kind = draw.randrange(5)
        if kind == 0:
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[at] = draw.choice((0, 0xFF, 0xD9, 0xDA, draw.randrange(256)))
        elif kind == 2:
            del data[at : at + draw.randrange(1, 9)]
        elif kind == 3:
            data[at:at] = data[at : at + draw.randrange(1, 40)]
        else:
            data[at:] = data[at : draw.randrange(at, len(data)) + 1]
        if not data:
            return b"\xff"
    return bytes(data)


def try_all(data, draw, outs):
    small, many = outs
    header = core.header(data)
    width, height = header[:2] if header else (40, 30)
    w, h = draw.randint(1, width), draw.randint(1, height)
    left, top = draw.randint(0, width - w), draw.randint(0, height - h)
    box = left, top, left + w, top + h
    cropped(data, box, small, draw.choice(FILTERS), 1, 2**20)
    scale = draw.choice((2, 4, 8))
    cropped(data, tuple(v / scale for v in box), small, draw.choice(FILTERS), scale, 2**20)
    core.rewrite(data, draw.randint(0, 8), 2**20)
    core.decode_many([data, data], many)
    crops([data, data], [box, box], [0, 1], np.empty((2, 20, 17, 3), np.uint8))


def sources():
    plain = by_pil(97, 61)
    return [
        plain,
        tile_jpeg(plain, 7),
        tile_jpeg(encoded_grey(97, 61), 13),
        by_pil(97, 61, progressive=True),
        by_pil(97, 61, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0"),
    ]


def test_no_damage_brings_the_core_down():
    draw = random.Random(5)
    outs = np.empty((20, 17, 3), np.uint8), np.empty((2, 61, 97, 3), np.uint8)
    for data in sources():
        for _ in range(150):
            try_all(damaged(data, draw), draw, outs)
        for size in range(0, len(data), 61):
            try_all(data[:size], draw, outs)


def test_what_the_core_accepts_of_damaged_tiles_is_what_pil_shows():
    """A wrong marker may not move tiles: then the whole is decoded, or it is left to PIL."""
    data = tile_jpeg(by_pil(160, 96), 5)
    whole = decoded(data)
    start = data.index(b"\xff\xda")
    marks = [
        i for i in range(start, len(data) - 1) if data[i] == 255 and 0xD0 <= data[i + 1] < 0xD8
    ]
    assert len(marks) == 11
    out = np.empty((96, 160, 3), np.uint8)
    small = np.empty((16, 16, 3), np.uint8)
    for i, at in enumerate(marks):
        for changed in (
            data[:at] + data[at + 2 :],  # missing
            data[:at] + data[at : at + 2] + data[at:],  # doubled
            data[: at + 1] + bytes([0xD0 | (i + 1) % 8]) + data[at + 2 :],  # another number
        ):
            assert not cropped(changed, (0, 0, 160, 96), out)
            assert not cropped(changed, (144, 80, 160, 96), small)
    longer = data[:-2] + b"\xff\xd3" + data[-2:]
    assert not cropped(longer, (0, 0, 160, 96), out) or (out == whole).all()


def test_only_the_tiles_under_the_box_are_read():
    data = tile_jpeg(by_pil(480, 320), 5)
    whole = decoded(data)
    start = int.from_bytes(data[(at := data.index(b"\xff\xda") + 2) : at + 2], "big") + at
    ends = [i for i in range(start, len(data) - 1) if data[i] == 255 and data[i + 1]]
    starts = [start, *(i + 2 for i in ends[:-1])]
    assert len(ends) == 6 * 20
    out = np.empty((40, 90, 3), np.uint8)
    for column, row in ((0, 0), (5, 19), (2, 9), (0, 11), (5, 3)):
        left, top = min(column * 80, 390), min(row * 16, 280)
        kept = bytearray(data)
        for tile in range(120):
            x, y = tile % 6 * 80, tile // 6 * 16
            if x > left + 94 or x + 80 < left - 4 or y > top + 44 or y + 16 < top - 4:
                kept[starts[tile] : ends[tile]] = bytes(ends[tile] - starts[tile])
        box = left, top, left + 90, top + 40
        assert cropped(bytes(kept), box, out)
        assert (out == whole[top : top + 40, left : left + 90]).all()
        assert not cropped(bytes(kept), (0, 0, 480, 320), out)


def resident_kib():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4


@pytest.mark.slow
def test_ten_thousand_damaged_images_leak_nothing():
    draw = random.Random(6)
    images = sources()
    outs = np.empty((20, 17, 3), np.uint8), np.empty((2, 61, 97, 3), np.uint8)
    for i in range(2000):
        try_all(damaged(images[i % 5], draw), draw, outs)
    before = resident_kib()
    for i in range(10_000):
        try_all(damaged(images[i % 5], draw), draw, outs)
    assert resident_kib() - before < 4096


def test_no_memory_is_an_error_and_no_damage():
    """In a process of its own, with ever less memory: an abort would be seen."""
    with_limits = """
import os, resource, sys
from shardio import native
data, found = open(sys.argv[1], "rb").read(), set()
for room in range(1 << 20, 16 << 20, 1 << 18):
    child = os.fork()
    if not child:
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
        try:
            os._exit(0 if isinstance(native.core.rewrite(data, 8), bytes) else 2)
        except MemoryError:
            os._exit(1)
    found.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(sorted(found))
"""
    noise = np.random.default_rng(1).integers(0, 256, (700, 900, 3), np.uint8)
    with tempfile.NamedTemporaryFile(suffix=".jpg") as file:
        Image.fromarray(noise).save(file, quality=97)
        file.flush()
        command = [sys.executable, "-c", with_limits, file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[0, 1]\n", done.stderr


@pytest.mark.parametrize("marker", ["frame", "scan"])
def test_a_count_that_changes_while_it_is_read_is_not_believed(marker):
    """Of shared memory. The header ends where memory ends, so that reading on would be seen."""
    with_writer = """
import ctypes, mmap, os, signal, sys
from shardio import native
header, at = bytes.fromhex(sys.argv[1]), int(sys.argv[2])
memory, start = mmap.mmap(-1, 2 * mmap.PAGESIZE), mmap.PAGESIZE - len(header)
memory[start : mmap.PAGESIZE] = header
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + mmap.PAGESIZE), mmap.PAGESIZE, 0)
parent, child = os.getpid(), os.fork()
if not child:
    while os.getppid() == parent:
        for _ in range(1000):
            memory[start + at] = 255
            memory[start + at] = 3
    os._exit(0)
data, found = memoryview(memory)[start : mmap.PAGESIZE], set()
for _ in range(3_000_000):
    found.add(native.core.header(data))
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
print(found)
"""
    parts = b"".join(bytes([i, 0x11, 0]) for i in (1, 2, 3))
    header = b"\xff\xd8" + segment(0xC0, b"\x08\0\x10\0\x10\3" + parts)
    at = header.index(b"\3\1")
    if marker == "scan":
        at = len(header) + 4
        header += segment(0xDA, b"\3\1\0\2\0\3\0\0\x3f\0")
    command = [sys.executable, "-c", with_writer, header.hex(), str(at)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "None" in done.stdout


def test_threads_share_nothing():
    images = [by_pil(120, 90, quality=q) for q in (40, 60, 80, 95)]
    expected = [core.rewrite(d, 4) for d in images]
    wrong = []

    def work(k):
        for _ in range(25):
            out = np.empty((40, 40, 3), np.uint8)
            if core.rewrite(images[k], 4) != expected[k] or not cropped(
                images[k], (0, 0, 40, 40), out
            ):
                wrong.append(k)
            if not (out == decoded(images[k])[:40, :40]).all():
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
