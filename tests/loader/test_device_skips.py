"""Rows that the device cannot decode, under on_error="skip": what fills them, what is listed.

With device="cpu" PIL decodes in the trainer, by the code that serves a GPU. None of it ran on one.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from support import reading
from support.encoded_crops import jpeg
from support.small_datasets import flip, shard_files
from torch.utils.data import DataLoader

import shardio
from shardio import (
    DecodeError,
    RandomResizedCrop,
    ShardDataset,
    ShardLoader,
    Skip,
    SkipError,
)
from shardio.loader.device_decode import Decoder

N, SIZE = 40, 8
FIELDS_OF_TWO = {"image": "image", "label": "int"}
MANY = Skip(most=N)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.* skipped in epoch", "ignore:This DataLoader will create"
)


def broken(data: bytes) -> bytes:
    """A JPEG with a right header and a right end, and tables that no decoder takes."""
    at = data.index(b"\xff\xc4")
    return data[: at + 5] + b"\xff" * 16 + data[at + 21 :]


def write(folder: Path, bad: Collection[int] = (), more: Any = None) -> Path:
    fields = {"image": "image", "label": "int"} | ({"mask": "image"} if more else {})
    with shardio.Writer(folder, fields=fields) as writer:
        for number in range(N):
            data = jpeg(number)
            sample = {"__key__": str(number), "image": data, "label": number}
            sample |= {"mask": jpeg(number, mode="L")} if more else {}
            writer.write(sample | ({"image": broken(data)} if number in bad else {}))
    return folder


def dataset(folder: Path, **options: Any) -> ShardDataset:
    given: dict[str, Any] = {"fields": ("image", "label", "__key__"), "seed": 3}
    given |= {"transform": RandomResizedCrop((12, 20)), "decode": "cuda", "batch_size": SIZE}
    return ShardDataset(folder, **given | options)


def loader_of(data: ShardDataset, kind: str, **options: Any) -> Any:
    if kind == "dataset":
        return shardio.prefetch(data, "cpu", **options)
    if kind.startswith("ShardLoader"):
        return ShardLoader(data, num_workers=int(kind[-1]), device="cpu", **options)
    loader = DataLoader(data, None, num_workers=2, multiprocessing_context="fork")
    return shardio.prefetch(loader, "cpu", ahead=2, **options)


def drain(loader: Any) -> list[Any]:
    try:
        return reading.drain(loader)
    finally:
        if isinstance(loader, ShardLoader):
            loader.close()


LOADERS = ["dataset", "ShardLoader 0", "ShardLoader 2", "DataLoader"]


def filling(rows: list[int], bad: Collection[int]) -> list[int]:
    """The rows of a batch, each bad one as the next good one, round."""
    return [next(row for row in rows[at:] + rows[:at] if row not in bad) for at in range(len(rows))]


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("mean", [None, 0.5])
def test_rows_are_filled_from_their_batch_and_no_other_moves(
    tmp_path: Path, kind: str, mean: float | None
) -> None:
    bad = {3, 17, 18, 39}
    whole = drain(loader_of(dataset(write(tmp_path / "good")), "dataset", mean=mean))
    data = dataset(write(tmp_path / "bad", bad), on_error=MANY)
    found = drain(loader_of(data, kind, mean=mean))
    assert len(found) == len(whole) == N // SIZE
    for (images, labels, keys), (right, numbers, _) in zip(found, whole, strict=True):
        expected = filling(numbers.tolist(), bad)
        assert labels.tolist() == expected and list(keys) == [*map(str, expected)]
        rows = [numbers.tolist().index(number) for number in expected]
        assert torch.equal(images, right[rows]) and images.dtype == right.dtype
        assert images.is_contiguous(memory_format=torch.channels_last)
    assert {one.number for one in data.skipped} == bad and len(data.skipped) == len(bad)
    for one in data.skipped:
        assert (one.key, one.record, one.epoch) == (str(one.number), one.number, 0)
        assert one.error.startswith(f"DecodeError: record {one.number} of the dataset: image of ")


def test_what_workers_find_and_what_the_device_finds_are_one_list(tmp_path: Path) -> None:
    folder = write(tmp_path / "out", {5})
    reader = dataset(folder).reader
    flip(shard_files(folder)[0], reader.shard(0).offset(30) + 60)
    data = dataset(folder, on_error=Skip(most=5, log=tmp_path / "log"))
    found = drain(loader_of(data, "ShardLoader 2"))
    assert {one.number for one in data.skipped} == {5, 30}
    lines = (tmp_path / "log").read_text().splitlines()
    assert {json.loads(line)["number"] for line in lines} == {5, 30}
    assert sorted(int(n) for _, labels, _ in found for n in labels) != list(range(N))
    assert not {5, 30} & {int(n) for _, labels, _ in found for n in labels}


@pytest.mark.parametrize("as_tuples", [True, False])
def test_filled_rows_are_not_valid(tmp_path: Path, as_tuples: bool) -> None:
    fields = ("image", "label") if as_tuples else None
    data = dataset(write(tmp_path / "out", {4}), tail="exact", on_error=MANY, fields=fields)
    seen = []
    for batch in drain(loader_of(data, "dataset")):
        labels, valid = batch[1:] if as_tuples else (batch["label"], batch["valid"])
        seen += [int(n) for n, own in zip(labels, valid, strict=True) if own]
    assert sorted(seen) == [n for n in range(N) if n != 4]


def test_all_columns_are_filled(tmp_path: Path) -> None:
    folder = write(tmp_path / "out", {4}, more=True)
    how = {"image": "cuda", "mask": None}
    data = dataset(folder, fields=None, on_error=MANY, decode=how)
    for batch in drain(loader_of(data, "dataset")):
        for number, mask in zip(batch["label"].tolist(), batch["mask"].tolist(), strict=True):
            assert number != 4 and mask == jpeg(number, mode="L")


def test_without_a_good_row_it_is_an_error(tmp_path: Path) -> None:
    data = dataset(write(tmp_path / "out", range(N)), on_error=MANY)
    with pytest.raises(SkipError, match=r"record \d+ of the .* of 8 the device can decode none"):
        drain(loader_of(data, "ShardLoader 0"))


@pytest.mark.parametrize("kind", ["dataset", "ShardLoader 2"])
def test_the_limit_is_that_of_a_pass(tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path / "out", {4, 20})
    data = dataset(folder, on_error=Skip(most=1))
    with pytest.raises(SkipError, match=f"2 records skipped of {N} in epoch 0, and on_error allow"):
        drain(loader_of(data, kind))
    data = dataset(folder, on_error=Skip(most=2))
    loader = loader_of(data, kind)
    for epoch in range(3):
        with pytest.warns(UserWarning, match=f"2 records skipped in epoch {epoch}"):
            list(loader)
    assert len(data.skipped) == 6
    drain(loader)  # and close it


def test_what_has_no_rows_raises_as_without_it(tmp_path: Path) -> None:
    def collate(items: Any) -> Any:
        return (*shardio.collate(items), torch.tensor(1))

    folder = write(tmp_path / "out", {4})
    for options in ({"collate_fn": collate, "on_error": MANY}, {}):
        with pytest.raises(DecodeError, match="record 4 of the dataset"):
            drain(loader_of(dataset(folder, **options), "dataset"))


class Refusing(Decoder):
    """Decode nothing."""

    name = "refusing"

    def __init__(self) -> None:
        pass

    def decode(self, files: Any) -> Any:
        return [None for _ in files]


def test_what_a_decoder_refuses_and_pil_decodes_is_not_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardio.loader.device.find_decoder", lambda *_: Refusing())
    data = dataset(write(tmp_path / "out", {4}), on_error=MANY)
    drain(loader_of(data, "dataset"))
    assert [one.number for one in data.skipped] == [4]


def segment(kind: int, data: bytes) -> bytes:
    return bytes([0xFF, kind]) + (len(data) + 2).to_bytes(2, "big") + data


def frame(kind: int, height: int, width: int, depth: int = 8, parts: bytes = b"\1\x11\0") -> bytes:
    size = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return segment(kind, bytes([depth]) + size + bytes([len(parts) // 3]) + parts)


SOI = b"\xff\xd8"
TURNED = b"Exif\0\0MM\0\x2a\0\0\0\x08"
HEADERS = {
    "nothing behind the start": SOI + b"\xff",
    "all that there can be": SOI + frame(0xC0, 65_535, 65_535),
    "no height": SOI + frame(0xC0, 0, 8),
    "no width": SOI + frame(0xC0, 8, 0),
    "no parts": SOI + frame(0xC0, 8, 8, parts=b""),
    "two parts": SOI + frame(0xC0, 8, 8, parts=b"\1\x11\0" * 2),
    "85 parts": SOI + frame(0xC0, 8, 8, parts=b"\1\x11\0" * 85),
    "no sampling": SOI + frame(0xC0, 8, 8, parts=b"\1\0\0"),
    "sampling of 15": SOI + frame(0xC0, 8, 8, parts=b"\1\xff\0"),
    "12 bits": SOI + frame(0xC1, 8, 8, 12),
    "lossless": SOI + frame(0xC3, 8, 8),
    "a short frame": SOI + segment(0xC0, b"\x08\0"),
    "a length of 0": SOI + b"\xff\xe0\0\0" * 9,
    "a length of 1": SOI + b"\xff\xe0\0\1" * 9,
    "a length behind the end": SOI + b"\xff\xe1\xff\xff" + bytes(9),
    "no frame": SOI + segment(0xDA, b"\1\1\0\0\x3f\0") + b"\xff\xd9",
    "a frame behind 9,999 comments": SOI + segment(0xFE, b"") * 9_999 + frame(0xC0, 9, 9),
    "EXIF that goes round": SOI
    + segment(0xE1, TURNED + b"\xff\xff" + b"\x01\x12\0\3\xff\xff\xff\xff\0\0\0\x08" * 99)
    + frame(0xC0, 8, 8),
}


@pytest.mark.parametrize("name", HEADERS)
def test_one_hostile_header_is_named_and_leaves_its_batch(tmp_path: Path, name: str) -> None:
    """With scans that are whole, too: the frame of a picture replaced by another one."""
    picture = jpeg(7)
    at = picture.index(b"\xff\xc0")
    length = int.from_bytes(picture[at + 2 : at + 4], "big") + 2
    for number, data in enumerate(
        (HEADERS[name], picture[:at] + HEADERS[name][2:] + picture[at + length :])
    ):
        with shardio.Writer(tmp_path / str(number), fields=FIELDS_OF_TWO) as writer:
            for record in range(N):
                image = data if record == 7 else jpeg(record)
                writer.write({"__key__": f"k{record}", "image": image, "label": record})
        with pytest.raises(DecodeError, match=r"\bk7\b|record 7\b"):
            drain(loader_of(dataset(tmp_path / str(number)), "dataset"))
        data_of = dataset(tmp_path / str(number), on_error=MANY)
        labels = [one for _, column, _ in drain(loader_of(data_of, "dataset")) for one in column]
        assert sorted({*map(int, labels)}) == [one for one in range(N) if one != 7]
        assert [one.key for one in data_of.skipped] == ["k7"]
