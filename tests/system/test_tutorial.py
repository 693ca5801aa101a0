"""The tutorial runs as it stands: its blocks, its programs, and a stop in the middle.

Here on 500 images whose class is their colour. On the real CIFAR-10 it is a slow test.
"""

import functools
import json
import pickle
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import doc_blocks, warm_python
from support.doc_blocks import Page
from support.trees import ROOT, environment

import shardio
from benchmarks import tutorial
from benchmarks.harness import RESULTS

PAGE = "docs/tutorial.md"
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog"]
CLASSES += ["frog", "horse", "ship", "truck"]
EACH = 50
REAL = ROOT.parent / "shared" / "data" / "cifar10-train-jpeg.tar.xz"
RIGHT = re.compile(r"^epoch (\d+): ([\d.]+)% of (\d+) images are right$", re.M)
SMALLER = (
    ("50,000", "500"),
    ("50000", "500"),
    ("17 shards", "1 shard"),
    ("shards    17 ...", "shards    1 ..."),
    ("391 a rank, batches of 128, the last of 80", "4 a rank, batches of 128, the last of 116"),
    ("5000 images", "50 images"),
    ("step % 100", "step % 1"),
)
OTHER = "the page shows two ways to the same folder"
UNRUN = {"curl": "the network", "cifar-10-python": OTHER, "write_images": OTHER}


@functools.cache
def pixels() -> np.ndarray[Any, Any]:
    """(500, 32, 32, 3) noise around a colour of the class; image i is of class i % 10."""
    draw = np.random.default_rng(0)
    grid = np.stack(np.meshgrid([40, 128, 215], [40, 215], [60, 200]), -1).reshape(-1, 3)
    middle = grid[np.arange(10 * EACH) % 10][:, None, None]
    noise = draw.normal(0, 10, (10 * EACH, 32, 32, 3))
    return (middle + noise).clip(0, 255).astype(np.uint8)


def archive() -> None:
    """Make what stands for an archive of image files."""
    for number, image in enumerate(pixels()):
        path = Path("jpeg", CLASSES[number % 10], f"{number:05d}.jpg")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    with tarfile.open("cifar10-train-jpeg.tar.xz", "w:xz", preset=0) as tar:
        tar.add("jpeg", ".")


def program(name: str) -> str:
    """Return the block of the page that is this file."""
    (text,) = [one.text for one in doc_blocks.blocks(PAGE) if one.text.startswith(f"# {name}\n")]
    return text


# A Ctrl-C while the checkpoint of the second step of epoch 1 is written: the first one's remains.
STOPPED = """
import runpy, signal, torch
saved, save = [], torch.save
def saving(*given):
    save(*given)
    saved.append(given)
    if len(saved) == 7:
        signal.raise_signal(signal.SIGINT)
torch.save = saving
runpy.run_path("train.py", run_name="__main__")
"""


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python there."""
    command = warm_python.command(*arguments)
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)


def model_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights that the program left."""
    return torch.load(folder / "run.pt", weights_only=True)["model"]


@pytest.fixture(scope="module")
def after(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs the page, from an archive. Returns the folder."""
    folder = tmp_path_factory.mktemp("tutorial")
    doc_blocks.run(Page(PAGE, archive, SMALLER, UNRUN), folder)
    return folder / "here"


@pytest.fixture(scope="module")
def resumes() -> None:
    """Skips where torch does not load OneCycleLR's state with weights_only; 2.3 does not."""
    optimizer = torch.optim.SGD([torch.zeros(1)], 1)
    state = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1, total_steps=1).state_dict()
    if any(callable(value) for value in state.values()):
        pytest.skip("of torch 2.3: docs/tutorial.md")


@pytest.mark.usefixtures("resumes")
def test_the_page_runs_and_what_it_trains_is_right(after: Path) -> None:
    again = python(after, "train.py").stdout  # from the last checkpoint: nothing is left to train
    assert again.startswith("resuming epoch 5: 0 batches are left\n")
    ((epoch, right, total),) = RIGHT.findall(again)
    assert (epoch, total) == ("5", "50")
    assert float(right) >= 50  # 76 here; by chance 10


@pytest.mark.usefixtures("resumes")
def test_a_stop_changes_nothing(after: Path, tmp_path: Path) -> None:
    for name in ("model.py", "train.py"):
        shutil.copy(after / name, tmp_path)
    (tmp_path / "packed").symlink_to(after / "packed")
    stopped = python(tmp_path, "-c", STOPPED)
    assert stopped.stderr.endswith("KeyboardInterrupt\n"), stopped
    again = python(tmp_path, "train.py")
    assert again.stdout.startswith("resuming epoch 1: 3 batches are left\n"), again
    assert [epoch for epoch, _, _ in RIGHT.findall(again.stdout)] == ["1", "2", "3", "4", "5"]
    whole, resumed = model_of(after), model_of(tmp_path)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_the_python_version_becomes_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = Path("cifar-10-batches-py")
    source.mkdir()
    (source / "batches.meta").write_bytes(pickle.dumps({"label_names": CLASSES}))
    flat = pixels().transpose(0, 3, 1, 2).reshape(5, -1, 3072)
    for part, data in enumerate(flat, 1):
        batch = {"data": data, "labels": [i % 10 for i in range(len(data))]}
        (source / f"data_batch_{part}").write_bytes(pickle.dumps(batch, protocol=2))
    exec(program("write_images.py"), {})
    shardio.index("cifar10", out="idx")
    data = shardio.open("idx", decode="numpy", storage=shardio.Storage(root="cifar10"))
    assert data.classes == CLASSES and len(data) == 500
    for sample in data:
        name, _, number = sample["__key__"].removesuffix(".png").partition("/")
        assert name == CLASSES[sample["label"]] == CLASSES[int(number) % 10]
        assert np.array_equal(sample["image"], pixels()[int(number)])


def test_the_page_states_what_was_measured() -> None:
    stored = json.loads((RESULTS / "tutorial.json").read_text())
    assert all(target["met"] for target in stored["targets"])
    packed, trained = stored["tables"][0]["rows"]
    right, used = trained["accuracy"], trained["cpu_s"]
    epochs, validated = stored["data"]["epochs"], stored["data"]["validated"]
    for line in (
        f"| right after {epochs} epochs, of {validated:,} images that were not trained on "
        f"| {right['median']:.1f}% | {right['min']:.1f}-{right['max']:.1f}% |",
        f"| CPU time of packing | {packed['cpu_s']['median']:.1f} s | |",
        f"| CPU time of training | {used['median']:.0f} s "
        f"| {used['min']:.0f}-{used['max']:.0f} s |",
    ):
        assert line in (ROOT / PAGE).read_text()


@pytest.mark.slow
@pytest.mark.realdata
@pytest.mark.skipif(not REAL.exists(), reason=f"NOT RUN: the tutorial on CIFAR-10: no {REAL}")
def test_on_cifar10_it_reaches_what_the_page_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doc_blocks, "LIMIT_S", 3600.0)  # a busy machine is no failure

    def downloaded() -> None:
        shutil.copy(REAL, ".")

    doc_blocks.run(Page(PAGE, downloaded, unrun=UNRUN), tmp_path)
    again = python(tmp_path / "here", "train.py").stdout
    ((_, right, total),) = RIGHT.findall(again)
    assert total == "5000" and float(right) >= tutorial.LEAST
