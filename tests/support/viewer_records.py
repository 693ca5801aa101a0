"""Records that a view shows, with columns of every kind, and questions to it."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shardio import Writer
from shardio.viewer.results import Page, Query, Record
from shardio.viewer.view import View
from support.small_datasets import FIELDS, jpeg, make

COUNTS = [30, 0, 41, 7]


N = sum(COUNTS)


SCALARS = (
    *FIELDS,
    ("width", "int"),
    ("score", "float"),
    ("rare", "int"),
    ("bytes", "bytes"),
    ("flag", "bool"),
)


def scored(number: int) -> dict[str, Any]:
    """A sample with columns: of some records without a value."""
    return {
        "__key__": b"k/%06d.jpg" % number,
        "image": jpeg(number % 8),
        "label": number * 7 % 3,
        "width": number * 31 % 50 - 10,
        "score": float("nan")
        if number % 11 == 5
        else None
        if number % 11 == 4
        else 1 / (number + 1),
        "rare": (number % 2 - 1) * (1 << 40) if number % 5 else None,
        "bytes": b"x" * (number * number % 997),
        "flag": number % 3 == 1,
    }


def numbers(page: Page) -> list[int]:
    return [card.number for card in page.cards]


def ask(view: View, start: int = 0, count: int = 1000, **query: Any) -> Page:
    return view.page(Query(**query), start, count, wait_s=None, search_s=60.0)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def write(folder: Path, fields: dict[str, str], *samples: dict[str, Any], **options: Any) -> Path:
    with Writer(folder, fields=fields, **options) as writer:
        for number, sample in enumerate(samples):
            writer.write({"__key__": f"{number}"} | dict.fromkeys(fields) | sample)
    return folder


def fields(record: Record) -> dict[str, str]:
    return {one.name: one.show for one in record.fields}


def pixels(data: bytes) -> Any:
    return np.array(Image.open(io.BytesIO(data)))


def make_scored(folder: Path) -> Path:
    """Pack records with columns of every kind."""
    return make(folder, COUNTS, fields=SCALARS, sample=scored)
