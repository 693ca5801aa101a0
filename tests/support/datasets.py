"""Miniatures of public datasets as they are distributed: real names of files, a few images.

Each function here is a section of docs/datasets.md, which says where the layout is from. It writes
the files into the current folder, and returns what packing must make of them.
"""

import functools
import gzip
import io
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pyarrow
from PIL import Image
from pyarrow import parquet

from support import archives
from support.archives import class_tars, deflated, tar, zipped
from support.small_datasets import jpeg

try:
    from scipy.io import savemat
except ImportError:
    savemat = None

Files = dict[str, bytes]
# By the folder of a packed dataset, by the key of a record: its fields. A `label` that is a text is
# the name of a class.
Truth = dict[str, dict[str, dict[str, Any]]]

BUILDERS: dict[str, Callable[[], Truth]] = {}


def section(title: str) -> Callable[[Callable[[], Truth]], Callable[[], Truth]]:
    """Name the section of the page that a function is the miniature of."""

    def named(build: Callable[[], Truth]) -> Callable[[], Truth]:
        BUILDERS[title] = build
        return build

    return named


# ------------------------------------------------------------------------------------------- files


def photo(name: str) -> bytes:
    """A JPEG of its own."""
    return jpeg(zlib.crc32(name.encode()))


@functools.cache
def png(name: str, mode: str = "L") -> bytes:
    """A PNG of its own, as masks are."""
    out = io.BytesIO()
    noise = np.random.default_rng(zlib.crc32(name.encode())).integers(0, 9, (16, 24), np.uint8)
    Image.fromarray(noise).convert(mode).save(out, "PNG")
    return out.getvalue()


def photos(names: Iterable[str]) -> Files:
    return {name: photo(name) for name in names}


def text(*lines: str) -> bytes:
    return "".join(line + "\n" for line in lines).encode()


MATLAB: dict[str, dict[str, Any]] = {}  # what is in a file, where no scipy writes it


def matlab(name: str, **values: Any) -> bytes:
    """A file of MATLAB; without scipy a stand-in, whose values `loadmat` below knows."""
    if savemat is None:
        MATLAB[name] = values
        return name.encode()
    out = io.BytesIO()
    savemat(out, values)
    return out.getvalue()


def loadmat(path: str | os.PathLike[str], *, squeeze_me: bool = False) -> dict[str, Any]:
    """Stand in for that of scipy: the values of `matlab`, as scipy gives them with squeeze_me."""
    assert squeeze_me
    return MATLAB[Path(path).name]


FORMS: dict[str, Callable[[Files], bytes]] = {
    ".tar": tar,
    ".zip": deflated,
    ".tgz": lambda files: gzip.compress(tar(files), 1),
    ".gz": lambda files: gzip.compress(tar(files), 1),
}


def put(name: str, files: Files | bytes) -> None:
    """Write an archive of these files, or one file."""
    data = files if isinstance(files, bytes) else FORMS[Path(name).suffix](files)
    archives.write(Path(name), data)


def below(folder: str, files: Files) -> Files:
    """Return files as they lie in a folder."""
    return {f"{folder}/{os.fsdecode(name)}": data for name, data in files.items()}


def classes_of(files: Files) -> dict[str, dict[str, Any]]:
    """Return the records of class folders."""
    return {name: {"image": data, "label": name.split("/")[0]} for name, data in files.items()}


def split_as(out: str, splits: Mapping[str, Iterable[str]], records: Mapping[str, Any]) -> Truth:
    """Return the truth of splits, by the keys of the records of each."""
    return {f"{out}/{split}": {key: records[key] for key in keys} for split, keys in splits.items()}


def numbered(images: Iterable[Any], labels: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Return the records of arrays, whose keys are numbers."""
    pairs = zip(images, labels, strict=True)
    return {f"{n:08}": {"image": image, "label": label} for n, (image, label) in enumerate(pairs)}


WNIDS = ("n01440764", "n01443537")


# -------------------------------------------------------------------------------------- photographs


def imagenet_val() -> tuple[Files, dict[str, str]]:
    """Return images of the validation, not in the order of their names, and their classes."""
    files = photos(f"ILSVRC2012_val_{number:08}.JPEG" for number in (2, 3, 1))
    return files, dict(zip(sorted(files), (WNIDS[1], WNIDS[0], WNIDS[0]), strict=True))


def imagenet_train() -> Files:
    """Return images of the training; one is a PNG, whatever its name says."""
    odd = "n02105855/n02105855_2933.JPEG"
    return photos(f"{wnid}/{wnid}_{n}.JPEG" for wnid in WNIDS for n in (10026, 9)) | {odd: png(odd)}


def imagenet_truth(val: Files, labels: Mapping[str, str]) -> Truth:
    return {
        "imagenet/train": classes_of(imagenet_train()),
        "imagenet/val": {key: {"image": val[key], "label": label} for key, label in labels.items()},
    }


@section("ImageNet-1k, of image-net.org")
def imagenet() -> Truth:
    """The numbers of the ground truth are not in the order of the names of the classes."""
    put("ILSVRC2012_img_train.tar", class_tars(imagenet_train()))
    val, labels = imagenet_val()
    put("ILSVRC2012_img_val.tar", val)
    synsets = [(1, WNIDS[1], 0), (2, WNIDS[0], 0), (1001, "n00001740", 2)]
    kinds = [("ILSVRC2012_ID", object), ("WNID", object), ("num_children", object)]
    data: Files = {
        "meta.mat": matlab("meta.mat", synsets=np.array(synsets, kinds)),
        "ILSVRC2012_validation_ground_truth.txt": text("1", "2", "2"),
    }
    put(
        "ILSVRC2012_devkit_t12.tar.gz",
        {"ILSVRC2012_devkit_t12/readme.txt": b"x"} | below("ILSVRC2012_devkit_t12/data", data),
    )
    return imagenet_truth(val, labels)


@section("ImageNet-1k, of Kaggle")
def imagenet_of_kaggle() -> Truth:
    train, (val, labels) = imagenet_train(), imagenet_val()
    solution = [f"{key[:-5]},{label} 115 49 448 294" for key, label in sorted(labels.items())]
    solution[1] += f" {WNIDS[1]} 1 2 3 4"  # of several boxes the first
    test = photos(["ILSVRC2012_test_00000001.JPEG"])
    put(
        "imagenet-object-localization-challenge.zip",
        below("ILSVRC/Data/CLS-LOC/train", train)
        | below("ILSVRC/Data/CLS-LOC/val", val)
        | below("ILSVRC/Data/CLS-LOC/test", test)
        | {f"ILSVRC/Annotations/CLS-LOC/train/{key[:-5]}.xml": b"<annotation/>" for key in train}
        | {"ILSVRC/ImageSets/CLS-LOC/val.txt": text(*(f"{key[:-5]} 1" for key in val))}
        | {
            "LOC_sample_submission.csv": text("ImageId,PredictionString"),
            "LOC_synset_mapping.txt": text(*(f"{wnid} tench, Tinca tinca" for wnid in WNIDS)),
            "LOC_train_solution.csv": text("ImageId,PredictionString"),
            "LOC_val_solution.csv": text("ImageId,PredictionString", *solution[::-1]),
        },
    )
    return imagenet_truth(val, labels)


@section("ImageNet-21k")
def imagenet_21k() -> Truth:
    files = imagenet_train()
    put("winter21_whole.tar.gz", below("winter21_whole", class_tars(files)))
    return {"imagenet21k": classes_of(files)}


@section("Tiny ImageNet")
def tiny_imagenet() -> Truth:
    train = photos(f"{wnid}/images/{wnid}_{n}.JPEG" for wnid in WNIDS for n in (0, 1))
    boxes = {f"{wnid}/{wnid}_boxes.txt": text(f"{wnid}_0.JPEG\t0\t6\t63\t61") for wnid in WNIDS}
    val = dict(zip(("val_0.JPEG", "val_1.JPEG"), WNIDS[::-1], strict=True))
    rows = text(*(f"{name}\t{label}\t0\t32\t44\t62" for name, label in val.items()))
    put(
        "tiny-imagenet-200.zip",
        below(
            "tiny-imagenet-200",
            {"wnids.txt": text(*WNIDS), "words.txt": text("n00001740\tentity")}
            | below("train", train | boxes)
            | below("val/images", photos(val))
            | {"val/val_annotations.txt": rows}
            | below("test/images", photos(["test_0.JPEG"])),
        ),
    )
    corners = {"x0": 0, "y0": 32, "x1": 44, "y1": 62}
    return {
        "tiny/train": classes_of(train),
        "tiny/val": {
            name: {"image": photo(name), "label": label} | corners for name, label in val.items()
        },
    }


@section("Caltech-101")
def caltech_101() -> Truth:
    names = ("accordion", "airplanes", "BACKGROUND_Google")
    files = photos(f"{name}/image_{n:04}.jpg" for name in names for n in (1, 2))
    tars: Files = {
        "101_ObjectCategories.tar.gz": FORMS[".gz"](below("101_ObjectCategories", files)),
        "Annotations.tar": tar({"Annotations/accordion/annotation_0001.mat": b"MATLAB 5.0"}),
    }
    put(
        "caltech-101.zip",
        below("caltech-101", tars) | {"__MACOSX/caltech-101/._Annotations.tar": b"\0\5\x16\7"},
    )
    return {"caltech101": classes_of(files)}


@section("Caltech-256")
def caltech_256() -> Truth:
    files = photos(
        f"{number:03}.{name}/{number:03}_{n:04}.jpg"
        for number, name in ((1, "ak47"), (56, "dog"), (198, "spider"), (257, "clutter"))
        for n in (1, 2)
    )
    stray: Files = {"056.dog/greg/vision309/056_0001.txt": b"", "198.spider/RENAME2": b"mv a b\n"}
    put("256_ObjectCategories.tar", below("256_ObjectCategories", files | stray))
    return {"caltech256": classes_of(files)}


@section("EuroSAT")
def eurosat() -> Truth:
    files = photos(f"{name}/{name}_{n}.jpg" for name in ("AnnualCrop", "SeaLake") for n in (1, 2))
    put("EuroSAT.zip", below("2750", files))
    return {"eurosat": classes_of(files)}


@section("LFW")
def lfw() -> Truth:
    files = photos(
        f"{name}/{name}_{n:04}.jpg"
        for name, count in (("Aaron_Eckhart", 1), ("George_W_Bush", 3))
        for n in range(1, count + 1)
    )
    put("lfw.tgz", below("lfw", files))
    return {"lfw": classes_of(files)}


@section("iNaturalist 2021")
def inaturalist() -> Truth:
    names = (
        "00000_Animalia_Annelida_Clitellata_Haplotaxida_Lumbricidae_Lumbricus_terrestris",
        "02912_Animalia_Chordata_Actinopterygii_Siluriformes_Ictaluridae_Ameiurus_nebulosus",
    )
    truth: Truth = {}
    for split in ("train", "val"):
        files = photos(f"{name}/{split}-8af4-4c60-b9f8-3081c1607644.jpg" for name in names)
        put(f"{split}.tar.gz", below(split, files))
        truth[f"inat/{split}"] = classes_of(files)
    return truth


@section("Dogs vs. Cats")
def dogs_vs_cats() -> Truth:
    train = photos(f"{name}.{n}.jpg" for name in ("cat", "dog") for n in (0, 12499))
    test = photos(f"{n}.jpg" for n in (1, 12500))
    put(
        "dogs-vs-cats.zip",
        {
            "sampleSubmission.csv": text("id,label", "1,0", "12500,0"),
            "test1.zip": zipped(below("test1", test)),
            "train.zip": zipped(below("train", train)),
        },
    )
    return {
        "dogs/train": {key: {"image": data, "label": key[:3]} for key, data in train.items()},
        "dogs/test": {key: {"image": data} for key, data in test.items()},
    }


@section("COCO 2017")
def coco() -> Truth:
    truth: Truth = {}
    found: Files = {}
    for split, name in (("train", "000000000009.jpg"), ("val", "000000397133.jpg")):
        box = {"iscrowd": 0, "bbox": [2.5, 3.0, 10.0, 6.0], "category_id": 58, "area": 60.0}
        number = int(name[:12])
        annotations = [{**box, "image_id": number, "id": 86}]
        images = [{"license": 4, "file_name": name, "height": 16, "width": 24, "id": number}]
        bare = "000000000001.jpg"  # has no boxes
        images.append({**images[0], "file_name": bare, "id": 1})
        categories = [{"id": n, "name": name} for n, name in ((51, "bowl"), (58, "hot dog"))]
        found[f"instances_{split}2017.json"] = json.dumps(
            {"images": images, "annotations": annotations, "categories": categories}
        ).encode()
        captions = {"images": images, "annotations": []}
        found[f"captions_{split}2017.json"] = json.dumps(captions).encode()
        files = photos(str(image["file_name"]) for image in images)
        put(f"{split}2017.zip", below(f"{split}2017", files))
        size = {"width": 24, "height": 16}
        kept = {**box, "id": 86, "label": 1}
        truth[f"coco/{split}"] = {
            name: {"image": photo(name), "image_id": number, "annotations": [kept], **size},
            bare: {"image": photo(bare), "image_id": 1, "annotations": [], **size},
        }
    put("annotations_trainval2017.zip", below("annotations", found))
    return truth


@section("ADE20K")
def ade20k() -> Truth:
    truth: Truth = {}
    files: Files = {
        "objectInfo150.txt": text("Idx\tRatio\tTrain\tVal\tName", "1\t0.1576\t11664\t1172\twall"),
        "sceneCategories.txt": text("ADE_train_00000001 airport_terminal", "ADE_val_00000001 bar"),
    }
    for split, short in (("training", "train"), ("validation", "val")):
        names = [f"ADE_{short}_{n:08}" for n in (1, 2)]
        for name in names:
            files[f"images/{split}/{name}.jpg"] = photo(name)
            files[f"annotations/{split}/{name}.png"] = png(name)
        truth[f"ade20k/{split}"] = {
            f"{name}.jpg": {"image": photo(name), "mask": png(name)} for name in names
        }
    put("ADEChallengeData2016.zip", below("ADEChallengeData2016", files))
    return truth


@section("Cityscapes")
def cityscapes() -> Truth:
    truth: Truth = {}
    pictures: Files = {"README": b"x", "license.txt": b"x"}
    fine: Files = {"README": b"x", "license.txt": b"x"}
    for split, city in (("train", "aachen"), ("val", "frankfurt"), ("test", "berlin")):
        names = [f"{city}/{city}_000000_{frame:06}" for frame in (19, 20)]
        for name in names:
            pictures[f"leftImg8bit/{split}/{name}_leftImg8bit.png"] = png(name, "RGB")
            for kind in ("labelIds", "instanceIds", "color"):
                fine[f"gtFine/{split}/{name}_gtFine_{kind}.png"] = png(name + kind)
            fine[f"gtFine/{split}/{name}_gtFine_polygons.json"] = b'{"objects": []}'
        truth[f"cityscapes/{split}"] = {
            f"{name}_leftImg8bit.png": {"image": png(name, "RGB"), "mask": png(name + "labelIds")}
            for name in names
        }
    put("leftImg8bit_trainvaltest.zip", pictures)
    put("gtFine_trainvaltest.zip", fine)
    return truth


@section("FFHQ")
def ffhq() -> Truth:
    names = ("00000/00000", "00000/00001", "69000/69999")
    files: Files = {f"{name}.png": png(name, "RGB") for name in names}
    put("images1024x1024.zip", below("images1024x1024", files))
    return {"ffhq": {name: {"image": png(name, "RGB")} for name in names}}


@section("Open Images")
def open_images() -> Truth:
    truth: Truth = {}
    head = "ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax,IsOccluded"
    for split, names in (
        ("train", ("000002b66c9c498e", "f01eeaf4aed83f90")),
        ("validation", ("0001eeaf4aed83f9",)),
        ("test", ("000026e7ee790996",)),
    ):
        folders = [f"train_{name[0]}" if split == "train" else split for name in names]
        for name, folder in zip(names, folders, strict=True):
            put(f"{folder}.tar.gz", below(folder, photos([f"{name}.jpg", "without_boxes.jpg"])))
        rows = [
            f"{name},xclick,/m/01g317,1,0.0125,0.1875,0.25,0.5,0\n"
            f"{name},xclick,/m/0284d,1,0.5,0.75,0.125,1.0,1"
            for name in names
        ]
        put(f"{split}-annotations-bbox.csv", text(head, *rows))
        boxes = [
            {"label": "/m/01g317", "box": [0.0125, 0.25, 0.1875, 0.5]},
            {"label": "/m/0284d", "box": [0.5, 0.125, 0.75, 1.0]},
        ]
        truth[f"openimages/{split}"] = {
            f"{folder}/{name}.jpg": {"image": photo(f"{name}.jpg"), "boxes": boxes}
            for name, folder in zip(names, folders, strict=True)
        }
    return truth


@section("LSUN")
def lsun() -> Truth:
    truth: Truth = {}
    for kind in ("train", "val"):
        name = f"church_outdoor_{kind}_lmdb"
        keys = [f"{n}{kind}".encode().hex().ljust(40, "0") for n in range(3)]
        with lmdb.open(name, map_size=1 << 20) as database, database.begin(write=True) as writing:
            for key in keys:
                writing.put(key.encode(), photo(key))
        files = {one: Path(name, one).read_bytes() for one in ("data.mdb", "lock.mdb")}
        put(f"{name}.zip", below(name, files))
        shutil.rmtree(name)
        truth[f"lsun/{kind}"] = {key: {"image": photo(key)} for key in keys}
    return truth


@section("CC12M, by img2dataset")
def cc12m() -> Truth:
    """A shard lacks what could not be downloaded, which the table beside it names."""
    truth: Truth = {"cc12m-packed": {}}
    for shard in ("00000", "00001"):
        keys = [f"{shard}{n:04}" for n in (0, 2)]
        files: Files = {}
        for key in keys:
            about = {"url": f"https://example.com/{key}", "caption": key, "key": key,
                     "status": "success", "width": 24, "height": 16}  # fmt: skip
            files[f"{key}.jpg"] = photo(key)
            files[f"{key}.json"] = json.dumps(about).encode()
            files[f"{key}.txt"] = key.encode()
            truth["cc12m-packed"][key] = {"image": photo(key), "json": about, "txt": key}
        put(f"cc12m/{shard}.tar", files)
        table = pyarrow.table({"key": [f"{shard}{n:04}" for n in range(3)], "status": ["x"] * 3})
        parquet.write_table(table, f"cc12m/{shard}.parquet")
        put(f"cc12m/{shard}_stats.json", b'{"count": 3, "successes": 2}')
    return truth


@section("Parquet")
def hub_parquet() -> Truth:
    truth: Truth = {}
    feature = {
        "image": {"_type": "Image"},
        "label": {"names": ["cat", "dog"], "_type": "ClassLabel"},
    }
    about = {"huggingface": json.dumps({"info": {"features": feature}})}
    for split in ("train", "test"):
        names = [f"{split}{n}" for n in range(3)]
        rows = {
            "image": [{"bytes": photo(name), "path": None} for name in names],
            "label": [0, 1, 1],
        }
        table = pyarrow.table(rows).replace_schema_metadata(about)
        Path("data").mkdir(exist_ok=True)
        file = f"{split}-00000-of-00001.parquet"
        parquet.write_table(table, f"data/{file}")
        truth[f"packed/{split}"] = {
            f"{file[:-8]}/{n:08}": {"image": photo(name), "label": label}
            for n, (name, label) in enumerate(zip(names, ("cat", "dog", "dog"), strict=True))
        }
    return truth


@section("Image folder with metadata.csv")
def hub_folder() -> Truth:
    names = ("images/1.jpg", "images/2.jpg")
    put("train/metadata.csv", text("file_name,text", *(f'{name},a "{name}"' for name in names)))
    for name in names:
        put(f"train/{name}", photo(name))
    return {"packed/train": {name: {"image": photo(name), "text": f'a "{name}"'} for name in names}}


def voc(name: str, category: str) -> bytes:
    """An annotation of Pascal VOC, with a part that has a box, too."""
    return f"""<annotation><folder>VOC2012</folder><filename>{name}.jpg</filename>
<size><width>24</width><height>16</height><depth>3</depth></size><segmented>1</segmented>
<object><name>{category}</name><pose>Left</pose><truncated>0</truncated><difficult>0</difficult>
<bndbox><xmin>3</xmin><ymin>2</ymin><xmax>12</xmax><ymax>16</ymax></bndbox>
<part><name>head</name><bndbox><xmin>4</xmin><ymin>2</ymin><xmax>6</xmax><ymax>4</ymax></bndbox>
</part></object></annotation>
""".encode()


def boxes_of(category: str, **more: Any) -> dict[str, Any]:
    """The fields of an image with this annotation: pixels from 0, and the size of the box."""
    about = {"category": category, "pose": "Left", "truncated": 0, "difficult": 0} | more
    return {"annotations": [{"bbox": [2, 1, 10, 15], **about}], "width": 24, "height": 16}


def kind_of(dog: str) -> str:
    """The name in the annotations, which the name of the class has more than."""
    return dog.split("/")[0].split("-")[1]


@section("Stanford Dogs")
def stanford_dogs() -> Truth:
    dogs = ("n02085620-Chihuahua/n02085620", "n02116738-African_hunting_dog/n02116738")
    names = [f"{dog}_{n}" for n in (7, 10131) for dog in dogs]
    files = photos(f"{name}.jpg" for name in names)
    put("images.tar", below("Images", files))
    put("annotation.tar", {f"Annotation/{name}": voc(name, kind_of(name)) for name in names})
    split = {"train": [*files][:2], "test": [*files][2:]}
    put(
        "lists.tar",
        {
            f"{kind}_list.mat": matlab(f"{kind}_list.mat", file_list=np.array(some, object))
            for kind, some in split.items()
        },
    )
    records = {key: one | boxes_of(kind_of(key)) for key, one in classes_of(files).items()}
    return split_as("dogs", split, records)


# --------------------------------------------------------------------------------- tables of labels


@section("Food-101")
def food_101() -> Truth:
    names = [f"{name}/{n}" for name in ("apple_pie", "waffles") for n in (1005649, 134, 262)]
    split = {"train": names[1:5], "test": [names[0], names[5]]}
    files = photos(f"{name}.jpg" for name in names)
    meta: Files = {
        "classes.txt": text("apple_pie", "waffles"),
        "labels.txt": text("Apple pie", "Waffles"),
    }
    for kind, some in split.items():
        meta[f"{kind}.txt"] = text(*some)
        meta[f"{kind}.json"] = json.dumps({"apple_pie": some}).encode()
    put(
        "food-101.tar.gz",
        below(
            "food-101",
            below("images", files) | below("meta", meta) | {"README.txt": b"x"},
        ),
    )
    records = classes_of(files)
    keys = {kind: [f"{name}.jpg" for name in some] for kind, some in split.items()}
    return split_as("food101", keys, records)


@section("Flowers-102")
def flowers_102() -> Truth:
    """The numbers of images and classes begin at 1."""
    files = photos(f"image_{n:05}.jpg" for n in range(1, 7))
    put("102flowers.tgz", below("jpg", files))
    labels = [77, 77, 1, 102, 1, 102]
    put("imagelabels.mat", matlab("imagelabels.mat", labels=np.array(labels, np.uint8)))
    ids = {"trnid": [6, 1], "valid": [2, 3], "tstid": [5, 4]}
    arrays = {name: np.array(some, np.uint16) for name, some in ids.items()}
    put("setid.mat", matlab("setid.mat", **arrays))
    keys = [*files]
    records = {
        key: {"image": files[key], "label": label - 1}
        for key, label in zip(keys, labels, strict=True)
    }
    splits = zip(("train", "val", "test"), ids.values(), strict=True)
    return split_as(
        "flowers", {kind: [keys[n - 1] for n in some] for kind, some in splits}, records
    )


@section("Oxford-IIIT Pet")
def pets() -> Truth:
    """Of breeds some begin with a capital letter: cats. Files of other kinds lie among images."""
    rows = {"Abyssinian_100": "1 1 1", "great_pyrenees_12": "15 2 9", "Abyssinian_34": "1 1 1",
            "great_pyrenees_173": "15 2 9"}  # fmt: skip
    files = photos(f"{name}.jpg" for name in rows)
    put("images.tar.gz", below("images", files | {"Abyssinian_100.mat": b"MATLAB 5.0"}))
    head = ("#Image CLASS-ID SPECIES BREED ID", "#ID: 1:37 Class ids", "#SPECIES: 1:Cat 2:Dog",
            "#BREED ID: 1-25:Cat 1:12:Dog", "#All images with 1st letter as captial are cat images",
            "#images with small first letter are dog images")  # fmt: skip
    lines = [f"{name} {numbers}" for name, numbers in rows.items()]
    split = {"trainval": lines[:2], "test": lines[2:]}
    put(
        "annotations.tar.gz",
        below(
            "annotations",
            {"list.txt": text(*head, *lines), "README": b"x"}
            | {f"{kind}.txt": text(*some) for kind, some in split.items()}
            | {f"trimaps/{name}.png": png(name) for name in rows}
            | {f"trimaps/._{name}.png": b"\0\5\x16\7" for name in rows}
            | {"xmls/Abyssinian_100.xml": b"<annotation/>"},
        ),
    )
    records = {key: {"image": files[key], "label": key.rpartition("_")[0]} for key in files}
    keys = {kind: [line.split()[0] + ".jpg" for line in some] for kind, some in split.items()}
    return split_as("pets", keys, records)


@section("CUB-200-2011")
def cub_200() -> Truth:
    """Five tables, joined by numbers."""
    names = ["001.Black_footed_Albatross/Black_Footed_Albatross_0046_18",
             "001.Black_footed_Albatross/Black_Footed_Albatross_0009_34",
             "200.Common_Yellowthroat/Common_Yellowthroat_0003_190570"]  # fmt: skip
    files = photos(f"{name}.jpg" for name in names)
    numbers = range(1, 4)
    tables: Files = {
        "README": b"x",
        "images.txt": text(*(f"{n} {name}.jpg" for n, name in zip(numbers, names, strict=True))),
        "image_class_labels.txt": text("1 1", "2 1", "3 200"),
        "train_test_split.txt": text("1 0", "2 1", "3 1"),
        "bounding_boxes.txt": text(*(f"{n} {n}.0 2.5 10.0 12.0" for n in numbers)),
        "classes.txt": text(*(f"{name.split('.')[0].lstrip('0')} {name.split('/')[0]}"
                              for name in names[1:])),
        "attributes/image_attribute_labels.txt": text("1 1 0 3 27.7"),
        "parts/part_locs.txt": text("1 1 0.0 0.0 0"),
    }  # fmt: skip
    put(
        "CUB_200_2011.tgz",
        below("CUB_200_2011", tables | below("images", files)) | {"attributes.txt": b"1 x\n"},
    )
    records = {
        f"{name}.jpg": {
            "image": photo(f"{name}.jpg"), "label": name.split("/")[0], "id": n,
            "class": 1 if n < 3 else 200, "is_train": int(n > 1),
            "x": float(n), "y": 2.5, "width": 10.0, "height": 12.0,
        }
        for n, name in zip(numbers, names, strict=True)
    }  # fmt: skip
    keys = [*records]
    return split_as("cub", {"train": keys[1:], "test": keys[:1]}, records)


@section("Stanford Cars")
def stanford_cars() -> Truth:
    """The numbers of the classes begin at 1; those of the test are in a file beside the devkit."""
    truth: Truth = {}
    sides = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2")
    kinds = [(side, object) for side in (*sides, "class", "fname")]
    classes = ["AM General Hummer SUV 2000", "smart fortwo Convertible 2012"]
    devkit: Files = {
        "README.txt": b"x",
        "cars_meta.mat": matlab("cars_meta.mat", class_names=np.array(classes, object)),
    }
    for split in ("train", "test"):
        names = [f"{n:05}.jpg" for n in (1, 2)]
        rows = [(1, 2, 20 + n, 12, 2 - n, name) for n, name in enumerate(names)]
        file = f"cars_{split}_annos{'_withlabels' if split == 'test' else ''}.mat"
        data = matlab(file, annotations=np.array(rows, kinds))
        if split == "test":
            put(file, data)
            devkit["cars_test_annos.mat"] = b"without classes"
        else:
            devkit[file] = data
        files = {name: photo(f"{split}/{name}") for name in names}
        put(f"cars_{split}.tgz", below(f"cars_{split}", files))
        truth[f"cars/{split}"] = {
            name: {"image": files[name], "label": classes[1 - n], "x1": 1, "y1": 2,
                   "x2": 20 + n, "y2": 12}
            for n, name in enumerate(names)
        }  # fmt: skip
    put("car_devkit.tgz", below("devkit", devkit))
    return truth


@section("DTD")
def dtd() -> Truth:
    """The name of the archive says gzip, but as distributed it may be a plain tar."""
    names = [f"{name}/{name}_{n:04}.jpg" for name in ("banded", "zigzagged") for n in (2, 4, 7)]
    files = photos(names)
    split = {"train": names[0::3], "val": names[1::3], "test": names[2::3]}
    labels = {f"{kind}{n}.txt": text(*some) for kind, some in split.items() for n in (1, 10)}
    joint = text(*(f"{name} {name.split('/')[0]}" for name in names))
    lists = labels | {"labels_joint_anno.txt": joint}
    tree = below("images", files) | below("labels", lists) | {"imdb/imdb.mat": b"MATLAB 5.0"}
    put("dtd-r1.0.1.tar.gz", tar(below("dtd", tree)))
    records = classes_of(files)
    return split_as("dtd", split, records)


@section("Places365")
def places365() -> Truth:
    """Numbers of files come again in each class, and some classes are in others."""
    classes = ["airfield", "apartment_building/outdoor", "zen_garden"]
    train = [f"{name[0]}/{name}/0000000{n}.jpg" for name in classes for n in (1, 2)]
    val = {"Places365_val_00000001.jpg": 2, "Places365_val_00000002.jpg": 0}
    put("train_256_places365standard.tar", below("data_256", photos(train)))
    put("val_256.tar", below("val_256", photos(val)))
    put("test_256.tar", below("test_256", photos(["Places365_test_00000001.jpg"])))
    put(
        "filelist_places365-standard.tar",
        {
            "categories_places365.txt": text(
                *(f"/{name[0]}/{name} {n}" for n, name in enumerate(classes))
            ),
            "places365_train_standard.txt": text(
                *(f"/{name} {place // 2}" for place, name in enumerate(train))
            ),
            "places365_val.txt": text(*(f"{name} {label}" for name, label in val.items())),
            "places365_test.txt": text("Places365_test_00000001.jpg"),
        },
    )

    def named(number: int) -> dict[str, Any]:
        return {"label": f"/{classes[number][0]}/{classes[number]}", "class": number}

    test = "Places365_test_00000001.jpg"
    return {
        "places/train": {
            name: {"image": photo(name)} | named(place // 2) for place, name in enumerate(train)
        },
        "places/val": {
            name: {"image": photo(name)} | named(number) for name, number in val.items()
        },
        "places/test": {test: {"image": photo(test)}},
    }


@section("CelebA")
def celeba() -> Truth:
    """The first line of a table is a number, and its header has no name for the images."""
    names = [f"{n:06}.jpg" for n in range(1, 7)]
    files = photos(names)
    put("img_align_celeba.zip", below("img_align_celeba", files))
    attributes = ("5_o_Clock_Shadow", "Smiling", "Young")
    signs = [[1 if (n >> bit) & 1 else -1 for bit in range(3)] for n in range(6)]
    rows = [f"{name} " + " ".join(f"{sign:2}" for sign in some)
            for name, some in zip(names, signs, strict=True)]  # fmt: skip
    put("list_attr_celeba.txt", text("6", " ".join(attributes) + " ", *rows))
    parts = dict(zip(names, (0, 0, 0, 1, 2, 2), strict=True))
    put("list_eval_partition.txt", text(*(f"{name} {part}" for name, part in parts.items())))
    put("identity_CelebA.txt", text(*(f"{name} {2880 + n}" for n, name in enumerate(names))))
    return {
        f"celeba/{split}": {
            name: {
                "image": files[name], "identity": 2880 + n, "split": number,
                **dict(zip(attributes, signs[n], strict=True)),
            }
            for n, name in enumerate(names)
            if parts[name] == number
        }
        for number, split in enumerate(("train", "val", "test"))
    }  # fmt: skip


@section("Pascal VOC 2012")
def voc_2012() -> Truth:
    names = ["2007_000027", "2007_000032", "2008_000002", "2012_000001"]
    main, segmentation = (
        {"train": names[:2], "val": names[2:3]},
        {"train": names[:1], "val": names[1:2]},
    )
    top = "VOCdevkit/VOC2012"
    files = below(f"{top}/JPEGImages", photos(f"{name}.jpg" for name in names))
    for name in names:
        files[f"{top}/Annotations/{name}.xml"] = voc(name, "person")
    for folder, lists in (("Main", main), ("Segmentation", segmentation)):
        for kind, some in lists.items():
            files[f"{top}/ImageSets/{folder}/{kind}.txt"] = text(*some)
        both = lists["train"] + lists["val"]
        files[f"{top}/ImageSets/{folder}/trainval.txt"] = text(*both)
    files[f"{top}/ImageSets/Main/person_train.txt"] = text(
        *(f"{name}  1" for name in main["train"])
    )
    for name in names[:2]:
        files[f"{top}/SegmentationClass/{name}.png"] = png(name, "P")
        files[f"{top}/SegmentationObject/{name}.png"] = png(name + "objects", "P")
    put("VOCtrainval_11-May-2012.tar", files)
    truth: Truth = {}
    for kind, some in main.items():
        truth[f"voc/{kind}"] = {
            f"{name}.jpg": {"image": photo(f"{name}.jpg")} | boxes_of("person", label=0)
            for name in some
        }
    for kind, some in segmentation.items():
        truth[f"voc-masks/{kind}"] = {
            f"{name}.jpg": {"image": photo(f"{name}.jpg"), "mask": png(name, "P")} for name in some
        }
    return truth


# ----------------------------------------------------------------------------------------- medicine


@section("HAM10000")
def ham10000() -> Truth:
    # fmt: off
    rows = {"ISIC_0024306": ["HAM_0000550", "nv", "follow_up", 45.0, "male", "trunk", "vidir"],
            "ISIC_0027419": ["HAM_0000118", "bkl", "histo", 80.0, "male", "scalp", "vidir"],
            "ISIC_0029306": ["HAM_0000118", "bkl", "histo", "", "male", "scalp", "vidir"]}
    # fmt: on
    folders = dict(zip(rows, (1, 1, 2), strict=True))
    for part in (1, 2):
        files = photos(f"{name}.jpg" for name in rows if folders[name] == part)
        put(f"HAM10000_images_part_{part}.zip", files)
    head = ["lesion_id", "image_id", "dx", "dx_type", "age", "sex", "localization", "dataset"]
    lines = [[row[0], name, *row[1:]] for name, row in rows.items()]
    put("HAM10000_metadata.csv", text(*(",".join(map(str, line)) for line in (head, *lines))))
    ours = ["lesion_id", "label", *head[3:]]
    return {
        "ham": {
            f"HAM10000_images_part_{folders[name]}/{name}.jpg": {
                "image": photo(f"{name}.jpg"),
                **{ours[i]: None if value == "" else value for i, value in enumerate(row)},
            }
            for name, row in rows.items()
        }
    }


def one_hot(folder: str, table: str, kinds: str, rows: Mapping[str, int]) -> Truth:
    """Write a zip of images and a table with a column for each class."""
    names = kinds.split(",")
    put(
        f"{folder}.zip",
        below(folder, photos(f"{name}.jpg" for name in rows) | {"ATTRIBUTION.txt": b"x"}),
    )
    lines = [",".join([name, *(f"{float(n == kind)}" for n in range(len(names)))])
             for name, kind in rows.items()]  # fmt: skip
    data = text(f"image,{kinds}", *lines)
    if table.endswith(".zip"):
        put(table, {f"{table[:-4]}/{table[:-4]}.csv": data})
    else:
        put(table, data)
    return {
        "isic": {
            f"{name}.jpg": {"image": photo(f"{name}.jpg"), "label": names[kind]}
            for name, kind in rows.items()
        }
    }


@section("ISIC 2018, task 3")
def isic_2018() -> Truth:
    rows = {"ISIC_0024306": 1, "ISIC_0024307": 1, "ISIC_0024310": 0, "ISIC_0024312": 6}
    table = "ISIC2018_Task3_Training_GroundTruth.zip"
    return one_hot("ISIC2018_Task3_Training_Input", table, "MEL,NV,BCC,AKIEC,BKL,DF,VASC", rows)


@section("ISIC 2019")
def isic_2019() -> Truth:
    rows = {"ISIC_0000000": 1, "ISIC_0000022_downsampled": 0, "ISIC_0000001": 8}
    table = "ISIC_2019_Training_GroundTruth.csv"
    return one_hot("ISIC_2019_Training_Input", table, "MEL,NV,BCC,AK,BKL,DF,VASC,SCC,UNK", rows)


@section("ISIC 2020")
def isic_2020() -> Truth:
    head = ("image_name,patient_id,sex,age_approx,anatom_site_general_challenge,diagnosis,"
            "benign_malignant,target")  # fmt: skip
    rows = {
        "ISIC_2637011": "IP_7279968,male,45.0,head/neck,unknown,benign,0",
        "ISIC_0149568": "IP_0962375,female,55.0,upper extremity,melanoma,malignant,1",
    }
    put("ISIC_2020_Training_JPEG.zip", below("train", photos(f"{name}.jpg" for name in rows)))
    put(
        "ISIC_2020_Training_GroundTruth.csv", text(head, *(f"{n},{row}" for n, row in rows.items()))
    )
    names = head.split(",")[1:-1]
    return {
        "isic": {
            f"{name}.jpg": {"image": photo(f"{name}.jpg"), "label": int(row[-1])}
            | dict(zip(names, row.split(",")[:-1], strict=True))
            | {"age_approx": float(row.split(",")[2])}
            for name, row in rows.items()
        }
    }


# ------------------------------------------------------------------------------------------- arrays


def pixels(name: str, *shape: int) -> Any:
    return np.random.default_rng(zlib.crc32(name.encode())).integers(0, 256, shape, np.uint8)


@section("CIFAR-10")
def cifar_10() -> Truth:
    images: list[Any] = []
    labels: list[str] = []
    names = [
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    ]
    files: Files = {"batches.meta.txt": text(*names, ""), "readme.html": b"<html/>"}
    for batch in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        some, numbers = pixels(batch, 2, 3, 32, 32), pixels(batch + "labels", 2) % 10
        records = np.concatenate([numbers[:, None], some.reshape(2, -1)], axis=1)
        files[f"{batch}.bin"] = records.tobytes()
        images += [image.transpose(1, 2, 0) for image in some]
        labels += [names[number] for number in numbers]
    put("cifar-10-binary.tar.gz", below("cifar-10-batches-bin", files))
    return {
        "cifar10/train": numbered(images[:10], labels[:10]),
        "cifar10/test": numbered(images[10:], labels[10:]),
    }


@section("CIFAR-100")
def cifar_100() -> Truth:
    truth: Truth = {}
    files: Files = {
        "fine_label_names.txt": text(*(f"fine_{n:02}" for n in range(100))),
        "coarse_label_names.txt": text(*(f"coarse_{n:02}" for n in range(20))),
    }
    for split in ("train", "test"):
        images, labels = pixels(split, 3, 3, 32, 32), pixels(split + "labels", 3, 2) % (20, 100)
        labels = labels.astype(np.uint8)
        files[f"{split}.bin"] = np.concatenate([labels, images.reshape(3, -1)], axis=1).tobytes()
        records = numbered(images.transpose(0, 2, 3, 1), labels[:, 1].tolist())
        for record, coarse in zip(records.values(), labels[:, 0].tolist(), strict=True):
            record["coarse"] = coarse
        truth[f"cifar100/{split}"] = records
    put("cifar-100-binary.tar.gz", below("cifar-100-binary", files))
    return truth


def idx(array: Any) -> bytes:
    """A file of IDX: a magic number with the type and the dimensions, sizes, values."""
    head = (0x800 + array.ndim, *array.shape)
    return gzip.compress(b"".join(n.to_bytes(4, "big") for n in head) + array.tobytes())


def mnist_files(out: str) -> Truth:
    truth: Truth = {}
    for split, name in (("train", "train"), ("test", "t10k")):
        images, labels = pixels(out + name, 3, 28, 28), pixels(out + name + "labels", 3) % 10
        put(f"{name}-images-idx3-ubyte.gz", idx(images))
        put(f"{name}-labels-idx1-ubyte.gz", idx(labels))
        truth[f"{out}/{split}"] = numbered(np.stack([images] * 3, axis=3), labels.tolist())
    return truth


@section("MNIST")
def mnist() -> Truth:
    return mnist_files("mnist")


@section("Fashion-MNIST")
def fashion_mnist() -> Truth:
    return mnist_files("fashion")


@section("STL-10")
def stl_10() -> Truth:
    """Pixels lie column by column, and the numbers of the classes begin at 1."""
    truth: Truth = {}
    names = ["airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]
    files: Files = {"class_names.txt": text(*names), "fold_indices.txt": text("0 1", "1 0")}
    for split in ("train", "test", "unlabeled"):
        images, labels = pixels(split, 3, 96, 96, 3), pixels(split + "labels", 3) % 10
        files[f"{split}_X.bin"] = images.transpose(0, 3, 2, 1).tobytes()
        if split != "unlabeled":
            files[f"{split}_y.bin"] = (labels + 1).tobytes()
        truth[f"stl10/{split}"] = {
            f"{n:08}": {"image": image} | ({"label": names[label]} if split != "unlabeled" else {})
            for n, (image, label) in enumerate(zip(images, labels, strict=True))
        }
    put("stl10_binary.tar.gz", below("stl10_binary", files))
    return truth


@section("SVHN, cropped")
def svhn() -> Truth:
    """The digit 0 has the number 10."""
    truth: Truth = {}
    for split in ("train", "test"):
        images = pixels(split, 3, 32, 32, 3)
        labels = np.array([10, 1, 9], np.uint8)
        file = f"{split}_32x32.mat"
        put(file, matlab(file, X=np.ascontiguousarray(images.transpose(1, 2, 3, 0)), y=labels))
        truth[f"svhn/{split}"] = numbered(images, (labels % 10).tolist())
    return truth


@section("MedMNIST")
def med_mnist() -> Truth:
    truth: Truth = {}
    arrays = {}
    for split, count in (("train", 4), ("val", 2), ("test", 3)):
        images, labels = pixels(split, count, 28, 28, 3), pixels(split + "labels", count, 1) % 9
        arrays |= {f"{split}_images": images, f"{split}_labels": labels}
        truth[f"pathmnist/{split}"] = numbered(images, labels[:, 0].tolist())
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)
    put("pathmnist.npz", out.getvalue())
    return truth
