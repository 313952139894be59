"""The test for a change: its false alarms on scores that are known, and its delays."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from nclbayes.storage import Misfit
from nclbayes.stream.detection import ChangeTest, limit, price, suspicion

G = torch.Generator().manual_seed(0)
SCORES: dict[str, Callable[[int], Tensor]] = {
    "normal": lambda n: torch.randn(n, generator=G),
    "single examples of Normal outputs": lambda n: -torch.randn(n, generator=G).square() / 2,
    "single examples of a classifier": lambda n: torch.nn.functional.logsigmoid(3 + 2 * torch.randn(n, generator=G)),
    "counts": lambda n: -(torch.poisson(torch.full((n,), 3.0), generator=G) - 3).abs(),
    "rare errors": lambda n: -torch.where(torch.rand(n, generator=G) < 0.02, torch.rand(n, generator=G) * 3, 0.001),
}


@pytest.fixture(autouse=True)
def _drawn_anew() -> None:
    """Whatever has run before, a test draws the same."""
    G.manual_seed(0)


def told(scores: list[float], every: float, window: int = 8) -> list[int]:
    """Where changes are told; the test begins anew at each."""
    test, found = ChangeTest(), []
    for i, score in enumerate(scores):
        verdict = test.judged(score, limit(every, window))
        if verdict.odds >= every:
            found.append(i)
            test = ChangeTest()
        else:
            test = test.after(score, verdict.odds, verdict.odds >= suspicion(every))
    return found


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("window", [1, 8])
def test_false_alarms_are_as_rare_as_is_asked_for(kind: str, window: int) -> None:
    """At one in 300 batches on average, 6,000 have 20; Poisson noise makes it 33 once in 300 times."""
    assert len(told(SCORES[kind](6000).tolist(), every=300.0, window=window)) <= 33


@pytest.mark.parametrize("kind", SCORES)
def test_a_large_change_is_told_within_a_few_batches(kind: str) -> None:
    delays = []
    for _ in range(8):
        scores = SCORES[kind](130)
        # Of rare errors a hundred may have none, and no spread.
        scores[100:] -= 10 * scores[:100].std().clamp(min=0.1)
        found = [i - 100 for i in told(scores.tolist(), every=10_000.0) if i >= 100]
        delays.append(found[0])
    assert sorted(delays)[4] <= 3


def test_scores_that_rise_and_then_stay_are_no_change() -> None:
    """What a segment looks like while it is learnt: a curve that flattens, with noise that shrinks."""
    steps = torch.arange(1000.0)
    for length in (20, 60, 200):
        curve = -2.3 * torch.exp(-steps / length)
        noise = (0.05 + 0.2 * torch.exp(-steps / length)) * torch.randn(1000, generator=G)
        assert told((curve + noise).tolist(), every=10_000.0) == []


def test_a_price_is_fair() -> None:
    """The integral of the price over p is 1: nobody gains by betting against uniform p."""
    edges = torch.logspace(-12, 0, 20_001, dtype=torch.float64).tolist()
    total = sum((b - a) * (price(a) + price(b)) / 2 for a, b in pairwise(edges))
    missing = 1 / math.log(1 / edges[0])  # what lies below the first edge, to leading order
    assert total + missing == pytest.approx(1.0, abs=0.01)


def test_no_single_batch_tells_a_change() -> None:
    scores = (-1 + 0.1 * torch.randn(300, generator=G)).tolist()
    scores[200] = -1e6
    assert told(scores, every=10_000.0) == []


def test_what_it_remembers_is_bounded() -> None:
    test = ChangeTest()
    for score in torch.randn(2000, generator=G).tolist():
        test = test.after(score, 30.0, suspected=True)
        assert len(test.aside) <= 50
        assert len(test.residuals) <= 200
        assert len(test.recent) <= 30
    test.check()


@pytest.mark.parametrize("odd", [{"odds": -1.0}, {"recent": (math.nan,)}, {"residuals": (0.0,) * 201}])
def test_a_state_that_no_test_has_is_refused(odd: dict[str, float]) -> None:
    with pytest.raises(Misfit):
        ChangeTest(**odd).check()
