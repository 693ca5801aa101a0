"""MosaicML MDS shards (version 2), read in place: the data sets of mosaicml-streaming.

    shard     n u32 | offsets u32[n + 1] | description, JSON | samples
    offsets   of the samples and of their end, from the first byte of the shard
    sample    u32 a column of no fixed size: its bytes | the columns' values, one after the other

Little-endian. The description has the columns, in order: `column_names`, `column_encodings`,
`column_sizes` (null: no fixed size). It is kept in our index, so that a sample is decoded by what
was seen when the data was indexed.

    encoding                              here
    bytes, jpeg, png                      bytes
    str                                   str
    int, int8 .. int64, uint8 .. uint64   int
    float16, float32, float64, str_float  float
    str_int                               int
    str_decimal                           str, since no float is as exact
    json                                  as it is
    ndarray, ndarray:DTYPE[:SHAPE]        numpy array
    pil: width, height, length of the     numpy array as PIL's image gives it: (H, W), or (H, W, C),
      mode u32 | mode | pixels              uint8 in most modes
    jpeg_array, jpegarray, list[...]      list of these
    pkl                                   refused: to read it is to run code of whoever wrote it

`index.json`, in the shard's folder or above it, lists all shards. A shard must be listed, be as
long and have the columns and the number of samples that the list says, and all that are listed
must be there. Hashes in it are not compared; the format has no other checksums.

A shard of a compressed data set is inflated whole, into memory, when it is opened: ranges refer to
the inflated bytes, size and SHA-256 to the file. Where the inflated file lies beside it, that is
the shard. Sources:
https://docs.mosaicml.com/projects/streaming/en/stable/preparing_datasets/dataset_format.html
https://github.com/mosaicml/streaming/tree/main/streaming/base/format/mds
"""

from __future__ import annotations

import bz2
import json
import math
import shlex
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal, InvalidOperation
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from ...errors import DamageError, DependencyError, SourceError, printable
from ...names import KEY
from ...storage.base import Location, path_in
from ..sample import MAX_DIMENSIONS
from .base import Values, parse_json
from .inflate import InflatedFile, most_inflated, unzstd

INDEX = "index.json"
_U32 = struct.Struct("<I")
_EXTRA = struct.Struct("<QQ")  # bytes of the file, and inflated; the description follows
_MAX_SHARD = (1 << 32) - 1  # bytes, inflated: offsets have 32 bits
_MAX_INDEX = 1 << 28  # bytes of an index.json; 450 a shard are usual
_MAX_DESCRIPTION = 1 << 20
_MAX_DIGITS = 4_300  # of a number that is text; Python's own limit for an int
_BLOCK = 1 << 16  # offsets that are read at once


class MdsFile(InflatedFile):
    """A shard: its file, or what a compressed one was inflated to; and how to decode a sample.

    A column called `__key__`, str, bytes or int, is the key.
    """

    def _open(self, storage: Location, name: str, extra: bytes) -> None:
        if extra:
            self._inflate(name, _EXTRA.unpack_from(extra)[1])
            self.description = extra[_EXTRA.size :]
            self._decode = _decoder(_columns(self.description, self.name))
        else:
            self._open_new(storage, name)

    def _open_new(self, storage: Location, name: str) -> None:
        """Open a shard that is to be indexed: all that index.json says of it is compared."""
        where, listed = _listed(storage, name)
        if listed.get("format") != "mds":
            raise SourceError(f"{where}: {printable(name)}: format {shown(listed.get('format'))}")
        raw, zipped = _part(listed, "raw_data", where), None
        if _packing(name) is not None:
            zipped = _part(listed, "zip_data", where)
            if storage.exists(inflated := name.rpartition(".")[0]):
                raise SourceError(
                    f"{self.name}: {printable(inflated)} is there, too, which is the same shard. "
                    f"Remove one of them (index.json may stay as it is)"
                )
        expected = raw if zipped is None else zipped
        if self.size != expected:
            raise DamageError(
                f"{self.name}: it has {self.size:,} bytes, but {where} says {expected:,}: one of "
                "them was cut short or replaced. Copy both anew"
            )
        self._inflate(name, raw)
        records, self.description = self._header()
        columns = _columns(self.description, self.name)
        for what, found, said in (
            ("samples", records, listed.get("samples")),
            ("column_names", list(columns.names), listed.get("column_names")),
            ("column_encodings", list(columns.encodings), listed.get("column_encodings")),
            ("column_sizes", list(columns.sizes), listed.get("column_sizes")),
        ):
            if found != said:
                raise DamageError(
                    f"{self.name}: its {what}: {shown(found)}, but {where} says {shown(said)}. "
                    "The shard is damaged, or belongs to another data set"
                )
        self._decode = _decoder(columns)

    def _inflate(self, name: str, size: int) -> None:
        """Inflate a compressed shard to `size` bytes, to which ranges refer from then on."""
        inflated = _inflate(self, name, size)
        self.end = self.size if inflated is None else len(inflated)  # of what ranges refer to
        if inflated is not None:
            self.read_from(inflated)

    def _header(self) -> tuple[int, bytes]:
        """Read the number of samples, and the description."""
        if 8 <= self.end <= _MAX_SHARD:
            records, first = struct.unpack("<II", self.read(0, 8))
            start = 8 + 4 * records
            if start <= first <= min(self.end, start + _MAX_DESCRIPTION):
                (last,) = _U32.unpack(self.read(start - 4, 4))
                if last != self.end:
                    raise DamageError(
                        f"{self.name}: byte {start - 4}: its last sample ends at byte {last}, "
                        f"expected {self.end}, the end of the shard"
                    )
                return records, self.read(start, first - start)
        raise DamageError(
            f"{self.name}: byte 0: expected the number of samples and their offsets, found "
            f"{self.read(0, min(8, self.end)).hex(' ') or 'nothing'} in a shard of {self.end:,} "
            "bytes"
        )

    def scan(self) -> Iterator[tuple[int, int]]:
        """Yield (offset, length) of each record. Raises DamageError, SourceError."""
        (records,) = _U32.unpack(self.read(0, 4))
        least = _columns(self.description, self.name).least
        (before,) = _U32.unpack(self.read(4, 4))
        for first in range(0, records, _BLOCK):
            count = min(_BLOCK, records - first)
            data = self.read(4 + 4 * first, 4 + 4 * count)
            offsets = np.frombuffer(data, "<u4").astype(np.int64)
            lengths = np.diff(offsets)
            wrong = np.flatnonzero(lengths < least)
            if len(wrong) or offsets[-1] > self.end:
                at = int(wrong[0]) if len(wrong) else count - 1
                raise DamageError(
                    f"{self.name}: byte {8 + 4 * (first + at)}: record {first + at} is said to be "
                    f"at bytes {offsets[at]} to {offsets[at + 1]}; expected at least {least} bytes "
                    f"within {before} to {self.end}"
                )
            yield from zip(offsets[:-1].tolist(), lengths.tolist(), strict=True)

    def extra(self) -> bytes:
        """Return what opening needs besides the file."""
        return _EXTRA.pack(self.size, self.end) + self.description

    def values(self, data: bytes, record: int) -> Values:
        """Return the values of a record. Raises ValueError."""
        return self._decode(data)


# --- index.json -----------------------------------------------------------------------------------


def _listed(storage: Location, name: str) -> tuple[str, dict[str, Any]]:
    """Return where a shard is listed, for messages, and its entry there.

    A list that was merged from those of subfolders lies above them; both are heeded. Each shard
    looks whether the one after it in the list is there, and the last whether the first is: so, any
    that is missing is missed by one that is not.
    """
    found: tuple[str, dict[str, Any]] | None = None
    folder, _, rest = name.rpartition("/")
    tail = rest
    while True:
        index = f"{folder}/{INDEX}" if folder else INDEX
        where = path_in(storage, index)
        try:
            shards, numbers = _parse(storage.read(index, _MAX_INDEX))
        except FileNotFoundError:
            numbers = {}
        except (ValueError, RecursionError) as error:
            if found is None:
                raise DamageError(f"{where}: not a list of shards: {error}. Copy it anew") from None
            numbers = {}  # above a list that has the shard, it may be something else's
        if tail in numbers:
            number = numbers[tail]
            found = found or (where, shards[number][1])
            names = shards[(number + 1) % len(shards)][0]
            if not any(storage.exists(f"{folder}/{one}" if folder else one) for one in names):
                raise SourceError(
                    f"{where}: it lists {printable(names[0])}, which is not there. Copy it, too; "
                    "or take it out of the list"
                )
        if not folder:
            break
        folder, _, last = folder.rpartition("/")
        tail = f"{last}/{tail}"
    if found is None:
        raise SourceError(
            f"{printable(name)}: no {INDEX} in its folder, or above, lists it: a writer makes it "
            "when it has finished. `streaming.base.util.merge_index` makes one for subfolders"
        )
    return found


_Shards = list[tuple[tuple[str, ...], dict[str, Any]]]  # names, inflated and compressed; the rest


@lru_cache(maxsize=4)  # one list has thousands of shards, each of which is opened
def _parse(text: bytes) -> tuple[_Shards, dict[str, int]]:
    """Return the shards of a list, and their numbers by name. Raises ValueError, RecursionError."""
    described = json.loads(text.decode("utf-8"))
    if not isinstance(described, dict) or not isinstance(described.get("shards"), list):
        raise ValueError("expected an object with `shards`")
    if described.get("version") != 2:
        raise ValueError(f"version {shown(described.get('version'))}, expected 2")
    shards: _Shards = []
    numbers: dict[str, int] = {}
    for number, shard in enumerate(described["shards"]):
        if not isinstance(shard, dict):
            raise ValueError(f"shard {number} is no object")
        names = []
        for part in ("raw_data", "zip_data"):
            if (given := shard.get(part)) is not None:
                name = given.get("basename") if isinstance(given, dict) else None
                if not isinstance(name, str) or {"", ".", ".."} & set(name.split("/")):
                    raise ValueError(f"shard {number}: {part} has no name of a file")
                if name in numbers:
                    raise ValueError(f"{shown(name)} is listed twice")
                numbers[name] = number
                names.append(name)
        shards.append((tuple(names), shard))
        if not names:
            raise ValueError(f"shard {number} has no file")
    return shards, numbers


def _part(listed: dict[str, Any], part: str, where: str) -> int:
    """Return the bytes that a shard has, as index.json says."""
    size = (listed.get(part) or {}).get("bytes")
    if type(size) is not int or not 0 <= size <= _MAX_SHARD:
        raise DamageError(
            f"{where}: {part} of {printable(str(listed.get('raw_data')))}: {shown(size)} bytes; "
            f"expected a number up to {_MAX_SHARD:,}"
        )
    return size


def shown(value: Any) -> str:
    return printable(repr(value))


# --- compressed shards ----------------------------------------------------------------------------

_SNAPPY = "import sys, snappy; sys.stdout.buffer.write(snappy.decompress(sys.stdin.buffer.read()))"
_UNPACK = {  # how a shard is inflated outside of Python, by the ending of its name
    "zstd": "zstd -d --rm {zipped} -o {raw}",
    "gz": "gunzip {zipped}",
    "bz2": "bunzip2 {zipped}",
    "br": "brotli -d --rm {zipped}",
    "snappy": f'python -c "{_SNAPPY}" <{{zipped}} >{{raw}} && rm {{zipped}}',
}


def _packing(name: str) -> str | None:
    ending = name.rpartition(".")[2]
    return ending if ending in _UNPACK else None


def _inflate(file: MdsFile, name: str, size: int) -> bytes | None:
    """Return the inflated bytes of a compressed shard, which are `size`; None if it is plain.

    Raises SourceError, DependencyError when it must be inflated before, DamageError.
    """
    packing = _packing(name)
    if packing is None:
        return None
    raw = file.name.rpartition(".")[0]
    route = _UNPACK[packing].format(zipped=shlex.quote(file.name), raw=shlex.quote(raw))
    advice = f"Inflate it: {route} (index.json stays as it is)"
    if packing not in _INFLATE:
        raise SourceError(f"{file.name}: {packing} is not read in place. {advice}")
    if size > most_inflated(file.size) or file.size > _MAX_SHARD:
        raise SourceError(
            f"{file.name}: {file.size:,} bytes would become {size:,} in memory. If that is right: "
            f"{advice[0].lower()}{advice[1:]}"
        )
    try:
        data = _INFLATE[packing](file.read(0, file.size), size)
    except ImportError:
        raise DependencyError(
            f"{file.name}: to read zstd needs zstandard, which is not installed: "
            f"pip install 'shardio-torch[mds]'. Or {advice[0].lower()}{advice[1:]}"
        ) from None
    except (ValueError, OSError, zlib.error) as error:
        raise DamageError(
            f"{file.name}: it cannot be inflated to {size:,} bytes: {error}. Copy it anew"
        ) from None
    if len(data) != size:
        raise DamageError(
            f"{file.name}: inflated, it has {'more' if len(data) > size else f'{len(data):,}'} "
            f"bytes, expected {size:,}. Copy it anew"
        )
    return data


def _stream_inflater(decompressor: Callable[[], Any], what: str) -> Callable[[bytes, int], bytes]:
    """Return what inflates one stream; of more than `size` bytes it gives one too many."""

    def inflate(data: bytes, size: int) -> bytes:
        unpacker = decompressor()
        inflated: bytes = unpacker.decompress(data, size + 1)
        if len(inflated) <= size and (not unpacker.eof or unpacker.unused_data):
            raise ValueError(f"it is not one {what}")
        return inflated

    return inflate


_INFLATE: dict[str, Callable[[bytes, int], bytes]] = {
    "zstd": unzstd,
    "gz": _stream_inflater(lambda: zlib.decompressobj(16 + zlib.MAX_WBITS), "gzip member"),
    "bz2": _stream_inflater(bz2.BZ2Decompressor, "bzip2 stream"),
}


# --- columns --------------------------------------------------------------------------------------

Convert = Callable[[bytes], Any]


class Columns(NamedTuple):
    """A description, checked."""

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]
    converts: tuple[Convert, ...]
    least: int  # bytes of a sample


def _columns(description: bytes, where: str) -> Columns:
    """Read a description. Raises DamageError; SourceError for an encoding that is not read."""
    try:
        described = json.loads(description.decode("utf-8"))
        if not isinstance(described, dict):
            raise ValueError("expected an object")
        if (said := (described.get("version"), described.get("format"))) != (2, "mds"):
            raise ValueError(f"version and format {shown(said)}, expected 2 and 'mds'")
        lists = [described.get(f"column_{what}") for what in ("names", "encodings", "sizes")]
        names, encodings, sizes = (
            list(given) if isinstance(given, list) else [] for given in lists
        )
        if not 0 < len(names) == len(encodings) == len(sizes):
            raise ValueError("expected as many names as encodings and sizes of columns")
        if not all(isinstance(text, str) for text in names + encodings):
            raise ValueError("expected names and encodings that are text")
        if len(set(names)) != len(names):
            raise ValueError("two columns have one name")
        converts = []
        for name, encoding, size in zip(names, encodings, sizes, strict=True):
            known, convert = _encoding(name, encoding, where)
            if size != known or isinstance(size, bool):
                raise ValueError(
                    f"column {shown(name)}, {shown(encoding)}: size {shown(size)}, expected {known}"
                )
            converts.append(_key(name, encoding, convert, where) if name == KEY else convert)
    except (ValueError, RecursionError) as error:
        raise DamageError(f"{where}: the description of its columns: {error}") from None
    least = sum(4 if size is None else size for size in sizes)
    return Columns(tuple(names), tuple(encodings), tuple(sizes), tuple(converts), least)


def _decoder(columns: Columns) -> Callable[[bytes], Values]:
    """Return a function from the bytes of a sample to its values. It raises ValueError."""
    head = struct.Struct(f"<{columns.sizes.count(None)}I")
    least, variable = columns.least, head.size
    unpack = head.unpack_from
    layout = tuple(zip(columns.names, columns.sizes, columns.converts, strict=True))

    def decode(data: bytes) -> Values:
        given = len(data)
        if given < least:
            raise ValueError(f"it has {given:,} bytes, expected at least {least:,}")
        sizes = unpack(data)
        if least + sum(sizes) != given:
            raise ValueError(f"it has {given:,} bytes, but its columns {least + sum(sizes):,}")
        left = iter(sizes)
        start = variable
        values = {}
        name = ""
        try:
            for name, size, convert in layout:
                stop = start + (next(left) if size is None else size)
                values[name] = convert(data[start:stop])
                start = stop
        except ValueError as error:
            raise ValueError(f"column {shown(name)}: {error}") from None
        return values

    return decode


def _key(name: str, encoding: str, convert: Convert, where: str) -> Convert:
    if encoding == "bytes":
        return convert
    if encoding == "str" or encoding == "str_int" or encoding.lstrip("u").startswith("int"):
        return lambda data: str(convert(data)).encode()
    raise SourceError(
        f"{where}: column {shown(name)} would be the key, but is {shown(encoding)}; expected "
        "str, bytes or int. Write the data set anew with another name for it"
    )


def _encoding(name: str, encoding: str, where: str) -> tuple[int | None, Convert]:
    """Return the fixed size, if there is one, and the function that decodes a value."""
    if (code := _NUMBERS.get(encoding)) is not None:
        number = struct.Struct(code)
        return number.size, _number(number)
    if (convert := _ENCODINGS.get(encoding)) is not None:
        return None, convert
    kind, colon, rest = encoding.partition(":")
    if kind == "ndarray":
        return _ndarray(rest if colon else "")
    if kind == "pkl":
        raise SourceError(
            f"{where}: column {shown(name)} is pickled ('pkl'): to read it is to run code of "
            "whoever wrote it. Read the data set with mosaicml-streaming, if you trust it, and "
            "write it anew with this column as json, ndarray or bytes"
        )
    known = ", ".join((*_NUMBERS, *_ENCODINGS, "ndarray"))
    raise SourceError(
        f"{where}: column {shown(name)} has the encoding {shown(encoding)}, which is not read "
        f"here. Write the data set anew with another; known: {known}"
    )


def _number(number: struct.Struct) -> Convert:
    unpack = number.unpack
    return lambda data: unpack(data)[0]


_NUMBERS = {
    **{"int": "<q", "int8": "<b", "int16": "<h", "int32": "<i", "int64": "<q"},
    **{"uint8": "<B", "uint16": "<H", "uint32": "<I", "uint64": "<Q"},
    **{"float16": "<e", "float32": "<f", "float64": "<d"},
}


def _digits(data: bytes) -> str:
    if len(data) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(data):,} digits; expected up to {_MAX_DIGITS:,}")
    return data.decode("utf-8")


def _decimal(data: bytes) -> str:
    text = _digits(data)
    try:
        Decimal(text)
    except InvalidOperation:
        raise ValueError(f"{shown(text)} is no decimal number") from None
    return text


# --- arrays, pixels, lists ------------------------------------------------------------------------

DTYPES = {  # by the number in a value whose column does not say the dtype
    **{8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32"},
    **{33: "int32", 34: "float32", 64: "uint64", 65: "int64", 66: "float64"},
}
_KNOWN = {name: np.dtype(name).newbyteorder("<") for name in DTYPES.values()}
_BY_NUMBER = {number: _KNOWN[name] for number, name in DTYPES.items()}
_LENGTHS = tuple(np.dtype(code) for code in ("<u1", "<u2", "<u4", "<u8"))  # of a shape's numbers


def _ndarray(config: str) -> tuple[int | None, Convert]:
    """Return size and function of the encoding ndarray[:dtype[:shape]]. Raises ValueError."""
    text, _, numbers = config.partition(":")
    if not text:
        if numbers:
            raise ValueError(f"ndarray:{printable(config)}: a shape without a dtype")
        return None, _any_array
    if text not in _KNOWN:
        raise ValueError(f"ndarray:{printable(config)}: no dtype has this name")
    dtype = _KNOWN[text]
    if not numbers:
        return None, lambda data: _shaped(data, 0, dtype)
    shape = tuple(int(number) for number in numbers.split(","))
    size = _bytes_of(shape, dtype)
    if size > _MAX_SHARD:
        raise ValueError(f"ndarray:{printable(config)}: {size:,} bytes a value")
    return size, lambda data: np.frombuffer(data, dtype).reshape(shape).copy()


def _any_array(data: bytes) -> np.ndarray[Any, Any]:
    """Decode an array after its dtype and its shape."""
    if not data or data[0] not in _BY_NUMBER:
        raise ValueError(f"byte 0: {data[:1].hex() or 'the end'}, expected the number of a dtype")
    return _shaped(data, 1, _BY_NUMBER[data[0]])


def _shaped(data: bytes, at: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Decode an array after its shape, which begins with (dimensions << 2) | log2(item bytes)."""
    if at == len(data):
        raise ValueError("it ends before the shape of its array")
    length = _LENGTHS[data[at] & 3]
    dimensions = data[at] >> 2
    start = at + 1 + dimensions * length.itemsize
    if dimensions > MAX_DIMENSIONS or start > len(data):
        raise ValueError(f"an array of {dimensions} dimensions in {len(data):,} bytes")
    shape = tuple(np.frombuffer(data, length, dimensions, at + 1).tolist())
    size = _bytes_of(shape, dtype)
    if start + size != len(data):
        raise ValueError(
            f"an array of shape {shape}, {dtype.name}, takes {size:,} bytes; there are "
            f"{len(data) - start:,}"
        )
    return np.frombuffer(data, dtype, -1, start).reshape(shape).copy()


def _bytes_of(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    if any(number < 1 for number in shape) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"a shape of {shown(tuple(shape))}; expected numbers above 0")
    return math.prod(shape) * dtype.itemsize


_PIXELS = {  # dtype and channels of each mode, as PIL's images give them to numpy
    **{mode: ("|u1", 1) for mode in ("L", "P", "1")},  # 1: eight pixels a byte, rows from a new one
    **{mode: ("|u1", 2) for mode in ("LA", "PA", "La")},
    **{mode: ("|u1", 3) for mode in ("RGB", "YCbCr", "LAB", "HSV")},
    **{mode: ("|u1", 4) for mode in ("RGBA", "RGBX", "RGBa", "CMYK")},
    **{"I": ("<i4", 1), "F": ("<f4", 1), "I;16": ("<u2", 1), "I;16L": ("<u2", 1)},
    "I;16B": (">u2", 1),
}


def pil_pixels(data: bytes) -> np.ndarray[Any, Any]:
    """Decode the pixels of an image, (height, width) or (height, width, channels)."""
    if len(data) < 12:
        raise ValueError(f"an image of {len(data)} bytes; expected at least 12")
    width, height, length = struct.unpack_from("<III", data)
    start = 12 + length
    mode = data[12:start].decode("utf-8") if length <= 16 else ""
    if mode not in _PIXELS or start > len(data):
        raise ValueError(f"an image of mode {shown(data[12 : min(start, 28)])}, which is not read")
    code, channels = _PIXELS[mode]
    dtype = np.dtype(code)
    row = (width + 7) // 8 if mode == "1" else width * channels  # numbers
    expected, found = height * row * dtype.itemsize, len(data) - start
    if found != expected or not expected:
        raise ValueError(
            f"an image of {width:,} x {height:,} pixels, {mode}, takes {expected:,} bytes; there "
            f"are {found:,}"
        )
    pixels = np.frombuffer(data, dtype, -1, start)
    if mode == "1":
        return np.unpackbits(pixels.reshape(height, row), axis=1)[:, :width].astype(np.bool_)
    shape = (height, width) if channels == 1 else (height, width, channels)
    return pixels.reshape(shape).astype(dtype.newbyteorder("<"))


def list_of(convert: Convert, *, head: int) -> Convert:
    """Return a decoder of lists: `head` bytes, count u32, lengths u32[count], the elements."""

    def decode(data: bytes) -> list[Any]:
        start = head + 4
        if len(data) < start or any(data[:head]):
            raise ValueError(f"it begins with {data[:8].hex(' ') or 'nothing'}, which is no list")
        (count,) = _U32.unpack_from(data, head)
        if count * 4 > len(data) - start:
            raise ValueError(f"a list of {count:,} in {len(data):,} bytes")
        lengths = np.frombuffer(data, "<u4", count, start).tolist()
        start += 4 * count
        if start + sum(lengths) != len(data):
            raise ValueError(
                f"its list of {count:,} takes {start + sum(lengths):,} bytes; there are "
                f"{len(data):,}"
            )
        found = []
        for length in lengths:
            found.append(convert(data[start : start + length]))
            start += length
        return found

    return decode


_ENCODINGS: dict[str, Convert] = {  # those without a fixed size
    **{
        "bytes": bytes,
        "jpeg": bytes,
        "png": bytes,
        "str": bytes.decode,
        "json": partial(parse_json, encoding="utf-8"),
    },
    "str_int": lambda data: int(_digits(data)),
    "str_float": lambda data: float(_digits(data)),
    "str_decimal": _decimal,
    "pil": pil_pixels,
    "jpeg_array": list_of(bytes, head=0),
    "jpegarray": list_of(bytes, head=0),
    "list[jpeg]": list_of(bytes, head=4),
    "list[png]": list_of(bytes, head=4),
    "list[pil]": list_of(pil_pixels, head=4),
}
