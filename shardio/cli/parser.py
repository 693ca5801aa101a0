"""The parser of the command line, of which only the command that is named has its options."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from .._version import __version__
from ..errors import printable, there_are
from . import exit_codes
from .advise import BENCH, EXPLAIN, TUNE
from .cache import CACHE
from .command import Command, option
from .completion import SHELLS, script
from .convert import COPY, EXPORT, INDEX, REPAIR, UNPACK
from .look import CAT, INFO, LS, VERIFY
from .output import Output, paint
from .pack import APPEND, COMMIT, GC, PACK, PLAN, UPDATE
from .versions import ANNOTATE, COMPACT, DIFF, DROP, LOG, RESTORE, TAG
from .view import VIEW


def _completion(output: Output, *, shell: str) -> int:
    parser, of_commands = parsers()
    options = {one.name: one.declare(of_commands[one.name]) for one in COMMANDS}
    text = script(parser, options, shell)
    return output.show(text, {"shell": shell, "script": text}, text)


COMPLETION = Command(
    "completion",
    "print the script by which a shell completes what is typed",
    _completion,
    "",
    option("shell", "SHELL", ", ".join(SHELLS), choices=SHELLS),
    examples=(
        "shardio completion bash > ~/.shardio.bash  # and source it in ~/.bashrc",
        "shardio completion fish > ~/.config/fish/completions/shardio.fish",
    ),
)
COMMANDS = (
    *(PACK, PLAN, COMMIT, INDEX, UNPACK, EXPORT, INFO, LS, CAT, VERIFY, REPAIR, VIEW),
    *(APPEND, UPDATE, DROP, ANNOTATE, COMPACT, LOG, DIFF, TAG, RESTORE, GC),
    *(EXPLAIN, TUNE, BENCH, COPY, CACHE, COMPLETION),
)
FIRST = (PACK, VIEW, BENCH)  # what a newcomer runs, by its first example
_SHOWN = 5  # commands that are named
_MOST_COLUMNS = 100  # of help: longer lines are hard to read


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Help as wide as the terminal, in which no option is broken at its hyphens."""

    def __init__(self, prog: str, **more: Any) -> None:
        super().__init__(prog, **more | {"width": _columns()})

    def format_help(self) -> str:
        self._action_max_length += 2  # commands are indented twice, which argparse forgets
        return super().format_help()

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are short, and say what may have been meant."""

    def __init__(self, *, command: Command | None = None, **more: Any) -> None:
        if command is not None:
            text = f"{command.text[0].upper()}{command.text[1:]}."
            more["description"] = textwrap.fill(text, _columns())
        super().__init__(
            **more,
            add_help=False,  # `declare` adds it, to the last group
            allow_abbrev=False,  # what is short for one option today is not when there are two
            argument_default=argparse.SUPPRESS,
            formatter_class=_Formatter,
        )
        self._command = command

    def format_help(self) -> str:
        """Return the help: first how it is called, last examples and exit codes."""
        self.usage = self._call().replace("%", "%%")
        first = "`shardio help COMMAND` shows the options of one, with examples."
        if self._command is not None:
            first = "\n".join(["Examples:", *(f"  {one}" for one in self._command.examples)])
        self.epilog = f"{first}\n\n{_exit_codes(_columns())}"
        return super().format_help()

    def _call(self) -> str:
        """Return how the command is called, without its twenty options."""
        places = (one for one in self._actions if not one.option_strings)
        taken = [f"[{one.metavar}]" if one.nargs == "?" else str(one.metavar) for one in places]
        named = (one for one in self._actions if one.option_strings and one.required)
        taken += [f"{one.option_strings[0]} {one.metavar}" for one in named]
        return " ".join([self.prog, *taken, "[options]"])

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and how the command is called."""
        lists = f"`{self.prog} --help` lists them"
        wrong = paint(f"{self.prog}:", "bad", sys.stderr)
        hint = paint(f"usage: {self._call()}; {lists}", "hint", sys.stderr)
        self.exit(exit_codes.USAGE, f"{wrong} {message}\n{hint}\n")

    def refuse(self, given: str) -> NoReturn:
        """Say what is wrong with an argument that the command does not take."""
        name = given.partition("=")[0]
        if not name.startswith("-"):
            self.error(f"{printable(given)!r} is one more than it takes")
        known = self._option_string_actions
        if name in known:  # the parser of all commands does not know it
            self.error(f"{name} goes behind the command")
        guess = there_are(known, name).rpartition(": ")[2]
        advice = f"; {guess}" if guess.endswith("?") else ""
        others = [one.name for one in COMMANDS if name in dict(one.options)]
        if name == "--split" and not advice:  # as in Python
            advice = "; a split is the dataset in a folder of its own: OUT/train"
        elif others:
            more = ", ..." if len(others) > _SHOWN else ""
            advice = (
                f"; it belongs to {', '.join(f'`shardio {one}`' for one in others[:_SHOWN])}{more}"
            )
            import difflib  # 5 ms, on the way to an error only

            if close := difflib.get_close_matches(name, known, 1, cutoff=0.85):
                advice += f"; did you mean {close[0]!r}?"
        self.error(f"no option is called {printable(name)}{advice}")


def _columns() -> int:
    """Return the width of help: two less than the terminal's."""
    return min(shutil.get_terminal_size().columns, _MOST_COLUMNS) - 2


def _exit_codes(columns: int) -> str:
    """Return the exit codes and their meanings, each on one line."""
    told = (f"{code} {meaning}" for code, meaning in exit_codes.MEANINGS.items())
    # No line ends within a meaning: their spaces are unbreakable while lines are filled.
    text = "   ".join(one.replace(" ", "\u00a0") for one in told)
    lines = textwrap.wrap(text, columns, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(["Exit codes:", *lines]).replace("\u00a0", " ")


def parsers() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of all commands, and by name that of each. None has its options yet."""
    parser = Parser(
        prog="shardio",
        description="Pack folders of images into shards, and look at what is in them.",
    )
    added = parser.add_subparsers(title="Commands", metavar="COMMAND", required=True)
    options = parser.add_argument_group("Options")
    options.add_argument("-h", "--help", action="help", help="show this help and exit")
    version = f"shardio {__version__}"
    options.add_argument("--version", action="version", version=version, help="name the version")
    of_commands = {
        command.name: added.add_parser(command.name, command=command, help=command.text)
        for command in COMMANDS
    }
    topic = added.add_parser("help", help="show the options of a command")
    topic.add_argument("command", metavar="COMMAND", nargs="?", choices=[*of_commands])
    return parser, of_commands


def parse(arguments: Sequence[str]) -> tuple[Command, dict[str, Any]] | None:
    """Read the command line: a command, and by name the options that were given.

    Returns None where it names no command: what to begin with is shown. Exits for a wrong one.
    """
    if not arguments:
        print(_beginning(), file=sys.stderr)
        return None
    parser, of_commands = parsers()
    commands = {command.name: command for command in COMMANDS}
    if arguments[0] == "help":
        arguments = [*arguments[1:], "--help"]
    named = next((one for one in arguments if not one.startswith("-")), None)
    if named in commands:
        commands[named].declare(of_commands[named])
    elif named is not None:
        there = there_are(commands, named, 20)
        if named == "demo":
            there = "the demo is tools/demo of the repository"
        parser.error(f"no command is called {printable(named)!r}; {there}")
    options, rest = parser.parse_known_args(arguments)
    if rest:
        of_commands[str(named)].refuse(rest[0])
    return commands[str(named)], vars(options)


def _beginning() -> str:
    """Return what is shown where no command is named: the first ones, and where the others are."""
    width = max(len(command.examples[0]) for command in FIRST)
    lines = [f"  {command.examples[0]:<{width}}  {command.text}" for command in FIRST]
    more = "`shardio --help` lists all commands; `shardio help pack` shows one, with examples."
    first = "shardio packs images into shards and feeds them to training."
    return "\n".join([first, "", *lines, "", paint(more, "hint", sys.stderr)])
