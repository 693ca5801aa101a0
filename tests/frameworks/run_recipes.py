"""Runs blocks of docs/recipes.md one after another, and writes down what their loaders give.

python run_recipes.py PAGE OUT NUMBER...     in a folder with the packed directories that they name

Of each block OUT gets NUMBER.pt, or NUMBER.txt with the traceback: the batches of two epochs as two
worker processes give them and as the trainer's own does. Of one that uses the Trainer of
transformers, the labels of each step that it made; a launcher's ranks write NUMBER-RANK.pt.
"""

import os
import re
import sys
import traceback
from functools import partial
from pathlib import Path

import torch
from torch.utils.data import DataLoader

RANK = f"-{os.environ['RANK']}" if "RANK" in os.environ else ""


def blocks(page):
    """The Python blocks of a page, with their lines counted as the page's are."""
    text = Path(page).read_text()
    for found in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S):
        yield "\n" * text.count("\n", 0, found.start(1)) + found[1]


def epochs(train, loader):
    found = []
    for epoch in range(2):
        train.set_epoch(epoch)
        found.append([plain(batch) for batch in loader])
    return found


def plain(value):
    """Without arrays of numpy, which torch.load takes for code."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return torch.from_numpy(value) if type(value).__module__ == "numpy" else value


class Recorder:
    def __init__(self):
        self.seen = []

    def __call__(self, *given):
        self.seen.append(plain(given))


def watched(seen):
    """Have each step of a Trainer write its labels down, and its ranks meet without a GPU."""
    import transformers

    trainer, step = transformers.Trainer, transformers.Trainer.training_step

    def training_step(self, model, inputs, *more, **options):
        seen.append(inputs["labels"].tolist())
        return step(self, model, inputs, *more, **options)

    trainer.training_step = training_step
    transformers.TrainingArguments = partial(transformers.TrainingArguments, use_cpu=True)


def main(page, out, *numbers):
    texts = list(blocks(page))
    for number in map(int, numbers):
        torch.manual_seed(0)
        model = Recorder()  # what a recipe calls so and leaves to its reader
        names = {"__name__": "__main__", "model": model}
        try:
            if "Trainer" in texts[number]:
                watched(model.seen)
            exec(compile(texts[number], page, "exec"), names)
            given = {"seen": model.seen}
            if "loader" in names:
                train, loader = names["train"], names["loader"]
                given["workers"] = epochs(train, loader)
                given["alone"] = epochs(train, DataLoader(train, batch_size=None))
        except Exception:
            Path(out, f"{number}{RANK}.txt").write_text(traceback.format_exc())
        else:
            torch.save(given, Path(out, f"{number}{RANK}.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
