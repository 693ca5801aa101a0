"""Sources of packing, as tests ask them: their kind, their listings, their records; and packing."""

import os
from pathlib import Path
from typing import Any

from shardio import pack
from shardio.packing import sources
from shardio.packing.packed import Packed
from shardio.packing.sources.base import Listing, Problem, SourceRequest
from support.packing import grouped


def request(path: Path | str, **options: Any) -> SourceRequest:
    """The request for a source, with its kind. options: those of SourceRequest."""
    return sources.detect_kind(SourceRequest(os.fsencode(path), **options))


def kind_of(path: Path | str, **options: Any) -> str | None:
    return request(path, **options).kind


def listings(path: Path | str, expected: str | None = None, **options: Any) -> dict[str, Listing]:
    """The listing of each split. expected: the kind that the source must be."""
    asked = request(path, **options)
    assert expected in (None, asked.kind)
    found = sources.list_records(asked)
    assert list(found) == sources.split_names(asked)
    return found


def listing(path: Path | str, expected: str | None = None, **options: Any) -> Listing:
    """The listing of a source without splits."""
    found = listings(path, expected, **options)
    assert list(found) == [""]
    return found[""]


def reasons(found: Listing) -> dict[bytes, str]:
    return dict(found.problems)


def problems(path: Path | str) -> list[Problem]:
    return listing(path).problems


def samples(found: Listing) -> list[dict[str, Any]]:
    """The records of a listing, as they would be packed."""
    numbers = range(len(found.keys)) if found.places is None else found.places.tolist()
    with found.source.open() as read:
        read_samples = [read(number) for number in numbers]
    assert [one["__key__"] for one in read_samples] == found.keys
    return read_samples


def records(found: Listing) -> dict[bytes, dict[str, Any]]:
    """These records by their keys."""
    return {one.pop("__key__"): one for one in samples(found)}


def pack_all(source: Path | str, out: Path, **options: Any) -> list[Packed]:
    """Pack with options that need no group, in this process."""
    return pack(source, out, **grouped({"jobs": 1} | options))


def pack_one(source: Path | str, out: Path, **options: Any) -> Packed:
    """Pack what has no splits."""
    [done] = pack_all(source, out, **options)
    return done
