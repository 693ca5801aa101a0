"""Figures of a loader: how batches were built, which the meter sums up; what it runs and holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..images.device_crop import Reason
from ..storage.ranges import RequestMeter
from ..units import show_count, show_size
from .decode_advice import DecodeAdvice


class BatchStats(NamedTuple):
    """Say how one batch was made: the attribute `batch_stats` of a loader's iterator.

    Seconds of the first four stages are summed over the rows, in whatever threads they were made.
    A built-in transform, which decodes and crops in one call, counts as decode.
    """

    rows: int = 0
    wait_s: float = 0.0  # the trainer waited in next()
    read_s: float = 0.0
    decode_s: float = 0.0
    transform_s: float = 0.0
    collate_s: float = 0.0
    transport_s: float = 0.0  # the trainer's own time to take the batch: message, mapping, copying
    device_s: float = 0.0  # the trainer's own time to send it to the device
    worker: int = 0  # which loader process
    slowest_s: float = 0.0  # the row that took longest
    slowest_record: int = -1  # its number in the dataset
    slowest_key: str = ""
    cpu_s: float = 0.0  # CPU time of its process since it was told before; 0: not known, or < 5 ms
    # Of its process, since its batch before: requests to object stores, those that were sent again
    # because they had failed, and those of them that the store had refused as too many.
    requests: int = 0
    retries: int = 0
    throttled: int = 0


def add_requests(stats: BatchStats, meter: RequestMeter) -> BatchStats:
    """Return the stats of a batch with the requests that its process made since the one before."""
    new = meter.new()
    return stats._replace(**new._asdict()) if new.requests else stats


@dataclass
class DecodeCounts:
    """Count by whom the images of decode="cuda" were decoded, in all passes."""

    decoder: str = ""  # on the device; "pil": none. "": there was no batch yet
    by_decoder: int = 0
    by_trainer: int = 0  # by PIL in this process: the decoder had refused them
    by_workers: dict[str, int] = field(default_factory=dict)  # why, as Reason has it

    def add_finished(self, reasons: Iterable[Reason]) -> None:
        """Count crops that workers have made."""
        for reason in reasons:
            name = reason.name.lower()
            self.by_workers[name] = self.by_workers.get(name, 0) + 1

    def __str__(self) -> str:
        """Return it in words, one line."""
        by = [f"{self.by_decoder:,} images by {self.decoder}"] * (self.by_decoder > 0)
        by += [f"{self.by_trainer:,} by PIL in this process"] * (self.by_trainer > 0)
        if self.by_workers:
            why = ", ".join(f"{name} {count:,}" for name, count in sorted(self.by_workers.items()))
            by.append(f"{sum(self.by_workers.values()):,} by the workers ({why})")
        return "; ".join(by)


@dataclass(frozen=True, kw_only=True)
class PoolFigures:
    """Hold what a pool runs, and what its buffers take."""

    pids: list[int] = field(default_factory=list)  # of the processes that run now
    buffers: int = 0  # batches that there was memory for at a time, the most
    ring: int = 0  # those that a loop needs which keeps no batch but the one it is at
    batch_bytes: int = 0  # of all buffers that there are now


@dataclass(frozen=True, kw_only=True)
class LoaderExplanation(PoolFigures):
    """Say what a loader runs and holds. Sizes in bytes."""

    num_workers: int
    threads: int
    prefetch_factor: int
    locked_bytes: int  # page-locked memory of this process
    staging_bytes: int  # of it: for what does not come in buffers of the loader
    resident_bytes: int
    decoded: DecodeCounts | None = None  # of decode="cuda"
    advice: DecodeAdvice | None = None  # where to decode, if there is something to say
    kernels: str = ""  # of images on the device: "triton" or "torch", once that is known

    def __repr__(self) -> str:
        return self.text()  # as a notebook shows it

    def text(self) -> str:
        """Return it in words, some lines."""
        threads = show_count(self.threads, "thread")
        where = f"{show_count(self.num_workers, 'process', 'processes')} of {threads}"
        if not self.num_workers:
            where = f"{threads} of this process" if self.threads else "this loop"
        lines = [
            f"batches are made by {where}, up to {self.prefetch_factor} ahead "
            + ("each" if self.num_workers else "in all")
        ]
        if self.resident_bytes:  # filled: the workers have left
            size = show_size(self.resident_bytes)
            lines = [f"resident         {size}, decoded once: each batch is a gather of it"]
        if self.pids:
            lines.append(f"processes        {', '.join(map(str, self.pids))}")
        if self.buffers:
            buffers = show_count(self.buffers, "buffer")
            lines.append(f"batch memory     {show_size(self.batch_bytes)} in {buffers}")
        if self.buffers > self.ring > 0:
            lines.append(
                f"                 at most, {self.buffers - self.ring} more than the ring: your "
                "loop kept batches, and each keeps its buffer; clone() what you keep for long"
            )
        if self.locked_bytes:
            lines.append(
                f"page-locked      {show_size(self.locked_bytes)}, of which "
                f"{show_size(self.staging_bytes)} staging"
            )
        if self.kernels:
            lines.append(f"kernels          of {self.kernels.capitalize()}")
        if self.advice is not None:
            lines.append(f"where to decode  {self.advice}")
        if self.decoded is not None and (decoded := str(self.decoded)):
            lines.append(f"decoded          {decoded}")
        return "\n".join(lines)
