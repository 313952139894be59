"""Whenever Ctrl-C comes, the posterior is as it was, and the process too: the next update ends as it would have."""

from __future__ import annotations

import random

import pytest

from nclbayes import OnlinePosterior
from tests.isolation.interrupts import InterruptAt
from tests.isolation.learners import LEARNERS, Process, contents, network, same, task

CASES = [("laplace", "tensors"), ("variational", "tensors"), ("laplace", "loader"), ("replay", "loader")]


class Course:
    """Three tasks, and what a learner holds after each of them if nothing interrupts it."""

    def __init__(self, learner: str, source: str) -> None:
        self.learner, self.source = learner, source
        self.tasks = [task(name, seed, source) for seed, name in enumerate(("first", "second", "third"))]
        posterior, self.after = self.begun(), []
        self.after.append(contents(posterior))
        for each in self.tasks[1:]:
            posterior.update(each, progress=False)
            self.after.append(contents(posterior))

    def begun(self) -> OnlinePosterior:
        """A learner that knows the first task."""
        posterior = LEARNERS[self.learner](network())
        posterior.update(task("first", 0, self.source), progress=False)
        return posterior

    def lines(self, within: str = "") -> int:
        """How many lines the second update runs."""
        posterior = self.begun()
        with InterruptAt(0, within) as tracer:
            posterior.update(self.tasks[1], progress=False)
        assert same(contents(posterior), self.after[1])
        return tracer.lines

    def interrupted(self, line: int, within: str = "") -> str:
        """Interrupt the second update at a line, and go on; returns what was wrong then, if anything."""
        posterior = self.begun()
        process = Process(posterior.model)
        with InterruptAt(line, within) as tracer:
            posterior.update(self.tasks[1], progress=False)
        dirty, now = process.changed(), contents(posterior)
        # Where the interrupt hits the last lines of all, the task has been learnt.
        learnt = next((k for k, known in enumerate(self.after) if same(now, known)), None)
        if learnt is None:
            return f"{tracer.where}: the posterior is neither as before nor as after"
        del now
        posterior.update(self.tasks[learnt + 1], progress=False)
        if not same(contents(posterior), self.after[learnt + 1]):
            return f"{tracer.where}: the next update ends elsewhere"
        if process.changed():
            return f"{tracer.where}: the next update left {process.changed()}"
        return f"{tracer.where}: left {dirty}" if dirty and not within else ""


@pytest.mark.parametrize(("learner", "source"), CASES)
def test_an_interrupt_at_any_line_leaves_no_trace(learner: str, source: str) -> None:
    course, draw = Course(learner, source), random.Random(1)
    total = course.lines()
    assert total > 1000
    wrong = [course.interrupted(draw.randrange(1, total + 1)) for _ in range(4)]
    assert not any(wrong), wrong


@pytest.mark.parametrize(
    "lines", [pytest.param(15, marks=pytest.mark.slow), pytest.param(250, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize(("learner", "source"), CASES)
def test_interrupts_at_many_lines_leave_no_trace(learner: str, source: str, lines: int) -> None:
    course, draw = Course(learner, source), random.Random(0)
    total = course.lines()
    wrong = [course.interrupted(draw.randrange(1, total + 1)) for _ in range(lines)]
    assert not any(wrong), wrong


@pytest.mark.parametrize("lines", [8, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def test_an_interrupt_while_the_process_is_put_back_is_mended_by_the_next_update(lines: int) -> None:
    course, within = Course("laplace", "tensors"), "isolation/process.py"
    total = course.lines(within)
    # The last lines are those of the end of the update.
    chosen = [*range(1, total + 1, max(1, total // lines)), *range(max(1, total - 2 * lines), total + 1)]
    wrong = [course.interrupted(line, within) for line in dict.fromkeys(chosen)]
    assert not any(wrong), wrong
