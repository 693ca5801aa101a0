"""tf.data: eight TFRecord files of tf.train.Examples with ImageNet's keys.

Settings of its performance guide (tensorflow.org/guide/data_performance): parallel map and prefetch
as it sees fit (AUTOTUNE), not deterministic, two threads. Decoding as in the official ResNet
(tensorflow/models, imagenet_preprocessing.py): `sample_distorted_bounding_box`, then only the crop
is decoded (`decode_and_crop_jpeg`); `tf.image.resize`, bilinear and not antialiased, as there.
Area and ratio of the crop are those of all others here.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..data import listing
from .base import AREA, RATIO

FILES = 8
SHUFFLED = 1000  # samples, of encoded bytes; the official ResNet's 10,000 would hold all of these


def write(folder: str, out: str) -> None:
    import tensorflow as tf

    os.makedirs(out)
    files, train = listing(folder), tf.train
    with ExitStack() as stack:
        names = [f"{out}/{i:05d}.tfrecord" for i in range(FILES)]
        writers = [stack.enter_context(tf.io.TFRecordWriter(name)) for name in names]
        for i, (path, label) in enumerate(files):
            image = Path(path).read_bytes()
            features = {
                "image/encoded": train.Feature(bytes_list=train.BytesList(value=[image])),
                "image/class/label": train.Feature(int64_list=train.Int64List(value=[label])),
            }
            example = train.Example(features=train.Features(feature=features))
            writers[i * FILES // len(files)].write(example.SerializeToString())


def images(path: str, *, size: int, batch: int, workers: int) -> Iterator[Any]:
    import tensorflow as tf

    def cropped(image: Any) -> Any:
        begin, extent, _ = tf.image.sample_distorted_bounding_box(
            tf.image.extract_jpeg_shape(image), bounding_boxes=tf.zeros([1, 0, 4]),
            area_range=AREA, aspect_ratio_range=RATIO, max_attempts=100,
            use_image_if_no_bounding_boxes=True, min_object_covered=0.0,
        )  # fmt: skip
        top, left, _ = tf.unstack(begin)
        height, width, _ = tf.unstack(extent)
        window = tf.stack([top, left, height, width])
        part = tf.image.decode_and_crop_jpeg(image, window, channels=3)
        part = tf.image.random_flip_left_right(part)
        return tf.cast(tf.round(tf.image.resize(part, [size, size])), tf.uint8)

    def parsed(record: Any) -> Any:
        found = tf.io.parse_single_example(record, _spec(tf))
        image = found["image/encoded"]
        if size == 32:
            pixels = tf.ensure_shape(tf.io.decode_jpeg(image, channels=3), [32, 32, 3])
        else:
            pixels = cropped(image)
        return pixels, found["image/class/label"]

    options = tf.data.Options()
    options.deterministic = False
    options.threading.private_threadpool_size = workers
    dataset = (
        tf.data.TFRecordDataset(_files(path), num_parallel_reads=tf.data.AUTOTUNE)
        .shuffle(SHUFFLED)
        .repeat()
        .map(parsed, num_parallel_calls=tf.data.AUTOTUNE)
        .batch(batch)
        .prefetch(tf.data.AUTOTUNE)
        .with_options(options)
    )
    found: Iterator[Any] = dataset.as_numpy_iterator()
    return found


def records(path: str) -> Iterator[bytes]:
    import tensorflow as tf

    parsed = tf.data.TFRecordDataset(_files(path)).map(
        lambda record: tf.io.parse_single_example(record, _spec(tf)),
        num_parallel_calls=tf.data.AUTOTUNE,
    )
    samples = parsed.prefetch(tf.data.AUTOTUNE).as_numpy_iterator()
    return (sample["image/encoded"] for sample in samples)


def _spec(tf: Any) -> dict[str, Any]:
    return {
        "image/encoded": tf.io.FixedLenFeature([], tf.string),
        "image/class/label": tf.io.FixedLenFeature([], tf.int64),
    }


def _files(path: str) -> list[str]:
    return sorted(glob.glob(f"{path}/*.tfrecord"))
