"""A posterior of a few weights, and files that are made to differ from it under a right seal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn

import nclbayes as ncl
import nclbayes.methods  # so that its engines are known
from nclbayes.storage import read_file, write_file

Parts = tuple[dict[str, Tensor], dict[str, Any]]
OLD = Path(__file__).parent / "files"
"""Files of formats 1 and 2: posteriors of :func:`model` after two tasks."""


class Gained(nn.Module):
    """A linear map, which has a Kronecker block, and a gain, which has a diagonal one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.linear(x)


def model() -> ncl.BayesianNetwork:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ncl.BayesianNetwork(Gained(), ncl.Categorical(), prior=dist.Normal(0.0, 1.0))


def task(k: int = 0) -> ncl.Task:
    x = torch.randn(12, 2, generator=torch.Generator().manual_seed(5))
    return ncl.Task((x, ((x[:, 0] > 0).long() + k) % 2), name=f"task {k}")


def posterior(engine: ncl.Engine | None = None, initial: dict[str, Tensor] | None = None) -> ncl.OnlinePosterior:
    learnt = ncl.OnlinePosterior(model(), engine or ncl.LaplaceNCL(steps=5, batch_size=4), initial=initial)
    learnt.update(task(), progress=False)
    return learnt


def rewrite(path: Path, kind: str, change: Callable[[dict[str, Tensor], dict[str, Any]], Any]) -> None:
    """Change what a file holds, and seal it anew."""
    tensors, settings = read_file(path, kind)
    made = change(tensors, settings)
    tensors, settings = (tensors, settings) if made is None else made
    write_file(path, kind, tensors, settings)


def digest(learner: ncl.OnlinePosterior) -> list[object]:
    """Everything that a posterior's file says, to compare."""
    found: list[object] = [learner.tasks, learner.engine, learner.log_evidence, sorted(learner.memory)]
    for name, state in learner.blocks.items():
        found += [name, state.block, state.log_scale, {k: t.tolist() for k, t in state.tensors().items()}]
    return [*found, learner.generator.get_state().tolist(), {k: t.tolist() for k, t in learner.memory.items()}]
