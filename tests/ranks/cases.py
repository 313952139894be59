"""Learners that are the same on every rank, and what each of them learns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import nclbayes as ncl
from nclbayes.methods import METHODS
from nclbayes.storage import write_file

SETTINGS: dict[str, Any] = {"steps": 12, "batch_size": 22}


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 300), nn.Tanh(), nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 3))


def blobs(seed: int, examples: int = 61, classes: int = 3, size: int = 5) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (examples,), generator=draw)
    centres = torch.randn(classes, size, generator=draw)
    return centres[y] + 0.5 * torch.randn(examples, size, generator=draw), y


def tasks(**context: Any) -> list[ncl.Task]:
    return [ncl.Task(blobs(seed), blobs(seed + 10), name=f"task {seed}", context=context) for seed in (1, 2)]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 3))


def classifier(net: nn.Module | None = None) -> ncl.BayesianNetwork:
    return ncl.BayesianNetwork(network() if net is None else net, ncl.Categorical(), prior=ncl.priors.scaled(1.0))


def learner(engine: Any, model: Any = None, **settings: Any) -> ncl.OnlinePosterior:
    generator = torch.Generator().manual_seed(4)
    return ncl.OnlinePosterior(classifier() if model is None else model, engine, generator=generator, **settings)


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core, self.out = ncl.nn.RNN(3, 6, leak=0.5), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.core(x))


def sequences() -> list[ncl.Task]:
    found = []
    for seed in (1, 2):
        x = torch.randn(40, 7, 3, generator=torch.Generator().manual_seed(seed))
        found.append(ncl.Task((x, x[..., :2].cumsum(1)), name=f"task {seed}"))
    return found


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 3, 3), nn.Linear(3 * 4 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.conv(x.view(-1, 1, 6, 6)).relu().flatten(1))


class Experts(nn.Module):
    """Each example goes to one of two experts; those that the first examples do not reach come late."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 3)
        for k, expert in enumerate(self.experts):
            rows = (x[:, 0] > 0) == bool(k)
            if bool(rows.any()):
                out = out.index_put((rows.nonzero().squeeze(-1),), expert(x[rows]))
        return out


class Stacked(nn.Module):
    """The same with one stack of matrices, of which a share of a batch may reach none or one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(0.5 * torch.randn(2, 3, 5)), nn.Parameter(torch.zeros(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 3)
        for k in (x[:, 0] > 0).long().unique():
            rows = ((x[:, 0] > 0) == k).nonzero().squeeze(-1)
            out = out.index_put((rows,), nn.functional.linear(x[rows], self.weight[k], self.bias[k]))
        return out


def sorted_tasks() -> list[ncl.Task]:
    found = []
    for seed in (1, 2):
        x, y = blobs(seed)
        order = x[:, 0].argsort()
        found.append(ncl.Task((x[order], y[order]), name=f"task {seed}"))
    return found


def sampler(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 5, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


Case = Callable[[], tuple[ncl.OnlinePosterior, list[ncl.Task]]]


def _seeded(net: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return net()


def _of_method(name: str) -> tuple[ncl.OnlinePosterior, list[ncl.Task]]:
    method = METHODS[name]
    kept = {"keep": 12} if method.learner.learner_settings else {}
    return method.build(classifier(), {**SETTINGS, **kept}, torch.Generator().manual_seed(4)), tasks()


def counts() -> list[ncl.Task]:
    return [
        ncl.Task((x, torch.poisson(x[:, :2].exp(), generator=torch.Generator().manual_seed(0))), name=f"task {k}")
        for k, (x, _) in enumerate((blobs(1), blobs(2)))
    ]


def _from_loader() -> list[ncl.Task]:
    return [
        ncl.Task(DataLoader(TensorDataset(*blobs(seed)), batch_size=17, shuffle=True), name=f"task {seed}")
        for seed in (1, 2)
    ]


CASES: dict[str, Case] = {
    "laplace": lambda: (learner(ncl.LaplaceNCL(**SETTINGS)), tasks()),
    "variational": lambda: (learner(ncl.VariationalNCL(**SETTINGS, particles=2)), tasks()),
    "adam": lambda: (learner(ncl.LaplaceNCL(**SETTINGS, steps_by="adam")), tasks()),
    "parts": lambda: (learner(ncl.LaplaceNCL(**SETTINGS, accumulate=3)), tasks()),
    "parts, variational": lambda: (learner(ncl.VariationalNCL(**SETTINGS, accumulate=2, fisher_samples=2)), tasks()),
    "parts of few examples": lambda: (learner(ncl.LaplaceNCL(steps=9, batch_size=3, accumulate=2)), tasks()),
    "parts of sequences": lambda: (
        learner(
            ncl.LaplaceNCL(**SETTINGS, lr=0.01, accumulate=2),
            ncl.BayesianNetwork(_seeded(Sequences), ncl.Normal(0.5), prior=ncl.priors.scaled(1.0)),
        ),
        sequences(),
    ),
    "blocks": lambda: (learner(ncl.LaplaceNCL(**SETTINGS), structure=3), tasks()),
    "few examples a batch": lambda: (learner(ncl.LaplaceNCL(steps=9, batch_size=3)), tasks()),
    "loader": lambda: (learner(ncl.LaplaceNCL(**SETTINGS)), _from_loader()),
    "data set": lambda: (
        learner(ncl.LaplaceNCL(**SETTINGS)),
        [ncl.Task(TensorDataset(*blobs(seed)), name=f"task {seed}") for seed in (1, 2)],
    ),
    "sampler": lambda: (
        learner(ncl.VariationalNCL(**SETTINGS)),
        [ncl.Task(sampler, name=f"task {seed}", size=70) for seed in (1, 2)],
    ),
    "sequences": lambda: (
        learner(
            ncl.LaplaceNCL(**SETTINGS, lr=0.01),
            ncl.BayesianNetwork(_seeded(Sequences), ncl.Normal(0.5), prior=ncl.priors.scaled(1.0)),
        ),
        sequences(),
    ),
    "images": lambda: (
        learner(ncl.LaplaceNCL(**SETTINGS), classifier(_seeded(Images))),
        [ncl.Task(blobs(seed, size=36), name=f"task {seed}") for seed in (1, 2)],
    ),
    "heads": lambda: (
        learner(
            ncl.VariationalNCL(**SETTINGS),
            classifier(
                _seeded(
                    lambda: ncl.MultiHead(
                        nn.Sequential(nn.Linear(5, 9), nn.Tanh()), [nn.Linear(9, 3) for _ in range(2)]
                    )
                )
            ),
        ),
        [ncl.Task(blobs(seed), name=f"task {seed}", context={"head": seed - 1}) for seed in (1, 2)],
    ),
    # Wide enough for gradients to be left as rows.
    **{
        f"wide {name}": (lambda engine=engine: (learner(engine(**SETTINGS), classifier(_seeded(wide))), tasks()))
        for name, engine in (("laplace", ncl.LaplaceNCL), ("variational", ncl.VariationalNCL))
    },
    "experts": lambda: (learner(ncl.LaplaceNCL(**SETTINGS), classifier(_seeded(Experts))), sorted_tasks()),
    "stacked": lambda: (learner(ncl.LaplaceNCL(**SETTINGS), classifier(_seeded(Stacked))), sorted_tasks()),
    **{
        f"counts{label}": (
            lambda told=told: (
                learner(
                    ncl.LaplaceNCL(**SETTINGS, **told),
                    ncl.BayesianNetwork(_seeded(lambda: nn.Linear(5, 2)), ncl.Poisson(), prior=dist.Normal(0.0, 0.3)),
                ),
                counts(),
            )
        )
        for label, told in (("", {}), (" by signs", {"fisher": "signs"}))
    },
    "binary": lambda: (
        learner(
            ncl.VariationalNCL(**SETTINGS, fisher="signs"),
            ncl.BayesianNetwork(_seeded(lambda: nn.Linear(5, 2)), ncl.Bernoulli(), prior=dist.Normal(0.0, 0.3)),
        ),
        [ncl.Task((x, (x[:, :2] > 0).float()), name=f"task {k}") for k, (x, _) in enumerate((blobs(1), blobs(2)))],
    ),
    **{name: (lambda name=name: _of_method(name)) for name in METHODS},
}


def learn(name: str) -> ncl.OnlinePosterior:
    """What a case comes to."""
    posterior, its_tasks = CASES[name]()
    for task in its_tasks:
        posterior.update(task, progress=False)
    return posterior


def tensors(posterior: ncl.OnlinePosterior) -> dict[str, Tensor]:
    """Everything that a posterior holds, by name."""
    # What ends so is a checksum, which rounding changes.
    kept = {name: tensor for name, tensor in posterior.memory.items() if not name.endswith("/left")}
    found = {f"memory/{name}": tensor for name, tensor in kept.items()}
    for name, state in posterior.blocks.items():
        found |= {f"{name}/{part}": tensor for part, tensor in state.tensors().items()}
    return found | {"generator": posterior.generator.get_state()}


def learn_all(rank: int, folder: Path, names: list[str]) -> None:
    """Each case on this rank; what it comes to, in a file."""
    for name in names:
        write_file(folder / f"{name}-{rank}", "tensors", tensors(learn(name)), {})
