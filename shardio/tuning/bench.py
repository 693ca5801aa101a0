"""What this machine can do with this dataset: images a second, what they cost, what limits them.

    print(bench("packed", batch_size=256))

How it works. A row is a loader with its workers and threads, decoding or handing out bytes, warm or
cold. Each of its repeats runs in a process of its own (`bench_process`), and the rows take turns,
so that what else the machine does meanwhile shows as spread, and not as a difference between
loaders. What limits a row is found out by its figures (`bench_row`).

    warm   the records were read just before. Of a dataset that is too large for that, as many of
           its first records as fit are measured, in the order of a dataset of these alone.
    cold   the pages of the shards' files were dropped, and looked after; one pass, from its start.
    URL    the records come from an object store, or its cache; one repeat, in parts. What comes
           before the windows of all spans are filled does not count.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final

import numpy as np

from .. import machine, notebook
from ..dataset import sequence
from ..dataset.sequence import ShardSequence
from ..errors import OptionError, StorageError, printable
from ..loader.decode_advice import FIGURES, PHOTOGRAPH, TRAINING
from ..order.options import ALL_BYTES
from ..storage.local import LocalDirectory, memory_available
from ..storage.location import locate
from ..storage.options import Storage, with_root
from ..storage.stores import without_secrets
from ..units import check_int, quoted, show_count, show_size, unexpected
from .bench_process import FailedError, Host
from .bench_row import LIMITS, NOISE, OTHERS, Row, judge
from .text import Result, paragraph, show_cores, show_number, show_took, table

LOADERS: Final = ("both", "dataloader", "shardloader")
SECONDS: Final = 6.0  # a row, in all its repeats
QUICK_SECONDS: Final = 2.0
URL_SECONDS: Final = 12.0  # a row by URL, in one repeat, behind its start
QUICK_URL_SECONDS: Final = 3.0
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

BUSY: Final = 0.5  # of the cores, by the load before: it tells of the last minute, not of this one
_WIDTH: Final = 100

Progress = Callable[[int, int], None]


@dataclass(frozen=True, repr=False)
class Bench(Result):
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
    remote: bool = False  # read by URL
    stores: tuple[str, ...] = ()  # options of shardio.Storage, as Python has them
    jpegs: bool = False  # its images are JPEGs; not asked by URL

    @property
    def rounds(self) -> int:
        """Return how many repeats each row has."""
        return 1 if self.quick or self.remote else ROUNDS

    @property
    def row_seconds(self) -> float:
        """Return how long each row is measured, unless somebody says it."""
        quick, usual = (QUICK_SECONDS, SECONDS)
        if self.remote:
            quick, usual = (QUICK_URL_SECONDS, URL_SECONDS)
        return quick if self.quick else usual

    @property
    def unit(self) -> str:
        """Return what a rate counts."""
        return "records/s" if self.fields is None else "images/s"

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of Row.cells."""
        return ("", self.unit, "from-to", "MB/s", "CPU ms", "memory", "1st s", "limit")

    def __str__(self) -> str:
        """Write it for a terminal of 100 columns or a few more; the lines of Python come last."""
        blocks = [self._head()]
        for title, rows in self.groups():
            lines = table([self.columns, *(row.cells() for row in rows)], left=(0, -1))
            marks = ("> " if row is self.best else "  " for row in rows)
            marked = map("".join, zip(marks, lines[1:], strict=True))
            blocks.append("\n".join([title, f"  {lines[0]}", *marked]))
        shown = {row.limit for row in self.rows} & LIMITS.keys()
        width = max(map(len, shown), default=0) + 2
        says = [
            paragraph(text, _WIDTH, f"{code:<{width}}", " " * width)
            for code, text in LIMITS.items()
            if code in shown
        ]
        notes = [paragraph(note, _WIDTH) for note in self.notes]
        blocks += ["\n".join(says), "\n".join(notes), self.call]
        return "\n\n".join(filter(None, blocks))

    def _head(self) -> str:
        """Write what was measured."""
        head = (
            f"{show_count(self.records, 'record')} of {show_size(self.record_bytes)}; batches of "
            f"{self.batch_size:,}; {show_cores(self.cores)}{show_took(self.seconds)}"
        )
        if self.measured_records < self.records:
            size = show_size(self.measured_records * self.record_bytes)
            head += f"\nMeasured: its first {self.measured_records:,} records, {size}"
        return head

    def _repr_html_(self) -> str:
        parts = [notebook.paragraph(self._head())]
        for title, rows in self.groups():
            lines = [(row.cells(), row is self.best) for row in rows]
            parts += [notebook.paragraph(title), notebook.table(self.columns, lines)]
        return "".join([*parts, *map(notebook.paragraph, self.notes), notebook.code(self.call)])

    def groups(self) -> Iterator[tuple[str, list[Row]]]:
        """Iterate over rows that can be compared, with a title."""
        pixels = "Pixels" if self.raw else f"Decoded, RandomResizedCrop({self.size})"
        for decodes in (True, False):
            for cold in (False, True):
                rows = [row for row in self.rows if (row.decodes, row.cold) == (decodes, cold)]
                what = pixels if decodes else "Bytes, not decoded"
                if rows:
                    where = "by URL" if rows[0].remote else "cold" if cold else "warm"
                    yield f"{what}, {where}:", rows


def bench(
    path: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    storage: Storage | None = None,
    batch_size: int = 256,
    size: int | None = None,
    workers: Sequence[int] | None = None,
    threads: Sequence[int] | None = None,
    loader: str = "both",
    seconds: float | None = None,
    quick: bool = False,
    progress: Progress | None = None,
) -> Bench:
    """Measure a packed directory, or a dataset by its URL, on this machine.

    root      where the data lies, when `shardio index --out` put its index elsewhere
    storage   a shardio.Storage: how an object store is reached, and its cache
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
    began, memory = time.monotonic(), memory_available()
    if loader not in LOADERS:
        raise unexpected("loader", loader, ", ".join(LOADERS))
    if seconds is not None and not 0 < float(seconds) < math.inf:
        raise OptionError(f"seconds is {seconds!r}: expected a number above 0, for each row")
    where = with_root(storage, root)
    found, plan = _plan(path, where, batch_size, size, quick)
    each = plan.row_seconds if seconds is None else float(seconds)
    ways = ways_to_try(plan, workers, threads, loader)
    tell = progress or (lambda done, total: None)
    with Host(where) as host:
        tell(0, len(ways) * plan.rounds)
        if not plan.remote:
            plan = replace(plan, measured_records=read_first(found, plan.batch_size, quick))
        if plan.fields is not None and size is None and not plan.raw:
            plan = replace(plan, size=host.ask(request_of(plan, "probe"), GRACE_S)["size"])
        files = files_of(found, plan.root or path, plan.measured_records)
        refused = "" if plan.remote else why_not_cold(files)
        if refused:
            ways = [way for way in ways if not way.cold]
        elif not plan.remote:
            read_first(found, plan.batch_size, quick, plan.measured_records)
        runs = run_ways(plan, ways, host, files, each, began, tell)
    rows = [_summed(way, some, plan.record_bytes) for way, some in runs.items() if some]
    if all(row.error for row in rows):
        raise StorageError(f"no way to read came to its end: {rows[0].name}: {rows[0].error}")
    rows = judge(rows, plan.cores, memory, plan.raw)
    plan = replace(plan, rows=tuple(rows), cold=refused, seconds=time.monotonic() - began)
    return conclude(plan, [way.full_name for way, some in runs.items() if not some])


def _plan(
    path: str | os.PathLike[str], storage: Storage, batch_size: int, size: int | None, quick: bool
) -> tuple[ShardSequence, Bench]:
    """Open the dataset, and say what is to be measured of it."""
    load = machine.load()
    batch_size = check_int("batch_size", batch_size)
    size = None if size is None else check_int("size", size)
    root = storage.root
    found = sequence.open(path, decode=None, storage=storage)
    if not len(found):
        raise OptionError(f"{printable(os.fsdecode(path), 4096)}: there are no records to measure")
    fields, manifest = _fields(found), found.manifest
    remote = locate(path if root is None else root, storage).remote
    return found, Bench(
        path=os.fsdecode(path),
        root=None if root is None else os.fsdecode(root),
        records=len(found),
        record_bytes=manifest.mean_bytes,
        measured_records=len(found),
        batch_size=batch_size,
        size=None if fields is None else size,
        raw=fields is not None and size is None and manifest.options.get("encode") == "raw",
        fields=fields,
        cores=machine.cores(),
        load_before=load,
        seconds=0.0,
        quick=quick,
        remote=remote,
        stores=_written(storage),
        jpegs=fields is not None and not remote and _is_jpeg(found[0][fields[0]]),
    )


def _is_jpeg(data: Any) -> bool:
    """Return True if these bytes begin as a JPEG does."""
    return isinstance(data, bytes) and data.startswith(b"\xff\xd8\xff")


def _written(storage: Storage) -> tuple[str, ...]:
    """Write the options of storage as lines of Python give them, but none of a store's secrets."""
    found = []
    for name in ("root", "cache", "cache_bytes"):
        if (value := getattr(storage, name)) is not None:
            text = repr(value) if isinstance(value, int) else quoted(os.fsdecode(value))
            found.append(f"{name}={text}")
    if storage.options:
        found.append("options=...")
    return tuple(found)


# --- what is measured -----------------------------------------------------------------------------


def _fields(found: ShardSequence) -> tuple[str, ...] | None:
    """Return what a training reads: the image, and the label if there is one. None: no images."""
    schema = found.manifest.schema
    image, label = schema.main_image, dict(schema.fields).get("label")
    if image is None or not schema.images:
        return None
    return (image, "label") if label in ("int", "bool") else (image,)


def ways_to_try(
    plan: Bench, workers: Sequence[int] | None, threads: Sequence[int] | None, loader: str
) -> list[Row]:
    """Return rows without figures: the most telling first, since `quick` may not get to all."""
    full = max(1, int(plan.cores))
    tried = sorted({full} if plan.quick else {0, 1, full // 2, full})
    if workers is not None:
        tried = _counts("workers", workers, 0)
    each = None if threads is None else _counts("threads", threads, 1)
    ways: list[Row] = []
    if loader != "shardloader":
        ways += [Row("DataLoader", count, 1, True, False) for count in tried]
    if loader != "dataloader":
        some = {1, *tried} if plan.quick and workers is None else tried
        ways += [
            Row("ShardLoader", count, of, True, False)
            for count in sorted(some)
            for of in each or [max(1, full // max(1, count))]
        ]
    fullest = _fullest(ways, full)
    bare = [replace(way, decodes=False) for way in fullest]
    cold = [replace(way, cold=True) for way in [*fullest, *bare]]
    if plan.quick:  # one loader tells of storage what both would
        cold = [way for way in cold if way.loader == fullest[-1].loader]
    if plan.remote:
        asked = fullest if workers is None else ways  # the network is what fewer wait for, too
        asked = [] if plan.fields is None else asked  # without images nothing is decoded
        return [replace(way, remote=True) for way in [*asked, *bare]]
    if plan.fields is None:
        every = [*ways, *(way for way in cold if not way.decodes)]
        return [replace(way, decodes=False) for way in every]
    return ways + bare + cold


def _fullest(ways: Sequence[Row], full: int) -> list[Row]:
    """Return the row of each loader that has as many builders as there are cores.

    Only these are measured not decoded, and cold: what fewer do follows from it.
    """
    return [
        max(
            (way for way in ways if way.loader == name),
            key=lambda way: (way.builders <= full, way.builders, way.workers),
        )
        for name in dict.fromkeys(way.loader for way in ways)
    ]


def _counts(name: str, numbers: Iterable[int], least: int) -> list[int]:
    """Return numbers to try, ascending, each once. Raises OptionError."""
    counts = sorted({check_int(name, one, least, 1024) for one in numbers})
    if not counts:
        raise OptionError(f"{name} is empty: expected at least one number")
    return counts


def read_first(found: ShardSequence, batch_size: int, quick: bool, most: int = 0) -> int:
    """Read records once, from the first on, so that they are in memory. Return how many.

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


def files_of(found: ShardSequence, where: str | os.PathLike[str], records: int) -> list[str]:
    """Return the files of the first records; none, where they are no files of this machine."""
    storage, manifest = locate(where), found.manifest
    if not isinstance(storage, LocalDirectory):
        return []
    if manifest.format == "imagefolder":
        return [storage.path(key) for key in found[:records].keys()]  # noqa: SIM118
    last = int(np.searchsorted(np.cumsum(manifest.shard_records), records))
    return [storage.path(manifest.shard(number).name) for number in range(last + 1)]


def why_not_cold(files: list[str]) -> str:
    """Make files cold once, and return why that cannot be done; "" if it can."""
    reason, stayed = "this system cannot drop files from memory", None
    try:
        stayed = machine.evict(files) if files else None
    except OSError as error:
        reason = error.strerror or str(error)
    if stayed is not None:
        if stayed <= machine.STAYED:
            return ""
        pages = f"{stayed:.0%} of the files' pages stay in memory"
        reason = f"{pages} (a RAM disk? in use by another program?)"
    return f"Cold is not possible here: {reason}."


def run_ways(
    plan: Bench,
    ways: Sequence[Row],
    host: Host,
    files: list[str],
    each: float,
    began: float,
    tell: Progress,
) -> dict[Row, list[dict[str, Any]]]:
    """Run the repeats of each row: all warm ones in turns, and then all cold ones."""
    rounds = plan.rounds
    turns = [w for cold in (False, True) for _ in range(rounds) for w in ways if w.cold is cold]
    runs: dict[Row, list[dict[str, Any]]] = {way: [] for way in ways}
    for done, way in enumerate(turns):
        tell(done, len(turns))
        seconds, limit = each / rounds, each / rounds + GRACE_S
        if plan.quick:
            limit = began + QUICK_S - time.monotonic()
            least = min(LEAST_S, seconds)
            seconds = min(seconds, limit / (len(turns) - done) - LEAST_S)
            if seconds < least and done:
                continue
            seconds, limit = max(seconds, least), max(limit, LEAST_S)
        request = request_of(plan, "measure", way, seconds=seconds, limit_s=limit)
        if plan.remote and plan.quick:
            request["limit_s"] = limit = max(limit / 2, LEAST_S)  # a batch may be seconds away
            limit *= 2
        request["parts"] = PARTS if rounds == 1 and not way.cold else 1
        if way.cold and (machine.evict(files) or 0.0) > machine.STAYED:
            runs[way].append({"error": "pages of its files stay in memory; who else reads them?"})
            continue
        try:
            runs[way].append(host.ask(request, limit + (LEAST_S if plan.quick else GRACE_S)))
        except FailedError as error:
            runs[way].append({"error": str(error)})
    tell(len(turns), len(turns))
    return runs


def request_of(plan: Bench, do: str, way: Row | None = None, **more: Any) -> dict[str, Any]:
    """Return the request to a Host that measures a row, or asks for the size of the images."""
    row = {} if way is None else vars(way)
    return {"do": f"shardio.tuning.bench_process.{do}", **vars(plan), **row, **more}


def _summed(way: Row, runs: list[dict[str, Any]], record_bytes: float) -> Row:
    """Sum up the repeats of a row."""
    fine = [run for run in runs if "error" not in run]
    if not fine:
        return replace(way, error=runs[0]["error"])
    rates = tuple(rate for run in fine for rate in run["rates"])
    each = [run["figures"] for run in fine]  # those that are told here
    names = {name for figures in each for name in figures}
    medians = {name: median(one[name] for one in each if name in one) for name in names}
    return replace(
        way,
        **medians,
        rates=rates,
        images_per_s=median(rates),
        mb_per_s=median(rates) * record_bytes / 1e6,
        pss_bytes=max(run["pss_bytes"] or 0 for run in fine) or None,
        memory_left=min(run["memory_left"] for run in fine),
        pass_batches=fine[0]["pass_batches"],
        starting=any(run["starting"] for run in fine),
    )


# --- the recommendation ---------------------------------------------------------------------------


def conclude(found: Bench, left_out: Sequence[str]) -> Bench:
    """Choose the best row, and say so, with the lines of Python. left_out: names of rows."""
    decodes = found.fields is not None
    fine = [row for row in found.rows if row.error is None and row.decodes == decodes]
    warm = [row for row in fine if not row.cold] or fine
    if not warm:
        return replace(found, notes=("No row that could be recommended was measured.",))
    most = max(row.images_per_s for row in warm)
    near = [row for row in warm if row.images_per_s >= (1 - NOISE) * most]
    best = min(near, key=lambda row: (row.builders, row.pss_bytes or 0, -row.images_per_s))
    notes = (
        _recommended(found, best, warm, len(near)),
        _about_rival(found, best, [row for row in warm if row.loader != best.loader]),
        found.cold or _about_cold(found, best),
        _about_start(found),
        _about_gpu(found, best),
        *_about_machine(found, best),
        f"For want of time these were left out: {'; '.join(left_out)}." if left_out else "",
    )
    notes = tuple(filter(None, notes))
    return replace(found, best=best, notes=notes, call=_call(found, best))


def _rate(found: Bench, row: Row) -> str:
    """Write the rate of a row, with its unit."""
    return f"{show_number(row.images_per_s)} {found.unit}"


def _recommended(found: Bench, best: Row, warm: Sequence[Row], near: int) -> str:
    """Name the best row, and what limits it. near: how many rows are about as fast."""
    note = (
        f"Recommended: {best.name}: {_rate(found, best)}. What limits it: {best.limit}, since "
        f"{best.why}."
    )
    if best.limit == "load":
        note += " So this says little: measure again when they are done."
    elif any(row.limit == "load" for row in warm):
        note += " Rows that other programs held up may be faster: measure again."
    elif near > 1:
        note += (
            f" Of those within {NOISE:.0%} of the fastest it has the fewest threads, and then the "
            "least memory."
        )
    return note


def _about_rival(found: Bench, best: Row, rivals: Sequence[Row]) -> str:
    """Compare with the fastest row of the other loader; "" where nothing can be compared."""
    if not rivals:
        return ""
    rival = max(rivals, key=lambda row: row.images_per_s)
    workers = rival.name.partition(" ")[2]
    gives = f"The fastest {rival.loader} ({workers}) gives {_rate(found, rival)}"
    if "load" not in (best.limit, rival.limit):
        return f"{gives}; this one {best.images_per_s / rival.images_per_s:.2f} times as many."
    if not best.cpu_ms or not rival.cpu_ms:
        return ""
    return (
        f"{gives}, but beside other programs. CPU time does not depend on them: "
        f"{rival.cpu_ms:.3g} ms, {rival.cpu_ms / best.cpu_ms:.2f} times this one's."
    )


def _about_cold(found: Bench, best: Row) -> str:
    """Compare a cold row with the same one warm; "" where there is none."""
    warm = {row.way: row for row in found.rows if not row.cold and row.error is None}
    cold = [row for row in found.rows if row.cold and row.error is None and row.way in warm]
    if not cold:
        return ""
    row = min(cold, key=lambda row: (row.decodes != best.decodes, row.loader != best.loader))
    share = row.images_per_s / warm[row.way].images_per_s
    many = "as many as" if share >= 1 - NOISE else f"{share:.0%} of those"
    rate = row.storage_mb_per_s
    storage = "" if rate is None else f", by {show_number(rate)} MB/s"
    note = f"Cold, {row.name} gives {_rate(found, row)}{storage}: {many} warm."
    if row.starts_mostly:
        batches = show_count(row.pass_batches, "batch", "batches")
        note += f" Most of it is the start: a pass has {batches}."
    return note


def _about_start(found: Bench) -> str:
    """Say what measuring by URL leaves open: rows that did little else than begin; ""."""
    size = found.records * found.record_bytes
    cached = any(given.startswith("cache=") for given in found.stores)
    if found.remote and not cached and size <= ALL_BYTES:
        return (
            f"The dataset takes {show_size(size)}. Up to {show_size(ALL_BYTES)}, each process "
            "downloads all before its first batch, and keeps it: these figures are of memory."
        )
    names = [row.full_name for row in found.rows if row.starting]
    if not names:
        return ""
    return (
        "The windows of all spans were not filled yet when these were measured, so they will be "
        f"faster later in an epoch: {'; '.join(names)}. Measure them for longer: without --quick, "
        "or with more --seconds."
    )


def _about_gpu(found: Bench, best: Row) -> str:
    """Say when a GPU should decode instead; "" where decoding is not the limit, or not of JPEGs."""
    photographs = found.jpegs and found.size is not None and found.record_bytes >= PHOTOGRAPH
    if best.limit != "decoding" or not photographs:
        return ""
    by = f"{_rate(found, best)} by {show_cores(found.cores)}"
    if best.images_per_s >= TRAINING[0]:
        return (
            f"{by} are enough for one GPU: decode by the cores. With more GPUs, each has its part."
        )
    return (
        f'{by}; a model that takes more wants decode="cuda", by which the GPU decodes '
        f"(docs/device.md): {FIGURES}."
    )


def _about_machine(found: Bench, best: Row) -> Iterator[str]:
    """Iterate over what else needs the CPUs: a training step, and other programs."""
    step = "No training step took part: one that needs the CPU takes it from these figures."
    if best.limit != "load":
        step += f" A step that takes more than {_rate(found, best)} waits for this loader."
    yield step
    if found.load_before is not None and found.load_before > BUSY * found.cores:
        yield (
            f"This machine was busy before: a load of {found.load_before:.1f} on "
            f"{show_cores(found.cores)}. Quiet, it may do more."
        )
    busy = sum((row.others_busy or 0.0) > OTHERS * found.cores for row in found.rows)
    if busy:
        yield (
            f"Other programs took more than {OTHERS:.0%} of the CPUs during {busy} of "
            f"{len(found.rows)} rows: compare `CPU ms` rather than {found.unit}, or measure again."
        )


def _call(found: Bench, best: Row) -> str:
    """Write lines of Python that read so."""
    names, options = ["ShardDataset"], [f"batch_size={found.batch_size}"]
    if found.stores:
        options.append(f"storage=Storage({', '.join(found.stores)})")
        names.append("Storage")
    if found.fields is not None:
        fields = ", ".join(json.dumps(name) for name in found.fields)
        options.append(f"fields=({fields}{',' * (len(found.fields) == 1)})")
        options.append(
            'decode="numpy"'
            if found.raw
            else f"transform=RandomResizedCrop({found.size}, flip=True)"
        )
        names += [] if found.raw else ["RandomResizedCrop"]
    lines = []
    if best.loader == "ShardLoader":
        names.append("ShardLoader")
        loader = f"ShardLoader(train, num_workers={best.workers}, threads={best.threads})"
    else:
        lines.append("from torch.utils.data import DataLoader")
        stay = ", persistent_workers=True" if best.workers else ""
        loader = f"DataLoader(train, batch_size=None, num_workers={best.workers}{stay})"
    inner = "".join(
        f"    {option},\n" for option in (quoted(without_secrets(found.path)), *options)
    )
    lines += [
        f"from shardio import {', '.join(sorted(names))}",
        "",
        f"train = ShardDataset(\n{inner})",
        f"loader = {loader}",
    ]
    return "\n".join(lines)
