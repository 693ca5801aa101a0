"""`explain`, `tune` and `bench`: what training will be like, and which options to set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .command import BATCH_SIZE, OUT, PLOT, READ_FROM, WORKERS, WORLD_SIZE, Command, option
from .exit_codes import DONE
from .output import Output

if TYPE_CHECKING:
    from ..tuning.bench import Bench
    from ..tuning.tune_result import Tuning


def _explain(output: Output, *, world_size: int = 1, **call: Any) -> int:
    from ..order.options import Order
    from ..tuning.advice import advice_text
    from ..tuning.explain import explain

    cut = {name: call.pop(name) for name in ("spans", "unit", "nodes") if name in call}
    if cut:
        call["order"] = Order(**cut)
    found = explain(**call, world_size=world_size)
    brief = advice_text(found.warnings) if found.warnings else ""
    return output.show(found, facts=found.as_dict(), brief=brief)


def _tune(output: Output, *, plot: str | None = None, batch_size: int = 256, **call: Any) -> int:
    from ..tuning.tune import tune

    _check_plot(plot)
    with output.progress("simulating", unit=" orders", delay_s=2) as progress:
        found = tune(**call, batch_size=batch_size, progress=progress)
    return _answer(output, found, plot)


def _bench(output: Output, *, plot: str | None = None, **call: Any) -> int:
    from ..tuning.bench import bench

    _check_plot(plot)
    with output.progress("measuring", unit=" repeats") as progress:
        found = bench(**call, progress=progress)
    return _answer(output, found, plot)


def _check_plot(file: str | None) -> None:
    """Raise now for a picture that could not be drawn when all is measured."""
    if file is not None:
        from ..tuning.plot import check

        check(file)


def _answer(output: Output, found: Tuning | Bench, plot: str | None) -> int:
    """Show what was found, and draw it."""
    output.show(found, facts=found.as_dict(), brief=found.call)
    if plot is not None:  # last: a file that cannot be written costs no answer
        from ..tuning.plot import save

        save(found, plot)
    return DONE


_DATASET = option("dataset", "OUT", "the packed directory, or its URL")

EXPLAIN = Command(
    "explain",
    "say what training with these options will be like",
    _explain,
    "tuning.explain:explain dataset.shard_dataset:ShardDataset order.options:Order "
    "storage.options:Storage",
    _DATASET,
    BATCH_SIZE,
    WORKERS,
    WORLD_SIZE,
    option("--local-world-size", "N"),
    option("--shuffle-buffer", "BUFFER"),
    option("--unit", "N"),
    option("--tail", "TAIL", "pad (default), drop or exact"),
    option("--spans", "N"),
    option("--nodes", "N"),
    *READ_FROM,
    examples=(
        "shardio explain packed --batch-size 256 --workers 8",
        "shardio explain packed --batch-size 256 --world-size 4 --shuffle-buffer 1GiB",
    ),
)

TUNE = Command(
    "tune",
    "say which shuffle buffer to set, by simulating the order",
    _tune,
    "tuning.tune:tune storage.options:Storage",
    _DATASET,
    option("--batch-size", "N", "of each rank (default 256)"),
    WORKERS,
    WORLD_SIZE,
    option("--memory", "SIZE"),
    option("--units"),
    option("--nodes", "N"),
    PLOT,
    *READ_FROM,
    examples=(
        "shardio tune packed",
        "shardio tune packed --batch-size 128 --world-size 4 --plot tuning.svg",
    ),
)

BENCH = Command(
    "bench",
    "measure what this machine can do with a dataset",
    _bench,
    "tuning.bench:bench storage.options:Storage",
    OUT,
    option("--batch-size", "N", "records a batch (default 256)"),
    option("--size", "N"),
    option("--workers", "N,N,..."),
    option("--threads", "N,N,..."),
    option("--loader", choices=("both", "dataloader", "shardloader")),
    option("--seconds", "S"),
    option("--quick"),
    PLOT,
    *READ_FROM,
    examples=(
        "shardio bench packed",
        "shardio bench packed --quick --size 160 --workers 0,4",
        "shardio bench packed --plot bench.html",
    ),
    forks=True,
)
