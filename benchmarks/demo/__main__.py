"""The command `tools/demo`, declared as the commands of `shardio` are."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from shardio import DependencyError, StorageError
from shardio.cli import main
from shardio.cli.command import Command, option
from shardio.cli.output import Output
from shardio.cli.parser import Parser
from shardio.errors import printable
from shardio.tuning.plot import check, save


def run(output: Output, *, out: str | None = None, plot: str | None = None, **call: Any) -> int:
    """Show the demo, and draw its picture. Return the exit code."""
    from .poster import draw
    from .show import demo

    refused = ""
    picture = plot or "shardio-demo.png"
    try:
        check(picture)
    except DependencyError as error:
        if plot is not None:
            raise
        refused = str(error)
    silent = output.json or output.quiet
    found = demo(
        **call, out=out, say=None if silent else lambda text: print(f"{text}\n", flush=True)
    )
    if not refused:
        try:
            save(found, picture, draw)
        except StorageError as error:
            if plot is not None:
                raise
            refused = f"{error}; --plot FILE draws the picture elsewhere"
    where = refused or f"The picture of it: {printable(picture, 4096)}"
    return output.show(
        f"{where}\n{found.next_steps(out)}",
        facts=found.as_dict() | {"picture": None if refused else picture},
    )


DEMO = Command(
    "demo",
    "show in a minute what shards gain over a folder of images",
    run,
    "",
    option("folder", "FOLDER", "images, only read; default: some that are made", nargs="?"),
    option(
        "--out",
        "DIR",
        "keep the shards here, of all images; else a sample of a large folder is packed",
    ),
    option("--batch-size", "N", "images in a batch; default 64"),
    option("--workers", "N", "processes of each loader; default: one a core, 8 at most"),
    option("--size", "N", "pixels of the crops; default 224, and of small images less"),
    option(
        "--seconds",
        "S",
        "the most that a pass takes; default 6. The rest of its images is not read",
    ),
    option("--plot", "FILE", "the picture (default shardio-demo.png); replaces FILE"),
    examples=(
        "tools/demo",
        "tools/demo photos --seconds 3",
    ),
    forks=True,
)


def parse(arguments: Sequence[str]) -> tuple[Command, dict[str, Any]]:
    """Read the command line of the demo, and exit for a wrong one."""
    parser = Parser(prog="tools/demo", command=DEMO)
    DEMO.declare(parser)
    options, rest = parser.parse_known_args(arguments)
    if rest:
        parser.refuse(rest[0])
    return DEMO, vars(options)


if __name__ == "__main__":
    sys.exit(main.main(parse=parse))
