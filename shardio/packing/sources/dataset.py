"""Any dataset that can be read, to be packed anew: shardio's own, and those indexed in place."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...dataset import sequence
from ...dataset.decode import Decoder
from ...dataset.reader import Reader
from ...dataset.sequence import ShardSequence
from ...errors import DamageError, OptionError, SourceError, StorageError, printable, there_are
from ...formats import manifest
from ...formats.sample import Sample
from ...names import KEY
from ..index import in_memory
from .base import Listing, Listings, Read, Rejected, Source, SourceRequest, check_key, renamed
from .field_names import check_known_fields

# Of these, records in another order cost a piece of the file each.
_IN_ORDER = frozenset(("parquet",))


class Records(Source):
    """The records of a dataset, under our names of its fields."""

    def __init__(self, records: ShardSequence, theirs: Mapping[str, str]) -> None:
        self._records, self._theirs = records, theirs

    @contextlib.contextmanager
    def open(self) -> Iterator[Read]:
        def read(place: int) -> Sample:
            try:
                found = self._records[place]
            except (DamageError, StorageError) as error:
                raise Rejected(str(error).splitlines()[0]) from None
            if (wrong := check_key(found[KEY])) is not None:
                raise Rejected(wrong)
            return {KEY: found[KEY]} | {
                name: found[theirs] for name, theirs in self._theirs.items()
            }

        yield read


def split_names(request: SourceRequest) -> list[str]:
    """Return the splits of a packed directory, or [""]. Raises NotPackedError, OptionError."""
    if request.splits is not None:
        raise OptionError("--splits and --no-splits are for folders of images")
    return list(manifest.datasets(os.fsdecode(request.path)))


def list_records(request: SourceRequest) -> Listings:
    """List the records of a packed or indexed directory, by split."""
    return {
        name: listing_of(sequence.stored(folder, root=request.root), request)
        for name, folder in manifest.datasets(os.fsdecode(request.path)).items()
    }


def list_foreign(request: SourceRequest) -> Listings:
    """List the records in files of another format, by an index in memory: they are read twice."""
    assert request.kind is not None
    if request.root is not None:
        raise OptionError(
            f"--root: for listings, COCO files and indexes; files of {request.kind} are where SRC "
            "is"
        )
    dataset, index, data, left_out = in_memory(
        os.fsdecode(request.path),
        format=request.kind,
        fields=request.fields,
        jobs=request.jobs,
        progress=request.progress,
    )
    decoder = Decoder(dataset.schema, fields=None, decode=None, transform=None)
    rows = range(dataset.records)
    records = ShardSequence(Reader(index, dataset, root=data), decoder, rows, text=False)
    listing = listing_of(records, replace(request, fields={}))
    if left_out:
        listing.notes.append(
            "fields whose names no field can have were left out: "
            + ", ".join(repr(printable(name, 40)) for name in left_out[:10])
            + "; --fields NAME=THEIRS gives one"
        )
    return {"": replace(listing, options={**listing.options, **renamed(dataset.options["fields"])})}


def listing_of(records: ShardSequence, request: SourceRequest) -> Listing:
    """List the records of one dataset, in storage order; their keys here are their numbers."""
    dataset = records.manifest
    kinds = dict(dataset.schema.fields[1:])
    theirs = _mapped(kinds, request)
    count = dataset.records
    listing = Listing(
        root=os.path.abspath(request.path),
        keys=[b"%d" % number for number in range(count)],
        sizes=_sizes(records),
        mtimes=np.zeros(count, np.int64),
        source=Records(records, theirs),
        fields=tuple((name, kinds[source]) for name, source in theirs.items()),
        classes=_classes(dataset, theirs),
        absent=_absent(dataset),
        options={
            "from": dataset.format,
            "from_id": hashlib.sha256(dataset.dump()).hexdigest()[:32],
            **renamed(theirs),
        },
        shuffled=dataset.format not in _IN_ORDER,
    )
    listing.check_some(request.shown, "records")
    if request.where is None:
        return listing

    def column(name: str) -> Any:
        if name == KEY:
            return records.columns(KEY)
        if name not in theirs:
            raise OptionError(
                f"where: no field is called {printable(name)!r}; {there_are(theirs, name)}"
            )
        return records.columns(theirs[name])

    return listing.take(request.select(column, count, listing.classes))


def _mapped(kinds: Mapping[str, str], request: SourceRequest) -> dict[str, str]:
    """Return our names of all fields, and theirs, in the order of theirs. Raises OptionError."""
    check_known_fields(request.fields, kinds)
    ours = {source: name for name, source in request.fields.items()}
    named = [ours.get(source, source) for source in kinds]
    twice = next((name for name in named if named.count(name) > 1), None)
    if twice is not None:
        raise OptionError(
            f"--fields: two fields would be called {printable(twice)!r}; name both of them"
        )
    return dict(zip(named, kinds, strict=True))


def _classes(dataset: manifest.Manifest, theirs: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return names of classes, if `label` is the field they are of; or, as in COCO's, none is."""
    of_no_field = "label" not in theirs and "label" not in dict(dataset.schema.fields)
    return dataset.classes if of_no_field or theirs.get("label") == "label" else None


def _sizes(records: ShardSequence) -> np.ndarray[Any, np.dtype[np.int64]]:
    try:
        return records.sizes()
    except (DamageError, StorageError) as error:
        raise SourceError(str(error)) from None


def _absent(dataset: manifest.Manifest) -> tuple[str, ...]:
    classes = dataset.classes or ()
    return tuple(classes[i] for i in dataset.options.get("absent", ()) if 0 <= i < len(classes))
