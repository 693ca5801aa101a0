"""The new lines of docs/coming-from run as they stand, and each loop gives every image.

The old lines need environments of their own: `python -m benchmarks coming_from` runs them beside
the new ones, and test_the_old_lines_agree does so where benchmarks/setup_rivals was run.
"""

import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from support import doc_blocks, litdata_writer
from support.trees import ROOT

import shardio
from benchmarks import coming_from
from benchmarks.coming_from import COLOURS, PAGES, TRAIN
from benchmarks.harness import RESULTS

OLD = "runs in its own environment: python -m benchmarks coming_from"
TORCHVISION = "torchvision: python -m benchmarks coming_from, and tests/system/test_recipes.py"


def exported(format: str, folder: str) -> Callable[[], None]:
    """Return what makes a folder in another format, as the library of the page would."""

    def make() -> None:
        photos()
        shardio.pack("photos", "packed-for-it", plan=shardio.PlanOptions(shuffle=False))
        shardio.export("packed-for-it", folder, format=format)

    return make


def photos() -> None:
    coming_from.plant(Path("photos"))


def saved() -> None:
    """Make what `save_to_disk` of HF datasets makes of photos/."""
    photos()
    arrow = pytest.importorskip("pyarrow", reason="NOT RUN: huggingface.md needs pyarrow")
    files = sorted(Path("photos").glob("*/*"))
    image = {"image": {"_type": "Image"}}
    label = {"label": {"_type": "ClassLabel", "names": [one.parent.name for one in files]}}
    table = arrow.table(
        {
            "image": [{"bytes": one.read_bytes(), "path": one.name} for one in files],
            "label": list(range(len(files))),
        }
    ).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": image | label}})})
    Path("hf").mkdir()
    name = "data-00000-of-00001.arrow"
    with arrow.ipc.new_stream(f"hf/{name}", table.schema) as stream:
        stream.write_table(table)
    Path("hf/state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))


def chunks() -> None:
    """Make what `litdata.optimize` makes of photos/."""
    photos()
    files = sorted(Path("photos").glob("*/*"))
    items = [
        litdata_writer.item([path.read_bytes(), struct.pack("<q", label)])
        for label, path in enumerate(files)
    ]
    Path("litdata").mkdir()
    litdata_writer.save(Path("litdata"), {"image": "bytes", "label": "int"}, items)


THEIRS = {
    "imagefolder": photos,
    "webdataset": exported("webdataset", "wds"),
    "mosaicml": exported("mds", "mds"),
    "litdata": chunks,
    "ffcv": photos,
    "huggingface": saved,
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_new_lines_run(page: coming_from.Page, tmp_path: Path) -> None:
    seen = tmp_path / "seen.jsonl"
    text = (ROOT / "docs" / page.path).read_text()
    unrun = {page.mark: OLD}
    if "from torchvision.transforms import v2" in text:
        unrun["from torchvision.transforms import v2"] = TORCHVISION
    smaller = [(TRAIN, coming_from.recorded(seen))]
    doc_blocks.run(
        doc_blocks.Page(f"docs/{page.path}", THEIRS[page.name], smaller, unrun), tmp_path
    )
    found = coming_from.read(seen)
    assert set(found) == set(range(len(COLOURS))) and len(set(found.values())) == 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_to_expect_is_what_was_measured(page: coming_from.Page) -> None:
    assert coming_from.expected(page) in (ROOT / "docs" / page.path).read_text()


def test_the_old_lines_of_the_pages_are_those_that_were_run_and_agreed() -> None:
    stored = json.loads((RESULTS / "coming_from.json").read_text())
    assert all(target["met"] for target in stored["targets"])
    for page in PAGES:
        assert stored["raw"]["blocks"][page.name] == coming_from.digest(page), (
            f"{page.path} changed: python -m benchmarks coming_from"
        )
        text = (ROOT / "docs" / page.path).read_text()
        assert f"{page.package} {stored['versions'][page.package]}" in text


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_old_lines_agree(page: coming_from.Page) -> None:
    if not page.python.exists():
        pytest.skip(f"NOT RUN: the old lines of {page.path}: benchmarks/setup_rivals {page.name}")
    # Workers of DataLoader listen at sockets in there, whose names may have 107 characters; with
    # those of tmp_path they have more, and the trainer waits for ever.
    with tempfile.TemporaryDirectory(prefix="old-") as folder:
        found = coming_from.Folder(page, Path(folder, page.name)).compare()
    assert found["different"] == 0, found
