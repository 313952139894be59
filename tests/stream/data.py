"""Small streams whose changes are known, and networks that learn them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pyro import distributions as dist
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.stream import Changed

Batch = tuple[Tensor, Tensor]
LIKELIHOODS: dict[str, Callable[[], Any]] = {
    "normal": lambda: ncl.Normal(0.3),
    "poisson": ncl.Poisson,
    "bernoulli": ncl.Bernoulli,
    "categorical": ncl.Categorical,
}


def draws(kind: str, task: int, count: int, size: int = 16) -> list[Batch]:
    """Batches of a task: outputs around a function of the inputs that the task's number decides."""
    w = 1.5 * (-1) ** task * torch.randn(5, 2, generator=torch.Generator().manual_seed(100 + task // 2))
    g = torch.Generator().manual_seed(task)
    found = []
    for _ in range(count):
        x = torch.randn(size, 5, generator=g)
        f = torch.tanh(x @ w)
        if kind == "normal":
            y = f + 0.3 * torch.randn(size, 2, generator=g)
        elif kind == "poisson":
            y = torch.poisson(torch.exp(1.5 * f), generator=g)
        elif kind == "bernoulli":
            y = (torch.rand(size, 2, generator=g) < torch.sigmoid(5 * f)).float()
        else:
            y = (f[:, 0] + 0.3 * torch.randn(size, generator=g) > f[:, 1]).long()
        found.append((x, y))
    return found


def model(kind: str, seed: int = 0) -> ncl.BayesianNetwork:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 2))
    return ncl.BayesianNetwork(net, LIKELIHOODS[kind](), prior=dist.Normal(0.0, 1.0))


def stream(kind: str, engine: Any = None, **settings: Any) -> ncl.Stream:
    engine = ncl.LaplaceNCL(lr=0.01 if kind == "normal" else 0.03) if engine is None else engine
    posterior = ncl.OnlinePosterior(model(kind), engine)
    return ncl.Stream(posterior, **{"segment_size": 2000, **settings})


def changes(found: ncl.Stream) -> list[Changed]:
    return [event for event in found.events if isinstance(event, Changed)]
