"""A dataset in an object store is changed there as one in a directory: by commits on condition."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S, object_stores
from support.fault_proxy import FaultProxy, fault_proxy
from support.faults import Rule
from support.object_stores import ObjectStore
from support.trees import images, noise, picture, plant
from support.trees import shardio as command
from support.uploading import fetched, files, options, puts, started

import shardio
from shardio import OptionError, PlanOptions, ShardDataset, Storage
from shardio.cli.exit_codes import BUSY
from shardio.errors import BusyError, StateError, StorageError
from shardio.packing.annotate import annotate
from shardio.packing.drop import drop
from shardio.packing.gc import gc
from shardio.packing.place import find_place
from shardio.packing.versions import changing, commit, diff, log, restore, tag
from shardio.storage import ranges

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
    assert fetched(there, "out", tmp_path / "fetched") == files(local)
    assert not list((tmp_path / "caches").rglob("*"))[1:]  # but for a folder of ours


def test_what_is_damaged_is_dropped_in_a_store_that_answers(
    bucket: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    tree = {f"a/{i}.jpg": picture(30 + i, 20) for i in range(12)}
    source = plant(tmp_path / "src", tree | {"a/3.jpg": picture(33, 20)[:-90]})
    shardio.pack(source, tmp_path / "out", plan=PlanOptions(max_records=EACH), jobs=1)
    cut = sorted((tmp_path / "out").glob("*.shard"))[1]
    os.truncate(cut, cut.stat().st_size - 1)
    bucket.put_folder(tmp_path / "out", "torn/")
    ahead = options(bucket.through(proxy.port), timeout_s=2.0)
    proxy.rules(Rule("503", path=cut.name, numbers=[*range(1, 10_000)]))
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


def test_an_append_that_is_killed_goes_on(
    through: ObjectStore, there: ObjectStore, proxy: FaultProxy, more_images: Path
) -> None:
    url, direct = f"{there.url}/out", options(there)
    line = ["append", more_images, url, "--jobs", "1"]
    before = keys_of(url, direct)
    for held in (r"/0000[67]-", "probe", "manifest-", NEWEST):
        proxy.rules(Rule("timeout", path=held, method="PUT"))
        with started(*line) as process:
            proxy.wait(faults=1)
            process.kill()
            process.wait(LIMIT_S)
        proxy.reset()
        assert keys_of(url, direct) == before and len(log(url, storage=direct).versions) == 1
    proxy.rules()
    said = command(*line)
    assert said.returncode == 0, said.stderr
    assert puts(proxy, "/0000") == 0  # they were there: nothing is uploaded twice
    assert len(keys_of(url, direct)) == len(before) + 7
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


def test_a_stream_of_samples_is_appended_in_a_directory_alone(there: ObjectStore) -> None:
    with pytest.raises(OptionError, match="expected a directory, local or mounted"):
        shardio.Writer(f"{there.url}/out", append=True)


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
    for number in range(uploads):
        proxy.rules(Rule("timeout", method="PUT", numbers=[number]))
        proxy.reset()
        with started(*line) as process:
            proxy.wait(faults=1)
            process.kill()
            process.wait(LIMIT_S)
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
