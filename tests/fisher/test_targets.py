"""Draws of a share of examples against those of all of them."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from nclbayes.fisher.targets import Place, drawn_from, is_noise


def parameters(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


OUTPUTS = {
    "classes": lambda k: dist.Categorical(logits=parameters(0, 7, 4)[k]),
    "classes by step": lambda k: dist.Categorical(logits=parameters(0, 7, 3, 4)[k]).to_event(1),
    "binary": lambda k: dist.Bernoulli(logits=parameters(1, 7, 3)[k]).to_event(1),
    "masked": lambda k: dist.Bernoulli(logits=parameters(1, 7)[k]).mask(parameters(2, 7)[k] > 0),
    "normal": lambda k: dist.Normal(parameters(3, 7, 2)[k], 0.3).to_event(1),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_share_draws_what_it_would_get_of_the_whole(name: str) -> None:
    def drawn(which: slice, place: Place | None) -> Tensor:
        torch.manual_seed(5)
        return drawn_from(OUTPUTS[name](which), place)

    assert is_noise(OUTPUTS[name](slice(None)))
    whole = drawn(slice(None), None)
    shares = [drawn(slice(a, b), Place(0, a, 7)) for a, b in ((0, 3), (3, 5), (5, 7))]
    assert torch.equal(torch.cat(shares), whole)


def test_examples_may_lie_along_another_dimension() -> None:
    scale = parameters(0, 4, 7).exp()
    torch.manual_seed(5)
    whole = drawn_from(dist.Normal(0.0, scale))
    torch.manual_seed(5)
    assert torch.equal(drawn_from(dist.Normal(0.0, scale[:, 2:5]), Place(1, 2, 7)), whole[:, 2:5])


@pytest.mark.parametrize(
    "fn",
    [dist.Categorical(probs=torch.tensor([0.1, 0.6, 0.3])), dist.Bernoulli(0.3), dist.Normal(2.0, 0.5)],
    ids=["classes", "binary", "normal"],
)
def test_draws_have_the_moments_of_their_distribution(fn: Any) -> None:
    torch.manual_seed(0)
    values, own = drawn_from(fn.expand([40_000])).double(), fn.sample([40_000]).double()
    # Four standard errors.
    assert abs(float(values.mean() - own.mean())) < 4 * (2 / 40_000) ** 0.5 * float(own.std())
    assert abs(float(values.std() / own.std()) - 1) < 0.03
    if fn.support.is_discrete:
        assert torch.equal(values.unique(), own.unique())


def test_other_distributions_are_not_noise() -> None:
    assert not is_noise(dist.Poisson(torch.ones(3)))
    assert not is_noise(dist.StudentT(4.0, torch.ones(3)))
