"""The diagonal Fisher of linear maps against gradients of one example at a time."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import nclbayes as ncl
from nclbayes.errors import UnsupportedUseError
from nclbayes.fisher import DiagonalFisher
from tests.zoo import ZOO, Case, inputs, normal


def empirical(case: Case) -> dict[str, Tensor]:
    """Sum over examples of squared gradients of log p(y_i | x_i), by one backward pass an example."""
    total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in case.values.items()}
    for i in range(len(case.batch[0])):
        leaves = {name: value.double().requires_grad_() for name, value in case.values.items()}
        conditioned = pyro.condition(case.model, data=leaves)
        batch = [item.double() if item.is_floating_point() else item for item in case.rows(slice(i, i + 1))]
        trace = pyro.poutine.trace(conditioned).get_trace(*batch, **case.context)
        trace.compute_log_prob(site_filter=lambda name, site: name not in case.values)
        observed = [site for name, site in trace.nodes.items() if "log_prob_sum" in site and name not in case.values]
        score = sum(site["log_prob_sum"] for site in observed)
        grads = torch.autograd.grad(score, list(leaves.values()), allow_unused=True)
        for name, g in zip(leaves, grads, strict=True):
            if g is not None:
                total[name] += g.square()
    return total


@pytest.mark.parametrize("name", ["pyro_mlp", "functional", "cnn", "rnn", "sequences", "tied"])
def test_squares_are_those_of_one_example_at_a_time(name: str) -> None:
    case = ZOO[name]()
    accumulator = ncl.FisherAccumulator(case.model, case.values, kind="empirical", diagonal=True, context=case.context)
    accumulator.update(case.batch)
    expected = empirical(case)
    found: dict[str, Tensor] = {}
    for key, fisher in accumulator.factors().items():
        assert isinstance(fisher, DiagonalFisher)
        found |= accumulator.blocks[key].unpack(fisher.diagonal)
    assert found.keys() == {site for site, value in expected.items() if bool((value != 0).any())}
    for site, value in found.items():
        torch.testing.assert_close(value, expected[site], rtol=1e-3, atol=1e-5)


def time_first(x: Tensor, y: Tensor | None = None) -> None:
    """Rows in an order that only the model knows: steps before examples."""
    w = pyro.sample("w", normal((3, 2)))
    out = (x.transpose(0, 1) @ w).sum(0)
    pyro.sample("y", dist.Normal(out, 1.0).to_event(1), obs=y)


@pytest.mark.parametrize("steps", [3, 6])
def test_rows_that_start_with_time_are_told_by_example_too(steps: int) -> None:
    x, y, w = inputs(6, steps, 3), inputs(6, 2, seed=4), inputs(3, 2, seed=5)
    accumulator = ncl.FisherAccumulator(time_first, {"w": w}, kind="empirical", diagonal=True)
    accumulator.update((x, y))
    (fisher,) = accumulator.factors().values()
    (block,) = accumulator.blocks.values()
    z = x.sum(1)
    expected = torch.einsum("bi,bj->ij", z.square(), (y - z @ w).square())
    assert isinstance(fisher, DiagonalFisher)
    torch.testing.assert_close(block.unpack(fisher.diagonal)["w"], expected.double(), rtol=1e-4, atol=1e-5)


def test_rows_that_only_seem_to_be_ordered_by_example_are_not_trusted() -> None:
    def shuffled(x: Tensor, y: Tensor | None = None) -> None:
        w = pyro.sample("w", normal((3, 2)))
        # [features, steps x examples]: one dimension is as long as the batch, and it is not the examples
        rows = x.transpose(0, 1).reshape(x.shape[0], -1, 3)
        out = (rows @ w).reshape(x.shape[1], x.shape[0], 2).sum(0)
        pyro.sample("y", dist.Normal(out, 1.0).to_event(1), obs=y)

    x, y, w = inputs(6, 4, 3), inputs(6, 2, seed=4), inputs(3, 2, seed=5)
    found = []
    for model in (shuffled, time_first):
        accumulator = ncl.FisherAccumulator(model, {"w": w}, kind="empirical", diagonal=True)
        accumulator.update((x, y))
        (fisher,) = accumulator.factors().values()
        assert isinstance(fisher, DiagonalFisher)
        found.append(fisher.diagonal)
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("sizes", [(7, 4, 4), (4, 4, 7)])
def test_steps_as_many_as_a_later_batch_has_examples_are_not_taken_for_them(sizes: tuple[int, ...]) -> None:
    def windows(x: Tensor, y: Tensor | None = None) -> None:
        w = pyro.sample("w", normal((3, 2)))
        rows = x.reshape(-1, 4, 3)  # two windows of four steps from each example
        out = (rows @ w).tanh().reshape(len(x), -1, 2).sum(1)
        pyro.sample("y", dist.Normal(out, 1.0).to_event(1), obs=y)

    x, y, values = inputs(15, 8, 3), inputs(15, 2, seed=4), {"w": inputs(3, 2, seed=5)}
    whole, parts = (ncl.FisherAccumulator(windows, values, kind="empirical", diagonal=True) for _ in range(2))
    whole.update((x, y))
    for some_x, some_y in zip(x.split(sizes), y.split(sizes), strict=True):
        parts.update((some_x, some_y))
    (expected,), (found,) = whole.factors().values(), parts.factors().values()
    assert isinstance(expected, DiagonalFisher)
    assert isinstance(found, DiagonalFisher)
    torch.testing.assert_close(found.diagonal, expected.diagonal, rtol=1e-5, atol=1e-7)


def test_a_model_that_mixes_examples_is_refused() -> None:
    def centred(x: Tensor, y: Tensor | None = None) -> None:
        h = x @ pyro.sample("w", normal((3, 2)))
        pyro.sample("y", dist.Normal(h - h.mean(0), 1.0).to_event(1), obs=y)

    accumulator = ncl.FisherAccumulator(centred, {"w": inputs(3, 2)}, kind="empirical", diagonal=True)
    with pytest.raises(UnsupportedUseError, match="does not add up"):
        accumulator.update((inputs(6, 3), inputs(6, 2, seed=4)))


def test_the_diagonal_does_not_depend_on_how_the_data_are_batched() -> None:
    case = ZOO["cnn"]()
    whole, parts = (ncl.FisherAccumulator(case.model, case.values, kind="empirical", diagonal=True) for _ in range(2))
    whole.update(case.batch)
    for i in (0, 5):
        parts.update(case.rows(slice(i, i + 5)))
    for name, fisher in whole.factors().items():
        other = parts.factors()[name]
        assert isinstance(fisher, DiagonalFisher)
        assert isinstance(other, DiagonalFisher)
        torch.testing.assert_close(fisher.diagonal, other.diagonal, rtol=1e-5, atol=1e-7)
