"""Sums of which each rank has a share, put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
        own: What it has summed, in float64, by name.

    Returns:
        Both, over all ranks; what was summed is the same on each.
    """
    device = next(iter(own.values())).device
    forms = {
        "dtypes": {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()},
        "shapes": {name: list(tensor.shape) for name, tensor in own.items()},
    }
    kinds: dict[str, str] = {}
    shapes: dict[str, Any] = {}
    for other in ranks.gather("the parts of the Fisher", forms):
        kinds |= other["dtypes"]
        shapes |= other["shapes"]
    total = {
        name: own[name].clone() if name in own else torch.zeros(shapes[name], dtype=torch.float64, device=device)
        for name in sorted(shapes)
    }
    ranks.sum("the Fisher", list(total.values()))
    return {name: getattr(torch, dtype) for name, dtype in kinds.items()}, total
