"""What this machine can do with this dataset: images a second, what they cost, what limits them.

    print(bench("out/", batch_size=256).text())

How it works. A row is a loader with its workers and threads, decoding or handing out bytes, warm or
cold. Each of its repeats runs in a process of its own (`measuring`), and the rows take turns, so
that what else the machine does meanwhile shows as spread, and not as a difference between loaders.

    warm   the records were read just before. Of a dataset that is too large for that, as many of
           its first records as fit are measured, in the order of a dataset of these alone.
    cold   the pages of the shards' files were dropped, and looked after; one pass, from its start.

`judge` says what limits a row, by its figures alone: the CPU time of all its processes, and of the
thread that takes the batches; what came from storage; and the row that does not decode.
"""

from __future__ import annotations

import json
import math
import os
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np

from .. import machine
from ..dataset import sequence
from ..dataset.sequence import ShardSequence
from ..errors import OptionError, StorageError, printable
from ..storage.local import LocalStorage, memory_available
from ..storage.location import locate
from ..units import check_int, quoted, show_count, show_size
from .bench_process import FailedError, Host

LOADERS: Final = ("both", "dataloader", "shardloader")
SECONDS: Final = 6.0  # a row, in all its repeats
QUICK_SECONDS: Final = 2.0
ROUNDS: Final = 3  # repeats of each row: the least that has a median
PARTS: Final = 3  # of a repeat where there is only one
QUICK_S: Final = 26.0  # of 30: the rest is importing torch on a busy machine, and writing
LEAST_S: Final = 0.4  # of measuring; with less left, `quick` leaves rows out
GRACE_S: Final = 60.0  # that a repeat may take more than it was told: a slow first batch

# Records that are measured, of a large dataset: read once before, and held by the page cache.
MOST_BYTES: Final = 2 << 30
CACHED: Final = 0.25  # of the available memory
READ_S: Final = 20.0  # to read them
QUICK_READ_S: Final = 3.0
LEAST_BATCHES: Final = 8  # whatever that takes

FULL: Final = 0.85  # of the time: a thread or a core that has no more to give
# Of the bytes of the records: from here on they come from storage; less is an index, or read ahead.
READ: Final = 0.3
NOISE: Final = 0.05  # rates that are nearer to each other are equal
BUSY: Final = 0.5  # of the cores, by the load before: it tells of the last minute, not of this one
OTHERS: Final = 0.15  # of the cores: what other programs may take without a word
SHORT: Final = 0.05  # of the memory there was: with less left, pages are dropped before their use
_WIDTH: Final = 100

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Row:
    """One way to read, and what it did. Figures are medians of the repeats; None: not told here."""

    loader: str  # "DataLoader" or "ShardLoader"
    workers: int  # processes; 0: all in the trainer's
    threads: int  # of each; DataLoader has one
    decodes: bool  # False: records are handed out as bytes
    cold: bool
    rates: tuple[float, ...] = ()  # images/s of each part of each repeat
    images_per_s: float = 0.0
    mb_per_s: float = 0.0  # as stored, 10**6 bytes
    cpu_ms: float | None = None  # an image, of all processes together
    cores_busy: float | None = None  # by these processes, mean
    others_busy: float | None = None  # by other programs
    trainer_ms: float = 0.0  # CPU time of the thread that takes the batches, each
    trainer_busy: float = 0.0  # of the time
    storage_mb_per_s: float | None = None  # that came from storage, and not from memory
    pss_bytes: int | None = None  # of all processes, at most; torch itself is some 200 MB of it
    memory_left: int | None = None  # of the machine, at least
    first_batch_s: float = 0.0  # from iter() on
    pass_batches: int = 0  # of one epoch of what is measured
    limit: str = ""  # a code, for programs: see _SAYS
    short: str = ""  # the limit in a few words
    why: str = ""  # and with its figures
    error: str | None = None  # where it failed

    @property
    def makers(self) -> int:
        """Threads that make batches at the same time."""
        return max(1, self.workers) * self.threads

    @property
    def apart(self) -> bool:
        """Whether batches are made elsewhere than in the thread that takes them."""
        return bool(self.workers) or self.threads > 1

    @property
    def name(self) -> str:
        """The loader, its workers, and where it has them, threads of each."""
        threads = "" if self.loader == "DataLoader" else f" x {self.threads}"
        return f"{self.loader} {self.workers}{threads}"

    @property
    def way(self) -> tuple[str, int, int, bool]:
        """What is the same, cold and warm."""
        return self.loader, self.workers, self.threads, self.decodes


@dataclass(frozen=True)
class Bench:
    """The result: what was measured, what each row is limited by, and what is recommended."""

    path: str
    root: str | None
    records: int
    record_bytes: float  # stored, mean
    measured_records: int  # all, or the first ones
    batch_size: int
    size: int | None  # of the crop, pixels; None: there is none
    raw: bool  # images are stored as pixels, and handed out as they are
    fields: tuple[str, ...] | None  # None: all, as dicts
    cores: float
    load_before: float | None  # mean number of busy processes, in the minute before
    seconds: float
    quick: bool
    rows: tuple[Row, ...] = ()
    best: Row | None = None  # what is recommended
    cold: str = ""  # why there are no cold rows, where there are none
    notes: tuple[str, ...] = ()
    call: str = ""  # lines of Python

    @property
    def unit(self) -> str:
        return "records/s" if self.fields is None else "images/s"

    @property
    def columns(self) -> tuple[str, ...]:
        return ("", self.unit, "from-to", "MB/s", "CPU ms", "memory", "1st s", "limit")

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        rows = [asdict(row) | {"name": row.name} for row in self.rows]
        best = None if self.best is None else asdict(self.best) | {"name": self.best.name}
        return asdict(self) | {"rows": rows, "best": best}

    def __repr__(self) -> str:
        return self.text()  # as a notebook shows it

    def text(self) -> str:
        """For a terminal of 100 columns or a few more; it ends with the lines of Python."""
        blocks = [self._head()]
        shown: dict[str, str] = {}  # limits that come up
        for title, rows in self.groups():
            blocks.append(f"{title}\n{self._table(rows)}")
            shown |= {row.limit: _SAYS[row.limit] for row in rows if row.limit in _SAYS}
        if shown:
            width = max(map(len, shown))
            said = [f"{code:<{width}}  {shown[code]}" for code in _SAYS if code in shown]
            blocks.append("\n".join(_wrap(line, " " * (width + 2)) for line in said))
        blocks.append("\n".join(map(_wrap, self.notes)))
        return "\n\n".join(filter(None, [*blocks, self.call]))

    def groups(self) -> Iterator[tuple[str, list[Row]]]:
        """Rows that can be compared, with a title."""
        for decodes in (True, False):
            for cold in (False, True):
                rows = [row for row in self.rows if (row.decodes, row.cold) == (decodes, cold)]
                what = "Pixels" if self.raw else f"Decoded, RandomResizedCrop({self.size})"
                if rows:
                    what = what if decodes else "Bytes, not decoded"
                    yield f"{what}, {'cold' if cold else 'warm'}:", rows

    def _head(self) -> str:
        part = ""
        if self.measured_records < self.records:
            size = show_size(self.measured_records * self.record_bytes)
            part = f"\nMeasured: its first {self.measured_records:,} records, {size}"
        return (
            f"{show_count(self.records, 'record')} of {show_size(self.record_bytes)}; "
            f"batches of {self.batch_size:,}; {_cores(self.cores)}{part}"
        )

    def _table(self, rows: Sequence[Row]) -> str:
        lines = [self.columns, *map(cells, rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = []
        for line, row in zip(lines, [None, *rows], strict=True):
            shown = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
            shown[0], shown[-1] = line[0].ljust(widths[0]), line[-1]
            mark = "> " if row is not None and row is self.best else "  "
            text.append((mark + "  ".join(shown)).rstrip())
        return "\n".join(text)


def cells(row: Row) -> tuple[str, ...]:
    """A row of a table: the values of Bench.columns."""
    if row.error is not None:
        return (row.name, *("-" for _ in range(6)), f"failed: {row.error.splitlines()[0][:60]}")
    return (
        row.name,
        _number(row.images_per_s),
        f"{_number(min(row.rates))}-{_number(max(row.rates))}" if len(row.rates) > 1 else "",
        _number(row.mb_per_s),
        "-" if row.cpu_ms is None else f"{row.cpu_ms:,.3g}",
        "-" if row.pss_bytes is None else show_size(row.pss_bytes),
        f"{row.first_batch_s:.2f}",
        row.short,
    )


def bench(
    path: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    batch_size: int = 256,
    size: int | None = None,
    workers: Sequence[int] | None = None,
    threads: Sequence[int] | None = None,
    loader: str = "both",
    seconds: float | None = None,
    quick: bool = False,
    progress: Progress | None = None,
) -> Bench:
    """Measure a packed directory on this machine.

    root      where the data lies, when `shardio index --out` put its index elsewhere
    size      pixels of the crop that images are decoded to; default 224, and of smaller images than
              64 pixels their own size. Datasets without images are read only
    workers   processes to try; default: 0, 1, half the cores, all cores
    threads   of each process of ShardLoader; default: as many as make the cores full
    loader    "both", "dataloader" or "shardloader"
    seconds   of measuring for each row, in its repeats; default 6, quick 2
    quick     under 30 seconds: fewer rows, one repeat, and what does not fit is left out
    progress  called with (done, total)

    Raises OptionError, NotPackedError, VersionError, DamageError, DecodeError, StorageError.
    """
    began, load, memory = time.monotonic(), machine.load(), memory_available()
    batch_size = check_int("batch_size", batch_size)
    if size is not None:
        size = check_int("size", size)
    if loader not in LOADERS:
        raise OptionError(f"loader is {printable(repr(loader))}: expected {', '.join(LOADERS)}")
    each = (QUICK_SECONDS if quick else SECONDS) if seconds is None else float(seconds)
    if not 0 < each < math.inf:
        raise OptionError(f"seconds is {seconds!r}: expected a number above 0, for each row")
    found = sequence.open(path, decode=None, root=root)
    if not len(found):
        raise OptionError(f"{printable(os.fsdecode(path), 4096)}: there are no records to measure")
    fields = _fields(found)
    raw = fields is not None and size is None and found.manifest.options.get("encode") == "raw"
    made = Bench(
        path=os.fsdecode(path),
        root=None if root is None else os.fsdecode(root),
        records=len(found),
        record_bytes=found.manifest.mean_bytes,
        measured_records=len(found),
        batch_size=batch_size,
        size=None if fields is None else size,
        raw=raw,
        fields=fields,
        cores=machine.cores(),
        load_before=load,
        seconds=0.0,
        quick=quick,
    )
    ways = _ways(made, workers, threads, loader)
    tell = progress or (lambda done, total: None)
    with Host() as host:
        tell(0, len(ways) * (1 if quick else ROUNDS))
        made = replace(made, measured_records=_read(found, batch_size, quick))
        if fields is not None and size is None and not raw:
            made = replace(made, size=host.ask(_request(made, "probe"), GRACE_S)["size"])
        files = _files(found, root or path, made.measured_records)
        refused = _refused(files) if any(way.cold for way in ways) else ""
        if refused:
            ways = [way for way in ways if not way.cold]
        else:
            _read(found, batch_size, quick, made.measured_records)
        runs = _run(made, ways, host, files, each, began, tell)
    rows = [_summed(way, some, made.record_bytes) for way, some in runs.items() if some]
    if all(row.error for row in rows):
        raise StorageError(f"no way to read came to its end: {rows[0].name}: {rows[0].error}")
    rows = judge(rows, made.cores, memory, raw)
    made = replace(made, rows=tuple(rows), cold=refused, seconds=time.monotonic() - began)
    return _conclude(made, [_which(way) for way, some in runs.items() if not some])


# --- what is measured -----------------------------------------------------------------------------


def _fields(found: ShardSequence) -> tuple[str, ...] | None:
    """What a training reads: the image, and the label where there is one. None: no images."""
    kinds = dict(found.manifest.schema.fields)
    images = [name for name, kind in kinds.items() if kind == "image"]
    if not images:
        return None
    label = ("label",) if kinds.get("label") in ("int", "bool") else ()
    return ("image" if "image" in images else images[0], *label)


def _ways(
    made: Bench, workers: Sequence[int] | None, threads: Sequence[int] | None, loader: str
) -> list[Row]:
    """The rows, still without figures: the most telling first, since `quick` may not get to all."""
    full = max(1, int(made.cores))
    tried = sorted({full} if made.quick else {0, 1, full // 2, full})
    if workers is not None:
        tried = _counts("workers", workers, 0)
    each = None if threads is None else _counts("threads", threads, 1)
    ways: list[Row] = []
    if loader != "shardloader":
        ways += [Row("DataLoader", count, 1, True, False) for count in tried]
    if loader != "dataloader":
        some = {1, *tried} if made.quick and workers is None else tried
        ways += [
            Row("ShardLoader", count, of, True, False)
            for count in sorted(some)
            for of in each or [max(1, full // max(1, count))]
        ]
    # Not decoded, and cold: with as many makers as there are cores. What fewer do follows from it.
    fullest = [
        max(
            (way for way in ways if way.loader == name),
            key=lambda way: (way.makers <= full, way.makers, way.workers),
        )
        for name in dict.fromkeys(way.loader for way in ways)
    ]
    bare = [replace(way, decodes=False) for way in fullest]
    cold = [replace(way, cold=True) for way in [*fullest, *bare]]
    if made.quick:  # one loader tells of storage what both would
        cold = [way for way in cold if way.loader == fullest[-1].loader]
    if made.fields is None:
        every = [*ways, *(way for way in cold if not way.decodes)]
        return [replace(way, decodes=False) for way in every]
    return ways + bare + cold


def _counts(name: str, given: Iterable[int], least: int) -> list[int]:
    counts = sorted({check_int(name, one, least, 1024) for one in given})
    if not counts:
        raise OptionError(f"{name} is empty: expected at least one number")
    return counts


def _read(found: ShardSequence, batch_size: int, quick: bool, most: int = 0) -> int:
    """Read records once, from the first on, so that they are in memory; how many.

    As many as fit into a part of the memory, and into some time; or `most`, if given.
    """
    room = min(MOST_BYTES, CACHED * memory_available())
    fits = most or min(len(found), max(1, int(room / found.manifest.mean_bytes)))
    until = time.monotonic() + (QUICK_READ_S if quick else READ_S)
    done = 0
    for _ in found[:fits]:
        done += 1
        late = not most and not done % 64 and time.monotonic() > until
        if late and done >= LEAST_BATCHES * batch_size:
            break
    return done


def _files(found: ShardSequence, where: str | os.PathLike[str], records: int) -> list[str]:
    """The files that these first records are in; none, where they are no files of this machine."""
    storage, made = locate(where), found.manifest
    if not isinstance(storage, LocalStorage):
        return []
    if made.format == "imagefolder":
        return [storage.path(key) for key in found[:records].keys()]  # noqa: SIM118
    last = int(np.searchsorted(np.cumsum(made.shard_records), records))
    return [storage.path(made.shard(number).name) for number in range(last + 1)]


def _refused(files: list[str]) -> str:
    """Make files cold once, to see whether that can be done; and if not, why not."""
    try:
        stayed = machine.evict(files) if files else None
    except OSError as error:
        return f"Cold is not possible here: {error.strerror or error}."
    if stayed is None:
        return "Cold is not possible here: this system cannot drop files from memory."
    if stayed <= machine.STAYED:
        return ""
    return (
        f"Cold is not possible here: {stayed:.0%} of the files' pages stay in memory (a RAM disk? "
        "in use by another program?)."
    )


def _run(
    made: Bench,
    ways: Sequence[Row],
    host: Host,
    files: list[str],
    each: float,
    began: float,
    tell: Progress,
) -> dict[Row, list[dict[str, Any]]]:
    """The repeats of each row: all warm ones in turns, and then all cold ones."""
    rounds = 1 if made.quick else ROUNDS
    turns = [w for cold in (False, True) for _ in range(rounds) for w in ways if w.cold is cold]
    runs: dict[Row, list[dict[str, Any]]] = {way: [] for way in ways}
    for done, way in enumerate(turns):
        tell(done, len(turns))
        seconds, limit = each / rounds, each / rounds + GRACE_S
        if made.quick:
            limit = began + QUICK_S - time.monotonic()
            least = min(LEAST_S, seconds)
            seconds = min(seconds, limit / (len(turns) - done) - LEAST_S)
            if seconds < least and done:
                continue
            seconds, limit = max(seconds, least), max(limit, LEAST_S)
        request = _request(made, "measure", way, seconds=seconds, limit_s=limit)
        request["parts"] = PARTS if rounds == 1 and not way.cold else 1
        if way.cold and (machine.evict(files) or 0.0) > machine.STAYED:
            runs[way].append({"error": "pages of its files stay in memory; who else reads them?"})
            continue
        try:
            runs[way].append(host.ask(request, limit + (LEAST_S if made.quick else GRACE_S)))
        except FailedError as error:
            runs[way].append({"error": str(error)})
    tell(len(turns), len(turns))
    return runs


def _request(made: Bench, do: str, way: Row | None = None, **more: Any) -> dict[str, Any]:
    facts = ("path", "root", "records", "measured_records", "batch_size", "size", "raw", "fields")
    values = {name: getattr(made, name) for name in facts}
    if way is not None:
        ways = ("loader", "workers", "threads", "decodes", "cold")
        values |= {name: getattr(way, name) for name in ways}
    return {"do": do, **values, **more}


def _summed(way: Row, runs: list[dict[str, Any]], record_bytes: float) -> Row:
    """A row of its repeats."""
    fine = [run for run in runs if "error" not in run]
    if not fine:
        return replace(way, error=runs[0]["error"])
    rates = tuple(rate for run in fine for rate in run["rates"])

    def middle(name: str) -> float | None:
        known = [run[name] for run in fine if run[name] is not None]
        return median(known) if known else None

    left = [run["memory_left"] for run in fine if run["memory_left"] is not None]
    pss = [run["pss_bytes"] for run in fine if run["pss_bytes"] is not None]
    rate = median(rates)
    return replace(
        way,
        rates=rates,
        images_per_s=rate,
        mb_per_s=rate * record_bytes / 1e6,
        cpu_ms=middle("cpu_ms"),
        cores_busy=middle("cores_busy"),
        others_busy=middle("others_busy"),
        trainer_ms=middle("trainer_ms") or 0.0,
        trainer_busy=middle("trainer_busy") or 0.0,
        storage_mb_per_s=middle("storage_mb_per_s"),
        pss_bytes=max(pss) if pss else None,
        memory_left=min(left) if left else None,
        first_batch_s=middle("first_batch_s") or 0.0,
        pass_batches=fine[0]["pass_batches"],
    )


# --- what limits a row ----------------------------------------------------------------------------

# By code: what it means, and what helps.
_SAYS: Final = {
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
    "start": "A pass has so few batches that starting passes takes the time.",
    "waiting": "Nothing is busy all the time: processes wait for each other's batches. More "
    "workers help a little.",
}


def judge(rows: Sequence[Row], cores: float, memory: int, raw: bool = False) -> list[Row]:
    """The rows, each with what limits it, by what was measured of all of them.

    memory  bytes that the machine had to give before
    raw     images are stored as pixels: nothing is decoded
    """
    judged = []
    for row in rows:
        if row.error is None:
            found = _limit(row, rows, cores, memory, row.decodes and not raw)
            row = replace(row, limit=found.code, short=found.short, why=found.why)
        judged.append(row)
    return judged


class _Limit(NamedTuple):
    code: str
    short: str
    why: str


def _limit(row: Row, rows: Sequence[Row], cores: float, memory: int, decodes: bool) -> _Limit:
    """The first rule that applies: a thread that is full comes before the cores it is among."""
    rate = row.storage_mb_per_s or 0.0
    warm = [one for one in rows if one.way == row.way and not one.cold and one.error is None]
    slower = not warm or row.images_per_s < (1 - NOISE) * warm[0].images_per_s
    reads = rate > READ * row.mb_per_s and (slower or not row.cold)
    busy = row.cores_busy
    others = row.others_busy or 0.0
    full = busy is not None and busy + others >= FULL * cores
    made = None if busy is None else busy - (row.trainer_busy if row.apart else 0.0)
    left = row.memory_left
    if left is not None and left < SHORT * memory:
        return _Limit(
            "memory",
            f"memory: {show_size(left)} left",
            f"only {show_size(left)} of memory were left on this machine",
        )
    if row.apart and row.trainer_busy >= FULL:
        return _Limit(
            "transport",
            f"transport: {row.trainer_ms:.3g} ms a batch",
            f"the trainer's thread is busy {row.trainer_busy:.0%} of the time with taking batches, "
            f"{row.trainer_ms:.3g} ms of CPU each",
        )
    if full and busy is not None and others > busy:
        return _Limit(
            "load",
            f"load: others take {others:.1f} cores",
            f"other programs take {others:.1f} of {_cores(cores)}, and these processes {busy:.1f}",
        )
    if full and busy is not None:
        said = f"{busy:.1f} of {_cores(cores)} are busy"
        if others > OTHERS * cores:
            said += f", and other programs take {others:.1f}"
        bare = _bare(row, rows)
        share = None
        if decodes and row.cpu_ms and bare is not None and bare.cpu_ms is not None:
            share = max(0.0, 1 - bare.cpu_ms / row.cpu_ms)
            said += f"; about {share:.0%} of the CPU time of an image is decoding and cropping it"
        if decodes and (share is None or share >= 0.5):
            return _Limit("decoding", f"decoding: {_cores(cores)} full", said)
        return _Limit("cpu", f"cpu: {_cores(cores)} full", said)
    if reads:
        cold = "" if row.cold else ", though it was to be in memory"
        idle = "" if busy is None else f", and {cores - busy:.1f} of {_cores(cores)} are idle"
        return _Limit(
            "storage",
            f"storage: {_number(rate)} MB/s",
            f"{_number(rate)} MB/s come from storage{cold}{idle}",
        )
    if made is not None and made >= FULL * row.makers:
        who = show_count(row.makers, "thread" if row.threads > 1 else "worker")
        who = who if row.workers or row.threads > 1 else "one process"
        verb = "does it all" if who == "one process" else "busy"
        return _Limit(
            "worker",
            f"worker: {who} {verb}",
            f"{who} {verb}, all the time; of {_cores(cores)} {busy:.1f} are busy",
        )
    if made is not None and row.threads > 1 and made >= FULL * max(1, row.workers):
        each = made / max(1, row.workers)
        return _Limit(
            "threads",
            f"threads: {each:.1f} of {row.threads} run",
            f"of {row.threads} threads in a process {each:.1f} run at a time",
        )
    if row.pass_batches < 4 * row.makers:
        return _Limit(
            "start",
            f"start: {show_count(row.pass_batches, 'batch', 'batches')} a pass",
            f"a pass has only {show_count(row.pass_batches, 'batch', 'batches')}, for "
            f"{show_count(row.makers, 'maker')} of batches",
        )
    told = "" if busy is None else f": {busy:.1f} of {_cores(cores)} are busy"
    return _Limit("waiting", "waiting for each other", f"nothing is busy all the time{told}")


def _bare(row: Row, rows: Sequence[Row]) -> Row | None:
    """The row that reads as this one does, but does not decode; else one of the same loader."""
    some = [one for one in rows if not one.decodes and not one.cold and one.error is None]
    ways = ((row.loader, row.workers, row.threads), (row.loader,))
    for way in ways:
        for one in some:
            if (one.loader, one.workers, one.threads)[: len(way)] == way:
                return one
    return next(iter(some), None)


# --- the recommendation ---------------------------------------------------------------------------


def _conclude(made: Bench, left_out: Sequence[str]) -> Bench:
    """With the best row, what to say at the end, and the lines of Python."""
    decodes = made.fields is not None
    fine = [row for row in made.rows if row.error is None and row.decodes == decodes]
    warm = [row for row in fine if not row.cold] or fine
    if not warm:
        return replace(made, notes=("No row that could be recommended was measured.",))
    most = max(row.images_per_s for row in warm)
    near = [row for row in warm if row.images_per_s >= (1 - NOISE) * most]
    best = min(near, key=lambda row: (row.makers, row.pss_bytes or 0, -row.images_per_s))
    notes = [
        f"Recommended: {best.name}: {_number(best.images_per_s)} {made.unit}. What limits it: "
        f"{best.limit}, since {best.why}."
    ]
    if best.limit == "load":
        notes[0] += " So this says little: measure again when they are done."
    elif any(row.limit == "load" for row in warm):
        notes[0] += " Rows that other programs held up may be faster: measure again."
    elif len(near) > 1:
        notes[0] += (
            f" Of those within {NOISE:.0%} of the fastest it has the fewest threads, and then the "
            "least memory."
        )
    rivals = [row for row in warm if row.loader != best.loader]
    if rivals:
        rival = max(rivals, key=lambda row: row.images_per_s)
        gives = (
            f"The fastest {rival.loader} ({rival.name.partition(' ')[2]}) gives "
            f"{_number(rival.images_per_s)} {made.unit}"
        )
        if "load" not in (best.limit, rival.limit):
            times = best.images_per_s / rival.images_per_s
            notes.append(f"{gives}; this one {times:.2f} times as many.")
        elif best.cpu_ms and rival.cpu_ms:
            notes.append(
                f"{gives}, but beside other programs. CPU time does not depend on them: "
                f"{rival.cpu_ms:.3g} ms, {rival.cpu_ms / best.cpu_ms:.2f} times this one's."
            )
    notes += _about_cold(made, best)
    step = "No training step took part: one that needs the CPU takes it from these figures."
    if best.limit != "load":
        rate = f"{_number(best.images_per_s)} {made.unit}"
        step += f" A step that takes more than {rate} waits for this loader."
    notes.append(step)
    if made.load_before is not None and made.load_before > BUSY * made.cores:
        notes.append(
            f"This machine was busy before: a load of {made.load_before:.1f} on "
            f"{_cores(made.cores)}. Quiet, it may do more."
        )
    busy = [row.name for row in made.rows if (row.others_busy or 0.0) > OTHERS * made.cores]
    if busy:
        notes.append(
            f"Other programs took more than {OTHERS:.0%} of the CPUs during {len(busy)} of "
            f"{len(made.rows)} rows: compare `CPU ms` rather than {made.unit}, or measure again."
        )
    if left_out:
        notes.append(f"For want of time these were left out: {'; '.join(left_out)}.")
    return replace(made, best=best, notes=tuple(notes), call=_call(made, best))


def _about_cold(made: Bench, best: Row) -> list[str]:
    if made.cold:
        return [made.cold]
    warm = {row.way: row for row in made.rows if not row.cold and row.error is None}
    cold = [row for row in made.rows if row.cold and row.error is None and row.way in warm]
    cold.sort(key=lambda row: (row.decodes != best.decodes, row.loader != best.loader))
    if not cold:
        return []
    row = cold[0]
    share = row.images_per_s / warm[row.way].images_per_s
    told = "as many as" if share >= 1 - NOISE else f"{share:.0%} of those"
    storage = "" if row.storage_mb_per_s is None else f", by {_number(row.storage_mb_per_s)} MB/s"
    start = ""
    if row.pass_batches < 4 * row.makers:
        batches = show_count(row.pass_batches, "batch", "batches")
        start = f" Most of it is the start: a pass has {batches}."
    return [
        f"Cold, {row.name} gives {_number(row.images_per_s)} {made.unit}{storage}: {told} warm."
        + start
    ]


def _call(made: Bench, best: Row) -> str:
    """Lines of Python that read so."""
    options = [f"batch_size={made.batch_size}"]
    names = ["ShardDataset"]
    if made.root is not None:
        options.append(f"root={quoted(made.root)}")
    if made.fields is not None:
        names_of = ", ".join(json.dumps(name) for name in made.fields)
        options += [
            f"fields=({names_of}{',' * (len(made.fields) == 1)})",
            'decode="numpy"'
            if made.raw
            else f"transform=RandomResizedCrop({made.size}, flip=True)",
        ]
        names += [] if made.raw else ["RandomResizedCrop"]
    lines = []
    if best.loader == "ShardLoader":
        names.append("ShardLoader")
        loader = f"ShardLoader(train, num_workers={best.workers}, threads={best.threads})"
    else:
        lines.append("from torch.utils.data import DataLoader")
        stay = ", persistent_workers=True" if best.workers else ""
        loader = f"DataLoader(train, batch_size=None, num_workers={best.workers}{stay})"
    inner = "".join(f"    {option},\n" for option in options)
    return "\n".join(
        [
            *lines,
            f"from shardio import {', '.join(sorted(names))}",
            "",
            f"train = ShardDataset(\n    {quoted(made.path)},\n{inner})",
            f"loader = {loader}",
        ]
    )


# --- words ----------------------------------------------------------------------------------------


def _which(row: Row) -> str:
    """The name of a row, and its table."""
    return row.name + (", decoded" if row.decodes else ", bytes") + (", cold" if row.cold else "")


def _cores(count: float) -> str:
    return f"{count:,.3g} core" + ("" if count == 1 else "s")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def _wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(text, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)
