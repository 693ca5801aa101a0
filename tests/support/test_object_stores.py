"""The tests' own stores of objects keep what they are given, and leave nothing."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from support import object_stores
from support.fault_proxy import fault_proxy
from support.faults import Rule
from support.leftovers import nothing_left

STORES = [object_stores.s3, object_stores.gcs, object_stores.azurite]
BODY = bytes(range(256)) * 40

Start = Callable[[], contextlib.AbstractContextManager[object_stores.ObjectStore]]


@pytest.mark.parametrize("start", STORES)
def test_what_is_put_is_there(start: Start, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(BODY)
    with nothing_left(), start() as store:
        store.put_folder(tmp_path, "a/ b/")
        assert store.sizes() == {"a/ b/x": len(BODY)}
        with fault_proxy(store.port, Rule("503", times=1)) as proxy:
            store.through(proxy.port).get(["a/ b/x"], tmp_path)
            assert proxy.figures().faults == {"503": 1}
        assert (tmp_path / "a" / " b" / "x").read_bytes() == BODY


def test_a_private_store_refuses_whom_it_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(BODY)
    with nothing_left(), object_stores.s3(private=True) as store:
        store.put({"x": tmp_path / "x"})
        assert store.sizes() == {"x": len(BODY)}
        for name in ("access_key_id", "secret_access_key"):
            options = store.options | {name: "another"}
            other = object_stores.ObjectStore(store.url, store.port, options)
            with contextlib.closing(other), pytest.raises(RuntimeError, match="403"):
                other.sizes()
