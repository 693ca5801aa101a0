"""Formats of others, read in place: indexing and reading, beside each format's own reader.

Files of each format are made by its own tool where that is there (benchmarks/setup_rivals), else
by `shardio export`; RecordIO always, since MXNet installs nowhere any more. Indexing: one process,
from the page cache, into an empty folder. Reading: warm, in order, one process each, taking turns;
the image's bytes and the label, by `shardio.open`, by ShardDataset (shuffle=False), and by the
format's own reader over the same files. Ours checks every record; of the others only tf.data does.
"""

from __future__ import annotations

import glob
import importlib.abc
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from . import data, spelling
from .harness import (
    RIVALS,
    ROOT,
    EntryProcess,
    Result,
    contest,
    interleave,
    median,
    ratio,
    rival_versions,
    show,
)
from .raw import Round, _rounds

RECORD, LMDB, TAR, PLAIN_TAR = "record", "lmdb", "webdataset", "webdataset, plain tar"
TFRECORD, MDS, RECORDIO, CAFFE, PARQUET = "tfrecord", "mds", "recordio", "lmdb-caffe", "parquet"


SIZES = ("0.9 KB", "110 KB")


class Rival(NamedTuple):
    """What reads a format, and writes it, in the rivals' environment."""

    package: str
    read: str  # its function here
    write: str = ""  # the same; none: `shardio export` writes
    most: float | None = None  # of its time, that ours may take
    called: str = ""  # in tables


FORMATS: dict[str, Rival | None] = {
    RECORD: None,
    LMDB: Rival("lmdb", "by_cursor", called="python-lmdb, cursor"),
    TAR: Rival("webdataset", "by_webdataset", "write_webdataset", 0.5, "webdataset"),
    PLAIN_TAR: Rival("webdataset", "by_webdataset", "", 0.5, "webdataset"),
    TFRECORD: Rival("tensorflow-cpu", "by_tf_data", "write_tfrecord", 0.5, "tf.data"),
    MDS: Rival("mosaicml-streaming", "by_streaming", "write_mds", 0.5, "mosaicml-streaming"),
    RECORDIO: None,
    CAFFE: Rival("lmdb", "by_cursor", called="python-lmdb, cursor"),
    PARQUET: Rival("pyarrow", "by_pyarrow", "write_parquet", 1.3, "pyarrow"),
}


def run(source: data.Data, result: Result) -> None:
    rounds = 3 if source.quick else 5
    few = 200 if source.quick else 3_000
    there = {name: version for name, version in rival_versions().items() if version}
    if not source.rivals:
        there = {}
    for package in sorted({rival.package for rival in FORMATS.values() if rival}):
        if package not in there:
            result.note(f"{package} was not measured: it is not in the rivals' environment")
    result.note("MXNet's own reader was not measured: its last wheels need Python 3.8 and numpy 1")
    for size in SIZES:
        folder = source.cifar() if size == "0.9 KB" else source.photos(few)
        files = data.listing(folder)
        payload = data.payload(files)
        result.data(**{size: {"records": len(files), "payload_bytes": payload}})
        made = _make(source, folder, size, set(there), result)
        _index(made, size, rounds, result)
        count = {"records": len(files), "payload": payload}
        _read(made, size, count, set(there), rounds, result)
        data.remove(*made.values(), *(_index_of(path) for path in made.values()))


# --- files ----------------------------------------------------------------------------------------


def _make(
    source: data.Data, folder: Path, size: str, there: set[str], result: Result
) -> dict[str, Path]:
    """The same images in each format, a folder each; those that cannot be made are left out."""
    made: dict[str, Path] = {}
    writers: dict[str, str] = {}
    for name, rival in FORMATS.items():
        out = source.scratch / name.replace(", ", "-").replace(" ", "-")
        show(f"  {size}: {name}")
        if name in (RECORD, LMDB):
            data.pack(folder, out, "--format", name)
            writers[name] = "shardio pack"
        elif rival and rival.write and rival.package in there:
            with EntryProcess(f"formats:{rival.write}", python=RIVALS, folder=str(folder)) as one:
                one.round(out=str(out))
            writers[name] = rival.package
        elif name == PARQUET:
            if importlib.util.find_spec("pyarrow") is None:
                result.note("parquet was left out: pyarrow is not installed")
                continue
            write_parquet(str(folder))(str(out))
            writers[name] = "pyarrow"
        else:
            format = TAR if name == PLAIN_TAR else name
            _shardio("export", made[RECORD], out, "--format", format)
            writers[name] = "shardio export"
        made[name] = out
    result.data(**{f"writers, {size}": writers})
    return made


def _shardio(*arguments: Any) -> None:
    command = [sys.executable, "-m", "shardio", *map(str, arguments), "--quiet"]
    subprocess.run(command, check=True, cwd=ROOT)


def _index_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.idx")


def _labelled(folder: str) -> Iterator[tuple[str, bytes, int]]:
    """Key, image and label of each file."""
    for path, label in data.listing(folder):
        key = os.path.splitext(os.path.relpath(path, folder))[0]
        yield key, Path(path).read_bytes(), label


def write_webdataset(folder: str) -> Round:
    """(these four: entries of the rivals' environment)"""
    import webdataset

    def one_round(out: str) -> dict[str, Any]:
        os.makedirs(out)
        with webdataset.ShardWriter(f"{out}/%05d.tar", maxsize=256 << 20, verbose=0) as writer:
            for key, image, label in _labelled(folder):
                writer.write({"__key__": key, "jpg": image, "cls": label})
        return {}

    return one_round


def write_tfrecord(folder: str) -> Round:
    import tensorflow as tf

    def one_round(out: str) -> dict[str, Any]:
        os.makedirs(out)
        train = tf.train
        with tf.io.TFRecordWriter(f"{out}/00000.tfrecord") as writer:
            for _, image, label in _labelled(folder):
                features = {
                    "image/encoded": train.Feature(bytes_list=train.BytesList(value=[image])),
                    "image/class/label": train.Feature(int64_list=train.Int64List(value=[label])),
                }
                example = train.Example(features=train.Features(feature=features))
                writer.write(example.SerializeToString())
        return {}

    return one_round


def write_mds(folder: str) -> Round:
    streaming = _streaming()

    def one_round(out: str) -> dict[str, Any]:
        columns = {"image": "bytes", "label": "int"}
        with streaming.MDSWriter(out=out, columns=columns) as writer:
            for _, image, label in _labelled(folder):
                writer.write({"image": image, "label": label})
        return {}

    return one_round


def write_parquet(folder: str) -> Round:
    """As Hugging Face's datasets write images: structs, row groups of 100, or 1,000 small ones."""
    import pyarrow as pa
    from pyarrow import parquet

    def one_round(out: str) -> dict[str, Any]:
        os.makedirs(out)
        keys, images, labels = zip(*_labelled(folder), strict=True)
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        pairs = [{"bytes": image, "path": key} for key, image in zip(keys, images, strict=True)]
        table = pa.table({"image": pa.array(pairs, kind), "label": pa.array(labels, pa.int64())})
        rows = 1_000 if sum(map(len, images)) < 8_192 * len(images) else 100
        # Without dictionaries: of the photographs, six are copies of one, as no real ones are.
        parquet.write_table(
            table, f"{out}/00000.parquet", row_group_size=rows, use_dictionary=False
        )
        return {}

    return one_round


# --- indexing -------------------------------------------------------------------------------------


def _index(made: dict[str, Path], size: str, rounds: int, result: Result) -> None:
    entries = {
        name: EntryProcess("formats:indexing", path=str(path), out=str(_index_of(path)))
        for name, path in made.items()
        if name not in (RECORD, LMDB)
    }
    measured = contest(entries, rounds)
    result.raw(f"indexing, {size}", measured)
    columns = {"us": "us a record", "mb": "MB/s of the files", "cpu_us": "CPU, us a record"}
    result.table(f"Indexing, warm, one process, {size}", measured, columns)
    for name, found in measured.items():
        if size == "110 KB":
            speed = median(found, "mb")
            result.target(f"indexing {name}, {size}", speed, -500, unit="MB/s")
        elif name in (TAR, PLAIN_TAR, TFRECORD):
            limit = 15 if name == TFRECORD else 12
            result.target(f"indexing {name}, {size}", median(found, "us"), limit, unit="us")


def indexing(path: str, out: str) -> Round:
    from shardio.packing.index import index

    def one_round() -> dict[str, Any]:
        shutil.rmtree(out, ignore_errors=True)
        began, cpu = time.perf_counter(), time.process_time()
        found = index(path, out=out, jobs=1)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        return {
            "us": seconds / found.records * 1e6,
            "mb": found.bytes / seconds / 1e6,
            "cpu_us": cpu / found.records * 1e6,
        }

    return one_round


# --- reading --------------------------------------------------------------------------------------


def _read(
    made: dict[str, Path],
    size: str,
    count: dict[str, int],
    there: set[str],
    rounds: int,
    result: Result,
) -> None:
    processes: list[EntryProcess] = []
    entries: dict[str, Callable[[], dict[str, Any]]] = {}
    for name, path in made.items():
        indexed = path if name in (RECORD, LMDB) else _index_of(path)
        ours = EntryProcess("formats:ours", path=str(indexed), root=str(path), **count)
        processes.append(ours)
        for way in ("open", "dataset"):
            entries[f"{name}: {way}"] = partial(ours.round, way=way)
        rival = FORMATS[name]
        if rival and rival.package in there:
            function = f"formats:{rival.read}"
            processes.append(EntryProcess(function, python=RIVALS, path=str(path), **count))
            entries[f"{name}: own"] = processes[-1].round
    try:
        for entry in entries.values():
            entry()
        measured = interleave(entries, rounds)
    finally:
        for one in processes:
            one.close()
    result.raw(f"reading, {size}", measured)
    rows: dict[str, list[dict[str, Any]]] = {}
    for name in made:
        rival = FORMATS[name]
        title = f"{name} ({rival.called})" if rival and f"{name}: own" in measured else name
        rows[title] = [
            {
                way: measured[f"{name}: {way}"][i]["us"]
                for way in ("open", "dataset", "own")
                if f"{name}: {way}" in measured
            }
            for i in range(rounds)
        ]
        for one in rows[title]:
            for way, share in (("open", "opened"), ("dataset", "streamed")):
                one[share] = one[way] / one["own"] if "own" in one else None
    columns = {
        "open": "shardio.open, us",
        "dataset": "ShardDataset, us",
        "own": "own reader, us",
        "opened": "open / own",
        "streamed": "ShardDataset / own",
    }
    result.table(f"Reading, warm, in order, {size}, us a record", rows, columns)
    for name in made:
        rival = FORMATS[name]
        if rival and rival.most is not None:
            most = 0.1 if name in (TAR, PLAIN_TAR) and size == "0.9 KB" else rival.most
            found = ratio(measured, f"{name}: open", f"{name}: own", "us")
            result.target(f"reading {name}, {size}, of the time of {rival.called}", found, most)
    found = ratio(measured, f"{LMDB}: open", f"{RECORD}: open", "us")
    result.target(f"reading our LMDB, {size}, of the time of record shards", found, 1.5)


def ours(path: str, root: str, records: int, payload: int) -> Round:
    import shardio
    from shardio import ShardDataset

    def opened() -> Iterable[Any]:
        return shardio.open(path, decode=None, **spelling.grouped(shardio.open, root=root))

    def dataset() -> Iterable[Any]:
        elsewhere = spelling.grouped(ShardDataset, root=root)
        return ShardDataset(path, decode=None, shuffle=False, batch_size=None, **elsewhere)

    ways = {
        "open": _rounds(opened, records, payload, "image"),
        "dataset": _rounds(dataset, records, payload, "image"),
    }
    return lambda way: ways[way]()


def by_webdataset(path: str, records: int, payload: int) -> Round:
    """Samples as it groups them, not decoded. (this one and those below: by rivals)"""
    import webdataset

    shards = _files(path, "*.tar")
    return _rounds(
        lambda: webdataset.WebDataset(shards, shardshuffle=False), records, payload, "jpg"
    )


def by_tf_data(path: str, records: int, payload: int) -> Round:
    """As its guide does it: parsing in parallel, prefetching, both as it sees fit."""
    import tensorflow as tf

    spec: dict[str, Any] | None = None
    names = ("image/encoded", "image/class/label")
    files = _files(path, "*.tfrecord")
    first = next(tf.data.TFRecordDataset(files).take(1).as_numpy_iterator())
    if b"image/encoded" not in first:  # of `shardio export`
        names = ("image", "label")
    spec = {
        names[0]: tf.io.FixedLenFeature([], tf.string),
        names[1]: tf.io.FixedLenFeature([], tf.int64),
    }

    def opened() -> Iterable[Any]:
        parsed: Any = tf.data.TFRecordDataset(files).map(
            lambda record: tf.io.parse_single_example(record, spec),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
        found: Iterable[Any] = parsed.prefetch(tf.data.AUTOTUNE).as_numpy_iterator()
        return found

    return _rounds(opened, records, payload, names[0])


def by_streaming(path: str, records: int, payload: int) -> Round:
    """batch_size decides how far it reads ahead: with 1 it waits 0.9 ms a record."""
    streaming = _streaming()

    def opened() -> Iterable[Any]:
        found: Iterable[Any] = streaming.StreamingDataset(local=path, shuffle=False, batch_size=256)
        return found

    return _rounds(opened, records, payload, "image")


def by_pyarrow(path: str, records: int, payload: int) -> Round:
    from pyarrow import parquet

    files = _files(path, "*.parquet")

    def opened() -> Iterable[Any]:
        for file in files:
            for batch in parquet.ParquetFile(file).iter_batches():
                images = batch.column("image").field("bytes").to_pylist()
                paths = batch.column("image").field("path").to_pylist()  # our keys
                yield from zip(images, batch.column("label").to_pylist(), paths, strict=True)

    return _rounds(opened, records, payload, 0)


def by_cursor(path: str, records: int, payload: int) -> Round:
    """Values as they are: records with their heads, Datums; neither taken apart nor checked."""
    import lmdb

    names = [*_files(path, "*.lmdb"), *_files(path, "*.mdb")]
    options = {"readonly": True, "lock": False, "readahead": False, "subdir": False}

    def one_round() -> dict[str, Any]:
        began, found, size = time.perf_counter(), 0, 0
        for name in names:
            with lmdb.open(name, **options) as env, env.begin() as entries:
                for _, value in entries.cursor():
                    found += 1
                    size += len(value)
        assert found - len(names) <= records <= found and size >= payload, (found, size)
        return {"us": (time.perf_counter() - began) / records * 1e6}

    return one_round


def _files(path: str, pattern: str) -> list[str]:
    return sorted(glob.glob(f"{path}/{pattern}"))


# --- mosaicml-streaming ---------------------------------------------------------------------------


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """torchvision and transformers, whose names streaming imports, and does not use here.

    torchvision's wheel is linked to CUDA, and fails to import beside a torch for the CPU.
    """

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] in ("torchvision", "transformers"):
            return importlib.util.spec_from_loader(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        class StandIn(ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return type(name, (), {})

        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _streaming() -> Any:
    sys.meta_path.insert(0, _StandIns())
    import streaming

    return streaming
