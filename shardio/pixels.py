"""Raw pixels straight into a batch: no sample, no item and no image of their own in between.

Of a dataset that was packed by `pack --encode raw`, the pixels of a record are its last bytes, and
its small fields stand in the index as well. So a batch of arrays (`decode="numpy"`, no transform)
needs of each record no more than to be checked and copied. What does not fit is left to the
ordinary way, which decodes each record: fields that are not in the index, values that are None, an
image of another size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from . import image
from .decoding import IMAGE, Decoder
from .fetch import Fetch, Rows
from .formats.base import Shard
from .formats.record import RecordShard
from .manifest import Manifest
from .sample import BLOBS

_DTYPES = {"int": np.int64, "float": np.float64, "bool": np.bool_}

Array = np.ndarray[Any, Any]


class Part(NamedTuple):
    """Some rows of a batch, of one shard."""

    shard: Shard
    records: list[int]
    held: list[bytes | None] | None


class RawPixels(NamedTuple):
    """What a batch of raw pixels consists of."""

    height: int
    width: int
    fields: tuple[str, ...]  # of a batch, IMAGE among them
    scalars: dict[str, type[Any]]  # the others: the dtype of each in a batch

    def parts(self, fetch: Fetch, rows: Rows) -> list[Part]:
        return list(map(Part._make, fetch.located(rows.runs)))

    def columns(self, parts: Sequence[Part]) -> dict[str, Array] | None:
        """The other fields of these rows, (B,) each.

        None when an index does not have them all, or its records are too short for the pixels:
        memory is taken for these next, and a manifest may say anything.
        """
        found: dict[str, Array] = {}
        first = parts[0]
        if first.shard.sizes[first.records[0]] < 3 * self.height * self.width:
            return None
        for name, dtype in self.scalars.items():
            pieces = []
            for shard, records, _ in parts:
                column = shard.columns.get(name)
                # Unsigned ones of 64 bits may be too large for a tensor.
                if column is None or column.dtype == np.uint64:
                    return None
                piece = column[records]
                if np.ma.is_masked(piece):
                    return None
                pieces.append(np.asarray(piece))
            found[name] = np.concatenate(pieces, dtype=dtype, casting="unsafe")
        return found

    def read(self, parts: Sequence[Part], out: Array) -> bool:
        """Write the pixels of these rows to `out`, (B, H, W, 3) uint8, contiguous.

        False when an image is not as the dataset says. Raises DamageError, StorageError.
        """
        begin = image.ppm_header(self.height, self.width)
        view, at = out.reshape(-1).data, 0
        for shard, records, held in parts:
            assert isinstance(shard, RecordShard)
            stop = at + len(records) * 3 * self.height * self.width
            if not shard.gather(records, held, begin, view[at:stop]):
                return False
            at = stop
        return True


def raw_pixels(made: Manifest, decoder: Decoder) -> RawPixels | None:
    """How to read batches of a dataset at once, when they can be read so."""
    fields, kinds = decoder.fields, dict(made.schema.fields)
    if (
        made.format != "record"
        or made.options.get("encode") != "raw"
        or not decoder.only_arrays
        or fields is None
        or fields.count(IMAGE) != 1
        or [name for name, kind in kinds.items() if kind in BLOBS] != [IMAGE]
        or any(name != IMAGE and kinds[name] not in _DTYPES for name in fields)
    ):
        return None
    match made.options.get("pixels"):
        case [int(height), int(width)] if min(height, width) > 0:
            scalars = {name: _DTYPES[kinds[name]] for name in fields if name != IMAGE}
            return RawPixels(height, width, fields, scalars)
    return None
