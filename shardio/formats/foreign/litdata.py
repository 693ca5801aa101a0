"""LitData's chunks, as `litdata.optimize` writes them, read in place.

    chunk    u32 items | u32 where each begins, and the end [items + 1] | items
    item     u32 size of each leaf [leaves] | leaves

Little-endian. `index.json`, in the same folder, lists the chunks, how many items and bytes each
has, the serializers of the leaves (`data_format`), and the tree that they are the leaves of
(`data_spec`, JSON). A sample that is a dict has a field for each key, a tuple or list the fields
"0", "1", ...; one that is a leaf, "0". What is nested deeper is a value of lists and dicts.

    serializer                            here
    bytes, jpeg, image, file, tiff        bytes
    str, text                             str
    bool, int, float                      bool, int, float
    pil                                   numpy array, as MDS has it: mds.py
    jpeg_array                            list of bytes
    numpy, no_header_numpy, tensor,       numpy array
      no_header_tensor
    json                                  as it is: lists and dicts
    pickle, graph, ...                    refused: to read a pickle is to run code of its writer

Compressed by zstd, a chunk is one frame (`chunk-0-0.zstd.bin`), or has one for each item, or
(`LDFZ01`) for each some hundred items:

    "LDFZ01" 0 0 | u16 1 | u16 flags | u32 items | u32 items of a frame | u32 frames
    | u32 where each item begins, and the end, inflated [items + 1]
    | a frame: u32 its first item | u32 items | u64 byte | u32 bytes | u32 bytes inflated | frames

All but those of one item are inflated whole, into memory, when the chunk is opened. The index keeps
a checksum of each item, since the format has none. Sources:
https://github.com/Lightning-AI/litData/blob/main/src/litdata/streaming/writer.py
https://github.com/Lightning-AI/litData/blob/main/src/litdata/streaming/serializers.py
https://github.com/Lightning-AI/litData/blob/main/src/litdata/streaming/framed_zstd.py
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np

from ...errors import DamageError, SourceError, printable
from ...storage.base import Location, path_in
from ..base import MAX_RECORDS
from ..sample import MAX_DIMENSIONS, pack, unpack
from .base import Values, check_next, parse_json
from .inflate import InflatedFile, check_zstd, most_inflated, unzstd, unzstd_one
from .mds import list_of, pil_pixels, shown

INDEX = "index.json"
_MAX_INDEX = 1 << 28  # bytes of an index.json
_MAX_CHUNK = (1 << 32) - 1  # bytes, inflated: offsets have 32 bits
_MAX_LEAVES, _MAX_DEPTH = 4_096, 32
_U32 = struct.Struct("<I")
_FRAMED = struct.Struct("<8sHHIII")
_FRAME = struct.Struct("<IIQII")
_FRAMED_MAGIC, _ARROW_MAGIC = b"LDFZ01\0\0", b"LDARW01\0"
_WAY_OUT = (
    "Read the dataset with litdata, if you trust it, and write it anew by shardio.Writer, or by "
    "litdata.optimize with {instead}"
)

Decode = Callable[[bytes], Any]
Config = dict[str, Any]  # data_format, data_spec, compression, level


class LitDataFile(InflatedFile):
    """A chunk: its file, or what a compressed one was inflated to; and how to decode an item."""

    def _open(self, storage: Location, name: str, extra: bytes) -> None:
        self._offsets: list[int] = []  # of the items; while the file is indexed, or if inflated
        where, listed = "", 0
        if extra:
            known = unpack(extra)
            config, bytes_of = known["config"], known["bytes"]
        else:
            where, chunk, config = _listed(storage, name)
            listed, bytes_of = chunk["chunk_size"], chunk["chunk_bytes"]
        self._config, self._bytes_of = config, bytes_of
        self._spec = _Spec(config, self.name)
        self._each = config["level"] == "sample"
        self._whole = config["compression"] is not None and ".zstd" in name.rpartition("/")[2]
        if not self._whole and self.size != bytes_of:
            raise DamageError(
                f"{self.name}: it has {self.size:,} bytes, but {INDEX} says {bytes_of:,}: one of "
                "them was cut short or replaced. Copy both anew"
            )
        if self._whole or config["level"] in ("batch", "sample"):
            check_zstd(self.name)
        if extra and not self._whole and config["level"] != "batch":
            return  # the index has all that its head says
        try:
            self._offsets = self._read_head()
        except ValueError as error:
            raise DamageError(f"{self.name}: {error}") from None
        if not extra and len(self._offsets) - 1 != listed:
            raise DamageError(
                f"{self.name}: it has {len(self._offsets) - 1:,} items, but {where} says "
                f"{listed:,}. The chunk is damaged, or belongs to another dataset"
            )

    def _read_head(self) -> list[int]:
        """Return where the items begin, and the last ends; inflate what is compressed as a whole.

        Raises ValueError, DamageError.
        """
        if self._file.size >= _FRAMED.size and self._file.read(0, 8) == _FRAMED_MAGIC:
            return self._inflate_frames()
        end = self.size
        if self._whole:
            if not 0 <= self._bytes_of <= min(most_inflated(self.size), _MAX_CHUNK):
                raise ValueError(f"{self.size:,} bytes that would become {self._bytes_of:,}")
            inflated = unzstd(self._file.read(0, self.size), self._bytes_of)
            end = len(inflated)
            if end != self._bytes_of:
                raise ValueError(f"inflated, it has {end:,} bytes, expected {self._bytes_of:,}")
            self.read_from(inflated)
        if end < 8:
            raise ValueError(f"a chunk of {end} bytes")
        (items,) = _U32.unpack(self.read(0, 4))
        start = 4 + 4 * (items + 1)
        if items > MAX_RECORDS or start > end:
            raise ValueError(f"byte 0: {items:,} items, in {end:,} bytes")
        offsets = _offsets(self.read(4, 4 * (items + 1)), start)
        if offsets[-1] != end:
            if end >= 12 and self.read(end - 8, 8) == _ARROW_MAGIC:
                raise SourceError(
                    f"{self.name}: its rows are an Arrow table, as litdata keeps text and numbers "
                    "without images. " + _WAY_OUT.format(instead="a tuple instead of a dict")
                )
            raise ValueError(f"its items end at byte {offsets[-1]:,}, expected {end:,}")
        return offsets

    def _inflate_frames(self) -> list[int]:
        """Inflate a chunk of several frames. Raises ValueError, DamageError."""
        _, version, _, items, _, frames = _FRAMED.unpack(self._file.read(0, _FRAMED.size))
        table = _FRAMED.size + 4 * (items + 1)
        if version != 1 or items > MAX_RECORDS or table + _FRAME.size * frames > self.size:
            raise ValueError(
                f"version {version}, {items:,} items in {frames:,} frames, in {self.size:,} bytes"
            )
        offsets = _offsets(self._file.read(_FRAMED.size, 4 * (items + 1)), 0)
        if offsets[-1] > most_inflated(self.size):  # frames may lie over each other
            raise ValueError(f"{self.size:,} bytes that would become {offsets[-1]:,}")
        rows = self._file.read(table, _FRAME.size * frames)
        found, done = [], 0
        for first, count, at, size, inflated in _FRAME.iter_unpack(rows):
            if first != done or first + count > items or at + size > self.size:
                raise ValueError(f"a frame of {count:,} items from {first:,} at byte {at:,}")
            done += count
            expected = offsets[done] - offsets[first]
            if inflated != expected or inflated > most_inflated(size):
                raise ValueError(f"a frame of {size:,} bytes that would become {inflated:,}")
            data = unzstd(self._file.read(at, size), inflated)
            if len(data) != inflated:
                raise ValueError(f"a frame has {len(data):,} bytes, expected {inflated:,}")
            found.append(data)
        if done != items:
            raise ValueError(f"its frames have {done:,} items, expected {items:,}")
        self.read_from(b"".join(found))
        return offsets

    def scan(self) -> Iterator[tuple[int, int]]:
        """Yield (offset, length) of each record."""
        for begin, end in pairwise(self._offsets):
            yield begin, end - begin

    def extra(self) -> bytes:
        """Return what opening needs besides the file."""
        return pack({"config": self._config, "bytes": self._bytes_of})

    def values(self, data: bytes, record: int) -> Values:
        """Return the values of a record. Raises ValueError."""
        return self._spec.values(unzstd_one(data) if self._each else data)


def _offsets(data: bytes, start: int) -> list[int]:
    """Return ascending offsets from `start` on. Raises ValueError."""
    offsets: list[int] = np.frombuffer(data, "<u4").tolist()
    if offsets[0] != start:
        raise ValueError(f"its first item is at byte {offsets[0]:,}, expected {start:,}")
    if (np.diff(np.array(offsets, np.int64)) < 0).any():
        raise ValueError("an item ends before it begins")
    return offsets


# --- index.json -----------------------------------------------------------------------------------


def _listed(storage: Location, name: str) -> tuple[str, dict[str, Any], Config]:
    """Return where a chunk is listed, for messages, its entry there, and what all chunks share.

    Raises SourceError, DamageError.
    """
    folder, slash, own = name.rpartition("/")
    index = f"{folder}{slash}{INDEX}"
    where = path_in(storage, index)
    try:
        chunks, config = _parse(storage.read(index, _MAX_INDEX))
    except FileNotFoundError:
        raise SourceError(
            f"{where}: it is not there; litdata.optimize makes it when it has finished"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DamageError(f"{where}: not a list of chunks: {error}. Copy it anew") from None
    if own not in chunks:
        raise SourceError(
            f"{where}: it does not list {printable(own)}, such as a copy that litdata inflated. "
            "Move that away, or choose the others: --files 'chunk-*.zstd*.bin'"
        )
    check_next(storage, list(chunks), name, where)
    loader = config.get("item_loader")
    if loader not in (None, "PyTreeLoader") or config.get("encryption") is not None:
        what = "is encrypted" if config.get("encryption") is not None else f"is for {shown(loader)}"
        raise SourceError(
            f"{where}: the dataset {what}, which is not read here. "
            + _WAY_OUT.format(instead="the default item loader, and no encryption")
        )
    shared = {name: config.get(name) for name in ("data_format", "data_spec", "compression")}
    return where, chunks[own], {**shared, "level": config.get("compression_level")}


@lru_cache(maxsize=4)  # one list has thousands of chunks, each of which is opened
def _parse(text: bytes) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the chunks of a list, by name, and its config. Raises ValueError, RecursionError."""
    described = json.loads(text.decode("utf-8"))
    chunks = described.get("chunks") if isinstance(described, dict) else None
    config = described.get("config") if isinstance(described, dict) else None
    if not isinstance(chunks, list) or not isinstance(config, dict):
        raise ValueError("expected an object with `chunks` and `config`")
    for option in ("compression", "compression_level"):
        if not isinstance(value := config.get(option), str | None) or not (value or "").isascii():
            raise ValueError(f"{option} is {shown(config[option])}")
    found: dict[str, dict[str, Any]] = {}
    for number, chunk in enumerate(chunks):
        name = chunk.get("filename") if isinstance(chunk, dict) else None
        if not isinstance(name, str) or "/" in name or name in found:
            raise ValueError(f"chunk {number} has no name of its own")
        for count in ("chunk_size", "chunk_bytes"):
            if type(chunk.get(count)) is not int or not 0 <= chunk[count] <= _MAX_CHUNK:
                raise ValueError(f"chunk {number}: {count} is {shown(chunk.get(count))}")
        found[name] = chunk
    return found, config


# --- leaves ---------------------------------------------------------------------------------------


class _Spec:
    """The leaves of an item, and how fields are built of them.

    Raises DamageError; SourceError for a serializer, or a tree, that is not read.
    """

    def __init__(self, config: Config, where: str) -> None:
        try:
            formats = config["data_format"]
            if not isinstance(formats, list) or not all(isinstance(one, str) for one in formats):
                raise ValueError(f"data_format is {shown(formats)}")
            if not 0 < len(formats) <= _MAX_LEAVES:
                raise ValueError(f"{len(formats):,} leaves; expected 1 to {_MAX_LEAVES:,}")
            tree, leaves = _tree(config["data_spec"], where)
            if len(leaves) != len(formats):
                raise ValueError(f"a tree of {len(leaves):,} leaves, but {len(formats):,} formats")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamageError(f"{where}: {INDEX}: {error}") from None
        self._names = leaves
        self._decodes = [_decoder(*pair, where) for pair in zip(leaves, formats, strict=True)]
        if isinstance(tree, dict):
            self._fields = tree
        else:
            parts = tree if isinstance(tree, list) else [tree]
            self._fields = {str(number): part for number, part in enumerate(parts)}
        self._head = struct.Struct(f"<{len(formats)}I")

    def values(self, data: bytes) -> Values:
        """Return the values of an item. Raises ValueError."""
        if len(data) < self._head.size:
            raise ValueError(f"it has {len(data):,} bytes, expected at least {self._head.size}")
        sizes = self._head.unpack_from(data)
        start = self._head.size
        if start + sum(sizes) != len(data):
            raise ValueError(f"it has {len(data):,} bytes, but its leaves {start + sum(sizes):,}")
        leaves = []
        for name, size, decode in zip(self._names, sizes, self._decodes, strict=True):
            try:
                leaves.append(decode(data[start : start + size]))
            except (ValueError, struct.error, RecursionError) as error:
                raise ValueError(f"{printable(name)}: {error}") from None
            start += size
        return {name: _built(part, leaves) for name, part in self._fields.items()}


def _built(tree: Any, leaves: Sequence[Any]) -> Any:
    if isinstance(tree, int):
        return leaves[tree]
    if isinstance(tree, dict):
        return {name: _built(part, leaves) for name, part in tree.items()}
    return [_built(part, leaves) for part in tree]


def _tree(text: Any, where: str) -> tuple[Any, list[str]]:
    """Return the tree of dicts and lists of the numbers of leaves, and their names.

    Raises ValueError, KeyError, TypeError; SourceError.
    """
    version, spec = json.loads(text)
    if version != 1:
        raise ValueError(f"data_spec of version {shown(version)}, expected 1")
    names: list[str] = []

    def build(spec: Any, path: tuple[str, ...]) -> Any:
        kind, parts = spec["type"], spec["children_spec"]
        if len(path) > _MAX_DEPTH or not isinstance(parts, list):
            raise ValueError("data_spec is no tree, or is too deep")
        if kind is None and not parts:
            names.append(".".join(path) or "0")
            return len(names) - 1
        if kind in ("builtins.list", "builtins.tuple"):
            return [build(part, (*path, str(at))) for at, part in enumerate(parts)]
        if kind in ("builtins.dict", "collections.OrderedDict"):
            keys = list(map(str, json.loads(spec["context"])))
            if len(set(keys)) != len(keys):
                raise ValueError("two keys of a dict have one name")
            pairs = zip(keys, parts, strict=True)
            return {key: build(part, (*path, key)) for key, part in pairs}
        raise SourceError(
            f"{where}: {printable('.'.join(path)) or 'a sample'} is a {shown(kind)}, which is not "
            "read here. " + _WAY_OUT.format(instead="a dict, list or tuple")
        )

    return build(spec, ()), names


_BYTES = {"bytes", "jpeg", "image", "file", "tiff", "tifffile"}
_TORCH: dict[int, str] = {
    **{0: "f4", 1: "f4", 2: "f8", 3: "f8", 4: "c8", 5: "c8", 6: "c16", 7: "c16", 8: "f2", 9: "f2"},
    **{11: "u1", 12: "i1", 13: "i2", 14: "i2", 15: "i4", 16: "i4", 17: "i8", 18: "i8", 19: "?"},
    20: "u2",
}
# Objects (14) are pointers of a process that is gone; text (15, 16) has no length.
_CODES = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "?")
_NUMPY = dict(enumerate(_CODES))


def _decoder(name: str, format: str, where: str) -> Decode:
    """Return the function that decodes a leaf. Raises SourceError."""
    kind, _, rest = format.partition(":")
    if kind in _BYTES:
        return bytes
    if kind in _LEAVES and not rest:
        return _LEAVES[kind]
    if kind in ("no_header_numpy", "no_header_tensor") and rest.isdecimal() and len(rest) < 4:
        known = _NUMPY if kind == "no_header_numpy" else _TORCH
        if int(rest) in known:
            return partial(_flat, dtype=np.dtype(known[int(rest)]).newbyteorder("<"))
    why = "which is not read here"
    if kind in ("pickle", "graph"):
        why = "which is pickled: to read it is to run code of whoever wrote it"
    raise SourceError(
        f"{where}: the leaf {printable(name)!r} was written by the serializer {shown(format)}, "
        f"{why}. " + _WAY_OUT.format(instead="numbers, text, bytes, images or arrays in its place")
    )


def _number(code: str) -> Decode:
    number = struct.Struct(code)
    return lambda data: number.unpack(data)[0]


def _flat(data: bytes, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, dtype).copy()


def _array(data: bytes, order: str, known: dict[int, str]) -> np.ndarray[Any, Any]:
    """Decode an array after the number of its dtype, and its shape."""
    number, dimensions = struct.unpack_from(f"{order}II", data)
    if number not in known or dimensions > MAX_DIMENSIONS:
        raise ValueError(f"an array of dtype {number}, {dimensions:,} dimensions; not read here")
    shape = struct.unpack_from(f"{order}{dimensions}I", data, 8)
    dtype = np.dtype(known[number]).newbyteorder("<")
    start, size = 8 + 4 * dimensions, math.prod(shape) * dtype.itemsize
    if start + size != len(data):
        raise ValueError(
            f"an array of shape {shape}, {dtype.name}, takes {size:,} bytes; there are "
            f"{len(data) - start:,}"
        )
    return np.frombuffer(data, dtype, -1, start).reshape(shape).copy()


# --- json: values in litdata's compact form -------------------------------------------------------


def _nested(data: bytes) -> Any:
    """Decode lists, dicts and plain values; older releases wrote JSON itself. Raises ValueError."""
    if not data or data[0] > 0x20:
        return parse_json(data, "utf-8")
    reader = _Nested(data)
    value = reader.value(reader.take("<B"), 0)
    if reader.at != len(data):
        raise ValueError(f"{len(data) - reader.at:,} bytes behind its value")
    return value


class _Nested:
    """A reader of nested values: a tag, then a number, text, or a count and as many values."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0

    def take(self, code: str) -> Any:
        number = struct.Struct(code)
        (value,) = number.unpack_from(self._data, self.at)
        self.at += number.size
        return value

    def _bytes(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise ValueError(f"{count:,} bytes in {len(self._data) - self.at:,}")
        self.at += count
        return self._data[self.at - count : self.at]

    def _count(self) -> int:
        """Return a count of values, each of which takes a byte or more."""
        count: int = self.take("<I")
        if count > len(self._data) - self.at:
            raise ValueError(f"{count:,} values in {len(self._data) - self.at:,} bytes")
        return count

    def _text(self) -> str:
        return self._bytes(self.take("<I")).decode("utf-8")

    def _numbers(self, code: str) -> list[Any]:
        count = self._count()
        found: list[Any] = np.frombuffer(self._bytes(int(code[2]) * count), code).tolist()
        return found

    def value(self, tag: int, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError("it is nested too deep")
        if tag == 0:
            return parse_json(self._bytes(self.take("<I")), "utf-8")
        if tag == 1:
            return [self._text() for _ in range(self._count())]
        if tag in (2, 3):
            return self._numbers("<i8" if tag == 2 else "<f8")
        if tag == 4:
            return [one != 0 for one in self._bytes(self._count())]
        if tag == 5:
            return {
                self._text(): self.value(self.take("<B"), depth + 1) for _ in range(self._count())
            }
        if tag == 6:
            return self._records()
        return self._plain(tag - 7)

    def _records(self) -> list[dict[str, Any]]:
        """Return dicts with the same keys, which are written once."""
        count = self._count()
        keys = [self._text() for _ in range(self._count())]
        if not keys or count * len(keys) > len(self._data):
            raise ValueError(f"{count:,} records in {len(self._data):,} bytes")
        # Tags from 0x10 on: None, text, int, float, bool.
        kinds = {0x10: 4, 0x11: 0, 0x12: 1, 0x13: 2, 0x14: 3}
        return [
            {key: self._plain(kinds.get(self.take("<B"), -1)) for key in keys} for _ in range(count)
        ]

    def _plain(self, kind: int) -> Any:
        if kind == 0:
            return self._text()
        if kind in (1, 2):
            return self.take("<q" if kind == 1 else "<d")
        if kind == 3:
            return bool(self.take("<B"))
        if kind == 4:
            return None
        raise ValueError(f"byte {self.at}: an unknown kind of value")


_LEAVES: dict[str, Decode] = {
    "str": bytes.decode,
    "text": bytes.decode,
    "bool": _number("<?"),
    "int": _number("<q"),
    "float": _number("<d"),
    "pil": pil_pixels,
    "jpeg_array": list_of(bytes, head=0),
    "numpy": partial(_array, order="<", known=_NUMPY),
    "tensor": partial(_array, order=">", known=_TORCH),
    "json": _nested,
}
