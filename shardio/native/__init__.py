"""The compiled core where it was built, and what says why it was not.

`core` is the module `shardio.native._core`, or None; `missing` says why there is none. Nothing
needs it: what it does, Python and PIL do as well, and are what it is tested against. Ask for
`native.core` anew each time, so that tests can take it away. A core that was built without xxHash's
header leaves records, whose checksums they are, to Python: ask `records()` for the core that reads
them.

Its C files: `module.c` has what Python calls. `records.c` reads records and checks them. For JPEGs,
`headers.c` reads the header, `entropy.c` the Huffman codes, `crop.c` decodes and crops, `resize.c`
resamples, and `rewrite.c` makes tile JPEGs; `guard.c` takes the errors of libjpeg. All share
`core.h`, and those of JPEGs `jpeg.h`.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from types import ModuleType

from ..stack import users_level

# Without --no-binary pip takes the wheel without the core that is there for machines that no other
# wheel fits, and without --no-cache-dir the one that it built itself, and kept.
_AGAIN = (
    "pip install --no-deps --force-reinstall --no-cache-dir --no-binary shardio-torch "
    "shardio-torch; in a clone: tools/setup --again, or pip install . with the first three options"
)

core: ModuleType | None = None
missing = ""
try:
    core = import_module("shardio.native._core")
    if getattr(core, "interface", 0) != 7:  # of an editable install: left from other sources
        missing = f"{core.__file__} was built from other sources: install shardio again"
        core = None
except ModuleNotFoundError:
    missing = (
        "shardio came as a wheel without the core, or where it was built there was no C compiler, "
        "or no headers of libjpeg-turbo or Python (Debian, Ubuntu: gcc libjpeg-dev libxxhash-dev "
        "python3-dev; macOS: brew install jpeg-turbo xxhash). With them, install it again: "
        f"{_AGAIN}"
    )
except ImportError as error:
    missing = str(error)


def records() -> ModuleType | None:
    """Give the core where it reads records, and checks them: `gather`, `join`, `sample` ..."""
    return core if hasattr(core, "gather") else None


def described() -> str:
    """Say what the core does, and what it would take to have all of it."""
    if core is None:
        return f"not built: {missing}"
    built = f"built with {core.libjpeg}"
    if records() is not None:
        return built
    return (
        f"{built}, but Python reads the records: when shardio was installed there was no "
        "header of xxHash, 0.8.0 or newer (Debian, Ubuntu: libxxhash-dev; macOS: brew install "
        f"xxhash). With it, install shardio again: {_AGAIN}"
    )


class PerformanceWarning(UserWarning):
    """Say what works, but slower than it could, and how to mend that."""


_told = False


def advise(slower: str) -> None:
    """Say what is slower without the core, and how to get it: once in this process."""
    global _told
    if _told:
        return
    _told = True
    warnings.warn(
        f"{slower}, since shardio's compiled core is {described()}. (Said once; to silence it: "
        "warnings.simplefilter('ignore', shardio.PerformanceWarning))",
        PerformanceWarning,
        stacklevel=users_level(),
    )
