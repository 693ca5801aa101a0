"""Stores whose files are packed: how they are reached, and the same files in any of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardio import Storage
from support import hub_server, object_stores
from support.fault_proxy import FaultProxy
from support.object_stores import ObjectStore


def storage(store: ObjectStore, proxy: FaultProxy | None = None, timeout_s: float = 20) -> Storage:
    through = store if proxy is None else store.through(proxy.port)
    return Storage(options=through.options, timeout_s=timeout_s)


def store_arguments(store: ObjectStore) -> list[str]:
    """These options for the command line."""
    return [x for one in store.options.items() for x in ("--store-option", "=".join(one))]


@contextmanager
def other_store(
    kind: str, there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Storage]]:
    """The URL of a store of this kind with the files of a folder, and how it is reached."""
    if kind == "hf":
        (tmp_path / "hub/ORG/NAME").mkdir(parents=True)
        (tmp_path / "hub/ORG/NAME/main").symlink_to(there)
        with hub_server.hub(tmp_path / "hub") as hub:
            monkeypatch.setenv("HF_ENDPOINT", hub.url)
            yield "hf://datasets/ORG/NAME", Storage(timeout_s=20)
        return
    with object_stores.azurite() if kind == "az" else object_stores.gcs() as store:
        store.put_folder(there)
        monkeypatch.setenv("GOOGLE_BASE_URL", f"http://127.0.0.1:{store.port}")
        yield store.url, storage(store)
