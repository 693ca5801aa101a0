"""Arrow: folders as `datasets` writes them by save_to_disk, each kind of stream, damage."""

import hashlib
import json
import shutil
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.conformance import shard_of
from support.forging import in_child
from support.parquet_tables import FILES, TableConformance
from support.trees import shardio_json

import shardio
from shardio.dataset import sequence as sequences
from shardio.errors import DamageError, ShardioError, SourceError
from shardio.formats import manifest
from shardio.formats.foreign import arrow, row_groups
from shardio.names import KEY
from shardio.order.options import RequestedOptions
from shardio.packing import index as indexing
from shardio.storage.location import locate
from shardio.tuning.cost import TrainingJob
from shardio.tuning.explain import explain_job

pa = pytest.importorskip("pyarrow")

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "arrow"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())["folders"]
CLASSES = ["cat", "hund 🐕"]


def index(folder: Path, **options: Any) -> indexing.Indexed:
    return indexing.index(folder, format="arrow", jobs=1, **options)


def write(path: Path, table: Any, rows: int | None = None, **options: Any) -> Path:
    with pa.ipc.new_stream(path, table.schema, **options) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def golden(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / name, tmp_path / "copy"))


def described(value: Any) -> Any:
    """As the golden script says it."""
    if isinstance(value, bytes):
        return {"bytes": len(value), "sha256": hashlib.sha256(value).hexdigest()}
    if isinstance(value, dict):
        return {name: described(one) for name, one in value.items()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [described(one) for one in value] if isinstance(value, list) else value


def as_datasets_gives(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample as `datasets` has it: an image is the struct, a timestamp a datetime."""
    given = {name: described(value) for name, value in sample.items() if name != KEY}
    path = given.pop("image.path")
    image = given["image"]
    given["image"] = None if image is None else {"bytes": image, "path": path}
    return given


@pytest.mark.parametrize("name", [name for name, rows in EXPECTED.items() if rows])
def test_a_golden_folder_is_read_in_place_as_datasets_reads_it(name: str, tmp_path: Path) -> None:
    folder = golden(name, tmp_path)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert index(folder).records == len(EXPECTED[name])
    data = sequences.stored(folder)
    assert data.classes == CLASSES
    for found in (list(data), [data[number] for number in reversed(range(len(data)))][::-1]):
        assert [as_datasets_gives(sample) for sample in found] == EXPECTED[name]
    assert all(path.read_bytes() == content for path, content in before.items())


def test_the_fields_of_a_golden_folder(tmp_path: Path) -> None:
    folder = golden("one", tmp_path)
    fields = index(folder).fields
    assert fields["image"] == "image" and fields["label"] == "int"
    assert fields["légende"] == fields["image.path"] == "str"
    assert shardio.open(folder)[3]["image"].size == (5, 7)
    hunde = shardio.ShardDataset(folder, where={"label": CLASSES[1]})
    assert hunde.records == sum(row["label"] == 1 for row in EXPECTED["one"])


@pytest.mark.parametrize("name", ["lz4", "zstd", "file"])
def test_compressed_streams_and_files_are_read(name: str, tmp_path: Path) -> None:
    shutil.copy(GOLDEN / f"{name}.arrow", tmp_path)
    index(tmp_path)
    found = [{n: described(v) for n, v in one.items()} for one in sequences.stored(tmp_path)]
    left_out = ("image", "grid", "when")
    for sample, row in zip(found, EXPECTED["one"], strict=True):
        del sample[KEY]
        assert sample == {name: value for name, value in row.items() if name not in left_out}


def test_an_empty_dataset_is_one_of_no_records(tmp_path: Path) -> None:
    folder = golden("empty", tmp_path)
    assert index(folder).records == 0
    assert list(shardio.open(folder)) == []


@pytest.mark.parametrize("indexed", [False, True])
def test_a_folder_is_packed_with_its_classes(tmp_path: Path, indexed: bool) -> None:
    folder = golden("one", tmp_path)
    if indexed:
        index(folder)
    shardio.pack(folder, tmp_path / "out")
    data = sequences.stored(tmp_path / "out")
    assert data.classes == CLASSES
    assert [as_datasets_gives(one) for one in data] == EXPECTED["one"]


def test_splits_are_packed_as_splits_and_indexed_one_by_one(tmp_path: Path) -> None:
    folder = golden("splits", tmp_path)
    with pytest.raises(SourceError, match=r"1 of fold a, 1 of train") as caught:
        index(folder)
    commands = [line for line in str(caught.value).splitlines() if "shardio index" in line]
    assert len(commands) == 2 and f"'{folder}/fold a'" in commands[0]
    done = shardio.pack(folder, tmp_path / "out")
    assert [one.split for one in done] == ["train", "fold a"]
    for split in ("train", "fold a"):
        data = shardio.open(tmp_path / "out", split=split, decode=None)
        assert data.classes == CLASSES
        assert [as_datasets_gives(one) for one in data] == EXPECTED[f"splits/{split}"]


class TestArrowConformance(TableConformance):
    def build(self, folder: Path, fields: Any, samples: Any) -> Path:
        columns = self.columns(samples)
        path = write(folder / "x.arrow", pa.table(columns), 7)
        index(folder)
        return path


# --- what lies beside the files -------------------------------------------------------------------


def change_state(folder: Path, **more: Any) -> None:
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | more))


@pytest.mark.parametrize("name", ["_indices_data_files", "_indices_files"])
def test_a_selection_of_rows_is_refused_with_the_way_out(tmp_path: Path, name: str) -> None:
    folder = golden("one", tmp_path)
    change_state(folder, **{name: [{"filename": "indices.arrow"}]})
    with pytest.raises(SourceError, match=r"state\.json: .*\n.*flatten_indices\(\)\.save_to_disk"):
        index(folder)
    with pytest.raises(SourceError, match="flatten_indices"):
        shardio.pack(folder, tmp_path / "out")


def test_a_file_that_is_missing_is_missed(tmp_path: Path) -> None:
    for number in range(3):
        folder = golden("one", tmp_path)
        (folder / f"data-0000{number}-of-00003.arrow").unlink()
        with pytest.raises(SourceError, match=f"lists data-0000{number}-.* not there"):
            index(folder)
        shutil.rmtree(folder)


def test_a_file_that_is_listed_twice_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """`datasets` gives its rows twice; and the list would not tell that another file is missing."""
    folder = golden("one", tmp_path)
    names = [f"data-0000{number}-of-00003.arrow" for number in (0, 1, 0, 2)]
    change_state(folder, _data_files=[{"filename": name} for name in names])
    (folder / names[-1]).unlink()
    with pytest.raises(
        SourceError, match=r"state\.json: it lists data-00000-\S+ 2 times(.|\n)*save_to_disk"
    ):
        index(folder)
    with pytest.raises(SourceError, match="2 times"):
        shardio.pack(folder, tmp_path / "out")


def test_what_map_has_cached_is_none_of_the_dataset(tmp_path: Path) -> None:
    folder = golden("one", tmp_path)
    shutil.copy(folder / "data-00000-of-00003.arrow", folder / "cache-0123456789abcdef.arrow")
    with pytest.raises(SourceError, match=r"cache-0123456789abcdef\.arrow: .*--files 'data-\*'"):
        index(folder)
    assert index(folder, files="data-*").records == 23
    (folder / "state.json").unlink()
    with pytest.raises(SourceError, match="may be what `map` has cached"):
        index(folder, overwrite=True)


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"_data_files": 3}', '{"_data_files": [{}]}', "[" * 99_999]
)
def test_a_state_that_is_none_is_an_error(tmp_path: Path, text: str) -> None:
    folder = golden("one", tmp_path)
    (folder / "state.json").write_text(text)
    with pytest.raises(DamageError, match=r"state\.json"):
        index(folder)


@pytest.mark.parametrize("names", ['"train"', '["../x"]', '[""]', "[3]"])
def test_splits_that_are_no_folders_are_an_error(tmp_path: Path, names: str) -> None:
    folder = golden("splits", tmp_path)
    (folder / "dataset_dict.json").write_text(f'{{"splits": {names}}}')
    with pytest.raises(DamageError, match=r"dataset_dict\.json: expected"):
        shardio.pack(folder, tmp_path / "out")


# --- streams --------------------------------------------------------------------------------------


def test_images_that_are_only_paths_are_refused_with_the_way_out(tmp_path: Path) -> None:
    rows = [{"bytes": b"x", "path": "a"}, None, {"bytes": None, "path": "photos/\x1b7.jpg"}]
    write(tmp_path / "x.arrow", pa.table({"photo": pa.array(rows, FILES)}))
    with pytest.raises(
        SourceError, match=r"row 2: column 'photo' .*\\x1b7\.jpg(.|\n)*save_to_disk"
    ):
        index(tmp_path)


def test_dictionaries_are_refused_with_the_way_out(tmp_path: Path) -> None:
    table = pa.table({"word": pa.array(["a", "b", "a"]).dictionary_encode()})
    write(tmp_path / "x.arrow", table)
    with pytest.raises(SourceError, match=r"dictionary_decode\(\)"):
        index(tmp_path)


def test_text_that_is_no_utf8_is_an_error(tmp_path: Path) -> None:
    text = pa.array([b"a", b"\xff", b"c"]).view(pa.string())
    write(tmp_path / "x.arrow", pa.table({"text": text}))
    with pytest.raises(DamageError, match=r"record batch 0 at byte \d+: .*(?i:utf-?8)"):
        index(tmp_path)


@pytest.mark.parametrize("compressed", [False, True])
def test_batches_that_are_too_large_are_refused_with_what_splits_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compressed: bool
) -> None:
    options = pa.ipc.IpcWriteOptions(compression="zstd" if compressed else None)
    path = write(tmp_path / "x.arrow", pa.table({"x": list(range(1000))}), options=options)
    monkeypatch.setattr(arrow, "MAX_GROUP", 6000)
    with pytest.raises(SourceError, match=r"record batch 0 .* takes 8,\d+ bytes") as caught:
        index(tmp_path)
    exec("\n".join(line[2:] for line in str(caught.value).splitlines()[1:]), {})
    path.unlink()
    assert index(tmp_path).records == 1000
    assert [sample["x"] for sample in sequences.stored(tmp_path)] == list(range(1000))


def test_a_bomb_is_refused_before_it_is_inflated(tmp_path: Path) -> None:
    """A buffer that says it has 2**40 bytes, and one of less than none."""
    path = tmp_path / "x.arrow"
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    write(path, pa.table({"x": [7] * 100_000}), options=options)
    intact = path.read_bytes()
    at = intact.index(struct.pack("<q", 800_000))
    for size, error in ((1 << 40, SourceError), (-5, DamageError)):
        path.write_bytes(intact[:at] + struct.pack("<q", size) + intact[at + 8 :])
        with pytest.raises(error, match="record batch 0"):
            index(tmp_path)


def test_what_is_no_arrow_stream_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "x.arrow", pa.table({"x": [1, 2]}))
    stream = path.read_bytes()
    shutil.copy(GOLDEN / "file.arrow", path)
    file = path.read_bytes()
    for data, message in (
        (b"", "expected a message"),
        (stream[:-8], r"byte \d+: expected a message, or the end mark"),
        (stream + stream, "bytes behind the end of the stream"),
        (stream[-8:], "expected the schema"),
        (bytes(16), "no Arrow IPC file"),
        (b"\xff" * 16, "bytes of metadata, in a file of 16"),
        (file[:-3], "does not end with ARROW1"),
        (b"\xff" * 4 + struct.pack("<I", 24) + bytes(24), "expected the schema"),
        (b"\xff" * 4 + struct.pack("<I", 24) + b"\x7f" * 24, "no flatbuffer"),
    ):
        path.write_bytes(data)
        with pytest.raises(DamageError, match=message):
            index(tmp_path)


def test_batches_that_were_swapped_are_found(tmp_path: Path) -> None:
    path = write(tmp_path / "x.arrow", pa.table({"x": list(range(20))}), 10)
    index(tmp_path)
    shard, data = shard_of(tmp_path), path.read_bytes()
    first, second, end = shard.offset(0), shard.offset(10), len(data) - 8
    path.write_bytes(data[:first] + data[second:end] + data[first:second] + data[end:])
    with pa.ipc.open_stream(path.read_bytes()) as reader:  # for pyarrow nothing is wrong
        assert len(reader.read_all()) == 20
    with pytest.raises(DamageError, match=r"record batch 0 at byte \d+: its checksum"):
        shard_of(tmp_path).read(0)


@pytest.mark.parametrize("name", ["one/data-00000-of-00003", "lz4", "zstd"])
def test_damage_before_indexing_ends_in_values_or_an_error(tmp_path: Path, name: str) -> None:
    """Whatever is flipped, pyarrow neither crashes nor takes more memory than there is."""
    intact = (GOLDEN / f"{name}.arrow").read_bytes()
    noise = np.random.default_rng(2)
    path = tmp_path / "x.arrow"

    def child() -> None:
        for number in range(100):
            data = bytearray(intact)
            at = int(noise.integers(0, len(intact)))
            data[at] ^= 1 << (number % 8)
            path.write_bytes(data if number % 5 else data[:at])
            with suppress(ShardioError):
                index(tmp_path, overwrite=True)
                list(sequences.stored(tmp_path))

    assert in_child(child, 8 << 30) == 0


# --- reading ------------------------------------------------------------------------------------


def test_a_batch_counts_with_all_its_bytes_where_only_labels_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values of labels are a part of these bytes, so that all of them stay in memory."""
    table = pa.table({"x": [bytes(1000)] * 50, "label": list(range(50))})
    write(tmp_path / "x.arrow", table, 10)
    index(tmp_path)
    made: list[Any] = []

    class Watched(row_groups.Group):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(row_groups, "Group", Watched)
    shard = shard_of(tmp_path, fields=[(KEY, "key"), ("label", "int")])
    assert [shard.read(record)["label"] for record in range(0, 50, 5)] == list(range(0, 50, 5))
    assert [list(group.arrays) for group in made] == [["label"]] * 5
    assert all(group.bytes > 10_000 for group in made)


def test_explain_names_the_record_batches_that_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"x": [bytes(5_000_000)] * 24})
    write(tmp_path / "x.arrow", table, 8)
    index(tmp_path)
    assert manifest.load(locate(tmp_path)).options["row_group"]["rows"] == 8
    monkeypatch.setattr(row_groups, "LEAST_CACHE", 1)
    monkeypatch.setattr(row_groups, "CACHED", 1e-9)
    made = manifest.load(locate(tmp_path))
    job = TrainingJob(made, RequestedOptions(batch_size=4).resolve(made.mean_bytes))
    [told] = [one for one in explain_job(job).warnings if one.code == "row_groups"]
    assert "record batches at once" in told.what


def test_the_commands_take_it(tmp_path: Path) -> None:
    folder = golden("one", tmp_path)
    assert shardio_json("index", folder)["format"] == "arrow"
    assert shardio_json("verify", folder, "--sha256")["damages"] == []
