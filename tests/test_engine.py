"""The compiled core where it was built, and shardio without it."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from shardio import engine

CORE = Path(__file__).resolve().parent.parent / "shardio" / "core"
core = engine.core
built = pytest.mark.skipif(core is None, reason=f"NOT RUN: no compiled core ({engine.missing})")


def test_without_the_core_it_is_said_why() -> None:
    found = subprocess.run(
        [
            *(sys.executable, "-c"),
            "import sys; sys.modules['shardio._core'] = None\n"
            "from shardio import engine\nprint(engine.core, engine.missing)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.startswith("None ") and "libjpeg-dev" in found.stdout


@built
@pytest.mark.parametrize(
    ("header", "words"),
    [
        (None, "Python reads the records: when shardio was installed"),
        ("#define XXH_VERSION_NUMBER 704\n", "no header of xxHash, 0.8.0 or newer"),
        ("#define XXH_VERSION_NUMBER 800\n#define XXH3_64bits_withSeed(d, n, s) (n + s)\n", None),
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
    subprocess.run(command, check=True, timeout=120)
    script = (
        "import sys; from importlib import machinery, util\n"
        f"loader = machinery.ExtensionFileLoader('shardio._core', {str(made)!r})\n"
        "spec = util.spec_from_loader('shardio._core', loader)\n"
        "sys.modules['shardio._core'] = core = util.module_from_spec(spec)\n"
        "loader.exec_module(core)\n"
        "from shardio import engine\n"
        "assert engine.core is core and hasattr(core, 'crop'), engine.missing\n"
        "print(engine.records() is core, engine.described())"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.stdout.startswith(f"{words is None} built"), found.stderr
    assert words is None or words in found.stdout


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
