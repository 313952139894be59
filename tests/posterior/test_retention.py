"""`retention`: what earlier tasks left fades towards the prior before the next one, in the blocks that it touches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.data.mixture import TaskMixture
from nclbayes.engines import Engine
from nclbayes.errors import FileError, SettingError
from nclbayes.gaussians import DiagonalState, KroneckerState, State
from nclbayes.methods import (
    DOWM,
    EWC,
    GPM,
    KFAC,
    OWM,
    VCL,
    CoresetLearner,
    DiagonalNCL,
    LaplaceOWM,
    PlainTraining,
    SynapticIntelligence,
)
from nclbayes.posterior.belief import Belief
from nclbayes.storage import read_file, write_file
from tests.engines.test_laplace import classification_task, classifier, conjugate, regression_task
from tests.methods.test_plain_and_joint import heads

NCL = [ncl.LaplaceNCL(steps=15, batch_size=20), ncl.VariationalNCL(steps=15, batch_size=20, beta=0.3)]
DIAGONAL = [EWC(steps=15, batch_size=20), DiagonalNCL(steps=15, batch_size=20), VCL(steps=15, batch_size=20)]
FADING = [*NCL, KFAC(steps=15, batch_size=20), LaplaceOWM(steps=15, batch_size=20), *DIAGONAL]


def name_of(engine: object) -> str:
    return type(engine).__name__ if isinstance(engine, Engine) else str(engine)


def learnt(engine: Engine, tasks: int = 1) -> ncl.OnlinePosterior:
    posterior = ncl.OnlinePosterior(classifier(), engine, generator=torch.Generator().manual_seed(3))
    for k in range(tasks):
        posterior.update(classification_task(k))
    return posterior


def prior_of(engine: Engine) -> dict[str, State]:
    """The blocks before any task."""
    return dict(ncl.OnlinePosterior(classifier(), engine, example=classification_task(0)).blocks)


def tensors(posterior: ncl.OnlinePosterior) -> dict[str, Tensor]:
    found = {f"{n}/{part}": t for n, state in posterior.blocks.items() for part, t in state.tensors().items()}
    return found | {"generator": posterior.generator.get_state()}


def same(first: ncl.OnlinePosterior, second: ncl.OnlinePosterior) -> bool:
    a, b = tensors(first), tensors(second)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("engine", FADING, ids=name_of)
def test_a_task_is_learnt_from_the_faded_gaussian(engine: Engine) -> None:
    """Bit for bit as if the posterior had been replaced by a faded one, and nothing faded in the update."""
    posterior, by_hand, prior = learnt(engine), learnt(engine), prior_of(engine)
    faded = {name: state.faded(prior[name], 0.8) for name, state in by_hand.blocks.items()}
    assert all(torch.equal(faded[name].loc, state.loc) for name, state in posterior.blocks.items())
    by_hand._belief = replace(by_hand._belief, states=faded)
    report = posterior.update(classification_task(7), engine=replace(engine, retention=0.8))
    other = by_hand.update(classification_task(7))
    assert same(posterior, by_hand)
    assert report.losses == other.losses
    assert report.log_evidence == other.log_evidence


@pytest.mark.parametrize("engine", FADING, ids=name_of)
def test_a_retention_of_one_changes_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (KroneckerState, DiagonalState):
        monkeypatch.setattr(kind, "faded", lambda *_: pytest.fail("nothing must fade"))
    posterior = learnt(engine)
    posterior.update(classification_task(7))
    assert len(posterior.tasks) == 2


@pytest.mark.parametrize("engine", FADING, ids=name_of)
def test_a_first_task_has_nothing_that_could_fade(engine: Engine) -> None:
    assert same(learnt(engine), learnt(replace(engine, retention=0.5)))


def test_a_linear_gaussian_posterior_is_that_of_the_faded_precision() -> None:
    """With one output Kronecker products add exactly: mean and precision are those of the normal equations."""
    tasks, r = [regression_task(seed) for seed in range(3)], 0.6
    model = ncl.BayesianNetwork(nn.Linear(3, 1), ncl.Normal(0.5), prior=dist.Normal(0.0, 2.0))
    settings: dict[str, Any] = {"steps": 400, "batch_size": 40, "fisher": "exact", "retention": r}
    posterior = ncl.OnlinePosterior(model, ncl.LaplaceNCL(lr=0.1, **settings))
    prior = torch.eye(4, dtype=torch.float64) / 4
    precision, mean = prior, torch.zeros(4, 1, dtype=torch.float64)
    for k, task in enumerate(tasks):
        posterior.update(task, engine=ncl.LaplaceNCL(lr=0.4 if k else 0.1, **settings))
        before = r * precision + (1 - r) * prior if k else prior
        alone, own = conjugate([task], 0.5, 2.0)
        fisher = own - prior
        precision = before + fisher
        mean = torch.linalg.solve(precision, before @ mean + own @ alone)
        (state,) = posterior.blocks.values()
        torch.testing.assert_close(state.precision.dense(), precision, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(state.loc.double(), mean.T, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("engine", NCL, ids=name_of)
def test_with_next_to_no_retention_a_task_starts_at_the_prior(engine: Engine) -> None:
    """Where the mean is, it is held as loosely as before any task."""
    posterior, prior = learnt(engine, tasks=2), prior_of(engine)
    for name, state in posterior.blocks.items():
        faded = state.faded(prior[name], 1e-12)
        torch.testing.assert_close(faded.precision.dense(), prior[name].precision.dense(), rtol=1e-6, atol=1e-6)
        assert torch.equal(faded.loc, state.loc)


def test_diagonal_precisions_fade_exactly() -> None:
    posterior = learnt(DiagonalNCL(steps=15, batch_size=20))
    for name, prior in prior_of(posterior.engine).items():
        state = posterior.blocks[name]
        expected = 0.9 * state.precision + 0.1 * prior.precision
        torch.testing.assert_close(state.faded(prior, 0.9).precision, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("engine", [*NCL, EWC(steps=15, batch_size=20)], ids=name_of)
def test_a_block_that_a_task_does_not_touch_does_not_fade(engine: Engine) -> None:
    posterior = ncl.OnlinePosterior(heads(), replace(engine, retention=0.5))
    tasks = [replace_context(classification_task(k), k) for k in range(2)]
    posterior.update(tasks[0])
    before = dict(posterior.blocks)
    posterior.update(tasks[1])
    untouched = [name for name, state in before.items() if posterior.blocks[name] is state]
    assert untouched
    assert len(untouched) < len(before)


def replace_context(task: ncl.Task, head: int) -> ncl.Task:
    return ncl.Task(task.train, name=task.name, context={"head": head})


def test_a_block_of_several_parts_fades_once() -> None:
    engine = ncl.LaplaceNCL(steps=15, batch_size=20)
    posterior, by_hand, prior = learnt(engine), learnt(engine), prior_of(engine)
    mixture = TaskMixture([classification_task(k) for k in (4, 5)], name="both")
    faded = {name: state.faded(prior[name], 0.5) for name, state in by_hand.blocks.items()}
    by_hand._belief = replace(by_hand._belief, states=faded)
    posterior.update(mixture, engine=replace(engine, retention=0.5))
    by_hand.update(mixture)
    assert same(posterior, by_hand)


def test_a_coreset_lets_nothing_fade() -> None:
    """Its examples are of the tasks that the posterior knows already."""

    def refined(retention: float) -> Belief:
        engine = ncl.LaplaceNCL(steps=15, batch_size=20, retention=retention)
        learner = CoresetLearner(classifier(), engine, keep=5, generator=torch.Generator().manual_seed(0))
        learner.update(classification_task(0))
        return learner.refined()._belief

    first, second = refined(1.0), refined(0.5)
    for name, state in first.states.items():
        assert state.fingerprint() == second.states[name].fingerprint()


class Stop(Exception):
    pass


@pytest.mark.parametrize("engine", NCL, ids=name_of)
def test_an_interrupted_update_fades_once_and_ends_bit_for_bit(engine: Engine, tmp_path: Path) -> None:
    engine = replace(engine, retention=0.8)

    def stop(progress: ncl.engines.Progress) -> None:
        if progress.step == 11:
            raise Stop

    whole, stopped = learnt(engine, tasks=2), learnt(engine, tasks=2)
    whole.update(classification_task(7))
    with pytest.raises(Stop):
        stopped.update(classification_task(7), checkpoint=tmp_path / "c", checkpoint_every=5, callbacks=[stop])
    with pytest.raises(FileError, match="checkpoint of another update"):
        stopped.update(classification_task(7), engine=replace(engine, retention=0.7), checkpoint=tmp_path / "c")
    report = stopped.update(classification_task(7), checkpoint=tmp_path / "c")
    assert report.steps == 15
    assert same(whole, stopped)


def test_files_keep_it_and_those_of_older_versions_have_none(tmp_path: Path) -> None:
    posterior = learnt(ncl.LaplaceNCL(steps=5, batch_size=20, retention=0.9))
    posterior.save(tmp_path / "new")
    assert ncl.OnlinePosterior.load(tmp_path / "new", classifier()).engine.retention == 0.9
    held, settings = read_file(tmp_path / "new", "posterior")
    del settings["engine"]["retention"]
    write_file(tmp_path / "old", "posterior", held, settings)
    old = ncl.OnlinePosterior.load(tmp_path / "old", classifier())
    assert old.engine.retention == 1
    assert same(old, posterior)


@pytest.mark.parametrize("engine", [PlainTraining, GPM, OWM, DOWM, SynapticIntelligence])
def test_engines_that_have_no_precision_to_fade_say_so(engine: type[Engine]) -> None:
    with pytest.raises(SettingError, match=f"{engine.__name__} does not let earlier tasks fade: leave retention at 1"):
        engine(retention=0.9)
    assert engine(retention=1.0).retention == 1


@pytest.mark.parametrize("value", [0, -0.5, 1.01, float("nan"), "0.9"])
def test_it_lies_above_zero_and_at_most_at_one(value: Any) -> None:
    range_ = "finite" if value != value else "above 0 and at most 1"
    with pytest.raises(SettingError, match=f"retention must be {range_}"):
        ncl.LaplaceNCL(retention=value)
