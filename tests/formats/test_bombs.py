"""What a stranger's dataset unfolds to in memory: no more than docs/reliability.md says."""

import gc
import hashlib
import struct
from collections.abc import Callable
from pathlib import Path

import msgpack
import pytest
import xxhash
from support.forging import in_child

from shardio.errors import DamageError, SampleError, ShardioError
from shardio.formats import manifest
from shardio.formats.base import ShardInfo
from shardio.formats.foreign import base as foreign
from shardio.formats.record import MAX_FIELDS_BYTES, RecordEncoder, RecordShard
from shardio.formats.sample import MAX_HEAD, MAX_NESTED, Schema, unpack, unpack_head
from shardio.storage import local
from shardio.storage.location import locate

ID = b"i" * 16
SCHEMA = Schema([("__key__", "key"), ("more", "json")])
ALLOWED = 64 << 20  # bytes, whatever the size of what is read
EXTENSION = msgpack.packb(msgpack.ExtType(1, msgpack.packb(["|u1", [1] * 30 + [0], b""])))
ITEMS = {
    "maps": b"\x80",
    "maps with a value": b"\x81\xa0\xc0",
    "chains of maps": b"\x81\xa0" * 30 + b"\x80",
    "deep chains of maps": b"\x81\xa0" * 400 + b"\x80",
    "chains of lists": b"\x91" * 31 + b"\x90",
    "texts": b"\xa2\xc4\x80",
    "arrays": EXTENSION,
}
JSON = {
    "chains of maps": '{"":' * 30 + "1" + "}" * 30,
    "chains of lists": "[" * 90 + "]" * 90,
    "texts": '"\u0101"',
    "numbers": "300",
}


def msgpack_bomb(item: bytes, size: int) -> bytes:
    count = (size - 5) // len(item)
    return b"\xdd" + struct.pack(">I", count) + item * count


def json_bomb(item: str, size: int) -> str:
    return "[" + f"{item}," * (size // (len(item.encode()) + 1)) + "1]"


def check(work: Callable[[], object], size: int, times: int) -> None:
    """Do the work in a process that has room for so many times its bytes, and what is allowed."""

    kept = []

    def run() -> None:
        gc.disable()  # which takes most of the time of making so many
        try:
            kept.append(work())
        except (ShardioError, ValueError) as error:
            assert "Memory" not in str(error)

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    assert in_child(run, pages * 4096 + ALLOWED + times * size) == 0


def shard_of(path: Path, head: bytes) -> None:
    """Write a shard of one record with this head, and right checksums."""
    encoder = RecordEncoder(SCHEMA, ID, 0)
    data = encoder.header()
    sealed = struct.pack("<II", len(head), len(head)) + head
    seed = xxhash.xxh3_64_intdigest(struct.pack("<I", 0) + ID) >> 32 << 32
    checksum = struct.pack("<Q", xxhash.xxh3_64_intdigest(sealed, seed))
    data += b"".join(encoder.append_stored(checksum + sealed))
    encoder.index_as([xxhash.xxh3_64_intdigest(b"k") & 0xFFFFFFFF], {})
    path.write_bytes(data + encoder.finish())


@pytest.mark.parametrize("kind", ITEMS)
def test_a_record_unfolds_to_little(tmp_path: Path, kind: str) -> None:
    """Of 1 MiB, the longest head, chains of maps would take 96 MB."""
    start = b"\x92\xc4\x01k"
    head = start + msgpack_bomb(ITEMS[kind], MAX_HEAD - len(start))
    shard_of(tmp_path / "x", head)
    shard = RecordShard(local.open_file(str(tmp_path / "x"), "x"))
    check(lambda: shard.read(0), len(head), 16)
    if kind not in ("texts", "arrays"):
        with pytest.raises(DamageError, match=f"more than {MAX_NESTED:,} lists and maps"):
            list(shard.scan(0, 1))
    assert shard.key(0) == b"k"


def test_what_is_not_read_is_not_written(tmp_path: Path) -> None:
    encoder = RecordEncoder(SCHEMA, ID, 0)
    encoder.header()
    most = [[300, 2] for _ in range(MAX_NESTED - 2)]  # and the head, and the list of them
    with pytest.raises(SampleError, match="small fields take"):
        encoder.record({"__key__": b"k", "more": most})  # 5 bytes each are too long anyway
    most = [[]] * (MAX_NESTED - 2) + [0] * MAX_NESTED
    stored = b"".join(encoder.record({"__key__": b"k", "more": most}))
    assert len(unpack_head(stored[16:])[1]) == len(most)
    with pytest.raises(SampleError, match=f"sample k: it has more than {MAX_NESTED:,} lists"):
        encoder.record({"__key__": b"k", "more": [*most, []]})


@pytest.mark.parametrize("kind", ITEMS)
def test_descriptions_unfold_to_little(tmp_path: Path, kind: str) -> None:
    """Those of shards, in headers and indexes, and those of others' files, which may be longer."""
    check(lambda: unpack(msgpack_bomb(ITEMS[kind], MAX_FIELDS_BYTES)), MAX_FIELDS_BYTES, 16)
    size = 2 << 20
    bomb = msgpack_bomb(ITEMS[kind], size)
    described = b"\x82\xa7columns\x90\xa5extra" + bomb
    head = struct.pack("<8sHBBI16sQQ", foreign.MAGIC, 0, 1, 0, 0, ID, 0, len(described))
    body = head + described
    checksum = xxhash.xxh3_64_intdigest(body)
    name = foreign.sidecar_name(0, checksum)
    (tmp_path / name).write_bytes(body + struct.pack("<Q", checksum))
    info = ShardInfo("x.tar", 0, 0, 0, bytes(32), checksum)
    check(lambda: foreign.load(locate(tmp_path), info, ID), size, 32)


@pytest.mark.parametrize("kind", JSON)
def test_json_unfolds_to_little(tmp_path: Path, kind: str) -> None:
    """Of manifests, of splits, and the values of others' records."""
    size = 2 << 20
    bomb = json_bomb(JSON[kind], size)
    check(lambda: foreign.parse_json(bomb.encode()), size, 48)
    data = manifest.dump_splits(["a"], None)
    lines = data.decode().splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith('"classes"'))
    lines[place] = f'"classes": {bomb},'
    text = "\n".join(lines[:-2]) + "\n"
    sealed = text.encode()
    sealed += b'"sha256": "' + hashlib.sha256(sealed).hexdigest().encode() + b'"\n}\n'
    (tmp_path / "shardio.json").write_bytes(sealed)
    check(lambda: manifest.load_splits(locate(tmp_path)), len(sealed), 48)
    made = manifest.make(
        [],
        dataset_id=ID,
        format="record",
        schema=SCHEMA,
        classes=None,
        options={"x": 12345678},
        blob_bytes=0,
    )
    text = made.dump().decode().replace("12345678", bomb)
    sealed = "\n".join(text.splitlines()[:-2]).encode() + b"\n"
    sealed += b'"sha256": "' + hashlib.sha256(sealed).hexdigest().encode() + b'"\n}\n'
    check(lambda: manifest.parse(sealed, "here"), len(sealed), 48)
