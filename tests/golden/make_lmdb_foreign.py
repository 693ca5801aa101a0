"""Make tests/golden/lmdb_foreign/: LMDB databases as Caffe's and LSUN's tools lay them out.

    python3 -m venv /tmp/golden && /tmp/golden/bin/pip install lmdb==3.0.0 protobuf==7.36.2 \\
        numpy==2.4.6 pillow==13.0.0
    /tmp/golden/bin/python tests/golden/make_lmdb_foreign.py

Caffe itself has no wheel: its Datum is encoded by the protobuf package, from the fields that
caffe.proto publishes, and put under the keys that convert_imageset gives. No line of shardio runs
here. `expected.json` says what each record holds.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import PIL
from google.protobuf import __version__ as protobuf_version
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from PIL import Image

OUT = Path(__file__).resolve().parent / "lmdb_foreign"


def datum_class() -> Any:
    """caffe.Datum of caffe.proto, proto2."""
    file = descriptor_pb2.FileDescriptorProto(name="caffe.proto", package="caffe", syntax="proto2")
    message = file.message_type.add(name="Datum")
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, number, kind, label in (
        ("channels", 1, kinds.TYPE_INT32, kinds.LABEL_OPTIONAL),
        ("height", 2, kinds.TYPE_INT32, kinds.LABEL_OPTIONAL),
        ("width", 3, kinds.TYPE_INT32, kinds.LABEL_OPTIONAL),
        ("data", 4, kinds.TYPE_BYTES, kinds.LABEL_OPTIONAL),
        ("label", 5, kinds.TYPE_INT32, kinds.LABEL_OPTIONAL),
        ("float_data", 6, kinds.TYPE_FLOAT, kinds.LABEL_REPEATED),
        ("encoded", 7, kinds.TYPE_BOOL, kinds.LABEL_OPTIONAL),
    ):
        message.field.add(name=name, number=number, type=kind, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("caffe.Datum"))


def image(number: int, kind: str, side: int) -> bytes:
    noise = np.random.default_rng(number).integers(0, 256, (side, side + number % 3, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, kind)
    return out.getvalue()


def described(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            "sha256": hashlib.sha256(value.tobytes()).hexdigest(),
        }
    if isinstance(value, bytes):
        return {"bytes": len(value), "sha256": hashlib.sha256(value).hexdigest()}
    return value


def write(name: str, records: list[tuple[bytes, bytes, dict[str, Any]]], *, batch: int) -> Any:
    """A database of these, `batch` records a transaction, as Caffe's tools commit them."""
    path = OUT / name
    folder = path.suffix == ""
    path.parent.mkdir(parents=True, exist_ok=True)
    env = lmdb.open(str(path), map_size=1 << 24, subdir=folder, lock=False)
    for start in range(0, len(records), batch):
        with env.begin(write=True) as transaction:
            for key, value, _ in records[start : start + batch]:
                transaction.put(key, value)
    env.close()
    return {
        key.decode(): {field: described(value) for field, value in values.items()}
        for key, _, values in records
        if values
    }


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    Datum = datum_class()
    noise = np.random.default_rng(4)

    def raw(number: int, shape: tuple[int, int, int]) -> tuple[bytes, bytes, dict[str, Any]]:
        chw = noise.integers(0, 256, shape, np.uint8)
        datum = Datum(
            channels=shape[0],
            height=shape[1],
            width=shape[2],
            data=chw.tobytes(),
            label=number % 10,
        )
        key = b"%08d_class/%d.png" % (number, number)
        return (
            key,
            datum.SerializeToString(),
            {"image": chw.transpose(1, 2, 0), "label": number % 10},
        )

    def encoded(number: int) -> tuple[bytes, bytes, dict[str, Any]]:
        data = image(number, "JPEG", 60 if number % 2 else 16)
        datum = Datum(data=data, label=number - 2, encoded=True)
        key = b"%08d_%d.jpg" % (number, number)
        return key, datum.SerializeToString(), {"image": data, "label": number - 2}

    def floats(number: int) -> tuple[bytes, bytes, dict[str, Any]]:
        chw = noise.standard_normal((5, 2, 3)).astype(np.float32)
        datum = Datum(channels=5, height=2, width=3, float_data=chw.ravel().tolist())
        key = b"%08d" % number
        return key, datum.SerializeToString(), {"image": chw.transpose(1, 2, 0), "label": None}

    def scene(number: int) -> tuple[bytes, bytes, dict[str, Any]]:
        data = image(number, "WEBP", 40)
        key = hashlib.sha1(b"%d" % number).hexdigest().encode()
        return key, data, {"image": data}

    expected = {
        "tools": {
            "lmdb": lmdb.__version__,
            "protobuf": protobuf_version,
            "numpy": np.__version__,
            "pillow": PIL.__version__,
        },
        "files": {
            "caffe_raw/data.mdb": write(
                "caffe_raw", [raw(i, (3, 12, 10)) for i in range(40)], batch=10
            ),
            "caffe_encoded/data.mdb": write(
                "caffe_encoded", [encoded(i) for i in range(12)], batch=5
            ),
            "caffe_float.mdb": write("caffe_float.mdb", [floats(i) for i in range(3)], batch=3),
            "lsun.lmdb": write("lsun.lmdb", [scene(i) for i in range(12)], batch=4),
            "notes.lmdb": write(
                "notes.lmdb",
                [
                    *(
                        (b"%d" % i, image(i, "PNG", 8), {"image": image(i, "PNG", 8)})
                        for i in range(5)
                    ),
                    (b"__len__", b"\x80\x04K\x05.", {}),
                    (b"__keys__", b"\x80\x04]\x94.", {}),
                ],
                batch=9,
            ),
        },
    }
    (OUT / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
