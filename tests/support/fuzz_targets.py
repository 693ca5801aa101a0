"""What parses bytes of strangers in Python, each as a function of one input; see tests/fuzz.

A target returns where it took the input, or raises an error of shardio's own. Any other exception
is a fault, and so is one that takes long or much memory. What lies under checksums is sealed again
first, so that an input gets behind them. The first byte of an input names its target.
"""

import contextlib
import gzip
import hashlib
import io
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import xxhash

import shardio
from shardio import ShardDataset
from shardio.errors import ShardioError
from shardio.formats import manifest, version
from shardio.formats.record import RecordShard
from shardio.images import decode, filetype, jpeg_rewrite, jpeg_tiles
from shardio.packing.given_values import read_values
from shardio.packing.sources import tables
from shardio.packing.sources.archives import tar_members, zip_members
from shardio.packing.sources.archives.folder import Inflating, open_archive
from shardio.packing.sources.base import Rejected
from shardio.storage import retry_after
from shardio.storage.memory import MemoryLocation
from support.forging import sealed

MAX_PIXELS = 1 << 18
GOLDEN = Path(__file__).parent.parent / "golden"


class Bytes:
    """A file in memory."""

    descriptor = -1
    name = "here.shard"

    def __init__(self, data: bytes) -> None:
        self.size, self.data = len(data), data

    def read(self, start: int, length: int) -> bytes:
        assert start >= 0 and length >= 0
        if start + length > self.size:
            raise shardio.DamageError(f"{self.name}: cut short")
        return self.data[start : start + length]

    view = read

    def will_need(self, start: int, length: int, **_: bool) -> None: ...

    def close(self) -> None: ...


# --- files of a dataset ---------------------------------------------------------------------------


def of_manifest(data: bytes) -> None:
    """A manifest: what is taken is written again as it was read."""
    found = manifest.parse(sealed(data), "here")
    again = manifest.parse(found.dump(), "here")
    assert again.dump() == found.dump()


def of_splits(data: bytes) -> None:
    """The list of a dataset's splits."""
    manifest.load_splits(MemoryLocation("here", {manifest.SPLITS: sealed(data)}))


def of_tags(data: bytes) -> None:
    """The names of versions."""
    version.parse_tags(sealed(data), MemoryLocation("here", {}))


def sealed_shard(data: bytes) -> bytes:
    """Put the right checksums into what may be a shard, as far as its lengths lead to their places.

    Of record i, and no other, if its checksum is 0: so damage is among the inputs too.
    """
    shard = bytearray(data)
    if len(shard) < 104:
        return data
    (length,) = struct.unpack_from("<I", shard, 32)
    at = 44 + length
    if at + 60 <= len(shard):
        shard[at - 8 : at] = struct.pack("<Q", xxhash.xxh3_64_intdigest(shard[: at - 8]))
    seed = xxhash.xxh3_64_intdigest(bytes(shard[12:32])) >> 32 << 32
    end, _, records = struct.unpack_from("<QQI", shard, len(shard) - 60)
    for i in range(min(records, 1000)):
        if at + 16 > min(end, len(shard)):
            break
        checksum, size = struct.unpack_from("<QI", shard, at)
        if not checksum:
            sealed = xxhash.xxh3_64_intdigest(shard[at + 8 : at + 16 + size], seed + i)
            shard[at : at + 8] = struct.pack("<Q", sealed)
        at += 16 + size
    if end <= len(shard) - 60:
        shard[-16:-8] = struct.pack("<Q", xxhash.xxh3_64_intdigest(shard[end:-16]))
    return bytes(shard)


def of_shard(data: bytes) -> None:
    """A record shard, read by all ways; what two of them read is the same."""
    data = sealed_shard(data)
    shard = RecordShard(Bytes(data), dataset_id=data[16:32])
    records = min(shard.records, 50)
    dict(shard.columns)
    shard.sizes[:].sum()
    read = []
    for record in range(records):
        with contextlib.suppress(ShardioError):
            read.append((record, repr(shard.read(record))))
        with contextlib.suppress(ShardioError):
            shard.key(record)
    scanned = []
    for record in range(records):
        with contextlib.suppress(ShardioError):
            scanned += [(record, repr(one)) for one in shard.scan(record, record + 1)]
    assert scanned == read


# --- a dataset, of which one file is another ------------------------------------------------------


class Base:
    """A small dataset: with dropped and erased records, and added values."""

    def __init__(self) -> None:
        self.top = Path(tempfile.mkdtemp(prefix="shardio-fuzz-"))
        source, self.folder = self.top / "source", self.top / "out"
        for number in range(8):
            path = source / ("cat", "dog")[number % 2] / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"\xff\xd8\xff" + bytes([number]) * 20)
        shardio.pack(source, self.folder, jobs=1, plan=shardio.PlanOptions(max_records=5))
        keys = shardio.open(self.folder, decode=None).keys()
        shardio.drop(self.folder, keys=[keys[1]], erase=True)
        shardio.drop(self.folder, keys=[keys[3]])
        some = keys[:1] + keys[5:]
        shardio.annotate(
            self.folder, {key: {"note": "n" * 3, "label": 1} for key in some}, missing="none"
        )
        self.files = {path.name: path.read_bytes() for path in self.folder.iterdir()}

    def remove(self) -> None:
        """Take it away again."""
        shutil.rmtree(self.top)

    def names(self) -> list[str]:
        """Return its files but the manifest, those that it names."""
        listed = self.files["manifest.json"]
        return sorted(name for name in self.files if name.encode() in listed)


@contextlib.contextmanager
def base() -> Iterator[Base]:
    """Make a base, and remove it."""
    one = Base()
    try:
        yield one
    finally:
        one.remove()


def of_dataset(there: Base, data: bytes) -> None:
    """A dataset one of whose files is this: byte 0 says which, and of the manifest which line."""
    names = there.names()
    which, data = data[0] if data else 0, data[1:]
    body = there.files["manifest.json"]
    body = body[: body.rindex(b'"sha256"')]
    if which < len(names):
        name = names[which]
        if name.endswith(".shard"):
            data = sealed_shard(data)
            body = _with_index_checksum(body, there.files[name], data)
        old, new = there.files[name], hashlib.sha256(data).hexdigest()
        changed = name.replace(hashlib.sha256(old).hexdigest()[:8], new[:8])
        body = body.replace(name.encode(), changed.encode())
        body = body.replace(hashlib.sha256(old).hexdigest().encode(), new.encode())
        body = body.replace(
            b'%d,"%s' % (len(old), new.encode()), b'%d,"%s' % (len(data), new.encode())
        )
        files = {changed: data}
    else:
        lines = body.splitlines(keepends=True)
        lines[which % len(lines)] = data + b"\n"
        body, files = b"".join(lines), {}
    written = {"manifest.json": sealed(body), **files}
    kept = {name: (there.folder / name).read_bytes() for name in written if name in there.files}
    for name, content in written.items():
        (there.folder / name).write_bytes(content)
    try:
        use(there.folder)
    finally:
        for name in written:
            (there.folder / name).unlink()
        for name, content in kept.items():
            (there.folder / name).write_bytes(content)


def _with_index_checksum(body: bytes, old: bytes, new: bytes) -> bytes:
    """Name the checksum that a shard has now, and the records that it says it has."""
    if len(new) < 60:
        return body
    (was,), (now,) = struct.unpack("<Q", old[-16:-8]), struct.unpack("<Q", new[-16:-8])
    return body.replace(b"%016x" % was, b"%016x" % now)


def use(folder: Path) -> None:
    """Read a dataset by all roads. What is damaged must be an error of shardio's own."""
    with contextlib.suppress(ShardioError):
        for _ in ShardDataset(folder, batch_size=4, decode=None):
            pass
    with contextlib.suppress(ShardioError):
        list(shardio.open(folder, decode=None))
    there = shardio.open(folder, decode=None)
    for number in range(min(len(there), 8)):
        with contextlib.suppress(ShardioError):
            there[number]
    for field in ("label", "note"):
        with contextlib.suppress(ShardioError):
            there.columns(field)
    with contextlib.suppress(ShardioError):
        there.keys()
    shardio.verify(folder, jobs=1)


# --- files of others ------------------------------------------------------------------------------

# How a file of a format is called, where the format is found by that.
FOREIGN = {
    "webdataset": "x.tar",
    "tfrecord": "x.tfrecord",
    "parquet": "x.parquet",
    "arrow": "x.arrow",
    "recordio": "x.rec",
    "mds": "index.json",
    "litdata": "index.json",
}


def of_foreign(scratch: Path, data: bytes) -> None:
    """A file that another tool wrote: byte 0 says of which format. It is indexed, then read."""
    format = [*FOREIGN][data[0] % len(FOREIGN)] if data else "webdataset"
    data = data[1:]
    with tempfile.TemporaryDirectory(dir=scratch) as top:
        folder, out = Path(top) / "in", Path(top) / "out"
        folder.mkdir()
        if format in ("mds", "litdata"):
            size = min(int.from_bytes(data[:2], "little"), len(data))
            (folder / FOREIGN[format]).write_bytes(data[2 : 2 + size])
            (folder / {"mds": "shard.00000.mds", "litdata": "chunk-0-0.bin"}[format]).write_bytes(
                data[2 + size :]
            )
        else:
            (folder / FOREIGN[format]).write_bytes(data)
        shardio.index(folder, out=out, format=format, jobs=1)
        use(out)


def of_archive(scratch: Path, data: bytes) -> None:
    """An archive that is packed from: byte 0 says which, and how it is read."""
    kind, data = data[0] % 4 if data else 0, data[1:]
    if kind < 2:
        table = (tar_members.list_tar, zip_members.list_zip)[kind](Bytes(data), "here")
        assert len(table.paths) < 10_000
        return
    if kind == 3:
        data = gzip.compress(data, 1, mtime=0)
    path = scratch / ("x.zip", "x.tar.gz")[kind - 2]
    path.write_bytes(data)
    with tempfile.TemporaryDirectory(dir=scratch) as own:
        folder, _ = open_archive(os.fsencode(path), Inflating(own))
        walked = folder.walk()
        with folder.opened() as read:
            files = zip(walked.keys, walked.sizes.tolist(), walked.mtimes.tolist(), strict=True)
            for key, size, stamp in islice(files, 20):
                with contextlib.suppress(ShardioError, Rejected):
                    read(key, size, stamp)


def of_table(scratch: Path, data: bytes) -> None:
    """A table of values: byte 0 says of which kind."""
    endings = ("csv", "tsv", "jsonl", "json", "npy", "parquet", "txt")
    ending, data = endings[data[0] % len(endings)] if data else "csv", data[1:]
    path = scratch / f"x.{ending}"
    path.write_bytes(data)
    if ending == "txt":
        tables.read_plain(os.fsencode(path))
        return
    found = read_values(str(path), None, None)
    for _, get in found.fields.values():
        for row in range(min(len(found.keys or ()), 20)):
            get(row)


# --- images, answers, states ----------------------------------------------------------------------


def of_image(data: bytes) -> None:
    """What looks into image files in Python: what is rewritten has the pixels of the original."""
    filetype.image_type(data[:64])
    jpeg_tiles.tiles(data)
    with contextlib.suppress(ShardioError):
        decode.upright_size(data)
    before = None
    with contextlib.suppress(ShardioError):
        before = decode.pixels(data, max_pixels=MAX_PIXELS)
    with contextlib.suppress(ShardioError):
        after = jpeg_rewrite.rewrite(data, max_pixels=MAX_PIXELS)
        if isinstance(after, bytes) and before is not None:
            assert np.array_equal(decode.pixels(after, max_pixels=MAX_PIXELS), before)


def of_answer(data: bytes) -> None:
    """What a server said, as text."""
    retry_after.seconds(data.decode("latin-1"))


def of_state(there: Base, data: bytes) -> None:
    """A saved state."""
    try:
        state = json.loads(data)
    except (ValueError, RecursionError):
        return
    one = ShardDataset(there.folder, batch_size=2, decode=None)
    one.load_state_dict(state)
    for _ in one:
        pass


Target = Callable[[bytes], None]


@contextlib.contextmanager
def targets() -> Iterator[dict[str, Target]]:
    """Give all targets by the letters that name them."""
    with base() as there:
        scratch = there.top
        yield {
            "m": of_manifest,
            "s": of_splits,
            "g": of_tags,
            "r": of_shard,
            "d": lambda data: of_dataset(there, data),
            "f": lambda data: of_foreign(scratch, data),
            "a": lambda data: of_archive(scratch, data),
            "t": lambda data: of_table(scratch, data),
            "i": of_image,
            "h": of_answer,
            "x": lambda data: of_state(there, data),
        }


def run(all_targets: dict[str, Target], data: bytes) -> str:
    """Give an input to its target, and return what it was: "taken", an error's name, or ""."""
    target = all_targets.get(chr(data[0])) if data else None
    if target is None:
        return ""
    try:
        target(data[1:])
    except ShardioError as error:
        str(error).encode("utf-8")  # it can be printed
        return type(error).__name__
    return "taken"


# --- what to begin with ---------------------------------------------------------------------------


def seeds() -> Iterator[bytes]:
    """Yield an input of each kind, from golden files and from what is packed here."""
    with base() as there:
        for folder in (there.folder, GOLDEN / "v0", GOLDEN / "v1"):
            for path in sorted(folder.glob("manifest*.json")):
                body = path.read_bytes()
                yield b"m" + body[: body.rindex(b'"sha256"')]
            for path in sorted(folder.glob("*.shard")):
                yield b"r" + path.read_bytes()
        for which, name in enumerate(there.names()):
            yield b"d" + bytes([which]) + there.files[name]
        lines = there.files["manifest.json"].splitlines()[:-2]
        for number, line in enumerate(lines):
            yield b"d" + bytes([2 * len(lines) + number]) + line
        dataset = ShardDataset(there.folder, batch_size=2, decode=None)
        taken = iter(dataset)
        next(taken)
        yield b"x" + json.dumps(dataset.state_dict()).encode()
    yield (
        b"s"
        + b'{\n"format": "shardio-splits",\n"version": 0,\n"library": "0.1.0",\n'
        + (b'"splits": ["train","val"],\n"classes": ["cat","dog"],\n')
    )
    yield (
        b"g"
        + b'{\n"format": "shardio-tags",\n"version": 1,\n"library": "0.2.0",\n'
        + (b'"tags": {"v1":"0123456789abcdef"},\n')
    )
    small = 64 << 10
    for number, (format, name) in enumerate(FOREIGN.items()):
        ending = Path(name).suffix
        for path in sorted((GOLDEN / format).rglob(f"*{ending}")):
            if ending == ".json":
                data = [one for one in path.parent.iterdir() if one.suffix in (".mds", ".bin")]
                if len(data) != 1:
                    continue
                index, content = path.read_bytes(), data[0].read_bytes()
                whole = struct.pack("<H", len(index)) + index + content
            else:
                whole = path.read_bytes()
            if len(whole) < small:
                yield b"f" + bytes([number]) + whole
    for path in sorted((GOLDEN / "webdataset").glob("*.tar")):
        if path.stat().st_size < small:
            yield b"a\0" + path.read_bytes()
            yield b"a\3" + path.read_bytes()
    yield from _zips()
    yield b't\0key,label,score,name\na.jpg,1,0.5,x\nb.jpg,2,,"y\n z"\n'
    yield b"t\1key\tlabel\na\t1\n"
    yield b't\2{"key":"a","label":1,"boxes":[[1,2,3,4]]}\n{"key":"b","label":null}\n'
    yield b't\3[{"key":"a","label":1}]'
    array = io.BytesIO()
    np.save(array, np.arange(12, dtype=np.float32).reshape(4, 3))
    yield b"t\4" + array.getvalue()
    yield b"t\6n01440764 tench\nn01443537 goldfish\n"
    for path in sorted((Path(__file__).parent.parent / "fuzz" / "seeds").glob("p-*"))[:40]:
        yield b"i" + path.read_bytes()[1:]
    yield b"hWed, 21 Oct 2015 07:28:00 GMT"
    yield b"h120"


def _zips() -> Iterator[bytes]:
    import zipfile

    for way in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        for comment in (b"", b"some words"):
            file = io.BytesIO()
            with zipfile.ZipFile(file, "w", way) as zipped:
                for name in ("cat/1.jpg", "dog/é.jpg", "dog/deep/2.png"):
                    zipped.writestr(zipfile.ZipInfo(name), b"\xff\xd8\xff" + name.encode() * 9, way)
                zipped.comment = comment
            yield b"a\1" + file.getvalue()
            yield b"a\2" + file.getvalue()
