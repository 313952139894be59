"""What an engine decides itself: what an example counts, when a task is learnt, how training ends."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import nclbayes as ncl
from nclbayes.engines import PAPER
from nclbayes.engines.likelihood import can_be_certain, guess_loss
from nclbayes.engines.progress import ProgressBar
from nclbayes.errors import FileError, SettingError
from nclbayes.methods import EWC, OWM, DiagonalNCL, LaplaceOWM, PlainTraining
from nclbayes.watch import Observed
from tests.engines.paper import laplace
from tests.engines.test_laplace import classification_task, classifier

WEIGHTS = 5 * 8 + 8 + 8 * 3 + 3


def separable(seed: int = 0, examples: int = 40) -> ncl.Task:
    x = torch.randn(examples, 5, generator=torch.Generator().manual_seed(seed))
    return ncl.Task((x, (x[:, 0] > 0).long()), name=f"separable {seed}")


def regression(noise: float, seed: int = 0) -> tuple[ncl.BayesianNetwork, ncl.Task]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 1))
    x = torch.randn(50, 3)
    task = ncl.Task((x, 2 * x[:, :1] + noise * torch.randn(50, 1)), name="slope")
    return ncl.BayesianNetwork(net, ncl.Normal(0.5), prior=ncl.priors.scaled(1.0)), task


def ends_where(losses: list[float], enough: float, least: float, guess: float = 0.0) -> int:
    """The first step at which the mean of the last tenth lies so near to the least."""
    start = max(sum(losses[:4]) / 4 - least, guess)
    for step in range(6, len(losses) + 1):
        window = max(5, step // 10)
        if sum(losses[step - window : step]) / window - least <= (1 - enough) * start:
            return step
    raise AssertionError("never")


@pytest.mark.parametrize(("examples", "expected"), [(WEIGHTS, 1.0), (2 * WEIGHTS, 1.0), (30, 10 * WEIGHTS / 30)])
@pytest.mark.parametrize("engine", [ncl.LaplaceNCL, ncl.VariationalNCL])
def test_an_example_counts_more_where_weights_outnumber_examples(engine: Any, examples: int, expected: float) -> None:
    task = classification_task(examples=examples)
    chosen = ncl.OnlinePosterior(classifier(), engine(steps=5, likelihood_weight="auto"))
    fixed = ncl.OnlinePosterior(classifier(), engine(steps=5, likelihood_weight=expected))
    assert chosen.update(task, progress=False).likelihood_weight == pytest.approx(expected)
    fixed.update(task, progress=False)
    assert all(torch.equal(value, fixed.mean()[site]) for site, value in chosen.mean().items())


def test_what_an_example_counts_is_chosen_once_and_kept(tmp_path: Path) -> None:
    posterior = ncl.OnlinePosterior(classifier(), ncl.LaplaceNCL(steps=3, likelihood_weight="auto"))
    first = posterior.update(classification_task(examples=30), progress=False).likelihood_weight
    assert posterior.update(classification_task(2, examples=20), progress=False).likelihood_weight == first
    posterior.save(tmp_path / "posterior.ncl")
    again = ncl.OnlinePosterior.load(tmp_path / "posterior.ncl", classifier())
    assert again.engine.likelihood_weight == "auto"
    engine = ncl.VariationalNCL(steps=3, likelihood_weight="auto")
    assert again.update(classification_task(3, examples=500), engine=engine, progress=False).likelihood_weight == first


def test_it_goes_on_with_what_the_first_task_was_given(tmp_path: Path) -> None:
    posterior = ncl.OnlinePosterior(classifier(), ncl.LaplaceNCL(steps=3, likelihood_weight=3.0))
    posterior.update(classification_task(examples=30), progress=False)
    auto = ncl.LaplaceNCL(steps=3, likelihood_weight="auto")
    assert posterior.update(classification_task(2, examples=20), engine=auto, progress=False).likelihood_weight == 3.0


@pytest.mark.parametrize("schedule", ["auto", None])
def test_a_task_ends_when_enough_is_learnt(schedule: str | None) -> None:
    engine = ncl.LaplaceNCL(steps=1000, batch_size=40, lr=0.1, schedule=schedule, enough=0.9)
    report = ncl.OnlinePosterior(classifier(prior=100.0), engine).update(separable(), progress=False)
    learnt = ends_where(report.losses, 0.9, 0.0, math.log(3))
    assert report.stopped_early
    assert report.steps == learnt + (max(5, learnt // 10) if schedule else 0)


def test_what_is_measured_is_the_deviance() -> None:
    model, task = regression(noise=0.01)
    engine = ncl.LaplaceNCL(steps=1000, lr=0.01, schedule="auto", enough=0.9, likelihood_weight="auto")
    report = ncl.OnlinePosterior(model, engine).update(task, progress=False)
    least = -float(dist.Normal(0.0, 0.5).log_prob(torch.tensor(0.0)))
    learnt = ends_where(report.losses, 0.9, least)
    assert report.steps == learnt + max(5, learnt // 10) < 1000


def test_noise_is_not_to_be_learnt_and_training_takes_all_its_steps() -> None:
    model, task = regression(noise=1.0)
    engine = ncl.LaplaceNCL(steps=100, lr=0.01, enough=0.95, likelihood_weight="auto")
    assert ncl.OnlinePosterior(model, engine).update(task, progress=False).steps == 100


@pytest.mark.parametrize(("examples", "ends"), [(40, True), (100, False)])
def test_auto_ends_early_only_where_weights_outnumber_examples(examples: int, ends: bool) -> None:
    engine = ncl.LaplaceNCL(steps=300, batch_size=40, lr=0.1, enough="auto")
    report = ncl.OnlinePosterior(classifier(prior=100.0), engine).update(separable(0, examples), progress=False)
    assert report.stopped_early is ends


def test_a_likelihood_that_knows_no_mean_is_learnt_to_the_end() -> None:
    def model(x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        w = pyro.sample("w", dist.Normal(torch.zeros(1, 3), 1.0).to_event(2))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Cauchy((x @ w.T).squeeze(-1), 0.1), obs=y)

    x = torch.randn(30, 3)
    report = ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=60, lr=0.001, enough=0.5, fisher="empirical")).update(
        ncl.Task((x, x[:, 0]), name="robust"), progress=False
    )
    assert report.steps == 60


@pytest.mark.parametrize("engine", [ncl.LaplaceNCL, ncl.VariationalNCL])
def test_cool_is_a_straight_line_to_zero_from_half_of_the_steps_on(engine: Any) -> None:
    # Without a pull of the prior, which is not taken at every step.
    named = ncl.OnlinePosterior(classifier(), engine(steps=20, prior_weight=0.0, schedule="auto"))
    cool = engine(steps=20, prior_weight=0.0, schedule=lambda done: min(1.0, 2 - 2 * done))
    called = ncl.OnlinePosterior(classifier(), cool)
    for posterior in (named, called):
        posterior.update(classification_task(), progress=False)
    assert all(torch.equal(value, called.mean()[site]) for site, value in named.mean().items())


def test_a_schedule_with_a_name_is_kept_in_a_file(tmp_path: Path) -> None:
    posterior = ncl.OnlinePosterior(classifier(), ncl.LaplaceNCL(steps=3, schedule="auto", enough="auto"))
    posterior.update(classification_task(), progress=False)
    posterior.save(tmp_path / "posterior.ncl")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = ncl.OnlinePosterior.load(tmp_path / "posterior.ncl", classifier())
    assert again.engine == posterior.engine


@pytest.mark.parametrize("after", [0, 3])
def test_a_task_that_was_interrupted_as_it_cooled_down_ends_where_it_would_have(tmp_path: Path, after: int) -> None:
    engine = ncl.LaplaceNCL(steps=400, batch_size=20, lr=0.1, schedule="auto", enough=0.9)
    whole, parted = (ncl.OnlinePosterior(classifier(prior=100.0), engine) for _ in range(2))
    report = whole.update(separable(), progress=False)
    stop = ends_where(report.losses, 0.9, 0.0) + after

    def interrupt(progress: ncl.engines.Progress) -> None:
        if progress.step == stop:
            raise KeyboardInterrupt

    settings: dict[str, Any] = {"checkpoint": tmp_path / "snapshot", "checkpoint_every": 1, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        parted.update(separable(), callbacks=[interrupt], **settings)
    again = parted.update(separable(), **settings)
    assert again.losses == report.losses
    assert all(torch.equal(value, parted.mean()[site]) for site, value in whole.mean().items())


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("enough", 1.0, "below 1"),
        ("enough", "often", 'or "auto"'),
        ("schedule", "warm", 'or "auto"'),
        ("likelihood_weight", "many", 'or "auto"'),
        ("likelihood_weight", None, "likelihood_weight"),
        ("stiffness", "very", 'or "auto"'),
    ],
)
def test_other_words_are_refused(setting: str, value: object, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        replace(ncl.LaplaceNCL(), **{setting: value})


def test_methods_may_end_when_enough_is_learnt_too() -> None:
    engine = PlainTraining(steps=1000, batch_size=40, lr=0.1, enough=0.9)
    assert ncl.OnlinePosterior(classifier(prior=100.0), engine).update(separable(), progress=False).stopped_early


def test_a_file_that_lost_what_was_chosen_is_refused(tmp_path: Path) -> None:
    posterior = ncl.OnlinePosterior(classifier(), ncl.LaplaceNCL(steps=3, likelihood_weight="auto"))
    posterior.update(classification_task(), progress=False)
    posterior._belief = replace(posterior._belief, likelihood_weight=None)
    posterior.save(tmp_path / "posterior.ncl")
    with pytest.raises(FileError, match="likelihood_weight is not there"):
        ncl.OnlinePosterior.load(tmp_path / "posterior.ncl", classifier())


def test_engines_decide_themselves_by_default_and_their_relatives_are_the_papers() -> None:
    for engine in (ncl.LaplaceNCL(), ncl.VariationalNCL()):
        assert {getattr(engine, name) for name in ("schedule", "likelihood_weight", "stiffness", "enough")} == {"auto"}
        assert engine.kronecker_sum is ncl.SumRule.ADDITIVE
    for relative in (DiagonalNCL(), OWM(), LaplaceOWM(), PlainTraining(), EWC(), ncl.LaplaceNCL(**PAPER)):
        assert {name: getattr(relative, name) for name in PAPER} == PAPER


@pytest.mark.parametrize(
    ("likelihood", "values"),
    [
        (dist.Categorical(torch.ones(5, 3)), 3),
        (dist.Categorical(logits=torch.tensor([1.0, -math.inf, 3.0, 2.0]).expand(5, 4)), 3),
        (dist.Bernoulli(torch.full((5, 2), 0.5)).to_event(1), 2**2),
        (dist.Bernoulli(torch.tensor(0.5)).expand([5, 2]).to_event(1), 2**2),
        (dist.OneHotCategorical(torch.ones(5, 3)), 3),
        (dist.Binomial(4, torch.full((5,), 0.3)), 5),
        (dist.Categorical(torch.ones(3)).expand([5]).mask(torch.ones(5, dtype=torch.bool)), 3),
        (dist.Normal(torch.zeros(5, 2), 1.0).to_event(1), None),
        (dist.Poisson(torch.ones(5)), None),
    ],
)
def test_classes_can_be_certain_and_what_has_noise_of_its_own_cannot(likelihood: Any, values: int | None) -> None:
    with pyro.poutine.trace() as trace:
        pyro.sample("y", likelihood.to_event(0), obs=likelihood.sample())
    site = trace.trace.nodes["y"]
    observed = Observed("y", site["fn"], site["value"], None, 1.0, ())
    assert can_be_certain({"y": observed}) is (values is not None)
    assert guess_loss({"y": observed}) == pytest.approx(5 * math.log(values) if values else 0.0)
    half = Observed("y", site["fn"], site["value"], torch.tensor([True, True, False, False, False]), 3.0, ())
    assert guess_loss({"y": half}) == pytest.approx(2 * 3 * math.log(values) if values else 0.0)


@pytest.mark.parametrize("engine", [ncl.LaplaceNCL, ncl.VariationalNCL])
def test_a_task_that_is_known_already_is_soon_learnt(engine: Any) -> None:
    posterior = ncl.OnlinePosterior(classifier(), engine(steps=400, batch_size=40, lr=0.1))
    first = posterior.update(separable(), progress=False)
    again = posterior.update(separable(), progress=False)
    assert again.losses[0] < 0.1 * first.losses[0]
    assert again.steps == 6 + 5 < first.steps
    assert again.stiffness == 200.0


def test_noise_is_not_counted_as_classes_are() -> None:
    model, task = regression(noise=1.0)
    report = ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=3)).update(task, progress=False)
    assert report.likelihood_weight == 3.0


@pytest.mark.parametrize(
    ("examples", "size", "draws"), [(30, None, 30), (300, None, 10), (4000, None, 1), (4000, 600, 5)]
)
def test_few_examples_have_more_targets_drawn(examples: int, size: int | None, draws: int) -> None:
    settings: dict[str, Any] = {"weights": 10, "examples": examples, "certain": True}
    assert ncl.LaplaceNCL(fisher_size=size).settled(**settings).fisher_samples == draws
    assert ncl.LaplaceNCL(fisher_size=size, fisher_samples=2).settled(**settings).fisher_samples == 2
    assert ncl.VariationalNCL(fisher_samples="auto").settled(**settings).fisher_samples == 1


def test_the_report_says_what_was_decided_and_why() -> None:
    posterior = ncl.OnlinePosterior(classifier(prior=100.0), ncl.LaplaceNCL(steps=1000, batch_size=40, lr=0.1))
    first = posterior.update(separable(), progress=False)
    assert first.decisions == {
        "steps": f"{first.steps} of 1000, as 97% of the deviance was gone",
        "stiffness": "not needed: there was nothing to hold on to",
        "likelihood_weight": f"{10 * WEIGHTS / 40:.3g}: {WEIGHTS} weights, more than the 40 examples",
        "fisher_samples": "30, of 40 examples",
        "lr": "0.1",
    }
    x = separable(1).train[0]
    other = ncl.Task((x, (x[:, 0] < 0).long()), name="the other way round")
    second = posterior.update(other, progress=False, engine=ncl.VariationalNCL(steps=20))
    assert second.decisions["likelihood_weight"] == f"{first.likelihood_weight:.3g}: as for the first task"
    assert second.decisions["steps"] == "20 of 20: less of the deviance went"
    assert (
        second.decisions["stiffness"]
        == f"{second.stiffness:g}, {round(math.log2(200 / second.stiffness))} times halved"
    )
    assert not posterior.update(separable(2), progress=False, engine=laplace(steps=3)).decisions


def test_the_bar_shows_how_firmly_earlier_tasks_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []
    monkeypatch.setattr(ProgressBar, "advance", lambda self, **facts: shown.append(facts))
    posterior = ncl.OnlinePosterior(classifier(), ncl.LaplaceNCL(steps=20))
    posterior.update(classification_task(), progress=True)
    assert all(facts.keys() == {"loss"} for facts in shown)
    shown.clear()
    posterior.update(classification_task(2), progress=True)
    assert [facts["stiffness"] for facts in shown[:7]] == [*["200"] * 5, "100", "100"]


def test_softening_is_judged_from_the_least_loss_whatever_else_ends_a_task() -> None:
    """Of a regression whose losses are far from 0, with and without an end."""
    stiffness = []
    for enough in (None, 1 - 1e-9):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 1))
        model = ncl.BayesianNetwork(net, ncl.Normal(1e4), prior=ncl.priors.scaled(1.0))
        posterior = ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=100, enough=enough))
        x = 1e4 * torch.randn(50, 3)
        for k in range(2):
            report = posterior.update(ncl.Task((x, x[:, k : k + 1]), name=f"slope {k}"), progress=False)
        stiffness.append(report.stiffness)
    assert stiffness[0] == stiffness[1]


@pytest.mark.parametrize("engine", [ncl.LaplaceNCL, ncl.VariationalNCL])
def test_a_recurrent_network_that_explodes_with_constant_steps_is_learnt(engine: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core, self.out = ncl.nn.RNN(2, 8), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> Any:
            return self.out(self.core(x))

    torch.manual_seed(0)
    model = ncl.BayesianNetwork(Net(), ncl.Normal(0.1))
    x = torch.randn(40, 30, 2, generator=torch.Generator().manual_seed(1))
    task = ncl.Task((x, x[..., :1]), name="first of two")
    report = ncl.OnlinePosterior(model, engine(steps=100, batch_size=20, lr=1.0)).update(task, progress=False)
    assert report.lr < 1.0
    assert sum(report.losses[-10:]) < sum(report.losses[:10]) / 2
