"""Boxes of Pascal VOC's XML and of YOLO's texts, as COCO's annotations have them; opens nothing.

    parse_voc(xml)             ->  Boxes(486, 500, [{"bbox": [173, 100, 176, 251],
                                                     "category": "person", "difficult": 0}])
    yolo_boxes(parse_yolo(txt), 640, 480)  ->  [{"bbox": [x, y, width, height], "label": 0}]
    yolo_names(yaml, "data.yaml")          ->  ("person", "bicycle")

A bbox is [x, y, width, height] in pixels; 0, 0 is the upper left corner of the image. VOC counts
pixels from 1, and the last one belongs to the box: x is xmin - 1, width is xmax - xmin + 1. Source:
http://host.robots.ox.ac.uk/pascal/VOC/voc2012/htmldoc/devkit_doc.html (the upper left pixel has the
coordinates 1, 1), and VOCevaldet.m of that kit, which computes areas so. Source of YOLO's lines:
https://docs.ultralytics.com/datasets/detect/, and segment/ beside it.

All functions raise ValueError, which names the line, what was expected, and what was found.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from xml.parsers import expat

from ...errors import DependencyError, printable

MAX_BYTES = 4 << 20  # size of a file: 10,000 objects of VOC, for which a record has room
_MAX_DEEP = 32  # nested elements; VOC has 4
_ATTRIBUTES = ("pose", "truncated", "difficult", "occluded")  # what VOC says of an object
_MAX_NUMBER = 1 << 31  # pixels of a side; classes
_SLACK = 0.01  # error of normalised numbers, which tools round


class Boxes(NamedTuple):
    """The objects in one image, in the file's order, as annotations."""

    width: int | None  # size of the image; None where the file does not say it
    height: int | None
    objects: list[dict[str, Any]]


class AnnotatedBox(NamedTuple):
    """A line of YOLO's. Numbers are parts of the width and height of the image."""

    label: int  # number of the class, from 0
    box: tuple[float, float, float, float]  # middle x, middle y, width, height
    polygon: tuple[float, ...] = ()  # x, y, x, y, ...
    score: float | None = None  # confidence of a prediction


# --- Pascal VOC -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Element:
    tag: str
    line: int
    text: str = ""
    inside: list[_Element] = field(default_factory=list)

    def named(self, tag: str) -> _Element | None:
        """Return the one element of this name directly in it; None where there is none."""
        found = [one for one in self.inside if one.tag == tag]
        if len(found) > 1:
            raise _fault(found[1].line, f"one {tag} in {self.tag}", "a second one")
        return found[0] if found else None

    def plain(self, tag: str) -> str:
        """Return the text of the element of this name; empty where it has none."""
        found = self.named(tag)
        return "" if found is None else found.text.strip()


def parse_voc(data: bytes) -> Boxes:
    """Read the annotation of one image: its size, and its objects.

    Of an object are kept: `bbox`, as ints where the file has ints; `category`, its name; and of
    pose, truncated, difficult and occluded those that are there. Boxes of its parts are not its
    own, and one that has none has no `bbox`.
    """
    root = _parse(data)
    if root.tag != "annotation":
        raise _fault(root.line, "annotation, as Pascal VOC has it", root.tag)
    size = root.named("size") or _Element("size", root.line)
    return Boxes(
        _pixels(size, "width"),
        _pixels(size, "height"),
        [_object(one) for one in root.inside if one.tag == "object"],
    )


def _object(element: _Element) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if (box := element.named("bndbox")) is not None:
        left, top, right, bottom = (_corner(box, tag) for tag in ("xmin", "ymin", "xmax", "ymax"))
        if right < left or bottom < top:
            ends = f"{left} to {right}, {top} to {bottom}"
            raise _fault(box.line, "a box that ends behind its begin", ends)
        found["bbox"] = [left - 1, top - 1, right - left + 1, bottom - top + 1]
    found["category"] = element.plain("name")
    if not found["category"]:
        raise _fault(element.line, "the name of the object", "none")
    for tag in _ATTRIBUTES:
        if text := element.plain(tag):
            number = None if tag == "pose" else _number(text)
            found[tag] = text if number is None else number
    return found


def _corner(box: _Element, tag: str) -> int | float:
    text = box.plain(tag)
    number = _number(text)
    if number is None:
        raise _fault(box.line, f"a number as {tag} of bndbox", text)
    return number


def _pixels(size: _Element, tag: str) -> int | None:
    """Return width or height of the image; tools that do not know it write 0."""
    text = size.plain(tag)
    number = _number(text) if text else 0
    if number is None or not 0 <= number < _MAX_NUMBER or number != int(number):
        raise _fault(size.line, f"a whole number as {tag}", text)
    return int(number) or None


def _parse(data: bytes) -> _Element:
    """Return the outermost element. Nothing outside the file is read, and no entity is known."""
    _check_size(data)
    parser = expat.ParserCreate()
    parser.buffer_text = True
    top = _Element("", 0)
    stack = [top]

    def start(tag: str, attributes: object) -> None:
        if len(stack) > _MAX_DEEP:
            raise _fault(parser.CurrentLineNumber, f"at most {_MAX_DEEP} elements, nested", "more")
        element = _Element(tag, parser.CurrentLineNumber)
        stack[-1].inside.append(element)
        stack.append(element)

    def end(tag: str) -> None:
        stack.pop()

    def text(some: str) -> None:
        stack[-1].text += some

    def refuse(*declared: object) -> None:  # without one, there are no entities that grow
        raise _fault(parser.CurrentLineNumber, "XML without a DOCTYPE", "one; remove it")

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = text
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        raise _fault(error.lineno, "XML", expat.ErrorString(error.code)) from None
    except _Fault:
        raise
    except (LookupError, ValueError) as error:  # an encoding that nobody knows, or with more bytes
        raise _fault(1, "XML", str(error)) from None
    return top.inside[0]


# --- YOLO -----------------------------------------------------------------------------------------


def parse_yolo(data: bytes) -> list[AnnotatedBox]:
    """Read the objects of one image, a line each: a class and its box, or its polygon.

    5 numbers are a class and a box, 6 a score, too, and an odd number from 7 on a class and a
    polygon, whose bounds are the box. Keypoints of poses look like polygons, and are read so.
    """
    rows = []
    for line, text in _lines(data):
        numbers = [_number(one) for one in text.split()]
        values = [float(one) for one in numbers if one is not None]
        count = len(numbers)
        if len(values) < count or count < 5 or (count > 6 and count % 2 == 0):
            raise _fault(line, "a class, and 4 numbers of a box, or x and y of each corner", text)
        if not 0 <= values[0] < _MAX_NUMBER or not values[0].is_integer():
            raise _fault(line, "the number of a class, from 0", text)
        if not all(-_SLACK <= one <= 1 + _SLACK for one in values[1:]):
            raise _fault(line, "numbers from 0 to 1, parts of width and height", text)
        label = int(values[0])
        if count > 6:
            xs, ys = values[1::2], values[2::2]
            left, right, top, bottom = min(xs), max(xs), min(ys), max(ys)
            box = ((left + right) / 2, (top + bottom) / 2, right - left, bottom - top)
            rows.append(AnnotatedBox(label, box, polygon=tuple(values[1:])))
        else:
            box = (values[1], values[2], values[3], values[4])
            rows.append(AnnotatedBox(label, box, score=values[5] if count == 6 else None))
    return rows


def yolo_boxes(rows: Iterable[AnnotatedBox], width: int, height: int) -> list[dict[str, Any]]:
    """Return rows as annotations, in pixels of an image of this size.

    `bbox` and `label`; of polygons also `segmentation`, of predictions `score`.
    """
    found = []
    for label, (middle_x, middle_y, wide, high), polygon, score in rows:
        left, top = (middle_x - wide / 2) * width, (middle_y - high / 2) * height
        one = {"bbox": [left, top, wide * width, high * height], "label": label}
        if polygon:
            sizes = (width, height) * (len(polygon) // 2)
            one["segmentation"] = [[a * b for a, b in zip(polygon, sizes, strict=True)]]
        if score is not None:
            one["score"] = score
        found.append(one)
    return found


def yolo_names(data: bytes, name: str) -> tuple[str, ...]:
    """Return the names of the classes, by their numbers.

    name: of the file. `.yaml` and `.yml` are YOLO's description of a dataset, of which `names` is
    read, a list or a dict; in other files (classes.txt, obj.names) each line is a name.
    """
    if name.lower().endswith((".yaml", ".yml")):
        names = _yaml_names(data)
    else:
        names = [line.strip() for line in _text(data).rstrip().split("\n")]
    for number, one in enumerate(names):
        if not one or one in names[:number]:
            raise _fault(number + 1, "a name of its own for each class", one)
    return tuple(names)


def _yaml_names(data: bytes) -> list[str]:
    """Return the names in YOLO's description of a dataset. Raises DependencyError, ValueError."""
    try:
        import yaml
    except ImportError:
        raise DependencyError(
            "reading data.yaml needs the package pyyaml: pip install 'shardio-torch[yolo]'. Or "
            "write the names of the classes into a file classes.txt beside it, one a line"
        ) from None
    try:
        found = yaml.load(
            _text(data), yaml.BaseLoader
        )  # plain text alone: a class may be called no
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"expected YAML: {' '.join(str(error).split())}") from None
    names = found.get("names") if isinstance(found, dict) else None
    if isinstance(names, dict) and names.keys() == {str(i) for i in range(len(names))}:
        names = [names[str(i)] for i in range(len(names))]
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise ValueError(
            "expected `names`, a list of names, or numbers from 0 with names; found "
            + printable(repr(names))
        )
    count = found.get("nc", str(len(names)))
    if count != str(len(names)):
        raise ValueError(
            f"expected as many names as nc, {printable(str(count))}; found {len(names)}"
        )
    return names


# --- both -----------------------------------------------------------------------------------------


def _lines(data: bytes) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line that is not blank."""
    for line, text in enumerate(_text(data).split("\n"), 1):
        if text := text.strip():
            yield line, text


def _text(data: bytes) -> str:
    _check_size(data)
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _fault(line, "UTF-8", f"{data[error.start]:#04x}") from None


def _number(text: str) -> int | float | None:
    """Return a number as it is written, whole or not; None where it is none."""
    with contextlib.suppress(ValueError):
        number = int(text) if re.fullmatch(r"[+-]?\d{1,18}", text, re.ASCII) else float(text)
        return number if math.isfinite(number) else None
    return None


def _check_size(data: bytes) -> None:
    if len(data) > MAX_BYTES:
        raise _fault(1, f"a file of at most {MAX_BYTES:,} bytes", f"{len(data):,}")


class _Fault(ValueError):
    """A file is not as expected."""


def _fault(line: int, expected: str, found: str) -> _Fault:
    return _Fault(f"line {line}: expected {expected}; found {printable(found) or 'nothing'}")
