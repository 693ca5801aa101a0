"""`export` by parts: each process exports its shards, and the last call joins the parts."""

import errno
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import servers
from support.crashing import traced
from support.fault_proxy import fault_proxy
from support.faults import Rule
from support.packing import hidden
from support.trees import content, images, picture, plant, shardio, shards
from support.uploading import second_part_held

from shardio import (
    BusyError,
    ExistsError,
    OptionError,
    PlanOptions,
    StorageError,
    export,
    index,
    open,
    pack,
)
from shardio.packing import export_parts

pytestmark = pytest.mark.usefixtures("ranges_closed")


@pytest.fixture
def web(tmp_path: Path) -> Iterator[servers.Web]:
    with servers.nginx(tmp_path) as web:
        yield web


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
        with second_part_held(proxy, line):
            assert "is packing here" in shardio(*line, code=5).stderr  # the second is at work
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
    done = traced(line, "-o", os.devnull, "-e", "trace=rename", "-e", inject)
    assert done.returncode == -signal.SIGKILL, done
    assert 0 < len(list((tmp_path / "to").glob("0*"))) < 4
    shardio(*line)
    assert content(tmp_path / "to") == content(tmp_path / "expected")
