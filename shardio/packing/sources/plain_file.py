"""A file of labels beside the images, which may lie in an archive, or in a store."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

from ...errors import ShardioError, SourceError, printable
from ...storage.location import locate
from ...storage.remote import RemoteLocation
from .archived import root_in_archive
from .base import Rejected, SourceFolder, SourceRequest
from .files import is_archive
from .store_folder import StoreFolder


@contextlib.contextmanager
def plain_file(path: bytes, request: SourceRequest) -> Iterator[bytes]:
    """Give the path of a file; of one that lies elsewhere that of a copy, as long as it is needed.

    Raises SourceError, StorageError.
    """
    above, name = os.path.split(path)
    folder: SourceFolder | None = None
    if not os.path.lexists(path):
        folder = root_in_archive(above or b".", request)
        location = locate(os.fsdecode(path), request.storage)
        if folder is None and isinstance(location, RemoteLocation):
            folder = StoreFolder(location.above()[0])
    if folder is None:
        if not os.path.isfile(path):
            raise SourceError(f"{printable(path)}: expected a file, and there is none")
        if is_archive(path):
            raise SourceError(
                f"{printable(path)}: expected a file, and this is an archive; give the path of a "
                "file in it, as in labels.zip/labels.csv"
            )
        yield path
        return
    (seen,) = folder.look([name])
    if seen.why is not None:
        raise SourceError(f"{printable(path)}: {seen.why}")
    with folder.opened() as read_file, tempfile.TemporaryDirectory() as copies:
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
