"""A piece of a source, written and read as bytes, reads what the source reads: all kinds of it."""

import dataclasses
import functools
import json
import multiprocessing
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.object_stores import ObjectStore
from support.trees import Tree, content, images, noise, plant

import shardio
from shardio import Storage
from shardio.errors import OptionError, SourceChangedError
from shardio.formats.sample import pack_columns, unpack_columns
from shardio.order import rng
from shardio.packing import sources
from shardio.packing.build_shard import Work, build_or_keep
from shardio.packing.journal import dump, parse
from shardio.packing.options import PackOptions
from shardio.packing.piece import cut as cut_shards
from shardio.packing.plan import make_plan, prepare
from shardio.packing.sources.base import Listing, Rejected, Source, SourceRequest, renumber

CLASSES: Tree = {
    **images(classes=3, each=6),
    "class1/deep/x y%20ü.jpg": noise("deep", 900),
    "class0/003.txt": b"its name is that of an image",
    "class0/x.jpg": b"no image, and alone",
}
GROUPS: Tree = {
    **{f"{n}.jpg": noise(str(n), 500 + n) for n in range(9)},
    **{f"{n}.txt": f"text {n}".encode() for n in range(1, 9, 2)},
    **{f"{n}.cls": b"%d" % n for n in range(0, 9, 3)},
    "4.txt": b"\xff",
    "5.cls": b"no number",
}
MASKS: Tree = {
    f"{split}/{folder}/{n}.{ending}": noise(f"{folder}{n}", 300 + n)
    for n in range(5)
    for split in ("train", "val")
    for folder, ending in (("images", "jpg"), ("masks", "png"))
} | {"val/masks/3.png": b"no image"}
ROWS = [
    {"id": n, "n": n * 7, "x": n / 3, "big": 2**64 - n, "text": f"é{n}" * n, "yes": n % 2 == 0}
    | ({"more": {"list": [n, "a"]}} if n % 3 else {"n": None, "x": None, "text": None})
    for n in range(9)
]
COCO = {
    "images": [{"id": n, "file_name": f"class{n % 3}/00{n % 6}.jpg"} for n in range(6)],
    "annotations": [{"image_id": n // 2, "id": n, "category_id": 7 - n % 2} for n in range(8)],
    "categories": [{"id": 7, "name": "b"}, {"id": 6, "name": "a"}],
}


@dataclass(frozen=True)
class Case:
    """A source below the folder that `there` makes; options as of SourceRequest."""

    path: str
    kind: str
    root: str | None = None
    where: Any = None
    layout: str | None = None
    classes: Sequence[str] | None = None
    rejects: str = ""  # in the reasons of what cannot be read
    local: bool = False  # the file itself lies on disk, though its root need not


CASES = {
    "classes": Case("classes", "imagefolder", rejects="is not an image.*--from files"),
    "chosen": Case("classes", "imagefolder", where={"label": ["class0"]}, rejects="is not an"),
    "other numbers": Case(
        "classes",
        "imagefolder",
        classes=["z", "class2", "class1", "class0"],
        rejects="is not an image",
    ),
    "splits": Case("splits", "imagefolder"),
    "indexed": Case("indexed", "imagefolder", classes=["z", "b", "a"], local=True),
    "groups": Case("groups", "files", rejects="4.txt: byte 0: expected UTF-8"),
    "masks": Case("masks", "trees", rejects="masks/3.png: is not an image"),
    "rows": Case("rows.jsonl", "listing", local=True),
    "paths": Case("paths.csv", "listing", root="classes", local=True, rejects="is not an image"),
    "coco": Case("coco.json", "coco", root="classes", local=True),
    "found coco": Case("found/annotations/coco.json", "coco", classes=["b", "c", "a"], local=True),
    "arrays": Case("arrays.npz", "arrays", where={"label": [0, 1]}, local=True),
    "records": Case("records.bin", "arrays", layout="label=1,image=3x2x2,more=2", local=True),
    "dataset": Case("packed", "dataset", classes=["class2", "class1", "class0"]),
}


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("there")
    plant(root / "classes", CLASSES)
    plant(root / "groups", GROUPS)
    plant(root / "masks", MASKS)
    for split in ("train", "val"):
        plant(root / "splits" / split, images(classes=2, each=4, size=len(split) * 100))
    plant(root / "sound", images())
    shardio.pack(root / "sound", root / "packed", shard_size=2_000)
    # Classes of a folder that has an index are numbered as in it, also where one is gone.
    plant(root / "indexed", {f"{name}/{n}.jpg": noise(name, 300) for name in "abz" for n in "12"})
    shardio.index(root / "indexed")
    shutil.rmtree(root / "indexed" / "b")
    (root / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    names = [*CLASSES, "class0/000.jpg"]
    rows = "".join(f"./{name},{n % 2},{n / 3}\n" for n, name in enumerate(names))
    (root / "paths.csv").write_text(f"path,label,weight\n{rows}")
    plant(root / "found" / "images", images())
    pixels = np.arange(20 * 12, dtype=np.uint8).reshape(20, 2, 2, 3)
    many = np.arange(60).reshape(20, 3)
    np.savez(root / "arrays.npz", train_x=pixels, train_y=many[:, 0] % 3, train_many=many,
             test_x=pixels[:5], test_y=many[:5, 0] % 3)  # fmt: skip
    (root / "records.bin").write_bytes(bytes(range(15)) * 13)
    for path in ("coco.json", "found/annotations/coco.json"):
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(json.dumps(COCO))
    return root


@pytest.fixture(scope="module")
def other_process() -> Iterator[Pool]:
    """A process that inherits nothing of this one."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield pool


def request_of(case: Case, base: str, disk: Path, storage: Storage | None) -> SourceRequest:
    above = str(disk) if case.local else base
    return sources.detect_kind(
        SourceRequest(
            path=os.fsencode(f"{above}/{case.path}"),
            kind=case.kind,
            root=None if case.root is None else f"{base}/{case.root}",
            where=case.where,
            layout=case.layout,
            storage=storage or Storage(),
        )
    )


def listed(case: Case, request: SourceRequest) -> dict[str, Listing]:
    found = sources.list_records(request)
    if case.classes is None:
        return found
    return {name: renumber(one, case.classes) for name, one in found.items()}


def read(source: Source, places: Sequence[int]) -> list[Any]:
    """What is read at each place: a sample, or why there is none."""
    found: list[Any] = []
    with source.open() as get:
        for place in places:
            source.will_need(place)
            try:
                found.append({name: (type(one), plain(one)) for name, one in get(place).items()})
            except Rejected as error:
                found.append(str(error))
    return found


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def cut(case: Case, request: SourceRequest) -> str:
    """Compare pieces with their source, of random places; returns the reasons that both gave."""
    said = []
    for split, listing in listed(case, request).items():
        count = len(listing.keys)
        places = np.arange(count) if listing.places is None else listing.places
        order = places[rng.permutation(count, rng.key(1, 2))]
        described = unpack_columns(pack_columns(listing.source.describe()))
        for piece in np.array_split(order, 3):
            written = pack_columns(listing.source.piece(piece))
            again = sources.reopen(request, case.kind, split, described, unpack_columns(written))
            expected = read(listing.source, piece.tolist())
            assert read(again, range(len(piece))) == expected
            assert pack_columns(again.describe()) == pack_columns(described)  # and cut once more
            assert pack_columns(again.piece(np.arange(len(piece)))) == written
            said += [why for why in expected if isinstance(why, str)]
    return "\n".join(said)


@pytest.mark.parametrize("name", CASES)
def test_pieces_of_random_places_read_what_the_source_reads(name: str, there: Path) -> None:
    case = CASES[name]
    said = cut(case, request_of(case, str(there), there, None))
    assert bool(said) == bool(case.rejects)
    assert re.search(case.rejects, said)


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.root or not case.local]
)
def test_pieces_of_a_source_in_a_store_read_what_it_reads(
    name: str, there: Path, s3: ObjectStore
) -> None:
    case, storage = CASES[name], Storage(options=s3.options)
    assert bool(cut(case, request_of(case, s3.url, there, storage))) == bool(case.rejects)


@pytest.mark.parametrize("name", CASES)
def test_a_shard_that_is_built_of_its_piece_alone_has_the_same_bytes(
    name: str, there: Path, other_process: Pool, tmp_path: Path
) -> None:
    case = CASES[name]
    request = request_of(case, str(there), there, None)
    for split, listing in listed(case, request).items():
        options = PackOptions(source=case.kind, split=split, shuffle=True, max_records=3)
        plan = prepare(make_plan(listing, options), listing.source, request)
        start, *pieces, end = dump(plan)

        def read(at: int, length: int, data: bytes = b"".join((start, *pieces))) -> bytes:
            return data[at : at + length]

        reopen = functools.partial(sources.reopen, request)
        written = parse(start + end, str(there), read, reopen)
        whole, *alone = (tmp_path / split / where for where in ("whole", "alone", "of a journal"))
        for directory in (whole, *alone):
            directory.mkdir(parents=True)
        work = Work(plan, str(whole), "0" * 16, True, {})
        expected = [build_or_keep(work, number, no_progress) for number in range(plan.shards)]
        for directory, its in zip(alone, (plan, written), strict=True):
            there_work = dataclasses.replace(work, plan=its, directory=str(directory))
            build, cut_out = cut_shards(there_work, range(plan.shards), request, None)
            made = [other_process.apply(build, (one, no_progress)) for one in cut_out]
            assert made == expected
            assert content(directory) == content(whole)


def no_progress(size: int) -> None:
    """Take note of nothing."""


def test_nothing_of_where_a_source_lies_is_in_its_pieces(there: Path, s3: ObjectStore) -> None:
    for name, case in CASES.items():
        for base in (str(there), s3.url):
            if case.local and case.root is None and base == s3.url:
                continue
            request = request_of(case, base, there, Storage(options=s3.options))
            for listing in listed(case, request).values():
                places = np.arange(1) if listing.places is None else listing.places[:1]
                source = listing.source
                written = pack_columns([source.describe(), source.piece(places)])
                secrets = [str(there), s3.url, *map(str, s3.options.values())]
                assert not [one for one in secrets if one.encode() in written], name


def test_a_file_that_changed_since_it_was_listed_is_refused_by_its_piece(tmp_path: Path) -> None:
    request = request_of(CASES["classes"], str(tmp_path), tmp_path, None)
    plant(tmp_path / "classes", images())
    source = sources.list_records(request)[""].source
    piece = source.piece(np.array([3, 1]))
    (tmp_path / "classes/class0/001.jpg").write_bytes(noise("other", 400))
    again = sources.reopen(request, "imagefolder", "", source.describe(), piece)
    with again.open() as get:
        assert get(0)["__key__"] == b"class0/003.jpg"
        with pytest.raises(SourceChangedError, match=r"class0/001.jpg: changed since"):
            get(1)


def test_another_dataset_than_was_listed_is_refused(there: Path, tmp_path: Path) -> None:
    request = request_of(CASES["dataset"], str(there), there, None)
    source = sources.list_records(request)[""].source
    plant(tmp_path / "other", images(each=9))
    shardio.pack(tmp_path / "other", tmp_path / "packed")
    moved = dataclasses.replace(request, path=os.fsencode(tmp_path / "packed"))
    with pytest.raises(SourceChangedError, match=r"packed: changed since .* another dataset"):
        sources.reopen(moved, "dataset", "", source.describe(), source.piece(np.array([0])))


def test_files_of_another_format_without_an_index_have_no_pieces(
    there: Path, tmp_path: Path
) -> None:
    shardio.export(there / "packed", tmp_path / "tars", format="webdataset")
    request = sources.detect_kind(SourceRequest(path=os.fsencode(tmp_path / "tars")))
    with pytest.raises(OptionError, match=r"tars.*as a whole; make one by `shardio index`"):
        sources.check_pieces(request)
    shardio.index(tmp_path / "tars")
    indexed = Case("tars", "dataset")
    assert cut(indexed, request_of(indexed, str(tmp_path), tmp_path, None)) == ""


def test_a_source_that_is_renumbered_twice_has_the_numbers_of_both(there: Path) -> None:
    case = CASES["indexed"]
    listing = listed(case, request_of(case, str(there), there, None))[""]
    with listing.source.open() as get:
        found = {listing.keys[place][:1]: get(place)["label"] for place in range(4)}
    assert found == {b"a": 2, b"z": 0}
