"""Packing straight from archives, against packing the folder that was unpacked: seconds.

All rounds read from a warm page cache, remove what they wrote, and flush the device before the
next. "unpacked first" unpacks the archive by `tar -xf` into a new folder, and packs that; the files
that it takes are in the table. On the disk with a limit, which is the kernel's own (limits.py),
nothing of the source is in memory, and requests are counted. Start-up is in all times. Also the
headers that are listed in a second, from memory, by the CPU time of one process. Of a packing, the
CPU time of all its processes tells more than the clock where others use the machine.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from shardio.errors import StorageError

from . import data
from .cold_rounds import drop
from .harness import ROOT, Result, interleave, median, show
from .throttle import Group

FOLDER, LIMIT = "the folder", 1.1
REQUESTS = 3_000  # a second, as cloud disks give by default
PACK = (sys.executable, "-m", "shardio", "pack", "--quiet", "--jobs", "2")


def run(source: data.Data, result: Result) -> None:
    rounds = 2 if source.quick else 5
    photos = source.photos(500 if source.quick else 10_000)
    for name, folder in (("photographs", photos), ("files of 0.9 KB", source.cifar())):
        files = data.listing(folder)
        what = f"{len(files):,} {name}"
        made = _archives(folder, source.scratch / "archives" / folder.name)
        out = source.scratch / "out"
        entries: dict[str, Callable[[], dict[str, Any]]] = {
            FOLDER: partial(_timed, [*PACK, str(folder), str(out)], out, 0),
            **{
                kind: partial(_timed, [*PACK, str(path), str(out)], out, 0)
                for kind, path in made.items()
            },
        }
        script = 'mkdir "$2" && tar -xf "$1" -C "$2" && shift 2 && exec "$@"'
        unpacked = source.scratch / "unpacked"
        command = ["sh", "-c", script, "sh", str(made["tar"]), str(unpacked), *PACK]
        entries["tar, unpacked first"] = partial(
            _timed, [*command, str(unpacked), str(out)], out, len(files), unpacked
        )
        entries[FOLDER]()  # the warm-up
        measured = interleave(entries, rounds)
        result.raw(f"seconds, {what}", measured)
        result.table(
            f"Packing {what}, {data.payload(files) / 1e6:,.0f} MB", measured,
            {"seconds": "s", "cpu": "CPU s", "files": "files beside OUT", "bytes": "bytes of OUT"},
            versus=FOLDER, by="seconds",
        )  # fmt: skip
        for kind in ("tar", "zip", "zip, stored"):
            share = median(measured[kind], "seconds") / median(measured[FOLDER], "seconds")
            result.target(f"{kind} of {what}, of the folder's time", share, LIMIT)
        unlimited = {name: path for name, path in made.items() if "unpacked" not in name}
        _limited(source, result, what, {FOLDER: folder, **unlimited})
        for kind in ("tar", "zip"):
            rates = [{"rate": _headers(made[kind], len(files))} for _ in range(rounds)]
            result.raw(f"headers/s, {kind} of {what}", {kind: rates})
            rate = median(rates, "rate")
            show(f"  {kind} of {what}: {rate:,.0f} headers/s")
            result.target(f"headers/s, {kind} of {what}", rate, -200_000, unit="/s")
        data.remove(source.scratch / "archives" / folder.name)


def _limited(source: data.Data, result: Result, what: str, entries: dict[str, Path]) -> None:
    """Pack from a disk that is held to few requests a second."""
    out = source.scratch / "out"
    try:
        with Group(source.scratch, REQUESTS) as group:

            def cold(path: Path) -> dict[str, Any]:
                drop(path)
                before = group.reads()
                enter = ["sh", "-c", 'echo 0 > "$1" && shift && exec "$@"', "sh", group.members]
                found = _timed([*enter, *PACK, str(path), str(out)], out, 0)
                return {"seconds": found["seconds"], "reads": group.reads() - before}

            ways = {name: partial(cold, path) for name, path in entries.items()}
            measured = interleave(ways, 1 if source.quick else 3)
    except StorageError as error:
        result.note(f"A disk with a limit was not measured: {error}")
        return
    title = f"{what}, cold, on a disk of {REQUESTS:,} requests/s"
    result.raw(title, measured)
    result.table(
        f"Packing {title}", measured, {"seconds": "s", "reads": "requests"},
        versus=FOLDER, by="seconds",
    )  # fmt: skip


def _archives(folder: Path, made: Path) -> dict[str, Path]:
    """Make the archives of a folder, in the order of the names."""
    made.mkdir(parents=True)
    found = {
        "tar": made / "x.tar",
        "zip": made / "x.zip",
        "zip, stored": made / "stored.zip",
        "tgz, unpacked by pack": made / "x.tgz",
    }
    subprocess.run(["tar", "--sort=name", "-cf", found["tar"], "-C", folder, "."], check=True)
    gzip = ["tar", "--sort=name", "-czf", found["tgz, unpacked by pack"], "-C", folder, "."]
    subprocess.run(gzip, check=True)
    program = (
        "import os, sys, zipfile\n"
        "with zipfile.ZipFile(sys.argv[2], 'w', int(sys.argv[3]), compresslevel=6) as out:\n"
        "    for folder, _, names in sorted(os.walk(sys.argv[1])):\n"
        "        for name in sorted(names):\n"
        "            path = os.path.join(folder, name)\n"
        "            out.write(path, os.path.relpath(path, sys.argv[1]))\n"
    )
    for kind, way in (("zip", zipfile.ZIP_DEFLATED), ("zip, stored", zipfile.ZIP_STORED)):
        command = [sys.executable, "-c", program, folder, found[kind], str(way)]
        subprocess.run(command, check=True)
    return found


def _timed(command: list[str], out: Path, files: int, *others: Path) -> dict[str, Any]:
    """Run a command; then remove OUT, and flush what the next run would pay for."""
    os.sync()
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, cwd=ROOT, stderr=subprocess.DEVNULL)
    seconds, used = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    size = data.folder_bytes(out)
    data.remove(out, *others)
    return {"seconds": seconds, "cpu": cpu, "files": files, "bytes": size}


def _headers(path: Path, count: int) -> float:
    """Return the headers of an archive that are listed in a second of CPU time: of 100,000.

    ImageNet has 1.28 million of them. A smaller archive is listed again and again.
    """
    program = (
        "import sys, time\n"
        "from shardio.packing.sources.archives.extent import ExtentReader, extent_of\n"
        "from shardio.packing.sources.archives.tar_members import list_tar\n"
        "from shardio.packing.sources.archives.zip_members import list_zip\n"
        "extent = extent_of(sys.argv[1].encode())\n"
        "file = extent.location.open(extent.name)\n"
        "list_members = list_zip if sys.argv[1].endswith('.zip') else list_tar\n"
        "count = int(sys.argv[2])\n"
        "times = -(-100_000 // count)\n"
        "began = time.process_time()\n"
        "for _ in range(times):\n"
        "    assert len(list_members(ExtentReader(file, extent), extent.shown).paths) == count\n"
        "print((time.process_time() - began) / times)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, path, str(count)],
        check=True, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    return count / float(done.stdout)
