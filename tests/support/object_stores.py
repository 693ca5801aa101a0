"""Stores of objects for the tests, each a real server on loopback with one bucket.

    with object_stores.s3() as store:
        store.put({"data/manifest.json": path})
        shardio.open(f"{store.url}/data", ...store.options...)

s3 is moto's server (from `tools/setup`), azurite Microsoft's own (from `tools/setup-servers`). gcs
is moto's, too: obstore talks to Google by the XML API, which is that of S3 but for who asks and
for conditions on generations, which moto has only if it is asked to. Rejected: gcp-storage-emulator
2026.7.19, which answers without ETag and Last-Modified, and obstore refuses that. None is fast:
moto reads 33 MB/s; speed is measured before nginx.
"""

import base64
import contextlib
import hashlib
import hmac
import http.client
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from support import LIMIT_S
from support.servers import find_program, free_port, running
from support.trees import environment

TESTS = Path(__file__).resolve().parent.parent
AZURITE = TESTS / "servers" / ".venv" / "azurite" / "node_modules" / ".bin" / "azurite-blob"
BUCKET = "shardiotests"
# Azurite's one account, as its documentation gives it: no secret.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
S3_KEYS = ("AKIDSHARDIOTESTS", "secret of shardio's tests")  # of the store that asks for none


class ObjectStore:
    """A running store and its one bucket. Its methods run obstore in a process of its own.

    url:      of the bucket, as users write it: s3://..., az://..., gs://...
    options:  what obstore's `from_url` needs besides `client_options={"allow_http": True}`
    """

    def __init__(
        self, url: str, port: int, options: Mapping[str, Any], client: "Client | None" = None
    ) -> None:
        self.url, self.port, self.options = url, port, dict(options)
        self._client = client or Client()

    def through(self, port: int) -> "ObjectStore":
        """Return the same store as clients see it through another port, such as a proxy's."""
        text = json.dumps(self.options).replace(f"127.0.0.1:{self.port}", f"127.0.0.1:{port}")
        text = text.replace(f"localhost:{self.port}", f"localhost:{port}")
        return ObjectStore(self.url, port, json.loads(text), self._client)

    def put(self, files: Mapping[str, Path]) -> None:
        """Put files, under these names."""
        self._ask("put", files={name: str(path) for name, path in files.items()})

    def put_folder(self, folder: Path, prefix: str = "") -> None:
        """Put all files below a folder, under their paths in it."""
        found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        self.put({prefix + path.relative_to(folder).as_posix(): path for path in found})

    def mark(self, folder: str) -> None:
        """Put the marker of a folder, as consoles do: an object called `folder/`. Not in az."""
        path = urllib.parse.quote(f"/{BUCKET}/{folder}/")
        _ask(self.port, "PUT", path, "", **_s3_scope("s3"))

    def sizes(self) -> dict[str, int]:
        """Return the names and sizes of all objects."""
        return self._ask("list")

    def get(self, names: Sequence[str], folder: Path) -> None:
        """Copy objects into a folder, under their names."""
        self._ask("get", names=list(names), folder=str(folder))

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects."""
        self._ask("delete", names=list(names))

    def _ask(self, do: str, **more: Any) -> Any:
        return self._client.ask({"do": do, "url": self.url, "options": self.options, **more})

    def close(self) -> None:
        """End the process that was asked, if any."""
        self._client.close()


class Client:
    """A process with obstore, for all that is asked: to import it takes 0.05 s of CPU."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(self, asked: dict[str, Any]) -> Any:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.store_client"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment(PYTHONPATH=str(TESTS)),
                text=True,
                start_new_session=True,  # a Ctrl-C that a test sends is not for it
            )
        assert self._process.stdin and self._process.stdout
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        said = json.loads(self._process.stdout.readline() or '{"error": "the client has ended"}')
        if "error" in said:
            raise RuntimeError(f"{asked['do']} in {asked['url']}: {said['error']}")
        return said["answer"]

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()
            self._process = None


def _need(*modules: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"NOT TESTED HERE: {', '.join(missing)} not there: tools/setup installs them")


def _ask(port: int, method: str, path: str, body: str = "", **headers: str) -> str:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    with contextlib.closing(client):
        client.request(method, path, body, {k.replace("_", "-"): v for k, v in headers.items()})
        answer = client.getresponse()
        text = answer.read().decode("utf-8", "replace")
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {answer.reason}: {text}")
        return text


@contextlib.contextmanager
def _moto(program: str, **variables: str) -> Iterator[int]:
    """Run moto's server with the bucket; its port. variables: of its environment."""
    _need("moto", "flask", "flask_cors", "obstore")
    with tempfile.TemporaryDirectory(prefix="shardio-moto-") as scratch:
        port = free_port(hold=True)
        command = [sys.executable, "-m", program, "-H", "127.0.0.1", "-p", str(port)]
        variables["PYTHONPATH"] = str(TESTS)
        with running(command, port, Path(scratch), environment(**variables)):
            _ask(port, "PUT", f"/{BUCKET}", "", **_s3_scope("s3"))
            yield port


@contextlib.contextmanager
def s3(*, private: bool = False, conditions: bool = True) -> Iterator[ObjectStore]:
    """Run moto's server. private: it checks signatures, and lets only one user of its own in.

    conditions: it heeds If-Match and If-None-Match of what is written
    """
    program, variables = "moto.server", {}
    if not conditions:
        program, variables = "support.moto_program", {"MOTO_CONDITIONS": "none"}
    with _moto(program, **variables) as port:
        keys = _private_user(port) if private else S3_KEYS
        options = {
            "endpoint": f"http://127.0.0.1:{port}",
            "region": "us-east-1",
            "access_key_id": keys[0],
            "secret_access_key": keys[1],
        }
        with contextlib.closing(ObjectStore(f"s3://{BUCKET}", port, options)) as store:
            yield store


def _s3_scope(service: str) -> dict[str, str]:
    """Make the header by which moto knows which service is meant; it does not check it yet."""
    scope = f"{S3_KEYS[0]}/20260101/us-east-1/{service}/aws4_request"
    return {"Authorization": f"AWS4-HMAC-SHA256 Credential={scope}"}


def _private_user(port: int) -> tuple[str, str]:
    """Make a user who may do everything, and have all others refused from now on."""
    policy = {
        "Version": "2012-10-17",
        "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}],
    }

    def iam(action: str, **given: str) -> str:
        form = urllib.parse.urlencode({"Action": action, "UserName": "tests", **given})
        kind = {"Content_Type": "application/x-www-form-urlencoded"}
        return _ask(port, "POST", "/", form, **_s3_scope("iam"), **kind)

    iam("CreateUser")
    iam("PutUserPolicy", PolicyName="all", PolicyDocument=json.dumps(policy))
    made = iam("CreateAccessKey")
    found = re.findall(r"<(?:AccessKeyId|SecretAccessKey)>([^<]+)<", made)
    _ask(port, "POST", "/moto-api/reset-auth", "0")
    return found[0], found[1]


@contextlib.contextmanager
def gcs(*, conditions: bool = False) -> Iterator[ObjectStore]:
    """Run moto's server as what obstore takes for Google's. It asks nobody who he is.

    conditions: it knows generations, as Google's does
    """
    variables = {"MOTO_CONDITIONS": "generations"} if conditions else {}
    with _moto("support.moto_program", **variables) as port:
        account = {
            "gcs_base_url": f"http://127.0.0.1:{port}",
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        options = {"service_account_key": json.dumps(account)}
        with contextlib.closing(ObjectStore(f"gs://{BUCKET}", port, options)) as store:
            yield store


@contextlib.contextmanager
def azurite() -> Iterator[ObjectStore]:
    """Run Azurite, which checks signatures by the key of its one account."""
    _need("obstore")
    node = find_program("node")
    if node is None or not AZURITE.exists():
        pytest.skip("NOT TESTED HERE: azurite not there: tools/setup-servers installs it")
    with tempfile.TemporaryDirectory(prefix="shardio-azurite-") as scratch:
        port = free_port(hold=True)
        command = [node, AZURITE, "--blobHost", "127.0.0.1", "--blobPort", str(port)]
        command += ["--inMemoryPersistence", "--silent"]
        # Versions of the API that are newer than it are let in: they are obstore's choice.
        command += ["--disableTelemetry", "--skipApiVersionCheck"]
        with running(command, port, Path(scratch)):
            path = f"/{ACCOUNT}/{BUCKET}"
            fields = {"x_ms_date": formatdate(usegmt=True), "x_ms_version": "2021-08-06"}
            lines = [f"{name.replace('_', '-')}:{value}\n" for name, value in fields.items()]
            signed = "PUT" + "\n" * 12 + "".join(lines) + f"/{ACCOUNT}{path}\nrestype:container"
            digest = hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)
            fields["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
            _ask(port, "PUT", f"{path}?restype=container", **fields)
            options = {
                "endpoint": f"http://127.0.0.1:{port}/{ACCOUNT}",
                "account_name": ACCOUNT,
                "account_key": KEY,
            }
            with contextlib.closing(ObjectStore(f"az://{BUCKET}", port, options)) as store:
                yield store
