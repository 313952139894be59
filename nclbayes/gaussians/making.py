"""Where Gaussians come from: a block's prior."""

from __future__ import annotations

import torch
from torch import Tensor

from nclbayes.blocks import Block, DiagonalBlock
from nclbayes.gaussians.diagonal import DiagonalState
from nclbayes.gaussians.kronecker import KroneckerState
from nclbayes.gaussians.state import State, Structure
from nclbayes.kronecker import KroneckerPrecision
from nclbayes.watch import Latent


def prior_state(block: Block, latents: dict[str, Latent], structure: Structure = Structure.KRONECKER) -> State:
    """A block's Gaussian before any data.

    Args:
        block: The block.
        latents: Its sites as a run met them.
        structure: The form of a linear map's Gaussian; any other site has independent weights.

    Returns:
        The state.
    """
    if isinstance(block, DiagonalBlock) or structure is Structure.DIAGONAL:
        loc, scale = block.moments(latents)
        precision = scale.double().square().reciprocal()
        return DiagonalState(block, _copied(loc), precision, float(precision.log().mean()))
    prior = block.prior(latents)
    factors = KroneckerPrecision.factorise(prior.input_precision.double(), prior.output_precision.double())
    return KroneckerState(block, _copied(prior.loc), factors, float(factors.logdet.sum()) / block.size)


def _copied(loc: Tensor) -> Tensor:
    """A copy in the layout that it has when read from a file: products of another may round otherwise."""
    return loc.clone(memory_format=torch.contiguous_format)
