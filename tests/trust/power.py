"""Power cuts: what a disk may hold at each moment of a command, as its calls and syncs allow.

P2: the old version or the new one is there, never a mixture, and the same command goes on.
"""

from collections.abc import Mapping
from pathlib import Path

from support.crashing import SCENES
from support.power import CALLS, OPTIONS, Recording, become, look
from support.trees import content

from trust.crash import Warm
from trust.section import Section, told, words


class Power(Section):
    """Makes a state, and looks what it is; then runs the command again."""

    name = "power"
    promise = "P2"
    goal = 2_500

    def prepare(self) -> None:
        self.stage = Warm(self.folder / "small")
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
        name = [*SCENES][number % len(SCENES)]
        if name not in self.recordings:
            self.recordings[name] = self._record(name)
        recording = self.recordings[name]
        whole = draw.random() < 0.15  # the command has ended well: what it did has to be there
        cut = len(recording.ops) if whole else draw.randint(1, len(recording.ops))
        out = self.stage.out(SCENES[name])
        state = recording.state(cut, draw)
        with told(f"{name}: cut after {cut} of {len(recording.ops)} steps"):
            become(out.parent, state)
            if name == "unpack":
                self._unpacked(out)
            else:
                self._old_or_new(name, out, recording, cut)
                self.stage.check(name, out, torn=True)
        self.stage.discard(out)
        return f"{name}: power cut"

    def _unpacked(self, out: Path) -> None:
        """Run it again: it syncs nothing, so that files may be torn, and are replaced if asked."""
        arguments = [*self.stage.arguments(SCENES["unpack"], out), "--overwrite"]
        done = self.stage.commands.run(*arguments)
        assert done.returncode == 0, done
        assert content(out) == self.stage.undisturbed["unpack"], "other files"
        assert self.stage.looks() == self.stage.sources, "a source was touched"

    @staticmethod
    def _old_or_new(name: str, out: Path, recording: Recording, cut: int) -> None:
        ended = cut == len(recording.ops)
        if not SCENES[name].dataset:
            new = {one: data for one, data in recording.after.items() if one.startswith("out")}
            assert not ended or look(out.parent).items() >= new.items(), "it had ended well"
        elif not SCENES[name].where:
            manifest = out / "manifest.json"
            found = manifest.read_bytes() if manifest.exists() else None
            old, new = (one.get("out/manifest.json") for one in (recording.before, recording.after))
            assert found in (old, new), "the manifest is neither the old one nor the new one"
            assert not ended or found == new, "it had ended well, and is not there"

    def close(self) -> None:
        if hasattr(self, "stage"):
            self.stage.commands.close()

    @classmethod
    def done(cls, kinds: Mapping[str, int], figures: Mapping[str, float]) -> str:
        names = words(one.split(": ")[0] for one in kinds if ": " in one)
        return (
            f"{len(names)} commands: states of a disk with unsynced writes and renames dropped or "
            "torn; each run again"
        )
