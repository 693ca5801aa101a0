"""An archive behind a URL is the dataset of the archive on disk, and of the unpacked folder."""

import gzip
import json
import os
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from support import LIMIT_S, servers, warm_python
from support.archives import FORMS, class_tars, deflated, tar, write, zipped
from support.fault_proxy import FaultProxy, fault_proxy
from support.faults import Rule
from support.object_stores import ObjectStore
from support.packing import grouped, interrupted
from support.servers import Web
from support.source_stores import other_store, storage, store_arguments
from support.trees import JPEG, Tree, content, environment, images, noise, plant, warm_command

import shardio
from shardio import PlanOptions, SourceOptions, Storage
from shardio.errors import OptionError, SourceChangedError, SourceError, StorageError
from shardio.packing.packed import Packed
from shardio.packing.sources.archives import folder as archive_folder
from shardio.packing.sources.archives.folder import ArchiveFolder, open_archive
from shardio.packing.sources.archives.inflate import Inflating
from shardio.packing.sources.store_reader import look_at
from shardio.storage.location import locate
from shardio.storage.remote import RemoteLocation

TREE: Tree = {
    **{f"{name}/{n}.jpg": noise(f"{name}{n}", 90 + n) for name in "abc" for n in range(6)},
    "b/deep/er/x.png": b"\x89PNG\r\n\x1a\n" + bytes(90),
    "c/.hidden.jpg": b"hidden",
    "c/@eaDir/x.jpg": b"of a NAS",
}
PAIRS: Tree = {
    f"{n}.{end}": data for n in range(9) for end, data in (("jpg", JPEG), ("txt", b"text"))
}
ALIKE = ("gnu.tar", "ustar.tar", "dot.tar", "wrapped_twice.tar", "a.tar.gz", "wrapped.zip")
# What lies below one bucket, and in the folder of one server.
ARCHIVES: Tree = {
    **{form: make(TREE) for form, make in FORMS.items()},
    "food.tar": tar({f"food/images/{key}": data for key, data in TREE.items()}),
    "flat.zip": deflated({f"pics/{n}.jpg": noise(str(n), 300 + n) for n in range(40)}),
    "flat.tar": tar({f"a/{n}.jpg": noise(str(n), 3_000 + n) for n in range(40)}),
    "pairs.tar": tar(PAIRS),
    "both.tar": tar(
        {f"{c}/{n}.{end}": JPEG for c in "ab" for n in range(150) for end in ("jpg", "txt")}
    ),
    "pairs.zip": zipped(PAIRS),
    **{f"classes/{os.fsdecode(name)}": data for name, data in class_tars(TREE).items()},
    **{f"halves/train_{n}.tar": tar(dict(list(TREE.items())[n::2]), "data/") for n in range(2)},
    **{f"numbered/{n:05}.tar": tar({f"{n}{i}.jpg": JPEG for i in "ab"}) for n in range(3)},
    **{f"shards/{n:05}.tar": tar({f"{n}-{key}": v for key, v in PAIRS.items()}) for n in range(2)},
    "page.zip": b"<!DOCTYPE html><html><body>Log in to download</body></html>" * 9,
    "short.tar": tar(TREE)[:-9_000],
}


pytestmark = pytest.mark.usefixtures("ranges_closed", "warm_starts")


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = plant(tmp_path_factory.mktemp("there"), ARCHIVES)
    for path in root.rglob("*"):
        os.utime(path, ns=(10**18, 10**18))
    return root


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> dict[bytes, bytes]:
    """What the folder gives."""
    root = tmp_path_factory.mktemp("right")
    shardio.pack(plant(root / "tree", TREE), root / "out", **SMALL)
    return content(root / "out")


SMALL: Any = grouped({"max_records": 9})


def pack(url: Any, out: Path, given: Storage | None = None, **options: Any) -> list[Packed]:
    read = {"storage": given or Storage(timeout_s=20)} | options.pop("read", {})
    return shardio.pack(url, out, read=SourceOptions(**read), **{"jobs": 1} | SMALL | options)


def members(url: str, name: str, given: Storage, out: Path | None = None) -> ArchiveFolder:
    location = locate(url, given)
    assert isinstance(location, RemoteLocation)
    return open_archive(look_at(location, name), Inflating(out and str(out)))[0]


# --- the same dataset -----------------------------------------------------------------------------


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ALIKE])
def test_every_form_of_archive_is_the_dataset_of_the_folder(
    form: str, s3: ObjectStore, right: dict[bytes, bytes], tmp_path: Path
) -> None:
    given = storage(s3)
    [dry] = pack(f"{s3.url}/{form}", tmp_path / "dry", given, dry_run=True)
    assert not (tmp_path / "dry").exists()
    [done] = pack(f"{s3.url}/{form}", tmp_path / "out", given, jobs=2)
    assert content(tmp_path / "out") == right
    assert (dry.records, dry.shards, dry.classes) == (done.records, done.shards, done.classes)


@pytest.mark.parametrize("form", ["pax.tar", "a.tgz", "of class tars, wrapped.zip"])
def test_a_server_of_the_web_gives_the_same(
    form: str, web: Web, right: dict[bytes, bytes], tmp_path: Path
) -> None:
    """Its path may be followed by a query, as a signed one's is."""
    pack(f"{web.url}/{quote(form)}?key=a%2Fb", tmp_path / "out", jobs=2)
    assert content(tmp_path / "out") == right
    assert all("key=a" in one.path for one in web.requests() if "key" in one.path)


@pytest.mark.parametrize("kind", ["az", "gs", "hf"])
def test_each_store_gives_the_same(
    kind: str,
    there: Path,
    right: dict[bytes, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with other_store(kind, there, tmp_path, monkeypatch) as (url, given):
        for name in ("pax.tar", "deflated.zip", "a.tgz", "classes"):
            pack(f"{url}/{name}", tmp_path / name, given)
            assert content(tmp_path / name) == right


@pytest.mark.parametrize("size", [100, 2_000_000])
def test_a_url_may_be_signed_for_get_alone(
    size: int, web: Web, there: Path, tmp_path: Path
) -> None:
    """All of it is asked for once, to see what it is, and let go of after the size of a page.

    Linux may hold 10 MB of it by then, in the buffers of both ends of the connection.
    """
    members = {f"a/{n}.jpg": JPEG + bytes(size) for n in range(3)}
    write(there / "signed.zip", zipped(members | {"a/.ignored": bytes(16 * size)}))
    with fault_proxy(web.port, Rule("403", method="HEAD")) as proxy:
        assert pack(f"{proxy.url}/signed.zip?X-Amz=1", tmp_path / "out")[0].records == 3
        assert proxy.figures().needed < 3 * size + 1_000_000 + 12_000_000


def test_a_path_leads_through_an_archive(
    s3: ObjectStore, web: Web, right: dict[bytes, bytes], tmp_path: Path
) -> None:
    for name, url in (("s3", s3.url), ("web", web.url)):
        given = storage(s3)
        pack(f"{url}/food.tar/food/images/", tmp_path / name, given if name == "s3" else None)
        assert content(tmp_path / name) == right
    with pytest.raises(SourceError, match=r"no folder food/x/ in food.tar; at its top 1"):
        pack(f"{s3.url}/food.tar/food/x", tmp_path / "none", storage(s3))


def test_parts_and_a_plan_made_ahead_make_the_same_bytes(
    s3: ObjectStore, right: dict[bytes, bytes], tmp_path: Path
) -> None:
    for form in ("pax.tar", "deflated.zip", "a.tar.xz"):
        read, out = SourceOptions(storage=storage(s3)), tmp_path / form
        shardio.plan(f"{s3.url}/{form}", out, read=read, plan=PlanOptions(max_records=9))
        for part in (2, 1):
            plan = PlanOptions(max_records=9, part=(part, 2))
            shardio.pack(f"{s3.url}/{form}", out, jobs=1, read=read, plan=plan)
        assert shardio.commit(out, jobs=1)[0].committed
        found = content(out)
        assert [found[name] for name in right if name.endswith(b".shard")] == [
            data for name, data in right.items() if name.endswith(b".shard")
        ]
        assert not [name for name in found if b"unpacked" in name]


@pytest.mark.parametrize(("name", "times"), [("pax.tar", 1), ("classes", 3), ("plain", 0)])
def test_what_is_planned_ahead_is_not_listed_in_each_process(
    name: str,
    times: int,
    s3: ObjectStore,
    proxy: FaultProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Archives are read once; of a folder of images nothing is listed again."""
    s3.put_folder(plant(tmp_path / "plain", TREE), "plain/")
    read, ahead = SourceOptions(storage=storage(s3, proxy)), PlanOptions(max_records=3)
    shardio.plan(f"{s3.url}/{name}", tmp_path / "out", read=read, plan=ahead)
    monkeypatch.setattr(archive_folder, "_INDEX_CACHE", {})  # as in a process of its own
    proxy.reset()
    pack(f"{s3.url}/{name}", tmp_path / "out", storage(s3, proxy), jobs=3, plan=ahead)
    log = proxy.figures().log
    assert name == "classes" or not [one for one in log if "list-type" in one.path]
    heads = [one for one in log if one.range.startswith("bytes=0-") and ".tar" in one.path]
    assert len(heads) == times


@pytest.mark.parametrize("name", ["classes", "halves"])
def test_a_folder_of_archives_is_one_folder(
    name: str, s3: ObjectStore, right: dict[bytes, bytes], tmp_path: Path
) -> None:
    pack(f"{s3.url}/{name}", tmp_path / "out", storage(s3), jobs=2)
    assert content(tmp_path / "out") == right


def test_which_kind_it_is_is_told_as_on_disk(s3: ObjectStore, there: Path, tmp_path: Path) -> None:
    for name, kind in (
        ("pairs.tar", "webdataset"),
        ("shards", "webdataset"),
        ("pairs.zip", "files"),
    ):
        [done] = pack(f"{s3.url}/{name}", tmp_path / name, storage(s3))
        [disk] = pack(there / name, tmp_path / f"disk {name}")
        assert (done.source, disk.source) == (kind, kind)
        assert content(tmp_path / name) == content(tmp_path / f"disk {name}")
    for url in (there, s3.url):  # the first 250 members are of one folder
        with pytest.raises(OptionError, match="--from webdataset   all files of one name"):
            pack(f"{url}/both.tar", tmp_path / "none", storage(s3))
    with pytest.raises(OptionError, match=r"numbered.*\n.*each tar is a class"):
        pack(f"{s3.url}/numbered", tmp_path / "none", storage(s3))
    read = {"kind": "imagefolder"}
    assert pack(f"{s3.url}/numbered", tmp_path / "some", storage(s3), read=read)[0].classes == 3


def test_the_root_of_a_listing_or_of_coco_may_be_an_archive(
    s3: ObjectStore, web: Web, there: Path, tmp_path: Path
) -> None:
    rows = "".join(f"{n}.jpg,{n % 2}\n" for n in range(40))
    (tmp_path / "t.csv").write_text(f"path,label\n{rows}")
    entries = [{"id": n, "file_name": f"{n}.jpg"} for n in range(40)]
    coco = {"images": entries, "annotations": [], "categories": []}
    (tmp_path / "instances_x.json").write_text(json.dumps(coco))
    for name in ("t.csv", "instances_x.json"):
        roots = {"disk": f"{there}/flat.zip/pics", "web": f"{web.url}/flat.zip/pics",
                 "s3": f"{s3.url}/flat.zip/pics"}  # fmt: skip
        for kind, root in roots.items():
            given = storage(s3) if kind == "s3" else None
            pack(tmp_path / name, tmp_path / f"{kind} {name}", given, read={"root": root})
            assert content(tmp_path / f"{kind} {name}") == content(tmp_path / f"disk {name}")


def test_files_of_labels_may_lie_in_a_store(
    s3: ObjectStore, web: Web, there: Path, tmp_path: Path
) -> None:
    text = "".join(f"{n} {n % 3}\n" for n in range(40))
    (there / "labels.txt").write_text(text)
    (there / "some.txt").write_text(text[: len(text) // 2].rpartition("\n")[0])
    s3.put({name: there / name for name in ("labels.txt", "some.txt")})
    for where in (str(there), web.url, s3.url):
        out = tmp_path / where.partition(":")[0].strip("/").replace("/", "-")
        read = {
            "tables": [f"{where}/labels.txt:name,label"],
            "split_files": {"train": f"{where}/some.txt"},
        }
        pack(f"{where}/flat.zip/pics", out, storage(s3) if where == s3.url else None, read=read)
        assert content(out) == content(tmp_path / str(there).strip("/").replace("/", "-"))
    with pytest.raises(SourceError, match=r"s3://.*/none.csv: there is no such file"):
        read = {"tables": [f"{s3.url}/none.csv"]}
        pack(f"{s3.url}/flat.zip/pics", tmp_path / "none", storage(s3), read=read)


# --- how it is read -------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "size"), [(3_000, 100), (80, 300_000)])
def test_headers_of_small_members_are_read_by_large_ranges(
    count: int, size: int, s3: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    tree: Tree = {f"a/{i}.jpg": JPEG + bytes(size) for i in range(count)}
    path = write(tmp_path / "x.tar", tar(tree))
    s3.put({"many.tar": path})
    assert len(members(s3.url, "many.tar", storage(s3, proxy)).walk().keys) == count
    figures = proxy.figures()
    assert figures.requests < 70
    assert figures.needed < 1.1 * path.stat().st_size


def test_large_members_are_passed_over(s3: ObjectStore, proxy: FaultProxy, tmp_path: Path) -> None:
    """Among them a tar, whose members are small and read by large ranges."""
    inner = tar({f"{i}.jpg": JPEG for i in range(500)})
    tree: Tree = {f"{i}.tar": tar({f"{i}.jpg": JPEG + bytes(3 << 20)}) for i in range(8)}
    s3.put({"large.tar": write(tmp_path / "x.tar", tar(tree | {"small.tar": inner}))})
    folder = members(s3.url, "large.tar", storage(s3, proxy))
    assert len(folder.walk().keys) == 508
    figures = proxy.figures()
    assert figures.requests < 70
    assert figures.needed < 4 << 20


def test_of_a_zip_its_directory_is_read(s3: ObjectStore, proxy: FaultProxy, tmp_path: Path) -> None:
    tree: Tree = {f"a/{i}.jpg": JPEG + os.urandom(2_000) for i in range(1_000)}
    s3.put({"many.zip": write(tmp_path / "x.zip", deflated(tree))})
    assert len(members(s3.url, "many.zip", storage(s3, proxy)).walk().keys) == 1_000
    assert proxy.figures().requests < 12
    assert proxy.figures().sent < 400_000


@pytest.mark.parametrize("name", ["flat.tar", "flat.zip"])
def test_members_are_asked_for_once_and_many_at_a_time(
    name: str, s3: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    """Eight wait for one another: one after the other would never be answered."""
    folder = members(s3.url, name, storage(s3, proxy), tmp_path / "out")
    walked = folder.walk()
    proxy.reset()
    proxy.limits(gather=8)
    with folder.opened() as read:
        for key, size in zip(walked.keys, walked.sizes, strict=True):
            folder.will_need(key, int(size))
        for key, size, stamp in zip(walked.keys, walked.sizes, walked.mtimes, strict=True):
            assert len(read(key, int(size), int(stamp))) == size
    figures = proxy.figures()
    assert len({one.range for one in figures.log}) == 40
    assert figures.requests <= 44  # second requests for slow ones
    proxy.reset()
    proxy.limits(gather=8, of="^GET")  # this process has listed it already
    read = {"kind": "imagefolder"}
    pack(f"{s3.url}/{name}", tmp_path / "out", storage(s3, proxy), read=read, plan=None)
    assert len({one.range for one in proxy.figures().log if one.range}) == 40


def test_what_is_compressed_is_downloaded_once(
    s3: ObjectStore,
    proxy: FaultProxy,
    right: dict[bytes, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After an interruption what was unpacked is taken again."""
    tree = {f"c{i % 3}/{i}.jpg": JPEG + os.urandom(90_000) for i in range(60)}
    path = write(tmp_path / "x.tgz", gzip.compress(tar(tree), 1))
    s3.put({"large.tgz": path})
    url, given, out = f"{s3.url}/large.tgz", storage(s3, proxy), tmp_path / "out"

    def begin(source: Any, out: Path) -> None:
        pack(source, out, given)

    interrupted(monkeypatch, begin, url, out)  # type: ignore[arg-type]
    size = path.stat().st_size
    assert size <= proxy.figures().needed < 1.1 * size
    assert len(list(out.glob("unpacked-*"))) == 1
    proxy.reset()
    [done] = pack(url, out, given)
    assert (done.kept, done.built) == (2, done.shards - 2)
    assert proxy.figures().sent < 100_000
    pack(path, tmp_path / "disk")
    assert content(out) == content(tmp_path / "disk")


def test_a_kill_while_it_is_downloaded_starts_that_over(
    s3: ObjectStore, proxy: FaultProxy, right: dict[bytes, bytes], tmp_path: Path
) -> None:
    tree = {f"c{i % 3}/{i}.jpg": JPEG + os.urandom(90_000) for i in range(60)}
    path = write(tmp_path / "x.tgz", gzip.compress(tar(tree), 1))
    s3.put({"killed.tgz": path})
    out, url = tmp_path / "out", f"{s3.url}/killed.tgz"
    arguments = ["pack", url, out, "--max-records", "9", "--jobs", "1"]
    arguments += store_arguments(s3.through(proxy.port))
    proxy.rules(Rule("timeout", path="killed", method="GET", numbers=[*range(6, 99)]))
    line = warm_command(*arguments)
    process = warm_python.Process(line, env=environment(), stderr=subprocess.DEVNULL)
    proxy.wait(faults=1)
    process.kill()
    assert process.wait(LIMIT_S) == -9
    proxy.rules()
    pack(url, out, storage(s3, proxy))
    pack(path, tmp_path / "disk")
    assert content(out) == content(tmp_path / "disk")


def test_an_archive_of_a_bucket_is_packed_into_it(
    s3: ObjectStore, right: dict[bytes, bytes], tmp_path: Path
) -> None:
    for name in ("pax.tar", "a.tgz"):
        out = f"{s3.url}/packed {name}"
        work = tmp_path / f"work {name}"
        pack(f"{s3.url}/{name}", out, storage(s3), to=storage(s3), work_dir=work)
        there = [one for one in s3.sizes() if one.startswith(f"packed {name}/")]
        s3.get(there, tmp_path)
        assert content(tmp_path / f"packed {name}") == right
        assert not [path for path in tmp_path.rglob("*") if "unpacked-" in path.name]


def test_faults_on_the_way_change_nothing(
    s3: ObjectStore, proxy: FaultProxy, there: Path, tmp_path: Path
) -> None:
    proxy.rules(
        Rule("5xx", fraction=0.1, seed=1),
        Rule("short", fraction=0.1, seed=2),
        Rule("reset", fraction=0.05, seed=3),
    )
    for name in ("flat.tar", "flat.zip", "a.tgz"):
        pack(f"{s3.url}/{name}", tmp_path / name, storage(s3, proxy))
        pack(there / name, tmp_path / f"disk {name}")
        assert content(tmp_path / name) == content(tmp_path / f"disk {name}")
    assert sum(proxy.figures().faults.values()) >= 5


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "why"), [("changed", "its ETag is another"), ("404", "it is gone")]
)
@pytest.mark.parametrize("name", ["flat.tar", "flat.zip", "large/", "a.tgz"])
@pytest.mark.parametrize("jobs", [1, 2])
def test_an_archive_that_is_another_than_was_listed_is_an_error(
    kind: str, why: str, name: str, jobs: int, s3: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    """At its first bytes, and at any later."""
    name = "classes" if name == "large/" else name
    for first in (0, 3):
        proxy.rules(Rule(kind, path=r"\.(tar|zip|tgz)", method="GET", numbers=[*range(first, 999)]))
        with pytest.raises(SourceChangedError, match=rf"changed since .*{why}.*--restart"):
            pack(f"{s3.url}/{name}", tmp_path / "out", storage(s3, proxy), jobs=jobs)
        if name == "a.tgz":
            break


@pytest.mark.parametrize("etag", ["on", "off"])
def test_an_archive_of_the_web_that_changes_is_an_error(etag: str, tmp_path: Path) -> None:
    """By its time of change, where the server says no ETag."""
    root = plant(tmp_path / "web", {})
    path = write(root / "x.tar", tar(images()))
    with servers.nginx(root, lines=[f"etag {etag};"]) as web:
        folder = members(web.url, "x.tar", Storage())
        (key, *_), (size, *_), (stamp, *_), *_ = folder.walk()
        with folder.opened() as read:
            assert read(key, int(size), int(stamp)) == images()[key.decode()]
            os.utime(path, (10**8, 10**8))
            with pytest.raises(SourceChangedError, match=r"x\.tar: changed.*ETag, or time"):
                read(key, int(size), int(stamp))
            write(path, tar(images()) + bytes(512))
            with pytest.raises(SourceChangedError, match=r"x\.tar: changed.*size"):
                read(key, int(size), int(stamp))


@pytest.mark.parametrize(
    ("rule", "error", "why"),
    [
        # Which is tried again, and may be late on a busy machine.
        (Rule("wrong_range", method="GET"), StorageError, "must support HTTP ranges|in time"),
        (Rule("403"), StorageError, r"flat.tar: cannot read: .*403 .*Check the credentials"),
        (Rule("404", method="HEAD"), SourceError, "no object is below this URL|is an object"),
    ],
)
def test_a_server_that_does_not_give_it_is_an_error(
    rule: Rule, error: Any, why: str, s3: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    proxy.rules(rule)
    timeout_s = 2 if rule.kind == "wrong_range" else LIMIT_S  # others are told at once
    with pytest.raises(error, match=why):
        pack(f"{s3.url}/flat.tar", tmp_path / "out", storage(s3, proxy, timeout_s))
    assert not (tmp_path / "out").exists()


def test_what_is_no_archive_says_what_it_is(
    s3: ObjectStore, web: Web, there: Path, tmp_path: Path
) -> None:
    for url, why in (
        (f"{web.url}/page.zip", "page.zip: it is a page of HTML"),
        (f"{web.url}/none.zip", "none.zip: the server has no such file. Check the URL"),
        (f"{web.url}/none.tar/inner", "none.tar: the server has no such file. Check the URL"),
        (f"{web.url}/short.tar", r"short.tar: .*cut short"),
    ):
        with pytest.raises(Exception, match=why) as caught:
            pack(url, tmp_path / "out")
        assert isinstance(caught.value, shardio.ShardioError)
    whole = Rule("wrong_range")  # of a page there are no ranges
    with (
        fault_proxy(web.port, whole) as proxy,
        pytest.raises(SourceError, match=r"page\.zip: it is a page of HTML"),
    ):
        pack(f"{proxy.url}/page.zip", tmp_path / "out")
    (tmp_path / "t.csv").write_text("path\n0.jpg\n")
    with pytest.raises(SourceError, match="the server has no such file"):
        pack(tmp_path / "t.csv", tmp_path / "out", read={"root": f"{web.url}/none.zip"})
    assert not (tmp_path / "out").exists()
