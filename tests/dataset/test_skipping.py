"""Records that cannot be read are skipped: what fills their rows, what is listed, when it ends.

`filled` says anew which record fills the row of one that is bad. No other row may move.
"""

import copy
import functools
import gc
import json
import math
import os
import pickle
import random
import re
import subprocess
import sys
import warnings
import weakref
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S
from support.reading import drain
from support.small_datasets import flip, jpeg, make, shard_files
from support.url_datasets import served
from torch.utils.data import DataLoader

import shardio
from shardio import (
    DamageError,
    OptionError,
    ShardDataset,
    ShardLoader,
    Skip,
    SkipError,
    StorageError,
)
from shardio.dataset.fetch import Fetch
from shardio.storage import ranges

COUNTS = [23, 0, 41, 3, 30]
STARTS = [0, 23, 23, 64, 67, 97]
N = sum(COUNTS)
ROUNDS = [range(a, b) for a, b in pairwise(STARTS)]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* skipped in epoch"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:The JPEGs of this dataset"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(tmp_path / "packed", COUNTS, image=jpeg)


def key(number: int) -> str:
    return f"k/{number:06d}.jpg"


def spoil(folder: Path, numbers: Collection[int]) -> None:
    """Change a byte of the image of each of these records."""
    reader = ShardDataset(folder, decode=None).reader
    for number in numbers:
        shard, record = reader.locate(number)
        flip(shard_files(folder)[shard], reader.shard(shard).offset(record) + 60)


def filled(number: int, bad: Collection[int], chosen: Collection[int] = range(N)) -> int:
    """The record that fills a row: the next good one of its shard, round, or of the next shards."""
    at = next(i for i, shard in enumerate(ROUNDS) if number in shard)
    own = [n for n in ROUNDS[at] if n in chosen]
    own = [n for n in own if n > number] + [n for n in own if n <= number]
    others = [n for shard in (*ROUNDS[at + 1 :], *ROUNDS[:at]) for n in shard if n in chosen]
    return next(n for n in (*own, *others) if n not in bad)


def numbers(batches: list[Any]) -> list[list[int]]:
    return [[int(name[2:8]) for name in batch["__key__"]] for batch in batches]


def read(folder: Path, loader: str = "in this process", **options: Any) -> tuple[list[Any], Any]:
    """Read an epoch, and return its batches and the dataset."""
    given: dict[str, Any] = {"batch_size": 8, "decode": None} | options
    dataset = ShardDataset(folder, **given)
    return drain(loader_of(dataset, loader)), dataset


def loader_of(dataset: Any, loader: str) -> Any:
    if loader == "in this process":
        return dataset
    kind, _, how = loader.partition(" ")
    if kind == "ShardLoader":
        return ShardLoader(dataset, num_workers=int(how))
    context = how if how in ("fork", "spawn") else None
    return DataLoader(dataset, None, num_workers=2, multiprocessing_context=context)


def skipped_until(epoch: int, dataset: Any) -> list[Any]:
    """List what was skipped in epochs that are over: workers of ShardLoader begin the next one."""
    return [one for one in dataset.skipped if one.epoch <= epoch]


LOADERS = ["in this process", "DataLoader fork", "ShardLoader 0", "ShardLoader 2"]
MANY = Skip(most=N)


@pytest.mark.parametrize(
    ("loader", "decode"),
    [
        *((loader, decode) for loader in LOADERS for decode in (None, "numpy")),
        ("in this process", "pil"),
        ("DataLoader spawn", "numpy"),
    ],
)
@pytest.mark.usefixtures("warm_workers")
def test_rows_of_bad_records_are_filled_and_no_other_moves(
    folder: Path, loader: str, decode: Any
) -> None:
    options: dict[str, Any] = {"decode": decode, "fields": ("__key__", "image", "label")}
    if decode == "pil":
        options["transform"] = shardio.CenterCrop(8)
    good = read(folder, **options)[0]
    bad = {0, 22, 23, 40, 41, 42, 64, 65, 66}  # the last three: a whole shard
    spoil(folder, bad)
    with pytest.raises(DamageError):
        read(folder, **options)
    found, dataset = read(folder, loader, on_error=MANY, **options)
    before = {int(name[2:8]): (b, i) for b, one in enumerate(good) for i, name in enumerate(one[0])}
    assert len(found) == len(good)
    for mine, was in zip(found, good, strict=True):
        for i, name in enumerate(was[0]):
            number = int(name[2:8])
            b, j = before[filled(number, bad) if number in bad else number]
            assert mine[0][i] == good[b][0][j] and mine[2][i] == good[b][2][j]
            if decode is None:
                assert bytes(mine[1][i]) == bytes(good[b][1][j])
            else:
                assert (mine[1][i] == good[b][1][j]).all()
    listed = skipped_until(0, dataset)
    assert {one.number for one in listed} == bad  # those of a tail once more, perhaps
    for one in listed:
        shard, record = dataset.reader.locate(one.number)
        assert (one.key, one.record, one.epoch) == (key(one.number), record, 0)
        assert one.shard.endswith(shard_files(folder)[shard].name)
        assert one.error.startswith("DamageError: ") and key(one.number) in str(one)


def test_what_fills_a_row_is_of_those_that_were_chosen(folder: Path) -> None:
    spoil(folder, {30, 31, 33})
    chosen = [n for n in range(N) if n % 3 == 0 or n == 31]
    dataset = ShardDataset(folder, batch_size=8, decode=None, on_error=MANY).select(chosen)
    rows = [n for batch in numbers([*dataset]) for n in batch]
    assert 30 not in rows and 31 not in rows and 33 not in rows
    assert rows.count(filled(33, {30, 31, 33}, chosen)) >= 4  # its own, and those of three
    assert {one.number for one in dataset.skipped} == {30, 31, 33}


def raising(numbers: Collection[int], error: type[BaseException], sample: Any) -> Any:
    if int(sample["__key__"][2:8]) in numbers:
        raise error("of a user")
    return sample


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("error", [ValueError, StopIteration, OSError])
def test_what_a_users_function_raises_is_skipped(folder: Path, loader: str, error: Any) -> None:
    own = functools.partial(raising, {5, 50}, error)
    good, _ = read(folder)
    found, dataset = read(folder, loader, map=own, on_error=MANY)
    expected = [[filled(n, {5, 50}) if n in (5, 50) else n for n in b] for b in numbers(good)]
    assert numbers(found) == expected
    assert {(one.number, one.error) for one in dataset.skipped} == {
        (5, f"{error.__name__}: of a user"),
        (50, f"{error.__name__}: of a user"),
    }


@pytest.mark.parametrize("error", [MemoryError, StorageError, OptionError])
def test_what_is_not_of_a_record_is_never_skipped(folder: Path, error: Any) -> None:
    with pytest.raises(error, match="of a user"):
        read(folder, map=functools.partial(raising, {5}, error), on_error=MANY)


@pytest.mark.parametrize("loader", LOADERS)
def test_images_that_cannot_be_decoded_are_skipped(tmp_path: Path, loader: str) -> None:
    bad = {7, 60}
    folder = make(tmp_path, COUNTS, image=lambda i: b"no image" if i in bad else jpeg(i))
    found, dataset = read(folder, loader, decode="numpy", on_error=MANY)
    rows = [n for batch in numbers(found) for n in batch]
    assert bad.isdisjoint(rows) and {one.number for one in dataset.skipped} == bad
    assert all(one.error.startswith("DecodeError") for one in dataset.skipped)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("how", ["gone", "header", "index", "cut"])
def test_a_shard_that_does_not_open_is_filled_from_the_next(
    folder: Path, loader: str, how: str
) -> None:
    path = shard_files(folder)[2]
    good = numbers(read(folder)[0])
    if how == "gone":
        path.unlink()
    elif how == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        flip(path, 20 if how == "header" else path.stat().st_size - 100)
    found, dataset = read(folder, loader, on_error=MANY)
    bad = {*ROUNDS[2]}
    assert numbers(found) == [[64 if n in bad else n for n in batch] for batch in good]
    assert {one.number for one in dataset.skipped} == bad
    assert {one.key for one in dataset.skipped} == {""}
    assert {one.shard for one in dataset.skipped} == {str(path)}


def test_valid_is_false_where_a_row_was_filled(folder: Path) -> None:
    bad = {3, 33}
    good, _ = read(folder, tail="exact")
    spoil(folder, bad)
    for loader in ("in this process", "ShardLoader 2"):
        found, _ = read(folder, loader, tail="exact", on_error=MANY)
        for mine, was, row in zip(found, good, numbers(good), strict=True):
            expected = [bool(v) and n not in bad for v, n in zip(was["valid"], row, strict=True)]
            assert mine["valid"].tolist() == expected


def test_a_run_that_goes_on_skips_the_same(folder: Path) -> None:
    bad = set(random.Random(1).sample(range(N), 12))
    spoil(folder, bad)
    whole = numbers(read(folder, on_error=MANY)[0])
    dataset = ShardDataset(folder, batch_size=8, decode=None, on_error=MANY)
    for done in (1, 5):
        state = dataset.state_dict(steps=done)
        other = ShardDataset(folder, batch_size=8, decode=None, on_error=MANY)
        other.load_state_dict(state)
        assert numbers([*DataLoader(other, None, num_workers=2)]) == whole[done:]
    ranks = [
        numbers([*ShardDataset(folder, batch_size=4, decode=None, on_error=MANY, **own)])
        for own in ({"rank": 0, "world_size": 2}, {"rank": 1, "world_size": 2})
    ]
    assert len(ranks[0]) == len(ranks[1])


def test_a_mixture_skips_and_lists(folder: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other", [50], image=lambda i: jpeg(1000 + i))
    parts = [ShardDataset(one, batch_size=8, decode=None) for one in (folder, other)]
    good = numbers([*ShardDataset.mix(parts, [1, 1], length="last")])
    spoil(folder, {70, 71})
    parts = [ShardDataset(one, batch_size=8, decode=None, on_error=MANY) for one in (folder, other)]
    for loader in ("in this process", "DataLoader fork", "ShardLoader 2"):
        mixture = ShardDataset.mix([copy.deepcopy(part) for part in parts], [1, 1], length="last")
        found = numbers([*loader_of(mixture, loader)])
        assert found == [[72 if n in (70, 71) else n for n in batch] for batch in good]
        assert {one.number for one in mixture.skipped} == {70, 71}


# --- how much -------------------------------------------------------------------------------------


@pytest.mark.parametrize("loader", LOADERS)
def test_one_too_many_ends_the_pass(folder: Path, loader: str) -> None:
    spoil(folder, {1, 2, 40, 80})
    for allowed, most in ((4, 4), (4, 0.04), (3, 3), (3, 0.03), (0, 0)):
        dataset = ShardDataset(folder, batch_size=8, decode=None, on_error=Skip(most=most))
        if allowed == 4:
            drain(loader_of(dataset, loader))
            continue
        with pytest.raises(SkipError, match=f"on_error allows {allowed}: mend the dataset"):
            drain(loader_of(dataset, loader))
        assert allowed < len(skipped_until(0, dataset)) <= 4


@pytest.mark.parametrize("loader", ["in this process", "DataLoader fork", "ShardLoader 2"])
def test_each_pass_may_skip_as_many(folder: Path, loader: str) -> None:
    spoil(folder, {1, 2, 40})
    dataset = ShardDataset(folder, batch_size=8, decode=None, on_error=Skip(most=3))
    loader_ = loader_of(dataset, loader)
    for _ in range(3):
        drain(loader_) if loader != "ShardLoader 2" else [*loader_]
    assert sorted(one.epoch for one in skipped_until(2, dataset)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    evaluation = ShardDataset(
        folder, batch_size=8, decode=None, shuffle=False, on_error=Skip(most=3)
    )
    for _ in range(3):
        drain(loader_of(evaluation, "in this process"))


@pytest.mark.parametrize("loader", LOADERS)
def test_validation_passes_count_anew(folder: Path, loader: str) -> None:
    spoil(folder, {1, 40})
    options: dict[str, Any] = {"batch_size": 8, "decode": None, "on_error": Skip(most=2)}
    for more in ({"shuffle": False}, {"tail": "exact", "seed": 3}):
        dataset = ShardDataset(folder, **options, **more)
        for _ in range(3):
            assert len(drain(loader_of(dataset, loader))) == len(dataset)


def test_passes_side_by_side_count_each_for_itself(folder: Path) -> None:
    spoil(folder, {1, 40})
    options: dict[str, Any] = {"batch_size": 8, "decode": None}
    dataset = ShardDataset(folder, on_error=Skip(most=1), **options)
    with pytest.raises(SkipError):
        for _ in dataset:
            next(iter(dataset.select(range(60, 90))))
    dataset = ShardDataset(folder, on_error=Skip(most=2), **options)
    for one in (dataset, dataset.select(range(N))):
        drain(loader_of(one, "DataLoader fork"))
    twins = [dataset.select(range(50)), dataset.select(range(50, N))]
    mixture = ShardDataset.mix(twins, [1, 1])
    assert len(mixture.skipped) == len(dataset.skipped) == 4


def test_a_mixture_counts_the_share_of_a_rank(folder: Path) -> None:
    spoil(folder, {1, 40, 60, 80})
    both = [folder, make(folder.parent / "other", [97], image=lambda i: jpeg(500 + i))]
    allowed = [math.ceil(0.02 * -(-N // 2)), 4]
    for rank in (0, 1):
        parts = [
            ShardDataset(
                one, batch_size=8, decode=None, rank=rank, world_size=2, on_error=Skip(most=0.02)
            )
            for one in both
        ]
        mixture = ShardDataset.mix(parts, [1, 1], length="last")
        try:
            drain(mixture)
        except SkipError as error:
            assert f"allows {allowed[0]}" in str(error)
        else:
            assert len(mixture.skipped) <= allowed[0]


def test_what_is_read_once_skips_nothing(folder: Path) -> None:
    dataset = ShardDataset(folder, batch_size=8, decode="numpy", on_error="skip")
    with pytest.raises(OptionError, match="leave on_error out, or leave resident out"):
        ShardLoader(dataset, num_workers=0, resident="ram")


def test_a_pass_leaves_nothing_behind(folder: Path) -> None:
    """No cycle that holds its bytes; no error that grows each time it is raised."""
    shard_files(folder)[2].unlink()
    dataset = ShardDataset(folder, batch_size=8, decode=None, on_error=MANY)
    gc.collect()
    gc.disable()
    try:
        items = iter(dataset)
        next(items)
        fetch = weakref.ref(next(one for one in gc.get_objects() if type(one) is Fetch))
        del items
        assert fetch() is None
    finally:
        gc.enable()
    broken = dataset.reader.shard(2)
    for _ in range(3):
        with pytest.raises(DamageError) as raised:
            broken.read(0)
        assert len(raised.traceback) <= 3


def test_a_hundred_in_a_row_end_the_pass(tmp_path: Path) -> None:
    folder = make(tmp_path, [300], image=jpeg)
    spoil(folder, range(40, 139))
    options = {"shuffle": False, "on_error": Skip(most=300)}
    dataset = read(folder, **options)[1]
    assert len(dataset.skipped) == 99
    spoil(folder, {139})
    with pytest.raises(SkipError, match="100"):
        read(folder, **options)


def test_none_that_is_good_is_an_error_that_names_the_first(tmp_path: Path) -> None:
    folder = make(tmp_path, [5], image=jpeg)
    spoil(folder, range(5))
    with pytest.raises(SkipError, match=r"DamageError: .*record \d"):
        read(folder, on_error=MANY)


@pytest.mark.parametrize("loader", ["in this process", "ShardLoader 2"])
@pytest.mark.parametrize("kind", ["raw", "tiles", "lmdb", "in place"])
def test_all_that_is_packed_or_in_place_is_skipped_alike(
    tmp_path: Path, kind: str, loader: str
) -> None:
    source, out = tmp_path / "src", tmp_path / "out"
    source.mkdir()
    for number in range(30):
        (source / f"{number:06d}.jpg").write_bytes(jpeg(number, (160, 96)))
    options: dict[str, Any] = {"raw": {"encode": "raw"}, "tiles": {"jpeg_tiles": True}}
    images = shardio.ImageOptions(**options.get(kind, {}))
    packing: dict[str, Any] = {
        "images": images,
        "jobs": 1,
        "plan": shardio.PlanOptions(shuffle=False),
    }
    if kind == "in place":
        shardio.index(source, out=out, jobs=1)
    else:
        shardio.pack(source, out, format="lmdb" if kind == "lmdb" else "record", **packing)
    reading: dict[str, Any] = {"decode": "numpy", "fields": ("image", "__key__"), "batch_size": 8}
    reading["storage"] = shardio.Storage(root=source if kind == "in place" else None)
    good = drain(loader_of(ShardDataset(out, **reading), "in this process"))
    reader = ShardDataset(out, **reading).reader
    stored = shardio.open(out, decode=None, storage=reading["storage"]).keys()
    if kind == "in place":
        (source / stored[7]).write_bytes(b"short")
        (source / stored[8]).unlink()
    else:
        path = out / reader.manifest.shard(0).name
        for record in (7, 8):
            flip(path, reader.shard(0).offset(record) + int(reader.shard(0).sizes[record]) // 2)
    data = ShardDataset(out, on_error=MANY, **reading)
    found = drain(loader_of(data, loader))
    pixels = {key: image for images, keys in good for image, key in zip(images, keys, strict=True)}
    moved = {stored[7]: stored[9], stored[8]: stored[9]}
    for (images, keys), (_, before) in zip(found, good, strict=True):
        assert [*keys] == [moved.get(key, key) for key in before]
        assert all((image == pixels[key]).all() for image, key in zip(images, keys, strict=True))
    assert {one.number for one in data.skipped} == {7, 8}


# --- the list -------------------------------------------------------------------------------------


def test_a_file_gets_a_line_for_each(folder: Path, tmp_path: Path) -> None:
    spoil(folder, {1, 40})
    log = tmp_path / "skipped.jsonl"
    _, dataset = read(folder, "DataLoader fork", on_error=Skip(most=9, log=log))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert sorted(line["number"] for line in lines) == [1, 40] and len(dataset.skipped) == 2
    assert {*lines[0]} == {"epoch", "number", "key", "shard", "record", "error", "rank"}
    with pytest.raises(StorageError, match="nowhere"):
        read(folder, on_error=Skip(log=tmp_path / "nowhere" / "log"))


def test_the_end_of_a_pass_says_how_many(folder: Path) -> None:
    spoil(folder, {1, 40})
    with pytest.warns(UserWarning, match="2 records skipped in epoch 0, and other records in"):
        read(folder, on_error=MANY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(make(folder.parent / "other", [20], image=jpeg), on_error="skip")


def test_watch_tells_how_many(folder: Path) -> None:
    spoil(folder, {1, 40})
    dataset = ShardDataset(folder, batch_size=8, decode=None, on_error=MANY)
    lines: list[str] = []
    for _ in shardio.watch(loader_of(dataset, "DataLoader fork"), every=5, print=lines.append):
        pass
    assert any(line.endswith("; 2 records skipped") for line in lines)


def test_copies_and_other_processes_have_lists_of_their_own(folder: Path) -> None:
    spoil(folder, {1})
    _, dataset = read(folder, on_error=MANY)
    assert len(dataset.skipped) == 1
    twin = copy.deepcopy(dataset)
    assert twin.skipped == []
    sent = pickle.dumps(dataset)
    program = (
        "import pickle, sys, warnings; warnings.simplefilter('ignore')\n"
        "dataset = pickle.loads(sys.stdin.buffer.read())\n"
        "list(dataset); print(len(dataset.skipped))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=sent, capture_output=True, timeout=LIMIT_S
    )
    assert (done.stdout, done.returncode) == (b"1\n", 0), done.stderr
    assert len(dataset.skipped) == 1


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_a_list_of_long_ago_leaves_other_files_alone(folder: Path, tmp_path: Path) -> None:
    """What a path in a pickle leads to may be another file by then."""
    dataset = ShardDataset(folder, batch_size=8, decode=None, on_error="skip")
    sent = pickle.dumps(dataset)
    (tmp_path / "users").write_bytes(b"precious")
    for other in (os.open(tmp_path / "users", os.O_RDWR), os.memfd_create("shardio")):
        os.write(other, b"precious")
        path = f"/proc/{os.getpid()}/fd/{other}".encode()
        was = re.search(rb"\x8c.(/proc/\d+/fd/\d+)", sent, re.S)
        assert was
        forged = sent.replace(was[0], b"\x8c" + bytes([len(path)]) + path)
        twin = pickle.loads(forged)
        twin.skips[0].note(of="x", skipped=[0, 1, "k", "s", 1, "e"])
        assert os.pread(other, 100, 0) == b"precious" and len(twin.skipped) == 1
        os.close(other)


def test_no_descriptor_is_left(folder: Path) -> None:
    def descriptors() -> set[str]:
        gc.collect()
        return {*os.listdir("/proc/self/fd")} if os.path.isdir("/proc/self/fd") else set()

    read(folder, on_error=MANY)
    before = descriptors()
    for _ in range(5):
        read(folder, on_error=MANY)
    assert len(descriptors()) <= len(before)


# --- shardio.open ---------------------------------------------------------------------------------


@pytest.mark.parametrize("decode", [None, "numpy"])
@pytest.mark.parametrize("rows", [slice(None), slice(20, 70), slice(60, 10, -3)])
def test_a_loop_over_records_passes_over_bad_ones(folder: Path, decode: Any, rows: slice) -> None:
    expected = list(shardio.open(folder, decode=decode)[rows])
    bad = {0, 22, 23, 40, 41, 42, 64, 65, 66}  # the last three: a whole shard
    spoil(folder, bad)
    data = shardio.open(folder, decode=decode, on_error=MANY)[rows]
    met = [n for n in range(N)[rows] if n in bad]
    with pytest.warns(UserWarning, match=f"^{len(met)} records? skipped: "):
        found = list(data)
    good = [one for one in expected if int(one["__key__"][2:8]) not in bad]
    assert [one["__key__"] for one in found] == [one["__key__"] for one in good]
    for mine, was in zip(found, good, strict=True):
        same = mine["image"] == was["image"]
        assert same if decode is None else same.all()
        assert mine["label"] == was["label"]
    assert [(one.number, one.key) for one in data.skipped] == [(n, key(n)) for n in met]
    assert len(data) == len(expected)
    with pytest.raises(DamageError):
        data[range(N)[rows].index(met[0])]


@pytest.mark.filterwarnings("ignore:.* skipped: ")
def test_loops_over_records_have_the_same_limits(folder: Path, tmp_path: Path) -> None:
    spoil(folder, {1, 40, 60})
    data = shardio.open(folder, decode=None, on_error=Skip(most=3, log=tmp_path / "log"))
    for _ in range(2):
        assert len(list(data)) == N - 3
    assert len(data.skipped) == len((tmp_path / "log").read_text().splitlines()) == 6
    with pytest.raises(SkipError, match="3 records skipped of 97 in epoch 0, and on_error allows"):
        list(shardio.open(folder, decode=None, on_error=Skip(most=2)))
    assert len(list(pickle.loads(pickle.dumps(data)))) == N - 3
    shard_files(folder)[3].unlink()  # of three records
    gone = shardio.open(folder, decode=None, on_error=Skip(most=6))
    assert len(list(gone)) == N - 6
    with pytest.raises(DamageError):
        gone[65]
    many = make(tmp_path, [300])
    spoil(many, range(0, 240, 2))
    assert len(list(shardio.open(many, decode=None, on_error=Skip(most=300)))) == 180
    spoil(many, range(101, 251, 2))
    with pytest.raises(SkipError, match="100 records in a row"):
        list(shardio.open(many, decode=None, on_error=Skip(most=300)))
    with pytest.raises(OptionError, match="on_error is 'ignore'"):
        shardio.open(folder, on_error="ignore")


@pytest.mark.filterwarnings("ignore:.* skipped: ")
@pytest.mark.parametrize("error", [ValueError, MemoryError, StorageError, OptionError])
def test_a_loop_over_records_passes_over_what_a_transform_raises(folder: Path, error: Any) -> None:
    turns = iter(range(N))

    def transform(image: Any) -> Any:
        if next(turns) == 7:
            raise error("of a user")
        return image

    data = shardio.open(folder, decode="numpy", transform=transform, on_error=MANY)
    if error is not ValueError:
        with pytest.raises(error):
            list(data)
        return
    assert len(list(data)) == N - 1
    assert [one.number for one in data.skipped] == [7]


@pytest.mark.filterwarnings("ignore:.* skipped: ")
def test_by_url_damage_is_skipped_and_a_store_that_fails_is_not(folder: Path) -> None:
    options: dict[str, Any] = {"decode": None, "on_error": MANY}
    options["storage"] = shardio.Storage(timeout_s=2.0)
    with served(folder.parent) as proxy:
        url = f"{proxy.url}/{folder.name}"
        whole = shardio.open(url, **options)
        dataset = ShardDataset(url, batch_size=8, **options)
        spoil(folder, {5, 50})
        assert len(list(whole)) == N - 2 and {one.number for one in whole.skipped} == {5, 50}
        assert len(drain(dataset)) and {one.number for one in dataset.skipped} == {5, 50}
        late = shardio.open(url, **options), ShardDataset(url, batch_size=8, **options)
    for one in late:
        with pytest.raises(StorageError):
            list(one)
        assert one.skipped == []
    ranges.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"on_error": "ignore"}, "on_error is 'ignore': expected 'raise', 'skip' or shardio.Skip"),
        ({"on_error": None}, "on_error is None"),
    ],
)
def test_wrong_options_are_told(folder: Path, options: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        ShardDataset(folder, **options)


@pytest.mark.parametrize("most", [-1, 1.5, float("nan"), "1%", None, True])
def test_a_wrong_number_is_told(most: Any) -> None:
    with pytest.raises(OptionError, match="most"):
        Skip(most=most)
    with pytest.raises(OptionError, match="log is 5: expected the path of a file"):
        Skip(log=5)  # type: ignore[arg-type]
