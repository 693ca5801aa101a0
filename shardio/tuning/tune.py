"""What shuffle buffer should I set? The order is simulated for a ladder of them, and one is named.

How it works. The order is arithmetic, so what a buffer does is known without reading an image: the
batches of an epoch are drawn by Epoch itself, for each buffer and unit, and compared with
those of a true uniform shuffle of the same labels. A row, one (buffer, unit), is as good as uniform
when it

    mixes     the mean of the distinct classes in a batch is that of a uniform shuffle. The test is
              two-sided, at SIGMAS standard deviations of that mean over 200 uniform shuffles: one
              row in a thousand that is uniform fails it by chance. A difference of TOLERATED
              passes whatever its significance. Without labels the tenth of the packing order that
              a record lies in stands for its class. Where nearly every batch of a uniform shuffle
              has as many classes as it can, a pack in class order could pass by having each class
              in equal parts: there the pairs of one class are compared as well, alike.
    renews    of the pairs of records in a batch, fewer than 5 % beyond chance shared a batch in the
              epoch before.

A buffer of all records is a uniform shuffle by definition, so it passes whatever its noise. And a
row costs nothing that anybody would notice when

    fits      its records take no more than the memory that is allowed (MEMORY, if nobody says)
    is cheap  a cold epoch takes no more than DEARER of the requests, and of the bytes, of the row
              with the fewest, by the arithmetic of fetch; or no more than ALL_RECORDS requests.

The default is recommended where it is all that; else "all", else the largest buffer that is: the
best mixing, not the least memory. Where none is, the least bad one is shown, and what would help.
The batches of an order are the same for any number of workers and ranks.

Up to WHOLE records whole epochs are simulated, and SAMPLED records of them are looked at. Of larger
datasets, REGIONS stretches of the epoch are reached by seeking; buffers above MOST are left out.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import ArrayLike

from ..dataset.buffering import choose_policy
from ..dataset.decode import Decoder
from ..dataset.reader import Reader
from ..dataset.sequence import ShardSequence
from ..errors import OptionError
from ..order.epoch import default_unit
from ..order.options import ALL_RECORDS, SHUFFLE_BUFFER, shuffled_whole, spans_of
from ..order.partition import Partition
from ..storage.options import Storage
from ..storage.stores import without_secrets
from ..units import check_int, check_size, grouped_in, quoted, refuse_options, show_size
from .cost import divisors
from .explain import open_dataset, ranks_of
from .simulate import WHOLE, Classes, Sample, Simulation, compact_labels, lie_in_runs, tenths
from .text import show_buffer
from .tune_result import AGAIN, Row, Tuning, Uniform, even_classes

if TYPE_CHECKING:
    from ..dataset.shard_dataset import ShardDataset

MEMORY: Final = 2 << 30  # bytes, unless the default takes more: 10,000 photographs take half of it
DEARER: Final = 1.05  # requests and bytes, of the fewest
MOST: Final = 500_000  # records in a buffer beyond WHOLE: 2 s for each (buffer, unit)

Choice = tuple[int | None, int]  # buffer (None: "all") and unit
Progress = Callable[[int, int], None]


@refuse_options("tune", grouped_in("storage", Storage))
def tune(
    dataset: ShardDataset | str | os.PathLike[str],
    *,
    batch_size: int | None = None,
    num_workers: int = 0,
    world_size: int | None = None,
    memory: int | str | None = None,
    units: bool = False,
    nodes: int | None = None,
    progress: Progress | None = None,
    storage: Storage | None = None,
) -> Tuning:
    """Say which shuffle buffer to set for batches of this size; mostly: none, keep the default.

    `print(shardio.tune(ds))`; `.call` is the dataset to make, or, of a subset, the options
    to change. By simulating the order; labels come from the index, and no record is read.

    dataset      a ShardDataset with a batch_size, of which `where` and `select` may have chosen
                 records; or the path of what `shardio pack` made
    batch_size   for a path. A ShardDataset has its own
    num_workers  of each rank's loader
    world_size   ranks; default: those of a ShardDataset's job, and 1 for a path
    memory       bytes, or "2GiB", that the records of a buffer may take on one machine; default:
                 2 GiB, or what the default of shuffle_buffer takes
    units        try other units too, not only where no buffer will do
    nodes        for a path: machines that keep to shards of their own, as Order has it
    progress     called with (done, total)
    storage      for a path: a shardio.Storage, as ShardDataset has it

    Raises OptionError; also NotPackedError, DamageError, VersionError, StorageError.
    """
    began = time.monotonic()
    given = {"batch_size": batch_size, "nodes": nodes}
    reader, stream = open_dataset("tune", dataset, storage, given)
    size = batch_size if stream is None else stream.batch_size
    if size is None:
        place = "" if stream is None else " to the dataset"
        raise OptionError(f"tune: give batch_size{place}; the answer is for batches")
    counts, labels = reader.counts, labels_of(reader)
    path = os.fspath(dataset) if isinstance(dataset, (str, os.PathLike)) else None
    options: dict[str, Any] = {} if nodes is None else {"nodes": nodes}
    if stream is not None:
        counts, options = stream.counts, {"seed": stream.seed}
        if stream.shuffle:
            options |= {"spans": stream.options.spans, "nodes": stream.options.nodes}
        if not stream.is_subset:
            path = stream.path
        elif labels is not None and stream.selection is not None:
            numbers, remaining = stream.selection.numbers, reader.remaining
            labels = labels[numbers if remaining is None else remaining.places(numbers)]
    found = recommend(
        counts,
        labels,
        batch_size=size,
        num_workers=num_workers,
        world_size=ranks_of(stream) if world_size is None else world_size,
        mean_bytes=reader.mean_bytes,
        is_network=reader.storage.is_network(),
        memory=memory,
        units=units,
        progress=progress,
        path=path,
        root=None if storage is None or storage.root is None else os.fspath(storage.root),
        **options,
    )
    return replace(found, seconds=time.monotonic() - began)


def labels_of(reader: Reader) -> Classes | None:
    """Return the labels of every record, (N,) integers; None where the dataset has none."""
    schema = reader.manifest.schema
    if dict(schema.fields).get("label") not in ("int", "bool"):
        return None
    decoder = Decoder(schema, decode=None)
    return ShardSequence(reader, decoder, range(reader.records)).columns("label")


def recommend(
    shard_records: ArrayLike,
    labels: Classes | None,
    *,
    batch_size: int,
    num_workers: int = 0,
    world_size: int = 1,
    mean_bytes: float,
    is_network: bool = False,
    memory: int | str | None = None,
    units: bool = False,
    seed: int = 0,
    spans: int | None = None,
    nodes: int = 1,
    progress: Progress | None = None,
    path: str | None = "out/",
    root: str | None = None,
) -> Tuning:
    """Simulate the orders of a dataset, judge each, and recommend one.

    shard_records  (shards,) records of each shard, in the manifest's order
    labels         (N,) integers in the same order (masked: a class of its own), or None
    mean_bytes     of a record
    is_network     the dataset lies on a network file system
    memory         bytes, or "2GiB", that the records of a buffer may take; default: 2 GiB, or what
                   the default of shuffle_buffer takes
    units          try other units too, not only where no buffer will do
    nodes          that keep to shards of their own
    progress       called with (done, total)
    path           of the dataset, for the call; None: the call is only what to change
    root           where its data lies, if elsewhere, for the call

    Raises OptionError.
    """
    counts = np.asarray(shard_records, np.int64)
    records = int(counts.sum())
    batch_size, nodes = check_int("batch_size", batch_size), check_int("nodes", nodes)
    usual_spans = spans_of(nodes, 1 if nodes == 1 else batch_size // default_unit(batch_size))
    spans = usual_spans if spans is None else check_int("spans", spans)
    if labels is not None and len(labels) != records:
        raise OptionError(f"labels: {len(labels):,} for {records:,} records; expected one for each")
    classes, kind = None if labels is None else compact_labels(labels), "label"
    if classes is None or not records or classes.min() == classes.max():
        classes, kind = tenths(records), "position"
    sample = Sample.of(records, batch_size)
    plan = Tuning(
        **vars(Uniform.of(classes, kind, batch_size, sample)),
        records=records,
        shards=len(counts),
        mean_bytes=float(mean_bytes),
        batch_size=batch_size,
        num_workers=check_int("num_workers", num_workers, 0),
        world_size=check_int("world_size", world_size),
        spans=spans,
        seed=seed,
        nodes=nodes,
        memory=MEMORY if memory is None else check_size("memory", memory),
        batches=sample.batches * sample.passes,
        epochs=sample.passes if sample.batches else 0,
        whole_epochs=sample.whole,
        with_units=units,
    )
    usual = None if nodes == 1 and shuffled_whole(records, mean_bytes) else SHUFFLE_BUFFER
    if memory is None:
        plan = replace(plan, memory=max(MEMORY, plan.buffer_bytes(usual)))
    ladder, others = _choices(records, batch_size, spans) if sample.batches else ([], [])
    if units:
        ladder, others = ladder + others, []
    simulation = Simulation(counts, classes, seed, spans, batch_size, sample, nodes)
    if nodes > 1:
        simulation.epoch(usual, plan.unit, 0)  # raises for nodes that do not suit
        ladder = [choice for choice in ladder if choice[0] is not None]
    tell = progress or (lambda done, total: None)
    tell(0, len(ladder) + 1)
    search = _Search(plan, simulation, is_network, (usual, plan.unit), tell)
    search.look(ladder)
    if not any(row.will_do for row in search.rows):
        search.look(others)
    tell(len(search.rows) + 1, len(search.rows) + 1)
    return _conclude(search, path, root)


@dataclass
class _Search:
    """The rows that were tried so far."""

    plan: Tuning  # without rows
    simulation: Simulation
    is_network: bool
    default: Choice  # that nobody gave
    tell: Progress
    rows: list[Row] = field(default_factory=list)
    left_out: list[int | None] = field(default_factory=list)  # buffers that take more memory

    def look(self, choices: Sequence[Choice]) -> None:
        """Try these, and compare all rows. Raises OptionError if none fits the memory."""
        total, memory = len(self.rows) + len(choices) + 1, self.plan.memory
        for buffer, unit in choices:
            if self.plan.buffer_bytes(buffer) <= memory or (buffer, unit) == self.default:
                self.tell(len(self.rows) + 1, total)
                self.rows.append(self._row(buffer, unit))
            elif buffer not in self.left_out:
                self.left_out.append(buffer)
        if choices and not any(row.fits for row in self.rows):
            least = choices[0][0]
            raise OptionError(
                f"memory is {show_size(memory)}, but the least buffer that was to be tried, "
                f"{show_buffer(least)} records, needs {show_size(self.plan.buffer_bytes(least))}; "
                "give more memory, or a smaller batch_size"
            )
        most = max(ALL_RECORDS, DEARER * min((row.requests for row in self.rows), default=0))
        read = DEARER * min((row.read_bytes for row in self.rows), default=0)
        self.rows = [
            replace(row, is_cheap=row.requests <= most and row.read_bytes <= read)
            for row in self.rows
        ]

    def _row(self, buffer: int | None, unit: int) -> Row:
        """Simulate a buffer and a unit, and judge them."""
        plan, mean_bytes = self.plan, self.plan.mean_bytes
        classes, alike, again, moved = self.simulation(buffer, unit)
        epoch = self.simulation.epoch(buffer, unit, 0)
        rank = Partition(epoch, plan.batch_size, world_size=plan.world_size)
        share = replace(rank, num_workers=max(1, plan.num_workers))
        window = rank_window = plan.window(buffer)
        if buffer is not None:
            rank_window = min(window, rank.spans_read * epoch.window)
        choose = partial(
            choose_policy,
            share,
            mean_bytes,
            network=self.is_network,
            available_bytes=1 << 62,  # whatever the machine
        )
        readers = share.num_workers * share.world_size
        requests, read_bytes = choose(local_consumers=readers).cold_requests()
        even = even_classes(alike)
        return Row(
            shuffle_buffer=buffer,
            unit=unit,
            window=window,
            memory_bytes=plan.buffer_bytes(buffer),
            rank_bytes=math.ceil(rank_window * mean_bytes),
            first_batch_bytes=choose().first_batch_bytes(),
            requests=requests,
            read_bytes=read_bytes,
            classes=classes,
            even=even,
            again=again,
            moved=moved,
            mixes=buffer is None or not plan.off(classes, even),
            renews=buffer is None or again - plan.chance < AGAIN,
            fits=plan.buffer_bytes(buffer) <= plan.memory,
            is_cheap=True,  # until all are known
        )


def _conclude(search: _Search, path: str | None, root: str | None) -> Tuning:
    """Sort the rows, choose one, and say so.

    That is the default if it will do, else "all", else the largest buffer that will do.
    """

    def merit(row: Row) -> tuple[int, ...]:
        every, usual = row.shuffle_buffer is None, row.unit == search.plan.unit
        return row is default, every, row.window, usual, row.unit

    rows = sorted(search.rows, key=lambda row: (row.memory_bytes, -row.unit))
    default = {(row.shuffle_buffer, row.unit): row for row in rows}.get(search.default)
    # A shuffled pack mixes with any buffer; but few records may look too even, or not, by chance.
    mixing = [row.mixes for row in rows if row.shuffle_buffer == rows[0].shuffle_buffer]
    in_runs = lie_in_runs([search.simulation.classes], 1 / search.plan.even)
    has_labels = search.plan.labels == "label"
    tuning = replace(
        search.plan,
        in_class_order=bool(rows) and has_labels and in_runs and not any(mixing),
        rows=tuple(rows),
        best=max((row for row in rows if row.will_do), key=merit, default=None),
        default=default,
    )
    notes = tuple(_notes(tuning, search.left_out))
    from .plot import draw

    return replace(tuning, notes=notes, call=_call(tuning, path, root), _draw=draw)


# --- the ladder -----------------------------------------------------------------------------------


def _choices(records: int, batch_size: int, spans: int) -> tuple[list[Choice], list[Choice]]:
    """Return each (buffer, unit) to try: with the default unit, and with others."""
    most = records if records <= WHOLE else MOST
    steps = (f * 10**power for power in range(19) for f in (1, 2, 5))
    least = max(2, spans)
    buffers = [step for step in steps if least <= step < min(most + 1, records)]
    usual = default_unit(batch_size)
    ladder: list[Choice] = [(buffer, usual) for buffer in buffers]
    ladder.append((None, usual))  # a permutation is the same for every unit
    return ladder, [(b, u) for b in buffers for u in units_to_try(batch_size, spans) if u != usual]


def units_to_try(batch_size: int, spans: int) -> list[int]:
    """Return divisors of the batch size, the largest first, each about a quarter of the one before.

    Below batch_size / spans every batch takes from all spans already: smaller ones mix no better.
    """
    possible = divisors(batch_size)
    least = max(u for u in possible if u <= max(1, batch_size / spans))
    units = [batch_size]
    while units[-1] > least:
        units.append(max(least, max(u for u in possible if u <= max(1, units[-1] // 4))))
    return sorted({*units, default_unit(batch_size)}, reverse=True)


# --- what to say at the end -----------------------------------------------------------------------


def _call(tuning: Tuning, path: str | None, root: str | None) -> str:
    """Write the constructor call to use; without a path, the options to change."""
    chosen, usual = tuning.least_bad, tuning.default
    options: dict[str, Any] = {}
    order: dict[str, int] = {}
    if path is not None:
        options = {} if root is None else {"storage": f"Storage(root={quoted(root)})"}
        options["batch_size"] = tuning.batch_size
        if tuning.nodes > 1:
            order["nodes"] = tuning.nodes
        units = 1 if tuning.nodes == 1 else tuning.batch_size // tuning.unit
        if tuning.spans != spans_of(tuning.nodes, units):
            order["spans"] = tuning.spans
    if chosen is not None and usual is not None:
        buffer = chosen.shuffle_buffer
        if buffer != usual.shuffle_buffer:
            options["shuffle_buffer"] = '"all"' if buffer is None else f"{buffer:_}"
        if chosen.unit != usual.unit and buffer is not None:
            order["unit"] = chosen.unit
    if order:
        options["order"] = f"Order({', '.join(f'{name}={n}' for name, n in order.items())})"
    call = ", ".join(f"{name}={value}" for name, value in options.items())
    return call if path is None else f"ShardDataset({quoted(without_secrets(path))}, {call})"


def _notes(tuning: Tuning, left_out: Sequence[int | None]) -> Iterator[str]:
    """Iterate over what to say at the end; the answer comes last."""
    best, chosen, usual, limit = tuning.best, tuning.least_bad, tuning.default, tuning.memory
    if chosen is None or usual is None:
        yield (
            "There are fewer records than a batch takes, so every order is one batch: nothing to "
            "tune."
        )
        return
    if tuning.nodes > 1:
        part = f"1/{tuning.nodes} of the records, the same in all epochs"
        yield (
            f"Each of {tuning.nodes:,} nodes reads {part}: a batch is of one node's part, so that "
            "records of two nodes never share one. Without nodes, all records mix."
        )
    if left_out:
        buffers = ", ".join(map(show_buffer, left_out))
        more = f"more than {show_size(limit)} of memory"
        yield f"Not tried, for they take {more}: buffers of {buffers}."
    if tuning.records > WHOLE:
        yield (
            f'Buffers above {MOST:,} records were not simulated; "all" is a uniform shuffle by '
            "definition."
        )
    ordered = "The pack is in class order"
    repack = "pack it again, shuffled: `shardio pack SRC OUT`"
    if tuning.keeps_default:
        yield (
            f"Keep the default, {usual}: it mixes as well as a uniform shuffle, at no cost to "
            "notice. Nothing to set."
        )
        if tuning.in_class_order:
            yield (
                f"{ordered}, which only a shuffle of nearly all of it mends. If it is to grow, "
                f"{repack}."
            )
    elif best is not None:
        yield (
            f"Set {best}: it mixes as well as a uniform shuffle, at no cost to notice. The "
            f"default, {usual}, does not do: {tuning.verdict(usual)}."
        )
        if tuning.in_class_order:
            yield f"{ordered}: to need less, {repack}."
        else:
            yield "Another order voids saved states: change it for new runs."
    else:
        yield (
            f"No buffer within {show_size(limit)} mixes as well as a uniform shuffle at a cost "
            "that nobody would notice."
        )
        if tuning.in_class_order:
            yield f"{ordered}: {repack}. Then the default will do."
        else:
            yield "More memory (`--memory`), or a batch_size with small divisors, may help."
        yield f"Until then the least bad is {chosen}: {tuning.verdict(chosen)}."
