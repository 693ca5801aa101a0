"""Open shards: few at a time, of threads, forks and pickles; a shard of no manifest."""

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S
from support.fetching import Watched, reader
from support.small_datasets import payload, shard_files

from shardio.dataset.reader import Reader
from shardio.errors import DamageError
from shardio.formats import manifest
from shardio.storage.location import locate

Packed = Callable[..., Path]


def test_iterators_of_one_reader_keep_the_advice_of_their_own_reads(packed: Packed) -> None:
    of = reader(packed([5, 5]))
    storage = of.storage
    assert isinstance(storage, Watched)
    of.shard(0)
    assert not storage.scattered
    scattered = of.shard(0, scattered=True)
    assert len(storage.scattered) == 1
    assert of.shard(0) is of.shard(0) is not scattered
    assert of.shard(0, scattered=True) is scattered
    assert of.shard(0).read(3) == scattered.read(3)


def test_a_missing_shard_is_named(packed: Packed) -> None:
    folder = packed([5, 5])
    gone = shard_files(folder)[1]
    gone.unlink()
    of = reader(folder)
    of.shard(0)
    with pytest.raises(DamageError, match=rf"{gone.name}: the manifest names .* 5 records"):
        of.shard(1)


def test_a_foreign_shard_is_refused(packed: Packed) -> None:
    folder = packed([5, 5])
    one, other = shard_files(folder)
    one.write_bytes(other.read_bytes())
    with pytest.raises(DamageError, match="shard number"):
        reader(folder).shard(0)


def open_shards(folder: Path) -> list[int]:
    """The numbers of the shards that this process has open, as often as it has."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            path = Path(os.readlink(f"/proc/self/fd/{fd}"))
            if path.parent == folder:
                found.append(int(path.name.partition("-")[0]))
    return sorted(found)


def test_few_shards_are_open_at_once(packed: Packed) -> None:
    folder = packed([2] * 20)
    of = reader(folder, limit=3)
    for shard in [*range(20), 3, 17, 3]:
        assert of.shard(shard).records == 2
    assert open_shards(folder) == [3, 17, 19]
    for shard in (5, 6):
        of.shard(shard)
    assert open_shards(folder) == [3, 5, 6]  # what was used longest ago is closed


def test_a_shard_in_use_survives_its_eviction(packed: Packed) -> None:
    of = reader(packed([2] * 4), limit=1)
    first = of.shard(0)
    for shard in (1, 2, 3):
        of.shard(shard)
    assert first.read(1)["image"] == payload(1)


def test_a_pickled_reader_holds_no_open_shards(packed: Packed) -> None:
    folder = packed([5, 5])
    of = Reader(locate(folder), manifest.load(locate(folder)), limit=7)
    of.shard(0)
    twin = pickle.loads(pickle.dumps(of))
    assert open_shards(folder) == [0] and twin.limit == 7
    assert twin.shard(1).read(0)["image"] == payload(5)


FEW_DESCRIPTORS = """
import os, resource, sys
from shardio.dataset import reader as readers
from shardio.formats import manifest
from shardio.storage.location import locate
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
storage = locate(sys.argv[1])
found = manifest.load(storage)
assert found.shards == 80
default = readers.Reader(storage, found)
assert default.limit == 16
greedy = [readers.Reader(storage, found, limit=80) for _ in range(2)]
for reader in (default, *greedy):
    for _ in range(2):
        for shard in range(80):
            assert reader.shard(shard).records == 1
assert len(default._opened) + sum(len(reader._opened) for reader in greedy) < 64
kept = []
try:
    while True:
        kept.append(os.dup(0))
except OSError:
    pass
readers.Reader(storage, found).shard(5)  # the other readers give theirs back
"""


def test_few_descriptors_are_enough_for_many_shards(packed: Packed) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FEW_DESCRIPTORS, packed([1] * 80)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_opens_its_own_descriptors(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = packed([5, 5])
    of = reader(folder)
    of.shard(0)
    opening, go_on, parent = threading.Event(), threading.Event(), os.getpid()
    opened_by_child = []
    real = of.storage.open

    def slow(name: str, known: Any = None) -> Any:
        opening.set()
        if os.getpid() == parent:
            go_on.wait(LIMIT_S)
        else:
            opened_by_child.append(name)
        return real(name)

    monkeypatch.setattr(of.storage, "open", slow)
    thread = threading.Thread(target=of.shard, args=(1,))
    thread.start()
    assert opening.wait(LIMIT_S)  # this thread is opening a shard at the fork
    code = 1
    child = os.fork()
    if child == 0:
        try:
            assert of.shard(0).read(1)["image"] == payload(1)
            assert opened_by_child == [shard_files(folder)[0].name]
            code = 0
        finally:
            os._exit(code)
    go_on.set()
    assert os.waitpid(child, 0)[1] == 0
    thread.join()
    assert open_shards(folder) == [0, 1]


def test_threads_share_a_reader(packed: Packed) -> None:
    of = reader(packed([3] * 40), limit=2)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(300):
                number = (i * 7 + seed * 13) % 120
                shard, record = of.locate(number)
                assert of.shard(shard).read(record)["image"] == payload(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
