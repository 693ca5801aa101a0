"""`pack`: its summary, dry runs, and what it says where it cannot pack."""

import os
import re
from pathlib import Path

import pytest
from support.trees import JPEG, images, picture, plant, shardio, shardio_json

import shardio as library
from shardio.errors import StorageError


def test_pack_sums_up(source: Path, tmp_path: Path) -> None:
    said = shardio("pack", source, tmp_path / "out", "--max-records", "10")
    assert re.search(r"out: 24 files, 3 classes, 7\.3 KiB -> 3 shards, .* MB/s", said.stdout)
    assert said.stderr == ""
    assert (
        "already packed" in shardio("pack", source, tmp_path / "out", "--max-records", "10").stdout
    )
    assert shardio("pack", source, tmp_path / "q", "--quiet").stdout == ""


def test_pack_says_what_it_left_out_and_ignored(tmp_path: Path) -> None:
    tree = {**images(), "class0/Thumbs.db": b"?", "class0/no.jpg": b"\x1b]0;evil\x07"}
    source = plant(tmp_path / "src", tree)
    failed = shardio("pack", source, tmp_path / "out", code=1)
    assert "class0/no.jpg" in failed.stderr
    assert "--on-error skip" in failed.stderr
    assert "\x1b" not in failed.stderr
    done = shardio("pack", source, tmp_path / "out", "--on-error", "skip", code=4)
    assert "ignored: 1 file or folder\n" in done.stdout
    assert "1 file left out" in done.stdout
    assert "class0/no.jpg" in done.stdout


def test_each_way_out_that_a_failed_packing_offers_works(tmp_path: Path) -> None:
    """Each line of its message, given by itself."""
    tree = {"a/1.png": picture(9, 8, "PNG"), "a/2.png": picture(8, 8, "PNG"), "a/3.png": b"no"}
    source = plant(tmp_path / "src", tree)
    one = ("pack", source, tmp_path / "out")
    assert re.findall(r"^  (--.*?)   ", shardio(*one, code=1).stderr, re.M) == [
        "--on-error skip",
        "--restart",
    ]
    shardio(*one, "--on-error", "skip", code=4)
    raw = ("pack", source, tmp_path / "raw", "--encode", "raw")
    (source / "a" / "3.png").unlink()
    said = shardio(*raw, code=1).stderr
    assert "1 file cannot be packed" in said
    assert re.findall(r"^  (--.*?)   ", said, re.M) == [
        "--on-error skip",
        "--restart --resize N",
        "--restart",
    ]
    shardio(*raw, "--restart", "--resize", "8")
    raw = (*raw[:2], tmp_path / "raw2", *raw[3:])
    shardio(*raw, code=1)
    plant(source, {"a/2.png": picture(9, 8, "PNG")})
    os.utime(source / "a" / "2.png")
    shardio(*raw, "--restart")


def test_a_dry_run_says_the_plan(source: Path, tmp_path: Path) -> None:
    said = shardio("pack", source, tmp_path / "out", "--dry-run").stdout
    assert "would pack 24 files, 3 classes, 7.3 KiB into 1 shard" in said
    planned = shardio_json("pack", source, tmp_path / "out", "--dry-run")
    assert (planned["dry_run"], planned["datasets"][0]["shards"]) == (True, 1)
    assert not (tmp_path / "out").exists()
    shardio("pack", source, tmp_path / "out", "--part", "1/2", "--max-records", "4")
    said = shardio("pack", source, tmp_path / "out", "--dry-run", "--max-records", "4").stdout
    assert "into 6 shards; 3 of these are there, to be checked" in said
    shardio("pack", source, tmp_path / "out", "--max-records", "4")
    said = shardio("pack", source, tmp_path / "out", "--dry-run", "--max-records", "4").stdout
    assert "already packed" in said
    assert "would pack" not in said
    said = shardio("pack", source, tmp_path / "out", "--dry-run", code=1).stderr
    assert "another dataset is packed here" in said


def test_a_dry_run_says_what_cannot_be_packed(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", {"a/x.jpg": JPEG, "a/empty.jpg": b""})
    said = shardio("pack", source, tmp_path / "out", "--dry-run", code=1).stdout
    assert "1 file cannot be packed, so nothing would be" in said
    said = shardio("pack", source, tmp_path / "out", "--dry-run", "--on-error", "skip", code=4)
    assert "1 file would be left out" in said.stdout


def test_a_place_where_nothing_may_be_written_is_said_before_the_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK and real(path, mode))
    with pytest.raises(StorageError, match=f"new/out: no permission to write into {tmp_path}"):
        library.pack(source, tmp_path / "new" / "out", progress=lambda *_: pytest.fail("it began"))
    with pytest.raises(StorageError, match=r"no permission to write the index beside .* --out"):
        library.index(source, progress=lambda *_: pytest.fail("it began"))
