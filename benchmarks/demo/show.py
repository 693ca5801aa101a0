"""A minute that shows what shardio is for.

Images are packed, and read in three ways (contest.py): as files by DataLoader and PIL, which
is what most run now; as shards by the same DataLoader; and as shards by ShardLoader. From memory,
from the disk, and from a disk that is held to a few hundred reads a second. Then one bit is flipped
in a copy, and a run is killed and goes on.

Each measurement runs in a process of its own (`bench_process.Host`), and the ways take turns.
Nothing stays but what was asked for: all else lies in one temporary folder.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, Final, NamedTuple

from shardio import (
    DamageError,
    DecodeError,
    ImageOptions,
    OptionError,
    ShardioError,
    SourceError,
    SourceOptions,
    machine,
    native,
    pack,
)
from shardio.dataset import sequence
from shardio.errors import printable
from shardio.formats import manifest
from shardio.images import decode
from shardio.images.filetype import ALL_ENDINGS
from shardio.names import file_name, from_file_name
from shardio.storage.location import locate
from shardio.tuning import text
from shardio.tuning.bench_process import FailedError, Host
from shardio.units import check_int, show_count, show_size

from .. import throttle
from . import specimens

WAYS: Final = ("folder", "dataloader", "shardloader")
READS_PER_S: Final = 500  # small cloud disks and busy network file systems give about as many
SECONDS: Final = 6.0  # of a pass: 2,000 files at 500 a second take 4
ROUNDS: Final = 2  # of warm rows, and the better one counts: a busy machine hurts none alone
ROUND_S: Final = 6.0  # a round that took longer was on a machine too busy, or slow, for two
DRAWN_SMALL, DRAWN_PHOTOGRAPHS = 2_000, 480  # images that are made: some seconds of decoding
MOST_IMAGES, MOST_BYTES = 4_000, 384 << 20  # of a folder that is not to be kept packed
LARGE: Final = 2**17  # pixels: from here on crops gain by tiles (docs/jpeg-tiles.md)
EQUAL: Final = 0.05  # rates that are nearer to each other are equal
BUSY: Final = 0.5  # of the cores, by the load of the minute before
RESUMED: Final = 12  # batches of the run that is killed
_LIMIT_S: Final = 120.0  # that a process may take for an answer

Say = Callable[[str], None]


@dataclass(frozen=True)
class Row(text.Plain):
    """A way to have the images lie, and what each way to read them does with it."""

    name: str
    images_per_s: dict[str, float] = field(default_factory=dict)  # by way
    # Reads of the disk in a whole pass, where they were counted and no time limit cut it.
    requests: dict[str, int] = field(default_factory=dict)
    refused: str = ""  # why it was not measured

    @property
    def gain(self) -> float | None:
        """Return the rate of ShardLoader over that of the image folder; None if not measured."""
        if not self.images_per_s:
            return None
        return self.images_per_s["shardloader"] / self.images_per_s["folder"]

    def as_dict(self) -> dict[str, Any]:
        """Return the row as plain JSON, with its gain."""
        return super().as_dict() | {"gain": self.gain}


@dataclass(frozen=True)
class Part(text.Plain):
    """One folder of images, packed and read."""

    name: str
    images: int
    mean_bytes: float
    sides: tuple[int, int]  # of the first image: width and height
    size: int  # of the crops
    tiles: bool
    shards: int
    pack_seconds: float
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Damage(text.Plain):
    """One bit flipped: what reading a copy of the shards says, and what PIL says of a file."""

    message: str
    file_error: str | None
    file_changed: int | None  # pixels that are others
    file_pixels: int


@dataclass(frozen=True)
class Resumed(text.Plain):
    """A run that was killed in the middle, and went on."""

    batches: int  # of a run that nobody disturbed
    killed_after: int
    workers: tuple[int, int]  # before and after
    equal: bool


@dataclass(frozen=True)
class Demo(text.Plain):
    """All that was shown."""

    pil: str
    core: bool
    batch_size: int
    workers: int
    cores: float
    reads_per_s: int
    parts: tuple[Part, ...]
    damage: Damage | None
    resumed: Resumed | None
    seconds: float
    counted: str = ""  # whose requests were counted; "": none

    def next_steps(self, out: str | None) -> str:
        """Return what to run next, and the lines of a training."""
        at = "OUT" if out is None else printable(out, 4096)
        tiles = " --jpeg-tiles" if self.parts[-1].tiles else ""
        pack = "" if out is not None else f"  shardio pack FOLDER {at}{tiles}\n"
        return (
            f"{self.seconds:.0f} s. Next, with your own images:\n{pack}"
            f"  shardio bench {at}    what this machine can do with them; which settings to use\n"
            f"  shardio verify {at}   every record against its checksum\n"
            "and in training:\n"
            f'  train = ShardDataset("{at}", batch_size=256, fields=("image", "label"),\n'
            "                       transform=RandomResizedCrop(224, flip=True))\n"
            "  for images, labels in ShardLoader(train): ..."
        )


def demo(
    folder: str | os.PathLike[str] | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    batch_size: int = 64,
    workers: int | None = None,
    size: int | None = None,
    seconds: float = SECONDS,
    say: Say | None = None,
) -> Demo:
    """Show on this machine what shardio gains over an image folder.

    folder      images, which are only read; default: some that are made, small and large
    out         keep the shards here, of all images; else a sample of a large folder is packed
    batch_size  images in a batch; default 64
    workers     processes of each loader; default: one a core, 8 at most
    size        pixels of the crops; default 224, and of small images less
    seconds     the most that a pass takes; default 6. The rest of its images is not read
    say         called with each paragraph of what was found, when it was found

    Raises OptionError, SourceError, ExistsError, StorageError and what packing raises.
    """
    began = time.monotonic()
    batch_size = check_int("batch_size", batch_size)
    processes = (
        min(8, machine.processors()) if workers is None else check_int("workers", workers, 1)
    )
    if size is not None:
        size = check_int("size", size)
    if not 0 < seconds < 3600:
        raise OptionError(f"seconds is {seconds!r}: expected a number above 0, for a pass")
    given = None if folder is None else _checked(os.fsdecode(folder), out)
    tell = say or (lambda text: None)
    pil = decode.pil_info()
    with _scratch() as scratch, Host() as host:
        keeps = None if out is None else os.fsdecode(out)
        stage = _Stage(scratch, host, batch_size, processes, size, seconds, tell, keeps)
        parts, damage, resumed = stage.show(given)
    return Demo(
        pil=f"{pil['name']} {pil['version']}",
        core=native.core is not None,
        batch_size=batch_size,
        workers=processes,
        cores=machine.cores(),
        reads_per_s=READS_PER_S,
        parts=tuple(parts),
        damage=damage,
        resumed=resumed,
        seconds=time.monotonic() - began,
        counted=stage.counted,
    )


# --- what is shown --------------------------------------------------------------------------------


@dataclass
class _Stage:
    """One demo, from its images to its last paragraph."""

    scratch: str
    host: Host
    batch_size: int
    workers: int
    size: int | None
    seconds: float
    say: Say
    out: str | None
    counted: str = ""
    refused: str = ""  # why reads are not held to a limit

    def show(self, given: str | None) -> tuple[list[Part], Damage | None, Resumed | None]:
        """Pack and read all folders, and show what comes of damage and of a kill."""
        parts: list[Part] = []
        packed: list[_Packed] = []
        self.say(_heading(self.batch_size, self.workers))
        for source, name, tiles in self._sources(given):
            packed.append(self._pack(source, name, tiles))
            parts.append(self._compare(packed[-1]))
        last = packed[-1]  # photographs, if there are any
        damage, resumed = None, None
        try:
            damage = self._flip(last)
            resumed = self._resume(last)
        except FailedError as error:
            self.say(f"The rest was not shown: {error}")
        return parts, damage, resumed

    def _sources(self, given: str | None) -> Iterator[tuple[str, str, bool | None]]:
        """Yield folders, their names, and whether tiles suit them (None: to be looked at)."""
        if given is not None:
            yield given, printable(given, 4096), None
            return
        drawn = {specimens.SMALL: DRAWN_SMALL, specimens.PHOTOGRAPHS: DRAWN_PHOTOGRAPHS}
        for kind, count in drawn.items():
            folder = os.path.join(self.scratch, kind.name.split()[-1])
            specimens.make(folder, kind, count)
            yield folder, f"{kind.name}, made for this", kind is specimens.PHOTOGRAPHS

    def _pack(self, source: str, name: str, tiles: bool | None) -> _Packed:
        """Pack a folder, or a sample of it, and say what was packed."""
        out = os.path.join(self.scratch, f"{os.path.basename(source)}.shards")
        listed, root, of_them = source, None, ""
        if self.out is not None:
            out = self.out
            if name.endswith("made for this"):
                out = os.path.join(out, os.path.basename(source))
        rows, size, more = _sample(source) if self.out is None else ([], 0, False)
        if more:
            of_them = f", {len(rows):,} of them"
            listed, root = os.path.join(self.scratch, "sample.csv"), source
            columns = 2 if rows[0][1] else 1
            with open(listed, "w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows(row[:columns] for row in [("path", "label"), *rows])
        if tiles is None:
            tiles = _large(source)
        _check_room(out, size or sum(map(os.path.getsize, _images(source))))
        began = time.monotonic()
        read, images = SourceOptions(root=root), ImageOptions(jpeg_tiles=tiles)
        done = pack(listed, out, read=read, images=images, on_error="skip")[0]
        seconds = time.monotonic() - began
        folders = manifest.datasets(out)
        split = "train" if "train" in folders else next(iter(folders))
        if split:
            source, out = os.path.join(source, split), folders[split]
        dataset = manifest.load(locate(out))
        if not dataset.records:
            raise SourceError(f"{printable(source, 4096)}: no image in it could be packed")
        first = sequence.open(out, fields=("image",))[0][0]
        os.sync()  # pages that are not written yet could not be dropped
        skipped = len(done.rejected)
        left = f"; {show_count(skipped, 'file')} left out" if skipped else ""
        flag = " --jpeg-tiles" if tiles else ""
        elsewhere = ""
        if os.stat(source).st_dev != os.stat(out).st_dev:
            elsewhere = (
                "\n  (The shards lie on another disk than the images: --out DIR says where.)"
            )
        files = f"{show_count(dataset.shards, 'file')} instead of {dataset.records:,}"
        self.say(
            f"{name}: {show_count(dataset.records, 'image')}{of_them}, "
            f"{show_size(dataset.size / dataset.records)} each{left}\n"
            f"  $ shardio pack FOLDER OUT{flag}\n"
            f"  {seconds:.1f} s; {files}{elsewhere}"
        )
        part = Part(
            name=name,
            images=min(dataset.records, MOST_IMAGES),
            mean_bytes=dataset.size / dataset.records,
            sides=first.size,
            size=self.size or _crop(first.size),
            tiles=bool(tiles),
            shards=dataset.shards,
            pack_seconds=seconds,
        )
        fields = ("image", "label") if "label" in dataset.schema.names else ("image",)
        return _Packed(part, source, out, fields)

    def _compare(self, packed: _Packed) -> Part:
        """Read in all ways from memory, from the disk and from a limited disk; show the rates.

        Where reads cannot be held to a limit, as in most containers, there is no row of it.
        """
        warm = self._row(packed, "in memory", cold=False)
        cold = self._row(packed, "on the disk", cold=True)
        rows = [warm, cold]
        if not (cold.refused or self.refused):
            name = f"on a disk of {READS_PER_S} reads/s"
            limited = self._row(packed, name, cold=True, reads_per_s=READS_PER_S)
            if not self.refused:
                rows.append(limited)
        part = replace(packed.part, rows=tuple(rows))
        self.say(table(part))
        return part

    def _row(
        self, packed: _Packed, name: str, *, cold: bool, reads_per_s: int | None = None
    ) -> Row:
        """Read in all ways from one place. The row says why, where that cannot be done."""
        rates: dict[str, float] = {}
        requests: dict[str, int] = {}
        began = time.monotonic()
        try:
            for number in range(1 if cold else ROUNDS):
                if number and time.monotonic() - began > ROUND_S:
                    break
                for way in WAYS:
                    path = packed.source if way == "folder" else packed.out
                    with ExitStack() as stack:
                        group = self._count(stack, path, reads_per_s) if cold else None
                        members = None if group is None else group.members
                        found = self._ask(packed, "read", way=way, cold=cold, members=members)
                        if group is not None and found["images"] == packed.part.images:
                            requests[way] = group.reads()  # of a whole pass
                    rates[way] = max(rates.get(way, 0.0), found["images_per_s"])
        except FailedError as error:
            return Row(name, refused=str(error))
        return Row(name, rates, requests)

    def _count(self, stack: ExitStack, path: str, reads_per_s: int | None) -> throttle.Group | None:
        """Enter a control group where that can be: without a limit it counts."""
        if self.refused:
            return None
        try:
            group = stack.enter_context(throttle.Group(path, reads_per_s))
        except ShardioError as error:
            self.refused = str(error)
            return None
        self.counted = "those of these processes, by the kernel"
        return group

    def _ask(self, packed: _Packed, do: str, **more: Any) -> dict[str, Any]:
        """Run a function of `contest` in a process of its own."""
        request = {
            "do": f"benchmarks.demo.contest.{do}",
            "out": packed.out,
            "source": packed.source,
            "records": packed.part.images,
            "fields": packed.fields,
            "size": packed.part.size,
            "batch_size": self.batch_size,
            "workers": self.workers,
            "seconds": self.seconds,
            "state": None,
        }
        return self.host.ask(request | more, _LIMIT_S)

    def _flip(self, packed: _Packed) -> Damage | None:
        """Flip one bit of one record, in a copy, and train on it."""
        copy, records = os.path.join(self.scratch, "damaged"), packed.part.images
        number = records // 2
        key = sequence.open(packed.out)[number : number + 1].keys()[0]
        _copy_with_a_flip(packed.out, copy, number)
        near = list(range(max(0, number - 8), min(records, number + 8)))
        message = ""
        try:
            self._ask(packed, "train", log=os.devnull, out=copy, only=near, batch_size=4)
        except DamageError as error:
            message = str(error).replace(copy, "OUT")
        path = os.path.join(packed.source, file_name(key))
        found = self._ask(packed, "flip_file", path=path)
        damage = Damage(message, found["raised"], found["changed"], found["pixels"])
        self.say(damage_text(damage))
        return damage

    def _resume(self, packed: _Packed) -> Resumed | None:
        """Kill a run in the middle, go on with other workers, and compare all batches."""
        records, size = packed.part.images, self.batch_size
        steps = min(RESUMED, -(-records // size))
        if steps < 2:
            self.say("A run that is killed goes on: too few images here to show it.")
            return None
        train = partial(self._ask, packed, "train", only=list(range(min(records, steps * size))))
        whole, until, after = (os.path.join(self.scratch, f"{n}.jsonl") for n in range(3))
        workers = (self.workers, max(1, self.workers - 1))
        train(log=whole)
        with suppress(FailedError):  # as it is told to
            train(log=until, dies_after=max(1, steps * 5 // 12))
        notes = _lines(until)
        train(log=after, state=notes[-1]["state"], workers=workers[1])
        expected = [one["batch"] for one in _lines(whole)]
        parts = [one["batch"] for one in [*notes, *_lines(after)]]
        resumed = Resumed(len(expected), len(notes), workers, expected == parts)
        self.say(resumed_text(resumed))
        return resumed


class _Packed(NamedTuple):
    """A folder of images as it was packed: what is shown of it, and where it is."""

    part: Part
    source: str
    out: str
    fields: tuple[str, ...]  # that are read


def _copy_with_a_flip(out: str, copy: str, number: int) -> None:
    """Copy a dataset, with one bit of one record flipped: all other files are links."""
    dataset = manifest.load(locate(out))
    packed = sequence.open(out, decode=None)
    shard, record = packed.reader.locate(number)
    opened = packed.reader.shard(shard)
    at = opened.offset(record) + int(opened.sizes[record]) * 2 // 3
    os.mkdir(copy)
    for entry in os.scandir(out):
        if entry.is_file():
            os.symlink(os.path.abspath(entry.path), os.path.join(copy, entry.name))
    path = Path(copy, dataset.shard(shard).name)
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << 4
    path.unlink()
    path.write_bytes(data)


def _lines(path: str) -> list[dict[str, Any]]:
    """Read a file of JSON lines."""
    with open(path) as file:
        return [json.loads(line) for line in file]


# --- the images -----------------------------------------------------------------------------------


def _sample(folder: str) -> tuple[list[tuple[str, str]], int, bool]:
    """List as many images as a demo packs; nothing more of a large folder is looked at.

    Returns for each the path below the folder, and its top folder or "", as stored; the bytes of
    all; and whether there are more.
    """
    tops = sorted(e.name for e in os.scandir(folder) if e.is_dir() and e.name[0] != ".")
    groups = (_images(os.path.join(folder, top)) for top in tops or [""])
    in_turn = chain.from_iterable(zip_longest(*groups))  # one of each class
    rows: list[tuple[str, str]] = []
    size = 0
    for path in filter(None, in_turn):
        size += os.path.getsize(path)
        if size > MOST_BYTES or len(rows) == MOST_IMAGES:
            return rows, size, True
        name = from_file_name(os.path.relpath(path, folder))
        rows.append((name, name.partition("/")[0] if tops else ""))
    return rows, size, False


def _images(folder: str) -> Iterator[str]:
    """Yield the images of a folder and all below it, sorted by name."""
    for at, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            if name[0] != "." and name.rpartition(".")[2].lower() in ALL_ENDINGS:
                path = os.path.join(at, name)
                if from_file_name(path).isprintable():  # a listing is text
                    yield path


def _checked(folder: str, out: str | os.PathLike[str] | None) -> str:
    """Return the folder to be packed: of splits, that of training."""
    if not os.path.isdir(folder):
        problem = "not a folder" if os.path.exists(folder) else "no such folder"
        raise OptionError(f"{printable(folder, 4096)}: {problem}; give a folder of images")
    if out is not None:
        inside = os.path.realpath(os.fsdecode(out)) + os.sep
        if inside.startswith(os.path.realpath(folder) + os.sep):
            raise OptionError(
                f"--out {printable(os.fsdecode(out), 4096)} lies inside the images, which are only "
                "read: give another place"
            )
        return folder
    train = os.path.join(folder, "train")
    folder = train if os.path.isdir(train) else folder
    if next(_images(folder), None) is None:
        raise SourceError(f"{printable(folder, 4096)}: no images in it")
    return folder


def _large(folder: str) -> bool:
    """Return True if most of the first images are JPEGs so large that crops gain by tiles."""
    paths = list(islice(_images(folder), 8))
    large = 0
    for path in paths:
        data = Path(path).read_bytes()
        with suppress(DecodeError):
            wide, high = decode.decode(data).size
            large += data.startswith(b"\xff\xd8\xff") and wide * high >= LARGE
    return 2 * large > len(paths)


def _crop(sides: tuple[int, int]) -> int:
    """Return the pixels of crops: as bench has it, but less where that were mostly enlarging."""
    return 224 if max(sides) >= 256 else min(112, min(sides))


def _check_room(out: str, size: int) -> None:
    """Raise OptionError if shards of `size` bytes do not fit on the disk of `out`."""
    at = os.path.abspath(out)
    while not os.path.exists(at):
        at = os.path.dirname(at)
    free = shutil.disk_usage(at).free
    if size * 1.2 > free:
        raise OptionError(
            f"the shards need about {show_size(size * 1.2)}, and {printable(at, 4096)} has "
            f"{show_size(free)} left: give a larger place by --out DIR"
        )


@contextmanager
def _scratch() -> Iterator[str]:
    """Give a temporary folder, on a disk where there is one: a RAM disk is never cold.

    A kill (SIGTERM) is an exception meanwhile, so that the folder goes.
    """
    places = [tempfile.gettempdir(), "/var/tmp", os.getcwd()]
    for place in places:
        try:
            throttle.disk(place)
        except (ShardioError, OSError):
            continue
        if os.access(place, os.W_OK):
            break
    else:
        place = places[0]
    with ExitStack() as undo:
        with suppress(ValueError):  # not the main thread
            before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
            undo.callback(signal.signal, signal.SIGTERM, before)
        yield undo.enter_context(tempfile.TemporaryDirectory(prefix="shardio-demo-", dir=place))


# --- as text --------------------------------------------------------------------------------------


def _heading(batch_size: int, workers: int) -> str:
    """Return the first paragraph: what is compared, and by which programs."""
    pil = decode.pil_info()
    decoder = f"{pil['name']} {pil['version']}"
    core = "built" if native.core is not None else f"not built ({native.missing})"
    lines = [
        f"Batches of {batch_size}, shuffled, decoded, cropped at random and mirrored; "
        f"{show_count(workers, 'worker')} each.",
        f"  image folder   files, {decoder}, torch's DataLoader: what one writes without a library",
        "  DataLoader     shards, in the same DataLoader",
        f"  ShardLoader    shards, as recommended; compiled core: {core}",
    ]
    if pil["name"] == "pillow-simd":
        lines.append("(With Pillow, which most have, the image folder is slower than here.)")
    load = machine.load()
    if load is not None and load > BUSY * machine.cores():
        lines.append("(Other programs keep the processors busy: a quiet machine tells more.)")
    return "\n".join(lines)


def table(part: Part) -> str:
    """Return the rows of a part, for a terminal."""
    lines = [
        [f"images/s, {part.sides[0]} x {part.sides[1]} -> {part.size} px", "image folder",
         "DataLoader", "ShardLoader", "gain"],
    ]  # fmt: skip
    notes = []
    for row in part.rows:
        if row.refused:
            lines.append([row.name, "-", "-", "-", "not measured"])
            notes.append(f"  {row.name}: {row.refused}")
            continue
        rates = [f"{row.images_per_s[way]:,.0f}" for way in WAYS]
        lines.append([row.name, *rates, gain_text(row.gain)])
        if row.requests:
            counts = [f"{row.requests[way]:,}" if way in row.requests else "-" for way in WAYS]
            lines.append(["  reads of the disk", *counts, fewer_text(row)])
    shown = [f"  {line}" for line in text.table(lines, left=(0,))]
    return "\n".join([*shown, *dict.fromkeys(notes)])


def gain_text(gain: float | None) -> str:
    """Return a ratio in words."""
    if gain is None:
        return ""
    if abs(gain - 1) <= EQUAL:
        return "none"
    return f"{gain:.2f}x, slower" if gain < 1 else f"{gain:.1f}x"


def fewer_text(row: Row) -> str:
    """Return how many times fewer reads ShardLoader asks of the disk than the image folder."""
    if not {"folder", "shardloader"} <= set(row.requests):
        return ""
    fewer = row.requests["folder"] / max(1, row.requests["shardloader"])
    return f"{fewer:,.0f}x fewer" if fewer >= 1.5 else ""


def damage_text(damage: Damage) -> str:
    """Return the paragraph on a flipped bit."""
    quoted = "\n".join(f"  > {line}" for line in damage.message.splitlines())
    file = f"an error: {damage.file_error}"
    if damage.file_error is None:
        file = f"no error; {damage.file_changed:,} of {damage.file_pixels:,} pixels are others"
    return (
        f"One bit flipped on the disk, in a copy.\n  image folder, PIL: {file}\n"
        f"  shardio, in the middle of training:\n{quoted or '  NOT FOUND'}"
    )


def resumed_text(resumed: Resumed) -> str:
    """Return the paragraph on a run that was killed."""
    before, after = resumed.workers
    verdict = "all equal, byte for byte" if resumed.equal else "NOT EQUAL"
    return (
        f"A run killed (SIGKILL) after batch {resumed.killed_after} of {resumed.batches}, with "
        f"{show_count(before, 'worker')}, and gone on with {after}:\n  the {resumed.batches} "
        f"batches of a run that nobody killed, in their order: {verdict}."
    )
