"""The command line: `main` runs one command, and gives its exit code whatever happens.

This module itself imports next to nothing: until `main` runs, Ctrl-C ends in a traceback. Each
command imports what it needs when it runs, and none imports torch.
Results go to stdout (one JSON object with --json), progress and messages to stderr.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import BusyError, DamageError, OptionError, ShardioError, printable
from .exit_codes import BUSY, DAMAGED, DONE, FAILED, INTERRUPTED, USAGE

if TYPE_CHECKING:
    from .command import Command

    Parse = Callable[[Sequence[str]], tuple[Command, dict[str, Any]] | None]


def main(arguments: Sequence[str] | None = None, parse: Parse | None = None) -> int:
    """Run one command; return its exit code.

    parse: reads the command line of another program that is built as this one is.
    """
    try:
        code = _main(arguments, parse)
    except KeyboardInterrupt as error:
        if arguments is None:  # a second one would end what is under way by a traceback
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        code = _fail("interrupted" + "".join(map(str, error.args)), INTERRUPTED)
    if arguments is None and "shardio.storage.ranges" in sys.modules:
        from ..storage import ranges

        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ranges.leave(code)  # while Python ends, nobody knows the code any more
    return code


def _main(arguments: Sequence[str] | None, parse: Parse | None) -> int:
    """Run one command, and turn its errors into a message and an exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller: >&-
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):  # what the terminal cannot show is escaped
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    from . import parser
    from .command import group_stores, make_executor
    from .output import Output

    parsed = (parse or parser.parse)(sys.argv[1:] if arguments is None else arguments)
    if parsed is None:
        return USAGE
    command, options = parsed
    output = Output(json=options.pop("json"), quiet=options.pop("quiet"))
    if any("://" in value for value in options.values() if isinstance(value, str)):
        from ..storage import ranges

        if arguments is None and not command.forks:
            ranges.hold_client()  # this process, which nobody forks, and not a helper
        ranges.tell_waits(output.teller() if output.is_watched else None)
    try:
        _refuse_unused(options)
        make_executor(options, output.teller() if output.is_watched else output.announce)
        group_stores(command, options)
        code = command.run(output, **options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        advice = command.resume_hint(options)
        raise KeyboardInterrupt(f": {advice}" if advice else "") from None
    except BrokenPipeError:  # `shardio ls | head`: nobody reads on
        _drop_output()
        return DONE
    except ShardioError as error:
        codes = ((BusyError, BUSY), (DamageError, DAMAGED), (OptionError, USAGE))
        told = command.with_typed_options(str(error))
        return _fail(told, next((c for kind, c in codes if isinstance(error, kind)), FAILED))
    except MemoryError:
        return _fail("out of memory", FAILED)
    except OSError as error:
        _drop_output()  # a full disk behind stdout would be an error once more, at the end
        return _fail(_describe(error), FAILED)


def _refuse_unused(options: Mapping[str, Any]) -> None:
    """Raise OptionError for options of an object store where no argument is a URL."""
    from .command import STORE, TARGET

    names = {more["dest"]: name for name, more in (*STORE, TARGET)}
    given = [name for dest, name in names.items() if dest in options]
    if given:
        from ..storage.stores import SCHEMES

        values = [str(one).lower() for dest, one in options.items() if dest not in names]
        if not any(f"{scheme}://" in one for scheme in SCHEMES for one in values):  # also in lists
            raise OptionError(
                f"{given[0]}: goes with an argument that is a URL, such as s3://bucket/folder, and "
                "none is; leave it out"
            )


def _fail(message: str, code: int) -> int:
    """Print an error, and return its exit code."""
    from .output import paint

    with contextlib.suppress(OSError):
        print(f"{paint('shardio:', 'bad', sys.stderr)} {message}", file=sys.stderr)
    return code


def _describe(error: OSError) -> str:
    """Write an error of the system, with the name of its file."""
    where = "" if error.filename is None else f"{printable(os.fsencode(error.filename), 4096)}: "
    return f"{where}{error.strerror or error}"


def _drop_output() -> None:
    """Lead stdout to nowhere, so that what it still holds cannot fail."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
