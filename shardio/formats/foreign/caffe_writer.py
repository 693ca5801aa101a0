"""Caffe's LMDB: one environment, data.mdb, of images and labels (the only door to py-lmdb).

    key     number of the record, in 8 digits or more | _ | its key
    value   Datum {4: the image's file, 5: label, 7: encoded = true}

as Caffe's `convert_imageset -encoded` writes it. Values are committed some at a time and in the
order of their keys, so the bytes follow from the records and the machine's page size. Source:
https://github.com/BVLC/caffe/blob/master/src/caffe/proto/caffe.proto (Datum),
https://github.com/BVLC/caffe/blob/master/tools/convert_imageset.cpp
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from ...errors import DependencyError, OptionError, SampleError, StorageError, printable
from ...names import KEY
from ..sample import Sample
from .protobuf import write_varint
from .writer import ExportSpec, FormatWriter, image_and_label, misfit

_COMMIT = 64 << 20  # bytes
_MAX_KEY = 511  # LMDB's own


class Caffe(FormatWriter):
    """An LMDB of Caffe that is being written."""

    own_files = re.compile(r"data\.mdb")

    def __init__(self, spec: ExportSpec) -> None:
        super().__init__(spec)
        self._image, self._label = image_and_label(spec, "lmdb-caffe", ("int",))
        self.exported_names = {self._image: "data"}
        if self._label is not None:
            self.exported_names[self._label] = "label"
        last = max(spec.manifest.records - 1, 0)
        self._digits = max(8, len(str(last)))  # else keys lose their order
        self._pending: list[tuple[bytes, bytes]] = []
        self._bytes = 0
        self._folder = spec.folder
        try:
            self._lmdb = import_module("lmdb")
        except ImportError as error:
            raise DependencyError(
                f"export to lmdb-caffe needs the package lmdb, which does not import ({error}): "
                "pip install lmdb"
            ) from None
        # Address space, not a size on the disk; it grows where this is not enough.
        self._room = 2 * spec.manifest.size + (16 << 10) * spec.manifest.records + (64 << 20)
        with self._explained():
            self._environment = self._lmdb.open(
                spec.folder, map_size=self._room >> 20 << 20, lock=False, sync=False, mode=0o666
            )

    def add(self, number: int, sample: Sample) -> bool:
        """Write a record; False if it has nothing to write. Raises SampleError, RestartExport."""
        key = b"%0*d_%b" % (self._digits, number, sample[KEY])
        if len(key) > _MAX_KEY:
            raise OptionError(
                f"the key {printable(sample[KEY])} is {len(sample[KEY]):,} bytes long; LMDB has "
                f"room for {_MAX_KEY - self._digits - 1}; `--keys number` names the records by "
                "their numbers"
            )
        image = sample[self._image]
        if image is None:
            raise misfit(sample, self._image, "it is None, and a Datum has an image")
        value = b"".join(
            (b"\x22", write_varint(len(image)), image, self._datum_label(sample), b"\x38\1")
        )
        if len(value) >> 32:
            raise SampleError(f"record {printable(sample[KEY])}: LMDB has room for 4 GiB")
        self._pending.append((key, value))
        self._bytes += len(value)
        if self._bytes >= _COMMIT:
            self._commit()
        return True

    def finish(self) -> None:
        """Complete all files, and flush them."""
        self._commit()
        with self._explained():
            self._environment.sync(True)
        self.close()

    def close(self) -> None:
        """Give up what is open."""
        self._environment.close()

    def _datum_label(self, sample: Sample) -> bytes:
        label = None if self._label is None else sample[self._label]
        if label is None:
            return b""
        if not -(1 << 31) <= label < 1 << 31:
            raise misfit(sample, str(self._label), f"{label} does not fit int32, as labels do")
        return b"\x28" + write_varint(label)

    def _commit(self) -> None:
        while True:
            try:
                with self._explained(), self._environment.begin(write=True) as transaction:
                    for key, value in self._pending:
                        transaction.put(key, value, append=True)
                break
            except self._lmdb.MapFullError:
                self._room *= 2
                self._environment.set_mapsize(self._room)
        self._pending, self._bytes = [], 0

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn LMDB's errors into ours, but for the one that `_commit` mends."""
        try:
            yield
        except self._lmdb.MapFullError:
            raise
        except self._lmdb.Error as error:
            where = printable(self._folder, 4096)
            raise StorageError(f"{where}: LMDB cannot write: {error}") from None
