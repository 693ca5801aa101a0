"""Which folder a path leads to, through archives, and which kind of source it is."""

import gzip
import json
import re
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import sources
from support.archives import FORMS, class_tars, deflated, tar, write, zipped
from support.sources import kind_of
from support.trees import JPEG, content, images, noise, plant

from shardio.errors import OptionError, SourceError

pack_one = partial(sources.pack_one, max_records=9)


def test_a_path_leads_through_an_archive(tmp_path: Path) -> None:
    tree = {"food/images/pie/1.jpg": JPEG, "food/images/rice/2.jpg": noise("2", 50),
            "food/meta/classes.txt": b"pie\n"}  # fmt: skip
    source = write(tmp_path / "food.tar", tar(tree))
    inner = {key[12:]: data for key, data in tree.items() if key.startswith("food/images/")}
    pack_one(plant(tmp_path / "tree", inner), tmp_path / "right")
    pack_one(source / "food/images", tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "right")
    with pytest.raises(SourceError, match=r"no folder food/pictures/ in .*food.tar; at its top"):
        pack_one(source / "food/pictures", tmp_path / "none")


def test_texts_beside_the_folders_of_a_wrapped_archive_do_not_make_it_one_class(
    tmp_path: Path,
) -> None:
    folders = {"data/images/cat/1.jpg": JPEG, "data/images/dog/2.jpg": noise("2", 50)}
    source = write(tmp_path / "x.zip", zipped(folders | {"data/readme.txt": b"x"}))
    with pytest.raises(
        SourceError, match=r"give the folder .* such as \S+x.zip/data/images:\n.*me"
    ):
        pack_one(source, tmp_path / "none", on_error="skip")
    done = pack_one(source / "data/images", tmp_path / "out")
    assert (done.records, done.classes) == (2, 2)
    with_mask = {f"data/images/{key}": data for key, data in images(1, 2).items()}
    with_mask |= {f"data/masks/{key}": data for key, data in images(1, 2).items()}
    source = write(tmp_path / "y.zip", zipped(with_mask | {"data/readme.txt": b"x"}))
    assert "mask" in pack_one(source, tmp_path / "masks").fields
    loose = write(tmp_path / "z.zip", zipped(folders | {"data/1.jpg": JPEG}))
    assert pack_one(loose, tmp_path / "one class").classes == 1


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_path_leads_to_an_archive_in_an_archive(tmp_path: Path, jobs: int) -> None:
    """The others in it are not looked at, and do not disturb."""
    inner = {"cat.1.jpg": JPEG, "dog.2.jpg": noise("2", 50)}
    tree = {
        "all/train.zip": deflated(inner, "pets/"),
        "all/boxes.tgz": gzip.compress(b"damaged"),
        "all/deep/more.tar": tar({"one.zip": zipped(inner, "pets/")}),
        "all/readme.txt": b"x",
        "all/flat.tar": tar(inner),
    }
    source = write(tmp_path / "x.zip", deflated(tree))
    pack_one(plant(tmp_path / "tree", inner), tmp_path / "right", max_records=1)
    for path in ("train.zip/pets", "deep/more.tar/one.zip/pets/", "flat.tar"):
        out = tmp_path / path.replace("/", "_")
        pack_one(source / "all" / path, out, jobs=jobs, max_records=1)
        assert content(out) == content(tmp_path / "right"), path
    with pytest.raises(SourceError, match=r"no folder test/ in train.zip; at its top .*: pets/"):
        pack_one(source / "all/train.zip/test", tmp_path / "none")


@pytest.mark.parametrize("form", ["tar", "class tars"])
def test_texts_beside_class_folders_are_left_out_as_is_said(tmp_path: Path, form: str) -> None:
    """Nobody can move them away within an archive."""
    readme = {"README": b"text"}
    if form == "tar":
        source = write(tmp_path / "x.tar", tar(images() | readme))
    else:
        source = plant(tmp_path / "x", class_tars(images()) | readme)
    with pytest.raises(SourceError) as caught:
        pack_one(source, tmp_path / "out", kind="imagefolder")
    said = re.search("--label '(.*)' --on-error (skip)", str(caught.value))
    assert said is not None
    given = {"label": said[1], "on_error": said[2], "kind": "imagefolder"}
    done = pack_one(source, tmp_path / "out", **given)
    right = pack_one(plant(tmp_path / "tree", images()), tmp_path / "right")
    assert [key for key, _ in done.rejected] == ["README"]
    assert (done.records, done.classes) == (right.records, right.classes)


def test_texts_beside_one_folder_are_left_out_by_its_path(tmp_path: Path) -> None:
    source = write(tmp_path / "x.tar", tar({"data/a/1.jpg": JPEG, "README": b"text"}))
    with pytest.raises(SourceError, match=r"as SRC, such as .*/x\.tar/data:"):
        pack_one(source, tmp_path / "out")
    assert pack_one(source / "data", tmp_path / "out").records == 1


@pytest.mark.parametrize(
    ("tree", "kind"),
    [
        ({"1.jpg": JPEG, "1.cls": b"1", "2.jpg": JPEG, "2.cls": b"2"}, "webdataset"),
        ({"a/1.jpg": JPEG, "a/1.cls": b"1", "b/2.jpg": JPEG, "b/2.cls": b"2"}, "webdataset"),
        ({"1.jpg": JPEG, "1.seg.png": b"\x89PNG\r\n\x1a\n", "2.jpg": JPEG}, "webdataset"),
        ({"1.npy": b"x", "1.txt": b"x"}, "webdataset"),
        ({"a/1.jpg": JPEG, "b/2.jpg": JPEG}, "imagefolder"),
        ({"1.jpg": JPEG, "2.jpg": JPEG}, "imagefolder"),
        ({"a/1.jpg": JPEG, "b/1.txt": b"x"}, "imagefolder"),
        ({"images/1.jpg": JPEG, "masks/1.png": b"\x89PNG\r\n\x1a\n"}, "trees"),
    ],
)
def test_which_kind_a_tar_is(tree: Any, kind: str, tmp_path: Path) -> None:
    assert kind_of(write(tmp_path / "x.tar", tar(tree))) == kind


def test_what_can_be_both_is_asked(tmp_path: Path) -> None:
    tree: Any = {f"{c}/{i}.{end}": JPEG for c in "ab" for i in "12" for end in ("jpg", "txt")}
    source = write(tmp_path / "x.tar", tar(tree))
    with pytest.raises(OptionError, match="--from webdataset"):
        kind_of(source)
    assert kind_of(source, kind="imagefolder") == "imagefolder"
    assert kind_of(source, kind="webdataset") == "webdataset"
    shards = {f"{i:05}.tar": tar({f"{i}{j}.jpg": JPEG for j in range(3)}) for i in range(3)}
    folder = plant(tmp_path / "numbered", shards)
    with pytest.raises(OptionError, match=r"numbered.*\n.*each tar is a class"):
        kind_of(folder)
    assert pack_one(folder, tmp_path / "out", kind="imagefolder").classes == 3
    assert pack_one(folder, tmp_path / "wds", kind="webdataset").classes is None


def test_a_few_files_beside_images_do_not_ask(tmp_path: Path) -> None:
    tree: Any = {f"{c}/{i}.jpg": JPEG for c in "ab" for i in range(5)} | {"a/1.txt": b"x"}
    assert kind_of(write(tmp_path / "x.tar", tar(tree))) == "imagefolder"
    hidden = {f"{c}/._{i}.jpg": b"\0\5" for c in "ab" for i in range(5)}
    assert kind_of(write(tmp_path / "y.tar", tar({**tree, **hidden}))) == "imagefolder"


def test_labels_do_not_depend_on_what_comes_first_in_a_tar(tmp_path: Path) -> None:
    tree: Any = {f"meta/{i:05}.txt": b"x" for i in range(11_000)}
    tree |= {f"train/{c}/{i}.jpg": noise(f"{c}{i}", 60) for c in "ab" for i in range(3)}
    assert kind_of(write(tmp_path / "x.tar", tar(tree, form=tarfile.USTAR_FORMAT))) == "imagefolder"


def test_groups_in_a_zip_are_records_of_several_files(tmp_path: Path) -> None:
    tree: Any = {
        f"{i}.{end}": data for i in range(3) for end, data in (("jpg", JPEG), ("txt", b"a"))
    }
    pack_one(plant(tmp_path / "tree", tree), tmp_path / "right")
    for form in ("deflated.zip", "a.tar.gz"):
        pack_one(write(tmp_path / form, FORMS[form](tree)), tmp_path / f"out {form}")
        assert content(tmp_path / f"out {form}") == content(tmp_path / "right")


def test_the_root_of_a_listing_may_be_an_archive(tmp_path: Path) -> None:
    tree = {f"pics/{i}.jpg": noise(str(i), 60 + i) for i in range(4)}
    rows = "".join(f"{i}.jpg,{'ab'[i % 2]}\n" for i in range(4))
    table = plant(tmp_path, {"t.csv": f"path,label\n{rows}".encode()}) / "t.csv"
    plant(tmp_path / "tree", tree)
    pack_one(table, tmp_path / "right", root=str(tmp_path / "tree/pics"))
    write(tmp_path / "x.zip", deflated(tree))
    pack_one(table, tmp_path / "out", root=str(tmp_path / "x.zip/pics"))
    assert content(tmp_path / "out") == content(tmp_path / "right")
    with pytest.raises(SourceError, match=r"none of the files .*x.zip; at its top 1 folder: pics/"):
        pack_one(table, tmp_path / "none", root=str(tmp_path / "x.zip"))
    plant(tmp_path, {"t.csv": b"path\nseven\n"})
    with pytest.raises(SourceError, match=r"x.zip/pics; at its top 4 files: 0.jpg, 1.jpg, 2.jpg"):
        pack_one(table, tmp_path / "none", root=str(tmp_path / "x.zip/pics"))


def test_the_root_of_coco_may_be_an_archive(tmp_path: Path) -> None:
    pictures: dict[str | bytes, bytes | None] = {"val/1.jpg": JPEG}
    root = write(tmp_path / "val.zip", deflated(pictures))
    about = {"images": [{"id": 1, "file_name": "1.jpg"}], "annotations": [], "categories": []}
    file = plant(tmp_path, {"coco.json": json.dumps(about).encode()}) / "coco.json"
    assert pack_one(file, tmp_path / "out", root=str(root / "val")).records == 1
    with pytest.raises(
        SourceError, match=r"none of its images .*val.zip; at its top 1 folder: val/"
    ):
        pack_one(file, tmp_path / "none", root=str(root))


def test_the_root_of_a_listing_may_be_a_folder_of_archives(tmp_path: Path) -> None:
    """As of Open Images: each archive holds a folder."""
    trees = {f"train_{i}/{i}.jpg": noise(str(i), 60 + i) for i in range(3)}
    rows = "".join(f"{path}\n" for path in trees)
    table = plant(tmp_path, {"t.csv": f"path\n{rows}".encode()}) / "t.csv"
    for i, (path, data) in enumerate(trees.items()):
        write(tmp_path / f"tars/{i}.tar.gz", gzip.compress(tar({path: data})))
    pack_one(table, tmp_path / "right", root=str(plant(tmp_path / "tree", trees)))
    pack_one(table, tmp_path / "out", root=str(tmp_path / "tars"), jobs=2, max_records=9)
    assert content(tmp_path / "out") == content(tmp_path / "right")
    plant(tmp_path / "tars", trees)  # unpacked beside them: what is unpacked counts, as always
    pack_one(table, tmp_path / "again", root=str(tmp_path / "tars"))
    assert content(tmp_path / "again") == content(tmp_path / "right")


@pytest.mark.parametrize("path", ["./c0/1.jpg", "c0//1.jpg", "c0/../c0/1.jpg"])
@pytest.mark.parametrize("form", ["pax.tar", "deflated.zip"])
def test_paths_of_a_listing_may_be_roundabout(path: str, form: str, tmp_path: Path) -> None:
    root = write(tmp_path / form, FORMS[form]({"c0/1.jpg": JPEG}))
    table = plant(tmp_path, {"t.csv": f"path\n{path}\n".encode()}) / "t.csv"
    assert pack_one(table, tmp_path / "out", root=str(root)).records == 1


def test_slashes_at_the_end_of_an_archive_do_no_harm(tmp_path: Path) -> None:
    write(tmp_path / "x.tar", tar(images(), "data/"))
    for i, path in enumerate(("x.tar/", "x.tar//data", "x.tar/data/")):
        assert pack_one(f"{tmp_path}/{path}", tmp_path / f"{i}").records == 24  # type: ignore[arg-type]


def test_files_that_are_zips_are_still_files_where_it_is_said(tmp_path: Path) -> None:
    tree: Any = {f"{i}.{end}": b"{}" for i in range(3) for end in ("json", "zip")}
    assert pack_one(plant(tmp_path / "src", tree), tmp_path / "out", kind="files").records == 3
