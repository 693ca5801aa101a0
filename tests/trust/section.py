"""What a section is: one promise, and cases by number that attack it."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Section:
    """Attacks one promise. A case is a pure function of the seed and its number."""

    name = ""
    promise = ""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed

    def prepare(self) -> None:
        """Make what all cases need, once a process."""

    def draw(self, number: int) -> random.Random:
        """Return what a case draws from: the same in every run."""
        return random.Random(f"{self.seed}/{self.name}/{number}")

    def case(self, number: int) -> str:
        """Do one; return its kind. Raises AssertionError, or anything else, where it fails."""
        raise NotImplementedError

    def figures(self) -> dict[str, float]:
        """Return what was measured: the largest of all processes counts."""
        return {}

    def close(self) -> None:
        """End what `prepare` began."""

    @classmethod
    def done(cls, kinds: Mapping[str, int], figures: Mapping[str, float]) -> str:
        """Say in some words what was done."""
        return f"{len(kinds)} kinds"


def words(items: Any) -> list[str]:
    """Return the different ones, sorted."""
    return sorted({*items})


@contextmanager
def told(what: str) -> Iterator[None]:
    """Let an error inside say what was done."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{what}: {error}") from error
