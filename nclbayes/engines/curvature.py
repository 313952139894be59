"""The Fisher of a task at the weights that were found."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from nclbayes.data.task import to_device
from nclbayes.engines.base import Engine, Problem
from nclbayes.engines.likelihood import log_likelihood
from nclbayes.errors import ModelError, NonFiniteError
from nclbayes.fisher import DiagonalFisher, FisherAccumulator, KroneckerFisher
from nclbayes.gaussians import ShardedState, State, Structure
from nclbayes.isolation.failures import of_task
from nclbayes.kronecker import SumRule, is_finite
from nclbayes.ranks import Ranks

Fisher = KroneckerFisher | DiagonalFisher


def task_fisher(engine: Engine, problem: Problem, values: Mapping[str, Tensor]) -> tuple[Mapping[str, Fisher], float]:
    """Sum the Fisher over a task's data.

    Args:
        engine: Of what kind, and from how many examples.
        problem: The task.
        values: The learnt weights, by site.

    Returns:
        The Fisher of N examples for each block that the likelihood depends on, made when it is asked for, and the log
        likelihood of N examples.

    Raises:
        ModelError: If the likelihood depends on no weight.
        NonFiniteError: If the weights are not finite, or the log likelihood there is not.
    """
    task = problem.task
    for site, value in values.items():
        if not is_finite(value):
            raise diverged(f"The weights of site '{site}' became NaN or infinite", task.name, engine)
    accumulator = FisherAccumulator(
        problem.model,
        {**problem.fixed, **values},
        kind=engine.fisher,
        samples=int(engine.fisher_samples),
        temperature=engine.fisher_temperature,
        diagonal=engine.structure is Structure.DIAGONAL,
        blocks=problem.blocks,
        context=task.context,
        generator=problem.generator,
    )
    fit = 0.0
    with of_task(task.name, "its Fisher"):
        for batch in task.epoch(engine.batch_size, problem.generator, engine.fisher_size):
            problem.check(batch)
            weight = task.example_weight(batch, engine.fisher_size)
            try:
                for part in problem.drawn_parts(to_device(batch, problem.device), problem.generator):
                    own = weight * part.weight
                    run = accumulator.update(part.batch, own, part.share)
                    problem.meet(run)
                    fit += own * float(log_likelihood(run.observed).detach())
            except ValueError as error:
                if "to satisfy the constraint" not in str(error):
                    raise
                # A distribution refuses NaN in its parameters.
                raise diverged("The parameters of the likelihood became NaN or infinite", task.name, engine) from error
        if not math.isfinite(fit):
            raise diverged(f"The log likelihood became {fit}", task.name, engine)
        (_, fit), whole = problem.ranks.sum("a log likelihood", [], fit), accumulator.of_all(problem.ranks)
        found = whole.one_by_one(problem.size)
        if not found:
            raise ModelError("The likelihood depends on none of the model's weights, so that they have no Fisher.")
        return found, fit * problem.size / whole.examples


def diverged(what: str, task: str, engine: Engine) -> NonFiniteError:
    """What to say of a task that ended where numbers are not finite.

    Args:
        what: What is not finite.
        task: The task's name.
        engine: The engine, which the advice is for.

    Returns:
        The error.
    """
    advice = "lower `lr`, or set `trust_radius`" if engine.has_trust_region else "or lower `lr`"
    return NonFiniteError(
        f"{what} with the last step of task '{task}'. The posterior is as it was before the update. Look at the data, "
        f"{advice}."
    )


def add_fishers(
    problem: Problem, theta: Mapping[str, Tensor], fishers: Mapping[str, Fisher], rule: SumRule | str
) -> dict[str, State]:
    """The Gaussians around the learnt weights whose precisions have a task's Fisher added.

    Args:
        problem: The task, and the Gaussians before it.
        theta: The learnt weights of each block, as matrices.
        fishers: The task's Fisher, of the blocks that it depends on.
        rule: How to replace a sum of two Kronecker products by one.

    Returns:
        By block. One that an earlier task has trained, and this one's Fisher does not see, is moved only.
    """
    ranks, after = problem.ranks, dict[str, State]()
    owners = _owners(ranks, {name: problem.states[name] for name in fishers})
    own = {
        name: problem.states[name].add(theta[name], fishers[name], SumRule(rule))
        for name, owner in owners.items()
        if owner == ranks.rank
    }
    for name, state in problem.states.items():
        if name in fishers:
            after[name] = _handed_round(ranks, state, theta[name], own.get(name), owners[name])
        elif name in problem.trained:
            after[name] = state.moved(theta[name])
    return after


def _owners(ranks: Ranks, states: Mapping[str, State]) -> dict[str, int]:
    """Who adds the Fisher of each block: who holds its factors, or whoever has least to do."""
    held = {name: state.owner for name, state in states.items() if isinstance(state, ShardedState)}
    return held | ranks.owners({name: state.cost for name, state in states.items() if name not in held})


def _handed_round(ranks: Ranks, before: State, theta: Tensor, found: State | None, owner: int) -> State:
    """A block's new Gaussian, which one rank has made, wherever its factors are to be."""
    if not ranks.are_many:
        assert found is not None
        return found
    if isinstance(before, ShardedState):
        return before.moved(theta) if found is None else found
    tensors, said = (None, None) if found is None else found.handed()
    where = f"the sum of block '{before.block.name}'"
    tensors, said = ranks.broadcast(where, tensors, said, owner, before.loc.device)
    return before.received(tensors, said) if found is None else found
