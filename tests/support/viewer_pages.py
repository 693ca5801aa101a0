"""Datasets that pages show: images known by their colours, names that must be escaped."""

import colorsys
import io
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image

from support import small_datasets

CLASSES = ("ant", "bee", "cat", "dog")


COUNTS = [70, 0, 90, 40]  # records of each shard


N = sum(COUNTS)


EACH = N // len(CLASSES)  # sorted by class


FIELDS = (("__key__", "key"), ("image", "image"), ("label", "int"), ("width", "int"))


HOSTILE = (
    "<script>window.ran = 1</script>",
    "\"><img src=x onerror='window.ran = 2'>",
    "' onmouseover='window.ran = 3' x='",
    "javascript:window.ran=4",
    "{{ 7 * 191 }}{% raw %}",
    "</title></style></svg><script>window.ran = 5</script>",
    "a\x00b\x1b[31m\r\n\x7f",
    "\u202eright to left\u2066",
    "long" * 600,
    "&lt;b&gt; %3Cscript%3E \\u003cscript\\u003e",
)


def rgb(number: int) -> tuple[int, int, int]:
    """The colour of a record's image: no two neighbours are alike."""
    red, green, blue = colorsys.hsv_to_rgb(number * 0.137 % 1, 0.4 + number % 5 / 10, 0.9)
    return int(255 * red), int(255 * green), int(255 * blue)


@cache
def painted(number: int, size: tuple[int, int] = (48, 32)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, rgb(number)).save(out, "PNG")
    return out.getvalue()


def sample(number: int) -> dict[str, Any]:
    label = number // EACH
    key = f"{CLASSES[label]}/{number:04d}.png".encode()
    return {"__key__": key, "image": painted(number), "label": label, "width": number % 7}


def key(number: int) -> str:
    return sample(number)["__key__"].decode()


PIXELS = """async all => {
  const found = [];
  for (const image of all) {
    image.loading = "eager";
    await image.decode();
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = 1;
    const drawn = canvas.getContext("2d");
    drawn.drawImage(image, image.naturalWidth / 2, image.naturalHeight / 2, 1, 1, 0, 0, 1, 1);
    found.push([...drawn.getImageData(0, 0, 1, 1).data].slice(0, 3));
  }
  return found;
}"""


def is_near(found: list[int], expected: tuple[int, int, int]) -> bool:
    """JPEG changes colours a little."""
    return all(abs(one - other) < 8 for one, other in zip(found, expected, strict=True))


def make_colors(folder: Path) -> Path:
    """Pack records sorted by class, each of one colour."""
    return small_datasets.make(folder, COUNTS, fields=FIELDS, sample=sample, classes=CLASSES)


def make_hostile(folder: Path) -> Path:
    """Pack records whose names a page must not take for its own text."""

    def of(number: int) -> dict[str, Any]:
        text = HOSTILE[number]
        name = text.encode() + b"\xff" * (number % 2)
        values = {"__key__": name, "image": painted(number), "label": number}
        return values | {"<b onclick=x>": text, "note": {text: [text]}}

    fields = (*FIELDS[:3], ("<b onclick=x>", "str"), ("note", "json"))
    return small_datasets.make(folder, [len(HOSTILE)], fields=fields, sample=of, classes=HOSTILE)
