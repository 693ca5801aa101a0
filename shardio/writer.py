"""Any stream of samples to shards: `with Writer(out) as w: w.write({...})`.

The manifest is written when the block ends well; when it raises, nothing was packed and no file
stays. A stream cannot be resumed: shards of a Writer that was killed are dropped by the next one
in the same directory, and the stream is written again from its beginning.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from . import __version__, manifest, packing
from .errors import (
    ExistsError,
    NotPackedError,
    OptionError,
    SampleError,
    StorageError,
    printable,
)
from .formats.base import ShardInfo
from .formats.record import RecordEncoder
from .plan import JOURNAL, SHARD_SIZE
from .sample import KEY, Schema, infer_fields
from .storage import local, locate

_WRITE = 1 << 20  # bytes gathered for one write call
_HASH = "S16"  # xxh3_128 of a key: no two of 10**9 keys share one by chance (1 in 10**21)


class Writer:
    """Samples, in the order they are written, to a dataset in the directory `out`.

    fields       {name: kind}; kinds are image, bytes, array, int, float, bool, str, json. Default:
                 those of the first sample. `__key__` (bytes or str, unique) is always the first
                 field; where a sample has none it is its number, nine digits.
    classes      names of the labels, when there is an int field `label`
    id           names the dataset: equal streams under equal ids give equal bytes. Default: random
    shard_size   bytes after which a shard is complete
    max_records  records a shard, at most
    overwrite    commit over another dataset in `out`; its shards stay until `gc`

    A sample that does not fit raises SampleError and is not written; the Writer goes on. When a
    shard cannot be written (StorageError), or holds a key twice (SampleError, once the shard is
    full), the Writer is at its end, and nothing was packed.

    Raises OptionError, ExistsError, BusyError, SampleError, StorageError.
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        *,
        fields: Mapping[str, str] | None = None,
        classes: Sequence[str] | None = None,
        id: str | None = None,
        shard_size: int = SHARD_SIZE,
        max_records: int | None = None,
        overwrite: bool = False,
    ) -> None:
        for name, value in (("shard_size", shard_size), ("max_records", max_records)):
            if value is not None and value < 1:
                raise OptionError(f"{name} is {value}; expected 1 or more")
        self.out = packing.local_path(out)
        self.records = 0
        self._schema = None if fields is None else Schema(_with_key(fields))
        self._classes = None if classes is None else tuple(map(str, classes))
        named = None if id is None else hashlib.sha256(id.encode()).digest()[:16]
        self._id = named or secrets.token_bytes(16)
        self._shard_size, self._max_records, self._overwrite = shard_size, max_records, overwrite
        self._token = local.token()
        self._lock: local.RangeLock | None = None
        self._closed = False
        self._shards: list[ShardInfo] = []
        self._blob_bytes = 0
        self._seen = _Seen()
        self._encoder: RecordEncoder | None = None

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
        if self._schema is None:
            self._schema = Schema(infer_fields(sample))
        if KEY not in sample:
            sample = {KEY: b"%09d" % self.records, **sample}
        self._check_label(sample)
        with self._ending_on_error(StorageError):
            encoder = self._encoder or self._open_shard(self._schema)
        pieces = encoder.record(sample)
        self._pieces += pieces
        self._size += len(pieces[1])
        key = sample[KEY]
        self._keys.append(key.encode("utf-8", "surrogateescape") if isinstance(key, str) else key)
        self.records += 1
        with self._ending_on_error(BaseException):
            if self._size >= _WRITE:
                self._flush()
            if (
                self._draft.size + self._size >= self._shard_size
                or encoder.records == self._max_records
            ):
                self._close_shard(encoder)

    def close(self) -> None:
        """Write what is pending, and the manifest: from now on the dataset is there."""
        if self._closed:
            return
        self._begin()
        with self._ending_on_error(BaseException):
            self._commit()
        self._end()

    def _commit(self) -> None:
        assert self._lock is not None
        if self._encoder is not None:
            self._close_shard(self._encoder)
        if self._schema is None:
            raise SampleError(
                f"{printable(self.out)}: no sample was written, and no fields were given"
            )
        made = manifest.make(
            self._shards,
            dataset_id=self._id,
            format="record",
            schema=self._schema,
            classes=self._classes,
            options={
                "source": "writer",
                "shard_size": self._shard_size,
                "max_records": self._max_records,
            },
            library=__version__,
            blob_bytes=self._blob_bytes,
        )
        packing.remove_rejected(self.out)  # of the dataset that is replaced
        local.write_file(self.out, manifest.MANIFEST, made.dump())
        packing.clean(self.out, self._lock.read())

    def abort(self) -> None:
        """Give up: remove what was written, commit nothing."""
        if self._closed or self._lock is None:
            self._closed = True
            return
        try:
            if self._encoder is not None:
                self._draft.discard()
            packing.clean(self.out, self._lock.read())
        finally:
            self._end()

    @contextlib.contextmanager
    def _ending_on_error(self, kind: type[BaseException]) -> Iterator[None]:
        """After such an error nobody knows what is on disk: the Writer gives up."""
        try:
            yield
        except kind:
            with contextlib.suppress(StorageError):
                self.abort()
            raise

    def _end(self) -> None:
        self._closed = True
        if self._lock is not None:
            self._lock.release()

    def _begin(self) -> None:
        if self._closed:
            raise OptionError(f"{printable(self.out)}: this Writer is closed")
        if self._lock is not None:
            return
        self._check_free()
        local.make_directory(self.out)
        ours = b""
        while True:
            try:
                lock = packing.lock(self.out)
            except FileNotFoundError:
                ours = packing.writer_journal(self._id, packing.shards_in(self.out))
                with contextlib.suppress(ExistsError):
                    local.write_file(self.out, JOURNAL, ours, replace=False)
                continue
            try:
                journal = lock.read()
                if journal == ours:
                    break
                # Its lock is free, so its owner is dead. A Writer cannot be resumed; a packing can.
                if not journal.startswith(packing.WRITER_MAGIC) and not packing.is_committed(
                    self.out, journal
                ):
                    raise ExistsError(
                        f"{printable(self.out)}: an unfinished packing is here; finish it, or "
                        "choose another directory"
                    )
                packing.clean(self.out, journal)
            except BaseException:
                lock.release()
                raise
            lock.release()
        self._lock = lock
        with self._ending_on_error(ExistsError):
            self._check_free()  # again: another may have committed here a moment ago

    def _check_free(self) -> None:
        storage = locate(self.out)
        if storage.exists(manifest.SPLITS):
            raise ExistsError(
                f"{printable(self.out)}: splits are packed here; choose another directory"
            )
        if self._overwrite:
            return
        with contextlib.suppress(NotPackedError):
            there = manifest.load(storage)
            raise ExistsError(
                f"{printable(self.out)}: a dataset is here ({there.records:,} records). Choose "
                "another directory, or replace it with overwrite=True"
            )

    def _open_shard(self, schema: Schema) -> RecordEncoder:
        number = len(self._shards)
        encoder = RecordEncoder(schema, self._id, number)
        self._draft = local.Draft(self.out, f"{number:05d}", self._token)
        self._pieces: list[bytes] = [encoder.header()]
        self._size = 0
        self._keys: list[bytes] = []
        self._encoder = encoder
        return encoder

    def _flush(self) -> None:
        self._draft.write(b"".join(self._pieces))
        self._pieces, self._size = [], 0

    def _close_shard(self, encoder: RecordEncoder) -> None:
        if not encoder.records:  # its only sample did not fit
            self._draft.discard()
            self._encoder = None
            return
        self._seen.add(self._keys)
        self._pieces.append(encoder.finish())
        self._flush()
        digest = self._draft.digest()
        name = manifest.shard_name(encoder.number, digest)
        self._draft.commit(name)
        self._encoder = None
        self._blob_bytes += encoder.blob_bytes
        self._shards.append(
            ShardInfo(
                name,
                encoder.number,
                encoder.records,
                self._draft.size,
                digest,
                encoder.index_checksum,
            )
        )

    def _check_label(self, sample: Mapping[str, Any]) -> None:
        label = sample.get("label")
        if self._classes is None or not isinstance(label, (int, np.integer)):
            return  # what is no int, the encoder refuses
        if not 0 <= label < len(self._classes):
            raise SampleError(
                f"sample {printable(str(sample[KEY]))}: label {label} names none of the "
                f"{len(self._classes)} classes"
            )


class _Seen:
    """The hashes of all keys so far, 16 bytes each, in sorted runs that double in length."""

    def __init__(self) -> None:
        self._runs: list[np.ndarray[Any, Any]] = []

    def add(self, keys: Sequence[bytes]) -> None:
        """Raises SampleError, naming the first key that was there before."""
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


def _with_key(fields: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(KEY, "key"), *((name, kind) for name, kind in fields.items() if name != KEY)]
