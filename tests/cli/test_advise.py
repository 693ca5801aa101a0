"""`explain`, `tune` and `bench` as commands."""

import importlib
import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support import small_datasets
from support.json_keys import check_keys
from support.trees import shardio, shardio_json

from shardio import machine
from shardio.cli import main as cli
from shardio.dataset.reader import Reader
from shardio.formats import manifest
from shardio.order.options import RequestedOptions
from shardio.storage.location import locate
from shardio.tuning.bench import PARTS
from shardio.tuning.cost import TrainingJob
from shardio.tuning.explain import explain_job


def test_a_file_that_cannot_be_written_is_said_before_the_work(out: Path, tmp_path: Path) -> None:
    for arguments in (
        ("tune", out, "--plot"),
        ("bench", out, "--plot"),
        ("cat", out, 0, "--output"),
    ):
        for place, why in (
            (tmp_path / "none" / "x.png", r"/none/x\.png: there is no directory .*/none to write"),
            (tmp_path / "folder.png", r"/folder\.png: expected the name of a file, and this is a"),
        ):
            (tmp_path / "folder.png").mkdir(exist_ok=True)
            done = shardio(*map(str, arguments), place, code=1)
            assert done.stdout == "" and re.search(why, done.stderr), done.stderr


Packed = Callable[..., Path]


def test_the_command_says_what_explain_says(
    packed: Packed, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = packed([300, 200, 100])
    job = ("explain", folder, "--batch-size", "16", "--workers", "2", "--world-size", "2")
    more = (
        "--shuffle-buffer",
        "200",
        "--unit",
        "4",
        "--tail",
        "drop",
        "--spans",
        "4",
        "--local-world-size",
        "1",
    )
    reader = Reader(locate(folder), manifest.load(locate(folder)))
    options = RequestedOptions(
        batch_size=16, shuffle_buffer=200, unit=4, tail="drop", spans=4
    ).resolve(reader.mean_bytes)
    asked = TrainingJob(reader.manifest, options, num_workers=2, world_size=2, local_world_size=1)
    e = explain_job(asked)

    def said(*arguments: Any, code: int = 0) -> str:
        assert cli.main([str(argument) for argument in arguments]) == code
        shown = capsys.readouterr()
        return shown.err if code else shown.out

    assert said(*job, *more) == f"{e}\n"
    found = json.loads(said(*job, *more, "--json"))
    found["memory"]["available_bytes"] = e.memory.available_bytes
    assert found == e.as_dict()
    assert said(*job, "--quiet") == ""
    assert said("explain", folder, "--quiet").startswith("1 warning\n1. without batch_size")
    assert "true permutation" in said("explain", folder, "--shuffle-buffer", "all")
    for wrong in ("--workers", "--world-size", "--batch-size"):
        assert "shardio: " in said("explain", folder, wrong, "-1", code=2)
    assert "16GB of" in said("explain", folder, "--shuffle-buffer", "16GB of", code=2)
    assert "tail is" in said("explain", folder, "--tail", "pat", code=2)


def test_the_command_measures_what_has_no_images_and_draws_it(tmp_path: Path) -> None:
    texts = small_datasets.make(
        tmp_path / "texts",
        [50],
        fields=(("__key__", "key"), ("text", "str")),
        sample=lambda i: {"__key__": b"%d" % i, "text": "x" * i},
        classes=None,
    )
    options = ["--batch-size", "4", "--workers", "1", "--seconds", "0.1", "--quick"]
    picture = []
    if importlib.util.find_spec("matplotlib"):
        picture = ["--plot", str(tmp_path / "bench.html")]
    made = shardio_json("bench", texts, "--loader", "shardloader", *options, *picture)
    check_keys("bench", made)
    rows = made["rows"]
    assert {row["decodes"] for row in rows} == {False} and made["fields"] is None
    assert rows[0]["name"] == "ShardLoader 1 x 2" or machine.cores() != 2
    assert len(rows[0]["rates"]) == PARTS  # the one repeat shows its spread, too
    assert "transform" not in made["call"] and "fields" not in made["call"]
    assert made["seconds"] < 60 * len(rows)  # a minute for each it would be without --seconds
    if picture:
        page = (tmp_path / "bench.html").read_text()
        assert "records/s" in page and "ShardLoader 1 x" in page
        assert page.count('<tr class="best">') == 1 and page.count("<tr") == 1 + len(rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--workers", "2,x"), "expected numbers, like 1,2,4"), (("--plot", "a"), "ends in .png")],
)
def test_the_command_refuses_before_it_works(
    out: Path, arguments: tuple[str, str], message: str
) -> None:
    assert message in shardio("bench", out, *arguments, code=2).stderr


def test_tune_writes_the_picture_and_ends_with_the_call(
    packed: Callable[..., Path], tmp_path: Path
) -> None:
    out = packed([60, 40])
    picture = tmp_path / "tuning.svg"
    done = shardio("tune", out, "--batch-size", "8", "--workers", "2", "--plot", picture)
    assert done.stderr == ""
    call = done.stdout.splitlines()[-1]
    assert call == f'ShardDataset("{out}", batch_size=8)'
    assert call in "".join(ElementTree.fromstring(picture.read_bytes()).itertext())
    quiet = shardio("tune", out, "--batch-size", "8", "--quiet")
    assert quiet.stdout.splitlines() == [call]
    plain = shardio_json("tune", out, "--batch-size", "8", "--world-size", "2")
    assert (plain["call"], plain["world_size"]) == (call, 2)
    usual = shardio_json("tune", out)
    assert (usual["batch_size"], usual["num_workers"]) == (256, 0)


def test_tune_refuses_before_it_works(packed: Callable[..., Path], tmp_path: Path) -> None:
    out = packed([60, 40])
    done = shardio("tune", tmp_path / "nothing", "--batch-size", "8", "--plot", "x.gif", code=2)
    assert "x.gif: expected a name" in done.stderr
    done = shardio("tune", out, "--batch-size", "8", "--memory", "10B", code=2)
    assert "memory is 10 B" in done.stderr
