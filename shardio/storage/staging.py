"""New files of a directory, in a hidden folder within it until all of them are there.

`commit` then gives each its place by a rename. A reader sees whole files only, and none of those
whose writing failed; what a killed process leaves is one hidden folder, `.shardio-...tmp`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Collection

from ..errors import ExistsError, StorageError, printable
from .local import is_temporary, make_directory, remove, sync_directory, token


class Staging:
    """A hidden folder, `path`, whose content becomes that of `directory`.

    replace: files that are there already are replaced; without it they are an error, and so is a
    directory that has anything in it but files of these names, `beside`. name: of the folder, where
    somebody is to find it. Raises ExistsError, StorageError.
    """

    def __init__(
        self,
        directory: str,
        *,
        replace: bool = False,
        beside: Collection[str] = (),
        name: str | None = None,
    ) -> None:
        self._directory, self._replace = directory, replace
        self._new_folders = _missing(directory)  # to be removed again, if nothing comes of it
        make_directory(directory)
        if not replace:
            refuse_taken(directory, beside)
        self.path = os.path.join(directory, name or f".shardio-{token()}-staging.tmp")
        try:
            os.mkdir(self.path)
        except OSError as error:
            self._unmake()
            raise _refused(self.path, error) from None

    def commit(self) -> None:
        """Move everything to its place, and flush the directories; files are flushed before."""
        _move(self.path, self._directory, self._replace)
        self._new_folders = []

    def discard(self) -> None:
        """Remove what was not moved; fine after `commit`, too."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._unmake()

    def _unmake(self) -> None:
        with contextlib.suppress(OSError):  # another put something there
            for path in self._new_folders:
                os.rmdir(path)


def refuse_taken(directory: str, beside: Collection[str]) -> None:
    """Raise ExistsError where a directory has anything in it but files of these names."""
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return
    except OSError as error:
        raise _refused(directory, error) from None
    taken = [name for name in names if not is_temporary(name) and name not in beside]
    if taken:
        raise ExistsError(
            f"{printable(directory, 4096)}: is not empty, {printable(taken[0])} is in it; "
            "choose an empty directory, or replace files with --overwrite"
        )


def _missing(directory: str) -> list[str]:
    """Return the folders that `make_directory` will make, innermost first."""
    folders = []
    path = os.path.abspath(directory)
    while not os.path.lexists(path):
        folders.append(path)
        path = os.path.dirname(path)
    return folders


def _move(source: str, target: str, replace: bool) -> None:
    """Move the content of one folder into another, which is there, and remove the first."""
    try:
        names = sorted(os.listdir(source), key=os.fsencode)
        for name in names:
            old, new = os.path.join(source, name), os.path.join(target, name)
            try:
                if os.path.isdir(old):
                    _move_folder(old, new, replace)
                elif replace:
                    os.replace(old, new)
                    remove(old)  # rename leaves two links to one file as they are
                elif os.path.lexists(new):  # since the directory was found empty
                    raise ExistsError(f"{printable(new, 4096)}: exists")
                else:
                    os.rename(old, new)
            except OSError as error:
                raise _refused(new, error) from None
        os.rmdir(source)
    except OSError as error:
        raise _refused(source, error) from None
    sync_directory(target)


def _move_folder(old: str, new: str, replace: bool) -> None:
    try:
        os.rename(old, new)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        _move(old, new, replace)  # it is there, and has other files: ENOTDIR were it a link


def _refused(path: str, error: OSError) -> StorageError:
    shown = printable(path, 4096)
    if error.errno in (errno.ENOTDIR, errno.EISDIR):
        return StorageError(
            f"{shown}: a file or link is where a folder is to be, or the other way round; move it "
            "away"
        )
    return StorageError(f"{shown}: cannot be written: {error.strerror}")
