"""The numbers of protobuf messages, as TFRecord's examples and Caffe's Datums have them.

A varint has 7 bits a byte, the lowest first, and the high bit where another follows, at most 10.
Source: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number, and where it ends. Raises ValueError, IndexError."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift == 70:
            raise ValueError("a number of more than 10 bytes")


def write_varint(value: int) -> bytes:
    """Return a number as bytes; a negative one as 64 bits in two's complement."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
