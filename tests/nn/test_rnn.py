"""The recurrent network: its equation, its padding, and what the Fisher sees of it."""

from __future__ import annotations

import math

import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.errors import DataError, SettingError
from nclbayes.watch import watch
from tests.zoo import inputs


def by_hand(rnn: ncl.nn.RNN, x: Tensor, lengths: list[int]) -> Tensor:
    out = torch.zeros(*x.shape[:2], rnn.hidden_size)
    for i in range(len(x)):
        r = torch.zeros(rnn.hidden_size)
        for t in range(x.shape[1]):
            if t < lengths[i]:
                h = rnn.weight @ torch.cat([r, x[i, t]])
                h = h if rnn.bias is None else h + rnn.bias
                r = (1 - rnn.leak) * r + rnn.leak * (F.relu(h) if rnn.nonlinearity == "relu" else torch.tanh(h))
            out[i, t] = r
    return out


@pytest.mark.parametrize(("leak", "nonlinearity", "bias"), [(1.0, "relu", False), (0.2, "tanh", True)])
def test_it_follows_its_equation_watched_or_not(leak: float, nonlinearity: str, bias: bool) -> None:
    torch.manual_seed(0)
    rnn = ncl.nn.RNN(3, 6, leak=leak, nonlinearity=nonlinearity, bias=bias)
    x, lengths = inputs(4, 5, 3), [5, 2, 4, 1]
    expected = by_hand(rnn, x, lengths)
    torch.testing.assert_close(rnn(x, torch.tensor(lengths)), expected, rtol=1e-5, atol=1e-6)
    seen = {}

    class Readout(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core, self.out = rnn, nn.Linear(6, 2)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            seen["states"] = self.core(x, lengths)
            return self.out(seen["states"][:, -1])

    net = Readout()
    model = ncl.BayesianNetwork(net, ncl.Normal(1.0), prior=dist.Normal(0.0, 1.0), inputs=2)
    run = watch(model, (x, torch.tensor(lengths), inputs(4, 2)), model.initial_values())
    torch.testing.assert_close(seen["states"], expected, rtol=1e-5, atol=1e-6)
    uses = [use for use in run.linear if use.weight == "core.weight"]
    assert len(uses) == 5
    assert sum(int(use.count()) for use in uses) == sum(lengths)


def test_whatever_is_in_the_padding_changes_nothing() -> None:
    rnn = ncl.nn.RNN(3, 6, leak=0.2)
    x, lengths = inputs(4, 5, 3), torch.tensor([5, 2, 4, 1])
    torn = torch.where(torch.arange(5) < lengths.unsqueeze(-1), 0.0, torch.nan).unsqueeze(-1) + x
    found, expected = (torch.autograd.grad(rnn(given, lengths).sum(), rnn.weight)[0] for given in (torn, x))
    assert torch.equal(found, expected)


def test_process_noise_has_its_scale() -> None:
    rnn = ncl.nn.RNN(1, 50, nonlinearity="linear", noise=0.3)
    nn.init.zeros_(rnn.weight)
    torch.manual_seed(0)
    assert float(rnn(torch.zeros(100, 4, 1)).detach().std()) == pytest.approx(0.3, rel=0.02)


def test_the_fisher_sees_the_same_noise() -> None:
    rnn = ncl.nn.RNN(2, 5, leak=0.3, noise=0.3)
    x, lengths = inputs(3, 4, 2), torch.tensor([4, 2, 3])
    torch.manual_seed(0)
    expected = rnn(x, lengths)
    model = ncl.BayesianNetwork(rnn, ncl.Normal(1.0), prior=dist.Normal(0.0, 1.0), inputs=2)
    torch.manual_seed(0)
    run = watch(model, (x, lengths, inputs(3, 4, 5)), model.initial_values())
    (observed,) = run.observed.values()
    torch.testing.assert_close(observed.fn.base_dist.loc, expected)


def test_the_initial_recurrent_weights_are_half_orthogonal() -> None:
    rnn = ncl.nn.RNN(4, 8)
    h = rnn.weight[:, :8].detach()
    torch.testing.assert_close(h @ h.T, 0.25 * torch.eye(8), rtol=1e-5, atol=1e-5)


def test_wrong_settings_and_inputs_are_refused() -> None:
    with pytest.raises(SettingError, match="leak"):
        ncl.nn.RNN(1, 2, leak=0.0)
    with pytest.raises(SettingError, match="'relu', 'tanh', 'linear'"):
        ncl.nn.RNN(1, 2, nonlinearity="gelu")
    with pytest.raises(DataError, match=r"\[batch, time, 3\], not \(4, 3\)"):
        ncl.nn.RNN(3, 2)(torch.zeros(4, 3))


def direction_task(anti: bool) -> ncl.Task:
    """Remember a direction over a delay, then point to it, or to its mirror image; a cue tells which."""

    def sampler(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        angle = 2 * math.pi * torch.rand(count, 1, generator=g)
        shown = torch.stack([angle.cos(), angle.sin()], -1)
        x, y = torch.zeros(count, 12, 5), torch.zeros(count, 12, 3)
        x[:, 1:5, :2] = shown
        x[:, :8, 2] = y[:, :8, 0] = 1.0  # fixate, until the response
        x[:, :, 3 + anti] = 1.0
        x[..., :2] += 0.1 * torch.randn(count, 12, 2, generator=g)
        y[:, 8:, 1:] = shown * torch.tensor([1.0, -1.0 if anti else 1.0])
        return x, y

    return ncl.Task(sampler, name="anti" if anti else "go", size=20_000)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [ncl.LaplaceNCL, ncl.VariationalNCL])
def test_two_sequence_tasks_are_learnt_without_forgetting(engine: type[ncl.LaplaceNCL]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core, self.out = ncl.nn.RNN(5, 48, leak=0.5), nn.Linear(48, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.core(x))

    def loss(posterior: ncl.OnlinePosterior, task: ncl.Task) -> float:
        x, y = task.train(512, torch.Generator().manual_seed(3))
        return float((posterior.predict(x).mean - y)[:, 8:].square().mean())

    torch.manual_seed(0)
    model = ncl.BayesianNetwork(Net(), ncl.Normal(0.3), prior=dist.Normal(0.0, 0.3))
    settings = engine(steps=800, batch_size=32, lr=0.002, fisher_size=1024)
    posterior = ncl.OnlinePosterior(model, settings)
    go, anti = direction_task(anti=False), direction_task(anti=True)
    posterior.update(go)
    learnt, weights = loss(posterior, go), posterior.mean()
    posterior.update(anti)
    # plain training: the same weights go on with a prior that has seen nothing
    plain = ncl.OnlinePosterior(model, settings, initial=weights)
    plain.update(anti)
    assert learnt < 0.02
    assert loss(posterior, anti) < 0.02
    lost = loss(plain, go) - learnt
    assert lost > 0.1
    assert loss(posterior, go) - learnt < 0.2 * lost
