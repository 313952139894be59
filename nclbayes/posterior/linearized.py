"""The predictive of a network that is linear in its weights around the posterior mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch import distributions as torch_dist

from nclbayes.errors import ModelError
from nclbayes.gaussians import State
from nclbayes.posterior.jacobians import Linearisation
from nclbayes.posterior.query import Query, base_of, masked_like
from nclbayes.watch.sites import base_normal

# Jacobians are computed for so many examples at a time that they hold about so many numbers.
_JACOBIAN_NUMBERS = 1 << 26
# What torch says where it cannot vectorise: what looks into its data, some layers in mixed precision, checkpointing.
_NOT_VECTORISED = ("vmap", "expected scalar type", "saved tensor hooks")


def linearized(
    query: Query, states: Mapping[str, State], *, draws: int | None, last_only: bool, generator: torch.Generator
) -> Any:
    """The predictive of the network linearised around the posterior mean.

    Outputs are Gaussian with covariance ``sum_b J_b Lambda_b^-1 J_b^T``, J_b the Jacobian of an example's outputs with
    respect to block b. A Normal likelihood adds its variance; a Categorical's probabilities are averaged over draws of
    its logits, or each logit is divided by ``sqrt(1 + pi / 8 variance)``.

    Args:
        query: The model and its inputs, examples along the first dimension of each tensor; the output must be
            Categorical or Normal, with one vector of outputs an example.
        states: The blocks' Gaussians; a weight of none of them has its prior.
        draws: How many draws of a Categorical's logits to average over; None: the closed form.
        last_only: Whether the weights of the last linear map alone are uncertain.
        generator: Decides them.

    Returns:
        A Categorical, a Normal (one output) or a MultivariateNormal; under the masks that the output has.

    Raises:
        ModelError: If the output is neither Categorical nor Normal.
    """
    mean: dict[str, Tensor] = {}
    for state in states.values():
        mean |= state.block.unpack(state.loc)
    with torch.no_grad():
        fn, untouched = query.reach(mean)
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
    centre = getattr(base, parameter)
    centre = centre.reshape(centre.shape[0], -1)
    around = Linearisation(query, parameter, mean, states, priors)
    covariance = (around.of_last if last_only else around.covariance)(centre.shape[-1], len(centre))
    if isinstance(base, torch_dist.Normal):
        variance = base.scale.reshape(centre.shape).square()
        if not fn.event_shape:
            scale = (covariance[..., 0, 0] + variance[..., 0]).sqrt().reshape(base.loc.shape)
            return masked_like(fn, dist.Normal(base.loc, scale))
        counts, covariance = _counted(fn, centre), covariance + torch.diag_embed(variance)
        if bool(counts.all()):
            return dist.MultivariateNormal(base.loc, covariance)
        return _PartlyMasked(base.loc, covariance, counts)
    if draws is None:
        # MacKay's: logits shrink by what their variances make of a probit.
        shrunk = centre / (1 + math.pi / 8 * covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0.0)).sqrt()
        return masked_like(fn, dist.Categorical(logits=shrunk))
    # Logits are free up to a shift, so that their covariance is singular: take its symmetric root.
    values, vectors = torch.linalg.eigh(covariance.double())
    root = (vectors * values.clamp(min=0.0).sqrt().unsqueeze(-2)).to(centre.dtype)
    eps = torch.randn(draws, *centre.shape, generator=generator, dtype=centre.dtype, device=generator.device)
    logits = centre + (root @ eps.to(centre.device).unsqueeze(-1)).squeeze(-1)
    return masked_like(fn, dist.Categorical(probs=logits.softmax(-1).mean(0)))


def _counted(fn: Any, like: Tensor) -> Tensor:
    """Which numbers of a vector of outputs count, by all masks around their distribution."""
    counts = torch.ones_like(like, dtype=torch.bool)
    while isinstance(fn, (torch_dist.Independent, dist.MaskedDistribution)):
        if isinstance(fn, dist.MaskedDistribution):
            mask = fn._mask
            if isinstance(mask, Tensor):
                mask = mask.expand(fn.batch_shape).reshape(fn.batch_shape + (1,) * len(fn.event_shape))
            counts = counts & mask
        fn = fn.base_dist
    return counts


class _PartlyMasked(dist.MultivariateNormal):
    """A vector of which some outputs do not count: its density is that of the others.

    Args:
        loc: The mean, [examples, outputs].
        covariance: [examples, outputs, outputs].
        counts: Which outputs count, [examples, outputs].
    """

    def __init__(self, loc: Tensor, covariance: Tensor, counts: Tensor) -> None:
        super().__init__(loc, covariance)
        self._counts = counts
        # What does not count is made a standard normal of its own, whose density at its mean is known.
        kept = covariance * (counts.unsqueeze(-1) & counts.unsqueeze(-2)) + torch.diag_embed((~counts).to(covariance))
        self._others = dist.MultivariateNormal(loc, kept)

    def log_prob(self, value: Tensor) -> Tensor:
        """The log density of the outputs that count."""
        found = self._others.log_prob(torch.where(self._counts, value, self.loc))
        return found + (~self._counts).sum(-1) * math.log(2 * math.pi) / 2
