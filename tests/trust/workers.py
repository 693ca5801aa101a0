"""Worker processes of both loaders that die, raise or hang.

P3: an error comes, whatever the moment; batches before it are right, and nothing is left.
"""

import json
import shutil
from collections.abc import Mapping
from itertools import product
from typing import Any

from support import LIMIT_S, programs, small_datasets
from support.loading import COUNTS

from trust import worker_program
from trust.section import Section, scattered, told, words

HOW = ("SIGKILL", "SIGSEGV", "_exit(0)", "exception", "hang")
MOMENTS = ("first", "middle", "last")
BETWEEN = "between epochs"
LOADERS, METHODS = ("DataLoader", "ShardLoader"), ("fork", "spawn", "forkserver")
# Loader, way, moment, start method, workers, persistent: each once. ShardLoader's always are.
WAYS = [
    *product(LOADERS[:1], HOW, MOMENTS, METHODS, (1, 2, 3), (False, True)),
    *product(LOADERS[1:], HOW, MOMENTS, METHODS, (1, 2, 3), (True,)),
    *product(LOADERS, HOW[:2], [BETWEEN], METHODS, (1, 2, 3), (True,)),
]


class Workers(Section):
    """Lets a worker fail, and waits for the error."""

    name = "workers"
    promise = "P3"
    goal = len(WAYS)

    def prepare(self) -> None:
        self.data = small_datasets.make(self.folder / "data", COUNTS)
        self.slowest = {"DataLoader": 0.0, "ShardLoader": 0.0}

    def case(self, number: int) -> str:
        draw = self.draw(number)
        way = WAYS[scattered(number, len(WAYS), self.seed)]
        names = ("loader", "how", "moment", "method", "workers", "persistent")
        given: dict[str, Any] = dict(zip(names, way, strict=True))
        epoch = 1 if given["moment"] == BETWEEN else draw.randrange(2)
        given |= {"threads": draw.choice((1, 2)), "epoch": epoch, "row": draw.randrange(8)}
        scratch = self.folder / "scratch"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        done = programs.run(
            *(worker_program.__file__, self.data, scratch, json.dumps(given)),
            limit_s=LIMIT_S / 4,
            warm=True,
        )
        with told(f"{given}: {done}"):
            assert not done.timed_out, "it hangs"
            assert not done.left, "processes are left"
            assert done.code == 0, "the training failed"
            took = json.loads(done.output[done.output.rindex("{") :])["seconds"]
        loader = str(given["loader"])
        self.slowest[loader] = max(self.slowest[loader], took)
        return f"{loader}: {given['how']}: {given['moment']}: {given['method']}"

    def most(self) -> dict[str, float]:
        return {f"slowest error, {name}, s": round(one, 2) for name, one in self.slowest.items()}

    @classmethod
    def done(cls, kinds: Mapping[str, int], figures: Mapping[str, float]) -> str:
        rows = [one for one in kinds if one.count(": ") == 3]
        slow = ", ".join(f"{name.split(', ')[1]} {one:.1f} s" for name, one in figures.items())
        return (
            f"{sum(kinds.values()):,} of {len(WAYS)} combinations of loader, way to fail, moment, "
            f"start method, workers and persistent, {len(words(rows))} kinds; the slowest error: "
            f"{slow}"
        )
