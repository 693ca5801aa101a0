"""Writes tests/golden/tfrecord/ with TensorFlow, and with the package `tfrecord`; needs no shardio.

    python3.11 -m venv VENV
    VENV/bin/pip install tensorflow-cpu==2.21.0 tfrecord==1.14.6
    VENV/bin/python tests/golden/make_tfrecord.py

    tensorflow.tfrecord    records of every kind, by tf.io.TFRecordWriter and tf.train.Example
    gzip.tfrecord.gz       one record in a file that TensorFlow compressed as a whole
    zlib.tfrecord          likewise
    package.tfrecord .index  by the package, with its index of offsets and sizes
    expected.json          of each, what TensorFlow's own parser reads from it

The two do not import into one process: each brings its own example.proto.
"""

import json
import struct
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "tfrecord"
PACKAGE = """
import sys, numpy, tfrecord
from tfrecord.tools import tfrecord2idx
writer = tfrecord.TFRecordWriter(sys.argv[1])
for i in range(5):
    writer.write({
        "image": (b"\\xff\\xd8\\xff" + bytes([i]) * (i * 100), "byte"),
        "label": (i * 300 - 5, "int"),
        "weights": ([i / 4, -1.5], "float"),
        "names": ([b"a", b"", b"ccc"], "byte"),
    })
writer.write({"length": (3, "int")}, {"steps": ([[1], [2, 3]], "int")})
writer.close()
tfrecord2idx.create_index(sys.argv[1], sys.argv[2])
"""


def write() -> None:
    import tensorflow as tf

    def bytes_(*values: bytes) -> object:
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))

    def ints(*values: int) -> object:
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))

    def floats(*values: float) -> object:
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))

    def example(**features: object) -> bytes:
        named = {name.replace("__", "/"): feature for name, feature in features.items()}
        made = tf.train.Example(features=tf.train.Features(feature=named))
        return made.SerializeToString(deterministic=True)

    records = [
        example(image__encoded=bytes_(b"\xff\xd8\xff" + bytes(900)), image__class__label=ints(7)),
        example(image__encoded=bytes_(b"\xff\xd8\xff"), image__class__label=ints(1000)),
        example(
            zero=ints(0),
            small=ints(127),
            two_bytes=ints(128),
            negative=ints(-1),
            least=ints(-(2**63)),
            most=ints(2**63 - 1),
            few=ints(1, -2, 300),
            many=ints(*range(-5, 200), 2**62, -(2**63)),
            one_float=floats(0.1),
            floats=floats(1.5, float("nan"), float("-inf"), -0.0, 1e-45),
            hundred=floats(*(i / 7 for i in range(100))),
            text=bytes_("猫".encode(), b"", b"\x00\xff"),
            empty_text=bytes_(b""),
            no_bytes=bytes_(),
            no_ints=ints(),
            no_floats=floats(),
            nothing=tf.train.Feature(),
            **{"n" * 200: ints(5), "": ints(6), "é": bytes_(b"x" * 200)},
        ),
        tf.train.Example().SerializeToString(),
        tf.train.SequenceExample(
            context=tf.train.Features(feature={"length": ints(2)}),
            feature_lists=tf.train.FeatureLists(
                feature_list={"steps": tf.train.FeatureList(feature=[ints(1), ints(2, 3)])}
            ),
        ).SerializeToString(),
        b"no message at all",
        b"\x08\x01",  # a message, but no Example
        b"x" * 5000,
    ]
    with tf.io.TFRecordWriter(str(FOLDER / "tensorflow.tfrecord")) as writer:
        for record in records:
            writer.write(record)
    for kind, name in (("GZIP", "gzip.tfrecord.gz"), ("ZLIB", "zlib.tfrecord")):
        with tf.io.TFRecordWriter(str(FOLDER / name), kind) as writer:
            writer.write(records[0])


def read(path: Path) -> list[dict[str, object]]:
    """What TensorFlow finds: the record's bytes, and the features if it is an Example."""
    import tensorflow as tf
    from google.protobuf.message import DecodeError

    found = []
    for tensor in tf.data.TFRecordDataset(str(path)):
        data = tensor.numpy()
        one: dict[str, object] = {"data": data.hex()}
        try:
            sequence = tf.train.SequenceExample.FromString(data)
            features = tf.train.Example.FromString(data).features.feature
            if features and not sequence.feature_lists.feature_list:
                one["features"] = {name: listed(features[name]) for name in sorted(features)}
        except DecodeError:
            pass
        found.append(one)
    return found


def listed(feature: object) -> list[object]:
    """[kind, values]; bytes and floats as hex digits."""
    kind = feature.WhichOneof("kind")
    if kind is None:
        return [None, []]
    values = getattr(feature, kind).value
    if kind == "bytes_list":
        return [kind, [value.hex() for value in values]]
    if kind == "float_list":
        return [kind, [struct.pack("<f", value).hex() for value in values]]
    return [kind, list(values)]


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    write()
    package, index = FOLDER / "package.tfrecord", FOLDER / "package.index"
    subprocess.run([sys.executable, "-c", PACKAGE, str(package), str(index)], check=True)
    expected = {
        "made by": [f"{name} {version(name)}" for name in ("tensorflow-cpu", "tfrecord")],
        "tensorflow": read(FOLDER / "tensorflow.tfrecord"),
        "package": read(package),
    }
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
