"""Storage with a limit: a disk held to few requests a second, and a network file system.

The limit is the kernel's own, for the control group that an entry and its workers belong to
(throttle.py): their reads wait until they may, as those of a cloud provider's disk do
beyond the requests that were paid for. 3,000 a second is what such disks give by default; 500 small
ones, and network file systems that many share. Requests are those of the group alone, counted by
the kernel as they enter the block layer.

The network is sshfs to a server of our own on this machine (network.py): no distance, but a request
is a message to another process, through TCP and SSH. Each round has a mount of its own, so that
nothing is cached on the client's side; the server's pages stay in memory.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from shardio.errors import StorageError

from . import data, rivals
from .cold_rounds import BUFFER, Cold
from .harness import EntryProcess, NotHere, Result, interleave, ratio
from .network import mounted
from .throttle import Group

LIMITS = (3_000, 500)  # requests a second
MOST_S = 60.0  # of a round: LMDB asks for 27 pages a photograph
PHOTOS = 5_000
NETWORK = 10_000  # of CIFAR's files
FOLDER, LMDB, LITDATA = "image folder", "LMDB, classic", "LitData"
DATALOADER, LOADER = "shardio, DataLoader", "shardio, ShardLoader"
LARGE, ROUNDS = (DATALOADER, LOADER, LITDATA), 5  # who asks for much at once
COLUMNS = {
    "images_per_s": "images/s",
    "seconds": "s an epoch",
    "reads": "requests",
    "reads_per_s": "requests/s",
    "request_kib": "KiB a request",
}


def limited(source: data.Data, result: Result) -> None:
    """A disk that is held to so many reads a second, and requests counted."""
    try:
        with Group(source.scratch):
            pass
    except StorageError as error:
        result.note(f"A disk with a limit was not measured: {error}")
        return
    for what in (Small(source), Photographs(source)):
        result.data(**{f"limited, {what.name}": {"records": what.records, "bytes": what.payload}})
        for crop in (0, what.crop):
            how = "decoded and cropped" if crop else "not decoded"
            for limit in LIMITS:
                with Group(source.scratch, limit) as group:
                    cold = Cold(source.scratch, what.records, what.payload, what.where, group)
                    entries = what.entries(crop)
                    # The kernel cuts large reads by how its memory lies: their requests vary.
                    large = {name: entries.pop(name) for name in LARGE if name in entries}
                    rounds = 1 if source.quick or limit < 1_000 else 2
                    found = cold.compete(entries, rounds, limit_s=MOST_S)
                    most = cold.compete(large, 1 if source.quick else ROUNDS, limit_s=MOST_S)
                    found = most | found
                title = f"{what.name}, {limit:,} requests/s, {how}"
                result.raw(title, found)
                result.table(title, found, COLUMNS, versus=FOLDER, by="images_per_s")
                cut = [name for name, each in found.items() if each[0]["reads"] is None]
                if cut:
                    result.note(
                        f"{title}: {', '.join(cut)}: ended after {MOST_S:.0f} s of an epoch: its "
                        "seconds are those, and its requests are not told"
                    )
                best = LOADER if LOADER in found else DATALOADER
                faster = ratio(found, best, FOLDER, "images_per_s")
                result.target(f"{title}: images/s, of the image folder's", faster, -1.0)
                if LITDATA in found:
                    faster = ratio(found, best, LITDATA, "images_per_s")
                    result.target(f"{title}: images/s, of LitData's", faster, -0.95)
        what.remove()


class _What:
    """A folder of images, and the same in each entry's own form."""

    name: str
    crop: int
    buffer = BUFFER

    def __init__(self, source: data.Data, folder: Path, *options: str) -> None:
        files = data.listing(folder)
        self.records, self.payload = len(files), data.payload(files)
        base = source.scratch / f"limited-{folder.name}"
        base.mkdir()
        self.where = {"image_folder": folder, "shardio": data.pack(folder, base / "shards")}
        self.where["tiles"] = self.where["shardio"]
        if options:
            self.where["tiles"] = data.pack(folder, base / "tiles", *options)
        self.where["lmdb"] = base / "lmdb"
        rivals.write_lmdb(folder, self.where["lmdb"])
        if source.rivals:
            self.where["litdata"] = base / "litdata"
            rivals.write_litdata(folder, self.where["litdata"], source.scratch)
        self._base = base

    def entries(self, crop: int) -> dict[str, dict[str, Any]]:
        """By name; decoded, ShardLoader too, which is what shardio recommends for it."""
        common = {"workers": 2, "crop": crop}
        found: dict[str, dict[str, Any]] = {
            DATALOADER: {"way": "shardio", "buffer": self.buffer} | common,
            FOLDER: {"way": "image_folder"} | common,
            LMDB: {"way": "lmdb"} | common,
        }
        if crop:
            found[LOADER] = {"way": "tiles", "buffer": self.buffer} | common
        if "litdata" in self.where:
            found[LITDATA] = {"way": "litdata"} | common
        return found

    def remove(self) -> None:
        data.remove(self._base)


class Small(_What):
    name, crop = "CIFAR-10, 0.9 KB", 32

    def __init__(self, source: data.Data) -> None:
        super().__init__(source, source.cifar())
        self.buffer = min(BUFFER, self.records // 5)  # quick: as of all 50,000


class Photographs(_What):
    name, crop = "photographs, 110 KB", 224

    def __init__(self, source: data.Data) -> None:
        super().__init__(source, source.photos(500 if source.quick else PHOTOS), "--jpeg-tiles")
        # Half of them, as 10,000 of 20,000 are without a limit: of few a buffer of the usual size
        # would be all, which is read in another way.
        self.buffer = self.records // 2


# --- a network file system ------------------------------------------------------------------------


def network(source: data.Data, result: Result) -> None:
    """The same by sshfs, each round through a mount of its own."""
    try:
        with mounted(source.scratch, source.scratch):
            pass
    except NotHere as error:
        result.note(f"A network file system was not measured: {error}")
        return
    folder = source.cifar(NETWORK)
    files = data.listing(folder)
    payload = data.payload(files)
    base = source.scratch / "network"
    base.mkdir()
    where = {"image_folder": folder, "shardio": data.pack(folder, base / "shards")}
    where["lmdb"] = base / "lmdb"
    rivals.write_lmdb(folder, where["lmdb"])
    if source.rivals:
        where["litdata"] = base / "litdata"
        rivals.write_litdata(folder, where["litdata"], source.scratch)
    names = {"shardio": DATALOADER, "image_folder": FOLDER, "lmdb": LMDB, "litdata": LITDATA}
    found = interleave(
        {
            names[way]: partial(_through, source, way, path, folder, len(files), payload)
            for way, path in where.items()
        },
        1 if source.quick else 3,
    )
    data.remove(base)
    result.data(**{"network": {"records": len(files), "bytes": payload}})
    title = "network file system (sshfs), CIFAR-10, 0.9 KB, not decoded"
    columns = {name: COLUMNS[name] for name in ("images_per_s", "seconds")}
    result.raw(title, found)
    result.table(title, found, columns, versus=FOLDER, by="images_per_s")
    faster = ratio(found, DATALOADER, FOLDER, "images_per_s")
    result.target(f"{title}: images/s, of the image folder's", faster, -1.0)


def _through(
    source: data.Data, way: str, path: Path, folder: Path, records: int, payload: int
) -> dict[str, Any]:
    """A round of a process of its own, through a mount of its own."""
    base = source.scratch
    with mounted(base, base) as there:
        options: dict[str, Any] = {
            "path": str(there / path.relative_to(base)),
            "records": records,
            "payload": payload,
            "workers": 2,
        }
        if way == "lmdb":
            options["folder"] = str(folder)  # for the labels: only names are looked at
        if way == "litdata":
            one = rivals.litdata_process("cold_rounds:litdata", base, **options)
        else:
            one = EntryProcess(f"cold_rounds:{way}", **options)
        with one:
            return one.round(limit_s=MOST_S)
