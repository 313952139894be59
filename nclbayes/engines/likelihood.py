"""The log likelihood of a batch and its gradient, at the cost of little more than the network's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from nclbayes.watch import Observed, SiteRecorder
from nclbayes.watch.run import Model, batch_size


def log_likelihood(observed: Mapping[str, Observed]) -> Tensor:
    """The log probability of what was observed, summed.

    Args:
        observed: The observed sites of a run.

    Returns:
        A scalar.
    """
    total: Any = 0.0
    for site in observed.values():
        total = total + scale_and_mask(site.fn.log_prob(site.value), site.scale, site.mask).sum()
    return total


class LogLikelihood:
    """A task's log likelihood as a function of batch and weights; only observed sites are scored.

    Args:
        model: The Pyro model.
        context: Its keyword arguments.
        fixed: Values of sites that are not learnt.
    """

    def __init__(self, model: Model, context: Mapping[str, Any], fixed: Mapping[str, Tensor] | None = None) -> None:
        self._model = model
        self._context = dict(context)
        self._fixed = dict(fixed or {})

    def __call__(self, batch: tuple[Any, ...], leaves: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor], int]:
        """Value and gradient on a batch.

        Args:
            batch: The batch.
            leaves: The weights by site, each a leaf that requires grad.

        Returns:
            The summed log likelihood, its gradient by site (zero where it does not depend on a site), and the number of
            examples.
        """
        recorder = SiteRecorder({**self._fixed, **leaves})
        with torch.enable_grad(), recorder:
            self._model(*batch, **self._context)
            value = log_likelihood(recorder.observed)
        sites = list(leaves)
        grads = torch.autograd.grad(value, [leaves[site] for site in sites], allow_unused=True)
        gradient = {
            site: torch.zeros_like(leaves[site]) if grad is None else grad
            for site, grad in zip(sites, grads, strict=True)
        }
        return float(value.detach()), gradient, batch_size(batch)
