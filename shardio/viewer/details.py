"""What a record's page shows of its fields: values as text, boxes, masks, tiles."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import DecodeError, printable
from ..formats.sample import Sample, Schema
from ..images import jpeg_tiles
from ..images.filetype import image_type
from ..names import KEY
from .pictures import SHOWABLE, Header, as_file, read_header
from .results import Box, FieldValue, Tiles

_LONGEST = 20_000  # characters of a value that are shown
_BOXES = 1_000  # of a field that are shown
_MASKS = ("P", "L", "1", "I", "I;16", "I;16B")  # modes of images that may hold class numbers


def describe_fields(
    sample: Sample, schema: Schema, main: Header | None, max_pixels: int | None
) -> tuple[FieldValue, ...]:
    """Describe all fields but the key. main: the header of the main image."""
    found = []
    for name, kind in schema.fields:
        if name == KEY:
            continue
        value = sample[name]
        show, header = "", None
        file = _file(value, kind)
        if file is not None:
            try:
                header = read_header(file, max_pixels)
                show = str(header)
            except DecodeError as error:
                show = str(error)
        if not show or kind == "array":
            show = show_value(value)
        same = header and main and (header.width, header.height) == (main.width, main.height)
        mask = bool(header and same and name != schema.main_image and header.mode in _MASKS)
        image = header is not None and (mask or kind != "array" or value.ndim == 3)
        found.append(FieldValue(printable(name), kind, show, _size(value), image, mask))
    return tuple(found)


def _file(value: Any, kind: str) -> bytes | None:
    """Return a value as the bytes of an image file, if it may be one."""
    if kind not in SHOWABLE or (kind == "bytes" and not image_type(value or b"")):
        return None
    return as_file(value)


def show_value(value: Any) -> str:
    """Write a value of any field as text; long ones are cut."""
    if value is None:
        return "null"
    if isinstance(value, bytes):
        try:
            text = value.decode("utf-8")
        except UnicodeDecodeError:
            text = ""
        if not text or "\0" in text:
            return f"{value[:32].hex(' ')}{' ...' if len(value) > 32 else ''}"
        value = text
    if isinstance(value, str):
        return printable_lines(value)
    if isinstance(value, np.ndarray):
        text = np.array2string(value, threshold=100, edgeitems=3)
        return printable_lines(f"{value.shape} of {value.dtype}\n{text}")
    if isinstance(value, Mapping | Sequence):
        return printable_lines(_as_text(value))
    return repr(value)


def _as_text(value: Any) -> str:
    """Write a nested value as JSON, and little more of it than is shown."""
    encoder = json.JSONEncoder(default=_as_json, ensure_ascii=False, indent=1)
    parts, left = [], _LONGEST
    for part in encoder.iterencode(value):
        parts.append(part)
        if (left := left - len(part)) < 0:
            break
    return "".join(parts)


def printable_lines(text: str) -> str:
    """Return text whose lines can all be shown, cut where it is long."""
    cut = text[:_LONGEST]
    shown = "\n".join(printable(line, _LONGEST) for line in cut.split("\n"))
    return shown + ("..." if len(text) > _LONGEST else "")


def _as_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return f"base64:{base64.b64encode(value).decode()}"
    if isinstance(value, np.ndarray):
        return value.tolist()
    return str(value)


def _size(value: Any) -> int | None:
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass"))
    return value.nbytes if isinstance(value, np.ndarray) else None


def find_boxes(
    sample: Sample, schema: Schema, main: Header | None, classes: Sequence[str] | None
) -> tuple[Box, ...]:
    """Return the boxes of a record: COCO's annotations, or rows of a field with box in its name.

    At most the first 1,000 of each field. All are [x, y, width, height] in pixels of the original
    image. If packing made the image smaller, its original size is in the fields `width` and
    `height`, and boxes are scaled.
    """
    found: list[Box] = []
    x_scale, y_scale = _scales(sample, main)
    for name, kind in schema.fields:
        value = sample[name]
        if kind not in ("json", "array") or value is None:
            continue
        if isinstance(value, np.ndarray):
            value = value[:_BOXES].tolist() if value.ndim == 2 else []
        if not isinstance(value, list):
            continue
        for one in value[:_BOXES]:
            label, numbers = "", one
            if isinstance(one, dict):
                numbers, label = one.get("bbox"), _label(one, classes)
            elif "box" not in name.lower():
                break
            if box := _box(numbers, x_scale, y_scale, label):
                found.append(box)
    return tuple(found)


def _scales(sample: Sample, main: Header | None) -> tuple[float, float]:
    width, height = sample.get("width"), sample.get("height")
    if main is None or not (type(width) is int and type(height) is int and width and height):
        return 1.0, 1.0
    return main.width / width, main.height / height


def _label(one: Mapping[str, Any], classes: Sequence[str] | None) -> str:
    label = one.get("label")
    if type(label) is int and classes is not None and 0 <= label < len(classes):
        return printable(classes[label])
    shown = label if label is not None else one.get("category_id")
    return "" if shown is None else printable(str(shown))


def _box(numbers: Any, x_scale: float, y_scale: float, label: str) -> Box | None:
    if not isinstance(numbers, list | tuple) or len(numbers) < 4:
        return None
    try:
        x, y, width, height = (float(number) for number in numbers[:4])
    except (TypeError, ValueError, OverflowError):
        return None
    return Box(x * x_scale, y * y_scale, width * x_scale, height * y_scale, label)


def find_tiles(data: bytes | None) -> Tiles | None:
    """Return the grid of tiles of a JPEG; None if it has none."""
    grid = None if data is None else jpeg_tiles.tiles(data)
    if grid is None:
        return None
    return Tiles(
        grid.width, grid.height, grid.columns, grid.rows, grid.tile_width, grid.tile_height
    )
