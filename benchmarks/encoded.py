"""Files of 0.9 KB, not decoded (`decode=None`), in batches of 64: records/s, CPU, memory.

Nothing but reading, checking and passing on. "buffer": a batch is EncodedImages; "lists": of bytes
objects, `ragged=("image",)`, which is how all batches of files came before. The image folder's
samples are bytes of whole files, collated to the same lists. FFCV reads from a map of its file,
compares nothing, and pads each file to the longest one, in memory that a later batch overwrites.
Rounds are those of `loader`, of five epochs each.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from . import data, loader, rivals
from .harness import EntryProcess, Result, median, ratio

BATCH = 64
BUFFER, LISTS = "ShardLoader 2x1, buffer", "ShardLoader 2x1, lists"
AHEAD = "ShardLoader 2x1, buffer, 8 batches ahead"
PADDED = "FFCV, 2 workers, padded"


def run(source: data.Data, result: Result) -> None:
    title = "CIFAR, files"
    folder = source.cifar()
    files = data.listing(folder)
    result.data(**{title: {"records": len(files), "payload_bytes": data.payload(files)}})
    shards = data.pack(folder, source.scratch / "shards")
    epochs = 2 if source.quick else 5
    options: dict[str, Any] = {"path": str(shards), "workers": 2, "epochs": epochs}
    entries = {
        BUFFER: EntryProcess("encoded:shard_loader", **options),
        AHEAD: EntryProcess("encoded:shard_loader", **options, ahead=8),
        LISTS: EntryProcess("encoded:shard_loader", **options, lists=True),
        "DataLoader, shards, buffer": EntryProcess("encoded:data_loader", **options),
        "DataLoader, shards, lists": EntryProcess("encoded:data_loader", **options, lists=True),
        "image folder": EntryProcess("encoded:image_folder", path=str(folder), workers=2),
    }
    written = source.scratch / "files.beton"
    if missing := rivals.FFCV.missing():
        result.note(f"{PADDED} was not measured: {missing}")
    else:
        process = partial(rivals.FFCV.process, scratch=source.scratch)
        with process("encoded:writing") as one:
            one.round(folder=str(folder), out=str(written))
        entries[PADDED] = process("encoded:ffcv", path=str(written), workers=2, epochs=epochs)
    measured = loader.measure(source, result, title, entries)
    what = f"{title}, 0.9 KB, warm, batches of {BATCH}, workers x threads"
    result.table(what, measured, loader.COLUMNS, versus=LISTS, by="images_per_s")
    if PADDED in measured:
        found = ratio(measured, BUFFER, PADDED, "images_per_s")
        result.target(f"{title}, records/s, {BUFFER}, of {PADDED}", found, -0.5)
    else:  # half of what it had when it was measured
        found = median(measured[BUFFER], "images_per_s")
        result.target(f"{title}, records/s, {BUFFER}", found, -335_000, unit="images/s")
    for lists in (LISTS, "image folder"):
        found = ratio(measured, BUFFER, lists, "images_per_s")
        result.target(f"{title}, records/s, {BUFFER}, of {lists}", found, -4.0)
    data.remove(shards, *([written] if written.exists() else []))


# --- entries --------------------------------------------------------------------------------------


def _dataset(path: str, lists: bool) -> Any:
    from shardio import ShardDataset, collate

    collates: dict[str, Any] = {"collate_fn": partial(collate, ragged=("image",))} if lists else {}
    return ShardDataset(path, batch_size=BATCH, fields=("image", "label"), decode=None, **collates)


def shard_loader(
    path: str, workers: int, epochs: int, lists: bool = False, ahead: int = loader.AHEAD
) -> loader.Round:
    from shardio import ShardLoader

    fed = ShardLoader(_dataset(path, lists), num_workers=workers, prefetch_factor=ahead)
    return loader.rounds(fed, fed.set_epoch, workers, epochs)


def data_loader(path: str, workers: int, epochs: int, lists: bool = False) -> loader.Round:
    from torch.utils.data import DataLoader

    dataset = _dataset(path, lists)
    fed = DataLoader(
        *(dataset,), batch_size=None, num_workers=workers, prefetch_factor=loader.AHEAD,
        persistent_workers=True,
    )  # fmt: skip
    return loader.rounds(fed, dataset.set_epoch, workers, epochs)


def image_folder(path: str, workers: int) -> loader.Round:
    from torch.utils.data import DataLoader

    from shardio import collate

    fed = DataLoader(
        *(rivals.Folder(path, None),), batch_size=BATCH, shuffle=True, num_workers=workers,
        prefetch_factor=loader.AHEAD, persistent_workers=True, collate_fn=collate,
    )  # fmt: skip
    return loader.rounds(fed, lambda _: None, workers, 1)


def writing() -> loader.Round:
    from .rivals import ffcv

    def one_round(folder: str, out: str) -> dict[str, Any]:
        ffcv.write_files(folder, out)
        return {}

    return one_round


def ffcv(path: str, workers: int, epochs: int) -> loader.Round:
    from .rivals import ffcv as rival

    fed = rival.files(path, batch=BATCH, workers=workers)
    return loader.rounds(fed, lambda _: None, workers, epochs)
