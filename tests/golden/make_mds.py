"""Writes tests/golden/mds/ with mosaicml-streaming itself; needs no shardio.

    python3.11 -m venv VENV
    VENV/bin/pip install torch --constraint tools/constraints.txt   # PyPI's would bring CUDA along
    VENV/bin/pip install mosaicml-streaming==0.13.0 --no-deps
    VENV/bin/pip install "numpy==2.1.3" "xxhash==3.8.2" zstd==1.5.7.2 brotli==1.2.1 \
        python-snappy==0.7.3 pillow==12.1.1 "catalogue<3" "matplotlib<4" tqdm
    VENV/bin/python tests/golden/make_mds.py

every/      all encodings but pkl, several shards
merged/     two writers' folders, and the list that merge_index makes of both
split/      train/ and val/, each with its own list
zstd/ gz/ bz2/ br/ snappy/    the same samples, compressed
pickled/    a column that is pkl
expected.json    of each folder, what LocalDataset reads from it (of the compressed, once inflated)

The clouds' clients, torchvision and transformers are not needed to write files: where they are not
installed, an empty module stands in, so that `import streaming` works.
"""

# ruff: noqa: E402 - the stand-ins come before what imports them
import importlib.util
import io
import json
import shutil
import sys
import tempfile
import types
from decimal import Decimal
from pathlib import Path
from typing import Any

STAND_INS = {
    "torchvision": (),
    "torchvision.datasets": ("VisionDataset",),
    "torchvision.transforms": (),
    "torchvision.transforms.functional": ("to_tensor",),
    "transformers": (),
    "transformers.feature_extraction_utils": ("BatchFeature",),
    "transformers.tokenization_utils_base": ("BatchEncoding",),
    "transformers.models": (),
    "transformers.models.auto": (),
    "transformers.models.auto.tokenization_auto": ("AutoTokenizer",),
}
for root in ("torchvision", "transformers"):
    if importlib.util.find_spec(root) is None:
        for name, classes in STAND_INS.items():
            if name.partition(".")[0] == root:
                sys.modules[name] = module = types.ModuleType(name)
                for one in classes:
                    setattr(module, one, type(one, (), {}))

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks import own_home

own_home.enter()  # before what looks where its home is

import numpy as np
from PIL import Image
from streaming import LocalDataset, MDSWriter
from streaming.base.compression import decompress
from streaming.base.util import merge_index

FOLDER = Path(__file__).resolve().parent / "mds"
DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
FLOATS = ("float16", "float32", "float64")
MODES = (
    "1",
    "L",
    "P",
    "LA",
    "RGB",
    "RGBA",
    "RGBX",
    "CMYK",
    "YCbCr",
    "LAB",
    "HSV",
    "I",
    "F",
    "I;16",
)


def image(mode: str, number: int) -> Image.Image:
    """A small image of noise; of odd sizes, as rows of mode "1" are padded."""
    width, height = 3 + 5 * (number % 2), 2 + number
    many = len(Image.new(mode, (width, height)).tobytes())
    return Image.frombytes(mode, (width, height), np.random.default_rng(number).bytes(many))


def encoded(kind: str, number: int) -> bytes:
    out = io.BytesIO()
    image("RGB", number).save(out, kind)
    return out.getvalue()


COLUMNS = {
    "a bytes": "bytes",
    "a str": "str",
    "an int": "int",
    **{dtype: dtype for dtype in (*DTYPES, *FLOATS)},
    "str_int": "str_int",
    "str_float": "str_float",
    "str_decimal": "str_decimal",
    "jpeg": "jpeg",
    "png": "png",
    "jpeg_array": "jpeg_array",
    "jpegarray": "jpegarray",
    "list jpeg": "list[jpeg]",
    "list png": "list[png]",
    "list pil": "list[pil]",
    "json": "json",
    "array": "ndarray",
    "array of int16": "ndarray:int16",
    "array of 2 x 3": "ndarray:float32:2,3",
    **{f"array of {dtype}": "ndarray" for dtype in (*DTYPES[1:], *FLOATS)},
    **{f"pil {mode}": "pil" for mode in MODES},
    "Z \u732b": "str",
}
SHAPES = ((1,), (3, 4), (1, 2, 1, 2), (300, 1), (2, 2, 2))
JSONS = (
    None,
    {"boxes": [[1, 2.5, -3], []], "name": "caf\u00e9"},
    [1, "two", None, True, 1e300],
    "text",
    7,
)


def sample(number: int) -> dict[str, Any]:
    noise = np.random.default_rng(100 + number)
    made: dict[str, Any] = {
        "a bytes": noise.bytes(number * 3),
        "a str": "\u732b\u00e9" * number,
        "an int": -(2**63) if number == 0 else 2**62 + number,
        "str_int": (-1) ** number * 10 ** (number * 10),
        "str_float": (0.1, -0.0, 1e-300, float("inf"), 123456.789)[number],
        "str_decimal": Decimal(("0.1000", "-1E+30", "0", "NaN", "3.14159265358979323846")[number]),
        "jpeg": encoded("JPEG", number) if number else image("RGB", 9),
        "png": encoded("PNG", number) if number else image("RGB", 9),
        "jpeg_array": [encoded("JPEG", i) for i in range(1 + number % 3)],
        "jpegarray": [encoded("JPEG", i) for i in range(1 + number % 2)],
        "list jpeg": [image("RGB", i) for i in range(number % 3)],
        "list png": [image("RGB", i) for i in range(number % 2)],
        "list pil": [image("RGB", 1), image("L", 2)][: number % 3],
        "json": JSONS[number],
        "array": noise.integers(0, 256, SHAPES[number]).astype("uint8"),
        "array of int16": noise.integers(-9, 9, SHAPES[-3 - number % 2]).astype("int16"),
        "array of 2 x 3": noise.random((2, 3)).astype("float32"),
        "Z \u732b": "last",
    }
    for dtype in DTYPES:
        bounds = np.iinfo(dtype)
        made[dtype] = (bounds.min, bounds.max, 0, 1, 100)[number]
        made[f"array of {dtype}"] = np.array([bounds.min, bounds.max], dtype)
    for dtype in FLOATS:
        made[dtype] = (0.5, -0.0, float("inf"), 1 / 3, float("nan"))[number]
        made[f"array of {dtype}"] = np.array([[0.5, float("nan"), 1 / 3]], dtype)
    for mode in MODES:
        made[f"pil {mode}"] = image(mode, number)
    return {name: made[name] for name in COLUMNS}


def simple(number: int) -> dict[str, Any]:
    return {"image": encoded("PNG", number % 7), "label": number % 10, "text": f"sample {number}"}


SIMPLE = {"image": "png", "label": "int", "text": "str"}


def tagged(value: Any) -> Any:
    """A value as JSON can hold it; of a JPEG or PNG, the bytes that are stored."""
    if isinstance(value, list) and value and isinstance(value[0], Image.Image):
        return [tagged(one) for one in value]
    if isinstance(value, Image.Image):
        if value.format is not None:  # a file's
            value.fp.seek(0)
            return {"bytes": value.fp.read().hex()}
        one = value.mode == "1"  # numpy gets the byte 255 for a pixel that is set
        value = np.asarray(value).view("u1") != 0 if one else np.asarray(value)
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, Decimal):
        return {"decimal": str(value)}
    if isinstance(value, np.ndarray):
        return {"array": [value.dtype.str, list(value.shape), value.tobytes().hex()]}
    if isinstance(value, np.generic):
        return {"number": value.item()}
    if isinstance(value, (int, float, str)) or value is None:
        return {"number" if isinstance(value, (int, float)) else "json": value}
    return {"json": value}


def write(folder: Path, columns: dict[str, str], samples: list[Any], **options: Any) -> None:
    with MDSWriter(out=str(folder), columns=columns, **options) as writer:
        for one in samples:
            writer.write(one)


def read(folder: Path) -> list[Any]:
    return [
        {name: tagged(value) for name, value in one.items()} for one in LocalDataset(str(folder))
    ]


def inflated(folder: Path) -> list[Any]:
    with tempfile.TemporaryDirectory() as scratch:
        for path in folder.iterdir():
            ending = path.name.rpartition(".")[2]
            if ending == "json":
                shutil.copy(path, scratch)
            else:
                Path(scratch, path.stem).write_bytes(decompress(ending, path.read_bytes()))
        return read(Path(scratch))


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    expected: dict[str, Any] = {}
    write(
        FOLDER / "every",
        COLUMNS,
        [sample(i) for i in range(5)],
        size_limit=25_000,
        hashes=["sha1", "xxh64"],
    )
    expected["every"] = read(FOLDER / "every")
    for number in range(2):
        part = [simple(i) for i in range(number * 7, number * 7 + 5)]
        write(FOLDER / "merged" / str(number), SIMPLE, part, size_limit=500)
        split = ("train", "val")[number]
        write(FOLDER / "split" / split, SIMPLE, part)
        expected[f"split/{split}"] = read(FOLDER / "split" / split)
    merge_index(str(FOLDER / "merged"), keep_local=True)
    expected["merged"] = read(FOLDER / "merged")
    for compression in ("zstd", "gz:6", "bz2", "br:5", "snappy"):
        folder = FOLDER / compression.partition(":")[0]
        options = {"compression": compression, "size_limit": 900}
        write(folder, SIMPLE, [simple(i) for i in range(8)], **options)
        expected[folder.name] = inflated(folder)
    write(FOLDER / "pickled", {"label": "int", "x": "pkl"}, [{"label": 1, "x": {1, 2}}])
    text = json.dumps(expected, indent=1, ensure_ascii=True)
    (FOLDER / "expected.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
    print(f"{FOLDER}: {sum(f.stat().st_size for f in FOLDER.rglob('*') if f.is_file()):,} bytes")
