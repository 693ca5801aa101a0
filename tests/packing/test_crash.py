"""kill -9, full disks and failing devices, at every system call of a packing that changes anything.

Whatever happens, before the manifest's rename the answer is "not packed" (or the dataset that was
there before), from it on the whole dataset; and the same command, run again, ends in exactly the
bytes of a packing that nobody disturbed.
"""

import os
import random
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S
from support.packing import grouped
from support.trees import (
    command,
    compile_package,
    content,
    environment,
    images,
    plant,
    shardio,
    shards,
)

from shardio.dataset import sequence as sequences
from shardio.errors import NotPackedError
from shardio.packing.annotate import annotate
from shardio.packing.append import append
from shardio.packing.commit import commit
from shardio.packing.drop import drop
from shardio.packing.export import export
from shardio.packing.index import index
from shardio.packing.options import PlanOptions
from shardio.packing.pack import pack
from shardio.packing.update import update
from shardio.packing.verify import verify
from shardio.packing.versions import tag
from shardio.storage import local

STRACE = shutil.which("strace")
needs_strace = pytest.mark.skipif(STRACE is None, reason="strace is not installed: no crash tests")
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
    "compact": Scene(["compact", "OUT", "--jobs", "1"], grown, replaces=True),
    "drop": Scene(["drop", "OUT", "--keys", "SRC/../keys.txt"], build, replaces=True),
    "erase": Scene(
        ["drop", "OUT", "--keys", "SRC/../keys.txt", "--erase", "--missing", "ignore"],
        annotated,
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
    "repair": Scene(["repair", "SRC/../broken", "OUT", "--jobs", "1"], code=4, goes_on=False),
    "index": Scene(["index", "OUT", "--jobs", "1"], indexed_before, replaces=True, goes_on=False),
}


class Stage:
    """A folder with sources, and an undisturbed run of each scene."""

    def __init__(self, folder: Path) -> None:
        compile_package()
        self.folder = folder
        self.source = plant(folder / "src", images(2, 3, 200))
        plant(folder / "more", images(3, 3, 200))
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
        self.number = 0
        self.undisturbed: dict[str, dict[bytes, bytes | None]] = {}
        self.calls: dict[str, list[tuple[str, int]]] = {}

    def out(self, scene: Scene) -> Path:
        self.number += 1
        out = self.folder / f"{self.number}" / "out"
        out.parent.mkdir()
        scene.before(self.source, out)
        return out

    def arguments(self, scene: Scene, out: Path) -> list[str]:
        names = {"SRC": str(self.source), "OUT": str(out)}
        return [re.sub("SRC|OUT", lambda m: names[m[0]], one) for one in scene.arguments]

    def rehearse(self, name: str) -> list[tuple[str, int]]:
        """Run a scene undisturbed; its calls that change something, and which of their kind."""
        if name not in self.calls:
            scene = SCENES[name]
            out = self.out(scene)
            log = self.folder / f"{name}.log"
            done = self.strace(scene, out, "-y", "-o", str(log))
            assert done.returncode == scene.code, done.stderr
            scene.after(self.source, out)
            self.undisturbed[name] = content(out)
            self.calls[name] = changing(log.read_text(), str(out.parent))
            kinds = {call for call, _ in self.calls[name]}
            assert kinds >= {"openat", "write", "fsync", "rename", "unlink"}, kinds
        return self.calls[name]

    def strace(self, scene: Scene, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
        assert STRACE is not None
        return subprocess.run(
            [
                STRACE,
                *("-f", "-qq", "-e", f"trace={CALLS}", "-e", "signal=none"),
                *options,
                *map(os.fsdecode, command(*self.arguments(scene, out))),
            ],
            capture_output=True,
            text=True,
            env=environment(),
            timeout=LIMIT_S,
        )

    def check(self, name: str, out: Path) -> bool:
        """All or nothing is there, now and after another run. Whether it was all."""
        scene = SCENES[name]
        old = self.undisturbed[name]
        there = True
        try:
            found = verify(out / scene.where, sha256=True, jobs=1)
            assert found.damages == []
        except NotPackedError as error:
            there = False
            assert not scene.replaces
            assert "not packed" in str(error)
            assert not (out / scene.where / "manifest.json").exists()
        done = shardio(*self.arguments(scene, out), code=None)
        # A commit that was killed at its very end has nothing left to do.
        late = name.startswith("commit") and there and "nothing to commit" in done.stderr
        late = late or (name == "repair" and there and "is not empty" in done.stderr)
        assert late or done.returncode == scene.code, done.stderr
        scene.after(self.source, out)
        assert content(out) == old, sorted(content(out).keys() ^ old.keys())
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


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1750000000")  # of commits, whenever they are done
        yield Stage(tmp_path_factory.mktemp("crash"))


def sample(name: str, calls: list[tuple[str, int]], count: int) -> list[tuple[str, int]]:
    chosen = random.Random(name).sample(calls, min(count, len(calls)))
    return sorted(chosen, key=calls.index)


def kill_at(stage: Stage, name: str, call: str, count: int) -> bool:
    scene = SCENES[name]
    out = stage.out(scene)
    done = stage.strace(
        scene, out, "-o", os.devnull, "-e", f"inject={call}:signal=SIGKILL:when={count}"
    )
    assert done.returncode in (-signal.SIGKILL, 137), (call, count, done)
    return stage.check(name, out)


def fail_at(stage: Stage, name: str, call: str, count: int, error: str) -> None:
    scene = SCENES[name]
    out = stage.out(scene)
    done = stage.strace(
        scene, out, "-o", os.devnull, "-e", f"inject={call}:error={error}:when={count}"
    )
    assert "Traceback" not in done.stderr, (call, count, done.stderr)
    assert done.returncode in (1, scene.code), (call, count, done)
    if done.returncode == 1:
        said = {"ENOSPC": "No space left on device", "EIO": "Input/output error"}[error]
        assert done.stderr.startswith("shardio: "), done.stderr
        assert said in done.stderr, (call, count, done.stderr)
        goes_on = "run the same command again, and it goes on where it was\n"
        if scene.goes_on and (error == "EIO" or "cannot write" in done.stderr):
            assert done.stderr.endswith(goes_on) == (error == "ENOSPC"), (call, count, done.stderr)
        assert not list(out.glob(".shardio-*.tmp")) or call in ("unlink", "unlinkat")
    stage.check(name, out)


@needs_strace
@pytest.mark.parametrize("count", [6, pytest.param(12, marks=pytest.mark.slow)])
def test_a_kill_at_any_system_call_of_a_packing_leaves_all_or_nothing(
    stage: Stage, count: int
) -> None:
    calls = stage.rehearse("pack")
    there = [kill_at(stage, "pack", *call) for call in sample("pack", calls, count)]
    assert there == sorted(there)  # nothing at first, all from the manifest's rename on


@needs_strace
def test_a_kill_right_before_and_after_the_renames_of_the_manifest(stage: Stage) -> None:
    calls = stage.rehearse("pack")
    last = max(i for i, (call, _) in enumerate(calls) if call == "rename")
    assert not kill_at(stage, "pack", *calls[last])
    assert kill_at(stage, "pack", *calls[last + 1])


@needs_strace
@pytest.mark.parametrize("count", [1, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [name for name in SCENES if name != "pack"])
def test_a_kill_at_any_system_call_in_other_circumstances(
    stage: Stage, name: str, count: int
) -> None:
    for call in sample(name, stage.rehearse(name), count):
        kill_at(stage, name, *call)


@needs_strace
@pytest.mark.parametrize("count", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
def test_a_failing_device_is_a_clear_message_and_commits_nothing(
    stage: Stage, error: str, count: int
) -> None:
    calls = stage.rehearse("pack")
    for kind in ("write", "fsync", "openat", "rename", "link"):
        for call in sample(error, [call for call in calls if call[0] == kind], count):
            fail_at(stage, "pack", *call, error)
    patched = [call for call in stage.rehearse("lmdb") if call[0] == "pwrite64"]
    assert patched
    fail_at(stage, "lmdb", *patched[-1], error)


@needs_strace
@pytest.mark.stress
@pytest.mark.parametrize("name", SCENES)
def test_a_kill_at_every_system_call(stage: Stage, name: str) -> None:
    for call in stage.rehearse(name):
        kill_at(stage, name, *call)


@needs_strace
@pytest.mark.stress
@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("name", SCENES)
def test_an_error_of_every_system_call(stage: Stage, name: str, error: str) -> None:
    for call in stage.rehearse(name):
        fail_at(stage, name, *call, error)


@needs_strace
@pytest.mark.stress
def test_kills_one_after_the_other(stage: Stage) -> None:
    for name in ("pack", "skip", "overwrite", "restart"):
        calls = stage.rehearse(name)
        scene = SCENES[name]
        dice = random.Random(name)
        for _ in range(6):
            out = stage.out(scene)
            for _ in range(4):
                call, count = dice.choice(calls)
                inject = f"inject={call}:signal=SIGKILL:when={count}"
                stage.strace(scene, out, "-o", os.devnull, "-e", inject)
            stage.check(name, out)


# --- processes ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[bytes, bytes | None]]:
    """A source of 60 shards, and what becomes of it undisturbed."""
    folder = tmp_path_factory.mktemp("large")
    source = plant(folder / "src", images(4, 60, 3000))
    pack(source, folder / "out", jobs=2, plan=PlanOptions(max_records=4))
    return source, content(folder / "out")


def begin(source: Path, out: Path, held: int | None = None) -> subprocess.Popen[str]:
    """Begin to pack; held: with so many shards it waits."""
    line = command("pack", source, out, "--max-records", "4", "--jobs", "2")
    if held is not None:
        line[line.index("shardio") : line.index("pack")] = ["support.held_packing", str(held)]
    return subprocess.Popen(
        line,
        env=environment(),
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="there is no /proc")


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


def kill_some_time(
    large: tuple[Path, dict[bytes, bytes | None]], folder: Path, moments: int, seed: int
) -> None:
    source, undisturbed = large
    dice = random.Random(seed)
    for number in range(moments):
        out = folder / str(number)
        process = begin(source, out)
        until = dice.randrange(62)  # shards that are finished; 60 and 61: at the very end
        while len(shards(out)) < min(until, 60) and process.poll() is None:
            pass
        try:
            process.wait(timeout=dice.random() * 0.01)
        except subprocess.TimeoutExpired:
            if number % 2:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        process.communicate()
        try:
            assert len(sequences.open(out)) == 240
        except NotPackedError as error:
            assert "not packed" in str(error)
        pack(source, out, jobs=2, plan=PlanOptions(max_records=4))
        assert content(out) == undisturbed
        while members(process.pid):  # a worker whose parent was killed ends too
            pass
        assert content(out) == undisturbed
        shutil.rmtree(out)


@needs_proc
def test_a_kill_at_some_moment_with_workers(
    large: tuple[Path, dict[bytes, bytes | None]], tmp_path: Path
) -> None:
    kill_some_time(large, tmp_path, 4, 0)


@needs_proc
@pytest.mark.stress
def test_a_kill_at_sixty_moments_with_workers(
    large: tuple[Path, dict[bytes, bytes | None]], tmp_path: Path
) -> None:
    kill_some_time(large, tmp_path, 60, 1)


@needs_proc
@pytest.mark.parametrize("whom", ["group", "parent"])
def test_ctrl_c_ends_all_processes_and_leaves_finished_shards(
    large: tuple[Path, dict[bytes, bytes | None]], tmp_path: Path, whom: str
) -> None:
    source, undisturbed = large
    process = begin(source, tmp_path, held=3)
    while len(shards(tmp_path)) < 3:
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT) if whom == "group" else process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=LIMIT_S)
    advice = "what is finished is kept; run the same command again to go on"
    assert (process.returncode, said) == (130, f"shardio: interrupted: {advice}\n")
    assert members(process.pid) == []
    assert not list(tmp_path.glob("*.tmp"))
    [done] = pack(source, tmp_path, jobs=2, plan=PlanOptions(max_records=4))
    assert done.kept == 3
    assert content(tmp_path) == undisturbed


def test_a_file_size_limit_is_a_clear_message(stage: Stage, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))

    done = shardio("pack", stage.source, tmp_path / "out", *RECORDS, code=1, preexec_fn=limit)
    assert "File too large" in done.stderr
    shardio("pack", stage.source, tmp_path / "out", *RECORDS)


def test_short_writes_change_nothing(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(stage.source, tmp_path / "one")
    real = os.write
    monkeypatch.setattr(local.os, "write", lambda descriptor, data: real(descriptor, data[:10]))
    build(stage.source, tmp_path / "two")
    monkeypatch.undo()
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_a_directory_that_cannot_be_written_is_a_clear_message(
    stage: Stage, tmp_path: Path
) -> None:
    for place in ("/proc/shardio", "/dev/null/out"):
        assert "shardio: " in shardio("pack", stage.source, place, code=1).stderr


def test_commit_after_a_kill_in_the_middle_of_parts(stage: Stage, tmp_path: Path) -> None:
    build(stage.source, tmp_path / "one")
    build(stage.source, tmp_path / "out", part=(2, 2))
    with pytest.raises(NotPackedError, match="are not built: 0"):
        commit(tmp_path / "out")
    build(stage.source, tmp_path / "out", part=(1, 2))
    commit(tmp_path / "out")
    assert content(tmp_path / "one") == content(tmp_path / "out")
