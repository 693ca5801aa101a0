"""`info`, `ls`, `cat` and `verify`: what they print."""

import base64
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from support.trees import (
    JPEG,
    environment,
    images,
    noise,
    on_a_terminal,
    plant,
    shardio,
    shardio_json,
    shards,
)

from shardio.dataset import sequence as sequences
from shardio.packing.annotate import annotate
from shardio.packing.writer import Writer
from shardio.tuning.explain import explain


def keys_of(out: Path) -> list[str]:
    return sequences.open(out).keys()


def test_info_says_what_is_in_there(out: Path) -> None:
    said = shardio("info", out).stdout
    for part in ("records   24", "3 of 4 to 10 records", "class0, class1, class2", "version 0"):
        assert part in said
    facts = shardio_json("info", out)
    assert facts["records"] == 24
    assert facts["fields"] == {"__key__": "key", "image": "image", "label": "int"}
    assert facts["bytes"] == sum(path.stat().st_size for path in shards(out))
    assert facts["options"]["seed"] == 0
    assert facts["format_version"] == json.loads((out / "manifest.json").read_bytes())["version"]


def test_info_tells_what_lies_beside_the_shards(out: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(out, tmp_path / "out"))
    assert (
        shardio_json("info", out)["annotated"] == {} and "beside" not in shardio("info", out).stdout
    )
    keys = keys_of(out)
    annotate(out, {key: {"caption": f"words on {key}"} for key in keys})
    annotate(out, {keys[0]: {"caption": "one", "label": 1}})
    files = [path for path in out.glob("overlay-*")]
    facts = shardio_json("info", out)
    assert [*facts["annotated"]] == ["caption", "label"]
    assert sum(facts["annotated"].values()) == sum(path.stat().st_size for path in files)
    assert re.search(
        r"^beside +annotated: caption \(\S+ K?i?B\), label \(\S+ K?i?B\)$",
        shardio("info", out).stdout,
        re.M,
    )
    before = explain(out).dataset_bytes
    assert before == facts["bytes"] + sum(facts["annotated"].values())


def test_info_of_the_environment_names_versions_and_pil() -> None:
    facts = shardio_json("info", "--env")
    assert facts["shardio"]
    assert "torch" in facts
    assert "illow" in facts["images"]


def test_ls_lists_every_record_once_and_filters(out: Path) -> None:
    names = keys_of(out)
    rows = shardio_json("ls", out)["records"]
    assert [row["key"] for row in rows] == names
    assert [row["index"] for row in rows] == list(range(24))
    second = shardio_json("ls", out, "--shard", "1")["records"]
    assert second == [row for row in rows if row["shard"] == 1]
    ones = shardio_json("ls", out, "--class", "class1")["records"]
    assert ones == [row for row in rows if row["class"] == "class1"]
    assert len(ones) == 8
    lines = shardio("ls", out).stdout.splitlines()
    assert [line.split()[3] for line in lines] == names


def test_names_are_escaped_and_come_back(tmp_path: Path) -> None:
    name = b"a\x1b[31m/\xff\n\xc2\x9b.jpg"
    source = plant(tmp_path / "src", {name: noise("x", 50), "b/é.jpg": JPEG})
    out = tmp_path / "out"
    shardio("pack", source, out)
    for ascii_only in (False, True):
        more = {"PYTHONIOENCODING": "ascii"} if ascii_only else {}
        said = shardio("ls", out, text=False, warm=False, env=environment(**more)).stdout
        assert set(b"\x1b\xff\x9b") & set(said) == set()
        assert said.count(b"\n") == 2
        assert (b"b/\\xe9.jpg" in said) == ascii_only
        shardio("info", out, warm=False, env=environment(**more))
    assert shardio("cat", out, "--key", name, text=False).stdout == noise("x", 50)
    rows = shardio_json("ls", out, "--class", b"a\x1b[31m")["records"]
    assert [os.fsencode(row["key"]) for row in rows] == [name]


def test_cat_gives_exactly_the_bytes(out: Path, tmp_path: Path) -> None:
    tree = images()
    names = keys_of(out)
    for index in (0, 23, -1):
        assert shardio("cat", out, str(index), text=False).stdout == tree[names[index]]
    done = shardio("cat", out, "--key", "class1/003.jpg", text=False)
    assert done.stdout == tree["class1/003.jpg"]
    assert shardio("cat", out, "0", "--field", "__key__").stdout == f"{names[0]}\n"
    assert shardio("cat", out, "0", "--field", "label").stdout.strip() in ("0", "1", "2")
    said = shardio_json("cat", out, "0")
    assert base64.b64decode(said["base64"]) == tree[names[0]]
    file = tmp_path / "x.jpg"
    shardio("cat", out, "0", "--output", file)
    assert file.read_bytes() == tree[names[0]]
    assert "is there already" in shardio("cat", out, "1", "--output", file, code=1).stderr
    assert file.read_bytes() == tree[names[0]]
    shardio("cat", out, "1", "--output", file, "--overwrite")
    assert file.read_bytes() == tree[names[1]]


def test_cat_shows_fields_of_every_kind(tmp_path: Path) -> None:
    fields: dict[str, tuple[Any, str]] = {
        "s": ("é", "é"),
        "f": (0.5, "0.5"),
        "a": (np.arange(3), "[0, 1, 2]"),
        "j": ({"b": b"\xff"}, '{"b": {"base64": "/w=="}}'),
        "n": (True, "true"),
        # Arrays of what JSON has no name for.
        "c": (np.array([1 + 2j]), '["(1+2j)"]'),
        "d": (np.array(["2026-01-02"], "M8[D]"), '["2026-01-02"]'),
        "t": (np.array([5], "m8[s]"), '["0:00:05"]'),
        "b": (np.array([b"x"]), '[{"base64": "eA=="}]'),
        "nan": (np.array([[np.nan], [np.inf], [0.5]]), "[[null], [null], [0.5]]"),
    }
    with Writer(tmp_path / "out") as writer:
        writer.write({name: value for name, (value, _) in fields.items()})
    for name, (_, shown) in fields.items():
        assert shardio("cat", tmp_path / "out", "0", "--field", name).stdout == f"{shown}\n"
        said = shardio_json("cat", tmp_path / "out", "0", "--field", name)
        assert said["field"] == name
        assert said["value"] == (shown if name == "s" else json.loads(shown))


def test_cat_of_a_null_is_an_error_and_no_text(tmp_path: Path) -> None:
    with Writer(tmp_path / "out", fields={"image": "image"}) as writer:
        writer.write({"image": None})
    said = shardio("cat", tmp_path / "out", "0", code=2)
    assert said.stdout == "" and "record 0 has no image: it is null" in said.stderr


def test_verify_names_a_damaged_shard_once_and_as_it_was_given(out: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    shard = shards(copy)[1]
    shard.write_bytes(shard.read_bytes()[:-5])
    said = shardio("verify", "copy", code=3, cwd=tmp_path).stdout.splitlines()
    assert said[0].startswith(f"copy/{shard.name}: ") and said[0].count(shard.name) == 1


def test_cat_escapes_on_a_terminal_what_could_change_it(tmp_path: Path) -> None:
    text = "a\x1b]0;title\x07\tb\né \x9b2J\u202e"
    with Writer(tmp_path / "out") as writer:
        writer.write({"text": text, "j": {"b": "\x9b2J"}})
    given = "cat", tmp_path / "out", "0", "--field"
    code, seen = on_a_terminal(*given, "text")
    lines = seen.replace("\r\n", "\n").expandtabs().splitlines()
    assert code == 0
    assert lines == ["a\\x1b]0;title\\x07\tb".expandtabs(), r"é \x9b2J\u202e"]
    assert on_a_terminal(*given, "j")[1].strip() == r'{"b": "\u009b2J"}'
    assert shardio(*given, "text", text=False).stdout == text.encode() + b"\n"


def test_cat_does_not_pour_images_over_a_terminal(out: Path) -> None:
    code, seen = on_a_terminal("cat", out, "0")
    assert code == 2
    assert "--output FILE" in seen


def test_splits_are_named_by_commands_that_want_one(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", {"train/a/1.jpg": JPEG, "val/a/2.jpg": JPEG})
    shardio("pack", source, tmp_path / "out")
    assert "out/train" in shardio("ls", tmp_path / "out", code=1).stderr
    missing = shardio("info", tmp_path / "out" / "trian", code=1).stderr
    assert "there are train, val: did you mean 'train'?" in missing
    assert set(shardio_json("info", tmp_path / "out")["splits"]) == {"train", "val"}
    assert "2 records in 2 shards" in shardio("verify", tmp_path / "out").stdout
    assert "train\n" in shardio("info", tmp_path / "out").stdout
