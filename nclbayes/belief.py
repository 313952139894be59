"""What a posterior knows at one moment, and the file that holds it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nclbayes.engines.base import ENGINES, Engine, Outcome
from nclbayes.errors import FileError
from nclbayes.state import State, moved, state_from, state_settings, state_tensors
from nclbayes.storage import read_file, write_file


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
    """

    states: Mapping[str, State] = field(default_factory=dict)
    trained: frozenset[str] = frozenset()
    tasks: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    log_evidence: float | None = None
    memory: Mapping[str, Tensor] = field(default_factory=dict)

    def after(self, task: str, outputs: tuple[str, ...], outcome: Outcome) -> Belief:
        """The belief after a task.

        Args:
            task: Its name.
            outputs: Its observed sites.
            outcome: What the engine made of it.

        Returns:
            The new belief.
        """
        return Belief(
            states={**self.states, **outcome.states},
            trained=self.trained | set(outcome.states),
            tasks=(*self.tasks, task),
            outputs=tuple(dict.fromkeys((*outputs, *self.outputs))),
            log_evidence=outcome.log_evidence,
            memory={**self.memory, **outcome.memory},
        )

    def mean(self) -> dict[str, Tensor]:
        """The mean, by site."""
        values: dict[str, Tensor] = {}
        for state in self.states.values():
            values |= state.block.unpack(state.loc)
        return values

    def to(self, device: torch.device) -> Belief:
        """The same on another device; what is kept in memory stays where it is.

        Args:
            device: Where to.

        Returns:
            The moved belief.
        """
        return replace(self, states={name: moved(state, device) for name, state in self.states.items()})


@dataclass(frozen=True)
class Saved:
    """What a posterior's file holds.

    Attributes:
        belief: The belief.
        engine: The engine.
        generator: The generator.
        initial: Where new sites start, values by site; None: where the model says.
        learner: Settings of the posterior itself, if it is of a kind that has some.
    """

    belief: Belief
    engine: Engine
    generator: torch.Generator
    initial: Mapping[str, Tensor] | None = None
    learner: Mapping[str, Any] = field(default_factory=dict)


def write_belief(path: str | os.PathLike[str], saved: Saved) -> None:
    """Write a belief to a file.

    Args:
        path: Where to.
        saved: What to write.
    """
    belief, engine = saved.belief, saved.engine
    tensors = {f"/memory/{name}": tensor for name, tensor in belief.memory.items()}
    tensors |= {f"/initial/{site}": value for site, value in (saved.initial or {}).items()}
    described = {}
    for name, state in belief.states.items():
        tensors |= {f"{name}/{part}": tensor for part, tensor in state_tensors(state).items()}
        described[name] = state_settings(state)
    settings = {
        "blocks": described,
        "memory": sorted(belief.memory),
        "initial": None if saved.initial is None else sorted(saved.initial),
        "generator": saved.generator.device.type,
        "trained": sorted(belief.trained),
        "tasks": belief.tasks,
        "outputs": belief.outputs,
        "log_evidence": belief.log_evidence,
        "engine": {"name": type(engine).__name__, **engine.to_dict()},
        "scheduled": engine.schedule is not None,
        "learner": dict(saved.learner),
    }
    write_file(path, "posterior", tensors | {"generator": saved.generator.get_state()}, settings)


def read_belief(path: str | os.PathLike[str]) -> Saved:
    """Read what :func:`write_belief` wrote.

    Args:
        path: Where from.

    Returns:
        The same, on the CPU.

    Raises:
        FileError: If the file is damaged or foreign, or of an engine that is not known.
    """
    tensors, settings = read_file(path, "posterior")
    described = dict(settings["engine"])
    engine = described.pop("name")
    if engine not in ENGINES:
        raise FileError(f"'{path}' was written with the engine {engine}, which is not known here: import it first.")
    if settings.get("scheduled"):
        warnings.warn(
            f"The engine of '{path}' had a schedule of its learning rate, a function, which a file cannot hold: set it "
            "again, as in posterior.engine = dataclasses.replace(posterior.engine, schedule=...).",
            stacklevel=3,
        )
    states = {}
    for name, block in settings["blocks"].items():
        states[name] = state_from(block, {part: tensors.pop(f"{name}/{part}") for part in block["tensors"]})
    belief = Belief(
        states=states,
        trained=frozenset(settings["trained"]),
        tasks=tuple(settings["tasks"]),
        outputs=tuple(settings["outputs"]),
        log_evidence=settings["log_evidence"],
        memory={name: tensors.pop(f"/memory/{name}") for name in settings.get("memory", ())},
    )
    sites = settings.get("initial")
    initial = None if sites is None else {site: tensors.pop(f"/initial/{site}") for site in sites}
    generator = _generator(settings.get("generator", "cpu"), tensors["generator"], path)
    return Saved(belief, ENGINES[engine](**described), generator, initial, settings.get("learner", {}))


def _generator(device: str, state: Tensor, path: str | os.PathLike[str]) -> torch.Generator:
    """The saved generator; one of a device that is not here starts anew."""
    if device != "cpu" and not torch.cuda.is_available():
        warnings.warn(
            f"The generator of '{path}' is of a device that is not here ({device}): its draws cannot be repeated, and "
            "one of the CPU, seeded with 0, takes its place.",
            stacklevel=4,
        )
        return torch.Generator().manual_seed(0)
    generator = torch.Generator(device=device)
    generator.set_state(state)
    return generator
