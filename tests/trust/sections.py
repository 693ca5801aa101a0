"""All sections, in the order of the table; each is imported when it is used, and so is torch."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trust.section import Section

# By name: the module, the class, and the share of the time, beside that of the others.
SECTIONS = {
    "damage": ("trust.damage", "Damage", 2.0),
    "bits": ("trust.bits", "Bits", 1.0),
    "unfinished": ("trust.unfinished", "Unfinished", 1.0),
    "crash": ("trust.crash", "Crash", 2.0),
    "power": ("trust.power", "Power", 1.5),
    "workers": ("trust.workers", "Workers", 2.0),
    "races": ("trust.races", "Races", 1.0),
    "leaks": ("trust.leaks", "Leaks", 0.5),
    "reading": ("trust.reading", "Reading", 1.0),
}


def section(name: str) -> "type[Section]":
    """Return the class of a section."""
    module, kind, _ = SECTIONS[name]
    found: type[Section] = getattr(import_module(module), kind)
    return found


def share(name: str) -> float:
    """Return the share of the time that a section gets."""
    return SECTIONS[name][2]
