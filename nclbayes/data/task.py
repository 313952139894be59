"""What arrives: a data set to learn from, from one of four kinds of source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import repeat
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from nclbayes.data.checking import shown, whole_number
from nclbayes.data.sources import (
    Source,
    at_most,
    checked,
    count_of,
    fetched,
    gives_all,
    is_finite,
    length_of,
    loaded,
    pick,
    sampled,
    side_stream,
)
from nclbayes.errors import DataError, SettingError
from nclbayes.isolation.failures import of_task
from nclbayes.watch.nesting import mapped

Model = Callable[..., Any]


_NO_BATCH = (
    "The source of the data gave no batch: it is empty, or can be read once only and has been read. Hand over one that "
    "starts anew each time it is read, and that has at least one whole batch if it drops short ones."
)


class Task:
    """A data set to learn, with its name and what the model must be told about it.

    Args:
        train: What to learn from: tensors ``(x, ..., y)`` with examples along the first dimension, a map-style
            ``Dataset``, a ``DataLoader`` (its own batch size then counts), or a callable
            ``sampler(batch_size, generator) -> batch`` that makes endless data.
        test: What to evaluate on, in any of the same forms.
        name: What to call it.
        size: The number of training examples, N, that the likelihood is scaled to. Required for a sampler.
        context: Keyword arguments for the model, such as ``{"head": 3}``.
        target: Where examples are mappings, the name of the target, such as "labels": a batch is then the mapping of
            all else, and the target.

    Raises:
        DataError: If the training data are empty, their tensors differ in length, or one cannot be learnt from.
        SettingError: If a sampler comes without a size, the source is of none of the four kinds, or name, size or
            context are not what they must be.

    Example:
        >>> import torch
        >>> from nclbayes import Task
        >>> task = Task((torch.zeros(10, 3), torch.zeros(10)), name="zeros")
        >>> task.size, [len(y) for x, y in task.epoch(batch_size=4)]
        (10, [4, 4, 2])
    """

    is_bayes: ClassVar[bool] = True
    """Whether its batches are drawn evenly from the data that it stands for, as Bayes' rule has it."""

    def __init__(
        self,
        train: Source,
        test: Source | None = None,
        *,
        name: str,
        size: int | None = None,
        context: Mapping[str, Any] | None = None,
        target: str | None = None,
    ) -> None:
        self.name = _checked_name(name)
        with of_task(name):
            self.train = checked(train, name, target)
            self.test = None if test is None else checked(test, name, target)
            self.context = _checked_context(context)
            if size is None:
                size = length_of(self.train)
                if size is None:
                    raise SettingError(
                        f"The data of task '{name}' have no length: give its `size`, the number of examples N."
                    )
            self.size = whole_number("size", size, least=0)
            if self.size < 1:
                raise DataError(f"Task '{name}' is empty: it has {self.size} examples.")

    def __repr__(self) -> str:
        return f"Task({self.name!r}, size={self.size}, context={self.context})"

    @property
    def is_endless(self) -> bool:
        """Whether its training data are made by a sampler."""
        return not is_finite(self.train)

    def batch_size(self, asked: int) -> int:
        """How many examples a training batch has.

        Args:
            asked: How many are asked for.

        Returns:
            That number, or the whole task if it has fewer examples; of a loader, the loader's own batch size.
        """
        own = None
        if isinstance(self.train, DataLoader):
            own = getattr(self.train.batch_sampler, "batch_size", self.train.batch_size)
        return min(own or asked, self.size)

    def num_batches(self, batch_size: int) -> float:
        """How many batches one pass over the training data has.

        Args:
            batch_size: Examples a batch; a loader has its own.

        Returns:
            Their number, not rounded; of endless data, as many as hold N examples.
        """
        own = count_of(self.train) if isinstance(self.train, DataLoader) else None
        return own or self.num_examples() / self.batch_size(batch_size)

    def num_examples(self, size: int | None = None) -> int:
        """How many examples :meth:`epoch` gives.

        Args:
            size: As given to it.

        Returns:
            Their number; N where the data cannot tell.
        """
        count = (length_of(self.train) if is_finite(self.train) else size) or self.size
        return count if size is None else min(size, count)

    def example_weight(self, batch: tuple[Any, ...], size: int | None = None) -> float:
        """What each example of a batch of :meth:`epoch` counts, relative to those of other batches.

        Args:
            batch: The batch.
            size: As given to :meth:`epoch`.

        Returns:
            1; in a mixture, N over the number of examples of the batch's task.
        """
        return 1.0

    @property
    def parts(self) -> tuple[Task, ...]:
        """The task itself; of a mixture, the tasks that it is made of."""
        return (self,)

    def part_of(self, batch: tuple[Any, ...]) -> int:
        """Which of the parts a batch is of.

        Args:
            batch: The batch.

        Returns:
            0; of a mixture, the number that leads the batch.
        """
        return 0

    def model(self, model: Model) -> Model:
        """The model as it is called with this task's batches.

        Args:
            model: The Pyro model.

        Returns:
            The same; of a mixture, one that knows which task a batch is of.
        """
        return model

    def batches(self, batch_size: int, generator: torch.Generator) -> Batches:
        """Training batches without end; each example is used once before any is used again.

        The last batch of an epoch is left out if it is short (unless it is the only one), so that all batches weigh the
        same.

        Args:
            batch_size: Examples a batch.
            generator: Decides the order.

        Returns:
            An endless iterator, which can be stopped and taken up again.
        """
        return Batches(self.train, batch_size, generator)

    def epoch(
        self, batch_size: int, generator: torch.Generator | None = None, size: int | None = None, test: bool = False
    ) -> Iterator[tuple[Any, ...]]:
        """Every example once, in order (of endless data, `size` examples).

        Args:
            batch_size: Examples a batch.
            generator: Decides the draws of a sampler, and which examples are used if `size` is less than all.
            size: Use so many examples only.
            test: The test data instead of the training data.

        Yields:
            Batches.

        Raises:
            DataError: If there are no test data, or what there is gives no batch.
        """
        given = 0
        with of_task(self.name):
            for batch in self._epoch(batch_size, generator, size, test):
                given += 1
                yield batch
            if not given:
                raise DataError(_NO_BATCH)

    def _epoch(
        self, batch_size: int, generator: torch.Generator | None, size: int | None, test: bool
    ) -> Iterator[tuple[Any, ...]]:
        source = self.test if test else self.train
        if source is None:
            raise DataError(f"Task '{self.name}' has no test data.")
        generator = torch.Generator().manual_seed(0) if generator is None else generator
        count = length_of(source)
        some = size is not None and count is not None and size < count
        if not is_finite(source):
            wanted = self.size if size is None else size
            sizes = (min(batch_size, wanted - start) for start in range(0, wanted, batch_size))
            yield from sampled(source, sizes, generator, side_stream(generator))
        elif isinstance(source, DataLoader) and not (some and gives_all(source)):
            yield from at_most(size, fetched(loaded(source), source, generator))
        else:
            assert count is not None
            order = torch.arange(count, device="cpu")
            if some:
                order = torch.randperm(count, generator=generator, device=generator.device)[:size]
            yield from fetched((pick(source, index) for index in order.split(batch_size)), source, generator)


class Batches:
    """An endless iterator over a source's batches whose place can be saved and found again.

    Args:
        source: Where the batches come from.
        batch_size: Examples a batch.
        generator: Decides the order.
    """

    def __init__(self, source: Source, batch_size: int, generator: torch.Generator) -> None:
        self._source, self._batch_size, self._generator = source, batch_size, generator
        self._epoch: Iterator[tuple[Any, ...]] = iter(())
        self._stream: torch.Generator | None = None
        self._started_from: dict[str, Tensor] = {}
        self._position = 0

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> tuple[Any, ...]:
        batch = next(self._epoch, None)
        if batch is None:
            self._start_epoch()
            batch = next(self._epoch, None)
        if batch is None:
            raise DataError(_NO_BATCH)
        self._position += 1
        return batch

    def place(self) -> dict[str, Tensor]:
        """Where the iterator is: the generator's state at the start of the epoch, and the batches taken since.

        Returns:
            Nothing, if no batch was taken yet.
        """
        if not self._started_from:
            return {}
        place = {**self._started_from, "position": torch.tensor(self._position, device="cpu")}
        return place if self._stream is None else {**place, "stream": self._stream.get_state()}

    def seek(self, place: Mapping[str, Tensor]) -> None:
        """Go back to a place; in which state the generator is left is for the caller to decide.

        Args:
            place: From :meth:`place`.
        """
        if not place:
            return
        self._generator.set_state(place["epoch"])
        if "loader" in place:
            self._source.generator.set_state(place["loader"])
        self._start_epoch()
        if self._stream is None:
            for _ in range(int(place["position"])):
                next(self)
        else:
            self._stream.set_state(place["stream"])
        self._position = int(place["position"])

    def _start_epoch(self) -> None:
        source, generator = self._source, self._generator
        self._started_from, self._position = {"epoch": generator.get_state()}, 0
        if isinstance(source, DataLoader):
            if source.generator is not None:
                self._started_from["loader"] = source.generator.get_state()
            self._epoch = fetched(loaded(source), source, generator)
        elif not is_finite(source):
            self._stream = side_stream(generator)
            self._epoch = sampled(source, repeat(self._batch_size), generator, self._stream)
        else:
            count = length_of(source)
            assert count is not None
            usable = count - count % self._batch_size if count > self._batch_size else count
            order = torch.randperm(count, generator=generator, device=generator.device)[:usable]
            parts = (pick(source, index) for index in order.split(self._batch_size))
            self._epoch = fetched(parts, source, generator)


def _checked_name(name: object) -> str:
    if not isinstance(name, str):
        raise SettingError(f"The name of a task must be a string, not {shown(name)}.")
    return name


def _checked_context(context: object) -> dict[str, Any]:
    if context is not None and not (isinstance(context, Mapping) and all(isinstance(key, str) for key in context)):
        raise SettingError(
            f"context must be a mapping from names of the model's arguments to their values, not {shown(context)}."
        )
    return dict(context or {})


def own_generators(task: Task) -> list[torch.Generator]:
    """The generators of its own that a task's data are shuffled by.

    Args:
        task: The task.

    Returns:
        Those of its loaders that were given one.
    """
    sources = [part.train for part in task.parts]
    return [s.generator for s in sources if isinstance(s, DataLoader) and s.generator is not None]


def to_device(batch: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    """The batch with its tensors on a device; tensors that are there already are not copied.

    Args:
        batch: Tensors, mappings and sequences of such, things that know how to move themselves, and others.
        device: Where to.

    Returns:
        The batch.
    """
    # A copy to the CPU is read at once, and must have arrived by then.
    to_gpu = device.type == "cuda"

    def moved(tensor: Tensor) -> Tensor:
        return _usable(tensor).to(device, non_blocking=to_gpu)

    return tuple(mapped(moved, item, lambda other: _moved(other, device)) for item in batch)


def _moved(item: Any, device: torch.device) -> Any:
    move = getattr(item, "to", None)
    return move(device) if callable(move) else item


def _usable(tensor: Tensor) -> Tensor:
    """A tensor that autograd may keep: not one that was made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor
