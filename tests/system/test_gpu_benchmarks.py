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
from types import ModuleType, SimpleNamespace
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
from benchmarks.harness import Deadline, Result, interleave

SCALE = replace(Scale.of("cpu", True, Deadline()), workers=0, records=24, batch=4, size=16)


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
    options |= {"kernels": "torch"}
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
        assert found["left"] <= 1 and found["workers_us"] >= 0
        assert ("read_us" in found) is (prepare is cores.shard_loader)
        del one_round
        gc.collect()
    assert multiprocessing.active_children() == []
    torch.set_num_threads(threads)


def test_entries_of_as_many_processes_take_turns_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = in_time(cores, 200, tmp_path, monkeypatch)
    rounds = {row["name"]: row["rounds"] for row in found["tables"][0]["rows"]}
    most = [rounds[f"{name}, 16"] for name in (cores.BARE, cores.LOADER, cores.SHARDS)]
    assert min(most) >= 2 and max(most) - min(most) <= 1
    assert rounds[f"{cores.BARE}, 4"] < min(most)  # less telling


def test_a_round_ends_when_each_worker_has_made_as_many() -> None:
    for workers in (1, 3):
        assert len(list(cores._turns(10, workers, began=-100.0, least_s=1.0))) == workers
        most = (10 // workers - cores.AHEAD) * workers
        assert len(list(cores._turns(10, workers, began=1e12, least_s=1.0))) == most


# --- in time --------------------------------------------------------------------------------------


class Entry:
    """An entry whose rounds take 3 seconds each, by a clock of their own."""

    now = 0.0
    packs = 0

    def __init__(self, function: str, **options: Any) -> None:
        self.decoder = function == "gpu_decode:decoder"

    def ready(self) -> None:
        Entry.now += 0.1

    def round(self, **asked: Any) -> dict[str, Any]:
        if asked or not self.decoder:  # which says only whether it is there
            Entry.now += 3
        return {
            **{"lanes": {}, "missing": "", "bound": "compute", "of_alone": 0.97, "overlap": 0.95},
            **{"images_per_s": 9.0, "next_ms": 0.1, "next_p99_ms": 0.1, "workers_us": 1.0},
            **{"locked_mb": 1, "locked_after_mb": 0, "device_first_mb": 1, "device_last_mb": 1},
            **{"files": 1, "refused": 0, "mean": 0.0, "watched": 0.01},
        }

    def end(self) -> None:
        pass

    def close(self) -> None:
        pass


def in_time(
    module: ModuleType, within: float, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Run a benchmark of entries as above; return what it found."""
    Entry.now, Entry.packs = 0.0, 0

    def pack(folder: Path, out: Path, *options: Any) -> Path:
        Entry.now += 2
        Entry.packs += 1
        return out

    packs = SimpleNamespace(
        pack=pack, repeat=pack, remove=lambda *paths: None, folder_bytes=lambda path: 1
    )
    monkeypatch.setattr(module, "data", packs)
    monkeypatch.setattr(module, "EntryProcess", Entry)
    monkeypatch.setattr("shardio.machine.processors", lambda: 16)
    monkeypatch.setattr(gpu_feeds.importlib.util, "find_spec", lambda name: True)
    for name in ("cuts", "encoded_again"):
        monkeypatch.setattr(gpu_decode, name, lambda few: {gpu_decode.AGAIN: [], "": []})
    monkeypatch.setattr(gpu_decode, "written", lambda source, made: dict.fromkeys(made, "a path"))
    monkeypatch.setattr(gpu_decode, "gpu", lambda device: "a GPU")
    deadline = Deadline(within, lambda: Entry.now)
    out = folder / "kept.json"
    result = Result("x", ["pytest"], False, False, deadline, (out, folder))
    source: Any = SimpleNamespace(
        quick=False, scratch=folder, originals=lambda: folder, cifar=lambda: folder
    )
    if module in (gpu_decode, cores):
        module.run(source, result)
    else:
        module.run(source, result, Scale.of("cuda", False, deadline), deadline)
    if within < 1e9:  # what was kept on the way is what is there, but for what follows the last row
        kept = json.loads(out.read_text())
        assert kept["tables"] == result.facts["tables"][: len(kept["tables"])]
        assert kept["machine"] and kept["load"]
    return result.facts


def rows(found: dict[str, Any]) -> list[tuple[str, list[str]]]:
    return [(one["title"], [row["name"] for row in one["rows"]]) for one in found["tables"]]


@pytest.mark.parametrize("module", [gpu_transfers, gpu_decode, gpu_training, cores])
def test_a_benchmark_ends_in_time_and_says_what_it_left_out(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = in_time(module, 1e9, tmp_path, monkeypatch)
    takes = Entry.now
    for share in (0.3, 0.6):
        within = share * takes
        ends_in_time(whole, in_time(module, within, tmp_path, monkeypatch), within, share)


def ends_in_time(whole: dict[str, Any], found: dict[str, Any], within: float, share: float) -> None:
    assert (
        0.75 * within < Entry.now <= within + 3
    )  # the first round of a block is of no known length
    notes = " ".join(found["notes"])
    there = {f"{title}: {name}" for title, names in rows(found) for name in names}
    for title, names in rows(whole):
        for name in names:
            left_out = name in notes or title.removesuffix(", decoded alone") in notes
            assert f"{title}: {name}" in there or left_out, (title, name)
    # The same targets, and those of what was left out are not measured.
    wanted = {one["what"].partition(": watch")[0] for one in whole["targets"]}
    assert {one["what"].partition(": watch")[0] for one in found["targets"]} == wanted
    assert all((one["met"] is None) == (one["found"] is None) for one in found["targets"])
    assert all(one["met"] is not None for one in whole["targets"])
    assert "the time was over before" in notes or share > 0.3


def test_what_there_is_no_time_for_is_not_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = in_time(cores, 32, tmp_path, monkeypatch)
    first, *others = [names for _, names in rows(found)]
    assert first and others == [[], []] and Entry.packs == 2


@pytest.mark.parametrize(
    ("module", "first"),
    [
        (gpu_transfers, [[LOADER, gpu_feeds.TIMM]]),
        (gpu_training, [["JPEG", 'JPEG, decode="cuda"', 'JPEG, decode="cuda", Triton'], ["JPEG"]]),
        (cores, [["bare loop, 16", "ShardLoader, 16", "DataLoader, shards, 16"]]),
    ],
)
def test_the_most_telling_rows_come_first(
    module: ModuleType, first: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = in_time(module, 60, tmp_path, monkeypatch)
    tables = [names for _, names in rows(found) if names]
    for names, wanted in zip(tables, first, strict=False):
        assert set(wanted) <= set(names), names
    assert len(tables) >= len(first)


def test_decoders_of_photographs_and_the_road_come_before_photographs_encoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles = [title for title, names in rows(in_time(gpu_decode, 100, tmp_path, monkeypatch))]
    kinds = ["road" if 'decode="cuda"' in title else title.partition(",")[0] for title in titles]
    assert kinds.index("plain") < kinds.index("tile JPEG") < kinds.index("road")
    whole = in_time(gpu_decode, 1e9, tmp_path, monkeypatch)
    assert [title for title, _ in rows(whole)][-2].startswith(gpu_decode.AGAIN)


def test_time_is_shared_by_weight_and_what_one_leaves_goes_to_those_behind_it() -> None:
    now = 0.0
    deadline = Deadline(100, lambda: now)
    shares = deadline.shares({"a": 1, "b": 3, "c": 1})
    name, its = next(shares)
    assert (name, its.left()) == ("a", 20)
    now += 10  # it leaves a half
    name, its = next(shares)
    assert (name, its.left()) == ("b", 90 * 3 / 4)
    now += 80  # it takes more than its share
    name, its = next(shares)
    assert (name, its.left(), its.enough(10), its.enough(11)) == ("c", 10, True, False)
    assert Deadline().part(0.5).enough(1e12) and not Deadline().given and deadline.given
    least = Deadline(30, lambda: now).shares({"a": 1, "b": 9, "c": 90}, least=20)
    assert [its.left() for _, its in least] == [20, 20, 30]  # of each, all others took nothing
    now += 100
    assert deadline.left() < 0 and deadline.part(0.5).left() == 0 and not list(deadline.each("ab"))


def test_rounds_end_before_one_that_would_be_too_long() -> None:
    now, kept = 0.0, []

    def one_round(seconds: float) -> dict[str, Any]:
        nonlocal now
        now += seconds
        return {"x": seconds}

    ways = {name: lambda i=i: one_round(i) for i, name in enumerate("abcd", 1)}
    deadline = Deadline(12.5, lambda: now)
    found = interleave(ways, 3, deadline, lambda found: kept.append(sum(map(len, found.values()))))
    # 1, 2, 3, 4 seconds; 2.5 are left, and the longest took 4.
    assert {name: len(one) for name, one in found.items()} == dict.fromkeys("abcd", 1)
    assert kept == [1, 2, 3, 4]
    found = interleave(ways, 1, Deadline(5, lambda: now))
    assert list(found) == ["a", "b"]
    assert interleave({}, 3) == {}


@pytest.mark.parametrize(
    ("said", "speed", "right"),
    [
        ("compute", 0.95, 1.0), ("compute", 0.89, 0.0), ("loader", 0.89, 1.0),
        ("start-up", 0.5, 1.0), ("loader", 0.99, 0.0), ("compute", 0.92, None),
        ("loader", 0.9, None), ("unknown", 0.5, None),
    ],
)  # fmt: skip
def test_watch_is_compared_with_the_speed(said: str, speed: float, right: float | None) -> None:
    far = [{"bound": "nothing", "of_alone": value} for value in (0.0, 2.0)]
    middle = {"bound": said, "of_alone": speed, "gpu_idle": 0.5}
    assert gpu_training.judged([far[1], middle, far[0]]) == (said, right)
    assert gpu_training.judged([]) == ("nothing", None)


def test_within_is_only_for_those_that_keep_to_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["raw", "--within", "9", "--out", "x"], ["cores", "--within", "9"]):
        monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
        with pytest.raises(SystemExit):
            command_line.main()
        assert "--within is for gpu, gpu_decode, cores, and needs --out" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--within", "1e6"]])
def test_rows_are_kept_on_the_way_where_there_is_a_limit(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"

    def run(source: Data, result: Result, device: str) -> None:
        assert result.deadline.given is bool(words) and result.deadline.left() > 1e5
        assert out.exists() is bool(words)
        result.table("so far", {"a": [{"x": 1}]}, {"x": "x"})
        result.keep(lambda: result.table("a draft", {"b": [{"x": 2}]}, {"x": "x"}))
        assert out.exists() is bool(words)
        if words:
            kept = json.loads(out.read_text())["tables"]
            assert [one["title"] for one in kept] == ["so far", "a draft"]

    monkeypatch.setattr(gpu_decode, "run", run)
    command = ["benchmarks", "gpu_decode", "--device", "cpu", "--out", str(out), *words]
    monkeypatch.setattr(sys, "argv", [*command, "--scratch", str(tmp_path)])
    assert command_line.main() == 0
    assert [one["title"] for one in json.loads(out.read_text())["tables"]] == ["so far"]


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
    made = {gpu_decode.CUTS: gpu_decode.cuts(few[gpu_decode.TILES])}
    made |= gpu_decode.encoded_again(few[gpu_decode.PLAIN])
    files = {
        name: [sample["image"] for sample in shardio.open(path, decode=None)]
        for name, path in {**few, **gpu_decode.written(source, made)}.items()
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
