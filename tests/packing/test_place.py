"""A dataset in an object store is changed there as one in a directory: by commits on condition."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S, object_stores, warm_python
from support.fault_proxy import FaultProxy, fault_proxy
from support.faults import Rule
from support.object_stores import ObjectStore
from support.trees import images, noise, picture, plant
from support.trees import shardio as command
from support.uploading import fetched, files, kill_held, options, puts, started

import shardio
from shardio import OptionError, PlanOptions, ShardDataset, Storage
from shardio.cli.exit_codes import BUSY
from shardio.errors import BusyError, ExistsError, NotPackedError, StateError, StorageError
from shardio.packing.annotate import annotate
from shardio.packing.commit import commit as commit_parts
from shardio.packing.drop import drop
from shardio.packing.gc import gc
from shardio.packing.place import find_place
from shardio.packing.versions import changing, commit, diff, log, restore, tag
from shardio.storage import ranges

pytestmark = pytest.mark.usefixtures("warm_starts")

SHARDS, EACH = 6, 4
KEYS = sorted(str(key) for key in images())
# Before `append` looks at what it commits to: it tries the store's conditions a second time.
AT_COMMIT = Rule("503", path="probe", method="PUT", numbers=[*range(1, 10_000)])
NEWEST = r"/manifest\.json"  # the manifest that names the newest version


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 6 shards with 4 records each."""
    source = plant(tmp_path_factory.mktemp("place") / "src", images())
    shardio.pack(source, source.parent / "out", plan=PlanOptions(max_records=EACH), jobs=1)
    return source.parent / "out"


@pytest.fixture(autouse=True)
def one_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has equal commits make equal files, and working directories where the test sees them."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1800000000")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    yield
    ranges.close()


@pytest.fixture(scope="module")
def proxy_of_all(store: ObjectStore) -> Iterator[FaultProxy]:
    with fault_proxy(store.port) as proxy:
        yield proxy


@pytest.fixture
def proxy(proxy_of_all: FaultProxy) -> FaultProxy:
    proxy_of_all.rules()
    proxy_of_all.reset()
    return proxy_of_all


@pytest.fixture
def there(bucket: ObjectStore, packed: Path) -> ObjectStore:
    """A store with the dataset in `out`."""
    bucket.put_folder(packed, "out/")
    return bucket


def slow(*given: Any) -> Any:
    return pytest.param(*given, marks=pytest.mark.slow)


def environment_of(store: ObjectStore) -> dict[str, str]:
    """What a process needs to reach a store."""
    names = {"endpoint": "AWS_ENDPOINT_URL", "region": "AWS_REGION"}
    names |= {name: f"AWS_{name}".upper() for name in ("access_key_id", "secret_access_key")}
    return {names[name]: value for name, value in store.options.items()}


@pytest.fixture
def through(there: ObjectStore, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """The same store, and programs that are started, as they see it through the proxy."""
    seen = there.through(proxy.port)
    for name, value in environment_of(seen).items():
        monkeypatch.setenv(name, value)
    return seen


def keys_of(url: str, storage: Storage, version: str | None = None) -> list[str]:
    return shardio.open(url, version=version, decode=None, storage=storage).keys()


def changes(out: str, more: dict[str, Any]) -> list[Any]:
    """Change a dataset in each way; the ids of its versions, oldest first."""
    tag(out, "packed", **more)
    drop(out, keys=KEYS[:2], **more)
    annotate(out, {KEYS[3]: {"score": 0.5}}, missing="none", **more)
    annotate(out, {KEYS[4]: {"label": 2, "score": 1.5}}, **more)
    tag(out, "scored", **more)
    drop(out, where=["score>1"], **more)
    restore(out, "scored", **more)
    tag(out, "packed", remove=True, **more)
    return [one.id for one in log(out, **more).versions][::-1]


# --- the same as in a directory -------------------------------------------------------------------


def test_a_dataset_in_a_store_becomes_what_one_in_a_directory_does(
    there: ObjectStore, packed: Path, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    shardio.copy(packed, local)
    url, more = f"{there.url}/out", {"storage": options(there)}
    assert changes(url, more) == changes(str(local), {})
    assert fetched(there, "out", tmp_path / "fetched") == files(local)
    assert keys_of(url, options(there)) == keys_of(str(local), Storage())
    assert diff(url, "scored", **more).changed == []
    assert not shardio.verify(url, storage=options(there)).damages
    assert not list((tmp_path / "caches").rglob("*.shard"))  # nothing is left here


def test_records_are_erased_in_a_store(there: ObjectStore, packed: Path, tmp_path: Path) -> None:
    local, url, more = tmp_path / "local", f"{there.url}/out", {"storage": options(there)}
    shardio.copy(packed, local)
    done = drop(url, keys=KEYS[:9], erase=True, **more)
    assert (
        str(drop(local, keys=KEYS[:9], erase=True)).splitlines()[1:4]
        == (str(done).splitlines()[1:4])
    )
    assert (done.erased, done.out) == (9, url)
    assert "appends that other machines have planned are not seen" in str(done)
    assert fetched(there, "out", tmp_path / "fetched") == files(local)
    assert not list((tmp_path / "caches").rglob("*"))[1:]  # but for a folder of ours


def test_an_erasing_that_was_interrupted_sends_no_file_twice(
    through: ObjectStore, there: ObjectStore, proxy: FaultProxy
) -> None:
    url, more = f"{through.url}/out", {"storage": options(through)}
    annotate(url, {key: {"caption": key} for key in KEYS}, storage=options(there))
    files = "/0000", "/overlay-"
    for name in ("/00001-", NEWEST):  # a shard is not there; all are
        proxy.rules(Rule("403", path=name, method="PUT"))
        proxy.reset()
        with pytest.raises(StorageError, match="403"):
            drop(url, keys=KEYS[:9], erase=True, **more)
        assert sum(puts(proxy, one) for one in files) > 0
    proxy.rules()
    proxy.reset()
    assert drop(url, keys=KEYS[:9], erase=True, **more).erased == 9
    assert [puts(proxy, one) for one in files] == [0, 0]
    assert sorted(keys_of(url, options(there))) == KEYS[9:]
    assert not shardio.verify(url, storage=options(there)).damages


def test_what_is_damaged_is_dropped_in_a_store_that_answers(
    bucket: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    tree = {f"a/{i}.jpg": picture(30 + i, 20) for i in range(12)}
    source = plant(tmp_path / "src", tree | {"a/3.jpg": picture(33, 20)[:-90]})
    shardio.pack(source, tmp_path / "out", plan=PlanOptions(max_records=EACH), jobs=1)
    cut = sorted((tmp_path / "out").glob("*.shard"))[1]
    os.truncate(cut, cut.stat().st_size - 1)
    bucket.put_folder(tmp_path / "out", "torn/")
    ahead = options(bucket.through(proxy.port))
    proxy.rules(Rule("403", path=cut.name, numbers=[*range(1, 10_000)]))  # it is told at once
    with pytest.raises(StorageError, match="Nothing was dropped"):
        drop(f"{bucket.url}/torn", damaged=True, jobs=2, storage=ahead)
    proxy.rules()
    done = drop(f"{bucket.url}/torn", damaged=True, jobs=2, storage=options(bucket))
    assert done.records in (EACH, EACH + 1)  # the torn one is in that shard, or not
    found = shardio.open(f"{bucket.url}/torn", decode="numpy", storage=options(bucket))
    assert len([*found]) == 12 - done.records


def test_splits_are_changed_in_one_call(bucket: ObjectStore, tmp_path: Path) -> None:
    for split in ("train", "val"):
        plant(tmp_path / "images" / split, images(1, 4))
    shardio.pack(tmp_path / "images", tmp_path / "out", jobs=1)
    bucket.put_folder(tmp_path / "out", "out/")
    url, more = f"{bucket.url}/out", {"storage": options(bucket)}
    done = drop(url, keys=["class0/001.jpg"], **more)
    assert (done.records, sorted(done.versions)) == (2, ["train", "val"])
    for split in ("train", "val"):
        assert "class0/001.jpg" not in keys_of(f"{url}/{split}", options(bucket))


def test_files_of_others_in_place_are_hidden_and_annotated(
    bucket: ObjectStore, packed: Path, tmp_path: Path
) -> None:
    shardio.export(packed, tmp_path / "tars", format="webdataset", shard_size=19_500)
    shardio.index(tmp_path / "tars", jobs=1)
    bucket.put_folder(tmp_path / "tars", "out/")
    url, more = f"{bucket.url}/out", {"storage": options(bucket)}
    keys = keys_of(url, options(bucket))
    for out, given in ((url, more), (str(tmp_path / "tars"), {})):
        assert drop(out, keys=keys[:2], **given).remaining == len(keys) - 2
        annotate(out, {keys[3]: {"score": 0.5}}, missing="none", **given)
    assert fetched(bucket, "out", tmp_path / "fetched") == files(tmp_path / "tars")
    assert set(keys_of(url, options(bucket))) == set(keys[2:])
    with pytest.raises(OptionError, match="shardio never changes"):
        drop(url, keys=keys[4:5], erase=True, **more)


def test_a_dry_run_writes_nothing(through: ObjectStore, proxy: FaultProxy) -> None:
    url, more = f"{through.url}/out", {"storage": options(through), "dry_run": True}
    assert drop(url, keys=KEYS[:2], **more).records == 2
    assert annotate(url, {KEYS[0]: {"score": 1.0}}, missing="none", **more).records == 1
    assert puts(proxy) == 0


def test_the_indexes_of_shards_are_asked_for_at_once(
    through: ObjectStore, proxy: FaultProxy
) -> None:
    proxy.limits(gather=SHARDS, of=r"GET .*/0000\d-")  # all of them, before the first is answered
    try:
        done = drop(f"{through.url}/out", keys=[KEYS[0]], storage=options(through))
    finally:
        proxy.limits()
    assert done.records == 1


def test_what_a_drop_costs(through: ObjectStore, proxy: FaultProxy, packed: Path) -> None:
    drop(f"{through.url}/out", keys=[KEYS[0]], storage=options(through))
    asked = [(one.method, one.path.split("?")[0].rpartition("/")[2]) for one in proxy.figures().log]
    names = {path.name for path in packed.glob("*.shard")}
    ends = [one for one in asked if one[1] in names]
    assert len(ends) <= 2 * SHARDS  # the index of each shard, and the keys of one
    others = [one[0] for one in asked if one not in ends]
    assert (others.count("GET"), others.count("PUT"), others.count("DELETE")) == (3, 4, 0)


# --- records that are appended --------------------------------------------------------------------


@pytest.fixture
def more_images(tmp_path: Path) -> Path:
    """Files that are new: of a class that is there, and of another one; two shards of 4."""
    named = ["class1/new0.jpg", "class1/new1.jpg", *(f"class9/{i}.jpg" for i in range(5))]
    return plant(tmp_path / "more", {key: noise(key, 500) for key in named})


def test_what_is_appended_in_a_store_is_what_a_directory_gets(
    there: ObjectStore, packed: Path, more_images: Path, tmp_path: Path
) -> None:
    local, url = tmp_path / "local", f"{there.url}/out"
    shardio.copy(packed, local)
    shutil.copytree(packed.parent / "src", tmp_path / "all")
    shutil.copytree(more_images, tmp_path / "all", dirs_exist_ok=True)
    (tmp_path / "all" / "class0" / "000.jpg").unlink()
    changed = tmp_path / "all" / "class0" / "001.jpg"
    changed.write_bytes(noise("changed", 900))
    for out, to in ((str(local), None), (url, options(there))):
        done = shardio.append(more_images, out, to=to)
        assert (done.added, done.shards, done.classes) == (7, 2, ["class9"])
        skipped = shardio.append(more_images, out, to=to, on_duplicate="skip", dry_run=True)
        assert (skipped.added, skipped.skipped) == (0, 7)
        updated = shardio.update(tmp_path / "all", out, to=to)
        assert (updated.new, updated.changed, updated.gone) == (0, 1, 1)
        assert shardio.update(tmp_path / "all", out, to=to).compared == 0
    assert fetched(there, "out", tmp_path / "fetched") == files(local)
    assert not shardio.verify(url, storage=options(there)).damages
    assert not [*(tmp_path / "caches" / "shardio").iterdir()]  # nothing is left here


def test_splits_are_appended_to(bucket: ObjectStore, tmp_path: Path) -> None:
    for folder, count in (("images", 4), ("more", 6)):
        for split in ("train", "val"):
            plant(tmp_path / folder / split, images(1, count))
    shardio.pack(tmp_path / "images", tmp_path / "out", jobs=1)
    bucket.put_folder(tmp_path / "out", "out/")
    url, to = f"{bucket.url}/out", options(bucket)
    work = tmp_path / "work"
    done = shardio.append(tmp_path / "more", url, to=to, on_duplicate="skip", work_dir=work)
    assert (done.added, done.skipped, sorted(done.versions)) == (4, 8, ["train", "val"])
    for split in ("train", "val"):
        assert len(keys_of(f"{url}/{split}", to)) == 6
    assert not work.exists()
    plant(tmp_path / "new class", images(2, 1))
    with pytest.raises(OptionError, match=r"All splits are to number them alike: append to s3://"):
        shardio.append(tmp_path / "new class", f"{url}/train", to=to, on_duplicate="skip")


def test_an_append_that_is_killed_goes_on(
    through: ObjectStore, there: ObjectStore, proxy: FaultProxy, more_images: Path
) -> None:
    url, direct = f"{there.url}/out", options(there)
    line = ["append", more_images, url, "--jobs", "1"]
    before = keys_of(url, direct)
    for held in (r"/0000[67]-", "probe", "manifest-", NEWEST):
        proxy.rules(Rule("timeout", path=held, method="PUT"))
        kill_held(proxy, *line)
        proxy.reset()
        assert keys_of(url, direct) == before and len(log(url, storage=direct).versions) == 1
    lost = Rule("lost", path=NEWEST, method="PUT", times=1)  # it is there, and nobody knows
    proxy.rules(lost, Rule("timeout", path=NEWEST, method="PUT"))
    kill_held(proxy, *line, faults=2)
    proxy.rules()
    assert "0 records appended" in command(*line).stdout
    assert puts(proxy, "/0000") == 0  # they were there: nothing is uploaded twice
    assert len(keys_of(url, direct)) == len(before) + 7
    assert [one.command for one in log(url, storage=direct).versions] == ["append", "pack"]
    assert not shardio.verify(url, storage=direct).damages


def test_an_append_that_was_overtaken_is_told_and_goes_on(
    through: ObjectStore, there: ObjectStore, proxy: FaultProxy, more_images: Path, tmp_path: Path
) -> None:
    url, direct = f"{there.url}/out", options(there)
    other = plant(tmp_path / "other", {"class0/other.jpg": noise("other", 400)})
    line = ["append", more_images, url, "--jobs", "1"]
    proxy.rules(AT_COMMIT)  # its shards are there
    with started(*line) as process:
        proxy.wait(faults=1)
        shardio.append(other, url, to=direct, work_dir=tmp_path / "elsewhere")
        drop(url, keys=KEYS[:1], storage=direct)
        proxy.rules()
        assert process.wait(LIMIT_S) == BUSY
    assert [one.command for one in log(url, storage=direct).versions] == ["drop", "append", "pack"]
    said = command(*line)
    assert said.returncode == 0, said.stderr
    expected = {*KEYS[1:], "class0/other.jpg"} | {
        path.relative_to(more_images).as_posix() for path in more_images.rglob("*.jpg")
    }
    assert {*keys_of(url, direct)} == expected
    assert not shardio.verify(url, storage=direct).damages


def test_shards_that_are_gone_before_the_commit_are_named(
    through: ObjectStore, there: ObjectStore, proxy: FaultProxy, more_images: Path
) -> None:
    url, direct = f"{there.url}/out", options(there)
    line = ["append", more_images, url, "--jobs", "1"]
    proxy.rules(AT_COMMIT)
    with started(*line) as process:
        proxy.wait(faults=1)
        there.delete([name for name in there.sizes() if "/00007-" in name])
        proxy.rules()
        assert process.wait(LIMIT_S) == 1
    assert len(log(url, storage=direct).versions) == 1
    said = command(*line)
    assert said.returncode == 0, said.stderr
    assert not shardio.verify(url, storage=direct).damages


# --- compacting -----------------------------------------------------------------------------------


@pytest.fixture
def small(packed: Path, more_images: Path, tmp_path: Path) -> Path:
    """A directory with a dataset that grew: 8 shards, two records dropped, some annotated."""
    shardio.copy(packed, tmp_path / "small")
    shardio.append(more_images, tmp_path / "small")
    annotate(
        tmp_path / "small", {key: {"caption": f"of {key}"} for key in KEYS[5:9]}, missing="none"
    )
    drop(tmp_path / "small", keys=[KEYS[3], "class9/0.jpg"])
    return tmp_path / "small"


def test_what_is_compacted_in_a_store_is_what_a_directory_gets(
    bucket: ObjectStore, small: Path, tmp_path: Path
) -> None:
    bucket.put_folder(small, "out/")
    url, more = f"{bucket.url}/out", {"storage": options(bucket)}
    told = [
        str(shardio.compact(out, shard_size=4000, dry_run=True, **given)).partition(": ")[2]
        for out, given in ((small, {}), (url, more))
    ]
    assert told[0] == told[1]
    for out, given in ((small, {}), (url, more)):
        done = shardio.compact(out, shard_size=4000, jobs=2, **given)
        assert (done.records, done.left_out, done.old_shards) == (SHARDS * EACH + 5, 2, 8)
        assert shardio.compact(out, shard_size=4000, **given).already
    assert fetched(bucket, "out", tmp_path / "fetched") == files(small)
    assert not shardio.verify(url, **more).damages
    assert not [*(tmp_path / "caches" / "shardio").iterdir()]  # nothing is left here


@pytest.mark.parametrize("format", ["record", slow("lmdb")])
def test_splits_and_large_records_are_compacted(
    bucket: ObjectStore, tmp_path: Path, format: str
) -> None:
    for folder in ("images", "more"):  # large enough that heads are asked for alone
        tree = {
            f"{split}/class0/{folder}{i}.jpg": noise(f"{folder}{split}{i}", 20_000)
            for split in ("train", "val")
            for i in range(3)
        }
        plant(tmp_path / folder, tree)
    shardio.pack(tmp_path / "images", tmp_path / "out", jobs=1, format=format)
    shardio.append(tmp_path / "more", tmp_path / "out", jobs=1)
    bucket.put_folder(tmp_path / "out", "out/")
    url, more = f"{bucket.url}/out", {"storage": options(bucket), "jobs": 1}
    done = shardio.compact(url, work_dir=tmp_path / "work", **more)
    assert (done.records, done.shards) == (12, 2) and sorted(done.versions) == ["train", "val"]
    shardio.compact(tmp_path / "out", jobs=1)
    assert fetched(bucket, "out", tmp_path / "fetched") == files(tmp_path / "out")
    assert not (tmp_path / "work").exists()
    with pytest.raises(OptionError, match="work_dir: only where OUT is a URL"):
        shardio.compact(tmp_path / "out", work_dir=tmp_path / "work")


def test_a_compaction_that_is_killed_goes_on(
    through: ObjectStore, proxy: FaultProxy, small: Path, tmp_path: Path
) -> None:
    through.put_folder(small, "grown/")
    url, direct = f"{through.url}/grown", options(through)
    before, versions = keys_of(url, direct), log(url, storage=direct).versions
    line = ["compact", url, "--shard-size", "4000", "--jobs", "1"]
    for held in (r"/00002-", "overlay-", NEWEST):
        proxy.rules(Rule("timeout", path=held, method="PUT"))
        kill_held(proxy, *line)
        proxy.rules()
        proxy.reset()
        assert keys_of(url, direct) == before and log(url, storage=direct).versions == versions
    said = command(*line)
    assert said.returncode == 0, said.stderr
    assert puts(proxy, "/0000") == 0  # they were there: nothing is uploaded twice
    assert sorted(keys_of(url, direct)) == sorted(before)
    assert not shardio.verify(url, storage=direct).damages
    assert not [*(tmp_path / "caches" / "shardio").iterdir()]


def test_what_is_committed_while_it_compacts_is_carried_over_or_ends_it(
    through: ObjectStore, proxy: FaultProxy, small: Path, more_images: Path, tmp_path: Path
) -> None:
    through.put_folder(small, "grown/")
    url, direct = f"{through.url}/grown", options(through)
    line = ["compact", url, "--shard-size", "4000", "--jobs", "1"]
    before = keys_of(url, direct)
    others = plant(tmp_path / "others", {"class0/other.jpg": noise("other", 400)})
    for code in (BUSY, 0):
        proxy.rules(Rule("503", path=r"/00002-", method="PUT"))
        proxy.reset()
        with started(*line) as process:
            proxy.wait(faults=1)
            if code == BUSY:
                to = {"to": direct, "work_dir": tmp_path / "elsewhere"}
                shardio.append(others, url, **to)
            else:
                drop(url, keys=before[:2], storage=direct)
                annotate(url, {before[5]: {"caption": "new"}}, storage=direct)
            proxy.rules()
            assert process.wait(LIMIT_S) == code
    assert {*keys_of(url, direct)} == {*before[2:], "class0/other.jpg"}
    rows = shardio.open(url, decode=None, storage=direct)
    assert rows[rows.find(before[5])]["caption"] == "new"
    commands = [one.command for one in log(url, storage=direct).versions]
    assert commands[:4] == ["compact", "annotate", "drop", "append"]
    assert not shardio.verify(url, storage=direct).damages


def test_what_a_compaction_asks_for(through: ObjectStore, proxy: FaultProxy, small: Path) -> None:
    through.put_folder(small, "grown/")
    proxy.reset()
    shardio.compact(f"{through.url}/grown", jobs=1, storage=options(through))
    asked = [(one.method, one.path.split("?")[0].rpartition("/")[2]) for one in proxy.figures().log]
    ends = [name for method, name in asked if method == "GET" and name.startswith("0000")]
    # Ends and heads of 8 shards, 29 records, and again the ends of those that are annotated. What
    # is slow to come, on a busy machine, is asked for twice. With its key apart, each costs two.
    assert len(ends) <= 8 + 8 + 29 + 3 + 8


# --- parts of an append ---------------------------------------------------------------------------


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Files of four shards of 4, of which one is a new class, and one replaces what is there."""
    named = [f"class1/new{i}.jpg" for i in range(10)] + [f"class9/{i}.jpg" for i in range(5)]
    return plant(tmp_path / "many", {key: noise(key, 500) for key in [*named, KEYS[0]]})


@pytest.mark.parametrize("planned", [slow(False), True])
def test_parts_append_in_a_store_what_one_process_does_in_a_directory(
    there: ObjectStore, packed: Path, many: Path, tmp_path: Path, planned: bool
) -> None:
    local, url, direct = tmp_path / "local", f"{there.url}/out", options(there)
    shardio.copy(packed, local)
    given: dict[str, Any] = {"on_duplicate": "replace", "jobs": 1}
    shardio.append(many, local, **given)
    more: dict[str, Any] = {"to": direct, "work_dir": tmp_path / "work", **given}
    if planned:
        assert shardio.append(many, url, plan=True, **more).shards == 4
    first = shardio.append(many, url, part="1/3", **more)
    assert (first.part, first.shards) == ((1, 3), 1)
    with pytest.raises(NotPackedError, match="of parts 2, 3"):
        commit_parts(url, storage=direct, work_dir=tmp_path / "work", parts=3, wait_s=0)
    with pytest.raises(NotPackedError, match="3 of 4 shards are not built: 1, 2, 3"):
        commit_parts(url, storage=direct, work_dir=tmp_path / "work")
    for part in ("2/3", "3/3", "1/3"):  # one of them twice
        shardio.append(many, url, part=part, **more)
    drop(url, keys=KEYS[2:3], storage=direct)  # meanwhile
    drop(local, keys=KEYS[2:3])
    (done,) = commit_parts(url, storage=direct, work_dir=tmp_path / "work", wait_s=0)
    assert (done.records, done.out, done.committed) == (16, url, True)
    assert {*keys_of(url, direct)} == {*keys_of(str(local), Storage())}
    newest = [one.changes for one in log(url, storage=direct).versions]
    assert newest == [{"added": 16, "replaced": 1}, {"dropped": 1}, {}]
    shards = {name for name in files(local) if name.endswith(".shard")}
    assert {name for name in fetched(there, "out", tmp_path / "f") if name in shards} == shards
    assert not shardio.verify(url, storage=direct).damages
    assert not (tmp_path / "work").exists()
    with pytest.raises(NotPackedError, match="already packed; there is nothing to commit"):
        commit_parts(url, storage=direct, work_dir=tmp_path / "work")


@pytest.mark.parametrize("in_parts", [True, False])
def test_what_was_erased_meanwhile_is_not_appended(
    there: ObjectStore, tmp_path: Path, in_parts: bool
) -> None:
    url, direct = f"{there.url}/out", options(there)
    source = plant(tmp_path / "other", {KEYS[2]: noise("anew", 400), "class0/x.jpg": noise("x", 9)})
    given: dict[str, Any] = {"on_duplicate": "replace", "jobs": 1, "to": direct}
    given |= {"work_dir": tmp_path / "work"}

    def append_while(keys: list[str], keep_s: float) -> list[str]:
        """Append, and erase these while that is under way; what is told of it."""

        def erase(*_: Any) -> None:
            if keys:
                drop(url, keys=[keys.pop()], erase=True, storage=direct)
                gc(url, keep_s=keep_s, storage=direct)

        if not in_parts:
            shardio.append(source, url, progress=erase, **given)
            return []
        shardio.append(source, url, plan=True, **given)
        erase()
        shardio.append(source, url, part="1/1", **given)
        (done,) = commit_parts(url, storage=direct, work_dir=tmp_path / "work")
        return done.notes

    before = len(KEYS)
    with pytest.raises(BusyError, match=rf"erased here meanwhile, by the keys {KEYS[2]}\. Nothing"):
        append_while([KEYS[2]], 3600)
    assert len(keys_of(url, direct)) == before - 1
    (source / KEYS[2]).unlink()
    if in_parts:
        shardio.append(source, url, plan=True, restart=True, **given)  # as it says
    else:  # what others erased is no reason, if that can be told
        shutil.rmtree(tmp_path / "work")
        with pytest.raises(BusyError, match="may be among those that are to be appended"):
            append_while([KEYS[3]], 0)
        assert len(keys_of(url, direct)) == before - 2
    notes = append_while([KEYS[4]], 0 if in_parts else 3600)
    assert ("--dropped KEYS" in "".join(notes)) == in_parts
    assert "class0/x.jpg" in keys_of(url, direct) and KEYS[2] not in keys_of(url, direct)
    assert not shardio.verify(url, storage=direct).damages


def test_parts_of_splits_are_one_commit(bucket: ObjectStore, tmp_path: Path) -> None:
    for folder, count in (("images", 4), ("more", 6)):
        for split in ("train", "val"):
            plant(tmp_path / folder / split, images(1, count))
    plant(tmp_path / "more" / "val", {"class0/bad.jpg": b"no image"})
    shardio.pack(tmp_path / "images", tmp_path / "out", jobs=1)
    bucket.put_folder(tmp_path / "out", "out/")
    url, direct, work = f"{bucket.url}/out", options(bucket), tmp_path / "work"
    given: dict[str, Any] = {"on_duplicate": "skip", "on_error": "skip", "jobs": 1}
    for part in ("1/2", "2/2"):
        shardio.append(tmp_path / "more", url, to=direct, work_dir=work, part=part, **given)
    done = commit_parts(url, storage=direct, work_dir=work)
    assert [(one.split, one.records, len(one.rejected)) for one in done] == [
        ("train", 2, 0),
        ("val", 2, 1),
    ]
    shardio.append(tmp_path / "more", tmp_path / "out", **given)
    assert fetched(bucket, "out", tmp_path / "fetched") == files(tmp_path / "out")
    assert not work.exists()


def kill_commits(proxy: FaultProxy, url: str, direct: Storage, work: Path, *records: int) -> None:
    """Kill a commit before its manifest is put, then one behind that; records: after each."""
    lost = Rule("lost", path=NEWEST, method="PUT", times=1)  # it is there, and nobody knows
    for committed, expected in enumerate(records):
        proxy.rules(*[lost] * committed, Rule("timeout", path=NEWEST, method="PUT"))
        proxy.reset()
        kill_held(proxy, "commit", url, "--work-dir", work, faults=1 + committed)
        proxy.rules()
        assert len(keys_of(url, direct)) == expected


def test_parts_and_a_commit_that_are_killed_are_run_again(
    through: ObjectStore, proxy: FaultProxy, many: Path, tmp_path: Path
) -> None:
    url, direct, work = f"{through.url}/out", options(through), tmp_path / "work"
    before = keys_of(url, direct)
    more: dict[str, Any] = {"to": direct, "work_dir": work, "jobs": 1, "on_duplicate": "skip"}
    shardio.append(many, url, part="1/2", **more)
    line = ["append", many, url, "--part", "2/2", "--on-duplicate", "skip", "--work-dir", work]
    proxy.rules(Rule("timeout", path="/00009-", method="PUT"))
    kill_held(proxy, *line, "--jobs", "1")
    proxy.rules()
    proxy.reset()
    shardio.append(many, url, part="2/2", **more)
    assert puts(proxy, "/0000") == 1  # the one that was not there
    kill_commits(proxy, url, direct, work, len(before), len(before) + 15)
    done = commit_parts(url, storage=direct, work_dir=work)
    assert [one.already for one in done] == [True] and not work.exists()
    assert done[0].version == log(url, storage=direct).versions[0].id
    assert [one.command for one in log(url, storage=direct).versions] == ["append", "pack"]
    assert len(keys_of(url, direct)) == len(before) + 15
    assert not shardio.verify(url, storage=direct).damages


def test_parts_that_were_overtaken_are_told_and_run_again(
    there: ObjectStore, many: Path, tmp_path: Path
) -> None:
    url, direct, work = f"{there.url}/out", options(there), tmp_path / "work"
    line = ["append", many, url, "--part", "1/1", "--on-duplicate", "skip", "--work-dir", work]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment_of(there).items():
            patch.setenv(name, value)
        said = command(*line, "--jobs", "1")
        assert f"next: shardio commit {url} --work-dir {work}, when all" in said.stdout
        with shardio.Writer(url, append=True, storage=direct, max_records=1) as writer:
            write(writer)
        said = command("commit", url, "--work-dir", work, code=BUSY)
        assert "run the parts again, and then `shardio commit`" in said.stderr
        assert command(*line, "--jobs", "1").returncode == 0
        said = command("commit", url, "--work-dir", work)
        assert said.returncode == 0, said.stderr
    assert len(keys_of(url, direct)) == SHARDS * EACH + 7 + 15
    assert not shardio.verify(url, storage=direct).damages


def test_parts_update_in_a_store_what_one_process_does_in_a_directory(
    through: ObjectStore, proxy: FaultProxy, packed: Path, tmp_path: Path
) -> None:
    source = plant(tmp_path / "src", images())
    plant(source, {f"class9/{i}.jpg": noise(f"{i}", 500) for i in range(7)})
    plant(source, {KEYS[0]: noise("anew", 600), KEYS[5]: noise("anew too", 600)})
    (source / KEYS[1]).unlink()
    shardio.copy(packed, tmp_path / "local")
    shardio.update(source, tmp_path / "local", jobs=1)
    url, direct, work = f"{through.url}/out", options(through), tmp_path / "work"
    more: dict[str, Any] = {"to": direct, "work_dir": work, "jobs": 1}
    done = shardio.update(source, url, plan=True, **more)
    assert (done.new, done.changed, done.gone, done.shards) == (7, 2, 1, 3)
    assert shardio.update(source, url, part="1/2", **more).built == 4
    line = ["update", source, url, "--work-dir", work, "--jobs", "1", "--part", "2/2"]
    proxy.rules(Rule("timeout", path="/00008-", method="PUT"))
    kill_held(proxy, *line)
    proxy.rules()
    assert shardio.update(source, url, part="2/2", **more).built == 5
    kill_commits(proxy, url, direct, work, SHARDS * EACH, SHARDS * EACH + 6)
    (found,) = commit_parts(url, storage=direct, work_dir=work)
    (newest, oldest) = log(url, storage=direct).versions
    assert (newest.command, oldest.command) == ("update", "pack") and not work.exists()
    assert (found.already, found.version) == (True, newest.id)
    assert fetched(through, "out", tmp_path / "fetched") == files(tmp_path / "local")


def test_parts_need_a_directory_together(there: ObjectStore, many: Path, tmp_path: Path) -> None:
    url, to = f"{there.url}/out", options(there)
    for given in ({"part": "1/2"}, {"plan": True}):
        with pytest.raises(OptionError, match=r"which all of them see.*--work-dir DIR"):
            shardio.append(many, url, to=to, **given)
    with pytest.raises(OptionError, match=r"that was given to the parts.*--work-dir DIR"):
        commit_parts(url, storage=to)
    with pytest.raises(OptionError, match="work_dir: only where OUT is a URL"):
        commit_parts(tmp_path, work_dir=tmp_path / "work")


def test_what_was_uploaded_before_a_kill_is_not_read_again(
    through: ObjectStore, proxy: FaultProxy, many: Path, tmp_path: Path
) -> None:
    through.put_folder(many, "source/")
    source, url = f"{through.url}/source", f"{through.url}/out"
    line = ["append", source, url, "--jobs", "1", "--on-duplicate", "skip"]
    proxy.rules(Rule("timeout", path="/00009-", method="PUT"))
    kill_held(proxy, *line)
    proxy.rules()
    proxy.reset()
    said = command(*line)
    assert said.returncode == 0, said.stderr
    read = [one for one in proxy.figures().log if one.method == "GET" and ".jpg" in one.path]
    assert read == []
    assert len(keys_of(url, options(through))) == SHARDS * EACH + 15


# --- streams of samples ---------------------------------------------------------------------------


def write(writer: shardio.Writer, count: int = 7) -> None:
    for number in range(count):
        image = noise(f"stream {number}", 500)
        writer.write({"__key__": f"class1/s{number}.jpg", "image": image, "label": number % 3})


def test_a_stream_of_samples_becomes_in_a_store_what_it_does_in_a_directory(
    there: ObjectStore, packed: Path, tmp_path: Path
) -> None:
    local, url = tmp_path / "local", f"{there.url}/out"
    shardio.copy(packed, local)
    more: dict[str, Any] = {"max_records": 3, "storage": options(there)}
    for top in (str(tmp_path), there.url):
        with shardio.Writer(f"{top}/new", id="mine", **more) as writer:
            write(writer)
        with pytest.raises(ExistsError, match="a dataset is here, of 7 records"):
            shardio.Writer(f"{top}/new", **more)
        with shardio.Writer(f"{top}/new", id="mine", overwrite=True, **more) as writer:
            write(writer, 2)
    for out in (str(local), url):
        with shardio.Writer(out, append=True, **more) as writer:
            write(writer)
    for name in ("out", "new"):
        here = files(local if name == "out" else tmp_path / "new")
        assert fetched(there, name, tmp_path / "fetched") == here
        assert not shardio.verify(f"{there.url}/{name}", storage=options(there)).damages
    assert len(keys_of(url, options(there))) == SHARDS * EACH + 7
    assert not [*(tmp_path / "caches" / "shardio").iterdir()]  # nothing is left here


def test_a_stream_that_fails_leaves_the_old_version(there: ObjectStore, tmp_path: Path) -> None:
    url, direct = f"{there.url}/out", options(there)
    before = there.sizes()
    failing = shardio.Writer(url, append=True, max_records=3, storage=direct)
    with pytest.raises(RuntimeError), failing as writer:
        write(writer)
        raise RuntimeError
    assert before.items() <= there.sizes().items() and len(log(url, storage=direct).versions) == 1
    assert not [*(tmp_path / "caches" / "shardio").iterdir()]
    gc(url, keep_s=0, storage=direct)
    assert there.sizes() == before


def test_of_two_streams_the_one_that_ends_later_is_told(there: ObjectStore, tmp_path: Path) -> None:
    url, direct = f"{there.url}/out", options(there)
    with shardio.Writer(url, append=True, storage=direct) as writer:
        write(writer)
        with pytest.raises(BusyError):  # of this machine, at once
            shardio.Writer(url, append=True, storage=direct).__enter__()
    assert len(keys_of(url, direct)) == SHARDS * EACH + 7
    for name, given in (("out", {"append": True}), ("new", {}), ("new", {"overwrite": True})):
        theirs: dict[str, Any] = {"storage": direct, **given}
        writer = shardio.Writer(f"{there.url}/{name}", **theirs)
        writer.write({"__key__": "ours", "image": noise("ours", 400), "label": 0})
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
            with shardio.Writer(f"{there.url}/{name}", **theirs) as winner:
                winner.write({"__key__": "theirs", "image": noise("theirs", 400), "label": 0})
        with pytest.raises(BusyError, match="Nothing was committed: run it again"):
            writer.close()
        assert keys_of(f"{there.url}/{name}", direct)[-1] == "theirs"
        assert not shardio.verify(f"{there.url}/{name}", storage=direct).damages


STREAM = """
import sys, shardio
with shardio.Writer(sys.argv[1], append=True, max_records=2) as writer:
    for number in range(2):
        image = b"\\xff\\xd8\\xff" + bytes(400)
        writer.write({"__key__": f"class1/s{number}.jpg", "image": image, "label": 0})
"""


def test_a_stream_that_is_killed_at_any_upload_leaves_the_old_version(
    through: ObjectStore, there: ObjectStore, proxy: FaultProxy
) -> None:
    url, direct = f"{there.url}/out", options(there)
    before, stream = keys_of(url, direct), warm_python.command("-c", STREAM, url, kind="shardio")
    for held in (r"/00006-", NEWEST, None):
        proxy.rules(*([Rule("timeout", path=held, method="PUT")] if held else []))
        proxy.reset()
        with warm_python.Process(stream) as process:
            if held:
                proxy.wait(faults=1)
                process.kill()
            process.wait(LIMIT_S)
        assert len(keys_of(url, direct)) == len(before) + (0 if held else 2)
    assert process.returncode == 0 and not shardio.verify(url, storage=direct).damages
    assert [one.command for one in log(url, storage=direct).versions] == ["append", "pack"]


# --- what no version needs ------------------------------------------------------------------------


def test_gc_removes_in_a_store_what_it_removes_in_a_directory(
    there: ObjectStore, packed: Path, more_images: Path, tmp_path: Path
) -> None:
    local, url = tmp_path / "local", f"{there.url}/out"
    shardio.copy(packed, local)
    for out, to in ((str(local), None), (url, options(there))):
        changes(out, {} if to is None else {"storage": to})
        shardio.append(more_images, out, to=to)
        drop(out, keys=KEYS[12:14], storage=to)
    others = {
        "out/00007-01234567.shard": b"mine",
        "out/excluded-01234567.bin": b"mine",
        "out/overlay-00001-01234567.shard": b"mine",
        "out/manifest-0123456789abcdef.json": b"mine",
        "out/notes.txt": b"mine",
        "out/folder/00001-01234567.shard": (packed / min(os.listdir(packed))).read_bytes(),
    }
    plant(tmp_path / "others", {name: data for name, data in others.items()})
    there.put_folder(tmp_path / "others")
    more = {"storage": options(there)}
    young = gc(url, keep_versions=1, **more)
    assert young.removed == [] and len(young.kept) == 8 and gc(url, keep_s=0, **more).removed == []
    for keep, versions in ((2, 3), (1, 2)):  # one of them has a tag
        told = gc(url, keep_s=0, keep_versions=keep, dry_run=True, **more)
        done, same = (
            gc(out, keep_s=0, keep_versions=keep, **given)
            for out, given in ((url, more), (local, {}))
        )
        assert [one.rpartition("/")[2] for one in done.removed] == (
            [one.rpartition("/")[2] for one in same.removed]
        )
        assert (told.removed, done.bytes) == (done.removed, same.bytes) and done.removed
        assert len(log(url, **more).versions) == versions
        there_now = fetched(there, "out", tmp_path / f"fetched{keep}")
        assert {f"out/{name}" for name in there_now} == others.keys() | {
            f"out/{name}" for name in files(local)
        }
    assert not shardio.verify(url, **more).damages
    assert keys_of(url, options(there), "scored") == keys_of(str(local), Storage(), "scored")


def test_gc_looks_at_many_objects_at_once_and_removes_them_so(
    through: ObjectStore, there: ObjectStore, proxy: FaultProxy
) -> None:
    for number in range(5):
        drop(f"{there.url}/out", keys=[KEYS[number]], storage=options(there))
    url, more = f"{through.url}/out", {"storage": options(through), "keep_s": 0}
    for method, dry in (("HEAD", True), ("DELETE", False)):
        proxy.limits(gather=4, of=f"{method} .*excluded-")  # before the first is answered
        try:
            found = gc(url, keep_versions=1, dry_run=dry, **more)
        finally:
            proxy.limits()
        assert len(found.removed) == 4 + 5  # lists, and manifests


def test_gc_removes_what_was_erased(there: ObjectStore) -> None:
    url, more = f"{there.url}/out", {"storage": options(there)}
    before = set(there.sizes())
    drop(url, keys=KEYS[:1], erase=True, **more)
    (old,) = gc(url, keep_s=0, **more).removed
    assert before - set(there.sizes()) == {f"out/{old.rpartition('/')[2]}"}
    assert not shardio.verify(url, **more).damages


def test_what_is_left_of_erased_records_is_found_in_a_store(
    there: ObjectStore, tmp_path: Path
) -> None:
    url, more = f"{there.url}/out", {"storage": options(there)}
    plant(tmp_path, {"more/a/list.txt": f"of {KEYS[1]}".encode()})
    there.put_folder(tmp_path / "more", "out/")

    def left() -> list[tuple[str, str | None]]:
        found = shardio.verify(url, dropped=KEYS[:2], **more)
        assert found.sought is not None
        assert any("where the bucket keeps them" in one for one in found.sought.unseen)
        return sorted((one.shard.partition("/out/")[2], one.key) for one in found.damages)

    assert len(left()) == 3  # two records, and the list
    drop(url, keys=KEYS[:2], **more)
    assert len(left()) == 3
    drop(url, keys=KEYS[:2], erase=True, missing="ignore", **more)
    assert len(left()) == 3  # in the old shards
    gc(url, keep_s=0, **more)
    assert left() == [("a/list.txt", KEYS[1])]
    there.delete(["out/a/list.txt"])
    said = shardio.verify(url, dropped=KEYS[:2], **more)
    assert said.damages == [] and "nothing left of them" in str(said)


def test_gc_stops_where_something_was_committed_meanwhile(
    through: ObjectStore, there: ObjectStore, proxy: FaultProxy
) -> None:
    url, direct = f"{there.url}/out", options(there)
    for number in range(2):
        drop(url, keys=[KEYS[number]], storage=direct)
    # While it looks at what it may remove: the list that only the older version names.
    proxy.rules(Rule("503", path="excluded-", method="HEAD"))
    with started("gc", url, "--keep", "0s", "--keep-versions", "1") as process:
        proxy.wait(faults=1)
        restore(url, log(url, storage=direct).versions[1].id, storage=direct)
        before = there.sizes()
        proxy.rules()
        assert process.wait(LIMIT_S) == BUSY
    assert there.sizes() == before and not shardio.verify(url, storage=direct).damages


# --- two writers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("loser", ["drop", "tag", "annotate", "restore"])
def test_of_two_writers_the_later_one_is_told(
    through: ObjectStore, there: ObjectStore, proxy: FaultProxy, tmp_path: Path, loser: str
) -> None:
    url, direct = f"{there.url}/out", options(there)
    drop(url, keys=KEYS[9:10], storage=direct)  # else there is nothing to restore
    *_, first = log(url, storage=direct).versions
    (tmp_path / "keys").write_text(KEYS[0])
    (tmp_path / "table.csv").write_text(f"key,label\n{KEYS[0]},2\n")
    lines: dict[str, list[Any]] = {
        "drop": ["drop", url, "--keys", tmp_path / "keys"],
        "annotate": ["annotate", url, tmp_path / "table.csv"],
        "restore": ["restore", url, first.id],
        "tag": ["tag", url, "mine"],
    }
    held = r"/tags\.json" if loser == "tag" else NEWEST
    proxy.rules(Rule("503", path=held, method="PUT"))
    with started(*lines[loser]) as process:
        proxy.wait(faults=1)  # it has read what is there, and is about to put its own
        drop(url, keys=KEYS[5:7], storage=direct)
        tag(url, "theirs", storage=direct)
        before = there.sizes()
        proxy.rules()
        assert process.wait(LIMIT_S) == BUSY
    newest = log(url, storage=direct).versions
    assert [one.command for one in newest] == ["drop", "drop", "pack"]
    assert newest[0].tags == ("theirs",)
    gone = {KEYS[5], KEYS[6], KEYS[9]}
    assert sorted(keys_of(url, direct)) == [key for key in KEYS if key not in gone]
    assert there.sizes() == before  # what the loser had put lay there before
    said = command(*lines[loser])  # the same command again
    assert said.returncode == 0, said.stderr
    assert not set(KEYS[5:7]) & set(keys_of(url, direct)) or loser == "restore"
    assert len(log(url, storage=direct).versions) == (3 if loser == "tag" else 4)


def test_a_writer_that_was_overtaken_before_its_commit_is_told(there: ObjectStore) -> None:
    url, storage = f"{there.url}/out", options(there)
    place = find_place(url, storage)
    with changing(place) as before:
        drop(url, keys=KEYS[:1], storage=storage)
        with pytest.raises(BusyError, match="Nothing was committed: run it again"):
            commit(place, before, before, "drop", {"dropped": 1}, {})
    assert [one.command for one in log(url, storage=storage).versions] == ["drop", "pack"]


@pytest.mark.parametrize("name", [NEWEST, r"/tags\.json"])
def test_an_answer_that_is_lost_is_no_other_writer(
    through: ObjectStore, proxy: FaultProxy, name: str
) -> None:
    url, more = f"{through.url}/out", {"storage": options(through)}
    for number in range(2):  # a file that is there, and for tags one that is not
        proxy.rules(Rule("lost", path=name, method="PUT", times=1))
        if name == NEWEST:
            drop(url, keys=[KEYS[number]], **more)
        else:
            tag(url, f"tag {number}", **more)
        assert proxy.figures().faults == {"lost": number + 1}
    newest = log(url, **more).versions
    if name == NEWEST:
        assert [one.changes for one in newest] == [{"dropped": 1}, {"dropped": 1}, {}]
    else:
        assert newest[0].tags == ("tag 0", "tag 1")


def test_a_writer_that_won_unheard_and_was_followed_is_not_told_that_it_lost(
    through: ObjectStore, there: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    url, direct = f"{there.url}/out", options(there)
    (tmp_path / "keys").write_text(KEYS[0])
    lost = Rule("lost", path=NEWEST, method="PUT", times=1)
    proxy.rules(lost, Rule("503", path=NEWEST, method="PUT"))
    with started("drop", url, "--keys", tmp_path / "keys") as process:
        proxy.wait(faults=2)  # it is there, and it asks again
        drop(url, keys=KEYS[1:3], storage=direct)
        proxy.rules()
        assert process.wait(LIMIT_S) == 0
    newest = log(url, storage=direct).versions
    assert [one.changes for one in newest] == [{"dropped": 2}, {"dropped": 1}, {}]


# --- readers, and writers that are killed ---------------------------------------------------------


def test_who_reads_an_old_version_reads_on(there: ObjectStore) -> None:
    url, storage = f"{there.url}/out", options(there)
    data = ShardDataset(url, batch_size=3, decode=None, fields=("__key__",), storage=storage)
    batches = iter(data)
    seen = [*next(batches)[0]]
    drop(url, keys=KEYS[:9], erase=True, storage=storage)
    annotate(url, {KEYS[10]: {"label": 0}}, storage=storage)
    state = data.state_dict()
    seen += [key for (keys,) in batches for key in keys]
    assert sorted(seen) == KEYS
    assert len(keys_of(url, storage)) == len(KEYS) - 9
    again = ShardDataset(url, batch_size=3, decode=None, fields=("__key__",), storage=storage)
    with pytest.raises(StateError, match="were erased since"):
        again.load_state_dict(state)


@pytest.mark.parametrize(
    ("call", "uploads"),
    [
        (["drop", "OUT", "--keys", "KEYS"], 4),  # a try, the list, the old manifest, the new one
        slow(["drop", "OUT", "--keys", "KEYS", "--erase"], 5),  # and a shard
        slow(["annotate", "OUT", "TABLE"], 4),  # values of one shard
        (["tag", "OUT", "mine"], 2),
        slow(["restore", "OUT", "packed"], 3),
    ],
)
def test_a_kill_at_any_request_leaves_the_old_version_whole(
    through: ObjectStore,
    there: ObjectStore,
    proxy: FaultProxy,
    tmp_path: Path,
    call: Any,
    uploads: int,
) -> None:
    url, storage = f"{there.url}/out", options(there)
    (tmp_path / "keys").write_text(KEYS[0])
    (tmp_path / "table.csv").write_text(f"key,label\n{KEYS[1]},2\n")
    named = {"OUT": url, "KEYS": tmp_path / "keys", "TABLE": tmp_path / "table.csv"}
    line = [named.get(one, one) for one in call]
    tag(url, "packed", storage=storage)
    drop(url, keys=KEYS[2:3], storage=storage)
    before, read = [*log(url, storage=storage).versions], keys_of(url, storage)
    first = {*there.sizes()}
    for number in range(uploads):
        proxy.rules(Rule("timeout", method="PUT", numbers=[number]))
        proxy.reset()
        kill_held(proxy, *line)
        there.delete([*{*there.sizes()} - first])  # else it is not uploaded again
        assert log(url, storage=storage).versions == before and keys_of(url, storage) == read
    assert not shardio.verify(url, storage=storage).damages
    proxy.rules()
    proxy.reset()
    said = command(*line)
    assert said.returncode == 0, said.stderr
    assert puts(proxy) == uploads
    assert log(url, storage=storage).versions != before
    assert not [*(tmp_path / "caches").rglob("*.shard")]  # also of those that were killed


# --- stores without conditions --------------------------------------------------------------------


def deaf() -> Any:
    """S3 that writes whatever it is told, without a look at conditions."""
    return object_stores.s3(conditions=False)


@pytest.mark.parametrize("kind", [deaf, object_stores.gcs])
def test_a_store_without_conditional_writes_is_refused(
    kind: Any, packed: Path, tmp_path: Path
) -> None:
    (tmp_path / "table.csv").write_text(f"key,label\n{KEYS[0]},2\n")
    plant(tmp_path / "more", {"class0/new.jpg": noise("new", 400)})
    with kind() as store:
        store.put_folder(packed, "out/")
        there, url, more = store.sizes(), f"{store.url}/out", {"storage": allowed(store)}
        for change in (
            lambda: drop(url, keys=KEYS[:1], **more),
            lambda: annotate(url, tmp_path / "table.csv", **more),
            lambda: tag(url, "mine", **more),
            lambda: shardio.append(tmp_path / "more", url, to=more["storage"]),
            lambda: restore(url, log(url, **more).versions[0].id, **more),
        ):
            with pytest.raises(OptionError, match="does not replace a file only if") as raised:
                change()
            assert "in a directory, and `shardio copy` it" in str(raised.value)
            assert store.sizes() == there


@pytest.mark.parametrize(
    "kind", [lambda: object_stores.gcs(conditions=True), object_stores.azurite]
)
def test_other_stores_have_conditions_too(kind: Any, packed: Path, tmp_path: Path) -> None:
    shardio.copy(packed, tmp_path / "local")
    with kind() as store:
        store.put_folder(packed, "out/")
        url, more = f"{store.url}/out", {"storage": allowed(store)}
        assert changes(url, more) == changes(str(tmp_path / "local"), {})
        assert fetched(store, "out", tmp_path / "fetched") == files(tmp_path / "local")
        place = find_place(url, **more)
        with changing(place) as before:
            old = place.stored("manifest.json")
            drop(url, keys=KEYS[8:9], **more)
            with pytest.raises(BusyError):
                place.replace("manifest.json", old, before.dump())
            with pytest.raises(BusyError):
                place.replace("tags.json", None, b"{}")


def test_what_is_read_only_is_told(packed: Path) -> None:
    for change in (lambda url: drop(url, keys=["a"]), lambda url: tag(url, "mine")):
        with pytest.raises(OptionError, match="https:// is read only"):
            change("https://example.com/out")


def allowed(store: ObjectStore) -> Storage:
    return Storage(options=store.options | {"client_options": {"allow_http": True}})
