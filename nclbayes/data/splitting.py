"""A batch in parts, for networks that cannot take the whole of it at once."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

from nclbayes.watch.nesting import mapped, tensors_of
from nclbayes.watch.run import batch_size


def split(batch: tuple[Any, ...], count: int) -> list[tuple[Any, ...]]:
    """A batch in parts, which are as long as each other, or differ by one example.

    Args:
        batch: The batch; the last tensor tells how many examples it has. Whatever has as many numbers along its first
            dimension, or is a list of as many items, is split; anything else is in every part.
        count: How many parts; of fewer examples, one part for each.

    Returns:
        The parts, in order.
    """
    examples = batch_size(batch)
    count = min(count, examples)
    if count == 1:
        return [batch]
    ends = list(accumulate(lengths_of(examples, count), initial=0))
    return [tuple(_between(item, start, end, examples) for item in batch) for start, end in pairwise(ends)]


def lengths_of(examples: int, count: int) -> list[int]:
    """How long the parts of a batch are.

    Args:
        examples: How many examples it has.
        count: How many parts, at most as many.

    Returns:
        The numbers of their examples, in order.
    """
    return [examples * (i + 1) // count - examples * i // count for i in range(count)]


def _between(item: Any, start: int, end: int, examples: int) -> Any:
    """Some examples of an item of a batch."""
    if isinstance(item, Mapping):
        return {key: _between(value, start, end, examples) for key, value in item.items()}
    inside = [tensor for _, tensor in tensors_of(item)]
    is_list = isinstance(item, (list, tuple)) and not any(t.ndim and len(t) == examples for t in inside)
    if is_list:
        return item[start:end] if len(item) == examples else item
    return mapped(lambda t: t[start:end] if t.ndim and len(t) == examples else t, item)
