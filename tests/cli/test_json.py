"""What commands print with --json: one object, all of stdout, with the keys that docs/cli.md says.

`bench` takes seconds: its keys are checked where it is tested.
"""

from pathlib import Path

import pytest
from support.json_keys import check_keys, documented, documented_rows
from support.trees import images, plant, shardio, shardio_json

from shardio.cli.parser import COMMANDS
from shardio.storage.cache import CacheDirectory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`src`, `more`: images; `out`, packed, with a tag; `parts`, not committed; `tars`; `cache`."""
    folder = tmp_path_factory.mktemp("json")
    source = plant(folder / "src", images())
    plant(folder / "more", {"class0/new.jpg": next(iter(images().values()))})
    shardio("pack", source, folder / "out", "--jobs", "1")
    shardio("tag", folder / "out", "v1")
    (folder / "scores.csv").write_text(
        "\n".join(["key,score", *(f"{key},0.5" for key in images())])
    )
    shardio("pack", source, folder / "parts", "--part", "1/1", "--jobs", "1")
    shardio("export", folder / "out", folder / "tars", "--format", "webdataset")
    file = CacheDirectory(folder / "cache", "1GiB", range_bytes=4096).open(
        f"{0:064x}", 4_000, b"d" * 16, 0
    )
    file.close()
    return folder


CALLS = {
    "pack": "src new",
    "plan": "src planned",
    "commit": "parts",
    "index": "tars",
    "unpack": "out back",
    "export": "out exported --format mds",
    "info": "out",
    "info --env": "",
    "ls": "out",
    "cat": "out 0",
    "cat --output": "first.jpg out 0",
    "verify": "out",
    "repair": "out mended",
    "view --html": "report.html out",
    "explain": "out",
    "tune": "out --batch-size 4",
    "append": "more out",
    "update": "src out",
    "drop": "out --where label=class0 --dry-run",
    "annotate": "out scores.csv --dry-run",
    "compact": "out",
    "log": "out",
    "tag": "out v2",
    "diff": "out v1",
    "restore": "out v1",
    "gc": "out",
    "copy": "out copied",
    "cache ls": "cache",
    "cache clear": "cache",
    "completion": "bash",
}


def test_every_command_is_called_and_documented() -> None:
    names = {command.name for command in COMMANDS}
    assert {name.split()[0] for name in documented()} == names
    assert {name.split()[0] for name in CALLS} == names - {"bench"}


@pytest.mark.parametrize("name", CALLS)
def test_json_is_all_of_stdout_and_has_the_keys_that_the_docs_say(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    facts = shardio_json(*name.split(), *CALLS[name].split())
    check_keys(name, facts)
    for of in ("datasets",) if name in ("pack", "plan", "commit") else ():
        assert set(facts[of][0]) == documented_rows(of)
    if name in ("log", "tag", "restore"):
        assert set(facts["versions"][0]) == documented_rows("versions")
    if name == "ls":
        assert set(facts["records"][0]) == documented_rows("records")


def test_a_field_that_is_written_into_a_file_is_so_with_json_too(
    folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "label.txt"
    facts = shardio_json("cat", folder / "out", "0", "--field", "label", "--output", file)
    assert (facts["file"], facts["bytes"]) == (str(file), file.stat().st_size)
    assert file.read_text() == str(
        shardio_json("cat", folder / "out", "0", "--field", "label")["value"]
    )


@pytest.mark.parametrize("call", ["info nowhere", "cat out 999", "pack nowhere new2", "ls src"])
def test_errors_leave_stdout_empty(
    call: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    done = shardio(*call.split(), "--json", code=None)
    assert done.returncode in (1, 2) and done.stdout == "" and done.stderr.startswith("shardio: ")
