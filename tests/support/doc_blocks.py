"""Runs the blocks of a page of the documentation, in order, in one folder and one namespace.

    python     runs in this process. A page's blocks share their names. A block whose first line is
               `# NAME.py` is written to that file instead, for the commands that follow.
    console    each line after `$ ` runs in bash. The lines below it, if any, are what it prints.
    text       directly below a Python block: what that block prints. If the block ends with an
               error, the last line is `ErrorClass: message`. Elsewhere: an illustration.
    (none)     console if a line begins with `$ `, else text.
    {...}      a directive of the site, such as its table of contents: not looked at.

`print(...)  # words` prints exactly these words. In all that is shown `...` stands for any text,
and amounts that differ between machines (seconds, bytes, rates, hashes of files) are not compared.

What does not run is named in `Page.unrun` with the reason; a block in another language must be.
"""

import contextlib
import gc
import io
import os
import re
import shlex
import signal
import subprocess
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardio.storage import ranges
from support import LIMIT_S, warm_python
from support.trees import ROOT, environment

FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.M | re.S)
TORCHRUN = ("-m", "torch.distributed.run", "--local-addr", "127.0.0.1")


@dataclass(frozen=True)
class Block:
    """A block of a page, with the line of the page on which its text begins."""

    page: str
    line: int
    kind: str  # python, console, text, or the language that the page names
    text: str
    follows: bool  # only blank lines are between the block before and this one

    @property
    def place(self) -> str:
        return f"{self.page}, line {self.line}"


@dataclass
class Page:
    """How a page is tested.

    name: its path below the repository, such as "docs/faq.md".
    prepare: makes the files that its reader has, in the current folder; if it returns a context
        manager, such as a running server, the page runs within.
    smaller: texts that are replaced in every block; each must be on the page.
    unrun: words, each with the reason why the commands and blocks that hold them do not run.
    given: makes the names that its reader has, such as a model, after `prepare`.
    check: looks at the names that the Python blocks leave.
    """

    name: str
    prepare: Callable[[], contextlib.AbstractContextManager[Any] | None] = lambda: None
    smaller: Sequence[tuple[str, str]] = ()
    unrun: Mapping[str, str] = field(default_factory=dict)
    given: Callable[[], dict[str, Any]] = dict
    check: Callable[[dict[str, Any]], object] = lambda names: None


def blocks(name: str) -> list[Block]:
    """Return the blocks of a page, without its directives."""
    text = (ROOT / name).read_text()
    found: list[Block] = []
    end = 0
    for one in FENCE.finditer(text):
        between, end = text[end : one.start()], one.end()
        body = textwrap.dedent(one[3])
        kind = one[2] or ("console" if re.search(r"^\$ ", body, re.M) else "text")
        line = text.count("\n", 0, one.start(3)) + 1
        found.append(Block(name, line, kind, body, bool(found) and not between.strip()))
    assert 2 * len(found) == len(re.findall(r"^ *```", text, re.M)), f"{name}: an open block"
    return [one for one in found if not one.kind.startswith("{")]


def run(page: Page, folder: Path) -> None:
    """Run a page in an empty folder, and compare what it shows."""
    used: set[str] = set()
    names: dict[str, Any] = {"__name__": "__main__"}
    (folder / "bin").mkdir()
    (folder / "here").mkdir()
    line = warm_python.command("-W", "error", "-m", "shardio", kind="shardio")
    _program(folder / "bin" / "shardio", line)
    before = os.getcwd()
    os.chdir(folder / "here")
    ranges.close()  # its helper has the environment of what read a store before
    try:
        with contextlib.ExitStack() as stack:
            if context := page.prepare():
                stack.enter_context(context)
            names.update(page.given())
            _run(page, names, used)
            page.check(names)
    finally:
        names.clear()  # loaders end their workers
        gc.collect()
        ranges.close()
        os.chdir(before)
    wanted = {*page.unrun, *(long for long, _ in page.smaller)}
    assert not wanted - used, f"{page.name} does not have {wanted - used}"


def _run(page: Page, names: dict[str, Any], used: set[str]) -> None:
    found = [_made_small(block, page.smaller, used) for block in blocks(page.name)]
    for block, after in zip(found, [*found[1:], None], strict=True):
        text = block.text
        skipped = {words for words in page.unrun if words in text}
        used |= skipped
        if block.kind == "console":
            _console(block, skipped)
        elif block.kind == "python" and not skipped:
            shown = after.text if after and after.kind == "text" and after.follows else None
            if file := re.match(r"# (\w+\.py)\n", text):
                Path(file[1]).write_text(text)
            else:
                _python(block, shown, names)
        else:
            assert skipped or block.kind in ("python", "text"), f"{block.place}: nothing runs it"


def _made_small(block: Block, pairs: Sequence[tuple[str, str]], used: set[str]) -> Block:
    text = block.text
    for long, short in pairs:
        if long in text:
            used.add(long)
            text = text.replace(long, short)
    return replace(block, text=text)


# ------------------------------------------------------------------------------------------ Python


def _python(block: Block, shown: str | None, names: dict[str, Any]) -> None:
    said = io.StringIO()
    code = "\n" * (block.line - 1) + _watched(block.text)
    printed: dict[int, list[str]] = {}
    names["_print"] = lambda line, *args, **more: _print(said, printed, line, *args, **more)
    with contextlib.redirect_stdout(said), warnings.catch_warnings():
        for message in ("This DataLoader will create", ".* skipped in epoch"):
            warnings.filterwarnings("ignore", message=message)
        try:
            exec(compile(code, str(ROOT / block.page), "exec"), names)
        except Exception as error:
            if not shown:
                raise
            said.write(f"{type(error).__name__}: {error}\n")
        else:
            ends = re.match(r"[A-Za-z.]+(Error|Exit)\b", shown.splitlines()[-1] if shown else "")
            assert not ends, f"{block.place}: ends without an error"
    if shown:
        compare(block.place, shown, said.getvalue())
    for number, words in _promises(block.text):
        line = block.line + number
        assert line in printed, f"{block.page}, line {line}: is not reached"
        compare(f"{block.page}, line {line}", words, printed[line][0])


def _promises(text: str) -> Iterator[tuple[int, str]]:
    assert not re.search(r"print\(\n[^)]*\n *\)  # ", text), "a print that promises, on one line"
    for number, line in enumerate(text.splitlines()):
        if found := re.match(r".*\bprint\(.*\)  # (.*)$", line):
            yield number, found[1]


def _watched(text: str) -> str:
    """Replace each print that says what it prints by one that is listened to."""
    lines = text.splitlines()
    for number, _ in _promises(text):
        place = "__import__('sys')._getframe().f_lineno"
        lines[number] = lines[number].replace("print(", f"_print({place}, ", 1)
    return "\n".join(lines) + "\n"


def _print(
    said: io.StringIO, printed: dict[int, list[str]], line: int, *args: Any, **more: Any
) -> None:
    one = io.StringIO()
    print(*args, **more, file=one)
    said.write(one.getvalue())
    printed.setdefault(line, []).append(one.getvalue())


# ----------------------------------------------------------------------------------------- console


def commands(text: str) -> list[tuple[str, str]]:
    """Split a console block into commands, each with the output that is shown."""
    found: list[tuple[str, str]] = []
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("$ "):
            while line.endswith("\\"):
                line += "\n" + next(lines)
            found.append((line[2:], ""))
        elif line.strip():
            assert found, f"output before a command: {line}"
            found[-1] = (found[-1][0], found[-1][1] + line + "\n")
    return found


def _program(path: Path, line: list[str]) -> None:
    path.write_text(f'#!/bin/sh\nexec {shlex.join(line)} "$@"\n')
    path.chmod(0o755)


def _console(block: Block, skipped: set[str]) -> None:
    programs = Path.cwd().parent / "bin"
    if re.search(r"\b(python|torchrun) ", block.text) and not (programs / "python").exists():
        warm_python.executable(programs)
        _program(programs / "torchrun", warm_python.command(*TORCHRUN))
    kept = [one for one in commands(block.text) if not any(words in one[0] for words in skipped)]
    script = "".join(f"{line}\nprintf '\\n\\001%d\\n' $?\n" for line, _ in kept)
    process = subprocess.Popen(
        ["bash", "-c", script],
        env=environment(
            PATH=f"{programs}{os.pathsep}{os.environ['PATH']}",
            PYTHON_EXEC=str(programs / "python"),  # of torchrun's ranks
            COLUMNS="100",
        ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=LIMIT_S)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    parts = re.findall(r"(.*?)\n\x01(\d+)\n", said, re.S)
    assert len(parts) == len(kept), f"{block.place}: {said}"
    for (line, shown), (output, code) in zip(kept, parts, strict=True):
        place = f"{block.place}: $ {line}"
        fails = re.search(r"^shardio: |error|damaged|left out", shown, re.I | re.M)
        assert code == "0" or fails, f"{place}: exit code {code}\n{output}"
        if shown:
            compare(place, shown, output)


# ---------------------------------------------------------------------------------------- comparing

# What differs between machines and runs: an amount with its unit, the hash in a file's name, the
# id of a version, a time.
VARIES = re.compile(
    r"\b[0-9a-f]{16}\b|\b\d{4}-\d\d-\d\dT[\d:]{8}Z"
    r"|[\d.,]*\d(?:%|\s?(?:[µmn]?s|min|h|[KMGT]?i?B)\b)(?:/s)?|[\d.,]+(?: \w+)?/s\b"
    r"|(?<=\d{5}-)[0-9a-f]{8}\b|(?<=\bsources-)[0-9a-f]{8}\b"
)


def compare(place: str, shown: str, said: str) -> None:
    """Fail unless what is shown is what was said."""
    pattern = r"\s+".join(
        ".*?".join(re.escape(VARIES.sub("#", part)) for part in word.split("..."))
        for word in _plain(shown).split()
    )
    if not re.fullmatch(pattern, _plain(said), re.S):
        raise AssertionError(f"{place}\n--- shown:\n{shown}\n--- said:\n{said}")


def _plain(text: str) -> str:
    """Return a text without what varies, and with one blank for many."""
    text = text.rpartition("\r")[2] if "\r" in text and "\n" not in text else text
    return " ".join(VARIES.sub("#", text).split())
