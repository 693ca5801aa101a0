"""Datasets of format 1, changed in every way: python tests/golden/make_frozen.py [FOLDER]

Written once, when the format was frozen, into tests/golden/frozen-1, and never again: every later
release reads them, and so does tests/formats/reader.c (tests/formats/test_frozen.py). They hold
what a commit can leave: excluded records, overlays, erased records, sources, tags, older versions.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from make_released import photograph, plant
from support.plain_lines import lines

import shardio

GOLDEN = Path(__file__).resolve().parent
FOLDER = GOLDEN / "frozen-1"
FEW = shardio.PlanOptions(max_records=4)


def keys(out: Path) -> list[str]:
    return shardio.open(out, decode=None).keys()


def values(number: int) -> dict[str, Any]:
    """A value of each kind that can be annotated; of each some are None."""
    some: dict[str, Any] = {
        "score": -number / 4,
        "count": number - 3 if number % 3 else 2**40 + number,
        "checked": number % 2 == 0,
        "caption": f"Bild {number}: 猫\n",
        "clip": np.arange(number, number + 3, dtype="<f2"),
        "blob": bytes([number]) * number,
        "box": {"at": [number, 0.5, None], "of": np.array([number], "<u2"), "": b"\xff"},
    }
    rows = enumerate(some.items(), number)
    return {name: None if row % 7 == 0 else one for row, (name, one) in rows}


def annotated(out: Path) -> None:
    table = {key: values(number) for number, key in enumerate(keys(out)) if number % 5 != 4}
    shardio.annotate(out, table, missing="none")


def changed(out: Path, more: Path) -> None:
    """Each kind of commit, one after the other; those before the erasing stay as they were."""
    named = keys(out)
    annotated(out)
    shardio.annotate(out, {named[6]: {"label": 2}, named[2]: {"label": None}})
    shardio.annotate(out, {named[2]: {"caption": "anew"}, named[6]: {"caption": None}})
    shardio.annotate(out, {named[0]: {"lone": "of a record that goes"}}, missing="none")
    shardio.drop(out, keys=named[:2])
    shardio.tag(out, "dropped")
    shardio.append(more, out, jobs=1)
    shardio.annotate(out, {keys(out)[-1]: {"score": 1e300, "count": -(2**63)}})
    shardio.tag(out, "before the erasing ä")
    shardio.drop(out, keys=[named[0]], erase=True)
    shardio.drop(out, keys=[named[1]], erase=True)  # the file that followed one is followed, too
    shardio.drop(out, keys=[named[3]])


def write(source: Path) -> None:
    """Write every dataset into FOLDER."""
    tree, more = plant(source / "tree"), source / "more"
    for number in (30, 31):
        path = more / "dog" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        photograph(number).save(path)
    shardio.pack(tree / "train", FOLDER / "record", plan=FEW, jobs=1)
    changed(FOLDER / "record", more)
    shardio.pack(tree / "val", FOLDER / "lmdb", format="lmdb", jobs=1)
    out = FOLDER / "lmdb"
    annotated(out)
    shardio.drop(out, keys=keys(out)[:1], erase=True)
    out = FOLDER / "compacted"
    shardio.pack(tree / "val", out, plan=FEW, jobs=1)
    shardio.annotate(out, {key: {"score": 0.5} for key in keys(out)[1:]}, missing="none")
    shardio.drop(out, keys=keys(out)[:1])
    shardio.compact(out, jobs=1)
    shardio.drop(out, keys=keys(out)[:1], erase=True)
    shardio.pack(tree, FOLDER / "splits", jobs=1)
    shardio.update(tree, FOLDER / "splits", jobs=1)
    shardio.drop(FOLDER / "splits" / "val", keys=keys(FOLDER / "splits" / "val")[1:2])
    large = plant(source / "large", 96)
    tiles = shardio.ImageOptions(jpeg_tiles=True, keep_original=True)
    shardio.pack(large / "val", FOLDER / "tiles", images=tiles, jobs=1)
    shardio.drop(FOLDER / "tiles", keys=keys(FOLDER / "tiles")[1:2], erase=True)
    raw = shardio.ImageOptions(encode="raw")
    shardio.pack(tree / "val", FOLDER / "raw", images=raw, resize=8, jobs=1)
    shardio.drop(FOLDER / "raw", keys=keys(FOLDER / "raw")[1:2], erase=True)
    (FOLDER / "tar").mkdir()
    shutil.copy(GOLDEN / "webdataset" / "dot.tar", FOLDER / "tar")
    shardio.index(FOLDER / "tar", jobs=1)
    annotated(FOLDER / "tar")
    shardio.drop(FOLDER / "tar", keys=keys(FOLDER / "tar")[:1])
    for name in ("record", "lmdb", "compacted", "tiles", "raw"):
        shardio.gc(FOLDER / name, keep_s=0)  # files that must go


def expected() -> dict[str, dict[str, list[str] | str]]:
    """Return the lines of each dataset, by version: None of one that cannot be read any more."""
    found: dict[str, dict[str, Any]] = {}
    for out in sorted(one for one in FOLDER.iterdir() if one.is_dir()):
        found[out.name] = {"": lines(out)}
        for one in [] if out.name == "splits" else shardio.log(out).versions[1:]:
            try:
                found[out.name][one.id] = lines(out, one.id)
            except shardio.OptionError:
                found[out.name][one.id] = None
            for tag in one.tags:
                found[out.name][tag] = found[out.name][one.id]
    return found


if __name__ == "__main__":
    if len(sys.argv) > 1:
        FOLDER = Path(sys.argv[1])
    FOLDER.mkdir()  # once: nothing that was frozen is replaced
    with tempfile.TemporaryDirectory() as source:
        write(Path(source))
    text = json.dumps(expected(), indent=1)
    (FOLDER / "expected.json").write_text(text + "\n")
    print(f"{FOLDER}: {sum(file.stat().st_size for file in FOLDER.rglob('*')):,} bytes")
