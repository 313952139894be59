"""Joint training on all tasks so far: what continual learning would reach if old data could be kept."""

from __future__ import annotations

from typing import Any

from nclbayes.data.mixture import TaskMixture
from nclbayes.data.task import Task
from nclbayes.errors import ModelError
from nclbayes.posterior import OnlinePosterior
from nclbayes.posterior.belief import Belief
from nclbayes.posterior.updating import UpdateReport


class JointLearner(OnlinePosterior):
    """Keeps every task, and trains on all of them at each update: from where it is, and from the prior.

    Whatever the engine, no task is thus counted twice.

    Example:
        >>> import torch, pyro.distributions as dist
        >>> import nclbayes as ncl
        >>> from nclbayes.methods import JointLearner, PlainTraining
        >>> model = ncl.BayesianNetwork(torch.nn.Linear(2, 1), ncl.Normal(1.0), prior=dist.Normal(0.0, 1.0))
        >>> learner = JointLearner(model, PlainTraining(steps=5))
        >>> for name in "ab":
        ...     report = learner.update(ncl.Task((torch.zeros(8, 2), torch.zeros(8, 1)), name=name))
        >>> learner.tasks
        ('a', 'b')
    """

    _seen: tuple[Task, ...] = ()

    def _update(self, task: Task, **settings: Any) -> tuple[Belief, UpdateReport]:
        """Learn a task together with all earlier ones."""
        # Of an update that was interrupted at its very end a task may be left over.
        earlier = self._seen[: len(self.tasks)]
        if len(earlier) != len(self.tasks):
            raise ModelError(
                f"The learner has learnt {len(self.tasks)} tasks and holds the data of {len(self._seen)}: hand over "
                "those of the tasks before it was saved, in order, by remember(tasks)."
            )
        seen = (*earlier, task)
        start = {**(self._initial_values() or {}), **self.mean()}
        prior = Belief(tasks=self.tasks, outputs=self._belief.outputs, structures=self._belief.structures)
        mixture = TaskMixture(seen, name=task.name)
        belief, report = self._updated(mixture, belief=prior, initial=start or None, **settings)
        self._seen = seen
        return belief, report

    def remember(self, tasks: list[Task]) -> None:
        """Hand over the data of the tasks that were learnt before the learner was saved.

        Args:
            tasks: Those tasks, in order.
        """
        self._seen = tuple(tasks)
