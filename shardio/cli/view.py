"""`view`: look at a dataset in a browser."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Any

from .command import ROOT, STORE, Command, option, take_storage
from .exit_codes import DONE
from .output import Output


def _view(
    output: Output,
    *,
    path: str,
    split: str | None = None,
    port: int = 0,
    html: str | None = None,
    **call: Any,
) -> int:
    from ..viewer.pages import Pages
    from ..viewer.server import LOOPBACK, Server
    from ..viewer.views import Views

    storage = take_storage(call)
    with closing(Views(path, split, storage)) as views:
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
    "",
    option("path", "OUT", "the packed directory, or its URL"),
    option("--split", "NAME", "begin with this one of several splits"),
    option("--port", "N", "listen here (default: any free port)"),
    option("--html", "FILE", "write a report into one file, and serve nothing"),
    ROOT,
    *STORE,
    forks=False,
)
