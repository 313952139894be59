"""What tests of figures share."""

from __future__ import annotations

from pathlib import Path

import pytest

from nclbayes.experiments.figures import Results, Workplace, make


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Path]:
    """The figure that a module is about, made at its quick scale with the module's changes; and where."""
    recipe, changes = request.module.RECIPE, getattr(request.module, "TINY", {})
    out = tmp_path_factory.mktemp(recipe.name)
    return make(recipe, "quick", Workplace(out), changes), out
