"""Export: fields, keys and options; whole or not at all, whatever the format."""

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import LIMIT_S, small_datasets, warm_python
from support.exporting import (
    FORMATS,
    SHARDED,
    N,
    caffe_samples,
    example,
    left,
    mds_samples,
    rec_records,
    rich,
    tar_index,
    tar_samples,
    tf_records,
    written,
)
from support.trees import content, environment, picture, plant, shardio, shardio_json

from shardio import open as open_dataset
from shardio.errors import (
    DamageError,
    OptionError,
    ShardioError,
)
from shardio.packing import receipt
from shardio.packing.export import export
from shardio.packing.index import index
from shardio.packing.options import PlanOptions
from shardio.packing.pack import pack
from shardio.packing.receipt import NAME as RECEIPT
from shardio.packing.writer import Writer
from shardio.storage import local

Packed = Callable[..., Path]


WITHOUT_LMDB = """
import importlib, os, pkgutil, sys
sys.modules["lmdb"] = None  # importing it is an ImportError, as where it is missing or broken
import shardio
for found in pkgutil.walk_packages(shardio.__path__, "shardio."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
from torch.utils.data import DataLoader
for format in ("record", "lmdb"):
    shardio.pack("src", format, format=format, jobs=1)
    data = shardio.ShardDataset(format, batch_size=4, decode="numpy")
    assert sum(len(b["label"]) for b in DataLoader(data, batch_size=None, num_workers=1)) == 8
    shardio.export(format, f"{format}.tar", format="webdataset")
try:
    shardio.export("record", "caffe", format="lmdb-caffe")
except shardio.DependencyError as error:
    print(error)
print(sorted(os.listdir()))
"""


def test_without_lmdb_only_its_export_is_missing(tmp_path: Path) -> None:
    plant(tmp_path / "src", {f"c{i % 2}/{i}.png": picture(8, 8, "PNG") for i in range(8)})
    found = subprocess.run(
        warm_python.command("-c", WITHOUT_LMDB),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    said, there = found.stdout.splitlines()
    assert said.startswith("export to lmdb-caffe needs the package lmdb, which does not import")
    assert there == "['lmdb', 'lmdb.tar', 'record', 'record.tar', 'src']"


def test_splits_become_folders_in_every_format(tmp_path: Path) -> None:
    names = [f"{split}/{c}/{i}.jpg" for split in ("train", "val") for c in "ab" for i in "12"]
    tree = {name: small_datasets.jpeg(i) for i, name in enumerate(names)}
    pack(plant(tmp_path / "src", tree), tmp_path / "out", jobs=1)
    for name in FORMATS:
        done = export(tmp_path / "out", tmp_path / name, format=name)
        receipt = [] if name == "imagefolder" else [RECEIPT]
        there = ["README.md", "data"] if name == "parquet" else ["train", "val"]
        assert left(tmp_path / name) == [*receipt, *there] and done.records == 8
    assert content(tmp_path / "imagefolder") == content(tmp_path / "src")
    assert len(tar_samples(tmp_path / "webdataset" / "val" / "00000.tar")) == 4


# --- names and keys -------------------------------------------------------------------------------


def test_fields_are_chosen_and_renamed(wide: Path, tmp_path: Path) -> None:
    names = {"image": "image/encoded", "label": "image/class/label", "__key__": "image/filename"}
    export(wide, tmp_path / "tf", format="tfrecord", fields=names)
    features = example(tf_records(tmp_path / "tf" / "00000.tfrecord")[4])
    assert features == {
        "image/encoded": [small_datasets.jpeg(4)],
        "image/class/label": [1],
        "image/filename": [b"class1/000004.jpg"],
    }
    export(wide, tmp_path / "mds", format="mds", fields={"image": "x", "label": "y"})
    assert mds_samples(tmp_path / "mds")[4] == {"x": small_datasets.jpeg(4), "y": 1}
    names = {"image": "jpeg", "label": "class.json", "caption": "text"}
    export(wide, tmp_path / "wds", format="webdataset", fields=names)
    _, members = tar_samples(tmp_path / "wds" / "00000.tar")[4]
    assert members == {
        "jpeg": small_datasets.jpeg(4),
        "class.json": b"1",
        "text": rich(4)["caption"].encode(),
    }
    export(wide, tmp_path / "rec", format="recordio", fields={"image": "image", "score": "label"})
    record = rec_records(tmp_path / "rec" / "00000.rec")[4]
    assert struct.unpack_from("<If", record) == (0, 0.5)


def test_extensions_that_fields_have_already_are_kept(packed: Packed, tmp_path: Path) -> None:
    values = {
        **{
            "jpg": small_datasets.jpeg(1),
            "seg.png": picture(4, 4, "PNG"),
            "txt": "t",
            "json": {"a": 1},
        },
        **{"npy": np.arange(3), "cls": 3, "pkl": b"x", "mp4": b"y", "image/height": 4},
    }
    kinds = ("image", "image", "str", "json", "array", "int", "bytes", "bytes", "int")
    fields = (("__key__", "key"), *zip(values, kinds, strict=True))
    out = packed([1], fields=fields, sample=lambda i: {"__key__": b"k", **values})
    export(out, tmp_path / "wds", format="webdataset")
    ((_, members),) = tar_samples(tmp_path / "wds" / "00000.tar")
    # not pkl: webdataset would run what it unpickles, and the value is bytes
    expected = {
        "jpg",
        "seg.png",
        "txt",
        "json",
        "npy",
        "cls",
        "pkl.bin",
        "mp4",
        "image_height.json",
    }
    assert members.keys() == expected


def test_images_are_called_what_they_are(packed: Packed, tmp_path: Path) -> None:
    kinds = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
    images = [picture(9, 9, kind) for kind in kinds]
    sample = {"__key__": b"k/%d.JPEG", "label": 0}
    out = packed([6], sample=lambda i: sample | {"__key__": b"k/%d.JPEG" % i, "image": images[i]})
    done = export(out, tmp_path / "wds", format="webdataset")
    found = tar_samples(tmp_path / "wds" / "00000.tar")
    types = [next(iter(members)) for _, members in found]
    assert types == ["jpg", "png", "webp", "gif", "bmp", "tif"]
    assert [members.popitem()[1] for _, members in found] == [b"0"] * 6
    assert [members.popitem()[1] for _, members in found] == images
    assert done.fields["image"] == "bmp/gif/jpg/png/tif/webp"


@pytest.mark.parametrize(
    "key",
    [
        *(b"a.b/c", b"\xff\xfe/\x80", b"x" * 99, b"d" * 200 + b"/x", b"y" * 1500),
        *("ü/ä".encode(), ("ü" * 90).encode(), b"\xff" * 300, b"d" * 155 + b"/" + b"x" * 96),
        *(b"d/" * 200 + b"x", b"tab\there", b"new\nline", b"with blank", b" ", b"a__b", b"__x__"),
        b"d" * 156 + b"/" + b"x" * 90,
    ],
)
def test_odd_keys_come_back_from_tar_files(tmp_path: Path, key: bytes) -> None:
    export(written(tmp_path / "out", key), tmp_path / "wds", format="webdataset")
    path = tmp_path / "wds" / "00000.tar"
    ((found, members),) = tar_samples(path)
    assert os.fsencode(found) == key and members == {"jpg": small_datasets.jpeg(0)}
    blank = key.split() != [key]
    said = path.with_suffix(".idx").read_bytes()
    assert said == os.fsencode(tar_index(path, names=not blank))  # v1.1 has no names to be split


@pytest.mark.parametrize(
    "key",
    [
        *(b"a.b", b"v1.2/x.y", b".hidden", b"a/.b", b"__x__/y", b"____/y", b"/abs", b"a//b"),
        *(b"../x", b"a/../b", b"./x", b"x/", b"a\0b", b"1.2.jpg", b".jpg"),
    ],
)
def test_keys_that_webdataset_would_split_or_skip_are_refused(tmp_path: Path, key: bytes) -> None:
    out = written(tmp_path / "out", b"good", key)
    if b"\0" in key:
        assert open_dataset(out).stored_keys()[1] == key
    with pytest.raises(OptionError, match="--keys number"):
        export(out, tmp_path / "wds", format="webdataset")
    assert not (tmp_path / "wds").exists()
    export(out, tmp_path / "wds", format="webdataset", keys="number")
    found = tar_samples(tmp_path / "wds" / "00000.tar")
    assert [key for key, _ in found] == ["00000000", "00000001"]


def test_two_keys_that_are_one_without_their_endings_are_refused(tmp_path: Path) -> None:
    out = written(tmp_path / "out", b"a/1.jpg", b"b", b"a/1.png")
    with pytest.raises(OptionError, match=r"a/1\.jpg and a/1\.png are one"):
        export(out, tmp_path / "wds", format="webdataset")


@pytest.mark.parametrize(
    "keys", [(b"a", b"a"), (b"a", b"a.jpg"), (b"a.jpg", b"a.jpg/b"), (b"a.jpg/b", b"a.jpg")]
)
def test_paths_that_cannot_be_side_by_side_are_refused(
    tmp_path: Path, keys: tuple[bytes, bytes]
) -> None:
    out = written(tmp_path / "out", *keys)
    with pytest.raises(OptionError, match="--keys number"):
        export(out, tmp_path / "back", format="imagefolder")
    assert not (tmp_path / "back").exists()
    export(out, tmp_path / "back", format="imagefolder", keys="number")
    assert left(tmp_path / "back") == ["00000000.jpg", "00000001.jpg"]


@pytest.mark.parametrize("key", [b"../x", b"/x", b"a/../../x", b"a//b", b"a\0"])
def test_no_key_leads_out_of_the_directory(tmp_path: Path, key: bytes) -> None:
    with pytest.raises(OptionError, match="no path within"):
        export(written(tmp_path / "out", key), tmp_path / "back", format="imagefolder")
    assert left(tmp_path) == ["out"]


def test_keys_too_long_for_lmdb_are_refused(tmp_path: Path) -> None:
    export(written(tmp_path / "out", b"x" * 502), tmp_path / "db", format="lmdb-caffe")
    assert list(caffe_samples(tmp_path / "db")) == [b"00000000_" + b"x" * 502]
    with pytest.raises(OptionError, match=r"503 bytes long.*--keys number"):
        export(written(tmp_path / "long", b"x" * 503), tmp_path / "db2", format="lmdb-caffe")


# --- what a format cannot hold --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["recordio", "lmdb-caffe", "imagefolder"])
def test_fields_without_room_are_named_with_the_way_out(
    wide: Path, tmp_path: Path, name: str
) -> None:
    with pytest.raises(OptionError) as caught:
        export(wide, tmp_path / "x", format=name)
    assert "caption (str), meta (json)" in str(caught.value)
    assert "--fields image=image,label=label" in str(caught.value)
    export(wide, tmp_path / "x", format=name, fields={"image": "image", "label": "label"})


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (["nothing"], "no field is called 'nothing'; there are __key__, image"),
        ("image", "expected a list"),
        ({"caption": "a/b"}, "an extension is letters"),
        ({"caption": "npy"}, "choose .txt or json"),
        ({"boxes": "json"}, "choose .npy"),
        ({"good": "cls"}, "choose .json"),
        ({"caption": "x", "raw": "X"}, "two fields would be called 'x'"),
        (["__key__"], "is no field in webdataset"),
    ],
)
def test_wrong_fields_are_refused(wide: Path, tmp_path: Path, fields: Any, why: str) -> None:
    with pytest.raises(OptionError, match=re.escape(why)):
        export(wide, tmp_path / "x", format="webdataset", fields=fields)
    assert not (tmp_path / "x").exists()


def test_a_key_that_webdataset_would_split_is_told_with_what_to_do(tmp_path: Path) -> None:
    source = plant(
        tmp_path / "src", {"a/1.jpg": small_datasets.jpeg(1), "a/2.1.jpg": small_datasets.jpeg(2)}
    )
    pack(source, tmp_path / "out", jobs=1, plan=PlanOptions(shuffle=False))

    def said(folder: str, **options: Any) -> str:
        with pytest.raises(OptionError) as caught:
            export(tmp_path / folder, tmp_path / "wds", format="webdataset", **options)
        return str(caught.value)

    assert said("out").endswith(
        "the key a/2.1.jpg has a dot in its last part, and webdataset splits names at the first "
        "one: it would read a/2 as the key, and 1 as a part of the field. --keys number names the "
        "records by their numbers"
    )
    without = said("out", fields={"label": "cls"})  # so the ending of the image's file stays
    assert "a/1.jpg has a dot" in without and "and jpg as a part" in without
    assert without.endswith("or write the image, too, whose ending goes: --fields image,...")
    export(tmp_path / "out", tmp_path / "numbers", format="webdataset", keys="number")
    with Writer(tmp_path / "odd") as writer:
        writer.write({"__key__": "a//b", "n": 1})
    assert "the key a//b is no path of a file in a tar" in said("odd")


def test_wrong_options_are_refused(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "x"
    for options, why in (
        ({"format": "zip"}, "webdataset, tfrecord, recordio"),
        ({"format": "mds", "keys": "none"}, "'own' or 'number'"),
        ({"format": "imagefolder", "shard_size": 5}, "no shards"),
        ({"format": "mds", "shard_size": "5 bananas"}, "shard_size"),
    ):
        with pytest.raises(OptionError, match=why):
            export(plain, out, **options)
    with pytest.raises(OptionError, match="the dataset is there itself"):
        export(plain, plain, format="imagefolder", overwrite=True)
    export(plain, out, format="webdataset")
    index(out, out=tmp_path / "idx", jobs=1)
    with pytest.raises(OptionError, match="the dataset is there itself"):
        export(tmp_path / "idx", out, format="webdataset", root=out, overwrite=True)
    shutil.rmtree(out)
    classless = tmp_path / "classless"
    small_datasets.make(classless, [2], image=small_datasets.jpeg, classes=None)
    with pytest.raises(OptionError, match="--fields image"):
        export(classless, out, format="imagefolder")
    export(classless, out, format="imagefolder", fields=["image"])
    assert content(out)[b"k/000001.jpg"] == small_datasets.jpeg(1)


# --- all or nothing -------------------------------------------------------------------------------


def hashes(folder: Path) -> dict[bytes, Any]:
    return {name: data and sha256(data).digest() for name, data in content(folder).items()}


@pytest.mark.parametrize("name", FORMATS)
def test_the_bytes_follow_from_the_dataset(plain: Path, tmp_path: Path, name: str) -> None:
    size = {"shard_size": 14_000} if name in SHARDED else {}
    for out in ("a", "b"):
        export(plain, tmp_path / out, format=name, **size)
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")
    shards = [path for path in (tmp_path / "a").glob("*.*") if size and path.suffix != ".idx"]
    assert all(path.stat().st_size <= 14_000 for path in shards)


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_record_leaves_nothing(plain: Path, tmp_path: Path, name: str) -> None:
    shard = small_datasets.shard_files(plain)[-1]
    small_datasets.flip(shard, shard.stat().st_size // 2)
    for made in (False, True):
        if made:
            (tmp_path / "x").mkdir()
        with pytest.raises(DamageError):
            export(plain, tmp_path / "x", format=name)
        assert (tmp_path / "x").exists() == made and left(tmp_path / "x") == []


@pytest.mark.parametrize("name", FORMATS)
def test_an_interrupt_leaves_nothing(plain: Path, tmp_path: Path, name: str) -> None:
    def interrupt(done: int, total: int) -> None:
        assert total == N
        if done == N - 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(plain, tmp_path / "a" / "x", format=name, progress=interrupt)
    assert left(tmp_path / "a") == []


def test_a_full_disk_leaves_nothing(packed: Packed, tmp_path: Path) -> None:
    out = packed([6], image=lambda i: small_datasets.jpeg(i) + bytes(200_000))
    code = (
        "import resource, signal, sys; from shardio import export, StorageError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))\n"
        "out, folder, *names = sys.argv[1:]\n"
        "for name in names:\n"
        "    try: export(out, f'{folder}/{name}', format=name)\n"
        "    except StorageError as error: print(name, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, out, tmp_path / "x", *FORMATS],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert [one.split()[0] for one in said] == list(FORMATS) and all(
        "cannot" in one for one in said
    )
    assert left(tmp_path / "x") == []


def test_a_killed_export_leaves_one_hidden_folder_and_may_be_repeated(
    plain: Path, tmp_path: Path
) -> None:
    code = (
        "import os, signal, sys; from shardio import export\n"
        "def kill(done, total): done == 20 and os.kill(os.getpid(), signal.SIGKILL)\n"
        "export(sys.argv[1], sys.argv[2], format='webdataset', shard_size=5000, progress=kill)\n"
    )
    run = [sys.executable, "-c", code, plain, tmp_path / "x"]
    assert subprocess.run(run, env=environment(), timeout=LIMIT_S).returncode == -signal.SIGKILL
    (name,) = left(tmp_path / "x")
    assert local.is_temporary(name)
    done = export(plain, tmp_path / "x", format="webdataset", shard_size=5000)
    assert len(left(tmp_path / "x")) == done.files + 2  # and the receipt


def test_an_export_that_is_killed_at_its_receipt_goes_on(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, saved = receipt.Receipt.save, []

    def killed(note: receipt.Receipt, directory: str) -> None:
        saved.append(note)
        if len(saved) == 2:  # the files are in place: that they are all is not written any more
            raise KeyboardInterrupt
        save(note, directory)

    monkeypatch.setattr(receipt.Receipt, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        export(plain, tmp_path / "x", format="webdataset", shard_size=5000)
    draft = tmp_path / "x" / f".shardio-{'0' * 16}-.shardio-export.tmp"
    draft.write_bytes(b"{")
    assert local.is_temporary(draft.name)
    done = export(plain, tmp_path / "x", format="webdataset", shard_size=5000)
    assert len(left(tmp_path / "x")) == done.files + 2  # and receipt and draft


def test_an_empty_dataset_is_exported(packed: Packed, tmp_path: Path) -> None:
    out = packed([0])
    for name in FORMATS:
        done = export(out, tmp_path / name, format=name)
        assert done.records == 0
    assert json.loads((tmp_path / "mds" / "index.json").read_text())["shards"] == []


# --- the command ----------------------------------------------------------------------------------


def test_the_command_says_what_it_wrote(wide: Path, tmp_path: Path) -> None:
    out = tmp_path / "x"
    said = shardio(
        *("export", wide, out, "--format", "webdataset", "--shard-size", "20KB"),
        *("--fields", "image,label=class.cls,caption"),
    ).stdout
    assert f"{out}: webdataset: 23 records in " in said
    assert "fields: image as jpg, label as class.cls, caption as caption.txt\n" in said
    shardio("export", wide, out, "--format", "webdataset", code=1)
    done = shardio_json("export", wide, out, "--format", "tfrecord", "--overwrite", "--quiet")
    assert done["records"] == 23 and done["fields"]["__key__"] == "key"
    assert "score" in done["notes"][0]
    shardio("export", wide, out, "--format", "mds", "--fields", "image=,label", code=2)


def test_only_errors_of_our_own_are_raised_for_a_cut_source(plain: Path, tmp_path: Path) -> None:
    shard = small_datasets.shard_files(plain)[-1]
    whole = shard.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        shard.write_bytes(whole[:size])
        with pytest.raises(ShardioError):
            export(plain, tmp_path / "x", format="webdataset")
        assert not (tmp_path / "x").exists()
