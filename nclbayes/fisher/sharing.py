"""Sums of which each rank has a share, put together."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nclbayes.ranks import Ranks


def summed_over(
    ranks: Ranks, dtypes: Mapping[str, torch.dtype], own: Mapping[str, Tensor]
) -> tuple[dict[str, torch.dtype], dict[str, Tensor]]:
    """The sums of all ranks. A rank that has not met some weights has no share in theirs.

    Args:
        ranks: The ranks.
        dtypes: Of the rows of each block that this rank has met.
        own: What it has summed, by name.

    Returns:
        Both, over all ranks; what was summed is the same on each.
    """
    device = next(iter(own.values())).device
    forms = {
        "dtypes": {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()},
        "sums": {name: [list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in own.items()},
    }
    kinds: dict[str, str] = {}
    shapes: dict[str, list[int]] = {}
    precision: dict[str, torch.dtype] = {}
    for other in ranks.gather("the parts of the Fisher", forms):
        kinds |= other["dtypes"]
        for name, (shape, dtype) in other["sums"].items():
            shapes[name] = shape
            # One rank may have carried its sum to float64 where another had too few rows to.
            precision[name] = torch.promote_types(precision.get(name, torch.half), getattr(torch, dtype))
    shares = {
        name: (own[name] if name in own else torch.zeros(shapes[name], device=device)).to(precision[name])
        for name in sorted(shapes)
    }
    totals, _ = ranks.sum("the Fisher", list(shares.values()))
    return {name: getattr(torch, dtype) for name, dtype in kinds.items()}, dict(zip(shares, totals, strict=True))
