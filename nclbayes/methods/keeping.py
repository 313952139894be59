"""A posterior that keeps a few examples of each task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from nclbayes.data.checking import whole_number
from nclbayes.data.task import Task
from nclbayes.methods.examples import examples_from_tensors, examples_to_tensors
from nclbayes.posterior import OnlinePosterior
from nclbayes.posterior.belief import Belief, device_of
from nclbayes.posterior.joining import check_examples
from nclbayes.posterior.starting import present_values
from nclbayes.posterior.updating import UpdateReport
from nclbayes.storage import Misfit, under


class KeepingLearner(OnlinePosterior):
    """What replay and coresets have in common. The examples are part of the posterior's file.

    Args:
        *args: As for :class:`OnlinePosterior`.
        keep: How many examples to keep of each task.
        **settings: As for :class:`OnlinePosterior`.

    Raises:
        SettingError: If `keep` is less than 1.
    """

    learner_settings: ClassVar[Mapping[str, Any]] = {"keep": 200}
    # Padding may.
    _may_hold_nan: ClassVar[tuple[str, ...]] = ("kept/",)

    def __init__(self, *args: Any, keep: int = 200, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.keep = whole_number("keep", keep)

    @classmethod
    def check_settings(cls, settings: Mapping[str, Any]) -> None:
        """Refuse a number of examples that cannot be kept.

        Args:
            settings: ``keep``.

        Raises:
            SettingError: If it is not a whole number of at least 1.
        """
        whole_number("keep", settings.get("keep", 1))

    @property
    def kept(self) -> list[Task]:
        """The kept examples of each task, in order."""
        return [examples_from_tensors(under(self.memory, f"kept/{k}/")) for k in range(len(self.tasks))]

    def _check_memory(self) -> None:
        """What is kept must be the examples of every task."""
        super()._check_memory()
        for k in range(len(self.tasks)):
            try:
                examples_from_tensors(under(self._belief.memory, f"kept/{k}/"))
            except Misfit as error:
                raise Misfit(f"the tensors '/memory/kept/{k}/...': {error}") from error

    def _learn(
        self, task: Task, examples: Task, settings: Mapping[str, Any], also: Mapping[str, Tensor] | None = None
    ) -> tuple[Belief, UpdateReport]:
        """What the belief becomes with a task, with some examples kept, and what else is to be kept."""
        k = len(self.tasks)
        # Made before the update, as they may be refused.
        kept = {f"kept/{k}/{name}": tensor for name, tensor in examples_to_tensors(examples).items()}
        kept |= also or {}
        device = device_of(self._belief, self.model, examples)
        present = present_values(self._belief.states, self._belief.trained, self._initial_values(), device)
        check_examples(self.model, examples, present, device)
        belief, report = self._updated(task, **settings)
        return replace(belief, memory={**belief.memory, **kept}), report
