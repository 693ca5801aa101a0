"""What tools/gpu-check asks of each JPEG decoder: nvJPEG by its header, kinds of JPEGs, crashes."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from support.trees import ROOT

from shardio.images import jpeg_tiles
from tools.gpu_check import engines, kinds, nvjpeg, probe

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NOT TESTED HERE: it needs Linux")
STUB = r"""
#include <stddef.h>
#include <string.h>
#include <stdlib.h>
/* As nvjpeg.h has them; "decodes" to the width, the height and the last byte but two of a file. */
typedef struct { unsigned char *channel[4]; size_t pitch[4]; } Image;
static unsigned width, height; static int batch;
int nvjpegGetProperty(int kind, int *value) { *value = kind + 7; return 0; }
int nvjpegCreateEx(int backend, void *a, void *b, unsigned flags, void **handle) {
    if (backend != 3) return 7;
    *handle = (void *)11; return a || b || flags; }
int nvjpegGetHardwareDecoderInfo(void *h, unsigned *engines, unsigned *cores) {
    *engines = 1; *cores = 2; return h != (void *)11; }
int nvjpegJpegStateCreate(void *h, void **state) { *state = (void *)12; return h != (void *)11; }
int nvjpegJpegStreamCreate(void *h, void **stream) { *stream = (void *)13; return h != (void *)11; }
int nvjpegJpegStreamParse(void *h, const unsigned char *data, size_t size, int a, int b, void *s) {
    if (h != (void *)11 || s != (void *)13 || a || b) return 2;
    for (size_t i = 2; i + 9 < size;) {
        if (data[i + 1] == 0xc2) abort();                       /* progressive */
        if (data[i + 1] == 0xc0) {
            height = data[i + 5] << 8 | data[i + 6]; width = data[i + 7] << 8 | data[i + 8];
            return 0; }
        i += 2 + (data[i + 2] << 8 | data[i + 3]); }
    return 3; }
int nvjpegJpegStreamGetFrameDimensions(void *s, unsigned *w, unsigned *h) {
    *w = width; *h = height; return s != (void *)13; }
int nvjpegDecodeBatchedSupported(void *h, void *s, int *unfit) { *unfit = width > 1000; return 0; }
int nvjpegDecodeBatchedInitialize(void *h, void *state, int count, int threads, int format) {
    batch = count; return state != (void *)12 || threads != 1 || format != 3; }
int nvjpegDecodeBatched(void *h, void *state, const unsigned char *const *data,
                        const size_t *sizes, Image *images, void *stream) {
    for (int i = 0; i < batch; i++) {
        if (nvjpegJpegStreamParse(h, data[i], sizes[i], 0, 0, (void *)13)) return 3;
        if (width > 1000) return 4;
        for (int c = 0; c < 3; c++) for (unsigned y = 0; y < height; y++)
            memset(images[i].channel[c] + y * images[i].pitch[c], data[i][sizes[i] - 3], width); }
    return 0; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libnvjpeg of a few lines, by the signatures of nvjpeg.h."""
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("NOT TESTED HERE: there is no C compiler")
    folder = tmp_path_factory.mktemp("nvjpeg") / "nvidia" / "nvjpeg" / "lib"
    folder.mkdir(parents=True)
    (folder / "stub.c").write_text(STUB)
    made = folder / "libnvjpeg.so.99"
    subprocess.run([compiler, "-shared", "-fPIC", folder / "stub.c", "-o", made], check=True)
    return made


def test_nvjpeg_is_called_as_its_header_says(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(library.parents[3]), *sys.path])
    assert library in nvjpeg.libraries()
    decoder = nvjpeg.NvJpeg(library, nvjpeg.HARDWARE, "cpu")
    assert decoder.about() == "nvJPEG 7.8.9, hardware engines: 1, cores of each: 2"
    small, large = (kinds.encode(kinds.picture(64, 48)), kinds.encode(kinds.picture(1008, 64)))
    assert decoder.parse(small) == (64, 48)
    assert decoder.supports(small) and not decoder.supports(large)
    first, second = decoder.decode([small, small])
    assert first.shape == (3, 48, 64) and torch.equal(first, second)
    assert (first == small[-3]).all() and small[-3]
    with pytest.raises(nvjpeg.NvJpegError, match=r"DecodeBatched: JPEG_NOT_SUPPORTED \(4\)"):
        decoder.decode([small, large])
    with pytest.raises(nvjpeg.NvJpegError, match=r"Parse: BAD_JPEG \(3\)"):
        decoder.parse(b"\xff\xd8")
    with pytest.raises(nvjpeg.NvJpegError, match="ARCH_MISMATCH"):
        nvjpeg.NvJpeg(library, nvjpeg.GPU_HYBRID, "cpu")


def test_a_decoder_that_crashes_ends_neither_the_others_nor_the_probe(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(library.parents[3]), str(ROOT)]))
    made = {"a": {}, "progressive": {"progressive": True}, "b": {"subsampling": "4:4:4"}}
    for name, how in made.items():
        jpeg = kinds.encode(kinds.picture(64, 48), **how)
        (tmp_path / f"{name}.jpg").write_bytes(jpeg)
    files = [tmp_path / f"{name}.jpg" for name in made]
    words = ["-m", "tools.gpu_check.engines", "nvJPEG hardware", "cpu"]
    about, found = probe.ask_engine(
        "nvJPEG hardware", files, lambda some: probe.ask([*words, *some], 60, tmp_path), lambda: 1
    )
    assert "hardware engines: 1" in about
    assert [one["kind"] for one in found] == ["a", "progressive", "b"]
    assert "signal 6 (SIGABRT)" in found[1]["why"]
    for one in (found[0], found[2]):  # decoded, to other pixels
        assert one["says"] is True and one["why"] == "its pixels are of another picture"


def test_after_a_crash_the_kinds_that_are_left_are_asked_for() -> None:
    asked: list[list[str]] = []

    def answer(words: list[str]) -> tuple[list[dict[str, Any]], str]:
        asked.append([Path(word).stem for word in words])
        about = {"about": "a decoder"}
        if len(asked) == 1:  # killed at the second kind
            return [about, {"kind": "a", "decodes": True}], "ended by signal 11 (SIGSEGV)"
        if len(asked) == 2:  # the GPU took no more calls after the third kind, which was told
            return [about, {"kind": "c", "decodes": False}], "exit code 3"
        return [about, {"kind": "d", "decodes": True}], ""

    files = [Path(f"{name}.jpg") for name in "abcd"]
    about, found = probe.ask_engine("x", files, answer, lambda: 1)
    assert asked == [["a", "b", "c", "d"], ["c", "d"], ["d"]] and about == "a decoder"
    assert [(one["kind"], one["decodes"]) for one in found] == [
        *(("a", True), ("b", False), ("c", False), ("d", True))
    ]
    assert "SIGSEGV" in found[1]["why"]
    _, late = probe.ask_engine("x", files, answer, lambda: 0)
    assert {one["why"] for one in late} == {"no time was left"}
    missing = probe.ask_engine("x", files, lambda some: ([{"missing": "no wheel"}], ""), lambda: 1)
    assert missing == ("not here: no wheel", [])
    broken = probe.ask_engine("x", files, lambda some: ([], "exit code 1"), lambda: 1)
    assert broken == ("it does not start: exit code 1", [])


def test_each_kind_of_jpeg_is_what_its_name_says() -> None:
    made = kinds.kinds()
    samplings = {"4:4:4": (1, 1), "4:2:2": (2, 1), "4:2:0": (2, 2), "4:4:0": (1, 2)}
    for name, first in {**samplings, "4:1:1": (4, 1), "grey": (1, 1)}.items():
        with Image.open(io.BytesIO(made[name])) as image:
            image.load()
            assert image.layer[0][1:3] == first, name
    assert {Image.open(io.BytesIO(made[name])).mode for name in ("CMYK", "grey")} == {"CMYK", "L"}
    for name, data in made.items():
        segments = jpeg_tiles.read_segments(data)
        markers = {one.marker for one in segments or ()}
        assert (jpeg_tiles.DRI in markers) == name.startswith("restart marker"), name
        assert (0xC2 in markers) == (name == "progressive"), name
    part = made["restart markers, cut of a tile JPEG"]
    assert len(part) < len(made["restart markers, tile JPEG"])
    assert kinds.expected(part).shape[0] < kinds.HEIGHT


def test_pixels_are_compared_with_those_of_pil() -> None:
    data = kinds.encode(kinds.picture(64, 48))
    right = torch.from_numpy(kinds.expected(data).copy())

    def decode(pixels: torch.Tensor) -> dict[str, Any]:
        return engines.look(engines.Engine("", lambda files: [pixels]), "x", data, "cpu")

    assert decode(right) == {"kind": "x", "says": None, "decodes": True, "largest": 0, "mean": 0.0}
    planes = (right.permute(2, 0, 1).to(torch.int16) - 1).clamp(0).to(torch.uint8)
    assert decode(planes)["largest"] == 1 and decode(planes)["decodes"]
    assert "another picture" in decode(255 - right)["why"]
    assert "its shape is" in decode(right[1:])["why"]
