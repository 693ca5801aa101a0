"""Make tests/golden/arrow/: folders as Hugging Face `datasets` writes them by `save_to_disk`.

    python3 -m venv /tmp/golden && /tmp/golden/bin/pip install datasets==5.2.0 pyarrow==26.0.1 \\
        numpy==2.4.6 pillow==12.1.1
    /tmp/golden/bin/python tests/golden/make_arrow.py

No line of shardio runs here. `expected.json` says what each row holds: the values that `datasets`
gives when it loads the folder again.
"""

from __future__ import annotations

import datetime
import hashlib
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks import own_home

own_home.enter()  # before what looks where its home is
# ruff: noqa: E402

import datasets
import numpy as np
import pyarrow as pa
from PIL import Image

OUT = Path(__file__).resolve().parent / "arrow"

FEATURES = datasets.Features(
    {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=["cat", "hund 🐕"]),
        "légende": datasets.Value("string"),
        "score": datasets.Value("float32"),
        "good": datasets.Value("bool"),
        "objects": {
            "bbox": datasets.Sequence(datasets.Sequence(datasets.Value("float32"), length=4)),
            "category": datasets.Sequence(datasets.Value("int64")),
        },
        "grid": datasets.Array2D(shape=(2, 2), dtype="float32"),
        "embedding": datasets.Sequence(datasets.Value("float32")),
        "when": datasets.Value("timestamp[us]"),
    }
)


def encoded(number: int) -> bytes:
    out = io.BytesIO()
    noise = np.random.default_rng(number).integers(0, 256, (7, 5 + number % 3, 3), np.uint8)
    Image.fromarray(noise).save(out, "PNG")
    return out.getvalue()


def row(number: int) -> dict[str, Any]:
    return {
        "image": {"bytes": encoded(number), "path": f"é{number}.png"} if number % 5 else None,
        "label": number % 2 if number % 7 else None,
        "légende": f"猫 {number}" if number != 4 else None,
        "score": number / 8 if number % 3 else None,
        "good": number % 2 == 0,
        "objects": {"bbox": [[0.5 * number, 1.0, 2.0, 3.0]] * (number % 3), "category": [number]},
        "grid": [[float(number), 1.0], [2.0, 3.0]],
        "embedding": [0.25 * number, -1.0],
        "when": 1_700_000_000_000_000 + number,
    }


def described(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": len(value), "sha256": hashlib.sha256(value).hexdigest()}
    if isinstance(value, dict):
        return {name: described(one) for name, one in value.items()}
    if isinstance(value, list):
        return [described(one) for one in value]
    if isinstance(value, datetime.datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S.%f")
    return value


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    made = datasets.Dataset.from_list([row(number) for number in range(23)], features=FEATURES)
    made.save_to_disk(str(OUT / "one"), num_shards=3)
    empty = datasets.Dataset.from_dict({name: [] for name in FEATURES}, features=FEATURES)
    both = datasets.DatasetDict({"train": made.select(range(9)), "fold a": made.select([22, 3])})
    both.save_to_disk(str(OUT / "splits"))
    empty.save_to_disk(str(OUT / "empty"), num_shards=1)
    plain = made.remove_columns(["image", "grid", "when"])
    for name, options in {
        "lz4": pa.ipc.IpcWriteOptions(compression="lz4"),
        "zstd": pa.ipc.IpcWriteOptions(compression="zstd"),
        "file": None,
    }.items():
        new = pa.ipc.new_file if name == "file" else pa.ipc.new_stream
        table = plain.data.table
        with new(str(OUT / f"{name}.arrow"), table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=10)
    rows = {}
    for name in ("one", "splits/train", "splits/fold a", "empty"):
        found = datasets.load_from_disk(str(OUT / name)).cast_column(
            "image", datasets.Image(decode=False)
        )
        rows[name] = described(found.to_list())
    expected = {
        "tools": {"datasets": datasets.__version__, "pyarrow": pa.__version__},
        "folders": rows,
    }
    (OUT / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
