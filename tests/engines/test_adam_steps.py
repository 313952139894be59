"""Steps by Adam, in coordinates in which the precision holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.engines import PAPER
from nclbayes.engines.settings import StepRule
from nclbayes.engines.steps import AdamSteps
from nclbayes.errors import SettingError
from nclbayes.methods import VCL, PlainTraining
from tests.engines.test_laplace import classification_task, classifier


def test_without_earlier_tasks_it_is_adam() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    model = ncl.BayesianNetwork(net, ncl.Categorical(), prior=ncl.priors.scaled(1.0))
    x, y = torch.randn(30, 4), torch.randint(3, (30,))
    settings = {**PAPER, "steps": 25, "batch_size": 30, "lr": 0.01, "prior_weight": 0.0}
    posterior = ncl.OnlinePosterior(model, ncl.LaplaceNCL(**settings, steps_by="adam"))
    start = {name: value.clone() for name, value in model.initial_values().items()}
    posterior.update(ncl.Task((x, y), name="all at once"), progress=False)
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(25):
        optimiser.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimiser.step()
    for name, parameter in net.named_parameters():
        assert not torch.equal(start[name], parameter)
        torch.testing.assert_close(posterior.mean()[name], parameter.detach(), rtol=1e-4, atol=1e-5)


def steps_after_a_task(stiffness: float) -> AdamSteps:
    """Of a map to one output after inputs along the first axis, so that this direction alone is held."""
    model = ncl.BayesianNetwork(nn.Linear(5, 1, bias=False), ncl.Normal(1.0), prior=dist.Normal(0.0, 1.0))
    posterior = ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=5))
    x = torch.zeros(40, 5)
    x[:, 0] = torch.linspace(-1, 1, 40)
    prior = ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=5), example=ncl.Task((x, x[:, :1]), name="first"))
    posterior.update(ncl.Task((x, x[:, :1].clone()), name="first"), progress=False)
    (state,), (before,) = posterior.blocks.values(), prior.blocks.values()
    steps = AdamSteps(ncl.LaplaceNCL(steps_by="adam"), state, state.loc, 40.0, before)
    steps.hold(stiffness)
    return steps


def test_a_held_direction_moves_less_by_as_much_as_it_is_stiffer() -> None:
    steps = steps_after_a_task(stiffness=40.0)
    moved = steps.direction(torch.full((1, 5), -1.0), 1)
    # All of five directions' stiffness is in the first: 1 + 5 * 40.
    torch.testing.assert_close(moved, torch.tensor([[1 / 201, 1.0, 1.0, 1.0, 1.0]]), rtol=1e-3, atol=1e-4)


def test_however_large_a_gradient_is_a_step_is_bounded_by_the_precision() -> None:
    steps = steps_after_a_task(stiffness=40.0)
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-6, 1.0, 1e6, 1e-3):
        moved = steps.direction(scale * torch.randn(1, 5, generator=generator), 1)
        assert bool((moved.abs() < torch.tensor([[8 / 201, 8.0, 8.0, 8.0, 8.0]])).all())


@pytest.mark.parametrize("engine", [ncl.LaplaceNCL, ncl.VariationalNCL])
def test_a_killed_update_goes_on_bit_for_bit(engine: Any, tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def kill(progress: Any) -> None:
        if progress.step == 13:
            raise Killed

    whole, broken = (ncl.OnlinePosterior(classifier(), engine(steps=20, steps_by="adam")) for _ in range(2))
    settings: dict[str, Any] = {"progress": False, "checkpoint": tmp_path / "c", "checkpoint_every": 5}
    for task in (classification_task(), classification_task(seed=1)):
        whole.update(task, progress=False)
        with pytest.raises(Killed):
            broken.update(task, **settings, callbacks=[kill])
        broken.update(task, **settings)
    assert all(torch.equal(value, broken.mean()[site]) for site, value in whole.mean().items())


def test_the_rate_is_that_of_the_rule_where_none_is_given() -> None:
    assert ncl.LaplaceNCL().lr == 0.05
    assert ncl.LaplaceNCL(steps_by="adam").lr == 0.001
    assert ncl.VariationalNCL(steps_by=StepRule.ADAM, lr=0.01).lr == 0.01
    assert ncl.LaplaceNCL(steps_by="adam").to_dict()["steps_by"] == "adam"


@pytest.mark.parametrize("method", [VCL, PlainTraining])
def test_methods_with_steps_of_their_own_refuse_it(method: Any) -> None:
    with pytest.raises(SettingError, match="steps_by"):
        method(steps_by="adam")


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(SettingError, match="steps_by is 'newton'; choose one of 'sgd', 'adam'"):
        ncl.LaplaceNCL(steps_by="newton")


class Reader(nn.Module):
    """A small transformer, which tells which of two words a sentence holds."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.body = ncl.nn.visible(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
        self.out = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(self.words(x))[:, 0])


def sentences(first: int, seed: int) -> ncl.Task:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(10, 20, (200, 6), generator=generator)
    y = torch.randint(2, (200,), generator=generator)
    x[torch.arange(200), torch.randint(1, 6, (200,), generator=generator)] = first + y
    return ncl.Task((x, y), (x, y), name=f"words {first}")


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.exhaustive if seed else pytest.mark.slow) for seed in range(3)]
)
def test_a_transformer_learns_two_tasks(seed: int) -> None:
    torch.manual_seed(seed)
    model = ncl.BayesianNetwork(Reader(), ncl.Categorical())
    posterior = ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=300, batch_size=32, steps_by="adam"))
    tasks = [sentences(first, seed) for first in (0, 4)]
    for task in tasks:
        posterior.update(task, progress=False)
    assert all(result.accuracy > 0.9 for result in ncl.evaluate(posterior, tasks))
