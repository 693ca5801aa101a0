"""The image folder as one SquashFS image, mounted by the kernel; read as a folder is.

Made by `mksquashfs` with its defaults, which leave blocks that do not shrink as they are; but a
photograph that is there twice is stored twice, as everywhere else. Mounted through a loop device,
in a mount namespace of the process that reads, so that it goes with it. HPC centres mount them so
beside a container (`singularity exec -B data.squashfs:/data:image-src=/`).
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from typing import Any

from . import folder as plain

NEW_NAMESPACE = 0x00020000  # CLONE_NEWNS
MOUNTED = "/mnt"

_mounted: tuple[str, int] | None = None  # the image, and when it was changed


def write(folder: str, out: str) -> None:
    _run("mksquashfs", folder, out, "-quiet", "-no-progress", "-no-duplicates", "-processors", "2")
    _mount(out)  # where it cannot be, this fails, and says why


def images(path: str, *, size: int, batch: int, workers: int) -> Iterator[Any]:
    return plain.images(_mount(path), size=size, batch=batch, workers=workers)


def records(path: str) -> Iterator[bytes]:
    return plain.records(_mount(path))


def _mount(path: str) -> str:
    """Mount the image for this process and its children alone; anew when it has changed."""
    global _mounted
    image = (path, os.stat(path).st_mtime_ns)
    if _mounted == image:
        return MOUNTED
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_NAMESPACE):
        raise OSError(ctypes.get_errno(), "no mount namespace of its own: that takes root")
    _run("mount", "--make-rprivate", "/")
    if _mounted:
        _run("umount", MOUNTED)
    _run("mount", "-t", "squashfs", "-o", "loop,ro", path, MOUNTED)
    _mounted = image
    return MOUNTED


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
