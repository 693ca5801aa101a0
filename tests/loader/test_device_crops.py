"""Crops that the device decodes: the pixels, who decodes what, and the errors.

With device="cpu" PIL decodes and the CPU resizes, by the code that serves a GPU. What needs CUDA is
at the end; it is skipped where there is none, and says so.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from support.encoded_crops import (
    BATCH,
    SHAPE,
    damaged,
    encoded,
    equal,
    expected,
    finished,
    jpeg,
    turned,
)
from support.gpu import gpu
from torch.utils.data import DataLoader

import shardio
from shardio import CollateError, DecodeError, EncodedCrops, OptionError, ShardLoader
from shardio.images.device_crop import DeviceCrop, Place
from shardio.loader.device_crops import Cropper
from shardio.loader.device_decode import Decoder, decode_by_pil
from shardio.loader.normalize import Images
from shardio.loader.stats import DecodeCounts

CPU = torch.device("cpu")


def cropper(find: Callable[[torch.device], Decoder | None] = lambda device: None) -> Cropper:
    return Cropper(CPU, find, DecodeCounts(), Images())


# --- pixels ---------------------------------------------------------------------------------------


def test_prefetch_makes_the_pixels_that_pillow_makes() -> None:
    batches = [(EncodedCrops.join(some), torch.tensor([1])) for some in (BATCH, BATCH[3:5])]
    loader = shardio.prefetch(batches, "cpu")
    for (images, label), some in zip(loader, (BATCH, BATCH[3:5]), strict=True):
        equal(images, some)
        assert images.is_contiguous(memory_format=torch.channels_last) and label.tolist() == [1]
    assert loader.decoded.decoder == "pil"
    assert (loader.decoded.by_trainer, loader.decoded.by_decoder) == (13, 0)
    assert loader.decoded.by_workers == {"process": 1, "not_jpeg": 1}


def test_crops_are_found_in_any_structure_and_normalised() -> None:
    batch = {"x": [EncodedCrops.join(BATCH)], "y": (torch.tensor([3]), "text")}
    (got,) = shardio.prefetch([batch], "cpu", mean=0.5, std=0.25, dtype=torch.bfloat16)
    images = torch.stack([torch.from_numpy(expected(crop).copy()) for crop in BATCH])
    wanted = shardio.normalize(images.permute(0, 3, 1, 2), 0.5, 0.25, torch.bfloat16)
    assert torch.equal(got["x"][0], wanted) and got["y"] == (torch.tensor([3]), "text")


@pytest.mark.parametrize("most_bytes", [1, 40_000, 1 << 30])
def test_decoding_in_parts_makes_the_same_pixels(most_bytes: int) -> None:
    equal(cropper().make(EncodedCrops.join(BATCH), most_bytes=most_bytes), BATCH)


def test_a_batch_that_the_workers_have_made_needs_no_decoder() -> None:
    def none(device: torch.device) -> Decoder:
        raise AssertionError

    equal(
        cropper(none).make(EncodedCrops.join([finished(1), finished(2)])),
        [finished(1), finished(2)],
    )


def test_inference_mode_does_not_stay_in_the_pixels() -> None:
    with torch.inference_mode():
        (images,) = shardio.prefetch([EncodedCrops.join(BATCH)], "cpu")
    assert not images.is_inference()


# --- who decodes ----------------------------------------------------------------------------------


class Refusing(Decoder):
    """Decode all but some, and give a picture of another size or dtype for others."""

    name = "refusing"

    def __init__(
        self, refused: Sequence[bytes] = (), wrong: Sequence[bytes] = (), wide: Sequence[bytes] = ()
    ) -> None:
        self.refused, self.wrong, self.wide = refused, wrong, wide
        self.calls: list[int] = []

    def decode(self, files: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        self.calls.append(len(files))
        decoded: list[torch.Tensor | None] = []
        for file in files:
            data = file.numpy().tobytes()
            if data in self.refused:
                decoded.append(None)
            elif data in self.wrong:
                decoded.append(decode_by_pil(file)[:, 1:])
            elif data in self.wide:
                decoded.append(decode_by_pil(file).to(torch.int16) * 257)
            else:
                decoded.append(decode_by_pil(file).contiguous())
        return decoded


def test_what_a_decoder_refuses_pil_decodes_and_it_is_counted() -> None:
    data = [bytes(crop.data) for crop in BATCH]
    decoder = Refusing([data[1], data[11]], [data[4]], [data[5]])
    made = cropper(lambda device: decoder)
    equal(made.make(EncodedCrops.join(BATCH)), BATCH)
    assert made.counts == DecodeCounts("refusing", 7, 4, {"process": 1, "not_jpeg": 1})
    assert str(made.counts) == (
        "7 images by refusing; 4 by PIL in this process; 2 by the workers (not_jpeg 1, process 1)"
    )
    assert decoder.calls == [11]  # all at once: an engine of a GPU is for many


def test_a_decoder_gets_no_more_pictures_at_once_than_fit() -> None:
    decoder = Refusing()
    made = cropper(lambda device: decoder)
    equal(made.make(EncodedCrops.join(BATCH[:10]), most_bytes=3 * 90 * 60 * 4), BATCH[:10])
    assert len(decoder.calls) >= 3 and sum(decoder.calls) == 10 and max(decoder.calls) <= 4


# --- errors ---------------------------------------------------------------------------------------


def test_a_file_that_nothing_decodes_is_named_in_its_place() -> None:
    batches = [BATCH[:2], [BATCH[0], damaged(5)], BATCH[2:4]]
    loader = iter(shardio.prefetch([EncodedCrops.join(some) for some in batches], "cpu", ahead=2))
    equal(next(loader), BATCH[:2])
    with pytest.raises(DecodeError, match=r"^record 1,005 of the dataset: image of 700 bytes"):
        next(loader)
    assert list(loader) == []


def test_a_picture_of_another_size_than_its_header_says_is_an_error() -> None:
    crop = encoded(5)
    place = list(crop.place)
    place[Place.HEIGHT] = place[Place.WHOLE_HEIGHT] = 64
    place[Place.WIDTH] = place[Place.WHOLE_WIDTH] = 200
    wrong = DeviceCrop(crop.data, tuple(place), crop.shape, crop.interpolation)
    with pytest.raises(DecodeError, match=r"record 1,005 of .*200 x 64 pixels, but PIL decodes 95"):
        cropper().make(EncodedCrops.join([BATCH[0], wrong]))


# --- datasets -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 JPEGs, of which some are turned, grey, tiled, progressive, or no JPEG at all."""
    out = tmp_path_factory.mktemp("cuda") / "out"
    with shardio.Writer(
        out, fields={"image": "image", "label": "int"}, shard_size=60_000
    ) as writer:
        for number in range(40):
            writer.write({"__key__": f"{number:03d}", "image": picture(number), "label": number})
    return out


def picture(number: int) -> bytes:
    kind = number % 10
    if kind < 7:
        mode = "L" if kind == 3 else "RGB"
        return jpeg(number, mode=mode, exif=turned(number % 8 + 1) if kind < 3 else b"")
    file = io.BytesIO()
    image = Image.open(io.BytesIO(jpeg(number)))
    if kind == 7:
        image.save(file, "JPEG", progressive=True)
    elif kind == 8:
        image.convert("CMYK").save(file, "JPEG")
    else:
        image.save(file, "PNG")
    return file.getvalue()


def train(folder: Path, decode: Any = "cuda", **options: Any) -> shardio.ShardDataset:
    options.setdefault(
        "transform", shardio.RandomResizedCrop(SHAPE, flip=True, interpolation="bicubic")
    )
    return shardio.ShardDataset(
        folder, **{"batch_size": 8} | options, fields=("image", "label"), decode=decode
    )


def close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether images are those of decode="pil", which the core, or pillow-simd, may have made."""
    return got.shape == wanted.shape and int((got.int() - wanted.int()).abs().max()) <= 2


def loaders(dataset: shardio.ShardDataset) -> dict[str, Callable[[], Any]]:
    return {
        "ShardLoader": lambda: ShardLoader(dataset, num_workers=2, device="cpu"),
        "threads": lambda: ShardLoader(dataset, num_workers=0, threads=2, device="cpu"),
        "copy": lambda: ShardLoader(dataset, num_workers=1, copy=True, device="cpu", ahead=3),
        "DataLoader": lambda: shardio.prefetch(
            DataLoader(dataset, batch_size=None, num_workers=2), "cpu"
        ),
    }


@pytest.mark.parametrize("kind", ["ShardLoader", "threads", "copy", "DataLoader"])
def test_a_loop_gets_the_batches_of_the_cpu(folder: Path, kind: str) -> None:
    dataset, pil = train(folder), train(folder, decode="pil")
    for epoch in (0, 1):
        loader = loaders(dataset)[kind]()
        dataset.set_epoch(epoch)
        pil.set_epoch(epoch)
        got = list(loader)
        wanted = list(DataLoader(pil, batch_size=None))
        assert len(got) == len(wanted) == 5
        for (images, labels), (others, theirs) in zip(got, wanted, strict=True):
            assert torch.equal(labels, theirs) and close(images, others)
            assert images.is_contiguous(memory_format=torch.channels_last)
        if isinstance(loader, ShardLoader):
            decoded = loader.explain().decoded
            loader.close()
        else:
            decoded = loader.decoded
        assert decoded is not None
        assert (decoded.by_trainer, decoded.by_decoder) == (28, 0)
        assert decoded.by_workers == {"process": 4, "colours": 4, "not_jpeg": 4}


def test_a_run_goes_on_where_it_was_saved(folder: Path) -> None:
    dataset = train(folder)
    with ShardLoader(dataset, num_workers=1, device="cpu", ahead=2) as loader:
        every = [images for images, _ in loader]
        dataset.set_epoch(0)
        batches = iter(loader)
        next(batches), next(batches)
        state = loader.state_dict()
        del batches
        dataset.set_epoch(5)
        loader.load_state_dict(state)
        again = [images for images, _ in loader]
    assert len(again) == 3 and all(map(torch.equal, again, every[2:]))


def test_what_a_loader_says_of_its_images(folder: Path) -> None:
    with ShardLoader(train(folder), num_workers=1, device="cpu") as loader:
        assert "decoded" not in loader.explain().text()
        list(loader)
        assert (
            loader.explain()
            .text()
            .endswith(
                "decoded          28 by PIL in this process; "
                "12 by the workers (colours 4, not_jpeg 4, process 4)"
            )
        )
    with ShardLoader(train(folder, decode="pil"), num_workers=0, device="cpu") as loader:
        list(loader)
        assert "decoded" not in loader.explain().text()


def test_a_damaged_jpeg_is_named_by_its_record(tmp_path: Path) -> None:
    with shardio.Writer(tmp_path / "out", fields={"image": "image", "label": "int"}) as writer:
        for number in range(16):
            data = jpeg(number)[: 900 if number == 11 else None]
            writer.write({"__key__": str(number), "image": data, "label": number})
    dataset = train(tmp_path / "out", shuffle=False)
    with ShardLoader(dataset, num_workers=1, device="cpu") as loader:
        batches = iter(loader)
        assert next(batches)[1].tolist() == list(range(8))
        with pytest.raises(
            DecodeError, match=r"^record 11 of the .*, 11: image of 900 bytes: .*truncated"
        ):
            next(batches)


def test_options_that_do_not_fit_say_what_to_do(folder: Path) -> None:
    with pytest.raises(OptionError, match=r'decode="cuda" without a device: .* device="cuda"'):
        ShardLoader(train(folder), num_workers=1)
    centre = train(folder, transform=shardio.CenterCrop(SHAPE))
    for resident in ("ram", "device"):
        with pytest.raises(OptionError, match="decode='cuda'"):
            ShardLoader(centre, num_workers=1, device="cpu", resident=resident)
    with pytest.raises(OptionError, match='decoder without a device: say where, device="cuda"'):
        ShardLoader(train(folder, decode="pil"), decoder="nvimgcodec")
    plain = train(folder, decode="pil")
    with pytest.raises(OptionError, match=r'decoder is \'pil\', which is of decode="cuda"'):
        ShardLoader(plain, device="cpu", decoder="pil")
    with pytest.raises(OptionError, match=r'decoder is \'pil\', which is of decode="cuda"'):
        shardio.prefetch(DataLoader(plain, batch_size=None), "cpu", decoder="pil")
    shardio.prefetch(DataLoader(train(folder), batch_size=None), "cpu", decoder="pil")


def test_dataloaders_own_collate_function_is_told_what_makes_batches_of_crops(folder: Path) -> None:
    samples = train(folder, batch_size=None)
    with pytest.raises(CollateError, match=r"collate_fn=shardio\.collate"):
        next(iter(DataLoader(samples, batch_size=4)))
    loader = DataLoader(train(folder, batch_size=None), batch_size=4, collate_fn=shardio.collate)
    images, _ = next(iter(loader))
    assert type(images).__name__ == "EncodedCrops"


# --- on a GPU -------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("name", ["auto", "pil"])
def test_a_loop_on_a_gpu_gets_the_order_and_crops_of_the_cpu(folder: Path, name: str) -> None:
    dataset, pil = train(folder), train(folder, decode="pil")
    wanted = list(DataLoader(pil, batch_size=None))
    with ShardLoader(dataset, num_workers=2, device="cuda", decoder=name) as loader:
        for epoch in (0, 0, 0):
            dataset.set_epoch(epoch)
            for (images, labels), (others, theirs) in zip(loader, wanted, strict=True):
                assert torch.equal(labels.cpu(), theirs)
                if name == "pil":
                    assert close(images.cpu(), others)
        decoded = loader.explain().decoded
        assert decoded is not None and sum(decoded.by_workers.values()) == 36
        assert decoded.by_decoder + decoded.by_trainer == 84


@gpu
def test_pictures_of_a_batch_are_not_written_over_while_they_are_read() -> None:
    """A decoder does not wait for what the stream before it still reads."""
    batches = [[encoded(n + 50 * b, smooth=True) for n in range(32)] for b in range(6)]
    joined = [EncodedCrops.join(some) for some in batches]
    alone = [next(iter(shardio.prefetch([one], "cuda"))).cpu() for one in joined]
    together = [images.cpu() for images in shardio.prefetch(joined * 5, "cuda", ahead=3)]
    for number, images in enumerate(together):
        assert torch.equal(images, alone[number % 6])


@gpu
def test_an_error_of_the_thread_comes_in_its_place_on_a_gpu() -> None:
    batches = [EncodedCrops.join(some) for some in (BATCH[:2], [BATCH[0], damaged(5)], BATCH[:2])]
    loader = iter(shardio.prefetch(batches, "cuda", decoder="pil", ahead=2))
    equal(next(loader).cpu(), BATCH[:2])
    with pytest.raises(DecodeError, match="record 1,005"):
        next(loader)
    assert list(loader) == []
