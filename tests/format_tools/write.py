"""Writes datasets by the formats' own tools, and prints what they read of them again as JSON.

    write.py arrow DIR SEED     Hugging Face datasets: save_to_disk, into DIR/one and DIR/splits
    write.py litdata DIR SEED   litdata.optimize, into DIR/...

Prints {folder: [row, ...]}; bytes are {"bytes": hex}, arrays {"array": [dtype, list]}. Runs in
tests/format_tools/.venv.
"""

import io
import json
import os
import sys
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


if __name__ == "__main__":
    kind, target, seed = sys.argv[1:]
    written = {"arrow": arrow}[kind](Path(target), np.random.default_rng(int(seed)))
    print(json.dumps(written, default=plain))
