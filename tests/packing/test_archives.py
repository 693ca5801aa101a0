"""An archive is a folder: the same bytes come out of it as out of the tree that it was made of."""

import os
from functools import partial
from pathlib import Path

import pytest
from support import sources
from support.archives import FORMS, tar, write
from support.packing import interrupted
from support.trees import content, images, noise, plant, shardio

from shardio import PlanOptions, commit, unpack
from shardio import plan as plan_ahead

pack_one = partial(sources.pack_one, max_records=9)

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


# --- members --------------------------------------------------------------------------------------


# --- other roads ----------------------------------------------------------------------------------


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
