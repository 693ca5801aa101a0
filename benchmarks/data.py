"""The images that are measured: unpacked from two archives into a scratch folder, and copied there.

imagenet-sample-500.tar       500 photographs, 110 KB on average, in class folders
cifar10-train-jpeg.tar.xz     50,000 JPEGs of 32 x 32, 0.9 KB on average, in ten class folders
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from .harness import ROOT, BenchmarkError, show

PHOTOS = "imagenet-sample-500.tar"
CIFAR = "cifar10-train-jpeg.tar.xz"
DEFAULT = ROOT.parent / "shared" / "data"

Files = list[tuple[str, int]]  # path and label of each


class Data:
    """Image folders, each made when first asked for. `quick` makes small ones.

    rivals: whether there is an environment to run LitData in.
    """

    def __init__(self, archives: Path, scratch: Path, quick: bool, rivals: bool) -> None:
        self.archives, self.scratch, self.quick, self.rivals = archives, scratch, quick, rivals

    def cifar(self, records: int | None = None) -> Path:
        """All of CIFAR, or about so many of its images, from all over it."""
        most = min(records or 2_000, 2_000) if self.quick else records
        return self._unpack(CIFAR, self.scratch / f"cifar{records or ''}", most)

    def photos(self, records: int) -> Path:
        """At least so many photographs: all of them, copied under other names, class by class."""
        folder = self.scratch / f"photos-{records}"
        if folder.exists():
            return folder
        files = sorted(p for p in self.originals().rglob("*") if p.is_file())
        show(f"  {records:,} photographs, copies of {len(files)}, into {folder}")
        for copy in range(-(-records // len(files))):
            for original in files:
                target = folder / original.parent.name / f"{original.stem}_{copy:04d}.jpg"
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(original.read_bytes())  # bytes of its own: no link, no reflink
        return folder

    def photos_of_bytes(self, size: int) -> Path:
        """Photographs of at least so many bytes together."""
        each = [p.stat().st_size for p in self.originals().rglob("*") if p.is_file()]
        return self.photos(-(-size // sum(each)) * len(each))

    def originals(self) -> Path:
        return self._unpack(PHOTOS, self.scratch / "photos", None)

    def _unpack(self, name: str, folder: Path, most: int | None) -> Path:
        if folder.exists():
            return folder
        archive = self.archives / name
        if not archive.exists():
            raise BenchmarkError(
                f"{archive} is not there: give the folder that holds {PHOTOS} and {CIFAR} "
                "by --data DIR"
            )
        show(f"  {name} into {folder}")
        with tarfile.open(archive) as tar:
            members = [member for member in tar if member.isreg()]
            step = max(1, len(members) // most) if most else 1
            for member in members[::step]:
                path = os.path.normpath(member.name)
                target = folder / path
                if os.path.isabs(path) or path.startswith(".."):
                    raise BenchmarkError(f"{archive}: the name {member.name!r} leads out of it")
                target.parent.mkdir(parents=True, exist_ok=True)
                source = tar.extractfile(member)
                assert source
                target.write_bytes(source.read())
        return folder


def listing(folder: str | Path) -> Files:
    """Every file with its label, the number of its class folder: what an ImageFolder makes."""
    files = []
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    for label, name in enumerate(classes):
        with os.scandir(os.path.join(folder, name)) as entries:
            files += [(path, label) for path in sorted(entry.path for entry in entries)]
    return files


def payload(files: Files) -> int:
    return sum(os.path.getsize(path) for path, _ in files)


def folder_bytes(folder: str | Path) -> int:
    """Bytes of all files below a folder."""
    return sum(p.stat().st_size for p in Path(folder).rglob("*") if p.is_file())


def pack(folder: str | Path, out: str | Path, *options: str) -> Path:
    """`shardio pack`."""
    command = [sys.executable, "-m", "shardio", "pack", str(folder), str(out), "--quiet", *options]
    subprocess.run(command, check=True, cwd=ROOT)
    return Path(out)


def repeat(packed: str | Path, out: str | Path, records: int) -> Path:
    """Write a dataset's records under other keys, again and again, until there are so many."""
    import shardio

    samples = list(shardio.open(packed, decode=None))
    with shardio.Writer(out, fields={"image": "image", "label": "int"}) as writer:
        for i in range(records):
            sample = samples[i % len(samples)]
            writer.write({"__key__": f"{i:09d}", **{k: sample[k] for k in ("image", "label")}})
    return Path(out)


def remove(*paths: str | Path) -> None:
    for path in paths:
        if os.path.isdir(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)
