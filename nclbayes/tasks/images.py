"""From labelled images to tasks: dealing classes, choosing examples, naming labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor

from nclbayes.data.task import Task
from nclbayes.errors import DataError, SettingError

_Kind = TypeVar("_Kind", bound=Enum)


class Scenario(str, Enum):
    """What the learner is told, and what it must tell apart.

    Attributes:
        TASK: It is told the task, and has a head for each; labels are counted within the task.
        DOMAIN: It is not told the task, and has one head; labels are counted within the task.
        CLASS: It is not told the task, and has one head over the classes of all tasks.
    """

    TASK = "task"
    DOMAIN = "domain"
    CLASS = "class"


class Active(str, Enum):
    """Which classes compete while a task of the class scenario is learnt.

    Attributes:
        ALL: Those of all tasks, as in the paper.
        SEEN: Those met so far.
    """

    ALL = "all"
    SEEN = "seen"


@dataclass(frozen=True)
class Images:
    """Labelled images in their raw form.

    Attributes:
        x: [N, ...], mostly uint8 [N, C, H, W].
        y: Class labels, int64 [N].
    """

    x: Tensor
    y: Tensor

    def __getitem__(self, index: Tensor) -> Images:
        return Images(self.x[index], self.y[index])

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Split:
    """How to make tasks of classes.

    Attributes:
        name: What the task set is called.
        classes: How many classes there are.
        per_task: How many of them make a task.
        scenario: A :class:`Scenario`, or its value.
        seed: Decides which classes make which task, and which examples are used.
        size: At most so many training examples a task, and at most so many test examples; None: all.
        active: "seen": tell the model how many classes it has met, as ``context={"active": n}`` (class scenario
            only); "all": do not.

    Raises:
        SettingError: If a setting is not one of those allowed.
    """

    name: str
    classes: int
    per_task: int
    scenario: Scenario | str = Scenario.DOMAIN
    seed: int = 0
    size: int | None = None
    active: Active | str = Active.ALL

    def __post_init__(self) -> None:
        scenario = _member(Scenario, self.scenario, "scenario")
        if _member(Active, self.active, "active") is Active.SEEN and scenario is not Scenario.CLASS:
            raise SettingError(f"active='seen' goes with scenario='class' only, not {scenario.value!r}.")
        check_size(self.size)

    def tasks(self, train: Images, test: Images, scale: Callable[[Tensor], Tensor]) -> list[Task]:
        """Deal the classes to tasks.

        The tasks' tensors are slices of four tensors that they share: images and labels to learn from, and to test on.

        Args:
            train: What to learn from.
            test: What to test on.
            scale: Makes float images, or features, of the chosen raw images.

        Returns:
            The tasks, in order.

        Raises:
            DataError: If a task has no examples.
        """
        generator = seeded(self.seed)
        dealt = torch.randperm(self.classes, generator=generator, device="cpu").view(-1, self.per_task)
        parts = []
        for images in (train, test):
            picked = [self._examples(images, classes, generator) for classes in dealt]
            chosen = images[torch.cat(picked)]
            position = torch.empty(self.classes, dtype=torch.int64, device="cpu")
            position[dealt.flatten()] = torch.arange(self.classes, device="cpu")
            labels = position[chosen.y]
            labels = labels if self.scenario == Scenario.CLASS else labels % self.per_task
            counts = [len(index) for index in picked]
            parts.append(list(zip(scale(chosen.x).split(counts), labels.split(counts), strict=True)))
        return [
            Task(
                learn,
                check,
                name=f"{self.name} {i + 1} ({', '.join(map(str, classes.tolist()))})",
                context=self._context(i),
            )
            for i, (learn, check, classes) in enumerate(zip(*parts, dealt, strict=True))
        ]

    def _examples(self, images: Images, classes: Tensor, generator: torch.Generator) -> Tensor:
        index = torch.isin(images.y, classes).nonzero().squeeze(-1)
        if len(index) == 0:
            raise DataError(
                f"{self.name} has no examples of the classes {classes.tolist()}: its data are not complete."
            )
        return index[choose(len(index), self.size, generator)]

    def _context(self, task: int) -> dict[str, Any]:
        if self.scenario == Scenario.TASK:
            return {"head": task}
        return {"active": (task + 1) * self.per_task} if self.active == Active.SEEN else {}


def choose(count: int, size: int | None, generator: torch.Generator) -> Tensor:
    """Which examples to use, drawn without replacement and kept in order.

    Args:
        count: How many there are.
        size: How many to use at most; None: all.
        generator: Decides.

    Returns:
        Their indices, int64.

    Example:
        >>> import torch
        >>> from nclbayes.tasks.images import choose
        >>> choose(5, None, torch.Generator())
        tensor([0, 1, 2, 3, 4])
        >>> len(choose(100, 7, torch.Generator()))
        7
    """
    if size is None or size >= count:
        return torch.arange(count, device="cpu")
    return torch.randperm(count, generator=generator, device="cpu")[:size].sort().values


def seeded(seed: int) -> torch.Generator:
    """A generator on the CPU.

    Args:
        seed: Any whole number.

    Returns:
        The generator.

    Raises:
        SettingError: If the seed is not a whole number.

    Example:
        >>> from nclbayes.tasks.images import seeded
        >>> seeded(3).initial_seed()
        3
    """
    if not isinstance(seed, int):
        raise SettingError(f"seed must be a whole number, not {seed!r}.")
    return torch.Generator(device="cpu").manual_seed(seed)


def check_size(size: int | None) -> None:
    """Refuse sizes that leave nothing.

    Args:
        size: At most so many examples a task; None: all.

    Raises:
        SettingError: If it is not a whole number above 0.
    """
    if size is not None and (not isinstance(size, int) or size < 1):
        raise SettingError(f"size must be a whole number of at least 1, or None for all examples, not {size!r}.")


def to_unit(x: Tensor) -> Tensor:
    """Bytes as numbers from 0 to 1.

    Args:
        x: uint8.

    Returns:
        float32 of the same shape.

    Example:
        >>> import torch
        >>> from nclbayes.tasks.images import to_unit
        >>> to_unit(torch.tensor([0, 51, 255], dtype=torch.uint8))
        tensor([0.0000, 0.2000, 1.0000])
    """
    return x.to(torch.float32).div_(255)


def _member(kind: type[_Kind], value: _Kind | str, name: str) -> _Kind:
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(repr(each.value) for each in kind)
        raise SettingError(f"{name} is {value!r}; choose one of {allowed}.") from None
