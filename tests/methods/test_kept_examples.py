"""Replay and coresets: what is kept, what is learnt from it, and that files hold it."""

from __future__ import annotations

from pathlib import Path

import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import nclbayes as ncl
from nclbayes.errors import DataError, SettingError
from nclbayes.methods import METHODS, CoresetLearner, DiagonalNCL, PlainTraining, ReplayLearner
from nclbayes.methods.examples import split_examples
from nclbayes.methods.replay import ReplayTask
from nclbayes.posterior.belief import Belief
from tests.engines.test_laplace import classification_task, classifier, conjugate, regression_task
from tests.methods.test_plain_and_joint import head_tasks, heads


def test_batches_are_of_the_new_task_one_time_in_k() -> None:
    tasks = head_tasks()
    replay = ReplayTask(tasks[2], tasks[:2])
    batches = replay.batches(10, torch.Generator().manual_seed(0))
    counts = torch.bincount(torch.tensor([next(batches)[0] for _ in range(3000)]), minlength=3) / 3000
    torch.testing.assert_close(counts, torch.full((3,), 1 / 3), rtol=0, atol=0.03)
    assert replay.size == 200
    assert {batch[0] for batch in replay.epoch(50)} == {0}


@pytest.mark.parametrize("method", ["replay", "laplace-ncl-replay", "variational-ncl-replay"])
def test_replay_keeps_every_head(method: str, tmp_path: Path) -> None:
    tasks = head_tasks()
    settings = {"steps": 400, "batch_size": 30, "lr": 0.05, "keep": 60}
    learner = METHODS[method].build(heads(), settings, torch.Generator().manual_seed(0))
    for task in tasks[:2]:
        learner.update(task)
    learner.save(tmp_path / "learner")
    learner = METHODS[method].learner.load(tmp_path / "learner", heads())
    assert isinstance(learner, ReplayLearner)
    assert learner.keep == 60
    assert [task.context for task in learner.kept] == [{"head": 0}, {"head": 1}]
    learner.update(tasks[2])
    assert [len(task.train[0]) for task in learner.kept] == [60, 60, 60]
    assert min(score.accuracy for score in ncl.evaluate(learner, tasks)) > 0.8


def test_a_coreset_is_counted_once() -> None:
    """For a linear model with Gaussian noise the refined posterior is exactly that of all the data."""
    tasks = [regression_task(seed) for seed in range(2)]
    model = ncl.BayesianNetwork(nn.Linear(3, 1), ncl.Normal(0.5), prior=dist.Normal(0.0, 2.0))
    engine = ncl.LaplaceNCL(steps=1500, batch_size=40, lr=0.2, fisher="exact", schedule=lambda done: 1 - done)
    learner = CoresetLearner(model, engine, keep=10)
    for task in tasks:
        learner.update(task)
    rest, whole = [], conjugate(tasks, 0.5, 2.0)
    for kept, task in zip(learner.kept, tasks, strict=True):
        left = [i for i in range(40) if not (task.train[0][i] == kept.train[0]).all(-1).any()]
        assert len(left) == 30
        rest.append(ncl.Task((task.train[0][left], task.train[1][left]), name="rest"))
    mean, precision = conjugate(rest, 0.5, 2.0)
    (state,) = learner.blocks.values()
    torch.testing.assert_close(state.loc.double(), mean.T, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(state.precision.dense(), precision, rtol=1e-4, atol=1e-4)
    (refined,) = learner.refined().blocks.values()
    torch.testing.assert_close(refined.precision.dense(), whole[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(refined.loc.double(), whole[0].T, rtol=2e-2, atol=1e-2)
    x = torch.ones(1, 3)
    torch.testing.assert_close(learner.predict(x).mean, learner.refined().predict(x).mean)
    assert not torch.allclose(learner.predict(x).mean, ncl.OnlinePosterior.predict(learner, x).mean, atol=1e-6)


def test_a_coreset_counts_each_task_by_its_size() -> None:
    tasks = [ncl.Task(regression_task(0).train, name="a", size=400), regression_task(1)]
    model = ncl.BayesianNetwork(nn.Linear(3, 1), ncl.Normal(0.5), prior=dist.Normal(0.0, 2.0))
    learner = CoresetLearner(model, ncl.LaplaceNCL(steps=5, batch_size=40, fisher="exact"), keep=10)
    for task in tasks:
        learner.update(task)
    assert [task.size for task in learner.kept] == [100, 10]
    added = torch.zeros(4, 4, dtype=torch.float64)
    for task in learner.kept:
        z = nn.functional.pad(task.train[0].double(), (0, 1), value=1.0)
        added += task.size / 10 * z.T @ z / 0.25
    (before,), (after,) = learner.blocks.values(), learner.refined().blocks.values()
    torch.testing.assert_close(after.precision.dense() - before.precision.dense(), added, rtol=1e-4, atol=1e-4)


def test_a_coreset_is_learnt_by_the_engine_of_the_last_update(tmp_path: Path) -> None:
    learner = CoresetLearner(classifier(), ncl.LaplaceNCL(steps=5), keep=5)
    learner.update(classification_task(0), engine=DiagonalNCL(steps=5))
    expected = learner.predict(torch.zeros(1, 5)).probs
    assert expected.shape == (1, 3)
    learner.save(tmp_path / "learner.ncl")
    again = CoresetLearner.load(tmp_path / "learner.ncl", learner.model)
    assert torch.equal(again.predict(torch.zeros(1, 5)).probs, expected)


def test_the_fisher_of_variational_replay_weighs_tasks_as_its_gradient_does() -> None:
    """Old and new inputs are orthogonal; each gets half of N / sigma^2, however few examples are kept."""
    model = ncl.BayesianNetwork(nn.Linear(2, 1, bias=False), ncl.Normal(0.5), prior=dist.Normal(0.0, 1.0))
    engine = ncl.VariationalNCL(steps=600, batch_size=64, lr=0.001, beta=0.005)
    learner = ReplayLearner(model, engine, keep=4)
    for k in range(2):
        x = torch.zeros(64, 2)
        x[:, k] = 1.0
        before = [state.precision.dense() for state in learner.blocks.values()]
        learner.update(ncl.Task((x, torch.zeros(64, 1)), name=str(k)))
    (state,) = learner.blocks.values()
    added = (state.precision.dense() - before[0]).diagonal() / (64 / 0.25)
    torch.testing.assert_close(added, torch.full((2,), 0.5, dtype=torch.float64), rtol=0, atol=0.1)
    assert learner.log_evidence is None


def test_replay_that_is_interrupted_at_the_last_moment_has_not_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = ReplayLearner(classifier(), PlainTraining(steps=3), keep=4)
    learner.update(classification_task(0))

    def stop(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Belief, "after", stop)
        with pytest.raises(KeyboardInterrupt):
            learner.update(classification_task(1))
    assert len(learner.tasks) == len(learner.kept) == 1
    learner.update(classification_task(1))
    assert len(learner.kept) == 2


@pytest.mark.parametrize("learner", [ReplayLearner, CoresetLearner])
def test_examples_that_cannot_be_kept_are_refused_before_the_update(learner: type[ReplayLearner]) -> None:
    (task,) = head_tasks()[:1]
    odd = ncl.Task(task.train, name="odd", context={"head": torch.tensor(0)})
    posterior = learner(heads(), PlainTraining(steps=2), keep=5)
    with pytest.raises(DataError, match="context of task 'odd' cannot be kept"):
        posterior.update(odd)
    assert posterior.tasks == ()


def test_tasks_that_cannot_be_split_are_refused() -> None:
    task = classification_task(examples=20)
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(DataError, match="too few to set 20 apart"):
        split_examples(task, 20, generator)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*task.train), batch_size=5)
    with pytest.raises(DataError, match="comes from a loader"):
        split_examples(ncl.Task(loader, name="loader"), 5, generator)
    with pytest.raises(SettingError, match="keep must be a whole number of at least 1"):
        ReplayLearner(classifier(), PlainTraining(), keep=0)


@pytest.mark.parametrize("size", [20, 400])
def test_a_coreset_of_a_task_that_counts_as_more_or_fewer_examples_than_it_has(size: int) -> None:
    x = torch.arange(40.0).unsqueeze(-1)
    kept, rest = split_examples(ncl.Task((x, x), name="t", size=size), 10, torch.Generator().manual_seed(0))
    assert sorted(torch.cat([kept.train[0], rest.train[0]]).flatten().tolist()) == x.flatten().tolist()
    assert (kept.size, rest.size) == (size // 4, size * 3 // 4)


def test_a_coreset_of_a_data_set_that_augments_leaves_the_global_generator_alone() -> None:
    class Augmented(Dataset[tuple[torch.Tensor, torch.Tensor]]):
        def __len__(self) -> int:
            return 30

        def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.tensor([float(i)]) + torch.randn(1), torch.tensor([float(i)])

    task, before = ncl.Task(Augmented(), name="t"), torch.get_rng_state()
    kept, rest = split_examples(task, 5, torch.Generator().manual_seed(0))
    again, _ = split_examples(task, 5, torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(kept.train[0], again.train[0])
    first, second = (next(iter(rest.epoch(25, torch.Generator().manual_seed(s))))[0] for s in (1, 2))
    assert not torch.equal(first, second)  # still augmented anew each time
