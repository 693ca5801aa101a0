"""Every format through the whole house: the same order, checks, commands and damage for all.

A format is a row in support/every_format.py. What its own bytes are is the matter of its own tests.
"""

import errno
import hashlib
import json
import pickle
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from support import LIMIT_S, command_server, forging
from support.every_format import COUNTS, FORMATS, Made, N, Sample
from support.reading import batches, drain, flat
from support.small_datasets import flip
from support.trees import environment
from torch.utils.data import DataLoader

import shardio
from shardio import DamageError, ShardDataset, ShardioError
from shardio.cli.main import main
from shardio.dataset import sequence as sequences
from shardio.formats import manifest
from shardio.formats.sample import pack as pack_head
from shardio.formats.sample import unpack as unpack_head
from shardio.names import KEY
from shardio.storage.location import locate
from shardio.viewer.results import Query
from shardio.viewer.view import open_view

PROGRAMS = Path(__file__).parent.parent / "support" / "format_programs.py"
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:epoch .* is being read again"),
]


# For what takes a second or more: our own two.
FEW = [
    pytest.param(name, marks=() if name in ("record", "lmdb") else pytest.mark.slow)
    for name in FORMATS
]


@pytest.fixture(scope="module", params=FORMATS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(request.param, tmp_path_factory.mktemp("dataset"))


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made("record", tmp_path_factory.mktemp("record"))


@pytest.fixture
def copy(made: Made, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made.folder, tmp_path / "copy"))


def program(*arguments: Any, before: Sequence[str | Path] = ()) -> Any:
    """What a program of format_programs.py prints; a signal is a failure.

    before: a command line that starts it; else it is a fork of support.command_server.
    """
    words = [*map(str, arguments)]
    if before:
        command = [*before, sys.executable, "-W", "error", PROGRAMS, *words]
        done = subprocess.run(command, capture_output=True, env=environment(), timeout=LIMIT_S)
        code, out, error = done.returncode, done.stdout, done.stderr
    else:
        code, out, error = command_server.run(words, environment(), [str(PROGRAMS)])
    assert code == 0, (code, out, error)
    return json.loads(out)


def looks(folder: Path) -> dict[Path, tuple[int, ...]]:
    """What would tell that somebody wrote here."""
    found = {path: path.stat() for path in (folder, *folder.rglob("*"))}
    return {path: (s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for path, s in found.items()}


# --- records ------------------------------------------------------------------------------------


def test_records_come_in_the_order_they_were_written(made: Made) -> None:
    data = made.open()
    assert len(data) == N
    assert data.manifest.format == made.format
    assert data.manifest.shard_records.tolist() == list(made.row.counts)
    assert list(data) == made.samples
    assert data.keys() == made.keys


def test_records_are_found_by_number_and_by_key(made: Made) -> None:
    data = made.open()
    for number in np.random.default_rng(0).permutation(N).tolist():
        assert data[number] == made.samples[number] == data[number - N]
        assert data.find(made.keys[number]) == number
    for outside in (N, -N - 1):
        with pytest.raises(IndexError):
            data[outside]
    with pytest.raises(KeyError):
        data.find(made.keys[0] + "x")
    assert made.keys[7] in data and "no key" not in data


SLICES = [
    *(slice(None), slice(85, 95), slice(-70, None), slice(170, 20, -7), slice(3, None, 50)),
    *(slice(240, 999), slice(5, 5)),
]


def test_slices_are_sequences(made: Made) -> None:
    for cut in SLICES:
        data, right = made.open()[cut], made.samples[cut]
        assert list(data) == right == [data[i] for i in range(len(data))]
        assert data.keys() == [sample[KEY] for sample in right]
        assert data.columns("label").tolist() == [sample["label"] for sample in right]
        assert list(data[1:][::-1]) == right[1:][::-1]
        if right:
            assert data.find(right[-1][KEY]) == len(right) - 1


def test_images_are_decoded(made: Made) -> None:
    assert shardio.open(made.folder)[100]["image"].size == (24, 16)
    batch = next(
        iter(
            ShardDataset(
                made.folder,
                batch_size=5,
                fields=("image", "label"),
                transform=shardio.RandomResizedCrop(8),
            )
        )
    )
    assert batch[0].shape == (5, 3, 8, 8) and set(batch[1].tolist()) <= {0, 1, 2}


# --- processes ----------------------------------------------------------------------------------


def test_pickles_go_on_reading(made: Made) -> None:
    data, stream = made.open(), made.stream()
    expected = batches(stream)
    for _ in range(2):  # before use, and after
        again = pickle.loads(pickle.dumps(data))
        assert again[N - 1] == made.samples[-1] and list(again[80:100]) == made.samples[80:100]
        assert batches(pickle.loads(pickle.dumps(stream))) == expected
        part = pickle.loads(pickle.dumps(data[10:200:9]))
        assert list(part) == made.samples[10:200:9]
        assert list(data) == made.samples
    assert len(pickle.dumps(data)) < 10_000  # no index, and no record


def test_workers_read_what_their_parent_reads(made: Made) -> None:
    read_in_workers(made, "fork", 2)


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize("made", FEW, indirect=True)
def test_spawned_workers_read_what_their_parent_reads(made: Made) -> None:
    read_in_workers(made, "spawn", 1)


def read_in_workers(made: Made, start: str, workers: int) -> None:
    data, stream = made.open(), made.stream()
    alone = batches(stream)
    stream.set_epoch(0)
    assert list(data) == made.samples  # its shards are open now
    loader = DataLoader(
        stream,
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=start,
        persistent_workers=True,
    )
    iterator = iter(loader)
    got = [list(next(iterator)[0])]
    assert [data[number] for number in range(0, N, 20)] == made.samples[::20]  # meanwhile
    got += [list(keys) for (keys,) in iterator]
    assert got == alone
    iterator._shutdown_workers()
    assert list(data) == made.samples and batches(made.stream()) == alone


def test_a_map_style_loader_reads_it(made: Made) -> None:
    data = shardio.open(made.folder, decode=None, fields=(KEY, "label"))
    loader = DataLoader(data, batch_size=50, num_workers=1, collate_fn=list, shuffle=False)
    right = [(sample[KEY], sample["label"]) for sample in made.samples]
    assert [row for rows in drain(loader) for row in rows] == right


def test_two_datasets_are_read_at_once(made: Made, record: Made) -> None:
    """Of one folder with other options, and of another format; by turns, and mixed."""
    streams = [made.stream(), made.stream(seed=9), record.stream(seed=9)]
    alone = [batches(stream) for stream in streams]
    for stream in streams:
        stream.set_epoch(0)
    assert alone[0] != alone[1]
    loaders = [
        DataLoader(stream, batch_size=None, num_workers=min(number, 1))
        for number, stream in enumerate(streams)
    ]
    rounds = [[list(keys) for (keys,) in step] for step in zip(*loaders, strict=True)]
    assert [list(one) for one in zip(*rounds, strict=True)] == alone
    one, two, other = made.open(), made.open(), record.open()
    for a, b, c in zip(one, two, other, strict=True):
        assert a == b and c == record.samples[record.number[c[KEY]]]
    del one, other
    assert two[0] == made.samples[0]
    mixed = ShardDataset.mix([made.stream(), record.stream()], length=2 * N)
    keys = sorted(flat(batches(mixed)))
    assert keys == sorted(made.keys + record.keys)


# --- order --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks, workers", [(1, 0), (2, 0), (1, 3), (2, 1)])
def test_the_order_is_the_law(made: Made, ranks: int, workers: int) -> None:
    """So it is that of record shards of as many records."""
    for epoch in (0, 4) if workers == 0 else (1,):
        each = []
        for rank in range(ranks):
            given = {"rank": rank, "world_size": ranks, "batch_size": 8 // ranks}
            stream = made.stream(**given)
            stream.set_epoch(epoch)
            each.append(batches(stream, workers))
        got = [number for step in made.numbers(each) for number in step]
        virtual, order = made.law(epoch)
        assert got[:N] == order
        assert got[N:] == (virtual[: -N % 8] if ranks > 1 else [])


@pytest.mark.parametrize("options", [{"shuffle_buffer": "all"}, {"shuffle": False}, {}])
def test_the_order_is_that_of_record_shards(
    made: Made, record: Made, options: dict[str, Any]
) -> None:
    if tuple(made.row.counts) != COUNTS:
        pytest.skip("its shards have other numbers of records")
    mine, theirs = ([batches(one.stream(**options))] for one in (made, record))
    assert made.numbers(mine) == record.numbers(theirs)


@pytest.mark.parametrize("ranks, workers", [(1, 2), (2, 0)])
def test_it_goes_on_in_the_middle_of_an_epoch(made: Made, ranks: int, workers: int) -> None:
    _, order = made.law(2)
    first = made.stream()
    first.set_epoch(2)
    got = [number for step in made.numbers([batches(first)[:11]]) for number in step]
    state = json.loads(json.dumps(first.state_dict(steps=11)))
    each = []
    for rank in range(ranks):
        stream = made.stream(rank=rank, world_size=ranks, batch_size=8 // ranks)
        stream.load_state_dict(state)
        each.append(batches(stream, workers))
    got += [number for step in made.numbers(each, state["units"]) for number in step]
    assert got[:N] == order


def test_records_are_chosen_by_label(made: Made) -> None:
    wanted = [number for number, sample in enumerate(made.samples) if sample["label"] != 1]
    by_name = {} if made.open().manifest.classes is None else {"where": {"label": ["cat", "eel"]}}
    for options in ({"where": {"label": [0, 2]}}, {"where": {"label": lambda c: c != 1}}, by_name):
        if options:
            stream = made.stream(**options)
            assert len(stream) == -(-len(wanted) // 8)
            got = [made.number[key] for key in flat(batches(stream))]
            assert got == made.law(chosen=wanted)[1]
    few = made.stream().select(wanted[::11])
    assert sorted(made.number[key] for key in flat(batches(few))) == wanted[::11]


# --- commands -----------------------------------------------------------------------------------


def test_the_view_shows_it(made: Made) -> None:
    with open_view(made.folder) as view:
        summary = view.summary()
        assert (summary.records, summary.format) == (N, made.format)
        assert [card.key for card in view.page(count=N).cards] == made.keys
        cats = view.page(Query(label=0, sort="bytes"), count=N, wait_s=None)
        assert sorted(card.number for card in cats.cards) == [
            number for number, sample in enumerate(made.samples) if sample["label"] == 0
        ]
        search = view.page(Query(search=made.keys[100]), search_s=60.0)
        assert [card.number for card in search.cards] == [100] == [view.find(made.keys[100])]
        assert [one.count for one in view.histograms(wait_s=None).classes] == [
            sum(sample["label"] == label for sample in made.samples) for label in range(3)
        ]
        given = {"seed": 3, "shuffle_buffer": 40, "spans": 5, "unit": 2, "batch_size": 8}
        trained = view.page(Query(order="training", epoch=1, **given), count=N)
        assert [card.number for card in trained.cards] == made.law(1)[1]
        record = view.record(7)
        assert record.damaged is None and (record.checksum is None or record.checksum.ok)
        assert (record.width, record.height) == (24, 16)
        assert view.image(7).data == made.samples[7]["image"]
        assert view.check(budget_s=60.0).next is None and not view.damaged()


def test_every_command_takes_it(made: Made, tmp_path: Path, capfdbinary: Any) -> None:
    def say(*arguments: Any, code: int = 0) -> bytes:
        assert main([str(one) for one in arguments]) == code, capfdbinary.readouterr()
        printed: bytes = capfdbinary.readouterr().out
        return printed

    def told(*arguments: Any, code: int = 0) -> Any:
        return json.loads(say(*arguments, "--json", code=code))

    before, sample = looks(made.folder), made.samples[123]
    label = b"%d\n" % sample["label"]
    facts = told("info", made.folder)
    assert (facts["records"], facts["format"]) == (N, made.format)
    assert list(facts["fields"]) == list(sample)
    assert made.format.encode() in say("info", made.folder)
    rows = told("ls", made.folder)["records"]
    assert [row["key"] for row in rows] == made.keys
    assert [row["label"] for row in rows] == [one["label"] for one in made.samples]
    assert made.keys[-1].encode() in say("ls", made.folder, "--shard", len(made.row.counts) - 1)
    assert say("cat", made.folder, 123) == sample["image"]
    assert say("cat", made.folder, "--key", sample[KEY], "--field", "label") == label
    found = told("verify", made.folder, "--sha256", "--decode", "--jobs", 1)
    assert (found["records"], found["damages"]) == (N, [])
    assert told("explain", made.folder, "--batch-size", 8)["records"] == N
    told("unpack", made.folder, tmp_path / "files")
    files = [path for path in (tmp_path / "files").rglob("*") if path.is_file()]
    images = sorted(one["image"] for one in made.samples)
    assert sorted(path.read_bytes() for path in files) == images
    assert {path.suffix for path in files} <= {".jpg", ".jpeg"}
    given = ("--format", "webdataset", "--fields", "image=jpg,label=cls")
    assert told("export", made.folder, tmp_path / "tars", *given)["records"] == N
    assert looks(made.folder) == before
    told("index", tmp_path / "tars", "--jobs", 1)
    again = sequences.stored(tmp_path / "tars")
    assert [[one["image"], one["label"]] for one in again] == [
        [one["image"], one["label"]] for one in made.samples
    ]


@pytest.mark.parametrize("made", FEW, indirect=True)
def test_tune_takes_it(made: Made, capfd: Any) -> None:
    before = looks(made.folder)
    assert main(["tune", str(made.folder), "--batch-size", "8", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["records"] == N
    assert looks(made.folder) == before


def test_verify_and_cat_report_damage(made: Made, copy: Path, capfd: Any) -> None:
    (path, found), counts = damaged(copy, made.samples[140]), made.row.counts
    first = counts[0] if counts[0] <= 140 else 0  # of the shard that has record 140
    assert main(["verify", str(copy), "--jobs", "1"]) == 3
    assert str(path) in capfd.readouterr().out
    assert main(["verify", str(copy), "--jobs", "1", "--sha256", "--json"]) == 3
    damages = json.loads(capfd.readouterr().out)["damages"]
    hit = {first + one["record"] for one in damages if one["record"] is not None}
    assert 140 in hit or (hit and not found)
    assert main(["cat", str(copy), str(min(hit))]) == 3
    assert str(path) in capfd.readouterr().err
    assert main(["cat", str(copy), "20", "--output", str(copy / "20.jpg")]) == 0
    assert (copy / "20.jpg").read_bytes() == made.samples[20]["image"]


def damaged(folder: Path, sample: Sample) -> tuple[Path, bool]:
    """The file of a record, in whose image a bit was flipped; anywhere, where it is compressed.

    And whether it was found there: of compressed bytes, which record they are depends on Pillow.
    """
    part = sample["image"].rstrip(b"\0")[-40:-8]
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if (at := path.read_bytes().find(part)) >= 0:
            flip(path, at)
            return path, True
    shard = folder / manifest.load(locate(folder)).shard(1).name
    flip(shard, shard.stat().st_size // 2)
    return shard, False


# --- hazards ------------------------------------------------------------------------------------


def test_reading_and_indexing_neither_write_nor_map_nor_lock(
    made: Made, copy: Path, tmp_path: Path
) -> None:
    """Files and folders may not be written, and where a mount can be made, nobody may."""
    for path in copy.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    elsewhere = () if made.row.index is None else (made.format, tmp_path / "out")
    script = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    mounted = ["unshare", "-rm", "sh", "-c", script, copy]
    possible = shutil.which("unshare") and not subprocess.run([*mounted, "true"]).returncode
    before = looks(copy)
    found = program("read", copy, *elsewhere, before=mounted if possible else ())
    assert found["records"] == N
    if possible:
        assert found["errno"] == errno.EROFS
        assert looks(copy) == before


def test_damage_gives_the_right_content_or_an_error(made: Made, copy: Path) -> None:
    """And `verify --sha256` finds all of it. The program fails for anything else."""
    kinds = program("damage", copy, 1, 16)
    missed = {kind: tried - found for kind, (tried, found) in kinds.items() if found < tried}
    assert not missed or (made.row.unseen and missed.keys() == {"data flipped"}), kinds
    assert missed.get("data flipped", 0) < 8 < kinds["data flipped"][0]


def test_damage_before_indexing_gives_content_or_an_error(made: Made, copy: Path) -> None:
    """What most formats cannot see; docs/formats.md says which. Nothing else comes of it."""
    if made.row.index is None:
        pytest.skip("it is packed by shardio")
    outcomes = program("unindexed", copy, made.format, json.dumps(made.row.index), 1, 20)
    assert sum(outcomes["flipped"].values()) == 20
    if made.row.framed:
        assert outcomes["cut"]["changed"] <= 1  # an empty TFRecord file is one of no records
    if made.row.vouched:
        assert outcomes["flipped"]["found"] == 20


def test_a_file_that_is_cut_short_under_its_reader_is_no_signal(made: Made, copy: Path) -> None:
    told = ("kept",) if made.row.kept else ()
    assert program("cut", copy, *told) == {"records": N, "errors": 0 if made.row.kept else N}


def test_killed_readers_leave_nothing(made: Made) -> None:
    """LMDB's own readers lock a slot of 126, which a killed one keeps."""
    count = 130 if "lmdb" in made.name else 10
    assert program("kill", made.folder, count) == {"killed": count}


def test_it_opens_without_the_check_at_opening(made: Made, copy: Path) -> None:
    assert list(made.open(storage=shardio.Storage(verify_open=False))) == made.samples
    stream = made.stream(verify_open=False)
    assert batches(pickle.loads(pickle.dumps(stream)), 1) == batches(made.stream())
    with pytest.raises(DamageError, match=str(damaged(copy, made.samples[140])[0])):
        list(shardio.open(copy, decode=None, storage=shardio.Storage(verify_open=False)))


# --- indexes that nobody wrote, under checksums that are right ------------------------------------


class Forged:
    """The manifest and the indexes of a dataset, to be written again with other values."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        head, _, rows = (folder / "manifest.json").read_text().partition('"shards": [\n')
        self.head = json.loads(head.rstrip().rstrip(",") + "}")
        self.shards = json.loads("[" + rows.rpartition("],\n")[0].rstrip().rstrip(",") + "]")

    def write(self) -> None:
        lines = [f"{json.dumps(name)}: {json.dumps(one)},\n" for name, one in self.head.items()]
        shards = ",\n".join(map(json.dumps, self.shards))
        body = "{\n" + "".join(lines) + f'"shards": [\n{shards}\n],\n'
        digest = hashlib.sha256(body.encode()).hexdigest()
        (self.folder / "manifest.json").write_text(f'{body}"sha256": "{digest}"\n}}\n')

    def index(self, change: Callable[[Any, bytearray], Any], shard: int) -> None:
        """Change the description of an index, or the bytes behind it."""
        header = struct.Struct("<8sHBBI16sQQ")
        path = self.folder / f"{shard:05d}-{self.shards[shard][4][:8]}.index"
        data = path.read_bytes()
        fields = list(header.unpack_from(data))
        columns = bytearray(data[header.size + fields[7] : -8])
        text = pack_head(change(unpack_head(data[header.size :][: fields[7]]), columns))
        fields[7] = len(text)
        body = header.pack(*fields) + text + bytes(columns)
        seal = xxhash.xxh3_64_intdigest(body)
        path.unlink()
        self.shards[shard][4] = f"{seal:016x}"
        name = self.folder / f"{shard:05d}-{seal >> 32:08x}.index"
        name.write_bytes(body + struct.pack("<Q", seal))

    def change(self, rng: random.Random) -> None:
        """Change one value somewhere, or a few bytes of an index."""

        def other(described: Any, columns: bytearray) -> Any:
            if rng.random() < 0.5:
                return forging.change(described, rng, below=0)
            for _ in range(rng.choice((1, 4, 8))):
                columns[rng.randrange(len(columns))] = rng.choice((0, 255, rng.randrange(256)))
            return described

        if rng.random() < 0.5:
            both = [self.head, self.shards]
            self.head, self.shards = forging.change(both, rng, forging.PLAIN)
        else:
            self.index(other, rng.randrange(len(self.shards)))
        self.write()


@pytest.mark.parametrize(
    "seeds", [range(8), pytest.param(range(8, 250), marks=pytest.mark.slow)], ids=str
)
def test_a_forged_index_gives_an_error_or_samples(made: Made, seeds: range, tmp_path: Path) -> None:
    if made.row.index is None:
        pytest.skip("packed: tests/formats/test_record.py forges shards")
    errors = 0
    for seed in seeds:
        folder = Path(shutil.copytree(made.folder, tmp_path / str(seed)))
        with suppress(TypeError, ValueError, OverflowError, KeyError, struct.error):
            Forged(folder).change(random.Random(seed))  # unless it cannot be written
        try:
            found = shardio.open(folder, decode=None)
            assert len(list(found)) == len([found[i] for i in range(len(found))])
            stream = ShardDataset(folder, batch_size=8, decode=None, collate_fn=list)
            assert sum(map(len, stream)) == len(found)
        except ShardioError:
            errors += 1
        shutil.rmtree(folder)
    assert errors > len(seeds) // 2


def test_fields_of_another_kind_and_labels_of_no_class_are_errors(made: Made, copy: Path) -> None:
    if made.row.index is None:
        pytest.skip("packed: the values of a record are checked by its fields")
    forged, real = Forged(copy), dict(Forged(copy).head)
    for at, (name, kind) in enumerate(real["fields"]):
        for other in {"int": ("str", "bool"), "str": ("int", "array"), "image": ("int",)}.get(
            kind, ()
        ):
            forged.head["fields"] = [list(one) for one in real["fields"]]
            forged.head["fields"][at][1] = other
            forged.write()
            with pytest.raises(DamageError):
                shardio.open(copy, decode=None)[0]
                pytest.fail(f"{name} of kind {kind} was read as {other}")
    if real["classes"] is not None:
        forged.head = real | {"classes": real["classes"][:1]}
        forged.write()
        with pytest.raises(DamageError, match=r"its label, \d, is none of 1 classes.*index"):
            list(shardio.open(copy, decode=None))
