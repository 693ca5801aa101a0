"""Every Python block of the reference pages runs, and so do the commands beside them.

support/doc_blocks.py says how. Datasets that a page only makes give a batch here.
"""

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import doc_blocks
from support.doc_blocks import Page
from support.trees import ROOT, picture, plant

import shardio
from shardio.images import jpeg_rewrite

EACH = 24  # images of a class


def packed(*names: str) -> None:
    """Photographs of cats and dogs, as a folder and as packed directories of these names."""
    tree = {f"{c}/{i:04d}.jpg": picture(60 + i, 40) for c in ("cat", "dog") for i in range(EACH)}
    plant(Path("images"), tree)
    for name in names:
        shardio.pack("images", name, jobs=1)


def scenes() -> None:
    """Images with a mask, and images with one, two or three boxes."""
    with shardio.Writer("scenes", fields={"image": "image", "mask": "image"}) as writer:
        for i in range(32):
            mask = io.BytesIO()
            Image.fromarray(np.full((60, 80), i % 3, np.uint8)).save(mask, "PNG")
            writer.write({"image": picture(80, 60), "mask": mask.getvalue()})
    with shardio.Writer("boxes", fields={"image": "image", "boxes": "array"}) as writer:
        for i in range(32):
            boxes = np.zeros((1 + i % 3, 4), np.float32)
            writer.write({"image": picture(80, 60), "boxes": boxes})


def all_of_reading() -> None:
    packed("packed", "photos", "drawings")
    scenes()
    raw = shardio.ImageOptions(encode="raw")
    shardio.pack("images", "cifar", jobs=1, resize=32, images=raw)
    for split in ("train", "val"):
        plant(Path("both", split), {f"cat/{i}.jpg": picture(60, 40) for i in range(11)})
    shardio.pack("both", "imagenet", jobs=1)


def mean_colours(images: torch.Tensor) -> torch.Tensor:
    return images.mean((2, 3))


def then(line: str, more: str) -> tuple[str, str]:
    """Use what a line of the page made."""
    return line, f"{line}\n{more}"


def photos_and_a_stream() -> None:
    """A folder SRC; tiny images, and photographs of which one is too small for tiles."""
    try:
        jpeg_rewrite.rewriter()
    except shardio.DependencyError:
        pytest.skip("NOT RUN: docs/packing.md needs the compiled core, or jpegtran")
    plant(Path("SRC"), {f"cat/{i}.jpg": picture(300, 280) for i in range(3)})
    plant(Path("cifar"), {f"cat/{i}.jpg": picture(32, 32) for i in range(600)})
    plant(Path("photos"), {f"{i}/{i}.jpg": picture(800 + i, 600) for i in range(5)})
    plant(Path("photos"), {"5/5.jpg": picture(30, 20)})


def packing_wrote_what_it_says(names: dict[str, Any]) -> None:
    assert min(shardio.open("OUT", decode="pil")[0]["image"].size) == 256
    assert names["raw"][0].shape == (512, 3, 32, 32)
    captions = shardio.open("captions")
    assert [captions[i]["caption"] for i in range(2)] == ["a", "b"]


def tiny_images() -> None:
    """A packed directory of ten classes, shuffled."""
    plant(Path("cifar"), {f"{i % 10}/{i}.jpg": picture(32, 32) for i in range(600)})
    shardio.pack("cifar", "cifar10", jobs=1)


def some_loader() -> dict[str, Any]:
    crop = shardio.CenterCrop(32)
    train = shardio.ShardDataset("packed", batch_size=8, fields=("image", "label"), transform=crop)
    return {"train": train, "loader": shardio.ShardLoader(train, num_workers=0, threads=0)}


def some_pixels() -> dict[str, Any]:
    return {"images": torch.full((2, 3, 4, 4), 255, dtype=torch.uint8), "mean": 0.5, "std": 0.25}


def pixels_are_normalised(names: dict[str, Any]) -> None:
    assert names["images"].unique().tolist() == [2.0]


def watch_judges(names: dict[str, Any]) -> None:
    assert names["train"].epoch == 1 and "too few batches" in names["batches"].verdict


def packed_as_lmdb() -> None:
    plant(Path("images"), {f"cat/{i:03d}.jpg": picture(60 + i, 40) for i in range(48)})
    shardio.pack("images", "OUT", jobs=1, format="lmdb", plan=shardio.PlanOptions(shuffle=False))


def the_record_has_its_image(names: dict[str, Any]) -> None:
    assert names["record"].endswith(picture(60 + 41, 40))


def the_last_images_are_float32(names: dict[str, Any]) -> None:
    assert names["images"].dtype == torch.float32 and names["images"].shape[1:] == (3, 32, 32)


def all_kinds_of_sources() -> None:
    """Make the folders and files that docs/sources.md draws, and tars in imagenet-wds/."""
    image, mask = picture(60, 40), picture(60, 40, "PNG")
    pair = {"jpg": image, "txt": b"a cat on a mat", "cls": b"1"}
    plant(Path("pairs"), {f"0001.{suffix}": data for suffix, data in pair.items()})
    plant(Path("pairs"), {"0001.json": b"{}", "deep/0002.JPG": image})
    plant(Path("pairs"), {f"deep/0002.{suffix}": pair[suffix] for suffix in ("txt", "cls")})
    for name in ("x/a", "x/b"):
        plant(Path("voc"), {f"images/{name}.jpg": image, f"masks/{name}.png": mask})
    rows = re.search(
        r"^path,category.*?(?=^```)", (ROOT / "docs/sources.md").read_text(), re.M | re.S
    )
    Path("train.csv").write_text(rows[0])
    plant(Path("data/images"), {f"{name}.jpg": image for name in ("cat/1", "cat/2", "dog/1")})
    files = {f"{i:012d}.jpg": image for i in range(20)}
    plant(Path("coco/train2017"), files)
    images = [{"id": i, "file_name": name} for i, name in enumerate(files)]
    kinds = [{"id": 3, "name": "bus"}, {"id": 18, "name": "dog"}]
    found = {"images": images, "categories": kinds, "annotations": []}
    plant(Path("coco/annotations"), {"instances_train2017.json": json.dumps(found).encode()})
    packed("shards")
    shardio.export("shards", "imagenet-wds", format="webdataset")
    shardio.index("imagenet-wds", out="idx")


def reading_gives_what_it_says(names: dict[str, Any]) -> None:
    assert {len(boxes) for boxes in names["ragged"][1]} == {1, 2, 3}
    images, masks = names["cropped"]
    assert images.shape == (16, 3, 48, 48) and masks.shape == (16, 48, 48)
    assert len(names["augmented"]["image"]) == 16
    assert names["raw"][0].shape == (48, 3, 32, 32)
    assert names["total"] == 11
    assert len(names["decoded"]) == 8 and names["decoded"][0].format == "JPEG"
    assert names["pets"].records == names["most"].records == 2 * EACH == sum(names["parts"])
    assert len(names["balanced"]) == 2 * EACH // 8


class Saved(list[Any]):
    """Keeps what a loop saves."""

    def __call__(self, model: Any, **state: Any) -> None:
        self.append(state)


def loader_gives_what_it_says(names: dict[str, Any]) -> None:
    assert [one["data"]["epoch"] for one in names["save"]] == [1, 2]
    names["train"].load_state_dict(names["save"][-1]["data"])
    assert names["train"].remaining == 2  # of 6 batches, after 4
    assert names["rows"] == 2 * EACH


FEW = (
    ("batch_size=256", "batch_size=8"),
    ("num_workers=8", "num_workers=1"),
    ("range(90)", "range(2)"),
)
PAGES = {
    page.name: page
    for page in (
        Page(
            "docs/reading.md",
            all_of_reading,
            smaller=(
                *FEW,
                ("batch_size=64", "batch_size=8"),
                ("num_workers=2", "num_workers=1"),
                ("Crop(224", "Crop(32"),
                ("32, 256)", "32, 36)"),
                ("Crop(512", "Crop(48"),
                ("100_000", "64"),
                then('ragged=("boxes",)))', "ragged = next(iter(train))"),
                then('fields=("image", "mask")))', "cropped = next(iter(train))"),
                then("map=augment)", "augmented = next(iter(train))"),
                then('"label"), decode="numpy")', "raw = next(iter(train))"),
                then("whole.select(folds == 3)", "parts = train.records, val.records  #"),
            ),
            unrun={"A.Compose": "albumentations; tests/system/test_recipes.py has its like"},
            given=lambda: {"model": mean_colours},
            check=reading_gives_what_it_says,
        ),
        Page(
            "docs/loader.md",
            lambda: packed("packed"),
            smaller=(
                *FEW,
                ("Crop(224", "Crop(32"),
                ("loader.epoch, 90)", "loader.epoch, 3)"),
                ("step % 1000", "step % 4"),
                ('resident="ram")  #', 'resident="ram"); rows = sum(len(l) for _, l in loader)  #'),
            ),
            given=lambda: {"checkpoint": None, "model": None, "save": Saved()},
            check=loader_gives_what_it_says,
        ),
        Page(
            "docs/packing.md",
            photos_and_a_stream,
            smaller=(
                ("50,000", "600"),
                then('"label"), decode="numpy")', "raw = next(iter(train))"),
                ("500 files, 500 classes", "6 files, 6 classes"),
                ("-> 17 shards", "-> 1 shard"),
                ("497 of 500", "5 of 6"),
                ("497 rewritten", "5 rewritten"),
                ("3 too small", "1 too small"),
                ("(+1.0%)", "(...)"),
            ),
            unrun={
                "sbatch": "a cluster; tests/packing/test_arrays.py has its parts",
                "#SBATCH": "the same",
                "apiVersion": "tests/packing/test_launchers.py",
                "--executor ray": "a cluster; tests/packing/test_ray.py",
            },
            given=lambda: {"stream": [(picture(20, 10), "a"), (picture(20, 10), "b")]},
            check=packing_wrote_what_it_says,
        ),
        Page(
            "docs/tuning.md",
            tiny_images,
            smaller=(("50,000", "600"), ('"cuda"', '"cpu"')),
            unrun={"shardio tune imagenet-in-order": "of millions; tests/tuning/test_tune.py"},
            given=some_pixels,
            check=pixels_are_normalised,
        ),
        Page(
            "docs/meter.md",
            lambda: packed("packed"),
            smaller=(("range(90)", "range(2)"),),
            given=some_loader,
            check=watch_judges,
        ),
        Page(
            "docs/sources.md",
            all_kinds_of_sources,
            smaller=(
                ("pack voc packed", "pack voc packed --overwrite"),
                ("instances_train2017.json packed", "instances_train2017.json packed --overwrite"),
                ("--root /data/images", "--root data/images --overwrite"),
                ("1 shard, ...", "1 shard, ... in 0.0 s, 0 MB/s"),
                ("pack imagenet-wds/ packed  ", "pack imagenet-wds/ packed --overwrite  "),
                ("--root /mnt/tars", "--root imagenet-wds --overwrite"),
            ),
            unrun={"s3://bucket": "a bucket; tests/packing/test_from_bucket.py"},
        ),
        Page("docs/lmdb.md", packed_as_lmdb, check=the_record_has_its_image),
        Page(
            "docs/device.md",
            lambda: packed("packed"),
            smaller=(
                *FEW[:2],
                ("Crop(224, flip", "Crop(32, flip"),
                ("ShardLoader(train, device", "ShardLoader(train, num_workers=1, device"),
                (", pin_memory=True", ""),
                ('"cuda"', '"cpu"'),
            ),
            unrun={"decode_jpeg": "needs a GPU", "nvidia.dali": "needs a GPU and DALI"},
            check=the_last_images_are_float32,
        ),
    )
}


GUIDES = "tests/system/test_guides.py"
ELSEWHERE = {
    **dict.fromkeys(
        [f"docs/{one}.md" for one in ("concepts", "faq", "index", "reliability")], GUIDES
    ),
    "docs/format.md": "tests/formats/test_record.py, by tests/support/naive_reader.py",
    "docs/order.md": "tests/dataset/test_ranks.py, and beside this file test_frameworks.py, "
    "test_frameworks_loops.py, test_slurm_training.py, test_ray_train.py",
    "docs/recipes.md": "tests/system/test_recipes.py",
    "docs/remote.md": "tests/system/test_remote_page.py: the recipe; the others need a bucket",
    "docs/tutorial.md": "tests/system/test_tutorial.py",
}


def written() -> set[str]:
    """Return the pages in docs/ that have a Python block."""
    pages = [f"docs/{one.name}" for one in (ROOT / "docs").glob("*.md")]
    return {page for page in pages if any(one.kind == "python" for one in doc_blocks.blocks(page))}


def test_every_page_is_tested() -> None:
    assert written() == PAGES.keys() | ELSEWHERE.keys()


@pytest.mark.parametrize("name", PAGES)
def test_the_blocks_of_a_page_run(name: str, tmp_path: Path) -> None:
    doc_blocks.run(PAGES[name], tmp_path)
