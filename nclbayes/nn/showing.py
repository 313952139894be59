"""When a module must show its linear maps, and which of its steps are data."""

from __future__ import annotations

import torch
from torch import Tensor

from nclbayes.watch import is_watched
from nclbayes.watch.steps import current_mask


def is_transformed() -> bool:
    """Whether the present call runs inside a transform of torch.func, such as vmap: few fused kernels can."""
    return torch._C._functorch.get_dynamic_layer_stack_depth() > 0


def must_show() -> bool:
    """Whether a fused kernel will not do: somebody watches, or a transform of torch.func is active."""
    return is_watched() or is_transformed()


def mask_of_steps(batch: int, steps: int, time_first: bool) -> Tensor | None:
    """The mask of the innermost :func:`~nclbayes.valid_steps`, as a module sees it that works batch first.

    Args:
        batch: The number of sequences.
        steps: The number of steps.
        time_first: Whether the module's inputs, and so the mask, have time before batch.

    Returns:
        [batch, steps]; of another shape if the mask does not fit, which whoever records the maps refuses. None if all
        steps are data, or if nobody watches.
    """
    mask = current_mask() if is_watched() else None
    if mask is None:
        return None
    if mask.ndim == 1:
        mask = mask.unsqueeze(1).expand(-1, batch if time_first else steps)
    return mask.transpose(0, 1) if time_first else mask
