"""What the formats' own tools write is read, in place and packed; what is exported, they read."""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import LIMIT_S
from support.conformance import same
from support.exporting import decoded
from support.small_datasets import jpeg
from support.trees import plant

from benchmarks import own_home
from shardio import Writer, export, pack
from shardio import open as open_dataset
from shardio.names import KEY
from shardio.packing.index import index

HERE = Path(__file__).resolve().parent.parent / "format_tools"
PYTHON = HERE / ".venv" / "bin" / "python"
pytestmark = [
    pytest.mark.formats,
    pytest.mark.skipif(
        not PYTHON.exists(), reason="NOT RUN: datasets, litdata. tools/setup-formats installs them"
    ),
]


def program(name: str, *arguments: Any) -> Any:
    """What a program of format_tools prints."""
    line = [PYTHON, HERE / f"{name}.py", *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, **own_home.variables(folder)}  # LitData empties $TMPDIR/data
        done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return decoded(json.loads(done.stdout))


# --- datasets -------------------------------------------------------------------------------------

CLASSES = ["cat", "hund 🐕", "c: d"]


def as_row(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample as `datasets` has it. A field that is None in all records is none."""
    row = {n: v.tolist() if isinstance(v, np.ndarray) else v for n, v in sample.items() if n != KEY}
    path = row.pop("image.path", None)
    row["image"] = row.get("image") and {"bytes": row["image"], "path": path}
    return row


@pytest.mark.parametrize("seed", range(2))
def test_what_save_to_disk_writes_is_read_without_a_mismatch(tmp_path: Path, seed: int) -> None:
    written = program("write", "arrow", tmp_path / "hf", seed)
    pack(tmp_path / "hf" / "splits", tmp_path / "packed", jobs=1)
    for name, rows in written.items():
        folder = tmp_path / "hf" / name
        assert index(folder, jobs=1).records == len(rows)
        found = [open_dataset(folder, decode=None)] if rows else []
        if name.startswith("splits/"):
            found.append(
                open_dataset(tmp_path / "packed", split=name.partition("/")[2], decode=None)
            )
        for data in found:
            assert data.classes == CLASSES
            none = dict.fromkeys(rows[0])
            assert [none | as_row(sample) for sample in data] == rows


def test_datasets_loads_what_is_exported_without_a_mismatch(tmp_path: Path) -> None:
    classes = ["cat", 'd"o\\g', "c: é\u2028\x7f🐕", "yes", "1"]
    fields = {"image": "image", "label": "int", "yes": "str", "boxes": "array", "meta": "json"}
    fields |= {"score": "float", "good": "bool", "raw": "bytes", "1": "int", "image.path": "str"}
    samples = []
    for i in range(40):
        one: dict[str, Any] = {
            KEY: f"é {i}".encode(),
            "image": jpeg(i),
            "label": i % 5,
            "yes": f"“{i}”\n",
            "boxes": np.arange(4 * (i % 3), dtype=np.float32).reshape(-1, 4) / 3,
            "meta": {"a": [i, None, "ü"]},
            "score": i / 7,
            "good": i % 2 == 0,
            "raw": bytes(range(i)),
            "1": (-1) ** i * (1 << 62),
            "image.path": f"{i}.jpg",
        }
        if i % 4 == 3:
            one[list(fields)[i // 4]] = None
        samples.append(one)
    with Writer(tmp_path / "out", fields=fields, classes=classes) as writer:
        for one in samples:
            writer.write(one)
    tree = {f"{a}/{b}/{i}.jpg": jpeg(i) for a in ("train", "val") for b in "xy" for i in range(3)}
    pack(plant(tmp_path / "src", tree), tmp_path / "split", jobs=1)
    for name, size in (("out", "12KB"), ("split", None)):
        export(tmp_path / name, tmp_path / f"{name}-hub", format="parquet", shard_size=size)
    names = ("parquet", tmp_path / "out-hub", "parquet", tmp_path / "split-hub")
    [described, *rows], split = program("read", *names)
    assert described["features"]["label"]["names"] == classes
    assert described["features"]["image"]["_type"] == "Image"
    for row, sample in zip(rows, samples, strict=True):
        path, data = sample.pop("image.path"), sample["image"]
        image = data and {"bytes": data, "path": path, "size": [24, 16]}
        meta = sample["meta"] and json.dumps(sample["meta"])
        boxes = None if sample["boxes"] is None else sample["boxes"].tolist()
        key = sample[KEY].decode()
        assert row == sample | {KEY: key, "image": image, "meta": meta, "boxes": boxes}
    assert [one["split"] for one in split if "split" in one] == ["train", "val"]
    assert split[0]["features"]["label"]["names"] == ["x", "y"]
    assert sum("image" in one for one in split) == 12


# --- litdata --------------------------------------------------------------------------------------


def shaped(value: Any) -> Any:
    """A value as it is printed: of an array without elements, the shape is lost."""
    return value.reshape(0) if isinstance(value, np.ndarray) and not value.size else value


def test_what_optimize_writes_is_read_without_a_mismatch(tmp_path: Path) -> None:
    written = program("write", "litdata", tmp_path / "ld", 0)
    assert set(written) == {"plain", "frames", "chunk", "sample"}
    for name, rows in written.items():
        done = index(tmp_path / "ld" / name, jobs=1)
        assert done.records == len(rows) == 40 and done.shards > 1
        pack(tmp_path / "ld" / name, tmp_path / name, jobs=1)
        for folder in (tmp_path / "ld" / name, tmp_path / name):
            found = {one["label"]: one for one in open_dataset(folder, decode=None)}
            for row in rows:
                sample = found.pop(row["label"])
                del sample[KEY]
                assert sample.keys() == row.keys()
                pairs = ((name, shaped(sample[name]), shaped(row[name])) for name in row)
                assert [name for name, one, other in pairs if not same(one, other)] == []
            assert not found
