"""Every block of the guides runs, and gives what the page shows: support/doc_blocks.py says how."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import doc_blocks
from support.doc_blocks import Page
from support.trees import ROOT, picture, plant

KEYS = [f"n0144076{c}/n0144076{c}_{name}.JPEG" for c in range(3, 6) for name in ("eel", "tench")]


def imagenet() -> None:
    plant(Path("imagenet/train"), {key: picture(40, 30) for key in KEYS})
    plant(Path("imagenet/val"), {key: picture(30, 40) for key in KEYS})


PAGES = {
    page.name: page
    for page in (
        Page(
            "README.md",
            imagenet,
            smaller=(
                ("batch_size=256", "batch_size=4"),
                ("num_workers=8", "num_workers=2"),
                ("range(90)", "range(2)"),
                ("Crop(224,", "Crop(16,"),
                ('device="cuda"', 'device="cpu"'),
                ("n01440764/n01440764_tench", "n01440763/n01440763_tench"),
            ),
            unrun={"save(": "pieces of a loop; tests/dataset/test_resume.py"},
        ),
    )
}


def written() -> set[str]:
    """Return the pages that people learn from, as they are in the repository."""
    docs = ROOT / "docs"
    names = ("index", "install", "concepts", "faq", "reliability")
    found = [ROOT / "README.md", *(docs / f"{name}.md" for name in names)]
    found += [one for one in (docs / "guides").glob("*.md")]
    return {one.relative_to(ROOT).as_posix() for one in found if one.exists()}


def test_every_page_is_tested() -> None:
    with_blocks = {name for name in written() if doc_blocks.blocks(name)}
    assert with_blocks - PAGES.keys() == set()
    assert PAGES.keys() - written() == set()


@pytest.mark.parametrize("name", PAGES)
def test_the_blocks_of_a_page_run(name: str, tmp_path: Path) -> None:
    doc_blocks.run(PAGES[name], tmp_path)


# -------------------------------------------------------------------------------- the runner itself


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a page with this text."""
    monkeypatch.setattr(doc_blocks, "ROOT", tmp_path)

    def run(text: str, **options: Any) -> None:
        (tmp_path / "page.md").write_text(text)
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            doc_blocks.run(Page("page.md", **options), Path(folder))

    return run


GOOD = """
```python
# work.py
print("from a file")
```
```python
a = 3
print(a + 1)  # 4
print("took 1.5 s")  # took 0.2 s
```
In between.
```console
$ python work.py && ls
from a file
work.py
$ printf 'a 1.5 MiB/s\\n b\\n' > \\
    b.txt
$ cat b.txt
a 27.31 GiB/s
...
$ echo shardio: nope: not packed: sorry; false
shardio: nope: not packed: ...
```
```python
print([a])
raise ValueError("no")
```

```text
[3]
ValueError: no
```
"""


def test_a_good_page_passes(page: Callable[..., None]) -> None:
    page(GOOD)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("# 4", "# 5"),
        ("from a file\nwork.py", "from a fill\nwork.py"),
        ("GiB/s\n...", "GiB/s"),
        ("a 27.31 GiB/s", "a 27.31 images/h"),
        (" nope: not packed: ...", " nope: packed: ..."),
        ("not packed: ...\n```", "not packed: ...\n$ false\n```"),
        ("[3]\nV", "[4]\nV"),
        ("ValueError: no", "ValueError: yes"),
        ('raise ValueError("no")', ""),
        ("```text\n[3]\nValueError: no\n```", ""),
        ("print([a])", "print([b])"),
        ("print(a + 1)", "if a == 4: print(a + 1)"),
        ("```text", "```yaml"),
        ("```text\n[3]\nValueError: no\n```", "```text\n[3]\nValueError: no\n"),
    ],
)
def test_a_page_that_is_wrong_fails(page: Callable[..., None], right: str, wrong: str) -> None:
    assert GOOD.count(right) == 1
    with pytest.raises((AssertionError, NameError, ValueError)):
        page(GOOD.replace(right, wrong))


def test_what_is_replaced_or_left_out_must_be_there(page: Callable[..., None]) -> None:
    left_out = {"range": "takes long", "nvidia": "no GPU"}
    text = "```python\nprint(range(9)[-1])\n```\n```console\n$ nvidia-smi\n$ echo a\na\n```\n"
    page(text, unrun=left_out)
    for options in ({"smaller": [("7", "3")]}, {"unrun": {**left_out, "slurm": "no cluster"}}):
        with pytest.raises(AssertionError, match=r"7|slurm"):
            page(text, **{"unrun": left_out, **options})
