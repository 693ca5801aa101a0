"""Lightning on a packed dataset, as docs/order.md recommends it; each rank writes what it saw.

torchrun --nproc-per-node 2 lightning_fit.py DATA OUT [CHECKPOINT]
"""

import json
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from shardio import CenterCrop, RandomResizedCrop, ShardDataset


class Loader(DataLoader):
    """Tells the dataset the epoch, and Lightning's checkpoints the place within it."""

    def __init__(self, dataset, trainer, **options):
        super().__init__(dataset, batch_size=None, **options)
        self.trainer, self.steps = trainer, 0

    def __iter__(self):
        self.dataset.set_epoch(self.trainer.current_epoch)
        self.steps = 0
        for batch in super().__iter__():
            self.steps += 1
            yield batch

    def state_dict(self):
        return self.dataset.state_dict(steps=self.steps)

    def load_state_dict(self, state):
        self.dataset.load_state_dict(state)


class Model(lightning.LightningModule):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.layer = torch.nn.Linear(3 * 8 * 8, 128)
        self.seen = {}  # epoch -> the labels of each batch: for the test alone

    def forward(self, images):
        return self.layer(images.flatten(1).float() / 255)

    def train_dataloader(self):
        crop = RandomResizedCrop(8, flip=True)
        train = ShardDataset(self.folder, batch_size=8, fields=("image", "label"), transform=crop)
        return Loader(train, self.trainer, num_workers=2, persistent_workers=True)

    def training_step(self, batch):
        images, labels = batch
        self.seen.setdefault(self.current_epoch, []).append(labels.tolist())
        return cross_entropy(self(images), labels)

    def val_dataloader(self):
        val = ShardDataset(
            self.folder,
            batch_size=8,
            fields=("image", "label"),
            transform=CenterCrop(8),
            shuffle=False,
            tail="exact",
        )
        return DataLoader(val, batch_size=None)

    def on_validation_epoch_start(self):
        self.sums = torch.zeros(2, device=self.device)  # right, counted

    def validation_step(self, batch):
        images, labels, valid = batch
        right = (self(images).argmax(1) == labels) & valid
        self.sums += torch.stack([right.sum(), valid.sum()])

    def on_validation_epoch_end(self):
        right, counted = self.trainer.strategy.reduce(self.sums, reduce_op="sum")
        self.log("accuracy", right / counted, sync_dist=True)
        self.log("counted", counted, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(folder, out, checkpoint=None):
    lightning.seed_everything(0)
    model = Model(folder)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=3,
        callbacks=[ModelCheckpoint(out, "{epoch}-{step}", every_n_train_steps=3, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, ckpt_path=checkpoint, weights_only=True if checkpoint else None)
    seen = {
        "steps": model.seen,
        "len": len(trainer.train_dataloader),
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
    }
    Path(out, f"{trainer.global_rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
