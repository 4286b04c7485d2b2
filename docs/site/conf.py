"""Sphinx's settings for the site of docs/, which ./scripts/docs.sh builds.

Pages stay plain Markdown that GitHub shows too: what only the site needs is here.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

project = "vit_jax"
html_title = project
html_theme = "furo"  # system fonts, nothing from another server
html_static_path = html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
exclude_patterns = ["site"]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "source_pages",
]
myst_heading_anchors = 3
myst_url_schemes = {"http": None, "https": None, "url": "{{path}}#{{fragment}}"}
default_role = "code"  # as in Markdown, which docstrings are written in
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
pygments_style, pygments_dark_style = "friendly", "monokai"

source_pages_contents = {
    "Use it": [
        "photos",
        "fine_tuning",
        "pre_training",
        "dense",
        "data",
        "preprocessing",
        "runs",
        "pods",
        "weights",
        "evaluation",
        "looking_inside",
        "speed",
        "troubleshooting",
    ],
    "Understand it": ["Coming from other code <coming_from>", "code_tour", "api"],
    "Tables": [
        "systems",
        "real",
        "fashion_mnist",
        "miniature",
        "performance",
        "What fits where <plan_table>",
    ],
}
