"""Bayesian gradient descent against its equations, and against Bayes' rule where that is known."""

from __future__ import annotations

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.methods import BGD
from tests.engines.test_laplace import classification_task, classifier


def test_its_steps_are_those_of_the_paper(drawn: list[Tensor]) -> None:
    """With the summed loss of each batch, over two tasks, in double precision with autograd."""
    tasks = [classification_task(1, examples=16), classification_task(5, examples=24)]
    model, engine = classifier(), BGD(steps=6, batch_size=24, particles=3, lr=0.7, init_scale=0.2)
    posterior = ncl.OnlinePosterior(model, engine)
    net = {name: p.detach().clone() for name, p in model.network.named_parameters()}
    for task in tasks:
        posterior.update(task)
    mu = [torch.cat([net[f"{i}.weight"], net[f"{i}.bias"][:, None]], dim=1).double() for i in (0, 2)]
    sigma = [torch.full_like(m, 0.2) for m in mu]
    noise = iter(drawn)
    for task in tasks:
        x, y = task.train
        z = F.pad(x.double(), (0, 1), value=1.0)
        for _ in range(6):
            gradients = []
            for _ in range(3):
                eps = [next(noise).double() for _ in mu]
                w, v = ((m + s * e).requires_grad_() for m, s, e in zip(mu, sigma, eps, strict=True))
                hidden = F.pad(torch.tanh(z @ w.T), (0, 1), value=1.0)
                loss = F.cross_entropy(hidden @ v.T, y, reduction="sum")
                gradients.append([(g, g * e) for g, e in zip(torch.autograd.grad(loss, (w, v)), eps, strict=True)])
            for i in (0, 1):
                g, g_eps = (torch.stack([each[i][part] for each in gradients]).mean(0) for part in (0, 1))
                mu[i] = mu[i] - 0.7 * sigma[i] ** 2 * g
                sigma[i] = sigma[i] * (1 + (sigma[i] * g_eps / 2) ** 2).sqrt() - sigma[i] ** 2 * g_eps / 2
    assert next(noise, None) is None
    for i, state in enumerate(posterior.blocks.values()):
        torch.testing.assert_close(state.loc.double(), mu[i], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state.precision.rsqrt(), sigma[i], rtol=1e-4, atol=0)
    assert any(bool((s > 0.2).any()) for s in sigma)


def test_of_many_small_batches_it_comes_to_the_exact_posterior() -> None:
    """A batch tells so little that the step's own approximation is exact; with inputs of one weight each."""
    x = 0.3 * torch.eye(3)[torch.randint(3, (600,), generator=torch.Generator().manual_seed(0))]
    model = ncl.BayesianNetwork(nn.Linear(3, 1, bias=False), ncl.Normal(0.5), prior=dist.Normal(0.0, 0.5))
    start = torch.tensor([[0.3, -0.2, 0.1]])
    posterior = ncl.OnlinePosterior(model, BGD(particles=30, init_scale=0.5), initial={"weight": start})
    found = ncl.Stream(posterior, false_alarm_every=None)
    for rows in x.split(3):
        found.observe(rows, torch.zeros(3, 1))
    (state,) = found.present().blocks.values()
    precision = 4 + x.square().sum(0) / 0.25
    torch.testing.assert_close(state.precision[0].float(), precision, rtol=0.06, atol=0)
    torch.testing.assert_close(state.loc[0], 4 * start[0] / precision, rtol=0, atol=0.02)


def test_a_step_that_explodes_leaves_every_deviation_positive() -> None:
    """Where sqrt(1 + k^2) - k rounds to 0."""
    x = torch.full((8, 2), 1e4)
    model = ncl.BayesianNetwork(nn.Linear(2, 1), ncl.Normal(0.1), prior=dist.Normal(0.0, 1.0))
    posterior = ncl.OnlinePosterior(model, BGD(steps=1, batch_size=8, lr=1e-12, init_scale=1.0, particles=1))
    posterior.update(ncl.Task((x, torch.zeros(8, 1)), name="steep"))
    for state in posterior.blocks.values():
        assert bool((state.precision > 0).all())
        assert bool(torch.isfinite(state.precision).all())
        assert float(state.precision.max()) > 1e8
