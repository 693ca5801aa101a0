"""The base of the formats that `export` writes, and what several of them share.

A writer is made for one dataset and one folder. It raises OptionError at once if the format cannot
hold a field; then it is given the records one by one. The folder is empty and nobody else's: a
writer overwrites nothing, and need not clean up where it fails.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ...errors import OptionError, SampleError, printable
from ...images.filetype import ENDINGS, image_type
from ...names import KEY
from ...storage.local import Draft, link, token, write_file
from ..manifest import Manifest
from ..sample import Sample

_BUFFER = 1 << 20  # bytes that one system call writes


class Field(NamedTuple):
    """One field to be written."""

    name: str
    kind: str
    exported_name: str | None = None  # None: the format chooses one


@dataclass(frozen=True)
class ExportSpec:
    """A request to write one dataset in another format."""

    folder: str  # an empty one, for this export alone
    manifest: Manifest
    fields: Sequence[Field]  # without the key
    key: Field | None  # where the key is to be a field, too
    shard_size: int | None
    keys: Callable[[], Sequence[bytes]]  # returns those of all records; none: known as they come
    required_types: dict[str, str]  # by field; a writer adds to them, and raises RestartExport
    split: str = ""  # the name of the split; "" without splits


class RestartExport(Exception):
    """A record does not fit the types that were chosen by earlier ones: begin anew with others."""


class FormatWriter:
    """A dataset in another format, being written: the base class of those that write one.

    Raises OptionError if the format cannot hold the dataset.
    """

    shards: ClassVar[bool] = False  # the dataset becomes files of a limited size
    keyed: ClassVar[bool] = False  # the key can be one of the fields
    keeps_classes: ClassVar[bool] = False  # the format has a place for the names of classes
    # The pattern of its files' names; None: they follow from the keys of records.
    own_files: ClassVar[re.Pattern[str] | None] = None

    def __init__(self, spec: ExportSpec) -> None:
        self.notes: list[str] = []  # differences from the dataset, for the user
        self.exported_names: dict[str, str] = {}  # by field, and types where there are several

    @classmethod
    def split_folder(cls, split: str) -> str:
        """Return the folder that the files of a split are in: its own, "" without splits."""
        return split

    @classmethod
    def join(cls, parts: Sequence[str], folder: str, split: str) -> None:
        """Put the files that several wrote, each a part of the records, into one folder."""
        raise NotImplementedError

    @classmethod
    def describe(cls, folder: str) -> None:
        """Write what says how all splits belong together, once their files are there."""

    def begin(self, sample: Sample) -> None:
        """Choose by the first record of the dataset, where only a part of it is written."""

    def add(self, number: int, sample: Sample) -> bool:
        """Write a record; False if it has nothing to write. Raises SampleError, RestartExport."""
        raise NotImplementedError

    def finish(self) -> None:
        """Complete all files, and flush them."""
        raise NotImplementedError

    def close(self) -> None:
        """Give up what is open."""


class ShardedWriter(FormatWriter):
    """Files 00000.xyz, 00001.xyz ... of records one after another, each with an index beside it."""

    shards = True
    suffix: ClassVar[str]
    default_size: ClassVar[int | None] = 256 << 20  # bytes of a file
    max_end_bytes: ClassVar[int] = 0  # bytes that `end` gives

    def __init__(self, spec: ExportSpec) -> None:
        super().__init__(spec)
        self._folder = spec.folder
        limit = spec.shard_size or self.default_size
        self._limit = None if limit is None else limit - self.max_end_bytes
        self._file: Output | None = None
        self._entries: list[Any] = []
        self._number = 0  # of the next file

    @classmethod
    def join(cls, parts: Sequence[str], folder: str, split: str) -> None:
        """Put the files that several wrote, each a part of the records, into one folder."""
        after = 0
        for part in parts:
            files = sum(name.endswith(cls.suffix) for name in os.listdir(part))
            for number in range(files):
                for suffix in (cls.suffix, ".idx"):
                    old = os.path.join(part, f"{number:05d}{suffix}")
                    link(old, os.path.join(folder, f"{after + number:05d}{suffix}"))
            after += files

    def encode(self, number: int, sample: Sample) -> bytes:
        """Return a record; empty if there is nothing of it. Raises SampleError."""
        raise NotImplementedError

    def entry(self, number: int, at: int, size: int) -> Any:
        """Return what `index` needs of the record that was encoded last."""
        raise NotImplementedError

    def end(self, size: int) -> bytes:
        """Return what stands behind the last record of a file."""
        return b""

    def index(self, entries: Sequence[Any]) -> bytes:
        """Return the index of a file; entries that are lines are all of it."""
        return b"".join(entries)

    def add(self, number: int, sample: Sample) -> bool:
        """Write a record; False if it has nothing to write. Raises SampleError, RestartExport."""
        data = self.encode(number, sample)
        if not data:
            return False
        size = 0 if self._file is None else self._file.tell()
        if size and self._limit is not None and size + len(data) > self._limit:
            self.finish()
        if self._file is None:
            self._file = Output(self._folder, f"{self._number:05d}{self.suffix}")
        self._entries.append(self.entry(number, self._file.tell(), len(data)))
        self._file.write(data)
        return True

    def finish(self) -> None:
        """Complete the file that is open, if one is."""
        if self._file is None:
            return
        self._file.write(self.end(self._file.tell()))
        self._file.commit()
        write_file(self._folder, f"{self._number:05d}.idx", self.index(self._entries))
        self._file, self._entries = None, []
        self._number += 1

    def close(self) -> None:
        """Give up what is open."""
        if self._file is not None:
            self._file.discard()
            self._file = None


class Output(io.RawIOBase):
    """A file that is being written, in large pieces: pyarrow gives many small ones."""

    def __init__(self, folder: str, name: str) -> None:
        self._name, self._buffer = name, bytearray()
        self._draft = Draft(folder, name, token(), patched=True)  # no digest is needed

    def tell(self) -> int:
        """Return the bytes that were written so far."""
        return self._draft.size + len(self._buffer)

    def write(self, data: Any) -> int:
        """Append bytes. Raises StorageError."""
        self._buffer += data
        if len(self._buffer) >= _BUFFER:
            self.flush()
        return len(data)

    def flush(self) -> None:
        """Hand over what is gathered. Raises StorageError."""
        if self._buffer:
            self._draft.write(self._buffer)
            self._buffer = bytearray()

    def writable(self) -> bool:
        """Return True: pyarrow asks."""
        return True

    def commit(self) -> None:
        """Flush to the device, and take the name. Raises StorageError."""
        self.flush()
        self._draft.commit(self._name)

    def discard(self) -> None:
        """Remove the file."""
        self._buffer = bytearray()
        self._draft.discard()


# --- what several of them need --------------------------------------------------------------------


def image_ending(data: bytes) -> str | None:
    """Return the file ending of an image's real type; None if it is no image."""
    kind = image_type(data[:32])
    if kind == "AVIF or HEIF":
        return "avif" if data[8:11] == b"avi" else "heic"
    return None if kind is None else ENDINGS[kind][0]


def image_and_label(spec: ExportSpec, format: str, labels: Sequence[str]) -> tuple[str, str | None]:
    """Return the fields that are the image and the label, for a format that has just these.

    labels: the kinds that its label can have. Raises OptionError for any other field.
    """
    fields, where = list(spec.fields), spec.manifest.where
    for field in fields:
        if field.exported_name not in (None, "image", "label"):
            raise OptionError(
                f"{format} has an image and a label, and no room for {printable(field.name)} as "
                f"{printable(str(field.exported_name))}: name them by --fields "
                "image=image,label=label"
            )
    image = _one(fields, "image", ("image", "bytes"))
    if image is None:
        raise OptionError(
            f"{where}: {format} holds images, and which field is the image cannot be "
            f"told; there are {_shown(fields)}. Name it: --fields {_first(fields)}=image"
        )
    fields.remove(image)
    label = _one(fields, "label", labels)
    if label is not None:
        fields.remove(label)
    if fields:
        fitting = f"{image.name}=image" + (f",{label.name}=label" if label else "")
        raise OptionError(
            f"{where}: {format} has an image and a label ({' or '.join(labels)}) and no "
            f"room for {_shown(fields)}. Leave the rest out: --fields {printable(fitting)}"
        )
    return image.name, None if label is None else label.name


def _one(fields: Sequence[Field], role: str, kinds: Sequence[str]) -> Field | None:
    """Find the field of this role: named so by the user, called so, or the only one of its kind."""
    fitting = [field for field in fields if field.kind in kinds]
    free = [field for field in fitting if field.exported_name is None]
    named = [field for field in fitting if field.exported_name == role]
    named += [field for field in free if field.name == role]
    if named:
        return named[0]
    if role == "image":
        for kind in kinds:
            same = [field for field in free if field.kind == kind]
            if len(same) == 1:
                return same[0]
    return None


def _first(fields: Sequence[Field]) -> str:
    return next((one.name for one in fields if one.kind in ("image", "bytes")), "FIELD")


def _shown(fields: Sequence[Field]) -> str:
    return ", ".join(f"{printable(one.name)} ({one.kind})" for one in fields) or "no fields"


def columns(spec: ExportSpec, format: str, key: str = "") -> list[tuple[str, str, str]]:
    """Return what each field is called there, its name here, and its kind; the key first.

    key: what its field is called; "": `key`, with as many `_` before it as make it a name of its
    own. Raises OptionError where there is no field, or two have one name.
    """
    found = [(one.exported_name or one.name, one.name, one.kind) for one in spec.fields]
    if spec.key is not None:
        name = spec.key.exported_name or key or "key"
        while not (spec.key.exported_name or key) and any(name == column for column, _, _ in found):
            name = f"_{name}"
        found.insert(0, (name, KEY, "key"))
    if not found:
        raise OptionError(f"{spec.manifest.where}: there is no field to export")
    check_names([column for column, _, _ in found], format)
    return found


def is_usual(kind: str, value: Any) -> bool:
    """Return False for an int above int64, and a key that is not UTF-8: they need another type."""
    if kind == "key":
        try:
            value.decode("utf-8")
        except UnicodeDecodeError:
            return False
    return kind != "int" or bool(value < 1 << 63)


def check_names(names: Sequence[str], format: str) -> None:
    """Raise OptionError if two fields have one name."""
    for at, name in enumerate(names):
        if name in names[:at]:
            raise OptionError(
                f"two fields would be called {printable(name)!r} in {format}; name them by --fields"
            )


def misfit(sample: Sample, name: str, why: str) -> SampleError:
    """Return the error for a value that the format cannot hold."""
    return SampleError(f"record {printable(sample[KEY])}: field {printable(name)!r}: {why}")


def to_float32(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Return numbers as little-endian float32; None if one of them is too large for it."""
    with np.errstate(over="ignore"):
        narrow = values.astype("<f4")
    return narrow if np.array_equal(np.isfinite(values), np.isfinite(narrow)) else None


def json_bytes(value: Any) -> bytes:
    """Return a value as JSON. Raises TypeError for bytes and arrays, which JSON does not have."""
    return json.dumps(value, default=_no_json).encode()


def _no_json(value: Any) -> Any:
    what = "an array" if isinstance(value, np.ndarray) else type(value).__name__
    raise TypeError(f"it holds {what}, which JSON has no room for")
