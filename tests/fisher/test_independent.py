"""The same factors as an independent implementation of KFAC (curvlinops), for an MLP and a CNN."""

from __future__ import annotations

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import nclbayes as ncl
from tests.zoo import inputs, labels, normal

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its dependencies use deprecated parts of torch when imported
    from curvlinops import KFACLinearOperator
    from curvlinops.kfac import FisherType


def mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 4)), inputs(30, 6)


def cnn() -> tuple[nn.Module, Tensor]:
    net = nn.Sequential(
        nn.Conv2d(3, 5, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(5, 4, 2, dilation=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 4),
    )
    return net, inputs(30, 3, 11, 11)


def as_pyro(net: nn.Module, likelihood: type) -> object:
    def model(x: Tensor, y: Tensor) -> None:
        weights = {name: pyro.sample(name, normal(tuple(p.shape))) for name, p in net.named_parameters()}
        out = functional_call(net, weights, (x,))
        if likelihood is nn.MSELoss:
            # the sum of squared errors is the negative log likelihood of a normal of variance one half
            pyro.sample("y", dist.Normal(out, 0.5**0.5).to_event(1), obs=y)
        else:
            pyro.sample("y", dist.Categorical(logits=out), obs=y)

    return model


@pytest.mark.parametrize(("kind", "fisher_type"), [("empirical", "EMPIRICAL"), ("exact", "TYPE2")])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss, nn.MSELoss])
@pytest.mark.parametrize("make", [mlp, cnn])
def test_the_factors_are_those_of_an_independent_implementation(
    make: object, loss: type[nn.Module], kind: str, fisher_type: str
) -> None:
    """One draw of targets is fixed by handing it to both as the data of the empirical kind."""
    torch.manual_seed(0)
    net, x = make()  # type: ignore[operator]
    drawn = net(x).detach() + inputs(30, 4, seed=8) if loss is nn.MSELoss else labels(4, 30)
    data = [(x[:11], drawn[:11]), (x[11:], drawn[11:])]
    reference = KFACLinearOperator(
        net,
        loss(reduction="sum"),
        list(net.parameters()),
        data,
        fisher_type=getattr(FisherType, fisher_type),
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    reference.compute_kronecker_factors()
    values = {name: p.detach() for name, p in net.named_parameters()}
    accumulator = ncl.FisherAccumulator(as_pyro(net, loss), values, kind=kind)  # type: ignore[arg-type]
    for batch in data:
        accumulator.update(batch)
    factors = accumulator.factors()
    assert set(factors) == set(reference._input_covariances)
    for name, factor in factors.items():
        theirs = reference._input_covariances[name], reference._gradient_covariances[name]
        ours = torch.kron(factor.input, factor.output)
        product = torch.kron(theirs[0].double(), theirs[1].double())
        torch.testing.assert_close(ours, product, rtol=1e-4, atol=1e-6 * float(product.abs().max()), msg=name)
