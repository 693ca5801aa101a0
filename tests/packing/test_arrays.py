"""Arrays that are datasets: each record has the pixels and numbers of its entry, and no pickle is
read.
"""

import gzip
import io
import os
import pickle
import struct
import tarfile
from collections.abc import Callable
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import sources as support_sources
from support.archives import deflated, tar, zipped
from support.conformance import SourceConformance
from support.packing import grouped, interrupted
from support.sources import kind_of, listing
from support.trees import JPEG, Tree, content, plant, shardio

from shardio import ShardDataset, SourceOptions, commit, pack, unpack
from shardio import plan as plan_ahead
from shardio.errors import DamageError, OptionError, ShardioError, SourceChangedError, SourceError
from shardio.formats import manifest
from shardio.packing import sources
from shardio.packing.sources.base import SourceRequest
from shardio.storage.location import locate

pack_all = partial(support_sources.pack_all, max_records=4)

RNG = np.random.default_rng(7)
GREY = RNG.integers(0, 256, (23, 5, 6), np.uint8)
COLOUR = RNG.integers(0, 256, (23, 5, 6, 3), np.uint8)
OTHERS = RNG.integers(0, 256, (9, 5, 6, 3), np.uint8)
LABELS = np.arange(23, dtype=np.uint8) % 10
OTHER_LABELS = LABELS[:9][::-1].copy()
THREE = np.stack([GREY] * 3, 3)  # what grey pixels are when they are read
NAMES = [f"name {i}" for i in range(10)]
CIFAR = "label=1,image=3x5x6"


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def npz(packed: bool = False, **arrays: Any) -> bytes:
    out = io.BytesIO()
    (np.savez_compressed if packed else np.savez)(out, **arrays)
    return out.getvalue()


def idx(array: Any) -> bytes:
    codes = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}
    head = bytes([0, 0, codes[array.dtype.str[1:]], array.ndim])
    big = array.astype(array.dtype.newbyteorder(">"))
    return head + struct.pack(f">{array.ndim}I", *array.shape) + big.tobytes()


def records(images: Any, *labels: Any) -> bytes:
    """Records of CIFAR's binary version: bytes, then planes."""
    planes = images.transpose(0, 3, 1, 2)
    rows = zip(*labels, planes, strict=True)
    return b"".join(bytes(map(int, row[:-1])) + row[-1].tobytes() for row in rows)


def read(out: Path, *fields: str) -> dict[str, tuple[Any, ...]]:
    """What training gets of each record: pixels, and other fields."""
    return {
        one["__key__"]: (one["image"], *(one[field] for field in fields))
        for one in ShardDataset(out, decode="numpy", shuffle=False)
    }


def check(out: Path, images: Any, labels: Any = None, **others: Any) -> None:
    """Compare all records with the truth."""
    columns = ({"label": labels} if labels is not None else {}) | others
    found = read(out, *columns)
    assert sorted(found) == [f"{number:08d}" for number in range(len(images))]
    for number, key in enumerate(sorted(found)):
        pixels, *values = found[key]
        assert pixels.dtype == np.uint8 and np.array_equal(pixels, images[number])
        for (name, column), value in zip(columns.items(), values, strict=True):
            assert np.array_equal(value, column[number]), (key, name)
            assert isinstance(value, np.ndarray) == isinstance(column[number], np.ndarray)


def mnist(compressed: bool) -> Tree:
    files = {
        "train-images-idx3-ubyte": idx(GREY),
        "train-labels-idx1-ubyte": idx(LABELS),
        "t10k-images-idx3-ubyte": idx(GREY[:9]),
        "t10k-labels-idx1-ubyte": idx(OTHER_LABELS),
    }
    if not compressed:
        return dict(files)
    return {f"{name}.gz": gzip.compress(data) for name, data in files.items()}


def cifar(folder: str = "cifar-10-batches-bin/") -> Tree:
    """Batches of ten, so that the order of their names is not that of their numbers."""
    cuts = [*range(0, 23, 2), 23]
    files = {
        f"{folder}data_batch_{i + 1}.bin": records(COLOUR[start:stop], LABELS[start:stop])
        for i, (start, stop) in enumerate(pairwise(cuts))
    }
    assert len(files) > 10
    meta = "\n".join(NAMES).encode() + b"\n\n"
    test = records(OTHERS, OTHER_LABELS)
    return files | {f"{folder}test_batch.bin": test, f"{folder}batches.meta.txt": meta}


# --- the layouts of known datasets ----------------------------------------------------------------


@pytest.mark.parametrize("compressed", [False, True])
def test_idx_files_are_the_splits_of_their_names(compressed: bool, tmp_path: Path) -> None:
    source = plant(tmp_path / "mnist", mnist(compressed))
    assert kind_of(source) == "arrays"
    pack_all(source, tmp_path / "out", jobs=2)
    check(tmp_path / "out" / "train", THREE, LABELS.tolist())
    check(tmp_path / "out" / "test", THREE[:9], OTHER_LABELS.tolist())
    assert not list(tmp_path.glob("out/unpacked-*"))


def test_idx_files_in_every_archive_are_the_dataset_of_the_folder(tmp_path: Path) -> None:
    pack_all(plant(tmp_path / "mnist", mnist(False)), tmp_path / "right")
    for name, make in (("a.tar", tar), ("a.zip", zipped), ("b.zip", deflated)):
        for compressed in (False, True):
            archive = tmp_path / f"{compressed} {name}"
            archive.write_bytes(make(mnist(compressed), "MNIST/raw/"))
            out = tmp_path / f"out {archive.name}"
            pack_all(archive, out)
            assert content(out) == content(tmp_path / "right")
    (tmp_path / "a.tgz").write_bytes(gzip.compress(tar(mnist(True), "MNIST/raw/")))
    pack_all(tmp_path / "a.tgz", tmp_path / "tgz")
    assert content(tmp_path / "tgz") == content(tmp_path / "right")


def test_a_file_beside_the_gz_that_it_was_unpacked_from_is_taken_once(tmp_path: Path) -> None:
    """As torchvision leaves them."""
    raw = plant(tmp_path / "mnist" / "MNIST" / "raw", {**mnist(False), **mnist(True)})
    pack_all(tmp_path / "mnist", tmp_path / "out")
    check(tmp_path / "out" / "train", THREE, LABELS.tolist())
    assert kind_of(raw) == kind_of(tmp_path / "mnist") == "arrays"


@pytest.mark.parametrize("packed", [False, True])
def test_an_npz_has_the_splits_and_fields_of_its_arrays(packed: bool, tmp_path: Path) -> None:
    """As MedMNIST's: labels are columns; of several, a row is an array."""
    several = RNG.integers(0, 2, (9, 14), np.uint8)
    source = tmp_path / "medmnist.npz"
    source.write_bytes(
        npz(
            packed,
            train_images=COLOUR,
            train_labels=LABELS[:, None],
            val_images=GREY[:4],
            val_labels=LABELS[:4, None],
            test_images=OTHERS,
            test_labels=several,
        )
    )
    done = pack_all(source, tmp_path / "out", jobs=2)
    assert [one.split for one in done] == ["test", "train", "val"]
    assert done[1].fields == {"__key__": "key", "image": "image", "label": "int"}
    assert done[0].fields["label"] == "array"
    check(tmp_path / "out" / "train", COLOUR, LABELS.tolist())
    check(tmp_path / "out" / "val", THREE[:4], LABELS[:4].tolist())
    check(tmp_path / "out" / "test", OTHERS, several)


def test_an_npz_of_x_and_y_is_known(tmp_path: Path) -> None:
    """As Keras' mnist.npz."""
    arrays = {"x_train": GREY, "y_train": LABELS, "x_test": OTHERS, "y_test": OTHER_LABELS}
    (tmp_path / "mnist.npz").write_bytes(npz(**arrays))
    done = pack_all(tmp_path / "mnist.npz", tmp_path / "out")
    assert done[0].theirs == {"image": "x", "label": "y"}
    check(tmp_path / "out" / "train", THREE, LABELS.tolist())
    check(tmp_path / "out" / "test", OTHERS, OTHER_LABELS.tolist())


@pytest.mark.parametrize("form", ["folder", "tgz"])
def test_records_of_one_size_are_read_by_their_layout(form: str, tmp_path: Path) -> None:
    if form == "folder":
        source = plant(tmp_path / "cifar", cifar())
    else:
        source = tmp_path / "cifar-10-binary.tar.gz"
        source.write_bytes(gzip.compress(tar(cifar())))
    done = pack_all(source, tmp_path / "out", layout=CIFAR, jobs=2)
    check(tmp_path / "out" / "train", COLOUR, LABELS.tolist())
    check(tmp_path / "out" / "test", OTHERS, OTHER_LABELS.tolist())
    assert "names of the classes are the 10 in" in str(done[0])
    index = manifest.load(locate(tmp_path / "out" / "train"))
    assert index.classes == tuple(NAMES)
    assert index.options["layout"] == CIFAR
    with pytest.raises(SourceError, match=r"no whole number of records of 92 bytes"):
        pack_all(source, tmp_path / "no", layout="coarse=1,label=1,image=3x5x6")


def test_a_label_of_several_is_a_field_by_its_name(tmp_path: Path) -> None:
    """As of CIFAR-100."""
    coarse = LABELS // 2
    tree = {
        "train.bin": records(COLOUR, coarse, LABELS),
        "test.bin": records(OTHERS, coarse[:9], OTHER_LABELS),
        "coarse_label_names.txt": b"a\nb\nc\nd\ne\n",
        "fine_label_names.txt": "\n".join(NAMES).encode(),
    }
    source, layout = plant(tmp_path / "cifar", tree), "coarse=1,label=1,image=3x5x6"
    pack_all(source, tmp_path / "out", layout=layout)
    check(tmp_path / "out" / "train", COLOUR, LABELS.tolist(), coarse=coarse.tolist())
    assert manifest.load(locate(tmp_path / "out" / "test")).classes == tuple(NAMES)


# --- which array is what --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("images", "right"),
    [
        (GREY, THREE),
        (GREY[..., None], THREE),
        (GREY[:, None], THREE),
        (COLOUR, COLOUR),
        (np.ascontiguousarray(COLOUR.transpose(0, 3, 1, 2)), COLOUR),
    ],
)
def test_pixels_are_told_by_their_shape(images: Any, right: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "anything.npy", images)
    pack_all(tmp_path / "anything.npy", tmp_path / "out")
    check(tmp_path / "out", right)
    assert [one.with_suffix("").name for one in tmp_path.glob("*.npy")] == ["anything"]


def test_other_arrays_of_one_length_are_fields_by_their_types(tmp_path: Path) -> None:
    weight, flag = np.arange(23, dtype=">f4") / 3, np.arange(23) % 2 == 0
    text = np.array([f"é{i}" for i in range(23)])
    boxes = RNG.random((23, 2, 4)).astype(">f8")
    tree = {
        "images.npy": npy(COLOUR),
        "labels.npy": npy(LABELS.astype(">i8")),
        "weight.npy": npy(weight),
        "flag.npy": npy(flag),
        "text.npy": npy(text),
        "boxes.npy": npy(boxes),
        "mean.npy": npy(np.zeros(3)),
        "scale.npy": npy(np.float64(2)),
        "LICENSE.txt": b"free",
    }
    [done] = pack_all(plant(tmp_path / "arrays", tree), tmp_path / "out")
    kinds = {"flag": "bool", "weight": "float", "text": "str", "boxes": "array", "label": "int"}
    assert done.fields == {"__key__": "key", "image": "image"} | kinds
    assert "left out" in str(done) and "'mean' (3,) float64" in str(done)
    others = {"weight": weight.tolist(), "flag": flag.tolist(), "text": text.tolist()}
    check(tmp_path / "out", COLOUR, LABELS.tolist(), **others, boxes=boxes)


def test_folders_and_files_of_splits_are_splits(tmp_path: Path) -> None:
    by_folder = {
        "train/X.npy": npy(COLOUR),
        "train/y.npy": npy(LABELS),
        "valid/X.npy": npy(OTHERS),
        "valid/y.npy": npy(OTHER_LABELS),
    }
    by_file = {
        "train.npz": npz(X=COLOUR, y=LABELS),
        "valid.npz": npz(X=OTHERS, y=OTHER_LABELS),
    }
    for name, tree in (("folders", by_folder), ("files", by_file)):
        pack_all(plant(tmp_path / name, tree), tmp_path / f"{name} out")
        check(tmp_path / f"{name} out" / "train", COLOUR, LABELS.tolist())
        check(tmp_path / f"{name} out" / "valid", OTHERS, OTHER_LABELS.tolist())
    assert content(tmp_path / "folders out") == content(tmp_path / "files out")


def test_fields_choose_among_arrays(tmp_path: Path) -> None:
    (tmp_path / "two.npz").write_bytes(npz(day=COLOUR, night=THREE, kind=LABELS))
    with pytest.raises(OptionError, match=r"several arrays .*: day, night; --fields"):
        pack_all(tmp_path / "two.npz", tmp_path / "out")
    fields = {"image": "night", "label": "kind"}
    [done] = pack_all(tmp_path / "two.npz", tmp_path / "out", fields=fields)
    assert done.fields["day"] == "array"
    check(tmp_path / "out", THREE, LABELS.tolist(), day=COLOUR)
    with pytest.raises(OptionError, match="no field is called 'dusk'"):
        pack_all(tmp_path / "two.npz", tmp_path / "no", fields={"image": "dusk"})
    with pytest.raises(OptionError, match="keys are the numbers"):
        pack_all(tmp_path / "two.npz", tmp_path / "no", fields=fields | {"__key__": "kind"})


def test_where_selects_by_numbers_and_keys_stay(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(npz(images=COLOUR, labels=LABELS, weight=LABELS / 10))
    where = {"label": [3, 4], "weight": lambda column: column > 0.35}
    pack_all(tmp_path / "a.npz", tmp_path / "out", where=where)
    assert sorted(read(tmp_path / "out")) == ["00000004", "00000014"]
    found = read(tmp_path / "out")["00000014"][0]
    assert np.array_equal(found, COLOUR[14])
    with pytest.raises(OptionError, match=r"'size': arrays are selected by.*label, weight"):
        pack_all(tmp_path / "a.npz", tmp_path / "no", where={"size": [1]})


def test_names_of_classes_are_taken_from_one_text_only(tmp_path: Path) -> None:
    folders = (tmp_path / str(number) for number in count())

    def classes(**texts: bytes) -> tuple[str, ...] | None:
        beside = {f"{name}.txt": data for name, data in texts.items()}
        return listing(plant(next(folders), tree | beside)).classes

    names = "\n".join(NAMES).encode()
    tree = {"images.npy": npy(COLOUR), "labels.npy": npy(LABELS)}
    assert classes() is None
    assert classes(class_names=names, readme=names) == tuple(NAMES)
    assert classes(class_names=names, labels=names) is None
    assert classes(class_names=names.rpartition(b"\n")[0]) is None
    assert classes(class_names=b"a\n" * 10) is None
    assert classes(class_names=names.replace(b"name 3", b"\xff")) is None
    assert classes(class_names=names.replace(b"name 3", b"")) is None
    (tmp_path / "a.npz").write_bytes(npz(images=COLOUR, labels=LABELS, names=np.array(NAMES)))
    [done] = pack_all(tmp_path / "a.npz", tmp_path / "out")
    assert (done.classes, done.fields) == (10, {"__key__": "key", "image": "image", "label": "int"})
    other = {"image": "images", "label": "labels"}
    pack_all(plant(tmp_path / "x", tree | {"names.txt": names}), tmp_path / "y", fields=other)
    pack_all(tmp_path / "x", tmp_path / "z", classes=tmp_path / "y", where={"label": ["name 3"]})
    assert {one[1] for one in read(tmp_path / "z", "label").values()} == {3}


# --- pixels, sizes, unpacking ---------------------------------------------------------------------


def test_pixels_are_packed_as_raw_ones_are(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(npz(images=COLOUR, labels=LABELS))
    [done] = pack_all(tmp_path / "a.npz", tmp_path / "out")
    assert done.pixels == (5, 6)
    pack_all(tmp_path / "a.npz", tmp_path / "told", encode="raw")
    assert content(tmp_path / "out") == content(tmp_path / "told")
    files = {f"c/{i:02d}.png": png(one) for i, one in enumerate(COLOUR)}
    pack_all(plant(tmp_path / "files", files), tmp_path / "right", encode="raw")
    raw = [one["image"] for one in ShardDataset(tmp_path / "right", decode=None, shuffle=False)]
    ours = [one["image"] for one in ShardDataset(tmp_path / "out", decode=None, shuffle=False)]
    assert sorted(raw) == sorted(ours)
    pack_all(tmp_path / "a.npz", tmp_path / "small", resize=4)
    assert {one.shape for (one,) in read(tmp_path / "small").values()} == {(4, 4, 3)}
    with pytest.raises(OptionError, match="--encode raw packs pixels"):
        pack_all(tmp_path / "a.npz", tmp_path / "no", jpeg_tiles=True)


def png(array: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(array).save(out, "PNG")
    return out.getvalue()


def test_unpack_gives_a_ppm_of_each_number(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(npz(train_images=GREY, train_labels=LABELS))
    pack_all(tmp_path / "a.npz", tmp_path / "out")
    unpack(tmp_path / "out", tmp_path / "back")
    found = sorted((tmp_path / "back" / "train").iterdir())
    assert [one.name for one in found] == [f"{i:08d}.ppm" for i in range(23)]
    for path, right in zip(found, THREE, strict=True):
        with Image.open(path) as image:
            assert np.array_equal(np.asarray(image), right)


# --- the same dataset -----------------------------------------------------------------------------


class TestArraysAsSource(SourceConformance):
    KIND = "arrays"

    def make(self, root: Path) -> Path:
        arrays = {"images.npy": npy(COLOUR[:12]), "labels.npy": npy(LABELS[:12])}
        return plant(root, arrays | {"boxes.npy": npy(np.ones((12, 4), np.float32))})

    def change(self, path: Path) -> None:
        (path / "labels.npy").write_bytes(npy(LABELS[:12][::-1].copy()))


@pytest.mark.parametrize("form", ["npz", "records"])
def test_parts_jobs_a_plan_ahead_and_a_dry_run_agree(form: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_records": 4}
    if form == "npz":
        source = tmp_path / "a.npz"
        source.write_bytes(npz(True, train_images=COLOUR, train_labels=LABELS, val_images=OTHERS))
    else:
        source, options["layout"] = tmp_path / "a.tgz", CIFAR
        source.write_bytes(gzip.compress(tar(cifar())))
    pack_all(source, tmp_path / "right", **options)
    flags = ["--layout", CIFAR] if form == "records" else []
    said = shardio("pack", source, tmp_path / "dry", "--dry-run", *flags).stdout
    assert "would pack 23 records" in said and not (tmp_path / "dry").exists()
    for part in (2, 3, 1):
        pack_all(source, tmp_path / "parts", part=(part, 3), jobs=2, **options)
    commit(tmp_path / "parts")
    plan_ahead(source, tmp_path / "ahead", **grouped(options))
    for part in (1, 2):
        pack(source, tmp_path / "ahead", jobs=1, **grouped({"part": (part, 2)}))
    commit(tmp_path / "ahead")
    right = content(tmp_path / "right")
    for other in ("parts", "ahead"):
        there = content(tmp_path / other)
        assert {key for key in there if b".shardio" not in key} == set(right)
        assert all(there[key] == right[key] for key in right)
    assert all(one.already for one in pack_all(source, tmp_path / "right", **options))


def test_a_killed_packing_goes_on_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "a.npz"
    source.write_bytes(npz(True, images=COLOUR, labels=LABELS))
    pack_all(source, tmp_path / "right")
    interrupted(monkeypatch, pack_all, source, tmp_path / "out")
    assert list(tmp_path.glob("out/unpacked-*"))
    [done] = pack_all(source, tmp_path / "out")
    assert done.kept == 2
    assert content(tmp_path / "out") == content(tmp_path / "right")
    assert not list(tmp_path.glob("out/unpacked-*"))


def test_a_work_dir_is_where_arrays_are_unpacked(tmp_path: Path) -> None:
    for packed in (True, False):
        (tmp_path / f"{packed}.npz").write_bytes(npz(packed, images=COLOUR, labels=LABELS))
    work = tmp_path / "work"
    pack(tmp_path / "True.npz", tmp_path / "out", work_dir=work, jobs=1)
    check(tmp_path / "out", COLOUR, LABELS.tolist())
    assert content(work) == {}
    with pytest.raises(OptionError, match="work_dir: only where"):
        pack(tmp_path / "False.npz", tmp_path / "no", work_dir=work, jobs=1)


def test_other_pixels_of_one_size_are_another_dataset(tmp_path: Path) -> None:
    """As Fashion-MNIST over MNIST: same names, sizes and times."""
    source = plant(tmp_path / "a", {"images.npy": npy(GREY), "labels.npy": npy(LABELS)})
    pack_all(source, tmp_path / "out")
    plant(source, {"images.npy": npy(GREY[::-1].copy())})
    with pytest.raises(ShardioError, match="values"):
        pack_all(source, tmp_path / "out")


@pytest.mark.parametrize("change", ["time", "size", "gone"])
def test_a_file_that_changes_while_it_is_packed_is_an_error(change: str, tmp_path: Path) -> None:
    source = plant(tmp_path / "a", {"images.npy": npy(GREY), "labels.npy": npy(LABELS)})
    request = support_sources.request(source)
    source_of = listing(source).source
    piece, described = source_of.piece(np.array([3])), source_of.describe()
    file = source / "images.npy"
    with pytest.raises(SourceChangedError, match=r"images\.npy"), source_of.open() as get:
        assert get(3)["label"] == 3
        if change == "gone" or change == "time":
            os.utime(file)
        else:
            with open(file, "ab") as out:
                out.write(b"x")
            os.utime(file, ns=(10**18, 10**18))
    if change == "gone":
        file.unlink()
    with pytest.raises(ShardioError, match=r"images\.npy"), source_of.open():
        pass
    with pytest.raises(ShardioError, match=r"images|changed"):
        sources.reopen(request, "arrays", "", described, piece)


# --- errors ---------------------------------------------------------------------------------------

FLAT = GREY.reshape(23, -1)
OBJECTS = np.array([{}, 1] * 4, object)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": GREY / 255, "labels": LABELS}, r"images\.npy.*float64: expected pixels"),
        ({"images": FLAT}, r"'images' \(23, 30\) uint8: expected the shape .*reshape it"),
        ({"images": np.zeros((4, 3, 9, 3), np.uint8)}, "which axis has the channels"),
        ({"images": np.zeros((4, 8, 8, 4), np.uint8)}, r"expected the shape \(N, H, W\)"),
        ({"images": np.asfortranarray(GREY)}, r"Fortran's order; save numpy\.ascontiguousarray"),
        ({"images": OBJECTS}, "objects, which numpy stores as a pickle"),
        ({"images": GREY[:8], "labels": OBJECTS}, r"labels\.npy.*a pickle"),
        ({"images": GREY, "labels": LABELS[:9]}, r"has 23 entries, and 'labels' .* has 9"),
        ({"points": LABELS, "weights": LABELS}, r"none of its arrays is known to be of images"),
        ({"images": GREY[:0]}, "there are no records"),
        ({"images": GREY[:1], "text": np.array(["\udcff"])}, r"text\.npy.*is no Unicode"),
        ({"images": GREY[:1], "text": np.array([b"\xff"])}, r"text\.npy.*not UTF-8"),
    ],
)  # fmt: skip
def test_what_is_no_dataset_is_said(arrays: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(npz(**arrays))
    with pytest.raises(SourceError, match=message):
        pack_all(tmp_path / "a.npz", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_pickle_in_an_array_is_not_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    arrays = {"images": GREY[:1], "extra": np.array([Bomb()], object)}
    (tmp_path / "a.npz").write_bytes(npz(**arrays))
    [done] = pack_all(tmp_path / "a.npz", tmp_path / "out")
    assert "extra" not in done.fields and "a pickle" in str(done)
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(SourceError, match="runs the code"):
        pack_all(tmp_path / "x.pkl", tmp_path / "no")
    assert not (tmp_path / "ran").exists()


def test_damaged_files_are_errors_with_their_names(tmp_path: Path) -> None:
    whole = npy(GREY)
    stored = npz(images=GREY)
    at = stored.index(GREY.tobytes()) + 99
    bad = {
        "cut.npy": whole[:-1],
        "long.npy": whole + b"x",
        "head.npy": whole[:40],
        "empty.npy": b"",
        "other.npy": b"\x89PNG\r\n\x1a\n",
        "cut-idx3-ubyte": idx(GREY)[:-1],
        "head-idx3-ubyte": idx(GREY)[:9],
        "cut-idx3-ubyte.gz": gzip.compress(idx(GREY)[:-1]),
        "torn-idx3-ubyte.gz": gzip.compress(idx(GREY))[:-9],
        "cut.npz": stored[:-9],
        "flipped.npz": stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :],
    }
    for name, data in bad.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises((DamageError, SourceError), match=name.replace(".", r"\.")):
            pack_all(tmp_path / name, tmp_path / "out")
        assert not list(tmp_path.glob("out/*"))
    for name, data in {
        "labels.npy": npy(LABELS)[:-1],
        "labels.npy.gz": gzip.compress(npy(LABELS)[:-1]),
        "labels-idx1-ubyte.gz": gzip.compress(idx(LABELS) + b"x"),
    }.items():
        source = plant(tmp_path / f"with {name}", {"images.npy": npy(GREY), name: data})
        with pytest.raises(DamageError, match=name.replace(".", r"\.")):
            pack_all(source, tmp_path / "out")


PICKLE = pickle.dumps({"data": [1]}, 2)
MAT5, MAT7 = b"MATLAB 5.0 MAT-file, Platform: GLNX", b"MATLAB 7.3 MAT-file, Platform: GLNX"


@pytest.mark.parametrize(
    ("name", "start", "way"),
    [
        ("a.pkl", PICKLE, "pickle.load"),
        ("data_batch_1", PICKLE, "pickle.load"),
        ("train_32x32.mat", MAT5, "scipy.io.loadmat"),
        ("setid.mat", MAT7, "h5py.File"),
        ("a.h5", b"\x89HDF\r\n\x1a\n", "h5py.File"),
    ],
)
def test_what_is_not_read_is_refused_with_the_way_out(
    name: str, start: bytes, way: str, tmp_path: Path
) -> None:
    tree = {name: start + bytes(500), "readme.html": b"<html>"}
    plant(tmp_path / "a", tree)
    (tmp_path / "a.tgz").write_bytes(gzip.compress(tar(tree, "a/")))
    (tmp_path / "a.zip").write_bytes(deflated(tree))
    for source in (tmp_path / "a" / name, tmp_path / "a", tmp_path / "a.tgz", tmp_path / "a.zip"):
        said = shardio("pack", source, tmp_path / "out", code=1).stderr
        assert name in said and way in said and "numpy.savez('" in said
        compile("\n".join(line.strip() for line in said.splitlines()[-2:]), "way out", "exec")
    plant(tmp_path / "a", {"x.jpg": JPEG + bytes(50)})  # beside images it is another matter
    assert kind_of(tmp_path / "a") == "imagefolder"


def test_records_without_a_layout_ask_for_one(tmp_path: Path) -> None:
    source = plant(tmp_path / "cifar", cifar(""))
    for one in (source, source / "test_batch.bin"):
        with pytest.raises(SourceError, match="--layout does, such as label=1,image=3x32x32"):
            pack_all(one, tmp_path / "out")
    for wrong in ("", "label", "label=0,image=3", "label=1,label=1", "label=-1", "image=1x2x3x4x5"):
        with pytest.raises(OptionError, match="layout is"):
            SourceOptions(layout=wrong)
    with pytest.raises(OptionError, match="--layout: for arrays"):
        pack_all(source, tmp_path / "out", layout=CIFAR, kind="files")


def test_arrays_beside_others_are_not_taken_for_datasets(tmp_path: Path) -> None:
    groups = {"1.jpg": JPEG + bytes(50), "1.npy": npy(LABELS), "1.cls": b"3"}
    assert kind_of(plant(tmp_path / "groups", groups)) == "files"
    single = {"0001.npy": npy(COLOUR[0]), "0002.npy": npy(COLOUR[1])}
    assert kind_of(plant(tmp_path / "single", single)) == "imagefolder"
    (tmp_path / "single.tar").write_bytes(tar(single))
    assert kind_of(tmp_path / "single.tar") == "webdataset"
    named = plant(tmp_path / "named", {"X.npy": npy(COLOUR), "y.npy": npy(LABELS), "a.md": b"a"})
    assert kind_of(named) == "arrays"
    plant(named, {"ant/1.jpg": JPEG + bytes(50), "bee/1.jpg": JPEG + bytes(60)})
    with pytest.raises(SourceError, match=r"3 files beside class folders"):
        pack_all(named, tmp_path / "out")
    [done] = pack_all(named, tmp_path / "out", kind="arrays")
    assert "left out, being no arrays: a.md, ant, bee" in str(done)
    (named / "X.npy").unlink()
    plant(named, {"cache.pkl": PICKLE})
    with pytest.raises(SourceError, match=r"3 files beside class folders"):
        pack_all(named, tmp_path / "no")


def test_what_is_no_file_is_no_array(tmp_path: Path) -> None:
    source = plant(tmp_path / "a", {"labels.npy": npy(LABELS)})
    os.mkfifo(source / "images.npy")
    with pytest.raises(ShardioError, match=r"images\.npy: expected a file"):
        pack_all(source, tmp_path / "out")
    (source / "images.npy").unlink()
    (source / "images.npy").symlink_to("nowhere")
    with pytest.raises(SourceError, match=r"images\.npy: cannot be opened"):
        pack_all(source, tmp_path / "out")
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as file:
        file.add(source, "a")
    (tmp_path / "a.tgz").write_bytes(gzip.compress(out.getvalue()))
    with pytest.raises(SourceError, match=r"images\.npy: is a link to"):
        pack_all(tmp_path / "a.tgz", tmp_path / "out")


def test_options_of_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(npz(images=COLOUR))
    refused: dict[str, Callable[[], Any]] = {
        "splits": lambda: pack(tmp_path / "a.npz", tmp_path / "out", splits=True),
        "root": lambda: pack_all(tmp_path / "a.npz", tmp_path / "out", root=tmp_path),
        "label": lambda: pack_all(tmp_path / "a.npz", tmp_path / "out", label="(a)"),
        "classes": lambda: pack_all(tmp_path / "a.npz", tmp_path / "out", classes=tmp_path / "no"),
    }
    for call in refused.values():
        with pytest.raises(ShardioError):
            call()
    request = SourceRequest(b"s3://bucket/a.npz", kind="arrays")
    with pytest.raises(SourceError, match="copy"):
        sources.list_records(request)
