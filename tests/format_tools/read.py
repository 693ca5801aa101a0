"""Reads what `shardio export` wrote by the formats' own tools, and prints it as JSON.

    read.py FORMAT DIR FORMAT DIR ...

    webdataset   by webdataset
    mds          by mosaicml-streaming, which compares each shard's hash
    tfrecord     by the package tfrecord through the .idx; checksums by the package crc32c
    lmdb-caffe   by lmdb, and Caffe's Datum by protobuf
    parquet      by datasets: the features of each split, then its rows

    read.py versions: what all of them are

Bytes are {"bytes": hex}, arrays {"array": [dtype, list]}. Runs in tests/format_tools/.venv.
"""

import glob
import json
import os
import struct
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.stand_ins import StandIns


def webdataset(folder: str) -> list[dict[str, Any]]:
    import webdataset

    shards = sorted(glob.glob(f"{folder}/*.tar"))
    return [
        {name: value for name, value in sample.items() if name not in ("__url__", "__local_path__")}
        for sample in webdataset.WebDataset(shards, shardshuffle=False).decode()
    ]


def mds(folder: str) -> list[dict[str, Any]]:
    sys.meta_path.insert(0, StandIns())
    import streaming
    from PIL import Image

    with tempfile.TemporaryDirectory() as cache:
        dataset = streaming.StreamingDataset(
            remote=folder, local=cache, shuffle=False, batch_size=1, validate_hash="sha256"
        )
        found = []
        for sample in dataset:
            for name, value in sample.items():
                if isinstance(value, Image.Image):
                    value.load()
                    kind = value.format
                    sample[name] = {"image": kind, "size": list(value.size)}
            found.append(sample)
        del dataset
    return found


def tfrecord(folder: str) -> list[dict[str, Any]]:
    import crc32c
    from tfrecord.reader import tfrecord_loader

    found = []
    for path in sorted(glob.glob(f"{folder}/*.tfrecord")):
        index = path.removesuffix(".tfrecord") + ".idx"
        with open(index) as lines, open(path, "rb") as file:
            for line in lines:
                offset, size = map(int, line.split())
                file.seek(offset)
                record = file.read(size)
                (length,) = struct.unpack_from("<Q", record)
                assert length + 16 == size
                for data, at in ((record[:8], 8), (record[12:-4], size - 4)):
                    crc = crc32c.crc32c(data)
                    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
                    assert masked == struct.unpack_from("<I", record, at)[0]
        found += list(tfrecord_loader(path, index, None, shard=(0, 1)))
    return found


def lmdb_caffe(folder: str) -> list[dict[str, Any]]:
    import lmdb
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    datum = descriptor_pb2.DescriptorProto(name="Datum")
    for number, (name, kind) in enumerate(
        [
            *(("channels", "INT32"), ("height", "INT32"), ("width", "INT32"), ("data", "BYTES")),
            *(("label", "INT32"), ("float_data", "FLOAT"), ("encoded", "BOOL")),
        ],
        1,
    ):
        label = "REPEATED" if name == "float_data" else "OPTIONAL"
        datum.field.add(
            name=name,
            number=number,
            type=getattr(field, f"TYPE_{kind}"),
            label=getattr(field, f"LABEL_{label}"),
        )
    file = descriptor_pb2.FileDescriptorProto(name="caffe.proto", package="caffe", syntax="proto2")
    file.message_type.append(datum)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    parse = message_factory.GetMessageClass(pool.FindMessageTypeByName("caffe.Datum")).FromString
    found = []
    with lmdb.open(folder, readonly=True, lock=False) as environment, environment.begin() as txn:
        for key, value in txn.cursor():
            one = parse(value)
            assert one.SerializeToString() == value  # nothing in it is unknown
            found.append(
                {
                    "key": key,
                    "data": one.data,
                    "label": one.label if one.HasField("label") else None,
                    "encoded": one.encoded,
                }
            )
    return found


def parquet(folder: str) -> list[dict[str, Any]]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets

    datasets.disable_progress_bars()
    found = []
    with tempfile.TemporaryDirectory() as cache:
        splits = datasets.load_dataset(folder, cache_dir=cache)
        for split, rows in splits.items():
            found.append({"split": split, "features": rows.features.to_dict()})
            bare = rows
            for name, feature in rows.features.items():
                if isinstance(feature, datasets.Image):
                    bare = bare.cast_column(name, datasets.Image(decode=False))
            for row, stored in zip(rows, bare, strict=True):
                for name, value in row.items():
                    if hasattr(value, "getpixel"):  # an image that was decoded
                        stored[name]["size"] = list(value.size)
                found.append(stored)
    return found


def versions() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets  # noqa: F401
    import litdata  # noqa: F401
    import webdataset  # noqa: F401

    sys.meta_path.insert(0, StandIns())
    import streaming  # noqa: F401
    import tfrecord.reader  # noqa: F401

    names = ("webdataset", "mosaicml-streaming", "tfrecord", "lmdb", "protobuf")
    names += ("datasets", "litdata")
    print("setup-formats: done:", ", ".join(f"{name} {version(name)}" for name in names))


def plain(value: Any) -> Any:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"bytes": bytes(value).hex()}
    if hasattr(value, "dtype"):
        return {"array": [value.dtype.str, value.tolist()]}
    raise TypeError(type(value))


if __name__ == "__main__":
    if sys.argv[1:] == ["versions"]:
        versions()
    else:
        read = {
            "webdataset": webdataset,
            "mds": mds,
            "tfrecord": tfrecord,
            "lmdb-caffe": lmdb_caffe,
            "parquet": parquet,
        }
        pairs = zip(sys.argv[1::2], sys.argv[2::2], strict=True)
        print(json.dumps([read[name](folder) for name, folder in pairs], default=plain))
