"""Priors as wide as each layer wants."""

from __future__ import annotations

import math

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import nclbayes as ncl
from nclbayes.errors import SettingError

LAYERS = [
    (nn.Linear(25, 4), 25),
    (nn.Conv2d(6, 8, (3, 5), groups=2), 3 * 15),
    (nn.ConvTranspose1d(6, 4, 4, stride=2), 6 * 4 // 2),
    (nn.ConvTranspose2d(6, 4, 1, stride=3), 1),
    (nn.Embedding(30, 5), 1),
    (nn.Bilinear(3, 4, 2), 12),
    (ncl.nn.RNN(3, 6, bias=True), 9),
]


@pytest.mark.parametrize(("layer", "fan_in"), LAYERS, ids=[type(layer).__name__ for layer, _ in LAYERS])
def test_weights_and_biases_have_the_fan_in_of_their_layer(layer: nn.Module, fan_in: int) -> None:
    for name, _ in layer.named_parameters():
        prior = ncl.priors.scaled(0.5).of(layer, name)
        assert float(prior.loc) == 0
        assert float(prior.scale) == pytest.approx(0.5 / math.sqrt(fan_in))


@pytest.mark.parametrize("layer", [nn.LayerNorm(5), nn.BatchNorm1d(5), nn.PReLU(5)])
def test_gains_stay_around_where_they_are(layer: nn.Module) -> None:
    for name, parameter in layer.named_parameters():
        prior = ncl.priors.scaled(2.0).of(nn.Sequential(layer), f"0.{name}")
        torch.testing.assert_close(prior.loc, parameter.detach())
        assert bool((prior.scale == 2).all())


def test_a_signal_keeps_its_size_through_wide_and_narrow_layers() -> None:
    """The second moment of each layer's output is that of its input, up to the bias's, whatever the widths."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(n, m, bias=False) for n, m in ((20, 500), (500, 30), (30, 400))))
    model = ncl.BayesianNetwork(net, ncl.Normal(1.0), prior=ncl.priors.scaled(1.0))
    x = torch.randn(50, 20)
    with torch.no_grad():
        sizes = torch.stack([model(x).base_dist.loc.square().mean() for _ in range(200)])
    assert float(sizes.mean()) == pytest.approx(float(x.square().mean()), rel=0.1)


def test_it_goes_wherever_a_prior_goes() -> None:
    net = nn.Sequential(nn.Linear(16, 9), nn.Tanh(), nn.Linear(9, 2))
    prior = {
        "2.*": dist.Normal(0.0, 3.0),
        "*.weight": ncl.priors.scaled(1.0),
        "*": lambda name, p: dist.Normal(0.0, 2.0),
    }
    model = ncl.BayesianNetwork(net, ncl.Categorical(), prior=prior)
    posterior = ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=2))
    posterior.update(ncl.Task((torch.randn(20, 16), torch.zeros(20).long()), name="t"))
    assert {name: float(p.base_dist.scale.flatten()[0]) for name, p in model._site_priors().items()} == {
        "0.weight": 0.25,
        "0.bias": 2.0,
        "2.weight": 3.0,
        "2.bias": 3.0,
    }


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, "1", None])
def test_a_scale_is_a_positive_number(scale: object) -> None:
    with pytest.raises(SettingError, match="scale must be"):
        ncl.priors.scaled(scale)  # type: ignore[arg-type]


def test_a_parameter_that_is_not_there_is_named() -> None:
    with pytest.raises(SettingError, match=r"no parameter 'head\.weight'"):
        ncl.priors.scaled(1.0).of(nn.Linear(2, 2), "head.weight")
