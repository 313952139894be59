"""How Sphinx builds the documentation."""

import nclbayes

project = "nclbayes"
author = copyright = "The nclbayes authors"
release = version = nclbayes.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "myst_nb"]
html_theme = "furo"
html_title = "nclbayes"
exclude_patterns = ["_build"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
nitpicky = False
