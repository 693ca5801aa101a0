"""One dataset in a store of each kind, as a user names it: for the tests of `storage`.

The servers are fixtures of tests/storage/conftest.py.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest
from torch.utils.data import DataLoader

import shardio
from shardio import ShardDataset, Storage
from support import object_stores

RECORDS = 60
NAME = "da ta%20"  # the dataset's folder
HUB_TOKEN = "hf_CANARY"
USER, PASSWORD = "me@x", "CANARY%/@ ü"  # of the web server, which asks for them
NOWHERE = "http://127.0.0.1:1"  # where nobody listens
EACH = ["s3", "gs", "az", "abfss", "hf", "https"]


def image(number: int) -> bytes:
    draw = np.random.default_rng(number)
    return b"\xff\xd8\xff" + draw.bytes(int(draw.integers(100, 10_000)))


class There(NamedTuple):
    """A dataset in a store: what a user writes."""

    url: str
    options: dict[str, Any]
    environment: dict[str, str]


def there(scheme: str, request: pytest.FixtureRequest) -> There:
    """Return a dataset by a scheme, with its credentials in the environment."""
    if scheme == "s3":
        given = request.getfixturevalue("s3").options
        names = {
            "AWS_ENDPOINT_URL": given["endpoint"],
            "AWS_REGION": given["region"],
            "AWS_ACCESS_KEY_ID": given["access_key_id"],
            "AWS_SECRET_ACCESS_KEY": given["secret_access_key"],
        }
        return There(f"s3://{object_stores.BUCKET}/{NAME}", {}, names)
    if scheme == "gs":
        store = request.getfixturevalue("gcs")
        names = {"GOOGLE_SERVICE_ACCOUNT_KEY": store.options["service_account_key"]}
        names["GOOGLE_BASE_URL"] = f"http://127.0.0.1:{store.port}"
        return There(f"{store.url}/{NAME}", {}, names)
    if scheme in ("az", "abfss"):
        given = request.getfixturevalue("azure").options
        text = f"AccountName={given['account_name']};AccountKey={given['account_key']};"
        names = {"AZURE_STORAGE_CONNECTION_STRING": f"{text}BlobEndpoint={given['endpoint']}"}
        if scheme == "az":
            return There(f"az://{object_stores.BUCKET}/{NAME}", {}, names)
        host = f"{given['account_name']}.dfs.core.windows.net"
        return There(f"abfss://{object_stores.BUCKET}@{host}/{NAME}", {}, names)
    if scheme == "hf":
        names = {"HF_ENDPOINT": request.getfixturevalue("hub").url, "HF_TOKEN": HUB_TOKEN}
        return There(f"hf://datasets/ORG/NAME@v1/{NAME}", {}, names)
    web = request.getfixturevalue("tls_web")
    url = web.url.replace("://", "://me%40x:CANARY%25%2F%40%20%C3%BC@")
    options = {"client_options": {"root_certificate": str(web.ca)}}
    return There(f"{url}/da%20ta%2520", options, {})


def take(place: There, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """Set a dataset's environment; return its options."""
    for name, value in place.environment.items():
        monkeypatch.setenv(name, value)
    return Storage(options=place.options, timeout_s=20.0)


def epoch(path: Any, storage: Storage | None = None, workers: int = 0) -> list[Any]:
    """Read an epoch of a dataset, by a DataLoader."""
    dataset = ShardDataset(
        str(path), batch_size=8, decode=None, fields=("image", "label"), storage=storage
    )
    loader = DataLoader(dataset, batch_size=None, num_workers=workers)
    return [([bytes(one) for one in images], labels.tolist()) for images, labels in loader]


def label(url: str, **options: Any) -> Any:
    """Read the label of record 3, which is 3."""
    storage = Storage(options=options, timeout_s=30.0)
    return shardio.open(url, decode=None, storage=storage)[3]["label"]
