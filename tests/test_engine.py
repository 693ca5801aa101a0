"""The compiled core where it was built, and shardio without it."""

import subprocess
import sys

import numpy as np
import pytest

from shardio import engine

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
