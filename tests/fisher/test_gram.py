"""Sums of outer products against plain float64 ones."""

import pytest
import torch

from nclbayes.fisher.gram import GramSum, rounding
from nclbayes.fisher.panels import panels


def gram_sum(rows: torch.Tensor) -> GramSum:
    return GramSum((*rows.shape[:-2], rows.shape[-1]), rows.dtype, rows.device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3, 2), (2000, 100), (2, 1500, 97), (40_000, 5), (40_000, 30)])
def test_the_sum_is_that_of_outer_products(shape, dtype):
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
    total, weights = gram_sum(rows), torch.ones(shape[-2], dtype=torch.float64)
    half = shape[-2] // 2
    total.add(rows[..., :half, :], in_row_sum=True)
    total.add(rows[..., half:, :], weight=2.0)
    weights[half:] = 2.0
    exact = rows.double().mT @ (weights.unsqueeze(-1) * rows.double())
    scale = float(exact.abs().max())
    torch.testing.assert_close(total.value(), exact, rtol=0, atol=1e-6 * scale)
    assert torch.equal(total.value(), total.value().mT)
    torch.testing.assert_close(total.row_sum(), rows[..., :half, :].double().sum(-2), rtol=1e-5, atol=1e-3)
    total.scale(0.5)
    torch.testing.assert_close(total.value(3.0), 1.5 * exact, rtol=0, atol=2e-6 * scale)


@pytest.mark.parametrize("shape", [(300, 5), (300, 97), (40_000, 200), (2, 1500, 97)])
def test_sums_of_shares_add_up_to_that_of_all(shape):
    """Also where one share has been carried to double precision, and the other has not."""
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    first, second, whole = gram_sum(rows), gram_sum(rows), gram_sum(rows)
    most = 9 * shape[-2] // 10
    first.add(rows[..., :most, :], in_row_sum=True)
    second.add(rows[..., most:, :], in_row_sum=True)
    whole.add(rows, in_row_sum=True)
    before = first.value()
    shares = first.totals(), second.totals()
    total = gram_sum(rows)
    total.take({name: shares[0][name] + shares[1][name] for name in shares[0]})
    torch.testing.assert_close(total.value(), whole.value(), rtol=0, atol=1e-6 * float(whole.value().abs().max()))
    torch.testing.assert_close(total.row_sum(), whole.row_sum(), rtol=1e-5, atol=1e-3)
    # Copies: what is done to them does not change what was summed.
    for tensor in shares[0].values():
        tensor.zero_()
    assert torch.equal(first.value(), before)
    k = shape[-1]
    numbers = shares[0]["panels"].shape[-1]
    assert k * (k + 1) // 2 <= numbers <= k * (k + 96) // 2


@pytest.mark.parametrize("shape", [(300, 5), (40_000, 200), (2, 1500, 97)])
def test_sums_that_were_kept_as_whole_squares_are_gone_on_with(shape):
    """As files of earlier releases hold them."""
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    total = gram_sum(rows)
    total.add(rows)
    total.multiply()
    now = total.tensors()
    width, before = shape[-1], dict(now)
    for name in {"partial", "total"} & now.keys():
        # What was above the diagonal was never looked at.
        square = torch.full((*now[name].shape[:-1], width, width), torch.nan, dtype=now[name].dtype)
        for i, panel in panels(now[name], width):
            square[..., i:, i : i + panel.shape[-1]] = panel
        before[name] = square
    again = gram_sum(rows)
    again.restore(before)
    assert torch.equal(again.value(), total.value())
    for each in (total, again):
        each.add(rows)
    assert torch.equal(again.value(), total.value())


def test_products_that_underflow_leave_no_indefinite_matrix():
    direction = torch.logspace(0, -6, 30)
    rows = 1e-17 * torch.randn(64, 1, generator=torch.Generator().manual_seed(0)) * direction
    total = gram_sum(rows)
    total.add(rows)
    value = total.value()
    lowest, highest = torch.linalg.eigvalsh(value)[[0, -1]]
    assert float(lowest) >= -1e-5 * float(highest)
    mixed = gram_sum(rows)
    mixed.add(torch.cat([torch.ones(64, 1), rows[:, 1:]], -1))
    assert torch.equal(mixed.value()[1:], torch.zeros(29, 30, dtype=torch.float64))
    assert float(mixed.value()[0, 0]) == 64


@pytest.mark.parametrize("width", [2, 3, 16, 17, 40, 130])
@pytest.mark.parametrize("kind", ["one direction", "summing to zero"])
def test_rounding_errors_of_singular_sums_stay_within_their_bound(width, kind):
    """Equal rows, whose rounding errors do not cancel, and gradients of a softmax, which are orthogonal to ones."""
    g = torch.Generator().manual_seed(width)
    if kind == "one direction":
        rows = torch.rand(width, generator=g).expand(20_000, width)
    else:
        logits = torch.randn(20_000, width, generator=g)
        rows = logits.softmax(-1) - torch.nn.functional.one_hot(torch.randint(width, (20_000,), generator=g), width)
    total = gram_sum(rows)
    total.add(rows)
    value = total.value()
    lowest = float(torch.linalg.eigvalsh(value)[0]) / float(value.abs().max())
    assert lowest >= -rounding(width, 20_000, torch.float32)
    if width <= 16:
        exact = rows.double().mT @ rows.double()
        torch.testing.assert_close(value, exact, rtol=0, atol=1e-12 * float(exact.abs().max()))
