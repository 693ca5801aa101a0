"""The bars of long commands: what they say on a terminal, and that nothing is said elsewhere."""

import json
import re
from pathlib import Path

import pytest
from support.trees import images, on_a_terminal, plant, shardio


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
