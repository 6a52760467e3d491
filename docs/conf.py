"""How Sphinx builds the site: `make docs` writes it to build/docs.

The pages are plain Markdown, which reads well without Sphinx too.  `_ext/generated.py` adds the
parts that come from the code.
"""

import sys
from pathlib import Path

import fedp3

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "fedp3"
author = "The fedp3 maintainers"
project_copyright = author
release = version = fedp3.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "generated",
]
smartquotes_action = "D"  # dashes in lists of parameters; quotes stay as they are typed
highlight_language = "none"  # a block that names no language is a transcript or a command

# Links between pages lead to files and headings, as on any viewer of Markdown.
myst_heading_anchors = 4

# Docstrings are in Google's style; `name` in them is code, and a link where the name is documented.
napoleon_numpy_docstring = False
napoleon_use_ivar = True
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"fedp3 {release}"
html_logo = "_static/logo.svg"
html_favicon = "_static/logo.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "top_of_page_buttons": [],
    "light_css_variables": {"color-brand-primary": "#2563c9", "color-brand-content": "#2563c9"},
    "dark_css_variables": {"color-brand-primary": "#74a9ff", "color-brand-content": "#74a9ff"},
}
