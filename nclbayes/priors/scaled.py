"""Weights as wide as keeps a signal's size from layer to layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from nclbayes.data.checking import number
from nclbayes.errors import SettingError


def scaled(scale: float = 1.0) -> Scaled:
    """Independent normal weights of standard deviation ``scale / sqrt(fan in)``.

    The fan in of a weight is how many inputs are summed with weights of its kind, so that a layer's outputs are about
    as large as its inputs, however wide it is: samples of such a prior make a network. It serves both engines.

    Args:
        scale: The standard deviation for a fan in of 1.

    Returns:
        A prior, for :class:`~nclbayes.BayesianNetwork` or one of its patterns.

    Example:
        >>> import torch
        >>> import nclbayes as ncl
        >>> model = ncl.BayesianNetwork(torch.nn.Linear(100, 2), ncl.Categorical(), prior=ncl.priors.scaled(1.0))
        >>> ncl.priors.scaled(1.0).of(torch.nn.Linear(100, 2), "bias").scale
        tensor(0.1000)
    """
    return Scaled(scale)


@dataclass(frozen=True)
class Scaled:
    """The prior that :func:`scaled` makes.

    Attributes:
        scale: The standard deviation for a fan in of 1.

    Example:
        >>> import torch
        >>> from nclbayes.priors import Scaled
        >>> Scaled(0.5).of(torch.nn.Conv2d(4, 8, 5), "weight").scale
        tensor(0.0500)
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", number("scale", self.scale, lambda v: v > 0, "positive"))

    def of(self, module: nn.Module, name: str) -> dist.Normal:
        """The prior of one parameter.

        Args:
            module: A module.
            name: The name of one of its parameters, such as "0.weight".

        Returns:
            A Normal with one mean and one scale, around 0; around where the parameter is now, if that is neither a
            matrix nor the bias of one (the gain of a normalisation is around 1).

        Raises:
            SettingError: If the module has no such parameter.
        """
        *path, last = name.split(".")
        try:
            owner = module.get_submodule(".".join(path))
            parameter = owner.get_parameter(last)
        except AttributeError:
            raise SettingError(f"The module has no parameter '{name}' to give a prior to.") from None
        count = fan_in(owner, parameter)
        loc = parameter.detach().clone() if count is None else torch.zeros_like(parameter[(0,) * parameter.ndim])
        return dist.Normal(loc, torch.full_like(loc, self.scale / math.sqrt(count or 1)).detach())


def fan_in(module: nn.Module, parameter: Tensor) -> int | None:
    """How many inputs are summed with weights of a parameter.

    Args:
        module: The module that the parameter belongs to.
        parameter: A weight with outputs along the first dimension (a transposed convolution's: along the second), an
            embedding, or a bias, which has the fan in of the weight beside it.

    Returns:
        The number; None for a parameter that is no weight of a linear map, nor the bias of one.

    Example:
        >>> import torch
        >>> from nclbayes.priors import fan_in
        >>> layer = torch.nn.Linear(30, 2)
        >>> fan_in(layer, layer.bias)
        30
    """
    weights = [p for p in module.parameters(recurse=False) if p.ndim >= 2]
    if parameter.ndim < 2 and not weights:
        return None
    weight = parameter if parameter.ndim >= 2 else max(weights, key=lambda p: p[0].numel())
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return 1  # a row is looked up, and nothing is summed
    if isinstance(module, _ConvTransposeNd):
        inputs = weight.shape[0] // module.groups * math.prod(weight.shape[2:])
        return max(1, inputs // math.prod(module.stride))  # so many of them reach one place of the output
    return weight[0].numel()
