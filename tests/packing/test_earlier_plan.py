"""A plan that is made once: parts, and whole packings, go on under it and never list the source."""

import contextlib
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import forging, packing
from support.object_stores import ObjectStore
from support.packing import die, grouped
from support.trees import (
    Tree,
    content,
    images,
    noise,
    picture,
    plant,
    shardio,
    shardio_json,
    shards,
)

import shardio as library
from shardio import Storage, commit
from shardio.errors import (
    DamageError,
    ExistsError,
    OptionError,
    ShardioError,
    SourceChangedError,
    SourceError,
)
from shardio.formats.sample import pack_columns, unpack_columns
from shardio.packing import gc, job, journal
from shardio.packing.packed import Packed
from shardio.storage import lock

PLANNED = {"max_records": 4}


@pytest.fixture
def unlisted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, no source may be listed."""
    return lambda: packing.unlisted(monkeypatch)


def plan(source: Path | str, out: Path, **options: Any) -> list[Packed]:
    return library.plan(source, out, **grouped(PLANNED | options))


def pack(source: Path | str, out: Path, **options: Any) -> list[Packed]:
    return library.pack(source, out, jobs=1, **grouped(options))


def parts(source: Path | str, out: Path, count: int = 2, **options: Any) -> list[Packed]:
    for part in range(count, 0, -1):
        pack(source, out, part=(part, count), **options)
    return commit(out, jobs=1, overwrite=options.get("overwrite", False))


def packed(out: Path) -> dict[bytes, bytes | None]:
    """What is packed, without the plan that is kept for parts that start again."""
    kept = os.fsencode(journal.PLANNED)
    return {k: v for k, v in content(out).items() if os.path.basename(k) != kept}


MASKS: Tree = {f"images/{n}.jpg": noise(f"i{n}", 300 + n) for n in range(9)} | {
    f"masks/{n}.png": picture(8, 8, "PNG") for n in range(9)
}
PAIRS = {os.path.basename(os.fsdecode(k)).replace(".png", "_m.png"): v for k, v in MASKS.items()}
SPLITS: Tree = {
    f"{split}/{key}": value
    for split in ("train", "val")
    for key, value in images(classes=2, each=5, size=len(split) * 90).items()
}
GROUPS: Tree = {f"{n}.{end}": noise(f"{n}{end}", 300) for n in range(9) for end in ("jpg", "bin")}
LISTED = "".join(f"class{n % 3}/00{n}.jpg,{n / 3}\n" for n in range(8))


def sources_in(root: Path) -> dict[str, tuple[Path, dict[str, Any], dict[str, Any]]]:
    """Sources, with the options of their plans, and those that packing needs again."""
    plant(root / "classes", images())
    plant(root / "splits", SPLITS)
    plant(root / "groups", GROUPS)
    plant(root / "masks", MASKS)
    plant(root / "pairs", PAIRS)
    (root / "listing.csv").write_text(f"path,weight\n{LISTED}")
    library.pack(root / "classes", root / "packed", jobs=1)
    rooted = {"root": root / "classes"}
    return {
        "classes": (root / "classes", {"classes": root / "packed", "seed": 3}, {}),
        "splits": (root / "splits", {"shuffle": False}, {}),
        "groups": (root / "groups", {"kind": "files", "fields": {"other": "bin"}}, {}),
        "masks": (root / "masks", {"format": "lmdb"}, {}),
        "pairs": (root / "pairs", {"fields": {"image": "*.jpg", "mask": "*_m.png"}}, {}),
        "listing": (root / "listing.csv", rooted, rooted),
        "dataset": (root / "packed", {"where": {"label": ["class1", "class2"]}}, {}),
    }


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    "name", ["classes", "splits", "groups", "masks", "pairs", "listing", "dataset"]
)
def test_packing_under_a_plan_gives_what_packing_gives_and_lists_nothing(
    name: str, whole: bool, tmp_path: Path, unlisted: Callable[[], None]
) -> None:
    path, options, again = sources_in(tmp_path)[name]
    out = tmp_path / "out"
    expected = pack(path, tmp_path / "expected", **PLANNED | options)
    planned = plan(path, out, **options)
    assert [(one.split, one.records, one.shards) for one in planned] == [
        (one.split, one.records, one.shards) for one in expected
    ]
    unlisted()
    done = pack(path, out, **again) if whole else parts(path, out, **again)
    assert [one.committed for one in done] == [True for _ in expected]
    assert packed(out) == content(tmp_path / "expected")


@pytest.mark.usefixtures("ranges_closed")
def test_a_bucket_is_planned_once_and_packed_without_listing_it(
    tmp_path: Path, bucket: ObjectStore, unlisted: Callable[[], None]
) -> None:
    bucket.put_folder(plant(tmp_path / "src", images()))
    pack(tmp_path / "src", tmp_path / "disk", **PLANNED)
    read = {"storage": Storage(options=bucket.options)}
    plan(bucket.url, tmp_path / "out", **read)
    unlisted()
    parts(bucket.url, tmp_path / "out", **read)
    assert packed(tmp_path / "out") == content(tmp_path / "disk")


@pytest.mark.parametrize("name", ["classes", "splits", "listing", "dataset"])
def test_a_part_that_starts_again_after_the_commit_knows_that_it_is_done(
    name: str, tmp_path: Path, unlisted: Callable[[], None]
) -> None:
    path, options, again = sources_in(tmp_path)[name]
    out = tmp_path / "out"
    plan(path, out, **options)
    done, before = parts(path, out, **again), content(out)
    unlisted()
    for one, committed in zip(pack(path, out, part=(1, 2), **again), done, strict=True):
        assert one.already and (one.split, one.records) == (committed.split, committed.records)
        assert str(one.source_bytes) == str(committed.source_bytes)
    assert content(out) == before


def test_a_part_takes_no_kept_plan_for_what_is_not_of_it(source: Path, tmp_path: Path) -> None:
    """Other options, shards that are gone, another dataset in its place: the source is listed."""
    out = tmp_path / "out"
    plan(source, out)
    parts(source, out)
    with pytest.raises(ExistsError, match="option max_records: was 4, now 5"):
        pack(source, out, part=(1, 2), max_records=5)
    kept = (out / journal.PLANNED).read_bytes()
    sorted(out.glob("*.shard"))[0].unlink()
    assert pack(source, out, part=(1, 2), **PLANNED)[0].built == 3
    pack(source, out, overwrite=True, seed=9, restart=True)
    assert not (out / journal.PLANNED).exists()
    (out / journal.PLANNED).write_bytes(kept)  # as a commit that was killed there leaves it
    with pytest.raises(ExistsError, match="another dataset is packed here"):
        pack(source, out, part=(1, 2), **PLANNED)


def test_a_plan_is_made_once(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert str(plan(source, out)[0]).startswith(f"{out}: planned: 24 files, 3 classes")
    before = content(out)
    assert "already planned: 24 files" in str(plan(source, out)[0])
    assert content(out) == before
    with pytest.raises(SourceChangedError, match=r"of another plan:\n  option seed: was 0, now 1"):
        plan(source, out, seed=1)
    assert content(out) == before
    plan(source, out, seed=1, restart=True)
    pack(source, out)
    assert plan(source, out, seed=1)[0].already
    with pytest.raises(ExistsError, match="another dataset is packed here"):
        plan(source, out, seed=2)
    plan(source, out, seed=2, overwrite=True)
    parts(source, out, overwrite=True)
    pack(source, tmp_path / "expected", seed=2, **PLANNED)
    assert library.open(out).keys() == library.open(tmp_path / "expected").keys()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_records": 5}, "option max_records: was 4, now 5"),
        ({"shard_size": "1MB"}, "option shard_size: was 1MiB, now 1MB"),
        ({"shuffle": False}, "option shuffle: was True, now False"),
        ({"seed": 1}, "option seed: was 0, now 1"),
        ({"resize": 8}, "option resize: was 16, now 8"),
        ({"quality": 50, "resize": 16}, "option quality: was 70, now 50"),
        ({"encode": "raw"}, "option encode: was not given, now 'raw'"),
        ({"format": "lmdb"}, "option format: was not given, now 'lmdb'"),
        ({"kind": "files"}, "option source: was 'imagefolder', now 'files'"),
        ({"where": {"label": ["class0"]}}, "option where: was not given, now label=class0"),
        ({"fields": {"image": "jpg"}}, r"option fields: was {}, now {'image': 'jpg'}"),
        ({"splits": True}, "option splits: was False, now True"),
        ({"classes": "other"}, "option classes: others, or in another order"),
    ],
)
def test_what_was_planned_otherwise_is_an_error_that_says_which(
    options: dict[str, Any],
    said: str,
    source: Path,
    tmp_path: Path,
    unlisted: Callable[[], None],
) -> None:
    plan(source, tmp_path / "out", resize=16, quality=70)
    before = content(tmp_path / "out")
    if "classes" in options:
        options = {"classes": tmp_path / "other"}
        pack(plant(tmp_path / "src2", images(classes=4)), tmp_path / "other")
    unlisted()
    for part in (None, (1, 2)):
        with pytest.raises(OptionError, match=re.escape(said) + "\nWhat is not given"):
            pack(source, tmp_path / "out", part=part, **options)
    assert content(tmp_path / "out") == before


def test_a_part_does_not_drop_the_plan_of_all(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan(source, out)
    pack(source, out, part=(1, 2))
    before = content(out)
    with pytest.raises(
        SourceChangedError, match=r"(?s)max_records: was 4, now 5.*`shardio plan --restart`$"
    ):
        pack(source, out, part=(2, 2), restart=True, max_records=5)
    assert content(out) == before
    pack(source, out, restart=True)
    assert "24 files" in str(pack(source, out)[0])


def test_the_root_of_a_listing_is_given_again(tmp_path: Path) -> None:
    path, options, _ = sources_in(tmp_path)["listing"]
    plan(path, tmp_path / "out", **options)
    with pytest.raises(OptionError, match=r"made with --root.*: give it, as this machine reaches"):
        pack(path, tmp_path / "out")
    plan(tmp_path / "classes", tmp_path / "out2")
    with pytest.raises(OptionError, match=r"made without --root.*: leave it out"):
        pack(tmp_path / "classes", tmp_path / "out2", root=tmp_path)


def test_a_plan_is_a_snapshot(source: Path, tmp_path: Path) -> None:
    plan(source, tmp_path / "out")
    pack(source, tmp_path / "expected", **PLANNED)
    plant(source, {"class0/new.jpg": noise("new", 400)})
    parts(source, tmp_path / "out")
    assert packed(tmp_path / "out") == content(tmp_path / "expected")


@pytest.mark.parametrize("change", ["changed", "gone"])
def test_a_file_that_changed_since_the_plan_is_an_error(
    change: str, source: Path, tmp_path: Path
) -> None:
    plan(source, tmp_path / "out")
    file = source / "class1/002.jpg"
    file.unlink() if change == "gone" else os.utime(file)
    with pytest.raises(SourceChangedError, match=r"class1/002.jpg: changed since the packing was"):
        parts(source, tmp_path / "out")


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_source_that_is_not_there_is_an_error(jobs: int, source: Path, tmp_path: Path) -> None:
    plan(source, tmp_path / "out")
    source.rename(tmp_path / "moved")
    with pytest.raises(SourceError, match="src: cannot be opened: No such file or directory"):
        library.pack(source, tmp_path / "out", jobs=jobs)
    pack(tmp_path / "moved", tmp_path / "out")


def test_the_size_of_raw_pixels_is_said_by_the_plan(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", {f"a/{n}.jpg": picture(40 + n, 30) for n in range(4)})
    said: list[str] = []
    plan(source, tmp_path / "out", resize=16, encode="raw", announce=said.append)
    assert said[0].startswith("raw pixels: 4 images of 16 x 16, 3.0 KiB (the source has")
    pack(source, tmp_path / "out")
    pack(source, tmp_path / "expected", resize=16, encode="raw", **PLANNED)
    assert packed(tmp_path / "out") == content(tmp_path / "expected")


def test_what_cannot_be_packed_is_said_by_the_plan_and_left_out_when_told(
    source: Path, tmp_path: Path
) -> None:
    plant(source, {"class0/empty.jpg": b"", "class0/text.jpg": b"text"})
    [planned] = plan(source, tmp_path / "out")
    assert planned.rejected == [("class0/empty.jpg", "is empty")]
    assert "1 file cannot be packed; --on-error skip, of `pack`, leaves" in str(planned)
    with pytest.raises(SourceError, match=r"(?s)2 files cannot be packed.*class0/text.jpg: is not"):
        pack(source, tmp_path / "out")
    done = parts(source, tmp_path / "out", on_error="skip")
    pack(source, tmp_path / "expected", on_error="skip", **PLANNED)
    assert [key for key, _ in done[0].rejected] == ["class0/empty.jpg", "class0/text.jpg"]
    assert packed(tmp_path / "out") == content(tmp_path / "expected")


def test_what_the_plan_says_that_cannot_be_packed_is_read_and_said_once(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    plant(source, {"class0/empty.jpg": b"", "class0/text.jpg": b"text"})
    plan(source, out)
    data = (out / lock.JOURNAL).read_bytes()
    *_, problems, end = journal.dump(journal.parse(lock.head(str(out)), "", reader(data)))
    parts = [pack(source, out, part=(1, 2), on_error="skip")[0]]
    at = len(data) - len(end) - len(problems) // 2
    (out / lock.JOURNAL).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    parts.append(pack(source, out, part=(2, 2), on_error="skip")[0])
    assert [key for one in parts for key, _ in one.rejected] == ["class0/text.jpg"]
    with pytest.raises(DamageError, match="the list of what cannot be packed cannot be read: its"):
        pack(source, out, part=(2, 2))
    (out / lock.JOURNAL).write_bytes(data)
    [done] = commit(out, jobs=1)
    assert [key for key, _ in done.rejected] == ["class0/empty.jpg", "class0/text.jpg"]


def test_a_packing_under_a_plan_that_dies_goes_on_without_listing(
    source: Path,
    tmp_path: Path,
    dead_on_shard: Callable[[int], None],
    unlisted: Callable[[], None],
) -> None:
    plan(source, tmp_path / "out")
    unlisted()
    dead_on_shard(2)
    with pytest.raises(KeyboardInterrupt):
        pack(source, tmp_path / "out")
    assert pack(source, tmp_path / "out", dry_run=True)[0].kept == 2
    [done] = pack(source, tmp_path / "out")
    assert (done.kept, done.built, done.committed) == (2, 4, True)


def test_splits_of_which_one_was_committed_before_a_death_are_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unlisted: Callable[[], None]
) -> None:
    source, out = plant(tmp_path / "src", SPLITS), tmp_path / "out"
    plan(source, out)
    unlisted()
    written = job.Job.commit

    def first(one: job.Job) -> None:
        written(one)
        die()

    with monkeypatch.context() as patch:
        patch.setattr(job.Job, "commit", first)
        with pytest.raises(KeyboardInterrupt):
            pack(source, out)
    assert not (out / "shardio.json").exists()
    pack(source, out)
    monkeypatch.undo()
    pack(source, tmp_path / "expected", **PLANNED)
    assert packed(out) == content(tmp_path / "expected")


def test_a_damaged_piece_is_an_error_of_its_shard_alone(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan(source, out)
    data = (out / lock.JOURNAL).read_bytes()
    start, piece, *_ = journal.dump(journal.parse(lock.head(str(out)), "", reader(data)))
    at = len(start) + len(piece) // 2
    (out / lock.JOURNAL).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    pack(source, out, part=(2, 2))
    with pytest.raises(DamageError, match=r"shardio-plan: the plan of shard 0 cannot be read: its"):
        pack(source, out, part=(1, 2))


def reader(data: bytes) -> journal.ReadBytes:
    return lambda start, length: data[start : start + length]


def resealed(data: bytes, change: Callable[[dict[str, Any]], dict[str, Any]]) -> bytes:
    """The journal with other values in its line, header and pieces, and checksums that fit."""
    first, last, _ = lock.FOOTER.unpack(data[-lock.FOOTER.size :])
    header = unpack_columns(data[last : -lock.FOOTER.size])
    cuts = itertools.pairwise(header["ends"].tolist())
    whole = {
        "line": json.loads(data[len(lock.PLAN_MAGIC) : first]),
        "header": header,
        "pieces": [unpack_columns(data[start:stop]) for start, stop in cuts],
    }
    whole = change(whole)
    line = json.dumps(whole["line"], sort_keys=True, separators=(",", ":"))
    start = lock.PLAN_MAGIC + line.encode() + b"\n"
    packed = [pack_columns(piece) for piece in whole["pieces"]]
    ends, header = np.cumsum([len(start), *map(len, packed)]), whole["header"]
    if header.get("ends") is not None:
        header["ends"] = ends
    header["checksums"] = [hashlib.blake2b(one, digest_size=8).digest() for one in packed]
    end, places = pack_columns(header), struct.pack("<QQ", len(start), ends[-1])
    return start + b"".join(packed) + end + places + hashlib.sha256(start + end + places).digest()


def sealed(data: bytes, change: Callable[[list[Any], dict[str, Any]], None]) -> bytes:
    """The journal with other values in its pieces and header."""

    def both(whole: dict[str, Any]) -> dict[str, Any]:
        change(whole["pieces"], whole["header"])
        return whole

    return resealed(data, both)


@pytest.mark.parametrize("call", [pack, commit])
def test_what_an_earlier_build_began_is_gone_on_with(
    source: Path, tmp_path: Path, call: Callable[..., Any]
) -> None:
    out, newer = tmp_path / "out", {"first", "on_duplicate", "over", "command", "base"}
    for part in (1, 2) if call is commit else (1,):
        pack(source, out, part=(part, 2), **PLANNED)
    data = (out / lock.JOURNAL).read_bytes()
    old = sealed(data, lambda pieces, header: [header.pop(name) for name in newer])
    (out / lock.JOURNAL).write_bytes(old)
    call(out) if call is commit else pack(source, out, **PLANNED)
    pack(source, tmp_path / "expected", **PLANNED)
    assert packed(out) == content(tmp_path / "expected")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(change, id=name)
        for name, change in {
            "no bounds": lambda pieces, header: header.update(bounds=None),
            "bounds of floats": lambda pieces, header: header.update(bounds=np.arange(7.0)),
            "bounds that go back": lambda pieces, header: np.put(header["bounds"], 2, 1),
            "huge bounds": lambda pieces, header: np.put(header["bounds"], 6, 1 << 62),
            "no ends": lambda pieces, header: header.update(ends=None),
            "a shard less": lambda pieces, header: pieces.pop(),
            "an id that is none": lambda pieces, header: header.update(dataset_id=7),
            "shards of before": lambda pieces, header: header.update(before=[1]),
            "a source": lambda pieces, header: header["ahead"].update(source=3),
            "problems": lambda pieces, header: header.update(problems=-1),
            "reasons": lambda pieces, header: (
                header.update(problems=1),
                pieces[-1].append([1, 2]),
            ),
            "a record less": lambda pieces, header: pieces[0]["keys"].pop(),
            "keys of text": lambda pieces, header: pieces[0].update(keys=["x"] * 4),
            "sizes of floats": lambda pieces, header: pieces[0].update(sizes=np.zeros(4)),
            "no source": lambda pieces, header: pieces[0].pop("source"),
            "no labels": lambda pieces, header: pieces[0]["source"].update(own={}),
        }.items()
    ],
)
def test_a_plan_of_values_that_nobody_wrote_is_damaged(
    change: Callable[[list[Any], dict[str, Any]], None], source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    plan(source, out)
    data = (out / lock.JOURNAL).read_bytes()
    assert sealed(data, lambda pieces, header: None) == data
    (out / lock.JOURNAL).write_bytes(sealed(data, change))
    with pytest.raises(DamageError, match=r"shardio-plan: the .* cannot be read: .*--restart"):
        pack(source, out)
    assert not (out / "manifest.json").exists()
    pack(source, out, restart=True, **PLANNED)


@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 2_000), marks=pytest.mark.slow)], ids=str
)
def test_a_forged_plan_gives_an_error_or_a_dataset(seeds: range, tmp_path: Path) -> None:
    """Never another exception; and nothing is written outside of OUT."""
    made = sources_in(tmp_path / "sources")
    for name, (path, options, _) in made.items():
        plan(path, tmp_path / "plans" / name, **options)
    beside = content(tmp_path)
    packed_some = errors = 0
    for seed in seeds:
        rng, out = random.Random(seed), tmp_path / "out"
        name = rng.choice(list(made))
        shutil.copytree(tmp_path / "plans" / name, out)
        where = rng.choice(sorted(out.rglob(lock.JOURNAL)))
        with contextlib.suppress(TypeError, ValueError, OverflowError):  # it cannot be written
            data = resealed(where.read_bytes(), lambda whole: forging.change(whole, rng))  # noqa: B023
            where.write_bytes(data)
        try:
            call = pack if rng.random() < 0.5 else parts
            call(made[name][0], out, **made[name][2])
            packed_some += 1
        except ShardioError:
            errors += 1
        shutil.rmtree(out)
    assert content(tmp_path) == beside
    assert packed_some and errors > len(seeds) // 2


def test_a_part_reads_its_own_pieces_alone(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    plan(source, out)
    size, head = (out / lock.JOURNAL).stat().st_size, len(lock.head(str(out)))
    asked: list[int] = []
    real = lock.Lock.read
    monkeypatch.setattr(
        lock.Lock, "read", lambda one, at, length: asked.append(length) or real(one, at, length)
    )
    pack(source, out, part=(3, 6))
    pieces = size - head
    assert sum(asked) - 2 * head < pieces / 4  # of six


@pytest.mark.parametrize("replaced", [False, True])
def test_a_plan_that_is_gone_when_the_packing_begins_is_an_error(
    replaced: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, build = tmp_path / "out", job.Job.build
    plan(source, out)

    def late(*given: Any) -> Any:
        (out / lock.JOURNAL).unlink()
        if replaced:
            plan(source, out, seed=7)
        return build(*given)

    monkeypatch.setattr(job.Job, "build", late)
    with pytest.raises(SourceChangedError, match=r"the plan that was here is gone.*again"):
        pack(source, out)
    assert not shards(out)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_plan_that_is_gone_when_its_problems_are_read_is_an_error(
    replaced: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, dry_run = tmp_path / "out", job.Job.dry_run
    (source / "class0" / "empty.jpg").touch()
    plan(source, out)

    def late(*given: Any) -> Any:
        (out / lock.JOURNAL).unlink()
        if replaced:
            plant(source, {"class0/new.jpg": noise("new", 200)})
            plan(source, out)
        return dry_run(*given)

    monkeypatch.setattr(job.Job, "dry_run", late)
    with pytest.raises(SourceChangedError, match=r"the plan that was here is gone.*again"):
        pack(source, out, dry_run=True)


def test_who_finds_the_planned_packing_committed_a_moment_ago_leaves_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, build = tmp_path / "out", job.Job.build
    plan(source, out)

    def late(*given: Any) -> Any:
        monkeypatch.undo()
        pack(source, out)
        return build(*given)

    monkeypatch.setattr(job.Job, "build", late)
    [done] = pack(source, out)
    assert done.already


def test_an_equal_plan_that_was_not_made_ahead_is_not_taken_for_the_one_that_was(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, build = tmp_path / "out", job.Job.build
    plan(source, out)

    def late(*given: Any) -> Any:
        monkeypatch.undo()
        (out / lock.JOURNAL).unlink()
        pack(source, out, part=(1, 2), **PLANNED)
        return build(*given)

    monkeypatch.setattr(job.Job, "build", late)
    with pytest.raises(SourceChangedError, match=r"the plan that was here is gone.*again"):
        pack(source, out, part=(2, 2))


def test_a_packing_that_was_begun_without_a_plan_is_told_to_be_finished(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    pack(source, out, part=(1, 2), **PLANNED)
    with pytest.raises(SourceChangedError, match="it was begun without `shardio plan`"):
        plan(source, out)
    plan(source, out, restart=True)
    assert not shards(out)
    parts(source, out)


def test_a_part_that_lists_joins_an_equal_plan(source: Path, tmp_path: Path) -> None:
    plan(source, tmp_path / "out")
    pack(source, tmp_path / "out", part=(1, 2), restart=True, **PLANNED)
    with pytest.raises(SourceChangedError, match="of another plan"):
        plan(source, tmp_path / "out", seed=5)
    parts(source, tmp_path / "out")


def test_gc_keeps_a_plan_that_nobody_has_begun_to_build(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pack(source, out)
    plan(source, out, overwrite=True, seed=2)
    assert gc.gc(out, keep_s=0).removed == []
    parts(source, out, overwrite=True)


def test_the_journal_of_another_version_is_an_error_until_told_to_go_on(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    plan(source, out)
    data = (out / lock.JOURNAL).read_bytes()
    (out / lock.JOURNAL).write_bytes(data.replace(b"shardio-plan 1", b"shardio-plan 0"))
    for call in (plan, pack):
        with pytest.raises(DamageError, match=r"it is of another version\. .*--restart"):
            call(source, out)
    plan(source, out, restart=True)
    parts(source, out)


@pytest.mark.parametrize("options", [{"part": (1, 2)}, {"part": "auto"}])
def test_a_plan_is_of_all_parts(options: dict[str, Any], source: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="part: a plan is of all parts"):
        plan(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_store_alone_and_files_that_are_read_as_a_whole_are_refused_at_once(
    source: Path, tmp_path: Path, unlisted: Callable[[], None]
) -> None:
    pack(source, tmp_path / "packed")
    library.export(tmp_path / "packed", tmp_path / "tars", format="webdataset")
    unlisted()
    with pytest.raises(OptionError, match="without an index can only be read as a whole; make one"):
        plan(tmp_path / "tars", tmp_path / "out")
    with pytest.raises(OptionError, match=r"s3://bucket/out: parts .*: --work-dir DIR"):
        library.plan(source, "s3://bucket/out")


def test_the_command_line_says_what_is_planned_and_what_comes_next(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    said = shardio("plan", source, out, "--max-records", "4").stdout.splitlines()
    assert said == [
        f"{out}: planned: 24 files, 3 classes, 7.3 KiB, in 6 shards",
        f"next: shardio pack {source} {out} --part I/N for I from 1 to N, then shardio "
        f"commit {out}",
    ]
    wrong = shardio("pack", source, out, "--part", "1/2", "--max-records", "5", code=2).stderr
    assert "option --max-records: was 4, now 5" in wrong
    assert shardio("plan", source, out, "--seed", "4", code=1).stderr.endswith("--restart\n")
    for part in ("1/2", "2/2"):
        built = shardio("pack", source, out.name, "--part", part, cwd=tmp_path).stdout
        assert built.startswith("out: 12 files")  # as it was given
        assert built.endswith("next: shardio commit out, when all parts are built\n")
    shardio("commit", out)
    again = shardio("pack", source, out, "--part", "1/2", "--max-records", "4").stdout
    assert "already packed" in again and "next:" not in again
    assert "by the plan that was made here; SRC was not looked at" in again
    plant(source, {"class0/empty.jpg": b""})
    facts = shardio_json("plan", source, tmp_path / "other", code=4)["datasets"][0]
    assert (facts["planned"], facts["joined"], facts["records"]) == (True, False, 24)
    assert facts["rejected"] == [{"key": "class0/empty.jpg", "reason": "is empty"}]
