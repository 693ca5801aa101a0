"""The epoch of a dataset: which one is read, from where, and which one comes next.

A dataset may be read by the trainer's process, or by the workers of a DataLoader, forked or
spawned. All of them share one EpochState, which lies in one tensor in shared memory. Its events:

    event                          what it does
    set_epoch(e)                   the next pass reads e; from then on the epoch is the caller's
    load(e, units)                 the next pass reads the rest of e, and the one after it e + 1
    a pass begins (`begin`)        decides the epoch: see below
    a consumer ends its part       `ended`: it has handed out its last batch
    worker 0 is asked for more     `asked`: its last batch was handed out before
    StatefulDataLoader's load      `resumed`: this pass reads the rest of the state's epoch

A pass is complete when all its consumers have handed out their last batch, or when worker 0 was
asked for what follows its own last one. What the next pass reads:

    the pass before         the epoch is nobody's           set_epoch chose it       validation
    none since it was set   that epoch                      that epoch               that epoch
    complete                the next epoch                  the same, and a warning  the same
    left before its end     the same from its beginning, and a warning               the same

All workers of a pass must read one epoch, whenever each of them starts. So one process decides. Of
a pass that starts its workers this is the trainer's, in which the workers are forked or pickled:
each brings its Ticket along. Of each further pass of persistent workers it is worker 0, and the
others wait for what it decides.
"""

from __future__ import annotations

import os
import time
from itertools import count
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch

from ..errors import EpochError
from ..order.rng import Int64s
from ..stack import callers
from ..storage.ranges import RequestCount

StartReason = Literal["chosen", "next", "repeated", "left", "spent"]

_MOST_CONSUMERS = 256  # beyond it a pass is complete when worker 0 says so
_DECISIONS, _FIELDS = 64, 4  # of persistent workers, kept until as many more were made
_COUNTS = 3  # of the requests of a consumer
_HEAD = 14  # numbers with a name; those of `_ends`, `_decisions` and `_requests` follow

_PASSES_BITS = 24  # pass p of a loader's iterator is number (that of the iterator << 24) + p
_NUMBERS = count(1)  # of iterators, in this process

# How long workers wait for worker 0 to begin a pass. It does so as soon as it has made what it was
# asked for in the pass before.
_WAIT_S = 600.0
# How often, and after how long, who decides looks again while a pass begins. That takes some
# microseconds, unless the worker is killed meanwhile.
_LOOKS, _LOOK_S = 10_000, 1e-3


class Decision(NamedTuple):
    """Say what a pass reads."""

    number: int  # of the pass
    epoch: int
    start: int  # units consumed before
    generation: int  # when it was decided
    reason: StartReason
    before: int = -1  # the pass begun last when it was decided


class LoaderInfo(NamedTuple):
    """Say what a dataset must know of the DataLoader that reads it; without one: as by default."""

    number: int = 0  # of the DataLoader's iterator
    direct: bool = False  # the dataset is the loader's own, and not one within it
    drops: int = 1  # items below which a worker's last ones are left out
    rebatched: int = 0  # rows of the batches that it would make of our batches; 0: it makes none


class Ticket:
    """Hold what a DataLoader's worker brings along from the process that started it."""

    def __init__(self, loading: LoaderInfo, decision: Decision) -> None:
        self._loading = loading
        self._decision: Decision | None = decision  # of the first pass
        self._passes = 0  # that this worker has begun

    def next_pass(self) -> tuple[LoaderInfo, int, Decision | None]:
        """Return the loader, the number of the pass that begins now, and what was decided of it."""
        number = first_number(self._loading) + self._passes
        decision, self._decision = self._decision, None
        self._passes += 1
        return self._loading, number, decision


class _Shared:
    """Name one number of the tensor that processes share, as an attribute of EpochState."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __get__(self, state: EpochState, _: object = None) -> int:
        return int(state._at[self._place])

    def __set__(self, state: EpochState, value: int) -> None:
        state._at[self._place] = value


class EpochState:
    """Epoch, place and passes of one dataset, for all processes that read it. See the module."""

    epoch = _Shared(0)  # of the pass begun last; or chosen, or loaded, for the next
    start = _Shared(1)  # units of that epoch that were consumed before its first batch
    _pass = _Shared(2)  # the number of the pass begun last; 0: none since the epoch was set
    _superseded = _Shared(3)  # the pass that ran when set_epoch named its epoch again; 0: none
    _consumers = _Shared(4)  # of the pass begun last, that have batches in it: the first ones
    _asked = _Shared(5)  # the last pass whose end worker 0 has reached
    chosen = _Shared(6)  # 1: the epoch is the caller's, by set_epoch
    loaded = _Shared(7)  # 1: it comes from a state, and no epoch followed it yet
    _wanted = _Shared(8)  # the epoch that had been chosen when the state was loaded, or -1
    resumed_in_workers = _Shared(9)  # 1: workers resumed from states unknown to this process
    generation = _Shared(10)  # how often another epoch was set, or a state loaded
    fingerprint = _Shared(11)  # of the dataset's order
    _warned = _Shared(12)  # warnings that were given, as bits
    _beginning = _Shared(13)  # 1: a pass begins just now, and what is above is not all written

    def __init__(self, fingerprint: int) -> None:
        size = _HEAD + _MOST_CONSUMERS + _DECISIONS * _FIELDS + _MOST_CONSUMERS * _COUNTS
        self._tensor: Any = torch.zeros(size, dtype=torch.int64)
        self.owner = os.getpid()  # the trainer's process
        self._share()
        self.fingerprint, self._wanted = fingerprint, -1

    def _share(self) -> None:
        self._tensor.share_memory_()
        self._at = self._tensor.numpy()  # a view, as those of parts of it
        ends, decided = _HEAD + _MOST_CONSUMERS, _HEAD + _MOST_CONSUMERS + _DECISIONS * _FIELDS
        self._ends = self._at[_HEAD:ends]  # by consumer: the last pass ended
        self._decisions = self._at[ends:decided].reshape(_DECISIONS, _FIELDS)
        self._requests = self._at[decided:].reshape(_MOST_CONSUMERS, _COUNTS)

    def __getstate__(self) -> dict[str, Any]:
        return {"_tensor": self._tensor, "owner": self.owner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _tensor=torch.as_tensor(state["_tensor"]))
        self._share()

    def detached(self) -> EpochState:
        """Return a copy for this process alone, and for the workers that it starts.

        Ranks that were started from one process would otherwise move each other's epochs.
        """
        twin = EpochState(0)
        twin._at[:] = self._at
        twin._pass = twin._asked = -1 if self.complete else 0
        return twin

    def sent(self) -> EpochState:
        """Return a detached copy that is only to be pickled."""
        twin = self.detached()
        # A process is started after all was pickled: shared memory of a copy is gone by then.
        twin._tensor = twin._at
        return twin

    @property
    def wanted(self) -> int:
        """Return the epoch that was set before a StatefulDataLoader's state came; -1: none."""
        return self.epoch if self.chosen else self._wanted

    @property
    def complete(self) -> bool:
        """Return True if the pass begun last is complete, since the epoch was set."""
        consumers, number = self._consumers, self._pass or self._superseded
        if number == 0 or self._asked == number:
            return number != 0
        return consumers <= _MOST_CONSUMERS and bool((self._ends[:consumers] == number).all())

    @property
    def unread(self) -> bool:
        """Return True if no pass has begun, in any process, since the epoch or a state was set."""
        return not (self._pass or self._superseded)

    # --- events ---

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass read this epoch: from its beginning, unless its rest was loaded."""
        changed = epoch != self.epoch
        self.generation += changed  # first: who sees the new epoch is to see this too
        # Lightning sets the epoch of a pass that has begun; one that was left is never complete.
        self._superseded = 0 if changed or self.complete else self._pass or self._superseded
        self.resumed_in_workers = self.loaded = self._pass = 0
        if changed:
            self.start = 0
        self.epoch, self.chosen = epoch, 1

    def load(self, epoch: int, start: int, fingerprint: int) -> None:
        """Let the next pass read an epoch from a place in it."""
        # StatefulDataLoader without workers loads this first, and the iterator's state then.
        self._wanted = self.epoch if self.chosen else -1
        self.generation += 1
        self.resumed_in_workers = self.chosen = self._pass = self._superseded = 0
        self.fingerprint, self.start, self.epoch, self.loaded = fingerprint, start, epoch, 1

    def resumed(self, epoch: int, *, resumed_in_workers: bool) -> None:
        """Note that the pass being read goes on in this epoch, from a StatefulDataLoader's state.

        resumed_in_workers: whether that is in a worker, whose place no other process knows.
        """
        self.epoch, self.resumed_in_workers = epoch, resumed_in_workers
        self.loaded = not self.chosen

    def moved_on(self, number: int, epoch: int, start: int) -> None:
        """Note that a pass, with this number now, is one over the epoch set after a state's."""
        self.epoch, self.start, self.chosen = epoch, start, 1
        # StatefulDataLoader drops this iterator where the state's pass was read to its end.
        self._pass, self._superseded = 0, number

    def ended(self, number: int, consumer: int) -> None:
        """Note that a consumer of a pass has handed out its last batch."""
        if consumer < _MOST_CONSUMERS and not self._is_last(self._ends[consumer]):
            self._ends[consumer] = number

    def asked(self, number: int) -> None:
        """Note that worker 0 was asked for what follows its last batch."""
        if not self._is_last(self._asked):
            self._asked = number

    def _is_last(self, noted: int) -> bool:
        """Return True for the last pass: one that began earlier, and lives on, hides nothing."""
        return noted != 0 and noted == (self._pass or self._superseded)

    def first_time(self, reason: StartReason) -> bool:
        """Return True if nobody was warned of this yet, and note that somebody is."""
        bit = {"next": 1, "repeated": 2, "left": 4}[reason]
        given = self._warned
        self._warned = given | bit
        return not given & bit

    # --- requests to object stores ---

    def add_requests(self, consumer: int, new: RequestCount) -> None:
        """Count what a consumer has asked object stores for, besides what it did before."""
        if new.requests and consumer < _MOST_CONSUMERS:
            self._requests[consumer] += new

    @property
    def requests(self) -> RequestCount:
        """Return what all consumers asked object stores for until now."""
        return RequestCount(*self._requests.sum(axis=0).tolist())

    # --- passes ---

    def next_place(self, *, fixed: bool) -> tuple[int, int, StartReason]:
        """Return epoch and start of the pass that would begin now, and why.

        fixed: every pass reads the same epoch, as validation does.
        """
        epoch, start = self.epoch, self.start
        if not self.complete:
            return epoch, start, "left" if self._pass else "chosen"
        if fixed:
            return epoch, 0, "repeated"
        if self.chosen:
            return epoch, start, "spent" if start else "repeated"
        return epoch + 1, 0, "next"

    def decide(self, number: int, *, fixed: bool) -> Decision:
        """Decide what a pass reads, without beginning it."""
        for _ in range(_LOOKS):
            generation, before = self.generation, self._pass  # before what is read below
            epoch, start, reason = self.next_place(fixed=fixed)
            if not self._beginning and self._pass == before:
                break
            time.sleep(_LOOK_S)  # a worker of an older pass, which begins late, is in the middle
        else:
            self._beginning = 0
        return Decision(number, epoch, start, generation, reason, before)

    def begin(self, decision: Decision, consumers: int) -> None:
        """Begin a pass that was decided, unless a later one was begun, or an epoch set, since."""
        if self.generation != decision.generation or decision.reason == "spent":
            return
        if self._superseded == decision.number:  # begun before the epoch was set, or moved on
            self._consumers = consumers
            return
        if self._pass != decision.before and not 0 < self._pass < decision.number:
            return
        self._beginning = 1
        self._consumers = consumers
        self.epoch, self.start = decision.epoch, decision.start
        if decision.reason != "chosen":
            self.resumed_in_workers = 0
        if decision.reason == "next":
            self.loaded = 0
        self._pass, self._superseded = decision.number, 0
        self._beginning = 0

    def publish(self, decision: Decision) -> None:
        """Tell the other persistent workers what worker 0 decided."""
        fields = self._fields(decision.number)
        fields[1:] = decision.epoch, decision.start, decision.generation
        fields[0] = decision.number  # last: who sees it is to see the others

    def published(self, number: int) -> Decision:
        """Wait for what worker 0 decides of a pass. Raises EpochError when it does not."""
        fields, parent = self._fields(number), os.getppid()
        end, pause = time.monotonic() + _WAIT_S, 50e-6
        while fields[0] != number:
            if os.getppid() != parent or time.monotonic() > end:
                raise EpochError(
                    f"worker 0 of this DataLoader has not begun the pass within {_WAIT_S:.0f} s, "
                    "and it says which epoch is read; iterate the dataset in every worker, or in "
                    "none"
                )
            time.sleep(pause)  # there is nothing to wait on that processes started apart share
            pause = min(2 * pause, 10e-3)
        epoch, start, generation = map(int, fields[1:])
        return Decision(number, epoch, start, generation, "chosen")

    def _fields(self, number: int) -> Int64s:
        """Return (4,) int64, shared: number, epoch, start and generation of a decision."""
        # Spread, so that iterators that live side by side use other places.
        place = (number >> _PASSES_BITS) * 16 + number % (1 << _PASSES_BITS)
        return self._decisions[place % _DECISIONS]  # type: ignore[no-any-return]


def new_number() -> int:
    """Return a number for a pass that this process begins without a DataLoader."""
    return next(_NUMBERS) << _PASSES_BITS


def first_number(loading: LoaderInfo) -> int:
    """Return the number of the first pass of a DataLoader's iterator; those of others follow."""
    return loading.number << _PASSES_BITS


# --- the DataLoader that is on the stack --------------------------------------------------------

# What was decided, by id of the EpochState: the same for all workers that an iterator starts.
decided: WeakKeyDictionary[Any, dict[int, Decision]] = WeakKeyDictionary()
_numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

_LOADERS = ("torch.utils.data.dataloader", "torchdata.stateful_dataloader.stateful_dataloader")


def loading_iterator() -> Any:
    """Return the DataLoader's iterator that is at work on this thread's stack, or None."""
    for owner in callers(_LOADERS):
        if hasattr(owner, "_dataset_kind") and hasattr(owner, "_sampler_iter"):
            return owner  # an iterator; the loader itself has the one, and not the other
    return None


def starting_iterator() -> Any:
    """Return the DataLoader's iterator that starts workers on this thread's stack, or None."""
    iterator = loading_iterator()  # without workers it is at work while a transform forks
    return iterator if getattr(iterator, "_num_workers", 0) else None


def loading(iterator: Any, dataset: Any) -> LoaderInfo:
    """Describe a DataLoader's iterator, if there is one, to a dataset that it may read."""
    if iterator is None:
        return LoaderInfo()
    number = _numbers.get(iterator)
    if number is None:
        number = _numbers[iterator] = next(_NUMBERS)
    if getattr(iterator, "_dataset", None) is not dataset:
        return LoaderInfo(number)
    batched = getattr(iterator, "_auto_collation", False)
    size = getattr(iterator._index_sampler, "batch_size", None) if batched else None
    if size is None:  # it takes items as they are
        return LoaderInfo(number, True)
    collate = getattr(iterator, "_collate_fn", None)
    plainly = getattr(collate, "__module__", "") == "torch.utils.data._utils.collate"
    batches = getattr(dataset, "batch_size", None) is not None
    rebatched = size if batches and (size > 1 or plainly) else 0
    return LoaderInfo(
        number, True, size if getattr(iterator, "_drop_last", False) else 1, rebatched
    )
