"""Options of pack: what is refused before anything is touched, and the forms that users have."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.packing import pack_one
from support.trees import (
    content,
)

from shardio.errors import (
    OptionError,
)
from shardio.packing.commit import commit
from shardio.packing.pack import pack


def test_an_option_of_a_group_that_is_given_by_itself_is_an_error_that_says_where_it_goes(
    source: Path, tmp_path: Path
) -> None:
    for name, group in {
        "from_": r"read=shardio\.SourceOptions\(kind=",
        "jpeg_tiles": r"images=shardio\.ImageOptions\(jpeg_tiles=",
        "part": r"plan=shardio\.PlanOptions\(part=",
    }.items():
        with pytest.raises(OptionError, match=f"pack takes no {name}: give {group}"):
            pack(source, tmp_path / "out", **{name: None})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'shufle'"):
        pack(source, tmp_path / "out", **{"shufle": True})  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"shard_size": 0},
        {"max_records": 0},
        {"jobs": 0},
        {"resize": 0},
        {"quality": 0},
        {"quality": 101},
        {"seed": -1},
        {"seed": 1 << 64},
        {"on_error": "ignore"},
        {"part": (0, 2)},
        {"part": (3, 2)},
        {"part": (1, 0)},
        {"format": "tfrecord"},
        {"format": "zip"},
        {"shard_size": "big"},
        {"shard_size": 1.5},
        {"max_records": "3"},
        {"max_records": True},
        {"jobs": 1.5},
        {"jobs": "2"},
        {"seed": 0.5},
        {"seed": None},
        {"resize": "256"},
        {"quality": 90.5},
        {"part": "1"},
        {"part": "a/b"},
        {"part": "3/2"},
        {"part": (1, 2, 3)},
        {"part": (1.0, 2)},
        {"part": 1},
        {"splits": ["train"]},
        {"shard_size": 1},
        {"shard_size": "64"},
        {"quality": 50},
    ],
)
def test_wrong_options_are_refused_before_anything_is_touched(
    source: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    [name] = options
    with pytest.raises(OptionError, match=name):
        pack_one(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_sizes_parts_and_numbers_may_be_as_users_have_them(source: Path, tmp_path: Path) -> None:
    pack_one(source, tmp_path / "one", shard_size=2000, max_records=None, seed=3)
    options: dict[str, Any] = {"shard_size": "2KB", "max_records": None, "seed": np.int64(3)}
    for part in ("1/2", (np.int32(2), 2)):
        pack_one(source, tmp_path / "out", part=part, **options)
    commit(tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "one")


def test_quality_is_refused_where_no_jpeg_is_written(source: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="quality is 50, but images are packed as they are: give"):
        pack_one(source, tmp_path / "out", quality=50)
    with pytest.raises(OptionError, match="quality is 50, but no JPEG is written; leave it out"):
        pack_one(source, tmp_path / "out", quality=50, encode="raw", resize=8)
