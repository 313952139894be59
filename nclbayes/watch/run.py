"""One watched run of a model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nclbayes.errors import DataError, NonFiniteError
from nclbayes.isolation import Alone
from nclbayes.isolation.autocasting import as_called
from nclbayes.isolation.failures import running
from nclbayes.watch.maps import MapRecorder
from nclbayes.watch.nesting import mapped
from nclbayes.watch.sites import Latent, Observed, SiteRecorder
from nclbayes.watch.uses import LinearUse, OtherUse

Model = Callable[..., Any]
Batch = Sequence[Any]


@dataclass(frozen=True)
class ModelRun:
    """What one run of a model showed.

    Attributes:
        latents: Latent sites by name.
        observed: Observed data sites by name.
        linear: Every application of a weight as a linear map, in order.
        others: Every other differentiable use of a latent site.
        examples: How many examples the batch held.
        axes: Along which dimension of an observed site's batch shape they lie; None where that is not clear.
        eps: The largest machine epsilon among the numbers that weights were used in.

    Example:
        >>> import torch, pyro.distributions as dist
        >>> import nclbayes as ncl
        >>> model = ncl.BayesianNetwork(torch.nn.Linear(3, 2), ncl.Normal(1.0), prior=dist.Normal(0.0, 1.0))
        >>> run = ncl.watch.watch(model, (torch.ones(5, 3), torch.zeros(5, 2)))
        >>> run.examples, list(run.latents), list(run.observed)
        (5, ['weight', 'bias'], ['y'])
    """

    latents: dict[str, Latent]
    observed: dict[str, Observed]
    linear: list[LinearUse]
    others: list[OtherUse]
    examples: int
    axes: dict[str, int | None]
    eps: float


def watch(
    model: Model,
    batch: Batch,
    values: Mapping[str, Tensor] | None = None,
    context: Mapping[str, Any] | None = None,
) -> ModelRun:
    """Run ``model(*batch, **context)`` with the given weights, and record its sites and linear maps.

    Weights without a value get their prior mean. Nothing is drawn for them, Pyro's param store is left alone, and the
    autograd graph from every map's output to the observed distributions stays alive in the result.

    Args:
        model: Any Pyro model.
        batch: Its positional arguments; the last tensor is the observed one, and examples lie along the first
            dimension.
        values: Values of latent sites by name.
        context: Its keyword arguments.

    Returns:
        The record of the run.

    Raises:
        DataError: If the batch is empty, the model cannot take it, or observes nothing.
        NonFiniteError: If the model failed because an activation or a weight is NaN or infinite.

    Example:
        >>> import pyro
        >>> import pyro.distributions as dist
        >>> import torch
        >>> from nclbayes.watch import watch
        >>> def model(x, y):
        ...     w = pyro.sample("w", dist.Normal(torch.zeros(3, 2), 1.0).to_event(2))
        ...     pyro.sample("y", dist.Normal(x @ w, 1.0).to_event(1), obs=y)
        >>> run = watch(model, (torch.ones(5, 3), torch.zeros(5, 2)), {"w": torch.ones(3, 2)})
        >>> [(use.weight, use.call, use.rows.count) for use in run.linear]
        [('w', 'torch.Tensor.matmul', 5)]
    """
    examples = batch_size(batch)
    leaves = {name: _leaf(value) for name, value in (values or {}).items()}
    maps = MapRecorder(model, examples)
    sites = SiteRecorder(leaves, meet=maps.track)
    inputs = [mapped(Tensor.detach, item) for item in batch]
    try:
        with Alone(), running(inputs), torch.enable_grad(), _uncompiled(), as_called(), sites, maps:
            model(*inputs, **(context or {}))
    except ValueError as error:
        # A distribution refuses NaN without saying which layer it came from: say it.
        _check_finite(sites.latents, maps.linear, error)
        raise
    if not sites.observed:
        raise DataError(
            "The model has no observed site, so there is no likelihood to learn from. Its last positional argument "
            "must reach a pyro.sample(..., obs=...) statement."
        )
    axes = {name: _example_axis(site, examples, inputs[-1]) for name, site in sites.observed.items()}
    return ModelRun(sites.latents, sites.observed, maps.linear, maps.others, examples, axes, maps.eps)


def batch_size(batch: Batch) -> int:
    """The number of examples in a batch: the length of its last tensor.

    Args:
        batch: Tensors with examples along their first dimension.

    Returns:
        The number of examples.

    Raises:
        DataError: If the batch holds no tensor, or no example.
    """
    tensors = [item for item in batch if isinstance(item, Tensor)]
    if not tensors or tensors[-1].ndim == 0:
        raise DataError("A batch must hold tensors with examples along the first dimension; this one does not.")
    if tensors[-1].shape[0] == 0:
        raise DataError("The batch is empty: it has 0 examples.")
    return tensors[-1].shape[0]


def _uncompiled() -> AbstractContextManager[Any]:
    """A context in which compiled code runs as it was written: what a compiler makes of it cannot be watched."""
    # Without this module nothing has been compiled, and to import it takes seconds.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _leaf(value: Tensor) -> Tensor:
    # A weight is told from its transpose by its strides, which an expanded value does not have.
    value = value.detach()
    return (value.clone(memory_format=torch.contiguous_format) if 0 in value.stride() else value).requires_grad_()


def _example_axis(site: Observed, examples: int, target: Any) -> int | None:
    """The dimension of a site's batch shape along which the examples lie, if that is clear."""
    shape = site.fn.batch_shape
    fitting = [axis for axis, size in enumerate(shape) if size == examples]
    if len(fitting) < 2:
        return fitting[0] if fitting else None
    whole = isinstance(target, Tensor) and isinstance(site.value, Tensor)
    if whole and site.value.data_ptr() == target.data_ptr() and site.value.stride() == target.stride():
        return 0
    plated = [dim + len(shape) for _, dim, size in site.plates if dim is not None and size == examples]
    return plated[0] if len(plated) == 1 else None


def _check_finite(latents: Mapping[str, Latent], uses: Sequence[LinearUse], cause: Exception) -> None:
    for latent in latents.values():
        if not bool(torch.isfinite(latent.value).all()):
            raise NonFiniteError(f"The value of site '{latent.name}' holds NaN or infinity.") from cause
    for use in uses:
        if not all(bool(torch.isfinite(rows).all()) for rows in use.input_rows()):
            raise NonFiniteError(
                f"NaN or infinity in the inputs of the map with weight '{use.weight}' ({use.call}). Look at the data, "
                "and at the weights of the layers before it."
            ) from cause
