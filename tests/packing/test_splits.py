"""Splits: datasets that share classes, and are committed together or not at all."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.packing import keys
from support.trees import (
    JPEG,
    content,
    noise,
    plant,
    shardio,
)

from shardio.dataset import sequence as sequences
from shardio.errors import (
    ExistsError,
    NotPackedError,
    SourceError,
)
from shardio.packing.commit import commit
from shardio.packing.job import Job
from shardio.packing.options import PlanOptions
from shardio.packing.pack import pack
from shardio.packing.unpack import unpack

SPLIT = {
    "train/a/1.jpg": noise("1", 90),
    "train/b/2.jpg": noise("2", 91),
    "val/b/3.jpg": noise("3", 92),
    "test/4.jpg": noise("4", 93),
}


def test_splits_are_datasets_with_shared_classes_and_relative_keys(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", SPLIT)
    done = pack(source, tmp_path / "out", jobs=1)
    assert [(one.split, one.records) for one in done] == [("test", 1), ("train", 2), ("val", 1)]
    assert keys(tmp_path / "out" / "val") == ["b/3.jpg"]
    assert sequences.stored(tmp_path / "out" / "val")[0]["label"] == 1
    assert sequences.open(tmp_path / "out" / "test").classes is None
    named = json.loads((tmp_path / "out" / "shardio.json").read_text())
    assert named["splits"] == ["test", "train", "val"]
    assert named["classes"] == ["a", "b"]
    with pytest.raises(NotPackedError, match="out/train"):
        sequences.open(tmp_path / "out")
    unpack(tmp_path / "out", tmp_path / "back")
    assert content(tmp_path / "back") == content(source)  # val has no folder `a`


def test_parts_of_splits_are_committed_together(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", SPLIT)
    pack(source, tmp_path / "one", jobs=1, plan=PlanOptions(max_records=1))
    for part in (1, 2):
        pack(source, tmp_path / "out", jobs=1, plan=PlanOptions(max_records=1, part=(part, 2)))
    assert not (tmp_path / "out" / "shardio.json").exists()
    assert len(commit(tmp_path / "out")) == 3
    assert content(tmp_path / "out") == content(tmp_path / "one")
    with pytest.raises(NotPackedError, match="nothing to commit"):
        commit(tmp_path / "out")


def test_problems_of_all_splits_come_in_one_error(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", SPLIT | {"train/a/bad.jpg": b"?", "val/b/empty.jpg": b""})
    with pytest.raises(SourceError) as caught:
        pack(source, tmp_path / "out", jobs=1)
    assert "train/a/bad.jpg" in str(caught.value)
    assert "val/b/empty.jpg" in str(caught.value)
    assert not (tmp_path / "out" / "shardio.json").exists()
    assert not (tmp_path / "out" / "train" / "manifest.json").exists()


def committed(out: Path) -> set[str]:
    return {path.parent.name for path in out.rglob("*.json") if path.name[0] != "."}


def test_one_bad_split_leaves_all_of_them_uncommitted(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", SPLIT | {"val/b/bad.jpg": b"?"})
    out = tmp_path / "out"
    with pytest.raises(SourceError, match="nothing was committed"):
        pack(source, out, jobs=1)
    assert committed(out) == set()
    with pytest.raises(NotPackedError, match=r"splits \(test, train, val\) .* again to resume"):
        sequences.open(out)
    assert "is not finished" in shardio("info", out, code=1).stderr
    done = pack(source, out, jobs=1, on_error="skip")
    assert [(one.split, one.kept, one.committed) for one in done] == [
        ("test", 1, True), ("train", 1, True), ("val", 0, True)
    ]  # fmt: skip
    assert len(commit_free(out)) == 3


def commit_free(out: Path) -> list[Path]:
    """The manifests of splits, where nothing unfinished is left."""
    assert not list(out.rglob(".shardio*"))
    return sorted(out.glob("*/manifest.json"))


def test_one_split_that_misses_parts_leaves_all_of_them_uncommitted(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", SPLIT)
    out = tmp_path / "out"
    pack(
        source, out, jobs=1, plan=PlanOptions(max_records=1, part=(2, 2))
    )  # all but the first shard of train
    with pytest.raises(NotPackedError, match=r"train: not packed: 1 of 2 .* not built: 0\n"):
        commit(out, jobs=1)
    assert committed(out) == set()
    pack(source, out, jobs=1, plan=PlanOptions(max_records=1, part=(1, 2)))
    assert all(one.committed for one in commit(out, jobs=1))
    assert len(commit_free(out)) == 3


def test_splits_that_were_killed_between_two_commits_are_finished_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = plant(tmp_path / "src", SPLIT)
    pack(source, tmp_path / "one", jobs=1)
    real = Job.commit

    def finish(one: Any) -> None:
        if one.result.split == "train":
            raise KeyboardInterrupt
        real(one)

    monkeypatch.setattr(Job, "commit", finish)
    with pytest.raises(KeyboardInterrupt):
        pack(source, tmp_path / "out", jobs=1)
    monkeypatch.undo()
    with pytest.raises(NotPackedError, match="a packing of splits"):
        sequences.open(tmp_path / "out")
    done = pack(source, tmp_path / "out", jobs=1)
    assert [(one.already, one.kept) for one in done] == [(True, 0), (False, 1), (False, 1)]
    assert content(tmp_path / "out") == content(tmp_path / "one")


def test_another_dataset_in_one_split_stops_all_before_any_is_touched(tmp_path: Path) -> None:
    pack(plant(tmp_path / "src", SPLIT), tmp_path / "out", jobs=1)
    before = content(tmp_path / "out")
    plant(tmp_path / "src", {"val/b/new.jpg": JPEG})
    with pytest.raises(ExistsError):
        pack(tmp_path / "src", tmp_path / "out", jobs=1)
    assert content(tmp_path / "out") == before


def test_packing_splits_again_touches_nothing(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", SPLIT)
    pack(source, tmp_path / "out", jobs=1)
    before = (tmp_path / "out" / "shardio.json").stat()
    assert all(one.already for one in pack(source, tmp_path / "out", jobs=1))
    assert (tmp_path / "out" / "shardio.json").stat().st_ino == before.st_ino


@pytest.mark.parametrize("first", ["splits", "one"])
def test_one_dataset_and_splits_do_not_mix_in_a_directory(tmp_path: Path, first: str) -> None:
    source = plant(tmp_path / "src", {"train/a/1.jpg": JPEG, "val/a/2.jpg": JPEG})
    pack(source, tmp_path / "out", jobs=1, splits=first == "splits")
    with pytest.raises(ExistsError, match="splits"):
        pack(source, tmp_path / "out", jobs=1, splits=first != "splits")
