"""Find out which part of the shards this process works on, as the scheduler of its job says.

Schedulers number the processes that they start, by variables. What they say is read once, when the
part is asked for, and shown; two of them that say different things are an error.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from ..errors import OptionError, printable
from ..units import check_given, check_int, refuse_unknown, unexpected

AUTO = "auto"
_NUMBER = 1 << 62

Variables = Mapping[str, str]
Announce = Callable[[str], None]  # called with lines to show before the work begins
Chosen = TypeVar("Chosen", bound="PartOptions")


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class PartOptions:
    """Choose which part of the shards one call works on; `PlanOptions` says it to users.

    Raises OptionError.
    """

    part: tuple[int, int] | str | None = None
    parts: int | None = None
    stagger_s: float = 0.0

    def __post_init__(self) -> None:
        check_given(self, parts=(1, _NUMBER))
        if not isinstance(self.stagger_s, int | float) or not 0 <= self.stagger_s < math.inf:
            raise unexpected("stagger_s", self.stagger_s, "seconds from 0 on")
        if self.parts is not None and self.part != AUTO:
            raise OptionError(
                f"parts is {self.parts}: goes with part 'auto' alone; else part is I/N"
            )
        if self.part is not None and self.part != AUTO:
            object.__setattr__(self, "part", _part(self.part))

    @property
    def chosen(self) -> tuple[int, int] | None:
        """Return the part, from 1 on, and of how many; None where all shards are meant."""
        return None if self.part is None else _part(self.part)

    def begun(self: Chosen, announce: Announce | None, *, wait: bool = True) -> Chosen:
        """Return these options with a part that is known, when it is to begin.

        announce: called with who said the part, and how long it waits. Raises OptionError.
        """
        tell, found = announce or (lambda line: None), self
        if self.part == AUTO:
            said = find_part(self.parts)
            tell(str(said))
            found = replace(self, part=said[:2], parts=None)
        if wait and self.stagger_s:
            wait_s = random.uniform(0, self.stagger_s)
            tell(f"waiting {wait_s:.0f} s, so that not all parts begin at once")
            time.sleep(wait_s)
        return found

    def shards_of(self, shards: int) -> range:
        """Return the numbers of the shards of the part, of so many."""
        return range(shards) if self.chosen is None else shards_of_part(*self.chosen, shards)


def shards_of_part(part: int, parts: int, shards: int) -> range:
    """Return the numbers of the shards of a part, from 1 on."""
    return range(shards * (part - 1) // parts, shards * part // parts)


def part_of(shard: int, parts: int, shards: int) -> int:
    """Return the part that a shard is of, from 1 on."""
    return -(-(shard + 1) * parts // shards)


def show_closing(part: tuple[int, int], done: str) -> str:
    """Say that a part is done, and what there is to do when all are."""
    return f"part {part[0]} of {part[1]} {done}; when all are: the same command without --part"


def _part(given: Any) -> tuple[int, int]:
    """Read (i, n) or "i/n", i from 1 to n. Raises OptionError."""
    try:
        first, last = map(int, given.split("/")) if isinstance(given, str) else given
        i, n = check_int("part", first, -_NUMBER), check_int("part", last, -_NUMBER)
    except (TypeError, ValueError):
        raise OptionError(
            f"part is {printable(repr(given))}; expected I/N, like 1/4, or (1, 4), or 'auto'"
        ) from None
    if not 1 <= i <= n:
        raise OptionError(
            f"part {i}/{n}: parts count from 1, so from 1/{max(n, 1)} to {max(n, 1)}/{max(n, 1)}"
        )
    return i, n


# --- what schedulers say --------------------------------------------------------------------------


class Part(NamedTuple):
    """Hold a part, counted from 1, and who says that it is this process's."""

    part: int
    parts: int
    where: str

    def __str__(self) -> str:
        return f"part {self.part} of {self.parts}, by {self.where}"


def find_part(parts: int | None, variables: Variables | None = None) -> Part:
    """Return the part that the scheduler of this process says.

    parts: how many there are, where that is known. Raises OptionError where nobody says it, where
    two say different things, or where they say another number of parts.
    """
    told = os.environ if variables is None else variables
    found = [one for read in _READERS if (one := read(told, parts)) is not None]
    if not found:
        raise OptionError(
            "part is 'auto', but nothing says which part this process is: looked for an array or "
            "a step of SLURM (SLURM_ARRAY_TASK_ID; SLURM_PROCID below srun), RANK and WORLD_SIZE, "
            "and JOB_COMPLETION_INDEX. Give part as I/N"
        )
    if len({one[:2] for one in found}) > 1:
        raise OptionError(
            f"part is 'auto', but there are several: {'; '.join(map(str, found))}. Give part as I/N"
        )
    if parts is not None and found[0].parts != parts:
        raise OptionError(
            f"parts is {parts}, but this process is {found[0]}. A rerun of some tasks of an array "
            "is another array: run all of them again, since what is finished is kept, or give part "
            "as I/N"
        )
    return found[0]


def _slurm(told: Variables, parts: int | None) -> Part | None:
    """Read a task of an array, a task of a step of srun, or one within the other."""
    arrays, steps = "SLURM_ARRAY_TASK_", "SLURM_STEP_NUM_TASKS"
    task, tasks, names = 0, 1, []
    if f"{arrays}ID" in told:
        number, least, most, count = (
            _number(told, f"{arrays}{name}") for name in ("ID", "MIN", "MAX", "COUNT")
        )
        step = max(1, _number(told, f"{arrays}STEP"))
        task, left = divmod(number - least, step)
        if left or not 0 <= task < count or least + step * (count - 1) != most:
            raise OptionError(
                f"part is 'auto', but the {count:,} numbers of this job's array, {least} to "
                f"{most}, are not evenly spaced, so that task {number} cannot tell which part it "
                "is. Give part as I/N"
            )
        tasks = count
        names.append(f"{arrays}ID={number} of {least}-{most}")
    if steps in told:  # only below srun: a batch script alone is one process, whatever was asked
        procid, inner = _number(told, "SLURM_PROCID"), _number(told, steps)
        if not names or inner > 1:
            task, tasks = task * inner + procid, tasks * inner
            names.append(f"SLURM_PROCID={procid} of {inner}")
    return _checked(task, tasks, ", ".join(names)) if names else None


def _ranks(told: Variables, parts: int | None) -> Part | None:
    """Read what torchrun, and who follows it, says."""
    if "RANK" not in told or "WORLD_SIZE" not in told:
        return None
    rank, size = _number(told, "RANK"), _number(told, "WORLD_SIZE")
    return _checked(rank, size, f"RANK={rank}, WORLD_SIZE={size}")


def _indexed(told: Variables, parts: int | None) -> Part | None:
    """Read the index of a pod of an indexed job of Kubernetes, which does not say of how many."""
    name = "JOB_COMPLETION_INDEX"
    if name not in told:
        return None
    index = _number(told, name)
    if parts is None:
        raise OptionError(
            f"part is 'auto', and {name}={index} does not say of how many: give parts, the job's "
            "completions (`--parts N`)"
        )
    return _checked(index, parts, f"{name}={index}")


_READERS: tuple[Callable[[Variables, int | None], Part | None], ...] = (_slurm, _ranks, _indexed)


def _checked(index: int, count: int, where: str) -> Part:
    if not 0 <= index < count:
        raise OptionError(f"part is 'auto', but {where}: expected 0 to {max(0, count - 1)}")
    return Part(index + 1, count, where)


def _number(told: Variables, name: str) -> int:
    try:
        return int(told[name])
    except KeyError:
        raise OptionError(f"part is 'auto', and {name} is not set: give part as I/N") from None
    except ValueError:
        raise OptionError(
            f"part is 'auto', but {name} is {printable(repr(told[name]))}: expected a number"
        ) from None
