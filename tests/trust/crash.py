"""Commands that write, killed or refused at each call that changes something, or at any moment.

P2: what is there is all or nothing, the same command goes on to identical bytes, an error is one
line with path and cause, and no source is touched.
"""

import errno
import os
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support import LIMIT_S
from support.crashing import SCENES, Scene, Stage, check_told, members

from trust.commands import Commands, Done
from trust.section import Section, scattered, told, words

ERRORS = ("ENOSPC", "EIO", "EDQUOT", "EACCES", "EROFS")
LARGE = ("pack", "append", "update", "compact", "erase", "copy", "export", "unpack", "overwrite")


class Warm(Stage):
    """Runs commands in forks, and makes what was before a command once."""

    def __init__(self, folder: Path, each: int = 3) -> None:
        os.environ["SOURCE_DATE_EPOCH"] = "1750000000"  # of commits, whenever they are done
        folder.mkdir()
        super().__init__(folder, each)
        self.commands = Commands(folder)
        self._before: dict[int, Path] = {}  # by scene

    def out(self, scene: Scene) -> Path:
        if before := self._before.get(id(scene)):
            self.number += 1
            shutil.copytree(before, self.folder / f"{self.number}")
            return self.folder / f"{self.number}" / "out"
        out = super().out(scene)
        self._before[id(scene)] = self.folder / f"before-{self.number}"
        shutil.copytree(out.parent, self._before[id(scene)])
        return out

    def run(self, scene: Scene, out: Path, **how: Any) -> Done:
        return self.commands.run(*self.arguments(scene, out), below=out.parent, **how)

    def changes(self, scene: Scene, out: Path) -> list[tuple[str, int]]:
        done = self.run(scene, out)
        assert done.returncode == scene.code, done
        return [(call, number) for number, call in enumerate(done.calls, 1)]

    def again(self, scene: Scene, out: Path) -> Any:
        return self.run(scene, out)


class Crash(Section):
    """Kills a command at one of its calls, or lets it fail; each call once in each way."""

    name = "crash"
    promise = "P2"

    def prepare(self) -> None:
        self.stage = Warm(self.folder / "small")
        self.all = []
        for name in SCENES:
            for call, number in self.stage.rehearse(name):
                hows = ["SIGKILL", *ERRORS, *(("short", "full") if "write" in call else ())]
                self.all += [(name, call, number, how) for how in hows]
        self.goal = len(self.all)

    def case(self, number: int) -> str:
        name, call, at, how = self.all[scattered(number, len(self.all), self.seed)]
        scene = SCENES[name]
        out = self.stage.out(scene)
        with told(f"{name}: {call}, call number {at}: {how}"):
            if how == "SIGKILL":
                done = self.stage.run(scene, out, number=at, how="kill")
                assert done.returncode == -signal.SIGKILL, done
            elif how == "short":  # a part was written, and the rest can be, too
                done = self.stage.run(scene, out, number=at, how="short")
                assert done.returncode == scene.code, done
            elif how == "full":  # a part was written, and the disk is full from then on
                done = self.stage.run(scene, out, number=at, how="full")
                check_told(scene, out, call, "ENOSPC", done)
            else:
                given = {"number": at, "how": "fail", "error": getattr(errno, how)}
                done = self.stage.run(scene, out, **given)
                check_told(scene, out, call, how, done)
            self.stage.check(name, out)
        self.stage.discard(out)
        return f"{name}: {how}"

    def close(self) -> None:
        if hasattr(self, "stage"):
            self.stage.commands.close()

    @classmethod
    def done(cls, kinds: Mapping[str, int], figures: Mapping[str, float]) -> str:
        rows = [one.split(": ", 1) for one in kinds if ": " in one]
        sums = {how: sum(kinds[one] for one in kinds if one.endswith(how)) for _, how in rows}
        kills = sums.get("SIGKILL", 0)
        return (
            f"{len(words(row[0] for row in rows))} commands at {figures.get('calls', 0):,.0f} "
            f"calls that change something: {kills:,} killed, {sum(sums.values()) - kills:,} with "
            f"a call that fails or is short; each run again"
        )

    def most(self) -> dict[str, float]:
        return {"calls": len({one[:3] for one in self.all})}


class Moments(Section):
    """Kills larger runs of two processes at some moment, once or several times."""

    name = "moments"
    promise = "P2"
    goal = 360  # of which some had ended before

    def prepare(self) -> None:
        self.large = Warm(self.folder / "large", each=40)
        self.took: dict[str, float] = {}

    def case(self, number: int) -> str:
        draw, name = self.draw(number), LARGE[number % len(LARGE)]
        stage, scene, killed = self.large, SCENES[name], 0
        stage.rehearse(name)
        if name not in self.took:
            out = stage.out(scene)
            begun = time.monotonic()
            self._run(scene, out, None, True)
            self.took[name] = time.monotonic() - begun
            stage.discard(out)
        parts = [draw.random() for _ in range(draw.choice((1, 1, 2, 4)))]
        alone = draw.random() < 0.5
        out = stage.out(scene)
        for part in parts:
            done = self._run(scene, out, part * self.took[name], alone)
            killed += done.returncode == -signal.SIGKILL
            until = time.monotonic() + LIMIT_S
            while left := members(done.pid):  # a worker whose parent was killed ends too
                assert time.monotonic() < until, f"left: {left}"
                time.sleep(0.01)
            if done.returncode != -signal.SIGKILL:
                break
        with told(f"{name}: killed after {parts} of its time, {'alone' if alone else 'with all'}"):
            stage.check(name, out)
        stage.discard(out)
        return f"{name}: killed {killed} times" if killed else f"{name}: had ended before"

    def _run(self, scene: Scene, out: Path, limit_s: float | None, alone: bool) -> Done:
        arguments = self.large.arguments(scene, out)
        if "--jobs" in arguments:
            arguments[arguments.index("--jobs") + 1] = "2"
        return self.large.commands.run(*arguments, limit_s=limit_s, alone=alone)

    def close(self) -> None:
        if hasattr(self, "large"):
            self.large.commands.close()

    @classmethod
    def done(cls, kinds: Mapping[str, int], figures: Mapping[str, float]) -> str:
        counts = [(one, count) for one, count in kinds.items() if ": killed" in one]
        kills = sum(int(one.split()[-2]) * count for one, count in counts)
        return (
            f"{sum(count for _, count in counts):,} runs of {len(LARGE)} larger commands, killed "
            f"at {kills:,} random moments; each run again"
        )
