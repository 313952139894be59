"""Sources whose examples, or batches, are mappings: taken apart into inputs and target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from nclbayes.errors import DataError, SettingError


def targeted(source: Any, target: object) -> Any:
    """A source of mappings as one of pairs, of the inputs and the target.

    Args:
        source: Tensors by name, a map-style data set of mappings, a loader or a sampler that gives them.
        target: The name of the target.

    Returns:
        A source of the same kind.

    Raises:
        SettingError: If the name is none.
        DataError: If a mapping has no such target, or nothing else.
    """
    if not isinstance(target, str):
        raise SettingError(f"target must be the name of a part of each batch, such as 'labels', not {target!r}.")
    if isinstance(source, Mapping):
        return divided(source, target)
    if isinstance(source, DataLoader):
        # Its other parts, a generator among them, are the same ones.
        loader = copy(source)
        loader.collate_fn = _Dividing(source.collate_fn, target)
        return loader
    if isinstance(source, Dataset):
        return _Divided(source, target)
    return _Dividing(source, target) if callable(source) and not isinstance(source, type) else source


def divided(batch: object, target: str) -> tuple[dict[str, Any], Any]:
    """A mapping without its target, and the target.

    Args:
        batch: The mapping.
        target: The target's name.

    Returns:
        Both; the target as a tensor.

    Raises:
        DataError: If it is no mapping, has no such target, or nothing else.
    """
    if not isinstance(batch, Mapping):
        raise DataError(
            f"A batch is a {type(batch).__name__}, and the task names its target, '{target}': it must be a mapping. "
            "Leave `target` out if the target comes last."
        )
    if target not in batch:
        raise DataError(f"A batch has no '{target}', which is the task's target; it has {', '.join(map(repr, batch))}.")
    inputs = {str(key): value for key, value in batch.items() if key != target}
    if not inputs:
        raise DataError(f"A batch has nothing but its target, '{target}'.")
    found = batch[target]
    return inputs, found if isinstance(found, Tensor) else torch.as_tensor(found)


@dataclass(frozen=True)
class _Dividing:
    """What makes mappings, followed by their division; it can be sent to the processes of a loader."""

    make: Callable[..., Any]
    target: str

    def __call__(self, *args: Any) -> tuple[dict[str, Any], Any]:
        return divided(self.make(*args), self.target)


class _Divided(Dataset[Any]):
    """A data set of mappings, divided.

    Args:
        dataset: The data set.
        target: The target's name.
    """

    def __init__(self, dataset: Any, target: str) -> None:
        self.dataset, self.target = dataset, target

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[dict[str, Any], Any]:
        return divided(self.dataset[index], self.target)
