"""Sizes as users write and read them: "256MiB", "64MB", "1.5 GiB"."""

from __future__ import annotations

import re

from .errors import OptionError

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("KMGT", 1)
    for ending, base in (("", 1024), ("iB", 1024), ("B", 1000))
}
_BY_LOWER = {unit.lower(): factor for unit, factor in _UNITS.items()}


def parse_size(text: str) -> int:
    """Bytes in a size. K, KiB are 1,024 and KB is 1,000; M, G, T likewise. Raises OptionError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    factor = _BY_LOWER.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise OptionError(
            f"{text!r} is no size; expected a number of bytes, or like 256MiB or 64MB"
        )
    whole, _, part = match[1].partition(".")
    return int(int(whole) * factor + int(part or 0) * factor // 10 ** len(part))


def show_size(count: float) -> str:
    """Bytes as a person reads them: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError
