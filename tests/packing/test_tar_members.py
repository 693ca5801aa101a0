"""Headers of tars: many at once as one by one, damaged, or cut short."""

import gzip
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import sources
from support.archives import FORMS, tar, write
from support.sources import listings
from support.trees import JPEG, images

from shardio.errors import DamageError, OptionError, ShardioError, SourceError
from shardio.formats.foreign.tar import Run
from shardio.packing.sources.archives import tar_members
from shardio.packing.sources.archives.tar_members import list_tar

pack_one = partial(sources.pack_one, max_records=9)


def test_a_tar_without_its_end_is_cut_short(tmp_path: Path) -> None:
    data = tar(images())[: 1024 * 7]
    for name, some in (("x.tar", data), ("x.tgz", gzip.compress(data))):
        with pytest.raises(DamageError, match="ends without the zeros that end a tar"):
            pack_one(write(tmp_path / name, some), tmp_path / "out")
        assert not list((tmp_path / "out").glob("*"))


def test_no_damage_of_headers_is_a_traceback(tmp_path: Path) -> None:
    """Of tar and zip: a changed byte gives the dataset, a problem, or an error with its file."""
    rng = np.random.default_rng(7)
    tree = images(2, 2, 40)
    for form in ("pax.tar", "deflated.zip", "zip64.zip"):
        whole = FORMS[form](tree)
        for round_ in range(150):
            data = bytearray(whole)
            data[rng.integers(len(data))] = rng.integers(256)
            source = write(tmp_path / form, bytes(data))
            try:
                for listing in listings(source).values():
                    with listing.source.open() as read:
                        for place in range(len(listing.keys)):
                            with pytest.MonkeyPatch.context():
                                try:
                                    read(place)
                                except Exception as error:
                                    assert type(error).__name__ == "Rejected"
            except (DamageError, SourceError, OptionError) as error:
                assert form in str(error), round_


def test_headers_compared_at_once_are_taken_as_those_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever one byte of a header is, and whether its sum is right."""
    names = [f"c{i // 30}/{i:03}.jpg" for i in range(90)]
    tree: Any = {name: JPEG + bytes(i * 40) for i, name in enumerate(names)}
    tree = {"c0": None} | tree | {"c1": None}
    for dots in ("", "./"):
        whole = tar(tree, dots, tarfile.USTAR_FORMAT)
        heads = [i for i in range(0, len(whole), 512) if whole[i + 257 : i + 262] == b"ustar"]
        rng = np.random.default_rng(3)
        for round_ in range(600):
            data = bytearray(whole)
            head = int(rng.choice(heads))
            place = head + int(
                rng.choice([*range(100), *[124] * 30, *range(124, 158), 257, 345, 350])
            )
            data[place] = rng.choice([*b"\0 .-/0157AK\xff"])
            if round_ % 3:
                total = sum(data[head : head + 148]) + sum(data[head + 156 : head + 512]) + 256
                data[head + 148 : head + 156] = b"%06o\0 " % total
            if round_ % 7 == 0:  # of the same value, but no octal digits
                data[head + 152] -= 1
                data[head + 153] += 8
            quick = _listed(bytes(data))
            with monkeypatch.context() as patch:
                patch.setattr(tar_members, "plain_run", lambda f, at, *_: Run([], [], [], [], at))
                assert _listed(bytes(data)) == quick, (round_, place - head)


class _InMemory:
    def __init__(self, data: bytes) -> None:
        self._data, self.size = data, len(data)

    def read(self, start: int, length: int) -> bytes:
        return self._data[start : start + length]


def _listed(data: bytes) -> Any:
    """All that the listing of a tar says, or the error."""
    try:
        table = list_tar(_InMemory(data), "x")
    except ShardioError as error:
        return repr(error)
    return vars(table)
