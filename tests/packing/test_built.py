"""Notes of finished shards: a quick commit trusts them, and reads the shards that changed since."""

import os
from pathlib import Path

import pytest
from support.packing import pack_one
from support.trees import (
    content,
)

from shardio.errors import (
    NotPackedError,
)
from shardio.packing.commit import commit
from shardio.storage import local


@pytest.mark.parametrize("damage", ["none", "all", "no note", "note", "file", "touched"])
def test_a_quick_commit_reads_only_shards_that_changed_since_their_part_wrote_them(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    out = tmp_path / "out"
    for part in (1, 2):
        pack_one(source, out, part=(part, 2))
    shard = max(out.glob("*.shard"))
    note = out / f".shardio-built-{shard.name}.json"
    if damage == "no note":
        note.unlink()
    elif damage == "note":
        note.write_bytes(note.read_bytes().replace(b'"number": ', b'"number": 1', 1))
    elif damage == "file":
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    elif damage == "touched":
        os.utime(shard)
    read: list[str] = []
    sha256 = local.LocalFile.sha256

    def counted(file: local.LocalFile) -> bytes:
        read.append(os.path.basename(file.name))
        return sha256(file)

    monkeypatch.setattr(local.LocalFile, "sha256", counted)
    if damage == "file":
        with pytest.raises(NotPackedError, match=r"1 of 6 shards are not built"):
            commit(out, jobs=1, quick=True)
        assert read == [shard.name]
        return
    shards = sorted(path.name for path in out.glob("*.shard"))
    commit(out, jobs=1, quick=damage != "all")
    assert read == {"none": [], "all": shards}.get(damage, [shard.name])
    pack_one(source, tmp_path / "one")
    assert content(out) == content(tmp_path / "one")
    assert not list(out.glob(".shardio-*"))


def test_only_notes_that_shardio_wrote_go_at_the_commit(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for part in (1, 2):
        pack_one(source, out, part=(part, 2))
    assert len(list(out.glob(".shardio-built-*"))) == 6
    named = [".shardio-built-x.json", ".shardio-sent-00000.json", ".shardio-scan-00000.json"]
    for name in named[:2]:
        (out / name).write_text("of somebody else")
    (out / named[2]).mkdir()
    commit(out)
    assert sorted(path.name for path in out.glob(".shardio-*")) == sorted(named)


def test_a_part_that_is_run_again_writes_the_notes_that_a_kill_left_out(
    source: Path, tmp_path: Path
) -> None:
    pack_one(source, tmp_path / "out", part=(1, 2))
    notes = {path: path.read_bytes() for path in (tmp_path / "out").glob(".shardio-built-*")}
    min(notes).unlink()
    assert pack_one(source, tmp_path / "out", part=(1, 2)).kept == len(notes) == 3
    assert {path: path.read_bytes() for path in notes} == notes
