"""Worker processes of both loaders that die, raise or hang.

P3: an error comes, whatever the moment; batches before it are right, and nothing is left.
"""

import json
import shutil
from collections.abc import Mapping

from support import LIMIT_S, programs, small_datasets
from support.loading import COUNTS

from trust import worker_program
from trust.section import Section, told, words

HOW = ("SIGKILL", "SIGSEGV", "_exit(0)", "exception", "hang")
MOMENTS = ("first", "middle", "last", "between epochs")


class Workers(Section):
    """Lets a worker fail, and waits for the error."""

    name = "workers"
    promise = "P3"
    goal = 150

    def prepare(self) -> None:
        self.data = small_datasets.make(self.folder / "data", COUNTS)
        self.slowest = {"DataLoader": 0.0, "ShardLoader": 0.0}

    def case(self, number: int) -> str:
        draw = self.draw(number)
        given = {
            "loader": ("DataLoader", "ShardLoader")[number % 2],
            "how": draw.choice(HOW),
            "moment": draw.choice(MOMENTS),
            "method": draw.choice(("fork", "fork", "fork", "spawn", "forkserver")),
            "workers": draw.randrange(1, 4),
            "threads": draw.choice((1, 2)),
            "persistent": draw.random() < 0.5,
            "epoch": draw.randrange(2),
            "row": draw.randrange(8),
        }
        if given["moment"] == "between epochs":
            given |= {"epoch": 1, "persistent": True, "how": draw.choice(HOW[:2])}
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
        rows = [one.split(": ") for one in kinds if one.count(": ") == 3]
        slow = ", ".join(f"{name.split(', ')[1]} {one:.1f} s" for name, one in figures.items())
        return (
            f"{len(words(row[1] for row in rows))} ways to fail x {len(MOMENTS)} moments x "
            f"{len(words(row[3] for row in rows))} start methods, both loaders; the slowest error: "
            f"{slow}"
        )
