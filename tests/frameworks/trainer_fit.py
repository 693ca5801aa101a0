"""Hugging Face's Trainer on a packed dataset, as docs/order.md recommends it.

torchrun --nproc-per-node 2 trainer_fit.py DATA OUT [CHECKPOINT]     each rank writes what it saw
"""

import json
import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

import shardio
from shardio import CenterCrop, RandomResizedCrop, ShardDataset


class ShardTrainer(Trainer):
    """Takes its loaders as they are: Trainer's own would split each rank's part once more."""

    def get_train_dataloader(self):
        return self.loader(self.train_dataset)

    def get_eval_dataloader(self, eval_dataset=None):
        return self.loader(self.eval_dataset if eval_dataset is None else eval_dataset)

    def loader(self, dataset):
        return DataLoader(dataset, batch_size=None, num_workers=self.args.dataloader_num_workers)


class Place(TrainerCallback):
    """Tells the dataset the epoch, and keeps the place within it in each checkpoint."""

    def __init__(self, dataset):
        self.dataset = dataset

    def on_epoch_begin(self, args, state, control, **kwargs):
        updates, rest = divmod(len(self.dataset), args.gradient_accumulation_steps)
        if rest:  # with ignore_data_skip, Trainer would count the resumed epoch's updates wrong
            raise ValueError("gradient_accumulation_steps does not divide the epoch's batches")
        self.dataset.set_epoch(state.global_step // updates)
        self.began = state.global_step

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            steps = (state.global_step - self.began) * args.gradient_accumulation_steps
            place = Path(args.output_dir, f"checkpoint-{state.global_step}", "shardio.json")
            place.write_text(json.dumps(self.dataset.state_dict(steps=steps)))


def collate(samples):
    """What the model takes; -100 is Trainer's mark of a label that does not count."""
    images, labels, *valid = shardio.collate(samples)
    return {"images": images, "labels": labels.where(valid[0], -100) if valid else labels}


def metrics(prediction):
    valid = prediction.label_ids != -100
    right = (prediction.predictions.argmax(1) == prediction.label_ids) & valid
    return {"accuracy": right.sum() / valid.sum(), "counted": valid.sum()}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3 * 8 * 8, 128)
        self.seen = []  # the labels of each batch: for the test alone

    def forward(self, images, labels):
        if self.training:
            self.seen.append(labels.tolist())
        logits = self.layer(images.flatten(1).float() / 255)
        # Of a batch of repeats alone the mean would be NaN.
        loss = cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        return {"loss": loss / (labels != -100).sum().clamp(min=1), "logits": logits}


def main(folder, out, checkpoint=None):
    set_seed(0)
    arguments = TrainingArguments(
        out,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        num_train_epochs=3,
        save_steps=3,
        eval_strategy="epoch",
        dataloader_num_workers=2,
        ignore_data_skip=True,  # the dataset goes on by itself, without reading what is past
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    options = {"batch_size": 8, "fields": ("image", "label"), "collate_fn": collate}
    train = ShardDataset(folder, transform=RandomResizedCrop(8, flip=True), **options)
    val = ShardDataset(folder, transform=CenterCrop(8), shuffle=False, tail="exact", **options)
    if checkpoint:
        train.load_state_dict(json.loads(Path(checkpoint, "shardio.json").read_text()))
    model = Model()
    trainer = ShardTrainer(
        model,
        arguments,
        train_dataset=train,
        eval_dataset=val,
        compute_metrics=metrics,
        callbacks=[Place(train)],
    )
    trainer.train(resume_from_checkpoint=checkpoint)

    steps = {}  # of each epoch, cut by what Trainer takes for its length; the first may be a rest
    batches, length = model.seen, len(trainer.get_train_dataloader())
    for epoch in reversed(range(3)):
        batches, steps[epoch] = batches[:-length], batches[-length:]
    written = {
        "steps": {epoch: steps[epoch] for epoch in sorted(steps) if steps[epoch]},
        "len": length,
        "metrics": trainer.evaluate(),
    }
    Path(out, f"{trainer.args.process_index}.json").write_text(json.dumps(written))


if __name__ == "__main__":
    main(*sys.argv[1:])
