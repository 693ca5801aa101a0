"""A training by URL that stops in mid-epoch and goes on: what ranks of test_ranks_by_url.py run.

    torchrun --standalone --nproc-per-node 2 url_rank_programs.py OUT SOURCE...

Each SOURCE is JSON: a URL, and what Storage takes for it. OUT/RANK.json has, of each, the rows of a
whole epoch, of the steps before the stop, and of those after it.
"""

import json
import sys
import zlib
from collections.abc import Mapping
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from shardio import Order, ShardDataset, ShardLoader, Storage
from support import LIMIT_S

GLOBAL_BATCH, STOP, EPOCH = 16, 3, 1

Steps = list[list[list[Any]]]  # of each step its rows: label, and checksum of the image file


def dataset(url: str, storage: Mapping[str, Any], world_size: int) -> ShardDataset:
    """Open a training set, whose order mixes its shards."""
    found = ShardDataset(
        url,
        batch_size=GLOBAL_BATCH // world_size,
        decode=None,
        fields=("image", "label"),
        shuffle_buffer=30,
        order=Order(spans=4, unit=2),
        storage=Storage(**{"timeout_s": 30.0} | dict(storage)),
    )
    found.set_epoch(EPOCH)
    return found


def rows(batch: Any) -> list[list[Any]]:
    images, labels = batch
    sums = [zlib.crc32(image.numpy()) for image in images]
    return [list(row) for row in zip(labels.tolist(), sums, strict=True)]


def read(url: str, storage: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """Read an epoch; and once more, with a stop, after which others go on from a state."""
    whole = DataLoader(dataset(url, storage, world_size), batch_size=None, num_workers=2)
    stopped = dataset(url, storage, world_size)
    loader = DataLoader(stopped, batch_size=None, num_workers=2)
    found = {
        "whole": [rows(batch) for batch in whole],
        "before": [rows(batch) for batch in islice(loader, STOP)],
        "state": json.dumps(stopped.state_dict(steps=STOP)),
    }
    again = dataset(url, storage, world_size)
    again.load_state_dict(json.loads(found["state"]))
    with ShardLoader(again, num_workers=1) as rest:
        found["after"] = [rows(batch) for batch in rest]
    return found


def main(out: str, *sources: str) -> None:
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = []
    for source in sources:
        found.append(read(*json.loads(source), world_size))
        torch.distributed.barrier()
    Path(out, f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
