"""Packing a bucket of images gives, byte for byte, what packing the same folder on disk gives."""

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S, servers, warm_python
from support.fault_proxy import FaultProxy, fault_proxy
from support.faults import Rule
from support.object_stores import ObjectStore
from support.source_stores import other_store, storage, store_arguments
from support.trees import (
    Tree,
    command,
    content,
    environment,
    images,
    noise,
    picture,
    plant,
    shards,
    warm_command,
)

import shardio
from shardio import SourceOptions, Storage
from shardio.errors import (
    NotPackedError,
    OptionError,
    SourceChangedError,
    SourceError,
    StorageError,
)
from shardio.packing.sources import store_folder
from shardio.packing.sources.store_folder import StoreFolder
from shardio.storage.location import locate
from shardio.storage.remote import RemoteLocation

# What lies below one bucket, by folder.
CLASSES: Tree = {
    **images(classes=3, each=6),
    "class1/deep/x y%20ü.jpg": noise("deep", 900),
    "class1/.hidden.jpg": b"hidden",
    ".thumbs/a.jpg": b"hidden",
    "@eaDir/a.jpg": b"of a NAS",
    "class1/deep/@eaDir/x.jpg/SYNOPHOTO_THUMB_S.jpg": b"of a NAS",
    "class2/Thumbs.db": b"of a file manager",
}
BAD: Tree = {**CLASSES, "class0/empty.jpg": b"", "class0/text.jpg": b"no image at all"}
SPLITS: Tree = {
    **{f"train/{key}": value for key, value in images(classes=3, each=3).items()},
    **{f"val/{key}": value for key, value in images(classes=2, each=2).items()},
}
GROUPS: Tree = {
    **{f"{n}.jpg": noise(str(n), 500 + n) for n in range(5)},
    **{f"{n}.txt": f"text {n}".encode() for n in range(1, 5)},
    "0.txt": b"",
    **{f"{n}.cls": b"%d" % n for n in range(4)},
}
MASKS: Tree = {
    **{
        f"{split}/images/{n}.jpg": noise(f"{n}", 500 + n)
        for n in range(3)
        for split in ("train", "val")
    },
    **{
        f"{split}/masks/{n}.png": picture(8, 8, "PNG")
        for n in range(3)
        for split in ("train", "val")
    },
}
FOLDERS: dict[str, Tree] = {
    "classes": CLASSES,
    "bad": BAD,
    "splits": SPLITS,
    "groups": GROUPS,
    "masks": MASKS,
    "loose": {**images(classes=1, each=2), "readme.txt": b"text"},
    "flat": {f"{n}.jpg": noise(str(n), 3_000 + n) for n in range(40)},
    "many": {f"{n}.jpg": noise(str(n), 300 + n) for n in range(160)},
    "large": {"a/1.jpg": noise("large", 20 << 20), "a/2.jpg": noise("small", 100)},
}


pytestmark = pytest.mark.usefixtures("ranges_closed", "warm_starts")


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("there")
    for name, tree in FOLDERS.items():
        plant(root / name, tree)
    return root


@pytest.fixture(scope="module")
def s3(s3: ObjectStore) -> ObjectStore:
    s3.mark("classes/class0")
    s3.mark("classes")
    return s3


def pack(url: str, out: Path, given: Storage, **options: Any) -> Path:
    read = {"storage": given, **options.pop("read", {})}
    shardio.pack(url, out, read=SourceOptions(**read), **{"jobs": 2} | options)
    return out


def same(store: ObjectStore, there: Path, tmp_path: Path, name: str, **options: Any) -> None:
    """Pack a folder from the store and from disk; all files are the same.

    But for times of files that were left out: a store has its own.
    """
    shardio.pack(there / name, tmp_path / "disk", **options)
    out = pack(f"{store.url}/{name}", tmp_path / "bucket", storage(store), **options)
    both = content(out), content(tmp_path / "disk")
    for found in both:
        if (listed := found.get(b"rejected.jsonl")) is not None:
            found[b"rejected.jsonl"] = re.sub(rb', "time": -?\d+', b"", listed)
    assert both[0] == both[1]


@pytest.mark.parametrize("name", ["classes", "splits", "groups", "masks", "flat", "large"])
def test_a_folder_of_a_bucket_is_packed_as_the_same_folder_on_disk(
    name: str, s3: ObjectStore, there: Path, tmp_path: Path
) -> None:
    same(s3, there, tmp_path, name, shard_size=3_000)


def test_files_of_a_bucket_are_paired_by_patterns(
    s3: ObjectStore, there: Path, tmp_path: Path
) -> None:
    fields = {"image": "images/*.jpg", "mask": "masks/*.png"}
    shardio.pack(there / "masks", tmp_path / "disk", read=SourceOptions(fields=fields))
    out = pack(f"{s3.url}/masks", tmp_path / "bucket", storage(s3), read={"fields": fields})
    assert content(out) == content(tmp_path / "disk")


@pytest.mark.parametrize("kind", ["az", "gs", "hf"])
def test_each_store_gives_the_same(
    kind: str, there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shardio.pack(there / "classes", tmp_path / "disk", shard_size=3_000)
    with other_store(kind, there, tmp_path, monkeypatch) as (url, given):
        out = pack(f"{url}/classes", tmp_path / "out", given, shard_size=3_000)
    assert content(out) == content(tmp_path / "disk")


def test_what_cannot_be_packed_is_listed_as_of_a_folder_on_disk(
    s3: ObjectStore, there: Path, tmp_path: Path
) -> None:
    found = []
    for source in (str(there / "bad"), f"{s3.url}/bad"):
        with pytest.raises(SourceError) as caught:
            pack(source, tmp_path / "out", storage(s3))
        found.append(str(caught.value).replace(source, "SRC"))
    assert found[0] == found[1]
    assert "class0/empty.jpg: is empty" in found[0]
    assert "class0/text.jpg: is not an image" in found[0]
    same(s3, there, tmp_path, "bad", on_error="skip")
    for source in (there / "loose", f"{s3.url}/loose"):
        with pytest.raises(SourceError, match=r"loose: 1 file beside class folders(.|\n)*readme"):
            pack(str(source), tmp_path / "loose", storage(s3))


def test_images_are_encoded_on_the_way(s3: ObjectStore, tmp_path: Path) -> None:
    root = plant(tmp_path / "real", {f"a/{n}.jpg": picture(40 + n, 30) for n in range(4)})
    s3.put_folder(root, "real/")
    options: Any = {"resize": 16, "images": shardio.ImageOptions(encode="raw")}
    same(s3, tmp_path, tmp_path, "real", **options)


def test_a_listing_names_files_of_a_store(s3: ObjectStore, there: Path, tmp_path: Path) -> None:
    rows = [f"class{c}/00{n}.jpg,{c}" for c in range(3) for n in range(6)]
    listing = tmp_path / "train.csv"
    listing.write_text("\n".join(["path,label", *rows, "./class1/deep/x y%20ü.jpg,1"]) + "\n")
    disk = SourceOptions(root=there / "classes")
    shardio.pack(listing, tmp_path / "disk", read=disk)
    with servers.nginx(there) as web:
        for name, root in (("s3", f"{s3.url}/classes"), ("web", f"{web.url}/classes")):
            pack(
                str(listing),
                tmp_path / name,
                storage(s3) if name == "s3" else Storage(),
                read={"root": root},
            )
            assert content(tmp_path / name) == content(tmp_path / "disk")
        listing.write_text(
            "\n".join(["path,label", *rows, "class1/gone.jpg,1", "../bad/class0/000.jpg,0"])
        )
        for root in (f"{s3.url}/classes", f"{web.url}/classes"):
            with pytest.raises(SourceError) as caught:
                pack(
                    str(listing),
                    tmp_path / f"x{root[0]}",
                    storage(s3) if "s3" in root else Storage(),
                    read={"root": root},
                )
            assert "class1/gone.jpg: there is no such file" in str(caught.value)
            assert "bad/class0/000.jpg: is no path below" in str(caught.value)


@pytest.mark.parametrize("denied", [False, True])
def test_files_that_a_table_names_are_looked_at_one_by_one_where_that_is_less(
    denied: bool,
    s3: ObjectStore,
    proxy: FaultProxy,
    there: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listing = tmp_path / "some.csv"
    listing.write_text("path\n" + "".join(f"{number}.jpg\n" for number in range(12)))
    shardio.pack(listing, tmp_path / "disk", read=SourceOptions(root=there / "flat"))
    if denied:  # buckets may let all read that know a name, and nobody list
        proxy.rules(Rule("403", path="list-type"))
    else:
        monkeypatch.setattr(store_folder, "PAGE", 0)
        monkeypatch.setattr(store_folder, "WORTH", 2)  # there are 40 objects
    given = storage(s3, proxy)
    pack(str(listing), tmp_path / "out", given, read={"root": f"{s3.url}/flat"})
    assert content(tmp_path / "out") == content(tmp_path / "disk")
    looks = {one.path for one in proxy.figures().log if one.method == "HEAD"}
    assert len(looks) == 12
    monkeypatch.undo()
    proxy.rules()
    proxy.reset()
    pack(str(listing), tmp_path / "listed", given, read={"root": f"{s3.url}/flat"})
    assert content(tmp_path / "listed") == content(tmp_path / "disk")
    assert not [one for one in proxy.figures().log if one.method == "HEAD"]


def test_annotations_of_coco_name_files_of_a_store(
    s3: ObjectStore, there: Path, tmp_path: Path
) -> None:
    entries = [{"id": n, "file_name": f"{n}.jpg"} for n in range(40)]
    listing = tmp_path / "instances_x.json"
    listing.write_text(json.dumps({"images": entries, "annotations": [], "categories": []}))
    shardio.pack(listing, tmp_path / "disk", read=SourceOptions(root=there / "flat"))
    out = pack(str(listing), tmp_path / "out", storage(s3), read={"root": f"{s3.url}/flat"})
    assert content(out) == content(tmp_path / "disk")


@pytest.mark.parametrize(
    ("kind", "why"), [("changed", "its ETag is another"), ("404", "it is gone")]
)
@pytest.mark.parametrize("jobs", [1, 2])
def test_an_object_that_is_another_than_was_listed_is_an_error(
    kind: str, why: str, jobs: int, s3: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    proxy.rules(Rule(kind, path=r"flat/17\.jpg", method="GET"))
    with pytest.raises(SourceChangedError, match=rf"17\.jpg: changed since .*{why}.*--restart"):
        pack(f"{s3.url}/flat", tmp_path / "out", storage(s3, proxy), shard_size=20_000, jobs=jobs)


def test_an_object_of_another_size_is_an_error(s3: ObjectStore, tmp_path: Path) -> None:
    for size in (500, 600, 400, 0):
        (tmp_path / "a.jpg").write_bytes(noise("a", 500))
        s3.put({"sized/a.jpg": tmp_path / "a.jpg"})
        location = locate(f"{s3.url}/sized", storage(s3))
        assert isinstance(location, RemoteLocation)
        folder = StoreFolder(location)
        (key,), (listed,), (stamp,), *_ = folder.walk()
        (tmp_path / "a.jpg").write_bytes(noise("other", size)[:size])
        s3.put({"sized/a.jpg": tmp_path / "a.jpg"})
        with folder.opened() as read:
            with pytest.raises(SourceChangedError, match=r"a\.jpg: changed"):
                read(key, int(listed), int(stamp))
            folder.will_need(key, int(listed))
            with pytest.raises(SourceChangedError, match=r"a\.jpg: changed"):
                read(key, int(listed), int(stamp))


def test_faults_on_the_way_change_nothing(
    s3: ObjectStore, proxy: FaultProxy, there: Path, tmp_path: Path
) -> None:
    proxy.rules(
        Rule("503", path="list-type", times=1),
        Rule("reset_midway", path="list-type", times=1),
        Rule("5xx", fraction=0.1, seed=1),
        Rule("short", fraction=0.1, seed=2),
        Rule("reset", fraction=0.05, seed=3),
    )
    shardio.pack(there / "flat", tmp_path / "disk", shard_size=20_000)
    out = pack(f"{s3.url}/flat", tmp_path / "out", storage(s3, proxy), shard_size=20_000)
    assert content(out) == content(tmp_path / "disk")
    assert sum(proxy.figures().faults.values()) >= 5


def test_a_store_that_fails_for_good_ends_the_packing_which_goes_on_later(
    s3: ObjectStore, proxy: FaultProxy, there: Path, tmp_path: Path
) -> None:
    proxy.rules(Rule("500", path=r"flat/39\.jpg", method="GET"))
    out, url = tmp_path / "out", f"{s3.url}/flat"
    with pytest.raises(
        StorageError, match=r"(answered 500|in time)(.|\n)*run the same command again"
    ):
        pack(url, out, storage(s3, proxy, timeout_s=4), shard_size=20_000, on_error="skip", jobs=1)
    with pytest.raises(NotPackedError):
        shardio.open(out)
    proxy.rules()
    pack(url, out, storage(s3, proxy), shard_size=20_000, on_error="skip")
    shardio.pack(there / "flat", tmp_path / "disk", shard_size=20_000)
    assert content(out) == content(tmp_path / "disk")


def test_a_packing_that_is_killed_goes_on_where_it_was(
    s3: ObjectStore, proxy: FaultProxy, there: Path, tmp_path: Path
) -> None:
    out, url = tmp_path / "out", f"{s3.url}/flat"
    arguments = ["pack", url, out, "--shard-size", "10000", "--jobs", "1"]
    arguments += store_arguments(s3.through(proxy.port))
    # All are announced, one is never answered: what was finished before it is kept.
    proxy.rules(Rule("timeout", path=r"flat/.*jpg", method="GET", numbers=[*range(25, 1000)]))
    process = warm_python.Process(
        warm_command(*arguments),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    proxy.wait(requests=26)
    while len(shards(out)) < 3 and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    kept = {path.name for path in shards(out)}
    assert len(kept) >= 3
    proxy.rules()
    proxy.reset()
    pack(url, out, storage(s3, proxy), shard_size=10_000, jobs=1)
    assert kept <= {path.name for path in shards(out)}
    read = {one.path for one in proxy.figures().log if ".jpg" in one.path}
    assert len(read) <= 40 - 3 * len(kept)
    shardio.pack(there / "flat", tmp_path / "disk", shard_size=10_000)
    assert content(out) == content(tmp_path / "disk")


def test_what_changed_between_two_runs_is_told(
    s3: ObjectStore, there: Path, tmp_path: Path
) -> None:
    s3.put_folder(there / "flat", "changing/")
    out, url = tmp_path / "out", f"{s3.url}/changing"
    with fault_proxy(s3.port) as proxy:
        proxy.rules(Rule("500", path=r"changing/39\.jpg", method="GET"))
        with pytest.raises(StorageError):
            pack(url, out, storage(s3, proxy, 4), shard_size=6_000, jobs=1)
    other = tmp_path / "7.jpg"
    other.write_bytes(noise("other", 3_007))
    s3.put({"changing/7.jpg": other})  # of the same size
    with pytest.raises(SourceChangedError, match=r"7\.jpg was changed"):
        pack(url, out, storage(s3), shard_size=6_000)


def test_objects_are_asked_for_once_and_many_at_a_time(
    s3: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    proxy.limits(gather=8, of=r"\.jpg")
    pack(f"{s3.url}/flat", tmp_path / "out", storage(s3, proxy))
    figures = proxy.figures()
    asked = [one for one in figures.log if one.method == "GET" and ".jpg" in one.path]
    assert len({one.path for one in asked}) == 40
    assert len(asked) <= 48  # second requests for slow ones: four of each process
    assert 8 <= figures.most_concurrent <= 64


def test_processes_share_the_requests_of_the_machine(
    s3: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    proxy.limits(gather=16, of=r"\.jpg")
    pack(f"{s3.url}/many", tmp_path / "out", storage(s3, proxy), jobs=4, shard_size=18_000)
    assert 16 <= proxy.figures().most_concurrent <= 64  # of all four together


def test_a_packed_dataset_is_read_without_a_listing(
    s3: ObjectStore, proxy: FaultProxy, there: Path, tmp_path: Path
) -> None:
    shardio.pack(there / "splits", tmp_path / "packed")
    s3.put_folder(tmp_path / "packed", "packed/")
    given = storage(s3, proxy)
    assert len(shardio.open(f"{s3.url}/packed/train", storage=given)) == 9
    pack(f"{s3.url}/packed", tmp_path / "again", given)
    assert not [one for one in proxy.figures().log if "list-type" in one.path]


def test_what_is_packed_otherwise_is_refused_with_the_way(
    s3: ObjectStore, there: Path, tmp_path: Path
) -> None:
    given = storage(s3)
    with pytest.raises(OptionError, match="give the URL of its images as --root"):
        pack(f"{s3.url}/a.csv", tmp_path / "out", given, read={"kind": "listing"})
    for name, error, why in (
        ("nothing", SourceError, "/nothing: no object is below this URL"),
        ("nothing.tar", SourceError, "/nothing.tar: no object is below this URL"),
        ("flat/0.jpg", SourceError, "it is an object, no folder"),
        ("flat/manifest.json", NotPackedError, f"give the URL of its folder, {s3.url}/flat"),
        ("flat/00000-0.shard", NotPackedError, f"give the URL of its folder, {s3.url}/flat"),
    ):
        with pytest.raises(error, match=why):
            pack(f"{s3.url}/{name}", tmp_path / "out", given)
    assert not os.path.exists(tmp_path / "out")


def test_the_command_line_takes_urls_and_options(
    s3: ObjectStore, there: Path, tmp_path: Path
) -> None:
    arguments = ["pack", f"{s3.url}/classes", tmp_path / "out", "--jobs", "2", "--timeout", "20"]
    arguments += store_arguments(s3)
    done = subprocess.run(
        command(*arguments), env=environment(), capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    assert "19 files, 3 classes" in done.stdout
    shardio.pack(there / "classes", tmp_path / "disk")
    assert content(tmp_path / "out") == content(tmp_path / "disk")
