"""Covariances of outputs by rows, against Jacobians of every weight of every example."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import nclbayes as ncl
from nclbayes.errors import ModelError, SettingError
from nclbayes.posterior import jacobians


class Tied(nn.Module):
    """One map, used twice, and an offset of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out, self.offset = nn.Linear(4, 4), nn.Linear(4, 3), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.inner(torch.tanh(self.inner(x))))) + self.offset


class Pooled(nn.Module):
    """Tokens, each of which is mapped by itself, and attends to all of its example."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = ncl.nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (5, 4))
        return self.out(self.norm(self.attention(x, x, x, need_weights=False)[0]).mean(1))


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Conv2d(1, 3, 3), nn.Conv2d(3, 4, 2, bias=False), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x.view(-1, 1, 5, 5)))
        return self.out(torch.tanh(self.second(x)).flatten(1))


class Mixing(nn.Module):
    """What one example has changes what others get, in a way that rows do not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.first(x))
        return self.out(z - 0.5 * z.mean(0, keepdim=True))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), 4),
    "normalised": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3, bias=False)), 4),
    "tied": (Tied, 4),
    "tokens": (Pooled, 20),
    "convolutions": (Convolved, 25),
}


def learnt(net: nn.Module, likelihood: Any, size: int, **settings: Any) -> tuple[ncl.OnlinePosterior, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(30, size, generator=draw)
    y = torch.randint(3, (30,), generator=draw)
    y = y if isinstance(likelihood, ncl.Categorical) else torch.randn(30, 3, generator=draw)
    posterior = ncl.OnlinePosterior(ncl.BayesianNetwork(net, likelihood), ncl.LaplaceNCL(steps=20), **settings)
    posterior.update(ncl.Task((x, y), name="task"), progress=False)
    return posterior, x[:11]


def made(name: str) -> tuple[nn.Module, int]:
    torch.manual_seed(0)
    make, size = NETWORKS[name]
    return make(), size


def expected(posterior: ncl.OnlinePosterior, x: Tensor) -> Tensor:
    """Sum over blocks of J Lambda^-1 J^T, from dense Jacobians and dense covariances."""
    net, mean = posterior.model.net, posterior.mean()
    found = vmap(jacrev(lambda values, one: functional_call(net, values, (one.unsqueeze(0),))[0]), (None, 0))(mean, x)
    total = torch.zeros(len(x), 3, 3, dtype=torch.float64)
    for state in posterior.blocks.values():
        # [examples, outputs, weights], as the covariance counts them.
        jacobian = state.block.pack(found).reshape(len(x), 3, -1).double()
        size = jacobian.shape[-1]
        noise = torch.eye(size, dtype=state.loc.dtype).reshape(size, *state.loc.shape)
        root = torch.stack([state.colouring()(eps) for eps in noise]).reshape(size, size).double()
        total += jacobian @ root.mT @ root @ jacobian.mT
    return total


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("structure", ["auto", 3])
def test_covariances_are_those_of_dense_jacobians(name: str, structure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net, size = made(name)
    posterior, x = learnt(net, ncl.Normal(0.5), size, structure=structure)
    right = expected(posterior, x)
    for numbers in (1 << 24, 400):  # all examples at once, and a few at a time
        monkeypatch.setattr(jacobians, "_ROW_NUMBERS", numbers)
        found = posterior.predict(x, method="linearized").covariance_matrix - 0.25 * torch.eye(3)
        torch.testing.assert_close(found.double(), right, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("name", ["perceptron", "convolutions"])
def test_linear_maps_need_no_jacobians(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_jacobians(*_: Any) -> None:
        raise AssertionError

    net, size = made(name)
    posterior, x = learnt(net, ncl.Normal(0.5), size)
    monkeypatch.setattr(jacobians.Linearisation, "_by_jacobians", no_jacobians)
    posterior.predict(x, method="linearized")


def test_an_example_that_others_change_is_run_by_itself() -> None:
    torch.manual_seed(0)
    posterior, x = learnt(Mixing(), ncl.Normal(0.5), 4)
    found = posterior.predict(x, method="linearized").covariance_matrix - 0.25 * torch.eye(3)
    torch.testing.assert_close(found.double(), expected(posterior, x), rtol=2e-3, atol=2e-5)


def test_heads_that_are_not_asked_change_nothing() -> None:
    torch.manual_seed(0)
    net = ncl.MultiHead(nn.Sequential(nn.Linear(4, 5), nn.Tanh()), [nn.Linear(5, 3) for _ in range(2)])
    posterior = ncl.OnlinePosterior(ncl.BayesianNetwork(net, ncl.Normal(0.5)), ncl.LaplaceNCL(steps=10))
    x, y = torch.randn(20, 4), torch.randn(20, 3)
    before = None
    for head in range(2):
        posterior.update(ncl.Task((x, y), name=str(head), context={"head": head}), progress=False)
        before = before or posterior.blocks["heads.0"].fingerprint()
    assert posterior.blocks["heads.0"].fingerprint() == before
    first = posterior.predict(x, head=0, method="linearized").covariance_matrix
    last = posterior.predict(x, head=0, method="last-layer").covariance_matrix
    assert bool((first.diagonal(dim1=1, dim2=2) > last.diagonal(dim1=1, dim2=2)).all())


def test_the_closed_form_is_near_many_draws() -> None:
    net, size = made("perceptron")
    posterior, x = learnt(net, ncl.Categorical(), size)
    draws = posterior.predict(x, method="linearized", num_samples=20_000, generator=torch.Generator().manual_seed(0))
    closed, mean = posterior.predict(x, method="probit"), posterior.predict(x)
    assert float((closed.probs - draws.probs).abs().max()) < 0.02
    # It is nearer to them than the mean is, on the whole and for most examples.
    away, without = ((p.probs - draws.probs).abs().sum(-1) for p in (closed, mean))
    assert float(away.mean()) < 0.5 * float(without.mean())


def test_the_last_layer_alone_is_a_linear_model() -> None:
    net, size = made("perceptron")
    posterior, x = learnt(net, ncl.Normal(0.5), size)
    found = posterior.predict(x, method="last-layer").covariance_matrix - 0.25 * torch.eye(3)
    mean, state = posterior.mean(), posterior.blocks["2"]
    z = torch.cat([torch.tanh(x @ mean["0.weight"].T + mean["0.bias"]), torch.ones(len(x), 1)], -1).double()
    inverse, outer = (torch.linalg.inv(m) for m in (state.precision.input, state.precision.output))
    right = ((z @ inverse) * z).sum(-1)[:, None, None] * outer
    torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-6)


def test_what_has_no_last_layer_says_so() -> None:
    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.gain * x[:, :3]

    posterior, x = learnt(Gain(), ncl.Normal(0.5), 4)
    assert math.isfinite(float(posterior.predict(x, method="linearized").covariance_matrix.sum()))
    with pytest.raises(ModelError, match="no linear map with a Gaussian of its own: use method='linearized'"):
        posterior.predict(x, method="last-layer")


def test_a_closed_form_has_no_draws() -> None:
    net, size = made("perceptron")
    posterior, x = learnt(net, ncl.Categorical(), size)
    for method in ("probit", "last-layer"):
        with pytest.raises(SettingError, match=f"no effect on a closed form.*method='{method}'"):
            posterior.predict(x, method=method, num_samples=3)
    with pytest.raises(SettingError, match="choose 'mean', 'samples', 'linearized', 'probit' or 'last-layer'"):
        posterior.predict(x, method="laplace")
