"""An archive is a folder: the same bytes come out of it as out of the tree that it was made of."""

import bz2
import errno
import gzip
import importlib
import io
import json
import lzma
import os
import re
import stat
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import LIMIT_S, archives
from support.archives import FORMS, class_tars, deflated, tar, write, zipped
from support.conformance import FileSourceConformance, change_file
from support.packing import grouped, interrupted
from support.trees import (
    JPEG,
    content,
    environment,
    images,
    noise,
    picture,
    plant,
    shardio,
)

from shardio import PlanOptions, SourceOptions, commit, pack, unpack
from shardio import plan as plan_ahead
from shardio.errors import (
    DamageError,
    OptionError,
    ShardioError,
    SourceChangedError,
    SourceError,
)
from shardio.formats.foreign.tar import Run
from shardio.packing import sources
from shardio.packing.gc import gc
from shardio.packing.packed import Packed
from shardio.packing.sources import archived
from shardio.packing.sources.archives import deflate, inflate, tar_members, tree
from shardio.packing.sources.archives.extent import extent_of
from shardio.packing.sources.archives.folder import ArchiveFolder, open_archive
from shardio.packing.sources.archives.inflate import Inflating
from shardio.packing.sources.archives.member_table import plain_path, plain_paths
from shardio.packing.sources.archives.tar_members import list_tar
from shardio.packing.sources.base import Problem, SourceRequest

# Names in any encoding, folders in classes, a class without images, and what is ignored.
TREE: dict[str | bytes, bytes | None] = {
    **images(),
    b"class0/caf\xe9 \xff.jpg": noise("latin", 700),
    "class0/ä\n.JPEG": noise("newline", 100),
    "class1/deep/er/x.png": b"\x89PNG\r\n\x1a\n" + bytes(90),
    "class1/" + "long" * 40 + ".jpg": noise("long", 333),
    "class2/@eaDir/x.jpg": noise("thumb", 50),
    "class2/.hidden.jpg": noise("hidden", 50),
    "class1/Thumbs.db": noise("behind images", 50),
    "__MACOSX/class0/._000.jpg": b"\0\5\x16\7",
}
ASCII = {key: data for key, data in TREE.items() if os.fsencode(key).isascii() and "ä" not in key}  # type: ignore[operator]


def pack_one(source: Path, out: Path, **options: Any) -> Packed:
    [done] = pack(source, out, **grouped({"jobs": 1, "max_records": 9} | options))
    return done


def told(source: Path, **wanted: Any) -> str | None:
    return sources.detect_kind(SourceRequest(os.fsencode(source), **wanted)).kind


def problems(source: Path) -> list[Problem]:
    found = sources.list_records(sources.detect_kind(SourceRequest(os.fsencode(source))))
    return found[""].problems


# --- the same dataset -----------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_archive_is_the_dataset_of_the_folder(form: str, tmp_path: Path) -> None:
    tree = TREE if "zip" not in form and "ustar" not in form else ASCII
    if form == "ustar.tar":
        tree = {key: data for key, data in tree.items() if len(os.fsencode(key)) < 100}
    pack_one(plant(tmp_path / "tree", tree), tmp_path / "right")
    source = write(tmp_path / form, FORMS[form](tree))
    assert "would pack" in shardio("pack", source, tmp_path / "dry", "--dry-run").stdout
    assert not (tmp_path / "dry").exists()
    pack_one(source, tmp_path / "out", jobs=2)
    assert content(tmp_path / "out") == content(tmp_path / "right")
    unpack(tmp_path / "out", tmp_path / "back")
    unpack(tmp_path / "right", tmp_path / "back too")
    assert content(tmp_path / "back") == content(tmp_path / "back too")


def test_a_folder_of_class_tars_is_the_folder_of_classes(tmp_path: Path) -> None:
    tree = {
        f"{name}/{i}.jpg": noise(f"{name}{i}", 100 + i) for name in ("ant", "bee") for i in (1, 2)
    }
    pack_one(plant(tmp_path / "tree", tree), tmp_path / "right")
    pack_one(plant(tmp_path / "tars", class_tars(tree)), tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "right")
    both = {f"{name}.zip": deflated({f"{i}.jpg": tree[f"{name}/{i}.jpg"] for i in (1, 2)})
            for name in ("ant", "bee")}  # fmt: skip
    pack_one(plant(tmp_path / "zips", both), tmp_path / "zipped")
    assert content(tmp_path / "zipped") == content(tmp_path / "right")


def test_splits_of_class_tars_are_splits(tmp_path: Path) -> None:
    """As ImageNet's, with the tars of train and val in a folder each, or in one tar."""
    tree = {f"{split}/{name}/{split}{i}.jpg": noise(f"{split}{name}{i}", 100 + i)
            for split in ("train", "val") for name in ("ant", "bee") for i in (1, 2)}  # fmt: skip
    pack(plant(tmp_path / "tree", tree), tmp_path / "right")
    tars = {
        f"{split}/{os.fsdecode(name)}": data
        for split in ("train", "val")
        for name, data in class_tars(
            {key[len(split) + 1 :]: data for key, data in tree.items() if key.startswith(split)}
        ).items()
    }
    pack(plant(tmp_path / "tars", tars), tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "right")
    pack(write(tmp_path / "x.tar", tar(tars, "imagenet/")), tmp_path / "one")
    assert content(tmp_path / "one") == content(tmp_path / "right")


def test_archives_that_hold_folders_are_merged_side_by_side(tmp_path: Path) -> None:
    """As train_0.tar, train_1.tar; or images.tar.gz and annotations.tar.gz of one dataset."""
    tree = images()
    pack_one(plant(tmp_path / "tree", tree), tmp_path / "right")
    halves = [dict(list(tree.items())[some]) for some in (slice(0, 10), slice(10, None))]
    parts = {f"train_{i}.tar": tar(half, "data/") for i, half in enumerate(halves)}
    pack_one(plant(tmp_path / "parts", parts), tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "right")
    pairs: dict[str | bytes, bytes | None] = {}
    for i in range(4):
        pairs |= {f"images/{i}.jpg": picture(8 + i, 8), f"masks/{i}.png": picture(8 + i, 8, "PNG")}
    pack_one(plant(tmp_path / "pairs", pairs), tmp_path / "pairs right")
    two = {
        f"{kind}.zip": zipped(
            {key: data for key, data in pairs.items() if str(key).startswith(kind)}
        )
        for kind in ("images", "masks")
    }
    pack_one(plant(tmp_path / "two", two), tmp_path / "two out")
    assert content(tmp_path / "two out") == content(tmp_path / "pairs right")


def test_parts_and_a_plan_made_ahead_make_the_same_bytes(tmp_path: Path) -> None:
    pack_one(plant(tmp_path / "tree", TREE), tmp_path / "right")
    for form in ("pax.tar", "a.tar.xz", "of class tars.tar"):
        source = write(tmp_path / form, FORMS[form](TREE))
        for ahead in (False, True):
            out = tmp_path / f"{form}-{ahead}"
            if ahead:
                plan_ahead(source, out, plan=PlanOptions(max_records=9))
                assert ["unpacked" in one.name for one in out.iterdir()].count(True) == (
                    form == "a.tar.xz"
                )
            for part in (2, 1):
                pack_one(source, out, part=(part, 2))
            assert commit(out, jobs=1)[0].committed
            assert content(out) == content(tmp_path / "right") or ahead
            assert {name for name in content(out) if name.endswith(b".shard")} == {
                name for name in content(tmp_path / "right") if name.endswith(b".shard")
            }


def test_a_piece_that_is_opened_does_not_list_the_archives_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shard of a part is a piece."""
    classes = {
        f"{i}.tar": tar({f"{i}{j}.jpg": noise(f"{i}{j}", 60) for j in range(3)}) for i in "ab"
    }
    listed: list[str] = []
    right = tree.list_tar
    monkeypatch.setattr(
        tree, "list_tar", lambda *one, **more: (listed.append(one[1]), right(*one, **more))[1]
    )
    for source in (plant(tmp_path / "tars", classes), write(tmp_path / "x.tar", tar(classes))):
        out = tmp_path / f"out {source.name}"
        plan_ahead(source, out, plan=PlanOptions(max_records=1))
        listed.clear()
        pack_one(source, out, part=(1, 1), max_records=1)
        assert len(listed) <= 3


def test_a_killed_packing_goes_on_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had unpacked is not unpacked again."""
    pack_one(plant(tmp_path / "tree", TREE), tmp_path / "right")
    source, out = write(tmp_path / "a.tgz", FORMS["a.tgz"](TREE)), tmp_path / "out"
    interrupted(monkeypatch, pack_one, source, out)
    [kept] = out.glob("unpacked-*")
    before = kept.stat().st_ino
    monkeypatch.setattr("gzip.GzipFile", None)  # would fail if it were opened
    done = pack_one(source, out)
    assert (done.kept, done.built, before > 0) == (2, done.shards - 2, True)
    assert content(out) == content(tmp_path / "right")


@pytest.mark.parametrize("calls", [1, 4, 9])
def test_a_kill_while_it_is_unpacked_starts_that_over(tmp_path: Path, calls: int) -> None:
    tree = {f"c{i % 3}/{i}.jpg": os.urandom(200_000) for i in range(60)}
    tree = {key: JPEG + data for key, data in tree.items()}
    source, out = write(tmp_path / "a.tgz", FORMS["a.tar.gz"](tree)), tmp_path / "out"
    program = (
        "import os, signal, sys\nfrom shardio import pack\nfrom shardio.storage import local\n"
        "write, left = local.OnceFile.write, [int(sys.argv[3])]\n"
        "def dying(self, data):\n    left[0] -= 1\n"
        "    left[0] or os.kill(os.getpid(), signal.SIGKILL)\n    write(self, data)\n"
        "local.OnceFile.write = dying\npack(sys.argv[1], sys.argv[2], jobs=1)\n"
    )
    command = [sys.executable, "-c", program, str(source), str(out), str(calls)]
    assert subprocess.run(command, env=environment(), timeout=LIMIT_S).returncode == -9
    assert len(list(out.glob("unpacked-*"))) == 1
    pack_one(source, out)
    pack_one(plant(tmp_path / "tree", tree), tmp_path / "right")
    assert content(out) == content(tmp_path / "right")


@pytest.mark.parametrize("name", ["x.7z", "x.rar", "x.z01", "x.zip.001"])
def test_other_archives_are_called_so(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, b"7z\xbc\xaf\x27\x1c")
    with pytest.raises(SourceError, match=f"{name}: an archive that is not read"):
        pack(tmp_path / name, tmp_path / "out")


def test_gc_removes_what_was_unpacked_for_splits(tmp_path: Path) -> None:
    """A packing that was killed before its first shard has left it beside the splits."""
    tree = {
        f"{split}/a/{i}.jpg": noise(f"{split}{i}", 50) for split in ("train", "val") for i in (1, 2)
    }
    source, out = write(tmp_path / "a.tgz", FORMS["a.tgz"](tree)), tmp_path / "out"
    pack(source, out, jobs=1)
    program = (
        "import os, signal, sys\nfrom shardio import pack\n"
        "def die(*given, **more):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.modules['shardio.packing.pack']._from_listing = die\n"
        "pack(sys.argv[1], sys.argv[2], jobs=1, overwrite=True)\n"
    )
    command = [sys.executable, "-c", program, str(source), str(out)]
    assert subprocess.run(command, env=environment(), timeout=LIMIT_S).returncode == -9
    [left] = out.glob("unpacked-*")
    assert gc(out).removed == []
    assert gc(out, keep_s=0).removed == [str(left)]
    assert not left.exists()


# --- which folder it is ---------------------------------------------------------------------------


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


def test_what_is_packed_of_a_wrapped_archive_is_said(tmp_path: Path) -> None:
    source = write(tmp_path / "x.tar", tar(images(), "data/"))
    said = shardio("pack", source, tmp_path / "out").stdout
    assert "data/ is all that is in the archive" in said
    one_class = write(
        tmp_path / "y.tar", tar({f"{i}.jpg": noise(str(i), 60) for i in range(3)}, "cats/")
    )
    done = pack_one(one_class, tmp_path / "one")
    assert (done.records, done.classes) == (3, 1)
    assert (
        f"its only folder is the one class; if that is none, give its path, {one_class}/cats"
        in (done.notes)
    )


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


def test_of_many_compressed_archives_only_the_first_have_a_line_each(tmp_path: Path) -> None:
    """ImageNet-21k's classes may be 20,000 of them."""
    for name in "abcdef":
        data = tar({f"{i}.jpg": noise(f"{name}{i}", 60) for i in range(2)})
        write(tmp_path / "in" / f"{name}.tgz", gzip.compress(data))
    done = shardio("pack", tmp_path / "in", tmp_path / "out")
    lines = done.stderr.splitlines()
    assert [line.count("compressed as a whole") for line in lines] == [1] * 4
    assert ["so it is with all that follow" in line for line in lines] == [False] * 3 + [True]
    assert "12 files, 6 classes" in done.stdout


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
    assert told(write(tmp_path / "x.tar", tar(tree))) == kind


def test_what_can_be_both_is_asked(tmp_path: Path) -> None:
    tree: Any = {f"{c}/{i}.{end}": JPEG for c in "ab" for i in "12" for end in ("jpg", "txt")}
    source = write(tmp_path / "x.tar", tar(tree))
    with pytest.raises(OptionError, match="--from webdataset"):
        told(source)
    assert told(source, kind="imagefolder") == "imagefolder"
    assert told(source, kind="webdataset") == "webdataset"
    shards = {f"{i:05}.tar": tar({f"{i}{j}.jpg": JPEG for j in range(3)}) for i in range(3)}
    folder = plant(tmp_path / "numbered", shards)
    with pytest.raises(OptionError, match=r"numbered.*\n.*each tar is a class"):
        told(folder)
    assert pack_one(folder, tmp_path / "out", kind="imagefolder").classes == 3
    assert pack_one(folder, tmp_path / "wds", kind="webdataset").classes is None


def test_groups_in_a_zip_are_records_of_several_files(tmp_path: Path) -> None:
    tree: Any = {
        f"{i}.{end}": data for i in range(3) for end, data in (("jpg", JPEG), ("txt", b"a"))
    }
    pack_one(plant(tmp_path / "tree", tree), tmp_path / "right")
    for form in ("deflated.zip", "a.tar.gz"):
        pack_one(write(tmp_path / form, FORMS[form](tree)), tmp_path / f"out {form}")
        assert content(tmp_path / f"out {form}") == content(tmp_path / "right")


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        (
            {"a.zip": deflated({"x/1.jpg": JPEG}), "b.zip": deflated({"1.jpg": JPEG})},
            "hold folders",
        ),
        ({"all.zip": deflated({"c/1.jpg": JPEG}), "c/1.jpg": JPEG}, "beside it lies c/1.jpg"),
        ({"a.tar": tar({"1.jpg": JPEG}), "2.jpg": JPEG}, "beside it lies 2.jpg"),
    ],
)
def test_archives_beside_others_name_the_choices(tree: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=why):
        pack_one(write(tmp_path / "x.tar", tar(tree)), tmp_path / "out", kind="imagefolder")


def test_an_archive_beside_what_was_unpacked_from_it_is_named(tmp_path: Path) -> None:
    folder = plant(tmp_path / "kaggle", {**images(), "all.zip": deflated(images())})
    with pytest.raises(SourceError, match=r"all\.zip[\s\S]*is an archive"):
        pack_one(folder, tmp_path / "out")
    deep = plant(tmp_path / "deep", {**images(), "class0/all.zip": deflated(images())})
    with pytest.raises(SourceError, match=r"class0/all\.zip: .*an archive"):
        pack_one(deep, tmp_path / "out")


# --- members --------------------------------------------------------------------------------------


def links(*members: tuple[str, bytes, str]) -> bytes:
    """A tar of links and other members, beside two images."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as file:
        for name in ("a/1.jpg", "b/2.jpg"):
            info = tarfile.TarInfo(name)
            info.size = len(JPEG) + len(name)
            file.addfile(info, io.BytesIO(JPEG + name.encode()))
        for name, kind, target in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            file.addfile(info)
    return out.getvalue()


def test_links_are_followed_in_the_archive(tmp_path: Path) -> None:
    source = write(
        tmp_path / "x.tar",
        links(
            ("a/hard.jpg", tarfile.LNKTYPE, "a/1.jpg"),
            ("a/soft.jpg", tarfile.SYMTYPE, "../b/2.jpg"),
            ("a/chain.jpg", tarfile.SYMTYPE, "soft.jpg"),
            ("c", tarfile.SYMTYPE, "b"),
        ),
    )
    with tarfile.open(source) as file:
        file.extractall(tmp_path / "tree", filter="fully_trusted")
    pack_one(tmp_path / "tree", tmp_path / "right")
    done = pack_one(source, tmp_path / "out")
    assert (done.records, done.classes) == (6, 3)
    assert content(tmp_path / "out") == content(tmp_path / "right")


@pytest.mark.parametrize(
    ("name", "kind", "target", "why"),
    [
        ("a/x.jpg", tarfile.SYMTYPE, "../../x.jpg", "outside of the archive"),
        ("a/x.jpg", tarfile.SYMTYPE, "/etc/passwd", "outside of the archive"),
        ("a/x.jpg", tarfile.LNKTYPE, "/a/1.jpg", "outside of the archive"),
        ("a/x.jpg", tarfile.SYMTYPE, "3.jpg", "which is not in the archive"),
        ("a/x.jpg", tarfile.LNKTYPE, "c/3.jpg", "hard link to c/3.jpg, which is not in"),
        ("a/x.jpg", tarfile.SYMTYPE, "x.jpg", "leads into itself"),
        ("a/x", tarfile.SYMTYPE, "..", "a folder that contains it"),
        ("a/x.jpg", tarfile.CHRTYPE, "", "device"),
        ("a/x.jpg", tarfile.FIFOTYPE, "", "FIFO"),
        ("../x.jpg", tarfile.SYMTYPE, "a/1.jpg", "its path leads out of the archive"),
    ],
)
def test_what_leads_out_of_an_archive_is_a_problem(
    name: str, kind: bytes, target: str, why: str, tmp_path: Path
) -> None:
    source = write(tmp_path / "x.tar", links((name, kind, target)))
    [(_, found)] = problems(source)
    assert why in found
    with pytest.raises(SourceError, match=why):
        pack_one(source, tmp_path / "out")
    assert pack_one(source, tmp_path / "out", on_error="skip").records == 2


@pytest.mark.parametrize("name", ["../x.jpg", "/x.jpg", "a/../../x.jpg"])
@pytest.mark.parametrize("made", [tar, zipped])
def test_members_outside_are_problems(made: Any, name: str, tmp_path: Path) -> None:
    source = write(tmp_path / "x.zip", made({"a/1.jpg": JPEG, name: JPEG}))
    assert [why for _, why in problems(source)] == ["its path leads out of the archive"]


@pytest.mark.parametrize("last", [[("d40/x.jpg", tarfile.LNKTYPE, "a/1.jpg")], []])
def test_links_that_lead_to_one_another_end(last: Any, tmp_path: Path) -> None:
    """2 to the power of 40 files, or folders, if each link were followed."""
    many = [(f"d{i}/{name}", tarfile.SYMTYPE, f"../d{i + 1}") for i in range(40) for name in "ab"]
    folder = [("d40", tarfile.DIRTYPE, "")]
    source = write(tmp_path / "x.tar", links(*many, *folder, *last))
    with pytest.raises(SourceError, match="links"):
        pack_one(source, tmp_path / "out")


def test_a_long_chain_of_links_ends_in_a_problem(tmp_path: Path) -> None:
    many = [(f"d{i:03}/l", tarfile.SYMTYPE, f"../d{i + 1:03}") for i in range(999)]
    folders = [(f"d{i:03}", tarfile.DIRTYPE, "") for i in range(1000)]
    source = write(tmp_path / "x.tar", links(*folders, *many))
    assert any("over 40 folders" in why for _, why in problems(source))


def test_a_link_in_a_zip_is_followed(tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("a/1.jpg", JPEG + b"1")
        for name, target in (("b/2.jpg", "../a/1.jpg"), ("b/3.jpg", "/etc/passwd")):
            info = zipfile.ZipInfo(name)
            info.create_system, info.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
            file.writestr(info, target)
    source = write(tmp_path / "x.zip", out.getvalue())
    assert [key for key, _ in problems(source)] == [b"b/3.jpg"]
    assert pack_one(source, tmp_path / "out", on_error="skip").records == 2


def test_of_a_name_that_comes_twice_the_last_counts_and_it_is_said(tmp_path: Path) -> None:
    twice = tar({"c/1.jpg": noise("old", 90)})[:1024] + tar({"c/1.jpg": noise("new", 80)})
    pack_one(plant(tmp_path / "tree", {"c/1.jpg": noise("new", 80)}), tmp_path / "right")
    source = write(tmp_path / "x.tar", twice)
    said = shardio("pack", source, tmp_path / "said").stdout
    assert "1 member has the name of one before it; of each name the last counts" in said
    pack_one(source, tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "right")
    parts = {f"train_{c}.tar": tar({"c/1.jpg": noise(c, 80), f"{c}/1.jpg": JPEG}) for c in "xy"}
    found = dict(problems(plant(tmp_path / "parts", parts)))
    assert list(found) == [b"c/1.jpg"] and "train_x.tar and in" in found[b"c/1.jpg"]


@pytest.mark.parametrize(
    ("system", "flag", "stored", "right"),
    [
        (3, True, "ä".encode(), "ä".encode()),
        (0, False, b"\x84", "ä".encode()),  # code page 437, as of DOS
        (0, False, "ä".encode(), "ä".encode()),  # UTF-8 that is not said
        (3, False, b"\xe4", b"\xe4"),  # as zip of Linux writes what is there
    ],
)
def test_names_in_a_zip(
    system: int, flag: bool, stored: bytes, right: bytes, tmp_path: Path
) -> None:
    plain = b"q" * len(stored)
    data = zipped({f"c/{plain.decode()}.jpg": JPEG}).replace(plain, stored)
    data = data.replace(b"PK\1\2\x14\3", b"PK\1\2\x14" + bytes([system]))
    if flag:
        for mark, at in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
            place = data.index(mark) + at
            data = data[:place] + struct.pack("<H", 0x800) + data[place + 2 :]
    folder, _ = open_archive(os.fsencode(write(tmp_path / "x.zip", data)), Inflating())
    assert folder.walk().keys == [b"c/" + right + b".jpg"]


def members(*of: tuple[str, bytes | None, bytes, str]) -> bytes:
    """A tar of these: name, content or None, kind, where it leads."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as file:
        for name, data, kind, target in of:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, target, len(data or b"")
            file.addfile(info, io.BytesIO(data or b""))
    return out.getvalue()


FILE, HARD, SOFT, FOLDER = tarfile.REGTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE


@pytest.mark.parametrize(
    "of",
    [
        [("a/1.jpg", JPEG + b"old", FILE, ""), ("a/2.jpg", None, HARD, "a/1.jpg"),
         ("a/1.jpg", JPEG + b"new", FILE, "")],
        [("b/1.jpg", JPEG + b"b", FILE, ""), ("a/1.jpg", JPEG + b"old", FILE, ""),
         ("a/1.jpg", None, SOFT, "../b/1.jpg")],
        [("b/1.jpg", JPEG + b"b", FILE, ""), ("a/1.jpg", None, SOFT, "../b/1.jpg"),
         ("a/1.jpg", JPEG + b"new", FILE, "")],
        [("b/1.jpg", JPEG + b"1", FILE, ""), ("b/2.jpg", JPEG + b"2", FILE, ""),
         ("a/1.jpg", None, SOFT, "../b/1.jpg"), ("a/1.jpg", None, SOFT, "../b/2.jpg")],
        [("a/1.jpg", JPEG, FILE, ""), ("empty", None, FOLDER, ""), ("c", None, SOFT, "empty")],
        [("a/1.jpg", JPEG, FILE, ""), ("a/l", None, SOFT, "../b"), ("b/2.jpg", JPEG, FILE, ""),
         ("b/m", None, SOFT, "../a")],
        [("a/1.jpg", JPEG, FILE, ""), ("loop", None, SOFT, ".")],
        [("a/1.jpg", JPEG, FILE, ""), ("b/deep/2.jpg", JPEG, FILE, ""), ("c", None, SOFT, "b")],
    ],
    ids=["hard", "link later", "file later", "two links", "empty", "cycle", "loop", "deep"],
)  # fmt: skip
def test_the_order_of_members_counts_as_for_tar(of: Any, tmp_path: Path) -> None:
    source = write(tmp_path / "x.tar", members(*of))
    (tmp_path / "tree").mkdir()
    # -P: else links that lead upwards are made last
    subprocess.run(["tar", "-xPf", source, "-C", tmp_path / "tree"], check=True)
    for place in ("tree", "x.tar"):
        pack_one(tmp_path / place, tmp_path / f"of {place}", on_error="skip", kind="imagefolder")
    right = content(tmp_path / "of tree")
    assert content(tmp_path / "of x.tar") == right


def test_class_archives_with_folders_in_them_keep_their_classes(tmp_path: Path) -> None:
    """A folder in one is no class, and what is no file in one is of its class."""
    tars = {
        f"{name}.tar": members(
            ("1.jpg", JPEG + name.encode(), FILE, ""),
            ("0old", None, FOLDER, ""),
            ("0old/2.jpg", JPEG + b"2", FILE, ""),
            ("3.jpg", None, SOFT, "nowhere.jpg"),
        )
        for name in ("ant", "bee")
    }
    done = pack_one(plant(tmp_path / "tars", tars), tmp_path / "out", on_error="skip")
    assert (done.classes, done.records) == (2, 4)
    assert [key for key, _ in done.rejected] == ["ant/3.jpg", "bee/3.jpg"]
    one = write(tmp_path / "all.tar", tar(tars))
    pack_one(one, tmp_path / "one", on_error="skip")
    assert content(tmp_path / "one") == content(tmp_path / "out")


def test_archives_of_one_name_size_and_time_are_unpacked_apart(tmp_path: Path) -> None:
    data = {split: {f"{c}/1.jpg": noise(split, 900) for c in "ab"} for split in ("train", "val")}
    for split, files in data.items():
        write(tmp_path / f"p/{split}/x.tar.gz", gzip.compress(tar(files), 0, mtime=1))
    pack(tmp_path / "p", tmp_path / "out", jobs=1)
    unpack(tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back/val/a/1.jpg").read_bytes() == data["val"]["a/1.jpg"]


def test_a_file_that_is_a_folder_too_is_a_problem(tmp_path: Path) -> None:
    source = write(
        tmp_path / "x.tar", tar({"k/a.jpg": JPEG, "k/a.jpg/1.jpg": JPEG, "l/1.jpg": JPEG})
    )
    done = pack_one(source, tmp_path / "out", on_error="skip")
    assert done.records == 2 and "and a folder" in done.rejected[0][1]
    unpack(tmp_path / "out", tmp_path / "back")


def test_names_with_backslashes_of_windows_are_paths(tmp_path: Path) -> None:
    data = (
        zipped({"a_1.jpg": JPEG, "b_2.jpg": JPEG}).replace(b"a_1", b"a\\1").replace(b"b_2", b"b\\2")
    )
    data = data.replace(b"PK\1\2\x14\3", b"PK\1\2\x14\0")
    assert pack_one(write(tmp_path / "x.zip", data), tmp_path / "out").classes == 2


def test_labels_do_not_depend_on_what_comes_first_in_a_tar(tmp_path: Path) -> None:
    tree: Any = {f"meta/{i:05}.txt": b"x" for i in range(11_000)}
    tree |= {f"train/{c}/{i}.jpg": noise(f"{c}{i}", 60) for c in "ab" for i in range(3)}
    assert told(write(tmp_path / "x.tar", tar(tree, form=tarfile.USTAR_FORMAT))) == "imagefolder"


@pytest.mark.parametrize("most", [1, 5, 7, 40])
def test_a_tar_is_listed_on_from_where_it_was_looked_into(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = members(
        *((name, data, FILE, "") for name, data in images(2, 20).items()),
        ("class0/more.jpg", None, HARD, "class1/003.jpg"),
        ("class1/last.jpg", None, SOFT, "../class0/001.jpg"),
        ("class0/000.jpg", JPEG + b"again", FILE, ""),
    )
    archive = write(tmp_path / "x.tar", data)
    whole = open_archive(os.fsencode(archive), Inflating())[0].walk()
    os.utime(archive, ns=(9, 9))  # it is listed anew
    monkeypatch.setattr(archived, "_MEMBERS", most)
    request = sources.detect_kind(SourceRequest(os.fsencode(archive)))
    walked = request.files.walk() if request.files else None
    assert walked is not None
    assert walked.keys == whole.keys and walked.sizes.tolist() == whole.sizes.tolist()
    assert walked.notes == whole.notes and len(whole.keys) == 42


def test_a_few_files_beside_images_do_not_ask(tmp_path: Path) -> None:
    tree: Any = {f"{c}/{i}.jpg": JPEG for c in "ab" for i in range(5)} | {"a/1.txt": b"x"}
    assert told(write(tmp_path / "x.tar", tar(tree))) == "imagefolder"
    hidden = {f"{c}/._{i}.jpg": b"\0\5" for c in "ab" for i in range(5)}
    assert told(write(tmp_path / "y.tar", tar({**tree, **hidden}))) == "imagefolder"


# --- damage ---------------------------------------------------------------------------------------


@pytest.fixture(params=["isal", "zlib"])
def library(request: pytest.FixtureRequest) -> Iterator[str]:
    """What inflates; Python's own where isal is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "zlib":
            patch.setitem(sys.modules, "isal", None)
            patch.setitem(sys.modules, "isal.igzip", None)
        else:
            pytest.importorskip("isal")
        importlib.reload(deflate)
        assert (deflate.crc32 is zlib.crc32) == (request.param == "zlib")
        yield request.param
    importlib.reload(deflate)


@pytest.mark.usefixtures("library")
def test_what_is_inflated_ends_where_it_ends(tmp_path: Path) -> None:
    """Its last bytes may come when all that was deflated has been given."""
    for more in (-1, 0, 1, 100, 258, 1 << 20):  # than are inflated at a time
        for plain in (bytes((1 << 20) + more), b"ab" * ((1 << 19) + more)):
            packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
            packed = packer.compress(plain) + packer.flush()
            extent = extent_of(os.fsencode(write(tmp_path / "packed", packed)))
            assert b"".join(inflate.content(extent, "deflate")) == plain
            extent = extent_of(os.fsencode(write(tmp_path / "packed", packed[:-1])))
            with pytest.raises(DamageError, match="cut short"):
                list(inflate.content(extent, "deflate"))


@pytest.mark.usefixtures("library")
def test_a_damaged_member_of_a_zip_is_a_problem(tmp_path: Path) -> None:
    tree = images()
    for way in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        data = bytearray(zipped(tree, way=way))
        data[len(data) // 3] ^= 8
        source = write(tmp_path / f"{way}.zip", bytes(data))
        with pytest.raises(SourceError, match=r"1 file cannot be packed[\s\S]*(CRC-32|inflated)"):
            pack_one(source, tmp_path / "out")
        assert pack_one(source, tmp_path / f"out{way}", on_error="skip").records == len(tree) - 1


@pytest.mark.parametrize(
    "form", ["gnu.tar", "a.tar.gz", "a.tar.bz2", "a.tar.xz", "a.tar.zst", "deflated.zip"]
)
@pytest.mark.usefixtures("library")
def test_an_archive_that_was_cut_short_is_an_error(form: str, tmp_path: Path) -> None:
    whole = FORMS[form](images())
    for share in (0.133, 0.52, 0.71):
        source = write(tmp_path / f"{share}-{form}", whole[: int(share * len(whole))])
        with pytest.raises(DamageError, match=form) as caught:
            pack_one(source, tmp_path / "out")
        assert "byte" in str(caught.value) or "cut short" in str(caught.value)
        assert not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize("form", ["a.tar.gz", "a.tar.xz", "a.tar.zst"])
def test_an_error_says_up_to_which_member_a_compressed_tar_is_whole(
    form: str, tmp_path: Path
) -> None:
    tree = {f"a/{n}.jpg": noise(f"{n}", 700_000) for n in range(8)}
    whole = FORMS[form](tree)
    source = write(tmp_path / form, whole[: len(whole) * 3 // 4])
    with pytest.raises(DamageError, match=r"its last whole member is a/[345]\.jpg$"):
        pack_one(source, tmp_path / "out")


@pytest.mark.parametrize("kind", ["xz", "bz2"])
def test_what_is_no_stream_behind_a_stream_is_an_error(kind: str, tmp_path: Path) -> None:
    """The libraries of Python end there without a word."""
    data = tar(images())
    one, two = (lzma.compress if kind == "xz" else bz2.compress)(data[:9216]), data[9216:]
    two = (lzma.compress if kind == "xz" else bz2.compress)(two)
    right = write(tmp_path / f"right.tar.{kind}", one + two)
    pack_one(right, tmp_path / "right")
    with pytest.raises(DamageError, match="damaged, or cut short"):
        pack_one(write(tmp_path / f"x.tar.{kind}", one + b"XX" + two[2:]), tmp_path / "out")


def test_a_tar_without_its_end_is_cut_short(tmp_path: Path) -> None:
    data = tar(images())[: 1024 * 7]
    for name, some in (("x.tar", data), ("x.tgz", gzip.compress(data))):
        with pytest.raises(DamageError, match="ends without the zeros that end a tar"):
            pack_one(write(tmp_path / name, some), tmp_path / "out")
        assert not list((tmp_path / "out").glob("*"))


def test_no_damage_of_headers_is_a_traceback(tmp_path: Path) -> None:
    """Of tar and zip: a changed byte gives the dataset, a problem, or an error with its file."""
    rng = np.random.default_rng(7)
    tree = images(2, 2, 40)
    for form in ("pax.tar", "deflated.zip", "zip64.zip"):
        whole = FORMS[form](tree)
        for round_ in range(150):
            data = bytearray(whole)
            data[rng.integers(len(data))] = rng.integers(256)
            source = write(tmp_path / form, bytes(data))
            try:
                request = sources.detect_kind(SourceRequest(os.fsencode(source)))
                for listing in sources.list_records(request).values():
                    with listing.source.open() as read:
                        for place in range(len(listing.keys)):
                            with pytest.MonkeyPatch.context():
                                try:
                                    read(place)
                                except Exception as error:
                                    assert type(error).__name__ == "Rejected"
            except (DamageError, SourceError, OptionError) as error:
                assert form in str(error), round_


def test_headers_compared_at_once_are_taken_as_those_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever one byte of a header is, and whether its sum is right."""
    names = [f"c{i // 30}/{i:03}.jpg" for i in range(90)]
    tree: Any = {name: JPEG + bytes(i * 40) for i, name in enumerate(names)}
    tree = {"c0": None} | tree | {"c1": None}
    for dots in ("", "./"):
        whole = tar(tree, dots, tarfile.USTAR_FORMAT)
        heads = [i for i in range(0, len(whole), 512) if whole[i + 257 : i + 262] == b"ustar"]
        rng = np.random.default_rng(3)
        for round_ in range(600):
            data = bytearray(whole)
            head = int(rng.choice(heads))
            place = head + int(
                rng.choice([*range(100), *[124] * 30, *range(124, 158), 257, 345, 350])
            )
            data[place] = rng.choice([*b"\0 .-/0157AK\xff"])
            if round_ % 3:
                total = sum(data[head : head + 148]) + sum(data[head + 156 : head + 512]) + 256
                data[head + 148 : head + 156] = b"%06o\0 " % total
            if round_ % 7 == 0:  # of the same value, but no octal digits
                data[head + 152] -= 1
                data[head + 153] += 8
            quick = _listed(bytes(data))
            with monkeypatch.context() as patch:
                patch.setattr(tar_members, "plain_run", lambda f, at, *_: Run([], [], [], [], at))
                assert _listed(bytes(data)) == quick, (round_, place - head)


@pytest.mark.parametrize(
    "odd",
    [
        b"",
        b"/",
        b"/x",
        b".",
        b".x",
        b"./",
        b"..",
        b"./x",
        b"x/",
        b"x/.",
        b"x/./y",
        b"x//y",
        b"x/../y",
        b"../x",
        b".//x",
        b"./.",
        b"./../x",
        b"x",
        b"./x/y",
    ],
)
def test_paths_of_many_members_are_those_of_each(odd: bytes) -> None:
    for others in ([], [b"a/b"], [b"./a", b"./b/c"]):
        for names in ([odd, *others], [*others, odd], [*others, odd, *others]):
            assert plain_paths(names) == list(map(plain_path, names))


class _InMemory:
    def __init__(self, data: bytes) -> None:
        self._data, self.size = data, len(data)

    def read(self, start: int, length: int) -> bytes:
        return self._data[start : start + length]


def _listed(data: bytes) -> Any:
    """All that the listing of a tar says, or the error."""
    try:
        table = list_tar(_InMemory(data), "x")
    except ShardioError as error:
        return repr(error)
    return vars(table)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: data.replace(b"\x14\0\0\0", b"\x14\0\1\0"), "encrypted"),
        (lambda data: data[:-18] + b"\3\0" + data[-16:], "volumes"),
    ],
)
def test_zips_that_cannot_be_read_say_why(change: Any, why: str, tmp_path: Path) -> None:
    data = change(zipped(images()))
    with pytest.raises(SourceError, match=why):
        pack_one(write(tmp_path / "x.zip", data), tmp_path / "out")
    lzma_zip = zipped(images(), way=zipfile.ZIP_LZMA)
    with pytest.raises(SourceError, match="compressed by LZMA"):
        pack_one(write(tmp_path / "y.zip", lzma_zip), tmp_path / "out")


def test_a_member_that_grows_beyond_its_size_is_bounded(tmp_path: Path) -> None:
    """A deflated member of 100 MB whose headers state 100 bytes takes no 100 MB."""
    data = bytearray(deflated({"c/1.jpg": JPEG + bytes(100 << 20)}))
    at = data.index(b"PK\1\2")
    data[at + 24 : at + 28] = struct.pack("<L", 100)
    source = write(tmp_path / "x.zip", bytes(data))
    with pytest.raises(SourceError, match="its header states 100"):
        pack_one(source, tmp_path / "out")


def test_nested_archives_end_somewhere(tmp_path: Path) -> None:
    data = tar({"c/1.jpg": JPEG})
    for _ in range(12):
        data = tar({"x.tar": data})
    with pytest.raises(SourceError, match="one within the other"):
        pack_one(write(tmp_path / "x.tar", data), tmp_path / "out")


def test_many_members_of_a_zip(tmp_path: Path) -> None:
    """More than 65,535, which need the zip64 end of the directory."""
    tree: Any = {f"c{i % 7}/{i:06}.jpg": JPEG for i in range(66_000)}
    folder, _ = open_archive(os.fsencode(write(tmp_path / "x.zip", zipped(tree))), Inflating())
    assert len(folder.walk().keys) == 66_000


# --- other roads ----------------------------------------------------------------------------------


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


def test_many_archives_take_few_descriptors(tmp_path: Path) -> None:
    tars = {f"x{2 * i:03}.tar": tar({f"{i}.jpg": noise(str(i), 60)}) for i in range(150)}
    source = plant(tmp_path / "tars", tars)
    program = (
        "import resource, sys\nfrom shardio import pack\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (110, 110))\n"
        "print(pack(sys.argv[1], sys.argv[2], jobs=1)[0].records)\n"
    )
    command = [sys.executable, "-c", program, str(source), str(tmp_path / "out")]
    done = subprocess.run(
        command, env=environment(), timeout=LIMIT_S, capture_output=True, text=True, check=False
    )
    assert done.stdout == "150\n", done.stderr


def test_a_process_may_pack_an_archive_again(tmp_path: Path) -> None:
    """What was unpacked for the first time is gone."""
    source = write(tmp_path / "x.tgz", FORMS["a.tar.gz"](images()))
    for size in (10_000, 20_000):
        pack_one(source, tmp_path / "out", overwrite=True, shard_size=size, max_records=None)


def test_what_is_refused_after_it_was_unpacked_leaves_nothing(tmp_path: Path) -> None:
    source = write(tmp_path / "x.tgz", FORMS["a.tar.gz"]({"a/1.txt": b"x", "b/2.txt": b"y"}))
    pack_one(plant(tmp_path / "tree", images()), tmp_path / "out")
    there = content(tmp_path / "out")
    with pytest.raises(ShardioError):
        pack_one(source, tmp_path / "out", kind="imagefolder")
    assert content(tmp_path / "out") == there


def test_what_waits_goes_on_where_the_writer_gave_up(tmp_path: Path) -> None:
    """The file that it waits for is removed by whoever gives up."""
    source = extent_of(os.fsencode(write(tmp_path / "x.tgz", FORMS["a.tar.gz"](images()))))
    out = tmp_path / "out"
    name = Inflating(str(out)).inflate(source, "gzip").name
    (out / name).unlink()
    program = (
        "import os, sys, time\nfrom shardio.storage.local import OnceFile\n"
        "file = OnceFile(sys.argv[1], sys.argv[2], b'')\nassert file.take()\n"
        "print('held', flush=True)\nsys.stdin.readline()\n"
        "os.unlink(os.path.join(sys.argv[1], sys.argv[2]))\n"
    )
    command = [sys.executable, "-c", program, str(out), name]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None and writer.stdin is not None
        assert writer.stdout.readline() == "held\n"
        stdin = writer.stdin

        def tell(line: str) -> None:
            if "waiting for another process" in line:
                stdin.write("\n")
                stdin.flush()

        found = Inflating(str(out), tell=tell).inflate(source, "gzip")
    assert (out / found.name).stat().st_size == found.file_size


def test_without_locks_each_process_unpacks_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    source = write(tmp_path / "x.tgz", FORMS["a.tar.gz"](images()))
    pack_one(source, tmp_path / "right")
    extent, out = extent_of(os.fsencode(source)), str(tmp_path / "out")
    monkeypatch.setattr("fcntl.lockf", refuse)
    one, two = (Inflating(out).inflate(extent, "gzip") for _ in range(2))
    assert one.name != two.name and one.file_size == two.file_size
    pack_one(source, tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "right")


def test_a_bomb_of_zips_ends_after_two_levels(tmp_path: Path) -> None:
    data = deflated({"c/1.jpg": JPEG})
    for _ in range(4):
        data = deflated({f"{i}.zip": data for i in range(3)})
    with pytest.raises(SourceError, match="compressed three times over"):
        pack_one(write(tmp_path / "x.zip", data), tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))


def test_options_of_folders_hold_for_archives(tmp_path: Path) -> None:
    source = write(tmp_path / "x.tar", tar(TREE))
    plant(tmp_path / "tree", TREE)
    for options in (
        {"where": {"label": "class1"}},
        {"ignore": False, "on_error": "skip"},
        {"classes": str(tmp_path / "all")},
    ):
        if "classes" in options:
            pack_one(tmp_path / "tree", tmp_path / "all")
        right, out = tmp_path / f"right {len(str(options))}", tmp_path / f"out {len(str(options))}"
        pack_one(tmp_path / "tree", right, **options)
        pack_one(source, out, **options)
        assert content(out) == content(right)


class TestTar(FileSourceConformance):
    KIND = "imagefolder"

    def make(self, root: Path) -> Path:
        tree = {f"{'ab'[i % 2]}/{i:02}.jpg": noise(str(i), 90 + i) for i in range(self.COUNT)}
        return write(root / "x.tar", tar(tree, "inner/")) / "inner"

    def file(self, path: Path) -> Path:
        return path.parent

    @pytest.mark.parametrize("change", ["size", "time", "gone"])
    def test_a_file_that_changes_after_the_listing_is_named(self, path: Path, change: str) -> None:
        """All members are of one file."""
        found, file = self.listing(path), self.file(path)
        change_file(file, change)
        with found.source.open() as read, pytest.raises(SourceChangedError, match=file.name):
            read(0)


@pytest.mark.parametrize("form", ["gnu.tar", "deflated.zip", "stored.zip"])
def test_an_archive_that_changes_while_it_is_read_is_named(form: str, tmp_path: Path) -> None:
    """Be it that a member is damaged then, or that nothing else says so."""
    for damage in (False, True):
        data = FORMS[form](images())
        folder, _ = open_archive(os.fsencode(write(tmp_path / form, data)), Inflating())
        walked = folder.walk()
        members = zip(walked.keys, walked.sizes.tolist(), walked.mtimes.tolist(), strict=True)
        with pytest.raises(SourceChangedError, match=form), folder.opened() as read:
            read(*next(members))
            (tmp_path / form).write_bytes(data[: len(data) // 3] * 3 if damage else data)
            for member in members:
                read(*member)


def test_reading_opens_no_member_twice_and_closes_all(tmp_path: Path) -> None:
    write(tmp_path / "x.tar", tar(class_tars(images())))
    folder, _ = open_archive(os.fsencode(tmp_path / "x.tar"), Inflating())
    assert isinstance(folder, ArchiveFolder)
    before = len(os.listdir("/proc/self/fd"))
    walked = folder.walk()
    with folder.opened() as read:
        for key, size, stamp in zip(walked.keys, walked.sizes, walked.mtimes, strict=True):
            assert read(key, int(size), int(stamp)) == images()[key.decode()]
        assert len(os.listdir("/proc/self/fd")) == before + 1
    assert len(os.listdir("/proc/self/fd")) == before
    assert extent_of(os.fsencode(tmp_path / "x.tar")).file_size > 0
    assert archives.WHEN and SourceOptions()
