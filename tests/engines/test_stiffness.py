"""How firmly an engine holds on, apart from what is believed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.errors import SettingError
from nclbayes.kronecker import KroneckerPrecision
from nclbayes.methods import EWC, KFAC, OWM, DiagonalNCL, PlainTraining
from tests.engines.paper import laplace
from tests.engines.test_laplace import before_a_second_task, classification_task, classifier, conjugate, regression_task
from tests.zoo import gains, inputs, labels


def test_a_step_is_the_gradient_of_the_posterior_in_the_stiffened_metric() -> None:
    """theta <- theta + lr (tau / N) P [grad log p - Lambda (theta - mu)], here by dense algebra, in float64."""
    posterior, task = before_a_second_task()
    before, weights = dict(posterior.blocks), posterior.mean()
    x, y = task.train
    engine = laplace(steps=2, batch_size=len(x), lr=0.3, momentum=0.5, alpha=0.0, stiffness=20.0)
    posterior.update(task, engine=engine, progress=False)
    (prior_scale,) = {float(p.base_dist.scale.flatten()[0]) for p in posterior.model._site_priors().values()}
    theta = {name: state.loc.double() for name, state in before.items()}
    momentum = {name: torch.zeros_like(value) for name, value in theta.items()}
    for _ in range(2):
        leaves = {site: value.clone().requires_grad_() for site, value in _sites(before, theta, weights).items()}
        logits = torch.func.functional_call(posterior.model.network, leaves, (x,))
        fit = -nn.functional.cross_entropy(logits, y, reduction="sum")
        grads = dict(zip(leaves, torch.autograd.grad(fit, list(leaves.values())), strict=True))
        for name, state in before.items():
            m, n = state.loc.shape
            identity = [torch.eye(k).double() for k in (n, m)]
            prior = KroneckerPrecision.factorise(identity[0] / prior_scale**2, identity[1])
            held = ncl.kronecker.stiffen(state.precision, prior, 20.0)
            delta = theta[name] - state.loc.double()
            total = state.block.pack({s: grads[s] for s in state.block.sites}).double() - state.precision.times(delta)
            step = held.output_inverse @ total @ held.input_inverse / prior_scale**2 / len(x)
            momentum[name] = 0.5 * momentum[name] + step
            theta[name] = theta[name] + 0.3 * momentum[name]
    for name, state in posterior.blocks.items():
        torch.testing.assert_close(state.loc.double(), theta[name], rtol=1e-4, atol=1e-6)


def _sites(
    states: dict[str, ncl.posterior.State], theta: dict[str, Tensor], like: dict[str, Tensor]
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, state in states.items():
        found |= {site: value.to(like[site]) for site, value in state.block.unpack(theta[name]).items()}
    return found


@pytest.mark.parametrize("stiffness", [3.0, 100.0])
def test_the_fixed_point_is_that_of_bayes_rule_however_firm_the_hold(stiffness: float) -> None:
    tasks = [regression_task(seed) for seed in range(3)]
    model = ncl.BayesianNetwork(nn.Linear(3, 1), ncl.Normal(0.5), prior=dist.Normal(0.0, 2.0))
    posterior = ncl.OnlinePosterior(
        model, ncl.LaplaceNCL(steps=500, lr=0.4, batch_size=40, fisher="exact", stiffness=stiffness)
    )
    for k, task in enumerate(tasks):
        posterior.update(task, engine=None if k else ncl.LaplaceNCL(steps=400, batch_size=40, fisher="exact"))
    mean, precision = conjugate(tasks, 0.5, 2.0)
    (state,) = posterior.blocks.values()
    torch.testing.assert_close(state.loc.double(), mean.T, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        torch.kron(state.precision.input, state.precision.output), precision, rtol=1e-5, atol=1e-3
    )


def moves(posterior: ncl.OnlinePosterior, task: ncl.Task) -> dict[str, float]:
    """How far each site moves when a task is learnt."""
    before = posterior.mean()
    posterior.update(task, progress=False)
    return {site: float((value - before[site]).norm()) for site, value in posterior.mean().items()}


@pytest.mark.parametrize("engine", [ncl.LaplaceNCL, ncl.VariationalNCL, DiagonalNCL])
def test_the_stiffer_the_less_weights_move(engine: type[ncl.LaplaceNCL]) -> None:
    moved = []
    for stiffness in (1.0, 100.0, 1e4):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        model = ncl.BayesianNetwork(net, ncl.Categorical(), prior=ncl.priors.scaled(1.0))
        settings = engine(steps=50, batch_size=60, stiffness=stiffness, likelihood_weight=30.0)
        posterior = ncl.OnlinePosterior(model, settings)
        posterior.update(classification_task(), progress=False)
        moved.append(moves(posterior, classification_task(seed=5)))
    assert all(moved[0][site] > moved[1][site] > 3 * moved[2][site] for site in moved[0])


def test_weights_that_are_no_linear_map_are_held_too() -> None:
    case, moved = gains(), []
    for stiffness in (1.0, 1e4):
        posterior = ncl.OnlinePosterior(case.model, ncl.LaplaceNCL(steps=20, lr=0.001, stiffness=stiffness))
        posterior.update(ncl.Task(case.batch, name="first"), progress=False)
        moved.append(moves(posterior, ncl.Task(case.batch, name="again")))
    assert all(moved[1][site] < 0.5 * moved[0][site] for site in moved[0])


@pytest.mark.parametrize("method", [EWC, KFAC, OWM, PlainTraining])
def test_methods_without_one_refuse_it(method: type[ncl.LaplaceNCL]) -> None:
    with pytest.raises(SettingError, match="knows no stiffness"):
        method(stiffness=10.0)


def shifted(seed: int) -> ncl.Task:
    """Many classes by chance: hard to learn, where earlier tasks of the same inputs are held."""
    x = inputs(60, 5, seed=seed)
    return ncl.Task((x, labels(3, 60, seed=seed + 1)), name=f"shifted {seed}")


def test_auto_softens_while_a_task_is_not_learnt_and_that_pays() -> None:
    engine = ncl.LaplaceNCL(steps=200, batch_size=60, lr=0.2, stiffness="auto", enough=0.97, likelihood_weight=1e6)
    posterior = ncl.OnlinePosterior(classifier(), engine)
    assert posterior.update(shifted(0), progress=False).stiffness == 200.0
    report = posterior.update(shifted(0), progress=False)
    assert report.stiffness == 50.0, "learnt already: nothing can pay, and only once more it is tried"
    hard = posterior.update(shifted(7), progress=False)
    assert hard.stiffness is not None
    assert hard.stiffness < 100.0
    fixed = replace(engine, stiffness=200.0)
    held = ncl.OnlinePosterior(classifier(), engine)
    held.update(shifted(0), progress=False)
    held.update(shifted(0), progress=False)
    assert hard.losses[-1] < held.update(shifted(7), engine=fixed, progress=False).losses[-1]


def test_a_task_that_is_learnt_early_is_held_firmly_to_the_end() -> None:
    engine = ncl.LaplaceNCL(steps=400, batch_size=60, stiffness="auto", enough=0.5, likelihood_weight=1e6)
    posterior = ncl.OnlinePosterior(classifier(), engine)
    few = inputs(60, 5, seed=1) * torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])
    posterior.update(ncl.Task((few, (few[:, 0] > 0).long()), name="first"), progress=False)
    x = 5 * inputs(60, 5, seed=5) * torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0])
    report = posterior.update(ncl.Task((x, (x[:, 1] > 0).long()), name="easy"), progress=False)
    assert report.stopped_early
    assert report.stiffness == 200.0


@pytest.mark.parametrize("step", [59, 61])
def test_a_task_that_was_interrupted_when_it_had_softened_ends_where_it_would_have(tmp_path: Path, step: int) -> None:
    engine = ncl.LaplaceNCL(steps=100, batch_size=20, stiffness="auto", likelihood_weight=1e6)
    whole, parted = (ncl.OnlinePosterior(classifier(), engine) for _ in range(2))
    for posterior in (whole, parted):
        posterior.update(shifted(0), progress=False)
    report = whole.update(shifted(7), progress=False)

    def interrupt(progress: ncl.engines.Progress) -> None:
        if progress.step == step:
            raise KeyboardInterrupt

    settings: dict[str, Any] = {"checkpoint": tmp_path / "snapshot", "checkpoint_every": 1, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        parted.update(shifted(7), callbacks=[interrupt], **settings)
    again = parted.update(shifted(7), **settings)
    assert (again.losses, again.stiffness) == (report.losses, report.stiffness)
    assert report.stiffness is not None
    assert report.stiffness < 100
    assert all(torch.equal(value, parted.mean()[site]) for site, value in whole.mean().items())


def test_auto_is_kept_in_a_file(tmp_path: Path) -> None:
    posterior = ncl.OnlinePosterior(classifier(), ncl.LaplaceNCL(steps=3, stiffness="auto"))
    posterior.update(classification_task(), progress=False)
    posterior.save(tmp_path / "posterior.ncl")
    again = ncl.OnlinePosterior.load(tmp_path / "posterior.ncl", classifier())
    assert again.engine.stiffness == "auto"


@pytest.mark.parametrize("stiffness", [0.0, -1.0, "much"])
def test_it_is_a_positive_number(stiffness: object) -> None:
    with pytest.raises(SettingError, match="stiffness must be positive"):
        ncl.LaplaceNCL(stiffness=stiffness)  # type: ignore[arg-type]
