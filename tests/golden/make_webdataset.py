"""Writes tests/golden/webdataset/: tar files by webdataset and by GNU tar, and what is in them.

    python tests/golden/make_webdataset.py [FOLDER]

Made with webdataset 1.0.2, Python 3.11, numpy 2.4.6 and GNU tar 1.34. Needs webdataset, which
shardio does not: run it in an environment of its own. What is in the files is said by webdataset's
own reader, so that expected.json owes nothing to shardio.
"""

import base64
import contextlib
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks import own_home

own_home.enter()  # before what looks where its home is
# ruff: noqa: E402

import numpy as np
import webdataset

FOLDER = Path(__file__).resolve().parent / "webdataset"
NOISE = np.random.default_rng(4)
SAFE = {"cls", "cls2", "index", "id", "txt", "text", "transcript", "json", "jsn", "npy"}


def image(start: bytes, size: int = 40) -> bytes:
    return start + NOISE.bytes(size)


JPG, PNG = b"\xff\xd8\xff\xe0", b"\x89PNG\r\n\x1a\n"
SAMPLES = [
    {
        "__key__": "train/n01/cat_0",
        "jpg": image(JPG),
        "cls": 7,
        "json": {"name": "Käfer", "box": [0, 1.5, None, True]},
        "txt": "a cat,\nasleep \u732b",
    },
    {
        "__key__": "train/n01/cat_1",
        "jpg": image(JPG, 600),
        "cls": -1,
        "seg.png": image(PNG),
        "mask.npy": np.asfortranarray(NOISE.integers(0, 9, (3, 4)).astype(">i2")),
        "pyd": {"pickled": [1, 2]},
    },
    {"__key__": "train/n02/" + "long/" * 30 + "dog", "jpg": image(JPG), "cls": 2},
    {"__key__": "träin/猫", "JPG": image(JPG), "index": 12, "npy": np.float32(0.5).reshape(())},
    {"__key__": "empty", "txt": "", "jpg": b""},
    {"__key__": "objects", "npy": np.array([{"a": 1}, None], object), "npz": {"a": np.zeros(2)}},
]
FILES = {
    "a/1.jpg": image(JPG),
    "a/1.cls": b"3\n",
    "a/1.JSON": b'{"x": 1}',
    "a/notes": b"no extension",
    "a/2.x.y.png": image(PNG, 700),
    "a/2.cls": b" 4 ",
    "__meta__/about.txt": b"skipped",
    "b.d/3.jpg": image(JPG, 512),
    "b.d/3.cls": b"5",
}
LONG = {"d" * 60 + "/" + "n" * 90 + ".jpg": image(JPG), "d" * 60 + "/" + "n" * 90 + ".cls": b"6"}


def gnu_tar(target: Path, files: dict[str, bytes], *options: str) -> None:
    with tempfile.TemporaryDirectory() as root:
        for name, data in files.items():
            path = Path(root, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        command = ["tar", "--sort=name", "--mtime=@1700000000.25", "--owner=o", "--group=g"]
        command += ["--mode=644", *options, "-C", root, "-cf", str(target)]
        subprocess.run([*command, *sorted({n.partition("/")[0] for n in files})], check=True)


def described(value: object) -> object:
    """A value that webdataset decoded, so that JSON can hold it."""
    if isinstance(value, np.ndarray):
        return [value.dtype.newbyteorder("=").str, list(value.shape), value.tolist()]
    return value


def expected(path: Path) -> list[object]:
    """Samples as webdataset reads them, and those of their values that are safe to decode."""
    found = []
    for sample in webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False):
        raw = {name: value for name, value in sample.items() if not name.startswith("__")}
        values = {}
        for name, value in raw.items():
            if name.rpartition(".")[2] in SAFE:
                # ValueError: an array of objects, which numpy refuses, too
                with contextlib.suppress(ValueError):
                    values[name] = described(webdataset.autodecode.basichandlers("." + name, value))
        fields = {name: base64.b64encode(value).decode() for name, value in raw.items()}
        found.append([sample["__key__"], fields, values])
    return found


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # as TarWriter writes without options: a pax header with the time before each member
    with webdataset.TarWriter(str(folder / "tarwriter.tar"), mtime=1700000000.25) as writer:
        for sample in SAMPLES:
            writer.write(sample)
    with (
        contextlib.redirect_stdout(io.StringIO()),
        webdataset.ShardWriter(str(folder / "shard-%04d.tar"), maxcount=2, mtime=1) as writer,
    ):
        for i in range(3):
            writer.write({"__key__": f"{i:06d}", "jpg": image(JPG, 900), "cls": i})
    gnu_tar(folder / "gnu.tar", FILES | LONG, "--format=gnu", "-b1")
    gnu_tar(folder / "pax.tar", FILES | LONG, "--format=pax", "-b1", "--pax-option=delete=[ac]time")
    gnu_tar(folder / "ustar.tar", FILES | LONG, "--format=ustar")
    gnu_tar(folder / "v7.tar", FILES, "--format=v7", "-b1")
    gnu_tar(folder / "dot.tar", {"./" + k: v for k, v in FILES.items()}, "-b1")
    found = {path.name: expected(path) for path in sorted(folder.glob("*.tar"))}
    text = json.dumps(found, indent=1, ensure_ascii=False)
    (folder / "expected.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
