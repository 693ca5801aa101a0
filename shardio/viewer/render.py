"""Pages from templates. The only door to Jinja2, which escapes all that a template is given."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..errors import printable
from ..units import show_size


def render(template: str, **values: Any) -> bytes:
    """Fill in a template; every value is escaped for HTML."""
    return _templates().get_template(template).render(values).encode("utf-8", "backslashreplace")


@cache
def _templates() -> Environment:
    found = Environment(
        loader=PackageLoader("shardio.viewer"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    found.filters |= {
        "number": "{:,}".format,
        "size": show_size,
        "color": color,
        "shown": printable,
    }
    return found


def color(label: int | None) -> str:
    """Return the colour of a class: neighbours are far from each other, all equally strong."""
    if label is None:
        return "oklch(0.6 0 0)"
    return f"oklch({0.62 + 0.14 * (label % 2):.2f} 0.13 {label * 137.508 % 360:.0f})"
