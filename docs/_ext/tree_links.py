"""Makes links that leave docs/ lead somewhere on the site.

Pages beside docs/ have pages of the site. Of any other file of the tree, such as a test, the site
has a copy: MyST does that. A link to a folder fails the build: link a file in it.
"""

import re
from pathlib import Path
from typing import Any

from sphinx.addnodes import pending_xref
from sphinx.transforms import SphinxTransform

PAGES = {
    "README": "index",
    "CHANGELOG": "changelog",
    "CONTRIBUTING": "contributing",
    "SECURITY": "security",
}


class RootPages(SphinxTransform):
    """Leads links to the pages beside docs/ to those of the site."""

    default_priority = 200

    def apply(self, **kwargs: Any) -> None:
        for node in self.document.findall(pending_xref):
            path = Path(node["reftarget"])  # MyST's name of a page outside docs/: an absolute path
            if path.is_absolute() and path.parent == Path(self.env.srcdir).parent:
                node["reftarget"] = PAGES.get(path.name, node["reftarget"])


def from_docs(app: Any, path: Path, docname: str, text: list[str]) -> None:
    """Write the links of an included page, which begin at the root of the tree, as from docs/."""

    def link(found: re.Match[str]) -> str:
        return "](" if found[1] else "](../"

    text[0] = re.sub(r"\]\((?![a-z]+:|#)(docs/)?", link, text[0])


def setup(app: Any) -> dict[str, bool]:
    app.add_transform(RootPages)
    app.connect("include-read", from_docs)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
