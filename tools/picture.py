"""The page of a drawn picture: white, or dark where its viewer prefers that.

An <img> on GitHub follows the browser, and on the site its switch. The page is opaque: elsewhere a
picture may be dark on a white page, and is legible there, too.
"""

from collections.abc import Iterable
from xml.sax.saxutils import escape

# Okabe and Ito's, told apart without colour vision, too.
OURS, RIVAL, BARE = "#e69f00", "#56b4e9", "#bbbbbb"

STYLE = """\
<style>@media (prefers-color-scheme: dark) {
svg { color: #dddddd; fill: #dddddd }
.paper { fill: #16191d } .gap { stroke: #16191d } .faint { fill: #9a9a9a }
}</style>"""


def page(width: float, height: float, lines: Iterable[str]) -> str:
    """Write a picture as SVG. Text, and lines in `currentColor`, have the colour of ink."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" height="{height:g}" font-family="Helvetica, Arial, sans-serif" '
            'color="#222222" fill="#222222">',
            STYLE,
            '<rect class="paper" width="100%" height="100%" fill="white"/>',
            *lines,
            "</svg>\n",
        ]
    )


def text(
    x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", weight: str = "normal"
) -> str:
    """Write words at a place. size: in pixels of the picture."""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(words)}</text>'
    )
