"""Where a task's examples come from: tensors, a data set, a loader, or a sampler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, default_collate

from nclbayes.data.checking import check_targets, check_tensor, checked_batch, shown
from nclbayes.data.naming import targeted
from nclbayes.errors import DataError, SettingError
from nclbayes.isolation.failures import first_line, is_plain
from nclbayes.isolation.randomness import drawing_from
from nclbayes.watch.nesting import mapped, tensors_of

Source = Any
"""Tensors ``(x, y)``, a Dataset, a DataLoader, or a sampler ``sampler(batch_size, generator) -> batch``."""


def checked(source: Source, name: str, target: str | None = None) -> Source:
    """A source of one of the four kinds.

    Args:
        source: What was given.
        name: The task's name, for messages.
        target: Which part of its examples, which are mappings, is the target; None: they are no mappings.

    Returns:
        The source; tensors as a tuple.

    Raises:
        DataError: If it is empty, its tensors differ in length, or one of them cannot be learnt from.
        SettingError: If it is of none of the four kinds.
    """
    if target is not None:
        source = targeted(source, target)
    elif isinstance(source, Mapping):
        checked_batch(source)
    if isinstance(source, (tuple, list)) and source and isinstance(source[-1], Tensor) and _holds_tensors(source):
        found = list(tensors_of(source))
        for i, item in found:
            check_tensor(item, f"Tensor {i} of task '{name}'")
        lengths = [len(item) if item.ndim else 0 for _, item in found]
        if len(set(lengths)) > 1:
            raise DataError(f"The tensors of task '{name}' have different lengths: {lengths}.")
        if lengths[0] == 0:
            raise DataError(f"Task '{name}' is empty: its tensors have 0 examples.")
        check_targets(source[-1], f"The targets of task '{name}'")
        return tuple(mapped(lambda tensor: tensor, item) for item in source)
    if isinstance(source, IterableDataset):
        raise SettingError(f"The data of task '{name}' are a stream: hand over a DataLoader of it, and its `size`.")
    if isinstance(source, (DataLoader, Dataset)):
        if isinstance(source, Dataset) and count_of(source) is None:
            raise SettingError(f"The data set of task '{name}' has no length: give it a __len__ that counts examples.")
        if count_of(source) == 0:
            raise DataError(f"Task '{name}' is empty: its data set has 0 examples.")
        return source
    if callable(source) and not isinstance(source, type):
        return source
    kind = type(source).__name__ if not isinstance(source, type) else shown(source)
    if isinstance(source, (tuple, list)):
        kind = f"{kind} of {', '.join(type(item).__name__ for item in source) or 'nothing'}"
    raise SettingError(
        f"The data of task '{name}' are a {kind}; they must be tensors (x, y), a Dataset, a DataLoader or a callable "
        "sampler(batch_size, generator). Arrays become tensors by torch.as_tensor."
    )


def _holds_tensors(source: Sequence[Any]) -> bool:
    """Whether it is made of tensors, and of mappings of such."""
    return all(
        isinstance(item, Tensor)
        or (isinstance(item, Mapping) and item and all(isinstance(part, Tensor) for part in item.values()))
        for item in source
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
    except (TypeError, ValueError, NotImplementedError):
        return None


def length_of(source: Source) -> int | None:
    """How many examples a pass over a source has; of a loader, as many as its sampler gives.

    Args:
        source: The source.

    Returns:
        Their number, if it can be known.
    """
    if isinstance(source, tuple):
        return len(source[-1])
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
        return tuple(mapped(lambda tensor: tensor[index.to(tensor.device)], item) for item in source)
    with reading():
        if isinstance(source, DataLoader):
            return checked_batch(source.collate_fn([source.dataset[int(i)] for i in index]))
        return checked_batch(default_collate([source[int(i)] for i in index]))


def loaded(loader: DataLoader[Any]) -> Iterator[tuple[Any, ...]]:
    """A loader's batches.

    Args:
        loader: The loader.

    Yields:
        Batches.

    Raises:
        DataError: If a loader of a map-style data set ends before its last batch.
    """
    expected = None if isinstance(loader.dataset, IterableDataset) else count_of(loader)
    given = 0
    # Not a generator expression: that would call iter(loader), which draws, at once.
    with reading():
        for batch in loader:
            given += 1
            yield checked_batch(batch)
    # A StopIteration of a data set ends the loop like any other.
    if expected is not None and given < expected:
        raise DataError(
            f"A loader ended after {given} of its {expected} batches: its data set raised StopIteration, or can be "
            "read once only, or its sampler gives fewer than its length says."
        )


def sampled(
    sampler: Source, sizes: Iterable[int], generator: torch.Generator, stream: torch.Generator
) -> Iterator[tuple[Any, ...]]:
    """Batches that a sampler makes.

    Args:
        sampler: The sampler.
        sizes: How many examples each of them is to have.
        generator: What it is given to draw from.
        stream: What it draws from instead of torch's global generator, if it does.

    Returns:
        The batches.
    """
    batches = (_sample(sampler, size, generator) for size in sizes)
    # Whoever hands over the global generator itself wants it to move.
    return batches if generator is torch.default_generator else from_stream(batches, stream)


def _sample(sampler: Source, size: int, generator: torch.Generator) -> tuple[Any, ...]:
    with reading():
        return checked_batch(sampler(size, generator))


@contextmanager
def reading() -> Iterator[None]:
    """Around a call of a data set, a loader or a sampler: its own errors pass, with two exceptions.

    Yields:
        Nothing.

    Raises:
        DataError: If it raised StopIteration, which would end a loop of the caller's, or if it could not be called, or
            its examples not be made into a batch.
    """
    try:
        yield
    except StopIteration as error:
        raise DataError(
            "The source of the data raised StopIteration: it has ended, or can be read once only. Hand over one that "
            "starts anew each time it is read."
        ) from error
    except Exception as error:
        if not is_plain(error) or not _is_raised_around(error):
            raise
        raise DataError(f"No batch could be made of the source of the data: {first_line(error)}.") from error


def _is_raised_around(error: BaseException) -> bool:
    """Whether it was not the user's code that found fault, but torch or who called it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    frame = trace.tb_frame
    # What a worker process passes on is an error of the data set's.
    return frame.f_globals.get("__name__", "").split(".")[0] in ("torch", "nclbayes") and (
        frame.f_code.co_name != "reraise"
    )


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
        yield _first(remaining, batch) if remaining < len(batch[-1]) else batch
        remaining -= len(batch[-1])
        if remaining <= 0:
            return


def _first(count: int, batch: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(mapped(lambda tensor: tensor[:count], item, lambda other: other[:count]) for item in batch)


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
    return batches if isinstance(source, tuple) else from_stream(batches, stream_of(generator))


def stream_of(generator: torch.Generator) -> torch.Generator:
    """A stream that a generator decides, and that leads it on by one draw.

    Args:
        generator: The generator.

    Returns:
        A generator of its own.
    """
    seed = int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))
    return torch.Generator().manual_seed(seed)


def side_stream(generator: torch.Generator) -> torch.Generator:
    """A stream that a generator decides without being led on, other than any that it will give by :func:`stream_of`.

    Args:
        generator: The generator.

    Returns:
        A generator of its own.
    """
    return stream_of(stream_of(generator.clone_state()))


def from_stream(batches: Iterator[tuple[Any, ...]], stream: torch.Generator) -> Iterator[tuple[Any, ...]]:
    """The same batches; what is drawn from torch's global generator while they are made comes from a stream.

    Args:
        batches: The batches.
        stream: The stream.

    Yields:
        Batches.
    """
    while True:
        try:
            with drawing_from(stream, torch.device("cpu")):
                batch = next(batches, None)
        except GeneratorExit as error:
            raise DataError("The source of the data raised GeneratorExit: let it raise another error.") from error
        if batch is None:
            return
        yield batch
