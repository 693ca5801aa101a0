"""Every damage is listed, with its shard, record, offset and key; what is whole is not."""

import errno
import hashlib
import io
import os
import re
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.packing import grouped
from support.trees import content, images, noise, picture, plant, shardio, shardio_json, shards

from shardio import native
from shardio.dataset import sequence as sequences
from shardio.errors import DamageError, NotPackedError, OptionError, VersionError
from shardio.formats import manifest
from shardio.formats.foreign.base import dump, load, sidecar_name
from shardio.formats.lmdb import PAGE
from shardio.formats.record import RecordShard
from shardio.packing.index import index
from shardio.packing.options import PlanOptions, SourceOptions
from shardio.packing.pack import pack
from shardio.packing.verify import Verified, verify
from shardio.packing.writer import Writer
from shardio.storage.local import open_file
from shardio.storage.location import locate


@pytest.fixture
def out(tmp_path: Path) -> Path:
    pack(
        plant(tmp_path / "src", images()), tmp_path / "out", jobs=1, plan=PlanOptions(max_records=8)
    )
    return tmp_path / "out"


def offsets(shard: Path) -> list[int]:
    opened = RecordShard(open_file(str(shard), shard.name))
    found = [opened.offset(record) for record in range(opened.records)]
    opened.close()
    return found


def flip(path: Path, *places: int) -> None:
    data = bytearray(path.read_bytes())
    for at in places:
        data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_whole_dataset_has_no_damage(out: Path, jobs: int) -> None:
    found = verify(out, sha256=True, jobs=jobs)
    assert (found.records, found.shards, found.damages) == (24, 3, [])
    assert found.bytes == sum(path.stat().st_size for path in shards(out))


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_damaged_record_is_listed_by_shard_number_offset_and_key(
    out: Path, jobs: int
) -> None:
    first, second, _ = shards(out)
    flip(first, *(offsets(first)[i] + 200 for i in (1, 2, 7)))
    flip(second, offsets(second)[4] + 200)
    names = sequences.stored(out).keys()
    found = verify(out, jobs=jobs)
    assert [(Path(d.shard).name, d.record, d.offset, d.key) for d in found.damages] == [
        *((first.name, i, offsets(first)[i], names[i]) for i in (1, 2, 7)),
        (second.name, 4, offsets(second)[4], names[12]),
    ]
    assert found.records == 24


@pytest.mark.parametrize("where", ["checksum", "length", "head length", "head"])
def test_damage_anywhere_in_a_record_is_found(out: Path, where: str) -> None:
    shard = shards(out)[0]
    at = {"checksum": 0, "length": 8, "head length": 12, "head": 20}[where]
    flip(shard, offsets(shard)[3] + at)
    [damage] = verify(out, jobs=1).damages
    assert (damage.record, damage.offset) == (3, offsets(shard)[3])


@pytest.mark.parametrize("where", ["header", "index", "trailer"])
def test_damage_outside_of_records_is_of_the_whole_shard(out: Path, where: str) -> None:
    shard = shards(out)[1]
    size = shard.stat().st_size
    flip(shard, {"header": 20, "index": size - 100, "trailer": size - 20}[where])
    [damage] = verify(out, jobs=1).damages
    assert (Path(damage.shard).name, damage.record, damage.key) == (shard.name, None, None)


def test_bytes_of_a_shard_that_no_record_reads_are_damage_too(tmp_path: Path) -> None:
    """An LMDB file has pages between those of its records."""
    options = grouped({"format": "lmdb", "max_records": 8, "jobs": 1})
    pack(plant(tmp_path / "src", images()), tmp_path / "out", **options)
    _, second, _ = sorted((tmp_path / "out").glob("*.lmdb"))
    for at, page in ((PAGE - 1, "a meta page"), (3 * PAGE - 1, "a leaf page")):
        flip(second, at)
        [damage] = verify(tmp_path / "out", jobs=1).damages
        assert (Path(damage.shard).name, damage.record) == (second.name, None)
        assert page in damage.what
        flip(second, at)
    assert verify(tmp_path / "out", jobs=1).damages == []


def damages(out: Path, **options: bool) -> Verified:
    return verify(out, jobs=1, **options)


def test_cut_missing_and_swapped_shards_are_listed(out: Path) -> None:
    first, second, third = shards(out)
    os.truncate(first, first.stat().st_size - 1)
    second.unlink()
    shutil.copy(first, third)
    found = damages(out).damages
    assert [Path(one.shard).name for one in found] == [first.name, second.name, third.name]
    assert "missing" in found[1].what
    assert all(one.record is None for one in found)


def test_two_swapped_shards_are_both_damage(out: Path) -> None:
    first, second, _ = shards(out)
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    assert len(damages(out).damages) == 2


def test_a_shard_that_became_a_folder_or_a_fifo_is_listed(out: Path) -> None:
    first, second, _ = shards(out)
    first.unlink()
    first.mkdir()
    second.unlink()
    os.mkfifo(second)
    assert [Path(one.shard).name for one in damages(out).damages] == [first.name, second.name]


@pytest.mark.parametrize("format", ["record", "lmdb"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('["label","int"]', '["label","int"],["more","str"]'),
        ('["label","int"]', '["lable","int"]'),
        ('["label","int"]', '["label","float"]'),
        (',["label","int"]', ""),
    ],
)
def test_fields_that_are_not_those_of_the_shards_are_damage(
    tmp_path: Path, format: str, old: str, new: str
) -> None:
    pack(plant(tmp_path / "src", images()), tmp_path / "out", jobs=1, format=format)
    forge(tmp_path / "out", old, new)
    [damage] = verify(tmp_path / "out", jobs=1).damages
    assert "its fields are" in damage.what
    assert damage.record is None
    with pytest.raises(DamageError, match=r"label \(int\), but the manifest says"):
        sequences.stored(tmp_path / "out")[0]
    if new.endswith('"str"]'):  # once: these met a KeyError
        assert "its fields are" in shardio("pack", tmp_path / "out", tmp_path / "a", code=1).stderr
        arguments = ("export", tmp_path / "out", tmp_path / "b", "--format", "webdataset")
        assert "its fields are" in shardio(*arguments, code=3).stderr


def forge(out: Path, old: str, new: str) -> None:
    """Change the text of a manifest, and give it the hash that belongs to it."""
    body = (out / "manifest.json").read_text().partition('"sha256"')[0]
    assert old in body
    body = body.replace(old, new)
    seal = hashlib.sha256(body.encode()).hexdigest()
    (out / "manifest.json").write_text(f'{body}"sha256": "{seal}"\n}}\n')


def test_sha256_finds_what_no_checksum_covers_and_says_so(out: Path, tarred: Path) -> None:
    assert damages(out, sha256=True).damages == []
    shard = shards(out)[2]
    flip(shard, offsets(shard)[0] + 100)
    found = damages(out, sha256=True).damages
    assert [one.record for one in found] == [0]  # what is said of a record is not said twice
    flip(shard, 0)
    found = damages(out, sha256=True).damages
    assert len(found) == 1 and "header at byte 0" in found[0].what
    end = (tarred / "a.tar").stat().st_size
    flip(tarred / "a.tar", end - 1)  # behind all records
    assert damages(tarred).damages == []
    found = damages(tarred, sha256=True).damages
    assert [(one.record, "SHA-256" in one.what) for one in found] == [(None, True)]


def test_a_record_that_cannot_be_read_does_not_hide_the_others(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = shards(out)[0]
    bad = offsets(shard)[5]
    flip(shard, offsets(shard)[2] + 200)
    real, inode = os.pread, shard.stat().st_ino

    def pread(descriptor: int, length: int, start: int) -> bytes:
        if 0 < start <= bad < start + length and os.fstat(descriptor).st_ino == inode:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, length, start)

    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr(native, "core", None)  # which does not ask Python's
    found = damages(out).damages
    assert [one.record for one in found] == [2, 5]
    assert "Input/output error" in found[1].what


def test_decode_lists_images_that_are_whole_but_undecodable(tmp_path: Path) -> None:
    tree = {"a/good.jpg": picture(40, 30), "a/torn.jpg": noise("x", 400)}
    pack(plant(tmp_path / "src", tree), tmp_path / "out", jobs=1)
    assert verify(tmp_path / "out", jobs=1).damages == []
    [damage] = verify(tmp_path / "out", decode=True, jobs=1).damages
    assert damage.key == "a/torn.jpg"
    assert "cannot be decoded" in damage.what


def test_decode_reads_each_field_as_a_dataset_does(tmp_path: Path) -> None:
    """A depth map of floats is no picture, and no damage."""
    from PIL import Image

    source = plant(tmp_path / "src", {"images/0.jpg": picture(40, 30), "depths": None})
    Image.fromarray(np.zeros((30, 40), "f4")).save(source / "depths" / "0.tif")
    folders = {"image": "images/", "depth": "depths/"}
    pack(source, tmp_path / "out", jobs=1, read=SourceOptions(fields=folders))
    assert not verify(tmp_path / "out", decode=True, jobs=1).damages


def test_where_image_holds_bytes_the_others_are_decoded_as_stored(tmp_path: Path) -> None:
    """As a dataset does it: none of them is the main image then."""
    from PIL import Image

    depth = io.BytesIO()
    Image.fromarray(np.zeros((30, 40), "f4")).save(depth, "TIFF")
    with Writer(tmp_path / "out", fields={"image": "bytes", "depth": "image"}) as writer:
        writer.write({"__key__": "0", "image": b"x", "depth": depth.getvalue()})
    assert not verify(tmp_path / "out", decode=True, jobs=1).damages


def test_decode_keeps_to_a_limit_of_pixels(tmp_path: Path) -> None:
    pack(plant(tmp_path / "src", {"a/x.jpg": picture(40, 30)}), tmp_path / "out", jobs=1)
    assert not verify(tmp_path / "out", decode=True, max_pixels=1200, jobs=1).damages
    [damage] = verify(tmp_path / "out", decode=True, max_pixels=1199, jobs=1).damages
    assert "over the limit of 1,199" in damage.what
    with pytest.raises(OptionError, match="max_pixels is 9, but no image is decoded"):
        verify(tmp_path / "out", max_pixels=9)


def test_all_splits_are_verified(tmp_path: Path) -> None:
    tree = {"train/a/1.jpg": noise("1", 300), "val/a/2.jpg": noise("2", 300)}
    pack(plant(tmp_path / "src", tree), tmp_path / "out", jobs=1)
    assert verify(tmp_path / "out", jobs=1).records == 2
    flip(shards(tmp_path / "out" / "val")[0], 150)
    assert "val" in verify(tmp_path / "out", jobs=1).damages[0].shard


def test_a_damaged_manifest_is_an_error_of_its_own(out: Path) -> None:
    flip(out / "manifest.json", 50)
    with pytest.raises(DamageError):
        verify(out)
    assert "manifest.json" in shardio("verify", out, code=3).stderr
    with pytest.raises(NotPackedError):
        verify(out / "nowhere")


def test_the_command_lists_damage_one_a_line_and_exits_with_3(out: Path) -> None:
    shard = shards(out)[0]
    flip(shard, *(offsets(shard)[i] + 200 for i in (0, 6)))
    names = sequences.stored(out).keys()
    lines = shardio("verify", out, code=3).stdout.splitlines()
    assert len(lines) == 3
    for line, record in zip(lines, (0, 6), strict=False):
        for part in (shard.name, f"record {record} ", str(offsets(shard)[record])):
            assert part in line
        assert names[record] in line
    assert "2 damaged" in lines[-1]
    said = shardio_json("verify", out, code=3)
    assert [one["record"] for one in said["damages"]] == [0, 6]
    assert said["damages"][0]["key"] == names[0]


def test_verifying_touches_nothing(out: Path) -> None:
    before = content(out)
    verify(out, sha256=True, jobs=2)
    assert content(out) == before
    assert manifest.load(locate(out)).records == 24


@pytest.fixture
def tarred(tmp_path: Path) -> Path:
    """Three records of a tar: a label that one lacks, and a float that is NaN in one."""
    (tmp_path / "tar").mkdir()
    with tarfile.open(tmp_path / "tar" / "a.tar", "w") as tar:
        for name, data in (("1.cls", b"4"), ("1.x", b""), ("2.x.json", b"NaN"), ("3.cls", b"6")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    index(tmp_path / "tar", jobs=1)
    return tmp_path / "tar"


@pytest.mark.parametrize(
    "other, what",
    [
        ({}, None),
        ({"hashes": lambda found: found ^ np.array([0, 1, 0], "<u4")}, (1, "another key")),
        ({"cls": lambda found: [4, None, 7]}, (2, "another label")),
        ({"cls": lambda found: [4, 0, 6]}, (1, "another label")),
        ({"cls": lambda found: [None, None, 6]}, (0, "another label")),
        ({"x.json": lambda found: [None, 0.5, None]}, (1, r"another x\.json")),
    ],
)
def test_an_index_that_differs_from_the_records_is_damage(
    tarred: Path, other: dict[str, Any], what: tuple[int, str] | None
) -> None:
    """Its own checksum is right: whoever made it was wrong."""
    made = manifest.load(locate(tarred))
    old = load(locate(tarred), made.shard(0), made.dataset_id)
    columns = {name: column.tolist() for name, column in old.columns.items()}
    columns |= {name: change(None) for name, change in other.items() if name != "hashes"}
    hashes = other.get("hashes", lambda found: found)(old.key_hashes)
    ranges = list(zip(old.offsets.tolist(), old.lengths.tolist(), strict=True))
    body = dump(0, made.dataset_id, ranges, old.checksums, hashes, columns, old.extra)
    sealed = int.from_bytes(body[-8:], "little")
    (tarred / sidecar_name(0, sealed)).write_bytes(body)
    changed = replace(made, shard_index=np.array([sealed], np.uint64))
    (tarred / "manifest.json").write_bytes(changed.dump())
    damages = verify(tarred, jobs=1).damages
    assert len(damages) == (what is not None)
    if what is not None:
        assert damages[0].record == what[0] and re.search(what[1], damages[0].what)
        if "hashes" in other:
            with pytest.raises(DamageError, match="not the one that was indexed"):
                sequences.open(tarred).keys()


def test_files_that_grew_after_they_were_indexed_are_damage(tarred: Path) -> None:
    with open(tarred / "a.tar", "ab") as file:
        file.write(bytes(512))
    with pytest.raises(DamageError, match=r"bytes, but had .* when it was indexed"):
        list(sequences.open(tarred))
    assert len(verify(tarred, jobs=1).damages) == 1


def test_an_index_of_a_newer_version_says_so(tarred: Path) -> None:
    made = manifest.load(locate(tarred))
    path = next(tarred.glob("*.index"))
    data = bytearray(path.read_bytes())
    data[8] = 1
    path.write_bytes(data)
    with pytest.raises(VersionError, match="reads up to version 0"):
        load(locate(tarred), made.shard(0), made.dataset_id)


def test_data_that_lies_elsewhere_is_asked_for(tarred: Path, out: Path, tmp_path: Path) -> None:
    index(tarred, out=tmp_path / "idx", jobs=1)
    said = shardio("verify", tmp_path / "idx", code=3).stdout
    assert said.startswith(f"{tmp_path}/idx/a.tar: the file is missing\n")
    assert "not beside it" in said and "say where: --root DIR or URL\n" in said
    assert shardio("verify", tmp_path / "idx", "--root", tarred).stdout.endswith("all as packed\n")
    shards(out)[0].unlink()
    (tarred / "a.tar").rename(tarred / "b.tar")
    for missing in (["verify", out], ["verify", tmp_path / "idx", "--root", tarred]):
        assert shardio(*missing, code=3).stdout.endswith(": 1 damaged\n")
