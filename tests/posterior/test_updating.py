"""What an update checks before anybody has the new posterior."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

import nclbayes as ncl
from nclbayes.engines.base import ENGINES, Outcome, Problem
from nclbayes.errors import NonFiniteError, PriorError
from nclbayes.gaussians.checking import check_definite
from nclbayes.storage import Misfit
from tests.engines.test_laplace import classification_task, classifier


@dataclass(frozen=True, kw_only=True)
class Spoiling(ncl.LaplaceNCL):
    """Ends with an inverse that is not that of its precision, as rounding can over very many powers of ten."""

    def run(self, problem: Problem) -> Outcome:
        outcome, states = super().run(problem), {}
        for name, state in outcome.states.items():
            inverse = 1.1 * state.precision.input_inverse
            states[name] = replace(state, precision=replace(state.precision, input_inverse=inverse))
        return replace(outcome, states=states)


@dataclass(frozen=True, kw_only=True)
class Unlikely(ncl.LaplaceNCL):
    """Ends with an evidence that is no number."""

    def run(self, problem: Problem) -> Outcome:
        return replace(super().run(problem), log_evidence=float("-inf"))


del ENGINES["Spoiling"], ENGINES["Unlikely"]


def test_a_posterior_that_rounding_has_spoilt_is_refused_where_it_arises() -> None:
    """Not when its file is read, and the task's data are gone."""
    posterior = ncl.OnlinePosterior(classifier(), ncl.LaplaceNCL(steps=5))
    posterior.update(classification_task())
    before = dict(posterior.blocks)
    with pytest.raises(PriorError, match=r"after task 'classes 2' is lost in rounding: .* powers of ten apart"):
        posterior.update(classification_task(seed=2), engine=Spoiling(steps=5))
    assert all(posterior.blocks[name] is state for name, state in before.items())


def test_a_factor_that_is_positive_definite_only_up_to_rounding_is_refused() -> None:
    """Nothing could be added to it."""
    vectors = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    spread = torch.logspace(0, 40, 5, dtype=torch.float64)
    A = (vectors * spread) @ vectors.T
    assert bool(torch.linalg.cholesky_ex((A + A.T) / 2).info)
    with pytest.raises(Misfit, match="'0/input' is not positive definite"):
        check_definite("0", {"input": (A + A.T) / 2, "output": torch.eye(2, dtype=torch.float64)})


def test_an_evidence_that_is_no_number_is_refused() -> None:
    """No file could hold it."""
    posterior = ncl.OnlinePosterior(classifier(), Unlikely(steps=5))
    with pytest.raises(NonFiniteError, match="log evidence became -inf with the last step of task 'classes 1'"):
        posterior.update(classification_task())
    assert not posterior.tasks
