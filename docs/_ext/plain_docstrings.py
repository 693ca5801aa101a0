"""Renders docstrings, which are plain text for help(), as reStructuredText for autodoc.

Their layout is this:

    name, name  a list of options: each name, two spaces or more, its text; what follows of the
                text stands below its beginning
    name: text  the same, where `name` is a parameter

An indented paragraph is code, `this` is code, and other paragraphs are text. The names of the
package, and pages of docs/, become links.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import shardio

NAMES = r"[\w*.]+(?:, [\w*.]+)*"
OPTION = re.compile(rf"({NAMES}) {{2,}}(\S.*)")
ARGUMENT = re.compile(rf"({NAMES}): (\S.*)")
LIST = ".. container:: options"
PUBLIC = {name for name in dir(shardio) if not name.startswith("_")}
LINKS = re.compile(
    r"(?P<page>docs/[\w-]+)\.md"
    r"|\b(?:shardio\.)?(?P<name>[A-Z]\w+)\b|\bshardio\.(?P<call>[a-z]\w+)"
)


def paragraphs(lines: Sequence[str]) -> Iterator[list[str]]:
    """Yield the paragraphs: runs of lines that are not blank."""
    found: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            found.append(line)
        elif found:
            yield found
            found = []


def inline(text: str) -> str:
    """Write a text with `code` and names as reStructuredText."""
    parts = re.split(r"`([^`]+)`", text)
    return "".join(code(part) if i % 2 else linked(part) for i, part in enumerate(parts))


def code(text: str) -> str:
    name = text.removeprefix("shardio.").removesuffix("()")
    if name in PUBLIC and (text != name or name[0].isupper()):
        return rf"\ :py:obj:`{text} <shardio.{name}>`\ "
    return rf"\ ``{text}``\ "


def linked(text: str) -> str:
    """Write text without code: names that have an entry, and pages, become links."""
    out, end = [], 0
    for found in LINKS.finditer(text):
        name = found["name"] or found["call"]
        if found["page"]:
            link = rf"\ :doc:`{found[0]} </{found['page'].removeprefix('docs/')}>`\ "
        elif name in PUBLIC:
            link = rf"\ :py:obj:`{found[0]} <shardio.{name}>`\ "
        else:
            continue
        out += [escape(text[end : found.start()]), link]
        end = found.end()
    return "".join([*out, escape(text[end:])])


def escape(text: str) -> str:
    return re.sub(r"([\\*|_`])", r"\\\1", text)


def options(lines: Sequence[str], item: re.Pattern[str]) -> Iterator[str]:
    """Write a list of options as a definition list."""
    yield from (LIST, "")
    names, text = "", ""
    for line in [*lines, None]:
        found = item.fullmatch(line) if line is not None else None
        if line is None or found:
            if names:
                shown = ", ".join(f"``{name}``" for name in names.split(", "))
                yield from (f"    {shown}", f"        {inline(text)}", "")
            names, text = found.groups() if found else ("", "")
        else:
            text += f" {line.strip()}"


def render(lines: Sequence[str], parameters: Sequence[str] = ()) -> Iterator[str]:
    """Write a docstring as reStructuredText."""
    for part in paragraphs(lines):
        first = ARGUMENT.fullmatch(part[0])
        if OPTION.fullmatch(part[0]):
            yield from options(part, OPTION)
        elif first and set(first[1].split(", ")) <= set(parameters):
            yield from options(part, ARGUMENT)
        elif all(line.startswith("    ") for line in part):
            yield from ("::", "", *part, "")
        else:
            yield from (inline(" ".join(line.strip() for line in part)), "")


def process(app: Any, kind: str, name: str, value: Any, settings: Any, lines: list[str]) -> None:
    """Replace the lines of a docstring: autodoc calls this for each object."""
    function = value.__init__ if isinstance(value, type) else value
    code = getattr(function, "__code__", None)
    lines[:] = render(lines, code.co_varnames if code else ())
    if is_result(value) and is_dataclass(value) and LIST not in lines:
        found = (f"`{one.name}: {one.type}`" for one in fields(value) if one.name[0] != "_")
        lines += [inline(f"Fields: {', '.join(found)}."), ""]


def is_result(value: Any) -> bool:
    """Return whether this is a class that only functions of the package make."""
    return isinstance(value, type) and value.__name__ not in PUBLIC


def signature(app: Any, kind: str, name: str, value: Any, *args: Any) -> tuple[str, None] | None:
    """Leave out the arguments of what users do not make: autodoc calls this for each object."""
    return ("", None) if is_result(value) else None


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", process)
    app.connect("autodoc-process-signature", signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
