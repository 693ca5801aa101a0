"""One shard of a plan: built from its source, or kept as an interrupted packing left it.

Shards know nothing of each other, so this runs in any process, and gives the same bytes in each. A
shard gets its name when it is whole and flushed; what cannot be packed is returned, not raised, so
that all shards together can list it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import DamageError, SampleError, StorageError, VersionError, printable
from ..formats import manifest
from ..formats.base import Shard, ShardInfo
from ..formats.sample import Schema
from ..images import jpeg_tiles as jpeg
from ..storage import local
from . import journal, sources
from .journal import Problem
from .reencode import Recoded, Recoding, Tiles
from .shard_writer import ShardWriter, open_own

_CHECK = 64  # files, or
_CHECK_BYTES = 4 << 20  # bytes, between two looks at whether to stop


@dataclass(frozen=True)
class Task:
    """One shard to build, or to check where it is there already."""

    number: int
    directory: str
    token: str
    dataset_id: bytes
    fields: tuple[tuple[str, str], ...]
    keys: list[bytes]
    sizes: list[int]
    places: list[int]  # of the records, for the source
    recoding: Recoding
    format: str
    skip: bool
    finished: list[str]  # names of files that may be this shard, from an interrupted packing
    build: bool = True


@dataclass
class Built:
    """What became of a task."""

    info: ShardInfo | None  # None: not built, because of `problems`
    blob_bytes: int = 0
    kept: bool = False
    recoded: Recoded = field(default_factory=Recoded)
    problems: list[Problem] = field(default_factory=list)


def build_or_keep(source: sources.Source | None, task: Task, add: Callable[[int], None]) -> Built:
    """Build a shard, or keep it when an interrupted packing finished it. Runs in any process.

    add: told now and then of how many bytes of the source are done; it may raise, to stop the work.
    """
    found = [kept for name in task.finished if (kept := _keep(task, name))]
    if found:
        add(sum(task.sizes))
        return min(found, key=lambda kept: len(kept.problems))
    if source is None or not task.build:
        return Built(None)
    return _build(source, task, add)


def _build(source: sources.Source, task: Task, add: Callable[[int], None]) -> Built:
    shard = ShardWriter(
        task.directory, task.token, Schema(task.fields), task.dataset_id, task.number, task.format
    )
    problems: list[Problem] = []
    recoded = Recoded()
    try:
        with source.open() as read:
            done = 0
            for i, place in enumerate(task.places):
                try:
                    sample = read(place)
                    changes = task.recoding.apply(sample)
                    shard.write(sample)
                    recoded.add(changes)
                    shard.flush()
                except (sources.Rejected, SampleError) as error:
                    problems.append((task.keys[i], str(error)))
                except MemoryError:
                    raise StorageError(
                        f"{printable(task.keys[i])}: there is not enough memory to pack it. What "
                        "is finished is kept: run it again to resume, with fewer --jobs"
                    ) from None
                done += task.sizes[i]
                if done >= _CHECK_BYTES or i % _CHECK == _CHECK - 1:
                    add(done)
                    done = 0
        if problems and not task.skip:
            shard.discard()
            return Built(None, problems=problems)
        info = shard.finish()
        if problems:
            journal.write_rejected_part(task.directory, _part_name(info.name), problems)
        shard.commit(info.name)
        add(done)
    except BaseException:
        shard.discard()
        raise
    return Built(info, shard.blob_bytes, recoded=recoded, problems=problems)


def _keep(task: Task, name: str) -> Built | None:
    """A finished shard, if it is whole, and holds all that the plan gives it."""
    try:
        file = local.LocalStorage(task.directory).open(name)
    except (FileNotFoundError, StorageError):
        return None
    try:
        digest = file.sha256()
        if manifest.shard_name(task.number, digest, task.format) != name:
            return None
        shard = open_own(file, name, task.dataset_id)
        if shard.schema.fields != task.fields:
            return None
        # Left out are only files that a part was told to skip; building anew finds out again why.
        left_out: list[Problem] = []
        if not task.build:
            left_out = journal.load_rejected_part(task.directory, _part_name(name)) or []
        if shard.number != task.number or len(task.keys) - shard.records != len(left_out):
            return None
        info = ShardInfo(name, task.number, shard.records, file.size, digest, shard.index_checksum)
        recoded = Recoded(tiles=_tiles_in(shard)) if task.recoding.jpeg_tiles else Recoded()
        return Built(info, shard.blob_bytes(), kept=True, recoded=recoded, problems=left_out)
    except (DamageError, StorageError, VersionError):
        return None
    finally:
        file.close()


def _tiles_in(shard: Shard) -> Tiles:
    """Of a shard that an earlier call finished: nobody knows any more why others are none."""
    found = (one.get("image") for one in shard.scan(0, shard.records))
    return Tiles(sum(one is not None and jpeg.tiles(one) is not None for one in found))


def _part_name(name: str) -> str:
    """A shard's name without its ending."""
    return name.partition(".")[0]
