"""What a loader says of itself, in words."""

from typing import Any

import pytest

from shardio.loader.stats import DecodeCounts, LoaderExplanation


def text_of(**options: Any) -> list[str]:
    given = {"num_workers": 0, "threads": 0, "prefetch_factor": 2, "resident_bytes": 0}
    given |= {"locked_bytes": 0, "staging_bytes": 0}
    return LoaderExplanation(**(given | options)).text().splitlines()


@pytest.mark.parametrize(
    "workers, threads, said",
    [
        (2, 3, "2 processes of 3 threads, up to 2 ahead each"),
        (1, 1, "1 process of 1 thread, up to 2 ahead each"),
        (0, 2, "2 threads of this process, up to 2 ahead in all"),
        (0, 0, "this loop, up to 2 ahead in all"),
    ],
)
def test_it_says_who_makes_batches(workers: int, threads: int, said: str) -> None:
    assert text_of(num_workers=workers, threads=threads) == [f"batches are made by {said}"]


def test_each_figure_has_a_line_where_there_is_something_to_say() -> None:
    figures = {"pids": [7, 8], "buffers": 6, "ring": 6, "batch_bytes": 3 << 20}
    assert text_of(**figures)[1:] == [
        "processes        7, 8",
        "batch memory     3.0 MiB in 6 buffers",
    ]
    assert "2 more than the ring: your loop kept batches" in text_of(**figures | {"ring": 4})[3]
    locked = text_of(locked_bytes=2 << 20, staging_bytes=1 << 20, kernels="triton")
    assert locked[1:] == [
        "page-locked      2.0 MiB, of which 1.0 MiB staging",
        "kernels          of Triton",
    ]
    resident = text_of(resident_bytes=5 << 20)
    assert resident == ["resident         5.0 MiB, decoded once: each batch is a gather of it"]
    counts = DecodeCounts("pil", by_trainer=1, by_workers={"scans": 1, "end": 2})
    said = "decoded          1 by PIL in this process; 3 by the workers (end 2, scans 1)"
    assert text_of(decoded=counts)[1:] == [said] and text_of(decoded=DecodeCounts())[1:] == []
