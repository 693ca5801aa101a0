"""Any stream of samples to a dataset: whole or not at all, in order, under unique keys."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.trees import JPEG, content, environment, images, noise, plant, shardio, shards

import shardio as api
from shardio.dataset import sequence as sequences
from shardio.errors import (
    BusyError,
    ExistsError,
    NotPackedError,
    OptionError,
    SampleError,
    StorageError,
)
from shardio.formats import manifest
from shardio.packing import pack as packing
from shardio.packing.gc import gc
from shardio.packing.options import PlanOptions
from shardio.packing.unpack import unpack
from shardio.packing.verify import verify
from shardio.packing.writer import Writer
from shardio.storage import local, lock
from shardio.storage.location import locate


def samples(count: int = 10) -> Iterator[dict[str, Any]]:
    for i in range(count):
        yield {"__key__": f"k{i:03d}", "label": i % 3, "caption": f"no. {i}", "x": np.arange(i)}


def write(out: Path, count: int = 10, **options: Any) -> Writer:
    with Writer(out, **({"max_records": 4} | options)) as writer:
        for sample in samples(count):
            writer.write(sample)
    return writer


def test_samples_come_back_in_the_order_they_were_written(tmp_path: Path) -> None:
    write(tmp_path)
    opened = sequences.open(tmp_path)
    assert [s["__key__"] for s in opened] == [f"k{i:03d}" for i in range(10)]
    assert [s["caption"] for s in opened] == [f"no. {i}" for i in range(10)]
    assert all(np.array_equal(s["x"], np.arange(i)) for i, s in enumerate(opened))
    assert manifest.load(locate(tmp_path)).shard_records.tolist() == [4, 4, 2]
    assert verify(tmp_path, sha256=True, jobs=1).damages == []


def test_a_sample_without_a_key_is_named_by_its_number(tmp_path: Path) -> None:
    with Writer(tmp_path, fields={"n": "int"}) as writer:
        for i in range(3):
            writer.write({"n": i})
    assert sequences.open(tmp_path).keys() == ["000000000", "000000001", "000000002"]


def test_images_need_not_exist(tmp_path: Path) -> None:
    with Writer(tmp_path / "out", fields={"image": "image"}) as writer:
        writer.write({"__key__": "none", "image": None})
        writer.write({"__key__": "some", "image": JPEG})
    done = unpack(tmp_path / "out", tmp_path / "back")
    assert (done.files, done.without) == (1, 1)
    assert content(tmp_path / "back") == {b"some": JPEG}


def test_shards_end_at_shard_size(tmp_path: Path) -> None:
    with Writer(tmp_path, shard_size=10_000) as writer:
        for i in range(20):
            writer.write({"data": bytes([i]) * 3000})
    sizes = [path.stat().st_size for path in shards(tmp_path)]
    assert len(sizes) == 5
    assert all(12_000 < size < 13_000 for size in sizes)


def test_nothing_is_there_before_the_end_and_all_after_it(tmp_path: Path) -> None:
    with Writer(tmp_path, max_records=2) as writer:
        for sample in samples():
            writer.write(sample)
        with pytest.raises(NotPackedError):
            sequences.open(tmp_path)
    assert len(sequences.open(tmp_path)) == 10
    assert {path.suffix for path in tmp_path.iterdir()} == {".shard", ".json"}


def test_an_exception_in_the_block_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Writer(tmp_path / "out", max_records=2) as writer:
        for sample in samples():
            writer.write(sample)
        raise ZeroDivisionError
    assert content(tmp_path / "out") == {}


def test_abort_leaves_what_was_there_before(tmp_path: Path) -> None:
    write(tmp_path, id="one")
    (tmp_path / "mine.txt").write_bytes(b"mine")
    before = content(tmp_path)
    writer = Writer(tmp_path, overwrite=True, max_records=2, id="one")
    for sample in samples(7):
        writer.write(sample)
    writer.abort()
    assert content(tmp_path) == before
    with pytest.raises(OptionError, match="closed"):
        writer.write({})


def test_a_sample_that_does_not_fit_is_refused_and_the_writer_goes_on(tmp_path: Path) -> None:
    with Writer(tmp_path, fields={"n": "int"}, classes=None) as writer:
        writer.write({"n": 1})
        for wrong in ({"n": "x"}, {"m": 1}, {"n": 1, "m": 1}, {"n": 1, "__key__": ""}):
            with pytest.raises(SampleError):
                writer.write(wrong)
        writer.write({"n": 2})
    assert [s["n"] for s in sequences.open(tmp_path)] == [1, 2]
    assert sequences.open(tmp_path).keys() == ["000000000", "000000001"]


def test_only_samples_that_do_not_fit_make_an_empty_dataset(tmp_path: Path) -> None:
    with Writer(tmp_path, fields={"n": "int"}) as writer, pytest.raises(SampleError):
        writer.write({"n": "x"})
    assert len(sequences.open(tmp_path)) == 0
    assert shards(tmp_path) == []


def test_names_of_classes_may_be_bytes(tmp_path: Path) -> None:
    with Writer(tmp_path, fields={"label": "int"}, classes=[b"\xff", "é", 7]) as writer:
        writer.write({"label": 2})
        assert repr(writer) == f"Writer({str(tmp_path)!r}: 1 record)"
    assert sequences.open(tmp_path).classes == ["\udcff", "é", "7"]


def test_a_class_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="classes: 'dog' stands there twice"):
        Writer(tmp_path / "out", classes=["cat", "dog", b"dog"])


@pytest.mark.parametrize("label", [3, -1, np.int64(7)])
def test_a_label_that_names_no_class_is_refused(tmp_path: Path, label: int) -> None:
    with Writer(tmp_path, fields={"label": "int"}, classes=["a", "b", "c"]) as writer:
        with pytest.raises(SampleError, match="names none of the 3 classes"):
            writer.write({"label": label})
        with pytest.raises(SampleError):
            writer.write({"label": "a"})
        writer.write({"label": np.int64(2)})
        writer.write({"label": None})
    assert sequences.open(tmp_path).classes == ["a", "b", "c"]
    assert "None" not in shardio("ls", tmp_path).stdout  # one has no class, and that is no crash


@pytest.mark.parametrize("second", [3, 4, 9, 17])
def test_a_key_written_twice_ends_the_writer(tmp_path: Path, second: int) -> None:
    twice = pytest.raises(SampleError, match="k003 was written twice")
    with twice, Writer(tmp_path, max_records=4) as writer:
        for i, sample in enumerate(samples(30)):
            writer.write(sample)
            if i == second:
                writer.write({**sample, "__key__": "k003"})
    assert content(tmp_path) == {}


def test_keys_are_compared_over_all_shards_and_merges(tmp_path: Path) -> None:
    with Writer(tmp_path, max_records=3) as writer:
        for i in range(200):
            writer.write({"__key__": f"{i}", "n": i})
    twice = pytest.raises(SampleError, match="57 was written twice")
    with twice, Writer(tmp_path, max_records=3, overwrite=True) as writer:
        for i in (*range(199), 57):
            writer.write({"__key__": f"{i}", "n": i})


def test_equal_streams_under_equal_ids_give_equal_bytes(tmp_path: Path) -> None:
    for name, id in (("a", "x"), ("b", "x"), ("c", "y"), ("d", None), ("e", None)):
        write(tmp_path / name, id=id)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    ids = {manifest.load(locate(tmp_path / n)).dataset_id for n in "acde"}
    assert len(ids) == 4


def test_no_samples_need_fields(tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="no fields were given"), Writer(tmp_path / "a"):
        pass
    assert content(tmp_path / "a") == {}
    with Writer(tmp_path / "b", fields={"n": "int"}):
        pass
    assert len(sequences.open(tmp_path / "b")) == 0
    assert verify(tmp_path / "b").damages == []


@pytest.mark.parametrize(
    "options",
    [
        {"shard_size": 0},
        {"shard_size": "many"},
        {"shard_size": 2.5},
        {"max_records": 0},
        {"max_records": "3"},
        {"fields": {"x": "?"}},
        {"fields": ["image", "label"]},
        {"fields": "image"},
        {"fields": [("image", "image", "image")]},
        {"fields": 5},
        {"classes": "abc"},
        {"id": 5},
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    [name] = options
    with pytest.raises(OptionError, match=name.rstrip("s")):
        Writer(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_what_is_no_image_file_is_told_with_what_to_give(tmp_path: Path) -> None:
    picture = Image.new("RGB", (2, 2))
    pixels = np.zeros((2, 2, 3), np.uint8)
    fields = {"image": "image", "x": "array", "label": "int"}
    for fields_, value, said in (
        (
            None,
            picture,
            r"'image': no kind fits a PIL image\. Give the bytes .*image\.save\(buffer",
        ),
        (
            fields,
            picture,
            r"'image' is declared 'image', but it is a PIL image, .*buffer\.getvalue",
        ),
        (None, torch.zeros(2), r"'image': no kind fits a tensor\. Give tensor\.cpu\(\)\.numpy\(\)"),
        (fields, torch.zeros(2), r"is a tensor, not bytes\. .*declare the field 'array'"),
        (fields, pixels, r"type ndarray, not bytes\. .*Image\.fromarray\(array\)\.save"),
        (fields, "1.jpg", r"not bytes\. Give the content of the file: open\(path, \"rb\"\)"),
        (
            None,
            b"hello",
            r"its 5 bytes begin with b'hello', as no .* fields=\{\.\.\., 'image': 'bytes'\}",
        ),
        (fields, memoryview(b"hello"), r"its 5 bytes begin with b'hello'"),
    ):
        sample = {"image": value} | ({} if fields_ is None else {"x": pixels, "label": 1})
        with Writer(tmp_path / "out", fields=fields_) as writer:
            with pytest.raises(SampleError, match=said):
                writer.write(sample)
            writer.abort()
    with Writer(tmp_path / "bytes", fields={"image": "bytes"}) as writer:
        writer.write({"image": b"hello"})


def test_a_class_s_name_as_a_label_is_told_with_its_number(tmp_path: Path) -> None:
    for options, label, said in (
        (
            {"classes": ["cat", "dog"]},
            "dog",
            r"label is 'dog', and labels are numbers: give 1, its",
        ),
        ({"classes": ["cat", "dog"]}, "Dog", r"there are cat, dog: did you mean 'dog'\?"),
        ({}, "dog", r"give Writer\(classes=\[\.\.\.\]\) .*fields=\{\.\.\., 'label': 'str'\}"),
        ({"fields": {"label": "int"}}, "dog", r"and labels are numbers: give Writer\("),
        ({"classes": ["cat"]}, 1, r"label 1 names none of the 1 class, counted from 0"),
    ):
        with Writer(tmp_path / "out", **options) as writer:  # type: ignore[arg-type]
            with pytest.raises(SampleError, match=said):
                writer.write({"label": label})
            writer.abort()
    with Writer(tmp_path / "text", fields={"label": "str"}) as writer:
        writer.write({"label": "dog"})


def test_what_lies_in_the_directory_is_told_before_a_sample_is_made(tmp_path: Path) -> None:
    write(tmp_path / "out")
    with pytest.raises(
        ExistsError, match=r"out: a dataset is here, of \d+ records\. Choose another"
    ):
        Writer(tmp_path / "out")
    Writer(tmp_path / "out", overwrite=True)
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="file: expected a directory, or nothing yet"):
        Writer(tmp_path / "file")


def test_sizes_and_fields_may_be_as_users_have_them(tmp_path: Path) -> None:
    pairs = [("label", "int"), ("caption", "str"), ("x", "array")]
    write(tmp_path / "a", id="x", shard_size=1000, fields=dict(pairs))
    write(tmp_path / "b", id="x", shard_size="1KB", fields=pairs, max_records=np.int64(4))
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_a_writer_that_is_never_closed_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for sample in samples():
        writer.write(sample)
    del sample
    with pytest.warns(ResourceWarning, match=r"never closed, so nothing was packed: write in a"):
        del writer
    assert content(tmp_path) == {}
    write(tmp_path)  # and its lock is gone
    Writer(tmp_path / "never begun")


def test_a_fork_s_copy_of_a_writer_ends_nothing(tmp_path: Path) -> None:
    with Writer(tmp_path, max_records=2) as writer:
        for sample in samples():
            writer.write(sample)
        child = os.fork()
        if not child:
            writer.__del__()
            os._exit(0)
        os.waitpid(child, 0)
    assert len(sequences.open(tmp_path)) == 10


def test_a_dataset_is_replaced_only_when_told_so(tmp_path: Path) -> None:
    write(tmp_path, 10)
    before = content(tmp_path)
    with pytest.raises(ExistsError, match="10 records"), Writer(tmp_path):
        pass
    assert content(tmp_path) == before
    reader = sequences.open(tmp_path)
    write(tmp_path, 3, overwrite=True)
    assert len(sequences.open(tmp_path)) == 3
    assert len(list(reader)) == 10  # who reads the old one goes on
    assert gc(tmp_path, keep_s=0).removed
    assert len(shards(tmp_path)) == 1


def test_neither_splits_nor_an_unfinished_packing_are_touched(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", {"train/a/1.jpg": JPEG, "val/a/1.jpg": JPEG})
    packing.pack(source, tmp_path / "out", jobs=1)
    with pytest.raises(ExistsError, match="splits"), Writer(tmp_path / "out", overwrite=True):
        pass
    source = plant(tmp_path / "src2", images())
    packing.pack(source, tmp_path / "part", jobs=1, plan=PlanOptions(part=(1, 2), max_records=4))
    before = content(tmp_path / "part")
    with pytest.raises(ExistsError, match="unfinished"), Writer(tmp_path / "part", overwrite=True):
        pass
    assert content(tmp_path / "part") == before


def test_a_second_writer_is_refused_in_this_process_and_another(tmp_path: Path) -> None:
    with Writer(tmp_path, fields={"n": "int"}) as writer:
        writer.write({"n": 1})
        with pytest.raises(BusyError), Writer(tmp_path):
            pass
        with pytest.raises(BusyError):
            packing.pack(plant(tmp_path / "s", images()), tmp_path, jobs=1)
        source = plant(tmp_path.parent / f"{tmp_path.name}-src", images())
        assert "another" in shardio("pack", source, tmp_path, code=5).stderr
        writer.write({"n": 2})
    assert len(sequences.open(tmp_path)) == 2


KILLED = """
import os, signal, sys
from shardio.packing.writer import Writer
with Writer(sys.argv[1], max_records=2, overwrite=True, id=sys.argv[2] or None) as writer:
    for i in range(7):
        writer.write({"__key__": f"old{i}", "n": i})
    os.kill(os.getpid(), signal.SIGKILL)
"""


def kill_a_writer(out: Path, id: str = "") -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(out), id], env=environment())
    assert done.returncode == -signal.SIGKILL
    assert (out / lock.JOURNAL).exists()
    assert len(list(out.glob(".shardio-*.tmp"))) == 1


@pytest.mark.parametrize("id", ["", "same"])
@pytest.mark.parametrize("before", [False, True])
def test_what_a_killed_writer_left_is_dropped_by_the_next(
    tmp_path: Path, id: str, before: bool
) -> None:
    if before:
        write(tmp_path / "out", id="same")
    old = content(tmp_path / "out")
    kill_a_writer(tmp_path / "out", id)
    if before:
        assert len(sequences.open(tmp_path / "out")) == 10
    write(tmp_path / "out", 5, id="same", overwrite=before)
    write(tmp_path / "clean", 5, id="same")
    assert content(tmp_path / "out") == {**old, **content(tmp_path / "clean")}


def test_a_pack_drops_what_a_killed_writer_left(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", images())
    kill_a_writer(tmp_path / "out")
    packing.pack(source, tmp_path / "out", jobs=1)
    packing.pack(source, tmp_path / "clean", jobs=1)
    assert content(tmp_path / "out") == content(tmp_path / "clean")


def test_gc_removes_what_a_killed_writer_left(tmp_path: Path) -> None:
    write(tmp_path / "out", id="same")
    before = content(tmp_path / "out")
    kill_a_writer(tmp_path / "out", "same")
    assert gc(tmp_path / "out").removed == []  # too young
    assert len(gc(tmp_path / "out", keep_s=0).removed) == 5
    assert content(tmp_path / "out") == before


def test_a_full_disk_ends_the_writer_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    left = 6

    def write(descriptor: int, data: bytes) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    writer = Writer(tmp_path / "out", max_records=2)
    monkeypatch.setattr(local.os, "write", write)
    with pytest.raises(StorageError, match="No space left"):
        for sample in samples(100):
            writer.write(sample)
    assert content(tmp_path / "out") == {}
    with pytest.raises(OptionError, match="closed"):
        writer.write({})
    writer.close()  # nothing more happens
    assert content(tmp_path / "out") == {}


def test_old_rejected_files_are_not_those_of_a_new_stream(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", {"a/1.jpg": JPEG, "a/2.jpg": b"?"})
    packing.pack(source, tmp_path / "out", jobs=1, on_error="skip")
    write(tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "rejected.jsonl").exists()


# --- append ---------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path) -> Path:
    with Writer(tmp_path / "out", classes=["a", "b"], max_records=2) as writer:
        for i in range(3):
            writer.write({"image": noise(f"{i}", 300), "label": i % 2})
    return tmp_path / "out"


def test_samples_are_appended_as_a_version(written: Path) -> None:
    with Writer(written, append=True, classes=["a", "b", "c"], max_records=2) as writer:
        for i in range(3):
            writer.write({"image": noise(f"new {i}", 300), "label": 2})
    data = api.open(written, decode=None)
    assert data.keys() == [f"{i:09d}" for i in range(6)]
    assert data.targets.tolist() == [0, 1, 0, 2, 2, 2] and data.classes == ["a", "b", "c"]
    assert data[4]["image"] == noise("new 1", 300)
    newest, first = api.log(written).versions
    assert (newest.command, newest.changes, first.records) == ("append", {"added": 3}, 3)
    assert api.verify(written, sha256=True).damages == []


def test_what_fails_leaves_the_dataset_as_it_was(written: Path) -> None:
    before = content(written)
    with pytest.raises(RuntimeError), Writer(written, append=True) as writer:
        writer.write({"image": noise("x", 300), "label": 0})
        raise RuntimeError
    assert content(written) == before
    alike = pytest.raises(SampleError, match="key 000000001 is in the dataset")
    with alike, Writer(written, append=True) as writer:
        writer.write({"__key__": "000000001", "image": noise("x", 300), "label": 0})
    assert content(written) == before
    api.drop(written, keys=["000000001"])
    with Writer(written, append=True) as writer:
        writer.write({"__key__": "000000001", "image": noise("x", 300), "label": 0})
    assert len(api.open(written)) == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fields": {"image": "image"}}, "fields is given with append=True"),
        ({"id": "x"}, "id is given with append=True"),
        ({"overwrite": True}, "overwrite is given with append=True"),
        ({"classes": ["b", "a"]}, "expected those of the dataset, a, b"),
    ],
)
def test_options_that_the_dataset_has_are_refused(
    written: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        Writer(written, append=True, **options)
    with pytest.raises(NotPackedError):
        Writer(written.parent / "nothing", append=True)


def test_a_dataset_that_changed_meanwhile_is_told(written: Path) -> None:
    writer = Writer(written, append=True)
    api.drop(written, keys=["000000001"])
    with pytest.raises(BusyError, match="open it again"):
        writer.write({"image": noise("x", 300), "label": 0})
