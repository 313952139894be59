"""Task sets as streams: with hard boundaries, with blurred ones, with tasks that come back, with no change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nclbayes.data.checking import whole_number
from nclbayes.data.task import Task
from nclbayes.errors import DataError, SettingError
from nclbayes.watch.nesting import joined


class Streamed(NamedTuple):
    """A batch of a stream, and what only whoever scores the stream may know.

    Attributes:
        batch: What a model is called with.
        task: The number of the task that the batch is of; where tasks cross over, of the one that has the larger share.
        share: The share of examples that come from the next task, where tasks cross over; otherwise 0.
    """

    batch: tuple[Any, ...]
    task: int
    share: float


@dataclass(frozen=True)
class TaskStream:
    """Batches of one task after the other; to iterate over it again gives the same ones.

    Attributes:
        tasks: The tasks.
        order: The number of the task of each stretch.
        batches: How many batches a stretch has.
        batch_size: How many examples a batch has.
        blur: Over so many batches around a boundary the share of the next task rises in a straight line.
        seed: Decides every draw.

    Example:
        >>> from nclbayes.tasks import split_digits
        >>> from nclbayes.tasks.streams import hard
        >>> stream = hard(split_digits(), batches=30, batch_size=16)
        >>> len(stream), stream.boundaries
        (150, (31, 61, 91, 121))
        >>> x, y = next(iter(stream)).batch
        >>> x.shape
        torch.Size([16, 1, 8, 8])
    """

    tasks: tuple[Task, ...]
    order: tuple[int, ...]
    batches: int
    batch_size: int
    blur: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.tasks or not all(isinstance(task, Task) for task in self.tasks):
            raise SettingError("A stream is made of tasks, at least one.")
        if any(task.context != self.tasks[0].context for task in self.tasks):
            raise SettingError(
                "The tasks have different contexts, such as heads, which tell the model what task a batch is of: a "
                "stream does not. Use another scenario, such as 'domain'."
            )
        for name, least in (("batches", 1), ("batch_size", 1), ("blur", 0), ("seed", 0)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        if self.blur > self.batches:
            raise SettingError(f"blur is {self.blur}, more than the {self.batches} batches of a stretch.")

    def __len__(self) -> int:
        return len(self.order) * self.batches

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The first batch of each stretch whose task is another, counted from 1; of blurred ones, the middle."""
        changes = (i for i in range(1, len(self.order)) if self.order[i] != self.order[i - 1])
        return tuple(i * self.batches + 1 for i in changes)

    def __iter__(self) -> Iterator[Streamed]:
        generator = torch.Generator().manual_seed(self.seed)
        seeds = torch.randint(2**63 - 1, (len(self.tasks),), generator=generator).tolist()
        sources = [
            task.batches(self.batch_size, torch.Generator().manual_seed(seed))
            for task, seed in zip(self.tasks, seeds, strict=True)
        ]
        for number in range(len(self)):
            stretch, other, share = self._crossing(number)
            batch, task = next(sources[self.order[stretch]]), self.order[stretch]
            if share and self.order[other] != task:
                batch = _mixed(batch, next(sources[self.order[other]]), share, generator)
                task = self.order[other] if share > 0.5 else task
            else:
                share = 0.0
            yield Streamed(batch, task, share)

    def _crossing(self, number: int) -> tuple[int, int, float]:
        """Of a batch: the stretch that it leaves, the one that it goes to, and that one's share."""
        boundary = round(number / self.batches)
        way = number + 0.5 - boundary * self.batches
        if 0 < boundary < len(self.order) and 2 * abs(way) < self.blur:
            return boundary - 1, boundary, 0.5 + way / self.blur
        stretch = number // self.batches
        return stretch, stretch, 0.0


def hard(tasks: Sequence[Task], *, batches: int, batch_size: int, seed: int = 0) -> TaskStream:
    """One task after the other, each for so many batches.

    Args:
        tasks: The tasks.
        batches: How many batches each has.
        batch_size: How many examples a batch has.
        seed: Decides every draw.

    Returns:
        The stream.
    """
    return TaskStream(tuple(tasks), tuple(range(len(tasks))), batches, batch_size, 0, seed)


def blurred(tasks: Sequence[Task], *, batches: int, batch_size: int, blur: int, seed: int = 0) -> TaskStream:
    """One task after the other; around each boundary the share of the next one rises from none to all.

    Args:
        tasks: The tasks.
        batches: How many batches each has.
        batch_size: How many examples a batch has.
        blur: Over how many batches it rises.
        seed: Decides every draw.

    Returns:
        The stream.
    """
    return TaskStream(tuple(tasks), tuple(range(len(tasks))), batches, batch_size, blur, seed)


def recurring(tasks: Sequence[Task], *, rounds: int, batches: int, batch_size: int, seed: int = 0) -> TaskStream:
    """All tasks one after the other, and all over again.

    Args:
        tasks: The tasks.
        rounds: How often each comes.
        batches: How many batches it has each time.
        batch_size: How many examples a batch has.
        seed: Decides every draw.

    Returns:
        The stream.
    """
    order = tuple(range(len(tasks))) * whole_number("rounds", rounds)
    return TaskStream(tuple(tasks), order, batches, batch_size, 0, seed)


def unchanged(task: Task, *, batches: int, batch_size: int, seed: int = 0) -> TaskStream:
    """One task alone, over and over.

    Args:
        task: The task.
        batches: How many batches the stream has.
        batch_size: How many examples a batch has.
        seed: Decides every draw.

    Returns:
        The stream.
    """
    return TaskStream((task,), (0,), batches, batch_size, 0, seed)


def _mixed(one: tuple[Any, ...], other: tuple[Any, ...], share: float, generator: torch.Generator) -> tuple[Any, ...]:
    """A batch of which about such a share of examples is from the other."""
    from_other = torch.rand(len(one[-1]), generator=generator) < share

    def picked(pair: list[Tensor]) -> Tensor:
        first, second = pair
        if first.shape != second.shape:
            raise DataError(
                f"Tasks of which batches are mixed must have examples of one shape, not {tuple(first.shape[1:])} and "
                f"{tuple(second.shape[1:])}."
            )
        shape = (-1, *[1] * (first.ndim - 1))
        return torch.where(from_other.to(first.device).reshape(shape), second, first)

    return tuple(joined(list(pair), picked) for pair in zip(one, other, strict=True))
