"""Wrong options of object stores: what obstore says of them, in words that say what to write.

The names are for advice only: obstore takes more, and decides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..errors import printable, there_are

# By scheme: those that users need.
NAMES = {
    "s3": "region endpoint profile access_key_id secret_access_key session_token skip_signature "
    "client_options request_payer virtual_hosted_style_request unsigned_payload",
    "gs": "endpoint service_account service_account_key bearer_token application_credentials "
    "skip_signature client_options",
    "az": "account_name account_key sas_key connection_string endpoint use_azure_cli "
    "skip_signature client_options tenant_id client_id client_secret token use_emulator",
    "client_options": "proxy_url root_certificate timeout connect_timeout read_timeout user_agent "
    "default_headers allow_http allow_invalid_certificates proxy_excludes",
}

_UNKNOWN = re.compile(r"key: '(.*)' is not valid|for argument '(\w+)'|Invalid key: (.*)\.", re.S)
_VALUE = re.compile(r"""failed to parse "(.*)" as (\w+)|'(\w+)'(?: object)? is not an inst""", re.S)
_FORMS = {"boolean": "true or false", "Duration": "a time, such as 30s", None: "a str"}
_KEYS = (
    ". Expected both: the options access_key_id and secret_access_key, AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, or a profile"
)
_MISSING = {
    "Missing SecretAccessKey": f"found an access key's id without its secret{_KEYS}",
    "Missing AccessKeyId": f"found an access key's secret without its id{_KEYS}",
    "Account must be specified": "no account is given. Expected options={'account_name': ...}, "
    "AZURE_STORAGE_ACCOUNT_NAME, or abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH",
}


def explain(problem: str, kind: str, options: Mapping[str, Any]) -> str:
    """Return what is wrong with options, of what obstore said; "": it is none of what is known.

    kind: the scheme, as NAMES has it. No value of an option is in it, but names are.
    """
    if found := _UNKNOWN.search(problem):
        group = "client_options" if found[3] is not None else kind
        name = next(one for one in found.groups() if one is not None)
        of = group if group == "client_options" else f"{kind}://"
        return f"{of} has no option {printable(name)!r}; {there_are(NAMES[group].split(), name)}"
    if found := _VALUE.search(problem):
        flat, wrong = {**options, **(options.get("client_options") or {})}, found[1] or found[3]
        names = [key for key, one in flat.items() if wrong in (str(one), type(one).__name__)]
        what = f"the option {printable(' or '.join(names))}" if names else "a variable"
        return f"{what}: cannot be read; expected {_FORMS.get(found[2], found[2])}"
    return next((text for said, text in _MISSING.items() if said in problem), "")
