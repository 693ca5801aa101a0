"""Parquet: golden files of `datasets` and pyarrow, what is read of a file, damage."""

import hashlib
import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.conformance import shard_of
from support.forging import in_child
from support.parquet_tables import FILES, TableConformance, index, ways, write

import shardio
from shardio import formats
from shardio.dataset import sequence as sequences
from shardio.errors import DamageError, DependencyError, ShardioError, SourceError
from shardio.formats import manifest
from shardio.formats.foreign import arrow_columns, parquet
from shardio.formats.sample import Schema
from shardio.names import KEY
from shardio.storage.location import locate

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "parquet"
pytestmark = pytest.mark.usefixtures("empty_cache")


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


# --- what is read -------------------------------------------------------------------------------


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
        for number in range(150):
            data = bytearray(intact)
            low = len(intact) * 2 // 3 if number % 2 else 0  # footers are dense with meaning
            at = int(noise.integers(low, len(intact)))
            data[at] ^= 1 << (number % 8)
            path.write_bytes(data if number % 5 else data[:at])
            with suppress(ShardioError):
                index(tmp_path, overwrite=True)

    assert in_child(child, 8 << 30) == 0


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
