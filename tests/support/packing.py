"""Options of `pack` as tests write them, and packings that something happens to."""

import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from shardio.dataset import sequence as sequences
from shardio.packing import build_shard, sources
from shardio.packing.options import GROUPS
from shardio.packing.pack import pack
from shardio.packing.packed import Packed
from shardio.packing.shard_writer import ShardWriter
from support.raw_pixels import encoded, scene
from support.trees import plant, shards


def grouped(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with those of a group in it."""
    found = dict(flat)
    for group, kind in GROUPS.items():
        given = {one.name: found.pop(one.name) for one in fields(kind) if one.name in found}
        if given:
            found[group] = kind(**given)
    return found


def pack_one(source: Path, out: Path, **options: Any) -> Packed:
    [done] = pack(source, out, **grouped({"jobs": 1, "max_records": 4} | options))
    return done


def keys(out: Path) -> list[bytes]:
    return sequences.stored(out).keys()


def inodes(out: Path) -> dict[str, tuple[int, int]]:
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in shards(out)}


def hidden(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith("."))


def unlisted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse to list a source: that takes minutes where it is large."""

    def refuse(*_: object) -> Any:
        raise AssertionError("the source was listed")

    monkeypatch.setattr(sources, "list_records", refuse)


def on_shard(monkeypatch: pytest.MonkeyPatch, number: int, do: Callable[[], Any]) -> None:
    """Do something once, when packing without processes comes to a certain shard."""

    class Watched(ShardWriter):
        def __init__(self, *given: Any) -> None:
            if [one for one in given if type(one) is int] == [number]:  # its only int
                monkeypatch.setattr(build_shard, "ShardWriter", ShardWriter)
                do()
            super().__init__(*given)

    monkeypatch.setattr(build_shard, "ShardWriter", Watched)


def die() -> None:
    raise KeyboardInterrupt


def interrupted(
    monkeypatch: pytest.MonkeyPatch, packer: Callable[..., Any], source: Path, out: Path
) -> None:
    """Pack, and die before the third shard."""
    on_shard(monkeypatch, 2, die)
    with pytest.raises(KeyboardInterrupt):
        packer(source, out)
    assert len(shards(out)) == 2


def png_folder(root: Path, count: int = 12, height: int = 6, width: int = 8) -> Path:
    """Two classes of PNGs of one size; keys are of different lengths."""
    names = [f"{'cat' if i % 3 else 'horse'}/{i}.png" for i in range(count)]
    return plant(root, {name: encoded(scene(i, height, width)) for i, name in enumerate(names)})


def pack_raw(source: Path, out: Path, **options: Any) -> Packed:
    return pack_one(source, out, **({"max_records": 5, "encode": "raw"} | options))
