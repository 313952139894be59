"""Honest Gaussians pass, however ill conditioned; what does not belong together does not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from nclbayes.gaussians.checking import check_parts
from nclbayes.kronecker import KroneckerPrecision, kronecker_sum
from nclbayes.storage import Misfit
from tests.kronecker.matrices import psd, spd

PARTS = ("input", "output", "input_inverse", "output_inverse", "input_root", "output_root", "logdet")


def parts(precision: KroneckerPrecision) -> dict[str, Tensor]:
    m, n = precision.shape
    return {"loc": torch.zeros(m, n), **{part: getattr(precision, part) for part in PARTS}}


@pytest.mark.parametrize("rule", ["kl", "additive", "bound", "mse"])
@pytest.mark.parametrize("condition", [1.0, 1e4, 1e8, 1e12])
@pytest.mark.parametrize(("n", "m"), [(1, 3), (9, 5), (65, 40)])
def test_sums_of_any_condition_number_pass(n: int, m: int, condition: float, rule: str) -> None:
    rng = np.random.default_rng(0)
    A, G = spd(rng, n, condition), spd(rng, m, min(condition, 1e8))
    check_parts("x", parts(KroneckerPrecision.factorise(A, G)))
    for rank in (1, m):
        total = kronecker_sum(A, G, psd(rng, n, min(n, rank)), psd(rng, m, min(m, rank)), rule, measure=False)
        check_parts("x", parts(total))
        A, G = total.input, total.output


@pytest.mark.parametrize("condition", [10.0, 1e6, 1e10])
@pytest.mark.parametrize("part", [part for part in PARTS if part != "logdet"])
def test_a_part_of_another_gaussian_is_refused(condition: float, part: str) -> None:
    rng = np.random.default_rng(0)
    own, other = (parts(KroneckerPrecision.factorise(spd(rng, 9, condition), spd(rng, 9, condition))) for _ in range(2))
    for foreign in (other[part], 1.1 * own[part], own[part].mT + torch.eye(9, dtype=torch.float64)):
        with pytest.raises(Misfit, match=f"'x/{part.partition('_')[0]}"):
            check_parts("x", {**own, part: foreign})


def test_a_stack_is_checked_matrix_by_matrix() -> None:
    rng = np.random.default_rng(0)
    A, G = (torch.stack([spd(rng, k, 100.0) for _ in range(3)]) for k in (4, 2))
    good = parts(KroneckerPrecision.factorise(A, G))
    check_parts("x", good)
    with pytest.raises(Misfit, match="input_inverse"):
        check_parts("x", {**good, "input_inverse": good["input_inverse"].flip(0)})
    with pytest.raises(Misfit, match="log determinant"):
        check_parts("x", {**good, "logdet": good["logdet"] + 1e-6})
