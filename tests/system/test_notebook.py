"""What notebooks show: HTML that is well formed, escaped, and has no colours of its own."""

import base64
import pickle
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from support.small_datasets import jpeg

import shardio
from shardio import notebook
from shardio.tuning.bench import Bench
from shardio.tuning.bench_row import Row

EVIL = '<script>alert("1")</script>&\x1b]0;x\x07\u202e'
CLASSES = ["cat", EVIL]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset whose folder and class have names that would be tags."""
    folder = tmp_path_factory.mktemp("notebook") / "<b>out"
    with shardio.Writer(folder, classes=CLASSES) as writer:
        for number in range(40):
            writer.write({"image": jpeg(number), "label": number % 2})
    return folder


def parsed(shown: Any) -> ElementTree.Element:
    """The HTML of an object, which is well formed, as XML is."""
    text = shown._repr_html_()
    assert "\x1b" not in text and "\u202e" not in text and "<script" not in text
    assert not re.search(r"color|background", re.sub(r'src="[^"]*"', "", text))
    return ElementTree.fromstring(f"<div>{text}</div>")


def cells(found: ElementTree.Element) -> dict[str, str]:
    rows = [[cell.text or "" for cell in row] for row in found.iter("tr")]
    return {row[0]: row[1] for row in rows if len(row) == 2}


def test_what_is_no_plain_text_is_escaped() -> None:
    shown = notebook.facts(EVIL, [(EVIL, EVIL)]) + notebook.table([EVIL], [([EVIL], True)])
    shown += notebook.paragraph(EVIL) + notebook.code(EVIL)
    found = ElementTree.fromstring(f"<div>{shown}</div>")
    assert "script" not in {one.tag for one in found.iter()}
    texts = [text for text in found.itertext() if text.strip()]
    assert len(texts) == 7
    assert set(texts) == {'<script>alert("1")</script>&\\x1b]0;x\\x07\\u202e'}
    assert notebook.paragraph("a\nb") == "<p>a<br />\nb</p>\n"
    assert notebook.paragraph("") == notebook.code("") == ""


def test_datasets_show_what_is_in_them(out: Path) -> None:
    sequence = parsed(shardio.open(out))
    assert "40 records of" in "".join(sequence.itertext())
    said = cells(sequence)
    assert said["records"].startswith("40 records, ")
    assert said["classes"].startswith("2: cat, <script>alert")
    assert said["fields"] == "__key__ (key), image (image), label (int)"
    dataset = shardio.ShardDataset(out, batch_size=8, where={"label": 0})
    said = cells(parsed(dataset))
    assert (said["chosen"], said["batch_size"]) == ("20 records", "8")
    assert "shuffle_buffer=" in said["order"] and "seed=0" in said["order"]


def test_explain_shows_its_rows_and_its_warnings(out: Path) -> None:
    found = shardio.explain(shardio.ShardDataset(out, batch_size=8), num_workers=8)
    said = cells(parsed(found))
    assert said["readers"] == "8 workers"
    assert found.warnings
    for one in found.warnings:
        assert said[one.what] == f"-> {one.mend}"


def test_tune_shows_its_table_its_call_and_its_picture(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = shardio.tune(shardio.ShardDataset(out, batch_size=8))
    page = parsed(found)
    assert "".join(page.find("pre").itertext()) == found.call  # type: ignore[union-attr]
    assert [row[-1][0].text for row in page.iter("tr") if row[0].find("b") is not None] == [
        found.verdict(found.best)  # type: ignore[arg-type]
    ]
    assert len(list(page.iter("tr"))) == 1 + len(found.rows)
    kind, _, data = page.find("img").attrib["src"].partition(",")  # type: ignore[union-attr]
    assert kind == "data:image/svg+xml;base64"
    assert ElementTree.fromstring(base64.b64decode(data)).tag.endswith("}svg")
    assert parsed(pickle.loads(pickle.dumps(found))).find("img") is not None
    assert not any(name.startswith("_") for name in found.as_dict())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert parsed(found).find("img") is None


def test_bench_shows_its_groups_and_its_lines_of_python() -> None:
    rows = tuple(
        Row("DataLoader", workers, 1, decodes=True, cold=False, rates=(10.0 + workers,))
        for workers in (0, 1)
    )
    found = Bench(
        path=EVIL, root=None, records=40, record_bytes=500.0, measured_records=40, batch_size=8,
        size=24, raw=False, fields=("image",), cores=2.0, load_before=None, seconds=1.0, quick=True,
        rows=rows, best=rows[1], notes=("a note",), call=f"ShardDataset({EVIL!r})",
    )  # fmt: skip
    page = parsed(found)
    assert [row[0][0].text for row in page.iter("tr") if row[0].find("b") is not None] == [
        "DataLoader 1"
    ]
    assert "a note" in "".join(page.itertext()) and page.find("pre") is not None
