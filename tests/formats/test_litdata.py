"""LitData's chunks: golden folders of litdata.optimize, each way of compressing them, damage."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.conformance import FormatConformance, shard_of
from support.conformance import sample as make_sample
from support.forging import in_child
from support.litdata_writer import LEAF, item, save
from support.trees import shardio_json

import shardio
from shardio.dataset import sequence as sequences
from shardio.errors import DamageError, DependencyError, ShardioError, SourceError
from shardio.formats.base import Shard
from shardio.formats.foreign import inflate
from shardio.names import KEY
from shardio.packing import index as indexing

zstandard = pytest.importorskip("zstandard")

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "litdata"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())["folders"]
DICTS = ("every", "whole", "frames", "items")


def index(folder: Path, **options: Any) -> indexing.Indexed:
    return indexing.index(folder, format="litdata", jobs=1, **options)


def golden(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / name, tmp_path / "copy"))


def change(folder: Path, act: Callable[[Any], Any]) -> None:
    path = folder / "index.json"
    described = json.loads(path.read_text())
    act(described)
    path.write_text(json.dumps(described))


def described(value: Any) -> Any:
    """As the golden script says it."""
    if isinstance(value, np.ndarray):
        assert value.flags.owndata
        text = value.tobytes().hex()
        return {"array": value.dtype.str, "shape": list(value.shape), "hex": text}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, dict):
        return {name: described(one) for name, one in value.items()}
    return [described(one) for one in value] if isinstance(value, list) else value


def rows(name: str) -> list[dict[str, Any]]:
    """The golden samples, by the names of our fields."""
    if name in DICTS:
        return list(EXPECTED[name])
    given = [row if name == "tuple" else [row] for row in EXPECTED[name]]
    return [{str(number): value for number, value in enumerate(row)} for row in given]


def without_key(samples: Any) -> list[dict[str, Any]]:
    return [{n: described(v) for n, v in sample.items() if n != KEY} for sample in samples]


@pytest.mark.parametrize("name", [*DICTS, "tuple", "leaf"])
def test_a_golden_folder_is_read_in_place_and_packed(name: str, tmp_path: Path) -> None:
    folder = golden(name, tmp_path)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    done = index(folder)
    assert (done.records, done.shards) == (11, 3)
    data = sequences.stored(folder)
    assert without_key(data) == rows(name)
    assert without_key([data[i] for i in reversed(range(11))])[::-1] == rows(name)
    assert all(path.read_bytes() == content for path, content in before.items())
    shardio.pack(folder, tmp_path / "indexed")
    for path in set(folder.iterdir()) - before.keys():
        path.unlink()
    shardio.pack(folder, tmp_path / "out")
    for out in ("indexed", "out"):
        packed = {one[KEY]: one for one in sequences.stored(tmp_path / out)}
        assert without_key(packed[one[KEY]] for one in data) == rows(name)


def test_fields_and_keys(tmp_path: Path) -> None:
    folder = golden("every", tmp_path)
    fields = index(folder).fields
    assert fields["image"] == fields["grid"] == fields["vector"] == fields["ids"] == "array"
    assert (fields["label"], fields["score"], fields["good"]) == ("int", "float", "bool")
    assert (fields["légende"], fields["blob"], fields["objects"]) == ("str", "bytes", "json")
    assert shardio.open(folder, decode=None)[5][KEY] == "chunk-0-1/00000001"
    pair = golden("tuple", tmp_path / "x")
    assert index(pair, fields={"image": "0", "label": "1"}).fields["image"] == "image"
    assert shardio.open(pair)[4]["image"].size == (5, 5)


def encode(format: str, value: Any) -> bytes:
    if format in ("int", "float", "bool"):
        return struct.pack({"int": "<q", "float": "<d", "bool": "<?"}[format], value)
    if format == "numpy":
        shape = struct.pack(f"<{value.ndim}I", *value.shape)
        return struct.pack("<II", 2, value.ndim) + shape + value.tobytes()
    if format == "json":
        return json.dumps(value).encode()
    return value.encode() if isinstance(value, str) else bytes(value)


def one(folder: Path, format: str, data: bytes) -> Any:
    """What a leaf of these bytes is; of one item."""
    save(folder, {"leaf": format}, [item([data])])
    index(folder, overwrite=True)
    return sequences.stored(folder)[0]["leaf"]


class TestLitDataConformance(FormatConformance):
    """The key is a leaf. There is no None but in json."""

    FORMATS = (
        *((KEY, "bytes"), ("image", "jpeg"), ("label", "int"), ("weight", "float")),
        *(("flipped", "bool"), ("caption", "str"), ("mask", "numpy"), ("extra", "bytes")),
        ("meta", "json"),
    )

    @classmethod
    def sample(cls, number: int, size: int = 100) -> dict[str, Any]:
        """Return a sample without None but in json, and with no arrays there."""
        made = make_sample(4 * number, size) | {KEY: make_sample(number)[KEY]}
        return made | {"meta": {"number": number, "parts": [None, 0.5, {"x": [number]}]}}

    def build(self, folder: Path, fields: Any, samples: Any) -> Path:
        formats = dict(self.FORMATS)
        items = [item([encode(f, s[name]) for name, f in formats.items()]) for s in samples]
        path = save(folder, formats, items)
        index(folder)
        return path

    def open(self, path: Path) -> Shard:
        return shard_of(path.parent, fields=self.FIELDS)


# --- leaves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "format, data, found",
    [
        ("text", "é".encode(), "é"),
        ("image:png", b"\x89", b"\x89"),
        ("file:txt", b"", b""),
        ("jpeg_array", struct.pack("<III", 2, 1, 2) + b"abb", [b"a", b"bb"]),
        ("json", b"", ValueError),
        ("json", b'{"a": [1, null]}', {"a": [1, None]}),
        ("json", b"\x01" + struct.pack("<II", 1, 2) + "é".encode(), ["é"]),
        ("json", b"\x02" + struct.pack("<Iqq", 2, -1, 5), [-1, 5]),
        ("json", b"\x04" + struct.pack("<I", 2) + b"\x00\x01", [False, True]),
        ("json", b"\x0b", None),
        ("json", b"\x05" + struct.pack("<II", 1, 1) + b"a\x0a\x01", {"a": True}),
        ("json", b"\x02" + struct.pack("<I", 1 << 31), ValueError),
        ("json", b"\x01" + struct.pack("<I", 1 << 31), ValueError),
        ("json", b"\x06" + struct.pack("<II", 4, 0), ValueError),
        ("json", (b"\x05" + struct.pack("<II", 1, 0)) * 99, ValueError),
        ("json", b"\x0b\x0b", ValueError),
        ("json", b"\x1f", ValueError),
        ("str", b"\xff", ValueError),
        ("int", b"\x00", ValueError),
        ("numpy", struct.pack("<II", 14, 1), ValueError),
        ("numpy", struct.pack("<III", 3, 1, 1 << 31), ValueError),
        ("numpy", struct.pack("<II", 3, 1 << 31), ValueError),
        ("tensor", struct.pack(">II", 10, 0) + b"\0\0", ValueError),
        ("no_header_numpy:3", bytes(7), ValueError),
        ("pil", struct.pack("<III", 1 << 31, 1 << 31, 3) + b"RGB", ValueError),
    ],
)
def test_leaves_are_decoded_or_damage(tmp_path: Path, format: str, data: bytes, found: Any) -> None:
    if found is ValueError:
        with pytest.raises(DamageError, match=r"chunk-0-0\.bin: record 0 at byte 12: leaf: "):
            one(tmp_path, format, data)
    elif found is None:
        save(tmp_path, {"leaf": format}, [item([data])])
        assert "leaf" not in index(tmp_path).fields
    else:
        assert one(tmp_path, format, data) == found


@pytest.mark.parametrize("name", ["pickled", "graph"])
def test_pickled_leaves_are_refused_with_the_way_out(tmp_path: Path, name: str) -> None:
    folder = golden("pickled", tmp_path)
    if name == "graph":
        change(folder, lambda all: all["config"].update(data_format=["pil", "graph:pickle"]))
    with pytest.raises(SourceError, match=r"leaf 'box' .*pickle.* to run code .*shardio\.Writer"):
        index(folder)
    with pytest.raises(SourceError, match="leaf 'box'"):
        shardio.pack(folder, tmp_path / "out")


@pytest.mark.parametrize(
    "config, message",
    [
        ({"encryption": {"algorithm": "fernet"}}, "is encrypted"),
        ({"item_loader": "TokensLoader"}, "for 'TokensLoader'"),
        ({"data_format": ["video:mp4"]}, "serializer 'video:mp4', which is not read here"),
        ({"data_format": ["no_header_tensor:10"]}, "no_header_tensor:10"),
        ({"data_spec": json.dumps([1, LEAF | {"type": "collections.deque"}])}, "collections.deque"),
    ],
)
def test_what_is_not_read_is_refused_with_the_way_out(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    save(tmp_path, {"x": "int"}, [item([bytes(8)])], **config)
    with pytest.raises(SourceError, match=rf"{message}.*Read the dataset with litdata"):
        index(tmp_path)


def test_an_arrow_table_of_text_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"Arrow table.*a tuple instead of a dict"):
        index(golden("text", tmp_path))


# --- index.json -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "act, error, message",
    [
        (lambda all: all["chunks"].pop(0), SourceError, r"does not list chunk-0-0\.bin"),
        (lambda all: all["chunks"][1].update(filename="chunk-0-9.bin"), SourceError, "chunk-0-9"),
        (lambda all: all["chunks"][0].update(chunk_size=3), DamageError, "it has 4 items, but"),
        (lambda all: all["chunks"][0].update(chunk_bytes=3), DamageError, "bytes, but index.json"),
        (lambda all: all["chunks"][0].update(chunk_size=-1), DamageError, "chunk_size is -1"),
        (lambda all: all["chunks"][0].update(chunk_bytes=True), DamageError, "chunk_bytes is True"),
        (lambda all: all["chunks"].append(all["chunks"][0]), DamageError, "no name of its own"),
        (lambda all: all["chunks"][2].update(filename="../x"), DamageError, "no name of its own"),
        (lambda all: all.pop("config"), DamageError, "expected an object with"),
        (lambda all: all["config"].update(data_format=None), DamageError, "data_format is None"),
        (
            lambda all: all["config"]["data_format"].pop(),
            DamageError,
            "15 leaves, but 14",
        ),
        (lambda all: all["config"].update(compression=10**300), DamageError, "compression is 1"),
        (lambda all: all["config"].update(data_spec="[2, null]"), DamageError, "version 2"),
        (lambda all: all["config"].update(data_spec="[1, 3]"), DamageError, r"index\.json"),
        (lambda all: all["config"].update(data_spec="[" * 99_999), DamageError, r"index\.json"),
    ],
)
def test_an_index_that_does_not_fit_is_an_error(
    tmp_path: Path, act: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    folder = golden("every", tmp_path)
    change(folder, act)
    with pytest.raises(error, match=message):
        index(folder)


def test_without_its_index_a_chunk_is_refused(tmp_path: Path) -> None:
    folder = golden("every", tmp_path)
    (folder / "index.json").unlink()
    with pytest.raises(SourceError, match=r"litdata\.optimize makes it"):
        index(folder)


def test_copies_that_litdata_inflated_are_told_from_the_chunks(tmp_path: Path) -> None:
    folder = golden("whole", tmp_path)
    shutil.copy(GOLDEN / "every" / "chunk-0-0.bin", folder)
    with pytest.raises(SourceError, match=r"copy that litdata inflated.*--files"):
        index(folder)
    assert index(folder, files="chunk-*.zstd*.bin").records == 11


# --- damage ---------------------------------------------------------------------------------------


def inflating_at_most(monkeypatch: pytest.MonkeyPatch, ratio: int) -> None:
    """What is inflated may have `ratio` times the bytes of its file."""
    monkeypatch.setattr(inflate, "FREE", 0)
    monkeypatch.setattr(inflate, "RATIO", ratio)


@pytest.mark.parametrize("name", ["whole", "frames", "items"])
def test_sizes_are_compared_before_anything_is_inflated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    inflating_at_most(monkeypatch, 1)
    with pytest.raises(DamageError, match="would become"):
        index(golden(name, tmp_path))


def test_frames_over_each_other_are_bounded_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inflating_at_most(monkeypatch, 2)
    folder, count = golden("frames", tmp_path), 100
    frame = zstandard.compress(np.random.default_rng(0).bytes(1000))
    at = 24 + 4 * (count + 1) + 24 * count
    data = struct.pack("<8sHHIII", b"LDFZ01", 1, 0, count, 1, count)
    data += struct.pack(f"<{count + 1}I", *range(0, 1000 * count + 1, 1000))
    data += b"".join(struct.pack("<IIQII", n, 1, at, len(frame), 1000) for n in range(count))
    (folder / "chunk-0-0.bin").write_bytes(data + frame)
    size = len(data + frame)
    change(folder, lambda all: all["chunks"][0].update(chunk_bytes=size, chunk_size=count))
    with pytest.raises(DamageError, match="bytes that would become 100,000"):
        index(folder)


@pytest.mark.parametrize("name", ["whole", "frames", "items"])
def test_without_zstandard_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(DependencyError, match=r"shardio-torch\[mds\]"):
        index(golden(name, tmp_path))


@pytest.mark.parametrize("name", DICTS)
@pytest.mark.parametrize("indexed", [False, True])
def test_damage_ends_in_values_or_an_error(tmp_path: Path, name: str, indexed: bool) -> None:
    """Before indexing in any values, after it in the right ones."""
    folder = golden(name, tmp_path)
    path = sorted(folder.glob("*.bin"))[1]
    intact = path.read_bytes()
    noise = np.random.default_rng(2)
    index(folder)

    def child() -> None:
        for number in range(80):
            data = bytearray(intact)
            at = int(noise.integers(0, len(intact)))
            data[at] ^= 1 << (number % 8)
            path.write_bytes(data if number % 4 else data[:at])
            try:
                if not indexed:
                    index(folder, overwrite=True)
                found = without_key(sequences.stored(folder))
            except ShardioError:
                continue
            assert not indexed or found == rows(name)

    assert in_child(child, 8 << 30) == 0


def test_the_commands_take_it(tmp_path: Path) -> None:
    folder = golden("frames", tmp_path)
    assert shardio_json("index", folder)["format"] == "litdata"
    assert shardio_json("verify", folder, "--sha256")["damages"] == []
