"""Writes the first inputs of the fuzzer to a folder: tiny JPEGs of all kinds, and small shards.

    .venv/bin/python tests/fuzz/make_seeds.py FOLDER

fuzz.c has the layout of an input. Needs the compiled core, and cjpeg and jpegtran (Debian:
libjpeg-turbo-progs). To be run when entry points are added; tests/fuzz/run starts from
tests/fuzz/seeds, which holds these and what the fuzzer found beside them.
"""

import io
import struct
import subprocess
import sys
from pathlib import Path

import msgpack
import numpy as np
import xxhash
from PIL import Image

from shardio.native import core

SAMPLINGS = ("1x1", "2x1", "2x2", "1x2", "4x1", "4x2", "2x2,1x2,1x2", "grey")


def run(*command: str, data: bytes) -> bytes:
    return subprocess.run(command, input=data, capture_output=True, check=True).stdout


def by_pil(mode: str, width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.new(mode, (width, height)).save(out, "JPEG")
    return out.getvalue()


def jpegs(width: int = 90, height: int = 45) -> dict[str, bytes]:
    rng = np.random.default_rng(1)
    coarse = rng.integers(0, 256, (height // 9 + 1, width // 9 + 1, 3), np.uint8)
    pixels = np.kron(coarse, np.ones((9, 9, 1), np.uint8))[:height, :width]
    source = b"P6\n%d %d\n255\n" % (width, height) + pixels.tobytes()
    found = {}
    for sampling in SAMPLINGS:
        how = ["-grayscale"] if sampling == "grey" else ["-sample", sampling]
        plain = run("cjpeg", "-quality", "20", "-optimize", *how, data=source)
        found[sampling] = plain
        found[f"{sampling} tiles"] = core.rewrite(plain, 3)  # 90 pixels: 12, 6 or 3 blocks
        found[f"{sampling} scans"] = run(
            "cjpeg", "-quality", "20", "-progressive", *how, data=source
        )
    found["rgb"] = run("cjpeg", "-quality", "20", "-rgb", data=source)
    found["rows"] = run("cjpeg", "-quality", "20", "-restart", "1", data=source)
    found["bilevel"] = run("cjpeg", "-grayscale", "-quality", "1", data=source)
    found["inks"] = by_pil("CMYK", width, height)
    found["several"] = plain[:2] + b"\xff\xe2\0\x08MPF\0\0\0" + plain[2:]
    found["arithmetic"] = run("jpegtran", "-arithmetic", data=plain)
    for order, tiff in (("<", b"II*\0\x08\0\0\0"), (">", b"MM\0*\0\0\0\x08")):
        entries = struct.pack(order + "HHHII", 2, 0x0100, 3, 1, 0)
        entries += struct.pack(order + "HHIHH", 0x0112, 3, 1, 6, 0) + bytes(4)
        body = b"Exif\0\0" + tiff + entries
        app1 = b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body
        found[f"exif {order}"] = plain[:2] + app1 + plain[2:]
    return found


def broken(data: bytes) -> list[bytes]:
    """A tile JPEG whose restart markers are wrong, or what lies between them."""
    scan = data.index(b"\xff\xda")
    marks = [i for i in range(scan, len(data) - 3) if data[i] == 255 and data[i + 1] & 0xF8 == 0xD0]
    at, end = marks[len(marks) // 2], len(data) - 2
    return [
        data[: at + 1] + bytes([0xD0 | data[at + 1] + 1 & 7]) + data[at + 2 :],
        data[:at] + data[at + 2 :],
        data[:at] + data[at : at + 2] + data[at:],
        data[:at] + b"\x2a" + data[at:],  # bytes too many, too few
        data[: at - 3] + data[at:],
        data[:end] + b"\x2a" + data[end:],
        data[: end - 3] + data[end:],
    ]


def bare(data: bytes, marker: bytes) -> bytes:
    """A JPEG without its tables."""
    while marker in data:
        at = data.index(marker)
        data = data[:at] + data[at + 2 + int.from_bytes(data[at + 2 : at + 4], "big") :]
    return data


def crop(
    filter: int, scale: int, layout: int, size: tuple[int, int], box: tuple[float, ...]
) -> bytes:
    corners = struct.pack("<4H", *(int(16 * value) for value in box))
    return b"c" + bytes([filter, scale, layout, *size]) + corners


def shard(mode: int, blobs: list[bytes], asks: list[int]) -> bytes:
    records = []
    for number, blob in enumerate(blobs):
        head = msgpack.packb([b"key%d" % number, len(blob), number])
        sealed = struct.pack("<II", len(head) + len(blob), len(head)) + head + blob
        checksum = xxhash.xxh3_64_intdigest(sealed, (7 << 32) + number)
        records.append(struct.pack("<Q", checksum) + sealed)
    sizes = struct.pack(f"<{len(records)}H", *map(len, records))
    start = b"r" + bytes([len(records) - 1, mode, 4, 29]) + sizes
    hostile = b"\x01" + struct.pack("<Q", 1 << 62) if mode & 2 else b""
    return start + bytes([len(asks), *asks]) + hostile + b"".join(records)


def rows(mode: int, pads: list[int], asks: list[tuple[int, int]], more: bytes = b"") -> bytes:
    """Records of a key, an int, a bool, a float and a blob, whose last bytes are padding."""
    start = b"j" + bytes([4, *("kifbsB".index(kind) for kind in "kibfB"), 4, mode, len(pads)])
    for number, pad in enumerate(pads):
        blob = b"%d" % number * 9
        head = [b"key%d" % number, number - 3, number > 1, number / 3, len(blob) + pad]
        packed = msgpack.packb(head)
        data = bytes(12) + struct.pack("<I", len(packed)) + packed + blob
        start += struct.pack("<HH", len(data), pad) + data
    return start + bytes([len(asks), *(value for ask in asks for value in ask)]) + more


def value(kinds: str, head: list[object], blobs: bytes = b"") -> bytes:
    packed = msgpack.packb(head)
    record = bytes(8) + struct.pack("<II", len(packed) + len(blobs), len(packed)) + packed + blobs
    letters = bytes("kifbsB".index(kind) for kind in kinds)
    return b"v" + bytes([len(kinds) - 1]) + letters + b"\x01" + record


def main(folder: Path) -> None:
    inputs = []
    for number, data in enumerate(jpegs().values()):
        inputs.append(b"w" + struct.pack("<H", number % 4) + data)
        inputs.append(crop(number % 5, 0, number, (0, 0), (53, 19, 86, 40)) + data)
        if number % 3 == 0:
            inputs += [b"p" + data, crop(0, 0, 0, (0, 0), (0, 0, 90, 45)) + data]
        elif number % 3 == 1:
            inputs.append(crop(number % 5, 0, number, (9, 17), (20.5, 3.25, 86, 44)) + data)
        else:
            inputs.append(crop(1, 1 + number // 3 % 3, 0, (0, 0), (1, 2, 5, 4)) + data)
    plain = jpegs()["1x1"]
    for box in ((0, 0, 91, 45), (0, 0, 90, 46), (9, 0, 9, 9), (0, 5, 9, 4), (1, 1, 70, 4095.9375)):
        inputs.append(crop(1, 0, 0, (4, 4), box) + plain)
    for data in broken(jpegs()["grey tiles"]):
        inputs.append(b"w\3\0" + data)
        inputs.append(crop(1, 0, 0, (0, 0), (0, 0, 90, 45)) + data)
        inputs.append(crop(1, 0, 0, (0, 0), (80, 40, 88, 44)) + data)
    # A wide one, of which columns beside the box are not decoded, and a high one, with rows above.
    for sampling in ("2x2", "1x1"):
        inputs.append(crop(1, 0, 0, (0, 0), (90, 3, 110, 12)) + jpegs(200, 20)[sampling])
        inputs.append(crop(4, 0, 0, (20, 9), (3, 90, 17, 110)) + jpegs(20, 120)[sampling])
    few, both = [0, 3, 0, 1], [(0, 0), (1, 3), (1, 2), (0, 1), (0, 0), (0, 1)]
    inputs.append(rows(0x61, few, both))
    inputs.append(rows(0x61, [20_000, 3, 16_384, 40_000], both))
    inputs.append(rows(0x65, few, [(0, 1), (1, 2), (2, 0)]))
    inputs.append(rows(0x63, few, both, b"\1" + struct.pack("<Q", 1 << 62)))
    inputs.append(rows(0x69, [0, 20_000, 0, 0], both, struct.pack("<I", 9_000)))
    inputs.append(rows(0x71, few, both, struct.pack("<I", 50)))
    small = list(jpegs(16, 16).values())
    odd = [small[0], bare(small[0], b"\xff\xc4"), small[0]]
    for some in (small[:4], small[4:7], small[8:12], small[-3:], odd):
        parts = b"".join(struct.pack("<H", len(one)) + one for one in some)
        inputs.append(b"m" + bytes([15, 15, len(some) - 1]) + parts)
    blobs = [b"P6\n1" + bytes(range(i, 30 + i)) for i in range(3)]
    for mode in (0, 1, 2, 5, 9, 11):
        inputs.append(shard(mode, [*blobs, b"", b"P6\n2" * 9], [0, 2, 1, 0, 4, 5, 255]))
    inputs.append(shard(8, [*blobs, b"Q6\n1" + blobs[0][4:]], [0, 1, 3, 2]))
    inputs += [shard(8, blobs, [1, 0])[:-at] + b"?" + bytes(at - 1) for at in (1, 9, 40)]
    inputs += [
        value("kif", [b"k", 0.5, 1]),
        value("ki", ["k", 1]),
        value("kB", [b"k", 3], b"abcd"),
        value("kB", [b"k", 5], b"abcd"),
        value("kBifbs", [b"a key", 5, 70000, 0.5, True, "text"], b"image"),
        value("kifbs", [b"k" * 40, None, None, None, None]),
        value("k" + "i" * 9, [b"", -1, -100, -1000, -(1 << 40), 200, 40000, 1 << 31, 1 << 63, 0]),
        value("k" + "s" * 16, [b"k" * 300, "s" * 40, "s" * 300, *"abcdefghijklmn"]),
        value("kBBB", [b"k", 3, None, 0], b"abc"),
        b"k" + bytes([3, 77, 1, 0]) + b"abc",
        b"k" + bytes([16, 77, 1, 1]) + b"abc",
    ]
    for high, each in ((0, 1), (1, 2), (8, 1)):  # 130 numbers: three lines
        head = b"o" + struct.pack("<HQBBQ", 130, 900, high, each, 64)
        inputs += [head + bytes(3 * (8 + 64 * (2 + high)) - short) for short in (0, 1)]
    folder.mkdir(parents=True, exist_ok=True)
    for data in inputs:
        (folder / f"{chr(data[0])}-{xxhash.xxh3_64_hexdigest(data)}").write_bytes(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
