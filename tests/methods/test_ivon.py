"""IVON against the package of its authors, against its equations, and where the posterior is known."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.methods import IVON
from tests.engines.test_laplace import classification_task, classifier


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"particles": 3, "second_momentum": 0.9, "hess_init": 0.3},
        {"rescale_lr": False, "momentum": 0.5, "second_momentum": 0.99},
        {"debias": False, "clip_radius": 0.02, "second_momentum": 0.99},
    ],
)
def test_under_the_prior_of_the_model_it_is_the_package_of_its_authors(
    settings: dict[str, Any], drawn: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same noise, step by step."""
    ivon = pytest.importorskip("ivon")
    task, model = classification_task(1, examples=30), classifier(prior=0.7)
    x, y = task.train
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    net.load_state_dict(model.initial_values())
    steps: list[dict[str, Tensor]] = []
    engine = IVON(steps=12, batch_size=30, lr=0.2, **settings)
    posterior = ncl.OnlinePosterior(model, engine)
    posterior.update(task, callbacks=[lambda progress: steps.append(progress.values())])
    radius = float("inf") if engine.clip_radius is None else engine.clip_radius
    theirs = ivon.IVON(
        net.parameters(),
        lr=0.2,
        ess=30.0,
        hess_init=engine.hess_init,
        beta1=engine.momentum,
        beta2=engine.second_momentum,
        weight_decay=1 / (0.49 * 30),
        mc_samples=engine.particles,
        clip_radius=radius,
        debias=engine.debias,
        rescale_lr=engine.rescale_lr,
    )
    noise, states = iter(drawn), list(posterior.blocks.values())

    def same_noise(*size: int, **_: Any) -> Tensor:
        values: dict[str, Tensor] = {}
        for state in states:
            values |= state.block.unpack(next(noise))
        return torch.cat([values[name].flatten() for name, _ in net.named_parameters()])

    def loss() -> Tensor:
        with theirs.sampled_params(train=True):
            theirs.zero_grad()
            found = F.cross_entropy(net(x), y)
            found.backward()
        return found

    with monkeypatch.context() as patched:
        patched.setattr(torch, "randn", same_noise)
        for ours in steps:
            theirs.step(loss)
            for name, value in net.named_parameters():
                torch.testing.assert_close(ours[name], value.detach(), rtol=1e-5, atol=1e-6)
    assert next(noise, None) is None
    (group,) = theirs.param_groups
    hess = dict(
        zip(dict(net.named_parameters()), group["hess"].split([p.numel() for p in net.parameters()]), strict=True)
    )
    for state in states:
        expected = state.block.pack(
            {site: hess[site].reshape(shape) for site, shape in state.block.site_shapes.items()}
        )
        precision = 30 * (expected.double() + 1 / (0.49 * 30))
        torch.testing.assert_close(state.precision, precision, rtol=1e-4, atol=0)


def test_a_later_task_has_the_posterior_before_it_as_its_prior(drawn: list[Tensor]) -> None:
    """The equations in double precision, with a mean and a precision for each weight, and a tempered posterior."""
    first, second = classification_task(1, examples=16), classification_task(5, examples=24)
    engine = IVON(steps=5, batch_size=24, particles=2, second_momentum=0.9, hess_init=0.4, prior_weight=0.5)
    posterior = ncl.OnlinePosterior(classifier(prior=0.7), engine)
    posterior.update(first)
    before = posterior.blocks
    drawn.clear()
    posterior.update(second)
    mu_0 = [state.loc.double() for state in before.values()]
    size, scale = 24 / 0.5, 0.4 + 0.5 / 0.49 / 24
    delta = [0.5 * state.precision / 24 for state in before.values()]
    m, h, v = mu_0, [torch.full_like(each, 0.4) for each in mu_0], [torch.zeros_like(each) for each in mu_0]
    x, y = second.train
    z, noise = F.pad(x.double(), (0, 1), value=1.0), iter(drawn)
    for t in range(1, 6):
        sigma = [(size * (a + b)).rsqrt() for a, b in zip(h, delta, strict=True)]
        pairs = []
        for _ in range(2):
            theta = [(a + s * next(noise).double()).requires_grad_() for a, s in zip(m, sigma, strict=True)]
            hidden = F.pad(torch.tanh(z @ theta[0].T), (0, 1), value=1.0)
            gradients = torch.autograd.grad(F.cross_entropy(hidden @ theta[1].T, y), theta)
            curvatures = [g * (w.detach() - a) / s**2 for g, w, a, s in zip(gradients, theta, m, sigma, strict=True)]
            pairs.append((gradients, curvatures))
        for i in (0, 1):
            g, f = (torch.stack([each[part][i] for each in pairs]).mean(0) for part in (0, 1))
            v[i] = 0.9 * v[i] + 0.1 * g
            h[i] = 0.9 * h[i] + 0.1 * f + 0.005 * (h[i] - f) ** 2 / (h[i] + delta[i])
            m = [
                *m[:i],
                m[i] - 0.1 * scale * (v[i] / (1 - 0.9**t) + delta[i] * (m[i] - mu_0[i])) / (h[i] + delta[i]),
                *m[i + 1 :],
            ]
    for i, state in enumerate(posterior.blocks.values()):
        torch.testing.assert_close(state.loc.double(), m[i], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state.precision, size * (h[i] + delta[i]), rtol=1e-3, atol=0)


@pytest.mark.slow
def test_independent_weights_of_a_linear_model_have_their_exact_posterior() -> None:
    """After each of two tasks, with orthogonal inputs: Bayes' rule loses nothing there."""
    x = 2.0 * torch.linalg.qr(torch.randn(40, 3, generator=torch.Generator().manual_seed(0))).Q
    y = x @ torch.tensor([[1.0], [-0.5], [0.3]])
    model = ncl.BayesianNetwork(nn.Linear(3, 1, bias=False), ncl.Normal(0.5), prior=dist.Normal(0.0, 1.0))
    engine = IVON(
        steps=2000, batch_size=40, lr=0.3, particles=8, second_momentum=0.995, schedule=lambda done: (1 - done) ** 2
    )
    posterior = ncl.OnlinePosterior(model, engine)
    mean, precision = torch.zeros(3), torch.ones(3)
    for k in range(2):
        posterior.update(ncl.Task((x, y), name=str(k)))
        added = x.square().sum(0) / 0.25
        mean = (precision * mean + (x * y).sum(0) / 0.25) / (precision + added)
        precision = precision + added
        (state,) = posterior.blocks.values()
        torch.testing.assert_close(state.loc[0], mean, rtol=0, atol=0.02)
        torch.testing.assert_close(state.precision[0].float(), precision, rtol=0.06, atol=0)
