"""Engines with their defaults, on problems that are known through and through."""

from __future__ import annotations

import math
from typing import Any

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import nclbayes as ncl

ENGINES = [ncl.LaplaceNCL, ncl.VariationalNCL]


@pytest.mark.parametrize(
    ("engine", "steps", "within", "seed"),
    [
        pytest.param(ncl.LaplaceNCL, 1000, 0.1, 0, marks=pytest.mark.slow),
        pytest.param(ncl.VariationalNCL, 4000, 0.3, 0, marks=pytest.mark.slow),
        *(pytest.param(ncl.LaplaceNCL, 4000, 0.1, seed, marks=pytest.mark.exhaustive) for seed in range(3)),
        *(pytest.param(ncl.VariationalNCL, 4000, 0.3, seed, marks=pytest.mark.exhaustive) for seed in (1, 2)),
    ],
)
def test_the_mean_of_a_conjugate_problem_is_found(engine: Any, steps: int, within: float, seed: int) -> None:
    """Three tasks of 200 examples; within so many posterior standard deviations of each of ten weights."""
    generator, size, noise, scale = torch.Generator().manual_seed(seed), 10, 0.3, 0.7
    teacher = scale * torch.randn(size, 1, generator=generator)
    torch.manual_seed(seed)
    line = nn.Linear(size, 1, bias=False)
    model = ncl.BayesianNetwork(line, ncl.Normal(noise), prior=dist.Normal(0.0, scale))
    learner = ncl.OnlinePosterior(model, engine(steps=steps), generator=torch.Generator().manual_seed(seed))
    precision = torch.eye(size, dtype=torch.float64) / scale**2
    moment = torch.zeros(size, 1, dtype=torch.float64)
    for k in range(3):
        x = torch.randn(200, size, generator=generator) * torch.linspace(0.3, 2, size).roll(k)
        y = x @ teacher + noise * torch.randn(200, 1, generator=generator)
        report = learner.update(ncl.Task((x, y), name=f"task {k}"), progress=False)
        precision += x.double().T @ x.double() / noise**2
        moment += x.double().T @ y.double() / noise**2
    assert report.likelihood_weight == 1.0
    spread = torch.linalg.inv(precision).diagonal().sqrt()
    away = (learner.mean()["weight"].double().T - torch.linalg.solve(precision, moment)).squeeze(1).abs()
    assert float((away / spread).max()) < within


def waves(frequency: int, seed: int, examples: int = 400) -> tuple[Tensor, Tensor]:
    """Sines and saw teeth of any phase, in noise."""
    generator = torch.Generator().manual_seed(1000 * frequency + seed)
    phase = (frequency * torch.linspace(0, 1, 64) + torch.rand(examples, 1, generator=generator)) % 1
    kind = torch.randint(2, (examples,), generator=generator)
    shape = torch.where(kind[:, None] == 0, torch.sin(2 * math.pi * phase), 1.2 * (2 * phase - 1))
    return shape + 0.3 * torch.randn(examples, 64, generator=generator), kind


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_waves_of_three_frequencies_are_learnt_and_kept_with_one_head(engine: Any) -> None:
    tasks = [ncl.Task(waves(f, 0), waves(f, 500), name=f"{f} a window") for f in (2, 5, 9)]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 2))
    learner = ncl.OnlinePosterior(ncl.BayesianNetwork(net, ncl.Categorical()), engine())
    for task in tasks:
        learner.update(task, progress=False)
    for samples in (None, 16):
        assert min(score.accuracy for score in ncl.evaluate(learner, tasks, num_samples=samples)) > 0.95


@pytest.mark.slow
def test_either_engine_goes_on_from_the_others_posterior_and_samples_of_both_are_networks() -> None:
    tasks = ncl.tasks.split_digits("domain")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 2))
    learner = ncl.OnlinePosterior(ncl.BayesianNetwork(net, ncl.Categorical()), ncl.LaplaceNCL(steps=500))
    for k, task in enumerate(tasks):
        learner.update(task, engine=ENGINES[k % 2](steps=500), progress=False)
        at_mean, by_samples = (ncl.evaluate(learner, tasks[: k + 1], num_samples=samples) for samples in (None, 32))
        for one, other in zip(at_mean, by_samples, strict=True):
            assert other.accuracy > one.accuracy - 0.03
    assert sum(score.accuracy for score in at_mean) / len(tasks) > 0.95
