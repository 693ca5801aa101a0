"""Which kind of source lies at a path: told by names and first bytes, or asked for."""

from pathlib import Path

import pytest
from support.archives import write
from support.sources import kind_of, pack_one
from support.trees import JPEG, content, grouped_files, images, plant, shardio

from shardio import pack
from shardio.errors import OptionError, SourceError


def test_images_with_files_beside_them_and_no_class_folders_are_grouped(tmp_path: Path) -> None:
    assert kind_of(plant(tmp_path / "a", grouped_files(2))) == "files"
    assert kind_of(plant(tmp_path / "b", grouped_files(2) | {"deep/x.jpg": JPEG})) == "files"
    one = {f"{i}.jpg": JPEG for i in range(99)}
    assert kind_of(plant(tmp_path / "c", one | {"7.Json": b"{}"})) == "files"


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"notes.txt": b"of no image"},
        {".000.txt": b"hidden"},
        {"000.xml": b"of a kind that is not known"},
        {".a.jpg": JPEG, ".b.txt": b"hidden"},
        {"000.txt/x.jpg": JPEG},  # a folder
    ],
)
@pytest.mark.parametrize("top", ["", "train/"])
def test_other_files_do_not_make_records_of_several(
    tmp_path: Path, more: dict[str, bytes], top: str
) -> None:
    tree = {"000.jpg": JPEG, "001.jpg": JPEG} | more
    assert (
        kind_of(plant(tmp_path, {top + key: data for key, data in tree.items()})) == "imagefolder"
    )


def classes(each: int, beside: int) -> dict[str | bytes, bytes | None]:
    tree = images(2, each)
    return tree | {f"class1/{i:03d}.txt": b"caption" for i in range(beside)}


def test_class_folders_with_as_many_files_beside_images_cannot_be_told(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", classes(4, 4))
    with pytest.raises(OptionError, match=r"4 of 8 images") as caught:
        pack_one(source, tmp_path / "out")
    assert "--from imagefolder" in str(caught.value) and "--from files" in str(caught.value)
    assert "class1/000.jpg and class1/000.txt" in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert shardio("pack", source, tmp_path / "out", code=2).stdout == ""
    done = pack_one(source, tmp_path / "files", kind="files")
    assert (done.source, done.records, done.classes) == ("files", 8, None)
    done = pack_one(source, tmp_path / "images", kind="imagefolder", on_error="skip")
    assert (done.source, done.records, done.classes) == ("imagefolder", 8, 2)
    with pytest.raises(OptionError, match="cannot be told"):  # in splits too
        pack(
            plant(tmp_path / "s", {f"train/{k}": d for k, d in classes(4, 4).items()}),
            tmp_path / "o",
        )


def test_class_folders_with_fewer_are_images_and_the_problems_say_what_to_do(
    tmp_path: Path,
) -> None:
    source = plant(tmp_path / "src", classes(4, 3) | {"class0/other.txt": b"alone"})
    with pytest.raises(SourceError, match="4 files") as caught:
        pack_one(source, tmp_path / "out")
    lines = str(caught.value).splitlines()
    assert all(("--from files" in line) == ("class1" in line) for line in lines if ".txt" in line)


def test_a_plain_folder_is_packed_as_if_asked_for(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", images())
    assert kind_of(source) == "imagefolder"
    pack_one(source, tmp_path / "told")
    pack_one(source, tmp_path / "asked", kind="imagefolder")
    assert content(tmp_path / "told") == content(tmp_path / "asked")


@pytest.mark.parametrize("name", ["x.7z", "x.rar", "x.z01", "x.zip.001"])
def test_other_archives_are_called_so(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, b"7z\xbc\xaf\x27\x1c")
    with pytest.raises(SourceError, match=f"{name}: an archive that is not read"):
        pack(tmp_path / name, tmp_path / "out")
