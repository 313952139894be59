"""Which rows of a map's input are data, and which are padding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from nclbayes.errors import DataError

_VALID: ContextVar[Tensor | None] = ContextVar("nclbayes_valid_steps", default=None)


@contextmanager
def valid_steps(mask: Tensor | None) -> Iterator[None]:
    """Inside this context, linear maps see data only where the mask is true; elsewhere is padding.

    Use it in a model of variable-length sequences, around the maps that run over padded steps. It changes nothing
    that the model computes. Sums over rows read it, the Fisher's and those of gradients that are kept as rows: they
    leave the padded ones out. The likelihood of padded steps must be masked as usual in Pyro (``poutine.mask`` or
    ``fn.mask``).

    Args:
        mask: Boolean, its dimensions the leading ones of the maps' outputs: [batch, time] around a map of
            [batch, time, features], [batch] inside a loop over time. ``None`` declares every step valid.

    Yields:
        Nothing.

    Raises:
        DataError: If the mask is not boolean.

    Example:
        >>> import torch
        >>> from nclbayes import valid_steps
        >>> lengths = torch.tensor([3, 1])
        >>> mask = torch.arange(3) < lengths[:, None]
        >>> with valid_steps(mask):
        ...     out = torch.zeros(2, 3, 4) @ torch.zeros(4, 5)
    """
    if mask is not None and mask.dtype != torch.bool:
        raise DataError(f"valid_steps takes a boolean mask, not {mask.dtype}.")
    token = _VALID.set(mask)
    try:
        yield
    finally:
        _VALID.reset(token)


def current_mask() -> Tensor | None:
    """The mask of the innermost :func:`valid_steps`, if any."""
    return _VALID.get()
