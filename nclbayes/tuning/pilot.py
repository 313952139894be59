"""What a trial is: the pilot tasks learnt with some values, and judged by held-out examples, or by their evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from nclbayes.analysis.evaluation import Metric, among_seen, evaluate, right_or_likely
from nclbayes.data.checking import number
from nclbayes.data.sources import is_finite, length_of, pick
from nclbayes.data.task import Task
from nclbayes.engines.base import Engine
from nclbayes.errors import DataError, MatrixError, NonFiniteError, SettingError
from nclbayes.methods import JointLearner
from nclbayes.methods.keeping import KeepingLearner
from nclbayes.nn import BayesianNetwork
from nclbayes.posterior import OnlinePosterior
from nclbayes.tuning.ranges import Range
from nclbayes.watch.run import Model

OBJECTIVES = ("accuracy", "evidence")
"""What may decide which values are best."""

# So many draws of an endless source are held out at most.
_MOST_DRAWS = 1000


@dataclass(frozen=True)
class Pilot:
    """Pilot tasks, and what learns them.

    Attributes:
        model: The model.
        tasks: The tasks, each with held-out examples for its test data.
        engine: The engine whose settings are sought.
        prior: Makes the prior of a scale.
        learner: The posterior's class.
        settings: Its own settings.
        metric: What counts as right, if not the most probable class, or else the likelihood.
        num_samples: Predict with so many samples of the weights; None: at the mean.
        seed: Decides every draw.
        objective: "accuracy": the held-out examples count; "evidence": the log evidence of all others.
    """

    model: Model
    tasks: tuple[Task, ...]
    engine: Engine
    prior: Callable[[float], Any]
    learner: type[OnlinePosterior] = OnlinePosterior
    settings: Mapping[str, Any] = field(default_factory=dict)
    metric: Metric | None = None
    num_samples: int | None = None
    seed: int = 0
    objective: str = "accuracy"

    def fitted(self, ranges: Sequence[Range]) -> tuple[Range, ...]:
        """The ranges of settings that there are, of whole numbers where these are.

        Args:
            ranges: The ranges.

        Returns:
            The same.

        Raises:
            SettingError: If the engine has no such setting.
        """
        own = self.learner.learner_settings
        kinds = {f.name: f.type in ("int", "int | None", "int | str") for f in fields(self.engine)}
        kinds |= {name: isinstance(value, int) for name, value in own.items()} | {"prior_scale": False}
        for r in ranges:
            if r.name not in kinds:
                raise SettingError(
                    f"{type(self.engine).__name__} has no setting '{r.name}' to search for; there are "
                    f"{', '.join(sorted(kinds))}."
                )
        return tuple(replace(r, whole=kinds[r.name]) for r in ranges)

    def engine_with(self, values: Mapping[str, float]) -> Engine:
        """The engine with some values."""
        own = {*self.learner.learner_settings, "prior_scale"}
        changed: dict[str, Any] = {k: v for k, v in values.items() if k not in own}
        return replace(self.engine, **changed)

    def posterior(self, values: Mapping[str, float]) -> OnlinePosterior:
        """A learner that has seen nothing yet.

        Args:
            values: Of the settings that are sought.

        Returns:
            The learner.

        Raises:
            SettingError: If it refuses them, or a prior is sought for a model that is no `BayesianNetwork`.
        """
        model, own = self.model, self.learner.learner_settings
        if "prior_scale" in values:
            if not isinstance(model, BayesianNetwork):
                raise SettingError("Only for a BayesianNetwork a prior can be sought: leave out the range prior_scale.")
            model = model.with_prior(self.prior(values["prior_scale"]))
        settings = {**self.settings, **{k: v for k, v in values.items() if k in own}}
        self.learner.check_settings(settings)
        generator = torch.Generator().manual_seed(self.seed)
        return self.learner(model, self.engine_with(values), generator=generator, **settings)

    def check_objective(self, values: Mapping[str, float]) -> None:
        """Refuse an objective that a trial cannot reach.

        Args:
            values: Of the settings that are sought.

        Raises:
            SettingError: If it is none, or learning with these values gives no evidence.
        """
        if self.objective not in OBJECTIVES:
            raise SettingError(f"objective is '{self.objective}'; choose 'accuracy' or 'evidence'.")
        if self.objective == "accuracy":
            return
        if self.metric is not None or self.num_samples is not None:
            raise SettingError("Nothing is predicted where the evidence counts: leave out metric and num_samples.")
        if issubclass(self.learner, (JointLearner, KeepingLearner)):
            raise SettingError(
                f"{self.learner.__name__} learns examples of earlier tasks again, or sets some apart, and the "
                "evidences of its tasks do not add up to that of all examples: search with objective='accuracy'."
            )
        engine = self.engine_with(values)
        if not engine.has_evidence:
            raise SettingError(
                f"{type(engine).__name__} gives no evidence with these settings: LaplaceNCL and DiagonalNCL do, with "
                "likelihood_weight, prior_weight and fisher_temperature 1 and a Fisher that is not 'empirical'"
                f"{_weighs(engine)}. Set those, or search with objective='accuracy'."
            )

    def score(self, values: Mapping[str, float]) -> float | None:
        """How well all tasks are predicted after the last, or how probable they were before each was learnt.

        Args:
            values: Of the settings that are sought.

        Returns:
            The mean over tasks, or the sum of their log evidences, the larger the better; None if numbers fail or
            learning diverges.

        Raises:
            SettingError: If the evidence counts, and a task gave none.
        """
        posterior, evidence = self.posterior(values), 0.0
        try:
            for task in self.tasks:
                posterior.update(task, progress=False)
                if self.objective == "evidence":
                    evidence += _evidence_of(posterior, task)
        except (NonFiniteError, MatrixError):
            return None
        if self.objective == "evidence":
            return evidence
        asked = [among_seen(task, self.tasks[-1]) for task in self.tasks]
        scores = evaluate(
            posterior,
            asked,
            num_samples=self.num_samples,
            metric=self.metric or right_or_likely,
            generator=torch.Generator().manual_seed(self.seed),
        )
        return sum(score.accuracy for score in scores) / len(scores)


def _evidence_of(posterior: OnlinePosterior, task: Task) -> float:
    """That of the last task."""
    if posterior.log_evidence is None:
        raise SettingError(
            f"{type(posterior.engine).__name__} gave no evidence of task '{task.name}': search with "
            "objective='accuracy'."
        )
    return posterior.log_evidence


def _weighs(engine: Engine) -> str:
    """A hint at the default that is mostly the reason."""
    return f" (here likelihood_weight is {engine.likelihood_weight!r})" if engine.likelihood_weight != 1 else ""


def held_out(task: Task, share: float, seed: int = 0) -> Task:
    """A task that is tested on some of its training examples, which are taken from these; its test data stay unseen.

    Args:
        task: The task.
        share: How many to take, above 0 and below 1; of endless data as many are drawn, at most 1,000.
        seed: Decides which.

    Returns:
        The rest as a task, with the examples as its test data.

    Raises:
        DataError: If its data cannot be taken apart.

    Example:
        >>> import torch
        >>> from nclbayes import Task
        >>> from nclbayes.tuning import held_out
        >>> task = held_out(Task((torch.zeros(10, 3), torch.zeros(10)), name="zeros"), 0.2)
        >>> task.size, len(task.test[0])
        (8, 2)
    """
    share = number("share", share, lambda v: 0 < v < 1, "above 0 and below 1")
    generator, source = torch.Generator().manual_seed(seed), task.train
    if not is_finite(source):
        drawn = max(1, min(_MOST_DRAWS, round(share * task.size)))
        (batch,) = task.epoch(drawn, generator, drawn)
        return Task(source, batch, name=task.name, size=task.size, context=task.context)
    count = length_of(source)
    if isinstance(source, DataLoader) or count is None or len(task.parts) > 1:
        raise DataError(
            f"The data of task '{task.name}' cannot be taken apart to hold some out: give tensors or a data set, not a "
            "loader or a mixture."
        )
    taken = min(count - 1, max(1, round(share * count)))
    if taken < 1:
        raise DataError(f"Task '{task.name}' has one example, and none can be held out.")
    order = torch.randperm(count, generator=generator)
    parts = [_part(source, index) for index in (order[taken:], order[:taken])]
    size = max(1, round(task.size * (count - taken) / count))
    return Task(*parts, name=task.name, size=size, context=task.context)


def _part(source: Any, index: Tensor) -> Any:
    return pick(source, index) if isinstance(source, tuple) else Subset(source, index.tolist())
