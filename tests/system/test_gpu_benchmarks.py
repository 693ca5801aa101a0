"""The benchmarks of a GPU, rehearsed on the CPU; and those of cores, in miniature."""

from __future__ import annotations

import gc
import io
import json
import multiprocessing
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import shardio
from benchmarks import __main__ as command_line
from benchmarks import cores, gpu_decode, gpu_feeds, gpu_training, gpu_transfers, report, trace
from benchmarks.data import PHOTOS, Data, pack, repeat
from benchmarks.gpu_feeds import LOADER, PINNED, PLAIN, PREFETCH, RESIDENT, Feed, Scale, feed
from benchmarks.harness import Result

SCALE = replace(Scale.of("cpu", True), workers=0, records=24, batch=4, size=16)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Eight JPEGs, and the same small and without loss, again and again."""
    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(0)
    pixels = [rng.integers(0, 255, (16, 16, 3), np.uint8) for _ in range(8)]
    found = {}
    for name in ("jpeg", "small"):
        with shardio.Writer(folder / name, fields={"image": "image", "label": "int"}) as writer:
            for i, one in enumerate(pixels):
                buffer = io.BytesIO()
                image = Image.fromarray(one)
                if name == "jpeg":
                    image.resize((64, 48)).save(buffer, "JPEG")
                else:
                    image.save(buffer, "PNG")
                writer.write({"image": buffer.getvalue(), "label": i})
        found[name] = str(repeat(folder / name, folder / f"{name}-repeated", SCALE.records))
    return found


@pytest.fixture
def closing() -> Iterator[list[Feed]]:
    """Feeds that are closed at the end."""
    feeds: list[Feed] = []
    yield feeds
    for one in feeds:
        one.close()
    gc.collect()


def test_records_are_repeated_under_other_keys(shards: dict[str, str]) -> None:
    found = shardio.open(shards["jpeg"], decode=None)
    assert len(found) == 24 and len({one["__key__"] for one in found}) == 24
    assert [one["label"] for one in found] == [i % 8 for i in range(24)]
    assert found[3]["image"] == found[11]["image"] != found[4]["image"]


def test_all_loaders_give_the_same_batches(shards: dict[str, str], closing: list[Feed]) -> None:
    epochs = {}
    for kind in (LOADER, RESIDENT, PREFETCH, PINNED, PLAIN):
        closing.append(feed(kind, shards["small"], "numpy", SCALE))
        epochs[kind] = list(closing[-1].epoch())
    for kind, found in epochs.items():
        assert len(found) == 6, kind
        for (images, labels), (wanted, same) in zip(found, epochs[LOADER], strict=True):
            assert images.dtype == torch.bfloat16 and images.shape == (4, 3, 16, 16)
            assert images.is_contiguous(memory_format=torch.channels_last)
            assert labels.tolist() == same.tolist()
            assert torch.allclose(images.float(), wanted.float(), atol=0.02), kind


@pytest.mark.usefixtures("few_threads")
def test_a_transfer_is_rehearsed_whole(
    shards: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_transfers, "TRACED", 3)
    monkeypatch.setattr(gpu_transfers, "DRAWN", 2)
    asked = gpu_transfers.entry(**json.loads(json.dumps(_options(LOADER, shards["small"]))))
    traced = asked(what="trace")
    assert traced["gpu_idle"] is None and len(traced["lanes"]["asked"]) == 3
    found = asked()
    assert found["next_p99_ms"] >= found["next_ms"] > 0
    assert found["images_per_s"] > found["fed"] > 0 and found["alone"] > 0
    assert asked(what="memory") == {"locked_mb": 0, "device_first_mb": None, "device_last_mb": None}
    assert asked(what="close") == {"locked_after_mb": 0}


@pytest.mark.usefixtures("few_threads")
def test_training_is_rehearsed_and_watched(
    shards: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_training, "TRACED", 3)
    options = _options(LOADER, shards["jpeg"]) | {"decode": "pil", "model": "ResNet-18"}
    options["kernels"] = "torch"
    asked = gpu_training.entry(**options)
    assert trace.NEXT in asked(traced=True)["lanes"]["lanes"]
    found = asked()
    assert found["images_per_s"] == pytest.approx(found["of_alone"] * found["alone"])
    assert found["bound"] in ("compute", "loader", "unknown") and found["verdict"]


def photographs(folder: Path, height: int, width: int) -> None:
    """Write an archive of eight JPEGs, as the benchmarks look for it."""
    y, x = np.mgrid[0:height, 0:width]
    with tarfile.open(folder / PHOTOS, "w") as tar:
        for i in range(8):
            buffer = io.BytesIO()
            pixels = np.stack([x % 256, y % 256, (x + 9 * i) % 256], -1).astype(np.uint8)
            Image.fromarray(pixels).save(buffer, "JPEG")
            member = tarfile.TarInfo(f"class{i % 2}/{i}.jpg")
            member.size = buffer.tell()
            buffer.seek(0)
            tar.addfile(member, buffer)


def _options(kind: str, path: str) -> dict[str, Any]:
    return SCALE.options(kind=kind, path=path)


@pytest.fixture
def few_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    gc.collect()


@pytest.mark.skipif("timm" in sys.modules, reason="timm is there")
def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_feeds.importlib.util, "find_spec", lambda name: None)
    assert "timm is not installed" in gpu_feeds.missing(gpu_feeds.TIMM)
    assert gpu_feeds.missing(LOADER) == ""


def test_a_rehearsal_meets_no_target_and_is_not_reported(tmp_path: Path) -> None:
    for rehearsal, met in ((False, True), (True, None)):
        result = Result("gpu", ["pytest"], True, rehearsal)
        result.target("speed", 2.0, -1.0)
        assert result.facts["targets"][0]["met"] is met
        assert result.facts["rehearsal"] is rehearsal
    for name in ("gpu.transfers", "gpu.transfers.rehearsal", "gpu.quick"):
        (tmp_path / f"{name}.json").write_text("{}")
    assert [path.name for path in report.stored_of("gpu", tmp_path)] == [
        "gpu.json",
        "gpu.transfers.json",
    ]


def test_only_what_needs_a_gpu_is_rehearsed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "raw", "--device", "cpu"])
    with pytest.raises(SystemExit):
        command_line.main()
    assert "--device is for gpu" in capsys.readouterr().err


def test_loaders_are_measured_beside_a_bare_loop(
    shards: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(cores, "ROUND_S", 0.05)
    path, size = shards["jpeg"], {"size": 16, "workers": 2}
    bare = cores.bare(path=path, **size)()
    assert bare["images_per_s"] > 0 and bare["decode_us"] > 0
    for prepare in (cores.shard_loader, cores.data_loader):
        one_round = prepare(path=path, batch=2, **size)
        found = one_round()
        assert found["images_per_s"] > 0 and 0 <= found["idle"] <= 1
        assert ("read_us" in found) is (prepare is cores.shard_loader)
        del one_round
        gc.collect()
    assert multiprocessing.active_children() == []
    torch.set_num_threads(threads)


def test_a_round_ends_when_each_worker_has_made_as_many() -> None:
    for workers in (1, 3):
        assert len(list(cores._turns(10, workers, began=-100.0))) == workers
        assert len(list(cores._turns(10, workers, began=1e12))) == 10 // workers * workers


@pytest.mark.slow
@pytest.mark.parametrize("what", ["gpu --only transfers", "gpu --only training", "gpu_decode"])
def test_a_benchmark_is_rehearsed_by_its_processes(tmp_path: Path, what: str) -> None:
    """As `python -m benchmarks` runs it, on photographs made here."""
    photographs(tmp_path, 200, 300)
    out = tmp_path / "result.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks", *what.split(), "--device", "cpu"),
            *("--data", str(tmp_path), "--scratch", str(tmp_path / "scratch"), "--out", str(out)),
        ],
        capture_output=True, text=True, cwd=Path(__file__).resolve().parent.parent.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["rehearsal"] is True and all(one["met"] is None for one in found["targets"])
    assert found["tables"] and ("lanes" in found["raw"]) is (what != "gpu_decode")
    assert list((tmp_path / "scratch").iterdir()) == []


def test_forms_of_photographs_differ_in_what_their_names_say(tmp_path: Path) -> None:
    photographs(tmp_path, 300, 400)
    source = Data(tmp_path, tmp_path, True, False)
    few = {gpu_decode.PLAIN: pack(source.originals(), tmp_path / "few")}
    few[gpu_decode.TILES] = pack(source.originals(), tmp_path / "tiles", "--jpeg-tiles")
    forms = gpu_decode._more_forms(source, few, SCALE)
    files = {
        name: [sample["image"] for sample in shardio.open(path, decode=None)]
        for name, path in {**few, **forms}.items()
    }
    for name, found in files.items():
        assert len(found) == 8
        marked = [b"\xff\xd0" in file for file in found]
        assert all(marked) if name not in (gpu_decode.PLAIN, gpu_decode.AGAIN) else not any(marked)
    tiles, cuts = files[gpu_decode.TILES], files[gpu_decode.CUTS]
    assert sum(map(len, cuts)) < sum(map(len, tiles))
    for one, other in zip(files[gpu_decode.AGAIN], files[gpu_decode.MARKED], strict=True):
        assert np.array_equal(*(Image.open(io.BytesIO(file)) for file in (one, other)))


def test_decoders_are_timed_and_compared(shards: dict[str, str]) -> None:
    options = SCALE.options(name=gpu_decode.PIL, forms={"plain": shards["jpeg"]})
    asked = gpu_decode.decoder(**options)
    assert asked() == {"missing": ""}
    found = asked(form="plain", compare=True)
    assert found == {"files": 24, "refused": 0, "mean": 0, "most": 0, "beyond": 0}
    pixels = torch.zeros(3, 4, 4, dtype=torch.uint8)
    other = pixels.clone()
    other[0, 0] = 12
    pairs = [(pixels, other)]
    wanted = {"mean": 1.0, "most": 12, "beyond": pytest.approx(4 / 48)}
    assert gpu_decode._differences(pairs) == wanted
    assert gpu_decode._differences([])["mean"] is None


def test_the_whole_road_is_compared_with_the_cpu(shards: dict[str, str]) -> None:
    for name, by in ((gpu_decode.PIL, {8, 12}), (gpu_decode.WORKERS, {None})):  # 12: one ahead
        asked = gpu_decode.road(**SCALE.options(name=name, path=shards["jpeg"]))
        found = asked(compare=True)
        assert found["most"] == 0 and found.get("by_trainer") in by
        assert asked()["images_per_s"] > 0
