"""Steps that fit: what the curvature of a task allows."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import nclbayes as ncl
from nclbayes.engines import stability
from nclbayes.errors import NonFiniteError
from nclbayes.gaussians.preconditioners import Elementwise, TwoSided
from tests.engines.paper import laplace


def positive(size: int, seed: int) -> torch.Tensor:
    root = torch.randn(size, size + 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.T


def test_curvature_is_the_largest_eigenvalue() -> None:
    left, right, inputs, outputs = positive(3, 0), positive(4, 1), positive(4, 2), positive(3, 3)
    found = TwoSided(left, right, None).curvature(inputs, outputs)
    dense = torch.kron(left, right) @ torch.kron(outputs, inputs)
    assert found == pytest.approx(float(torch.linalg.eigvals(dense).real.max()), rel=1e-3)


def test_curvature_of_a_stack_is_that_of_its_worst() -> None:
    sides = [torch.stack([positive(size, seed), 3 * positive(size, seed + 1)]) for size, seed in ((3, 0), (4, 2))]
    other = [torch.stack([positive(size, seed), positive(size, seed + 1)]) for size, seed in ((4, 4), (3, 6))]
    stack = TwoSided(*sides, None).curvature(*other)
    each = [TwoSided(sides[0][k], sides[1][k], None).curvature(other[0][k], other[1][k]) for k in range(2)]
    assert stack == pytest.approx(max(each))


def test_curvature_under_weights_of_its_own_each_is_a_bound() -> None:
    weights, inputs, outputs = torch.rand(3, 4, dtype=torch.float64) + 0.1, positive(4, 0), positive(3, 1)
    dense = torch.diag(weights.reshape(-1)) @ torch.kron(outputs, inputs)
    assert Elementwise(weights, None).curvature(inputs, outputs) >= float(torch.linalg.eigvals(dense).real.max())


@pytest.mark.parametrize("engine", [ncl.LaplaceNCL, ncl.VariationalNCL])
def test_the_report_says_what_was_stable(engine: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 6, generator=generator)
    model = ncl.BayesianNetwork(nn.Linear(6, 1, bias=False), ncl.Normal(0.05), prior=dist.Normal(0.0, 1.0))
    task = ncl.Task((x, x[:, :1].clone()), name="a slope")
    report = ncl.OnlinePosterior(model, engine(steps=20, batch_size=200, schedule="auto")).update(task, progress=False)
    # All of the data are in every batch, so that it is known but for the targets that are drawn.
    largest = float(torch.linalg.eigvalsh(x.T @ x / 200)[-1]) / 0.05**2
    assert report.lr == pytest.approx(1 / largest, rel=0.5)
    assert report.lr < 0.05


def test_a_rate_that_is_stable_anyway_is_kept() -> None:
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    model = ncl.BayesianNetwork(nn.Linear(3, 2), ncl.Categorical(), prior=dist.Normal(0.0, 1.0))
    engine = ncl.LaplaceNCL(steps=10, lr=0.01, schedule="auto")
    report = ncl.OnlinePosterior(model, engine).update(ncl.Task((x, (x[:, 0] > 0).long()), name="a"), progress=False)
    assert report.lr == 0.01


LIKELIHOODS = {
    "narrow noise": (ncl.Normal(0.05), lambda f: f),
    "wide noise": (ncl.Normal(1.0), lambda f: f),
    "classes": (ncl.Categorical(), lambda f: (f[:, 0] > 0).long()),
    "two ways": (ncl.Bernoulli(), lambda f: (f > 0).float()),
    "counts": (ncl.Poisson(), lambda f: f.clamp(-2, 2).exp().round()),
}


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("engine", [ncl.LaplaceNCL, ncl.VariationalNCL])
def test_an_ordinary_problem_does_not_diverge(engine: Any, likelihood: str) -> None:
    torch.manual_seed(0)
    outputs = 2 if likelihood == "classes" else 1
    net = nn.Sequential(nn.Linear(20, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, outputs))
    of, target = LIKELIHOODS[likelihood]
    model = ncl.BayesianNetwork(net, of, prior=ncl.priors.scaled(1.0))
    settings: dict[str, Any] = {"steps": 80, "batch_size": 64, "likelihood_weight": "auto", "stiffness": "auto"}
    posterior = ncl.OnlinePosterior(model, engine(schedule="auto", **settings))
    for teacher in torch.randn(2, 20, 1):
        x = torch.randn(200, 20)
        report = posterior.update(ncl.Task((x, target(x @ teacher)), name=likelihood), progress=False)
        assert sum(report.losses[-10:]) < sum(report.losses[:10])


def test_what_diverges_with_the_step_of_the_paper() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 100), nn.ReLU(), nn.Linear(100, 1))
    model = ncl.BayesianNetwork(net, ncl.Normal(0.05), prior=ncl.priors.scaled(1.0))
    x = torch.randn(200, 20)
    task = ncl.Task((x, x @ torch.randn(20, 1)), name="a slope")
    with pytest.raises(NonFiniteError):
        ncl.OnlinePosterior(model, laplace(steps=150)).update(task, progress=False)


@pytest.mark.parametrize("settings", [{}, {"prior_weight": 3.0}])
def test_the_pull_of_the_prior_does_not_make_steps_diverge(settings: dict[str, float]) -> None:
    """A narrow prior and few examples, whose curvature is small beside the prior's."""
    x = torch.eye(20, 60)
    model = ncl.BayesianNetwork(nn.Linear(60, 1), ncl.Normal(0.5), prior=ncl.priors.scaled(0.1))
    task = ncl.Task((x, torch.ones(20, 1)), name="sparse")
    with pytest.raises(NonFiniteError):
        ncl.OnlinePosterior(model, laplace(steps=300, **settings)).update(task, progress=False)
    report = ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=300, **settings)).update(task, progress=False)  # type: ignore[arg-type]
    assert report.lr <= 3 * 20 / (60 / 0.1**2) / settings.get("prior_weight", 1.0)


def test_the_pull_is_measured_where_it_is_preconditioned_too() -> None:
    """P Lambda by dense algebra, of a map and of single weights."""
    left, right = positive(3, 0) @ positive(3, 1), positive(4, 2) @ positive(4, 3)
    found = TwoSided(positive(3, 4), positive(4, 5), (left, right)).pull_strength
    largest = [float(torch.linalg.eigvals(side).real.max()) for side in (left, right)]
    assert found == pytest.approx(largest[0] * largest[1], rel=1e-2)
    assert TwoSided(left, right, None).pull_strength == 1.0
    weights = torch.rand(3, 4)
    assert Elementwise(weights, 2 * weights).pull_strength == pytest.approx(2 * float(weights.max()))
    assert Elementwise(weights, None).pull_strength == 1.0


def end_of(scale: float, monkeypatch: pytest.MonkeyPatch, together: int) -> tuple[torch.Tensor, list[int]]:
    """Where the second of two tasks ends in the weights that no example of it reaches, and the pulls of each step."""
    monkeypatch.setattr(stability, "_PULLS", together)
    torch.manual_seed(0)
    x, taken = torch.eye(6).repeat(5, 1), []
    model = ncl.BayesianNetwork(nn.Linear(6, 2), ncl.Normal(1.0), prior=ncl.priors.scaled(scale))
    posterior = ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=150, stiffness=5.0))
    posterior.update(ncl.Task((x, x[:, :2].clone()), name="all"), progress=False)
    add_pull = TwoSided.add_pull

    def counted(self: TwoSided, m: torch.Tensor, theta: torch.Tensor, loc: torch.Tensor, factor: float) -> None:
        taken.append(len(m))
        add_pull(self, m, theta, loc, factor)

    monkeypatch.setattr(TwoSided, "add_pull", counted)
    posterior.update(ncl.Task((x[:2].repeat(200, 1), torch.full((400, 2), 3.0)), name="two inputs"), progress=False)
    monkeypatch.undo()
    return posterior.mean()["weight"], taken


def test_ten_pulls_at_once_end_where_one_at_a_time_does(monkeypatch: pytest.MonkeyPatch) -> None:
    one, each = end_of(100.0, monkeypatch, 1)
    ten, rare = end_of(100.0, monkeypatch, 10)
    assert (len(each), len(rare)) == (150, 15)
    torch.testing.assert_close(ten, one, rtol=1e-3, atol=1e-4)


def test_a_strong_pull_is_taken_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(end_of(0.1, monkeypatch, 10)[1]) == 150
