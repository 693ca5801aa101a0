"""Files of other formats as datasets, where they are: the same order, checks and commands."""

import io
import json
import os
import pickle
import re
import shlex
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.small_datasets import flip, jpeg
from support.trees import images, plant, shardio, shardio_json
from torch.utils.data import DataLoader

import shardio as library
from shardio import BusyError, DamageError, ExistsError, OptionError, ShardDataset, SourceError
from shardio.packing.index import index
from shardio.packing.pack import pack
from shardio.storage import lock
from shardio.tuning.explain import explain
from shardio.tuning.tune import tune

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
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
        assert sample["__key__"] == f"k/{number:04d}"
        assert sample["image"] == jpeg(number) and sample["label"] == number % 3
        assert sample["json"] == ({"n": number} if number % 4 else None)
    assert [s["__key__"] for s in data] == data.keys() == [f"k/{n:04d}" for n in range(N)]
    assert data.find("k/0009") == 9
    assert data.columns("label").tolist() == [n % 3 for n in range(N)]
    assert [s["label"] for s in data[5:9]] == [2, 0, 1, 2]
    assert pickle.loads(pickle.dumps(data))[N - 1]["__key__"] == f"k/{N - 1:04d}"


@pytest.mark.parametrize("start", [None, "fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_the_order_law_holds_for_it(tars: Path, start: str | None) -> None:
    index(tars)

    def batches(workers: int, **more: Any) -> list[list[bytes]]:
        dataset = ShardDataset(tars, batch_size=4, fields=("__key__",), shuffle_buffer=8, seed=1)
        loader = DataLoader(dataset, batch_size=None, num_workers=workers, **more)
        return [list(keys) for (keys,) in loader]

    alone = batches(0)
    assert sorted(key for keys in alone for key in keys) == [f"k/{n:04d}" for n in range(N)]
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
    assert explain(dataset).records == dataset.records
    assert tune(dataset).records == dataset.records


@pytest.mark.usefixtures("warm_workers")
def test_the_index_may_lie_elsewhere(tars: Path, tmp_path: Path) -> None:
    before = contents(tars)
    os.chmod(tars, 0o555)
    try:
        index(tars, out=tmp_path / "idx")
    finally:
        os.chmod(tars, 0o755)
    assert contents(tars) == before
    data = library.open(tmp_path / "idx", storage=library.Storage(root=tars), decode=None)
    assert data[3]["image"] == jpeg(3)
    dataset = ShardDataset(
        tmp_path / "idx", storage=library.Storage(root=tars), batch_size=N, decode=None
    )
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
    assert [(one.record, one.key) for one in found.damages] == [(2, "k/0010")]
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
    (tars / "manifest.json").write_bytes(b"{}")
    with pytest.raises(ExistsError, match="--overwrite replaces it"):
        index(tars)


@pytest.mark.parametrize("format", ["record", "lmdb"])
def test_a_packed_dataset_needs_no_index_and_its_index_says_so(tmp_path: Path, format: str) -> None:
    for split in ("train", "val"):
        (tmp_path / "src" / split / "a").mkdir(parents=True)
        (tmp_path / "src" / split / "a" / "1.jpg").write_bytes(jpeg(1))
    pack(tmp_path / "src" / "train", tmp_path / "one", format=format, jobs=1)
    pack(tmp_path / "src", tmp_path / "both", format=format, jobs=1)
    [shard] = (path for path in (tmp_path / "one").iterdir() if path.suffix != ".json")
    for packed in (tmp_path / "one", shard, tmp_path / "both", tmp_path / "both" / "val"):
        with pytest.raises(ExistsError, match="is packed already, and needs no index"):
            index(packed, out=tmp_path / "idx")
    assert not (tmp_path / "idx").exists()


def test_all_that_keeps_a_folder_of_images_from_being_indexed_is_listed_at_once(
    tmp_path: Path,
) -> None:
    (tmp_path / "a").mkdir()
    for name, content in (("1.jpg", jpeg(1)), ("2.jpg", b""), ("3.jpg", b"text")):
        (tmp_path / "a" / name).write_bytes(content)
    with pytest.raises(SourceError, match="2 files cannot be indexed") as caught:
        index(tmp_path, jobs=1)
    assert re.findall(r"a/(\d)\.jpg: is (\w+)", str(caught.value)) == [("2", "empty"), ("3", "not")]
    assert sorted(os.listdir(tmp_path)) == ["a"]


def test_files_that_are_no_images_are_left_out_and_listed(tmp_path: Path) -> None:
    tree = {f"{c}/{i}.jpg": jpeg(i) for c in "ab" for i in range(6)}
    tree |= {"a/bad.jpg": b"text", "b/empty.jpg": b"", "b/odd.jpg": b"<html>"}
    folder = plant(tmp_path / "photos", tree)
    facts = shardio_json("index", folder, "--on-error", "skip", "--jobs", "1", code=4)
    assert [one["key"] for one in facts["rejected"]] == ["a/bad.jpg", "b/empty.jpg", "b/odd.jpg"]
    lines = [json.loads(line) for line in (folder / "rejected.jsonl").read_text().splitlines()]
    assert [sorted(one) for one in lines] == [["key", "reason", "size", "time"] for _ in range(3)]
    assert [one["size"] for one in lines[:2]] == [4, 0]
    pack(folder, tmp_path / "packed", jobs=1, on_error="skip")
    there, packed = (library.open(one, decode=None) for one in (folder, tmp_path / "packed"))
    assert there.keys() == packed.keys() and len(there) == 12
    assert [one["label"] for one in there] == [one["label"] for one in packed]
    assert library.verify(folder).damages == []
    with pytest.raises(SourceError, match=r"(?s)3 files cannot be.*--on-error skip.*b/odd.jpg"):
        index(folder, jobs=1, overwrite=True)
    for name in ("a/bad.jpg", "b/empty.jpg", "b/odd.jpg"):
        (folder / name).unlink()
    index(folder, jobs=1, overwrite=True)
    assert not (folder / "rejected.jsonl").exists()


def test_what_no_index_leaves_out_is_refused(tmp_path: Path, tars: Path) -> None:
    with pytest.raises(OptionError, match="goes with a folder of images; a file of webdataset"):
        index(tars, on_error="skip")
    with pytest.raises(OptionError, match="expected 'raise' or 'skip'"):
        index(tars, on_error="ignore")
    folder = plant(tmp_path / "photos", {"a/bad.jpg": b"text"})
    with pytest.raises(OptionError, match="a part leaves nothing out"):
        index(folder, on_error="skip", part="1/2")
    with pytest.raises(SourceError, match=r"1 file cannot be indexed, so nothing was. Move"):
        index(folder, on_error="skip", jobs=1)
    assert sorted(os.listdir(folder)) == ["a"]
    plant(folder, {"a/1.jpg": jpeg(1)})
    index(folder, jobs=1, out=tmp_path / "idx", on_error="skip")
    assert sorted(one.name for one in (tmp_path / "idx").glob("[!0]*")) == [
        "manifest.json",
        "rejected.jsonl",
    ]
    (tmp_path / "idx" / "rejected.jsonl").write_text("mine")
    with pytest.raises(ExistsError, match="no packing wrote it"):
        index(folder, jobs=1, out=tmp_path / "idx", on_error="skip")
    assert (tmp_path / "idx" / "rejected.jsonl").read_text() == "mine"


def test_what_cannot_be_indexed_is_told(tmp_path: Path, tars: Path) -> None:
    with pytest.raises(SourceError, match="expected a directory"):
        index(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="empty: holds no files; expected some of webdataset"):
        index(tmp_path / "empty")
    (tmp_path / "empty" / "notes.zip").touch()
    with pytest.raises(SourceError, match=r"holds 1 file, such as notes\.zip, of which none has"):
        index(tmp_path / "empty")
    with pytest.raises(
        SourceError, match=r"Archives, .* are packed: `shardio pack .*notes\.zip OUT"
    ):
        index(tmp_path / "empty" / "notes.zip")
    index(tars, out=tmp_path / "idx")
    with pytest.raises(SourceError, match=r"idx: holds the index of .* of webdataset, and no"):
        index(tmp_path / "idx")
    with pytest.raises(
        OptionError, match="not a format that is read in place; there are webdataset"
    ):
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


# --- which files ----------------------------------------------------------------------------------


def packed_tar(path: Path, key: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        add(tar, f"{key}.jpg", jpeg(len(key)))


@pytest.mark.parametrize(
    ("pattern", "keys"),
    [
        ("train-*", ["a", "b"]),
        ("*-1.tar", ["b"]),
        ("sub/*", ["c"]),
        ("*", ["a", "b", "c"]),
        ("sub/train*", None),
        ("TRAIN-*", None),
    ],
)
def test_files_can_be_chosen(tmp_path: Path, pattern: str, keys: list[str] | None) -> None:
    packed_tar(tmp_path / "train-0.tar", "a")
    packed_tar(tmp_path / "train-1.tar", "b")
    packed_tar(tmp_path / "sub" / "val-0.tar", "c")
    if keys is None:
        with pytest.raises(SourceError, match=r"fits none of its 3 files, such as sub/val-0\.tar"):
            index(tmp_path, files=pattern)
        return
    index(tmp_path, files=pattern)
    assert sorted(library.open(tmp_path).keys()) == sorted(keys)


@pytest.mark.parametrize(
    "names",
    [
        {
            "train": ["train-00000-of-00002", "train-00001-of-00002"],
            "test": ["test-00000-of-00001"],
        },
        {"Train": ["x_Train_2017-0", "x_Train_2017-1"], "val": ["x_val2017"]},
        {"train": ["data/train/0000", "data/train/0001"], "validation": ["data/validation/0000"]},
        {"training": ["training"], "testing": ["testing"], "dev": ["dev"]},
        {"train": ["train/0", "train/more/1"], "val": ["val/0"]},
    ],
)
def test_splits_that_lie_together_are_chosen_by_the_commands_that_the_error_names(
    tmp_path: Path, names: dict[str, list[str]]
) -> None:
    folder = tmp_path / "my data"
    for split, files in names.items():
        for file in files:
            packed_tar(folder / f"{file}.tar", f"{split}/{file}")
    before = {path for path in folder.rglob("*")}
    with pytest.raises(SourceError, match="would be mixed") as caught:
        index(folder)
    assert set(folder.rglob("*")) == before
    first, *commands = str(caught.value).splitlines()
    for split, files in names.items():
        assert f"{len(files)} of {split}" in first
    assert len(commands) == len(names)
    done = [shardio_json(*shlex.split(command)[1:]) for command in commands]
    made = {
        one["out"]: library.open(one["out"], storage=library.Storage(root=one["root"]))
        for one in done
    }
    for split, files in names.items():
        data = made.get(f"{folder}-{split}") or made[f"{folder}/{split}"]
        assert sorted(data.keys()) == [f"{split}/{file}" for file in sorted(files)]
    assert index(folder, files="*").shards == sum(map(len, names.values()))
    with pytest.raises(SourceError, match=r"--out '?\S*/idx/"):
        index(folder, out=tmp_path / "idx", overwrite=True)


@pytest.mark.parametrize(
    "names", [["train-0", "train-1"], ["trainer-0", "latest-1"], ["valve", "evaluate", "x"]]
)
def test_names_of_one_split_or_none_are_one_dataset(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        packed_tar(tmp_path / f"{name}.tar", name)
    assert index(tmp_path).shards == len(names)


def test_a_single_file_is_a_dataset(
    tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = index(tars / "part-2.tar", out=tmp_path / "idx")
    assert (done.root, done.format, done.records) == (str(tars), "webdataset", 12)
    assert library.open(tmp_path / "idx", storage=library.Storage(root=tars), decode=None)[0][
        "image"
    ] == jpeg(8)
    (tars / "part-2.tar").rename(tars / "odd")
    with pytest.raises(SourceError, match="its name is of none of webdataset"):
        index(tars / "odd")
    monkeypatch.chdir(tars)
    assert index("odd", format="webdataset").root == "."
    assert len(library.open(tars)) == 12
    with pytest.raises(OptionError, match="--files: only of a folder"):
        index("odd", files="*")


# --- the folder that is written -------------------------------------------------------------------


def test_an_index_that_fails_takes_back_what_it_wrote(tars: Path) -> None:
    (tars / "part-9.tar").write_bytes(b"\xff" * 2048)
    before = contents(tars)
    for jobs in (1, 2):
        with pytest.raises(DamageError):
            index(tars, jobs=jobs)
        assert contents(tars) == before
    (tars / "part-9.tar").unlink()
    index(tars)
    before = contents(tars)
    (tars / "part-9.tar").write_bytes(b"\xff" * 2048)
    with pytest.raises(DamageError):
        index(tars, overwrite=True)
    (tars / "part-9.tar").unlink()
    assert contents(tars) == before  # the indexes of the one that is there, too
    assert len(list(library.open(tars, decode=None))) == N


def test_two_do_not_index_into_one_folder_at_once(tars: Path) -> None:
    index(tars)
    before = contents(tars)
    (tars / lock.JOURNAL).write_bytes(b"shardio-writer 0\n{}")
    held = lock.take(str(tars))
    try:
        with pytest.raises(BusyError, match="another shardio process"):
            index(tars, overwrite=True)
    finally:
        held.release()
    assert contents(tars).items() > before.items()
    index(tars, overwrite=True)  # whose journal it was is dead
    assert contents(tars) == before


def test_an_unfinished_packing_is_not_written_over(tars: Path, tmp_path: Path) -> None:
    source = plant(tmp_path / "src", images())
    library.pack(
        source, tmp_path / "out", jobs=1, plan=library.PlanOptions(max_records=8, part=(1, 2))
    )
    with pytest.raises(ExistsError, match="an unfinished packing is here"):
        index(tars, out=tmp_path / "out")
    assert (tmp_path / "out" / lock.JOURNAL).exists()


def test_advice_needs_no_data_beside_the_index(tars: Path, tmp_path: Path) -> None:
    index(tars, out=tmp_path / "idx")
    dataset = ShardDataset(tmp_path / "idx", storage=library.Storage(root=tars), batch_size=4)
    assert explain(dataset, num_workers=2).records == N
    assert tune(dataset).records == N
    found = tune(tmp_path / "idx", storage=library.Storage(root=tars), batch_size=4)
    assert (
        found.call
        == f'ShardDataset("{tmp_path}/idx", storage=Storage(root="{tars}"), batch_size=4)'
    )
    assert eval(found.call, vars(library)).records == N
    assert (
        tune(tmp_path / "idx", storage=library.Storage(root=tars), batch_size=4).labels == "label"
    )
    told = shardio("explain", tmp_path / "idx", "--root", tars, "--batch-size", "4").stdout
    assert "20 records in 3 shards" in told
    with pytest.raises(DamageError, match="is not there"):
        tune(tmp_path / "idx", batch_size=4)


def test_linked_folders_count_and_those_that_cannot_be_listed_are_an_error(
    tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = index(tars, out=tmp_path / "one", jobs=1).records
    (tars / "b").mkdir()
    (tmp_path / "elsewhere").mkdir()
    name = min(path.name for path in tars.glob("*.tar"))
    os.rename(tars / name, tmp_path / "elsewhere" / name)
    (tars / "b" / "link").symlink_to(tmp_path / "elsewhere")
    (tars / "b" / "loop").symlink_to("..")
    assert index(tars, out=tmp_path / "two", jobs=1).records == whole
    real = os.scandir

    def scandir(path: str) -> Any:  # root may list anything
        if os.fspath(path).endswith("link"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(library.StorageError, match=r"b/link: cannot be listed: Permission denied"):
        index(tars, out=tmp_path / "three", jobs=1)
