"""What shells complete: bash for every command and option, zsh and fish by samples."""

import json
import os
import pty
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import LIMIT_S
from support.commands import NAMES
from support.trees import shardio

from shardio.cli.completion import SHELLS
from shardio.cli.parser import COMMANDS, parsers


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    for shell in SHELLS:
        (folder / shell).write_text(shardio("completion", shell).stdout)
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a folder and a file, whose names begin alike."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos.csv").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def options_of(name: str) -> set[str]:
    """Every option that the parser of a command takes."""
    [command] = (one for one in COMMANDS if one.name == name)
    options = command.declare(parsers()[1][name])
    return {"--help"}.union(*(one.option_strings for one in options))


# What a line is, whose last word is completed, and what it is completed to.
LINES: dict[str, set[str]] = {
    "shardio ver": {"verify"},
    "shardio help ver": {"verify"},
    "shardio pack --re": {"--resize", "--restart"},
    "shardio export a b --format m": {"mds"},
    "shardio index a --format w": {"webdataset"},
    "shardio pack a b --from tr": {"trees"},
    "shardio pack a b --on-error ": {"raise", "skip"},
    "shardio explain a --tail ": {"pad", "drop", "exact"},
    "shardio cache ": {"ls", "clear"},
    "shardio completion f": {"fish"},
}


# --- bash -----------------------------------------------------------------------------------------


def by_bash(scripts: Path, lines: list[str]) -> dict[str, set[str]]:
    """What bash completes the last word of each line to."""
    program = f"""
        source {scripts / "bash"}
        while read -r line; do
            read -r -a COMP_WORDS <<< "$line"
            [[ "$line" == *@ ]] && COMP_WORDS[-1]=""
            COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
            _shtab_shardio 2>&1
            echo "${{COMPREPLY[@]}}"
        done
    """
    asked = "".join(f"{line}@\n" if line.endswith(" ") else f"{line}\n" for line in lines)
    done = subprocess.run(
        ["bash", "--norc", "-c", program],
        input=asked,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    found = [set(line.split()) for line in done.stdout.splitlines()]
    return dict(zip(lines, found, strict=True))


def test_bash_completes_every_command_and_every_option(scripts: Path) -> None:
    lines = ["shardio ", *(f"shardio {name} --" for name in NAMES)]
    found = by_bash(scripts, lines)
    assert found["shardio "] == {*NAMES, "help"}
    for name in NAMES:
        assert found[f"shardio {name} --"] == options_of(name), name


def test_bash_completes_values(scripts: Path) -> None:
    assert by_bash(scripts, [*LINES]) == LINES


def test_bash_completes_folders_and_files_where_these_are_meant(
    scripts: Path, folder: Path
) -> None:
    assert by_bash(
        scripts,
        ["shardio info ph", "shardio pack ph", "shardio pack ph ph", "shardio tune a --plot ph"],
    ) == {
        "shardio info ph": {"photos"},
        "shardio pack ph": {"photos", "photos.csv"},
        "shardio pack ph ph": {"photos"},
        "shardio tune a --plot ph": {"photos", "photos.csv"},
    }


# --- fish and zsh ---------------------------------------------------------------------------------


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed: tools/setup")
def test_fish_completes_the_same(scripts: Path, folder: Path) -> None:
    program = f"source {scripts / 'fish'}\n"
    for line in LINES:
        program += f"complete -C '{line}'; echo =\n"
    program += "complete -C 'shardio info ph'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", program],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "HOME": str(folder)},
    )
    assert not done.stderr, done.stderr
    *found, last = done.stdout.split("=\n")
    for (line, expected), shown in zip(LINES.items(), found, strict=True):
        assert {one.split("\t")[0] for one in shown.splitlines()} == expected, line
    assert last.split()[0] == "photos/"


@pytest.fixture
def zsh(scripts: Path, folder: Path) -> Iterator[int]:
    """A terminal with zsh, as a user has it who wrote the line of `completion --help` for it."""
    (folder / ".zshrc").write_text(
        "PS1='READY> '; unsetopt beep; autoload -Uz compinit; compinit -u -d dump\n"
        f'eval "$(cat {scripts / "zsh"})"\n'
    )
    pid, terminal = pty.fork()
    if not pid:
        os.environ.update(ZDOTDIR=str(folder), HOME=str(folder), TERM="dumb")
        os.execvp("zsh", ["zsh", "-d", "-i"])
    try:
        read_until(terminal, "READY> ")
        yield terminal
    finally:
        os.close(terminal)  # which ends it
        os.waitpid(pid, 0)


def read_until(terminal: int, text: str, limit_s: float = LIMIT_S) -> str:
    seen = ""
    until = time.monotonic() + limit_s
    while text not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, until - time.monotonic()))
        assert ready, f"{text!r} was not seen in {seen!r}"
        seen += os.read(terminal, 1 << 16).decode()
    return seen


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed: tools/setup")
def test_zsh_completes_what_is_typed(zsh: int) -> None:
    for typed, completed in (
        ("shardio ver", "shardio verify "),
        ("shardio help ver", "shardio help verify "),
        ("shardio pack --jpeg", "shardio pack --jpeg-tiles "),
        ("shardio export a b --format m", "shardio export a b --format mds "),
        ("shardio info ph", "shardio info photos/"),
    ):
        os.write(zsh, f"{typed}\t".encode())
        read_until(zsh, completed)
        os.write(zsh, b"\x15")  # and the line is emptied


# --- the command ----------------------------------------------------------------------------------


def test_scripts_are_printed_in_all_ways(scripts: Path) -> None:
    assert SHELLS == ("bash", "zsh", "fish", "tcsh")
    assert shardio("completion", "bash", "--quiet").stdout == (scripts / "bash").read_text()
    found = json.loads(shardio("completion", "zsh", "--json").stdout)
    assert found == {"shell": "zsh", "script": (scripts / "zsh").read_text().removesuffix("\n")}
    assert "choose from" in shardio("completion", "powershell", code=2).stderr
    assert all(f" {name} " in (scripts / "tcsh").read_text() for name in NAMES[1:])
