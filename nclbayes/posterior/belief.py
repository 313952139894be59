"""What a posterior knows at one moment: the Gaussians of its blocks, and what they answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from nclbayes.blocks.structures import Structures
from nclbayes.data.task import Task
from nclbayes.engines.base import Outcome
from nclbayes.errors import ModelError, ValuesError
from nclbayes.gaussians import State
from nclbayes.watch.run import Model


@dataclass(frozen=True)
class Belief:
    """Everything that tasks have changed; it is replaced as a whole, so that an update is all or nothing.

    Attributes:
        states: The Gaussian of each block.
        trained: The blocks that a task has touched.
        tasks: The names of the tasks seen, in order.
        outputs: The model's observed sites, those of the last task first.
        log_evidence: That of the last task, where its engine gives one.
        memory: What an engine or a learner keeps besides the Gaussians, by name.
        likelihood_weight: What each example of the first task counted; None before that.
        structures: What is held of the factors of blocks that are yet to come.
    """

    states: Mapping[str, State] = field(default_factory=dict)
    trained: frozenset[str] = frozenset()
    tasks: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    log_evidence: float | None = None
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    likelihood_weight: float | None = None
    structures: Structures = field(default_factory=Structures)

    def after(self, task: str, outputs: tuple[str, ...], outcome: Outcome, likelihood_weight: float) -> Belief:
        """The belief after a task.

        Args:
            task: Its name.
            outputs: Its observed sites.
            outcome: What the engine made of it.
            likelihood_weight: What each of its examples counted.

        Returns:
            The new belief.
        """
        return replace(
            self,
            states={**self.states, **outcome.states},
            trained=self.trained | set(outcome.states),
            tasks=(*self.tasks, task),
            outputs=tuple(dict.fromkeys((*outputs, *self.outputs))),
            log_evidence=outcome.log_evidence,
            memory={**self.memory, **outcome.memory},
            likelihood_weight=self.likelihood_weight or likelihood_weight,
        )

    def mean(self) -> dict[str, Tensor]:
        """The mean, by site."""
        values: dict[str, Tensor] = {}
        for state in self.states.values():
            values |= state.block.unpack(state.loc)
        return values

    def described(self) -> list[str]:
        """Blocks, shapes and forms, a line each."""
        shapes = {name: " x ".join(map(str, state.block.shape)) or "1" for name, state in self.states.items()}
        lines = [f"  {name}: {shapes[name]}, {state.kind}" for name, state in self.states.items()]
        size = sum(state.block.size for state in self.states.values())
        return [*lines, f"  {size:,} weights in {len(self.states)} blocks"]

    def sample(self, num_samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Weights drawn from the Gaussians.

        Args:
            num_samples: How many.
            generator: Decides the draws.

        Returns:
            For each site, [num_samples, ...].
        """
        values: dict[str, Tensor] = {}
        for state in self.states.values():
            shape = (num_samples, *state.loc.shape)
            eps = torch.randn(shape, generator=generator, dtype=state.loc.dtype, device=generator.device)
            values |= state.block.unpack(state.loc + state.colouring()(eps.to(state.loc.device)))
        return values

    def guide(self) -> dict[str, Tensor]:
        """Weights sampled as Pyro sites: one auxiliary site a block, then the block's sites.

        Returns:
            The weights, by site.
        """
        values: dict[str, Tensor] = {}
        for name, state in self.states.items():
            distribution = state.distribution
            if len(distribution.batch_shape):
                distribution = distribution.to_event(len(distribution.batch_shape))
            matrix = pyro.sample(f"block.{name}", distribution, infer={"is_auxiliary": True})
            for site, value in state.block.unpack(matrix).items():
                values[site] = pyro.sample(site, dist.Delta(value, event_dim=value.ndim))
        return values

    def log_prob(self, values: Mapping[str, Tensor]) -> Tensor:
        """The joint log density of weights.

        Args:
            values: For every site, ``[*samples, ...]``.

        Returns:
            ``[*samples]``.

        Raises:
            ValuesError: If a site is missing, misshapen, or unknown.
        """
        known = {site for state in self.states.values() for site in state.block.sites}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValuesError(f"The posterior has no sites {', '.join(map(repr, unknown))}.")
        total: Any = 0.0
        for state in self.states.values():
            total = total + state.log_prob(state.block.pack(values))
        return total

    def entropy(self) -> float:
        """Differential entropy in nats."""
        return sum(float(state.distribution.entropy().sum()) for state in self.states.values())

    def kl(self, other: Belief) -> float:
        """KL( self || other ) in nats.

        Args:
            other: A belief over the same blocks.

        Returns:
            The divergence.

        Raises:
            ModelError: If their blocks are not the same.
        """
        if {n: s.block for n, s in self.states.items()} != {n: s.block for n, s in other.states.items()}:
            raise ModelError("The two posteriors do not have the same blocks, so there is no divergence between them.")
        pairs = [(state.distribution, other.states[name].distribution) for name, state in self.states.items()]
        return sum(float(torch.distributions.kl_divergence(p, q).sum()) for p, q in pairs)

    def to(self, device: torch.device) -> Belief:
        """The same on another device; what is kept in memory stays where it is.

        Args:
            device: Where to.

        Returns:
            The moved belief.
        """
        return replace(self, states={name: state.to(device) for name, state in self.states.items()})


def device_of(belief: Belief, model: Model, task: Task | None) -> torch.device:
    """Where to compute: where the Gaussians are, else the model, else the task's data.

    Args:
        belief: The belief.
        model: The model.
        task: A task, if there is one.

    Returns:
        The device.
    """
    tensors: Iterable[Tensor] = ()
    if belief.states:
        tensors = [state.loc for state in belief.states.values()]
    elif isinstance(model, torch.nn.Module):
        tensors = [*model.parameters(), *model.buffers()]
    elif task is not None and isinstance(task.parts[0].train, tuple):
        tensors = task.parts[0].train
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
