"""What the fuzzer found worth keeping (tests/fuzz), through the module's functions on every run.

fuzz.c has the layout of an input. Here Python and PIL are the oracle: what the core takes is what
they make of the same bytes, and what they cannot read it refuses. Nothing crashes.
"""

import io
import os
import shutil
import struct
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash
from PIL import Image

from shardio import native
from shardio.errors import DecodeError
from shardio.formats.sample import MAX_HEAD, Schema
from shardio.images.jpeg_tiles import tiles as find_tiles
from shardio.images.transforms import Transform

core: Any = native.core
pytestmark = pytest.mark.skipif(core is None, reason=f"no compiled core: {native.missing}")
reads = pytest.mark.skipif(native.records() is None, reason=f"core: {native.described()}")

FOLDER = Path(__file__).parent.parent / "fuzz"
FILTERS = ("box", "bilinear", "hamming", "bicubic", "lanczos")  # as core.h numbers them
KINDS = ("key", "int", "float", "bool", "str", "bytes")
LIMIT = 1 << 18


class Input:
    def __init__(self, data: bytes) -> None:
        self.left = data

    def take(self, size: int) -> bytes:
        taken, self.left = self.left[:size], self.left[size:]
        return taken

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")


def seeds(letter: str) -> Iterator[tuple[str, Input]]:
    found = sorted((FOLDER / "seeds").glob(f"{letter}-*"))
    assert found
    for path in found:
        data = path.read_bytes()
        assert data[:1] == letter.encode()
        yield path.name, Input(data[1:])


def by_pil(data: bytes) -> Any:
    """(H, W, 3) uint8, or None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of damaged EXIF
        try:
            with Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
                assert image.width * image.height <= LIMIT
                return np.asarray(image.convert("RGB"))
        except (OSError, SyntaxError, ValueError):
            return None


def test_the_seeds_stay_small() -> None:
    sizes = [path.stat().st_size for path in (FOLDER / "seeds").iterdir()]
    assert sum(sizes) < 200_000


# JPEGs ----------------------------------------------------------------------------------------


def test_headers() -> None:
    known = 0
    for name, given in seeds("p"):
        data, found = given.left, core.header(given.left)
        assert found is None or (min(found[:2]) > 0 and 0 <= found[2] <= 8), name
        tiled = find_tiles(data)
        assert tiled is None or (tiled.width, tiled.height) == (found or ())[:2], name
        if found and found[0] * found[1] <= LIMIT and (pixels := by_pil(data)) is not None:
            assert pixels.shape == (found[1], found[0], 3), name
            known += 1
    assert known


def test_rewrites_are_jpegtrans_or_refused() -> None:
    tool, made, refused = shutil.which("jpegtran"), 0, set()
    for name, given in seeds("w"):
        interval, data = given.number(2), given.left
        found = core.rewrite(data, interval, LIMIT)
        if isinstance(found, str):
            refused.add(found.partition(":")[0])
            continue
        made += 1
        assert (by_pil(found) == by_pil(data)).all(), name
        assert core.rewrite(found, interval, LIMIT) == found, name
        if tool is not None:
            arguments = ["-optimize", "-copy", "all", "-restart", f"{interval}B"]
            done = subprocess.run([tool, *arguments], input=data, capture_output=True)
            assert done.returncode == 0, name  # 2: there was a warning
            # Before the first DQT is what is kept; jpegtran leaves out JFIF's header before EXIF.
            table = b"\xff\xdb"
            assert done.stdout.partition(table)[2] == found.partition(table)[2], name
    assert made and {"damaged", "arithmetic"} <= refused


@pytest.mark.parametrize(
    "bits", [b"\0", b"\x2a" * 2, b"\xff\0", b"\xff\0" * 7, b"\x55" * 8, b"a" * 99]
)
@pytest.mark.parametrize("interval", [0, 3])
def test_bytes_too_many_behind_the_last_pixel_are_damage(bits: bytes, interval: int) -> None:
    # The core's own entropy decoder read them ahead, and they were lost without a word.
    out = io.BytesIO()
    Image.linear_gradient("L").resize((48, 40)).save(out, "JPEG")
    data = core.rewrite(out.getvalue(), interval)
    assert core.rewrite(data, 2).endswith(b"\xff\xd9")
    said = core.rewrite(data[:-2] + bits + data[-2:], 2)
    assert "extraneous bytes" in said


@dataclass(frozen=True)
class Fixed(Transform):
    box: tuple[float, float, float, float] = (0.0, 0.0, 1.0, 1.0)

    def _box(self, width: int, height: int, draw: int) -> Any:
        if not (self.box[2] <= width and self.box[3] <= height):
            raise DecodeError("the box lies outside")
        return self.box, False


def test_crops_are_pils_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = near = refused = 0
    for name, given in seeds("c"):
        kind, scale, layout, width, height = given.take(5).ljust(5, b"\0")
        whole = [given.number(2) for _ in range(4)]
        box = [float(v // 16) if not width else v / 16 for v in whole]
        for i, v in enumerate(whole):
            if v == 0xFFFF:
                box[i] = (1 if layout & 64 else -1) * float("nan" if layout & 128 else "inf")
        plain, scale, data = not width, 1 << scale % 4, given.left
        if plain:
            spans = box[2] - box[0], box[3] - box[1]
            width, height = (int(v) if 1 <= v < 4096 else 1 for v in spans)
        height = height or 1
        if width * height > LIMIT:
            continue
        axes = (width, height) if layout & 2 else (height, width)
        memory = np.full((*axes, 4 if layout & 1 else 3), 7, np.uint8)
        out = memory[:, :, :3]
        out = out.swapaxes(0, 1) if layout & 2 else out
        out = out[:, ::-1] if layout & 4 else out
        out = out[::-1] if layout & 8 else out
        interpolation = FILTERS[kind % 5]
        done = core.crop(data, box, out, interpolation, scale, LIMIT)
        assert (memory[:, :, 3:] == 7).all(), name
        if not done:
            assert (memory == 7).all(), name
            refused += 1
        if not done or scale > 1:
            continue
        with monkeypatch.context() as patch:
            patch.setattr(native, "core", None)
            fixed = Fixed(
                (height, width),
                (box[0], box[1], box[2], box[3]),
                interpolation=interpolation,
                upright=False,
                max_pixels=LIMIT,
            )
            try:
                pils = fixed(data)
            except DecodeError:
                # PIL reads all of it; the core no tile beside the box, and no line below.
                assert box != [0, 0, *core.header(data)[:2]], name
                continue
        most = 0 if plain else 2 if interpolation in ("bicubic", "lanczos") else 1
        assert np.abs(out.astype(int) - pils).max() <= most, name
        exact, near = exact + plain, near + (not plain)
    assert exact and near and refused


def test_many_are_pils_or_refused() -> None:
    found = set()
    for name, given in seeds("m"):
        width, height, count = given.number(1) + 1, given.number(1) + 1, given.number(1) % 8 + 1
        blobs = [given.take(given.number(2)) for _ in range(count - 1)]
        given.number(2)
        blobs.append(given.left)
        out = np.full((count, height, width, 3), 7, np.uint8)
        done = core.decode_many(blobs, out)
        assert 0 <= done <= count
        for data, row in zip(blobs[:done], out, strict=False):
            assert np.array_equal(by_pil(data), row), name
        assert (out[done + 1 :] == 7).all(), name
        found.add(done)
    assert 0 in found and len(found) > 2


# Records --------------------------------------------------------------------------------------


def seal(record: bytearray, seed: int, lying: bool) -> None:
    """As in fuzz.c."""
    if len(record) < 16:
        return
    record[8:12] = struct.pack("<I", len(record) - 16)
    if not lying:
        (head,) = struct.unpack_from("<I", record, 12)
        record[12:16] = struct.pack("<I", head % (len(record) - 15))
    record[:8] = struct.pack("<Q", xxhash.xxh3_64_intdigest(record[8:], seed))


def blob_of(record: bytes, seed: int) -> bytes | None:
    """What follows the head of a record, or None when it is not right."""
    if len(record) < 16:
        return None
    checksum, length, head = struct.unpack_from("<QII", record)
    right = xxhash.xxh3_64_intdigest(record[8:], seed) == checksum
    if not right or length != len(record) - 16 or head > min(length, MAX_HEAD):
        return None
    return record[16 + head :]


@reads
def test_records_are_pythons_or_refused(tmp_path: Path) -> None:
    seed, taken, gathered = 7 << 32, 0, 0
    for name, given in seeds("r"):
        count, mode = 1 + given.number(1) % 16, given.number(1)
        begins, row = given.number(1) % 32, 1 + given.number(1)
        offsets = [0]
        for _ in range(count):
            offsets.append(offsets[-1] + given.number(2) % 2048)
        numbers = [given.number(1) for _ in range(given.number(1) % 32)]
        numbers = [n - 256 if n > 127 else n for n in numbers]
        if mode & 2:
            which, offset = given.number(1) % 17, given.number(8)
            if which <= count:
                offsets[which] = offset - (offset >> 63 << 64)
        file = bytearray(given.left)
        for i in range(count):
            if mode & 1 and 0 <= offsets[i] <= offsets[i + 1] <= len(file):
                record = file[offsets[i] : offsets[i + 1]]
                seal(record, seed + i, bool(mode & 4))
                file[offsets[i] : offsets[i + 1]] = record
        (tmp_path / "file").write_bytes(file)

        expected: list[bytes] = []
        for n in numbers:
            if not (0 <= n < count and 0 <= offsets[n] <= offsets[n + 1] <= len(file)):
                break
            if (blob := blob_of(file[offsets[n] : offsets[n + 1]], seed + n)) is None:
                break
            expected.append(blob)
        begin = expected[0][:begins] if expected and len(expected[0]) > begins else b""
        if begin and mode & 8:
            row = len(expected[0]) - begins
        right = [blob for blob in expected if len(blob) == len(begin) + row]
        fits = next(
            (i for i, b in enumerate(expected) if not b.startswith(begin) or b not in right),
            len(expected),
        )
        out = np.zeros((len(numbers), row), np.uint8)
        rows = np.arange(len(numbers))[:: -1 if mode & 16 else 1].copy()
        places, wanted = np.array(offsets, np.int64), np.array(numbers, np.int64)
        descriptor = os.open(tmp_path / "file", os.O_RDONLY)
        try:
            sized = [
                offsets[n + 1] - offsets[n]
                for n in numbers
                if 0 <= n < count and 0 <= offsets[n] <= offsets[n + 1]
            ]
            if sum(v for v in sized if v < 1 << 32) < 1 << 24:  # else it asks for their memory
                assert core.blobs(descriptor, places, seed, wanted) == expected, name
            assert core.gather(descriptor, places, seed, wanted, begin, out, rows) == fits, name
        finally:
            os.close(descriptor)
        copied = b"".join(blob[len(begin) :] for blob in expected[:fits])
        assert out[rows].tobytes() == copied.ljust(out.size, b"\0"), name
        taken, gathered = taken + len(expected), gathered + fits
    assert taken and gathered


@reads
def test_values_are_pythons_or_left_to_it() -> None:
    taken = left = 0
    for name, given in seeds("v"):
        count = 1 + given.number(1) % 20
        kinds = [given.number(1) % 6 for _ in range(count)]
        mode, record = given.number(1), bytearray(given.left)
        if mode & 1:
            seal(record, 5, bool(mode & 4))
        names = ("__key__", *(f"field{i}" for i in range(1, count)))
        letters = bytes([b"kifbsB"[kind] for kind in (0, *kinds[1:])])
        ends = np.array([len(record)], np.int64)
        made = core.samples(bytes(record), ends, 5, names, letters)
        if b"k" in letters[1:]:
            continue  # more than one key is no schema
        try:
            body, head = bytes(record[16:]), struct.unpack_from("<I", record, 12)[0]
            assert blob_of(bytes(record), 5) is not None
            schema = Schema(list(zip(names, ["key", *(KINDS[k] for k in kinds[1:])], strict=True)))
            expected = [schema.decode(body, 0, head)]
        except (AssertionError, struct.error, TypeError, ValueError, msgpack.UnpackException):
            expected = []
        assert not made or repr(made) == repr(expected), name  # repr: NaN
        taken, left = taken + len(made), left + (not made)
    assert taken and left


@reads
def test_packed_places_are_taken_or_refused() -> None:
    taken = left = 0
    for _, given in seeds("o"):
        count, step = given.number(2), given.number(8)
        high, each, _ = given.number(1), given.number(1), given.number(8)
        data = struct.pack("<4Q", count, step, high, each) + given.left
        room = -(-count // 64) * (8 + 64 * (2 + high)) + 32
        if count and high in (0, 1, 8) and each in (1, 2) and room <= len(data):
            assert core.blobs(-1, data, 0, np.arange(-1, 200)) == []
            taken += 1
        else:
            with pytest.raises(ValueError):
                core.blobs(-1, data, 0, np.arange(2))
            left += 1
    assert taken and left


def test_copies() -> None:
    for name, given in seeds("k"):
        shift, size = given.number(1) % 64, given.number(2) % 4096
        size += (16 << 20) * (given.number(1) == 1)
        data = np.arange(size, dtype=np.uint32).astype(np.uint8)
        to = np.full(shift + size + 1, 7, np.uint8)
        core.copy(to[shift:-1], data)
        assert (to[:shift] == 7).all() and to[-1] == 7, name
        assert np.array_equal(to[shift:-1], data), name


@reads
def test_joined_files_are_pythons(tmp_path: Path) -> None:
    """What the core takes of a row is what Python decodes of its record."""
    taken = left = 0
    for name, given in seeds("j"):
        count = 1 + given.number(1) % 6
        kinds = [given.number(1) % 6 for _ in range(count)]
        blob, mode, records = given.number(1) % count, given.number(1), given.number(1) % 9
        letters = bytearray(b"kifbsB"[kind] for kind in (0, *kinds[1:]))
        letters[blob] = ord("B")
        file, offsets = bytearray(), [0]
        for i in range(records):
            size, pad = given.number(2) % 600, given.number(2)
            record = bytearray(given.take(size).ljust(size + pad, b"\x55"))
            if mode & 1:
                seal(record, ((9 if i >= records // 2 else 7) << 32) + i, bool(mode & 4))
            file += record
            offsets.append(len(file))
        asks = given.number(1) % 16
        rows = np.array([[given.number(1), given.number(1)] for _ in range(asks)], np.uint8)
        shards, numbers = rows.view(np.int8).astype(np.int64).T.copy()
        (tmp_path / "file").write_bytes(file)
        half, places = records // 2, np.array(offsets, np.int64)
        ends, out = np.zeros(asks + 1, np.int64), bytearray()
        with open(tmp_path / "file", "rb") as opened:
            sources = [
                (0, 0, opened.fileno(), places[: half + 1], 7 << 32),
                (1, half, opened.fileno(), places[half:], (9 << 32) + half),
            ]
            empty = out.extend
            done = core.join(
                *(sources, shards, numbers, bytes(letters), blob, (None,) * count, ends, None),
                lambda size, empty=empty, out=out: (empty(bytes(size)), out)[1],
                None,
            )
        fields = [(f"field{i}", KINDS[b"kifbsB".index(kind)]) for i, kind in enumerate(letters)]
        for i in range(done):
            n = int(numbers[i])
            record = bytes(file[offsets[n] : offsets[n + 1]])
            assert blob_of(record, ((7, 9)[shards[i]] << 32) + n) is not None, name
            head = struct.unpack_from("<I", record, 12)[0]
            fields[0] = ("__key__", "key")
            found = Schema(fields).decode(record[16:], 0, head)
            assert found[f"field{blob}"] == bytes(out[ends[i] : ends[i + 1]]), name
        taken, left = taken + done, left + asks - done
    assert taken and left
