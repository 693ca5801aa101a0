"""Which location a URL or path names. The table has one row; object stores add theirs."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import unquote_to_bytes

from ..errors import OptionError, printable
from .base import Location
from .local import LocalDirectory


def locate(url: str | os.PathLike[str]) -> Location:
    """Return the location behind a path or a file:// URL. Raises OptionError for other schemes."""
    text = path_text(url)
    scheme, separator, rest = text.partition("://")
    if not separator or "/" in scheme:
        return LocalDirectory(text)
    if scheme == "file":
        host, _, path = rest.partition("/")
        if host not in ("", "localhost"):  # "file://data/train" would read /train
            raise OptionError(f"{printable(text)}: expected file:///PATH, with three slashes")
        return LocalDirectory("/" + os.fsdecode(unquote_to_bytes(os.fsencode(path))))
    raise OptionError(
        f"{printable(text)}: {printable(scheme)}:// is not supported yet; expected a directory, "
        "local or mounted, or a file:// URL. Copy what is to be read to one first; write into one, "
        "and copy that"
    )


def path_text(path: Any) -> str:
    """Return a path or URL as a str. Raises OptionError for what is none."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise OptionError(f"{printable(repr(path))} is no path: expected a str or a pathlib.Path")
    return os.fsdecode(path)


def local_path(path: str | bytes | os.PathLike[Any]) -> str:
    """Return a directory as the operating system takes it. Raises OptionError for other URLs."""
    text = path_text(path)
    if not text:
        raise OptionError("an empty path: a variable that is not set? Expected a directory")
    storage = locate(text)
    return storage.root if "://" in text and isinstance(storage, LocalDirectory) else text
