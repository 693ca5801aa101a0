"""What pip makes of the tree: an editable install, a source distribution, a wheel.

Built by setuptools, as pip does it, from a copy of the tree, without the network and without a
compiler: the core has tests of its own.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOT_OURS = (".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", "*.so")
NOT_OURS += (".hypothesis", "demo-data", ".data")

pytest.importorskip("setuptools", "77", reason="NOT RUN: no setuptools >= 77 to build with")


def build(hook: str, tree: Path, out: Path) -> Path:
    """What a hook of the build backend makes of a tree."""
    out.mkdir(exist_ok=True)
    script = f"import setuptools.build_meta as b; b.{hook}({str(out)!r})"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tree,
        env={**os.environ, "CC": "false", "CXX": "false"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this tree, as a clone has it: called `shardio`."""
    copy = tmp_path_factory.mktemp("src") / "shardio"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_OURS))
    return copy


def test_an_editable_install_is_a_path_entry(tree: Path, tmp_path: Path) -> None:
    made = build("build_editable", tree, tmp_path / "out")
    with zipfile.ZipFile(made) as wheel:
        names = [name for name in wheel.namelist() if ".dist-info/" not in name]
        (entry,) = names  # no import hook beside it
        assert entry.endswith(".pth")
        assert wheel.read(entry).decode().split() == [str(tree)]


def test_the_wheel_is_called_shardio_torch(tree: Path, tmp_path: Path) -> None:
    made = build("build_wheel", tree, tmp_path / "out")
    assert made.name.startswith("shardio_torch-")
    with zipfile.ZipFile(made) as wheel:
        folders = {name.partition("/")[0] for name in wheel.namelist()}
        (info,) = folders - {"shardio"}
        assert wheel.read(f"{info}/METADATA").decode().count("\nName: shardio-torch\n") == 1
        assert b"shardio = shardio.cli:main" in wheel.read(f"{info}/entry_points.txt")
        assert not [name for name in wheel.namelist() if "/core/" in name]
        assert "shardio/py.typed" in wheel.namelist()


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        ({"shardio-torch": "9.8"}, "shardio-torch 9.8"),
        ({"shardio-torch": "9.8", "shardio": "7.6"}, "shardio-torch 9.8; shardio 7.6 is another"),
    ],
)
def test_info_names_what_is_installed(
    tmp_path: Path, installed: dict[str, str], words: str
) -> None:
    for name, version in installed.items():
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / "METADATA").write_text(text)
    said = subprocess.run(
        [sys.executable, "-m", "shardio", "info", "--env", "--json"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(said.stdout)["installed"]
    assert found.startswith(words)
    assert ("pip uninstall" in found) == ("shardio" in installed)


def test_it_is_imported_from_the_folder_that_the_clone_lies_in(tmp_path: Path) -> None:
    (tmp_path / "shardio" / "shardio").mkdir(parents=True)  # what the clone looks like from there
    found = subprocess.run(
        [sys.executable, "-c", "import shardio; print(shardio.__version__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout[:1].isdigit()
