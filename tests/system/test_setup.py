"""The set-up: exact releases that every Python can have, and the demo on a stock Debian."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.trees import ROOT

CONSTRAINTS = ROOT / "tools" / "constraints.txt"
# The oldest Python of each line that a distribution ships: Ubuntu 22.04, Debian 12, Ubuntu 24.04,
# Debian 13; and the newest.
PYTHONS = (
    "3.10.12",
    *(pytest.param(one, marks=pytest.mark.slow) for one in ("3.11.2", "3.12.3", "3.13.5")),
    "3.14.0",
)
OF_TESTS = ("chromium", "zsh", "fish", "nginx", "sshd", "sshfs")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uv")


@pytest.mark.parametrize("python", PYTHONS)
def test_the_exact_releases_can_be_installed_with_every_python(python: str, cache: Path) -> None:
    uv = shutil.which("uv", path=os.path.dirname(sys.executable)) or shutil.which("uv")
    if uv is None:
        pytest.skip("NOT TESTED: uv is not there: tools/setup")
    command = [uv, "--no-config", "--cache-dir", cache, "pip", "compile", "--quiet"]
    command += ["--python-version", python, "--all-extras", "--constraint", CONSTRAINTS]
    done = subprocess.run([*command, ROOT / "pyproject.toml"], capture_output=True, text=True)
    if done.returncode and re.search("Failed to fetch|sending request|dns error", done.stderr):
        pytest.skip("NOT TESTED: no package index can be reached")
    assert done.returncode == 0, done.stderr
    assert "torch==2.13.0\n" in done.stdout


# --- a bare Debian --------------------------------------------------------------------------------

# In a mount namespace of its own: however this ends, the mounts end with it, and what removes the
# folder never meets them.
IN_CHROOT = """
set -eu
root=$1; shift
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
for folder in ${PIP_FIND_LINKS-}; do  # of this machine's own wheels
    [ -d "$folder" ] || continue
    mkdir -p "$root$folder"
    mount --bind "$folder" "$root$folder"
    mount -o remount,bind,ro "$root$folder"
done
exec chroot "$root" "$@"
"""


@pytest.fixture
def debian(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The root of a bare Debian, of the release that is asked for, with this tree in /src."""
    if os.geteuid() or not shutil.which("debootstrap"):
        pytest.skip("NOT TESTED: a bare Debian takes root and debootstrap: tools/setup, as root")
    root = tmp_path / "root"
    packages = "--include=git,python3,python3-venv,ca-certificates"
    try:
        made = subprocess.run(
            ["debootstrap", "--variant=minbase", packages, request.param, root],
            capture_output=True,
            text=True,
        )
        if made.returncode and "retrieving InRelease" in made.stdout:
            pytest.skip("NOT TESTED: no mirror of Debian can be reached")
        assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
        certificates = [os.environ[n] for n in ("PIP_CERT", "SSL_CERT_FILE") if n in os.environ]
        for name in ("/etc/pip.conf", "/etc/resolv.conf", "/etc/hosts", *certificates):
            if os.path.isfile(name):
                where = root / name.lstrip("/")
                where.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(name, where)
        for path in listed():  # what is not committed yet, too
            where = root / "src" / path
            where.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, where)
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def listed() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in done.stdout.splitlines() if (ROOT / path).is_file()]


# On trixie pip takes the wheel of torch that PyPI has, which brings CUDA along: 3 GB.
@pytest.mark.slow
@pytest.mark.parametrize("debian", ["bookworm", "trixie"], indirect=True)
def test_the_demo_runs_on_a_bare_debian_and_installs_what_it_needs(debian: Path) -> None:
    given = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    environment = given | {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "TERM": "dumb"}
    namespace = ["unshare", "--mount", "--propagation", "private", "sh", "-c", IN_CHROOT, "sh"]
    done = subprocess.run(
        [*namespace, debian, "/src/tools/demo", "--seconds", "1"],
        env=environment,
        capture_output=True,
        text=True,
    )
    print(done.stdout, done.stderr)  # the seconds of each step
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "pillow-simd" in done.stdout and "in memory" in done.stdout
    for name in OF_TESTS:
        for folder in ("usr/bin", "usr/sbin"):
            assert not (debian / folder / name).exists(), name
    packages = debian / "src" / ".venv" / "lib"
    assert not list(packages.glob("python3*/site-packages/pytest"))
