"""Files that other tools write, archives and tables, written to do harm."""

import bz2
import gzip
import io
import json
import lzma
import os
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import shardio
from shardio.packing.given_values import read_values
from shardio.packing.sources.archives.folder import Inflating, open_archive
from shardio.packing.sources.base import Rejected
from support import mds_writer, tar_files
from support.hostile import (
    GOLDEN,
    JSON_JUNK,
    SHORT_JUNK,
    Case,
    Family,
    brief,
    cuts,
    json_cases,
    number_cases,
)
from support.hostile.own import NAMES, read_all

LIMITED = {name: one for name, one in JSON_JUNK.items() if not name.startswith("deep")}


class Foreign:
    """A folder of files of another tool, one of which is another; it is indexed, then read."""

    def __init__(self, golden: Path, folder: Path, format: str) -> None:
        self.folder, self.format = Path(shutil.copytree(golden, folder)), format
        for path in self.folder.rglob("expected.json"):
            path.unlink()
        self.original = self.read()

    def read(self) -> Any:
        out = self.folder.with_name("out")
        try:
            shardio.index(self.folder, out=out, format=self.format, jobs=1)
            return read_all(out, root=self.folder)
        finally:
            shutil.rmtree(out, ignore_errors=True)

    def case(self, name: str, file: str, data: bytes) -> Case:
        path = self.folder / file
        whole = path.read_bytes()

        def read() -> Any:
            path.write_bytes(data)
            try:
                return self.read()
            finally:
                path.write_bytes(whole)

        names = [f"{one.name}: " for one in self.folder.iterdir()]
        names += f"{self.folder}", f"{self.folder.parent}/out"
        return Case(name, len(data), read, names, self.original)


def of_mds(top: Path) -> Iterator[Case]:
    """A shard of MosaicML's Streaming, its description, and index.json."""
    folder = top / "made"
    mds_writer.save(folder, mds_writer.shards(1))
    there = Foreign(folder, top / "in", "mds")
    name = "shard.00000.mds"
    listed = json.loads((folder / "index.json").read_text())
    for case, text in json_cases(listed, SHORT_JUNK):
        yield there.case(f"index.json{case}", "index.json", text.encode())
    data = (folder / name).read_bytes()
    fields = {"samples": (0, "<I"), "first": (4, "<I"), "second": (8, "<I"), "last": (12, "<I")}
    at = struct.unpack_from("<I", data, 4)[0]
    fields |= {"size of a value": (at, "<I"), "size of another": (at + 4, "<I")}
    for case, changed in number_cases(data, fields, len(data)):
        yield there.case(case, name, changed)
    for case, changed in cuts(data, (0, 3, 4, 8, 12, at, at + 4, len(data) - 1)):
        yield there.case(case, name, changed)


def of_litdata(top: Path) -> Iterator[Case]:
    """A chunk of LitData, and its index.json."""
    there = Foreign(GOLDEN / "litdata" / "leaf", top / "in", "litdata")
    listed = json.loads((there.folder / "index.json").read_text())
    for case, text in json_cases(listed, SHORT_JUNK):
        yield there.case(f"index.json{case}", "index.json", text.encode())
    for name in NAMES:
        changed = json.loads(json.dumps(listed))
        changed["chunks"][0]["filename"] = name
        yield there.case(f"a chunk {brief(name)}", "index.json", json.dumps(changed).encode())
    name = "chunk-0-0.bin"
    data = (there.folder / name).read_bytes()
    fields = {"items": (0, "<I"), "first": (4, "<I"), "second": (8, "<I"), "third": (12, "<I")}
    at = struct.unpack_from("<I", data, 4)[0]
    fields |= {"size of a leaf": (at, "<I"), "size of another": (at + 4, "<I")}
    for case, changed in number_cases(data, fields, len(data)):
        yield there.case(case, name, changed)
    for case, changed in cuts(data, (0, 3, 4, 8, at, at + 4, len(data) - 1)):
        yield there.case(case, name, changed)


def _folder_of(top: Path, format: str, name: str, data: bytes) -> Foreign:
    folder = top / "made"
    folder.mkdir()
    (folder / name).write_bytes(data)
    return Foreign(folder, top / "in", format)


def of_tfrecord(top: Path) -> Iterator[Case]:
    """TFRecord: its frames, and the lengths inside of an Example, under right checksums."""
    from support.tfrecord_frames import entry, example, field, frame, ints, texts, varint

    good = example(entry(b"image", texts(b"\xff\xd8\xff\xe0")), entry(b"label", ints(3)))
    there = _folder_of(top, "tfrecord", "x.tfrecord", frame(good) + frame(good))
    data = (there.folder / "x.tfrecord").read_bytes()
    fields = {"length": (0, "<Q"), "its checksum": (8, "<I"), "checksum": (12 + len(good), "<I")}
    for case, changed in number_cases(data, fields, len(data)):
        yield there.case(case, "x.tfrecord", changed)
    for case, changed in cuts(data, (0, 1, 8, 11, 12, 15, len(good) + 12, len(data) - 1)):
        yield there.case(case, "x.tfrecord", changed)
    messages = {
        f"length {size} of {what}": make(varint(size))
        for size in (0, 1, 3, 127, 1 << 20, (1 << 31) - 1, (1 << 32) - 1, (1 << 63), (1 << 64) - 1)
        for what, make in {
            "the features": lambda size: b"\x0a" + size + b"xyz",
            "an entry": lambda size: field(1, b"\x0a" + size + b"xyz"),
            "a name": lambda size: field(1, field(1, b"\x0a" + size + b"xyz")),
            "a feature": lambda size: field(1, field(1, field(1, b"a") + b"\x12" + size + b"xyz")),
            "packed numbers": lambda size: field(
                1, field(1, field(1, b"a") + field(2, b"\x1a" + size + b"\x0a"))
            ),
        }.items()
    }
    messages |= {
        "an endless varint": b"\x0a" + b"\xff" * 50,
        "a group": b"\x0b\x0b\x0b" * 99 + b"\x0c" * 99,
        "deep messages": field(1, b"\x0a\x80\x80\x04" * 20_000),
        "no UTF-8": example(entry(b"\xff\xfe", texts(b"x"))),
        "escapes": example(entry(b"\x1b[2J<script>", texts(b"x"))),
        "a name as our key": example(entry(b"__key__", ints(1))),
        "a long name": example(entry(b"n" * 70_000, ints(1))),
        "many features": example(*(entry(b"%d" % n, ints(n)) for n in range(2_000))),
        "a feature twice": example(entry(b"a", ints(1)), entry(b"a", texts(b"x"))),
        "2^63": example(entry(b"a", ints(1 << 63))),
        "nothing": b"",
    }
    for name, message in messages.items():
        yield there.case(name, "x.tfrecord", frame(message))
        yield there.case(f"{name}, behind a good one", "x.tfrecord", frame(good) + frame(message))


def of_recordio(top: Path) -> Iterator[Case]:
    """MXNet's RecordIO: frames, heads, and the list of keys."""
    folder = top / "made"
    folder.mkdir()
    for name in ("images.rec", "images.idx"):
        shutil.copy(GOLDEN / "recordio" / name, folder)
    there = Foreign(folder, top / "in", "recordio")
    data, keys = ((folder / name).read_bytes() for name in ("images.rec", "images.idx"))
    fields = {
        "magic": (0, "<I"),
        "length": (4, "<I"),
        "flag": (8, "<I"),
        "label": (12, "<I"),
        "id": (16, "<Q"),
        "second id": (24, "<Q"),
    }
    for case, changed in number_cases(data, fields, 3 << 29, (1 << 29) - 1, len(data)):
        yield there.case(case, "images.rec", changed)
    for case, changed in cuts(data, (0, 3, 4, 8, 12, 31, len(data) - 1)):
        yield there.case(case, "images.rec", changed)
    lines = keys.splitlines()
    for wrong in (b"", b"-1", b"9" * 30, b"0x1", b"1e5", b"\xff", b"nan", b"\x1b[2J", b"1_0"):
        for at, what in enumerate(("key", "place")):
            row = lines[0].split(b"\t")
            row[at] = wrong
            text = b"\n".join([b"\t".join(row), *lines[1:]]) + b"\n"
            yield there.case(f"a {what} {wrong!r}", "images.idx", text)
    for name, text in {
        "no tabs": b"1 2\n",
        "NUL": bytes(99),
        "no": b"",
        "long": b"1" * 99999,
    }.items():
        yield there.case(f"keys: {name}", "images.idx", text)


def of_tar(top: Path) -> Iterator[Case]:
    """A tar of samples: headers under right checksums, extended headers, names."""
    member, pax, end = tar_files.member, tar_files.pax, tar_files.END
    good = member(b"a.jpg", b"\xff\xd8\xff\xe0") + member(b"a.cls", b"3")
    there = _folder_of(top, "webdataset", "x.tar", good + end)
    sizes = (
        *(b"77777777777\0", b"-1\0", b"00000000009\0", b"9\0", b"x", b" " * 12, bytes(12), b"1_0"),
        *(
            b"\x80" + b"\xff" * 11,
            b"\xff" * 12,
            b"\x80" + bytes(7) + b"\0\0\0\4",
            b"\x81" + bytes(11),
        ),
    )
    cases = {
        f"size {size!r}": member(b"a.jpg", b"\xff\xd8\xff\xe0", size=size.ljust(12, b"\0")[:12])
        for size in sizes
    }
    cases |= {f"kind {kind!r}": member(b"a.jpg", b"x", kind) for kind in b_kinds()}
    cases |= {
        f"a name {brief(name)}": member(os.fsencode(name.replace("\0", ""))[:90] + b".jpg", b"x")
        for name in NAMES
        if "\udcff" not in name
    }
    cases |= {
        f"pax {key.decode()} {value[:20]!r}": pax((key, value)) + good
        for key in (b"size", b"path", b"linkpath", b"GNU.sparse.major", b"hdrcharset", b"mtime")
        for value in (b"", b"-1", b"9" * 40, b"../../x", b"a\0b", b"\xff", b"1e9", b"x" * 70_000)
    }
    cases |= {
        "a pax line longer than it": member(b"p", b"99 path=x\n", b"x") + good,
        "a pax line of 0": member(b"p", b"0 path=x\n", b"x") + good,
        "a pax line of a huge number": member(b"p", b"9" * 5000 + b" path=x\n", b"x") + good,
        "a pax line without =": member(b"p", b"8 pathx\n", b"x") + good,
        "pax headers alone": pax((b"path", b"y")) * 50,
        "a long name of 2^33": member(b"n", b"x", b"L", size=b"77777777777\0"),
        "a GNU long name": member(b"n", b"../" * 2000 + b"x.jpg\0", b"L") + good,
        "a GNU sparse file": member(b"a.jpg", b"x" * 512, b"S"),
        "a wrong checksum": member(b"a.jpg", b"x", seal=lambda total: b"%06o\0 " % (total + 1)),
        "a checksum of text": member(b"a.jpg", b"x", seal=lambda total: b"xxxxxxxx"),
        "zeros": bytes(10240),
        "one block": bytes(512),
        "nothing": b"",
        "a prefix up": member(b"a.jpg", b"x", prefix=b"../../.."),
        "no end": good[:-512],
        "a member twice": good + good,
        "label text": member(b"a.jpg", b"\xff\xd8\xff") + member(b"a.cls", b"nine"),
        "label huge": member(b"a.jpg", b"\xff\xd8\xff") + member(b"a.cls", b"9" * 5000),
    }
    jsons = {name: text.encode() for name, text in JSON_JUNK.items()}
    jsons |= {"10^5000": b"1" + b"0" * 5000, "no JSON": b"{", "UTF-16": "{}".encode("utf-16")}
    for name, text in jsons.items():
        cases[f"json {name}"] = member(b"a.jpg", b"\xff\xd8\xff") + member(b"a.json", text)
    for name, data in cases.items():
        yield there.case(name, "x.tar", data + end)
        yield there.case(f"{name}, behind a good one", "x.tar", good.replace(b"a.", b"0.") + data)


def b_kinds() -> Iterator[bytes]:
    """Yield what a member of a tar may say that it is."""
    yield from (b"\0", *(bytes([one]) for one in b"1234567DKLMNSVXgx"), b"\xff")


def of_tables(top: Path) -> Iterator[Case]:
    """Parquet and Arrow: every number of a footer or a message that a byte can change."""
    for format, name, step in (("parquet", "types.parquet", 97), ("arrow", "lz4.arrow", 31)):
        folder = top / f"{format}-made"
        folder.mkdir()
        shutil.copy(GOLDEN / format / name, folder)
        there = Foreign(folder, top / format, format)
        data = (folder / name).read_bytes()
        size = len(data)
        fields = {"length of the footer": (size - 8, "<I")} if format == "parquet" else {}
        if format == "arrow":
            fields = {"marker": (0, "<I"), "length of the schema": (4, "<i")}
        for case, changed in number_cases(data, fields, size):
            yield there.case(f"{format}: {case}", name, changed)
        for case, changed in cuts(data, (0, 4, 8, 12, size // 2, size - 8, size - 4, size - 1)):
            yield there.case(f"{format}: {case}", name, changed)
        del step


# --- archives and tables that are packed ----------------------------------------------------------


def read_archive(path: Path, own: Path) -> list[Any]:
    """List an archive, and read what is in it; what is left out alone is a value, too."""
    folder, _ = open_archive(os.fsencode(path), Inflating(str(own)))
    walked, found = folder.walk(), []
    with folder.opened() as read:
        rows = zip(walked.keys, walked.sizes.tolist(), walked.mtimes.tolist(), strict=True)
        for key, size, stamp in rows:
            assert not {b"", b".", b".."} & {*key.split(b"/")}, f"it leads out: {key!r}"
            try:
                found.append((key, read(key, size, stamp)))
            except Rejected as error:
                found.append((key, f"left out: {error}"))
    return found


def of_archive(top: Path) -> Iterator[Case]:
    """A zip: each number of its directory and members; names, and what unfolds to much."""
    own = top / "own"

    def case(name: str, data: bytes, original: Any = None, ending: str = "zip") -> Case:
        path = top / f"x.{ending}"

        def read() -> Any:
            path.write_bytes(data)
            shutil.rmtree(own, ignore_errors=True)
            own.mkdir()
            found = read_archive(path, own)
            assert {one.parent for one in top.parent.rglob("evil*")} == set()
            return found

        return Case(name, len(data), read, (str(top),), original)

    def zipped(
        *names: str, way: int = zipfile.ZIP_DEFLATED, data: bytes = b"\xff\xd8\xff" * 9
    ) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", way) as file:
            for name in names:
                file.writestr(zipfile.ZipInfo(name), data, way)
        return out.getvalue()

    whole = zipped("cat/1.jpg", "dog/2.jpg")
    end = whole.rindex(b"PK\5\6")
    directory = whole.index(b"PK\1\2")
    (top / "x.zip").write_bytes(whole)
    own.mkdir()
    right = read_archive(top / "x.zip", own)
    fields = {
        "end: disk": (end + 4, "<H"),
        "end: its disk": (end + 6, "<H"),
        "end: entries here": (end + 8, "<H"),
        "end: entries": (end + 10, "<H"),
        "end: size": (end + 12, "<I"),
        "end: place": (end + 16, "<I"),
        "end: comment": (end + 20, "<H"),
    }
    for what, at, kind in (
        *(("version", 6, "<H"), ("flags", 8, "<H"), ("way", 10, "<H"), ("time", 12, "<H")),
        *(("date", 14, "<H"), ("crc", 16, "<I"), ("packed", 20, "<I"), ("size", 24, "<I")),
        *(("name", 28, "<H"), ("extra", 30, "<H"), ("comment", 32, "<H"), ("disk", 34, "<H")),
        *(("attributes", 38, "<I"), ("place", 42, "<I")),
    ):
        fields[f"directory: {what}"] = (directory + at, kind)
    for what, at, kind in (
        *(("magic", 0, "<I"), ("flags", 6, "<H"), ("way", 8, "<H"), ("crc", 14, "<I")),
        *(("packed", 18, "<I"), ("size", 22, "<I"), ("name", 26, "<H"), ("extra", 28, "<H")),
    ):
        fields[f"member: {what}"] = (at, kind)
    for name, data in number_cases(whole, fields, len(whole)):
        yield case(name, data, right)
    for name, data in cuts(whole, (0, 4, 30, directory, end, end + 21, len(whole) - 1)):
        yield case(name, data, right)
    for name in NAMES:
        if name and "\udcff" not in name:
            yield case(
                f"a member {brief(name)}", zipped("cat/1.jpg", name.replace("\0", "") + "evil")
            )
    bomb = zipped("cat/1.jpg", data=bytes(64 << 20))
    yield case("a bomb in a member", bomb)
    yield case(
        "a zip in a zip in a zip", zipped("a.zip", data=zipped("b.zip", data=zipped("c.zip")))
    )
    yield case("a member over another", zipped("a/1.jpg") + zipped("b/2.jpg"))
    yield case("a member twice", zipped("a/1.jpg", "a/2.jpg").replace(b"a/2.jpg", b"a/1.jpg"))
    yield case("a file that is a folder", zipped("a", "a/1.jpg"))
    many = zipped(*(f"a/{n}.jpg" for n in range(500)), data=b"\xff\xd8\xff")
    yield case("many members", many)
    member = tar_files.member
    tar = member(b"cat/1.jpg", b"\xff\xd8\xff\xe0") + tar_files.END
    packers: dict[str, Callable[[bytes], bytes]] = {
        "tar.gz": gzip.compress,
        "tar.bz2": bz2.compress,
        "tar.xz": lzma.compress,
    }
    for ending, compress in packers.items():
        packed = compress(tar) if ending != "tar.gz" else gzip.compress(tar, mtime=0)
        for name, data in cuts(packed, (0, 1, 4, 10, len(packed) // 2, len(packed) - 1)):
            yield case(f"{ending}: {name}", data, ending=ending)
        yield case(f"{ending}: something else", b"\x89PNG" * 99, ending=ending)
        yield case(f"{ending}: of no tar", compress(b"<html>" * 999), ending=ending)
        wrong = bytearray(packed)
        wrong[len(wrong) // 2] ^= 255
        yield case(f"{ending}: a byte changed", bytes(wrong), ending=ending)
    for name in NAMES:
        if "\udcff" not in name:
            data = member(os.fsencode(name.replace("\0", ""))[:95] + b"evil", b"x") + tar
            yield case(f"tar: a member {brief(name)}", data, ending="tar")
    for kind in b_kinds():
        data = member(b"evil", b"", kind) + member(b"evil/x.jpg", b"x") + tar
        yield case(f"tar: kind {kind!r}", data, ending="tar")


def of_values(top: Path) -> Iterator[Case]:
    """A table of values: CSV, JSON, and numpy's arrays."""

    def case(name: str, data: bytes, ending: str) -> Case:
        path = top / f"x.{ending}"

        def read() -> Any:
            path.write_bytes(data)
            found = read_values(str(path), None, None)
            keys = len(found.keys or ())
            return {
                name: [repr(get(row)) for row in range(min(keys, 20))]
                for name, (_, get) in found.fields.items()
            }

        return Case(name, len(data), read, (str(path), "x."))

    for name, text in json_cases([{"key": "a", "label": 1, "boxes": [[1, 2]]}], LIMITED):
        yield case(f"json {name}", text.encode(), "json")
        yield case(f"jsonl {name}", text[1:-1].encode(), "jsonl")
    for name, text in JSON_JUNK.items():
        yield case(f"json all {name}", text.encode(), "json")
        yield case(f"jsonl all {name}", text.encode(), "jsonl")
    for name, data in {
        "nothing": b"",
        "NUL": b"key,a\nx\0,1\n",
        "no UTF-8": b"key,a\n\xff,1\n",
        "UTF-16": "key,a\nx,1\n".encode("utf-16"),
        "an open quote": b'key,a\n"x,1\n' * 99,
        "a long cell": b"key,a\nx," + b"y" * 300_000 + b"\n",
        "more cells": b"key,a\nx,1,2,3\n",
        "fewer cells": b"key,a\nx\n",
        "a column twice": b"key,a,a\nx,1,2\n",
        "an empty name": b"key,,\nx,1,2\n",
        "many columns": b"key"
        + b",a%d" * 0
        + b"".join(b",c%d" % n for n in range(3_000))
        + b"\nx\n",
        "escapes": b"key,\x1b[2J\nx,1\n",
        "huge numbers": b"key,a\nx," + b"9" * 5000 + b"\ny,1e999\nz,nan\n",
        "a key twice": b"key,a\nx,1\nx,2\n",
        "CR": b"key,a\rx,1\r",
        "only commas": b"," * 9999,
    }.items():
        yield case(f"csv {name}", data, "csv")
    headers = (
        *(
            f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({one}), }}"
            for one in (
                *("4,", "-1,", "1099511627776,", "2**99,", "'x',", "1," * 99, "", "True,", "1.5,"),
            )
        ),
        *(
            f"{{'descr': {one}, 'fortran_order': False, 'shape': (4,), }}"
            for one in (
                *("'|O'", "'<V8'", "'x'", "[('a', '<i4')]", "'<M8[x]'", "'|S99999999'", "None"),
            )
        ),
        *("{}", "[]", "x", "", "__import__('os').system('true')", "(" * 200, "{" * 5000),
        "{'descr': '<i4', 'fortran_order': 1, 'shape': (4,)}",
        "{'descr': '<i4', 'fortran_order': False, 'shape': (4,), 'more': 1}",
    )
    for at, header in enumerate(headers):
        text = header.encode().ljust(118)
        data = b"\x93NUMPY\1\0" + struct.pack("<H", len(text) & 0xFFFF) + text + bytes(16)
        yield case(f"npy {at}: {brief(header)}", data, "npy")
    good = (
        b"\x93NUMPY\1\0\x76\0"
        + b"{'descr': '<i4', 'fortran_order': False, 'shape': (4,), }".ljust(118)
    )
    for name, data in number_cases(good + bytes(16), {"version": (6, "<H"), "head": (8, "<H")}):
        yield case(f"npy {name}", data, "npy")
    for name, data in cuts(good + bytes(16), (0, 6, 8, 9, 10, 50, 128, 143)):
        yield case(f"npy {name}", data, "npy")


FAMILIES: dict[str, Family] = {
    "mds": of_mds,
    "tfrecord": of_tfrecord,
    "litdata": of_litdata,
    "recordio": of_recordio,
    "tar": of_tar,
    "parquet-and-arrow": of_tables,
    "archive": of_archive,
    "values": of_values,
}
