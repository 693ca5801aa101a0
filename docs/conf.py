"""The settings of the documentation site, which tools/docs builds from the pages of this folder."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

import shardio  # noqa: E402

project = "shardio"
author = copyright = "The shardio authors"
version = release = shardio.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_copybutton",
    "plain_docstrings",
    "tree_links",
]
exclude_patterns = ["_ext"]
html_theme = "furo"
html_title = f"shardio {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sphinx = False

myst_heading_anchors = 4  # as GitHub makes them, so that page.md#heading leads there on both
smartquotes = False  # quotes of values stay what is typed
highlight_language = "text"  # blocks without a language: output, layouts of bytes
copybutton_prompt_text = r"\$ |>>> "  # not copied, nor the output below
copybutton_prompt_is_regexp = True

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 80  # longer ones: a parameter a line

nitpicky = True
# Types in signatures: the site is built offline, without the inventories of Python, torch and
# numpy, and our own types that no user constructs have no entry. Names in the text are checked.
nitpick_ignore_regex = [("py:class", ".*")]
