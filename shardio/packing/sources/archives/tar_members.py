"""The members of a tar: one pass over its headers, in which no data are read."""

from __future__ import annotations

from itertools import compress

from ....errors import DamageError, SourceError, printable
from ....formats.foreign.tar import (
    BLOCK,
    Alike,
    Blocks,
    Other,
    Readable,
    Unusable,
    plain_run,
    walk_files,
)
from .member_table import Link, MemberTable, plain_path, plain_paths

_HEADERS = 3 * BLOCK  # a pax header, what it holds, and the header of the member
_FAR = 16 << 10  # bytes of a member that is not read to get behind it: 10 % faster than 32 KiB
_FEW = 16  # a run of fewer members is not worth the comparing at once
_ODD = 64  # members that are walked one by one behind such a run; twice as many behind the next


def list_tar(
    file: Readable, shown: str, most: int | None = None, table: MemberTable | None = None
) -> MemberTable:
    """Return the members of a tar; of the first ones only, if `most` is given.

    table: of first ones, to go on behind these. Raises DamageError, SourceError, StorageError.
    """
    table = MemberTable() if table is None else table

    def other(name: bytes, kind: bytes, at: int, length: int, link: bytes) -> int:
        path = plain_path(name)
        if kind in b"VD":  # the label of the volume; a folder, with a list of the files in it
            if kind == b"D" and path:
                table.folders.add(path)
            return length
        if path is None:
            table.outside.append(name)
        elif kind == b"5":
            if path:
                table.folders.add(path)
        elif kind == b"1":
            table.add_hard_link(path, link)
        elif kind == b"2":
            table.links.append(Link(path, link, len(table.paths)))
        elif kind in b"346":
            what = "FIFO" if kind == b"6" else "device"
            table.problems.append((path, f"is a {what}, not a file; it was not opened"))
        else:
            why = {b"S": "is sparse: its holes are left out", b"M": "goes on in another file"}
            raise Unusable(
                f"byte {at}: {printable(name)} "
                f"{why.get(kind, f'is of an unknown type, {printable(kind)!r}')}. Pack the files "
                "again, as plain members"
            )
        return 0

    try:
        _add_files(file, table, other, file.size if most is None else most)
    except Unusable as error:
        raise SourceError(f"{shown}: {error}") from None
    except ValueError as error:
        after = f", after member {printable(table.paths[-1])}" if table.paths else ""
        raise DamageError(f"{shown}: {error}{after}") from None
    table.fill()
    return table


def _add_files(file: Readable, table: MemberTable, other: Other, most: int) -> None:
    """Add members of a tar to a table, up to so many files; other: takes those that are none.

    Raises ValueError, Unusable, StorageError.
    """
    at, size = table.stop, file.size
    fetch, alike, odd = Blocks(file, _HEADERS, _FAR).fetch, Alike(), _ODD
    while at < size and len(table.paths) < most:
        run = plain_run(fetch, at, size, most - len(table.paths))
        at = run.stop
        for name in run.folders:
            other(name, b"5", at, 0, b"")
        paths = plain_paths(run.names)
        table.paths += filter(None, paths)
        table.starts.extend(compress(run.starts, paths))
        table.sizes.extend(compress(run.sizes, paths))
        if not all(paths):
            table.outside += [name for name, path in zip(run.names, paths, strict=True) if not path]
        if len(paths) >= _FEW:
            odd = _ODD
            continue
        walked = walk_files(b"", size, fetch, alike, other, check=True, at=at)
        for _ in range(min(odd, most - len(table.paths))):
            if (one := next(walked, None)) is None:
                at = size
                break
            name, _, start, stop, at = one
            if path := plain_path(name):
                table.add(path, stop - start, start)
            else:
                table.outside.append(name)
        odd *= 2
    table.stop = at
    if at >= size and any(file.read(max(0, size - BLOCK), min(BLOCK, size))):
        raise ValueError(f"byte {size}: it ends without the zeros that end a tar; it was cut short")
