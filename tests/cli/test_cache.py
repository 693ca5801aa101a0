"""`cache`: a cache directory is listed and emptied."""

import json
import re
import time
from pathlib import Path

from support.commands import Run

from shardio.storage.cache import SMALL, CacheDirectory


def test_a_cache_is_listed_and_emptied(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "cache"
    cache = CacheDirectory(folder, "1GiB", range_bytes=4096)
    for shard, ranges in ((0, 2), (1, 3)):
        file = cache.open(f"{shard:064x}", 10_000, b"d" * 16, shard)
        for number in range(ranges):
            claim = file.claim(number)
            assert claim is not None
            claim.store(bytes(claim.length))
        file.close()
    (folder / "mine.txt").write_text("mine")
    [row] = json.loads(run("cache", "ls", folder, "--json").stdout)["datasets"]
    assert row["dataset_id"] == (b"d" * 16).hex() and row["shards"] == 2
    assert row["bytes_present"] == 8192 + 10_000 and row["bytes"] == 20_000
    assert row["disk_bytes"] >= 8192 + 10_000 and abs(row["last_use"] - time.time()) < 1000
    shown = run("cache", "ls", folder).stdout.splitlines()
    assert re.match(r"(64){16} +2 +17.8 KiB +19.5 KiB  20", shown[1])
    small = cache.open("e" * 64, 3_000, SMALL, 0)
    claim = small.claim(0)
    assert claim is not None
    claim.store(bytes(3_000))
    small.close()
    assert re.search(r"\nmanifests +1 +2.9 KiB +2.9 KiB  20", run("cache", "ls", folder).stdout)
    whole = json.loads(run("cache", "ls", folder, "--json").stdout)["disk_bytes"]
    cleared = json.loads(run("cache", "clear", folder, "--json").stdout)
    assert cleared == {"files": 3, "bytes": whole} and whole > row["disk_bytes"]
    assert run("cache", "ls", folder).stdout == "nothing is cached here\n"
    assert [one.name for one in folder.iterdir()] == ["mine.txt"]
    assert run("cache", "ls", tmp_path / "nowhere").returncode == 1
    assert "no such directory" in run("cache", "clear", tmp_path / "nowhere").stderr
    assert run("cache", "empty", folder).returncode == 2
