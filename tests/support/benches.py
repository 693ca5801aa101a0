"""Rows and results of `bench` that nobody measured."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from shardio.storage.options import Storage
from shardio.tuning import bench_process
from shardio.tuning.bench import Bench, request_of
from shardio.tuning.bench_row import Row

DATALOADER = Row("DataLoader", 2, 1, True, False)


MEMORY = 8 << 30


OPTIONS = bench_process.written(Storage())


def plan(cores: float = 8.0, fields: Any = ("image",), quick: bool = False) -> Bench:
    return Bench(
        path="out/",
        root=None,
        records=1000,
        record_bytes=1e5,
        measured_records=1000,
        batch_size=64,
        size=224,
        raw=False,
        fields=fields,
        cores=cores,
        load_before=0.0,
        seconds=1.0,
        quick=quick,
        jpegs=True,
    )


def request_for(photos: Path, **options: Any) -> dict[str, Any]:
    made = replace(plan(), path=str(photos), records=96, measured_records=96, batch_size=8, size=16)
    one = Row("DataLoader", 0, 1, options.pop("decodes", True), options.pop("cold", False))
    request = request_of(made, "measure", one, seconds=0.0, limit_s=60.0, parts=1)
    return request | {"storage": OPTIONS} | options


BUSY = replace(
    DATALOADER, images_per_s=1000.0, mb_per_s=100.0, cpu_ms=2.0, cores_busy=2.0, pass_batches=99
)
