"""A precision that counts by its shape: as stiff as is asked for, in the directions that it had."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nclbayes.kronecker import KroneckerPrecision, SumRule, kronecker_sum, stiffen
from tests.kronecker.matrices import psd, spd
from tests.kronecker.test_fading import TOLERANCE, above, pairs, relative
from tests.kronecker.test_sums import property_test


@property_test
@given(pairs(), st.floats(0.1, 1e4))
def test_the_mean_direction_is_as_stiff_as_is_asked_for_and_none_is_below_the_prior(pair, stiffness: float) -> None:
    learnt, prior = pair
    held = relative(stiffen(learnt, prior, stiffness), prior)
    assert held[0] >= 1 - 1e-6
    sides = [
        np.linalg.eigvals(np.linalg.solve(p, q)).real
        for p, q in ((prior.input, learnt.input), (prior.output, learnt.output))
    ]
    # A side that is a multiple of its prior has no directions to hold; the other has them all.
    shaped = [side.max() / side.min() > 1 + 1e-6 for side in sides]
    if all(shaped):
        np.testing.assert_allclose(held.mean(), (1 + stiffness) * 2, rtol=1e-5)


@property_test
@given(pairs(), st.floats(1e-3, 1e3))
def test_only_the_product_counts(pair, unit: float) -> None:
    learnt, prior = pair
    other = KroneckerPrecision.factorise(unit * learnt.input, learnt.output / unit)
    first, second = (stiffen(p, prior, 100.0) for p in (learnt, other))
    np.testing.assert_allclose(relative(first, second), 1.0, rtol=1e-6)


def test_the_size_of_what_was_learnt_and_the_width_of_the_prior_do_not_count() -> None:
    """One side learnt: ten times the examples, or a prior of another width, give the same stiffness."""
    rng = np.random.default_rng(0)
    C = psd(rng, 4, 2, 10.0, 1.0)
    found = []
    for width, examples in ((1.0, 1.0), (1.0, 10.0), (0.1, 10.0), (30.0, 1.0)):
        prior = KroneckerPrecision.factorise(torch.eye(4).double() / width, torch.eye(3).double())
        learnt = KroneckerPrecision.factorise(prior.input + examples * C, prior.output)
        found.append(relative(stiffen(learnt, prior, 50.0), prior))
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=TOLERANCE)


def test_a_prior_stays_what_it_is() -> None:
    prior = KroneckerPrecision.factorise(torch.diag(torch.tensor([1.0, 4.0])).double(), torch.eye(3).double())
    np.testing.assert_allclose(relative(stiffen(prior, prior, 100.0), prior), 1.0, rtol=TOLERANCE)


def test_what_a_rule_has_left_below_the_prior_is_free() -> None:
    rng = np.random.default_rng(1)
    prior = KroneckerPrecision.factorise(spd(rng, 5, 2.0, 1.0), spd(rng, 4, 2.0, 1.0))
    learnt = kronecker_sum(prior.input, prior.output, psd(rng, 5, 1, 1.0, 1e4), psd(rng, 4, 1, 1.0, 1e4), SumRule.KL)
    assert relative(learnt, prior)[0] < 1
    assert relative(stiffen(learnt, prior, 100.0), prior)[0] >= 1 - TOLERANCE


def test_every_matrix_of_a_stack_is_held_on_its_own() -> None:
    rng = np.random.default_rng(2)
    prior = KroneckerPrecision.factorise(torch.eye(3).double(), torch.eye(2).double())
    learnt = [above(prior, rng, (10.0, 1.0)), above(prior, rng, (1e3, 0.1))]
    stack = KroneckerPrecision.factorise(*(torch.stack([getattr(p, s) for p in learnt]) for s in ("input", "output")))
    priors = KroneckerPrecision.factorise(*(torch.stack([getattr(prior, s)] * 2) for s in ("input", "output")))
    held = stiffen(stack, priors, 7.0)
    for k, each in enumerate(learnt):
        alone = stiffen(each, prior, 7.0)
        torch.testing.assert_close(held.input[k], alone.input)
        torch.testing.assert_close(held.output[k], alone.output)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_dtype_stays(dtype: torch.dtype) -> None:
    prior = KroneckerPrecision.factorise(torch.eye(3, dtype=dtype), torch.eye(2, dtype=dtype))
    assert stiffen(prior, prior, 2.0).input.dtype == dtype
