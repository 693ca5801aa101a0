"""Accelerate on a packed dataset, as docs/order.md recommends it; each rank writes what it saw.

torchrun --nproc-per-node 2 accelerate_fit.py DATA OUT [CHECKPOINT]
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from shardio import CenterCrop, RandomResizedCrop, ShardDataset


def main(folder, out, checkpoint=None):
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(3 * 8 * 8, 128)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Not the loaders: each rank's dataset reads its own part, and Accelerate would split it again.
    model, optimizer = accelerator.prepare(model, optimizer)

    fields = ("image", "label")
    crop = RandomResizedCrop(8, flip=True)
    train = ShardDataset(folder, batch_size=8, fields=fields, transform=crop)
    loader = DataLoader(train, batch_size=None, num_workers=2, persistent_workers=True)
    if checkpoint:
        accelerator.load_state(checkpoint)
        train.load_state_dict(json.loads(Path(checkpoint, "shardio.json").read_text()))

    seen, metrics = {}, {}  # for the test alone
    for epoch in range(train.epoch, 3):
        train.set_epoch(epoch)  # the epoch of a loaded state goes on where that was saved
        for step, (images, labels) in enumerate(loader, 1):
            images, labels = images.to(accelerator.device), labels.to(accelerator.device)
            seen.setdefault(epoch, []).append(labels.tolist())
            loss = cross_entropy(model(images.flatten(1).float() / 255), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if step % 3 == 0:
                place = Path(out, f"{epoch}-{step}")
                accelerator.save_state(place)
                if accelerator.is_main_process:
                    Path(place, "shardio.json").write_text(json.dumps(train.state_dict(steps=step)))
        val = ShardDataset(
            folder,
            batch_size=8,
            fields=fields,
            transform=CenterCrop(8),
            shuffle=False,
            tail="exact",
        )
        metrics = validate(accelerator, model, DataLoader(val, batch_size=None))

    written = {"steps": seen, "len": len(loader), "metrics": metrics}
    Path(out, f"{accelerator.process_index}.json").write_text(json.dumps(written))
    accelerator.end_training()


@torch.no_grad()
def validate(accelerator, model, loader):
    sums = torch.zeros(2, device=accelerator.device)  # right, counted
    for images, labels, valid in loader:
        scores = model(images.to(accelerator.device).flatten(1).float() / 255)
        right = (scores.argmax(1).cpu() == labels) & valid
        sums += torch.stack([right.sum(), valid.sum()]).to(sums)
    right, counted = accelerator.reduce(sums).tolist()  # not gather_for_metrics: `valid` says it
    return {"accuracy": right / counted, "counted": counted}


if __name__ == "__main__":
    main(*sys.argv[1:])
