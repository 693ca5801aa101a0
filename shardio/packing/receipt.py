"""What an export wrote into a directory, noted there: proof for the next one of what is its own.

`.shardio-export` is one JSON object, in place before the first file takes its name:

    {"what": of which dataset and options, "complete": whether all files have their names,
     "staging": the folder they come from, "files": {path: [[bytes, fingerprint]]}}

`export --overwrite` replaces and removes only files that a receipt vouches for: by path, size, and
the SHA-256 of their first and last 4 KiB. An export that was killed between its last renames is
known by a receipt that is not complete. Names alone prove nothing: `00007.tar` may be anybody's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import DamageError, ShardioError, StorageError
from ..names import file_name
from ..storage import local

NAME = ".shardio-export"
_LIMIT = 256 << 20  # bytes of a receipt
_ENDS = 4096  # bytes of a file's beginning and end


Fingerprint = tuple[int, str]  # size, and fingerprint


@dataclass(frozen=True)
class Receipt:
    """A note of the files that one export wrote, or was about to write."""

    what: str = ""  # equal for equal datasets and options
    complete: bool = True
    staging: str = ""  # name of the folder that the files come from
    # Of each path; several, of the older export too, while files take their names.
    files: Mapping[str, frozenset[Fingerprint]] = field(default_factory=dict)

    def vouches(self, directory: str, path: str) -> bool:
        """Return whether a file of the directory is one that the export wrote."""
        return path in self.files and _fingerprint(directory, path) in self.files[path]

    def begun(self, staging: str, before: Receipt) -> Receipt:
        """Return what is noted before files take their names: over those of `before`."""
        files = dict(before.files)
        for path, fingerprints in self.files.items():
            files[path] = fingerprints | files.get(path, frozenset())
        return Receipt(self.what, False, staging, files)

    def save(self, directory: str) -> None:
        """Put it into place, over an older one."""
        files = {path: sorted(self.files[path]) for path in sorted(self.files)}
        value = vars(self) | {"files": files}
        local.write_file(directory, NAME, json.dumps(value).encode() + b"\n")


def of_files(what: str, directory: str, paths: Iterable[str]) -> Receipt:
    """Return the receipt of an export, for files of a directory."""
    found = {path: _fingerprint(directory, path) for path in paths}
    return Receipt(what, files={path: frozenset((one,)) for path, one in found.items() if one})


def load(directory: str) -> Receipt:
    """Return the receipt in a directory; one of no files where none is, or none can be read."""
    with contextlib.suppress(
        OSError, ShardioError, LookupError, TypeError, ValueError, AttributeError, RecursionError
    ):  # none can be read, or it has another shape
        data = local.LocalDirectory(directory).read(NAME, _LIMIT)
        value: Any = json.loads(data)
        files = {
            str(path): frozenset((int(size), str(seal)) for size, seal in fingerprints)
            for path, fingerprints in value["files"].items()
        }
        if all(map(_is_inside, files)):
            what, staging = str(value["what"]), str(value["staging"])
            return Receipt(what, value["complete"] is True, staging, files)
    return Receipt()


def _fingerprint(directory: str, path: str) -> Fingerprint | None:
    """Return size and fingerprint of a file; None where a link, or no file, has its path."""
    folder, name = os.path.split(os.path.join(os.path.realpath(directory), file_name(path)))
    if os.path.realpath(folder) != folder or os.path.islink(os.path.join(folder, name)):
        return None
    try:
        with contextlib.closing(local.open_file(os.path.join(folder, name), path)) as file:
            size = file.size
            first = file.read(0, min(size, _ENDS))
            last = file.read(max(0, size - _ENDS), min(size, _ENDS))
    except (OSError, StorageError, DamageError):
        return None
    return size, hashlib.sha256(first + last).hexdigest()


def _is_inside(path: str) -> bool:
    """Return whether a path of a receipt, which anybody may have edited, stays in its directory."""
    return "\0" not in path and not any(part in ("", ".", "..") for part in path.split("/"))
