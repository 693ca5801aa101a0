"""Where Lightning, Accelerate and transformers are, and the data that their loops read."""

from pathlib import Path

import pytest

from support import small_datasets

HERE = Path(__file__).resolve().parent.parent / "frameworks"
PYTHON = HERE / ".venv" / "bin" / "python"
BECOME = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"  # another Python, same environment
COUNTS = [23, 0, 41, 3, 30]

needs_them = pytest.mark.skipif(
    not PYTHON.exists(),
    reason="NOT RUN: loops of frameworks, docs/recipes.md. tools/setup-frameworks installs them",
)


def numbered(out: Path) -> Path:
    """A dataset where the label of each record is its own number."""
    return small_datasets.make(
        out,
        COUNTS,
        image=small_datasets.jpeg,
        sample=lambda i: {"__key__": b"%d" % i, "image": small_datasets.jpeg(i), "label": i},
        classes=None,
    )
