"""Writes tests/golden/recordio/ with MXNet itself; needs no shardio.

python3.11 -m venv VENV
VENV/bin/pip install mxnet==1.9.1 numpy==1.23.5 opencv-python-headless==4.8.1.78
VENV/bin/python tests/golden/make_recordio.py

images.rec .idx    images with one label and with many, by MXIndexedRecordIO and pack
plain.rec          bytes that are no images, and the magic inside of them, by MXRecordIO
im2rec.rec .idx .lst   a folder of images, by MXNet's own im2rec.py
expected.json      of each, what MXRecordIO and unpack read from it
"""

import json
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import mxnet
from mxnet.recordio import IRHeader, MXIndexedRecordIO, MXRecordIO, pack, unpack

FOLDER = Path(__file__).resolve().parent / "recordio"
MAGIC = struct.pack("<I", 0xCED7230A)


def png(grey: int) -> bytes:
    row = zlib.compress(bytes((0, grey)))
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)),
        (b"IDAT", row),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


IMAGES = [
    (10, IRHeader(0, 3, 10, 0), png(0)),
    (11, IRHeader(0, 0.25, 11, 0), png(1)),
    (7, IRHeader(0, -2.0, 2**64 - 1, 2**63), png(2)),
    (12, IRHeader(0, [1.0, 2.5, -3.0], 12, 0), png(3)),
    (13, IRHeader(0, [4.0], 13, 0), png(4)),
    (14, IRHeader(0, 5, 14, 0), MAGIC + png(5) + bytes(-len(png(5)) % 4) + MAGIC * 2),
    (15, IRHeader(0, [7.0] * 5, 15, 5), b""),
]
PLAIN = [
    b"",
    b"a",
    b"four",
    b"hello, RecordIO!",
    MAGIC,
    MAGIC * 3,
    b"head" + MAGIC + b"tail!",
    b"odd" + MAGIC + b"is no place for it",
    b"x" * 1000 + MAGIC + b"y" * 999 + MAGIC,
    MAGIC[:3],
    b"end",
]


def read(path: Path, images: bool) -> list[dict[str, object]]:
    found = []
    record = MXRecordIO(str(path), "r")
    while True:
        data = record.read()
        if data is None:
            return found
        one: dict[str, object] = {}
        if images:
            header, data = unpack(data)
            many = not isinstance(header.label, float)
            one["label"] = [float(x) for x in header.label] if many else header.label
            one["id"], one["id2"] = header.id, header.id2
        one["data"] = data.hex()
        found.append(one)


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    writer = MXIndexedRecordIO(str(FOLDER / "images.idx"), str(FOLDER / "images.rec"), "w")
    for key, header, image in IMAGES:
        writer.write_idx(key, pack(header, image))
    writer.close()
    plain = MXRecordIO(str(FOLDER / "plain.rec"), "w")
    for data in PLAIN:
        plain.write(data)
    plain.close()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cat/1.png", "cat/2.png", "dog/1.png"):
            path = Path(folder, "images", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(len(name) + int(path.stem)))
        tool = Path(mxnet.__file__).parent / "tools" / "im2rec.py"
        for options in (["--list", "--recursive", "--no-shuffle"], ["--pass-through"]):
            subprocess.run(
                [sys.executable, str(tool), "im2rec", "images", *options], cwd=folder, check=True
            )
        for suffix in ("rec", "idx", "lst"):
            name = f"im2rec.{suffix}"
            (FOLDER / name).write_bytes(Path(folder, name).read_bytes())
    expected = {
        "made by": f"mxnet {mxnet.__version__}",
        **{name: read(FOLDER / f"{name}.rec", name != "plain") for name in ("images", "im2rec")},
        "plain": read(FOLDER / "plain.rec", False),
    }
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
