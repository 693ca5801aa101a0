"""What a disk may hold after a power cut: made from a log of all calls of a command.

A `Recording` is the calls of one command below one folder, with their bytes, as strace logs them.
`state` makes what may be there when the power goes after some of them: what was synced is there;
of the rest, each write is there, or not, or some sectors of it, or zeros in its place; of the
changes of names in a directory since it was synced the first ones are there, or any.
"""

import os
import random
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

SECTOR = 512
CALLS = (
    "mkdir,mkdirat,openat,write,pwrite64,fsync,fdatasync,ftruncate,rename,renameat,renameat2,"
    "link,linkat,unlink,unlinkat,rmdir,lseek,copy_file_range,sendfile,fallocate,symlink,symlinkat"
)
OPTIONS = ("-y", "-xx", "-s", "1000000000")

_LINE = re.compile(r"(\d+)\s+(\w+)\((.*)\)\s+= (-?\d+|\?)(.*)$")
_BEGUN = re.compile(r"(\d+)\s+(\w+)\((.*) <unfinished \.\.\.>$")
_RESUMED = re.compile(r"(\d+)\s+<\.\.\. (\w+) resumed>(.*)$")
_WORD = re.compile(r'"((?:\\x..)*)"(?:\.\.\.)?')
_OPENED = re.compile(r"(-?\d+|AT_FDCWD)<((?:\\x..)*)>")


class Call(NamedTuple):
    """A call that succeeded. paths: of its descriptor first; data: of a write, its bytes."""

    name: str
    paths: list[str]
    data: bytes
    numbers: list[int]
    flags: str
    descriptor: int
    returned: int


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


def lines(log: str) -> Iterator[str]:
    """Yield the calls of a log, those that others interrupted in one piece."""
    begun: dict[str, str] = {}
    for line in log.splitlines():
        if found := _BEGUN.match(line):
            begun[found[1]] = f"{found[1]} {found[2]}({found[3]}"
        elif found := _RESUMED.match(line):
            yield begun.pop(found[1]) + found[3]
        else:
            yield line


def calls(log: str) -> Iterator[Call]:
    """Yield the calls of a log that succeeded."""
    for line in lines(log):
        found = _LINE.match(line)
        if found is None or found[4] in ("-1", "?"):
            continue
        name, text = found[2], found[3]
        opened = [(one[1], os.fsdecode(_bytes(one[2]))) for one in _OPENED.finditer(text)]
        bare = _OPENED.sub("fd", text)
        given = [_bytes(one[1]) for one in _WORD.finditer(bare)]
        rest = _WORD.sub("", bare)
        numbers = [int(one) for one in re.findall(r"(?<![\w])-?\d+\b", rest)]
        descriptor = int(opened[0][0]) if opened and opened[0][0] != "AT_FDCWD" else -1
        if name in ("write", "pwrite64"):
            yield Call(name, [opened[0][1]], given[0], numbers, rest, descriptor, int(found[4]))
            continue
        bases = [path for _, path in opened]
        paths = []
        for at, word in enumerate(given):
            base = bases[at] if at < len(bases) else ""
            paths.append(os.path.join(base, os.fsdecode(word)))
        yield Call(name, paths or bases, b"", numbers, rest, descriptor, int(found[4]))


# ------------------------------------------------------------------------------------ what was done


@dataclass
class Write:
    """A change of a file's bytes; None: it gets this size."""

    at: int
    data: bytes | None


@dataclass
class Op:
    """A step, in the order of the log: of a file's bytes, of names in a directory, or a sync."""

    kind: str  # write, names, sync
    node: int = -1  # the file, or what has the new name
    write: Write | None = None
    folder: str = ""
    names: list[tuple[str, int | None]] = field(default_factory=list)  # what they are afterwards


class Recording:
    """The steps of a command below a folder. before: what was there, by relative path."""

    def __init__(self, log: str, folder: Path, before: dict[str, bytes | None]) -> None:
        self.before = before
        self.names = {path: number for number, path in enumerate(before)}
        self.first = [*before.values()]
        self.ops: list[Op] = []
        self._root, self._next = os.fspath(folder), len(before)
        self._open: dict[int, tuple[int, int]] = {}  # by descriptor: node, position
        live = dict(self.names)
        for call in calls(log):
            self._add(call, live)
        self.after = self._contents(live)

    def _inside(self, path: str) -> str | None:
        path = path.removesuffix(" (deleted)")
        if path == self._root:
            return "."
        return os.path.relpath(path, self._root) if path.startswith(self._root + "/") else None

    def _add(self, call: Call, live: dict[str, int]) -> None:
        paths = [self._inside(path) for path in call.paths]
        name = call.name
        if name == "openat" and (path := paths[0]) is not None:
            self._opened(call, path, live)
        elif name in ("write", "pwrite64", "ftruncate", "lseek"):
            if paths[0] is not None and call.descriptor in self._open:
                self._written(call)
        elif name in ("fsync", "fdatasync") and (path := paths[0]) is not None:
            node = self._open.get(call.descriptor, (live.get(path, -1), 0))[0]
            self.ops.append(Op("sync", node, folder=path))
        elif name in ("mkdir", "mkdirat") and (path := paths[0]) is not None:
            self.first.append(None)
            self._name(live, (path, self._new()))
        elif name in ("unlink", "unlinkat", "rmdir") and (path := paths[0]) is not None:
            self._name(live, (path, None))
        elif name in ("rename", "renameat", "renameat2"):
            self._renamed(paths, live)
        elif name in ("link", "linkat") and paths[1] is not None:
            assert paths[0] is not None
            self._name(live, (paths[1], live[paths[0]]))
        elif any(path is not None for path in paths):
            raise AssertionError(f"the recorder does not know {name} of {call.paths}")

    def _new(self) -> int:
        self._next += 1
        return self._next - 1

    def _opened(self, call: Call, path: str, live: dict[str, int]) -> None:
        if path not in live and "O_CREAT" in call.flags:
            self.first.append(b"")
            self._name(live, (path, self._new()))
        elif "O_TRUNC" in call.flags:
            self.ops.append(Op("write", live[path], Write(0, None)))
        if path in live:
            assert "O_APPEND" not in call.flags, "the recorder does not know O_APPEND"
            self._open[call.returned] = (live[path], 0)

    def _written(self, call: Call) -> None:
        node, position = self._open[call.descriptor]
        if call.name == "lseek":
            self._open[call.descriptor] = (node, call.returned)
        elif call.name == "ftruncate":
            self.ops.append(Op("write", node, Write(call.numbers[-1], None)))
        else:
            at = call.numbers[-1] if call.name == "pwrite64" else position
            self.ops.append(Op("write", node, Write(at, call.data[: call.returned])))
            if call.name == "write":
                self._open[call.descriptor] = (node, at + call.returned)

    def _renamed(self, paths: list[str | None], live: dict[str, int]) -> None:
        old, new = paths
        if old is None or new is None:
            assert old is None and new is None, "renamed out of the folder, or into it"
            return
        node = live[old]
        changes: list[tuple[str, int | None]] = [(old, None), (new, node)]
        for path in [path for path in live if path.startswith(old + "/")]:
            changes += [(path, None), (new + path[len(old) :], live[path])]
        self._name(live, *changes)

    def _name(self, live: dict[str, int], *changes: tuple[str, int | None]) -> None:
        for path, node in changes:
            if node is None:
                live.pop(path)
            else:
                live[path] = node
        self.ops.append(
            Op("names", folder=os.path.dirname(changes[-1][0]) or ".", names=[*changes])
        )

    def _contents(self, names: dict[str, int]) -> dict[str, bytes | None]:
        files = [None if one is None else bytearray(one) for one in self.first]
        for op in self.ops:
            if op.kind == "write" and op.write is not None:
                _put(files[op.node], op.write)
        found = {path: files[node] for path, node in names.items()}
        return {path: None if one is None else bytes(one) for path, one in found.items()}

    # ------------------------------------------------------------------------------- what may be

    def state(self, cut: int, draw: random.Random) -> dict[str, bytes | None]:
        """Return what may be there when the power goes after so many steps."""
        done = self.ops[:cut]
        names = dict(self.names)
        any_order = draw.random() < 0.5
        for folder in dict.fromkeys(op.folder for op in done if op.kind == "names"):
            here = [at for at, op in enumerate(done) if op.kind == "names" and op.folder == folder]
            syncs = [at for at, op in enumerate(done) if op.kind == "sync" and op.folder == folder]
            sure = sum(at < max(syncs, default=-1) for at in here)
            kept = draw.randint(sure, len(here))
            for number, at in enumerate(here):
                later = draw.random() < 0.5 if any_order else number < kept
                if number < sure or later:
                    for path, node in done[at].names:
                        if node is None:
                            names.pop(path, None)
                        else:
                            names[path] = node
        return self._bytes(done, names, draw)

    def _bytes(
        self, done: list[Op], names: dict[str, int], draw: random.Random
    ) -> dict[str, bytes | None]:
        found: dict[str, bytes | None] = {}
        for path, node in sorted(names.items()):
            parent = os.path.dirname(path)
            if parent and parent not in names:
                continue  # its directory is not there
            first = self.first[node]
            if first is None:
                found[path] = None
                continue
            data = bytearray(first)
            synced = [at for at, op in enumerate(done) if op.kind == "sync" and op.node == node]
            for at, op in enumerate(done):
                if op.kind == "write" and op.node == node and op.write is not None:
                    if at < max(synced, default=-1):
                        _put(data, op.write)
                    else:
                        _maybe_put(data, op.write, draw)
            found[path] = bytes(data)
        return {path: data for path, data in found.items() if path != "."}


def _put(data: bytearray | None, write: Write) -> None:
    assert data is not None
    if write.data is None:
        del data[write.at :]
        data.extend(bytes(write.at - len(data)))
        return
    data.extend(bytes(max(0, write.at - len(data))))
    data[write.at : write.at + len(write.data)] = write.data


def _maybe_put(data: bytearray, write: Write, draw: random.Random) -> None:
    """Do a write, or not, or a part of it."""
    what = draw.choice(("all", "nothing", "zeros", "sectors"))
    if write.data is None:
        if what in ("all", "zeros"):
            _put(data, write)
        return
    if what == "all":
        _put(data, write)
    elif what != "nothing":
        end = write.at + len(write.data)
        data.extend(bytes(max(0, end - len(data))))
        for sector in range(write.at // SECTOR, -(-end // SECTOR)):
            start = max(write.at, sector * SECTOR)
            stop = min(end, (sector + 1) * SECTOR)
            if what == "sectors" and draw.random() < 0.5:
                data[start:stop] = write.data[start - write.at : stop - write.at]


def look(folder: Path) -> dict[str, bytes | None]:
    """Return what lies below a folder, and the folder itself, if it is there."""
    found: dict[str, bytes | None] = {".": None} if folder.is_dir() else {}
    for path in sorted(folder.rglob("*")):
        name = os.path.relpath(path, folder)
        found[name] = None if stat.S_ISDIR(path.lstat().st_mode) else path.read_bytes()
    return found


def become(folder: Path, wanted: dict[str, bytes | None]) -> None:
    """Let a folder hold this; files that are as wanted stay untouched."""
    for name, data in sorted(look(folder).items(), reverse=True):
        path = folder / name
        if name != "." and (name not in wanted or (data is None) != (wanted[name] is None)):
            path.rmdir() if data is None else path.unlink()
    for name, data in sorted(wanted.items()):
        path = folder / name
        if data is None:
            path.mkdir(parents=True, exist_ok=True)
        elif not path.is_file() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
