"""Priors around pre-trained weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import nclbayes as ncl
from nclbayes.errors import SettingError


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def test_means_are_the_networks_own_weights_and_stay_what_they_were() -> None:
    net = network()
    before = copy.deepcopy(net)
    prior = ncl.priors.centred(net, 0.5)
    with torch.no_grad():
        net[0].weight.add_(1.0)
    model = ncl.BayesianNetwork(net, ncl.Categorical(), prior=prior)
    task = ncl.Task((torch.randn(20, 4), torch.randint(2, (20,))), name="any")
    blocks = ncl.OnlinePosterior(model, ncl.LaplaceNCL(), example=task).blocks
    torch.testing.assert_close(blocks["0"].loc[:, :-1], before[0].weight.detach())
    torch.testing.assert_close(blocks["1.weight"].loc, torch.ones(8))


@pytest.mark.parametrize("relative", [True, False])
def test_scales_are_in_units_of_the_layers_spread(relative: bool) -> None:
    net = network()
    prior = ncl.priors.centred(net, {"*.bias": 0.2, "*": 0.1}, relative=relative)
    spread = float(net[2].weight.detach().square().mean().sqrt()) if relative else 1.0
    assert float(prior("2.weight", net[2].weight).scale.mean()) == pytest.approx(0.1 * spread)
    # A bias is measured by the weights beside it, which are not zero where biases are.
    assert float(prior("2.bias", net[2].bias).scale.mean()) == pytest.approx(0.2 * spread)
    assert float(prior("1.weight", net[1].weight).scale.mean()) == pytest.approx(0.1)
    assert float(prior("1.bias", net[1].bias).scale.mean()) == pytest.approx(0.2)


def test_a_module_that_holds_the_network_may_be_learnt_too() -> None:
    net = network()
    whole = nn.Sequential(net, nn.Linear(2, 3))
    prior = {"1.*": ncl.priors.scaled(1.0), "*": ncl.priors.centred(net, 0.1)}
    model = ncl.BayesianNetwork(whole, ncl.Categorical(), prior=prior)
    assert "0.2.weight" in model.initial_values()
    with pytest.raises(SettingError, match=r"'1\.weight' is none of the network.*of its own"):
        ncl.BayesianNetwork(whole, ncl.Categorical(), prior=ncl.priors.centred(net, 0.1))


def test_what_no_data_speak_of_stays_where_it_was() -> None:
    net = network()
    model = ncl.BayesianNetwork(net, ncl.Categorical(), prior=ncl.priors.centred(net, 0.1))
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
    x[:, 3] = 0.0
    start = net[0].weight.detach().clone()
    posterior = ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=50))
    posterior.update(ncl.Task((x, (x[:, 0] > 0).long()), name="sign"), progress=False)
    learnt = posterior.mean()["0.weight"]
    torch.testing.assert_close(learnt[:, 3], start[:, 3])
    assert float((learnt[:, 0] - start[:, 0]).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("scale", "said"), [(0.0, "positive"), (float("nan"), "finite"), ({"x": 1.0}, r"No pattern.*'weight'")]
)
def test_scales_that_are_none_are_refused(scale: object, said: str) -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(SettingError, match=said):
        ncl.BayesianNetwork(net, ncl.Categorical(), prior=ncl.priors.centred(net, scale))  # type: ignore[arg-type]


def test_a_prior_is_centred_on_a_network() -> None:
    with pytest.raises(SettingError, match="torch module"):
        ncl.priors.centred("net")  # type: ignore[arg-type]
