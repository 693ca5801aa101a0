"""Make an environment on a GPU machine, without a change to what is installed there.

Wheels that it lacks are installed into a folder of their own, which stands first on PYTHONPATH. The
core is built in the tree.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

from . import limited

ROOT = Path(__file__).resolve().parent.parent.parent
WORK = ROOT / "build" / "gpu-check"
LISTING = "collected.txt"  # of what `collect` put into a folder
OTHER_NAMES = {"pillow": "pillow-simd"}  # the same package, of another distribution
INSTALL_S, BUILD_S = 120.0, 180.0
CORE = "from shardio import native as n; print(n.described()); raise SystemExit(n.core is None)"


def variables(site: Path) -> dict[str, str]:
    """Return the environment of a part: the site folder first, then the tree."""
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = dict.fromkeys([str(site), str(ROOT), *filter(None, before)])
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def prepare(carried: Path | None, log: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Install what is missing, and build the core. Returns the parts' environment, and the facts.

    carried: the folder that `collect` filled; None: nothing is installed.
    """
    site = WORK / f"site-{sys.implementation.cache_tag}"
    facts: dict[str, Any] = {"python": sys.version.split()[0], "executable": sys.executable}
    if carried:
        listing = carried / LISTING
        facts["collected"] = (
            listing.read_text().splitlines()[0] if listing.exists() else "not known"
        )
        facts["wheels"] = install(carried / "wheels", site, log)
    env = variables(site)
    facts["core"] = build_core(carried and carried / "libraries", env, log)
    return env, facts


def commit() -> str:
    """Return the commit of the tree; "" where git does not know it."""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


# --- wheels ---------------------------------------------------------------------------------------


def install(wheels: Path, site: Path, log: Path) -> dict[str, str]:
    """Install wheels that this Python lacks into `site`. Returns what was done with each."""
    least = least_versions((ROOT / "pyproject.toml").read_text("utf-8"))
    done, wanted = {}, []
    for wheel in sorted(wheels.glob("*.whl")):
        name, version = _named(wheel)
        if there := _there(name, least.get(name, "0")):
            done[name] = f"{there} is here already"
        else:
            done[name] = f"{version} installed"
            wanted.append(wheel)
    stamp = site / "wheels.txt"
    listing = "".join(f"{wheel.name}\n" for wheel in wanted)
    if not wanted or (stamp.exists() and stamp.read_text() == listing):
        return done
    shutil.rmtree(site, ignore_errors=True)
    command = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", str(site)),
        *map(str, wanted),
    ]
    ended = limited.run(command, INSTALL_S, log, env=os.environ | {"PYTHONPATH": ""})
    if ended.why:
        shutil.rmtree(site, ignore_errors=True)
        failed = f"NOT installed, pip: {_last_line(ended.tail) or ended.why}"
        return done | {_named(wheel)[0]: failed for wheel in wanted}
    stamp.write_text(listing)
    return done


def least_versions(pyproject: str) -> dict[str, str]:
    """Return the least version of each distribution that pyproject.toml names with one."""
    found = re.findall(r'"([A-Za-z0-9-]+)(?:\[[^]]*\])?>=([0-9.]+)', pyproject)
    return {name.lower(): version for name, version in found}


def _named(wheel: Path) -> tuple[str, str]:
    """Return the distribution and the version of a wheel."""
    name, version = wheel.name.split("-")[:2]
    return canonical(name), version


def canonical(name: str) -> str:
    """Return the name of a distribution as all of its spellings have it in common."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _there(name: str, least: str) -> str:
    """Return the version of a distribution that this Python has; "" if it has none, or an older."""
    for one in filter(None, (name, OTHER_NAMES.get(name))):
        try:
            version = metadata.version(one)
        except metadata.PackageNotFoundError:
            continue
        if _numbers(version) >= _numbers(least):
            return version
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


# --- the core -------------------------------------------------------------------------------------


def build_core(libraries: Path | None, env: dict[str, str], log: Path) -> dict[str, Any]:
    """Build the core in the tree if there is none. Returns whether it is there, and why not.

    libraries: what tools/wheel-libraries made; None: the headers of the system.
    """
    ended = _ask(env, log)
    if not ended.why:
        return {"there": True, "what": _last_line(ended.tail)}
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return {"there": False, "what": "not built: there is no C compiler (cc, gcc, clang) here"}
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        about = f"not built: the headers of Python are not in {sysconfig.get_path('include')}"
        return {"there": False, "what": about}
    flags = {"CC": compiler}
    if libraries:
        flags |= {"CFLAGS": f"-I{libraries / 'include'}", "LDFLAGS": f"-L{libraries / 'lib'}"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    build = limited.run(command, BUILD_S, log, env=env | flags, cwd=ROOT)
    ended = _ask(env, log)
    if not ended.why:
        return {"there": True, "what": _last_line(ended.tail), "build_s": round(build.seconds, 1)}
    error = re.search(r"^.*\berror\b.*$", build.tail, re.M | re.I)
    why = error[0].strip() if error else build.why or _last_line(ended.tail)
    return {"there": False, "what": f"not built: {why}", "build_s": round(build.seconds, 1)}


def _ask(env: dict[str, str], log: Path) -> limited.Ended:
    """Ask a process of its own whether the core is there: this one may have none of its wheels."""
    return limited.run([sys.executable, "-W", "ignore", "-c", CORE], 60, log, env=env, cwd=ROOT)


def _last_line(text: str) -> str:
    return next(filter(None, map(str.strip, reversed(text.splitlines()))), "")
