"""A small dataset to which everything was done that changes one."""

from pathlib import Path

import shardio
from shardio import Writer
from shardio.packing.annotate import annotate
from shardio.packing.append import append
from shardio.packing.drop import drop
from shardio.packing.update import update
from shardio.packing.versions import tag
from support.packing import grouped
from support.trees import images, noise, plant


def grown(folder: Path, format: str = "record", each: int = 6, size: int = 200) -> Path:
    """Pack, append, update, annotate, drop, tag: `folder/out`, of eight shards or so.

    each: images of a class; with one, the shards are five.
    """
    source, more, out = (folder / name for name in ("src", "more", "out"))
    plant(source, images(2, each, size))
    options = grouped({"jobs": 1, "max_records": 4, "format": format})
    shardio.pack(source, out, **options)
    plant(more, images(3, each, size))
    tag(out, "packed")
    append(more, out, jobs=1, on_duplicate="skip")
    plant(more, {f"class1/{min(1, each - 1):03d}.jpg": noise("corrected", size)})
    update(more, out, jobs=1)
    keys = shardio.open(out, decode=None).keys()
    annotate(out, {key: {"label": at % 3, "caption": f"of {key}"} for at, key in enumerate(keys)})
    annotate(out, {keys[2]: {"caption": "once more"}})
    annotate(out, {keys[-1]: {"score": 0.5}}, missing="none")
    drop(out, keys=keys[1 : 2 * each : 5])
    with Writer(out, append=True) as writer:
        for at in range(2):
            writer.write(
                {"__key__": f"by a program {at}", "image": noise(f"{at}", size), "label": at}
            )
    return out
