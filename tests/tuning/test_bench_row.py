"""What limits a row of a bench, by its figures."""

from dataclasses import replace
from typing import Any

import pytest
from support.benches import BUSY, DATALOADER, MEMORY, plan

from shardio.tuning.bench import conclude
from shardio.tuning.bench_row import LIMITS, judge


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("decoding", {}),
        ("cpu", {"decodes": False}),
        ("cpu", {"cpu_ms": 0.3}),  # of which 0.2 are spent without decoding, too
        ("decoding", {"cores_busy": 1.3, "others_busy": 0.5}),
        ("load", {"cores_busy": 0.5, "others_busy": 1.4}),
        ("transport", {"trainer_busy": 0.95}),
        ("decoding", {"trainer_busy": 0.95, "workers": 0}),  # there it makes them, too
        ("storage", {"cores_busy": 0.6, "storage_mb_per_s": 90.0, "cold": True}),
        ("decoding", {"storage_mb_per_s": 90.0, "cold": True}),  # it keeps up
        ("worker", {"cores_busy": 0.98, "workers": 0}),
        ("worker", {"cores_busy": 1.1, "workers": 1, "trainer_busy": 0.12}),
        ("threads", {"loader": "ShardLoader", "workers": 1, "threads": 4, "cores_busy": 1.2}),
        ("worker", {"loader": "ShardLoader", "workers": 0, "threads": 4, "cores_busy": 3.9}),
        ("network", {"cores_busy": 0.9, "remote": True}),
        ("decoding", {"remote": True}),
        ("worker", {"cores_busy": 0.98, "workers": 0, "remote": True}),
        ("waiting", {"cores_busy": 0.9}),
        ("waiting", {"cores_busy": None, "cpu_ms": None}),
        ("start", {"cores_busy": 0.9, "pass_batches": 3}),
        ("memory", {"memory_left": 100 << 20}),
    ],
)
def test_a_row_is_judged_by_its_figures(code: str, changes: dict[str, Any]) -> None:
    cores = 8.0 if code in ("worker", "threads") else 2.0
    bare = replace(BUSY, decodes=False, cpu_ms=0.2, images_per_s=9000.0)
    row, _ = judge([replace(BUSY, **changes), bare], cores, MEMORY)
    assert row.limit == code
    assert row.short.startswith((f"{code}: ", f"{code} "))
    assert row.why and code in LIMITS
    assert len(row.short) <= 32


def test_storage_does_not_limit_what_is_as_fast_as_warm() -> None:
    cold = replace(BUSY, cold=True, cores_busy=1.0, storage_mb_per_s=99.0, images_per_s=980.0)
    for rate, code in ((1000.0, "waiting"), (1200.0, "storage")):
        row, _ = judge([cold, replace(BUSY, images_per_s=rate)], 2.0, MEMORY)
        assert row.limit == code


def test_a_row_that_failed_is_not_judged_and_shows_why() -> None:
    failed = replace(DATALOADER, error="it was killed\nand more")
    assert judge([failed], 2.0, MEMORY) == [failed]
    made = conclude(replace(plan(), rows=(failed, BUSY)), [])
    assert "failed: it was killed" in str(made) and "and more" not in str(made)
    assert made.best is BUSY


def test_the_share_of_decoding_is_told_by_the_row_without_it() -> None:
    bare = replace(BUSY, decodes=False, cpu_ms=0.5)
    other = replace(bare, loader="ShardLoader", cpu_ms=0.1)
    row, *_ = judge([BUSY, other, bare], 2.0, MEMORY)
    assert "about 75% of the CPU time of an image is decoding" in row.why
    row, *_ = judge([BUSY, other], 2.0, MEMORY)
    assert "about 95%" in row.why
    row, *_ = judge([BUSY, bare], 2.0, MEMORY, raw=True)
    assert row.limit == "cpu" and "decoding" not in row.why  # pixels are stored as they are
    (row,) = judge([BUSY], 2.0, MEMORY)
    assert row.limit == "decoding" and "about" not in row.why
