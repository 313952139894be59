"""A checkpoint is taken up by the same model only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.errors import FileError
from nclbayes.methods import PlainTraining
from nclbayes.storage import read_file


class Stop(Exception):
    """What ends the first try."""


def posterior(
    scale: float = 0.5, activation: Callable[[], nn.Module] = nn.Tanh, frozen: float = 0.3, offset: float = 0.0
) -> ncl.OnlinePosterior:
    net = nn.Sequential(nn.Linear(2, 4), activation(), nn.Linear(4, 3), nn.Linear(3, 1))
    with torch.no_grad():
        for k, p in enumerate(net.parameters()):
            p.copy_(torch.arange(p.numel()).add(k).sin().reshape(p.shape))
        net[2].weight.fill_(frozen).requires_grad_(False)
        net[2].bias.fill_(offset).requires_grad_(False)
    model = ncl.BayesianNetwork(net, ncl.Normal(scale), prior=dist.Normal(0.0, 1.0))
    return ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=6, batch_size=5, lr=0.01))


def task(**context: object) -> ncl.Task:
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    return ncl.Task((x, x.sum(-1, keepdim=True)), name="sum", context=context)


def stopped(path: Path, learner: ncl.OnlinePosterior | None = None, **context: object) -> None:
    """Leave a snapshot of four steps."""

    def stop(progress: ncl.engines.Progress) -> None:
        if progress.step == 5:
            raise Stop

    with pytest.raises(Stop):
        (learner or posterior()).update(
            task(**context), checkpoint=path, checkpoint_every=2, callbacks=[stop], progress=False
        )
    assert path.exists()


@pytest.mark.parametrize(
    "other",
    [{"scale": 0.4}, {"activation": nn.ReLU}, {"frozen": 0.35}, {"offset": 1e-6}],
    ids=lambda other: next(iter(other)),
)
def test_another_model_does_not_take_up_a_checkpoint(tmp_path: Path, other: dict[str, object]) -> None:
    stopped(tmp_path / "update.ckpt")
    with pytest.raises(FileError, match="another"):
        posterior(**other).update(task(), checkpoint=tmp_path / "update.ckpt", progress=False)  # type: ignore[arg-type]


def test_the_same_model_does(tmp_path: Path) -> None:
    stopped(tmp_path / "update.ckpt")
    again, whole = posterior(), posterior()
    steps: list[int] = []
    again.update(
        task(), checkpoint=tmp_path / "update.ckpt", callbacks=[lambda p: steps.append(p.step)], progress=False
    )
    whole.update(task(), progress=False)
    assert steps == [5, 6]
    assert all(torch.equal(value, whole.mean()[site]) for site, value in again.mean().items())


class Added(nn.Linear):
    """A network that is told more than it needs."""

    def forward(self, x: Tensor, more: object) -> Tensor:
        return super().forward(x)


def told() -> ncl.OnlinePosterior:
    torch.manual_seed(0)
    model = ncl.BayesianNetwork(Added(2, 1), ncl.Normal(0.5), prior=dist.Normal(0.0, 1.0))
    return ncl.OnlinePosterior(model, ncl.LaplaceNCL(steps=6, batch_size=5, lr=0.01))


def test_an_object_of_the_context_may_lie_elsewhere(tmp_path: Path) -> None:
    path, objects = tmp_path / "update.ckpt", [object(), object()]
    stopped(path, told(), more={"first": objects[0], "values": (1, "a")})
    with pytest.raises(FileError, match="another update"):
        told().update(task(more={"first": objects[1], "values": (2, "a")}), checkpoint=path, progress=False)
    told().update(task(more={"first": objects[1], "values": (1, "a")}), checkpoint=path, progress=False)


def test_every_number_of_a_tensor_of_the_context_counts(tmp_path: Path) -> None:
    path, more = tmp_path / "update.ckpt", torch.zeros(5000)
    stopped(path, told(), more=[more])
    other = more.clone()
    other[2500] = 1.0
    assert repr(more) == repr(other)
    with pytest.raises(FileError, match="another update"):
        told().update(task(more=[other]), checkpoint=path, progress=False)
    told().update(task(more=[more.clone()]), checkpoint=path, progress=False)


def test_a_snapshot_of_a_model_of_many_outputs_holds_few_of_their_numbers(tmp_path: Path) -> None:
    def learner(outputs: Callable[[], nn.Module] = nn.Identity) -> ncl.OnlinePosterior:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 300), outputs())
        model = ncl.BayesianNetwork(net, ncl.Normal(0.5), prior=dist.Normal(0.0, 1.0))
        return ncl.OnlinePosterior(model, PlainTraining(steps=6, batch_size=5))

    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    wide = ncl.Task((x, x.repeat(1, 150)), name="wide")

    def stop(progress: ncl.engines.Progress) -> None:
        if progress.step == 5:
            raise Stop

    path = tmp_path / "update.ckpt"
    with pytest.raises(Stop):
        learner().update(wide, checkpoint=path, checkpoint_every=2, callbacks=[stop], progress=False)
    tensors, _ = read_file(path, "checkpoint")
    assert tensors["probe.0.y.loc"].shape == (1000,)
    with pytest.raises(FileError, match="another model"):
        learner(nn.ReLU).update(wide, checkpoint=path, progress=False)
    learner().update(wide, checkpoint=path, progress=False)
