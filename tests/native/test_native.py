"""The compiled core where it was built, and shardio without it."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support import LIMIT_S
from support.trees import environment, picture, plant

import shardio
from shardio import ImageOptions, native, pack
from shardio.cli.main import main

CORE = Path(__file__).resolve().parent.parent.parent / "shardio" / "native"
core = native.core
built = pytest.mark.skipif(core is None, reason=f"NOT RUN: no compiled core ({native.missing})")


def test_without_the_core_it_is_said_why() -> None:
    found = subprocess.run(
        [
            *(sys.executable, "-c"),
            "import sys; sys.modules['shardio.native._core'] = None\n"
            "from shardio import native\nprint(native.core, native.missing)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.startswith("None ") and "libjpeg-dev" in found.stdout


NEW = """#define XXH_VERSION_NUMBER 800
typedef int XXH3_state_t;
#define XXH3_64bits_withSeed(d, n, s) (n + s)
#define XXH3_64bits_reset_withSeed(t, s) (*(t) = (int)(s))
#define XXH3_64bits_update(t, d, n) (*(t) += (int)(n))
#define XXH3_64bits_digest(t) (uint64_t)*(t)
"""


@built
@pytest.mark.parametrize(
    ("header", "words"),
    [
        (None, "Python reads the records: when shardio was installed"),
        ("#define XXH_VERSION_NUMBER 704\n", "no header of xxHash, 0.8.0 or newer"),
        (NEW, None),
    ],
    ids=["none", "old", "new"],
)
def test_a_core_that_was_built_without_xxhash_leaves_records_to_python(
    tmp_path: Path, header: str | None, words: str | None
) -> None:
    if (compiler := shutil.which("cc")) is None or sys.platform != "linux":
        pytest.skip("NOT RUN: no C compiler, or one that wants other options")
    folder = tmp_path / "include"
    folder.mkdir()
    (folder / "xxhash.h").write_text(header or "#error")
    made = tmp_path / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    # None: the system's header may be there, so the question for it is answered here.
    asked = ["-D__has_include(x)=0"] if header is None else []
    command = [compiler, "-std=c11", "-O0", "-shared", "-fPIC", "-w", *asked, f"-I{folder}"]
    command += [f"-I{sysconfig.get_path('include')}", f"-I{CORE}"]
    command += [*map(str, sorted(CORE.glob("*.c"))), "-ljpeg", "-lm", "-o", str(made)]
    subprocess.run(command, check=True, timeout=LIMIT_S)
    script = (
        "import sys; from importlib import machinery, util\n"
        f"loader = machinery.ExtensionFileLoader('shardio.native._core', {str(made)!r})\n"
        "spec = util.spec_from_loader('shardio.native._core', loader)\n"
        "sys.modules['shardio.native._core'] = core = util.module_from_spec(spec)\n"
        "loader.exec_module(core)\n"
        "from shardio import native\n"
        "assert native.core is core and hasattr(core, 'crop'), native.missing\n"
        "print(native.records() is core, native.described())"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.stdout.startswith(f"{words is None} built"), found.stderr
    assert words is None or words in found.stdout


ADVISED = """
import os, sys, warnings
sys.modules["shardio.native._core"] = None
import shardio
from shardio import CenterCrop, RandomResizedCrop, ShardDataset
from torch.utils.data import DataLoader
warnings.simplefilter("error")  # where nothing would be faster, nothing is said
crop = RandomResizedCrop(8)
ShardDataset("jpeg", batch_size=2)
ShardDataset("jpeg", batch_size=2, transform=CenterCrop(8, interpolation="nearest"))
ShardDataset("jpeg", batch_size=2, transform=lambda image: image)
ShardDataset("jpeg", decode="numpy")
ShardDataset("png", batch_size=2, transform=crop)
ShardDataset("png", batch_size=2, decode="numpy")
ShardDataset("raw", batch_size=2, transform=crop)
warnings.resetwarnings()
for call in sys.argv[1:]:
    if (child := os.fork()) == 0:
        data = eval(call)
        exec("\\n" + call)  # of another line
        loader = DataLoader(data, batch_size=None, num_workers=1)
        print(sum(len(labels) for _, labels in loader), file=sys.stderr, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
SLOWER = {
    "'jpeg', transform=RandomResizedCrop(8)": "PIL decodes and crops the JPEGs of this dataset",
    "'jpeg', decode='numpy'": "PIL decodes the JPEGs of this dataset",
    "'raw', decode='numpy'": "records of raw pixels are read by Python",
}


def test_what_is_slower_without_the_core_is_said_once_in_a_process(tmp_path: Path) -> None:
    for kind in ("JPEG", "PNG"):
        tree = {f"c{i}/{i}.{kind}": picture(12, 12, kind) for i in range(4)}
        pack(plant(tmp_path / "src" / kind, tree), tmp_path / kind.lower(), jobs=1)
    raw = ImageOptions(encode="raw")
    pack(tmp_path / "src" / "PNG", tmp_path / "raw", images=raw, resize=12, jobs=1)
    calls = [f"ShardDataset({how}, batch_size=2, fields=('image', 'label'))" for how in SLOWER]
    found = subprocess.run(
        [sys.executable, "-c", ADVISED, *calls],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    lines = [
        line for line in found.stderr.splitlines() if "PerformanceWarning" in line or line == "4"
    ]
    assert len(lines) == 2 * len(SLOWER), found.stderr
    for said, count, words in zip(lines[::2], lines[1::2], SLOWER.values(), strict=True):
        assert said.startswith(f"<string>:1: PerformanceWarning: {words}")  # of the user's line
        assert "libjpeg-dev" in said and "pip install" in said
        assert count == "4"


@built
@pytest.mark.parametrize("size", [0, 1, 63, 64, 4097, 16 << 20, (16 << 20) + 77])
@pytest.mark.parametrize("shift", [0, 1, 16])
def test_copies_are_whole_and_end_where_they_should(size: int, shift: int) -> None:
    data = np.arange(size, dtype=np.uint32).view(np.uint8)[:size]
    to = np.full(shift + size + 64, 0xA5, np.uint8)
    assert core is not None
    core.copy(to[shift:], data)
    assert np.array_equal(to[shift : shift + size], data)
    assert (to[:shift] == 0xA5).all() and (to[shift + size :] == 0xA5).all()


@built
def test_what_cannot_be_copied_is_refused() -> None:
    assert core is not None
    to = np.zeros(3, np.uint8)
    with pytest.raises(ValueError, match="shorter"):
        core.copy(to, b"1234")
    with pytest.raises(TypeError):
        core.copy(b"1234", b"1")
    with pytest.raises((TypeError, ValueError, BufferError)):
        core.copy(np.zeros(8, np.uint8)[::2], b"1")
    assert not to.any()


@built
@pytest.mark.skipif(native.records() is None, reason="NOT RUN: the core reads no records")
def test_threads_that_use_the_core_at_once_get_what_one_gets(tmp_path: Path) -> None:
    """Without the GIL they run at once; with it, where the core lets go of it."""
    tree = {f"c{i % 3}/{i:02}.jpg": picture(80 + i, 64) for i in range(24)}
    pack(plant(tmp_path / "src", tree), tmp_path / "out", jobs=1)
    data = shardio.open(tmp_path / "out", decode="numpy")
    assert core is not None

    def read() -> list[bytes]:
        found = [b"".join(np.asarray(sample["image"]).tobytes() for sample in data)]
        for name in sorted(tree):
            out = np.zeros((32, 32, 3), np.uint8)
            assert core.crop(tree[name], (3, 5, 60, 61), out, "bilinear", 1, 1 << 20)
            found += [out.tobytes(), core.rewrite(tree[name], 4)]
        return found

    alone, start = read(), threading.Barrier(8)

    def at_once(_: int) -> list[list[bytes]]:
        start.wait(LIMIT_S)
        return [read() for _ in range(4)]

    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(at_once, range(8)):
            assert found == [alone] * 4


@built
@pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="NOT RUN: this Python has a GIL"
)
def test_importing_the_core_leaves_the_gil_off() -> None:
    script = "import sys, shardio.native as n; print(n.core is not None, sys._is_gil_enabled())"
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["True", "False"]


@built
def test_info_says_whether_native_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", "--env"]) == 0
    built = r"built with libjpeg-turbo \d+\.\d+[.\d]*"
    built += "$" if native.records() else ", but Python reads the records: .*libxxhash"
    assert re.search(rf"^core +{built}", capsys.readouterr().out, re.MULTILINE)
    monkeypatch.setattr(native, "core", None)
    monkeypatch.setattr(native, "missing", "no such module")
    assert main(["info", "--env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["core"] == "not built: no such module"
