"""Collect into a folder what a GPU machine without a network lacks. torch is never among it.

The folder then holds:

    wheels/      for its Python, on Linux x86-64; one that it has already is not installed there
    libraries/   libjpeg-turbo and the header of xxHash, to build the core
    data/        a part of the benchmarks' images, in archives of the same names
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.data import CIFAR, DEFAULT, PHOTOS

from .environment import LISTING, ROOT, canonical, commit

# What pyproject.toml names and a torch may come without. numpy comes with it nearly always.
NEEDED = ("lmdb", "msgpack", "xxhash", "tqdm", "shtab", "jinja2", "markupsafe", "pillow")
BUILDING = ("setuptools",)
TESTING = (
    *("pytest", "iniconfig", "pluggy", "packaging", "pygments"),
    *("hypothesis", "sortedcontainers"),
)
DECODING = ("nvidia-nvimgcodec-cu{cuda}", "nvidia-nvjpeg{cuda_12}", "torchcodec")
# torchcodec's first release with decode_jpeg, and the first torch of it and of all newer ones.
# Releases up to 0.11 are for one torch each. Source: README.md and _core/CMakeLists.txt of 0.17,
# decoders/__init__.py of 0.15 and 0.16.
DECODE_JPEG, ITS_TORCH = "0.16", (2, 11)
OLDER_TORCHCODEC = {
    **{(2, 10): "0.10", (2, 9): "0.9", (2, 8): "0.7", (2, 7): "0.5", (2, 6): "0.2"},
    **{(2, 5): "0.1", (2, 4): "0.0.3"},
}
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 16, -1)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]
MOST_CIFAR = 10_000
CIFAR_SHARE = 0.25  # of the bytes that are left for images
MIB = 2**20


class CollectError(Exception):
    """What the user can mend: printed without a traceback."""


class Row(NamedTuple):
    """One row of the table of what went in."""

    what: str
    size: int
    about: str


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools/gpu-check collect", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of the GPU machine; default: %(default)s")
    parser.add_argument("--cuda", default="13", help="major version there; default: %(default)s")
    parser.add_argument(
        "--limit", default="40MiB", help="of the whole folder; images fill what is left"
    )
    parser.add_argument(
        "--data", type=Path, default=DEFAULT, help="folder of the benchmarks' archives"
    )
    parser.add_argument(
        "--without", nargs="+", default=[], metavar="NAME", help="wheels to leave out"
    )
    parser.add_argument(
        "--without-present", type=Path, metavar="LISTING",
        help="leave out what is there: a file with what `pip list` or `pip freeze` prints there",
    )  # fmt: skip
    parser.add_argument(
        "--torch", metavar="VERSION",
        help="of the GPU machine, for a torchcodec that fits; default: that of --without-present",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    left_out = []
    try:
        if not re.fullmatch(r"3\.\d+", options.python):
            raise CollectError(f"--python is {options.python!r}: expected a version like 3.12")
        there = present(options.without_present) if options.without_present else {}
        wheels = [one for one in wanted(options.cuda, options.without) if one not in there]
        if "torchcodec" in wheels:
            asked, why = torchcodec_for(options.torch or there.get("torch", ""))
            at = wheels.index("torchcodec")
            wheels[at : at + 1] = [asked] * bool(asked)
            left_out = [Row("torchcodec", 0, f"left out: {why}")] * bool(why)
        rows = collect(
            options.folder.resolve(),
            wheels=wheels,
            python=options.python,
            limit=size_of(options.limit),
            data=options.data,
        )
    except CollectError as error:
        print(f"gpu-check collect: {error}", file=sys.stderr)
        return 1
    said = table([*rows, *left_out], size_of(options.limit))
    (options.folder / LISTING).write_text(f"commit {commit()}, Python {options.python}\n{said}\n")
    print(said)
    return 0


def collect(
    folder: Path, *, wheels: Sequence[str], python: str, limit: int, data: Path
) -> list[Row]:
    """Fill the folder, and return what went in. What was there before stays."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = collect_wheels(folder / "wheels", wheels, python)
    rows.append(collect_libraries(folder / "libraries"))
    left = limit - sum(row.size for row in rows)
    if left < 0:
        heavy = ", ".join(
            f"{row.what} {row.size / MIB:.1f}" for row in sorted(rows, key=_size)[-4:]
        )
        raise CollectError(
            f"wheels and libraries are {(limit - left) / MIB:.1f} MiB, the limit is "
            f"{limit / MIB:.1f} MiB; the largest, in MiB: {heavy}. Raise --limit, or leave some "
            "out by --without"
        )
    (folder / "data").mkdir(exist_ok=True)
    small = thin(data / CIFAR, folder / "data" / CIFAR, int(CIFAR_SHARE * left), MOST_CIFAR)
    rows.append(small)
    rows.append(thin(data / PHOTOS, folder / "data" / PHOTOS, left - small.size, None))
    return rows


def _size(row: Row) -> int:
    return row.size


# --- wheels ---------------------------------------------------------------------------------------


def wanted(cuda: str, without: Sequence[str]) -> list[str]:
    """Return the distributions to collect."""
    decoding = [
        name.format(cuda=cuda, cuda_12="-cu12" if cuda == "12" else "") for name in DECODING
    ]
    every = [*NEEDED, *BUILDING, *TESTING, *decoding]
    if unknown := set(without) - set(every):
        raise CollectError(f"--without {min(unknown)}: there are {', '.join(every)}")
    return [name for name in every if name not in without]


def torchcodec_for(torch: str) -> tuple[str, str]:
    """Return what pip is asked for, of torchcodec; or "", and why none that fits decodes JPEGs.

    torch: its version on the GPU machine, such as 2.11.0+cu130; "": not known.
    """
    newest = f"torchcodec>={DECODE_JPEG}"
    if not torch:
        return newest, ""
    found = re.match(r"(\d+)\.(\d+)", torch)
    if not found:
        raise CollectError(f"--torch is {torch!r}: expected a version like 2.11.0 or 2.11.0+cu130")
    version = int(found[1]), int(found[2])
    if version >= ITS_TORCH:
        return newest, ""
    fits = OLDER_TORCHCODEC.get(version)
    if fits is None:
        return "", f"no torchcodec fits torch {found[0]}"
    return "", f"torchcodec {fits}, which fits torch {found[0]}, has no decode_jpeg"


def present(listing: Path) -> dict[str, str]:
    """Return what a listing of pip names, as `wanted` writes it, with its version if it is told."""
    try:
        lines = listing.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CollectError(f"--without-present {listing}: {error}") from error
    names = {
        canonical(found[1]): found[2] or ""
        for line in lines
        if (found := re.match(r"([A-Za-z0-9][\w.-]*)(?:(?:==| +)(\d\S*)| @ )", line))
    }
    if "pip" not in names and "torch" not in names:
        raise CollectError(
            f"--without-present {listing}: neither pip nor torch is in it; expected what "
            "`pip list` or `pip freeze` prints on the GPU machine"
        )
    return names


def collect_wheels(folder: Path, names: Sequence[str], python: str) -> list[Row]:
    """Download a wheel of each distribution, of the release in tools/constraints.txt."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--only-binary=:all:", "--python-version", python),
        *("--implementation", "cp", "--constraint", str(ROOT / "tools" / "constraints.txt")),
        *(word for platform in PLATFORMS for word in ("--platform", platform)),
        *("--dest", str(folder), *names),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line] or ["no message"]
        raise CollectError(f"pip for Python {python}: {errors[0]}")
    rows = []
    for wheel in sorted(folder.glob("*.whl")):
        name, version = wheel.name.split("-")[:2]
        about = slim(wheel, python) if name.startswith("nvidia_nvimgcodec") else ""
        rows.append(Row(name.lower(), wheel.stat().st_size, f"{version}{about}"))
    return rows


def slim(wheel: Path, python: str) -> str:
    """Leave the modules for other Pythons, and the decoders of other formats, out of nvImageCodec.

    It has 9 Pythons in it and 8 formats: 25 MB, of which 6 are needed here.
    """
    module = f".cpython-{python.replace('.', '')}-"
    before, kept = wheel.stat().st_size, io.BytesIO()
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(kept, "w", zipfile.ZIP_DEFLATED) as part:
        gone = {
            name
            for name in whole.namelist()
            if (".cpython-" in name and module not in name)
            or ("/extensions/lib" in name and "jpeg_" not in name)
        }
        for entry in whole.infolist():
            content = whole.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                lines = content.decode().splitlines(keepends=True)
                content = "".join(x for x in lines if x.split(",")[0] not in gone).encode()
            if entry.filename not in gone:
                part.writestr(entry, content)
    wheel.write_bytes(kept.getvalue())
    return f", of {before / MIB:.1f} MiB: JPEG, Python {python}"


# --- libraries ------------------------------------------------------------------------------------


def collect_libraries(folder: Path) -> Row:
    """Build libjpeg-turbo; without its tools, the core is built there by the headers it finds."""
    done = subprocess.run(
        [str(ROOT / "tools" / "wheel-libraries"), str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Row("libraries", 0, f"NOT THERE: tools/wheel-libraries: {why}")
    for extra in (folder / "bin", folder / "share"):  # programs and manuals
        for path in sorted(extra.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    files = [path for path in folder.rglob("*") if path.is_file()]
    return Row("libraries", sum(one.stat().st_size for one in files), "libjpeg-turbo, xxHash")


# --- images ---------------------------------------------------------------------------------------


def thin(archive: Path, out: Path, limit: int, most: int | None) -> Row:
    """Write every k-th image of an archive into another one that is no larger than the limit."""
    out.unlink(missing_ok=True)
    if not archive.exists():
        return Row(out.name, 0, f"NOT THERE: {archive}; the benchmarks need it, see --data")
    with tarfile.open(archive) as tar:
        images = [(one, _content(tar, one)) for one in tar if one.isreg()]
    count = min(most or len(images), len(images))
    while count:
        chosen = [images[i * len(images) // count] for i in range(count)]
        written = _archive(chosen, out.suffix == ".xz")
        if len(written) <= limit:
            out.write_bytes(written)
            return Row(out.name, len(written), f"{count:,} images of {len(images):,}")
        count = min(count - 1, int(count * limit / len(written)))
    return Row(out.name, 0, f"NOT THERE: no image fits into {limit / MIB:.1f} MiB")


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file
    return file.read()


def _archive(images: Sequence[tuple[tarfile.TarInfo, bytes]], packed: bool) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:xz" if packed else "w") as tar:
        for member, content in images:
            tar.addfile(member, io.BytesIO(content))
    return made.getvalue()


# --- what the user reads --------------------------------------------------------------------------


def size_of(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *(KiB|MiB|GiB|MB|GB)", text)
    if not found:
        raise CollectError(f"--limit is {text!r}: expected a size like 40MiB")
    units = {"KiB": 2**10, "MiB": MIB, "GiB": 2**30, "MB": 10**6, "GB": 10**9}
    return int(float(found[1]) * units[found[2]])


def table(rows: Sequence[Row], limit: int) -> str:
    """Return what went in, as text."""
    total = sum(row.size for row in rows)
    every = [*rows, Row("together", total, f"limit {limit / MIB:.1f} MiB")]
    return "\n".join(_lines(every))


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    width = max(len(row.what) for row in rows)
    for row in rows:
        yield f"{row.what:{width}}  {row.size / MIB:7.2f} MiB  {row.about}"
