"""Every block of docs/recipes.md runs as it stands, and its loader gives what the page says.

They run in the environment of tools/setup-frameworks, all in one process. The pictures are made so
that each pixel tells its class: what no longer fits its image after a crop shows.
"""

import io
import json
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import LIMIT_S, programs
from support.frameworks import BECOME, HERE, PYTHON, needs_them
from support.trees import ROOT

import shardio

PAGE = ROOT / "docs" / "recipes.md"
N = 10
CAPTIONS = 4  # one batch, since CLIP's smallest model takes seconds for it
COLOURS = {0: (0, 0, 0), 1: (200, 0, 0), 2: (0, 200, 0), 3: (0, 0, 200), 255: (200, 200, 0)}

pytestmark = [pytest.mark.frameworks, needs_them]


def headings() -> list[str]:
    """What each Python block of the page stands under, and is called here."""
    found, here = [], ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("#"):
            here = line.lstrip("# ")
        elif line == "```python":
            found.append(f"{here}, {1 + sum(one.startswith(here + ',') for one in found)}")
    return found


BLOCKS = headings()
STOCK, RANKS = [name for name in BLOCKS if name.startswith("Trainer")]
LOADERS = [name for name in BLOCKS if not name.startswith("Trainer")]
RUN = [*LOADERS, STOCK]


def classes(number: int) -> np.ndarray[Any, Any]:
    """(96, 128) the class of each pixel of a picture; it is no mirror image of itself."""
    found = np.zeros((96, 128), np.uint8)
    found[:, : 40 + number] = 1
    found[: 50 - number, 60:] = 2
    found[60:, 60:] = 3
    found[54:58, 60:] = 255
    return found


def painted(pixels: np.ndarray[Any, Any]) -> Image.Image:
    colours = np.zeros((256, 3), np.uint8)
    for number, colour in COLOURS.items():
        colours[number] = colour
    return Image.fromarray(colours[pixels])


def save(image: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, quality=95)


def make_voc(folder: Path) -> None:
    """A palette whose colours are not the classes, as Pascal VOC has it."""
    palette = [value for i in range(256) for value in (255 - i, i, (7 * i) % 256)]
    for i in range(N):
        save(painted(classes(i)), folder / f"images/{i}.jpg")
        mask = Image.fromarray(classes(i), "P")
        mask.putpalette(palette)
        save(mask, folder / f"masks/{i}.png")


def make_coco(folder: Path) -> None:
    """One image has no box; the others have one of each class, and none overlaps another."""
    images, annotations = [], []
    for i in range(N):
        pixels = np.zeros((96, 128), np.uint8)
        for label in range(3) if i else ():
            x, y, width, height = 4 + 40 * label, 8 + 7 * i, 30, 20 - i
            pixels[y : y + height, x : x + width] = label + 1
            annotation = {"bbox": [x, y, width, height], "area": width * height, "iscrowd": 0}
            ids = {"id": len(annotations), "image_id": i, "category_id": 10 * label}
            annotations.append(annotation | ids)
        save(painted(pixels), folder / f"images/{i}.jpg")
        images.append({"id": i, "file_name": f"{i}.jpg", "height": 96, "width": 128})
    categories = [{"id": 10 * i, "name": f"class {i}"} for i in range(3)]
    made = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "instances.json").write_text(json.dumps(made))


def make_photos(folder: Path) -> None:
    """Each image has a class of its own."""
    for i in range(N):
        save(painted(np.full((70, 90), 1 + i % 3, np.uint8)), folder / f"{i}/{i}.jpg")


def make_captions(folder: Path) -> None:
    for i in range(CAPTIONS):
        save(painted(np.full((70, 90), 1 + i % 3, np.uint8)), folder / f"{i}.jpg")
        (folder / f"{i}.txt").write_text(f"{('red', 'green', 'blue')[i % 3]} all over, no. {i}")


SOURCES = {
    "photos": (make_photos, ""),
    "voc": (make_voc, ""),
    "coco": (make_coco, "instances.json"),
    "captions": (make_captions, ""),
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packed directories that the page names."""
    root = tmp_path_factory.mktemp("recipes")
    for name, (make, file) in SOURCES.items():
        source = root / "sources" / name
        make(source)
        shardio.pack(source / file, root / name, jobs=1)
    return root


@pytest.fixture(scope="module")
def results(packed: Path) -> dict[str, Any]:
    """What the loader of each block gave, or its traceback."""
    out = run(packed, "one", RUN)
    return {name: read(out, str(BLOCKS.index(name))) for name in RUN}


def run(packed: Path, name: str, blocks: Sequence[str], *launcher: str) -> Path:
    """The folder with what the program wrote of these blocks."""
    out = packed / f"{name}.out"
    out.mkdir()
    numbers = [str(BLOCKS.index(one)) for one in blocks]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(packed)
        patch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")  # it would ask the network for a newer one
        patch.setenv("OMP_NUM_THREADS", "1")  # more wait for each other on a busy machine
        done = programs.run(
            *("-c", BECOME, PYTHON, *launcher, HERE / "run_recipes.py", PAGE, out, *numbers),
            limit_s=LIMIT_S,
        )
    assert not done.timed_out and done.code == 0 and not done.left, done
    return out


def read(out: Path, name: str) -> Any:
    failed = out / f"{name}.txt"
    return failed.read_text() if failed.exists() else torch.load(out / f"{name}.pt")


def of(results: dict[str, Any], name: str) -> Any:
    assert isinstance(results[name], dict), results[name]
    return results[name]


def images_of(epoch: Sequence[Any], which: int | str = 0) -> torch.Tensor:
    return torch.cat([batch[which] for batch in epoch])


def told(images: torch.Tensor) -> torch.Tensor:
    """(B, H, W) the class that each pixel's colour is nearest to."""
    colours = torch.tensor([*COLOURS.values()], dtype=torch.float)
    pixels = images.permute(0, 2, 3, 1).reshape(-1, 3).float()
    nearest = torch.cdist(pixels, colours).argmin(1)
    return torch.tensor([*COLOURS])[nearest].reshape(images.shape[0], *images.shape[2:])


def same(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[name], two[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(two) and all(map(same, one, two))
    return torch.equal(one, two) if isinstance(one, torch.Tensor) else bool(one == two)


@pytest.mark.parametrize("name", LOADERS)
def test_each_block_runs_and_reads_every_record_once(results: dict[str, Any], name: str) -> None:
    for epochs in (of(results, name)["workers"], of(results, name)["alone"]):
        for epoch in epochs:
            first = [batch["image"] if isinstance(batch, dict) else batch[0] for batch in epoch]
            assert sum(map(len, first)) == (CAPTIONS if name.startswith("CLIP") else N)


SEGMENTATION = [name for name in LOADERS if name.startswith(("Segm", "With torchv", "With albu"))]
SEGMENTATION = [name for name in SEGMENTATION if "boxes" not in name]
DETECTION = ["Detection, 1", "With albumentations, masks and boxes, 1"]


@pytest.mark.parametrize("name", ["Segmentation, 1", *SEGMENTATION[1:], *DETECTION])
def test_what_is_drawn_is_the_same_for_any_number_of_workers(
    results: dict[str, Any], name: str
) -> None:
    found = of(results, name)
    assert same(found["workers"], found["alone"])
    assert not same(found["alone"][0], found["alone"][1])


@pytest.mark.parametrize("name", SEGMENTATION)
def test_masks_keep_their_classes_and_stay_on_their_images(
    results: dict[str, Any], name: str
) -> None:
    for epoch in of(results, name)["workers"]:
        images, masks = images_of(epoch), images_of(epoch, 1)
        assert images.dtype == torch.uint8 and images.shape == (N, 3, 64, 64)
        assert masks.dtype == torch.uint8 and masks.shape == (N, 64, 64)
        assert set(masks.unique().tolist()) == {*COLOURS}
        inside = masks != 255  # four pixels high: mostly edge
        assert (told(images) == masks)[inside].float().mean() > 0.9


@pytest.mark.parametrize("name", DETECTION)
def test_boxes_stay_on_their_images_with_their_labels(results: dict[str, Any], name: str) -> None:
    sure = 0
    for epoch in of(results, name)["workers"]:
        for batch in epoch:
            assert batch["image"].shape[1:] == (3, 64, 64) and batch["image"].dtype == torch.uint8
            classes = told(batch["image"])
            for pixels, boxes, labels in zip(classes, batch["boxes"], batch["labels"], strict=True):
                assert len(boxes) == len(labels) <= 3
                if name.startswith("With"):
                    boxes = boxes.clone()
                    boxes[:, 2:] += boxes[:, :2]
                assert len(boxes) == 0 or (boxes.min() >= 0 and boxes.max() <= 64)
                for (left, top, right, bottom), label in zip(
                    boxes.round().int().tolist(), labels.tolist(), strict=True
                ):
                    inner = pixels[top + 2 : bottom - 2, left + 2 : right - 2]
                    if inner.numel() > 20:
                        sure += 1
                        assert (inner == label + 1).float().mean() > 0.9
    assert sure > N


def test_a_detector_gets_images_and_targets(results: dict[str, Any]) -> None:
    seen = of(results, "Detection, 1")["seen"]
    assert len(seen) == 2 * 3  # epochs x batches
    for images, targets in seen:
        assert len(images) == len(targets)
        for image, target in zip(images, targets, strict=True):
            assert image.dtype == torch.float32 and image.max() <= 1
            assert target["boxes"].shape == (len(target["labels"]), 4)
            assert set(target["labels"].tolist()) <= {1, 2, 3}


def test_timm_gets_what_it_asks_for(results: dict[str, Any]) -> None:
    for epoch in of(results, "timm, 1")["workers"]:
        assert images_of(epoch).dtype == torch.float32
        assert images_of(epoch).shape == (N, 3, 64, 64)
    for epoch in of(results, "timm, 2")["workers"]:
        assert images_of(epoch).dtype == torch.uint8
        assert (told(images_of(epoch))[:, 32, 32] - 1 == images_of(epoch, 1) % 3).all()


def test_captions_stay_with_their_images(results: dict[str, Any]) -> None:
    for epoch in of(results, "CLIP: images and captions, 1")["workers"]:
        for images, texts in epoch:
            assert images.shape[1:] == (3, 224, 224)
            strongest = images.mean((2, 3)).argmax(1).tolist()
            names = [("red", "green", "blue")[channel] for channel in strongest]
            assert names == [text.split()[0] for text in texts]
        assert len({text for _, texts in epoch for text in texts}) == CAPTIONS


def test_the_stock_trainer_stops_before_the_last_short_batch(results: dict[str, Any]) -> None:
    seen = of(results, STOCK)["seen"]
    assert [len(labels) for labels in seen] == 2 * [4, 4, 1]  # five records of each worker
    one, two = (set(chain(*steps)) for steps in (seen[:3], seen[3:]))
    assert len(one) == len(two) == N - 1
    assert seen[:3] != seen[3:]


@pytest.fixture(scope="module")
def ranks(packed: Path) -> list[Any]:
    """The labels of each step of two ranks."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")
    out = run(packed, "two", [RANKS], *launcher, "--nproc-per-node", "2")
    found = [read(out, f"{BLOCKS.index(RANKS)}-{rank}") for rank in range(2)]
    assert all(isinstance(one, dict) for one in found), found
    return [one["seen"] for one in found]


@pytest.mark.slow
def test_two_ranks_of_a_trainer_share_each_epoch(ranks: list[Any]) -> None:
    steps = 3  # of two ranks with two records each: twelve, of which two are repeats
    assert [len(seen) for seen in ranks] == [2 * steps, 2 * steps]
    for epoch in range(2):
        both = [seen[epoch * steps : (epoch + 1) * steps] for seen in ranks]
        assert set(chain(*both[0], *both[1])) == set(range(N))
    assert ranks[0][:steps] != ranks[0][steps:]


def test_the_page_names_the_releases_that_run() -> None:
    pins = dict(re.findall(r"^(\w+)==(\S+)$", (HERE / "requirements.txt").read_text(), re.M))
    said = re.search(r"with (torchvision .*?)\. Sizes", PAGE.read_text(), re.S)
    assert said is not None
    named = dict(re.findall(r"(\w+) (\d\S*\d)", said[1]))
    pins["open_clip"] = pins["open_clip_torch"]
    assert named and all(pins[name] == release for name, release in named.items())


def test_pictures_tell_their_classes() -> None:
    pixels = io.BytesIO()
    painted(classes(3)).save(pixels, "JPEG", quality=95)
    image = torch.from_numpy(np.array(Image.open(pixels))).permute(2, 0, 1)[None]
    mask = torch.from_numpy(classes(3))[None]
    assert (told(image) == mask).float().mean() > 0.98
    assert (told(image.flip(-1)) == mask).float().mean() < 0.7
