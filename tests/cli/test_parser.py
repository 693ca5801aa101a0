"""The parser: help with groups and examples, and what is said of a command line that is wrong."""

import os
import re
import shlex
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.commands import NAMES
from support.trees import ROOT, picture, plant, shardio

from shardio.cli import parser
from shardio.cli.command import GROUPS
from shardio.cli.main import main
from shardio.cli.parser import COMMANDS, parse, parsers
from shardio.formats import FOREIGN
from shardio.packing.sources import KINDS


def help_of(name: str, monkeypatch: pytest.MonkeyPatch, columns: int = 80) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    command = next(one for one in COMMANDS if one.name == name)
    of_command = parsers()[1][name]
    command.declare(of_command)
    return of_command.format_help()


# --- groups and width -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_options_are_shown_in_groups_of_the_same_names_and_order(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = re.findall(r"^(\S.*):$", help_of(name, monkeypatch), re.M)
    order = ["Arguments", *GROUPS, "Examples", "Exit codes"]
    assert shown == [title for title in order if title in shown]
    assert {"Output", "Examples", "Exit codes"} <= set(shown)
    # A wheel holds no pages.
    assert not re.findall(r"\S+\.md\b", help_of(name, monkeypatch, 300))


def test_the_kinds_of_sources_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    text = help_of("pack", monkeypatch, 300).partition("--from KIND")[2].partition("--root")[0]
    assert set(re.findall(r"\w+", text)) >= {*KINDS} - {*FOREIGN}


def test_the_docs_name_the_groups_in_their_order() -> None:
    head = (ROOT / "docs" / "cli.md").read_text().partition("\n## ")[0]
    table = head.partition("| group | options |\n")[2].partition("\n\n")[0]
    assert re.findall(r"^\| (\w.*?) \|", table, re.M) == [*GROUPS]


def test_an_option_is_in_one_group() -> None:
    names = " ".join(GROUPS.values()).split()
    assert len(names) == len(set(names))
    known = set()
    for command in COMMANDS:
        of_command = parsers()[1][command.name]
        command.declare(of_command)
        known |= set(re.findall(r"--([a-z0-9-]+)", of_command.format_help()))
    assert set(names) <= known, "of an option that no command has"


@pytest.mark.parametrize("columns", [60, 80, 300])
def test_help_is_as_wide_as_the_terminal_up_to_100_columns(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        shown = help_of(name, monkeypatch, columns)
        lines = shown.partition("\nExamples:")[0].splitlines()
        lines += shown.partition("\nExit codes:")[2].splitlines()
        assert max(map(len, lines)) <= min(columns, 100), name
        assert not re.search(r"-\w+-$", shown, re.M), "an option broken at its hyphen"
    assert max(map(len, lines)) > min(columns, 100) - 20


# --- examples -------------------------------------------------------------------------------------

EXAMPLES = [(command.name, example) for command in COMMANDS for example in command.examples]


def words_of(example: str) -> list[str]:
    """The words of a call, without what the shell takes."""
    return shlex.split(example.partition(" > ")[0], comments=True)


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_examples_of_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = [example for of, example in EXAMPLES if of == name]
    assert 1 <= len(examples) <= 4
    assert examples[0].startswith(f"shardio {name}")
    shown = help_of(name, monkeypatch)
    for example in examples:
        assert f"\n  {example}\n" in shown
        assert len(example) <= 78
        words = words_of(example)
        command, _ = parse(words[1:]) or pytest.fail("no command")
        assert words[0] == "shardio" and command.name == words[1]


# Of a store or another disk; of one part of several; of seconds, and tested with their modules;
# one that serves until Ctrl-C.
ELSEWHERE = re.compile(r"://|/nvme|--wait|1/8|shardio bench|view packed$")


@pytest.mark.parametrize("example", [one for _, one in EXAMPLES if not ELSEWHERE.search(one)])
def test_examples_do_what_they_say(
    example: str, places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(places, tmp_path, dirs_exist_ok=True)
    name = example.split()[1]
    if name in ("pack", "plan", "commit"):
        shutil.rmtree(tmp_path / "packed")
    if name == "commit":
        (tmp_path / "parts").rename(tmp_path / "packed")
    if name == "index":
        (tmp_path / "exported").rename(tmp_path / "tars")
    monkeypatch.chdir(tmp_path)
    assert main(words_of(example)[1:]) == 0


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the examples name: photos, what was packed of them, and files of another format."""
    folder = tmp_path_factory.mktemp("places")
    tree = {f"{'cat' if i % 2 else 'dog'}/{i}.jpg": picture(8 + i, 8) for i in range(8)}
    plant(folder / "photos", tree)
    lines = [f"{path},{os.path.dirname(path)}" for path in tree]
    (folder / "list.csv").write_text("\n".join(["path,label", *lines]))
    shardio("pack", folder / "photos", folder / "packed", "--jobs", "1")
    shardio("tag", folder / "packed", "v1")
    plant(folder / "new-photos", {"cat/new.jpg": picture(30, 8), "eel/new.jpg": picture(31, 8)})
    lines = [f"{path},a {os.path.dirname(path)}" for path in tree]
    (folder / "captions.csv").write_text("\n".join(["path,text", *lines]))
    wrong = "--fields", "captoin=text"
    shardio("annotate", folder / "packed", folder / "captions.csv", *wrong)
    np.save(folder / "clip.npy", np.zeros((8, 4), np.float32))
    (folder / "opted-out.txt").write_text("cat/1.jpg\ndog/2.jpg\n")
    (folder / "erased.txt").write_text("cat/77.jpg\n")
    shardio("pack", folder / "photos", folder / "parts", "--part", "1/1", "--jobs", "1")
    shardio("export", folder / "packed", folder / "exported", "--format", "webdataset")
    return folder


# --- no command, and help -------------------------------------------------------------------------


def test_without_a_command_the_first_ones_are_shown() -> None:
    said = shardio(code=2).stderr
    shown = re.findall(r"^  shardio (\w+).*?  (\S.*)$", said, re.M)
    assert shown == [(one.name, one.text) for one in parser.FIRST]
    assert "shardio --help" in said and "shardio help pack" in said
    assert len(said.splitlines()) < 10


def test_help_is_a_command_too() -> None:
    assert shardio("help").stdout == shardio("--help").stdout
    assert shardio("help", "ls").stdout == shardio("ls", "--help").stdout
    assert "did you mean 'verify'?" in shardio("help", "verfy", code=2).stderr


# Options that several commands share, which the docs say once.
COMMON = {
    *("--json", "--quiet", "--help", "--store-option", "--timeout", "--executor", "--address"),
}


@cache
def printed_help(name: str) -> str:
    return str(shardio(name, "--help").stdout)


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_help_of_every_option_and_a_section_in_the_docs(name: str) -> None:
    said = printed_help(name)
    assert f"usage: shardio {name}" in said and "Exit codes:" in said
    for line in said.splitlines():
        if re.match(r"  -", line):
            text = re.search(re.escape(line) + r"(?:\n {20,}\S|$)", said)
            assert re.search(r"\S  +\S", line[2:]) or (text and "\n" in text[0]), line
    documented = (ROOT / "docs" / "cli.md").read_text()
    section = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", documented, re.M | re.S)
    assert section, f"docs/cli.md has no section `## {name}`"
    for option in re.findall(r"^\s+(?:-h, )?(--[a-z0-9-]+)", said, re.M):
        common = option in COMMON
        place = documented.partition("\n## ")[0] if common else section[1]
        assert f"`{option}" in place, f"docs/cli.md, {name}: {option} is missing"


def test_the_docs_name_no_option_that_does_not_exist() -> None:
    documented = (ROOT / "docs" / "cli.md").read_text()
    said = "".join(map(printed_help, NAMES)) + "--version --help"
    for option in set(re.findall(r"`(--[a-z0-9-]+)", documented)):
        assert option in said, option


def test_all_commands_are_in_the_overview() -> None:
    said = shardio("--help").stdout
    assert all(re.search(rf"^    {name}( |$)", said, re.M) for name in NAMES)
    assert shardio("--version").stdout.startswith("shardio 0.")


def test_a_wrong_command_or_option_is_answered_with_the_right_one() -> None:
    for given, said in (
        ("packk a b", r"no command is called 'packk'; there are pack, .*: did you mean 'pack'\?"),
        ("demo photos", "shardio: no command is called 'demo'; the demo is tools/demo of the repo"),
        ("help demo", "the demo is tools/demo of the repository"),
        (
            "pack a b --shuffel",
            r"shardio pack: no option is called --shuffel; did you mean '--shuffle'\?",
        ),
        ("pack a b --shuffel=3", "no option is called --shuffel; did you"),
        ("ls a --split train", "no option is called --split; a split is .*: OUT/train"),
        (
            "tag a v1 --keys k",
            "no option is called --keys; it belongs to `shardio export`, `shardio drop`\n",
        ),
        ("drop a --key k", "--key; it belongs to .*`shardio annotate`; did you mean '--keys'\\?"),
        ("append a b --gone drop", "--gone; it belongs to `shardio index`, `shardio update`\n"),
        ("pack a b c", "shardio pack: 'c' is one more than it takes\nusage: shardio pack SRC OUT"),
        ("--json info a", "shardio info: --json goes behind the command"),
        ("explain a --unit x", "argument --unit: 'x': expected a whole number"),
        ("bench a --seconds x", "argument --seconds: 'x': expected a number"),
        ("export a", "required: DIR, --format\nusage: shardio export OUT DIR --format FORMAT"),
    ):
        done = shardio(*given.split(), code=2)
        assert re.search(said, done.stderr), done.stderr
        assert done.stderr.count("\n") == 2, "the message, and how it is called"
