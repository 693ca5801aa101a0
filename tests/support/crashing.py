"""Commands that write, killed before each system call that changes something, or with it failing.

A `Scene` is a command with what was done before it; a `Stage` runs one, by strace, undisturbed or
not, and checks what is left: all or nothing; and the same command, run again, ends in exactly the
bytes of a run that nobody disturbed.
"""

import errno
import os
import random
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardio.dataset import sequence as sequences
from shardio.errors import NotPackedError
from shardio.packing.annotate import annotate
from shardio.packing.append import append
from shardio.packing.commit import commit
from shardio.packing.compact import compact
from shardio.packing.drop import drop
from shardio.packing.export import export
from shardio.packing.index import index
from shardio.packing.pack import pack
from shardio.packing.update import update
from shardio.packing.verify import verify
from shardio.packing.versions import tag
from support import command_server
from support.packing import grouped
from support.trees import compile_package, content, environment, images, plant, shardio

STRACE = shutil.which("strace")
CALLS = (
    "mkdir,mkdirat,openat,write,pwrite64,fsync,fdatasync,ftruncate,rename,renameat,renameat2,"
    "link,linkat,unlink,unlinkat,rmdir"
)
RECORDS = ["--max-records", "2", "--jobs", "1"]


@dataclass
class Scene:
    """A command, what was done before it, and whether a dataset is there meanwhile."""

    arguments: list[str]
    before: Callable[[Path, Path], Any] = lambda source, out: None
    code: int = 0
    replaces: bool = False
    where: str = ""  # the dataset, under OUT
    goes_on: bool = True  # after a full disk, and says so
    after: Callable[[Path, Path], Any] = lambda source, out: None  # what others do, to finish it
    dataset: bool = True  # OUT is one; else files, of which each has to be whole


def build(source: Path, out: Path, **options: Any) -> None:
    pack(source, out, **grouped({"jobs": 1, "max_records": 2} | options))


def parts(source: Path, out: Path) -> None:
    for part in (1, 2):
        build(source, out, part=(part, 2))


def dropped(source: Path, out: Path) -> None:
    build(source, out)
    tag(out, "all")
    drop(out, keys=["class0/000.jpg"])


def annotated(source: Path, out: Path) -> None:
    build(source, out)
    keys = sequences.open(out).keys()
    annotate(out, {key: {"caption": f"of {key}"} for key in keys})


def to_erase(source: Path, out: Path) -> None:
    """Records that older versions of other shards have, and an unfinished append, too."""
    annotated(source, out)
    tag(out, "all")
    drop(out, keys=["class0/001.jpg"])
    compact(out, jobs=1)
    tag(out, "compacted")
    append(source, out, jobs=1, part="1/2", on_duplicate="replace")


def indexed_before(source: Path, out: Path) -> None:
    """Files in place, dropped from and annotated, and one more that comes first."""
    build(source, out.parent / "packed")
    export(out.parent / "packed", out, format="webdataset", shard_size=2_000)
    shutil.rmtree(out.parent / "packed")
    first = min(out.glob("*.tar"))
    first.rename(out.parent / "first")
    index(out, jobs=1)
    keys = sequences.open(out).keys()
    drop(out, keys=keys[:1])
    annotate(out, {key: {"caption": f"of {key}"} for key in keys[1:]})
    (out.parent / "first").rename(first)
    for path in out.glob("*.tar"):
        os.utime(path, ns=(10**18, 10**18))


def append_part(source: Path, out: Path, part: str) -> None:
    append(source.parent / "more", out, jobs=1, part=part, on_duplicate="skip")


def parts_of_append(source: Path, out: Path) -> None:
    build(source, out)
    for part in ("1/2", "2/2"):
        append_part(source, out, part)


def rest_of_append(source: Path, out: Path) -> None:
    append_part(source, out, "2/2")
    commit(out, jobs=1)


def rest_of_update(source: Path, out: Path) -> None:
    update(source.parent / "more", out, jobs=1, part="2/2")
    commit(out, jobs=1)


def part_of_drops(source: Path, out: Path) -> None:
    """An update that drops records, and packs none."""
    build(source.parent / "more", out)
    update(source, out, jobs=1, part="1/1")


def grown(source: Path, out: Path) -> None:
    """A dataset whose records lie in too many shards, with all that may be beside these."""
    once = source.parent / "grown"
    if not once.exists():
        build(source, once)
        append(source.parent / "more", once, jobs=1, on_duplicate="skip")
        update(source.parent / "more", once, jobs=1)
        annotate(once, {"class1/001.jpg": {"label": 0, "caption": "a cat"}}, missing="none")
        drop(once, keys=["class0/001.jpg"])
    shutil.copytree(once, out)


def rebuilt(source: Path, out: Path) -> None:
    """A dataset that took the place of another one, whose files nobody needs."""
    build(source, out)
    build(source, out, overwrite=True, seed=1)
    drop(out, keys=["class0/000.jpg"])


SCENES = {
    "pack": Scene(["pack", "SRC", "OUT", *RECORDS]),
    "skip": Scene(["pack", "SRC/../bad", "OUT", *RECORDS, "--on-error", "skip"], code=4),
    "lmdb": Scene(["pack", "SRC", "OUT", *RECORDS, "--format", "lmdb"]),
    "resume": Scene(["pack", "SRC", "OUT", *RECORDS], partial(build, part=(1, 2))),
    "restart": Scene(
        ["pack", "SRC", "OUT", *RECORDS, "--restart"], partial(build, part=(1, 2), seed=7)
    ),
    "overwrite": Scene(
        ["pack", "SRC", "OUT", *RECORDS, "--overwrite", "--seed", "1"], build, replaces=True
    ),
    "commit": Scene(["commit", "OUT", "--jobs", "1"], parts),
    "splits": Scene(["pack", "SRC/../splits", "OUT", *RECORDS], where="train"),
    "append": Scene(
        ["append", "SRC/../more", "OUT", "--jobs", "1", "--on-duplicate", "skip"],
        build,
        replaces=True,
    ),
    "append a part": Scene(
        ["append", "SRC/../more", "OUT", "--jobs", "1", "--on-duplicate", "skip", "--part", "1/2"],
        build,
        replaces=True,
        after=rest_of_append,
    ),
    "append splits": Scene(
        ["append", "SRC/../more splits", "OUT", "--jobs", "1", "--on-duplicate", "skip"],
        lambda source, out: build(source.parent / "splits", out),
        replaces=True,
        where="train",
    ),
    "commit of an append": Scene(["commit", "OUT", "--jobs", "1"], parts_of_append, replaces=True),
    "update": Scene(["update", "SRC/../more", "OUT", "--jobs", "1"], build, replaces=True),
    "update a part": Scene(
        ["update", "SRC/../more", "OUT", "--jobs", "1", "--part", "1/2"],
        build,
        replaces=True,
        after=rest_of_update,
    ),
    "commit of an update": Scene(["commit", "OUT", "--jobs", "1"], part_of_drops, replaces=True),
    "compact": Scene(["compact", "OUT", "--jobs", "1"], grown, replaces=True),
    "drop": Scene(["drop", "OUT", "--keys", "SRC/../keys.txt"], build, replaces=True),
    "erase": Scene(
        ["drop", "OUT", "--keys=SRC/../keys.txt", "--erase", "--restart", "--missing=ignore"],
        to_erase,
        replaces=True,
    ),
    "annotate": Scene(
        ["annotate", "OUT", "SRC/../captions.csv", "--missing", "none"],
        annotated,
        replaces=True,
        goes_on=False,
    ),
    "tag": Scene(["tag", "OUT", "again"], dropped, replaces=True, goes_on=False),
    "restore": Scene(["restore", "OUT", "all"], dropped, replaces=True, goes_on=False),
    "gc": Scene(["gc", "OUT", "--keep", "0s"], rebuilt, replaces=True, goes_on=False),
    "copy": Scene(["copy", "SRC/../packed", "OUT"], goes_on=False),
    "unpack": Scene(["unpack", "SRC/../packed", "OUT"], goes_on=False, dataset=False),
    "export": Scene(
        ["export", "SRC/../packed", "OUT", "--format", "webdataset", "--shard-size", "1000"],
        goes_on=False,
        dataset=False,
    ),
    "repair": Scene(["repair", "SRC/../broken", "OUT", "--jobs", "1"], code=4, goes_on=False),
    "index": Scene(["index", "OUT", "--jobs", "1"], indexed_before, replaces=True, goes_on=False),
}


def traced(
    arguments: Sequence[str | Path],
    *options: str,
    program: Sequence[str] = ("-m", "shardio"),
) -> subprocess.CompletedProcess[str]:
    """Run a command under strace with these options, in a fork of command_server."""
    assert STRACE is not None
    strace = (STRACE, "-f", "-qq", "-e", "signal=none", *options)
    code, *said = command_server.run(arguments, environment(), program, strace)
    return subprocess.CompletedProcess(arguments, code, *(one.decode() for one in said))


class Stage:
    """A folder with sources, and an undisturbed run of each scene."""

    def __init__(self, folder: Path, each: int = 3) -> None:
        """Plant the sources. each: images of a class."""
        compile_package()
        self.folder = folder
        self.source = plant(folder / "src", images(2, each, 200))
        plant(folder / "more", images(3, each, 200))
        plant(folder, {"keys.txt": b"class0/001.jpg\nclass1/002.jpg\n"})
        values = b"key,caption,score\nclass0/001.jpg,new,1.5\nclass1/002.jpg,words,2.5\n"
        plant(folder, {"captions.csv": values})
        plant(folder / "bad", {**images(2, 3, 200), "class0/no.jpg": b"no image"})
        split = images(1, 2, 200)
        plant(
            folder / "splits", {f"{n}/{k!s}": v for n in ("train", "val") for k, v in split.items()}
        )
        plant(
            folder / "more splits",
            {f"{n}/{k!s}": v for n in ("train", "val") for k, v in images(2, 3, 150).items()},
        )
        grown(self.source, folder / "broken")
        first = min((folder / "broken").glob("0*"))
        first.write_bytes(first.read_bytes()[:-400])
        build(self.source, folder / "packed")
        self.sources = self.looks()
        self.number = 0
        self.undisturbed: dict[str, dict[bytes, bytes | None]] = {}
        self.calls: dict[str, list[tuple[str, int]]] = {}

    def out(self, scene: Scene) -> Path:
        self.number += 1
        out = self.folder / f"{self.number}" / "out"
        out.parent.mkdir()
        scene.before(self.source, out)
        return out

    def discard(self, out: Path) -> None:
        """Remove what `out` made."""
        shutil.rmtree(out.parent)

    def looks(self) -> dict[Path, tuple[int, int, int]]:
        """Return what would tell that somebody wrote into a source."""
        names = ("src", "more", "bad", "splits", "more splits", "packed")
        found = [path for name in names for path in (self.folder / name).rglob("*")]
        stats = {path: path.stat() for path in found}
        return {path: (one.st_ino, one.st_size, one.st_mtime_ns) for path, one in stats.items()}

    def arguments(self, scene: Scene, out: Path) -> list[str]:
        names = {"SRC": str(self.source), "OUT": str(out)}
        return [re.sub("SRC|OUT", lambda m: names[m[0]], one) for one in scene.arguments]

    def rehearse(self, name: str) -> list[tuple[str, int]]:
        """Run a scene undisturbed; its calls that change something, and which of their kind."""
        if name not in self.calls:
            scene = SCENES[name]
            out = self.out(scene)
            calls = self.changes(scene, out)
            scene.after(self.source, out)
            self.undisturbed[name] = content(out)
            self.calls[name] = calls
            kinds = {call for call, _ in self.calls[name]}
            every = {"openat", "write", "fsync", "rename", "unlink"} if scene.dataset else {"write"}
            assert kinds >= (every if name != "gc" else {"unlink"}), kinds
        return self.calls[name]

    def changes(self, scene: Scene, out: Path) -> list[tuple[str, int]]:
        """Run a scene's command; its calls that change something, and which of their kind."""
        log = out.parent.parent / "calls.log"
        done = self.strace(scene, out, "-y", "-o", str(log))
        assert done.returncode == scene.code, done.stderr
        return changing(log.read_text(), str(out.parent))

    def again(self, scene: Scene, out: Path) -> subprocess.CompletedProcess[str]:
        """Run a scene's command to its end, whatever that is."""
        return shardio(*self.arguments(scene, out), code=None)

    def strace(self, scene: Scene, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
        return traced(self.arguments(scene, out), "-e", f"trace={CALLS}", *options)

    def check(self, name: str, out: Path, torn: bool = False) -> bool:
        """All or nothing is there, now and after another run. Whether it was all.

        torn: drafts may have lost their first bytes, by which they are known, and then they stay.
        """
        scene = SCENES[name]
        old = self.undisturbed[name]
        there = True
        assert self.looks() == self.sources, "a source was touched"
        try:
            if scene.dataset:
                damages = verify(out / scene.where, sha256=True, jobs=1).damages
                assert damages == []
            else:
                for path, data in content(out).items():
                    if data is not None and b".shardio-" not in path:
                        begun = name == "unpack" and (old[path] or b"").startswith(data)
                        assert data == old[path] or begun, "half of a file is there"
        except NotPackedError as error:
            there = False
            assert not scene.replaces
            assert "not packed" in str(error)
            assert not (out / scene.where / "manifest.json").exists()
        done = self.again(scene, out)
        # A commit that was killed at its very end has nothing left to do.
        late = name.startswith("commit") and there and "nothing to commit" in done.stderr
        late = late or (name in ("repair", "export") and "is not empty" in done.stderr)
        assert late or done.returncode == scene.code, done.stderr
        scene.after(self.source, out)
        found = content(out)
        if torn or not scene.dataset:  # what a killed export leaves is hidden, and stays, too
            draft = re.compile(rb"(.*/)?\.shardio-[0-9a-f]{16}-.*\.tmp(/.*)?", re.DOTALL)
            found = {one: data for one, data in found.items() if not draft.fullmatch(one)}
            if b".shardio-append" in found and b".shardio-append" not in old:
                assert found.pop(b".shardio-append") is None  # empty: the next append removes it
        assert found == old, sorted(found.keys() ^ old.keys()) or "other bytes"
        return there


def changing(log: str, below: str) -> list[tuple[str, int]]:
    """The calls in a log of strace that change something below a folder: name, and count."""
    seen: dict[str, int] = {}
    found = []
    for line in log.splitlines():
        match = re.match(r"\d+\s+(\w+)\((.*)", line)
        if match is None:
            continue
        name, rest = match.groups()
        seen[name] = seen.get(name, 0) + 1
        if below in rest and (name != "openat" or "O_CREAT" in rest):
            found.append((name, seen[name]))
    return found


def sample(name: str, calls: list[tuple[str, int]], count: int) -> list[tuple[str, int]]:
    chosen = random.Random(name).sample(calls, min(count, len(calls)))
    return sorted(chosen, key=calls.index)


def kill_at(stage: Stage, name: str, call: str, count: int) -> bool:
    scene = SCENES[name]
    out = stage.out(scene)
    done = stage.strace(
        scene, out, "-o", os.devnull, "-e", f"inject={call}:signal=SIGKILL:when={count}"
    )
    assert done.returncode == -signal.SIGKILL, (call, count, done)
    return stage.check(name, out)


def fail_at(stage: Stage, name: str, call: str, count: int, error: str) -> Path:
    scene = SCENES[name]
    out = stage.out(scene)
    done = stage.strace(
        scene, out, "-o", os.devnull, "-e", f"inject={call}:error={error}:when={count}"
    )
    check_told(scene, out, call, error, done)
    stage.check(name, out)
    return out


def check_told(
    scene: Scene, out: Path, call: str, error: str, done: subprocess.CompletedProcess[str]
) -> None:
    """An error was one line with path and cause, and says whether the command can go on."""
    assert "Traceback" not in done.stderr, (call, done.stderr)
    assert done.returncode in (1, scene.code), (call, done)
    if done.returncode == 1:
        said = os.strerror(getattr(errno, error))
        assert done.stderr.startswith("shardio: "), done.stderr
        assert str(out.parent) in done.stderr, f"it says not where: {done.stderr}"
        assert said in done.stderr, (call, done.stderr)
        goes_on = "run the same command again, and it goes on where it was\n"
        full = error in ("ENOSPC", "EIO") and scene.goes_on
        if full and (error == "EIO" or "cannot write" in done.stderr):
            assert done.stderr.endswith(goes_on) == (error == "ENOSPC"), (call, done.stderr)
        assert not list(out.glob(".shardio-*.tmp")) or call in ("unlink", "unlinkat")


def members(session: int) -> list[int]:
    """Processes of a session that still run."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(name))
    return found
