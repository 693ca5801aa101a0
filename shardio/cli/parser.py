"""The parser of the command line, of which only the command that is named has its options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from .._version import __version__
from ..errors import printable, there_are
from . import exit_codes
from .advise import BENCH, DEMO, EXPLAIN, TUNE
from .cache import CACHE
from .command import Command
from .convert import COPY, EXPORT, INDEX, UNPACK
from .look import CAT, INFO, LS, VERIFY
from .pack import COMMIT, GC, PACK, PLAN
from .view import VIEW

COMMANDS = (
    *(
        PACK,
        PLAN,
        COMMIT,
        INDEX,
        UNPACK,
        EXPORT,
        INFO,
        LS,
        CAT,
        VERIFY,
        VIEW,
        EXPLAIN,
        TUNE,
        BENCH,
        DEMO,
        GC,
    ),
    COPY,
    CACHE,
)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are short, and say what may have been meant."""

    def __init__(self, **more: Any) -> None:
        super().__init__(
            **more,
            allow_abbrev=False,  # what is short for one option today is not when there are two
            argument_default=argparse.SUPPRESS,
            epilog=exit_codes.TEXT,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and how the command is called, without its twenty options."""
        places = (one for one in self._actions if not one.option_strings)
        taken = [f"[{one.metavar}]" if one.nargs == "?" else str(one.metavar) for one in places]
        named = (one for one in self._actions if one.option_strings and one.required)
        taken += [f"{one.option_strings[0]} {one.metavar}" for one in named]
        usage = f"usage: {' '.join([self.prog, *taken])} [options]"
        lists = f"`{self.prog} --help` lists them"
        self.exit(exit_codes.USAGE, f"{self.prog}: {message}\n{usage}; {lists}\n")

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
        if name == "--split" and not advice:  # as in Python
            advice = "; a split is the dataset in a folder of its own: OUT/train"
        self.error(f"no option is called {printable(name)}{advice}")


def parse(arguments: Sequence[str]) -> tuple[Command, dict[str, Any]] | None:
    """Read the command line: a command, and by name the options that were given.

    Returns None where it names no command, so that all are shown. Exits for a wrong one.
    """
    parser = _Parser(
        prog="shardio",
        description="Pack folders of images into shards, and look at what is in them.",
    )
    parser.add_argument("--version", action="version", version=f"shardio {__version__}")
    added = parser.add_subparsers(metavar="COMMAND", required=True)
    commands = {command.name: command for command in COMMANDS}
    parsers = {
        name: added.add_parser(
            name,
            help=command.text,
            description=f"{command.text[0].upper()}{command.text[1:]}.",
        )
        for name, command in commands.items()
    }
    if not arguments:
        parser.print_help(sys.stderr)
        return None
    named = next((one for one in arguments if not one.startswith("-")), None)
    if named in commands:
        commands[named].declare(parsers[named])
    elif named is not None:
        there = there_are(commands, named, 20)
        parser.error(f"no command is called {printable(named)!r}; {there}")
    options, rest = parser.parse_known_args(arguments)
    if rest:
        parsers[str(named)].refuse(rest[0])
    return commands[str(named)], vars(options)
