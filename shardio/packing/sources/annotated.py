"""`--boxes DIR`: a file of boxes for each image, Pascal VOC's XML or YOLO's texts, as columns.

annotations    json: of each object a dict, as of COCO: `bbox` in pixels, `label`, `category`
width, height  int: of the image, as VOC's file says, or, of YOLO's, as the image itself does
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...errors import DecodeError, OptionError, SourceError, printable
from ...formats.sample import MAX_HEAD, Sample, pack
from ...images.decode import upright_size
from ...names import key_text
from ...units import show_count
from .archived import root_of
from .base import Rejected, SourceFolder, SourceRequest
from .boxes import parse_voc, parse_yolo, yolo_boxes, yolo_names
from .image_names import ImageNames
from .tables import Column, number_column, packed_column

_NAMES = (b"classes.txt", b"obj.names", b"data.yaml", b"data.yml")  # files of names of classes
_ENDINGS = (b".xml", b".txt", b"")  # endings of files of boxes; VOC's may have none


@dataclass
class Annotations:
    """What the files of boxes say: of each image, in the order of their listing."""

    columns: dict[str, Column]
    classes: tuple[str, ...] | None  # names of the labels of boxes
    normalised: bool  # boxes are parts of the image's size, which is known when it is read
    unfit: dict[int, str]  # images that cannot be packed, and why
    notes: list[str] = field(default_factory=list)


def read_annotations(
    images: ImageNames, request: SourceRequest, classes: Sequence[str] | None
) -> Annotations:
    """Read the files of boxes. classes: those of the images' folders. Raises SourceError."""
    path = request.joins.boxes or ""
    folder, shown = root_of(replace(request, root=path)), printable(path)
    if not folder.is_there():
        raise OptionError(f"--boxes {shown}: expected a folder, and there is none")
    walked = folder.walk(empty=True)
    endings = [*map(_ending, walked.keys)]
    form = next((one for one in _ENDINGS if one in endings), b".xml")
    places = [i for i, ending in enumerate(endings) if ending == form]
    if not places:
        raise SourceError(f"--boxes {shown}: no file of boxes, .xml or .txt, lies there")
    keys = [walked.keys[i] for i in places]
    _, way = images.way_of(keys, loose=True)
    rows, lost = images.find(keys, way, shown)
    found = Annotations({}, None, form == b".txt", {})
    if lost:
        example = printable(keys[lost[0][0]])
        found.notes.append(f"{shown}: {show_count(len(lost), 'file')} of no image, as {example}")
    if without := int((rows < 0).sum()):
        found.notes.append(f"{shown}: no file of boxes for {show_count(without, 'image')}")
    objects: list[list[Any]] = [[] for _ in images.paths]
    sizes: list[tuple[int | None, int | None]] = [(None, None) for _ in images.paths]
    with folder.opened() as read_file:
        for image in np.flatnonzero(rows >= 0).tolist():
            place = places[rows[image]]
            try:
                size, mtime = int(walked.sizes[place]), int(walked.mtimes[place])
                data = read_file(walked.keys[place], size, mtime) if size else b""
                if found.normalised:
                    objects[image] = [[*row] for row in parse_yolo(data)]
                else:
                    width, height, objects[image] = parse_voc(data)
                    sizes[image] = width, height
            except (Rejected, ValueError) as why:
                found.unfit[image] = f"its boxes, {printable(walked.keys[place])}: {why}"
    if found.normalised:
        found.classes = _names(folder, list(filter(_is_names, walked.keys)), request)
        _check_labels(objects, found)
    else:
        found.classes = _label(objects, classes, found)
    packed = [pack(one) for one in objects]
    for image, one in enumerate(packed):
        if len(one) > MAX_HEAD >> 1:
            found.unfit.setdefault(image, f"its boxes take {len(one):,} bytes; too many")
    found.columns["annotations"] = packed_column("json", packed)
    for name, values in zip(("width", "height"), zip(*sizes, strict=True), strict=True):
        found.columns[name] = number_column(values)
    return found


def in_pixels(sample: Sample) -> None:
    """Fill a record of YOLO's: boxes in pixels, and the size of the image. Raises Rejected."""
    try:
        width, height = upright_size(sample["image"])
    except DecodeError as error:
        raise Rejected(f"has boxes, and its size cannot be read: {error}") from None
    boxes = yolo_boxes(sample["annotations"], width, height)
    sample |= {"width": width, "height": height, "annotations": boxes}


def _ending(key: bytes) -> bytes | None:
    """Return the ending of a file of boxes; None of a file of names of classes."""
    return None if _is_names(key) else os.path.splitext(key)[1].lower()


def _is_names(key: bytes) -> bool:
    return os.path.basename(key).lower() in _NAMES


def _names(
    folder: SourceFolder, within: Sequence[bytes], request: SourceRequest
) -> tuple[str, ...] | None:
    """Return the names of YOLO's classes: a file beside the boxes, or in the folder above."""
    path = os.path.join(request.joins.boxes or "", "..")
    above = root_of(replace(request, root=os.path.normpath(path)))
    for place, names in ((folder, within), (above, _NAMES)):
        for name, seen in zip(names, place.look(names), strict=True):
            if seen.why is None:
                with place.opened() as read_file:
                    data = read_file(name, seen.size, seen.mtime)
                try:
                    return yolo_names(data, key_text(name))
                except ValueError as why:
                    raise SourceError(f"{printable(place.path)}/{printable(name)}: {why}") from None
    return None


def _check_labels(objects: Sequence[Sequence[Any]], found: Annotations) -> None:
    """Note images whose boxes have numbers of no class."""
    if found.classes is None:
        found.notes.append("no names of classes: neither classes.txt nor data.yaml lies there")
        return
    for image, rows in enumerate(objects):
        for label, *_ in rows:
            if label >= len(found.classes):
                found.unfit[image] = f"its boxes have class {label}, of {len(found.classes)} names"


def _label(
    objects: Sequence[Sequence[dict[str, Any]]], classes: Sequence[str] | None, found: Annotations
) -> tuple[str, ...] | None:
    """Give objects the numbers of their classes, and return the names, in bytewise order.

    Where folders are classes, the numbers are theirs, if they have all names.
    """
    names = {one["category"] for some in objects for one in some}
    if classes is not None and not names <= {*classes}:
        found.notes.append(
            "boxes have no labels, but names of categories, since class folders are called "
            f"otherwise: {printable(min(names))}, and {printable(classes[0])}"
        )
        return None
    chosen = tuple(sorted(names, key=str.encode)) if classes is None else tuple(classes)
    number = {name: i for i, name in enumerate(chosen)}
    for some in objects:
        for one in some:
            one["label"] = number[one["category"]]
    return chosen
