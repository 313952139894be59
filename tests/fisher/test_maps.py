"""Einsums and transposed convolutions are linear maps: their factors against the Fisher of a linear model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes import FisherAccumulator
from nclbayes.blocks import DiagonalBlock, KroneckerBlock, find_blocks
from nclbayes.fisher import DiagonalFisher
from nclbayes.watch import watch


def model_of(function: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...]) -> Any:
    """A model whose output is a function of its input and one weight, with unit noise."""

    def model(x: Tensor, y: Tensor | None = None) -> Tensor:
        w = pyro.sample("w", dist.Normal(torch.zeros(shape, dtype=x.dtype), 1.0).to_event(len(shape)))
        out = function(x, w)
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(out.flatten(1), 1.0).to_event(1), obs=y)

    return model


def true_fisher(function: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor) -> Tensor:
    """Sum of J^T J over examples, J the Jacobian of an example's output, in the order of w's own entries."""
    total = torch.zeros(w.numel(), w.numel(), dtype=w.dtype)
    for example in x.split(1):
        jacobian = torch.autograd.functional.jacobian(lambda v, e=example: function(e, v).flatten(), w)
        flat = jacobian.reshape(-1, w.numel())
        total += flat.T @ flat
    return total


# One row an example, so that a Kronecker product is the Fisher itself: equation, weight, input.
EXACT = {
    "heads": ("bd,dhk->bhk", (3, 2, 4), (5, 3)),
    "heads, outputs first": ("bd,hkd->bhk", (2, 4, 3), (5, 3)),
    "weight first": ("od,bd->bo", (4, 3), (5, 3)),
    "to one number": ("bd,d->b", (3,), (5, 3)),
    "two inner": ("bij,ijo->bo", (2, 3, 4), (5, 2, 3)),
    "a sum of inputs": ("bsd,do->bo", (3, 4), (5, 6, 3)),
    "dots": ("...d,do->...o", (3, 4), (5, 3)),
    "outer": ("b,o->bo", (4,), (5,)),
}


@pytest.mark.parametrize("case", EXACT)
def test_the_factors_of_an_einsum_are_the_fisher(case: str) -> None:
    equation, shape, inputs = EXACT[case]
    torch.manual_seed(0)
    left = case == "weight first"

    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.einsum(equation, *((w, x) if left else (x, w))).reshape(len(x), -1)

    x, w = torch.randn(inputs).double(), torch.randn(shape).double()
    model, y = model_of(function, shape), function(x, w).detach()
    accumulator = FisherAccumulator(model, {"w": w}, kind="exact")
    accumulator.update((x, y))
    (fisher,) = accumulator.factors().values()
    assert isinstance(fisher, ncl.KroneckerFisher)
    block = accumulator.blocks["w"]
    assert isinstance(block, KroneckerBlock)
    # Column-stacking of the block's matrix, as a permutation of w's own entries.
    order = block.pack({"w": torch.arange(w.numel()).reshape(shape)}).mT.reshape(-1)
    found = torch.kron(torch.as_tensor(fisher.input), torch.as_tensor(fisher.output))
    torch.testing.assert_close(found, true_fisher(function, x, w)[order][:, order])


def test_an_einsum_of_a_stack_is_a_stack_of_maps() -> None:
    x, w = torch.randn(5, 3, 4), torch.randn(3, 4, 2)
    model = model_of(lambda x, w: torch.einsum("bed,edo->beo", x, w), (3, 4, 2))
    accumulator = FisherAccumulator(model, {"w": w})
    accumulator.update((x, torch.zeros(5, 6)))
    (fisher,) = accumulator.factors().values()
    assert isinstance(fisher, ncl.KroneckerFisher)
    assert fisher.input.shape == (3, 4, 4)
    expected = torch.einsum("bei,bej->eij", x, x).double() / 5
    torch.testing.assert_close(torch.as_tensor(fisher.input), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("equation", "shape", "inputs"),
    [
        ("bd,dd->b", (3, 3), (5, 3)),
        ("bd,dok->bo", (3, 4, 2), (5, 3)),
        ("bde,ehd->bh", (3, 2, 4), (5, 4, 3)),
        ("be,doe->bdoe", (2, 3, 4), (5, 4)),
    ],
)
def test_other_einsums_are_diagonal(equation: str, shape: tuple[int, ...], inputs: tuple[int, ...]) -> None:
    x = torch.randn(inputs)
    function = lambda x, w: torch.einsum(equation, x, w).reshape(len(x), -1)  # noqa: E731
    batch = x, torch.zeros_like(function(x, torch.randn(shape)))
    run = watch(model_of(function, shape), batch, {"w": torch.randn(shape)}, {})
    (block,) = find_blocks(run).values()
    assert isinstance(block, DiagonalBlock)


CONVOLUTIONS = {
    "plain": (F.conv_transpose2d, (3, 4, 2, 2), (6, 3, 3, 3), {}),
    "strided": (F.conv_transpose2d, (3, 4, 3, 2), (6, 3, 4, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    "grouped": (F.conv_transpose1d, (4, 3, 3), (6, 4, 5), {"groups": 2, "dilation": 2}),
    "volume": (F.conv_transpose3d, (2, 2, 2, 1, 2), (3, 2, 2, 2, 2), {"stride": (2, 1, 1)}),
    "more padding than steps": (F.conv_transpose1d, (2, 2, 2), (3, 2, 4), {"dilation": 3, "output_padding": 2}),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_transposed_convolutions_are_maps_of_their_inputs(case: str) -> None:
    """The rows add up to the gradient, or the Fisher refuses; their number and widths are what they must be."""
    function, shape, inputs, settings = CONVOLUTIONS[case]
    torch.manual_seed(0)
    x, w = torch.randn(inputs), torch.randn(shape)
    model = model_of(lambda x, w: function(x, w, **settings), shape)
    accumulator = FisherAccumulator(model, {"w": w})
    accumulator.update((x, torch.randn_like(function(x, w, **settings).flatten(1))))
    (fisher,) = accumulator.factors().values()
    if case == "more padding than steps":
        assert isinstance(fisher, DiagonalFisher)
        return
    assert isinstance(fisher, ncl.KroneckerFisher)
    groups = settings.get("groups", 1)
    assert fisher.rows == x[:, 0].numel()
    assert fisher.input.shape[-1] == shape[0] // groups
    assert fisher.output.shape[-1] == w[0].numel()
    rows = x.movedim(1, -1).reshape(-1, groups, shape[0] // groups).movedim(1, 0).double()
    expected = (rows.mT @ rows / rows.shape[1]).reshape(fisher.input.shape)
    torch.testing.assert_close(torch.as_tensor(fisher.input), expected, rtol=1e-5, atol=1e-6)


def test_one_input_position_has_the_whole_fisher() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(6, 3, 1, 1).double(), torch.randn(3, 2, 2, 2).double()
    accumulator = FisherAccumulator(model_of(F.conv_transpose2d, (3, 2, 2, 2)), {"w": w}, kind="exact")
    accumulator.update((x, torch.zeros(6, 8).double()))
    (fisher,) = accumulator.factors().values()
    assert isinstance(fisher, ncl.KroneckerFisher)
    found = torch.kron(torch.as_tensor(fisher.input), torch.as_tensor(fisher.output))
    # The view is [inputs, outputs]: w's own order.
    torch.testing.assert_close(found, true_fisher(F.conv_transpose2d, x, w))


@pytest.mark.parametrize("engine", [ncl.LaplaceNCL, ncl.VariationalNCL])
def test_a_decoder_learns(engine: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Unflatten(1, (4, 2, 2)),
        nn.ConvTranspose2d(4, 3, 2, stride=2),
        nn.Tanh(),
        nn.ConvTranspose2d(3, 1, 3),
        nn.Flatten(),
    )
    x = torch.randn(60, 16)
    task = ncl.Task((x, torch.tanh(x @ torch.randn(16, 36) / 4)), name="pictures")
    posterior = ncl.OnlinePosterior(ncl.BayesianNetwork(net, ncl.Normal(0.3)), engine(steps=60, batch_size=20))
    report = posterior.update(task, progress=False)
    assert sum(report.losses[-5:]) < sum(report.losses[:5])
    assert posterior.blocks["1"].kind == "Kronecker"
    assert "diagonal" in posterior.blocks["1.bias"].kind


def test_biases_of_frozen_maps_tell_examples_apart() -> None:
    """BitFit: what is learnt are the biases alone."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 3, 2),
        nn.Tanh(),
        nn.ConvTranspose2d(3, 2, 2),
        nn.Flatten(),
        nn.Linear(32, 4),
        nn.Tanh(),
        nn.Linear(4, 3),
    )
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    model = ncl.BayesianNetwork(net, ncl.Categorical())
    batch = torch.randn(7, 2, 4, 4), torch.randint(3, (7,))
    run = watch(model, batch, model.initial_values(), {})
    assert len(run.others) == 4
    assert all(use.separable is not None for use in run.others)
    accumulator = FisherAccumulator(model, model.initial_values(), kind="empirical")
    accumulator.update(batch)
    found = accumulator.factors()
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            expected = torch.zeros_like(parameter)
            for i in range(7):
                loss = F.cross_entropy(net(batch[0][i : i + 1]), batch[1][i : i + 1])
                expected += torch.autograd.grad(loss, parameter)[0].square()
            torch.testing.assert_close(found[name].diagonal.float(), expected, rtol=1e-5, atol=1e-7)
