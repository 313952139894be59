"""A task meets a posterior: which blocks it touches, what they are, and where each starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nclbayes.blocks import Block, find_blocks
from nclbayes.engines.settings import EngineSettings
from nclbayes.errors import ModelError
from nclbayes.fisher import FisherAccumulator
from nclbayes.state import State, prior_state
from nclbayes.watch import ModelRun, watch
from nclbayes.watch.run import Model


def look(model: Model, batch: tuple[Any, ...], context: Mapping[str, Any], values: Mapping[str, Tensor]) -> ModelRun:
    """Run a model once on a small batch, to see its sites and to refuse data that do not fit.

    Args:
        model: The Pyro model.
        batch: A few examples.
        context: The model's keyword arguments.
        values: The weights known so far, by site.

    Returns:
        What the run showed.

    Raises:
        NCLError: If data and model do not fit.
    """
    check = getattr(model, "check", None)
    if check is not None:
        check(*batch, **context)
    return watch(model, batch, values, context)


def check_fisher(
    model: Model,
    batch: tuple[Any, ...],
    context: Mapping[str, Any],
    values: Mapping[str, Tensor],
    engine: EngineSettings,
) -> None:
    """Refuse a model whose Fisher cannot be had before the first step, not after the last.

    Args:
        model: The Pyro model.
        batch: A few examples.
        context: The model's keyword arguments.
        values: The weights, by site.
        engine: Whose kind of Fisher is meant.

    Raises:
        NCLError: If the Fisher of a weight cannot be had.
    """
    kind, temperature = engine.fisher, engine.fisher_temperature
    FisherAccumulator(model, values, kind=kind, temperature=temperature, context=context).update(batch)


def touched_states(run: ModelRun, known: Mapping[str, State]) -> dict[str, State]:
    """The Gaussians of the blocks that a run touches; a block that was never met before has its prior.

    Args:
        run: A run of the model.
        known: The Gaussians so far.

    Returns:
        By block.

    Raises:
        ModelError: If the run uses a known site in another way than before.
    """
    owners = {site: name for name, state in known.items() for site in state.block.sites}
    states: dict[str, State] = {}
    for name, block in find_blocks(run).items():
        state = known.get(name)
        if state is None:
            taken = [site for site in block.sites if site in owners]
            if taken:
                raise ModelError(f"Sites {taken} belong to block '{owners[taken[0]]}'; this task uses them otherwise.")
            state = prior_state(block, run.latents)
        elif state.block != block:
            raise ModelError(f"Block '{name}' is {state.block} in the posterior, but this task uses it as {block}.")
        states[name] = state
    return states


def starting_points(
    states: Mapping[str, State],
    trained: set[str],
    initial: Mapping[str, Tensor] | None,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Where learning starts in each block, as a matrix.

    A block that was trained before starts at its mean; a new one at the initial values if there are any, else at small
    random weights around its prior mean.

    Args:
        states: The Gaussians of the blocks.
        trained: The blocks that were trained before.
        initial: Values by site.
        generator: Decides the random weights.

    Returns:
        By block.
    """
    start: dict[str, Tensor] = {}
    for name, state in states.items():
        block = state.block
        if name in trained:
            start[name] = state.loc
        elif initial is not None and all(site in initial for site in block.sites):
            start[name] = block.pack({site: initial[site].to(state.loc) for site in block.sites})
        else:
            start[name] = _near_the_prior_mean(block, state, generator)
    return start


def _near_the_prior_mean(block: Block, state: State, generator: torch.Generator) -> Tensor:
    fan_in = block.shape[-1] if block.shape else 1
    noise = torch.randn(state.loc.shape, generator=generator, device=generator.device).to(state.loc)
    widest = torch.full_like(state.loc, fan_in**-0.5)
    return state.loc + noise * torch.minimum(state.distribution.variance.sqrt(), widest)
