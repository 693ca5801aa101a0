"""The comparison with other libraries: their adapters, its rounds, and what it promises."""

from __future__ import annotations

import importlib
import itertools
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.trees import ROOT

from benchmarks import compare, rivals, staging
from benchmarks.data import Data, listing, pack
from benchmarks.harness import BenchmarkError, Result
from benchmarks.rivals import array_record, base

ENTRANTS = (*rivals.RIVALS, rivals.FAST, rivals.ACCURATE)
PINS = ROOT / "benchmarks" / "rivals" / "requirements"


def small_folder(tmp_path: Path, files: int = 6) -> Path:
    for i in range(files):
        path = tmp_path / "small" / f"class{i % 2}" / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (40 * i, 0, 0)).save(path)
    return tmp_path / "small"


@pytest.mark.parametrize("rival", ENTRANTS, ids=lambda rival: rival.title)
def test_each_rival_has_an_adapter_and_exact_pins(rival: rivals.Rival) -> None:
    """Adapters import without their rivals: only their functions need them."""
    module = importlib.import_module(f"benchmarks.rivals.{rival.module}")
    assert callable(module.images) and callable(getattr(module, "records", None)) is rival.raw
    if rival.writes:
        assert callable(importlib.import_module(f"benchmarks.rivals.{rival.writes}").write)
    lines = (PINS / f"{rival.python.parts[-3]}.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", pin) for pin in pins)
    assert f"{rival.package}==".replace("-", "_") in "\n".join(pins).lower().replace("-", "_")
    assert all(pin == "torch==2.13.0" for pin in pins if pin.startswith("torch"))
    assert not any(pin.startswith("torchvision") for pin in pins)
    assert len([line for line in lines if line.startswith("# imports: ")]) == 1


def test_a_rival_that_cannot_take_part_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "ENVIRONMENTS", tmp_path)
    result = Result("compare", ["pytest"], True)
    assert not compare._there(rivals.FFCV, result) and not compare._there(rivals.FFCV, result)
    (tmp_path / "ffcv.failed").write_text("no opencv4.pc\n")
    assert not compare._there(rivals.FFCV, result)
    assert result.facts["notes"] == [
        "FFCV (re-encoded) was not measured: `benchmarks/setup_rivals ffcv` was not run",
        "FFCV (re-encoded) was not measured: it does not install here: no opencv4.pc",
    ]


def test_a_process_that_never_answers_is_killed_with_its_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base, "LIMIT_S", 0.001)  # starting takes longer
    with base.Guarded("compare:flipped", module="", path="") as one:
        with pytest.raises(BenchmarkError, match="ended with code -9"):
            one.round()
        assert not Path(f"/proc/{one._process.pid}").exists()


def test_who_fails_in_the_middle_is_named_and_left_out(tmp_path: Path) -> None:
    class Fake:
        closed = 0

        def __init__(self, lasts: int) -> None:
            self.lasts = lasts

        def round(self) -> dict[str, Any]:
            self.lasts -= 1
            if self.lasts < 0:
                raise BenchmarkError("it ended with code -9")
            return {"us": 1.0}

        def close(self) -> None:
            Fake.closed += 1

    result = Result("compare", ["pytest"], True)
    starts: dict[str, Any] = {name: (lambda n=n: Fake(n)) for name, n in
                              (("never", 0), ("once", 2), ("always", 99))}  # fmt: skip
    measured = compare._contest(Data(tmp_path, tmp_path, True, True), result, "raw", starts)
    assert measured == {"always": [{"us": 1.0}] * 2} == result.facts["raw"]["raw"]
    assert [note.partition(" was")[0] for note in result.facts["notes"]] == [
        "raw: never",
        "raw: once",
    ]
    assert Fake.closed == 3


@pytest.mark.parametrize("module", ["folder", "lmdb", "sqlite", "zip_stored"])
def test_map_style_adapters_deliver_the_folder(tmp_path: Path, module: str) -> None:
    where = small_folder(tmp_path)
    originals = [Path(name).read_bytes() for name, _ in listing(where)]
    adapter = importlib.import_module(f"benchmarks.rivals.{module}")
    if module != "folder":
        adapter.write(str(where), str(tmp_path / "stored"))
        where = tmp_path / "stored"
    assert list(adapter.records(str(where))) == originals
    stream = adapter.images(str(where), size=32, batch=4, workers=0)
    epoch = list(itertools.islice(stream, 2))
    assert [len(labels) for _, labels in epoch] == [4, 2]
    rows = [one for images, labels in epoch for one in zip(images, labels, strict=True)]
    # Of class0 are 0, 2 and 4, whose red is 40 times that: a label lies with its image.
    assert all(round(int(one[0, 5, 5]) / 40) % 2 == int(label) for one, label in rows)
    assert len({int(one[0, 5, 5]) for one, _ in rows}) == 6


def test_a_record_of_array_record_is_label_and_image(tmp_path: Path) -> None:
    path = next((small_folder(tmp_path) / "class1").iterdir())
    pixels, label = array_record.Record(32)((7).to_bytes(8, "little") + path.read_bytes())
    assert label == 7 and pixels.shape == (32, 32, 3)


def test_random_boxes_lie_within_and_cover_their_share() -> None:
    for width, height in ((500, 375), (1, 1), (3, 900)):
        for _ in range(200):
            left, top, wide, high = base.random_box(width, height)
            assert left >= 0 and top >= 0 and wide > 0 and high > 0
            assert left + wide <= width and top + high <= height
            if width == 500:
                assert 0.07 < wide * high / (width * height) <= 1


def test_a_round_leaves_out_what_waited_in_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "SKIPPED_S", 0.0)
    monkeypatch.setattr(compare, "MEASURED_S", 0.0)
    taken: list[int] = []

    def stream() -> Iterator[Any]:
        for i in itertools.count():
            taken.append(i)
            yield np.full((4, 8, 8, 3), 9, np.uint8), np.array([i % 2] * 4)

    one_round = compare.rounds(stream(), 22, {"rival": "1.0"})
    found = one_round(check=True)
    assert found["images"] == 24 and found["mean"] == 9 and found["labels"] == {0: 12, 1: 12}
    assert len(taken) == 6
    began = time.perf_counter()
    found = one_round()
    seconds = time.perf_counter() - began
    assert len(taken) == 6 + compare.SKIPPED + 6
    assert found["images_per_s"] > 24 / seconds  # of the six batches that count alone
    assert one_round(memory=True)["memory_mb"] > 1


def test_a_stream_that_does_other_work_is_refused() -> None:
    files = [(f"{i}", i % 2) for i in range(40)]
    base_found = {"labels": {"0": 20, "1": 20}, "mean": 100.0}
    compare._same_work({"labels": {"0": 21, "1": 20}, "mean": 100.9}, base_found, files, 1.0)
    with pytest.raises(BenchmarkError, match="20 labels more or less"):
        compare._same_work(base_found | {"labels": {"0": 20}}, base_found, files, 1.0)
    with pytest.raises(BenchmarkError, match=r"mean pixel is 0\.0"):
        compare._same_work(base_found | {"mean": 0.0}, base_found, files, 1.0)


@pytest.mark.parametrize("title, count", [("photographs", 10), ("CIFAR", 1)])
def test_what_the_comparison_promises_is_judged(title: str, count: int) -> None:
    result = Result("compare", ["pytest"], True)
    rates = {
        compare.ours("ShardLoader", "tile JPEG", False): (2.1, 0.5),
        compare.ours("DataLoader", "tile JPEG", False): (1.4, 0.6),
        compare.ours("ShardLoader", "JPEG", True): (1.0, 0.6),
        rivals.FOLDER.title: (1.0, 1.0),
        rivals.FFCV.title: (1.5, 0.6),
    }
    measured = {n: [{"images_per_s": rate, "cpu_ms": cpu}] for n, (rate, cpu) in rates.items()}
    compare._stream_targets(result, title, measured)
    met = {target["limit"]: target["met"] for target in result.facts["targets"]}
    assert len(result.facts["targets"]) == count
    if title == "CIFAR":
        assert met == {-1.0: False}
        return
    # Of image folder, FFCV, the bare loop (not measured), CPU; then DataLoader's; then the core's.
    assert [met[limit] for limit in (-2.0, -1.2, -1.05, 0.55)] == [True, True, None, True]
    assert [target["met"] for target in result.facts["targets"] if target["limit"] == -1.5] == [
        False,
        None,
    ]
    assert [met[limit] for limit in (-2.4, -1.45, -1.3, 0.45)] == [None] * 4


@pytest.mark.parametrize("module", ["folder", "lmdb", "sqlite", "zip_stored", ""])
def test_a_flipped_bit_is_told_by_shardio_and_zip_alone(tmp_path: Path, module: str) -> None:
    path = small_folder(tmp_path)
    where = path if module == "folder" else tmp_path / "stored"
    if module not in ("folder", ""):
        importlib.import_module(f"benchmarks.rivals.{module}").write(str(path), str(where))
    elif not module:
        subprocess.run(
            [sys.executable, "-m", "shardio", "pack", path, where, "--quiet"], check=True
        )
    before = {file: file.read_bytes() for file in where.rglob("*") if file.is_file()}
    found = compare.flipped(module, str(where))()
    errors = {"": "DamageError", "zip_stored": "Bad CRC-32"}
    assert found["found"] == ("told" if module in errors else "silent"), found
    assert errors.get(module, "") in found.get("error", "")
    after = {file: file.read_bytes() for file in where.rglob("*") if file.is_file()}
    assert {n: b for n, b in after.items() if "lock" not in n.name} == {
        n: b for n, b in before.items() if "lock" not in n.name
    }


@pytest.mark.parametrize(("module", "how"), [("folder", "untar"), ("folder", ""), ("", "copy")])
def test_an_epoch_from_the_nodes_disk_counts_the_copy(
    tmp_path: Path, module: str, how: str
) -> None:
    folder, local, source = small_folder(tmp_path), tmp_path / "local", tmp_path / "source"
    if how == "untar":
        rivals.write_tar(folder, source)
    elif module:
        source = folder
    else:
        pack(folder, source)
    one_round = staging.staged(
        str(source), str(local), module, how, size=32, batch=2, records=len(listing(folder))
    )
    for _ in range(2):  # the copy of the round before is removed
        found = one_round()
        assert (found["copied_s"] or 0) <= found["first_s"] <= found["epoch_s"]
        assert (found["copied_s"] is not None) is bool(how) is local.exists()


def test_raw_readers_without_the_core_read_every_record(tmp_path: Path) -> None:
    from shardio import native

    core = native.core
    path, out = small_folder(tmp_path), tmp_path / "shards"
    subprocess.run([sys.executable, "-m", "shardio", "pack", path, out, "--quiet"], check=True)
    size = sum(Path(name).stat().st_size for name, _ in listing(path))
    try:
        for way in (compare.OPENED, "ShardDataset"):
            one_round = compare.shardio_in_order(str(out), way, False, 6, size)
            assert native.core is None and one_round()["us"] > 0
            with pytest.raises(AssertionError):
                compare.shardio_in_order(str(out), way, False, 6, size + 1)
    finally:
        native.core = core
