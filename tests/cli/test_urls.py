"""Commands that are given a URL: what they give for a copy on the disk, by few round trips."""

import io
import json
import os
import re
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import object_stores, servers, small_datasets, trees
from support.fault_proxy import FaultProxy, fault_proxy
from support.faults import Rule
from support.trees import environment

import shardio
from shardio import SourceOptions, Storage
from shardio.errors import OptionError, StorageError
from shardio.storage import ranges

pytestmark = pytest.mark.usefixtures("warm_starts")

RECORDS = 60
JPEG = b"\xff\xd8\xff"


def image(number: int, most: int = 40_000) -> bytes:
    """Make bytes that need no decoding, of a size of their own."""
    draw = np.random.default_rng(number)
    return JPEG + draw.bytes(int(draw.integers(100, most)))


def write(folder: Path, format: str = "record", most: int = 40_000) -> None:
    fields = {"image": "image", "label": "int"}
    with shardio.Writer(folder, fields=fields, shard_size=6 * most, format=format) as writer:
        for number in range(RECORDS):
            key = f"{number:03}.jpg"
            writer.write({"__key__": key, "image": image(number, most), "label": number})


def write_images(folder: Path) -> None:
    for number in range(RECORDS):
        file = folder / "ab"[number % 2] / f"{number:03}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(image(number, 4_000))


def write_tar(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        for number in range(RECORDS):
            for ending, data in (("jpg", image(number, 4_000)), ("cls", b"%d" % number)):
                member = tarfile.TarInfo(f"{number:03}.{ending}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("www")
    write(folder / "record")
    write(folder / "lmdb", "lmdb")
    write(folder / "small", most=900)
    write_images(folder / "images")
    shardio.index(folder / "images")
    (folder / "tars").mkdir()
    write_tar(folder / "tars" / "0.tar")
    shardio.index(folder / "tars")
    write_images(folder / "splits-from" / "train")
    write_images(folder / "splits-from" / "val")
    shardio.pack(folder / "splits-from", folder / "splits")
    return folder


@pytest.fixture(scope="module")
def web(folder: Path) -> Iterator[servers.Web]:
    with servers.nginx(folder) as web:
        yield web


@pytest.fixture(scope="module")
def proxy_of_all(web: servers.Web) -> Iterator[FaultProxy]:
    with fault_proxy(web.port) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def no_helper_is_left() -> Iterator[None]:
    yield
    ranges.close()


def run(*arguments: object, code: int = 0, **env: str) -> subprocess.CompletedProcess[Any]:
    """Run one command. env: as a program of its own, with these variables."""
    more: dict[str, Any] = {"env": environment(**env)} if env else {}
    return trees.shardio(*map(str, arguments), code=code, text=False, **more)


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


KINDS = ["record", "lmdb", "small", "images", "tars"]


# --- what is given --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*KINDS, "splits"])
def test_info_and_verify_say_the_same_by_url(folder: Path, web: servers.Web, name: str) -> None:
    for command in (["info", "--json"], ["verify", "--json", "--sha256", "--jobs", "2"]):
        there, here = (run(*command, f"{at}/{name}").stdout for at in (web.url, folder))
        assert json.loads(there) == json.loads(here)


@pytest.mark.parametrize("name", KINDS)
def test_ls_and_cat_say_the_same_by_url(folder: Path, web: servers.Web, name: str) -> None:
    rows = [json.loads(run("ls", f"{at}/{name}", "--json").stdout) for at in (web.url, folder)]
    assert rows[0] == rows[1] and len(rows[0]["records"]) == RECORDS
    key = rows[0]["records"][7]["key"]
    there, here = (
        [run("cat", f"{at}/{name}", *which).stdout for which in (["7"], ["--key", key])]
        for at in (web.url, folder)
    )
    assert there == here and there[0] == there[1]


@pytest.mark.parametrize("name", ["record", "tars", "splits"])
def test_a_report_is_the_same_by_url(
    folder: Path, web: servers.Web, tmp_path: Path, name: str
) -> None:
    found = []
    for number, at in enumerate((web.url, str(folder))):
        file = tmp_path / f"{number}.html"
        run("view", f"{at}/{name}", "--html", file)
        found.append(file.read_text().replace(at, ""))
    assert found[0] == found[1] and "histogram" in found[0]


@pytest.mark.parametrize("name", [*KINDS, "splits"])
def test_unpack_and_export_write_the_same_by_url(
    folder: Path, web: servers.Web, tmp_path: Path, name: str
) -> None:
    for at, out in ((f"{web.url}/{name}", "there"), (folder / name, "here")):
        run("unpack", at, tmp_path / out / "files")
        run("export", at, tmp_path / out / "tars", "--format", "webdataset")
    assert files(tmp_path / "there" / "files") == files(tmp_path / "here" / "files")
    assert files(tmp_path / "there" / "tars").keys() == files(tmp_path / "here" / "tars").keys()


@pytest.mark.parametrize("name", [*KINDS, "splits"])
def test_a_dataset_is_packed_by_url_as_from_the_disk(
    folder: Path, web: servers.Web, tmp_path: Path, name: str
) -> None:
    for at, out in ((f"{web.url}/{name}", "there"), (folder / name, "here")):
        run("pack", at, tmp_path / out, "--from", "dataset", "--shard-size", "50KB", "--jobs", "2")
    assert files(tmp_path / "there") == files(tmp_path / "here")


def test_advice_is_given_by_url(folder: Path, web: servers.Web) -> None:
    for command in ("explain", "tune"):
        found = json.loads(run(command, f"{web.url}/record", "--batch-size", "4", "--json").stdout)
        assert found


def test_a_dataset_is_measured_by_url(tmp_path: Path) -> None:
    folder = small_datasets.make(tmp_path / "photos", [200, 200], image=small_datasets.jpeg)
    with object_stores.s3(private=True) as store:
        store.put_folder(folder, "photos/")
        found = shardio.bench(
            f"{store.url}/photos",
            storage=Storage(options=store.options),
            batch_size=8,
            workers=[1],
            loader="shardloader",
            seconds=0.3,
        )
    assert [(row.name, row.decodes, row.remote) for row in found.rows] == [
        ("ShardLoader 1 x 2", True, True),
        ("ShardLoader 1 x 2", False, True),
    ]
    assert all(row.error is None and row.images_per_s > 0 for row in found.rows)
    assert "storage=Storage(options=...)," in found.call
    said = f"{found}{json.dumps(found.as_dict())}"
    assert "these figures are of memory" in " ".join(said.split())
    assert "by URL:" in said and store.options["secret_access_key"] not in said


def test_an_index_and_its_data_may_both_be_urls(
    folder: Path, web: servers.Web, tmp_path: Path
) -> None:
    shardio.index(folder / "tars", out=tmp_path / "index")
    here = json.loads(run("ls", folder / "tars", "--json").stdout)
    root = f"{web.url}/tars"
    assert json.loads(run("ls", tmp_path / "index", "--root", root, "--json").stdout) == here
    done = shardio.pack(
        tmp_path / "index",
        tmp_path / "out",
        read=SourceOptions(kind="dataset", root=root),
        jobs=1,
    )
    assert done[0].records == RECORDS
    write_images(tmp_path / "images")
    read = SourceOptions(classes=f"{web.url}/images")
    assert shardio.pack(tmp_path / "images", tmp_path / "numbered", read=read)[0].classes == 2


def test_where_only_a_directory_will_do_a_url_is_refused(web: servers.Web, tmp_path: Path) -> None:
    write_images(tmp_path / "images")
    bucket, new = "s3://bucket/new", f"{web.url}/new"
    for command, why in (
        (["pack", tmp_path / "images", new], "read only"),
        (["unpack", f"{web.url}/record", new], "read only"),
        (["unpack", f"{web.url}/record", bucket], "`shardio copy` that"),
    ):
        assert why in run(*command, code=2).stderr.decode()
    with pytest.raises(OptionError, match="cannot be listed"):
        shardio.pack(f"{web.url}/images", tmp_path / "out", read=SourceOptions(kind="imagefolder"))
    with pytest.raises(
        OptionError, match=r"cannot be listed.*\. For a dataset, there is no manifest"
    ):
        shardio.pack(f"{web.url}/nothing", tmp_path / "out")


# --- options of a store ---------------------------------------------------------------------------


def test_options_of_a_store_are_given_to_commands_and_functions(
    folder: Path, tmp_path: Path
) -> None:
    with object_stores.s3(private=True) as store:
        store.put_folder(folder / "record", "record/")
        secrets = ("access_key_id", "secret_access_key")
        shown = [f"{k}={v}" for k, v in store.options.items() if k not in secrets]
        given = [part for pair in shown for part in ("--store-option", pair)]
        env = {f"AWS_{name.upper()}": store.options[name] for name in secrets}
        url = f"{store.url}/record"
        assert run("ls", url, *given, **env).stdout == run("ls", folder / "record").stdout
        assert (
            b"403"
            in run(
                "ls", url, *given, code=1, AWS_ACCESS_KEY_ID="x", **{"AWS_SECRET_ACCESS_KEY": "y"}
            ).stderr
        )
        storage = Storage(options=store.options)
        assert not shardio.verify(url, storage=storage, jobs=1).damages
        assert shardio.unpack(url, tmp_path / "out", storage=storage).files == RECORDS
        with pytest.raises(OptionError, match="root is given twice"):
            shardio.verify(url, root="x", storage=Storage(root="y"))


@pytest.mark.parametrize("pair", ["endpoint", "=x", "a.=x"])
def test_an_option_of_a_store_has_a_name_and_a_value(pair: str) -> None:
    wrong = run("ls", "s3://bucket/data", "--store-option", pair, code=2)
    assert b"expected NAME=VALUE" in wrong.stderr


# --- round trips ----------------------------------------------------------------------------------


def shards(folder: Path) -> int:
    return len(list(folder.glob("*.shard")))


def asked(proxy: FaultProxy) -> int:
    """How many different ranges were asked for: a slow one may have had a second request."""
    return len({(one.method, one.path, one.range) for one in proxy.figures().log})


def test_a_record_is_shown_by_few_requests(folder: Path, proxy: FaultProxy) -> None:
    run("cat", f"{proxy.url}/record", "17")
    # The manifest, the end of the shard, and the record.
    assert asked(proxy) == 3
    proxy.reset()
    proxy.limits(gather=2, of=r"\.shard")
    run("cat", f"{proxy.url}/record", "--key", "017.jpg")
    # Of each shard the end, of which several are asked for at once; the head, and the record.
    assert asked(proxy) == 1 + shards(folder / "record") + 2
    assert proxy.figures().most_concurrent > 1


def test_keys_are_listed_by_many_requests_at_once_or_few(folder: Path, proxy: FaultProxy) -> None:
    run("ls", f"{proxy.url}/record")
    # Of each record its head, of 20 KB.
    assert asked(proxy) <= 10 + shards(folder / "record") + RECORDS
    proxy.reset()
    proxy.limits(gather=4, of=r"\.shard")
    run("ls", f"{proxy.url}/record")
    assert proxy.figures().most_concurrent >= 4
    proxy.limits()
    proxy.reset()
    run("ls", f"{proxy.url}/small")
    assert asked(proxy) <= 1 + 3 * shards(folder / "small")  # of all, since all are small


@pytest.mark.parametrize("command", ["unpack", "verify", "export"])
def test_records_are_read_in_order_by_few_requests(
    folder: Path, proxy: FaultProxy, tmp_path: Path, command: str
) -> None:
    more: dict[str, list[Any]] = {
        "unpack": [tmp_path / "out"],
        "verify": ["--jobs", "1"],
        "export": [tmp_path / "out", "--format", "webdataset"],
    }
    run(command, f"{proxy.url}/record", *more[command])
    # The manifest, and whether there are splits; of each shard its end, the first read, and what is
    # read ahead. No key is asked for on its own.
    assert asked(proxy) <= 2 + 4 * shards(folder / "record")


def test_keys_that_are_alike_are_told_by_url_too(
    web: servers.Web, folder: Path, tmp_path: Path
) -> None:
    (folder / "alike").mkdir()
    for name in ("0.tar", "1.tar"):
        write_tar(folder / "alike" / name)
    shardio.index(folder / "alike")
    url = f"{web.url}/alike"
    for command in (["unpack"], ["export", "--format", "webdataset"]):
        done = run(command[0], url, tmp_path / "out", *command[1:], code=2)
        assert b"000" in done.stderr
    assert not (tmp_path / "out").exists() or not files(tmp_path / "out")


def test_files_of_a_folder_are_asked_for_at_once(proxy: FaultProxy, tmp_path: Path) -> None:
    proxy.limits(gather=8, of=r"\.jpg")
    run("unpack", f"{proxy.url}/images", tmp_path / "out")
    found = proxy.figures()
    assert found.most_concurrent >= 8
    assert asked(proxy) <= RECORDS + 3
    assert found.requests <= RECORDS + 3 + 6  # second requests: 4, and 2 %


# --- what cannot be read --------------------------------------------------------------------------


def test_what_cannot_be_read_is_not_damaged(folder: Path, proxy: FaultProxy) -> None:
    name = min(path.name for path in (folder / "record").glob("*.shard"))
    proxy.rules(Rule("500", path=name))
    done = run("verify", f"{proxy.url}/record", "--timeout", "2", "--jobs", "1", "--json", code=1)
    found = json.loads(done.stdout)
    assert found["damages"] == [] and len(found["unread"]) == 1 and name in found["unread"][0]
    whole = shardio.verify(folder / "record", jobs=1).records
    assert 0 < found["records"] < whole
    done = run("verify", f"{proxy.url}/record", "--timeout", "2", "--jobs", "1", code=1)
    assert done.stdout.endswith(b": 1 shard could not be read; all others as packed\n")


def test_verify_ends_soon_where_nothing_answers(folder: Path, proxy: FaultProxy) -> None:
    proxy.rules(Rule("500", path=r"\.shard$"))
    found = shardio.verify(f"{proxy.url}/record", storage=Storage(timeout_s=1.5), jobs=1)
    assert len(found.unread) == 4 and found.untried == shards(folder / "record") - 4 > 0
    assert str(found).endswith(" shards could not be read") and not found.damages


def test_bench_says_what_cannot_be_read(proxy: FaultProxy) -> None:
    proxy.rules(Rule("500", path=r"\.shard$"))
    done = run("bench", f"{proxy.url}/record", "--quick", "--timeout", "2", code=1)
    assert re.fullmatch(rb"shardio: .*\.shard: cannot read .* 500 .*\n", done.stderr)


def test_a_file_that_is_not_there_or_has_changed_is_damage(
    folder: Path, web: servers.Web, tmp_path: Path
) -> None:
    files_of: Sequence[Path] = sorted((folder / "images" / "a").iterdir())
    gone, changed = files_of[1], files_of[2]
    before: dict[Path, Any] = {path: path.read_bytes() for path in (gone, changed)}
    try:
        os.unlink(gone)
        changed.write_bytes(before[changed] + b"x")
        done = run("verify", f"{web.url}/images", "--json", "--jobs", "1", code=3)
        found = json.loads(done.stdout)
        keys = {one["key"] for one in found["damages"]}
        assert keys == {f"a/{gone.name}", f"a/{changed.name}"} and not found["unread"]
    finally:
        for path, data in before.items():
            path.write_bytes(data)


@pytest.mark.parametrize("command", [["ls"], ["verify", "--jobs", "2"]])
def test_a_person_is_told_that_requests_fail(
    folder: Path, proxy: FaultProxy, command: list[str]
) -> None:
    """By the process that reads itself (ls), and by helpers of several (verify)."""
    proxy.rules(Rule("500", path=r"\.shard$"))
    url = f"{proxy.url}/record"
    code, seen = trees.on_a_terminal(*command, url, "--timeout", "5")
    why = r"(\d+) requests failed \(the server answered 50\d .*\), trying again until \d\d:\d\d:"
    found = re.findall(f"waiting for {proxy.url}: {why}", seen)
    assert code == 1 and found and "Traceback" not in seen, seen
    if command == ["ls"]:
        assert len(found) == 1 and int(found[0]) >= 2


def test_unpack_names_what_cannot_be_read(proxy: FaultProxy, tmp_path: Path) -> None:
    proxy.rules(Rule("500", path=r"\.shard$"))
    with pytest.raises(StorageError, match=r"\.shard: cannot read bytes .*500"):
        shardio.unpack(f"{proxy.url}/record", tmp_path / "out", storage=Storage(timeout_s=2))
