"""Files of labels may lie in archives; errors name them by the path that was given."""

import re
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support.archives import tar, zipped
from support.labels import FLAT, lines, pack_records
from support.packing import grouped
from support.trees import content, noise, plant

from shardio import pack
from shardio.errors import SourceError
from shardio.packing.sources.files import MISSING


def test_an_archive_is_no_table(tmp_path: Path) -> None:
    plant(tmp_path / "in", FLAT)
    (tmp_path / "l.zip").write_bytes(zipped({"l.csv": b"id,n\n"}))
    with pytest.raises(SourceError, match=r"l.zip: .*archive; give the path of a file in it"):
        pack_records(tmp_path / "in", tmp_path / "out", tables=str(tmp_path / "l.zip"))


def test_images_and_tables_in_archives_give_the_same_dataset(tmp_path: Path) -> None:
    labels = lines("{0} {1}\n")
    tree = {f"data/images/{key}": one for key, one in FLAT.items()}
    tree["data/meta/labels.txt"] = labels.encode()
    plant(tmp_path, tree)
    (tmp_path / "a.tar").write_bytes(tar(tree))
    (tmp_path / "b.zip").write_bytes(zipped(tree, way=zipfile.ZIP_DEFLATED))
    with tarfile.open(tmp_path / "c.tgz", "w:gz") as file:
        file.add(tmp_path / "data", "data")
    for i, folder in enumerate(["data", "a.tar/data", "b.zip/data", "c.tgz/data"]):
        table = str(tmp_path / folder / "meta/labels.txt")
        lists = {"train": table}
        out = tmp_path / f"out{i}"
        options = grouped({"jobs": 2, "tables": [table], "split_files": lists})
        pack(tmp_path / folder / "images", out, **options)
        assert content(out) == content(tmp_path / "out0")


def test_an_error_in_a_table_of_an_archive_names_the_archive(tmp_path: Path) -> None:
    plant(tmp_path / "images", FLAT)
    source = tmp_path / "lists.zip"
    source.write_bytes(zipped({"deep/x.mat": b"MATLAB 5.0 MAT-file\0", "y.csv": b"a,b\n1,2,3\n"}))
    for name, why in (("deep/x.mat", "line 1: it has a byte of 0"), ("y.csv", "line 2: ")):
        with pytest.raises(SourceError, match=rf"\A\S+/lists.zip/{name}: {why}"):
            pack_records(tmp_path / "images", tmp_path / "out", tables=[str(source / name)])


def test_a_table_that_an_archive_has_not_or_has_damaged_is_named(tmp_path: Path) -> None:
    plant(tmp_path / "images", FLAT)
    whole = zipped({"l.csv": b"id,n\n" + lines("{0},{1}\n").encode()})
    at = whole.index(b"id,n")
    (tmp_path / "x.zip").write_bytes(whole[:at] + b"ID" + whole[at + 2 :])
    for name, why in (("none.csv", MISSING), ("l.csv", r"cannot be read from .*x\.zip")):
        table = tmp_path / "x.zip" / name
        with pytest.raises(SourceError, match=rf"\A{re.escape(str(table))}: {why}"):
            pack_records(tmp_path / "images", tmp_path / "out", tables=[str(table)])


@pytest.mark.parametrize("option", [{"tables": ["none.csv"]}, {"split_files": {"a": "none.csv"}}])
def test_a_file_of_this_folder_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: dict[str, Any]
) -> None:
    plant(tmp_path / "in", {"1.jpg": noise("1", 60)})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match=r"^none\.csv: expected a file, and there is none$"):
        pack_records("in", tmp_path / "out", **option)
