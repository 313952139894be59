"""A segment is opened: its first batch meets the posterior, as a task does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nclbayes.data.task import Task
from nclbayes.engines.base import Engine, Problem
from nclbayes.errors import DataError
from nclbayes.gaussians import State
from nclbayes.posterior.belief import Belief, device_of
from nclbayes.posterior.joining import join
from nclbayes.stream.segment import Batch, Opening, Segment
from nclbayes.watch.run import Model


def opened(
    belief: Belief,
    model: Model,
    batch: Batch,
    engine: Engine,
    opening: Opening,
    *,
    initial: Mapping[str, Tensor] | None,
    generator: torch.Generator,
) -> Segment:
    """A segment, before its first batch is learnt.

    Args:
        belief: What earlier segments have left.
        model: The model.
        batch: The first batch.
        engine: How to learn.
        opening: Its name, and what it is told.
        initial: Where blocks that nothing has touched start, by site.
        generator: Decides every draw.

    Returns:
        The segment.

    Raises:
        NCLError: If batch and model do not fit, or the Fisher of a weight cannot be had.
    """
    example = Task(batch, name=opening.name)
    device = device_of(belief, model, example)
    joined = join(
        model,
        example,
        engine,
        known=belief.states,
        trained=belief.trained,
        initial=initial,
        device=device,
        generator=generator,
        structures=belief.structures,
    )
    weights = sum(state.loc.numel() for state in joined.states.values())
    settled = engine.settled(weights, opening.size, certain=joined.certain, before=belief.likelihood_weight)
    # When a segment ends is not for the engine to say.
    settled = replace(settled, enough=None, patience=None, batch_size=example.size)
    problem = problem_of(
        belief,
        model,
        settled,
        opening,
        joined.states,
        joined.start,
        generator,
        priors=joined.priors,
        rows=joined.rows,
        fixed=joined.fixed,
        least=joined.least,
        guess=joined.guess,
    )
    return Segment(opening, settled, problem, joined.outputs)


def problem_of(
    belief: Belief,
    model: Model,
    engine: Engine,
    opening: Opening,
    states: dict[str, State],
    start: dict[str, Tensor],
    generator: torch.Generator,
    **known: Any,
) -> Problem:
    """What an engine is given to learn a segment: a task without data.

    Args:
        belief: What earlier segments have left.
        model: The model.
        engine: The engine, with the numbers that were left to it.
        opening: The segment's name, and what it is told.
        states: The Gaussian of each block before it.
        start: Where each of them starts, as a matrix.
        generator: Decides every draw.
        **known: The problem's `priors`, `rows`, `fixed`, `least` and `guess`.

    Returns:
        The problem.
    """
    return Problem(
        model=model,
        task=Task(_gone, name=opening.name, size=opening.size),
        size=float(engine.likelihood_weight) * opening.size,
        states=states,
        start=start,
        trained=belief.trained,
        late=frozenset(),
        device=next(iter(states.values())).loc.device,
        generator=generator,
        progress=False,
        callbacks=(),
        checkpoint=None,
        memory=belief.memory,
        allowed=(None,),
        accumulate=engine.accumulate,
        **known,
    )


def _gone(batch_size: int, generator: torch.Generator) -> Batch:
    raise DataError("The batches of a stream are gone.")
