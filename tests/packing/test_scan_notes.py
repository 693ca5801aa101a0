"""`index` by parts: each notes what it found, and the last call makes the index of the notes."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fault_proxy import FaultProxy, fault_proxy
from support.faults import Rule
from support.object_stores import ObjectStore
from support.packing import hidden
from support.trees import content, shardio
from support.uploading import second_part_held

from shardio import (
    DamageError,
    ExistsError,
    NotPackedError,
    Storage,
    index,
    open,
    pack,
)
from shardio.packing import journal
from shardio.packing.gc import gc

pytestmark = pytest.mark.usefixtures("ranges_closed")


@pytest.fixture(scope="module")
def proxy_of_all(store: ObjectStore) -> Iterator[FaultProxy]:
    with fault_proxy(store.port) as proxy:
        yield proxy


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
    with second_part_held(proxy, line, "--jobs", "1") as second:
        assert "is packing here" in shardio(*line, code=5).stderr  # the second is at work
        while len(list(idx.glob(journal.SCAN_NOTE.format("*")))) < 5:
            assert second.poll() is None
            time.sleep(0.01)  # nothing tells when a note is there
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
