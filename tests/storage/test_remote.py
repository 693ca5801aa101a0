"""Datasets read by URL, from a real server over HTTP: the same records, whoever reads them."""

import itertools
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import LIMIT_S, servers
from support.fault_proxy import FaultProxy, fault_proxy
from support.faults import Rule
from torch.utils.data import DataLoader

import shardio
from shardio import ShardDataset, ShardLoader, Storage
from shardio.errors import DamageError, NotPackedError, OptionError, ShardioError, StorageError
from shardio.storage import ranges
from shardio.storage.client import Request, Store
from shardio.storage.remote import RemoteLocation
from shardio.storage.remote_file import read

RECORDS, SHARDS = 120, 6
TESTS = Path(__file__).resolve().parent.parent


def image(number: int) -> bytes:
    """Make bytes that need no decoding, of a size of their own."""
    draw = np.random.default_rng(number)
    return b"\xff\xd8\xff" + draw.bytes(int(draw.integers(100, 40_000)))


def write(folder: Path, format: str = "record") -> None:
    with shardio.Writer(
        folder, fields={"image": "image", "label": "int"}, shard_size=400_000, format=format
    ) as writer:
        for number in range(RECORDS):
            writer.write({"__key__": f"{number}.jpg", "image": image(number), "label": number})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("www")
    write(folder / "data")
    write(folder / "lmdb", "lmdb")
    return folder


@pytest.fixture(scope="module")
def web(folder: Path) -> Iterator[servers.Web]:
    with servers.nginx(folder) as web:
        yield web


@pytest.fixture(scope="module")
def proxy_of_all(web: servers.Web) -> Iterator[FaultProxy]:
    with fault_proxy(web.port) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def no_helper_is_left() -> Iterator[None]:
    yield
    ranges.close()


def dataset(path: Any, **options: Any) -> ShardDataset:
    return ShardDataset(
        str(path),
        batch_size=8,
        decode=None,
        fields=("image", "label"),
        **{"shuffle_buffer": 30, "order": shardio.Order(spans=4, unit=4)} | options,
    )


def batches(loader: Any) -> list[Any]:
    return [(images.tolist(), labels.tolist()) for images, labels in loader]


def local(folder: Path, **options: Any) -> list[Any]:
    return batches(DataLoader(dataset(folder / "data", **options), batch_size=None))


# --- the same records -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["data", "lmdb"])
def test_a_sequence_is_the_same_by_url(folder: Path, web: servers.Web, name: str) -> None:
    there, here = (shardio.open(path, decode=None) for path in (f"{web.url}/{name}", folder / name))
    assert len(there) == RECORDS
    assert there[7] == here[7] and there[-1] == here[-1]
    assert list(there) == list(here)
    assert there.keys() == here.keys()
    assert there.columns("label").tolist() == here.columns("label").tolist()
    assert there.find("17.jpg") == here.find("17.jpg")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": False, "shuffle_buffer": None, "order": None},
        {"shuffle_buffer": "all"},
        {"where": {"label": range(0, RECORDS, 3)}},
        {"order": shardio.Order(spans=1, unit=8)},
        {"order": shardio.Order(spans=16, unit=1)},
    ],
    ids=str,
)
@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_is_the_same_by_url(
    folder: Path, web: servers.Web, options: dict[str, Any], workers: int
) -> None:
    there = DataLoader(dataset(f"{web.url}/data", **options), batch_size=None, num_workers=workers)
    assert batches(there) == local(folder, **options)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_every_way_to_start_processes_reads_by_url(
    folder: Path, web: servers.Web, method: str
) -> None:
    there = dataset(f"{web.url}/data")
    assert len(there) == RECORDS // 8  # the trainer has read the manifest, by its helper
    assert shardio.open(f"{web.url}/data", decode=None)[0]["label"] == 0  # and a record
    context = multiprocessing.get_context(method)
    assert batches(
        DataLoader(there, batch_size=None, num_workers=2, multiprocessing_context=context)
    ) == local(folder)


@pytest.mark.parametrize(
    "method",
    ["fork", *(pytest.param(one, marks=pytest.mark.slow) for one in ("spawn", "forkserver"))],
)
def test_shard_loader_reads_by_url_and_again(folder: Path, web: servers.Web, method: str) -> None:
    there = dataset(f"{web.url}/data")
    assert shardio.open(f"{web.url}/data", decode=None)[3]["label"] == 3
    for epoch in range(2):
        there.set_epoch(epoch)
        here = dataset(folder / "data")
        here.set_epoch(epoch)
        with ShardLoader(there, num_workers=2, multiprocessing_context=method) as loader:
            assert batches(loader) == batches(DataLoader(here, batch_size=None))


def test_a_resume_goes_on_by_url(folder: Path, web: servers.Web) -> None:
    whole = local(folder)
    for steps in (1, 7, 14):
        there = dataset(f"{web.url}/data")
        there.load_state_dict(dataset(folder / "data").state_dict(steps=steps))
        assert batches(DataLoader(there, batch_size=None, num_workers=1)) == whole[steps:]


# --- what is asked --------------------------------------------------------------------------------


def test_an_epoch_asks_for_little_more_than_its_bytes(folder: Path, proxy: FaultProxy) -> None:
    loader = DataLoader(dataset(f"{proxy.url}/data"), batch_size=None, num_workers=2)
    batches(loader)
    figures = proxy.figures()
    shards = sorted((folder / "data").glob("*.shard"))
    size = {f"/data/{shard.name}": shard.stat().st_size for shard in shards}
    assert figures.needed < 1.1 * sum(size.values())
    spans, ends = 4 * 2, 2 * len(shards)  # a worker opens all of the shards that its spans have
    assert figures.requests <= 1 + ends + len(shards) + spans + 8  # second requests
    asked = [(one.path, one.range) for one in figures.log]
    twice = [one for one, times in Counter(asked).items() if times > 1]
    inner = [one for one in twice if not one[1].endswith(f"-{size[one[0]] - 1}")]
    assert len(inner) <= 8  # ends are read by both workers; the others are second requests


@pytest.mark.parametrize("buffer", [30, "all"])
def test_no_byte_of_a_shard_is_asked_for_twice(
    folder: Path, proxy: FaultProxy, buffer: int | str
) -> None:
    read_by = DataLoader(dataset(f"{proxy.url}/data", shuffle_buffer=buffer), batch_size=None)
    assert batches(read_by) == local(folder, shuffle_buffer=buffer)
    asked: dict[str, set[tuple[int, int]]] = {}  # second requests are of the same range
    for one in proxy.figures().log:
        if one.path.endswith(".shard"):
            first, last = map(int, one.range.removeprefix("bytes=").split("-"))
            asked.setdefault(one.path, set()).add((first, last))
    assert len(asked) == len(list((folder / "data").glob("*.shard")))
    for of_shard in asked.values():
        ordered = sorted(of_shard)
        assert all(one[1] < other[0] for one, other in itertools.pairwise(ordered)), ordered


def test_a_record_by_its_number_takes_one_request(proxy: FaultProxy) -> None:
    there = shardio.open(f"{proxy.url}/data", decode=None)
    there[0]
    proxy.reset()
    for number in (9, 3, 5):
        assert there[number]["image"] == image(number)
    assert len({one.range for one in proxy.figures().log}) == 3  # a slow one may have a second one


def test_nothing_is_listed_and_the_header_is_not_read(proxy: FaultProxy) -> None:
    shardio.open(f"{proxy.url}/data", decode=None)[0]
    log = proxy.figures().log
    assert [one.path.rpartition(".")[2] for one in log] == ["json", "shard", "shard"]
    assert all(one.method == "GET" for one in log)


# --- processes ------------------------------------------------------------------------------------


def test_the_trainer_holds_no_client(web: servers.Web) -> None:
    assert shardio.open(f"{web.url}/data", decode=None)[3]["label"] == 3
    assert ranges.helper_pid() is not None
    assert not ranges.client_in_use()


def run(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )


def ended(pid: int, limit_s: float = LIMIT_S) -> bool:
    """Wait for a process that is not this one's child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], limit_s)[0])
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None], ids=str)
def test_the_helper_ends_with_its_owner(web: servers.Web, how: signal.Signals | None) -> None:
    program = """
        import sys, shardio
        from shardio.storage import ranges
        shardio.open(sys.argv[1], decode=None)[0]
        print(ranges.helper_pid(), flush=True)
        sys.stdin.readline()
    """
    with run(program, f"{web.url}/data") as owner:
        assert owner.stdout is not None and owner.stdin is not None
        helper = int(owner.stdout.readline())
        if how is None:
            owner.stdin.write("\n")
            owner.stdin.flush()
        else:
            owner.send_signal(how)
        assert ended(helper)
        owner.wait(LIMIT_S)


def test_a_killed_helper_is_named_and_replaced(proxy: FaultProxy) -> None:
    there = shardio.open(f"{proxy.url}/data", decode=None)
    assert there[3]["label"] == 3
    first = ranges.helper_pid()
    assert first is not None
    proxy.rules(Rule("timeout", path="shard"))
    with pytest.raises(StorageError, match=r"process that reads from URLs .* ended \(signal 9\)"):
        reading = ranges.ranges().want(there.reader.storage.ends.request("x.shard", 10, 5))
        ranges.ranges().hurry(reading)
        os.kill(first, signal.SIGKILL)
        reading.wait()
    proxy.rules()
    assert there[5]["label"] == 5
    assert ranges.helper_pid() not in (None, first)


def test_a_helper_is_not_reached_by_ctrl_c_of_the_terminal(web: servers.Web) -> None:
    shardio.open(f"{web.url}/data", decode=None)[0]
    helper = ranges.helper_pid()
    assert helper is not None
    assert os.getsid(helper) == helper != os.getsid(0)


def test_no_secret_is_in_the_command_line_of_the_helper(web: servers.Web) -> None:
    shardio.open(f"{web.url}/data?sig=SECRET", decode=None)[0]
    command = Path(f"/proc/{ranges.helper_pid()}/cmdline").read_bytes()
    assert b"SECRET" not in command and b"http" not in command


def test_a_fork_after_reading_reads_by_itself(folder: Path, web: servers.Web) -> None:
    there = shardio.open(f"{web.url}/data", decode=None)
    there[0]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(lambda_of(there), range(20, 30)) == [image(n) for n in range(20, 30)]
    assert there[40]["image"] == image(40)


class lambda_of:
    """A function that can be pickled."""

    def __init__(self, there: Any) -> None:
        self.there = there

    def __call__(self, number: int) -> bytes:
        return self.there[number]["image"]  # type: ignore[no-any-return]


def test_a_loader_process_of_a_parent_with_a_client_uses_a_helper(
    folder: Path, web: servers.Web
) -> None:
    program = """
        import sys, obstore, obstore.store, shardio
        from torch.utils.data import DataLoader
        from shardio.storage import ranges
        if __name__ == "__main__":
            url = sys.argv[1]
            store = obstore.store.HTTPStore.from_url(url, client_options={"allow_http": True})
            assert len(obstore.get(store, "manifest.json").bytes())
            assert ranges.client_in_use()
            there = shardio.ShardDataset(url, batch_size=8, decode=None, fields=("label",))
            labels = [label for batch, in DataLoader(there, batch_size=None, num_workers=2,
                      multiprocessing_context="fork") for label in batch.tolist()]
            print(sorted(labels) == list(range(120)))
    """
    with run(program, f"{web.url}/data") as trainer:
        said, _ = trainer.communicate(timeout=LIMIT_S)
    assert said.strip() == "True"


# --- faults ---------------------------------------------------------------------------------------

TRANSIENT = ["timeout", "reset", "reset_midway", "5xx", "429", "short", "wrong_range", "shifted",
             "shifted_silently", "stall", "changed", "garbage"]  # fmt: skip


def quick(url: str, **options: Any) -> Any:
    return shardio.open(
        url, decode=None, storage=Storage(timeout_s=options.pop("timeout_s", 8.0), **options)
    )


@pytest.mark.parametrize("what", ["manifest", "shard"])
@pytest.mark.parametrize("kind", TRANSIENT)
def test_a_fault_that_passes_changes_nothing(proxy: FaultProxy, kind: str, what: str) -> None:
    proxy.rules(Rule(kind, path=what, numbers=(0, 2)))
    there = quick(f"{proxy.url}/data", timeout_s=5.0 if kind in ("timeout", "stall") else 20.0)
    for number in (3, 77):
        assert there[number]["image"] == image(number)
    assert proxy.figures().faults


@pytest.mark.parametrize("what", ["manifest", "shard"])
@pytest.mark.parametrize("kind", [*TRANSIENT, "403", "404", "refused"])
def test_a_fault_that_stays_is_told(proxy: FaultProxy, kind: str, what: str) -> None:
    if what == "manifest" and kind in ("wrong_range", "shifted"):
        return  # it is read as a whole
    proxy.rules(Rule(kind, path=what))
    with pytest.raises(ShardioError) as caught:
        quick(f"{proxy.url}/data", timeout_s=1.0)[3]
    told = str(caught.value)
    assert f"{proxy.url}/data" in told and "obstore" not in told and "Debug" not in told
    assert told.isprintable() or "\n" in told


@pytest.mark.parametrize(("before", "length"), [(1000, 1000), (1 << 20, 1 << 20), (1 << 20, 1000)])
def test_a_body_that_stalls_early_gets_a_second_request(
    folder: Path, proxy: FaultProxy, before: int, length: int
) -> None:
    (folder / "blob").write_bytes(bytes(range(256)) * (1 << 13))
    proxy.limits(latency_s=0.02)  # what is usual, whatever else this machine does
    proxy.rules(Rule("stall", path="blob", numbers=[10]))
    store = Store(proxy.url)
    for number in range(10):
        read(Request(store, "blob", number, before))
    assert read(Request(store, "blob", 11, length)).data[0] == 11
    figures = ranges.figures()
    assert figures is not None and figures.hedges >= 1 and figures.won >= 1
    assert not figures.retries and proxy.figures().faults == {"stall": 1}


def test_a_second_request_that_stalls_gets_one_too(folder: Path, proxy: FaultProxy) -> None:
    (folder / "blob").write_bytes(bytes(range(256)) * (1 << 13))
    proxy.limits(latency_s=0.02)
    proxy.rules(Rule("stall", path="blob", numbers=[10, 11]))
    store = Store(proxy.url)
    for number in range(10):
        read(Request(store, "blob", number, 1000))
    assert read(Request(store, "blob", 11, 1000)).data[0] == 11
    figures = ranges.figures()
    assert figures is not None and figures.hedges >= 2 and not figures.retries
    assert proxy.figures().faults == {"stall": 2}


def test_what_stalls_and_was_answered_takes_no_other_request_its_place(
    folder: Path, proxy: FaultProxy
) -> None:
    (folder / "blob").write_bytes(bytes(range(256)) * (1 << 13))
    proxy.limits(latency_s=0.02)
    proxy.rules(Rule("stall", path="blob", numbers=[10, 12]))
    store = Store(proxy.url, timeout_s=LIMIT_S)  # neither is given up meanwhile
    ranges.share(64)  # of which this process may send two at once
    try:
        for number in range(30):
            assert read(Request(store, "blob", number, 1000)).data[0] == number
    finally:
        ranges.share(1)
    figures = proxy.figures()
    assert figures.faults == {"stall": 2} and figures.concurrent == 2  # both stall still


def test_a_view_of_an_announced_range_is_no_copy(folder: Path, proxy: FaultProxy) -> None:
    (folder / "blob").write_bytes(bytes(range(256)) * (1 << 13))
    file = RemoteLocation(Store(proxy.url)).open("blob")
    file.will_need(0, 1 << 20)
    view = file.view(300, 200_000)
    assert isinstance(view, memoryview) and len(view.obj) == 1 << 20
    assert view == (bytes(range(256)) * 1000)[300:200_300]
    file.close()


def test_a_refusal_says_what_the_store_said_at_once(proxy: FaultProxy) -> None:
    proxy.rules(Rule("403", path="manifest"))
    with pytest.raises(StorageError, match=r"answered 403 Forbidden \(ExpiredToken\).*credentials"):
        quick(f"{proxy.url}/data", timeout_s=60.0)
    assert proxy.figures().requests == 1


def test_what_is_no_dataset_is_said(web: servers.Web) -> None:
    with pytest.raises(NotPackedError, match=r"not packed: .* Expected the URL of the folder"):
        quick(f"{web.url}/nothing")


def test_a_host_that_is_not_known_is_said_at_once() -> None:
    with pytest.raises(StorageError, match=r"host's name is not known: no-such-host.invalid. "):
        quick("http://no-such-host.invalid/data", timeout_s=60.0)


def test_a_shard_that_is_missing_or_another_is_damage(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "data")
    shards = sorted((tmp_path / "data").glob("*.shard"))
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:-1])
    with servers.nginx(tmp_path) as web:
        there = quick(f"{web.url}/data", timeout_s=20.0)
        with pytest.raises(DamageError, match=r"names this shard, .* but it is not there"):
            there[0]
        second = int(there.reader.starts[1])
        with pytest.raises(DamageError, match=r"cut short|is not the one that was packed"):
            there[second]


@pytest.mark.parametrize("with_cache", [False, True], ids=["", "cache"])
def test_a_shard_that_vanishes_while_it_is_open_is_named(
    proxy: FaultProxy, tmp_path: Path, with_cache: bool
) -> None:
    cache = {"cache": tmp_path, "cache_bytes": "1GiB"} if with_cache else {}
    there = quick(f"{proxy.url}/data", timeout_s=60.0, **cache)
    proxy.rules(Rule("404", path="shard", numbers=[*range(1, 99)]))  # the first one opens it
    with pytest.raises(
        StorageError, match=r"shard: cannot read bytes \d+-\d+: it is not there any"
    ):
        there[3]
    proxy.rules()
    assert there[3]["image"] == image(3)


def test_no_secret_of_a_url_is_in_errors(proxy: FaultProxy) -> None:
    proxy.rules(Rule("500"))
    url = proxy.url.replace("http://", "http://user:PASSWORD@")
    for one in (f"{proxy.url}/data?sig=SECRET", f"{url}/data"):
        with pytest.raises(ShardioError) as caught:
            quick(one, timeout_s=0.5)
        chain = [caught.value, caught.value.__cause__, caught.value.__context__]
        assert not any(secret in repr(chain) for secret in ("SECRET", "PASSWORD"))


def test_urls_are_read_only_here(web: servers.Web, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="read only"):
        shardio.pack(tmp_path, f"{web.url}/out")


def test_without_obstore_it_is_said_what_to_install(web: servers.Web) -> None:
    program = """
        import sys
        sys.modules["obstore"] = None
        import shardio
        from shardio.storage import ranges
        ranges.hold_client()
        try:
            shardio.open(sys.argv[1])
        except shardio.ShardioError as error:
            print(type(error).__name__, error)
    """
    with run(program, f"{web.url}/data") as trainer:
        said, _ = trainer.communicate(timeout=LIMIT_S)
    assert "DependencyError" in said and "shardio-torch[remote]" in said
