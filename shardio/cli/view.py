"""`view`: look at a dataset in a browser."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING

from ..errors import OptionError
from .command import OUT, READ_FROM, Command, option
from .exit_codes import DONE
from .output import Output

if TYPE_CHECKING:
    from ..storage.options import Storage


def _view(
    output: Output,
    *,
    path: str,
    split: str | None = None,
    port: int = 0,
    html: str | None = None,
    overwrite: bool = False,
    storage: Storage,
) -> int:
    from ..viewer import report
    from ..viewer.pages import Pages
    from ..viewer.server import LOOPBACK, Server
    from ..viewer.views import Views

    if html is not None:
        report.check(html, overwrite)
    with closing(Views(path, split=split, storage=storage)) as views:
        if html is not None:
            found = report.save(views.of(), html, overwrite=overwrite)
            return output.show(found, vars(found))
        if sys.__stdout__ is None:
            raise OptionError(
                "view: stdout is closed, so nobody would see the address, which has the token. "
                "Lead stdout to a terminal, a file or a pipe; --html FILE needs none"
            )
        server = Server(Pages(views), port)
        try:
            output.show(
                f"{server.url}\n"
                f"From another machine, first: ssh -L {server.port}:{LOOPBACK}:{server.port} HOST\n"
                "Ctrl-C ends it.",
                {"url": server.url, "port": server.port},
                server.url,
            )
            sys.stdout.flush()
            server.serve_forever()
        except KeyboardInterrupt:  # the way to end it
            return DONE
        finally:
            server.server_close()
    return DONE


VIEW = Command(
    "view",
    "look at a dataset in a browser",
    _view,
    "storage.options:Storage",
    OUT,
    option("--split", "NAME", "show this one of several splits first (default: train)"),
    option("--port", "N", "listen here (default: any free port)"),
    option("--html", "FILE", "write a report, one file for a browser, and serve nothing"),
    option("--overwrite", text="replace FILE if it exists"),
    *READ_FROM,
    examples=(
        "shardio view packed",
        "shardio view s3://bucket/packed --port 8000",
        "shardio view packed --html report.html",
    ),
)
