"""A precision that fades: never below the prior, its mean exactly, and back to the prior in the end."""

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nclbayes.kronecker import KroneckerPrecision, SumRule, fade, kronecker_sum
from tests.kronecker.matrices import kron, psd, spd
from tests.kronecker.test_sums import property_test

# Rounding of a generalised eigenvalue, for condition numbers up to 1e6.
TOLERANCE = 1e-9


def relative(first: KroneckerPrecision, second: KroneckerPrecision) -> np.ndarray:
    """The eigenvalues of one precision relative to another, ascending, by dense algebra."""
    return scipy.linalg.eigh(kron(first.input, first.output), kron(second.input, second.output), eigvals_only=True)


def above(prior: KroneckerPrecision, rng: np.random.Generator, sides: tuple[float, float]) -> KroneckerPrecision:
    """A Kronecker product that is nowhere below the prior, its factors in units of their own."""
    (m, n), unit = prior.shape, 10 ** rng.uniform(-3, 3)
    A = prior.input + psd(rng, n, int(rng.integers(n + 1)), 100.0, sides[0])
    G = prior.output + psd(rng, m, int(rng.integers(m + 1)), 100.0, sides[1])
    return KroneckerPrecision.factorise(unit * A, G / unit)


@st.composite
def pairs(draw) -> tuple[KroneckerPrecision, KroneckerPrecision]:
    """A precision and a prior below it."""
    n, m = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    prior = KroneckerPrecision.factorise(spd(rng, n, 10.0, 2.0), spd(rng, m, 10.0, 0.5))
    return above(prior, rng, (10 ** draw(st.floats(-2, 4)), 10 ** draw(st.floats(-2, 4)))), prior


@property_test
@given(pairs(), st.floats(0.01, 1.0))
def test_a_faded_precision_lies_between_the_prior_and_what_it_was(pair, r: float) -> None:
    learnt, prior = pair
    faded = fade(learnt, prior, r)
    assert relative(faded, prior)[0] >= 1 - TOLERANCE
    assert relative(faded, learnt)[-1] <= 1 + TOLERANCE


@property_test
@given(pairs(), st.floats(0.01, 1.0))
def test_the_mean_precision_relative_to_the_prior_fades_exactly(pair, r: float) -> None:
    learnt, prior = pair
    exact = r * relative(learnt, prior).mean() + 1 - r
    np.testing.assert_allclose(relative(fade(learnt, prior, r), prior).mean(), exact, rtol=1e-9)


@property_test
@given(pairs())
def test_nothing_fades_at_one_and_everything_near_zero(pair) -> None:
    learnt, prior = pair
    np.testing.assert_allclose(relative(fade(learnt, prior, 1.0), learnt), 1, rtol=1e-9)
    # Of the excess, up to 1e10 times the prior, a share r remains on average.
    np.testing.assert_allclose(relative(fade(learnt, prior, 1e-20), prior), 1, rtol=1e-6)


@pytest.mark.parametrize("shape", [(4, 6), (1, 6), (4, 1), (1, 1)])
def test_it_is_exact_where_one_side_is_a_multiple_of_the_prior(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    m, n = shape
    prior = KroneckerPrecision.factorise(spd(rng, n, 10.0), spd(rng, m, 10.0))
    wide = KroneckerPrecision.factorise(prior.input + spd(rng, n, 50.0, 30.0), 7 * prior.output)
    tall = KroneckerPrecision.factorise(0.3 * prior.input, 9 * prior.output + spd(rng, m, 50.0, 30.0))
    for learnt in (wide, tall):
        np.testing.assert_allclose(
            fade(learnt, prior, 0.7).dense(), 0.7 * learnt.dense() + 0.3 * prior.dense(), rtol=1e-9, atol=1e-9
        )


def test_a_stack_fades_matrix_by_matrix() -> None:
    rng = np.random.default_rng(1)
    prior = KroneckerPrecision.factorise(spd(rng, 4, 10.0), spd(rng, 3, 10.0))
    learnt = [above(prior, rng, (10.0, 1000.0)) for _ in range(3)]

    def stacked(precisions: list[KroneckerPrecision]) -> KroneckerPrecision:
        return KroneckerPrecision.factorise(
            torch.stack([p.input for p in precisions]), torch.stack([p.output for p in precisions])
        )

    together = fade(stacked(learnt), stacked([prior] * 3), 0.9)
    for k, one in enumerate(learnt):
        torch.testing.assert_close(together.dense()[k], fade(one, prior, 0.9).dense(), rtol=1e-12, atol=1e-12)


def fisher(rng: np.random.Generator, n: int, m: int) -> tuple[Tensor, Tensor]:
    """That of a small task, some of whose inputs and outputs are silent."""
    C, D = psd(rng, n, n - 2, 100.0, 20.0), psd(rng, m, m - 1, 100.0, 0.5)
    C[-2:, :] = C[:, -2:] = 0
    D[-1, :] = D[:, -1] = 0
    return C, D


@pytest.mark.parametrize("rule", [rule.value for rule in SumRule])
def test_over_hundreds_of_tasks_fading_never_goes_below_the_prior(rule: str) -> None:
    """Sums by "kl" and "mse" fall below it themselves: there, fading must not take away any more."""
    rng = np.random.default_rng(2)
    prior = KroneckerPrecision.factorise(torch.diag(torch.tensor([1.0] * 5 + [0.25]).double()), torch.eye(4).double())
    learnt, sums_stay_above = prior, rule in ("additive", "bound", "naive")
    for _ in range(150):
        before = relative(learnt, prior)[0]
        faded = fade(learnt, prior, 0.95)
        assert relative(faded, prior)[0] >= min(before, 1) - TOLERANCE
        assert before >= 1 - TOLERANCE or not sums_stay_above
        learnt = kronecker_sum(faded.input, faded.output, *fisher(rng, 6, 4), rule, measure=False)
    for _ in range(300):
        learnt = fade(learnt, prior, 0.95)
    # Without new data it comes back to the prior: a sum with cross terms would stay at 4 r / (1 - r) = 76 times it.
    np.testing.assert_allclose(relative(learnt, prior), 1, rtol=1e-2)


@pytest.mark.parametrize(("rule", "ends_above"), [("additive", True), ("bound", True), ("kl", False)])
def test_a_rule_of_the_sums_would_not_do(rule: str, ends_above: bool) -> None:
    """What fading by the sums' own rules comes to: far above the prior, or below it."""
    rng, r = np.random.default_rng(3), 0.95
    prior = KroneckerPrecision.factorise(torch.eye(6).double(), torch.eye(4).double())
    learnt: KroneckerPrecision = kronecker_sum(prior.input, prior.output, *fisher(rng, 6, 4), "additive")
    lowest = 1.0
    for _ in range(200):
        learnt = kronecker_sum(r * learnt.input, learnt.output, (1 - r) * prior.input, prior.output, rule)
        lowest = min(lowest, relative(learnt, prior)[0])
    assert (relative(learnt, prior)[0] > 50) == ends_above
    assert (lowest < 0.99) != ends_above
