"""Fixtures that tests of packing share."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
from support import object_stores
from support.object_stores import ObjectStore
from support.packing import die, on_shard


@pytest.fixture
def dead_on_shard(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes packing fail, as by a crash, when it comes to a certain shard."""
    return partial(on_shard, monkeypatch, do=die)


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_stores.s3() as store:
        yield store


@pytest.fixture
def bucket(store: ObjectStore) -> ObjectStore:
    """The store of a module, without the objects of the test before."""
    if there := store.sizes():
        store.delete(list(there))
    return store
