"""The parts of an export: each writes files into a folder of its own, and a last call joins them.

`.shardio-SEAL-part-2-of-3.tmp` lies in the directory that is exported into; SEAL tells the export
from others. Its files are numbered from 0: which numbers they get is known when all parts are
there. `.shardio-part`, written last, notes what the part wrote; a folder without it, or without a
file of it, is no part yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import ExistsError, ShardioError, printable
from ..names import file_name
from ..storage import local
from ..storage.local import LocalDirectory
from ..storage.lock import JOURNAL
from . import output_dir

NOTE = ".shardio-part"
_LIMIT = 256 << 20  # bytes of a note


@dataclass(frozen=True)
class Written:
    """What a part wrote, as its note says."""

    records: int = 0
    without: int = 0
    fields: Mapping[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    learned: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)  # by path, and their bytes


def folder_name(what: str, part: tuple[int, int]) -> str:
    """Return the name of the folder of a part, of the export that `what` tells from others."""
    return f".shardio-{what[:16]}-part-{part[0]}-of-{part[1]}.tmp"


def begun(target: str, what: str) -> int:
    """Return in how many parts an export was begun in a directory; 0: in none.

    Raises ExistsError where there are some of several numbers.
    """
    pattern = re.compile(rf"\.shardio-{what[:16]}-part-\d+-of-(\d+)\.tmp")
    names = os.listdir(target) if os.path.isdir(target) else []
    found = {int(name[1]): name[0] for name in map(pattern.fullmatch, names) if name}
    if len(found) > 1:
        raise ExistsError(
            f"{printable(target, 4096)}: parts of several exports are here, such as "
            f"{' and '.join(found[parts] for parts in sorted(found))}. Remove the folders of all "
            "but one number of parts"
        )
    return next(iter(found), 0)


def owned(
    target: str, what: str, part: tuple[int, int] | None, parts: int = 0
) -> contextlib.AbstractContextManager[object]:
    """Own a directory for a part, or for the last call where there were parts.

    parts: that were begun. They may be there without a journal, which a last call that failed has
    removed. Raises BusyError, ExistsError.
    """
    if not (part or parts or os.path.lexists(os.path.join(target, JOURNAL))):
        return contextlib.nullcontext()
    local.make_directory(target)
    places = None if part is None else range(part[0] - 1, part[0])
    owner = output_dir.own_unplanned(target, bytes.fromhex(what), resumes=True, shards=places)
    return owner.for_one_call() if part is None else owner


def save(folder: str, written: Written) -> None:
    """Note what a part wrote into its folder, all of which is there."""
    local.write_file(folder, NOTE, json.dumps(vars(written)).encode())


def load(folder: str) -> Written | None:
    """Return what a part wrote into its folder; None where it has not, or not all is there."""
    with contextlib.suppress(FileNotFoundError, ShardioError, TypeError, ValueError):
        written = Written(**json.loads(LocalDirectory(folder).read(NOTE, _LIMIT)))
        for path, size in written.files.items():
            if os.lstat(os.path.join(folder, file_name(path))).st_size != size:
                return None
        return written
    return None


def remove(target: str, what: str, parts: int) -> None:
    """Remove the folders of all parts."""
    for part in range(1, parts + 1):
        path = os.path.join(target, folder_name(what, (part, parts)))
        shutil.rmtree(path, ignore_errors=True)
