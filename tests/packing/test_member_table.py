"""Members of archives: their paths, where links lead, and what leads out."""

import subprocess
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import sources
from support.archives import FILE, FOLDER, HARD, SOFT, links, members, tar, write, zipped
from support.sources import problems
from support.trees import JPEG, content

from shardio.errors import SourceError
from shardio.packing.sources.archives.member_table import plain_path, plain_paths

pack_one = partial(sources.pack_one, max_records=9)


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
