"""Resolve the options that decide an epoch's order: requested, else saved, else the default.

    RequestedOptions(batch_size=256).resolve(mean_bytes, records=n)    the options of a new run
    RequestedOptions(batch_size=128).resolve(mean_bytes, saved)        those of a run that goes on

How it works. A saved state holds all of them but the batch size. An option that the user did not
request is taken from the state, so that a run goes on in its own order without being told; an
option that was requested with another value than the saved one is an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from ..errors import OptionError, StateError, printable
from ..units import check_bool, check_given, check_int, check_size, refuse_unknown
from .epoch import Epoch, Tail, default_unit
from .partition import Partition
from .rng import Int64s

# What `shuffle_buffer` is where nobody gives it: all records of a dataset of at most ALL_BYTES or
# ALL_RECORDS, else SHUFFLE_BUFFER of them. A function of what is read, never of the machine.
#
# ALL_BYTES are read whole before the first batch (fetch), in storage order: requests and bytes as
# in a window, and no more than a network file system's windows hold (buffering.BUFFER_BYTES).
ALL_BYTES = 256 << 20
# At most so many requests, one a record: 7 s at 3,000 a second. A window of 10,000 saves little of
# them, and of so few records it mixes too little: in 16 shards, batches of 256, up to 6 % of a
# batch's pairs meet again in the next epoch (`tune`'s limit is 5 %).
ALL_RECORDS = 20_000
SHUFFLE_BUFFER = 10_000  # 2 MB of pages hinted per worker and 1.1 GB of page cache at 110 KB
SPANS = 64  # divisible by most counts of consumers that share nothing

# The name of each option in saved states, which outlive the names of options.
_SAVED_AS = {
    "shuffle_buffer": "shuffle_buffer",
    "seed": "seed",
    "tail": "tail",
    "spans": "canonical_workers",
    "unit": "unit",
}
# What a state may hold besides: it is left out where nodes do not keep to shards of their own.
STATE_OPTIONS = (*_SAVED_AS.values(), "nodes", "node_spans")


@refuse_unknown
@dataclass(frozen=True)
class Order:
    """Choose how an epoch is cut: `ShardDataset(..., order=shardio.Order(unit=16))`.

    spans  parts of an epoch that are shuffled by themselves and read side by side; default 64
    unit   records that a batch takes from one span at a time. Default: the largest divisor of
           batch_size up to 32; for a batch_size below 256, up to 16 and up to half of it
    nodes  machines that keep to shards of their own in all epochs. The cache of each then needs
           room for its part only, and later epochs download nothing. Each batch holds records of
           one node's part. Default 1: every machine reads other shards in each epoch

    All of them decide the order. None: the value of a loaded state, otherwise the default. Raises
    OptionError.
    """

    _: KW_ONLY
    spans: int | None = None
    unit: int | None = None
    nodes: int | None = None

    def __post_init__(self) -> None:
        """Check the numbers. Raises OptionError."""
        check_given(self, spans=(1,), unit=(1,), nodes=(1,))


@dataclass(frozen=True)
class Options:
    """Hold the options that, with the records of the shards, decide the order of every epoch."""

    batch_size: int | None
    shuffle_buffer: int | None  # records; None: "all"
    seed: int
    tail: Tail
    spans: int
    unit: int
    shuffle: bool  # False: the order of the index; shuffle_buffer and spans are 1 then
    nodes: int  # that keep to shards of their own; 1: none do
    node_spans: int  # spans side by side of one node: the units of a batch in a new run

    def epoch(self, shard_records: Int64s, epoch: int) -> Epoch:
        """Make one epoch over shards of so many records, (shards,) int64. Raises OptionError."""
        return Epoch(
            shard_records,
            seed=self.seed,
            epoch=epoch,
            spans=self.spans,
            unit=self.unit,
            shuffle_buffer=self.shuffle_buffer,
            shuffle=self.shuffle,
            nodes=self.nodes,
            node_spans=self.node_spans,
        )

    def partition(self, epoch: Epoch, **consumer: int) -> Partition:
        """Make the partition of one consumer.

        consumer: rank, world_size, worker, num_workers, start and done of Partition. Raises
        OptionError.
        """
        return Partition(epoch, self.batch_size, tail=self.tail, **consumer)

    def state(self) -> dict[str, Any]:
        """Return the options as a saved state holds them: plain JSON. No shuffle: buffer False."""
        buffer = "all" if self.shuffle_buffer is None else self.shuffle_buffer
        state = {saved: getattr(self, name) for name, saved in _SAVED_AS.items()}
        if self.nodes > 1:
            state |= {"nodes": self.nodes, "node_spans": self.node_spans}
        return state | {"shuffle_buffer": buffer if self.shuffle else False}


@dataclass(frozen=True)
class RequestedOptions:
    """Hold the options that the user requested; None: not requested. ShardDataset says more."""

    batch_size: int | None = None
    shuffle_buffer: int | str | None = None
    seed: int | None = None
    tail: Tail | None = None
    spans: int | None = None
    unit: int | None = None
    shuffle: bool | None = None
    nodes: int | None = None

    def resolve(
        self,
        mean_bytes: float,
        saved: Mapping[str, Any] | None = None,
        *,
        records: int | None = None,
    ) -> Options:
        """Fill in the options that were not requested, and check all of them.

        mean_bytes  the mean size of a record, for a shuffle_buffer in bytes
        saved       the state of a run that goes on
        records     how many are read, for the default of shuffle_buffer; None: a great many

        Raises OptionError, and StateError when the user requested another value than was saved.
        """
        self._check_shuffle()
        unit = 1 if self.batch_size is None else default_unit(self.batch_size)
        nodes, node_spans = self._nodes(unit, saved)
        whole = nodes == 1 and shuffled_whole(records, mean_bytes)
        values: dict[str, Any] = {
            "shuffle_buffer": "all" if whole else SHUFFLE_BUFFER,
            "seed": 0,
            "tail": "pad",
            "spans": spans_of(nodes, node_spans),
            "unit": unit,
        }
        for name in values:
            given = getattr(self, name)
            if given is not None:
                values[name] = given
            elif saved is not None:
                values[name] = saved[_SAVED_AS[name]]
        shuffle = values["shuffle_buffer"] is not False
        if self.shuffle is not None:
            shuffle = bool(self.shuffle)
        if shuffle and values["shuffle_buffer"] is not False:
            values["shuffle_buffer"] = buffer_records(values["shuffle_buffer"], mean_bytes)
        else:
            values["shuffle_buffer"] = values["spans"] = 1
        for name in ("seed", "spans", "unit"):  # numpy's are no JSON
            if isinstance(values[name], np.integer):
                values[name] = int(values[name])
        options = Options(
            self.batch_size, **values, shuffle=shuffle, nodes=nodes, node_spans=node_spans
        )
        if saved is not None:
            if shuffle == (saved["shuffle_buffer"] is False):
                raise StateError(
                    f"shuffle is {shuffle}, but the state was saved with {not shuffle}: leave "
                    "shuffle out to go on in the order of the saved run, or start a new one"
                )
            state = options.state()
            for name, key in {**_SAVED_AS, "nodes": "nodes"}.items():
                here, there = (one.get(key) for one in (state, saved))
                if name == "nodes":
                    here, there = here or 1, there or 1
                if here != there:
                    given = f"order=Order({name}=...)" if name in vars(Order()) else name
                    raise StateError(
                        f"{name} is {printable(repr(here))}, but the state was saved with "
                        f"{printable(repr(there))}: leave {given} out to go on in the order "
                        "of the saved run, or start a new one"
                    )
        return options

    def _nodes(self, unit: int, saved: Mapping[str, Any] | None) -> tuple[int, int]:
        """Return how many nodes keep to shards of their own, and spans of one side by side.

        A state without nodes is of one. Raises OptionError.
        """
        there = None if saved is None else saved.get("nodes")
        nodes = self.nodes if self.nodes is not None else there
        if nodes is None or nodes == 1:
            return 1, 1
        nodes = check_int("nodes", nodes)
        if self.batch_size is None:
            raise OptionError(
                f"nodes is {nodes}: give batch_size, too, since each batch is of one node's shards"
            )
        if saved is not None and there is not None:
            return nodes, check_int("node_spans", saved["node_spans"])
        return nodes, max(1, self.batch_size // (self.unit or unit))

    def _check_shuffle(self) -> None:
        """Raise OptionError when the options of shuffling contradict, or shuffle nothing."""
        if self.shuffle is not None:
            if type(self.shuffle) is int:
                raise OptionError(
                    f"shuffle is {self.shuffle}: expected True or False; how far it shuffles is "
                    f"shuffle_buffer={self.shuffle}"
                )
            check_bool(shuffle=self.shuffle)
        if self.shuffle is not None and not self.shuffle:
            for name in ("shuffle_buffer", "spans", "nodes"):
                if getattr(self, name) is not None:
                    raise OptionError(
                        f"shuffle=False reads in the order of the index, and {name} is "
                        f"{getattr(self, name)!r}: leave one of them out"
                    )
        buffer = self.shuffle_buffer
        if buffer is not True and isinstance(buffer, (int, np.integer)) and buffer in (0, 1):
            raise OptionError(
                f"shuffle_buffer is {buffer}, which shuffles nothing: give shuffle=False for the "
                "order of the index, or a shuffle_buffer of 2 or more"
            )


def spans_of(nodes: int, node_spans: int) -> int:
    """Return the default of spans: 64, or the next multiple of nodes * node_spans."""
    period = nodes * node_spans
    return -(-SPANS // period) * period


def order_text(share: Partition, **change: int) -> str:
    """Return the `order=` of a job with a change, to copy: other options stay as they are."""
    epoch, size = share.epoch, share.batch_size or 1
    values = {"spans": epoch.spans, "unit": epoch.unit, "nodes": epoch.nodes} | change
    node_spans = 1 if values["nodes"] == 1 else max(1, size // values["unit"])
    values["spans"] += -values["spans"] % (values["nodes"] * node_spans)
    usual = {"spans": spans_of(values["nodes"], node_spans), "unit": default_unit(size), "nodes": 1}
    told = {name: n for name, n in values.items() if name in change or n != usual[name]}
    return f"order=shardio.Order({', '.join(f'{name}={n}' for name, n in told.items())})"


def shuffled_whole(records: int | None, mean_bytes: float) -> bool:
    """Return whether the default is to shuffle all of so many records of this mean size."""
    if records is None:
        return False
    return records <= ALL_RECORDS or records * mean_bytes <= ALL_BYTES


def buffer_records(shuffle_buffer: int | str, mean_bytes: float) -> int | None:
    """Return a shuffle_buffer option in records; None for "all". Raises OptionError."""
    if shuffle_buffer == "all":
        return None
    if isinstance(shuffle_buffer, str) and not shuffle_buffer.strip().isdigit():
        return math.ceil(check_size("shuffle_buffer", shuffle_buffer) / mean_bytes)
    if isinstance(shuffle_buffer, np.integer):
        return int(shuffle_buffer)
    if not isinstance(shuffle_buffer, int) or isinstance(shuffle_buffer, bool):
        raise OptionError(
            f"shuffle_buffer is {shuffle_buffer!r}: expected a number of records, bytes such as "
            "'512MiB', or 'all'"
        )
    return shuffle_buffer
