"""Replay: learn a task together with kept examples of earlier ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from nclbayes.data.checking import generator_or_none
from nclbayes.data.mixture import TaskMixture
from nclbayes.data.task import Task
from nclbayes.methods.examples import draw_examples
from nclbayes.methods.keeping import KeepingLearner
from nclbayes.posterior.arguments import checked_task
from nclbayes.posterior.updating import UpdateReport


class ReplayTask(TaskMixture):
    """A task with examples of k - 1 earlier ones: its expected loss is ``loss / k + (mean loss of those) (k - 1) / k``.

    Args:
        current: The task.
        earlier: Kept examples of each earlier task.
    """

    is_bayes: ClassVar[bool] = False

    def __init__(self, current: Task, earlier: Sequence[Task]) -> None:
        tasks = (current, *earlier)
        super().__init__(tasks, name=current.name, weights=[1.0] * len(tasks), size=current.size)
        self.test = current.test

    def num_batches(self, batch_size: int) -> float:
        """How many batches one pass over the current task has.

        Args:
            batch_size: Examples a batch.

        Returns:
            Their number; as many steps are taken, whatever is replayed in them.
        """
        return self.parts[0].num_batches(batch_size)

    def num_examples(self, size: int | None = None) -> int:
        """How many examples :meth:`epoch` gives: those of the current task.

        Args:
            size: As given to it.

        Returns:
            Their number.
        """
        return self.parts[0].num_examples(size)

    def example_weight(self, batch: tuple[Any, ...], size: int | None = None) -> float:
        """What each example of a batch of :meth:`epoch` counts: the same.

        Args:
            batch: The batch.
            size: As given to :meth:`epoch`.

        Returns:
            1.
        """
        return 1.0

    def epoch(
        self, batch_size: int, generator: torch.Generator | None = None, size: int | None = None, test: bool = False
    ) -> Iterator[tuple[Any, ...]]:
        """Every example of the current task once: what earlier tasks tell is in the posterior already.

        Args:
            batch_size: Examples a batch.
            generator: Decides the draws of samplers, and which examples are used if `size` is less than all.
            size: Use so many examples only.
            test: The test data instead of the training data.

        Yields:
            Batches, each led by 0, the number of the current task.
        """
        for batch in self.parts[0].epoch(batch_size, generator, size, test):
            yield (0, *batch)


class ReplayLearner(KeepingLearner):
    """A posterior that keeps a few examples of each task, and replays them while it learns the next ones.

    With plain training it is the paper's replay. With an NCL engine the Gaussian of earlier tasks pulls as well; the
    Fisher of Laplace-NCL is that of the new task alone, the moving average of variational NCL that of what it saw.

    Example:
        >>> import torch, pyro.distributions as dist
        >>> import nclbayes as ncl
        >>> from nclbayes.methods import PlainTraining, ReplayLearner
        >>> model = ncl.BayesianNetwork(torch.nn.Linear(2, 1), ncl.Normal(1.0), prior=dist.Normal(0.0, 1.0))
        >>> learner = ReplayLearner(model, PlainTraining(steps=5), keep=4)
        >>> for name in "ab":
        ...     report = learner.update(ncl.Task((torch.zeros(8, 2), torch.zeros(8, 1)), name=name))
        >>> [len(task.train[0]) for task in learner.kept]
        [4, 4]
    """

    def update(self, task: Task, **settings: Any) -> UpdateReport:
        """Learn a task while replaying earlier ones, and keep some of its examples.

        Args:
            task: The new task.
            **settings: As for :meth:`OnlinePosterior.update`.

        Returns:
            What the update did.
        """
        task, generator = checked_task(task), generator_or_none(settings.get("generator")) or self.generator
        # The same examples when an interrupted update goes on.
        examples = draw_examples(task, self.keep, generator.clone_state())
        return self._learn(ReplayTask(task, self.kept) if self.tasks else task, examples, settings)
