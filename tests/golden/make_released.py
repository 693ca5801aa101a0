"""Datasets as a release wrote them, by the public functions: python tests/golden/make_released.py

Written once, by 0.1.0, into tests/golden/released-0.1.0, and never again: every later release reads
them (tests/formats/test_released.py). A release that writes other bytes gets a folder of its own.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import shardio

FOLDER = Path(__file__).parent / f"released-{shardio.__version__}"
EVERY_KIND = {
    "image": "image",
    "label": "int",
    "weight": "float",
    "flipped": "bool",
    "caption": "str",
    "mask": "array",
    "extra": "bytes",
    "meta": "json",
}


def plain(value: Any) -> Any:
    """Return a value as JSON has it; of bytes and arrays their SHA-256, of pixels too."""
    if isinstance(value, Image.Image):
        value = np.asarray(value)
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), plain(value.tobytes())]
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def read(name: str, folder: Path = FOLDER) -> list[Any]:
    """Return the records of a dataset: the stored bytes, or where those are pixels, the pixels."""
    decode = "numpy" if name == "raw" else None
    return [plain(dict(sample)) for sample in shardio.open(folder / name, decode=decode)]


def order(name: str, folder: Path = FOLDER) -> list[list[str]]:
    """Return the keys of two epochs, as training gets them in batches of 4."""
    data = shardio.ShardDataset(
        folder / name, batch_size=4, seed=7, fields=("__key__",), decode=None, shuffle_buffer=6
    )
    keys = []
    for epoch in range(2):
        data.set_epoch(epoch)
        keys.append([str(key) for (batch,) in data for key in batch])
    return keys


def photograph(number: int, side: int = 16) -> Image.Image:
    noise = np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((side, side), Image.Resampling.BICUBIC)


def plant(folder: Path, side: int = 16) -> Path:
    """Make a folder of images: two splits, three classes, one of them with a name in UTF-8."""
    for number in range(18):
        split = "val" if number % 6 == 0 else "train"
        name = f"{split}/{('cat', 'dog', 'café')[number % 3]}/{number:02d}"
        path = folder / f"{name}.{'jpg' if number % 2 else 'png'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        photograph(number, side).save(path, quality=85)
    return folder


def write(source: Path) -> list[str]:
    """Write every dataset, and return their names below FOLDER."""
    tree, large = plant(source / "tree"), plant(source / "large", 96)
    names = ["record/train", "record/val", "lmdb", "tiles", "raw", "every-kind", "tar"]
    shardio.pack(tree, FOLDER / "record", plan=shardio.PlanOptions(max_records=4), jobs=1)
    shardio.pack(tree / "train", FOLDER / "lmdb", format="lmdb", jobs=1)
    tiles = shardio.ImageOptions(jpeg_tiles=True, keep_original=True)
    shardio.pack(large / "val", FOLDER / "tiles", images=tiles, jobs=1)
    raw = shardio.ImageOptions(encode="raw")
    shardio.pack(tree / "val", FOLDER / "raw", images=raw, resize=8, jobs=1)
    with shardio.Writer(FOLDER / "every-kind", fields=EVERY_KIND, id="every kind") as writer:
        image = (tree / "train" / "dog" / "01.jpg").read_bytes()
        writer.write(
            {"__key__": "ä", "image": image, "label": -1, "weight": 0.1, "flipped": True}
            | {"caption": "two\nlines", "mask": np.arange(6, dtype="<u2").reshape(2, 3)}
            | {"extra": b"\x00\xff", "meta": {"box": [1, 2.5], "deep": [None, {"a": "b"}]}}
        )
        writer.write(dict.fromkeys(EVERY_KIND) | {"__key__": "nothing"})
    tar = Path(__file__).parent / "webdataset" / "dot.tar"
    (FOLDER / "tar").mkdir()
    shutil.copy(tar, FOLDER / "tar")
    shardio.index(FOLDER / "tar", jobs=1)
    return names


if __name__ == "__main__":
    FOLDER.mkdir()  # once: nothing that was released is replaced
    expected = {name: read(name) for name in write(Path(sys.argv[1]))}
    found = {"records": expected, "order": order("record/train")}
    (FOLDER / "expected.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"{FOLDER}: {sum(file.stat().st_size for file in FOLDER.rglob('*')):,} bytes")
