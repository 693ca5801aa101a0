"""Kernels of Triton: the pixels of torch's operations, and of Pillow, bit for bit.

Where there is no GPU, Triton's interpreter runs them. It rounds each product and each sum by
itself, and compilers may not: what is compiled for a GPU is searched for fused ones.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import small_datasets
from support.device_batches import MEAN, STD
from support.device_crops import Picture

import shardio
from shardio import EncodedCrops, OptionError, RandomResizedCrop, ShardDataset, ShardLoader
from shardio.dataset.encoded import EncodedImages
from shardio.images.device_crop import plan_crop
from shardio.loader.device_crops import Cropper
from shardio.loader.device_decode import DecodedImages, Decoder, decode_by_pil, decoded_images
from shardio.loader.normalize import Images, takes_triton
from shardio.loader.stats import DecodeCounts

pytest.importorskip(
    "triton", minversion="3.6", reason="Triton 3.6 is not installed; tools/setup brings it"
)

FILTERS = ("bilinear", "bicubic", "lanczos", "box", "hamming")
SHAPE = (13, 22)
# Pictures, and pixels of a side at most: the interpreter is slow.
COUNT, MOST = (48, 200) if torch.cuda.is_available() else (8, 26)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAME = "shardio.loader.device_kernels"


def loaded(monkeypatch: pytest.MonkeyPatch, interpret: bool) -> Iterator[ModuleType]:
    """The kernels, interpreted or not: which it is, is settled when their module is imported."""
    if interpret:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    else:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    before = sys.modules.pop(NAME, None)
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME)
    if before is not None:
        sys.modules[NAME] = before


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield from loaded(monkeypatch, DEVICE == "cpu")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield from loaded(monkeypatch, False)


def dtypes_and_layouts(dtypes: Sequence[torch.dtype]) -> pytest.MarkDecorator:
    """All pairs on a GPU; by the interpreter, which is slow, each dtype and each layout once."""
    layouts = (None, False, True)
    pairs = [
        (dtype, last)
        for i, dtype in enumerate(dtypes)
        for j, last in enumerate(layouts)
        if DEVICE == "cuda" or i % 3 == j
    ]
    return pytest.mark.parametrize("dtype, last", pairs)


# --- crops ----------------------------------------------------------------------------------------


def made(kernels: ModuleType, pictures: list[Picture], name: str, out: torch.Tensor) -> Any:
    places = torch.tensor([one.place for one in pictures], dtype=torch.float64)
    tensors = [one.tensor(number).to(DEVICE) for number, one in enumerate(pictures)]
    kernels.resample(tensors, places, name, out)
    return out.permute(0, 2, 3, 1).cpu().numpy()


def blank(count: int, last: bool = True) -> torch.Tensor:
    out = torch.full((count, 3, *SHAPE), 7, dtype=torch.uint8, device=DEVICE)
    return out.contiguous(memory_format=torch.channels_last) if last else out


@pytest.mark.parametrize("name", FILTERS)
def test_every_crop_is_pillow_s_bit_for_bit(kernels: ModuleType, name: str) -> None:
    pictures = [Picture(seed, MOST) for seed in range(COUNT)]
    found = made(kernels, pictures, name, blank(COUNT, name in FILTERS[::2]))
    for one, got in zip(pictures, found, strict=True):
        np.testing.assert_array_equal(got, one.expected(SHAPE, name), str(one.place))


def test_rows_without_a_picture_stay(kernels: ModuleType) -> None:
    pictures = [Picture(seed) for seed in range(4)]
    places = torch.tensor([one.place for one in pictures], dtype=torch.float64)
    out = blank(4)
    kernels.resample([None, pictures[1].tensor().to(DEVICE), None, None], places, "box", out)
    expected = pictures[1].expected(SHAPE, "box")
    np.testing.assert_array_equal(out[1].permute(1, 2, 0).cpu().numpy(), expected)
    assert bool((out[[0, 2, 3]] == 7).all())
    kernels.resample([None] * 4, places, "box", out)


def test_a_file_that_is_smaller_than_what_its_crop_reads_reads_nothing_else(
    kernels: ModuleType,
) -> None:
    """Of a picture in the midst of others, only its own bytes are seen."""
    one = Picture(7)
    one.place[:10] = [0.0, 0.0, 80.0, 80.0, 80, 80, 30, 30, 5, 4]
    around = torch.zeros((3, 24, 25), dtype=torch.uint8, device=DEVICE)
    around[:, 10:14, 10:15] = 200
    out = blank(1)
    places = torch.tensor([one.place], dtype=torch.float64)
    kernels.resample([around[:, 10:14, 10:15]], places, "bilinear", out)
    assert bool((out == 200).all())


@dtypes_and_layouts(DTYPES)
def test_crops_are_normalised_as_images_are(
    kernels: ModuleType, dtype: torch.dtype, last: bool | None
) -> None:
    pictures = [Picture(seed, MOST) for seed in range(2)]
    places = torch.tensor([one.place for one in pictures], dtype=torch.float64)
    tensors = [one.tensor(number).to(DEVICE) for number, one in enumerate(pictures)]
    images = Images(MEAN, STD, dtype, last)
    pixels, out = blank(2), images.empty(blank(2))
    kernels.resample(tensors, places, "bilinear", pixels)
    kernels.resample(tensors, places, "bilinear", out, *images.factors(out))
    wanted = images.normalized(pixels.cpu())
    assert torch.equal(out.cpu(), wanted) and out.stride() == wanted.stride()


# --- normalisation --------------------------------------------------------------------------------


@dtypes_and_layouts([*DTYPES, torch.float64])
def test_every_value_is_normalised_as_on_the_cpu(
    kernels: ModuleType, dtype: torch.dtype, last: bool | None
) -> None:
    """All values of a pixel, with 100 means and stds, in each layout of memory."""
    random = np.random.default_rng(0)
    mean, std = (random.uniform(0.05, 1, 100).tolist() for _ in range(2))
    every = torch.arange(256, dtype=torch.uint8).repeat(100, 1).view(1, 100, 16, 16)
    every = torch.cat([every, every.flip(3), every])
    layouts = every, every.contiguous(memory_format=torch.channels_last), every.transpose(2, 3)
    here, there = (Images(mean, std, dtype, last, fused) for fused in (False, True))
    for pixels in layouts:
        wanted, found = here.normalized(pixels), there.normalized(pixels.to(DEVICE))
        assert found.dtype == dtype and found.stride() == wanted.stride()
        assert torch.equal(found.cpu(), wanted)


def test_one_number_is_for_all_channels(kernels: ModuleType) -> None:
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(2, 3, 1, 1)
    found = Images(0.5, 0.25, fused=True).normalized(pixels.to(DEVICE))
    assert torch.equal(found.cpu(), Images(0.5, 0.25).normalized(pixels))


def test_no_images_are_no_launch(kernels: ModuleType) -> None:
    none = torch.empty((0, 3, 4, 5), dtype=torch.uint8, device=DEVICE)
    assert Images(MEAN, STD, fused=True).normalized(none).shape == none.shape


# --- as users call it -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"mean": MEAN, "std": STD, "dtype": torch.bfloat16}, {"dtype": torch.float16}]
)
def test_a_loader_gives_what_it_gives_without_them(
    kernels: ModuleType, packed: Callable[..., Path], options: dict[str, Any]
) -> None:
    folder = packed([10], image=small_datasets.jpeg)
    crop = RandomResizedCrop(8, flip=True)
    for decode in ("cuda", "pil"):
        dataset = ShardDataset(
            folder, batch_size=4, fields=("image", "label"), transform=crop, decode=decode
        )
        runs = []
        for kind in ("torch", "triton"):
            dataset.set_epoch(0)
            how = {"num_workers": 0, "threads": 0, "device": DEVICE, "decoder": "pil"}
            if decode == "pil":
                how.pop("decoder")
            with ShardLoader(dataset, kernels=kind, **how, **options) as loader:
                runs.append(list(loader))
                assert ("of Triton" in loader.explain().text()) == (kind == "triton")
        for (images, labels), (others, same) in zip(*runs, strict=True):
            assert torch.equal(images, others) and torch.equal(labels, same)
            assert images.dtype == others.dtype and images.stride() == others.stride()


class Drawing(Decoder):
    """Decode by PIL, into one piece of memory; some are refused, or in another form."""

    name = "drawing"

    def __init__(self, refused: int, strange: int) -> None:
        self.refused, self.strange = refused, strange

    def decode(self, files: Any) -> Any:
        raise AssertionError("it draws")

    def decode_at_once(self, files: EncodedImages, rows: Any, sizes: Any) -> DecodedImages:
        images: list[Any] = []
        for row in rows.tolist():
            pixels = decode_by_pil(files[row]).permute(1, 2, 0).contiguous().to(DEVICE)
            about = {"shape": tuple(pixels.shape), "data": (pixels.data_ptr(), False)}
            if row == self.strange:
                about["strides"] = (4 * pixels.shape[1], 4, 1)
            one = SimpleNamespace(__cuda_array_interface__=about, pixels=pixels)
            images.append(None if row == self.refused else one)
        return decoded_images(images, sizes)


def test_what_a_decoder_draws_is_cropped_and_what_it_refuses_pil_decodes(
    kernels: ModuleType,
) -> None:
    crop = RandomResizedCrop(8, flip=True)
    files = [small_datasets.jpeg(number) for number in range(6)]
    crops = EncodedCrops.join([plan_crop(crop, file, 7, n) for n, file in enumerate(files)])
    images = Images(MEAN, STD, torch.bfloat16, fused=True)
    device, counts = torch.device(DEVICE), DecodeCounts()
    found = Cropper(device, lambda _: Drawing(1, 4), counts, images).make(crops)
    plain = Cropper(device, lambda _: None, DecodeCounts(), Images()).make(crops)
    assert torch.equal(found.cpu(), Images(MEAN, STD, torch.bfloat16).normalized(plain.cpu()))
    assert (counts.decoder, counts.by_decoder, counts.by_trainer) == ("drawing", 4, 2)


def test_means_of_another_number_of_channels_are_told(
    kernels: ModuleType, packed: Callable[..., Path]
) -> None:
    folder = packed([3], image=small_datasets.jpeg)
    dataset = ShardDataset(
        folder, batch_size=3, fields=("image",), transform=RandomResizedCrop(8), decode="cuda"
    )
    how = {"num_workers": 0, "threads": 0, "device": DEVICE, "decoder": "pil"}
    told = pytest.raises(OptionError, match="mean and std are for 1 channels")
    with ShardLoader(dataset, kernels="triton", mean=(0.5,), **how) as loader, told:
        next(iter(loader))


def test_what_is_no_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        OptionError, match='kernels is \'cuda\': expected "auto", "torch" or "triton"'
    ):
        shardio.prefetch([], "cpu", kernels="cuda")
    with pytest.raises(OptionError, match='kernels is "triton", which runs on a GPU'):
        shardio.prefetch([], "cpu", kernels="triton")


def test_where_triton_cannot_run_torch_does_unless_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    assert not takes_triton("auto", gpu) and not takes_triton("torch", gpu)
    with pytest.raises(shardio.DependencyError) as raised:
        takes_triton("triton", gpu)
    text = str(raised.value)
    assert "pip install triton" in text and "apt-get install gcc python3-dev" in text
    assert "import of triton halted" in text and "\n" not in text


def test_triton_is_taken_where_it_computes_what_it_should(kernels: ModuleType) -> None:
    device = torch.device(DEVICE)
    assert takes_triton("triton", device) and takes_triton("auto", device) == (DEVICE == "cuda")
    assert not takes_triton("auto", device, torch.float64)  # no GPU has run that


# --- what a compiler makes of them ----------------------------------------------------------------

_TYPES = {
    "table": "*fp64",
    "numbers": "*i64",
    "weights": "*i32",
    "firsts": "*i32",
    "pixels": "*u8",
    "scale": "*fp32",
    "bias": "*fp32",
}


def ptx(kernel: Any, options: dict[str, Any], out: str = "*fp32", **constants: Any) -> str:
    """A kernel as it is compiled for an H100."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {
        name: "constexpr" if name in constants else (_TYPES | {"out": out}).get(name, "i32")
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, types, constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return str(made.asm["ptx"])


NORMALIZE = {"LAST_IN": True, "LAST_OUT": True, "LARGE": False, "BLOCK": 1024}


@pytest.mark.parametrize("out", ["*fp32", "*bf16", "*fp16"])
def test_no_product_is_fused_with_a_sum(compiled: ModuleType, out: str) -> None:
    crop = ptx(compiled.crop_blocks, compiled.EXACT, out, NORMALIZE=True, BLOCK=256)
    assert "mul" in crop and "fma" not in crop
    assert "fma" not in ptx(compiled.normalize_blocks, compiled.EXACT, out, **NORMALIZE)


@pytest.mark.parametrize("name, reach", [("box", 0.5), ("bilinear", 1.0), ("bicubic", 2.0)])
def test_no_weight_is_fused(compiled: ModuleType, name: str, reach: float) -> None:
    how = {"FILTER": name, "REACH": reach, "BLOCK": 256}
    weigh = ptx(compiled.weigh_pixels, compiled.EXACT, **how)
    assert "div.rn.f64" in weigh and "fma" not in weigh


def test_the_search_finds_what_is_fused(compiled: ModuleType) -> None:
    fused = {"enable_fp_fusion": True}
    assert "fma.rn.f32" in ptx(compiled.normalize_blocks, fused, **NORMALIZE)
