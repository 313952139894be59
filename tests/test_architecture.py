"""The layers of the package: imports point downwards only, and an update passes the files that the page names."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from pyro import distributions as dist

import nclbayes as ncl

ROOT = Path(__file__).parent.parent
# The installed package, wherever that is.
PACKAGE = Path(ncl.__file__).resolve().parent
MODULES = sorted(PACKAGE.rglob("*.py"))
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
DRAWING = runpy.run_path(str(ROOT / "docs" / "layers.py"))
LAYERS: list[tuple[str, ...]] = [folders for folders, _ in DRAWING["layers"]()]
DEPTH = {folder: depth for depth, folders in enumerate(LAYERS) for folder in folders}


def folder_of(path: Path) -> str:
    """The folder, or the module of the root, that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """What a module imports from the package, by folder; inside functions and for type checkers too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides where it leads"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            package, _, rest = name.partition(".")
            if package == "nclbayes":
                yield rest.partition(".")[0]


def test_the_layers_are_the_folders_of_the_package() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert folders | {"errors"} == set(DEPTH)
    assert sum(map(len, LAYERS)) == len(DEPTH)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    own = folder_of(path)
    for other in imports(path):
        if own == "__init__":
            assert other in DEPTH
        elif own == "__main__":
            assert other == "cli"
        elif other != own:
            assert DEPTH.get(other, -1) > DEPTH[own], f"{own} imports {other or 'the root'}, which is not below it"


def test_the_root_holds_only_what_it_must() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py", "errors.py"}


def test_no_module_is_long() -> None:
    assert not [str(path) for path in MODULES if len(path.read_text(encoding="utf-8").splitlines()) > 400]


def test_the_picture_shows_the_table() -> None:
    drawn = DRAWING["PICTURE"].read_text(encoding="utf-8")
    assert drawn == DRAWING["picture"](), "run python docs/layers.py"
    assert re.findall(r'fill="#fff">(\w+)<', drawn) == [folder for folders in LAYERS for folder in folders]


def test_what_the_page_names_is_defined_in_the_file_that_it_names() -> None:
    named = re.findall(r"`(\w+)`\s+in\s+`(nclbayes/[\w/]+\.py)`", PAGE)
    assert len(named) > 20
    for name, file in named:
        text = (PACKAGE.parent / file).read_text()
        assert re.search(rf"^(?:def|class) {name}\b", text, flags=re.MULTILINE), (name, file)


def test_an_update_passes_the_files_that_the_page_names(tmp_path: Path) -> None:
    passed: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        passed.add(frame.f_code.co_filename)

    net = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 2))
    model = ncl.BayesianNetwork(net, ncl.Categorical(), prior=dist.Normal(0.0, 1.0))
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        engine = ncl.LaplaceNCL(steps=4, batch_size=2)
        posterior = ncl.OnlinePosterior(model, engine)
        for name in ("first", "second"):
            task = ncl.Task((torch.randn(8, 40), torch.arange(8) % 2), name=name)
            posterior.update(task, checkpoint=tmp_path / "update.ckpt", checkpoint_every=2)
    finally:
        sys.setprofile(before)
    named = {file for file in re.findall(r"`(nclbayes/[\w/]+\.py)`", PAGE) if not file.endswith("variational.py")}
    assert len(named) > 20
    assert not [file for file in named if str(PACKAGE.parent / file) not in passed]
