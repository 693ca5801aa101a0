"""Writes tests/golden/v0/: a small dataset of every kind of value, and what a reader must find.

    python tests/golden/make.py [FOLDER [FORMAT]]

Without a folder, also tests/golden/lmdb-v0/: the same as LMDB shards; and tests/golden/v1/: the
first shard of v0, and of lmdb-v0, from which records were erased.

The bytes depend on nothing but this file and the format, so writing them again changes nothing as
long as the format stays the same. Once a version is frozen its golden files stay as they are.
"""

import json
import struct
import sys
import zlib
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from shardio.formats import manifest
from shardio.formats.record import ERASED as RECORDS_ERASED
from shardio.formats.record import VERSION
from shardio.formats.sample import Schema
from shardio.names import KEY
from shardio.packing.shard_writer import ShardWriter, open_own
from shardio.storage.local import token, write_file
from shardio.storage.location import locate

GOLDEN = Path(__file__).resolve().parent
FOLDERS = {"record": GOLDEN / f"v{VERSION}", "lmdb": GOLDEN / f"lmdb-v{VERSION}"}
ERASED = (1, 2)  # records of the first shard
DATASET_ID = bytes(range(0xA0, 0xB0))
FIELDS = (
    (KEY, "key"),
    ("image", "image"),
    ("label", "int"),
    ("weight", "float"),
    ("flipped", "bool"),
    ("caption", "str"),
    ("mask", "array"),
    ("extra", "bytes"),
    ("meta", "json"),
)
CLASSES = ("café", "\udcff\udcfe", "猫")  # the second is no UTF-8: as os.fsdecode gives it


def png(grey: int) -> bytes:
    """An image of one pixel; a stored deflate block, so that no version of zlib can differ."""
    row = bytes((0, grey))
    stored = b"\x78\x01\x01" + struct.pack("<HH", 2, 0xFFFD) + row
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)),
        (b"IDAT", stored + struct.pack(">I", zlib.adler32(row))),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def sample(key: bytes, **values: object) -> dict[str, object]:
    return dict.fromkeys(name for name, _ in FIELDS) | {KEY: key} | values


SHARDS = [
    [
        sample(
            b"caf\xc3\xa9/1.png",
            image=png(0),
            label=0,
            weight=0.5,
            flipped=False,
            caption="",
            mask=np.arange(6, dtype="u1").reshape(2, 3),
            extra=b"",
            meta=None,
        ),
        sample(
            b"\xff\xfe/2.png",
            image=png(255),
            label=1,
            weight=float("nan"),
            flipped=True,
            caption="zwei\nZeilen",
            mask=np.zeros((0, 4), "f4"),
            extra=b"\x00\r\n\xff",
            meta=[],
        ),
        sample(
            "猫/3 \x1b[31m.png".encode(),
            image=png(128),
            label=2,
            weight=float("-inf"),
            flipped=True,
            caption="猫 🐈",
            mask=np.array(-1.5, ">f8"),
            extra=b"x" * 300,
            meta={
                "box": [1, 2.5, -3, 2**63],
                "deep": {"a": [{"b": [None, True, False, "", b"\x00\xff"]}]},
                "points": np.array([[1, -2], [3, 4]], ">i2"),
                "": "an empty name",
            },
        ),
        sample(b"all/none"),
        sample(
            b"only/some",
            label=2**32,
            weight=1e300,
            mask=np.array(["2024-02-29", "NaT"], "M8[D]"),
            meta=2**64 - 1,
        ),
    ],
    [],
    [
        sample(b"k", image=b"", label=-1, weight=-0.0, meta="", mask=np.array(["é", ""], "U2")),
        sample(b"\x00" * 300, label=-(2**31), weight=0.1, mask=np.array([b"ab", b"c"], "S2")),
        sample(b"l", label=2**31, mask=np.array([[[1 + 2j]]], "c8"), caption="x" * 300),
        sample(b"m", image=b"\xff" * 16_500, mask=np.array([True, False]), flipped=False),
    ],
]


def tagged(value: object) -> object:
    """What JSON cannot say, in objects of one member whose name begins with $."""
    if isinstance(value, bytes):
        if len(value) > 64 and len(set(value)) == 1:
            return {"$repeat": [value[:1].hex(), len(value)]}
        return {"$bytes": value.hex()}
    if isinstance(value, np.ndarray):
        little = value.astype(value.dtype.newbyteorder("<"))
        return {"$array": [little.dtype.str, list(value.shape), little.tobytes().hex()]}
    if isinstance(value, float):
        return {"$float": struct.pack(">d", value).hex()}
    if isinstance(value, list):
        return [tagged(item) for item in value]
    if isinstance(value, dict):
        return {name: tagged(item) for name, item in value.items()}
    return value


def write(folder: Path, format: str = "record") -> None:
    """All golden files, into a folder that exists."""
    infos, described, blob_bytes = [], [], 0
    for number, samples in enumerate(SHARDS):
        writer = ShardWriter(str(folder), token(), Schema(FIELDS), DATASET_ID, number, format)
        for values in samples:
            writer.write(values)
        info = writer.finish()
        writer.commit(info.name)
        infos.append(info)
        blob_bytes += writer.blob_bytes
        shard = open_own(locate(folder).open(info.name), info.name)
        described.append(
            {
                "name": info.name,
                "offsets": [shard.offset(record) for record in range(len(samples))],
                "samples": [tagged(values) for values in samples],
            }
        )
        shard.close()
    made = manifest.make(
        infos,
        dataset_id=DATASET_ID,
        format=format,
        schema=Schema(FIELDS),
        classes=CLASSES,
        options={"made by": "tools/make_golden.py"},
        library="0.1.0",
        blob_bytes=blob_bytes,
    )
    write_file(str(folder), manifest.MANIFEST, made.dump())
    expected = {
        "dataset_id": DATASET_ID.hex(),
        "fields": FIELDS,
        "classes": CLASSES,
        "blob_bytes": blob_bytes,
        "shards": described,
    }
    write_file(str(folder), "expected.json", (json.dumps(expected, indent=1) + "\n").encode())


def write_erased(folder: Path) -> None:
    """The first shard of each format without the bytes of ERASED, and what is found there."""
    for format, there in FOLDERS.items():
        old = manifest.load(locate(there)).shard(0)
        shard = open_own(locate(there).open(old.name), old.name)
        names = Schema(FIELDS), DATASET_ID, 0, format
        writer = ShardWriter(str(folder), token(), *names, version=RECORDS_ERASED)
        for record, stored in enumerate(shard.stored(0, shard.records)):
            writer.write_stored(None if record in ERASED else stored)
        hashes = [0 if i in ERASED else one for i, one in enumerate(shard.key_hashes.tolist())]
        columns = {name: column.tolist() for name, column in shard.columns.items()}
        for column in columns.values():  # each has a null
            for record in ERASED:
                column[record] = None
        writer.index_as(hashes, columns)
        writer.commit(writer.finish().name)
        shard.close()
    right = [None if i in ERASED else tagged(values) for i, values in enumerate(SHARDS[0])]
    write_file(str(folder), "expected.json", (json.dumps(right, indent=1) + "\n").encode())


if __name__ == "__main__":
    targets = FOLDERS | {"erased": GOLDEN / "v1"}
    if len(sys.argv) > 1:
        target = Path(sys.argv[1])
        target.mkdir()  # a new one: nothing of anybody's is replaced
        targets = {sys.argv[2] if len(sys.argv) > 2 else "record": target}
    for kind, target in targets.items():
        target.mkdir(parents=True, exist_ok=True)
        for old in target.iterdir():
            old.unlink()
        write_erased(target) if kind == "erased" else write(target, kind)
        print(f"{target}: {sum(file.stat().st_size for file in target.iterdir()):,} bytes")
