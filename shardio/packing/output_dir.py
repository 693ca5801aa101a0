"""Where a packing goes: what may lie there already, what is refused, and the file of the splits.

A directory holds one dataset or the splits of one. A dataset that is there is left as it is when it
is just the one asked for; another one is never replaced unasked. What the options alone tell is
refused before the source is listed, which may take minutes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ..errors import DamageError, ExistsError, NotPackedError, OptionError, printable
from ..formats import manifest
from ..storage import local
from ..storage.location import locate
from ..storage.lock import JOURNAL
from ..units import show_count
from . import journal, plan


def check(out: str, source: bytes, names: Sequence[str]) -> None:
    """Raise OptionError, ExistsError where splits of these names cannot be packed into OUT.

    names: [""] for a dataset without splits.
    """
    if os.path.lexists(out) and not os.path.isdir(out):
        raise OptionError(f"{printable(out)}: expected a directory, or nothing yet; this is a file")
    local.check_directory(out)
    if os.path.isdir(source):
        folder, target = os.path.realpath(os.fsdecode(source)), os.path.realpath(out)
        if f"{target}/".startswith(f"{folder.rstrip('/')}/"):
            raise OptionError(
                f"{printable(out)}: OUT lies in the folder to be packed; choose a directory "
                "outside of it"
            )
    storage = locate(out)
    if names == [""] and storage.exists(manifest.SPLITS):
        raise ExistsError(f"{printable(out)}: splits are packed here; choose another directory")
    if names != [""] and (storage.exists(manifest.MANIFEST) or storage.exists(JOURNAL)):
        raise ExistsError(
            f"{printable(out)}: one dataset is packed here, and splits are to be; choose another "
            "directory"
        )


def refuse_other(directory: str, wanted: dict[str, Any]) -> None:
    """Raise ExistsError when the dataset in a directory is another by its options alone."""
    try:
        there = manifest.load(locate(directory))
    except NotPackedError:
        return
    wanted = {"encode": None, "jpeg_tiles": None, "keep_original": None} | wanted
    # The source decides on the rest: `absent`, and what was not asked for.
    known = {name: there.options.get(name) for name in wanted}
    if "format" in wanted:
        known["format"] = there.format
    if wanted["shard_size"] is None:
        known["shard_size"] = None
    if wanted["shuffle"] is None:
        known["shuffle"] = None
        known["seed"] = wanted["seed"] if known["seed"] is None else known["seed"]
    if wanted["source"] == "dataset" and wanted["keep_original"] is None:
        known["keep_original"] = None
    if known != wanted:
        raise ExistsError(_another(directory, there, plan.changed(known, wanted)))


def is_packed(
    directory: str,
    dataset_id: bytes,
    options: dict[str, Any],
    by_default: Sequence[str] = (),
) -> bool:
    """Whether just this dataset is committed here, whole. Raises ExistsError when another one is.

    options: of the plan, some `by_default`. Files are looked at, not read.
    """
    try:
        there = manifest.load(locate(directory))
    except NotPackedError:
        return False
    if there.dataset_id == dataset_id:
        infos = (there.shard(number) for number in range(there.shards))
        return all(_size(directory, info.name) == info.size for info in infos)
    known = {name: value for name, value in there.options.items() if name != "tiles"}
    raise ExistsError(
        _another(
            directory,
            there,
            plan.changed({"format": "record"} | known, {"format": "record"} | options, by_default),
        )
    )


def _another(directory: str, there: manifest.Manifest, changed: Sequence[str]) -> str:
    differ = "".join(f"\n  option {line}" for line in changed)
    return (
        f"{printable(directory)}: another dataset is packed here "
        f"({show_count(there.records, 'record')}, id {there.dataset_id.hex()}):"
        + (differ or "\n  records, their sizes, fields or classes of the source are others")
        + ("\nGive the options that it has, choose" if changed else "\nChoose")
        + " another directory, or replace it with --overwrite"
    )


def _size(directory: str, name: str) -> int | None:
    try:
        return os.stat(os.path.join(directory, name)).st_size
    except OSError:
        return None


# --- splits ---------------------------------------------------------------------------------------


def has_splits(out: str, names: Sequence[str]) -> bool:
    """Whether shardio.json is there, and right."""
    try:
        return locate(out).read(manifest.SPLITS, manifest.MAX_SPLITS) == _splits_file(out, names)
    except (FileNotFoundError, DamageError):
        return False


def commit_splits(out: str, names: Sequence[str]) -> None:
    """Write shardio.json, after all that it names."""
    if not has_splits(out, names):
        for name in os.listdir(out):  # of a packer that was killed right here
            if name.endswith(f"-{manifest.SPLITS}.tmp") and journal.is_ours(out, name):
                local.remove(os.path.join(out, name))
        local.write_file(out, manifest.SPLITS, _splits_file(out, names))


def _splits_file(out: str, names: Sequence[str]) -> bytes:
    found = [manifest.load(locate(manifest.split_folder(out, name))).classes for name in names]
    classes = next((classes for classes in found if classes is not None), None)
    return manifest.dump_splits(names, classes)
