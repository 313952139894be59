"""Block-diagonal factors against the same matrices with their zeros."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nclbayes.errors import MatrixError
from nclbayes.gaussians.gradients import RowGradient
from nclbayes.gaussians.preconditioners import TwoSided, kronecker_preconditioner
from nclbayes.kronecker import (
    BlockDiagonal,
    KroneckerNormal,
    KroneckerPrecision,
    SumRule,
    fade,
    gaussian_kl,
    kronecker_sum,
    stiffen,
)
from nclbayes.kronecker.blockdiagonal import identity_like, widths_of
from nclbayes.kronecker.triangular import symmetric_of, triangle_of, upper_of

INPUT, OUTPUT = [3, 3, 2], [1, 1, 1, 1]


def blocks(widths: list[int], seed: int, stack: tuple[int, ...] = (), rank: int | None = None) -> BlockDiagonal:
    rng = np.random.default_rng(seed)

    def block(width: int) -> Tensor:
        root = torch.from_numpy(rng.normal(size=(*stack, width, width + 1 if rank is None else rank)))
        return root @ root.mT

    return BlockDiagonal.of(block(width) for width in widths)


def close(first: Any, second: Any, tolerance: float = 1e-9) -> None:
    whole = [m.dense() if isinstance(m, BlockDiagonal) else m for m in (first, second)]
    torch.testing.assert_close(*whole, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("size", "most"), [(10, 4), (10, 10), (10, 0), (7, 1), (9, 5), (1, 1), (100, 33)])
def test_widths_add_up_and_differ_by_one_at_most(size: int, most: int) -> None:
    widths = widths_of(size, most)
    assert sum(widths) == size
    assert max(widths) - min(widths) <= 1
    assert max(widths) <= (most or size)
    assert len(widths) == (-(-size // most) if most else 1)


@pytest.mark.parametrize("stack", [(), (5,)])
def test_it_multiplies_as_the_whole_matrix_does(stack: tuple[int, ...]) -> None:
    matrix = blocks(INPUT, 0, stack)
    whole = matrix.dense()
    left, right = torch.randn(2, *stack, 4, 8).double(), torch.randn(2, *stack, 8, 3).double()
    close(left @ matrix, left @ whole)
    close(matrix @ right, whole @ right)
    close(matrix @ matrix.mT, whole @ whole.mT)
    close(3 * matrix + matrix / 2, 3.5 * whole)
    factor = torch.rand(*stack, 1, 1).double()
    close(factor * matrix, factor * whole)
    close(matrix.diagonal(), whole.diagonal(dim1=-2, dim2=-1))
    close(matrix.abs().sum(-1), whole.abs().sum(-1))
    close((matrix * matrix).sum((-2, -1)), whole.square().sum((-2, -1)))
    close(matrix.expand(7, *stack, 8, 8), whole.expand(7, *stack, 8, 8))
    close(identity_like(matrix), torch.eye(8).double().expand_as(whole))
    assert matrix.shape == whole.shape


def test_a_matrix_of_its_own_transpose_and_dtype() -> None:
    matrix = BlockDiagonal.of([torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.ones(1, 1)])
    close(matrix.mT, matrix.dense().T)
    assert matrix.to(torch.float64).dtype is torch.float64
    assert [tuple(block.shape) for block in matrix.blocks()] == [(2, 2), (1, 1)]
    assert matrix.width == 2


@pytest.mark.parametrize("stack", [(), (3,)])
@pytest.mark.parametrize("rule", list(SumRule))
def test_a_sum_is_that_of_the_whole_matrices(rule: SumRule, stack: tuple[int, ...]) -> None:
    A, B = blocks(INPUT, 1, stack), blocks(OUTPUT, 2, stack)
    C, D = blocks(INPUT, 3, stack, rank=1), blocks(OUTPUT, 4, stack)
    found = kronecker_sum(A, B, C, D, rule)
    expected = kronecker_sum(A.dense(), B.dense(), C.dense(), D.dense(), rule)
    # At the least of its divergence "bound" is known to the root of the rounding errors only.
    tolerance = 1e-6 if rule is SumRule.BOUND else 1e-9
    for part in ("input", "output", "input_inverse", "output_inverse", "logdet", "kl", "start_kl"):
        close(getattr(found, part), getattr(expected, part), tolerance)
    close(found.input_root @ found.input_root.mT, found.input_inverse)
    close(found.dense(), expected.dense(), tolerance)


def test_one_side_may_be_whole() -> None:
    A, B, C, D = blocks(INPUT, 1), blocks([4], 2).dense(), blocks(INPUT, 3), blocks([4], 4).dense()
    found, expected = kronecker_sum(A, B, C, D, "additive"), kronecker_sum(A.dense(), B, C.dense(), D, "additive")
    assert isinstance(found.input, BlockDiagonal)
    assert isinstance(found.output, Tensor)
    close(found.dense(), expected.dense())


def test_other_blocks_are_refused() -> None:
    A, B, C = blocks(INPUT, 1), blocks(OUTPUT, 2), blocks([2, 3, 3], 3)
    for wrong in (C, C.dense()):
        with pytest.raises(MatrixError, match="same blocks"):
            kronecker_sum(A, B, wrong, B)


def precisions(seed: int) -> tuple[KroneckerPrecision, KroneckerPrecision]:
    A, G = blocks(INPUT, seed), blocks(OUTPUT, seed + 1)
    return KroneckerPrecision.factorise(A, G), KroneckerPrecision.factorise(A.dense(), G.dense())


def test_an_indefinite_block_is_refused() -> None:
    A = BlockDiagonal.of([torch.eye(2), -torch.eye(1)])
    with pytest.raises(MatrixError, match="not positive definite"):
        KroneckerPrecision.factorise(A, torch.eye(2))


def test_fading_and_stiffening_are_those_of_the_whole_matrices() -> None:
    (p, whole), (prior, whole_prior) = precisions(0), precisions(5)
    close(fade(p, prior, 0.7).dense(), fade(whole, whole_prior, 0.7).dense(), 1e-7)
    close(stiffen(p, prior, 50.0).dense(), stiffen(whole, whole_prior, 50.0).dense(), 1e-6)


def test_the_distribution_is_that_of_the_whole_matrices() -> None:
    loc = torch.randn(4, 8).double()
    found, expected = (KroneckerNormal.from_precision(loc, p) for p in precisions(0))
    value = torch.randn(3, 4, 8).double()
    close(found.log_prob(value), expected.log_prob(value))
    close(found.variance, expected.variance)
    close(found.entropy(), expected.entropy())
    close(found.expand((2,)).log_prob(value.unsqueeze(1)), expected.log_prob(value).unsqueeze(1).expand(3, 2))
    other, whole_other = (KroneckerNormal.from_precision(loc + 1, p) for p in precisions(9))
    for q in (other, whole_other):
        close(torch.distributions.kl_divergence(found, q), torch.distributions.kl_divergence(expected, whole_other))
    torch.manual_seed(0)
    draws = found.rsample((20_000,)) - loc
    close(draws.square().mean(0) / expected.variance, torch.ones(4, 8).double(), 0.1)


def test_divergences_are_those_of_the_whole_matrices() -> None:
    (p, whole), (q, whole_q) = precisions(0), precisions(5)
    close(gaussian_kl(p, q), gaussian_kl(whole, whole_q))


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_a_preconditioner_is_that_of_the_whole_matrices(held: bool, damping: float) -> None:
    (p, whole), (stiff, whole_stiff) = precisions(0), precisions(5)
    found = kronecker_preconditioner(p, 2.0, damping, torch.float64, stiff if held else None)
    expected = kronecker_preconditioner(whole, 2.0, damping, torch.float64, whole_stiff if held else None)
    assert isinstance(found, TwoSided)
    gradient, theta = torch.randn(4, 8).double(), torch.randn(4, 8).double()
    inputs, outputs = torch.randn(5, 7).double(), torch.randn(5, 4).double()
    rows = RowGradient(((inputs, outputs, True), (inputs, outputs, False)))
    for g in (gradient, rows):
        first, second = torch.ones(4, 8).double(), torch.ones(4, 8).double()
        for preconditioner, m in ((found, first), (expected, second)):
            preconditioner.add(m, g, 0.9, -0.5)
            preconditioner.add_pull(m, theta, gradient, 0.3)
        close(first, second)
    fisher = blocks(INPUT, 20), blocks(OUTPUT, 21)
    dense = expected.curvature(*(side.dense() for side in fisher))
    assert found.curvature(*fisher) == pytest.approx(dense, rel=1e-2)
    assert found.pull_strength == pytest.approx(expected.pull_strength, rel=1e-2)


@pytest.mark.parametrize("stack", [(), (3,)])
def test_a_triangle_holds_a_symmetric_matrix(stack: tuple[int, ...]) -> None:
    matrix = blocks([5], 0, stack).dense()
    triangle = triangle_of(matrix)
    assert triangle.shape == (*stack, 15)
    assert torch.equal(symmetric_of(triangle), matrix.triu() + matrix.triu(1).mT)
    assert torch.equal(upper_of(triangle), matrix.triu())
