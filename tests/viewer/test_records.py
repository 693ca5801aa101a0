"""One record: fields of every kind, boxes, masks, tiles, images that browsers do not show."""

import dataclasses
import io
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from PIL import Image
from support.small_datasets import jpeg, make, shard_files
from support.trees import picture, plant

import shardio
from shardio import DecodeError, RandomResizedCrop, Writer
from shardio.formats.sample import Schema
from shardio.images.decode import ppm
from shardio.viewer.details import find_boxes
from shardio.viewer.pages import Pages
from shardio.viewer.results import Query, Record
from shardio.viewer.view import open_view
from shardio.viewer.views import Views


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def write(folder: Path, fields: dict[str, str], *samples: dict[str, Any], **options: Any) -> Path:
    with Writer(folder, fields=fields, **options) as writer:
        for number, sample in enumerate(samples):
            writer.write({"__key__": f"{number}"} | dict.fromkeys(fields) | sample)
    return folder


def fields(record: Record) -> dict[str, str]:
    return {one.name: one.show for one in record.fields}


def pixels(data: bytes) -> Any:
    return np.array(Image.open(io.BytesIO(data)))


def test_a_record_says_where_its_bytes_lie_and_what_they_hash_to(tmp_path: Path) -> None:
    folder = make(tmp_path, [3, 4], image=jpeg)
    with open_view(folder) as view:
        record = view.record(5)
    [shard] = [path for path in shard_files(folder) if path.name == record.shard]
    data = shard.read_bytes()[record.start : record.start + record.bytes]
    assert jpeg(5) in data and data.endswith(jpeg(5))
    assert (
        record.checksum and record.checksum.stored == f"{int.from_bytes(data[:8], 'little'):016x}"
    )
    assert record.checksum.found == record.checksum.stored and record.checksum.ok
    assert (record.shard_number, record.number_in_shard, record.class_name) == (1, 2, "eel")
    assert (record.width, record.height) == (24, 16)
    assert record.image_format == "JPEG, 24 x 16, RGB"


def test_fields_of_every_kind_are_shown_as_text(tmp_path: Path) -> None:
    kinds = {
        "n": "int", "x": "float", "ok": "bool", "text": "str", "raw": "bytes", "words": "bytes",
        "array": "array", "meta": "json", "none": "str",
    }  # fmt: skip
    sample = {
        "n": 2**63, "x": float("nan"), "ok": False, "text": "a\x1b[31m\nb é", "raw": bytes(40),
        "words": b"caption", "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "meta": {"a": [1, b"\x00\xff", np.zeros(2, np.uint8)], "é": None},
    }  # fmt: skip
    with open_view(write(tmp_path / "out", kinds, sample)) as view:
        record = view.record(0)
        shown = fields(record)
        json.dumps(dataclasses.asdict(record), ensure_ascii=False).encode()
    assert shown["n"] == "9223372036854775808" and shown["x"] == "nan" and shown["ok"] == "False"
    assert shown["text"] == "a\\x1b[31m\nb é" and shown["words"] == "caption"
    assert shown["raw"].startswith("00 00 00") and shown["raw"].endswith("...")
    assert shown["array"].startswith("(2, 3) of int16\n[[0 1 2]")
    assert json.loads(shown["meta"]) == {"a": [1, "base64:AP8=", [0, 0]], "é": None}
    assert shown["none"] == "null"
    assert record.width is None and record.boxes == ()


def test_long_values_are_cut(tmp_path: Path) -> None:
    sample = {"text": "x" * 300_000, "meta": [0] * 100_000}
    with open_view(write(tmp_path / "out", {"text": "str", "meta": "json"}, sample)) as view:
        assert all(
            len(text) < 25_000 and text.endswith("...") for text in fields(view.record(0)).values()
        )


def test_boxes_of_coco_lie_on_the_image_also_where_it_was_made_smaller(tmp_path: Path) -> None:
    described = {
        "images": [{"id": 1, "file_name": "1.jpg", "width": 80, "height": 40}],
        "annotations": [
            {"id": 2, "image_id": 1, "category_id": 18, "bbox": [8, 4.5, 16, 20]},
            {"id": 3, "image_id": 1, "category_id": 3, "bbox": [0, 0, 80, 40]},
        ],
        "categories": [{"id": 18, "name": "dog"}, {"id": 3, "name": "car"}],
    }
    plant(
        tmp_path / "in",
        {"images/1.jpg": picture(80, 40), "coco.json": json.dumps(described).encode()},
    )
    for resize, scale in ((None, 1.0), (20, 0.5)):
        out = tmp_path / f"out-{resize}"
        shardio.pack(
            tmp_path / "in" / "coco.json",
            out,
            jobs=1,
            read=shardio.SourceOptions(root=str(tmp_path / "in" / "images")),
            resize=resize,
        )
        with open_view(out) as view:
            record = view.record(0)
            assert (record.width, record.height) == (80 * scale, 40 * scale)
            assert [(b.x, b.y, b.width, b.height, b.label) for b in record.boxes] == [
                (8 * scale, 4.5 * scale, 16 * scale, 20 * scale, "dog"),
                (0, 0, 80 * scale, 40 * scale, "car"),
            ]


def test_boxes_in_rows_are_found_by_the_fields_name(tmp_path: Path) -> None:
    rows = np.array([[1, 2, 3, 4, 9]], np.float32)
    kinds = {"image": "image", "bboxes": "array", "other": "json", "points": "array"}
    sample = {"image": jpeg(0), "bboxes": rows, "other": [[1, 2, 3, 4], "x"], "points": rows}
    wrong = {"image": jpeg(1), "bboxes": np.zeros(3), "other": [{"bbox": ["a", 1, 2, None]}, 7]}
    with open_view(write(tmp_path / "out", kinds, sample, wrong)) as view:
        assert [(b.x, b.y, b.width, b.height) for b in view.record(0).boxes] == [(1, 2, 3, 4)]
        assert view.record(1).boxes == ()


def test_a_page_holds_a_thousand_boxes_of_a_field(tmp_path: Path) -> None:
    kinds = {"image": "image", "boxes": "array", "objects": "json"}
    sample = {
        "image": jpeg(0),
        "boxes": np.ones((5000, 4), np.int32),
        "objects": [{"bbox": [1, 2, 3, 4]}] * 5000,
    }
    with open_view(write(tmp_path / "out", kinds, sample)) as view:
        assert len(view.record(0).boxes) == 2000


def test_an_overlay_of_a_huge_mask_is_drawn_smaller(tmp_path: Path) -> None:
    mask = encoded(Image.new("L", (5000, 8)), "PNG")
    folder = write(tmp_path / "out", {"image": "image", "mask": "image"}, {"mask": mask})
    with closing(Views(folder)) as views:
        answer = Pages(views)("image/0", {"field": ["mask"], "overlay": ["1"]})
    assert pixels(answer.body).shape == (7, 4096, 4)


def test_a_box_that_no_float_holds_is_no_box() -> None:
    sample = {"__key__": "0", "objects": [{"bbox": [10**400, 1, 2, 3]}, {"bbox": [0, 1, 2, 3]}]}
    boxes = find_boxes(sample, Schema((("__key__", "key"), ("objects", "json"))), None, None)
    assert [box.y for box in boxes] == [1]


def test_masks_are_told_from_images_and_laid_over_them(tmp_path: Path) -> None:
    ids = np.zeros((16, 24), np.uint8)
    ids[4:8, :12], ids[8:, :], ids[0, 0] = 1, 2, 255
    grey = encoded(Image.fromarray(ids), "PNG")
    palette = Image.fromarray(ids).convert("P")
    palette.putpalette([0, 0, 0, 10, 20, 30, 40, 50, 60])
    kinds = dict.fromkeys(("image", "mask", "palette", "second", "small"), "image")
    sample = {
        "image": jpeg(0),
        "mask": grey,
        "palette": encoded(palette, "PNG"),
        "second": jpeg(1),
        "small": encoded(Image.new("L", (8, 8)), "PNG"),
    }
    with open_view(write(tmp_path / "out", kinds, sample)) as view:
        found = {one.name: (one.image, one.mask) for one in view.record(0).fields}
        assert found == {
            "image": (True, False), "mask": (True, True), "palette": (True, True),
            "second": (True, False), "small": (True, False),
        }  # fmt: skip
        laid = pixels(view.image(0, "mask", overlay=True).data)
        assert laid.shape == (16, 24, 4) and view.image(0, "mask").media_type == "image/png"
        assert laid[1, 1, 3] == 0 < laid[5, 5, 3] < 255 and laid[0, 0, 3] > 0
        assert (laid[5, 5, :3] != laid[9, 9, :3]).any()
        own = pixels(view.image(0, "palette", overlay=True).data)
        assert own[5, 5, :3].tolist() == [10, 20, 30] and own[9, 9, :3].tolist() == [40, 50, 60]
        small = pixels(view.image(0, "mask", 12, overlay=True).data)
        assert small.shape == (8, 12, 4)
        assert {tuple(c) for c in small.reshape(-1, 4).tolist()} <= {
            tuple(c) for c in laid.reshape(-1, 4).tolist()
        }  # no colours between classes


def test_images_that_no_browser_shows_become_png(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 256, (6, 9, 3), np.uint8)
    deep = Image.fromarray(np.arange(54, dtype=np.uint16).reshape(6, 9) * 1000)
    folder = write(
        tmp_path / "out",
        {"image": "image"},
        {"image": ppm(array)},
        {"image": encoded(Image.fromarray(array), "TIFF")},
        {"image": encoded(deep, "PNG")},
        {"image": None},
        {"image": b"\xff\xd8\xff no image"},
    )
    with open_view(folder) as view:
        for number in (0, 1):
            shown = view.image(number)
            assert shown.media_type == "image/png" and (pixels(shown.data) == array).all()
        assert view.record(0).image_format == "PPM, 9 x 6, RGB"
        assert pixels(view.image(2, side=100).data).dtype == np.uint8
        with pytest.raises(KeyError):
            view.image(3)
        empty = view.record(3)
        assert fields(empty) == {"image": "null"} and empty.damaged is None
        with pytest.raises(DecodeError, match="image of 12 bytes"):
            view.image(4, side=64)
        assert "12 bytes" in (view.record(4).damaged or "")
        assert [one.number for one in view.damaged()] == [4]
        assert len(view.page().cards) == 5


def test_pixels_in_arrays_and_images_in_bytes_are_shown(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 256, (6, 9, 3), np.uint8)
    ids = np.arange(54).reshape(6, 9) % 4
    kinds = {"image": "array", "mask": "array", "file": "bytes", "other": "array"}
    first = {"image": array, "mask": ids, "file": jpeg(0), "other": np.zeros((2, 2))}
    second = {"image": np.zeros(3), "file": b"text"}
    with open_view(write(tmp_path / "out", kinds, first, second)) as view:
        summary = view.summary()
        assert (summary.images, summary.main_image) == (("image",), "image")
        record = view.record(0)
        assert (record.width, record.height) == (9, 6)
        assert {one.name: (one.image, one.mask) for one in record.fields} == {
            "image": (True, False), "mask": (True, True), "file": (True, False),
            "other": (False, False),
        }  # fmt: skip
        assert (pixels(view.image(0).data) == array).all()
        assert pixels(view.image(0, "mask", overlay=True).data).shape == (6, 9, 4)
        assert view.image(0, "file").data == jpeg(0)
        assert view.record(1).damaged is None and fields(view.record(1))["file"] == "text"
        with pytest.raises(DecodeError, match="holds no image"):
            view.image(1)


def test_sizes_are_those_of_the_upright_image(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = encoded(Image.new("RGB", (30, 20)), "JPEG", exif=exif)
    with open_view(write(tmp_path / "out", {"image": "image"}, {"image": turned})) as view:
        record = view.record(0)
        assert (record.width, record.height) == (20, 30)
        assert record.image_format == "JPEG, 20 x 30, RGB, turned by EXIF"
        assert pixels(view.image(0, side=15).data).shape == (15, 10, 3)
        [crop] = view.crops(0, RandomResizedCrop(224, scale=(1.0, 1.0), ratio=(2 / 3, 2 / 3)), (1,))
        assert (crop.x, crop.y, crop.width, crop.height) == (0, 0, 20, 30)


def test_tiles_of_a_jpeg_are_a_grid(tmp_path: Path) -> None:
    from shardio.images import jpeg_tiles

    restart = encoded(Image.radial_gradient("L").resize((128, 64)), "JPEG", restart_marker_blocks=4)
    assert jpeg_tiles.tiles(restart) is not None
    folder = write(tmp_path / "out", {"image": "image"}, {"image": restart}, {"image": jpeg(0)})
    with open_view(folder) as view:
        grid = view.record(0).tiles
        assert grid and (grid.width, grid.height) == (128, 64)
        assert (grid.columns, grid.rows, grid.tile_width, grid.tile_height) == (4, 8, 32, 8)
        assert view.record(1).tiles is None


def test_grouped_files_are_one_record_with_their_fields(tmp_path: Path) -> None:
    tree: dict[str | bytes, bytes | None] = {}
    for name in ("a", "b"):
        tree |= {f"{name}.jpg": jpeg(ord(name)), f"{name}.txt": f"text of {name}".encode()}
    shardio.pack(plant(tmp_path / "in", tree), tmp_path / "out", jobs=1)
    with open_view(tmp_path / "out") as view:
        shown = [fields(view.record(number)) for number in range(2)]
        assert sorted(text for one in shown for text in one.values() if "text" in text) == [
            "text of a", "text of b"
        ]  # fmt: skip
        assert view.page(Query(search="a"), search_s=60.0).cards


def test_a_checksum_of_foreign_records_is_that_of_their_bytes(tmp_path: Path) -> None:
    source = plant(tmp_path / "in", {f"c/{n}.jpg": jpeg(n) for n in range(3)})
    shardio.index(source, jobs=1)
    with open_view(source) as view:
        record = view.record(1)
        assert record.checksum and record.checksum.covers == "stored bytes"
        image = jpeg(int(record.key[2]))
        assert record.checksum.stored == f"{xxhash.xxh3_64_intdigest(image):016x}"
        assert view.image(1).data == image
