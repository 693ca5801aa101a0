"""Check shardio on a machine with an NVIDIA GPU, part by part, and write one page.

Needs a Python with a torch for CUDA. Nothing outside of the tree and of --out is changed.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import Deadline

from . import collect, environment, limited, page, parts

GPU = "import torch; raise SystemExit(not torch.cuda.is_available())"
PARTS = ", ".join(parts.PARTS)
ENDING_S = limited.GRACE_S + 5.0  # of a call's time: to end the last part, and to write the page


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["collect"]:
        return collect.main(arguments[1:])
    options = _parser().parse_args(arguments)
    deadline = Deadline(options.within - ENDING_S)
    if unknown := [name for name in options.parts if name not in (*parts.PARTS, "page")]:
        return _say(f"there is no part {unknown[0]!r}; there are {PARTS}, page")
    if options.wheels and not (options.wheels / "wheels").is_dir():
        return _say(f"{options.wheels} has no folder wheels: `tools/gpu-check collect` makes one")
    out: Path = options.out.resolve()
    (out / "results").mkdir(parents=True, exist_ok=True)
    names = [name for name in options.parts or parts.PARTS if name != "page"]
    if names:
        if why := _unfit(options.rehearse):
            return _say(why)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # the part is ended, too
        environment.WORK.mkdir(parents=True, exist_ok=True)
        with (environment.WORK / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return _say(f"another one runs in {environment.ROOT}: wait for it")
            failed = _run(names, options, out, deadline)
    else:
        failed = False
    page.write(out)
    print(f"gpu-check: {out / 'gpu-check.md'}", flush=True)
    return int(failed)


def _run(names: list[str], options: argparse.Namespace, out: Path, deadline: Deadline) -> bool:
    """Set up, and run the parts; the page is written anew after each, should this be the last.

    Each part has its share of the time, and what those before it have left.
    """
    log = out / "gpu-check.log"
    carried = options.wheels and options.wheels.resolve()
    data = options.data and options.data.resolve()
    if carried and not data and (carried / "data").is_dir():
        data = carried / "data"
    asked = parts.Options(data, out, options.rehearse, options.quick and not options.rehearse)
    mark = "REHEARSAL, on the CPU: " if options.rehearse else ""
    began = time.monotonic()
    print(f"gpu-check: {mark}environment ...", flush=True)
    env, facts = environment.prepare(carried, log)
    facts["seconds"] = round(time.monotonic() - began, 1)
    facts["rehearsal"] = options.rehearse
    parts.store(out / "results" / "environment.json", facts)
    print(f"gpu-check: core: {facts['core']['what']}", flush=True)
    statuses = []
    for name, its in deadline.shares({name: parts.PARTS[name].weight for name in names}):
        print(f"gpu-check: {mark}{name} ...", flush=True)
        found = parts.run(name, parts.PARTS[name], asked, env, log, its.left())
        statuses.append(found["status"])
        print(f"  {found['status']}, {found['seconds']:.0f} s. {found['why']}", flush=True)
        page.write(out)
    return any(one in (parts.FAILED, parts.OVER, parts.NOT_RUN) for one in statuses)


def _unfit(rehearse: bool) -> str:
    """Return what this machine lacks; "" if nothing."""
    if sys.platform != "linux":
        return f"needs Linux, and this is {sys.platform}"
    if importlib.util.find_spec("torch") is None:
        return f"needs a Python with torch, and {sys.executable} has none"
    if rehearse or subprocess.run([sys.executable, "-c", GPU], capture_output=True).returncode == 0:
        return ""
    return (
        f"needs an NVIDIA GPU and a torch for CUDA, and the torch of {sys.executable} finds none "
        "(--rehearse runs every part on the CPU, small)"
    )


def _say(why: str) -> int:
    print(f"gpu-check: {why}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/gpu-check",
        description=__doc__,
        epilog="`tools/gpu-check collect --help`: what to carry to a machine without a network",
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{PARTS}; default: all. page: only the page again"
    )
    parser.add_argument(
        "--wheels", type=Path, metavar="FOLDER", help="what `collect` filled; it is installed from"
    )
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER",
        help="the archives of photographs; default: those of --wheels, else the benchmarks' own",
    )  # fmt: skip
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gpu-check"),
        metavar="DIR",
        help="of the page; ./gpu-check",
    )
    parser.add_argument(
        "--within", type=float, default=math.inf, metavar="SECONDS",
        help="of the whole call: each part has a share, and does its most telling rows first",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="on the GPU, but small: does it run?")
    parser.add_argument(
        "--rehearse", action="store_true", help="without a GPU: all on the CPU, small"
    )
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("gpu-check: ended, with the part that ran")
