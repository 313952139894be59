"""The schematic: what its caption says holds, and the files tell the paths."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

from nclbayes.experiments.figures import Results, Workplace
from nclbayes.experiments.figures.toy import RECIPE, engine_path, problems

pytest.importorskip("matplotlib", reason="pictures need matplotlib")

METHODS = {"convex": {"laplace", "projected", "ncl", "engine"}, "nonconvex": {"laplace", "projected", "ncl"}}


def test_the_caption_holds(made: tuple[Results, Path]) -> None:
    results, _ = made
    claims = [statement.claim for statement in results.statements]
    for problem in ("convex", "nonconvex"):
        for method in ("Laplace", "NCL", "projection"):
            assert sum(claim.startswith(f"{problem}: {method}") for claim in claims) == 1
    assert not [statement for statement in results.statements if not statement.holds]


def test_the_engine_takes_the_path_of_ncl(made: tuple[Results, Path]) -> None:
    results, _ = made
    assert results.facts["largest distance between the engine's path and NCL's"] < 1e-3
    paths = {
        method: {row["step"]: row for row in results.tables["paths"] if (row["problem"], row["method"]) == key}
        for method in ("ncl", "engine")
        for key in [("convex", method)]
    }
    common = paths["ncl"].keys() & paths["engine"].keys()
    assert len(common) > 20
    for step in common:
        for coordinate in ("theta_1", "theta_2"):
            assert paths["engine"][step][coordinate] == pytest.approx(paths["ncl"][step][coordinate], abs=1e-3)


def test_the_files_hold_the_paths_and_their_losses(made: tuple[Results, Path]) -> None:
    results, out = made
    assert {path.name for path in out.iterdir()} == {
        "figure.json",
        "results.json",
        "paths.csv",
        "landscapes.png",
        "losses.png",
    }
    assert json.loads((out / "results.json").read_text())["tables"]["paths"] == list(results.tables["paths"])
    with (out / "paths.csv").open() as file:
        rows = list(csv.DictReader(file))
    for name, problem in problems(RECIPE.scales["quick"]).items():
        mine = [row for row in rows if row["problem"] == name]
        assert {row["method"] for row in mine} == METHODS[name]
        points = torch.tensor([[float(row["theta_1"]), float(row["theta_2"])] for row in mine], dtype=torch.float64)
        for k, losses in enumerate(problem.losses(points), start=1):
            assert [float(row[f"loss_{k}"]) for row in mine] == pytest.approx(losses.tolist())
        for method in METHODS[name]:
            steps = [int(row["step"]) for row in mine if row["method"] == method]
            assert steps == sorted(set(steps))
            assert steps[0] == 0
            assert steps[-1] == RECIPE.scales["quick"]["engine_steps" if method == "engine" else "steps"] - 1


def test_a_statement_can_fail(tmp_path: Path) -> None:
    changes = {"zeta": 5.5, "angles": [50.0, 10.0], "steps": 400, "engine_steps": 2}
    found = RECIPE.compute({**RECIPE.scales["quick"], **changes}, Workplace(tmp_path)).statements
    holds = {statement.claim.split(",")[0]: statement.holds for statement in found}
    # With the paper's zeta Laplace hardly overshoots, and few steps do not bring projection to its end.
    assert holds["convex: Laplace comes to the same optimum"] is False
    assert holds["nonconvex: projection takes a path like NCL's at first"] is False


def test_the_engine_starts_where_task_1_is_learnt() -> None:
    problem = problems(RECIPE.scales["quick"])["convex"]
    path = engine_path(problem, 0.1 * problem.highest_rate(), steps=2)
    torch.testing.assert_close(path[0], problem.theta_1, rtol=0, atol=1e-4)
    g_1, g_2 = problem.gradients(path[0])
    step = torch.linalg.solve(problem.Q_1, g_1 + g_2)
    torch.testing.assert_close((path[0] - path[1]) / (0.1 * problem.highest_rate()), step, rtol=1e-3, atol=1e-3)
