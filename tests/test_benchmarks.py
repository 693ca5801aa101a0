"""The benchmarks run: their list, and one of them from end to end on tiny data."""

from __future__ import annotations

import gc
import importlib
import io
import json
import multiprocessing
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image

from benchmarks import formats, forum_resident, forum_transport, loader, pixels, transport
from benchmarks.data import CIFAR, PHOTOS, Data
from benchmarks.harness import Result

ROOT = Path(__file__).resolve().parent.parent
NAMES = (
    *("cold", "raw", "train", "pack", "lmdb", "formats", "startup", "manifest", "order", "workers"),
    *("loader", "pixels", "transport", "forum_resident", "forum_transport", "meter", "gpu"),
)


def benchmarks(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments], cwd=ROOT, capture_output=True, text=True
    )


def make_archive(path: Path, files: int, size: int, jpeg: bytes = b"") -> None:
    """Files that begin like JPEGs, or are this one, in two class folders."""
    with tarfile.open(path, "w:xz" if path.suffix == ".xz" else "w") as tar:
        for i in range(files):
            member = tarfile.TarInfo(f"./class{i % 2}/{i:04d}.jpg")
            content = jpeg or b"\xff\xd8\xff\xe0" + bytes([i % 251]) * (size + i)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


@pytest.fixture
def archives(tmp_path: Path) -> Path:
    folder = tmp_path / "archives"
    folder.mkdir()
    make_archive(folder / "cifar10-train-jpeg.tar.xz", 300, 900)
    make_archive(folder / "imagenet-sample-500.tar", 20, 30_000)
    return folder


def test_without_a_name_all_are_listed_with_a_line_each() -> None:
    done = benchmarks()
    assert done.returncode == 0, done.stderr
    listed = {line.split()[0]: line.split(maxsplit=1)[1] for line in done.stdout.splitlines()}
    assert set(listed) == {*NAMES, "all", "report"}
    assert all(listed.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_benchmark_says_what_is_missing(tmp_path: Path) -> None:
    done = benchmarks("gpu", "--quick", "--out", str(tmp_path / "x.json"))
    assert done.returncode == 1 and list(tmp_path.iterdir()) == []
    assert "needs an NVIDIA GPU" in done.stderr and torch.__version__ in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_archives_are_named(tmp_path: Path) -> None:
    done = benchmarks("raw", "--quick", "--data", str(tmp_path), "--out", str(tmp_path / "x.json"))
    assert done.returncode == 1
    assert "cifar10-train-jpeg.tar.xz" in done.stderr and "--data" in done.stderr
    assert "Traceback" not in done.stderr


def test_raw_stores_every_round_ratios_and_targets(archives: Path, tmp_path: Path) -> None:
    out, scratch = tmp_path / "raw.json", tmp_path / "scratch"
    done = benchmarks(
        *("raw", "--quick", "--data", str(archives), "--out", str(out)),
        *("--scratch", str(scratch), "--without-rivals"),
    )
    assert done.returncode == 0, done.stderr
    assert list(scratch.iterdir()) == []  # it removed what it unpacked
    found = json.loads(out.read_text())
    assert found["benchmark"] == "raw" and found["quick"] is True
    assert "raw --quick" in found["command"]
    assert found["machine"]["cores"] >= 1 and "device" in found["machine"]
    assert found["versions"]["torch"] and found["versions"]["shardio"]
    assert len(found["load"]["loadavg_before"]) == 3
    assert found["data"]["in order, 0.9 KB"]["records"] == 300
    rounds = found["raw"]["in order, 0.9 KB"]["shardio"]
    assert len(rounds) == 3 and all(one["us"] > 0 for one in rounds)
    row = next(row for row in found["tables"][0]["rows"] if row["name"] == "shardio")
    assert row["us"]["min"] <= row["us"]["median"] <= row["us"]["max"] and row["ratio"] > 0
    floor = next(t for t in found["targets"] if "packed file, mmap" in t["what"])
    assert floor["limit"] == 3.0 and floor["met"] is (floor["found"] <= 3.0)
    litdata = next(t for t in found["targets"] if "LitData" in t["what"])
    assert litdata["found"] is None and litdata["met"] is None  # named, though not measured
    for target in found["targets"]:
        assert target["what"] in done.stderr


def test_a_format_is_measured_beside_record_shards(
    archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {name: formats.FORMATS[name] for name in (formats.RECORD, formats.PLAIN_TAR)}
    monkeypatch.setattr(formats, "FORMATS", few)
    monkeypatch.setattr(formats, "SIZES", ("0.9 KB",))
    result = Result("formats", ["pytest"], True)
    formats.run(Data(archives, tmp_path, True, False), result)
    reading = result.facts["raw"]["reading, 0.9 KB"]
    assert set(result.facts["raw"]["indexing, 0.9 KB"]) == {formats.PLAIN_TAR}
    for name in few:
        for way in ("open", "dataset"):
            assert len(reading[f"{name}: {way}"]) == 3
            assert all(one["us"] > 0 for one in reading[f"{name}: {way}"])
    assert all(
        target["met"] is None for target in result.facts["targets"] if "time of" in target["what"]
    )


@pytest.mark.slow
def test_formats_are_measured_without_their_own_readers(archives: Path, tmp_path: Path) -> None:
    out, scratch = tmp_path / "formats.json", tmp_path / "scratch"
    done = benchmarks(
        *("formats", "--quick", "--data", str(archives), "--out", str(out)),
        *("--scratch", str(scratch), "--without-rivals"),
    )
    assert done.returncode == 0, done.stderr
    assert list(scratch.iterdir()) == []
    found = json.loads(out.read_text())
    names = {"webdataset", "tfrecord", "mds", "recordio", "lmdb-caffe", "parquet"}
    for size in ("0.9 KB", "110 KB"):
        assert names <= set(found["raw"][f"indexing, {size}"])
        reading = found["raw"][f"reading, {size}"]
        for name in (*names, "record", "lmdb"):
            for way in ("open", "dataset"):
                assert all(one["us"] > 0 for one in reading[f"{name}: {way}"])
            assert f"{name}: own" not in reading
    rivals = [t for t in found["targets"] if "tf.data" in t["what"]]
    assert len(rivals) == 2 and all(t["met"] is None for t in rivals)  # named, though not measured
    assert any("tensorflow-cpu was not measured" in note for note in found["notes"])


class Here:
    """A Contestant in this process, of a machine that is done at once."""

    made: list[Here]

    def __init__(self, function: str, **options: Any) -> None:
        module, _, name = function.partition(":")
        options = json.loads(json.dumps(options))
        self.round = getattr(importlib.import_module(f"benchmarks.{module}"), name)(**options)
        self.made.append(self)

    def close(self) -> None:
        del self.round  # and with it the processes of its loader


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Here]]:
    threads = torch.get_num_threads()
    Here.made = []
    for module in (forum_resident, forum_transport, loader, transport):
        monkeypatch.setattr(module, "Contestant", Here)
    yield Here
    torch.set_num_threads(threads)
    assert all(not hasattr(one, "round") for one in Here.made)
    gc.collect()
    assert multiprocessing.active_children() == []


def measured(module: ModuleType, archives: Path, scratch: Path) -> dict[str, Any]:
    """The result of a benchmark, which is whole: rounds, tables and targets."""
    result = Result(module.__name__, ["pytest"], True)
    module.run(Data(archives, scratch, True, False), result)
    assert result.facts["tables"] and result.facts["data"]
    assert all(row["ratio"] for table in result.facts["tables"] for row in table["rows"])
    return result.facts


def test_transport_compares_ready_batches(
    here: type[Here], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "BATCH", 4)
    monkeypatch.setattr(transport, "SIZE", 128)  # large enough to lie in a slot
    found = measured(transport, tmp_path, tmp_path)
    ready = {row["name"] for row in found["tables"][0]["rows"]}
    assert {
        f"{name}, {n} workers" for n in (1, 2) for name in ("DataLoader", "ShardLoader")
    } < ready
    assert [target["limit"] for target in found["targets"]] == [-6.0, -6.0, 0.2, 3.0]
    assert all(target["found"] > 0 for target in found["targets"])


def test_ways_of_one_epoch_in_memory_are_compared(here: type[Here], tmp_path: Path) -> None:
    found = measured(forum_resident, tmp_path, tmp_path)
    assert len(found["tables"][0]["rows"]) == 11
    assert [target["limit"] for target in found["targets"]] == [1.3]


def test_slow_samples_are_compared(
    here: type[Here], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forum_transport, "FETCH_S", 0.0)
    monkeypatch.setattr(forum_transport, "STEP_S", 1e-6)
    monkeypatch.setattr(forum_transport, "BATCH", 4)
    monkeypatch.setattr(forum_transport, "SHAPES", {"small": (1, 15), "large": (100, 150)})
    found = measured(forum_transport, tmp_path, tmp_path)
    for table, limit in zip(found["tables"], (-0.97, -3.0), strict=True):
        assert len(table["rows"]) == 14
        assert sum(target["limit"] == limit for target in found["targets"]) in (2, 3, 4)


@pytest.mark.slow
def test_loaders_are_compared_decoded_and_as_raw_pixels(
    here: type[Here], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Data, "photos", lambda self, _: self._originals())
    for name, size, files in ((CIFAR, 32, 100), (PHOTOS, 48, 66)):
        jpeg = io.BytesIO()
        Image.linear_gradient("L").resize((size, size)).convert("RGB").save(jpeg, "JPEG")
        make_archive(tmp_path / name, files, 0, jpeg.getvalue())
    (tmp_path / "scratch").mkdir()
    found = measured(loader, tmp_path, tmp_path / "scratch")
    assert [table["rows"][0]["rounds"] for table in found["tables"]] == [2, 2]
    raw = measured(pixels, tmp_path, tmp_path / "scratch")
    assert [target["limit"] for target in raw["targets"]] == [-1e6, 50.0]
    assert all(t["found"] is not None for t in found["targets"] if "Pillow" not in t["what"])
