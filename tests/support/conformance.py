"""What every shard format, and every source of packing, must do: subclass, and pass.

A format says how a shard of samples is built and how it is opened; a source, how one is made and
changed. The tests are inherited. Where a format cannot hold a kind of value, it narrows FIELDS and
`sample`.
"""

import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from shardio import commit, formats, pack, unpack
from shardio.dataset import sequence
from shardio.errors import ShardioError, SourceChangedError
from shardio.formats import manifest
from shardio.formats.base import Opening, Shard, ShardInfo
from shardio.formats.foreign import base as foreign
from shardio.formats.foreign.base import ForeignFile, ForeignShard
from shardio.formats.index import checksum, key_hash
from shardio.formats.record import RecordEncoder
from shardio.formats.sample import Schema
from shardio.names import KEY
from shardio.packing import sources
from shardio.packing.packed import Packed
from shardio.packing.sources.base import Listing, SourceRequest
from shardio.storage.location import locate

from .packing import grouped
from .trees import content, shards

Fields = Sequence[tuple[str, str]]
Sample = Mapping[str, Any]

FIELDS: Fields = (
    ("__key__", "key"),
    ("image", "image"),
    ("label", "int"),
    ("weight", "float"),
    ("flipped", "bool"),
    ("caption", "str"),
    ("mask", "array"),
    ("extra", "bytes"),
    ("meta", "json"),
)


def sample(number: int, size: int = 100) -> dict[str, Any]:
    """A sample that differs from all others in every field; None here and there."""
    noise = np.random.default_rng(number)
    made: dict[str, Any] = {
        "__key__": f"class {number % 3}/é{number:04d}.jpg".encode() + b"\xff" * (number % 2),
        "image": noise.bytes(size),
        "label": number * 7 - 3,
        "weight": number / 7,
        "flipped": number % 2 == 0,
        "caption": f"\u732b {number}",
        "mask": noise.integers(0, 99, (number % 3, 4)).astype("<i4"),
        "extra": noise.bytes(number % 5),
        "meta": {"number": number, "parts": [None, 0.5, b"\x00", {"x": noise.random(2)}]},
    }
    for name in FIELDS[1 + number % 8][0], FIELDS[1 + number // 8 % 8][0]:
        if number % 4 == 3:
            made[name] = None
    return made


SAMPLES = [sample(number) for number in range(40)]


def shard_of(
    folder: Path, number: int = 0, fields: Sequence[tuple[str, str]] | None = None
) -> Shard:
    """Open a shard of an indexed folder; fields: others than the manifest has."""
    storage = locate(folder)
    made = manifest.load(storage)
    opening = made.opening(storage)
    if fields is not None:
        opening = replace(opening, schema=Schema(fields))
    return formats.open_shard(made.format, opening, made.shard(number))


def by_hold(shard: Shard, record: int) -> Any:
    """The sample of a record, as windows give it: held, then decoded."""
    held = shard.hold(record, record + 1)[0]
    return shard.read(record) if held is None else shard.decode(record, held)


def same(a: Any, b: Any) -> bool:
    """Equal in type and in every bit: -0.0 is not 0.0, True not 1, NaN is NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(same, a.values(), b.values()))
    return bool(a == b)


def same_all(a: Iterable[Any], b: Iterable[Any]) -> bool:
    return same(list(a), list(b))


def expected_column(values: Sequence[Any]) -> tuple[list[Any], list[bool]]:
    return [0 if v is None else v for v in values], [v is None for v in values]


class FormatConformance:
    FIELDS: Fields = FIELDS
    SAMPLES: Sequence[Sample]

    def __init_subclass__(cls) -> None:
        cls.SAMPLES = [cls.sample(number) for number in range(40)]

    @classmethod
    def sample(cls, number: int, size: int = 100) -> Sample:
        """Return a sample that the format can hold, with an image of about this size."""
        made = sample(number, size)
        return {name: made[name] for name, _ in cls.FIELDS}

    def build(self, folder: Path, fields: Fields, samples: Sequence[Sample]) -> Path:
        """Write one shard into the folder; its path."""
        raise NotImplementedError

    def open(self, path: Path) -> Shard:
        """Open what `build` wrote, as a dataset does: with all that a manifest says of it."""
        raise NotImplementedError

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return self.build(tmp_path, self.FIELDS, self.SAMPLES)

    @pytest.fixture
    def shard(self, path: Path) -> Iterable[Shard]:
        shard = self.open(path)
        yield shard
        shard.close()

    def test_count_and_order_are_those_of_the_samples(self, shard: Shard) -> None:
        assert shard.records == len(self.SAMPLES)
        assert same_all(shard.scan(0, shard.records), self.SAMPLES)

    def test_every_record_reads_alone_and_in_any_order(self, shard: Shard) -> None:
        for record in np.random.default_rng(0).permutation(shard.records).tolist():
            assert same(shard.read(record), self.SAMPLES[record])

    def test_a_record_past_the_end_is_an_index_error(self, shard: Shard) -> None:
        with pytest.raises(IndexError):
            shard.read(shard.records)

    def test_every_range_scans_to_its_records(self, shard: Shard) -> None:
        n = min(shard.records, 15)
        for start in range(n + 1):
            for stop in range(start, n + 1):
                assert same_all(shard.scan(start, stop), self.SAMPLES[start:stop])

    def test_a_scan_may_be_left_half_way(self, shard: Shard) -> None:
        scan = shard.scan(0, shard.records)
        next(scan)
        del scan
        assert same(shard.read(1), self.SAMPLES[1])

    def test_held_bytes_decode_later(self, shard: Shard) -> None:
        held = shard.hold(3, shard.records)
        assert len(held) == shard.records - 3
        assert shard.hold(2, 2) == []
        for record, data in reversed(list(enumerate(held, 3))):
            assert data is not None
            assert same(shard.decode(record, data), self.SAMPLES[record])

    def test_a_held_record_decoded_as_another_is_an_error(self, shard: Shard) -> None:
        held = shard.hold(0, 3)[2]
        assert held is not None
        with pytest.raises(ShardioError):
            shard.decode(1, held)

    def test_keys_read_alone(self, shard: Shard) -> None:
        keys = [shard.key(record) for record in range(shard.records)]
        assert keys == [values["__key__"] for values in self.SAMPLES]

    def test_key_hashes_are_the_low_half_of_xxh3(self, shard: Shard) -> None:
        hashes = [
            xxhash.xxh3_64_intdigest(values["__key__"]) & 0xFFFFFFFF for values in self.SAMPLES
        ]
        assert shard.key_hashes.dtype == np.uint32
        assert shard.key_hashes.tolist() == hashes

    def test_columns_are_the_scalar_fields(self, shard: Shard) -> None:
        scalars = [name for name, kind in self.FIELDS if kind in ("int", "float", "bool")]
        assert sorted(shard.columns) == sorted(scalars)
        for name, column in shard.columns.items():
            values, missing = expected_column([values[name] for values in self.SAMPLES])
            assert np.ma.filled(column, 0).tolist() == values
            assert np.ma.getmaskarray(column).tolist() == missing

    def test_sizes_are_what_records_cost_to_read(self, shard: Shard, path: Path) -> None:
        sizes = shard.sizes[:]
        assert sizes.dtype == np.int64 and sizes.shape == (shard.records,)
        blobs = [len(values["image"] or b"") for values in self.SAMPLES]
        assert (sizes >= blobs).all() and sizes.sum() <= path.stat().st_size
        assert shard.sizes[1:].tolist() == sizes[1:].tolist()
        assert shard.sizes[np.array([2, 0])].tolist() == sizes[[2, 0]].tolist()
        assert shard.sizes[2] == sizes[2]

    def test_values_are_owned_and_outlive_the_shard(self, path: Path) -> None:
        shard = self.open(path)
        first, second = shard.read(2), shard.read(2)
        [scanned] = shard.scan(2, 3)
        held = by_hold(shard, 2)
        for taken in first, scanned, held:
            for value in taken.values():
                assert not isinstance(value, (memoryview, bytearray))
                if isinstance(value, np.ndarray):
                    assert value.flags.owndata
                    value[...] = 0
        assert same(second, self.SAMPLES[2])
        shard.close()
        assert same(second, self.SAMPLES[2])

    def test_one_file_is_open_twice_and_each_reads_on_without_the_other(self, path: Path) -> None:
        first, second = self.open(path), self.open(path)
        scan = second.scan(0, second.records)
        assert same(next(scan), self.SAMPLES[0])
        assert same(first.read(0), self.SAMPLES[0])
        first.close()
        assert same_all(scan, self.SAMPLES[1:])
        assert same(second.read(1), self.SAMPLES[1])
        second.close()

    def test_a_record_lies_behind_the_one_before_it(self, shard: Shard) -> None:
        offsets = [shard.offset(record) for record in range(shard.records)]
        assert offsets == sorted(offsets) and offsets[0] >= 0

    def test_closing_twice_does_no_harm(self, path: Path) -> None:
        shard = self.open(path)
        shard.close()
        shard.close()

    def test_hints_change_nothing(self, shard: Shard) -> None:
        shard.will_need(0, shard.records)
        shard.will_need(2, 2)
        assert same(shard.read(0), self.SAMPLES[0])

    def test_an_empty_shard_is_a_shard(self, tmp_path: Path) -> None:
        shard = self.open(self.build(tmp_path, self.FIELDS, []))
        assert shard.records == 0
        assert list(shard.scan(0, 0)) == []
        assert shard.hold(0, 0) == []
        assert shard.sizes[:].shape == shard.key_hashes.shape == (0,)
        shard.close()

    def test_large_and_small_records_mix(self, tmp_path: Path) -> None:
        sizes = [0, 1, 400_000, 7, 16_384, 100_000, *[900] * 400, 300_000, 5]
        samples = [self.sample(number, size) for number, size in enumerate(sizes)]
        shard = self.open(self.build(tmp_path, self.FIELDS, samples))
        assert same_all(shard.scan(0, shard.records), samples)
        assert same_all(shard.scan(1, 5), samples[1:5])
        assert same_all((shard.read(i) for i in range(shard.records)), samples)
        shard.close()

    @pytest.mark.parametrize("flips", [80, pytest.param(250, marks=pytest.mark.slow)])
    def test_damage_gives_the_right_content_or_a_shardio_error(
        self, path: Path, flips: int
    ) -> None:
        intact = path.read_bytes()
        noise = np.random.default_rng(1)
        found = []
        for at in noise.integers(0, len(intact), flips).tolist():
            damaged = bytearray(intact)
            damaged[at] ^= 1 << (at % 8)
            path.write_bytes(damaged)
            found.append(self._survives(path))
        for start in range(0, len(intact), max(len(intact) * 6 // flips, 1)):
            path.write_bytes(intact[:start])
            found.append(self._survives(path))
            path.write_bytes(intact[:start] + bytes(64) + intact[start + 64 :])
            found.append(self._survives(path))
        path.write_bytes(intact + b"garbage")
        found.append(self._survives(path))
        assert sum(found) > 0.84 * len(found)

    def _survives(self, path: Path) -> bool:
        """Whether damage was reported; wrong content is a failure."""
        try:
            shard = self.open(path)
        except ShardioError:
            return True
        reported = False
        for record, right in enumerate(self.SAMPLES):
            for read in (
                lambda shard=shard, record=record: shard.read(record),
                lambda shard=shard, record=record: next(shard.scan(record, record + 1)),
                lambda shard=shard, record=record: by_hold(shard, record),
            ):
                try:
                    assert same(read(), right)
                except ShardioError:
                    reported = True
        shard.close()
        return reported


ID = bytes(range(16))


class IndexedConformance(FormatConformance):
    """What a format of others must do, too. A subclass writes its file, and seals it."""

    FILE: type[ForeignFile]

    def seal(
        self,
        path: Path,
        fields: Fields,
        samples: Sequence[Sample],
        ranges: Sequence[tuple[int, int]],
        extra: bytes,
    ) -> None:
        """Write the index of a file whose records have these ranges."""
        data = path.read_bytes()
        checksums = [checksum(data[at : at + size]) for at, size in ranges]
        hashes = [key_hash(one[KEY]) for one in samples]
        scalars = {
            name: [one[name] for one in samples]
            for name, kind in fields
            if kind in ("int", "float", "bool")
        }
        body = foreign.dump(0, ID, ranges, checksums, hashes, scalars, extra)
        sealed = int.from_bytes(body[-8:], "little")
        (path.parent / foreign.sidecar_name(0, sealed)).write_bytes(body)
        self.info = ShardInfo(path.name, 0, len(samples), len(data), bytes(32), sealed)
        self.schema = Schema(fields)

    def open(self, path: Path) -> ForeignShard:
        storage = locate(path.parent)
        return ForeignShard(self.FILE, Opening(storage, storage, ID, self.schema, {}), self.info)


class SourceConformance:
    """A subclass makes a source of COUNT records, and changes one of them."""

    KIND: str
    COUNT = 12

    def make(self, root: Path) -> Path:
        """Write the source into a folder that is empty; what is to be packed."""
        raise NotImplementedError

    def change(self, path: Path) -> None:
        """Change one record of the source, so that all sizes stay as they were."""
        raise NotImplementedError

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return self.make(tmp_path / "source")

    def pack(self, path: Path, out: Path, **options: Any) -> Packed:
        [done] = pack(path, out, **grouped({"jobs": 1, "max_records": 3} | options))
        return done

    def listing(self, path: Path) -> Listing:
        request = sources.detect_kind(SourceRequest(os.fsencode(path)))
        assert request.kind == self.KIND
        found = sources.list_records(request)
        assert list(found) == sources.split_names(request) == [""]
        return found[""]

    def samples(self, listing: Listing) -> list[dict[str, Any]]:
        places = range(len(listing.keys)) if listing.places is None else listing.places.tolist()
        with listing.source.open() as read:
            return [read(place) for place in places]

    def test_all_records_are_listed_once(self, path: Path) -> None:
        found = self.listing(path)
        assert found.problems == []
        assert len(found.keys) == len(set(found.keys)) == self.COUNT
        assert len(found.sizes) == len(found.mtimes) == self.COUNT
        keys = [sample["__key__"] for sample in self.samples(found)]
        assert len(set(keys)) == self.COUNT

    def test_a_listing_is_the_same_wherever_the_source_lies(
        self, path: Path, tmp_path: Path
    ) -> None:
        one, two = self.listing(path), self.listing(self.make(tmp_path / "elsewhere"))
        assert one.keys == two.keys and one.options == two.options
        assert one.sizes.tolist() == two.sizes.tolist()
        assert one.mtimes.tolist() == two.mtimes.tolist()
        assert same_all(self.samples(one), self.samples(two))

    def test_records_have_the_fields_and_kinds_of_the_listing(self, path: Path) -> None:
        found = self.listing(path)
        encoder = RecordEncoder(Schema((("__key__", "key"), *found.fields)), bytes(16), 0)
        for one in self.samples(found):
            assert set(one) == {"__key__", *dict(found.fields)}
            encoder.record(one)  # refuses values of another kind

    def test_records_read_in_any_order_and_again(self, path: Path) -> None:
        found = self.listing(path)
        right = self.samples(found)
        with found.source.open() as read:
            for i in [*np.random.default_rng(0).permutation(self.COUNT).tolist(), 3, 3]:
                place = i if found.places is None else int(found.places[i])
                assert same(read(place), right[i])

    def test_a_dataset_holds_the_records_and_unpacks(self, path: Path, tmp_path: Path) -> None:
        done = self.pack(path, tmp_path / "out")
        assert (done.source, done.records, done.shards) == (self.KIND, self.COUNT, 4)
        listed, packed = (
            {one["__key__"]: dict(sorted(one.items())) for one in some}
            for some in (self.samples(self.listing(path)), sequence.stored(tmp_path / "out"))
        )
        assert same_all(map(packed.get, listed), listed.values())
        assert len(packed) == self.COUNT
        if self.listing(path).fields[0] == ("image", "image"):
            unpack(tmp_path / "out", tmp_path / "back")
            kept = set(filter(None, content(tmp_path / "back").values()))
            assert {sample["image"] for sample in listed.values()} <= kept

    def test_jobs_and_parts_make_the_same_bytes(self, path: Path, tmp_path: Path) -> None:
        self.pack(path, tmp_path / "one")
        self.pack(path, tmp_path / "two", jobs=2)
        for part in (2, 1, 3):
            self.pack(path, tmp_path / "parts", part=(part, 3))
        assert commit(tmp_path / "parts", jobs=1)[0].committed
        assert content(tmp_path / "one") == content(tmp_path / "two") == content(tmp_path / "parts")
        assert self.pack(path, tmp_path / "one").already

    def test_an_interrupted_packing_goes_on(
        self, path: Path, tmp_path: Path, dead_on_shard: Callable[[int], None]
    ) -> None:
        dead_on_shard(2)
        with pytest.raises(KeyboardInterrupt):
            self.pack(path, tmp_path / "out")
        assert len(shards(tmp_path / "out")) == 2
        if path.is_file():
            os.utime(path)  # the time of the listing itself says nothing
        done = self.pack(path, tmp_path / "out")
        assert (done.kept, done.built) == (2, 2)
        self.pack(path, tmp_path / "one")
        assert content(tmp_path / "out") == content(tmp_path / "one")

    def test_a_changed_record_is_another_plan(
        self, path: Path, tmp_path: Path, dead_on_shard: Callable[[int], None]
    ) -> None:
        dead_on_shard(2)
        with pytest.raises(KeyboardInterrupt):
            self.pack(path, tmp_path / "out")
        self.change(path)
        with pytest.raises(SourceChangedError, match="--restart"):
            self.pack(path, tmp_path / "out")
        assert self.pack(path, tmp_path / "out", restart=True).kept == 0
        self.pack(path, tmp_path / "one")
        assert content(tmp_path / "out") == content(tmp_path / "one")

    def test_a_source_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ShardioError, match="nowhere"):
            self.pack(tmp_path / "nowhere", tmp_path / "out", kind=self.KIND)
        assert not (tmp_path / "out").exists()


def change_file(file: Path, change: str) -> None:
    """Change the size of a file, its time, or remove it."""
    if change == "size":
        file.write_bytes(file.read_bytes() + b"x")
        os.utime(file, ns=(10**18, 10**18))
    elif change == "time":
        os.utime(file)
    else:
        file.unlink()


class FileSourceConformance(SourceConformance):
    """A source whose records are files: it says which is the last one of the first record."""

    def file(self, path: Path) -> Path:
        raise NotImplementedError

    def change(self, path: Path) -> None:
        os.utime(self.file(path), ns=(7, 7))

    @pytest.mark.parametrize("change", ["size", "time", "gone"])
    def test_a_file_that_changes_after_the_listing_is_named(self, path: Path, change: str) -> None:
        found, file = self.listing(path), self.file(path)
        change_file(file, change)
        place = 0 if found.places is None else int(found.places[0])
        with found.source.open() as read:
            with pytest.raises(SourceChangedError, match=file.name):
                read(place)
            read(place + 1)
