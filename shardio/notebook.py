"""Results as notebooks show them: HTML tables without colours, which a dark notebook has too.

Every text is escaped here: names and paths come from disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .errors import printable

_LEFT = ' style="text-align: left"'  # Jupyter aligns all cells to the right
_MOST = 10_000  # characters of a text


def escape(text: str) -> str:
    """Return a text for HTML: what is no plain character is shown, and nothing is a tag."""
    import html  # 1 ms, which only notebooks need

    return html.escape("\n".join(printable(line, _MOST) for line in text.split("\n")))


def facts(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Return a table of names and what is said of them, below a title."""
    lines = (
        f"<tr><th{_LEFT}>{escape(name)}</th><td{_LEFT}>{escape(text)}</td></tr>\n"
        for name, text in rows
    )
    body = "".join(lines)
    below = f"<table>\n<tbody>\n{body}</tbody>\n</table>\n" if body else ""
    return paragraph(title, strong=True) + below


def table(names: Sequence[str], rows: Iterable[tuple[Sequence[str], bool]]) -> str:
    """Return a table with a head. rows: the cells of each, and whether it is pointed at.

    The last column, of words, is aligned to the left.
    """

    def line(cells: Sequence[str], tag: str, strong: bool) -> str:
        shown = [f"<b>{escape(cell)}</b>" if strong else escape(cell) for cell in cells]
        *others, last = (f"{cell}</{tag}>" for cell in shown)
        return f"<tr>{''.join(f'<{tag}>{one}' for one in others)}<{tag}{_LEFT}>{last}</tr>\n"

    body = "".join(line(cells, "td", strong) for cells, strong in rows)
    head = line(names, "th", False)
    return f"<table>\n<thead>\n{head}</thead>\n<tbody>\n{body}</tbody>\n</table>\n"


def paragraph(text: str, *, strong: bool = False) -> str:
    """Return a paragraph; "" for none."""
    lines = escape(text).replace("\n", "<br />\n")
    shown = f"<b>{lines}</b>" if strong else lines
    return f"<p>{shown}</p>\n" if text else ""


def code(text: str) -> str:
    """Return lines of Python; "" for none."""
    return f"<pre>{escape(text)}</pre>\n" if text else ""
