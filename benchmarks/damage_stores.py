"""How each library stores and reads again what `damage` damages, and the processes that do it.

Runs in the environment of the library (benchmarks/setup_rivals): it is imported in functions only.
A folder of images is stored with a number beside each image, `value_of(image)`, as a label would
be: so it is known of any pair that is handed out whether it was packed. Eight files, where the
library divides data into files. Settings are those of the adapters in `rivals/`, which name their
sources, without shuffling and decoding; and those by which a library can be told to check or to go
on. Files are read by the names that were written, as the libraries' own pages do: so a file that is
missing is missed.

Each read is a fork of a process that has imported the library, since importing takes seconds.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import json
import logging
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .rivals.hdf5 import Hdf5
from .rivals.lmdb import Lmdb
from .rivals.mosaicml import _streaming as streaming

FILES = 8
LIMIT_S = 60.0  # an undamaged read takes 0.1 s, and a few on a busy machine
LEFT_S = 3.0
ROOM = 8 << 30  # bytes of addresses, beside those of an undamaged process
TOLD = 500  # characters of a warning that are kept, of its beginning and of its end
ALL = 1.0  # of the records may be skipped: those that do not, end for another reason

Pairs = Iterator[tuple[bytes, int]]


@dataclass(frozen=True)
class Store:
    """A way to store and read.

    write, read: functions of this module, and their options. data, index, beside: patterns of the
    files that hold records, that say where records are, and that hold labels alone.
    """

    title: str
    write: Callable[..., None]
    read: Callable[..., Pairs]
    data: str
    index: str = ""
    beside: str = ""
    rival: str = ""  # the environment; shardio's own without
    package: str = "shardio"
    writing: tuple[tuple[str, Any], ...] = ()
    reading: tuple[tuple[str, Any], ...] = ()


def value_of(image: bytes) -> int:
    """Return a number of 62 bits, of which the first is set: it is found in files of any format."""
    found = int.from_bytes(hashlib.blake2b(image, digest_size=8).digest(), "big")
    return found >> 2 | 1 << 61


def images_in(folder: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(Path(folder).iterdir())]


def names(suffix: str) -> list[str]:
    return [f"{i:05d}.{suffix}" for i in range(FILES)]


# --- the libraries --------------------------------------------------------------------------------


def write_webdataset(images: list[bytes], out: str, *, suffix: str = "tar") -> None:
    import webdataset

    options = {"maxcount": -(-len(images) // FILES), "compress": suffix != "tar", "verbose": 0}
    with webdataset.ShardWriter(f"{out}/%05d.{suffix}", **options) as writer:
        for i, image in enumerate(images):
            writer.write({"__key__": f"{i:08d}", "jpg": image, "cls": value_of(image)})


def read_webdataset(path: str, *, suffix: str = "tar", go_on: bool = False) -> Pairs:
    import webdataset

    handler = webdataset.warn_and_continue if go_on else webdataset.reraise_exception
    shards = [f"{path}/{name}" for name in names(suffix)]
    return iter(
        webdataset.WebDataset(shards, shardshuffle=False, handler=handler)
        .to_tuple("jpg", "cls", handler=handler)
        .map_tuple(bytes, int, handler=handler)
    )


def write_mosaicml(images: list[bytes], out: str, *, hashes: tuple[str, ...] = ()) -> None:
    columns = {"image": "bytes", "label": "int"}
    size = sum(map(len, images)) // FILES
    options = {"hashes": list(hashes), "size_limit": size}
    with streaming().MDSWriter(out=out, columns=columns, **options) as writer:
        for image in images:
            writer.write({"image": image, "label": value_of(image)})


def read_mosaicml(path: str, *, validate_hash: str = "") -> Pairs:
    """With a hash: by copying from `path`, since it looks at hashes only when it copies."""
    options: dict[str, Any] = {"local": path}
    if validate_hash:
        local = f"{tempfile.gettempdir()}/local"
        options = {"remote": path, "local": local, "validate_hash": validate_hash}
    dataset = streaming().StreamingDataset(**options, shuffle=False, batch_size=32)
    return ((sample["image"], sample["label"]) for sample in dataset)


def write_litdata(images: list[bytes], out: str) -> None:
    import litdata

    litdata.optimize(
        fn=_pair, inputs=images, output_dir=out, chunk_size=-(-len(images) // FILES),
        num_workers=1, mode="overwrite", verbose=False,
    )  # fmt: skip


def _pair(image: bytes) -> tuple[bytes, int]:
    return image, value_of(image)


def read_litdata(path: str) -> Pairs:
    import litdata

    dataset = litdata.StreamingDataset(path, shuffle=False)
    return ((bytes(image), int(label)) for image, label in dataset)


def write_lmdb(images: list[bytes], out: str) -> None:
    import lmdb

    with lmdb.open(f"{out}/data.lmdb", map_size=1 << 26, subdir=False) as env:
        with env.begin(write=True) as txn:
            for i, image in enumerate(images):
                txn.put(b"%08d" % i, image)
        env.sync()
    os.unlink(f"{out}/data.lmdb-lock")
    Path(out, "labels.json").write_text(json.dumps([value_of(image) for image in images]))


def read_lmdb(path: str) -> Pairs:
    labels = json.loads(Path(path, "labels.json").read_text())
    dataset = Lmdb(f"{path}/data.lmdb", labels)
    return (
        (bytes(image), int(label)) for image, label in map(dataset.__getitem__, range(len(dataset)))
    )


def write_hdf5(images: list[bytes], out: str) -> None:
    import h5py
    import numpy as np

    with h5py.File(f"{out}/data.h5", "w") as file:
        stored = file.create_dataset("images", len(images), h5py.vlen_dtype(np.uint8))
        for i, image in enumerate(images):
            stored[i] = np.frombuffer(image, np.uint8)
        file["labels"] = np.array([value_of(image) for image in images])


def read_hdf5(path: str) -> Pairs:
    import h5py

    with h5py.File(f"{path}/data.h5", "r") as file:
        labels = file["labels"][:].tolist()
    dataset = Hdf5(f"{path}/data.h5", labels)
    return map(dataset.__getitem__, range(len(dataset)))


def write_hdf5_checked(images: list[bytes], out: str) -> None:
    """All images in one array, since its filters do not see the bytes of variable length.

    libver: its newer structures have checksums.
    """
    import h5py
    import numpy as np

    joined = np.frombuffer(b"".join(images), np.uint8)
    starts = np.cumsum([0, *map(len, images)])
    labels = np.array([value_of(image) for image in images])
    with h5py.File(f"{out}/data.h5", "w", libver="latest") as file:
        for name, values, chunk in (
            ("images", joined, 1 << 14),
            ("starts", starts, 64),
            ("labels", labels, 64),
        ):
            chunks = (min(chunk, len(values)),)
            file.create_dataset(name, data=values, chunks=chunks, fletcher32=True)


def read_hdf5_checked(path: str) -> Pairs:
    import h5py

    with h5py.File(f"{path}/data.h5", "r") as file:
        starts, labels = file["starts"][:].tolist(), file["labels"][:].tolist()
        for start, stop, label in zip(starts[:-1], starts[1:], labels, strict=True):
            yield file["images"][start:stop].tobytes(), label


def _rows(images: list[bytes]) -> Any:
    import datasets

    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    columns = {"image": [{"bytes": image, "path": None} for image in images]}
    labels = {"label": [value_of(image) for image in images]}
    return datasets.Dataset.from_dict(columns | labels, features=kinds)


def write_arrow(images: list[bytes], out: str) -> None:
    _rows(images).save_to_disk(out, num_shards=FILES)


def write_parquet(images: list[bytes], out: str, **options: Any) -> None:
    rows = _rows(images)
    for i, name in enumerate(names("parquet")):
        rows.shard(FILES, i, contiguous=True).to_parquet(f"{out}/{name}", **options)


def read_arrow(path: str) -> Pairs:
    import datasets

    return _stored(datasets.load_from_disk(path))


def read_parquet(path: str, *, check: bool = False) -> Pairs:
    import datasets
    import pyarrow.dataset

    datasets.disable_progress_bars()
    options: dict[str, Any] = {}
    if check:
        scan = pyarrow.dataset.ParquetFragmentScanOptions(page_checksum_verification=True)
        options = {"verification_mode": "all_checks", "fragment_scan_options": scan}
    files = [f"{path}/{name}" for name in names("parquet")]
    cache = f"{tempfile.gettempdir()}/cache"
    return _stored(
        datasets.load_dataset(
            "parquet", data_files=files, split="train", cache_dir=cache, **options
        )
    )


def _stored(rows: Any) -> Pairs:
    import datasets

    rows = rows.cast_column("image", datasets.Image(decode=False))
    return ((row["image"]["bytes"], row["label"]) for row in rows)


def write_shardio(images: list[bytes], out: str, *, format: str = "record") -> None:
    import shardio

    options: dict[str, Any] = {"format": format, "id": "damage", "overwrite": True}
    options["max_records"] = -(-len(images) // FILES)
    with shardio.Writer(out, fields={"image": "image", "label": "int"}, **options) as writer:
        for image in images:
            writer.write({"image": image, "label": value_of(image)})


def read_shardio(path: str, *, go_on: bool = False) -> Pairs:
    """Rows that were filled are not counted: `valid` tells them."""
    import shardio

    data = shardio.ShardDataset(
        *(path,), batch_size=32, fields=("image", "label"), decode=None, shuffle=False,
        tail="exact", on_error=shardio.Skip(most=ALL) if go_on else "raise",
    )  # fmt: skip
    for images, labels, valid in data:
        for image, label, good in zip(images, labels.tolist(), valid.tolist(), strict=True):
            if good:
                yield image.numpy().tobytes(), label
    for one in data.skipped:
        logging.warning("skipped: %s", one)


WEBDATASET: dict[str, Any] = {"rival": "webdataset", "package": "webdataset"}
MOSAICML: dict[str, Any] = {
    "data": "*.mds", "index": "index.json", "rival": "mosaicml",
    "package": "mosaicml-streaming",
}  # fmt: skip
HUGGINGFACE: dict[str, Any] = {"rival": "huggingface", "package": "datasets"}
SHARDIO: dict[str, Any] = {"data": "0*", "index": "manifest.json"}
FLETCHER = "HDF5, one array, fletcher32, libver latest"
SKIPPING = (("go_on", True),)
STORES = (
    Store("WebDataset, .tar", write_webdataset, read_webdataset, "*.tar", **WEBDATASET),
    Store(
        *("WebDataset, .tar, warn_and_continue", write_webdataset, read_webdataset, "*.tar"),
        reading=SKIPPING, **WEBDATASET,
    ),
    Store(
        *("WebDataset, .tar.gz", write_webdataset, read_webdataset, "*.tar.gz"),
        writing=(("suffix", "tar.gz"),), reading=(("suffix", "tar.gz"),), **WEBDATASET,
    ),
    Store("MosaicML Streaming", write_mosaicml, read_mosaicml, **MOSAICML),
    Store(
        *("MosaicML Streaming, sha256 at the copy", write_mosaicml, read_mosaicml),
        writing=(("hashes", ("sha256",)),), reading=(("validate_hash", "sha256"),), **MOSAICML,
    ),
    Store(
        *("LitData", write_litdata, read_litdata, "*.bin", "index.json"),
        rival="litdata", package="litdata",
    ),
    Store(
        *("LMDB", write_lmdb, read_lmdb, "data.lmdb", "", "labels.json"),
        rival="folder", package="lmdb",
    ),
    Store(
        *("HDF5", write_hdf5, read_hdf5, "data.h5"),
        rival="folder", package="h5py",
    ),
    Store(
        *(FLETCHER, write_hdf5_checked, read_hdf5_checked, "data.h5"),
        rival="folder", package="h5py",
    ),
    Store("HF datasets, Arrow", write_arrow, read_arrow, "*.arrow", "*.json", **HUGGINGFACE),
    Store("HF datasets, Parquet", write_parquet, read_parquet, "*.parquet", **HUGGINGFACE),
    Store(
        *("HF datasets, Parquet, page checksums", write_parquet, read_parquet, "*.parquet"),
        writing=(("write_page_checksum", True),), reading=(("check", True),), **HUGGINGFACE,
    ),
    Store("shardio", write_shardio, read_shardio, **SHARDIO),
    Store('shardio, on_error="skip"', write_shardio, read_shardio, reading=SKIPPING, **SHARDIO),
    Store(
        *("shardio, LMDB shards", write_shardio, read_shardio),
        writing=(("format", "lmdb"),), **SHARDIO,
    ),
    Store(
        *('shardio, LMDB shards, on_error="skip"', write_shardio, read_shardio),
        writing=(("format", "lmdb"),), reading=SKIPPING, **SHARDIO,
    ),
)  # fmt: skip
BY_TITLE = {store.title: store for store in STORES}


# --- processes ------------------------------------------------------------------------------------


def library(rival: str, folder: str) -> Callable[..., dict[str, Any]]:
    """(an entry) Store and read by forks of this process, which imports what they have imported."""
    images = images_in(folder)
    packed = {hashlib.sha256(image).hexdigest(): value_of(image) for image in images}

    def one_round(
        title: str, path: str, write: bool = False, limit_s: float = LIMIT_S
    ) -> dict[str, Any]:
        store = BY_TITLE[title]
        if rival == "mosaicml":
            streaming()
        else:
            importlib.import_module(store.package)
        scratch = tempfile.mkdtemp(prefix="read-")
        try:
            gc.freeze()  # else the child copies all pages when it collects
            child = os.fork()
            if child == 0:
                if write:
                    _child(lambda: _write(store, path, images), scratch)
                _child(lambda: _read(store, path, packed), scratch)
            ended = _wait(child, limit_s)
            lines = Path(scratch, "stderr").read_text(errors="replace").splitlines()
            # It tells of shared memory of the fork, which ends without cleaning up.
            noise = "\n".join(line for line in lines if "resource_tracker" not in line)
            try:
                found = json.loads(Path(scratch, "found.json").read_text())
            except (OSError, ValueError):
                found = {}
            for name in found.pop("imported", ()):  # the next fork shall not spend seconds on it
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
            return {"ended": ended, "noise": noise[-4000:], **found}
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    return one_round


def _wait(child: int, limit_s: float) -> str:
    """Wait until a process ends, and kill it after the limit; return how it ended."""
    until, ended = time.monotonic() + limit_s, ""
    while not (done := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > until and not ended:
            ended = f"no end within {limit_s:.0f} s"
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    code = os.waitstatus_to_exitcode(done[1])
    until = time.monotonic() + LEFT_S  # for what it started: Python's tracker of shared memory ends
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < until:
            os.killpg(child, 0)
            time.sleep(0.002)
        os.killpg(child, signal.SIGKILL)
    return ended or ("" if code == 0 else f"ended with code {code}")


def _child(work: Callable[[], dict[str, Any]], scratch: str) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        os.dup2(os.open(f"{scratch}/stderr", os.O_WRONLY | os.O_CREAT), 2)
        os.dup2(2, 1)
        tempfile.tempdir = scratch
        room = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + ROOM
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
        found = work()
        Path(scratch, "found.json").write_text(json.dumps(found))
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)


def _write(store: Store, path: str, images: list[bytes]) -> dict[str, Any]:
    os.makedirs(path)
    store.write(images, path, **dict(store.writing))
    return {"files": len(os.listdir(path))}


def _read(store: Store, path: str, packed: dict[str, int]) -> dict[str, Any]:
    """Read one epoch, and compare each pair.

    right: records that came as they were packed, each counted once. wrong: pairs that were not
    packed, or came twice. error: the texts of the error that ended it, and of its causes. told:
    warnings, and what was logged as one. memory: bytes more, at the most.
    """
    known_modules = set(sys.modules)
    told: list[str] = []
    right, wrong = set(), 0
    error, out_of_memory = "", False
    handler, form = logging.Handler(logging.WARNING), logging.Formatter()
    handler.emit = lambda record: told.append(form.format(record))  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for kind in (ResourceWarning, DeprecationWarning, PendingDeprecationWarning, ImportWarning):
            warnings.simplefilter("ignore", kind)  # as Python itself does, unless it is asked
        try:
            for image, label in store.read(path, **dict(store.reading)):
                known = hashlib.sha256(image).hexdigest()
                if packed.get(known) == label and known not in right:
                    right.add(known)
                else:
                    wrong += 1
        except BaseException as raised:
            error, out_of_memory = _text(raised), isinstance(raised, MemoryError)
            del raised
        until = time.monotonic() + LEFT_S  # what threads of it log, comes later
        while len(right) < len(packed) and not (error or told) and time.monotonic() < until:
            time.sleep(0.01)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told += [str(one.message) for one in caught]
    told = [one[:TOLD] + one[TOLD:][-TOLD:] for one in told[:3]]
    return {
        "right": len(right), "wrong": wrong, "error": error, "told": told,
        "memory": (after - before) * 1024, "out_of_memory": out_of_memory,
        "imported": sorted(sys.modules.keys() - known_modules),
    }  # fmt: skip


def _text(error: BaseException) -> str:
    """Return what a traceback says of an error and what caused it, without lines of code."""
    texts, one = [], traceback.TracebackException.from_exception(error)
    while one is not None:
        texts.append("".join(one.format_exception_only()))
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return "".join(texts)[:4000]
