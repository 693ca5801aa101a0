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
    |- EpochError                  the epoch changed, or was read, in a way that breaks its order
    |- RowError                    where an error was raised; the cause of that error
    `- WorkerError (RuntimeError)  who makes batches died, hung, or raised what is no Exception

Every class takes ONE message string: a DataLoader worker sends an exception to its parent as type
and text, and an exception that needs a second argument comes back as a bare RuntimeError.
"""

import threading


class ShardioError(Exception):
    """Root of all errors that shardio raises on purpose."""


class OptionError(ShardioError, ValueError):
    """The call is wrong."""


class DependencyError(ShardioError):
    """An optional package is missing, or too old."""


class SampleError(ShardioError):
    """A sample does not fit its fields."""


class SourceError(ShardioError):
    """Files cannot be packed; the message lists them."""


class SourceChangedError(SourceError):
    """The source is no longer what the plan says."""


class BusyError(ShardioError):
    """Another packer works in this directory."""


class ExistsError(ShardioError):
    """Something is there that would have to be replaced."""


class NotPackedError(ShardioError):
    """No dataset is here."""


class StorageError(ShardioError):
    """The operating system refused to read or write."""


class VersionError(ShardioError):
    """Written by a newer shardio."""


class DamageError(ShardioError):
    """Bytes differ from what was packed."""


class DecodeError(ShardioError):
    """Intact bytes that are no image which can be decoded."""


class CollateError(ShardioError):
    """Samples do not stack to a batch."""


class StateError(ShardioError, ValueError):
    """A saved state does not fit."""


class EpochError(ShardioError):
    """The epoch was changed or read in a way that would break its order."""


class RowError(ShardioError):
    """Where the error that this is the cause of was raised: record, process, traceback."""


class WorkerError(ShardioError, RuntimeError):
    """Who makes batches died, hung, or failed in a way that cannot be passed on."""


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
    made = WorkerError(
        f"{who} raised {_repr(error)}, which is no Exception: it would end this process "
        "and say nothing. Raise an Exception to say what is wrong, such as ValueError; sys.exit() "
        "belongs into the training loop"
    )
    made.__cause__ = error
    return made


def _repr(error: BaseException) -> str:
    try:
        return printable(repr(error))
    except Exception:  # whoever waits for this error is to get it
        return type(error).__name__


def printable(name: bytes | str, limit: int = 200) -> str:
    """A name from disk, safe to show on a terminal: control and undecodable bytes are escaped."""
    text = name.decode("utf-8", "backslashreplace") if isinstance(name, bytes) else name
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."
