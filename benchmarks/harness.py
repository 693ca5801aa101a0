"""What every benchmark shares: rounds that take turns, statistics, the machine, the stored result.

Each entry is a process of its own, started once and told to run one round at a time
(`EntryProcess`), so that rivals of other virtual environments take turns with all others, and no
entry inherits another's heap or page tables. While one runs, the others sleep on a pipe.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from . import own_home

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
RIVALS = ROOT / "benchmarks" / ".venv-rivals" / "bin" / "python"
PACKAGES = ("torch", "numpy", "lmdb", "msgpack", "xxhash", "pillow-simd", "pillow", "litdata")
RIVAL_PACKAGES = (
    *("litdata", "webdataset", "mosaicml-streaming", "tensorflow-cpu", "pyarrow", "lmdb"),
)


T = TypeVar("T")
START_S = 15.0  # processes that import torch and prepare: with less time, they are not started
BLOCK_S = 25.0  # these, and some rounds: what comes first has so much, whatever its share is


class BenchmarkError(Exception):
    """What the user can mend: printed without a traceback."""


class NotHere(BenchmarkError):
    """This machine lacks what is measured: `all` goes on without it, and has not failed."""


# --- time -----------------------------------------------------------------------------------------


class Deadline:
    """Hold when something has to be done. Without an end, there is always enough time.

    within: seconds from now. clock: shows seconds; it may run while the machine sleeps, or not.
    """

    def __init__(
        self, within: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock, self._ends = clock, clock() + within

    @property
    def given(self) -> bool:
        """Return True if there is an end."""
        return math.isfinite(self._ends)

    def left(self) -> float:
        """Return the seconds that are left; a negative number of them when the end has passed."""
        return self._ends - self._clock()

    def enough(self, seconds: float) -> bool:
        """Return True if so much time is left."""
        return self.left() >= seconds

    def part(self, share: float) -> Deadline:
        """Return the end of this share of what is left."""
        return Deadline(max(0.0, self.left()) * share, self._clock)

    def shares(
        self, weights: Mapping[T, float], least: float = 0.0
    ) -> Iterator[tuple[T, Deadline]]:
        """Yield each with the end of its share, by weight, of what those before it have left.

        least: seconds that each has at least, while there are so many.
        """
        names = list(weights)
        for i, name in enumerate(names):
            share = weights[name] / sum(weights[one] for one in names[i:])
            left = max(0.0, self.left())
            yield name, Deadline(max(share * left, min(least, left)), self._clock)

    def until(self, turns: Iterable[T]) -> Iterator[T]:
        """Yield turns until the end has come. The last one may pass it: for what others follow.

        Where the longest decided, one slow turn at the start would leave most of the time unused.
        """
        for turn in turns:
            if self.left() <= 0:
                return
            yield turn

    def each(self, turns: Iterable[T]) -> Iterator[T]:
        """Yield turns as long as there is time for one more that is as long as the longest."""
        longest = 0.0
        for turn in turns:
            if self.left() <= longest:
                return
            began = self._clock()
            yield turn
            longest = max(longest, self._clock() - began)


# --- rounds ---------------------------------------------------------------------------------------


class EntryProcess:
    """A process that has prepared `module:function(**options)` and runs a round when asked to.

    The function returns another, `round(**asked) -> dict`, which measures itself.
    """

    def __init__(
        self,
        function: str,
        *,
        python: str | Path = sys.executable,
        home: str = "",
        python_path: str | Path = ROOT,
        **options: Any,
    ) -> None:
        """python_path: the folder that holds the packages benchmarks and shardio.

        A process of this Python finds what this one finds, of another folder than its own, too.
        """
        self.function = function
        ours = os.environ.get("PYTHONPATH", "") if str(python) == sys.executable else ""
        paths = os.pathsep.join(filter(None, (str(python_path), ours)))
        environment = dict(os.environ, PYTHONPATH=paths)
        self._home = contextlib.ExitStack()
        if home or str(python) != sys.executable:  # a program of others
            home = home or self._home.enter_context(tempfile.TemporaryDirectory(prefix="home-"))
            environment |= own_home.variables(home)
        self._process = subprocess.Popen(
            [str(python), "-m", "benchmarks.entry_process", function, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=python_path,
            text=True,
        )

    def round(self, **asked: Any) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        try:
            print(json.dumps(asked), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            raise BenchmarkError(f"{self.function} ended with code {code}; its error is above")
        measured: dict[str, Any] = json.loads(line)
        return measured

    def ready(self) -> None:
        """Wait until it has prepared, so that no round's time has that in it."""
        self.round(ready=True)

    def end(self) -> None:
        """Ask it to end, without waiting."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it was killed before it read what it was asked
            self._process.stdin.close()

    def close(self) -> None:
        assert self._process.stdout
        self.end()
        self._process.wait()
        self._process.stdout.close()
        self._home.close()

    def __enter__(self) -> EntryProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def ending(processes: Mapping[str, EntryProcess]) -> Iterator[None]:
    """Wait until all have prepared, and end those that are left at the end: all at a time."""
    try:
        for one in processes.values():
            one.ready()
        yield
    finally:
        for one in processes.values():
            one.end()
        for one in processes.values():
            one.close()


def add_facts(measured: dict[str, list[dict[str, Any]]], facts: dict[str, dict[str, Any]]) -> None:
    """Put what was found of each entry once into all of its rounds."""
    for name, rounds in measured.items():
        for one in rounds:
            one |= facts[name]


def interleave(
    processes: Mapping[str, Callable[[], dict[str, Any]]],
    rounds: int,
    deadline: Deadline | None = None,
    keep: Callable[[dict[str, list[dict[str, Any]]]], object] = lambda measured: None,
) -> dict[str, list[dict[str, Any]]]:
    """Each entry's rounds; all run once in each round, and each begins as often as another.

    deadline: the last entries of the last round, or of the only one, are left out in time. Those
    without a round are not in what is returned. keep: is given what is there, after each.
    """
    measured: dict[str, list[dict[str, Any]]] = {}
    names = list(processes)
    turns = (
        (i, name)
        for i in range(rounds if names else 0)
        for name in names[i % len(names) :] + names[: i % len(names)]
    )
    for i, name in (deadline or Deadline()).each(turns):
        measured.setdefault(name, []).append(processes[name]())
        show(f"  round {i + 1}/{rounds} {name}: {_brief(measured[name][-1])}")
        keep(measured)
    return measured


def contest(
    processes: dict[str, EntryProcess], rounds: int, *, warm_up: bool = True
) -> dict[str, list[dict[str, Any]]]:
    """`interleave` of processes, which are closed at the end. The warm-up round is not counted."""
    try:
        if warm_up:
            for name, one in processes.items():
                show(f"  warm-up {name}: {_brief(one.round())}")
        return interleave({name: one.round for name, one in processes.items()}, rounds)
    finally:
        for one in processes.values():
            one.close()


def _brief(measured: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:.4g}" for key, value in measured.items() if isinstance(value, (int, float))
    )


# --- results --------------------------------------------------------------------------------------


FOLDERS = ("--data", "--scratch")  # options whose folder is this machine's, and is not stored


class Result:
    """What one benchmark found: measurements, the tables shown, and the targets, met or not."""

    def __init__(
        self, name: str, command: Sequence[str], quick: bool, rehearsal: bool = False,
        deadline: Deadline | None = None, kept: tuple[Path, Path] | None = None,
    ) -> None:  # fmt: skip
        """rehearsal: it ran where it can measure nothing, to see whether it runs.

        deadline: when it has to be done. kept: the file and the scratch folder of `keep`.
        """
        self.deadline = deadline or Deadline()
        self._kept, self._show = kept, show
        self.facts: dict[str, Any] = {
            "benchmark": name,
            "command": shlex.join(
                "DIR" if before in FOLDERS else part
                for before, part in zip(("", *command), command, strict=False)
            ),
            "quick": quick,
            "rehearsal": rehearsal,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "versions": versions(),
            "data": {},
            "tables": [],
            "targets": [],
            "notes": [],
            "raw": {},
        }
        self._load = Load()
        if rehearsal:
            self.note("This was a rehearsal: its numbers say that it runs, and nothing else")

    def data(self, **facts: Any) -> None:
        self.facts["data"] |= facts

    def note(self, text: str) -> None:
        """Once, however often it is said."""
        if text not in self.facts["notes"]:
            self.facts["notes"].append(text)
            self._show(f"note: {text}")

    def left_out(self, where: str, names: Sequence[str]) -> None:
        """Note what has no round, since the time was over."""
        if names:
            self.note(f"{where}: the time was over before {', '.join(names)} had a round")

    def raw(self, name: str, measured: Any) -> None:
        """Every single measurement, as it came."""
        self.facts["raw"][name] = measured

    def table(
        self, title: str, measured: dict[str, list[dict[str, Any]]], columns: dict[str, str],
        *, versus: str = "", by: str = "",
    ) -> None:  # fmt: skip
        """A row for each entry: statistics of these keys of its rounds (key: heading).

        versus, by: a last column, each one's median of `by` over that of the entry `versus`.
        Keys that an entry did not measure stay empty.
        """
        rows = []
        for name, rounds in measured.items():
            row: dict[str, Any] = {"name": name, "rounds": len(rounds)}
            for key in columns:
                values = [one[key] for one in rounds if one.get(key) is not None]
                row[key] = statistics_of(values) if values else None
            rows.append(row)
        if by:
            base = next((row[by] for row in rows if row["name"] == versus), None)
            for row in rows:
                row["ratio"] = row[by]["median"] / base["median"] if row[by] and base else None
        table = {"title": title, "columns": columns, "versus": versus, "rows": rows}
        self.facts["tables"].append(table)
        self._show("\n" + as_text(table))

    def target(self, what: str, found: float | None, limit: float, *, unit: str = "x") -> None:
        """`limit` is the most allowed; a negative one, the least (its absolute value)."""
        met = None if found is None else (found <= limit if limit >= 0 else found >= -limit)
        if self.facts["rehearsal"]:
            met = None
        self.facts["targets"].append(
            {"what": what, "found": found, "limit": limit, "unit": unit, "met": met}
        )
        self._show(target_line(self.facts["targets"][-1]))

    def keep(self, report: Callable[..., object] = lambda: None, *measured: Any) -> None:
        """Store what is there, should this process be killed. Without a deadline, nothing is kept.

        report: makes tables, targets and notes of what is measured, which are made anew later.
        """
        if self._kept is None:
            return
        lists = [self.facts[name] for name in ("tables", "targets", "notes")]
        lengths, self._show = [len(one) for one in lists], lambda text: None
        report(*measured)
        self._write(*self._kept)
        self._show = show
        for one, length in zip(lists, lengths, strict=True):
            del one[length:]

    def store(self, out: Path, scratch: Path) -> None:
        self._write(out, scratch)
        unmet = [t for t in self.facts["targets"] if not t["met"]]
        show(f"\n{len(self.facts['targets']) - len(unmet)} of {len(self.facts['targets'])} targets")
        for target in unmet:
            show(target_line(target))
        others = self.facts["load"]["other_cpu_share"]
        show(f"other processes used {others:.0%} of the CPUs; stored in {out}")

    def _write(self, out: Path, scratch: Path) -> None:
        self.facts["machine"] = machine() | {"device": device(scratch)}
        self.facts["load"] = self._load.found()
        write_json(out, self.facts)


def write_json(out: Path, found: Any) -> None:
    """Write a file that is there whole, or as it was before, whenever this process is killed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f".{out.name}")
    beside.write_text(json.dumps(found, indent=1) + "\n")
    beside.replace(out)


def statistics_of(values: Iterable[float]) -> dict[str, float]:
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def median(rounds: Sequence[dict[str, Any]], key: str) -> float:
    return float(statistics.median(one[key] for one in rounds))


def ratio(
    measured: dict[str, list[dict[str, Any]]], one: str, other: str, key: str
) -> float | None:
    """Median over median; None when either did not take part."""
    if not measured.get(one) or not measured.get(other):
        return None
    return median(measured[one], key) / median(measured[other], key)


def number(value: float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) or value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"


def as_text(table: dict[str, Any]) -> str:
    lines = table_lines(table, spread=True)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [table["title"]]
    for line in lines:
        cells = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        text.append("  " + "  ".join((line[0].ljust(widths[0]), *cells)))
    return "\n".join(text)


def table_lines(table: dict[str, Any], *, spread: bool) -> list[list[str]]:
    """The table's cells, its heading first. spread: least and most behind each median."""
    last = [f"x {table['versus']}"] if table["versus"] else []
    lines = [["", *table["columns"].values(), *last]]
    for row in table["rows"]:
        cells = [row["name"]]
        for key in table["columns"]:
            found = row[key]
            cell = number(found and found["median"])
            bounds = (number(found["min"]), number(found["max"])) if found else (cell, cell)
            if spread and bounds != (cell, cell):
                cell += f" ({bounds[0]}-{bounds[1]})"
            cells.append(cell)
        lines.append([*cells, *([number(row["ratio"])] if last else [])])
    return lines


def target_line(target: dict[str, Any]) -> str:
    verdict = {True: "met", False: "NOT MET", None: "not measured"}[target["met"]]
    limit = f"{'at least' if target['limit'] < 0 else 'at most'} {number(abs(target['limit']))}"
    return f"{verdict:>12}  {target['what']}: {number(target['found'])}, {limit} {target['unit']}"


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- the machine ----------------------------------------------------------------------------------


class Load:
    """What else ran on the machine meanwhile: load averages, and the CPU time that was not ours."""

    def __init__(self) -> None:
        self._before, self._began = os.getloadavg(), time.monotonic()
        self._busy, self._ours = _busy_seconds(), cpu_seconds()

    def found(self) -> dict[str, Any]:
        seconds = time.monotonic() - self._began
        others = _busy_seconds() - self._busy - (cpu_seconds() - self._ours)
        return {
            "loadavg_before": self._before,
            "loadavg_after": os.getloadavg(),
            "seconds": seconds,
            "other_cpu_share": max(0.0, others / seconds / (os.cpu_count() or 1)),
        }


def _busy_seconds() -> float:
    """CPU seconds of all processes and the kernel since the start; 0 where it is not told."""
    try:
        first = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, first)
    ticks = user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """CPU time of this process and of all its descendants that were waited for."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    used = [resource.getrusage(kind) for kind in kinds]
    return sum(one.ru_utime + one.ru_stime for one in used)


def machine() -> dict[str, Any]:
    cpu = [line for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = [line for line in _lines("/proc/meminfo") if line.startswith("MemTotal")]
    return {
        "cpu": cpu[0].partition(":")[2].strip() if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "ram_gib": round(int(memory[0].split()[1]) / 2**20, 1) if memory else None,
        "kernel": platform.release(),
        "system": platform.system(),
    }


def device(path: str | Path) -> dict[str, Any]:
    """The block device a path lies on, and what shapes its requests; {} where there is none."""
    number = os.stat(path).st_dev
    block = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not block.exists():
        return {}
    mounts = (line.split() for line in _lines("/proc/self/mountinfo"))
    wanted = f"{os.major(number)}:{os.minor(number)}"
    queue = block / "queue" if (block / "queue").exists() else block.resolve().parent / "queue"
    found: dict[str, Any] = {
        "name": block.resolve().name,
        "file_system": next((m[m.index("-") + 1] for m in mounts if m[2] == wanted), None),
    }
    for name in ("read_ahead_kb", "max_sectors_kb", "rotational", "scheduler"):
        lines = _lines(queue / name)
        found[name] = lines[0].strip() if lines else None
    return found


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    try:
        from shardio import __version__

        found["shardio"] = __version__
    except ImportError:
        pass
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    found["commit"] = commit.stdout.strip() or None
    return found | {name: version for name, version in rival_versions().items() if version}


def rival_versions() -> dict[str, str | None]:
    """What the rivals' environment has of RIVAL_PACKAGES."""
    script = (
        "import json, sys; from importlib import metadata as m\n"
        "there = {d.metadata['Name'].lower().replace('_', '-'): d.version "
        "for d in m.distributions()}\n"
        "print(json.dumps({name: there.get(name) for name in sys.argv[1:]}))"
    )
    if not RIVALS.exists():
        return {}
    command = [str(RIVALS), "-c", script, *RIVAL_PACKAGES]
    asked = subprocess.run(command, capture_output=True, text=True)
    found: dict[str, str | None] = json.loads(asked.stdout) if asked.returncode == 0 else {}
    return found


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
