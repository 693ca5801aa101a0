"""No link or name of the documentation leads nowhere. test_guides.py runs its examples."""

import re
from pathlib import Path

import pytest
from support.trees import ROOT

import shardio

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_packed_has_one_name(page: Path) -> None:
    """Readers go from the README to the guides with the same directory: `packed`."""
    out = r'[(=] *"out/?"|\bout/ |^out/|shardio \w+ (?:\S+ )?out/?\b'
    assert re.findall(out, page.read_text(), re.M) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_calls_is_there(page: Path) -> None:
    called = set(re.findall(r"\bshardio\.(\w+)\(", page.read_text()))
    assert called <= set(dir(shardio))
