"""The command line: what it says, where it says it, how it ends."""

import base64
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import LIMIT_S
from support.trees import (
    JPEG,
    ROOT,
    command,
    content,
    environment,
    images,
    noise,
    on_a_terminal,
    picture,
    plant,
    shardio,
    shardio_json,
    shards,
)

import shardio as library
from shardio import ShardDataset, units
from shardio.cli import parser
from shardio.cli.command import GOES_ON, descriptions, option_rows
from shardio.cli.main import main
from shardio.dataset import sequence as sequences
from shardio.errors import OptionError, StorageError
from shardio.packing.gc import gc
from shardio.packing.writer import Writer
from shardio.storage.cache import SMALL, CacheDirectory

COMMANDS = (
    *(
        "pack",
        "plan",
        "commit",
        "index",
        "unpack",
        "export",
        "info",
        "ls",
        "cat",
        "verify",
        "view",
        "explain",
    ),
    *("tune", "bench", "gc", "copy", "cache", "completion"),
)


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process: for what is not about the process."""

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        capfd.readouterr()
        try:
            code: Any = main([os.fspath(one) for one in arguments])
        except SystemExit as end:  # of argparse
            code = end.code
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant(tmp_path_factory.mktemp("source") / "src", images())


@pytest.fixture(scope="module")
def out(source: Path) -> Path:
    shardio("pack", source, source.parent / "out", "--max-records", "10", "--jobs", "1")
    return source.parent / "out"


def keys_of(out: Path) -> list[str]:
    return sequences.open(out).keys()


# --- help and documents ---------------------------------------------------------------------------


def test_every_command_is_tested_here() -> None:
    assert tuple(command.name for command in parser.COMMANDS) == COMMANDS


# Options that several commands share, which the docs say once.
COMMON = {
    *("--json", "--quiet", "--help", "--store-option", "--timeout", "--executor", "--address"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_a_section_in_the_docs(name: str) -> None:
    said = shardio(name, "--help").stdout
    assert f"usage: shardio {name}" in said
    assert "Exit codes:" in said
    documented = (ROOT / "docs" / "cli.md").read_text()
    section = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", documented, re.M | re.S)
    assert section, f"docs/cli.md has no section `## {name}`"
    for option in re.findall(r"^\s+(?:-h, )?(--[a-z0-9-]+)", said, re.M):
        common = option in COMMON
        place = documented.partition("\n## ")[0] if common else section[1]
        assert f"`{option}" in place, f"docs/cli.md, {name}: {option} is missing"


def test_the_docs_name_no_option_that_does_not_exist() -> None:
    documented = (ROOT / "docs" / "cli.md").read_text()
    said = "".join(shardio(name, "--help").stdout for name in COMMANDS) + "--version --help"
    for option in set(re.findall(r"`(--[a-z0-9-]+)", documented)):
        assert option in said, option


def test_all_commands_are_in_the_overview() -> None:
    said = shardio("--help").stdout
    assert all(re.search(rf"^    {name}( |$)", said, re.M) for name in COMMANDS)
    assert shardio("--version").stdout.startswith("shardio 0.")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_described(name: str) -> None:
    shown = shardio(name, "--help").stdout
    for line in shown.splitlines():
        if re.match(r"  -", line):
            text = re.search(re.escape(line) + r"(?:\n {20,}\S|$)", shown)
            assert re.search(r"\S  +\S", line[2:]) or (text and "\n" in text[0]), line


def test_descriptions_come_from_the_docstrings_tables() -> None:
    rows = """Do it.

    one       in a line
    two       in a line: and
              in another
    a_b, c_d  both
    raises nothing, and  is no row
    """
    table = textwrap.dedent(rows.partition("\n")[2])
    assert list(option_rows(table)) == [
        (["one"], "in a line"),
        (["two"], "in a line: and in another"),
        (["a_b", "c_d"], "both"),
    ]
    explain, dataset = "tuning.explain:explain", "dataset.shard_dataset:ShardDataset"
    assert descriptions([explain])["num_workers"] == "of each rank's loader"
    assert descriptions([dataset])["path"] == "the packed directory, or its URL"
    storage = "storage.options:Storage"
    first, second = descriptions([explain, storage]), descriptions([storage, explain])
    assert first["root"] == second["root"] == descriptions([storage])["root"]  # its own row wins
    assert descriptions(["packing.pack:nothing"]) == {}


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


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_imports_torch(name: str, source: Path, out: Path, tmp_path: Path) -> None:
    arguments = {
        "pack": [source, tmp_path / "out"],
        "plan": [source, tmp_path / "out"],
        "commit": [out],
        "index": [tarred(tmp_path)],
        "export": [out, tmp_path / "export", "--format", "webdataset"],
        "unpack": [out, tmp_path / "back"],
        "copy": [out, tmp_path / "copy"],
        "cat": [out, "0"],
        "tune": [out, "--batch-size", "4"],
        "view": [out, "--port", "70000"],  # which is none
        "bench": [out, "--workers", "0"],  # which fails soon: these files are no images
        "cache": ["ls", out],
        "completion": ["bash"],
    }.get(name, [out])
    found = imported(name, *arguments)
    assert "shardio.formats.manifest" in found or name == "cache"
    assert found.isdisjoint({"torch", "PIL", "tqdm"})
    assert "lmdb" not in found or name == "export"  # which writes it


def test_verify_decode_imports_pil_but_not_torch(out: Path) -> None:
    found = imported("verify", out, "--decode", "--jobs", "1")
    assert "PIL" in found
    assert "torch" not in found


# --- what is said ---------------------------------------------------------------------------------


def test_pack_sums_up(source: Path, tmp_path: Path) -> None:
    said = shardio("pack", source, tmp_path / "out", "--max-records", "10")
    assert re.search(r"out: 24 files, 3 classes, 7\.3 KiB -> 3 shards, .* MB/s", said.stdout)
    assert said.stderr == ""
    assert (
        "already packed" in shardio("pack", source, tmp_path / "out", "--max-records", "10").stdout
    )
    assert shardio("pack", source, tmp_path / "q", "--quiet").stdout == ""


def test_pack_says_what_it_left_out_and_ignored(tmp_path: Path) -> None:
    tree = {**images(), "class0/Thumbs.db": b"?", "class0/no.jpg": b"\x1b]0;evil\x07"}
    source = plant(tmp_path / "src", tree)
    failed = shardio("pack", source, tmp_path / "out", code=1)
    assert "class0/no.jpg" in failed.stderr
    assert "--on-error skip" in failed.stderr
    assert "\x1b" not in failed.stderr
    done = shardio("pack", source, tmp_path / "out", "--on-error", "skip", code=4)
    assert "ignored: 1 file or folder\n" in done.stdout
    assert "1 file left out" in done.stdout
    assert "class0/no.jpg" in done.stdout


def test_python_prints_what_the_command_line_prints_and_shows_one_line(tmp_path: Path) -> None:
    """Times differ, and so do directories."""
    source = plant(tmp_path / "src", {**images(), "class0/no.jpg": b"no"})

    def same(said: Any, done: subprocess.CompletedProcess[str]) -> bool:
        texts = (re.sub(r"\S+ s, \S+ MB/s|/[ab]\b", "", str(t)) for t in (done.stdout, f"{said}\n"))
        assert len(repr(said).splitlines()) == 1 and len(repr(said)) < 200 + len(str(tmp_path))
        return len(set(texts)) == 1

    a, b = tmp_path / "a", tmp_path / "b"
    skip = ("--on-error", "skip")
    [packed] = library.pack(source, a / "out", on_error="skip", jobs=1)
    assert same(packed, shardio("pack", source, b / "out", *skip, code=4))
    assert repr(packed).endswith("; 1 left out>")
    [packed] = library.pack(source, a / "out", on_error="skip", jobs=1)
    assert same(packed, shardio("pack", source, b / "out", *skip, code=4))
    [packed] = library.pack(source, a / "dry", on_error="skip", jobs=1, dry_run=True)
    assert same(packed, shardio("pack", source, b / "dry", *skip, "--dry-run"))
    out = a / "out"
    assert same(library.unpack(out, a / "back"), shardio("unpack", out, b / "back"))
    done = library.export(out, a / "x", format="imagefolder")
    assert same(done, shardio("export", out, b / "x", "--format", "imagefolder"))
    (tmp_path / "src" / "class0" / "no.jpg").unlink()
    assert same(library.index(source, out=a / "idx"), shardio("index", source, "--out", b / "idx"))
    assert same(gc(out), shardio("gc", out))
    assert same(library.verify(out, jobs=1), shardio("verify", out))
    for report in (
        library.explain(ShardDataset(out)),
        library.tune(ShardDataset(out, batch_size=4)),
    ):
        assert repr(report).startswith(("dataset      24 records", "24 records"))
    [shard] = shards(out)
    data = bytearray(shard.read_bytes())
    data[2000] ^= 1
    shard.write_bytes(data)
    assert same(library.verify(out, jobs=1), shardio("verify", out, code=3))


def test_each_way_out_that_a_failed_packing_offers_works(tmp_path: Path) -> None:
    """Each line of its message, given by itself."""
    tree = {"a/1.png": picture(9, 8, "PNG"), "a/2.png": picture(8, 8, "PNG"), "a/3.png": b"no"}
    source = plant(tmp_path / "src", tree)
    one = ("pack", source, tmp_path / "out")
    assert re.findall(r"^  (--.*?)   ", shardio(*one, code=1).stderr, re.M) == [
        "--on-error skip",
        "--restart",
    ]
    shardio(*one, "--on-error", "skip", code=4)
    raw = ("pack", source, tmp_path / "raw", "--encode", "raw")
    (source / "a" / "3.png").unlink()
    said = shardio(*raw, code=1).stderr
    assert "1 file cannot be packed" in said
    assert re.findall(r"^  (--.*?)   ", said, re.M) == [
        "--on-error skip",
        "--restart --resize N",
        "--restart",
    ]
    shardio(*raw, "--restart", "--resize", "8")
    raw = (*raw[:2], tmp_path / "raw2", *raw[3:])
    shardio(*raw, code=1)
    plant(source, {"a/2.png": picture(9, 8, "PNG")})
    os.utime(source / "a" / "2.png")
    shardio(*raw, "--restart")


def test_a_dry_run_says_the_plan(source: Path, tmp_path: Path) -> None:
    said = shardio("pack", source, tmp_path / "out", "--dry-run").stdout
    assert "would pack 24 files, 3 classes, 7.3 KiB into 1 shard" in said
    planned = shardio_json("pack", source, tmp_path / "out", "--dry-run")
    assert (planned["dry_run"], planned["datasets"][0]["shards"]) == (True, 1)
    assert not (tmp_path / "out").exists()
    shardio("pack", source, tmp_path / "out", "--part", "1/2", "--max-records", "4")
    said = shardio("pack", source, tmp_path / "out", "--dry-run", "--max-records", "4").stdout
    assert "into 6 shards; 3 of these are there, to be checked" in said
    shardio("pack", source, tmp_path / "out", "--max-records", "4")
    said = shardio("pack", source, tmp_path / "out", "--dry-run", "--max-records", "4").stdout
    assert "already packed" in said
    assert "would pack" not in said
    said = shardio("pack", source, tmp_path / "out", "--dry-run", code=1).stderr
    assert "another dataset is packed here" in said


def test_a_dry_run_says_what_cannot_be_packed(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", {"a/x.jpg": JPEG, "a/empty.jpg": b""})
    said = shardio("pack", source, tmp_path / "out", "--dry-run", code=1).stdout
    assert "1 file cannot be packed, so nothing would be" in said
    said = shardio("pack", source, tmp_path / "out", "--dry-run", "--on-error", "skip", code=4)
    assert "1 file would be left out" in said.stdout


def test_info_says_what_is_in_there(out: Path) -> None:
    said = shardio("info", out).stdout
    for part in ("records   24", "3 of 4 to 10 records", "class0, class1, class2", "version 0"):
        assert part in said
    facts = shardio_json("info", out)
    assert facts["records"] == 24
    assert facts["fields"] == {"__key__": "key", "image": "image", "label": "int"}
    assert facts["bytes"] == sum(path.stat().st_size for path in shards(out))
    assert facts["options"]["seed"] == 0
    assert facts["format_version"] == json.loads((out / "manifest.json").read_bytes())["version"]


def test_info_of_the_environment_names_versions_and_pil() -> None:
    facts = shardio_json("info", "--env")
    assert facts["shardio"]
    assert "torch" in facts
    assert "illow" in facts["images"]


def test_ls_lists_every_record_once_and_filters(out: Path) -> None:
    names = keys_of(out)
    rows = shardio_json("ls", out)["records"]
    assert [row["key"] for row in rows] == names
    assert [row["index"] for row in rows] == list(range(24))
    second = shardio_json("ls", out, "--shard", "1")["records"]
    assert second == [row for row in rows if row["shard"] == 1]
    ones = shardio_json("ls", out, "--class", "class1")["records"]
    assert ones == [row for row in rows if row["class"] == "class1"]
    assert len(ones) == 8
    lines = shardio("ls", out).stdout.splitlines()
    assert [line.split()[3] for line in lines] == names


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


def test_names_are_escaped_and_come_back(tmp_path: Path) -> None:
    name = b"a\x1b[31m/\xff\n\xc2\x9b.jpg"
    source = plant(tmp_path / "src", {name: noise("x", 50), "b/é.jpg": JPEG})
    out = tmp_path / "out"
    shardio("pack", source, out)
    for ascii_only in (False, True):
        more = {"PYTHONIOENCODING": "ascii"} if ascii_only else {}
        said = shardio("ls", out, text=False, env=environment(**more)).stdout
        assert set(b"\x1b\xff\x9b") & set(said) == set()
        assert said.count(b"\n") == 2
        assert (b"b/\\xe9.jpg" in said) == ascii_only
        shardio("info", out, env=environment(**more))
    assert shardio("cat", out, "--key", name, text=False).stdout == noise("x", 50)
    rows = shardio_json("ls", out, "--class", b"a\x1b[31m")["records"]
    assert [os.fsencode(row["key"]) for row in rows] == [name]


def test_cat_gives_exactly_the_bytes(out: Path, tmp_path: Path) -> None:
    tree = images()
    names = keys_of(out)
    for index in (0, 23, -1):
        assert shardio("cat", out, str(index), text=False).stdout == tree[names[index]]
    done = shardio("cat", out, "--key", "class1/003.jpg", text=False)
    assert done.stdout == tree["class1/003.jpg"]
    assert shardio("cat", out, "0", "--field", "__key__").stdout == f"{names[0]}\n"
    assert shardio("cat", out, "0", "--field", "label").stdout.strip() in ("0", "1", "2")
    said = shardio_json("cat", out, "0")
    assert base64.b64decode(said["base64"]) == tree[names[0]]
    file = tmp_path / "x.jpg"
    shardio("cat", out, "0", "--output", file)
    assert file.read_bytes() == tree[names[0]]
    assert "is there already" in shardio("cat", out, "1", "--output", file, code=1).stderr
    assert file.read_bytes() == tree[names[0]]
    shardio("cat", out, "1", "--output", file, "--overwrite")
    assert file.read_bytes() == tree[names[1]]


def test_cat_shows_fields_of_every_kind(tmp_path: Path) -> None:
    import numpy as np

    with Writer(tmp_path / "out") as writer:
        writer.write({"s": "é", "f": 0.5, "a": np.arange(3), "j": {"b": b"\xff"}, "n": True})
    said = {
        name: shardio("cat", tmp_path / "out", "0", "--field", name).stdout.strip()
        for name in ("s", "f", "a", "j", "n")
    }
    assert said == {
        "s": "é",
        "f": "0.5",
        "a": "[0, 1, 2]",
        "j": '{"b": {"base64": "/w=="}}',
        "n": "true",
    }
    for name in said:
        assert shardio_json("cat", tmp_path / "out", "0", "--field", name)["field"] == name


def test_cat_of_a_null_is_an_error_and_no_text(tmp_path: Path) -> None:
    with Writer(tmp_path / "out", fields={"image": "image"}) as writer:
        writer.write({"image": None})
    said = shardio("cat", tmp_path / "out", "0", code=2)
    assert said.stdout == "" and "record 0 has no image: it is null" in said.stderr


def test_verify_names_a_damaged_shard_once_and_as_it_was_given(out: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    shard = shards(copy)[1]
    shard.write_bytes(shard.read_bytes()[:-5])
    said = shardio("verify", "copy", code=3, cwd=tmp_path).stdout.splitlines()
    assert said[0].startswith(f"copy/{shard.name}: ") and said[0].count(shard.name) == 1


def test_cat_shows_arrays_of_what_json_has_no_name_for(tmp_path: Path) -> None:
    import numpy as np

    arrays = {
        "c": (np.array([1 + 2j]), '["(1+2j)"]'),
        "d": (np.array(["2026-01-02"], "M8[D]"), '["2026-01-02"]'),
        "t": (np.array([5], "m8[s]"), '["0:00:05"]'),
        "s": (np.array([b"x"]), '[{"base64": "eA=="}]'),
        "n": (np.array([[np.nan], [np.inf], [0.5]]), "[[null], [null], [0.5]]"),
    }
    with Writer(tmp_path / "out") as writer:
        writer.write({name: array for name, (array, _) in arrays.items()})
    for name, (_, shown) in arrays.items():
        assert shardio("cat", tmp_path / "out", "0", "--field", name).stdout == f"{shown}\n"
        said = shardio_json("cat", tmp_path / "out", "0", "--field", name)
        assert said["value"] == json.loads(shown)


def test_unpack_and_diff(source: Path, out: Path, tmp_path: Path) -> None:
    said = shardio("unpack", out, tmp_path / "back").stdout
    assert "24 files" in said
    done = subprocess.run(["diff", "-r", source, tmp_path / "back"], capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"")
    assert "24 of these were there already" in shardio("unpack", out, tmp_path / "back").stdout
    changed = next((tmp_path / "back").rglob("*.jpg"))
    changed.write_bytes(changed.read_bytes() + b"x")
    shardio("unpack", out, tmp_path / "back", code=1)
    shardio("unpack", out, tmp_path / "back", "--overwrite")
    assert content(tmp_path / "back") == content(source)


def test_cat_escapes_on_a_terminal_what_could_change_it(tmp_path: Path) -> None:
    text = "a\x1b]0;title\x07\tb\né \x9b2J\u202e"
    with Writer(tmp_path / "out") as writer:
        writer.write({"text": text, "j": {"b": "\x9b2J"}})
    given = "cat", tmp_path / "out", "0", "--field"
    code, seen = on_a_terminal(*given, "text")
    lines = seen.replace("\r\n", "\n").expandtabs().splitlines()
    assert code == 0
    assert lines == ["a\\x1b]0;title\\x07\tb".expandtabs(), r"é \x9b2J\u202e"]
    assert on_a_terminal(*given, "j")[1].strip() == r'{"b": "\u009b2J"}'
    assert shardio(*given, "text", text=False).stdout == text.encode() + b"\n"


def test_cat_does_not_pour_images_over_a_terminal(out: Path) -> None:
    code, seen = on_a_terminal("cat", out, "0")
    assert code == 2
    assert "--output FILE" in seen


# --- how it ends ----------------------------------------------------------------------------------


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


def test_a_file_that_cannot_be_written_is_said_before_the_work(out: Path, tmp_path: Path) -> None:
    for arguments in (
        ("tune", out, "--plot"),
        ("bench", out, "--plot"),
        ("cat", out, 0, "--output"),
    ):
        for place, why in (
            (tmp_path / "none" / "x.png", r"/none/x\.png: there is no directory .*/none to write"),
            (tmp_path / "folder.png", r"/folder\.png: expected the name of a file, and this is a"),
        ):
            (tmp_path / "folder.png").mkdir(exist_ok=True)
            done = shardio(*map(str, arguments), place, code=1)
            assert done.stdout == "" and re.search(why, done.stderr), done.stderr


def test_a_url_that_is_not_supported_says_what_is(out: Path, tmp_path: Path) -> None:
    said = shardio("export", out, "s3://b/x", "--format", "mds", code=2).stderr
    assert re.search(
        r"s3://b/x: expected a directory.*; write into a directory, and `shardio copy`", said
    )
    assert "https:// is read only" in shardio("pack", tmp_path, "https://b/out", code=2).stderr


def test_a_wrong_command_or_option_is_answered_with_the_right_one() -> None:
    for given, said in (
        ("packk a b", r"no command is called 'packk'; there are pack, .*: did you mean 'pack'\?"),
        ("demo photos", "shardio: no command is called 'demo'; the demo is tools/demo of the repo"),
        ("help demo", "the demo is tools/demo of the repository"),
        (
            "pack a b --shuffel",
            r"shardio pack: no option is called --shuffel; did you mean '--shuffle'\?",
        ),
        ("pack a b --shuffel=3", "no option is called --shuffel; did you"),
        ("ls a --split train", "no option is called --split; a split is .*: OUT/train"),
        ("pack a b c", "shardio pack: 'c' is one more than it takes\nusage: shardio pack SRC OUT"),
        ("--json info a", "shardio info: --json goes behind the command"),
        ("explain a --unit x", "argument --unit: 'x': expected a whole number"),
        ("bench a --seconds x", "argument --seconds: 'x': expected a number"),
        ("export a", "required: DIR, --format\nusage: shardio export OUT DIR --format FORMAT"),
    ):
        done = shardio(*given.split(), code=2)
        assert re.search(said, done.stderr), done.stderr
        assert done.stderr.count("\n") == 2, "the message, and how it is called"


@pytest.mark.parametrize(
    "name",
    [name for name in COMMANDS if name not in ("pack", "plan", "index", "cache", "completion")],
)
def test_what_is_not_packed_is_said(name: str, tmp_path: Path, run: Run) -> None:
    more = {
        "export": [tmp_path / "export", "--format", "webdataset"],
        "unpack": [tmp_path / "back"],
        "copy": [tmp_path / "copy"],
        "cat": ["0"],
        "tune": ["--batch-size", "4"],
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--jobs", "0"], "shardio: --jobs is 0: "),
        (["--shard-size", "5"], "shardio: --shard-size is 5, without a unit"),
        (["--work-dir", "x"], "shardio: --work-dir: only where OUT is a URL"),
        (["--timeout", "0"], "shardio: --timeout is 0.0: "),
        (["--store-option", "client_options=x"], "expected --store-option client_options.NAME=..."),
    ],
)
def test_messages_call_options_as_the_command_line_does(
    source: Path, tmp_path: Path, run: Run, arguments: list[str], said: str
) -> None:
    place = "s3://bucket" if {"--store-option", "--timeout"} & {*arguments} else source
    assert said in run("pack", place, tmp_path / "out", *arguments).stderr


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


def test_what_is_no_option_of_the_command_line_stays_as_it_is() -> None:
    pack, commit = (one for one in parser.COMMANDS if one.name in ("pack", "commit"))
    for text, told in (
        ("by options={'anonymous': True}.", "by --store-option anonymous=true."),
        ("give max_pixels=400, or", "give --max-pixels 400, or"),
        ("shardio.Storage(max_pixels=400)",) * 2,
        ("/data/max_pixels/x, max_pixels.jpg, 'max_pixels', new_size: root is 3",) * 2,
        ("fields: overwrite=True",) * 2,
        ("the key 'a max_pixels b', \"it's work_dir\": twice",) * 2,
        ("/data/[max_pixels]: https://h/x?max_pixels=4: /data/a,work_dir: gone",) * 2,
    ):
        assert pack.in_its_words(text) == told
    assert commit.in_its_words("options={'region': ...} max_pixels=4") == (
        "options={'region': ...} max_pixels=4"
    )


def test_a_place_where_nothing_may_be_written_is_said_before_the_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK and real(path, mode))
    with pytest.raises(StorageError, match=f"new/out: no permission to write into {tmp_path}"):
        library.pack(source, tmp_path / "new" / "out", progress=lambda *_: pytest.fail("it began"))
    with pytest.raises(StorageError, match=r"no permission to write the index beside .* --out"):
        library.index(source, progress=lambda *_: pytest.fail("it began"))


def test_a_dataset_of_a_newer_shardio_is_said(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shardio("pack", source, out)
    text = (out / "manifest.json").read_text()
    (out / "manifest.json").write_text(text.replace('"version": 0', '"version": 7'))
    for name in ("info", "ls", "verify", "gc"):
        assert shardio(name, out, code=None).returncode in (1, 3)


def test_splits_are_named_by_commands_that_want_one(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", {"train/a/1.jpg": JPEG, "val/a/2.jpg": JPEG})
    shardio("pack", source, tmp_path / "out")
    assert "out/train" in shardio("ls", tmp_path / "out", code=1).stderr
    missing = shardio("info", tmp_path / "out" / "trian", code=1).stderr
    assert "there are train, val: did you mean 'train'?" in missing
    assert set(shardio_json("info", tmp_path / "out")["splits"]) == {"train", "val"}
    assert "2 records in 2 shards" in shardio("verify", tmp_path / "out").stdout
    assert "train\n" in shardio("info", tmp_path / "out").stdout


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_are_no_crash(out: Path, tmp_path: Path, closed: str) -> None:
    for arguments in (f"info {out}", f"verify {out}", f"cat {out} 0", "info /nowhere"):
        done = subprocess.run(
            f"{sys.executable} -m shardio {arguments} {closed}",
            shell=True,
            capture_output=True,
            env=environment(),
        )
        assert b"Traceback" not in done.stderr
        assert done.returncode == ("nowhere" in arguments)


def test_sizes_are_read_as_users_write_them() -> None:
    for text, size in {
        "1": 1,
        "64MB": 64 * 10**6,
        "64MiB": 64 << 20,
        "64m": 64 << 20,
        " 1.5 GiB ": 3 << 29,
        "0.1KB": 100,
        "100000000000000.5B": 100000000000000,
    }.items():
        assert units.parse_size(text) == size
        assert units.parse_size(units.exact_size(size)) == size
    for text in ("", "MB", "-1", "1e3", "1 MBs", "1..5", "inf", "0x10"):
        with pytest.raises(OptionError):
            units.parse_size(text)
    for small in (1, 999, "64", np.int64(8)):
        with pytest.raises(OptionError, match=f"shard_size is {small}, .* mean {small}GB, or "):
            units.check_size("shard_size", small)
    accepted = {1000: 1000, "1B": 1, "64 B": 64, "1KB": 1000}
    assert {size: units.check_size("x", size) for size in accepted} == accepted
    assert units.check_size("x", 0, 0) == 0
    exact = {0: "0B", 999: "999B", 2 * 10**6: "2MB", 1 << 20: "1MiB", 1_024_000: "1000KiB"}
    assert {size: units.exact_size(size) for size in exact} == exact
    shown = {
        0: "0 B",
        1023: "1,023 B",
        1024: "1.0 KiB",
        3 << 29: "1.5 GiB",
        1 << 60: "1,048,576.0 TiB",
    }
    assert {size: units.show_size(size) for size in shown} == shown


@pytest.mark.parametrize(
    "arguments, advice",
    [
        ("copy a b", GOES_ON),
        ("unpack a b", GOES_ON),
        ("unpack a b --overwrite", ""),  # begins anew
        ("export a b --format mds", ""),
        ("pack a b", GOES_ON),
        ("pack a s3://nobody/has/begun", GOES_ON),
        ("pack a no://scheme", GOES_ON),
        ("pack a b --restart", GOES_ON.replace("again", "again, without --restart,")),
        ("pack a b --dry-run", ""),
        ("index a", ""),
    ],
)
def test_after_ctrl_c_it_says_how_to_go_on(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: str, advice: str
) -> None:
    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    name = arguments.split()[0]
    module = importlib.import_module(f"shardio.packing.{name}")
    monkeypatch.setattr(module, name, interrupted)
    done = run(*arguments.split())
    assert done.returncode == 130
    assert done.stderr == f"shardio: interrupted{advice and ': '}{advice}\n"


# --- cache ----------------------------------------------------------------------------------------


def test_a_cache_is_listed_and_emptied(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "cache"
    cache = CacheDirectory(folder, "1GiB", range_bytes=4096)
    for shard, ranges in ((0, 2), (1, 3)):
        file = cache.open(f"{shard:064x}", 10_000, b"d" * 16, shard)
        for number in range(ranges):
            claim = file.claim(number)
            assert claim is not None
            claim.store(bytes(claim.length))
        file.close()
    (folder / "mine.txt").write_text("mine")
    [row] = json.loads(run("cache", "ls", folder, "--json").stdout)["datasets"]
    assert row["dataset_id"] == (b"d" * 16).hex() and row["shards"] == 2
    assert row["bytes_present"] == 8192 + 10_000 and row["bytes"] == 20_000
    assert row["disk_bytes"] >= 8192 + 10_000 and abs(row["last_use"] - time.time()) < 1000
    shown = run("cache", "ls", folder).stdout.splitlines()
    assert re.match(r"(64){16} +2 +17.8 KiB +19.5 KiB  20", shown[1])
    small = cache.open("e" * 64, 3_000, SMALL, 0)
    claim = small.claim(0)
    assert claim is not None
    claim.store(bytes(3_000))
    small.close()
    assert re.search(r"\nmanifests +1 +2.9 KiB +2.9 KiB  20", run("cache", "ls", folder).stdout)
    whole = json.loads(run("cache", "ls", folder, "--json").stdout)["disk_bytes"]
    cleared = json.loads(run("cache", "clear", folder, "--json").stdout)
    assert cleared == {"files": 3, "bytes": whole} and whole > row["disk_bytes"]
    assert run("cache", "ls", folder).stdout == "nothing is cached here\n"
    assert [one.name for one in folder.iterdir()] == ["mine.txt"]
    assert run("cache", "ls", tmp_path / "nowhere").returncode == 1
    assert "no such directory" in run("cache", "clear", tmp_path / "nowhere").stderr
    assert run("cache", "empty", folder).returncode == 2
