"""Format 1 is frozen: golden datasets of all that it has, and a reader from its page alone.

reader.c reads what shardio reads: golden datasets of all releases, and datasets that are changed
here in every way. Of damaged and of forged ones it gives the right lines, or an error; the compiler
watches each of its reads, where it can. What of a newer version each of them refuses is here, too.
"""

import hashlib
import json
import os
import random
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import xxhash
from support import LIMIT_S
from support.plain_lines import lines
from support.trees import noise, plant

import shardio
from shardio import DamageError, PlanOptions, VersionError, native, verify

HERE = Path(__file__).resolve().parent
GOLDEN = HERE.parent / "golden"
FROZEN = GOLDEN / "frozen-1"
EXPECTED = json.loads((FROZEN / "expected.json").read_text())
VERSIONS = [(name, version) for name in EXPECTED for version in EXPECTED[name]]
SEAL = len('"sha256": ""\n}\n') + 64  # the last two lines
DAMAGED, UNKNOWN = 1, 3  # what reader.c returns
SANITIZERS = "-fsanitize=address,undefined", "-fno-sanitize-recover=all"


class Ran(NamedTuple):
    """What a run of the reader left."""

    status: int
    lines: list[str]
    error: str


Reader = Callable[..., Ran]


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    """Compile reader.c, with all that watches its reads if the compiler has it."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("NOT RUN: no C compiler, so nothing reads docs/format.md but shardio itself")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "reader"
        command = [compiler, "-std=c99", "-O1", "-g", "-Wall", "-Wextra", "-Werror"]
        command += ["-o", str(program), str(HERE / "reader.c")]
        if subprocess.run([*command, *SANITIZERS], capture_output=True, timeout=LIMIT_S).returncode:
            subprocess.run(command, check=True, timeout=LIMIT_S)
        options = os.environ | {"ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1"}

        def run(dataset: Path, *version: str) -> Ran:
            given = [str(program), str(dataset), *version]
            done = subprocess.run(given, capture_output=True, env=options, timeout=LIMIT_S)
            error = done.stderr.decode("utf-8", "replace")
            assert done.returncode in (0, DAMAGED, UNKNOWN), error
            assert "Sanitizer" not in error and "runtime error" not in error, error
            return Ran(done.returncode, done.stdout.decode("ascii").splitlines(), error)

        yield run


def test_the_reader_has_under_400_lines() -> None:
    assert len((HERE / "reader.c").read_text().splitlines()) < 400


# --- golden files ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "version"), VERSIONS)
def test_what_was_frozen_is_read(name: str, version: str) -> None:
    if EXPECTED[name][version] is None:
        with pytest.raises(shardio.OptionError, match="of its records were erased since"):
            lines(FROZEN / name, version)
        return
    assert lines(FROZEN / name, version or None) == EXPECTED[name][version]
    if not version:
        assert verify(FROZEN / name, sha256=True, jobs=1).damages == []


@pytest.mark.parametrize("name", EXPECTED)
def test_what_was_frozen_is_read_without_the_core(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(native, "core", None)
    assert lines(FROZEN / name) == EXPECTED[name][""]


@pytest.mark.parametrize(("name", "version"), VERSIONS)
def test_the_reader_of_the_page_reads_what_was_frozen(
    reader: Reader, name: str, version: str
) -> None:
    found = reader(FROZEN / name, *([version] if version else []))
    if name in ("lmdb", "tar"):
        assert found.status == UNKNOWN and "of another format" in found.error
    elif EXPECTED[name][version] is None:
        assert found.status == DAMAGED and "erased" in found.error
    else:
        assert found == (0, EXPECTED[name][version], "")


@pytest.mark.parametrize(
    "name", ["v0", *(f"released-0.1.0/{one}" for one in ("record", "every-kind", "tiles", "raw"))]
)
def test_the_reader_of_the_page_reads_what_releases_wrote(reader: Reader, name: str) -> None:
    assert reader(GOLDEN / name) == (0, lines(GOLDEN / name), "")


def test_each_kind_of_file_of_format_1_is_among_the_golden_ones() -> None:
    manifests = [*FROZEN.rglob("manifest*.json")]
    texts = "".join(one.read_text() for one in manifests)
    names = {re.sub(r"[0-9a-f]{4,}", "*", one.name) for one in FROZEN.rglob("*.*")}
    assert names >= {
        *("*-*.shard", "*-*.lmdb", "*-*.index", "overlay-*-*.shard", "manifest.json"),
        *("manifest-*.json", "excluded-*.bin", "sources-*.bin", "tags.json", "shardio.json"),
    }
    for member in "excluded", "sources", "overlays", "commit", "erased":
        assert f'\n"{member}": [' in texts
    assert f'"{"0" * 64}"' in texts  # a file of values that nothing took the place of
    for kind in "bytes", "array", "int", "float", "bool", "str", "json":
        assert re.search(rf'\["\w+","{kind}",\[\[', texts)
    names = {one.name for one in manifests[0].parent.parent.rglob("*")}
    links = re.findall(r'\["([^"]+)",\d+,"([0-9a-f]{8})[0-9a-f]{56}","[0-9a-f]{16}",\d+\]', texts)
    after = {re.sub("[0-9a-f]{8}(?=[.])", new, old) for old, new in links}
    assert after & {old for old, _ in links}  # one of them was replaced in turn
    # A shard of version 1, and one of version 0 beside it.
    begins = {one.read_bytes()[8:10] for one in (FROZEN / "record").glob("0*.shard")}
    assert begins == {b"\0\0", b"\1\0"}


# --- datasets that are made here ------------------------------------------------------------------


@pytest.fixture
def grown(tmp_path: Path) -> Path:
    """A dataset of 12 records in 3 shards, on which all kinds of commits follow each other."""
    names = [f"{kind}/{number}.jpg" for kind in ("a", "b") for number in range(6)]
    tree = {name: noise(name, 90) for name in names}
    out, more = tmp_path / "out", {"c/new.jpg": noise("new", 70)}
    shardio.pack(plant(tmp_path / "tree", tree), out, plan=PlanOptions(max_records=4), jobs=1)
    keys = shardio.open(out, decode=None).keys()
    rng = random.Random(1)
    for count in (12, 5, 3):
        some = {key: {"score": rng.random(), "note": f"{key} ä\n"} for key in keys[:count]}
        shardio.annotate(out, some)
    shardio.annotate(out, {keys[3]: {"label": 1}, keys[7]: {"label": 0}})
    shardio.annotate(out, {keys[3]: {"note": None}})
    shardio.drop(out, keys=[keys[2], keys[9]])
    shardio.append(plant(tmp_path / "more", more), out, jobs=1)
    shardio.drop(out, keys=[keys[2]], erase=True)
    shardio.drop(out, keys=keys[4:8], erase=True)
    shardio.tag(out, "before")
    shardio.compact(out, jobs=1)
    shardio.annotate(out, {keys[0]: {"note": "anew"}})
    return out


def test_the_reader_of_the_page_reads_each_version_as_shardio_does(
    reader: Reader, grown: Path
) -> None:
    history = [one.id for one in shardio.log(grown).versions]
    read = []
    for version in [*history, "before"]:
        found = reader(grown, version)
        try:
            assert found == (0, lines(grown, version), "")
            read.append(version)
        except shardio.OptionError as error:
            assert "erased since" in str(error) and found.status == DAMAGED
    assert reader(grown) == (0, lines(grown), "")
    assert read[:3] == history[:3] and read[-1] == "before" and len(read) < len(history)


def test_the_reader_of_the_page_reads_splits(reader: Reader, tmp_path: Path) -> None:
    names = [f"{split}/{k}/{n}.jpg" for split in ("train", "val") for k in "ab" for n in range(3)]
    tree = plant(tmp_path / "tree", {name: noise(name, 60) for name in names})
    out = tmp_path / "out"
    shardio.pack(tree, out, jobs=1)
    shardio.drop(out / "val", keys=["a/1.jpg"])
    found = reader(out)
    assert found == (0, lines(out), "") and len(found.lines) == 2 + 12 - 1
    splits = [line for line in found.lines if line.startswith("split")]
    assert splits == ["split\ttrain", "split\tval"]


# --- damage ---------------------------------------------------------------------------------------


def copied(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(FROZEN / name, folder / name))


def damaged(data: bytes, rng: random.Random) -> bytes:
    """One byte changed, some cut off, or some added."""
    at = rng.randrange(len(data))
    return rng.choice(
        [
            data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
            data[:at],
            data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:],
        ]
    )


def test_the_reader_of_the_page_finds_damage_in_each_file(reader: Reader, tmp_path: Path) -> None:
    out, tag = copied("record", tmp_path), "before the erasing ä"
    rng = random.Random(38)
    right = {(): EXPECTED["record"][""], (tag,): EXPECTED["record"][tag]}
    found = []
    for path in sorted(out.iterdir()):
        whole = path.read_bytes()
        path.write_bytes(damaged(whole, rng))
        for version, wanted in right.items():
            got = reader(out, *version)
            assert got.status in (DAMAGED, UNKNOWN) or got.lines == wanted, path.name
            found += [path.suffix] if got.status else []
        path.write_bytes(whole)
    assert len(found) > 50 and {*found} == {".bin", ".json", ".shard"}
    assert all(reader(out, *version).lines == right[version] for version in right)


def test_shards_that_changed_places_are_found(reader: Reader, tmp_path: Path) -> None:
    out = copied("record", tmp_path)
    first, second = sorted(out.glob("0*.shard"))[:2]
    first.rename(out / "x")
    second.rename(first)
    (out / "x").rename(second)
    assert reader(out).status == DAMAGED


def resealed_shard(data: bytes) -> bytes:
    """A shard that was changed, with right checksums, as far as its parts are still found."""
    whole = bytearray(data)
    (length,) = struct.unpack_from("<I", whole, 32)
    index, _, records = struct.unpack_from("<QQI", whole, len(whole) - 60)
    seed = xxhash.xxh3_64_intdigest(bytes(whole[12:32])) >> 32 << 32
    at = 44 + length
    if at < index < len(whole) - 60:
        struct.pack_into("<Q", whole, at - 8, xxhash.xxh3_64_intdigest(bytes(whole[: at - 8])))
        for record in range(min(records, 100)):
            if at + 16 > index:
                break
            (size,) = struct.unpack_from("<I", whole, at + 8)
            body = bytes(whole[at + 8 : at + 16 + size])
            struct.pack_into("<Q", whole, at, xxhash.xxh3_64_intdigest(body, seed + record))
            at += 16 + size
    if index < len(whole) - 60:
        sealed = xxhash.xxh3_64_intdigest(bytes(whole[index:-16]))
        struct.pack_into("<Q", whole, len(whole) - 16, sealed)
    return bytes(whole)


def resealed(text: str) -> str:
    """A manifest that was changed, with its right SHA-256."""
    body = text[:-SEAL]
    return f'{body}"sha256": "{hashlib.sha256(body.encode("latin-1")).hexdigest()}"\n}}\n'


def put(out: Path, name: str, data: bytes) -> Path:
    """Put a file in the place of one that the manifest names, which then names this one."""
    old = (out / name).read_bytes()
    text = (out / "manifest.json").read_text()
    digest, before = hashlib.sha256(data).hexdigest(), hashlib.sha256(old).hexdigest()
    new = name.replace(before[:8], digest[:8])
    text = text.replace(name, new).replace(before, digest)
    if name.endswith(".shard"):
        sums = [f"{int.from_bytes(one[-16:-8], 'little'):016x}" for one in (old, data)]
        text = text.replace(*sums)
    (out / "manifest.json").write_text(resealed(text))
    (out / name).unlink()
    (out / new).write_bytes(data)
    return out / new


def changed(data: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, to such as lengths and kinds go wrong by, or cut out."""
    whole = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(whole))
        some = rng.choice(
            [b"\xff", b"\0", b"\xdb\xff\xff\xff\xff", b"\xdd\0\xff\0\0", b"\x91" * 40]
        )
        some = rng.choice([some, rng.randbytes(1), rng.randbytes(4)])
        whole[at : at + len(some)] = some
    return bytes(whole[: len(data)])


@pytest.mark.parametrize(("name", "seed"), [("record", 1), ("raw", 2), ("compacted", 3)])
def test_forged_datasets_never_lead_the_reader_out_of_a_buffer(
    reader: Reader, tmp_path: Path, name: str, seed: int
) -> None:
    rng, statuses = random.Random(seed), []
    for turn in range(30):
        out = copied(name, tmp_path / str(turn))
        shown = (out / "manifest.json").read_text()
        path = rng.choice(sorted(one for one in out.iterdir() if one.name in shown))
        if turn % 3 == 0:
            path = out / "manifest.json"
            text = changed(path.read_bytes(), rng).decode("latin-1")
            path.write_bytes(resealed(text).encode("latin-1"))
        elif path.suffix == ".shard":
            put(out, path.name, resealed_shard(changed(path.read_bytes(), rng)))
        else:
            put(out, path.name, changed(path.read_bytes(), rng))
        statuses.append(reader(out).status)
        shutil.rmtree(out)
    assert statuses.count(DAMAGED) > len(statuses) // 2


def test_no_length_leads_the_reader_out_of_a_buffer(reader: Reader, tmp_path: Path) -> None:
    """Lengths, and some bytes of header, head and index, become large, under right checksums."""
    out = copied("compacted", tmp_path)
    shown = (out / "manifest.json").read_text()
    (path,) = [one for one in out.glob("0*.shard") if f'["{one.name}",2' in shown]
    whole = path.read_bytes()
    (fields,) = struct.unpack_from("<I", whole, 32)
    (index,) = struct.unpack_from("<Q", whole, len(whole) - 60)
    lengths = {32, 44 + fields + 8, 44 + fields + 12, index, index + 4, len(whole) - 60}
    others = [*range(36, 44 + fields + 60), *range(index, len(whole) - 40)]
    for at in sorted(lengths | {*random.Random(5).sample(others, 30)}):
        for new in b"\xff\xff\x07\0", b"\xdb\x7f\xff\xff":
            forged = resealed_shard(whole[:at] + new + whole[at + 4 :])
            new_path = put(out, path.name, forged)
            reader(out)  # which raises for a read outside
            new_path.unlink()
            path.write_bytes(whole)
            (out / "manifest.json").write_text(shown)


# --- what is not of this version ------------------------------------------------------------------


def one_shard(out: Path) -> str:
    return sorted(out.glob("00000-*.shard"))[0].name


def in_manifest(old: str, new: str) -> Callable[[Path], None]:
    def change(out: Path) -> None:
        text = (out / "manifest.json").read_text()
        assert old in text
        (out / "manifest.json").write_text(resealed(text.replace(old, new, 1)))

    return change


def two_sums(out: Path) -> None:
    text = (out / "manifest.json").read_text()
    (out / "manifest.json").write_text(resealed(text + "x" * SEAL))


def in_shard(*places: tuple[int, bytes]) -> Callable[[Path], None]:
    """Change bytes of the first shard; places before 0 count from its end."""

    def change(out: Path) -> None:
        data = bytearray((out / one_shard(out)).read_bytes())
        for at, new in places:
            at += len(data) if at < 0 else 0
            data[at : at + len(new)] = new
        put(out, one_shard(out), resealed_shard(bytes(data)))

    return change


NEWER = {
    "a manifest of version 2": (in_manifest('"version": 1', '"version": 2'), VersionError, UNKNOWN),
    "a shard of version 2": (in_shard((8, b"\2"), (-36, b"\2")), VersionError, UNKNOWN),
    "another kind of checksum": (in_shard((10, b"\2"), (-34, b"\2")), VersionError, UNKNOWN),
    "a byte of the header that is 0": (in_shard((11, b"\1")), DamageError, DAMAGED),
    "a byte of the trailer that is 0": (in_shard((-33, b"\1")), DamageError, DAMAGED),
    "a kind of field": (in_manifest('["label","int"]', '["label","i64"]'), DamageError, UNKNOWN),
    "members of version 1 in version 0": (
        in_manifest('"version": 1', '"version": 0'),
        DamageError,
        DAMAGED,
    ),
    "something behind its sum": (two_sums, DamageError, DAMAGED),
    "a list with one value more": (in_manifest('"]\n],', '",1]\n],'), DamageError, DAMAGED),
}


@pytest.mark.parametrize("what", NEWER)
def test_what_only_a_newer_version_can_mean_is_refused(
    reader: Reader, tmp_path: Path, what: str
) -> None:
    change, error, status = NEWER[what]
    out = copied("raw", tmp_path)
    change(out)
    with pytest.raises(error) as raised:
        lines(out)
    found = reader(out)
    assert found.status == status and found.lines == []
    if error is VersionError:  # each says which shardio, or that a newer one is needed
        assert re.search("needs shardio >= |install|knows kind", str(raised.value))
        assert "newer version" in found.error


def test_members_and_options_that_a_reader_does_not_know_are_passed_over(
    reader: Reader, tmp_path: Path
) -> None:
    out = copied("raw", tmp_path)
    more = '"license": ["CC0",{"since":1.5}],\n"options": {"more":[null],'
    in_manifest('"options": {', more)(out)
    (out / "notes.txt").write_text("of somebody else")
    assert lines(out) == EXPECTED["raw"][""]
    assert reader(out) == (0, EXPECTED["raw"][""], "")
