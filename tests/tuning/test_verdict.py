"""Verdicts on passes that were made up: what is the limit, and the one thing to change."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from shardio import CenterCrop, ShardDataset
from shardio.loader.shard_loader import ShardLoader
from shardio.loader.stats import BatchStats
from shardio.tuning.meter import watch
from shardio.tuning.verdict import LEAST, BatchTotals, Setup, Verdict, judge

SHARD = Setup("ShardLoader", workers=2, threads=2, prefetch=2, cores=4)


TORCH = Setup("DataLoader", workers=2, prefetch=2, cores=2)


def making(count: int = 100, **stages: Any) -> BatchTotals:
    made = BatchTotals()
    made.add([BatchStats(rows=8, **stages)] * count)
    return made


def steady(wait: float, step: float = 0.05, **options: Any) -> Verdict:
    return judge([wait] * 100, [step] * 100, **options)


@pytest.mark.parametrize("wait", [0.0, 1e-6, 0.004])
def test_a_loader_that_keeps_up_is_left_alone(wait: float) -> None:
    verdict = steady(wait, totals=making(decode_s=9.0), setup=SHARD)
    assert verdict.bound == "compute" and verdict.stage == ""
    assert "compute-bound" in verdict.text and "no more to gain" in verdict.text


def test_the_alarm_is_the_border_and_the_mean_decides() -> None:
    assert steady(0.0049).bound == "compute" and steady(0.0051).bound == "loader"
    assert steady(0.02, alarm=0.5).bound == "compute"
    verdict = judge([0.0] * 95 + [0.2] * 5, [0.05] * 100)  # 0.01 on the mean, the median 0
    assert verdict.bound == "loader" and verdict.share == pytest.approx(1 / 6)


@pytest.mark.parametrize("wait", [0.07, 0.1, 0.3, 1 / 3])
def test_at_the_border_waits_that_are_all_equal_are_judged(wait: float) -> None:
    # Sums are rounded: their mean may lie above the alarm, and above each of them.
    for count in range(10, 400):
        assert "nan" not in judge([wait] * count, [10 * wait] * count, setup=SHARD).text


def test_few_batches_are_not_judged() -> None:
    verdict = judge([9.0] * 9, [0.1] * 9)
    assert verdict.bound == "unknown" and "9 after the first, expected 10" in verdict.text


@pytest.mark.parametrize(
    ("stages", "stage", "knob"),
    [
        ({"read_s": 0.3, "decode_s": 0.1}, "read", "local disk; a larger shuffle window does not"),
        ({"read_s": 0.1, "decode_s": 0.3}, "decode", "pack --jpeg-tiles"),
        ({"decode_s": 0.1, "transform_s": 0.3}, "transform", "cheaper transform"),
        ({"decode_s": 0.1, "collate_s": 0.3}, "collate", "arrays of one shape"),
        ({"decode_s": 0.3, "transport_s": 0.06}, "transport", "kept off its core"),
        ({"decode_s": 0.3, "device_s": 0.06, "transport_s": 0.01}, "device", "pin=True"),
        ({"decode_s": 0.3, "transport_s": 0.04}, "decode", "--jpeg-tiles"),  # not half the wait
    ],
)
def test_the_limiting_stage_is_named_with_its_knob(
    stages: dict[str, float], stage: str, knob: str
) -> None:
    verdict = steady(0.1, totals=making(**stages), setup=SHARD)
    assert (verdict.bound, verdict.stage) == ("loader", stage)
    assert f"{stage} is the limit (" in verdict.text and knob in verdict.text
    assert verdict.text.count("is the limit") == 1


def test_a_knob_that_is_turned_already_is_not_advised() -> None:
    taken = making(decode_s=0.3, transport_s=0.06)
    assert "copy=False" not in steady(0.1, totals=taken, setup=SHARD).text
    assert steady(0.1, totals=taken, setup=SHARD._replace(copies=True)).text.endswith(
        ": copy=False"
    )
    busy = SHARD._replace(cores=1)
    assert "--jpeg-tiles" in steady(0.1, totals=making(decode_s=0.3), setup=busy).text
    tiles = busy._replace(tiles=True)
    text = steady(0.1, totals=making(decode_s=0.3), setup=tiles).text
    assert text.endswith("less to decode: shardio pack --resize")
    here = busy._replace(device="cpu", torch_threads=4)
    cast = making(device_s=0.2)
    assert "(100% of the wait)" in steady(0.1, totals=cast, setup=here).text
    assert "torch.set_num_threads" in steady(0.1, totals=cast, setup=here).text
    alone = steady(0.1, totals=cast, setup=here._replace(torch_threads=1)).text
    assert "torch.set_num_threads" not in alone and "leave them to the device" in alone
    there = SHARD._replace(device="cuda", decodes=True)
    assert "device is the limit" in (text := steady(0.1, totals=cast, setup=there).text)
    assert "decode='pil' leaves that to the workers" in text and "pin=True" not in text


CUDA = SHARD._replace(device="cuda", decodes=True)


@pytest.mark.parametrize("behind, bound", [(0.0, "unknown"), (0.89, "unknown"), (0.9, "compute")])
def test_beside_a_decoding_thread_only_a_gpu_that_is_behind_is_known_to_be_busy(
    behind: float, bound: str
) -> None:
    """The host may be the limit: then nobody waits for batches, and the GPU runs out of work."""
    verdict = steady(1e-6, totals=making(device_s=0.001), setup=CUDA, behind=behind)
    assert (verdict.bound, verdict.stage) == (bound, ""), verdict
    assert ("compute-bound" in verdict.text) is (bound == "compute")
    assert ("the host is the limit" in verdict.text) is (bound == "unknown")
    assert "no more to gain" not in verdict.text


def test_a_gpu_that_is_behind_is_asked_for_beside_decoding_alone() -> None:
    assert steady(1e-6, setup=CUDA, behind=0.5, alarm=0.5).bound == "compute"
    assert steady(0.1, setup=CUDA, behind=1.0).bound == "loader"
    assert steady(1e-6, setup=CUDA._replace(decodes=False)).bound == "compute"
    assert steady(1e-6, setup=CUDA._replace(device="cpu")).bound == "compute"  # it has no thread


def test_work_that_waits_while_cores_are_idle_wants_threads() -> None:
    full = SHARD._replace(cores=4, threads=2)
    for stage in ("decode_s", "transform_s"):
        waits = making(**{stage: 0.4}, cpu_s=0.04)
        text = steady(0.1, totals=waits, setup=full).text
        assert text.endswith(
            "waits more than it computes (CPU time is 10% of it): threads=8 (now 2)"
        )
    for other in (
        steady(0.1, totals=making(transform_s=0.4, cpu_s=0.3), setup=full),  # it computes
        steady(0.1, totals=making(transform_s=0.4), setup=full),  # nobody told
        steady(0.1, totals=making(read_s=0.4, cpu_s=0.04), setup=full),
        # Threads that wait for each other's core: 4 x 0.04 of 0.15 s are more than half of 2 cores.
        steady(0.1, totals=making(transform_s=2.0, cpu_s=0.16), setup=full._replace(cores=2)),
    ):
        assert "waits more" not in other.text


def test_requests_that_fail_or_are_too_many_are_told() -> None:
    well = steady(0.1, totals=making(read_s=0.4, requests=100), setup=SHARD).text
    assert "batches wait for the network" in well and "requests" not in well
    assert "batches wait for the network" not in steady(0.1, totals=making(read_s=0.4)).text
    fails = making(decode_s=0.4, requests=100, retries=5, throttled=1)
    for text in (steady(0.1, totals=fails).text, steady(0.0, totals=fails).text):
        assert text.endswith("the network or the store is at fault")
        assert ". 500 of 10,000 requests failed" in text
    many = making(decode_s=0.4, requests=100, retries=5, throttled=4)
    busy = steady(0.1, totals=many).text
    assert (
        "The store refused 400 of 10,000 requests as too many" in busy and "fewer workers" in busy
    )


def test_shares_of_stages_are_of_what_they_are_said_to_be() -> None:
    work = {"read_s": 0.05, "decode_s": 0.15}
    assert "(75% of the loader's work)" in steady(0.1, totals=making(**work)).text
    taking = making(**work, transport_s=0.08)
    assert "(80% of the wait)" in steady(0.1, totals=taking).text


def test_idle_cores_come_before_cheaper_work() -> None:
    decode = making(decode_s=0.3)
    idle = SHARD._replace(cores=16)
    assert (
        "num_workers=8 (now 2 of 2 threads; 16 cores here)"
        in steady(0.1, totals=decode, setup=idle).text
    )
    alone = SHARD._replace(workers=0, threads=1, cores=1)  # at least beside the training loop
    assert "num_workers=1 (now 0; 1 core here)" in steady(0.1, totals=decode, setup=alone).text
    torch_idle = TORCH._replace(cores=8)
    assert "num_workers=8 (now 2; 8 cores here)" in steady(0.1, setup=torch_idle).text
    assert "--resize" in steady(0.1, totals=decode, setup=SHARD).text  # none is idle


def test_where_nobody_tells_the_stage_the_verdict_says_who_would() -> None:
    for setup in (TORCH, Setup()):
        verdict = steady(0.1, setup=setup)
        assert verdict.stage == "" and "ShardLoader" in verdict.text


def test_a_transport_that_is_not_ours_is_to_be_replaced() -> None:
    verdict = steady(0.1, totals=making(transport_s=0.09), setup=TORCH)
    assert verdict.stage == "transport" and verdict.text.endswith("shardio.ShardLoader")


def rare(late: float = 2.0) -> list[float]:
    """One late batch in 25 or so, at no regular distance."""
    waits = [0.001] * 100
    for at in (7, 38, 52, 91):
        waits[at] = late
    return waits


def slow_records(*slow: tuple[float, int, str]) -> BatchTotals:
    made = BatchTotals()
    made.add(
        [
            BatchStats(8, decode_s=0.1, slowest_s=s, slowest_record=r, slowest_key=k)
            for s, r, k in slow
        ]
    )
    return made


def test_mean_high_and_median_low_names_the_slowest_records() -> None:
    known = slow_records((1.9, 17, "cat/huge.png"), (0.01, 3, "dog/1.jpg"), (1.2, 4, "a\x1b[2J"))
    text = judge(rare(), [0.05] * 100, known, SHARD).text
    assert "Most batches are there in time, a few are late" in text
    assert "prefetch_factor=22 (now 2) hides them" in text  # 2 s of steps of 50 ms, by 2 workers
    assert text.endswith("cat/huge.png (record 17, 1.9 s), a\\x1b[2J (record 4, 1.2 s)")


def test_late_batches_without_a_slow_record_are_not_put_down_to_one() -> None:
    text = judge(rare(), [0.05] * 100, slow_records((0.01, 3, "dog/1.jpg")), SHARD).text
    assert "no record was slow (at most 10 ms)" in text and "dog/1.jpg" not in text


def test_without_made_the_verdict_says_how_to_get_the_records() -> None:
    text = judge(rare(), [0.05] * 100, None, TORCH).text
    assert (
        "prefetch_factor=22 (now 2) hides them" in text and "ShardLoader names the records" in text
    )
    few = judge(rare(0.2), [0.05] * 100, None, TORCH).text
    assert "prefetch_factor=4 (now 2) hides them" in few
    many = judge(rare(20.0), [0.05] * 100, None, TORCH).text
    assert "prefetch_factor=32 (now 2) hides more of them" in many
    alone = TORCH._replace(workers=0, prefetch=None, cores=4)
    assert "num_workers=4 (now 0" in judge(rare(), [0.05] * 100, None, alone).text
    assert "prefetch more batches" in judge(rare(), [0.05] * 100).text


def test_many_late_batches_are_a_slow_loader_whatever_the_median() -> None:
    waits = np.where(np.random.default_rng(0).random(200) < 0.3, 0.4, 0.0)
    assert np.median(waits) == 0
    verdict = judge(waits, [0.05] * 200, making(decode_s=0.3), SHARD)
    assert verdict.stage == "decode" and "few are late" not in verdict.text


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_one_late_batch_in_every_w_is_seen(workers: int) -> None:
    waits = np.full(100, 0.001)
    waits[3::workers] = 0.5
    setup = TORCH._replace(workers=workers, cores=16)
    text = judge(waits, [0.05] * 100, None, setup).text
    assert f"One batch in every {workers} is late" in text
    assert f"num_workers=16 (now {workers}; 16 cores here)" in text
    for other in (1, 3, 16):
        text = judge(waits, [0.05] * 100, None, setup._replace(workers=other)).text
        assert "in every" not in text


def test_the_rhythm_may_slip_now_and_then() -> None:
    waits = np.full(100, 0.001)
    waits[[*range(0, 40, 4), *range(41, 70, 4), *range(72, 100, 4)]] = 0.5
    text = judge(waits, [0.05] * 100, None, TORCH._replace(workers=4)).text
    assert "One batch in every 4 is late" in text and "they, or one of them, do not" in text


def test_no_rhythm_is_seen_in_chance_or_in_waits_that_are_nearly_equal() -> None:
    noise = np.random.default_rng(1)
    for waits in noise.exponential(0.1, (200, 100)):
        for workers in (2, 3, 4, 8):
            text = judge(waits, [0.05] * 100, None, TORCH._replace(workers=workers)).text
            assert "in every" not in text
    alike = [0.10, 0.12] * 50
    assert "in every" not in judge(alike, [0.05] * 100, None, TORCH).text


def test_a_worker_that_is_slower_than_the_others_is_named() -> None:
    waits = np.full(100, 0.001)
    waits[::4] = 0.5
    for factor, named in ((3.0, True), (1.1, False)):
        made = BatchTotals()
        seconds = [0.1, 0.1, 0.1 * factor, 0.1]
        made.add([BatchStats(rows=10, decode_s=seconds[i % 4], worker=i % 4) for i in range(100)])
        text = judge(waits, [0.05] * 100, made, SHARD._replace(workers=4)).text
        assert ("worker 2 takes 3.0 times as long for a row" in text) is named
        assert ("decode is the limit" in text) is not named


def test_the_seconds_of_a_worker_add_up_over_calls() -> None:
    totals = BatchTotals()
    for worker in (0, 1, 0):
        totals.add([BatchStats(rows=10, read_s=1.0, decode_s=2.0, worker=worker)] * 2)
    assert totals.workers == {0: (12.0, 40), 1: (6.0, 20)}
    assert totals.batches == 6


def test_a_start_that_costs_more_than_all_waiting_is_the_verdict() -> None:
    setup = TORCH._replace(restarts=True)
    verdict = judge([0.001] * 5, [0.05] * 5, None, setup, first_s=2.0)
    assert verdict.bound == "start-up" and verdict.text.endswith(
        "persistent_workers=True keeps the workers from pass to pass"
    )
    assert verdict.share == pytest.approx(2.005 / 2.255)
    assert judge([0.001] * 5, [0.05] * 5, None, TORCH, first_s=2.0).bound == "unknown"
    assert judge([0.5] * 20, [0.05] * 20, None, setup, first_s=2.0).bound == "loader"
    assert judge([0.001] * 500, [0.05] * 500, None, setup, first_s=2.0).bound == "compute"


waits_of_passes = st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), max_size=60)


@given(waits_of_passes, st.integers(0, 9), st.sampled_from([SHARD, TORCH, Setup()]))
def test_any_pass_has_a_verdict_of_one_line(
    times: list[tuple[float, float]], workers: int, setup: Setup
) -> None:
    data, step = [d for d, _ in times], [s for _, s in times]
    verdict = judge(data, step, making(3, read_s=1.0), setup._replace(workers=workers))
    assert "\n" not in verdict.text and 0 <= verdict.share <= 1
    assert not re.search(r"\. [a-z]", verdict.text)
    assert (verdict.bound == "unknown") == (len(times) < LEAST)


class Numbers(list[int]):
    """A dataset of numbers, which may have attributes."""


def test_tiles_are_known_of_shardios_datasets_alone(packed: Callable[..., Path]) -> None:
    data = ShardDataset(packed([8]), batch_size=2)
    assert Setup.of(ShardLoader(data, num_workers=0)).tiles is False
    data.manifest.options["tiles"] = 8
    assert Setup.of(ShardLoader(data, num_workers=0)).tiles and Setup.of(DataLoader(data)).tiles
    numbers = Numbers([0] * 4)
    numbers.manifest = data  # type: ignore[attr-defined]
    assert Setup.of(watch(DataLoader(numbers))).tiles is False


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_dataloaders_knobs_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    cores = Setup.of(None).cores
    assert cores >= 1
    data = Numbers([0] * 4)
    assert Setup.of(DataLoader(data)) == Setup("DataLoader", 0, cores=cores)
    found = Setup.of(watch(DataLoader(data, num_workers=3, prefetch_factor=5)))
    assert found == Setup("DataLoader", 3, 1, 5, True, cores)
    kept = DataLoader(data, num_workers=3, persistent_workers=True)
    assert Setup.of(kept).restarts is False
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(cores))
    assert Setup.of(None).cores == 1
    monkeypatch.setattr("shardio.machine.cores", lambda: 3.5)  # a container's share
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert Setup.of(None).cores == 2


def test_a_resident_loader_is_not_told_to_take_workers(packed: Callable[..., Path]) -> None:
    data = ShardDataset(packed([8]), batch_size=2, transform=CenterCrop(8))
    setup = Setup.of(watch(ShardLoader(data, num_workers=2, resident="ram")))
    assert setup.kind == "resident"
    for waits in ([0.5] * 20, [0.0] * 19 + [5.0]):
        text = judge(waits, [0.05] * 20, None, setup).text
        assert "gathered from memory" in text and "worker" not in text and "prefetch" not in text
