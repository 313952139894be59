"""A checkpoint is taken up by the same model only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import nclbayes as ncl
from nclbayes.errors import FileError


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


def task() -> ncl.Task:
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    return ncl.Task((x, x.sum(-1, keepdim=True)), name="sum")


def stopped(path: Path) -> None:
    """Leave a snapshot of four steps."""

    def stop(progress: ncl.engines.Progress) -> None:
        if progress.step == 5:
            raise Stop

    with pytest.raises(Stop):
        posterior().update(task(), checkpoint=path, checkpoint_every=2, callbacks=[stop], progress=False)
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
