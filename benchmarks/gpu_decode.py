"""Decoders of JPEGs on a GPU: images/s, how far their pixels are from the CPU's, what they refuse.

First the decoders alone, on photographs in five forms, 256 files at a time:

    plain                    as they came
    tile JPEG                rewritten without loss, a restart marker behind each tile
    cuts of tile JPEGs       the tiles under a RandomResizedCrop(224): small JPEGs with such markers
    encoded again            by PIL, quality 90
    the same, with markers   a restart marker behind each row of blocks, all else the same

The row "JPEG engine alone" is nvImageCodec with nothing but the GPU's own engine for JPEGs: what it
decodes of the last two forms says whether it takes restart markers. Pixels are compared with those
of PIL, in levels of 255.

Then the whole road, ShardLoader with decode="cuda", by torch's kernels and by those of Triton,
beside workers that decode; its crops are compared with those of the same road on the CPU. It comes
before the forms that are encoded again, which only say something of decoders. Needs CUDA; --device
cpu rehearses it with PIL.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from . import data
from .gpu import gpu
from .gpu_feeds import Scale
from .gpu_transfers import done
from .harness import (
    BLOCK_S,
    START_S,
    Deadline,
    EntryProcess,
    Result,
    add_facts,
    ending,
    interleave,
    ratio,
    show,
)

PLAIN, TILES, CUTS = "plain", "tile JPEG", "cuts of tile JPEGs"
AGAIN, MARKED = "encoded again", "the same, with markers"
WEIGHTS = {"forms": 4, PLAIN: 3, TILES: 3, "others": 1}  # of the time, in this order
ENGINE, PIL, WORKERS = "JPEG engine alone", "pil", "workers, by CPU"
DECODERS = ("nvimgcodec", "torchcodec", "torchvision")
TRITON = ", Triton"  # after the name of a decoder: kernels="triton"
COMPARED = 128  # files whose pixels are compared
ROUND_S = 1.0

COLUMNS = {
    "images_per_s": "images/s",
    "pixels_per_s": "megapixels/s",
    "refused": "files refused",
    "mean": "mean difference, levels",
    "most": "the most",
    "beyond": "share beyond 2 levels",
}

Round = Callable[..., dict[str, Any]]


def run(source: data.Data, result: Result, device: str = "cuda") -> None:
    result.data(gpu=gpu(device))
    scale = Scale.of(device, source.quick, result.deadline)
    few = {
        PLAIN: data.pack(source.originals(), source.scratch / "few"),
        TILES: data.pack(source.originals(), source.scratch / "tiles", "--jpeg-tiles"),
    }
    packed = {name: str(path) for name, path in few.items()}
    there: list[str] = []
    for name, deadline in result.deadline.shares(WEIGHTS, BLOCK_S):
        if name == "forms":
            forms = packed | written(source, {CUTS: cuts(few[TILES])})
            there = _alone(result, scale, forms, deadline)
        elif name != "others":
            shards = data.repeat(few[name], source.scratch / "shards", scale.records)
            _road(result, scale, name, str(shards), there, deadline)
            data.remove(shards)
        elif deadline.enough(START_S):
            _alone(result, scale, written(source, encoded_again(few[PLAIN])), deadline)
        else:
            result.left_out("decoded alone", [AGAIN, MARKED])


def cuts(tiles: Any) -> list[bytes]:
    """Return the cuts of tile JPEGs that a decoder of the GPU is given."""
    import shardio
    from shardio import RandomResizedCrop
    from shardio.images.device_crop import plan_crop
    from shardio.order.rng import word

    crop = RandomResizedCrop(224, flip=True)
    samples = enumerate(shardio.open(tiles, decode=None))
    planned = [plan_crop(crop, sample["image"], word(0, i), i) for i, sample in samples]
    # With a reason why a worker would decode it, it is none.
    return [bytes(one.data) for one in planned if not one.place[-2]]


def encoded_again(plain: Any) -> dict[str, list[bytes]]:
    """Return photographs encoded again, without restart markers and with them."""
    import shardio

    found: dict[str, list[bytes]] = {AGAIN: [], MARKED: []}
    for sample in shardio.open(plain):
        for name, more in ((AGAIN, {}), (MARKED, {"restart_marker_rows": 1})):
            buffer = io.BytesIO()
            sample["image"].convert("RGB").save(buffer, "JPEG", quality=90, **more)
            found[name].append(buffer.getvalue())
    return found


def written(source: data.Data, forms: dict[str, list[bytes]]) -> dict[str, str]:
    """Write files of each form as a dataset; return their folders."""
    import shardio

    folders = {}
    for name, files in forms.items():
        folders[name] = str(source.scratch / f"form {name}")
        with shardio.Writer(folders[name], fields={"image": "image"}) as writer:
            for file in files:
                writer.write({"image": file})
    return folders


# --- decoders alone -------------------------------------------------------------------------------


def _alone(result: Result, scale: Scale, forms: dict[str, str], deadline: Deadline) -> list[str]:
    """Measure the decoders on each form; return those that are there."""
    sizes = {name: data.folder_bytes(path) for name, path in forms.items()}
    result.data(forms=result.facts["data"].get("forms", {}) | sizes)
    names = [PIL] if scale.device == "cpu" else [*DECODERS, ENGINE, PIL]
    entries = {
        name: EntryProcess("gpu_decode:decoder", **scale.options(name=name, forms=forms))
        for name in (names if deadline.enough(START_S) else ())
    }
    with ending(entries):
        for name in tuple(entries):
            if missing := entries[name].round()["missing"]:
                result.note(f"{name} was not measured: {missing}")
                entries.pop(name).close()
                names.remove(name)
        for form, its in deadline.shares(dict.fromkeys(forms, 1)):
            about = {
                name: entries[name].round(form=form, compare=True)
                for name in its.part(0.5).until(entries)
            }
            show(f"  {form}: {about}")
            ways = {name: partial(entries[name].round, form=form) for name in about}
            measured = interleave(ways, scale.rounds, its)
            _report_alone(result, form, names, about, measured)
            result.keep()
    return list(entries)


def _report_alone(
    result: Result, form: str, names: list[str], about: dict[str, Any], measured: dict[str, Any]
) -> None:
    add_facts(measured, about)
    title = f"{form}, decoded alone"
    result.raw(form, measured)
    result.table(title, measured, COLUMNS, versus=PIL, by="images_per_s")
    result.left_out(title, [name for name in names if name not in measured])
    if ENGINE in about:
        files, refused = about[ENGINE]["files"], about[ENGINE]["refused"]
        result.note(f"{form}: the JPEG engine takes {files - refused} of {files} files")


def decoder(scale: dict[str, Any], name: str, forms: dict[str, str]) -> Round:
    """A round decodes the files of a form for ROUND_S; compare: once, beside PIL's pixels."""
    import torch

    import shardio
    from shardio.errors import DependencyError

    size = Scale(**scale)
    device = torch.device(size.device, 0) if size.device == "cuda" else torch.device("cpu")
    missing = ""
    try:
        decode = _decode(name, device)
    except (DependencyError, ImportError) as error:
        missing = str(error)

    def file(sample: dict[str, Any]) -> Any:
        found = torch.frombuffer(bytearray(sample["image"]), dtype=torch.uint8)
        return found.pin_memory() if size.device == "cuda" else found

    files = {
        form: [file(sample) for sample in shardio.open(path, decode=None)]
        for form, path in forms.items()
    }

    def one_round(form: str = "", compare: bool = False) -> dict[str, Any]:
        if not form:
            return {"missing": missing}
        return (_compared if compare else _timed)(decode, files[form], size)

    return one_round


Decode = Callable[[Sequence[Any]], list[Any]]


def _decode(name: str, device: Any) -> Decode:
    """Return what decodes a list of files on the device: None for each that it refuses."""
    from shardio.loader import device_decode

    if name == ENGINE:
        engine = device_decode.NvImgCodec(device)
        library = engine._library
        backend = library.Backend(library.BackendKind.HW_GPU_ONLY)
        engine._decoder = library.Decoder(device_id=device.index, backends=[backend])
        return engine.decode
    found = device_decode.find_decoder(name, device)
    if found is None:
        return lambda files: [device_decode.decode_by_pil(file) for file in files]
    return found.decode


def _timed(decode: Decode, files: Sequence[Any], scale: Scale) -> dict[str, Any]:
    count = pixels = 0
    began = done(scale.device)
    while True:
        for first in range(0, len(files), scale.batch):
            found = decode(files[first : first + scale.batch])
            count += len(found)
            pixels += sum(one.shape[1] * one.shape[2] for one in found if one is not None)
            seconds = done(scale.device) - began
            if seconds > ROUND_S:
                return {"images_per_s": count / seconds, "pixels_per_s": pixels / seconds / 1e6}


def _compared(decode: Decode, files: Sequence[Any], scale: Scale) -> dict[str, Any]:
    from shardio.loader.device_decode import decode_by_pil

    refused, pairs = 0, []
    for first in range(0, len(files), scale.batch):
        some = files[first : first + scale.batch]
        for i, (file, one) in enumerate(zip(some, decode(some), strict=True), first):
            refused += one is None
            if one is not None and i < COMPARED:
                pairs.append((one.cpu(), decode_by_pil(file)))
    return {"files": len(files), "refused": refused} | _differences(pairs)


def _differences(pairs: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """Return how far pictures are from others, in levels; None of no pictures."""
    import torch

    if not pairs:
        return {"mean": None, "most": None, "beyond": None}
    levels = torch.cat([(a.int() - b.int()).abs().flatten() for a, b in pairs])
    return {
        "mean": float(levels.float().mean()),
        "most": int(levels.max()),
        "beyond": float((levels > 2).float().mean()),
    }


# --- the whole road -------------------------------------------------------------------------------


def _road(
    result: Result, scale: Scale, form: str, path: str, there: list[str], deadline: Deadline
) -> None:
    """Measure ShardLoader with each decoder that is there, and with workers that decode."""
    there = [name for name in DECODERS if name in there]
    # What the others are compared with first; PIL, which shows what a fallback costs, last.
    names = [WORKERS, *(name + kernels for name in there for kernels in ("", TRITON)), PIL]
    entries = {
        name: EntryProcess("gpu_decode:road", **scale.options(name=name, path=path))
        for name in (names if deadline.enough(START_S) else ())
    }
    about: dict[str, dict[str, Any]] = {}

    def report(measured: dict[str, Any]) -> None:
        add_facts(measured, about)
        _report_road(result, scale, form, names, measured)

    with ending(entries):
        for name in deadline.part(0.7).until(entries):  # it takes several times a round's time
            about[name] = entries[name].round(compare=True)
        measured = interleave(
            {name: entries[name].round for name in about},
            scale.rounds,
            deadline,
            partial(result.keep, report),
        )
    report(measured)


def _report_road(
    result: Result, scale: Scale, form: str, names: list[str], measured: dict[str, Any]
) -> None:
    columns = {
        "images_per_s": "images/s, no model",
        "cores": "cores that are busy",
        "by_decoder": "by the decoder",
        "by_trainer": "by the trainer's CPU",
        "by_workers": "by the workers",
        **{name: COLUMNS[name] for name in ("mean", "most", "beyond")},
    }
    title = f'{form}, decode="cuda", RandomResizedCrop({scale.size}), {scale.workers} workers'
    result.raw(title, measured)
    result.table(title, measured, columns, versus=WORKERS, by="images_per_s")
    result.left_out(title, [name for name in names if name not in measured])
    gpus = [name for name in measured if name.removesuffix(TRITON) in DECODERS]
    found = [ratio(measured, name, WORKERS, "images_per_s") for name in gpus]
    what = f'{form}, images/s of the best decoder, of "{WORKERS}"'
    result.target(what, max(filter(None, found), default=None), -1.0)


def road(scale: dict[str, Any], name: str, path: str) -> Round:
    """A round is an epoch; compare: some batches beside those of the same road on the CPU."""
    import os

    from shardio import RandomResizedCrop, ShardDataset, ShardLoader
    from shardio.machine import cpu_seconds, family

    size = Scale(**scale)
    epoch = 0

    def loader(device: str, workers: int, decoder: str) -> Any:
        dataset = ShardDataset(
            path,
            batch_size=size.batch,
            fields=("image", "label"),
            decode="pil" if name == WORKERS else "cuda",
            transform=RandomResizedCrop(size.size, flip=True),
        )
        kernels = "triton" if name.endswith(TRITON) and device != "cpu" else "torch"
        return ShardLoader(
            dataset, num_workers=workers, device=device, decoder=decoder, kernels=kernels
        )

    decoder = "auto" if name == WORKERS else name.removesuffix(TRITON)
    ours = loader(size.device, size.workers, decoder)

    def one_round(compare: bool = False) -> dict[str, Any]:
        nonlocal epoch
        if compare:
            return _road_compared(ours, loader("cpu", 0, "auto"))
        ours.set_epoch(epoch := epoch + 1)
        images = -1
        began = used = 0.0
        for batch, _ in ours:
            if images < 0:  # the first one started the workers
                images, began = 0, done(size.device)
                used = cpu_seconds(family(os.getpid())) or 0.0
            else:
                images += len(batch)
        seconds = done(size.device) - began
        worked = (cpu_seconds(family(os.getpid())) or 0.0) - used
        return {"images_per_s": images / seconds, "cores": worked / seconds}

    return one_round


def _road_compared(ours: Any, wanted: Any) -> dict[str, Any]:
    """Return how far crops are from those that the CPU makes, and by whom those were decoded."""
    pairs = []
    for loader in (ours, wanted):
        loader.set_epoch(0)
        batches = iter(loader)
        pairs.append([next(batches)[0].cpu() for _ in range(2)])
    found = _differences(list(zip(*pairs, strict=True)))
    counts = ours.explain().decoded
    if counts is not None and counts.decoder:
        found |= {
            "by_decoder": counts.by_decoder,
            "by_trainer": counts.by_trainer,
            "by_workers": sum(counts.by_workers.values()),
        }
    wanted.close()
    return found
