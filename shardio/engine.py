"""Which engine does the work: the compiled core, where it was built, or Python alone.

`core` is the module `shardio._core`, or None; `missing` says why there is none. Nothing needs it:
what it does, Python and PIL do as well, and are what it is tested against. Ask for `engine.core`
anew each time, so that tests can take it away.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

core: ModuleType | None = None
missing = ""
try:
    core = import_module("shardio._core")
    if getattr(core, "interface", 0) != 2:  # of an editable install: left from other sources
        missing = f"{core.__file__} was built from other sources: install shardio again"
        core = None
except ModuleNotFoundError:
    missing = (
        "when shardio was installed there was no C compiler, or no headers of libjpeg-turbo or "
        "Python (Debian, Ubuntu: gcc libjpeg-dev python3-dev). With them, install it again"
    )
except ImportError as error:
    missing = str(error)
