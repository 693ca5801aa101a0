"""What becomes of a stored sample: decode by field, transforms, map; errors name the record."""

import pickle
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import small_datasets
from support.raw_pixels import encoded, scene
from support.scenes import (
    BUILT_IN,
    COUNT,
    FAILING,
    FIELDS,
    LOADERS,
    RAGGED,
    SIZE,
    check_planes,
    ids,
    png,
    sample,
    shown,
)
from support.trees import plant
from torch.utils.data import DataLoader

import shardio
from shardio import (
    CenterCrop,
    DecodeError,
    OptionError,
    RandomResizedCrop,
    ShardDataset,
    ShardLoader,
)
from shardio.dataset import sequence as sequences
from shardio.images.decode import pixels
from shardio.packing.pack import pack

Packed = Callable[..., Path]
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def by_label(batches: Any, name: str) -> dict[int, Any]:
    """The rows of a field, by their labels, of batches that are dicts."""
    return {
        int(label): row
        for batch in batches
        for label, row in zip(batch["label"], batch[name], strict=True)
    }


# --- decode ---------------------------------------------------------------------------------------


def test_only_the_first_image_field_becomes_rgb(scenes: Path) -> None:
    for number, one in enumerate(shardio.open(scenes)):
        assert one["image"].mode == "RGB"
        assert one["mask"].mode == "P" and np.array_equal(np.asarray(one["mask"]), ids(number))
        assert one["depth"].mode == "I;16"
    for number, one in enumerate(shardio.open(scenes, decode="numpy")):
        assert np.array_equal(one["image"], pixels(small_datasets.jpeg(number)))
        assert one["mask"].dtype == np.uint8 and np.array_equal(one["mask"], ids(number))
        assert one["depth"].dtype == np.uint16 and np.array_equal(
            one["depth"], ids(number).astype(np.uint16) * 1000
        )


def test_masks_keep_their_classes_in_batches(scenes: Path) -> None:
    train = ShardDataset(
        scenes, batch_size=5, decode="numpy", fields=("image", "mask", "depth", "label")
    )
    for images, masks, depths, labels in DataLoader(train, batch_size=None):
        assert images.shape == (5, 3, 16, 24)
        expected = np.stack([ids(int(label)) for label in labels])
        assert masks.dtype == torch.uint8 and np.array_equal(masks.numpy(), expected)
        assert np.array_equal(depths.numpy(), expected.astype(np.uint16) * 1000)


@pytest.mark.parametrize(
    "how, kind, mode",
    [
        ("pil", Image.Image, "RGB"),
        ("gray", Image.Image, "L"),
        ("stored", Image.Image, "P"),
        ("numpy", np.ndarray, None),
        (None, bytes, None),
        (len, int, None),
    ],
)
def test_decode_by_field(scenes: Path, how: Any, kind: type, mode: str | None) -> None:
    one = shardio.open(scenes, decode={"mask": how})[3]
    assert isinstance(one["mask"], kind)
    assert mode is None or one["mask"].mode == mode
    assert one["image"].mode == "RGB" and one["depth"].mode == "I;16"  # as without


def test_an_array_of_a_mask_holds_its_ids_however_it_is_asked_for(scenes: Path) -> None:
    for decode in ("numpy", {"mask": "numpy"}, {"image": "numpy", "mask": "numpy"}):
        assert np.array_equal(shardio.open(scenes, decode=decode)[2]["mask"], ids(2))  # type: ignore[arg-type]
    assert shardio.open(scenes, decode={"image": "numpy"})[2]["image"].shape == (16, 24, 3)
    assert shardio.open(scenes, decode={"image": "gray"})[2]["image"].mode == "L"
    assert shardio.open(scenes, decode="gray")[2]["mask"].mode == "P"


@pytest.mark.parametrize(
    "decode, message",
    [
        ({"masc": "pil"}, "decode: 'masc' is no image field; there are 'image', 'mask', 'depth'"),
        ({"label": "pil"}, "decode: 'label' is no image field"),
        (
            {"mask": "rgb"},
            "decode['mask'] is 'rgb': expected 'pil', 'numpy', 'gray', 'stored', None",
        ),
        (
            "rgb",
            "decode is 'rgb': expected 'pil', 'numpy', 'gray', 'stored', None or a function of "
            "bytes, or a mapping",
        ),
        (7, "decode is 7: expected"),
        (
            CenterCrop,
            "decode is the class CenterCrop: expected an object of it, decode=CenterCrop(224)",
        ),
    ],
)
def test_a_wrong_decode_is_refused(scenes: Path, decode: Any, message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        ShardDataset(scenes, decode=decode)


def test_the_pixel_limit_is_within_reach(scenes: Path) -> None:
    with pytest.raises(
        DecodeError, match=r"record 0 of the dataset, k/00: .* limit of 383.* max_pixels=384"
    ):
        shardio.open(scenes, storage=shardio.Storage(max_pixels=383))[0]
    assert shardio.open(scenes, storage=shardio.Storage(max_pixels=384))[0]["image"].size == SIZE
    for transform in (CenterCrop(8), None):
        one = ShardDataset(
            scenes,
            batch_size=2,
            fields=("image",),
            storage=shardio.Storage(max_pixels=383),
            transform=transform,
        )
        with pytest.raises(DecodeError, match="limit of 383"):
            next(iter(one))
    own = ShardDataset(
        scenes,
        fields=("image",),
        storage=shardio.Storage(max_pixels=383),
        transform=CenterCrop(8, max_pixels=384),
    )
    assert len(list(own)) == COUNT  # what the transform says itself counts


def test_the_pixel_limit_is_pickled(scenes: Path) -> None:  # for spawned workers
    data = ShardDataset(
        scenes, batch_size=5, fields=("image",), storage=shardio.Storage(max_pixels=383)
    )
    with pytest.raises(DecodeError, match="limit of 383"):
        list(pickle.loads(pickle.dumps(data)))


# --- one draw for several fields ------------------------------------------------------------------


def test_images_masks_and_boxes_are_cropped_together(scenes: Path) -> None:
    crop = RandomResizedCrop((12, 20), flip=True, fields=("image", "mask", "depth"), boxes="boxes")
    collate = partial(shardio.collate, ragged=("boxes",))
    data = ShardDataset(scenes, batch_size=4, transform=crop, collate_fn=collate, seed=3)
    alone = ShardDataset(
        scenes, batch_size=4, transform=RandomResizedCrop((12, 20), flip=True), decode=None, seed=3
    )
    seen = []
    for batch, expected in zip(data, alone, strict=True):
        assert torch.equal(batch["image"], expected["image"])  # the pixels of the image alone
        assert batch["image"].is_contiguous(memory_format=torch.channels_last)
        assert batch["mask"].shape == (len(batch["label"]), 12, 20)
        assert torch.equal(batch["mask"].to(torch.int64) * 1000, batch["depth"].to(torch.int64))
        assert type(batch["boxes"]) is list
        seen += batch["mask"].unique().tolist()
    assert set(seen) <= set(range(40)) and len(set(seen)) > 10
    data.set_epoch(0)
    with ShardLoader(data, num_workers=1) as loader:
        again = by_label(loader, "mask")
    for label, row in by_label(data_again(data), "mask").items():
        assert torch.equal(row, again[label])


def data_again(data: ShardDataset) -> Iterator[Any]:
    data.set_epoch(0)
    return iter(data)


def test_a_photograph_is_resampled_where_decode_says_pil(scenes: Path) -> None:
    crop = CenterCrop(8, fields=("image", "mask"))
    one = shardio.open(scenes, transform=crop, decode={"mask": "pil"})[1]
    assert one["mask"].shape == (8, 8, 3)
    one = shardio.open(scenes, transform=crop, decode={"mask": "gray"})[1]
    assert one["mask"].shape == (8, 8)


def test_fields_of_other_sizes_name_the_record(packed: Packed) -> None:
    folder = packed(
        [3],
        fields=FIELDS,
        sample=lambda i: sample(i) | ({"mask": png(Image.new("P", (9, 9)))} if i == 1 else {}),
    )
    data = ShardDataset(folder, transform=CenterCrop(8, fields=("image", "mask")), shuffle=False)
    with pytest.raises(
        DecodeError, match=r"record 1 of the dataset, k/01: 'image' is 24 x 16 .* 'mask' 9 x 9"
    ):
        list(data)


@pytest.mark.parametrize(
    "options, fields, message",
    [
        (
            {"fields": ("image", "masc")},
            None,
            "fields has 'masc', expected image fields that samples have: 'image', 'mask', 'depth'",
        ),
        ({"fields": ("image", "mask")}, ("image",), "fields has 'mask', .* have: 'image'"),
        ({"fields": ("mask",)}, None, "fields is .* without 'image', the first image field"),
        ({"boxes": "label2"}, None, "boxes is 'label2', expected a field .* 'boxes'"),
        ({"boxes": "mask"}, None, "boxes is 'mask'"),
    ],
)
def test_fields_that_samples_lack_are_refused(
    scenes: Path, options: Any, fields: Any, message: str
) -> None:
    with pytest.raises(OptionError, match=f"CenterCrop: {message}"):
        ShardDataset(scenes, fields=fields, transform=CenterCrop(8, **options))


# --- map ------------------------------------------------------------------------------------------


def doubled(item: dict[str, Any]) -> dict[str, Any]:
    return {"label": item["label"] * 2, "names": sorted(item), "size": item["image"].size}


def noisy(item: tuple[Any, ...], rng: np.random.Generator) -> tuple[Any, ...]:
    return (*item, rng.random(), int(rng.integers(1 << 40)))


def test_map_gets_the_whole_sample(scenes: Path) -> None:
    data = ShardDataset(scenes, batch_size=5, map=doubled, target_transform=lambda label: label + 1)
    (first, second) = list(data)
    labels = torch.cat([first["label"], second["label"]]).tolist()
    assert sorted(labels) == [2 * (label + 1) for label in range(COUNT)]
    assert first["names"][0] == sorted(name for name, _ in FIELDS)
    assert (
        first["size"] == [torch.Size([]), torch.Size([])] or first["size"][0].tolist() == [24] * 5
    )


def test_map_may_make_tuples_of_dicts_and_the_other_way(scenes: Path) -> None:
    pairs = ShardDataset(scenes, batch_size=5, map=lambda one: (one["label"], one["label"]))
    assert all(torch.equal(a, b) for a, b in pairs)
    dicts = ShardDataset(scenes, batch_size=5, fields=("label",), map=lambda one: {"y": one[0]})
    assert sorted(y for batch in dicts for y in batch["y"].tolist()) == list(range(COUNT))


def draws_of(data: Any, loader: Callable[[Any], Any], epoch: int) -> dict[int, tuple[float, int]]:
    data.set_epoch(epoch)
    return {
        int(label): (float(one), int(two))
        for labels, ones, twos in loader(data)
        for label, one, two in zip(labels, ones, twos, strict=True)
    }


@pytest.mark.parametrize("loader", LOADERS)
def test_the_generator_is_the_samples_own(scenes: Path, loader: str) -> None:
    options: Any = {"fields": ("label",), "map": noisy, "seed": 5}
    plain = ShardDataset(scenes, batch_size=3, **options)
    expected = draws_of(plain, LOADERS["here"], 1)
    assert len(set(expected.values())) == COUNT
    assert draws_of(ShardDataset(scenes, batch_size=4, **options), LOADERS[loader], 1) == expected
    assert draws_of(plain, LOADERS["here"], 2) != expected
    assert (
        draws_of(ShardDataset(scenes, batch_size=3, **options | {"seed": 6}), LOADERS["here"], 1)
        != expected
    )


def test_the_generator_is_the_same_after_a_resume(scenes: Path) -> None:
    options: Any = {"batch_size": 3, "fields": ("label",), "map": noisy}
    data = ShardDataset(scenes, **options)
    whole = [tuple(map(torch.Tensor.tolist, batch)) for batch in data]
    resumed = ShardDataset(scenes, **options)
    resumed.load_state_dict(data.state_dict(steps=2))
    assert [tuple(map(torch.Tensor.tolist, batch)) for batch in resumed] == whole[2:]


def test_datasets_of_a_mixture_have_their_own_maps(scenes: Path) -> None:
    options: Any = {"batch_size": 4, "seed": 1}
    one = ShardDataset(scenes, fields=("label",), map=lambda item: (item[0], 1.0), **options)
    two = ShardDataset(scenes, map=lambda item, rng: (item["label"] + 100, rng.random()), **options)
    mixture = ShardDataset.mix([one, two], weights=[1, 1])
    rows = [
        (int(a), float(b)) for labels, more in mixture for a, b in zip(labels, more, strict=True)
    ]
    assert {b for a, b in rows if a < 100} == {1.0} and {a for a, _ in rows if a >= 100}
    assert len({b for a, b in rows if a >= 100}) > 1
    mixture.set_epoch(0)
    with ShardLoader(mixture, num_workers=2) as loader:
        again = [
            (int(a), float(b)) for labels, more in loader for a, b in zip(labels, more, strict=True)
        ]
    assert again == rows


def test_a_map_may_keep_what_it_gets(scenes: Path) -> None:
    kept: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def keep(item: Any) -> Any:
        kept.append((item[1], item[0], item[0].clone()))
        return item

    big = RandomResizedCrop(64)
    data = ShardDataset(scenes, batch_size=2, fields=("image", "label"), transform=big, map=keep)
    with ShardLoader(data, num_workers=0, threads=0, prefetch_factor=1) as loader:
        for epoch in range(3):
            data.set_epoch(epoch)
            for images, labels in loader:
                here = {label: image for label, image, _ in kept[-2:]}
                for image, label in zip(images, labels.tolist(), strict=True):
                    assert torch.equal(image, here[label])
    assert all(torch.equal(image, copy) for _, image, copy in kept)


def three(a: Any, b: Any, c: Any) -> Any:
    return a


@pytest.mark.parametrize(
    "function, generator",
    [
        (lambda item: 1, False),
        (lambda item, rng: 1, True),
        (lambda item, rng=None: 1 if rng is None else 2, False),
        (lambda *items: len(items), False),
        (partial(three, c=1), True),
        (partial(three, b=1, c=2), False),
        (len, False),
    ],
)
def test_a_second_argument_without_default_is_the_generator(
    scenes: Path, function: Any, generator: bool
) -> None:
    data = ShardDataset(scenes, fields=("label",), map=function)
    assert data.draws is generator
    next(iter(data))


@pytest.mark.parametrize(
    "function, message",
    [
        (7, "map is 7: expected a function"),
        (three, "map takes 3 arguments: expected a function of a sample, or of a sample and"),
        (lambda: 1, "map takes 0 arguments"),
        (lambda *, image: 1, "map is called with named arguments only"),
    ],
)
def test_what_is_no_map_is_refused(scenes: Path, function: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ShardDataset(scenes, map=function)


# --- transforms by name, classes ------------------------------------------------------------------


class ByName:
    """As albumentations has it: named arguments, a dict of results."""

    def __call__(self, *args: Any, force_apply: bool = False, **data: Any) -> dict[str, Any]:
        if args:
            raise KeyError("You have to pass data to augmentations as named arguments")
        image = data["image"]
        assert isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.shape[2] == 3
        image[:] //= 2  # the array is the transform's own
        return {"image": image, "more": 1}


class Named:
    def __call__(self, *, image: Any) -> dict[str, Any]:
        return {"image": image // 2}


@pytest.mark.parametrize("decode", ["pil", "numpy", None, "stored", {"mask": "stored"}])
@pytest.mark.parametrize("kind", ["albumentations", "a subclass", "named only"])
def test_transforms_of_named_arguments_get_arrays(
    scenes: Path, monkeypatch: pytest.MonkeyPatch, kind: str, decode: Any
) -> None:
    transform: Any = Named()
    if kind != "named only":
        theirs = type("Compose", (ByName,), {"__module__": "albumentations.core.composition"})
        transform = theirs() if kind == "albumentations" else type("Mine", (theirs,), {})()
    data = ShardDataset(
        scenes, batch_size=5, fields=("image", "label"), transform=transform, decode=decode
    )
    for images, labels in data:
        for image, label in zip(images, labels.tolist(), strict=True):
            expected = pixels(small_datasets.jpeg(label)) // 2
            assert np.array_equal(image.permute(1, 2, 0).numpy(), expected)


class Mine:
    def __init__(self, size: int = 3) -> None:
        pass


@pytest.mark.parametrize("name", ["transform", "target_transform", "map", "collate_fn"])
@pytest.mark.parametrize("given", [RandomResizedCrop, CenterCrop, Mine])
def test_a_class_where_an_object_was_meant_is_refused(scenes: Path, name: str, given: Any) -> None:
    size = "..." if given is Mine else "224"
    own = given.__name__
    message = f"{name} is the class {own}: expected an object of it, {name}={own}({size})"
    with pytest.raises(OptionError, match=re.escape(message)):
        ShardDataset(scenes, **{name: given})


def test_conversions_are_no_mistake(scenes: Path) -> None:
    data = ShardDataset(
        scenes,
        fields=("label",),
        target_transform=np.float32,
        map=list,
        collate_fn=list,
        batch_size=2,
    )
    assert next(iter(data))[0][0].dtype == np.float32


# --- layout ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_built_in_transforms_give_planes_wherever_torch_collates(
    scenes: Path, workers: int
) -> None:
    expected = {i: CenterCrop(8)(small_datasets.jpeg(i)) for i in range(COUNT)}
    samples = ShardDataset(scenes, **BUILT_IN)
    for image, _ in samples:
        check_planes(image)
    for collate in (None, shardio.collate):
        loader = DataLoader(samples, batch_size=4, num_workers=workers, collate_fn=collate)
        samples.set_epoch(1)
        for images, labels in loader:
            assert images.dtype == torch.uint8 and images.shape[1:] == (3, 8, 8)
            for image, label in zip(images, labels.tolist(), strict=True):
                assert np.array_equal(image.permute(1, 2, 0).numpy(), expected[label])
            if collate is not None:
                assert images.is_contiguous(memory_format=torch.channels_last)


def test_every_image_of_a_crop_is_a_tensor_then(scenes: Path) -> None:
    crop = CenterCrop(8, fields=("image", "mask"))
    image, mask = next(iter(ShardDataset(scenes, fields=("image", "mask"), transform=crop)))
    check_planes(image)
    assert type(mask) is torch.Tensor and mask.shape == (8, 8)
    seen = []
    mapped = ShardDataset(
        scenes,
        fields=("image", "mask"),
        transform=crop,
        batch_size=2,
        map=lambda item: seen.append(item) or item,
    )
    images, masks = next(iter(mapped))
    check_planes(seen[0][0])
    assert images.is_contiguous(memory_format=torch.channels_last) and masks.shape == (2, 8, 8)


def test_arrays_that_were_asked_for_stay_arrays(scenes: Path) -> None:
    alone = CenterCrop(8, fields=("image",))
    assert shardio.open(scenes, transform=alone)[0]["image"].shape == (8, 8, 3)
    one = next(iter(ShardDataset(scenes, decode="numpy")))
    assert type(one["image"]) is np.ndarray and one["image"].shape == (16, 24, 3)


def test_a_crop_that_would_leave_a_mask_behind_is_refused(scenes: Path) -> None:
    with pytest.raises(
        OptionError, match=r"crops 'image' alone, and no longer fits 'mask'.*fields="
    ):
        ShardDataset(scenes, fields=("image", "mask"), transform=RandomResizedCrop(8))
    for fields in (("image", "mask"), ("image",)):
        ShardDataset(
            scenes, fields=("image", "mask"), transform=RandomResizedCrop(8, fields=fields)
        )
    ShardDataset(scenes, fields=("image", "label"), transform=RandomResizedCrop(8))


def returns_a_dict(picture: Any, **more: Any) -> Any:
    return {"image": picture} | more


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transform": lambda picture: picture.thumbnail((4, 4))}, "transform returned None"),
        ({"map": lambda sample: sample.update(label=1)}, "map returned None"),
        ({"transform": returns_a_dict}, "transform returned a dict"),
    ],
)
def test_what_a_function_forgot_to_return_is_told(
    scenes: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        list(ShardDataset(scenes, batch_size=2, **options))
    if sys.version_info >= (3, 11):
        assert "record" in caught.value.__notes__[0]


def test_a_map_of_image_and_mask_is_not_given_a_generator_for_a_mask(scenes: Path) -> None:
    with pytest.raises(OptionError, match="second argument called 'mask', which would be a numpy"):
        ShardDataset(scenes, map=lambda image, mask: (image, mask))
    ShardDataset(scenes, map=lambda sample, generator: sample)


# --- errors of the user's functions ---------------------------------------------------------------


class Odd(Exception):
    """An exception of the user's own, of two arguments: torch cannot make it again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def odd_image(image: Any) -> Any:
    if np.asarray(image)[0, 0, 0] == pixels(small_datasets.jpeg(7))[0, 0, 0]:
        raise LookupError("no such colour")
    return np.array(image)


def odd_label(label: int) -> int:
    if label == 7:
        raise LookupError("no such label")
    return label


def odd_item(item: Any) -> Any:
    odd_label(item["label"])
    return item["label"]


@pytest.mark.parametrize("loader", ["here", "a worker"])
@pytest.mark.parametrize(
    "options",
    [{"target_transform": odd_label}, {"map": odd_item}, {"transform": odd_image}],
    ids=["target_transform", "map", "transform"],
)
@pytest.mark.parametrize("size", [4, None])
def test_an_exception_of_the_user_names_the_record(
    scenes: Path, loader: str, options: Any, size: int | None
) -> None:
    data = ShardDataset(scenes, batch_size=size, **options)
    with pytest.raises(LookupError) as caught:
        list(FAILING[loader](data))
    assert type(caught.value) is LookupError
    assert "record 7 of the dataset, k/07" in shown(caught.value)


def test_an_exception_of_two_arguments_still_names_the_record(scenes: Path) -> None:
    def fail(_: Any) -> Any:
        raise Odd(1, 2)

    data = ShardDataset(scenes, map=fail, **RAGGED)
    with pytest.raises(Odd) as caught:
        next(iter(data))
    assert "record 0 of the dataset, k/00" in shown(caught.value)
    with pytest.raises(RuntimeError, match=r"(?s)(?=.*1 and 2).*record 0 of the dataset, k/00"):
        list(DataLoader(data, batch_size=None, num_workers=1))  # once in a true worker


def test_opened_records_are_named_too(scenes: Path) -> None:
    data = shardio.open(scenes, transform=odd_image)
    with pytest.raises(LookupError) as caught:
        data[7]
    assert "record 7 of the dataset, k/07" in shown(caught.value)
    with pytest.raises(LookupError) as caught:
        list(data)
    assert "record 7 of the dataset, k/07" in shown(caught.value)


def test_before_python_3_11_the_record_is_the_cause() -> None:
    class Old(LookupError):
        add_note = property()  # as if there were none

    from shardio.errors import RowError, name_record

    error = Old("no such label")
    first = error.__cause__ = ValueError("why")
    name_record(error, "record 7")
    assert type(error.__cause__) is RowError and error.__cause__.__cause__ is first
    assert "record 7" in shown(error) and "why" in shown(error)


def test_decode_numpy_is_the_array_of_the_pil_image(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    tree = {
        "a/turned.jpg": encoded(scene(5, 8, 6), "JPEG", exif=exif),
        "a/x.ppm": encoded(scene(6), "PPM"),
        "a/grey.png": encoded(scene(2, 3, 9), mode="L"),
    }
    pack(plant(tmp_path / "src", tree), tmp_path / "out", jobs=1)
    arrays = sequences.open(tmp_path / "out", decode="numpy")
    pictures = sequences.open(tmp_path / "out")
    for array, pil in zip(arrays, pictures, strict=True):
        assert np.array_equal(array["image"], np.asarray(pil["image"]))
        assert array["image"].flags.owndata and array["image"].ndim == 3
    stream = ShardDataset(tmp_path / "out", decode="numpy", fields=("image",), transform=np.sum)
    assert sorted(total for (total,) in stream) == sorted(np.sum(item["image"]) for item in arrays)
    cropped = ShardDataset(tmp_path / "out", decode="numpy", transform=CenterCrop(3), batch_size=3)
    assert next(iter(cropped))["image"].shape == (3, 3, 3, 3)
    with pytest.raises(OptionError, match=r"'pil', 'numpy', .*None or a function"):
        sequences.open(tmp_path / "out", decode="torch")  # type: ignore[arg-type]
