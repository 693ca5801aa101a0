"""Power cuts: what a disk may hold at each moment of a command, as its calls and syncs allow.

P2: the old version or the new one is there, never a mixture, and the same command goes on.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from support.crashing import SCENES, Stage
from support.power import CALLS, OPTIONS, Recording, become, look

from trust.section import Section, told, words

UNDER = {"unpack", "export"}  # no dataset: whole files are not promised before the end


class Power(Section):
    """Makes a state, and looks what it is; then runs the command again."""

    name = "power"
    promise = "P2"

    def prepare(self) -> None:
        os.environ["SOURCE_DATE_EPOCH"] = "1750000000"
        self.stage = Stage(self.folder)
        self.recordings: dict[str, Recording] = {}

    def _record(self, name: str) -> Recording:
        """Run a command, and log all that it does."""
        self.stage.rehearse(name)
        scene, out = SCENES[name], self.stage.out(SCENES[name])
        before, log = look(out.parent), self.folder / "calls"
        done = self.stage.strace(scene, out, *OPTIONS, "-e", f"trace={CALLS}", "-o", str(log))
        assert done.returncode == scene.code, done.stderr
        found = Recording(log.read_text(), out.parent, before)
        assert found.after == look(out.parent), "the recorder lost something"
        log.unlink()
        self.stage.discard(out)
        return found

    def case(self, number: int) -> str:
        draw = self.draw(number)
        names = [name for name in SCENES if name not in UNDER]
        name = names[number % len(names)]
        if name not in self.recordings:
            self.recordings[name] = self._record(name)
        recording = self.recordings[name]
        whole = draw.random() < 0.15  # the command has ended well: what it did has to be there
        cut = len(recording.ops) if whole else draw.randint(1, len(recording.ops))
        out = self.stage.out(SCENES[name])
        state = recording.state(cut, draw)
        with told(f"{name}: cut after {cut} of {len(recording.ops)} steps"):
            become(out.parent, state)
            if not SCENES[name].where:
                self._old_or_new(out, recording, cut)
            self.stage.check(name, out, torn=True)
        self.stage.discard(out)
        return f"{name}: power cut"

    @staticmethod
    def _old_or_new(out: Path, recording: Recording, cut: int) -> None:
        manifest = out / "manifest.json"
        found = manifest.read_bytes() if manifest.exists() else None
        old, new = (one.get("out/manifest.json") for one in (recording.before, recording.after))
        assert found in (old, new), "the manifest is neither the old one nor the new one"
        assert cut < len(recording.ops) or found == new, "it had ended well, and is not there"

    @classmethod
    def done(cls, kinds: Mapping[str, int], figures: Mapping[str, float]) -> str:
        names = words(one.split(": ")[0] for one in kinds if ": " in one)
        return (
            f"{len(names)} commands: states of a disk with unsynced writes and renames dropped or "
            "torn; each run again"
        )
