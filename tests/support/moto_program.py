"""moto's server for Google's clients: `python -m support.moto_program -p PORT`.

Google's XML API is the one of S3, but for who asks: a bearer token instead of a signature. moto
takes each Authorization header for a signature and fails on others, and refuses reads without one;
so each request gets a signature, which moto does not check.

MOTO_CONDITIONS=none: what is written is written, whatever its conditions say. Some stores that
speak S3 are so. MOTO_CONDITIONS=generations: each write of an object gets a number, which answers
tell, and which `x-goog-if-generation-match` is compared with; 0 is that of an object that is not
there. https://cloud.google.com/storage/docs/xml-api/reference-headers
"""

import os
import sys
import threading
from typing import Any

from moto import server

Dispatcher: Any = server.DomainDispatcherApplication
SIGNED = "AWS4-HMAC-SHA256 Credential=AKIDTOKEN/20260101/us-east-1/s3/aws4_request"


class Signed(Dispatcher):
    """moto's application, to which each request is signed."""

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        if not environ.get("HTTP_AUTHORIZATION", "").startswith("AWS4"):
            environ["HTTP_AUTHORIZATION"] = SIGNED
        if CONDITIONS == "none" and environ["REQUEST_METHOD"] == "PUT":
            environ.pop("HTTP_IF_MATCH", None)
            environ.pop("HTTP_IF_NONE_MATCH", None)
        if CONDITIONS == "generations":
            return _with_generations(super().__call__, environ, start_response)
        return super().__call__(environ, start_response)


def _with_generations(answer: Any, environ: dict[str, Any], start_response: Any) -> Any:
    path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]

    def start(status: str, headers: list[Any], *more: Any) -> Any:
        if status.startswith("2"):
            if method == "PUT" and "uploadId" not in environ.get("QUERY_STRING", ""):
                _generations[path] = _generations.get(path, 0) + 1000
            if method == "DELETE":
                _generations.pop(path, None)
            if path in _generations:
                headers = [*headers, ("x-goog-generation", str(_generations[path]))]
        return start_response(status, headers, *more)

    with _one_at_a_time:
        wanted = environ.get("HTTP_X_GOOG_IF_GENERATION_MATCH")
        if wanted is not None and int(wanted) != _generations.get(path, 0):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            body = b"<Error><Code>PreconditionFailed</Code></Error>"
            start_response("412 Precondition Failed", [("Content-Length", str(len(body)))])
            return [body]
        return [*answer(environ, start)]


_generations: dict[str, int] = {}
_one_at_a_time = threading.Lock()
CONDITIONS = os.environ.get("MOTO_CONDITIONS", "")


if __name__ == "__main__":
    server.DomainDispatcherApplication = Signed
    server.main(sys.argv[1:])
