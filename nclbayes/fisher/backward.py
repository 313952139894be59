"""From a score back to the outputs of all maps, and of all other uses of weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nclbayes.blocks import DiagonalBlock, KroneckerBlock
from nclbayes.fisher.diagonal import Pairs
from nclbayes.fisher.separate import Told
from nclbayes.watch import LinearUse, Separable


@dataclass
class KroneckerUses:
    """The uses of one block in one run.

    Attributes:
        block: The block.
        uses: Its uses.
        reached: The numbers of those that the likelihood depends on.
    """

    block: KroneckerBlock
    uses: list[LinearUse] = field(default_factory=list)
    reached: set[int] = field(default_factory=set)


def backpropagated(
    total: Tensor, groups: list[KroneckerUses], separate: Mapping[DiagonalBlock, list[Separable] | None]
) -> tuple[dict[str, Pairs], dict[DiagonalBlock, Told]]:
    """The gradient of a score at the output of every map, and every other use, that it depends on.

    Args:
        total: The score.
        groups: The maps; those that it reaches are noted there.
        separate: The other uses, by block.

    Returns:
        Uses with their gradients, by the name of a block; and other uses with theirs, by block.
    """
    edges = [use.edge for group in groups for use in group.uses]
    edges += [piece.edge for pieces in separate.values() for piece in pieces or ()]
    if not edges:
        return {}, {}
    grads = iter(torch.autograd.grad(total, edges, retain_graph=True, allow_unused=True))
    seen: dict[str, Pairs] = {}
    for group in groups:
        pairs = []
        for i, use in enumerate(group.uses):
            grad = next(grads)
            if grad is not None:
                group.reached.add(i)
                pairs.append((use, grad))
        seen[group.block.name] = pairs
    told: dict[DiagonalBlock, Told] = {}
    for block, pieces in separate.items():
        if pieces is not None:
            found = [(piece, next(grads)) for piece in pieces]
            told[block] = [(piece, grad) for piece, grad in found if grad is not None]
    return seen, told
