"""Whether numbers are finite."""

from __future__ import annotations

import pytest
import torch

from nclbayes.kronecker import is_finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_one_entry_is_enough(dtype: torch.dtype, wrong: float) -> None:
    values = torch.randn(7, 5, dtype=dtype)
    assert is_finite(values)
    values[3, 2] = wrong
    assert not is_finite(values)


def test_infinities_of_both_signs_do_not_cancel() -> None:
    assert not is_finite(torch.tensor([float("inf"), -float("inf")]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_finite_entries_whose_sum_is_not(dtype: torch.dtype) -> None:
    values = torch.full((64,), torch.finfo(dtype).max, dtype=dtype)
    assert torch.isinf(values.sum())
    assert is_finite(values)


def test_whole_numbers_and_nothing_at_all() -> None:
    assert is_finite(torch.tensor([1, 2, 3]))
    assert is_finite(torch.empty(0))
