"""The `kl` rule at the size of a layer, with factors of condition number 1e8 in unrelated bases."""

from functools import lru_cache

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import torch
from torch import Tensor

from nclbayes.kronecker import KroneckerSum, kronecker_sum
from nclbayes.kronecker.pencil import Pencil
from nclbayes.kronecker.rules import kl
from tests.kronecker.matrices import inverse_error, psd, spd

SIZES = [(257, 256), (1025, 512)]
EPS = torch.finfo(torch.float64).eps


def cases(names: str, **given: tuple[object, ...]) -> pytest.MarkDecorator:
    """Every case at the smaller size and the first at the larger, where the others are exhaustive."""
    made = [
        pytest.param(*size, *case, id=f"{name}-{size[0]}x{size[1]}", marks=marks)
        for size in SIZES
        for k, (name, case) in enumerate(given.items())
        for marks in [pytest.mark.exhaustive if k and size is SIZES[1] else ()]
    ]
    return pytest.mark.parametrize(f"n, m, {names}", made)


@lru_cache(maxsize=2)
def wide(n: int, m: int) -> dict[str, Tensor]:
    """A, B, C, D of condition number 1e8, and C and D of rank one: random, or where A and B are large."""
    rng = np.random.default_rng(0)
    made = {"A": spd(rng, n, 1e8), "B": spd(rng, m, 1e8), "C": spd(rng, n, 1e8), "D": spd(rng, m, 1e8)}
    made |= {"C1": psd(rng, n, 1), "D1": psd(rng, m, 1)}
    return made | {"C1-leading": _leading(made["A"]), "D1-leading": _leading(made["B"])}


def _leading(matrix: Tensor, k: int = 5) -> Tensor:
    """v v^T, v the mean of the k leading eigenvectors."""
    v = torch.linalg.eigh(matrix)[1][:, -k:].sum(1) / k**0.5
    return torch.outer(v, v)


def trace(p: Tensor, q: Tensor) -> float:
    return float((p * q).sum())


def assert_stationary(total: KroneckerSum, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> None:
    """The four scalar equations to 1e-10, and the matrix equations, from public results alone, to 1e-6."""
    assert total.iterations < 200
    left, right = Pencil.of(A, C, ("A", "C")), Pencil.of(B, D, ("B", "D"))
    x1, x2, y1, y2 = (float(s) for s in kl(left, right)[:4])
    c, d = left.values.numpy(), right.values.numpy()
    equations = [
        (x1, np.mean(1 / (y1 + y2 * d))),
        (y1, np.mean(1 / (x1 + x2 * c))),
        (x2, np.mean(d / (y1 + y2 * d))),
        (y2, np.mean(c / (x1 + x2 * c))),
    ]
    adds_nothing = c[-1] == 0 or d[-1] == 0  # then x2 and y2 are free, and are set to zero
    for scalar, mean in equations[: 2 if adds_nothing else 4]:
        assert scalar == pytest.approx(mean, rel=1e-10)

    X, Y = total.input, total.output
    n, m = len(X), len(Y)
    expected_X = (trace(B, total.output_inverse) * A + trace(D, total.output_inverse) * C) / m
    expected_Y = (trace(A, total.input_inverse) * B + trace(C, total.input_inverse) * D) / n
    assert float((X - expected_X).norm()) < 1e-6 * float(X.norm())
    assert float((Y - expected_Y).norm()) < 1e-6 * float(Y.norm())


@cases(
    "C, D",
    full_rank=("C", "D"),
    C_rank_one_and_D_rank_one_and_leading=("C1", "D1-leading"),
    both_rank_one_and_leading=("C1-leading", "D1-leading"),
)
def test_well_matched_sums_are_inverted_to_1e_6(n, m, C, D):
    f = wide(n, m)
    _assert_inverted(*(f[name] for name in ("A", "B", C, D)))


@cases("scale", small=(0.01,), large=(9.0,))
def test_rank_one_next_to_a_proportional_factor_is_inverted_to_1e_6(n, m, scale):
    f = wide(n, m)
    for A, B, C, D in (
        (f["A"], f["B"], f["C1"], scale * f["B"]),
        (f["A"], f["B"], scale * f["A"], f["D1"]),
    ):
        total = _assert_inverted(A, B, C, D, condition=1e9)
        assert abs(float(total.kl)) < 1e-12  # exact


@cases("c, d", left=(0, 1), right=(1, 0), both=(0, 0))
def test_adding_zero_changes_nothing(n, m, c, d):
    f = wide(n, m)
    total = _assert_inverted(f["A"], f["B"], c * f["C"], d * f["D"])
    assert float(total.kl) == 0
    assert float(total.clipped) == 0
    scale = float(total.input.norm() / f["A"].norm())
    torch.testing.assert_close(total.input, scale * f["A"], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(total.output, f["B"] / scale, rtol=1e-12, atol=1e-14)


@cases("C, D", C_rank_one=("C1", "D"), D_rank_one=("C", "D1"), both_rank_one=("C1", "D1"))
def test_unmatched_rank_one_is_inverted_as_well_as_its_condition_allows(n, m, C, D):
    # X gets a condition number of up to 3e13 here, beyond what an explicit float64 inverse can undo to 1e-6.
    f = wide(n, m)
    A, B, C, D = (f[name] for name in ("A", "B", C, D))
    total = kronecker_sum(A, B, C, D)
    assert_stationary(total, A, B, C, D)
    conditions = []
    for matrix, inverse, root in (
        (total.input, total.input_inverse, total.input_root),
        (total.output, total.output_inverse, total.output_root),
    ):
        values = torch.linalg.eigvalsh(matrix)
        conditions.append(float(values[-1] / values[0]))
        assert values[0] > 0
        assert inverse_error(matrix, inverse) <= max(1e-6, 100 * EPS * conditions[-1])
        assert inverse_error(root.mT, matrix @ root) <= max(1e-6, 100 * EPS * conditions[-1])
    assert max(conditions) > 1e9


@pytest.mark.parametrize(("C", "D"), [("C", "D"), ("C1", "D"), ("C", "D1"), ("C1", "D1"), ("C1-leading", "D1-leading")])
def test_wide_spectra_give_the_divergence_of_an_independent_search(C, D):
    f = wide(*SIZES[0])
    c, d = _spectrum(f["A"], f[C], "1" in C), _spectrum(f["B"], f[D], "1" in D)

    def phi(values: np.ndarray, r: float) -> float:
        return np.mean(values / (1 + r * values)) / np.mean(1 / (1 + r * values))

    t = np.exp(scipy.optimize.brentq(lambda u: np.log(phi(c, phi(d, np.exp(u)))) - u, -80, 80, xtol=1e-14))
    s = phi(d, t)
    r = (1 + np.outer(c, d)) / (np.outer(1 + s * c, 1 + t * d) * np.mean(1 / (1 + t * d)))
    expected = np.sum(r - 1 - np.log(r)) / 2
    # Where C has rank one, the other eigenvalues of the pencil are rounding errors, which D magnifies.
    assert float(kronecker_sum(f["A"], f["B"], f[C], f[D]).kl) == pytest.approx(expected, rel=1e-4)


def _spectrum(base: Tensor, added: Tensor, rank_one: bool) -> np.ndarray:
    """The eigenvalues of C relative to A; those of a C of rank one without rounding errors."""
    if not rank_one:
        return scipy.linalg.eigh(added.numpy(), base.numpy(), eigvals_only=True).clip(0)
    return np.append(np.zeros(len(base) - 1), np.trace(np.linalg.solve(base.numpy(), added.numpy())))


def _assert_inverted(A: Tensor, B: Tensor, C: Tensor, D: Tensor, condition: float = 2e10) -> KroneckerSum:
    total = kronecker_sum(A, B, C, D)
    assert_stationary(total, A, B, C, D)
    for matrix, inverse in ((total.input, total.input_inverse), (total.output, total.output_inverse)):
        values = torch.linalg.eigvalsh(matrix)
        assert 0 < float(values[-1] / values[0]) <= condition
        assert inverse_error(matrix, inverse) < 1e-6
    return total
