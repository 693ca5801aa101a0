"""What a tuning shows: its text, its JSON, its verdicts."""

import ast
import json
from dataclasses import replace

import numpy as np
import pytest
from support.tunings import ALIGNED, OPTIONS, SHARDS, SHUFFLED, SMALL, N, row_of

from shardio.tuning.simulate import Sample, uniform_mixture
from shardio.tuning.tune import recommend
from shardio.tuning.tune_result import Tuning

pytestmark = pytest.mark.usefixtures("one_pass")


def test_a_uniform_order_seldom_fails_the_test_of_its_mixture() -> None:
    """One in a thousand, by the test's own rate; a difference of 1.5 % of many batches fails."""
    labels = np.arange(20_000) % 200
    sample = Sample.of(20_000, 64)
    means = uniform_mixture(labels, 64, sample)[:, 0]
    found = recommend(np.array([1250] * 16), labels, batch_size=64, mean_bytes=1, units=False)
    low, high = found.band
    assert ((means < low) | (means > high)).sum() <= 2  # of 200
    assert found.uniform * 1.015 > high


def test_rows_are_judged_by_their_bands_and_sorted_by_memory(shuffled: Tuning) -> None:
    rows = shuffled.rows
    assert [(r.memory_bytes, -r.unit) for r in rows] == sorted(
        (r.memory_bytes, -r.unit) for r in rows
    )
    low, high = shuffled.band
    for row in rows:
        assert row.mixes == (low <= row.classes <= high)
        assert row.renews == (row.again - shuffled.chance < 0.05)
    buffers = list(dict.fromkeys(row.shuffle_buffer for row in rows))
    assert buffers == [20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, None]  # and never 0 or 1
    assert {row.unit for row in rows} == {64, 16, 4}
    assert all(64 % row.unit == 0 for row in rows)
    one = recommend(SHARDS, SHUFFLED, **OPTIONS | {"spans": 1, "units": False})
    assert min(row.window for row in one.rows) >= 2 and {row.unit for row in one.rows} == {16}


def test_a_reader_sees_why_a_row_fails(shuffled: Tuning, ordered: Tuning) -> None:
    for found in (shuffled, ordered):
        digits = found.decimals
        low, high = (round(edge, digits) for edge in found.band)
        for row in found.rows:
            inside = found.band[0] <= row.classes <= found.band[1]
            assert (low <= round(row.classes, digits) <= high) == inside
    assert ordered.verdict(row_of(ordered, 100, 64)) == "too few classes, pairs stay"
    assert shuffled.verdict(row_of(shuffled, 100, 64)).endswith("pairs stay")
    parts = recommend(ALIGNED, np.arange(N) * 4 // N, **OPTIONS)
    assert parts.verdict(row_of(parts, 200, 4)).startswith("too even")
    assert "off band" not in str(parts)
    near = replace(shuffled, band=(shuffled.rows[0].classes + 1e-4, shuffled.band[1]))
    assert near.decimals == 4


def test_the_text_fits_a_terminal_and_ends_with_the_call(shuffled: Tuning, ordered: Tuning) -> None:
    for found in (shuffled, ordered):
        lines = str(found).splitlines()
        assert max(map(len, lines)) <= 100
        assert lines[-1] == found.call
        assert sum("<- default, recommended" in line for line in lines) >= 1
    some = recommend(SHARDS, SHUFFLED, memory="100MB", **OPTIONS)
    call = ast.parse(some.call, mode="eval").body
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    assert call.func.id == "ShardDataset"
    given = {one.arg: one.value for one in call.keywords}
    order = given.pop("order")
    assert isinstance(order, ast.Call)
    for one in order.keywords:
        given[one.arg] = one.value
    named = {name: ast.literal_eval(value) for name, value in given.items()}
    assert some.best is not None
    assert named["shuffle_buffer"] == some.best.shuffle_buffer
    assert named.get("unit", 16) == some.best.unit and named["spans"] == 16
    part = recommend(SMALL, None, batch_size=100, spans=3, mean_bytes=9, path=None)
    assert part.call == ""


def test_the_result_as_json_is_plain_and_whole(ordered: Tuning) -> None:
    plain = json.loads(json.dumps(ordered.as_dict()))
    assert len(plain["rows"]) == len(ordered.rows)
    assert plain["best"] == plain["rows"][ordered.rows.index(ordered.best or ordered.rows[0])]
    assert plain["best"]["good"] is True
    assert plain["rows"][-1]["shuffle_buffer"] == "all"
    assert plain["rows"][0]["shuffle_buffer"] == 20
    assert plain["band"] == list(ordered.band)


def test_names_that_would_change_a_terminal_are_escaped() -> None:
    found = recommend(np.array([5]), None, batch_size=8, mean_bytes=1, path='a"\x1b[31m\udcff')
    assert found.call.startswith('ShardDataset("a\\"\\u001b[31m\\udcff", batch_size=8')
