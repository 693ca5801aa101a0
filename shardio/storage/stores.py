"""Object stores by scheme: how a URL, options and credentials become one of obstore's stores.

A `Store` names a folder of an object store. It is plain data, and can be pickled: it has the user's
options, and no credentials but those that are in them. `open_store` looks the others up
(`credentials`), and builds obstore's object, in the process that holds the client.

After `s3://`, `gs://`, `az://` and `hf://` names are as they are: `%20` is three characters. After
`http://` they are quoted, as in any browser.

Source: https://developmentseed.org/obstore, https://docs.rs/object_store
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from ipaddress import IPv6Address
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urlsplit, urlunsplit

from ..errors import DependencyError, OptionError, printable
from . import credentials, plain_http, store_options
from .credentials import MissingError

SCHEMES = ("s3", "gs", "az", "abfs", "abfss", "hf", "http", "https")
READ_ONLY = ("hf", "http", "https")

TIMEOUT_S = 120.0  # of a request and all that are sent again for it
# Of one attempt, and at most a part of the time of all: seconds until a connection stands (a
# quarter at most), without a byte of an answer (a quarter), and until the last byte (a half), which
# is 8 MiB at 140 KB/s.
CONNECT_S, STALL_S, BODY_S = 5.0, 10.0, 60.0
_HUB = "https://huggingface.co"

# A revision may be refs/pr/1, or quoted. ORG and NAME as the Hub has them.
_HUB_URL = re.compile(
    r"hf://datasets/([\w.-]+/[\w.-]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.*))?", re.DOTALL
)
# Of a URL behind ://, a password with / ? or # in it, as AWS's keys have: no port ends there.
_ODD_PASSWORD = re.compile(r"\A(?!\[)[^/?#@]*:(?!\d*(?:[/?#]|$))[^/?#@]*[/?#].*@", re.DOTALL)
_SIGNED = re.compile(r"\?(?:.*&)?(?:sig|signature|x-amz-signature)=.*", re.DOTALL | re.IGNORECASE)
# Options and variables that are sent in headers, and what these can have.
_SENT = re.compile("(?:^|_)(?:region|access_key_id|secret_access_key|token)$", re.IGNORECASE)
_SENDABLE = re.compile(r"[ -~]*")
_ABFS = re.compile(r"([^@/]+)@([^@/.]+)\.dfs\.([^@/]+)")


@dataclass(frozen=True, repr=False)
class Store:
    """Name a folder of an object store, and how it is reached. It can be pickled.

    url        of the folder that all paths are relative to; never shown with its query
    options    of the store, by obstore's names: endpoint, region, skip_signature ...
    timeout_s  seconds from a request's first attempt to the error, while attempts fail

    Raises OptionError for a URL that is none, and options that are not plain data.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        """Check that the URL names what its scheme needs. Raises OptionError."""
        if not self.address[0]:
            shown = self.shown if "://" in self.shown else f"{self.scheme}://"
            raise OptionError(f"{shown}: expected {_EXPECTED[self.kind]}")
        if not isinstance(self.options.get("client_options") or {}, Mapping):
            raise OptionError("client_options: expected client_options={'NAME': ...}")
        for name, value in self.options.items():
            if not isinstance(value, (str, bytes, bool, int, float, Mapping, type(None))):
                raise OptionError(
                    f"options: {printable(name)} is a {type(value).__name__}; expected plain data"
                )

    def __repr__(self) -> str:
        """Show neither values of options nor what is secret in the URL."""
        return f"Store({self.shown!r}, options: {printable(', '.join(self.options)) or 'none'})"

    @property
    def scheme(self) -> str:
        """Return the scheme of its URL."""
        return self.url.partition("://")[0].lower()

    @property
    def kind(self) -> str:
        """Return the main name of its scheme: abfs and abfss are az, https is http."""
        return {"abfs": "az", "abfss": "az", "https": "http"}.get(self.scheme, self.scheme)

    @property
    def address(self) -> tuple[str, str]:
        """Return what one client is for, and the folder in it.

        A client is for a bucket, a repository, or a folder on the web. "": the URL names none.
        """
        if self.kind == "http":
            try:
                return (self.url if _split(self.url).hostname else ""), ""
            except ValueError:  # of [, and what is behind it
                return "", ""
        if self.scheme == "hf":
            found = _HUB_URL.fullmatch(self.url)
            if found is None:
                return "", ""
            return f"{found[1]}@{found[2] or 'main'}", (found[3] or "").strip("/")
        rest = self.url.partition("://")[2]
        bucket, _, folder = rest.partition("/")
        is_abfs = self.scheme in ("abfs", "abfss")
        is_right = _ABFS.fullmatch(bucket) if is_abfs else "@" not in bucket
        if not is_right or _ODD_PASSWORD.match(rest):
            return "", ""
        return bucket, folder.strip("/")

    @property
    def client_key(self) -> str:
        """Return what one client is for, with secrets: to compare, and never shown."""
        return repr((self.scheme, self.address[0], sorted(self.options.items()), self.timeout_s))

    @property
    def shown(self) -> str:
        """Return the URL as messages print it: without a query or a password."""
        if self.kind != "http":
            scheme, _, rest = self.url.partition("://")
            bucket, slash, folder = _shown_part(rest).partition("/")
            if self.scheme not in ("abfs", "abfss"):
                bucket = bucket.rpartition("@")[2] if ":" in bucket else bucket
            return printable(f"{scheme}://{bucket}{slash}{folder}".rstrip("/"), 4096)
        return printable(without_secrets(self.url).rstrip("/"), 4096)

    def show(self, path: str) -> str:
        """Return the URL of an object, as messages print it."""
        if self.kind == "http":
            path = _quote(path, safe="/~!$&'()*+,;=:@-._")
        return f"{self.shown}/{printable(path, 4096)}"

    def with_retries(self) -> Store:
        """Return the store for uploads: each part is sent again by itself when it fails.

        Else all parts before it would be lost. Readers count and space retries themselves. No
        answer comes before the last byte of a part is sent, and up to 16 parts share the link: so
        the time for an answer is that of the whole part.
        """
        limit = f"{self.timeout_s * 1000:.0f}ms"
        again = timedelta(seconds=max(180.0, 2 * self.timeout_s))
        given = {"timeout": limit, "read_timeout": limit} | (
            self.options.get("client_options") or {}
        )
        retries = {"max_retries": 6, "retry_timeout": again}
        return replace(
            self, options={"retry_config": retries, **self.options, "client_options": given}
        )

    def below(self, name: str) -> Store:
        """Return the folder of this name in it."""
        root, query, secret = self.url, "", ""
        if self.kind == "http":
            root, query, secret = self.url.partition("?")
            name = _quote(name)
        return replace(self, url=f"{root.rstrip('/')}/{name}{query}{secret}")

    def above(self) -> tuple[Store, str]:
        """Return the folder that it lies in, and its name there; "": it is the top of a store."""
        if self.kind == "http":
            parts = urlsplit(self.url)
            root, _, name = parts.path.rstrip("/").rpartition("/")
            plain = unquote(name, errors="surrogateescape")
            return replace(self, url=urlunsplit(parts._replace(path=root))), plain
        if not self.address[1]:
            return self, ""
        root, _, name = self.url.rstrip("/").rpartition("/")
        return replace(self, url=root), name


def _split(url: str) -> SplitResult:
    """Return the parts of a URL. Raises ValueError where brackets hold no address.

    Python before 3.11.4 takes any text in them.
    """
    parts = urlsplit(url)
    if "[" in parts.netloc:
        IPv6Address(parts.hostname or "")
    return parts


def _quote(path: str, safe: str = "/") -> str:
    """Return a path as a URL has it; one with surrogates as the bytes that they stand for."""
    return quote(path, safe=safe, errors="surrogateescape")


_EXPECTED = {
    "s3": "s3://BUCKET/PATH",
    "gs": "gs://BUCKET/PATH",
    "az": (
        "az://CONTAINER/PATH, with the account in options={'account_name': ...} or "
        "AZURE_STORAGE_ACCOUNT_NAME, or abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH"
    ),
    "hf": "hf://datasets/ORG/NAME/PATH or hf://datasets/ORG/NAME@REVISION/PATH",
    "http": "https://HOST/PATH",
}


@dataclass(frozen=True, repr=False)
class Opened:
    """One of obstore's stores, and whose credentials it uses."""

    target: Any
    identity: str  # whose credentials, in words; "": the machine's own, if it has any
    base: str = ""  # of http and hf: the URL that paths are relative to; of s3: its endpoint
    common: Mapping[str, Any] = field(default_factory=dict)  # and how it is reached

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers that the user gave for all requests, and those of credentials."""
        given = self.common["client_options"].get("default_headers", {})
        return {str(name): str(value) for name, value in given.items()}


def load() -> Any:
    """Return the package obstore. Raises DependencyError."""
    try:
        import obstore
        import obstore.store
    except ImportError:
        raise DependencyError(
            "reading from URLs needs the package obstore: pip install 'shardio-torch[remote]'"
        ) from None
    return obstore


def without_secrets(path: str) -> str:
    """Return a path, or a URL without what may be secret in it: user, password, query."""
    scheme, is_url, rest = path.partition("://")
    if not is_url:
        return path
    rest = _shown_part(rest)
    if scheme.lower() in ("http", "https"):
        scheme, rest = scheme.lower(), rest.partition("#")[0].partition("?")[0]
    host, slash, folder = rest.partition("/")
    if scheme.lower() not in ("abfs", "abfss"):  # container@account
        host = host.rpartition("@")[2]
    return f"{scheme}://{host}{slash}{folder}"


def _shown_part(rest: str) -> str:
    """Return what is behind :// without a password that ends the host, and a signature."""
    return _SIGNED.sub("", _ODD_PASSWORD.sub("", rest))


def open_store(store: Store, region: str | None = None) -> Opened:
    """Return obstore's object for the bucket, or folder, of a store, with the credentials of now.

    region: of an S3 bucket, where it was found to be another than was given.

    Raises OptionError, DependencyError, MissingError.
    """
    obstore = load()
    problem = ""
    bucket = store.address[0]
    if store.scheme not in READ_ONLY and not re.fullmatch(r"[^\s\x00-\x20?#%]+", bucket):
        raise OptionError(
            f"{store.shown}: there can be no bucket {printable(repr(bucket), 300)}. Expected "
            f"{store.scheme}://BUCKET/FOLDER"
        )
    _refuse_unsendable(store)
    try:
        return _OPEN[store.kind](obstore.store, store, region)
    except (ValueError, TypeError, obstore.exceptions.BaseError) as error:
        if isinstance(error, OptionError):
            raise
        problem = str(error).partition("\n")[0]
    # Not in the block above: its error has what was given.
    said = f"the options are refused: {printable(credentials.hide(problem, store.options), 300)}"
    said = store_options.explain(problem, store.kind, store.options) or said
    raise OptionError(f"{store.shown}: {said}")


def _refuse_unsendable(store: Store) -> None:
    """Raise OptionError for a key or a region that no header can have: the client would panic."""
    prefix = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}.get(store.kind, " ")
    given = {name: one for name, one in os.environ.items() if name.startswith(prefix)}
    for name, value in {**given, **store.options}.items():
        if isinstance(value, str) and _SENT.search(name) and not _SENDABLE.fullmatch(value):
            raise OptionError(
                f"{store.shown}: {printable(name)} has a line break, or another character that "
                "cannot be sent, in it. Is it at its end, from a file?"
            )


def _common(store: Store, options: dict[str, Any], profile: Any = None) -> dict[str, Any]:
    """Return what all stores take; takes client_options out of the options."""
    given = dict(options.pop("client_options", {}) or {})
    pem = given.pop("root_certificate", None)
    pem = credentials.authorities(pem, store.kind, profile)
    client_options: dict[str, Any] = {
        "connect_timeout": _duration(store, CONNECT_S, 4),
        "read_timeout": _duration(store, STALL_S, 4),
        "timeout": _duration(store, BODY_S, 2),
        "user_agent": plain_http.AGENT,
        **({} if pem is None else {"root_certificate": pem}),
        **given,
    }
    retries = options.pop("retry_config", None) or {"max_retries": 0}
    return {"client_options": client_options, "retry_config": retries}


def _duration(store: Store, most_s: float, part: int) -> str:
    """Return a time of one attempt, as obstore takes it."""
    return f"{min(most_s, store.timeout_s / part) * 1000:.0f}ms"


def _allow_http(common: dict[str, Any], endpoint: Any) -> None:
    """Let requests leave without TLS where, and only where, the endpoint is given so.

    Raises OptionError for an endpoint that is no URL: the client would not survive it.
    """
    url = str(endpoint or "")
    try:
        is_url = bool(re.match(r"https?://[^\s/]\S*$", url)) and _split(url).port != 0
    except ValueError:  # of a port, or [, or a password with / in it
        is_url = False
    if url and not is_url:
        shown = without_secrets(url) if "://" in url else url.rpartition("@")[2]
        raise OptionError(
            f"the endpoint is {printable(repr(shown), 300)}: expected a URL that begins with "
            "https:// or http://, such as https://minio:9000"
        )
    if url.startswith("http://"):
        common["client_options"].setdefault("allow_http", True)


def _plain(options: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return options by their short names: aws_region and AWS_REGION are region."""
    return {name.lower().removeprefix(prefix): value for name, value in options.items()}


def _is_set(value: Any) -> bool:
    """Return True for a flag that is set, by an option or a variable."""
    return value is True or str(value).lower() in ("1", "true", "yes", "on", "y", "t")


UNSIGNED = "skip_signature"


# ----------------------------------------------------------------------------------------------- s3


_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def _open_s3(kinds: Any, store: Store, region: str | None) -> Opened:
    options = _plain(store.options, "aws_")
    named = options.pop("profile", None)
    own = _s3_own(options, named)
    profile = credentials.aws_profile(named, needed=not own)
    settings = profile.settings if profile is not None else {}
    endpoint = (
        options.pop("endpoint_url_s3", None)
        or options.pop("endpoint_url", None)
        or options.get("endpoint")
        or next(filter(None, map(os.environ.get, _ENDPOINTS)), None)
        or settings.get("endpoint_url")
    )
    if endpoint:
        # The second one is what AWS_ENDPOINT_URL_S3 says, which would win otherwise.
        options["endpoint"] = options["aws_endpoint_url_s3"] = endpoint
    region = region or options.get("region") or options.pop("default_region", None)
    region = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region or settings.get("region"):
        options["region"] = region or settings["region"]
    common = _common(store, options, profile)
    _allow_http(common, endpoint)
    identity = own or _s3_identity(named, profile, common)
    if not endpoint and (empty := [name for name in _ENDPOINTS if name in os.environ]):
        raise OptionError(f"{empty[0]} is empty: expected a URL. Set it, or unset it")
    bucket = store.address[0]
    address = str(endpoint or "https://s3.amazonaws.com")
    if urlsplit(address).path.strip("/") == bucket:  # as R2 shows it
        whole = printable(without_secrets(address.rstrip("/")), 300)
        raise OptionError(
            f"{store.shown}: the endpoint {whole} ends in the bucket, which would be asked for "
            f"twice. Expected {whole.removesuffix(bucket).rstrip('/')}"
        )
    return Opened(kinds.S3Store(bucket, **common, **options), identity, address, common)


def _s3_own(options: Mapping[str, Any], named: str | None) -> str:
    """Return whose credentials a store of S3 uses, if they are given themselves, or ""."""
    if _is_set(options.get("skip_signature", os.environ.get("AWS_SKIP_SIGNATURE"))):
        return UNSIGNED
    if "access_key_id" in options:
        return "the option access_key_id"
    return "AWS_ACCESS_KEY_ID" * (not named and "AWS_ACCESS_KEY_ID" in os.environ)


def _s3_identity(named: str | None, profile: Any, common: dict[str, Any]) -> str:
    """Return whose credentials are to be asked for; those that obstore does not ask are added."""
    asked = named or os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    pod = os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE")
    if profile is not None and profile.has_credentials and (asked or not pod):
        common["credential_provider"] = profile.provider()
        return f"the AWS profile {printable(profile.name)!r}"
    if pod:
        return "AWS_WEB_IDENTITY_TOKEN_FILE"
    if uri := os.environ.get("AWS_CONTAINER_CREDENTIALS_FULL_URI"):
        if not os.environ.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"):
            # obstore's takes it only with that file.
            what = f"AWS_CONTAINER_CREDENTIALS_FULL_URI ({printable(urlsplit(uri).netloc)})"
            common["credential_provider"] = credentials.boto_provider(None, what)
        return "AWS_CONTAINER_CREDENTIALS_FULL_URI"
    if os.environ.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"):
        return "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"
    return ""


def find_region(store: Store, opened: Opened) -> str:
    """Ask S3 in which region a bucket is, which it says to anybody; "": it did not say.

    obstore asks nobody, and does not pass on what the refusal says of it.
    """
    url = f"{opened.base.rstrip('/')}/{quote(store.address[0])}"
    authorities = opened.common["client_options"].get("root_certificate")
    try:
        with plain_http.ask(
            url, min(STALL_S, store.timeout_s), {}, method="HEAD", authorities=authorities
        ) as answer:
            return str(answer.headers.get("x-amz-bucket-region") or "")
    except (OSError, ValueError):
        return ""


# ------------------------------------------------------------------------------------- gs, az, web


def _open_gs(kinds: Any, store: Store, region: str | None) -> Opened:
    options = _plain(store.options, "google_")
    if "endpoint" in options:
        options["base_url"] = options.pop("endpoint")
    common = _common(store, options)
    _allow_http(common, options.get("base_url") or os.environ.get("GOOGLE_BASE_URL"))
    identity = ""
    given = ("service_account", "service_account_path", "service_account_key", "bearer_token")
    if _is_set(options.get("skip_signature", os.environ.get("GOOGLE_SKIP_SIGNATURE"))):
        identity = UNSIGNED
    elif name := next((name for name in given if name in options), None):
        identity = f"the option {name}"
    elif name := next((name for name in given if f"GOOGLE_{name}".upper() in os.environ), None):
        identity = f"GOOGLE_{name.upper()}"
    elif path := credentials.google_file(options):
        identity = f"{printable(path)}"
        if _google_type(path) in ("service_account", "authorized_user"):
            options["application_credentials"] = path
        else:
            options.pop("application_credentials", None)
            common["credential_provider"] = credentials.google_provider()
    bucket = store.address[0]
    return Opened(kinds.GCSStore(bucket, **common, **options), identity)


def _google_type(path: str) -> str:
    """Return the kind of credentials that a file of Google's has."""
    try:
        with open(path, encoding="utf-8") as file:
            return str(json.load(file).get("type"))
    except (OSError, ValueError, AttributeError):
        pass
    raise MissingError(f"{printable(path)}: is no file of Google's credentials")


def _open_az(kinds: Any, store: Store, region: str | None) -> Opened:
    options = _plain(store.options, "azure_storage_")
    text = options.pop("connection_string", None)
    if text is None and not options.keys() & {"account_key", "sas_key", "token", "client_secret"}:
        text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING")
    if text:
        options = {**credentials.azure_connection(text), **options}
    bucket = store.address[0]
    if found := _ABFS.fullmatch(bucket):
        bucket = found[1]
        options["account_name"] = found[2]
    for name, variable in (("account_name", "ACCOUNT"), ("account_key", "KEY")):  # of `az`
        value = os.environ.get(f"AZURE_STORAGE_{variable}")
        if value and name not in options and f"AZURE_STORAGE_{name.upper()}" not in os.environ:
            if name == "account_key" and options.keys() & {"sas_key", "token", "use_azure_cli"}:
                continue
            options[name] = value
    common = _common(store, options)
    endpoint = options.get("endpoint") or os.environ.get("AZURE_STORAGE_ENDPOINT")
    _allow_http(common, endpoint or os.environ.get("AZURE_ENDPOINT"))
    if "use_emulator" in options:
        common["client_options"].setdefault("allow_http", True)
    identity = "the connection string" if text else _az_identity(options)
    return Opened(kinds.AzureStore(bucket, **common, **options), identity)


def _az_identity(options: Mapping[str, Any]) -> str:
    """Return whose credentials a store of Azure uses."""
    if _is_set(options.get("skip_signature", os.environ.get("AZURE_SKIP_SIGNATURE"))):
        return UNSIGNED
    given = ("account_key", "access_key", "sas_key", "sas_token", "token", "client_secret")
    for name in given:
        if name in options:
            return f"the option {name}"
    for name in given:
        for variable in (f"AZURE_STORAGE_{name}".upper(), f"AZURE_{name}".upper()):
            if variable in os.environ:
                return f"{variable}"
    if "AZURE_FEDERATED_TOKEN_FILE" in os.environ:
        return "AZURE_FEDERATED_TOKEN_FILE"
    if _is_set(options.get("use_azure_cli", os.environ.get("AZURE_USE_AZURE_CLI"))):
        return "`az login`"
    return ""


def _open_hf(kinds: Any, store: Store, region: str | None) -> Opened:
    options = dict(store.options)
    repository, _, revision = store.address[0].partition("@")
    endpoint = options.pop("endpoint", None) or os.environ.get("HF_ENDPOINT") or _HUB
    token, identity = credentials.hub_token(options)
    options.pop("token", None)
    common = _common(store, options)
    _refuse_options(store, options, "endpoint, token and client_options")
    if token:
        # The client leaves it out where it is sent on to another host.
        headers = {"Authorization": f"Bearer {token}"}
        headers |= common["client_options"].get("default_headers", {})
        common["client_options"]["default_headers"] = headers
    _allow_http(common, endpoint)
    quoted = quote(revision.replace("%2F", "/").replace("%2f", "/"), safe="")
    base = f"{str(endpoint).rstrip('/')}/datasets/{repository}/resolve/{quoted}"
    return Opened(kinds.HTTPStore.from_url(base, **common), identity, base, common)


def _open_http(kinds: Any, store: Store, region: str | None) -> Opened:
    options = dict(store.options)
    common = _common(store, options)
    _refuse_options(store, options, "client_options")
    parts = urlsplit(store.url)
    userinfo, _, host = parts.netloc.rpartition("@")
    given = common["client_options"].get("default_headers", {})
    identity = "client_options" if given else ""
    if userinfo:
        # Not in the URL: the client would not send it, but show it in its errors.
        headers = {"Authorization": credentials.basic(userinfo), **given}
        common["client_options"]["default_headers"] = headers
        identity = "the user and password in the URL"
    path = parts.path.rstrip("/")
    base = urlunsplit((parts.scheme.lower(), host, path, parts.query, ""))
    common["client_options"]["allow_http"] = store.scheme == "http"
    return Opened(kinds.HTTPStore.from_url(base, **common), identity, base, common)


def open_odd(opened: Opened, path: str) -> Any:
    """Return obstore's store of just one object on the web, whose name obstore does not take.

    Its paths are UTF-8 without control characters and empty parts. URLs may be anything.
    """
    root, query, rest = opened.base.partition("?")
    url = f"{root}/{_quote(path)}{query}{rest}"
    return load().store.HTTPStore.from_url(url, **opened.common)


def _refuse_options(store: Store, options: Mapping[str, Any], known: str) -> None:
    if options:
        raise OptionError(
            f"{store.shown}: {store.scheme}:// has no options but {known}; found "
            f"{printable(', '.join(options))}"
        )


_OPEN = {"s3": _open_s3, "gs": _open_gs, "az": _open_az, "hf": _open_hf, "http": _open_http}
