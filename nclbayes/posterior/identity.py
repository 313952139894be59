"""What tells one update from another: what an interrupted one must share with the call that goes on with it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nclbayes.data.task import Task, to_device
from nclbayes.engines.base import Engine
from nclbayes.engines.checkpoint import identity
from nclbayes.posterior.joining import Joined, look
from nclbayes.posterior.query import base_of, parameters_of
from nclbayes.watch.run import Model


def update_identity(
    joined: Joined, model: Model, task: Task, engine: Engine, generator: Tensor, memory: Mapping[str, Tensor]
) -> str:
    """What must be the same, bit for bit.

    Args:
        joined: The task as the posterior meets it.
        model: The model, of which frozen weights count.
        task: The task.
        engine: The engine.
        generator: The state of the generator when the update was called.
        memory: What earlier updates kept besides the Gaussians.

    Returns:
        A string that is equal for equal updates.
    """
    tensors = {"generator": generator, **{f"memory/{name}": tensor for name, tensor in memory.items()}}
    for name, state in joined.states.items():
        parts = {"start": joined.start[name], **state.tensors()}
        tensors |= {f"state/{name}/{part}": tensor for part, tensor in parts.items()}
    if isinstance(model, torch.nn.Module):
        frozen = ((name, p) for name, p in model.named_parameters() if not p.requires_grad)
        tensors |= {f"frozen/{name}": parameter for name, parameter in frozen}
    for k, batch in enumerate(joined.examples):
        tensors |= {f"data/{k}/{i}": item for i, item in enumerate(batch) if isinstance(item, Tensor)}
    contexts = [repr(part.context) for part in task.parts]
    settings = {"name": type(engine).__name__, **engine.to_dict(), "schedule": engine.schedule is not None}
    return identity([task.name, task.size, contexts, settings], tensors)


def model_probe(joined: Joined, model: Model, task: Task, device: torch.device) -> dict[str, Tensor]:
    """What must be the same up to rounding: what the model computes for a few examples at the start.

    Args:
        joined: The task as the posterior meets it.
        model: The model.
        task: The task.
        device: Where to compute.

    Returns:
        The parameters of the observed sites by part of the task, site and name, float64 on the CPU.
    """
    found: dict[str, Tensor] = {}
    for k, (part, batch) in enumerate(zip(task.parts, joined.examples, strict=True)):
        run, _ = look(model, to_device(batch, device), part.context, joined.values)
        for site in run.observed.values():
            base = base_of(site.fn)
            numbers = {name: getattr(base, name) for name in parameters_of(base)}
            for name, value in {**numbers, "site mask": site.mask, "site scale": site.scale}.items():
                if isinstance(value, (Tensor, float)):
                    tensor = value if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
                    found[f"{k}.{site.name}.{name}"] = tensor.detach().double().cpu()
    return found
