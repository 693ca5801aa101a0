"""Iterate over one epoch of a dataset, in the process that reads it.

Of torch's DataLoader each worker makes an Iteration of its own. Which epoch they read is decided
once for all of them: see epoch_state. A worker that is started brings along what was decided, as
a Ticket.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import get_worker_info

from ..errors import EpochError, OptionError, StateError, as_error, printable
from ..order.partition import Partition
from ..stack import users_level
from ..storage.ranges import RequestMeter
from . import epoch_state
from .assemble import Assembler
from .decode import ThisRecord
from .epoch_state import Decision, LoaderInfo, StartReason, Ticket
from .protocol import BatchIterator, EpochReader
from .ranks import consumers
from .stateful import ITERATOR, STATE, check_state

MakeBatches = Callable[[Partition], Iterator[Any]]

_END = object()


class Iteration(BatchIterator):
    """Iterate over one epoch's items of one worker.

    It is an object, since a generator would read the epoch late.

    make_batches  called with this rank's share: gives its batches; default: they are made here
    """

    def __init__(self, stream: EpochReader, make_batches: MakeBatches | None = None) -> None:
        self._stream = stream
        self._make_batches = make_batches
        self._epochs = stream.epochs
        info = get_worker_info()
        self._here = info is None
        self._worker, self._workers = (0, 1) if info is None else (info.id, info.num_workers)
        self._work = ThisRecord()
        self._items: Iterator[Any]
        self._leads = self._worker == 0  # the worker that no other outlives
        self._error: Exception | None = None
        self._warning: tuple[StartReason, str] | None = None
        self._is_new = True  # nothing was asked of it
        self._requests = RequestMeter()
        self.units_per_step = 0  # it has not begun
        try:
            self._pass()
        except Exception as error:
            if info is None:
                raise
            self._error = error  # a persistent worker of torch dies of an error here, and says none

    def _pass(self) -> None:
        """Begin a pass: find out which epoch it reads."""
        stream, epochs = self._stream, self._epochs
        stream.ranks()  # raises what makes it no pass at all
        decision, found = self._decide()
        self.number, self.generation = decision.number, decision.generation
        if epochs.fingerprint != stream.fingerprint():
            raise StateError(
                "load_state_dict changed the options of this dataset after the workers of the "
                "DataLoader had started; make a new DataLoader after it"
            )
        if epochs.generation != self.generation:
            raise EpochError(
                f"the epoch was set to {epochs.epoch} while the workers of a pass were "
                "starting; call set_epoch before iter(), and make a new iterator after it"
            )
        if found.rebatched:
            raise OptionError(_BATCHES.format(size=stream.batch_size, many=found.rebatched))
        self._drops = found.drops
        if self._leads and not stream.evaluates:
            self._warning = warning_of(stream, decision)
        self._begin(decision.epoch, decision.start, 0)

    def _decide(self) -> tuple[Decision, LoaderInfo]:
        """Decide what this pass reads, and find out about the DataLoader that it is for.

        Every worker of the pass gets the same answer: see epoch_state.
        """
        stream, epochs = self._stream, self._epochs
        ticket = None if self._here else stream.ticket  # not of a worker that torch did not start
        if ticket is not None:
            found, number, decision = ticket.next_pass()
            if decision is None and not self._leads:
                return epochs.published(number), found
        else:
            iterator = epoch_state.loading_iterator() if self._here else None
            found = epoch_state.loading(iterator, stream)
            number, decision = epoch_state.new_number(), None
        if decision is None:
            decision = epochs.decide(number, fixed=stream.evaluates)
            if ticket is not None:
                epochs.publish(decision)  # whatever comes next, others are not to wait for ever
        if self._leads and not found.rebatched:
            busy = 1 if self._here else busy_workers(stream, self._workers, found.drops, decision)
            epochs.begin(decision, busy)
        return decision, found

    def _begin(self, epoch: int, start: int, done: int) -> None:
        stream = self._stream
        stream.name_pass(f"{self.number}")
        self.epoch = epoch
        self.start = start  # units consumed before
        self.done = done  # batches of this worker since then
        share = stream.share_of(epoch, self._worker, self._workers, start, done)
        steps_of(share)
        self.units_per_step = share.batch_units * share.world_size  # units of a global batch
        if self._make_batches is not None:
            self._items = self._make_batches(share)
            if isinstance(self._items, BatchIterator):
                self.inner = self._items
        else:
            seen = consumers(share.world_size, self._workers)
            assembler = Assembler(stream, stream.options, share, seen)
            self._items = assembler.batches(self._work, one_by_one=stream.batch_size is None)
        left = len(share.worker_steps)
        self._last = done + left - left % self._drops  # batches when the last one is handed out
        if self.done == self._last:
            self._epochs.ended(self.number, self._worker)

    def __next__(self) -> Any:
        if self._error is not None:
            raise self._error  # and not StopIteration: the epoch did not end here
        if self._is_new and self._here and self._epochs.generation != self.generation:
            self._pass()  # Lightning makes the iterator first, and sets its epoch then
        self._is_new = False
        if self._warning is not None:
            self._warn(*self._warning)
        try:
            item = next(self._items, _END)
        except Exception as error:
            self._error = error
            raise
        except BaseException as error:
            told = error if self._make_batches is not None else self._as_error(error)
            if isinstance(told, Exception):
                self._error = told
                raise told from error
            # Ctrl-C: what was being made is lost.
            self._error = EpochError(
                f"this pass was ended by {type(error).__name__}; make a new iterator"
            )
            raise
        epochs = self._epochs
        if item is _END:
            if self._leads:
                epochs.asked(self.number)
            raise StopIteration
        if epochs.generation != self.generation:
            moved = epochs.epoch != self.epoch
            what = f"the epoch was set to {epochs.epoch}" if moved else "a state was loaded"
            raise EpochError(
                f"{what} while epoch {self.epoch} was being read; call set_epoch before iter(), "
                "as load_state_dict, and make a new iterator after it"
            )
        self.done += 1
        if self._make_batches is None and self._stream.batch_size is not None:  # called rarely
            epochs.add_requests(self._worker, self._requests.new())
        if self.done == self._last:
            epochs.ended(self.number, self._worker)
        return item

    def state_dict(self) -> dict[str, Any]:
        """Tell StatefulDataLoader where this worker's iterator stands.

        The place is absolute, so that it is the same however often the run was resumed.
        """
        if not self.units_per_step:
            return {}  # what kept it from beginning comes with the first item
        stream = self._stream
        world_size = stream.ranks()[1]
        size = {} if stream.batch_size is None else {"batch_size": stream.batch_size}
        return (
            stream.state_at(self.epoch, self.start)
            | size
            | {
                "rows": (stream.batch_size or 1) * world_size,
                "worker": self._worker,
                "workers": self._workers,
                "done": self.done,
            }
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict` of the same worker. Raises StateError."""
        if not self.units_per_step:
            return
        check_state(state, STATE + ITERATOR)
        epochs = self._epochs
        here = self.state_dict()
        advice = "load dataset.state_from(state) into the dataset, and make a new loader"
        if (state["worker"], state["workers"]) != (self._worker, self._workers):
            raise StateError(
                f"the state is that of worker {state['worker']} of {state['workers']}, but this is "
                f"worker {self._worker} of {self._workers}; {advice}"
            )
        for name in here:
            if name not in ("epoch", "units", "done", "batch_size") and here[name] != state.get(
                name
            ):
                raise StateError(
                    f"{name} is {printable(repr(here[name]))}, but the state was saved with "
                    f"{printable(repr(state.get(name)))}; {advice}"
                )
        self._warning = None  # this pass is not the one that was begun
        stream, wanted = self._stream, epochs.wanted
        if wanted not in (-1, state["epoch"]):
            share = stream.share_of(
                state["epoch"], self._worker, self._workers, state["units"], state["done"]
            )
            if share.worker_steps:
                raise StateError(
                    f"the state is of the middle of epoch {state['epoch']}, but "
                    f"set_epoch({wanted}) was called; to go on with it call "
                    f"set_epoch({state['epoch']})"
                )
            # That epoch is over, and another one is to begin.
            start = epochs.start if epochs.chosen else 0
            if get_worker_info() is None:  # the number of before may be that of a complete pass
                self.number = epoch_state.new_number()
            epochs.moved_on(self.number, wanted, start)
            self._begin(wanted, start, 0)
            if share.steps % self._workers:  # and the loop had not met that end: the loader now
                self._error = StateError(  # takes the next worker's batch first
                    f"the state is of the last batch of epoch {state['epoch']}, and "
                    f"set_epoch({wanted}) was called; iterate once after "
                    f"set_epoch({state['epoch']}), which ends that epoch, and then set {wanted}"
                )
            return
        epochs.resumed(state["epoch"], resumed_in_workers=get_worker_info() is not None)
        self._begin(state["epoch"], state["units"], state["done"])

    def _as_error(self, error: BaseException) -> BaseException:
        """Return what is no Exception as one that names the record."""
        where = self._work.record
        if not self._here:
            where = f"{where}, in worker {self._worker}" if where else ""
        return as_error(error, where, interrupts=self._here)

    def _warn(self, reason: StartReason, message: str) -> None:
        """Give the warning of this pass, once for all passes and workers of the dataset."""
        self._warning = None
        if self._epochs.first_time(reason):
            warnings.warn(message, stacklevel=users_level())


def new_ticket(stream: EpochReader, iterator: Any) -> Ticket | None:
    """Make the ticket of a worker that a DataLoader's iterator starts in this process."""
    if iterator is None or get_worker_info() is not None:
        return stream.ticket
    found, epochs = epoch_state.loading(iterator, stream), stream.epochs
    decided = epoch_state.decided.setdefault(iterator, {})
    decision = decided.get(id(epochs))
    if decision is None:
        decision = epochs.decide(epoch_state.first_number(found), fixed=stream.evaluates)
        decided[id(epochs)] = decision
        # Begun here, so that its epoch can be asked for now.
        if found.direct and not found.rebatched:
            with contextlib.suppress(OptionError):  # the worker will say so
                stream.ranks()
                busy = busy_workers(stream, iterator._num_workers, found.drops, decision)
                epochs.begin(decision, busy)
    return Ticket(found, decision)


def busy_workers(stream: EpochReader, workers: int, drops: int, decision: Decision) -> int:
    """Count the workers that have batches in a pass: they are the first ones.

    The others may not have started yet when the pass is read to its end.
    """
    try:
        steps = stream.share_of(decision.epoch, start=decision.start).steps
    except OptionError:  # the workers will say so
        return workers
    return min(max(0, steps - (drops - 1) * workers), workers)


def warning_of(stream: EpochReader, decision: Decision) -> tuple[StartReason, str] | None:
    """Return the warning to give when this pass begins, and its kind. Raises EpochError."""
    epoch, reason = decision.epoch, decision.reason
    rank, world_size = stream.ranks()
    if reason == "left":
        return reason, (
            f"{stream.name}: the pass over epoch {epoch} was left before its end, and begins "
            "again: the same order, and the same random crops. For another epoch call "
            "dataset.set_epoch(epoch) before iter()"
        )
    if reason == "spent":
        if stream.share_of(epoch, start=decision.start).steps:
            raise EpochError(
                f"epoch {epoch} was resumed in its middle and has been read to its end; call "
                "set_epoch with the next one before iter(): another pass would be of its rest"
            )
        # No error: Lightning makes this iterator before it sets the next epoch.
        return "repeated", (
            f"{stream.name}: epoch {epoch} was resumed at its end, and this pass gives nothing "
            "once more: call dataset.set_epoch(epoch) with the next one before iter()"
        )
    if reason == "repeated":
        return reason, (
            f"{stream.name}: epoch {epoch} is being read again, in the same order: after a first "
            "set_epoch call dataset.set_epoch(epoch) before each iter()"
        )
    if reason == "next" and world_size > 1:
        return reason, (
            f"{stream.name}: rank {rank} of {world_size} goes on with epoch {epoch}, since its "
            "last pass was complete; nobody called set_epoch. A rank that reads a pass more "
            "than the others would leave them: call dataset.set_epoch(epoch) before each "
            "iter(), on every rank"
        )
    return None


def steps_of(share: Partition) -> int:
    """Return the steps of a share. Raises OptionError where tail="drop" leaves none."""
    if share.steps == 0 and share.tail == "drop" and share.epoch.records and not share.start:
        size = share.batch_size or 1
        raise OptionError(
            f"tail='drop' leaves nothing: {share.epoch.records:,} records are fewer than "
            f"{size} x {share.world_size} (batch_size x world_size). Choose tail='pad', or a "
            "smaller batch_size"
        )
    return share.steps


STREAMS: weakref.WeakSet[EpochReader] = weakref.WeakSet()


class _Starting(threading.local):
    """Hold the tickets of the next worker, by thread: several may start workers at once."""

    tickets: Sequence[tuple[EpochReader, Ticket | None]] = ()


_starting = _Starting()


# A forked worker is to know what was decided when its loader started it, not when it got to run.
def _make_tickets() -> None:
    iterator = epoch_state.starting_iterator()
    if iterator is not None:
        _starting.tickets = [(stream, new_ticket(stream, iterator)) for stream in list(STREAMS)]


def _take_tickets() -> None:
    for stream, one in _starting.tickets:
        stream.ticket = one
    _drop_tickets()


def _drop_tickets() -> None:
    _starting.tickets = ()


os.register_at_fork(
    before=_make_tickets, after_in_child=_take_tickets, after_in_parent=_drop_tickets
)


_BATCHES = (
    "the dataset makes batches of {size} itself, and the DataLoader's batch_size={many} makes "
    "batches of {many} such batches, of shape ({many}, {size}, ...). Either give batch_size=None "
    "to the DataLoader: DataLoader(dataset, batch_size=None, num_workers=...); or leave batch_size "
    "out of the dataset, and the DataLoader makes batches of its samples"
)
