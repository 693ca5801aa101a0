"""One record: where its bytes lie, what they hash to, what it holds."""

from pathlib import Path

import xxhash
from support.small_datasets import jpeg, make, shard_files
from support.trees import plant
from support.viewer_records import fields

import shardio
from shardio.viewer.results import Query
from shardio.viewer.view import open_view


def test_a_record_says_where_its_bytes_lie_and_what_they_hash_to(tmp_path: Path) -> None:
    folder = make(tmp_path, [3, 4], image=jpeg)
    with open_view(folder) as view:
        record = view.record(5)
    [shard] = [path for path in shard_files(folder) if path.name == record.shard]
    data = shard.read_bytes()[record.start : record.start + record.bytes]
    assert jpeg(5) in data and data.endswith(jpeg(5))
    assert (
        record.checksum and record.checksum.stored == f"{int.from_bytes(data[:8], 'little'):016x}"
    )
    assert record.checksum.found == record.checksum.stored and record.checksum.ok
    assert (record.shard_number, record.number_in_shard, record.class_name) == (1, 2, "eel")
    assert (record.width, record.height) == (24, 16)
    assert record.image_format == "JPEG, 24 x 16, RGB"


def test_grouped_files_are_one_record_with_their_fields(tmp_path: Path) -> None:
    tree: dict[str | bytes, bytes | None] = {}
    for name in ("a", "b"):
        tree |= {f"{name}.jpg": jpeg(ord(name)), f"{name}.txt": f"text of {name}".encode()}
    shardio.pack(plant(tmp_path / "in", tree), tmp_path / "out", jobs=1)
    with open_view(tmp_path / "out") as view:
        shown = [fields(view.record(number)) for number in range(2)]
        assert sorted(text for one in shown for text in one.values() if "text" in text) == [
            "text of a", "text of b"
        ]  # fmt: skip
        assert view.page(Query(search="a"), search_s=60.0).cards


def test_a_checksum_of_foreign_records_is_that_of_their_bytes(tmp_path: Path) -> None:
    source = plant(tmp_path / "in", {f"c/{n}.jpg": jpeg(n) for n in range(3)})
    shardio.index(source, jobs=1)
    with open_view(source) as view:
        record = view.record(1)
        assert record.checksum and record.checksum.covers == "stored bytes"
        image = jpeg(int(record.key[2]))
        assert record.checksum.stored == f"{xxhash.xxh3_64_intdigest(image):016x}"
        assert view.image(1).data == image
