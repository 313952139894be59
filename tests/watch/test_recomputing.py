"""Gradient checkpointing is refused wherever a weight is used in it, and never changes a result in silence."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nclbayes as ncl
from nclbayes.engines import Engine
from nclbayes.errors import UnsupportedUseError

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


class Net(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.reentrant = nn.Linear(4, 5), nn.Linear(5, 2), reentrant

    def body(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(
            self.body(x) if self.reentrant is None else checkpoint(self.body, x, use_reentrant=self.reentrant)
        )


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    "engine", [ncl.LaplaceNCL(steps=3), ncl.VariationalNCL(steps=3)], ids=lambda e: type(e).__name__
)
def test_an_update_says_what_to_do(reentrant: bool, engine: Engine) -> None:
    posterior = ncl.OnlinePosterior(ncl.BayesianNetwork(Net(reentrant), ncl.Categorical()), engine)
    with pytest.raises(UnsupportedUseError, match=r"'first.weight'.*gradient_checkpointing_disable\(\).*accumulate"):
        posterior.update(ncl.Task((X, Y), name="t"))
    assert posterior.tasks == ()


@pytest.mark.parametrize("reentrant", [True, False])
def test_so_does_the_fisher(reentrant: bool) -> None:
    model = ncl.BayesianNetwork(Net(reentrant), ncl.Categorical())
    with pytest.raises(UnsupportedUseError, match="gradient checkpointing"):
        ncl.fisher(model, model.initial_values(), (X, Y))


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_was_learnt_without_it_predicts_with_it_or_says_why_not(reentrant: bool) -> None:
    net = Net(None)
    posterior = ncl.OnlinePosterior(ncl.BayesianNetwork(net, ncl.Categorical()), ncl.LaplaceNCL(steps=3))
    posterior.update(ncl.Task((X, Y), name="t"))
    before = posterior.predict(X).probs
    net.reentrant = reentrant
    assert torch.equal(posterior.predict(X).probs, before)
    with pytest.raises(UnsupportedUseError, match="checkpointing"):
        posterior.predict(X, method="linearized")


def test_a_part_without_weights_may_be_checkpointed() -> None:
    def model(x: Tensor, y: Tensor, checkpointed: bool) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2, 4), 1.0).to_event(2))
        logits = nn.functional.linear(x, w)
        logits = checkpoint(torch.tanh, logits, use_reentrant=False) if checkpointed else torch.tanh(logits)
        pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    values = {"w": 0.3 * torch.ones(2, 4)}
    plain, found = (ncl.fisher(model, values, (X, Y), kind="exact", context={"checkpointed": c}) for c in (False, True))
    assert torch.equal(found["w"].input, plain["w"].input)
    assert torch.equal(found["w"].output, plain["w"].output)
