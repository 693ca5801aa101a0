"""Find out the rank and world size of this process, and who reads an epoch together."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from typing import NamedTuple

import torch
from torch.utils.data import get_worker_info

from ..errors import OptionError
from ..stack import callers, users_level

# Classes that split what a dataset yields among the ranks, and the modules they are of. Older
# releases of transformers had one of their own.
_SPLITTERS = frozenset({"DataLoaderDispatcher", "IterableDatasetShard"})
_SPLITTING = frozenset({"accelerate.data_loader", "transformers.trainer_pt_utils"})


class Consumers(NamedTuple):
    """Count who reads an epoch together."""

    here: int  # consumers on this machine, this one included
    machines: int


def resolve_ranks(given: tuple[int, int] | None) -> tuple[int, int]:
    """Return rank and world size: those given, else the launcher's, else (0, 1).

    Raises OptionError when what was given contradicts the launcher, or the items are split twice.
    """
    found, where = _found_ranks()
    if given is not None and found is not None and given != found:
        raise OptionError(
            f"rank {given[0]} of {given[1]} was given, but {where} says rank "
            f"{found[0]} of {found[1]}; leave both out to follow it"
        )
    if given is None and found is None and get_worker_info() is None:
        _warn_of_tasks(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    ranks = given or found or (0, 1)
    _refuse_second_split(*ranks)
    return ranks


def _found_ranks() -> tuple[tuple[int, int] | None, str]:
    """Return the rank and world size that the launcher of this process tells, and its name."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return (distributed.get_rank(), distributed.get_world_size()), "torch.distributed"
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or world_size is None:
        return None, ""
    where = "the launcher (RANK, WORLD_SIZE)"
    try:
        return (int(rank), int(world_size)), where
    except ValueError:
        raise OptionError(f"{where} says rank {rank!r} of {world_size!r}: not numbers") from None


@functools.cache
def _warn_of_tasks(tasks: str) -> None:
    """Warn, once, of tasks of srun that each read all the data. Rejected: to split it among them.

    They may be trainings of their own, each of which would silently see a part of its data.
    """
    if tasks != "1":
        warnings.warn(
            f"This is one of {tasks} tasks of srun. Each of them reads all the data, since nothing "
            "says that they train together. If they do, call "
            "torch.distributed.init_process_group() before the dataset is used, or set RANK and "
            "WORLD_SIZE (docs/order.md, SLURM). If each is on its own, give rank=0, world_size=1",
            stacklevel=users_level(),
        )


def _refuse_second_split(rank: int, world_size: int) -> None:
    """Raise OptionError when Accelerate gives each rank only a part of what that rank yields.

    To prepare a loader asks the dataset nothing. But what wraps it is on the stack whenever the
    dataset is used: here, in a forked worker (its stack goes on from its parent's), and in what
    pickles it for a spawned one. Rejected: gc.get_referrers, which walks all objects; Accelerate's
    GradientState, which holds the loaders that are iterated, but not in spawned workers.
    """
    if world_size == 1 or not any(name in sys.modules for name in _SPLITTING):
        return
    for owner in callers(_SPLITTING):
        parts = getattr(getattr(owner, "state", owner), "num_processes", 2)
        if type(owner).__name__ in _SPLITTERS and parts > 1:
            raise OptionError(
                f"{type(owner).__name__} of Accelerate splits what this dataset yields among "
                f"{parts} processes, but it is split already (this is rank {rank} of "
                f"{world_size}): records would be lost. Leave the DataLoader out of "
                "accelerator.prepare(); with a Trainer of transformers, override "
                "get_train_dataloader and get_eval_dataloader (docs/order.md shows both)"
            )


def consumers(world_size: int, num_workers: int) -> Consumers:
    """Count who reads an epoch, when each rank has so many workers."""
    machines, here = machines_of(world_size)
    return Consumers(here * num_workers, machines)


def machines_of(world_size: int) -> tuple[int, int]:
    """Return the machines of the job, and the ranks on this one.

    Where neither the launcher nor srun tells, there is one machine.
    """
    told = os.environ
    here = world_size
    with contextlib.suppress(KeyError, ValueError):
        if "LOCAL_WORLD_SIZE" in told:
            here = int(told["LOCAL_WORLD_SIZE"])
        elif told["SLURM_STEP_NUM_TASKS"] == str(world_size):
            here = -(-world_size // int(told["SLURM_STEP_NUM_NODES"]))
    here = min(max(1, here), world_size)
    return -(-world_size // here), here
