"""What is stored does not follow the locale of the process: names are bytes, read as UTF-8."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S, warm_python
from support.trees import content, environment, noise, plant

LATIN, ASCII, UTF8 = "ISO-8859-1", "ascii", "UTF-8"
LOCALES = {
    UTF8: {"LC_ALL": "C.UTF-8"},
    ASCII: {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    LATIN: {"LC_ALL": "en_US", "PYTHONUTF8": "0"},
}
NAMES = ("é".encode(), "猫".encode(), b"\xff\xfe", b"plain", b"e\xcc\x81")

# Commands as lines of JSON; the exit code of each, what it said, and the locale's own encoding.
PROGRAM = """
import io, json, os, sys
from shardio.cli.main import main
assert sys.getfilesystemencoding().lower().replace("-", "").startswith(sys.argv[1]), sys.argv
for arguments in json.loads(os.fsencode(sys.argv[2])):
    raw = io.BytesIO()
    sys.stdout = io.TextIOWrapper(raw, sys.getfilesystemencoding())
    code = main([os.fsdecode(one.encode("utf-8", "surrogateescape")) for one in arguments])
    sys.stdout.flush()
    said = raw.getvalue().decode("latin-1")
    sys.__stdout__.write(json.dumps({"code": code, "said": said}) + "\\n")
"""


@pytest.fixture(scope="module")
def locales(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a locale that is not UTF-8."""
    folder = tmp_path_factory.mktemp("locales")
    if shutil.which("localedef") is None:
        pytest.skip("localedef is not installed: no locale of ISO-8859-1 can be made")
    made = subprocess.run(
        ["localedef", "-i", "en_US", "-f", LATIN, str(folder / "en_US")], capture_output=True
    )
    if not (folder / "en_US").is_dir():
        pytest.skip(f"localedef cannot make en_US of ISO-8859-1: {made.stderr!r}")
    return folder


def run(locales: Path, locale: str, *commands: list[str]) -> list[dict[str, Any]]:
    """Run commands of shardio in one process of a locale."""
    env = environment() | {"LOCPATH": str(locales)} | LOCALES[locale]
    env.pop("LANG", None)
    starts = {UTF8: "utf8", ASCII: "ascii", LATIN: "iso8859"}[locale]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, starts, json.dumps(commands)],
        capture_output=True,
        env=env,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(commands), done.stderr
    return found


def folders() -> dict[bytes, bytes]:
    """Images in class folders of odd names."""
    return {
        name + b"/%d\xc3\xa9.jpg" % number: noise(f"{name!r}{number}", 40)
        for name in NAMES
        for number in range(2)
    }


def test_a_dataset_is_the_same_in_every_locale(locales: Path, tmp_path: Path) -> None:
    tree = folders()
    plant(tmp_path / "src", tree)
    said = {}
    for locale in LOCALES:
        out = str(tmp_path / f"out-{locale}")
        done = run(
            locales,
            locale,
            ["pack", str(tmp_path / "src"), out, "--jobs", "1"],
            ["info", out, "--json"],
            ["ls", out, "--json"],
            ["ls", out, "--json", "--class", "é"],
            ["ls", out],
            ["cat", out, "--key", "猫/1é.jpg", "--json"],
            ["verify", out, "--json"],
            ["pack", out, str(tmp_path / f"cats-{locale}"), "--where", "label=猫", "--jobs", "1"],
            ["index", str(tmp_path / "src"), "--out", str(tmp_path / f"index-{locale}")],
        )
        assert [one["code"] for one in done] == [0] * len(done), done
        assert json.loads(done[1]["said"])["classes"] == [
            "e\u0301",
            "plain",
            "é",
            "猫",
            "\udcff\udcfe",
        ]
        assert len(json.loads(done[3]["said"])["records"]) == 2
        assert done[4]["said"].count("\n") == len(tree)
        said[locale] = [one["said"] for place, one in enumerate(done) if place in (1, 2, 3, 5, 6)]
    assert said[LATIN] == said[ASCII] == said[UTF8]
    for name in ("out", "cats", "index"):
        first = content(tmp_path / f"{name}-{UTF8}")
        assert first == content(tmp_path / f"{name}-{LATIN}")
        assert first == content(tmp_path / f"{name}-{ASCII}")


def test_a_tree_comes_back_in_every_locale(locales: Path, tmp_path: Path) -> None:
    tree = {b"train/" + key: data for key, data in folders().items()}
    tree |= {b"\xc3\xa9/" + key: data for key, data in folders().items()}
    source = str(tmp_path / "src")
    plant(tmp_path / "src", tree)
    out, index = str(tmp_path / "out"), str(tmp_path / "index")
    done = run(
        locales,
        UTF8,
        ["pack", source, out, "--splits", "--jobs", "1"],
        ["index", f"{source}/é", "--out", index],
    )
    assert [one["code"] for one in done] == [0, 0], done
    for locale in LOCALES:
        back = tmp_path / f"back-{locale}"
        done = run(
            locales,
            locale,
            ["unpack", out, f"{back}/whole"],
            ["export", out, f"{back}/export", "--format", "imagefolder"],
            ["unpack", index, f"{back}/index", "--root", f"{source}/é"],
            ["verify", out],
            ["verify", index, "--root", f"{source}/é"],
            ["pack", source, out, "--splits", "--jobs", "1"],
            ["gc", out, "--keep", "0"],
        )
        assert [one["code"] for one in done] == [0] * 7, done
        assert "already packed" in done[5]["said"]
        assert content(back / "whole") == content(back / "export") == content(tmp_path / "src")
        assert content(back / "index") == content(tmp_path / "src" / "é")


def test_files_of_others_are_found_in_every_locale(locales: Path, tmp_path: Path) -> None:
    tree = {b"%s\xc3\xa9.jpg" % name: noise(repr(name), 60) for name in (b"a", b"\xe7\x8c\xab")}
    tree |= {key[:-3] + b"cls": b"1" for key in tree}
    plant(tmp_path / "src", tree)
    plant(tmp_path / "wds" / "é", {})
    commands = [
        ["pack", str(tmp_path / "src"), str(tmp_path / "out"), "--from", "files", "--jobs", "1"],
        ["export", str(tmp_path / "out"), str(tmp_path / "wds" / "é"), "--format", "webdataset"],
    ]
    assert [one["code"] for one in run(locales, UTF8, *commands)] == [0, 0]
    listing = 'path,label\n"aé.jpg",é\n"猫é.jpg",猫\n'
    (tmp_path / "src" / "liste.csv").write_text(listing, encoding="utf-8")
    coco = {
        "images": [{"id": 1, "file_name": "猫é.jpg"}, {"id": 2, "file_name": "aé.jpg"}],
        "annotations": [],
        "categories": [{"id": 1, "name": "é"}],
    }
    (tmp_path / "src" / "coco.json").write_text(json.dumps(coco))
    for locale in LOCALES:
        out = tmp_path / locale
        done = run(
            locales,
            locale,
            ["index", str(tmp_path / "wds"), "--files", "é/*", "--out", f"{out}/index"],
            ["verify", f"{out}/index", "--root", str(tmp_path / "wds")],
            ["pack", str(tmp_path / "src/liste.csv"), f"{out}/csv", "--where", "label=猫"],
            ["pack", str(tmp_path / "src/coco.json"), f"{out}/coco"],
        )
        assert [one["code"] for one in done] == [0] * 4, done
    first = content(tmp_path / UTF8)
    assert first == content(tmp_path / LATIN) == content(tmp_path / ASCII)


def test_folders_of_fields_are_found_in_every_locale(locales: Path, tmp_path: Path) -> None:
    plant(tmp_path / "src", {f"{name}/1.jpg".encode(): noise(name, 60) for name in "éü"})
    for locale in LOCALES:
        out, fields = tmp_path / locale, "image=é/,mask=ü/"
        (done,) = run(
            locales, locale, ["pack", str(tmp_path / "src"), str(out), "--fields", fields]
        )
        assert done["code"] == 0
    first = content(tmp_path / UTF8)
    assert first == content(tmp_path / LATIN) == content(tmp_path / ASCII)


def test_a_demo_finds_its_images_in_every_locale(locales: Path, tmp_path: Path) -> None:
    plant(tmp_path / "src", {f"{name}/ä.jpg".encode(): noise(name, 60) for name in "éü"})
    program = """
import csv, os, sys
from benchmarks.demo import contest, show
from shardio import SourceOptions, pack
source, out, listing = sys.argv[1:]
with open(listing, "w", newline="", encoding="utf-8") as file:
    csv.writer(file).writerows([("path", "label"), *show._sample(source)[0]])
pack(listing, out, read=SourceOptions(root=source), jobs=1)
for path, _ in contest.files(out, source, 2):
    assert os.path.getsize(path)
"""
    for locale in LOCALES:
        paths = [str(tmp_path / name) for name in ("src", locale, f"{locale}.csv")]
        env = environment() | {"LOCPATH": str(locales)} | LOCALES[locale]
        python = warm_python.command() if locale == UTF8 else [sys.executable]  # it is that of this
        subprocess.run([*python, "-c", program, *paths], env=env, timeout=LIMIT_S, check=True)
    first = content(tmp_path / UTF8)
    assert first == content(tmp_path / LATIN) == content(tmp_path / ASCII)


def test_names_that_the_terminal_cannot_show_are_escaped(locales: Path, tmp_path: Path) -> None:
    plant(
        tmp_path / "src", {"猫é/1.jpg".encode(): b"no image", "猫é/2.jpg".encode(): noise("x", 9)}
    )
    env = environment() | LOCALES[ASCII]
    done = subprocess.run(
        [sys.executable, "-m", "shardio", "pack", str(tmp_path / "src"), str(tmp_path / "out")],
        capture_output=True,
        env=env,
        timeout=LIMIT_S,
    )
    assert done.returncode == 1
    assert b"\\u732b\\xe9/1.jpg: is not an image" in done.stderr
    assert b"Traceback" not in done.stderr
