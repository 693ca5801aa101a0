"""One shard of a plan: built from its source, or kept as an interrupted packing left it.

Shards know nothing of each other, so this runs in any process, and gives the same bytes in each. A
shard gets its name when it is whole and flushed; what cannot be packed is returned, not raised, so
that all shards together can list it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import DamageError, SampleError, StorageError, VersionError, printable
from ..formats import manifest
from ..formats.base import ShardInfo
from ..formats.sample import Schema
from ..images import jpeg_tiles
from ..storage import local
from . import journal
from .built import Built, note_built, read_built
from .plan import Plan
from .reencode import Reencoded, as_stored, checked_fields, reencode
from .shard_writer import ShardWriter, open_own
from .sources.base import Problem, Rejected

_LOOKAHEAD_BYTES = 32 << 20  # bytes of records that are announced to the source
_CHECK = 64  # files, or
_CHECK_BYTES = 4 << 20  # bytes, between two looks at whether to stop


@dataclass(frozen=True)
class Work:
    """All shards of a plan, for a directory. Forked workers inherit it."""

    plan: Plan
    directory: str
    token: str
    skip: bool  # leave out what cannot be packed
    # By number, names of files that may be this shard, from an interrupted packing.
    finished: Mapping[int, Sequence[str]]
    sent: Mapping[int, Built] = field(default_factory=dict)  # what an object store has of it
    builds: bool = True  # False: shards that parts built are only looked for
    note: bool = False  # write notes, since another process commits
    quick: bool = False  # believe notes, and do not read these shards whole


def build_or_keep(work: Work, number: int, add: Callable[[int], None]) -> Built:
    """Build a shard, or keep it when an interrupted packing finished it. Runs in any process.

    add: told now and then of how many bytes of the source are done; it may raise, to stop the work.
    """
    if number in work.sent:
        add(int(work.plan.shard_bytes[number]))
        return work.sent[number]
    names = work.finished.get(number, ())
    found = [kept for name in names if (kept := _keep_finished(work, number, name))]
    if found:
        add(int(work.plan.shard_bytes[number]))
        return min(found, key=lambda kept: len(kept.problems))
    return _build_anew(work, number, add) if work.builds else Built(None)


def _build_anew(work: Work, number: int, add: Callable[[int], None]) -> Built:
    plan, options = work.plan, work.plan.options
    keys, listed, _, places, source = plan.rows(number)
    assert source is not None
    sizes, make = listed.tolist(), as_stored if source.as_stored else reencode
    schema = Schema(plan.fields)
    naming = schema, plan.dataset_id, plan.first + number, options.format
    checked = checked_fields(schema, options)
    problems: list[Problem] = []
    reencoded = Reencoded()
    with ShardWriter(work.directory, work.token, *naming) as shard:
        with source.open() as read:
            done, ahead, lookahead_left = 0, 0, _LOOKAHEAD_BYTES
            for i, place in enumerate(places):
                while ahead < len(places) and lookahead_left > 0:
                    source.will_need(places[ahead])
                    lookahead_left -= sizes[ahead]
                    ahead += 1
                lookahead_left += sizes[i]
                try:
                    sample = read(place)
                    changes = make(sample, options, checked)
                    shard.write(sample)
                    reencoded.add(changes)
                    shard.flush()
                except (Rejected, SampleError) as error:
                    problems.append((keys[i], str(error)))
                except MemoryError:
                    raise StorageError(
                        f"{printable(keys[i])}: there is not enough memory to pack it. What "
                        "is finished is kept: run it again to resume, with fewer --jobs"
                    ) from None
                done += sizes[i]
                if done >= _CHECK_BYTES or i % _CHECK == _CHECK - 1:
                    add(done)
                    done = 0
        if problems and not work.skip:
            return Built(None, problems=problems)
        info = shard.finish()
        if problems:
            here = local.LocalDirectory(work.directory)
            journal.write_rejected(here, problems, info.name)
        shard.commit(info.name)
        built = Built(info, shard.blob_bytes, reencoded=reencoded, problems=problems)
        if work.note:
            note_built(work.directory, plan.dataset_id, built)
        add(done)
    return built


def _keep_finished(work: Work, number: int, name: str) -> Built | None:
    """Return a finished shard, if it is whole, and holds all that the plan gives it."""
    plan = work.plan
    here = local.LocalDirectory(work.directory)
    try:
        with contextlib.closing(here.open(name)) as file:
            note = read_built(work.directory, name, plan.dataset_id) if work.quick else None
            digest = note.info.sha256 if note and note.info else file.sha256()
            stored = plan.first + number
            if manifest.shard_name(stored, digest, plan.options.format) != name:
                return None
            shard = open_own(file, name, plan.dataset_id)
            # Left out are only files that a part was told to skip; building anew finds out why.
            left_out: list[Problem] = []
            if not work.builds:
                left_out = journal.load_rejected(here, journal.part_list(name)) or []
            expected = plan.records_of(number) - len(left_out)
            found = (shard.schema.fields, shard.number, shard.records)
            if found != (plan.fields, stored, expected):
                return None
            info = ShardInfo(name, stored, shard.records, file.size, digest, shard.index_checksum)
            reencoded = Reencoded() if note is None else note.reencoded
            # Without a note, nobody knows any more why other images are no tiles.
            if note is None and plan.options.jpeg_tiles:
                images = (one.get("image") for one in shard.scan(0, shard.records))
                reencoded.tiles = sum(
                    one is not None and jpeg_tiles.tiles(one) is not None for one in images
                )
            built = Built(info, shard.blob_bytes(), True, reencoded, left_out)
            if work.note:  # its part may have been killed before it wrote one
                note_built(work.directory, plan.dataset_id, built)
            return built
    except (FileNotFoundError, DamageError, StorageError, VersionError):
        return None
