"""Coresets: examples that are kept out of the posterior and refine it for predictions."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nclbayes.data.mixture import TaskMixture
from nclbayes.data.task import Task
from nclbayes.engines.base import Engine
from nclbayes.methods.examples import split_examples, text_of
from nclbayes.methods.keeping import KeepingLearner
from nclbayes.posterior import OnlinePosterior
from nclbayes.posterior.belief import Belief
from nclbayes.posterior.saving import describe, engine_from
from nclbayes.posterior.updating import UpdateReport
from nclbayes.storage import Misfit, fitted, parsed

# Where in memory the engine of the last update is, if it was not the posterior's own.
_ENGINE = "coreset/engine"


class CoresetLearner(KeepingLearner):
    """A posterior that sets a few examples of each task apart (Nguyen et al. 2018).

    The posterior itself learns from all other examples. To predict, a copy of it is updated with all the examples set
    apart so far, by the engine of the last update; that copy is used and thrown away, so that no example is ever
    counted twice. Any engine will do.

    Example:
        >>> import torch, pyro.distributions as dist
        >>> import nclbayes as ncl
        >>> from nclbayes.methods import CoresetLearner
        >>> model = ncl.BayesianNetwork(torch.nn.Linear(2, 1), ncl.Normal(1.0), prior=dist.Normal(0.0, 1.0))
        >>> learner = CoresetLearner(model, ncl.LaplaceNCL(steps=5), keep=2)
        >>> report = learner.update(ncl.Task((torch.zeros(8, 2), torch.zeros(8, 1)), name="a"))
        >>> len(learner.kept[0].train[0]), learner.predict(torch.zeros(3, 2)).mean.shape
        (2, torch.Size([3, 1]))
    """

    # What was made of a belief, with that belief: it is out of date as soon as there is another.
    _refined: tuple[Belief, OnlinePosterior] | None = None
    # The engine of the update after which these were the tasks.
    _last: tuple[tuple[str, ...], Engine | None] | None = None

    def _update(self, task: Task, **settings: Any) -> tuple[Belief, UpdateReport]:
        """Learn a task but for the examples that are set apart."""
        # The same examples when an interrupted update goes on.
        kept, rest = split_examples(task, self.keep, settings["generator"].clone_state())
        engine = settings["engine"]
        belief, report = self._learn(rest, kept, settings, {_ENGINE: _to_tensor(engine)})
        self._last = belief.tasks, engine
        return belief, report

    def predict(self, *inputs: Any, **settings: Any) -> Any:
        """The distribution of the targets of new inputs, by the refined posterior.

        Args:
            *inputs: What the model takes, without the observed argument.
            **settings: As for :meth:`OnlinePosterior.predict`.

        Returns:
            A torch distribution.
        """
        if not self.tasks:
            return super().predict(*inputs, **settings)
        with self._turn.taken():
            if self._refined is None or self._refined[0] is not self._belief:
                self._refined = self._belief, self.refined()
            refined = self._refined[1]
        return refined.predict(*inputs, **settings)

    def refined(self) -> OnlinePosterior:
        """A posterior that has learnt from the coreset too.

        Returns:
            A new posterior; this one is left as it is.
        """
        last = self._last[1] if self._last is not None and self._last[0] == self.tasks else None
        engine = last or _from_tensor(self.memory.get(_ENGINE)) or self.engine
        # The coreset is of the tasks that the posterior knows: before it nothing fades.
        engine = replace(engine, retention=1.0)
        refined = OnlinePosterior(self.model, engine, generator=self.generator.clone_state())
        refined._belief = self._belief
        refined.update(TaskMixture(self.kept, name="coreset"), progress=False)
        return refined

    def _check_memory(self) -> None:
        """Take up the engine of the last update, too."""
        super()._check_memory()
        try:
            self._last = self.tasks, _from_tensor(self._belief.memory.get(_ENGINE))
        except Misfit as error:
            raise Misfit(f"the tensor '/memory/{_ENGINE}': {error}") from error


def _to_tensor(engine: Engine | None) -> Tensor:
    """The engine of an update as bytes, for a file; nothing if it was the posterior's own."""
    text = "" if engine is None else json.dumps(describe(engine))
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")


def _from_tensor(text: Tensor | None) -> Engine | None:
    """What :func:`_to_tensor` made a tensor of."""
    if text is None or not text.numel():
        return None
    return engine_from(fitted(dict[str, Any], parsed(text_of(text)), "engine"))
