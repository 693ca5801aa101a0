"""The recipe of docs/remote.md for a store with an endpoint of its own runs as it stands."""

import re
import subprocess
from pathlib import Path

from support import LIMIT_S, object_stores, warm_python
from support.pages import blocks, replaced
from support.trees import environment, picture, plant

PAGE = "remote.md"
BEGIN = 'set -e; python() { "$PYTHON" "$@"; }; shardio() { "$PYTHON" -m shardio "$@"; }\n'
BATCH = "...  # images: uint8 (256, 3, 224, 224)"


def test_the_recipe_of_minio_packs_and_trains(tmp_path: Path) -> None:
    (commands,), (program,) = blocks(PAGE, "MinIO", "sh"), blocks(PAGE, "MinIO", "python")
    plant(tmp_path / "photos", {f"{c}/{n}.jpg": picture(40, 30) for c in "ab" for n in range(4)})
    with object_stores.s3(private=True) as store:
        given = store.options
        commands = replaced(
            commands,
            ("http://minio:9000", given["endpoint"]),
            ("=me ", f"={given['access_key_id']} "),
            ("=secret\n", f"={given['secret_access_key']}\n"),
            ("s3://datasets/", f"{store.url}/"),
        )
        small = (("Crop(224,", "Crop(16,"), ("=256,", "=4,"), ("num_workers=8", "num_workers=1"))
        show = (BATCH, "print(images.shape, sorted(labels.tolist()))  #")
        where = ("s3://datasets/", f"{store.url}/")
        (tmp_path / "train.py").write_text(replaced(program, where, *small, show))
        done = subprocess.run(
            ["sh", "-c", BEGIN + commands],
            cwd=tmp_path,
            env=environment(PYTHON=warm_python.executable(tmp_path), HOME=str(tmp_path)),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    assert done.returncode == 0, done.stderr
    assert "8 files, 2 classes" in done.stdout
    assert done.stdout.count("torch.Size([4, 3, 16, 16])") == 2
    assert sorted(re.findall(r"\b[01]\b(?=[,\]])", done.stdout.partition("torch")[2])) == (
        ["0"] * 4 + ["1"] * 4
    )
