"""What tells one update from another: what an interrupted one must share with the call that goes on with it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nclbayes.data.agreement import evenly
from nclbayes.data.checking import has_plain_memory
from nclbayes.data.task import Task, to_device
from nclbayes.engines.base import Engine
from nclbayes.engines.checkpoint import checksum, identity
from nclbayes.posterior.joining import Joined, look
from nclbayes.posterior.query import base_of, parameters_of
from nclbayes.watch.nesting import tensors_of
from nclbayes.watch.run import Model

# So many numbers of each parameter are kept to compare: a model of many outputs has millions.
_MOST_NUMBERS = 1000


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
        tensors |= {f"data/{k}/{name}": tensor for name, tensor in tensors_of(batch)}
    contexts = [_told(part.context, f"context/{k}", tensors) for k, part in enumerate(task.parts)]
    settings = {"name": type(engine).__name__, **engine.to_dict(), "scheduled": callable(engine.schedule)}
    return identity([task.name, task.size, contexts, settings], tensors)


def update_marks(
    joined: Joined, model: Model, task: Task, engine: Engine, generator: torch.Generator, tasks: Sequence[str]
) -> dict[str, Any]:
    """What must be the same on every rank that learns a task, by what people call it.

    Args:
        joined: The task as the posterior meets it.
        model: The model.
        task: The task.
        engine: The engine.
        generator: Decides every draw.
        tasks: The tasks learnt so far.

    Returns:
        Plain values by name; of tensors, a checksum.
    """
    tensors = dict[str, Tensor]()
    contexts = [_told(part.context, f"context/{k}", tensors) for k, part in enumerate(task.parts)]
    for k, batch in enumerate(joined.examples):
        tensors |= {f"data/{k}/{name}": tensor for name, tensor in tensors_of(batch)}
    states = {
        f"{name}/{part}": tensor for name, state in joined.states.items() for part, tensor in state.common().items()
    }
    weights = dict(joined.start)
    if isinstance(model, torch.nn.Module):
        own = (*model.named_parameters(), *model.named_buffers())
        weights |= {f"model/{name}": tensor.detach() for name, tensor in own}
    forms = {name: list(tensor.shape) for name, tensor in weights.items()}
    return {
        "task": [task.name, task.size, len(task.parts)],
        "context": contexts,
        "first examples": checksum(tensors),
        "engine": {"name": type(engine).__name__, **engine.to_dict()},
        "model": zlib.crc32(repr(sorted(forms.items())).encode()),
        "weights": checksum(weights),
        "earlier tasks": list(tasks),
        "posterior": checksum(states),
        "generator": checksum({"state": generator.get_state()}),
    }


def _told(value: object, where: str, tensors: dict[str, Tensor]) -> Any:
    """A value of a context in plain words; tensors, of which words show a few numbers only, are put with the others."""
    if isinstance(value, Tensor) and has_plain_memory(value):
        tensors[where] = value
        return [str(value.dtype), list(value.shape)]
    if isinstance(value, Mapping):
        return {repr(key): _told(item, f"{where}/{key}", tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_told(item, f"{where}/{i}", tensors) for i, item in enumerate(value)]
    text = repr(value)
    # An address is another one in the next process.
    return type(value).__qualname__ if " at 0x" in text else text


def model_probe(joined: Joined, model: Model, task: Task, device: torch.device) -> dict[str, Tensor]:
    """What must be the same up to rounding: what the model computes for a few examples at the start.

    Args:
        joined: The task as the posterior meets it.
        model: The model.
        task: The task.
        device: Where to compute.

    Returns:
        The parameters of the observed sites by part of the task, site and name, float64 on the CPU; of a large one,
        numbers that are evenly spaced over it.
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
                    found[f"{k}.{site.name}.{name}"] = evenly(tensor.detach(), _MOST_NUMBERS).double().cpu()
    return found
