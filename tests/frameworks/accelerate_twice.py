"""What must not be done, and is refused: loaders that Accelerate splits among the ranks again.

torchrun --nproc-per-node 2 accelerate_twice.py DATA OUT

Each rank writes what became of each case: the labels it got, or the error.
"""

import json
import sys
from pathlib import Path

import torch
import transformers.trainer_pt_utils
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainingArguments

import shardio.dataset.ranks
from shardio import ShardDataset


class Own(IterableDataset):
    """A user's own wrapper, which passes neither epoch nor length on."""

    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        return iter(self.inner)


def drain(loader):
    return [label for (labels,) in loader for label in labels.tolist()]


def main(folder, out):
    def dataset(batch_size=8):
        return ShardDataset(folder, batch_size=batch_size, fields=("label",), decode=None)

    def prepared(loader, **options):
        configuration = DataLoaderConfiguration(**options)
        return Accelerator(cpu=True, dataloader_config=configuration).prepare(loader)

    def in_workers(dataset, start):
        options = {"num_workers": 2, "multiprocessing_context": start, "persistent_workers": True}
        return prepared(DataLoader(dataset, batch_size=None, **options))

    def samples(**options):
        return prepared(DataLoader(dataset(None), batch_size=8, num_workers=2), **options)

    def trainer():
        options = {"report_to": "none", "disable_tqdm": True, "max_steps": 1, "use_cpu": True}
        arguments = TrainingArguments(out, **options)
        Trainer(torch.nn.Linear(2, 2), arguments, train_dataset=dataset(None)).train()

    def transformers_of_old(data):
        shard = transformers.trainer_pt_utils.IterableDatasetShard
        return shard(data, batch_size=8, num_processes=2, process_index=0)

    def for_one_process(data):
        loader, device = DataLoader(data, batch_size=None), Accelerator(cpu=True).device
        return prepare_data_loader(loader, device, 1, 0, put_on_device=True, dispatch_batches=False)

    def unguarded():
        guard = shardio.dataset.ranks._refuse_second_split
        shardio.dataset.ranks._refuse_second_split = lambda rank, world_size: None
        try:
            return drain(in_workers(dataset(), "fork"))
        finally:
            shardio.dataset.ranks._refuse_second_split = guard

    cases = {
        "dispatched": lambda: drain(prepared(DataLoader(dataset(), batch_size=None))),
        "dispatched, forked workers": lambda: drain(in_workers(dataset(), "fork")),
        "dispatched, spawned workers": lambda: drain(in_workers(dataset(), "spawn")),
        "length": lambda: len(prepared(DataLoader(dataset(), batch_size=None))),
        "samples, dispatched": lambda: drain(samples()),
        "samples, split": lambda: drain(samples(split_batches=True)),
        "samples, sharded": lambda: drain(samples(dispatch_batches=False)),
        "trainer": trainer,
        "old transformers": lambda: drain(transformers_of_old(dataset())),
        "right": lambda: drain(for_one_process(dataset())),
        "unguarded": unguarded,
    }
    Accelerator(cpu=True)  # from here on there are ranks
    became = {}
    for name, case in cases.items():
        try:
            became[name] = case()
        except Exception as error:
            became[name] = f"{type(error).__name__}: {error}"
        Accelerator().wait_for_everyone()
    # Here the other ranks would wait for rank 0, which alone reads: the error has to end them.
    for start in ("fork", "spawn"):
        loader = in_workers(Own(dataset()), start)
        if Accelerator().is_main_process:
            try:
                drain(loader)
            except Exception as error:
                became[f"wrapped, {start}"] = f"{type(error).__name__}: {error}"
    Path(out, f"{Accelerator().process_index}.json").write_text(json.dumps(became))
    Accelerator().end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
