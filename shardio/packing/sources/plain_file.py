"""A file of labels beside the images, which may lie in an archive."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

from ...errors import ShardioError, SourceError, printable
from .archived import root_in_archive
from .base import Rejected, SourceRequest
from .files import is_archive


@contextlib.contextmanager
def plain_file(path: bytes, request: SourceRequest) -> Iterator[bytes]:
    """Give the path of a file; of one in an archive that of a copy, as long as it is needed.

    Raises SourceError.
    """
    folder, name = os.path.split(path)
    archive = None if os.path.lexists(path) else root_in_archive(folder or b".", request)
    if archive is None:
        if not os.path.isfile(path):
            where = " of this machine" if b"://" in path else ""
            raise SourceError(f"{printable(path)}: expected a file{where}, and there is none")
        if is_archive(path):
            raise SourceError(
                f"{printable(path)}: expected a file, and this is an archive; give the path of a "
                "file in it, as in labels.zip/labels.csv"
            )
        yield path
        return
    (seen,) = archive.look([name])
    if seen.why is not None:
        raise SourceError(f"{printable(path)}: {seen.why}")
    with archive.opened() as read_file, tempfile.TemporaryDirectory() as copies:
        try:
            data = read_file(name, seen.size, seen.mtime)
        except Rejected as why:
            raise SourceError(f"{printable(path)}: {why}") from None
        copy = os.path.join(os.fsencode(copies), name)
        with open(copy, "wb") as file:
            file.write(data)
        try:
            yield copy
        except ShardioError as error:
            raise type(error)(str(error).replace(printable(copy), printable(path))) from None
