"""A row of a bench: one way to read, what it did, and what limits it.

How it works. `judge` says what limits a row by its figures alone: the CPU time of all its
processes, and of the thread that takes the batches; what came from storage; and the row that does
not decode. The first rule that applies is the answer: a thread that is full comes before the cores
it is among.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final

from ..units import show_count, show_size
from .text import Plain, show_cores, show_number

FULL: Final = 0.85  # of the time: a thread or a core that has no more to give
# Bytes read, over those of the records: from here on these come from storage; less is an index, or
# read ahead.
READ: Final = 0.3
NOISE: Final = 0.05  # rates that are nearer to each other are equal
OTHERS: Final = 0.15  # of the cores: what other programs may take without a word
SHORT: Final = 0.05  # of the memory there was: with less left, pages are dropped before their use


@dataclass(frozen=True)
class Row(Plain):
    """One way to read, and what it did. Figures are medians of the repeats; None: not told here."""

    loader: str  # "DataLoader" or "ShardLoader"
    workers: int  # processes; 0: all in the trainer's
    threads: int  # threads of each process; DataLoader has one
    decodes: bool  # False: records are handed out as bytes
    cold: bool
    remote: bool = False  # read by URL: neither warm nor cold
    rates: tuple[float, ...] = ()  # images/s of each part of each repeat
    images_per_s: float = 0.0
    mb_per_s: float = 0.0  # as stored, 10**6 bytes
    cpu_ms: float | None = None  # CPU time an image, all processes together
    cores_busy: float | None = None  # mean number of cores that these processes keep busy
    others_busy: float | None = None  # cores that other programs keep busy
    trainer_ms: float = 0.0  # CPU time of the thread that takes the batches, each
    trainer_busy: float = 0.0  # part of the time that this thread computes
    storage_mb_per_s: float | None = None  # bytes that came from storage, not from memory
    pss_bytes: int | None = None  # memory of all processes, at most; torch is some 200 MB of it
    memory_left: int | None = None  # memory that the machine had left, at least
    first_batch_s: float = 0.0  # seconds from iter() to the first batch
    pass_batches: int = 0  # batches of one epoch of the records that are measured
    starting: bool = False  # by URL: the windows of all spans were not filled when it counted
    limit: str = ""  # a code, for programs: see LIMITS
    short: str = ""  # the limit in a few words
    why: str = ""  # and with its figures
    error: str | None = None  # where it failed

    @property
    def builders(self) -> int:
        """Count the threads that build batches at the same time."""
        return max(1, self.workers) * self.threads

    @property
    def name(self) -> str:
        """Return the loader, its workers, and where it has them, the threads of each."""
        threads = "" if self.loader == "DataLoader" else f" x {self.threads}"
        return f"{self.loader} {self.workers}{threads}"

    @property
    def full_name(self) -> str:
        """Return the name, and which table it is in."""
        what = "decoded" if self.decodes else "bytes"
        return f"{self.name}, {what}" + ", cold" * self.cold + ", by URL" * self.remote

    @property
    def way(self) -> tuple[str, int, int, bool]:
        """Return what is the same, cold and warm."""
        return self.loader, self.workers, self.threads, self.decodes

    @property
    def builds_elsewhere(self) -> bool:
        """Return True if batches are built elsewhere than in the thread that takes them."""
        return bool(self.workers) or self.threads > 1

    @property
    def starts_mostly(self) -> bool:
        """Return True if a pass has so few batches that starting it takes the time."""
        return self.pass_batches < 4 * self.builders

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON, with the name."""
        return super().as_dict() | {"name": self.name}

    def cells(self) -> tuple[str, ...]:
        """Write the values of a table: those of Bench.columns."""
        if self.error is not None:
            return self.name, *["-"] * 6, f"failed: {self.error.splitlines()[0][:60]}"
        least, most = min(self.rates, default=0.0), max(self.rates, default=0.0)
        return (
            self.name,
            show_number(self.images_per_s),
            f"{show_number(least)}-{show_number(most)}" if len(self.rates) > 1 else "",
            show_number(self.mb_per_s),
            "-" if self.cpu_ms is None else f"{self.cpu_ms:,.3g}",
            "-" if self.pss_bytes is None else show_size(self.pss_bytes),
            f"{self.first_batch_s:.2f}",
            self.short,
        )


# --- what limits a row ----------------------------------------------------------------------------


def judge(rows: Sequence[Row], cores: float, memory: int, raw: bool = False) -> list[Row]:
    """Return the rows, each with what limits it, by what was measured of all of them.

    memory  bytes that the machine had to give before
    raw     images are stored as pixels: nothing is decoded
    """
    fine = [row for row in rows if row.error is None]
    judged = []
    for row in rows:
        if row.error is None:
            rules = chain(_machine(row, fine, cores, memory, raw), _loader(row, fine, cores))
            limit, short, why = next(rules)
            row = replace(row, limit=limit, short=short, why=why)
        judged.append(row)
    return judged


def _machine(
    row: Row, rows: Sequence[Row], cores: float, memory: int, raw: bool
) -> Iterator[tuple[str, str, str]]:
    """Iterate over limits that more workers do not change: code, in a few words, with figures."""
    left, busy, others = row.memory_left, row.cores_busy, row.others_busy or 0.0
    if left is not None and left < SHORT * memory:
        size = show_size(left)
        yield "memory", f"memory: {size} left", f"only {size} of memory were left on this machine"
    if row.builds_elsewhere and row.trainer_busy >= FULL:
        each = f"{row.trainer_ms:.3g} ms"
        why = f"the trainer's thread is busy {row.trainer_busy:.0%} of the time with taking batches"
        yield "transport", f"transport: {each} a batch", f"{why}, {each} of CPU each"
    if busy is None or busy + others < FULL * cores:
        return
    if others > busy:
        why = f"other programs take {others:.1f} of {show_cores(cores)}, and these processes "
        yield "load", f"load: others take {others:.1f} cores", f"{why}{busy:.1f}"
    why = f"{busy:.1f} of {show_cores(cores)} are busy"
    if others > OTHERS * cores:
        why += f", and other programs take {others:.1f}"
    code = "cpu"
    if row.decodes and not raw:
        share = _decoding(row, rows)
        code = "decoding" if share is None or share >= 0.5 else "cpu"
        if share is not None:
            why += f"; about {share:.0%} of the CPU time of an image is decoding and cropping it"
    yield code, f"{code}: {show_cores(cores)} full", why


def _loader(row: Row, rows: Sequence[Row], cores: float) -> Iterator[tuple[str, str, str]]:
    """Iterate over the limits of a row while there are cores to spare; the last always applies."""
    busy, rate = row.cores_busy, row.storage_mb_per_s or 0.0
    threads, processes = row.threads, max(1, row.workers)
    of = show_cores(cores)
    warm = next((one for one in rows if one.way == row.way and not one.cold), None)
    is_slower = warm is None or row.images_per_s < (1 - NOISE) * warm.images_per_s
    if rate > READ * row.mb_per_s and (is_slower or not row.cold):
        cold = "" if row.cold else ", though it was to be in memory"
        idle = "" if busy is None else f", and {cores - busy:.1f} of {of} are idle"
        speed = f"{show_number(rate)} MB/s"
        yield "storage", f"storage: {speed}", f"{speed} come from storage{cold}{idle}"
    if busy is not None:
        built = busy - (row.trainer_busy if row.builds_elsewhere else 0.0)  # cores of the builders
        who = "one process does it all"
        if row.builds_elsewhere:
            who = f"{show_count(row.builders, 'thread' if threads > 1 else 'worker')} busy"
        if built >= FULL * row.builders:
            why = f"{who}, all the time; of {of} {busy:.1f} are busy"
            yield "worker", f"worker: {who}", why
        if threads > 1 and built >= FULL * processes:
            each = f"{built / processes:.1f}"
            why = f"of {threads} threads in a process {each} run at a time"
            yield "threads", f"threads: {each} of {threads} run", why
    if row.remote and busy is not None and busy < FULL * cores:
        speed = f"{show_number(row.mb_per_s)} MB/s"
        idle = f"{speed} come by URL, and {cores - busy:.1f} of {of} are idle"
        yield "network", f"network: {speed}", idle
    if row.starts_mostly:
        batches = show_count(row.pass_batches, "batch", "batches")
        why = f"a pass has only {batches}, for {show_count(row.builders, 'maker')} of batches"
        yield "start", f"start: {batches} a pass", why
    told = "" if busy is None else f": {busy:.1f} of {of} are busy"
    yield "waiting", "waiting for each other", f"nothing is busy all the time{told}"


def _decoding(row: Row, rows: Sequence[Row]) -> float | None:
    """Return the share of CPU time that decoding takes; None where no other row tells.

    That is a warm row that does not decode: of the same way, or of the same loader, or any.
    """
    bare = [one for one in rows if not one.decodes and not one.cold]
    bare.sort(key=lambda one: (one.way[:3] != row.way[:3], one.loader != row.loader))
    if not row.cpu_ms or not bare or bare[0].cpu_ms is None:
        return None
    return max(0.0, 1 - bare[0].cpu_ms / row.cpu_ms)


# By code: what it means, and what helps.
LIMITS: Final = {
    "memory": "The machine has next to no memory left, so the kernel drops what is needed next: "
    "fewer workers, or a smaller batch.",
    "load": "Other programs take most of the cores: measure again when they are done.",
    "transport": "The one thread that takes the batches is busy with that: more workers do not "
    "help. ShardLoader hands batches over without copying them.",
    "decoding": "Every core is busy, and most of it is decoding: more cores, a faster decoder (the "
    "compiled core, pillow-simd: `shardio info --env`), or less to decode (`pack --jpeg-tiles` for "
    "crops of photographs, `pack --resize`).",
    "cpu": "Every core is busy with reading, checking and passing records on: only more cores "
    "help.",
    "worker": "What makes the batches is busy all the time, while other cores are free: more "
    "workers.",
    "threads": "Threads of one process wait for each other (for Python's lock), while cores are "
    "free: more workers, with fewer threads each.",
    "storage": "The cores wait for storage: more workers ask it for more at once; else only faster "
    "storage, or smaller records (`pack --resize`), help.",
    "network": "The cores wait for the object store, or for the link to it: more workers ask for "
    "no more at once. With a cache (`storage=Storage(cache=...)`) later epochs are local.",
    "start": "A pass has so few batches that starting passes takes the time.",
    "waiting": "Nothing is busy all the time: processes wait for each other's batches. More "
    "workers help a little.",
}
