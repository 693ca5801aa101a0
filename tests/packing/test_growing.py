"""All changes of one dataset together: what one of them left is what the next begins with."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.trees import noise, plant

import shardio as api
from shardio import OptionError, ShardDataset, ShardLoader, Writer, pack, unpack, verify
from shardio.packing.annotate import annotate
from shardio.packing.append import append
from shardio.packing.copy import copy
from shardio.packing.drop import drop
from shardio.packing.gc import gc
from shardio.packing.update import update
from shardio.packing.versions import diff, log


def keys_of(out: Path) -> list[str]:
    return api.open(out, decode=None).keys()


@pytest.fixture
def more(tmp_path: Path) -> Path:
    names = [f"{c}/new{i}.jpg" for c in ("class1", "zebra") for i in range(3)]
    return plant(tmp_path / "more", {name: noise(name, 400) for name in names})


def test_what_is_appended_has_no_value_of_an_annotated_field(out: Path, more: Path) -> None:
    keys = keys_of(out)
    annotate(out, {key: {"score": 0.5} for key in keys})
    annotate(out, {keys[0]: {"label": 2}})
    append(more, out)
    with Writer(out, append=True) as writer:
        writer.write({"__key__": "by a program", "image": noise("p", 300), "label": 0})
    data = api.open(out, decode=None)
    assert data[0]["label"] == 2 and len(data) == 31
    scores = data.columns("score")
    assert scores[:24].tolist() == [0.5] * 24 and scores[24:].tolist() == [None] * 7
    annotate(out, {key: {"score": 1.0} for key in keys_of(out)[24:]})
    assert api.open(out, decode=None).columns("score").tolist() == [0.5] * 24 + [1.0] * 7
    assert verify(out).damages == []


def test_an_update_leaves_what_was_annotated(out: Path, source: Path) -> None:
    keys = keys_of(out)
    annotate(out, {keys[0]: {"label": 2}, keys[1]: {"label": 0}})
    before = api.open(out, decode=None).targets.tolist()
    done = update(source, out)
    assert (done.changed, done.unchanged) == (0, 24)
    (source / keys[1]).write_bytes(noise("anew", 999))
    assert update(source, out).changed == 1
    data = api.open(out, decode=None)
    found = dict(zip(data.keys(), data.targets.tolist(), strict=True))
    assert found[keys[0]] == before[0] == 2
    assert found[keys[1]] == int(keys[1][5])  # a new file: as its folder says


def test_what_was_erased_stays_so_whatever_comes_later(out: Path, more: Path, source: Path) -> None:
    keys = keys_of(out)
    drop(out, keys=keys[2:4], erase=True)
    gc(out, keep_s=0)
    append(more, out)
    annotate(out, {key: {"score": 1.0} for key in keys_of(out)})
    drop(out, keys=keys[:1])
    assert verify(out).damages == []
    assert verify(out, dropped=keys[2:4]).damages == []
    done = update(source, out, gone="keep")  # its source still has them
    assert done.new == 3 and len(keys_of(out)) == 30


def test_readers_copies_and_files_agree_after_all_changes(
    out: Path, more: Path, tmp_path: Path
) -> None:
    keys = keys_of(out)
    first = log(out).versions[0].id
    drop(out, keys=keys[:3], erase=True)
    append(more, out)
    drop(out, keys=["zebra/new0.jpg", keys[5]])
    annotate(out, {key: {"score": float(i)} for i, key in enumerate(keys_of(out))})
    annotate(out, np.arange(25 * 4, dtype=np.float32).reshape(25, 4), fields="clip")
    left = keys_of(out)
    expected = {key: (float(i), float(4 * i)) for i, key in enumerate(left)}

    def seen(loader: Any) -> dict[str, tuple[float, float]]:
        rows: dict[str, tuple[float, float]] = {}
        for names, scores, vectors in loader:
            values = zip(scores.tolist(), vectors[:, 0].tolist(), strict=True)
            rows |= dict(zip(names, values, strict=True))
        return rows

    fields = ("__key__", "score", "clip")
    for folder in (out, tmp_path / "copied"):
        if folder != out:
            copy(out, folder)
        data = ShardDataset(folder, batch_size=4, decode=None, fields=fields)
        assert seen(data) == expected
        with ShardLoader(data, num_workers=1) as loader:
            assert seen(loader) == expected
        assert keys_of(folder) == left
    unpack(out, tmp_path / "files")
    assert len([path for path in (tmp_path / "files").rglob("*") if path.is_file()]) == 25
    pack(out, tmp_path / "merged", jobs=1)
    merged = api.open(tmp_path / "merged", decode=None)
    assert {one["__key__"]: (one["score"], one["clip"][0]) for one in merged} == expected
    with pytest.raises(OptionError, match="erased"):
        api.open(out, version=first)
    assert diff(out, log(out).versions[1].id).fields == ["clip"]
