"""Datasets read by URL through a cache: the same records, and nothing downloaded twice."""

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S, warm_python
from support.fault_proxy import FaultProxy
from support.faults import Rule
from support.mounts import read_only, run_mounted
from support.url_datasets import served, write_images
from torch.utils.data import DataLoader

import shardio
from shardio import Order, ShardDataset, ShardLoader, Storage
from shardio.errors import DamageError, OptionError
from shardio.storage import cached_remote_file, ranges
from shardio.storage.cache import CacheDirectory
from shardio.storage.remote import RemoteLocation
from shardio.storage.stores import Store

pytestmark = pytest.mark.usefixtures("warm_starts")

RECORDS, BYTES = 600, 60_000


def image(number: int) -> bytes:
    return b"\xff\xd8\xff" + number.to_bytes(4, "big") * (BYTES // 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("www")
    write_images(folder / "data", RECORDS, image, 12_000_000)
    return folder


@pytest.fixture(scope="module")
def proxy_of_all(folder: Path) -> Iterator[FaultProxy]:
    with served(folder) as proxy:
        yield proxy


def dataset(path: Any, cache: Path | None = None, limit: str = "1GiB") -> ShardDataset:
    storage = None if cache is None else Storage(cache=cache, cache_bytes=limit, timeout_s=20)
    return ShardDataset(
        str(path),
        batch_size=20,
        decode=None,
        fields=("image", "label"),
        shuffle_buffer=60,
        order=Order(spans=4, unit=5),
        storage=storage,
    )


def batches(loader: Any) -> list[Any]:
    return [(images.tolist(), labels.tolist()) for images, labels in loader]


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "data").glob("*.shard"))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_is_downloaded_once(
    folder: Path, proxy: FaultProxy, tmp_path: Path, workers: int
) -> None:
    want = batches(DataLoader(dataset(folder / "data"), batch_size=None))
    there = dataset(f"{proxy.url}/data", tmp_path / "cache")
    assert batches(DataLoader(there, batch_size=None, num_workers=workers)) == want
    shards = [one for one in proxy.figures().log if one.path.endswith(".shard")]
    ranges_of = [(one.path, one.range) for one in shards if one.sent > 20_000]
    assert len(ranges_of) <= len(set(ranges_of)) + 8  # which are second requests
    assert proxy.figures().needed < 1.02 * size(folder)
    proxy.reset()
    again = dataset(f"{proxy.url}/data", tmp_path / "cache")
    with ShardLoader(again, num_workers=1) as loader:
        assert batches(loader) == want
    assert [one.path for one in proxy.figures().log] == ["/data/manifest.json"]


JOB = """
    import sys, shardio
    from torch.utils.data import DataLoader
    if __name__ == "__main__":
        url, cache, workers, start, order = sys.argv[1:]
        options = {"shuffle": False}
        if order == "shuffled":
            options = {"shuffle_buffer": 60, "order": shardio.Order(spans=4, unit=5)}
        there = shardio.ShardDataset(url, batch_size=20, decode=None, fields=("image", "label"),
            storage=shardio.Storage(cache=cache, cache_bytes="1GiB"), **options)
        labels = []
        loader = DataLoader(there, batch_size=None, num_workers=int(workers),
            multiprocessing_context=start)
        for images, found in loader:
            for image, label in zip(images, found.tolist()):
                assert bytes(image[3:7].tolist()) == label.to_bytes(4, "big")
                labels.append(label)
        assert sorted(labels) == list(range(600))
        assert order == "shuffled" or labels == sorted(labels)
"""


def job(url: str, cache: Path, workers: int, start: str, order: str, *options: str) -> list[str]:
    """Return the command of a job that reads the dataset. options: of Python."""
    script = cache.with_name("job.py")
    script.write_text(textwrap.dedent(JOB))
    return [sys.executable, *options, str(script), url, str(cache), str(workers), start, order]


def test_two_jobs_that_start_at_once_download_each_range_once(
    folder: Path, proxy: FaultProxy, tmp_path: Path
) -> None:
    proxy.limits(latency_s=0.2)  # so that both are at it at the same time
    command = job(f"{proxy.url}/data", tmp_path / "cache", 2, "fork", "shuffled")
    jobs = [subprocess.Popen(warm_python.command(*command[1:])) for _ in range(2)]
    assert [job.wait(LIMIT_S) for job in jobs] == [0, 0]
    asked = Counter((one.path, one.range) for one in proxy.figures().log if one.sent > 20_000)
    assert len(asked) == 2 * len(list((folder / "data").glob("*.shard")))  # all ranges of all
    # By four processes. Second requests need eight transfers to be late by; none has so many.
    assert asked.total() <= len(asked) + 1, asked
    assert proxy.figures().needed < 1.02 * size(folder)


def test_damage_in_the_cache_is_downloaded_again(
    folder: Path, proxy: FaultProxy, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    want = batches(DataLoader(dataset(folder / "data"), batch_size=None))
    batches(DataLoader(dataset(f"{proxy.url}/data", cache), batch_size=None))
    ranges.close()
    for path in cache.glob("shardio-*-*.cache"):
        with path.open("r+b") as file:  # as a disk would: the length stays
            for at in (50_000, 5_000_000, 11_900_000):
                file.seek(at)
                file.write(b"damage")
    for _ in range(2):
        there = dataset(f"{proxy.url}/data", cache)
        assert batches(DataLoader(there, batch_size=None, num_workers=1)) == want


def test_a_trailer_in_the_cache_that_names_another_version_is_downloaded_again(
    folder: Path, proxy: FaultProxy, tmp_path: Path
) -> None:
    storage = Storage(cache=tmp_path / "cache", cache_bytes="1GiB")
    keys = shardio.open(f"{proxy.url}/data", decode=None, storage=storage).keys()
    sizes = {path.name[:5]: path.stat().st_size for path in (folder / "data").glob("*.shard")}
    for at in (34, 36):  # from the end: the kind of checksums; the format's version
        ranges.close()
        for path in (tmp_path / "cache").glob("shardio-*-*.cache"):
            with path.open("r+b") as file:
                file.seek(sizes[path.name.split("-")[2]] - at)
                file.write(b"\7")
        assert shardio.open(f"{proxy.url}/data", decode=None, storage=storage).keys() == keys


def test_what_the_cache_cannot_keep_is_streamed_with_one_warning(
    folder: Path, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_remote_file, "_WARNED", False)
    want = batches(DataLoader(dataset(folder / "data"), batch_size=None))
    there = dataset(f"{proxy.url}/data", tmp_path / "cache", limit="17MiB")
    with pytest.warns(UserWarning, match="cannot keep more in this cache") as told:
        assert batches(DataLoader(there, batch_size=None)) == want
    assert len(told) == 1
    used = sum(path.stat().st_blocks * 512 for path in (tmp_path / "cache").iterdir())
    assert used <= (17 + 2 * 8) << 20
    # What was downloaded to be kept is used all the same; of the rest, what is needed is asked for.
    assert proxy.figures().sent < 1.5 * size(folder)
    proxy.reset()
    storage = Storage(cache=tmp_path / "cache", cache_bytes="17MiB")
    one = shardio.open(f"{proxy.url}/data", decode=None, storage=storage)
    for number in range(0, RECORDS, 10):
        assert one[number]["image"] == image(number)
    assert proxy.figures().sent < 60 * BYTES + (3 * 8 << 20)  # and not a range of 8 MiB for each


def test_a_dataset_that_is_given_as_its_own_cache_is_not_touched(
    folder: Path, proxy: FaultProxy
) -> None:
    before = {path: path.read_bytes() for path in (folder / "data").iterdir()}
    for path in (f"{proxy.url}/data", folder / "data"):
        if path == folder / "data":  # a local dataset needs no cache, and has none
            there = dataset(path, folder / "data")
            assert len(batches(DataLoader(there, batch_size=None))) == RECORDS // 20
        else:
            with pytest.raises(OptionError, match="dataset"):
                dataset(path, folder / "data")
    assert {path: path.read_bytes() for path in (folder / "data").iterdir()} == before


def test_faults_do_not_get_into_the_cache(folder: Path, proxy: FaultProxy, tmp_path: Path) -> None:
    want = batches(DataLoader(dataset(folder / "data"), batch_size=None))
    proxy.rules(
        Rule("garbage", path="shard", numbers=(2, 5)),
        Rule("shifted_silently", path="shard", numbers=(3,)),
        Rule("short", path="shard", numbers=(4,)),
    )
    for _ in range(2):
        there = dataset(f"{proxy.url}/data", tmp_path / "cache")
        assert batches(DataLoader(there, batch_size=None)) == want
    assert len(proxy.figures().faults) == 3
    proxy.rules()
    proxy.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        there = dataset(f"{proxy.url}/data", tmp_path / "cache")
        assert batches(DataLoader(there, batch_size=None)) == want
    assert proxy.figures().sent < 100_000  # the manifest


def read_only_run(url: str, cache: Path, workers: int, start: str, *options: str) -> str:
    """Read the dataset by a job that may only read the cache; return what it says on stderr."""
    return run_mounted(read_only(cache), job(url, cache, workers, start, "in order", *options))


def test_a_read_only_cache_is_read(folder: Path, proxy: FaultProxy, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    storage = Storage(cache=cache, cache_bytes="1GiB")
    there = shardio.open(f"{proxy.url}/data", decode=None, storage=storage)
    assert there[3]["image"] == image(3)  # the first range
    ranges.close()
    before = {path: path.read_bytes() for path in cache.iterdir()}
    proxy.reset()
    read_only_run(f"{proxy.url}/data", cache, 1, "fork", "-W", "error")
    assert proxy.figures().needed < size(folder) - (7 << 20)
    assert proxy.figures().sent < 1.5 * size(folder)  # nothing is downloaded only to be kept
    assert {path: path.read_bytes() for path in cache.iterdir()} == before


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_read_only_cache_of_nothing_is_warned_of_once(
    proxy: FaultProxy, tmp_path: Path, start: str
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "notes.txt").write_text("not the cache's")
    workers = 2 if start == "fork" else 1  # others take seconds to start
    said = read_only_run(f"{proxy.url}/data", cache, workers, start)
    assert said.count("UserWarning: ") == 1 and "job.py:9: UserWarning" in said
    assert f"{cache}: the cache keeps nothing: this user has no permission to write" in said


def test_a_process_that_is_stopped_while_it_downloads_holds_nobody_up(
    folder: Path, proxy: FaultProxy, tmp_path: Path
) -> None:
    """Its claims last as long as it does; another one waits once, and streams then."""
    timeout_s = 4.0
    storage = Storage(cache=tmp_path / "cache", cache_bytes="1GiB", timeout_s=timeout_s)
    there = shardio.open(f"{proxy.url}/data", decode=None, storage=storage)
    manifest = there.reader.manifest
    cache = CacheDirectory(tmp_path / "cache", "1GiB")
    claims = []
    for shard in range(manifest.shards):
        info = manifest.shard(shard)
        other = cache.open(info.sha256.hex(), info.size, manifest.dataset_id, shard)
        claims.append((info.name, other, other.claim(0)))
    begun = time.monotonic()
    for number in range(0, RECORDS, 10):
        assert there[number]["image"] == image(number)
    # With a wait for each of the 42 records that are claimed it would take more than twice as long.
    assert time.monotonic() - begun < 20 * timeout_s
    for name, other, claim in claims:  # the process goes on
        assert claim is not None
        claim.store((folder / "data" / name).read_bytes()[: claim.length])
        other.close()
    proxy.reset()
    again = shardio.open(f"{proxy.url}/data", decode=None, storage=storage)
    assert again[0]["image"] == image(0)
    assert proxy.figures().sent < 100_000  # the manifest, and the end of the shard


def manifests(proxy: FaultProxy) -> list[int]:
    """How many bytes the requests of manifests brought."""
    log = proxy.figures().log
    return [one.sent for one in log if one.path.endswith("manifest.json")]


def test_a_manifest_is_downloaded_once_by_all_that_share_a_cache(
    folder: Path, proxy: FaultProxy, tmp_path: Path
) -> None:
    size = (folder / "data" / "manifest.json").stat().st_size
    program = """
        import sys, shardio
        url, cache = sys.argv[1:]
        storage = shardio.Storage(cache=cache, cache_bytes="1GiB")
        print("ready", flush=True)
        sys.stdin.readline()
        assert len(shardio.open(url, storage=storage)) == 600
    """
    command = [sys.executable, "-c", textwrap.dedent(program), f"{proxy.url}/data"]
    proxy.limits(latency_s=0.2)  # so that all want it before the first one has it
    with contextlib.ExitStack() as stack:
        ranks = []
        for _ in range(3):
            rank = subprocess.Popen(
                [*command, str(tmp_path / "cache")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            ranks.append(stack.enter_context(rank))
            assert rank.stdout is not None
            assert rank.stdout.readline() == b"ready\n"
        for rank in ranks:
            rank.communicate(b"\n", LIMIT_S)
        assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert sorted(manifests(proxy)) == [*[128] * 3, size]


def test_a_manifest_that_is_replaced_is_read_anew(
    folder: Path, proxy: FaultProxy, tmp_path: Path
) -> None:
    storage = Storage(cache=tmp_path / "cache", cache_bytes="1GiB")
    sizes = set()
    for count in (3, 4, 3):
        shutil.rmtree(folder / "changing", ignore_errors=True)
        with shardio.Writer(folder / "changing", fields={"label": "int"}) as writer:
            for number in range(count):
                writer.write({"__key__": f"{number}", "label": number})
        path = folder / "changing" / "manifest.json"
        os.utime(path, (1, 1))  # nginx' ETag is of this and of the size
        sizes.add(path.stat().st_size)
        for _ in range(2):
            assert len(shardio.open(f"{proxy.url}/changing", storage=storage)) == count
    [size] = sizes
    assert manifests(proxy) == [128, size, 128] * 3


@pytest.mark.parametrize("what", ["bytes=-", "bytes=0-"])
@pytest.mark.parametrize("kind", ["garbage", "short", "shifted_silently", "stall"])
def test_a_manifest_that_comes_damaged_does_not_stay_in_the_cache(
    folder: Path, proxy: FaultProxy, tmp_path: Path, kind: str, what: str
) -> None:
    storage = Storage(cache=tmp_path / "cache", cache_bytes="1GiB", timeout_s=8)
    proxy.rules(Rule(kind, path="manifest", range=what, times=1))
    for _ in range(2):
        assert len(shardio.open(f"{proxy.url}/data", storage=storage)) == RECORDS
    assert proxy.figures().faults == {kind: 1}


@pytest.mark.parametrize("cached", [False, True])
def test_a_list_of_splits_that_comes_damaged_is_read_again(
    folder: Path, proxy: FaultProxy, tmp_path: Path, cached: bool
) -> None:
    for name in ("train", "val"):
        for number in range(2):
            path = folder / "photos" / name / "cat" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(image(number))
    if not (folder / "splits").exists():
        shardio.pack(folder / "photos", folder / "splits", jobs=1)
    proxy.rules(Rule("garbage", path="shardio.json", range="" if not cached else "=0-", times=1))
    given = {"cache": tmp_path / "cache", "cache_bytes": "1GiB"} if cached else {}
    for _ in range(2):
        with pytest.raises(shardio.NotPackedError, match="its splits: train, val"):
            shardio.open(f"{proxy.url}/splits", storage=Storage(**given))
    assert proxy.figures().faults == {"garbage": 1}


@pytest.mark.parametrize("kind", ["403", "wrong_range"])
def test_a_server_that_knows_no_ends_is_read_without_keeping_manifests(
    folder: Path, proxy: FaultProxy, tmp_path: Path, kind: str
) -> None:
    proxy.rules(Rule(kind, path="manifest", range="bytes=-"))
    storage = Storage(cache=tmp_path / "cache", cache_bytes="1GiB", timeout_s=20)
    assert len(shardio.open(f"{proxy.url}/data", storage=storage)) == RECORDS
    assert not list((tmp_path / "cache").glob(f"shardio-{'0' * 32}-*"))


def test_a_large_manifest_comes_by_several_requests_at_once(
    folder: Path, proxy: FaultProxy, tmp_path: Path
) -> None:
    seal = re.compile(rb"([0-9a-f]{64})\Z")
    text = bytes(range(256)) * (5 << 13)  # 10 MiB
    (folder / "sealed").write_bytes(text + hashlib.sha256(text).hexdigest().encode())
    store = Store(proxy.url)
    for _ in range(2):
        location = RemoteLocation(store, CacheDirectory(tmp_path / "cache", "1GiB"))
        assert location.read("sealed", 1 << 30, seal=seal)[:-64] == text
    log = [one.range for one in proxy.figures().log]
    assert sorted(log) == ["bytes=-128"] * 2 + ["bytes=0-8388607", "bytes=8388608-10485823"]
    with pytest.raises(DamageError, match="more than"):
        location.read("sealed", 1000, seal=seal)
