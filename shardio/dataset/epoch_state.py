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
from collections.abc import Callable
from itertools import count
from typing import Any, Generic, Literal, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch

from ..errors import EpochError
from ..stack import frames

T = TypeVar("T")

Verdict = Literal["chosen", "next", "repeated", "left", "spent"]

# Places in the shared tensor. Those of `ended`, one for each consumer, and of decisions follow.
(
    _EPOCH,  # of the pass begun last; or chosen, or loaded, for the next
    _START,  # units of that epoch that were consumed before its first batch
    _PASS,  # the number of the pass begun last; 0: none since the epoch was set or loaded
    _EARLIER,  # a pass that had been begun when its own epoch was set once more, or 0
    _CONSUMERS,  # of the pass begun last, that have batches in it: the first ones
    _ASKED,  # the last pass of which worker 0 was asked for what follows its last batch
    _CHOSEN,  # whether the epoch is the caller's, by set_epoch
    _LOADED,  # whether it comes from a state, and no epoch followed it yet
    _WANTED,  # the epoch that had been chosen when the state was loaded, or -1
    _ELSEWHERE,  # whether workers went on from states that this process does not know
    _MOVES,  # how often another epoch was set, or a state loaded
    _ORDER,  # a number that tells one order from another
    _WARNED,  # warnings that were given, as bits
    _HEAD,
) = range(14)

_MOST_CONSUMERS = 256  # beyond it a pass is complete when worker 0 says so
_DECISIONS, _FIELDS = 64, 4  # of persistent workers, kept until as many more were made
_SIZE = _HEAD + _MOST_CONSUMERS + _DECISIONS * _FIELDS

_PASSES_BITS = 24  # pass p of a loader's iterator is number (that of the iterator << 24) + p
_NUMBERS = count(1)  # of iterators, in this process

# How long workers wait for worker 0 to begin a pass. It does so as soon as it has made what it was
# asked for in the pass before.
_WAIT_S = 600.0


class Decision(NamedTuple):
    """What a pass reads."""

    number: int  # of the pass
    epoch: int
    start: int  # units consumed before
    moves: int  # when it was decided
    verdict: Verdict
    before: int = -1  # the pass begun last when it was decided


class Loading(NamedTuple):
    """The iterator of a torch DataLoader, as far as it concerns a dataset that it reads."""

    number: int
    direct: bool  # the dataset is the loader's own, and not one within it
    batch_size: int | None  # None: the loader takes items as they are
    drop_last: bool
    own_collate: bool  # it has a collate_fn of the user's

    @property
    def drops(self) -> int:
        """Return the items below which a worker's last ones are left out."""
        return self.batch_size or 1 if self.direct and self.drop_last else 1


class Ticket:
    """What a DataLoader's worker brings along from the process that started it."""

    def __init__(self, loading: Loading, decision: Decision) -> None:
        self._loading = loading
        self._decision: Decision | None = decision  # of the first pass
        self._passes = 0  # that this worker has begun

    def next_pass(self) -> tuple[Loading, int, Decision | None]:
        """Return the loader, the number of the pass that begins now, and what was decided of it."""
        number = (self._loading.number << _PASSES_BITS) + self._passes
        decision, self._decision = self._decision, None
        self._passes += 1
        return self._loading, number, decision


class _Cell(Generic[T]):
    """One number of an EpochState, read by its name."""

    def __init__(self, place: int, kind: Callable[[Any], T]) -> None:
        self._place, self._kind = place, kind

    def __get__(self, state: EpochState, owner: type[EpochState]) -> T:
        return self._kind(state._at[self._place])


class EpochState:
    """Epoch, place and passes of one dataset, for all processes that read it. See the module."""

    def __init__(self, order: int) -> None:
        self._tensor = torch.zeros(_SIZE, dtype=torch.int64)
        self.owner = os.getpid()  # the trainer's process
        self._alone = False  # whether it is a copy for the process that it is pickled for
        self._share()
        self._at[_ORDER], self._at[_WANTED] = order, -1

    def _share(self) -> None:
        self._tensor.share_memory_()  # type: ignore[no-untyped-call]
        self._at = self._tensor.numpy()  # a view

    def __getstate__(self) -> dict[str, Any]:
        # A process is started after all was pickled: shared memory of a copy is gone by then.
        tensor = self._tensor.numpy() if self._alone else self._tensor
        return {"_tensor": tensor, "owner": self.owner, "_alone": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _tensor=torch.as_tensor(state["_tensor"]))
        self._share()

    def detached(self) -> EpochState:
        """Return a copy for this process alone, and for the workers that it starts.

        Ranks that were started from one process would otherwise move each other's epochs.
        """
        twin = EpochState(0)
        twin._at[:] = self._at
        twin._at[_PASS] = twin._at[_ASKED] = -1 if self.complete else 0
        return twin

    def sent(self) -> EpochState:
        """Return a detached copy that is only to be pickled."""
        twin = self.detached()
        twin._alone = True
        return twin

    # --- what is known ---

    epoch = _Cell(_EPOCH, int)
    start = _Cell(_START, int)
    moves = _Cell(_MOVES, int)
    order = _Cell(_ORDER, int)
    chosen = _Cell(_CHOSEN, bool)
    loaded = _Cell(_LOADED, bool)
    elsewhere = _Cell(_ELSEWHERE, bool)

    @property
    def wanted(self) -> int:
        """Return the epoch that the caller set before a StatefulDataLoader's state came, or -1."""
        return int(self._at[_EPOCH if self._at[_CHOSEN] else _WANTED])

    @property
    def complete(self) -> bool:
        """Return True if the pass begun last is complete, since the epoch was set."""
        at, consumers = self._at, int(self._at[_CONSUMERS])
        number = at[_PASS] or at[_EARLIER]
        if number == 0:
            return False
        if at[_ASKED] == number:
            return True
        ends = at[_HEAD : _HEAD + consumers]
        return consumers <= _MOST_CONSUMERS and bool((ends == number).all())

    # --- events ---

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass read this epoch: from its beginning, unless its rest was loaded."""
        at = self._at
        moves = epoch != at[_EPOCH]
        at[_MOVES] += moves  # first: who sees the new epoch is to see this too
        # Lightning sets the epoch of a pass that has begun; one that was left is never complete.
        at[_EARLIER] = 0 if moves or self.complete else at[_PASS] or at[_EARLIER]
        at[_ELSEWHERE] = at[_LOADED] = at[_PASS] = 0
        if moves:
            at[_START] = 0
        at[_EPOCH], at[_CHOSEN] = epoch, 1

    def load(self, epoch: int, start: int, order: int) -> None:
        """Let the next pass read an epoch from a place in it."""
        at = self._at
        # StatefulDataLoader without workers loads this first, and the iterator's state then.
        at[_WANTED] = at[_EPOCH] if at[_CHOSEN] else -1
        at[_MOVES] += 1
        at[_ELSEWHERE] = at[_CHOSEN] = at[_PASS] = at[_EARLIER] = 0
        at[_ORDER], at[_START], at[_EPOCH], at[_LOADED] = order, start, epoch, 1

    def resumed(self, epoch: int, *, elsewhere: bool) -> None:
        """Note that the pass being read goes on in this epoch, from a StatefulDataLoader's state.

        elsewhere: whether that is in a worker, whose place no other process knows.
        """
        at = self._at
        at[_EPOCH], at[_ELSEWHERE] = epoch, elsewhere
        at[_LOADED] = not at[_CHOSEN]

    def moved_on(self, number: int, epoch: int, start: int) -> None:
        """Note that a pass, with this number now, is one over the epoch set after a state's."""
        at = self._at
        at[_EPOCH], at[_START], at[_CHOSEN] = epoch, start, 1
        # StatefulDataLoader drops this iterator where the state's pass was read to its end.
        at[_PASS], at[_EARLIER] = 0, number

    def ended(self, number: int, consumer: int) -> None:
        """Note that a consumer of a pass has handed out its last batch."""
        if consumer < _MOST_CONSUMERS:
            self._note(_HEAD + consumer, number)

    def asked(self, number: int) -> None:
        """Note that worker 0 was asked for what follows its last batch."""
        self._note(_ASKED, number)

    def _note(self, place: int, number: int) -> None:
        """Note a pass; one that began earlier, and lives on, hides nothing of the last one."""
        at = self._at
        if at[place] == 0 or at[place] != (at[_PASS] or at[_EARLIER]):
            at[place] = number

    def first_time(self, verdict: Verdict) -> bool:
        """Say whether nobody was warned of this yet, and note that somebody is."""
        bit = {"next": 1, "repeated": 2, "left": 4}[verdict]
        given = int(self._at[_WARNED])
        self._at[_WARNED] = given | bit
        return not given & bit

    # --- passes ---

    def next_place(self, *, fixed: bool) -> tuple[int, int, Verdict]:
        """Return epoch and start of the pass that would begin now, and why.

        fixed: every pass reads the same epoch, as validation does.
        """
        at = self._at
        epoch, start = int(at[_EPOCH]), int(at[_START])
        if not self.complete:
            return epoch, start, "left" if at[_PASS] else "chosen"
        if fixed:
            return epoch, 0, "repeated"
        if at[_CHOSEN]:
            return epoch, start, "spent" if start else "repeated"
        return epoch + 1, 0, "next"

    def decide(self, number: int, *, fixed: bool) -> Decision:
        """Decide what a pass reads, without beginning it."""
        moves, before = self.moves, int(self._at[_PASS])  # before what is read below
        epoch, start, verdict = self.next_place(fixed=fixed)
        return Decision(number, epoch, start, moves, verdict, before)

    def begin(self, decision: Decision, consumers: int) -> None:
        """Begin a pass that was decided, unless a later one was begun, or an epoch set, since."""
        at = self._at
        if at[_MOVES] != decision.moves:
            return
        if at[_PASS] != decision.before and not 0 < at[_PASS] < decision.number:
            return
        if decision.verdict == "spent":
            return
        at[_CONSUMERS] = consumers
        at[_EPOCH], at[_START] = decision.epoch, decision.start
        if decision.verdict != "chosen":
            at[_ELSEWHERE] = 0
        if decision.verdict == "next":
            at[_LOADED] = 0
        at[_PASS], at[_EARLIER] = decision.number, 0

    def publish(self, decision: Decision) -> None:
        """Tell the other persistent workers what worker 0 decided."""
        place = self._place(decision.number)
        self._at[place + 1 : place + _FIELDS] = decision.epoch, decision.start, decision.moves
        self._at[place] = decision.number  # last: who sees it is to see the others

    def published(self, number: int) -> Decision:
        """Wait for what worker 0 decides of a pass. Raises EpochError when it does not."""
        place, parent = self._place(number), os.getppid()
        end, pause = time.monotonic() + _WAIT_S, 50e-6
        while self._at[place] != number:
            if os.getppid() != parent or time.monotonic() > end:
                raise EpochError(
                    f"worker 0 of this DataLoader has not begun the pass within {_WAIT_S:.0f} s, "
                    "and it says which epoch is read; iterate the dataset in every worker, or in "
                    "none"
                )
            time.sleep(pause)  # there is nothing to wait on that processes started apart share
            pause = min(2 * pause, 10e-3)
        epoch, start, moves = map(int, self._at[place + 1 : place + _FIELDS])
        return Decision(number, epoch, start, moves, "chosen")

    def _place(self, number: int) -> int:
        # Spread, so that iterators that live side by side use other places.
        place = (number >> _PASSES_BITS) * 16 + number % (1 << _PASSES_BITS)
        return _HEAD + _MOST_CONSUMERS + place % _DECISIONS * _FIELDS


def new_number() -> int:
    """Return a number for a pass that this process begins without a DataLoader."""
    return next(_NUMBERS) << _PASSES_BITS


# --- the DataLoader that is on the stack --------------------------------------------------------

# What an iterator decided for each dataset: the same for all workers that it starts.
_decided: WeakKeyDictionary[Any, dict[int, Decision]] = WeakKeyDictionary()
_numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

_LOADERS = ("torch.utils.data.dataloader", "torchdata.stateful_dataloader.stateful_dataloader")


def loading_iterator() -> Any:
    """Return the DataLoader's iterator that is at work on this thread's stack, or None."""
    for frame in frames():
        if frame.f_globals.get("__name__") in _LOADERS:
            owner = frame.f_locals.get("self")
            if hasattr(owner, "_dataset_kind") and hasattr(owner, "_sampler_iter"):
                return owner  # an iterator; the loader itself has the one, and not the other
    return None


def starting_iterator() -> Any:
    """Return the DataLoader's iterator that starts workers on this thread's stack, or None."""
    iterator = loading_iterator()  # without workers it is at work while a transform forks
    return iterator if getattr(iterator, "_num_workers", 0) else None


def loading(iterator: Any, dataset: Any) -> Loading:
    """Describe a DataLoader's iterator to a dataset that it may read."""
    number = _numbers.get(iterator)
    if number is None:
        number = _numbers[iterator] = next(_NUMBERS)
    batched = bool(getattr(iterator, "_auto_collation", False))
    collate = getattr(iterator, "_collate_fn", None)
    return Loading(
        number=number,
        direct=getattr(iterator, "_dataset", None) is dataset,
        batch_size=getattr(iterator._index_sampler, "batch_size", None) if batched else None,
        drop_last=bool(getattr(iterator, "_drop_last", False)),
        own_collate=getattr(collate, "__module__", "") != "torch.utils.data._utils.collate",
    )


def ticket(
    iterator: Any,
    found: Loading,
    state: EpochState,
    *,
    fixed: bool,
    consumers: Callable[[Decision], int] | None,
) -> Ticket:
    """Make the ticket of a worker that this iterator is starting in this process.

    consumers: of the pass, which is begun here then, so that its epoch can be asked for at once.
    """
    decided = _decided.setdefault(iterator, {})
    decision = decided.get(id(state))
    if decision is None:
        decision = state.decide(found.number << _PASSES_BITS, fixed=fixed)
        decided[id(state)] = decision
        if consumers is not None:
            state.begin(decision, consumers(decision))
    return Ticket(found, decision)
