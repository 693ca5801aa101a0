"""tools/trust: attack what shardio promises for some minutes, and print a table of what came of it.

    tools/trust --minutes 15                     all sections, by turns, or less: until all is done
    tools/trust --minutes 5 --only damage,crash
    tools/trust --seed 7 --case damage:1234      one case again

Ctrl-C prints the table of what was done until then. Exit code 1: something failed.
"""

import argparse
import contextlib
import json
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from support.ground import Ground

from shardio import __version__
from trust.sections import SECTIONS, section, share

HANG_S = 240.0  # that a case may take; none takes near as long
SLICE_S = 12.0  # of a turn, at least
SHOWN = 5  # failures of a section
ROOM = 2 << 30  # bytes in memory that all files together never need


@dataclass
class Tally:
    """What came of one section, in one lane or in all."""

    kinds: Counter[str] = field(default_factory=Counter)
    sums: Counter[str] = field(default_factory=Counter)
    most: dict[str, float] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    next: int = 0
    goal: int = 10**9  # cases

    @property
    def cases(self) -> int:
        return self.kinds.total()

    @property
    def figures(self) -> dict[str, float]:
        return {**self.sums, **self.most}

    def add(self, other: "Tally") -> "Tally":
        self.kinds.update(other.kinds)
        self.sums.update(other.sums)
        self.measure(other.most)
        self.failures += other.failures
        self.seconds += other.seconds
        self.goal = min(self.goal, other.goal)
        return self

    def measure(self, most: dict[str, float]) -> None:
        for name, value in most.items():
            self.most[name] = max(value, self.most.get(name, value))


class Child:
    """A section's process; a new one takes the place of one that died or hung.

    first, step: the numbers of its cases; others have those between.
    """

    def __init__(self, name: str, seed: int, folder: Path, first: int, step: int) -> None:
        self.name, self.seed, self.tally = name, seed, Tally(next=first)
        self.first, self.step, self.interrupted = first, step, False
        self.folder = folder / f"{name}-{first % step}"
        self.folder.mkdir()
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""

    def is_done(self, count: int) -> bool:
        """Tell whether it did all, or `count` cases with those of others."""
        most = min(count, self.tally.goal)
        return self.tally.next >= (self.first // self.step) * self.step + most

    def go(self, seconds: float, count: int) -> None:
        """Let it do cases for so long, and `count` at most, with those of others."""
        begun = time.monotonic()
        while (left := begun + seconds - time.monotonic()) > 0 and not self.interrupted:
            runs = self._process is not None or self._start()
            if not runs or self.interrupted or self.is_done(count):
                break
            assert self._process and self._process.stdin
            number, most = self.tally.next, min(count, self.tally.goal)
            cases = -(-(self.first // self.step * self.step + most - number) // self.step)
            words = f"go {left} {cases} {number} {self.step}\n"
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(words.encode())
                self._process.stdin.flush()
            while (said := self._answer()) and "stopped" not in said:
                self._add(said)
            if said:
                self._add(said)
                self.tally.next = said["stopped"]
                break
            if not self.interrupted:
                self.tally.next = self._died() + self.step
        self.tally.seconds += time.monotonic() - begun

    def _start(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            for path in self.folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._rest = b""
        words = [sys.executable, "-m", "trust.child", self.name, f"{self.seed}", self.folder]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        if said := self._answer():
            self.tally.goal = said["goal"]
            return True
        if not self.interrupted:
            self._died("prepare")
            self.tally.goal = 0  # it is not tried again
        return False

    def _answer(self) -> dict[str, Any] | None:
        """Return its next line; None where it died or hangs."""
        assert self._process and self._process.stdout
        until = time.monotonic() + HANG_S
        while b"\n" not in self._rest:
            left = max(0.0, until - time.monotonic())
            if not select.select([self._process.stdout], [], [], left)[0]:
                self._rest = b"hung"
                return None
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                self._rest = b""
                return None
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _add(self, said: dict[str, Any]) -> None:
        self.tally.kinds.update(said["kinds"])
        self.tally.failures += said["failures"]
        self.tally.sums.update(said["sums"])
        self.tally.measure(said.get("most", {}))

    def _died(self, when: str = "") -> int:
        """Note that it died or hung; return the case that it was at."""
        hung = self._rest == b"hung"
        code = self.end(kill=True)
        with contextlib.suppress(OSError, ValueError):
            number = int((self.folder / "at").read_text())
            when = when or f"case {number}"
        number = self.tally.next if when == "prepare" else number
        how = f"did not end in {HANG_S:.0f} s" if hung else f"ended its process with {code}"
        log = (self.folder / "log").read_text(errors="replace")[-4000:]
        self.tally.kinds["failed"] += 1
        self.tally.failures.append({"case": number, "error": f"{when} {how}", "text": log})
        return number

    def interrupt(self) -> None:
        """Kill it, from another thread; what it did until then stays counted."""
        self.interrupted = True
        if (process := self._process) is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def end(self, kill: bool = False) -> int:
        """End it, and all that it started where it is killed; its exit code."""
        if self._process is None:
            return 0
        process, self._process = self._process, None
        assert process.stdin and process.stdout
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        if kill:
            code = process.poll()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        else:
            code = process.wait()
        process.stdout.close()
        return -signal.SIGKILL if code is None else code


# ------------------------------------------------------------------------------------------ the run


def run(names: list[str], seconds: float, count: int, seed: int, lanes: int) -> dict[str, Tally]:
    """Attack by turns, until all is done, the time is over, or Ctrl-C.

    count: cases of a section at most. lanes: processes at once, each with cases of every section.
    """
    until = time.monotonic() + seconds
    with temporary_folder() as folder:
        each = [
            [Child(name, seed, folder, lane, lanes) for name in names[lane:] + names[:lane]]
            for lane in range(lanes)
        ]
        with ThreadPoolExecutor(lanes) as threads:
            try:
                for one in [threads.submit(_lane, one, until, count, each) for one in each]:
                    one.result()
            except KeyboardInterrupt:
                _say("interrupted")
                for child in chain(*each):
                    child.interrupt()
        for child in chain(*each):
            child.end(kill=True)
    return _counts(names, each)


def _lane(children: list[Child], until: float, count: int, each: list[list[Child]]) -> None:
    """Give each section its share of the time, by turns; those that are done leave it to others."""
    seconds = until - time.monotonic()
    turns = max(1, min(8, int(seconds / sum(share(one.name) for one in children) / SLICE_S)))
    turn = 0
    while until > time.monotonic() and not all(
        one.interrupted or one.is_done(count) for one in children
    ):
        turn += 1
        for at, child in enumerate(children):
            if child.interrupted or time.monotonic() > until:
                break
            if child.is_done(count):
                continue
            shares = sum(share(one.name) for one in children if not one.is_done(count))
            later = sum(share(one.name) for one in children[at:] if not one.is_done(count))
            left = until - time.monotonic()
            tallies = _counts([one.name for one in children], each).values()
            _say(
                f"{child.name}: turn {turn}, {sum(one.cases for one in tallies):,} cases, "
                f"{sum(len(one.failures) for one in tallies)} failed"
            )
            own = left * share(child.name) / (later + shares * max(0, turns - turn))
            child.go(max(0.1, own), count)
    for child in children:
        child.end()


def _counts(names: list[str], each: list[list[Child]]) -> dict[str, Tally]:
    """Return what came of each section in all lanes together."""
    found = {name: Tally() for name in names}
    for child in chain(*each):
        found[child.name].add(child.tally)
    return found


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder in memory, if there is room, else where temporary files are."""
    memory = Path("/dev/shm")
    roomy = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > ROOM
    with tempfile.TemporaryDirectory(prefix="trust-", dir=memory if roomy else None) as folder:
        yield Path(folder)


def _say(text: str) -> None:
    print(f"trust: {text}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------- the table


def table(tallies: dict[str, Tally]) -> str:
    """Return the table as text, a row for each section."""
    rows = [("section", "promise", "what was done", "cases", "failures")]
    for name, tally in tallies.items():
        kind = section(name)
        done = kind.done(tally.kinds, tally.figures) if tally.cases else "nothing"
        rows.append((name, kind.promise, done, f"{tally.cases:,}", f"{len(tally.failures)}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        " | ".join(
            one.rjust(width) if at > 2 and row is not rows[0] else one.ljust(width)
            for at, (one, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def again(name: str, case: int, seed: int) -> str:
    """Return the command that repeats a case."""
    return f"tools/trust --seed {seed} --case {name}:{case}"


def failed(tallies: dict[str, Tally], seed: int) -> str:
    """Return what failed, with the commands that repeat it."""
    lines = []
    for name, tally in tallies.items():
        for one in tally.failures[:SHOWN]:
            lines += [f"FAILED {again(name, one['case'], seed)}", *_indented(one["text"])]
        if len(tally.failures) > SHOWN:
            lines.append(f"... and {len(tally.failures) - SHOWN} more of {name}")
    return "\n".join(lines)


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.rstrip().splitlines()[-12:]]


def as_json(tallies: dict[str, Tally], seed: int, seconds: float) -> dict[str, Any]:
    """Return all that is known of a run."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    ).stdout.strip()
    return {
        "command": "tools/trust",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "shardio": __version__,
        "commit": commit,
        "python": platform.python_version(),
        "seed": seed,
        "seconds": round(seconds),
        "sections": {
            name: {
                "promise": section(name).promise,
                "done": section(name).done(tally.kinds, tally.figures) if tally.cases else "",
                "cases": tally.cases,
                "goal": tally.goal,
                "seconds": round(tally.seconds),
                "kinds": dict(sorted(tally.kinds.items())),
                "figures": tally.figures,
                "failures": [
                    {**one, "again": again(name, one["case"], seed)} for one in tally.failures
                ],
            }
            for name, tally in tallies.items()
        },
    }


def parse(words: list[str] | None) -> argparse.Namespace:
    """Read the arguments."""
    parser = argparse.ArgumentParser(
        prog="tools/trust", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="at most; default 5")
    processes = (os.cpu_count() or 1) + 1  # some cases wait
    parser.add_argument(
        "--jobs", type=int, default=processes, help="cases at once; default: one more than CPUs"
    )
    parser.add_argument("--seed", type=int, help="of all that is drawn; default: another each time")
    parser.add_argument("--only", help=f"sections, by commas: {', '.join(SECTIONS)}")
    parser.add_argument("--cases", type=int, default=10**9, help="of each section, at most")
    parser.add_argument("--case", help="SECTION:NUMBER: repeat this one (needs --seed)")
    parser.add_argument("--json", type=Path, help="a file that gets all counts and failures")
    given = parser.parse_args(words)
    given.names = given.only.split(",") if given.only else [*SECTIONS]
    given.first = 0
    if given.case:
        name, _, number = given.case.partition(":")
        if given.seed is None or not number.isdecimal():
            parser.error("--case SECTION:NUMBER needs the --seed of that run")
        given.names, given.first, given.cases = [name], int(number), 1
    for name in given.names:
        if name not in SECTIONS:
            parser.error(f"there is no section {name!r}; there are {', '.join(SECTIONS)}")
    if given.seed is None:
        given.seed = int.from_bytes(os.urandom(3), "little")
    return given


def main(words: list[str] | None = None) -> int:
    given = parse(words)
    ground, begun = Ground(), time.monotonic()
    ground.begin()
    try:
        if given.case:
            tallies = one_case(given.names[0], given.first, given.seed)
        else:
            _say(f"seed {given.seed}, {given.minutes:g} minutes")
            tallies = run(
                given.names, given.minutes * 60, given.cases, given.seed, max(1, given.jobs)
            )
    finally:
        # Shared memory is everybody's: workers.py looks for its own.
        left = [one for one in ground.end(0) if "shared memory" not in one]
    seconds = time.monotonic() - begun
    print(table(tallies))
    print(f"seed {given.seed}, {seconds / 60:.1f} minutes, shardio {__version__}")
    bad = any(one.failures for one in tallies.values()) or bool(left)
    if bad:
        print(failed(tallies, given.seed), *left, sep="\n")
    if given.json:
        found = as_json(tallies, given.seed, seconds) | {"left behind": left}
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(bad)


def one_case(name: str, number: int, seed: int) -> dict[str, Tally]:
    """Repeat one case."""
    with temporary_folder() as folder:
        child = Child(name, seed, folder, number, 1)
        try:
            child.go(HANG_S, 1)
            child.end()
        finally:
            child.end(kill=True)
    return {name: child.tally}


if __name__ == "__main__":
    sys.exit(main())
