"""The README's examples run as they stand, and no link of the documentation leads nowhere."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from support.trees import picture, plant

import shardio

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_YET = {ROOT / "docs" / name for name in ("tutorial.md", "coming-from/index.md")}
KEYS = [f"n0144076{c}/n0144076{c}_{name}.JPEG" for c in range(3, 6) for name in ("eel", "tench")]
LABELS = [0, 0, 1, 1, 2, 2]


def block(mark: str) -> str:
    """The README's one Python block that holds these words."""
    (found,) = [text for text in re.findall(r"```python\n(.*?)```", README, re.S) if mark in text]
    return found


@pytest.fixture
def packed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the README's `shardio pack imagenet/train out/` leaves in the current folder."""
    monkeypatch.chdir(tmp_path)
    plant(tmp_path / "imagenet" / "train", {key: picture(40, 30) for key in KEYS})
    shardio.pack("imagenet/train", "out/")


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_training_loop_runs(packed_here: None) -> None:
    code = block("ShardDataset")
    for long, short in (
        ("range(90)", "range(2)"),
        ("RandomResizedCrop(224,", "RandomResizedCrop(16,"),
        ("num_workers=8", "num_workers=2"),
        ("batch_size=256", "batch_size=4"),
        ("...  #", "seen.append((images, labels))  #"),
    ):
        assert code.count(long) == 1, long
        code = code.replace(long, short)
    seen: list[Any] = []
    exec(code, {"seen": seen})
    assert [len(labels) for _, labels in seen] == [4, 2] * 2
    for images, labels in seen:
        assert images.dtype == torch.uint8 and images.shape[1:] == (3, 16, 16)
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert labels.dtype == torch.int64
    for epoch in (seen[:2], seen[2:]):
        assert sorted(int(label) for _, labels in epoch for label in labels) == LABELS


def test_the_sequence_is_what_it_says(packed_here: None) -> None:
    code = block("shardio.open")
    names: dict[str, Any] = {}
    exec(code, names)
    shown = [line for line in code.splitlines() if re.match(r"data[.\[]", line)]
    first, found, labels = [eval(line, names) for line in shown]
    assert isinstance(first, Image.Image)
    assert names["data"][found]["__key__"] == KEYS[3]
    assert sorted(labels.tolist()) == LABELS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s#]+)", page.read_text()):
        path = (page.parent / target).resolve()
        if "://" not in target and path not in NOT_YET:
            assert path.exists(), target
