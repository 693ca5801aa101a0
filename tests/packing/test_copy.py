"""`shardio copy`: the same bytes elsewhere, whole or not at all, and nothing copied twice."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import object_stores, servers, trees, warm_python
from support.fault_proxy import FaultProxy, fault_proxy
from support.faults import Rule
from support.object_stores import ObjectStore
from support.trees import environment
from support.uploading import fetched, files, named, options, puts

import shardio
from shardio import Storage
from shardio.errors import (
    BusyError,
    DamageError,
    ExistsError,
    NotPackedError,
    OptionError,
    StorageError,
)
from shardio.storage import lock

pytestmark = pytest.mark.usefixtures("ranges_closed", "warm_starts")
RECORDS = 40


def write(folder: Path, format: str = "record", seed: int = 0, most: int = 40_000) -> Path:
    fields = {"image": "image", "label": "int"}
    draw = np.random.default_rng(seed)
    with shardio.Writer(folder, fields=fields, shard_size=5 * most, format=format) as writer:
        for number in range(RECORDS):
            data = b"\xff\xd8\xff" + draw.bytes(int(draw.integers(100, most)))
            writer.write({"__key__": f"{number:03}.jpg", "image": data, "label": number})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("www")
    write(folder / "record")
    write(folder / "lmdb", "lmdb")
    write(folder / "other", seed=1)
    shardio.export(folder / "record", folder / "tars", format="webdataset", shard_size=100_000)
    shardio.index(folder / "tars")
    for name in ("train", "val"):
        write_images(folder / "images" / name / "a")
    shardio.pack(folder / "images", folder / "splits")
    return folder


def write_images(folder: Path) -> None:
    folder.mkdir(parents=True)
    for number in range(5):
        (folder / f"{number}.jpg").write_bytes(b"\xff\xd8\xff" + bytes(1000 + number))


@pytest.fixture(scope="module")
def web(folder: Path) -> Iterator[servers.Web]:
    with servers.nginx(folder) as web:
        yield web


@pytest.fixture(scope="module")
def proxy_of_all(store: ObjectStore) -> Iterator[FaultProxy]:
    with fault_proxy(store.port) as proxy:
        yield proxy


# --- the same bytes -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["record", "lmdb", "tars", "splits"])
def test_every_file_is_the_same_on_each_road(
    folder: Path, web: servers.Web, bucket: ObjectStore, tmp_path: Path, name: str
) -> None:
    own = named(files(folder / name))
    to_bucket = dict(target=f"{bucket.url}/{name}", to=options(bucket))
    roads: list[dict[str, Any]] = [
        dict(source=folder / name, target=tmp_path / "disk"),
        dict(source=f"{web.url}/{name}", target=f"file://{tmp_path}/from-http"),
        dict(source=f"{web.url}/{name}", **to_bucket),
        dict(
            source=f"{bucket.url}/{name}",
            target=f"{bucket.url}/{name}-again",
            storage=options(bucket),
        ),
        dict(
            source=f"{bucket.url}/{name}-again",
            target=tmp_path / "from-s3",
            storage=options(bucket),
        ),
    ]
    for road in roads:
        done = shardio.copy(**road)
        assert (done.copied, done.kept) == (done.files, 0)
    for copied in ("disk", "from-http", "from-s3"):
        assert files(tmp_path / copied) == own
    assert fetched(bucket, name, tmp_path / "fetched") == own
    for road in roads:  # and a second time: nothing is left to do
        done = shardio.copy(**road)
        assert (done.copied, done.kept) == (0, done.files)


@pytest.mark.parametrize("kind", [object_stores.gcs, object_stores.azurite])
def test_other_stores_take_and_keep_what_is_copied(kind: Any, tmp_path: Path) -> None:
    source = write(tmp_path / "source", most=3 << 20)  # shards in parts
    with kind() as store:
        to = Storage(options=store.options | {"client_options": {"allow_http": True}})
        assert shardio.copy(source, f"{store.url}/out", to=to).kept == 0
        assert shardio.copy(source, f"{store.url}/out", to=to).copied == 0
        shardio.copy(f"{store.url}/out", tmp_path / "back", storage=to)
    assert files(tmp_path / "back") == files(source)


def test_a_large_object_goes_up_in_parts(
    bucket: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    write(tmp_path / "large", most=4 << 20)  # shards of 20 MB
    there = bucket.through(proxy.port)
    shardio.copy(tmp_path / "large", f"{there.url}/large", to=options(there))
    parts = [one for one in proxy.figures().log if "partNumber" in one.path]
    assert len(parts) > 3
    assert fetched(bucket, "large", tmp_path / "out") == files(tmp_path / "large")


def test_an_index_and_its_data_come_together(folder: Path, tmp_path: Path) -> None:
    shardio.index(folder / "tars", out=tmp_path / "index")
    shardio.copy(tmp_path / "index", tmp_path / "out", storage=Storage(root=folder / "tars"))
    assert len(shardio.open(tmp_path / "out", decode=None)) == RECORDS
    assert not shardio.verify(tmp_path / "out", jobs=1).damages


def test_an_index_that_is_gone_is_damage(folder: Path, tmp_path: Path) -> None:
    shardio.index(folder / "tars", out=tmp_path / "index")
    gone = sorted((tmp_path / "index").glob("*.index"))[1]
    gone.unlink()
    with pytest.raises(DamageError, match=rf"{gone}: the index of .* is not there"):
        shardio.copy(tmp_path / "index", tmp_path / "out", storage=Storage(root=folder / "tars"))
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_data_that_lies_elsewhere_is_asked_for_before_anything_is_copied(
    folder: Path, bucket: ObjectStore, tmp_path: Path
) -> None:
    shardio.index(folder / "tars", out=tmp_path / "index")
    told = r"index/00000\.tar: .* it is not there\. .*`shardio index --out`.*: --root DIR or URL"
    with pytest.raises(DamageError, match=told):
        shardio.copy(tmp_path / "index", tmp_path / "out")
    with pytest.raises(DamageError, match=told):
        shardio.copy(tmp_path / "index", f"{bucket.url}/out", to=options(bucket))
    assert not (tmp_path / "out").exists() and not bucket.sizes()


# --- what is refused ------------------------------------------------------------------------------


def test_another_dataset_is_not_replaced_unasked(
    folder: Path, bucket: ObjectStore, tmp_path: Path
) -> None:
    for target in (tmp_path / "out", f"{bucket.url}/out"):
        to = options(bucket)
        shardio.copy(folder / "record", target, to=to)
        with pytest.raises(ExistsError, match=r"another dataset is here.*--overwrite"):
            shardio.copy(folder / "other", target, to=to)
        assert (
            shardio.open(target, decode=None, storage=to)[0]
            == shardio.open(folder / "record", decode=None)[0]
        )
        done = shardio.copy(folder / "other", target, to=to, overwrite=True)
        assert done.replaced
        assert (
            shardio.open(target, decode=None, storage=to)[0]
            == shardio.open(folder / "other", decode=None)[0]
        )
        with pytest.raises(ExistsError, match="one dataset is packed here"):
            shardio.copy(folder / "splits", target, to=to, overwrite=True)
        with pytest.raises(ExistsError, match="people read"):
            shardio.copy(folder / "tars", target, to=to, overwrite=True)


def test_files_of_others_are_not_replaced(
    folder: Path, bucket: ObjectStore, tmp_path: Path
) -> None:
    tar = min(path.name for path in (folder / "tars").glob("*.tar"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / tar).write_bytes(b"somebody's own")
    bucket.put({f"out/{tar}": tmp_path / "out" / tar})
    for target in (tmp_path / "out", f"{bucket.url}/out"):
        with pytest.raises(ExistsError, match=f"{tar}: another file of this name"):
            shardio.copy(folder / "tars", target, to=options(bucket))
    assert files(tmp_path / "out")[tar] == b"somebody's own"
    assert fetched(bucket, "out", tmp_path / "fetched")[tar] == b"somebody's own"


def test_a_dataset_is_not_put_among_images(folder: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "photos" / "train" / "cat")
    before = files(tmp_path / "photos")
    told = r"photos: images are here, such as train/cat/\d\.jpg, .*choose an empty directory"
    for into in (tmp_path / "photos", tmp_path / "photos" / "train" / "cat"):
        with pytest.raises(ExistsError, match="images are here, such as "):
            shardio.copy(folder / "record", into)
    with pytest.raises(ExistsError, match=told):
        shardio.index(folder / "tars", out=tmp_path / "photos")
    with pytest.raises(ExistsError, match=told):
        shardio.pack(folder / "record", tmp_path / "photos")
    assert files(tmp_path / "photos") == before
    (tmp_path / "photos" / "train").rename(tmp_path / "photos" / ".train")  # as .cache, .git
    (tmp_path / "photos" / "README.md").write_text("mine")
    (tmp_path / "photos" / "logs").mkdir()
    for number in range(4):  # pictures of what was measured
        (tmp_path / "photos" / "logs" / f"{number}.png").write_bytes(b"")
    shardio.copy(folder / "record", tmp_path / "photos")
    write_images(tmp_path / "photos" / "logs" / "samples")
    assert shardio.copy(folder / "record", tmp_path / "photos").copied == 0


def test_folders_of_any_depth_are_looked_into_for_images(folder: Path, tmp_path: Path) -> None:
    deepest = tmp_path / "out"
    deepest.mkdir()
    for _ in range(1100):
        deepest /= "d"
        deepest.mkdir()
    try:
        shardio.copy(folder / "record", tmp_path / "out")
        assert shardio.open(tmp_path / "out")
    finally:
        os.removedirs(deepest)  # `shutil.rmtree` calls itself for each


def test_what_cannot_be_written_is_refused_before_anything_is_read(
    folder: Path, web: servers.Web, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match="http:// is read only"):
        shardio.copy(folder / "record", f"{web.url}/new")
    with pytest.raises(OptionError, match="is there itself"):
        shardio.copy(folder / "record", folder / "record")
    with pytest.raises(NotPackedError, match="not packed"):
        shardio.copy(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "busy").mkdir()
    lock.begin(str(tmp_path / "busy"), lambda: [b"shardio-writer 0\n{}"])
    with lock.hold_all(str(tmp_path / "busy")), pytest.raises(BusyError):
        shardio.copy(folder / "record", tmp_path / "busy")


# --- damage and faults ----------------------------------------------------------------------------


def test_a_damaged_shard_is_never_written(
    folder: Path, bucket: ObjectStore, tmp_path: Path
) -> None:
    source = write(tmp_path / "source")
    shard = sorted(source.glob("*.shard"))[1]
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    for at in (source, f"{bucket.url}/damaged"):
        for target in (tmp_path / "out", f"{bucket.url}/out"):
            with pytest.raises(
                DamageError, match=f"{shard.name}: its SHA-256 is .*`shardio compact`"
            ):
                shardio.copy(at, target, storage=options(bucket), jobs=2)
        there = {*files(tmp_path / "out"), *fetched(bucket, "out", tmp_path / "fetched")}
        assert not {shard.name, "manifest.json"} & there
        bucket.put_folder(source, "damaged/")


def test_what_comes_damaged_is_read_again(
    folder: Path, bucket: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    there = bucket.through(proxy.port)
    bucket.put_folder(folder / "record", "source/")
    for target in (tmp_path / "out", f"{there.url}/out"):
        damage = Rule("garbage", method="GET", path="source/.*[.]shard", times=2)
        proxy.rules(damage)
        proxy.reset()
        shardio.copy(f"{there.url}/source", target, storage=options(there), jobs=2)
        assert proxy.figures().faults == {"garbage": 2}
    assert files(tmp_path / "out") == files(folder / "record")
    assert fetched(bucket, "out", tmp_path / "fetched") == files(folder / "record")


def test_a_damaged_copy_is_mended(folder: Path, bucket: ObjectStore, tmp_path: Path) -> None:
    shard = sorted((folder / "record").glob("*.shard"))[1]
    for target in (tmp_path / "out", f"{bucket.url}/out"):
        shardio.copy(folder / "record", target, to=options(bucket))
    damaged = tmp_path / "damaged"
    damaged.write_bytes(bytes(shard.stat().st_size))
    (tmp_path / "out" / shard.name).write_bytes(damaged.read_bytes())
    bucket.put({f"out/{shard.name}": damaged})  # by another tool: it notes no hash
    for target in (tmp_path / "out", f"{bucket.url}/out"):
        done = shardio.copy(folder / "record", target, to=options(bucket))
        assert done.copied == 1
    assert files(tmp_path / "out") == files(folder / "record")
    assert fetched(bucket, "out", tmp_path / "fetched") == files(folder / "record")


def test_what_an_earlier_copy_wrote_is_trusted_or_read_again(
    folder: Path, bucket: ObjectStore, proxy: FaultProxy
) -> None:
    there = bucket.through(proxy.port)
    target, to = f"{there.url}/out", options(there)
    shardio.copy(folder / "record", target, to=to)
    sent = {}
    for recheck in (False, True):
        proxy.reset()
        shardio.copy(folder / "record", target, to=to, recheck=recheck)
        assert puts(proxy) == 0
        sent[recheck] = proxy.figures().sent
    size = sum(path.stat().st_size for path in (folder / "record").glob("*.shard"))
    assert sent[False] < size < sent[True]


def test_faults_that_pass_cost_retries_alone(
    folder: Path, bucket: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    there = bucket.through(proxy.port)
    proxy.rules(
        Rule("500", method="PUT", times=3),
        Rule("reset_midway", method="PUT", numbers=(5,)),
        Rule("lost", method="PUT", numbers=(7,)),
        Rule("500", method="HEAD", times=2),
    )
    shardio.copy(folder / "record", f"{there.url}/out", to=options(there))
    assert len(proxy.figures().faults) >= 3
    assert fetched(bucket, "out", tmp_path) == files(folder / "record")


def test_faults_that_stay_leave_no_manifest(
    folder: Path, bucket: ObjectStore, proxy: FaultProxy
) -> None:
    there = bucket.through(proxy.port)
    name = max(path.name for path in (folder / "record").glob("*.shard"))
    proxy.rules(Rule("403", method="PUT", path=name))
    with pytest.raises(StorageError, match=rf"{name}: cannot write: .*403"):
        shardio.copy(folder / "record", f"{there.url}/out", to=options(there))
    assert not [one for one in bucket.sizes() if "manifest" in one]
    proxy.rules()
    done = shardio.copy(folder / "record", f"{there.url}/out", to=options(there))
    assert done.kept > 0


# --- killed ---------------------------------------------------------------------------------------


def start(*arguments: object) -> warm_python.Process:
    return warm_python.Process(
        trees.warm_command("copy", *map(str, arguments)),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def test_a_copy_to_a_store_that_is_killed_goes_on_where_it_was(
    folder: Path, bucket: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    there = bucket.through(proxy.port)
    given = [part for k, v in there.options.items() for part in ("--store-option", f"{k}={v}")]
    command = (folder / "record", f"{there.url}/out", *given, "--jobs", "1")
    proxy.rules(Rule("stall", method="PUT", numbers=[3]))  # which shard it is, is not known before
    process = start(*command)
    proxy.wait(faults=1)
    process.kill()
    process.communicate()
    proxy.settle()
    complete = {name.rpartition("/")[2] for name in bucket.sizes()}
    (stalled,) = (one.path.rpartition("/")[2] for one in proxy.figures().log if one.fault)
    assert len(complete) == 3 and not {stalled, "manifest.json"} & complete
    proxy.rules()
    proxy.reset()
    trees.shardio("copy", *map(str, command))
    assert fetched(bucket, "out", tmp_path) == files(folder / "record")
    assert all(puts(proxy, name) == 0 for name in complete)
    assert puts(proxy) == len(files(folder / "record")) - len(complete)


def test_a_copy_that_is_interrupted_says_so(
    folder: Path, bucket: ObjectStore, proxy: FaultProxy
) -> None:
    there = bucket.through(proxy.port)
    given = [part for k, v in there.options.items() for part in ("--store-option", f"{k}={v}")]
    proxy.rules(Rule("stall", method="PUT"))
    process = start(folder / "record", f"{there.url}/out", *given)
    proxy.wait(faults=1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130  # although its uploads are still under way
    assert said.endswith(
        b"interrupted: what is finished is kept; run the same command again to go on\n"
    )


def test_a_copy_to_a_directory_that_is_killed_goes_on_where_it_was(
    folder: Path, web: servers.Web, tmp_path: Path
) -> None:
    last = max(path.name for path in (folder / "tars").glob("*.tar"))
    out, shards = tmp_path / "out", len(list((folder / "tars").glob("*.tar")))
    with fault_proxy(web.port, Rule("stall", path=last)) as proxy:
        process = start(f"{proxy.url}/tars", out)
        proxy.wait(faults=1)
        while (
            len(list(out.glob("*.tar"))) < shards - 1  # all others
            or not any(last in name for name in os.listdir(out))  # as a draft
        ):
            assert process.poll() is None
            time.sleep(0.01)  # nothing tells when it begins to write
        process.kill()
        process.communicate()
        complete = {path: (out / path).stat().st_ino for path in files(out) if path[0] != "."}
        assert complete and last not in complete and "manifest.json" not in complete
        with pytest.raises(NotPackedError, match=r"`shardio copy`, did not finish here"):
            shardio.open(out)
        proxy.rules()
        done = shardio.copy(f"{proxy.url}/tars", out)
    assert done.kept == len(complete)
    assert {path: (out / path).stat().st_ino for path in complete} == complete
    assert files(out) == named(files(folder / "tars"))


# --- by the command -------------------------------------------------------------------------------


def test_the_command_says_what_it_did(folder: Path, tmp_path: Path) -> None:
    said = trees.shardio("copy", folder / "record", tmp_path / "out").stdout
    count = len(files(folder / "record"))
    assert f"{count} files" in said and f"{count} copied, 0 kept" in said
    assert trees.shardio_json("copy", folder / "record", tmp_path / "out")["kept"] == count
    assert files(tmp_path / "out") == files(folder / "record")
    trees.shardio("copy", folder / "other", tmp_path / "out", code=1)
    trees.shardio("copy", folder / "other", tmp_path / "out", "--overwrite")
