"""A few examples of a task, kept as tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from nclbayes.data.sources import pick
from nclbayes.data.task import Task, own_generators
from nclbayes.errors import DataError, NCLError
from nclbayes.isolation.failures import first_line, is_plain, of_task
from nclbayes.isolation.randomness import drawing_from, restored
from nclbayes.storage import Misfit, fitted, parsed
from nclbayes.watch.nesting import joined, tensors_of


@dataclass(frozen=True)
class _About:
    """What is kept of a task besides its data."""

    name: str
    size: int
    context: dict[str, Any]


def draw_examples(task: Task, count: int, generator: torch.Generator) -> Task:
    """Some of a task's examples, drawn without replacement.

    Args:
        task: The task.
        count: How many; all, if it has fewer.
        generator: Decides which.

    Returns:
        A task of those examples, with the same context.
    """
    with restored(*own_generators(task)):
        batches = list(task.epoch(count, generator, size=count))
    try:
        tensors = tuple(joined(list(parts), torch.cat) for parts in zip(*batches, strict=True))
    except (RuntimeError, TypeError, ValueError) as error:
        if not is_plain(error):
            raise
        raise DataError(
            f"The examples of task '{task.name}' cannot be kept together: {first_line(error)}. They must be tensors of "
            "equal shapes."
        ) from error
    return Task(tensors, name=task.name, context=task.context)


def split_examples(task: Task, count: int, generator: torch.Generator) -> tuple[Task, Task]:
    """Set some of a task's examples apart.

    Args:
        task: A task of tensors or of a map-style data set; of endless data nothing needs to be set apart.
        count: How many.
        generator: Decides which.

    Returns:
        The task of those examples, and that of the others.

    Raises:
        DataError: If the task has no more examples than that, or comes from a loader.
    """
    if task.is_endless:
        return draw_examples(task, count, generator), task
    if isinstance(task.train, DataLoader):
        raise DataError(f"Task '{task.name}' comes from a loader: give its data set instead, so that it can be split.")
    length = len(task.train[-1] if isinstance(task.train, tuple) else task.train)
    if length <= count:
        raise DataError(f"Task '{task.name}' has {length} examples, too few to set {count} apart.")
    order = torch.randperm(length, generator=generator, device=generator.device)
    index, others = order[:count], order[count:]
    # A data set may draw when it is asked for an example.
    with of_task(task.name), drawing_from(generator, torch.device("cpu")):
        kept = pick(task.train, index)
    rest = pick(task.train, others) if isinstance(task.train, tuple) else Subset(task.train, others.tolist())
    # Each example counts what it counted: N is shared out.
    sizes = [max(1, round(task.size * len(part) / length)) for part in (index, others)]
    return (
        Task(kept, name=task.name, size=sizes[0], context=task.context),
        Task(rest, task.test, name=task.name, size=sizes[1], context=task.context),
    )


def examples_to_tensors(task: Task) -> dict[str, Tensor]:
    """A task of tensors as tensors alone, for a file.

    Args:
        task: The task.

    Returns:
        Its data, and its name and context as bytes.

    Raises:
        DataError: If the context holds anything but plain values.
    """
    try:
        about = json.dumps({"name": task.name, "size": task.size, "context": task.context}).encode()
    except TypeError as error:
        raise DataError(f"The context of task '{task.name}' cannot be kept with its examples: {error}.") from None
    data = {name: tensor.cpu().contiguous() for name, tensor in tensors_of(task.train)}
    return data | {"about": torch.tensor(list(about), dtype=torch.uint8, device="cpu")}


def examples_from_tensors(tensors: Mapping[str, Tensor]) -> Task:
    """What :func:`examples_to_tensors` took apart.

    Args:
        tensors: Its result.

    Returns:
        The task.

    Raises:
        Misfit: If they are not such tensors.
    """
    about: _About = fitted(_About, parsed(text_of(tensors.get("about"))), "about")
    kept: dict[str, Any] = {}
    for name in sorted(set(tensors) - {"about"}):
        place, slash, key = name.partition("/")
        if slash:
            # A mapping, of which the file has each tensor by itself.
            kept.setdefault(place, {})
            if isinstance(kept[place], dict):
                kept[place][key] = tensors[name]
        else:
            kept[place] = tensors[name]
    names = [str(i) for i in range(len(kept))]
    if not names or kept.keys() != set(names):
        raise Misfit(f"kept examples are tensors of the names {', '.join(sorted(tensors))}")
    try:
        return Task(tuple(kept[name] for name in names), name=about.name, size=about.size, context=about.context)
    except NCLError as error:
        raise Misfit(f"kept examples are no task ({str(error).rstrip('.')})") from error


def text_of(tensor: Tensor | None) -> bytes:
    """Text that is kept as a tensor of bytes.

    Args:
        tensor: The tensor, if there is one.

    Returns:
        The text.

    Raises:
        Misfit: If it is none.
    """
    if tensor is None or tensor.dtype is not torch.uint8 or tensor.ndim != 1:
        raise Misfit("what is kept as text is no tensor of bytes")
    return bytes(tensor.tolist())
