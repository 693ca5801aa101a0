"""Names of fields: what can be one, and those that `image` and `label` have in common datasets.

Of several that are there, the first of these lists wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...errors import OptionError, printable, there_are
from ...formats.sample import MAX_NAME

IMAGES = (
    *("image", "jpg", "jpeg", "png", "webp", "image/encoded", "img", "x", "data", "image.jpg"),
    *("image.png", "pil", "picture", "content", "bytes", "tif", "tiff", "bmp", "gif", "ppm", "jp2"),
)
LABELS = (
    *("label", "cls", "class", "image/class/label", "target", "y", "labels", "class_id"),
    *("category_id", "fine_label", "label.cls"),
)
# Of columns that hold paths of image files.
PATHS = (
    *("path", "file", "filename", "file_name", "filepath", "file_path", "image_path", "img_path"),
    *("image_file", "img_file", "image_name", "img_name", "image", "img", "picture"),
)


def known(names: tuple[str, ...], there: Iterable[str]) -> str | None:
    """Return the first of these names that is there; else in another case."""
    given = list(there)
    folded = {name.casefold(): name for name in reversed(given)}
    exact = next((name for name in names if name in given), None)
    return exact or next((folded[name] for name in names if name in folded), None)


def known_label(
    labels: tuple[str, ...], typed: Iterable[str], columns: Iterable[str]
) -> str | None:
    """Return the column of a table that is its label: one of these; no `y` beside an `x`."""
    point = known(("x",), columns) is not None
    return known(labels, (name for name in typed if not point or name.casefold() != "y"))


def fields_text(fields: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Return fields by name, their kinds, and their names in the source where those are others."""
    return "fields: " + ", ".join(
        f"{printable(name)} ({kind})"
        + (f" from {printable(theirs[name])}" if name in theirs else "")
        for name, kind in fields.items()
        if kind != "key"
    )


def nameable(name: str) -> bool:
    """Tell whether a field can have this name."""
    return 1 <= len(name.encode("utf-8", "replace")) <= MAX_NAME and name.isprintable()


def check_known_fields(asked: Mapping[str, str], there: Iterable[str]) -> None:
    """Raise OptionError where one of `--fields` names no field of the source."""
    fields = list(there)
    for name, source in asked.items():
        if source not in fields:
            raise OptionError(
                f"--fields {printable(name)}={printable(source)}: no field is called "
                f"{printable(source)!r}; {there_are(fields, source)}"
            )


def is_folder(theirs: str) -> bool:
    """Tell whether `--fields NAME=THEIRS` names a folder, or a pattern of files, and no field."""
    return theirs.endswith("/") or "*" in theirs


def our_names(asked: Mapping[str, str], there: Iterable[str]) -> dict[str, str]:
    """Return our names of a source's fields, by its own, in its order: those of `--fields`, if any.

    Raises OptionError where one names no field, or names would not be of one field each.
    """
    ours = {source: source for source in there}
    check_known_fields(asked, ours)
    ours |= {source: name for name, source in asked.items()}
    names = set(ours.values())
    if len(names) < len(ours) or not asked.keys() <= names:
        pairs = (f"{printable(name)}={printable(source)}" for source, name in ours.items())
        raise OptionError(
            "--fields: two fields would have one name, or one field two; fields and their names "
            f"would be {', '.join(pairs)}"
        )
    return ours
