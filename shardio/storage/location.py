"""Which location a URL or path names."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any
from urllib.parse import unquote_to_bytes

from ..errors import OptionError, printable, there_are
from ..units import check_group
from .cache import CacheDirectory
from .local import LocalDirectory, check_directory
from .options import Storage
from .remote import RemoteLocation
from .stores import READ_ONLY, SCHEMES, Store, without_secrets

Target = LocalDirectory | RemoteLocation  # what is written to


def locate(
    url: str | bytes | os.PathLike[Any], options: Storage | None = None
) -> LocalDirectory | RemoteLocation:
    """Return the location behind a path or URL. Nothing is read yet.

    Raises OptionError for schemes that are not known.
    """
    text = path_text(url)
    if not text:
        raise OptionError("an empty path: a variable that is not set? Expected a directory")
    scheme, separator, rest = text.partition("://")
    if not separator or "/" in scheme:
        _refuse_slip(text)
        return LocalDirectory(text)
    if scheme == "file":
        host, _, path = rest.partition("/")
        if host not in ("", "localhost"):  # "file://data/train" would read /train
            raise OptionError(f"{printable(text)}: expected file:///PATH, with three slashes")
        return LocalDirectory("/" + os.fsdecode(unquote_to_bytes(os.fsencode(path))))
    if scheme.lower() in SCHEMES:
        chosen = options or Storage()
        store = Store(text, dict(chosen.options or {}), chosen.timeout_s)
        if chosen.cache is None or chosen.cache_bytes is None:
            return RemoteLocation(store)
        return RemoteLocation(store, CacheDirectory(chosen.cache, chosen.cache_bytes))
    raise OptionError(
        f"{printable(without_secrets(text))}: {printable(scheme)}:// is not known; expected a "
        f"directory, a file:// URL, or one of a store: {there_are(SCHEMES, scheme)}"
    )


def _refuse_slip(path: str) -> None:
    """Raise OptionError for s3:/bucket, unless there is such a folder."""
    scheme, colon, rest = path.partition(":")
    if colon and scheme.lower() in SCHEMES and not os.path.lexists(path.partition("/")[0]):
        meant = printable(without_secrets(f"{scheme}://{rest.lstrip('/')}"))
        raise OptionError(f"a path that begins with {scheme}: is not there; expected {meant}")


def locate_target(
    target: str | bytes | os.PathLike[Any],
    to: Storage | None,
    source: str | bytes | os.PathLike[Any],
    here: Storage,
) -> Target:
    """Return the location that is written to.

    to      how it is reached; default: as the source, where that is of the same scheme, or no URL
    source  what is read
    here    how that is reached

    Raises OptionError where nothing can be written, StorageError.
    """
    if to is None:
        schemes = [path_text(one).partition("://") for one in (source, target)]
        alike = not schemes[0][1] or schemes[0][0].lower() == schemes[1][0].lower()
        to = here if alike else Storage(timeout_s=here.timeout_s)
    found = locate(target, replace(check_group("to", to, Storage), cache=None, cache_bytes=None))
    if isinstance(found, RemoteLocation):
        if found.store.scheme in READ_ONLY:
            raise OptionError(f"{found.url}: {found.store.scheme}:// is read only")
        return found
    if os.path.lexists(found.root) and not os.path.isdir(found.root):
        raise OptionError(f"{printable(found.url)}: expected a directory, or nothing yet")
    check_directory(found.root)
    return found


def path_text(path: Any) -> str:
    """Return a path or URL as a str. Raises OptionError for what is none."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise OptionError(f"{printable(repr(path))} is no path: expected a str or a pathlib.Path")
    return os.fsdecode(path)


def local_path(path: str | bytes | os.PathLike[Any]) -> str:
    """Return a directory as the operating system takes it. Raises OptionError for other URLs."""
    text = path_text(path)
    storage = locate(text)
    if isinstance(storage, RemoteLocation):
        advice = "write into a directory, and `shardio copy` that"
        if storage.store.scheme in READ_ONLY:
            advice = f"{storage.store.scheme}:// is read only"
        raise OptionError(f"{storage.url}: expected a directory, local or mounted, here; {advice}")
    return storage.root if "://" in text else text
