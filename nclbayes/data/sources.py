"""Where a task's examples come from: tensors, a data set, a loader, or a sampler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, default_collate

from nclbayes.errors import DataError, SettingError
from nclbayes.isolation.randomness import drawing_from

Source = Any
"""Tensors ``(x, y)``, a Dataset, a DataLoader, or a sampler ``sampler(batch_size, generator) -> batch``."""


def checked(source: Source, name: str) -> Source:
    """A source of one of the four kinds.

    Args:
        source: What was given.
        name: The task's name, for messages.

    Returns:
        The source; tensors as a tuple.

    Raises:
        DataError: If it is empty, or its tensors differ in length.
        SettingError: If it is of none of the four kinds.
    """
    if isinstance(source, (tuple, list)) and source and all(isinstance(item, Tensor) for item in source):
        lengths = [len(item) if item.ndim else 0 for item in source]
        if len(set(lengths)) > 1:
            raise DataError(f"The tensors of task '{name}' have different lengths: {lengths}.")
        if lengths[0] == 0:
            raise DataError(f"Task '{name}' is empty: its tensors have 0 examples.")
        return tuple(source)
    if isinstance(source, (DataLoader, Dataset)):
        if count_of(source) == 0:
            raise DataError(f"Task '{name}' is empty: its data set has 0 examples.")
        return source
    if callable(source):
        return source
    kind = type(source).__name__
    if isinstance(source, (tuple, list)):
        kind = f"{kind} of {', '.join(type(item).__name__ for item in source) or 'nothing'}"
    raise SettingError(
        f"The data of task '{name}' are a {kind}; they must be tensors (x, y), a Dataset, a DataLoader or a callable "
        "sampler(batch_size, generator). Arrays become tensors by torch.as_tensor."
    )


def is_finite(source: Source) -> bool:
    """Whether a source ends: whether it is not a sampler.

    Args:
        source: The source.

    Returns:
        Whether it does.
    """
    return isinstance(source, (tuple, DataLoader, Dataset))


def count_of(items: Any) -> int | None:
    """The length of something: a loader of a stream has the method, and raises.

    Args:
        items: Anything.

    Returns:
        Its length, if it has one.
    """
    try:
        return len(items)
    except TypeError:
        return None


def length_of(source: Source) -> int | None:
    """How many examples a pass over a source has; of a loader, as many as its sampler gives.

    Args:
        source: The source.

    Returns:
        Their number, if it can be known.
    """
    if isinstance(source, tuple):
        return len(source[0])
    if not isinstance(source, DataLoader):
        return count_of(source) if isinstance(source, Dataset) else None
    if isinstance(source.dataset, IterableDataset):
        return count_of(source.dataset)
    if source.batch_sampler is None:
        return count_of(source.sampler)
    # Batches made by a sampler of one's own may be of anything.
    return count_of(getattr(source.batch_sampler, "sampler", None))


def gives_all(loader: DataLoader[Any]) -> bool:
    """Whether a loader gives each example of its data set once, so that some can be picked from that.

    Args:
        loader: The loader.

    Returns:
        Whether it does.
    """
    sampler = getattr(loader.batch_sampler, "sampler", None)
    plain = isinstance(sampler, SequentialSampler) or (isinstance(sampler, RandomSampler) and not sampler.replacement)
    return plain and count_of(sampler) == count_of(loader.dataset)


def pick(source: Source, index: Tensor) -> tuple[Any, ...]:
    """Some examples of a source.

    Args:
        source: Tensors, a map-style data set, or a loader of one.
        index: Which, [examples].

    Returns:
        A batch.
    """
    if isinstance(source, tuple):
        return tuple(item[index.to(item.device)] for item in source)
    if isinstance(source, DataLoader):
        return tuple(source.collate_fn([source.dataset[int(i)] for i in index]))
    return tuple(default_collate([source[int(i)] for i in index]))


def loaded(loader: DataLoader[Any]) -> Iterator[tuple[Any, ...]]:
    """A loader's batches.

    Args:
        loader: The loader.

    Yields:
        Batches.
    """
    # Not a generator expression: that would call iter(loader), which draws, at once.
    for batch in loader:
        yield tuple(batch)


def at_most(size: int | None, batches: Iterator[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Batches until they hold so many examples; the last may be cut.

    Args:
        size: How many; None: all there are.
        batches: The batches.

    Yields:
        Batches.
    """
    remaining = size
    for batch in batches:
        if remaining is None:
            yield batch
            continue
        yield tuple(item[:remaining] for item in batch) if remaining < len(batch[-1]) else batch
        remaining -= len(batch[-1])
        if remaining <= 0:
            return


def fetched(
    batches: Iterator[tuple[Any, ...]], source: Source, generator: torch.Generator
) -> Iterator[tuple[Any, ...]]:
    """The same batches. A loader shuffles, and a data set may augment, by torch's global generator: not here.

    Args:
        batches: The batches.
        source: Where they come from.
        generator: Decides what is drawn instead.

    Returns:
        The batches.
    """
    if isinstance(source, tuple):
        return batches
    seed = int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))
    return _from_own_stream(batches, torch.Generator().manual_seed(seed))


def _from_own_stream(batches: Iterator[tuple[Any, ...]], stream: torch.Generator) -> Iterator[tuple[Any, ...]]:
    while True:
        with drawing_from(stream, torch.device("cpu")):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch
