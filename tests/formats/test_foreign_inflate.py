"""Files that are inflated when they are opened: compressed shards of MDS, bombs, damage."""

import bz2
import gzip
import json
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.conformance import same
from support.forging import memory_below
from support.mds_writer import COLUMNS, build, read, samples

from shardio.errors import DamageError, DependencyError, ShardioError, SourceError
from shardio.formats.foreign.mds import MdsFile
from shardio.formats.index import checksum
from shardio.storage.location import locate

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "mds"


def pack_zstd(data: bytes, **options: Any) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    return bytes(zstandard.ZstdCompressor(**options).compress(data))


PACK = {"gz": partial(gzip.compress, mtime=0), "bz2": bz2.compress, "zstd": pack_zstd}


def save_zipped(folder: Path, ending: str, zipped: bytes, row: dict[str, Any]) -> str:
    name = "shard.00000.mds"
    listed = row | {
        "raw_data": row["raw_data"] | {"basename": name},
        "zip_data": {"basename": f"{name}.{ending}", "bytes": len(zipped), "hashes": {}},
    }
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.{ending}").write_bytes(zipped)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [listed]}))
    return f"{name}.{ending}"


@pytest.mark.parametrize("ending", list(PACK))
def test_a_compressed_shard_is_held_inflated(tmp_path: Path, ending: str) -> None:
    data, row = build(COLUMNS, samples(50))
    zipped = PACK[ending](data)
    name = save_zipped(tmp_path, ending, zipped, row)
    assert [values["label"] for values in read(tmp_path, name)] == list(range(50))
    file = MdsFile(locate(tmp_path), name)
    assert (file.size, file.end) == (len(zipped), len(data))
    assert file.read(3, 90) == data[3:93]
    file.will_need(0, len(data))
    file.scattered()
    with pytest.raises(DamageError, match=f"inflated, it ends at byte {len(data)}, expected 2 "):
        file.read(len(data) - 1, 2)
    file.close()
    file.close()
    with pytest.raises(DamageError):
        file.read(0, 1)


def test_a_frame_of_zstd_that_does_not_state_its_size_is_read(tmp_path: Path) -> None:
    data, row = build(COLUMNS, samples(50))
    zipped = pack_zstd(data, write_content_size=False)
    name = save_zipped(tmp_path, "zstd", zipped, row)
    assert len(read(tmp_path, name)) == 50
    name = save_zipped(tmp_path, "zstd", pack_zstd(data + b"x", write_content_size=False), row)
    with pytest.raises(DamageError, match="inflated, it has more bytes, expected"):
        read(tmp_path, name)


def test_the_inflated_file_beside_a_compressed_one_is_the_shard(tmp_path: Path) -> None:
    data, row = build(COLUMNS, samples(5))
    name = save_zipped(tmp_path, "gz", gzip.compress(data), row)
    raw = tmp_path / "shard.00000.mds"
    raw.write_bytes(data)
    assert len(read(tmp_path, raw.name)) == 5
    with pytest.raises(SourceError, match=r"shard.00000.mds is there, too.*Remove one"):
        read(tmp_path, name)
    (tmp_path / name).unlink()
    assert len(read(tmp_path, raw.name)) == 5


@pytest.mark.parametrize("ending", list(PACK))
def test_a_bomb_is_refused_before_it_goes_off(tmp_path: Path, ending: str) -> None:
    """32 KB that become 256 MB, or claim to: never more than the list says is inflated."""
    data, row = build(COLUMNS, samples(5))
    bomb = PACK[ending](data + bytes(64 << 20))
    name = save_zipped(tmp_path, ending, bomb, row)
    with memory_below(32 << 20):
        with pytest.raises(DamageError, match=r"cannot be inflated|it has more bytes"):
            read(tmp_path, name)
        row["raw_data"]["bytes"] = 2**32 - 1
        save_zipped(tmp_path, ending, bomb, row)
        with pytest.raises(SourceError, match="would become 4,294,967,295 in memory"):
            read(tmp_path, name)


@pytest.mark.parametrize("ending", list(PACK))
def test_damage_in_a_compressed_shard_is_the_right_bytes_or_an_error(
    tmp_path: Path, ending: str
) -> None:
    data, row = build(COLUMNS, samples(30))
    zipped = PACK[ending](data)
    name = save_zipped(tmp_path, ending, zipped, row)
    right = read(tmp_path, name)
    file = MdsFile(locate(tmp_path), name)
    ranges, extra = list(file.scan()), file.extra()
    sums = [checksum(file.read(*one)) for one in ranges]
    file.close()
    rng = random.Random(3)
    for _ in range(120):
        damaged = bytearray(zipped)
        damaged[rng.randrange(len(zipped))] ^= 1 << rng.randrange(8)
        (tmp_path / name).write_bytes(damaged)
        try:
            again = MdsFile(locate(tmp_path), name, extra)
        except ShardioError:
            continue
        for i, (at, size) in enumerate(ranges):
            held = again.read(at, size)
            if checksum(held) == sums[i]:  # what ForeignShard compares
                assert same(again.values(held, i), right[i])
        again.close()
    for cut in (0, 1, len(zipped) // 2, len(zipped) - 1):
        save_zipped(tmp_path, ending, zipped[:cut], row)
        with pytest.raises(DamageError, match=r"cannot be inflated|inflated, it has"):
            read(tmp_path, name)
    for longer in (zipped + b"x", zipped + zipped):
        save_zipped(tmp_path, ending, longer, row)
        with pytest.raises(DamageError, match=r"cannot be inflated|inflated, it has"):
            read(tmp_path, name)


def test_a_replaced_file_is_refused_before_it_is_inflated(tmp_path: Path) -> None:
    data, row = build(COLUMNS, samples(3))
    name = save_zipped(tmp_path, "gz", gzip.compress(data, mtime=0), row)
    file = MdsFile(locate(tmp_path), name)
    extra = file.extra()
    size = file.size
    file.close()
    (tmp_path / name).write_bytes(gzip.compress(data + b"more", mtime=0))
    with pytest.raises(DamageError, match="when it was indexed"):
        MdsFile(locate(tmp_path), name, extra, size=size)


def test_a_missing_zstandard_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(DependencyError, match=r"'shardio-torch\[mds\]'. Or inflate it: zstd"):
        read(GOLDEN / "zstd", "shard.00000.mds.zstd")
