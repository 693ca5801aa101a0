"""Histograms: each record counted once, in the bin of its value."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.small_datasets import FIELDS, jpeg, make
from support.viewer_records import N, ask, numbers, scored

from shardio import OptionError
from shardio.viewer import histogram
from shardio.viewer.results import Query
from shardio.viewer.view import View, open_view


def test_histograms_count_all_records_or_the_chosen_ones(view: View) -> None:
    found = view.histograms(wait_s=None)
    every = [*map(scored, range(N))]
    assert [one.count for one in found.classes] == [
        sum(s["label"] == label for s in every) for label in range(3)
    ]
    bins = {one.name: one for one in found.bins}
    assert sum(bins["width"].counts) == N == sum(bins["bytes"].counts)
    assert sum(bins["score"].counts) == sum(s["score"] is not None and s["score"] == s["score"] for s in every)  # fmt: skip  # noqa: E501
    chosen = view.histograms(Query(label="dog"), wait_s=None)
    assert chosen.records == sum(s["label"] == 1 for s in every)
    assert [one.count for one in chosen.classes] == [0, chosen.records, 0]


@pytest.mark.parametrize(
    "values",
    [
        np.arange(-100, 100, dtype=np.int8),
        np.array([7, 7, 7], np.uint16),
        np.random.default_rng(0).normal(size=1000).astype(np.float32),
        np.array([1, 2, 3, 4, 5, 100_000], np.uint32),
        np.array([-(2**63), 2**63 - 1, 0]),
        np.array([True, False, True]),
        np.array([2.5]),
        np.array([-1.7e308, 1.7e308, 1.7e308, 1.7e308]),
        np.array([5e-324, 1.5e-323]),
    ],
    ids=["int8", "one value", "floats", "skewed", "int64", "bool", "one float", "widest", "least"],
)
def test_bins_hold_the_values_between_their_edges(values: Any) -> None:
    found = histogram.bin_numbers("x", values)
    assert found is not None and len(found.edges) == len(found.counts) + 1
    low, high = found.edges[0], found.edges[-1]
    assert low <= values.min() and values.max() <= high and sum(found.counts) == len(values)
    if len(values) > 100:
        assert found.counts == tuple(np.histogram(values, found.edges)[0])


@pytest.mark.parametrize(("least", "most"), [(0, 39), (0, 40), (-5, 74), (10, 1009)])
def test_bins_of_integers_are_as_few_and_as_wide_as_they_must_be(least: int, most: int) -> None:
    """Each has as many integers as the others, so that none looks more frequent than it is."""
    found = histogram.bin_numbers("x", np.arange(least, most + 1))
    assert found is not None
    [width] = {b - a for a, b in itertools.pairwise(found.edges)}
    assert width == math.ceil((most - least + 1) / histogram.BINS)
    assert len(found.counts) == math.ceil((most - least + 1) / width) <= histogram.BINS
    assert {*found.counts[:-1]} <= {width}


def test_labels_without_names_and_records_without_labels_are_counted(tmp_path: Path) -> None:
    def sample(number: int) -> dict[str, Any]:
        label = None if number == 4 else (5, 5, 900)[number % 3]
        return {"__key__": b"%d" % number, "image": jpeg(0), "label": label}

    with open_view(make(tmp_path / "a", [6], sample=sample, classes=None)) as view:
        assert [(c.label, c.name, c.count) for c in view.histograms(wait_s=None).classes] == [
            (5, None, 3), (900, None, 2), (None, None, 1)
        ]  # fmt: skip
        assert numbers(ask(view, label="900")) == [2, 5]
        assert view.page().cards[4].label is None
    fields = FIELDS[:2]
    bare = make(
        tmp_path / "b", [2], fields=fields, sample=lambda n: {"__key__": b"%d" % n, "image": b"x"}
    )
    with open_view(bare) as view:
        assert view.histograms(wait_s=None).classes == ()
        with pytest.raises(OptionError, match="label"):
            ask(view, label="cat")
