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
    `- WorkerError (RuntimeError)  a process of ShardLoader died, or failed

Every class takes ONE message string: a DataLoader worker sends an exception to its parent as type
and text, and an exception that needs a second argument comes back as a bare RuntimeError.
"""

from __future__ import annotations

from collections.abc import Iterable


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
    """A process of ShardLoader died, or failed in a way that cannot be passed on."""


def printable(name: bytes | str, limit: int = 200) -> str:
    """A name from disk, safe to show on a terminal: control and undecodable bytes are escaped."""
    text = name.decode("utf-8", "backslashreplace") if isinstance(name, bytes) else name
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
