"""Tar files as webdataset reads them, and the index that DALI wants beside each.

A record's fields are members of one name but for the extension, which says how they are decoded
(`webdataset` describes the file). A field becomes the extension that webdataset decodes back
to its value:

    image               jpg, png, ... by what each file is; a second one is NAME.png
    int                 `label`: cls; others NAME.json
    float, bool, json   NAME.json
    str                 NAME.txt
    array               NAME.npy
    bytes               NAME, or NAME.bin where webdataset would decode NAME

where NAME is the field's own extension already (`txt`, `seg.png`), it is used as it is. A field
that is None has no member.

The key is the name before the first dot, so a key with another dot in its last part is refused; the
ending of an image's file, as in `cat/1.jpg`, goes, since the extension says it again.

Member: ustar header, or one with GNU's long name before it; times are 0 and owners nobody, so the
bytes follow from the records. Index: line `v1.2 SAMPLES`, then a line a sample: `EXT OFFSET SIZE
NAME` of each member; `v1.1`, without names, where a name has a blank. Source:
https://github.com/NVIDIA/DALI/blob/main/tools/wds2idx.py
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...errors import OptionError, printable
from ...images.filetype import ALL_ENDINGS
from ...names import KEY
from ..sample import Sample
from .webdataset import INTS, JSONS, TEXTS, split_name
from .writer import ExportSpec, Field, ShardedWriter, check_names, image_ending, json_bytes, misfit

_DECODED = frozenset(  # webdataset makes something else than bytes of these
    (
        *INTS,
        *TEXTS,
        *JSONS,
        *("class", "count"),  # so do its releases before 1.0
        *("pkl", "pickle", "pyd", "pth", "ten", "tb", "mp", "msg", "npy", "npz", "cbor"),
    )
)
_READ_BACK = {  # what is read back to a value of this kind, and the one that is chosen
    "int": (INTS + JSONS, "json"),
    "str": (TEXTS, "txt"),
    "array": (("npy",), "npy"),
}
_EXTENSION = re.compile(r"[a-z0-9]([a-z0-9_.+-]*[a-z0-9])?")
_BLOCK = 512
_Member = tuple[bytes, int, int, bytes]  # extension, where its data begins, size, name
_END = 10_240  # tar writes records of 20 blocks, and warns where a file ends otherwise


class WebDataset(ShardedWriter):
    """Tar files that are being written."""

    suffix = ".tar"
    max_end_bytes = _END + 2 * _BLOCK - 1
    own_files = re.compile(r"\d{5,}\.(tar|idx)")

    def __init__(self, spec: ExportSpec) -> None:
        super().__init__(spec)
        images = [
            field for field in spec.fields if field.kind == "image" and field.exported_name is None
        ]
        main = next((one for one in images if one.name == "image"), None)
        if main is None and len(images) == 1:
            main = images[0]
        self._fields: list[tuple[str, str, str]] = []  # name, kind, extension; "": by content
        self._types: dict[str, set[str]] = {}  # extensions that the content had
        for field in spec.fields:
            extension = _extension(field, field is main)
            self._fields.append((field.name, field.kind, extension))
            self.exported_names[field.name] = extension
        check_names([extension for _, _, extension in self._fields if extension], "webdataset")
        self._has_image = main is not None or any(kind == "image" for _, kind, _ in self._fields)
        self._all = spec.manifest.schema.fields
        self._members: list[_Member] = []  # of the record that was encoded last
        self._seen: dict[bytes, bytes] = {}  # keys by their names in the file
        for key in (keys := spec.keys()):
            self._check_key(key)
        self._checked = bool(keys)  # all of them, before any is written

    def _check_key(self, key: bytes) -> None:
        advice = "--keys number names the records by their numbers"
        short = self._key(key)
        if why := _unfit(short):
            left_out = next(
                (name for name, kind in self._all if kind == "image" and not self._has_image), None
            )
            more = ""
            if left_out is not None and not _unfit(_without_ending(key)):
                more = (
                    "; or write the image, too, whose ending goes: --fields "
                    f"{printable(left_out)},..."
                )
            raise OptionError(f"the key {printable(key)} {why}. {advice}{more}")
        if short in self._seen:
            raise OptionError(
                f"the keys {printable(self._seen[short])} and {printable(key)} are one in "
                f"webdataset, {printable(short)}; {advice}"
            )
        self._seen[short] = key

    def _key(self, key: bytes) -> bytes:
        return _without_ending(key) if self._has_image else key

    def encode(self, number: int, sample: Sample) -> bytes:
        """Return a record; empty if there is nothing of it. Raises SampleError."""
        if not self._checked:
            self._check_key(sample[KEY])
        key = self._key(sample[KEY])
        pieces: list[bytes] = []
        self._members, at = [], 0
        for name, kind, extension in self._fields:
            value = sample[name]
            if value is None:
                continue
            if kind == "image" and (not extension or extension.endswith(".")):
                found = image_ending(value)
                if found is None:
                    raise misfit(
                        sample, name, f"it is no image that is known; --fields {name}=EXTENSION"
                    )
                extension += found
                self._types.setdefault(name, set()).add(extension)
                self.exported_names[name] = "/".join(sorted(self._types[name]))
            try:
                data = _encoder(kind, extension)(value)
            except (TypeError, ValueError) as error:
                raise misfit(sample, name, str(error)) from None
            shown = extension.encode()
            if any(shown == other for other, *_ in self._members):
                raise misfit(sample, name, f"another field is called {extension!r}, too")
            path = key + b"." + shown
            header = _header(path, len(data))
            self._members.append((shown, at + len(header), len(data), path))
            padding = bytes(-len(data) % _BLOCK)
            pieces += (header, data, padding)
            at += len(header) + len(data) + len(padding)
        return b"".join(pieces)

    def entry(self, number: int, at: int, size: int) -> list[_Member]:
        """Return what `index` needs of the record that was encoded last."""
        return [
            (extension, at + begin, size, path) for extension, begin, size, path in self._members
        ]

    def index(self, entries: Sequence[list[_Member]]) -> bytes:
        """Return the index of a file."""
        # Blanks part the words of a line, and version 1.1 is the one without names.
        named = all(path.split() == [path] for members in entries for *_, path in members)
        lines = [b"v1.%d %d" % (2 if named else 1, len(entries))]
        for members in entries:
            places = (
                b"%b %d %d" % (extension, at, size) + (b" " + path if named else b"")
                for extension, at, size, path in members
            )
            lines.append(b" ".join(places))
        return b"\n".join((*lines, b""))

    def end(self, size: int) -> bytes:
        """Return what stands behind the last record of a file."""
        return bytes(-(size + 2 * _BLOCK) % _END + 2 * _BLOCK)


def _without_ending(key: bytes) -> bytes:
    """Return a key without the ending of an image's file."""
    stem, dot, ending = key.rpartition(b".")
    if dot and ending.decode("latin-1").lower() in ALL_ENDINGS and stem[-1:] != b"/":
        return stem or key
    return key


def _unfit(key: bytes) -> str:
    """Say why a key cannot be the name of a record's members; "": it can."""
    *folders, last = key.split(b"/")
    if any(part in (b"", b".", b"..") or b"\0" in part for part in (*folders, last)):
        return "is no path of a file in a tar"
    found = split_name(key + b".x")
    if found == (key, b"x"):
        return ""
    if b"." in last and found is not None:
        own, extension = found
        return (
            "has a dot in its last part, and webdataset splits names at the first one: it would "
            f"read {printable(own)} as the key, and {printable(extension[:-2])} as a part of the "
            "field"
        )
    return "is a name that webdataset skips, or reads as another"


def _extension(field: Field, main: bool) -> str:
    """Name a field in the tar file; "" or "NAME." if its content decides the rest."""
    name, kind, exported_name = field
    if exported_name is not None:
        extension = exported_name.lower()
        if not _EXTENSION.fullmatch(extension):
            raise OptionError(
                f"{printable(name)}={printable(exported_name)}: an extension is letters, digits, "
                "and . _ + - within"
            )
        _encoder(kind, extension, name)
        return extension
    name = re.sub(r"[^a-z0-9_.+-]", "_", name.lower()).strip("_.+-") or "field"
    last = name.rpartition(".")[2]
    if kind == "image":
        return "" if main else name if last in ALL_ENDINGS else f"{name}."
    if kind == "bytes":
        return f"{name}.bin" if last in _DECODED else name
    if kind == "int" and name == "label":
        return "cls"
    known, ending = _READ_BACK.get(kind, (JSONS, "json"))
    return name if last in known else f"{name}.{ending}"


def _encoder(kind: str, extension: str, name: str = "") -> Callable[[Any], bytes]:
    """Return the encoder of a member. Raises OptionError if nothing reads the value back."""
    last = extension.rpartition(".")[2]
    if kind in ("image", "bytes"):
        return bytes
    if last in JSONS and kind != "array":
        return json_bytes
    if kind == "array" and last == "npy":
        return npy_bytes
    if kind == "str" and last not in _DECODED - {*TEXTS}:
        return str.encode
    if kind == "int" and last in INTS:
        return lambda value: b"%d" % value
    fitting = {"array": "npy", "int": "cls or json", "str": "txt or json"}.get(kind, "json")
    raise OptionError(
        f"{printable(name)}={printable(extension)}: webdataset would not read a field of kind "
        f"{kind} back from .{printable(last)}; choose .{fitting}"
    )


def npy_bytes(value: np.ndarray[Any, Any]) -> bytes:
    """Return an array as the content of a .npy file."""
    out = io.BytesIO()
    np.lib.format.write_array(out, value, allow_pickle=False)
    return out.getvalue()


def _header(path: bytes, size: int) -> bytes:
    if len(path) <= 100:
        return _block(path, b"", size, b"0")
    cut = path.rfind(b"/", 1, 156)
    if cut > 0 and 0 < len(path) - cut - 1 <= 100:
        return _block(path[cut + 1 :], path[:cut], size, b"0")
    long = path + b"\0"
    padding = bytes(-len(long) % _BLOCK)
    name = _block(b"././@LongLink", b"", len(long), b"L")
    return name + long + padding + _block(path[:100], b"", size, b"0")


def _block(name: bytes, prefix: bytes, size: int, kind: bytes) -> bytes:
    """Return a header. Sizes fit 11 octal digits: a record has at most 4 GiB."""
    head = b"".join(
        (
            name.ljust(100, b"\0"),
            b"0000644\x00",  # mode
            b"0000000\x00" * 2,  # owner and group
            b"%011o\0" % size,
            b"00000000000\0",  # time
            b" " * 8,
            kind.ljust(101, b"\0"),
            b"ustar\x0000",
            bytes(80),
            prefix.ljust(155, b"\0"),
            bytes(12),
        )
    )
    return head[:148] + b"%06o\0 " % sum(head) + head[156:]
