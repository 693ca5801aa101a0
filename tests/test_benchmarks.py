"""The benchmarks run: their list, and one of them from end to end on tiny data."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks import formats
from benchmarks.data import Data
from benchmarks.harness import Result

ROOT = Path(__file__).resolve().parent.parent
NAMES = (
    *("cold", "raw", "train", "pack", "lmdb", "formats", "startup", "manifest", "order", "workers"),
)


def benchmarks(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments], cwd=ROOT, capture_output=True, text=True
    )


def make_archive(path: Path, files: int, size: int) -> None:
    """Files that begin like JPEGs, in two class folders: nothing here decodes them."""
    with tarfile.open(path, "w:xz" if path.suffix == ".xz" else "w") as tar:
        for i in range(files):
            member = tarfile.TarInfo(f"./class{i % 2}/{i:04d}.jpg")
            content = b"\xff\xd8\xff\xe0" + bytes([i % 251]) * (size + i)
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
