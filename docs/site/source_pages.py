"""An extension of Sphinx: the table of contents, and listings of files that pages link to.

`../vit_jax/train.py#train` is the file on GitHub; on the site it is the line that defines `train`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(\.\./([\w./-]+)(?:#([\w.]+))?\)")


def line_of(path: str, name: str) -> int:
    """The line of a Python file that defines `name`, such as `train` or `Model.predict`.

    Raises:
      KeyError: there is none.
    """
    body, line = ast.parse((ROOT / path).read_text(encoding="utf-8")).body, 0
    for part in name.split("."):
        nodes = [node for node in body if part in _names(node)]
        if not nodes:
            raise KeyError(f"{path} defines no {name}")
        body, line = getattr(nodes[0], "body", []), nodes[0].lineno
    return line


def _names(node: ast.stmt) -> list[str]:
    """What a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [ast.unparse(target) for target in targets]
    return []


def setup(app: Any) -> dict[str, Any]:
    app.add_config_value("source_pages_contents", {}, "env")
    app.connect("source-read", _read)
    app.connect("html-collect-pages", _listings)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _read(app: Any, page: str, source: list[str]) -> None:
    """Adds the table of contents to the first page, and turns links to files into links here."""
    if page == app.config.root_doc:
        for caption, names in app.config.source_pages_contents.items():
            lines = [":hidden:", f":caption: {caption}", "", *names]
            source[0] += "\n".join(["\n```{toctree}", *lines, "```\n"])
    app.env.metadata[page]["files"] = {path for path, _ in LINK.findall(source[0])}
    source[0] = LINK.sub(_link, source[0])


def _link(match: re.Match[str]) -> str:
    path, name = match.groups()
    anchor = f"#L-{line_of(path, name)}" if name else ""
    return f"](url:source/{path}.html{anchor})"


def _listings(app: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page for each file that a page links to."""
    files = set().union(*(page.get("files", ()) for page in app.env.metadata.values()))
    for path in sorted(files):
        text = (ROOT / path).read_text(encoding="utf-8")
        body = _rendered(text) if path.endswith(".md") else f"<h1>{path}</h1>{_code(path, text)}"
        yield f"source/{path}", {"title": path, "body": body}, "page.html"


def _code(path: str, text: str) -> str:
    """HTML, in which lines have the anchors L-1, L-2, ..."""
    from pygments import formatters, highlight, lexers

    formatter = formatters.HtmlFormatter(linenos="inline", lineanchors="L", wrapcode=True)
    return str(highlight(text, lexers.get_lexer_for_filename(path), formatter))


def _rendered(text: str) -> str:
    """Markdown as HTML, with the classes that the theme knows."""
    from markdown_it import MarkdownIt

    html = MarkdownIt().enable("table").render(text).replace("<pre>", '<pre class="highlight">')
    html = html.replace("<table>", '<div class="table-wrapper"><table class="docutils">')
    return str(html).replace("</table>", "</table></div>")
