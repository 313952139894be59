"""The distribution of new targets, given weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch import distributions as torch_dist
from torch.func import vmap

from nclbayes.errors import ModelError
from nclbayes.watch import SiteRecorder
from nclbayes.watch.run import Model


class _OutputRecorder(SiteRecorder):
    """Gives weights their values, and keeps the distribution of an output site without drawing from it."""

    def __init__(self, values: Mapping[str, Tensor], output: str) -> None:
        super().__init__(values)
        self.output = output
        self.fn: Any = None

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] == self.output and not site_is_subsample(msg):
            self.fn = msg["fn"]
            msg["value"] = msg["fn"].mean
            return
        super()._pyro_sample(msg)


def predictive(
    model: Model, inputs: Sequence[Any], context: Mapping[str, Any], values: Mapping[str, Tensor], output: str
) -> Any:
    """The distribution of an output site at given weights.

    Args:
        model: The Pyro model.
        inputs: Its positional arguments, without the observed one.
        context: Its keyword arguments.
        values: The weights, by site.
        output: The output site.

    Returns:
        The site's distribution.

    Raises:
        ModelError: If the model does not reach that site when it is called without the observed argument.
    """
    recorder = _OutputRecorder(values, output)
    with recorder:
        model(*inputs, **context)
    if recorder.fn is None:
        raise ModelError(
            f"The model did not reach its output site '{output}'. To predict it is called without its last argument: "
            "give that argument the default None, and let the site be sampled then."
        )
    return recorder.fn


def predictive_mixture(
    model: Model,
    inputs: Sequence[Any],
    context: Mapping[str, Any],
    samples: Mapping[str, Tensor],
    output: str,
    chunk_size: int | None = 8,
) -> Any:
    """The distribution of an output site, averaged over samples of the weights.

    Args:
        model: The Pyro model.
        inputs: Its positional arguments, without the observed one.
        context: Its keyword arguments.
        samples: Weights by site, [samples, ...].
        output: The output site.
        chunk_size: How many samples to run at once.

    Returns:
        For a Categorical or Bernoulli site, the same kind with averaged probabilities; for others, an equal mixture.
    """
    found: list[Any] = []

    def parameters(values: dict[str, Tensor]) -> dict[str, Tensor]:
        fn = predictive(model, inputs, context, values, output)
        found.append(fn)
        base = _base(fn)
        return {name: getattr(base, name) for name in _parameters(base)}

    with pyro.validation_enabled(False), torch.no_grad():
        batched = vmap(parameters, randomness="different", chunk_size=chunk_size)(dict(samples))
    fn, base = found[0], _base(found[0])
    if isinstance(base, (torch_dist.Categorical, torch_dist.Bernoulli)) and not fn.event_shape:
        probs = type(base)(logits=batched["logits"]).probs.mean(0)
        return type(base)(probs=probs)
    # The samples become the last batch dimension, which a mixture runs over.
    events = len(fn.event_shape)
    components = type(base)(**{n: p.movedim(0, p.ndim - 1 - events) for n, p in batched.items()})
    if events > len(base.event_shape):
        components = dist.Independent(components, events - len(base.event_shape))
    weights = torch.ones_like(next(iter(batched.values())).flatten()[:1]).expand(components.batch_shape)
    return dist.MixtureSameFamily(dist.Categorical(weights), components)


def _base(fn: Any) -> Any:
    while isinstance(fn, (torch_dist.Independent, dist.MaskedDistribution)):
        fn = fn.base_dist
    return fn


def _parameters(base: Any) -> list[str]:
    """The names of the parameters that define a distribution; of alternatives, the first."""
    if "logits" in base.arg_constraints:
        return ["logits"] + [n for n in base.arg_constraints if n not in ("logits", "probs")]
    if isinstance(base, torch_dist.MultivariateNormal):
        return ["loc", "scale_tril"]
    return list(base.arg_constraints)
