"""Where learning starts: at the weights that are known so far, or near the prior's mean."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
from torch import Tensor

from nclbayes.blocks import Block
from nclbayes.blocks.layout import quoted
from nclbayes.errors import SettingError
from nclbayes.gaussians import State
from nclbayes.watch.rows import single


def present_values(
    known: Mapping[str, State], trained: Set[str], initial: Mapping[str, Tensor] | None, device: torch.device
) -> dict[str, Tensor]:
    """The weights with which the next task begins, so far as they are known: a network is looked at as it is.

    Args:
        known: The Gaussians so far.
        trained: The blocks that a task has touched.
        initial: Where the others start, by site.
        device: Where to put those.

    Returns:
        By site.
    """
    values: dict[str, Tensor] = {}
    for state in known.values():
        values |= state.block.unpack(state.loc)
    learnt = {site for name in trained for site in known[name].block.sites}
    return values | {site: single(value.to(device)) for site, value in (initial or {}).items() if site not in learnt}


def starting_points(
    states: Mapping[str, State],
    trained: Set[str],
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

    Raises:
        SettingError: If there are initial values of some sites of a new block only.
    """
    start: dict[str, Tensor] = {}
    for name, state in states.items():
        block = state.block
        missing = [site for site in block.sites if initial is None or site not in initial]
        if name in trained:
            start[name] = state.loc
        elif initial is not None and not missing:
            start[name] = block.pack({site: initial[site].to(state.loc) for site in block.sites})
        elif len(missing) < len(block.sites):
            raise SettingError(
                f"initial has no value of {quoted(missing)}, and {quoted(block.sites)} are learnt together: give the "
                "values of all of them, or of none."
            )
        else:
            start[name] = _near_the_prior_mean(block, state, generator)
    # Laid out as they are when read from a file: products of another layout may round otherwise.
    return {name: matrix.contiguous() for name, matrix in start.items()}


def _near_the_prior_mean(block: Block, state: State, generator: torch.Generator) -> Tensor:
    fan_in = block.shape[-1] if block.shape else 1
    like = state.loc
    noise = torch.randn(like.shape, generator=generator, dtype=like.dtype, device=generator.device).to(like.device)
    widest = torch.full_like(state.loc, fan_in**-0.5)
    return state.loc + noise * torch.minimum(state.distribution.variance.sqrt(), widest)
