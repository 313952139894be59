"""Several tasks at once, each with its own context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nclbayes.data.checking import number, shown
from nclbayes.data.task import Batches, Task
from nclbayes.errors import DataError, SettingError
from nclbayes.storage import under
from nclbayes.watch.run import Model


class TaskMixture(Task):
    """Tasks that are learnt together: each batch is of one of them, chosen at random.

    Args:
        tasks: The tasks.
        name: What to call them together.
        weights: How often each is chosen, relatively; None: in proportion to their sizes.
        size: N of all together; None: the sum of their sizes.

    Raises:
        DataError: If there is no task.
        SettingError: If one of them is no task, or the weights are not a positive number for each.

    Example:
        >>> import torch
        >>> from nclbayes import Task
        >>> from nclbayes.data import TaskMixture
        >>> tasks = [Task((torch.zeros(n, 3), torch.zeros(n)), name=str(n), context={"head": n}) for n in (10, 30)]
        >>> mixture = TaskMixture(tasks, name="both")
        >>> mixture.size, [part.context for part in mixture.parts]
        (40, [{'head': 10}, {'head': 30}])
    """

    def __init__(
        self, tasks: Sequence[Task], *, name: str, weights: Sequence[float] | None = None, size: int | None = None
    ) -> None:
        if not tasks:
            raise DataError(f"The mixture '{name}' has no tasks.")
        for task in tasks:
            if not isinstance(task, Task):
                raise SettingError(f"The mixture '{name}' is made of tasks, not of {shown(task)}.")
        self._tasks = tuple(tasks)
        weights = [float(task.size) for task in tasks] if weights is None else list(weights)
        self._weights = [number(f"A weight of '{name}'", w, lambda v: v > 0, "positive") for w in weights]
        if len(weights) != len(tasks):
            raise SettingError(f"The mixture '{name}' has {len(weights)} weights for {len(tasks)} tasks.")
        super().__init__(self._draw, name=name, size=sum(task.size for task in tasks) if size is None else size)

    @property
    def parts(self) -> tuple[Task, ...]:
        """The tasks."""
        return self._tasks

    def part_of(self, batch: tuple[Any, ...]) -> int:
        """Which of the tasks a batch is of.

        Args:
            batch: The batch.

        Returns:
            The number that leads it.
        """
        return int(batch[0])

    def model(self, model: Model) -> Model:
        """A model that is called with the number of a task before its batch.

        Args:
            model: The model of a single task's batches.

        Returns:
            ``model(k, *batch)``, which knows task k's context.
        """
        return lambda k, *batch: model(*batch, **self._tasks[k].context)

    def batches(self, batch_size: int, generator: torch.Generator) -> Batches:
        """Training batches without end, each led by the number of its task.

        Args:
            batch_size: Examples a batch.
            generator: Decides whose they are, and their order.

        Returns:
            An endless iterator, which can be stopped and taken up again.
        """
        return _MixedBatches(self._tasks, self._weights, batch_size, generator)

    def num_batches(self, batch_size: int) -> float:
        """How many batches one pass over all tasks has.

        Args:
            batch_size: Examples a batch.

        Returns:
            The sum of theirs.
        """
        return sum(task.num_batches(batch_size) for task in self._tasks)

    def num_examples(self, size: int | None = None) -> int:
        """How many examples :meth:`epoch` gives.

        Args:
            size: As given to it.

        Returns:
            The sum of theirs.
        """
        return sum(task.num_examples(self._share(task, size)) for task in self._tasks)

    def example_weight(self, batch: tuple[Any, ...], size: int | None = None) -> float:
        """What each example of a batch of :meth:`epoch` counts: so much that each task counts its size.

        Args:
            batch: The batch, led by the number of its task.
            size: As given to :meth:`epoch`.

        Returns:
            The task's size over the number of its examples there.
        """
        task = self._tasks[self.part_of(batch)]
        return task.size / task.num_examples(self._share(task, size))

    def epoch(
        self, batch_size: int, generator: torch.Generator | None = None, size: int | None = None, test: bool = False
    ) -> Iterator[tuple[Any, ...]]:
        """Every example of every task once, each batch led by the number of its task.

        Args:
            batch_size: Examples a batch.
            generator: Decides the draws of samplers, and which examples are used if `size` is less than all.
            size: Use so many examples only, shared out by the tasks' sizes.
            test: The test data instead of the training data.

        Yields:
            Batches.
        """
        for k, task in enumerate(self._tasks):
            for batch in task.epoch(batch_size, generator, self._share(task, size), test):
                yield (k, *batch)

    def _share(self, task: Task, size: int | None) -> int | None:
        return None if size is None else max(1, round(size * task.size / sum(part.size for part in self._tasks)))

    def _draw(self, batch_size: int, generator: torch.Generator) -> tuple[Any, ...]:
        return next(self.batches(batch_size, generator))


class _MixedBatches(Batches):
    def __init__(
        self, tasks: Sequence[Task], weights: Sequence[float], batch_size: int, generator: torch.Generator
    ) -> None:
        self._parts = [task.batches(batch_size, generator) for task in tasks]
        self._shares = torch.tensor(weights, dtype=torch.float64, device=generator.device) / sum(weights)
        self._generator = generator

    def __next__(self) -> tuple[Any, ...]:
        k = int(torch.multinomial(self._shares, 1, generator=self._generator))
        return (k, *next(self._parts[k]))

    def place(self) -> dict[str, Tensor]:
        """Where each task's iterator is."""
        return {f"{k}.{name}": t for k, part in enumerate(self._parts) for name, t in part.place().items()}

    def seek(self, place: Mapping[str, Tensor]) -> None:
        """Go back to a place.

        Args:
            place: From :meth:`place`.
        """
        for k, part in enumerate(self._parts):
            part.seek(under(place, f"{k}."))
