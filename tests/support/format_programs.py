"""What test_every_format.py does to datasets, in processes of their own: a signal is a failure.

    format_programs.py MODE FOLDER ...

    read       read a dataset, and index its files into another folder; write nothing into its own
    damage     flip, cut, swap and replace the files of a dataset, and read it
    unindexed  flip and cut files before they are indexed
    cut        cut files short while a reader has them open
    kill       kill processes that read what their parent has open, and go on

The outcome is JSON on stdout. Wrong content, an error that is not shardio's, a signal, a hang: the
process fails. It imports neither torch nor pytest, and so takes 0.3 s.
"""

import json
import os
import random
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import shardio
from shardio import ShardioError, formats
from shardio.formats.base import Shard
from shardio.formats.manifest import MANIFEST, load
from shardio.names import key_bytes
from shardio.packing.index import index
from shardio.packing.receipt import NAME as RECEIPT
from shardio.packing.verify import verify
from shardio.storage.location import locate

UNREAD = (".idx", ".lst", ".json")  # what formats have beside their data, for indexing alone
Read = Callable[[], Any]


def files(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files of the data, and those that shardio made beside them."""
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != RECEIPT)
    made = [path for path in found if path.name == MANIFEST or path.suffix == ".index"]
    return [path for path in found if path not in made and path.suffix not in UNREAD], made


def samples(folder: Path, **options: Any) -> list[Any]:
    return list(shardio.open(folder, decode=None, **options))


# --- reading what may be damaged --------------------------------------------------------------


def readings(folder: Path) -> Iterator[tuple[int, Read]]:
    """The ways to a single record, with its number. Raises ShardioError for the manifest."""
    storage = locate(folder)
    made = load(storage)
    opening, first = made.opening(storage), 0
    for info in map(made.shard, range(made.shards)):
        try:
            shard = formats.open_shard(made.format, opening, info)
        except (ShardioError, FileNotFoundError) as error:
            yield from ((first + i, partial(_raise, error)) for i in range(info.records))
        else:
            for i in range(info.records):
                yield first + i, partial(shard.read, i)
                yield first + i, partial(_hold, shard, i)
            shard.close()
        first += info.records


def _raise(error: Exception) -> Any:
    raise error


def _hold(shard: Shard, record: int) -> Any:
    held = shard.hold(record, record + 1)[0]
    return shard.read(record) if held is None else shard.decode(record, held)


def reported(folder: Path, right: list[Any]) -> bool:
    """Whether reading all of it says that something is wrong. Wrong content fails."""
    found = False
    try:
        assert samples(folder) == right, "wrong content in order"
    except ShardioError:
        found = True
    try:
        keys = [values["__key__"] for values in right]
        assert shardio.open(folder).keys() == keys, "wrong keys"
    except ShardioError:
        found = True
    stored = [values | {"__key__": key_bytes(values["__key__"])} for values in right]
    try:
        for record, read in readings(folder):
            try:
                assert read() == stored[record], f"wrong content of record {record}"
            except (ShardioError, FileNotFoundError):
                found = True
    except ShardioError:
        found = True
    return found


# --- what happens to files --------------------------------------------------------------------


def flipped(paths: list[Path], draw: random.Random, count: int) -> Iterator[tuple[Path, bytes]]:
    """One bit, anywhere in these files."""
    for path in draw.choices(paths, [path.stat().st_size for path in paths], k=count):
        data = bytearray(path.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        yield path, bytes(data)


def cut_off(paths: list[Path], draw: random.Random, count: int) -> Iterator[tuple[Path, bytes]]:
    """Shorter and longer; `count` times each."""
    for path in draw.choices(paths, k=count):
        data = path.read_bytes()
        yield path, data[: draw.randrange(len(data))]
        yield path, data + draw.randbytes(draw.randrange(1, 600))
    yield paths[0], b""


def overwritten(paths: list[Path], draw: random.Random, count: int) -> Iterator[tuple[Path, bytes]]:
    """As long as before: with zeros, with noise, with its own pages in another order."""
    for path in draw.choices(paths, k=count):
        data = path.read_bytes()
        at = draw.randrange(len(data) * 3 // 4)  # what is behind the last record is nobody's
        pages = [data[i : i + 512] for i in range(0, len(data), 512)]
        draw.shuffle(pages)
        noise = draw.randbytes(len(data) - at)
        for content in data[:at] + bytes(len(noise)), data[:at] + noise, b"".join(pages):
            if content != data:
                yield path, content


def swapped(paths: list[Path], draw: random.Random, count: int) -> Iterator[tuple[Path, Path]]:
    """Files that have changed places."""
    pairs = [pair for pair in combinations(paths, 2) if pair[0].suffix == pair[1].suffix]
    for a, b in draw.sample(pairs, min(count, len(pairs))):
        aside = a.with_name("aside")
        for _ in range(2):  # and back
            a.rename(aside)
            b.rename(a)
            aside.rename(b)
            yield a, b


def replaced(path: Path, other: Path) -> Iterator[str]:
    """In turn: nothing, and things that are no file of this dataset."""
    content = path.read_bytes()
    path.unlink()
    links = {"a link to nothing": "nothing", "a link to itself": path.name}
    links |= {"a device": "/dev/zero", "another file": os.path.relpath(other, path.parent)}
    yield "nothing"
    path.mkdir()
    yield "a folder"
    path.rmdir()
    os.mkfifo(path)
    yield "a pipe that nobody writes into"
    path.unlink()
    for what, target in links.items():
        path.symlink_to(target)
        yield what
        path.unlink()
    path.write_bytes(content)


def damage(folder: Path, seed: str, count: str) -> None:
    """Prints how often damage of each kind was done, and found."""
    draw, many = random.Random(int(seed)), int(count)
    right = samples(folder)
    data, made = files(folder)
    assert not reported(folder, right)
    tried: Counter[str] = Counter()
    found: Counter[str] = Counter()

    def look(kind: str, *where: Any) -> None:
        tried[kind] += 1
        try:
            found[kind] += reported(folder, right)
            changes = verify(folder, sha256=True, jobs=1).damages
            assert changes, "`verify` does not see it"
        except ShardioError:  # of `verify`: the manifest
            pass
        except Exception as error:
            raise AssertionError(f"{kind}: {', '.join(map(str, where))}: {error!r}") from error

    for name, paths, times in ("data", data, many), ("index", made, many // 2):
        for kind, do in (("flipped", flipped), ("cut", cut_off), ("overwritten", overwritten)):
            for path, content in do(paths, draw, times if do is flipped else times // 8):
                intact = path.read_bytes()
                path.write_bytes(content)
                look(f"{name} {kind}", path)
                path.write_bytes(intact)
        for number, (a, b) in enumerate(swapped(paths, draw, 3)):
            if number % 2 == 0:
                look(f"{name} swapped", a, b)
        path, other = paths[0], paths[-1]
        for what in replaced(path, other if other != path else folder):
            look(f"{name} replaced", what)
    assert not reported(folder, right)
    print(json.dumps({kind: [number, found[kind]] for kind, number in tried.items()}))


def unindexed(folder: Path, format: str, options: str, seed: str, count: str) -> None:
    """Prints how often damage was found while indexing, was harmless, and changed the content."""
    draw, many, how = random.Random(int(seed)), int(count), json.loads(options)
    right = samples(folder)
    data, made = files(folder)
    for path in made:
        path.unlink()
    index(folder, format=format, jobs=1, **how)
    assert samples(folder) == right
    outcomes: dict[str, Counter[str]] = {}
    for kind, do, times in (("flipped", flipped, many), ("cut", cut_off, many // 3)):
        outcome = outcomes[kind] = Counter(found=0, harmless=0, changed=0)
        for path, content in do(data, draw, times):
            intact = path.read_bytes()
            path.write_bytes(content)
            try:
                index(folder, format=format, jobs=1, overwrite=True, **how)
                outcome["harmless" if samples(folder) == right else "changed"] += 1
            except ShardioError:
                outcome["found"] += 1
            path.write_bytes(intact)
    print(json.dumps(outcomes))


def cut(folder: Path, kept: str = "") -> None:
    """Prints how many records of an open dataset were errors when its files were empty."""
    opened = shardio.open(folder, decode=None)
    right = list(opened)
    if kept:  # by number, too: of row groups that are passed as a whole nothing is kept
        assert [opened[i] for i in range(len(right))] == right
    paths, _ = files(folder)
    for size in (1 << 15, 4096, 512, 1, 0):
        for path in paths:
            os.truncate(path, min(size, path.stat().st_size))
        found = 0
        for i, values in enumerate(right):
            try:
                assert opened[i] == values, f"{size} bytes: wrong content of record {i}"
            except ShardioError:
                found += 1
        with suppress(ShardioError):
            assert list(opened) == right, f"{size} bytes: wrong content"
        if size < min(len(values["image"]) for values in right):
            try:
                samples(folder)
            except ShardioError as error:
                assert str(folder) in str(error), error
            else:
                raise AssertionError(f"nobody sees that the files have {size} bytes")
    print(json.dumps({"errors": found, "records": len(right)}))


def kill(folder: Path, count: str) -> None:
    """Half of the killed read what their parent has open, half what they opened."""
    # Python 3.12 warns of every fork in a process with threads, and pyarrow has some.
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*multi-threaded")
    opened = shardio.open(folder, decode=None)
    right = list(opened)
    there = sorted(os.listdir(folder))
    for number in range(int(count)):
        child = os.fork()
        if child == 0:
            try:
                mine = opened if number % 2 else shardio.open(folder, decode=None)
                reader = iter(mine)
                assert next(reader) == right[0] and mine[len(right) // 2] == right[len(right) // 2]
                os.kill(os.getpid(), signal.SIGKILL)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert opened[number % len(right)] == right[number % len(right)]
    assert list(opened) == right == samples(folder)
    assert sorted(os.listdir(folder)) == there
    print(json.dumps({"killed": int(count)}))


def read(folder: Path, *elsewhere: str) -> None:
    """Prints what kind of error a write into the folder is. elsewhere: a format, and a folder."""
    right = samples(folder)
    opened = shardio.open(folder, decode=None)
    assert [opened[i] for i in range(len(right))] == right
    if elsewhere:
        format, out = elsewhere
        index(folder, format=format, out=out, jobs=1)
        again = samples(Path(out), storage=shardio.Storage(root=folder))
        assert [values["image"] for values in again] == [values["image"] for values in right]
    paths, made = files(folder)
    maps = Path("/proc/self/maps").read_text() if os.path.exists("/proc/self/maps") else ""
    assert not any(str(path) in maps for path in (*paths, *made)), "a file is mapped"
    assert "lmdb" not in sys.modules
    try:
        (folder / "new").write_bytes(b"")
    except OSError as error:
        print(json.dumps({"records": len(right), "errno": error.errno}))
    else:
        (folder / "new").unlink()
        print(json.dumps({"records": len(right), "errno": None}))


if __name__ == "__main__":
    mode, folder, *more = sys.argv[1:]
    {"damage": damage, "unindexed": unindexed, "cut": cut, "kill": kill, "read": read}[mode](
        Path(folder), *more
    )
