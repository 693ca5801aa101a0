"""`unpack` and `export`: what they print, and what they refuse."""

import re
import subprocess
from pathlib import Path

from support.trees import content, shardio


def test_unpack_and_diff(source: Path, out: Path, tmp_path: Path) -> None:
    said = shardio("unpack", out, tmp_path / "back").stdout
    assert "24 files" in said
    done = subprocess.run(["diff", "-r", source, tmp_path / "back"], capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"")
    assert "24 of these were there already" in shardio("unpack", out, tmp_path / "back").stdout
    changed = next((tmp_path / "back").rglob("*.jpg"))
    changed.write_bytes(changed.read_bytes() + b"x")
    shardio("unpack", out, tmp_path / "back", code=1)
    shardio("unpack", out, tmp_path / "back", "--overwrite")
    assert content(tmp_path / "back") == content(source)


def test_a_url_that_is_not_supported_says_what_is(out: Path, tmp_path: Path) -> None:
    said = shardio("export", out, "s3://b/x", "--format", "mds", code=2).stderr
    assert re.search(
        r"s3://b/x: expected a directory.*; write into a directory, and `shardio copy`", said
    )
    assert "https:// is read only" in shardio("pack", tmp_path, "https://b/out", code=2).stderr
