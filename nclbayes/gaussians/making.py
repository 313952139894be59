"""Where Gaussians come from: a block's prior."""

from __future__ import annotations

import torch
from torch import Tensor

from nclbayes.blocks import Block, DiagonalBlock
from nclbayes.gaussians.diagonal import DiagonalState
from nclbayes.gaussians.kronecker import KroneckerState
from nclbayes.gaussians.state import State, Structure
from nclbayes.kronecker import BlockDiagonal, KroneckerPrecision
from nclbayes.kronecker.blockdiagonal import Matrix, stacks_of
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
    loc, columns, rows = block.separated(latents)
    factors = KroneckerPrecision.factorise(*map(_diagonal, (columns, rows), block.widths))
    return KroneckerState(block, _copied(loc), factors, float(factors.logdet.sum()) / block.size)


def _diagonal(precisions: Tensor, most: int) -> Matrix:
    """The diagonal matrix of precisions [..., k], in blocks of a width."""
    if most == 0:
        return torch.diag_embed(precisions)
    stacks = stacks_of(precisions.shape[-1], most)
    parts = precisions.split([count * width for count, width in stacks], dim=-1)
    blocks = (part.unflatten(-1, stack) for part, stack in zip(parts, stacks, strict=True))
    return BlockDiagonal(tuple(torch.diag_embed(block) for block in blocks))


def _copied(loc: Tensor) -> Tensor:
    """A copy in the layout that it has when read from a file: products of another may round otherwise."""
    return loc.clone(memory_format=torch.contiguous_format)
