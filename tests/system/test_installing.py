"""What pip makes of the tree: an editable install, a source distribution, a wheel.

Built by setuptools, as pip does it, from a copy of the tree, without the network and without a
compiler: the core has tests of its own.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.trees import ROOT

NOT_OURS = (".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", "*.so")
NOT_OURS += (".hypothesis", "demo-data", "shardio-demo.*", ".data")
NOT_AT_THE_TOP = ("carry", "gpu-check", "gpu-check.tgz")  # what docs/gpu-check.md makes there

pytest.importorskip("setuptools", "77", reason="NOT RUN: no setuptools >= 77 to build with")


def build(hook: str, tree: Path, out: Path, *options: str) -> Path:
    """Run a hook of the build backend in a tree, and give the file that it makes."""
    out.mkdir(exist_ok=True)
    settings = {"--build-option": list(options)}
    script = f"import setuptools.build_meta as b; b.{hook}({str(out)!r}, {settings})"
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
    """Copy this tree, as a clone has it, to a folder called `shardio`."""
    copy = tmp_path_factory.mktemp("src") / "shardio"

    def ignored(folder: str, names: list[str]) -> set[str]:
        patterns = NOT_OURS + NOT_AT_THE_TOP * (folder == str(ROOT))
        return shutil.ignore_patterns(*patterns)(folder, names)

    shutil.copytree(ROOT, copy, ignore=ignored)
    return copy


@pytest.fixture(scope="module")
def source(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the source distribution and unpack it."""
    folder = tmp_path_factory.mktemp("sdist")
    made = build("build_sdist", tree, folder / "out")
    with tarfile.open(made) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)
    return folder / made.name.removesuffix(".tar.gz")


def files(folder: Path) -> set[str]:
    found = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return {name for name in found if ".egg-info/" not in name}


def test_the_source_distribution_has_what_the_tests_need(tree: Path, source: Path) -> None:
    written = {"PKG-INFO", "setup.cfg"}
    ours = {name for name in files(tree) if ".git" not in name}
    assert files(source) - written == ours - written and "tools/gpu-check" in ours


def test_no_environment_gets_into_the_source_distribution(tree: Path, tmp_path: Path) -> None:
    copy = tmp_path / "tree"
    shutil.copytree(tree, copy)
    for name in ("tests/frameworks/.venv/a.py", "benchmarks/.venvs/x/b.txt", "tests/_core.so"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).touch()
    with tarfile.open(build("build_sdist", copy, tmp_path / "out")) as archive:
        odd = [name for name in archive.getnames() if ".venv" in name or name.endswith(".so")]
    assert not odd


def test_the_readme_of_the_package_index_has_no_link_into_the_tree(source: Path) -> None:
    shown = (source / "PKG-INFO").read_text().partition("\n\n")[2]
    assert shown.startswith("# shardio\n")
    found = re.findall(r"\]\(([^)]+)\)", shown)
    assert [link for link in found if "://" not in link and not link.startswith("#")] == []
    for name in re.findall(r"docs/[a-z-]+\.\w+", shown):
        assert (source / name).is_file(), name


def test_links_of_the_readme_lead_to_the_documentation_once_that_has_a_home(
    source: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "tree"
    shutil.copytree(source, copy)
    settings = copy / "pyproject.toml"
    at = "[project.urls]\n"
    text = settings.read_text().replace(at, f'{at}Documentation = "https://x.test/tree/"\n')
    settings.write_text(text)
    (copy / "README.md").write_text(
        "# shardio\n[a](docs/guides/a.md#b), ![c d](docs/c.svg), [e](https://e.test/f), [g](#h)"
    )
    with tarfile.open(build("build_sdist", copy, tmp_path / "out")) as archive:
        member = archive.extractfile(f"{source.name}/PKG-INFO")
        assert member is not None
        shown = member.read().decode().partition("\n\n")[2]
    base = "https://x.test/tree"
    links = (
        f"[a]({base}/guides/a.html#b), ![c d]({base}/_images/c.svg), [e](https://e.test/f), [g](#h)"
    )
    assert shown.strip() == f"# shardio\n{links}"


def test_the_core_is_looked_for_where_homebrew_installs(source: Path, tmp_path: Path) -> None:
    wanted = [tmp_path / "opt" / "jpeg-turbo", tmp_path / "opt" / "xxhash", tmp_path]
    for keg in wanted:
        for folder in ("include", "lib"):
            (keg / folder).mkdir(parents=True)
    script = (
        "import setuptools, sys\n"
        "sys.argv = ['setup.py', '--version']\n"
        "import runpy; made = runpy.run_path('setup.py')\n"
        "for sys.platform in ('darwin', 'linux'):\n"
        "    command = made['BuildCore'](setuptools.Distribution())\n"
        "    command.finalize_options()\n"
        "    print(*command.include_dirs, '|', *command.library_dirs)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script],
        cwd=source,
        env={**os.environ, "HOMEBREW_PREFIX": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    mac, linux = found.stdout.splitlines()[-2:]
    includes, libraries = mac.split("|")
    places = [text.split() for text in (includes, libraries)]
    for folder, place in zip(("include", "lib"), places, strict=True):
        kegs = [name for name in place if name.startswith(str(tmp_path))]
        assert kegs == [str(keg / folder) for keg in wanted]
    assert str(tmp_path) not in linux


def test_an_editable_install_is_a_path_entry(tree: Path, tmp_path: Path) -> None:
    made = build("build_editable", tree, tmp_path / "out")
    with zipfile.ZipFile(made) as wheel:
        names = [name for name in wheel.namelist() if ".dist-info/" not in name]
        (entry,) = names  # no import hook beside it
        assert entry.endswith(".pth")
        assert wheel.read(entry).decode().split() == [str(tree)]


def test_the_wheel_is_called_shardio_torch(source: Path, tmp_path: Path) -> None:
    made = build("build_wheel", source, tmp_path / "out")
    assert made.name.startswith("shardio_torch-")
    with zipfile.ZipFile(made) as wheel:
        folders = {name.partition("/")[0] for name in wheel.namelist()}
        (info,) = folders - {"shardio"}
        assert wheel.read(f"{info}/METADATA").decode().count("\nName: shardio-torch\n") == 1
        assert b"shardio = shardio.cli.main:main" in wheel.read(f"{info}/entry_points.txt")
        assert not [name for name in wheel.namelist() if name.endswith((".c", ".h"))]
        assert "shardio/py.typed" in wheel.namelist()
        for name in ("static/viewer.css", "static/viewer.js", "templates/base.html"):
            assert f"shardio/viewer/{name}" in wheel.namelist()


def chosen(folder: Path) -> str:
    """Name the wheel in a folder that pip would install here."""
    command = [*(sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "-q")]
    command += ["--no-deps", "--no-index", "--find-links", str(folder), "--report", "-"]
    said = subprocess.run([*command, "shardio-torch"], capture_output=True, check=True)
    (one,) = json.loads(said.stdout)["install"]
    return str(one["download_info"]["url"]).rpartition("/")[2]


def test_pip_takes_the_pure_wheel_only_where_no_other_fits(source: Path, tmp_path: Path) -> None:
    pure = build("build_wheel", source, tmp_path / "pure", "--pure")
    assert pure.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(pure) as wheel:
        (about,) = [name for name in wheel.namelist() if name.endswith(".dist-info/WHEEL")]
        assert b"Root-Is-Purelib: true" in wheel.read(about)
    assert chosen(pure.parent) == pure.name
    other = build("build_wheel", source, tmp_path / "platform")
    shutil.copy(other, pure.parent)
    assert chosen(pure.parent) == other.name != pure.name


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
        cwd=tmp_path,
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
