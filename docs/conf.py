"""The site, which `make site` builds: Sphinx reads the repository's pages, lessons and docstrings in place.

What is no text on them is in `pages.py`. No lesson is run: its outputs are those that it stores.
"""

import sys
from pathlib import Path

import llmpar

sys.path.insert(0, str(Path(__file__).parent))

project, author, language = "llmpar", "The llmpar authors", "en"
version = release = llmpar.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "pages"]
root_doc = "index"
include_patterns = ["*.md", "docs/**.md", "notebooks/*.ipynb", "notebooks/walk.md", "tests/*.md"]
exclude_patterns = ["docs/_site"]
default_role = "code"
autodoc_member_order, autodoc_typehints = "bysource", "none"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"
nb_merge_streams = True
html_theme, html_title, html_show_sphinx = "furo", "llmpar", False
html_static_path, html_css_files, html_favicon = ["site/static"], ["site.css"], "site/static/icon.svg"
html_extra_path = ["site/llms.txt"]
html_math_renderer, html_copy_source = "mathml", False
html_use_index = False
html_theme_options: dict[str, list[str]] = {"top_of_page_buttons": []}
