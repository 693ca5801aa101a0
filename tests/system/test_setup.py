"""The set-up: exact releases that every Python can have, and the demo on a stock Debian."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
CONSTRAINTS = ROOT / "tools" / "constraints.txt"
# The oldest Python of each line that a distribution ships: Ubuntu 22.04, Debian 12, Ubuntu 24.04,
# Debian 13; and the newest.
PYTHONS = ("3.10.12", "3.11.2", "3.12.3", "3.13.5", "3.14.0")
OF_TESTS = ("chromium", "zsh", "fish", "nginx", "sshd", "sshfs")


@pytest.mark.parametrize("python", PYTHONS)
def test_the_exact_releases_can_be_installed_with_every_python(python: str, tmp_path: Path) -> None:
    uv = shutil.which("uv", path=os.path.dirname(sys.executable)) or shutil.which("uv")
    if uv is None:
        pytest.skip("NOT TESTED: uv is not there: tools/setup")
    command = [uv, "--no-config", "--cache-dir", tmp_path / "cache", "pip", "compile", "--quiet"]
    command += ["--python-version", python, "--all-extras", "--constraint", CONSTRAINTS]
    done = subprocess.run([*command, ROOT / "pyproject.toml"], capture_output=True, text=True)
    if done.returncode and "Failed to fetch" in done.stderr:
        pytest.skip("NOT TESTED: no package index can be reached")
    assert done.returncode == 0, done.stderr
    assert "torch==2.13.0\n" in done.stdout


# --- a bare Debian --------------------------------------------------------------------------------


@pytest.fixture
def debian(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The root of a bare Debian, of the release that is asked for, with this tree in /src."""
    if os.geteuid() or not shutil.which("debootstrap"):
        pytest.skip("NOT TESTED: a bare Debian takes root and debootstrap: tools/setup, as root")
    root, mounts = tmp_path / "root", contextlib.ExitStack()
    packages = "--include=git,python3,python3-venv,ca-certificates"
    made = subprocess.run(
        ["debootstrap", "--variant=minbase", packages, request.param, root],
        capture_output=True,
        text=True,
    )
    if made.returncode and "retrieving InRelease" in made.stdout:
        pytest.skip("NOT TESTED: no mirror of Debian can be reached")
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    with mounts:

        def mount(what: str, *options: str) -> None:
            where = root / what.lstrip("/")
            where.mkdir(parents=True, exist_ok=True)
            subprocess.run(["mount", *options, str(where)], check=True)
            mounts.callback(subprocess.run, ["umount", "--lazy", str(where)], check=True)

        mount("/proc", "-t", "proc", "proc")
        mount("/dev", "--rbind", "/dev")
        subprocess.run(["mount", "--make-rslave", root / "dev"], check=True)
        for folder in os.environ.get("PIP_FIND_LINKS", "").split():  # of this machine's own wheels
            if os.path.isdir(folder):
                mount(folder, "--bind", "-o", "ro", folder)
        for name in ("etc/pip.conf", "etc/resolv.conf", "etc/hosts", *certificates()):
            if os.path.isfile(f"/{name}"):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(f"/{name}", root / name)
        subprocess.run(
            ["git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", root / "src"], check=True
        )
        for path in changed():  # what is not committed yet is tested, too
            (root / "src" / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, root / "src" / path)
        yield root
    shutil.rmtree(root)


def certificates() -> Iterator[str]:
    for name in ("PIP_CERT", "SSL_CERT_FILE"):
        if name in os.environ:
            yield os.environ[name].lstrip("/")


def changed() -> list[str]:
    command = ["git", "ls-files", "--modified", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in listed.stdout.splitlines() if (ROOT / path).is_file()]


@pytest.mark.slow
@pytest.mark.parametrize("debian", ["bookworm", "trixie"], indirect=True)
def test_the_demo_runs_on_a_bare_debian_and_installs_what_it_needs(debian: Path) -> None:
    given = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    environment = given | {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "TERM": "dumb"}
    began = time.monotonic()
    done = subprocess.run(
        ["chroot", debian, "/src/tools/demo", "--seconds", "1"],
        env=environment,
        capture_output=True,
        text=True,
    )
    print(f"{time.monotonic() - began:.0f} s:\n{done.stdout}\n{done.stderr}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "pillow-simd" in done.stdout and "in memory" in done.stdout
    for name in OF_TESTS:
        for folder in ("usr/bin", "usr/sbin"):
            assert not (debian / folder / name).exists(), name
    packages = debian / "src" / ".venv" / "lib"
    assert not list(packages.glob("python3*/site-packages/pytest"))
