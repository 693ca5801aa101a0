"""Any stream of samples to shards: `with Writer(out) as w: w.write({...})`.

The manifest is written when the block ends well; when it raises, nothing was packed and no file
stays. A stream cannot be resumed: shards of a Writer that was killed are dropped by the next one
in the same directory, and the stream is written again from its beginning. Shards for an object
store are uploaded as they are finished; those of a stream that failed are there until `gc`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from ..dataset.reader import Reader
from ..errors import (
    BusyError,
    ExistsError,
    OptionError,
    SampleError,
    StorageError,
    printable,
    there_are,
)
from ..formats import check_packed, manifest
from ..formats.base import MAX_RECORDS, ShardInfo
from ..formats.manifest import Manifest
from ..formats.sample import Schema, infer_fields
from ..images.filetype import image_type
from ..names import KEY, key_bytes, key_text
from ..storage import local
from ..storage.base import Location
from ..storage.options import Storage
from ..units import check_bool, check_int, check_size, show_count
from . import journal, output_dir
from .place import Stored, Workspace, find_place
from .plan import SHARD_SIZE
from .shard_writer import ShardWriter
from .versions import commit

_HASH = "S16"  # xxh3_128 of a key: no two of 10**9 keys share one by chance (1 in 10**21)


class Writer:
    """Write samples, in the order they come, to a dataset in `out`: a directory, or a URL.

    fields       {name: kind}, or pairs; kinds are image, bytes, array, int, float, bool, str,
                 json. Default: those of the first sample. `__key__` (bytes or str, unique) is
                 always the first field; where a sample has none it is its number, nine digits.
    classes      names of the labels, when there is an int field `label`
    format       of the shards: "record" or "lmdb"
    id           names the dataset: equal streams under equal ids give equal bytes. Default: random
    shard_size   bytes after which a shard is complete, or like "64MB"
    max_records  records a shard, at most
    overwrite    commit over another dataset in `out`; its shards stay until `gc`
    append       add to the dataset in `out`, as a new version: fields, format and id are its own;
                 `classes` may have more names behind those that it has
    storage      a shardio.Storage: how an object store is reached

    A sample that does not fit raises SampleError and is not written; the Writer goes on. When a
    shard cannot be written (StorageError), or holds a key twice (SampleError, once the shard is
    full), the Writer is at its end, and nothing was packed. In a store, of two that write at once
    the one that ends later gets a BusyError.

    Raises OptionError, ExistsError, BusyError, SampleError, StorageError.
    """

    _space: Workspace | None = None
    _closed = False

    def __init__(
        self,
        out: str | os.PathLike[str],
        *,
        fields: Mapping[str, str] | Sequence[tuple[str, str]] | None = None,
        classes: Sequence[str | bytes] | None = None,
        format: str = "record",
        id: str | None = None,
        shard_size: int | str = SHARD_SIZE,
        max_records: int | None = None,
        overwrite: bool = False,
        append: bool = False,
        storage: Storage | None = None,
    ) -> None:
        if max_records is not None:
            max_records = check_int("max_records", max_records, 1, MAX_RECORDS)
        check_bool(overwrite=overwrite, append=append)
        if isinstance(classes, (str, bytes)):
            raise OptionError(f"classes is {classes!r}; expected a list of names")
        if not isinstance(id, (str, type(None))):
            raise OptionError(f"id is {id!r}; expected a str")
        self._place = find_place(out, storage)
        self.out = self._place.url
        self._format = check_packed(format)
        self.records = 0
        self._schema = None if fields is None else Schema(_with_key(fields))
        self._images = () if self._schema is None else self._schema.images
        self._classes = None if classes is None else tuple(map(_class_name, classes))
        if twice := [name for name, n in Counter(self._classes or ()).items() if n > 1]:
            raise OptionError(f"classes: {printable(repr(twice[0]))} stands there twice")
        named = None if id is None else hashlib.sha256(id.encode()).digest()[:16]
        self._id = named or secrets.token_bytes(16)
        self._shard_size = check_size("shard_size", shard_size)
        self._max_records, self._overwrite = max_records, overwrite
        self._base: Manifest | None = None  # of the dataset that is appended to
        self._old: Stored | None = None  # the manifest that is replaced
        self._reader: Reader | None = None  # of it, once keys are compared
        if append:
            given = {"fields": fields, "id": id, "overwrite": overwrite or None}
            self._base = _appended_to(self._place.location, given, self._classes)
            self._schema = self._base.stored_schema
            self._images = self._schema.images
            self._format, self._id = self._base.format, self._base.dataset_id
            self._classes = self._classes or self._base.classes
        self._token = local.token()
        self._process = os.getpid()
        self._shards: list[ShardInfo] = []
        self._blob_bytes = 0
        self._known_keys = _Keys()
        self._keys: list[bytes] = []  # of this shard
        self._shard: ShardWriter | None = None
        self._check_free()  # before there are samples, which may take hours

    def __del__(self) -> None:
        # A fork's copy is not ours to end: the files are its parent's.
        if self._closed or self._space is None or self._process != os.getpid():
            return
        warnings.warn(
            f"{printable(self.out)}: a Writer was never closed, so nothing was packed: write in a "
            "`with` block, or call close()",
            ResourceWarning,
            stacklevel=2,
            source=self,
        )
        with contextlib.suppress(Exception):  # the interpreter may be at its end
            self.abort()

    def __repr__(self) -> str:
        return f"Writer({printable(self.out)!r}: {show_count(self.records, 'record')})"

    def __enter__(self) -> Writer:
        self._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def write(self, sample: Mapping[str, Any]) -> None:
        """Append one sample. Raises SampleError when it does not fit the fields."""
        self._begin()
        if KEY not in sample:
            first = 0 if self._base is None else self._base.stored_records
            sample = {KEY: b"%09d" % (first + self.records), **sample}
        self._check_label(sample)
        if self._schema is None:
            self._schema = Schema(infer_fields(sample))
            self._images = self._schema.images
        self._check_images(sample)
        with self._ending_on_error(StorageError):
            if self._shard is None:
                first = 0 if self._base is None else self._base.shards
                number, format = first + len(self._shards), self._format
                folder = self._begin().folder
                self._shard = ShardWriter(
                    folder, self._token, self._schema, self._id, number, format
                )
                self._keys = []
        shard = self._shard
        shard.write(sample)
        self._keys.append(key_bytes(sample[KEY]))
        self.records += 1
        with self._ending_on_error(BaseException):
            shard.flush()
            if shard.size >= self._shard_size or shard.records == self._max_records:
                self._close_shard(shard)

    def close(self) -> None:
        """Write what is pending, and the manifest: from now on the dataset is there."""
        if self._closed:
            return
        space = self._begin()
        with self._ending_on_error(BaseException):
            self._commit(space)
        self._closed = True
        space.close()

    def _commit(self, space: Workspace) -> None:
        if self._shard is not None:
            self._close_shard(self._shard)
        if self._schema is None:
            raise SampleError(
                f"{printable(self.out)}: no sample was written, and no fields were given"
            )
        space.finish()
        self._place.add(space.folder, [info.name for info in self._shards])
        if self._base is not None:
            base, added = self._base, {"added": self.records}
            after = manifest.extended(base, self._shards, self._blob_bytes, self._classes)
            commit(self._place, base, after, "append", added, {})
            return
        written = manifest.make(
            self._shards,
            dataset_id=self._id,
            format=self._format,
            schema=self._schema,
            classes=self._classes,
            options={
                "source": "writer",
                "shard_size": self._shard_size,
                "max_records": self._max_records,
            },
            blob_bytes=self._blob_bytes,
        )
        if self._place.location.exists(manifest.MANIFEST):
            journal.remove_rejected(self._place.location)  # of the dataset that is replaced
        self._place.replace(manifest.MANIFEST, self._old, written.dump())

    def abort(self) -> None:
        """Give up: remove what was written, commit nothing."""
        closed, self._closed = self._closed, True
        if closed or self._space is None:
            return
        try:
            if self._shard is not None:
                self._shard.discard()
        finally:
            self._space.close()

    @contextlib.contextmanager
    def _ending_on_error(self, kind: type[BaseException]) -> Iterator[None]:
        """Give up after such an error: nobody knows what is on disk."""
        try:
            yield
        except kind:
            with contextlib.suppress(StorageError):
                self.abort()
            raise

    def _begin(self) -> Workspace:
        if self._closed:
            raise OptionError(f"{printable(self.out)}: this Writer is closed")
        if self._space is None:
            self._check_free()
            self._space = self._place.begin(self._id)
            with self._ending_on_error(BaseException):
                self._check_free()  # again: another may have committed here a moment ago
                if self._overwrite:
                    with contextlib.suppress(FileNotFoundError):
                        self._old = self._place.stored(manifest.MANIFEST)
        return self._space

    def _check_free(self) -> None:
        if self._base is not None:
            if manifest.load(self._place.location).version_id != self._base.version_id:
                raise BusyError(
                    f"{printable(self.out)}: the dataset was changed since this Writer was opened: "
                    "open it again"
                )
            return
        there, place = None, self._place.location
        output_dir.check(place)
        if not self._overwrite and (there := manifest.load_if_packed(place)):
            raise ExistsError(
                f"{printable(self.out)}: a dataset is here, of "
                f"{show_count(there.records, 'record')}. Choose another "
                "directory, or replace it with overwrite=True"
            )

    def _close_shard(self, shard: ShardWriter) -> None:
        if not shard.records:  # its only sample did not fit
            shard.discard()
            self._shard = None
            return
        self._known_keys.add(self._keys)
        if self._base is not None:
            if self._reader is None:
                self._reader = Reader(self._place.location, self._base)
            for key in sorted(key for *_, key in self._reader.with_keys(set(self._keys))):
                raise SampleError(f"key {printable(key)} is in the dataset; keys must be unique")
        info = shard.finish()
        shard.commit(info.name)
        self._shard = None
        assert self._space is not None
        self._space.take(info)
        self._blob_bytes += shard.blob_bytes
        self._shards.append(info)

    def _check_label(self, sample: Mapping[str, Any]) -> None:
        label = sample.get("label")
        if isinstance(label, str) and (
            self._schema is None or dict(self._schema.fields).get("label") == "int"
        ):
            raise SampleError(f"sample {_shown_key(sample)}: {self._not_a_number(label)}")
        if self._classes is None or not isinstance(label, (int, np.integer)):
            return  # what is no int, the encoder refuses
        if not 0 <= label < len(self._classes):
            raise SampleError(
                f"sample {_shown_key(sample)}: label {label} names none of the "
                f"{show_count(len(self._classes), 'class', 'classes')}, counted from 0"
            )

    def _not_a_number(self, label: str) -> str:
        """Say what to do about a label that is text."""
        found = f"label is {printable(repr(label))}, and labels are numbers"
        known = self._classes or ()
        if label in known:
            return f"{found}: give {known.index(label)}, its place in `classes`"
        if known:
            return f"{found}, the places of names in `classes`; {there_are(known, label)}"
        return (
            f"{found}: give Writer(classes=[...]) the names of all classes, and their places in it "
            "as labels; or, if text is meant, fields={..., 'label': 'str'}"
        )

    def _check_images(self, sample: Mapping[str, Any]) -> None:
        """Raise SampleError where the bytes of an image are none: nobody could decode them."""
        for name in self._images:
            value = sample.get(name)
            if not isinstance(value, (bytes, bytearray, memoryview)):
                continue  # what is no bytes, the encoder refuses
            start = bytes(value[:32])
            if image_type(start) is None:
                raise SampleError(
                    f"sample {_shown_key(sample)}: field {name!r} is of kind 'image', but its "
                    f"{show_count(len(value), 'byte')} begin with {start[:16]!r}, as no file "
                    "of an image does. Bytes of something else are of kind 'bytes': "
                    f"fields={{..., {name!r}: 'bytes'}}"
                )


def _appended_to(
    there: Location, given: Mapping[str, Any], classes: tuple[str, ...] | None
) -> Manifest:
    """Return the dataset that is appended to. Raises OptionError, NotPackedError.

    given: options that it has itself. classes: names that may go on behind its own
    """
    for name, value in given.items():
        if value is not None:
            raise OptionError(f"{name} is given with append=True: leave it out")
    base = manifest.load(there)
    if base.names is not None:
        raise OptionError(
            f"{base.where}: it is an index of files of another format, and has no shards of its own"
        )
    known = base.classes or ()
    if classes is not None and classes[: len(known)] != known:
        raise OptionError(
            f"classes: expected those of the dataset, {', '.join(map(printable, known[:10]))}, and "
            "new ones behind them: no label that is there may change"
        )
    return base


def _class_name(name: object) -> str:
    return key_text(name) if isinstance(name, bytes) else str(name)


def _shown_key(sample: Mapping[str, Any]) -> str:
    key = sample[KEY]
    return printable(key if isinstance(key, (bytes, str)) else repr(key))


class _Keys:
    """The hashes of all keys so far, 16 bytes each, in sorted runs that double in length."""

    def __init__(self) -> None:
        self._runs: list[np.ndarray[Any, Any]] = []

    def add(self, keys: Sequence[bytes]) -> None:
        """Add the keys of a shard. Raises SampleError for the first that was there before."""
        hashes = np.array([xxhash.xxh3_128_digest(key) for key in keys], _HASH)
        order = np.argsort(hashes, kind="stable")
        run = hashes[order]
        twice = np.flatnonzero(run[1:] == run[:-1]) + 1
        for old in self._runs:
            place = np.searchsorted(old, run)
            place[place == len(old)] = 0
            twice = np.union1d(twice, np.flatnonzero(old[place] == run))
        if len(twice):
            raise SampleError(
                f"key {printable(keys[order[twice[0]]])} was written twice; keys must be unique"
            )
        self._runs.append(run)
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            self._runs[-2:] = [np.sort(np.concatenate(self._runs[-2:]), kind="stable")]


def _with_key(fields: Mapping[str, str] | Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return fields as they were given, the key first. Raises OptionError."""
    pairs = list(fields.items()) if isinstance(fields, Mapping) else fields
    plain = isinstance(pairs, (list, tuple)) and all(
        isinstance(pair, (list, tuple)) and [*map(type, pair)] == [str, str] for pair in pairs
    )
    if not plain:
        raise OptionError(
            f"fields is {printable(repr(fields))}; expected names and kinds, like "
            '{"image": "image", "label": "int"}'
        )
    return [(KEY, "key"), *((name, kind) for name, kind in pairs if name != KEY)]
