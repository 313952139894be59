"""The file that holds a posterior."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nclbayes.engines.base import ENGINES, Engine
from nclbayes.errors import FileError
from nclbayes.gaussians import state_from
from nclbayes.posterior.belief import Belief
from nclbayes.storage import read_file, write_file


@dataclass(frozen=True)
class Saved:
    """What a posterior's file holds.

    Attributes:
        belief: The belief.
        engine: The engine.
        generator: The generator.
        initial: Where new sites start, values by site; None: where the model says.
        learner: Settings of the posterior itself, if it is of a kind that has some.
        kind: The class of the posterior; empty if the file does not say.
    """

    belief: Belief
    engine: Engine
    generator: torch.Generator
    initial: Mapping[str, Tensor] | None = None
    learner: Mapping[str, Any] = field(default_factory=dict)
    kind: str = ""


def write_posterior(path: str | os.PathLike[str], saved: Saved) -> None:
    """Write a posterior to a file.

    Args:
        path: Where to.
        saved: What to write.
    """
    belief, engine = saved.belief, saved.engine
    tensors = {f"/memory/{name}": tensor for name, tensor in belief.memory.items()}
    tensors |= {f"/initial/{site}": value for site, value in (saved.initial or {}).items()}
    described = {}
    for name, state in belief.states.items():
        tensors |= {f"{name}/{part}": tensor for part, tensor in state.tensors().items()}
        described[name] = state.settings()
    settings = {
        "blocks": described,
        "memory": sorted(belief.memory),
        "initial": None if saved.initial is None else sorted(saved.initial),
        "generator": saved.generator.device.type,
        "trained": sorted(belief.trained),
        "tasks": belief.tasks,
        "outputs": belief.outputs,
        "log_evidence": belief.log_evidence,
        "engine": describe(engine),
        "scheduled": engine.schedule is not None,
        "learner": dict(saved.learner),
        "kind": saved.kind,
    }
    write_file(path, "posterior", tensors | {"generator": saved.generator.get_state()}, settings)


def read_posterior(path: str | os.PathLike[str]) -> Saved:
    """Read what :func:`write_posterior` wrote.

    Args:
        path: Where from.

    Returns:
        The same, on the CPU.

    Raises:
        FileError: If the file is damaged or foreign, or of an engine that is not known.
    """
    tensors, settings = read_file(path, "posterior")
    engine = engine_from(settings["engine"], f"'{path}'")
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
    learner, kind = settings.get("learner", {}), settings.get("kind", "")
    return Saved(belief, engine, generator, initial, learner, kind)


def describe(engine: Engine) -> dict[str, Any]:
    """An engine as plain values, for a file; without its schedule, which is a function.

    Args:
        engine: The engine.

    Returns:
        Its name and its settings.
    """
    return {"name": type(engine).__name__, **engine.to_dict()}


def engine_from(described: Mapping[str, Any], what: str) -> Engine:
    """What :func:`describe` described.

    Args:
        described: Its result.
        what: What was written with the engine, for an error's message.

    Returns:
        The engine.

    Raises:
        FileError: If there is no such engine.
    """
    settings = dict(described)
    name = settings.pop("name")
    if name not in ENGINES:
        raise FileError(f"{what} was written with the engine {name}, which is not known here: import it first.")
    return ENGINES[name](**settings)


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
