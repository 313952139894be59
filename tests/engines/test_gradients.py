"""Gradients left as rows against gradients multiplied out."""

from __future__ import annotations

from collections.abc import Callable

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.blocks import find_blocks
from nclbayes.engines import gradients
from nclbayes.engines.gradients import RowGradient, block_gradients, rows_of_blocks, rows_pay
from nclbayes.engines.likelihood import log_likelihood
from nclbayes.state import State, Structure, prior_state
from nclbayes.watch import ModelRun, watch
from tests.zoo import ZOO, Case, inputs, labels


@pytest.fixture
def always_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "_WORTH", -torch.inf)


def seen(case: Case, structure: Structure = Structure.KRONECKER) -> tuple[ModelRun, dict[str, State]]:
    run = watch(case.model, case.batch, case.values, case.context)
    return run, {name: prior_state(block, run.latents, structure) for name, block in find_blocks(run).items()}


def positive(size: int, seed: int) -> Tensor:
    root = torch.randn(size, 2 * size, generator=torch.Generator().manual_seed(seed))
    return root @ root.T / size


@pytest.mark.usefixtures("always_rows")
@pytest.mark.parametrize("name", ZOO)
def test_preconditioned_rows_are_the_preconditioned_gradient(name: str) -> None:
    case = ZOO[name]()
    run, states = seen(case)
    sites = list(run.latents)
    value = log_likelihood(run.observed)
    leaves = [run.latents[site].value for site in sites]
    autograd = dict(
        zip(sites, torch.autograd.grad(value, leaves, retain_graph=True, materialize_grads=True), strict=True)
    )
    found = block_gradients(value, run, states)
    assert found.keys() == states.keys()
    for block, gradient in found.items():
        expected = states[block].block.pack(autograd)
        if isinstance(gradient, RowGradient):
            m, n = expected.shape
            left, right = positive(m, 0), positive(n, 1)
            expected = left @ expected @ right
            gradient = sum((a @ b for a, b in gradient.between(left, right)), torch.zeros(m, n))
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_convolutions_and_weights_that_are_also_transposed_have_no_rows() -> None:
    for name, plain in {"cnn": {"net.5"}, "tied": {"w"}}.items():
        run, states = seen(ZOO[name]())
        rows = rows_of_blocks(run, (state.block for state in states.values()))
        assert rows.keys() == plain, name


def test_every_step_of_a_sequence_is_a_row() -> None:
    case = ZOO["sequences"]()
    run, states = seen(case)
    batch, time, _ = case.batch[0].shape
    rows = rows_of_blocks(run, (state.block for state in states.values()))
    assert set(rows.values()) == {batch * time}


def test_rows_pay_while_they_are_few() -> None:
    net = nn.Sequential(nn.Linear(784, 400), nn.Tanh(), nn.Linear(400, 10))
    model = ncl.BayesianNetwork(net, ncl.Categorical(), prior=dist.Normal(0.0, 1.0))
    run = watch(model, (inputs(4, 784), labels(10, 4)))
    wide, narrow = (prior_state(b, run.latents, Structure.KRONECKER) for b in find_blocks(run).values())
    assert rows_pay(wide, 256)
    assert not rows_pay(wide, 512)
    assert not rows_pay(narrow, 1)
    assert not rows_pay(prior_state(wide.block, run.latents, Structure.DIAGONAL), 1)


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
        monkeypatch.setattr(gradients, "_WORTH", worth)
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
