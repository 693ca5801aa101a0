"""What commands show: colours and bars on a terminal alone, the same results as in Python."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.trees import images, on_a_terminal, plant, shardio, shards

import shardio as library
from shardio import ShardDataset
from shardio.packing.gc import gc

COLOURED = {"NO_COLOR": "", "TERM": "xterm-256color"}
RED, GREEN, DIM = "\x1b[31m", "\x1b[32m", "\x1b[2m"


@pytest.fixture(scope="module")
def out(folder: Path) -> Path:
    return folder / "out"


def test_what_is_whole_is_green_and_what_is_damaged_red(out: Path, tmp_path: Path) -> None:
    _, seen = on_a_terminal("verify", out, **COLOURED)
    assert f"{GREEN}24 records in 1 shard" in seen and RED not in seen
    shardio("copy", out, tmp_path / "copy")
    [shard] = shards(tmp_path / "copy")
    data = bytearray(shard.read_bytes())
    data[2000] ^= 1
    shard.write_bytes(data)
    code, seen = on_a_terminal("verify", tmp_path / "copy", **COLOURED)
    assert code == 3 and GREEN not in seen
    assert seen.index(RED) < seen.index("checksum is") < seen.index("1 damaged")


def test_errors_are_red_and_hints_dim(out: Path) -> None:
    _, seen = on_a_terminal("info", out / "nowhere", **COLOURED)
    assert seen.startswith(f"{RED}shardio:\x1b[0m ")
    _, seen = on_a_terminal("info", out, "--jsn", **COLOURED)
    assert f"{RED}shardio info:\x1b[0m no option is called --jsn" in seen
    assert f"{DIM}usage: shardio info [OUT] [options]" in seen
    assert DIM in on_a_terminal(**COLOURED)[1]


@pytest.mark.parametrize("plain", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_without_colours_nothing_is_painted(plain: dict[str, str], out: Path) -> None:
    for arguments in (["verify", out], ["info", "nowhere"], ["info", "--jsn"], []):
        _, seen = on_a_terminal(*arguments, **COLOURED | plain)
        assert not re.search(r"\x1b\[\d+m", seen), seen


def test_files_and_pipes_and_json_are_never_painted(out: Path) -> None:
    for arguments in (["verify", out], ["info", "nowhere"], ["info", "--jsn"]):
        done = shardio(*arguments, code=None)
        assert "\x1b" not in done.stdout + done.stderr
    assert "\x1b[3" not in on_a_terminal("verify", out, "--json", **COLOURED)[1]


def test_python_prints_what_the_command_line_prints_and_shows_one_line(tmp_path: Path) -> None:
    """Times differ, and so do directories."""
    source = plant(tmp_path / "src", {**images(), "class0/no.jpg": b"no"})

    def same(said: Any, done: subprocess.CompletedProcess[str]) -> bool:
        texts = (re.sub(r"\S+ s, \S+ MB/s|/[ab]\b", "", str(t)) for t in (done.stdout, f"{said}\n"))
        assert len(repr(said).splitlines()) == 1 and len(repr(said)) < 200 + len(str(tmp_path))
        return len(set(texts)) == 1

    a, b = tmp_path / "a", tmp_path / "b"
    skip = ("--on-error", "skip")
    [packed] = library.pack(source, a / "out", on_error="skip", jobs=1)
    assert same(packed, shardio("pack", source, b / "out", *skip, code=4))
    assert repr(packed).endswith("; 1 left out>")
    [packed] = library.pack(source, a / "out", on_error="skip", jobs=1)
    assert same(packed, shardio("pack", source, b / "out", *skip, code=4))
    [packed] = library.pack(source, a / "dry", on_error="skip", jobs=1, dry_run=True)
    assert same(packed, shardio("pack", source, b / "dry", *skip, "--dry-run"))
    out = a / "out"
    assert same(library.unpack(out, a / "back"), shardio("unpack", out, b / "back"))
    done = library.export(out, a / "x", format="imagefolder")
    assert same(done, shardio("export", out, b / "x", "--format", "imagefolder"))
    (tmp_path / "src" / "class0" / "no.jpg").unlink()
    assert same(library.index(source, out=a / "idx"), shardio("index", source, "--out", b / "idx"))
    assert same(gc(out), shardio("gc", out))
    assert same(library.verify(out, jobs=1), shardio("verify", out))
    for report in (
        library.explain(ShardDataset(out)),
        library.tune(ShardDataset(out, batch_size=4)),
    ):
        assert repr(report).startswith(("dataset      24 records", "24 records"))
    [shard] = shards(out)
    data = bytearray(shard.read_bytes())
    data[2000] ^= 1
    shard.write_bytes(data)
    assert same(library.verify(out, jobs=1), shardio("verify", out, code=3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`src`, a folder of 24 images, `out`, packed of it, and `parts`, packed and not committed."""
    folder = tmp_path_factory.mktemp("progress")
    source = plant(folder / "src", images())
    shardio("pack", source, folder / "out", "--jobs", "1")
    shardio("pack", source, folder / "parts", "--part", "1/1", "--jobs", "1")
    return folder


BYTES = r"%\|.*\| [\d.]+k?B? of [\d.]+kB, .*B/s, \S+ left"


@pytest.mark.parametrize(
    ("call", "stages", "counted"),
    [
        ("pack src a --jobs 2", ("listing ...", "packing:", "committing ..."), BYTES),
        ("commit parts --jobs 1", ("looking ...", "checking:", "committing ..."), BYTES),
        ("index src --out b --jobs 1", ("listing ...", "indexing:", "committing ..."), BYTES),
        ("copy out c", ("listing ...", "copying:", "committing ..."), BYTES),
        ("verify out --jobs 1", ("verifying ...", "verifying:"), BYTES),
        ("unpack out d", ("unpacking ...", "unpacking:"), BYTES),
        (
            "export out e --format mds",
            ("looking ...", "exporting:", "finishing ..."),
            r"%\|.*\| \d+ of 24 records, .*records/s, \S+ left",
        ),
    ],
)
def test_a_bar_names_its_stages_and_counts(
    call: str,
    stages: tuple[str, ...],
    counted: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    code, seen = on_a_terminal(*call.split())
    assert code == 0
    places = [seen.find(stage) for stage in stages]
    assert -1 not in places and places == sorted(places), (stages, seen)
    assert re.search(counted, seen), seen
    assert not re.search(r"\.\.\.[^\r\n]*\w", seen.rpartition("\r")[2]), "a stage is left over"


def test_what_has_no_time_in_its_summary_says_on_a_terminal_how_long_it_took(
    folder: Path, tmp_path: Path
) -> None:
    for call, said in (
        (["verify", folder / "out"], "checked in .* s, [0-9,]+ records/s, [0-9,]+ MB/s"),
        (["unpack", folder / "out", tmp_path / "u"], "unpacked in .* s, [0-9,]+ files/s, "),
        (["export", folder / "out", tmp_path / "e", "--format", "mds"], "exported in .* records/s"),
    ):
        assert re.search(said, on_a_terminal(*call)[1])


def test_nothing_is_shown_where_nobody_looks(folder: Path, tmp_path: Path) -> None:
    assert on_a_terminal("pack", folder / "src", tmp_path / "quiet", "--quiet") == (0, "")
    code, seen = on_a_terminal("verify", folder / "out", "--json")
    assert code == 0 and json.loads(seen)["damages"] == []
    assert shardio("pack", folder / "src", tmp_path / "pipe").stderr == ""
    assert shardio("verify", folder / "out").stderr == ""
