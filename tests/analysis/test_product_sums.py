"""Closeness to a sum of Kronecker products, against dense matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from nclbayes.analysis.product_sums import ProductSum
from nclbayes.errors import MatrixError
from nclbayes.kronecker import KroneckerPrecision, gaussian_kl, scale_free_kl


def positive(size: int, seed: int, rank: int | None = None) -> Tensor:
    root = torch.randn(size, rank or 2 * size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return root @ root.mT


def test_every_measure_is_that_of_the_dense_matrices() -> None:
    total = ProductSum(positive(4, 0), positive(3, 1))
    product = KroneckerPrecision.factorise(positive(4, 2), positive(3, 3))
    dense = torch.kron(positive(4, 0), positive(3, 1))
    for seed in (4, 6, 8):
        A, G = positive(4, seed, rank=2), positive(3, seed + 1, rank=1)
        total.add(A, G)
        dense = dense + torch.kron(A, G)
        torch.testing.assert_close(total.dense(), dense)
        found = total.closeness(product)
        assert found.kl == pytest.approx(float(gaussian_kl(product.dense(), dense)))
        assert found.scale_free_kl == pytest.approx(float(scale_free_kl(product.dense(), dense)))
        expected = np.corrcoef(product.dense().flatten().numpy(), dense.flatten().numpy())[0, 1]
        assert found.correlation == pytest.approx(expected)


def test_a_product_is_closest_to_itself_at_any_scale() -> None:
    A, G = positive(5, 0), positive(2, 1)
    found = ProductSum(A, G).closeness(KroneckerPrecision.factorise(3 * A, G))
    assert found.correlation == pytest.approx(1)
    assert found.scale_free_kl == pytest.approx(0, abs=1e-9)
    # KL( N(0, 1/3) || N(0, 1) ) in ten dimensions
    assert found.kl == pytest.approx(5 * (1 / 3 - 1 + np.log(3)))


def test_a_singular_sum_is_refused() -> None:
    total = ProductSum(positive(4, 0, rank=1), positive(3, 1))
    with pytest.raises(MatrixError, match="not positive definite"):
        _ = total.logdet
