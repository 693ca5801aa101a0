"""Addresses: what they ask for, and what they may not."""

import pytest

from shardio import OptionError
from shardio.viewer.address import read_state


@pytest.mark.parametrize("name", ["world_size", "batch_size", "spans", "unit", "nodes"])
def test_no_address_asks_for_more_than_memory_holds(name: str) -> None:
    assert read_state({name: ["65536"]}).fields() == {name: ["65536"]}
    with pytest.raises(OptionError, match=f"{name} is 65,537: pages show up to 65,536"):
        read_state({name: ["65537"]})
