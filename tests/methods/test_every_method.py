"""What every method must do: learn heads and sequences, be saved, go on from a checkpoint, and repeat itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.errors import SettingError
from nclbayes.methods import EWC, METHODS
from tests.engines.test_laplace import classification_task, classifier
from tests.methods.test_kept_examples import head_tasks
from tests.methods.test_plain_and_joint import heads


def build(name: str, model: ncl.BayesianNetwork, **settings: Any) -> ncl.OnlinePosterior:
    method = METHODS[name]
    kept = {"keep": 12} if method.learner.learner_settings else {}
    return method.build(model, {"steps": 12, "batch_size": 20, **kept, **settings}, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", METHODS)
def test_it_learns_heads_and_goes_on_after_a_file(name: str, tmp_path: Path) -> None:
    tasks = head_tasks()
    whole = build(name, heads())
    for task in tasks[:2]:
        whole.update(task)
    whole.save(tmp_path / "learner")
    loaded = METHODS[name].learner.load(tmp_path / "learner", heads())
    if hasattr(loaded, "remember"):
        loaded.remember(tasks[:2])
    for learner in (whole, loaded):
        learner.update(tasks[2])
    assert loaded.tasks == ("t0", "t1", "t2")
    assert type(loaded.engine) is type(whole.engine)
    for site, value in whole.mean().items():
        assert torch.equal(value, loaded.mean()[site]), site
    assert whole.predict(torch.zeros(2, 5), head=1).logits.shape == (2, 3)
    assert name not in ("none", "gpm") or whole.kl(loaded) == 0.0


@pytest.mark.parametrize("name", METHODS)
def test_an_interrupted_update_ends_as_the_uninterrupted_one(name: str, tmp_path: Path) -> None:
    def stop(progress: Any) -> None:
        if progress.step == 7:
            raise KeyboardInterrupt

    first, second = classification_task(1), classification_task(7)
    whole, parts = build(name, classifier()), build(name, classifier())
    for learner in (whole, parts):
        learner.update(first)
    whole.update(second)
    with pytest.raises(KeyboardInterrupt):
        parts.update(second, checkpoint=tmp_path / "c", checkpoint_every=5, callbacks=[stop])
    # as in a new process: the posterior's own generator is where it was before the update
    again = build(name, classifier())
    again.update(first)
    again.update(second, checkpoint=tmp_path / "c", checkpoint_every=5)
    for site, value in whole.mean().items():
        assert torch.equal(value, again.mean()[site]), site


@pytest.mark.parametrize("name", METHODS)
def test_it_learns_sequences(name: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core, self.out = ncl.nn.RNN(3, 6, leak=0.5), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.core(x))

    torch.manual_seed(0)
    model = ncl.BayesianNetwork(Net(), ncl.Normal(1.0), prior=dist.Normal(0.0, 0.3))
    g = torch.Generator().manual_seed(0)
    learner = build(name, model, lr=0.01)
    before = None
    for k in range(2):
        x = torch.randn(40, 7, 3, generator=g)
        learner.update(ncl.Task((x, x.cumsum(1)[..., :2] / 3), name=str(k)))
        mean = learner.mean()
        assert before is None or any(not torch.equal(mean[site], before[site]) for site in mean)
        before = mean


def test_a_posterior_of_other_blocks_is_refused() -> None:
    posterior = ncl.OnlinePosterior(classifier(), ncl.LaplaceNCL(steps=2))
    posterior.update(classification_task())
    with pytest.raises(SettingError, match="needs diagonal blocks"):
        posterior.update(classification_task(), engine=EWC(steps=2))
    assert posterior.tasks == ("classes 1",)


@pytest.mark.parametrize("name", METHODS)
def test_it_learns_with_a_network_that_draws_noise(name: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core, self.drop, self.out = ncl.nn.RNN(3, 4, noise=0.1), nn.Dropout(0.2), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.drop(self.core(x)))

    torch.manual_seed(0)
    model = ncl.BayesianNetwork(Net(), ncl.Categorical(), prior=dist.Normal(0.0, 0.3))
    x = torch.randn(40, 6, 3, generator=torch.Generator().manual_seed(0))
    data = x, (x.cumsum(1)[..., 0] > 0).long()
    learner = build(name, model, lr=1e-3)
    for k in range(2):
        learner.update(ncl.Task(data, name=str(k)))
    assert learner.tasks == ("0", "1")
