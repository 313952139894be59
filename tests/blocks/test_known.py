"""Blocks that are known in another form than that in which a run shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.blocks import DiagonalBlock, KroneckerBlock

EXPERTS = 3


class Mixture(nn.Module):
    """A stack of experts of which each example meets one; its matrices are gathered by an index, or met in a loop."""

    def __init__(self, loop: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.loop = loop
        self.weight = nn.Parameter(0.5 * torch.randn(EXPERTS, 4, 6, generator=generator))
        self.offset = nn.Parameter(torch.zeros(EXPERTS, 6))
        self.out = nn.Parameter(0.5 * torch.randn(2, 6, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        choice = (x[:, 0] * EXPERTS).long()
        if self.loop:
            hidden = x.new_zeros(len(x), 6)
            for k in range(EXPERTS):
                here = (choice == k).nonzero().squeeze(-1)
                if len(here):
                    hidden = hidden.index_copy(0, here, x[here] @ self.weight[k] + self.offset[k])
        else:
            hidden = torch.einsum("bi,bij->bj", x, self.weight[choice]) + self.offset[choice]
        return nn.functional.linear(torch.tanh(hidden), self.out)


def model(loop: bool) -> ncl.BayesianNetwork:
    return ncl.BayesianNetwork(Mixture(loop), ncl.Categorical())


def task(name: str, seed: int) -> ncl.Task:
    """Sorted by expert, so that the first few examples show the first one alone."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.cat([torch.linspace(0, 0.999, 48).unsqueeze(1), torch.randn(48, 3, generator=generator)], dim=1)
    return ncl.Task((x, (x[:, 1] > 0).long()), name=name)


@pytest.mark.filterwarnings("ignore:Sites .* cannot vectorise:UserWarning")
@pytest.mark.parametrize(
    "engine", [ncl.LaplaceNCL(steps=8), ncl.VariationalNCL(steps=8)], ids=["laplace", "variational"]
)
def test_what_an_earlier_task_knew_as_diagonal_stays_so_and_goes_on(engine: Any, tmp_path: Path) -> None:
    shown = ncl.OnlinePosterior(model(loop=True), engine, example=task("first", 1))
    assert isinstance(shown.blocks["weight"].block, KroneckerBlock), "or this test asks nothing"
    first = ncl.OnlinePosterior(model(loop=False), engine)
    first.update(task("first", 1), progress=False)
    first.save(tmp_path / "posterior.ncl")
    found = []
    for loop in (False, True):
        posterior = ncl.OnlinePosterior.load(tmp_path / "posterior.ncl", model(loop))
        posterior.update(task("second", 2), progress=False)
        assert {name for name, state in posterior.blocks.items() if isinstance(state.block, DiagonalBlock)} == {
            "weight",
            "offset",
        }
        found.append(posterior)
    gathered, looped = found
    for site, value in gathered.mean().items():
        torch.testing.assert_close(looped.mean()[site], value, rtol=1e-3, atol=1e-4)
    for name, state in gathered.blocks.items():
        torch.testing.assert_close(looped.blocks[name].logdet, state.logdet, rtol=1e-3, atol=1e-3)
    assert not torch.equal(first.mean()["weight"], looped.mean()["weight"])
