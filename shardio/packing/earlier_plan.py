"""Plans that `shardio plan` made before: found in OUT, and compared with what is asked for.

Whoever packs there goes on under such a plan, and does not list the source. An option that is not
given is as it was planned. An option that is given must be as it was planned.
"""

from __future__ import annotations

import functools
import os

from ..errors import DamageError, NotPackedError, OptionError, SourceChangedError, printable
from ..formats import manifest
from ..storage import lock
from . import journal, output_dir
from .options import PackCall, PackOptions
from .plan import Plan, changed
from .sources.base import SourceRequest

_DEFAULTS = PackOptions().record()


def earlier_plans(directory: str, command: str = "pack", within: str = "") -> dict[str, Plan]:
    """Return the plans that were made ahead in OUT, and are not committed, by split.

    None where one of the splits has no such plan. command: for which they were made. within: the
    folder in each dataset where it is packed
    """
    found = {}
    for name in output_dir.begun_splits(directory, within) or [""]:
        folder = output_dir.building_folder(directory, name, within)
        try:
            head, read = lock.look(folder)
            planned = journal.parse(head, folder, functools.partial(_read, folder, read))
        except FileNotFoundError:
            if not os.path.lexists(os.path.join(folder, manifest.MANIFEST)):
                return {}
            continue  # committed before the others
        except (DamageError, NotPackedError):  # who packs here says so
            return {}
        if planned.ahead is None or planned.command != command:
            return {}
        if journal.is_resumable(folder, head):
            found[name] = planned
    return found


def committed_plans(directory: str) -> dict[str, Plan]:
    """Return the plans that were made ahead in OUT, and are committed, by split; none or all."""
    names = manifest.planned_splits(directory) or [""]
    found = {name: journal.kept_plan(manifest.split_folder(directory, name)) for name in names}
    done = {name: one for name, one in found.items() if one is not None}
    return done if len(done) == len(found) else {}


def _read(folder: str, read: journal.ReadBytes, start: int, length: int) -> bytes:
    """Read bytes of a plan that nobody holds. Raises SourceChangedError where it is gone."""
    try:
        return read(start, length)
    except FileNotFoundError:
        raise plan_is_gone(folder) from None


def plan_is_gone(out: str) -> SourceChangedError:
    """Return the error for a plan that was made ahead, and is not there any more."""
    return SourceChangedError(
        f"{printable(out)}: the plan that was here is gone: another process committed it, or made "
        "a new one. Run the same command again"
    )


def refuse_others(
    out: str,
    planned: Plan,
    request: SourceRequest,
    call: PackCall,
    classes: tuple[str, ...] | None,
) -> None:
    """Raise OptionError for what is given, and was planned otherwise.

    classes: those of the dataset whose numbering is to be taken.
    """
    assert planned.ahead is not None
    options = call.options(request.kind).record()
    given = {name: one for name, one in options.items() if one != _DEFAULTS.get(name)}
    if call.images.quality is None:
        given.pop("quality", None)
    if request.kind is None:
        given.pop("source", None)
    was = planned.options.record()
    lines = changed({name: was.get(name) for name in given}, given)
    if request.fields:
        lines += changed({"fields": planned.ahead["fields"]}, {"fields": dict(request.fields)})
    if request.splits is not None and bool(planned.options.splits) != request.splits:
        lines += changed({"splits": not request.splits}, {"splits": request.splits})
    if classes is not None and classes != planned.classes:
        lines.append("classes: others, or in another order")
    planner = journal.planner(planned)
    if lines:
        raise OptionError(
            f"{printable(out)}: another plan was made here by `{planner}`:\n"
            + "".join(f"  option {line}\n" for line in lines)
            + "What is not given is as it was planned: leave these options out; or plan anew, with "
            f"`{planner} --restart`"
        )
    if planned.ahead["root"] != (request.root is not None):
        raise OptionError(
            f"{printable(out)}: its plan was made {'with' if request.root is None else 'without'} "
            "--root, which it does not hold: "
            + ("give it, as this machine reaches it" if request.root is None else "leave it out")
        )
