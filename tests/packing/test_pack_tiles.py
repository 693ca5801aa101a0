"""`pack --jpeg-tiles`: other bytes of the same pixels; what cannot be tiles stays as it is."""

import io
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from support import LIMIT_S
from support.packing import grouped
from support.trees import content, environment, plant, shardio, shardio_json, shards

from shardio import CenterCrop, native
from shardio.dataset import sequence as sequences
from shardio.errors import (
    DependencyError,
    ExistsError,
    OptionError,
    SourceChangedError,
    StorageError,
)
from shardio.formats import manifest
from shardio.images import jpeg_rewrite
from shardio.images.jpeg_tiles import tiles as find_tiles
from shardio.packing.commit import commit
from shardio.packing.export import export
from shardio.packing.options import ImageOptions
from shardio.packing.pack import pack
from shardio.packing.packed import Packed
from shardio.packing.unpack import unpack
from shardio.packing.verify import verify
from shardio.packing.writer import Writer
from shardio.storage.location import locate

pytestmark = pytest.mark.skipif(
    native.core is None and shutil.which("jpegtran") is None,
    reason="neither the compiled core nor jpegtran is here: nothing can be made tiles",
)

Files = dict[str | bytes, bytes | None]
SMALL = {"max_records": 3, "jobs": 1}


def photo(number: int, size: tuple[int, int] = (235, 177), mode: str = "RGB") -> Image.Image:
    noise = np.random.default_rng(number)
    coarse = Image.fromarray(noise.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    return coarse.resize(size, Image.Resampling.BICUBIC).convert(mode)


def jpeg_file(image: Image.Image, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", **{"quality": 85} | options)
    return out.getvalue()


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


FIT: Files = {
    "a/444.jpg": jpeg_file(photo(1), subsampling=0),
    "a/422.jpg": jpeg_file(photo(2), subsampling=1),
    "a/420.jpg": jpeg_file(photo(3), subsampling=2),
    "a/grey.jpg": jpeg_file(photo(4, mode="L")),
    "b/progressive.jpg": jpeg_file(photo(5), progressive=True),
    "b/turned.jpg": jpeg_file(photo(6), exif=turned(6), icc_profile=b"a profile", comment=b"mine"),
    "b/large.jpg": jpeg_file(photo(7, (333, 257))),
}
UNFIT: Files = {
    "a/other.png": png(photo(8)),
    "a/cmyk.jpg": jpeg_file(photo(9, mode="CMYK")),
    "b/torn.jpg": jpeg_file(photo(10))[:-400],
    "b/tiny.jpg": jpeg_file(photo(11, (8, 8))),
}
# 30 MCUs in a row, so 2 tiles.
TILES: Files = {"b/tiles.jpg": jpeg_file(photo(12), subsampling=0, restart_marker_blocks=15)}
ALL = {**FIT, **UNFIT, **TILES}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant(tmp_path_factory.mktemp("tiles") / "src", ALL)


@pytest.fixture(scope="module")
def tiled(source: Path) -> Path:
    """The source, packed as tiles."""
    pack_one(source, source.parent / "tiled")
    return source.parent / "tiled"


@pytest.fixture(scope="module")
def both(source: Path) -> Path:
    """The same, with originals."""
    pack_one(source, source.parent / "both", keep_original=True)
    return source.parent / "both"


def pack_one(source: Path, out: Path, **options: Any) -> Packed:
    (done,) = pack(source, out, **grouped({"jpeg_tiles": True} | SMALL | options))
    return done


def options_of(out: Path) -> dict[str, Any]:
    return manifest.load(locate(str(out))).options


def records(out: Path) -> dict[bytes, dict[str, Any]]:
    return {one["__key__"]: one for one in sequences.stored(out)}


def pixels(data: bytes) -> NDArray[np.uint8]:
    return np.array(Image.open(io.BytesIO(data)))


def file(key: bytes) -> bytes:
    data = ALL[key.decode()]
    assert data is not None
    return data


# --- what comes out -------------------------------------------------------------------------------


def test_every_image_has_the_pixels_and_metadata_of_its_file(tiled: Path) -> None:
    found = records(tiled)
    assert sorted(found) == sorted(str(key).encode() for key in ALL)
    for key, record in found.items():
        image, own = record["image"], file(key)
        if key.decode() in FIT:
            assert find_tiles(image) is not None, key
            assert image != own
            assert np.array_equal(pixels(image), pixels(own)), key
        else:
            assert image == own, key
        if key.decode() == "b/turned.jpg":
            for one in map(io.BytesIO, (image, own)):
                with Image.open(one) as opened:
                    assert opened.getexif()[0x0112] == 6
                    assert opened.info["icc_profile"] == b"a profile"
                    assert opened.info["comment"] == b"mine"


def test_images_are_counted_and_so_are_the_reasons(source: Path, tmp_path: Path) -> None:
    done = pack_one(source, tmp_path / "out")
    assert (done.tiles, done.tiled) == (8, 7)
    reasons = ("not a JPEG", "CMYK", "damaged", "too small", "tiles already")
    assert done.untiled == dict.fromkeys(reasons, 1)
    found = records(tmp_path / "out")
    assert done.tiled_from == sum(len(file(str(key).encode())) for key in FIT)
    assert done.tiled_to == sum(len(found[str(key).encode()]["image"]) for key in FIT)
    assert done.rejected == []


@pytest.mark.skipif(shutil.which("jpegtran") is None, reason="jpegtran is not installed")
def test_jpegtran_alone_does_all_that_the_core_does(
    source: Path, tiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pack_one(source, tmp_path / "one")
    monkeypatch.setattr(native, "core", None)
    second = pack_one(source, tmp_path / "two")
    assert (second.tiles, second.tiled, second.untiled) == (8, 7, first.untiled)
    for key, record in records(tmp_path / "two").items():
        assert (record["image"] == file(key)) == (key.decode() not in FIT)
        if key.decode() in FIT:
            assert np.array_equal(pixels(record["image"]), pixels(file(key))), key


def test_the_manifest_says_what_was_asked_for_and_how_many_there_are(
    source: Path, tiled: Path, both: Path, tmp_path: Path
) -> None:
    assert options_of(tiled)["jpeg_tiles"] is True
    assert options_of(tiled)["tiles"] == 8
    assert "keep_original" not in options_of(tiled)
    assert options_of(both)["keep_original"] is True
    pack_one(source, tmp_path / "plain", jpeg_tiles=False)
    assert unpack(tmp_path / "plain", tmp_path / "back").tiles == 0  # the one there was a tile
    assert not {"jpeg_tiles", "keep_original", "tiles"} & options_of(tmp_path / "plain").keys()
    ids = {manifest.load(locate(str(p))).dataset_id for p in (tiled, both, tmp_path / "plain")}
    assert len(ids) == 3


def test_crops_of_tiles_are_those_of_the_files(source: Path, both: Path, tmp_path: Path) -> None:
    plain = plant(tmp_path / "src", FIT)
    pack_one(plain, tmp_path / "plain", jpeg_tiles=False)
    crop = CenterCrop(32, 96)
    wanted = sequences.open(tmp_path / "plain", transform=crop, fields=("__key__", "image"))
    expected = dict(iter(wanted))
    seen = 0
    for item in sequences.stored(both):
        if item["__key__"].decode() in expected:
            seen += 1
            assert np.array_equal(crop(item["image"]), expected[item["__key__"].decode()])
    assert seen == len(FIT)


def test_resized_images_are_made_tiles_of_their_new_size(source: Path, tmp_path: Path) -> None:
    some = plant(tmp_path / "src", {**FIT, "a/other.png": UNFIT["a/other.png"]})
    done = pack_one(some, tmp_path / "out", resize=144)
    pack_one(some, tmp_path / "small", resize=144, jpeg_tiles=False)
    assert (done.tiles, done.tiled) == (7, 7)
    small = records(tmp_path / "small")
    assert done.tiled_from == sum(len(small[str(key).encode()]["image"]) for key in FIT)
    for key, record in records(tmp_path / "out").items():
        assert np.array_equal(pixels(record["image"]), pixels(small[key]["image"]))
        assert min(pixels(record["image"]).shape[:2]) == 144


def test_images_that_are_none_stay_none(tmp_path: Path) -> None:
    with Writer(tmp_path / "stream", fields={"image": "image"}) as writer:
        writer.write({"__key__": "a", "image": None})
        writer.write({"__key__": "b", "image": FIT["a/444.jpg"]})
    done = pack_one(tmp_path / "stream", tmp_path / "out", keep_original=True)
    assert (done.tiles, done.tiled, done.untiled) == (1, 1, {})
    found = records(tmp_path / "out")
    assert (found[b"a"]["image"], found[b"a"]["original"]) == (None, None)
    assert found[b"b"]["original"] == FIT["a/444.jpg"]


def test_max_pixels_is_the_limit_of_what_is_rewritten(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", {"a/x.jpg": jpeg_file(photo(1))})
    for limit, untiled in ((235 * 177, {}), (235 * 177 - 1, {"too large": 1})):
        out = tmp_path / str(limit)
        [done] = pack(source, out, **grouped({"jpeg_tiles": True, "max_pixels": limit} | SMALL))
        assert done.untiled == untiled


def test_images_of_kind_bytes_are_made_tiles_too(tmp_path: Path) -> None:
    with Writer(tmp_path / "stream", fields={"image": "bytes"}) as writer:
        writer.write({"__key__": "a.jpg", "image": FIT["a/444.jpg"]})
    assert pack_one(tmp_path / "stream", tmp_path / "out", keep_original=True).tiles == 1
    unpack(tmp_path / "out", tmp_path / "back")
    assert content(tmp_path / "back") == {b"a.jpg": FIT["a/444.jpg"]}


def test_what_is_left_out_is_not_counted(tmp_path: Path) -> None:
    tree = {**FIT, "b/no.jpg": b"no image"}
    options = {"on_error": "skip", "max_records": 2}
    done = pack_one(plant(tmp_path / "src", tree), tmp_path / "out", **options)
    assert (done.tiles, done.tiled, done.untiled, len(done.rejected)) == (7, 7, {}, 1)


# --- the same bytes -------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["record", "lmdb"])
def test_jobs_and_parts_give_the_same_bytes(source: Path, tmp_path: Path, format: str) -> None:
    options = {"format": format, "keep_original": True}
    pack_one(source, tmp_path / "one", **options)
    pack_one(source, tmp_path / "two", **options, jobs=2)
    assert content(tmp_path / "two") == content(tmp_path / "one")
    counts = [pack_one(source, tmp_path / "arr", **options, part=(n, 2)) for n in (2, 1)]
    assert sum(part.tiles or 0 for part in counts) == 8
    (done,) = commit(tmp_path / "arr", jobs=1)
    assert (done.tiles, done.tiled, done.untiled) == (8, 0, {})
    assert content(tmp_path / "arr") == content(tmp_path / "one")


KILLED = """
import os, signal, sys
from shardio.packing.options import ImageOptions, PlanOptions
from shardio.packing.pack import pack
from shardio.packing.shard_writer import ShardWriter

commit, done = ShardWriter.commit, []

def die(self, name):
    if len(done) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    done.append(name)
    commit(self, name)

ShardWriter.commit = die
images, plan = ImageOptions(jpeg_tiles=True), PlanOptions(max_records=3)
pack(*sys.argv[1:], images=images, plan=plan, jobs=1)
"""


def test_a_killed_packing_goes_on_to_the_same_bytes(
    source: Path, tiled: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = [sys.executable, "-c", KILLED, str(source), str(out)]
    killed = subprocess.run(arguments, env=environment(), capture_output=True, timeout=LIMIT_S)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(shards(out)) == 2
    with pytest.raises(SourceChangedError, match="option jpeg_tiles: was True, now not given"):
        pack_one(source, out, jpeg_tiles=False)
    done = pack_one(source, out)
    assert (done.kept, done.built, done.tiles) == (2, 2, 8)
    assert 0 < done.tiled < 7
    assert content(out) == content(tiled)


def test_packing_again_touches_nothing_and_other_options_are_refused(
    source: Path, tiled: Path, both: Path
) -> None:
    before = content(tiled)
    done = pack_one(source, tiled)
    assert (done.already, done.tiles, done.tiled) == (True, 8, 0)
    with pytest.raises(ExistsError, match="option jpeg_tiles: was True, now not given"):
        pack_one(source, tiled, jpeg_tiles=False)
    with pytest.raises(ExistsError, match="option keep_original: was not given, now True"):
        pack_one(source, tiled, keep_original=True)
    with pytest.raises(ExistsError, match="option keep_original: was True, now not given"):
        pack_one(source, both)
    assert content(tiled) == before


# --- out again ------------------------------------------------------------------------------------


def test_unpacked_tiles_are_images_of_the_same_pixels_and_are_counted(
    source: Path, tiled: Path, tmp_path: Path
) -> None:
    done = unpack(tiled, tmp_path / "back")
    assert (done.files, done.tiles, done.resized) == (len(ALL), 8, False)
    for key in ALL:
        own, back = (source / str(key)).read_bytes(), (tmp_path / "back" / str(key)).read_bytes()
        assert (own == back) == (key not in FIT)
        if key in FIT:
            assert np.array_equal(pixels(own), pixels(back))


def test_kept_originals_come_back_byte_for_byte(source: Path, both: Path, tmp_path: Path) -> None:
    for key, record in records(both).items():  # what is as it was is not held twice
        assert record["original"] == (file(key) if key.decode() in FIT else None)
    done = unpack(both, tmp_path / "back")
    assert (done.tiles, done.resized) == (0, False)
    assert content(tmp_path / "back") == content(source)


def test_originals_of_resized_tiles_come_back_too(source: Path, tmp_path: Path) -> None:
    some = plant(tmp_path / "src", {**FIT, "a/other.png": UNFIT["a/other.png"]})
    pack_one(some, tmp_path / "out", resize=144, keep_original=True)
    done = unpack(tmp_path / "out", tmp_path / "back")
    assert (done.tiles, done.resized) == (0, False)
    assert content(tmp_path / "back") == content(some)


def test_resized_images_are_said_to_be(source: Path, tmp_path: Path) -> None:
    some = plant(tmp_path / "src", FIT)
    pack_one(some, tmp_path / "out", resize=144, jpeg_tiles=False)
    assert unpack(tmp_path / "out", tmp_path / "back").resized
    assert "resized" in shardio("unpack", tmp_path / "out", tmp_path / "two").stdout
    pack_one(some, tmp_path / "raw", resize=144, jpeg_tiles=False, encode="raw")
    assert unpack(tmp_path / "raw", tmp_path / "three").raw
    said = shardio("unpack", tmp_path / "raw", tmp_path / "four").stdout
    assert "images were resized and made raw pixels when they were packed" in said


def test_verify_finds_nothing_and_damage_is_found_in_originals(both: Path, tmp_path: Path) -> None:
    assert verify(both, sha256=True, jobs=1).damages == []
    out = tmp_path / "out"
    shutil.copytree(both, out)
    victim = next(path for path in shards(out) if FIT["a/420.jpg"] in path.read_bytes())
    data = bytearray(victim.read_bytes())
    data[data.index(FIT["a/420.jpg"]) + 900] ^= 1  # type: ignore[arg-type]
    victim.write_bytes(data)
    (damage,) = verify(out, jobs=1).damages
    assert damage.key == "a/420.jpg"


def test_tiles_are_exported_as_the_jpegs_they_are(tiled: Path, tmp_path: Path) -> None:
    export(tiled, tmp_path / "folder", format="imagefolder")
    found = records(tiled)
    assert content(tmp_path / "folder") == {b"a": None, b"b": None} | {
        key: record["image"] for key, record in found.items()
    }


# --- other sources --------------------------------------------------------------------------------


def test_a_tiled_dataset_is_packed_again_as_it_is(tiled: Path, tmp_path: Path) -> None:
    done = pack_one(tiled, tmp_path / "out")
    assert (done.tiles, done.tiled, done.untiled["tiles already"]) == (8, 0, 8)
    assert images_of(tmp_path / "out") == images_of(tiled)


def test_originals_stay_originals_when_they_are_packed_again(
    source: Path, both: Path, tmp_path: Path
) -> None:
    for name, more in {
        "copy": {"jpeg_tiles": False},
        "tiles": {},
        "asked": {"keep_original": True},
        "small": {"resize": 144, "on_error": "skip"},
        "raw": {"jpeg_tiles": False, "encode": "raw", "resize": 144, "on_error": "skip"},
    }.items():
        out = tmp_path / name
        pack_one(both, out, **more)
        assert pack_one(both, out, **more).already, name
        assert options_of(out)["keep_original"] is True
        found = records(out)
        assert len(found) >= len(ALL) - 1  # the torn one cannot be resized
        unpack(out, tmp_path / f"{name} back")
        files = {key: value for key, value in content(tmp_path / f"{name} back").items() if value}
        assert files == {key: file(key) for key in found}, name
    assert images_of(tmp_path / "copy") == images_of(both)


def test_a_field_that_is_called_otherwise_is_no_original(both: Path, tmp_path: Path) -> None:
    pack_one(both, tmp_path / "out", fields={"first": "original"}, jpeg_tiles=False)
    assert "keep_original" not in options_of(tmp_path / "out")
    back = unpack(tmp_path / "out", tmp_path / "back")
    assert back.files == len(ALL)
    assert (tmp_path / "back" / "a" / "420.jpg").read_bytes() == records(both)[b"a/420.jpg"][
        "image"
    ]
    pack_one(both, tmp_path / "new", fields={"original": "label", "label": "original"})
    assert "keep_original" not in options_of(tmp_path / "new")


def test_a_field_of_another_meaning_is_no_original(tmp_path: Path) -> None:
    sample = {"__key__": "a", "image": FIT["a/444.jpg"], "original": b"a painting"}
    with Writer(tmp_path / "stream") as writer:
        writer.write(sample)
    pack_one(tmp_path / "stream", tmp_path / "out")
    assert "keep_original" not in options_of(tmp_path / "out")
    assert records(tmp_path / "out")[b"a"]["original"] == b"a painting"
    with pytest.raises(OptionError, match="called `original` already"):
        pack_one(tmp_path / "stream", tmp_path / "no", keep_original=True)


def images_of(out: Path) -> dict[bytes, bytes]:
    return {key: record["image"] for key, record in records(out).items()}


def test_splits_are_made_tiles_each(tmp_path: Path) -> None:
    tree = {f"{name}/{key!s}": data for name in ("train", "val") for key, data in FIT.items()}
    source = plant(tmp_path / "src", tree)
    done = pack(source, tmp_path / "out", jobs=1, images=ImageOptions(jpeg_tiles=True))
    assert [(one.split, one.tiles) for one in done] == [("train", 7), ("val", 7)]
    assert unpack(tmp_path / "out", tmp_path / "back").tiles == 14


def test_a_listing_is_made_tiles(source: Path, tmp_path: Path) -> None:
    rows = "".join(f"{key},{number}\n" for number, key in enumerate(map(str, ALL)))
    (tmp_path / "list.csv").write_text("path,label\n" + rows)
    done = pack_one(tmp_path / "list.csv", tmp_path / "out", root=source, keep_original=True)
    assert (done.source, done.tiles, done.tiled) == ("listing", 8, 7)
    unpack(tmp_path / "out", tmp_path / "back")
    assert content(tmp_path / "back") == content(source)


@pytest.mark.parametrize("keep", [False, True])
def test_grouped_files_are_made_tiles(tmp_path: Path, keep: bool) -> None:
    files: Files = {"one.jpg": FIT["a/420.jpg"], "two.jpg": UNFIT["b/torn.jpg"]}
    tree = {**files, "one.txt": b"first", "two.txt": b"second"}
    source = plant(tmp_path / "src", tree)
    done = pack_one(source, tmp_path / "out", fields={"image": "jpg"}, keep_original=keep)
    assert (done.source, done.tiles) == ("files", 1)
    back = unpack(tmp_path / "out", tmp_path / "back")
    found = content(tmp_path / "back")
    assert (back.files, back.tiles) == (4, 0 if keep else 1)
    assert (found == content(source)) == keep
    assert {name: data for name, data in found.items() if name != b"one.jpg"} == {
        name.encode(): data for name, data in tree.items() if name != "one.jpg"
    }


# --- what is refused ------------------------------------------------------------------------------


def test_without_core_and_jpegtran_nothing_is_begun(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "core", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DependencyError, match="jpegtran"):
        pack_one(source, tmp_path / "out")
    with pytest.raises(DependencyError, match="jpegtran"):
        pack_one(source, tmp_path / "out", dry_run=True)
    assert not (tmp_path / "out").exists()


def fake_jpegtran(folder: Path, script: str, patch: pytest.MonkeyPatch) -> Path:
    """The only jpegtran there is: the real one, with a script before it. And no core."""
    real = shutil.which("jpegtran")
    if real is None:
        pytest.skip("jpegtran is not installed")
    folder.mkdir()
    program = folder / "jpegtran"
    program.write_text(f'#!/bin/sh\n{script}\nexec {real} "$@"\n')
    program.chmod(0o755)
    patch.setenv("PATH", str(folder))
    patch.setattr(native, "core", None)
    return program


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize(
    ("script", "error", "said"),
    [
        ("kill -KILL $$", StorageError, r"[ab]/\w+\.jpg: .*killed by SIGKILL \(out of memory\?\)"),
        ("kill -TERM $$", StorageError, "killed by SIGTERM[.]"),
        ("echo 'Insufficient memory (case 4)' >&2; exit 1", StorageError, "case 4.*--jobs"),
        ("echo 'no libjpeg.so.62' >&2; exit 127", DependencyError, "so.62.*resume"),
    ],
)
def test_a_jpegtran_that_does_not_end_well_stops_the_packing_and_damages_nothing(
    source: Path, tmp_path: Path, script: str, error: type[Exception], said: str, jobs: int
) -> None:
    small = plant(tmp_path / "src", {**FIT, "b/other.png": png(photo(8))})
    out, flag = tmp_path / "out", tmp_path / "flag"
    with pytest.MonkeyPatch.context() as patch:
        fake_jpegtran(tmp_path / "bin", f"[ -e {flag} ] && {{ {script}; }}", patch)
        pack_one(small, out, max_records=2, part=(1, 2))
        flag.touch()
        for on_error in ("raise", "skip"):  # the file is not what cannot be packed
            with pytest.raises(error, match=said):
                pack_one(small, out, max_records=2, jobs=jobs, on_error=on_error)
        assert not list(out.glob("*.tmp")) and not (out / "manifest.json").exists()
        flag.unlink()
        done = pack_one(small, out, max_records=2, jobs=jobs)
    assert (done.kept, done.built, done.tiles, done.untiled.get("damaged")) == (2, 2, 7, None)


def test_without_memory_the_message_names_the_file(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rewrite(data: bytes, *, max_pixels: int) -> bytes:
        raise MemoryError  # as the core does

    monkeypatch.setattr(jpeg_rewrite, "rewrite", rewrite)
    with pytest.raises(StorageError, match=r"[ab]/\w+\.\w+: .* memory .*fewer --jobs"):
        pack_one(source, tmp_path / "out", on_error="skip")
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_a_jpegtran_that_disappears_stops_the_packing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f'[ -e {tmp_path}/run ] && /bin/rm "$0"; : > {tmp_path}/run'
    fake_jpegtran(tmp_path / "bin", script, monkeypatch)
    with pytest.raises(DependencyError, match=r"does not run \(No such file.*resume"):
        pack_one(source, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"jpeg_tiles": False, "keep_original": True}, "--keep-original: goes with .*as they are"),
        ({"jpeg_tiles": False, "keep_original": True, "resize": 9}, "which is not asked for$"),
        ({"encode": "raw"}, "--jpeg-tiles: .*--encode raw"),
        ({"fields": {"picture": "image"}}, "--jpeg-tiles: .*Those that do: picture"),
        ({"fields": {"original": "label"}, "keep_original": True}, "called `original` already"),
    ],
)
def test_wrong_options_are_refused(
    tiled: Path, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        pack_one(tiled, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


# --- the command line -----------------------------------------------------------------------------


def test_the_command_line_says_what_became_of_the_images(
    source: Path, both: Path, tmp_path: Path
) -> None:
    arguments = ("pack", source, tmp_path / "out", "--jpeg-tiles", "--keep-original")
    small = ("--max-records", "3")
    assert "JPEG tiles" not in shardio(*arguments, *small, "--dry-run").stdout
    assert pack_one(source, tmp_path / "out", dry_run=True).tiles is None
    text = shardio(*arguments, *small).stdout
    assert "8 of 12 images are JPEG tiles: 7 rewritten, " in text
    assert "left as they were: 1 CMYK, 1 damaged, 1 not a JPEG, 1 tiles already" in text
    assert content(tmp_path / "out") == content(both)
    info = shardio("info", tmp_path / "out").stdout
    assert "8 of 12 images are JPEG tiles" in info
    assert "the files' own bytes" in info
    shardio("pack", source, tmp_path / "no", "--keep-original", code=2)


def test_json_and_unpack_say_it_too(source: Path, tiled: Path, tmp_path: Path) -> None:
    (done,) = shardio_json("pack", source, tmp_path / "out", "--jpeg-tiles")["datasets"]
    assert (done["tiles"], done["tiled"], done["untiled"]["tiles already"]) == (8, 7, 1)
    assert done["tiled_from"] > 0 < done["tiled_to"]
    assert shardio_json("info", tiled)["options"]["tiles"] == 8
    assert shardio_json("unpack", tiled, tmp_path / "one")["tiles"] == 8
    assert (
        "of these 8 JPEG tiles, as packing made them"
        in shardio("unpack", tiled, tmp_path / "two").stdout
    )
