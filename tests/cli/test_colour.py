"""Colours: on a terminal, unless NO_COLOR or a terminal that has none says otherwise."""

import re
from pathlib import Path

import pytest
from support.trees import images, on_a_terminal, plant, shardio, shards

COLOURED = {"NO_COLOR": "", "TERM": "xterm-256color"}
RED, GREEN, DIM = "\x1b[31m", "\x1b[32m", "\x1b[2m"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("colour")
    shardio("pack", plant(folder / "src", images()), folder / "out", "--jobs", "1")
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
