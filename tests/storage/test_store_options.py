"""Wrong options of stores are told with what to write."""

from typing import Any

import pytest
from support.store_datasets import label

from shardio.errors import OptionError
from shardio.storage import store_options, stores
from shardio.storage.credentials import MissingError
from shardio.storage.stores import Store

pytestmark = pytest.mark.usefixtures("alone")


CANARY = "CANARY0123456789abcdef"

KEYS = "Expected both: the options access_key_id and secret_access_key"

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("s3", {"regoin": "x"}, "s3:// has no option 'regoin'; .*: did you mean 'region'"),
    ("s3", {"AWS_REGOIN": "x"}, "did you mean 'region'"),
    ("s3", {"bucket": "other"}, "s3:// has no option 'bucket'; there are region, "),
    ("gs", {"endpiont": "http://x"}, "gs:// has no option 'endpiont'; .*: did you mean 'endpoint'"),
    ("az", {"accountname": "x"}, "az:// has no option .*: did you mean 'account_name'"),
    ("az", {}, "no account is given. .*account_name.*AZURE_STORAGE_ACCOUNT_NAME"),
    ("s3", {"client_options": {"time-out": "1s"}}, "client_options has no .*mean 'timeout'"),
    ("s3", {"client_options": "x"}, "expected client_options={'NAME': ...}"),
    (
        "s3",
        {"client_options": {"timeout": "soon"}},
        "the option timeout: .*such as 30s",
    ),
    ("s3", {"access_key_id": CANARY}, f"found an access key's id without its secret. {KEYS}"),
    ("s3", {"secret_access_key": CANARY}, f"found an access key's secret without its id. {KEYS}"),
    ("s3", {"skip_signature": CANARY}, "the option skip_signature: .*; expected true or false"),
    ("s3", {"token": 12345}, "the option token: cannot be read; expected a str"),
]


@pytest.mark.parametrize(("scheme", "options", "what"), WRONG)
def test_a_wrong_option_is_told_with_what_to_write(
    scheme: str, options: dict[str, Any], what: str
) -> None:
    with pytest.raises(OptionError, match=what) as told:
        label(f"{scheme}://bucket/x", **options)
    assert CANARY not in str(told.value) and "Generic" not in str(told.value)


def test_half_of_a_key_in_the_environment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA")
    with pytest.raises(OptionError, match="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        label("s3://bucket/x")


def refusal(scheme: str, options: dict[str, Any]) -> str:
    try:
        stores.open_store(Store(f"{scheme}://bucket/x", options))
    except (OptionError, MissingError) as error:  # no such profile, or file
        return str(error)
    return ""


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_the_options_that_messages_name_are_known(scheme: str) -> None:
    assert "has no option" in refusal(scheme, {"nothing": "x"})
    for name in {*store_options.NAMES[scheme].split()} - {"client_options"}:
        assert "has no option" not in refusal(scheme, {name: "http://x"}), name
    for name in store_options.NAMES["client_options"].split():
        assert "has no option" not in refusal(scheme, {"client_options": {name: "x"}}), name
