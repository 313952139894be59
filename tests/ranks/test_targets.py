"""What is drawn for the examples of each rank: targets of its own outputs, and noise that no other rank has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.engines.base import Problem
from nclbayes.fisher.whole import WholeBatch
from nclbayes.isolation import drawing_from
from nclbayes.ranks import present
from nclbayes.storage import read_file, write_file
from nclbayes.watch import watch
from tests.ranks.cases import blobs, classifier, learner
from tests.ranks.group import failures, together

# Of each example another rate, so far from the others' that a draw tells whose it is.
RATES = torch.linspace(1, 2, 11).mul(1e6)


def counted(rates: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(1), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson(rates * w), obs=y)


def draw_all(rank: int, folder: Path) -> None:
    for count in (1, 3):
        problem: Any = SimpleNamespace(ranks=present(), accumulate=count)
        drawn = []
        for (rates, y), _, share in Problem.parts(problem, (RATES, torch.zeros(len(RATES)))):
            run = watch(counted, (rates, y), {"w": torch.ones(1)})
            with drawing_from(torch.Generator().manual_seed(0), rates.device):
                drawn.append(WholeBatch(run.observed, run, share).draw().values["y"] / rates)
        write_file(folder / f"{count}-{rank}", "ratios", {"ratios": torch.cat(drawn)}, {})


def test_outputs_that_are_gathered_get_targets_of_their_own(tmp_path: Path) -> None:
    assert together(2, draw_all, tmp_path) == [0, 0], failures(tmp_path)
    found = {}
    for count in (1, 3):
        each = [read_file(tmp_path / f"{count}-{rank}", "ratios")[0]["ratios"] for rank in range(2)]
        found[count] = torch.cat(each)
        # A standard deviation of a count is a thousandth of it; rates differ by five hundredths and more.
        assert float((found[count] - 1).abs().max()) < 0.01
    with drawing_from(torch.Generator().manual_seed(0), RATES.device):
        assert torch.equal(found[1], dist.Poisson(RATES).sample() / RATES)


class Noisy(nn.Module):
    """A network that keeps what its dropout lets through."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.masks = nn.Linear(5, 3), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand(x.shape) < 0.5
        self.masks.append(mask)
        return self.out(x * mask)


ENGINES = {"laplace": ncl.LaplaceNCL(steps=3, batch_size=20), "variational": ncl.VariationalNCL(steps=3, batch_size=20)}


def learn_all(rank: int, folder: Path) -> None:
    for name, engine in ENGINES.items():
        torch.manual_seed(0)
        net = Noisy()
        learner(engine, classifier(net)).update(ncl.Task(blobs(1, 20), name="a"), progress=False)
        masks = torch.stack([mask for mask in net.masks if len(mask) == 10])
        write_file(folder / f"{name}-{rank}", "masks", {"masks": masks}, {})


def test_each_rank_has_noise_of_its_own(tmp_path: Path) -> None:
    assert together(2, learn_all, tmp_path) == [0, 0], failures(tmp_path)
    for name in ENGINES:
        first, second = (read_file(tmp_path / f"{name}-{rank}", "masks")[0]["masks"] for rank in range(2))
        assert first.shape == second.shape
        assert len(first) >= 3
        assert not bool((first == second).flatten(1).all(1).any()), name
