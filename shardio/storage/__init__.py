"""Which storage a URL or path names. The table has one row; object stores add theirs."""

from __future__ import annotations

import os
from urllib.parse import unquote_to_bytes

from ..errors import OptionError, printable
from .base import File, Storage
from .local import LocalStorage

__all__ = ["File", "Storage", "locate"]


def locate(url: str | os.PathLike[str]) -> Storage:
    """The storage behind a path or a file:// URL. Raises OptionError for other schemes."""
    text = os.fspath(url)
    if isinstance(text, bytes):
        text = os.fsdecode(text)
    scheme, separator, rest = text.partition("://")
    if not separator or "/" in scheme:
        return LocalStorage(text)
    if scheme == "file":
        host, _, path = rest.partition("/")
        if host not in ("", "localhost"):  # "file://data/train" would read /train
            raise OptionError(f"{printable(text)}: expected file:///PATH, with three slashes")
        return LocalStorage("/" + os.fsdecode(unquote_to_bytes(path)))
    raise OptionError(
        f"{printable(text)}: {printable(scheme)}:// cannot be read yet; expected a directory or a "
        "file:// URL. Copy the dataset to a local or mounted directory first"
    )
