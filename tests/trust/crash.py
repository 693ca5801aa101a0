"""Commands that write, killed or refused at a call that changes something, or at any moment.

P2: what is there is all or nothing, the same command goes on to identical bytes, an error is one
line with path and cause, and no source is touched.
"""

import os
import resource
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from support import LIMIT_S
from support.crashing import SCENES, Stage, fail_at, members
from support.trees import command, environment

from trust.section import Section, told, words

ERRORS = ("ENOSPC", "EIO", "EDQUOT", "EACCES", "EROFS")
LARGE = ("pack", "append", "update", "compact", "erase", "copy", "export", "unpack", "overwrite")


class Crash(Section):
    """Kills a command, or lets one of its calls fail; then runs it again."""

    name = "crash"
    promise = "P2"

    def prepare(self) -> None:
        os.environ["SOURCE_DATE_EPOCH"] = "1750000000"  # of commits, whenever they are done
        (self.folder / "small").mkdir()
        self.stage = Stage(self.folder / "small")
        self.large: Stage | None = None
        self.took: dict[str, float] = {}

    def case(self, number: int) -> str:
        draw = self.draw(number)
        names = [*SCENES]
        name = names[number % len(names)]
        how = draw.choice(("kill", "kill", "kills", "fail", "fail", "short", "moment"))
        if how == "moment":
            name = draw.choice(LARGE)
        with told(f"{name}: {how}"):
            if how == "moment":
                self._moment(name, draw.random(), draw.random() < 0.5)
                return f"{name}: killed at some moment, of larger runs"
            calls = self.stage.rehearse(name)
            if how == "fail":
                error, (call, count) = draw.choice(ERRORS), draw.choice(calls)
                with told(f"{call} number {count} is {error}"):
                    out = fail_at(self.stage, name, call, count, error)
                self.stage.discard(out)
                return f"{name}: {error}"
            if how == "short":
                self._short(name, draw.randrange(1, 3000))
                return f"{name}: short writes"
            times = 1 if how == "kill" else draw.randrange(2, 5)
            chosen = [draw.choice(calls) for _ in range(times)]
            with told(f"killed at {chosen}"):
                out = self.stage.out(SCENES[name])
                for call, count in chosen:
                    inject = f"inject={call}:signal=SIGKILL:when={count}"
                    self.stage.strace(SCENES[name], out, "-o", os.devnull, "-e", inject)
                self.stage.check(name, out)
            self.stage.discard(out)
        return f"{name}: SIGKILL" if times == 1 else f"{name}: SIGKILL again and again"

    def _short(self, name: str, most: int) -> None:
        """No file may be larger: the write that would pass it is cut, the next one refused."""
        scene, out = SCENES[name], self.stage.out(SCENES[name])
        done = subprocess.run(
            command(*self.stage.arguments(scene, out)),
            env=environment(),
            capture_output=True,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)),
            timeout=LIMIT_S,
        )
        with told(f"files of {most} bytes at most: {done.stderr}"):
            assert "Traceback" not in done.stderr and done.returncode in (1, scene.code)
            if done.returncode == 1 != scene.code:
                assert done.stderr.startswith("shardio: ") and str(out.parent) in done.stderr
            self.stage.check(name, out)
        self.stage.discard(out)

    def _moment(self, name: str, part: float, alone: bool) -> None:
        """Kill a command, alone or with its processes, after a part of the time that it takes."""
        if self.large is None:
            (self.folder / "large").mkdir()
            self.large = Stage(self.folder / "large", each=40)
        stage, scene = self.large, SCENES[name]
        if name not in self.took:
            stage.rehearse(name)
            out = stage.out(scene)
            begun = time.monotonic()
            self._start(stage, name, out).communicate(timeout=LIMIT_S)
            self.took[name] = time.monotonic() - begun
            stage.discard(out)
        out = stage.out(scene)
        process = self._start(stage, name, out)
        try:
            process.wait(timeout=part * self.took[name])
        except subprocess.TimeoutExpired:
            process.kill() if alone else os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=LIMIT_S)
        until = time.monotonic() + LIMIT_S
        while left := members(process.pid):  # a worker whose parent was killed ends too
            assert time.monotonic() < until, f"left: {left}"
            time.sleep(0.01)
        with told(f"killed after {part:.3f} of its time, {'alone' if alone else 'with all'}"):
            stage.check(name, out)
        stage.discard(out)

    @staticmethod
    def _start(stage: Stage, name: str, out: Path) -> "subprocess.Popen[str]":
        arguments = stage.arguments(SCENES[name], out)
        if "--jobs" in arguments:
            arguments[arguments.index("--jobs") + 1] = "2"
        return subprocess.Popen(
            command(*arguments),
            env=environment(),
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @classmethod
    def done(cls, kinds: Mapping[str, int], figures: Mapping[str, float]) -> str:
        rows = [one.split(": ", 1) for one in kinds if ": " in one]
        sums = {how: sum(kinds[one] for one in kinds if one.endswith(how)) for _, how in rows}
        kills = sum(count for how, count in sums.items() if "kill" in how.lower())
        return (
            f"{len(words(row[0] for row in rows))} commands: {kills:,} killed, "
            f"{sum(sums.values()) - kills:,} with a failing call; each run again"
        )
