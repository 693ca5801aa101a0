"""Crops that the device decodes: the pixels, who decodes what, and the errors.

With device="cpu" PIL decodes and the CPU resizes, by the code that serves a GPU. What needs CUDA is
at the end; it is skipped where there is none, and says so.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import pillow_resize
from support.gpu import gpu
from torch.utils.data import DataLoader

import shardio
from shardio import CollateError, DecodeError, EncodedCrops, OptionError, ShardLoader
from shardio.images import decode
from shardio.images.device_crop import DeviceCrop, Place, Reason
from shardio.loader import device_decode
from shardio.loader.device_crops import Cropper
from shardio.loader.device_decode import Decoder, by_halves, decode_by_pil, without_exif
from shardio.loader.device_resize import resample
from shardio.loader.normalize import Images
from shardio.loader.stats import DecodeCounts

CPU = torch.device("cpu")
SHAPE = (12, 20)


def jpeg(seed: int, *, mode: str = "RGB", exif: bytes = b"", smooth: bool = False) -> bytes:
    """A picture of 90 x 60 pixels and some more, other for each seed."""
    random = np.random.default_rng(seed)
    size = 90 + seed % 7, 60 + seed % 5
    if smooth:  # as photographs are, so that decoders differ by as much as they do on those
        noise = random.integers(0, 256, (6, 9, 3), dtype=np.uint8)
        image = Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)
    else:
        image = Image.fromarray(random.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    file = io.BytesIO()
    image.convert(mode).save(file, "JPEG", quality=90, exif=exif)
    return file.getvalue()


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[decode.ORIENTATION_TAG] = orientation
    return exif.tobytes()


def tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def encoded(number: int, **options: Any) -> DeviceCrop:
    """A crop of a JPEG, as a worker hands it on."""
    data = jpeg(number, **options)
    width, height = Image.open(io.BytesIO(data)).size
    place = [0.0] * len(Place)
    place[:4] = 3.25 + number % 3, 5.5, width - 4.125, height - number % 4
    place[Place.WHOLE_WIDTH] = place[Place.WIDTH] = width
    place[Place.WHOLE_HEIGHT] = place[Place.HEIGHT] = height
    place[Place.ORIENTATION], place[Place.FLIP] = number % 8 + 1, number % 2
    place[Place.NUMBER] = 1000 + number
    return DeviceCrop(data, tuple(place), SHAPE, "bicubic")


def finished(number: int, reason: Reason = Reason.PROCESS) -> DeviceCrop:
    """A crop that a worker has made."""
    pixels = np.random.default_rng(number).integers(0, 256, (*SHAPE, 3), dtype=np.uint8)
    place = [0.0] * len(Place)
    for right, across in ((Place.RIGHT, SHAPE[1]), (Place.BOTTOM, SHAPE[0])):
        for one in (right, right + 2, right + 6):  # of the box, the whole, the file
            place[one] = across
    place[Place.ORIENTATION], place[Place.REASON], place[Place.NUMBER] = 1, reason, number
    return DeviceCrop(pixels.tobytes(), tuple(place), SHAPE, "bicubic")


def expected(crop: DeviceCrop) -> np.ndarray:
    """(H, W, 3) as Pillow makes it of what PIL decodes."""
    place = crop.place
    if place[Place.REASON]:
        return np.frombuffer(crop.data, np.uint8).reshape(*crop.shape, 3)
    pixels = decode.pixels(bytes(crop.data), upright=False)
    return pillow_resize.crop(
        *(pixels, place[:4], crop.shape, crop.interpolation),
        *(int(place[Place.ORIENTATION]), bool(place[Place.FLIP])),
    )


def equal(images: torch.Tensor, crops: Sequence[DeviceCrop]) -> None:
    assert images.dtype == torch.uint8 and images.shape == (len(crops), 3, *SHAPE)
    for got, crop in zip(images, crops, strict=True):
        np.testing.assert_array_equal(got.permute(1, 2, 0).numpy(), expected(crop))


def cropper(find: Callable[[torch.device], Decoder | None] = lambda device: None) -> Cropper:
    return Cropper(CPU, find, DecodeCounts(), Images())


# --- pixels ---------------------------------------------------------------------------------------

BATCH = [
    *(encoded(number) for number in range(10)),
    finished(20),
    encoded(10, mode="L"),
    finished(21, Reason.NOT_JPEG),
]


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
        self,
        refused: Sequence[bytes] = (),
        wrong: Sequence[bytes] = (),
        wide: Sequence[bytes] = (),
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


def test_a_decoder_that_fails_as_a_whole_is_asked_for_halves() -> None:
    asked = []

    def decode_all(files: list[torch.Tensor]) -> list[torch.Tensor]:
        asked.append(len(files))
        if any(len(file) == 1 for file in files):
            raise RuntimeError("nvJPEG: bad")
        return files

    files = [torch.zeros(2 + number) for number in range(16)]
    assert by_halves(decode_all, files) == files and asked == [16]
    files[3] = files[12] = torch.zeros(1)
    found = by_halves(decode_all, files)
    assert [at for at, one in enumerate(found) if one is None] == [3, 12]
    assert [len(one) for one in found if one is not None] == [len(f) for f in files if len(f) > 1]
    assert len(asked) < 20

    def out_of_memory(files: list[torch.Tensor]) -> list[torch.Tensor]:
        asked.append(-1)
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.cuda.OutOfMemoryError):  # no fault of a file
        by_halves(out_of_memory, files)
    assert asked.count(-1) == 1


def test_exif_is_taken_from_a_jpeg_without_changing_the_loader_s_bytes() -> None:
    plain, rotated = tensor(jpeg(1)), tensor(jpeg(1, exif=turned(6)))
    assert without_exif(plain) is plain
    before = rotated.clone()
    bare = without_exif(rotated)
    assert torch.equal(rotated, before) and bare.shape == rotated.shape
    assert not Image.open(io.BytesIO(bare.numpy().tobytes())).getexif()
    assert torch.equal(decode_by_pil(bare), decode_by_pil(rotated))
    for length in (0, 1, 3, 5, 25):  # a header that ends anywhere
        assert len(without_exif(rotated[:length])) == length


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"decoder": "dali"},
            'decoder is \'dali\': expected one of "auto", "nvimgcodec"',
        ),
        ({"decoder": "nvimgcodec"}, 'device is "cpu": give device="cuda", or leave decoder out'),
    ],
)
def test_decoders_that_do_not_fit_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError) as raised:
        shardio.prefetch([], "cpu", **options)
    assert words in str(raised.value)


def test_where_no_decoder_is_installed_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for package in ("nvidia.nvimgcodec", "nvidia", "torchcodec.decoders", "torchvision.io"):
        monkeypatch.setitem(__import__("sys").modules, package, None)
    for name in ("auto", "torchvision"):
        with pytest.raises(shardio.DependencyError) as raised:
            device_decode.find_decoder(name, torch.device("cuda", 0))
        text = str(raised.value)
        assert "torchvision: import of torchvision.io halted" in text
        assert ("nvimgcodec: import of nvidia" in text) == (name == "auto")
        assert "\n" not in text and '[nvjpeg]", or give decoder="pil"' in text


# --- errors ---------------------------------------------------------------------------------------


def damaged(number: int) -> DeviceCrop:
    crop = encoded(number)
    return DeviceCrop(crop.data[:700], crop.place, crop.shape, crop.interpolation)


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
        folder,
        **{"batch_size": 8} | options,
        fields=("image", "label"),
        decode=decode,
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

# Photographs, as smooth noise stands for them: how far the pixels of a crop may be from the CPU's,
# which come of another inverse DCT and another way to enlarge the chroma.
MEAN_LEVELS, MOST_LEVELS = 2.0, 40


def installed(name: str) -> str:
    """The name of a decoder that works here. Skips where it is not installed."""
    try:
        device_decode.find_decoder(name, torch.device("cuda", torch.cuda.current_device()))
    except shardio.DependencyError as error:
        pytest.skip(f"NOT TESTED HERE: {error}")
    return name


GPU_DECODERS = [name for name in device_decode.NAMES if name not in ("auto", "pil")]


@gpu
def test_the_resize_on_a_gpu_is_pillow_s_bit_for_bit() -> None:
    (images,) = shardio.prefetch([EncodedCrops.join(BATCH)], "cuda", decoder="pil")
    assert images.is_cuda and images.is_contiguous(memory_format=torch.channels_last)
    equal(images.cpu(), BATCH)


@gpu
@pytest.mark.parametrize("name", GPU_DECODERS)
def test_a_gpu_decodes_all_kinds_as_stored_near_to_the_cpu(name: str) -> None:
    options: list[dict[str, Any]] = [{}, {"mode": "L"}, {"exif": turned(6)}]
    crops = [encoded(n, smooth=True, **options[n % 3]) for n in range(48)]
    loader = shardio.prefetch([EncodedCrops.join(crops)] * 3, "cuda", decoder=installed(name))
    for images in loader:
        for got, crop in zip(images.cpu(), crops, strict=True):
            levels = np.abs(got.permute(1, 2, 0).numpy().astype(int) - expected(crop))
            assert levels.mean() <= MEAN_LEVELS and levels.max() <= MOST_LEVELS, crop.place
    assert loader.decoded.decoder == name and loader.decoded.by_decoder == 144


@gpu
@pytest.mark.parametrize("name", GPU_DECODERS)
def test_a_file_that_a_gpu_refuses_is_decoded_here(name: str) -> None:
    refused = encoded(2, smooth=True)
    file = io.BytesIO()
    Image.open(io.BytesIO(refused.data)).save(file, "PNG")
    refused = DeviceCrop(file.getvalue(), refused.place, SHAPE, "bicubic")
    loader = shardio.prefetch(
        [EncodedCrops.join([*BATCH[:2], refused])] * 2, "cuda", decoder=installed(name)
    )
    for images in loader:
        equal(images[2:].cpu(), [refused])
    assert (loader.decoded.by_decoder, loader.decoded.by_trainer) == (4, 2)


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
def test_the_resize_never_waits_for_the_gpu() -> None:
    crops = EncodedCrops.join(BATCH[:10])
    device = torch.device("cuda", torch.cuda.current_device())
    pictures = [decode_by_pil(file).to(device) for file in crops.files]
    out = torch.empty((10, *SHAPE, 3), dtype=torch.uint8, device=device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        resample(pictures, crops.places, crops.interpolation, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    equal(out.permute(0, 3, 1, 2).cpu(), BATCH[:10])


@gpu
def test_an_error_of_the_thread_comes_in_its_place_on_a_gpu() -> None:
    batches = [EncodedCrops.join(some) for some in (BATCH[:2], [BATCH[0], damaged(5)], BATCH[:2])]
    loader = iter(shardio.prefetch(batches, "cuda", decoder="pil", ahead=2))
    equal(next(loader).cpu(), BATCH[:2])
    with pytest.raises(DecodeError, match="record 1,005"):
        next(loader)
    assert list(loader) == []
