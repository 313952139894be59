"""How good a learner's predictions are, on each of several tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributions as torch_dist

from nclbayes.data.agreement import batch_mark, refuse_distributed
from nclbayes.data.splitting import split
from nclbayes.data.task import Task
from nclbayes.errors import DataError
from nclbayes.posterior.query import base_of
from nclbayes.ranks import Ranks, present, transaction

Metric = Callable[[Any, tuple[Any, ...]], Tensor]
"""From a predictive distribution and its batch to one number (or truth value) for each example."""


class Predictor(Protocol):
    """Whatever predicts as an online posterior does."""

    def predict(self, *inputs: Any, **settings: Any) -> Any:
        """The distribution of the targets of new inputs."""


@dataclass(frozen=True)
class Score:
    """How well the test data of one task are predicted.

    Attributes:
        accuracy: The share of examples that are predicted rightly: the most probable class is the true one (of a
            sequence, at its last step; of several yes-or-no outputs, the share of them that are right), or what a
            metric of one's own says.
        loss: The mean negative log likelihood of an example under the predictive, in nats.
        calibration_error: The expected calibration error over 15 bins of confidence: the mean gap between confidence
            and accuracy, weighted by how many examples fall into a bin. NaN where there are no class probabilities.
        examples: How many examples there were.

    Example:
        >>> from nclbayes import Score
        >>> Score(accuracy=0.9, loss=0.3, calibration_error=0.02, examples=100).accuracy
        0.9
    """

    accuracy: float
    loss: float
    calibration_error: float
    examples: int


def evaluate(
    posterior: Predictor,
    tasks: Sequence[Task] | Task,
    *,
    num_samples: int | None = None,
    method: str | None = None,
    batch_size: int = 1000,
    metric: Metric | None = None,
    generator: torch.Generator | None = None,
) -> list[Score]:
    """Score a learner on the test data of each task.

    Args:
        posterior: What predicts: an :class:`~nclbayes.OnlinePosterior`, or anything with its ``predict``.
        tasks: The tasks, or one; each must have test data.
        num_samples: Average the predictions over so many samples of the weights; None: use the posterior mean.
        method: How to predict, if `num_samples` does not say it: "mean", "samples", "linearized", "probit" or
            "last-layer".
        batch_size: Examples at a time.
        metric: What counts as right, where that is not the most probable class:
            ``metric(distribution, batch) -> [examples]``, larger where the prediction is better.
        generator: Decides the samples of the weights, and of endless test data; by default one seeded with 0.

    Returns:
        One score a task. Where processes learn together each runs its share of the test data: call it on all of them.

    Raises:
        DataError: If a task has no test data, if the predictive has no classes and there is no metric, or if the
            metric gives something else than one number an example.

    Example:
        >>> import torch, pyro.distributions as dist
        >>> import nclbayes as ncl
        >>> net = torch.nn.Linear(2, 2)
        >>> model = ncl.BayesianNetwork(net, ncl.Categorical(), prior=dist.Normal(0.0, 1.0))
        >>> x = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
        >>> task = ncl.Task((x, (x[:, 0] > 0).long()), (x, (x[:, 0] > 0).long()), name="sign")
        >>> posterior = ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=100, batch_size=50, lr=0.5))
        >>> report = posterior.update(task, progress=False)
        >>> ncl.evaluate(posterior, [task])[0].accuracy > 0.9
        True
    """
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    how: dict[str, Any] = {} if num_samples is None else {"num_samples": num_samples}
    if method is not None:
        how["method"] = method
    if how:
        how["generator"] = generator
    tasks, metric = [tasks] if isinstance(tasks, Task) else tasks, metric or _is_most_probable
    ranks = present()
    with transaction(ranks, "The evaluation"):
        return [_score(posterior, task, how, batch_size, metric, generator, ranks) for task in tasks]


def calibration_error(confidence: Tensor, correct: Tensor, bins: int = 15) -> float:
    """The expected calibration error: confidence against accuracy, in equal bins of confidence.

    Args:
        confidence: The probability of the predicted class, [N].
        correct: Whether it was right, [N].
        bins: How many bins.

    Returns:
        ``sum_b (n_b / N) |accuracy_b - confidence_b|``.

    Example:
        >>> import torch
        >>> from nclbayes.analysis.evaluation import calibration_error
        >>> calibration_error(torch.full((4,), 0.75), torch.tensor([True, True, True, False]))
        0.0
    """
    index = (confidence * bins).long().clamp(max=bins - 1)
    gap = torch.zeros(bins, dtype=torch.float64, device=confidence.device)
    gap.index_add_(0, index, correct.double() - confidence.double())
    return float(gap.abs().sum() / len(confidence))


def _score(
    posterior: Predictor,
    task: Task,
    how: dict[str, Any],
    batch_size: int,
    metric: Metric,
    generator: torch.Generator,
    ranks: Ranks,
) -> Score:
    empty = torch.zeros(0, dtype=torch.float64)
    right, hits, confidence, loss, has_classes = [empty], [empty], [empty], 0.0, False
    if ranks.are_many:
        refuse_distributed(task, test=True)
    # What draws for each example draws for all of them on every rank.
    is_drawn = how.get("method") == "linearized"
    for whole in task.epoch(batch_size, generator, test=True):
        if ranks.are_many:
            ranks.note(f"a test batch of task '{task.name}'", batch_mark(whole))
        # A batch of fewer examples than there are ranks is run by each, and counts on the first.
        is_shared = len(whole[-1]) >= ranks.count and not is_drawn
        batch = split(whole, ranks.count)[ranks.rank] if is_shared else whole
        *inputs, target = batch
        predicted = posterior.predict(*inputs, **how, **task.context)
        target = target.to(_device(predicted))
        own = _one_each(metric(predicted, (*inputs, target)), len(target))
        lost = float(predicted.log_prob(target).double().sum())
        found = _guesses(predicted, target)
        has_classes = found is not None
        if is_shared or ranks.is_first:
            right.append(own)
            loss -= lost
            if found is not None:
                hits.append(found[0].flatten().double().cpu())
                confidence.append(found[1].flatten().double().cpu())
        if how and ranks.are_many:
            # Where a network draws noise for its share, ranks have drawn different amounts.
            state = {"state": generator.get_state()}
            now, _ = ranks.broadcast("the generator of an evaluation", state, None, 0, torch.device("cpu"))
            generator.set_state(now["state"])
    (scores,) = ranks.gather_rows("the scores", [torch.cat(right)])
    loss = sum(row[0] for row in ranks.meet("the loss", loss))
    error = float("nan")
    if has_classes:
        hit, sure = ranks.gather_rows("the guesses", [torch.cat(hits), torch.cat(confidence)])
        error = calibration_error(sure, hit)
    return Score(float(scores.mean()), loss / len(scores), error, len(scores))


def _one_each(values: Any, examples: int) -> Tensor:
    """What a metric gave, which must be one number an example, [examples] in float64."""
    if not isinstance(values, Tensor) or values.shape != (examples,):
        found = f"a tensor of shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"{values!r}"
        raise DataError(
            f"The metric must give one number for each example, a tensor of shape {(examples,)}; it gave {found}. Take "
            "the mean over outputs or steps, not over examples."
        )
    return values.double().cpu()


def class_probabilities(predicted: Any) -> Tensor | None:
    """The probabilities of the classes that a predictive distribution gives.

    Args:
        predicted: A predictive distribution.

    Returns:
        [..., classes], or None where it is not over classes; of a mixture, the average.
    """
    if isinstance(predicted, torch_dist.MixtureSameFamily):
        inner = class_probabilities(predicted.component_distribution)
        if inner is None:
            return None
        weights = predicted.mixture_distribution.probs
        weights = weights.reshape(weights.shape + (1,) * (inner.ndim - weights.ndim))
        return (weights * inner).sum(predicted.mixture_distribution.probs.ndim - 1)
    base = base_of(predicted)
    if isinstance(base, torch_dist.Categorical):
        return base.probs
    if isinstance(base, torch_dist.Bernoulli):
        return torch.stack([1 - base.probs, base.probs], dim=-1)
    return None


def right_or_likely(predicted: Any, batch: tuple[Any, ...]) -> Tensor:
    """What counts where nothing else is said: whether the class is right, or else how likely the target was.

    Args:
        predicted: A predictive distribution.
        batch: The batch, its target last.

    Returns:
        One number an example.
    """
    if class_probabilities(predicted) is not None:
        return _is_most_probable(predicted, batch)
    likely = predicted.log_prob(batch[-1])
    return likely.reshape(len(likely), -1).sum(-1)


def among_seen(task: Task, last: Task) -> Task:
    """A task as it is asked for after a later one: among all classes that have been seen by then.

    Args:
        task: The task.
        last: The last one that was learnt.

    Returns:
        The same, but for the number of classes, ``context={"active": n}``, which the later one says.
    """
    if "active" not in last.context:
        return task
    context = {**task.context, "active": last.context["active"]}
    return Task(task.train, task.test, name=task.name, size=task.size, context=context)


def _is_most_probable(predicted: Any, batch: tuple[Any, ...]) -> Tensor:
    """Whether the most probable class is the target; of several outputs, the share of them where it is."""
    found = _guesses(predicted, batch[-1])
    if found is None:
        raise DataError(
            f"There is no accuracy for the distribution {predicted}: pass a `metric` that says what counts as right."
        )
    return found[0].double().mean(-1)


def _guesses(predicted: Any, target: Tensor) -> tuple[Tensor, Tensor] | None:
    """Whether the most probable class is the target, and how probable it is; of a sequence, at its last step.

    Args:
        predicted: A predictive distribution.
        target: The targets, examples along the first dimension.

    Returns:
        Both [examples, outputs], of more than one output only where each is a yes or no; None where there are no
        classes.
    """
    probs = class_probabilities(predicted)
    if probs is None:
        return None
    mixed = isinstance(predicted, torch_dist.MixtureSameFamily)
    kind = base_of(predicted.component_distribution if mixed else predicted)
    outputs = target.shape[-1] if isinstance(kind, torch_dist.Bernoulli) and target.ndim > 1 else 1
    right, confidence = (probs.argmax(-1) == target), probs.amax(-1)
    return (
        right.reshape(len(target), -1)[:, -outputs:],
        confidence.reshape(len(target), -1)[:, -outputs:],
    )


def _device(predicted: Any) -> torch.device:
    probs = class_probabilities(predicted)
    return predicted.mean.device if probs is None else probs.device
