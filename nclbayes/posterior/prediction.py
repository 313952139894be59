"""The distribution of new targets, given weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch import distributions as torch_dist
from torch.func import vmap

from nclbayes.data.task import to_device
from nclbayes.isolation import drawing_from
from nclbayes.posterior.belief import Belief, device_of
from nclbayes.posterior.linearized import linearized
from nclbayes.posterior.query import Query, base_of, masked_like, parameters_of
from nclbayes.watch.run import Model

# So many samples of the weights are drawn and run at once.
_CHUNK = 8


def predicted(
    belief: Belief,
    model: Model,
    inputs: Sequence[Any],
    context: Mapping[str, Any],
    method: str,
    num_samples: int | None,
    generator: torch.Generator,
) -> Any:
    """The distribution of the targets of new inputs.

    Args:
        belief: What is known of the weights.
        model: The Pyro model.
        inputs: Its positional arguments, without the observed one.
        context: Its keyword arguments.
        method: "mean", "samples", "linearized", "probit" or "last-layer".
        num_samples: How many samples of the weights, or draws of logits.
        generator: Decides them, and what the network draws itself.

    Returns:
        A torch distribution.
    """
    device = device_of(belief, model, None)
    query = Query(model, to_device(tuple(inputs), device), context, belief.outputs)
    with torch.no_grad(), drawing_from(generator, device):
        if method == "mean":
            return query.at(belief.mean())
        if method == "samples":
            count = num_samples or 32
            chunks = (belief.sample(min(_CHUNK, count - i), generator) for i in range(0, count, _CHUNK))
            return mixture(query, chunks)
        draws = num_samples or 256 if method == "linearized" else None
        return linearized(query, belief.states, draws=draws, last_only=method == "last-layer", generator=generator)


def mixture(query: Query, samples: Iterable[Mapping[str, Tensor]]) -> Any:
    """The distribution of an output site, averaged over samples of the weights.

    Args:
        query: The model and its inputs.
        samples: Samples of the weights in chunks, each run at once: by site, [samples, ...].

    Returns:
        For a Categorical or Bernoulli site, the same kind with averaged probabilities; for others, an equal mixture.
    """
    found: list[Any] = []

    def parameters(values: dict[str, Tensor]) -> dict[str, Tensor]:
        fn, _ = query.reach(values, draw=True)
        found.append(fn)
        base = base_of(fn)
        return {name: getattr(base, name) for name in parameters_of(base)}

    with pyro.validation_enabled(False), torch.no_grad():
        chunks = [vmap(parameters, randomness="different")(dict(chunk)) for chunk in samples]
    batched = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
    fn, base = found[0], base_of(found[0])
    if isinstance(base, (torch_dist.Categorical, torch_dist.Bernoulli)) and not fn.event_shape:
        averaged = type(base)(probs=type(base)(logits=batched["logits"]).probs.mean(0))
        return masked_like(fn, averaged)
    components = _components(fn, batched)
    weights = torch.ones_like(next(iter(batched.values())).flatten()[:1]).expand(components.batch_shape)
    return dist.MixtureSameFamily(dist.Categorical(weights), components)


def _components(fn: Any, batched: Mapping[str, Tensor], outside: int = 0) -> Any:
    """A distribution with the samples as its last batch dimension, which a mixture runs over.

    Args:
        fn: The distribution for one sample, in the wrappers that the result will have.
        batched: Its base's parameters, [samples, ...].
        outside: How many of its batch dimensions are events further out.
    """
    if isinstance(fn, torch_dist.Independent):
        count = fn.reinterpreted_batch_ndims
        return dist.Independent(_components(fn.base_dist, batched, outside + count), count)
    if isinstance(fn, dist.MaskedDistribution):
        mask = fn._mask
        if isinstance(mask, Tensor):
            mask = mask.expand(fn.batch_shape).unsqueeze(len(fn.batch_shape) - outside)
        return dist.MaskedDistribution(_components(fn.base_dist, batched, outside), mask)
    events = {name: fn.arg_constraints[name].event_dim for name in batched}
    return type(fn)(**{name: p.movedim(0, p.ndim - 1 - events[name] - outside) for name, p in batched.items()})
