"""Whether predictions know what they do not know: calibration, selective prediction, foreign data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from nclbayes.analysis.evaluation import Predictor, class_probabilities
from nclbayes.data.task import Task
from nclbayes.errors import DataError, SettingError

_LEAST = 1e-300


@dataclass(frozen=True)
class Guesses:
    """The class probabilities that were predicted for the test data of a task, and its true classes.

    Attributes:
        probs: [N, classes], float64 on the CPU.
        target: [N].

    Example:
        >>> import torch
        >>> from nclbayes.analysis.uncertainty import Guesses
        >>> guesses = Guesses(torch.tensor([[0.8, 0.2], [0.4, 0.6]]).double(), torch.tensor([0, 0]))
        >>> guesses.accuracy, round(guesses.brier, 2)
        (0.5, 0.4)
    """

    probs: Tensor
    target: Tensor

    @property
    def confidence(self) -> Tensor:
        """The probability of the most probable class, [N]."""
        return self.probs.amax(-1)

    @property
    def correct(self) -> Tensor:
        """Whether that is the true one, [N]."""
        return self.probs.argmax(-1) == self.target

    @property
    def accuracy(self) -> float:
        """The share of examples where it is."""
        return float(self.correct.double().mean())

    @property
    def loss(self) -> float:
        """The mean negative log probability of the true class, in nats."""
        true = self.probs.gather(-1, self.target.unsqueeze(-1)).squeeze(-1)
        return -float(true.clamp(min=_LEAST).log().mean())

    @property
    def brier(self) -> float:
        """The mean squared distance between the probabilities and the truth, ``sum_c (p_c - [c = y])^2``."""
        truth = torch.nn.functional.one_hot(self.target, self.probs.shape[-1])
        return float((self.probs - truth).square().sum(-1).mean())

    @property
    def calibration_error(self) -> float:
        """The expected calibration error over 15 equally wide bins of confidence."""
        return reliability(self).error

    @property
    def adaptive_calibration_error(self) -> float:
        """The same over 15 bins of equally many examples."""
        return reliability(self, adaptive=True).error

    @property
    def selective_risk(self) -> float:
        """The area under the risk-coverage curve: the error rate of the surest examples, over all shares of them."""
        return float(risk_coverage(self)[1].mean())


def guesses(
    posterior: Predictor,
    task: Task,
    *,
    num_samples: int | None = None,
    method: str | None = None,
    batch_size: int = 1000,
    generator: torch.Generator | None = None,
) -> Guesses:
    """Predict the test data of a task with classes.

    Args:
        posterior: What predicts.
        task: The task.
        num_samples: As for :func:`~nclbayes.evaluate`.
        method: As for :func:`~nclbayes.evaluate`.
        batch_size: Examples at a time.
        generator: Decides the samples of the weights; by default one seeded with 0.

    Returns:
        What was predicted.

    Raises:
        DataError: If the predictive is not over classes, one for each example.

    Example:
        >>> import torch
        >>> import nclbayes as ncl
        >>> from nclbayes.analysis.uncertainty import guesses
        >>> x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
        >>> data = (x, (x[:, 0] > 0).long())
        >>> task = ncl.Task(data, data, name="sign")
        >>> torch.manual_seed(0) and None
        >>> model = ncl.BayesianNetwork(torch.nn.Linear(2, 2), ncl.Categorical())
        >>> posterior = ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=100))
        >>> report = posterior.update(task, progress=False)
        >>> guesses(posterior, task, method="probit").accuracy > 0.9
        True
    """
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    how: dict[str, Any] = {"num_samples": num_samples, "method": method, "generator": generator}
    how = {} if num_samples is None and method is None else {name: v for name, v in how.items() if v is not None}
    probs, targets = list[Tensor](), list[Tensor]()
    for *inputs, target in task.epoch(batch_size, generator, test=True):
        found = class_probabilities(posterior.predict(*inputs, **how, **task.context))
        if found is None or found.shape[:-1] != target.shape or target.ndim != 1:
            raise DataError(
                f"The predictive of task '{task.name}' is not over one class for each example, whose probabilities "
                "this asks for."
            )
        probs.append(found.double().cpu())
        targets.append(target.cpu())
    return Guesses(torch.cat(probs), torch.cat(targets))


@dataclass(frozen=True)
class Reliability:
    """Confidence against accuracy, in bins of confidence; those without examples are left out.

    Attributes:
        confidence: The mean confidence of each bin.
        accuracy: The share of examples there that are right.
        counts: How many examples there are.
    """

    confidence: tuple[float, ...]
    accuracy: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def error(self) -> float:
        """The mean gap between the two, weighted by the number of examples."""
        gaps = (n * abs(c - a) for c, a, n in zip(self.confidence, self.accuracy, self.counts, strict=True))
        return sum(gaps) / sum(self.counts)


def reliability(found: Guesses, bins: int = 15, adaptive: bool = False) -> Reliability:
    """How often predictions of a confidence are right.

    Args:
        found: What was predicted.
        bins: How many bins.
        adaptive: Bins of equally many examples instead of equally wide ones.

    Returns:
        The bins, in the order of confidence.

    Raises:
        SettingError: If there is no bin.
    """
    if bins < 1:
        raise SettingError(f"bins must be at least 1, not {bins}.")
    confidence, correct = found.confidence, found.correct.double()
    if adaptive:
        order = confidence.argsort(stable=True)
        index = torch.empty_like(order)
        index[order] = torch.arange(len(order)) * bins // len(order)
    else:
        index = (confidence * bins).long().clamp(max=bins - 1)
    counts = torch.bincount(index, minlength=bins)
    sums = (torch.bincount(index, weights, minlength=bins) for weights in (confidence, correct))
    sure, right = ((total / counts)[counts > 0].tolist() for total in sums)
    return Reliability(tuple(sure), tuple(right), tuple(counts[counts > 0].tolist()))


def risk_coverage(found: Guesses) -> tuple[Tensor, Tensor]:
    """The error rate if only the surest examples are answered.

    Args:
        found: What was predicted.

    Returns:
        Shares of examples, and the error rate among the surest so many of them, both [N].
    """
    order = found.confidence.argsort(descending=True, stable=True)
    wrong = (~found.correct[order]).double().cumsum(0)
    counts = torch.arange(1, len(order) + 1, dtype=torch.float64)
    return counts / len(order), wrong / counts


class Sureness(str, Enum):
    """What tells how familiar an input is, by its predicted class probabilities.

    Attributes:
        CONFIDENCE: The probability of the most probable class.
        ENTROPY: The negative entropy of all classes.
    """

    CONFIDENCE = "confidence"
    ENTROPY = "entropy"

    def of(self, probs: Tensor) -> Tensor:
        """How familiar inputs are, larger where they are more so.

        Args:
            probs: [N, classes].

        Returns:
            [N].
        """
        if self is Sureness.CONFIDENCE:
            return probs.amax(-1)
        return (probs * probs.clamp(min=_LEAST).log()).sum(-1)


@dataclass(frozen=True)
class Detection:
    """How well foreign inputs are told from those of a task.

    Attributes:
        auroc: The probability that an input of the task is more familiar than a foreign one; ties count half.
        false_positive_rate: The share of foreign inputs that pass where 95 % of the task's do.

    Example:
        >>> import torch
        >>> from nclbayes.analysis.uncertainty import Detection
        >>> Detection.between(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([0.75, 0.5])).auroc
        0.8333333333333334
    """

    auroc: float
    false_positive_rate: float

    @classmethod
    def between(cls, own: Tensor, foreign: Tensor, passing: float = 0.95) -> Detection:
        """From how familiar inputs are.

        Args:
            own: Those of the task, [N].
            foreign: The others, [M].
            passing: The share of the task's inputs that must pass.

        Returns:
            How well the two are told apart.

        Raises:
            DataError: If there are none of a kind, or one is NaN.
        """
        own, foreign = own.double(), foreign.double()
        if not len(own) or not len(foreign) or bool(own.isnan().any() or foreign.isnan().any()):
            raise DataError("To tell inputs apart there must be some of each kind, and no NaN among what is compared.")
        ordered = foreign.sort().values
        below, not_above = torch.searchsorted(ordered, own), torch.searchsorted(ordered, own, right=True)
        auroc = float((below + not_above).double().mean()) / (2 * len(foreign))
        # The highest threshold that so many of the task's inputs reach.
        count = -int(-passing * len(own) // 1)
        threshold = own.sort(descending=True).values[max(count, 1) - 1]
        return cls(auroc, float((foreign >= threshold).double().mean()))

    @classmethod
    def of(cls, own: Guesses, foreign: Guesses, sureness: Sureness | str = Sureness.CONFIDENCE) -> Detection:
        """From predictions of both.

        Args:
            own: For inputs of the task.
            foreign: For others.
            sureness: What tells how familiar an input is.

        Returns:
            How well the two are told apart.
        """
        measure = Sureness(sureness)
        return cls.between(measure.of(own.probs), measure.of(foreign.probs))
