"""Writes datasets by the formats' own tools, and prints what they read of them again as JSON.

    write.py arrow DIR SEED     Hugging Face datasets: save_to_disk, into DIR/one and DIR/splits
    write.py litdata DIR SEED   litdata.optimize, into DIR/plain, DIR/frames, ...

Prints {folder: [row, ...]}; bytes are {"bytes": hex}, arrays {"array": [dtype, list]}. Runs in
tests/format_tools/.venv.
"""

import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from read import plain

Rows = list[dict[str, Any]]


def image(draw: np.random.Generator) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    shape = (*draw.integers(1, 30, 2).tolist(), 3)
    pixels = Image.fromarray(draw.integers(0, 256, shape, np.uint8))
    pixels.save(out, ("PNG", "JPEG")[draw.integers(2)])
    return out.getvalue()


def arrow(folder: Path, draw: np.random.Generator) -> dict[str, Rows]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets
    from datasets import Array2D, ClassLabel, Features, Image, List, Value

    datasets.disable_progress_bars()
    features = Features(
        {
            "image": Image(),
            "label": ClassLabel(names=["cat", "hund 🐕", "c: d"]),
            "légende": Value("string"),
            "long text": Value("large_string"),
            "blob": Value("binary"),
            "i8": Value("int8"),
            "u64": Value("uint64"),
            "f32": Value("float32"),
            "f64": Value("float64"),
            "flag": Value("bool"),
            "boxes": List(List(Value("float32"), length=4)),
            "ids": List(Value("int64")),
            "words": List(Value("string")),
            "objects": List({"name": Value("string"), "area": Value("float64")}),
            "grid": Array2D(shape=(2, 3), dtype="int32"),
            "nothing": Value("string"),
        }
    )

    def text() -> str:
        letters = list('aé猫🐕 \n"\\')
        return "".join(draw.choice(letters, draw.integers(9)))

    def row() -> dict[str, Any]:
        made = {
            "image": {"bytes": image(draw), "path": text() or None},
            "label": int(draw.integers(3)),
            "légende": text(),
            "long text": text() * 50,
            "blob": draw.bytes(draw.integers(9)),
            "i8": int(draw.integers(-128, 128)),
            "u64": int(draw.integers(2**62)),
            "f32": float(np.float32(draw.normal())),
            "f64": float(draw.normal()),
            "flag": bool(draw.integers(2)),
            "boxes": draw.normal(size=(draw.integers(3), 4)).astype("f4").tolist(),
            "ids": draw.integers(-9, 9, draw.integers(4)).tolist(),
            "words": [text() for _ in range(draw.integers(3))],
            "objects": [{"name": text(), "area": 0.5} for _ in range(draw.integers(3))],
            "grid": draw.integers(0, 9, (2, 3)).tolist(),
        }
        made |= {name: None for name in made if not draw.integers(6) and name != "grid"}
        return made | {"nothing": None}

    def table(count: int) -> Any:
        if not count:
            return datasets.Dataset.from_dict({name: [] for name in features}, features=features)
        return datasets.Dataset.from_list([row() for _ in range(count)], features=features)

    count = int(draw.integers(120, 260))  # more than one record batch
    table(count).shuffle(seed=1).save_to_disk(folder / "one", num_shards=int(draw.integers(1, 4)))
    some = table(30)
    splits = {"train": some, "half_2": some.select(range(0, 30, 2)), "few": table(1)}
    datasets.DatasetDict(splits).save_to_disk(folder / "splits")
    table(0).save_to_disk(folder / "empty", num_shards=1)
    found = {}
    for name in ("one", "splits/train", "splits/half_2", "splits/few", "empty"):
        data = datasets.load_from_disk(folder / name)
        found[name] = data.cast_column("image", Image(decode=False)).to_list()
    return found


def litdata(folder: Path, draw: np.random.Generator) -> dict[str, Rows]:
    import litdata
    import torch
    from PIL import Image

    # Whatever is drawn is drawn here: optimize asks for samples in processes of its own.
    samples = []
    for i in range(40):
        shape = (*draw.integers(1, 9, 2).tolist(), 3)
        made = {
            "image": Image.fromarray(draw.integers(0, 256, shape, np.uint8)),
            "label": i,
            "légende": "".join(draw.choice(list("aé猫\n"), draw.integers(9))),
            "score": float(draw.normal()),
            "good": bool(draw.integers(2)),
            "raw": draw.bytes(draw.integers(9)),
            "words": ["é", ""] * draw.integers(3),
            "mixed": [None, 1, "x", {"a": [0.5]}],
            "objects": [{"name": "a", "n": i, "f": 0.5, "none": None}] * draw.integers(3),
            "deep": {"a": {"b": i, "c": [True, False]}},
        }
        for dtype in ("i1", "u2", "i4", "i8", "f2", "f4", "f8", "?"):
            numbers = draw.integers(0, 100, draw.integers(0, 4, 2)).astype(dtype)
            made |= {f"n2 {dtype}": numbers, f"n1 {dtype}": numbers.ravel()}
            tensor = torch.from_numpy(numbers)
            made |= {f"t2 {dtype}": tensor, f"t1 {dtype}": tensor.ravel()}
        samples.append(made)
    found = {}
    ways = {"plain": {}, "frames": {"compression": "zstd", "compression_batch_size": 3}}
    for level in ("chunk", "sample"):
        ways[level] = {"compression": "zstd:7", "compression_level": level}
    for name, options in ways.items():
        litdata.optimize(
            samples.__getitem__,
            list(range(len(samples))),
            str(folder / name),
            num_workers=2,
            chunk_bytes=20_000,
            verbose=False,
            **options,
        )
        with tempfile.TemporaryDirectory() as cache:
            copy = shutil.copytree(folder / name, Path(cache) / "copy")
            found[name] = [values(sample) for sample in litdata.StreamingDataset(str(copy))]
    return found


def values(value: Any) -> Any:
    """A value without tensors and images: arrays."""
    if hasattr(value, "getpixel") or hasattr(value, "numpy"):
        return np.asarray(value)
    if isinstance(value, dict):
        return {name: values(one) for name, one in value.items()}
    return [values(one) for one in value] if isinstance(value, list) else value


if __name__ == "__main__":
    kind, target, seed = sys.argv[1:]
    make = {"arrow": arrow, "litdata": litdata}[kind]
    with contextlib.redirect_stdout(sys.stderr):
        written = make(Path(target), np.random.default_rng(int(seed)))
    print(json.dumps(written, default=plain))
