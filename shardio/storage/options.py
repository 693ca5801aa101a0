"""How the stored bytes of a dataset are reached, and how far they are trusted."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from ..errors import OptionError, printable
from ..units import check_flags, check_given, check_group, check_size, refuse_unknown
from .stores import TIMEOUT_S


@refuse_unknown
@dataclass(frozen=True)
class Storage:
    """Say how the stored bytes of a dataset are reached, and how far they are trusted.

    root          where the data lies, when `shardio index --out` put its index elsewhere
    buffer_bytes  memory of this machine for records on network file systems, or "1GiB"; default
                  256 MiB
    options       options of an object store, by obstore's names: endpoint, region, profile, token,
                  skip_signature (for public buckets), client_options ... (docs/remote.md)
    cache         a directory of this machine that keeps bytes read from an object store; all
                  processes of the machine share it (docs/remote.md)
    cache_bytes   bytes that the directory may take, or "200GiB"
    timeout_s     seconds that a failing read of an object store is tried again; default 120
    verify_open   False: do not compare LMDB's own pages when a shard is opened (docs/lmdb.md)
    max_pixels    the largest image to decode. Default: 2**28 pixels, and 2**26 for WebP, AVIF,
                  JPEG2000, HEIF and JPEG XL, whose decoders take four times the memory

    Raises OptionError.
    """

    _: KW_ONLY
    root: str | os.PathLike[str] | None = None
    buffer_bytes: int | str | None = None
    options: Mapping[str, Any] | None = field(default=None, repr=False)  # it may have secrets
    cache: str | os.PathLike[str] | None = None
    cache_bytes: int | str | None = None
    timeout_s: float = TIMEOUT_S
    verify_open: bool = True
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        """Check the options, and turn sizes into bytes. Raises OptionError."""
        if self.root is not None and not isinstance(self.root, (str, bytes, os.PathLike)):
            raise OptionError(f"root is {printable(repr(self.root))}: expected a directory")
        if self.options is not None and not (
            isinstance(self.options, Mapping) and all(type(key) is str for key in self.options)
        ):
            raise OptionError("options: expected a dict of an object store's options, by name")
        check_flags(self, "verify_open")
        if not isinstance(self.timeout_s, (int, float)) or not 0 < self.timeout_s < math.inf:
            raise OptionError(
                f"timeout_s is {printable(repr(self.timeout_s))}: expected seconds above 0"
            )
        for name, least in (("buffer_bytes", 0), ("cache_bytes", 1)):
            if (size := getattr(self, name)) is not None:
                object.__setattr__(self, name, check_size(name, size, least))
        if (self.cache is None) != (self.cache_bytes is None):
            raise OptionError("cache and cache_bytes belong together: a directory, and its limit")
        check_given(self, max_pixels=(1,))


def with_root(storage: Storage | None, root: str | os.PathLike[str] | None) -> Storage:
    """Return the options that a function was given, with a root that it was given beside them.

    Raises OptionError.
    """
    given = check_group("storage", storage, Storage)
    if root is None:
        return given
    if given.root is not None:
        raise OptionError("root is given twice: by root=, and by storage=shardio.Storage(root=...)")
    return replace(given, root=root)
