"""A sample, a dict of named fields, to and from the bytes of one record (the only door to msgpack).

The first field is always `__key__`, the bytes that name the sample; users
get it as a str (names.py). A record's *head* is a msgpack
array with one value per field, in the order of the fields. Fields whose content is large are kept
out of it: the head then holds what describes their bytes, and the bytes follow the head, raw, in
the order of the fields (a *blob* each).

    kind    in Python                        in the head         blob
    key     bytes, 1 to 65,535               bin                 -
    image   bytes of an image file           length              the file
    bytes   bytes                            length              the bytes
    array   numpy array, no objects          [dtype, [shape]]    the array, C order, little-endian
    int     int in [-2**63, 2**64)           int                 -
    float   float                            float64             -
    bool    bool                             bool                -
    str     str, UTF-8                       str                 -
    json    None, bool, int, float, str,     as is; a numpy      -
            bytes, arrays, lists and dicts   array is extension 1:
            of these                         [dtype, [shape], data]

Any field but the key may be None (nil in the head, and no blob). There is no pickle here, and no
kind that names code. Source: https://github.com/msgpack/msgpack/blob/master/spec.md
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import msgpack
import numpy as np

from ..errors import DamageError, OptionError, SampleError, printable
from ..names import KEY, key_bytes, key_text

Sample = dict[str, Any]
Decode = Callable[[bytes, int, int], Sample]
DecodeRun = Callable[..., Iterator[Sample]]
Buffer = bytes | bytearray | memoryview

KINDS = ("key", "image", "bytes", "array", "int", "float", "bool", "str", "json")
BLOBS = frozenset(("image", "bytes", "array"))

# Every length is bounded before it is believed.
MAX_FIELDS = 1_000
MAX_NAME = 255  # bytes of a field's name
MAX_KEY = 65_535  # bytes; PATH_MAX is 4,096
MAX_HEAD = 1 << 20
# Lists and maps in a head. A map takes 184 bytes of memory, in Python 3.10 232, and 2 in the head.
MAX_NESTED = 1 << 18
_UNCOUNTED = 2 * MAX_NESTED  # bytes that have no room for more of what takes much memory
MAX_BODY = (1 << 32) - 1  # head and blobs of one record
MAX_DEPTH = 32  # of nested lists and dicts
MAX_DIMENSIONS = 32  # of an array; 64 is numpy's own limit since 2.0

_ARRAY = 1  # the one msgpack extension type
# The numpy dtypes that are plain bytes, the same on every machine (a long double is not), by the
# one spelling that numpy gives them; tried before np.dtype, which understands far more.
_DTYPE = re.compile(
    r"\|b1|\|[iu]1|<[iu][248]|<f[248]|<c8|<c16|\|S[1-9]\d{0,8}|<U[1-9]\d{0,8}"
    r"|<[mM]8(\[\d{0,9}[A-Za-z]{1,2}\])?"
)
_TYPES: dict[str, type] = {"key": bytes, "int": int, "float": float, "bool": bool, "str": str}
_MISFIT = "its head does not fit the fields"


class Schema:
    """The fields of a dataset, in order, and their samples as bytes.

    `fields`: pairs of name and kind, `__key__` first.
    `decode(body, at, blobs) -> Sample`: of the bytes `body`, the head is [at:blobs], the blobs are
    the rest. `decode_run(block, bounds, first, frame, checksum, alone, text)` iterates over the
    samples of records in one block of bytes, with their keys as str where `text` says so. `bounds`
    are the bytes at which each begins and ends, `first` is the number of the first. `frame(block,
    at)` gives (checksum, length, length of head), the 16 bytes before each head. `checksum(bytes
    from byte 8, number)` must equal it (the caller bounds the length of heads, by what `block`
    holds).
    `alone(number, bytes, text)` gives a record that is not right as it comes again, or raises.
    All values are owned copies. From `decode`, ValueError, TypeError and msgpack's errors tell that
    a record is not what `fields` say.
    """

    __slots__ = ("_blobs", "_keys", "_types", "decode", "decode_run", "fields", "names")

    def __init__(self, fields: Sequence[Sequence[str]]) -> None:
        self.fields = tuple((str(name), str(kind)) for name, kind in fields)
        self.names = tuple(name for name, _ in self.fields)
        _check_fields(self.fields)
        self._blobs = tuple(
            (i, kind == "array") for i, (_, kind) in enumerate(self.fields) if kind in BLOBS
        )
        self._types = tuple(
            (i, _TYPES[kind]) for i, (_, kind) in enumerate(self.fields) if kind in _TYPES
        )
        self._keys = set(self.names)
        self.decode, self.decode_run = _compile(self.fields, self._blobs, self._types)

    @property
    def images(self) -> tuple[str, ...]:
        """Return the names of the fields of kind image, in order."""
        return tuple(name for name, kind in self.fields if kind == "image")

    @property
    def main_image(self) -> str | None:
        """Return the field that is decoded to RGB by default; others are decoded as stored."""
        return "image" if "image" in self.names else next(iter(self.images), None)

    def __reduce__(self) -> tuple[type[Schema], tuple[tuple[tuple[str, str], ...]]]:
        return Schema, (self.fields,)

    def encode(self, sample: Mapping[str, Any]) -> tuple[list[Any], list[Buffer]]:
        """Return the head's values and the blobs. Raises SampleError, naming the field."""
        if sample.keys() != self._keys:
            raise SampleError(_mismatch(self.names, sample))
        values: list[Any] = []
        blobs: list[Buffer] = []
        for name, kind in self.fields:
            value = sample[name]
            if value is None and kind != "key":
                values.append(None)
                continue
            types, expected, encode = _ENCODERS[kind]
            try:
                if not isinstance(value, types) or (type(value) is bool and kind in _NUMBERS):
                    raise TypeError(f"it is {_found(value)}, not {expected}")
                head = encode(value)
            except (TypeError, ValueError, OverflowError) as error:
                raise SampleError(
                    f"sample {printable(_key_of(sample))}: field {name!r} is declared {kind!r}, "
                    f"but {error}{_advice(kind, value)}"
                ) from None
            if kind in BLOBS:
                head, blob = head
                blobs.append(blob)
            values.append(head)
        return values, blobs

    def blob_sizes(self, values: Sequence[Any]) -> list[int]:
        """Return the bytes of each blob that follows a head. Raises ValueError, TypeError."""
        if len(values) != len(self.names):
            raise ValueError(f"{len(values)} values for {len(self.names)} fields")
        for i, kind in self._types:
            if type(values[i]) is not kind and (i == 0 or values[i] is not None):
                raise ValueError(_MISFIT)
        sizes = []
        for i, array in self._blobs:
            if (value := values[i]) is not None:
                sizes.append(_array_size(value) if array else _length(value))
        return sizes

    def assemble(self, values: Sequence[Any], blobs: Sequence[bytes]) -> Sample:
        """Return head values and blobs as a sample: `decode`, for blobs read one by one."""
        sample = dict(zip(self.names, values, strict=True))
        given = 0
        for i, array in self._blobs:
            if values[i] is not None:
                blob = blobs[given]
                sample[self.names[i]] = _array(values[i], blob) if array else blob
                given += 1
        return sample


def pack_head(values: Sequence[Any]) -> bytes:
    """Encode the values of a head. Raises SampleError if it is longer than MAX_HEAD."""
    head = bytes(_pack(values))
    if len(head) > MAX_HEAD:
        raise SampleError(
            f"sample {printable(values[0])}: its small fields take {len(head):,} bytes, the limit "
            f"is {MAX_HEAD:,}; keep large values in fields of kind 'bytes' or 'array'"
        )
    if len(head) > _UNCOUNTED:
        try:
            _unpack_counted(head)
        except NestedError as error:
            raise SampleError(f"sample {printable(values[0])}: {error}") from None
    return head


def unpack_head(head: Buffer) -> list[Any]:
    """Decode a head to its values. Raises ValueError on anything that is not one array."""
    try:
        values = _unpack(head, ext_hook=_unpack_array)
    except NestedError:
        raise
    except Exception as error:  # msgpack raises a dozen types, on hostile bytes also RecursionError
        raise ValueError(f"not a msgpack array: {type(error).__name__}") from None
    if type(values) is not list:
        raise ValueError("not a msgpack array")
    return values


def unpack_key(head: bytes) -> bytes:
    """Decode the key at the beginning of a head; the rest may be cut. Raises ValueError."""
    try:
        stream = msgpack.Unpacker(max_buffer_size=MAX_KEY + 10)
        stream.feed(head[: MAX_KEY + 10])  # two prefixes of at most 5 bytes
        stream.read_array_header()
        key = stream.unpack()
    except Exception as error:
        raise ValueError(f"not a msgpack array: {type(error).__name__}") from None
    if type(key) is not bytes:
        raise ValueError("it does not begin with a key")
    return key


def give_text_key(sample: Sample) -> Sample:
    """Make the key of a sample a str, in place, as users get it; return the sample."""
    key = sample[KEY]
    try:
        sample[KEY] = key.decode()  # 40 ns less than with the name of an error handler
    except UnicodeDecodeError:
        sample[KEY] = key_text(key)
    return sample


def pack(value: Any) -> bytes:
    """Encode a plain value as msgpack, for the small descriptions in a shard."""
    return bytes(msgpack.packb(value))


def unpack(data: Buffer) -> Any:
    """Decode msgpack bytes to a plain value. Raises ValueError on anything else."""
    try:
        return _unpack(data)
    except NestedError:
        raise
    except Exception as error:
        raise ValueError(f"not msgpack: {type(error).__name__}") from None


class NestedError(ValueError):
    """Say that a value has more lists and maps than its bytes may unfold to."""


def _unpack(data: Buffer, **hooks: Any) -> Any:
    """Decode msgpack, whose memory is bounded by its bytes. Raises what msgpack does, NestedError.

    It takes 64 MiB at most, and 32 times its bytes.
    """
    if len(data) > _UNCOUNTED:
        left = most = max(MAX_NESTED, len(data) // 16)

        def count(found: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise NestedError(f"it has more than {most:,} lists and maps")
            return found

        hooks |= {"list_hook": count, "object_hook": count}
    return msgpack.unpackb(data, **hooks)


def _unpack_counted(head: Buffer) -> Any:
    """Decode a head that is so long that its lists and maps are counted."""
    return _unpack(head, ext_hook=_unpack_array)


def pack_columns(value: Any) -> bytes:
    """Encode plain values, and numpy arrays among them, as msgpack."""
    return bytes(msgpack.packb(value, default=_pack_array, unicode_errors="surrogatepass"))


def unpack_columns(data: Buffer) -> Any:
    """Decode plain values and numpy arrays. Raises ValueError on anything else."""
    try:
        return msgpack.unpackb(data, ext_hook=_unpack_array, unicode_errors="surrogatepass")
    except Exception as error:
        raise ValueError(f"not msgpack: {type(error).__name__}") from None


def infer_fields(sample: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Infer names and kinds of fields from a sample. Raises SampleError if it cannot."""
    fields = [(KEY, "key")]
    for name, value in sample.items():
        if name == KEY:
            continue
        kind = next((kind for types, kind in _INFER if isinstance(value, types)), None)
        if kind is None:
            raise SampleError(
                f"field {name!r}: no kind fits {_found(value)}"
                + (
                    _advice("image" if _is_picture(value) else "array", value)
                    or f"; kinds are {', '.join(KINDS[1:])}"
                )
            )
        fields.append((name, "image" if kind == "bytes" and name == "image" else kind))
    return fields


def check_schema(described: Any, where: str) -> Schema:
    """Make a Schema of [[name, kind], ...] from a file. Raises DamageError naming `where`."""
    try:
        if type(described) is not list or len(described) > MAX_FIELDS:
            raise ValueError("no list, or too long")
        if any(type(pair) is not list or list(map(type, pair)) != [str, str] for pair in described):
            raise ValueError("not pairs of name and kind")
        return Schema(described)
    except (TypeError, ValueError) as error:
        raise DamageError(f"{where}: its list of fields is not valid: {error}") from None


def _check_fields(fields: Sequence[tuple[str, str]]) -> None:
    if not fields or fields[0] != (KEY, "key"):
        raise OptionError(f"the first field must be {KEY!r} of kind 'key'")
    if len(fields) > MAX_FIELDS:
        raise OptionError(f"{len(fields)} fields; the limit is {MAX_FIELDS}")
    seen = set()
    for name, kind in fields:
        if kind not in KINDS or (kind == "key") != (name == KEY):
            raise OptionError(f"field {name!r}: kind {kind!r} is not one of {', '.join(KINDS[1:])}")
        try:
            size = len(name.encode())
        except UnicodeEncodeError:  # a lone surrogate
            size = 0
        if not 1 <= size <= MAX_NAME or name in seen:
            raise OptionError(
                f"field {printable(name)!r}: names are unique, not empty, UTF-8 of at most "
                f"{MAX_NAME} bytes"
            )
        seen.add(name)


@lru_cache(maxsize=64)  # 300 us, and each shard that is opened has the fields of the one before
def _compile(
    fields: tuple[tuple[str, str], ...],
    blobs: tuple[tuple[int, bool], ...],
    types: tuple[tuple[int, type], ...],
) -> tuple[Decode, DecodeRun]:
    """Compile decoders for exactly these fields: dict(zip(...)) costs 290 ns, a literal 80 ns.

    The text depends only on the number of fields and on which are blobs; names are passed as
    values, so nothing read from a file becomes code.
    """
    v = [f"v{i}" for i in range(len(fields))]
    body: list[str] = []  # blobs of `body` from byte `at` on, by what the head says of them
    if len(blobs) == 1 and not blobs[0][1]:  # the rest is the one blob
        only = v[blobs[0][0]]
        body += [
            f"if {only} != len(body) - at and ({only} is not None or len(body) != at):",
            "    raise ValueError('a blob is not as long as its head says')",
            f"if {only} is not None: {only} = body[at:]",
        ]
    else:
        for i, array in blobs:
            body += [
                f"if {v[i]} is not None:",
                f"    end = at + {'array_size' if array else 'length'}({v[i]})",
                f"    {v[i]} = {f'array({v[i]}, body[at:end])' if array else 'body[at:end]'}",
                "    at = end",
            ]
        body += ["if at != len(body): raise ValueError('blobs are not as long as its head says')"]
    kinds = [
        f"type({v[i]}) is not {kind.__name__}" + (f" and {v[i]} is not None" if i else "")
        for i, kind in types
    ]
    body = [
        f"if type(values) is not list or {' or '.join(kinds)}:",
        f"    raise ValueError({_MISFIT!r})",
        *body,
    ]
    sample = "{" + ", ".join(f"n{i}: {value}" for i, value in enumerate(v)) + "}"
    text = [
        "def decode(body, start, at):",
        f"    [{', '.join(v)}] = values = (unpack if at < most else counted)(body[start:at])",
        *(f"    {line}" for line in body),
        f"    return {sample}",
        "def decode_run(block, bounds, first, frame, checksum, alone, text):",
        "    for number, (begin, stop) in enumerate(bounds, first):",
        "        try:",
        "            expected, framed, at = frame(block, begin)",
        "            body = block[begin + 8:stop]",
        "            size = stop - begin - 16",
        "            if checksum(body, number) != expected or not at <= framed == size:",
        "                raise ValueError('frame')",
        "            at += 8",
        f"            [{', '.join(v)}] = values = (unpack if at < most else counted)(body[8:at])",
        *(f"            {line}" for line in body),
        "        except Exception:",
        "            yield alone(number, block[begin:stop], text)",
        "            continue",
        "        if text:",
        "            try:",
        f"                {v[0]} = {v[0]}.decode()",
        "            except UnicodeDecodeError:",
        f"                {v[0]} = key_text({v[0]})",
        f"        yield {sample}",
    ]
    nested = any(kind == "json" for _, kind in fields)
    scope: dict[str, Any] = {
        "unpack": partial(msgpack.unpackb, ext_hook=_unpack_array) if nested else msgpack.unpackb,
        "counted": _unpack_counted,
        "most": _UNCOUNTED,
        "array": _array,
        "array_size": _array_size,
        "length": _length,
        "key_text": key_text,
    }
    scope |= {f"n{i}": name for i, (name, _) in enumerate(fields)}
    exec("\n".join(text), scope)
    return scope["decode"], scope["decode_run"]


def _length(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_BODY:
        raise ValueError("a blob's length is not a length")
    return value


def _array_size(described: Any) -> int:
    dtype, shape = described
    if (
        type(dtype) is not str
        or type(shape) is not list
        or len(shape) > MAX_DIMENSIONS
        or any(type(n) is not int or n < 0 for n in shape)
    ):
        raise ValueError("an array's dtype or shape is not valid")
    if not _DTYPE.fullmatch(dtype) or (parsed := np.dtype(dtype)).str != dtype:
        raise ValueError("an array's dtype is not a plain one")
    return _length(math.prod(shape) * parsed.itemsize)


def _array(described: Any, data: Buffer) -> np.ndarray[Any, Any]:
    dtype, shape = described
    return np.frombuffer(data, dtype).reshape(shape).copy()  # owned and writable


def _describe_array(value: np.ndarray[Any, Any] | np.generic) -> tuple[list[Any], Buffer]:
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("it is a masked array, whose mask would be lost")
    if not _DTYPE.fullmatch(value.dtype.newbyteorder("<").str):
        raise TypeError(f"arrays of dtype {value.dtype} are not plain bytes")
    if value.ndim > MAX_DIMENSIONS:
        raise ValueError(f"it has {value.ndim} dimensions; the limit is {MAX_DIMENSIONS}")
    plain = np.ascontiguousarray(value, value.dtype.newbyteorder("<")).reshape(value.shape)
    return [plain.dtype.str, list(plain.shape)], plain.tobytes()


def _pack_array(value: Any) -> msgpack.ExtType:
    if isinstance(value, np.ndarray):
        described, data = _describe_array(value)
        return msgpack.ExtType(_ARRAY, msgpack.packb([*described, bytes(data)]))
    raise TypeError(f"cannot store {type(value).__name__}")


def _unpack_array(code: int, data: bytes) -> np.ndarray[Any, Any]:
    if code != _ARRAY:
        raise ValueError(f"extension type {code} is not known")
    dtype, shape, raw = _unpack(data)
    if _array_size((dtype, shape)) != len(raw):
        raise ValueError("an array's length differs from its shape")
    return _array((dtype, shape), raw)


def _found(value: Any) -> str:
    if _is_picture(value):
        return "a PIL image"
    if _is_tensor(value):
        return "a tensor"
    return f"a value of type {type(value).__name__}"


def _is_picture(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "PIL"


def _is_tensor(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "numpy")


def _advice(kind: str, value: Any) -> str:
    """Say what to give instead of a value that does not fit a kind; "": that is plain."""
    if kind == "image" and _is_picture(value):
        return (
            ". Give the bytes of an image file: those that it was read from, or buffer = "
            'io.BytesIO(); image.save(buffer, "PNG"); buffer.getvalue()'
        )
    if kind == "image" and (isinstance(value, np.ndarray) or _is_tensor(value)):
        return (
            '. Give the bytes of an image file, as Image.fromarray(array).save(buffer, "PNG") '
            "makes them, or declare the field 'array'"
        )
    if kind in ("image", "bytes") and isinstance(value, (str, os.PathLike)):
        return '. Give the content of the file: open(path, "rb").read()'
    if kind == "array" and _is_tensor(value):
        return ". Give tensor.cpu().numpy()"
    if kind == "array" and isinstance(value, (list, tuple, int, float)):
        return ". Give numpy.array(value)"
    if kind in ("int", "float", "bool") and (isinstance(value, np.ndarray) or _is_tensor(value)):
        return ". Give value.item()"
    return ""


def _encode_key(value: bytes | str) -> bytes:
    key = key_bytes(value)
    if not 1 <= len(key) <= MAX_KEY:
        raise ValueError(f"it is {len(key):,} bytes long; 1 to {MAX_KEY:,} are allowed")
    return key


def _encode_bytes(value: Buffer) -> tuple[int, Buffer]:
    if isinstance(value, memoryview):
        value = value.tobytes()
    return len(value), value


def _encode_int(value: Any) -> int:
    if not -(1 << 63) <= (number := int(value)) < 1 << 64:
        raise ValueError(f"{number} does not fit 64 bits")
    return number


def _encode_str(value: str) -> str:
    value.encode()  # a lone surrogate is a UnicodeEncodeError, a ValueError
    return str(value)


# One Packer for all: msgpack.packb makes one per call, 0.4 us of a head's 0.6.
_pack = msgpack.Packer(default=_pack_array).pack


def _encode_nested(value: Any, depth: int = MAX_DEPTH) -> Any:
    if depth == 0:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, (bool, float, bytes)):
        return value
    if isinstance(value, np.ndarray):
        _describe_array(value)
        return value
    if isinstance(value, int):
        return _encode_int(value)
    if isinstance(value, str):
        return _encode_str(value)
    if isinstance(value, np.generic):
        return _encode_nested(value.item(), depth - 1)
    if isinstance(value, (list, tuple)):
        return [_encode_nested(item, depth - 1) for item in value]
    if isinstance(value, dict):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"a dict in it has the key {odd[0]!r}; keys must be str")
        return {_encode_str(key): _encode_nested(item, depth - 1) for key, item in value.items()}
    raise TypeError(f"it holds {_found(value)}, which cannot be stored")


# By kind: the types of its values, in words, and what encodes one: of BLOBS to head and blob.
_ENCODERS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "key": ((bytes, str), "bytes or str", _encode_key),
    "image": ((bytes, bytearray, memoryview), "bytes", _encode_bytes),
    "bytes": ((bytes, bytearray, memoryview), "bytes", _encode_bytes),
    "array": ((np.ndarray, np.generic), "a numpy array", _describe_array),
    "int": ((int, np.integer), "an int", _encode_int),
    "float": ((float, int, np.floating, np.integer), "a float", float),
    "bool": ((bool, np.bool_), "a bool", bool),
    "str": (str, "a str", _encode_str),
    "json": (object, "", _encode_nested),
}
_NUMBERS = ("int", "float")  # a bool is none of them, though it is an int in Python
_INFER: tuple[tuple[Any, str], ...] = (
    ((bytes, bytearray, memoryview), "bytes"),
    (np.ndarray, "array"),
    ((bool, np.bool_), "bool"),  # before int: a bool is one
    ((int, np.integer), "int"),
    ((float, np.floating), "float"),
    (str, "str"),
    ((list, tuple, dict), "json"),
)


def _key_of(sample: Mapping[str, Any]) -> bytes | str:
    key = sample.get(KEY)
    return key if isinstance(key, (bytes, str)) else "without a key"


def _mismatch(names: Sequence[str], sample: Mapping[str, Any]) -> str:
    missing = [name for name in names if name not in sample]
    extra = [str(name) for name in sample if name not in names]
    found = [
        f"{what} {', '.join(map(repr, which))}"
        for what, which in (("lacks", missing), ("has also", extra))
        if which
    ]
    return (
        f"sample {printable(_key_of(sample))}: the fields are {', '.join(names)}; it "
        f"{' and '.join(found)}"
    )
