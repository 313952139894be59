"""Where Gaussians come from: a block's prior."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor

from nclbayes.blocks import Block, DiagonalBlock
from nclbayes.gaussians.diagonal import DiagonalState
from nclbayes.gaussians.kronecker import KroneckerState
from nclbayes.gaussians.state import State, Structure
from nclbayes.kronecker import BlockDiagonal, KroneckerPrecision
from nclbayes.kronecker.blockdiagonal import Matrix, widths_of
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
    widths = widths_of(precisions.shape[-1], most)
    if len(widths) == 1:
        return torch.diag_embed(precisions)
    counts = [(width, len(list(group))) for width, group in groupby(widths)]
    stacks = precisions.split([width * count for width, count in counts], dim=-1)
    parts = (s.unflatten(-1, (n, width)) for s, (width, n) in zip(stacks, counts, strict=True))
    return BlockDiagonal(tuple(torch.diag_embed(part) for part in parts))


def _copied(loc: Tensor) -> Tensor:
    """A copy in the layout that it has when read from a file: products of another may round otherwise."""
    return loc.clone(memory_format=torch.contiguous_format)
