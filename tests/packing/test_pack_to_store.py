"""`shardio pack SRC s3://...`: shards go up as they are finished, the manifest comes last."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import object_stores, trees, warm_python
from support.fault_proxy import FaultProxy, fault_proxy
from support.faults import Rule
from support.object_stores import ObjectStore
from support.packing import unlisted
from support.trees import environment
from support.uploading import fetched, files, kill_held, options, puts

import shardio
from shardio import ImageOptions, PlanOptions, SourceOptions, Storage, commit
from shardio.errors import (
    BusyError,
    ExistsError,
    NotPackedError,
    OptionError,
    SourceError,
    StorageError,
)
from shardio.storage import lock, ranges

pytestmark = pytest.mark.usefixtures("warm_starts")

FILES = 60
SHARD = 120_000  # bytes: some ten shards


def write(folder: Path, files: int = FILES, most: int = 40_000, seed: int = 0) -> Path:
    draw = np.random.default_rng(seed)
    for number in range(files):
        path = folder / f"class{number % 3}" / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\xff\xd8\xff" + draw.bytes(int(draw.integers(100, most))))
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def packed(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What packing into a directory makes of the images."""
    out = tmp_path_factory.mktemp("packed") / "out"
    shardio.pack(images, out, shard_size=SHARD)
    return out


@pytest.fixture(scope="module")
def proxy_of_all(store: ObjectStore) -> Iterator[FaultProxy]:
    with fault_proxy(store.port) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def a_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Have working directories where the test sees them, and end the helper."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    yield tmp_path / "caches"
    ranges.close()


def names(store: ObjectStore) -> set[str]:
    return {name.rpartition("/")[2] for name in store.sizes()}


# --- the same bytes -------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["record", "lmdb"])
@pytest.mark.parametrize("jobs", [1, 3])
def test_it_is_the_dataset_that_a_directory_gets(
    images: Path, bucket: ObjectStore, tmp_path: Path, format: str, jobs: int
) -> None:
    given = dict(shard_size=SHARD, format=format, jobs=jobs)
    shardio.pack(images, tmp_path / "local", **given)
    (done,) = shardio.pack(images, f"{bucket.url}/out", to=options(bucket), **given)
    assert (done.committed, done.records, done.kept) == (True, FILES, 0)
    assert done.out == f"{bucket.url}/out" and done.built > 5
    assert fetched(bucket, "out", tmp_path / "fetched") == files(tmp_path / "local")
    read = shardio.open(f"{bucket.url}/out", decode=None, storage=options(bucket))
    assert read[7] == shardio.open(tmp_path / "local", decode=None)[7]
    assert not any((tmp_path / "caches" / "shardio").iterdir())  # nothing is left here


@pytest.mark.parametrize("kind", [object_stores.gcs, object_stores.azurite])
def test_other_stores_take_it_too(kind: Any, tmp_path: Path) -> None:
    images = write(tmp_path / "images", 6, 6 << 20)  # one shard goes up in parts
    (images / "class0" / "text.jpg").write_bytes(b"no image")
    with kind() as store:
        to = Storage(options=store.options | {"client_options": {"allow_http": True}})
        (done,) = shardio.pack(images, f"{store.url}/out", to=to, on_error="skip")
        assert "rejected.jsonl" in names(store) and done.records == 6
        (images / "class0" / "text.jpg").unlink()
        shardio.pack(images, f"{store.url}/out", to=to, overwrite=True)
        assert "rejected.jsonl" not in names(store)  # it was of the dataset that was replaced
        assert not shardio.verify(f"{store.url}/out", storage=to).damages


def test_splits_are_named_when_all_are_there(
    bucket: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    for split in ("train", "val"):
        write(tmp_path / "images" / split, 6)
    there = bucket.through(proxy.port)
    done = shardio.pack(tmp_path / "images", f"{there.url}/out", to=options(there))
    assert [one.out for one in done] == [f"{bucket.url}/out/train", f"{bucket.url}/out/val"]
    order = [one.path for one in proxy.figures().log if one.method == "PUT"]
    last = [path.rpartition("/out/")[2].partition("?")[0] for path in order][-3:]
    assert last == ["train/manifest.json", "val/manifest.json", "shardio.json"]
    shardio.pack(tmp_path / "images", tmp_path / "local")
    assert fetched(bucket, "out", tmp_path / "fetched") == files(tmp_path / "local")
    assert not any((tmp_path / "caches" / "shardio").iterdir())


def test_a_dataset_of_one_store_is_packed_anew_into_it(
    packed: Path, bucket: ObjectStore, tmp_path: Path
) -> None:
    bucket.put_folder(packed, "a/")
    read = SourceOptions(storage=options(bucket))
    again = dict(shard_size=2 * SHARD, plan=PlanOptions(shuffle=True, seed=5))
    shardio.pack(f"{bucket.url}/a", f"{bucket.url}/b", read=read, **again)
    shardio.pack(packed, tmp_path / "local", **again)
    assert fetched(bucket, "b", tmp_path / "fetched") == files(tmp_path / "local")
    with pytest.raises(OptionError, match=r"/a/b: OUT lies in the folder to be packed"):
        shardio.pack(f"{bucket.url}/a", f"{bucket.url}/a/b", read=read)


# --- what is there --------------------------------------------------------------------------------


def test_what_is_packed_is_left_as_it_is(
    images: Path, bucket: ObjectStore, proxy: FaultProxy
) -> None:
    there = bucket.through(proxy.port)
    given = dict(shard_size=SHARD, to=options(there))
    shardio.pack(images, f"{there.url}/out", **given)
    proxy.reset()
    (done,) = shardio.pack(images, f"{there.url}/out", **given)
    assert done.already and not puts(proxy)
    assert not any("list-type" in one.path for one in proxy.figures().log)  # nothing is listed
    lost = next(name for name in bucket.sizes() if name.endswith(".shard"))
    bucket.delete([lost])
    (done,) = shardio.pack(images, f"{there.url}/out", **given)  # it is made whole
    assert not done.already and puts(proxy, "00000") <= 1
    assert puts(proxy, lost) == 1 and puts(proxy) == 2  # the shard, and the manifest


def test_another_dataset_is_replaced_only_when_asked(
    images: Path, bucket: ObjectStore, tmp_path: Path
) -> None:
    out, to = f"{bucket.url}/out", options(bucket)
    shardio.pack(images, out, shard_size=SHARD, to=to)
    before = bucket.sizes()
    for other in (dict(format="lmdb"), dict(images=ImageOptions(encode="raw"), resize=8)):
        with pytest.raises(ExistsError, match=r"another dataset is packed here.*id [0-9a-f]{32}"):
            shardio.pack(images, out, to=to, **other)
    with pytest.raises(ExistsError, match="another dataset"):
        shardio.pack(write(tmp_path / "other", 5), out, to=to)
    with pytest.raises(ExistsError, match="one dataset is packed here, and splits are to be"):
        write(tmp_path / "splits" / "train", 3)
        shardio.pack(tmp_path / "splits", out, to=to)
    assert bucket.sizes() == before
    shardio.pack(tmp_path / "other", out, to=to, overwrite=True)
    assert len(shardio.open(out, decode=None, storage=to)) == 5
    assert before.keys() <= bucket.sizes().keys()  # shards of the other are left


def test_what_is_left_out_is_listed_there(
    bucket: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, to = write(tmp_path / "images", 20), options(bucket)
    (images / "class1" / "text.jpg").write_bytes(b"no image")
    out = f"{bucket.url}/out"
    with pytest.raises(SourceError, match=r"1 file cannot be packed, so nothing was committed"):
        shardio.pack(images, out, to=to)
    assert "manifest.json" not in names(bucket)
    (done,) = shardio.pack(images, out, to=to, on_error="skip")
    assert [key for key, _ in done.rejected] == ["class1/text.jpg"]
    found = fetched(bucket, "out", tmp_path / "fetched")["rejected.jsonl"]
    assert json.loads(found)["key"] == "class1/text.jpg"
    again = shardio.pack(images, out, to=to, on_error="skip")[0]
    assert again.already and again.rejected == done.rejected
    (tmp_path / "mine").write_text('{"key": "mine"}\n')
    bucket.put({"other/rejected.jsonl": tmp_path / "mine"})
    with pytest.raises(ExistsError, match=r"rejected\.jsonl lies here, and nothing is packed"):
        shardio.pack(images, f"{bucket.url}/other", to=to, on_error="skip")


# --- what is refused ------------------------------------------------------------------------------


def test_what_cannot_be_is_refused_before_anything_is_read(
    images: Path, bucket: ObjectStore, tmp_path: Path
) -> None:
    for out, more, why in (
        ("https://host/out", {}, "https:// is read only"),
        ("hf://datasets/a/b", {}, "hf:// is read only"),
        (f"{bucket.url}/out", {"plan": PlanOptions(part="1/2")}, "all of them see.*--work-dir DIR"),
        (tmp_path / "out", {"work_dir": tmp_path}, "work_dir: only where OUT is a URL"),
        (f"{bucket.url}/out", {"work_dir": "s3://b/x"}, "expected a directory, local or mounted"),
    ):
        with pytest.raises(OptionError, match=why):
            shardio.pack(images, out, to=options(bucket), **more)
    assert not bucket.sizes() and not (tmp_path / "out").exists()
    nowhere = Storage(options={**bucket.options, "client_options": {"allow_http": True}})
    with pytest.raises(StorageError, match="there is no such bucket"):
        shardio.pack(images, "s3://nosuchbucket/out", to=nowhere)


def test_two_packings_into_one_place_on_one_machine(
    images: Path, bucket: ObjectStore, tmp_path: Path
) -> None:
    work, to = tmp_path / "work", options(bucket)
    work.mkdir()
    assert lock.begin(str(work), lambda: [lock.WRITER_MAGIC + b"{}"])
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(work)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    with holder, pytest.raises(BusyError, match="another shardio process is packing here"):
        shardio.pack(images, f"{bucket.url}/out", to=to, work_dir=work)
    assert not bucket.sizes()


_HOLD = """
import sys
from shardio.storage import lock
with lock.hold_all(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("left", ["dataset", "splits", "shards"])
def test_a_dataset_is_no_working_directory(
    images: Path, bucket: ObjectStore, tmp_path: Path, left: str
) -> None:
    """Its shards have the names of those that are built, and would go when these are uploaded."""
    work = tmp_path / "local"
    shardio.pack(images, work / "train" if left == "splits" else work, shard_size=SHARD)
    if left == "shards":
        (work / "manifest.json").unlink()
    before = files(work)
    source = images
    if left == "splits":
        source = tmp_path / "splits"
        source.mkdir()
        (source / "train").symlink_to(images)
    for dry_run in (True, False):
        with pytest.raises(OptionError, match="a dataset lies in the working directory"):
            shardio.pack(
                source,
                f"{bucket.url}/out",
                shard_size=SHARD,
                to=options(bucket),
                work_dir=work,
                dry_run=dry_run,
            )
    assert files(work) == before and not bucket.sizes()


def test_a_working_directory_that_cannot_be_one_is_refused(
    images: Path, bucket: ObjectStore, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for work, error, why in (
        (images, OptionError, "the working directory lies in the folder to be packed"),
        (images / "class0" / "new", OptionError, "lies in the folder to be packed"),
        (tmp_path / "file", StorageError, "is a file, no directory. Choose .* with --work-dir"),
        (tmp_path / "file" / "below", StorageError, "is a file, no directory"),
    ):
        for dry_run in (True, False):
            with pytest.raises(error, match=why):
                shardio.pack(
                    images, f"{bucket.url}/out", to=options(bucket), work_dir=work, dry_run=dry_run
                )
    assert not bucket.sizes()


def test_folders_of_others_in_a_working_directory_are_left(
    images: Path, bucket: ObjectStore, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    (work / "empty").mkdir(parents=True)
    shardio.pack(images, f"{bucket.url}/out", to=options(bucket), work_dir=work)
    assert [one.name for one in work.iterdir()] == ["empty"]


def test_splits_do_not_work_where_one_dataset_is_unfinished(
    images: Path, bucket: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    """Else that one would stay in the working directory for ever: its URL holds splits then."""
    there = bucket.through(proxy.port)
    proxy.rules(Rule("403", method="PUT", path="manifest.json"))
    with pytest.raises(StorageError, match="cannot write"):
        shardio.pack(images, f"{there.url}/out", to=options(there))
    write(tmp_path / "splits" / "train", 3)
    with pytest.raises(ExistsError, match="an unfinished packing of one dataset is in this"):
        shardio.pack(tmp_path / "splits", f"{bucket.url}/out", to=options(bucket))
    proxy.rules()
    (done,) = shardio.pack(images, f"{there.url}/out", to=options(there))
    assert done.kept == done.shards


@pytest.mark.parametrize("same", [True, False])
def test_another_packer_may_be_faster(bucket: ObjectStore, tmp_path: Path, same: bool) -> None:
    """It commits while this one builds, and the store has no lock that tells before."""
    for name, seed in (("theirs", 1), ("ours", 1 if same else 2)):
        (write(tmp_path / name, 3, seed=seed) / "class0" / "text.jpg").write_bytes(b"no image")
    (tmp_path / "theirs" / "class1" / "text.jpg").write_bytes(b"no image")
    if same:
        (tmp_path / "ours" / "class1" / "text.jpg").write_bytes(b"no image")
        for path in tmp_path.glob("*/class?/text.jpg"):
            os.utime(path, (1, 1))
    given = dict(to=options(bucket), on_error="skip", jobs=1)
    out, theirs = f"{bucket.url}/out", []

    def progress(done: int, total: int) -> None:
        if not theirs:
            theirs.append(1)
            shardio.pack(tmp_path / "theirs", out, work_dir=tmp_path / "work", **given)
            theirs.extend([bucket.sizes(), fetched(bucket, "out", tmp_path / "before")])

    if same:
        shardio.pack(tmp_path / "ours", out, progress=progress, **given)
    else:
        with pytest.raises(ExistsError, match="another dataset is packed here"):
            shardio.pack(tmp_path / "ours", out, progress=progress, **given)
    after = fetched(bucket, "out", tmp_path / "after")
    assert {name: after[name] for name in theirs[2]} == theirs[2]


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["503", "reset_midway", "lost", "429", "500"])
def test_faults_that_pass_cost_retries_alone(
    images: Path, packed: Path, bucket: ObjectStore, proxy: FaultProxy, tmp_path: Path, kind: str
) -> None:
    there = bucket.through(proxy.port)
    proxy.rules(Rule(kind, method="PUT", numbers=[0, 3, 4, 9]), Rule(kind, method="HEAD", times=1))
    shardio.pack(images, f"{there.url}/out", shard_size=SHARD, to=options(there))
    assert sum(proxy.figures().faults.values()) > 2
    assert fetched(bucket, "out", tmp_path) == files(packed)


def test_faults_that_stay_leave_no_manifest_and_lose_nothing(
    images: Path, packed: Path, bucket: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    there = bucket.through(proxy.port)
    once = {"retry_config": {"max_retries": 0}, **there.options}
    last = max(path.name for path in packed.glob("*.shard"))
    proxy.rules(Rule("500", method="PUT", path=last))
    to = Storage(options=once, timeout_s=4)
    with pytest.raises(StorageError, match=rf"/out/{last}: .*500"):
        shardio.pack(images, f"{there.url}/out", shard_size=SHARD, to=to, jobs=1)
    assert "manifest.json" not in names(bucket) and len(names(bucket)) > 3
    with pytest.raises(NotPackedError):
        shardio.open(f"{there.url}/out", storage=options(there))
    complete = names(bucket)
    proxy.rules()
    proxy.reset()
    (done,) = shardio.pack(images, f"{there.url}/out", shard_size=SHARD, to=options(there))
    assert done.kept == done.shards  # the last was built, and is uploaded now
    assert not any(puts(proxy, name) for name in complete)
    assert fetched(bucket, "out", tmp_path) == files(packed)


def test_a_shard_goes_up_while_the_next_one_is_built(
    bucket: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    """So credentials that may not write are told with the first shard, not hours later."""
    there = bucket.through(proxy.port)
    source = write(tmp_path / "source", 200, 3_000)
    proxy.rules(Rule("403", method="PUT"))
    seen: list[int] = []

    def progress(done: int, total: int) -> None:
        if len(seen) < 2 and done > total // 8:  # shards of an eighth: the first one is built
            proxy.wait(faults=1)  # waits for the upload, or fails
            seen.append(done)

    work = tmp_path / "work"
    total = sum(path.stat().st_size for path in source.rglob("*.jpg"))
    given = dict(shard_size=total // 8, jobs=1, work_dir=work, to=options(there))
    with pytest.raises(StorageError, match=r"00000-.*cannot write: .*403.*\n.*is kept: run"):
        shardio.pack(source, f"{there.url}/out", progress=progress, **given)
    assert seen and not bucket.sizes()
    proxy.rules()
    (done,) = shardio.pack(source, f"{there.url}/out", **given)
    assert done.kept > 0 and not work.exists()


def test_a_part_that_takes_long_is_no_failure(
    bucket: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    """No answer comes before the last byte is sent, however long the link takes for that."""
    there = bucket.through(proxy.port)
    source = write(tmp_path / "source", 40, 75_000)
    size = sum(path.stat().st_size for path in source.rglob("*.jpg"))
    proxy.limits(bandwidth=size / 4)
    to = Storage(options=there.options, timeout_s=10)  # a read is given up after 2.5 s
    shardio.pack(source, f"{there.url}/out", to=to)
    assert puts(proxy) == len(names(bucket))  # all at the first attempt


# --- interrupted ----------------------------------------------------------------------------------


def command(images: Path, there: ObjectStore, *more: object) -> list[str]:
    given = [part for k, v in there.options.items() for part in ("--target-option", f"{k}={v}")]
    sized = ("--shard-size", SHARD, "--jobs", 1)
    return [*map(str, ("pack", images, f"{there.url}/out", *sized, *given, *more))]


def start(arguments: list[str]) -> warm_python.Process:
    return warm_python.Process(
        trees.warm_command(*arguments),
        env=environment(XDG_CACHE_HOME=os.environ["XDG_CACHE_HOME"]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize("given", [False, True])
def test_a_packing_that_is_interrupted_says_where_its_work_lies(
    images: Path, bucket: ObjectStore, proxy: FaultProxy, tmp_path: Path, given: bool
) -> None:
    there, work = bucket.through(proxy.port), tmp_path / "work"
    proxy.rules(Rule("stall", method="PUT"))
    process = start(command(images, there, *(["--work-dir", work] if given else [])))
    proxy.wait(faults=1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    [work] = [work] if given else (tmp_path / "caches" / "shardio").iterdir()
    assert said.decode() == (
        "shardio: interrupted: what is finished is kept; run the same command again to go on; "
        f"until then, unfinished work lies in {work}\n"
    )


@pytest.mark.parametrize("place", [0, -1, "manifest.json"])
def test_a_packing_that_is_killed_goes_on_where_it_was(
    images: Path,
    packed: Path,
    bucket: ObjectStore,
    proxy: FaultProxy,
    tmp_path: Path,
    place: int | str,
) -> None:
    there = bucket.through(proxy.port)
    shards = sorted(path.name for path in packed.glob("*.shard"))
    stalled = place if isinstance(place, str) else shards[place]
    proxy.rules(Rule("stall", method="PUT", path=stalled))
    process = start(command(images, there))
    proxy.wait(faults=1)
    process.kill()
    process.communicate()
    proxy.settle()  # the store may have what the process has not heard of
    complete = names(bucket)
    assert stalled not in complete and "manifest.json" not in complete
    proxy.rules()
    proxy.reset()
    if place == 4:  # what lies in the store is looked at, not believed
        lost = shards[1]
        bucket.delete([name for name in bucket.sizes() if name.endswith(lost)])
        complete -= {lost}
    (done,) = shardio.pack(images, f"{there.url}/out", shard_size=SHARD, to=options(there))
    assert done.committed and done.kept >= len(complete) - 4  # notes of the last may be missing
    assert not any(puts(proxy, name) for name in complete)
    assert fetched(bucket, "out", tmp_path / "fetched") == files(packed)
    assert not any((tmp_path / "caches" / "shardio").iterdir())


def test_a_packing_that_was_killed_after_its_commit_is_cleaned_up(
    images: Path, bucket: ObjectStore, tmp_path: Path
) -> None:
    """The manifest is there, and so is the journal: the next run removes what is left."""
    work, to = tmp_path / "work", options(bucket)
    given = dict(shard_size=SHARD, to=to, work_dir=work)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardio.packing.output_dir.Owner.clean", lambda owner, keep: owner.release())
        shardio.pack(images, f"{bucket.url}/out", **given)
    assert any(work.iterdir())
    assert shardio.pack(images, f"{bucket.url}/out", **given)[0].already
    assert not work.exists()


def test_a_damaged_note_is_not_believed(
    images: Path, packed: Path, bucket: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    there, work = bucket.through(proxy.port), tmp_path / "work"
    proxy.rules(Rule("403", method="PUT", path="manifest.json"))  # it is told at once
    to = options(there)
    given = dict(shard_size=SHARD, work_dir=work)
    with pytest.raises(StorageError, match=r"manifest\.json"):
        shardio.pack(images, f"{there.url}/out", to=to, **given)
    notes = sorted(work.glob(".shardio-sent-*.json"))
    assert len(notes) == len(list(packed.glob("*.shard"))) and not list(work.glob("*.shard"))
    notes[0].write_bytes(notes[0].read_bytes().replace(b'"records": ', b'"records": 1', 1))
    notes[1].write_bytes(b"")
    proxy.rules()
    proxy.reset()
    (done,) = shardio.pack(images, f"{there.url}/out", to=options(there), **given)
    assert (done.kept, done.built) == (len(notes) - 2, 2)
    assert puts(proxy) == 1  # the manifest: what was built anew is there already
    assert fetched(bucket, "out", tmp_path / "fetched") == files(packed)


def test_an_interrupted_packing_that_has_changed_is_told(
    images: Path, bucket: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    there, work = bucket.through(proxy.port), tmp_path / "work"
    source = write(tmp_path / "source")
    proxy.rules(Rule("403", method="PUT", path="manifest.json"))  # it is told at once
    to = options(there)
    given = dict(shard_size=SHARD, work_dir=work)
    with pytest.raises(StorageError):
        shardio.pack(source, f"{there.url}/out", to=to, **given)
    proxy.rules()
    (source / "class0" / "new.jpg").write_bytes(b"\xff\xd8\xff1")
    with pytest.raises(shardio.errors.SourceChangedError, match="of another plan"):
        shardio.pack(source, f"{there.url}/out", to=options(there), **given)
    restart = PlanOptions(restart=True)
    (done,) = shardio.pack(source, f"{there.url}/out", to=options(there), plan=restart, **given)
    assert done.records == FILES + 1 and done.kept == 0 and not work.exists()


# --- by parts -------------------------------------------------------------------------------------


def slow(*given: Any) -> Any:
    return pytest.param(*given, marks=pytest.mark.slow)


def pack_parts(images: Path, url: str, *parts: str, shard_size: int = SHARD, **more: Any) -> Any:
    for part in parts:
        plan = PlanOptions(part=part)
        done = shardio.pack(images, url, shard_size=shard_size, jobs=1, plan=plan, **more)
    return done


@pytest.mark.parametrize("planned", [slow(False), True])
def test_parts_pack_what_one_process_does(
    images: Path, packed: Path, bucket: ObjectStore, tmp_path: Path, planned: bool
) -> None:
    url, work = f"{bucket.url}/out", tmp_path / "work"
    given: Any = {"to": options(bucket), "work_dir": work}
    there = {"storage": options(bucket), "work_dir": work}
    if planned:
        (one,) = shardio.plan(images, url, shard_size=SHARD, **given)
        assert one.planned and one.records == FILES and not bucket.sizes()
    (done,) = pack_parts(images, url, "2/3", **given)
    assert (done.committed, done.already, done.records) == (False, False, done.records)
    with pytest.raises(NotPackedError, match=r"of parts 1, 3\nNothing was committed"):
        commit(url, parts=3, **there)
    with pytest.raises(NotPackedError, match=r"(?s)shards are not built: 0, .*: waited 0 s"):
        commit(url, wait_s=0, **there)
    pack_parts(images, url, "3/3", "2/3", "1/3", **given)  # one of them twice
    assert "manifest.json" not in names(bucket) and not list(work.glob("*.shard"))
    (done,) = commit(url, wait_s=0, **there)
    assert (done.committed, done.records, done.out) == (True, FILES, url)
    assert fetched(bucket, "out", tmp_path / "fetched") == files(packed)
    assert not work.exists()
    with pytest.raises(NotPackedError, match="already packed; there is nothing to commit"):
        commit(url, wait_s=1, **there)
    assert pack_parts(images, url, "1/3", **given)[0].already  # a scheduler starts it again
    assert not work.exists()
    with pytest.raises(NotPackedError, match="already packed; there is nothing to commit"):
        commit(url, **there)


def test_a_plan_in_a_store_is_listed_once_and_gone_on_with(
    images: Path, packed: Path, bucket: ObjectStore, tmp_path: Path, monkeypatch: Any
) -> None:
    url, given = f"{bucket.url}/out", {"to": options(bucket), "work_dir": tmp_path / "work"}
    shardio.plan(images, url, shard_size=SHARD, **given)
    unlisted(monkeypatch)
    with pytest.raises(
        OptionError, match=r"made here by `shardio plan`:\n  option shard_size: was"
    ):
        pack_parts(images, url, "1/2", shard_size=2 * SHARD, **given)
    shardio.pack(images, url, jobs=1, plan=PlanOptions(part="1/2"), **given)
    (done,) = shardio.pack(images, url, jobs=1, **given)  # all of the rest
    assert done.committed and done.kept > 3
    assert fetched(bucket, "out", tmp_path / "fetched") == files(packed)


def test_a_part_and_a_commit_that_are_killed_are_run_again(
    images: Path, packed: Path, bucket: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    there, work = bucket.through(proxy.port), tmp_path / "work"
    url, store = f"{there.url}/out", {"storage": options(there), "work_dir": work}
    given: Any = {"to": options(there), "work_dir": work}
    sized = {name: f"{value}" for name, value in there.options.items()}
    line = command(images, there, "--part", "2/2", "--work-dir", work)
    pack_parts(images, url, "1/2", **given)
    last = max(path.name for path in packed.glob("*.shard"))
    proxy.rules(Rule("stall", method="PUT", path=last))
    kill_held(proxy, *line)
    proxy.rules()
    proxy.settle()
    complete = names(bucket)
    proxy.reset()
    pack_parts(images, url, "2/2", **given)
    assert not any(puts(proxy, name) for name in complete)
    commits = ["commit", url, "--work-dir", work]
    commits += [word for k, v in sized.items() for word in ("--store-option", f"{k}={v}")]
    for fault in ("timeout", "lost"):  # it is not there; it is there, and nobody knows
        rules = [Rule(fault, path="manifest.json", method="PUT")]
        proxy.rules(*rules)
        proxy.reset()
        kill_held(proxy, *commits)
        proxy.rules()
        proxy.settle()
        assert ("manifest.json" in names(bucket)) == (fault == "lost")
        assert any(work.glob(".shardio-sent-*"))
    (done,) = commit(url, **store)
    assert done.already and not work.exists()
    assert fetched(bucket, "out", tmp_path / "fetched") == files(packed)


def test_parts_of_splits_of_which_a_commit_was_killed_are_named_by_the_next(
    bucket: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    for split in ("train", "val"):
        write(tmp_path / "images" / split, 6)
    shardio.pack(tmp_path / "images", tmp_path / "local", shard_size=SHARD)
    there, work = bucket.through(proxy.port), tmp_path / "work"
    given: Any = {"to": options(there), "work_dir": work}
    url, store = f"{there.url}/out", {"storage": options(there), "work_dir": work}
    pack_parts(tmp_path / "images", url, "1/2", "2/2", **given)
    for lost in ("val/manifest.json", "shardio.json"):
        proxy.rules(Rule("403", path=lost, method="PUT"))
        with pytest.raises(StorageError, match="is kept"):
            commit(url, **store)
        assert not any(name.endswith("shardio.json") for name in bucket.sizes())
    proxy.rules()
    shutil.rmtree(work / "train")  # as one that is killed while it cleans up leaves it
    done = commit(url, **store)
    assert [one.split for one in done] == ["val"] and not work.exists()
    assert fetched(bucket, "out", tmp_path / "fetched") == files(tmp_path / "local")


def test_parts_replace_another_dataset_only_when_asked(
    images: Path, bucket: ObjectStore, tmp_path: Path
) -> None:
    url, given = f"{bucket.url}/out", {"to": options(bucket), "work_dir": tmp_path / "work"}
    there: Any = {"storage": options(bucket), "work_dir": tmp_path / "work"}
    other = write(tmp_path / "other", 5)
    shardio.pack(other, url, to=options(bucket))
    with pytest.raises(ExistsError, match="another dataset is packed here"):
        pack_parts(images, url, "1/1", **given)
    pack_parts(images, url, "1/1", overwrite=True, **given)
    with pytest.raises(ExistsError, match="another dataset is packed here"):
        commit(url, **there)
    assert len(shardio.open(url, decode=None, storage=options(bucket))) == 5
    commit(url, overwrite=True, **there)
    assert len(shardio.open(url, decode=None, storage=options(bucket))) == FILES


def test_a_compaction_that_was_interrupted_is_none_of_parts(
    images: Path, bucket: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    there, work = bucket.through(proxy.port), tmp_path / "work"
    url, to = f"{there.url}/out", options(there)
    shardio.pack(images, url, shard_size=SHARD, to=to)
    shardio.drop(url, keys=["class0/000.jpg"], storage=to)
    before = fetched(bucket, "out", tmp_path / "before")
    proxy.rules(Rule("403", path="manifest.json", method="PUT"))
    with pytest.raises(StorageError):
        shardio.compact(url, jobs=1, storage=to, work_dir=work)
    proxy.rules()
    for overwrite in (False, True):
        with pytest.raises(NotPackedError, match="is no append: a `shardio compact`, perhaps"):
            commit(url, storage=to, work_dir=work, overwrite=overwrite)
    assert fetched(bucket, "out", tmp_path / "after").items() >= before.items()


# --- by the command -------------------------------------------------------------------------------


def test_the_command_says_what_it_did(images: Path, bucket: ObjectStore) -> None:
    said = trees.shardio(*command(images, bucket)).stdout
    assert f"{bucket.url}/out: {FILES} files, 3 classes" in said and "MB/s" in said
    found = trees.shardio_json(*command(images, bucket))
    assert found["datasets"][0]["already"]
    trees.shardio(*command(images, bucket, "--max-records", 5), code=1)
