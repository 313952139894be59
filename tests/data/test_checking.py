"""Numbers, batches and targets as they may be handed in."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from nclbayes import LaplaceNCL
from nclbayes.data.checking import AllowedTargets, check_tensor, checked_batch, flag, number, whole_number
from nclbayes.errors import DataError, SettingError


@pytest.mark.parametrize("value", [None, "3", True, [], 1j, torch.tensor(3.0), math.nan, math.inf, 10**400])
def test_what_is_no_finite_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(SettingError, match="lr must be"):
        number("lr", value)
    with pytest.raises(SettingError, match="steps must be"):
        whole_number("steps", value)


def test_numbers_are_of_pythons_own_kind() -> None:
    assert type(number("lr", np.float32(0.5))) is float
    assert type(number("lr", 1)) is int
    assert type(whole_number("steps", np.int64(3))) is int
    assert whole_number("steps", 3.0) == 3
    for value in (0, 2.5, -1, 2**63):
        with pytest.raises(SettingError, match="steps must be a whole number of at least 1, not"):
            whole_number("steps", value)
    with pytest.raises(SettingError, match=r"lr must be positive, not a tensor of shape \(\); .* by \.item\(\)"):
        number("lr", torch.tensor(1.0), lambda v: v > 0, "positive")
    with pytest.raises(SettingError, match="progress must be True or False, not 'yes'"):
        flag("progress", "yes")


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (None, "A batch is None; it must be a tuple of tensors"),
        ({"x": torch.zeros(2)}, "A batch is a dict"),
        ((), "holds nothing"),
        (("a", 3), "holds a str, a int.*torch.as_tensor"),
        ((torch.zeros(3), torch.tensor(1.0)), "examples along the first dimension"),
        ((torch.zeros(0, 3), torch.zeros(0)), "has 0 examples"),
        ((torch.zeros(2, 3), torch.zeros(2, 0)), r"shape \(2, 0\): there is nothing in them"),
        ((torch.zeros(2, 3).to_sparse(), torch.zeros(2)), r"layout torch.sparse_coo.*x\.to_dense"),
        ((torch.zeros(2, 3, device="meta"), torch.zeros(2)), "'meta', and holds no data"),
    ],
)
def test_what_is_no_batch_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        checked_batch(batch)


def test_a_tensor_alone_is_a_batch() -> None:
    x = torch.zeros(4, 2)
    assert checked_batch(x) == (x,)
    assert checked_batch([x, x]) == (x, x)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_without_plain_memory_are_refused() -> None:
    with pytest.raises(DataError, match=r"The inputs is quantized.*x\.dequantize"):
        check_tensor(torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8), "The inputs")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (torch.tensor([0, 3]), "range from 0 to 3, but there are three"),
        (torch.tensor([-1, 2]), "range from -1 to 2"),
        (torch.tensor([0.0, math.nan]), "NaN or infinity.*, or put a number there and mask it"),
        (torch.tensor([0, 1], dtype=torch.uint16), r"torch\.uint16, which torch cannot compare: use target\.long\(\)"),
        (torch.tensor([0.0, 0.5]), "whole numbers: there are three"),
        (torch.tensor([1j]), "complex"),
    ],
)
def test_values_that_targets_cannot_have(target: torch.Tensor, message: str) -> None:
    allowed = AllowedTargets(0, 2, whole=True, why="there are three")
    allowed.check(torch.tensor([0.0, 1.0, 2.0]))
    allowed.check(torch.tensor([True, False]).long())
    with pytest.raises(DataError, match=message):
        allowed.check(target)


def test_numbers_that_are_flushed_to_zero_are_refused() -> None:
    """While a task is learnt they are 0, and a setting that was positive would no longer be."""
    with pytest.raises(SettingError, match=r"fisher_temperature is too small to be told from 0: 1e-320"):
        LaplaceNCL(fisher_temperature=1e-320)
    assert LaplaceNCL(alpha=0).alpha == 0


def test_a_damping_whose_square_cannot_be_held_is_refused() -> None:
    with pytest.raises(SettingError, match=r"alpha must be at least 0 and at most 1e100, not 1e\+300"):
        LaplaceNCL(alpha=1e300)
