"""HTML without a template engine: elements with escaped text, tables, and the page around them."""

import base64
import html
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_VOID = ("img", "meta")
_FONTS = ["DejaVu Sans", "sans-serif"]  # the first is matplotlib's own
# For charts, which cannot use the page's colours.
_INK = """<style>svg{color:#16191d}text{fill:currentColor}
@media(prefers-color-scheme:dark){svg{color:#e9ecf0}}</style>"""


class Html(str):
    """Text that is already HTML; every other `str` is escaped when inserted into an element."""


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element: `tag("a", "x < y", href="#b")`.

    Trailing underscores are dropped: `class_` is `class`, `aria_label` is `aria-label`.
    """
    attributes_text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(value)}"'
        for key, value in attributes.items()
    )
    if name in _VOID:
        return Html(f"<{name}{attributes_text}/>")
    return Html(f"<{name}{attributes_text}>{''.join(map(_escaped, children))}</{name}>")


def _escaped(value: object) -> str:
    if isinstance(value, Html):
        return value
    # File names need not be valid text.
    return html.escape(re.sub("[\ud800-\udfff]", "\ufffd", str(value)))


def table(
    columns: Sequence[object], rows: Iterable[Sequence[object]], *, label: str, kind: str = "text"
) -> Html:
    """A table that scrolls inside its box; the first cell of each row is its header.

    Other cells that are Html are `td` elements. `label` names the table for screen readers; `kind`
    is a CSS class.
    """
    head = tag("tr", *(tag("th", column, scope="col") for column in columns))
    body = []
    for first, *cells in rows:
        data = [cell if isinstance(cell, Html) else tag("td", cell) for cell in cells]
        body.append(tag("tr", tag("th", first, scope="row"), *data))
    element = tag("table", tag("thead", head), tag("tbody", *body), class_=kind)
    # Focusable, so that arrow keys scroll it.
    return tag("div", element, class_="box", tabindex=0, role="region", aria_label=label)


def note(text: object) -> Html:
    """A sentence of explanation, possibly instead of missing content."""
    return tag("p", text, class_="note")


def details(summary: str, *content: object) -> Html:
    """Content that is collapsed at first."""
    return tag("details", tag("summary", summary), *content)


def bar(value: float, interval: Sequence[float] = ()) -> Html:
    """A cell of a table of kind `bars`: a share in [0, 1], with its interval as a whisker."""
    ends = zip(("value", "low", "high"), (value, *interval), strict=False)
    style = ";".join(f"--{key}:{end:.2%}" for key, end in ends)
    return tag("td", tag("i", style=style), class_="bar whisker" if interval else "bar")


def picture(data: bytes, *, kind: str, alt: str, caption: object, class_: str = "picture") -> Html:
    """An image embedded in the page; `kind` is `svg+xml`, `png` or `jpeg`."""
    source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return tag("figure", tag("img", src=source, alt=alt), tag("figcaption", caption), class_=class_)


def chart(figure: Any, *, alt: str, caption: object) -> Html:
    """A matplotlib figure as a `picture` whose black follows the light or dark page."""
    import matplotlib as mpl

    # Text stays text, and ids are reproducible.
    style = {"svg.fonttype": "none", "svg.hashsalt": "page", "font.sans-serif": _FONTS}
    with io.StringIO() as file, mpl.rc_context(style):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        _, start, svg = file.getvalue().partition("<svg")
    svg = start + svg.replace("#000000", "currentColor").replace(">", f">{_INK}", 1)
    return picture(svg.encode(), kind="svg+xml", alt=alt, caption=caption)


def page(
    title: str, header: Iterable[object], sections: Sequence[tuple[str, str, Iterable[object]]]
) -> str:
    """The whole document, which loads nothing else; `sections`: id, title and content."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Html(Path(__file__).with_name("page.css").read_text(encoding="utf-8"))),
    )
    links = [tag("li", tag("a", heading, href=f"#{key}")) for key, heading, _ in sections]
    elements = [
        tag("section", tag("h2", heading), *content, id=key, aria_label=heading)
        for key, heading, content in sections
    ]
    body = tag(
        "body",
        tag("a", "Skip to the results", href="#main", class_="skip"),
        tag("header", *header),
        tag("nav", tag("ul", *links), aria_label="Sections"),
        tag("main", *elements, id="main", tabindex=-1),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"
