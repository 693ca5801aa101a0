"""The errors of shardio: each says where, what was expected, what was found, what to do.

    ShardioError
    |- OptionError (ValueError)    the call is wrong: an option, a path, a combination
    |- DependencyError             an optional package is missing, or too old
    |- SampleError                 a sample does not fit the fields it is written under
    |- SourceError                 files that cannot be packed, listed
    |  `- SourceChangedError       the source is no longer what the plan says
    |- BusyError                   another packer works in this directory
    |- ExistsError                 something is there that would have to be replaced
    |- NotPackedError              no dataset is here (yet)
    |- StorageError                the operating system refused
    |- VersionError                written by a newer shardio
    |- DamageError                 bytes differ from what was packed
    |- DecodeError                 the bytes are intact, but are no image that can be decoded
    |- CollateError                samples do not stack to a batch
    |- StateError (ValueError)     a saved state does not fit this dataset, or these options
    |- SkipError                   more records were skipped than on_error allows
    |- EpochError                  the epoch changed, or was read, in a way that breaks its order
    |- RowError                    where an error was raised; the cause of that error
    `- WorkerError (RuntimeError)  who makes batches died, hung, or raised what is no Exception

Every class takes ONE message string: a DataLoader worker sends an exception to its parent as type
and text, and an exception that needs a second argument comes back as a bare RuntimeError.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable


class ShardioError(Exception):
    """Stand for any error that shardio raises on purpose."""


class OptionError(ShardioError, ValueError):
    """Report a wrong call: an option, a path, a combination."""


class DependencyError(ShardioError):
    """Report an optional package that is missing, or too old."""


class SampleError(ShardioError):
    """Report a sample that does not fit its fields."""


class SourceError(ShardioError):
    """List files that cannot be packed."""


class SourceChangedError(SourceError):
    """Report a source that is no longer what the plan says."""


class BusyError(ShardioError):
    """Report another packer that works in this directory."""


class ExistsError(ShardioError):
    """Report something that would have to be replaced."""


class NotPackedError(ShardioError):
    """Report a place where no dataset is."""


class StorageError(ShardioError):
    """Report that the operating system refused to read or write."""


class VersionError(ShardioError):
    """Report what a newer shardio wrote."""


class DamageError(ShardioError):
    """Report bytes that differ from what was packed."""


class DecodeError(ShardioError):
    """Report intact bytes that are no image which can be decoded."""

    lacks_codec = False  # True: the decoder here was built without what the format needs


class CollateError(ShardioError):
    """Report samples that do not stack to a batch."""


class StateError(ShardioError, ValueError):
    """Report a saved state that does not fit."""


class SkipError(ShardioError):
    """Report that more records were skipped than on_error allows."""


class EpochError(ShardioError):
    """Report that the epoch was changed, or read, in a way that would break its order."""


class RowError(ShardioError):
    """Tell where the error that this is the cause of was raised: record, process, traceback."""


class WorkerError(ShardioError, RuntimeError):
    """Report a maker of batches that died, hung, or failed in a way that cannot be passed on."""


def as_error(error: BaseException, where: str, *, interrupts: bool) -> BaseException:
    """Say in a WorkerError what was raised that is no Exception; an Exception comes back as it is.

    SystemExit, GeneratorExit and KeyboardInterrupt of a transform would end the training in
    silence, as if it were done. where: the record; "": there is none. interrupts: this is the
    trainer's own loop, where the first and the last of these may as well come from a signal that
    its main thread handles: Ctrl-C, SIGTERM. Those pass.
    """
    if isinstance(error, Exception):
        return error
    ends = isinstance(error, (SystemExit, KeyboardInterrupt))
    if interrupts and ends and threading.current_thread() is threading.main_thread():
        return error
    who = f"{where}: decode or a transform" if where else "collate_fn"
    raised = WorkerError(
        f"{who} raised {_repr(error)}, which is no Exception: it would end this process "
        "and say nothing. Raise an Exception to say what is wrong, such as ValueError; sys.exit() "
        "belongs into the training loop"
    )
    raised.__cause__ = error
    return raised


def name_record(error: BaseException, record: str) -> None:
    """Let an error of the user's code say where it was raised: `record`, in text that is shown.

    By a note, or, before Python 3.11, by a cause; both are in what a worker of DataLoader sends of
    its traceback. The type stays what the user raised. Errors of ours that name the record already
    are left as they are.
    """
    if not record or (isinstance(error, ShardioError) and record in str(error)):
        return
    if hasattr(error, "add_note"):
        error.add_note(f"[shardio: {record}]")
        return
    row = RowError(record)
    row.__cause__, row.__context__ = error.__cause__, error.__context__
    row.__suppress_context__ = error.__suppress_context__
    error.__cause__ = row


def _repr(error: BaseException) -> str:
    try:
        return printable(repr(error))
    except Exception:  # whoever waits for this error is to get it
        return type(error).__name__


def printable(name: bytes | str, limit: int = 200) -> str:
    """Make a name from disk safe to show: control and undecodable bytes are escaped.

    A str with surrogates for such bytes (names.py) is shown as these bytes are.
    """
    if isinstance(name, str) and not name.isascii():
        with contextlib.suppress(UnicodeEncodeError):  # half of a pair, of somebody's JSON
            name = name.encode("utf-8", "surrogateescape")
    text = name.decode("utf-8", "backslashreplace") if isinstance(name, bytes) else name
    shown = text
    if not text.isprintable():
        shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def there_are(names: Iterable[str], given: str = "", most: int = 10) -> str:
    """List what there is to choose from, and ask for the one that `given` may be a slip of.

    "there are image, label: did you mean 'label'?"
    """
    import difflib  # 5 ms, on the way to an error only

    known = list(names)
    if not known:
        return "there are none"
    more = f", ... ({len(known):,} in all)" if len(known) > most else ""
    shown = ", ".join(map(printable, known[:most]))
    folded, meant = {name.casefold(): name for name in known}, given.casefold()
    close = [folded[one] for one in difflib.get_close_matches(meant, folded, 1, cutoff=0.7)]
    if not close and len(meant) > 2:  # val and validation
        begun = (one for one in folded if one.startswith(meant) or (one and meant.startswith(one)))
        close = [folded[one] for one in begun if len(one) > 2][:1]
    asked = f": did you mean {printable(close[0])!r}?" if close else ""
    return f"there {'is' if len(known) == 1 else 'are'} {shown}{more}{asked}"
