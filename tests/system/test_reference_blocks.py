"""Every Python block of the reference pages runs, and so do the commands beside them.

support/doc_blocks.py says how. Datasets that a page only makes give a batch here.
"""

import contextlib
import gzip
import io
import json
import os
import re
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import doc_blocks, object_stores
from support.doc_blocks import Page
from support.trees import ROOT, picture, plant
from torch.utils.data import DataLoader

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


def a_thousand_photos() -> None:
    """Two classes, of 1.1 KB a file: two shards."""
    tree = {
        f"{c}/{i:03d}.jpg": picture(84 + i % 20, 60) for c in ("cat", "dog") for i in range(500)
    }
    plant(Path("photos"), tree)


def golden() -> None:
    for path in (ROOT / "tests" / "golden" / "v0").iterdir():
        shutil.copy(path, ".")


@contextlib.contextmanager
def a_bucket() -> Iterator[None]:
    """A bucket with a packed dataset and tars; its keys: in the environment, and as a profile."""
    plant(Path("images"), {f"{c}/{i}.jpg": picture(60, 40) for c in "ab" for i in range(EACH)})
    shardio.pack("images", "packed", jobs=1)
    shardio.export("packed", "wds", format="webdataset")
    with object_stores.s3(private=True) as store, pytest.MonkeyPatch.context() as patch:
        for name in ("endpoint_url", "region", "access_key_id", "secret_access_key"):
            patch.setenv(f"AWS_{name.upper()}", store.options[name.removesuffix("_url")])
        patch.setenv("HOME", os.getcwd())
        keys = [f"aws_{name} = {value}" for name, value in store.options.items() if "_key" in name]
        plant(Path(".aws"), {"credentials": "\n".join(["[lab]", *keys]).encode()})
        store.put_folder(Path("packed"), "train/")
        store.put_folder(Path("wds"), "wds/")
        yield


def all_read_the_bucket(names: dict[str, Any]) -> None:
    assert [len(batch["label"]) for batch in names["batches"]] == [8] * 3
    assert sum(1 for path in Path("nvme").rglob("*") if path.is_file()) > 1  # the cache


def the_reader_reads(names: dict[str, Any]) -> None:
    (shard,) = Path().glob("00000-*.shard")
    found = list(names["samples"](shard.read_bytes()))
    assert len(found) == 5 and found[0]["image"] == Path("1.png").read_bytes()


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
    for split, count in (("train", 12), ("t10k", 4)):
        images, labels = (struct.pack(">4B", 0, 0, 8, n) for n in (3, 1))
        sizes = struct.pack(">3I", count, 28, 28)
        pixels = gzip.compress(images + sizes + bytes(count * 28 * 28))
        numbers = gzip.compress(labels + sizes[:4] + bytes(count))
        mnist = {f"{split}-images-idx3-ubyte.gz": pixels, f"{split}-labels-idx1-ubyte.gz": numbers}
        plant(Path("mnist"), mnist)
    plant(Path("stl10_binary"), {"train_X.bin": bytes(2 * 3 * 96 * 96), "train_y.bin": b"\1\12"})
    packed("shards")
    shardio.export("shards", "imagenet-wds", format="webdataset")
    shardio.index("imagenet-wds", out="idx")


def reading_gives_what_it_says(names: dict[str, Any]) -> None:
    assert {len(boxes) for boxes in names["ragged"][1]} == {1, 2, 3}
    images, masks = names["cropped"]
    assert images.shape == (16, 3, 48, 48) and masks.shape == (16, 48, 48)
    assert len(names["augmented"]["image"]) == 16
    assert names["raw"][0].shape == (48, 3, 32, 32)
    assert names["boxes"].shape == (8, 4) and names["by_workers"] == []
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


def of_a_loop() -> dict[str, Any]:
    imported = {"torch": torch, "DataLoader": DataLoader, "ShardDataset": shardio.ShardDataset}
    return imported | {"checkpoint": None, "model": None, "save": Saved()}


def the_state_goes_on(names: dict[str, Any]) -> None:
    assert [one["data"]["epoch"] for one in names["save"]] == [0, 1]
    names["train"].load_state_dict(names["save"][-1]["data"])
    assert names["train"].remaining == 2  # of 6 batches, after 4


FEW = (
    ("batch_size=256", "batch_size=8"),
    ("num_workers=8", "num_workers=1"),
    ("range(90)", "range(2)"),
)
REPLACED = "$ shardio pack photos packed --seed 1 --overwrite --quiet"
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
                ('device="cuda")\n', 'device="cpu")\n'),
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
                "sbatch": "a cluster; tests/packing/test_schedulers.py has its parts",
                "#SBATCH": "the same",
                "apiVersion": "tests/packing/test_launchers.py",
                "--executor ray": "a cluster; tests/packing/test_ray_executor.py",
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
        Page("docs/growing.md", lambda: packed("packed")),
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
                ("10,000 records, no classes, 7.5 MiB -> 16 shards", "4 records, ... shard"),
                ("60,000 records, no classes, 44.9 MiB -> 16 shards", "12 records, ... shard"),
            ),
            unrun={
                "s3://bucket": "a bucket; tests/packing/test_store_folder.py",
                "scipy": "it is not installed for tests",
            },
        ),
        Page(
            "docs/cli.md",
            a_thousand_photos,
            smaller=(
                ("938", "..."),
                ("62 files", "... files"),
                ("of 62 to", "of ... to"),
                ("1170", "..."),
                ("1111", "..."),
                ("1171", "..."),
                ("0.1.0", "..."),
                ("bee5cd9a847c950fc22c6580283fbc5f", "..."),
                ("$ shardio index photos\nphotos:", "$ cp -r photos own; shardio index own\nown:"),
                ("of=packed/00000-c6da37c1.shard", "of=$(echo packed/00000-*.shard)"),
                ("record 4 at byte 4685, key dog/081.jpg", "record ... at byte ..., key ..."),
                ("record 4, key dog/081.jpg", "record ..., key ..."),
                ("is 0x32bc3576e3cd183a, expected 0xc48db4213c85d141.", "is ..., expected ..."),
                ("$ shardio gc packed\n", f"{REPLACED}\n$ shardio gc packed\n"),
            ),
            unrun={
                "index wds": "of 50,000 images; tests/formats/test_webdataset.py",
                "view packed": "serves until Ctrl-C; tests/cli/test_view.py",
                "cifar10": "of 50,000 images; tests/tuning/",
                "s3://bucket": "a bucket; tests/packing/test_copy.py",
                "/nvme/cache": "tests/storage/test_cache.py",
            },
        ),
        Page(
            "docs/order.md",
            lambda: packed("packed"),
            smaller=(
                ("batch_size=256, ...)", 'batch_size=8, fields=("image", "label"), decode=None)'),
                *FEW[1:2],
                ("(train.epoch, 90)", "(train.epoch, 2)"),
                ("step % 1000", "step % 4"),
            ),
            unrun={
                'saved["loader"]': "tests/dataset/test_resume.py",
                "init_process_group": "tests/dataset/test_ranks.py, test_slurm_training.py",
                "#SBATCH": "test_slurm_training.py",
                "(DataLoader)": "Lightning; test_frameworks.py",
                "on_validation_epoch_start": "Lightning; test_frameworks.py",
                "Accelerator()": "test_frameworks.py",
                "prepare_data_loader(loader, accelerator": "test_frameworks_loops.py",
                "(Trainer)": "test_frameworks.py",
                "ray.train": "test_ray_train.py",
            },
            given=of_a_loop,
            check=the_state_goes_on,
        ),
        Page(
            "docs/remote.md",
            a_bucket,
            smaller=(
                *FEW[:1],
                ("s3://bucket", f"s3://{object_stores.BUCKET}"),
                ("/nvme/shardio", "nvme"),
                ("500GiB", "1GiB"),
                ('"http://minio:9000"', "os.environ['AWS_ENDPOINT_URL']"),
                then("storage=cache)   # downloads once a node", "batches = [next(iter(train))]"),
                then("storage=minio)", "batches.append(next(iter(train)))"),
                then('/wds"))', "batches.append(next(iter(data)))"),
            ),
            unrun={"s3://datasets": "tests/system/test_remote_page.py"},
            given=lambda: {"shardio": shardio, "os": os},
            check=all_read_the_bucket,
        ),
        Page("docs/format.md", golden, check=the_reader_reads),
        Page("docs/lmdb.md", packed_as_lmdb, check=the_record_has_its_image),
        Page(
            "docs/device.md",
            lambda: packed("packed"),
            smaller=(
                *FEW[:2],
                ("Crop(224, flip", "Crop(32, flip"),
                ("ShardLoader(train, device", "ShardLoader(train, num_workers=1, device"),
                (", pin_memory=True", ""),
                ('device="cuda"', 'device="cpu"'),
                ('(loader, "cuda"', '(loader, "cpu"'),
                ('to("cuda"', 'to("cpu"'),
            ),
            unrun={"CUDAGraph": "needs a GPU; tests/loader/test_device_streams.py has its like"},
            check=the_last_images_are_float32,
        ),
    )
}


GUIDES = "tests/system/test_guides.py"
ELSEWHERE = {
    **dict.fromkeys(
        [f"docs/{one}.md" for one in ("concepts", "faq", "index", "install", "reliability")], GUIDES
    ),
    "docs/bench.md": "tests/tuning/test_bench.py",
    "docs/datasets.md": "tests/packing/test_datasets.py",
    "docs/recipes.md": "tests/system/test_recipes.py",
    "docs/tutorial.md": "tests/system/test_tutorial.py",
}


def written() -> set[str]:
    """Return the pages in docs/ that have a block of Python or of commands."""
    pages = [f"docs/{one.name}" for one in (ROOT / "docs").glob("*.md")]
    kinds = {page: {one.kind for one in doc_blocks.blocks(page)} for page in pages}
    return {page for page in pages if kinds[page] & {"python", "console"}}


def test_every_page_is_tested() -> None:
    assert written() == PAGES.keys() | ELSEWHERE.keys()


@pytest.mark.parametrize("name", PAGES)
def test_the_blocks_of_a_page_run(name: str, tmp_path: Path) -> None:
    doc_blocks.run(PAGES[name], tmp_path)
