"""Per-example gradients, for the sites that are no linear maps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyro
from torch import Tensor
from torch.func import grad, vmap

from nclbayes.errors import UnsupportedUseError
from nclbayes.fisher.targets import Target, example_axis, score, temper
from nclbayes.isolation.failures import is_plain
from nclbayes.watch import ModelRun, SiteRecorder
from nclbayes.watch.run import Batch, Model


class NoisyModelError(UnsupportedUseError):
    """A model draws random numbers itself, so that its examples cannot be run again one by one."""


def example_scores(
    model: Model,
    batch: Batch,
    context: Mapping[str, Any],
    run: ModelRun,
    sites: list[str],
    target: Target,
    temperature: float,
) -> dict[str, Tensor]:
    """The gradient of each example's log likelihood.

    Args:
        model: The Pyro model.
        batch: Its positional arguments, examples along the first dimension of every tensor.
        context: Its keyword arguments.
        run: A watched run on that batch.
        sites: The latent sites to differentiate.
        target: Values and weights of the observed sites.
        temperature: The Fisher's temperature.

    Returns:
        For each site, [examples, *site].

    Raises:
        NoisyModelError: If the model draws random numbers.
        UnsupportedUseError: If the model cannot be vectorised over examples.
    """
    values = {name: latent.value.detach() for name, latent in run.latents.items()}
    fixed = {name: value for name, value in values.items() if name not in sites}
    axes = {name: example_axis(run, name) for name in target.values}

    def log_likelihood(
        weights: dict[str, Tensor], example: list[Any], targets: dict[str, Tensor], counts: dict[str, Tensor]
    ) -> Tensor:
        recorder = SiteRecorder({**fixed, **weights})
        arguments = [item.unsqueeze(0) if isinstance(item, Tensor) else item for item in example]
        with recorder:
            model(*arguments, **context)
        one = Target(
            {name: value.unsqueeze(axes[name]) for name, value in targets.items()},
            {name: value.unsqueeze(axes[name]) for name, value in counts.items()},
        )
        return score(temper(recorder.observed, temperature), one)

    in_dims = (
        None,
        [0 if isinstance(item, Tensor) else None for item in batch],
        {name: axes[name] for name in target.values},
        {name: axes[name] for name in target.weights},
    )
    per_example = vmap(grad(log_likelihood), in_dims=in_dims)
    chosen = {name: values[name] for name in sites}
    try:
        # Validation branches on data, which cannot be vectorised; the watched run has validated the same call.
        with pyro.validation_enabled(False):
            gradients = per_example(chosen, list(batch), dict(target.values), dict(target.weights))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if not is_plain(error):
            raise
        names = ", ".join(map(repr, sites))
        if "randomness" in str(error):
            raise NoisyModelError(
                f"Sites {names} need the gradient of each example by itself, and the model draws random numbers "
                "(dropout, process noise) that would be others then. Switch the noise off, or apply these weights with "
                "F.linear, x @ w or F.conv1d/2d/3d to inputs whose first dimension is the examples."
            ) from error
        raise UnsupportedUseError(
            f"Sites {names} need the gradient of each example by itself, but torch.func could not vectorise the model "
            f"over examples: {error}"
        ) from error
    return gradients
