"""The keys of each command's JSON, as docs/cli.md says them."""

import re
from typing import Any

from support.trees import ROOT


def documented() -> dict[str, set[str]]:
    """The keys by the command, "cat --output" and "info --env" among them."""
    text = (ROOT / "docs" / "cli.md").read_text().partition("\n## JSON\n")[2]
    found = {}
    for commands, keys in re.findall(r"^\| (`.*?) \| (.*?) \|$", text, re.M):
        for name in re.findall(r"`(.*?)`", commands):
            found[name] = set(re.findall(r"`(\w+)`", keys))
    return found


def documented_rows(of: str) -> set[str]:
    """The keys of each of the `datasets`, or `records`."""
    text = (ROOT / "docs" / "cli.md").read_text().partition("\n## JSON\n")[2]
    found = re.search(rf"^Each of the `{of}` of .*?: (.*?)\.$", text, re.M | re.S)
    assert found, of
    return set(re.findall(r"`(\w+)`", found[1]))


def check_keys(name: str, facts: dict[str, Any]) -> None:
    """Check that what a command printed has the keys that are documented, and no others."""
    wanted = documented()[name]
    # Of alternatives, one is there.
    either = {"info": {"splits"}, "cat": {"base64", "value"}}.get(name, set())
    assert wanted - either <= set(facts) <= wanted, (name, set(facts) ^ wanted)
