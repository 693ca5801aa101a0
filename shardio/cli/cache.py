"""`cache`: what a cache directory has of remote datasets, and how it is emptied."""

from __future__ import annotations

import time
from typing import Any

from ..units import show_count, show_size
from .command import Command, option
from .output import Output


def _cache(output: Output, *, action: str, path: str) -> int:
    from ..storage import cache

    if action == "clear":
        files, size = cache.clear(path)
        text = f"{show_count(files, 'file')}, {show_size(size)}, removed"
        return output.show(text, {"files": files, "bytes": size})
    rows: dict[bytes, dict[str, Any]] = {}
    for one in cache.entries(path):
        row = rows.setdefault(
            one.dataset_id,
            {"dataset_id": one.dataset_id.hex()}
            | dict.fromkeys(("shards", "bytes_present", "bytes", "disk_bytes", "last_use"), 0),
        )
        row["shards"] += 1
        row["bytes_present"] += one.present
        row["bytes"] += one.size
        row["disk_bytes"] += one.allocated
        row["last_use"] = max(row["last_use"], one.last_use)
    facts: dict[str, Any] = {
        "datasets": list(rows.values()),
        "disk_bytes": sum(row["disk_bytes"] for row in rows.values()),
    }
    return output.show("\n".join(_lines(facts)), facts)


def _lines(facts: dict[str, Any]) -> list[str]:
    """Return the table of datasets."""
    if not facts["datasets"]:
        return ["nothing is cached here"]
    form = "{:<32}  {:>7}  {:>10}  {:>10}  {}"
    lines = [form.format("dataset", "shards", "present", "of", "last use")]
    for row in facts["datasets"]:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["last_use"]))
        name = row["dataset_id"] if row["dataset_id"].strip("0") else "manifests"
        sizes = (show_size(row["bytes_present"]), show_size(row["bytes"]))
        lines.append(form.format(name, f"{row['shards']:,}", *sizes, used))
    return [*lines, f"{show_size(facts['disk_bytes'])} on the disk"]


CACHE = Command(
    "cache",
    "list or empty a cache of remote datasets",
    _cache,
    "",
    option("action", "ls|clear", "list it, or remove all of it", choices=["ls", "clear"]),
    option("path", "DIR", "the cache directory"),
    examples=("shardio cache ls /nvme/cache", "shardio cache clear /nvme/cache"),
)
