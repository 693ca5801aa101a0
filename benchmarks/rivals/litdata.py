"""LitData: optimize() into chunks of 64 MB (its documentation's size), items (bytes, label).

Settings of its README ("Speed up model training"): StreamingDataset(shuffle=True) and its own
StreamingDataLoader; a subclass whose `__getitem__` transforms is how it decodes ("Transform data
while streaming"). optimize() deletes $TMPDIR/data and caches below HOME: both must be its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..data import listing
from ..harness import RIVALS, EntryProcess
from .base import AHEAD, Transform, as_bucket, collated, crop, decoded, epochs, listed

PRE_DOWNLOAD = 4  # chunks a worker


def litdata_process(function: str, scratch: Path, **options: Any) -> EntryProcess:
    """In the environment that several benchmarks share."""
    home = scratch / "litdata-home"
    home.mkdir(exist_ok=True)
    return EntryProcess(function, python=RIVALS, home=str(home), **options)


def write_litdata(folder: Path, out: Path, scratch: Path) -> None:
    with litdata_process("rivals:optimize", scratch, folder=str(folder)) as one:
        one.round(out=str(out))


def optimize(folder: str, jobs: int = 2) -> Callable[..., dict[str, Any]]:
    """(an entry of the rivals' environment)"""
    import litdata

    files = listing(folder)

    def one_round(out: str) -> dict[str, Any]:
        began = time.perf_counter()
        litdata.optimize(
            fn=_item, inputs=files, output_dir=out, chunk_bytes="64MB", num_workers=jobs,
            mode="overwrite", verbose=False,
        )  # fmt: skip
        return {"seconds": time.perf_counter() - began}

    return one_round


def _item(file: tuple[str, int]) -> tuple[bytes, int]:
    return Path(file[0]).read_bytes(), file[1]


def litdata_dataset(path: str, *, shuffle: bool, transform: Transform = None) -> Any:
    """Items (image, label); a subclass with a transform is how its documentation decodes."""
    from litdata import StreamingDataset

    class Images(StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            image, label = super().__getitem__(index)
            # bytes(): what it hands out is a memoryview, which its workers cannot pickle.
            image = bytes(image)
            return (image if transform is None else decoded(image, transform)), label

    return Images(path, shuffle=shuffle) if shuffle or transform else StreamingDataset(path)


def write(folder: str, out: str) -> None:
    optimize(folder)(out=out)


def images(path: str, *, size: int, batch: int, workers: int) -> Iterator[Any]:
    import litdata

    dataset = litdata_dataset(path, shuffle=True, transform=crop(size))
    loader = litdata.StreamingDataLoader(
        *(dataset,), batch_size=batch, num_workers=workers, collate_fn=collated,
        prefetch_factor=AHEAD, persistent_workers=True,
    )  # fmt: skip
    return epochs(loader)


def stream(url: str, files: list[str], cache: str, *, batch: int, workers: int) -> Iterator[Any]:
    """From a bucket, by obstore. max_pre_download: its README's advice for throughput."""
    import os

    import litdata
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it has no option for it
    options: dict[str, str] = {}
    remote = as_bucket(url, options)
    endpoint = options.pop("S3_ENDPOINT_URL")
    os.environ.update(options)

    class Images(litdata.StreamingDataset):  # type: ignore[misc, name-defined]
        def __getitem__(self, index: Any) -> Any:
            image, label = super().__getitem__(index)
            return bytes(image), label

    dataset = Images(
        *(remote,), cache_dir=cache, shuffle=True, max_pre_download=PRE_DOWNLOAD,
        storage_options={"endpoint_url": endpoint},
    )  # fmt: skip
    loader = litdata.StreamingDataLoader(
        *(dataset,), batch_size=batch, num_workers=workers, collate_fn=listed, prefetch_factor=AHEAD
    )
    return iter(loader)


def records(path: str) -> Iterator[bytes]:
    """As bytes: the views of its mapped chunk that it hands out have not been read yet."""
    return (bytes(item[0]) for item in litdata_dataset(path, shuffle=False))
