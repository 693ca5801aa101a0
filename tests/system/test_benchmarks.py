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
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import LIMIT_S, servers, warm_python
from support.trees import ROOT

import shardio
from benchmarks import __main__ as command_line
from benchmarks import (
    formats,
    idle,
    limits,
    loader,
    network,
    pixels,
    raw,
    resident_rows,
    scale,
    slow_samples,
    spelling,
    throttle,
    transport,
)
from benchmarks.cold_rounds import Cold
from benchmarks.data import CIFAR, PHOTOS, Data
from benchmarks.harness import EntryProcess, Result
from shardio import StorageError
from shardio.order.options import RequestedOptions

Run = Callable[..., subprocess.CompletedProcess[str]]
NAMES = {
    "cold", "remote", "raw", "train", "pack", "archives", "growing", "plan", "lmdb", "formats",
    "startup", "listing", "manifest", "order", "workers", "shuffle", "scale", "spans",
    "cluster", "compare", "loader", "pixels", "encoded", "transport", "resident_rows",
    "slow_samples", "meter", "view", "gpu", "gpu_decode", "cores", "idle", "tutorial",
    "coming_from", "damage",
}  # fmt: skip


def benchmarks(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        warm_python.command("-m", "benchmarks", *arguments),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """As `benchmarks`, in this process: to import torch anew takes a second."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
        capfd.readouterr()
        try:
            code: Any = command_line.main()
        except SystemExit as end:
            code = end.code
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    return run


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
    assert set(listed) == {*NAMES, "against", "all", "report"}
    assert all(listed.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["gpu", "gpu_decode"])
def test_without_a_gpu_its_benchmark_says_what_is_missing(
    tmp_path: Path, run: Run, name: str
) -> None:
    done = run(name, "--quick", "--out", str(tmp_path / "x.json"))
    assert done.returncode == 1 and list(tmp_path.iterdir()) == []
    assert "needs an NVIDIA GPU" in done.stderr and torch.__version__ in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("against",), "takes a commit"),
        (("against", "no-such-branch", "--quick"), "'no-such-branch' is no commit"),
        (("raw", "HEAD"), "and it alone does"),
        (("raw", "--rounds", "3"), "are for against"),
        (("report", "nothing"), "no benchmark is called 'nothing'"),
    ],
)
def test_what_against_is_asked_wrongly_is_told(
    tmp_path: Path, run: Run, arguments: tuple[str, ...], said: str
) -> None:
    done = run(*arguments, "--out", str(tmp_path / "x.json"))
    assert done.returncode and said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_two_commits_take_turns_each_with_a_shardio_of_its_own(
    archives: Path, tmp_path: Path
) -> None:
    out, scratch = tmp_path / "against.json", tmp_path / "scratch"
    done = benchmarks(
        *("against", "HEAD", "--quick", "--data", str(archives), "--out", str(out)),
        *(
            "--scratch",
            str(scratch),
            "--rows",
            "raw: ShardDataset, shuffled, CIFAR",
            "--rounds",
            "3",
        ),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["commits"]["new"] == found["commits"]["old"] and list(scratch.iterdir()) == []
    ((name, sides),) = found["raw"]["rounds"].items()
    assert name == "raw: ShardDataset, shuffled, CIFAR"
    ratios = [old["us"] / new["us"] for new, old in zip(sides["new"], sides["old"], strict=True)]
    (table,) = found["tables"]
    (row,) = table["rows"]
    assert row["rounds"] == 3 and row["ratio"]["median"] == sorted(ratios)[1]
    assert row["ratio"]["min"] == min(ratios) and row["ratio"]["max"] == max(ratios)
    (target,) = found["targets"]
    assert target["found"] == int(sorted(ratios)[1] < 0.97 and max(ratios) < 1)
    none = benchmarks("against", "HEAD", "--quick", "--data", str(archives), "--rows", "nothing")
    assert none.returncode == 1 and "raw: ShardDataset, shuffled, CIFAR" in none.stderr


def test_options_are_spelled_as_the_shardio_that_runs_spells_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def former(dataset: Any, *, workers: int, prefetch: int, threads: int) -> Any:
        return dataset, workers, prefetch, threads

    monkeypatch.setattr(shardio, "ShardLoader", former)
    assert spelling.shard_loader(1, num_workers=2, prefetch_factor=3, threads=4) == (1, 2, 3, 4)


def test_missing_archives_are_named(tmp_path: Path, run: Run) -> None:
    done = run("raw", "--quick", "--data", str(tmp_path), "--out", str(tmp_path / "x.json"))
    assert done.returncode == 1
    assert "cifar10-train-jpeg.tar.xz" in done.stderr and "--data" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_raw_measures_processes(archives: Path, tmp_path: Path) -> None:
    store_raw(benchmarks, archives, tmp_path)


@pytest.mark.usefixtures("here")
def test_raw_stores_every_round_ratios_and_targets(
    archives: Path, tmp_path: Path, run: Run
) -> None:
    store_raw(run, archives, tmp_path)


def store_raw(run: Run, archives: Path, tmp_path: Path) -> None:
    out, scratch = tmp_path / "raw.json", tmp_path / "scratch"
    done = run(
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


def test_a_part_belongs_to_its_benchmark(tmp_path: Path, run: Run) -> None:
    done = run("raw", "--only", "limited", "--out", str(tmp_path / "x.json"))
    assert done.returncode == 2
    assert "--only limited: raw has no such part" in done.stderr


def test_storage_with_a_limit_says_where_there_can_be_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise StorageError("said by the test")

    monkeypatch.setattr(throttle, "controller", refuse)
    monkeypatch.setattr(network, "SSHD", "/nowhere/sshd")
    source, result = Data(tmp_path, tmp_path, True, False), Result("cold", ["pytest"], True)
    limits.limited(source, result)
    limits.network(source, result)
    assert result.facts["tables"] == []
    disk, net = result.facts["notes"]
    assert disk == "A disk with a limit was not measured: said by the test"
    assert "/nowhere/sshd not there (apt-get install sshfs openssh-server" in net


@pytest.mark.slow
def test_storage_with_a_limit_is_measured(archives: Path, tmp_path: Path) -> None:
    """Of what can be made here; the archives hold no images, so nothing is decoded."""
    source, result = Data(archives, tmp_path, True, False), Result("cold", ["pytest"], True)
    limits.network(source, result)
    if result.facts["notes"]:
        pytest.skip(f"NOT TESTED HERE: {result.facts['notes']}")
    (table,) = result.facts["tables"]
    assert {row["name"] for row in table["rows"]} == {limits.DATALOADER, limits.FOLDER, limits.LMDB}
    what = limits.Small(source)
    try:
        with throttle.Group(tmp_path, 500) as group:
            cold = Cold(tmp_path, what.records, what.payload, what.where, group)
            found = cold.compete(what.entries(0), 1, limit_s=LIMIT_S)
    except StorageError as error:
        pytest.skip(f"NOT TESTED HERE: {error}")
    (folder,), (shards,) = found[limits.FOLDER], found[limits.DATALOADER]
    assert folder["reads"] >= what.records > shards["reads"] > 0
    assert folder["images"] == shards["images"] == what.records
    # The kernel counts by slices of 0.1 s, and 300 reads are few of them; without a limit: 10,000.
    assert folder["reads_per_s"] < 1_000


@pytest.mark.usefixtures("here")
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
    """A EntryProcess in this process, of a machine that is done at once."""

    made: list[Here]

    def __init__(self, function: str, **options: Any) -> None:
        module, _, name = function.partition(":")
        options = json.loads(json.dumps(options))
        self.round = getattr(importlib.import_module(f"benchmarks.{module}"), name)(**options)
        self.made.append(self)

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ready(self) -> None:
        pass

    end = ready

    def close(self) -> None:
        del self.round  # and with it the processes of its loader


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Here]]:
    threads = torch.get_num_threads()
    Here.made = []
    # liblmdb opens a file once in a process.
    monkeypatch.setattr(
        raw, "EntryProcess", lambda f, **given: (EntryProcess if "lmdb" in f else Here)(f, **given)
    )
    for module in (formats, resident_rows, slow_samples, loader, transport, idle):
        monkeypatch.setattr(module, "EntryProcess", Here)
    yield Here
    torch.set_num_threads(threads)
    assert all(not hasattr(one, "round") for one in Here.made)
    gc.collect()
    assert multiprocessing.active_children() == []


def test_what_processes_wait_for_is_measured_beside_a_bare_loop(
    here: type[Here], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle, "MEAN_S", 1e-5)
    monkeypatch.setattr(idle, "BATCH", 4)
    monkeypatch.setattr(idle, "BARE_S", 0.1)
    result = Result("idle", ["pytest"], True)
    idle.run(Data(tmp_path, tmp_path, True, False), result)
    rows = {row["name"]: row for row in result.facts["tables"][0]["rows"]}
    assert {f"{idle.LOADER}, {n}" for n in (1, 2)} < rows.keys()
    for name, row in rows.items():
        assert (row["of_bare"] is None) is name.startswith(idle.BARE)
    assert [target["limit"] for target in result.facts["targets"]] == [-0.9, -0.9]
    assert len(result.facts["tables"][1]["rows"]) == 27  # of the model


def test_the_slowest_process_sets_the_pace_however_deep_its_queue_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(idle, "SPREAD", 0.0)
    none = idle.queues(4, 12, 2, 0.0, seed=0)
    assert none == {"handed_out": pytest.approx(1), "order": 0, "left": 0}
    found = [idle.queues(4, 100, ahead, 0.1, seed=0) for ahead in (2, 4)]
    speeds = np.random.default_rng(0).normal(1, 0.1, 4)
    for one in found:  # of the time of all, what the slowest leaves them
        assert one["handed_out"] == pytest.approx(speeds.min() / speeds.mean(), rel=0.02)
        assert one["handed_out"] + one["order"] + one["left"] == pytest.approx(1)
    assert found[0]["order"] > found[1]["order"] and found[0]["left"] < found[1]["left"]


def test_the_time_of_processes_is_shared_out_to_what_it_went_to() -> None:
    # Two processes, two images a batch; each image takes 1 s, of the second process 2. From the
    # batch that is taken at 16 on, one batch of each counts: it is taken at 20.
    batches = idle.BEFORE + 1
    numbers = np.arange(batches * 4).reshape(batches, 2, 2)
    log = np.zeros((numbers.size, 2))
    for process, each in enumerate((1.0, 2.0)):
        ends = each * np.arange(1, 2 * batches + 1).reshape(batches, 2)
        log[numbers[:, process].ravel()] = np.stack([ends - each, ends], axis=-1).reshape(-1, 2)
    taken = np.stack([log[numbers[:, process, 1], 1] for process in range(2)], axis=1)
    taken = np.maximum.accumulate(taken.ravel()).reshape(batches, 2)
    log[numbers[-1, 0]] += taken[-2, 0] - log[numbers[-1, 0, 0], 0]  # it was not asked before
    taken[-1, 0] = log[numbers[-1, 0, 1], 1]
    found = idle.shares(taken, numbers, log, np.ones(len(log)), ahead=1)
    assert found["images_per_s"] == 1.0  # four, from 16 to 20
    assert found["handed_out"] == pytest.approx(4 / 8)
    assert found["longer"] == pytest.approx(2 / 8)
    assert found["within"] == pytest.approx(0) == found["between"]
    assert found["order"] == pytest.approx((taken[-2, 0] - log[numbers[-2, 0, 1], 1]) / 8)


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
    found = measured(resident_rows, tmp_path, tmp_path)
    assert len(found["tables"][0]["rows"]) == 11
    assert [target["limit"] for target in found["targets"]] == [1.3]


@pytest.mark.parametrize("sizes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_slow_samples_are_compared(
    here: type[Here], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: int
) -> None:
    monkeypatch.setattr(slow_samples, "FETCH_S", 0.0)
    monkeypatch.setattr(slow_samples, "STEP_S", 1e-6)
    monkeypatch.setattr(slow_samples, "BATCH", 4)
    shapes = {"small": (1, 15), "large": (100, 150)}
    monkeypatch.setattr(slow_samples, "SHAPES", dict([*shapes.items()][:sizes]))
    found = measured(slow_samples, tmp_path, tmp_path)
    for table, limit in zip(found["tables"], (-0.97, -3.0)[:sizes], strict=True):
        assert len(table["rows"]) == 14
        assert sum(target["limit"] == limit for target in found["targets"]) in (2, 3, 4)


@pytest.mark.slow
def test_loaders_are_compared_decoded_and_as_raw_pixels(
    here: type[Here], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Data, "photos", lambda self, _: self.originals())
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


def test_view_times_every_page(tmp_path: Path) -> None:
    out = tmp_path / "view.json"
    done = benchmarks("view", "--quick", "--out", str(out), "--scratch", str(tmp_path / "scratch"))
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    rows = {row["name"]: row for row in found["tables"][0]["rows"]}
    assert {"first page, 100 cards", "sort by a column of floats", "histograms"} < set(rows)
    assert all(row["memory_mb"]["median"] > 10 for row in rows.values())


def walked(batch: int, spans: int) -> float:
    """The requests a row of a process of `scale`: one rank of two, of 100 shards of 1,000 rows."""
    counts = np.full(100, 1_000)
    options = RequestedOptions(batch, seed=0, shuffle=True, spans=spans).resolve(1e5, records=10**5)
    share = options.partition(options.epoch(counts, 0), world_size=2, num_workers=1)
    return scale.requests_a_row(counts, share, 1e5, 2, 1)


def test_the_walk_of_scale_counts_ranges_and_single_records() -> None:
    # A process with spans of its own asks for 8 MiB, 84 rows, at a time, and for ends of shards.
    assert 1 / 84 < walked(batch=32, spans=4) < 1.5 / 84
    assert walked(batch=32, spans=2) > 0.5


@pytest.mark.slow
def test_the_cluster_is_simulated(archives: Path, tmp_path: Path, run: Run) -> None:
    servers.skip_without("nginx", package="nginx-light")
    out = tmp_path / "cluster.json"
    done = run("cluster", "--quick", "--data", str(archives), "--out", str(out))
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert len(found["tables"]) == 7 and all(target["met"] for target in found["targets"])
    assert found["raw"]["cpu_s_a_gb"].keys() == {"pack", "verify", "copy"}
