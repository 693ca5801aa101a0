"""`verify`, `copy`, `index` and `export` by parts: each process does its share of the shards."""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S, servers
from support.fault_proxy import FaultProxy, fault_proxy
from support.faults import Rule
from support.object_stores import ObjectStore
from support.trees import command, content, environment, images, picture, plant, shardio, shards

from shardio import (
    BusyError,
    DamageError,
    ExistsError,
    NotPackedError,
    OptionError,
    PlanOptions,
    Storage,
    StorageError,
    copy,
    export,
    index,
    open,
    pack,
    verify,
)
from shardio.packing import export_parts, journal
from shardio.packing.gc import gc
from shardio.storage import ranges

NAMES = ("MIN", "MAX", "COUNT", "STEP")
TASK_2_OF_3 = {f"SLURM_ARRAY_TASK_{name}": one for name, one in zip(NAMES, "1331", strict=True)}
TASK_2_OF_3["SLURM_ARRAY_TASK_ID"] = "2"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A dataset of 6 shards with 4 records each."""
    source = plant(tmp_path / "src", images())
    pack(source, tmp_path / "out", plan=PlanOptions(max_records=4), jobs=1)
    return tmp_path / "out"


@pytest.fixture
def tars(out: Path, tmp_path: Path) -> Path:
    """The same records in 6 files of another format, with an index."""
    export(out, tmp_path / "tars", format="webdataset", shard_size=19_500)
    index(tmp_path / "tars", jobs=1)
    return tmp_path / "tars"


@pytest.fixture
def web(tmp_path: Path) -> Iterator[servers.Web]:
    with servers.nginx(tmp_path) as web:
        yield web


@pytest.fixture(scope="module")
def proxy_of_all(store: ObjectStore) -> Iterator[FaultProxy]:
    with fault_proxy(store.port) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def no_helper_is_left() -> Iterator[None]:
    yield
    ranges.close()


@contextlib.contextmanager
def started(*line: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """Start the command line; at the end it is killed, if it still runs."""
    lines = command(*map(str, line))
    with subprocess.Popen(lines, env=environment(), stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def hidden(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith("."))


def named(found: dict[bytes, bytes | None]) -> dict[bytes, bytes | None]:
    """Leave out what an export put beside a dataset."""
    return {
        path: data
        for path, data in found.items()
        if not path.startswith(b".") and not path.endswith(b".idx")
    }


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[300] ^= 1
    path.write_bytes(data)


# --- verify ---------------------------------------------------------------------------------------


def test_the_parts_of_a_verify_check_each_shard_once(out: Path) -> None:
    for path in shards(out):
        spoil(path)
    found = [verify(out, part=(i, 4), jobs=1) for i in (1, 2, 3, 4)]
    assert [one.shards for one in found] == [1, 2, 1, 2]
    assert [one.part for one in found] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    damaged = [damage.shard for one in found for damage in one.damages]
    assert damaged == [str(path) for path in shards(out)]
    assert sum(one.bytes for one in found) == verify(out).bytes
    assert verify(out, part="7/8").shards == 0 + (7 * 6 // 8 - 6 * 6 // 8)


def test_the_command_verifies_the_part_that_the_scheduler_says(out: Path) -> None:
    spoil(shards(out)[2])
    line = ("verify", out, "--part", "auto", "--stagger", "0.1")
    done = shardio(*line, env=environment(**TASK_2_OF_3), code=3)
    said, waits = done.stderr.splitlines()
    assert said == "part 2 of 3, by SLURM_ARRAY_TASK_ID=2 of 1-3"
    assert waits.endswith("so that not all parts begin at once")
    assert done.stdout.splitlines()[-1].startswith("part 2 of 3: ")
    assert shardio("verify", out, "--part", "3/3").stdout.startswith("part 3 of 3: 8 records in 2")


CALLS = [
    verify,
    lambda out, **options: copy(out, out.parent / "to", **options),
    lambda out, **options: index(out.parent / "src", **options),
    lambda out, **options: export(out, out.parent / "to", format="mds", **options),
]


@pytest.mark.parametrize("call", CALLS)
def test_each_function_checks_its_part_as_pack_does(out: Path, call: Any) -> None:
    for options, message in (
        ({"part": "3/2"}, "part 3/2: parts count from 1"),
        ({"part": "1/2", "parts": 2}, "parts is 2: goes with part 'auto' alone"),
        ({"stagger_s": -1}, "stagger_s is -1"),
    ):
        with pytest.raises(OptionError, match=message):
            call(out, **options)


# --- copy -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out", "tars"])
def test_parts_that_copy_at_once_and_one_that_is_killed(
    tars: Path, web: servers.Web, tmp_path: Path, name: str
) -> None:
    source, to = tmp_path / name, tmp_path / "to"
    third = sorted(path.name for path in source.glob("000*.[ts]*"))[2]
    with fault_proxy(web.port, Rule("stall", path=third)) as proxy:
        line = ("copy", f"{proxy.url}/{name}", to)
        with contextlib.ExitStack() as stack:
            first, second, last = (
                stack.enter_context(started(*line, "--part", f"{i}/3")) for i in (1, 2, 3)
            )
            proxy.wait(faults=1)
            assert (first.wait(LIMIT_S), last.wait(LIMIT_S)) == (0, 0)
            assert "is packing here" in shardio(*line, code=5).stderr  # the second is at work
            second.kill()
        with pytest.raises(NotPackedError, match="`shardio copy`, did not finish here"):
            open(to)
        proxy.rules()
        said = shardio(*line, "--part", "2/3").stdout
        assert "part 2 of 3 copied; when all are: the same command without --part" in said
        assert "manifest.json" not in os.listdir(to)
        assert "of parts at last without --part" in shardio("commit", to, code=1).stderr
        there = {one.name: one.stat().st_ino for one in to.glob("0*")}
        proxy.reset()
        done = copy(f"{proxy.url}/{name}", to)
        assert (done.copied, done.kept) == (1, len(there))  # the manifest
        got = [one.path for one in proxy.figures().log if one.method == "GET"]
        assert not [path for path in got if path.endswith((".tar", ".shard"))]
    assert {one.name: one.stat().st_ino for one in to.glob("0*")} == there
    assert content(to) == named(content(source))


def test_parts_that_copy_into_a_store_at_once_and_one_that_is_killed(
    out: Path, bucket: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    there = bucket.through(proxy.port)
    given = [part for k, v in there.options.items() for part in ("--store-option", f"{k}={v}")]
    line = ("copy", out, f"{there.url}/to", *given)
    third = shards(out)[2].name
    proxy.rules(Rule("stall", method="PUT", path=third))
    with contextlib.ExitStack() as stack:
        first, second, last = (
            stack.enter_context(started(*line, "--part", f"{i}/3")) for i in (1, 2, 3)
        )
        proxy.wait(faults=1)
        assert (first.wait(LIMIT_S), last.wait(LIMIT_S)) == (0, 0)
        second.kill()
    proxy.rules()
    shardio(*map(str, line), "--part", "2/3")
    names = {name.rpartition("/")[2] for name in bucket.sizes()}
    assert names == {path.name for path in shards(out)}
    proxy.reset()
    options = Storage(options=there.options)
    assert copy(out, f"{there.url}/to", to=options).kept == 6
    log = proxy.figures().log
    assert [one.method for one in log if one.path.split("?")[0].endswith(".shard")] == ["HEAD"] * 6
    copy(f"{there.url}/to", tmp_path / "back", storage=options)
    assert content(tmp_path / "back") == content(out)


def test_splits_are_copied_by_parts(tmp_path: Path) -> None:
    for split in ("train", "val"):
        plant(tmp_path / "src" / split, images())
    pack(tmp_path / "src", tmp_path / "out", plan=PlanOptions(max_records=4), jobs=1)
    copied = [copy(tmp_path / "out", tmp_path / "to", part=(i, 4)).copied for i in (4, 2, 1, 3)]
    assert sum(copied) == 12
    done = copy(tmp_path / "out", tmp_path / "to")
    assert (done.kept, done.copied) == (12, 3)
    assert content(tmp_path / "to") == content(tmp_path / "out")


def test_a_part_that_is_copied_again_mends_its_shards_and_leaves_nothing(
    out: Path, tmp_path: Path
) -> None:
    to = tmp_path / "to"
    copy(out, to)
    spoil(shards(to)[0])
    assert copy(out, to, part=(2, 2)).copied == 0
    assert copy(out, to, part=(1, 2)).copied == 1
    assert content(to) == content(out)


def test_parts_leave_another_dataset_as_it_is_until_all_are_there(
    out: Path, tmp_path: Path
) -> None:
    to, old = tmp_path / "to", plant(tmp_path / "old", images(each=5))
    pack(old, to, jobs=1)
    before = content(to)
    with pytest.raises(ExistsError, match="another dataset is here"):
        copy(out, to, part=(1, 2))
    for part in ("1/2", "2/2"):
        assert not copy(out, to, part=part, overwrite=True).replaced
    assert before.items() < content(to).items()
    done = copy(out, to, overwrite=True)
    assert done.replaced and done.copied == 1
    assert not verify(to, jobs=1).damages and hidden(to) == []


# --- index ----------------------------------------------------------------------------------------


@pytest.fixture
def plain(tars: Path) -> Path:
    """The files of another format, without an index."""
    for one in (tars / "manifest.json", *tars.glob("*.index")):
        one.unlink()
    return tars


def once(folder: Path, out: Path) -> dict[bytes, bytes | None]:
    """What one process makes of a folder."""
    index(folder, out=out, jobs=1)
    return content(out)


def test_parts_that_index_at_once_and_one_that_is_killed(
    plain: Path, bucket: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    names = [path.name for path in sorted(plain.glob("*.tar"))]
    bucket.put({f"tars/{name}": plain / name for name in names})
    there = bucket.through(proxy.port)
    options, idx = Storage(options=there.options), tmp_path / "idx"
    given = [part for k, v in there.options.items() for part in ("--store-option", f"{k}={v}")]
    line = ("index", f"{there.url}/tars", "--out", idx, *given)
    expected = tmp_path / "expected"
    index(f"{there.url}/tars", out=expected, storage=options, jobs=1)
    proxy.rules(Rule("stall", method="GET", path=names[3]))
    with contextlib.ExitStack() as stack:
        first, second, last = (
            stack.enter_context(started(*line, "--part", f"{i}/3", "--jobs", "1"))
            for i in (1, 2, 3)
        )
        proxy.wait(faults=1)
        assert (first.wait(LIMIT_S), last.wait(LIMIT_S)) == (0, 0)
        assert "is packing here" in shardio(*line, code=5).stderr  # the second is at work
        while len(list(idx.glob(journal.SCAN_NOTE.format("*")))) < 5:
            assert second.poll() is None
            time.sleep(0.01)  # nothing tells when a note is there
        second.kill()
    proxy.rules()
    proxy.reset()
    said = shardio(*line, "--part", "2/3").stdout
    assert "part 2 of 3 indexed; when all are: the same command without --part" in said
    scanned = {one.path for one in proxy.figures().log if one.path.endswith(".tar")}
    assert scanned == {f"/{there.url.removeprefix('s3://')}/tars/{names[3]}"}  # what was not noted
    proxy.reset()
    done = index(f"{there.url}/tars", out=idx, storage=options)
    assert not [one for one in proxy.figures().log if one.path.endswith(".tar")]
    assert (done.shards, done.records) == (6, 24)
    assert content(idx) == content(expected)


@pytest.mark.parametrize("name", ["tars", "src"])
def test_an_index_beside_the_data_is_made_by_parts(plain: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    before, expected = content(folder), once(folder, tmp_path / "expected")
    for part in ("2/3", "3/3", "1/3", "3/3"):
        done = index(folder, part=part, jobs=1)
        assert f"part {part[0]} of 3 indexed" in str(done)
    with pytest.raises(NotPackedError):
        open(folder)
    index(folder, jobs=1)
    assert content(folder) == before | expected


def test_what_changed_after_its_part_is_scanned_again(plain: Path, tmp_path: Path) -> None:
    first, second = sorted(plain.glob("*.tar"))[:2]
    index(plain, part="1/1", jobs=1)
    data = second.read_bytes()
    assert first.stat().st_size == len(data)
    first.write_bytes(data)  # of the same size
    (plain / min(one.name for one in plain.glob("00003-*.index"))).unlink()
    (plain / ".shardio-scan-00004.json").write_bytes(b"{}")
    index(plain, jobs=1)
    assert hidden(plain) == [".shardio-export"]
    assert once(plain, tmp_path / "expected").items() < content(plain).items()


def test_a_part_keeps_what_it_finished_where_another_shard_is_damaged(plain: Path) -> None:
    broken = max(plain.glob("*.tar"))
    data = broken.read_bytes()
    broken.write_bytes(b"\xff" * len(data))
    status = broken.stat()
    with pytest.raises(DamageError):
        index(plain, part="2/2", jobs=1)
    with pytest.raises(DamageError):
        index(plain, jobs=1)
    assert len([name for name in hidden(plain) if "scan" in name]) == 2
    assert len(list(plain.glob("*.index"))) == 2
    broken.write_bytes(data)
    os.utime(broken, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert index(plain, jobs=1).records == 24


def test_parts_do_not_replace_an_index_unasked(plain: Path) -> None:
    index(plain, jobs=1)
    before = content(plain)
    with pytest.raises(ExistsError, match="--overwrite replaces it"):
        index(plain, part="1/2")
    for part in ("1/2", "2/2"):
        index(plain, part=part, overwrite=True, jobs=1)
    index(plain, overwrite=True, jobs=1)
    assert content(plain) == before


def test_gc_removes_what_parts_left_beside_an_index(plain: Path) -> None:
    index(plain, jobs=1)
    before = content(plain)
    index(plain, part="1/2", overwrite=True, jobs=1)
    assert {name for name in hidden(plain) if "export" not in name} > {".shardio-plan"}
    gc(plain, keep_s=0)
    assert content(plain) == before


def test_a_writer_drops_what_parts_of_an_index_left(plain: Path, tmp_path: Path) -> None:
    index(plain, out=tmp_path / "idx", part="1/2", jobs=1)
    index(plain, out=tmp_path / "idx", part="1/3", jobs=1)  # other parts of the same are joined
    pack(tmp_path / "src", tmp_path / "idx", jobs=1)
    assert hidden(tmp_path / "idx") == []


# --- export ---------------------------------------------------------------------------------------


def samples(folder: Path) -> list[dict[str, Any]]:
    """The fields of what was exported, in order; keys that are places in files are left out."""
    index(folder, jobs=1)
    own = {"__key__"} if not any(folder.glob("*.tar")) else set()
    found = list(open(folder, decode=None))
    return [{name: one[name] for name in one.keys() - own} for one in found]


@pytest.mark.parametrize("format", ["webdataset", "tfrecord", "recordio", "mds", "parquet"])
def test_parts_of_an_export_have_all_records_in_order(
    out: Path, tmp_path: Path, format: str
) -> None:
    options: dict[str, Any] = {"format": format, "shard_size": 16_000}
    one = export(out, tmp_path / "one", **options)
    to = tmp_path / "to"
    for part in ("2/3", "3/3", "1/3", "2/3"):
        done = export(out, to, part=part, **options)
        assert f"part {part[0]} of 3 exported; when all are: the same command" in str(done)
        assert hidden(to) == sorted(os.listdir(to))
    done = export(out, to, **options)
    assert (done.records, done.fields) == (24, one.fields)
    assert hidden(to) == [".shardio-export"]
    assert samples(to) == samples(tmp_path / "one")


def test_parts_that_export_at_once_and_one_that_is_killed(
    out: Path, web: servers.Web, tmp_path: Path
) -> None:
    to, third = tmp_path / "to", shards(out)[2].name
    with fault_proxy(web.port, Rule("stall", path=third)) as proxy:
        line = ("export", f"{proxy.url}/out", to, "--format", "webdataset")
        with contextlib.ExitStack() as stack:
            first, second, last = (
                stack.enter_context(started(*line, "--part", f"{i}/3")) for i in (1, 2, 3)
            )
            proxy.wait(faults=1)
            assert (first.wait(LIMIT_S), last.wait(LIMIT_S)) == (0, 0)
            assert "is packing here" in shardio(*line, code=5).stderr  # the second is at work
            second.kill()
        proxy.rules()
        shardio(*line, "--part", "2/3")
        proxy.reset()
        shardio(*line)
        got = [one for one in proxy.figures().log if one.method == "GET"]
        assert not [one for one in got if one.path.endswith(".shard")]
        shardio("export", f"{proxy.url}/out", tmp_path / "one", "--format", "webdataset")
    assert hidden(to) == [".shardio-export"]
    assert sorted(path.name for path in to.glob("*.tar")) == [f"0000{n}.tar" for n in range(3)]
    assert samples(to) == samples(tmp_path / "one")


def test_the_last_call_writes_the_parts_that_nobody_wrote(out: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        for part in ("1/3", "2/3", "3/3"):
            export(out, tmp_path / name, format="webdataset", part=part)
    (folder,) = (tmp_path / "two").glob(".shardio-*-part-2-of-3.tmp")
    (folder / ".shardio-part").unlink()
    (folder,) = (tmp_path / "two").glob(".shardio-*-part-3-of-3.tmp")
    (folder / "00000.tar").unlink()
    for name in ("one", "two"):
        assert export(out, tmp_path / name, format="webdataset").records == 24
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_a_last_call_after_one_that_failed_owns_the_parts(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a part that runs again would remove files that the last call is about to join."""
    to, late = tmp_path / "to", []
    for part in ("1/2", "2/2"):
        export(out, to, format="webdataset", part=part)
    load = export_parts.load

    def fail(folder: str) -> Any:
        raise StorageError("the disk fails")

    def again(folder: str) -> Any:
        with pytest.raises(BusyError, match="another shardio process"):
            export(out, to, format="webdataset", part="2/2")
        late.append(folder)
        return load(folder)

    monkeypatch.setattr(export_parts, "load", fail)
    with pytest.raises(StorageError, match="the disk fails"):
        export(out, to, format="webdataset")
    monkeypatch.setattr(export_parts, "load", again)
    assert export(out, to, format="webdataset").records == 24
    assert len(late) == 2 and hidden(to) == [".shardio-export"]


def test_parts_agree_on_what_a_later_record_needs(tmp_path: Path) -> None:
    """A column of mds has one encoding, although some parts have files of JPEG alone."""
    source, out, to = tmp_path / "src", tmp_path / "out", tmp_path / "to"
    plant(
        source,
        {f"a/{i:03}.jpg": picture(8, 8, "PNG" if i == 20 else "JPEG") for i in range(24)},
    )
    pack(source, out, plan=PlanOptions(shuffle=False), jobs=1)
    for part in ("3/3", "2/3", "1/3"):
        export(out, to, format="mds", part=part)
    done = export(out, to, format="mds")
    assert done.fields == export(out, tmp_path / "one", format="mds").fields
    described = json.loads((to / "index.json").read_text())["shards"]
    assert [one["samples"] for one in described] == [8, 8, 8]
    assert all("jpeg" not in one["column_encodings"] for one in described)
    assert samples(to) == samples(tmp_path / "one")


def test_splits_are_exported_by_parts_over_an_older_export(tmp_path: Path) -> None:
    for split in ("train", "val"):
        plant(tmp_path / "src" / split, images())
    out, to = tmp_path / "out", tmp_path / "to"
    pack(tmp_path / "src", out, plan=PlanOptions(max_records=4), jobs=1)
    options = {"format": "webdataset", "keys": "number"}
    export(out, to, shard_size=16_000, **options)
    older = content(to)
    with pytest.raises(ExistsError, match="is not empty"):
        export(out, to, part="1/2", **options)
    for part in ("1/2", "2/2"):
        export(out, to, part=part, overwrite=True, **options)
    assert older.items() < content(to).items()
    done = export(out, to, overwrite=True, **options)
    assert done.removed > 0 and hidden(to) == [".shardio-export"]
    for split in ("train", "val"):
        keys = [one["__key__"] for one in samples(to / split)]
        assert keys == [f"{number:08}" for number in range(24)]
        assert len(list((to / split).glob("*.tar"))) == 2


def test_what_has_no_shards_and_parts_of_several_numbers_are_refused(
    out: Path, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match="part is given, but imagefolder has no shards"):
        export(out, tmp_path / "to", format="imagefolder", part="1/2")
    export(out, tmp_path / "to", format="mds", part="1/2")
    export(out, tmp_path / "to", format="mds", part="1/3")
    with pytest.raises(ExistsError, match=r"-part-1-of-2\.tmp and .*-part-1-of-3\.tmp"):
        export(out, tmp_path / "to", format="mds")


def test_parts_are_joined_where_there_are_no_hard_links(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        for part in ("1/2", "2/2"):
            export(out, tmp_path / name, format="mds", part=part)
    export(out, tmp_path / "one", format="mds")

    def refuse(*names: str) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    export(out, tmp_path / "two", format="mds")
    assert content(tmp_path / "one") == content(tmp_path / "two")


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_a_last_call_that_is_killed_between_its_renames_goes_on(out: Path, tmp_path: Path) -> None:
    line = ("export", out, tmp_path / "to", "--format", "webdataset")
    for name in ("to", "expected"):
        for part in ("1/2", "2/2"):
            export(out, tmp_path / name, format="webdataset", part=part)
    export(out, tmp_path / "expected", format="webdataset")
    inject = "inject=rename:signal=SIGKILL:when=5"  # the receipt, and some files
    strace = ("strace", "-f", "-qq", "-o", os.devnull, "-e", "trace=rename", "-e", inject)
    killed = [*strace, *map(os.fsdecode, command(*line))]
    done = subprocess.run(killed, capture_output=True, env=environment(), timeout=LIMIT_S)
    assert done.returncode in (-signal.SIGKILL, 137)
    assert 0 < len(list((tmp_path / "to").glob("0*"))) < 4
    shardio(*line)
    assert content(tmp_path / "to") == content(tmp_path / "expected")
