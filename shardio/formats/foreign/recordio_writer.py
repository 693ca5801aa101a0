"""MXNet RecordIO files with their .idx: an image and its label, or labels, a record.

`recordio` describes the file. All records go into one file unless a size is given, since an
.idx belongs to one file. A record's id, and its key in the .idx, is its number in the dataset: the
format has no room for other keys. Labels are float32 there, so an int that float32 does not hold
is an error. Source: https://github.com/dmlc/dmlc-core/blob/main/src/recordio.cc (WriteRecord).
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ...errors import SampleError, printable
from ...names import KEY
from ..sample import Sample
from .recordio import FIRST, HEADER, LAST, MAGIC, MAGIC_BYTES, MAX_LENGTH, MIDDLE, PART, WHOLE
from .writer import ExportSpec, ShardedWriter, image_and_label, misfit, to_float32


class RecordIO(ShardedWriter):
    """RecordIO files that are being written."""

    suffix = ".rec"
    default_size = None
    own_files = re.compile(r"\d{5,}\.(rec|idx)")

    def __init__(self, spec: ExportSpec) -> None:
        super().__init__(spec)
        self._image, self._label = image_and_label(spec, "recordio", ("int", "float", "array"))
        self.exported_names = {self._image: "image"}
        if self._label is not None:
            self.exported_names[self._label] = "label"
            if dict(spec.manifest.schema.fields)[self._label] != "int":
                self.notes.append(f"{self._label}: as float32, the format has no other")

    def encode(self, number: int, sample: Sample) -> bytes:
        """Return a record; empty if there is nothing of it. Raises SampleError."""
        image = sample[self._image]
        if image is None:
            raise misfit(sample, self._image, "it is None, and a record there has an image")
        data = self._labels(number, sample) + image
        if len(data) > MAX_LENGTH:
            raise SampleError(
                f"record {printable(sample[KEY])}: {len(data):,} bytes; recordio has room for "
                f"{MAX_LENGTH:,}"
            )
        return _record(data)

    def entry(self, number: int, at: int, size: int) -> bytes:
        """Return what `index` needs of the record that was encoded last."""
        return b"%d\t%d\n" % (number, at)

    def _labels(self, number: int, sample: Sample) -> bytes:
        """Return the header, and the labels where there are several."""
        if self._label is None:
            return HEADER.pack(0, 0.0, number, 0)
        value = sample[self._label]
        if value is None:
            raise misfit(sample, self._label, "it is None, and a record there has a label")
        if not isinstance(value, np.ndarray):
            label = _narrow(np.array(value), sample, self._label)
            return HEADER.pack(0, float(label), number, 0)
        if value.dtype.kind not in "iubf" or value.ndim != 1 or not len(value):
            why = f"{value.dtype} of shape {value.shape}; labels are a list of numbers"
            raise misfit(sample, self._label, why)
        labels = _narrow(value, sample, self._label)
        return HEADER.pack(len(labels), 0.0, number, 0) + labels.tobytes()


def _narrow(value: np.ndarray[Any, Any], sample: Sample, name: str) -> np.ndarray[Any, Any]:
    narrow = to_float32(value)
    if narrow is None:
        raise misfit(sample, name, f"{value} is too large for float32")
    # by Python's integers: numpy would compare both as floats
    if value.dtype.kind in "iu" and narrow.astype(object).tolist() != value.tolist():
        raise misfit(sample, name, f"{value} is no float32, and the format has no other labels")
    return narrow


def _record(data: bytes) -> bytes:
    """Return data as parts that end where the magic was, which is left out there."""
    cuts, at = [], -4
    while (at := data.find(MAGIC_BYTES, at + 4)) >= 0:  # its bytes differ: none begins within one
        if at % 4 == 0:
            cuts.append(at)
    if not cuts:
        return _part(WHOLE, data)
    parts: list[bytes] = []
    begin = 0
    for cut in cuts:
        parts.append(_part(MIDDLE if parts else FIRST, data[begin:cut]))
        begin = cut + 4
    parts.append(_part(LAST, data[begin:]))
    return b"".join(parts)


def _part(kind: int, data: bytes) -> bytes:
    head = PART.pack(MAGIC, kind << 29 | len(data))
    return b"".join((head, data, bytes(-len(data) % 4)))
