"""Inputs that somebody wrote to do harm: each ends as tests/golden/hostile says, in little memory.

In an error of shardio's own, which names the file, or in what the input says. tests/support/hostile
makes the inputs; `python tests/golden/make_hostile.py` writes the tables again.
"""

from pathlib import Path

import pytest
from support import hostile

from shardio.errors import DamageError

FAMILIES = hostile.families()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_each_case_ends_as_it_is_kept(name: str, every: int, tmp_path: Path) -> None:
    """Every fifth case of a family in each run, and all in the slow ones."""
    found = hostile.outcomes(FAMILIES[name], tmp_path, lambda number: number % every == 0)
    kept = hostile.load(hostile.table(name).read_text())
    assert every > 1 or found.keys() == kept.keys()
    changed = [case for case in found if found[case] != kept.get(case)]
    told = [f"{case}\n  kept  {kept.get(case)}\n  found {found[case]}" for case in changed[:20]]
    assert not changed, f"{len(changed)} cases of {len(found)} changed:\n" + "\n".join(told)


def test_what_is_kept_is_no_fault_and_much() -> None:
    kept = {name: hostile.load(hostile.table(name).read_text()) for name in FAMILIES}
    assert not [end for one in kept.values() for end in one.values() if end.startswith("!")]
    assert sum(map(len, kept.values())) >= 3_000
    assert {path.stem for path in hostile.TABLES.iterdir()} == set(kept)


@pytest.mark.parametrize(
    ("work", "end"),
    [
        (lambda: bytearray(200 << 20), "! MemoryError"),
        (lambda: [].pop(), "! IndexError"),
        (lambda: _raise(DamageError("somewhere: wrong")), "! a bad message"),
        (lambda: _raise(DamageError("x: \x1b[2J")), "! a bad message"),
        (lambda: _raise(DamageError("x: 5 of 7 bytes")), "DamageError: x: # of # bytes"),
        (lambda: 7, hostile.AS_IT_WAS),
        (lambda: 8, hostile.OTHERWISE),
    ],
)
def test_what_must_not_be_is_told(work: object, end: str, tmp_path: Path) -> None:
    """Memory, other exceptions, messages that name nothing or steer a terminal."""

    def of_one(_: Path) -> object:
        yield hostile.Case("one", 9, work, ("x",), 7)  # type: ignore[arg-type]

    found = hostile.outcomes(of_one, tmp_path)  # type: ignore[arg-type]
    assert found["one"].startswith(end)


def _raise(error: Exception) -> None:
    raise error
