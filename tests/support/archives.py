"""Archives of small trees, in every form that is packed."""

import bz2
import gzip
import io
import lzma
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import zstandard

from support.trees import JPEG, Tree

WHEN = 10**9  # seconds: the time of change of each member


def tar(tree: Tree, top: str = "", form: int = tarfile.PAX_FORMAT) -> bytes:
    """A tar of a tree; top: of a folder that all of it lies in, with a slash, or "./"."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as file:
        for key, data in tree.items():
            info = tarfile.TarInfo(top + os.fsdecode(key))
            info.mtime = WHEN
            if data is None:
                info.type = tarfile.DIRTYPE
            else:
                info.size = len(data)
            file.addfile(info, io.BytesIO(data or b""))
    return out.getvalue()


FILE, HARD, SOFT, FOLDER = tarfile.REGTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE


def members(*some: tuple[str, bytes | None, bytes, str]) -> bytes:
    """A tar of these: name, content or None, kind, where it leads."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as file:
        for name, data, kind, target in some:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, target, len(data or b"")
            file.addfile(info, io.BytesIO(data or b""))
    return out.getvalue()


def links(*some: tuple[str, bytes, str]) -> bytes:
    """A tar of two images, and of links and other members without content."""
    images = ((name, JPEG + name.encode(), FILE, "") for name in ("a/1.jpg", "b/2.jpg"))
    return members(*images, *((name, None, kind, target) for name, kind, target in some))


def zipped(
    tree: Tree, top: str = "", way: int = zipfile.ZIP_STORED, *, large: bool = False
) -> bytes:
    """A zip of a tree; large: each member as if it might have over 4 GiB."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", way) as file:
        for key, data in tree.items():
            name = top + os.fsdecode(key)
            if data is None:
                file.writestr(zipfile.ZipInfo(name + "/"), b"")
                continue
            info = zipfile.ZipInfo(name)
            info.compress_type = way
            with file.open(info, "w", force_zip64=large) as member:
                member.write(data)
    return out.getvalue()


def class_tars(tree: Tree) -> dict[str | bytes, bytes | None]:
    """A tar for each class folder, of what lies in it."""
    names = sorted({os.fsencode(key).partition(b"/")[0] for key in tree} - {b"__MACOSX"})
    return {
        name + b".tar": tar(
            {
                os.fsencode(key)[len(name) + 1 :]: data
                for key, data in tree.items()
                if os.fsencode(key).startswith(name + b"/")
            }
        )
        for name in names
    }


def deflated(tree: Tree, top: str = "") -> bytes:
    return zipped(tree, top, zipfile.ZIP_DEFLATED)


# By the name of the file; all of them are the same tree.
FORMS: dict[str, Callable[[Tree], bytes]] = {
    "gnu.tar": lambda tree: tar(tree, form=tarfile.GNU_FORMAT),
    "pax.tar": tar,
    "ustar.tar": lambda tree: tar(tree, form=tarfile.USTAR_FORMAT),
    "dot.tar": lambda tree: tar({".": None}, "")[:512] + tar(tree, "./"),
    "wrapped.tar": lambda tree: tar(tree, "data/"),
    "wrapped_twice.tar": lambda tree: tar(tree, "data/of mine/"),
    "a.tar.gz": lambda tree: gzip.compress(tar(tree), 1),
    "a.tgz": lambda tree: gzip.compress(tar(tree)[:5000]) + gzip.compress(tar(tree)[5000:]),
    "a.tar.bz2": lambda tree: bz2.compress(tar(tree, "data/")),
    "a.tar.xz": lambda tree: lzma.compress(tar(tree)),
    "a.tar.zst": lambda tree: zstandard.compress(tar(tree)),
    "pzstd.tar.zst": lambda tree: b"P*M\x18\4\0\0\0size" + zstandard.compress(tar(tree)),
    "stored.zip": zipped,
    "deflated.zip": deflated,
    "zip64.zip": lambda tree: zipped(tree, large=True),
    "wrapped.zip": lambda tree: deflated(tree, "data/"),
    "behind a program.zip": lambda tree: b"#!/bin/sh\n" * 9 + zipped(tree),
    "of class tars.tar": lambda tree: tar(class_tars(tree)),
    "of class tars, wrapped.zip": lambda tree: deflated(class_tars(tree), "train of mine/"),
    "of a tgz.zip": lambda tree: zipped({"inner.tgz": gzip.compress(tar(tree, "data/"))}),
    "of a zip.zip": lambda tree: deflated({"inner.zip": deflated(tree)}),
    "of a tar.tar.xz": lambda tree: lzma.compress(tar({"deep/er/inner.tar": tar(tree)})),
}


def write(path: Path, data: bytes) -> Path:
    """Write an archive, whose time of change is always the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, ns=(10**18, 10**18))
    return path
