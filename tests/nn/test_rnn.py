"""The recurrent network: its equation, its padding, and what the Fisher sees of it."""

from __future__ import annotations

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


def test_process_noise_has_its_scale() -> None:
    rnn = ncl.nn.RNN(1, 50, nonlinearity="linear", noise=0.3)
    nn.init.zeros_(rnn.weight)
    torch.manual_seed(0)
    assert float(rnn(torch.zeros(100, 4, 1)).detach().std()) == pytest.approx(0.3, rel=0.02)


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


@pytest.mark.slow
def test_two_sequence_tasks_are_learnt_without_forgetting() -> None:
    """Report the sign of the first or of the second input's sum; plain SGD forgets the first rule."""

    def task(which: int, seed: int) -> ncl.Task:
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(600, 8, 2, generator=g)
        cue = F.one_hot(torch.full((600, 8), which), 2).float()
        y = x[:, :, which].sum(1, keepdim=True).sign()
        return ncl.Task((torch.cat([x, cue], -1), y), name=f"sum {which}")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core, self.out = ncl.nn.RNN(4, 32), nn.Linear(32, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.core(x)[:, -1])

    def loss(posterior: ncl.OnlinePosterior, t: ncl.Task) -> float:
        x, y = t.train
        return float((posterior.predict(x).mean - y).square().mean())

    torch.manual_seed(0)
    net = Net()
    tasks = [task(0, 1), task(1, 2)]
    settings = ncl.LaplaceNCL(steps=1500, batch_size=100, lr=0.01)
    rises = []
    for retain in (True, False):
        model = ncl.BayesianNetwork(net, ncl.Normal(0.5), prior=dist.Normal(0.0, 1.0))
        posterior = ncl.OnlinePosterior(model, settings)
        posterior.update(tasks[0])
        before = loss(posterior, tasks[0])
        assert before < 0.05
        if not retain:
            # plain SGD: the same weights go on with a prior that has seen nothing
            posterior = ncl.OnlinePosterior(model, settings, initial=posterior.mean())
        posterior.update(tasks[1])
        assert loss(posterior, tasks[1]) < 0.2
        rises.append(loss(posterior, tasks[0]) - before)
    assert rises[0] < 0.2 * rises[1], rises
