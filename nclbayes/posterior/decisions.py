"""What an engine decided for a task, and why, in words."""

from __future__ import annotations

from nclbayes.engines.base import Engine, Outcome


def decisions(
    given: Engine, settled: Engine, outcome: Outcome, *, weights: int, examples: float, is_first: bool, holds: bool
) -> dict[str, str]:
    """What was decided that the settings left open.

    Args:
        given: The engine with its settings as they were given.
        settled: The same, as the task was learnt.
        outcome: What became of it.
        weights: How many weights the task touches.
        examples: How many examples it has.
        is_first: Whether it is the posterior's first task.
        holds: Whether there was anything to hold on to.

    Returns:
        By setting, its value and the reason.
    """
    history, found = outcome.history, {}
    if given.enough == "auto":
        taken = f"{len(history.losses)} of {history.total}"
        if history.learnt:
            found["steps"] = f"{taken}, as {settled.enough:.0%} of the deviance was gone"
        else:
            found["steps"] = taken if settled.enough is None else f"{taken}: less of the deviance went"
    if given.stiffness == "auto":
        if not holds:
            why = "not needed: there was nothing to hold on to"
        else:
            learnt = ": the task was learnt" if history.learnt else ""
            times = {0: "never", 1: "once", 2: "twice"}.get(history.halvings, f"{history.halvings} times")
            why = f"{history.stiffness:g}, {times} halved{learnt}"
        found["stiffness"] = why
    if given.likelihood_weight == "auto":
        if not is_first:
            why = "as for the first task"
        else:
            than = "fewer" if weights <= examples else "more"
            why = f"{weights:,} weights, {than} than the {examples:,.0f} examples"
        found["likelihood_weight"] = f"{float(settled.likelihood_weight):.3g}: {why}"
    if given.fisher_samples == "auto":
        found["fisher_samples"] = f"{settled.fisher_samples}, of {examples:,.0f} examples"
    if given.schedule == "auto":
        limited = outcome.least_rate < given.lr
        found["lr"] = f"{min(given.lr, outcome.least_rate):.3g}" + (
            ": the curvature allowed no more" if limited else ""
        )
    return found
