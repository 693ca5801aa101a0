"""Every later release reads format 0: datasets that releases wrote, read byte for byte."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from packaging.version import Version

import shardio
from shardio import native, verify

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
RELEASED = sorted(GOLDEN.glob("released-*"))
EXPECTED = {folder: json.loads((folder / "expected.json").read_text()) for folder in RELEASED}
DATASETS = [(folder, name) for folder in RELEASED for name in EXPECTED[folder]["records"]]


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("made", GOLDEN / "make_released.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_0_1_0_wrote_is_here() -> None:
    assert GOLDEN / "released-0.1.0" in RELEASED and len(DATASETS) >= 7


def test_what_is_written_names_a_library_behind_all_releases() -> None:
    # A release says of a file that is too new for it: "needs shardio >= " what the file names.
    released = [folder.name.removeprefix("released-") for folder in RELEASED]
    assert all(Version(shardio.__version__) > Version(one) for one in released)


@pytest.mark.parametrize("core", ["with the core", "without"])
@pytest.mark.parametrize(
    ("folder", "name"), DATASETS, ids=lambda value: getattr(value, "name", value)
)
def test_what_a_release_wrote_is_read_byte_for_byte(
    maker: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, core: str
) -> None:
    if core == "without":
        monkeypatch.setattr(native, "core", None)
    assert maker.read(name, folder) == EXPECTED[folder]["records"][name]
    assert verify(folder / name, sha256=True, jobs=1).damages == []


@pytest.mark.parametrize("folder", RELEASED, ids=lambda folder: folder.name)
def test_the_order_of_an_epoch_is_that_of_the_release(maker: ModuleType, folder: Path) -> None:
    assert maker.order("record/train", folder) == EXPECTED[folder]["order"]
