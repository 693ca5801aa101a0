"""The files of datasets of ours, and what is kept beside them, written to do harm.

What lies under checksums is sealed again, so that each case gets behind them.
"""

import hashlib
import itertools
import json
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import shardio
from shardio import ShardDataset
from shardio.errors import DamageError
from shardio.formats import manifest, overlay, version
from shardio.formats.lmdb import LmdbShard
from shardio.formats.record import RecordEncoder, RecordShard
from shardio.packing.versions import log
from shardio.storage.location import locate
from support.conformance import by_hold
from support.forging import FORGED_ID, forge, sealed, sealed_record, xx
from support.fuzz_targets import Bytes, sealed_shard
from support.hostile import (
    GOLDEN,
    SHORT_JUNK,
    Case,
    Family,
    brief,
    cuts,
    json_cases,
    msgpack_cases,
    number_cases,
    pack,
)

FROZEN = GOLDEN / "frozen-1"


def read_all(folder: Path, **storage: Any) -> list[Any]:
    """Read a dataset by number and in order, its columns and keys."""
    data = shardio.open(folder, decode=None, storage=shardio.Storage(**storage))
    found = list(data)
    assert [str(data[number]) for number in range(len(data))] == list(map(str, found))
    for name, kind in data.manifest.schema.fields:
        if kind in ("int", "float", "bool"):
            data.columns(name)
    assert data.keys() == [one["__key__"] for one in found]
    return found


class Dataset:
    """A copy of a dataset, of which one file is another."""

    def __init__(self, golden: Path, folder: Path) -> None:
        self.folder = Path(shutil.copytree(golden, folder))
        self.body = (folder / "manifest.json").read_bytes()
        self.original = read_all(folder)

    def case(self, name: str, files: Mapping[str, bytes], read: Any = read_all) -> Case:
        """Return a case of these files."""

        def work() -> Any:
            for file, data in files.items():
                (self.folder / file).write_bytes(data)
            try:
                return read(self.folder)
            finally:
                for file in files:
                    (self.folder / file).unlink()
                (self.folder / "manifest.json").write_bytes(self.body)

        size = sum(map(len, files.values())) + len(self.body)
        return Case(name, size, work, (f"{self.folder}/",), self.original)

    def instead(self, case: str, name: str, data: bytes, read: Any = read_all) -> Case:
        """Return a case of a file of this name, which the manifest names as if it were the old."""
        body, old = self.body[: self.body.rindex(b'"sha256"')], (self.folder / name).read_bytes()
        before, after = (hashlib.sha256(one).hexdigest() for one in (old, data))
        new = name.replace(before[:8], after[:8]) if before[:8] in name else name
        body = body.replace(name.encode(), new.encode()).replace(before.encode(), after.encode())
        body = body.replace(
            b'%d,"%s' % (len(old), after.encode()), b'%d,"%s' % (len(data), after.encode())
        )
        if len(data) >= 60 and name.endswith((".shard", ".lmdb")):
            was, now = (one[-16:-8][::-1].hex().encode() for one in (old, data))
            body = body.replace(b'"%s"' % was, b'"%s"' % now)
        case_ = self.case(case, {new: data, "manifest.json": sealed(body)}, read)
        return case_


# --- texts under their own SHA-256 ----------------------------------------------------------------


def lines(members: Mapping[str, Any]) -> str:
    """Write members as a manifest has them."""
    parts = []
    for name, value in members.items():
        text = json.dumps(value, separators=(",", ":"))
        if name == "shards" and isinstance(value, list):
            text = "[\n" + ",\n".join(json.dumps(one, separators=(",", ":")) for one in value)
            text += "\n]"
        parts.append(f'"{name}": {text},\n')
    return "{\n" + "".join(parts)


def members(data: bytes) -> dict[str, Any]:
    """Return the members of a manifest, without its seal."""
    found = dict(json.loads(data))
    del found["sha256"]
    return found


def texts(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield what can be done to any such text, before and behind its seal."""
    body = data[: data.rindex(b'"sha256"')]
    yield "empty", b""
    yield "one byte", b"{"
    yield "a BOM", sealed(b"\xef\xbb\xbf" + body)
    yield "UTF-16", body.decode().encode("utf-16")
    yield "no UTF-8", sealed(body.replace(b'"library"', b'"libr\xffry"'))
    yield "CR LF", sealed(body.replace(b"\n", b"\r\n"))
    yield "NUL", sealed(body.replace(b"\n", b"\0\n", 1))
    yield "no seal", body
    yield "another seal", sealed(body).replace(b'"sha256": "', b'"sha256": "0')
    yield "two seals", sealed(sealed(body))
    yield "something behind", sealed(body) + b"x"
    yield "zeros", bytes(len(data))
    yield "a line more", sealed(body.replace(b"{\n", b'{\n"more": 1,\n', 1))
    yield "a member of all that there is", sealed(body + b'"more": ' + b"[" * 9000 + b",\n")
    yield "an array", sealed(b"[" + body[1:])
    yield "another order", sealed(b"".join(sorted(body.splitlines(keepends=True))))
    for size in (1, 10, len(data) // 2, len(data) - 3, len(data) - 1):
        yield f"cut at {size - len(data)}", data[:size]


def of_manifest(top: Path) -> Iterator[Case]:
    """The manifest of a dataset of version 1, with all that one can have."""
    there = Dataset(FROZEN / "compacted", top / "data")
    given = members(there.body)
    for case, text in json_cases(given, dumps=lines):
        yield there.case(case, {"manifest.json": sealed(text.encode())})
    for case, data in texts(there.body):
        yield there.case(case, {"manifest.json": data})


def of_manifest_0(top: Path) -> Iterator[Case]:
    """One of version 0, and what its shards are called."""
    there = Dataset(GOLDEN / "v0", top / "data")
    given = members(there.body)
    for case, text in json_cases(given, SHORT_JUNK, dumps=lines):
        yield there.case(case, {"manifest.json": sealed(text.encode())})
    name = given["shards"][0][0]
    for wrong in NAMES:
        row = [wrong, *given["shards"][0][1:]]
        text = lines(given | {"shards": [row, *given["shards"][1:]]})
        yield there.case(f"a shard {brief(wrong)}", {"manifest.json": sealed(text.encode())})
    for form in ("webdataset", "parquet", "imagefolder"):
        for wrong in NAMES:
            row = [wrong, *given["shards"][0][1:]]
            changed = given | {"shard_format": form, "shards": [row]}
            changed |= {"records": row[1], "bytes": row[2]}
            text = lines(changed)
            case = f"a file of {form} {brief(wrong)}"
            yield there.case(case, {"manifest.json": sealed(text.encode())})
    assert name.endswith(".shard")


# Names that lead out of a dataset, to other hosts, or into a terminal.
NAMES = (
    *("", ".", "..", "/", "../x.shard", "a/../../x", "/etc/passwd", "//evil.example/x", "a//b"),
    *("a/./b", "./x", "x/", "http://evil.example/x", "s3://evil/x", "file:///etc/passwd"),
    *("gs://evil/x", "hf://evil/x", "%2e%2e/x", "..\\x", "C:\\x", "~/x", "x?token=1", "x#y"),
    *("a\0b", "x\n", "\x1b]0;x\a", "\u202egpj.x", "\udcff", "con", "a" * 5000, "a/" * 3000 + "x"),
    *("manifest.json", "tags.json", ".shardio-plan", "00000-9de4c75e.shard.tmp", "-x"),
)


def of_tags(top: Path) -> Iterator[Case]:
    """The names of versions."""
    there = Dataset(FROZEN / "compacted", top / "data")
    ids = [one.id for one in log(there.folder).versions]
    given = {"format": "shardio-tags", "version": 1, "library": "0.2.0", "tags": {"a": ids[-1]}}

    def read(folder: Path) -> Any:
        log(folder)
        return [*shardio.open(folder, decode=None, version="a")]

    there.original = [*shardio.open(there.folder, decode=None, version=ids[-1])]
    for case, text in json_cases(given, dumps=lines):
        yield there.case(case, {"tags.json": sealed(text.encode())}, read)
    for case, data in texts(sealed(lines(given).encode())):
        yield there.case(case, {"tags.json": data}, read)
    for name in ("", "a/b", "\x1b[2J", "n" * 101, "0123", "a\n", "<b>", "\u202e"):
        text = lines(given | {"tags": {name: ids[-1], "a": ids[-1]}})
        yield there.case(f"a tag {brief(name)}", {"tags.json": sealed(text.encode())}, read)


def of_kept(top: Path) -> Iterator[Case]:
    """The manifest of an older version, under the name that its id gives it, or another."""
    there = Dataset(FROZEN / "compacted", top / "data")
    newest = members(there.body)
    older = log(there.folder).versions[1:]
    parent = next(one.id for one in older if not one.erased and not one.changed)
    kept = f"manifest-{parent}.json"
    old = (there.folder / kept).read_bytes()

    def read(folder: Path) -> Any:
        return [*shardio.open(folder, decode=None, version=parent)]

    there.original = read(there.folder)
    for case, data in texts(old):
        one = there.case(case, {}, read)

        def work(one: Case = one, data: bytes = data, inner: Any = one.read) -> Any:
            (there.folder / kept).write_bytes(data)
            try:
                return inner()
            finally:
                (there.folder / kept).write_bytes(old)

        one.read, one.size = work, len(data)
        yield one
    for case, text in json_cases(members(old), SHORT_JUNK, lines):
        body = sealed(text.encode())
        digest = body[-68:-4].decode()
        body_new = lines(newest | {"commit": [digest[:16], *newest["commit"][1:]]})
        there.original = None
        files = {
            f"manifest-{digest[:16]}.json": body,
            "manifest.json": sealed(body_new.encode()),
        }
        name = digest[:16]
        one = there.case(
            case,
            files,
            lambda folder, name=name: [*shardio.open(folder, decode=None, version=name)],
        )
        one.names = (f"{there.folder}/", f"version {name}: ")
        yield one


def of_splits(top: Path) -> Iterator[Case]:
    """The list of splits."""
    folder = Path(shutil.copytree(FROZEN / "splits", top / "data"))
    data = (folder / "shardio.json").read_bytes()

    def case(name: str, text: bytes) -> Case:
        def read() -> Any:
            (folder / "shardio.json").write_bytes(text)
            return [len(shardio.open(folder, split=one, decode=None)) for one in ("train", "val")]

        return Case(name, len(text), read, (f"{folder}",), [8, 1])

    given = members(data)
    for name, text in json_cases(given, dumps=lines):
        yield case(name, sealed(text.encode()))
    for name, one in texts(data):
        yield case(name, one)
    for name in NAMES:
        text = lines(given | {"splits": ["train", "val", name]})
        yield case(f"a split {brief(name)}", sealed(text.encode()))


# --- record shards --------------------------------------------------------------------------------

KINDS = (
    *(
        ("__key__", "key"),
        ("image", "image"),
        ("raw", "bytes"),
        ("mask", "array"),
        ("label", "int"),
    ),
    *(("score", "float"), ("good", "bool"), ("text", "str"), ("more", "json")),
)
HEAD = [b"k", 4, 2, ["|u1", [2, 1]], 7, 0.5, True, "text", {"boxes": [[1, 2]], "name": "x"}]
BLOBS = b"\xff\xd8\xff\xe0rrmm"
COLUMNS = [["label", "|u1", False], ["score", "<f4", False], ["good", "|b1", False]]
COLUMN_BYTES = b"\7" + struct.pack("<f", 0.5) + b"\1"


def read_shard(data: bytes) -> list[Any]:
    """Read a shard by all ways, which must agree; raise the first error."""
    shard = RecordShard(Bytes(data), dataset_id=FORGED_ID)
    found: list[Any] = [{name: shard.columns[name].tolist() for name in sorted(shard.columns)}]
    ways: tuple[Callable[[int], Any], ...] = (
        shard.read,
        lambda record: next(shard.scan(record, record + 1)),
        lambda record: by_hold(shard, record),
    )
    for record in range(min(shard.records, 8)):
        ended, errors = [], []
        for way in ways:
            try:
                ended.append(way(record))
            except DamageError as error:
                errors.append(error)
        if errors:
            assert len(errors) == len(ways), f"only some ways of reading fail: {errors}"
            raise errors[0]
        assert len({repr(one) for one in ended}) == 1, "what is read differs"
        found.append(repr(ended[0]))
        shard.key(record)
    return found


def of_shard(top: Path) -> Iterator[Case]:
    """A record shard: each number, each part of each description, heads of each kind of value."""

    def case(name: str, data: bytes, original: Any = None) -> Case:
        return Case(name, len(data), lambda: read_shard(data), ("here.shard",), original)

    options: dict[str, Any] = {"fields": KINDS, "described": COLUMNS, "columns": COLUMN_BYTES}
    options["hashes"] = xx(b"k")[:4]
    good = sealed_record(pack(HEAD), BLOBS)
    whole = forge([good], **options)
    right = read_shard(whole)
    yield case("as it is", whole, right)
    length = struct.unpack_from("<I", whole, 32)[0]
    first, end = 44 + length, len(whole) - 60
    fields = {
        "header: version": (8, "<H"),
        "header: kind of checksum": (10, "<B"),
        "header: zero": (11, "<B"),
        "header: number": (12, "<I"),
        "header: fields": (32, "<I"),
        "record: length": (first + 8, "<I"),
        "record: head": (first + 12, "<I"),
        "index: description": (end - 6 - 8 - 4 - len(pack(COLUMNS)), "<I"),
        "index: length": (end - 6 - 8, "<I"),
        "index: hash": (end - 6 - 4, "<I"),
        "trailer: index": (end, "<Q"),
        "trailer: index's length": (end + 8, "<Q"),
        "trailer: records": (end + 16, "<I"),
        "trailer: number": (end + 20, "<I"),
        "trailer: version": (end + 24, "<H"),
        "trailer: kind of checksum": (end + 26, "<B"),
        "trailer: zero": (end + 27, "<B"),
    }
    for name, data in number_cases(whole, fields, first, end, len(whole)):
        yield case(f"{name}, unsealed", data, right)
        at = first if name.startswith("record") else 0
        changed = bytearray(data)
        if at:
            changed[at : at + 8] = bytes(8)
        yield case(name, sealed_shard(bytes(changed)), right)
    for name, data in cuts(whole, (0, 1, 8, 12, 36, first - 8, first, first + 8, first + 16, end)):
        yield case(name, data, right)
    for name, data in cuts(whole, range(end, len(whole), 7)):
        if name.startswith("cut"):
            yield case(name + " of the trailer", data, right)
    for name, packed in msgpack_cases([list(one) for one in KINDS]):
        yield case(f"fields{name}", forge([good], **options | {"packed_fields": packed}), right)
    for name, packed in msgpack_cases(COLUMNS):
        yield case(f"columns{name}", forge([good], **options | {"packed_described": packed}), right)
    for name, packed in msgpack_cases(HEAD):
        yield case(f"head{name}", forge([sealed_record(packed, BLOBS)], **options), right)
        if not name.startswith("[8]") and name.startswith(("[1]", "[2]", "[3]", "[4]")):
            large = BLOBS + bytes(20_000)  # which is read in two steps
            yield case(
                f"head{name}, of a large record",
                forge([sealed_record(packed, large)], **options),
                right,
            )
    for dtype in (
        "|O",
        "|V8",
        "<f16",
        "|S0",
        "<U0",
        "<M8[x]",
        ">i4",
        "i4",
        "|u1" * 99,
        "<i4[",
        "S",
    ):
        for shape in (
            [2, 1],
            [1 << 62, 4],
            [0, (1 << 64) - 1],
            [0] * 33,
            [-2],
            [1.5],
            ["2"],
            [True],
        ):
            packed = pack([*HEAD[:3], [dtype, shape], *HEAD[4:]])
            data = forge([sealed_record(packed, BLOBS)], **options)
            yield case(f"an array {dtype[:12]} of {shape[:4]}", data, right)
    for name, dtype, nulls in itertools.product(
        ("label", "score", "good", "text", "none"), ("|u1", "<u8", "<f8", "|b1", "|O"), (0, True)
    ):
        described = [[name, dtype, nulls]]
        data = forge(
            [good], fields=KINDS, described=described, columns=bytes(2), hashes=xx(b"k")[:4]
        )
        yield case(f"a column {described}", data, right)


def of_overlay(top: Path) -> Iterator[Case]:
    """A file of values beside the shards, whose rows, number, id or fields are others."""
    there = Dataset(FROZEN / "compacted", top / "data")
    found = manifest.load(locate(there.folder)).overlays[0]
    ((number, (info,)),) = found.files.items()
    dataset_id = manifest.load(locate(there.folder)).dataset_id

    def file(
        rows: list[tuple[Any, Any, Any]], own: bytes = dataset_id, place: int = number, **other: Any
    ) -> bytes:
        schema = overlay.overlay_schema(other.get("name", "score"), other.get("kind", "float"))
        encoder = RecordEncoder(schema, own, place)
        data = encoder.header()
        for key, row, value in rows:
            sample = {"__key__": key, "__row__": row, schema.fields[2][0]: value}
            data += b"".join(encoder.record(sample))
        return data + encoder.finish()

    old = (there.folder / info.name).read_bytes()
    cases = {
        f"rows {list(rows)}": file([(b"%d" % max(row or 0, 0), row, 1.5) for row in rows])
        for rows in (
            *((0,), (1,), (2,), (-1,), (1 << 31,), (1 << 40,), ((1 << 63) - 1,), (1 << 63,)),
            *((0, 0), (1, 0), (0, 1), (-1, (1 << 64) - 1), (None,), (None, 0), ()),
        )
    }
    cases |= {
        f"key {brief(key)}": file([(key, 0, 1.5)])
        for key in (b"1", b"00", b"-0", b" 0", b"0\n", b"x", b"\xff", b"../0", b"0" * 60_000)
    }
    cases["another dataset"] = file([(b"0", 0, 1.5)], own=bytes(16))
    cases["another shard"] = file([(b"0", 0, 1.5)], place=1)
    for kind, value in {"int": 1, "str": "x", "bool": True, "json": [[]], "bytes": b"x"}.items():
        cases[f"kind {kind}"] = file([(b"0", 0, value)], kind=kind)
    cases["another field"] = file([(b"0", 0, 1.5)], name="other")
    for name in ("__key__x", "a" * 255, "\x1b[2J"):
        cases[f"field {brief(name)}"] = file([(b"0", 0, 1.5)], name=name)
    for name, data in cases.items():
        yield there.instead(name, info.name, data)
    length = struct.unpack_from("<I", old, 32)[0]
    fields = {
        "fields": (32, "<I"),
        "length": (44 + length + 8, "<I"),
        "head": (44 + length + 12, "<I"),
        "index": (len(old) - 60, "<Q"),
        "index's length": (len(old) - 52, "<Q"),
        "records": (len(old) - 44, "<I"),
    }
    for name, data in number_cases(old, fields):
        changed = bytearray(data)
        if name.startswith(("length", "head")):
            changed[44 + length : 52 + length] = bytes(8)
        yield there.instead(name, info.name, sealed_shard(bytes(changed)))
    for name, data in cuts(old, (0, 30, 44 + length, len(old) - 60, len(old) - 1)):
        yield there.instead(name, info.name, data)


def of_lists(top: Path) -> Iterator[Case]:
    """The list of dropped records, and what `update` knows of its sources."""
    for kind, base, golden in (
        ("excluded", "excluded-f6eececb.bin", FROZEN / "compacted"),
        ("sources", "sources-d43fd710.bin", FROZEN / "splits" / "train"),
    ):
        there = Dataset(golden, top / kind)
        data = (there.folder / base).read_bytes()

        def read(folder: Path, kind: str = kind) -> Any:
            found = read_all(folder)
            if kind == "sources":
                here = locate(folder)
                version.load_sources(here, manifest.load(here))
            return found

        fields = {"count": (24, "<Q"), "number": (32, "<q"), "magic": (0, "<Q"), "id": (8, "<Q")}
        for name, one in number_cases(data, fields, *range(2, 5)):
            yield there.instead(f"{kind}: {name}", base, one, read)
        for name, one in cuts(data, (0, 1, 8, 24, 31, 32, 33, 39, len(data) - 1)):
            yield there.instead(f"{kind}: {name}", base, one, read)


def of_lmdb(top: Path) -> Iterator[Case]:
    """A shard of ours in LMDB: its metas, and the pages of its tree."""
    golden = FROZEN / "lmdb"
    there = Dataset(golden, top / "data")
    name = members(there.body)["shards"][0][0]
    data = (there.folder / name).read_bytes()
    page = 4096
    fields: dict[str, tuple[int, str]] = {}
    for meta in (0, 1):
        at = meta * page
        fields |= {
            f"meta {meta}: {what}": (at + place, kind)
            for what, place, kind in (
                *(("number", 0, "<Q"), ("flags", 10, "<H"), ("magic", 16, "<I")),
                *(("version", 20, "<I"), ("map size", 32, "<Q"), ("page size", 40, "<I")),
                *(("main flags", 92, "<H"), ("depth", 94, "<H"), ("branches", 96, "<Q")),
                *(("leaves", 104, "<Q"), ("big pages", 112, "<Q"), ("entries", 120, "<Q")),
                *(("root", 128, "<Q"), ("last page", 136, "<Q"), ("transaction", 144, "<Q")),
            )
        }
    for number in range(2, len(data) // page):
        at = number * page
        fields |= {
            f"page {number}: {what}": (at + place, kind)
            for what, place, kind in (
                *(("number", 0, "<Q"), ("flags", 10, "<H"), ("lower", 12, "<H")),
                *(("upper", 14, "<H"), ("first node", 16, "<H"), ("second node", 18, "<H")),
            )
        }
        (node,) = struct.unpack_from("<H", data, at + 16)
        if 16 < node < page - 16:
            fields |= {
                f"page {number}: {what} of a node": (at + node + place, kind)
                for what, place, kind in (
                    *(("size", 0, "<I"), ("flags", 4, "<H"), ("key size", 6, "<H")),
                    *(("key", 8, "<I"), ("value", 12, "<Q")),
                )
            }

    def read(folder: Path) -> Any:
        """Read without the check at opening, which would find everything by one checksum."""
        storage = shardio.Storage(verify_open=False)
        found = [*shardio.open(folder, decode=None, storage=storage)]
        info = manifest.load(locate(folder)).shard(0)
        LmdbShard(locate(folder).open(info.name), None).check()
        return found

    there.original = read(there.folder)
    for case, changed in number_cases(data, fields, len(data) // page):
        one = there.instead(case, name, changed, read)
        yield one
    for case, changed in cuts(data, (0, 1, 100, page, 2 * page, 2 * page + 100, len(data) - page)):
        yield there.instead(case, name, changed, read)


# --- states ------------------------------------------------------------------------------------


def of_state(top: Path) -> Iterator[Case]:
    """A saved state of a training."""
    there = Dataset(FROZEN / "splits" / "train", top / "data")

    def dataset() -> ShardDataset:
        return ShardDataset(there.folder, batch_size=2, fields=("__key__",), decode=None)

    begun = dataset()
    taken = iter(begun)
    next(taken)
    state = json.loads(json.dumps(begun.state_dict()))

    def case(name: str, text: str) -> Case:
        def read() -> Any:
            one = dataset()
            one.load_state_dict(json.loads(text))
            return [*map(str, one)]

        names = ("state", "epoch", "step", "dataset")
        return Case(name, len(text), read, names, [*map(str, taken_again(dataset(), state))])

    for name, text in json_cases(state):
        if "deep" not in name and "half a" not in name:  # json refuses those before us
            yield case(name, text)


def taken_again(one: ShardDataset, state: Any) -> Iterator[Any]:
    """Yield the batches after a state."""
    one.load_state_dict(state)
    yield from one


FAMILIES: dict[str, Family] = {
    "manifest": of_manifest,
    "manifest-0": of_manifest_0,
    "tags": of_tags,
    "older-manifest": of_kept,
    "splits": of_splits,
    "shard": of_shard,
    "overlay": of_overlay,
    "lists": of_lists,
    "lmdb": of_lmdb,
    "state": of_state,
}
