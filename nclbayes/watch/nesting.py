"""Arguments of a model that hold tensors by name or in order, as the batches of many collate functions do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor


def mapped(function: Callable[[Tensor], Any], item: Any, otherwise: Callable[[Any], Any] = lambda item: item) -> Any:
    """The same with something else in place of each tensor.

    Args:
        function: What to put there.
        item: A tensor, or mappings, lists and tuples of such; or anything else.
        otherwise: What becomes of anything else.

    Returns:
        Of the same form; a mapping as a dict.

    Example:
        >>> import torch
        >>> from nclbayes.watch.nesting import mapped
        >>> mapped(len, {"ids": torch.zeros(3, 2), "kind": "text"})
        {'ids': 3, 'kind': 'text'}
    """
    if isinstance(item, Tensor):
        return function(item)
    if isinstance(item, Mapping):
        return {key: mapped(function, value, otherwise) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        found = [mapped(function, value, otherwise) for value in item]
        if isinstance(item, tuple):
            # A named tuple takes its values one by one.
            return type(item)(*found) if hasattr(item, "_fields") else tuple(found)
        return found
    return otherwise(item)


def tensors_of(item: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors inside an item.

    Args:
        item: As for :func:`mapped`.
        name: What to call the item itself.

    Yields:
        Each with its name, the keys and places that lead to it.
    """
    if isinstance(item, Tensor):
        yield name, item
    elif isinstance(item, (Mapping, list, tuple)):
        inner: Iterable[tuple[Any, Any]] = item.items() if isinstance(item, Mapping) else enumerate(item)
        for key, value in inner:
            yield from tensors_of(value, f"{name}/{key}" if name else str(key))


def joined(parts: list[Any], together: Callable[[list[Tensor]], Tensor]) -> Any:
    """Several items of one form as one.

    Args:
        parts: The items.
        together: Makes one tensor of several.

    Returns:
        Of the same form.

    Raises:
        TypeError: If they are not of one form, or hold anything but tensors.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        return together(parts)
    if isinstance(first, Mapping) and all(isinstance(part, Mapping) and part.keys() == first.keys() for part in parts):
        return {key: joined([part[key] for part in parts], together) for key in first}
    raise TypeError(f"a {type(first).__name__} is no tensor")
