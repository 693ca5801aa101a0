"""Files of every kind, in every format, damaged: what each reader then gives is right, or an error.

P1: a record that you get is the one that was packed, or an error names the place. Records whose
bytes are whole are read (the exact ones in record shards; else those of the other shards), and
damage of what is under a checksum is seen.
"""

import io
import os
import random
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import growing
from support.conformance import same
from support.every_format import FORMATS, Made, of_size
from support.trees import noise

import shardio
from shardio import ShardDataset, ShardioError, ShardLoader, SkipError
from shardio.formats.manifest import load
from shardio.names import KEY
from shardio.packing.annotate import annotate
from shardio.packing.drop import drop
from shardio.packing.verify import verify
from shardio.packing.versions import log, tag
from shardio.storage.location import locate
from shardio.viewer.view import open_view
from trust.section import Section, told, words

Sample = Mapping[str, Any]
OWN = ("record", "lmdb")
COUNTS = (4, 4, 3)  # records of the shards
# What opening or reading a dataset looks at; the others are read by commands of their own.
READ = {"manifest", "shard", "index", "overlay", "exclusion", "file"}
OF_VERSIONS = {"shard", "overlay", "exclusion", "sources"}
UNREAD_BESIDE = (".idx", ".lst", ".json")  # of others, read when they are indexed only


def kind_of(path: Path) -> str:
    """Say what a file of a dataset is."""
    name = path.name
    for begin, kind in {
        "manifest.json": "manifest",
        "manifest-": "older manifest",
        "tags.json": "tags",
        "shardio.json": "splits",
        "excluded-": "exclusion",
        "sources-": "sources",
        "overlay-": "overlay",
        ".shardio-": "hidden",
        "shardio-export": "receipt",
    }.items():
        if name.startswith(begin):
            return kind
    if path.suffix == ".index":
        return "index"
    if path.suffix in (".shard", ".lmdb"):
        return "shard"
    return "beside" if path.suffix in UNREAD_BESIDE else "file"


@dataclass
class Subject:
    """A dataset, what it holds, and where."""

    name: str
    folder: Path
    format: str  # as in the manifest
    compressed: bool = False  # its bytes say not where a record is
    right: dict[str, Sample] = field(default_factory=dict)  # by key, as users get them, undecoded
    keys: list[str] = field(default_factory=list)
    places: list[tuple[str, int]] = field(default_factory=list)  # of each: shard file, number in it
    files: list[Path] = field(default_factory=list)
    kinds: dict[Path, str] = field(default_factory=dict)
    hit: dict[Path, set[str]] = field(default_factory=dict)  # shards of the records of each file
    numbers: list[int] = field(default_factory=list)  # of each record among those stored
    versions: list[str] = field(default_factory=list)  # ids of those that can be read
    of_version: dict[str, list[Sample]] = field(default_factory=dict)

    def learn(self) -> None:
        """Read what there is, while all is whole."""
        data = shardio.open(self.folder, decode=None)
        samples = list(data)
        self.keys = [one[KEY] for one in samples]
        self.right = dict(zip(self.keys, samples, strict=True))
        assert len(self.right) == len(samples)
        self.files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        self.files = [path for path in self.files if kind_of(path) != "hidden"]
        named = (self.folder / "manifest.json").read_text()
        for path in self.files:
            kind = kind_of(path)
            of_older = kind in OF_VERSIONS and path.name not in named
            self.kinds[path] = f"older {kind}" if of_older else kind
        manifest = data.manifest
        names = [manifest.shard(number).name for number in range(manifest.shards)]
        stored = [
            (name, i)
            for name, count in zip(names, manifest.shard_records.tolist(), strict=True)
            for i in range(count)
        ]
        gone = {int(one) for one in dropped_of(self.folder)}
        self.numbers = [number for number in range(len(stored)) if number not in gone]
        self.places = [stored[number] for number in self.numbers]
        assert len(self.places) == len(self.keys)
        self.hit = {path: shard_of(self, path) for path in self.files}
        for one in log(self.folder).versions[1:]:
            if not one.erased and not one.changed:
                self.versions.append(one.id)
                self.of_version[one.id] = list(
                    shardio.open(self.folder, decode=None, version=one.id)
                )


def dropped_of(folder: Path) -> Any:
    """Return the numbers of records that were dropped."""
    from shardio.formats.version import load_excluded

    index = locate(folder)
    return load_excluded(index, load(index))


# ------------------------------------------------------------------------------- what is done to it


def _flip(data: bytearray, draw: random.Random) -> None:
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def _mutate(data: bytearray, draw: random.Random) -> None:
    for _ in range(draw.choice((1, 2, 4, 16))):
        data[draw.randrange(len(data))] = draw.choice((0, 255, draw.randrange(256)))


def _truncate(data: bytearray, draw: random.Random) -> None:
    del data[draw.choice((0, draw.randrange(len(data)), max(0, len(data) - 1))) :]


def _extend(data: bytearray, draw: random.Random) -> None:
    data += draw.choice((b"\0", bytes(512), draw.randbytes(draw.randrange(1, 600))))


def _zero(data: bytearray, draw: random.Random) -> None:
    size = draw.choice((1, 8, 512, 4096, len(data)))
    at = draw.randrange(len(data)) // size * size
    data[at : at + size] = bytes(len(data[at : at + size]))


def _noise(data: bytearray, draw: random.Random) -> None:
    at, size = draw.randrange(len(data)), draw.choice((8, 512, 4096))
    data[at : at + size] = draw.randbytes(len(data[at : at + size]))


def _pages(data: bytearray, draw: random.Random) -> None:
    """Let two blocks change places."""
    size = draw.choice((64, 512, 4096))
    if len(data) > 2 * size:
        a, b = (draw.randrange(len(data) // size) * size for _ in range(2))
        one, other = bytes(data[a : a + size]), bytes(data[b : b + size])
        if len(one) == len(other):
            data[a : a + size], data[b : b + size] = other, one


def _shift(data: bytearray, draw: random.Random) -> None:
    """Lose a byte, and have another one later: as long as before."""
    at = draw.randrange(len(data))
    del data[at]
    data.append(draw.randrange(256))


IN_PLACE: dict[str, Callable[[bytearray, random.Random], None]] = {
    "bit flipped": _flip,
    "bytes changed": _mutate,
    "truncated": _truncate,
    "extended": _extend,
    "block zeroed": _zero,
    "block of noise": _noise,
    "blocks swapped": _pages,
    "shifted": _shift,
}
WHOLE = ("files swapped", "file doubled", "file missing", "foreign file", "a folder", "a pipe")


@contextmanager
def damaged(
    subject: Subject, what: str, draw: random.Random, foreign: list[Path]
) -> Iterator[dict[Path, bytes]]:
    """Damage one file, or two, of a dataset, and put all back.

    Yields the files that differ, with what they were.
    """
    kinds = sorted({*subject.kinds.values()})
    kind = draw.choice([one for one in kinds if one != "beside"])
    path = draw.choice([one for one in subject.files if subject.kinds[one] == kind])
    others = [one for one in subject.files if one != path and subject.kinds[one] == kind]
    before = {path: path.read_bytes()}
    if what == "files swapped" and others:
        other = draw.choice(others)
        before[other] = other.read_bytes()
        path.write_bytes(before[other])
        other.write_bytes(before[path])
    elif what == "file doubled" and others:
        path.write_bytes(draw.choice(others).read_bytes())
    elif what == "foreign file":
        alike = [
            one for one in foreign if kind_of(one) == kind_of(path) and one.suffix == path.suffix
        ]
        path.write_bytes(draw.choice(alike or foreign).read_bytes())
    elif what in ("file missing", "a folder", "a pipe"):
        path.unlink()
        if what == "a folder":
            path.mkdir()
        elif what == "a pipe":
            os.mkfifo(path)
    else:
        data = bytearray(before[path])
        IN_PLACE[what if what in IN_PLACE else "bit flipped"](data, draw)
        path.write_bytes(data)
    try:
        yield {one: data for one, data in before.items() if not _holds(one, data)}
    finally:
        for one, data in before.items():
            if one.is_dir():
                one.rmdir()
            elif not one.is_file():
                one.unlink(missing_ok=True)
            one.write_bytes(data)


def _holds(path: Path, data: bytes) -> bool:
    return path.is_file() and path.read_bytes() == data


# ------------------------------------------------------------------------------- the roads of bytes


class Reading:
    """Reads a damaged dataset by all roads: wrong content fails, errors must say where."""

    def __init__(self, subject: Subject, scratch: Path, draw: random.Random) -> None:
        self.subject, self.scratch, self.draw = subject, scratch, draw
        self.errors: list[ShardioError] = []
        self.survivors: set[str] = set()

    def is_told(self, error: ShardioError) -> bool:
        """Tell whether an error says where: the place, or that a field is missing in a manifest."""
        return str(self.subject.folder) in str(error) or isinstance(error, shardio.OptionError)

    @contextmanager
    def may_fail(self, road: str) -> Iterator[None]:
        """Let an error of shardio pass, which has to name the dataset."""
        try:
            yield
        except AssertionError:
            raise
        except ShardioError as error:
            self.errors.append(error)
            assert self.is_told(error), f"{road}: does not say where: {error}"
        except Exception as error:
            raise AssertionError(f"{road}: {error!r} is no error of shardio") from error

    def is_right(self, road: str, sample: Sample, fields: Any = None) -> None:
        """Compare a sample with the one of its key."""
        right = self.subject.right.get(sample[KEY])
        assert right is not None, f"{road}: there is no record {sample[KEY]!r}"
        wanted = right if fields is None else {name: right[name] for name in fields}
        assert same(dict(sample), dict(wanted)), f"{road}: wrong content of {sample[KEY]!r}"

    def by_number(self, in_order: bool = False) -> None:
        """Read each record: which are still there? in_order: then all again, one by one."""
        with self.may_fail("open"):
            data = shardio.open(self.subject.folder, decode=None)
            count = len(data)
            for number, key in enumerate(self.subject.keys[:count]):
                with self.may_fail("open()[i]"):
                    sample = data[number]
                    assert sample[KEY] == key, f"open()[{number}]: {sample[KEY]!r} for {key!r}"
                    self.is_right("open()[i]", sample)
                    self.survivors.add(key)
            if self.survivors:
                assert count == len(self.subject.keys), "open: another number of records"
            if in_order:
                self.in_order(data)

    def in_order(self, data: Any = None) -> None:
        with self.may_fail("iteration"):
            seen = []
            for sample in data or shardio.open(self.subject.folder, decode=None):
                self.is_right("iteration", sample)
                seen.append(sample[KEY])
            assert seen == self.subject.keys, "iteration: records are missing"

    def columns(self) -> None:
        with self.may_fail("columns"):
            data, right = shardio.open(self.subject.folder, decode=None), self.subject.right
            assert data.keys() == self.subject.keys, "keys() are wrong"
            found = data.columns("label").tolist()
            assert found == [right[key]["label"] for key in self.subject.keys], "columns are wrong"

    def rows(self, road: str, loader: Any, fields: tuple[str, ...]) -> list[str]:
        """Read batches that are lists of tuples; return the keys."""
        keys = []
        for batch in loader:
            for row in batch:
                sample = dict(zip(fields, row, strict=True))
                self.is_right(road, sample, fields)
                keys.append(sample[KEY])
        return keys

    def stream(self, **options: Any) -> tuple[ShardDataset, tuple[str, ...]]:
        fields = tuple(next(iter(self.subject.right.values())))
        data = ShardDataset(
            self.subject.folder,
            batch_size=8,
            fields=fields,
            decode=None,
            collate_fn=list,
            seed=self.draw.randrange(9),
            **options,
        )
        return data, fields

    def dataset(self) -> None:
        with self.may_fail("ShardDataset"):
            keys = self.rows("ShardDataset", *self.stream())
            assert sorted(keys) == sorted(self.subject.keys), "ShardDataset: records are missing"

    def loader(self) -> None:
        with self.may_fail("ShardLoader"):
            data, fields = self.stream()
            processes = 2 * (self.draw.random() < 0.02)  # else threads, which cost less
            with ShardLoader(data, num_workers=processes, threads=1) as loader:
                keys = self.rows("ShardLoader", loader, fields)
            assert sorted(keys) == sorted(self.subject.keys), "ShardLoader: records are missing"

    def skipping(self) -> None:
        """With on_error="skip": each record that can be read comes, and the others are listed."""
        with self.may_fail("on_error"):
            try:
                data, fields = self.stream(on_error=shardio.Skip(most=1.0))
                keys = self.rows("on_error", data, fields)
            except SkipError:
                lost = len(self.subject.keys) - len(self.survivors)
                assert lost >= min(60, len(self.subject.keys) - 8), f"{lost} are too many to skip"
                return
            assert len(keys) == len(self.subject.keys), "on_error: not each row was filled"
            assert {*keys} == self.survivors, "on_error: other records than open()[i] gives"
            assert len(data.skipped) == len(keys) - len(self.survivors), "skipped is no full list"

    def export(self) -> None:
        out = self.scratch / "export"
        with self.may_fail("export"):
            try:
                shardio.export(
                    self.subject.folder, out, format="webdataset", fields={"image": "jpg"}
                )
                assert self.tars(out) == len(self.subject.keys), "export: records are missing"
            finally:
                self.tars(out)
                shutil.rmtree(out, ignore_errors=True)

    def tars(self, out: Path) -> int:
        """Compare the members of exported files; how many there are."""
        right = sorted(one["image"] for one in self.subject.right.values())
        found = []
        for path in sorted(out.glob("*.tar")):
            with tarfile.open(fileobj=io.BytesIO(path.read_bytes())) as archive:
                for member in archive:
                    file = archive.extractfile(member)
                    assert file is not None
                    found.append(file.read())
        for data in found:
            assert data in right, "export: wrong content"
        return len(found)

    def unpack(self) -> None:
        out = self.scratch / "files"
        right = {one["image"] for one in self.subject.right.values()}
        with self.may_fail("unpack"):
            try:
                shardio.unpack(self.subject.folder, out)
                found = [path for path in out.rglob("*") if path.is_file()]
                assert len(found) == len(self.subject.keys), "unpack: files are missing"
            finally:
                for path in out.rglob("*"):
                    if path.is_file() and not path.name.startswith("."):
                        assert path.read_bytes() in right, f"unpack: wrong content: {path}"
                shutil.rmtree(out, ignore_errors=True)

    def copy(self) -> None:
        out = self.scratch / "copy"
        with self.may_fail("copy"):
            try:
                shardio.copy(self.subject.folder, out)
                for sample in shardio.open(out, decode=None):
                    self.is_right("copy", sample)
            finally:
                shutil.rmtree(out, ignore_errors=True)

    def repack(self) -> None:
        out = self.scratch / "packed"
        if self.subject.format == "imagefolder":  # it is packed as what it is now
            return
        with self.may_fail("pack of it"):
            try:
                shardio.pack(self.subject.folder, out, jobs=1)
                images = [one["image"] for one in shardio.open(out, decode=None)]
                right = [one["image"] for one in self.subject.right.values()]
                assert sorted(images) == sorted(right), "pack of it: wrong content"
            finally:
                shutil.rmtree(out, ignore_errors=True)

    def view(self) -> None:
        keys = self.subject.keys
        with self.may_fail("view"), open_view(self.subject.folder) as view:
            for number in self.draw.sample(range(len(keys)), min(5, len(keys))):
                with self.may_fail("view"):
                    image = self.subject.right[keys[number]]["image"]
                    stored = self.subject.numbers[number]
                    assert view.image(stored).data == image, "view: wrong content"
                    assert view.record(stored).key == keys[number], "view: wrong key"

    def versions(self) -> None:
        """Read an older version, and what says which there are."""
        with self.may_fail("log"):
            log(self.subject.folder)
        if self.subject.versions:
            one = self.draw.choice(self.subject.versions)
            with self.may_fail("an older version"):
                found = list(shardio.open(self.subject.folder, decode=None, version=one))
                assert same(found, self.subject.of_version[one]), "an older version: wrong content"

    def verified(self) -> bool:
        """Tell whether `verify --sha256` finds something."""
        try:
            found = verify(self.subject.folder, sha256=True, jobs=1)
            return bool(found.damages or found.hidden)
        except ShardioError:
            return True


ROADS = (
    *("in_order", "columns", "dataset", "loader", "skipping", "export", "unpack", "copy"),
    *("repack", "view", "versions"),
)


# -------------------------------------------------------------------------- what has to be the case


def exact_survivors(subject: Subject, path: Path, before: bytes, after: bytes) -> set[str]:
    """Return the keys that a damaged record shard still has.

    By the lengths that docs/format.md puts into the index, before the damage.
    """
    trailer = before[-60:]
    start, size = (int.from_bytes(trailer[at : at + 8], "little") for at in (0, 8))
    count = int.from_bytes(trailer[16:20], "little")
    index = before[start : start + size]
    described = int.from_bytes(index[:4], "little")
    lengths = [
        int.from_bytes(index[at : at + 4], "little")
        for at in range(4 + described, 4 + described + 4 * count, 4)
    ]
    at = 44 + int.from_bytes(before[32:36], "little")
    if len(after) != len(before) or before[:at] != after[:at] or before[start:] != after[start:]:
        return set()
    good = set()
    for number, length in enumerate(lengths):
        if before[at : at + 16 + length] == after[at : at + 16 + length]:
            good.add(number)
        at += 16 + length
    assert at == start
    name = path.relative_to(subject.folder).as_posix()
    return {
        key
        for key, (shard, number) in zip(subject.keys, subject.places, strict=True)
        if shard == name and number in good
    }


def shard_of(subject: Subject, path: Path) -> set[str]:
    """Return the names of the shards in which a file's records lie."""
    names = [name for name, _ in dict.fromkeys((name, 0) for name, _ in subject.places)]
    relative = path.relative_to(subject.folder).as_posix()
    kind = kind_of(path)
    if kind in ("overlay", "index"):
        number = int(path.name.removeprefix("overlay-")[:5])
        return {load(locate(subject.folder)).shard(number).name}
    hit = {name for name in names if relative == name or relative.startswith(f"{name}/")}
    if kind == "shard":
        return hit or {relative}  # one of whose records all were dropped
    return hit or set(names)  # a run of a folder of images


def check(
    subject: Subject,
    reading: Reading,
    files: list[Path],
    whole: Mapping[Path, bytes],
    always: bool = True,
) -> None:
    """Survivors are those that the damage left, and none is undetected.

    files: which differ; whole: their bytes before. always: ask `verify`, though it was seen.
    """
    kinds = {subject.kinds[path] for path in files}
    if kinds & {"manifest", "exclusion"}:
        assert not reading.survivors, "it was read"
        return
    lost = {name for path in files for name in subject.hit[path]} if kinds & READ else set()
    least = {
        key for key, (name, _) in zip(subject.keys, subject.places, strict=True) if name not in lost
    }
    assert reading.survivors >= least, f"lost: {sorted(least - reading.survivors)[:5]}"
    [path] = files[:1]
    of_record = subject.format == "record" and kinds == {"shard"}
    if of_record and len(files) == 1:
        data = path.read_bytes() if path.is_file() else b""
        exact = exact_survivors(subject, path, whole[path], data)
        other = reading.survivors ^ (least | exact)
        assert not other, f"not the exact survivors: {sorted(other)[:5]}"
    if kinds & READ:
        checked = kinds <= {"index"} or of_record
        if checked and not (subject.format == "record" and _only_dropped(subject, files, whole)):
            assert reading.errors, "undetected by reading all records"
        if always or not reading.errors:
            assert reading.verified(), "undetected by `verify --sha256`"


class Damage(Section):
    """Damages one file, or two, and reads by all roads."""

    name = "damage"
    promise = "P1"
    goal = 200_000

    def prepare(self) -> None:
        os.environ["SOURCE_DATE_EPOCH"] = "1750000000"
        self.scratch = self.folder / "scratch"
        self.scratch.mkdir()
        self.subjects = [*self._formats(), *self._grown()]
        for one in self.subjects:
            one.learn()
        self.foreign = [path for one in self.subjects for path in one.files]

    def _formats(self) -> Iterator[Subject]:
        with of_size(COUNTS, lambda number: noise(f"{number}", 60 + 7 * number)):
            for name, row in FORMATS.items():
                folder = self.folder / name.replace(", ", "-")
                folder.mkdir()
                Made(name, folder)
                yield Subject(name, folder, row.reads or name, row.kept)

    def _grown(self) -> Iterator[Subject]:
        for format in OWN:
            out = growing.grown(self.folder / f"grown-{format}", format, each=2, size=60)
            yield Subject(f"changed {format}", out, format)
        out = self.folder / "grown-tars"
        shutil.copytree(self.folder / "webdataset", out)
        keys = shardio.open(out, decode=None).keys()
        drop(out, keys=keys[1:6:4])
        annotate(
            out, {key: {"score": float(at)} for at, key in enumerate(keys[6:])}, missing="none"
        )
        tag(out, "reviewed")
        yield Subject("changed webdataset", out, "webdataset")

    def case(self, number: int) -> str:
        draw = self.draw(number)
        subject = self.subjects[number % len(self.subjects)]
        what = draw.choice([*IN_PLACE, *IN_PLACE, *WHOLE])
        reading = Reading(subject, self.scratch, draw)
        with damaged(subject, what, draw, self.foreign) as whole:
            files = [*whole]
            if not files:
                return "nothing changed"
            kinds = {subject.kinds[path] for path in files}
            done = f"{subject.name}: {'/'.join(sorted(kinds))}: {what}"
            with told(f"{done}: {', '.join(path.name for path in files)}"):
                reading.by_number()
                for road in draw.sample(ROADS, 2 if number % 20 else len(ROADS)):
                    getattr(reading, road)()
                check(subject, reading, files, whole, always=number % 4 == 0)
        return done

    @classmethod
    def done(cls, kinds: Mapping[str, int], figures: Mapping[str, float]) -> str:
        rows = [one.split(": ") for one in kinds if one.count(": ") == 2]
        formats, files, what = (words(row[at] for row in rows) for at in range(3))
        return (
            f"{len(formats)} datasets, {len(files)} kinds of files, damaged in {len(what)} ways, "
            f"read by {len(ROADS) + 1} roads"
        )


def _only_dropped(subject: Subject, files: list[Path], whole: Mapping[Path, bytes]) -> bool:
    """Tell whether the damage is in records alone that were dropped, which nobody reads."""
    [path] = files[:1]
    if len(files) > 1 or path not in whole or not path.is_file():
        return False
    exact = exact_survivors(subject, path, whole[path], path.read_bytes())
    name = path.relative_to(subject.folder).as_posix()
    every = {
        key for key, (shard, _) in zip(subject.keys, subject.places, strict=True) if shard == name
    }
    return exact == every
