"""Stimulus-response trials: timing, stimuli, targets, weights, noise, randomness, and what counts as correct."""

from __future__ import annotations

import math
from importlib import import_module

import pytest
import torch
from torch import Tensor

import nclbayes as ncl
from nclbayes.errors import DataError, SettingError

# The package gives the function of this name; the module is needed here.
sr = import_module("nclbayes.tasks.stimulus_response")

NAMES = ["fdgo", "fdanti", "delaygo", "delayanti", "dm1", "dm2"]
TRIALS = 4096
# steps of 20 ms: before the stimulus, stimulus, delay
STEPS = {
    "fd": ((15, 35), (25, 75), (0, 0)),
    "delay": ((15, 35), (10, 30), (10, 80)),
    "dm": ((5, 20), (30, 70), (0, 0)),
}


def family(name: str) -> str:
    return name.removesuffix("go").removesuffix("anti").rstrip("12")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator(device="cpu").manual_seed(seed)


def task(name: str, **settings: object) -> ncl.Task:
    (found,) = sr.stimulus_response(names=[name], test_size=1, **settings)  # type: ignore[arg-type]
    return found


class Trials:
    """A batch without noise, and what can be read off it."""

    def __init__(self, name: str, count: int = TRIALS, seed: int = 0, **settings: object) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sr, "INPUT_NOISE", 0.0)
            self.x, self.lengths, self.weights, self.y = task(name, **settings).train(count, generator(seed))
        self.steps = torch.arange(self.x.shape[1])
        self.present = self.steps < self.lengths.unsqueeze(-1)
        self.go = self.x[..., 0].sum(1).long()  # how many steps fixation is on
        self.shown = self.x[..., 1:5].abs().sum(-1) > 1e-6
        self.on = self.shown.long().argmax(1)
        self.duration = self.shown.sum(1)
        # the directions in both modalities, [B, 2, 2]
        self.stimulus = self.x[torch.arange(count), self.on, 1:5].unflatten(-1, (2, 2))
        self.answer = self.y[torch.arange(count), self.lengths - 1, 1:]


def angle(vectors: Tensor) -> Tensor:
    return torch.atan2(vectors[..., 1], vectors[..., 0])


def assert_uniform(values: Tensor, low: int, high: int) -> None:
    """Whole numbers uniform from low to high, both included."""
    counts = torch.bincount(values - low, minlength=high - low + 1)
    assert len(counts) == high - low + 1
    expected = len(values) / len(counts)
    assert ((counts - expected).abs() < 5 * expected**0.5).all()


def test_six_tasks_in_order_of_a_given_size() -> None:
    tasks = sr.stimulus_response(test_size=20)
    assert [t.name for t in tasks] == NAMES
    assert all(t.size == 1_000_000 and t.context == {} for t in tasks)
    for t in tasks:
        x, lengths, weights, y = t.test
        steps = int(lengths.max())
        assert (x.shape, lengths.shape) == ((20, steps, 11), (20,))
        assert weights.shape == y.shape == (20, steps, 3)
        assert x.dtype == weights.dtype == y.dtype == torch.float32
        assert lengths.dtype == torch.int64
    some = sr.stimulus_response(names=["dm2", "fdgo"], size=100, test_size=20)
    assert [(t.name, t.size) for t in some] == [("dm2", 100), ("fdgo", 100)]
    assert all(torch.equal(a, b) for a, b in zip(some[0].test, tasks[-1].test, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_timing(name: str) -> None:
    trials = Trials(name)
    before, stimulus, delay = STEPS[family(name)]
    assert_uniform(trials.on, *before)
    assert_uniform(trials.lengths - trials.go, 15, 35)
    if family(name) == "fd":
        assert torch.equal(trials.on + trials.duration, trials.lengths)
        assert_uniform(trials.go - trials.on, *stimulus)
    else:
        assert_uniform(trials.duration, *stimulus)
        assert_uniform(trials.go - trials.on - trials.duration, *delay)
    # the stimulus is on without a break
    span = (trials.steps >= trials.on.unsqueeze(-1)) & (trials.steps < (trials.on + trials.duration).unsqueeze(-1))
    assert torch.equal(span, trials.shown)


@pytest.mark.parametrize("name", NAMES)
def test_fixation_identity_and_padding(name: str) -> None:
    trials = Trials(name, count=300)
    fixating = trials.steps < trials.go.unsqueeze(-1)
    assert trials.x.shape[1] == trials.lengths.max()
    assert torch.equal(trials.x[..., 0], fixating.float())
    identity = torch.nn.functional.one_hot(torch.tensor(NAMES.index(name)), 6)
    assert torch.equal(trials.x[..., 5:], trials.present.unsqueeze(-1) * identity.float())
    x, lengths, weights, y = task(name).train(300, generator())
    padding = torch.arange(x.shape[1]) >= lengths.unsqueeze(-1)
    assert padding.any()
    assert not any(item[padding].any() for item in (x, weights, y))


@pytest.mark.parametrize("name", NAMES)
def test_modalities(name: str) -> None:
    used = Trials(name).stimulus.abs().sum(-1) > 1e-6
    assert (used.sum(-1) == 1).all()
    share = used[:, 1].float().mean()
    if family(name) == "dm":
        assert share == float(name == "dm2")
    else:
        assert abs(share - 0.5) < 0.04


@pytest.mark.parametrize("name", NAMES)
def test_targets_while_fixating_and_in_the_response(name: str) -> None:
    trials = Trials(name, count=300)
    fixating = trials.steps < trials.go.unsqueeze(-1)
    response = trials.present & ~fixating
    assert torch.equal(trials.y[..., 0], fixating.float())
    assert not trials.y[..., 1:][~response].any()
    expected = trials.answer.unsqueeze(1).expand(-1, len(trials.steps), -1)
    assert torch.equal(trials.y[..., 1:][response], expected[response])
    torch.testing.assert_close(trials.answer.norm(dim=-1), torch.ones(300))


@pytest.mark.parametrize("anti", ["mirror", "opposite"])
@pytest.mark.parametrize("name", ["fdgo", "fdanti", "delaygo", "delayanti"])
def test_directions_of_go_and_anti(name: str, anti: str) -> None:
    trials = Trials(name, anti=anti)
    seen = trials.stimulus.sum(1)
    torch.testing.assert_close(seen.norm(dim=-1), torch.ones(TRIALS))
    if "anti" not in name:
        expected = seen
    else:
        expected = -seen if anti == "opposite" else seen * torch.tensor([1.0, -1.0])
    torch.testing.assert_close(trials.answer, expected, rtol=1e-5, atol=1e-5)
    assert_uniform(((angle(seen) + math.pi) / (2 * math.pi) * 16).long().clamp(max=15), 0, 15)


@pytest.mark.parametrize("name", ["dm1", "dm2"])
def test_decisions_are_for_the_stronger_direction(name: str) -> None:
    trials = Trials(name)
    seen = trials.stimulus.sum(1)
    # along and across the answer: strong + weak cos(gap), weak sin(gap), with strong - weak = 2 coherence
    along = (seen * trials.answer).sum(-1)
    across = seen[:, 1] * trials.answer[:, 0] - seen[:, 0] * trials.answer[:, 1]
    assert (along >= 0.8 - 1e-5).all()  # strong - weak
    assert (along <= 2.0 + 1e-5).all()  # strong alone, the gap being at least a right angle
    assert across.abs().max() <= 0.8 + 1e-5
    assert across.abs().max() > 0.5
    assert abs(across.mean()) < 0.05
    # mean and coherence are independent of the gap, whose cosine has mean -2 / pi
    mean = along.mean()
    assert abs(mean - (1.6 - 0.4 * 2 / math.pi)) < 0.03
    assert_uniform(((angle(trials.answer) + math.pi) / (2 * math.pi) * 16).long().clamp(max=15), 0, 15)


@pytest.mark.parametrize("name", NAMES)
def test_weights(name: str) -> None:
    trials = Trials(name, count=50)
    for i in range(50):
        expected = torch.zeros(len(trials.steps), 3)
        go, end = int(trials.go[i]), int(trials.lengths[i])
        expected[5:go] = torch.tensor([2.0, 1.0, 1.0])
        expected[go:end] = 0
        expected[go + 5 : end] = torch.tensor([10.0, 5.0, 5.0])
        assert torch.equal(trials.weights[i], expected)


@pytest.mark.parametrize("name", ["fdgo", "dm2"])
def test_noise_is_gaussian_on_all_inputs(name: str) -> None:
    clean = Trials(name, count=1000)
    noisy = task(name).train(1000, generator())[0]
    noise = (noisy - clean.x)[clean.present]
    assert sr.INPUT_NOISE == pytest.approx(0.3162, abs=1e-4)
    assert sr.RECURRENT_NOISE == pytest.approx(0.1581, abs=1e-4)
    assert noise.mean(0).abs().max() < 0.01
    torch.testing.assert_close(noise.std(0), torch.full((11,), 0.1 * math.sqrt(10)), rtol=0.02, atol=0)
    correlation = torch.corrcoef(noise.T) - torch.eye(11)
    assert correlation.abs().max() < 0.02
    assert abs(float((noise.abs() > sr.INPUT_NOISE).float().mean()) - 0.3173) < 0.005


@pytest.mark.parametrize("count", [1, 2, 7, 33])
def test_any_batch_size(count: int) -> None:
    for t in sr.stimulus_response(test_size=1):
        x, lengths, weights, y = t.train(count, generator())
        assert len(x) == len(lengths) == len(weights) == len(y) == count
        assert x.shape[1] == int(lengths.max())
    with pytest.raises(SettingError, match="at least 1, not 0"):
        task("fdgo").train(0, generator())


def test_draws_come_from_the_generator_alone() -> None:
    state = torch.get_rng_state()
    t = sr.stimulus_response(test_size=8)[2]
    g = generator(3)
    first, second = t.train(16, g), t.train(16, g)
    assert torch.equal(torch.get_rng_state(), state)
    again = t.train(16, generator(3))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[1], second[1])


def test_test_trials_come_from_the_seed() -> None:
    first, again, other = (sr.stimulus_response(seed=seed, test_size=32) for seed in (1, 1, 2))
    for a, b, c in zip(first, again, other, strict=True):
        assert all(torch.equal(left, right) for left, right in zip(a.test, b.test, strict=True))
        assert not torch.equal(a.test[1], c.test[1])
    # the go and the anti task of a pair do not share their trials
    assert not torch.equal(first[0].test[1], first[1].test[1])


def test_default_dtype_and_device_do_not_matter() -> None:
    expected = task("dm1").train(4, generator())
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = task("dm1").train(4, generator())
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_batches_and_a_network_fit() -> None:
    t = task("fdgo", size=96)
    rnn = ncl.nn.RNN(sr.INPUTS, 8, leak=0.2)
    for x, lengths, weights, y in t.epoch(32, generator()):
        output = rnn(x, lengths)[..., : sr.OUTPUTS]
        assert torch.isfinite((weights * (output - y) ** 2).sum())
        assert sr.performance(output, y, lengths).shape == (32,)


def rotated(y: Tensor, by: float) -> Tensor:
    c, s = math.cos(by), math.sin(by)
    turned = torch.stack([c * y[..., 1] - s * y[..., 2], s * y[..., 1] + c * y[..., 2]], dim=-1)
    return torch.cat([y[..., :1], turned], dim=-1)


def test_performance_judges_direction_and_fixation_at_the_last_step() -> None:
    trials = Trials("delaygo", count=64)
    y, lengths = trials.y, trials.lengths
    last = (torch.arange(64), lengths - 1)
    assert sr.performance(y, y, lengths).all()
    for by, correct in ((0.09, True), (-0.09, True), (0.11, False), (-0.11, False), (1.0, False)):
        assert (sr.performance(rotated(y, by * math.pi), y, lengths) == correct).all()
        assert (sr.performance(3 * rotated(y, by * math.pi), y, lengths) == correct).all()
    for fixation, correct in ((0.49, True), (0.5, False), (1.0, False), (-1.0, True)):
        output = y.clone()
        output[(*last, torch.zeros(64, dtype=torch.long))] = fixation
        assert (sr.performance(output, y, lengths) == correct).all()
    # only the last valid step counts
    elsewhere = torch.full_like(y, 7.0)
    elsewhere[last] = y[last]
    assert sr.performance(elsewhere, y, lengths).all()
    wrong = y.clone()
    wrong[last] = -wrong[last]
    assert not sr.performance(wrong, y, lengths).any()


def test_an_answer_without_direction_is_wrong() -> None:
    trials = Trials("fdgo", count=64)
    for nothing in (torch.zeros_like(trials.y), torch.full_like(trials.y, math.nan)):
        assert not sr.performance(nothing, trials.y, trials.lengths).any()


def test_performance_refuses_what_does_not_fit() -> None:
    y, lengths = torch.zeros(2, 4, 3), torch.tensor([4, 2])
    for wrong in ((y[:1], y, lengths), (y[..., :2], y[..., :2], lengths), (y, y, lengths[:1]), (y[0], y[0], lengths)):
        with pytest.raises(DataError, match=r"must be \[B, T, 3\]"):
            sr.performance(*wrong)
    for outside in (0, 5):
        with pytest.raises(DataError, match=r"\[1, 4\]"):
            sr.performance(y, y, torch.tensor([4, outside]))


def test_bad_settings_are_refused() -> None:
    with pytest.raises(SettingError, match="no stimulus-response task 'go'; choose from 'fdgo', 'fdanti'"):
        sr.stimulus_response(names=["fdgo", "go"])
    with pytest.raises(SettingError, match="empty"):
        sr.stimulus_response(names=[])
    with pytest.raises(SettingError, match="anti is 'left'; choose 'mirror' or 'opposite'"):
        sr.stimulus_response(anti="left")
    with pytest.raises(SettingError, match="test_size must be at least 1"):
        sr.stimulus_response(test_size=0)
