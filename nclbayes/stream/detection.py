"""Whether a stream has changed: a sequential test on the log predictive probability of its batches."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import NamedTuple

from nclbayes.storage import Misfit

# The level is that of so many scores.
_RECENT = 30
# So many residuals are remembered, and so many must be there before a batch is judged.
_MEMORY, _FEWEST = 200, 20
# The share of them that is the lower tail.
_TAIL = 0.2
# A tail that is thinner than so many nats counts as one of these: what is learnt to the last digit has no spread.
_THINNEST = 0.01
# From these odds on a batch is suspected; a quarter of them where changes are told sooner than that.
_SUSPECTED = 20.0
# No batch counts so much that fewer than these would tell a change; two will do where the window holds no more.
_WITNESSES = 3
# So many scores are set aside at most, until it is clear what they belong to.
_ASIDE = 50


class Verdict(NamedTuple):
    """What a batch says of a change.

    Attributes:
        p: How often a batch of the open segment would score so low.
        expected: The score that was expected.
        odds: What has been gathered for a change, in batches: at `false_alarm_every` one is told.
    """

    p: float
    expected: float
    odds: float


@dataclass(frozen=True)
class ChangeTest:
    """The test's state; it is never changed, only replaced.

    A batch's score is its mean log predictive probability before it is learnt. Its residual is what it lies above the
    level, the mean of the middle half of the segment's last thirty scores; it is compared with the residuals of the
    segment's last two hundred batches. From the lowest fifth of them on downwards, at u, log scores have tails that are
    about exponential: with the mean excess m of the k residuals there, known as badly as if there were three of them
    (the conjugate prior on the rate of an exponential), the predictive of the next residual e is

        p = (k + 1) / (n + 1) (1 + (u - e) / 2m)^-3,    and at least (n + 1)^-2,

    and above u its rank's. Without a change p is about uniform, or larger, whatever the outputs are and however large
    the batches. A small p is a bet won, at the price ``b(p) = int_0^1 a p^(a - 1) da``, and

        R <- (1 + R) b(p)

    are the odds of a change at any batch of the segment, per prior odds of one at each (Shiryaev 1963; Roberts 1966).
    As E b(p) = 1, R minus the number of batches is a martingale: until R is as large as `false_alarm_every` it takes,
    without a change, so many batches on average or more.

    Attributes:
        recent: The last thirty scores.
        residuals: The last two hundred residuals.
        odds: R.
        aside: Scores of suspected batches, which count when the suspicion is gone.

    Example:
        >>> from nclbayes.stream import ChangeTest
        >>> test = ChangeTest()
        >>> for k in range(40):
        ...     test = test.after(-1 + 0.1 * (k % 5), odds=0.0, suspected=False)
        >>> test.judged(-5.0, limit=20.0).odds, test.judged(-0.8, limit=20.0).odds < 1
        (20.0, True)
    """

    recent: tuple[float, ...] = ()
    residuals: tuple[float, ...] = ()
    odds: float = 0.0
    aside: tuple[float, ...] = ()

    @property
    def level(self) -> float:
        """The score that is expected: the mean of the middle half of the last thirty."""
        cut = len(self.recent) // 4
        middle = sorted(self.recent)[cut : len(self.recent) - cut]
        return math.fsum(middle) / len(middle) if middle else 0.0

    def check(self) -> None:
        """Refuse a state that no test can be in.

        Raises:
            Misfit: If it is one.
        """
        numbers = (self.level, self.odds, *self.residuals, *self.aside)
        if not all(map(math.isfinite, (*numbers, *self.recent))) or self.odds < 0:
            raise Misfit("test holds numbers that no test of a stream has")
        if len(self.residuals) > _MEMORY or len(self.aside) > _ASIDE or len(self.recent) > _RECENT:
            raise Misfit("test remembers more than a test does")

    def judged(self, score: float, limit: float) -> Verdict:
        """What a batch says, before it counts.

        Args:
            score: Its mean log predictive probability.
            limit: The most that one batch may be worth.

        Returns:
            The verdict.
        """
        if len(self.residuals) < _FEWEST:
            return Verdict(1.0, self.level, 0.0)
        p = self._p(score - self.level)
        return Verdict(p, self.level, (1 + self.odds) * min(limit, price(p)))

    def after(self, score: float, odds: float, suspected: bool) -> ChangeTest:
        """The test after a batch.

        Args:
            score: Its score.
            odds: Those of its verdict.
            suspected: Whether it is to be set aside.

        Returns:
            The new state.
        """
        found = replace(self, odds=odds, aside=(*self.aside, score))
        if suspected and len(found.aside) <= _ASIDE:
            return found
        for each in found.aside:
            found = found._with(each)
        return replace(found, aside=())

    def _with(self, score: float) -> ChangeTest:
        """The test with a score that is the segment's."""
        if not self.recent:
            return replace(self, recent=(score,))
        return replace(
            self,
            recent=(*self.recent, score)[-_RECENT:],
            residuals=(*self.residuals, score - self.level)[-_MEMORY:],
        )

    def _p(self, residual: float) -> float:
        """How often a residual is so low."""
        ordered = sorted(self.residuals)
        n, k = len(ordered), round(_TAIL * len(ordered))
        # While the segment is being learnt scores rise: that they no longer do is no sign of a change.
        rise = max(0.0, (ordered[(n - 1) // 2] + ordered[n // 2]) / 2)
        ordered = [e - rise for e in ordered]
        u = ordered[k]
        if residual >= u:
            return (bisect_right(ordered, residual) + 1) / (n + 1)
        tail = max(sum(u - e for e in ordered[:k]) / k, _THINNEST)
        p = (k + 1) / (n + 1) * (1 + (u - residual) / (2 * tail)) ** -3
        return max(p, (n + 1) ** -2)


def suspicion(every: float) -> float:
    """The odds from which on a batch is suspected.

    Args:
        every: `false_alarm_every`.

    Returns:
        The odds.
    """
    return min(_SUSPECTED, every / 4)


def limit(every: float, window: int) -> float:
    """The most that one batch may be worth.

    Args:
        every: `false_alarm_every`.
        window: How many batches may be held, the present one included.

    Returns:
        A factor of the odds.
    """
    return float(every ** (1 / min(max(2, window), _WITNESSES)))


def price(p: float) -> float:
    """What a bet on small p pays: ``int_0^1 a p^(a-1) da = (1 - p + p log p) / (p log^2 p)``.

    Args:
        p: From 0 to 1.

    Returns:
        What comes back of each unit.
    """
    if p > 0.999:
        return 0.5
    return (1 - p + p * math.log(p)) / (p * math.log(p) ** 2) if p > 1e-100 else math.inf
