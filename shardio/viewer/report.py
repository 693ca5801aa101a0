"""The report of a dataset: one file, which a browser shows from disk without asking for anything.

It holds the summary, the histograms, the first records in storage order, how the first batches of
training mix, the first of these batches, and damage. Pictures are inside, so there are few of them.
"""

from __future__ import annotations

import base64
import dataclasses
import os
from dataclasses import dataclass
from typing import Final

from ..errors import ExistsError, ShardioError, printable
from ..storage.local import check_target, write_file
from ..units import show_size
from . import charts
from .pages import static
from .render import render
from .results import Card, Query
from .view import View

_PICTURES: Final = 48  # of each of the two grids
_SIDE: Final = 128  # pixels of a picture: some 5 KB
_PICTURE_BYTES: Final = 32 << 10  # of the largest one: 4 MB in all
_CLASSES: Final = 200  # bars
_LISTED: Final = 200  # damaged records, and rejected files


@dataclass(frozen=True)
class Report:
    """What was written, and where."""

    file: str
    bytes: int
    pictures: int

    def __str__(self) -> str:
        named = printable(self.file, 4096)
        return f"{named}: {show_size(self.bytes)}, with {self.pictures} thumbnails"


def check(file: str, overwrite: bool) -> None:
    """Raise ExistsError or StorageError where a report cannot be written, before it is made."""
    check_target(file)
    if not overwrite and os.path.lexists(file):
        raise ExistsError(f"{printable(file, 4096)} is there already; --overwrite replaces it")


def save(view: View, file: str, *, overwrite: bool = False) -> Report:
    """Write the report of a dataset into a file, whole or not at all.

    Raises ExistsError, StorageError; DamageError where no index can be read.
    """
    check(file, overwrite)
    body, pictures = render_report(view)
    folder, name = os.path.split(os.path.abspath(file))
    write_file(folder, name, body, replace=overwrite)
    return Report(file, len(body), pictures)


def render_report(view: View) -> tuple[bytes, int]:
    """Return the page of the report, and how many pictures are inside."""
    training = Query(order="training", step=0)
    stored, trained = (view.page(one, 0, _PICTURES, wait_s=None) for one in (Query(), training))
    trained = dataclasses.replace(trained, cards=trained.cards[: training.batch_size])
    pictures = _pictures(view, (*stored.cards, *trained.cards))
    found = view.histograms(wait_s=None)
    body = render(
        "report.html",
        css=static("viewer.css").decode(),
        summary=view.summary(),
        found=found,
        bars=charts.class_bars(found.classes, "label", _CLASSES),
        histograms=[charts.histogram(one) for one in found.bins],
        stored=stored,
        trained=trained,
        training=training,
        mixing=charts.mixing(view, training, wait=True),
        picture_of=pictures.get,
        damaged=view.damaged(),
        rejected=view.rejected(),
        listed=_LISTED,
    )
    return body, sum(1 for one in pictures.values() if one)


def _pictures(view: View, cards: tuple[Card, ...]) -> dict[int, str]:
    """Return pictures as addresses that hold them, by number; "" where there is none."""
    found: dict[int, str] = {}
    if view.summary().main_image is None:
        return found
    for card in cards:
        if card.number not in found:
            try:
                data, kind = view.image(card.number, side=_SIDE)
            except (ShardioError, KeyError):
                data = b""
            small = 0 < len(data) <= _PICTURE_BYTES
            text = base64.b64encode(data).decode("ascii")
            found[card.number] = f"data:{kind};base64,{text}" if small else ""
    return found
