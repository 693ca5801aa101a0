"""Row groups, of Parquet: which stay decoded, who shares them, names of classes, advice."""

import json
import os
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import LIMIT_S
from support.conformance import shard_of
from support.forging import in_child
from support.parquet_tables import index, write
from support.trees import shardio_json

import shardio
from shardio.dataset import sequence as sequences
from shardio.dataset.reader import Reader
from shardio.errors import SourceError
from shardio.formats import manifest
from shardio.formats.foreign import parquet, row_groups
from shardio.order.options import RequestedOptions
from shardio.packing.verify import verify
from shardio.storage.location import locate
from shardio.tuning.cost import TrainingJob
from shardio.tuning.explain import explain_job

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "parquet"
pytestmark = pytest.mark.usefixtures("empty_cache")

# --- what stays decoded ---------------------------------------------------------------------------


def count_decodes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The row groups that pyarrow decodes from now on."""
    decoded: list[int] = []
    original = pq.ParquetFile.read_row_group

    def read_row_group(self: Any, number: int, *more: Any, **options: Any) -> Any:
        decoded.append(number)
        return original(self, number, *more, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", read_row_group)
    return decoded


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The decoded row groups that are in memory."""
    living: Any = weakref.WeakSet()

    class Watched(row_groups.Group):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            living.add(self)

    monkeypatch.setattr(row_groups, "Group", Watched)
    return living


def test_row_groups_used_last_stay_decoded_within_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: Any
) -> None:
    noise = np.random.default_rng(0)
    write(tmp_path / "x.parquet", {"x": [noise.bytes(1000) for _ in range(50)]}, row_group_size=10)
    monkeypatch.setattr(row_groups, "cache_bytes", lambda _: 25_000)  # two row groups and a bit
    index(tmp_path)
    decoded = count_decodes(monkeypatch)
    shard = shard_of(tmp_path)
    for record in (0, 9, 10, 5, 15, 29, 19, 0):
        shard.read(record)
    assert decoded == [0, 1, 2, 0]
    assert 20_000 < sum(group.bytes for group in kept) <= 25_000
    other = shard_of(tmp_path)
    other.read(0)
    assert decoded == [0, 1, 2, 0, 0]
    other.read(9)
    assert decoded == [0, 1, 2, 0, 0] and len(kept) == 2
    shard.close()
    assert len(kept) == 1
    other.read(5)
    assert decoded == [0, 1, 2, 0, 0]  # so it is the other's
    other.close()
    assert not kept


def test_a_row_group_above_the_limit_is_kept_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: Any
) -> None:
    write(tmp_path / "x.parquet", {"x": list(range(30))}, row_group_size=10)
    monkeypatch.setattr(row_groups, "cache_bytes", lambda _: 1)
    index(tmp_path)
    decoded = count_decodes(monkeypatch)
    shard = shard_of(tmp_path)
    assert [shard.read(record)["x"] for record in range(30)] == list(range(30))
    assert decoded == [0, 1, 2]
    assert len(kept) == 1


def test_the_limit_is_a_share_of_the_memory_to_spare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_groups, "processors", lambda: 4)
    for spare, expected in ((64 << 30, 4 << 30), (1 << 30, 256 << 20)):
        assert row_groups.cache_bytes(spare) == expected
    asked: list[int] = []
    monkeypatch.setattr(row_groups, "memory_available", lambda: 12345)
    monkeypatch.setattr(row_groups, "cache_bytes", lambda spare: asked.append(spare) or 1 << 20)
    write(tmp_path / "x.parquet", {"x": [1]})
    index(tmp_path)
    shard_of(tmp_path).read(0)
    assert asked == [12345]  # once, for the process


def test_row_groups_that_are_passed_as_a_whole_are_not_kept_and_parts_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: Any
) -> None:
    write(tmp_path / "x.parquet", {"x": list(range(30))}, row_group_size=10)
    index(tmp_path)
    shard, decoded = shard_of(tmp_path), count_decodes(monkeypatch)
    assert len(list(shard.scan(0, 30))) == 30
    assert not kept and decoded == [0, 1, 2]
    decoded.clear()
    for start in range(0, 30, 2):
        shard.hold(start, start + 2)
    assert decoded == [0, 1, 2]


def test_row_groups_are_announced_as_a_whole_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "x.parquet", {"x": list(range(30))}, row_group_size=10)
    index(tmp_path)
    shard = shard_of(tmp_path)
    files, announced = [], []

    def will_need(self: parquet.ParquetFile, start: int, length: int, **_: bool) -> None:
        files.append(self)
        announced.append((start, length))

    monkeypatch.setattr(parquet.ParquetFile, "will_need", will_need)
    for start, stop in ((3, 3), (0, 2), (2, 9), (9, 11), (9, 11), (29, 30)):
        shard.will_need(start, stop)
    groups = [files[0].extent(group) for group in range(3)]
    ranges = [(begin, end - begin) for begin, end in groups]
    assert announced == [ranges[0], ranges[0], ranges[1], ranges[2]]


def test_threads_share_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "x.parquet", {"x": list(range(200))}, row_group_size=10)
    monkeypatch.setattr(row_groups, "cache_bytes", lambda _: 2000)
    index(tmp_path)
    shard, wrong = shard_of(tmp_path), []

    def read(seed: int) -> None:
        for record in np.random.default_rng(seed).integers(0, 200, 200).tolist():
            if shard.read(record)["x"] != record:
                wrong.append(record)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_fork_after_reading_reads_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    for folder in (tmp_path, tmp_path / "other"):
        write(folder / "x.parquet", {"x": list(range(200))}, row_group_size=10)
        index(folder)
    dataset, other = shardio.open(tmp_path), shardio.open(tmp_path / "other")
    entered, leave, parent = threading.Event(), threading.Event(), os.getpid()

    class Slow(row_groups.Group):
        @property
        def bytes(self) -> int:  # type: ignore[override]
            entered.set()
            if os.getpid() == parent:
                leave.wait(LIMIT_S)
            return 1000

        @bytes.setter
        def bytes(self, value: int) -> None:
            pass

    def child() -> None:
        assert [sample["x"] for sample in dataset] == list(range(200))

    monkeypatch.setattr(row_groups, "Group", Slow)
    thread = threading.Thread(target=lambda: other[0])
    thread.start()
    assert entered.wait(LIMIT_S)  # the thread is just putting a row group into the cache
    status = in_child(child)
    leave.set()
    thread.join()
    assert status == 0
    assert dataset[0]["x"] == 0 and in_child(child) == 0


def test_shards_that_are_let_go_give_their_descriptors_back(tmp_path: Path) -> None:
    for number in range(12):
        write(tmp_path / f"{number:02d}.parquet", {"x": [number]})
    index(tmp_path)
    storage = locate(tmp_path)
    reader = Reader(storage, manifest.load(storage), limit=2)
    before = len(os.listdir("/proc/self/fd"))
    assert [next(iter(reader.shard(i).scan(0, 1)))["x"] for i in range(12)] == list(range(12))
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # and no garbage was collected


def test_a_damaged_row_group_is_decoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"x": [b"%04d" % i * 9 for i in range(300)]}
    path = write(tmp_path / "x.parquet", rows, compression="none", use_dictionary=False)
    index(tmp_path)
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    tries = count_decodes(monkeypatch)
    assert len(verify(tmp_path, jobs=1).damages) == 300
    assert tries == [0]


# --- what explain says ----------------------------------------------------------------------------


def explained(folder: Path, available: int, **options: Any) -> Any:
    made = manifest.load(locate(folder))
    given = RequestedOptions(**{"batch_size": 8, **options}).resolve(made.mean_bytes)
    return explain_job(TrainingJob(made, given, available_bytes=available))


def row_group_warnings(found: Any) -> list[Any]:
    return [one for one in found.warnings if one.code == "row_groups"]


def test_explain_warns_where_row_groups_are_decoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_groups, "LEAST_CACHE", 20 * 1000)
    monkeypatch.setattr(row_groups, "processors", lambda: 1)
    noise = np.random.default_rng(0)
    blobs = [noise.bytes(9_000 if i else 100) for i in range(400)]
    write(tmp_path / "0.parquet", {"x": blobs}, row_group_size=10, compression="none")
    index(tmp_path)
    group = manifest.load(locate(tmp_path)).options["row_group"]
    assert group["rows"] == 10 and 90_000 <= group["bytes"] < 91_000
    few = {"spans": 2, "unit": 4}
    [told] = row_group_warnings(explained(tmp_path, 4 * 500_000, shuffle_buffer=100, **few))
    assert "from about 22 row groups at once" in told.what  # 2 spans of 1 + 2 * 50 / 10
    assert "shardio pack DIR OUT" in told.mend
    fitting = told.change["shuffle_buffer"]
    assert f"shuffle_buffer={fitting}" in told.mend and 8 <= fitting < 100
    assert not row_group_warnings(explained(tmp_path, 4 * 500_000, shuffle_buffer=fitting, **few))
    assert not row_group_warnings(explained(tmp_path, 4 * 2_100_000, shuffle_buffer=100, **few))
    [spans] = row_group_warnings(explained(tmp_path, 4 * 500_000, spans=16))
    assert spans.change == {} and "40 row groups" in spans.what  # no window makes 16 spans fit
    assert row_group_warnings(explained(tmp_path, 4 * 500_000, shuffle_buffer="all"))
    assert not row_group_warnings(explained(tmp_path, 4 * 4_000_000, shuffle_buffer="all"))


# --- names of classes, as `datasets` writes them --------------------------------------------------


def hugging(features: Any) -> dict[bytes, bytes]:
    return {b"huggingface": json.dumps({"info": {"features": features}}).encode()}


def label_file(path: Path, metadata: Mapping[bytes, bytes] | None, field: str = "label") -> None:
    table = pa.table({field: [1, 0, -1, None], "fine": [0, 1, 2, 3]})
    pq.write_table(table.replace_schema_metadata(metadata), path)


def named(*names: str) -> dict[str, Any]:
    return {"_type": "ClassLabel", "names": list(names)}


def test_class_names_of_a_golden_file_are_those_of_the_dataset(tmp_path: Path) -> None:
    name = "train-00000-of-00001.parquet"
    (tmp_path / name).write_bytes((GOLDEN / name).read_bytes())
    assert index(tmp_path).classes == 2
    data = sequences.stored(tmp_path)
    assert data.classes == ["cat", "dog"]
    cats = shardio.ShardDataset(tmp_path, where={"label": "cat"})
    assert cats.records == sum(sample["label"] == 0 for sample in data)


def test_class_names_are_those_of_the_column_that_is_the_label(tmp_path: Path) -> None:
    names = {"label": named("a", "b"), "fine": named("p", "q", "r", "s")}
    label_file(tmp_path / "0.parquet", hugging(names))
    label_file(tmp_path / "1.parquet", None)  # says nothing, and nothing else
    index(tmp_path)
    data = shardio.open(tmp_path)
    assert data.classes == ["a", "b"]
    assert [sample["label"] for sample in data][:4] == [1, 0, -1, None]
    assert index(tmp_path, fields={"label": "fine", "x": "label"}, overwrite=True).classes == 4
    assert shardio.open(tmp_path).classes == ["p", "q", "r", "s"]


@pytest.mark.parametrize(
    "metadata",
    [
        hugging({"label": {"_type": "Value", "dtype": "int64"}}),
        hugging({"label": {"_type": "ClassLabel", "names": None, "num_classes": 3}}),
        hugging({"label": {"_type": "ClassLabel", "names": ["a", 1]}}),
        hugging({"label": {"_type": "ClassLabel", "names": []}}),
        hugging({"label": {"_type": "ClassLabel", "names": ["a", "b", "a"]}}),
        hugging({"label": {"_type": "Pose", "names": ["a", "b"]}}),
        hugging({"label": {"_type": "List", "feature": named("a", "b")}}),
        hugging({"other": named("a", "b")}),
        hugging(["label"]),
        hugging(None),
        {b"huggingface": b"[1]"},
        {b"huggingface": b"\xff{"},
        {b"huggingface": b"[" * 100_000},
        {b"pandas": b"{}"},
    ],
)
def test_what_names_no_classes_names_none(tmp_path: Path, metadata: dict[bytes, bytes]) -> None:
    label_file(tmp_path / "0.parquet", metadata)
    assert index(tmp_path).classes is None
    assert shardio.open(tmp_path).classes is None


def test_files_that_disagree_on_classes_are_refused(tmp_path: Path) -> None:
    for number, names in enumerate([("a", "b"), ("a", "b"), ("b", "a")]):
        label_file(tmp_path / f"{number}.parquet", hugging({"label": named(*names)}))
    with pytest.raises(
        SourceError,
        match=r"other classes for 'label'.*: 0\.parquet has 2: a, b; 2\.parquet has 2: b, a",
    ):
        index(tmp_path)
    assert not (tmp_path / "manifest.json").exists()
    assert index(tmp_path, files="[01].parquet").classes == 2


def test_explain_looks_at_labels_beside_an_index_that_is_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    table = pa.table({"label": [i // 100 for i in range(300)]})
    metadata = hugging({"label": named("a", "b", "c")})
    pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "data" / "0.parquet")
    index(tmp_path / "data", out=tmp_path / "idx")
    asked = ("explain", tmp_path / "idx", "--batch-size", "8", "--shuffle-buffer", "64")
    found = shardio_json(*asked, "--root", tmp_path / "data")
    assert "class_order" in [one["code"] for one in found["warnings"]]
