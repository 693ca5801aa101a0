"""TFRecord files and Examples, written by their description; shares no line with the reader."""

import struct


def crc32c(data: bytes) -> int:
    """Bit by bit, by the polynomial alone."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15) + (crc << 17) % 2**32 + 0xA282EAD8) % 2**32)


def frame(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def varint(value: int) -> bytes:
    value %= 2**64
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number: int, content: bytes, wire: int = 2) -> bytes:
    head = varint(number << 3 | wire)
    return head + varint(len(content)) + content if wire == 2 else head + content


def entry(name: bytes, feature: bytes) -> bytes:
    return field(1, field(1, name) + field(2, feature))


def texts(*values: bytes) -> bytes:
    return field(1, b"".join(field(1, value) for value in values))


def ints(*values: int, packed: bool = True) -> bytes:
    if packed:
        return field(3, field(1, b"".join(map(varint, values))) if values else b"")
    return field(3, b"".join(field(1, varint(value), 0) for value in values))


def floats(*values: float, packed: bool = True) -> bytes:
    parts = [struct.pack("<f", value) for value in values]
    if packed:
        return field(2, field(1, b"".join(parts)) if values else b"")
    return field(2, b"".join(field(1, part, 5) for part in parts))


def example(*entries: bytes) -> bytes:
    return field(1, b"".join(entries))
