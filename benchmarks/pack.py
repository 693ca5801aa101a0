"""Packing 50,000 small files, against `tar cf` + sync: seconds, and how much larger than the files.

All rounds read from a warm page cache, remove the output and flush the device before the next. A
run of the same command on a folder of one file is its start-up, printed apart and taken off.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from . import data, rivals
from .harness import ROOT, EntryProcess, Result, interleave, median

TAR = "tar cf + sync"
SMALL = "4MiB"  # --shard-size of the targets: eleven shards, so that two jobs share the work


def run(source: data.Data, result: Result) -> None:
    rounds = 2 if source.quick else 7
    folder = source.cifar()
    files = data.listing(folder)
    payload = data.payload(files)
    result.data(records=len(files), payload_bytes=payload, folder="CIFAR-10, JPEG")
    one = source.scratch / "one" / "class"
    one.mkdir(parents=True)
    (one / "image.jpg").write_bytes(Path(files[0][0]).read_bytes())
    out = source.scratch / "out"
    entries: dict[str, Callable[[], dict[str, Any]]] = {}
    for jobs in (1, 2):
        command = [
            *(sys.executable, "-m", "shardio", "pack", "--quiet"),
            *("--shard-size", SMALL, "--jobs", str(jobs)),
        ]
        entries[f"start-up, --jobs {jobs}"] = partial(_timed, command, one.parent, out)
        entries[f"shardio, --jobs {jobs}"] = partial(_timed, command, folder, out)
    shell = ["sh", "-c", 'tar cf "$1" -C "$0" . && sync "$1"']
    entries[TAR] = partial(_timed, shell, folder, out)
    others = {
        name: EntryProcess(function, folder=str(folder))
        for name, function in (
            ("LMDB", "rivals:lmdb_writer"),
            ("WebDataset's tar", "pack:webdataset"),
        )
    }
    if source.rivals:
        others["LitData, 2 workers"] = rivals.litdata_process(
            "rivals:optimize", source.scratch, folder=str(folder)
        )
    for name, process in others.items():
        entries[name] = partial(_asked, process, out)
    try:
        for entry in entries.values():
            entry()  # the warm-up
        measured = interleave(entries, rounds)
    finally:
        for process in others.values():
            process.close()
    result.raw("seconds", measured)
    table = {name: found for name, found in measured.items() if not name.startswith("start-up")}
    start = {}
    for jobs in (1, 2):
        name = f"shardio, --jobs {jobs}"
        start[name] = median(measured[f"start-up, --jobs {jobs}"], "seconds")
        table[name] = [
            one | {"seconds": one["seconds"] - start[name], "startup": start[name]}
            for one in table[name]
        ]
    columns = {"seconds": "s", "startup": "start-up, s", "bytes": "bytes"}
    result.table(
        f"Packing {len(files):,} files of 0.9 KB, start-up taken off", table, columns,
        versus=TAR, by="seconds",
    )  # fmt: skip
    for jobs, limit in ((1, 2.5), (2, 1.6)):
        found = median(table[f"shardio, --jobs {jobs}"], "seconds") / median(table[TAR], "seconds")
        result.target(f"packing, {jobs} jobs, of tar's time", found, limit)
    small = _overhead(folder, out, "--shard-size", SMALL)
    result.target(f"overhead at 0.9 KB, shards of {SMALL}", small, 6.5, unit="%")
    result.target("overhead at 0.9 KB, default shards", _overhead(folder, out), 6.5, unit="%")
    photos = source.photos(500)
    result.target("overhead at 110 KB", _overhead(photos, out), 0.2, unit="%")


def _timed(command: list[str], folder: Path, out: Path) -> dict[str, Any]:
    """Run `command FOLDER OUT`; then remove OUT, and flush what the next run would pay for."""
    os.sync()
    began = time.perf_counter()
    subprocess.run([*command, str(folder), str(out)], check=True, cwd=ROOT)
    return _finished(time.perf_counter() - began, out)


def _asked(process: EntryProcess, out: Path) -> dict[str, Any]:
    os.sync()
    return _finished(process.round(out=str(out))["seconds"], out)


def _finished(seconds: float, out: Path) -> dict[str, Any]:
    size = data.folder_bytes(out) if out.is_dir() else out.stat().st_size
    data.remove(out, f"{out}-lock")
    return {"seconds": seconds, "bytes": size}


def _overhead(folder: Path, out: Path, *options: str) -> float:
    data.pack(folder, out, *options)
    payload = data.payload(data.listing(folder))
    percent = (data.folder_bytes(out) / payload - 1) * 100
    data.remove(out)
    return percent


# --- an entry, without start-up ---------------------------------------------------------------


def webdataset(folder: str) -> Callable[..., dict[str, Any]]:
    """What its TarWriter writes: NAME.jpg and NAME.cls for each sample, by tarfile; one shard."""

    def one_round(out: str) -> dict[str, Any]:
        began = time.perf_counter()
        with open(out, "wb") as file:
            with tarfile.open(fileobj=file, mode="w") as tar:
                for i, (path, label) in enumerate(data.listing(folder)):
                    image = Path(path).read_bytes()
                    for name, content in ((f"{i:08d}.jpg", image), (f"{i:08d}.cls", b"%d" % label)):
                        member = tarfile.TarInfo(name)
                        member.size = len(content)
                        tar.addfile(member, BytesIO(content))
                    tar.members = []
            file.flush()
            os.fsync(file.fileno())
        return {"seconds": time.perf_counter() - began}

    return one_round
