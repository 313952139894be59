"""Natural variational NCL against its update equations, by dense algebra with the same noise."""

from __future__ import annotations

import math

import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.errors import SettingError
from tests.engines.paper import laplace, variational
from tests.engines.test_laplace import before_a_second_task, classification_task, classifier, conjugate, regression_task


@pytest.mark.parametrize(
    ("weight", "count"),
    [pytest.param(4.0, 2, marks=pytest.mark.slow), pytest.param(1.0, 2, marks=pytest.mark.exhaustive)],
)
def test_the_linear_gaussian_mean_is_exact_after_every_task(weight: float, count: int) -> None:
    tasks = [regression_task(seed) for seed in range(count)]
    model = ncl.BayesianNetwork(nn.Linear(3, 1), ncl.Normal(0.5), prior=dist.Normal(0.0, 2.0))
    posterior = ncl.OnlinePosterior(model, laplace())
    for k, task in enumerate(tasks):
        # the noise of the samples averages out as the learning rate falls
        engine = variational(
            steps=1500,
            batch_size=40,
            lr=0.1 if k == 0 else 0.4,
            particles=2,
            fisher="exact",
            beta=0.05,
            likelihood_weight=weight,
            schedule=lambda done: (1 - done) ** 2,
        )
        posterior.update(task, engine=engine)
        mean, precision = conjugate(tasks[: k + 1], 0.5 / math.sqrt(weight), 2.0)
        (state,) = posterior.blocks.values()
        torch.testing.assert_close(state.loc.double(), mean.T, rtol=0.01, atol=0.01)
        found = torch.kron(state.precision.input, state.precision.output)
        torch.testing.assert_close(found, precision, rtol=1e-4, atol=1e-3)


def vector(matrix: Tensor) -> Tensor:
    return matrix.mT.reshape(-1)


def test_one_step_moves_mean_and_precision_as_the_equations_say() -> None:
    """One particle, one full batch, exact Fisher: everything is known given the noise, which is drawn again here."""
    posterior, task = before_a_second_task()
    before = dict(posterior.blocks)
    x, y = task.train
    engine = variational(steps=1, batch_size=60, beta=0.3, fisher="exact", kronecker_sum="kl")
    posterior.update(task, engine=engine, generator=torch.Generator().manual_seed(11))

    # the same noise: the batch's order is drawn first, then eps block by block
    g = torch.Generator().manual_seed(11)
    order = torch.randperm(60, generator=g)
    sites = {}
    for state in before.values():
        eps = torch.randn(state.loc.shape, generator=g)
        p = state.precision
        theta = state.loc.double() + p.output_root @ eps.double() @ p.input_root.mT
        # whatever root: the draw's covariance is Lambda^-1
        cov = torch.kron(p.input_root @ p.input_root.mT, p.output_root @ p.output_root.mT)
        torch.testing.assert_close(cov, torch.linalg.inv(torch.kron(p.input, p.output)), rtol=1e-6, atol=1e-9)
        sites |= state.block.unpack(theta)
    leaves = {k: v.clone().requires_grad_() for k, v in sites.items()}
    hidden = torch.tanh(F.linear(x.double()[order], leaves["0.weight"], leaves["0.bias"]))
    loss = F.cross_entropy(F.linear(hidden, leaves["2.weight"], leaves["2.bias"]), y[order], reduction="sum")
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    fisher = ncl.fisher(posterior.model, {k: v.float() for k, v in sites.items()}, task.train, kind="exact")
    for name, state in before.items():
        dense = torch.kron(state.precision.input, state.precision.output)
        natural = torch.linalg.solve(dense, vector(state.block.pack(grads)))
        expected = vector(state.loc.double()) - 0.05 * math.exp(state.log_scale) / 60 * natural
        torch.testing.assert_close(vector(posterior.blocks[name].loc.double()), expected, rtol=1e-4, atol=1e-6)
        # Lambda <- (1 - beta) Lambda + beta (Lambda + F) = Lambda + beta F, as one Kronecker product
        total = ncl.kronecker_sum(
            state.precision.input, state.precision.output, fisher[name].input, 0.3 * fisher[name].output, rtol=1e-5
        )
        torch.testing.assert_close(posterior.blocks[name].precision.dense(), total.dense(), rtol=1e-4, atol=1e-4)


def test_the_precision_ends_at_the_old_one_plus_the_averaged_fisher() -> None:
    model, task = classifier(), classification_task()
    posterior = ncl.OnlinePosterior(model, laplace(steps=200, batch_size=60))
    posterior.update(classification_task(1))
    before = dict(posterior.blocks)
    engine = variational(
        steps=1000, batch_size=60, beta=0.005, lr=1e-6, fisher="exact", refresh_every=10, kronecker_sum="kl"
    )
    posterior.update(task, engine=engine)
    # the mean hardly moves: average the Fisher over samples of the final posterior, whose factors average side by side
    draws = posterior.sample(200, generator=torch.Generator().manual_seed(3))
    fishers = [ncl.fisher(model, {k: v[i] for k, v in draws.items()}, task.train, kind="exact") for i in range(200)]
    for name, state in before.items():
        A = torch.stack([f[name].input for f in fishers]).mean(0)
        G = torch.stack([f[name].output for f in fishers]).mean(0)
        total = ncl.kronecker_sum(state.precision.input, state.precision.output, A, G, rtol=1e-5)
        found = posterior.blocks[name].precision
        trace = lambda p: float(p.input.trace() * p.output.trace())  # noqa: E731
        assert trace(found) == pytest.approx(trace(total), rel=0.03), name
        assert float(found.logdet) == pytest.approx(float(total.logdet), abs=0.03 * state.block.size), name


def elbo(posterior: ncl.OnlinePosterior, before: dict[str, object], task: ncl.Task, draws: int) -> float:
    """E_q[log p(D|theta)] - KL(q || q_prev), by samples."""
    x, y = task.train
    samples = posterior.sample(draws, generator=torch.Generator().manual_seed(5))
    fit = 0.0
    for i in range(draws):
        hidden = torch.tanh(F.linear(x, samples["0.weight"][i], samples["0.bias"][i]))
        out = F.linear(hidden, samples["2.weight"][i], samples["2.bias"][i])
        fit -= float(F.cross_entropy(out, y, reduction="sum")) / draws
    kl = sum(
        float(torch.distributions.kl_divergence(posterior.blocks[n].distribution, s.distribution))  # type: ignore[attr-defined]
        for n, s in before.items()
    )
    return fit - kl


def test_the_evidence_lower_bound_rises_over_an_update() -> None:
    model = classifier()
    posterior = ncl.OnlinePosterior(model, laplace(steps=200, batch_size=60))
    posterior.update(classification_task(1))
    before, task = dict(posterior.blocks), classification_task(7)
    start = elbo(posterior, before, task, 400)
    values = [start]
    for steps in (30, 400):
        other = ncl.OnlinePosterior(model, laplace())
        other._belief = posterior._belief
        other.update(task, engine=variational(steps=steps, batch_size=60, beta=0.05, particles=2, lr=0.1))
        values.append(elbo(other, before, task, 400))
    assert values[0] < values[1] < values[2], values


@pytest.mark.slow
def test_a_narrow_start_is_forgotten() -> None:
    task = classification_task()
    ends = []
    for init_scale in (0.01, 0.1):
        posterior = ncl.OnlinePosterior(classifier(), laplace())
        engine = variational(steps=700, batch_size=60, beta=0.05, init_scale=init_scale, lr=0.1)
        posterior.update(task, engine=engine)
        ends.append(sum(state.logdet for state in posterior.blocks.values()))
    assert ends[0] == pytest.approx(ends[1], abs=3.0)


def test_particles_share_the_work_and_the_same_seed_gives_the_same_posterior() -> None:
    def run(seed: int) -> dict[str, Tensor]:
        posterior = ncl.OnlinePosterior(
            classifier(), variational(steps=40, batch_size=20, particles=3, refresh_every=7)
        )
        state = torch.get_rng_state()
        posterior.update(classification_task(), generator=torch.Generator().manual_seed(seed))
        assert torch.equal(state, torch.get_rng_state())
        return posterior.mean()

    first, second, third = run(1), run(1), run(2)
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert not all(torch.equal(first[k], third[k]) for k in first)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.0}, "beta must be above 0"),
        ({"beta": 1.0}, "beta must be above 0"),
        ({"particles": 0}, "particles must be"),
        ({"refresh_every": 1.5}, "refresh_every must be"),
        ({"init_scale": -1}, "init_scale must be positive"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        variational(**settings)  # type: ignore[arg-type]
