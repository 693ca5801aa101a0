"""What a journal vouches for: which files of a directory are shardio's, and whose they are.

What lies in OUT while a packing is unfinished, and is gone once it is committed:

    .shardio-plan               the journal: a plan, or a Writer's line; packers lock it (lock.py)
    .shardio-TOKEN-NAME.tmp     files being written
    .shardio-rejected-*.jsonl   what was left out, by shard, with on_error="skip"

shardio removes a file only when its name and its first bytes say that shardio wrote it, and only
what no manifest names.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence

import numpy as np

from ..errors import DamageError, ExistsError, NotPackedError, StorageError, VersionError, printable
from ..formats import begins_packed, manifest
from ..formats.index import key_hash
from ..names import key_bytes, key_text
from ..storage import local
from ..storage.location import locate
from ..storage.lock import JOURNAL, PLAN_MAGIC, WRITER_MAGIC
from . import plan
from .plan import Before
from .shard_writer import open_own

REJECTED = "rejected.jsonl"
_REJECTED_PART = ".shardio-rejected-{}.jsonl"  # of a shard, by its name, or of the scan

Problem = tuple[bytes, str]  # key, reason


# --- whose a journal is ---------------------------------------------------------------------------


def of_writer(dataset_id: bytes, before: Before) -> bytes:
    """A new journal of what cannot be resumed, unlike any other."""
    value = {"id": dataset_id.hex(), "before": before, "token": local.token()}
    return WRITER_MAGIC + json.dumps(value).encode()


def owner(journal: bytes) -> tuple[bytes, Before]:
    """Of a journal: the id of its dataset, and the shards not its own. Raises DamageError."""
    if not journal.startswith(WRITER_MAGIC):
        made = plan.parse(journal, JOURNAL)
        return made.dataset_id, made.before
    try:
        value = json.loads(journal[len(WRITER_MAGIC) :])
        return bytes.fromhex(value["id"]), dict(value["before"])
    except (KeyError, TypeError, ValueError):
        raise DamageError(f"{JOURNAL}: a Writer's journal cannot be read") from None


def is_committed(directory: str, journal: bytes) -> bool:
    """Whether the packing of a journal has its manifest, and was killed before it cleaned up."""
    try:
        dataset_id, before = owner(journal)
        made = manifest.load(locate(directory))
    except (NotPackedError, DamageError, VersionError):
        return False
    if made.dataset_id != dataset_id:
        return False
    born = shards_in(directory)
    names = (made.shard(number).name for number in range(made.shards))
    return all(name in born and born[name] != before.get(name) for name in names)


def has_work(directory: str, journal: bytes) -> bool:
    """Return whether an unfinished packing has a shard that going on with it would keep."""
    dataset_id, before = owner(journal)
    return any(  # not by time alone: another packer may have committed since the journal was made
        before.get(name) != born and shard_id(directory, name) == dataset_id
        for name, born in shards_in(directory).items()
    )


def clean(directory: str, journal: bytes) -> None:
    """Remove what only an unfinished packing needs; the journal last: it explains the rest.

    `journal` was read through its lock: opening the file again would end the lock.
    """
    _drop_shards(directory, journal)
    for name in os.listdir(directory):
        if is_rejected_part(directory, name):
            local.remove(os.path.join(directory, name))
    remove_temporaries(directory)
    local.remove(os.path.join(directory, JOURNAL))
    local.sync_directory(directory)


# --- shards ---------------------------------------------------------------------------------------


def shard_number(name: str) -> int | None:
    """The number in a shard's file name; None when it is no shard's name."""
    number, dash, rest = name.partition("-")
    digest, _, ending = rest.partition(".")
    plain = number.isascii() and number.isdigit() and len(number) >= 5
    known = f".{ending}" in manifest.SUFFIXES.values()
    if not (plain and dash and known and len(digest) == 8):
        return None
    return int(number) if all(c in "0123456789abcdef" for c in digest) else None


def shards_in(directory: str) -> Before:
    """All files with names of shards, and their times of change."""
    with os.scandir(directory) as entries:
        return {
            entry.name: entry.stat(follow_symlinks=False).st_mtime_ns
            for entry in entries
            if shard_number(entry.name) is not None
        }


def named_shards(directory: str) -> set[str]:
    """Names of the shards of the dataset that is committed here, if one is. Raises DamageError."""
    try:
        made = manifest.load(locate(directory))
    except NotPackedError:
        return set()
    return {made.shard(number).name for number in range(made.shards)}


def shard_id(directory: str, name: str) -> bytes | None:
    """The dataset id in a shard's header; None when the file is not one of our shards."""
    try:
        file = locate(directory).open(name)
        try:
            return open_own(file, name).dataset_id
        finally:
            file.close()
    except (OSError, StorageError, DamageError, VersionError):
        return None


def _drop_shards(directory: str, journal: bytes) -> None:
    """Remove the shards of the packing that a journal belongs to, but those a manifest names.

    They carry its dataset's id and were not there before it. A damaged journal removes nothing.
    """
    with contextlib.suppress(DamageError, VersionError):
        dataset_id, before = owner(journal)
        named = named_shards(directory)
        for name, born in sorted(shards_in(directory).items()):
            if (
                name not in named
                and before.get(name) != born
                and shard_id(directory, name) == dataset_id
            ):
                local.remove(os.path.join(directory, name))


# --- temporary files ------------------------------------------------------------------------------


def is_ours(directory: str, name: str) -> bool:
    """Whether a file is provably a temporary one of shardio: by its name and its first bytes."""
    if not local.is_temporary(name):
        return False
    # A packer that is killed between link and unlink leaves the journal under two names. Opening
    # the second would end the lock on the first.
    with contextlib.suppress(OSError):
        if os.path.samefile(os.path.join(directory, name), os.path.join(directory, JOURNAL)):
            return True
    try:
        file = locate(directory).open(name)
        start = file.read(0, min(file.size, 64))
        file.close()
    except (OSError, StorageError, DamageError):
        return False
    ours = (PLAN_MAGIC, WRITER_MAGIC, b'{"', b"{\n")  # journals, lists of rejected keys, manifests
    shards = begins_packed(start)
    return shards or any(start.startswith(magic) or magic.startswith(start) for magic in ours)


def remove_temporaries(directory: str, token: str | None = None) -> None:
    """Temporary files of one process, or of all; the caller knows that they are at an end."""
    for name in os.listdir(directory):
        if is_ours(directory, name) and (token is None or f"-{token}-" in name):
            local.remove(os.path.join(directory, name))


# --- what was left out ----------------------------------------------------------------------------


def write_rejected(directory: str, problems: Sequence[Problem]) -> None:
    """The list of what a dataset leaves out, for its user."""
    local.write_file(directory, REJECTED, _dump_rejected(problems))


def load_rejected(directory: str) -> list[Problem]:
    """What a dataset's list says; empty when there is none, and where the file is another's."""
    return _own_rejected(directory) or []


def remove_rejected(directory: str) -> None:
    """Remove the list of rejected keys, if packing wrote it."""
    if _own_rejected(directory) is not None:
        local.remove(os.path.join(directory, REJECTED))


def refuse_rejected(directory: str) -> None:
    """Raise ExistsError where a list of rejected keys would replace a file that is none."""
    if has_rejected(directory) and _own_rejected(directory) is None:
        raise ExistsError(
            f"{printable(os.path.join(directory, REJECTED))}: no packing wrote it, and the list of "
            "what is left out would replace it; move it away, or choose another directory"
        )


def has_rejected(directory: str) -> bool:
    """Return whether a file has the name of the list of rejected keys."""
    return os.path.lexists(os.path.join(directory, REJECTED))


def _own_rejected(directory: str) -> list[Problem] | None:
    """Return what a list that packing wrote says; None where none is there, or another's file.

    Packing's own are known by each byte, and by keys that the dataset there does not have: a user's
    list of records to leave out, in the same words, is of keys that it has.
    """
    path = os.path.join(directory, REJECTED)
    if not os.path.isfile(path) or os.path.islink(path):
        return None
    try:
        data = locate(directory).read(REJECTED, 1 << 30)
        found = _load_rejected(directory, REJECTED)
    except (DamageError, StorageError):
        return None
    if not found or _dump_rejected(found) != data:
        return None
    return None if _holds_one(directory, [key for key, _ in found]) else found


def _holds_one(directory: str, keys: Sequence[bytes]) -> bool:
    """Return whether the dataset in a directory, if one is there, has one of these keys."""
    wanted, hashes = set(keys), np.array([*map(key_hash, keys)], np.uint32)
    with contextlib.suppress(NotPackedError, DamageError, StorageError, VersionError, OSError):
        made = manifest.load(locate(directory))
        for number in range(made.shards):
            name = made.shard(number).name
            file = locate(directory).open(name)
            try:
                shard = open_own(file, name)
                places = np.flatnonzero(np.isin(shard.key_hashes, hashes))
                if any(shard.key(place) in wanted for place in places.tolist()):
                    return True
            finally:
                file.close()
    return False


def write_rejected_part(directory: str, part: str, problems: Sequence[Problem]) -> None:
    """What one shard, or the scan, left out: until the commit."""
    local.write_file(directory, _REJECTED_PART.format(part), _dump_rejected(problems))


def load_rejected_part(directory: str, part: str) -> list[Problem] | None:
    """What one shard, or the scan, left out; None when there is no such list."""
    return _load_rejected(directory, _REJECTED_PART.format(part))


def is_rejected_part(directory: str, name: str) -> bool:
    """Whether a file is the list of what one part left out."""
    start, end = _REJECTED_PART.split("{}")
    if not (name.startswith(start) and name.endswith(end)):
        return False
    try:
        return _load_rejected(directory, name) is not None
    except (DamageError, StorageError):
        return False


def _dump_rejected(problems: Sequence[Problem]) -> bytes:
    lines = [json.dumps({"key": key_text(key), "reason": why}) for key, why in problems]
    return "".join(f"{line}\n" for line in lines).encode()


def _load_rejected(directory: str, name: str) -> list[Problem] | None:
    """What a file of rejected keys lists; None when there is none. Raises DamageError."""
    try:
        lines = locate(directory).read(name, 1 << 30).splitlines()
        return [(key_bytes(entry["key"]), entry["reason"]) for entry in map(json.loads, lines)]
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError, RecursionError):
        raise DamageError(f"{printable(directory)}/{name}: not a list of rejected keys") from None
