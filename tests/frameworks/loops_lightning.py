"""Stock Lightning over loaders of shardio, which nobody tells the epoch: what each epoch read.

python loops_lightning.py DATA OUT

Of each loader OUT/lightning.json has the labels of each step: {"fit": of a run of three epochs,
"middle", "end": of runs that go on from its checkpoints, of step 16 and of the end of epoch 0}, or
their errors.
"""

import json
import sys
from pathlib import Path

import lightning
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from shardio import ShardDataset, ShardLoader

EPOCHS, STEPS = 3, 13
MIDDLE = STEPS + 3
WORKERS = {"batch_size": None, "num_workers": 2, "persistent_workers": True}
LOADERS = {
    "DataLoader": lambda train: DataLoader(train, batch_size=None),
    "DataLoader, 2 workers": lambda train: DataLoader(train, **WORKERS),
    "StatefulDataLoader": lambda train: StatefulDataLoader(train, batch_size=None),
    "StatefulDataLoader, 2 workers": lambda train: StatefulDataLoader(train, **WORKERS),
    "ShardLoader": lambda train: ShardLoader(train, num_workers=0),
    "ShardLoader, 2 workers": lambda train: ShardLoader(train, num_workers=2),
}


class Model(lightning.LightningModule):
    def __init__(self, loader):
        super().__init__()
        self.loader, self.seen = loader, {}
        self.layer = torch.nn.Linear(1, 128)

    def train_dataloader(self):
        return self.loader

    def training_step(self, batch):
        (labels,) = batch
        self.seen.setdefault(self.current_epoch, []).append(labels.tolist())
        return cross_entropy(self.layer(labels[:, None].float()), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Checkpoints(lightning.Callback):
    def __init__(self, out):
        self.out = out

    def on_train_batch_end(self, trainer, *more):
        if trainer.global_step == MIDDLE:
            trainer.save_checkpoint(self.out / "middle.ckpt")

    def on_train_epoch_end(self, trainer, model):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.out / "end.ckpt")


def fit(folder, make, callbacks=(), checkpoint=None):
    train = ShardDataset(folder, batch_size=8, fields=("label",), decode=None)
    model = Model(make(train))
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(model, ckpt_path=checkpoint, weights_only=False if checkpoint else None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return list(model.seen.values())


def main(folder, out):
    found = {}
    for number, (name, make) in enumerate(LOADERS.items()):
        place = Path(out, str(number))
        place.mkdir()
        found[name] = {
            "fit": fit(folder, make, [Checkpoints(place)]),
            "middle": fit(folder, make, checkpoint=place / "middle.ckpt"),
            "end": fit(folder, make, checkpoint=place / "end.ckpt"),
        }
    Path(out, "lightning.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
