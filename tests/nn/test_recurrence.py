"""The recurrence: what torch makes of the same equation, its gradients, and what it can be part of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import jacrev, vmap

from nclbayes.nn.recurrence import NONLINEARITIES, recur

TIME, BATCH, UNITS = 5, 3, 4
LENGTHS = torch.tensor([5, 2, 4])


def by_torch(weight: Tensor, driven: Tensor, gate: Tensor, r: Tensor, nonlinearity: str) -> Tensor:
    phi = {"relu": torch.relu, "tanh": torch.tanh, "linear": lambda h: h}[nonlinearity]
    states = []
    for d, g in zip(driven, gate, strict=True):
        r = (1 - g) * r + g * phi(r @ weight.T + d)
        states.append(r)
    return torch.stack(states)


def arguments(padded: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    weight, driven, start = (
        torch.randn(shape, generator=g, dtype=torch.float64) / 2
        for shape in ((UNITS, UNITS), (TIME, BATCH, UNITS), (BATCH, UNITS))
    )
    valid = torch.arange(TIME).unsqueeze(-1) < LENGTHS if padded else torch.ones(TIME, 1)
    return weight, driven, 0.3 * valid.double().unsqueeze(-1), start


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("nonlinearity", list(NONLINEARITIES))
def test_values_and_gradients_are_those_of_the_equation(nonlinearity: str, padded: bool) -> None:
    weight, driven, gate, start = arguments(padded)
    leaves = [tensor.requires_grad_() for tensor in (weight, driven, start)]
    found, expected = (f(weight, driven, gate, start, nonlinearity) for f in (recur, by_torch))
    torch.testing.assert_close(found, expected)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for ours, theirs in zip(*(torch.autograd.grad(out, leaves, upstream) for out in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("nonlinearity", list(NONLINEARITIES))
def test_it_can_be_differentiated_twice(nonlinearity: str) -> None:
    weight, driven, gate, start = arguments(padded=True)
    leaves = tuple(tensor.requires_grad_() for tensor in (weight, driven, start))

    def states(weight: Tensor, driven: Tensor, start: Tensor) -> Tensor:
        return recur(weight, driven, gate, start, nonlinearity)

    assert gradcheck(states, leaves)
    assert gradgradcheck(states, leaves)


def test_it_can_be_vectorised_over_weights_and_examples() -> None:
    weight, driven, gate, start = arguments(padded=True)
    weights = torch.stack([weight, -weight, 2 * weight])
    over_weights = vmap(lambda w: recur(w, driven, gate, start, "tanh"))(weights)
    torch.testing.assert_close(over_weights, torch.stack([recur(w, driven, gate, start, "tanh") for w in weights]))

    def last(w: Tensor, d: Tensor, g: Tensor, r: Tensor) -> Tensor:
        return recur(w, d.unsqueeze(1), g.unsqueeze(1), r.unsqueeze(0), "tanh")[-1, 0]

    jacobians = vmap(jacrev(last), in_dims=(None, 1, 1, 0))(weight, driven, gate, start)
    for i, jacobian in enumerate(jacobians):
        one = torch.autograd.functional.jacobian(
            lambda w, i=i: by_torch(w, driven[:, i : i + 1], gate[:, i : i + 1], start[i : i + 1], "tanh")[-1, 0],
            weight,
        )
        torch.testing.assert_close(jacobian, one)
