"""Gradients left as rows against gradients multiplied out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.blocks import find_blocks
from nclbayes.engines.likelihood import block_gradients, log_likelihood
from nclbayes.engines.steps import BlockSteps
from nclbayes.gaussians import KroneckerState, Structure, preconditioners, prior_state
from nclbayes.gaussians.gradients import RowGradient, rows_of_blocks
from nclbayes.kronecker import KroneckerPrecision
from nclbayes.watch import ModelRun, watch
from tests.zoo import ZOO, Case, inputs, labels


@pytest.fixture
def always_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preconditioners, "_WORTH", -torch.inf)


def positive(size: int, seed: int) -> Tensor:
    root = torch.randn(size, 2 * size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.T / size


def seen(case: Case, structure: Structure = Structure.KRONECKER) -> tuple[ModelRun, list[BlockSteps]]:
    """A run, and steps from Gaussians whose weights are correlated."""
    run = watch(case.model, case.batch, case.values, case.context)
    blocks = []
    for block in find_blocks(run).values():
        state = prior_state(block, run.latents, structure)
        if isinstance(state, KroneckerState) and state.loc.ndim == 2:
            m, n = state.loc.shape
            state = replace(state, precision=KroneckerPrecision.factorise(positive(n, 1), positive(m, 2)))
        blocks.append(BlockSteps(ncl.LaplaceNCL(momentum=0.0, prior_weight=0.0), state, state.loc, size=1))
    return run, blocks


@pytest.mark.usefixtures("always_rows")
@pytest.mark.parametrize("name", ZOO)
def test_rows_make_the_same_step(name: str) -> None:
    run, blocks = seen(ZOO[name]())
    value = log_likelihood(run.observed)
    sites = list(run.latents)
    leaves = [run.latents[site].value for site in sites]
    grads = torch.autograd.grad(value, leaves, retain_graph=True, materialize_grads=True)
    autograd = dict(zip(sites, grads, strict=True))
    found = block_gradients(value, run, blocks)
    assert list(found) == [steps.name for steps in blocks]
    for steps in blocks:
        expected = steps.direction(steps.state.block.pack(autograd), run.examples).clone()
        step = steps.direction(found[steps.name], run.examples)
        torch.testing.assert_close(step, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    plain = rows_of_blocks(run, (steps.state.block for steps in blocks))
    assert {name for name, gradient in found.items() if isinstance(gradient, RowGradient)} == set(plain)


def test_convolutions_and_weights_that_are_also_transposed_have_no_rows() -> None:
    for name, plain in {"cnn": {"net.5"}, "tied": {"w"}}.items():
        run, blocks = seen(ZOO[name]())
        rows = rows_of_blocks(run, (steps.state.block for steps in blocks))
        assert rows.keys() == plain, name


def test_every_step_of_a_sequence_is_a_row() -> None:
    case = ZOO["sequences"]()
    run, blocks = seen(case)
    batch, time, _ = case.batch[0].shape
    rows = rows_of_blocks(run, (steps.state.block for steps in blocks))
    assert set(rows.values()) == {batch * time}


def test_rows_are_preferred_while_they_are_few() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(400, 784), 1.0).to_event(2))
        v = pyro.sample("v", dist.Normal(torch.zeros(10, 400), 1.0).to_event(2))
        pyro.sample("y", dist.Categorical(logits=F.linear(F.linear(x, w), v)), obs=y)

    case = Case(model, {}, (inputs(4, 784), labels(10, 4)))
    _, (wide, narrow) = seen(case)
    assert wide.prefers_rows(256)
    assert not wide.prefers_rows(512)
    assert not narrow.prefers_rows(1)
    _, (independent, _) = seen(case, Structure.DIAGONAL)
    assert not independent.prefers_rows(1)


def test_before_the_first_task_a_step_multiplies_no_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preconditioners, "_WORTH", -torch.inf)
    case = ZOO["functional"]()
    run = watch(case.model, case.batch, case.values)
    for block in find_blocks(run).values():
        state = prior_state(block, run.latents, Structure.KRONECKER)
        steps = BlockSteps(ncl.LaplaceNCL(momentum=0.0, prior_weight=0.0), state, state.loc, size=1)
        assert not steps.prefers_rows(1)
        gradient = torch.randn(state.loc.shape, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(steps.direction(gradient, 2), -gradient / 2)


def small_problem() -> tuple[ncl.BayesianNetwork, list[ncl.Task]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    model = ncl.BayesianNetwork(net, ncl.Categorical(), prior=dist.Normal(0.0, torch.tensor(1.0).double()))
    tasks = [ncl.Task((inputs(60, 5, seed=s).double(), labels(3, 60, seed=s)), name=f"classes {s}") for s in (1, 2)]
    return model, tasks


@pytest.mark.parametrize(
    "engine",
    [
        lambda: ncl.LaplaceNCL(steps=20, batch_size=16, lr=0.1),
        lambda: ncl.VariationalNCL(steps=20, batch_size=16, lr=0.1),
        lambda: ncl.VariationalNCL(steps=20, batch_size=16, lr=0.1, particles=3),
    ],
    ids=["laplace", "variational", "particles"],
)
def test_both_forms_learn_the_same(engine: Callable[[], ncl.engines.Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for worth in (torch.inf, -torch.inf):
        monkeypatch.setattr(preconditioners, "_WORTH", worth)
        model, tasks = small_problem()
        posterior = ncl.OnlinePosterior(model, engine(), generator=torch.Generator().manual_seed(0))
        losses = [loss for task in tasks for loss in posterior.update(task).losses]
        found.append((losses, posterior.mean()))
    (losses, mean), (losses_by_rows, mean_by_rows) = found
    assert losses == pytest.approx(losses_by_rows, rel=1e-7)
    for site, value in mean.items():
        torch.testing.assert_close(mean_by_rows[site], value, rtol=1e-7, atol=1e-8)


@pytest.mark.usefixtures("always_rows")
def test_a_head_that_a_task_does_not_use_stays() -> None:
    net = ncl.MultiHead(nn.Linear(5, 8), [nn.Linear(8, 3), nn.Linear(8, 3)])
    model = ncl.BayesianNetwork(net, ncl.Categorical(), prior=dist.Normal(0.0, 1.0))
    posterior = ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=5, batch_size=16))
    for head in (0, 1):
        posterior.update(ncl.Task((inputs(60, 5), labels(3, 60)), name=str(head), context={"head": head}))
        if head == 0:
            before = {site: value.clone() for site, value in posterior.mean().items() if "heads.0" in site}
    assert before
    assert all(torch.equal(posterior.mean()[site], value) for site, value in before.items())
