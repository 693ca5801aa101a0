"""WebDataset: tar files by its own writer, by GNU tar and by Python; odd ones and damaged ones."""

import base64
import gzip
import io
import json
import os
import pickle
import random
import re
import subprocess
import tarfile
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.conformance import FormatConformance, same, same_all
from support.conformance import sample as make_sample
from support.one_file import OneFile

from shardio import formats
from shardio.errors import DamageError, ShardioError, SourceError
from shardio.formats import manifest
from shardio.formats.base import Shard
from shardio.formats.foreign import webdataset as tar
from shardio.formats.foreign.base import MAX_JSON
from shardio.formats.foreign.tar import MAX_EXTENSION
from shardio.formats.foreign.webdataset import TarFile, split_name
from shardio.names import KEY
from shardio.packing import index as indexing
from shardio.storage.location import locate

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "webdataset"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text(encoding="utf-8"))
NO_FILE = TarFile(OneFile(), "nothing")  # for what needs no file
JPG = b"\xff\xd8\xff\xe0"
END = bytes(1024)


class Bytes:
    """A File in memory that remembers how much was read."""

    def __init__(self, data: bytes, name: str = "here.tar") -> None:
        self.name, self.size, self.data, self.taken, self.most = name, len(data), data, 0, 0

    def read(self, start: int, length: int) -> bytes:
        assert 0 <= start <= start + length <= self.size
        self.taken += length
        self.most = max(self.most, length)
        return self.data[start : start + length]


def tar_file(file: Any) -> TarFile:
    return TarFile(OneFile(file), "here.tar")


def member(
    name: bytes,
    data: bytes = b"",
    kind: bytes = b"0",
    *,
    size: bytes | None = None,
    magic: bytes = b"ustar\x0000",
    prefix: bytes = b"",
    seal: Callable[[int], bytes] = lambda total: b"%06o\0 " % total,
) -> bytes:
    """A header and its data, written by the layout's description alone."""
    digits = b"%011o\0" % len(data) if size is None else size
    start = name.ljust(100, b"\0") + b"0000644\0" + 2 * b"0000000\0" + digits + b"00000000000\0"
    rest = (kind + bytes(100) + magic).ljust(345 - 156, b"\0") + prefix.ljust(167, b"\0")
    assert len(start) == 148 and len(rest) == 356
    return start + seal(sum(start) + sum(rest) + 256) + rest + data + bytes(-len(data) % 512)


def pax(*pairs: tuple[bytes, bytes], kind: bytes = b"x") -> bytes:
    lines = b""
    for keyword, value in pairs:
        length = len(keyword) + len(value) + 3
        length += len(str(length + len(str(length))))
        lines += b"%d %s=%s\n" % (length, keyword, value)
    return member(b"pax", lines, kind)


def scan(data: bytes) -> list[tuple[int, int]]:
    return list(tar_file(Bytes(data)).scan())


def read(data: bytes) -> list[dict[str, Any]]:
    """The values of all records, which must be the same however they are found."""
    places = scan(data)
    found = [NO_FILE.values(data[at : at + n], i) for i, (at, n) in enumerate(places)]
    walked = list(tar_file(Bytes(data)).walk())
    assert [one[:3] for one in walked] == [(at, n, data[at : at + n]) for at, n in places]
    assert repr([values for *_, values in walked]) == repr(found)
    for (at, n), values in zip(places, found, strict=True):
        record = data[at : at + n]
        assert repr(tar._decoded(record, NO_FILE._any_members(record))) == repr(values)
    return found


def value_of(extension: str, data: bytes) -> Any:
    return read(member(f"k.{extension}".encode(), data))[0][extension]


def index(root: Path, out: Path, **fields: str) -> Shard:
    indexing.index(root, out=out, fields=fields, jobs=1, overwrite=True)
    return reopen(root, out)


def reopen(root: Path, out: Path, number: int = 0) -> Shard:
    made = manifest.load(locate(out))
    assert made.format == "webdataset"
    opening = made.opening(locate(out), locate(root))
    return formats.open_shard(made.format, opening, made.shard(number))


# --- files by webdataset and GNU tar --------------------------------------------------------------


@pytest.mark.parametrize("name", EXPECTED)
def test_golden_files_are_grouped_as_webdataset_groups_them(name: str) -> None:
    data = (GOLDEN / name).read_bytes()
    found = read(data)
    assert [values[KEY].decode() for values in found] == [key for key, _, _ in EXPECTED[name]]
    for values, (_, raw, decoded) in zip(found, EXPECTED[name], strict=True):
        del values[KEY]
        assert list(values) == list(raw)
        for field, value in values.items():
            right = decoded.get(field)
            if field not in decoded:
                right = base64.b64decode(raw[field])
            elif isinstance(value, np.ndarray):
                assert value.flags.owndata and value.flags.c_contiguous and value.dtype.isnative
                value = [value.dtype.str, list(value.shape), value.tolist()]
            assert same(value, right), field


def test_golden_files_have_what_they_are_for() -> None:
    kinds = {}
    for name in EXPECTED:
        data = (GOLDEN / name).read_bytes()
        headers = [h for h in range(0, len(data), 512) if data[h + 257 : h + 262] == b"ustar"]
        kinds[name] = {data[h + 156 : h + 157] for h in headers}
    assert b"x" in kinds["tarwriter.tar"] and b"L" in kinds["gnu.tar"] and b"x" in kinds["pax.tar"]
    assert kinds["shard-0000.tar"] == {b"0"} and kinds["ustar.tar"] == {b"0", b"5"}
    assert not kinds["v7.tar"]
    data = (GOLDEN / "ustar.tar").read_bytes()
    assert any(data[h + 345] for h in range(0, len(data), 512) if data[h + 257 : h + 262])
    decoded = {field.rpartition(".")[2] for s in EXPECTED["tarwriter.tar"] for field in s[2]}
    assert decoded >= {"cls", "json", "txt", "npy", "index"}


def test_golden_files_read_through_an_index(tmp_path: Path) -> None:
    for name in EXPECTED:
        root = tmp_path / name
        root.mkdir()
        os.symlink(GOLDEN / name, root / name)
        shard = index(root, tmp_path / f"{name}.index")
        assert shard.records == len(EXPECTED[name])
        for record, (key, raw, _) in enumerate(EXPECTED[name]):
            sample = shard.read(record)
            assert sample[KEY] == key.encode()
            for field, ours in (("jpg", "image"), ("x.y.png", "x.y.png"), ("pyd", "pyd")):
                if field in raw:
                    assert sample.get(ours) == base64.b64decode(raw[field])
        shard.close()


# --- what every format must do --------------------------------------------------------------------

NAMES = {"image": "jpg", "label": "cls", "caption": "txt", "extra": "bin", "mask": "npy"}
NAMES |= {"meta": "a.json"}
FIELDS = (
    (KEY, "key"),
    ("image", "image"),
    ("label", "int"),
    ("caption", "str"),
    ("extra", "bytes"),
    ("mask", "array"),
    ("meta", "json"),
)


def tar_sample(number: int, size: int = 100) -> dict[str, Any]:
    made = make_sample(number, size)
    sample = {name: made[name] for name, _ in FIELDS}
    sample[KEY] = made[KEY].replace(b".jpg", b"")
    if sample["image"] is not None:
        sample["image"] = JPG + sample["image"]
    if sample["extra"] is not None:
        sample["extra"] = b"x" + sample["extra"]  # no image
    if sample["meta"] is not None:
        sample["meta"] = {"number": number, "parts": [None, 0.5, {"x": ["é", True]}]}
    return sample


def encoded(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, np.ndarray):
        stream = io.BytesIO()
        np.save(stream, value)
        return stream.getvalue()
    return (value if isinstance(value, str) else json.dumps(value)).encode()


def tar_of(samples: Sequence[Any]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for sample in samples:
            for name, value in sample.items():
                if name != KEY and value is not None:
                    key = sample[KEY].decode("utf-8", "surrogateescape")
                    info = tarfile.TarInfo(f"{key}.{NAMES[name]}")
                    data = encoded(value)
                    info.size, info.mtime = len(data), 1.5
                    tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


class TestWebDatasetConformance(FormatConformance):
    FIELDS = FIELDS
    SAMPLES = tuple(tar_sample(number) for number in range(40))

    def build(self, folder: Path, fields: Any, samples: Any) -> Path:
        root = folder / "data"
        root.mkdir(exist_ok=True)
        path = root / "x.tar"
        path.write_bytes(tar_of(samples))
        index(root, folder / "index", **(NAMES if samples else {})).close()
        return path

    def open(self, path: Path) -> Shard:
        return reopen(path.parent, path.parent.parent / "index")

    def test_large_and_small_records_mix(self, tmp_path: Path) -> None:
        sizes = [0, 1, 400_000, 7, 16_384, 100_000, *[900] * 100, 300_000, 5]
        samples = [tar_sample(i, size) for i, size in enumerate(sizes)]
        shard = self.open(self.build(tmp_path, self.FIELDS, samples))
        assert same_all(shard.scan(0, shard.records), samples)
        assert same_all(shard.scan(1, 5), samples[1:5])
        assert same_all((shard.read(i) for i in range(shard.records)), samples)
        shard.close()


# --- names and samples ----------------------------------------------------------------------------


def webdataset_rule(name: str) -> tuple[str, str] | None:
    """base_plus_ext, and what tar_file_iterator skips, of webdataset 1.0.2."""
    if "/" not in name and name.startswith("__") and name.endswith("__"):
        return None
    if re.match(r"__[^/]*__($|/)", name):
        return None
    match = re.match(r"^((?:.*/|)[^.]+)[.]([^/]*)$", name)
    return (match.group(1), match.group(2)) if match else None


NAME = st.text(alphabet="ab./_\né", max_size=12)


@settings(max_examples=1000, deadline=None)
@given(NAME)
def test_names_are_split_as_webdataset_splits_them(name: str) -> None:
    right = webdataset_rule(name)
    found = split_name(name.encode())
    assert found == (None if right is None else (right[0].encode(), right[1].encode()))


def test_a_long_name_of_many_folders_is_split_at_once() -> None:
    assert split_name(b"a/" * 500_000) is None  # the pattern takes half an hour
    assert split_name(b"a/" * 500_000 + b"b.c") == (b"a/" * 500_000 + b"b", b"c")


def test_a_name_may_begin_as_a_compressed_file_does() -> None:
    assert read(member(b"BZh.txt", b"a"))[0] == {KEY: b"BZh", "txt": "a"}


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(NAME.filter(bool), st.binary(max_size=1100)), max_size=8),
    st.sampled_from((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT)),
    st.sampled_from((0, 1.5)),
    st.booleans(),
)
def test_files_by_python_read_as_python_and_webdatasets_rule_read_them(
    files: list[tuple[str, bytes]], form: int, mtime: float, long: bool
) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as tar:
        for name, data in files:
            info = tarfile.TarInfo("d" * 90 + "/" + name + "x" * 30 if long else name)
            info.size, info.mtime = len(data), mtime
            tar.addfile(info, io.BytesIO(data))
    right: list[tuple[str, dict[str, bytes]]] = []
    clash = False
    with tarfile.open(fileobj=io.BytesIO(stream.getvalue())) as tar:
        for info in tar:
            if not info.isreg() or (pair := webdataset_rule(info.name)) is None:
                continue
            key, field = pair[0], pair[1].lower()
            if not right or right[-1][0] != key:
                clash |= key in dict(right)
                right.append((key, {}))
            clash |= field in right[-1][1]
            right[-1][1][field] = tar.extractfile(info).read()  # type: ignore[union-attr]
    if clash:
        with pytest.raises(SourceError):
            scan(stream.getvalue())
        return
    found = [(values.pop(KEY).decode(), values) for values in read(stream.getvalue())]
    assert found == right


def test_two_members_that_are_one_field_are_refused_by_both_names() -> None:
    data = member(b"a/1.jpg") + member(b"a/1.cls", b"1") + member(b"a/1.JPG") + END
    with pytest.raises(SourceError, match=r"byte 1536: a/1.JPG and a/1.jpg, .* field 'jpg'"):
        scan(data)


def test_a_key_that_comes_back_is_refused_with_both_places() -> None:
    data = member(b"a.jpg") + member(b"b.jpg") + member(b"a.cls", b"1") + END
    with pytest.raises(SourceError, match=r"byte 1024: a.cls .*began at byte 0.*\n.*--sort=name"):
        scan(data)


def test_members_that_are_no_data_do_not_part_a_sample() -> None:
    parts = (
        member(b"a.jpg", b"x"),
        member(b"dir/", kind=b"5"),
        member(b"README", b"no extension"),
        member(b"__meta__/a.txt", b"skipped"),
        member(b"fifo.x", kind=b"6", size=b"%011o\0" % 77),  # states a size, has no data
        pax((b"comment", b"x"), kind=b"g"),
        member(b"label", b"of the volume", kind=b"V"),
        member(b"old/", magic=bytes(8), kind=b"\0"),
        member(b"__a__", kind=b"2"),
        member(b"a.cls", b"1"),
    )
    data = member(b"first", b"y") + b"".join(parts) + member(b"b.cls", b"2")
    start = len(member(b"first", b"y"))
    assert scan(data) == [(start, len(b"".join(parts))), (len(data) - 1024, 1024)]
    assert read(data) == [{KEY: b"a", "jpg": b"x", "cls": 1}, {KEY: b"b", "cls": 2}]


def test_a_name_that_is_skipped_is_no_field_of_the_sample_before() -> None:
    data = member(b"__x.png", b"1") + member(b"__x.jpg__", b"2") + member(b"__x.txt", b"3")
    assert read(data) == [{KEY: b"__x", "png": b"1", "txt": "3"}]


def test_a_record_that_holds_two_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="members of samples a and b"):
        NO_FILE.values(member(b"a.jpg") + member(b"b.jpg"), 0)
    with pytest.raises(ValueError, match="no member"):
        NO_FILE.values(member(b"a", b"x"), 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [(b"a.\xff", "not UTF-8"), (b"a.__key__", "extension __key__"), (b"a.__URL__", "__url__")],
)
def test_extensions_that_can_be_no_field_are_refused(name: bytes, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        scan(member(name))


def test_a_sample_of_too_many_members_is_refused() -> None:
    with pytest.raises(SourceError, match="over 1,000 members"):
        scan(b"".join(member(b"a.%d" % i) for i in range(1001)))


# --- headers --------------------------------------------------------------------------------------


def test_names_and_sizes_in_headers_before_the_member() -> None:
    long = b"k" * 300
    size = (b"size", b"3")
    for data in (
        member(b"L", long + b".txt\0", b"L") + member(b"k", b"abc"),
        member(b"K", b"link\0", b"K") + member(b"L", long + b".txt\0", b"L") + member(b"k", b"abc"),
        pax((b"path", long + b".txt"), (b"mtime", b"1.5")) + member(b"k", b"abc"),
        pax((b"path", long + b".txt"), size) + member(b"k", b"abc", size=b"%011o\0" % 0),
        member(b"txt.txt", b"abc", prefix=long[:100]),
    ):
        [values] = read(data)
        assert values["txt"] == "abc"
        assert len(values[KEY]) in (300, 104)
        assert scan(data) == [(0, len(data))]


def test_a_file_of_many_blocks_is_read_about_once_and_the_same() -> None:
    data = b""
    for i in range(300):
        time = pax((b"mtime", b"1763654400.%06d" % i)) if i % 3 else b""
        data += time + member(b"%05d.jpg" % i, JPG + bytes([i % 251]) * (i * 7 % 3_000))
        data += time + member(b"%05d.cls" % i, b"%d" % i)
        if i % 100 == 50:
            data += member(b"%05d.large.bin" % i, bytes(200_000))
    file = Bytes(data + END)
    walked = list(tar_file(file).walk())
    assert file.taken < 1.4 * len(data)
    assert [values["cls"] for *_, values in walked] == list(range(300))
    assert len(read(data + END)) == 300


def test_a_pax_header_like_one_before_but_with_other_content_is_read() -> None:
    data = pax((b"mtime", b"1763654400.1")) + member(b"a.txt", b"1")
    other = pax((b"path", b"bb.txt6789012"))  # as long as the other: the headers are the same
    assert other[:512] == data[:512]
    found = read(data + member(b"a.cls", b"7") + other + member(b"no.cls", b"2"))
    assert [values[KEY] for values in found] == [b"a", b"bb"]
    torn = pax((b"mtime", b"1763654400.1"))
    with pytest.raises(DamageError, match="without its member"):
        scan(data + torn)
    record = data + torn
    with pytest.raises(ValueError, match="without its member"):
        NO_FILE.values(record, 0)


def test_what_a_header_says_counts_for_one_member() -> None:
    data = pax((b"path", b"a.txt"), (b"size", b"3")) + member(b"k", b"abc")
    data += member(b"b.txt", b"later")
    assert read(data) == [{KEY: b"a", "txt": "abc"}, {KEY: b"b", "txt": "later"}]
    again = data + pax((b"path", b"c.txt"), (b"size", b"1")) + member(b"k", b"x")
    assert read(again)[2] == {KEY: b"c", "txt": "x"}


def test_a_prefix_counts_only_where_the_header_has_one() -> None:
    assert read(member(b"a.txt", prefix=b"p/q"))[0][KEY] == b"p/q/a"
    # GNU's own headers have the times of access and change there
    assert read(member(b"a.txt", prefix=b"14371", magic=b"ustar  \0"))[0][KEY] == b"a"


@pytest.mark.parametrize("length", [0, 5, 513])
def test_sizes_are_read_however_they_are_written(length: int) -> None:
    text = "x" * length
    for size in (
        b"%011o " % length,
        b"%012o" % length,
        b"%o" % length + bytes(12 - len(b"%o" % length)),
        b"%11o\0" % length,
        b"\x80" + length.to_bytes(11, "big"),
    ):
        assert value_of("txt", text.encode()) == text
        assert read(member(b"k.txt", text.encode(), size=size))[0]["txt"] == text
    assert read(member(b"k.txt", size=bytes(12)))[0]["txt"] == ""


@pytest.mark.parametrize(
    "size",
    [
        b"\x80" + b"\xff" * 11,
        b"\x80" + (1 << 62).to_bytes(11, "big"),
        b"\xff" * 12,
        b"77777777777\0",
        b"00000001001\0",
        b"-0000000001\0",
        b"0000000008\0\0",
        b"nonsense....",
    ],
)
@pytest.mark.parametrize("kind", [b"0", b"x", b"L", b"V"])
def test_a_size_that_cannot_be_is_damage(size: bytes, kind: bytes) -> None:
    data = member(b"k.txt", kind=kind, size=size) + END[:512]
    file = Bytes(data)
    with pytest.raises(DamageError, match="byte 0: "):
        list(tar_file(file).scan())
    with pytest.raises(ValueError):
        NO_FILE.values(data, 0)


def test_a_long_header_is_refused_unread() -> None:
    data = member(b"x", bytes(MAX_EXTENSION + 1), b"x") + member(b"a.txt")
    with pytest.raises(DamageError, match="byte 0"):
        scan(data)


@pytest.mark.parametrize(
    "lines",
    [
        b"path=a.txt\n",
        b"99 path=a.txt\n",
        b"15 path=a.txt\n",
        b"5 path=a.txt\n",
        b"-1 path=a.txt\n",
        b"0 path=a.txt\n",
        b"99999999999999 path=\n",
        b"13 size=nonsen\n",
        b"10 size=-1\n",
    ],
)
def test_a_damaged_pax_header_is_damage(lines: bytes) -> None:
    with pytest.raises(DamageError, match="byte 0"):
        scan(member(b"x", lines, b"x") + member(b"a.txt"))


def test_sums_of_headers_are_checked_unsigned_and_signed() -> None:
    name = "é".encode() * 49
    plain = member(name + b".t", b"x")
    signed = member(name + b".t", b"x", seal=lambda total: b"%06o\0 " % (total - 98 * 256))
    blanks = member(name + b".t", b"x", seal=lambda total: b"%7o\0" % total)
    assert plain != signed
    for data in plain, signed, blanks:
        assert read(data) == [{KEY: name, "t": b"x"}]
    high = member(b"\xff" * 98 + b".t", prefix=b"\xff" * 155, seal=lambda t: b"%06o\0 " % t)
    high_sum = sum(high[:148]) + sum(high[156:]) + 256
    assert high_sum > 65_521 and len(read(high)) == 1
    for data, total in ((plain, sum(plain[:148]) + sum(plain[156:512]) + 256), (high, high_sum)):
        for wrong in (total - 1, total + 1, total - 256):
            with pytest.raises(DamageError, match="sum of the header"):
                scan(data[:148] + b"%06o\0 " % wrong + data[156:])


def test_a_flip_in_any_byte_of_a_header_is_found() -> None:
    first, second = member(b"a.jpg", b"x"), member(b"a.txt", b"y")
    time = pax((b"mtime", b"1.5"))
    data = time + first + time + second
    for header in (0, len(time), len(time) + len(first), 2 * len(time) + len(first)):
        for at in range(header, header + 512):
            if header + 154 <= at < header + 156:
                continue  # what ends the sum may be a zero or a blank
            flipped = bytearray(data)
            flipped[at] ^= 1 << at % 7
            with pytest.raises(ShardioError, match=f"byte {header}: "):
                scan(bytes(flipped))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (b"1", "hard link.*\n.*tar --hard-dereference"),
        (b"2", "symbolic link.*\n.*tar -h"),
        (b"S", "sparse"),
        (b"M", "another file"),
        (b"Z", "unknown type"),
    ],
)
def test_members_whose_content_is_not_here_are_refused(kind: bytes, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        scan(member(b"b.cls", b"1") + member(b"a.jpg", kind=kind) + END)


def test_pax_headers_that_change_what_members_are_refused() -> None:
    for keyword in b"GNU.sparse.major", b"GNU.sparse.name":
        with pytest.raises(SourceError, match="sparse"):
            scan(pax((keyword, b"1")) + member(b"a.jpg"))
    for keyword in b"path", b"size":
        with pytest.raises(SourceError, match="global pax header"):
            scan(pax((keyword, b"1"), kind=b"g") + member(b"a.jpg"))


def test_gnu_tar_with_sparse_and_linked_files_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "a.bin").open("wb") as file:
        file.truncate(1 << 20)
    (tmp_path / "b.bin").write_bytes(b"b")
    os.link(tmp_path / "b.bin", tmp_path / "c.bin")
    for form in "gnu", "pax":
        for names, message in (("a.bin",), "sparse"), (("b.bin", "c.bin"), "c.bin is a hard link"):
            command = ["tar", "-C", str(tmp_path), f"--format={form}", "-Scf", "-", *names]
            data = subprocess.run(command, check=True, capture_output=True).stdout
            with pytest.raises(SourceError, match=message):
                scan(data)


# --- ends -----------------------------------------------------------------------------------------


def test_a_file_ends_with_zeros_or_without() -> None:
    data = member(b"a.cls", b"1")
    for end in (b"", bytes(512), END, bytes(10_240), bytes(700), bytes(300_000)):
        assert scan(data + end) == [(0, 1024)]
    assert scan(bytes(10_240)) == []


def test_data_behind_the_end_are_refused() -> None:
    data = member(b"a.cls", b"1") + END
    for behind in (member(b"b.cls", b"1"), bytes(200_000) + b"x", b"garbage"):
        found = len(data) + len(behind) - len(behind.lstrip(b"\0"))
        with pytest.raises(
            SourceError, match=f"byte 1024: zeros end .* data follow at byte {found}"
        ):
            scan(data + behind)


def test_a_file_that_was_cut_gives_its_first_records_or_is_damage() -> None:
    data = (GOLDEN / "tarwriter.tar").read_bytes()
    whole = scan(data)
    members = end = 0
    for length in range(0, whole[-1][0] + whole[-1][1], 64):
        try:
            found = scan(data[:length])
        except DamageError:
            continue
        members += 1
        end = max(end, length)
        assert found[:-1] == whole[: len(found) - 1]
        assert found[-1][0] == whole[len(found) - 1][0]
        assert sum(found[-1]) == length
    assert members == 17  # all but the last of its members: the one place where a cut is not seen


def test_what_is_no_tar_is_damage() -> None:
    for data in (b"", b"x", bytes(511), b"x" * 512, b"x" * 10_240):
        with pytest.raises(DamageError):
            scan(data)


@pytest.mark.parametrize("name", ["x.tar.gz", "it's.tgz", "x.tar"])
def test_compressed_files_are_refused_with_the_command_that_unpacks(
    tmp_path: Path, name: str
) -> None:
    data = (GOLDEN / "shard-0000.tar").read_bytes()
    path = tmp_path / name
    path.write_bytes(gzip.compress(data))
    with pytest.raises(SourceError, match="Unpack it first") as caught:
        list(TarFile(locate(tmp_path), name).scan())
    command = str(caught.value).rpartition("Unpack it first: ")[2]
    subprocess.run(command, shell=True, check=True)
    [made] = [other for other in tmp_path.iterdir() if other != path]
    assert made.suffix == ".tar" and made.read_bytes() == data


@pytest.mark.parametrize(
    "start", [b"\x28\xb5\x2f\xfd", b"BZh9", b"\xfd7zXZ\0", b"\x04\x22\x4d\x18"]
)
def test_other_compressions_are_told(start: bytes) -> None:
    with pytest.raises(SourceError, match=r"-dc here\.tar > here\.plain\.tar"):
        scan(start + bytes(600))


# --- values ---------------------------------------------------------------------------------------


def npy(array: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asanyarray(array), **options)
    return stream.getvalue()


def npy_header(text: str, data: bytes = b"", version: int = 1) -> bytes:
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + text.encode() + data


@pytest.mark.parametrize(
    ("extension", "data", "right"),
    [
        ("cls", b" 7\n", 7),
        ("index", b"-9223372036854775808", -(2**63)),
        ("x.cls", b"18446744073709551615", 2**64 - 1),
        ("txt", "é\0\n".encode(), "é\0\n"),
        ("transcript", b"", ""),
        ("json", b'[1, NaN, "\\u00e9"]', [1, float("nan"), "é"]),
        ("jsn", "{}".encode("utf-16"), {}),
        ("json.gz", b"{}", b"{}"),
        ("jpg", b"7", b"7"),
        ("mp", b"\x80", b"\x80"),
        ("cbor", b"\xa0", b"\xa0"),
        ("ten", b"7", b"7"),
    ],
)
def test_values_are_decoded_by_extension(extension: str, data: bytes, right: Any) -> None:
    assert same(value_of(extension, data), right)


@pytest.mark.parametrize(
    ("extension", "data", "message"),
    [
        ("cls", b"cat", "expected an integer, found 'cat'"),
        ("cls", b"", "expected an integer"),
        ("cls", b"1" * 5000, "found 5,000 bytes"),
        ("cls", b"18446744073709551616", "outside of 64 bits"),
        ("txt", b"\xff", "can't decode byte 0xff"),
        ("json", b"{", "Expecting property name"),
        ("json", b"[" * 100_000, "nested too deep"),
        ("json", b" " * (MAX_JSON + 1), "at most 16,777,216 are decoded"),
        ("npy", b"", "no .npy file"),
        ("npy", b"\x93NUMPY\1\0\xff\xff{}", "more than it has"),
        ("npy", npy_header("{" * 800), "no .npy header"),
        ("npy", npy_header("-" * 900 + "1"), "no .npy header"),
        ("npy", npy(np.zeros(3))[:-1], "does not take 23 bytes"),
        ("npy", npy(np.zeros(3)) + b"x", "does not take 25 bytes"),
        (
            "npy",
            npy_header("{'descr': '<f8', 'fortran_order': False, 'shape': (-1, -1)}", bytes(8)),
            "shape (-1, -1) of float64 does not take 8 bytes",
        ),
    ],
)
def test_values_that_do_not_fit_their_extension_are_errors(
    extension: str, data: bytes, message: str
) -> None:
    with pytest.raises(ValueError, match=f"k.{extension}: .*{re.escape(message)}"):
        value_of(extension, data)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=">i4").reshape(3, 4),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.array(True),
        np.zeros((0, 4), "f2"),
        np.array(["a", "é"]),
        np.array([b"abc"]),
        np.array(["2020-01-01"], "M8[D]"),
        np.array([1 + 2j]),
    ],
)
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_arrays_are_owned_native_and_in_c_order(array: Any, version: tuple[int, int]) -> None:
    found = value_of("npy", npy(array, version=version))
    assert same(found, np.ascontiguousarray(array).reshape(array.shape).astype(found.dtype))
    assert found.dtype == array.dtype.newbyteorder("=") and found.flags.owndata
    assert found.flags.writeable


class Evil:
    ran = False

    def __reduce__(self) -> Any:
        return (setattr, (Evil, "ran", True))


def test_what_could_run_code_or_is_no_plain_array_stays_bytes() -> None:
    objects = npy(np.array([Evil()], object))
    for extension in "pyd", "pkl", "pickle", "pth", "pyc", "npz":
        data = pickle.dumps(Evil())
        assert value_of(extension, data) == data
    structured = np.zeros(2, [("a", "i4"), ("b", "f8")])
    for data in (
        objects,
        npy(structured),
        npy(np.zeros(1, np.longdouble)),
        npy_header("{'descr': '|V0', 'fortran_order': False, 'shape': (4611686018427387904,)}"),
        npy_header("{'descr': '<f4', 'fortran_order': False, 'shape': ()}" + " " * 2000, bytes(4)),
        b"\x93NUMPY\3\0" + bytes(8),
    ):
        assert value_of("npy", data) == data
    assert not Evil.ran


def test_hostile_sizes_cost_no_memory() -> None:
    huge = "{'descr': '<f8', 'fortran_order': False, 'shape': (1152921504606846976,)}"
    empty = "{'descr': '<f8', 'fortran_order': False, 'shape': (0, 4611686018427387904, 9)}"
    tracemalloc.start()
    try:
        for text in huge, empty:
            with pytest.raises(ValueError):
                value_of("npy", npy_header(text))
        for size in (b"\x80" + (1 << 60).to_bytes(11, "big"), b"77777777777\0"):
            with pytest.raises(DamageError):
                scan(member(b"a.json", size=size))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


# --- reading and damage ---------------------------------------------------------------------------


def test_of_large_members_only_the_headers_are_read() -> None:
    large = b"".join(
        member(b"%d.cls" % i, b"1") + member(b"%d.jpg" % i, bytes(110_000)) for i in range(50)
    )
    file = Bytes(large + END)
    assert len(list(tar_file(file).scan())) == 50
    assert file.taken < file.size / 10
    small = b"".join(member(b"%d.jpg" % i, bytes(900)) for i in range(2000))
    file = Bytes(small + END)
    assert len(list(tar_file(file).scan())) == 2000
    assert file.size <= file.taken < file.size * 1.1
    assert file.most <= 128 << 10


def test_headers_at_the_edges_of_what_is_read_at_once() -> None:
    """Members of all sizes, so that each kind of header lies across the end of a block."""
    noise = random.Random(0)
    parts = []
    for i in range(900):
        if i % 3 == 0:
            parts.append(pax((b"path", b"long/%d.jpg" % i), (b"comment", b"x" * (i % 1300))))
        parts.append(
            member(b"%d.jpg" % i, noise.randbytes(noise.choice((0, 3, 700, 1300, 60_000))))
        )
    found = read(b"".join(parts))
    assert [v[KEY] for v in found] == [
        b"long/%d" % i if i % 3 == 0 else b"%d" % i for i in range(900)
    ]


def test_damage_of_any_kind_ends_in_records_or_an_error_of_ours() -> None:
    noise = random.Random(1)
    reported = 0
    for name in ("tarwriter.tar", "gnu.tar", "pax.tar"):
        intact = (GOLDEN / name).read_bytes()
        for _ in range(700):
            data = bytearray(intact)
            for _ in range(noise.choice((1, 1, 3))):
                at = noise.randrange(len(data))
                match noise.randrange(4):
                    case 0:
                        data[at] ^= 1 << noise.randrange(8)
                    case 1:
                        data[at : at + 64] = noise.randbytes(64)
                    case 2:
                        del data[at : at + noise.choice((1, 512, 1024))]
                    case _:
                        at, to = at & -512, noise.randrange(len(data)) & -512
                        data[at : at + 512], data[to : to + 512] = (
                            data[to : to + 512],
                            data[at : at + 512],
                        )
            try:
                ranges = scan(bytes(data))
            except ShardioError:
                reported += 1
                continue
            end = 0
            for at, length in ranges:
                assert end <= at and length > 0 and at + length <= len(data)
                end = at + length
                try:
                    NO_FILE.values(bytes(data[at:end]), 0)
                except ValueError:
                    reported += 1
        for at in range(0, len(intact), 97):  # records whose headers were not checked
            for length in (512, 1024, 5000):
                try:
                    NO_FILE.values(intact[at : at + length], 0)
                except ValueError:
                    reported += 1
    assert reported > 1000
