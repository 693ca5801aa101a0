"""Options of other types are refused: "no" is true, and would replace a dataset."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import OptionError
from shardio.packing.gc import gc

GROUPS = [
    (shardio.Storage, "verify_open"),
    (shardio.ImageOptions, "jpeg_tiles"),
    (shardio.ImageOptions, "keep_original"),
    (shardio.PlanOptions, "shuffle"),
    (shardio.PlanOptions, "restart"),
]
FUNCTIONS: list[tuple[Callable[..., Any], int, str]] = [
    (shardio.pack, 2, "overwrite"),
    (shardio.pack, 2, "dry_run"),
    (shardio.plan, 2, "overwrite"),
    (shardio.commit, 1, "overwrite"),
    (shardio.index, 1, "overwrite"),
    (shardio.unpack, 2, "overwrite"),
    (gc, 1, "dry_run"),
    (shardio.verify, 1, "decode"),
    (shardio.verify, 1, "sha256"),
    (shardio.Writer, 1, "overwrite"),
]
TRANSFORMS = [
    (shardio.RandomResizedCrop, "flip"),
    (shardio.RandomResizedCrop, "fast"),
    (shardio.CenterCrop, "upright"),
]


@pytest.mark.parametrize("value", ["no", "", 0.1, 1, [True]])
def test_flags_are_true_or_false(tmp_path: Path, value: Any) -> None:
    (tmp_path / "a").mkdir()
    places = [str(tmp_path / "a"), str(tmp_path / "b")]
    for group, name in GROUPS:
        with pytest.raises(OptionError, match=f"^{name} is .*: expected True or False$"):
            group(**{name: value})
    for transform, name in TRANSFORMS:
        with pytest.raises(OptionError, match=f"{name} is .*: expected True or False$"):
            transform(8, **{name: value})
    for function, given, name in FUNCTIONS:
        with pytest.raises(OptionError, match=f"^{name} is .*: expected True or False$"):
            function(*places[:given], **{name: value})
    with pytest.raises(OptionError, match=r"^overwrite is .*: expected True or False$"):
        shardio.export(*places, format="mds", overwrite=value)
    assert not list((tmp_path / "a").iterdir()) and not (tmp_path / "b").exists()


def test_numpy_s_flags_are_taken() -> None:
    for group, name in GROUPS:
        for value in (np.True_, np.False_):  # and noted in manifests as JSON, which has none
            assert getattr(group(**{name: value}), name) is bool(value)


@pytest.mark.parametrize("value", [3, None, ["out"], {}])
def test_what_is_no_path_is_refused(tmp_path: Path, value: Any) -> None:
    (tmp_path / "images").mkdir()
    for call in (
        lambda: shardio.open(value),
        lambda: shardio.ShardDataset(value),
        lambda: shardio.pack(value, tmp_path / "out"),
        lambda: shardio.pack(tmp_path / "images", value),
        lambda: shardio.verify(value),
        lambda: shardio.unpack(value, tmp_path / "out"),
        lambda: shardio.Writer(value),
    ):
        with pytest.raises(OptionError, match="is no path: expected a str or "):
            call()
    with pytest.raises(OptionError, match="kind is 3: expected a kind's name"):
        shardio.SourceOptions(kind=3)  # type: ignore[arg-type]


def test_an_option_that_is_a_slip_is_told_with_what_was_meant() -> None:
    for call, meant in (
        (lambda: shardio.Order(span=8), "spans"),  # type: ignore[call-arg]
        (lambda: shardio.ImageOptions(qualty=3), "quality"),  # type: ignore[call-arg]
        (lambda: shardio.CenterCrop(8, resise=9), "resize"),  # type: ignore[call-arg]
        (lambda: shardio.pack("a", "b", resise=3), "resize"),  # type: ignore[call-arg]
        (lambda: shardio.ShardDataset("a", batchsize=3), "batch_size"),  # type: ignore[call-arg]
        (lambda: shardio.explain("a", worldsize=3), "world_size"),  # type: ignore[call-arg]
    ):
        with pytest.raises(TypeError, match=f"unexpected keyword.*did you mean '{meant}'"):
            call()


def test_a_root_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    with shardio.Writer(tmp_path / "out") as writer:
        writer.write({"__key__": "a", "text": "x"})
    shardio.ShardDataset(tmp_path / "out", storage=shardio.Storage(root=tmp_path / "out"))
    with pytest.raises(OptionError, match=r"root is .*none: there is no such directory"):
        shardio.ShardDataset(tmp_path / "out", storage=shardio.Storage(root=tmp_path / "none"))
