"""A posterior that keeps a few examples of each task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from nclbayes.errors import SettingError
from nclbayes.methods.examples import examples_from_tensors, examples_to_tensors
from nclbayes.posterior import OnlinePosterior
from nclbayes.storage import under
from nclbayes.task import Task


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

    def __init__(self, *args: Any, keep: int = 200, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if keep < 1:
            raise SettingError(f"keep must be at least 1, not {keep}.")
        self.keep = keep

    @property
    def kept(self) -> list[Task]:
        """The kept examples of each task, in order."""
        return [examples_from_tensors(under(self.memory, f"kept/{k}/")) for k in range(len(self.tasks))]

    def _as_memory(self, examples: Task) -> dict[str, Tensor]:
        """Examples of the next task as tensors to keep; made before the update, as they may be refused."""
        k = len(self.tasks)
        return {f"kept/{k}/{name}": tensor for name, tensor in examples_to_tensors(examples).items()}

    def _remember(self, memory: Mapping[str, Tensor]) -> None:
        """Keep what :meth:`_as_memory` made."""
        self._belief = replace(self._belief, memory={**self._belief.memory, **memory})
