"""Benchmarks: without a name they are listed; NAME runs one, `report` prints what is stored."""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

from . import cold, compare, gpu, idle, remote, report
from .data import DEFAULT, Data
from .harness import RESULTS, RIVALS, BenchmarkError, Deadline, NotHere, Result, show

NAMES = (
    "cold",
    "remote",
    "raw",
    "train",
    "compare",
    "loader",
    "pixels",
    "encoded",
    "transport",
    "resident_rows",
    "slow_samples",
    "pack",
    "archives",
    "growing",
    "plan",
    "lmdb",
    "formats",
    "startup",
    "listing",
    "manifest",
    "scale",
    "spans",
    "cluster",
    "order",
    "shuffle",
    "workers",
    "meter",
    "view",
    "gpu",
    "gpu_decode",
    "cores",
    "idle",
    "tutorial",
    "coming_from",
    "damage",
)  # the most important first
PARTS = {  # of --only
    "compare": compare.PARTS,
    "cold": cold.PARTS,
    "remote": remote.PARTS,
    "gpu": tuple(gpu.PARTS),
    "idle": idle.PARTS,
}
ON_A_GPU = ("gpu", "gpu_decode")  # they take --device
IN_TIME = (*ON_A_GPU, "cores")  # they take --within
AGAINST = "against"  # takes a commit, and is not among `all`


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", nargs="?", choices=(*NAMES, AGAINST, "all", "report"))
    parser.add_argument(
        "of", nargs="?", help="for report: this one's tables alone; for against: the other commit"
    )
    parser.add_argument("--quick", action="store_true", help="small data: does it run?")
    parser.add_argument(
        "--data", type=Path, default=DEFAULT, help="folder of the two archives (see data.py)"
    )
    parser.add_argument("--out", type=Path, help="file of the result; default: benchmarks/results")
    parser.add_argument("--scratch", type=Path, help="where to unpack; up to 20 GB, removed again")
    parser.add_argument(
        "--only", choices=[part for parts in PARTS.values() for part in parts], help="this part"
    )
    parser.add_argument(
        "--without-rivals", action="store_true", help="leave out what setup_rivals installs"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda",
        help="of the gpu benchmarks; cpu: a rehearsal without a GPU, which measures nothing",
    )  # fmt: skip
    parser.add_argument(
        "--within", type=float, metavar="SECONDS",
        help="stop by itself, the most telling rows first; needs --out, where each row is kept",
    )  # fmt: skip
    parser.add_argument(
        "--rows", nargs="+", default=[], metavar="NAME", help="for against: rows with this in them"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="for against; default: 11")
    options = parser.parse_args()
    deadline = None if options.within is None else Deadline(options.within)
    if options.name is None:
        for name in NAMES:
            print(f"{name:16}{_describe(name)}")
        print(f"{AGAINST:16}{_describe(AGAINST)}")
        print(f"{'all':16}All of these, one after another.")
        print(f"{'report':16}The stored results as tables in Markdown.")
        return 0
    if options.name == "report":
        if options.of not in (None, *NAMES, *report.GATHERED, AGAINST):
            parser.error(f"report: no benchmark is called {options.of!r}")
        print(report.markdown([options.of] if options.of else [*NAMES, *report.GATHERED]))
        return 0
    parts = PARTS.get(options.name, ())
    if options.only and options.only not in parts:
        parser.error(f"--only {options.only}: {options.name} has no such part")
    if (options.name == AGAINST) != bool(options.of):
        parser.error("against takes a commit, `against main~5`, and it alone does")
    if (options.rows or options.rounds) and options.name != AGAINST:
        parser.error("--rows and --rounds are for against")
    if options.device == "cpu" and options.name not in ON_A_GPU:
        parser.error(f"--device is for {', '.join(ON_A_GPU)}")
    if deadline and (options.name not in IN_TIME or not options.out):
        parser.error(f"--within is for {', '.join(IN_TIME)}, and needs --out")
    names = NAMES if options.name == "all" else (options.name,)
    if options.out and len(names) > 1:
        parser.error("--out is one file; `all` stores each result in benchmarks/results")
    failed = False
    for name in names:
        try:
            _run(name, options, deadline)
        except BenchmarkError as error:
            show(f"benchmarks {name}: {error}")
            failed |= len(names) == 1 or not isinstance(error, NotHere)
        except Exception:  # the others of `all` shall run unattended
            traceback.print_exc()
            failed = True
    return int(failed)


def _run(name: str, options: argparse.Namespace, deadline: Deadline | None) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    kind = f".{options.only}" if options.only else ""
    rehearsal = options.device == "cpu"
    kind += ".rehearsal" if rehearsal else ".quick" if options.quick else ""
    out = options.out or RESULTS / f"{name}{kind}.json"
    if options.scratch:
        options.scratch.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="shardio-benchmark-", dir=options.scratch)).resolve()
    show(f"{name}: {_describe(name)}")
    try:
        quick = options.quick or rehearsal
        command = ["python", "-m", "benchmarks", *sys.argv[1:]]
        kept = (out, scratch) if deadline else None
        result = Result(name, command, quick, rehearsal, deadline, kept)
        environments = getattr(module, "ENVIRONMENTS", RIVALS)
        rivals = environments.exists() and not options.without_rivals
        if not rivals:
            result.note(
                "Rivals in an environment of their own (benchmarks/setup_rivals) were left out"
            )
        result.keep()  # so that what is known of the machine is there, whenever this one is ended
        source = Data(options.data.resolve(), scratch, quick, rivals)
        given = {"device": options.device} if name in ON_A_GPU else {}
        if name == AGAINST:
            module.run(source, result, options.of, options.rows, options.rounds)
        elif options.only:
            module.run(source, result, (options.only,), **given)
        else:
            module.run(source, result, **given)
        result.store(out, scratch)
        if out == RESULTS / f"{name}.json":  # it has all parts
            for part in report.stored_of(name)[1:]:
                part.unlink()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _describe(name: str) -> str:
    document = importlib.import_module(f"benchmarks.{name}").__doc__ or ""
    return document.partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
