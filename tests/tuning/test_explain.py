"""explain: its text, its numbers, and what it takes: a path or a ShardDataset."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.naive_order import side_by_side
from support.small_datasets import grouped, make
from support.tuning_jobs import FEW, TINY, GiB, codes, explained, imagined

from shardio.errors import OptionError
from shardio.order.options import RequestedOptions
from shardio.tuning.cost import TrainingJob
from shardio.tuning.explain import explain, explain_job

# --- the counts -------------------------------------------------------------------------------


def test_the_law_holds_for_the_ranks_that_are_named_and_no_others():
    made = imagined([50, 31, 40])
    e = explained(made, {"world_size": 2}, batch_size=12, unit=3, spans=5)
    assert e.law_world_sizes == (1, 2, 4, 8)
    total = 24

    def flat(ranks: int) -> list[tuple[int, int, int]]:
        requested = RequestedOptions(batch_size=total // ranks, unit=3, spans=5)
        chosen = requested.resolve(1.0)
        epoch = chosen.epoch(made.shard_records, 0)
        shares = [list(chosen.partition(epoch, rank=r, world_size=ranks)) for r in range(ranks)]
        steps = side_by_side(shares, total // ranks // 3, 5)
        return [piece for step in steps for batch in step for piece in batch.pieces]

    for ranks in range(1, total + 1):
        if ranks in e.law_world_sizes:
            assert flat(ranks) == flat(1)
        elif total % ranks == 0:
            with pytest.raises(OptionError, match="unit"):
                flat(ranks)
    assert explained(made).law_world_sizes == ()


def test_nodes_with_shards_of_their_own_are_told():
    made = imagined([1000] * 40)
    job = {"num_workers": 1, "world_size": 16, "local_world_size": 8}
    e = explained(made, job, batch_size=64, shuffle_buffer=4000, nodes=2)
    assert codes(e) == []
    assert "nodes 2 with shards of their own, 1/2 of the records" in " ".join(str(e).split())
    assert "a machine reads those of 1 node" in " ".join(str(e).split())
    assert e.state["nodes"] == 2
    plain = explained(made, job, batch_size=64, shuffle_buffer=4000)
    assert "shards of their own" not in str(plain) and "nodes" not in plain.state


# --- what the user sees -------------------------------------------------------------------------

TEXT = """\
dataset      51,000 records in 17 shards, 47.2 MiB, 970 B each
readers      2 ranks (2 on a machine), 8 workers each
steps        100 a rank, batches of 256; 12 to 13 a worker
tail         pad: each record once an epoch, and 200 repeats
order        the same for any num_workers, and for 1, 2, 4, 8 or 16 ranks where
             batch_size x ranks is 512 and unit 32
buffer       10,000 records, 9.3 MiB: 157 in each of 64 spans of 768 to 800
unit         32, a divisor of batch_size; a batch mixes 8 spans
spans        8 a worker, each also read by 1 other (costs a network file system
             extra reads); with 1, 2, 4 or 8 workers in all none is shared
each worker  3,072 to 3,328 records, 2.8 to 3.1 MiB, from 3 to 4 shards
files        17 open at most, of 256 that a process may open
bytes wait   in each process, read in blocks
memory       at worst 3.1 MiB a process: records 2.2 MiB, order 314.9 KiB,
             indexes 647.5 KiB; 49.6 MiB a machine
state        shuffle_buffer=10000 seed=0 tail=pad canonical_workers=64 unit=32

no warnings"""


def test_it_reads_well():
    e = explained(TINY, {"num_workers": 8, "world_size": 2}, batch_size=256)
    assert str(e) == TEXT


def test_the_default_of_a_small_dataset_is_read_whole_wherever_it_lies():
    """Nobody is warned of it on a network file system, nor of classes that it mixes."""
    options = RequestedOptions(batch_size=256).resolve(TINY.mean_bytes, records=TINY.records)
    for network, how in ((False, "announced"), (True, "read")):
        job = TrainingJob(TINY, options, num_workers=8, is_network=network, available_bytes=GiB)
        e = explain_job(job)
        text = " ".join(str(e).split())
        assert not codes(e)
        assert "a true permutation: all are read ahead, in storage order" in text
        assert f"in the page cache, all {how} before the first batch" in text


def test_warnings_are_numbered_each_with_its_change():
    e = explained(FEW, {"num_workers": 8}, batch_size=16, shuffle_buffer=50)
    text = str(e).partition("\n\n")[2]
    assert text == (
        "2 warnings\n"
        "1. each rank has 4 steps for 8 workers: some get no batch\n"
        "   -> num_workers=4\n"
        "2. each span has a window of 1 record, less than the unit of 8 that a batch\n"
        "   takes from it: the same neighbours meet in every epoch\n"
        '   -> shuffle_buffer="all"; `shardio tune` finds the smallest that will do'
    )


def test_who_shares_spans_and_a_unit_that_was_given_are_told_plainly():
    def row(name: str, **job: Any) -> str:
        text = str(explained(TINY, job, batch_size=256, unit=4))
        return " ".join(text.partition(f"\n{name} ")[2].split())

    assert row("unit").startswith("4, as given; a batch mixes 64 spans spans 64 a process, none")
    assert row("spans", num_workers=4).startswith(
        "64 a worker, each also read by 3 others (costs a network file system extra reads); with "
        "1 worker in all none is shared each"
    )
    assert "(more traffic, see below)" in row("spans", num_workers=4, is_network=True)


def test_accelerate_is_noted_where_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "accelerate", raising=False)
    assert explained(TINY, {}, batch_size=256).notes == ()
    monkeypatch.setitem(sys.modules, "accelerate", sys)
    e = explained(TINY, {}, batch_size=256)
    assert "prepare()" in str(e) and len(e.notes) == 1 and codes(e) == []


def test_the_names_of_the_json_do_not_change():
    found = explained(TINY, {}, batch_size=256).as_dict()
    assert " ".join(found) == (
        "records shards dataset_bytes is_network batch_size state num_workers world_size "
        "local_world_size steps last_batch_records dropped_records repeated_records worker "
        "law_world_sizes free_consumers policy traffic files_open files_limit memory warnings notes"
    )
    assert " ".join(found["state"]) == "shuffle_buffer seed tail canonical_workers unit"
    assert " ".join(found["worker"]) == "is_exact steps records shards bytes spans sharers"
    assert " ".join(found["memory"]) == (
        "records_bytes order_bytes permutation_bytes index_bytes process_bytes page_cache_bytes "
        "machine_bytes available_bytes"
    )


def test_a_unit_that_does_not_divide_the_batch_is_told():
    with pytest.raises(OptionError, match="does not divide batch_size 100"):
        explained(TINY, {}, batch_size=100, unit=32)


def test_a_dataset_explains_itself(tmp_path: Path) -> None:
    """It explains what it reads: its options, its subset, its ranks."""
    ShardDataset = pytest.importorskip("shardio").ShardDataset
    folder = make(tmp_path / "data", [40, 0, 60])
    dataset = ShardDataset(folder, batch_size=8, tail="drop", rank=1, world_size=2)
    whole = explain(dataset, num_workers=3)
    assert (whole.steps, whole.world_size, whole.num_workers) == (len(dataset), 2, 3)
    assert (whole.records, whole.state["tail"], whole.dropped_records) == (100, "drop", 4)
    part = explain(ShardDataset(folder, batch_size=8, where={"label": "cat"}))
    assert (part.records, part.steps, part.shards) == (34, 5, 2)
    assert "34 records in 2 shards" in str(part)


def test_a_path_is_explained_as_a_dataset_of_the_same_options(tmp_path: Path) -> None:
    ShardDataset = pytest.importorskip("shardio").ShardDataset
    folder = make(tmp_path / "data", [40, 0, 60])
    options: dict[str, Any] = {"batch_size": 8, "tail": "drop", "shuffle_buffer": 20, "unit": 4}
    there = explain(folder, num_workers=3, world_size=2, **grouped(options))
    with pytest.raises(OptionError, match=r"explain takes no unit: give order=shardio.Order"):
        explain(folder, **options)
    dataset = ShardDataset(folder, **grouped(options))
    here = explain(dataset, num_workers=3, world_size=2)
    memory = replace(there.memory, available_bytes=here.memory.available_bytes)
    assert replace(there, memory=memory) == here
    with pytest.raises(OptionError, match="explain: batch_size, tail with a ShardDataset"):
        explain(dataset, batch_size=8, tail="pad")
    mixture = ShardDataset.mix([dataset, dataset])
    with pytest.raises(OptionError, match=r"expected a ShardDataset.*each of its datasets"):
        explain(mixture)  # type: ignore[arg-type]
