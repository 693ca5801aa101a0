"""Folders of images in place: the dataset that packing would make, of files that stay."""

import hashlib
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.conformance import Fields, FormatConformance, Sample
from support.small_datasets import flip, jpeg
from support.trees import content, images, noise, plant, shardio, shardio_json
from torch.utils.data import DataLoader

import shardio as library
from shardio import (
    DamageError,
    OptionError,
    ShardDataset,
    ShardioError,
    SourceError,
    formats,
)
from shardio.formats import manifest
from shardio.formats.base import Opening, Shard, ShardInfo
from shardio.formats.foreign import imagefolder
from shardio.formats.foreign.base import dump, sidecar_name
from shardio.formats.sample import Schema
from shardio.names import key_bytes, key_text
from shardio.packing.index import index
from shardio.packing.scan import Found, scan_shard
from shardio.storage.location import locate

ID = bytes(range(16))
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """JPEGs enough for two shards, with names that are no text, and a folder within a class."""
    tree: dict[str | bytes, bytes | None] = {
        f"{name}/{i:03d}.jpg": jpeg(i + 100 * n) + bytes(30_000 + i)
        for n, name in enumerate(("eel", "cat", "dog é"))
        for i in range(15)
    }
    tree[b"cat/\xff \n.jpg"] = jpeg(900)
    tree["eel/more/x"] = jpeg(901)
    return plant(tmp_path / "photos", tree)


def same_order(a: Any, b: Any) -> bool:
    return [{name: s[name] for name in ("__key__", "image", "label")} for s in a] == [
        {name: s[name] for name in ("__key__", "image", "label")} for s in b
    ]


def test_it_is_the_dataset_that_packing_makes(folder: Path, tmp_path: Path) -> None:
    before = content(folder)
    library.pack(folder, tmp_path / "packed", jobs=1)
    done = index(folder)
    assert done.format == "imagefolder" and done.classes == 3
    after = content(folder)
    assert {key: after[key] for key in before} == before
    assert len(after) == len(before) + done.shards + 1
    here, packed = (library.open(path, decode=None) for path in (folder, tmp_path / "packed"))
    assert here.manifest.shard_records.tolist() == packed.manifest.shard_records.tolist()
    assert here.manifest.shards > 1
    assert here.manifest.schema.fields == packed.manifest.schema.fields
    assert here.classes == packed.classes == ["cat", "dog é", "eel"]
    assert here.keys() == packed.keys() and set(here.keys()) == {
        key_text(key) for key, data in before.items() if data is not None
    }
    assert same_order(here, packed)
    assert here.columns("label").tolist() == packed.columns("label").tolist()
    assert all(s["image"] == before[key_bytes(s["__key__"])] for s in here)
    assert here[here.find(b"cat/\xff \n.jpg")]["image"] == jpeg(900)
    assert here[5:9].keys() == packed.keys()[5:9]


@pytest.mark.parametrize("start", [None, "fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_an_epoch_is_that_of_the_packed_one(
    folder: Path, tmp_path: Path, start: str | None
) -> None:
    library.pack(folder, tmp_path / "packed", jobs=1)
    index(folder, out=tmp_path / "idx")

    def batches(path: Path, workers: int, **more: Any) -> list[Any]:
        storage = library.Storage(root=folder if path.name == "idx" else None)
        dataset = ShardDataset(
            *(path,), batch_size=4, decode=None, collate_fn=list, shuffle_buffer=16, seed=3,
            storage=storage,
        )  # fmt: skip
        return list(DataLoader(dataset, batch_size=None, num_workers=workers, **more))

    expected = batches(tmp_path / "packed", 0)
    assert len(expected) == 12
    if start is None:
        assert batches(tmp_path / "idx", 0) == expected
    else:
        assert batches(tmp_path / "idx", 2, multiprocessing_context=start) == expected


def test_a_folder_without_classes_has_no_labels(tmp_path: Path) -> None:
    plant(tmp_path / "flat", {f"{i}.png": jpeg(i) for i in range(5)})
    done = index(tmp_path / "flat")
    assert done.fields == {"__key__": "key", "image": "image"} and done.classes is None
    assert sorted(library.open(tmp_path / "flat").keys()) == [f"{i}.png" for i in range(5)]


@pytest.mark.parametrize("named", [False, True])
def test_it_is_told_by_its_images_unless_files_of_another_format_are_there(
    folder: Path, named: bool
) -> None:
    (folder / "eel" / "x.tar").write_bytes(bytes(1024))
    if not named:
        assert index(folder).format == "webdataset"
        return
    with pytest.raises(SourceError, match=r"1 file cannot be indexed.*\n  eel/x\.tar: is not an"):
        index(folder, format="imagefolder")
    (folder / "eel" / "x.tar").unlink()
    assert index(folder, format="imagefolder").format == "imagefolder"


def test_all_commands_work_on_it(folder: Path, tmp_path: Path) -> None:
    idx, here = tmp_path / "idx", ("--root", folder)
    done = shardio("index", folder, "--out", idx)
    assert "imagefolder: 47 records in 2 shards" in done.stdout
    assert "image (image), label (int); 3 classes" in done.stdout
    assert "they stay as they are" in done.stdout
    assert shardio_json("info", idx)["classes"] == ["cat", "dog é", "eel"]
    rows = shardio_json("ls", idx, *here)["records"]
    assert len(rows) == 47 and rows[0]["key"].startswith(rows[0]["class"] + "/")
    assert rows[0]["bytes"] == os.path.getsize(folder / rows[0]["key"])
    one = shardio("cat", idx, "--key", "eel/more/x", *here, text=False)
    assert one.stdout == jpeg(901)
    assert shardio("verify", idx, *here, "--decode").stdout.endswith("all as packed\n")
    assert "47 records" in shardio("explain", idx, *here, "--batch-size", "4").stdout
    call = shardio("tune", idx, *here, "--batch-size", "4", "--quiet").stdout
    assert call.startswith(f'ShardDataset("{idx}", storage=Storage(root="{folder}"), batch_size=4')
    before = {key: data for key, data in content(folder).items() if data is not None}
    for command in ("unpack",), ("export", "--format", "imagefolder"):
        back = tmp_path / command[0]
        shardio(command[0], idx, back, *here, *command[1:])
        files = {key: data for key, data in content(back).items() if data is not None}
        if command[0] == "export":  # which gives a name its ending
            files[b"eel/more/x"] = files.pop(b"eel/more/x.jpg")
        assert files == before


def test_unpacking_gives_back_the_tree(folder: Path, tmp_path: Path) -> None:
    before = content(folder)
    index(folder)
    library.unpack(folder, tmp_path / "back")
    assert content(tmp_path / "back") == before  # `eel/more/x` too, which has no ending


def test_whole_runs_can_be_compared(folder: Path) -> None:
    index(folder)
    assert not library.verify(folder, sha256=True).damages
    made = manifest.load(locate(folder))
    data = library.open(folder, decode=None)[: int(made.shard_records[0])]
    joined = hashlib.sha256(b"".join(sample["image"] for sample in data)).digest()
    assert made.shard(0).sha256 == joined


def test_it_is_indexed_anew_and_packed_where_its_index_is_beside_it(
    folder: Path, tmp_path: Path
) -> None:
    first = index(folder)
    plant(folder, {"dog é/new.jpg": jpeg(77)})
    again = index(folder)
    assert again.records == first.records + 1
    assert library.open(folder, decode=None).find("dog é/new.jpg") >= 0
    keys = library.open(folder).keys()
    library.pack(folder, tmp_path / "packed", jobs=1)
    assert sorted(library.open(tmp_path / "packed").keys()) == sorted(keys)


# --- damage ---------------------------------------------------------------------------------------


def change(path: Path) -> None:
    flip(path, 300)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        (change, "its checksum is"),
        (cut, r"it has [\d,]+ bytes, but had [\d,]+ when it was indexed"),
        (grow, r"it has [\d,]+ bytes, but had"),
        (Path.unlink, "the file is not there"),
        (replace_by_folder, "expected a file"),
        (replace_by_fifo, "expected a file"),
    ],
)
def test_a_file_that_differs_is_named(folder: Path, harm: Any, what: str) -> None:
    index(folder)
    data = library.open(folder, decode=None)
    right = list(data)
    bad = data.find("cat/003.jpg")
    harm(folder / "cat" / "003.jpg")
    for number in range(len(data)):
        if number != bad:
            assert data[number] == right[number]
    kind = DamageError if "expected a file" not in what else ShardioError
    reader = data.reader
    shard, record = reader.locate(bad)
    for read in (
        lambda: data[bad],
        lambda: list(data),
        lambda: reader.shard(shard).decode(record, *reader.shard(shard).hold(record, record + 1)),
    ):
        with pytest.raises(kind, match=rf"photos/cat/003\.jpg: {what}"):
            read()
    reader.shard(shard).will_need(0, int(reader.manifest.shard_records[shard]))
    [damage] = library.verify(folder, jobs=1).damages
    assert (damage.key, damage.record) == ("cat/003.jpg", record)
    assert damage.shard.endswith(f"files-{shard:05d}") and "cat/003.jpg" in damage.what
    assert data.keys()[bad] == "cat/003.jpg"  # no file is read for its key


def test_no_descriptor_stays_open_and_few_are_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index(folder)
    data = library.open(folder, decode=None)
    data[0]
    open_now, most, plain = set(os.listdir("/proc/self/fd")), 0, os.open

    def counting(*arguments: Any, **named: Any) -> int:
        nonlocal most
        found = plain(*arguments, **named)
        most = max(most, len(set(os.listdir("/proc/self/fd")) - open_now))
        return found

    monkeypatch.setattr(os, "open", counting)
    list(data)
    data.reader.shard(0).will_need(0, 10)
    data.reader.shard(1).hold(0, 10)
    monkeypatch.undo()
    assert most <= 2  # the file, and the folder that lists the descriptors
    assert set(os.listdir("/proc/self/fd")) == open_now


def test_files_are_announced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index(folder)
    shard = library.open(folder).reader.shard(0)
    told: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: told.append(arguments[2]))
    shard.will_need(3, 7)
    assert sum(told) == int(shard.sizes[3:7].sum())


def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    data = plant(tmp_path / "data", {"a.jpg": jpeg(0)})
    (tmp_path / "secret").write_bytes(jpeg(1))
    for key in (b"../secret", b"/etc/passwd", b"a/../../secret", b"a//b", b".", b"", b"a/."):
        with pytest.raises(DamageError, match="leads out of the folder"):
            crafted(data, imagefolder.describe([key], np.array([18]), None), 1)
    fine = imagefolder.describe([b"..a/.b/...", b"a"], np.array([9, 9]), None)
    crafted(data, fine, 2).close()
    with pytest.raises(DamageError, match="2 files, not 1"):
        crafted(data, fine, 1)
    with pytest.raises(DamageError, match="2 keys of 1 files"):
        crafted(data, imagefolder.describe([b"a", b"b"], np.array([18]), None), 1)
    with pytest.raises(DamageError, match="empty file"):
        crafted(data, imagefolder.describe([b"a", b"b"], np.array([18, 0]), None), 2)
    for extra in (b"", b"\x80", b"\x83\xa4keys\xa1a\xa5sizes\xa1b\xa6labels\xc0"):
        with pytest.raises(DamageError, match="does not describe it"):
            crafted(data, extra, 1)


def crafted(folder: Path, extra: bytes, count: int) -> Shard:
    """A shard of 18 bytes whose index says this of its files."""
    each = 18 // count
    ranges = [(each * i, each) for i in range(count)]
    body = dump(0, ID, ranges, [0] * count, [0] * count, {}, extra)
    sealed = int.from_bytes(body[-8:], "little")
    (folder / sidecar_name(0, sealed)).write_bytes(body)
    info = ShardInfo("files-00000", 0, count, 18, bytes(32), sealed)
    made = opening(folder, (("__key__", "key"), ("image", "image")))
    return formats.open_shard("imagefolder", made, info)


def opening(folder: Path, fields: Fields) -> Opening:
    return Opening(locate(folder), locate(folder), ID, Schema(fields), {})


# --- what is refused ------------------------------------------------------------------------------


def test_files_that_are_no_images_are_all_listed_and_nothing_stays(tmp_path: Path) -> None:
    tree = images(2, 40, size=40_000)
    strange = ["class0/a.jpg", "class0/b.txt", "class1/c.jpg", "class1/d"]
    folder = plant(tmp_path / "photos", {**tree, **{name: b"text" * 9 for name in strange}})
    before = content(folder)
    for jobs in (1, 2):
        with pytest.raises(SourceError) as caught:
            index(folder, jobs=jobs)
        assert "4 files cannot be indexed" in str(caught.value)
        for name in strange:
            assert f"{name}: is not an image: it begins with 'texttexttext'" in str(caught.value)
        assert content(folder) == before
    plant(folder, {"class0/empty.jpg": b""})
    with pytest.raises(SourceError, match=r"class0/empty\.jpg: is empty"):
        index(folder)


def test_splits_are_indexed_each_by_the_commands_that_the_error_names(tmp_path: Path) -> None:
    tree = {f"{split}/{name}/0.jpg": jpeg(0) for split in ("train", "val") for name in "abc"}
    tree.pop("val/b/0.jpg")
    folder = plant(tmp_path / "my photos", tree)
    with pytest.raises(SourceError, match="its folders train, val are splits") as caught:
        index(folder, out=tmp_path / "idx")
    commands = [shlex.split(line) for line in str(caught.value).splitlines()[1:]]
    assert [command[:2] for command in commands] == [["shardio", "index"]] * 2
    for command in commands:
        shardio(*command[1:])
    val = library.open(
        tmp_path / "idx" / "val", storage=library.Storage(root=folder / "val"), decode=None
    )
    assert val.classes == ["a", "b", "c"]
    assert sorted((s["__key__"], s["label"]) for s in val) == [("a/0.jpg", 0), ("c/0.jpg", 2)]
    library.pack(folder, tmp_path / "packed", jobs=1)
    assert same_order(val, library.open(tmp_path / "packed" / "val", decode=None))
    # Absent classes make no folders, as in what was packed.
    library.unpack(tmp_path / "idx" / "val", tmp_path / "back", root=folder / "val")
    assert sorted(os.listdir(tmp_path / "back")) == ["a", "c"]
    with pytest.raises(SourceError) as caught:
        index(folder)
    assert "--out" not in str(caught.value)


def test_classes_are_numbered_as_elsewhere(folder: Path, tmp_path: Path) -> None:
    index(folder, out=tmp_path / "idx")
    other = plant(tmp_path / "other", {"eel/1.jpg": jpeg(1)})
    index(other, classes=tmp_path / "idx")
    assert library.open(other, decode=None)[0]["label"] == 2
    plant(tmp_path / "third", {"emu/1.jpg": jpeg(1)})
    with pytest.raises(OptionError, match="1 of the source's classes are not among"):
        index(tmp_path / "third", classes=tmp_path / "idx")
    plant(tmp_path / "flat", {"1.jpg": jpeg(1)})
    index(tmp_path / "flat")
    with pytest.raises(OptionError, match="that dataset has no classes"):
        index(other, classes=tmp_path / "flat", overwrite=True)


def test_an_index_within_the_folder_would_be_a_class(folder: Path) -> None:
    with pytest.raises(OptionError, match="lies in the folder of images"):
        index(folder, out=folder / "idx")
    with pytest.raises(OptionError, match="indexed as a whole"):
        index(folder, files="*.jpg")
    with pytest.raises(SourceError, match=r"003\.jpg: its name is of none of webdataset"):
        index(folder / "cat" / "003.jpg")
    assert not (folder / "idx").exists()


def test_fields_can_have_other_names(folder: Path) -> None:
    done = index(folder, fields={"photo": "image"})
    assert list(done.fields) == ["__key__", "label", "photo"]
    assert library.open(folder, decode=None)[0]["photo"][:2] == b"\xff\xd8"


# --- as any format --------------------------------------------------------------------------------


class TestImageFolderConformance(FormatConformance):
    FIELDS = (("__key__", "key"), ("image", "image"), ("label", "int"))

    @classmethod
    def sample(cls, number: int, size: int = 0) -> Sample:
        key = f"class {number % 3}/é{number:04d}.jpg".encode() + b"\xff" * (number % 2)
        data = noise(f"{number}", size or 100 + number)  # no file is empty
        return {"__key__": key, "image": data, "label": number % 3}

    def build(self, folder: Path, fields: Fields, samples: Sequence[Sample]) -> Path:
        """In the order of the samples, which `index` would shuffle; the path is that of a file."""
        data = folder / "data"
        if not samples:
            data.mkdir()
        plant(data, {s["__key__"]: s["image"] for s in samples})
        extra = imagefolder.describe(
            [s["__key__"] for s in samples],
            np.array([len(s["image"]) for s in samples], np.int64),
            [s["label"] for s in samples] if samples else None,
        )
        names = ["files-00000"]
        found = Found(str(data), "imagefolder", locate(str(data)), names, [0], [""], [extra])
        self.folder = folder
        info = scan_shard(found, str(folder), ID, 0, lambda count: None).info
        assert info is not None
        self.info = info
        return (
            Path(os.fsdecode(os.path.join(os.fsencode(data), samples[7]["__key__"])))
            if samples
            else data
        )

    def open(self, path: Path) -> Shard:
        data, index_ = locate(self.folder / "data"), locate(self.folder)
        made = replace(opening(self.folder, self.FIELDS), storage=data, index_location=index_)
        return formats.open_shard("imagefolder", made, self.info)

    def test_sizes_are_what_records_cost_to_read(self, shard: Shard, path: Path) -> None:
        assert shard.sizes[:].dtype == np.int64
        assert shard.sizes[:].tolist() == [len(s["image"]) for s in self.SAMPLES]

    def test_a_record_lies_behind_the_one_before_it(self, shard: Shard, path: Path) -> None:
        starts = np.cumsum([0, *(len(s["image"]) for s in self.SAMPLES)])
        assert [shard.offset(record) for record in range(40)] == starts[:-1].tolist()  # of the run


def test_classes_may_be_those_of_packed_splits(tmp_path: Path) -> None:
    plant(tmp_path / "src", {f"train/{key}": data for key, data in images().items()})
    library.pack(tmp_path / "src", tmp_path / "packed", jobs=1)
    val = plant(tmp_path / "val", {"class1/x.jpg": noise("x", 99)})
    index(val, classes=tmp_path / "packed", jobs=1)
    assert ShardDataset(val, decode=None).classes == ["class0", "class1", "class2"]
