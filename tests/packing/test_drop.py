"""Dropped records: no reader shows them; their bytes stay, older versions, and all else."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.forging import sealed
from support.small_datasets import ID
from support.trees import content, noise, plant, shardio, shardio_json, shards
from torch.utils.data import DataLoader

import shardio as api
from shardio import (
    DamageError,
    OptionError,
    ShardDataset,
    ShardLoader,
    StateError,
    explain,
    pack,
    tune,
    unpack,
    verify,
)
from shardio.cli.exit_codes import BUSY
from shardio.formats import manifest, version
from shardio.packing.copy import copy
from shardio.packing.drop import drop
from shardio.packing.export import export
from shardio.packing.gc import gc
from shardio.packing.index import index
from shardio.packing.versions import changing
from shardio.storage.location import locate
from shardio.viewer.results import Query
from shardio.viewer.view import open_view

SPLITS = ("train", "val")


def keys_of(folder: Path) -> list[str]:
    return api.open(folder, decode=None).keys()


@pytest.fixture
def packed_keys(out: Path) -> list[str]:
    """The keys of `out`, before anything is dropped."""
    return keys_of(out)


@pytest.fixture(params=["dropped", "erased"])
def left(request: pytest.FixtureRequest, out: Path) -> list[str]:
    """The keys that remain of `out`, in order, when the first, a middle and the last two go."""
    keys = keys_of(out)
    gone = [keys[0], *keys[9:11], *keys[-2:]]
    drop(out, keys=gone, erase=request.param == "erased")
    return [key for key in keys if key not in gone]


def test_no_reader_shows_what_was_dropped(out: Path, left: list[str]) -> None:
    data = api.open(out, decode=None)
    assert data.keys() == left
    assert len(data) == len(left) == len(data.targets) == len(data.sizes())
    assert [sample["__key__"] for sample in data] == left
    assert [data[i]["__key__"] for i in range(len(data))] == left
    assert [data[i]["__key__"] for i in range(-1, -len(data) - 1, -1)] == left[::-1]
    assert data[3:12:2].keys() == left[3:12:2]
    assert [sample["__key__"] for sample in data[5:14]] == left[5:14]
    assert [data.find(key) for key in left] == [*range(len(left))]
    assert list(data.columns("__key__")) == left
    names = data.classes or []
    assert [names[label] for label in data.targets] == [key.split("/")[0] for key in left]
    with pytest.raises(IndexError):
        data[len(left)]


def test_a_dropped_key_is_found_nowhere(out: Path) -> None:
    gone = keys_of(out)[4]
    drop(out, keys=[gone])
    data = api.open(out, decode=None)
    assert gone not in data
    with pytest.raises(KeyError):
        data.find(gone)


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"shuffle_buffer": 5}])
@pytest.mark.parametrize("size", [None, 4])
def test_an_epoch_has_each_record_that_remains_once(
    out: Path, left: list[str], options: dict[str, Any], size: int | None
) -> None:
    data = ShardDataset(out, batch_size=size, decode=None, tail="exact", **options)
    assert data.records == len(left)
    found = [batch for batch in DataLoader(data, batch_size=None, num_workers=2)]
    rows = [
        (key, bool(valid))
        for one in found
        for key, valid in (
            zip(one["__key__"], one["valid"], strict=True)
            if size
            else [(one["__key__"], one["valid"])]
        )
    ]
    assert sorted(key for key, valid in rows if valid) == sorted(left)
    assert {key for key, _ in rows} == set(left)


def test_both_loaders_give_the_same_batches(out: Path, left: list[str]) -> None:
    data = ShardDataset(out, batch_size=4, decode=None)
    by_torch = [one["__key__"] for one in DataLoader(data, batch_size=None)]
    with ShardLoader(ShardDataset(out, batch_size=4, decode=None), num_workers=2) as loader:
        assert [list(one["__key__"]) for one in loader] == [list(one) for one in by_torch]


def test_chosen_records_are_of_those_that_remain(out: Path, left: list[str]) -> None:
    data = ShardDataset(out, decode=None, where={"label": ["class1"]})
    own = [key for key in left if key.startswith("class1")]
    assert sorted(one["__key__"] for one in data) == sorted(own)
    some = ShardDataset(out, decode=None).select([0, 5, len(left) - 1])
    assert {one["__key__"] for one in some} == {left[0], left[5], left[-1]}
    with pytest.raises(OptionError, match="there are records 0 to"):
        ShardDataset(out).select([len(left)])


def test_dropping_again_adds_up(out: Path) -> None:
    keys = keys_of(out)
    first = drop(out, keys=keys[2:4])
    again = drop(out, keys=keys[3:6])
    assert (first.records, first.already) == (2, 0)
    assert (again.records, again.already, again.remaining) == (2, 1, len(keys) - 4)
    assert keys_of(out) == keys[:2] + keys[6:]
    before = content(out)
    none = drop(out, keys=keys[2:6])  # as a nightly run does it
    assert (none.records, none.already, none.versions) == (0, 4, {})
    assert content(out) == before


def test_all_can_be_dropped(out: Path) -> None:
    drop(out, keys=keys_of(out))
    assert len(api.open(out)) == 0 and list(ShardDataset(out, batch_size=4)) == []


def test_where_chooses_by_the_index(out: Path) -> None:
    assert drop(out, where={"label": "class1"}).records == 8
    assert not [key for key in keys_of(out) if key.startswith("class1/")]
    assert drop(out, where=["label=class2"], dry_run=True).records == 8
    with pytest.raises(OptionError, match="no record meets"):
        drop(out, where=["label=class1"])


def test_a_dry_run_changes_nothing(out: Path) -> None:
    before = content(out)
    done = drop(out, keys=keys_of(out)[:3], dry_run=True)
    assert (done.records, done.remaining, done.versions) == (3, 21, {})
    assert content(out) == before


def test_keys_that_no_record_has_are_refused_or_listed(out: Path) -> None:
    keys, before = keys_of(out), content(out)
    with pytest.raises(OptionError, match=r"no record has the key 'c9/x.jpg'. Nothing was dropped"):
        drop(out, keys=[keys[0], "c9/x.jpg"])
    assert content(out) == before
    done = drop(out, keys=[keys[0], "c9/x.jpg"], missing="ignore")
    assert (done.records, done.missing) == (1, ["c9/x.jpg"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "give keys, where or damaged"),
        ({"keys": ["a"], "where": ["label=class1"]}, "give keys, where or damaged"),
        ({"keys": "a/b.jpg"}, "expected several keys"),
        ({"keys": [5]}, "no key of a record"),
        ({"keys": ["a"], "missing": "skip"}, "expected 'error' or 'ignore'"),
        ({"where": ["label"]}, "--where label"),
        ({"keys": ["a"], "dry_run": 1}, "dry_run"),
    ],
)
def test_wrong_options_are_named(out: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        drop(out, **options)


def test_shards_stay_as_they_are(out: Path) -> None:
    before = {path.name: path.read_bytes() for path in shards(out)}
    drop(out, keys=keys_of(out)[:7])
    assert {path.name: path.read_bytes() for path in shards(out)} == before
    assert verify(out).damages == []


def test_what_is_written_elsewhere_has_only_what_remains(
    out: Path, left: list[str], tmp_path: Path
) -> None:
    unpack(out, tmp_path / "files")
    files = sorted(
        os.path.relpath(path, tmp_path / "files")
        for path in (tmp_path / "files").rglob("*")
        if path.is_file()
    )
    assert files == sorted(left)
    export(out, tmp_path / "tars", format="webdataset")
    index(tmp_path / "tars", jobs=1)
    assert len(api.open(tmp_path / "tars", decode=None)) == len(left)
    copy(out, tmp_path / "copied")
    assert keys_of(tmp_path / "copied") == left
    pack(out, tmp_path / "again", jobs=1)
    assert sorted(keys_of(tmp_path / "again")) == sorted(left)


def test_files_of_others_in_place_can_be_dropped_from(tars: Path) -> None:
    keys = keys_of(tars)
    drop(tars, keys=keys[3:5])
    assert keys_of(tars) == keys[:3] + keys[5:]


def test_splits_are_searched_together(tmp_path: Path) -> None:
    names = [f"{split}/c/{split}{i}.jpg" for split in SPLITS for i in "012"]
    pack(plant(tmp_path / "src", {one: noise(one, 900) for one in names}), tmp_path / "out", jobs=1)
    done = drop(tmp_path / "out", keys=["c/train1.jpg", "c/val0.jpg", "c/val2.jpg"])
    left = {split: keys_of(tmp_path / "out" / split) for split in SPLITS}
    assert sorted(left["train"]) == ["c/train0.jpg", "c/train2.jpg"]
    assert left["val"] == ["c/val1.jpg"]
    assert sorted(done.versions) == ["train", "val"]
    assert list(drop(tmp_path / "out", keys=["c/val1.jpg"]).versions) == ["val"]


def test_the_command_takes_keys_of_a_file_and_of_stdin(out: Path, tmp_path: Path) -> None:
    keys = keys_of(out)
    (tmp_path / "keys.txt").write_text(f"{keys[0]}\r\n{keys[1]}\n\n")
    said = shardio("drop", out, "--keys", tmp_path / "keys.txt")
    assert "2 records dropped, 22 records left" in said.stdout
    shardio("drop", out, "--keys", "-", "--dry-run", input=keys[5])
    count = sum(key.startswith("class2/") for key in keys_of(out))
    found = shardio_json("drop", out, "--where", "label=class2")
    assert found["records"] == count and list(found["versions"]) == [""]
    listed = shardio_json("ls", out)["records"]
    assert [one["key"] for one in listed] == keys_of(out)
    assert [one["index"] for one in listed] == [*range(len(listed))]
    last = shardio_json("cat", out, str(listed[-1]["index"]))
    assert last["key"] == listed[-1]["key"]


def test_two_do_not_change_a_dataset_at_once(out: Path) -> None:
    keys = keys_of(out)
    with changing(str(out)):
        done = shardio("drop", out, "--keys", "-", code=BUSY, input=keys[0])
    assert "another shardio process" in done.stderr
    assert keys_of(out) == keys


@pytest.mark.parametrize("fault", ["gone", "cut", "flipped", "of another dataset", "too high"])
def test_a_damaged_list_is_named(out: Path, fault: str) -> None:
    drop(out, keys=keys_of(out)[2:4])
    (path,) = out.glob("excluded-*.bin")
    data = bytearray(path.read_bytes())
    if fault == "gone":
        path.unlink()
    elif fault == "cut":
        path.write_bytes(data[:-1])
    elif fault == "flipped":
        data[-8] ^= 1
        path.write_bytes(data)
    else:  # with the right checksum: who may write the files may forge them
        there = manifest.load(locate(out))
        numbers = np.array([2, 24 if fault == "too high" else 3])
        own = there.dataset_id if fault == "too high" else ID
        side, forged = version.dump_excluded(own, numbers)
        (out / side.name).write_bytes(forged)
        text = json.dumps([side.name, side.entries, side.sha256.hex()], separators=(",", ":"))
        lines = (out / "manifest.json").read_bytes().splitlines(keepends=True)[:-2]
        body = b"".join(
            b'"excluded": %s,\n' % text.encode() if line.startswith(b'"excluded"') else line
            for line in lines
        )
        (out / "manifest.json").write_bytes(sealed(body))
    with pytest.raises(DamageError, match=r"excluded-[0-9a-f]{8}\.bin"):
        api.open(out)


# --- states ---------------------------------------------------------------------------------------


def begun(out: Path, **options: Any) -> tuple[dict[str, Any], list[list[str]]]:
    """The state after two batches of an epoch, and the keys of the batches that follow."""
    data = ShardDataset(out, batch_size=4, decode=None, **options)
    rows = iter(data)
    next(rows), next(rows)
    return data.state_dict(), [one["__key__"] for one in rows]


def rest(data: ShardDataset, state: dict[str, Any]) -> list[list[str]]:
    data.load_state_dict(state)
    return [one["__key__"] for one in data]


@pytest.mark.parametrize("options", [{}, {"where": {"label": lambda column: column < 2}}])
def test_a_state_goes_on_in_its_own_version(out: Path, options: dict[str, Any]) -> None:
    keys = keys_of(out)
    state, expected = begun(out, **options)
    drop(out, keys=keys[:3])
    again = ShardDataset(out, batch_size=4, decode=None, **options)
    with pytest.warns(
        UserWarning, match="state is of the first version of .*, and this is version"
    ):
        assert rest(again, state) == expected
    assert {key for one in again for key in one["__key__"]} >= set(keys[:3])  # the next epoch
    newest, left = begun(out, **options)
    assert newest["dataset"] == f"{state['dataset']}@{manifest.load(locate(out)).version_id}"
    assert rest(ShardDataset(out, batch_size=4, decode=None, **options), newest) == left
    drop(out, keys=keys[3:4])
    with pytest.warns(UserWarning, match="is of version"):
        assert rest(ShardDataset(out, batch_size=4, decode=None, **options), newest) == left


def test_a_state_of_a_version_that_is_gone_says_so(out: Path) -> None:
    state, _ = begun(out)
    drop(out, keys=keys_of(out)[:3])
    middle, _ = begun(out)
    drop(out, keys=keys_of(out)[:3])
    gc(out, keep_s=0, keep_versions=1)
    for one in (state, middle):
        with pytest.raises(StateError, match=r"removed, by `shardio gc`"):
            ShardDataset(out, batch_size=4, decode=None).load_state_dict(one)


def test_what_was_selected_by_hand_names_the_version_to_open(out: Path) -> None:
    state, _ = begun(out)
    drop(out, keys=keys_of(out)[:3])
    some = ShardDataset(out, batch_size=4, decode=None).select(range(8))
    with pytest.raises(StateError, match="open that version"):
        some.load_state_dict(state)


def test_a_mixture_refuses_another_version(out: Path) -> None:
    def mixed() -> Any:
        each = [ShardDataset(out, batch_size=4, decode=None) for _ in range(2)]
        return ShardDataset.mix(each, [1, 1], length=20)

    state = mixed().state_dict(steps=0)
    drop(out, keys=keys_of(out)[:3])
    with pytest.raises(StateError, match="another version of the dataset"):
        mixed().load_state_dict(state)


# --- what is told and shown -----------------------------------------------------------------------


def test_what_is_told_counts_what_remains(out: Path, left: list[str]) -> None:
    assert explain(out, batch_size=4).records == len(left)
    assert explain(ShardDataset(out, batch_size=4)).records == len(left)
    assert tune(out, batch_size=4).records == len(left)
    assert shardio_json("info", out)["records"] == len(left)
    assert f"{len(left)} records in 6 shards" in repr(ShardDataset(out))
    data = ShardDataset(out, batch_size=4)
    labels = tune(data.select(range(0, len(left), 2)))
    assert labels.records == -(-len(left) // 2)


@pytest.mark.parametrize("query", [{}, {"sort": "bytes"}, {"label": "class1"}, {"search": "class"}])
@pytest.mark.parametrize("order", ["storage", "training"])
def test_pages_show_what_remains(
    out: Path, left: list[str], query: dict[str, Any], order: str
) -> None:
    found = []
    with open_view(out) as view:
        start: int | None = 0
        while start is not None:
            page = view.page(Query(order=order, **query), start=start, count=7, wait_s=None)
            found += [card.key for card in page.cards if card.valid in (None, True)]
            start = page.next
    own = [key for key in left if key.startswith(query.get("label", ""))]
    assert sorted(found) == sorted(own)


def test_a_view_counts_and_checks_what_remains(
    out: Path, packed_keys: list[str], left: list[str]
) -> None:
    with open_view(out) as view:
        counted = view.histograms(wait_s=None)
        assert counted.records == len(left) == sum(one.count for one in counted.classes)
        assert view.check(0, budget_s=60).damaged == () and view.damaged() == ()
        with pytest.raises(IndexError, match="record 0 was dropped"):
            view.record(0)
        assert view.find(left[0]) == 1
        assert view.find(packed_keys[0]) is None
