"""Sphinx: Markdown pages, and a reference made from docstrings, settings classes and the command line.

What Sphinx cannot know by itself is in `reference_tools`, what is public in `inventory`.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from iris_core import __version__

project = "Iris"
author = "the authors of Iris"
copyright = "the authors of Iris"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_argparse_cli",
    "reference_tools",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"Iris {__version__}"
html_copy_source = False
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {"code-font-size": "76%"},  # 95 characters fit into the width of a page
}

myst_enable_extensions = ["fieldlist"]
myst_heading_anchors = 3

default_role = "py:obj"  # `name` in docstrings becomes a link where there is something of that name
toc_object_entries_show_parents = "hide"
maximum_signature_line_length = 100
python_use_unqualified_type_names = True
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [
    ("Arguments that they share", "params_style"),
    ("Arguments that the methods share", "params_style"),
    ("All raise", "params_style"),
]
