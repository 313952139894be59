"""Scores against sums by hand."""

from __future__ import annotations

import math
from typing import Any

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.analysis.evaluation import calibration_error, class_probabilities
from nclbayes.errors import DataError


class Fixed:
    """Predicts what it is told."""

    def __init__(self, distribution: object) -> None:
        self.distribution = distribution
        self.calls: list[dict[str, object]] = []

    def predict(self, *inputs: Tensor, **settings: object) -> object:
        self.calls.append(settings)
        return self.distribution


def test_accuracy_loss_and_calibration_by_hand() -> None:
    probs = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.45, 0.55]])
    y = torch.tensor([0, 1, 1, 0])
    task = ncl.Task((torch.zeros(4, 1), y), (torch.zeros(4, 1), y), name="t", context={"head": 2})
    learner = Fixed(dist.Categorical(probs=probs))
    (score,) = ncl.evaluate(learner, [task], num_samples=3)
    assert score.accuracy == 0.5
    assert score.examples == 4
    assert score.loss == pytest.approx(-(math.log(0.9) + math.log(0.4) + math.log(0.8) + math.log(0.45)) / 4)
    # each example in a bin of its own: |1 - 0.9|, |0 - 0.6|, |1 - 0.8|, |0 - 0.55|
    assert score.calibration_error == pytest.approx((0.1 + 0.6 + 0.2 + 0.55) / 4, rel=1e-5)
    assert learner.calls[0]["head"] == 2
    assert learner.calls[0]["num_samples"] == 3


def test_calibration_pools_within_bins() -> None:
    confidence = torch.tensor([0.81, 0.85, 0.99, 1.0])
    correct = torch.tensor([True, False, True, True])
    assert calibration_error(confidence, correct, bins=10) == pytest.approx(
        (abs(1 - 1.66) + abs(2 - 1.99)) / 4, rel=1e-5
    )


def test_batches_do_not_change_scores() -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 4)
    model = ncl.BayesianNetwork(net, ncl.Categorical(), prior=dist.Normal(0.0, 1.0))
    x, y = torch.randn(50, 3), torch.randint(4, (50,))
    task = ncl.Task((x, y), (x, y), name="t")
    posterior = ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=20, batch_size=25))
    posterior.update(task)
    whole, pieces = (ncl.evaluate(posterior, [task], batch_size=size)[0] for size in (100, 7))
    assert whole.accuracy == pieces.accuracy
    assert whole.loss == pytest.approx(pieces.loss, rel=1e-5)
    assert whole.calibration_error == pytest.approx(pieces.calibration_error, rel=1e-5)
    sampled = [ncl.evaluate(posterior, [task], num_samples=5)[0].loss for _ in range(2)]
    assert sampled[0] == sampled[1]
    linearized = [ncl.evaluate(posterior, [task], method="linearized")[0].loss for _ in range(2)]
    assert linearized[0] == linearized[1]
    assert len({whole.loss, sampled[0], linearized[0]}) == 3


def test_sequences_count_at_their_last_step_and_mixtures_average() -> None:
    probs = torch.tensor([[[0.9, 0.1], [0.2, 0.8]], [[0.1, 0.9], [0.7, 0.3]]])
    y = torch.tensor([[1, 1], [1, 1]])
    task = ncl.Task((torch.zeros(2, 1), y), (torch.zeros(2, 1), y), name="t")
    (score,) = ncl.evaluate(Fixed(dist.Categorical(probs=probs).to_event(1)), [task])
    assert score.accuracy == 0.5
    both = dist.Categorical(probs=torch.stack([probs[:, 0], probs[:, 1]], 1))
    mixture = dist.MixtureSameFamily(dist.Categorical(torch.ones(2, 2)), both)
    torch.testing.assert_close(class_probabilities(mixture), (probs[:, 0] + probs[:, 1]) / 2)


@pytest.mark.parametrize("wrap", [lambda fn: fn, lambda fn: fn.to_event(1)], ids=["batch", "event"])
def test_of_several_yes_or_no_outputs_each_counts(wrap: Any) -> None:
    y = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    task = ncl.Task((torch.zeros(2, 1), y), (torch.zeros(2, 1), y), name="t")
    probs = torch.tensor([[0.9, 0.9, 0.9], [0.9, 0.1, 0.9]])
    (score,) = ncl.evaluate(Fixed(wrap(dist.Bernoulli(probs=probs))), [task])
    assert score.accuracy == pytest.approx(4 / 6)
    assert score.calibration_error == pytest.approx(0.9 - 4 / 6, abs=1e-6)
    (single,) = ncl.evaluate(
        Fixed(dist.Bernoulli(probs=probs[:, 1])), [ncl.Task(task.train, (torch.zeros(2, 1), y[:, 1]), name="t")]
    )
    assert single.accuracy == 0.5


def test_a_metric_of_ones_own() -> None:
    y = torch.tensor([[0.0], [1.0]])
    task = ncl.Task((y, y), (y, y), name="t")
    learner = Fixed(dist.Normal(torch.tensor([[0.1], [3.0]]), 1.0).to_event(1))
    close = ncl.evaluate(learner, [task], metric=lambda p, batch: (p.mean - batch[-1]).abs().squeeze(-1) < 0.5)[0]
    assert close.accuracy == 0.5
    assert math.isnan(close.calibration_error)
    with pytest.raises(DataError, match=r"no accuracy for the distribution .*Normal.*: pass a `metric`"):
        ncl.evaluate(learner, [task])


def test_a_task_without_test_data_is_named() -> None:
    with pytest.raises(DataError, match="Task 't' has no test data"):
        ncl.evaluate(Fixed(None), [ncl.Task((torch.zeros(2, 1), torch.zeros(2)), name="t")])


def test_one_task_needs_no_list() -> None:
    y = torch.tensor([0, 1])
    task = ncl.Task((torch.zeros(2, 1), y), (torch.zeros(2, 1), y), name="t")
    learner = Fixed(dist.Categorical(probs=torch.tensor([[0.9, 0.1], [0.6, 0.4]])))
    assert ncl.evaluate(learner, task) == ncl.evaluate(learner, [task])


@pytest.mark.parametrize("value", [0.5, torch.tensor(0.5), torch.ones(2, 1)])
def test_a_metric_must_give_one_number_an_example(value: Any) -> None:
    y = torch.zeros(2, 1)
    task = ncl.Task((torch.zeros(2, 1), y), (torch.zeros(2, 1), y), name="t")
    learner = Fixed(dist.Normal(torch.zeros(2, 1), 1.0).to_event(1))
    with pytest.raises(DataError, match=r"one number for each example, a tensor of shape \(2,\)"):
        ncl.evaluate(learner, task, metric=lambda predicted, batch: value)
