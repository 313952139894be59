"""Small learners of every kind, with what an update does to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import torch
from pyro.poutine import runtime
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import nclbayes as ncl
from nclbayes.isolation import process as isolation_process
from nclbayes.methods import EWC, GPM, KFAC, OWM, CoresetLearner, JointLearner, PlainTraining, ReplayLearner


def network(seed: int = 0, **likelihood: Any) -> ncl.BayesianNetwork:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2))
    return ncl.BayesianNetwork(net, ncl.Categorical(**likelihood), prior=dist.Normal(0.0, 1.0))


def task(name: str, seed: int, source: str = "tensors") -> ncl.Task:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(24, 3, generator=generator)
    y = (x[:, seed % 3] > 0).long()
    if source == "loader":
        return ncl.Task(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True), name=name)
    return ncl.Task((x, y), name=name)


SETTINGS: dict[str, Any] = {"steps": 4, "batch_size": 8}

LEARNERS: dict[str, Callable[[ncl.BayesianNetwork], ncl.OnlinePosterior]] = {
    "laplace": lambda model: ncl.OnlinePosterior(model, ncl.LaplaceNCL(**SETTINGS, fisher_samples=1)),
    "variational": lambda model: ncl.OnlinePosterior(model, ncl.VariationalNCL(**SETTINGS)),
    "ewc": lambda model: ncl.OnlinePosterior(model, EWC(**SETTINGS)),
    "kfac": lambda model: ncl.OnlinePosterior(model, KFAC(**SETTINGS)),
    "owm": lambda model: ncl.OnlinePosterior(model, OWM(**SETTINGS)),
    "gpm": lambda model: ncl.OnlinePosterior(model, GPM(**SETTINGS)),
    "replay": lambda model: ReplayLearner(model, ncl.LaplaceNCL(**SETTINGS, fisher_samples=1), keep=4),
    "coreset": lambda model: CoresetLearner(model, ncl.LaplaceNCL(**SETTINGS, fisher_samples=1), keep=4),
    "joint": lambda model: JointLearner(model, PlainTraining(**SETTINGS)),
}


def contents(posterior: ncl.OnlinePosterior) -> dict[str, Tensor]:
    """Everything that an update may change."""
    found = {f"memory/{name}": tensor.clone() for name, tensor in posterior.memory.items()}
    for name, state in posterior.blocks.items():
        found |= {f"{name}/{part}": tensor.clone() for part, tensor in state.tensors().items()}
    return found | {"generator": posterior.generator.get_state()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


class Process:
    """The process's own state, to compare with what it is later."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.seen = self.now()

    def now(self) -> dict[str, Any]:
        return {
            "stack": list(runtime._PYRO_STACK),
            "plates": list(runtime._DIM_ALLOCATOR._stack),
            "grad": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
            "modes": torch._C._len_torch_function_stack(),
            "transforms": torch._C._functorch.get_dynamic_layer_stack_depth(),
            "denormals": bool(torch.tensor(1e-38) * 0.1 == 0),
            "validation": (dist.is_validation_enabled(), torch.distributions.Distribution._validate_args),
            "random": torch.get_rng_state().tolist(),
            "weights": [id(p) for p in self.model.parameters()],
            # By a thread that will not let it go, every other one would be kept waiting.
            "lock": isolation_process._LOCK._is_owned(),
        }

    def changed(self) -> list[str]:
        now = self.now()
        return [name for name, value in self.seen.items() if now[name] != value]
