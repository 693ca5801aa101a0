"""What fuzzing of Python's parsers found worth keeping (tests/fuzz/parsers), on every run.

Every input is taken, or answered by an error of shardio's own, with the compiled core and without.
"""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import fuzz_targets
from support.fuzz_targets import Target

from shardio import native

KEPT = Path(__file__).parent.parent / "fuzz" / "parser_seeds"


@pytest.fixture(scope="module")
def targets() -> Iterator[dict[str, Target]]:
    with fuzz_targets.targets() as all_targets:
        yield all_targets


@pytest.fixture(params=["core", "no core"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "no core":
        monkeypatch.setattr(native, "core", None)
    return str(request.param)


def test_all_targets_have_something_to_begin_with(targets: dict[str, Target]) -> None:
    """And take most of it, so that inputs made from them get far."""
    found = Counter(data[:1].decode() for data in fuzz_targets.seeds())
    assert found.keys() == targets.keys()
    taken = Counter(fuzz_targets.run(targets, data) for data in fuzz_targets.seeds())
    assert taken["taken"] > 0.9 * sum(taken.values()), taken


@pytest.mark.parametrize("letter", "msgrdfatihx")
def test_kept_inputs(way: str, targets: dict[str, Target], letter: str) -> None:
    for path in sorted(KEPT.glob(f"{letter}-*")):
        data = path.read_bytes()
        assert data[:1] == letter.encode()
        assert fuzz_targets.run(targets, data), path.name


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 40))]
)
def test_changed_inputs(way: str, targets: dict[str, Target], seed: int) -> None:
    """Of what there is to begin with: bytes changed, cut off, repeated."""
    rng, outcomes = random.Random(seed), Counter[str]()
    begin = list(fuzz_targets.seeds())
    for _ in range(300):
        data = bytearray(rng.choice(begin))
        for _ in range(rng.choice([1, 1, 2, 8])):
            if len(data) < 3:
                break
            at = rng.randrange(1, len(data))
            how = rng.random()
            if how < 0.6:
                data[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
            elif how < 0.8:
                del data[at : at + rng.choice([1, 4, 100, len(data)])]
            else:
                data[at:at] = data[at : at + rng.choice([1, 4, 100])]
        outcomes[fuzz_targets.run(targets, bytes(data))] += 1
    assert outcomes["taken"] and outcomes["DamageError"], outcomes
