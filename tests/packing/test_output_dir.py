"""The directory that is packed into: what is refused there, what stays, and who owns it."""

import multiprocessing
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import LIMIT_S
from support.packing import pack_one, unlisted
from support.trees import (
    command,
    content,
    environment,
    images,
    noise,
    plant,
    shardio,
)

from shardio.errors import (
    BusyError,
    ExistsError,
    OptionError,
    StorageError,
)
from shardio.images import decode as image
from shardio.packing import journal
from shardio.packing.commit import commit
from shardio.packing.options import PackOptions
from shardio.packing.pack import pack
from shardio.packing.plan import make_plan
from shardio.packing.sources import imagefolder
from shardio.packing.sources.base import SourceRequest
from shardio.packing.writer import Writer
from shardio.storage import lock


def test_another_dataset_is_refused_and_stays(source: Path, tmp_path: Path) -> None:
    pack_one(source, tmp_path / "out")
    before = content(tmp_path / "out")
    with pytest.raises(ExistsError, match="--overwrite"):
        pack_one(source, tmp_path / "out", seed=1)
    with pytest.raises(ExistsError):
        pack_one(source, tmp_path / "out", seed=1, part=(1, 2))
    with pytest.raises(ExistsError):
        pack_one(source, tmp_path / "out", seed=1, dry_run=True)
    assert content(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seed": 1}, "seed: was 0, now 1"),
        ({"shuffle": False}, "shuffle: was True, now False\n"),
        ({"max_records": 5}, "max_records: was 4, now 5"),
        ({"shard_size": "64MB"}, "shard_size: was 1MiB, now 64MB"),
        ({"resize": 9}, "resize: was not given, now 9\nGive the options that it has"),
    ],
)
def test_another_dataset_is_refused_before_the_source_is_listed(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    said: str,
) -> None:
    pack_one(source, tmp_path / "out")
    unlisted(monkeypatch)
    for more in ({}, {"part": (1, 2)}, {"dry_run": True}):
        with pytest.raises(ExistsError, match="--overwrite") as caught:
            pack_one(source, tmp_path / "out", **options, **more)
        assert said in str(caught.value)
    with pytest.raises(AssertionError, match="listed"):
        pack_one(source, tmp_path / "out", **options, overwrite=True)


def test_a_size_that_followed_from_the_source_is_named_where_it_differs(
    source: Path, tmp_path: Path
) -> None:
    pack_one(source, tmp_path / "out", shard_size="2MB")
    with pytest.raises(
        ExistsError, match=r":\n  option shard_size: was 2MB, now 1MiB, the default\nGive"
    ):
        pack_one(source, tmp_path / "out")
    (source / "class0" / "more.jpg").write_bytes(noise("more", 300))
    with pytest.raises(ExistsError, match=r"id \w+\):\n  records, their sizes, .* are others\nCh"):
        pack_one(source, tmp_path / "out", shard_size="2MB")


def test_another_source_is_said_to_be_the_difference_not_the_size_of_shards_that_follows(
    source: Path, tmp_path: Path
) -> None:
    pack(source, tmp_path / "out", jobs=1)
    plant(tmp_path / "other", {"class0/large.ppm": image.ppm(np.zeros((2500, 2500, 3), np.uint8))})
    with pytest.raises(ExistsError, match=r"id \w+\):\n  records, their sizes, .* are others\nCh"):
        pack(tmp_path / "other", tmp_path / "out", jobs=1)


def test_the_dataset_of_a_writer_is_refused_before_the_source_is_listed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Writer(tmp_path / "out") as writer:
        writer.write({"n": 1})
    unlisted(monkeypatch)
    with pytest.raises(ExistsError, match="source: was 'writer', now 'imagefolder'"):
        pack_one(source, tmp_path / "out")


@pytest.mark.parametrize("arguments", [["pack"], ["pack", "--seed", "3"], ["pack", "--overwrite"]])
def test_a_second_packer_is_told_at_once_and_touches_nothing(
    source: Path, tmp_path: Path, arguments: list[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    made = make_plan(
        imagefolder.image_folder(SourceRequest(os.fsencode(source)))[""],
        PackOptions(max_records=4, shuffle=True),
    )
    (out / lock.JOURNAL).write_bytes(b"".join(journal.dump(made)))
    before = content(out)
    held = lock.take(str(out))  # from here on, reading the journal would end the lock
    try:
        name, *more = arguments
        done = shardio(name, source, out, *more, code=5)
        assert "another shardio process is packing here" in done.stderr
        assert shardio("commit", out, code=5).stdout == ""
    finally:
        held.release()
    assert content(out) == before


@pytest.mark.parametrize(("start", "stop", "refuses"), [(0, None, True), (4, 6, False)])
def test_a_part_is_told_at_once_of_who_holds_all_but_not_of_other_parts(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start: int,
    stop: int | None,
    refuses: bool,
) -> None:
    out = tmp_path / "out"
    pack_one(source, out, part=(1, 3))
    ours, theirs = multiprocessing.Pipe()

    def hold() -> None:
        held = lock.take(str(out), start, stop)
        theirs.send(None)
        theirs.recv()
        held.release()

    holder = multiprocessing.get_context("fork").Process(target=hold)
    holder.start()
    ours.recv()
    try:
        with monkeypatch.context() as patch:
            unlisted(patch)
            with pytest.raises(BusyError if refuses else AssertionError):
                pack_one(source, out, part=(2, 3))
            with pytest.raises(BusyError):
                pack_one(source, out)
        if not refuses:
            assert pack_one(source, out, part=(2, 3)).built == 2
    finally:
        ours.send(None)
        holder.join()


def test_two_packers_at_once_end_in_one_whole_dataset(source: Path, tmp_path: Path) -> None:
    pack_one(source, tmp_path / "one")
    arguments = command("pack", source, tmp_path / "out", "--max-records", "4", "--jobs", "1")
    running = [
        subprocess.Popen(
            arguments, env=environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    ends = [(process.communicate(timeout=LIMIT_S), process.returncode) for process in running]
    assert {code for _, code in ends} <= {0, 5}, ends
    assert 0 in {code for _, code in ends}
    assert content(tmp_path / "one") == content(tmp_path / "out")


def test_parts_at_once_do_not_disturb_each_other(source: Path, tmp_path: Path) -> None:
    pack_one(source, tmp_path / "one")
    running = [
        subprocess.Popen(
            command("pack", source, tmp_path / "out", "--max-records", "4", "--part", f"{i}/3"),
            env=environment(),
            stdout=subprocess.DEVNULL,
        )
        for i in (1, 2, 3)
    ]
    assert [process.wait(timeout=LIMIT_S) for process in running] == [0, 0, 0]
    commit(tmp_path / "out")
    assert content(tmp_path / "one") == content(tmp_path / "out")


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, free = os.statvfs, 0

    def small(path: Any) -> os.statvfs_result:
        found = list(real(path))
        found[1], found[4] = 1, free  # f_frsize, f_bavail
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", small)
    size = sum(path.stat().st_size for path in source.rglob("*.jpg"))
    free = size - 1
    for more in ({}, {"dry_run": True}, {"format": "lmdb"}):
        with pytest.raises(StorageError, match=r"out: .* are to be written, and .* are free there"):
            pack_one(source, tmp_path / "out", **more)
        assert not (tmp_path / "out").exists()
    free = size // 2 + 100
    pack_one(source, tmp_path / "out", part=(1, 2))
    assert pack_one(source, tmp_path / "out").kept > 0  # only the rest is to be written
    free = 0
    assert pack_one(source, tmp_path / "out").already


def test_out_may_not_lie_in_the_source(source: Path) -> None:
    for out in (source, source / "out", source / "class0" / ".." / "out"):
        with pytest.raises(OptionError, match="lies in the folder"):
            pack_one(source, out)
    assert not (source / "out").exists()


def test_the_source_may_lie_beside_out_with_a_longer_name(tmp_path: Path) -> None:
    pack_one(plant(tmp_path / "img", images()), tmp_path / "img-packed")


def test_out_may_not_be_a_file_or_a_dangling_link(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        with pytest.raises(OptionError, match="expected a directory"):
            pack_one(source, tmp_path / name)
    with pytest.raises(StorageError):
        pack_one(source, tmp_path / "file" / "below")
    assert (tmp_path / "file").read_bytes() == b"precious"


def test_other_files_in_out_stay(source: Path, tmp_path: Path) -> None:
    mine = {
        "notes.txt": b"mine",
        ".shardio-0123456789abcdef-mine.tmp": b"mine",
        "00009-01234567.shard": b"mine",
        "rejected.jsonl": b"mine",
        ".shardio-rejected-00001.jsonl": b"mine",
    }
    plant(tmp_path / "out", mine)
    pack_one(source, tmp_path / "out", restart=True)
    pack_one(source, tmp_path / "out", overwrite=True)
    left = content(tmp_path / "out")
    assert all(left[name.encode()] == data for name, data in mine.items())
