"""Each dataset of docs/datasets.md is packed by the commands of the page, from its miniature."""

import io
import os
import re
import shlex
import string
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import LIMIT_S, datasets, doc_blocks
from support.trees import ROOT, environment

import shardio
from shardio.cli.main import main

PAGE = "docs/datasets.md"


def sections() -> dict[str, tuple[str, list[doc_blocks.Block]]]:
    """Return the text and the blocks of each dataset on the page, by its title."""
    found: dict[str, tuple[str, list[doc_blocks.Block]]] = {}
    page = (ROOT / PAGE).read_text()
    blocks = doc_blocks.blocks(PAGE)
    for one in re.finditer(r"^### (.*)\n((?:(?!##).*\n)*)", page, re.M):
        start, end = (page.count("\n", 0, at) + 1 for at in one.span(2))
        found[one[1]] = one[2], [block for block in blocks if start <= block.line < end]
    return found


SECTIONS = sections()


def run(block: doc_blocks.Block) -> None:
    """Run a block as its reader does: Python, or commands, those of shardio in this process."""
    if block.kind == "python":
        exec(compile(block.text, block.page, "exec"), {})
        return
    programs = os.path.dirname(sys.executable)
    names: dict[str, str] = {}
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(string.Template(line).safe_substitute(names), comments=True)
        if one := re.fullmatch(r"(\w+)=(\S+)", line):
            names[one[1]] = one[2]
        elif words[0] == "shardio":
            code = main(words[1:])
            assert code == (4 if "skip" in words else 0), f"{block.place}: {line}: {code}"
        else:
            env = environment(PATH=f"{programs}{os.pathsep}{os.environ['PATH']}")
            subprocess.run(["bash", "-ec", line], check=True, env=env, timeout=LIMIT_S)


def content(out: str) -> tuple[dict[str, dict[str, Any]], Sequence[str] | None]:
    """Return the records of a packed dataset by their keys, labelled by names; and the classes."""
    dataset = shardio.open(out, decode=None)
    found = {}
    for record in dataset:
        if dataset.classes is not None and "label" in record:
            record["label"] = dataset.classes[record["label"]]
        found[record.pop("__key__")] = record
    return found, dataset.classes


def check(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compare a record with what it must be: files byte for byte, arrays by their pixels."""
    if isinstance(wanted["image"], np.ndarray):
        pixels = np.asarray(Image.open(io.BytesIO(found["image"])))
        assert np.array_equal(pixels, wanted["image"])
        wanted = wanted | {"image": found["image"]}
    assert found == wanted


def test_the_page_and_the_miniatures_have_the_same_datasets() -> None:
    assert SECTIONS.keys() == datasets.BUILDERS.keys()


@pytest.mark.parametrize("title", SECTIONS)
def test_a_dataset_is_packed_by_the_commands_of_the_page(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if datasets.savemat is None:
        stand_in = types.ModuleType("scipy.io")
        stand_in.loadmat = datasets.loadmat  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "scipy", types.ModuleType("scipy"))
        monkeypatch.setitem(sys.modules, "scipy.io", stand_in)
    truth = datasets.BUILDERS[title]()
    text, blocks = SECTIONS[title]
    for name in os.listdir():
        assert name in text, f"{PAGE} does not name {name}, of {title}"
    for block in blocks:
        run(block)
    packed = {str(one.parent) for one in Path().rglob("manifest.json") if one.parts[0] != "index"}
    assert packed == truth.keys()
    numbered = set()
    for out, records in truth.items():
        found, classes = content(out)
        if classes is not None:
            numbered.add(tuple(classes))
        assert found.keys() == records.keys()
        for key, record in records.items():
            check(found[key], record)
    assert len(numbered) <= 1, "splits whose classes have other numbers"
