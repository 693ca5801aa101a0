"""Read the blocks of a page of docs/, so that what is measured is what the page shows."""

from __future__ import annotations

import re
from typing import NamedTuple

from .harness import ROOT, BenchmarkError


class Block(NamedTuple):
    """A block of a page: the heading it stands below, its language, and its text."""

    heading: str
    kind: str
    text: str


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page in order. Commands are of no language."""
    found, heading = [], ""
    text = (ROOT / "docs" / page).read_text()
    for one in re.finditer(r"^## ([^\n]*)$|^```(\w*)\n(.*?)^```$", text, re.M | re.S):
        heading = one[1] or heading
        if one[1] is None:
            found.append(Block(heading, one[2], one[3]))
    return found


def block(page: str, first_line: str) -> str:
    """Return the Python block with this first line. Raises BenchmarkError."""
    for _, kind, text in blocks(page):
        if kind == "python" and text.startswith(first_line + "\n"):
            return text
    raise BenchmarkError(f"docs/{page}: no Python block begins with {first_line!r}")


def command(page: str, begins: str) -> list[str]:
    """Return the words of the first command that begins so. Raises BenchmarkError."""
    for _, _, text in blocks(page):
        for line in text.splitlines():
            if line.startswith(f"$ {begins}"):
                return line.split()[1:]
    raise BenchmarkError(f"docs/{page}: no command begins with {begins!r}")
