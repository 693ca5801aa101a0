"""moto's server for Google's clients: `python -m support.moto_program -p PORT`.

Google's XML API is the one of S3, but for who asks: a bearer token instead of a signature. moto
takes each Authorization header for a signature and fails on others, and refuses reads without one;
so each request gets a signature, which moto does not check.
"""

import sys
from typing import Any

from moto import server

Dispatcher: Any = server.DomainDispatcherApplication
SIGNED = "AWS4-HMAC-SHA256 Credential=AKIDTOKEN/20260101/us-east-1/s3/aws4_request"


class Signed(Dispatcher):
    """moto's application, to which each request is signed."""

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        if not environ.get("HTTP_AUTHORIZATION", "").startswith("AWS4"):
            environ["HTTP_AUTHORIZATION"] = SIGNED
        return super().__call__(environ, start_response)


if __name__ == "__main__":
    server.DomainDispatcherApplication = Signed
    server.main(sys.argv[1:])
