"""Two ranks of torch.distributed that read by URL, and go on in mid-epoch: as a local run does."""

import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import LIMIT_S, object_stores, programs, servers, url_rank_programs
from support.fault_proxy import fault_proxy
from support.faults import Rule
from support.url_datasets import write_images
from support.url_rank_programs import GLOBAL_BATCH, STOP, Steps, dataset, rows
from torch.utils.data import DataLoader

RECORDS, RANKS = 96, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("www")

    def image(number: int) -> bytes:
        return b"\xff\xd8\xff" + np.random.default_rng(number).bytes(4_000)

    write_images(folder / "data", RECORDS, image, 60_000)
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> Steps:
    """The global batches that one process reads from the disk."""
    loader = DataLoader(dataset(str(folder / "data"), {}, 1), batch_size=None)
    return [rows(batch) for batch in loader]


def run(out: Path, *sources: tuple[str, Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    """What each rank found, of each source."""
    out.mkdir()
    done = programs.run(
        *("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(RANKS), url_rank_programs.__file__, out),
        *(json.dumps(source) for source in sources),
        limit_s=LIMIT_S,
        warm=True,
    )
    assert not done.timed_out and done.code == 0 and not done.left, str(done)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(RANKS)]


def joined(ranks: list[dict[str, Any]], name: str) -> Steps:
    """The global batches: at each step, the rows of rank 0, 1, ..."""
    return [[*chain(*parts)] for parts in zip(*(rank[name] for rank in ranks), strict=True)]


def test_two_ranks_read_by_url_and_go_on_as_one_process_does_from_the_disk(
    folder: Path, whole: Steps, tmp_path: Path
) -> None:
    failing = Rule("5xx", path="shard", fraction=0.1), Rule("garbage", path="shard", fraction=0.1)
    cache = {"cache": str(tmp_path / "cache"), "cache_bytes": "1GiB"}
    with (
        servers.nginx(folder) as web,
        object_stores.s3() as store,
        fault_proxy(web.port, *failing) as proxy,
    ):
        store.put_folder(folder / "data", "data/")
        ranks = run(
            tmp_path / "out",
            (f"{web.url}/data", {}),
            (f"{store.url}/data", {"options": store.options}),
            (f"{proxy.url}/data", cache),
        )
        assert len({one.path for one in web.requests()}) > 5  # nobody read a copy
        assert len(proxy.figures().faults) == 2
    assert len(whole) == RECORDS // GLOBAL_BATCH
    for each in zip(*ranks, strict=True):  # the ranks of each source
        assert joined([*each], "whole") == whole
        assert joined([*each], "before") == whole[:STOP]
        assert joined([*each], "after") == whole[STOP:]
        assert len({one["state"] for one in each}) == 1
