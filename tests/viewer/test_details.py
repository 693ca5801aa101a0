"""What a record's page shows of its fields: values as text, boxes, masks, tiles."""

import dataclasses
import json
from pathlib import Path

import numpy as np
from PIL import Image
from support.forging import memory_below
from support.small_datasets import jpeg
from support.trees import picture, plant
from support.viewer_records import encoded, fields, write

import shardio
from shardio.formats.sample import Schema
from shardio.viewer.details import find_boxes, show_value
from shardio.viewer.view import open_view


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


def test_of_nested_values_no_more_is_written_than_is_shown(tmp_path: Path) -> None:
    """A MB of them, each line indented, would be a hundred."""
    deep: list[object] = []
    for _ in range(1_500):
        deep = [deep]
    chain: list[object] = []
    for _ in range(28):
        chain = [chain]
    with memory_below(8 << 20):
        assert show_value([chain] * 8_000).endswith("...")
        assert show_value(deep).endswith("...")


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


def test_a_box_that_no_float_holds_is_no_box() -> None:
    sample = {"__key__": "0", "objects": [{"bbox": [10**400, 1, 2, 3]}, {"bbox": [0, 1, 2, 3]}]}
    boxes = find_boxes(sample, Schema((("__key__", "key"), ("objects", "json"))), None, None)
    assert [box.y for box in boxes] == [1]


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
