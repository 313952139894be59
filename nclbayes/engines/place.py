"""How far a loop is, and what it decides by that: when a task is learnt, and when it is held less firmly."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nclbayes.engines.settings import EngineSettings
from nclbayes.storage import Misfit

if TYPE_CHECKING:
    from nclbayes.engines.base import Problem

# The running loss, for the progress bar and for early stopping, forgets with this rate.
_FORGET = 0.02
# By how much, relatively, it must fall to count as better.
_BETTER = 1e-3
# The loss at the start is the mean over so many steps.
_FIRST = 4
# A stiffness of "auto" is halved after these tenths of the steps, while that gains so much of the loss at the start;
# when it has not so often in a row, no more.
_TENTHS, _PAYS, _MISSES = range(2, 10), 0.003, 2


def _latest(step: int) -> int:
    """How many steps count as the latest: a tenth of those so far."""
    return max(_FIRST + 1, step // 10)


@dataclass
class Place:
    """How far the loop is.

    Attributes:
        step: How many steps have been taken.
        running: The running loss.
        best: Its least value so far.
        best_step: When that was.
        losses: The loss of each step.
        seconds: How long they took.
        learnt: The step at which enough was learnt; 0 before that.
        halvings: How often the stiffness was halved.
        before: The loss when that was last done.
        misses: How often in a row it has not paid.
    """

    step: int = 0
    running: float = math.nan
    best: float = math.inf
    best_step: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    learnt: int = 0
    halvings: int = 0
    before: float | None = None
    misses: int = 0

    def firmness(self, settings: EngineSettings) -> float:
        """How firmly earlier tasks are held.

        Args:
            settings: The engine's settings.

        Returns:
            The stiffness.
        """
        return settings.firmness / 2**self.halvings

    def deviance(self, problem: Problem) -> float:
        """What a task is measured by: what an example lost at the start, or what a guess does, if that is more.

        One that is nearly known when it comes has little to lose.

        Args:
            problem: The task.

        Returns:
            The deviance of an example; NaN where that is not known.
        """
        first = self.losses[:_FIRST]
        return max(sum(first) / len(first) - problem.least, problem.guess)

    def softens(self, problem: Problem, total: int) -> bool:
        """Halve the stiffness, if it is time to and the last two times were not both in vain.

        Args:
            problem: The task.
            total: How many steps there will be.

        Returns:
            Whether it was halved.
        """
        is_time = self.step > _FIRST and self.step in {total * tenth // 10 for tenth in _TENTHS}
        if self.learnt or self.misses == _MISSES or not is_time:
            return False
        latest = _latest(self.step)
        loss = sum(self.losses[-latest:]) / latest
        pays = self.before is None or self.before - loss > _PAYS * self.deviance(problem)
        self.before, self.misses = loss, 0 if pays else self.misses + 1
        if self.misses == _MISSES:
            return False
        self.halvings += 1
        return True

    def look(self, enough: float, problem: Problem) -> None:
        """Note whether enough of the deviance is gone.

        Args:
            enough: How much is enough.
            problem: The task.
        """
        window = _latest(self.step)
        if self.learnt or self.step <= window:
            return
        if sum(self.losses[-window:]) / window - problem.least <= (1 - enough) * self.deviance(problem):
            self.learnt = self.step

    def left(self, settings: EngineSettings) -> float:
        """What the step size is multiplied with, once enough was learnt; at 0 the loop ends.

        Args:
            settings: The engine's settings.

        Returns:
            A factor from 1 to 0.
        """
        if not self.learnt:
            return 1.0
        # Steps of a size that is constant end at once.
        return 1 - (self.step - self.learnt) / _latest(self.learnt) if settings.schedule is not None else 0.0

    def advance(self, step: int, loss: float) -> None:
        """Note a step.

        Args:
            step: Its number.
            loss: Its loss.
        """
        self.step = step
        self.losses.append(loss)
        self.running = loss if step == 1 else (1 - _FORGET) * self.running + _FORGET * loss
        if not math.isfinite(self.best) or self.running < self.best - _BETTER * abs(self.best):
            self.best, self.best_step = self.running, step

    def check(self, total: int) -> None:
        """Refuse a place where no loop of so many steps is.

        Args:
            total: How many steps there will be.

        Raises:
            Misfit: If it is such a place.
        """
        if not (
            1 <= self.step < total
            and len(self.losses) == self.step
            and 1 <= self.best_step <= self.step >= self.learnt >= 0
        ):
            raise Misfit(f"place is step {self.step} of {total}, with {len(self.losses)} losses")
        if not (0 <= self.halvings <= len(_TENTHS) and 0 <= self.misses <= _MISSES):
            raise Misfit(f"place.halvings is {self.halvings}, place.misses {self.misses}")
        if self.seconds < 0:
            raise Misfit(f"place.seconds is {self.seconds}")
