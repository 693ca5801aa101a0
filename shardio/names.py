"""Names that are stored, such as keys, classes and splits: bytes on disk, and the str for them.

A name is bytes, as the file system gave them. Where it is text, in a manifest and for users, it is
read as UTF-8, and each byte that is none becomes one lone surrogate (`surrogateescape`): so every
name has a str, and gives its bytes back. The locale has no part in it: under ISO-8859-1
`os.fsdecode` makes `Ã©` of the folder `é`, for good.

Python's functions for files take a str in the *locale's* encoding. `file_name` and `from_file_name`
lead through that door: the same file under any locale.
"""

from __future__ import annotations

import os
from typing import Any, TypeGuard

KEY = "__key__"  # the field of a sample that holds its name


def key_text(name: bytes) -> str:
    """Return the str that stands for a stored name."""
    return name.decode("utf-8", "surrogateescape")


def key_bytes(name: bytes | str) -> bytes:
    """Return the stored bytes of a name; raise UnicodeEncodeError for half of a surrogate pair."""
    return name if isinstance(name, bytes) else name.encode("utf-8", "surrogateescape")


def is_name(name: str) -> bool:
    """Return True for what a folder can be called, in another one."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def are_names(names: Any) -> TypeGuard[list[str]]:
    """Return True for a list of names that folders can have."""
    return type(names) is list and all(type(name) is str and is_name(name) for name in names)


def file_name(name: str) -> str:
    """Return the str by which Python's functions for files find a stored name."""
    return name if name.isascii() else os.fsdecode(key_bytes(name))


def from_file_name(name: str) -> str:
    """Return the stored name of a str that such a function, or the command line, gave."""
    return name if name.isascii() else key_text(os.fsencode(name))
