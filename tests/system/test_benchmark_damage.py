"""`benchmarks damage`: its damages, how reads are judged, and a small rehearsal."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.trees import ROOT

from benchmarks import damage, damage_stores
from benchmarks.damage_stores import BY_TITLE, STORES, value_of
from benchmarks.data import Data
from benchmarks.harness import RESULTS, BenchmarkError, Result
from benchmarks.rivals import base

IMAGES = [hashlib.shake_128(bytes([i])).digest(300 + 40 * i) for i in range(16)]
FORMAT_TOOLS = ROOT / "tests" / "format_tools" / ".venv"  # tools/setup-formats has five of them
WHOLE: dict[str, Any] = {
    "ended": "", "noise": "", "right": 16, "wrong": 0, "error": "", "told": [], "memory": 0,
    "out_of_memory": False,
}  # fmt: skip


def stored(path: Path, files: int = 4) -> damage.Place:
    """Files of a plain format: a length, the number of the record, the image; and an index."""
    path.mkdir()
    for i in range(files):
        content = b"".join(
            len(image).to_bytes(4, "little") + value_of(image).to_bytes(8, "little") + image
            for image in IMAGES[i::files]
        )
        (path / f"{i}.data").write_bytes(content)
    (path / "index").write_bytes(b"0123456789")
    store = damage_stores.Store("", lambda *_: None, lambda *_: iter(()), "*.data", "index")
    return damage.Place(store, path, IMAGES)


@pytest.mark.parametrize("kind", damage.DAMAGES)
@pytest.mark.parametrize("seed", range(3))
def test_a_damage_changes_what_it_says_and_names_the_files(
    tmp_path: Path, kind: str, seed: int
) -> None:
    place = stored(tmp_path / "stored")
    before = {path.name: path.read_bytes() for path in place.path.iterdir()}
    names = damage.DAMAGES[kind](place, random.Random(seed))
    after = {path.name: path.read_bytes() for path in place.path.iterdir()}
    assert names
    assert {name for name in before if before[name] != after.get(name)} == set(names)
    old, new = before[names[0]], after.get(names[0], b"")
    changed = [at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b]
    bits = sum((a ^ b).bit_count() for a, b in zip(old, new, strict=False))
    if kind.startswith("bit"):
        assert bits == 1 and len(old) == len(new)
        (at,) = changed
        images = [one for one in IMAGES if old.find(one) <= at < old.find(one) + len(one)]
        labels = [value_of(one).to_bytes(8, "little") for one in IMAGES]
        on_label = any(0 <= at - old.find(label) < 8 for label in labels if label in old)
        wanted = {"bit of an image": (1, False), "bit of a label": (0, True)}
        assert (len([i for i in images if i in old]), on_label) == wanted.get(kind, (0, False))
        assert (names == ["index"]) == (kind == "bit of the index file")
    elif kind == "4 KB zeros":
        assert len(old) == len(new) and not any(new[at] for at in changed)
        assert changed and changed[-1] - changed[0] < 4096
    elif kind == "cut":
        assert old.startswith(new) and len(new) < len(old)
    elif kind == "garbage behind":
        assert new.startswith(old) and len(new) > len(old)
    elif kind == "two swapped":
        assert (old, before[names[1]]) == (after[names[1]], new)
    else:
        assert set(before) - set(after) == set(names)


def test_what_a_store_has_not_is_not_damaged(tmp_path: Path) -> None:
    place = stored(tmp_path / "stored", files=1)
    place.index = []
    for kind in ("two swapped", "bit of the index file"):
        assert damage.DAMAGES[kind](place, random.Random(0)) is None
    place.data[0].write_bytes(os.urandom(1000))  # as if it was compressed
    for kind in ("bit of a label", "bit elsewhere"):
        assert damage.DAMAGES[kind](place, random.Random(0)) is None
    assert damage.DAMAGES["bit of an image"](place, random.Random(0)) == ["0.data"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "whole"),
        ({"told": ["a warning"]}, "whole"),
        ({"right": 15}, "missing"),
        ({"right": 15, "told": ["a warning"]}, "went_on"),
        ({"right": 15, "noise": "a line\n"}, "went_on"),
        ({"right": 3, "error": "OSError: in a/1.tar"}, "named"),
        ({"right": 3, "error": "OSError: x", "told": ["while reading 1.tar"]}, "named"),
        ({"right": 3, "error": "OSError: in a/2.tar"}, "unnamed"),
        ({"wrong": 1, "error": "OSError: in a/1.tar"}, "wrong"),
        ({"wrong": 1, "told": ["a warning"]}, "wrong"),
        ({"right": 3, "ended": "ended with code -11"}, "hang"),
        ({"error": "MemoryError", "out_of_memory": True}, "memory"),
        ({"memory": 2 << 30}, "memory"),
    ],
)
def test_the_worst_of_a_read_counts(changes: dict[str, Any], expected: str) -> None:
    assert damage.outcome(WHOLE | changes, 16, ["1.tar"]) == expected


def reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pairs: Any, limit_s: float = 60.0
) -> dict[str, Any]:
    """What a reader finds of these pairs, which a child makes."""
    folder = tmp_path / "images"
    folder.mkdir()
    for i, image in enumerate(IMAGES):
        (folder / f"{i:02d}").write_bytes(image)
    store = damage_stores.Store("one", lambda *_: None, lambda _: pairs(), "*")
    monkeypatch.setitem(BY_TITLE, "one", store)
    one_round = damage_stores.library("", str(folder))
    return one_round(title="one", path="", limit_s=limit_s)


GOOD = [(image, value_of(image)) for image in IMAGES]


@pytest.mark.parametrize(
    ("pairs", "right", "wrong"),
    [
        (GOOD, 16, 0),
        (GOOD[::-1], 16, 0),
        ([*GOOD[:3], (b"else", 1)], 3, 1),
        ([(IMAGES[0], 5), *GOOD[1:]], 15, 1),
        ([(IMAGES[0], value_of(IMAGES[1]))], 0, 1),
        ([*GOOD, GOOD[0]], 16, 1),
    ],
)
def test_pairs_are_compared_with_what_was_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pairs: Any, right: int, wrong: int
) -> None:
    found = reading(tmp_path, monkeypatch, lambda: iter(pairs))
    assert (found["right"], found["wrong"], found["error"]) == (right, wrong, "")


def test_errors_with_their_causes_and_the_ends_of_processes_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> Iterator[Any]:
        yield GOOD[0]
        try:
            raise OSError("in 1.tar")
        except OSError as error:
            raise ValueError("no good") from error

    def dies() -> Iterator[Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        yield GOOD[0]

    def waits() -> Iterator[Any]:
        signal.pause()
        yield GOOD[0]

    found = [
        reading(tmp_path / name, monkeypatch, pairs, 60.0 if name != "waits" else 0.5)
        for name, pairs in (("fails", fails), ("dies", dies), ("waits", waits))
        if not (tmp_path / name).mkdir()
    ]
    assert "no good" in found[0]["error"] and "in 1.tar" in found[0]["error"]
    assert found[1]["ended"] == f"ended with code {-signal.SIGKILL}"
    assert found[2]["ended"] == "no end within 0 s"


def rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, titles: list[str], rivals: bool
) -> Result:
    monkeypatch.setattr(damage, "IMAGES", 32)
    monkeypatch.setattr(damage, "STORES", tuple(BY_TITLE[title] for title in titles))
    result = Result("damage", ["pytest"], True)
    damage.run(Data(tmp_path, tmp_path, True, rivals), result)
    return result


def test_shardio_tells_all_of_it_and_rivals_that_are_not_here_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(damage, "ENVIRONMENTS", tmp_path / "none")
    titles = ["LitData", "shardio", 'shardio, LMDB shards, on_error="skip"']
    result = rehearsal(tmp_path, monkeypatch, titles, True)
    assert "litdata: not there: benchmarks/setup_rivals litdata" in result.facts["notes"]
    table, _ = result.facts["tables"]
    assert [row["name"] for row in table["rows"]] == titles[1:]
    for row in table["rows"]:
        assert row["reads"]["median"] == len(damage.DAMAGES)
        assert all(row[kind]["median"] == 0 for kind in (*damage.BAD, "unnamed"))
    raising, skipping = table["rows"]
    assert raising["went_on"]["median"] == 0 and skipping["went_on"]["median"] >= 4
    assert all(target["met"] for target in result.facts["targets"])
    assert not list(tmp_path.glob("copy-*/*"))


@pytest.mark.formats
@pytest.mark.parametrize("store", [s for s in STORES if s.rival], ids=lambda store: store.title)
def test_a_rival_is_stored_damaged_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: damage_stores.Store
) -> None:
    python = base.ENVIRONMENTS / store.rival / "bin" / "python"
    if not python.exists():
        if store.package == "h5py" or not FORMAT_TOOLS.exists():
            pytest.skip(f"NOT TESTED HERE: benchmarks/setup_rivals {store.rival} was not run")
        monkeypatch.setattr(damage, "_python", lambda _: FORMAT_TOOLS / "bin" / "python")
    monkeypatch.setattr(damage, "DAMAGES", {"bit of an image": damage.image_bit})
    result = rehearsal(tmp_path, monkeypatch, [store.title], True)
    (row,) = result.facts["tables"][0]["rows"]
    assert row["name"] == store.title and row["reads"]["median"] == 1
    assert result.facts["versions"][store.package]


def test_who_does_not_read_well_what_is_undamaged_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(images: list[bytes], out: str, **_: Any) -> None:
        damage_stores.write_shardio(images[1:], out)

    store = damage_stores.Store("shardio", write, damage_stores.read_shardio, "0*")
    monkeypatch.setitem(BY_TITLE, "shardio", store)
    monkeypatch.setattr(damage, "EntryProcess", lambda function, **given: Here(function, **given))
    with pytest.raises(BenchmarkError, match="undamaged, it is not read well"):
        rehearsal(tmp_path, monkeypatch, ["shardio"], False)


class Here:
    """An EntryProcess in this process."""

    def __init__(self, function: str, **options: Any) -> None:
        self.round = getattr(damage_stores, function.partition(":")[2])(**options)

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_the_page_has_what_is_stored() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    found = json.loads((RESULTS / "damage.json").read_text())
    assert damage.page_text(found) in page
