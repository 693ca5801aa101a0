"""The receipt of an export: which files it wrote, and may replace or remove; others stay."""

import contextlib
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support import small_datasets
from support.crashing import traced
from support.exporting import (
    FORMATS,
    SHARDED,
    N,
    left,
)
from support.trees import content, plant, shardio

from shardio.errors import (
    ExistsError,
    StorageError,
)
from shardio.packing.export import export

Packed = Callable[..., Path]


@pytest.mark.parametrize("name", FORMATS)
def test_a_directory_with_files_is_refused_and_untouched(
    plain: Path, tmp_path: Path, name: str
) -> None:
    plant(tmp_path / "x", {"mine": b"1"})
    with pytest.raises(ExistsError, match="mine is in it"):
        export(plain, tmp_path / "x", format=name)
    assert content(tmp_path / "x") == {b"mine": b"1"}


@pytest.mark.parametrize("name", FORMATS)
def test_overwriting_replaces_what_an_older_export_wrote(
    plain: Path, packed: Packed, tmp_path: Path, name: str
) -> None:
    size = {"shard_size": 12_000} if name in SHARDED else {}
    longer = packed([40], "longer", image=lambda i: small_datasets.jpeg(i + 100))
    first = export(longer, tmp_path / "x", format=name, **size)
    plant(tmp_path / "x", {"mine": b"1", "0.tar": b"2", "sub/00099.tar": b"3"})
    done = export(plain, tmp_path / "x", format=name, overwrite=True, **size)
    export(plain, tmp_path / "y", format=name, **size)
    mine = {b"mine": b"1", b"0.tar": b"2", b"sub": None, b"sub/00099.tar": b"3"}
    found, expected = content(tmp_path / "x"), content(tmp_path / "y") | mine
    if (
        name == "imagefolder"
    ):  # 23 of its 40 files were replaced; no reader takes the others for shards
        assert found.items() >= expected.items() and len(found) == len(expected) + 40 - N
    else:
        assert found == expected
    fewer = first.files - (1 if name == "parquet" else done.files)  # whose names say how many
    assert done.removed == (fewer if name in SHARDED else 0)


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("name", ["webdataset", "imagefolder"])
def test_an_export_that_was_killed_between_its_last_renames_goes_on(
    packed: Packed, tmp_path: Path, name: str
) -> None:
    first = packed([25], "first", image=small_datasets.jpeg)
    more = ["--format", name, *(["--shard-size", "6000"] if name == "webdataset" else [])]
    shardio("export", first, tmp_path / "expected", *more)
    out, files = tmp_path / "x", len(left(tmp_path / "expected"))
    # Each shard and its index takes a name in the hidden folder; then the receipt; then all again.
    which = 3 if name == "imagefolder" else files + 3
    inject = f"inject=rename:signal=SIGKILL:when={which}"
    export_it = ("export", first, out, *more)
    done = traced(export_it, "-o", os.devnull, "-e", "trace=rename", "-e", inject)
    assert done.returncode == -signal.SIGKILL, done
    there = [one for one in left(out) if not one.startswith(".")]
    assert 0 < len(there) < files - (name == "webdataset")
    with pytest.raises(ExistsError, match="is not empty"):
        export(packed([5], "other", image=small_datasets.jpeg), out, format=name)
    plant(out, {"mine.txt": b"1"})
    size = {"shard_size": 6000} if name == "webdataset" else {}
    with pytest.raises(ExistsError, match=r"mine.txt is none of its files"):
        export(first, out, format=name, **size)
    (out / "mine.txt").unlink()
    its = min([out / there[0], *(out / there[0]).rglob("*")], key=os.path.isdir)
    right = its.read_bytes()
    its.write_bytes(b"a user's own")
    with pytest.raises(ExistsError, match=rf"{its.name} is none of its files, or was changed"):
        export(first, out, format=name, **size)
    assert its.read_bytes() == b"a user's own"
    its.write_bytes(right)
    shardio("export", first, out, *more)
    assert content(out) == content(tmp_path / "expected")


@pytest.mark.parametrize("name", [*SHARDED, "lmdb-caffe"])
def test_files_of_others_are_neither_replaced_nor_removed(
    plain: Path, packed: Packed, tmp_path: Path, name: str
) -> None:
    size = {"shard_size": 20_000} if name in SHARDED else {}
    out = tmp_path / "x"
    export(plain, out, format=name, **size)
    files = [path for path in sorted(out.iterdir()) if not path.name.startswith(".")]
    for mistyped in (tmp_path / "mistyped", out):  # the names alone; then one that was changed
        if mistyped != out:
            plant(mistyped, {path.name: b"mine" for path in files})
        else:
            data = files[0].read_bytes()
            files[0].write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        before = content(mistyped)
        with pytest.raises(ExistsError, match=re.escape(files[0].name)):
            export(
                packed([1], "one", image=small_datasets.jpeg), mistyped, format=name, overwrite=True
            )
        assert content(mistyped) == before
        shutil.rmtree(tmp_path / "one")
    files[0].write_bytes(data)
    (out / ".shardio-export").unlink()
    with pytest.raises(ExistsError, match="no export wrote here"):
        export(plain, out, format=name, overwrite=True)


def test_a_receipt_that_was_edited_leads_nowhere(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "x"
    export(plain, out, format="webdataset")
    shutil.copy(out / "00000.tar", tmp_path / "00000.tar")
    (tmp_path / "folder").mkdir()
    shutil.copy(out / "00000.tar", tmp_path / "folder")
    (out / "link").symlink_to(tmp_path / "folder")
    text = (out / ".shardio-export").read_text()
    for odd in ("../00000.tar", str(tmp_path / "00000.tar"), "link/00000.tar"):
        found = json.loads(text)
        found["files"][odd] = found["files"]["00000.tar"]
        (out / ".shardio-export").write_text(json.dumps(found))
        with contextlib.suppress(ExistsError):
            export(plain, out, format="webdataset", overwrite=True)
        assert (tmp_path / "00000.tar").exists() and (tmp_path / "folder" / "00000.tar").exists()
    for text in ("", "[]", '{"files": []}', "[" * 10_000, '{"files": {"a": [[1]]}}'):
        (out / ".shardio-export").write_text(text)
        with pytest.raises(ExistsError, match="no export wrote here"):
            export(plain, out, format="webdataset", overwrite=True)


def test_a_link_is_never_followed(plain: Path, tmp_path: Path) -> None:
    plant(tmp_path / "other", {"file": b"1", "folder/x": b"2"})
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "00000.tar").symlink_to(tmp_path / "other" / "file")
    with pytest.raises(ExistsError, match=r"00000\.tar"):
        export(plain, tmp_path / "x", format="webdataset", overwrite=True)
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "cat").symlink_to(tmp_path / "other" / "folder")
    with pytest.raises(StorageError, match="a file or link is where a folder is to be"):
        export(plain, tmp_path / "y", format="imagefolder", overwrite=True)
    assert content(tmp_path / "other") == {b"file": b"1", b"folder": None, b"folder/x": b"2"}
