from __future__ import annotations

import pytest
import torch

from nclbayes.gaussians.preconditioners import TwoSided


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_curvature_of_two_classes_is_the_largest_eigenvalue(dtype: torch.dtype) -> None:
    """Its output factor is a multiple of [[1, -1], [-1, 1]], to which equal numbers are orthogonal."""
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(20, 3, generator=g, dtype=torch.float64)
    inputs, outputs = rows.mT @ rows, torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
    found = TwoSided(torch.eye(2, dtype=dtype), torch.eye(3, dtype=dtype), None).curvature(inputs, outputs)
    expected = float(torch.linalg.eigvalsh(torch.kron(inputs, outputs)).max())
    assert found == pytest.approx(expected, rel=0.02)


def test_the_strength_of_a_pull_is_found_where_equal_numbers_are_orthogonal_to_it() -> None:
    left = torch.eye(2, dtype=torch.float64) + torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
    pull = (left, torch.eye(3, dtype=torch.float64))
    assert TwoSided(left, pull[1], pull).pull_strength == pytest.approx(3.0, rel=0.02)
