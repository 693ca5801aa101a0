"""Files of other formats as datasets, where they are: the same order, checks and commands."""

import io
import json
import os
import pickle
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import flip, jpeg
from torch.utils.data import DataLoader
from trees import shardio, shardio_json

import shardio as library
from shardio import DamageError, ExistsError, OptionError, ShardDataset, SourceError
from shardio.indexing import index

GOLDEN = Path(__file__).resolve().parent / "golden"
COUNTS = [7, 1, 12]
N = sum(COUNTS)
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    folder = tmp_path / "tars"
    folder.mkdir()
    number = 0
    for shard, count in enumerate(COUNTS):
        with tarfile.open(folder / f"part-{shard}.tar", "w") as tar:
            for _ in range(count):
                add(tar, f"k/{number:04d}.jpg", jpeg(number))
                add(tar, f"k/{number:04d}.cls", b"%d" % (number % 3))
                if number % 4:
                    add(tar, f"k/{number:04d}.json", json.dumps({"n": number}).encode())
                number += 1
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_a_folder_of_tars_is_a_dataset_in_place(tars: Path) -> None:
    before = contents(tars)
    done = index(tars)
    assert (done.format, done.records, done.shards) == ("webdataset", N, 3)
    assert done.fields == {"__key__": "key", "image": "image", "label": "int", "json": "json"}
    assert done.sources == {"image": "jpg", "label": "cls"}
    after = contents(tars)
    assert {name: after[name] for name in before} == before  # no file of the data is touched
    assert len(after) == len(before) + 3 + 1
    data = library.open(tars, decode=None)
    assert len(data) == N
    for number in range(N):
        sample = data[number]
        assert sample["__key__"] == b"k/%04d" % number
        assert sample["image"] == jpeg(number) and sample["label"] == number % 3
        assert sample["json"] == ({"n": number} if number % 4 else None)
    assert [s["__key__"] for s in data] == data.keys() == [b"k/%04d" % n for n in range(N)]
    assert data.find("k/0009") == 9
    assert data.columns("label").tolist() == [n % 3 for n in range(N)]
    assert [s["label"] for s in data[5:9]] == [2, 0, 1, 2]
    assert pickle.loads(pickle.dumps(data))[N - 1]["__key__"] == b"k/%04d" % (N - 1)


@pytest.mark.parametrize("start", [None, "fork", "spawn"])
def test_the_order_law_holds_for_it(tars: Path, start: str | None) -> None:
    index(tars)

    def batches(workers: int, **more: Any) -> list[list[bytes]]:
        dataset = ShardDataset(tars, batch_size=4, fields=("__key__",), shuffle_buffer=8, seed=1)
        loader = DataLoader(dataset, batch_size=None, num_workers=workers, **more)
        return [list(keys) for (keys,) in loader]

    alone = batches(0)
    assert sorted(key for keys in alone for key in keys) == [b"k/%04d" % n for n in range(N)]
    if start is not None:
        assert batches(2, multiprocessing_context=start) == alone


def test_its_pixels_subsets_and_advice_are_those_of_any_dataset(tars: Path) -> None:
    index(tars)
    crop = library.RandomResizedCrop(8)
    dataset = ShardDataset(
        tars, batch_size=5, fields=("image", "label"), transform=crop, where={"label": [0, 2]}
    )
    images, labels = next(iter(dataset))
    assert images.shape == (5, 3, 8, 8) and set(labels.tolist()) <= {0, 2}
    assert dataset.records == sum(n % 3 != 1 for n in range(N))
    assert dataset.explain().records == dataset.records
    assert dataset.tune().records == dataset.records


def test_the_index_may_lie_elsewhere(tars: Path, tmp_path: Path) -> None:
    before = contents(tars)
    os.chmod(tars, 0o555)
    try:
        index(tars, out=tmp_path / "idx")
    finally:
        os.chmod(tars, 0o755)
    assert contents(tars) == before
    data = library.open(tmp_path / "idx", root=tars, decode=None)
    assert data[3]["image"] == jpeg(3)
    dataset = ShardDataset(tmp_path / "idx", root=tars, batch_size=N, decode=None)
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert len(next(iter(loader))["image"]) == N
    with pytest.raises(DamageError, match=r"part-0\.tar: the manifest names this shard"):
        library.open(tmp_path / "idx")[0]


def test_what_changes_later_is_found(tars: Path) -> None:
    index(tars)
    shard = tars / "part-2.tar"
    place = shard.read_bytes().index(jpeg(10)) + 20
    flip(shard, place)
    data = library.open(tars, decode=None)
    with pytest.raises(DamageError, match=r"part-2\.tar: record 2 at byte .* checksum is"):
        data[10]
    assert data[9]["image"] == jpeg(9)
    found = library.verify(tars)
    assert [(one.record, one.key) for one in found.damages] == [(2, b"k/0010")]
    shard.write_bytes(shard.read_bytes()[:-512])
    with pytest.raises(DamageError, match=r"had .* when it was indexed"):
        library.open(tars, decode=None)[10]
    sidecar = next(tars.glob("00000-*.index"))
    flip(sidecar, 60)
    with pytest.raises(DamageError, match="`shardio index` makes it anew"):
        library.open(tars, decode=None)[0]
    sidecar.unlink()
    with pytest.raises(DamageError, match="is not there"):
        library.open(tars, decode=None)[0]


def test_names_of_fields_can_be_chosen(tars: Path) -> None:
    done = index(tars, fields={"picture": "jpg", "meta": "json"})
    assert list(done.fields) == ["__key__", "label", "meta", "picture"]
    assert library.open(tars, decode=None)[1]["meta"] == {"n": 1}
    with pytest.raises(OptionError, match="no field is called 'png'; there are"):
        index(tars, fields={"image": "png"}, overwrite=True)
    with pytest.raises(ExistsError, match="--overwrite replaces it"):
        index(tars)


def test_what_cannot_be_indexed_is_told(tmp_path: Path, tars: Path) -> None:
    with pytest.raises(SourceError, match="expected a directory"):
        index(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="no file in it looks like one of webdataset"):
        index(tmp_path / "empty")
    with pytest.raises(OptionError, match="formats that are read in place are"):
        index(tars, format="zip")
    with pytest.raises(SourceError, match="no file in it has a name of tfrecord"):
        index(tars, format="tfrecord")
    (tars / "x.rec").write_bytes(b"")
    with pytest.raises(SourceError, match="3 of webdataset, 1 of recordio; choose by --format"):
        index(tars)
    assert not (tars / "manifest.json").exists()


def test_the_command_line(tars: Path, tmp_path: Path) -> None:
    done = shardio("index", tars, "--out", tmp_path / "idx", "--fields", "image=jpg")
    assert done.returncode == 0, done.stderr
    assert "webdataset: 20 records in 3 shards" in done.stdout
    assert "image (image) from jpg, label (int) from cls" in done.stdout
    here = ("--root", tars)
    listed = shardio_json("ls", tmp_path / "idx", *here)["records"]
    assert [row["key"] for row in listed] == [f"k/{n:04d}" for n in range(N)]
    assert shardio("verify", tmp_path / "idx", *here, "--sha256").returncode == 0
    assert shardio("unpack", tmp_path / "idx", tmp_path / "files", *here).returncode == 0
    files = sorted(p.relative_to(tmp_path / "files") for p in (tmp_path / "files").rglob("*.jpg"))
    assert [str(p) for p in files] == [f"k/{n:04d}.jpg" for n in range(N)]
    assert (tmp_path / "files" / "k" / "0003.jpg").read_bytes() == jpeg(3)
    cat = shardio("cat", tmp_path / "idx", "4", *here, "--field", "label")
    assert cat.stdout.strip() == "1"
    wrong = shardio("index", tars, "--fields", "image", code=2)
    assert "expected NAME=THEIRS" in wrong.stderr


@pytest.mark.parametrize("format", ["tfrecord", "recordio", "webdataset"])
def test_files_of_the_formats_own_tools_are_datasets(tmp_path: Path, format: str) -> None:
    """Each file by itself, as their tests do in detail; here through the whole house."""
    files = [
        path
        for path in sorted((GOLDEN / format).iterdir())
        if path.suffix in (".tar", ".tfrecord", ".tfrecords", ".rec")
    ]
    assert files
    for path in files:
        folder = tmp_path / path.stem
        folder.mkdir()
        shutil.copy(path, folder)
        for beside in (path.with_suffix(".idx"),):
            if beside.exists():
                shutil.copy(beside, folder)
        try:
            done = index(folder)
        except (SourceError, DamageError):
            continue  # some are there to be refused
        data = library.open(folder, decode=None)
        samples = list(data)
        assert len(samples) == done.records == len(data)
        assert [s["__key__"] for s in samples] == data.keys()
        assert not library.verify(folder, sha256=True).damages
        dataset = ShardDataset(folder, batch_size=3, decode=None, collate_fn=list)
        keys = [s["__key__"] for batch in dataset for s in batch]
        assert sorted(keys) == sorted(data.keys())


def test_a_scalar_that_some_shards_lack_is_none_there(tmp_path: Path) -> None:
    for shard in range(3):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            add(tar, f"{shard}.jpg", jpeg(shard))
            if shard != 1:
                add(tar, f"{shard}.cls", b"%d" % shard)
    index(tmp_path)
    column = library.open(tmp_path).columns("label")
    assert column.tolist() == [0, None, 2] and np.ma.getmaskarray(column).tolist() == [0, 1, 0]
    dataset: Callable[..., Any] = ShardDataset
    assert dataset(tmp_path, where={"label": [0, None]}).records == 2
