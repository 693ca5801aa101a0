"""Credentials as users have them: environment variables, and the files of other programs.

What obstore reads by itself is left to it: the variables AWS_*, GOOGLE_* and AZURE_*, instance,
container and web identity. Here is what it does not read: profiles and SSO of `~/.aws`, Azure's
connection strings, the Hub's login, where Google's file may lie else, CAs for all programs. All of
it is looked up in the process that holds the client, and again when a store refuses it.

No value found here goes into a message; `secrets` lists them, so that none of obstore's does.
"""

from __future__ import annotations

import base64
import configparser
import os
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import unquote

from ..errors import DependencyError, OptionError, printable

# What is looked for, in this order, and what else reads what is public: for messages.
LOOKED_FOR = {
    "s3": (
        "the options access_key_id and profile, AWS_ACCESS_KEY_ID, AWS_PROFILE, ~/.aws/credentials "
        "and ~/.aws/config, the identity of a pod, a container, or this machine"
    ),
    "gs": (
        "the options service_account and bearer_token, GOOGLE_APPLICATION_CREDENTIALS, gcloud's "
        "application_default_credentials.json, the identity of this machine"
    ),
    "az": (
        "the options account_key, sas_key, connection_string and use_azure_cli, "
        "AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, AZURE_STORAGE_CONNECTION_STRING, "
        "AZURE_CLIENT_SECRET, AZURE_FEDERATED_TOKEN_FILE, the identity of this machine"
    ),
    "hf": "the option token, HF_TOKEN, and the file that `hf auth login` writes",
    "http": "user:password@ in the URL, and client_options={'default_headers': ...}",
}
PUBLIC = "What is public is read with options={'skip_signature': True}"

_KEPT_FOR = timedelta(minutes=10)  # then a file is read again; the client asks five minutes before
_AWS_KEYS = ("aws_access_key_id", "aws_secret_access_key")
_BY_BOTO = ("sso_session", "sso_start_url", "role_arn", "credential_process", "login_session")
_VARIABLES = re.compile(
    "(AWS|AZURE|GOOGLE|GCE|CLOUDSDK|HF|HUGGING_FACE|SSL_CERT|XDG_CACHE|REQUESTS_CA)_.*|.*_PROXY",
    re.IGNORECASE,
)
_SECRET = re.compile("KEY|SECRET|TOKEN|SAS|PASSWORD|CONNECTION")
_LEAST_SECRET = 4  # characters: what is shorter is a number or a flag

Provider = Callable[[], Mapping[str, Any]]


class MissingError(Exception):
    """Report credentials that are named, but are not there. Its one argument says it all."""


def environment() -> dict[str, str]:
    """Return the variables of this process that say how stores are reached."""
    return {name: value for name, value in os.environ.items() if _VARIABLES.fullmatch(name)}


def adopt(variables: Mapping[str, str]) -> None:
    """Take another process's `environment()` in place of this one's."""
    for name in environment():
        if name not in variables:
            del os.environ[name]
    os.environ.update(variables)


def secrets(options: Mapping[str, Any]) -> list[str]:
    """Return what messages must not have: values of options, and secrets of the environment."""
    found = list(_texts(options))
    found += [value for name, value in environment().items() if _SECRET.search(name)]
    return sorted((one for one in found if len(one) >= _LEAST_SECRET), key=len, reverse=True)


def hide(text: str, options: Mapping[str, Any]) -> str:
    """Return a message without `secrets`."""
    for one in secrets(options):
        text = text.replace(one, "[hidden]")
    return text


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, Mapping):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, bytes):
        yield value.decode("utf-8", "replace")
    elif isinstance(value, str):
        yield value
        yield value.strip()


# ------------------------------------------------------------------------------------------- Amazon


class Profile:
    """One profile of `~/.aws/config` and `~/.aws/credentials`, as they are now."""

    def __init__(self, name: str) -> None:
        self.name = name
        config, credentials = _aws_files()
        section = name if name == "default" else f"profile {name}"
        found = [_section(config, section), _section(credentials, name)]
        self.there = any(one is not None for one in found)
        self.settings = {key: value for one in found if one for key, value in one.items()}

    @property
    def has_credentials(self) -> bool:
        """Return True if it says whose credentials to use, not just a region."""
        return any(key in self.settings for key in (*_AWS_KEYS, *_BY_BOTO))

    def provider(self) -> Provider:
        """Return the function by which a client asks for its credentials.

        Raises DependencyError where they are not in the files themselves, and boto3 is not there.
        """
        if not any(key in self.settings for key in _BY_BOTO):
            return self._keys
        return boto_provider(self.name, f"the AWS profile {printable(self.name)!r}")

    def _keys(self) -> Mapping[str, Any]:
        """Return the keys that the files have now."""
        now = Profile(self.name).settings
        return {
            "access_key_id": now[_AWS_KEYS[0]],
            "secret_access_key": now[_AWS_KEYS[1]],
            "token": now.get("aws_session_token"),
            "expires_at": datetime.now(timezone.utc) + _KEPT_FOR,
        }


def boto_provider(profile: str | None, what: str) -> Provider:
    """Return boto3's function for the credentials of a profile, such as those of an SSO login."""
    try:
        import botocore.session
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise DependencyError(
            f"{what} needs the package boto3: pip install 'shardio-torch[remote-aws]'"
        ) from None
    try:
        session = botocore.session.Session(profile=profile)
        # It renews what expires within ten minutes: so none that it gives expires before it is
        # asked again.
        provider: Provider = Boto3CredentialProvider(session, ttl=_KEPT_FOR)
    except Exception as error:
        problem = f"{what}: {type(error).__name__}"
    else:
        return provider
    raise MissingError(f"{problem}: no credentials came of it. `aws sso login` may renew them")


def aws_profile(named: str | None, needed: bool) -> Profile | None:
    """Return the profile that is named, by an option or AWS_PROFILE, or "default"; None: none.

    Raises MissingError for one that is named and not there, if it is needed.
    """
    name = named or os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    found = Profile(name or "default")
    if found.there:
        return found
    if not name or not needed:
        return None
    raise MissingError(
        f"the AWS profile {printable(name)!r} is not there. Looked for it in "
        f"{' and '.join(printable(file) for file in _aws_files())}"
    )


def _aws_files() -> tuple[str, str]:
    """Return the paths of the two files, the config first."""
    return (
        os.path.expanduser(os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config"),
        os.path.expanduser(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials"),
    )


def _section(path: str, name: str) -> dict[str, str] | None:
    parser = configparser.RawConfigParser(strict=False, default_section="")
    problem = ""
    try:
        with open(path, encoding="utf-8") as file:
            parser.read_file(file)
    except (OSError, UnicodeDecodeError):
        return None
    except configparser.Error as error:
        problem = type(error).__name__  # its text has the line
    if problem:
        raise MissingError(f"{printable(path)}: is no file of AWS profiles ({problem})")
    return dict(parser[name]) if parser.has_section(name) else None


# ------------------------------------------------------------------------- Google, Azure, the Hub


def google_file(options: Mapping[str, Any]) -> str | None:
    """Return the path of Google's application default credentials; None: obstore looks itself."""
    given = options.get("application_credentials") or os.environ.get(
        "GOOGLE_APPLICATION_CREDENTIALS"
    )
    if given:
        path = os.path.expanduser(given)
        if not os.path.isfile(path):
            raise MissingError(
                "the file that GOOGLE_APPLICATION_CREDENTIALS or the option "
                "application_credentials names is not there"
            )
        return path
    folder = os.environ.get("CLOUDSDK_CONFIG") or os.path.expanduser("~/.config/gcloud")
    path = os.path.join(folder, "application_default_credentials.json")
    return path if os.path.isfile(path) else None


def google_provider() -> Provider:
    """Return google-auth's function, for files of kinds that obstore does not know."""
    try:
        from obstore.auth.google import GoogleCredentialProvider
    except ImportError:
        raise DependencyError(
            "this kind of Google credentials (not a service account's or a user's) needs the "
            "packages google-auth and requests: pip install google-auth requests"
        ) from None
    problem = ""
    try:
        provider: Provider = GoogleCredentialProvider()
    except Exception as error:
        problem = type(error).__name__
    if problem:
        raise MissingError(f"google-auth found no credentials ({problem})")
    return provider


_AZURE = {
    "accountname": "account_name",
    "accountkey": "account_key",
    "sharedaccesssignature": "sas_key",
    "blobendpoint": "endpoint",
}


def azure_connection(text: str) -> dict[str, str]:
    """Return the options that one of Azure's connection strings stands for.

    Raises OptionError, which does not show it.
    """
    parts = [part.partition("=") for part in text.strip().strip(";").split(";")]
    given = {key.strip().lower(): value.strip() for key, equals, value in parts if equals}
    if given.get("usedevelopmentstorage", "").lower() == "true":
        return {"use_emulator": "true"}
    options = {_AZURE[key]: value for key, value in given.items() if key in _AZURE}
    if "endpoint" not in options and "account_name" in options:
        suffix = given.get("endpointsuffix", "core.windows.net")
        protocol = given.get("defaultendpointsprotocol", "https")
        options["endpoint"] = f"{protocol}://{options['account_name']}.blob.{suffix}"
    if "endpoint" not in options:
        raise OptionError(
            "Azure's connection string: expected AccountName=...;AccountKey=... or "
            "BlobEndpoint=...;SharedAccessSignature=..."
        )
    if "account_name" not in options:  # https://ACCOUNT.blob.core.windows.net
        host = options["endpoint"].partition("://")[2]
        options["account_name"] = host.partition(".")[0]
    return options


def hub_token(options: Mapping[str, Any]) -> tuple[str, str]:
    """Return the token for the Hugging Face Hub, and where it is from, in words; "": there is none.

    The places are those of huggingface_hub.
    """
    if "token" in options:
        return (str(options["token"]).strip(), "the option token") if options["token"] else ("", "")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if token := os.environ.get(name, "").strip():
            return token, name
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    path = os.path.expanduser(os.environ.get("HF_TOKEN_PATH") or os.path.join(home, "token"))
    try:
        with open(path, encoding="utf-8") as file:
            token = file.read().strip()
    except (OSError, UnicodeDecodeError):
        return "", ""
    return token, f"the login in {printable(path)}" if token else ""


# --------------------------------------------------------------------------------------------- HTTP


def basic(userinfo: str) -> str:
    """Return the Authorization header for the user:password of a URL, which are quoted there."""
    user, _, password = userinfo.partition(":")
    both = f"{unquote(user)}:{unquote(password)}".encode()
    return f"Basic {base64.b64encode(both).decode()}"


def authorities(given: Any, scheme: str, profile: Profile | None = None) -> Any:
    """Return the CAs to trust besides the system's, as PEM; None: no others.

    given: the option root_certificate, a PEM or the path of one. Else the variables for all
    programs are read: AWS_CA_BUNDLE for s3, REQUESTS_CA_BUNDLE. SSL_CERT_FILE is in the system's.
    """
    if given is None:
        named = {"AWS_CA_BUNDLE": scheme == "s3", "REQUESTS_CA_BUNDLE": True}
        paths = {name: os.environ.get(name) for name, read in named.items() if read}
        if profile is not None:
            paths["ca_bundle of the AWS profile"] = profile.settings.get("ca_bundle")
        what, path = next(((name, path) for name, path in paths.items() if path), ("", None))
        if path is None or os.path.isdir(path):
            return None
    elif isinstance(given, bytes) or "-----BEGIN" in given:
        return given
    else:
        what, path = "the client option root_certificate", given
    try:
        with open(os.path.expanduser(path), "rb") as file:
            pem = file.read()
    except OSError as error:
        problem = error.strerror
    else:
        return pem
    raise OptionError(f"{what}: cannot read {printable(path)}: {problem}")
