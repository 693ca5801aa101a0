"""Shards above 4 GiB: places that take more than 32 bits, in files of ours and of LMDB."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import shardio
from shardio import DamageError

MANY, SMALL, SIZE = 66, 30, 64 << 20  # records of 64 MiB, and small ones behind them


@pytest.mark.stress
@pytest.mark.parametrize("format", ["record", "lmdb"])
def test_shards_above_4_gib(tmp_path: Path, format: str) -> None:
    if shutil.disk_usage(tmp_path).free < 12 << 30:
        pytest.skip("NOT TESTED HERE: shards above 4 GiB take 12 GB of free disk")
    noise = np.random.default_rng(0).bytes(SIZE)

    def payload(number: int) -> bytes:
        return number.to_bytes(8, "little") + noise[8:] if number < MANY else b"%d" % number

    out = tmp_path / "out"
    fields = {"image": "bytes", "label": "int"}
    with shardio.Writer(out, fields=fields, format=format, shard_size="6GiB") as writer:
        for number in range(MANY + SMALL):
            writer.write({"image": payload(number), "label": number})
    (shard,) = (path for path in out.iterdir() if path.name != "manifest.json")
    assert shard.stat().st_size > 1 << 32
    behind = [*range(MANY - 3, MANY + SMALL)]
    whole = shardio.open(out, decode=None)
    assert all(whole[n]["image"] == payload(n) and whole[n]["label"] == n for n in behind)
    options = {"batch_size": 4, "decode": None, "fields": ("image", "label")}
    batches = [*shardio.ShardDataset(out, **options).select(behind)]
    rows = [(bytes(i), int(n)) for batch in batches for i, n in zip(*batch, strict=True)]
    assert {n for _, n in rows} == {*behind}
    assert all(image == payload(n) for image, n in rows)

    data = np.memmap(shard, mode="r+")
    at = len(data) - SIZE  # in the last of the large ones
    data[at] ^= 1
    data.flush()
    del data
    with pytest.raises(DamageError, match=f"record {MANY - 1} at byte 4"):
        whole[MANY - 1]
    assert whole[MANY]["image"] == payload(MANY)
    found = shardio.verify(out)
    assert [f"record {MANY - 1}" in str(one) for one in found.damages] == [True]
