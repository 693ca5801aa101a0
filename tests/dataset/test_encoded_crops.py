"""Encoded crops: what workers hand on under decode="cuda"."""

import copy
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.device_crops import encoded, finish
from support.small_datasets import flip
from support.trees import shards
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

import shardio
from shardio import (
    CenterCrop,
    EncodedCrops,
    EncodedImages,
    PerformanceWarning,
    RandomResizedCrop,
    ShardDataset,
    ShardLoader,
    Storage,
    collate,
    native,
)
from shardio.errors import CollateError, DamageError, DecodeError, OptionError
from shardio.images.device_crop import DeviceCrop, Place, Reason

Packed = Callable[..., Path]

# --- the type -------------------------------------------------------------------------------------


def crops_of(files: list[bytes]) -> list[DeviceCrop]:
    return [
        DeviceCrop(data, tuple(i + p / 8 for p in Place), (4, 5), "bicubic")
        for i, data in enumerate(files)
    ]


@given(st.lists(st.binary(max_size=9), min_size=1, max_size=7), st.data())
def test_it_is_a_sequence_of_crops(files: list[bytes], data: st.DataObject) -> None:
    crops = crops_of(files)
    joined = EncodedCrops.join(crops)
    assert type(joined.files) is EncodedImages and joined.files == files
    assert joined.places.shape == (len(files), len(Place))
    assert joined.places.dtype == torch.float64
    assert (joined.shape, joined.interpolation) == ((4, 5), "bicubic")
    assert joined.column(Place.TOP) == [i + 1 / 8 for i in range(len(files))]
    assert len(joined) == len(files) and list(joined) == crops and joined[-1] == crops[-1]
    with pytest.raises(IndexError):
        joined[len(files)]
    ends = st.none() | st.integers(-9, 9)
    part = slice(data.draw(ends), data.draw(ends), data.draw(ends.filter(lambda step: step != 0)))
    some = joined[part]
    assert type(some) is EncodedCrops and list(some) == crops[part]
    for twin in (joined, some):
        for made in (pickle.loads(pickle.dumps(twin)), copy.deepcopy(twin), copy.copy(twin)):
            assert type(made) is EncodedCrops and made == twin and list(made) == list(twin)


def test_equality_is_that_of_files_and_crops() -> None:
    crops = crops_of([b"ab", b"c"])
    joined = EncodedCrops.join(crops)
    assert joined == EncodedCrops.join(crops) and joined != joined[:1] and joined != crops
    assert joined != EncodedCrops.join(crops_of([b"a", b"bc"]))
    for other in (
        EncodedCrops(joined.files, joined.places + 1, (4, 5), "bicubic"),
        EncodedCrops(joined.files, joined.places, (5, 4), "bicubic"),
        EncodedCrops(joined.files, joined.places, (4, 5), "lanczos"),
    ):
        assert joined != other
    with pytest.raises(TypeError, match="unhashable"):
        hash(joined)


def test_its_text_says_how_many_are_for_the_device() -> None:
    joined = EncodedCrops.join(crops_of([b"ab", b"c", b"def"]))
    joined.places[:, Place.REASON] = torch.tensor([0, Reason.SCANS, 0])
    assert repr(joined) == "<3 encoded crops, 4 x 5, 6 bytes, 1 finished by the CPU>"


def test_torch_pins_files_and_places(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    joined = EncodedCrops.join(crops_of([b"ab", b""]))
    (result,) = pin_memory((joined,))
    assert type(result) is EncodedCrops and result == joined
    assert result.files.buffer is pinned[0] and result.places is pinned[1] and len(pinned) == 2


# --- batches --------------------------------------------------------------------------------------

FIELDS = ("__key__", "image", "label")
CROP = RandomResizedCrop((24, 40), flip=True)


def picture(i: int) -> bytes:
    """Return an image of one of nine kinds, three of which are not for the device."""
    return encoded(**KINDS[i % len(KINDS)])


KINDS: list[dict[str, Any]] = [
    {},
    {"width": 444, "height": 300, "tiled": True},
    {"orientation": 6},
    {"width": 444, "height": 300, "tiled": True, "orientation": 3},
    {"mode": "L"},
    {"progressive": True},
    {"width": 70, "height": 160, "orientation": 5},
    {"kind": "PNG"},
    {"kind": "PPM"},
]


def options_of(decode: Any, **given: Any) -> dict[str, Any]:
    return {
        "batch_size": 8, "fields": FIELDS, "transform": CROP, "seed": 5, "decode": decode, **given
    }  # fmt: skip


@pytest.fixture
def by_pil(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the core, whose resize is within a level of PIL's."""
    monkeypatch.setattr(native, "core", None)


def finished(crops: Any) -> torch.Tensor:
    """Make the images of a batch, (B, 3, H, W), as the device would."""
    assert type(crops) is EncodedCrops and crops.files.buffer.dtype == torch.uint8
    return torch.from_numpy(np.stack([finish(crop) for crop in crops])).permute(0, 3, 1, 2)


def check(batch: Any, expected: Any) -> None:
    """Check that a batch becomes that of decode="pil"."""
    if isinstance(batch, dict):
        assert list(batch) == list(expected)
        batch, expected = tuple(batch.values()), tuple(expected.values())
    assert batch[0] == expected[0] and torch.equal(finished(batch[1]), expected[1])
    for values, others in zip(batch[2:], expected[2:], strict=True):
        assert torch.equal(values, others)


@pytest.mark.parametrize(
    "given_options",
    [
        {},
        {"fields": None},
        {"tail": "exact"},
        {"rank": 1, "world_size": 3, "tail": "exact"},
        {"shuffle": False, "transform": CenterCrop(30, 40)},
        {"where": {"label": [0, 2]}},
        {"decode": {"image": "cuda"}},
    ],
    ids=str,
)
def test_batches_become_those_of_pil(
    packed: Packed, given_options: dict[str, Any], by_pil: None
) -> None:
    folder = packed([20, 0, 31], image=picture)
    dataset = ShardDataset(folder, **options_of("cuda") | given_options)
    whole = ShardDataset(folder, **options_of("pil") | given_options | {"decode": "pil"})
    for _ in range(2):  # epochs
        batches, expected = list(dataset), list(whole)
        assert len(batches) == len(expected) > 1
        for batch, other in zip(batches, expected, strict=True):
            check(batch, other)


def test_reasons_and_numbers_say_which_images_the_cpu_has_finished(packed: Packed) -> None:
    folder = packed([9, 9], image=picture)
    (batch,) = ShardDataset(folder, **options_of("cuda", batch_size=18, shuffle=False))
    expected = [0, 0, 0, 0, 0, Reason.PROCESS, 0, Reason.NOT_JPEG, Reason.NOT_JPEG]
    assert batch[1].column(Place.REASON) == expected * 2
    assert batch[1].column(Place.NUMBER) == list(range(18))
    assert repr(batch[1]).endswith("6 finished by the CPU>")


@pytest.mark.parametrize("given_options", [{}, {"fields": None, "tail": "exact"}], ids=str)
def test_workers_give_the_same_batches(packed: Packed, given_options: dict[str, Any]) -> None:
    dataset = ShardDataset(packed([50, 51], image=picture), **options_of("cuda", **given_options))
    expected = list(dataset)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*pin_memory.*")  # without an accelerator
        for workers in (0, 1, 2):
            dataset.set_epoch(0)
            loader = DataLoader(dataset, batch_size=None, num_workers=workers, pin_memory=True)
            for batch, other in zip(loader, expected, strict=True):
                values, others = (
                    tuple(one.values() if isinstance(one, dict) else one) for one in (batch, other)
                )
                assert values[:2] == others[:2] and torch.equal(values[2], others[2])


def test_torch_makes_batches_of_samples(packed: Packed, by_pil: None) -> None:
    folder = packed([30], image=picture)
    for more in ({}, {"map": lambda item: item}, {"map": lambda item, rng: (*item, rng.random())}):
        data = [
            ShardDataset(folder, **options_of(how, batch_size=None, **more))
            for how in ("cuda", "pil")
        ]
        loaders = [DataLoader(one, batch_size=8, collate_fn=collate) for one in data]
        for batch, expected in zip(*loaders, strict=True):
            check(batch, expected)


def test_a_pass_goes_on_after_a_stop(packed: Packed) -> None:
    folder = packed([60, 41], image=picture)
    dataset = ShardDataset(folder, **options_of("cuda"))
    whole = list(dataset)
    dataset.set_epoch(0)
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    begun = [batch[1] for batch, _ in zip(loader, range(4), strict=False)]
    later = ShardDataset(folder, **options_of("cuda"))
    later.load_state_dict(dataset.state_dict(steps=4))
    rest = [batch[1] for batch in DataLoader(later, batch_size=None, num_workers=1)]
    assert begun + rest == [batch[1] for batch in whole]


def test_a_mixture_has_the_crops_of_all(packed: Packed, by_pil: None) -> None:
    folders = packed([30, 11], "a", image=picture), packed([50], "b", image=picture)

    def mixture(decode: Any, /, **second: Any) -> Any:
        more: tuple[dict[str, Any], dict[str, Any]] = ({}, second)
        parts = [
            ShardDataset(folder, **options_of(decode) | one)
            for folder, one in zip(folders, more, strict=True)
        ]
        return ShardDataset.mix(parts, [2, 1])

    smaller = {"transform": RandomResizedCrop((24, 40), scale=(0.05, 0.2))}
    for batch, expected in zip(mixture("cuda", **smaller), mixture("pil", **smaller), strict=True):
        check(batch, expected)
    for other in (
        {"decode": "pil"},
        {"transform": CenterCrop(24)},
        {"transform": CenterCrop((24, 40), interpolation="bicubic")},
    ):
        with pytest.raises(OptionError, match="mix: what decode='cuda' gives of dataset 1: "):
            mixture("cuda", **other)


# --- other fields, and no image -------------------------------------------------------------------

SCENE = (("__key__", "key"), ("image", "image"), ("mask", "image"), ("boxes", "json"))


def scene_of(i: int) -> dict[str, Any]:
    options = KINDS[i % len(KINDS)]
    size = {name: options[name] for name in ("width", "height") if name in options}
    mask = encoded(kind="PNG", mode="L", **size)
    if options.get("orientation", 1) in (5, 6):
        wide, high = size.get("width", 150), size.get("height", 100)
        mask = encoded(width=high, height=wide, kind="PNG", mode="L")
    return {"__key__": b"%d" % i, "image": picture(i), "mask": mask, "boxes": [[9, 9, 50, 40, i]]}


def test_one_draw_crops_masks_and_boxes_too(packed: Packed, by_pil: None) -> None:
    folder = packed([18], fields=SCENE, sample=scene_of, classes=None)
    both = RandomResizedCrop((24, 40), flip=True, fields=("image", "mask"), boxes="boxes")
    given_options = {"transform": both, "fields": ("__key__", "image", "mask", "boxes")}
    for how in ("cuda", {"image": "cuda"}, {"image": "cuda", "mask": "numpy"}):
        batches = ShardDataset(folder, **options_of(how, **given_options))
        expected = ShardDataset(folder, **options_of("pil", **given_options))
        for batch, other in zip(batches, expected, strict=True):
            check(batch[:3], other[:3])
            assert batch[3] == other[3]


def test_a_crop_beside_none_or_another_one_is_refused(packed: Packed) -> None:
    def sample(i: int) -> dict[str, Any]:
        return {"__key__": b"k/%06d" % i, "image": None if i == 5 else picture(0), "label": i}

    folder = packed([8], sample=sample)
    with pytest.raises(CollateError) as raised:
        list(ShardDataset(folder, **options_of("cuda", shuffle=False)))
    said = str(raised.value)
    assert "field 'image' cannot be stacked" in said and "k/000005 has None" in said
    assert "k/000000 has a crop (24, 40) by bilinear, for the device" in said

    def change(item: Any) -> Any:
        return (item[0], item[1] if item[0] != "k/000003" else torch.zeros(3), item[2])

    with pytest.raises(CollateError, match=r"k/000003 has \(3,\) float32"):
        list(ShardDataset(folder, **options_of("cuda", shuffle=False, batch_size=4, map=change)))
    crops = crops_of([b"a"]) + [replace(one, interpolation="box") for one in crops_of([b"b"])]
    with pytest.raises(CollateError, match=r"item 1 of the batch has a crop \(4, 5\) by box"):
        collate(crops)


# --- what cannot be -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given_options, message",
    [
        ({"transform": None}, "no built-in transform, which tells the device its crops: give "),
        ({"transform": lambda image: image}, "no built-in transform"),
        ({"transform": CenterCrop(8, interpolation="nearest")}, "'nearest', which decode='cuda'"),
        ({"decode": {"mask": "cuda"}}, "'cuda' is given for 'mask', expected the first image "),
        ({"decode": {"image": "cuda", "mask": "cuda"}}, "'cuda' is given for 'image', 'mask'"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    packed: Packed, given_options: dict[str, Any], message: str
) -> None:
    folder = packed([2], fields=SCENE, sample=scene_of, classes=None)
    options = options_of("cuda", fields=("image",)) | given_options
    with pytest.raises(OptionError, match=message):
        ShardDataset(folder, **options)


def test_whoever_looks_at_images_decodes_them(packed: Packed) -> None:
    folder = packed([8], image=picture)
    with pytest.raises(OptionError, match=r"open: decode='cuda' is for training.* give 'pil'"):
        shardio.open(folder, decode="cuda", transform=CROP)
    dataset = ShardDataset(folder, **options_of("cuda", transform=CenterCrop(8)))
    with pytest.raises(OptionError, match=r"resident decodes once.* give decode='pil'"):
        list(ShardLoader(dataset, num_workers=0, device="cpu", resident="ram"))


def test_images_that_are_too_large_are_told_as_ever(packed: Packed) -> None:
    folder = packed([8], image=picture)
    messages = []
    for how in ("cuda", "pil"):
        limited = options_of(how, shuffle=False, storage=Storage(max_pixels=15_000))
        with pytest.raises(
            DecodeError, match=r"^record 1 of the dataset, k/000001.*over the lim"
        ) as e:
            list(ShardDataset(folder, **limited))
        messages.append(str(e.value))
    assert messages[0] == messages[1]


def test_damage_is_told_as_ever(packed: Packed) -> None:
    folder = packed([8], image=picture)
    dataset = ShardDataset(folder, **options_of("cuda"))
    at = dataset.reader.shard(0).offset(3) + 200
    dataset.reader.forget()
    flip(shards(folder)[0], at)
    with pytest.raises(DamageError, match=r"record 3 at byte \d+ \(key k/000003.jpg"):
        list(DataLoader(ShardDataset(folder, **options_of("cuda")), batch_size=None))


def test_nobody_is_told_that_the_core_would_crop_faster(packed: Packed, by_pil: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerformanceWarning)
        ShardDataset(packed([2], image=picture), **options_of("cuda"))


def test_watch_and_explain_take_these_batches(packed: Packed) -> None:
    dataset = ShardDataset(packed([60], image=picture), **options_of("cuda"))
    assert not shardio.explain(dataset, num_workers=1).warnings
    watched = shardio.watch(DataLoader(dataset, batch_size=None, num_workers=1))
    assert sum(1 for _ in watched) == 8 and watched.verdict
