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
from ...dataset.reader import Reader
from ...dataset.sequence import ShardSequence
from ...errors import DamageError, SourceChangedError, SourceError, StorageError, printable
from ...formats import GROUPED, manifest
from ...formats.foreign.arrow import splits_in
from ...formats.sample import Sample
from ...names import KEY, file_name
from ...storage.options import with_root
from ..index import in_memory
from .base import (
    Ints,
    Listing,
    Listings,
    Plain,
    Read,
    Rejected,
    Source,
    SourceRequest,
    check_key,
    renamed,
)
from .field_names import our_names


class Records(Source):
    """The records of a dataset, under our names of its fields."""

    def __init__(
        self, records: ShardSequence, theirs: Mapping[str, str], numbers: Ints | None = None
    ) -> None:
        """numbers: of the records, by place; None: all of them."""
        self._records, self._theirs = records, theirs
        self._numbers = np.arange(len(records)) if numbers is None else numbers

    def describe(self) -> Plain:
        """Return names of fields, and what tells the dataset from any other."""
        return {"theirs": dict(self._theirs), "id": _id(self._records.manifest)}

    def piece(self, places: Ints) -> Plain:
        """Return the numbers of the records."""
        return {"numbers": self._numbers[places]}

    def keys(self, places: Ints) -> list[bytes]:
        """Return the keys of records, which a listing names by their numbers."""
        return self._records.stored_keys(self._numbers[places].tolist())

    @contextlib.contextmanager
    def open(self) -> Iterator[Read]:
        def read(place: int) -> Sample:
            try:
                found = self._records[int(self._numbers[place])]
            except (DamageError, StorageError) as error:
                raise Rejected(str(error).splitlines()[0]) from None
            if (wrong := check_key(found[KEY])) is not None:
                raise Rejected(wrong)
            return {KEY: found[KEY]} | {
                name: found[theirs] for name, theirs in self._theirs.items()
            }

        yield read

    def will_need(self, place: int) -> None:
        """Ask for a record, where each read is a round trip."""
        with contextlib.suppress(DamageError, StorageError):  # reading it says so
            self._records.will_need(int(self._numbers[place]))


def list_records(request: SourceRequest) -> Listings:
    """List the records of a packed or indexed directory, by split."""
    options = with_root(request.storage, request.root)
    return {
        name: listing_of(sequence.stored_in(index, options), request)
        for name, index in manifest.datasets_in(request.location).items()
    }


def split_names(request: SourceRequest) -> list[str]:
    """Return the splits that `list_records` will have. Raises OptionError."""
    request.refuse_splits()
    return list(manifest.datasets_in(request.location))


def reopen(request: SourceRequest, split: str, described: Plain, piece: Plain) -> Records:
    """Open some records of a dataset. Raises SourceChangedError where it is another."""
    index = manifest.datasets_in(request.location)[split]
    records = sequence.stored_in(index, with_root(request.storage, request.root))
    if _id(records.manifest) != described["id"]:
        raise SourceChangedError(
            f"{request.show(split)}: changed since the packing was planned: it is another dataset. "
            "Run it again with --restart to plan anew"
        )
    return Records(records, described["theirs"], piece["numbers"])


def foreign_names(request: SourceRequest) -> list[str]:
    """Return the splits of files of another format: Arrow's may say which folders are some."""
    request.refuse_splits()
    if request.kind != "arrow" or os.path.isfile(request.path):
        return [""]
    return splits_in(request.location) or [""]


def list_foreign(request: SourceRequest) -> Listings:
    """List the records in files of another format, by an index in memory: they are read twice."""
    found = {}
    for name in foreign_names(request):
        path = os.path.join(request.path, os.fsencode(file_name(name))) if name else request.path
        found[name] = _list_files(replace(request, path=path))
    return found


def _list_files(request: SourceRequest) -> Listing:
    """List the records in the files of one split."""
    assert request.kind is not None
    request.refuse_root(f"files of {request.kind}")
    dataset, index, data, left_out = in_memory(
        os.fsdecode(request.path),
        storage=request.storage,
        format=request.kind,
        fields=request.fields,
        jobs=request.jobs,
        progress=request.progress,
    )
    records = sequence.stored_of(Reader(index, dataset, root=data))
    listing = listing_of(records, replace(request, fields={}))
    if left_out:
        listing.notes.append(
            "fields whose names no field can have were left out: "
            + ", ".join(repr(printable(name, 40)) for name in left_out[:10])
            + "; --fields NAME=THEIRS gives one"
        )
    return replace(listing, options={**listing.options, **renamed(dataset.options["fields"])})


def listing_of(records: ShardSequence, request: SourceRequest) -> Listing:
    """List the records of one dataset, in storage order; their keys here are their numbers."""
    dataset = records.manifest
    kinds = dict(dataset.schema.fields[1:])
    theirs = {name: source for source, name in our_names(request.fields, kinds).items()}
    count, classes = dataset.records, dataset.classes or ()
    try:
        sizes = records.sizes()
    except (DamageError, StorageError) as error:
        raise SourceError(str(error)) from None
    listing = Listing(
        root=os.path.abspath(request.path),
        keys=[b"%d" % number for number in range(count)],
        sizes=sizes,
        mtimes=np.zeros(count, np.int64),
        source=Records(records, theirs),
        fields=tuple((name, kinds[source]) for name, source in theirs.items()),
        classes=_classes(dataset, theirs),
        absent=tuple(
            classes[i] for i in dataset.options.get("absent", ()) if 0 <= i < len(classes)
        ),
        options={"from": dataset.format, "from_id": _id(dataset), **renamed(theirs)},
        shuffled=dataset.format not in GROUPED,
    )
    listing.check_some(request.shown, "records")
    if request.where is None:
        return listing

    def column(name: str) -> Any:
        return records.columns(theirs.get(name, name))

    return listing.take(request.select(column, count, listing.classes))


def _id(dataset: manifest.Manifest) -> str:
    """Return 32 hex digits that tell a dataset from any other."""
    return hashlib.sha256(dataset.dump()).hexdigest()[:32]


def _classes(dataset: manifest.Manifest, theirs: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return names of classes, if `label` is the field they are of; or, as in COCO's, none is."""
    of_no_field = "label" not in theirs and "label" not in dict(dataset.schema.fields)
    return dataset.classes if of_no_field or theirs.get("label") == "label" else None
