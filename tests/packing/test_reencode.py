"""Images written anew: smaller by --resize, as pixels by --encode raw; and unpacked again."""

import io
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.archives import tar, write
from support.packing import grouped, interrupted, pack_one, pack_raw, png_folder
from support.raw_pixels import (
    encoded,
    packed,
    scene,
)
from support.small_datasets import make
from support.trees import (
    content,
    noise,
    picture,
    plant,
    shardio,
    shardio_json,
    shards,
)

from shardio import (
    ShardDataset,
    append,
    native,
    plan,
    update,
)
from shardio.dataset import sequence as sequences
from shardio.errors import (
    ExistsError,
    OptionError,
    SourceChangedError,
    SourceError,
)
from shardio.formats import manifest
from shardio.images import decode as image
from shardio.images.filetype import image_type
from shardio.packing.commit import commit
from shardio.packing.export import export
from shardio.packing.options import ImageOptions, PlanOptions
from shardio.packing.pack import pack
from shardio.packing.unpack import unpack
from shardio.packing.verify import verify
from shardio.storage.location import locate


def test_images_of_any_kind_become_the_pixels_that_decoding_gives(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned: what is stored is 8 x 6
    tree = {
        "a/x.png": encoded(scene(1)),
        "a/grey.png": encoded(scene(2), mode="L"),
        "a/clear.png": encoded(scene(3), mode="RGBA"),
        "a/palette.png": encoded(scene(4), mode="P"),
        "a/turned.jpg": encoded(scene(5, 8, 6), "JPEG", exif=exif),
        "b/x.ppm": encoded(scene(6), "PPM"),
    }
    source = plant(tmp_path / "src", tree)
    done = pack_raw(source, tmp_path / "out")
    assert (done.records, done.pixels, done.committed) == (6, (6, 8), True)
    found = packed(tmp_path / "out")
    assert set(found) == {os.fsencode(key) for key in tree}
    for key, data in tree.items():
        stored = found[os.fsencode(key)]
        pixels = np.asarray(image.decode(data))
        assert stored == b"P6\n8 6\n255\n" + pixels.tobytes()
        with Image.open(io.BytesIO(stored)) as again:
            assert np.array_equal(np.asarray(again), pixels)
    assert not verify(tmp_path / "out", decode=True, jobs=1).damages


def test_resize_makes_squares_of_the_centre(tmp_path: Path) -> None:
    tree = {
        "a/wide.jpg": picture(60, 30),
        "a/tall.jpg": picture(24, 50),
        "a/small.png": encoded(scene(0, 9, 14)),
        "a/fits.png": encoded(scene(1, 12, 12)),
    }
    source = plant(tmp_path / "src", tree)
    done = pack_raw(source, tmp_path / "out", resize=12)
    assert (done.pixels, done.enlarged) == ((12, 12), 1)
    arrays = {s["__key__"]: s["image"] for s in sequences.open(tmp_path / "out", decode="numpy")}
    assert {a.shape for a in arrays.values()} == {(12, 12, 3)}
    assert np.array_equal(arrays["a/fits.png"], scene(1, 12, 12))
    with Image.open(io.BytesIO(tree["a/wide.jpg"])) as wide:
        small = wide.convert("RGB").resize((24, 12), Image.Resampling.LANCZOS)
    expected = np.asarray(small.crop((6, 0, 18, 12)), np.int16)
    assert np.abs(arrays["a/wide.jpg"] - expected).max() <= 1
    assert "enlarged, since smaller: 1 image" in shardio(
        "pack", source, tmp_path / "two", "--encode", "raw", "--resize", "12"
    ).stdout  # fmt: skip


def test_images_of_another_size_are_listed_or_left_out(tmp_path: Path) -> None:
    source = png_folder(tmp_path / "src")
    plant(source, {"cat/odd.png": encoded(scene(0, 7, 8)), "cat/torn.jpg": noise("x", 99)})
    with pytest.raises(SourceError) as raised:
        pack_raw(source, tmp_path / "out")
    said = str(raised.value)
    assert "cat/odd.png: it is 8 x 7, and the first image 8 x 6" in said
    assert "--resize" in said and "cat/torn.jpg: cannot be decoded" in said
    assert not (tmp_path / "out" / manifest.MANIFEST).exists()
    done = pack_raw(source, tmp_path / "out", on_error="skip")
    assert done.records == 12
    assert [key for key, _ in done.rejected] == ["cat/odd.png", "cat/torn.jpg"]


def test_the_size_is_that_of_the_first_image_that_can_be_decoded(tmp_path: Path) -> None:
    source = png_folder(tmp_path / "src")
    plant(source, {"cat/0.jpg": noise("torn", 50)})  # the first by key
    assert pack_raw(source, tmp_path / "out", on_error="skip").pixels == (6, 8)
    nothing = plant(tmp_path / "none", {"a/0.jpg": noise("torn", 50)})
    with pytest.raises(SourceError, match=r"size is not known:\n  a/0\.jpg: cannot be decoded"):
        pack_raw(nothing, tmp_path / "two")


def test_the_bytes_depend_on_neither_processes_nor_parts_nor_interruptions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = png_folder(tmp_path / "src", 23)
    one = pack_raw(source, tmp_path / "one")
    pack_raw(source, tmp_path / "two", jobs=2)
    for part in ("2/2", "1/2"):
        pack_raw(source, tmp_path / "parts", part=part)
    commit(tmp_path / "parts", jobs=1)
    interrupted(monkeypatch, pack_raw, source, tmp_path / "killed")
    assert pack_raw(source, tmp_path / "killed").kept == 2
    assert one.shards == 5
    for name in ("two", "parts", "killed"):
        assert content(tmp_path / name) == content(tmp_path / "one")


@pytest.mark.skipif(native.core is None, reason="the core was not built")
def test_squares_do_not_depend_on_the_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"{i}.jpg": encoded(scene(i, 61, 83), "JPEG", quality=90) for i in range(8)}
    source = plant(tmp_path / "src", files)
    pack_raw(source, tmp_path / "one", resize=24)
    monkeypatch.setattr(native, "core", None)
    pack_raw(source, tmp_path / "two", resize=24)
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_shards_are_cut_by_the_bytes_of_the_pixels(tmp_path: Path) -> None:
    tree = {f"a/{i}.png": encoded(np.zeros((40, 50, 3), np.uint8)) for i in range(20)}
    source = plant(tmp_path / "src", tree)  # 6 KB of pixels each, in files of a hundredth
    done = pack_raw(source, tmp_path / "out", max_records=None, shard_size=31_000)
    assert (done.shards, done.records) == (4, 20)
    assert all(30_000 < path.stat().st_size < 32_000 for path in shards(tmp_path / "out"))


def test_the_options_say_it_and_another_encoding_is_another_dataset(tmp_path: Path) -> None:
    source = png_folder(tmp_path / "src")
    pack_raw(source, tmp_path / "out")
    made = manifest.load(locate(tmp_path / "out"))
    assert made.options["encode"] == "raw" and made.options["pixels"] == [6, 8]
    assert made.options["quality"] is None
    assert pack_raw(source, tmp_path / "out").already
    with pytest.raises(ExistsError, match="option encode: was 'raw', now not given"):
        pack(source, tmp_path / "out", jobs=1, plan=PlanOptions(max_records=5))
    with pytest.raises(ExistsError, match="option resize: was not given, now 4"):
        pack_raw(source, tmp_path / "out", resize=4)
    [plain] = pack(source, tmp_path / "plain", jobs=1, plan=PlanOptions(max_records=5))
    with pytest.raises(ExistsError, match="option encode: was not given, now 'raw'"):
        pack_raw(source, tmp_path / "plain")
    options = manifest.load(locate(tmp_path / "plain")).options
    assert plain.pixels is None and not options.keys() & {"encode", "pixels"}  # ids as ever


def test_splits_and_lmdb_take_raw_pixels_too(tmp_path: Path) -> None:
    source = tmp_path / "src"
    for split, size in (("train", 6), ("val", 9)):
        png_folder(source / split, 5, size, size)
    done = pack(source, tmp_path / "out", jobs=1, format="lmdb", images=ImageOptions(encode="raw"))
    assert [(one.split, one.pixels) for one in done] == [("train", (6, 6)), ("val", (9, 9))]
    [one] = {s["image"].shape for s in sequences.open(tmp_path / "out/val", decode="numpy")}
    assert one == (9, 9, 3)
    train = ShardDataset(
        tmp_path / "out/train", batch_size=3, fields=("image", "label"), decode="numpy"
    )
    assert sum(len(labels) for _, labels in train) == 5


def test_the_size_is_said_before_packing(tmp_path: Path) -> None:
    source = png_folder(tmp_path / "src")
    size = sum(len(data) for data in content(source).values() if data)
    lines: list[str] = []

    def announce(line: str) -> None:
        assert not shards(tmp_path / "out")
        lines.append(line)

    pack_raw(source, tmp_path / "out", announce=announce)
    pack_raw(source, tmp_path / "out", announce=announce)  # already packed
    assert lines == [
        f"raw pixels: 12 images of 8 x 6, 1.7 KiB (the source has {size / 1024:.1f} KiB)"
    ]
    arguments = ("pack", source, tmp_path / "cli", "--encode", "raw")
    assert lines[0] in shardio(*arguments, "--dry-run").stderr
    assert shardio_json(*arguments)["datasets"][0]["pixels"] == [6, 8]
    assert "raw" not in shardio(*arguments, "--overwrite", "--quiet").stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encode": "jpeg"}, "expected 'raw'"),
        ({"encode": "raw", "resize": 1 << 16}, "resize is 65536"),
        ({"encode": "raw", "resize": 0}, "resize is 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        pack(png_folder(tmp_path / "src"), tmp_path / "out", **grouped({"jobs": 1} | options))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["bytes", "array", "str", None])
def test_a_source_without_images_is_refused(tmp_path: Path, kind: str | None) -> None:
    values = {"bytes": b"12", "array": np.zeros((2, 2, 3), np.uint8), "str": "x", None: 1}
    name = "image" if kind else "other"
    make(
        tmp_path / "src",
        [2],
        fields=(("__key__", "key"), (name, kind or "int")),
        sample=lambda i: {"__key__": b"%d" % i, name: values[kind]},
        classes=None,
    )
    with pytest.raises(OptionError, match=r"--encode raw: makes pixels of the field `image`"):
        pack(tmp_path / "src", tmp_path / "out", jobs=1, images=ImageOptions(encode="raw"))


def test_a_packed_dataset_can_be_packed_again_raw(tmp_path: Path) -> None:
    source = png_folder(tmp_path / "src")
    pack(source, tmp_path / "jpeg", jobs=1)
    done = pack_raw(tmp_path / "jpeg", tmp_path / "again")
    pack_raw(source, tmp_path / "raw")
    assert done.pixels == (6, 8)
    assert packed(tmp_path / "again") == packed(tmp_path / "raw")


def test_images_that_are_none_stay_none(tmp_path: Path) -> None:
    source = make(
        tmp_path / "source",
        [3],
        image=lambda i: None if i == 0 else encoded(scene(i)),  # type: ignore[arg-type, return-value]
    )
    done = pack_raw(source, tmp_path / "out", shuffle=False)
    assert done.pixels == (6, 8)
    images = sequences.open(tmp_path / "out", decode="numpy", fields=("image",))
    assert images[0] == (None,) and np.array_equal(images[2][0], scene(2))


def test_unpack_names_the_files_for_what_they_are(tmp_path: Path) -> None:
    source = plant(
        tmp_path / "src",
        {
            "a/1.jpg": encoded(scene(1)),
            "a/1.png": encoded(scene(2)),
            "a/2.PPM": encoded(scene(3), "PPM"),
            "empty": None,
        },
    )
    pack_raw(source, tmp_path / "out")
    unpack(tmp_path / "out", tmp_path / "back")
    back = content(tmp_path / "back")
    assert set(back) == {b"a", b"empty", b"a/1.jpg.ppm", b"a/1.png.ppm", b"a/2.PPM"}
    for name, number in (("1.jpg.ppm", 1), ("1.png.ppm", 2), ("2.PPM", 3)):
        with Image.open(tmp_path / "back" / "a" / name) as opened:
            assert np.array_equal(np.asarray(opened), scene(number))
    export(tmp_path / "out", tmp_path / "exported", format="imagefolder")
    assert content(tmp_path / "exported") == back


def test_unpack_refuses_two_records_that_would_be_one_file(tmp_path: Path) -> None:
    tree = {"a/1.jpg": encoded(scene(1)), "a/1.jpg.ppm": encoded(scene(2), "PPM")}
    pack_raw(plant(tmp_path / "src", tree), tmp_path / "out")
    with pytest.raises(OptionError, match=r"a/1\.jpg\.ppm is there twice"):
        unpack(tmp_path / "out", tmp_path / "back", overwrite=True)
    assert not (tmp_path / "back").exists()


def test_grouped_files_are_unpacked_as_ppm(tmp_path: Path) -> None:
    tree: dict[str | bytes, bytes | None] = {}
    for i in range(3):
        tree |= {f"{i}.png": encoded(scene(i)), f"{i}.txt": b"text %d" % i}
    pack_raw(plant(tmp_path / "src", tree), tmp_path / "out", kind="files")
    unpack(tmp_path / "out", tmp_path / "back")
    back = content(tmp_path / "back")
    assert set(back) == {b"%d.%s" % (i, e) for i in range(3) for e in (b"ppm", b"txt")}
    assert back[b"1.ppm"] == image.ppm(scene(1))


def test_resize_shrinks_the_short_side_and_never_enlarges(tmp_path: Path) -> None:
    tree = {
        "a/wide.jpg": picture(200, 100),
        "a/tall.png": picture(60, 120, "PNG"),
        "a/small.jpg": picture(40, 30),
        "a/anim.gif": picture(90, 90, "GIF"),
    }
    source = plant(tmp_path / "src", tree)
    done = pack_one(source, tmp_path / "out", resize=50)
    packed = {s["__key__"]: s["image"] for s in sequences.stored(tmp_path / "out")}
    opened = {s["__key__"]: s["image"].size for s in sequences.open(tmp_path / "out")}
    assert opened["a/wide.jpg"] == (100, 50)
    assert opened["a/tall.png"] == (50, 100)
    assert packed[b"a/small.jpg"] == tree["a/small.jpg"]
    assert packed[b"a/anim.gif"] == tree["a/anim.gif"]
    assert done.full_size == 1  # the GIF; not the one that is small already
    pack_one(source, tmp_path / "two", resize=50, jobs=2)
    assert content(tmp_path / "out") == content(tmp_path / "two")


def test_photos_with_a_second_picture_keep_their_size_and_are_counted(tmp_path: Path) -> None:
    from PIL import Image

    frames = [Image.new("RGB", (300, 200), c) for c in ("red", "blue")]
    source = plant(tmp_path / "src", {"a/x.jpg": picture(300, 200)})
    frames[0].save(source / "a" / "phone.jpg", "MPO", save_all=True, append_images=frames[1:])
    assert image_type((source / "a" / "phone.jpg").read_bytes()) == "JPEG"
    done = pack_one(source, tmp_path / "out", resize=50)
    assert done.full_size == 1
    assert image.decode(sequences.stored(tmp_path / "out")[0]["image"]).size


def test_images_that_cannot_be_resized_are_problems(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", {"a/x.jpg": picture(90, 80), "a/torn.jpg": noise("x", 500)})
    with pytest.raises(SourceError, match=r"a/torn\.jpg: cannot be resized"):
        pack_one(source, tmp_path / "out", resize=50)


@pytest.mark.parametrize(
    "options", [{"resize": 50}, {"encode": "raw"}, {"encode": "raw", "resize": 9}]
)
def test_max_pixels_is_the_limit_of_what_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    source, out = plant(tmp_path / "src", {"a/x.jpg": picture(400, 300)}), tmp_path / "out"
    with pytest.raises(SourceError, match=r"over the limit of 119,999; .* give max_pixels=120000"):
        pack_one(source, out, max_pixels=119_999, **options)
    monkeypatch.setattr(image, "MAX_PIXELS", 119_999)
    with pytest.raises(SourceError, match=r"over the limit of 119,999"):
        pack_one(source, out, restart=True, **options)
    assert pack_one(source, out, restart=True, max_pixels=120_000, **options).records == 1
    assert manifest.load(locate(out)).options["max_pixels"] == 120_000
    with pytest.raises(OptionError, match="max_pixels is 9, but images are packed as they are"):
        pack_one(source, out, max_pixels=9)


# --- check_images ---------------------------------------------------------------------------------

TORN = ["a/torn.jpg", "a/torn.png", "b/no.gif"]


@pytest.fixture
def torn(tmp_path: Path) -> Path:
    """A folder with three images that cannot be decoded: TORN."""
    tree = {f"{'ab'[i % 2]}/{i}.jpg": picture(30 + i, 20) for i in range(9)}
    tree |= {"a/torn.jpg": picture(64, 48)[:-99], "a/torn.png": picture(64, 48, "PNG")[:-99]}
    tree |= {"b/x.png": picture(9, 9, "PNG"), "b/no.gif": b"GIF89a" + bytes(40)}
    return plant(tmp_path / "src", dict(tree))


@pytest.mark.parametrize("core", [True, False], ids=["core", "PIL"])
@pytest.mark.parametrize("format", ["record", "lmdb"])
def test_what_cannot_be_decoded_is_listed_or_left_out_if_asked(
    torn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, core: bool
) -> None:
    if not core:
        monkeypatch.setattr(native, "core", None)
    check: dict[str, Any] = {"check_images": True, "format": format, "on_error": "skip"}
    assert pack_one(torn, tmp_path / "unseen", format=format).records == 13
    found = verify(tmp_path / "unseen", decode=True, jobs=1).damages
    assert sorted(one.key or "" for one in found) == TORN
    out = tmp_path / "out"
    with pytest.raises(SourceError) as raised:
        pack_one(torn, out, **check | {"on_error": "raise"})
    said = str(raised.value)
    assert "a/torn.jpg: image cannot be decoded: " in said and "b/x.png" not in said
    assert all(f"{key}: image cannot be decoded: " in said for key in TORN)
    assert not (out / manifest.MANIFEST).exists()
    done = pack_one(torn, out, **check)
    assert (done.records, [key for key, _ in done.rejected]) == (10, TORN)
    lines = (out / "rejected.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines] == TORN
    assert not verify(out, decode=True, jobs=1).damages
    pack_one(torn, tmp_path / "two", jobs=2, **check)
    assert content(tmp_path / "two") == content(out)


def test_an_interrupted_check_goes_on_and_parts_make_the_same(
    torn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check: dict[str, Any] = {"check_images": True, "on_error": "skip"}
    whole = pack_one(torn, tmp_path / "whole", **check)
    interrupted(monkeypatch, partial(pack_one, **check), torn, tmp_path / "killed")
    with pytest.raises(SourceChangedError, match=r"check_images: was True, now not given"):
        pack_one(torn, tmp_path / "killed", on_error="skip")
    again = pack_one(torn, tmp_path / "killed", **check)
    assert again.kept and again.rejected == whole.rejected
    plan(torn, tmp_path / "parts", **grouped({"check_images": True, "max_records": 4}))
    for part in ("1/2", "2/2"):  # as it was planned
        pack(torn, tmp_path / "parts", plan=PlanOptions(part=part), on_error="skip", jobs=1)
    [done] = commit(tmp_path / "parts", jobs=1)
    assert done.rejected == whole.rejected
    names = {path.name: path.read_bytes() for path in shards(tmp_path / "whole")}
    for other in ("killed", "parts"):
        assert {path.name: path.read_bytes() for path in shards(tmp_path / other)} == names


def test_images_that_are_written_anew_are_checked_by_that(torn: Path, tmp_path: Path) -> None:
    for number, more in enumerate(({"resize": 12}, {"resize": 500}, {"jpeg_tiles": True})):
        out = tmp_path / str(number)
        options: dict[str, Any] = {"check_images": True, "on_error": "skip"} | more
        assert [key for key, _ in pack_one(torn, out, **options).rejected] == TORN
        assert not verify(out, decode=True, jobs=1).damages
    done = pack_one(torn, tmp_path / "raw", encode="raw", resize=8, on_error="skip")
    assert [key for key, _ in done.rejected] == TORN


def test_every_field_of_images_is_checked_each_as_it_is_read(tmp_path: Path) -> None:
    depth = io.BytesIO()
    Image.new("F", (30, 20), 0.5).save(depth, "TIFF")
    tree = {f"images/{i}.jpg": picture(30, 20) for i in range(4)}
    tree |= {f"masks/{i}.tif": depth.getvalue() for i in range(4)}
    tree |= {"masks/2.tif": depth.getvalue()[:-900]}
    source = plant(tmp_path / "src", dict(tree))
    done = pack_one(source, tmp_path / "out", check_images=True, on_error="skip")
    [(key, why)] = done.rejected
    assert (key, why.split(":")[0]) == ("2.jpg", "mask cannot be decoded")


def test_members_of_archives_are_checked(torn: Path, tmp_path: Path) -> None:
    tree = {os.fsdecode(key): data for key, data in content(torn).items() if data is not None}
    write(tmp_path / "src.tar", tar(tree))
    done = pack_one(tmp_path / "src.tar", tmp_path / "out", check_images=True, on_error="skip")
    assert [key for key, _ in done.rejected] == TORN


@pytest.mark.parametrize("packed_so", [True, False])
def test_what_is_added_is_checked_as_the_dataset_was_or_if_asked(
    torn: Path, tmp_path: Path, packed_so: bool
) -> None:
    first = plant(tmp_path / "first", {"a/first.jpg": picture(20, 20)})
    for name in ("appended", "updated", "unasked"):
        pack_one(first, tmp_path / name, check_images=packed_so)
    asked: dict[str, Any] = {} if packed_so else {"check_images": True}
    out = tmp_path / "appended"
    with pytest.raises(SourceError, match=r"a/torn\.jpg: image cannot be decoded"):
        append(torn, out, jobs=1, **asked)
    done = append(torn, out, jobs=1, on_error="skip", **asked)
    assert (done.added, [key for key, _ in done.rejected]) == (10, TORN)
    assert (out / "rejected.jsonl").exists() and not verify(out, decode=True, jobs=1).damages
    out = tmp_path / "updated"
    changed = update(torn, out, jobs=1, gone="keep", on_error="skip", **asked)
    assert [key for key, _ in changed.rejected] == TORN
    assert len(sequences.open(out)) == 11 and not verify(out, decode=True, jobs=1).damages
    assert append(torn, tmp_path / "unasked", jobs=1, on_error="skip").added == 10 + 3 * (
        not packed_so
    )


def test_a_source_without_images_has_none_to_check(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", {"1.txt": b"one", "2.txt": b"two"})
    with pytest.raises(OptionError, match="check-images: decodes images, and no field here holds"):
        pack_one(source, tmp_path / "out", kind="files", check_images=True)
    with pytest.raises(OptionError, match="check_images"):
        ImageOptions(check_images=1)  # type: ignore[arg-type]
    source = plant(tmp_path / "one", {"a/x.jpg": picture(40, 30)})
    with pytest.raises(SourceError, match=r"over the limit of 1,199"):
        pack_one(source, tmp_path / "out", check_images=True, max_pixels=1199)
