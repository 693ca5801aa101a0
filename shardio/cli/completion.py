"""The script by which a shell completes commands, options and values. The only door to shtab.

The script is static: a shell that completes starts no Python.
"""

from __future__ import annotations

from argparse import Action, ArgumentParser
from collections.abc import Iterable, Mapping, Sequence

SHELLS = ("bash", "zsh", "fish", "tcsh")
_FILES = ("SRC", "FILE")  # what stands for a file, or a folder
_FOLDERS = ("OUT", "DIR", "DST", "IDX", "FOLDER", "OTHER", "NEW", "COPY")


def script(parser: ArgumentParser, commands: Mapping[str, Sequence[Action]], shell: str) -> str:
    """Return the script for a shell, one of SHELLS.

    parser    of all commands, each with all its options
    commands  by name the options of each, which are told what their values may be
    """
    import shtab

    words = _words()
    for name, options in commands.items():
        for action in options:
            called = (action.option_strings or [""])[0]
            known = words.get((name, called), words.get(("", called)))
            if known is not None:
                action.choices = [*known]
            elif action.metavar in _FILES:
                vars(action)["complete"] = shtab.FILE
            elif action.metavar in _FOLDERS:
                vars(action)["complete"] = shtab.DIRECTORY
    return str(shtab.complete(parser, shell))


def _words() -> dict[tuple[str, str], Iterable[str] | None]:
    """Return the values of an option of a command, or of "": of all that have it."""
    from ..formats import EXPORTED, FOREIGN, PACKED
    from ..packing.sources import KINDS

    return {
        ("export", "--format"): EXPORTED,
        ("index", "--format"): FOREIGN,
        ("", "--format"): PACKED,
        ("", "--from"): KINDS,
        ("repair", "--from"): None,  # a folder
        ("", "--encode"): ("raw",),
        ("", "--tail"): ("pad", "drop", "exact"),
    }
