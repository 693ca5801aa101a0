"""Make tests/golden/parquet/: files as Hugging Face `datasets` and pyarrow write them.

    python3 -m venv /tmp/golden && /tmp/golden/bin/pip install datasets==5.2.0 pyarrow==26.0.1 \\
        numpy==2.4.6 pillow==13.0.0
    /tmp/golden/bin/python tests/golden/make_parquet.py

No line of shardio runs here. `expected.json` says what each row holds.
"""

from __future__ import annotations

import datetime
import decimal
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
import PIL
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

OUT = Path(__file__).resolve().parent / "parquet"


def image(number: int) -> Image.Image:
    noise = np.random.default_rng(number).integers(0, 256, (9, 8 + number % 3, 3), np.uint8)
    return Image.fromarray(noise)


def encoded(number: int) -> bytes:
    out = io.BytesIO()
    image(number).save(out, "PNG")
    return out.getvalue()


def described(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        digest = hashlib.sha256(value.tobytes()).hexdigest()
        return {"dtype": value.dtype.str, "shape": list(value.shape), "sha256": digest}
    if isinstance(value, bytes):
        return {"bytes": len(value), "sha256": hashlib.sha256(value).hexdigest()}
    return value


def hugging_face() -> list[dict[str, Any]]:
    """Images, class labels, boxes, and an array of two dimensions, as `to_parquet` writes them."""
    rows = [
        {
            "image": {"bytes": encoded(i), "path": f"{i:04d}.png" if i % 3 else None},
            "label": i % 2,
            "caption": f"猫 {i}" if i != 4 else None,
            "objects": {"bbox": [[0.5 * i, 1.0, 2.0, 3.0]] * (i % 3), "category": [i] * (i % 3)},
            "grid": [[float(i), 1.0], [2.0, 3.0]],
            "embedding": [0.25 * i, -1.0],
        }
        for i in range(25)
    ]
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
            "caption": datasets.Value("string"),
            "objects": {
                "bbox": datasets.Sequence(datasets.Sequence(datasets.Value("float32"), length=4)),
                "category": datasets.Sequence(datasets.Value("int64")),
            },
            "grid": datasets.Array2D(shape=(2, 2), dtype="float32"),
            "embedding": datasets.Sequence(datasets.Value("float32")),
        }
    )
    made = datasets.Dataset.from_list(rows, features=features)
    made.to_parquet(str(OUT / "train-00000-of-00001.parquet"), batch_size=10)
    return [
        {
            "image": row["image"]["bytes"],
            "image.path": row["image"]["path"],
            "label": row["label"],
            "caption": row["caption"],
            "objects": {"bbox": row["objects"]["bbox"], "category": row["objects"]["category"]},
            "grid": row["grid"],
            "embedding": np.array(row["embedding"], "<f4"),
        }
        for row in rows
    ]


def every_type() -> list[dict[str, Any]]:
    """Two row groups of all types, with nulls, compressed by zstd, with page checksums."""
    moment = datetime.datetime(2024, 5, 1, 12, 0, 0, 250)
    columns: dict[str, tuple[pa.DataType, list[Any], list[Any]]] = {
        "i8": (pa.int8(), [-1, None, 127, 0], [-1, None, 127, 0]),
        "u64": (pa.uint64(), [2**64 - 1, 0, None, 1], [2**64 - 1, 0, None, 1]),
        "f16": (pa.float16(), [0.5, None, -1.0, 0.0], [0.5, None, -1.0, 0.0]),
        "f64": (pa.float64(), [0.1, None, -1.0, 0.0], [0.1, None, -1.0, 0.0]),
        "flag": (pa.bool_(), [True, None, False, True], [True, None, False, True]),
        "text": (pa.large_string(), ["", None, "é", "x"], ["", None, "é", "x"]),
        "blob": (pa.binary(), [b"", None, b"\0\xff", b"x"], [b"", None, b"\0\xff", b"x"]),
        "fixed": (pa.binary(2), [b"ab", None, b"cd", b"ef"], [b"ab", None, b"cd", b"ef"]),
        "word": (pa.dictionary(pa.int32(), pa.string()), list("abab"), list("abab")),
        "when": (
            pa.timestamp("us"),
            [moment, None, moment, moment],
            ["2024-05-01 12:00:00.000250", None, *["2024-05-01 12:00:00.000250"] * 2],
        ),
        "utc": (
            pa.timestamp("us", "Europe/Berlin"),
            [moment.replace(tzinfo=datetime.timezone.utc), None, None, None],
            ["2024-05-01 12:00:00.000250Z", None, None, None],
        ),
        "day": (pa.date32(), [moment.date(), None] * 2, ["2024-05-01", None] * 2),
        "time": (pa.time32("s"), [datetime.time(1, 2, 3), None] * 2, ["01:02:03.000", None] * 2),
        "span": (pa.duration("ms"), [datetime.timedelta(seconds=1.5), None] * 2, [1500, None] * 2),
        "price": (pa.decimal128(9, 3), [decimal.Decimal("1.250"), None] * 2, ["1.250", None] * 2),
        "vector": (
            pa.list_(pa.int16()),
            [[1, 2, 3], None, [], [4]],
            [np.array(x, "<i2") if x is not None else None for x in ([1, 2, 3], None, [], [4])],
        ),
        "matrix": (
            pa.list_(pa.list_(pa.float32(), 3), 2),
            [[[1, 2, 3], [4, 5, 6]], None] * 2,
            [np.array([[1, 2, 3], [4, 5, 6]], "<f4"), None] * 2,
        ),
        "holes": (pa.list_(pa.int32()), [[1, None], None] * 2, [[1, None], None] * 2),
        "words": (
            pa.list_(pa.string()),
            [["a", None], [], None, ["é"]],
            [["a", None], [], None, ["é"]],
        ),
        "nested": (
            pa.struct(
                {"when": pa.timestamp("ns"), "deep": pa.list_(pa.struct({"b": pa.binary()}))}
            ),
            [{"when": 1, "deep": [{"b": b"x"}, None]}, None] * 2,
            [
                {"when": "1970-01-01 00:00:00.000000001", "deep": [{"b": b"x"}, None]},
                None,
            ]
            * 2,
        ),
        "map": (
            pa.map_(pa.string(), pa.int32()),
            [[("a", 1), ("b", None)], None] * 2,
            [[{"key": "a", "value": 1}, {"key": "b", "value": None}], None] * 2,
        ),
        "nothing": (pa.null(), [None] * 4, [None] * 4),
        "a.b": (pa.int64(), [1, 2, 3, 4], [1, 2, 3, 4]),
        "__key__": (pa.string(), list("wxyz"), list("wxyz")),
    }
    table = pa.table({name: pa.array(given, kind) for name, (kind, given, _) in columns.items()})
    pq.write_table(
        table,
        OUT / "types.parquet",
        row_group_size=3,
        compression="zstd",
        write_page_checksum=True,
        store_schema=True,
    )
    return [{name: found[row] for name, (_, _, found) in columns.items()} for row in range(4)]


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    expected = {
        "tools": {
            "datasets": datasets.__version__,
            "pyarrow": pa.__version__,
            "numpy": np.__version__,
            "pillow": PIL.__version__,
        },
        "files": {
            "train-00000-of-00001.parquet": hugging_face(),
            "types.parquet": every_type(),
        },
    }
    text = json.dumps(expected, indent=1, default=described) + "\n"
    (OUT / "expected.json").write_text(text)


if __name__ == "__main__":
    main()
