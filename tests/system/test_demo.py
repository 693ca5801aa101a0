"""The demo: what it shows is there and true, and nothing stays behind."""

import json
import os
import re
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S, warm_python
from support.programs import Program
from support.trees import ROOT, content, environment, picture, plant

import shardio
from benchmarks import throttle
from benchmarks.demo import poster, show, specimens
from benchmarks.demo.__main__ import parse
from benchmarks.demo.show import Damage, Demo, Part, Resumed, Row
from shardio.cli.main import main

ROW = Row("in memory", {"folder": 100.0, "dataloader": 150.0, "shardloader": 250.0})
COLD = Row(
    "on the disk", {"folder": 50.0, "dataloader": 150.0, "shardloader": 48.0},
    {"folder": 2000, "dataloader": 64, "shardloader": 50},
)  # fmt: skip


def part(*rows: Row) -> Part:
    return Part("photographs", 480, 1e5, (500, 375), 224, True, 17, 2.0, rows)


def shown(*parts: Part, **changed: Any) -> Demo:
    given = {
        "pil": "pillow 12.0",
        "core": True,
        "batch_size": 64,
        "workers": 2,
        "cores": 2.0,
        "reads_per_s": 500,
        "parts": parts or (part(ROW, COLD),),
        "damage": Damage("a.shard: record 6 at byte 5 (key k): checksum is 1", None, 64, 1000),
        "resumed": Resumed(8, 3, (2, 1), True),
        "seconds": 40.0,
    }
    return Demo(**given | changed)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty images of three sizes, in two class folders."""
    return plant(
        tmp_path / "images",
        {
            f"class{i % 2}/{i:02d}.jpg": picture(40 + i % 3, 36, "PNG" if i == 7 else "JPEG")
            for i in range(40)
        },
    )


def left_behind() -> list[Path]:
    places = {Path(tempfile.gettempdir()), Path("/var/tmp")}
    return [path for place in places for path in place.glob("shardio-demo-*")]


# --- from end to end ------------------------------------------------------------------------------


def test_a_folder_is_shown_and_only_read(folder: Path, tmp_path: Path) -> None:
    before, here = content(folder), left_behind()
    png, out = tmp_path / "demo.png", tmp_path / "out"
    words = ["--out", out, "--plot", png, "--seconds", "2", "--batch-size", "8", "--workers", "2"]
    done = subprocess.run(
        warm_python.command("-m", "benchmarks.demo", folder, *map(str, words), "--json"),
        capture_output=True, env=environment(), timeout=LIMIT_S, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert content(folder) == before and left_behind() == here
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    [keys] = re.findall(r"`--json` prints one object: (.*?)\.\n", page, re.S)
    assert set(found) == set(re.findall(r"`(\w+)`", keys))
    (part,) = found["parts"]
    assert part["images"] == 40 and part["size"] == 36 and part["tiles"] is False
    memory, disk, *limited = part["rows"]
    assert set(memory["images_per_s"]) == {"folder", "dataloader", "shardloader"}
    assert all(rate > 0 for rate in memory["images_per_s"].values())
    rates = memory["images_per_s"]
    assert memory["gain"] == pytest.approx(rates["shardloader"] / rates["folder"])
    assert bool(disk["images_per_s"]) != bool(disk["refused"])  # measured, or the reason is said
    for row in limited:  # where reads can be held to a limit
        counted = row["requests"]  # of the ways that read all 40 images in their 2 seconds
        assert counted.get("folder", 40) >= 40 > counted.get("shardloader", 1) > 0
    message = found["damage"]["message"]
    assert message.startswith("OUT/") and "checksum is" in message and "class" in message
    assert found["damage"]["file_pixels"] in {36 * 40, 36 * 41, 36 * 42}
    assert found["resumed"] == {"batches": 5, "killed_after": 2, "workers": [2, 1], "equal": True}
    assert found["picture"] == str(png) and png.read_bytes().startswith(b"\x89PNG")
    assert shardio.verify(out).damages == []  # the bit was flipped in a copy
    assert len(shardio.open(out)) == 40


def test_of_a_large_folder_a_part_of_each_class_is_packed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show, "MOST_IMAGES", 12)

    def refuse() -> None:
        raise shardio.StorageError("reads cannot be held to a limit: said by the test")

    monkeypatch.setattr(throttle, "controller", refuse)
    said: list[str] = []
    found = show.demo(folder, batch_size=4, workers=1, seconds=0.5, say=said.append)
    assert found.parts[0].images == 12
    assert "12 of them" in said[1]
    assert found.resumed is not None and found.resumed.equal
    assert [row.name for row in found.parts[0].rows] == ["in memory", "on the disk"]
    assert "said by the test" not in "".join(said) and "reads/s" not in "".join(said)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(number: int, folder: Path, tmp_path: Path) -> None:
    before, groups = left_behind(), _groups()
    code = f"import os, runpy; os.chdir({str(tmp_path)!r})"
    run = "runpy.run_module('benchmarks.demo', run_name='__main__')"
    program = Program("-c", f"{code}; {run}", limit_s=LIMIT_S)
    assert program.read_until("$ shardio pack")  # the loaders are next
    os.kill(program.pid, number)
    done = program.finish()
    assert done.code == (130 if number == signal.SIGINT else 143), done
    assert not done.timed_out and done.left == [] and "Traceback" not in done.output
    assert left_behind() == before and not _groups() - groups
    assert [path.name for path in tmp_path.iterdir()] == ["images"]


def _groups() -> set[str]:
    """Control groups that no living process has: other tests may have theirs at the same time."""
    try:
        inside = Path(throttle.controller().folder)
    except shardio.StorageError:
        return set()
    names = [path.name for path in inside.glob("shardio-*")]
    return {name for name in names if not Path("/proc", name.split("-")[1]).exists()}


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere: no such folder"),
        (["images/class0/00.jpg"], "not a folder"),
        (["empty"], "empty: no images in it"),
        (["images", "--out", "images/out"], "lies inside the images, which are only read"),
        (["images", "--seconds", "0"], "seconds is 0.0"),
        (["images", "--batch-size", "0"], "--batch-size is 0"),
        (["images", "--plot", "x.gif"], "ends in .png, .svg"),
    ],
)
def test_what_cannot_be_shown_is_said_at_once(
    arguments: list[str],
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder.parent)
    (folder.parent / "empty").mkdir()
    assert main(arguments, parse) in (1, 2)
    assert said in capsys.readouterr().err


def test_without_matplotlib_it_says_how_to_get_the_picture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(show, "demo", lambda *_, **__: shown())
    assert main([], parse) == 0
    assert "pip install" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert main(["--plot", "x.png"], parse) == 1  # asked for: an error, before the work


# --- as text, and as a picture --------------------------------------------------------------------


def test_where_nothing_is_gained_the_table_says_so() -> None:
    text = show.table(part(ROW, COLD, Row("on a disk", refused="there is none")))
    memory, cold, reads, missing, why = text.splitlines()[1:]
    assert memory.split()[-1] == "2.5x"
    assert cold.split()[-1] == "none"
    assert "2,000" in reads and reads.endswith("40x fewer")
    assert missing.endswith("not measured") and why.endswith("there is none")
    assert show.gain_text(0.8) == "0.80x, slower"


def test_what_failed_is_not_praised() -> None:
    assert "NOT FOUND" in show.damage_text(Damage("", None, 3, 9))
    assert "NOT EQUAL" in show.resumed_text(Resumed(8, 3, (2, 1), False))


@pytest.mark.parametrize(
    ("kind", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("html", b"<!doctype html>")]
)
def test_any_result_has_a_picture(kind: str, start: bytes) -> None:
    alone = part(ROW, Row("on the disk", refused="no"))
    for found in (shown(), shown(alone, damage=None, resumed=None)):
        drawn = poster.draw(found, kind)
        assert drawn == poster.draw(found, kind)
        assert drawn.startswith(start)


def test_the_made_images_are_the_same_each_time(tmp_path: Path) -> None:
    for name in "ab":
        specimens.make(str(tmp_path / name), specimens.SMALL, 12)
    made = content(tmp_path / "a")
    assert made == content(tmp_path / "b")
    assert sum(one is not None for one in made.values()) == 12
    assert all(2_000 < len(one) < 9_000 for one in made.values() if one is not None)


def test_as_json_it_is_plain() -> None:
    found = json.loads(json.dumps(shown().as_dict()))
    assert found["parts"][0]["rows"][0]["gain"] == 2.5
