"""Plain training against torch's own optimiser; joint training against data put together."""

from __future__ import annotations

from pathlib import Path

import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nclbayes as ncl
from nclbayes.errors import ModelError, NonFiniteError, SettingError
from nclbayes.methods import METHODS, JointLearner, PlainTraining, find_method
from tests.engines.test_laplace import classification_task, classifier, conjugate, regression_task


def test_plain_training_is_sgd_with_momentum() -> None:
    model, task = classifier(), classification_task()
    posterior = ncl.OnlinePosterior(model, PlainTraining(steps=20, batch_size=60, lr=0.1))
    report = posterior.update(task)
    net = model.network
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for loss in report.losses:
        x, y = task.train
        expected = F.cross_entropy(net(x), y)
        assert loss == pytest.approx(float(expected.detach()), rel=1e-4)
        sgd.zero_grad()
        expected.backward()
        sgd.step()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(posterior.mean()[name], parameter.detach(), rtol=1e-4, atol=1e-5)
    assert all(
        torch.equal(s.precision.input, torch.eye(len(s.precision.input)).double()) for s in posterior.blocks.values()
    )


def heads() -> ncl.BayesianNetwork:
    torch.manual_seed(0)
    net = ncl.MultiHead(nn.Sequential(nn.Linear(5, 16), nn.ReLU()), [nn.Linear(16, 3) for _ in range(3)])
    return ncl.BayesianNetwork(net, ncl.Categorical(), prior=dist.Normal(0.0, 1.0))


def head_tasks() -> list[ncl.Task]:
    tasks = []
    for k in range(3):
        g = torch.Generator().manual_seed(k)
        x = torch.randn(200, 5, generator=g)
        data = x, (x @ torch.randn(5, 3, generator=g)).argmax(-1)
        tasks.append(ncl.Task(data, data, name=f"t{k}", context={"head": k}))
    return tasks


def test_joint_training_keeps_every_task_and_every_head() -> None:
    tasks = head_tasks()
    accuracy = {}
    for name in ("joint", "none"):
        settings = {"steps": 400, "batch_size": 30, "lr": 0.1}
        learner = METHODS[name].build(heads(), settings, torch.Generator().manual_seed(0))
        for task in tasks:
            learner.update(task)
        assert learner.tasks == ("t0", "t1", "t2")
        accuracy[name] = [score.accuracy for score in ncl.evaluate(learner, tasks)]
    assert min(accuracy["joint"]) > 0.9
    assert accuracy["none"][0] < accuracy["joint"][0] - 0.1


@pytest.mark.parametrize("at", [1, 15])
def test_joint_training_stopped_and_taken_up_is_the_same(tmp_path: Path, at: int) -> None:
    tasks = [ncl.Task(classification_task(k).train, name=f"t{k}", context={"head": k}) for k in range(2)]
    whole, halves = (JointLearner(heads(), PlainTraining(steps=30, batch_size=20)) for _ in range(2))
    for learner in (whole, halves):
        learner.update(tasks[0])
    whole.update(tasks[1])

    class Stop(Exception):
        pass

    def stop(progress: ncl.engines.Progress) -> None:
        if progress.step == at + 1:
            raise Stop

    state = halves.generator.get_state()
    path = tmp_path / "c"
    with pytest.raises(Stop):
        halves.update(tasks[1], checkpoint=path, checkpoint_every=at, callbacks=[stop])
    halves.save(tmp_path / "p")
    again = JointLearner.load(tmp_path / "p", heads())
    assert isinstance(again, JointLearner)
    with pytest.raises(ModelError, match=r"learnt 1 tasks and holds the data of 0.*remember"):
        again.update(tasks[1])
    again.remember([tasks[0]])
    again.generator.set_state(state)
    again.update(tasks[1], checkpoint=path)
    assert again.tasks == ("t0", "t1")
    for site, value in whole.mean().items():
        assert torch.equal(value, again.mean()[site])


def test_joint_training_counts_each_task_once_whatever_the_engine() -> None:
    tasks = [regression_task(seed) for seed in range(2)]
    model = ncl.BayesianNetwork(nn.Linear(3, 1), ncl.Normal(0.5), prior=dist.Normal(0.0, 2.0))
    learner = JointLearner(model, ncl.LaplaceNCL(steps=50, batch_size=40, lr=0.05, fisher="exact"))
    for task in tasks:
        learner.update(task)
    (state,) = learner.blocks.values()
    torch.testing.assert_close(state.precision.dense(), conjugate(tasks, 0.5, 2.0)[1], rtol=1e-4, atol=1e-4)
    before = learner.mean()
    with pytest.raises(NonFiniteError):
        learner.update(ncl.Task((torch.full((4, 3), torch.inf), torch.zeros(4, 1)), name="torn"))
    assert len(learner.tasks) == 2
    assert [task.name for task in learner._seen] == list(learner.tasks)
    assert all(torch.equal(value, before[site]) for site, value in learner.mean().items())


def test_names_and_settings_are_suggested() -> None:
    with pytest.raises(SettingError, match=r"no method 'laplace-nlc' \(did you mean 'laplace-ncl'\?\)"):
        find_method("laplace-nlc")
    with pytest.raises(SettingError, match=r"none has no setting 'step' \(did you mean 'steps'\?\)"):
        METHODS["none"].build(classifier(), {"step": 3}, torch.Generator())
