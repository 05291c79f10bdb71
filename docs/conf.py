"""The site: `make docs` builds it; every warning fails the build."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent / "workbench" / "src"), str(HERE / "_ext")]

import bighorn  # noqa: E402 - the sources beside this file, and not what is installed

project, author, copyright = "Bighorn", "the authors of Bighorn", "the authors of Bighorn"  # noqa: A001 - Sphinx's
version = release = bighorn.__version__

extensions = [
    "myst_parser",
    "sphinx_copybutton",
    "llms",
    "mathml",
    "notebooks",
    "pages",
    "pictures",
    "ranges",
]
exclude_patterns = ["_build"]

myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["math"]  # ```math, as the code host has it
myst_heading_anchors = 3
html_math_renderer = "mathml"

html_theme = "furo"
html_title = f"Bighorn {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#a8500c", "color-brand-content": "#a8500c"},
    "dark_css_variables": {"color-brand-primary": "#f0a35e", "color-brand-content": "#f0a35e"},
}
pygments_style = "friendly"
pygments_dark_style = "github-dark"
smartquotes = False  # quotes are code here
