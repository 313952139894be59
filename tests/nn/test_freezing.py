"""Parameters that are frozen after the model was made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import nclbayes as ncl
from nclbayes.engines import Engine
from nclbayes.errors import ModelError

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
FIRST, SECOND = ncl.Task((X, (X[:, 0] > 0).long()), name="a"), ncl.Task((X, (X[:, 1] > 0).long()), name="b")
ENGINES = pytest.mark.parametrize(
    "engine", [ncl.LaplaceNCL(steps=10), ncl.VariationalNCL(steps=10)], ids=lambda engine: type(engine).__name__
)
METHODS: list[dict[str, Any]] = [{}, {"num_samples": 4}, {"method": "linearized"}]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2))


def predictions(posterior: ncl.OnlinePosterior) -> list[torch.Tensor]:
    return [posterior.predict(X, **how, generator=torch.Generator().manual_seed(0)).probs for how in METHODS]


@ENGINES
def test_before_any_task_it_is_as_if_it_had_been_frozen_all_along(engine: Engine) -> None:
    found = []
    for early in (True, False):
        net = network()
        net[0].requires_grad_(not early)
        model = ncl.BayesianNetwork(net, ncl.Categorical())
        net[0].requires_grad_(False)
        posterior = ncl.OnlinePosterior(model, engine)
        assert posterior.update(FIRST).unused == ()
        assert set(posterior.blocks) == {"1.weight", "1.bias", "3"}
        found.append(posterior)
    one, other = found
    assert all(torch.equal(value, other.mean()[site]) for site, value in one.mean().items())
    assert all(torch.equal(p, q) for p, q in zip(predictions(one), predictions(other), strict=True))


@ENGINES
def test_after_a_task_its_block_is_left_as_it_is(engine: Engine) -> None:
    net = network()
    posterior = ncl.OnlinePosterior(ncl.BayesianNetwork(net, ncl.Categorical()), engine)
    posterior.update(FIRST)
    before, guessed = {name: s.fingerprint() for name, s in posterior.blocks.items()}, predictions(posterior)
    net[0].requires_grad_(False)
    assert all(torch.equal(p, q) for p, q in zip(predictions(posterior), guessed, strict=True))
    seen: dict[str, torch.Tensor] = {}
    net[0].register_forward_hook(lambda module, *_: seen.update(weight=module.weight.detach().clone()))
    assert posterior.update(SECOND).unused == ()
    # The network ran with what the first task had left, and not with its own parameter.
    assert torch.equal(seen["weight"], posterior.mean()["0.weight"])
    assert not torch.equal(seen["weight"], net[0].weight)
    assert {name for name, s in posterior.blocks.items() if s.fingerprint() == before[name]} == {"0"}
    net[0].requires_grad_(True)
    posterior.update(FIRST)
    assert posterior.blocks["0"].fingerprint() != before["0"]


def test_a_part_of_a_block_is_refused() -> None:
    for frozen in ("weight", "bias"):
        net = network()
        posterior = ncl.OnlinePosterior(ncl.BayesianNetwork(net, ncl.Categorical()), ncl.LaplaceNCL(steps=3))
        posterior.update(FIRST)
        getattr(net[0], frozen).requires_grad_(False)
        with pytest.raises(ModelError, match="freeze all of the block's or none"):
            posterior.update(SECOND)
