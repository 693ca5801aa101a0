"""The decoders of JPEGs on a device: which is taken, what they are given, and what they draw.

What needs CUDA is at the end; it is skipped where there is none, and says so.
"""

from __future__ import annotations

import io
import sys
import types
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.encoded_crops import BATCH, SHAPE, encoded, equal, expected, jpeg, turned
from support.gpu import gpu

import shardio
from shardio import EncodedCrops, OptionError
from shardio.images.device_crop import DeviceCrop
from shardio.loader import device_decode
from shardio.loader.device_decode import NvImgCodec, by_halves, decode_by_pil, without_exif
from shardio.loader.device_resize import resample


def tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


# --- who decodes ----------------------------------------------------------------------------------


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


class Library:
    """What of nvImageCodec is called; a file whose bytes begin as none refuses to be opened."""

    class BackendKind:
        HW_GPU_ONLY, GPU_ONLY, HYBRID_CPU_GPU = range(3)

    class ColorSpec:
        SRGB = 0

    class CodeStream:
        def __init__(self, file: Any) -> None:
            if bytes(file[:2]) != b"\xff\xd8":
                raise RuntimeError("Could not parse the code stream")
            self.file = file

    class Decoder:
        def __init__(self, **_: Any) -> None: ...

        def decode(self, streams: Any, **_: Any) -> list[Any]:
            assert streams
            return [torch.full((1, 1, 3), int(one.file[2]), dtype=torch.uint8) for one in streams]

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def test_a_file_that_the_library_does_not_open_leaves_the_others_of_its_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a played library: its own raises for one hostile header."""
    nvidia = types.ModuleType("nvidia")
    monkeypatch.setitem(sys.modules, "nvidia", nvidia)
    monkeypatch.setattr(nvidia, "nvimgcodec", Library(), raising=False)
    stream = types.SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    given = b"x", b"\xff\xd8\7", b"", b"\xff\xd8\1"
    files = [torch.tensor(list(one), dtype=torch.uint8) for one in given]
    found = NvImgCodec(torch.device("cpu", 0)).decode(files)
    assert [None if one is None else int(one[0, 0, 0]) for one in found] == [None, 7, None, 1]
    assert NvImgCodec(torch.device("cpu", 0)).decode(files[:1]) == [None]


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
        ({"decoder": "dali"}, 'decoder is \'dali\': expected one of "auto", "nvimgcodec"'),
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
