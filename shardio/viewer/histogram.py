"""Count the classes of chosen records, and bin their sizes and columns: from the index alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..formats.base import Column
from .results import Bins, ClassCount

BINS = 40
_MASK = (1 << 64) - 1
_SKEWED = 20  # times the median that the greatest value is, from which on bins grow geometrically


def count_classes(column: Column, names: Sequence[str] | None) -> tuple[ClassCount, ...]:
    """Count the records of each label; classes without a record too, and last those of no label."""
    empty, data = np.ma.getmaskarray(column), np.ma.getdata(column)
    if data.dtype.kind not in "iub":
        return ()
    values, counts = _unique(data[~empty] if empty.any() else data)
    found = dict(zip(values.tolist(), counts.tolist(), strict=True))
    names = names or ()
    labels = [*range(len(names)), *sorted(found.keys() - range(len(names)))]
    classes = [
        ClassCount(label, names[label] if 0 <= label < len(names) else None, found.get(label, 0))
        for label in labels
    ]
    if empty.any():
        classes.append(ClassCount(None, None, int(empty.sum())))
    return tuple(classes)


def bin_numbers(name: str, column: Column) -> Bins | None:
    """Bin the values of a column, those that are finite; None if there is none."""
    empty, data = np.ma.getmaskarray(column), np.ma.getdata(column)
    if data.dtype.kind not in "iufb":
        return None
    usable = ~empty if data.dtype.kind != "f" else ~empty & np.isfinite(data)
    if not usable.all():
        data = data[usable]
    if not len(data):
        return None
    data = data.view(np.uint8) if data.dtype.kind == "b" else data
    low, high = data.min().item(), data.max().item()
    with np.errstate(over="ignore"):
        middle = float(np.median(data[:: max(1, len(data) // 10_000)]))
    if low > 0 and high > _SKEWED * middle:
        edges = np.geomspace(low, high, BINS + 1)
    elif data.dtype.kind in "iu":  # as many values in each bin
        width = (high - low) // BINS + 1
        bins = (high - low) // width + 1
        counts = np.zeros(bins, np.int64)
        for part in _parts(data):
            if data.dtype.kind == "i":  # differences are right modulo 2^64
                part = part.astype(np.int64).view(np.uint64)
            places = (part - part.dtype.type(low & _MASK)) // part.dtype.type(width)
            counts += np.bincount(places.astype(np.intp), minlength=bins)
        return Bins(name, tuple(range(low, low + bins * width + 1, width)), tuple(counts.tolist()))
    else:
        share = 0.5 if math.isinf(high - low) else 1.0  # differences that no float holds
        edges = np.array([low, high])
        if low < high:
            edges = np.linspace(low * share, high * share, BINS + 1) / share
    counts = np.zeros(len(edges) - 1, np.int64)
    for part in _parts(data):
        counts += np.histogram(part, edges)[0]
    return Bins(name, tuple(edges.tolist()), tuple(counts.tolist()))


def _parts(data: Column) -> list[Column]:
    """Split a column, so that what is made of its parts stays small."""
    return np.array_split(data, 1 + len(data) // 1_000_000)


def _unique(data: Column) -> tuple[Column, Column]:
    """Return different integers and how often each comes; by counting where they are small."""
    if len(data) and data.min() >= 0 and data.max() < 1 << 20:
        counts = np.bincount(data)
        values = np.flatnonzero(counts)
        return values, counts[values]
    return np.unique(data, return_counts=True)
