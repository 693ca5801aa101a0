"""Boxes of Pascal VOC and YOLO are read as annotations of COCO, in pixels."""

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from shardio.errors import DependencyError
from shardio.packing.sources import boxes
from shardio.packing.sources.boxes import (
    AnnotatedBox,
    Boxes,
    parse_voc,
    parse_yolo,
    yolo_boxes,
    yolo_names,
)

# VOC2012's Annotations/2007_000027.xml, one of its parts left out.
PERSON = b"""<annotation>
	<folder>VOC2012</folder>
	<filename>2007_000027.jpg</filename>
	<source>
		<database>The VOC2007 Database</database>
		<annotation>PASCAL VOC2007</annotation>
		<image>flickr</image>
	</source>
	<size>
		<width>486</width>
		<height>500</height>
		<depth>3</depth>
	</size>
	<segmented>0</segmented>
	<object>
		<name>person</name>
		<pose>Unspecified</pose>
		<truncated>0</truncated>
		<difficult>0</difficult>
		<bndbox>
			<xmin>174</xmin>
			<ymin>101</ymin>
			<xmax>349</xmax>
			<ymax>351</ymax>
		</bndbox>
		<part>
			<name>head</name>
			<bndbox>
				<xmin>169</xmin>
				<ymin>104</ymin>
				<xmax>209</xmax>
				<ymax>146</ymax>
			</bndbox>
		</part>
	</object>
</annotation>
"""
# Of ILSVRC: the corners in another order, `occluded`, and what is not of VOC.
FOX = b"""<annotation><folder>a</folder><filename>000022</filename>
<size><width>1280</width><height>720</height></size>
<object><trackid>0</trackid><name>n01674464</name>
<bndbox><xmax>1041</xmax><xmin>311</xmin><ymax>419</ymax><ymin>211</ymin></bndbox>
<occluded>1</occluded><generated>0</generated></object></annotation>"""
WHOLE = (
    "<annotation><size><width>{0}</width><height>4</height></size><object><name>ä &amp; b</name>"
    "<bndbox><xmin>{1}</xmin><ymin>1</ymin><xmax>{2}</xmax><ymax>4</ymax></bndbox></object>"
    "</annotation>"
)
FIVE = "expected a class, and 4 numbers of a box"
YOLO = b"""1 0.617 0.3594420600858369 0.114 0.17381974248927037
0 0.5 0.5 1 1

45 0.094 0.38626609442060084 0.156 0.23605150214592274
"""


def refusal(read: Callable[..., Any], *given: Any) -> str:
    with pytest.raises(ValueError, match="line ") as caught:
        read(*given)
    return str(caught.value)


# --- Pascal VOC -----------------------------------------------------------------------------------


def test_a_box_of_voc_counts_pixels_from_0_and_includes_the_last() -> None:
    [person] = parse_voc(PERSON).objects
    assert person == {
        "bbox": [173, 100, 176, 251],
        "category": "person",
        "pose": "Unspecified",
        "truncated": 0,
        "difficult": 0,
    }
    assert [type(one) for one in person["bbox"]] == [int] * 4
    whole = parse_voc(WHOLE.format(6, 1, 6).encode())
    assert whole == Boxes(6, 4, [{"bbox": [0, 0, 6, 4], "category": "ä & b"}])


def test_only_what_is_there_is_kept() -> None:
    found = parse_voc(FOX)
    assert (found.width, found.height) == (1280, 720)
    assert found.objects == [{"bbox": [310, 210, 731, 209], "category": "n01674464", "occluded": 1}]


def test_floats_stay_floats() -> None:
    [one] = parse_voc(WHOLE.format(6, "45.70000076293945", "5e1").encode()).objects
    assert one["bbox"] == [44.70000076293945, 0, 50 - 45.70000076293945 + 1, 4]
    assert parse_voc(WHOLE.format("6.0", 1, 6).encode()).width == 6


def test_a_size_that_is_not_known_is_none() -> None:
    assert parse_voc(WHOLE.format(0, 1, 6).encode()).width is None
    assert parse_voc(WHOLE.format("", 1, 6).encode()).width is None
    assert parse_voc(b"<annotation/>") == Boxes(None, None, [])


def test_an_object_without_a_box_has_none_and_not_that_of_its_part() -> None:
    own = PERSON.index(b"<bndbox>"), PERSON.index(b"</bndbox>") + len(b"</bndbox>")
    [person] = parse_voc(PERSON[: own[0]] + PERSON[own[1] :]).objects
    assert "bbox" not in person and person["category"] == "person"


def test_encodings_that_xml_declares_are_read() -> None:
    text = WHOLE.format(6, 1, 6)
    for encoding in ("utf-8", "utf-8-sig", "iso-8859-1", "utf-16"):
        head = "" if encoding == "utf-8-sig" else f'<?xml version="1.0" encoding="{encoding}"?>'
        [one] = parse_voc((head + text).encode(encoding)).objects
        assert one["category"] == "ä & b"


BOMB = b"""<?xml version="1.0"?>
<!DOCTYPE annotation [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>
<annotation><object><name>&b;</name></object></annotation>"""


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (BOMB, "line 2: expected XML without a DOCTYPE; found one; remove it"),
        (b'<!DOCTYPE a SYSTEM "file:///etc/passwd"><annotation/>', "line 1: expected XML without"),
        (b"<annotation><name>&a;</name></annotation>", "line 1: expected XML; found undefined ent"),
        (b"", "line 1: expected XML; found no element found"),
        (b"\n0 0.5 0.5 0.1 0.1", "line 2: expected XML; found"),
        (PERSON[: PERSON.index(b"</size>")], "line 13: expected XML; found no element found"),
        (b'<?xml version="1.0" encoding="none"?><annotation/>', "line 1: expected XML; found unk"),
        (b'<?xml version="1.0" encoding="gbk"?><annotation/>', "line 1: expected XML; found"),
        (b"<a>" * 40, "line 1: expected at most 32 elements, nested; found more"),
        (b" " * (boxes.MAX_BYTES + 1), "line 1: expected a file of at most 4,194,304 bytes; found"),
        (b"\n<data/>", "line 2: expected annotation, as Pascal VOC has it; found data"),
    ],
)
def test_voc_that_cannot_be_read_says_where(data: bytes, message: str) -> None:
    assert refusal(parse_voc, data).startswith(message)


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        (b">174<", b">left<", "line 20: expected a number as xmin of bndbox; found left"),
        (b">174<", b"><", "line 20: expected a number as xmin of bndbox; found nothing"),
        (b">174<", b">nan<", "line 20: expected a number as xmin of bndbox; found nan"),
        (b">174<", b">350<", "line 20: expected a box that ends behind its begin"),
        (b"ymin", b"top", "line 20: expected a number as ymin of bndbox; found nothing"),
        (b">person<", b"> <", "line 15: expected the name of the object; found none"),
        (b"<part>", b"<bndbox/><part>", "line 26: expected one bndbox in object; found"),
        (b">486<", b">wide<", "line 9: expected a whole number as width; found wide"),
        (b">486<", b">-1<", "line 9: expected a whole number as width; found -1"),
        (b">486<", b">1.5<", "line 9: expected a whole number as width; found 1.5"),
    ],
)
def test_values_of_voc_that_cannot_be_read_are_named(was: bytes, now: bytes, message: str) -> None:
    assert refusal(parse_voc, PERSON.replace(was, now)).startswith(message)


# --- YOLO -----------------------------------------------------------------------------------------


def test_a_line_of_yolo_is_a_class_and_a_box() -> None:
    rows = parse_yolo(YOLO)
    assert rows[0] == AnnotatedBox(1, (0.617, 0.3594420600858369, 0.114, 0.17381974248927037))
    assert [row.label for row in rows] == [1, 0, 45]
    assert yolo_boxes(rows[1:2], 640, 480) == [{"bbox": [0, 0, 640, 480], "label": 0}]
    [one] = yolo_boxes(parse_yolo(b"\xef\xbb\xbf 7\t0.5 0.25 0.25 0.125\r\n"), 400, 800)
    assert one == {"bbox": [150, 150, 100, 100], "label": 7}
    assert parse_yolo(b"\n") == []


def test_more_numbers_are_a_score_or_a_polygon() -> None:
    rows = parse_yolo(b"0 0.5 0.5 0.5 0.5 0.875\n3.0 0.25 0.5 0.75 0.5 0.5 1\n")
    assert rows[0].score == 0.875 and rows[0].polygon == ()
    assert rows[1] == AnnotatedBox(3, (0.5, 0.75, 0.5, 0.5), (0.25, 0.5, 0.75, 0.5, 0.5, 1.0))
    assert yolo_boxes(rows, 100, 200) == [
        {"bbox": [25, 50, 50, 100], "label": 0, "score": 0.875},
        {"bbox": [25, 100, 50, 100], "label": 3, "segmentation": [[25, 100, 75, 100, 50, 200]]},
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0 0.5 0.5 0.1", f"{FIVE}, or x and y of each corner; found"),
        ("0 0.5 0.5 0.1 0.1 0.1 0.1 0.1", f"{FIVE}, or x and y of each corner; found"),
        ("cat 0.5 0.5 0.1 0.1", FIVE),
        ("0 0.5 0.5 0.1 nan", FIVE),
        ("0,0.5,0.5,0.1,0.1", FIVE),
        ("-1 0.5 0.5 0.1 0.1", "expected the number of a class, from 0; found -1 0.5 0.5 0.1 0.1"),
        ("0.5 0.5 0.5 0.1 0.1", "expected the number of a class, from 0"),
        ("0 320 240 64 48", "expected numbers from 0 to 1, parts of width and height; found 0 320"),
        ("0 0.5 0.5 -0.1 0.1", "expected numbers from 0 to 1"),
    ],
)
def test_a_line_that_is_no_object_is_named(line: str, message: str) -> None:
    assert refusal(parse_yolo, YOLO + line.encode()).startswith(f"line 5: {message}")


def test_numbers_that_were_rounded_beyond_the_image_are_read() -> None:
    assert parse_yolo(b"0 1.00002 0.5 0.1 -0.001")[0].box == (1.00002, 0.5, 0.1, -0.001)


def test_text_that_is_none_is_refused() -> None:
    assert refusal(parse_yolo, b"0 0.5 0.5 1 1\n\xff") == "line 2: expected UTF-8; found 0xff"
    assert "at most 4,194,304 bytes" in refusal(parse_yolo, b"\n" * (boxes.MAX_BYTES + 1))


# --- names of classes -----------------------------------------------------------------------------

OWN = "expected a name of its own for each class"
ROBOFLOW = """train: ../train/images
val: ../valid/images

nc: 3
names: ['head', 'helmet', 'person']
"""
COCO128 = """# Ultralytics YOLO 🚀, AGPL-3.0 license
path: ../datasets/coco128  # dataset root dir
train: images/train2017  # train images (relative to 'path') 128 images
test:  # test images (optional)

# Classes
names:
  0: person
  1: traffic light  # with a comment

  2: 'rock ''n'' roll'
  3: "caf\\u00e9"
  4: C#

# Download script/URL (optional)
download: https://ultralytics.com/assets/coco128.zip
"""
YAMLS = {
    "of Roboflow": (ROBOFLOW, ["head", "helmet", "person"]),
    "numbered lines": (COCO128, ["person", "traffic light", "rock 'n' roll", "café", "C#"]),
    "over lines": (
        "nc: 4 # four\nnames: [ aeroplane, 'hot dog',  # two\n\n  \"tv, old\",\n tv ] # all\n",
        ["aeroplane", "hot dog", "tv, old", "tv"],
    ),
    "on the next line": ("names:\n  [a, b,]\n", ["a", "b"]),
    "a list": ("names:\n- a b\n# one more\n- -b\nnc: 2\n", ["a b", "-b"]),
    "an indented list": ("nc: 2\r\nnames:\r\n  - a\r\n  - 'b: c'\r\n", ["a", "b: c"]),
    "numbers in any order": ("names: {1: b, 0: a, '2': no}", ["a", "b", "no"]),
    "code, which stays text": ("names: !!python/tuple [a, b]", ["a", "b"]),
    "words that YAML takes for others": ("names: [no, 1.0, null]", ["no", "1.0", "null"]),
}


@pytest.mark.parametrize("case", YAMLS)
def test_names_in_yaml(case: str) -> None:
    text, names = YAMLS[case]
    assert yolo_names(text.encode(), "x/data.yaml") == tuple(names)
    assert yolo_names(b"\xef\xbb\xbf" + text.encode(), "DATA.YML") == tuple(names)


def test_a_name_a_line() -> None:
    names = b"head\n hot dog \r\nperson\n\n\n"
    assert yolo_names(names, "obj.names") == ("head", "hot dog", "person")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("classes.txt", "a\n\nb\n", f"line 2: {OWN}; found nothing"),
        ("classes.txt", "a\nb\na\n", f"line 3: {OWN}; found a"),
        ("classes.txt", "\n", f"line 1: {OWN}; found nothing"),
        ("a.yaml", "nc: 1\n", "expected `names`, a list of names, or numbers from 0 with names; f"),
        ("a.yaml", "names: coco.names\n", "expected `names`, a list of names, or numbers from 0"),
        ("a.yaml", "nc: 3\nnames: [a, b]\n", "expected as many names as nc, 3; found 2"),
        ("a.yaml", "names: [a, b\nnc: 2\n", "expected YAML: while parsing a flow sequence"),
        ("a.yaml", "names: [a, [b]]\n", "expected `names`, a list of names"),
        ("a.yaml", "names:\n  - ''\n", f"line 1: {OWN}"),
        ("a.yaml", "names:\n  1: a\n  2: b\n", "expected `names`, a list of names, or numbers"),
        ("a.yaml", "names: [a, b, a]\n", f"line 3: {OWN}; found a"),
        ("a.yaml", "[" * 100_000, "expected YAML: "),
    ],
)
def test_names_that_cannot_be_read_say_why(name: str, text: str, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        yolo_names(text.encode(), name)
    assert str(refused.value).startswith(message)


def test_without_pyyaml_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(DependencyError, match=r"shardio-torch\[yolo\].*classes\.txt"):
        yolo_names(b"names: [a]", "data.yaml")


def test_an_error_shows_what_it_found_on_one_line() -> None:
    assert re.fullmatch(r"[ -~]+", refusal(parse_yolo, "0 \x1b[31m \u202e\n".encode()))
