"""A home, a temporary directory and caches of their own for programs of others.

Such a program may do there as it likes: LitData's `optimize` empties `$TMPDIR/data` and
`$TMPDIR/chunks`, and others fill caches. It runs in environments without shardio, too, so that it
needs Python alone:

    subprocess.run(program, env={**os.environ, **own_home.variables(folder)})
    own_home.enter()  # this process, before it imports what looks where its home is
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

_CACHES = (
    *("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_HOME"),
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "MPLCONFIGDIR", "npm_config_cache"),
)


def variables(folder: str | Path) -> dict[str, str]:
    """Make the places in a folder, which the caller removes; return the variables that name them.

    The folder's path should be short: sockets in the temporary directory have at most 107 bytes.
    """
    home, temporary = (os.path.join(folder, name) for name in ("home", "tmp"))
    for path in (home, temporary):
        os.makedirs(path, exist_ok=True)
    caches = {name: os.path.join(home, ".cache", name.lower()) for name in _CACHES}
    return {"HOME": home, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), temporary), **caches}


def enter() -> None:
    """Give them to this process and all that it starts; they are removed when it ends."""
    folder, process = tempfile.mkdtemp(prefix="home-"), os.getpid()
    os.environ.update(variables(folder))
    tempfile.tempdir = None  # it is looked up again

    @atexit.register
    def remove() -> None:
        if os.getpid() == process:  # not a fork of it
            shutil.rmtree(folder, ignore_errors=True)
