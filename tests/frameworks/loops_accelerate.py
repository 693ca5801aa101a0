"""Loops over loaders with Accelerate, of which none tells the dataset the epoch: what each read.

python loops_accelerate.py DATA OUT          OUT/accelerate.json: of each case, labels by epoch
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from shardio import ShardDataset, ShardLoader

EPOCHS = 3
WORKERS = {"batch_size": None, "num_workers": 2, "persistent_workers": True}
LOADERS = {
    "DataLoader": lambda train: DataLoader(train, batch_size=None),
    "DataLoader, 2 workers": lambda train: DataLoader(train, **WORKERS),
    "ShardLoader, 2 workers": lambda train: ShardLoader(train, num_workers=2),
}


def by_for(loader):
    return [labels.tolist() for (labels,) in loader]


def by_range(loader):
    batches = iter(loader)
    return [next(batches)[0].tolist() for _ in range(len(loader))]


def main(folder, out):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1))

    def dataset():
        return ShardDataset(folder, batch_size=8, fields=("label",), decode=None)

    found = {}
    for name, make in LOADERS.items():
        for loop in (by_for, by_range):
            loader = make(dataset())
            found[f"{name}, {loop.__name__}"] = [loop(loader) for _ in range(EPOCHS)]
        if name.startswith("Data"):  # what is prepared counts epochs, and tells the dataset
            loader = accelerator.prepare(make(dataset()))
            found[f"{name}, prepared"] = [by_for(loader) for _ in range(EPOCHS)]
    Path(out, "accelerate.json").write_text(json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
