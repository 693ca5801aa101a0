"""How commands are declared: texts from docstrings, messages with options as they are typed."""

import re
import textwrap
from pathlib import Path

import pytest
from support.commands import Run

from shardio.cli import parser
from shardio.cli.command import GROUPS, descriptions, option_rows


def test_descriptions_come_from_the_docstrings_tables() -> None:
    rows = """Do it.

    one       in a line
    two       in a line: and
              in another
    a_b, c_d  both
    raises nothing, and  is no row
    """
    table = textwrap.dedent(rows.partition("\n")[2])
    assert list(option_rows(table)) == [
        (["one"], "in a line"),
        (["two"], "in a line: and in another"),
        (["a_b", "c_d"], "both"),
    ]
    explain, dataset = "tuning.explain:explain", "dataset.shard_dataset:ShardDataset"
    assert descriptions([explain])["num_workers"] == "of each rank's loader"
    assert descriptions([dataset])["path"] == "the packed directory, or its URL"
    storage = "storage.options:Storage"
    first, second = descriptions([explain, storage]), descriptions([storage, explain])
    assert first["root"] == second["root"] == descriptions([storage])["root"]  # its own row wins
    assert descriptions(["packing.pack:nothing"]) == {}


def test_an_option_stands_in_the_group_of_its_name(run: Run) -> None:
    """Places are arguments, and what no group names is an option of its own command."""
    said = run("pack", "--help").stdout
    places = [said.index(f"\n{title}:\n") for title in ("Arguments", *GROUPS) if title in said]
    assert places == sorted(places)
    blocks = dict(re.findall(r"^(\S[^\n]*):\n((?: .*\n|\n)+)", said, re.M))
    assert re.findall(r"^  (\w+)", blocks["Arguments"], re.M) == ["SRC", "OUT"]
    for title, name in (("Images", "resize"), ("Options", "ignore"), ("Output", "json")):
        assert [t for t, text in blocks.items() if re.search(rf"^  --{name}\b", text, re.M)] == [
            title
        ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--jobs", "0"], "shardio: --jobs is 0: "),
        (["--shard-size", "5"], "shardio: --shard-size is 5, without a unit"),
        (["--work-dir", "x"], "shardio: --work-dir: only where OUT is a URL"),
        (["--timeout", "0"], "shardio: --timeout is 0.0: "),
        (["--store-option", "client_options=x"], "expected --store-option client_options.NAME=..."),
    ],
)
def test_messages_call_options_as_the_command_line_does(
    source: Path, tmp_path: Path, run: Run, arguments: list[str], said: str
) -> None:
    place = "s3://bucket" if {"--store-option", "--timeout"} & {*arguments} else source
    assert said in run("pack", place, tmp_path / "out", *arguments).stderr


def test_what_is_no_option_of_the_command_line_stays_as_it_is() -> None:
    pack, cache = (one for one in parser.COMMANDS if one.name in ("pack", "cache"))
    for text, told in (
        ("by options={'anonymous': True}.", "by --store-option anonymous=true."),
        ("give max_pixels=400, or", "give --max-pixels 400, or"),
        ("shardio.Storage(max_pixels=400)",) * 2,
        ("/data/max_pixels/x, max_pixels.jpg, 'max_pixels', new_size: root is 3",) * 2,
        ("fields: overwrite=True",) * 2,
        ("the key 'a max_pixels b', \"it's work_dir\": twice",) * 2,
        ("/data/[max_pixels]: https://h/x?max_pixels=4: /data/a,work_dir: gone",) * 2,
    ):
        assert pack.with_typed_options(text) == told
    assert cache.with_typed_options("options={'region': ...} max_pixels=4") == (
        "options={'region': ...} max_pixels=4"
    )
