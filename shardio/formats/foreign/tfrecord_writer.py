"""TFRecord files of `tf.train.Example`, with real checksums, and the index that DALI wants.

`tfrecord` describes the file. A field becomes a feature of its own name:

    image, bytes   BytesList
    str, json      BytesList: UTF-8, or JSON text
    int, bool      Int64List
    float          FloatList: float32, the format has no other
    array          Int64List or FloatList, by its dtype, in C order; unless it has one dimension,
                   feature `NAME/shape` has its shape
    the key        BytesList `key`: the format has no keys

A field that is None has no feature. Index: a line `OFFSET SIZE` a record. Source:
https://github.com/NVIDIA/DALI/blob/main/tools/tfrecord2idx
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..sample import Sample
from .protobuf import write_varint
from .tfrecord import checksums, masked
from .writer import ExportSpec, ShardedWriter, check_names, columns, json_bytes, misfit, to_float32

_BYTES, _FLOATS, _INTS = 0x0A, 0x12, 0x1A
_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_TO_BYTES: dict[str, Callable[[Any], bytes]] = {  # of kinds that become a BytesList
    "key": bytes,
    "image": bytes,
    "bytes": bytes,
    "str": str.encode,
    "json": json_bytes,
}


class TFRecord(ShardedWriter):
    """Raises DependencyError, too, without CRC-32C."""

    suffix = ".tfrecord"
    keyed = True
    own_files = re.compile(r"\d{5,}\.(tfrecord|idx)")

    def __init__(self, spec: ExportSpec) -> None:
        super().__init__(spec)
        self._crc = checksums()[0]
        self._fields = columns(spec, "tfrecord")
        shapes = [f"{column}/shape" for column, _, kind in self._fields if kind == "array"]
        check_names([*(column for column, _, _ in self._fields), *shapes], "tfrecord")
        self.exported_names = {field: column for column, field, _ in self._fields}
        floats = [field for _, field, kind in self._fields if kind == "float"]
        if floats:
            self.notes.append(f"{', '.join(floats)}: rounded to float32, the format has no other")

    def encode(self, number: int, sample: Sample) -> bytes:
        """Return a record; empty if there is nothing of it. Raises SampleError."""
        entries = bytearray()
        for column, field, kind in self._fields:
            value = sample[field]
            if value is None:
                continue
            try:
                for name, feature in _features(column, kind, value):
                    entries += _message(
                        0x0A, _message(0x0A, name.encode()) + _message(0x12, feature)
                    )
            except (TypeError, ValueError, OverflowError) as error:
                raise misfit(sample, field, str(error)) from None
        data = _message(0x0A, bytes(entries))
        length = _LENGTH.pack(len(data))
        seals = [_CRC.pack(masked(self._crc(part))) for part in (length, data)]
        return b"".join((length, seals[0], data, seals[1]))

    def entry(self, number: int, at: int, size: int) -> bytes:
        """Return what `index` needs of the record that was encoded last."""
        return b"%d %d\n" % (at, size)


def _features(name: str, kind: str, value: Any) -> Iterator[tuple[str, bytes]]:
    """Yield the names and Features of a field."""
    if kind in _TO_BYTES:
        yield name, _message(_BYTES, _message(0x0A, _TO_BYTES[kind](value)))
    elif kind in ("int", "bool"):
        yield name, _integers([int(value)])
    elif kind == "float":
        yield name, _floats(np.array([value]))
    else:
        if value.dtype.kind in "iub":
            yield name, _integers(value.ravel().tolist())
        elif value.dtype.kind == "f":
            yield name, _floats(value.ravel())
        else:
            raise TypeError(f"arrays of dtype {value.dtype} are neither integers nor floats")
        if value.ndim != 1:
            yield f"{name}/shape", _integers(list(value.shape))


def _integers(values: list[int]) -> bytes:
    if values and max(values) >= 1 << 63:
        raise OverflowError(f"{max(values)} does not fit int64, and the format has no other")
    return _message(_INTS, _message(0x0A, b"".join(map(write_varint, values))))


def _floats(values: np.ndarray[Any, Any]) -> bytes:
    narrow = to_float32(values)
    if narrow is None:
        raise OverflowError("a number in it is too large for float32, and the format has no other")
    return _message(_FLOATS, _message(0x0A, narrow.tobytes()))


def _message(tag: int, content: bytes) -> bytes:
    return bytes((tag,)) + write_varint(len(content)) + content
