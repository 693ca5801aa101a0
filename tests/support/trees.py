"""Folders to pack, packed directories to compare, and the command line: what packing tests share.

Packing looks at the first bytes of an image only, so most files here are a signature and noise.
"""

import compileall
import errno
import fcntl
import functools
import hashlib
import io
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from support import LIMIT_S, command_server, warm_python

ROOT = Path(__file__).resolve().parent.parent.parent
JPEG = b"\xff\xd8\xff\xe0"
Tree = Mapping[str | bytes, bytes | None]  # key to content; None: an empty folder


def noise(name: str | bytes, size: int) -> bytes:
    """`size` bytes that begin as a JPEG does and differ by name."""
    return JPEG + hashlib.shake_128(os.fsencode(name)).digest(max(0, size - len(JPEG)))


@functools.cache
def picture(width: int, height: int, kind: str = "JPEG") -> bytes:
    """A real image file."""
    out = io.BytesIO()
    Image.radial_gradient("L").resize((width, height)).convert("RGB").save(out, kind)
    return out.getvalue()


def plant(root: Path, tree: Tree) -> Path:
    """Write a tree of files; times of change are fixed, so that equal trees are equal sources."""
    base = os.fsencode(root)
    os.makedirs(base, exist_ok=True)
    for key, content in tree.items():
        path = os.path.join(base, os.fsencode(key))
        if content is None:
            os.makedirs(path, exist_ok=True)
            continue
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            with open(path, "wb") as file:
                file.write(content)
        except OSError as error:
            if error.errno != errno.EILSEQ:
                raise
            pytest.skip("this file system takes only UTF-8 names")
        os.utime(path, ns=(10**18, 10**18))
    return root


def images(classes: int = 3, each: int = 8, size: int = 300) -> dict[str | bytes, bytes | None]:
    """Class folders of files, no two of one size."""
    keys = [f"class{c}/{i:03d}.jpg" for c in range(classes) for i in range(each)]
    return {key: noise(key, size + i) for i, key in enumerate(keys)}


def grouped_files(count: int = 12) -> dict[str | bytes, bytes | None]:
    """Records of three files that differ in their endings."""
    tree: dict[str | bytes, bytes | None] = {}
    for i in range(count):
        tree[f"{i:03d}.jpg"] = noise(f"{i}", 300 + i)
        tree[f"{i:03d}.txt"] = f"caption {i}".encode()
        tree[f"{i:03d}.cls"] = b"%d\n" % (i % 3)
    return tree


def content(root: Path | str) -> dict[bytes, bytes | None]:
    """All that lies below a folder: files with their bytes, folders as None."""
    base = os.fsencode(root)
    found: dict[bytes, bytes | None] = {}
    for folder, names, files in os.walk(base):
        for name in (*names, *files):
            path = os.path.join(folder, name)
            key = os.path.relpath(path, base)
            if os.path.isdir(path) and not os.path.islink(path):
                found[key] = None
            else:
                with open(path, "rb") as file:
                    found[key] = file.read()
    return found


def shards(out: Path) -> list[Path]:
    return sorted(out.glob("*.shard"))


def command(*arguments: str | bytes | Path) -> list[str | bytes]:
    return [
        sys.executable,
        "-W",
        "error",
        "-m",
        "shardio",
        *(os.fspath(a) for a in arguments),
    ]


def warm_command(*arguments: str | bytes | Path) -> list[str]:
    """Return a command line that is a fork of a process that has shardio; see warm_python.Process.

    For what is not about how a command starts.
    """
    words = map(os.fsdecode, arguments)
    return warm_python.command("-W", "error", "-m", "shardio", *words, kind="shardio")


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(
        [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **more}


def compile_package() -> None:
    """Compile all modules, so that two runs of a program make the same calls, by their number.

    One that another process compiles between the runs is an `openat` less in the second.
    """
    compileall.compile_dir(ROOT / "shardio", quiet=2)


def on_a_terminal(*arguments: str | Path, size: int = 1 << 16, **variables: str) -> tuple[int, str]:
    """Exit code, and what a person sees, without colours. variables: of the environment."""
    env = environment(**{"NO_COLOR": "1", "TERM": "xterm"} | variables)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    process = subprocess.Popen(
        warm_command(*arguments), stdin=theirs, stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    seen = b""
    try:
        while part := os.read(ours, size):
            seen += part
    except OSError:  # Linux says EIO where the other side is closed
        pass
    os.close(ours)
    return process.wait(timeout=LIMIT_S), seen.decode()


def shardio(
    *arguments: str | bytes | Path, code: int | None = 0, warm: bool = True, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run the command line; no outcome may be a traceback.

    With options of `subprocess.run`, but for `text`, it is a `warm_command`; else see
    command_server. warm: False: it starts as a user's does.
    """
    done: subprocess.CompletedProcess[Any]
    if warm and options.keys() <= {"text"}:
        found, *said = command_server.run(arguments, environment())
        if options.get("text", True):
            said = [io.TextIOWrapper(io.BytesIO(one)).read() for one in said]
        done = subprocess.CompletedProcess(arguments, found, *said)
    else:
        options = {"text": True, "timeout": 60, "env": environment()} | options
        line = (warm_command if warm else command)(*arguments)
        done = subprocess.run(line, capture_output=True, **options)
    assert "Traceback" not in str(done.stderr), done.stderr
    if code is not None:
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done


def shardio_json(*arguments: str | bytes | Path, code: int = 0) -> Any:
    """The one JSON object that a command prints. It has no NaN, which other parsers refuse."""
    return json.loads(shardio(*arguments, "--json", code=code).stdout, parse_constant=pytest.fail)
