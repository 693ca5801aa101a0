"""Annotated values: fields like all others, in every reader; shards and older versions stay."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import servers
from support.object_stores import ObjectStore
from support.packing import pack_raw, png_folder
from support.small_datasets import jpeg
from support.trees import content, noise, plant, shardio, shardio_json, shards
from support.url_datasets import served
from torch.utils.data import DataLoader

import shardio as api
from shardio import (
    CenterCrop,
    DamageError,
    OptionError,
    ShardDataset,
    ShardLoader,
    StateError,
    annotate,
    native,
    pack,
    verify,
)
from shardio.errors import CollateError, SampleError, SourceError
from shardio.formats import manifest, overlay
from shardio.packing.copy import copy
from shardio.packing.drop import drop
from shardio.packing.export import export
from shardio.packing.gc import gc
from shardio.packing.index import index
from shardio.packing.versions import diff, log, restore, tag
from shardio.storage import ranges
from shardio.storage.location import locate
from shardio.viewer.results import Query
from shardio.viewer.view import open_view

CORE = pytest.mark.parametrize("with_core", [True, False], ids=["core", "python"])


@pytest.fixture
def road(monkeypatch: pytest.MonkeyPatch, with_core: bool) -> None:
    """Read by the core, or by Python."""
    if not with_core:
        monkeypatch.setattr(native, "core", None)
    elif native.records() is None:
        pytest.skip(f"core: {native.described()}")


def keys_of(folder: Path) -> list[str]:
    return api.open(folder, decode=None).keys()


def overlays(folder: Path) -> list[Path]:
    return sorted(folder.glob("overlay-*.shard"))


def values(folder: Path, name: str, **options: Any) -> dict[str, Any]:
    """The field of every record by key, from samples."""
    data = api.open(folder, decode=None, **options)
    return {sample["__key__"]: sample[name] for sample in data}


def names_of(folder: Path) -> tuple[str, ...]:
    return tuple(manifest.load(locate(folder)).schema.names)


def number_of(key: str) -> int:
    """A number of its own for each key of `images()`."""
    return int(key[5]) * 100 + int(key[7:10])


@pytest.fixture
def annotated(out: Path) -> Path:
    """`out` with a new caption, score and embedding of each record, and three labels corrected."""
    keys = keys_of(out)
    annotate(out, {key: {"caption": f"a {key}", "score": number_of(key) / 4} for key in keys})
    annotate(out, embeddings(keys), fields="clip")
    annotate(out, {key: {"label": (int(key[5]) + 1) % 3} for key in keys[3:6]})
    return out


def embeddings(keys: list[str]) -> Any:
    return np.array([[number_of(key), 1.5, -2] for key in keys], np.float32)


def label_of(keys: list[str], key: str) -> int:
    return (int(key[5]) + (key in keys[3:6])) % 3


def check_sample(keys: list[str], sample: dict[str, Any]) -> None:
    key = sample["__key__"]
    assert list(sample) == ["__key__", "image", "label", "caption", "score", "clip"]
    assert sample["image"] == noise(key, 300 + int(key[7:10]) + 8 * int(key[5])) or sample["image"]
    assert sample["label"] == label_of(keys, key) and type(sample["label"]) is int
    assert sample["caption"] == f"a {key}"
    assert sample["score"] == number_of(key) / 4 and type(sample["score"]) is float
    assert sample["clip"].dtype == np.float32
    assert sample["clip"].tolist() == [number_of(key), 1.5, -2]


# --- every reader ---------------------------------------------------------------------------------


@CORE
def test_a_sequence_has_the_values(annotated: Path, road: None) -> None:
    data = api.open(annotated, decode=None)
    keys = data.keys()
    for sample in data:
        check_sample(keys, sample)
    for i in range(-1, -len(data) - 1, -1):
        check_sample(keys, data[i])
    for sample in data[5:17]:
        check_sample(keys, sample)
    assert data.targets.tolist() == [label_of(keys, key) for key in keys]
    assert data.columns("score").tolist() == [number_of(key) / 4 for key in keys]
    first = log(annotated).versions[-1].id
    plain = api.open(annotated, decode=None, version=first).sizes()
    assert (data.sizes() - plain > 12 + 20).all()  # an embedding, a caption
    with pytest.raises(OptionError, match="kind array, which the index lacks"):
        data.columns("clip")


@CORE
@pytest.mark.parametrize(
    "options", [{}, {"shuffle": False}, {"shuffle_buffer": 5}, {"where": {"score": 50.25}}]
)
@pytest.mark.parametrize("fields", [None, ("__key__", "label", "clip", "caption", "score")])
def test_both_loaders_give_the_values(
    annotated: Path, options: dict[str, Any], fields: Any, road: None
) -> None:
    keys = keys_of(annotated)

    def data() -> ShardDataset:
        return ShardDataset(annotated, batch_size=4, decode=None, fields=fields, **options)

    with ShardLoader(data(), num_workers=2) as loader:
        ways = [[*DataLoader(data(), batch_size=None, num_workers=1)], [*loader], [*data()]]
    found = []
    for batches in ways:
        rows = []
        for batch in batches:
            by_name = batch if fields is None else dict(zip(fields, batch, strict=True))
            for i, key in enumerate(by_name["__key__"]):
                assert int(by_name["label"][i]) == label_of(keys, key)
                assert by_name["clip"][i].tolist() == [number_of(key), 1.5, -2]
                assert by_name["caption"][i] == f"a {key}"
                assert float(by_name["score"][i]) == number_of(key) / 4
                rows.append(key)
        found.append(rows)
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == (1 if "where" in options else len(keys))


@CORE
@pytest.mark.parametrize("batch", [4, None])
def test_image_files_and_values_make_batches_together(
    annotated: Path, batch: int | None, road: None
) -> None:
    keys, fields = keys_of(annotated), ("image", "label", "score", "__key__")
    whole = {sample["__key__"]: sample["image"] for sample in api.open(annotated, decode=None)}
    for found in ShardDataset(annotated, batch_size=batch, decode=None, fields=fields):
        image, label, score, key = found
        if batch is None:
            image, label, score, key = [image], [label], [score], [key]
        for i, one in enumerate(key):
            assert bytes(image[i]) == whole[one]
            assert int(label[i]) == label_of(keys, one)
            assert float(score[i]) == number_of(one) / 4


@CORE
def test_batches_with_values_that_are_none_are_not_guessed(out: Path, road: None) -> None:
    keys = keys_of(out)
    annotate(out, {key: {"score": 0.5} for key in keys[1:3]}, missing="none")
    options: dict[str, Any] = {"batch_size": 4, "decode": None, "fields": ("image", "score")}
    ((_, scores),) = ShardDataset(out, where={"score": 0.5}, **options)
    assert scores.tolist() == [0.5, 0.5]
    with pytest.raises(CollateError, match="score"):
        next(iter(ShardDataset(out, shuffle=False, **options)))


def test_a_batch_of_image_files_is_made_by_one_call(
    annotated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native.records() is None:
        pytest.skip(f"core: {native.described()}")

    def refuse(*_: Any) -> Any:
        raise AssertionError("a record was read by itself")

    monkeypatch.setattr(overlay.OverlaidShard, "read", refuse)
    monkeypatch.setattr(overlay.OverlaidShard, "decode", refuse)
    data = ShardDataset(annotated, batch_size=5, decode=None, fields=("image", "label", "score"))
    labels = torch.cat([label for _, label, _ in data])
    assert sorted(labels.tolist()) == sorted(api.open(annotated).targets.tolist())


@CORE
@pytest.mark.parametrize("decode", ["pil", "numpy"])
@pytest.mark.parametrize("transform", [None, CenterCrop(8)])
def test_small_images_are_decoded_beside_values(
    packed: Callable[..., Path], decode: Any, transform: Any, road: None
) -> None:
    out = packed([10, 0, 7], image=jpeg)
    keys = keys_of(out)
    annotate(out, {key: {"label": 2 - i % 3, "flag": i % 2 == 0} for i, key in enumerate(keys)})
    options = {"decode": decode, "transform": transform, "fields": ("image", "label", "flag")}
    whole = api.open(out, **options)
    seen = 0
    plain = transform is None and decode == "pil"
    data = ShardDataset(out, batch_size=None if plain else 4, shuffle=False, seed=0, **options)
    for found in data:
        image, label, flag = found
        one = [found] if plain else zip(image, label, flag, strict=True)
        for image, label, flag in one:
            expected = whole[seen]
            own = np.asarray(image)
            own = own if plain else own.transpose(1, 2, 0)
            assert np.array_equal(own, np.asarray(expected[0]))
            assert (int(label), bool(flag)) == expected[1:] == (2 - seen % 3, seen % 2 == 0)
            seen += 1
    assert seen == len(keys)


@CORE
def test_raw_pixels_are_read_beside_values(tmp_path: Path, road: None) -> None:
    out = tmp_path / "out"
    pack_raw(png_folder(tmp_path / "src"), out)
    keys = keys_of(out)
    names = api.open(out).classes or []
    annotate(out, {key: {"label": names[i % 2], "weight": i / 8} for i, key in enumerate(keys)})
    annotate(out, np.zeros((len(keys), 4)), fields=["clip"])
    fields = ("__key__", "image", "label", "weight")
    alone = {one[0]: one for one in api.open(out, decode="numpy", fields=fields)}
    data = ShardDataset(out, batch_size=3, decode="numpy", fields=fields[1:], shuffle=False)
    rows = [row for image, *more in data for row in zip(image, *more, strict=True)]
    for key, row in zip(keys, rows, strict=True):
        assert np.array_equal(row[0].numpy().transpose(1, 2, 0), alone[key][1])
        assert (int(row[1]), float(row[2])) == alone[key][2:]
        assert int(row[1]) == keys.index(key) % 2


def test_values_come_by_url(annotated: Path, tmp_path: Path) -> None:
    keys = keys_of(annotated)
    with contextlib.ExitStack() as stack:
        proxy = stack.enter_context(served(annotated))
        stack.callback(ranges.close)
        data = api.open(proxy.url, decode=None)
        for sample in data:
            check_sample(keys, sample)
        check_sample(keys, data[7])
        cached = api.Storage(cache=tmp_path / "cache", cache_bytes="1GiB")
        for storage in (None, cached, cached):
            rows = ShardDataset(proxy.url, decode=None, shuffle_buffer=6, seed=1, storage=storage)
            for sample in rows:
                check_sample(keys, sample)
        assert verify(proxy.url, sha256=True).damages == []


def test_values_are_asked_for_with_their_records(packed: Callable[..., Path]) -> None:
    """Where records wait in this process, a value alone would be a round trip each."""
    out = packed([200, 200])
    annotate(out, np.ones((400, 64), np.float32), fields="clip")
    with contextlib.ExitStack() as stack:
        proxy = stack.enter_context(served(out))
        stack.callback(ranges.close)
        rows = ShardDataset(proxy.url, decode=None, fields=("clip",), shuffle_buffer=100, seed=1)
        assert all(clip.sum() == 64 for (clip,) in rows)
        paths = proxy.figures().paths
    count = {name: one["requests"] for name, one in paths.items()}
    beside = sum(requests for name, requests in count.items() if "overlay" in name)
    assert beside < 200  # of 400 values


def test_only_wanted_values_are_read(annotated: Path) -> None:
    for path in overlays(annotated):
        if b"clip" in path.read_bytes()[:200]:
            path.write_bytes(b"")
    data = ShardDataset(annotated, batch_size=4, decode=None, fields=("__key__", "caption"))
    assert all(
        text == f"a {key}" for keys, texts in data for key, text in zip(keys, texts, strict=True)
    )
    assert len([*api.open(annotated, decode=None, fields=("label",))]) == 24
    with pytest.raises(DamageError, match="overlay-"):
        next(iter(api.open(annotated, decode=None, fields=("clip",))))


def test_a_row_is_read_and_not_the_file(annotated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedding costs one read of its record, whatever is in the file."""
    data = api.open(annotated, decode=None, fields=("clip",))
    first = data[0]
    sizes = []
    pread = os.pread

    def counted(file: int, size: int, at: int) -> bytes:
        sizes.append(size)
        return pread(file, size, at)

    monkeypatch.setattr(native, "core", None)
    again = api.open(annotated, decode=None, fields=("clip",))
    assert np.array_equal(again[1][0], data[1][0]) and np.array_equal(again[0][0], first[0])
    monkeypatch.setattr(os, "pread", counted)
    assert np.array_equal(again[0][0], first[0])
    assert len(sizes) <= 2 and min(sizes) < 100  # the record, and its value


@pytest.mark.parametrize("query", [{"label": "class1"}, {"sort": "score"}, {"search": "class"}])
def test_pages_show_the_values(annotated: Path, query: dict[str, Any]) -> None:
    keys = keys_of(annotated)
    with open_view(annotated) as view:
        cards = view.page(Query(order="storage", **query), start=0, count=24, wait_s=None).cards
        assert {card.key for card in cards} == {
            key for key in keys if "label" not in query or label_of(keys, key) == 1
        }


# --- what is written elsewhere --------------------------------------------------------------------


def test_exports_and_copies_have_the_values(annotated: Path, tmp_path: Path) -> None:
    keys = keys_of(annotated)
    copy(annotated, tmp_path / "copied")
    for sample in api.open(tmp_path / "copied", decode=None):
        check_sample(keys, sample)
    assert copy(annotated, tmp_path / "copied").copied == 0
    assert verify(tmp_path / "copied", sha256=True).damages == []
    pack(annotated, tmp_path / "again", jobs=1)
    for sample in api.open(tmp_path / "again", decode=None):
        check_sample(keys, sample)
    assert not overlays(tmp_path / "again")
    export(annotated, tmp_path / "mds", format="mds")
    index(tmp_path / "mds", jobs=1)
    found = values(tmp_path / "mds", "caption")
    assert sorted(found.values()) == sorted(f"a {key}" for key in keys)
    assert sorted(values(tmp_path / "mds", "label").values()) == sorted(
        label_of(keys, key) for key in keys
    )


@CORE
def test_files_of_others_in_place_are_annotated(tars: Path, road: None) -> None:
    keys = keys_of(tars)
    annotate(tars, {key: {"label": 2, "note": key} for key in keys[2:4]}, missing="none")
    expected = {key: (key if key in keys[2:4] else None) for key in keys}
    assert values(tars, "note") == expected
    data = ShardDataset(tars, batch_size=4, decode=None, fields=("__key__", "note", "label"))
    assert {k: n for names, notes, _ in data for k, n in zip(names, notes, strict=True)} == expected
    assert api.open(tars).targets[2:4].tolist() == [2, 2]
    assert verify(tars).damages == []
    copy(tars, tars.parent / "copied")
    assert values(tars.parent / "copied", "note") == expected


# --- what is given --------------------------------------------------------------------------------


def test_tables_are_taken_by_key(out: Path, tmp_path: Path) -> None:
    keys = keys_of(out)
    rows = [(key, f"text {i}", i, i / 2, i % 2 == 0, [[i, 2]]) for i, key in enumerate(keys)]
    names = ("file_name", "text", "count", "share", "good", "boxes")
    (tmp_path / "a.csv").write_text(
        "\n".join([",".join(names[:5]), *(",".join(map(str, row[:5])) for row in rows)])
    )
    (tmp_path / "a.jsonl").write_text(
        "\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows[::-1])
    )
    done = annotate(out, tmp_path / "a.csv", fields={"caption": "text", "good": "good"})
    assert done.fields == {"caption": "str", "good": "bool"} and done.records == len(keys)
    annotate(out, tmp_path / "a.csv", fields=["count", "share"])
    annotate(out, tmp_path / "a.jsonl", fields=["boxes"])
    data = api.open(out, decode=None)
    for sample, row in zip(data, rows, strict=True):
        own = sample["caption"], sample["count"], sample["share"], sample["good"], sample["boxes"]
        assert own == row[1:]


def test_a_parquet_table_is_taken(out: Path, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    keys = keys_of(out)
    table = arrow.table({"id": keys, "n": [None, *range(1, len(keys))], "mask": [b"x"] * len(keys)})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(OptionError, match=rf"row 1, of {keys[0]}: no value in the column 'n'"):
        annotate(out, tmp_path / "a.parquet", key="id")
    annotate(out, tmp_path / "a.parquet", key="id", missing="none")
    data = api.open(out, decode=None)
    assert [one["n"] for one in data] == [None, *range(1, len(keys))]
    assert data.columns("n").mask.tolist() == [True, *[False] * (len(keys) - 1)]
    assert data[3]["mask"] == b"x"


def test_an_npy_is_taken_in_order(out: Path, tmp_path: Path) -> None:
    keys = keys_of(out)
    drop(out, keys=keys[5:7])
    left = keys_of(out)
    np.save(tmp_path / "clip.npy", embeddings(left).astype(">f2"))
    annotate(out, tmp_path / "clip.npy", fields=["clip"])
    found = values(out, "clip")
    assert [found[key].tolist() for key in left] == embeddings(left).tolist()
    assert found[left[0]].dtype == np.float16
    np.save(tmp_path / "score.npy", np.arange(len(left)))
    annotate(out, tmp_path / "score.npy", fields="rank")
    assert api.open(out).columns("rank").tolist() == [*range(len(left))]


def test_labels_are_given_by_names_too(out: Path) -> None:
    keys = keys_of(out)
    annotate(out, [(keys[0], {"label": "class2"}), (keys[1], {"label": None})])
    data = api.open(out, decode=None)
    assert data[0]["label"] == 2 and data[1]["label"] is None
    assert data.targets[:2].tolist() == [2, -1]
    with pytest.raises(OptionError, match=r"'class9', which is none of the 3 classes.*class0"):
        annotate(out, {keys[0]: {"label": "class9"}})
    with pytest.raises(OptionError, match="the label is 3, which is none"):
        annotate(out, {keys[0]: {"label": 3}})
    assert overlays(out) and not [path for path in content(out) if "tmp" in str(path)]


def test_numbers_that_are_names_of_other_classes_are_refused(packed: Callable[..., Path]) -> None:
    out = packed([3], classes=("1", "10", "2"))
    first, *_ = keys_of(out)
    annotate(out, {first: {"label": "10"}})
    annotate(out, {first: {"label": 0}})
    with pytest.raises(OptionError, match="label 1 is called '10' here, and class '1' has the la"):
        annotate(out, {first: {"label": 1}})
    assert api.open(out, decode=None).targets[0] == 0


def test_splits_are_annotated_together(tmp_path: Path) -> None:
    names = [f"{split}/c/{split}{i}.jpg" for split in ("train", "val") for i in "012"]
    out = tmp_path / "out"
    pack(plant(tmp_path / "src", {one: noise(one, 900) for one in names}), out, jobs=1)
    keys = [f"c/{split}{i}.jpg" for split in ("train", "val") for i in "012"]
    done = annotate(out, {key: key.upper() for key in keys}, fields="name")
    assert sorted(done.versions) == ["train", "val"]
    for split in ("train", "val"):
        assert all(key.upper() == name for key, name in values(out / split, "name").items())
    with pytest.raises(OptionError, match="give the path of one of them"):
        annotate(out, np.zeros(6), fields="x")
    before = content(out)
    with pytest.raises(SampleError, match=r"c/val2\.jpg"):  # the last of all: no split has changed
        annotate(out, {key: "\ud800" if key == keys[-1] else "x" for key in keys}, fields="name")
    assert content(out) == before
    assert list(annotate(out, {keys[0]: "new"}, fields="name").versions) == ["train"]


def test_keys_that_no_record_has_are_refused_or_listed(out: Path) -> None:
    keys, before = keys_of(out), content(out)
    gone = keys[4]
    with pytest.raises(OptionError, match=r"no record has the key 'c9/x.jpg'. Nothing was annot"):
        annotate(out, {keys[0]: {"label": 1}, "c9/x.jpg": {"label": 1}})
    assert content(out) == before
    drop(out, keys=[gone])
    with pytest.raises(OptionError, match=f"no record has the key '{gone}'"):
        annotate(out, {gone: {"label": 1}})
    done = annotate(out, {keys[0]: {"label": 1}, gone: {"label": 1}}, unknown="ignore")
    assert (done.records, done.unknown) == (1, [gone])
    assert f"no record has the key '{gone}'" in str(done)


def test_an_empty_cell_is_refused_or_none(out: Path, tmp_path: Path) -> None:
    keys, before = keys_of(out), content(out)
    table = tmp_path / "a.csv"
    table.write_text(f"key,label,text\n{keys[0]},1,\n{keys[1]},,x\n{keys[2]},,\n")
    for name, row, more in (("label", 2, ", and 1 more"), ("text", 1, ", and 1 more")):
        said = shardio("annotate", out, table, "--fields", name, code=2).stderr
        assert (
            f"a.csv: row {row}, of {keys[row - 1]}{more}: no value in the column '{name}'" in said
        )
        assert "Nothing was annotated" in said and "--missing none" in said
    assert content(out) == before
    annotate(out, table, fields=["label"], missing="none")
    assert [*values(out, "label").values()][:4] == [1, None, None, label_of([], keys[3])]


def test_a_name_close_to_a_fields_is_told_and_a_field_is_taken_away(
    out: Path, tmp_path: Path
) -> None:
    keys = keys_of(out)
    first = {path.name for path in out.iterdir()}
    (tmp_path / "a.csv").write_text(f"key,labell\n{keys[0]},class1\n")
    with pytest.raises(OptionError, match=r"'labell' is a new field \(did you mean 'label'\?\)"):
        annotate(out, tmp_path / "a.csv")
    said = shardio("annotate", out, tmp_path / "a.csv", "--missing", "none").stdout
    assert f"did you mean 'label'? `shardio annotate {out} --remove labell` takes it away" in said
    tag(out, "slip")
    done = annotate(out, {keys[0]: {"label": 2}, keys[1]: {"label": 2}})
    assert done.similar == {} and values(out, "label")[keys[0]] == 2
    dry = annotate(out, remove="labell", dry_run=True)
    assert (dry.removed, dry.versions) == (["labell"], {}) and "labell" in names_of(out)
    facts = shardio_json("annotate", out, "--remove", "labell", "--remove", "label")
    assert facts["removed"] == ["labell", "label"] and facts["versions"] == {
        "": log(out).versions[0].id
    }
    assert log(out).versions[0].changes == {"fields removed": 2}
    sample = api.open(out, decode=None)[0]
    assert list(sample) == ["__key__", "image", "label"]  # the field that was added is gone,
    assert sample["label"] == label_of([], keys[0])  # the one that was packed is as it was packed
    assert values(out, "labell", version="slip")[keys[0]] == "class1"
    found = diff(out, "slip")
    assert (found.fields, found.changed) == (["labell"], [keys[0]])
    for name, why in (
        ("labell", "there are none"),
        ("label", "it was packed so, and stays"),
        ("image", "it was packed so, and stays"),
    ):
        with pytest.raises(
            OptionError, match=f"nothing was annotated of the field '{name}'; {why}"
        ):
            annotate(out, remove=[name])
    with pytest.raises(OptionError, match="not both"):
        annotate(out, {keys[0]: {"label": 1}}, remove=["label"])
    with pytest.raises(OptionError, match=r"a table .* or the fields to remove"):
        annotate(out)
    restore(out, "slip")
    assert "labell" in names_of(out)
    annotate(out, remove="labell")
    tag(out, "slip", remove=True)
    gc(out, keep_s=0, keep_versions=1)
    assert {path.name for path in out.iterdir()} == first | {"tags.json"}
    annotate(out, {key: {"labell": 1} for key in keys})  # of another kind than the one that was


def test_a_field_is_taken_away_from_all_splits(tmp_path: Path) -> None:
    names = [f"{split}/c/{split}{i}.jpg" for split in ("train", "val") for i in "01"]
    out = tmp_path / "out"
    pack(plant(tmp_path / "src", {one: noise(one, 900) for one in names}), out, jobs=1)
    keys = [one.partition("/")[2] for one in names]
    annotate(out, {key: {"a": 1, "b": 2} for key in keys})
    assert sorted(annotate(out, remove=["a"]).versions) == ["train", "val"]
    annotate(out / "val", remove=["b"])
    assert [*annotate(out, remove=["b"]).versions] == ["train"]
    for split in ("train", "val"):
        assert names_of(out / split) == ("__key__", "image", "label")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (np.ones(3, np.float64), r"float64 of shape \(3\)"),
        (np.ones(4, np.float32), r"float32 of shape \(4\)"),
        (np.ones((1, 3), np.float32), r"float32 of shape \(n, 3\)"),
    ],
)
def test_an_embedding_of_another_width_or_dtype_is_refused(
    out: Path, given: Any, found: str
) -> None:
    keys = keys_of(out)
    annotate(out, embeddings(keys), fields="clip")
    before = content(out)
    said = (
        rf"{keys[5]}: field 'clip': expected float32 of shape \(3\), as .*; found {found}\. Nothing"
    )
    with pytest.raises(OptionError, match=said):
        annotate(out, {keys[4]: {"clip": None}, keys[5]: {"clip": given}})
    assert content(out) == before
    annotate(out, {key: {"clip": given} for key in keys})  # all others go
    assert values(out, "clip")[keys[0]].shape == given.shape


def test_arrays_of_which_there_may_be_any_number_are_taken(out: Path) -> None:
    keys = keys_of(out)
    for name, dtype, width in (("boxes", "f4", (4,)), ("kinds", "i8", ())):
        annotate(out, {key: {name: np.ones((1, *width), dtype)} for key in keys})
        annotate(out, {keys[0]: {name: np.ones((2, *width), dtype)}})
        assert len(values(out, name)[keys[0]]) == 2
    annotate(out, {key: {"odd": np.ones(2 + (key == keys[1]))} for key in keys})
    annotate(out, {keys[0]: {"odd": np.ones(5)}})  # they were unlike each other before


def test_records_without_a_row_are_refused_or_none(out: Path) -> None:
    keys, before = keys_of(out), content(out)
    some = {key: {"score": 0.5, "text": "x", "clip": np.ones(2)} for key in keys[3:6:2]}
    others = ", ".join([key for key in keys if key not in some][:10])
    with pytest.raises(
        OptionError, match=rf"22 records without a row, such as {others}, and .*--missing none"
    ):
        annotate(out, some)
    assert content(out) == before
    assert annotate(out, some, missing="none").missing == 22
    data = api.open(out, decode=None)
    for key, sample in zip(keys, data, strict=True):
        there = key in some
        assert (sample["score"], sample["text"]) == ((0.5, "x") if there else (None, None))
        assert (sample["clip"] is not None) == there
    assert data.columns("score").mask.sum() == 22
    chosen = ShardDataset(out, decode=None, where={"score": 0.5})
    assert sorted(one["__key__"] for one in chosen) == sorted(some)
    annotate(out, {keys[0]: {"score": 9.0}})  # of a field that is there, the others keep theirs
    found = values(out, "score")
    assert [found[key] for key in keys[:6]] == [9.0, None, None, 0.5, None, 0.5]


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        ("missing.csv", {}, "no such file"),
        ("a.txt", {}, "a listing's name ends in"),
        ("keyless.csv", {}, "no column has the keys of records"),
        ("keyless.csv", {"key": "id"}, "no column is 'id'"),
        ("a.csv", {"fields": {"x": "y"}}, "no column is called 'y'"),
        ("a.csv", {"fields": {"image": "n"}}, "stay as they are"),
        ("a.csv", {"fields": {"__key__": "n"}}, "no field can be called '__key__'"),
        ("a.csv", {"fields": {"__row__": "n"}}, "no field can be called '__row__'"),
        ("a.csv", {"fields": {"label": "t"}}, "which is none of the 3 classes"),
        ("a.csv", {"missing": "skip"}, "expected 'error' or 'none'"),
        ("a.csv", {"unknown": "none"}, "expected 'error' or 'ignore'"),
        ("a.csv", {"fields": []}, "fields is empty"),
        ("twice.csv", {}, "rows 1 and 2 both have the key"),
        ("gap.csv", {}, "row 2 has no key"),
        ("short.npy", {"fields": "x"}, "3 rows for 24 records"),
        ("cut.npy", {"fields": "x"}, "its header states"),
        ("odd.npy", {"fields": "x"}, "no .npy header"),
        ("objects.npy", {"fields": "x"}, "it holds objects"),
        ("fortran.npy", {"fields": "x"}, "Fortran"),
        ("short.npy", {}, "say by fields"),
        ("short.npy", {"fields": "x", "key": "k"}, "it is for tables"),
        ({"class0/000.jpg": 1}, {}, "say by fields"),
        ({"class0/000.jpg": {"x": {1, 2}}}, {}, "no kind fits"),
        ({"class0/000.jpg": {"x": 1}, "class0/001.jpg": {"x": "a"}}, {}, "kinds int, str"),
        ({"class0/000.jpg": {"x": 1}, "class0/001.jpg": {"y": 1}}, {}, "1 row without 'x'"),
        ({"class0/000.jpg": {"label": 0.5}}, {}, "is of kind int, and the values given are of"),
        ([("class0/000.jpg", {"label": 1}, 2)], {}, "expected a key and a dict"),
        ([5], {}, "expected a key and a dict"),
        (5, {}, "expected a path, a dict"),
        ({"class0/000.jpg": {}}, {}, "no field, but keys alone"),
        ({"class0/000.jpg": {"x": 1 << 70}}, {"missing": "none"}, "class0/000.jpg.*64 bits"),
    ],
    ids=str,
)
def test_what_cannot_be_annotated_is_named(
    out: Path, tmp_path: Path, given: Any, options: dict[str, Any], said: str
) -> None:
    first = "class0/000.jpg"
    (tmp_path / "a.csv").write_text(f"key,n,t\n{first},1,x\n")
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "keyless.csv").write_text("n,t\n1,x\n")
    (tmp_path / "twice.csv").write_text(f"key,label\n{first},1\n{first},2\n")
    (tmp_path / "gap.csv").write_text(f"key,label\n{first},1\n,2\n")
    np.save(tmp_path / "short.npy", np.zeros(3))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "short.npy").read_bytes()[:-1])
    (tmp_path / "odd.npy").write_bytes(b"x" * 200)
    np.save(tmp_path / "objects.npy", np.array([None] * 24), allow_pickle=True)
    np.save(tmp_path / "fortran.npy", np.asfortranarray(np.zeros((24, 3))))
    before = content(out)
    with pytest.raises((OptionError, SourceError, SampleError), match=said):
        annotate(out, tmp_path / given if isinstance(given, str) else given, **options)
    assert content(out) == before


def test_the_command_annotates(out: Path, tmp_path: Path) -> None:
    keys = keys_of(out)
    lines = [f"{key},c {number_of(key)},{number_of(key)}" for key in keys]
    (tmp_path / "c.csv").write_text("\n".join(["path,text,n", *lines]))
    before = content(out)
    call = ("annotate", out, tmp_path / "c.csv", "--fields", "caption=text,n")
    assert "24 records would be annotated" in shardio(*call, "--dry-run").stdout
    assert content(out) == before
    said = shardio(*call).stdout
    assert "24 records annotated: caption (str), n (int)" in said
    assert "all was so before; the version stays" in shardio(*call).stdout
    facts = shardio_json("annotate", out, tmp_path / "c.csv", "--key", "path", "--fields", "n")
    assert facts["versions"] == {} and facts["fields"] == {"n": "int"}
    assert shardio_json("cat", out, "5", "--field", "caption")["value"].startswith("c ")
    assert "caption" in shardio_json("info", out)["fields"]
    (tmp_path / "bad.csv").write_text("path,n\nnobody,1\n")
    assert "no record has the key" in shardio("annotate", out, tmp_path / "bad.csv", code=2).stderr


# --- annotated again, and versions ----------------------------------------------------------------


def test_annotating_again_replaces_and_keeps(annotated: Path) -> None:
    keys = keys_of(annotated)
    before = {path.name for path in overlays(annotated)}
    annotate(
        annotated,
        {key: {"clip": np.ones(3, np.float32), "score": -1, "caption": "!"} for key in keys[8:9]},
    )
    for name, new in (("score", -1), ("caption", "!")):
        found = values(annotated, name)
        assert found.pop(keys[8]) == new
        assert found == {
            key: number_of(key) / 4 if name == "score" else f"a {key}" for key in found
        }
    clips = values(annotated, "clip")
    assert clips.pop(keys[8]).tolist() == [1] * 3
    assert all(clips[key].tolist() == [number_of(key), 1.5, -2] for key in clips)
    assert {path.name for path in overlays(annotated)} > before  # older versions have theirs
    assert verify(annotated, sha256=True).damages == []


def test_relabelling_few_of_many_costs_few(packed: Callable[..., Path]) -> None:
    out = packed([4000])
    keys = keys_of(out)
    annotate(out, {key: {"label": 1, "note": "a note of some length"} for key in keys})
    sizes = {path: path.stat().st_size for path in overlays(out)}
    annotate(out, {key: {"label": 2, "note": "b"} for key in keys[100:200:10]})
    new = [path for path in overlays(out) if path not in sizes]
    assert len(new) == 2 and sum(path.stat().st_size for path in new) < 2000
    annotate(out, {key: {"label": 0, "note": "c"} for key in keys[100:103]})
    found = api.open(out, decode=None)
    expected = [1] * 4000
    expected[100:200:10] = [2] * 10
    expected[100:103] = [0] * 3
    assert found.targets.tolist() == expected == [sample["label"] for sample in found]
    notes = [("c", "a note of some length", "b")[label] for label in expected]
    assert [sample["note"] for sample in found] == notes
    assert [found[i]["note"] for i in range(95, 215)] == notes[95:215]
    (of_label,) = [
        one.files[0] for one in manifest.load(locate(out)).overlays if one.field == "label"
    ]
    assert [info.records for info in of_label] == [4000, 12]  # small ones are joined
    annotate(out, {key: {"label": 0, "note": "d"} for key in keys[:2000]})
    assert [len(one.files[0]) for one in manifest.load(locate(out)).overlays] == [1, 1]
    assert api.open(out, decode=None)[1999]["note"] == "d"
    assert verify(out, sha256=True).damages == []


def test_each_annotation_is_a_version(out: Path) -> None:
    keys = keys_of(out)
    first = {path.name: path.read_bytes() for path in shards(out)}
    packed_id = log(out).versions[0].id
    annotate(out, {key: {"text": f"one {key}"} for key in keys})
    one = log(out).versions[0].id
    annotate(out, {keys[2]: {"text": "two", "label": 2}, keys[3]: {"text": None, "label": 0}})
    assert [v.command for v in log(out).versions] == ["annotate", "annotate", "pack"]
    assert log(out).versions[0].changes == {"annotated": 2}
    assert values(out, "text", version=one)[keys[2]] == f"one {keys[2]}"
    assert "text" not in api.open(out, decode=None, version=packed_id)[0]
    said = diff(out, one)
    assert said.changed == sorted(keys[2:4]) and set(said.fields) == {"text", "label"}
    assert diff(out, packed_id).changed == sorted(keys)
    assert diff(out, packed_id, packed_id).fields == []
    drop(out, keys=keys[:1])
    assert diff(out, packed_id).changed == sorted(keys[1:])
    restore(out, packed_id)
    assert "text" not in api.open(out, decode=None)[0] and len(api.open(out)) == len(keys)
    restore(out, one)
    assert values(out, "text") == {key: f"one {key}" for key in keys}
    assert {path.name: path.read_bytes() for path in shards(out) if path.name in first} == first
    gc(out, keep_s=0)
    assert verify(out, sha256=True).damages == []
    gc(out, keep_s=0, keep_versions=1)
    assert len(overlays(out)) == 6
    assert values(out, "text") == {key: f"one {key}" for key in keys}


def test_a_state_goes_on_with_the_values_of_its_version(out: Path) -> None:
    keys = keys_of(out)

    def begun() -> tuple[dict[str, Any], list[Any]]:
        data = ShardDataset(out, batch_size=4, decode=None, fields=("__key__", "image", "label"))
        rows = iter(data)
        next(rows)
        return data.state_dict(), [(key, label.tolist()) for key, _, label in rows]

    state, expected = begun()
    annotate(out, {key: {"label": 2, "text": "x"} for key in keys})
    data = ShardDataset(out, batch_size=4, decode=None, fields=("__key__", "image", "label"))
    with pytest.warns(UserWarning, match="is of the first version of"):
        data.load_state_dict(state)
    assert [(key, label.tolist()) for key, _, label in data] == expected
    newest, rest = begun()
    data = ShardDataset(out, batch_size=4, decode=None, fields=("__key__", "image", "label"))
    data.load_state_dict(newest)
    assert [(key, label.tolist()) for key, _, label in data] == rest
    assert all(label == [2] * 4 for _, label in rest)
    with pytest.raises(StateError, match="no field 'text'"):
        ShardDataset(out, batch_size=4, decode=None, fields=("text",)).load_state_dict(state)


# --- damage, kills --------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["gone", "cut", "flipped value", "flipped index", "of another"])
@pytest.mark.parametrize("field", ["text", "score"])
def test_damage_is_named(out: Path, tmp_path: Path, fault: str, field: str) -> None:
    keys = keys_of(out)
    annotate(out, {key: {"text": f"some text of {key}", "score": 1.5} for key in keys})
    (path,) = [
        out / infos[0].name
        for one in manifest.load(locate(out)).overlays
        if one.field == field
        for number, infos in one.files.items()
        if number == 2
    ]
    data = bytearray(path.read_bytes())
    if fault == "gone":
        path.unlink()
    elif fault == "cut":
        path.write_bytes(data[:-1])
    elif fault.startswith("flipped"):
        at = 150 if fault.endswith("value") else len(data) - 70
        data[at] ^= 1
        path.write_bytes(data)
    else:
        other = [one for one in overlays(out) if one.stat().st_size == len(data) and one != path]
        path.write_bytes((other or overlays(out)[:1])[0].read_bytes())
    found = verify(out, sha256=True)
    assert found.damages and all(path.name in str(one) for one in found.damages)
    assert {one.shard for one in found.damages} == {str(shards(out)[2])}
    if field == "score" and fault == "flipped value":
        return  # what is read stands in the index, which is whole
    with pytest.raises(DamageError, match=path.name):
        for _ in api.open(out, decode=None, fields=(field,)):
            pass
    others = api.open(out, decode=None, fields=("image", "text" if field == "score" else "label"))
    if fault != "flipped value" and field == "text":
        assert len([*others]) == len(keys)  # who does not want it does not read it


def test_a_commit_that_is_killed_leaves_the_old_version(out: Path) -> None:
    """Killed before each step that writes, all that readers see is the version before."""
    keys = keys_of(out)
    annotate(out, {key: {"text": "old"} for key in keys})
    program = f"""
import os, signal
from shardio import annotate
from shardio.storage import local
left = int(os.sys.argv[1])
def count(step):
    def counted(*of, **more):
        global left
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return step(*of, **more)
    return counted
local.Draft.commit = count(local.Draft.commit)
local.Draft.write = count(local.Draft.write)
annotate({str(out)!r}, {{key: {{"text": "new"}} for key in {keys!r}}})
"""
    steps = 0
    while True:
        done = subprocess.run([sys.executable, "-c", program, str(steps)], capture_output=True)
        found = {*values(out, "text").values()}
        assert verify(out).damages == []
        if done.returncode == 0:
            assert found == {"new"}
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert found == {"old"} or (found == {"new"} and steps > 12)
        steps += 5
    assert steps > 10
    gc(out, keep_s=0, keep_versions=1)
    named = {
        info.name
        for one in manifest.load(locate(out)).overlays
        for of in one.files.values()
        for info in of
    }
    assert {path.name for path in overlays(out)} == named
    assert not list(out.glob(".shardio*"))


def test_nothing_stays_of_a_call_that_failed(out: Path) -> None:
    keys = keys_of(out)
    annotate(out, {key: {"text": "x"} for key in keys})
    before = content(out)
    with pytest.raises(SampleError, match=f"{keys[7]}: field 'text'"):
        annotate(out, {key: {"text": "\ud800" if key == keys[7] else "y"} for key in keys})
    assert content(out) == before


@pytest.mark.parametrize("server", ["s3", "http"])
def test_a_cache_has_the_values_of_a_server(
    annotated: Path, tmp_path: Path, bucket: ObjectStore, server: str
) -> None:
    """What was read once is read again, of all versions, when the server has no shard any more."""
    tag(annotated, "whole")
    keys = keys_of(annotated)
    annotate(annotated, {keys[0]: {"caption": "corrected"}})
    drop(annotated, keys=keys[1:3])
    expected = {
        version: {
            one["__key__"]: repr(one) for one in api.open(annotated, version=version, decode=None)
        }
        for version in (None, "whole")
    }
    with contextlib.ExitStack() as stack:
        stack.callback(ranges.close)
        options = None
        if server == "s3":
            bucket.put_folder(annotated, "data/")
            url = f"{bucket.url}/data"
            options = {**bucket.options, "client_options": {"allow_http": True}}
        else:
            shutil.copytree(annotated, tmp_path / "www/data")
            url = stack.enter_context(servers.nginx(tmp_path / "www")).url + "/data"
        storage = api.Storage(cache=tmp_path / "cache", cache_bytes="1GiB", options=options)
        for number in range(2):
            for version, rows in expected.items():
                more = {"version": version, "storage": storage}
                data = ShardDataset(url, decode=None, shuffle_buffer=5, seed=number, **more)
                assert {one["__key__"]: repr(one) for one in data} == rows
            # Of numbers alone the index is read, which a cache keeps with the records around it.
            names = [path.name for path in overlays(annotated)]
            gone = [name for name in names if not numbers(annotated / name)]
            gone += [path.name for path in annotated.glob("0*.shard")]
            if server == "s3":
                bucket.delete([f"data/{name}" for name in gone])
            else:
                for name in gone:
                    (tmp_path / "www/data" / name).unlink(missing_ok=True)


def numbers(path: Path) -> bool:
    """Whether a file of values is one of a field of numbers, by its header."""
    return any(name in path.read_bytes()[:200] for name in (b"score", b"label"))
