"""Parquet: golden files of `datasets` and pyarrow, every type, the cache of row groups, damage."""

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import LIMIT_S
from support.conformance import same
from support.table_conformance import FILES, TableConformance
from support.trees import shardio_json

import shardio
from shardio import formats
from shardio.dataset import sequence as sequences
from shardio.dataset.reader import Reader
from shardio.errors import DamageError, DependencyError, ShardioError, SourceError
from shardio.formats import manifest
from shardio.formats.base import Shard
from shardio.formats.foreign import arrow_columns, parquet, row_groups
from shardio.formats.sample import Schema
from shardio.names import KEY
from shardio.order.options import RequestedOptions
from shardio.packing import index as indexing
from shardio.packing.verify import verify
from shardio.storage.location import locate
from shardio.tuning.cost import TrainingJob
from shardio.tuning.explain import explain_job

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "parquet"


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin with an empty cache."""
    monkeypatch.setattr(row_groups, "_CACHE", row_groups._Cache())


def write(path: Path, columns: Mapping[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(dict(columns)), path, **options)
    return path


def index(folder: Path, **options: Any) -> indexing.Indexed:
    return indexing.index(folder, format="parquet", jobs=1, **options)


def shard_of(
    folder: Path, number: int = 0, fields: Sequence[tuple[str, str]] | None = None
) -> Shard:
    """A shard of an indexed folder; fields: others than the manifest has."""
    storage = locate(folder)
    made = manifest.load(storage)
    opening = made.opening(storage)
    if fields is not None:
        opening = replace(opening, schema=Schema(fields))
    return formats.open_shard("parquet", opening, made.shard(number))


def ways(shard: Shard) -> list[list[dict[str, Any]]]:
    """All records, by every way to them."""
    n = shard.records
    held = shard.hold(0, n)
    return [
        [shard.read(record) for record in range(n)],
        [shard.read(record) for record in reversed(range(n))][::-1],
        list(shard.scan(0, n)),
        [*shard.scan(0, n // 3), *shard.scan(n // 3, n)],
        [shard.decode(record, data) for record, data in enumerate(held)],
    ]


def described(value: Any) -> Any:
    """As the golden script says it."""
    if isinstance(value, np.ndarray):
        assert value.flags.owndata
        digest = hashlib.sha256(value.tobytes()).hexdigest()
        return {"dtype": value.dtype.str, "shape": list(value.shape), "sha256": digest}
    if isinstance(value, bytes):
        return {"bytes": len(value), "sha256": hashlib.sha256(value).hexdigest()}
    if isinstance(value, list):
        return [described(one) for one in value]
    if isinstance(value, dict):
        return {name: described(one) for name, one in value.items()}
    return value


EXPECTED = json.loads((GOLDEN / "expected.json").read_text())["files"]


@pytest.mark.parametrize("name", EXPECTED)
def test_golden_files_are_read_as_they_were_written(name: str, tmp_path: Path) -> None:
    if name == "types.parquet" and int(pa.__version__.partition(".")[0]) < 26:
        pytest.skip("pyarrow 18 to 25 cannot read null among lists of a fixed size")
    (tmp_path / name).write_bytes((GOLDEN / name).read_bytes())
    made = index(tmp_path)
    expected = EXPECTED[name]
    assert made.records == len(expected)
    for samples in [*ways(shard_of(tmp_path)), list(sequences.stored(tmp_path))]:
        for sample, right in zip(samples, expected, strict=True):
            for field, value in right.items():
                if field == KEY:
                    assert sample[KEY].decode() == value
                elif value is not None or field in sample:
                    assert described(sample[field]) == value, field
            assert set(sample) <= {KEY, *right}


def test_the_fields_of_a_hugging_face_data_set(tmp_path: Path) -> None:
    name = "train-00000-of-00001.parquet"
    (tmp_path / name).write_bytes((GOLDEN / name).read_bytes())
    assert index(tmp_path).fields == {
        KEY: "key",
        "image": "image",
        "label": "int",
        "caption": "str",
        "embedding": "array",
        "grid": "json",
        "image.path": "str",
        "objects": "json",
    }
    dataset = shardio.open(tmp_path)
    assert dataset[3][KEY] == "train-00000-of-00001/00000003"
    assert dataset[3]["image"].size == (8, 9)


class TestParquetConformance(TableConformance):
    def build(self, folder: Path, fields: Any, samples: Any) -> Path:
        columns = self.columns(samples)
        path = write(folder / "x.parquet", columns, row_group_size=7, compression="none")
        index(folder)
        return path

    def open(self, path: Path) -> Shard:
        return shard_of(path.parent, fields=self.FIELDS)


# --- values -----------------------------------------------------------------------------------

VALUES = {
    "i": (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    "f": (pa.float64(), st.floats(allow_nan=False)),
    "b": (pa.bool_(), st.booleans()),
    "s": (pa.string(), st.text(max_size=5)),
    "y": (pa.binary(), st.binary(max_size=5)),
    "l": (pa.list_(pa.int64()), st.lists(st.integers(-5, 5), max_size=3)),
    "n": (pa.list_(pa.string()), st.lists(st.none() | st.text(max_size=2), max_size=3)),
    "d": (pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["x", "yy"])),
    "q": (
        pa.struct({"a": pa.int8(), "t": pa.list_(pa.decimal128(5, 1))}),
        st.fixed_dictionaries(
            {"a": st.integers(0, 9), "t": st.lists(st.decimals(-9, 9, places=1))}
        ),
    ),
}


def plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    return str(value) if type(value).__name__ == "Decimal" else value


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_rows_are_what_pyarrow_gives(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("parquet")
    n = data.draw(st.integers(0, 12))
    names = data.draw(st.lists(st.sampled_from(sorted(VALUES)), unique=True, min_size=1))
    columns = {
        name: pa.array(
            data.draw(st.lists(st.none() | VALUES[name][1], min_size=n, max_size=n)),
            VALUES[name][0],
        )
        for name in names
    }
    path = write(
        folder / "x.parquet",
        columns,
        row_group_size=data.draw(st.integers(1, 5)),
        compression=data.draw(st.sampled_from(["none", "snappy", "zstd", "gzip"])),
        data_page_version=data.draw(st.sampled_from(["1.0", "2.0"])),
        use_dictionary=data.draw(st.booleans()),
    )
    index(folder)
    rows = [plain(row) for row in pq.read_table(path).to_pylist()]
    for samples in ways(shard_of(folder)):
        for sample, right in zip(samples, rows, strict=True):
            given = {name: plain(value) for name, value in sample.items() if name != KEY}
            assert given == {name: value for name, value in right.items() if name in given}
            assert all(right[name] is None for name in right.keys() - given.keys())


def test_columns_of_another_type_in_other_files_fit_one_field(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"x": [1, 2], "v": [[1], [2]], "only": ["a", "b"]})
    write(tmp_path / "b.parquet", {"x": [0.5, None], "v": [[1, None], [2]], "n": pa.nulls(2)})
    assert index(tmp_path).fields == {KEY: "key", "only": "str", "v": "json", "x": "float"}
    for number, expected in ((0, [1.0, 2.0]), (1, [0.5, None])):
        for samples in ways(shard_of(tmp_path, number)):
            found = [sample["x"] for sample in samples]
            assert same(found, expected)
            assert [sample["only"] for sample in samples] == (
                [None, None] if number else ["a", "b"]
            )


def test_keys_come_from_their_column_or_are_the_rows_number(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {KEY: pa.array(["é", None, ""]), "x": [1, 2, 3]})
    write(tmp_path / "b.parquet", {"x": [4]})
    index(tmp_path)
    keys = ["é".encode(), b"a/00000001", b"a/00000002"]
    for samples in ways(shard_of(tmp_path)):
        assert [sample[KEY] for sample in samples] == keys
    assert [shard_of(tmp_path).key(i) for i in range(3)] == keys
    assert shard_of(tmp_path, 1).key(0) == b"b/00000000"


def test_text_that_is_no_utf8_is_an_error_naming_the_row(tmp_path: Path) -> None:
    text = pa.array([b"a", b"\xff", b"c"]).view(pa.string())
    write(tmp_path / "x.parquet", {"text": text})
    with pytest.raises(DamageError, match=r"x\.parquet: record 1 .*utf-8"):
        index(tmp_path)


def test_an_image_that_is_only_a_path_is_an_error(tmp_path: Path) -> None:
    rows = [{"bytes": b"x", "path": "a"}, None, {"bytes": None, "path": None}]
    path = write(tmp_path / "x.parquet", {"photo": pa.array(rows, FILES), "n": [1, 2, 3]})
    index(tmp_path)
    for samples in ways(shard_of(tmp_path)):
        assert [(s["photo"], s["photo.path"]) for s in samples] == [
            (b"x", "a"),
            *[(None, None)] * 2,
        ]
    rows[2] = {"bytes": None, "path": "photos/\x1b7.jpg"}
    write(path, {"photo": pa.array(rows, FILES)}, row_group_size=2)
    with pytest.raises(SourceError, match=r"row 2: column 'photo' .*\\x1b7\.jpg.*\n.*embed_table"):
        index(tmp_path, overwrite=True)


def test_structs_that_only_look_like_images_stay_structs(tmp_path: Path) -> None:
    other = pa.struct({"bytes": pa.int64(), "path": pa.string()})
    more = pa.struct({"bytes": pa.binary(), "path": pa.string(), "size": pa.int64()})
    a, b = {"bytes": 1, "path": "x"}, {"bytes": b"1", "path": "x", "size": 3}
    write(tmp_path / "x.parquet", {"a": pa.array([a], other), "b": pa.array([b], more)})
    index(tmp_path)
    [sample] = shard_of(tmp_path).scan(0, 1)
    assert (sample["a"], sample["b"]) == (a, b)


@pytest.mark.parametrize("second", ["x", "image.path"])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, second: str) -> None:
    images = pa.array([{"bytes": b"x", "path": None}], FILES)
    table = pa.Table.from_arrays([images, pa.array([1]), pa.array([2])], ["image", "x", second])
    pq.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(SourceError, match=f"several columns are called '{second}'"):
        index(tmp_path)


# --- row groups ---------------------------------------------------------------------------------


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


class Counting:
    """A storage that remembers what was read."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.url = inner, inner.url
        self.read, self.exists = inner.read, inner.exists
        self.ranges: list[tuple[int, int]] = []

    remote = False

    def open(self, name: str, known: Any = None) -> Any:
        file = self._inner.open(name)
        original, ranges = file.read, self.ranges

        class File:
            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

            def read(self, start: int, length: int) -> bytes:
                ranges.append((start, length))
                return original(start, length)

        return File()

    def is_network(self) -> bool:
        return False


def test_only_columns_that_are_fields_are_read_and_each_once(tmp_path: Path) -> None:
    images = [{"bytes": bytes([i]) * 5000, "path": f"{i}.jpg"} for i in range(20)]
    columns = {"image": pa.array(images, FILES), "other": [bytes(5000)] * 20, "label": range(20)}
    write(tmp_path / "x.parquet", columns, row_group_size=10, use_dictionary=False)
    index(tmp_path)
    storage = Counting(locate(tmp_path))
    made = manifest.load(locate(tmp_path))
    described = pq.read_metadata(tmp_path / "x.parquet")
    for wanted in (("label",), ("image", "label"), ("image.path",)):
        storage.ranges.clear()
        kept = [field for field in made.schema.fields if field[0] in (KEY, *wanted)]
        opening = replace(made.opening(storage), schema=Schema(kept))  # type: ignore[arg-type]
        shard = formats.open_shard("parquet", opening, made.shard(0))
        opened = len(storage.ranges)
        assert len(list(shard.scan(0, 20))) == 20
        paths = {"label": "label", "image": "image.bytes", "image.path": "image.path"}
        expected = sorted(
            (column.data_page_offset, column.total_compressed_size)
            for group in range(2)
            for column in (described.row_group(group).column(i) for i in range(4))
            if column.path_in_schema in {paths[name] for name in wanted}
        )
        assert sorted(storage.ranges[opened:]) == expected
        shard.close()


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


def test_row_groups_that_are_too_large_are_refused_with_what_splits_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "x.parquet", {"x": list(range(1000))}, use_dictionary=False)
    monkeypatch.setattr(parquet, "MAX_GROUP", 6000)
    with pytest.raises(SourceError, match=r"row group 0 takes \d,\d+ bytes") as caught:
        index(tmp_path)
    code = "\n".join(line[2:] for line in str(caught.value).splitlines()[1:])
    exec(code, {})
    path.unlink()
    assert index(tmp_path).records == 1000
    assert [sample["x"] for sample in shard_of(tmp_path).scan(0, 1000)] == list(range(1000))


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


def in_child(work: Callable[[], None]) -> int:
    """Exit status of a fork that does this; negative: the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        status = 1
        signal.alarm(LIMIT_S)  # a child that waits for ever fails the test, rather than hang it
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


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


# --- pyarrow is optional --------------------------------------------------------------------------


def test_without_pyarrow_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "x.parquet", {"x": [1]})
    arrow_columns.import_pyarrow.cache_clear()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DependencyError, match=r"pip install 'shardio-torch\[parquet\]'"):
        index(tmp_path)


def test_pyarrow_is_not_imported_until_a_parquet_file_is_opened() -> None:
    code = (
        "import sys, shardio.formats.foreign.parquet, shardio; sys.exit('pyarrow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- damage -------------------------------------------------------------------------------------


def test_what_is_no_parquet_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    for data, error, message in (
        (b"", DamageError, "does not end with"),
        (b"PAR1" + bytes(4) + b"PAR1", DamageError, "footer"),
        (b"PAR1" + b"\xff" * 4 + b"PAR1", DamageError, "does not end with"),
        (bytes(100) + b"PARE", SourceError, "encrypted"),
        (b"PAR1" + b"\x15\x04" * 50 + b"\x64\0\0\0PAR1", DamageError, "footer"),
    ):
        path.write_bytes(data)
        with pytest.raises(error, match=message):
            index(tmp_path)


def test_row_groups_that_were_swapped_are_found(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    columns = {"x": [noise.bytes(50) for _ in range(20)]}
    path = write(
        tmp_path / "x.parquet", columns, row_group_size=10, use_dictionary=False, compression="none"
    )
    index(tmp_path)
    described = pq.read_metadata(path)
    first, second = (described.row_group(group).column(0) for group in range(2))
    data, size = bytearray(path.read_bytes()), first.total_compressed_size
    assert second.total_compressed_size == size
    a, b = first.data_page_offset, second.data_page_offset
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]
    path.write_bytes(data)
    assert len(pq.read_table(path)) == 20  # for pyarrow nothing is wrong
    with pytest.raises(DamageError, match=r"row group 0, column x at byte 4: its checksum"):
        shard_of(tmp_path).read(0)


def test_a_flip_in_one_column_leaves_the_others_readable(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"a": [1, 2], "b": [3, 4]})
    index(tmp_path)
    column = pq.read_metadata(path).row_group(0).column(1)
    data = bytearray(path.read_bytes())
    data[column.data_page_offset + 5] ^= 1
    path.write_bytes(data)
    assert shard_of(tmp_path, fields=[(KEY, "key"), ("a", "int")]).read(1)["a"] == 2
    with pytest.raises(DamageError, match="column b"):
        shard_of(tmp_path).read(1)


@pytest.mark.parametrize("name", EXPECTED)
def test_damage_before_indexing_ends_in_values_or_an_error(tmp_path: Path, name: str) -> None:
    intact = (GOLDEN / name).read_bytes()
    noise = np.random.default_rng(2)
    path = tmp_path / "x.parquet"

    def child() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        for number in range(150):
            data = bytearray(intact)
            low = len(intact) * 2 // 3 if number % 2 else 0  # footers are dense with meaning
            at = int(noise.integers(low, len(intact)))
            data[at] ^= 1 << (number % 8)
            path.write_bytes(data if number % 5 else data[:at])
            try:
                index(tmp_path, overwrite=True)
            except ShardioError:
                continue

    assert in_child(child) == 0


def test_page_checksums_are_checked_when_a_file_is_indexed(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    columns = {"x": list(range(1000))}
    write(path, columns, use_dictionary=False, compression="none", write_page_checksum=True)
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)
    assert pq.read_table(path).column("x").to_pylist() != list(range(1000))
    with pytest.raises(DamageError, match="CRC"):
        index(tmp_path)


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


# --- what explain says ----------------------------------------------------------------------------


def explained(folder: Path, available: int, **options: Any) -> Any:
    made = manifest.load(locate(folder))
    given = RequestedOptions(**{"batch_size": 8, **options}).resolve(made.mean_bytes)
    return explain_job(TrainingJob(made, given, available_bytes=available))


def row_group_warnings(found: Any) -> list[Any]:
    return [one for one in found.warnings if one.code == "row_groups"]


def test_explain_looks_at_labels_beside_an_index_that_is_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    table = pa.table({"label": [i // 100 for i in range(300)]})
    metadata = hugging({"label": named("a", "b", "c")})
    pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "data" / "0.parquet")
    index(tmp_path / "data", out=tmp_path / "idx")
    asked = ("explain", tmp_path / "idx", "--batch-size", "8", "--shuffle-buffer", "64")
    found = shardio_json(*asked, "--root", tmp_path / "data")
    assert "class_order" in [one["code"] for one in found["warnings"]]


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


def test_keys_may_be_numbers_and_nothing_stranger(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", {KEY: [7, None, 0], "x": [1, 2, 3]})
    index(tmp_path)
    for samples in ways(shard_of(tmp_path)):
        assert [sample[KEY] for sample in samples] == [b"7", b"x/00000001", b"0"]
    for odd in ([True], [1.5], [[1]]):
        write(tmp_path / "x.parquet", {KEY: odd, "x": [1]})
        with pytest.raises(SourceError, match=f"column {KEY} is .* Rename it"):
            index(tmp_path, overwrite=True)
