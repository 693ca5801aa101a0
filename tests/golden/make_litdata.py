"""Make tests/golden/litdata/: folders as `litdata.optimize` writes them.

    python3 -m venv /tmp/golden && /tmp/golden/bin/pip install litdata==0.2.76 torch==2.13.0 \\
        numpy==2.4.6 pillow==12.1.1 zstd==1.5.7.2
    /tmp/golden/bin/python tests/golden/make_litdata.py

No line of shardio runs here. `expected.json` says what each sample holds: the values that
StreamingDataset gives.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks import own_home

own_home.enter()  # before what looks where its home is
# ruff: noqa: E402

import litdata
import numpy as np
import torch
from PIL import Image

OUT = Path(__file__).resolve().parent / "litdata"
N = 11


def image(number: int) -> Image.Image:
    noise = np.random.default_rng(number).integers(0, 256, (5, 4 + number % 3, 3), np.uint8)
    return Image.fromarray(noise)


def file(number: int) -> bytes:
    out = io.BytesIO()
    image(number).save(out, "JPEG")
    return out.getvalue()


def every(number: int) -> dict[str, Any]:
    return {
        "image": image(number),
        "label": number % 3,
        "légende": f"猫 {number}",
        "score": number / 7,
        "good": number % 2 == 0,
        "grid": np.arange(6, dtype=np.int16).reshape(2, 3) + number,
        "vector": np.arange(number % 4, dtype=np.float32) / 3,
        "tensor": torch.full((2, 2), number / 2, dtype=torch.float64),
        "ids": torch.arange(number % 3),
        "boxes": [[0.5, 1.0, 2.0, float(number)]] * (number % 3),
        "words": ["é", "x"] * (number % 2),
        "objects": [{"name": "a", "area": 0.5, "n": number, "none": None}] * (number % 3),
        "meta": {"a": number, "deep": [number, None, "x"]},
        "blob": bytes(range(number)),
    }


def photo(number: int) -> tuple[Any, int]:
    return litdata.Jpeg(bytes=file(number)), number % 2


def blob(number: int) -> bytes:
    return bytes(range(number))


def pickled(number: int) -> dict[str, Any]:
    return {"image": image(number), "box": {number, 1}}


def text(number: int) -> dict[str, Any]:
    return {"text": f"é {number}", "label": number % 2}


def described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, Image.Image):
        value = np.asarray(value)
    if isinstance(value, np.ndarray):
        return {"array": value.dtype.str, "shape": value.shape, "hex": value.tobytes().hex()}
    if isinstance(value, (bytes, memoryview)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, dict):
        return {name: described(one) for name, one in value.items()}
    return [described(one) for one in value] if isinstance(value, (list, tuple)) else value


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    rows = {}
    zstd = {"compression": "zstd"}
    for name, make, options in (
        ("every", every, {}),
        ("whole", every, {**zstd, "compression_level": "chunk"}),
        ("frames", every, {**zstd, "compression_batch_size": 2}),
        ("items", every, {**zstd, "compression_level": "sample"}),
        ("tuple", photo, {}),
        ("leaf", blob, {}),
        ("pickled", pickled, {}),
        ("text", text, {}),
    ):
        folder = OUT / name
        litdata.optimize(
            make, list(range(N)), str(folder), num_workers=1, chunk_size=4, verbose=False, **options
        )
        if name == "pickled":
            continue
        if name == "tuple":  # whose images StreamingDataset decodes: what the files were
            rows[name] = [[described(file(number)), number % 2] for number in range(N)]
            continue
        with tempfile.TemporaryDirectory() as cache:  # or it would inflate chunks beside the others
            read = shutil.copytree(folder, Path(cache) / "copy")
            found = [described(sample) for sample in litdata.StreamingDataset(str(read))]
        rows[name] = found
    expected = {"tools": {"litdata": version("litdata")}, "folders": rows}
    (OUT / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
