"""Weights around those that a network has been trained to: for fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn

from nclbayes.data.checking import number, shown
from nclbayes.errors import SettingError


def centred(net: nn.Module, scale: float | Mapping[str, float] = 1.0, *, relative: bool = True) -> Centred:
    """Independent normal weights around those that a network has now.

    A pre-trained network is a belief: that the weights of a new task are near its own. Weights that no data speak of
    stay where they are, and those that the network is sure of, relative to the others of their layer, stay nearer.

    Args:
        net: The network, whose present weights are copied.
        scale: The standard deviation: one number for all weights, or a mapping from patterns of names, such as
            ``"*.bias"``, of which the first that matches counts.
        relative: Whether the scale is in units of each layer's own spread, the root mean square of its weights;
            otherwise it is the standard deviation itself.

    Returns:
        A prior, for a :class:`~nclbayes.BayesianNetwork` of that network, or of a module that holds it.

    Raises:
        SettingError: If it is no network, or a scale is not positive.

    Example:
        >>> import torch
        >>> import nclbayes as ncl
        >>> net = torch.nn.Linear(3, 2)
        >>> model = ncl.BayesianNetwork(net, ncl.Categorical(), prior=ncl.priors.centred(net, 0.1))
        >>> prior = ncl.priors.centred(net, 0.1, relative=False)("weight", net.weight)
        >>> bool((prior.loc == net.weight).all()), prior.scale.mean()
        (True, tensor(0.1000))
    """
    return Centred(net, scale, relative=relative)


class Centred:
    """The prior that :func:`centred` makes.

    Args:
        net: The network.
        scale: The standard deviation, or those of patterns of names.
        relative: Whether it is in units of each layer's own spread.

    Example:
        >>> import torch
        >>> from nclbayes.priors import Centred
        >>> net = torch.nn.Linear(3, 2)
        >>> Centred(net, {"*": 0.5}, relative=False)("bias", net.bias).scale
        tensor([0.5000, 0.5000])
    """

    def __init__(self, net: nn.Module, scale: float | Mapping[str, float], *, relative: bool) -> None:
        network: object = net
        if not isinstance(network, nn.Module):
            raise SettingError(f"A prior is centred on a torch module, not {shown(network)}.")
        scales = scale if isinstance(scale, Mapping) else {"*": scale}
        self._scales = {
            str(pattern): number(f"The scale of '{pattern}'", value, lambda v: v > 0, "positive")
            for pattern, value in scales.items()
        }
        # The parameters themselves are held, as they are told from others by being the same.
        self._weights: dict[int, tuple[Tensor, Tensor, float]] = {}
        for module in net.modules():
            own = list(module.parameters(recurse=False))
            matrices: list[Tensor] = [parameter for parameter in own if parameter.ndim >= 2]
            for parameter in own:
                spread = _spread([parameter] if parameter.ndim >= 2 else matrices or [parameter]) if relative else 1.0
                self._weights[id(parameter)] = (parameter, parameter.detach().clone(), spread)

    def __call__(self, name: str, parameter: Tensor) -> Any:
        """The prior of one parameter.

        Args:
            name: Its name.
            parameter: The parameter, one of the network's own.

        Returns:
            A Normal with a mean for each weight, and one scale.

        Raises:
            SettingError: If it is not one of the network's, or no pattern matches its name.
        """
        if id(parameter) not in self._weights:
            raise SettingError(
                f"The parameter '{name}' is none of the network that its prior is centred on. Give it a prior of its "
                f"own, as in {{'{name}': ncl.priors.scaled(1.0), '*': ncl.priors.centred(net, ...)}}."
            )
        _, centre, spread = self._weights[id(parameter)]
        scale = next((value for pattern, value in self._scales.items() if fnmatchcase(name, pattern)), None)
        if scale is None:
            raise SettingError(
                f"No pattern of the scale ({', '.join(map(repr, self._scales))}) matches the parameter '{name}'. Add "
                "one, or '*' as the last."
            )
        return dist.Normal(centre.clone(), torch.tensor(scale * spread, dtype=centre.dtype, device=centre.device))


def _spread(parameters: list[Tensor]) -> float:
    """The root mean square of all numbers; 1 if they are all zero."""
    numbers = sum(parameter.numel() for parameter in parameters)
    squares = sum(float(parameter.detach().double().square().sum()) for parameter in parameters)
    return (squares / numbers) ** 0.5 if squares > 0 else 1.0
