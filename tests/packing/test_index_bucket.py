"""`index` of files in an object store: that of the same files on disk, each byte loaded once."""

import hashlib
import io
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import servers
from support.fault_proxy import FaultProxy, fault_proxy
from support.faults import Rule
from support.object_stores import ObjectStore
from support.small_datasets import jpeg
from support.trees import content, images, plant, shardio, shardio_json

import shardio as library
from shardio import ShardDataset, SourceOptions, Storage
from shardio.errors import DamageError, ExistsError, OptionError, SourceError, StorageError
from shardio.packing.index import index
from shardio.storage.location import locate
from shardio.storage.remote import RemoteLocation
from shardio.storage.remote_file import RANGE

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
# Folders of the bucket, and what of the golden files is in them.
FORMATS = {
    "webdataset": ["webdataset/shard-0000.tar", "webdataset/shard-0001.tar"],
    "mds": ["mds/every/index.json", "mds/every/shard.00000.mds", "mds/every/shard.00001.mds"],
    "tfrecord": ["tfrecord/tensorflow.tfrecord"],
    "recordio": ["recordio/images.rec", "recordio/images.idx"],
    "parquet": ["parquet/train-00000-of-00001.parquet"],
    "litdata": [
        "litdata/frames/index.json",
        *(f"litdata/frames/chunk-0-{n}.bin" for n in range(3)),
    ],
    "arrow": [
        "arrow/one/state.json",
        *(f"arrow/one/data-0000{n}-of-00003.arrow" for n in range(3)),
    ],
}
MIB = 1 << 20
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.usefixtures("ranges_closed", "warm_starts"),
]


def tar(path: Path, first: int, count: int, size: int = 2000) -> None:
    draw = np.random.default_rng(first)
    with tarfile.open(path, "w") as file:
        for number in range(first, first + count):
            values = [("jpg", jpeg(number) + draw.bytes(size)), ("cls", b"%d" % (number % 3))]
            for ending, data in values:
                member = tarfile.TarInfo(f"{number:04}.{ending}")
                member.size = len(data)
                file.addfile(member, io.BytesIO(data))


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("there")
    for name, files in FORMATS.items():
        (root / name).mkdir()
        for file in files:
            shutil.copy(GOLDEN / file, root / name)
    for name in ("tars", "tars/.hidden", "large"):
        (root / name).mkdir()
    for shard in range(3):
        tar(root / "tars" / f"{shard}.tar", 20 * shard, 20)
    tar(root / "tars" / ".hidden" / "no.tar", 0, 1)
    tar(root / "large" / "a.tar", 0, 30, MIB)  # 4 ranges
    plant(root / "images", images(classes=2, each=2))
    (root / "splits").mkdir()
    for split in ("train", "val"):
        shutil.copy(root / "tars" / "0.tar", root / "splits" / f"{split}-0.tar")
    (root / "lmdb").mkdir()
    shutil.copy(GOLDEN / "lmdb_foreign" / "lsun.lmdb", root / "lmdb")
    library.pack(root / "images", root / "packed")
    shutil.copytree(GOLDEN / "arrow" / "splits", root / "dict")
    return root


@pytest.fixture
def proxy(web: servers.Web) -> Iterator[FaultProxy]:
    with fault_proxy(web.port) as proxy:
        yield proxy


def slow(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize(
    "name", ["parquet", "arrow", "litdata", "mds", *slow("webdataset", "tfrecord", "recordio")]
)
def test_the_index_is_that_of_the_same_files_on_disk(
    name: str, s3: ObjectStore, there: Path, tmp_path: Path
) -> None:
    storage = Storage(options=s3.options)
    here = index(there / name, out=tmp_path / "disk", jobs=2)
    done = index(f"{s3.url}/{name}", out=tmp_path / "idx", jobs=2, storage=storage)
    assert content(tmp_path / "idx") == content(tmp_path / "disk")
    assert (done.records, done.bytes, done.root) == (here.records, here.bytes, f"{s3.url}/{name}")
    assert f"open it by {tmp_path}/idx with storage=shardio.Storage(root='s3://" in str(done)
    local = library.open(tmp_path / "disk", storage=Storage(root=there / name), decode=None)
    far = Storage(root=f"{s3.url}/{name}", options=s3.options)
    remote = library.open(tmp_path / "idx", storage=far, decode=None)
    assert len(local) == len(remote) >= 3
    assert repr([*local][:60]) == repr([*remote][:60])


def epoch(path: Path, storage: Storage) -> list[Any]:
    data = ShardDataset(path, batch_size=8, decode=None, fields=("image", "label"), storage=storage)
    return [([*map(bytes, found)], labels.tolist()) for found, labels in data]


@pytest.mark.parametrize("cached", [False, True])
def test_a_dataset_indexed_in_a_store_is_read_verified_exported_and_packed(
    cached: bool, s3: ObjectStore, there: Path, tmp_path: Path
) -> None:
    idx, url = tmp_path / "idx", f"{s3.url}/tars"
    index(url, out=idx, jobs=1, storage=Storage(options=s3.options))
    cache = {"cache": tmp_path / "cache", "cache_bytes": "1GiB"} if cached else {}
    storage = Storage(root=url, options=s3.options, **cache)
    local = Storage(root=there / "tars")
    for _ in range(2):
        assert epoch(idx, storage) == epoch(idx, local)
        found = library.open(idx, storage=storage, decode=None)
        assert [found[n]["__key__"] for n in (0, 59, 31)] == ["0000", "0059", "0031"]
    given = [
        text for name, value in s3.options.items() for text in ("--store-option", f"{name}={value}")
    ]
    verified = shardio_json("verify", idx, "--root", url, "--sha256", *given)
    assert verified["records"] == 60
    shardio("export", idx, tmp_path / "out", "--format", "webdataset", "--root", url, *given)
    assert sum(path.suffix == ".tar" for path in (tmp_path / "out").iterdir()) >= 1
    read = SourceOptions(root=url, storage=Storage(options=s3.options))
    library.pack(idx, tmp_path / "packed", read=read, jobs=1)
    library.pack(idx, tmp_path / "disk", read=SourceOptions(root=there / "tars"), jobs=1)
    assert content(tmp_path / "packed") == content(tmp_path / "disk")


def test_files_of_another_format_are_packed_by_their_url(
    s3: ObjectStore, there: Path, tmp_path: Path
) -> None:
    library.pack(there / "tars", tmp_path / "disk")
    read = SourceOptions(storage=Storage(options=s3.options))
    library.pack(f"{s3.url}/tars", tmp_path / "out", read=read)
    assert content(tmp_path / "out") == content(tmp_path / "disk")


def test_a_saved_dataset_dict_is_packed_by_its_url_with_its_splits(
    s3: ObjectStore, there: Path, tmp_path: Path
) -> None:
    library.pack(there / "dict", tmp_path / "disk")
    read = SourceOptions(storage=Storage(options=s3.options))
    library.pack(f"{s3.url}/dict", tmp_path / "out", read=read)
    assert content(tmp_path / "out") == content(tmp_path / "disk")
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"train", "fold a"}


def test_a_file_of_another_format_is_packed_by_its_url(
    s3: ObjectStore, web: servers.Web, there: Path, tmp_path: Path
) -> None:
    library.pack(there / "tars" / "1.tar", tmp_path / "disk")
    for url in (s3.url, web.url):
        read = SourceOptions(storage=Storage(options=s3.options if url == s3.url else None))
        out = tmp_path / url.partition(":")[0]
        library.pack(f"{url}/tars/1.tar", out, read=read)
        assert content(out) == content(tmp_path / "disk")


def test_each_byte_is_downloaded_once_many_ranges_at_a_time(
    proxy: FaultProxy, there: Path, tmp_path: Path
) -> None:
    size = (there / "large" / "a.tar").stat().st_size
    assert size > 3 * RANGE
    proxy.limits(gather=4, of=r"GET .*a\.tar")
    index(f"{proxy.url}/large/a.tar", out=tmp_path / "idx", jobs=1)
    figures = proxy.figures()
    assert figures.needed == size
    gets = {one.range for one in figures.log if one.method == "GET"}
    assert len(gets) == 4  # of 8 MiB
    assert figures.most_concurrent == 4
    index(there / "large", out=tmp_path / "disk")
    assert content(tmp_path / "idx") == content(tmp_path / "disk")


@pytest.mark.parametrize("kind", ["short", *slow("503", "stall")])
def test_faults_on_the_way_change_nothing(
    kind: str, proxy: FaultProxy, there: Path, tmp_path: Path
) -> None:
    proxy.rules(Rule(kind, method="GET", numbers=[1, 2]))
    storage = Storage(timeout_s=8)
    index(f"{proxy.url}/large/a.tar", out=tmp_path / "idx", jobs=1, storage=storage)
    assert proxy.figures().faults == {kind: 2}
    index(there / "large", out=tmp_path / "disk")
    assert content(tmp_path / "idx") == content(tmp_path / "disk")


def test_an_object_that_is_replaced_meanwhile_is_an_error_and_leaves_nothing(
    proxy: FaultProxy, tmp_path: Path
) -> None:
    proxy.rules(Rule("changed", method="GET", range=f"bytes={2 * RANGE}-"))
    with pytest.raises(DamageError, match=r"a\.tar: was replaced by another"):
        index(f"{proxy.url}/large/a.tar", out=tmp_path / "idx", jobs=1)
    assert content(tmp_path / "idx") == {}


def test_a_store_that_fails_for_good_is_an_error_and_leaves_nothing(
    proxy: FaultProxy, tmp_path: Path
) -> None:
    proxy.rules(Rule("500", method="GET"))
    with pytest.raises(StorageError, match=r"a\.tar: cannot read.*(answered 500|in time)"):
        index(f"{proxy.url}/large/a.tar", out=tmp_path / "idx", storage=Storage(timeout_s=4))
    assert content(tmp_path / "idx") == {}


def test_a_swept_object_gives_the_bytes_and_the_hash_in_any_order(
    proxy: FaultProxy, there: Path
) -> None:
    data = (there / "large" / "a.tar").read_bytes()
    location = locate(f"{proxy.url}/large")
    assert isinstance(location, RemoteLocation)
    file = location.sweep("a.tar")
    draw = np.random.default_rng(0)
    for start in [len(data) - 100, 0, *draw.integers(0, len(data), 40).tolist()]:
        length = int(draw.integers(0, min(len(data) - start, 9 * MIB)))
        assert file.read(start, length) == data[start : start + length]
    with pytest.raises(DamageError, match="cut short"):
        file.read(len(data) - 1, 2)
    assert file.sha256() == hashlib.sha256(data).digest()
    file.close()
    assert proxy.figures().needed == len(data)


def test_what_is_not_indexed_in_a_store_is_refused_with_the_way(
    s3: ObjectStore, web: servers.Web, tmp_path: Path
) -> None:
    out, storage = tmp_path / "idx", Storage(options=s3.options)
    for name, kind, why in (
        (
            "images",
            OptionError,
            rf"each image would be a request(.|\n)*shardio pack {s3.url}/images",
        ),
        ("splits", SourceError, rf"several splits(.|\n)*index {s3.url}/splits --files 'train-\*'"),
        ("packed", ExistsError, "is packed already"),
        ("lmdb", OptionError, "LMDB is not indexed in an object store"),
        ("nothing", SourceError, "holds no files"),
    ):
        with pytest.raises(kind, match=why):
            index(f"{s3.url}/{name}", out=out, storage=storage)
    with pytest.raises(OptionError, match=r"not written into an object store; --out DIR"):
        index(f"{s3.url}/tars", storage=storage)
    with pytest.raises(OptionError, match="cannot be listed"):
        index(f"{web.url}/tars", out=out)
    with pytest.raises(SourceError, match=r"no\.tar: there is nothing"):
        index(f"{web.url}/no.tar", out=out)
    assert not out.exists()


def test_one_object_and_a_pattern_and_the_command_line(
    s3: ObjectStore, there: Path, tmp_path: Path
) -> None:
    storage = Storage(options=s3.options)
    done = index(f"{s3.url}/tars/1.tar", out=tmp_path / "one", storage=storage)
    assert (done.root, done.shards, done.records) == (f"{s3.url}/tars", 1, 20)
    given = [
        text for name, value in s3.options.items() for text in ("--store-option", f"{name}={value}")
    ]
    out = tmp_path / "two"
    found = shardio_json("index", f"{s3.url}/tars", "--out", out, "--files", "[12].tar", *given)
    assert (found["shards"], found["records"]) == (2, 40)
    index(there / "tars", files="[12].tar", out=tmp_path / "disk")
    assert content(out) == content(tmp_path / "disk")
