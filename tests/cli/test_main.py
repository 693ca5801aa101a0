"""How commands end: exit codes, Ctrl-C, closed streams, refused options; and what they import."""

import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S
from support.commands import NAMES, Run
from support.trees import command, content, environment, shardio, shards, warm_command

from shardio.cli.command import RESUME_HINT

HEAVY = ("torch", "PIL", "multiprocessing", "tqdm", "lmdb", "concurrent.futures")


def imported(*arguments: str | Path) -> set[str]:
    """The modules that a command imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "shardio", *map(str, arguments)],
        capture_output=True,
        env=environment(),
        timeout=LIMIT_S,
    )
    return {
        line.rpartition("|")[2].strip() for line in done.stderr.decode().splitlines() if "|" in line
    }


def test_help_imports_next_to_nothing() -> None:
    found = imported("pack", "--help")
    assert "argparse" in found
    assert found.isdisjoint({*HEAVY, "numpy", "msgpack", "xxhash"})


def tarred(folder: Path) -> Path:
    """A folder with a tar of one sample in it."""
    made = folder / "tars"
    made.mkdir()
    with tarfile.open(made / "a.tar", "w") as tar:
        member = tarfile.TarInfo("0.cls")
        member.size = 1
        tar.addfile(member, io.BytesIO(b"7"))
    return made


# Each command in one process, and what is imported then of these.
ALL_COMMANDS = """
import contextlib, io, json, sys
from shardio.cli.main import main
for arguments in json.loads(sys.argv[1]):
    said = io.TextIOWrapper(io.BytesIO())
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        main(arguments)
    print(json.dumps([arguments[0], sorted({"torch", "PIL", "tqdm", "lmdb"} & set(sys.modules))]))
"""


def test_no_command_imports_torch(source: Path, out: Path, tmp_path: Path) -> None:
    given = {
        "pack": [source, tmp_path / "out"],
        "plan": [source, tmp_path / "out"],
        "commit": [out],
        "index": [tarred(tmp_path)],
        "export": [out, tmp_path / "export", "--format", "webdataset"],
        "unpack": [out, tmp_path / "back"],
        "copy": [out, tmp_path / "copy"],
        "repair": [out, tmp_path / "mended"],
        "cat": [out, "0"],
        "tune": [out, "--batch-size", "4"],
        "view": [out, "--port", "70000"],  # which is none
        "bench": [out, "--workers", "0"],  # which fails soon: these files are no images
        "cache": ["ls", out],
        "append": [source, out, "--dry-run", "--on-duplicate", "skip"],
        "update": [source, out, "--dry-run"],
        "drop": [out, "--where", "label=class0", "--dry-run"],
        "annotate": [out, out],  # which is no table
        "compact": [out, "--dry-run"],
        "diff": [out, "0123"],  # which is no version
        "tag": [out, "a/b"],  # which is no name
        "restore": [out, "0123"],
        "completion": ["bash"],
    }
    lines = [[name, *map(str, given.get(name, [out]))] for name in NAMES]
    done = subprocess.run(
        [sys.executable, "-c", ALL_COMMANDS, json.dumps(lines)],
        capture_output=True,
        env=environment(),
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    found = dict(map(json.loads, done.stdout.splitlines()))
    assert found == {name: [] for name in NAMES}


def test_verify_decode_imports_pil_but_not_torch(out: Path) -> None:
    found = imported("verify", out, "--decode", "--jobs", "1")
    assert "PIL" in found
    assert "torch" not in found


def test_ls_into_head_is_no_error(out: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -m shardio ls {out} | head -n 1; echo ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        env=environment(PYTHONUNBUFFERED="1"),
    )
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "0"


def test_a_full_disk_behind_stdout_is_a_message(out: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command("ls", out), stdout=full, stderr=subprocess.PIPE, text=True, env=environment()
        )
    assert (done.returncode, done.stderr) == (1, "shardio: No space left on device\n")


MODULE = "import runpy; runpy.run_module('shardio', run_name='__main__')"


ENTRY = "from shardio.cli.main import main; sys.exit(main())"  # as pip writes it


@pytest.mark.parametrize(
    ("start", "module"),
    [
        (MODULE, "shardio.cli.main"),
        (MODULE, "argparse"),
        (MODULE, "shardio.packing.pack"),
        (ENTRY, "argparse"),
        (ENTRY, "shardio.packing.pack"),
    ],
)
def test_ctrl_c_while_it_starts_is_no_traceback(
    module: str, start: str, source: Path, tmp_path: Path
) -> None:
    code = f"""if True:
        import sys
        class Interrupt:
            def find_spec(self, name, *_):
                if name == {module!r}:
                    raise KeyboardInterrupt
        sys.meta_path.insert(0, Interrupt())
        {start}
    """
    done = subprocess.run(
        [sys.executable, "-c", code, "pack", source, tmp_path / "out"],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert done.returncode == 130
    assert re.fullmatch(r"shardio: interrupted(: .*)?\n", done.stderr)  # one line


def test_the_entry_point_s_module_is_light() -> None:
    code = "import sys, shardio.cli.main; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment()
    )
    assert {*HEAVY, "argparse", "json", "numpy"}.isdisjoint(done.stdout.split())


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["pack"],
        ["pack", "SRC"],
        ["pack", "SRC", "NEW", "--jobs", "0"],
        ["pack", "SRC", "NEW", "--jobs", "x"],
        ["pack", "SRC", "NEW", "--shard-size", "big"],
        ["pack", "SRC", "NEW", "--shard-size", "0"],
        ["pack", "SRC", "NEW", "--shard-size", "99999999999TiB"],
        ["pack", "SRC", "NEW", "--max-records", "99999999999"],
        ["pack", "SRC", ""],
        ["pack", "", "NEW"],
        ["pack", "SRC", "NEW", "--part", "0/3"],
        ["pack", "SRC", "NEW", "--part", "1"],
        ["pack", "SRC", "NEW", "--on-error", "cry"],
        ["pack", "SRC", "NEW", "--format", "zip"],
        ["pack", "SRC", "NEW", "--quality", "0"],
        ["pack", "SRC", "SRC/inside"],
        ["pack", "SRC", "https://host/x"],
        ["info"],
        ["info", "ftp://host/x"],
        ["ls", "OUT", "--shard", "9"],
        ["ls", "OUT", "--class", "nobody"],
        ["cat", "OUT"],
        ["cat", "OUT", "24"],
        ["cat", "OUT", "x"],
        ["cat", "OUT", "0", "--key", "x"],
        ["cat", "OUT", "--key", "nobody"],
        ["cat", "OUT", "0", "--field", "mask"],
        ["gc", "OUT", "--keep", "long"],
        ["verify", "OUT", "--jobs", "0"],
        ["commit", "OUT", "--jobs", "0"],
    ],
)
def test_wrong_usage_ends_with_2_and_a_message(
    arguments: list[str], source: Path, out: Path, tmp_path: Path, run: Run
) -> None:
    names = {"SRC": str(source), "OUT": str(out), "NEW": str(tmp_path / "new")}
    before = content(out)
    done = run(*(re.sub("SRC|OUT|NEW", lambda m: names[m[0]], a) for a in arguments))
    assert done.returncode == 2
    assert done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "new").exists()
    assert content(out) == before


NO_DATASET_FIRST = ("pack", "plan", "append", "update", "index", "cache", "completion")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NO_DATASET_FIRST])
def test_what_is_not_packed_is_said(name: str, tmp_path: Path, run: Run) -> None:
    more = {
        "export": [tmp_path / "export", "--format", "webdataset"],
        "unpack": [tmp_path / "back"],
        "copy": [tmp_path / "copy"],
        "repair": [tmp_path.parent / "mended"],
        "cat": ["0"],
        "tune": ["--batch-size", "4"],
        "drop": ["--where", "label=class0"],
        "annotate": [tmp_path / "scores.csv"],
        "diff": ["v1"],
        "tag": ["v1"],
        "restore": ["v1"],
    }.get(name, [])
    for place in (tmp_path, tmp_path / "missing"):
        done = run(name, place, *more)
        assert done.returncode == 1 and "not packed" in done.stderr
    file = tmp_path / "file"
    file.write_bytes(b"x")
    assert run(name, file, *more).returncode in (1, 2)


def test_a_source_that_is_missing_or_holds_nothing_is_said(tmp_path: Path) -> None:
    for place in (tmp_path / "missing", tmp_path):
        assert "shardio: " in shardio("pack", place, tmp_path.parent / "x", code=1).stderr


def test_what_is_near_a_source_or_a_dataset_is_said_with_the_right_one(
    source: Path, out: Path, tmp_path: Path
) -> None:
    image, shard, new = source / "class0" / "000.jpg", shards(out)[0], tmp_path / "new"
    shardio("pack", source, tmp_path / "begun", "--part", "1/2", "--max-records", "4")
    for arguments, said in (
        (("pack", image, new), rf"000\.jpg: one image \(JPEG\); give the folder .*{image.parent}$"),
        (("pack", shard, new), rf"\.shard: a file of a dataset; give its directory, {out}$"),
        (("info", shard), rf"\.shard: it is a file of a dataset; give its directory, {out}$"),
        (
            ("pack", tmp_path / "begun", new),
            r"begun: not packed: .* not finished; .*shardio commit",
        ),
        (("pack", source, image / "out"), rf"/out: {image} is a file, no directory$"),
        (("pack", source, new, "--classes", source), "--classes: expected a dataset"),
    ):
        assert re.search(said, shardio(*arguments, code=1).stderr.strip())
    assert not new.exists()


@pytest.mark.parametrize("option", [("--timeout", "5"), ("--store-option", "region=x")])
@pytest.mark.parametrize("command", ["pack", "info", "verify", "copy", "tune"])
def test_options_of_a_store_without_a_url_are_refused(
    source: Path, tmp_path: Path, run: Run, command: str, option: tuple[str, str]
) -> None:
    places = [source, tmp_path / "out"] if command in ("pack", "copy") else [source]
    done = run(command, *places, *option)
    assert done.returncode == 2
    assert f"shardio: {option[0]}: goes with an argument that is a URL" in done.stderr


@pytest.mark.parametrize(
    "option",
    [("--table", "s3://none/x.tar/labels.csv"), ("--split-files", "a=s3://none/x.tar/a.txt")],
)
def test_options_of_a_store_go_with_files_of_labels_there(
    source: Path, tmp_path: Path, run: Run, option: tuple[str, str]
) -> None:
    refused = ["--store-option", "endpoint=http://127.0.0.1:1", "--timeout", "0"]
    done = run("pack", source, tmp_path / "out", *option, *refused)
    assert done.returncode == 2 and done.stderr.startswith("shardio: --timeout is 0.0: ")


def test_a_folder_that_is_called_like_a_store_is_no_url(
    source: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.symlink(source, tmp_path / "s3")
    monkeypatch.chdir(tmp_path)
    done = run("pack", "s3", tmp_path / "out", "--timeout", "5")
    assert done.returncode == 2 and "--timeout: goes with an argument" in done.stderr
    done = run("pack", source, tmp_path / "out", "--target-option", "region=x")
    assert done.returncode == 2 and "--target-option: goes with an argument" in done.stderr


def test_a_dataset_of_a_newer_shardio_is_said(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shardio("pack", source, out)
    text = (out / "manifest.json").read_text()
    (out / "manifest.json").write_text(text.replace('"version": 0', '"version": 7'))
    for name in ("info", "ls", "verify", "gc"):
        assert shardio(name, out, code=None).returncode in (1, 3)


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_are_no_crash(out: Path, tmp_path: Path, closed: str) -> None:
    calls = (f"info {out}", f"verify {out}", f"cat {out} 0", "info /nowhere")
    for arguments, line in zip(calls, (command, *[warm_command] * 3), strict=True):
        done = subprocess.run(
            f"{shlex.join(map(os.fsdecode, line(*arguments.split())))} {closed}",
            shell=True,
            capture_output=True,
            env=environment(),
        )
        assert b"Traceback" not in done.stderr
        assert done.returncode == ("nowhere" in arguments)


LOOK = "`shardio log a` shows a new version, or else run the same command again"


@pytest.mark.parametrize(
    "arguments, advice",
    [
        ("copy a b", RESUME_HINT),
        ("unpack a b", RESUME_HINT),
        ("unpack a b --overwrite", ""),  # begins anew
        ("export a b --format mds", ""),
        ("pack a b", RESUME_HINT),
        ("pack a s3://nobody/has/begun", RESUME_HINT),
        ("pack a no://scheme", RESUME_HINT),
        ("pack a b --restart", RESUME_HINT.replace("again", "again, without --restart,")),
        ("pack a b --dry-run", ""),
        ("index a", ""),
        ("append a b", RESUME_HINT),
        ("update a b", RESUME_HINT),
        ("compact a", RESUME_HINT),
        ("commit a", RESUME_HINT),
        ("repair a b", "NEW is no dataset yet; run the same command again, it begins anew"),
        ("drop a --where x=1", LOOK),
        ("drop a --where x=1 --dry-run", ""),
        ("annotate a --remove x", LOOK),
        ("restore a v1", LOOK),
    ],
)
def test_after_ctrl_c_it_says_how_to_go_on(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: str, advice: str
) -> None:
    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    name = arguments.split()[0]
    module = importlib.import_module(f"shardio.packing.{'versions' if name == 'restore' else name}")
    monkeypatch.setattr(module, name, interrupted)
    done = run(*arguments.split())
    assert done.returncode == 130
    assert done.stderr == f"shardio: interrupted{advice and ': '}{advice}\n"
