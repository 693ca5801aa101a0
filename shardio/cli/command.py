"""How a command of the command line is declared: its options, their values, their texts.

An option is described once, in the docstring of the function or class that takes it, and named
once, here: what is not given is not passed on, so that the function's own default holds.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..errors import OptionError, printable
from ..names import from_file_name
from .output import Output

Option = tuple[str, dict[str, Any]]  # or a place such as OUT: its name, and what `argparse` takes


class Command:
    """One command, with its options."""

    def __init__(
        self,
        name: str,
        text: str,
        run: Callable[..., int],
        described: str,
        *options: Option,
        examples: Sequence[str],
        forks: bool = False,
        resume_hint: Callable[[Mapping[str, Any]], str] = lambda options: "",
    ) -> None:
        """Declare a command.

        text         what it does
        run          called with an Output and, by name, the options that were given; returns an
                     exit code
        described    where options are described that have no text here: "packing.pack:pack", or
                     several such places, with spaces between
        examples     two to four calls of it, as they are typed
        forks        it may start processes, by fork, which read from URLs; others do it themselves
        resume_hint  returns, by the options, how to resume after an interruption; "": not at all
        """
        self.name, self.text, self.run, self.forks = name, text, run, forks
        self.resume_hint, self.examples = resume_hint, examples
        self.options, self._described = options, described.split()

    def declare(self, parser: argparse.ArgumentParser) -> list[argparse.Action]:
        """Add all options to the parser of this command, in their groups. Return them."""
        texts = descriptions(self._described)
        options = [*self.options, JSON, QUIET]
        titles = {name: _title(name) for name, _ in options}
        groups = {
            title: parser.add_argument_group(title)
            for title in ("Arguments", *GROUPS)
            if title in titles.values()
        }
        added = [groups[titles[name]].add_argument(name, **more) for name, more in options]
        for one in added:
            if one.help is None:
                one.help = self._as_help(texts.get(one.dest, ""))
        text = "show this help and exit"
        groups["Output"].add_argument("-h", "--help", action="help", help=text)
        return added

    def _as_help(self, text: str) -> str:
        """Return a description with options called as on the command line: `jpeg_tiles` is not."""
        known = {name for name, _ in self.options}

        def called(quoted: re.Match[str]) -> str:
            name = "--" + quoted[1].replace("_", "-")
            return name if name in known else quoted[0]

        return re.sub(r"`(?:[a-z]+\.)?([a-z_]+)`", called, text).replace("%", "%%")

    def with_typed_options(self, message: str) -> str:
        """Return a message with options called as on the command line, not as in Python."""
        named = {more.get("dest", name[2:].replace("-", "_")): name for name, more in self.options}
        names = {dest: name for dest, name in named.items() if name.startswith("--")}

        def called(found: re.Match[str]) -> str:
            client, key, setting, name, value = found.groups(default="")
            if key and "store_options" in names:
                group = "client_options." if client else ""
                return f"--store-option {group}{key}={setting.replace('True', 'true')}"
            return f"{names[name]} {value}".rstrip() if name in names else found[0]

        return _IN_PYTHON.sub(called, message)


# What is quoted; options={'region': VALUE}; an option as the first word, or one with `_` in it: not
# in quotes, parentheses or paths, where it is somebody's name, or meant for Python.
_IN_PYTHON = re.compile(
    r"(?<!\S)(?:'[^'\n]*'|\"[^\"\n]*\")|"
    r"\b(client_)?options=\{'([\w.]+)': ([^{}]*)\}"
    r"|(?:\A(?=[a-z]+ is )|(?<!\S)(?=[a-z]+_))([a-z_]+)(?:=([\w.]+))?(?![\w/'\"(]|\.\w)"
)


def option(name: str, metavar: str | None = None, text: str | None = None, **more: Any) -> Option:
    """Return an option; without dashes before its name it is a place.

    metavar  what stands for its value, and says how it is read; None: it has none, and is a switch
    text     its description, where a docstring has none, or one too long for a terminal
    more     as `argparse` has it
    """
    more["help"] = text
    if metavar is not None:
        more["metavar"] = metavar
        if metavar in _VALUES:
            more["type"] = _VALUES[metavar]
    elif not more.keys() & {"action", "choices"}:
        more["action"] = "store_true"
    return name, more


def _title(name: str) -> str:
    """Return the group of an option, or of a place."""
    if not name.startswith("-"):
        return "Arguments"
    return next((title for title, names in GROUPS.items() if name[2:] in names.split()), "Options")


def calls(place: str, *stages: str, announces: bool = False) -> Callable[..., int]:
    """Return what runs the function at a place such as "packing.gc:gc", and shows its result.

    stages: of its progress, if it tells any. announces: it has lines to show before the work.
    """

    def run(output: Output, **call: Any) -> int:
        module, _, name = place.partition(":")
        function = getattr(importlib.import_module(f"shardio.{module}"), name)
        if announces:
            call["announce"] = output.announce
        if not stages:
            return output.show(function(**call))
        with output.progress(*stages) as progress:
            done = function(**call, progress=progress)
        return output.show(done)

    return run


# --- texts ----------------------------------------------------------------------------------------


def descriptions(places: Sequence[str]) -> dict[str, str]:
    """Return the texts of options by name, from docstrings such as that of "packing.pack:pack".

    The first place that describes a name wins; a row of several names only where none is its own.
    Modules are not imported: `--help` would wait for numpy.
    """
    alone: dict[str, str] = {}
    shared: dict[str, str] = {}
    for place in places:
        for names, text in option_rows(_docstring(place)):
            for name in names:
                (shared if len(names) > 1 else alone).setdefault(name, text)
    return shared | alone


def option_rows(docstring: str) -> Iterator[tuple[list[str], str]]:
    """Yield the rows of a docstring's table of options: names, and their text.

    A row is `name  text` or `name, name  text`; lines that go on are indented.
    """
    row = re.compile(r"^(\w+(?:, \w+)*) {2,}(\S.*(?:\n +\S.*)*)", re.M)
    for found in row.finditer(docstring):
        yield found[1].split(", "), " ".join(found[2].split())


def _docstring(place: str) -> str:
    """Return the docstring of a function or class of shardio, from its module's source."""
    module, _, name = place.partition(":")
    source = (pkgutil.get_data("shardio", f"{module.replace('.', '/')}.py") or b"").decode()
    found = re.search(rf'^(?:def|class) {name}\b.*?"""(.*?)"""', source, re.M | re.S)
    return "" if found is None else textwrap.dedent(" " * 4 + found[1])


# --- values ---------------------------------------------------------------------------------------


def _reader(read: Callable[[str], Any], expected: str) -> Callable[[str], Any]:
    """Return a function that reads the value of an option, and says what it expected."""

    def value(text: str) -> Any:
        try:
            return read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}") from None

    return value


def _seconds(text: str) -> float:
    """Read an age: a number, and s, m, h or d behind it."""
    factors = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    number, factor = (text[:-1], factors[text[-1]]) if text[-1:] in factors else (text, 1)
    seconds = float(number) * factor
    if not seconds >= 0:
        raise ValueError
    return seconds


def _ints(text: str) -> list[int]:
    """Read whole numbers with commas between them."""
    return [int(one) for one in text.split(",")]


def _buffer(text: str) -> int | str:
    """Read a shuffle_buffer, as ShardDataset takes it: records, or a size."""
    return int(text) if text.strip().isdigit() else text


# How the value is read that a metavar stands for: otherwise it stays as it was typed.
_VALUES: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("N", "Q"), _reader(int, "a whole number")),
    "S": _reader(float, "a number"),
    "N,N,...": _reader(_ints, "numbers, like 1,2,4"),
    "AGE": _reader(_seconds, "an age, like 90m, 24h or 7d"),
    "BUFFER": _buffer,
    **dict.fromkeys(("COND", "KEY", "NAME", "NAME=THEIRS,...", "PATTERN"), from_file_name),
}


def read_fields(
    text: str | None, *, alone: bool = False, option: str = "--fields"
) -> dict[str, str]:
    """Read `image=jpg,label=cls`. alone: a name without another one is of "".

    Raises OptionError, also for a name that comes twice.
    """
    text = text or ""
    found: dict[str, str] = {}
    for pair in text.split(","):
        name, equals, theirs = pair.partition("=")
        if not pair and not alone:
            continue
        if not name or not (theirs or (alone and not equals)):
            expected = "NAME,NAME=THEIRS,..." if alone else "NAME=THEIRS,NAME=THEIRS"
            raise OptionError(f"{option} {printable(text)}: expected {expected}")
        if name in found:
            raise OptionError(f"{option} {printable(text)}: {printable(name)} is there twice")
        found[name] = theirs
    return found


def group_stores(command: Command, call: dict[str, Any]) -> None:
    """Replace the options of object stores in a call: by `storage`, and by `to` for TARGET.

    `storage` has the root, too, but for `pack` and `plan`, where it is that of a source.
    Raises OptionError.
    """
    if STORE[0] not in command.options:
        return
    from ..storage.options import Storage

    taken = {"timeout_s": call.pop("timeout_s")} if "timeout_s" in call else {}
    if "target_options" in call:
        call["to"] = Storage(options=_store_options(call.pop("target_options")), **taken)
    if "store_options" in call:
        taken["options"] = _store_options(call.pop("store_options"))
    if "root" in call and command.name not in ("pack", "plan", "append", "update"):
        taken["root"] = call.pop("root")
    call["storage"] = Storage(**taken)


def make_executor(call: dict[str, Any], tell: Callable[[str], None]) -> None:
    """Replace the options of EXECUTOR in a call by the executor that they name.

    tell: called with lines of what happens there. Raises OptionError, DependencyError.
    """
    address = call.pop("address", None)
    if "executor" in call:
        from ..packing.ray_executor import RayExecutor

        call["executor"] = RayExecutor(address, tell)
    elif address is not None:
        raise OptionError("--address: goes with --executor ray, which is not asked for")


def _store_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Read options of a store: NAME=VALUE; a name with a dot is one in a group of options."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        *groups, last = name.split(".")
        if not equals or not all([*groups, last]):
            raise OptionError(f"--store-option {printable(pair)}: expected NAME=VALUE")
        place = found
        for group in groups:
            place = place.setdefault(group, {})
            if not isinstance(place, dict):
                raise OptionError(f"--store-option {printable(pair)}: {group} has a value already")
        place[last] = {"true": True, "false": False}.get(value.lower(), value)
    return found


# --- options of several commands ------------------------------------------------------------------

RESUME_HINT = "what is finished is kept; run the same command again to go on"  # after Ctrl-C


def commit_hint(options: Mapping[str, Any]) -> str:
    """Say what becomes of a commit that was interrupted before it ended, or just behind it."""
    if options.get("dry_run"):
        return ""
    out = printable(options["path"], 4096)
    return f"`shardio log {out}` shows a new version, or else run the same command again"


# Options by the group that `--help` shows them in, the same in all commands.
GROUPS = {
    "What to read": (
        "from files root fields where label table split-files split-by boxes first-label layout "
        "class classes shard key field split splits"
    ),
    "Images": "resize quality encode jpeg-tiles keep-original max-pixels decode size",
    "Shards and order": "format shard-size max-records shuffle seed",
    "Training": (
        "batch-size workers threads world-size local-world-size shuffle-buffer unit units tail "
        "spans nodes memory"
    ),
    "How to run": (
        "jobs executor address plan part parts stagger wait on-error restart dry-run work-dir "
        "loader seconds quick"
    ),
    "Object stores": "store-option timeout target-option",
    "Options": "",  # that only one command has
    "Output": "out output plot html overwrite json quiet",
}

JSON = option("--json", text="one JSON object on stdout", default=False)
QUIET = option("--quiet", text="no progress and no summary", default=False)
OUT = option("path", "OUT", "the packed directory, or its URL")
FIELDS = option("--fields", "NAME=THEIRS,...", "names: image=jpg,label=cls")
BATCH_SIZE = option("--batch-size", "N", "of each rank")
JOBS = option("--jobs", "N")
OVERWRITE = option("--overwrite")
PARTS = (  # of commands that do a part of the shards
    option(
        "--part",
        "I/N",
        "only part I of N of the shards; auto: the part that SLURM, torchrun or Kubernetes gives "
        "this process",
    ),
    option("--parts", "N", "of --part auto, where that cannot be told (Kubernetes: completions)"),
    option(
        "--stagger",
        "S",
        "wait first, up to S seconds, so that not all parts begin at once",
        dest="stagger_s",
    ),
)
PLOT = option("--plot", "FILE", "a picture too: .png, .svg or .html; replaces FILE")
ROOT = option("--root", "DIR")
WORK_DIR = option("--work-dir", "DIR")
WORKERS = option("--workers", "N", dest="num_workers")
WORLD_SIZE = option("--world-size", "N", "ranks (default 1)")
STORE = (
    option(
        "--store-option",
        "NAME=VALUE",
        "of an object store: endpoint, region, skip_signature=true (several: once each); not for "
        "secrets, which others see here: those belong in the environment",
        action="append",
        dest="store_options",
    ),
    option(
        "--timeout",
        "S",
        "seconds that a request to an object store is tried again while it fails (default 120)",
        dest="timeout_s",
    ),
)
EXECUTOR = (
    option("--executor", text="ray: a Ray cluster does it, not this machine", choices=("ray",)),
    option(
        "--address",
        "HOST:PORT",
        "of that cluster; auto: the one that this machine is of (default: RAY_ADDRESS, or one of "
        "this machine alone, for this command)",
    ),
)
READ_FROM = (ROOT, *STORE)  # of commands that read a dataset
PART_OF_A_PACKING = option(
    "--part",
    "I/N",
    "build only part I of N, then `shardio commit`; auto: the part that SLURM, torchrun or "
    "Kubernetes gives this process",
)
SHARED = (*EXECUTOR, *PARTS)  # of commands whose work many machines may do
TARGET = option(
    "--target-option",
    "NAME=VALUE",
    "of the store that is written to; default: as --store-option says, unless SRC is in another "
    "kind of store",
    action="append",
    dest="target_options",
)
