"""The programs that pages of docs/ show, made small enough to run."""

import re

from support.trees import ROOT


def blocks(page: str, heading: str, kind: str) -> list[str]:
    """Return the blocks of a kind, such as "python" or "", below the heading that begins so."""
    text = (ROOT / "docs" / page).read_text()
    (section,) = re.findall(rf"^#+ {re.escape(heading)}[^\n]*\n(.*?)(?=^##|\Z)", text, re.M | re.S)
    found = re.findall(r"^```(\w*)\n(.*?)^```", section, re.M | re.S)
    return [text for one, text in found if one == kind]


def replaced(text: str, *pairs: tuple[str, str]) -> str:
    """Replace the first of each pair, which must be there, by the second."""
    for long, short in pairs:
        assert long in text, long
        text = text.replace(long, short)
    return text
