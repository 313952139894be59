"""EWC, SI and KFAC against torch's Adam on the objective as it is written, and against dense algebra."""

from __future__ import annotations

from dataclasses import replace

import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.errors import SettingError
from nclbayes.methods import EWC, KFAC, DecoupledKFAC, ReverseDecoupledKFAC, SynapticIntelligence
from tests.engines.paper import laplace
from tests.engines.test_laplace import classification_task, classifier, conjugate, regression_task


def loss(values: dict[str, Tensor], task: ncl.Task) -> Tensor:
    x, y = task.train
    h = torch.tanh(F.linear(x, values["0.weight"], values["0.bias"]))
    return F.cross_entropy(F.linear(h, values["2.weight"], values["2.bias"]), y)


def dense(state: object) -> Tensor:
    """A block's precision as a matrix over the stacked columns."""
    precision = state.precision  # type: ignore[attr-defined]
    return torch.diag(precision.mT.reshape(-1)) if isinstance(precision, Tensor) else precision.dense()


def by_torch(posterior: ncl.OnlinePosterior, task: ncl.Task, steps: int, weight: float) -> dict[str, Tensor]:
    """Torch's own Adam on mean loss + lambda / (2 N) (theta - mu)^T Lambda (theta - mu)."""
    values = {site: value.clone().requires_grad_() for site, value in posterior.mean().items()}
    adam = torch.optim.Adam(values.values(), lr=0.001)
    for _ in range(steps):
        adam.zero_grad()
        total = loss(values, task)
        for state in posterior.blocks.values():
            delta = (state.block.pack(values) - state.loc).double().mT.reshape(-1)
            total = total + weight / (2 * task.size) * (delta @ dense(state) @ delta)
        total.backward()
        adam.step()
    return {site: value.detach() for site, value in values.items()}


@pytest.mark.parametrize("engine", [EWC, KFAC])
def test_a_later_task_is_adam_on_the_penalised_mean_loss(engine: type[KFAC]) -> None:
    posterior = ncl.OnlinePosterior(classifier(), engine(steps=30, batch_size=60, fisher="exact"))
    posterior.update(classification_task(1))
    task = classification_task(7)
    expected = by_torch(posterior, task, 20, weight=30.0)
    posterior.update(task, engine=engine(steps=20, batch_size=60, prior_weight=30.0))
    for site, value in posterior.mean().items():
        torch.testing.assert_close(value, expected[site], rtol=1e-3, atol=1e-5)


def test_kfac_leaves_the_precision_that_laplace_ncl_leaves_at_the_same_weights() -> None:
    task, settings = classification_task(), {"steps": 30, "batch_size": 60, "fisher": "exact"}
    kfac = ncl.OnlinePosterior(classifier(), KFAC(**settings))  # type: ignore[arg-type]
    kfac.update(task)
    still = ncl.OnlinePosterior(classifier(), laplace(steps=1, batch_size=60, lr=1e-12, fisher="exact"))
    still = ncl.OnlinePosterior(still.model, still.engine, initial=kfac.mean())
    still.update(task)
    for name, state in kfac.blocks.items():
        torch.testing.assert_close(dense(state), dense(still.blocks[name]), rtol=1e-5, atol=1e-6)


def test_kfac_ends_where_bayes_rule_ends() -> None:
    """Its objective is that of Laplace-NCL: for a linear model with Gaussian noise, the exact posterior mean."""
    tasks = [regression_task(seed) for seed in range(2)]
    model = ncl.BayesianNetwork(nn.Linear(3, 1), ncl.Normal(0.5), prior=dist.Normal(0.0, 2.0))
    engine = KFAC(steps=1500, batch_size=40, lr=0.02, fisher="exact", schedule=lambda done: (1 - done) ** 2)
    posterior = ncl.OnlinePosterior(model, engine)
    for k, task in enumerate(tasks):
        posterior.update(task)
        mean, precision = conjugate(tasks[: k + 1], 0.5, 2.0)
        (state,) = posterior.blocks.values()
        torch.testing.assert_close(state.loc.double(), mean.T, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(dense(state), precision, rtol=1e-4, atol=1e-4)


def test_decoupled_adam_with_equal_weights_is_adam() -> None:
    ends = []
    for engine in (
        KFAC(steps=15, batch_size=60, prior_weight=7.0),
        DecoupledKFAC(steps=15, batch_size=60, prior_weight=7.0, preconditioner_weight=7.0),
        ReverseDecoupledKFAC(steps=15, batch_size=60, prior_weight=7.0, preconditioner_weight=1.0),
    ):
        posterior = ncl.OnlinePosterior(classifier(), engine)
        for seed in (1, 7):
            posterior.update(classification_task(seed))
        ends.append(posterior.mean())
    for site in ends[0]:
        assert torch.equal(ends[0][site], ends[1][site])
    assert any(not torch.allclose(ends[0][site], ends[2][site]) for site in ends[0])


def test_decoupled_adam_by_its_equations() -> None:
    posterior = ncl.OnlinePosterior(classifier(), KFAC(steps=30, batch_size=60))
    posterior.update(classification_task(1))
    before, task = dict(posterior.blocks), classification_task(7)
    theta = {name: state.loc.double() for name, state in before.items()}
    m = {name: torch.zeros_like(t) for name, t in theta.items()}
    v = {name: torch.zeros_like(t) for name, t in theta.items()}
    for i in range(1, 6):
        values: dict[str, Tensor] = {}
        for name, state in before.items():
            values |= state.block.unpack(theta[name].float())
        leaves = {site: value.requires_grad_() for site, value in values.items()}
        grads = dict(zip(leaves, torch.autograd.grad(loss(leaves, task), list(leaves.values())), strict=True))
        for name, state in before.items():
            g = state.block.pack(grads).double()
            pull = (dense(state) @ (theta[name] - state.loc).mT.reshape(-1)).reshape(g.mT.shape).mT / task.size
            m[name] = 0.9 * m[name] + 0.1 * (g + 2.0 * pull)
            v[name] = 0.999 * v[name] + 0.001 * (g + 50.0 * pull).square()
            theta[name] = theta[name] - 0.001 * (m[name] / (1 - 0.9**i)) / ((v[name] / (1 - 0.999**i)).sqrt() + 1e-8)
    posterior.update(task, engine=DecoupledKFAC(steps=5, batch_size=60, prior_weight=2.0, preconditioner_weight=50.0))
    for name, state in posterior.blocks.items():
        torch.testing.assert_close(state.loc.double(), theta[name], rtol=1e-3, atol=1e-5)


def test_ewc_adds_the_diagonal_of_the_fisher_and_lets_it_fade() -> None:
    task = classification_task()
    posterior = ncl.OnlinePosterior(classifier(), EWC(steps=10, batch_size=60, fisher="exact", decay=0.5))
    expected = {}
    for seed in (1, 7):
        task = classification_task(seed)
        posterior.update(task)
        accumulator = ncl.FisherAccumulator(posterior.model, posterior.mean(), kind="exact", diagonal=True)
        accumulator.update(task.train)
        for name, fisher in accumulator.factors().items():
            # the prior, of precision 1, does not fade before the first task
            expected[name] = (0.5 * expected[name] if name in expected else 1.0) + fisher.diagonal  # type: ignore[union-attr]
    for name, state in posterior.blocks.items():
        torch.testing.assert_close(state.precision, expected[name], rtol=1e-5, atol=1e-6)


def test_si_sums_what_each_step_did_for_the_loss() -> None:
    task = classification_task()
    posterior = ncl.OnlinePosterior(classifier(), SynapticIntelligence(steps=12, batch_size=60, damping=0.05))
    values = {site: v.clone().requires_grad_() for site, v in posterior.model.initial_values().items()}
    start = {site: v.detach().clone() for site, v in values.items()}
    adam = torch.optim.Adam(values.values(), lr=0.001)
    path = {site: torch.zeros_like(v) for site, v in values.items()}
    for _ in range(12):
        gradient = dict(zip(values, torch.autograd.grad(loss(values, task), list(values.values())), strict=True))
        before = {site: v.detach().clone() for site, v in values.items()}
        for site, v in values.items():
            v.grad = gradient[site] + before[site] / task.size  # the prior has precision 1
        adam.step()
        for site, v in values.items():
            path[site] -= gradient[site] * (v.detach() - before[site])
    posterior.update(task)
    for state in posterior.blocks.values():
        way = state.block.pack({site: values[site].detach() - start[site] for site in values})
        omega = state.block.pack(path).clamp(min=0) / (way.square() + 0.05)
        expected = 1 + 2 * task.size * omega.double()
        torch.testing.assert_close(state.precision, expected, rtol=1e-3, atol=1e-3)
        assert float(expected.max()) > 1.5


def test_the_penalty_of_si_does_not_depend_on_the_size_of_the_next_task() -> None:
    x, y = classification_task(2).train
    moved = []
    for repeats in (1, 5):
        posterior = ncl.OnlinePosterior(classifier(prior=1e4), SynapticIntelligence(steps=30, batch_size=60))
        posterior.update(classification_task(1))
        repeated = ncl.Task((x.repeat(repeats, 1), y.repeat(repeats)), name="again")
        # From the second step on the penalty pulls.
        engine = SynapticIntelligence(steps=6, batch_size=60 * repeats, prior_weight=1e3)
        posterior.update(repeated, engine=engine)
        posterior.update(repeated, engine=engine)
        moved.append(posterior.mean()["0.weight"])
    torch.testing.assert_close(moved[0], moved[1])


def test_si_knows_its_precisions_again_by_their_bits() -> None:
    posterior = ncl.OnlinePosterior(classifier(), SynapticIntelligence(steps=5))
    posterior.update(classification_task(0))
    for name, state in posterior.blocks.items():
        left = int(posterior.memory[f"si/{name}/left"][1])
        assert state.fingerprint() == left
        assert replace(state, precision=state.precision.mT.contiguous().mT).fingerprint() == left
        # The same numbers elsewhere, whose sum is the same.
        assert replace(state, precision=state.precision.flip(0)).fingerprint() != left
        assert replace(state, loc=state.loc.nextafter(state.loc + 1)).fingerprint() != left


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        (EWC, {"decay": 0.0}),
        (KFAC, {"second_momentum": 1.0}),
        (KFAC, {"epsilon": 0.0}),
        (DecoupledKFAC, {"preconditioner_weight": -1.0}),
        (SynapticIntelligence, {"damping": 0.0}),
    ],
)
def test_settings_out_of_range_are_refused(engine: type[KFAC], settings: dict[str, float]) -> None:
    with pytest.raises(SettingError, match=next(iter(settings))):
        engine(**settings)  # type: ignore[arg-type]
