"""The Trainer of transformers, which nobody helps to tell the epoch: what each epoch read.

python loops_trainer.py DATA OUT          OUT/trainer.json: of each case, labels by step

Stock: a dataset without batch_size, and a data_collator. Own loader: as for several ranks.
"""

import json
import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import shardio
from shardio import ShardDataset, ShardLoader

MIDDLE = 13 + 3


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 128)
        self.seen = []

    def forward(self, labels):
        self.seen.append(labels.tolist())
        return {"loss": cross_entropy(self.layer(labels[:, None].float()), labels)}


def collate(samples):
    (labels,) = shardio.collate(samples)
    return {"labels": labels}


class OwnLoader(Trainer):
    def get_train_dataloader(self):
        return self.make(self.train_dataset)


def plain(workers):
    return lambda train: DataLoader(
        train, batch_size=None, num_workers=workers, persistent_workers=workers > 0
    )


def shards(train):
    return ShardLoader(train, num_workers=2)


def main(folder, out):
    found = {}

    def fit(name, *, workers=0, make=None, resume=None):
        place = Path(out, name.replace(" ", "-"))
        arguments = TrainingArguments(
            place,
            per_device_train_batch_size=8,
            num_train_epochs=3,
            dataloader_num_workers=workers,
            dataloader_persistent_workers=workers > 0,
            save_strategy="steps" if name == "stock" else "no",
            save_steps=MIDDLE,
            logging_strategy="no",
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        )
        options = {"fields": ("label",), "decode": None, "collate_fn": collate}
        if make is None:
            options = {"fields": ("label",), "decode": None}
        train = ShardDataset(folder, batch_size=None if make is None else 8, **options)
        model = Model()
        trainer = (Trainer if make is None else OwnLoader)(
            model, arguments, train_dataset=train, data_collator=collate
        )
        trainer.make = make
        trainer.train(resume_from_checkpoint=resume)
        found[name] = model.seen

    fit("stock")
    fit("stock, 2 workers", workers=2)
    fit("stock, resumed", resume=Path(out, "stock", f"checkpoint-{MIDDLE}"))
    fit("own loader", make=plain(0))
    fit("own loader, 2 workers", make=plain(2))
    fit("own loader, ShardLoader", make=shards)
    Path(out, "trainer.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
