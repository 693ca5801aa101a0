"""Try the shardio that is installed, with no compiler: pack, verify, stream, read what 0.1.0 wrote.

    python tools/try_wheel.py [--pure]

The core has to be there, and to decode as PIL does; with --pure it has not to be. Without torch, as
on musl, which torch has no wheels for, all but streaming is tried. Ends with 1 at the first fault.
"""

import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
from PIL import Image

import shardio
from shardio import native

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
COMMAND = Path(sys.executable).parent / "shardio"


def command(*words: object) -> str:
    """Run the installed command `shardio`, and return what it prints."""
    done = subprocess.run([COMMAND, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, f"shardio {words}: {done.stderr}"
    return done.stdout


def try_core(pure: bool) -> None:
    """Check that the core is there or not, and that no libjpeg of the system came with it."""
    about = json.loads(command("info", "--env", "--json"))
    print(
        *(f"{name:<9} {about[name]}" for name in ("shardio", "python", "images", "core")), sep="\n"
    )
    assert Path(shardio.__file__).parent != ROOT / "shardio", "that is the tree, not a wheel"
    assert about["core"].startswith("not built" if pure else "built with libjpeg-turbo")
    assert (native.records() is None) == pure
    if native.core and Path("/proc/self/maps").exists():
        code = "import shardio.native; print(open('/proc/self/maps').read())"  # and not PIL
        process = [sys.executable, "-I", "-c", code]  # -I: no shardio of the folder we are in
        loaded = subprocess.run(process, capture_output=True, text=True).stdout
        assert "native/_core" in loaded and "libjpeg" not in loaded, "the core loads a libjpeg"


def plant(folder: Path) -> Path:
    """Make a folder of 24 JPEGs in 3 classes."""
    for number in range(24):
        noise = np.random.default_rng(number).integers(0, 256, (6, 8, 3), dtype=np.uint8)
        path = folder / f"class{number % 3}" / f"{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise).resize((320, 240), Image.Resampling.BICUBIC).save(path, quality=90)
    return folder


def try_packing(source: Path, out: Path) -> None:
    """Pack by the command, verify, unpack, and compare each file."""
    command("pack", source, out, "--jobs", "2")
    command("verify", out)
    command("unpack", out, out.with_name("files"))
    for path in source.rglob("*.jpg"):
        assert (
            out.with_name("files").joinpath(path.relative_to(source)).read_bytes()
            == path.read_bytes()
        )


def try_golden() -> None:
    """Read what 0.1.0 wrote."""
    sys.path.insert(0, str(GOLDEN))
    import make_released

    folder = GOLDEN / "released-0.1.0"
    expected = json.loads((folder / "expected.json").read_text())
    for name, records in expected["records"].items():
        assert make_released.read(name, folder) == records, name
        assert shardio.verify(folder / name, sha256=True, jobs=1).damages == []


def try_streaming(out: Path) -> None:
    """Stream by both loaders, in processes; the core's pixels have to be PIL's."""
    from torch.utils.data import DataLoader

    from shardio import RandomResizedCrop, ShardDataset, ShardLoader

    def data() -> ShardDataset:
        crop = RandomResizedCrop(64, flip=True)
        return ShardDataset(out, batch_size=8, seed=1, transform=crop, fields=("image",))

    found = {
        "DataLoader": DataLoader(data(), batch_size=None, num_workers=2),
        "ShardLoader": ShardLoader(data(), num_workers=2),
    }
    images = {name: [batch.numpy().copy() for (batch,) in made] for name, made in found.items()}
    warnings.simplefilter("ignore", shardio.PerformanceWarning)
    core, native.core = native.core, None
    expected = [batch.numpy() for (batch,) in data()]
    native.core = core
    for name, batches in images.items():
        assert [len(batch) for batch in batches] == [8, 8, 8], name
        for batch, right in zip(batches, expected, strict=True):
            apart = np.abs(batch.astype(int) - right.astype(int)).max()
            assert apart <= 1, f"{name}: pixels are {apart} levels from those of PIL"


if __name__ == "__main__":
    try_core("--pure" in sys.argv)
    with tempfile.TemporaryDirectory() as scratch:
        source, out = plant(Path(scratch, "source")), Path(scratch, "out")
        try_packing(source, out)
        try_golden()
        try:
            import torch
        except ImportError:
            print("NOT TRIED: streaming, since torch is not here")
        else:
            print(f"torch     {torch.__version__}")
            try_streaming(out)
    print(f"good: {Path(shardio.__file__).parent}")
