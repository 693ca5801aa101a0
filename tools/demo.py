"""Pack an image folder with `shardio pack`, then read it both ways, side by side.

tools/demo                   images of its own, in a temporary directory, removed at the end
tools/demo FOLDER            your image folder (only read); shards in a temporary directory
tools/demo FOLDER --out DIR  ... and the shards stay in DIR

The rival is what one writes without a library: a map-style Dataset that opens one file per
image, in a DataLoader with shuffle=True. Crop, collate, batch size and number of workers are
the same on both sides. Only the reading differs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

import shardio

if TYPE_CHECKING:
    from shardio import RandomResizedCrop

MADE_CLASSES = 10
MADE_IMAGES = 4000  # some 3 s of decoding on one core: long against starting the workers (0.1 s)
ROUNDS = 2  # both ways take turns, and the better round counts: a busy machine hurts neither alone
SECONDS = 10.0  # the most that one round reads; a large FOLDER is sampled, not read through
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}


class DemoError(Exception):
    """What the user can mend: printed without a traceback."""


# --------------------------------------------------------------------------------------- the images


def make_images(folder: Path, count: int) -> None:
    """Write `count` JPEGs of about 128 px in ten class folders; the same ones every time.

    Crops of one large soft texture per class: they compress like photographs (some 5 KB each),
    where noise would not.
    """
    rng = np.random.default_rng(0)
    for c in range(MADE_CLASSES):
        class_folder = folder / f"class{c}"
        class_folder.mkdir(parents=True)
        coarse = Image.fromarray(rng.integers(0, 256, (96, 96, 3), dtype=np.uint8))
        texture = coarse.resize((1024, 1024), Image.Resampling.BICUBIC)
        grain = rng.integers(-6, 7, (1024, 1024, 1))
        pixels = np.clip(np.asarray(texture) + grain, 0, 255).astype(np.uint8)
        for i in range(c, count, MADE_CLASSES):
            width, height = (int(v) for v in rng.integers(112, 145, 2))
            x, y = (int(v) for v in rng.integers(0, 1024 - 145, 2))
            image = Image.fromarray(np.ascontiguousarray(pixels[y : y + height, x : x + width]))
            image.save(class_folder / f"{i:05d}.jpg", quality=85)


def list_images(folder: Path) -> tuple[list[tuple[str, int]], bool]:
    """The image files under `folder` with their labels, and whether there are class folders.

    A class is a top-level folder, numbered in sorted order, as in torchvision's ImageFolder.
    """

    def under(root: Path, label: int) -> list[tuple[str, int]]:
        return [
            (os.path.join(at, name), label)
            for at, _, names in os.walk(root)
            for name in names
            if os.path.splitext(name)[1].lower() in SUFFIXES and name[0] != "."
        ]

    classes = sorted(e.name for e in os.scandir(folder) if e.is_dir() and e.name[0] != ".")
    labelled = [
        image for label, name in enumerate(classes) for image in under(folder / name, label)
    ]
    return sorted(labelled or under(folder, 0)), bool(labelled)


class Folder:
    """A map-style dataset: one file per image, opened when asked for.

    With crop=None the bytes, without decoding.
    """

    def __init__(self, images: list[tuple[str, int]], crop: RandomResizedCrop | None) -> None:
        self.images = images
        self.crop = crop

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> Any:
        path, label = self.images[i]
        with open(path, "rb") as f:
            data = f.read()
        return (data if self.crop is None else self.crop(data, draw=i)), label


# -------------------------------------------------------------------------------------- the packing


def pack(source: Path, out: Path) -> float:
    """Run `shardio pack` as a user would; returns the seconds it took."""
    shardio_command = os.path.join(os.path.dirname(sys.executable), "shardio")
    print(f"\n$ shardio pack {source} {out}", flush=True)
    start = time.perf_counter()
    status = subprocess.run([shardio_command, "pack", str(source), str(out)]).returncode
    if status == 4:  # done, but inputs were skipped; the summary above names them
        print("(Some inputs were skipped.)")
    elif status != 0:
        raise DemoError(f"shardio pack ended with exit code {status}; its message is above")
    return time.perf_counter() - start


# ------------------------------------------------------------------------------------ the measuring


@dataclass
class Speed:
    images_per_s: float  # from asking for the iterator to the last batch: workers' start counts
    first_batch_s: float


def rows(batch: Any) -> int:
    """Images in a batch: stacked fields, or a list of samples that were not stacked."""
    return len(batch[0]) if hasattr(batch[0], "shape") else len(batch)


def drop_from_cache(paths: Iterable[str | Path]) -> None:
    """Let the kernel forget the contents of files, so that they are read from the disk again."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(batches: Iterable[Any]) -> Speed:
    start = time.perf_counter()
    images, first = 0, 0.0
    for batch in batches:
        images += rows(batch)
        elapsed = time.perf_counter() - start
        first = first or elapsed
        if elapsed > SECONDS:
            break
    return Speed(images / (time.perf_counter() - start), first)


def better(a: Speed | None, b: Speed) -> Speed:
    if a is None:
        return b
    return Speed(max(a.images_per_s, b.images_per_s), min(a.first_batch_s, b.first_batch_s))


def leave_interrupts_to_the_parent(_worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # else Ctrl-C prints a traceback per worker


def compare(folder: list[tuple[str, int]], out: Path, fields: tuple[str, ...], args: Any) -> None:
    """Read both ways in turns and print the table."""
    # Here, not above: torch takes a second or more to load, too long for "no such folder".
    from torch.utils.data import DataLoader

    from shardio import RandomResizedCrop, ShardDataset, collate

    crop = RandomResizedCrop(args.size)
    workers: dict[str, Any] = {
        "num_workers": args.workers,
        "worker_init_fn": leave_interrupts_to_the_parent,
    }

    def folder_batches(_epoch: int) -> Iterable[Any]:
        return DataLoader(
            Folder(folder, crop),
            batch_size=args.batch_size,
            shuffle=True,
            collate_fn=collate,
            **workers,
        )

    def shard_batches(epoch: int) -> Iterable[Any]:
        dataset = ShardDataset(out, batch_size=args.batch_size, fields=fields, transform=crop)
        dataset.set_epoch(epoch)
        return DataLoader(dataset, batch_size=None, **workers)

    def folder_bytes(_epoch: int) -> Iterable[Any]:
        return DataLoader(
            Folder(folder, None), batch_size=args.batch_size, shuffle=True, collate_fn=list
        )

    def shard_bytes(epoch: int) -> Iterable[Any]:
        dataset = ShardDataset(
            out, batch_size=args.batch_size, fields=fields, decode=None, collate_fn=list
        )
        dataset.set_epoch(epoch)
        return dataset

    shards = list(out.glob("*.shard"))
    ways = [
        (
            f"decoded and cropped to {args.size} px, {args.workers} workers, warm",
            *(folder_batches, shard_batches, False),
        ),
        ("reading alone, one process, warm", folder_bytes, shard_bytes, False),
    ]
    if hasattr(os, "posix_fadvise"):
        os.sync()  # pages that are not written yet would not be dropped
        ways.append(("reading alone, one process, cold", folder_bytes, shard_bytes, True))
    files = len(folder), len(shards)
    print(f"\n{'':46}{'image folder':>14}{'shards':>14}{'ratio':>9}")
    print(f"{'files to open':46}{files[0]:>14,}{files[1]:>14,}")
    for name, by_folder, by_shards, cold in ways:
        a: Speed | None = None
        b: Speed | None = None
        for epoch in range(ROUNDS):
            if cold:
                drop_from_cache(path for path, _ in folder)
            a = better(a, measure(by_folder(epoch)))
            if cold:
                drop_from_cache(shards)
            b = better(b, measure(by_shards(epoch)))
        assert a is not None and b is not None
        rate = b.images_per_s / a.images_per_s
        print(name)
        print(f"{'  images/s':46}{a.images_per_s:>14,.0f}{b.images_per_s:>14,.0f}{rate:>8.2f}x")
        first = a.first_batch_s * 1e3, b.first_batch_s * 1e3
        print(f"{'  first batch, ms':46}{first[0]:>14,.1f}{first[1]:>14,.1f}", flush=True)
    print(
        f"Batches of {args.batch_size}, shuffled; the better of {ROUNDS} rounds, each of one epoch "
        f"or {SECONDS:.0f} s.\nWarm: the files are in the page cache, which does not last when "
        "there is more than memory holds.\nDecoded: decoding is the limit either way; "
        "ShardLoader and `pack --jpeg-tiles` are for that (docs/comparison.md).\n"
        "Cold: dropped from the cache before each round; on a busy disk "
        "or a network file system the difference grows."
    )


# ----------------------------------------------------------------------------------------- the rest


@contextmanager
def temporary_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="shardio-demo-") as name:
        yield Path(name)


def check_room(images: list[tuple[str, int]], out: Path) -> None:
    need = sum(os.path.getsize(path) for path, _ in images)
    at = next(p for p in (out, *out.parents) if p.exists())
    free = shutil.disk_usage(at).free
    if need * 1.1 > free:
        raise DemoError(
            f"the shards need about {need * 1.1 / 1e9:.1f} GB, {at} has {free / 1e9:.1f} GB free: "
            "name a larger place with --out DIR"
        )


def run(args: argparse.Namespace, scratch: Path) -> None:
    out = args.out.resolve() if args.out else scratch / "shards"
    if args.folder is None:
        source = scratch / "images"
        start = time.perf_counter()
        make_images(source, MADE_IMAGES)
        took = time.perf_counter() - start
        print(f"Made {MADE_IMAGES:,} JPEG images of about 128 px in {source} ({took:.1f} s).")
    else:
        source = args.folder.resolve()
        if not source.is_dir():
            problem = "not a folder" if source.exists() else "no such folder"
            raise DemoError(f"{args.folder}: {problem}")
        if out.is_relative_to(source):
            raise DemoError(f"--out {args.out} lies inside {args.folder}, which is only read")
    images, has_classes = list_images(source)
    if not images:
        raise DemoError(f"{args.folder}: no images in it (looked for {' '.join(sorted(SUFFIXES))})")
    if args.folder is not None:
        print(f"{len(images):,} images in {source} (only read).")
        check_room(images, out)
    if args.out is None:
        print(f"The shards go to {out}, removed at the end (--out DIR keeps them).")

    took = pack(source, out)
    print(f"({len(images) / took:,.0f} images/s, Python's start included)")
    compare(images, out, ("image", "label") if has_classes else ("image",), args)

    shown = f"{out}" if args.out else "OUT"
    if args.out is None:
        print("\nNext steps, with your own images (.venv/bin/shardio, or activate .venv):")
        print("  shardio pack FOLDER OUT")
    else:
        print("\nNext steps (.venv/bin/shardio, or activate .venv):")
    print(f"  shardio info {shown}        what is in it")
    print(f"  shardio verify {shown}      every record against its checksum")
    print(f"  shardio unpack {shown} DIR  the same files again, byte for byte")
    print("and in training:")
    print(f'  ShardDataset("{shown}", batch_size=256, fields=("image", "label"), transform=...)')


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tools/demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="an image folder")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the shards here")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N")
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    parser.add_argument(
        "--size", type=int, metavar="PX", help="crop; default 224, 112 for the made images"
    )
    args = parser.parse_args()
    args.size = args.size or (224 if args.folder else 112)
    # A kill, too, shall remove the temporary directory: as an exception it passes through `with`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with temporary_directory() as scratch:
            run(args, scratch)
    except (DemoError, shardio.ShardioError, OSError) as e:
        # From a loader process torch hands on the whole traceback as the message; its end says it.
        print(f"tools/demo: {str(e).strip().rpartition('shardio.errors.')[2]}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ntools/demo: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
