"""What each format that `export` writes provides, and what several of them share.

A target is made for one dataset and one folder. It says at once, in OptionError, which fields the
format cannot hold; then it is given the records one by one. It writes into a folder of its own, so
it need not care for what is there, nor for what is left when it fails.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from ...errors import OptionError, SampleError, printable
from ...images.filetype import ENDINGS, image_type
from ...names import KEY
from ...storage.local import Draft, token, write_file
from ..manifest import Manifest
from ..sample import Sample

_BUFFER = 1 << 20  # bytes that one system call writes


class Field(NamedTuple):
    """One field to be written."""

    name: str
    kind: str
    theirs: str | None = None  # what the user wants it to be called


@dataclass(frozen=True)
class Plan:
    """What a target is made with."""

    folder: str  # empty, and its own
    made: Manifest
    fields: Sequence[Field]  # without the key
    key: Field | None  # where the key is to be a field, too
    shard_size: int | None
    keys: Callable[[], Sequence[bytes]]  # of all records, as they will come
    learned: dict[str, str]  # by field, what `Again` was raised for


class Again(Exception):
    """A record does not fit what was chosen by those before: the target knows now, begin anew."""


class Target(Protocol):
    """A dataset in another format, being written."""

    shards: ClassVar[bool]  # the dataset becomes files of a limited size
    keyed: ClassVar[bool]  # the key can be one of the fields
    ours: ClassVar[re.Pattern[str] | None]  # names of its files, where they do not follow from keys
    notes: list[str]  # what is not as it was

    def __init__(self, plan: Plan) -> None:
        """Raises OptionError."""

    @property
    def called(self) -> dict[str, str]:
        """The fields, and what they are called there."""

    def add(self, number: int, sample: Sample) -> bool:
        """Write a record; False when there is nothing of it to write. Raises SampleError, Again."""

    def finish(self) -> None:
        """Complete all files, and flush them."""

    def close(self) -> None:
        """Give up what is open."""


class ShardTarget:
    """Files 00000.xyz, 00001.xyz ... of records one after another, each with an index beside it."""

    shards: ClassVar[bool] = True
    keyed: ClassVar[bool] = False
    ours: ClassVar[re.Pattern[str] | None] = None
    suffix: ClassVar[str]
    default_size: ClassVar[int | None] = 256 << 20  # bytes of a file
    most_behind: ClassVar[int] = 0  # bytes that `end` gives

    def __init__(self, plan: Plan) -> None:
        self.called: dict[str, str] = {}
        self.notes: list[str] = []
        self._folder = plan.folder
        limit = plan.shard_size or self.default_size
        self._limit = None if limit is None else limit - self.most_behind
        self._draft: Draft | None = None
        self._buffer = bytearray()
        self._size = 0  # of the file, with what is buffered
        self._entries: list[Any] = []
        self._number = 0  # of the next file

    def encode(self, number: int, sample: Sample) -> bytes:
        """A record; empty when there is nothing of it. Raises SampleError."""
        raise NotImplementedError

    def entry(self, number: int, at: int, size: int) -> Any:
        """What `index` needs of the record that was encoded last."""
        raise NotImplementedError

    def end(self, size: int) -> bytes:
        """What stands behind the last record of a file."""
        return b""

    def index(self, entries: Sequence[Any]) -> bytes:
        """The index of a file; entries that are lines are all of it."""
        return b"".join(entries)

    def add(self, number: int, sample: Sample) -> bool:
        data = self.encode(number, sample)
        if not data:
            return False
        if self._size and self._limit is not None and self._size + len(data) > self._limit:
            self.finish()
        if self._draft is None:
            name = f"{self._number:05d}{self.suffix}"
            self._draft = Draft(self._folder, name, token(), patched=True)  # no digest is wanted
        self._entries.append(self.entry(number, self._size, len(data)))
        self._size += len(data)
        self._buffer += data
        if len(self._buffer) >= _BUFFER:
            self._draft.write(self._buffer)
            self._buffer = bytearray()
        return True

    def finish(self) -> None:
        """Complete the file that is open, if one is."""
        if self._draft is None:
            return
        self._draft.write(self._buffer + self.end(self._size))
        self._draft.commit(f"{self._number:05d}{self.suffix}")
        write_file(self._folder, f"{self._number:05d}.idx", self.index(self._entries))
        self._draft, self._buffer, self._size, self._entries = None, bytearray(), 0, []
        self._number += 1

    def close(self) -> None:
        if self._draft is not None:
            self._draft.discard()
            self._draft = None


# --- what several of them need --------------------------------------------------------------------


def image_extension(data: bytes) -> str | None:
    """The file ending of what an image really is; None when it is none."""
    kind = image_type(data[:32])
    if kind == "AVIF or HEIF":
        return "avif" if data[8:11] == b"avi" else "heic"
    return None if kind is None else ENDINGS[kind][0]


def image_and_label(plan: Plan, format: str, labels: Sequence[str]) -> tuple[str, str | None]:
    """The field that is the image, and the one that is the label, where a format has just these.

    labels: the kinds that its label can have. Raises OptionError for any other field.
    """
    fields = list(plan.fields)
    for field in fields:
        if field.theirs not in (None, "image", "label"):
            raise OptionError(
                f"{format} has an image and a label, and no room for {printable(field.name)} as "
                f"{printable(str(field.theirs))}: name them by --fields image=image,label=label"
            )
    image = _one(fields, "image", ("image", "bytes"))
    if image is None:
        raise OptionError(
            f"{plan.made.where}: {format} holds images, and which field is the image cannot be "
            f"told; there are {_shown(fields)}. Name it: --fields {_first(fields)}=image"
        )
    fields.remove(image)
    label = _one(fields, "label", labels)
    if label is not None:
        fields.remove(label)
    if fields:
        keep = f"{image.name}=image" + (f",{label.name}=label" if label else "")
        raise OptionError(
            f"{plan.made.where}: {format} has an image and a label ({' or '.join(labels)}) and no "
            f"room for {_shown(fields)}. Leave the rest out: --fields {printable(keep)}"
        )
    return image.name, None if label is None else label.name


def _one(fields: Sequence[Field], role: str, kinds: Sequence[str]) -> Field | None:
    """The field with this role: named so by the user, called so, or the only one of its kind."""
    fitting = [field for field in fields if field.kind in kinds]
    for field in fitting:
        if field.theirs == role:
            return field
    free = [field for field in fitting if field.theirs is None]
    for field in free:
        if field.name == role:
            return field
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


def key_name(plan: Plan, taken: Sequence[str]) -> str | None:
    """What the field with the keys is called, in formats that have no keys; None: it is left out.

    Not `__key__`, which shardio's own fields use.
    """
    if plan.key is None:
        return None
    if plan.key.theirs is not None:
        return plan.key.theirs
    name = "key"
    while name in taken:
        name = f"_{name}"
    return name


def check_distinct(names: Sequence[str], format: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise OptionError(
                f"two fields would be called {printable(name)!r} in {format}; name them by --fields"
            )
        seen.add(name)


def misfit(sample: Sample, name: str, why: str) -> SampleError:
    return SampleError(f"record {printable(sample[KEY])}: field {printable(name)!r}: {why}")


def json_bytes(value: Any) -> bytes:
    """Raises TypeError for bytes and arrays, which JSON does not have."""
    return json.dumps(value, default=_no_json).encode()


def _no_json(value: Any) -> Any:
    what = "an array" if isinstance(value, np.ndarray) else type(value).__name__
    raise TypeError(f"it holds {what}, which JSON has no room for")
