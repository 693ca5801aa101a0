"""The window of one span: the naive loop's order, however it is taken, from any draw."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.naive_order import cases, naive_span, spans

from shardio.errors import OptionError
from shardio.order import rng, shuffle
from shardio.order.shuffle import SpanOrder

blocks = st.sampled_from([1, 2, 7, 64, shuffle.BLOCK])


@cases(300)
@given(spans, blocks, st.lists(st.integers(0, 90), max_size=12))
def test_span_order_equals_the_naive_loop_however_it_is_taken(span, block, counts):
    n, window, key = span
    expected = naive_span(n, max(window, 1), key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "BLOCK", block)
        so = SpanOrder(n, window, key=key)
        got: list[int] = []
        for count in [*counts, n]:
            count = min(count, n - len(got))
            assert so.drawn == len(got)
            taken = so.take(count)
            assert taken.dtype == np.int64 and taken.shape == (count,)
            got += taken.tolist()
    assert got == expected
    assert sorted(got) == list(range(n))


@cases(300)
@given(spans, blocks, st.lists(st.integers(0, 400), min_size=1, max_size=6), st.integers(1, 60))
def test_seek_equals_taking_forwards_and_backwards(span, block, places, count):
    n, window, key = span
    expected = naive_span(n, max(window, 1), key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "BLOCK", block)
        patch.setattr(shuffle, "SCAN", 5)
        so = SpanOrder(n, window, key=key)
        for place in places:
            k = min(place, n)
            so.seek(k)
            assert so.drawn == k
            end = min(k + count, n)
            assert so.take(end - k).tolist() == expected[k:end]


@pytest.mark.parametrize("window", [2, 157, 10_000, 65_536, 65_537, 100_000])
def test_a_long_span_equals_the_naive_loop_and_seeks_anywhere(window):
    n = 150_000
    expected = naive_span(n, window, 11)
    so = SpanOrder(n, window, key=11)
    assert np.concatenate([so.take(32) for _ in range(n // 32)] + [so.take(n % 32)]).tolist() == (
        expected
    )
    for k in (0, 1, 60_000, 120_000, n - window, n - window + 1, n - 1, n):
        so = SpanOrder(n, window, key=11)
        so.seek(k)
        assert so.take(min(50, n - k)).tolist() == expected[k : k + 50]


@cases(150)
@given(spans)
def test_no_record_comes_before_it_has_entered_the_window(span):
    n, window, key = span
    w = max(1, min(window, n))
    for k, p in enumerate(SpanOrder(n, window, key=key).take(n).tolist()):
        assert k >= p - w + 1


def test_the_window_picks_its_slots_evenly():
    w, n = 16, 160_016
    emitted = SpanOrder(n, w, key=5).take(n - w)
    # In a fair window the delay of a record is geometric: P(delay >= d) = (15/16)^d.
    delay = np.arange(n - w) - emitted + w
    for d in (1, 2, 16, 48):
        expected = (1 - 1 / w) ** d
        assert abs(float((delay > d).mean()) - expected) < 0.005


# If this fails, saved states no longer mean the same: undo the change, or raise ORDER_VERSION.
GOLDEN_SPANS = {  # (n, window, first draw): six emissions
    (20000, 157, 0): [23, 156, 93, 136, 46, 114],
    (20000, 157, 10000): [10154, 10093, 10121, 9062, 10130, 10071],
    (20000, 157, 19990): [19910, 19972, 19708, 19975, 19735, 19890],
    (200000, 70000, 100000): [164387, 22889, 71920, 156736, 131094, 158673],
}


def test_golden_draws_of_long_spans():
    for (n, window, place), expected in GOLDEN_SPANS.items():
        so = SpanOrder(n, window, key=rng.key(rng.SPAN, 0, 0, 0))
        so.seek(place)
        assert so.take(6).tolist() == expected


def test_emissions_cannot_be_changed_under_a_later_seek_back():
    so = SpanOrder(100, 5, key=1)
    for _ in range(2):
        with pytest.raises(ValueError, match="read-only"):
            so.take(3)[0] = 7


def test_taking_or_seeking_beyond_a_span_is_refused_and_changes_nothing():
    so = SpanOrder(10, 3, key=1)
    so.take(4)
    for wrong in (
        lambda: so.take(7),
        lambda: so.take(-1),
        lambda: so.seek(11),
        lambda: so.seek(-1),
    ):
        with pytest.raises(OptionError):
            wrong()
        assert so.drawn == 4
    assert so.take(6).tolist() == naive_span(10, 3, 1)[4:]
    with pytest.raises(OptionError, match="shuffle_buffer"):
        SpanOrder(10, 2**32 + 1, key=1)
