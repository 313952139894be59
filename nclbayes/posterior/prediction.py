"""The distribution of new targets, given weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch import distributions as torch_dist
from torch.func import jacrev, vmap

from nclbayes.data.task import to_device
from nclbayes.errors import ModelError
from nclbayes.gaussians import State
from nclbayes.isolation import drawing_from
from nclbayes.isolation.failures import running
from nclbayes.posterior.belief import Belief, device_of
from nclbayes.watch import SiteRecorder
from nclbayes.watch.run import Model
from nclbayes.watch.sites import base_normal

# So many samples of the weights are drawn and run at once.
_CHUNK = 8
# Jacobians are computed for so many examples at a time that they hold about so many numbers.
_JACOBIAN_NUMBERS = 1 << 26


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
        method: "mean", "samples" or "linearized".
        num_samples: How many samples of the weights, or draws of logits.
        generator: Decides them, and what the network draws itself.

    Returns:
        A torch distribution.
    """
    device, outputs = device_of(belief, model, None), belief.outputs
    given = to_device(tuple(inputs), device)
    with torch.no_grad(), drawing_from(generator, device):
        if method == "mean":
            return predictive(model, given, context, belief.mean(), outputs)
        if method == "samples":
            count = num_samples or 32
            chunks = (belief.sample(min(_CHUNK, count - i), generator) for i in range(0, count, _CHUNK))
            return predictive_mixture(model, given, context, chunks, outputs)
        draws = num_samples or 256
        return predictive_linearized(model, given, context, belief.states, outputs, draws=draws, generator=generator)


class _OutputRecorder(SiteRecorder):
    """Gives weights their values, and keeps the distributions of output sites without drawing from them.

    A weight that no task has touched yet, such as one of a head to come, has its prior: its mean, or a draw.
    """

    def __init__(self, values: Mapping[str, Tensor], outputs: Sequence[str], draw: bool) -> None:
        super().__init__(values)
        self.outputs, self.draw = outputs, draw
        self.reached: dict[str, Any] = {}
        self.untouched: dict[str, Any] = {}

    def _pyro_sample(self, msg: Any) -> None:
        name, fn = msg["name"], msg["fn"]
        if msg["is_observed"] or site_is_subsample(msg) or self._is_unobserved_half(msg):
            return
        if name in self.outputs:
            self.reached[name] = fn
            msg["value"] = fn.mean
        elif name not in self.values:
            self.untouched[name] = fn
            msg["value"] = fn.sample() if self.draw else fn.mean.expand(fn.shape())
        else:
            super()._pyro_sample(msg)


def predictive(
    model: Model,
    inputs: Sequence[Any],
    context: Mapping[str, Any],
    values: Mapping[str, Tensor],
    outputs: Sequence[str],
) -> Any:
    """The distribution of an output site at given weights.

    Args:
        model: The Pyro model.
        inputs: Its positional arguments, without the observed one.
        context: Its keyword arguments.
        values: The weights, by site.
        outputs: The output sites; the first of them that the model reaches counts.

    Returns:
        The site's distribution.

    Raises:
        DataError: If the model cannot take the inputs.
        ModelError: If the model reaches no such site when it is called without the observed argument.
    """
    return _reach(model, inputs, context, values, outputs)[0]


def _reach(
    model: Model,
    inputs: Sequence[Any],
    context: Mapping[str, Any],
    values: Mapping[str, Tensor],
    outputs: Sequence[str],
    draw: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """The distribution of an output site, and the priors of the weights that had no value (drawn, or at the mean)."""
    recorder = _OutputRecorder(values, outputs, draw)
    with running(inputs), recorder:
        model(*inputs, **context)
    for output in outputs:
        if output in recorder.reached:
            return recorder.reached[output], recorder.untouched
    names = " or ".join(f"'{output}'" for output in outputs)
    raise ModelError(
        f"The model did not reach its output site {names}. To predict it is called with its inputs alone: give its "
        "last argument the default None, and let the site be sampled then."
    )


def predictive_mixture(
    model: Model,
    inputs: Sequence[Any],
    context: Mapping[str, Any],
    samples: Iterable[Mapping[str, Tensor]],
    outputs: Sequence[str],
) -> Any:
    """The distribution of an output site, averaged over samples of the weights.

    Args:
        model: The Pyro model.
        inputs: Its positional arguments, without the observed one.
        context: Its keyword arguments.
        samples: Samples of the weights in chunks, each run at once: by site, [samples, ...].
        outputs: The output sites; the first of them that the model reaches counts.

    Returns:
        For a Categorical or Bernoulli site, the same kind with averaged probabilities; for others, an equal mixture.
    """
    found: list[Any] = []

    def parameters(values: dict[str, Tensor]) -> dict[str, Tensor]:
        fn, _ = _reach(model, inputs, context, values, outputs, draw=True)
        found.append(fn)
        base = base_of(fn)
        return {name: getattr(base, name) for name in parameters_of(base)}

    with pyro.validation_enabled(False), torch.no_grad():
        chunks = [vmap(parameters, randomness="different")(dict(chunk)) for chunk in samples]
    batched = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
    fn, base = found[0], base_of(found[0])
    if isinstance(base, (torch_dist.Categorical, torch_dist.Bernoulli)) and not fn.event_shape:
        averaged = type(base)(probs=type(base)(logits=batched["logits"]).probs.mean(0))
        return _masked_like(fn, averaged)
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


def _masked_like(fn: Any, other: Any) -> Any:
    """Another distribution under the masks of one without event dimensions."""
    if isinstance(fn, dist.MaskedDistribution):
        return _masked_like(fn.base_dist, other).mask(fn._mask)
    return _masked_like(fn.base_dist, other) if isinstance(fn, torch_dist.Independent) else other


def base_of(fn: Any) -> Any:
    """A distribution out of its wrappers.

    Args:
        fn: The distribution, perhaps independent in some dimensions, perhaps masked.

    Returns:
        What they wrap.
    """
    while isinstance(fn, (torch_dist.Independent, dist.MaskedDistribution)):
        fn = fn.base_dist
    return fn


def parameters_of(base: Any) -> list[str]:
    """The names of the parameters that define a distribution; of alternatives, the first.

    Args:
        base: The distribution, out of its wrappers.

    Returns:
        Names of its attributes.
    """
    if "logits" in base.arg_constraints:
        return ["logits"] + [n for n in base.arg_constraints if n not in ("logits", "probs")]
    if isinstance(base, torch_dist.MultivariateNormal):
        return ["loc", "scale_tril"]
    return list(base.arg_constraints)


def predictive_linearized(
    model: Model,
    inputs: Sequence[Any],
    context: Mapping[str, Any],
    states: Mapping[str, State],
    outputs: Sequence[str],
    *,
    draws: int,
    generator: torch.Generator,
) -> Any:
    """The predictive of the network linearised around the posterior mean.

    Outputs are Gaussian with covariance ``sum_b J_b Lambda_b^-1 J_b^T``, J_b the Jacobian of an example's outputs with
    respect to block b. A Normal likelihood adds its variance; a Categorical's probabilities are averaged over draws of
    its logits.

    Args:
        model: The Pyro model.
        inputs: Its positional arguments, without the observed one; examples along the first dimension of each tensor.
        context: Its keyword arguments.
        states: The blocks' Gaussians; a weight of none of them has its prior.
        outputs: The output sites, of which the first that the model reaches counts; it must be Categorical or Normal,
            with one vector of outputs an example.
        draws: How many draws of a Categorical's logits to average over.
        generator: Decides them.

    Returns:
        A Categorical, a Normal (one output) or a MultivariateNormal.

    Raises:
        ModelError: If the output is neither Categorical nor Normal.
    """
    mean: dict[str, Tensor] = {}
    for state in states.values():
        mean |= state.block.unpack(state.loc)
    with torch.no_grad():
        fn, untouched = _reach(model, inputs, context, mean, outputs)
    priors = {site: base_normal(site, prior) for site, prior in untouched.items()}
    mean |= {site: prior.mean.expand(untouched[site].shape()) for site, prior in priors.items()}
    base = base_of(fn)
    events = 0 if isinstance(base, torch_dist.Categorical) else 1
    known = isinstance(base, (torch_dist.Categorical, torch_dist.Normal))
    if not known or len(fn.batch_shape) != 1 or len(fn.event_shape) > events:
        raise ModelError(
            f"The linearised predictive is known for Categorical and Normal outputs, one class or one vector an "
            f"example; this is a {type(base).__name__} of batch shape {tuple(fn.batch_shape)} and event "
            f"shape {tuple(fn.event_shape)}. Use num_samples instead (or .to_event(1) for a vector of outputs)."
        )
    parameter = "logits" if isinstance(base, torch_dist.Categorical) else "loc"

    def network(weights: dict[str, Tensor], *example: Any) -> Tensor:
        arguments = [item.unsqueeze(0) if isinstance(item, Tensor) else item for item in example]
        here = base_of(predictive(model, arguments, context, weights, outputs))
        return getattr(here, parameter).reshape(-1)

    centre = getattr(base, parameter)
    centre = centre.reshape(centre.shape[0], -1)
    size = sum(value.numel() for value in mean.values())
    chunk = max(1, _JACOBIAN_NUMBERS // (size * centre.shape[-1]))
    dims = (None, *(0 if isinstance(item, Tensor) else None for item in inputs))
    with running(inputs), pyro.validation_enabled(False):
        jacobians = vmap(jacrev(network), in_dims=dims, chunk_size=chunk)(mean, *inputs)
    covariance = torch.zeros_like(centre).unsqueeze(-1) @ torch.zeros_like(centre).unsqueeze(-2)
    for state in states.values():
        whitened = state.whiten(state.block.pack(jacobians)).reshape(*centre.shape, -1)
        covariance = covariance + whitened @ whitened.mT
    for site, prior in priors.items():
        whitened = (jacobians[site] * prior.stddev).reshape(*centre.shape, -1)
        covariance = covariance + whitened @ whitened.mT
    if isinstance(base, torch_dist.Normal):
        variance = base.scale.reshape(centre.shape).square()
        if not fn.event_shape:
            return dist.Normal(base.loc, (covariance[..., 0, 0] + variance[..., 0]).sqrt().reshape(base.loc.shape))
        return dist.MultivariateNormal(base.loc, covariance + torch.diag_embed(variance))
    # Logits are free up to a shift, so that their covariance is singular: take its symmetric root.
    values, vectors = torch.linalg.eigh(covariance.double())
    root = (vectors * values.clamp(min=0.0).sqrt().unsqueeze(-2)).to(centre.dtype)
    eps = torch.randn(draws, *centre.shape, generator=generator, dtype=centre.dtype, device=generator.device)
    logits = centre + (root @ eps.to(centre.device).unsqueeze(-1)).squeeze(-1)
    return dist.Categorical(probs=logits.softmax(-1).mean(0))
