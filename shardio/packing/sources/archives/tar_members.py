"""The members of a tar: one pass over its headers, in which no data are read."""

from __future__ import annotations

from ....errors import DamageError, SourceError, printable
from ....formats.foreign.tar import BLOCK, Alike, Blocks, Readable, Unusable, walk_files
from .member_table import Link, MemberTable, plain_path


def list_tar(file: Readable, shown: str, most: int | None = None) -> MemberTable:
    """Return the members of a tar; of the first ones only, if `most` is given.

    Raises DamageError, SourceError, StorageError.
    """
    table = MemberTable()

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
        paths, take_size, take_start = table.paths, table.sizes.append, table.starts.append
        for name, _, start, stop, _ in walk_files(
            b"", file.size, Blocks(file).fetch, Alike(), other, check=True
        ):
            path = plain_path(name)
            if path:
                paths.append(path)
                take_size(stop - start)
                take_start(start)
            else:
                table.outside.append(name)
            if len(paths) == most:
                break
        else:
            if any(file.read(max(0, file.size - BLOCK), min(BLOCK, file.size))):
                raise ValueError(
                    f"byte {file.size}: it ends without the zeros that end a tar; it was cut short"
                )
    except Unusable as error:
        raise SourceError(f"{shown}: {error}") from None
    except ValueError as error:
        after = f", after member {printable(table.paths[-1])}" if table.paths else ""
        raise DamageError(f"{shown}: {error}{after}") from None
    table.fill()
    return table
