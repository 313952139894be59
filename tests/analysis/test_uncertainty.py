"""Measures of uncertainty, against scikit-learn and counting by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score, roc_curve
from torch import nn

import nclbayes as ncl
from nclbayes.analysis.evaluation import calibration_error
from nclbayes.analysis.uncertainty import Detection, Guesses, Sureness, guesses, reliability, risk_coverage
from nclbayes.errors import DataError, SettingError


def some(classes: int = 4, count: int = 500, ties: bool = False) -> Guesses:
    draw = torch.Generator().manual_seed(classes)
    logits = 2 * torch.randn(count, classes, generator=draw, dtype=torch.float64)
    probs = logits.softmax(-1)
    if ties:
        probs = (probs * 5).round().clamp(min=0.1)
        probs = probs / probs.sum(-1, keepdim=True)
    target = torch.distributions.Categorical((logits / 2).softmax(-1))
    torch.manual_seed(0)
    return Guesses(probs, target.sample())


def test_loss_and_brier_score_are_those_of_scikit_learn() -> None:
    found = some()
    assert found.loss == pytest.approx(log_loss(found.target, found.probs.numpy()))
    two = some(2)
    # That of two classes counts one of them.
    assert two.brier == pytest.approx(2 * brier_score_loss(two.target, two.probs[:, 1].numpy()))
    assert found.brier == pytest.approx(
        np.mean(np.sum((found.probs.numpy() - np.eye(4)[found.target.numpy()]) ** 2, -1))
    )


@pytest.mark.parametrize(("adaptive", "strategy"), [(False, "uniform"), (True, "quantile")])
def test_reliability_is_the_calibration_curve(adaptive: bool, strategy: str) -> None:
    found = some(2)
    right, sure = calibration_curve(found.correct, found.confidence, n_bins=10, strategy=strategy)
    bins = reliability(found, 10, adaptive)
    assert sum(bins.counts) == 500
    assert bins.confidence == pytest.approx(sure.tolist(), abs=2e-3)
    assert bins.accuracy == pytest.approx(right.tolist(), abs=0.03 if adaptive else 1e-12)
    if adaptive:
        assert set(bins.counts) == {50}
    assert found.calibration_error == pytest.approx(calibration_error(found.confidence, found.correct))


def test_an_adaptive_error_sees_what_equal_bins_hide() -> None:
    # All are between 0.96 and 0.99 sure; the surer half is wrong, the other right.
    sure = torch.linspace(0.96, 0.99, 100, dtype=torch.float64)
    found = Guesses(torch.stack([sure, 1 - sure], -1), (torch.arange(100) >= 50).long())
    assert found.calibration_error == pytest.approx(0.475, abs=0.01)
    assert found.adaptive_calibration_error == pytest.approx(0.5, abs=0.02)


def test_risk_falls_where_the_unsure_are_left_out() -> None:
    found = some()
    coverage, risk = risk_coverage(found)
    assert float(coverage[-1]) == 1.0
    assert float(risk[-1]) == pytest.approx(1 - found.accuracy)
    order = np.argsort(-found.confidence.numpy(), kind="stable")
    for count in (1, 17, 250):
        assert float(risk[count - 1]) == pytest.approx(1 - found.correct.numpy()[order[:count]].mean())
    assert found.selective_risk < 1 - found.accuracy
    shuffled = Guesses(found.probs, found.target[torch.randperm(500)])
    assert found.selective_risk < shuffled.selective_risk


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("sureness", list(Sureness))
def test_detection_is_the_area_under_the_curve(ties: bool, sureness: Sureness) -> None:
    own, foreign = some(4, 300, ties), some(4, 200, ties)
    foreign = Guesses((foreign.probs + 0.4) / 2.6, foreign.target)
    found = Detection.of(own, foreign, sureness)
    truth = np.r_[np.ones(300), np.zeros(200)]
    values = torch.cat([sureness.of(own.probs), sureness.of(foreign.probs)]).numpy()
    assert found.auroc == pytest.approx(roc_auc_score(truth, values))
    false, true, _ = roc_curve(truth, values, drop_intermediate=False)
    assert found.false_positive_rate == pytest.approx(false[true >= 0.95][0])


def test_what_cannot_be_told_apart_says_so() -> None:
    with pytest.raises(DataError, match="some of each kind"):
        Detection.between(torch.zeros(0), torch.ones(3))
    with pytest.raises(DataError, match="no NaN"):
        Detection.between(torch.tensor([torch.nan]), torch.ones(3))
    with pytest.raises(SettingError, match="bins must be at least 1, not 0"):
        reliability(some(), 0)
    assert Detection.between(torch.ones(3), torch.zeros(2)) == Detection(1.0, 0.0)
    assert Detection.between(torch.ones(3), torch.ones(2)) == Detection(0.5, 1.0)


def test_a_posterior_is_surer_of_its_own_task() -> None:
    torch.manual_seed(0)
    x = torch.randn(200, 2)
    x[:, 0] += 3 * x[:, 0].sign()
    data = (x, (x[:, 0] > 0).long())
    own = ncl.Task(data, data, name="own")
    between = ncl.Task(data, (0.1 * torch.randn(100, 2), torch.zeros(100, dtype=torch.long)), name="between")
    net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 2))
    posterior = ncl.OnlinePosterior(ncl.BayesianNetwork(net, ncl.Categorical()), ncl.LaplaceNCL(steps=100))
    posterior.update(own, progress=False)
    for how in ({}, {"method": "probit"}, {"num_samples": 8}):
        told = [guesses(posterior, task, batch_size=64, **how) for task in (own, between)]
        assert told[0].probs.shape == (200, 2)
        assert Detection.of(*told).auroc > 0.9
        (score,) = ncl.evaluate(posterior, own, batch_size=64, **how)
        assert told[0].accuracy == pytest.approx(score.accuracy)
        assert told[0].loss == pytest.approx(score.loss, rel=1e-4)
        assert told[0].calibration_error == pytest.approx(score.calibration_error, abs=1e-6)


def test_without_classes_there_are_no_guesses() -> None:
    posterior = ncl.OnlinePosterior(ncl.BayesianNetwork(nn.Linear(2, 1), ncl.Normal(1.0)), ncl.LaplaceNCL(steps=2))
    data = (torch.randn(20, 2), torch.randn(20, 1))
    task = ncl.Task(data, data, name="numbers")
    posterior.update(task, progress=False)
    with pytest.raises(DataError, match="'numbers' is not over one class for each example"):
        guesses(posterior, task)
