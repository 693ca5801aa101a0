"""Decide where the bytes of a consumer's shuffle windows wait.

The shuffle buffer is an order, not a pile of bytes; where the bytes wait depends on what is
cheapest:

    page_cache  the default. The page cache is the buffer: as the window of a span moves on, its
                storage is announced in runs of adjacent records, 1 MiB each, and each record is
                read when it is handed out. Costs the process next to nothing, and all workers of
                a machine share the pages.
    in_memory   small records, in windows that fit HELD_BYTES: each span is read in blocks, and the
                raw bytes of each record wait in this process. 0.9 KB: 0.7 us a record less.
    remote      of an object store no page is cached: each span is asked for ahead, in ranges of
                8 MiB and in the order of use, and all of its window waits in this process. Where
                spans are shared, or all is shuffled, each asks for its own records alone; but a
                small dataset that is shuffled as a whole is kept in this process.
    network     announcements to a network file system are not to be trusted: records wait in this
                process, up to `buffer_bytes` on this machine; where that is full, blocks are left
                out and their records are read one by one when handed out, so nothing is read twice.

A span that starts would announce its whole window at once, 1 GB in all for 10,000 photographs, and
the first batch would wait behind it. So the first batches announce their own records, and what lies
between them up to a run, one batch ahead, and the window grows RAMP records for each one handed
out. A dataset of small records that is shuffled as a whole is one window, announced so from its
first byte to its last. One of at most ALL_BYTES is announced before the first batch, or read, if it
is on a network file system: sequential reads, on any storage, for one epoch's worth of which nobody
waits long. Where
storage order does not help (larger records are shuffled as a whole, a span is shared with other
machines, or memory is too short to keep the windows until they are used) all announcements are of
that kind: the order is arithmetic, so what the next batches need is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .. import native
from ..formats.manifest import Manifest
from ..order.epoch import Epoch
from ..order.options import ALL_BYTES
from ..order.partition import Partition, RowRanges
from ..order.rng import Int64s
from ..order.subset import Selection
from ..storage.local import memory_available
from ..storage.ranges import IN_FLIGHT, LEAST_IN_FLIGHT
from ..storage.remote_file import RANGE

HELD_BYTES = 24 << 20  # held windows and read-ahead of a process that reads local storage
SMALL = 8 << 10  # mean record below which holding beats reading: 0.7 us at 0.9 KB, 0 at 8 KB
RUN = 1 << 20  # bytes of storage that are read or announced at a time
# Of a block of small local records, which takes memory in each process for each span that it reads.
# CIFAR, 64 spans: the same speed as 1 MiB, warm and cold, and 20 MB less in each of two processes.
HELD_RUN = 128 << 10
# Unwanted bytes between records of a selection that are read rather than sought over. Of 0.9 KB
# records, warm, each 30th: 8.3 us a record, and 20 us with 64 KiB.
GAP = 16 << 10
LEAST_BLOCK = 64 << 10  # with less room than this per span, held blocks are not worth it
BUFFER_BYTES = 256 << 20  # a machine's held windows on network file systems
# Share of the available memory that announced windows may take; with more, the kernel drops pages
# before their use. 2 GiB of photographs, 1 GiB of memory, a window of 1 GiB: 1.9 times the payload
# is read; 1.2 when only a quarter of the blocks is announced, 1.03 when just the next batches are.
KEPT = 0.25
AHEAD = 256  # records announced ahead of use where storage order does not help, at least
# Of records of a dataset that is shuffled as a whole, mean bytes x consumers on a machine, each of
# which announces all: at 9 us for 128 KiB in the cache as dear as 4.5 us for each one's own. So is
# each call where records do not lie side by side (`calls_per_record`): 12 consumers, 4 KB files of
# a folder: 173 us of processors a record, 35 when each announces its own; one record in ten: 35
# and 9.
WHOLE = 64 << 10
# Calls of a consumer that announce a small dataset before the first batch: 0.1 s where all is
# cached.
CALLS = 1 << 14
# Rows of an object store that are drawn ahead of use, at most: what they need is asked for in
# the order of use. Of small records more is asked for, span by span.
DRAWN = 4096
# Rows that are looked up at once without a batch_size, at first and at most: 3 us each of 1 alone.
STEPS = (64, 256)


class BufferPlan(NamedTuple):
    """Say where the bytes of a consumer's windows wait. Sizes are those of the mean record."""

    policy: str  # "page_cache", "in_memory", "network" or "remote"; see the module
    exact: bool  # only the records of the next batches are announced, not the windows
    budget: int  # bytes that may be held in the process; 0: none are
    run: int  # bytes that are read or announced at a time
    held_bytes: int  # that the windows would hold in the process, were there no budget
    cached_bytes: int  # announced, and not yet read, in the page cache of this machine
    first: bool = False  # all of the dataset is announced before the first batch; or read, where
    network: bool = False  # the storage is a network file system
    ahead_bytes: int = 0  # that a reader of an object store asks for ahead of use

    @property
    def in_memory(self) -> bool:
        """Return True if blocks are read before hand-out; all else moves on after it."""
        return self.policy in ("in_memory", "remote")

    @property
    def asks(self) -> bool:
        """Return True if blocks are asked for ahead of reading them, as windows will move on."""
        return self.policy == "remote"


def plan_buffering(
    share: Partition | RowRanges,
    mean_bytes: float,
    *,
    network: bool,
    remote: bool = False,
    buffer_bytes: int = BUFFER_BYTES,
    local_consumers: int = 1,
    machines: int = 1,
    available_bytes: int | None = None,
    batched_reads: bool = False,
    calls_per_record: Callable[[], float] = lambda: 0.0,
) -> BufferPlan:
    """Decide where a consumer's bytes wait, by arithmetic. Nothing is read. Options as of Fetch.

    mean_bytes        of a record in storage
    network           whether the storage is a network file system
    remote            whether it is an object store
    available_bytes   memory of this machine for processes and page cache; default: what it has
    batched_reads     the core reads many records at a time, so that holding them gains nothing
    calls_per_record  asked where all is shuffled: the calls that announce all records, for each
    """
    epoch, touched, sharing = share.epoch, share.touched, share.sharers
    window = epoch.window * mean_bytes
    if remote:
        return _plan_remote(share, mean_bytes, local_consumers)
    if not epoch.shuffles_all and sharing <= 2:
        room = (HELD_BYTES - touched * window) / touched
        budget, run = 0, RUN
        if network:
            budget = max(1, buffer_bytes // local_consumers)
            run = max(1, min(RUN, budget // (2 * touched)))
        elif mean_bytes < SMALL and room >= LEAST_BLOCK and not batched_reads:
            budget, run = HELD_BYTES, int(min(RUN, HELD_RUN, room))
        if budget:
            ahead = max(run, mean_bytes)  # the block that reaches beyond the window
            if network:  # and what is read early, so that no batch waits; see Fetch
                ahead += max(run, epoch.unit * mean_bytes)
            held = math.ceil(touched * (window + ahead))
            return BufferPlan("network" if network else "in_memory", False, budget, run, held, 0)
    spans = min(touched * local_consumers, epoch.spans)  # of this machine
    pages = math.ceil(spans * (window + RUN))
    exact = sharing > 1 and (network or machines > 1)
    first = False
    if epoch.shuffles_all:
        pages = math.ceil(epoch.records * mean_bytes)
        each = calls_per_record()
        first = pages <= ALL_BYTES and epoch.records * each <= CALLS
        exact = network or machines > 1 or local_consumers * (mean_bytes / WHOLE + each) > 1
        exact = exact and not first
    if not exact:
        available = memory_available() if available_bytes is None else available_bytes
        exact = pages > KEPT * available
        first = first and not exact
    if exact:  # storage order does not help: announce the records of the next batches one by one
        batch = share.batch_size or STEPS[1]
        pages = math.ceil(local_consumers * (max(AHEAD, batch) + batch) * mean_bytes)
    return BufferPlan("page_cache", exact, 0, RUN, 0, pages, first, network)


def _plan_remote(
    share: Partition | RowRanges, mean_bytes: float, local_consumers: int
) -> BufferPlan:
    """Decide where the bytes of an object store wait."""
    epoch, touched = share.epoch, share.touched
    ahead = max(LEAST_IN_FLIGHT, IN_FLIGHT // local_consumers)
    if share.sharers == 1 and not epoch.shuffles_all:
        held = math.ceil(touched * (epoch.window * mean_bytes + RANGE / 2))
        return BufferPlan("remote", False, 1 << 62, RANGE, held, 0, ahead_bytes=ahead)
    everything = math.ceil(epoch.records * mean_bytes)
    if epoch.shuffles_all and everything <= ALL_BYTES:
        return BufferPlan(
            "page_cache", False, 0, RANGE, everything, 0, True, True, ahead_bytes=ahead
        )
    return BufferPlan("page_cache", True, 0, RANGE, ahead, 0, False, True, ahead_bytes=ahead)


def requests_of_spans(epoch: Epoch, spans: int, mean_bytes: float) -> int:
    """Estimate the requests to an object store for an epoch of so many spans that nobody shares."""
    size, shards = epoch.records * mean_bytes, int((epoch.shard_records > 0).sum())
    return spans * (math.ceil(size / spans / RANGE) + 1) + shards


def reads_batches_in_core(manifest: Manifest) -> bool:
    """Say whether the core reads batches of raw pixels, as far as the manifest tells.

    A transform that takes records one by one is not considered: 0.4 us of each do not matter.
    """
    raw = manifest.format == "record" and manifest.options.get("encode") == "raw"
    return raw and native.records() is not None


def calls_per_record(manifest: Manifest, selection: Selection | None) -> float:
    """Count the calls that announce all these records in storage order, for each: 0 to 1."""
    if manifest.format == "imagefolder":  # each is a file
        return 1.0
    if selection is None:
        return 0.0
    numbers = selection.numbers
    between = np.diff(numbers) - 1
    return float((between > gap_between(numbers, manifest.mean_bytes)).sum() + 1) / max(
        1, len(numbers)
    )


def gap_between(numbers: Int64s, mean_bytes: float) -> int:
    """Choose how many unwanted records between two are announced with them.

    In all no more of them are announced than wanted ones.
    """
    between, gap = np.diff(numbers) - 1, int(GAP / mean_bytes)
    return gap if between[between <= gap].sum() <= len(numbers) else 0
