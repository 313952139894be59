"""The five rules of a Kronecker sum: brute force, closed forms and invariants."""

import itertools
from typing import NamedTuple

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nclbayes.kronecker import SumRule, kronecker_sum
from tests.kronecker.matrices import dense_kl, kron, psd, ratios, spd, sum_kl

RULES = [rule.value for rule in SumRule]
property_test = settings(max_examples=50, deadline=None, derandomize=True, database=None)


class Factors(NamedTuple):
    """The four factors of A (x) B + C (x) D."""

    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor

    def dense(self) -> np.ndarray:
        return kron(self.A, self.B) + kron(self.C, self.D)


@st.composite
def factors(draw, full_rank=False) -> Factors:
    """Sums up to 5-by-5, over four decades of scale and three of condition number, with C and D of any rank."""
    n, m = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def power(low: float, high: float) -> float:
        return 10 ** draw(st.floats(low, high))

    ranks = (n, m) if full_rank else (draw(st.integers(0, n)), draw(st.integers(0, m)))
    return Factors(
        A=spd(rng, n, power(0, 3), power(-2, 2)),
        B=spd(rng, m, power(0, 3), power(-2, 2)),
        C=psd(rng, n, ranks[0], power(0, 3), power(-2, 2)),
        D=psd(rng, m, ranks[1], power(0, 3), power(-2, 2)),
    )


def generic(n: int, m: int, seed: int = 0, rank: int | None = None) -> Factors:
    rng = np.random.default_rng(seed)
    ranks = (n, m) if rank is None else (min(rank, n), min(rank, m))
    return Factors(
        spd(rng, n, 20, 2.0), spd(rng, m, 20, 0.5), psd(rng, n, ranks[0], 20, 5.0), psd(rng, m, ranks[1], 20, 1.0)
    )


def assert_same(actual, expected, rtol: float = 1e-9) -> None:
    """Equal relative to the largest entry."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=rtol * np.abs(expected).max())


def brute_force(exact: np.ndarray, n: int, m: int) -> tuple[float, np.ndarray]:
    """The smallest KL of any Kronecker product and that product, by BFGS over two full Cholesky factors."""
    blocks = exact.reshape(n, m, n, m)
    constant = np.linalg.slogdet(exact)[1] + n * m
    (left_rows, left_columns), (right_rows, right_columns) = np.tril_indices(n), np.tril_indices(m)
    split = len(left_rows)

    def unpack(parameters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        P, R = np.zeros((n, n)), np.zeros((m, m))
        P[left_rows, left_columns], R[right_rows, right_columns] = parameters[:split], parameters[split:]
        return P, R

    def objective(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        P, R = unpack(parameters)
        X_inverse, Y_inverse = np.linalg.inv(P @ P.T), np.linalg.inv(R @ R.T)
        M = np.einsum("aibj,ij->ab", blocks, Y_inverse)
        N = np.einsum("aibj,ab->ij", blocks, X_inverse)
        logdet = 2 * m * np.log(np.abs(np.diag(P))).sum() + 2 * n * np.log(np.abs(np.diag(R))).sum()
        value = (np.sum(M * X_inverse) + logdet - constant) / 2
        dP = (m * X_inverse - X_inverse @ M @ X_inverse) @ P
        dR = (n * Y_inverse - Y_inverse @ N @ Y_inverse) @ R
        return value, np.concatenate([dP[left_rows, left_columns], dR[right_rows, right_columns]])

    start = np.concatenate([np.eye(n)[left_rows, left_columns], np.eye(m)[right_rows, right_columns]])
    assert scipy.optimize.check_grad(lambda p: objective(p)[0], lambda p: objective(p)[1], start + 0.1) < 1e-3
    found = scipy.optimize.minimize(objective, start, jac=True, method="BFGS", options={"gtol": 1e-8, "maxiter": 5000})
    P, R = unpack(found.x)
    return found.fun, np.kron(P @ P.T, R @ R.T)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 4), (2, 3), (4, 4), (6, 3), (3, 6), (6, 6)])
@pytest.mark.parametrize(("seed", "rank"), [(0, None), (1, 1)])
def test_kl_is_the_brute_force_minimum(n, m, seed, rank):
    f = generic(n, m, seed, rank)
    minimum, product = brute_force(f.dense(), n, m)
    total = kronecker_sum(*f)
    assert dense_kl(kron(total.input, total.output), f.dense()) == pytest.approx(minimum, rel=1e-6, abs=1e-9)
    assert float(total.kl) == pytest.approx(minimum, rel=1e-6, abs=1e-9)
    assert_same(kron(total.input, total.output), product, rtol=1e-4)


@property_test
@given(factors())
def test_no_rule_has_a_smaller_divergence_than_kl(f):
    divergence = {rule: sum_kl(*_sides(kronecker_sum(*f, rule)), *f) for rule in RULES}
    for rule in RULES:
        assert divergence["kl"] <= divergence[rule] * (1 + 1e-8) + 1e-9, rule
    assert divergence["bound"] <= divergence["additive"] * (1 + 1e-8) + 1e-9


@property_test
@given(factors())
def test_additive_and_bound_never_underestimate(f):
    for rule in ("additive", "bound"):
        assert ratios(*_sides(kronecker_sum(*f, rule)), *f).max() <= 1 + 1e-9, rule


def test_kl_does_underestimate_some_direction():
    # What the two rules above avoid is there to be avoided.
    f = generic(4, 3)
    assert ratios(*_sides(kronecker_sum(*f)), *f).max() > 1.1


@property_test
@given(factors(full_rank=True))
def test_bound_is_the_best_of_the_additive_family(f):
    def divergence(log_pi: float) -> float:
        pi = np.exp(log_pi)
        return sum_kl(f.A + pi * f.C, f.B + f.D / pi, *f)

    best = float(kronecker_sum(*f, "bound").kl)
    c, d = (scipy.linalg.eigh(p, q, eigvals_only=True) for p, q in ((f.C, f.A), (f.D, f.B)))
    grid = np.linspace(-np.log(c[-1]) - 5, np.log(d[-1]) + 5, 60)
    assert best <= min(divergence(u) for u in grid) * (1 + 1e-9) + 1e-10


@property_test
@given(factors(), st.sampled_from(RULES))
def test_every_rule_reports_its_own_divergence(f, rule):
    total = kronecker_sum(*f, rule)
    assert float(total.kl) == pytest.approx(sum_kl(*_sides(total), *f), rel=1e-7, abs=1e-9)


@property_test
@given(factors())
def test_kl_reports_the_divergence_of_the_additive_sum_too(f):
    total = kronecker_sum(*f)
    additive = sum_kl(*_sides(kronecker_sum(*f, "additive")), *f)
    assert float(total.start_kl) == pytest.approx(additive, rel=1e-7, abs=1e-9)
    assert float(total.kl) <= float(total.start_kl)


@property_test
@given(factors(), st.sampled_from(RULES))
def test_inverses_roots_and_log_determinant_belong_to_the_factors(f, rule):
    total = kronecker_sum(*f, rule)
    X, Y = _sides(total)
    for matrix, inverse, root in (
        (X, total.input_inverse, total.input_root),
        (Y, total.output_inverse, total.output_root),
    ):
        slack = 1e-13 * np.linalg.cond(matrix)
        np.testing.assert_allclose(matrix @ inverse, np.eye(len(matrix)), rtol=0, atol=slack)
        np.testing.assert_allclose(root.mT @ matrix @ root, np.eye(len(matrix)), rtol=0, atol=slack)
    n, m = len(X), len(Y)
    expected = m * np.linalg.slogdet(X.numpy())[1] + n * np.linalg.slogdet(Y.numpy())[1]
    np.testing.assert_allclose(float(total.logdet), expected, rtol=1e-8, atol=1e-8)


@property_test
@given(factors())
def test_kl_meets_the_stationarity_equations(f):
    total = kronecker_sum(*f)
    X, Y = (side.numpy() for side in _sides(total))
    n, m = len(X), len(Y)
    A, B, C, D = (t.numpy() for t in f)
    X_inverse, Y_inverse = np.linalg.inv(X), np.linalg.inv(Y)
    assert_same(X, (np.trace(B @ Y_inverse) * A + np.trace(D @ Y_inverse) * C) / m, rtol=1e-8)
    assert_same(Y, (np.trace(A @ X_inverse) * B + np.trace(C @ X_inverse) * D) / n, rtol=1e-8)


@property_test
@given(factors(), st.floats(1e-3, 1e3), st.sampled_from(["kl", "mse"]), st.booleans())
def test_kl_and_mse_are_exact_where_one_side_is_proportional(f, k, rule, left):
    f = f._replace(C=k * f.A) if left else f._replace(D=k * f.B)
    total = kronecker_sum(*f, rule)
    np.testing.assert_allclose(ratios(*_sides(total), *f), 1.0, rtol=1e-7)
    assert abs(float(total.kl)) < 1e-12


@property_test
@given(factors(), st.sampled_from(RULES), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_scaling_one_side_scales_the_product(f, rule, j, k):
    product = kron(*_sides(kronecker_sum(*f, rule)))
    scaled = kronecker_sum(j * f.A, k * f.B, j * f.C, k * f.D, rule)
    # The divergence is flat around its minimum: it tells `bound` its pi to about the square root of the precision.
    assert_same(kron(*_sides(scaled)), j * k * product, rtol=1e-6)


@property_test
@given(factors(), st.sampled_from(["kl", "additive", "bound", "mse"]), st.floats(1e-3, 1e3))
def test_a_scale_may_move_between_the_factors_of_one_product(f, rule, k):
    product = kron(*_sides(kronecker_sum(*f, rule)))
    assert_same(kron(*_sides(kronecker_sum(f.A / k, k * f.B, f.C, f.D, rule))), product, rtol=1e-6)
    assert_same(kron(*_sides(kronecker_sum(f.A, f.B, k * f.C, f.D / k, rule))), product, rtol=1e-6)


@property_test
@given(factors(), st.sampled_from(RULES))
def test_the_two_sides_are_treated_alike(f, rule):
    X, Y = _sides(kronecker_sum(*f, rule))
    swapped_Y, swapped_X = _sides(kronecker_sum(f.B, f.A, f.D, f.C, rule))
    assert_same(kron(swapped_X, swapped_Y), kron(X, Y), rtol=1e-6)


@property_test
@given(factors())
def test_mse_is_the_leading_singular_pair_of_the_rearranged_sum(f):
    total = kronecker_sum(*f, "mse")
    A, B, C, D, X, Y = (t.numpy().ravel() for t in (*f, *_sides(total)))
    rearranged = np.outer(A, B) + np.outer(C, D)  # [n^2, m^2]
    u, sigma, v = np.linalg.svd(rearranged)
    assert np.linalg.norm(rearranged - np.outer(X, Y)) == pytest.approx(np.linalg.norm(sigma[1:]), abs=1e-9 * sigma[0])
    assume(len(sigma) == 1 or sigma[1] < 0.9 * sigma[0])
    assert_same(np.outer(X, Y), sigma[0] * np.outer(u[:, 0], v[0]), rtol=1e-8)


def test_mse_keeps_a_first_product_that_is_twelve_decades_smaller():
    diagonals = {"A": [1.0, 2.0, 4.0], "B": [3.0, 1.0], "C": [1e8, 0.0, 0.0], "D": [1e4, 0.0]}
    A, B, C, D = (np.array(v) for v in diagonals.values())
    total = kronecker_sum(*(torch.diag(torch.from_numpy(v)) for v in (A, B, C, D)), "mse")
    P, Q = np.array([[A @ A, A @ C], [C @ A, C @ C]]), np.array([[B @ B, B @ D], [D @ B, D @ D]])
    (a, b), (c, d) = Q @ P
    largest = (a + d + np.sqrt((a - d) ** 2 + 4 * b * c)) / 2
    x1 = float(total.input[1, 1]) / A[1]  # where C is zero
    x2 = (float(total.input[0, 0]) - x1 * A[0]) / C[0]
    assert x1 / x2 == pytest.approx(b / (largest - a), rel=1e-9)


@property_test
@given(factors())
def test_additive_and_naive_follow_their_formulas(f):
    A, B, C, D = (t.numpy() for t in f)
    if np.abs(C).max() > 0 and np.abs(D).max() > 0:
        pi = np.sqrt(np.trace(A) * np.trace(D) / (np.trace(B) * np.trace(C)))
        expected = np.kron(A + pi * C, B + D / pi)
    else:
        expected = np.kron(A, B)
    assert_same(kron(*_sides(kronecker_sum(*f, SumRule.ADDITIVE))), expected, rtol=1e-10)
    assert_same(kron(*_sides(kronecker_sum(*f, SumRule.NAIVE))), np.kron(A + C, B + D), rtol=1e-10)


@pytest.mark.parametrize(("n", "m", "rank"), [(5, 4, None), (30, 20, None), (30, 20, 3), (4, 40, 1)])
def test_alternating_the_scalar_equations_descends_to_the_same_ratios(n, m, rank):
    f = generic(n, m, seed=3, rank=rank)
    c, d = (scipy.linalg.eigh(p, q, eigvals_only=True).clip(0) for p, q in ((f.C, f.A), (f.D, f.B)))

    def divergence(x1: float, x2: float, y1: float, y2: float) -> float:
        r = (1 + np.outer(c, d)) / np.outer(x1 + x2 * c, y1 + y2 * d)
        return float(np.sum(r - 1 - np.log(r)) / 2)

    y1 = y2 = 1.0
    history = []
    for _ in range(200):
        x1, x2 = np.mean(1 / (y1 + y2 * d)), np.mean(d / (y1 + y2 * d))
        history.append(divergence(x1, x2, y1, y2))
        y1, y2 = np.mean(1 / (x1 + x2 * c)), np.mean(c / (x1 + x2 * c))
        history.append(divergence(x1, x2, y1, y2))
    slack = 1e-12 * history[0]
    assert all(later <= earlier + slack for earlier, later in itertools.pairwise(history))
    assert history[1] < history[0] - 1e-6 * history[0]

    total = kronecker_sum(*f)
    assert float(total.kl) == pytest.approx(history[-1], rel=1e-10)
    assert _ratio(total.input, f.A, f.C) == pytest.approx(x2 / x1, rel=1e-9)
    assert _ratio(total.output, f.B, f.D) == pytest.approx(y2 / y1, rel=1e-9)


def _sides(total) -> tuple[Tensor, Tensor]:
    return total.input, total.output


def _ratio(matrix: Tensor, base: Tensor, added: Tensor) -> float:
    """x2 / x1 of a matrix x1 A + x2 C."""
    columns = torch.stack([base.flatten(), added.flatten()], dim=1)
    x1, x2 = np.linalg.lstsq(columns.numpy(), matrix.flatten().numpy(), rcond=None)[0]
    return x2 / x1
