"""`shardio plan`, and one of 1,000 parts: seconds and memory until its first shard is begun.

10^7 rows of a CSV, which names no files, and 10^6 files in 1,000 folders of this disk. A part under
a plan reads its piece of the plan; one without lists the source, and writes the journal, as the
first of all parts. Each runs in a new process. 10^8 records are arithmetic: so many times as many
of these. The files are also packed as a whole, once, by two processes.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from . import data
from .harness import EntryProcess, Result, interleave, median

PARTS = 1_000
FOLDERS = 1_000
MANY = 10**8
JPEG = b"\xff\xd8\xff\xe0" + bytes(96)


def run(source: data.Data, result: Result) -> None:
    rounds = 1 if source.quick else 3
    rows, files = (2_000, 2_000) if source.quick else (10**7, 10**6)
    sources = {
        f"{rows:,} rows": (_rows(source.scratch / "rows.csv", rows), rows),
        f"{files:,} files": (_files(source.scratch / "files", files), files),
    }
    result.data(rows=rows, files=files, parts=PARTS)
    for name, (path, records) in sources.items():
        out = source.scratch / "out"
        entries = {
            "plan": partial(_entry, "plan", path, out, records),
            "part, planned": partial(_entry, "part", path, out, records),
            "part that lists": partial(_entry, "part", path, source.scratch / "alone", records),
        }
        _entry("plan", path, out, records)  # for the parts that come before the first plan
        measured = interleave(entries, rounds)
        data.remove(out)
        result.raw(name, measured)
        columns = {
            "seconds": "s",
            "memory_mb": "memory, MB",
            "bytes_record": "bytes a record",
            "journal_bytes": "journal, bytes a record",
            "many_s": "10^8: s",
            "many_gb": "10^8: memory, GB",
        }
        result.table(name, measured, columns, versus="part that lists", by="seconds")
        planned, lists = measured["part, planned"], measured["part that lists"]
        for key, unit in (("seconds", "s"), ("memory_mb", "MB")):
            most = median(lists, key) / 10
            result.target(
                f"a part under a plan, {name}: {key}", median(planned, key), most, unit=unit
            )
    _pack(source, result, *sources[f"{files:,} files"])


def _pack(source: data.Data, result: Result, path: Path, files: int) -> None:
    """Pack all files: what memory it takes, and what is written beside their bytes."""
    out = source.scratch / "packed"
    name = f"packing {files:,} files"
    measured = interleave({"pack": partial(_entry, "whole", path, out, files)}, 1)
    data.remove(out)
    result.raw(name, measured)
    columns = {"seconds": "s", "bytes_file": "memory, bytes a file", "beside": "written beside"}
    result.table(name, measured, columns, by="seconds")
    result.target(f"{name}: memory", median(measured["pack"], "bytes_file"), 200, unit="bytes")
    result.target(f"{name}: written beside", median(measured["pack"], "beside"), 200, unit="bytes")


def _rows(path: Path, count: int) -> Path:
    with open(path, "w") as file:
        file.write("id,label,caption\n")
        file.writelines(f"img-{n:010d},class{n % 1000:04d},the text of {n}\n" for n in range(count))
    return path


def _files(root: Path, count: int) -> Path:
    for folder in range(FOLDERS):
        inner = root / f"class{folder:04d}"
        inner.mkdir(parents=True)
        for number in range(count // FOLDERS):
            (inner / f"{folder:04d}_{number:08d}.jpg").write_bytes(JPEG)
    return root


def _entry(what: str, path: Path, out: Path, records: int) -> dict[str, Any]:
    """Measure once, in a new process."""
    if what == "plan" or out.name == "alone":
        shutil.rmtree(out, ignore_errors=True)
    options = {"path": str(path), "out": str(out), "records": records}
    with EntryProcess(f"plan:{what}", **options) as entry:
        return entry.round()


# --- entries --------------------------------------------------------------------------------------


def plan(path: str, out: str, records: int) -> Callable[..., dict[str, Any]]:
    import shardio
    from shardio.packing import pack as _  # noqa: F401 - importing it is not measured

    options = shardio.PlanOptions(max_records=max(1, records // PARTS))
    return partial(_measured, partial(shardio.plan, path, out, plan=options), out, records)


def part(path: str, out: str, records: int) -> Callable[..., dict[str, Any]]:
    import shardio
    from shardio.packing import build_shard

    class Begun(BaseException):
        pass

    def begin(*_: object) -> None:
        raise Begun

    def until_a_shard_is_begun() -> None:
        with contextlib.suppress(Begun):
            shardio.pack(path, out, jobs=1, plan=options)

    setattr(build_shard, "ShardWriter", begin)  # noqa: B010
    options = shardio.PlanOptions(part=(PARTS // 2, PARTS), max_records=max(1, records // PARTS))
    return partial(_measured, until_a_shard_is_begun, out, records)


def whole(path: str, out: str, records: int) -> Callable[..., dict[str, Any]]:
    import shardio
    from shardio.packing import pack as _  # noqa: F401 - importing it is not measured

    def once() -> dict[str, Any]:
        before, started = _peak_bytes(), time.perf_counter()
        shardio.pack(path, out, jobs=2)
        seconds = time.perf_counter() - started
        # Each process that packs has what it inherited, and its own.
        most = max(_peak_bytes(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
        written = sum(one.stat().st_size for one in Path(out).iterdir())
        return {
            "seconds": seconds,
            "bytes_file": (most - before) / records,
            "beside": written / records - len(JPEG),
        }

    return once


def _measured(call: Callable[[], object], out: str, records: int) -> dict[str, Any]:
    before = _peak_bytes()
    started = time.perf_counter()
    call()
    seconds, used = time.perf_counter() - started, _peak_bytes() - before
    times = MANY / records
    lists = used > 10e6  # of what is large, all grows with the records
    return {
        "seconds": seconds,
        "memory_mb": used / 1e6,
        "bytes_record": used / records if lists else None,
        "journal_bytes": os.path.getsize(os.path.join(out, ".shardio-plan")) / records,
        "many_s": seconds * times if lists else None,
        "many_gb": used * times / 1e9 if lists else None,
    }


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
