"""The figure of streams: how candidates are tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from nclbayes.errors import NCLError
from nclbayes.experiments.figures.recipe import Workplace
from nclbayes.experiments.figures.streams import RECIPE, _best, _tuned, _way

pytest.importorskip("sklearn")


def test_a_candidate_that_diverges_is_not_chosen(tmp_path: Path) -> None:
    candidates = {"particles": 2, "init_scale": 50.0}, {"particles": 2, "init_scale": 0.1}
    way, settings = _way("bgd", "none", *candidates), RECIPE.scales["quick"]
    rows = _tuned(way, settings, Workplace(tmp_path, progress=False))
    assert [row["accuracy"] is None for row in rows] == [True, False]
    assert _best("bgd", rows) == 1
    with pytest.raises(NCLError, match=r"became|not finite"):
        _tuned({**way, "candidates": [candidates[0]] * 2}, settings, Workplace(tmp_path / "all", progress=False))


def test_each_way_has_as_many_candidates() -> None:
    ways = {way["way"]: way for way in RECIPE.scales["paper"]["ways"]}
    assert {"bgd", "foo-vb", "ivon"} <= ways.keys()
    assert {len(way["candidates"]) for way in ways.values()} == {1, 8}
    assert all(way["boundaries"] == "none" for name, way in ways.items() if name in ("bgd", "foo-vb", "ivon"))
