"""The site builds without a warning, has every public name, and loads nothing from outside."""

import inspect
import re
import subprocess
import sys
import zlib
from pathlib import Path
from shutil import copytree

import pytest
from support import LIMIT_S
from support.trees import ROOT

import shardio

pytest.importorskip("sphinx", reason="the site needs Python 3.11 and tools/setup")

# Sphinx makes trees that live to its end: looking through them for garbage takes 2 s of CPU, and
# handing them to a second process 7 s.
SPHINX = "import gc, sys; gc.disable(); from sphinx.cmd.build import main; sys.exit(main())"
BUILD = (sys.executable, "-c", SPHINX, "--fail-on-warning", "--keep-going", "--quiet")


def build(docs: Path, out: Path) -> str:
    """Build a site of this folder, and return what Sphinx complains of."""
    done = subprocess.run(
        [*BUILD, "--doctree-dir", f"{out}.trees", str(docs), str(out)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8"},
    )
    return done.stderr if done.returncode else ""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "html"
    complaints = build(ROOT / "docs", out)
    assert not complaints, complaints
    return out


def test_every_public_name_has_an_entry(site: Path) -> None:
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    entries = re.findall(r"^shardio\.(\S+) py:", zlib.decompress(inventory).decode(), re.M)
    public = {name for name in dir(shardio) if not name.startswith("_")}
    assert public - set(entries) == set()


def test_options_of_docstrings_are_lists(site: Path) -> None:
    page = (site / "api" / "train.html").read_text()
    entry = page.partition('id="shardio.ShardDataset"')[2].partition('id="shardio.ShardDataset.')[0]
    terms = " ".join(re.findall(r"<dt>(.*?)</dt>", entry))
    listed = set(re.findall(r'<span class="pre">(\w+)</span>', terms))
    assert listed == set(inspect.signature(shardio.ShardDataset).parameters)
    raised = set(re.findall(r'href="errors.html#shardio\.(\w+)"', entry))
    assert {"DamageError", "OptionError", "StateError"} <= raised


def test_every_page_is_on_the_site_and_nothing_is_loaded_from_outside(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    built = {path.relative_to(site).with_suffix(".md"): path for path in site.rglob("*.html")}
    assert pages <= set(built)
    tags = r"<(?:script|img|iframe)[^>]+src|<link[^>]+href"
    loaded = re.compile(rf"""(?:{tags})=["']?(?:https?:)?//[^>]+""")
    for path in built.values():
        assert not loaded.findall(path.read_text()), path
    for path in (site / "_static").rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)]+", path.read_text()), (
            path
        )


def test_what_the_readme_links_is_on_the_site(site: Path) -> None:
    """As setup.py writes these links for the package index, once the site has a home."""
    links = re.findall(r"\]\(docs/([^)#]+)", (ROOT / "README.md").read_text())
    assert len(links) > 8
    for link in links:
        page = Path(link).with_suffix(".html")
        assert (site / (page if link.endswith(".md") else f"_images/{link}")).is_file(), link


def test_links_that_leave_the_folder_lead_to_pages_and_copies(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    copytree(ROOT / "docs" / "_ext", docs / "_ext")
    copytree(ROOT / "docs" / "_static", docs / "_static")
    (docs / "conf.py").write_text((ROOT / "docs" / "conf.py").read_text())
    (docs / "index.md").write_text(
        "# Home\n\n[here](../README.md), [news](../CHANGELOG.md), [code](../code.py)\n\n"
        "```{toctree}\nchangelog\nother\n```\n"
    )
    (docs / "other.md").write_text("# Other\n\n## A part\n")
    (docs / "changelog.md").write_text("```{include} ../CHANGELOG.md\n```\n")
    (tmp_path / "CHANGELOG.md").write_text(
        "# News\n\n[a](docs/other.md#a-part), [b](README.md), [c](code.py)\n"
    )
    (tmp_path / "README.md").write_text("# Read me\n")
    (tmp_path / "code.py").write_text("pass\n")
    assert build(docs, tmp_path / "out") == ""
    for page, links in (
        ("index", {"here": "#", "news": "changelog.html", "code": r"_downloads/\w+/code\.py"}),
        (
            "changelog",
            {"a": r"other\.html#a-part", "b": "index.html", "c": r"_downloads/\w+/code\.py"},
        ),
    ):
        html = (tmp_path / "out" / f"{page}.html").read_text()
        for text, target in links.items():
            assert re.search(rf'href="{target}"[^>]*>(?:<[^>]+>)*{text}<', html), (page, text)
    (docs / "other.md").write_text("# Other\n\n[gone](gone.md), [no such part](index.md#nowhere)\n")
    complaints = build(docs, tmp_path / "again")
    assert "gone.md" in complaints and "nowhere" in complaints and "a-part" in complaints
