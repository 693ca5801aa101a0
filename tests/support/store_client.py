"""Puts objects into a store and looks at what is there, in a process of its own: obstore is not
safe to fork, and a test that put its objects itself could not fork its readers afterwards.

    python -m support.store_client     {"url", "options", "do", ...} as lines of JSON on stdin

do: put (`files`: path by name), list, get (`names`, into `folder`), delete (`names`). The answers
are lines of JSON on stdout: what is asked for, or {"error"}. It ends with its input.
"""

import json
import sys
from pathlib import Path
from typing import Any

import obstore
from obstore.store import from_url


def answer(asked: dict[str, Any]) -> Any:
    """Do what is asked."""
    store = from_url(asked["url"], client_options={"allow_http": True}, **asked["options"])
    if asked["do"] == "put":
        for name, path in asked["files"].items():
            # Whole, not in parts, which not each of the servers can.
            obstore.put(store, name, Path(path), use_multipart=False)
    elif asked["do"] == "list":
        return {one["path"]: one["size"] for part in obstore.list(store) for one in part}
    elif asked["do"] == "get":
        for name in asked["names"]:
            path = Path(asked["folder"], name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(obstore.get(store, name).bytes())
    elif asked["do"] == "delete":
        obstore.delete(store, asked["names"])
    return None


if __name__ == "__main__":
    for line in sys.stdin:
        try:
            said = {"answer": answer(json.loads(line))}
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), flush=True)
