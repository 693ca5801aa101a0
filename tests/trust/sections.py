"""All sections, in the order of the table; each is imported when it is used, and so is torch."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trust.section import Section

# By name: the module, the class, and the minutes of a CPU, or so, that all of its cases take.
SECTIONS = {
    "damage": ("trust.damage", "Damage", 12.0),
    "bits": ("trust.bits", "Bits", 14.0),
    "unfinished": ("trust.unfinished", "Unfinished", 2.0),
    "crash": ("trust.crash", "Crash", 5.0),
    "moments": ("trust.crash", "Moments", 2.0),
    "power": ("trust.power", "Power", 3.0),
    "stores": ("trust.stores", "Stores", 4.0),
    "workers": ("trust.workers", "Workers", 12.0),
    "races": ("trust.races", "Races", 6.0),
    "leaks": ("trust.leaks", "Leaks", 1.0),
    "reading": ("trust.reading", "Reading", 3.0),
}


def section(name: str) -> "type[Section]":
    """Return the class of a section."""
    module, kind, _ = SECTIONS[name]
    found: type[Section] = getattr(import_module(module), kind)
    return found


def share(name: str) -> float:
    """Return the share of the time that a section gets."""
    return SECTIONS[name][2]
