"""One shard of a plan, cut out with all that building it needs on another machine.

A piece has the records of its shard and what the source knows of them, and no more: the machine
that builds it lists nothing, and needs no journal. A shard for a directory is built there, since
all machines see it; one for an object store in a temporary directory, from which it is uploaded.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..storage import local
from ..storage.remote import RemoteLocation
from . import sources
from .build_shard import Work, build_or_keep
from .built import Built
from .journal import Guarded
from .plan import Plan, Rows
from .sources.base import Plain, Source, SourceRequest
from .uploads import Uploads

BuildPiece = Callable[[Any, Callable[[int], None]], Built]


class Piece(NamedTuple):
    """One shard."""

    number: int
    rows: Rows  # without the source
    source: Plain  # the source's own piece


class Pieces(Sequence[Piece]):
    """Shards of a plan; each is cut out when it is asked for."""

    def __init__(self, plan: Plan, numbers: range) -> None:
        self._plan, self._numbers = plan, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, at: Any) -> Any:
        rows = self._plan.rows(self._numbers[at])
        piece = _source(rows).piece(np.array(rows.places, np.int64))
        rows = rows._replace(places=range(len(rows.keys)), source=None)
        return Piece(self._numbers[at], rows, piece)


def cut(
    work: Work, numbers: range, request: SourceRequest, target: RemoteLocation | None
) -> tuple[BuildPiece, Sequence[Piece]]:
    """Return what builds shards on any machine, and the pieces that are given to it.

    target: the object store that is packed into.
    """
    described = _source(work.plan.rows(numbers[0])).describe() if numbers else {}
    request = replace(request, files=None, progress=None, tell=None)
    plan = replace(work.plan, rows=_no_rows, problems=(), differences=None)
    shipped = replace(work, plan=plan)
    build = functools.partial(_build_and_upload, target) if target else build_piece
    return functools.partial(build, shipped, request, described), Pieces(work.plan, numbers)


def build_piece(
    work: Work, request: SourceRequest, described: Plain, piece: Piece, add: Callable[[int], None]
) -> Built:
    """Build a shard, or keep it, as `build_or_keep` does. described: the source as a whole."""

    def rows(number: int) -> Rows:
        options = work.plan.options
        source = sources.reopen(request, options.source, options.split, described, piece.source)
        if work.plan.ahead is not None:
            source = Guarded(source, work.directory, number)
        return piece.rows._replace(source=source)

    # A name of its own: a machine that was thought to be lost may still write under another.
    token = f"{work.token}-{local.token()}"
    here = replace(work, plan=replace(work.plan, rows=rows), token=token)
    return build_or_keep(here, piece.number, add)


def _build_and_upload(
    target: RemoteLocation,
    work: Work,
    request: SourceRequest,
    described: Plain,
    piece: Piece,
    add: Callable[[int], None],
) -> Built:
    with tempfile.TemporaryDirectory(prefix="shardio-") as folder:
        there = replace(work, directory=folder, finished={})
        built = build_piece(there, request, described, piece, add)
        with Uploads(target, folder, work.plan.dataset_id) as uploads:
            uploads.add(built)
            uploads.finish()
    return replace(built, uploaded=built.info is not None)


def _source(rows: Rows) -> Source:
    assert rows.source is not None
    return rows.source


def _no_rows(number: int) -> Rows:
    raise AssertionError("a plan that was sent elsewhere has no records")
