"""Batch normalisation in training mode, which no likelihood of single examples has."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nclbayes.errors import UnsupportedUseError


def refuse_batch_statistics(
    input: Tensor,
    mean: Any,
    variance: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    *_: Any,
    **__: Any,
) -> None:
    """Refuse ``F.batch_norm`` that looks at the whole batch.

    Args:
        input: As of that function, as are the others.
        mean: The running mean.
        variance: The running variance.
        weight: The gain.
        bias: The offset.
        training: Whether it does.
        *_: Further arguments.
        **__: Further arguments.

    Raises:
        UnsupportedUseError: If it does.
    """
    if training:
        raise UnsupportedUseError(
            "A batch normalisation in training mode makes each example's output depend on the whole batch, so that the "
            "likelihood of a task is no product over its examples. Call eval() on these layers (after training them, "
            "if they are not yet), or use nn.GroupNorm or nn.LayerNorm."
        )
