"""Options of other datasets and loaders are answered with what to write instead."""

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio import OptionError, ShardDataset, ShardLoader
from shardio.dataset.other_names import OTHER_NAMES

Packed = Callable[..., Path]


@pytest.mark.parametrize("name", ["drop_last", "remote", "local", "shuffle_size", "num_workers"])
def test_names_that_others_have_are_answered(packed: Packed, name: str) -> None:
    with pytest.raises(OptionError, match=f"^ShardDataset takes no {name}: give .*"):
        ShardDataset(packed([5]), **{name: 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'bread'"):
        ShardDataset(packed([5]), bread=1)  # type: ignore[call-arg]


OTHERS = json.loads((Path(__file__).parents[1] / "golden" / "names_of_others.json").read_text())


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: str(other["of"]))
def test_every_option_of_other_datasets_and_loaders_is_taken_or_answered(
    packed: Packed, other: dict[str, Any]
) -> None:
    path = packed([5])
    ours = inspect.signature(ShardDataset).parameters
    for name in {*other["names"]} - ours.keys():
        with pytest.raises(OptionError, match=f"^ShardDataset takes no {name}: [^\\n]+$"):
            ShardDataset(path, **{name: 1})
    dataset = ShardDataset(path, batch_size=2)
    loaders = inspect.signature(ShardLoader).parameters
    for name in {*other["names"]} - loaders.keys() - ours.keys():
        with pytest.raises(OptionError, match=f"^ShardLoader takes no {name}: [^\\n]+$"):
            ShardLoader(dataset, **{name: 1})


def test_no_answer_hides_an_option_and_all_say_what_to_write(packed: Packed) -> None:
    assert not OTHER_NAMES.keys() & inspect.signature(ShardDataset).parameters.keys()
    written = ("give ", "leave it out", "the order is ")
    assert [name for name, one in OTHER_NAMES.items() if not one.startswith(written)] == []
    with pytest.raises(OptionError, match=r'give the URL as the first .*ShardDataset\("s3://'):
        ShardDataset(packed([5]), remote="s3://x")  # type: ignore[call-arg]


def test_names_of_others_are_answered_by_open_mix_and_the_loader(packed: Packed) -> None:
    path = packed([5])
    for name in ("target_transform", "loader", "is_valid_file", "transforms", "remote", "shuffle"):
        with pytest.raises(OptionError, match=f"^shardio.open takes no {name}: "):
            shardio.open(path, **{name: 1})  # type: ignore[arg-type]
    dataset = ShardDataset(path, batch_size=2)
    for name in inspect.signature(ShardDataset).parameters:
        with pytest.raises(OptionError, match=f"^ShardLoader takes no {name}: "):
            ShardLoader(dataset, **{name: 1})  # type: ignore[arg-type]
    for name in ("streams", "proportion", "batch_size", "transform", "sampling_method"):
        with pytest.raises(OptionError, match=rf"^ShardDataset\.mix takes no {name}: "):
            ShardDataset.mix([dataset], **{name: 1})  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="shuffle_buffer=1000"):
        ShardDataset(path, shuffle=1000)


@pytest.mark.parametrize("name", ["buffer_bytes", "verify_open", "max_pixels"])
def test_options_of_storage_are_given_in_one(packed: Packed, name: str) -> None:
    advice = re.escape(f"give storage=shardio.Storage({name}=...)")
    with pytest.raises(OptionError, match=f"^ShardDataset takes no {name}: {advice}$"):
        ShardDataset(packed([5]), **{name: 1})  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=rf"^shardio\.open takes no {name}: {advice}$"):
        shardio.open(packed([5]), **{name: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "field"), [("canonical_workers", "spans"), ("spans", "spans"), ("unit", "unit")]
)
def test_options_of_the_order_are_given_in_one(packed: Packed, name: str, field: str) -> None:
    advice = re.escape(f"give order=shardio.Order({field}=...)")
    with pytest.raises(OptionError, match=f"^ShardDataset takes no {name}: {advice}$"):
        ShardDataset(packed([5]), **{name: 1})  # type: ignore[arg-type]
