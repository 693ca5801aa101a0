"""The plan: which record goes into which shard, how large shards are, and the id of a dataset."""

import os
import shutil
from pathlib import Path

from support.packing import keys, pack_one
from support.trees import (
    JPEG,
    content,
    images,
    noise,
    plant,
)

from shardio.formats import manifest
from shardio.packing.options import PackOptions
from shardio.packing.pack import pack
from shardio.packing.plan import make_plan, shown_option
from shardio.packing.sources import imagefolder
from shardio.packing.sources.base import SourceRequest
from shardio.storage.location import locate


def test_shuffling_is_by_seed_and_can_be_left_out(source: Path, tmp_path: Path) -> None:
    for name, options in {"0": {}, "1": {"seed": 1}, "sorted": {"shuffle": False}}.items():
        pack_one(source, tmp_path / name, **options)
    in_order = sorted(str(key) for key in images())
    assert keys(tmp_path / "sorted") == in_order
    assert sorted(keys(tmp_path / "0")) == sorted(keys(tmp_path / "1")) == in_order
    assert len({tuple(keys(tmp_path / name)) for name in ("0", "1", "sorted")}) == 3


def test_the_dataset_id_knows_no_time_and_no_path(source: Path, tmp_path: Path) -> None:
    pack_one(source, tmp_path / "out")
    moved = shutil.copytree(source, tmp_path / "elsewhere")
    for path in moved.rglob("*.jpg"):
        os.utime(path)
    pack_one(moved, tmp_path / "again")
    assert content(tmp_path / "out") == content(tmp_path / "again")


def test_shards_hold_at_most_shard_size_bytes_or_one_larger_file(tmp_path: Path) -> None:
    sizes = [100, 900, 50, 2000, 10, 10, 10, 980, 20]
    tree = {f"{i}.jpg": noise(str(i), size) for i, size in enumerate(sizes)}
    source = plant(tmp_path / "src", tree)
    pack_one(source, tmp_path / "out", shard_size=1000, max_records=None, shuffle=False)
    opened = manifest.load(locate(tmp_path / "out"))
    assert opened.shard_records.tolist() == [2, 1, 1, 3, 2]


def test_max_records_bounds_every_shard(source: Path, tmp_path: Path) -> None:
    done = pack_one(source, tmp_path / "out", max_records=5)
    assert manifest.load(locate(tmp_path / "out")).shard_records.tolist() == [5, 5, 5, 5, 4]
    assert done.shards == 5


def test_default_shards_are_at_least_16_where_there_are_16_mib(tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    for i in range(40):
        with open(source / f"{i}.jpg", "wb") as file:
            file.write(JPEG)
            file.truncate(1 << 20)  # sparse: nothing is packed here
    [planned] = pack(source, tmp_path / "out", dry_run=True)
    assert 16 <= planned.shards <= 20
    for path in sorted(source.iterdir())[4:]:
        path.unlink()
    [planned] = pack(source, tmp_path / "out", dry_run=True)
    assert planned.shards == 4  # none below 1 MiB


def test_the_id_of_a_dataset_is_what_it_always_was(source: Path, tmp_path: Path) -> None:
    made = [
        make_plan(
            imagefolder.image_folder(SourceRequest(os.fsencode(source)))[""],
            PackOptions(shard_size=1000, max_records=records, shuffle=True),
        )
        for records in (3, 5)
    ]
    assert [one.dataset_id.hex() for one in made] == [
        "c7792e47e83698f0ae575f68094d7e3d",
        "7ca68cd57388aead568902cdd1a1fe5a",
    ]


def test_options_are_shown_as_they_are_given() -> None:
    for name, value, shown in (
        ("shard_size", 1 << 20, "1MiB"),
        ("where", {"label": ["cat", None], "width": ">=256"}, "label=cat,null and width>=256"),
        ("where", None, "not given"),
        ("seed", 3, "3"),
    ):
        assert shown_option(name, value) == shown
