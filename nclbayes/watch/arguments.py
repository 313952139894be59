"""The tensors that enter a call, and that leave it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Size, Tensor


def tensors_among(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among a call's arguments, also inside lists, tuples and dictionaries.

    Args:
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        In order.
    """
    found: list[Tensor] = []
    for item in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, dict):
            found += tensors_among((), item)
        elif isinstance(item, (tuple, list)) and not isinstance(item, Size):
            found += tensors_among(item, {})
    return found


def is_differentiable(out: Any) -> bool:
    """Whether autograd can differentiate something of what a call returned.

    Args:
        out: What it returned.

    Returns:
        Whether it can.
    """
    if isinstance(out, Tensor):
        return out.requires_grad
    return isinstance(out, (tuple, list)) and any(tensor.requires_grad for tensor in tensors_among(out, {}))
