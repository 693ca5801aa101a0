"""The headers of tar files: every way to write a name and a size, ends, damage."""

import os
import random
import subprocess
from pathlib import Path

import pytest
from support.tar_files import END, JPG, NO_FILE, Bytes, member, pax, read, scan, tar_file, value_of

from shardio.errors import DamageError, ShardioError, SourceError
from shardio.formats.foreign.tar import MAX_EXTENSION
from shardio.names import KEY

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "webdataset"

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
