"""Every block of the guides runs, and gives what the page shows: support/doc_blocks.py says how."""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import doc_blocks, object_stores
from support.doc_blocks import Page
from support.trees import ROOT, picture, plant

import shardio

KEYS = [f"n0144076{c}/n0144076{c}_{name}.JPEG" for c in range(3, 6) for name in ("eel", "tench")]


FLOWERS = ("daisy", "dandelion", "rose", "sunflower", "tulip")


def flowers() -> None:
    """Class folders of two splits; no two images of a class have one size."""
    for split, each in (("train", 24), ("val", 4)):
        tree = {f"{name}/{i:03d}.jpg": picture(80 + i, 60) for name in FLOWERS for i in range(each)}
        plant(Path("flowers", split), tree)


def packed_flowers() -> None:
    flowers()
    shardio.pack("flowers", "packed", jobs=1)


@contextlib.contextmanager
def a_bucket() -> Iterator[None]:
    """An empty bucket, credentials for it in the environment, and the folder of the images."""
    flowers()
    with object_stores.s3(private=True) as store, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", store.options["endpoint"])
        patch.setenv("AWS_REGION", store.options["region"])
        patch.setenv("AWS_ACCESS_KEY_ID", store.options["access_key_id"])
        patch.setenv("AWS_SECRET_ACCESS_KEY", store.options["secret_access_key"])
        patch.setenv("HOME", os.getcwd())
        yield


def street() -> None:
    """Photographs with masks: palette PNGs of three classes, and 255."""
    for split, each in (("train", 40), ("val", 8)):
        for i in range(each):
            pixels = np.zeros((60, 80), np.uint8)
            pixels[:, : 20 + i] = 1
            pixels[20 + i :, 40:] = 2
            pixels[:3] = 255
            mask = Image.fromarray(pixels)
            mask.putpalette([value for colour in range(256) for value in (255 - colour, colour, 7)])
            for folder in ("images", "masks"):
                Path("street", split, folder).mkdir(parents=True, exist_ok=True)
            mask.save(f"street/{split}/masks/{i:04d}.png")
            Path(f"street/{split}/images/{i:04d}.jpg").write_bytes(picture(80, 60))


def coco() -> None:
    """Images with two boxes each, and a file of annotations; ids of categories have gaps."""
    names = [f"{i:012d}.jpg" for i in range(40)]
    plant(Path("coco/train2017"), {name: picture(100, 80) for name in names})
    images = [{"id": i, "file_name": name} for i, name in enumerate(names)]
    kinds = [{"id": 3, "name": "bus"}, {"id": 7, "name": "car"}, {"id": 18, "name": "dog"}]
    boxes = [(i, *one) for i in range(40) for one in ((3, 10, 12, 30, 20), (18, 50, 40, 25, 30))]
    found = [
        {"id": number, "image_id": i, "category_id": kind, "bbox": box}
        for number, (i, kind, *box) in enumerate(boxes)
    ]
    Path("coco/annotations").mkdir()
    text = json.dumps({"images": images, "annotations": found, "categories": kinds})
    Path("coco/annotations/instances_train2017.json").write_text(text)


def pairs() -> None:
    """Pictures with a text each, the same in a table, and a packed dataset of two texts each."""
    texts = [f"a {('red', 'green', 'blue')[i % 3]} picture" for i in range(40)]
    for i, text in enumerate(texts):
        plant(Path("pairs"), {f"{i:04d}.jpg": picture(80, 60), f"{i:04d}.txt": text.encode()})
        both = json.dumps([text, text.split()[1]]).encode()
        plant(Path("both"), {f"{i:04d}.jpg": picture(80, 60), f"{i:04d}.json": both})
    rows = [f"{i:04d}.jpg,{text}\n" for i, text in enumerate(texts)]
    Path("captions.csv").write_text("path,caption\n" + "".join(rows))
    shardio.pack("both", "many", jobs=1)


def packed_and_new() -> None:
    """A packed directory without splits, and a folder of images that came later."""
    flowers()
    shardio.pack("flowers/train", "packed", jobs=1)
    tree = {f"{name}/new-{i}.jpg": picture(90, 60 + i) for name in FLOWERS for i in range(2)}
    plant(Path("new-flowers"), tree)


def two_splits() -> None:
    for split in ("train", "val"):
        plant(Path("imagenet", split), {key: picture(40, 30) for key in KEYS})


def the_batches_are_what_the_readme_says(names: dict[str, Any]) -> None:
    seen = names["seen"]
    assert [len(labels) for _, labels in seen] == [4, 2] * 2
    for images, labels in seen:
        assert images.dtype == torch.uint8 and images.shape[1:] == (3, 16, 16)
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert labels.dtype == torch.int64
    for epoch in (seen[:2], seen[2:]):
        assert sorted(int(label) for _, labels in epoch for label in labels) == [0, 0, 1, 1, 2, 2]
    assert names["state"]["epoch"] == names["train"].epoch == 1


def boxes_lie_in_the_images(names: dict[str, Any]) -> None:
    boxes = torch.cat([one["boxes"] for one in names["targets"]])
    assert len(boxes) and boxes.min() >= 0 and boxes.max() <= 48
    assert (boxes[:, 2:] > boxes[:, :2]).all()


INSTALLED = "tests/system/test_installing.py"
FRESH = "installs, for minutes; for a fresh machine"
LOOP = (
    ("batch_size=256", "batch_size=4"),
    ("num_workers=8", "num_workers=1"),
    ("range(90)", "range(2)"),
)
PAGES = {
    page.name: page
    for page in (
        Page(
            "README.md",
            two_splits,
            smaller=(
                *LOOP,
                ("Crop(224,", "Crop(16,"),
                ("...  # images", "globals().setdefault('seen', []).append((images, labels))  #"),
            ),
            unrun={"pip install": INSTALLED},
            check=the_batches_are_what_the_readme_says,
        ),
        Page(
            "docs/index.md",
            two_splits,
            smaller=(*LOOP, ("Crop(224,", "Crop(16,")),
            unrun={"pip install": INSTALLED},
        ),
        Page(
            "docs/install.md",
            smaller=(("core      built", "core      ..."),),
            unrun={"pip install": INSTALLED, "tools/demo": FRESH, "tools/test": FRESH},
        ),
        Page("docs/concepts.md", flowers),
        Page("docs/faq.md", packed_and_new),
        Page(
            "docs/reliability.md",
            packed_and_new,
            smaller=(
                ("record 50 at byte 59034", "record ... at byte ..."),  # as large as PIL makes them
                ("record 50, key", "record ..., key"),
                ("daisy/022.jpg", "..."),
            ),
        ),
        Page("docs/guides/pack.md", flowers, smaller=(("1220", "..."), ("1151", "..."))),
        Page(
            "docs/guides/train.md",
            packed_flowers,
            smaller=(
                ("batch_size=256", "batch_size=8"),
                ("num_workers=8", "num_workers=1"),
                ("range(90)", "range(2)"),
                ("Crop(224", "Crop(32"),
                ("32, 256)", "32, 36)"),
                ('device="cuda", mean', 'device="cpu", mean'),
            ),
        ),
        Page(
            "docs/guides/resume.md", packed_flowers, smaller=(("num_workers=2", "num_workers=1"),)
        ),
        Page(
            "docs/guides/tune.md",
            packed_flowers,
            unrun={"shardio bench": "takes seconds; tests/tuning/test_bench.py"},
        ),
        Page(
            "docs/guides/view.md",
            packed_flowers,
            unrun={"--port 8000": "serves until Ctrl-C; tests/cli/test_view.py"},
        ),
        Page(
            "docs/guides/multi-gpu.md",
            packed_flowers,
            smaller=(
                ('batch_size": 32', 'batch_size": 8'),
                ('"num_workers": 8', '"num_workers": 1'),
                ("EPOCHS = 90", "EPOCHS = 2"),
                ("Crop(224", "Crop(32"),
                ("32, 256)", "32, 36)"),
                ("--nproc-per-node 8", "--nproc-per-node 2"),
            ),
            unrun={"--nnodes 2": "needs two machines"},
        ),
        Page(
            "docs/guides/remote.md",
            a_bucket,
            smaller=(
                ("s3://bucket", f"s3://{object_stores.BUCKET}"),
                ("/nvme/shardio", "nvme"),
                ("224", "32"),
                ("num_workers=8", "num_workers=1"),
            ),
            unrun={"pip install": INSTALLED},
        ),
        Page(
            "docs/guides/cluster.md",
            flowers,
            smaller=(("57 files", "... files"),),
            unrun={
                "sbatch": "tests/packing/test_launchers.py",
                "#SBATCH": "tests/packing/test_launchers.py, tests/system/test_slurm_training.py",
                "plan /data": "the same as above, of other folders",
            },
        ),
        Page(
            "docs/guides/segmentation.md",
            street,
            smaller=(("num_workers=8", "num_workers=1"), ("range(50)", "range(2)"), ("512", "48")),
        ),
        Page(
            "docs/guides/detection.md",
            coco,
            smaller=(("num_workers=8", "num_workers=1"), ("range(50)", "range(2)"), ("512", "48")),
            check=boxes_lie_in_the_images,
        ),
        Page(
            "docs/guides/captions.md",
            pairs,
            smaller=(("num_workers=8", "num_workers=1"), ("range(30)", "range(2)"), ("224", "32")),
        ),
    )
}


def written() -> set[str]:
    """Return the pages that people learn from, as they are in the repository."""
    docs = ROOT / "docs"
    names = ("index", "install", "concepts", "faq", "reliability")
    found = [ROOT / "README.md", *(docs / f"{name}.md" for name in names)]
    found += [one for one in (docs / "guides").glob("*.md")]
    return {one.relative_to(ROOT).as_posix() for one in found if one.exists()}


def test_every_page_is_tested() -> None:
    with_blocks = {name for name in written() if doc_blocks.blocks(name)}
    assert with_blocks - PAGES.keys() == set()
    assert PAGES.keys() - written() == set()


@pytest.mark.parametrize("name", PAGES)
def test_the_blocks_of_a_page_run(name: str, tmp_path: Path) -> None:
    doc_blocks.run(PAGES[name], tmp_path)


# -------------------------------------------------------------------------------- the runner itself


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a page with this text."""
    monkeypatch.setattr(doc_blocks, "ROOT", tmp_path)

    def run(text: str, **options: Any) -> None:
        (tmp_path / "page.md").write_text(text)
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            doc_blocks.run(Page("page.md", **options), Path(folder))

    return run


GOOD = """
```python
# work.py
print("from a file")
```
```python
a = 3
print(a + 1)  # 4
print("took 1.5 s")  # took 0.2 s
```
In between.
```console
$ python work.py && ls
from a file
work.py
$ printf 'a 1.5 MiB/s\\n b\\n' > \\
    b.txt
$ cat b.txt
a 27.31 GiB/s
...
$ echo shardio: nope: not packed: sorry; false
shardio: nope: not packed: ...
```
```python
print([a])
raise ValueError("no")
```

```text
[3]
ValueError: no
```
"""


def test_a_good_page_passes(page: Callable[..., None]) -> None:
    page(GOOD)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("# 4", "# 5"),
        ("from a file\nwork.py", "from a fill\nwork.py"),
        ("GiB/s\n...", "GiB/s"),
        ("a 27.31 GiB/s", "a 27.31 images/h"),
        (" nope: not packed: ...", " nope: packed: ..."),
        ("not packed: ...\n```", "not packed: ...\n$ false\n```"),
        ("[3]\nV", "[4]\nV"),
        ("ValueError: no", "ValueError: yes"),
        ('raise ValueError("no")', ""),
        ("```text\n[3]\nValueError: no\n```", ""),
        ("print([a])", "print([b])"),
        ("print(a + 1)", "if a == 4: print(a + 1)"),
        ("print(a + 1)  # 4", "print(\n    a + 1\n)  # 4"),
        ("```text", "```yaml"),
        ("```text\n[3]\nValueError: no\n```", "```text\n[3]\nValueError: no\n"),
    ],
)
def test_a_page_that_is_wrong_fails(page: Callable[..., None], right: str, wrong: str) -> None:
    assert GOOD.count(right) == 1
    with pytest.raises((AssertionError, NameError, ValueError)):
        page(GOOD.replace(right, wrong))


def test_what_is_replaced_or_left_out_must_be_there(page: Callable[..., None]) -> None:
    left_out = {"range": "takes long", "nvidia": "no GPU"}
    text = "```python\nprint(range(9)[-1])\n```\n```console\n$ nvidia-smi\n$ echo a\na\n```\n"
    page(text, unrun=left_out)
    for options in ({"smaller": [("7", "3")]}, {"unrun": {**left_out, "slurm": "no cluster"}}):
        with pytest.raises(AssertionError, match=r"7|slurm"):
            page(text, **{"unrun": left_out, **options})
