"""What a section is: one promise, and cases by number that attack it."""

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import gcd
from pathlib import Path
from typing import Any


class Section:
    """Attacks one promise. A case is a pure function of the seed and its number."""

    name = ""
    promise = ""
    goal = 10**9  # cases, after which it has done what it is for; `prepare` may say

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.sums: Counter[str] = Counter()  # what was counted besides cases, since it was told

    def prepare(self) -> None:
        """Make what all cases need, once a process."""

    def draw(self, number: int) -> random.Random:
        """Return what a case draws from: the same in every run."""
        return random.Random(f"{self.seed}/{self.name}/{number}")

    def case(self, number: int) -> str:
        """Do one; return its kind. Raises AssertionError, or anything else, where it fails."""
        raise NotImplementedError

    def most(self) -> dict[str, float]:
        """Return what was measured: the largest of all processes counts."""
        return {}

    def close(self) -> None:
        """End what `prepare` began."""

    @classmethod
    def done(cls, kinds: Mapping[str, int], figures: Mapping[str, float]) -> str:
        """Say in some words what was done. figures: what `sums` and `most` came to."""
        return f"{len(kinds)} kinds"


def scattered(number: int, total: int, seed: int) -> int:
    """Return a place below `total`, in an order that is no order: each once in `total` cases."""
    step = int(total * 0.618) | 1
    while gcd(step, total) > 1:
        step += 2
    return (number * step + seed) % total


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
